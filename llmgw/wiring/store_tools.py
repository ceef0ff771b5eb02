"""`llmgw store status|verify|adopt`: what is in a store's place, whether it can be restored, and which copy the next leader begins with.

Status and verify change nothing and may be asked at any time. Adopt is for a replicated store whose lease lost its record or whose
base is damaged: nobody may lead, and everything goes through the lease (`replication.bases`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Final

import apsw
import attrs

from llmgw.domain.errors import Conflict, Invalid, LlmgwError, NotFound
from llmgw.domain.files import unusable
from llmgw.domain.ids import holder_name
from llmgw.domain.ports import Machine
from llmgw.lease.epoch_file import EPOCH_FILE, read_epoch
from llmgw.lease.file import LEASE_FILE, LeaseFile
from llmgw.lease.record import ROLE, LeaseRecord
from llmgw.lease.store import Unknown
from llmgw.replication import prefixes
from llmgw.replication.copies import Copy, verify
from llmgw.replication.prefix_store import PrefixStore
from llmgw.replication.programs import find
from llmgw.settings.database_file import look
from llmgw.settings.load import Loaded
from llmgw.settings.object_place import ObjectPlace
from llmgw.settings.schema import Settings
from llmgw.store.archive import STORE
from llmgw.store.connection import BUSY_TIMEOUT_MS, translated
from llmgw.store.copies import SUFFIX
from llmgw.wiring.backup import FILE, NONE, REPLICATED, copy_database, copy_from_replica, mode_of, read_record, scratch, store_file
from llmgw.wiring.data_dir import claim
from llmgw.wiring.restore import Bucket, check_same, into_bucket
from llmgw.wiring.stores import CLUSTER_ROLE

_COUNTED: Final = ("cluster_settings", "models", "api_keys", "admin_tokens", "facility_holds", "nodes", "events")
Say = Callable[[str], None]


@attrs.frozen
class Lease:
    """The record as it stands. `written` is when that was, by the object store's clock; None where nothing tells."""

    holder: str  # "" while nobody holds it
    epoch: int
    address: str
    build: str
    ttl_s: float
    base: str
    written: datetime | None = None


@attrs.frozen
class Prefix:
    name: str
    epoch: int
    objects: int
    bytes: int
    written: datetime
    is_base: bool


@attrs.frozen
class Status:
    """`troubles` are sentences: what could not be found out, and what is wrong."""

    mode: str
    place: str
    cluster_id: str
    lease: Lease | None
    prefixes: tuple[Prefix, ...]
    copy_written_s: float | None  # seconds since 1970, of the newest copy in this machine's data directory
    file_bytes: int | None
    epoch: int | None  # of a store that is a file
    litestream: str
    troubles: tuple[str, ...]


@attrs.frozen
class Verified:
    """`why` "": it is whole, and `found` is what is in it."""

    name: str
    why: str
    found: Copy | None = None
    rows: Mapping[str, int] = attrs.field(factory=dict)


# --- status


async def status(machine: Machine, loaded: Loaded) -> Status:
    """Changes nothing. What cannot be found out is told as a trouble."""
    settings = loaded.settings
    if mode_of(settings) == REPLICATED:
        return await machine.run_sync(partial(_status_of_bucket, settings))
    return await machine.run_sync(partial(_status_of_file, settings))


def _status_of_file(settings: Settings) -> Status:
    path, mode, troubles = store_file(settings), mode_of(settings), []
    cluster_id, epoch, size = "", None, None
    lease = None
    try:
        size = path.stat().st_size if path.exists() else None
        if size is None:
            troubles.append(f"there is no store at {path} yet")
        else:
            cluster_id, epoch = _identity(path)
        if mode == FILE and path.with_name(LEASE_FILE).exists():
            with contextlib.closing(LeaseFile(path.with_name(LEASE_FILE))) as leases:
                lease = _lease(leases.read(ROLE), None)
    except OSError as err:
        troubles.append(unusable(err, "the store", path).message)
    except LlmgwError as err:
        troubles.append(err.message)
    except Unknown as err:
        troubles.append(f"the lease cannot be read: {err.why}")
    return Status(mode, str(path), cluster_id, lease, (), None, size, epoch, "", tuple(troubles))


