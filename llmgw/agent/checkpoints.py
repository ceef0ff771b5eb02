"""Checkpoints: where a model's files are on this node, and how much memory they will take. Downloads nothing."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path
from typing import Final

from llmgw.domain.errors import Invalid

FILES_FACTOR: Final = 1.2  # weights in memory, and what an engine adds per weight (product.md, `memory_mib`)
FIXED_MIB: Final = 512  # an engine without any weights
_MIB: Final = 1024 * 1024


def resolve(checkpoint: str, folder: Path) -> str:
    """The absolute path of a checkpoint: as it stands, or below the checkpoints folder. Empty for none.

    Blocking. Raises `Invalid` with code `checkpoint_missing` where there is nothing to read.
    """
    if not checkpoint:
        return ""
    path = (folder / checkpoint).absolute()  # an absolute checkpoint replaces the folder
    if not path.exists():
        raise Invalid(f"checkpoint missing: {path}", code="checkpoint_missing", param="checkpoint")
    if not os.access(path, os.R_OK):
        raise Invalid(f"checkpoint cannot be read: {path}", code="checkpoint_missing", param="checkpoint")
    return str(path)


def size_bytes(path: str) -> int:
    """Of a file, or of all files in a folder. Blocking; unreadable ones count as nothing."""
    if not path:
        return 0
    if not os.path.isdir(path):
        return _file_bytes(path)
    return sum(_file_bytes(os.path.join(folder, name)) for folder, _, names in os.walk(path) for name in names)


def estimate_mib(path: str) -> int:
    """The memory that an engine will probably need for this checkpoint, until it is measured. Blocking."""
    return math.ceil(size_bytes(path) / _MIB * FILES_FACTOR) + FIXED_MIB


def free_mib(folder: Path) -> int:
    """Free space of the file system that holds `folder`, or its nearest parent that exists. Blocking."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return shutil.disk_usage(folder).free // _MIB
    except OSError:
        return 0


def _file_bytes(path: str) -> int:
    try:
        return os.stat(path).st_size  # follows links: caches of checkpoints are made of them
    except OSError:
        return 0
