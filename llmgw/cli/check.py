"""`llmgw check FILE`: every fault of a settings file, each with its path. Starts nothing, writes nothing."""

from __future__ import annotations

import time
from pathlib import Path

import click

from llmgw.cli.paths import PathOption


@click.command()
@click.argument("file", type=PathOption(), default="/etc/llmgw/llmgw.toml")
@click.option(
    "--role", type=click.Choice(["server", "router", "agent", "dev"]), help="Also what this role needs and what has no effect there."
)
def check(file: Path, role: str | None) -> None:
    """Tell every fault of FILE (by default /etc/llmgw/llmgw.toml); exit 3 when there are any."""
    from llmgw.cli.files import load, warn
    from llmgw.settings.load import Role, expired

    loaded = load(file, Role(role) if role else None)
    warn(file, expired(loaded.keys, time.time()))
    held = [
        f"{count} {noun if count == 1 else plural}"
        for count, noun, plural in (
            (len(loaded.given - {"model", "auth.key", "endpoint"}), "key", "keys"),
            (len(loaded.models), "model", "models"),
            (len(loaded.keys), "client key", "client keys"),
            (len(loaded.endpoints), "endpoint", "endpoints"),
        )
        if count
    ]
    click.echo(f"{file}: fine{' (' + ', '.join(held) + ')' if held else ' (it sets nothing: everything is at its default)'}")