def _identity(path: Path) -> tuple[str, int | None]:
    with translated(str(path)):
        if look(path, BUSY_TIMEOUT_MS) is None:
            return "", None
        with contextlib.closing(apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)) as connection:
            connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            connection.set_busy_timeout(BUSY_TIMEOUT_MS)
            cluster_id, epoch = next(iter(connection.execute("SELECT cluster_id, epoch FROM meta")), ("", None))
            return cluster_id or "", epoch


def _status_of_bucket(settings: Settings) -> Status:
    assert settings.store is not None
    place = ObjectPlace.of(settings.store)
    troubles: list[str] = []
    store = PrefixStore(place)
    record, reserved, written, program = None, None, None, ""
    shown: tuple[Prefix, ...] = ()
    try:
        program = f"{(found := find()).version} ({found.path})"
    except LlmgwError as err:
        troubles.append(err.message)
    try:
        record, reserved = read_record(place), read_record(place, CLUSTER_ROLE)
        written = None if record is None else store.now()
        shown = tuple(one for prefix in store.prefixes() if (one := _prefix(store, prefix, record)) is not None)
    except LlmgwError as err:
        troubles.append(err.message)
    if not troubles:
        troubles += _wrong(record, shown)
    known = record or reserved
    copies = [file.stat().st_mtime for file in (settings.server.data_path / "copies").glob(f"*{SUFFIX}")]
    return Status(
        REPLICATED, str(place), "" if known is None else known.cluster_id, _lease(record, written), shown, max(copies, default=None), None,
        None, program, tuple(troubles),
    )  # fmt: skip


def _wrong(record: LeaseRecord | None, there: tuple[Prefix, ...]) -> list[str]:
    if record is None:
        return ["the lease has no record, and there are copies of a store: `llmgw store adopt` makes one the base again"] if there else []
    if not record.base:
        return ["no base is published yet"]
    if not any(one.is_base for one in there):
        return [f"the lease names {record.base} as the base, and nothing is there: `llmgw store adopt` names another one"]
    return []


def _lease(record: LeaseRecord | None, written: datetime | None) -> Lease | None:
    if record is None:
        return None
    holder = "" if record.released else holder_name(record.owner)
    return Lease(holder, record.epoch, record.addr, record.build, record.ttl_s, record.base, written)


def _prefix(store: PrefixStore, prefix: str, record: LeaseRecord | None) -> Prefix | None:
    seen, name = store.look(prefix), prefixes.parse(prefix)
    if seen is None or name is None:
        return None
    return Prefix(prefix, name.epoch, len(seen.names), seen.bytes, seen.written, record is not None and record.base == prefix)


# --- verify


async def verify_store(machine: Machine, loaded: Loaded, names: tuple[str, ...], *, every: bool) -> tuple[Verified, ...]:
    """Each is restored to a folder of its own and checked; with no names the published base, or the store's file.

    Raises Invalid, NotFound, Unavailable for what keeps all of it from being tried.
    """
    settings = loaded.settings
    if mode_of(settings) != REPLICATED:
        if names:
            raise Invalid(f"the store is the file {store_file(settings)}, which has no prefixes", code="not_replicated")
        async with scratch(store_file(settings).parent) as folder:
            return (await _tried(machine, str(store_file(settings)), partial(_copied, machine, settings, folder / STORE), ""),)
    assert settings.store is not None
    place = ObjectPlace.of(settings.store)
    record = await machine.run_sync(partial(read_record, place))
    there = await machine.run_sync(PrefixStore(place).copies)
    wanted = names or (there if every else (() if record is None or not record.base else (record.base,)))
    for name in names:
        if name not in there:
            raise NotFound(f"{place} has no copy {name}; there are: {', '.join(there) or 'none'}")
    if not wanted:
        raise NotFound(f"{place} has no published base to verify; `llmgw store status` shows what is there")
    cluster_id = "" if record is None else record.cluster_id
    found = []
    async with scratch(settings.server.data_path) as folder:
        for number, name in enumerate(wanted):
            into = folder / f"{number}.db"
            found.append(await _tried(machine, name, partial(copy_from_replica, machine, place, into, name), cluster_id, into))
            await machine.run_sync(partial(into.unlink, missing_ok=True))
    return tuple(found)


async def _copied(machine: Machine, settings: Settings, into: Path) -> Copy:
    await machine.run_sync(partial(copy_database, store_file(settings), into))
    return await machine.run_sync(partial(verify, into))


