"""`llmgw server`: checks the file and hands over to `wiring.server`."""

from __future__ import annotations

from pathlib import Path

import click

from llmgw.cli.paths import PathOption


@click.command()
@click.option("--config", type=PathOption(), default="/etc/llmgw/llmgw.toml", show_default=True, help="The settings file.")
def server(config: Path) -> int:
    """Run a control plane until it is told to end."""
    from llmgw.cli.files import load
    from llmgw.settings.load import Role

    loaded = load(config, Role.SERVER)
    from llmgw.wiring.server import server_main

    return server_main(loaded)
