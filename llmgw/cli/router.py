"""`llmgw router`: hands the file's path to `wiring.router`, which reads it now and again at every change."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.option("--config", type=click.Path(path_type=Path), default="/etc/llmgw/llmgw.toml", show_default=True, help="The settings file.")
def router(config: Path) -> int:
    """Run a router by itself until it is told to end."""
    from llmgw.wiring.router import router_main

    return router_main(config)
