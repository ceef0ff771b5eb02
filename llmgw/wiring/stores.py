"""Which store a control plane has, as its file says: a private one, one that the processes of a machine share, or a replicated one.

For each: how it is opened, of which cluster it is, where the cluster's tokens lie, and with what its control planes compete for
the lease.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import attrs
import structlog
import trio

from llmgw import __version__
from llmgw.control.leadership import Candidacy
from llmgw.domain.errors import Invalid, LlmgwError, StaleEpoch, Unavailable
from llmgw.domain.ids import ClusterId, OwnerId
from llmgw.domain.ports import Machine
from llmgw.lease.file import LEASE_FILE, LOCK_FILE, FileLeases, FileLock, boot_id
from llmgw.lease.object_leases import ObjectLeases
from llmgw.lease.record import RANDOM_BYTES, ROLE, LeaseRecord, RecordState
from llmgw.lease.state import Candidate
from llmgw.lease.store import Lost, Unknown
from llmgw.lease.timings import LeaseTimings
from llmgw.replication.litestream_replica import LitestreamReplica
from llmgw.replication.replicated_store import ReplicatedStore, has_copy
from llmgw.settings.object_place import ObjectPlace
from llmgw.settings.schema import LeaseSettings, Settings
from llmgw.store import meta, migrations
from llmgw.store.connection import FileStore, Store, StoreBusy
from llmgw.wiring.identity_files import joined_cluster

PRIVATE_STORE: Final = "state.db"  # without [store]: nodes, events and holds of this control plane alone
CLUSTER_ROLE: Final = "cluster"  # a record that is written once, for its cluster id: of two first starts both read the same
CLUSTER_ID_BYTES: Final = 8
LOOK_S_MAX: Final = 5.0  # a start that has something to show waits no longer for an object store
ASK_AGAIN_S: Final = 2.0  # an object store that does not answer yet
log = structlog.get_logger("llmgw.server")

T = TypeVar("T")
Compete = Callable[[OwnerId, str, LeaseSettings], Awaitable[Candidacy]]


@attrs.frozen
class OpenStore:
    """`tokens` is the folder of the tokens that agents and control planes have for each other. `alone`: nobody else can compete.

    `compete(owner, address, lease)` is with what; `run`, where it is given, runs for as long as the store is used.
    """

    store: Store
    cluster_id: ClusterId
    tokens: Path
    alone: bool
    compete: Compete
    run: Callable[..., Awaitable[None]] | None = None


async def open_store(machine: Machine, settings: Settings, held: ExitStack, cluster: str = "") -> OpenStore:
    """What `held` closes at the end. A store that is new becomes that of `cluster`, or of a fresh one.

    Waits for a store that another process keeps locked, or that does not answer yet. Raises
    Invalid, Unavailable for all that a person must repair.
    """
    data_dir = settings.server.data_path
    fresh = cluster or f"c-{machine.fresh_hex(CLUSTER_ID_BYTES)}"
    if settings.store is None:
        return await _private(machine, data_dir, fresh, held)
    if (data_dir / PRIVATE_STORE).exists():
        log.warning("there is a store of a time without [store], which is not read any more", file=str(data_dir / PRIVATE_STORE))
    path = settings.store_path
    assert path is not None, "a store has a path"
    if settings.store.replica:
        return await _replicated(machine, ObjectPlace.of(settings.store), data_dir, path, settings.lease, fresh, held)
    return await _shared(machine, path, data_dir, fresh, held)


async def _private(machine: Machine, data_dir: Path, fresh: str, held: ExitStack) -> OpenStore:
    store, facts, cluster_id = await _open_file(machine, data_dir / PRIVATE_STORE, fresh, held)

    async def compete(owner: OwnerId, address: str, lease: LeaseSettings) -> Candidacy:
        return Candidacy.sole(cluster_id, owner, data_dir, facts.epoch)

    return OpenStore(store, cluster_id, data_dir, True, compete)


async def _shared(machine: Machine, path: Path, data_dir: Path, fresh: str, held: ExitStack) -> OpenStore:
    store, facts, cluster_id = await _open_file(machine, path, fresh, held)

    async def compete(owner: OwnerId, address: str, lease: LeaseSettings) -> Candidacy:
        new = facts.cluster_id is None
        me = Candidate(cluster_id, owner, boot_id(), address, __version__, migrations.SCHEMA, one_machine=True, store_is_new=new)
        candidacy, leases = file_candidacy(machine, path, data_dir, me, lease, facts.epoch)
        held.callback(leases.close)
        await leases.check()
        return candidacy

    return OpenStore(store, cluster_id, path.parent, False, compete)


def file_candidacy(
    machine: Machine, store: Path, data_dir: Path, me: Candidate, lease: LeaseSettings, known_epoch: int
) -> tuple[Candidacy, FileLeases]:
    """With what control planes of one machine compete for the lease beside their store; the caller closes the second.

    Raises Invalid for timings that do not fit together, and for a network file system.
    """
    leases = FileLeases(machine, store.with_name(LEASE_FILE))
    timings = LeaseTimings.of(lease.ttl_s, lease.renew_s, lease.poll_s)
    lock = FileLock(machine, store.with_name(LOCK_FILE))
    return Candidacy(me, leases, data_dir, lock, timings, str(leases.file.path), known_epoch), leases


async def _open_file(machine: Machine, path: Path, fresh: str, held: ExitStack) -> tuple[Store, meta.Meta, ClusterId]:
    """The facts are those from before the cluster's id was made."""
    told = False
    while True:
        try:
            store = await FileStore.open(path, machine.run_sync)
        except StoreBusy as err:
            if not told:
                log.warning("the store cannot be opened yet; waiting for it", why=err.message)
            told = True
        else:
            if told:
                log.info("the store can be opened", file=str(path))
            held.callback(store.close)
            break
    facts = await meta.load(store)
    return store, facts, await _cluster_id(store, facts, fresh)


