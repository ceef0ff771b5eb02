"""The lease of control planes that share one machine: `lease.db`, a file of its own, and the lock `lease.lock` beside it.

The record is not in the main database: whoever checkpoints or writes that one for long must not keep a renewal waiting. The
synchronous classes are what `llmgw lease release` uses; `FileLeases` and `FileLock` are the ports of tasks. The only module of
this room that knows SQLite.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import apsw

from llmgw.domain.errors import Invalid, Unavailable
from llmgw.domain.files import reason
from llmgw.domain.ports import Machine
from llmgw.lease.record import LeaseRecord, decode, encode
from llmgw.lease.store import Lost, Unknown
from llmgw.settings.database_file import FILE_MODE, Contents, contents, create, look, transaction, turn_log_on
from llmgw.settings.filesystem import network_file_system

LEASE_FILE: Final = "lease.db"
LOCK_FILE: Final = "lease.lock"
BOOT_ID_FILE: Final = Path("/proc/sys/kernel/random/boot_id")
APPLICATION_ID: Final = 0x6C6C6C73  # "llls": tells a lease file from any other database
SCHEMA: Final = 1
BUSY_TIMEOUT_MS: Final = 1_000  # below the request time-out: a write takes about 1 ms, and a longer wait is no answer
NAME_BYTES_MAX: Final = 512  # of a lock: an owner id and a tenure
_Identity = tuple[tuple[int, int] | None, tuple[int, int] | None]
_FLOCK: Final = struct.Struct("hhqqi4x")  # type, whence, start, length, pid (0 for locks of an open file)


def boot_id() -> str:
    """This machine's run since its last start; "" where the kernel does not tell."""
    try:
        return BOOT_ID_FILE.read_text(encoding="ascii").strip()
    except OSError:
        return ""


class LeaseFile:
    """`lease.db`, synchronous. Its methods may be called from any thread, one at a time; `close` when no call runs."""

    def __init__(self, path: Path) -> None:
        """Opens nothing. Raises Invalid for a path that cannot hold a lease."""
        self.path = Path(os.path.realpath(path))  # SQLite keeps its log beside the file itself, not beside a link to it
        self._connection: apsw.Connection | None = None
        self._identity: _Identity | None = None
        self._refused = False  # the disk did not take the last write
        self._turn = threading.Lock()
        if (kind := network_file_system(str(self.path.parent))) is not None:
            raise Invalid(
                f"the lease {self.path} would be on a network file system ({kind}), where locks do not hold; use a local disk",
                code="network_file_system",
            )

    def read(self, role: str) -> LeaseRecord | None:
        """Raises Unknown, and Invalid for a file that a newer build, or another program, has written.

        Asks for the right to write, too: in a file that somebody keeps locked an unchanged record does not tell of a silent
        holder, who cannot renew it either. Once the disk has refused a write, nothing is answered until it takes one.
        """
        with self._turn, self._translated():
            connection = self._open()
            with transaction(connection):
                row = connection.execute("SELECT record FROM lease WHERE role = ?", (role,)).fetchone()
                if self._refused:
                    connection.pragma("user_version", SCHEMA)  # a real commit of one page, which changes no row
            self._refused = False
            self._check_identity()
            return None if row is None else _decoded(row[0])

    def replace(self, role: str, expected: LeaseRecord | None, new: LeaseRecord) -> None:
        """Returns when the record is on the platter. Raises Lost, Unknown, Invalid."""
        with self._turn, self._translated():
            connection = self._open()
            with transaction(connection):
                row = connection.execute("SELECT record FROM lease WHERE role = ?", (role,)).fetchone()
                current = None if row is None else _decoded(row[0])
                if (None if current is None else _stamp(current)) != (None if expected is None else _stamp(expected)):
                    raise Lost(current)
                connection.execute("INSERT OR REPLACE INTO lease(role, record) VALUES (?, ?)", (role, encode(new)))
                self._check_identity()  # before the commit: a lease in a file that was moved away would be seen by nobody
            self._refused = False

    def close(self) -> None:
        """May be called twice; a later call opens the file again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(apsw.Error):
                connection.close()

    def _open(self) -> apsw.Connection:
        if self._connection is not None and _identity(self.path) != self._identity:
            # Moved, replaced or deleted by hand. What is there now is what everybody else sees.
            self.close()
        if self._connection is None:
            create(self.path)
            if (found := look(self.path, BUSY_TIMEOUT_MS)) is not None:  # first of all: what is another's stays as it is
                _refuse_foreign(found, self.path)
            self._connection = _connect(self.path)
            self._identity = _identity(self.path)
        return self._connection

    def _check_identity(self) -> None:
        if _identity(self.path) != self._identity:
            raise Unknown(f"{self.path} was moved, replaced or deleted")

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (apsw.BusyError, apsw.LockedError, apsw.ProtocolError) as err:
            raise Unknown(f"{self.path} is locked by another process") from err
        except (apsw.FullError, apsw.ReadOnlyError, apsw.IOError, apsw.CantOpenError, apsw.PermissionsError, OSError) as err:
            self._refused = True
            self.close()  # a file that came back, or a disk with room again, is opened anew
            why = reason(err) if isinstance(err, OSError) else f"{type(err).__name__}: {err}"
            raise Unknown(f"{self.path} cannot be used ({why})", local_disk=True) from err
        except (apsw.CorruptError, apsw.NotADBError) as err:
            self.close()
            raise Unknown(f"{self.path} is damaged: end every control plane on it, move it away, start them again", fault=True) from err
        except apsw.Error as err:
            self.close()
            raise Unknown(f"{self.path}: {type(err).__name__}: {err}") from err


class LockFile:
    """`lease.lock`, synchronous: an OFD lock, which the kernel drops with its last descriptor; children do not inherit it."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._descriptor: int | None = None

    def take(self, name: str, if_named: str | None) -> bool:
        """As HolderLock.take. Raises OSError."""
        if self._descriptor is not None:
            if _is(self._descriptor, self.path):
                if if_named is None or self._name(self._descriptor) == if_named:
                    self._write(self._descriptor, name)
                    return True
                return False
            self.let_go()  # the file was deleted or replaced: this lock keeps nobody out
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            if not _lock(descriptor) or not _is(descriptor, self.path):
                return False
            if if_named is not None and self._name(descriptor) != if_named:
                return False
            self._write(descriptor, name)
            self._descriptor = descriptor
            return True
        finally:
            if self._descriptor != descriptor:
                os.close(descriptor)

    def let_go(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    @staticmethod
    def _name(descriptor: int) -> str:
        return os.pread(descriptor, NAME_BYTES_MAX, 0).decode("utf-8", "replace").strip()

    @staticmethod
    def _write(descriptor: int, name: str) -> None:
        # Cut first: a torn name matches nobody, and then the ttl decides.
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, name.encode(), 0)


