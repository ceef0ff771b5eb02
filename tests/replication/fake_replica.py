"""A replica in a folder: what is synced of a working file lies there as a whole file, under its prefix."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

import trio

from llmgw.domain.errors import Unavailable
from llmgw.store.copies import ReplicaReport, copy_whole


class FakeReplica:
    report: ReplicaReport | None = None

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.silent = False
        self.seed: Path | None = None  # what the first of all begins with
        self.kept: list[str] = []  # prefixes that something replicates to now
        self.syncs = 0
        self.gate: Callable[[], object] | None = None
        folder.mkdir(exist_ok=True)

    def prefix(self, epoch: int, tenure: str) -> str:
        return f"e-{epoch}-{tenure}"

    async def working_file(self, epoch: int, tenure: str) -> Path:
        folder = self.folder / f"work-{epoch}-{tenure}"
        folder.mkdir()
        return folder / "llmgw.db"

    async def restore(self, base: str, path: Path, progress: Callable[[], None]) -> None:
        if self.silent:
            raise Unavailable("the replica does not answer")
        begun = self.folder / f"{base}.db" if base else self.seed
        if begun is not None:
            shutil.copy(begun, path)

    async def keep(self, path: Path, prefix: str, task_status) -> None:
        async def sync() -> None:
            await trio.lowlevel.checkpoint()
            if self.silent:
                raise Unavailable("the replica does not answer")
            self.syncs += 1
            fresh = self.folder / f"{prefix}.new"
            with contextlib.suppress(FileNotFoundError):
                fresh.unlink()
            await trio.to_thread.run_sync(copy_whole(str(path)), fresh)
            fresh.rename(self.folder / f"{prefix}.db")

        self.kept.append(prefix)
        try:
            task_status.started(sync)
            await trio.sleep_forever()
        finally:
            self.kept.remove(prefix)

    async def clean_up(self, base: str, confirmed: Callable[[], bool]) -> None:
        return None
