"""`llmgw init`: the first set-up of a machine, or a way back in. Never overwrites what is there."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import click

from llmgw.cli.paths import PathOption

ROLES = ("server", "router", "agent")


@click.command()
@click.option("--config", type=PathOption(), default="/etc/llmgw/llmgw.toml", show_default=True, help="The settings file to write.")
@click.option("--role", type=click.Choice(ROLES), help="What this machine is to be.  [default: server]")
@click.option("--name", help="What it is called.  [default: the machine's host name]")
@click.option("--store", metavar="STORE", help="file, none, or s3://BUCKET/PREFIX.  [default: file]")
@click.option("--s3-endpoint", metavar="URL", help="Of an object store that is not AWS.")
@click.option("--s3-region", metavar="REGION", help="Of the object store.  [default: us-east-1]")
@click.option("--s3-credentials", metavar="WHERE", help="env, or file:PATH.  [default: env, the AWS_ variables]")
@click.option("--listen", metavar="HOST:PORT", help="Where the admin port listens, or a router.  [default: this machine only]")
@click.option("--advertise", metavar="URL", help="How other machines reach it, such as https://ctl-1.example:8081.")
@click.option("--data-dir", type=PathOption(), help="Where it keeps its state.  [default: as the role has it]")
@click.option("--bundle", type=PathOption(), help="Of `llmgw server add NAME --bundle FILE`: join that cluster, at the first start.")
@click.option("--address", metavar="HOST", help="With --bundle: where other machines reach this one.  [default: as the bundle says]")
@click.option("--new-admin-token", is_flag=True, help="Only make a new admin token: the way back after the old one was lost.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask; take what is given, and the defaults.")
def init(config: Path, role: str | None, yes: bool, new_admin_token: bool, bundle: Path | None, address: str | None, **given: Any) -> None:
    """Set this machine up: its file, the cluster's CA, the first admin token.

    A file that is there is kept, and the rest is made as it says. On a terminal it asks for what is not given.
    """
    from llmgw.wiring import setting_up

    asked = {name: value for name, value in given.items() if value is not None}
    if role is not None:
        asked["role"] = role
    if bundle is not None:
        if new_admin_token or asked.keys() - {"data_dir"}:
            raise click.UsageError("--bundle says what this machine is to be: it goes with --config, --address and --data-dir alone")
        _tell(_by_bundle(bundle, config, address or "", asked.get("data_dir")))
        return
    if address is not None:
        raise click.UsageError("--address goes with --bundle")
    if role == "agent" and "listen" in asked:
        raise click.UsageError("an agent listens nowhere: leave out --listen")
    if new_admin_token:
        if asked:
            raise click.UsageError("--new-admin-token goes with --config alone")
        _tell(setting_up.new_admin_token(config))
        return
    there = config.exists()
    if there and asked:
        raise click.UsageError(f"{config} is there and is not overwritten; edit it, and leave out {_options(asked)}")
    if not there and not yes:
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise click.UsageError("nothing was written: there is no terminal to ask on, so say --yes")
        _ask(asked)
    _tell(setting_up.set_up(config, setting_up.Wanted(**asked)))


def _by_bundle(file: Path, config: Path, address: str, data_dir: Path | None) -> list[str]:
    from llmgw.cli.ctl.files import read_bytes
    from llmgw.identity.bundle import BUNDLE_BYTES_MAX, parse_bundle
    from llmgw.wiring.join_command import prepare_by

    data = read_bytes(file, BUNDLE_BYTES_MAX, ": that is no bundle")
    return prepare_by(parse_bundle(data, str(file)), config, address, data_dir)


def _ask(asked: dict[str, Any]) -> None:
    from llmgw.wiring.setting_up import FOLDERS

    asked.setdefault("role", click.prompt("What is this machine to be", type=click.Choice(ROLES), default="server"))
    asked.setdefault("name", click.prompt("Its name", default=socket.gethostname().partition(".")[0]))
    if asked["role"] == "server":
        asked.setdefault("store", click.prompt("Its store: file, none, or s3://BUCKET/PREFIX", default="file"))
        if asked["store"].startswith("s3://") and "s3_endpoint" not in asked:
            asked["s3_endpoint"] = click.prompt("The object store's address; empty for AWS", default="", show_default=False)
        if "listen" not in asked and click.confirm("Shall other machines reach it", default=False):
            asked["listen"] = click.prompt("Where it listens", default="0.0.0.0:8081")
            asked.setdefault("advertise", click.prompt("How they reach it", default=f"https://{socket.getfqdn()}:8081"))
    asked.setdefault("data_dir", Path(click.prompt("Where it keeps its state", default=FOLDERS[asked["role"]])))


def _options(asked: dict[str, Any]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in asked)


def _tell(lines: list[str]) -> None:
    for line in lines:
        click.echo(line)
