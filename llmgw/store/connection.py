"""The store's connections: how every unit of work reaches SQLite, and how its failures become ours.

Owns the writer (one connection, one unit at a time) and the readers. One unit of work is one plain function, one hop through
the injected runner, one transaction; a write checks its epoch inside that transaction. Knows no table but `meta`, never reads
a clock, and lets no SQL text out: what a caller may see is in `llmgw.domain.errors`.
"""

from __future__ import annotations

import contextlib
import enum
import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Concatenate, Final, ParamSpec, Protocol, Self, TypeVar

import apsw
import attrs
import trio

from llmgw.domain.errors import Broken, Invalid, StaleEpoch, Unavailable
from llmgw.domain.files import STORAGE_UNAVAILABLE
from llmgw.domain.ids import ClusterId, OwnerId
from llmgw.settings.database_file import create, look, transaction, turn_log_on
from llmgw.settings.filesystem import network_file_system
from llmgw.store import changes, migrations
from llmgw.store.rows import row

T = TypeVar("T")
P = ParamSpec("P")

MEMORY: Final = ":memory:"
SQLITE_MIN: Final = (3, 51, 3)  # the first with the WAL-reset fix that several processes on one file need (control.md 3)
BUSY_TIMEOUT_MS: Final = 5_000  # how long a write waits for another process's; a write takes about 1 ms
READERS: Final = 3  # chosen: status, events and a page of models at once; more would only wait for the two cores
RETRY_AFTER_S: Final = 5.0  # a full disk or a busy file is looked at again by whoever asks, not in a tight loop
SIDE_FILES: Final = ("wal", "shm", "journal")  # SQLite's, beside the file


class Use(enum.Enum):
    """What a file is for, and so what SQLite does with it by itself."""

    OWN = "own"  # the truth: synced, its log carried over by SQLite
    WORKING = "working"  # replicated by Litestream, which carries the log over (control.md 3)
    COPY = "copy"  # can be made anew at any time: not synced


def _nothing() -> None:
    return None


async def _proven(epoch: int) -> None:
    return None


async def _published(base: str, settings_version: int) -> None:
    return None


@attrs.frozen
class Claim:
    """A leader's claim, as the lease gives it: under it, and under no lower epoch, is written.

    `base` is what the last leader has published, "" where none has, and `settings_version` the newest version of the settings
    that it has said to be in there. `progress()` asks for more time to get ready; `prove(epoch)` returns once a look at the lease
    that began after the call has shown it to be this one's, and raises StaleEpoch, Unavailable; `publish(base, settings_version)`
    returns once the lease names them, and raises Unavailable.
    """

    cluster_id: ClusterId
    epoch: int
    owner: OwnerId
    tenure: str = ""
    base: str = ""
    settings_version: int = 0
    progress: Callable[[], None] = attrs.field(default=_nothing, eq=False, repr=False)
    prove: Callable[[int], Awaitable[None]] = attrs.field(default=_proven, eq=False, repr=False)
    publish: Callable[[str, int], Awaitable[None]] = attrs.field(default=_published, eq=False, repr=False)


class StoreBusy(Unavailable):
    """Another process keeps the file locked. Nobody need repair anything: it ends with that process, or when that lets go."""


