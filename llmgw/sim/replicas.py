"""Simulated replicas behind the agent's own port: engines that load, serve, crash and stop in simulated time.

They move only by the legal moves, restart in place by the policy they were given, send the events that real agents send, and
outlive the agent's sessions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import attrs
import trio

from llmgw.domain.errors import Broken, Conflict, LlmgwError, NotFound
from llmgw.domain.event import Level
from llmgw.domain.ids import ReplicaId
from llmgw.domain.node import Device
from llmgw.domain.ports import Machine
from llmgw.domain.replica import ReplicaOrder, ReplicaReport, ReplicaState, may_move
from llmgw.protocol.messages import AgentEvent, EngineSeen, LogChunk, LogRequest

START_S: Final = 0.05  # from the order to a process that loads
PID_FIRST: Final = 10_000
CRASHED: Final = "exited with code 1"  # as a real agent says it
LAST_LINE: Final = "simulated crash"


@attrs.frozen
class Behaviour:
    """How this node's engines behave. `crashes(order, attempt)` True: the attempt ends while loading. Seconds throughout."""

    load_s: Callable[[ReplicaOrder], float] = lambda order: 1.0
    stop_s: float = 0.1
    crashes: Callable[[ReplicaOrder, int], bool] = lambda order, attempt: False
    refuses: Callable[[ReplicaOrder], LlmgwError | None] = lambda order: None


@attrs.define
class _Running:
    report: ReplicaReport
    since_s: float
    scope: trio.CancelScope


class Serve(Protocol):
    """Serves one replica's engine at its port until cancelled; says started() when it listens. Raises OSError when it cannot."""

    async def __call__(self, report: ReplicaReport, *, task_status: trio.TaskStatus[object]) -> None: ...


