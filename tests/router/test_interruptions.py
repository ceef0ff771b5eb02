"""An exchange is interrupted at each of its steps, one by one: each time its task runs, and each time a callback is called.

Whatever happens there, nothing is left: no request counted, no place of a key, no connection but pooled ones, one log line.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import socket
import time
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import trio

from llmgw.domain.endpoint import Endpoint, EndpointList, ListStamp
from llmgw.domain.ids import ClusterId, EndpointId, OwnerId
from llmgw.domain.lease import FencingToken
from llmgw.domain.policy import ApiKey, Policy, RouteSettings
from llmgw.router.listener import serve
from llmgw.router.proxy import Connection
from llmgw.router.reactor import Reactor, Source
from llmgw.router.router import Router
from llmgw.router.sweeper import Kick
from llmgw.router.upstreams import Upstream
from llmgw.wiring.machine import RealMachine
from tests.router.fakes import CHAT, CHAT_S, DONE, END, FIN, GOOD_S, KEY, OK, OK_BODY, SH, WAIT_S, Client, E, Engine, answer, post

STEPS_MAX = 80  # no exchange here has so many; one that has would be looked at in part
STAMP = ListStamp(FencingToken(ClusterId("c"), 1, OwnerId("a-1")), 1)
BIG = "x" * 3_000_000  # more than the kernel takes for a client that does not read


class Steps(trio.abc.Instrument):
    """Counts the steps of exchanges from when it is armed, and interrupts at one of them."""

    def __init__(self) -> None:
        self.left = -1  # steps until the interruption; -1: not armed
        self.interrupt: Callable[[], None] = lambda: None
        self.done = False
        self.in_task = False

    def arm(self, after: int, interrupt: Callable[[], None]) -> None:
        self.left, self.interrupt = after, interrupt

    def step(self) -> None:
        if self.left < 0:
            return
        self.left -= 1
        if self.left < 0:
            self.done = True
            self.interrupt()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if task.name.endswith("_serve"):
            self.in_task = True
            self.step()
            self.in_task = False

    def disarm(self) -> None:
        self.left = -1


class Watched(Source):
    def __init__(self, source: Source, steps: Steps) -> None:
        super().__init__()
        self.source = source
        self.steps = steps

    def ready(self, events: int) -> None:
        self.steps.step()
        self.source.ready(events)

    def failed(self, error: Exception) -> None:
        self.source.failed(error)


class WatchedReactor(Reactor):
    def __init__(self, clock: Callable[[], float], steps: Steps) -> None:
        super().__init__(clock)
        self.steps = steps

    def add(self, descriptor: int, source: Source) -> None:
        super().add(descriptor, Watched(source, self.steps))

    @property
    def registered(self) -> int:
        """Connections of clients, and those to engines that were opened for a client."""
        sources = [watched.source for watched in self._sources.values() if isinstance(watched, Watched)]
        return sum(not isinstance(one, Upstream) or one.waiter is None or isinstance(one.waiter, Connection) for one in sources)


@attrs.frozen
class Scene:
    """What is asked, and how the engines play. `pooled`: a connection to the first engine stands already."""

    request: bytes
    first: list[Any]
    second: list[Any] = attrs.field(factory=lambda: [OK])
    pooled: bool = False
    dead: bool = False  # nothing listens at the first endpoint
    slow_reader: bool = False


SCENES = {
    "plain": Scene(post(CHAT), [OK]),
    "plain, pooled": Scene(post(CHAT), [OK], pooled=True),
    "stream": Scene(post(CHAT_S), GOOD_S),
    "stream, pooled": Scene(post(CHAT_S), GOOD_S, pooled=True),
    "a stream whose end comes late": Scene(post(CHAT_S), [SH, E("a"), FIN, DONE, ["w", 20], END], pooled=True),
    "second endpoint after a 500": Scene(post(CHAT), [answer(500, "{}")], pooled=True),
    "second endpoint after a refused connect": Scene(post(CHAT), [OK], dead=True),
    "second endpoint after an early end": Scene(post(CHAT_S), [["close"]]),
    "stale connection": Scene(post(CHAT), [["close"]], pooled=True),
    "a body sent in two": Scene(post(CHAT + b" " * 200_000), [OK], pooled=True),
    "a client that reads late": Scene(post(CHAT), [answer(200, BIG)], slow_reader=True),
    "an error of ours": Scene(post(b"{}"), [OK]),
}


class Played:
    """One scene on a router of its own."""

    def __init__(self, scene: Scene, first: Engine, second: Engine) -> None:
        self.scene = scene
        self.first = first
        self.second = second
        self.steps = Steps()
        self.lines: list[bytes] = []
        self.bugs: list[str] = []
        machine = RealMachine()
        self.reactor = WatchedReactor(machine.now_s, self.steps)
        key = ApiKey("user", hashlib.sha256(KEY.encode()).hexdigest(), max_parallel=3)
        policy = Policy(keys=(key,), route=RouteSettings(retries=1))
        self.router = Router(machine, policy, self.lines.append, report=self.bugs.append, reactor=self.reactor)
        self.got = b""

    async def run(self, at: int, interruption: str) -> None:
        trio.lowlevel.add_instrument(self.steps)
        try:
            await self._play(at, interruption)
        finally:
            trio.lowlevel.remove_instrument(self.steps)
        self.nothing_is_left(pooled=False)

    async def _play(self, at: int, interruption: str) -> None:
        first, second = self.first, self.second
        first.script, second.script = self.scene.first, self.scene.second
        gone = socket.create_server(("127.0.0.1", 0))
        port = gone.getsockname()[1] if self.scene.dead else first.port
        gone.close()
        one = Endpoint(EndpointId("u1"), f"http://127.0.0.1:{port}", ("m1",))
        two = Endpoint(EndpointId("u2"), f"http://127.0.0.1:{second.port}", ("m1",), priority=1)
        self.router.set_endpoints(EndpointList((one, two)), STAMP)
        with trio.fail_after(3 * WAIT_S):
            async with trio.open_nursery() as nursery:
                shown = await nursery.start(serve, self.router, "127.0.0.1:0")
                host, _, number = shown.rpartition(":")
                self.address = (host, int(number))
                if self.scene.pooled:
                    first.once = [[OK]]
                    assert OK_BODY.encode() in await self.ask(post(CHAT))
                self.lines.clear()
                served = len(self.lines)
                with trio.CancelScope() as scope:
                    self.steps.arm(at, {**self.interruptions(), "cancelled": nursery.cancel_scope.cancel}[interruption])
                    self.got = await self.ask(self.scene.request, slow=self.scene.slow_reader)
                    await self.settled()
                self.steps.disarm()
                assert not scope.cancelled_caught
                assert len(self.lines) <= served + 1
                assert (await self.ask(post(CHAT.replace(b"m1", b"nope")))).startswith(b"HTTP/1.1 404")
                nursery.cancel_scope.cancel()

    def interruptions(self) -> dict[str, Callable[[], None]]:
        return {
            "client leaves": self.leave,
            "engines die": self.die,
            "fault of ours": self.fault,
            "router stops": lambda: [connection.kick(Kick.STOPPING) for connection in list(self.router.connections)] and None,
            "time is over": lambda: [connection.kick(Kick.EXPIRED) for connection in list(self.router.connections)] and None,
            "endpoints withdrawn": lambda: self.router.set_endpoints(EndpointList(()), attrs.evolve(STAMP, generation=2)),
        }

    def leave(self) -> None:
        with contextlib.suppress(OSError):  # it has left already
            self.client.sock.shutdown(socket.SHUT_RDWR)

    def die(self) -> None:
        for engine in (self.first, self.second):
            engine.hang_up()

    def fault(self) -> None:
        if not self.steps.in_task:  # a fault in the task is an exception of the code that it runs
            raise RuntimeError

    async def ask(self, data: bytes, *, slow: bool = False) -> bytes:
        """What came until the end of the answer or of the connection; b"" when it broke."""

        client = self.client = Client(self.address)  # it stands as soon as the kernel has it

        def work() -> bytes:
            try:
                client.send(data)
                if slow:  # the router has to wait before the rest is read
                    client.sock.recv(1, socket.MSG_PEEK)
                    time.sleep(0.02)
                return _whole(client)
            except (OSError, AssertionError, ValueError):
                return b""

        try:
            return await trio.to_thread.run_sync(work, abandon_on_cancel=True)
        finally:
            with contextlib.suppress(OSError):
                client.sock.shutdown(socket.SHUT_RDWR)
            client.close()

    async def settled(self) -> None:
        while self.router.connections or any(use.in_flight for use in self.router.use().values()):
            await trio.sleep(0.002)
        self.nothing_is_left(pooled=True)

    def nothing_is_left(self, *, pooled: bool) -> None:
        assert all(use.in_flight == 0 for use in self.router.use().values())
        assert self.router.parallel.running("user") == 0
        idle = sum(len(state.idle) for state in self.router.states())
        assert self.reactor.registered == idle
        if not pooled:
            assert idle == 0


def _whole(client: Client) -> bytes:
    got = client.answer()
    return b"HTTP/1.1 %d " % got.status + got.body


INTERRUPTIONS = ("client leaves", "engines die", "fault of ours", "router stops", "time is over", "endpoints withdrawn", "cancelled")


@pytest.mark.parametrize("interruption", INTERRUPTIONS)
@pytest.mark.parametrize("name", SCENES)
async def test_an_exchange_that_is_interrupted_at_any_step_leaves_nothing_behind(name: str, interruption: str) -> None:
    for at in itertools.count():
        first, second = Engine(), Engine()
        try:
            played = Played(SCENES[name], first, second)
            await played.run(at, interruption)
        finally:
            first.close()
            second.close()
        if not played.steps.done:
            assert at > 1
            return
        assert at < STEPS_MAX
