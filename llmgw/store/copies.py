"""The copy of the store that a control plane of a replicated store reads: rows that are durable, and nothing else.

It begins as a whole file and goes on by the changes that a leader has recorded, one position after another; what it cannot follow
is replaced by another whole file. A leader reads such a copy too, so that nothing is planned from or shown before it is durable.
Never led from: a leader restores its working file from the replica. The newest file stays on the disk for a start without the
replica.
"""

from __future__ import annotations

import contextlib
import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Concatenate, Final, ParamSpec, TypeVar

import apsw
import attrs
import trio

from llmgw.domain.errors import LlmgwError
from llmgw.domain.ports import Machine
from llmgw.settings.database_file import FILE_MODE
from llmgw.store.connection import SIDE_FILES, FileStore, Store, Use, translated

T = TypeVar("T")
P = ParamSpec("P")

SUFFIX: Final = ".db"
RESTORED: Final = ".restored"  # on its way to become a copy
NAME_BYTES: Final = 4


@attrs.frozen(order=True)
class Position:
    """What a copy has: all that was durable under this epoch up to change `number`. Epoch 0: of no known position."""

    epoch: int = 0
    number: int = 0


@attrs.frozen
class News:
    """What leads from somebody's position to `position`: `whole`, a whole file, where it is given, and then `changes` in their order."""

    position: Position
    changes: tuple[bytes, ...] = ()
    whole: bytes | None = attrs.field(default=None, repr=False)


@attrs.frozen
class ReplicaReport:
    """How a leader's replicating fares, for metrics and status; times on the machine's own clock. `success_s` is when everything was
    last known to be in the replica, None: not yet since `began_s`."""

    alive: bool
    restarts: int
    lag: int  # transactions that are known here and not known to be in the replica
    trouble: str
    began_s: float
    success_s: float | None
    program: str


class CopiedStore(Store):
    """A store that is read as a copy, which standbys follow."""

    @property
    @abstractmethod
    def position(self) -> Position:
        """What the copy here has."""

    @abstractmethod
    async def news(self, position: Position) -> News:
        """On a leader, for a standby that has `position`; waits a moment for something new. Raises Unavailable where nobody leads here."""

    @abstractmethod
    async def catch_up(self) -> None:
        """On a standby: returns once what is read here is at least what was durable at the call, or after CATCH_UP_S."""

    @property
    @abstractmethod
    def pending(self) -> int:
        """Writes of a leader that are not known to be durable."""

    @property
    @abstractmethod
    def replica_report(self) -> ReplicaReport | None:
        """How replicating fares; None on a control plane that has not led."""

    @abstractmethod
    async def follow(self, news: News) -> bool:
        """On a standby, what a leader told. Is anything new? Raises Diverged, Invalid, Unavailable."""

    @abstractmethod
    async def restore_copy(self, base: str) -> None:
        """While no leader tells anything: what is published under `base`. Raises Invalid, Unavailable."""

    @abstractmethod
    async def clean_up(self, base: str, confirmed: Callable[[], bool]) -> None:
        """For a leader, once in a while: what nobody will restore from any more goes. Raises Unavailable."""


class _Held:
    """A file that is read: closed once it is out of use and the last reader has gone."""

    def __init__(self, store: FileStore) -> None:
        self.store = store
        self._readers = 0
        self._retired = False

    async def read(self, unit: Callable[[apsw.Connection], T]) -> T:
        self._readers += 1
        try:
            return await self.store.read(unit)
        finally:
            self._readers -= 1
            self._close_if_done()

    def retire(self) -> None:
        self._retired = True
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._retired and not self._readers:
            self.store.close()
            for file in (self.store.path, *(f"{self.store.path}-{side}" for side in SIDE_FILES)):
                with contextlib.suppress(OSError):
                    os.unlink(file)


