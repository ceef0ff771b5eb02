"""Two processes that open a new file at the same instant both get it. SQLite waits for a lock, but not where the log is turned on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import apsw
import pytest

from llmgw.lease.file import LeaseFile
from llmgw.store.connection import _open

HELD_S = 0.2  # how long the other one is in the middle of its first write


def open_lease(path: Path) -> None:
    lease = LeaseFile(path)
    lease.read("")
    lease.close()


def open_store(path: Path) -> None:
    found = _open(str(path))
    for connection in (*found.readers, found.writer):
        connection.close()


@pytest.mark.parametrize("opened", [open_lease, open_store])
def test_a_new_file_that_another_process_is_just_making_is_waited_for(tmp_path: Path, opened: Callable[[Path], None]):
    path = tmp_path / "new.db"
    path.touch(0o600)
    other = apsw.Connection(str(path))
    other.execute("BEGIN IMMEDIATE")
    release = threading.Timer(HELD_S, other.execute, ("ROLLBACK",))
    release.start()
    opened(path)
    release.join()
    other.close()
