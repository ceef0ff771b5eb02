"""The folder of an epoch's working copy: `<data_dir>/epochs/<epoch>-<tenure>/`, one process, made for one epoch and never used again.

    llmgw.db           the working file; -wal and -shm are SQLite's
    meta/              Litestream's state, which belongs to one prefix (R-B51)
    s                  its control socket
    litestream.yml     its configuration
    lock               held by the process that works here, and dropped by the kernel with it

A copy that is found on disk is nothing to lead from: what the bucket has may be newer. So the folders of others are removed as soon
as nobody holds them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path
from typing import Final

import structlog

from llmgw.domain.errors import Conflict
from llmgw.domain.files import unusable, words
from llmgw.replication import prefixes

EPOCHS: Final = "epochs"
DATABASE: Final = "llmgw.db"
META: Final = "meta"
SOCKET: Final = "s"
CONFIGURATION: Final = "litestream.yml"
LOCK: Final = "lock"
FOLDER_MODE: Final = 0o700  # models may carry secrets in their environment
LOCK_MODE: Final = 0o600
WHAT: Final = "the folder of the store's working copy"
log = structlog.get_logger("llmgw.replication")


class Folder:
    """Ours until `close`, which does not remove it. Made by `make_folder`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor

    @property
    def database(self) -> Path:
        return self.path / DATABASE

    @property
    def meta(self) -> Path:
        return self.path / META

    @property
    def socket(self) -> Path:
        return self.path / SOCKET

    @property
    def configuration(self) -> Path:
        return self.path / CONFIGURATION

    def close(self) -> None:
        """Lets go of it: anybody may remove it then. May be called twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def sync(self) -> None:
        """What names stand in it is on the platter then. Raises OSError."""
        _sync(self.path)


def make_folder(data_dir: Path, epoch: int, tenure: str) -> Folder:
    """Blocking. Raises Conflict where there is one already: a copy is used once, by the tenure it was made for; Invalid, Unavailable."""
    path = data_dir / EPOCHS / prefixes.name_of(epoch, tenure)
    try:
        path.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        path.mkdir(mode=FOLDER_MODE)
        descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, LOCK_MODE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _sync(path.parent)
        except OSError:
            os.close(descriptor)
            raise
    except FileExistsError as err:
        raise Conflict(f"{path} is there already: a working copy is never used again", code="in_use") from err
    except OSError as err:
        raise unusable(err, WHAT, path, "move it away") from err
    return Folder(path, descriptor)


def remove_others(data_dir: Path, ours: Folder | None) -> int:
    """Removes every working copy that nobody holds but ours; how many. Blocking; what cannot be removed is told and stays."""
    removed = 0
    try:
        found = sorted((data_dir / EPOCHS).iterdir())
    except OSError:
        return 0
    for path in found:
        if prefixes.parse_name(path.name) is None or (ours is not None and path == ours.path):
            continue
        with contextlib.ExitStack() as held:
            try:
                descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                pass  # its maker died between two lines, or whoever removed it
            except OSError as err:
                log.warning("an old working copy of the store cannot be removed", folder=str(path), why=words(err))
                continue
            else:
                held.callback(os.close, descriptor)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    continue  # somebody works there
            try:
                shutil.rmtree(path)
            except OSError as err:
                log.warning("an old working copy of the store cannot be removed", folder=str(path), why=words(err))
            else:
                removed += 1
    return removed


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
