"""A router with two workers through everything at once: aborts, slow readers, engines that die, lists that change, a worker killed.

`make soak REQUESTS=1000000` runs it at length; the short form is part of `make test`. What is allowed to fail is counted by cause:
requests in a worker that was killed, and streams of an engine that was. All else is a fault: a wrong byte, another status, a count
that does not come back to zero, a descriptor that is left, memory that grows.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import cattrs
import pytest
import trio

from benchmarks.router.tools import KEY, Figures, body_hash, built
from llmgw.domain.endpoint import Endpoint
from llmgw.domain.ids import EndpointId
from tests.chaos.followed_router import FollowedRouter, NamedEngine, start_engine
from tests.chaos.hash_engine import events
from tests.chaos.planes import figure
from tests.chaos.router_control_plane import RouterControlPlane, router_control_plane
from tests.programs import children_of, free_port, skip, wait_for
from tests.soak import readers as slow
from tests.soak.seen import (
    GROWTH_MIB_MAX,
    MIB,
    SAMPLE_S,
    SAMPLES_MIN,
    Memory,
    client_ports,
    descriptors,
    grown_mib,
    surplus,
)

REQUESTS = int(os.environ.get("LLMGW_SOAK_REQUESTS", "20000"))
WARM_UP_REQUESTS = 2000
CONNECTIONS = 32
ABORT_EVERY = 3  # a third, at once or after the first chunk
READERS = 6
FAST, HEAVY = 4, 3  # engines of the bulk of requests, and of the slow readers' streams
LIST_S = 0.1
ENGINE_KILLS = max(4, REQUESTS // 20_000)
WORKER_KILLS = max(1, REQUESTS // 100_000)
WORKERS_JUDGED_MIN = 2  # one that lived all the time, and one that came for a killed one or lived long enough before
STEADY_S = 65.0  # a worker that dies sooner than 60 s after its start is started later, and who waits at its port is turned away
LOOK_S = 0.25


@attrs.define(eq=False)
class Fast:
    """One of the compiled engines. It may be dead for a while; its endpoint does not change by that."""

    id: EndpointId
    port: int
    process: subprocess.Popen[str]

    def endpoint(self) -> Endpoint:
        return Endpoint(self.id, f"http://127.0.0.1:{self.port}", ("m",))

    def answer(self) -> bytes:
        """The body of one, straight from it."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("POST", "/v1/chat/completions", b'{"model":"m","messages":[]}')
        body = connection.getresponse().read()
        connection.close()
        return body

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)
        if self.process.stdout is not None:
            self.process.stdout.close()


