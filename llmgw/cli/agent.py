"""`llmgw agent`: checks the file and hands over to `wiring.agent`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.option("--config", type=click.Path(path_type=Path), default="/etc/llmgw/llmgw.toml", show_default=True, help="The settings file.")
def agent(config: Path) -> int:
    """Run the agent of this machine until it is told to end; engines go on."""
    from llmgw.cli.files import load
    from llmgw.settings.load import Role

    loaded = load(config, Role.AGENT)
    from llmgw.wiring.agent import agent_main

    return agent_main(loaded)
