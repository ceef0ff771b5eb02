"""`llmgw node`: machines with GPUs that join and leave. What runs on them: `llmgw ctl node`."""

from __future__ import annotations

import click

from llmgw.cli.lazy import LazyGroup, machines


@click.group(cls=LazyGroup, lazy=machines("node"))
def node() -> None:
    """Nodes, machines with GPUs: add, list, rm."""