class Copy:
    """Built by `open`. `folder` belongs to this process; `position` is what the copy has. Whoever changes it, or needs it to stand
    still, holds `turn`: a standby that follows and a leader that begins may meet here."""

    def __init__(self, machine: Machine, folder: Path, held: _Held) -> None:
        self._machine = machine
        self.folder = folder
        self._held = held
        self.turn = trio.Lock()
        self.position = Position()
        self.as_of_s: float | None = None  # when this was last known to be all that there is; None: since before this process

    @classmethod
    async def open(cls, machine: Machine, folder: Path, fill: Callable[[Path], None] | None) -> Copy:
        """The copy that `fill(path)` makes; with None the newest that an earlier process left here, or an empty one.

        Raises what `fill` and `FileStore.open` raise.
        """
        await machine.run_sync(lambda: folder.mkdir(mode=0o700, parents=True, exist_ok=True))
        left = await machine.run_sync(lambda: _left(folder))
        store = None
        if fill is None and left:
            store = await _open_left(machine, left)
        if store is None:
            store = await _make(machine, folder, fill)
        await machine.run_sync(lambda: _remove(file for file in left if str(file) != store.path))
        await machine.run_sync(lambda: _remove(folder.glob(f"*{RESTORED}")))
        return cls(machine, folder, _Held(store))

    @property
    def schema(self) -> int:
        return self._held.store.schema

    @property
    def may_write(self) -> bool:
        """May this build write a store of the schema that the copy has?"""
        return self._held.store.may_write

    async def read(self, unit: Callable[Concatenate[apsw.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """As `Store.read`."""
        return await self._held.read(lambda connection: unit(connection, *args, **kwargs))

    async def replace(self, fill: Callable[[Path], None], position: Position) -> None:
        """The whole file that `fill(path)` makes takes its place. Raises what `fill` and opening it raise, and then nothing changed."""
        store = await _make(self._machine, self.folder, fill)
        before, self._held, self.position = self._held, _Held(store), position
        before.retire()

    async def apply(self, changes: Sequence[bytes], position: Position) -> None:
        """`changes` lead from the position here to this one. Raises Diverged, Unavailable, and then nothing changed."""
        if changes:
            await self._held.store.apply(changes)
        self.position = position

    async def dump(self) -> tuple[Position, bytes]:
        """The whole file as it is at its position."""
        position = self.position
        return position, await self.read(lambda connection: connection.serialize("main"))

    def close(self) -> None:
        """The file stays."""
        self._held.store.close()


def write_whole(data: bytes) -> Callable[[Path], None]:
    """For `replace`: the file that somebody dumped."""

    def fill(path: Path) -> None:
        with translated(str(path)), open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, FILE_MODE), "wb") as file:
            file.write(data)

    return fill


def copy_whole(source: str) -> Callable[[Path], None]:
    """For `replace`: what stands in the database at `source` now, which others may be writing."""

    def fill(path: Path) -> None:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, FILE_MODE))
        with translated(str(path)):
            into = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
            try:
                # Not read-only: a log that nobody has open needs its shared memory made anew.
                out = apsw.Connection(source, flags=apsw.SQLITE_OPEN_READWRITE)
                try:
                    with into.backup("main", out, "main") as backup:
                        backup.step(-1)
                finally:
                    out.close()
            finally:
                into.close()

    return fill


def copy_unit(connection: apsw.Connection, path: Path) -> None:
    """A unit for `Store.read`: what stands in the database, of one instant, as a new file at `path` with nothing beside it, on the platter.

    Writers go on meanwhile. Nothing is left at `path` where it fails.
    """
    with translated(str(path)):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, FILE_MODE))
        try:
            into = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
            try:
                with into.backup("main", connection, "main") as backup:
                    backup.step(-1)
                into.pragma("journal_mode", "delete")
            finally:
                into.close()
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except BaseException:  # re-raised: only the half-written file is taken away
            _remove((path,))
            raise


async def _make(machine: Machine, folder: Path, fill: Callable[[Path], None] | None) -> FileStore:
    path = folder / f"{machine.fresh_hex(NAME_BYTES)}{SUFFIX}"
    try:
        if fill is not None:
            await machine.run_sync(lambda: fill(path))
        return await FileStore.open(path, machine.run_sync, Use.COPY)
    except BaseException:
        _remove((path,))
        raise


async def _open_left(machine: Machine, left: Sequence[Path]) -> FileStore | None:
    """The newest that can be read; others are of no use."""
    for file in left:
        with contextlib.suppress(LlmgwError):
            return await FileStore.open(file, machine.run_sync, Use.COPY)
    return None


def _left(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}"), key=lambda file: (-file.stat().st_mtime, file.name))


def _remove(files: Iterable[Path]) -> None:
    for file in files:
        for name in (file, *(file.with_name(f"{file.name}-{side}") for side in SIDE_FILES)):
            with contextlib.suppress(OSError):
                name.unlink()
