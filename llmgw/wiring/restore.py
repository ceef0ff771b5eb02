"""`llmgw restore`: the store of an archive in the place of what is there, for a cluster whose control planes have ended.

Everything of the archive is checked before anything is touched. A file is written over by SQLite in one transaction, with a copy of
what it held beside it; in a bucket the archive's rows become the first copy of a new epoch, and the lease names it. The epoch rises
by 1,000, so that agents and routers follow whoever leads next, and nobody who still has the old store.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

import apsw
import attrs
import structlog

from llmgw.control.settings_boot import CACHE_FILE, MARKS_FILE
from llmgw.domain.errors import Conflict, Invalid, LlmgwError, Unavailable
from llmgw.domain.files import unusable
from llmgw.domain.ids import ClusterId
from llmgw.domain.ports import Machine
from llmgw.lease.epoch_file import EPOCH_FILE, read_epoch, write_epoch
from llmgw.lease.file import LEASE_FILE, LOCK_FILE, LeaseFile, LockFile
from llmgw.lease.object_leases import ObjectLeases
from llmgw.lease.record import RANDOM_BYTES, ROLE, LeaseRecord
from llmgw.lease.store import Lost, Unknown
from llmgw.lease.timings import LeaseTimings
from llmgw.replication import bases, prefixes
from llmgw.replication.copies import Copy, verify
from llmgw.replication.prefix_store import PrefixStore
from llmgw.replication.programs import find
from llmgw.replication.replicated_store import COPIES
from llmgw.settings.database_file import look
from llmgw.settings.load import Loaded
from llmgw.settings.object_place import ObjectPlace
from llmgw.settings.schema import LeaseSettings, Settings
from llmgw.store.archive import SETTINGS, STORE, TOKENS, Archive, Facts
from llmgw.store.connection import SIDE_FILES, translated
from llmgw.store.copies import copy_unit
from llmgw.store.migrations import SCHEMA, check_owner
from llmgw.wiring.backup import NONE, REPLICATED, copy_from_replica, mode_of, read_record, scratch, secret_files, store_file
from llmgw.wiring.data_dir import claim
from llmgw.wiring.stores import CLUSTER_ROLE

ASIDE: Final = ".before-restore-"  # and the epoch that the restored store begins above
log = structlog.get_logger("llmgw.store")
Say = Callable[[str], None]


@attrs.frozen
class Restored:
    """`kept` is where what was there is kept, "" where nothing was; `tokens` were written, `tokens_left` stay as they were."""

    facts: Facts
    place: str
    epoch: int
    kept: str = ""
    tokens: tuple[str, ...] = ()
    tokens_left: tuple[str, ...] = ()


def look_into(path: Path) -> tuple[Facts, bytes | None]:
    """What an archive says of itself, and the settings file in it; all of it is checked. Blocking. Raises Invalid."""
    with Archive.opened(path) as archive:
        return archive.manifest.facts, archive.content(SETTINGS) if archive.has(SETTINGS) else None


async def restore_backup(machine: Machine, loaded: Loaded, path: Path, *, replace: bool, say: Say) -> Restored:
    """`replace`: also in the place of another cluster's store, and over tokens that differ. `say` hears what takes long.

    Raises Conflict where a control plane runs, or where the store there is another cluster's; Invalid, Unavailable.
    """
    settings = loaded.settings
    with contextlib.ExitStack() as held:
        archive = held.enter_context(Archive.opened(path))
        facts = archive.manifest.facts
        if facts.schema > SCHEMA:
            raise Invalid(
                f"{path} holds a store at schema {facts.schema} (build {facts.build}), this build knows up to {SCHEMA}: upgrade llmgw",
                code="schema_newer",
            )
        data_dir = settings.server.data_path
        held.enter_context(claim(data_dir))
        target = data_dir if mode_of(settings) == REPLICATED else store_file(settings).parent
        async with scratch(_made(target)) as folder:
            staged = folder / STORE
            await machine.run_sync(partial(archive.extract, STORE, staged))
            found = await machine.run_sync(partial(_matching, staged, facts, path))
            known = read_epoch(machine.disk, data_dir / EPOCH_FILE)
            if mode_of(settings) == REPLICATED:
                done = await into_bucket(machine, settings, staged, found, known, replace=replace, say=say)
            else:
                done = await machine.run_sync(lambda: _into_file(machine, settings, staged, found, known, replace=replace))
        await machine.run_sync(lambda: _forget(machine, data_dir, done.epoch))
        written, left = await machine.run_sync(lambda: _give_tokens(machine, settings, archive, replace=replace))
    return attrs.evolve(done, facts=facts, tokens=written, tokens_left=left)


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as err:
        raise unusable(err, "the store's folder", folder) from err
    return folder


def _matching(staged: Path, facts: Facts, path: Path) -> Copy:
    """Raises Invalid where the store of an archive is damaged, or not what its manifest says."""
    try:
        found = verify(staged)
    except Unavailable as err:
        raise Invalid(f"the store in {path} is damaged: {err.message}; nothing was changed", code="bad_backup") from err
    if (found.cluster_id, found.epoch, found.settings_sha256) != (facts.cluster_id, facts.epoch, facts.settings_sha256):
        raise Invalid(f"the store in {path} is not the one that its manifest describes; nothing was changed", code="bad_backup")
    return found


def check_same(found: str, wanted: str, where: str, *, replace: bool) -> None:
    """Raises Conflict where `found`, the cluster whose store is there ("": none's), is another one than `wanted`."""
    if found and found != wanted and not replace:
        raise Conflict(
            f"{where} is the store of cluster {found}, and the copy is of {wanted or 'none yet'}: --replace puts it there all the same",
            code="foreign_cluster",
        )


def _raise_epoch(staged: Path, epoch: int) -> None:
    with translated(str(staged)), contextlib.closing(apsw.Connection(str(staged), flags=apsw.SQLITE_OPEN_READWRITE)) as connection:
        connection.execute("UPDATE meta SET epoch = ?, owner = ''", (epoch,))


# --- into a file of this machine


def _into_file(machine: Machine, settings: Settings, staged: Path, found: Copy, known: int, *, replace: bool) -> Restored:
    path = store_file(settings)
    with _lease_of_file(path, mode_of(settings) != NONE) as (leases, record), _alone(path) as there:
        theirs, epoch = ("", 0) if there is None else _identity(there)
        check_same(theirs or (record.cluster_id if record is not None else ""), found.cluster_id, str(path), replace=replace)
        epoch = bases.next_epoch((known, found.epoch, epoch, 0 if record is None else record.epoch))
        _raise_epoch(staged, epoch)
        aside = path.with_name(f"{path.name}{ASIDE}{epoch}")
        kept = _put(staged, path, there, aside)
        if leases is not None:
            ttl_s = settings.lease.ttl_s
            new = bases.released_record(machine, record, found.cluster_id, epoch, "", ttl_s, found.settings_version)
            try:
                leases.replace(ROLE, record, new)
            except (Lost, Unknown) as err:
                raise Unavailable(f"the store is restored, and the lease {leases.path} is not: {err}; run it again") from err
    return Restored(_NO_FACTS, str(path), epoch, str(aside) if kept else "")


_NO_FACTS: Final = Facts("", 0, 0, "", "", 0, "", 0.0)


@contextlib.contextmanager
def _lease_of_file(path: Path, shared: bool) -> Iterator[tuple[LeaseFile | None, LeaseRecord | None]]:
    """The record of the lease beside a store that is shared, while nobody holds its lock. Raises Conflict where somebody does."""
    if not shared:
        yield None, None
        return
    leases, lock = LeaseFile(path.with_name(LEASE_FILE)), LockFile(path.with_name(LOCK_FILE))
    with contextlib.ExitStack() as held:
        held.callback(leases.close)
        held.callback(lock.let_go)
        try:
            taken = lock.take("restore", None)
            record = leases.read(ROLE)
        except OSError as err:
            raise unusable(err, "the lease's lock", lock.path) from err
        except Unknown as err:
            raise Unavailable(f"the lease cannot be read: {err.why}", code="lease_unavailable") from err
        if not taken:
            raise _in_use(path) if record is None or record.released else bases.leads(record)
        yield leases, record


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[apsw.Connection | None]:
    """The store at `path`, which nobody else has open or can open meanwhile; None where there is none that can be read.

    Raises Conflict where somebody has it open, Invalid for another program's file.
    """
    if path.exists() and not path.is_file():
        raise Invalid(f"the store's path {path} is not a file", code="not_a_file")
    with contextlib.ExitStack() as held:
        connection = None
        with translated(str(path)):
            try:
                if path.exists() and path.stat().st_size and (found := look(path, 0)) is not None:
                    check_owner(found)
                    connection = held.enter_context(contextlib.closing(apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)))
                    connection.set_busy_timeout(0)
                    connection.pragma("locking_mode", "exclusive")
                    # Refused while anybody else has it open; carries its log over, so that one file is all there is.
                    if connection.pragma("journal_mode", "delete") != "delete":
                        raise _in_use(path)
                    connection.execute("BEGIN EXCLUSIVE; COMMIT")  # kept from here on
            except (apsw.BusyError, apsw.LockedError) as err:
                raise _in_use(path) from err
            except (apsw.NotADBError, apsw.CorruptError):
                connection = None  # why it is restored: it is put aside as it lies
        yield connection


