"""`llmgw backup`: one archive of the store, the machine's settings file and the cluster's secrets, whatever kind of store it is.

From this machine's control plane where it runs, since it alone knows what is durable; else from the files, or from the replica.
Changes nothing but the archive, of which nothing is left behind where it cannot be made.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import apsw
import attrs

from llmgw import __version__
from llmgw.domain.errors import Conflict, Invalid, Unavailable
from llmgw.domain.files import unusable
from llmgw.domain.ports import Machine
from llmgw.lease.object_store import LeaseBucket
from llmgw.lease.record import RANDOM_BYTES, ROLE, LeaseRecord
from llmgw.lease.store import Unknown
from llmgw.lease.timings import REQUEST_TIMEOUT_S
from llmgw.replication.copies import Copy, verify
from llmgw.replication.folders import make_folder
from llmgw.replication.restoring import restore
from llmgw.settings.database_file import look
from llmgw.settings.load import Loaded
from llmgw.settings.object_place import ObjectPlace
from llmgw.settings.schema import Settings
from llmgw.store.archive import SETTINGS, STORE, TOKENS, Facts, Manifest, check_target, write_archive
from llmgw.store.connection import BUSY_TIMEOUT_MS, translated
from llmgw.store.copies import copy_unit
from llmgw.store.migrations import check_owner
from llmgw.wiring.data_dir import claim
from llmgw.wiring.identity_files import CA_CERTIFICATE, CA_KEY, ca_folder
from llmgw.wiring.stores import PRIVATE_STORE

NONE, FILE, REPLICATED = "none", "file", "replicated"


@attrs.frozen
class Fetched:
    """What a running control plane said of the copy that it gave."""

    mode: str
    age_s: float | None


# Puts the store of this machine's running control plane into a new file. Blocking; raises LlmgwError.
Fetch = Callable[[Path], Fetched]


def mode_of(settings: Settings) -> str:
    if settings.store is None:
        return NONE
    return REPLICATED if settings.store.replica else FILE


def store_file(settings: Settings) -> Path:
    """The file that is the store, in the modes that have one."""
    path = settings.store_path
    return settings.server.data_path / PRIVATE_STORE if path is None else path


def secret_files(settings: Settings) -> dict[str, Path]:
    """What else of this machine is the cluster's, by its name in an archive: its tokens, and its CA where there is one."""
    data_dir = settings.server.data_path
    shared = store_file(settings).parent if mode_of(settings) == FILE else data_dir
    return {
        "admin-token": data_dir / "admin-token",
        "agent-token": shared / "agent-token",
        "control-token": shared / "control-token",
        CA_KEY: ca_folder(settings) / CA_KEY,
        CA_CERTIFICATE: ca_folder(settings) / CA_CERTIFICATE,
    }


async def take_backup(machine: Machine, loaded: Loaded, target: Path, *, secrets: bool, fetch: Fetch) -> Manifest:
    """Returns when the archive is whole and on the platter. Raises LlmgwError; nothing is left at `target` or beside it then."""
    check_target(target)
    settings = loaded.settings
    with _beside(target) as staging:
        copy = staging / STORE
        fetched = await _copy_store(machine, settings, copy, fetch)
        found = await machine.run_sync(partial(verify, copy))
        contents: dict[str, Path | bytes | None] = {STORE: copy}
        if loaded.path is not None:
            contents[SETTINGS] = _read(machine, loaded.path, "the settings file")
        for name, file in secret_files(settings).items() if secrets else ():
            contents[f"{TOKENS}{name}"] = _read(machine, file, "a secret's file")
        facts = _facts(found, fetched, machine.wall_s())
        return await machine.run_sync(lambda: write_archive(target, facts, {k: v for k, v in contents.items() if v is not None}))


async def take_backup_from_afar(machine: Machine, target: Path, fetch: Fetch) -> Manifest:
    """The store alone, of a control plane of another machine: its files and secrets do not leave it. As `take_backup`."""
    check_target(target)
    with _beside(target) as staging:
        copy = staging / STORE
        fetched = await machine.run_sync(partial(fetch, copy))
        found = await machine.run_sync(partial(verify, copy))
        return await machine.run_sync(lambda: write_archive(target, _facts(found, fetched, machine.wall_s()), {STORE: copy}))