class Run(Protocol):
    """Runs one plain function off the loop, or inline; is not abandoned on cancel, so that the outcome is known."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]: ...


class Store(ABC):
    """What every kind of store offers: units of work on the cluster's rows.

    A kind says how it reads, and how a unit of work is carried out and kept.
    """

    def __init__(self) -> None:
        self._on_trouble: Callable[[str], None] = _nobody

    @property
    @abstractmethod
    def mode(self) -> str:
        """`file`, `replicated`, or `none` for a database in memory."""

    @property
    @abstractmethod
    def durability(self) -> str:
        """How far an acknowledged write reaches: `replicated`, this machine's disk (`local`), or nowhere (`none`)."""

    @property
    @abstractmethod
    def place(self) -> str:
        """Where it is, for people."""

    @property
    @abstractmethod
    def schema(self) -> int:
        """The number of the last migration that the file had seen when it was last used; may be above this build's own."""

    @property
    @abstractmethod
    def may_write(self) -> bool:
        """False where a newer build has changed the file so that this one may only follow, as of when it was last used.

        A newer build may do so while this one runs: each write, and each read, looks for itself.
        """

    @property
    @abstractmethod
    def trouble(self) -> str:
        """Why the last write was not kept; empty once one has been again. A person repairs it: a full disk, say."""

    def watch(self, hook: Callable[[str], None]) -> None:
        """`hook(trouble)` is called after each write that was kept ("") or was not, in place of whoever watched before."""
        self._on_trouble = hook

    async def prove_writable(self) -> None:
        """A real commit that changes nothing but `trouble`. Raises `Unavailable`."""

        def prove(connection: apsw.Connection) -> bool:
            _touch(connection)
            return True

        await self._write(prove, touches=True)

    async def write(self, unit: Callable[Concatenate[apsw.Connection, int, P], T], epoch: int, *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs `unit(connection, epoch, ...)` in one immediate transaction, committed when it returns and undone when it raises.

        The epoch is compared inside that transaction: `StaleEpoch` when a higher one was met; a higher one than met is kept.
        A cancel that comes while the unit runs waits for the true outcome. Raises what the unit raises, and `Unavailable`.
        """

        def checked(connection: apsw.Connection) -> T:
            _check_epoch(connection, epoch)
            return unit(connection, epoch, *args, **kwargs)

        return await self._write(checked)

    async def lead(self, claim: Claim) -> None:
        """Gets ready to be written under `claim`. Raises StaleEpoch where an epoch as high was met, Invalid, Unavailable."""
        await self.claim_epoch(claim.epoch, claim.owner)

    async def end_lead(self, fenced: bool) -> None:
        """The claim is over. `fenced`: somebody else leads already."""
        return

    def age_s(self) -> float | None:
        """How old what is read here may be; None where that is not known. A file of this machine is read as it is."""
        return 0.0

    async def claim_epoch(self, epoch: int, owner: str) -> None:
        """`owner` begins to lead under `epoch`: from now on lower ones are refused. Raises StaleEpoch where one as high was met.

        Asked again by the same owner it is no news.
        """

        def claim(connection: apsw.Connection) -> None:
            stored, by = row(connection, "SELECT epoch, owner FROM meta")
            if epoch < stored or (epoch == stored and owner != by):
                raise StaleEpoch(f"the store has met epoch {stored}, epoch {epoch} cannot begin", epoch=stored, owner=by)
            connection.execute("UPDATE meta SET epoch = ?, owner = ?", (epoch, owner))

        await self._write(claim)

    @abstractmethod
    async def read(self, unit: Callable[Concatenate[apsw.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs `unit(connection, ...)` in one read transaction: everything it reads is of one instant. Raises `Unavailable`."""

    async def read_newest(self, unit: Callable[Concatenate[apsw.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """As `read`; sees also what was written here and not yet known to be kept, and returns once that is. Raises `Unavailable`."""
        return await self.read(unit, *args, **kwargs)

    @abstractmethod
    def close(self) -> None:
        """Lets go of the files; later calls raise `Unavailable`. May be called twice. Blocks for a last wal_checkpoint."""

    @abstractmethod
    async def _write(self, unit: Callable[[apsw.Connection], T], *, touches: bool = False) -> T:
        """`touches`: the unit writes a page though it changes no row."""


class FileStore(Store):
    """A database that is a file of this machine, or in memory. Built by `open`.

    Closed by whoever opened it, after everything that uses it has ended.
    """

    def __init__(self, path: str, run: Run, connections: _Connections) -> None:
        super().__init__()
        self.path = path
        self._connections = connections
        self._run = run
        self._writer = connections.writer
        self._identity = connections.identity
        self._may_write = connections.may_write
        self._schema = connections.schema
        self._free_readers = list(connections.readers)
        self._readers = connections.readers
        self._trouble = ""
        self._on_changes: Callable[[bytes], None] | None = None
        self._write_turn = trio.Lock()
        self._read_turns = trio.Semaphore(max(1, len(connections.readers)))
        self._closed = False

    @classmethod
    async def open(cls, path: str | Path, run: Run, use: Use = Use.OWN) -> Self:
        """Opens or creates the database at `path`, brings its schema up to this build's, and proves that it can be written.

        ":memory:" gives one that dies with the store; it has one connection, which readers share. Raises `Invalid` for a file
        that is not for this build (another program's, a newer schema, too old an SQLite, a network file system) and
        `Unavailable` with code `storage_unavailable` for what a person must repair on the machine.
        """
        where = str(path)
        if where != MEMORY:
            where = os.path.abspath(where)  # noqa: ASYNC240 - looks at no file
        connections = await run(lambda: _open(where, use))
        return cls(where, run, connections)

    @classmethod
    def sharing(cls, other: FileStore, run: Run) -> Self:
        """Another process's way to a database in memory, for simulations: `run` is that process's."""
        assert other.path == MEMORY, "files are shared by opening them"
        return cls(MEMORY, run, other._connections)

    @property
    def mode(self) -> str:
        return "none" if self.path == MEMORY else "file"

    @property
    def durability(self) -> str:
        return "none" if self.path == MEMORY else "local"

    @property
    def place(self) -> str:
        return self.path

    @property
    def schema(self) -> int:
        return self._schema

    @property
    def may_write(self) -> bool:
        return self._may_write

    @property
    def trouble(self) -> str:
        return self._trouble

    def record(self, hook: Callable[[bytes], None]) -> None:
        """`hook(changes)` is called with what each transaction has changed (`store.changes`), right after it committed, in their order.

        In the thread of the write, before anybody else writes: it only keeps what it is given.
        """
        self._on_changes = hook

    async def _write(self, unit: Callable[[apsw.Connection], T], *, touches: bool = False) -> T:
        def work() -> tuple[T, bool]:
            with translated(self.path):
                before = self._writer.total_changes()
                with self._recorded(), immediate(self._writer):
                    self._look_at_schema(self._writer)
                    if not self._may_write:
                        raise Unavailable(
                            f"the store is at schema {self._schema}, which this build (schema {migrations.SCHEMA}) may read but not write",
                            code="schema_newer",
                        )
                    result = unit(self._writer)
                    self._check_identity()  # before the commit: a row written into a file that was moved away is a lost row
                return result, touches or self._writer.total_changes() != before

        async with self._write_turn:
            self._check_open()
            try:
                result, written = await self._run(work)
            except Unavailable as err:
                if err.code == STORAGE_UNAVAILABLE:
                    self._trouble = str(err)
                    self._on_trouble(self._trouble)
                raise
            if written:  # a commit of nothing succeeds on a full disk too
                self._trouble = ""
                self._on_trouble("")
            return result

    @contextlib.contextmanager
    def _recorded(self) -> Iterator[None]:
        """Around one transaction."""
        if self._on_changes is None:
            yield
            return
        recording = changes.Recording(self._writer)
        try:
            yield
            # After the commit: one that failed has changed nothing. Nobody else writes before the session is closed.
            if made := recording.changes():
                self._on_changes(made)
        finally:
            recording.close()

    async def apply(self, changesets: Sequence[bytes]) -> None:
        """Does to this copy what was recorded elsewhere, in one transaction, whatever epoch and schema it is of.

        Raises Diverged, and then nothing was done; Unavailable.
        """

        def work() -> None:
            with translated(self.path), immediate(self._writer):
                changes.apply(self._writer, changesets)

        async with self._write_turn:
            self._check_open()
            await self._run(work)

    async def read(self, unit: Callable[Concatenate[apsw.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        if not self._readers:
            async with self._write_turn:
                self._check_open()
                return await self._run(lambda: self._read(self._writer, lambda con: unit(con, *args, **kwargs)))
        async with self._read_turns:
            self._check_open()
            reader = self._free_readers.pop()
            try:
                return await self._run(lambda: self._read(reader, lambda con: unit(con, *args, **kwargs)))
            finally:
                self._free_readers.append(reader)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for connection in (*self._readers, self._writer):
            with contextlib.suppress(apsw.Error):  # the file is whole without the wal_checkpoint that closing tries
                connection.close()

    def _read(self, connection: apsw.Connection, unit: Callable[[apsw.Connection], T]) -> T:
        with translated(self.path):
            self._check_identity()
            with transaction(connection, "BEGIN"):
                self._look_at_schema(connection)
                return unit(connection)

    def _look_at_schema(self, connection: apsw.Connection) -> None:
        """Inside the transaction that it is for. Raises `Unavailable` for a file that this build can no longer read."""
        self._schema = migrations.version(connection)
        self._may_write = self._schema <= migrations.SCHEMA or migrations.may_write(connection)
        if self._schema > migrations.SCHEMA and not migrations.may_read(connection):
            raise Unavailable(
                f"the store is at schema {self._schema}, which this build (schema {migrations.SCHEMA}) cannot read: upgrade llmgw",
                code="schema_newer",
            )

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the store is closed", code=STORAGE_UNAVAILABLE)

    def _check_identity(self) -> None:
        if self._identity is not None and _identity(self.path) != self._identity:
            raise Unavailable(
                f"the store's file {self.path} was moved, replaced or deleted while it was open;"
                " put it back, or restart to begin with what is there now",
                code=STORAGE_UNAVAILABLE,
            )


def _nobody(trouble: str) -> None:
    """Watches a store that nobody else watches."""


@contextlib.contextmanager
def immediate(connection: apsw.Connection) -> Iterator[None]:
    """BEGIN IMMEDIATE … COMMIT, or ROLLBACK on any error: what was checked is still true when the rows are written."""
    with transaction(connection, "BEGIN IMMEDIATE"):
        yield


@contextlib.contextmanager
def translated(path: str) -> Iterator[None]:
    """Turns SQLite's and the system's errors into ours, each with its cause."""
    try:
        yield
    except apsw.BusyError as err:
        raise StoreBusy(
            f"another process has kept the store {path} locked for {BUSY_TIMEOUT_MS / 1000:g} s",
            code=STORAGE_UNAVAILABLE,
            retry_after_s=RETRY_AFTER_S,
        ) from err
    except apsw.NotADBError as err:
        raise Unavailable(f"{path} is not a database of llmgw, or is encrypted or damaged", code=STORAGE_UNAVAILABLE) from err
    except tuple(_REPAIRS) as err:
        why = next(text for kind, text in _REPAIRS.items() if isinstance(err, kind))
        raise Unavailable(f"storage unavailable: {why} ({path})", code=STORAGE_UNAVAILABLE, retry_after_s=RETRY_AFTER_S) from err
    except UnicodeEncodeError as err:
        raise Invalid("a text that is not valid Unicode cannot be stored", code="not_unicode") from err
    except apsw.Error as err:
        raise Broken(f"the store met something it does not expect ({type(err).__name__})") from err
    except OSError as err:
        raise Unavailable(f"storage unavailable: {err.strerror or err} ({path})", code=STORAGE_UNAVAILABLE) from err


# What a person can repair, in words. Anything that is not here is a fault of ours.
_REPAIRS: Final[dict[type[apsw.Error], str]] = {
    apsw.FullError: "the disk is full",
    apsw.ReadOnlyError: "the file or its folder is read-only",
    apsw.CantOpenError: "the file cannot be opened; is its folder there, and may this user write to it?",
    apsw.PermissionsError: "this user may not use the file",
    apsw.AuthError: "this user may not use the file",
    apsw.IOError: "the disk does not read or write the file (full, failing, or over a quota)",
    apsw.CorruptError: "the file is damaged; restore a backup",
    apsw.LockedError: "the file is locked",
    apsw.ProtocolError: "the file's lock is contended",
    apsw.NoMemError: "no memory is left",
    apsw.TooBigError: "a value is too large to be stored",
}


class _Connections:
    def __init__(self, writer: apsw.Connection, readers: tuple[apsw.Connection, ...], path: str) -> None:
        self.writer = writer
        self.readers = readers
        self.identity = None if path == MEMORY else _identity(path)
        self.schema = migrations.version(writer)
        self.may_write = migrations.may_write(writer)


def check_library(found: str) -> None:
    """Raises `Invalid` for an SQLite older than the one that several processes on one WAL file need."""
    numbers = tuple(int(part) for part in found.split(".")[:3])
    if numbers < SQLITE_MIN:
        needed = ".".join(map(str, SQLITE_MIN))
        raise Invalid(f"SQLite {found} is too old for the store, {needed} or newer is needed: upgrade apsw", code="sqlite_too_old")


def _open(path: str, use: Use = Use.OWN) -> _Connections:
    check_library(apsw.sqlite_lib_version())
    if path == MEMORY:
        writer = _connect(path)
        migrations.migrate(writer)
        return _Connections(writer, (), path)
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        raise Unavailable(f"storage unavailable: the store's folder {folder} does not exist", code=STORAGE_UNAVAILABLE)
    for file in (path, *(f"{path}-{side}" for side in SIDE_FILES)):
        if os.path.exists(file) and not os.path.isfile(file):  # a pipe would be waited for without end
            what = "a folder" if os.path.isdir(file) else "a device or a pipe"
            raise Invalid(f"the store's path {file} is {what}; the path of a file is expected", code="not_a_file")
    if (kind := network_file_system(folder)) is not None:
        raise Invalid(
            f"the store {path} would be on a network file system ({kind}), where SQLite's locks and shared memory do not hold;"
            " use a local disk",
            code="network_file_system",
        )
    opened: list[apsw.Connection] = []
    try:
        with translated(path):
            create(Path(path))
            if (found := look(Path(path), BUSY_TIMEOUT_MS)) is not None:  # first of all: what is another's stays as it is
                migrations.check_owner(found)
            opened.append(_connect(path, use))
            migrations.migrate(opened[0])
            if migrations.may_write(opened[0]):
                _prove_writable(opened[0])
            for _ in range(READERS):
                opened.append(_connect(path, use))
                opened[-1].pragma("query_only", 1)
                migrations.version(opened[-1])
            return _Connections(opened[0], tuple(opened[1:]), path)
    except BaseException as err:
        for connection in opened:
            with contextlib.suppress(apsw.Error):
                connection.close()
        if isinstance(err.__cause__, apsw.NotADBError):  # of the file that a person named, and not of the machine
            raise Invalid(f"{path} is not a database of llmgw, or is encrypted or damaged; move it away", code="not_our_database") from err
        raise


def _connect(path: str, use: Use = Use.OWN) -> apsw.Connection:
    connection = apsw.Connection(path, flags=apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE * (path == MEMORY))
    try:
        connection.set_busy_timeout(BUSY_TIMEOUT_MS)
        for option, value in _OPTIONS:
            connection.config(option, value)
        connection.pragma("trusted_schema", 0)
        if path != MEMORY and (mode := turn_log_on(connection)) != "wal":
            raise Unavailable(
                f"storage unavailable: the file system of {path} does not allow a write-ahead log (SQLite stayed at {mode!r})",
                code=STORAGE_UNAVAILABLE,
            )
        connection.pragma("synchronous", "OFF" if use is Use.COPY else "FULL")
        if use is Use.WORKING:
            connection.pragma("wal_autocheckpoint", 0)
    except BaseException:
        connection.close()
        raise
    return connection


_OPTIONS: Final = (
    (apsw.SQLITE_DBCONFIG_DQS_DML, 0),  # a mistyped column is an error, not a text
    (apsw.SQLITE_DBCONFIG_DQS_DDL, 0),
    (apsw.SQLITE_DBCONFIG_ENABLE_FKEY, 1),
    (apsw.SQLITE_DBCONFIG_DEFENSIVE, 1),
)


def _prove_writable(connection: apsw.Connection) -> None:
    """A real commit: a full or read-only disk is met at the start and not at the first order."""
    with immediate(connection):
        _touch(connection)


def _touch(connection: apsw.Connection) -> None:
    """Writes one page and changes no row."""
    connection.pragma("user_version", migrations.version(connection))


def _identity(path: str) -> tuple[tuple[int, int] | None, ...]:
    """Which files are behind `path` and its log now: (device, inode) each, None where there is none."""
    return tuple(_inode(name) for name in (path, f"{path}-wal"))


def _inode(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _check_epoch(connection: apsw.Connection, epoch: int) -> None:
    stored, owner = row(connection, "SELECT epoch, owner FROM meta")
    if epoch < stored:
        raise StaleEpoch(f"the store has met epoch {stored}, a write of epoch {epoch} is refused", epoch=stored, owner=owner)
    if epoch > stored:
        connection.execute("UPDATE meta SET epoch = ?, owner = ''", (epoch,))
