"""Epochs of a replicated store as a control plane has them: a lease in memory, a working copy, its Litestream, writes that wait.

Order and rules are the product's; what is here carries them out, as wiring does.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import apsw
import attrs
import trio

from llmgw.domain.errors import StaleEpoch
from llmgw.replication import rules
from llmgw.replication.durable import Durability
from llmgw.replication.folders import Folder, make_folder
from llmgw.replication.litestream import Litestream
from llmgw.replication.orders import carry_out
from llmgw.replication.prefixes import prefix_of
from llmgw.replication.programs import Found
from llmgw.replication.restoring import restore
from llmgw.replication.rules import Rules, Step
from llmgw.settings.object_place import ObjectPlace
from llmgw.store.connection import FileStore, Store
from llmgw.store.rows import rows
from llmgw.wiring.machine import RealMachine

LIMIT_S = 40.0  # of a wait for a state


@attrs.define
class Lease:
    """One linearizable record, and who holds it."""

    epoch: int = 0
    tenure: str = ""
    base: str = ""

    def acquire(self) -> tuple[int, str]:
        self.epoch += 1
        self.tenure = f"{self.epoch:032x}"
        return self.epoch, self.tenure


def keep(connection: apsw.Connection, epoch: int, key: str) -> None:
    """A unit of work: a row that shows that it was written."""
    connection.execute("INSERT INTO idempotency (key, request, answer, at_wall_s) VALUES (?, ?, '', 0)", (key, str(epoch)))


def kept(connection: apsw.Connection) -> set[str]:
    return {str(key) for (key,) in rows(connection, "SELECT key FROM idempotency")}


@attrs.define(eq=False)
class Epoch:
    """What one leader has. `acknowledged` are the keys of which it has told a client that they are stored."""

    lease: Lease
    epoch: int
    tenure: str
    folder: Folder
    store: Store
    litestream: Litestream
    began_with: set[str]
    protect: Rules = rules.RULES
    acknowledged: list[str] = attrs.Factory(list)
    numbers: itertools.count[int] = attrs.Factory(itertools.count)
    durability: Durability = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.durability = Durability(self.epoch, self.litestream.sync, self.prove, self.protect)

    @property
    def prefix(self) -> str:
        return prefix_of(self.epoch, self.tenure)

    async def prove(self, epoch: int) -> None:
        await trio.lowlevel.checkpoint()
        if (self.lease.epoch, self.lease.tenure) != (epoch, self.tenure):
            raise StaleEpoch("somebody else leads", epoch=self.lease.epoch, owner="other")

    async def write(self) -> str:
        """Stored here, not yet durable; its key."""
        key = f"{self.epoch}.{next(self.numbers)}"
        await self.store.write(keep, self.epoch, key)
        return key

    async def acknowledge(self) -> str:
        """Written and durable. Raises OutcomeUnknown, StaleEpoch."""
        key = await self.write()
        await self.durability.acknowledge()
        self.acknowledged.append(key)
        return key


@asynccontextmanager
async def leading(
    machine: RealMachine, place: ObjectPlace, lease: Lease, data_dir: Path, program: Found, protect: Rules = rules.RULES
) -> AsyncIterator[Epoch]:
    """From winning the lease until the scope ends, which ends the child. Carried out in the product's order."""
    epoch, tenure = lease.acquire()
    base = lease.base
    async with AsyncExitStack() as held:
        folder = make_folder(data_dir, epoch, tenure)
        held.callback(folder.close)
        begun: list[Epoch] = []

        async def restore_base() -> None:
            if base:
                await restore(machine, place, base, folder, program=program)

        async def replicate() -> None:
            store = await FileStore.open(folder.database, machine.run_sync)
            held.callback(store.close)
            await store.claim_epoch(epoch, f"owner-{epoch}")
            litestream = Litestream(machine, place, prefix_of(epoch, tenure), folder, program=program)
            nursery = await held.enter_async_context(trio.open_nursery())
            await nursery.start(litestream.run)
            held.push_async_callback(litestream.end)
            begun.append(Epoch(lease, epoch, tenure, folder, store, litestream, await store.read(kept), protect))

        async def upload() -> None:
            await begun[0].litestream.sync()

        async def publish() -> None:
            await trio.lowlevel.checkpoint()
            if (lease.epoch, lease.tenure) == (epoch, tenure):
                lease.base = begun[0].prefix

        steps = {Step.RESTORE: restore_base, Step.REPLICATE: replicate, Step.UPLOAD: upload, Step.PUBLISH: publish}
        await carry_out(protect.take_over, steps, done={Step.ACQUIRE})
        yield begun[0]


async def restored(machine: RealMachine, place: ObjectPlace, base: str, data_dir: Path, program: Found) -> set[str]:
    """What a leader that begins from `base` now would find."""
    folder = make_folder(data_dir, 10**12, machine.fresh_hex(16))
    try:
        await restore(machine, place, base, folder, program=program)
        store = await FileStore.open(folder.database, machine.run_sync)
        try:
            return await store.read(kept)
        finally:
            store.close()
    finally:
        folder.close()


async def until(condition: object, what: str, limit_s: float = LIMIT_S) -> None:
    """Waits for a state."""
    assert callable(condition)
    with trio.move_on_after(limit_s):
        while not condition():
            await trio.sleep(0.02)
        return
    raise AssertionError(f"never came: {what}")
