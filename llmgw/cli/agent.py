"""`llmgw agent`: checks the file and hands over to `wiring.agent`."""

from __future__ import annotations

from pathlib import Path

import click

from llmgw.cli.lean import leave_rich_out
from llmgw.cli.paths import PathOption


@click.command()
@click.option("--config", type=PathOption(), default="/etc/llmgw/llmgw.toml", show_default=True, help="The settings file.")
@click.option("--stop-engines", is_flag=True, help="Stop the engines in order when the agent ends; by default they go on.")
def agent(config: Path, stop_engines: bool) -> int:
    """Run the agent of this machine until it is told to end; engines go on."""
    leave_rich_out()
    from llmgw.cli.files import load
    from llmgw.settings.load import Role

    loaded = load(config, Role.AGENT)
    from llmgw.wiring.agent import agent_main

    return agent_main(loaded, stop_engines=stop_engines)
