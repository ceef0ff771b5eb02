"""`ctl hold`: an operator's order that a facility gets nothing new, or is drained."""

from __future__ import annotations

import click

from llmgw.cli.ctl.client import segment
from llmgw.cli.ctl.output import Ctl, key, shared, table, text
from llmgw.cli.ctl.times import time_after


@click.group()
def hold() -> None:
    """Holds: a facility gets nothing new, or is drained."""


@hold.command("list")
@shared
def list_holds(ctl: Ctl) -> None:
    """Every hold with its reason and end."""
    body = ctl.listing("holds")
    ctl.print(body, lambda: table(body["holds"], _COLUMNS, "no holds"))


_COLUMNS = (
    ("FACILITY", key("facility")),
    ("DRAIN", lambda row: "yes" if row.get("drain") else ""),
    ("UNTIL", lambda row: text(row.get("until")) or "taken away"),
    ("AUTHOR", key("author")),
    ("REASON", key("reason")),
)


@hold.command()
@click.argument("facility")
@click.option("--reason", required=True, help="Why, for whoever asks.")
@click.option("--until", help="When it ends: RFC 3339 with a zone, or from now: 90m, 2h, 3d.  [default: when it is taken away]")
@click.option("--drain", is_flag=True, help="Also move off what runs there.")
@shared
def add(ctl: Ctl, facility: str, reason: str, until: str | None, drain: bool) -> None:
    """Place nothing new in a facility."""
    end = None if until is None else time_after(ctl, "--until", until, "holds")
    body = {"facility": facility, "reason": reason, "drain": drain, "until": end}
    sentence = f"facility {facility}: held{' and drained' if drain else ''}{' until ' + end if end else ''}"
    ctl.changed(ctl.client.send("POST", "holds", body), sentence)


@hold.command()
@click.argument("facility")
@shared
def rm(ctl: Ctl, facility: str) -> None:
    """Take a hold away."""
    ctl.changed(ctl.client.send("DELETE", f"holds/{segment(facility)}"), f"facility {facility}: no longer held")