class FileLeases:
    """The port `LeaseStore` on a file. Each call is one hop to a thread, which a cancel waits for."""

    def __init__(self, machine: Machine, path: Path) -> None:
        self._machine = machine
        self.file = LeaseFile(path)

    async def read(self, role: str) -> LeaseRecord | None:
        return await self._machine.run_sync(lambda: self.file.read(role))

    async def replace(self, role: str, expected: LeaseRecord | None, new: LeaseRecord) -> None:
        await self._machine.run_sync(lambda: self.file.replace(role, expected, new))

    async def check(self) -> None:
        """Opens the file, once, at the start. Raises Invalid or Unavailable with what a person can repair.

        A file that somebody keeps locked is none of that: it is waited for by whoever keeps or seeks the lease, as at any other time.
        """
        try:
            await self._machine.run_sync(lambda: self.file.read(""))
        except Unknown as err:
            if err.local_disk or err.fault:
                raise Unavailable(f"the lease cannot be used: {err.why}", code="lease_unavailable") from err

    def close(self) -> None:
        self.file.close()


class FileLock:
    """The port `HolderLock` on a file."""

    def __init__(self, machine: Machine, path: Path) -> None:
        self._machine = machine
        self.file = LockFile(path)

    async def take(self, name: str, if_named: str | None) -> bool:
        return await self._machine.run_sync(lambda: self.file.take(name, if_named))

    async def let_go(self) -> None:
        await self._machine.run_sync(self.file.let_go)


def _stamp(record: LeaseRecord) -> tuple[int, int, str]:
    return record.epoch, record.seq, record.write_id


def _decoded(data: object) -> LeaseRecord:
    try:
        if not isinstance(data, bytes):
            raise Invalid("the lease's record is not bytes")
        return decode(data)
    except Invalid as err:
        raise Unknown(err.message, fault=True) from err


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _identity(path: Path) -> _Identity:
    """Which files are behind `path` and its log now."""
    return _inode(path), _inode(path.with_name(f"{path.name}-wal"))


def _is(descriptor: int, path: Path) -> bool:
    found = os.fstat(descriptor)
    return _inode(path) == (found.st_dev, found.st_ino)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True


def _connect(path: Path) -> apsw.Connection:
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    try:
        connection.set_busy_timeout(BUSY_TIMEOUT_MS)
        connection.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 1)
        # The log is never deleted by its name: after the files were replaced by hand, that name is somebody else's log.
        keep = ctypes.c_int(1)
        connection.file_control("main", apsw.SQLITE_FCNTL_PERSIST_WAL, ctypes.addressof(keep))
        connection.pragma("journal_size_limit", 0)  # emptied instead, by the last to close: no old log waits for a file put in place
        if (mode := turn_log_on(connection)) != "wal":
            raise Invalid(f"the file system of {path} does not allow a write-ahead log (SQLite stayed at {mode!r})")
        connection.pragma("synchronous", "FULL")
        with transaction(connection):
            _refuse_foreign(contents(connection), path)
            _prepare(connection, path)
    except BaseException:  # re-raised: only the half-open file is let go of
        connection.close()
        raise
    return connection


def _refuse_foreign(found: Contents, path: Path) -> None:
    """Raises Invalid."""
    if found.application_id != APPLICATION_ID and (found.application_id or found.tables):
        raise Invalid(f"{path} is another program's database, not a lease file", code="not_a_lease_file")


def _prepare(connection: apsw.Connection, path: Path) -> None:
    schema, application = connection.pragma("user_version"), connection.pragma("application_id")
    if application != APPLICATION_ID:
        connection.execute("CREATE TABLE lease(role TEXT PRIMARY KEY, record BLOB NOT NULL) STRICT")
        connection.pragma("application_id", APPLICATION_ID)
        connection.pragma("user_version", SCHEMA)
    elif schema > SCHEMA:
        raise Invalid(
            f"{path} is at schema {schema}, this build knows up to {SCHEMA}: use a build as new as the other's", code="schema_newer"
        )
