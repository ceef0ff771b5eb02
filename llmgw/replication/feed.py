"""What a leader tells standbys of its store: durable changes, one after another, or the whole of it where they cannot follow.

Keeps a bounded tail of them. Positions are those of `store.copies`: an epoch, and the number of changes since it began.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

import trio

from llmgw.store.copies import Position

BYTES_MAX: Final = 8 * 1024 * 1024  # chosen: a standby asks every second; who is farther behind than this gets the whole


class Feed:
    """The tail. `changed` is set, and replaced, whenever there is something new."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._tail: deque[bytes] = deque()
        self._bytes = 0
        self.position = Position()
        self.changed = trio.Event()

    def begin(self, position: Position) -> None:
        """From here on; what was before is of no use to anybody."""
        self._tail.clear()
        self._bytes = 0
        self.position = position
        self._tell()

    def add(self, changes: Sequence[bytes]) -> None:
        """Each is one number further."""
        for one in changes:
            self._tail.append(one)
            self._bytes += len(one)
        self.position = Position(self.position.epoch, self.position.number + len(changes))
        while self._tail and self._bytes > self._bytes_max:
            self._bytes -= len(self._tail.popleft())
        self._tell()

    def after(self, position: Position) -> tuple[bytes, ...] | None:
        """The changes since `position`; None where only the whole helps."""
        missing = self.position.number - position.number
        if position.epoch != self.position.epoch or not 0 <= missing <= len(self._tail):
            return None
        return tuple(self._tail)[len(self._tail) - missing :]

    def _tell(self) -> None:
        self.changed.set()
        self.changed = trio.Event()