def _facts(found: Copy, fetched: Fetched, wall_s: float) -> Facts:
    return Facts(
        cluster_id=found.cluster_id,
        epoch=found.epoch,
        schema=found.schema,
        build=__version__,
        mode=fetched.mode,
        settings_version=found.settings_version,
        settings_sha256=found.settings_sha256,
        at_wall_s=round(wall_s, 3),
        age_s=fetched.age_s,
    )


@contextlib.contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """A folder of our own where the archive is going to be: what does not fit there need not be begun."""
    try:
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as err:
        raise unusable(err, "the backup", target) from err
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


async def _copy_store(machine: Machine, settings: Settings, into: Path, fetch: Fetch) -> Fetched:
    data_dir, mode = settings.server.data_path, mode_of(settings)
    if mode == NONE and not data_dir.exists():
        raise Invalid(f"there is nothing to back up: the data directory {data_dir} is not there", code="no_store")
    try:
        with claim(data_dir):
            if mode == REPLICATED:
                assert settings.store is not None
                await copy_from_replica(machine, ObjectPlace.of(settings.store), into)
            else:
                await machine.run_sync(partial(copy_database, store_file(settings), into))
            return Fetched(mode, 0.0)
    except Conflict as err:
        if err.code != "in_use":
            raise
    return await machine.run_sync(partial(fetch, into))  # it runs, and knows what of its rows is durable


def copy_database(path: Path, into: Path) -> None:
    """What stands in the store at `path` now, which others may be using, as a new file. Blocking. Raises Invalid, Unavailable."""
    try:
        there = path.is_file() and path.stat().st_size > 0
    except OSError as err:
        raise unusable(err, "the store", path) from err
    if not there:
        raise Invalid(f"there is no store at {path}", code="no_store")
    with translated(str(path)):
        try:
            found = look(path, BUSY_TIMEOUT_MS)
        except apsw.NotADBError as err:
            raise Invalid(f"{path} is not a database of llmgw, or is encrypted or damaged", code="not_our_database") from err
        if found is None:
            raise Invalid(f"there is no store at {path}", code="no_store")
        check_owner(found)
        with contextlib.closing(apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)) as source:
            source.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)  # its log is its users' to carry over
            source.set_busy_timeout(BUSY_TIMEOUT_MS)
            copy_unit(source, into)


async def copy_from_replica(machine: Machine, place: ObjectPlace, into: Path, base: str = "") -> Copy:
    """What stands under `base` in the bucket ("": what the lease names), checked. Raises Invalid, Unavailable."""
    if not base:
        record = await machine.run_sync(partial(read_record, place))
        if record is None or not record.base:
            raise Unavailable(f"{place} holds no published copy of a store", code="base_missing")
        base = record.base
    async with scratch(into.parent) as folder:
        made = await machine.run_sync(lambda: make_folder(folder, 1, machine.fresh_hex(RANDOM_BYTES)))
        try:
            found = await restore(machine, place, base, made)
            await machine.run_sync(lambda: made.database.rename(into))
        finally:
            made.close()
    return found


@asynccontextmanager
async def scratch(parent: Path) -> AsyncIterator[Path]:
    """A folder of our own below `parent`, for as long as it is needed. Raises Invalid, Unavailable."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=".llmgw-", dir=parent))
    except OSError as err:
        raise unusable(err, "a folder for a copy of the store", parent) from err
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def read_record(place: ObjectPlace, role: str = ROLE) -> LeaseRecord | None:
    """Blocking. Raises Invalid, Unavailable."""
    try:
        return LeaseBucket(place, REQUEST_TIMEOUT_S).read(role)
    except Unknown as err:
        raise Unavailable(f"the lease cannot be read: {err.why}", code="lease_unavailable") from err


def _read(machine: Machine, path: Path, what: str) -> bytes | None:
    try:
        return machine.disk.read(path)
    except OSError as err:
        raise unusable(err, what, path) from err
