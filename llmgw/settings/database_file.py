"""What every SQLite file of ours has in common: how it is made, looked at before it is touched, and given its write-ahead log.

Stands here because the rooms `lease` and `store` are siblings, and this is what both of them see beside `filesystem`. Knows no
table. Nothing of `settings` imports it: commands that open no database load no SQLite.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import quote

import apsw
import attrs

from llmgw.domain.errors import Invalid

FILE_MODE: Final = 0o600  # models may carry secrets in their environment; -wal and -shm take the same mode
LOG_TRIES: Final = 20  # two that open a new file at once meet once or twice
NEW_FILE_BYTES_MAX: Final = 65_536  # SQLite's largest page: a file of ours that has no log yet is of one page at most


@attrs.frozen
class Contents:
    """What a database says of itself: whose it is, its schema's number, and the names of its tables."""

    application_id: int
    version: int
    tables: tuple[str, ...]


def create(path: Path) -> bool:
    """An empty file at `path` of mode FILE_MODE; False when there is a file already. Raises Invalid for what is no file, OSError.

    Only a file that is not there is opened by hand: closing another descriptor of an open database would drop SQLite's locks on
    it (POSIX), and a file made by SQLite itself would have the umask's mode.
    """
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, FILE_MODE))
    except FileExistsError:
        if not path.is_file():  # a pipe would be waited for without end
            raise Invalid(f"{path} is not a file", code="not_a_file") from None
        return False
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return True


def look(path: Path, busy_timeout_ms: int) -> Contents | None:
    """What is in the file at `path`, without changing a byte of it; None where a new file was not finished. Raises apsw.Error.

    To be asked before it is opened for writing: that turns its log on, and may carry another program's unfinished work out.
    """
    # Without a log there is nobody to wait for and nothing to make beside the file: it is read as it lies.
    if _size(path.with_name(f"{path.name}-wal")) == 0:
        with contextlib.suppress(apsw.CorruptError):  # somebody writes it just now
            return _look(path, busy_timeout_ms, "&immutable=1")
    try:
        return _look(path, busy_timeout_ms, "")
    except (apsw.CorruptError, apsw.ReadOnlyError):
        # Whoever made it was killed before its first page was whole. A larger one is damaged, or another program's.
        if _size(path) > NEW_FILE_BYTES_MAX:
            raise
        return None


def _look(path: Path, busy_timeout_ms: int, option: str) -> Contents:
    connection = apsw.Connection(f"file:{quote(str(path))}?mode=ro{option}", flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)
    try:
        connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)  # another program's log is its own to carry over
        connection.set_busy_timeout(busy_timeout_ms)
        with transaction(connection, "BEGIN"):  # of a file that is just being made, all of it or nothing
            return contents(connection)
    finally:
        connection.close()


def contents(connection: apsw.Connection) -> Contents:
    """Inside a transaction. Raises apsw.Error."""
    application_id, version = connection.pragma("application_id"), connection.pragma("user_version")
    names = connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY name")
    return Contents(int(str(application_id)), int(str(version)), tuple(str(name) for (name,) in names))


def turn_log_on(connection: apsw.Connection) -> object:
    """Returns the mode that SQLite is in then, "wal" where the file system allows it. It does not wait by itself where two do that
    to a new file at once. Raises apsw.Error."""
    for _ in range(LOG_TRIES):
        try:
            return connection.pragma("journal_mode", "wal")
        except apsw.BusyError:
            with transaction(connection):  # this waits for the other's turn
                pass
    return connection.pragma("journal_mode", "wal")


@contextlib.contextmanager
def transaction(connection: apsw.Connection, begin: str = "BEGIN IMMEDIATE") -> Iterator[None]:
    """`begin` … COMMIT, or ROLLBACK on any error."""
    connection.execute(begin)
    try:
        yield
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:  # SQLite has ended it itself after a full disk or an I/O error
            with contextlib.suppress(apsw.Error):
                connection.execute("ROLLBACK")


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
