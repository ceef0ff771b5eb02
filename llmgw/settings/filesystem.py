"""Is a folder on a network file system? SQLite's locks and its shared memory do not hold there.

Best effort: the kernel's own list of mounts, by name. Reads one file of /proc, never the folder itself.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

# Names as the kernel prints them. A virtual machine's own shared folder (9p) is among them: its mmap is not coherent.
NETWORK: Final = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "coda", "fhgfs", "gfs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs"}
    | {"nfs", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "smbfs"}
)
LOCAL_FUSE: Final = frozenset({"fuse.fuse-overlayfs", "fuseblk"})  # containers without root; NTFS and exFAT disks
_OCTAL: Final = re.compile(r"\\([0-7]{3})")
_MOUNTS: Final = Path("/proc/self/mountinfo")


def network_file_system(folder: str) -> str | None:
    """The kind of network file system that `folder` is on, or None for a local one and where the kernel does not tell."""
    try:
        mounts = _MOUNTS.read_text(errors="surrogateescape")
    except OSError:
        return None
    kind = kind_of(os.path.realpath(folder), mounts)
    return kind if is_network(kind) else None


def is_network(kind: str) -> bool:
    return kind in NETWORK or ((kind == "fuse" or kind.startswith("fuse.")) and kind not in LOCAL_FUSE)


def kind_of(folder: str, mounts: str) -> str:
    """The type of the mount that holds `folder`, an absolute path without links; "" where none does. Later mounts cover earlier."""
    best, kind = -1, ""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        fields, rest = before.split(" "), after.split(" ")
        if len(fields) < 5 or not rest[0]:
            continue
        point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[4])
        inside = folder == point or folder.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:
            best, kind = len(point), rest[0]
    return kind
