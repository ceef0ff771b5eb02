"""`llmgw node`: machines with GPUs that join and leave. What runs on them: `llmgw ctl node`."""

from __future__ import annotations

import click

from llmgw.cli.machines import add_commands


@click.group()
def node() -> None:
    """Nodes, machines with GPUs: add, list, rm."""


add_commands(node, "agent", "a node")
