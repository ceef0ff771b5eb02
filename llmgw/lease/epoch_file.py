"""The highest epoch that a control plane has used, on its own disk and synced before it is used.

It keeps a store that was rolled back or wiped from bringing an old epoch back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from llmgw.domain.errors import Invalid
from llmgw.domain.files import unusable
from llmgw.domain.ports import Disk
from llmgw.lease.record import NUMBER_MAX

EPOCH_FILE: Final = "epoch"
DIGITS_MAX: Final = 16  # of the highest epoch that a record can carry
WHAT: Final = "the file of the last epoch"
# The store counts too, and is asked: only with both gone could an epoch come again.
REMEDY: Final = "move it away if the store is still the old one; else put a number there that is no lower than an agent's fence.json has"


def read_epoch(disk: Disk, path: Path) -> int:
    """The highest epoch that this machine has used; 0 before the first. Raises Invalid for junk, Unavailable for a disk at fault.

    Starting again from 0 could send an epoch that agents have met from somebody else.
    """
    try:
        data = disk.read(path)
    except OSError as err:
        raise unusable(err, WHAT, path, REMEDY) from err
    if data is None:
        return 0
    raw = data.decode("ascii", "replace").strip()
    if not (raw.isascii() and raw.isdigit()) or len(raw) > DIGITS_MAX or int(raw) > NUMBER_MAX:
        raise Invalid(f"{path} does not hold the last epoch, a whole number; {REMEDY}", code="bad_epoch_file")
    return int(raw)


def write_epoch(disk: Disk, path: Path, epoch: int) -> None:
    """Only upward. Raises Invalid, Unavailable, OSError."""
    if read_epoch(disk, path) < epoch:
        disk.write(path, f"{epoch}\n".encode())
