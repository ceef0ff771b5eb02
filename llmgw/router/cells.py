"""Whole numbers in memory that the workers of one router share: what each has in flight now, and so the sum over all.

One writer per cell: worker `n` writes the n-th cell of a slot, everybody reads. A sum costs about 0.2 us and is at most an instant
old. Which slot counts what is the parent's to say (`slots`).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from typing import Final

SLOTS_MAX: Final = 16_384  # three times the longest list that is measured, and its keys; pages that nobody counts in cost nothing
_CELL_BYTES: Final = 8


class Cell:
    """One worker's count in a slot."""

    __slots__ = ("_row", "_worker")

    def __init__(self, row: memoryview, worker: int) -> None:
        self._row = row
        self._worker = worker

    def add(self, number: int) -> None:
        """In this worker's own cell."""
        self._row[self._worker] += number

    def total(self) -> int:
        """Over all workers."""
        return sum(self._row)


class Cells:
    """The memory behind `descriptor`, for `workers` workers."""

    def __init__(self, descriptor: int, workers: int) -> None:
        self.descriptor = descriptor
        self._workers = workers
        self._view = memoryview(mmap.mmap(descriptor, _size(workers))).cast("q")

    @classmethod
    def create(cls, workers: int) -> Cells:
        """New ones, all 0. Raises OSError."""
        descriptor = os.memfd_create("llmgw-workers", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _size(workers))
        return cls(descriptor, workers)

    def cell(self, slot: int, worker: int) -> Cell:
        return Cell(self._row(slot), worker)

    def total(self, slot: int) -> int:
        """Over all workers."""
        return sum(self._row(slot))

    def clear(self, worker: int, slots: Iterable[int]) -> None:
        """What a worker that died had in flight is over. Only once it is gone: until then the cells are its own."""
        for slot in slots:
            self._view[slot * self._workers + worker] = 0

    def _row(self, slot: int) -> memoryview:
        return self._view[slot * self._workers : (slot + 1) * self._workers]


def _size(workers: int) -> int:
    return SLOTS_MAX * workers * _CELL_BYTES
