"""`llmgw router`: checks the file and hands its path to `wiring.router`, which reads it again at every change; and who joins and leaves."""

from __future__ import annotations

from pathlib import Path

import click

from llmgw.cli.lazy import LazyGroup, machines
from llmgw.cli.lean import leave_rich_out
from llmgw.cli.paths import PathOption


@click.group(cls=LazyGroup, lazy=machines("router"), invoke_without_command=True)
@click.option("--config", type=PathOption(), default="/etc/llmgw/llmgw.toml", show_default=True, help="The settings file.")
@click.option("--worker", type=int, default=None, hidden=True, help="The descriptor of the pipe to the parent of several workers.")
@click.pass_context
def router(ctx: click.Context, config: Path, worker: int | None) -> int | None:
    """Run a router by itself until it is told to end; or with add, list, rm: the routers on machines of their own."""
    if ctx.invoked_subcommand is not None:
        return None
    leave_rich_out()
    if worker is not None:
        from llmgw.wiring.worker import worker_main

        return worker_main(worker)
    from llmgw.cli.files import load
    from llmgw.settings.load import Role

    load(config, Role.ROUTER)
    from llmgw.wiring.router import router_main

    return router_main(config)
