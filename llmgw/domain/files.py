"""What it means that a file of ours cannot be used: which kind of error, in which words. Opens nothing.

A fault of the file itself (a folder in its place, another user's) is `Invalid`: a person repairs it and starts again. A fault
of the machine (a full disk) is `Unavailable`.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from llmgw.domain.errors import Invalid, Unavailable

STORAGE_UNAVAILABLE: Final = "storage_unavailable"
UNUSABLE_FILE: Final = "unusable_file"
_OF_MACHINE: Final[Mapping[int, str]] = {
    errno.ENOSPC: "the disk is full; make room on it",
    errno.EDQUOT: "this user's share of the disk is used up; make room",
    errno.EROFS: "the file system is read-only; mount it for writing",
    errno.EIO: "the disk does not read or write it; the kernel's log says more",
    errno.ENOMEM: "no memory is left",
    errno.EMFILE: "this process has too many files open",
    errno.ENFILE: "this machine has too many files open",
}
_OF_FILE: Final[Mapping[int, str]] = {
    errno.EISDIR: "a folder is in its place",
    errno.EEXIST: "a file is in its place",
    errno.ENOTDIR: "a part of its path is a file and no folder",
    errno.ENOENT: "its folder does not exist; make it",
    errno.EACCES: "the user that runs this may not use it; give it to that user",
    errno.EPERM: "the user that runs this may not use it; give it to that user",
    errno.ELOOP: "its links lead in a circle",
}


def unusable(err: OSError, what: str, path: Path, remedy: str = "") -> Invalid | Unavailable:
    """The error for `err`, met with `path`, which is `what`: "the data directory". `remedy`: what helps when the file itself is at fault.

    To be raised from `err`.
    """
    number = err.errno or 0
    if number in _OF_MACHINE:
        return Unavailable(f"{path} ({what}) cannot be used: {_OF_MACHINE[number]}", code=STORAGE_UNAVAILABLE)
    why = _OF_FILE.get(number) or err.strerror or str(err)
    hint = f"; {remedy}" if remedy and err.errno in (errno.EISDIR, errno.EEXIST, errno.ENOTDIR) else ""
    return Invalid(f"{path} ({what}) cannot be used: {why}{hint}", code=UNUSABLE_FILE)


def reason(err: OSError) -> str:
    """What the system said, alone: for a sentence that names the file itself."""
    return err.strerror or str(err)


def words(err: BaseException) -> str:
    """What the system said, without Python's numbers around it, after the file's name where it is known.

    Of another error that an OSError caused (a broken stream), what caused it.
    """
    if not isinstance(err, OSError):
        return words(err.__cause__) if isinstance(err.__cause__, OSError) else str(err)
    of_tls = getattr(err, "reason", None)
    if isinstance(of_tls, str):
        return of_tls.replace("_", " ").lower()
    said = reason(err)
    return f"{err.filename}: {said}" if isinstance(err.filename, str) else said  # a number is a descriptor, which tells nobody anything


def machines_fault(err: OSError) -> bool:
    """Is it the machine's (a full disk), and not the file's?"""
    return err.errno in _OF_MACHINE
