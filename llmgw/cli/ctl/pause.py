"""`ctl pause` and `ctl resume`: roll-outs, moves and scaling stand still meanwhile; routing and restarts in place go on."""

from __future__ import annotations

import click

from llmgw.cli.ctl.output import Ctl, shared


@click.command()
@click.option("--reason", default="", metavar="TEXT", help="Why, for whoever asks.")
@shared
def pause(ctl: Ctl, reason: str) -> None:
    """Freeze roll-outs, moves and scaling. Routing goes on, and engines that fail are restarted in place."""
    answer = ctl.client.send("POST", "pause", {"reason": reason})
    sentence = "paused until `llmgw ctl resume`"
    if isinstance(answer.body, dict) and answer.body.get("change") == "unchanged":
        stands = answer.body.get("pause") or {}
        by, why = stands.get("author") or "", stands.get("reason") or ""
        sentence = "it was paused already" + (f" by {by}" if by else "") + (f": {why}" if why else "") + "; nothing was changed"
    ctl.changed(answer, sentence)


@click.command()
@shared
def resume(ctl: Ctl) -> None:
    """End a pause."""
    answer = ctl.client.send("DELETE", "pause")
    there = not isinstance(answer.body, dict) or answer.body.get("change") != "unchanged"
    ctl.changed(answer, "resumed" if there else "there was no pause")