async def _cluster_id(store: Store, facts: meta.Meta, fresh: str) -> ClusterId:
    """The store's, made when it has none. Another control plane that starts at the same instant may make it, and lead, meanwhile."""
    while facts.cluster_id is None:
        with contextlib.suppress(StaleEpoch):
            await meta.ensure_cluster_id(store, facts.epoch, fresh)
        facts = await meta.load(store)
    return facts.cluster_id


# --- on an object store


async def _replicated(
    machine: Machine, place: ObjectPlace, data_dir: Path, seed: Path, lease: LeaseSettings, fresh: str, held: ExitStack
) -> OpenStore:
    """`seed` is the file whose rows the first leader begins with, where there is one."""
    replica = LitestreamReplica(machine, place, data_dir, seed)
    await replica.check_program()
    await machine.run_sync(place.read_credentials)
    leases = ObjectLeases(machine, place, LeaseTimings.of(lease.ttl_s, lease.renew_s, lease.poll_s))
    read = partial(ReplicatedStore.begin, machine, replica, data_dir, str(place))
    waiting = _Waiting(machine, place)
    known, found = await _cluster_read_last(read, data_dir), _Found()
    if known is not None:  # what was read last is better than to wait
        with trio.move_on_after(LOOK_S_MAX):
            found = await _look(leases)
        if not found.answered:
            log.warning("the object store cannot be used yet; what was read last is shown", place=str(place), why=found.why)
    else:
        await waiting.until(leases.check)
        found = _Found(True, await waiting.until(partial(leases.read, ROLE)))
    record = found.record
    member = known or await machine.run_sync(lambda: joined_cluster(machine, data_dir))
    if record is not None and member not in (None, record.cluster_id):
        raise Invalid(
            f"store.replica: the lease at {place} is of cluster {record.cluster_id}, and this control plane is one of {member}",
            param="store.replica",
            code="foreign_cluster",
        )
    if record is not None:
        cluster_id = record.cluster_id
    elif not found.answered:
        assert known is not None, "else it was waited for"
        cluster_id = known
    else:
        if member is not None:
            # To begin here would take every model and key from the cluster.
            raise Invalid(
                f"store.replica: this control plane is one of cluster {member}, of which nothing is at {place}: is that where the other"
                " control planes have their store? (`llmgw store adopt`, where its lease was removed)",
                param="store.replica",
            )
        await waiting.until(replica.check_unused)
        of_seed = await machine.run_sync(replica.seed_cluster_id)
        cluster_id = await waiting.until(partial(_reserve, machine, leases, of_seed or fresh))
    base = "" if record is None else record.base
    if known is None:
        store = await waiting.until(partial(read, base))
    else:
        try:
            store = await read(base)
        except Unavailable as err:
            log.warning("the replica cannot be read yet; what was read last is shown", why=err.message)
            store = await read("")
    held.callback(store.close)
    epoch = (await meta.load(store)).epoch
    is_new = found.answered and record is None

    async def compete(owner: OwnerId, address: str, lease: LeaseSettings) -> Candidacy:
        timings = LeaseTimings.of(lease.ttl_s, lease.renew_s, lease.poll_s)
        me = Candidate(cluster_id, owner, boot_id(), address, __version__, migrations.SCHEMA, one_machine=False, store_is_new=is_new)
        return Candidacy(me, ObjectLeases(machine, place, timings), data_dir, timings=timings, place=place.address, known_epoch=epoch)

    return OpenStore(store, cluster_id, data_dir, False, compete, store.run)


