"""What was used in the last minute, counted exactly enough to promise it: in no minute more than a limit. Pure; time is passed in.

A minute that slides, and no bucket that fills up again: a bucket which lets a whole limit through at once lets nearly two of them
through in the minute that follows, and a limit may be exceeded by a tenth at most (product.md). What is used within GRAIN_S is one
entry, so that memory is bounded; it counts until the last of it is a minute old, which errs on the limit's side.
"""

from __future__ import annotations

from collections import deque
from typing import Final

WINDOW_S: Final = 60.0
GRAIN_S: Final = 0.25  # chosen: 240 entries of about 100 bytes for the busiest key, and nobody waits a second longer for it


class Entry:
    """One amount, and when it was used: from `first_s` to `last_s`."""

    __slots__ = ("amount", "first_s", "last_s", "live")

    def __init__(self, now_s: float) -> None:
        self.first_s = self.last_s = now_s
        self.amount = 0
        self.live = True


class Window:
    """Amounts of the last WINDOW_S. `now_s` never goes back; one that does is taken for the latest that was seen."""

    __slots__ = ("_entries", "_now_s", "_used")

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque()
        self._used = 0
        self._now_s = 0.0

    def used(self, now_s: float) -> int:
        """What counts now."""
        if now_s < self._now_s:
            now_s = self._now_s
        else:
            self._now_s = now_s
        entries = self._entries
        while entries and now_s >= entries[0].last_s + WINDOW_S:
            gone = entries.popleft()
            gone.live = False
            self._used -= gone.amount
        return self._used

    def take(self, now_s: float, amount: int) -> Entry:
        """Counts `amount` (at least 0) from now on; the entry that holds it, for `give_back`."""
        self.used(now_s)
        now_s = self._now_s
        if not self._entries or now_s - self._entries[-1].first_s >= GRAIN_S:
            self._entries.append(Entry(now_s))
        entry = self._entries[-1]
        entry.last_s = now_s
        entry.amount += amount
        self._used += amount
        return entry

    def give_back(self, entry: Entry, amount: int) -> None:
        """A part of what `entry` was given by `take` was not used after all. Of one that counts no more nothing is to be given back."""
        if entry.live:
            entry.amount -= amount
            self._used -= amount

    def wait_s(self, now_s: float, amount: int, limit: int) -> float:
        """Seconds until `amount` more stays within `limit`, if nothing else is used; 0.0: now. `amount` is at most `limit`."""
        over = self.used(now_s) + amount - limit
        if over <= 0:
            return 0.0
        for entry in self._entries:
            over -= entry.amount
            if over <= 0:
                return self._left_s(entry)
        return WINDOW_S

    def empty_s(self, now_s: float) -> float:
        """Seconds until nothing counts any more, if nothing else is used."""
        self.used(now_s)
        entries = self._entries
        if entries and entries[-1].amount:  # nearly always
            return self._left_s(entries[-1])
        for entry in reversed(entries):
            if entry.amount:
                return self._left_s(entry)
        return 0.0

    def _left_s(self, entry: Entry) -> float:
        """How long it counts still; no rounding makes a minute longer, and a hint of 60 s one of 61."""
        left_s = entry.last_s + WINDOW_S - self._now_s
        return left_s if left_s < WINDOW_S else WINDOW_S