async def _tried(machine: Machine, name: str, get: Callable[[], object], cluster_id: str, into: Path | None = None) -> Verified:
    try:
        found = await get()  # type: ignore[misc]  # a partial of a coroutine function
    except LlmgwError as err:
        return Verified(name, err.message)
    assert isinstance(found, Copy)
    if cluster_id and found.cluster_id != cluster_id:
        return Verified(name, f"it is of cluster {found.cluster_id or '(none)'}, and the lease of {cluster_id}", found)
    rows = {} if into is None else await machine.run_sync(partial(_rows, into))
    return Verified(name, "", found, rows)


def _rows(path: Path) -> dict[str, int]:
    with translated(str(path)), contextlib.closing(apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)) as connection:
        there = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
        return {table: next(iter(connection.execute(f"SELECT count(*) FROM {table}")))[0] for table in _COUNTED if table in there}


# --- adopt


@attrs.frozen
class Choice:
    """What would become the base, beside what is the base now (None: the lease names none). `newer` are copies of later epochs."""

    new: Verified
    now: Verified | None
    newer: tuple[str, ...]
    epoch: int


@attrs.frozen
class Adopted:
    base: str
    epoch: int


async def adopt(
    machine: Machine,
    loaded: Loaded,
    name: str,
    file: Path | None,
    *,
    replace: bool,
    go_back: bool,
    agree: Callable[[Choice], None],
    say: Say,
) -> Adopted:
    """Makes the prefix `name`, or `file`, what the next leader begins with. `agree(choice)` raises where that is not wanted.

    `go_back`: also where the published base is whole. Raises Conflict where somebody leads, where a control plane of this machine
    runs, and for another cluster's copy without `replace`; NotFound, Invalid, Unavailable.
    """
    settings = loaded.settings
    if mode_of(settings) != REPLICATED:
        what = "has no store that is replicated" if mode_of(settings) == NONE else "has its store in a file; `llmgw restore` takes a backup"
        raise Invalid(f"this control plane {what}", code="not_replicated")
    assert settings.store is not None
    place, data_dir = ObjectPlace.of(settings.store), settings.server.data_path
    with claim(data_dir):
        bucket = await Bucket.unled(machine, place, settings.lease, say)
        base = "" if bucket.record is None else bucket.record.base
        async with scratch(data_dir) as folder:
            into = folder / STORE
            if file is None:
                if name not in bucket.prefixes:
                    raise NotFound(f"{place} has no copy {name}; there are: {', '.join(bucket.prefixes) or 'none'}")
                say(f"restoring {name}")
                new = await _tried(machine, name, partial(copy_from_replica, machine, place, into, name), "", into)
            else:
                new = await _tried(machine, str(file), partial(_from_file, machine, file, into), "", into)
            if new.found is None:
                raise Invalid(f"{new.name} cannot be the base: {new.why}", code="copy_damaged")
            check_same(bucket.cluster_id, new.found.cluster_id, str(place), replace=replace)
            now = None
            if base and base != name:
                say(f"restoring {base}, which is the base now")
                old = folder / "base.db"
                now = await _tried(machine, base, partial(copy_from_replica, machine, place, old, base), "", old)
            elif base and new.name == base:
                now = new
            if now is not None and not now.why and not go_back:
                raise Conflict(
                    f"the base {base} is whole, nothing need be adopted; --go-back takes another copy all the same", code="base_whole"
                )
            known = read_epoch(machine.disk, data_dir / EPOCH_FILE)
            epoch = bucket.next_epoch(known, new.found.epoch)
            agree(Choice(new, now, _newer(bucket.prefixes, new), epoch))
            if file is not None:
                done = await into_bucket(machine, settings, into, new.found, known, replace=True, say=say, bucket=bucket)
                return Adopted(done.place.rpartition(", ")[2], done.epoch)
            await bucket.name_base(name, new.found.cluster_id, epoch, new.found.settings_version)
            return Adopted(name, epoch)


async def _from_file(machine: Machine, file: Path, into: Path) -> Copy:
    await machine.run_sync(partial(copy_database, file, into))
    return await machine.run_sync(partial(verify, into))


def _newer(there: tuple[str, ...], new: Verified) -> tuple[str, ...]:
    assert new.found is not None
    parsed = prefixes.parse(new.name)
    epoch = new.found.epoch if parsed is None else parsed.epoch
    return tuple(name for name in there if (one := prefixes.parse(name)) is not None and one.epoch > epoch)
