"""Engines come, move and go under load through the published list: no request fails, and nobody who was withdrawn answers one.

The control plane is the test's own, so that it knows when a withdrawal was acknowledged; the router is a real one with two workers.
The short form is part of `make test`; `make chaos` (LLMGW_CHAOS=full) churns for ten minutes under streams of up to 60 s.
"""

from __future__ import annotations

import itertools
import random
import time
from pathlib import Path

import pytest
import trio

from llmgw.domain.endpoint import Endpoint
from llmgw.domain.ids import EndpointId
from tests.chaos.followed_router import FollowedRouter, NamedEngine, start_engine
from tests.chaos.planes import FULL, MODEL, RATE, Load, figure, running_load
from tests.chaos.router_control_plane import RouterControlPlane, router_control_plane
from tests.programs import free_port

pytestmark = pytest.mark.slow

CHURN_REQUESTS = RATE * (600 if FULL else 20)
SLOTS = 12 if FULL else 5
AT_ONCE = 8 if FULL else 3  # slots that change at one time; a stream of 60 s keeps its own for as long
MOVES_MAX = 20 if FULL else 3  # an engine that has moved away is stopped at the end: who counts by id cannot tell when it is drained
ACTS = ("replace", "replace", "remove", "move")


class Fleet:
    """The engines and the list of them. `came_s` and `went_s` are by name: when it was listed, and when its end was acknowledged."""

    def __init__(self, plane: RouterControlPlane) -> None:
        self.plane = plane
        self.rng = random.Random(7)
        self.listed: dict[int, Endpoint] = {}  # by slot
        self.running: dict[int, NamedEngine] = {}
        self.moved_away: list[NamedEngine] = []
        self.came_s: dict[str, float] = {}
        self.went_s: dict[str, float] = {}
        self.acts = dict.fromkeys(("add", *ACTS), 0)
        self.ended = trio.Event()
        self._starts = itertools.count(1)
        self._limit = trio.CapacityLimiter(AT_ONCE)

    async def add(self, slot: int, port: int) -> None:
        """A new engine takes the slot and is published."""
        engine = await self._start(slot, port)
        self.came_s[engine.name] = time.monotonic()
        self.listed[slot] = engine.endpoint()
        await self._publish()

    async def churn(self, slot: int) -> None:
        """One change after another of this slot, until the end."""
        port = self.running[slot].port
        while not self.ended.is_set():
            async with self._limit:
                act = self.rng.choice(ACTS)
                if act == "move" and len(self.moved_away) >= MOVES_MAX:
                    act = "replace"
                self.acts[act] += 1
                if act == "move":
                    port = free_port()
                    await self._move(slot, port)
                    continue
                await self._withdraw(slot)
                if act == "remove":  # and a new one on a port that nobody has used
                    self.acts["add"] += 1
                    port = free_port()
                await self.add(slot, port)

    async def _withdraw(self, slot: int) -> None:
        """As the design says it: off the list, acknowledged, drained, and only then stopped."""
        engine, endpoint = self.running[slot], self.listed.pop(slot)
        self.went_s[engine.name] = await self._publish()
        await self.plane.wait_drained(endpoint.id)
        engine.kill()

    async def _move(self, slot: int, port: int) -> None:
        """The id stays, the address is another engine's; what runs at the old address ends there."""
        before, id_ = self.running[slot], self.listed[slot].id
        after = await self._start(slot, port)
        self.came_s[after.name] = time.monotonic()
        self.listed[slot] = after.endpoint(id_)
        self.went_s[before.name] = await self._publish()
        self.moved_away.append(before)

    async def _start(self, slot: int, port: int) -> NamedEngine:
        engine = await start_engine(f"e{slot}-{next(self._starts)}", MODEL, port)
        self.running[slot] = engine
        return engine

    async def _publish(self) -> float:
        """When all of the router acts on the list as it is now, on the monotonic clock."""
        return await self.plane.wait_acknowledged(await self.plane.publish(*self.listed.values()))

    def close(self) -> None:
        for engine in (*self.running.values(), *self.moved_away):
            engine.kill()


def wrong_answers(fleet: Fleet, load: Load) -> list[str]:
    """Who answered a request that was sent after its withdrawal was acknowledged, or before it was on any list."""
    found = []
    for name, told in load.told["engines"].items():
        if told["last_sent_s"] > fleet.went_s.get(name, float("inf")):
            found.append(f"{name} answered a request sent {told['last_sent_s'] - fleet.went_s[name]:.3f} s after it was withdrawn")
        if told["first_answered_s"] < fleet.came_s.get(name, float("inf")):
            found.append(f"{name} answered before it was on the list")
    return found


async def churned(fleet: Fleet, router: FollowedRouter) -> Load:
    """The load's report, once it has ended under changes of every slot."""
    with running_load(router) as load:
        async with trio.open_nursery() as nursery:
            for slot in list(fleet.running):
                nursery.start_soon(fleet.churn, slot)
            await trio.to_thread.run_sync(lambda: load.wait_more(CHURN_REQUESTS, limit_s=CHURN_REQUESTS))
            fleet.ended.set()
        await trio.to_thread.run_sync(load.end)
    return load


async def test_engines_come_move_and_go_under_load_and_no_request_fails_or_reaches_one_that_is_withdrawn(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    async with router_control_plane() as plane:
        fleet, router = Fleet(plane), FollowedRouter(tmp_path, plane)
        try:
            await plane.wait(lambda: plane.sessions, "the router follows")
            for slot in range(SLOTS):
                await fleet.add(slot, free_port())
            await router.wait_serving(MODEL)
            load = await churned(fleet, router)
            listed = {endpoint.id for endpoint in fleet.listed.values()}
            await plane.wait(lambda: not any(plane.in_flight.values()), "nothing is in flight")
            inflight = router.metrics("llmgw_inflight")
        finally:
            router.program.close()
            fleet.close()
    assert load.told["failed"] == 0, load.told["failures"]
    assert wrong_answers(fleet, load) == []
    assert set(load.told["engines"]) <= set(fleet.came_s)
    assert len(load.told["engines"]) > SLOTS, "those that came later were asked too"
    assert fleet.acts["replace"] >= 1
    assert sum(fleet.acts.values()) >= SLOTS
    assert not any(inflight.values())
    assert set(inflight) >= {f'{{endpoint="{EndpointId(known)}"}}' for known in listed}
    assert plane.asked == 0, "each delta fitted"
    figure(request, "churn: requests failed", load.counts)
    figure(request, "churn: changes of the fleet", ", ".join(f"{count} {act}" for act, count in fleet.acts.items()))
    figure(request, "churn: lists published", plane.generation)
