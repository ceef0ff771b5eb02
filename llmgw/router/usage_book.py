"""What a router has counted and no leader has stored yet: rows of hour, key and model, and the one batch that is on its way. Pure.

A batch never changes once it is cut, and the next one is cut only after it was taken: a batch that is told twice is counted once,
because its number was met. Bounded: beyond ROWS_MAX rows new ones are lost, with a count.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import attrs

from llmgw.domain.usage import BATCH_ROWS_MAX, UsageBatch, UsageRow, hour_of
from llmgw.router.usage import Tokens

ROWS_MAX: Final = 10_000  # about 1 MB on disk: 100 keys and models that are in use, for the hours of a long week-end


@attrs.frozen
class BookState:
    """What is kept on disk. `waiting` may be of a process before this one; then it keeps that one's name."""

    waiting: UsageBatch | None = None
    open: tuple[UsageRow, ...] = ()


class UsageBook:
    """`boot` names this process among all that ever were: 16 fresh hex digits or more."""

    def __init__(self, boot: str) -> None:
        self._boot = boot
        self._number = 0
        self._waiting: UsageBatch | None = None
        self._open: dict[tuple[int, str, str], list[int]] = {}
        self.lost = 0  # requests that found no room

    def add(self, wall_s: float, key: str, model: str, tokens: Tokens | None, *, unknown: bool) -> None:
        """One answer that a client got at this time of day."""
        row = self._row(hour_of(wall_s), key, model)
        if row is None:
            self.lost += 1
            return
        row[0] += 1
        row[1] += unknown
        if tokens is not None:
            row[2] += tokens.prompt
            row[3] += tokens.cached
            row[4] += tokens.completion

    def cut(self) -> UsageBatch | None:
        """The batch that is to be told now, the same until it is taken; None where there is nothing to tell."""
        if self._waiting is None and self._open:
            self._number += 1
            first = sorted(self._open)[:BATCH_ROWS_MAX]
            self._waiting = UsageBatch(self._boot, self._number, tuple(UsageRow(*name, *self._open.pop(name)) for name in first))
        return self._waiting

    def taken(self, boot: str, number: int) -> bool:
        """A leader has this batch where it will not be lost. False for one that is not waited for."""
        if self._waiting is None or (self._waiting.boot, self._waiting.number) != (boot, number):
            return False
        self._waiting = None
        return True

    def state(self) -> BookState:
        """All of it, for the disk."""
        return BookState(self._waiting, tuple(UsageRow(*name, *counts) for name, counts in sorted(self._open.items())))

    def restore(self, state: BookState) -> None:
        """Goes on with what a process before has left; once, before the first batch is cut."""
        self._waiting = state.waiting
        self.add_rows(state.open)

    def take_rows(self) -> tuple[UsageRow, ...]:
        """What is in no batch; whoever takes it accounts for it from here on."""
        rows = tuple(UsageRow(*name, *counts) for name, counts in self._open.items())
        self._open.clear()
        return rows

    def add_rows(self, rows: Iterable[UsageRow]) -> None:
        """What another process has counted."""
        for told in rows:
            row = self._row(told.hour, told.key, told.model)
            if row is None:
                self.lost += told.requests
                continue
            for index, count in enumerate((told.requests, told.unknown, told.prompt, told.cached, told.completion)):
                row[index] += count

    def _row(self, hour: int, key: str, model: str) -> list[int] | None:
        name = (hour, key, model)
        row = self._open.get(name)
        if row is None and len(self._open) < ROWS_MAX:
            row = self._open[name] = [0, 0, 0, 0, 0]
        return row