class SimReplicas:
    """The `Replicas` port. `nursery` is the simulated machine's own: killing the agent leaves it alone.

    `started` and `stopped` count process starts and ends, for "no engine was restarted because we were".
    """

    def __init__(
        self,
        machine: Machine,
        nursery: trio.Nursery,
        behaviour: Behaviour,
        devices: tuple[Device, ...],
        address: str = "127.0.0.1",
        serve: Serve | None = None,
    ) -> None:
        self._machine = machine
        self._nursery = nursery
        self.behaviour = behaviour
        self._devices = devices
        self._address = address
        self._serve = serve
        self._running: dict[ReplicaId, _Running] = {}
        self._pid = PID_FIRST
        self.changed: Callable[[ReplicaReport], None] = lambda report: None
        self.event: Callable[[AgentEvent], None] = lambda event: None
        self.started = 0
        self.stopped = 0
        self.heard: list[EngineSeen] = []

    def reports(self) -> tuple[ReplicaReport, ...]:
        now_s = self._machine.now_s()
        return tuple(attrs.evolve(one.report, age_s=now_s - one.since_s) for _, one in sorted(self._running.items()))

    def devices(self) -> tuple[Device, ...]:
        used = dict.fromkeys((device.id for device in self._devices), 0)
        for one in self._running.values():
            if one.report.pid:
                for device in one.report.order.devices:
                    used[device] += -(-one.report.order.memory_mib // len(one.report.order.devices))
        return tuple(attrs.evolve(d, used_mib=d.used_mib + used[d.id], ours_mib=used[d.id]) for d in self._devices)

    async def start(self, order: ReplicaOrder) -> None:
        if order.id in self._running:
            raise Conflict(f"replica {order.id} is here already", code="exists")
        if (refusal := self.behaviour.refuses(order)) is not None:
            raise refusal
        if any(one.report.order.port == order.port and one.report.pid for one in self._running.values()):
            raise Conflict(f"port {order.port} is in use", code="port_taken")
        report = ReplicaReport(order, ReplicaState.STARTING, attempt=1, url=f"http://{self._address}:{order.port}", key=f"key-{order.id}")
        self._running[order.id] = _Running(report, self._machine.now_s(), trio.CancelScope())
        self.changed(report)
        self._begin(order.id)

    def stop(self, replica: ReplicaId, why: str, grace_s: float) -> None:
        one = self._find(replica)
        if one.report.state in (ReplicaState.STOPPED, ReplicaState.DRAINING):
            return
        one.scope.cancel()
        if one.report.state is ReplicaState.FAILED:
            self._move(replica, ReplicaState.STOPPED, why, pid=0)
            self._tell(replica, "replica.stopped", why or "stopped")
            return
        self._move(replica, ReplicaState.DRAINING, why)
        self._nursery.start_soon(self._end, replica, why)

    def restart(self, replica: ReplicaId, why: str) -> None:
        one = self._find(replica)
        if one.report.state in (ReplicaState.STOPPED, ReplicaState.DRAINING):
            raise Conflict(f"replica {replica} is {one.report.state.value}")
        one.scope.cancel()
        self._move(replica, ReplicaState.STARTING, why, attempt=one.report.attempt + 1, tries=1, failure="", pid=0, exit_code=None)
        self._tell(replica, "replica.restarting", why)
        self._begin(replica)

    async def forget(self, replica: ReplicaId) -> None:
        one = self._find(replica)
        if one.report.state not in (ReplicaState.STOPPED, ReplicaState.FAILED):
            raise Conflict(f"replica {replica} is {one.report.state.value}")
        del self._running[replica]

    def seen(self, seen: EngineSeen) -> None:
        self.heard.append(seen)

    async def log(self, request: LogRequest) -> LogChunk:
        """One line for each attempt; from where the reader is, as in a real log."""
        one = self._running.get(request.replica)
        if one is None:
            return LogChunk(request.request_id, request.attempt, 0, 0, "", (), f"replica {request.replica} is not on this node")
        attempts = tuple(range(1, one.report.attempt + 1))
        attempt = request.attempt or one.report.attempt
        if attempt not in attempts:
            return LogChunk(request.request_id, attempt, 0, 0, "", attempts, f"the log of attempt {attempt} is not kept")
        data = f"simulated engine of {one.report.order.model}, attempt {attempt}\n".encode()
        begin = max(0, len(data) + request.offset) if request.offset < 0 else min(request.offset, len(data))
        part = data[begin : begin + request.limit]
        return LogChunk(request.request_id, attempt, begin, begin + len(part), part.decode("utf-8", "replace"), attempts)

    def crash(self, replica: ReplicaId) -> None:
        """The engine dies by itself; it is restarted in place as its policy says."""
        one = self._find(replica)
        one.scope.cancel()
        if self._crashed(replica):
            self._begin(replica)

    def _find(self, replica: ReplicaId) -> _Running:
        one = self._running.get(replica)
        if one is None:
            raise NotFound(f"there is no replica {replica}", code="unknown_replica")
        return one

    def _begin(self, replica: ReplicaId) -> None:
        """A life of its own task; whoever ends it cancels its scope, which exists from now on."""
        scope = self._running[replica].scope = trio.CancelScope()
        self._nursery.start_soon(self._live, replica, scope)

    async def _live(self, replica: ReplicaId, scope: trio.CancelScope) -> None:
        """From starting to ready, through the attempts that the policy allows."""
        one = self._running[replica]
        order = one.report.order
        with scope:
            while True:
                await self._machine.sleep_until(self._machine.now_s() + order.restart.delay_s(one.report.tries) + START_S)
                self._pid += 1
                self.started += 1
                self._move(replica, ReplicaState.LOADING, "", pid=self._pid)
                await self._machine.sleep_until(self._machine.now_s() + self.behaviour.load_s(order))
                if not self.behaviour.crashes(order, one.report.attempt):
                    await self._be_ready(replica)
                    return
                if not self._crashed(replica):
                    return

    def _crashed(self, replica: ReplicaId) -> bool:
        """An attempt is over: told, and whether the policy allows another. Being ready for long forgives what was before."""
        one = self._running[replica]
        policy, attempt = one.report.order.restart, one.report.attempt
        rested = one.report.state is ReplicaState.READY and self._machine.now_s() - one.since_s >= policy.reset_after_s
        tries = 1 if rested else one.report.tries + 1
        failure = f"{CRASHED}: {LAST_LINE}"
        self.stopped += 1
        text = f"{CRASHED} on attempt {attempt}"
        if tries > policy.attempts:
            self._move(replica, ReplicaState.FAILED, CRASHED, pid=0, exit_code=1, log_tail=(LAST_LINE,), failure=failure)
            used = f"all {policy.attempts} attempts are used up"
            self._tell(replica, "replica.failed", f"{text}; {used}; last line: {LAST_LINE}", Level.ERROR)
            return False
        self._move(replica, ReplicaState.STARTING, CRASHED, pid=0, attempt=attempt + 1, tries=tries, failure=failure)
        again = f"next start in {policy.delay_s(tries):.0f} s"
        self._tell(replica, "replica.crashed", f"{text}; {again}; last line: {LAST_LINE}", Level.WARNING)
        return True

    async def _be_ready(self, replica: ReplicaId) -> None:
        """Ready, and for as long as it lives answering at its port where it serves at all."""
        one = self._running[replica]
        if self._serve is None:
            self._ready(replica)
            return
        async with trio.open_nursery() as nursery:
            try:
                await nursery.start(self._serve, one.report)
            except OSError as err:
                why = f"cannot listen: {err.strerror or err}"
                self._move(replica, ReplicaState.FAILED, why, pid=0, failure=why)
                self._tell(replica, "replica.failed", f"{why} on attempt {one.report.attempt}", Level.ERROR)
            else:
                self._ready(replica)

    def _ready(self, replica: ReplicaId) -> None:
        self._move(replica, ReplicaState.READY, "", failure="")
        self._tell(replica, "replica.ready", f"ready on attempt {self._running[replica].report.attempt}")

    async def _end(self, replica: ReplicaId, why: str) -> None:
        await self._machine.sleep_until(self._machine.now_s() + self.behaviour.stop_s)
        self.stopped += 1
        self._move(replica, ReplicaState.STOPPED, why, pid=0)
        self._tell(replica, "replica.stopped", why or "stopped")

    def _tell(self, replica: ReplicaId, kind: str, text: str, level: Level = Level.INFO) -> None:
        self.event(AgentEvent(kind, f"replica/{replica}", text, level))

    def _move(self, replica: ReplicaId, state: ReplicaState, reason: str, **changes: Any) -> None:
        one = self._running[replica]
        if state is not one.report.state and not may_move(one.report.state, state):
            raise Broken(f"{replica}: {one.report.state.value} -> {state.value} is not a legal move")
        one.report = attrs.evolve(one.report, state=state, reason=reason, **changes)
        one.since_s = self._machine.now_s()
        self.changed(attrs.evolve(one.report, age_s=0.0))
