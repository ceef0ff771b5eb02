"""Asks engines for their load, each once a second as a rule, and sets it at the endpoint where choosing looks. Decides nothing.

Only where a model has several endpoints, on connections of its own: a poll takes none from requests, never touches a breaker,
and what it cannot find out is unknown, which is no reason not to choose an endpoint. No request waits for one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

from llmgw.domain.ports import Machine
from llmgw.router.asking import NoAnswer, ask
from llmgw.router.engine_load import POLL_S, LoadText, again_s, engine_load, period_s
from llmgw.router.sweeper import Waiter
from llmgw.router.upstreams import EndpointState, Unreachable, Upstream

TICK_S: Final = 0.2  # between looks at who is due; a poll is late by that at most
POLL_LIMIT_S: Final = POLL_S  # an answer that comes later than the next question is of no use
PARALLEL_MAX: Final = 64  # chosen: a thousand engines that answer within 30 ms are all asked in half a period
BODY_MAX: Final = 1024 * 1024  # bytes; an engine's text has 20 to 200 KB
PATH: Final = b"/metrics"

Report = Callable[[EndpointState, Exception], None]


class _Poll:
    """One endpoint, and when it is asked next. `running`: it is being asked, or waits for its turn to be; `scope` bounds the asking."""

    __slots__ = ("due_s", "failures", "running", "scope", "state", "upstream")

    def __init__(self, state: EndpointState, due_s: float) -> None:
        self.state = state
        self.due_s = due_s
        self.failures = 0  # in a row
        self.running = False
        self.scope: trio.CancelScope | None = None
        self.upstream: Upstream | None = None

    def close(self) -> None:
        if self.upstream is not None:
            self.upstream.close()
            self.upstream = None

    def forget(self) -> None:
        """The endpoint is not asked any more."""
        self.state.polled = False
        self.state.engine_load = None
        if self.scope is not None:
            self.scope.cancel()  # its task closes the connection itself
        else:
            self.close()


async def poll_forever(machine: Machine, wanted: Callable[[], tuple[EndpointState, ...]], report: Report) -> None:
    """Keeps `engine_load` of the `wanted` fresh. `report` is told of a poll that failed by our own fault."""
    polls: dict[EndpointState, _Poll] = {}
    seen: tuple[EndpointState, ...] = ()
    limiter = trio.CapacityLimiter(PARALLEL_MAX)
    try:
        async with trio.open_nursery() as nursery:
            while True:
                now_s = machine.now_s()
                if (states := wanted()) is not seen:
                    _follow(polls, states, machine, now_s)
                    seen = states
                for poll in polls.values():
                    if poll.due_s <= now_s and not poll.running:
                        poll.running = True
                        nursery.start_soon(_poll, machine, poll, period_s(len(polls)), limiter, report)
                await machine.sleep_until(now_s + TICK_S)
    finally:
        for poll in polls.values():
            poll.close()


def _follow(polls: dict[EndpointState, _Poll], states: tuple[EndpointState, ...], machine: Machine, now_s: float) -> None:
    """New ones are spread over a period, so that a thousand of them are never due at once."""
    for gone in polls.keys() - set(states):
        polls.pop(gone).forget()
    for state in states:
        if state not in polls:
            polls[state] = _Poll(state, now_s + machine.rng.random() * period_s(len(states)))
            state.polled = True


async def _poll(machine: Machine, poll: _Poll, every_s: float, limiter: trio.CapacityLimiter, report: Report) -> None:
    """One question, in its turn. Raises nothing but Cancelled: what one engine answers is no reason to ask the others no more."""
    try:
        async with limiter:
            if poll.state.polled:
                await _poll_now(machine, poll, every_s, report)
    finally:
        poll.running = False


async def _poll_now(machine: Machine, poll: _Poll, every_s: float, report: Report) -> None:
    state = poll.state
    sent_s = machine.now_s()
    own = state.in_flight
    found: tuple[int, int] | None = None
    lasting = False
    try:
        with trio.move_on_after(POLL_LIMIT_S) as poll.scope:
            found = await _ask(machine, poll)
    except (OSError, Unreachable):
        pass
    except NoAnswer as err:
        lasting = err.lasting
    except Exception as err:
        report(state, err)
        lasting = True
    finally:
        poll.scope = None
        if found is None:
            poll.close()
    if not state.polled:  # it left the list meanwhile
        poll.close()
        return
    if found is None:
        poll.failures += 1
        state.engine_load = None
        poll.due_s = sent_s + again_s(poll.failures, every_s, lasting=lasting)
        return
    poll.failures = 0
    poll.due_s = sent_s + every_s
    state.engine_load = engine_load(*found, max(own, state.in_flight), sent_s, every_s)


async def _ask(machine: Machine, poll: _Poll) -> tuple[int, int]:
    """Running and waiting. Keeps the connection where the engine does. Raises OSError, Unreachable, NoAnswer."""
    waiter = Waiter()
    if poll.upstream is not None and not poll.upstream.fresh():
        poll.close()
    if poll.upstream is None:
        poll.upstream = await poll.state.connect(machine, waiter)
    text = LoadText()
    reusable = await ask(poll.upstream, waiter, PATH, text.feed, BODY_MAX)
    found = text.load()
    if found is None:
        raise NoAnswer(lasting=True)
    if not reusable:
        poll.close()
    return found