@attrs.frozen
class _Found:
    """What the object store says of the lease, and why it says nothing."""

    answered: bool = False
    record: LeaseRecord | None = None
    why: str = "it did not answer in time"


async def _look(leases: ObjectLeases) -> _Found:
    try:
        await leases.check()
        return _Found(True, await leases.read(ROLE))
    except (Unavailable, Unknown) as err:
        return _Found(why=str(err))


async def _cluster_read_last(read: Callable[[str], Awaitable[ReplicatedStore]], data_dir: Path) -> ClusterId | None:
    """Of the copy that an earlier process has left; None without one."""
    if not has_copy(data_dir):
        return None
    with contextlib.suppress(LlmgwError):  # one that cannot be read is none
        store = await read("")
        try:
            return (await meta.load(store)).cluster_id
        finally:
            store.close()
    return None


class _Waiting:
    """For an object store that does not answer yet: it is waited for, and that is told once."""

    def __init__(self, machine: Machine, place: ObjectPlace) -> None:
        self._machine = machine
        self._place = place
        self._told = False

    async def until(self, work: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                found = await work()
            except (Unavailable, Unknown) as err:
                if not self._told:
                    log.warning("the object store cannot be used yet; waiting for it", place=str(self._place), why=str(err))
                self._told = True
                await self._machine.sleep_until(self._machine.now_s() + ASK_AGAIN_S)
            else:
                if self._told:
                    log.info("the object store answers", place=str(self._place))
                self._told = False
                return found


async def _reserve(machine: Machine, leases: ObjectLeases, fresh: str) -> ClusterId:
    """The id of the cluster that begins here: `fresh`, or that of whoever began first. Raises Unknown."""
    found = await leases.read(CLUSTER_ROLE)
    if found is None:
        draw = machine.fresh_hex(RANDOM_BYTES)
        mine = LeaseRecord(ClusterId(fresh), 1, OwnerId(f"cluster-{draw[:8]}"), draw, draw, "", 1, 1.0, RecordState.RELEASED)
        try:
            await leases.replace(CLUSTER_ROLE, None, mine)
        except Lost as err:
            found = err.current
        else:
            return mine.cluster_id
    if found is None:
        raise Unknown("the record of the cluster's id was removed while it was written")
    return found.cluster_id
