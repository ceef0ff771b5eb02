"""Who used how much: rows of one hour, key and model, and the batches in which routers tell them.

An hour is named by the second it begins at, in UTC; it is the router's own time of day that says which one it is. Counts are of
answers that clients got, in the engines' own words.
"""

from __future__ import annotations

from typing import Final

import attrs

HOUR_S: Final = 3600
HOUR_MAX: Final = 2**40  # far beyond any clock, and far below what a number in the store can hold
COUNT_MAX: Final = 2**44  # of one row in one batch; 500,000 of them add up to less than what the store can hold
NAME_MAX: Final = 1024  # characters of a key's or a model's name
BATCH_ROWS_MAX: Final = 1000  # a message of 1,000 rows is far below the limit of one
BOOT_MAX: Final = 200  # characters of the name that a router's process gives itself


def hour_of(wall_s: float) -> int:
    """The second at which the hour of this time of day began."""
    return max(0, int(wall_s // HOUR_S) * HOUR_S)


@attrs.frozen
class UsageRow:
    """`key` "" is a caller without one. `unknown` of the `requests` were answered without a word on tokens; `prompt` holds `cached`."""

    hour: int
    key: str
    model: str
    requests: int = 0
    unknown: int = 0
    prompt: int = 0
    cached: int = 0
    completion: int = 0

    def fault(self) -> str:
        """Why it cannot be counted; "" for a sound row."""
        if not 0 <= self.hour <= HOUR_MAX or self.hour % HOUR_S:
            return f"{self.hour} is no hour"
        if len(self.key) > NAME_MAX or len(self.model) > NAME_MAX:
            return f"a name is longer than {NAME_MAX} characters"
        for name in ("requests", "unknown", "prompt", "cached", "completion"):
            if not 0 <= (count := getattr(self, name)) <= COUNT_MAX:
                return f"{name} is {count}"
        return ""


@attrs.frozen
class UsageBatch:
    """Counted once, however often it is told: `number` rises by one within `boot`, which each process of a router draws anew."""

    boot: str
    number: int
    rows: tuple[UsageRow, ...]

    def fault(self) -> str:
        """Why it cannot be counted; "" for a sound batch."""
        if not self.boot or len(self.boot) > BOOT_MAX or not self.boot.isprintable():
            return "it names no router"
        if not 1 <= self.number <= HOUR_MAX:
            return f"{self.number} is no number of a batch"
        if len(self.rows) > BATCH_ROWS_MAX:
            return f"it has {len(self.rows)} rows, {BATCH_ROWS_MAX} at most"
        return next((fault for row in self.rows if (fault := row.fault())), "")
