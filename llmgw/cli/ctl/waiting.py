"""Waiting for what an order asked for: progress on a terminal, plain lines elsewhere, an end at the limit. Orders nothing."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Final

import click

from llmgw.cli.ctl.client import wait
from llmgw.cli.ctl.output import Ctl
from llmgw.cli.text import one_line, printable
from llmgw.domain.errors import TimedOut, Unavailable

LOOK_S: Final = 0.5  # between looks: a person sees it move, and a hundred waiting scripts are no load
WAIT_S: Final = 1800  # as long as an engine may load ([engines.<name>] load_limit_s)

# A model that was just changed may show what failed before the change for a moment (5 s); one that stays failed has failed.
FAILED_LOOKS: Final = 10


def waits(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds `--wait` and `--wait-limit` to a command; it gets `limit_s`, None for not waiting."""

    @functools.wraps(function)
    def merged(*args: Any, wait: bool, wait_limit: float, **kwargs: Any) -> Any:
        return function(*args, limit_s=wait_limit if wait else None, **kwargs)

    limit = click.option(
        "--wait-limit", type=click.FloatRange(0), default=WAIT_S, show_default=True, metavar="SECONDS", help="Longest --wait; exit 6 then."
    )
    return click.option("--wait", "-w", is_flag=True, help="Return when it is done, not when it is accepted.")(limit(merged))


def wait_done(look: Callable[[], str | None], limit_s: float) -> None:
    """Until `look` returns None; what it returns is how far it is. Raises TimedOut at the limit, and what `look` raises.

    The limit counts the waits between looks, so a slow control plane makes it longer, never shorter.
    """
    terminal = sys.stderr.isatty()
    told = ""
    waited_s = 0.0
    while (progress := look()) is not None:
        if progress != told:
            _show(progress, terminal)
            told = progress
        if waited_s >= limit_s:
            _end(terminal and bool(told))
            raise TimedOut(f"not done after {limit_s:g} s: {progress}", code="wait_limit")
        wait(min(LOOK_S, max(limit_s - waited_s, 0.01)))
        waited_s += LOOK_S
    _end(terminal and bool(told))


def _show(progress: str, terminal: bool) -> None:
    text = printable(one_line(progress), terminal)
    click.echo(f"\r\x1b[K{text}" if terminal else text, err=True, nl=not terminal)


def _end(moving: bool) -> None:
    if moving:
        click.echo("\r\x1b[K", err=True, nl=False)


def models_ready(ctl: Ctl, names: list[str]) -> Callable[[], str | None]:
    """Looks whether every one of these models has what it wants. Raises Unavailable when one has failed and stays so."""
    failed_looks = dict.fromkeys(names, 0)

    def look() -> str | None:
        rows = {row.get("name"): row for row in ctl.listing("models")["models"]}
        waiting = []
        for name in names:
            row = rows.get(name, {"state": "removed"})
            state = row.get("state")
            if state in ("ready", "stopped"):
                continue
            reason = f": {row['reason']}" if row.get("reason") else ""
            failed_looks[name] = failed_looks[name] + 1 if state in ("failed", "removed") else 0
            if failed_looks[name] > FAILED_LOOKS:
                raise Unavailable(f"model {name}: {state}{reason}", code="wait_failed")
            waiting.append(f"model {name}: {row.get('ready', 0)}/{row.get('replicas_wanted', 0)} {state}{reason}")
        return "; ".join(waiting) or None

    return look


def no_replicas(ctl: Ctl, of: str, name: str) -> Callable[[], str | None]:
    """Looks whether nothing of a model, or on a node, runs any more."""

    def look() -> str | None:
        rows = [row for row in ctl.listing("replicas")["replicas"] if row.get(of) == name and row.get("state") not in ("stopped", "failed")]
        if not rows:
            return None
        states = sorted({str(row.get("state")) for row in rows})
        return f"{len(rows)} {'replica' if len(rows) == 1 else 'replicas'} left ({', '.join(states)})"

    return look


def replica_gone(ctl: Ctl, name: str) -> Callable[[], str | None]:
    """Looks whether a replica has stopped or is gone."""

    def look() -> str | None:
        row = next((row for row in ctl.listing("replicas")["replicas"] if row.get("id") == name), None)
        state = None if row is None else row.get("state")
        return None if state in (None, "stopped", "failed") else f"replica {name} is {state}"

    return look
