"""Control planes that compete for one lease on simulated machines, with a `LeaseWork` that records what it is asked to do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import attrs
import trio

from llmgw.domain.ids import ClusterId, owner_id
from llmgw.lease.keeper import LeaseKeeper, Term
from llmgw.lease.state import Candidate
from llmgw.lease.timings import LeaseTimings
from llmgw.sim.lease_store import Bucket, SimLeases, SimLock, SimLockClient
from llmgw.sim.machine import SimMachine

DATA = Path("/data")
EPOCH = DATA / "epoch"
OWNER = DATA / "owner.json"
PLACE = "/store/lease.db"
STEP_S = 0.05  # between two looks of a test at what it waits for
PATIENCE_S = 400.0  # simulated; a test that waits longer has failed

BeforeWarm = Callable[[Term], Awaitable[None]]


@attrs.define(eq=False)
class Work:
    """Beats while it runs. `before_warm` and `before_end` run inside of what the keeper calls."""

    seen: list[tuple[Any, ...]] = attrs.Factory(list)
    before_warm: BeforeWarm | None = None
    before_end: BeforeWarm | None = None

    async def warm(self, term: Term) -> None:
        self.seen.append(("warm", term.epoch, term.owner))
        if self.before_warm is not None:
            await self.before_warm(term)
        self.seen.append(("warmed", term.epoch))

    async def end(self, term: Term, fenced: bool) -> None:
        if self.before_end is not None:
            await self.before_end(term)
        self.seen.append(("end", term.epoch, fenced))


class Plane:
    """One control plane's process: its machine, its way to the store and its keeper."""

    def __init__(self, world: Candidates, number: int, **options: Any) -> None:
        self.world = world
        self.machine = options.pop("machine", None) or SimMachine(100 * number + world.seed, booted_s=1000.0 * number)
        self.leases = SimLeases(self.machine, world.bucket)
        self.lock = SimLockClient(world.lock) if world.one_machine else None
        self.work = Work()
        self.beats = True
        me = {"cluster_id": ClusterId("c"), "boot_id": "boot" if world.one_machine else f"boot-{number}", "one_machine": world.one_machine}
        known_epoch = options.pop("known_epoch", 0)
        timings = options.pop("timings", LeaseTimings())
        self.keeper = LeaseKeeper(
            self.machine,
            self.leases,
            Candidate(owner=owner_id(f"ctl-{number}", self.machine.fresh_hex(8)), **(me | options)),
            timings,
            self.work,
            DATA,
            lock=self.lock,
            place=PLACE,
            known_epoch=known_epoch,
        )
        self.scope = trio.CancelScope()
        self.ended = trio.Event()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with self.scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._beat)
                await self.keeper.run(task_status)
                nursery.cancel_scope.cancel()
        self.ended.set()

    async def _beat(self) -> None:
        while True:
            await self.machine.sleep_until(self.machine.now_s() + 1.0)
            if self.beats:
                self.keeper.beat()

    async def kill(self) -> None:
        """As SIGKILL: nothing leaves it any more, the kernel drops its lock, and its tasks end."""
        self.machine.kill()
        self.leases.cut = True
        if self.lock is not None:
            self.lock.die()
        self.scope.cancel()
        await self.ended.wait()

    @property
    def confirmed(self) -> bool:
        return self.keeper.confirmed(self.machine.now_s())

    @property
    def leads(self) -> bool:
        return self.keeper.is_leader


class Candidates:
    def __init__(self, nursery: trio.Nursery, *, one_machine: bool = False, seed: int = 1) -> None:
        self.nursery = nursery
        self.seed = seed
        self.one_machine = one_machine
        self.bucket = Bucket(trio.current_time)
        self.lock = SimLock()
        self.planes: list[Plane] = []

    async def start(self, **options: Any) -> Plane:
        plane = Plane(self, len(self.planes) + 1, **options)
        self.planes.append(plane)
        await self.nursery.start(plane.run)
        return plane

    async def start_leader(self, **options: Any) -> Plane:
        plane = await self.start(**({"store_is_new": True} | options))
        await self.wait(lambda: plane.confirmed)
        return plane

    async def wait(self, condition: Callable[[], bool]) -> float:
        """Seconds until it holds."""
        begun_s = trio.current_time()
        while not condition():
            assert trio.current_time() - begun_s < PATIENCE_S, [(plane.keeper.view.phase, plane.keeper.record) for plane in self.planes]
            await trio.sleep(STEP_S)
        return trio.current_time() - begun_s

    async def hold(self, condition: Callable[[], bool], for_s: float) -> None:
        """It holds all that time."""
        end_s = trio.current_time() + for_s
        while trio.current_time() < end_s:
            assert condition(), [(plane.keeper.view.phase, plane.keeper.record) for plane in self.planes]
            await trio.sleep(STEP_S)