def _in_use(path: Path) -> Conflict:
    return Conflict(f"another process has the store {path} open: end every control plane on it first", code="in_use")


def _identity(there: apsw.Connection) -> tuple[str, int]:
    try:
        cluster_id, epoch = next(iter(there.execute("SELECT cluster_id, epoch FROM meta")))
    except (apsw.Error, StopIteration):  # a damaged one, or one that was never begun
        return "", 0
    return cluster_id or "", epoch


def _put(staged: Path, path: Path, there: apsw.Connection | None, aside: Path) -> bool:
    """The copy takes the store's place; was anything there? What was is at `aside` then. Raises Invalid, Unavailable."""
    if there is not None:
        with translated(str(path)):
            aside.unlink(missing_ok=True)  # of a restore that came no further
            try:
                copy_unit(there, aside)
            except Unavailable as err:
                if not isinstance(err.__cause__, apsw.CorruptError):
                    raise
            else:
                with (
                    contextlib.closing(apsw.Connection(str(staged), flags=apsw.SQLITE_OPEN_READONLY)) as source,
                    there.backup("main", source, "main") as backup,
                ):
                    backup.step(-1)  # one transaction: all of it or nothing
                return True
    try:  # what cannot be copied is put aside as it lies
        kept = path.exists() and path.stat().st_size > 0
        if kept:
            aside.unlink(missing_ok=True)
            for side in SIDE_FILES:  # a log of before beside the new file would be read as its own (R-B37)
                with contextlib.suppress(FileNotFoundError):
                    path.with_name(f"{path.name}-{side}").rename(aside.with_name(f"{aside.name}-{side}"))
            path.rename(aside)
        staged.rename(path)
    except OSError as err:
        raise unusable(err, "the store", path) from err
    return kept


