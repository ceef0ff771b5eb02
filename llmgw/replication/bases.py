"""What an operator does at the bucket while nobody leads: a file made the first copy of a new epoch, and a copy named as the base.

Everything goes through the lease's record: it is watched until nobody can be leading, and the new base is named by one
compare-and-set on exactly the record that was seen, under a higher epoch, as released. Whoever has taken the lease meanwhile, or
comes late with an older epoch, wins or is refused; nothing is half done.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

import structlog
import trio

from llmgw.domain.errors import Broken, Conflict, Invalid, LlmgwError, Unavailable
from llmgw.domain.ids import ClusterId, OwnerId, holder_name
from llmgw.domain.ports import Machine
from llmgw.lease.record import NUMBER_MAX, RANDOM_BYTES, ROLE, LeaseRecord, RecordState
from llmgw.lease.store import LeaseStore, Lost, Unknown
from llmgw.lease.timings import LeaseTimings
from llmgw.replication import prefixes
from llmgw.replication.folders import make_folder
from llmgw.replication.litestream import Litestream
from llmgw.replication.prefix_store import PrefixStore
from llmgw.settings.object_place import ObjectPlace
from llmgw.store import meta
from llmgw.store.connection import FileStore, Use

EPOCH_STEP: Final = 1_000  # above whatever leaders of before may have reached that nobody here has heard of (R-B30)
UPLOAD_S_MAX: Final = 600.0  # of the first upload of a store; one of some MB takes a second
READ_BACK: Final = 3  # looks at the record after a write of unknown outcome
log = structlog.get_logger("llmgw.replication")


def next_epoch(known: Collection[int]) -> int:
    """Above every epoch in `known`, with room. Raises Invalid where there is none left."""
    epoch = max(known, default=0) + EPOCH_STEP
    if epoch > NUMBER_MAX:
        raise Invalid(f"epoch {max(known)} is too high to begin another one above it", code="epoch_too_high")
    return epoch


async def wait_unled(
    machine: Machine, leases: LeaseStore, timings: LeaseTimings, *, used: bool, told: Callable[[str], None]
) -> LeaseRecord | None:
    """The record once nobody can be leading: it is released, or has stood unchanged for its time and the margins.

    `used` False: a place that nobody has used needs no waiting where there is no record. `told` hears what is waited for.
    Raises Conflict where somebody leads, Unavailable, Invalid.
    """
    first = await _read(leases)
    since_s = machine.now_s()
    if (first is None and not used) or (first is not None and first.released):
        return first
    wait_s = timings.wait_s(timings.ttl_s if first is None else first.ttl_s)
    who = "somebody" if first is None else f"{holder_name(first.owner)} (epoch {first.epoch})"
    told(f"waiting {wait_s:.0f} s to see whether {who} still leads")
    while True:
        await machine.sleep_until(machine.now_s() + timings.poll_s)
        found = await _read(leases)
        if found is not None and (first is None or found.write_id != first.write_id):
            if found.released:
                return found
            raise leads(found)
        if machine.now_s() - since_s >= wait_s:
            return found


def leads(record: LeaseRecord) -> Conflict:
    at = f" at {record.addr}" if record.addr else ""
    return Conflict(
        f"{holder_name(record.owner)}{at} leads under epoch {record.epoch}: end every control plane of the cluster first", code="leads"
    )


def released_record(
    machine: Machine, before: LeaseRecord | None, cluster_id: str, epoch: int, base: str, ttl_s: float, settings_version: int = 0
) -> LeaseRecord:
    """What the lease says when nobody leads and `base` is what the next leader begins with."""
    draw = machine.fresh_hex(RANDOM_BYTES)
    return LeaseRecord(
        ClusterId(cluster_id),
        epoch,
        OwnerId(f"operator-{draw[:8]}"),
        tenure=draw,
        write_id=machine.fresh_hex(RANDOM_BYTES),
        boot_id="",
        seq=1 if before is None else before.seq + 1,
        ttl_s=ttl_s if before is None else before.ttl_s,
        state=RecordState.RELEASED,
        base=base,
        settings_version=settings_version,
    )


async def name_base(machine: Machine, leases: LeaseStore, before: LeaseRecord | None, new: LeaseRecord, timings: LeaseTimings) -> None:
    """Writes `new` where `before` stands. Raises Conflict where something else does, Unavailable where it is not known what does."""
    try:
        await leases.replace(ROLE, before, new)
    except Lost as err:
        if err.current != new:
            raise _overtaken(err.current) from err
    except Unknown as err:
        for _ in range(READ_BACK):
            await machine.sleep_until(machine.now_s() + timings.retry_s)
            try:
                found = await leases.read(ROLE)
            except Unknown:
                continue
            if found == new:
                return
            if found != before:
                raise _overtaken(found) from err
        raise Unavailable(
            f"it is not known whether the new base is named, the store answered: {err.why}; `llmgw store status` shows what stands there",
            code="outcome_unknown",
        ) from err


def _overtaken(found: LeaseRecord | None) -> Conflict:
    if found is None:
        return Conflict("the lease's record was removed meanwhile; nothing was changed", code="leads")
    return Conflict(f"{holder_name(found.owner)} has taken the lease meanwhile (epoch {found.epoch}); nothing was changed", code="leads")


async def _read(leases: LeaseStore) -> LeaseRecord | None:
    try:
        return await leases.read(ROLE)
    except Unknown as err:
        raise Unavailable(f"the lease cannot be read: {err.why}", code="lease_unavailable") from err


async def upload(machine: Machine, place: ObjectPlace, source: Path, data_dir: Path, cluster_id: str, epoch: int) -> str:
    """The prefix under which `source`, a checked copy that may be changed, now stands in the bucket, as the first copy of `epoch`.

    Nobody begins from it before the lease names it. Raises Invalid, Unavailable; nothing is left of it then, where that can be.
    """
    tenure = machine.fresh_hex(RANDOM_BYTES)
    prefix = prefixes.prefix_of(epoch, tenure)
    folder = await machine.run_sync(lambda: make_folder(data_dir, epoch, tenure))
    try:
        await machine.run_sync(lambda: source.rename(folder.database))
        store = await FileStore.open(folder.database, machine.run_sync, Use.WORKING)
        try:
            await store.claim_epoch(epoch, f"operator-{tenure[:8]}")
            if await meta.ensure_cluster_id(store, epoch, cluster_id) != cluster_id:
                raise Broken("a copy of another cluster is made the base of this one")
            keeper = Litestream(machine, place, prefix, folder)
            async with trio.open_nursery() as nursery:
                await nursery.start(keeper.run)
                await _sync(machine, keeper)
                await keeper.end()
        finally:
            store.close()
    except BaseException:  # re-raised: only what nobody will read is taken away
        with trio.CancelScope(shield=True):
            await remove_prefix(machine, place, prefix)
        raise
    finally:
        folder.close()
        with trio.CancelScope(shield=True):
            await machine.run_sync(lambda: shutil.rmtree(folder.path, ignore_errors=True))
    return prefix


async def _sync(machine: Machine, keeper: Litestream) -> None:
    """As long as it may take: one try of a large store's first upload is over before it is."""
    until_s = machine.now_s() + UPLOAD_S_MAX
    while True:
        try:
            return await keeper.sync()
        except Unavailable:
            if keeper.report.needs_repair or machine.now_s() >= until_s:
                raise


async def remove_prefix(machine: Machine, place: ObjectPlace, prefix: str) -> None:
    """One that the lease has never named; what cannot be removed stays, and is told."""
    store = PrefixStore(place)

    def work() -> None:
        if (seen := store.look(prefix)) is not None:
            store.remove(seen, lambda: True)

    try:
        await machine.run_sync(work)
    except LlmgwError as err:
        log.warning("a copy that nobody needs is left in the bucket", prefix=prefix, why=err.message)
