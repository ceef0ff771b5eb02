"""`/events`: the history in pages, or as one stream of server-sent events that a client can take up where it was cut."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

import trio

from llmgw.admin.calls import Call, Reply, Route
from llmgw.admin.errors import error_body
from llmgw.admin.limits import Limits
from llmgw.admin.views import event_view
from llmgw.control.controller import Controller
from llmgw.domain.errors import Invalid, Unavailable
from llmgw.domain.event import Event
from llmgw.store import events as rows

PAGE: Final = 100
SEQ_MAX: Final = 2**53
RETRY_MS: Final = 2_000  # how soon a browser comes back after a cut


def routes(controller: Controller, draining: trio.Event, limits: Limits) -> tuple[Route, ...]:
    async def list_or_follow(call: Call) -> Reply:
        if "text/event-stream" in call.headers.get("accept", ""):
            after = _last_seen(call)
            headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
            return Reply(
                headers=headers,
                stream=lambda: follow(controller, after, draining, limits.comment_s),
                content_type="text/event-stream; charset=utf-8",
            )
        limit = call.integer("limit", PAGE, 1, rows.PAGE_MAX)
        if "object" in call.query:
            found = await rows.latest_of(controller.store, call.query["object"], limit)
            return Reply({"events": [event_view(event) for event in found], "next": found[-1].seq if found else 0})
        if "after" in call.query or "cursor" in call.query:
            after_seq = call.integer("after" if "after" in call.query else "cursor", 0, 0, SEQ_MAX)
            found = await rows.after(controller.store, after_seq, limit)
        else:
            after_seq = 0
            found = await rows.latest(controller.store, limit)
        last = found[-1].seq if found else after_seq
        return Reply({"events": [event_view(event) for event in found], "next": last})

    query = {
        "after": "events above this seq, the oldest first; without it the newest",
        "cursor": "the same, as in other lists",
        "object": "only the newest of this object, such as replica/ID; as a page",
        "limit": f"at most {rows.PAGE_MAX}",
    }
    summary = "The history: a page, or with Accept: text/event-stream a stream (Last-Event-ID goes on after that one)"
    return (Route("GET", "/api/v1/events", list_or_follow, summary, query=query),)


def _last_seen(call: Call) -> int | None:
    """After which event a stream goes on; None: from now."""
    text = call.headers.get("last-event-id", "").strip()
    if not text:
        return call.integer("after", 0, 0, SEQ_MAX) if "after" in call.query else None
    if not (text.isascii() and text.isdigit() and len(text) < 17):
        raise Invalid(f"Last-Event-ID is the seq of an event, not {text[:40]!r}", param="Last-Event-ID")
    return int(text)


async def follow(controller: Controller, after: int | None, draining: trio.Event, comment_s: float) -> AsyncGenerator[bytes, None]:
    """Events as they come, after those that the client missed. Ends with an error event when we stop or it lags too far behind."""
    yield f"retry: {RETRY_MS}\n\n".encode()
    with controller.events.follow() as live:  # opened before the backlog is read, so that nothing falls between them
        last = 0 if after is None else after
        if after is not None:
            async with aclosing(_backlog(controller, after)) as backlog:
                async for event in backlog:
                    last = event.seq
                    yield _frame(event)
        while True:
            what = await _next(live, draining, comment_s)
            if isinstance(what, Event):
                if what.seq > last:
                    last = what.seq
                    yield _frame(what)
            elif what == "silence":
                yield b": still here\n\n"
            elif what == "draining":
                yield _error("shutting_down", "this control plane is stopping; connect again")
                return
            else:
                yield _error("too_slow", "this client read too slowly and was cut off; connect again with Last-Event-ID")
                return


async def _backlog(controller: Controller, after: int) -> AsyncGenerator[Event, None]:
    while True:
        try:
            found = await rows.after(controller.store, after, rows.PAGE_MAX)
        except Unavailable:
            found = tuple(event for event in controller.events.recent(after) or ())
        for event in found:
            after = event.seq
            yield event
        if len(found) < rows.PAGE_MAX:
            return


async def _next(live: trio.MemoryReceiveChannel[Event], draining: trio.Event, comment_s: float) -> Event | str:
    """The next event, or why there is none now: `silence`, `draining` or `lagging`."""
    found: list[Event | str] = []

    async def drained() -> None:
        await draining.wait()
        found.append("draining")
        nursery.cancel_scope.cancel()

    with trio.move_on_after(comment_s):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(drained)
            try:
                found.append(await live.receive())
            except trio.EndOfChannel:
                found.append("lagging")
            nursery.cancel_scope.cancel()
    return found[0] if found else "silence"


def _frame(event: Event) -> bytes:
    return f"id: {event.seq}\ndata: {json.dumps(event_view(event))}\n\n".encode()


def _error(code: str, message: str) -> bytes:
    body: dict[str, Any] = error_body("unavailable", code, message)
    return f"event: error\ndata: {json.dumps(body)}\n\n".encode()