# --- into a bucket


async def into_bucket(
    machine: Machine,
    settings: Settings,
    staged: Path,
    found: Copy,
    known: int,
    *,
    replace: bool,
    say: Say,
    bucket: Bucket | None = None,
) -> Restored:
    """`staged` becomes the base of the replicated store; `bucket` is given where it was looked at already.

    Raises Conflict, Invalid, Unavailable.
    """
    assert settings.store is not None
    place, data_dir = ObjectPlace.of(settings.store), settings.server.data_path
    bucket = bucket or await Bucket.unled(machine, place, settings.lease, say)
    check_same(bucket.cluster_id, found.cluster_id, str(place), replace=replace)
    if not bucket.cluster_id and bucket.prefixes and not replace:
        raise Conflict(
            f"{place} holds copies of a store and no lease that tells whose: `llmgw store adopt` makes one of them the base again,"
            " --replace leaves them",
            code="lease_gone",
        )
    cluster_id = found.cluster_id or bucket.cluster_id or f"c-{machine.fresh_hex(8)}"
    epoch = bucket.next_epoch(known, found.epoch)
    say("uploading the store")
    prefix = await bases.upload(machine, place, staged, data_dir, cluster_id, epoch)
    try:
        again = staged.with_name("again.db")
        await copy_from_replica(machine, place, again, prefix)  # what cannot be restored is no base
        await bucket.name_base(prefix, cluster_id, epoch, found.settings_version)
    except LlmgwError as err:
        if err.code != "outcome_unknown":  # then the lease may name it
            await bases.remove_prefix(machine, place, prefix)
        raise
    return Restored(_NO_FACTS, f"{place}, {prefix}", epoch, "" if bucket.record is None else bucket.record.base)


