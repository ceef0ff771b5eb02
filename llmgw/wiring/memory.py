"""How this process keeps memory: its garbage collector where a fleet's state lives, its allocator where bodies pass through."""

from __future__ import annotations

import ctypes
import gc
from typing import Final

# A full collection walks everything that lives: 350 ms with 1,000 nodes and 5,000 replicas, in which no list is published and an
# embedded router answers nobody. What we hold is values without cycles, freed by counting; cycles come from errors and tasks,
# and the young generations find those. Measured: with these numbers a full one comes about once an hour there.
YOUNG: Final = 50_000
MIDDLE: Final = 50
OLD: Final = 200


def calm_collector() -> None:
    """For the roles that hold a cluster's state. What lives at this moment is not looked at again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, OLD)


# From malloc.h. By itself the C library gives a freed megabyte back to the kernel and has it filled with zeros for the next body: of
# what a body of 1 MB cost, that was up to half (router-measurements.md (d), where these numbers are from).
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
TRIM_THRESHOLD: Final = 64 * 1024 * 1024  # bytes that may lie unused at the heap's end
MMAP_THRESHOLD: Final = 32 * 1024 * 1024  # bytes from which on a block is got from the kernel by itself; the most that glibc takes


def keep_freed_memory() -> None:
    """For the roles that relay bodies: what one of them leaves behind is there for the next. Does nothing where there is no glibc."""
    library = ctypes.CDLL(None)
    try:
        trim, allow = library.malloc_trim, library.mallopt
    except AttributeError:
        return
    trim(0)  # what starting up has left
    allow(_M_MMAP_THRESHOLD, MMAP_THRESHOLD)
    allow(_M_TRIM_THRESHOLD, TRIM_THRESHOLD)
