"""One running process per data directory, and per store file: a lock that dies with its holder, and names it.

The kernel drops the lock when the process ends, however it ends; the pid in the file is for people only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from llmgw.domain.errors import Conflict
from llmgw.domain.files import unusable

LOCK_NAME: Final = "lock"
DIR_MODE: Final = 0o700  # tokens, secrets and logs live there
SECRET_MODE: Final = 0o600


@contextlib.contextmanager
def claim(directory: Path) -> Iterator[None]:
    """Makes the directory when it is missing, and holds it. Raises Conflict naming the pid, and what `unusable` makes of the rest."""
    try:
        directory.mkdir(mode=DIR_MODE, parents=True, exist_ok=True)
    except OSError as err:
        raise unusable(err, "the data directory", directory, "move it away, or name another directory") from err
    with claim_file(directory / LOCK_NAME, f"the data directory {directory}"):
        yield


@contextlib.contextmanager
def claim_file(lock: Path, what: str) -> Iterator[None]:
    """Holds `lock` for `what`, which is named in the error. Raises Conflict, and what `unusable` makes of the rest."""
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, SECRET_MODE)
    except OSError as err:
        raise unusable(err, f"the lock of {what}", lock, "move it away") from err
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError as err:
            raise Conflict(f"{what} is in use by pid {_holder(descriptor)}", code="in_use") from err
        except OSError as err:
            raise unusable(err, f"the lock of {what}", lock) from err
        yield
    finally:
        os.close(descriptor)


def _holder(descriptor: int) -> str:
    text = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
    return text if text.isdigit() else "(unknown)"
