"""`llmgw join`: lets this machine into a cluster by a join token, which is read and never an argument: `ps` shows those to everybody."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from llmgw.cli.paths import PathOption

TOKEN_READ_MAX = 65_536


@click.command()
@click.option("--token-file", type=PathOption(), help="The file that holds the join token.  [default: standard input]")
@click.option("--config", type=PathOption(), default="/etc/llmgw/llmgw.toml", show_default=True, help="The settings file, made or amended.")
@click.option("--name", help="What this machine is called.  [default: the token's, else the host name]")
@click.option(
    "--address",
    metavar="HOST",
    help="Where other machines reach this one: engines listen there, a control plane needs it.  [default: this machine only]",
)
@click.option("--data-dir", type=PathOption(), help="Where it keeps its state.  [default: as the file has it]")
@click.option("--ca", type=PathOption(), help="Further CAs (PEM), where control planes have certificates of their own.")
def join(token_file: Path | None, config: Path, name: str | None, address: str | None, data_dir: Path | None, ca: Path | None) -> None:
    """Join a cluster, as `llmgw node add`, `router add` or `server add` has printed it."""
    from llmgw.identity.join_tokens import parse_token
    from llmgw.wiring.join_command import join_by

    token = parse_token(_read(token_file))
    for line in join_by(token, config, name or "", address or "", data_dir, str(ca.absolute()) if ca else ""):
        click.echo(line)


def _read(token_file: Path | None) -> str:
    if token_file is not None:
        from llmgw.cli.ctl.files import read_bytes

        return read_bytes(token_file, TOKEN_READ_MAX, ": that is no join token").decode("utf-8", "replace")
    if sys.stdin.isatty():
        return str(click.prompt("Join token", hide_input=True))
    return sys.stdin.read(TOKEN_READ_MAX)
