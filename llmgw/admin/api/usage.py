"""`/usage`: who used how much, summed by key, by model or by hour."""

from __future__ import annotations

from typing import Any, Final

from llmgw.admin.calls import PAGED, Call, Reply, Route, page
from llmgw.admin.views import time_text
from llmgw.control.controller import Controller
from llmgw.domain.errors import Invalid
from llmgw.domain.usage import HOUR_MAX, HOUR_S, UsageRow
from llmgw.settings.objects import parse_time
from llmgw.store import usage as usage_rows
from llmgw.store.usage import By

DAYS_SHOWN: Final = 30  # without `since`: about a month
_BY: Final = {by.value: by for by in By}
_ONE_OF: Final = '"key", "model" or "hour", or "key,model" for both'


def routes(controller: Controller) -> tuple[Route, ...]:
    async def show(call: Call) -> Reply:
        asked = call.query.get("by", By.KEY_AND_MODEL.value)
        if (by := _BY.get(asked)) is None:
            raise Invalid(f"usage is summed by {_ONE_OF}; not by {asked[:40]!r}", param="by")
        now_s = controller.machine.wall_s()
        since = _hour(call, "since", int(now_s) - DAYS_SHOWN * 86_400)
        until = _hour(call, "until", HOUR_MAX)
        if until <= since:
            raise Invalid("until must be later than since", param="until")
        found = await usage_rows.sums(controller.store, by, since, until)
        reply = page(call, "usage", [_view(row, by) for row in found], lambda row: "\0".join(str(row.get(name, "")) for name in _NAMES))
        assert isinstance(reply.data, dict)
        until_text = time_text(until) if until < HOUR_MAX else None
        return Reply({**reply.data, "total": _counts(found), "by": by.value, "since": time_text(since), "until": until_text})

    query = {
        "by": f"{_ONE_OF}; by both without it",
        "since": f"hours that begin then or later: RFC 3339 with a zone; the last {DAYS_SHOWN} days without it",
        "until": "hours that begin before; up to now without it",
        **PAGED,
    }
    return (Route("GET", "/api/v1/usage", show, "Who used how much, as the engines counted it", query=query),)


_NAMES: Final = ("hour", "key", "model")


def _hour(call: Call, name: str, default: int) -> int:
    """The first hour that begins then or later. Raises Invalid."""
    seconds: float = default
    if (text := call.query.get(name)) is not None:
        try:
            seconds = parse_time(text)
        except ValueError as err:
            raise Invalid(f"{name}: {err}", param=name) from err
    return min(HOUR_MAX, max(0, -int(-seconds // HOUR_S) * HOUR_S))


def _view(row: UsageRow, by: By) -> dict[str, Any]:
    names: dict[str, Any] = {"hour": time_text(row.hour), "key": row.key, "model": row.model}
    return {**{name: names[name] for name in by.value.split(",")}, **_counts((row,))}


def _counts(found: tuple[UsageRow, ...]) -> dict[str, int]:
    return {
        "requests": sum(row.requests for row in found),
        "unknown": sum(row.unknown for row in found),
        "prompt_tokens": sum(row.prompt for row in found),
        "cached_tokens": sum(row.cached for row in found),
        "completion_tokens": sum(row.completion for row in found),
    }
