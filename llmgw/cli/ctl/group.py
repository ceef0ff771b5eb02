"""The group `llmgw ctl`: its nouns, each loaded when it is called, and the options they share."""

from __future__ import annotations

from typing import Final

import click

from llmgw.cli.lazy import LazyGroup

NOUNS: Final = {
    "status": ("llmgw.cli.ctl.status:status", "Who leads, what is ready, what is wrong."),
    "config": (
        "llmgw.cli.ctl.config:config",
        "Cluster settings: show, get, set, unset, edit, check, apply, history, diff, rollback.",
    ),
    "pause": ("llmgw.cli.ctl.pause:pause", "Freeze roll-outs, moves and scaling."),
    "resume": ("llmgw.cli.ctl.pause:resume", "End a pause."),
    "model": ("llmgw.cli.ctl.model:model", "Models: list, show, apply, rm, scale, engine, restart."),
    "replica": ("llmgw.cli.ctl.replica:replica", "Replicas: list, show, logs, drain, restart."),
    "node": ("llmgw.cli.ctl.node:node", "Nodes: list, show, cordon, drain, resume, label."),
    "hold": ("llmgw.cli.ctl.hold:hold", "Orders that a facility gets nothing new: list, add, rm."),
    "usage": ("llmgw.cli.ctl.usage:usage", "Who used how much, by key, model or hour."),
    "key": ("llmgw.cli.ctl.key:key", "Keys of clients: create, list, show, update, revoke."),
    "events": ("llmgw.cli.ctl.events:events", "What the cluster did, and why."),
    "explain": ("llmgw.cli.ctl.explain:explain", "Why a replica or a model is as it is."),
    "leader": ("llmgw.cli.ctl.leader:leader", "Who leads: show, hand-over."),
}


@click.group(cls=LazyGroup, lazy=NOUNS)
@click.option("--server", default="", metavar="URL", help="The control plane's admin API.  [default: found on this machine]")
@click.option("--output", "-o", type=click.Choice(("table", "json", "toml")), help="How to print.")
@click.pass_context
def ctl(ctx: click.Context, server: str, output: str | None) -> None:
    """Talk to a control plane.

    The server and its token come from --server and LLMGW_TOKEN (LLMGW_CA: a file of certificates to check it by); else from
    ~/.config/llmgw/ctl.toml (server, token, ca); else, on this machine, from a running `llmgw dev` or the control plane's
    admin-token file.
    """
    from llmgw.cli.ctl.output import Asked

    ctx.obj = Asked(server, output or "")
