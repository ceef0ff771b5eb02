"""What the agent's tests share: orders for the fake engine, a supervisor on a temporary directory, waiting for states."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import attrs
import trio

from llmgw.agent import facts, processes
from llmgw.agent.gpus import Absent, GpuProbe
from llmgw.agent.logs import LOG_BYTES_MAX
from llmgw.agent.supervisor import Listener, Place, Supervisor
from llmgw.domain.ids import CPU_DEVICE, NodeId, ReplicaId
from llmgw.domain.model import ModelKind, Profile
from llmgw.domain.replica import ReplicaOrder, ReplicaReport, ReplicaState, RestartPolicy
from llmgw.protocol.messages import AgentEvent
from llmgw.wiring.machine import RealMachine
from tests.programs import free_port

ENGINE = Path(__file__).parent.parent / "chaos" / "eng.py"
STATE_DEADLINE_S = 30.0  # generous: the machine may be busy; states come in a second or two
DEAF_SLEEP = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(900)"
QUICK = RestartPolicy(backoff_s=(0.1, 0.2), attempts=3, reset_after_s=600.0)


def order(mode: str = "", *, replica: str = "m1-00000001", port: int = 0, **changes: Any) -> ReplicaOrder:
    """An order for the fake engine. Fields of the order and `env`, `command`, `checkpoint` may be changed."""
    env = {"FAKE_MODE": mode, **changes.pop("env", {})}
    command = changes.pop("command", (sys.executable, str(ENGINE), "--port", "{port}"))
    profile = Profile("p", changes.pop("engine", "command"), gpus=0, command=command, env=env, checkpoint=changes.pop("checkpoint", ""))
    fields: dict[str, Any] = {
        "kind": ModelKind.CHAT,
        "devices": (CPU_DEVICE,),
        "port": port or free_port(),
        "memory_mib": 512,
        "restart": QUICK,
        "load_limit_s": 20.0,
        "progress_limit_s": 20.0,
        "stop_grace_s": 1.0,
        **changes,
    }
    return ReplicaOrder(id=ReplicaId(replica), model="m1", names=("m1", "fast"), profile=profile, **fields)


def node_of(folder: Path) -> NodeId:
    """A node for each folder: tests that run side by side must not take each other's engines for orphans of theirs."""
    return NodeId(f"node-{folder}")


class NoGpus(GpuProbe):
    async def ask(self) -> Absent:
        return Absent("none in tests")


class Bench:
    """A supervisor and everything it said."""

    def __init__(self, folder: Path, *, log_bytes_max: int = LOG_BYTES_MAX) -> None:
        node = node_of(folder)
        self.folder = folder
        self.tag = processes.node_tag(node)
        self.machine = RealMachine()
        self.reports: list[ReplicaReport] = []
        self.events: list[AgentEvent] = []
        self._told = trio.Event()
        place = Place(node, facts.boot_id(), folder, folder / "checkpoints", "127.0.0.1")
        listener = Listener(self._changed, self._event)
        self.supervisor = Supervisor(self.machine, place, listener, gpus=NoGpus(self.machine), log_bytes_max=log_bytes_max)

    def _changed(self, report: ReplicaReport) -> None:
        self.reports.append(report)
        self._tell()

    def _event(self, event: AgentEvent) -> None:
        self.events.append(event)
        self._tell()

    def _tell(self) -> None:
        self._told.set()
        self._told = trio.Event()

    async def wait(self, condition: Callable[[], object]) -> None:
        """Until the condition holds; looked at after each change."""
        with trio.fail_after(STATE_DEADLINE_S):
            while not condition():
                told = self._told
                with trio.move_on_after(0.05):
                    await told.wait()

    def report(self, replica: str = "m1-00000001") -> ReplicaReport:
        return next(report for report in self.supervisor.reports() if report.order.id == replica)

    async def wait_state(self, state: ReplicaState, replica: str = "m1-00000001") -> ReplicaReport:
        await self.wait(lambda: self.report(replica).state is state)
        return self.report(replica)

    def states(self) -> list[ReplicaState]:
        """The states reported, each once in a row."""
        found: list[ReplicaState] = []
        for report in self.reports:
            if not found or found[-1] is not report.state:
                found.append(report.state)
        return found

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]

    def ours(self) -> list[processes.Process]:
        """Every live process with a start token of this bench's node."""
        return [process for process in processes.survey() if processes.is_ours(process.token, self.tag)]


@asynccontextmanager
async def bench(folder: Path, **options: Any) -> AsyncIterator[Bench]:
    """Runs a supervisor; at the end no process of it is left, whatever the test did."""
    made = Bench(folder, **options)
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(_run, made.supervisor)
            yield made
            nursery.cancel_scope.cancel()
    finally:
        clean_up(made)


@asynccontextmanager
async def bench_that_leaves(folder: Path, **options: Any) -> AsyncIterator[Bench]:
    """Runs a supervisor whose engines live on after it."""
    made = Bench(folder, **options)
    async with trio.open_nursery() as nursery:
        await nursery.start(_run, made.supervisor)
        yield made
        nursery.cancel_scope.cancel()


async def _run(supervisor: Supervisor, task_status: trio.TaskStatus[None]) -> None:
    await supervisor.run(task_status=task_status)


def clean_up(made: Bench) -> None:
    for process in made.ours():
        processes.send_signal(process.identity, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(process.pid, 0)


def changed(order: ReplicaOrder, **changes: Any) -> ReplicaOrder:
    return attrs.evolve(order, **changes)


async def chat(url: str, key: str = "") -> int:
    """One chat completion; the status."""
    from llmgw.agent.asking import ask
    from llmgw.agent.engines.probes import probe

    request = probe(ModelKind.CHAT, "m1")
    assert request is not None
    host, _, port = url.removeprefix("http://").partition(":")
    return (await ask(host, int(port), "POST", request.path, key=key, body=request.body)).status
