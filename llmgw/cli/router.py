"""`llmgw router`: checks the file and hands its path to `wiring.router`, which reads it again at every change."""

from __future__ import annotations

from pathlib import Path

import click

from llmgw.cli.paths import PathOption


@click.command()
@click.option("--config", type=PathOption(), default="/etc/llmgw/llmgw.toml", show_default=True, help="The settings file.")
def router(config: Path) -> int:
    """Run a router by itself until it is told to end."""
    from llmgw.cli.files import load
    from llmgw.settings.load import Role

    load(config, Role.ROUTER)
    from llmgw.wiring.router import router_main

    return router_main(config)
