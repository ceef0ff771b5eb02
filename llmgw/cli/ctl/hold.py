"""`ctl hold`: an operator's order that a facility gets nothing new, or is drained."""

from __future__ import annotations

import datetime
import re
from email.utils import parsedate_to_datetime
from typing import Final

import click

from llmgw.cli.ctl.client import Answer, segment
from llmgw.cli.ctl.output import Ctl, key, shared, table, text
from llmgw.domain.errors import Invalid

_SPAN: Final = re.compile(r"\+?(\d{1,6})(s|m|min|h|d)\Z", re.ASCII)
_SPAN_S: Final = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}


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
    end = None if until is None else _end(ctl, until)
    body = {"facility": facility, "reason": reason, "drain": drain, "until": end}
    sentence = f"facility {facility}: held{' and drained' if drain else ''}{' until ' + end if end else ''}"
    ctl.changed(ctl.client.send("POST", "holds", body), sentence)


def _end(ctl: Ctl, until: str) -> str:
    """The end as RFC 3339. A span counts from the server's own time: this machine's clock may differ."""
    from llmgw.settings.objects import parse_time

    span = _SPAN.match(until)
    if span is None:
        try:
            parse_time(until)
        except ValueError as err:
            raise click.UsageError(f"--until: {err}; or a span like 90m, 2h, 3d") from err
        return until
    seconds = int(span.group(1)) * _SPAN_S[span.group(2)]
    return (_server_time(ctl.client.get("holds")) + datetime.timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def _server_time(answer: Answer) -> datetime.datetime:
    try:
        return parsedate_to_datetime(answer.headers["date"]).astimezone(datetime.UTC)
    except (KeyError, ValueError, TypeError) as err:
        raise Invalid("the server does not tell its time: give --until as RFC 3339") from err


@hold.command()
@click.argument("facility")
@shared
def rm(ctl: Ctl, facility: str) -> None:
    """Take a hold away."""
    ctl.changed(ctl.client.send("DELETE", f"holds/{segment(facility)}"), f"facility {facility}: no longer held")
