"""`ctl leader`: who leads, and handing over."""

from __future__ import annotations

import click

from llmgw.cli.ctl.output import Ctl, details, shared


@click.group()
def leader() -> None:
    """Who leads the cluster."""


@leader.command()
@shared
def show(ctl: Ctl) -> None:
    """The leader, its epoch and its powers."""
    body = ctl.object("leader")
    ctl.print(body, lambda: details(body))


@leader.command("hand-over")
@click.option("--force", is_flag=True, help="Also on a lone control plane, where nobody takes over.")
@shared
def hand_over(ctl: Ctl, force: bool) -> None:
    """Release the lease; the process stays on as a standby."""
    answer = ctl.client.send("POST", "leader/hand-over", {"force": force})
    ctl.changed(answer, "leadership is being handed over; `llmgw ctl leader show` tells who leads")
