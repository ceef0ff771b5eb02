"""Where a running `llmgw dev` tells `llmgw ctl` of itself: a file with its address and token, locked for as long as it runs.

The kernel drops the lock when the process ends, however it ends, so a file that was left behind is told from one that counts.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def hold(file: Path) -> int:
    """Locks the file for as long as the returned descriptor is open. Raises OSError."""
    descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # who looks whether it is held holds it for an instant
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def is_held(file: Path) -> bool:
    """Does the process that wrote it run? Also where a file system cannot tell: whoever asks goes on to see whether it answers."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def running_files(folder: Path) -> list[Path]:
    """Those of every `dev` that runs now, by name."""
    try:
        return [file for file in sorted(folder.glob("*.toml")) if is_held(file)]
    except OSError:
        return []
