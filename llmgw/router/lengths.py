"""Asks engines how many tokens their models take at most, for our own /v1/models. vLLM and SGLang tell it; nobody waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import Any, Final

import msgspec
import trio

from llmgw.domain.ports import Machine
from llmgw.router.asking import NoAnswer, ask
from llmgw.router.sweeper import Waiter
from llmgw.router.upstreams import EndpointState, Unreachable

PATH: Final = b"/v1/models"
TICK_S: Final = 1.0
AGAIN_S: Final = 60.0  # chosen: an engine that was started anew with another length is believed within a minute
PER_S_MAX: Final = 20  # measured: one costs 0.4 ms, with its connection, so that this is a hundredth of a core; more endpoints wait longer
FIRST_SHARE: Final = 1 / 30  # of the time between two looks, after a failure: 2 s as a rule; doubled with each
LIMIT_S: Final = 5.0
PARALLEL_MAX: Final = 16
BODY_MAX: Final = 1024 * 1024  # bytes
LENGTH_MAX: Final = 2**40


class _Row(msgspec.Struct):
    id: Any = None
    max_model_len: Any = None


class _List(msgspec.Struct):
    data: list[_Row] = []


_DECODER: Final = msgspec.json.Decoder(_List)


def lengths_of(text: bytes) -> dict[str, int]:
    """`max_model_len` by the engine's own names; empty where it tells none, or tells nonsense."""
    try:
        rows = _DECODER.decode(text).data
    except (msgspec.DecodeError, RecursionError):
        return {}
    return {
        row.id: row.max_model_len
        for row in rows
        if isinstance(row.id, str) and type(row.max_model_len) is int and 0 < row.max_model_len <= LENGTH_MAX
    }


class _Due:
    """When an endpoint is asked next. `running`: it is being asked, or waits for its turn to be."""

    __slots__ = ("at_s", "failures", "running")

    def __init__(self, at_s: float) -> None:
        self.at_s = at_s
        self.failures = 0
        self.running = False


async def learn_forever(machine: Machine, states: Callable[[], Iterable[EndpointState]], report: Callable[[Exception], None]) -> None:
    """Keeps `lengths` of all endpoints true within `again_s` of their number. `report` is told of a fault of ours."""
    known: dict[EndpointState, _Due] = {}
    limiter = trio.CapacityLimiter(PARALLEL_MAX)
    async with trio.open_nursery() as nursery:
        while True:
            now_s = machine.now_s()
            listed = list(states())
            for gone in known.keys() - set(listed):
                del known[gone]
            for state in listed:
                due = known.get(state)
                if due is None:
                    due = known[state] = _Due(now_s)
                if due.at_s <= now_s and not due.running:
                    due.running = True
                    nursery.start_soon(_learn, machine, state, due, again_s(len(listed)), limiter, report)
            await machine.sleep_until(now_s + TICK_S)


def again_s(endpoints: int) -> float:
    """Seconds from one look at an endpoint to the next, with so many to ask."""
    return max(AGAIN_S, endpoints / PER_S_MAX)


async def _learn(
    machine: Machine, state: EndpointState, due: _Due, every_s: float, limiter: trio.CapacityLimiter, report: Callable[[Exception], None]
) -> None:
    """Raises nothing but Cancelled."""
    lasting = False
    found: dict[str, int] | None = None
    try:
        async with limiter:
            with trio.move_on_after(LIMIT_S):
                found = lengths_of(await _text(machine, state))
    except NoAnswer as err:
        lasting = err.lasting
    except (OSError, Unreachable):
        pass
    except Exception as err:
        report(err)
    finally:
        due.running = False
    if found is not None:
        state.lengths = MappingProxyType(found)
    due.failures = 0 if found is not None else due.failures + 1
    wait_s = every_s if found is not None or lasting else min(every_s * FIRST_SHARE * 2.0 ** min(due.failures - 1, 30), every_s)
    due.at_s = machine.now_s() + wait_s * (1 + machine.rng.random() / 4)  # so that those of one list do not stay together


async def _text(machine: Machine, state: EndpointState) -> bytes:
    waiter = Waiter()
    upstream = await state.connect(machine, waiter)
    parts: list[bytes] = []
    try:
        await ask(upstream, waiter, PATH, parts.append, BODY_MAX)
    finally:
        upstream.close()
    return b"".join(parts)
