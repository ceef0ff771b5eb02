"""`llmgw server`: checks the file and hands over to `wiring.server`; and the control planes that join and leave."""

from __future__ import annotations

from pathlib import Path

import click

from llmgw.cli.lazy import LazyGroup, machines
from llmgw.cli.lean import leave_rich_out
from llmgw.cli.paths import PathOption


@click.group(cls=LazyGroup, lazy=machines("server"), invoke_without_command=True)
@click.option("--config", type=PathOption(), default="/etc/llmgw/llmgw.toml", show_default=True, help="The settings file.")
@click.pass_context
def server(ctx: click.Context, config: Path) -> int | None:
    """Run a control plane until it is told to end; or with add, list, rm: the cluster's control planes."""
    if ctx.invoked_subcommand is not None:
        return None
    leave_rich_out()
    from llmgw.cli.files import load
    from llmgw.settings.load import Role

    loaded = load(config, Role.SERVER)
    from llmgw.wiring.server import server_main

    return server_main(loaded)
