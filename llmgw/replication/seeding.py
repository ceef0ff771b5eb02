"""The first copy of a store that begins to be replicated: what `[store] path` holds, taken over by SQLite's own backup.

Whoever uses that file may go on reading it; it is not changed, and not looked at again.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

import apsw

from llmgw.domain.errors import Invalid, Unavailable
from llmgw.domain.files import unusable
from llmgw.replication.copies import Copy, verify
from llmgw.replication.folders import Folder
from llmgw.settings.database_file import create, look
from llmgw.store.connection import BUSY_TIMEOUT_MS, translated
from llmgw.store.migrations import check_owner

PARTIAL: Final = "seed.partial"
PAGES: Final = 1024  # a step; a writer of the file makes the copy begin anew, and a store has few pages


def copy_seed(path: Path, folder: Folder) -> Copy | None:
    """Blocking. What now is the folder's database; None where there is no file, or nothing in it: the store begins empty.

    Raises Invalid for a file of another program, Unavailable for one that cannot be read or whose copy fails its check.
    """
    try:
        if not path.exists() or path.stat().st_size == 0:
            return None
    except OSError as err:
        raise unusable(err, "the store that the replica begins with", path) from err
    partial = folder.path / PARTIAL
    with translated(str(path)):
        try:
            found = look(path, BUSY_TIMEOUT_MS)
        except apsw.NotADBError as err:
            raise Invalid(f"{path} is not a database of llmgw, or is encrypted or damaged; move it away", code="not_our_database") from err
        if found is None:
            return None
        check_owner(found)
        partial.unlink(missing_ok=True)
        create(partial)
        with (
            contextlib.closing(apsw.Connection(str(partial))) as target,
            contextlib.closing(apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)) as source,
        ):
            source.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)  # its log is its own to carry over
            source.set_busy_timeout(BUSY_TIMEOUT_MS)
            with target.backup("main", source, "main") as backup:
                while not backup.done:
                    backup.step(PAGES)
            target.pragma("journal_mode", "delete")  # one file, with nothing beside it
    return settle(partial, folder)


def settle(partial: Path, folder: Folder) -> Copy:
    """Checks a copy that was made in the folder, and gives it the database's name once it is on the platter. Blocking.

    Raises Unavailable; the copy is then still there, under its own name.
    """
    found = verify(partial)
    if folder.database.exists():
        raise Unavailable(f"{folder.database} is there already; a copy is never put over it", code="in_use")
    try:
        descriptor = os.open(partial, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        partial.rename(folder.database)
        folder.sync()
    except OSError as err:
        raise unusable(err, "the copy of the store", partial) from err
    return found
