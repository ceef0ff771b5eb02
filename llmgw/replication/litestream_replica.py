"""The replica for real: Litestream as a child, and the bucket that it writes to. What `ReplicatedStore` asks for, carried out."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

import apsw
import trio

from llmgw.domain.errors import Invalid
from llmgw.domain.ports import Machine
from llmgw.lease.record import RANDOM_BYTES
from llmgw.replication import prefixes
from llmgw.replication.cleaning import clean_up
from llmgw.replication.durable import Sync
from llmgw.replication.folders import Folder, make_folder, remove_others
from llmgw.replication.litestream import Litestream
from llmgw.replication.prefix_store import PrefixStore
from llmgw.replication.programs import Found, find_unless_cancelled
from llmgw.replication.restoring import restore
from llmgw.replication.seeding import copy_seed
from llmgw.settings.object_place import ObjectPlace
from llmgw.store.copies import ReplicaReport

READING: Final = "reading"  # in the data directory: where a standby's copies are restored


class LitestreamReplica:
    """`seed` is the file whose rows the first leader of all begins with, where it is there."""

    def __init__(self, machine: Machine, place: ObjectPlace, data_dir: Path, seed: Path) -> None:
        self._machine = machine
        self._place = place
        self._data_dir = data_dir
        self._seed = seed
        self._prefixes = PrefixStore(place)
        self._program: Found | None = None
        self._folder: Folder | None = None
        self._keeper: Litestream | None = None

    # --- before anything is used

    async def check_program(self) -> None:
        """Raises Invalid where Litestream is not there, or too old."""
        self._program = await find_unless_cancelled()

    async def check_unused(self) -> None:
        """For a bucket without a lease. Raises Invalid where it holds the copy of a store all the same; Unavailable."""
        if there := await self._machine.run_sync(self._prefixes.copies):
            raise Invalid(
                f"{self._place} has no lease, and holds copies of a store all the same, the newest under {there[-1]}: the lease's record"
                " was removed. `llmgw store adopt` makes one of them the base again",
                code="lease_gone",
            )

    def seed_cluster_id(self) -> str:
        """Blocking. Of the seed; "" without one, and where it has none."""
        if not self._seed.is_file() or not self._seed.stat().st_size:
            return ""
        try:
            with contextlib.closing(apsw.Connection(str(self._seed), flags=apsw.SQLITE_OPEN_READWRITE)) as connection:
                return next(iter(connection.execute("SELECT cluster_id FROM meta")))[0] or ""
        except apsw.Error:  # whoever leads first says what is wrong with it
            return ""

    # --- what a leader asks for

    def prefix(self, epoch: int, tenure: str) -> str:
        return prefixes.prefix_of(epoch, tenure)

    async def working_file(self, epoch: int, tenure: str) -> Path:
        def make() -> Folder:
            folder = make_folder(self._data_dir, epoch, tenure)
            remove_others(self._data_dir, folder)
            return folder

        if self._folder is not None:
            self._folder.close()
        self._folder = await self._machine.run_sync(make)
        return self._folder.database

    async def restore(self, base: str, path: Path, progress: Callable[[], None]) -> None:
        folder = self._folder
        if folder is not None and folder.database == path:
            if base:
                await restore(self._machine, self._place, base, folder, program=self._program, progress=progress)
            else:
                await self._machine.run_sync(lambda: copy_seed(self._seed, folder))
            return
        place = self._data_dir / READING
        fresh = await self._machine.run_sync(lambda: make_folder(place, 1, self._machine.fresh_hex(RANDOM_BYTES)))
        try:
            await restore(self._machine, self._place, base, fresh, program=self._program, progress=progress)
            await self._machine.run_sync(lambda: fresh.database.rename(path))
        finally:
            fresh.close()
            with trio.CancelScope(shield=True):
                await self._machine.run_sync(lambda: shutil.rmtree(place, ignore_errors=True))

    async def keep(self, path: Path, prefix: str, task_status: trio.TaskStatus[Sync]) -> None:
        folder = self._folder
        assert folder is not None, "the working file was made here"
        assert folder.database == path, "one working file at a time"
        keeper = self._keeper = Litestream(self._machine, self._place, prefix, folder, program=self._program)
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(keeper.run)
                task_status.started(keeper.sync)
        finally:
            folder.close()

    async def clean_up(self, base: str, confirmed: Callable[[], bool]) -> None:
        await clean_up(self._machine, self._prefixes, base, confirmed)

    @property
    def report(self) -> ReplicaReport | None:
        if self._keeper is None:
            return None
        said = self._keeper.report
        program = f"litestream {said.version}".strip()
        return ReplicaReport(said.alive, said.restarts, said.lag, said.trouble, said.began_s, said.success_s, program)