def start_fast(port: int) -> subprocess.Popen[str]:
    process = subprocess.Popen([built("engine"), "--port", str(port)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "listening\n"
    return process


class Soak:
    """Everything that runs, and what is done to it. `counts` is told at the end."""

    def __init__(self, plane: RouterControlPlane, router: FollowedRouter) -> None:
        self.plane, self.router = plane, router
        self.rng = random.Random(11)
        self.fast: list[Fast] = []
        self.heavy: list[NamedEngine] = []
        self.readers = slow.Readers(router.port)
        self.memory = Memory()
        self.lost = 0  # connections of the load that a killed worker held
        self.engine_kills = self.worker_kills = 0
        self.over = False
        self._starts = itertools.count(1)

    async def start_engines(self) -> None:
        for number in range(FAST):
            port = free_port()
            self.fast.append(Fast(EndpointId(f"f{number}"), port, start_fast(port)))
        for number in range(HEAVY):
            self.heavy.append(await self._start_heavy(number, free_port()))
        await self.plane.wait_acknowledged(await self.plane.publish(*self.endpoints()))

    async def _start_heavy(self, number: int, port: int) -> NamedEngine:
        options = ("--step", "0.003", "--size", str(slow.EVENT_BYTES))
        return await start_engine(f"h{number}-{next(self._starts)}", slow.MODEL, port, *options, key="key-of-the-heavy")

    def endpoints(self) -> list[Endpoint]:
        heavy = [one.endpoint(EndpointId(f"h{number}")) for number, one in enumerate(self.heavy)]
        return [*(one.endpoint() for one in self.fast), *heavy]

    async def change_lists(self) -> None:
        """Another one each `LIST_S`: one of each kind is left out, weights change. Nobody is refused for lack of an engine."""
        while not self.over:
            await trio.sleep(LIST_S)
            every = self.endpoints()
            out = {self.rng.choice(every[:FAST]).id, self.rng.choice(every[FAST:]).id}
            left = [attrs.evolve(one, weight=self.rng.choice((0.5, 1.0, 2.0))) for one in every if one.id not in out]
            await self.plane.publish(*left)

    async def take_samples(self) -> None:
        while not self.over:
            self.memory.sample(children_of(self.router.program.process.pid))
            await trio.sleep(SAMPLE_S)

    async def kill_by_and_by(self) -> None:
        """Engines and workers, spread over the requests. One engine of each kind at most is dead at a time."""
        engines_at = [REQUESTS * (number + 1) / (ENGINE_KILLS + 1) for number in range(ENGINE_KILLS)]
        workers_at = [REQUESTS * (number + 1) / (WORKER_KILLS + 1) for number in range(WORKER_KILLS)]
        worker_started_s = -STEADY_S
        while not self.over:
            await trio.sleep(LOOK_S)
            asked = await trio.to_thread.run_sync(self.asked)
            if engines_at and asked >= engines_at[0]:
                engines_at.pop(0)
                await self._kill_an_engine()
            if workers_at and asked >= workers_at[0] and time.monotonic() - worker_started_s > STEADY_S:
                workers_at.pop(0)
                worker_started_s = time.monotonic()
                await self._kill_the_youngest_worker()

    def asked(self) -> float:
        return sum(self.router.metrics("llmgw_requests_total").values())

    async def _kill_an_engine(self) -> None:
        """One of either kind in turn."""
        self.engine_kills += 1
        if self.engine_kills % 2:
            one = self.rng.choice(self.fast)
            one.kill()
            await trio.sleep(self.rng.uniform(0.0, 1.0))
            one.process = start_fast(one.port)
            return
        number = self.rng.randrange(HEAVY)
        dead = self.heavy[number]
        self.readers.killed.add(dead.name)
        dead.kill()
        await trio.sleep(self.rng.uniform(0.0, 1.0))
        self.heavy[number] = await self._start_heavy(number, dead.port)

    async def _kill_the_youngest_worker(self) -> None:
        """It and the load are stopped before, so that whose requests die with it is known to the last one."""
        self.worker_kills += 1
        worker = children_of(self.router.program.process.pid)[-1]
        loads = [one for one in children_of(os.getpid()) if one.exe() == str(built("load"))]
        for one in (*loads, worker):
            one.suspend()
        held = client_ports(worker, self.router.port)
        self.readers.lost_ports |= held & self.readers.open_ports
        self.lost += len(held - self.readers.open_ports)
        worker.send_signal(signal.SIGKILL)
        for one in loads:
            one.resume()

    async def load(self, requests: int, wanted: str) -> Figures:
        options = ["--connections", CONNECTIONS, "--requests", requests, "--abort-every", ABORT_EVERY, "--hash", wanted, "--resend", 0]
        command = [built("load"), "--port", str(self.router.port), "--key", KEY, *map(str, options)]
        done = await trio.run_process(command, capture_stdout=True)
        return cattrs.structure(json.loads(done.stdout), Figures)

    async def wait_idle(self) -> None:
        """Until no client is connected to any worker, and none holds more to an engine than what it asks that for its load over."""

        def left() -> list[str]:
            return [one for worker in children_of(self.router.program.process.pid) for one in surplus(worker, self.router.port)]

        try:
            await trio.to_thread.run_sync(lambda: wait_for(lambda: not left(), "no connection is left"))
        except AssertionError as err:
            raise AssertionError(f"connections are left: {left()}") from err

    async def descriptors(self) -> list[list[str]]:
        """Of each worker, once two looks agree: asking an engine for its load opens one for a moment."""
        workers, looks = children_of(self.router.program.process.pid), [[["not looked yet"]]]

        def agree() -> bool:
            looks.append([descriptors(worker) for worker in workers])
            return looks[-1] == looks[-2]

        await trio.to_thread.run_sync(lambda: wait_for(agree, "two looks at the descriptors agree"))
        return looks[-1]

    def close(self) -> None:
        self.router.program.close()
        for one in (*self.fast, *self.heavy):
            one.kill()


@asynccontextmanager
async def soaking(folder: Path) -> AsyncIterator[Soak]:
    async with router_control_plane() as plane:
        soak = Soak(plane, FollowedRouter(folder, plane))
        try:
            await plane.wait(lambda: plane.sessions, "the router follows")
            await soak.start_engines()
            await soak.router.wait_serving("m")
            yield soak
        finally:
            soak.close()


@pytest.mark.slow
async def test_a_router_comes_through_everything_at_once_without_a_wrong_byte_and_with_nothing_left(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if sys.platform != "linux" or shutil.which("cc") is None:
        skip("there is no C compiler")
    async with soaking(tmp_path) as soak:
        wanted = body_hash(soak.fast[0].answer())
        warm = await soak.load(WARM_UP_REQUESTS, wanted)
        assert warm.errors == 0, warm.error
        await soak.wait_idle()
        before = await soak.descriptors()

        begun_s = time.monotonic()
        async with trio.open_nursery() as nursery:
            for act in (soak.change_lists, soak.take_samples, soak.kill_by_and_by):
                nursery.start_soon(act)
            async with trio.open_nursery() as reading:
                for number in range(READERS):
                    reading.start_soon(soak.readers.read, number, lambda: soak.over)
                loads = [await soak.load(REQUESTS, wanted)]
                while not soak.worker_kills or len(soak.memory.grown_mib()) < WORKERS_JUDGED_MIN:
                    loads.append(await soak.load(WARM_UP_REQUESTS, wanted))  # a fast machine has served all before a worker is old enough
                soak.over = True
        took_s = time.monotonic() - begun_s

        generation = await soak.plane.publish(*soak.endpoints())
        await soak.plane.wait_acknowledged(generation)
        await soak.wait_idle()
        await soak.plane.wait(lambda: not any(soak.plane.in_flight.values()), "nothing is in flight")
        inflight = soak.router.metrics("llmgw_inflight")
        after = await soak.descriptors()
        with soak.router.program.log.open(errors="replace") as log:  # a line for each request
            tracebacks = [line for line in log if "Traceback" in line]
    reading_ends = {end.value: count for end, count in soak.readers.ends.items()}
    grown = soak.memory.grown_mib()
    served, aborted = sum(one.requests for one in loads), sum(one.aborted for one in loads)
    cut = sum(one.cut for one in loads)
    figure(request, "soak: requests", f"{served + aborted:,} in {took_s:.0f} s, {aborted:,} of them aborted")
    figure(request, "soak: cut with a killed worker", f"{cut} of {soak.lost} that it held, {soak.worker_kills} workers killed")
    figure(request, "soak: slow streams", f"{reading_ends}, {soak.readers.bytes / MIB:,.0f} MiB, {soak.engine_kills} engines killed")
    figure(request, "soak: lists", soak.plane.generation)
    figure(request, "soak: memory of workers, MiB at last and its growth", memory_told(soak.memory, grown))

    assert [one.error for one in loads if one.errors != one.cut] == []
    assert cut <= soak.lost
    assert served + aborted + cut == REQUESTS + (len(loads) - 1) * WARM_UP_REQUESTS
    assert soak.readers.failed == 0, soak.readers.failures
    assert soak.readers.ends[slow.End.WHOLE] > READERS
    assert soak.engine_kills >= 1
    assert set(inflight) == {f'{{endpoint="{endpoint.id}"}}' for endpoint in soak.endpoints()}
    assert not any(inflight.values()), inflight
    assert after == before
    assert max(grown.values()) <= GROWTH_MIB_MAX, grown
    assert tracebacks == []
    assert soak.plane.asked == 0, "each delta fitted"


def memory_told(memory: Memory, grown: dict[int, float]) -> str:
    told = [f"{samples[-1] / MIB:.1f} ({grown[pid]:+.1f})" for pid, samples in memory.samples.items() if pid in grown]
    return ", ".join(told)


def test_memory_that_grows_with_every_request_is_seen_and_a_heap_that_has_warmed_up_is_not() -> None:
    warm = [min(20 + number, 40) * MIB + number % 3 * MIB // 10 for number in range(10 * SAMPLES_MIN)]
    leaks = [30 * MIB + number * MIB // 10 for number in range(10 * SAMPLES_MIN)]
    assert grown_mib(warm) <= GROWTH_MIB_MAX < grown_mib(leaks)


EXPECTED = b"".join(events("long", "s", 3, "h0-1"))
FIRST = next(events("long", "s", 3, "h0-1"))
ERROR = b'data: {"error":{"message":"the engine broke off"}}\n\n'
RESET = "ConnectionResetError"


@pytest.mark.parametrize(
    ("got", "broken", "left", "lost", "killed", "end"),
    [
        pytest.param(EXPECTED, "", False, False, False, slow.End.WHOLE, id="whole"),
        pytest.param(EXPECTED[:-1], "", False, False, True, None, id="ended early without a word"),
        pytest.param(EXPECTED.replace(b"h0-1", b"h0-2", 1), "", False, False, True, None, id="an event of another engine"),
        pytest.param(FIRST[:9], "", True, False, False, slow.End.ABORTED, id="left"),
        pytest.param(b"x" + FIRST, "", True, False, False, None, id="left after a wrong byte"),
        pytest.param(FIRST + ERROR, "", False, False, True, slow.End.WITH_ITS_ENGINE, id="its engine was killed"),
        pytest.param(FIRST + ERROR, "", False, False, False, None, id="an error of an engine that lives"),
        pytest.param(FIRST + ERROR, "", True, False, False, None, id="left after an error of an engine that lives"),
        pytest.param(FIRST + ERROR + b"data: [DONE]\n\n", "", False, False, True, None, id="an error and an end"),
        pytest.param(b"x" + FIRST + ERROR, "", False, False, True, None, id="a wrong byte before an error"),
        pytest.param(FIRST, RESET, False, True, False, slow.End.WITH_ITS_WORKER, id="its worker was killed"),
        pytest.param(FIRST, RESET, False, False, True, None, id="broken under a worker that lives"),
        pytest.param(b"x" + FIRST, RESET, False, True, False, None, id="a wrong byte of a worker that was killed"),
    ],
)
def test_a_stream_may_end_early_by_a_known_cause_only(
    got: bytes, broken: str, left: bool, lost: bool, killed: bool, end: slow.End | None
) -> None:
    assert slow.judged(got, EXPECTED, broken, left=left, worker_lost=lost, engine_killed=killed) is end
