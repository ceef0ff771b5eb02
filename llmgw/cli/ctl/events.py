"""`ctl events`: what the cluster did and why; `-f` follows the event stream and goes on after a broken connection where it was."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import click

from llmgw.cli.ctl.client import wait
from llmgw.cli.ctl.output import Ctl, echo, items, json_text, shared, text, toml_text
from llmgw.cli.text import one_line
from llmgw.domain.errors import Unavailable

PAGE: Final = 500  # events of one answer
NEWEST: Final = 50  # what is shown without --since: a screen of them
RECONNECT_S: Final = 1.0


@click.command()
@click.option("--follow", "-f", is_flag=True, help="Go on as things happen; Ctrl-C ends it.")
@click.option("--since", type=click.IntRange(0), metavar="SEQ", help=f"Those after this number.  [default: the newest {NEWEST}]")
@shared
def events(ctl: Ctl, follow: bool, since: int | None) -> None:
    """What the cluster did, and why."""
    found = _page_through(ctl, since) if since is not None else _newest(ctl)
    if not follow:
        ctl.print({"events": found}, lambda: [event_line(event) for event in found] or ["no events"])
        return
    last = max((event["seq"] for event in found if isinstance(event.get("seq"), int)), default=since or 0)
    for event in found:
        _print_one(ctl, event)
    for fresh in _follow(ctl, last):
        _print_one(ctl, fresh)


def _newest(ctl: Ctl) -> list[dict[str, Any]]:
    body = ctl.client.get("events", {"limit": NEWEST}).body
    return items(body, "events")[-NEWEST:]


def _page_through(ctl: Ctl, since: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    after = since
    while True:
        body = ctl.client.get("events", {"after": after, "limit": PAGE}).body
        page = [event for event in items(body, "events") if isinstance(event.get("seq"), int) and event["seq"] > after]
        found += page
        if len(page) < PAGE:
            return found
        after = max(event["seq"] for event in page)


def _follow(ctl: Ctl, last: int) -> Iterator[Mapping[str, Any]]:
    """Events as they come. A broken connection is made again after the last one seen; a refused token is an error."""
    told = False
    while True:
        try:
            for event in parse_stream(ctl.client.lines("events", {"Last-Event-ID": str(last)})):
                told = False
                if isinstance(event.get("seq"), int):
                    if event["seq"] <= last:
                        continue
                    last = event["seq"]
                yield event
        except Unavailable as err:
            if not told:
                click.echo(f"{err.message}; connecting again", err=True)
                told = True
        wait(RECONNECT_S)


def parse_stream(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Server-sent events whose data is a JSON object; comments and anything else are skipped."""
    data: list[str] = []
    for line in lines:
        if line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        elif not line and data:
            try:
                event = json.loads("\n".join(data))
            except ValueError:
                event = None
            data = []
            if isinstance(event, dict) and "kind" in event:
                yield event


def _print_one(ctl: Ctl, event: Mapping[str, Any]) -> None:
    if ctl.output == "json":
        echo(json_text(event), steered=False)  # an event a line, so that a program can read while it goes on
    elif ctl.output == "toml":
        echo("[[events]]\n" + toml_text(dict(event)) + "\n", steered=False)
    else:
        echo(event_line(event))


def event_line(event: Mapping[str, Any]) -> str:
    """One event for people: number, time, level where it is more than information, what about, what."""
    level = str(event.get("level") or "info")
    parts = [text(event.get("seq")).rjust(5), _time(event.get("at"))]
    if level not in ("info", "debug"):
        parts.append(level.upper())
    parts += [text(event.get("kind")), text(event.get("object")), one_line(text(event.get("text")))]
    return "  ".join(part for part in parts if part)


def _time(at: object) -> str:
    if isinstance(at, int | float) and not isinstance(at, bool):
        import datetime

        try:
            return datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%Y-%m-%d %H:%M:%SZ")
        except (ValueError, OverflowError, OSError):
            return str(at)
    return text(at)