@attrs.frozen
class Bucket:
    """A replicated store that nobody leads. `cluster_id` "": of no cluster, or of one that nothing tells of any more."""

    machine: Machine
    place: ObjectPlace
    leases: ObjectLeases
    timings: LeaseTimings
    record: LeaseRecord | None
    reserved: LeaseRecord | None  # the record of the cluster's id
    prefixes: tuple[str, ...]

    @classmethod
    async def unled(cls, machine: Machine, place: ObjectPlace, lease: LeaseSettings, say: Say) -> Bucket:
        """Raises Conflict where somebody leads; Invalid, Unavailable, also for a bucket that keeps no promises."""
        await machine.run_sync(find)
        timings = LeaseTimings.of(lease.ttl_s, lease.renew_s, lease.poll_s)
        leases = ObjectLeases(machine, place, timings)
        await leases.check()
        there = await machine.run_sync(PrefixStore(place).copies)
        reserved = await machine.run_sync(partial(read_record, place, CLUSTER_ROLE))
        record = await bases.wait_unled(machine, leases, timings, used=bool(there or reserved), told=say)
        return cls(machine, place, leases, timings, record, reserved, there)

    @property
    def cluster_id(self) -> str:
        known = self.record or self.reserved
        return "" if known is None else known.cluster_id

    def next_epoch(self, *known: int) -> int:
        found = [name.epoch for prefix in self.prefixes if (name := prefixes.parse(prefix)) is not None]
        return bases.next_epoch((*known, *found, 0 if self.record is None else self.record.epoch))

    async def name_base(self, prefix: str, cluster_id: str, epoch: int, settings_version: int) -> None:
        """Raises Conflict where somebody has taken the lease meanwhile, Unavailable."""
        new = bases.released_record(self.machine, self.record, cluster_id, epoch, prefix, self.timings.ttl_s, settings_version)
        await bases.name_base(self.machine, self.leases, self.record, new, self.timings)
        if (reserved := self.reserved) is not None and reserved.cluster_id != cluster_id:
            fresh = self.machine.fresh_hex(RANDOM_BYTES)
            mine = attrs.evolve(reserved, cluster_id=ClusterId(cluster_id), seq=reserved.seq + 1, write_id=fresh)
            try:
                await self.leases.replace(CLUSTER_ROLE, reserved, mine)
            except (Lost, Unknown) as err:  # read only where the lease has no record
                log.warning("the record of the cluster's id still names another one", place=str(self.place), why=str(err))


# --- on this machine


def _forget(machine: Machine, data_dir: Path, epoch: int) -> None:
    """What this machine has kept of the store before. Raises Unavailable, Invalid."""
    try:
        write_epoch(machine.disk, data_dir / EPOCH_FILE, epoch)
        for name in (MARKS_FILE, CACHE_FILE):  # of settings versions whose numbers may mean others now
            (data_dir / name).unlink(missing_ok=True)
        for copy in (data_dir / COPIES).glob("*"):
            copy.unlink()
    except OSError as err:
        raise unusable(err, "what the data directory keeps of the store", data_dir) from err


def _give_tokens(machine: Machine, settings: Settings, archive: Archive, *, replace: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Those of the archive, where none are; the names of what was written, and of those that are others and stay."""
    written, left = [], []
    files = secret_files(settings)
    for name in archive.names(TOKENS):
        if (file := files.get(name)) is None:
            continue
        data = archive.content(f"{TOKENS}{name}")
        try:
            there = machine.disk.read(file)
            if there == data:
                continue
            if there is not None and not replace:
                left.append(name)
                continue
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            machine.disk.write(file, data)
        except OSError as err:
            raise unusable(err, "a secret's file", file) from err
        written.append(name)
    return tuple(written), tuple(left)
