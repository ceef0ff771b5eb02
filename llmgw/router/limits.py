"""What a key may use at a time. Counts live here; what is taken is given back where an exchange ends, whatever way it went.

Several workers count in cells that each of them sees. A request counts itself in before it looks, so that together they never let
in more than the limit; of two that come for the last place in the same instant, both may be refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from llmgw.domain.errors import Overloaded
from llmgw.domain.policy import ApiKey
from llmgw.router.cells import Cell

PARALLEL_RETRY_S: Final = 1.0  # chosen: a slot is free when any request of the key ends, and nobody knows when that is


class Place:
    """One request of a key that runs, and the cell that it is counted in."""

    __slots__ = ("cell", "key")

    def __init__(self, key: str, cell: Cell | None) -> None:
        self.key = key
        self.cell = cell


class Parallel:
    """Requests in flight per key, by the key's name: an edit of a key's other fields keeps its count."""

    def __init__(self) -> None:
        self._running: dict[str, int] = {}
        self._cells: Mapping[str, Cell] = {}

    def share(self, cells: Mapping[str, Cell]) -> None:
        """From here on these keys are counted over all workers. A request that runs ends in the cell that it began in."""
        self._cells = cells

    def running(self, name: str) -> int:
        return self._running.get(name, 0)

    def take(self, key: ApiKey) -> Place:
        """One of the key's places, until it is given to `give_back`. Raises Overloaded when all are taken."""
        name = key.name
        cell = self._cells.get(name)
        now = self._running.get(name, 0) + 1
        if cell is not None:
            cell.add(1)
            now = cell.total()
        if key.max_parallel and now > key.max_parallel:
            if cell is not None:
                cell.add(-1)
            raise Overloaded(
                f"the key {name!r} may have {key.max_parallel} requests at a time, and has them",
                retry_after_s=PARALLEL_RETRY_S,
                code="parallel_limit",
            )
        self._running[name] = self._running.get(name, 0) + 1
        return Place(name, cell)

    def give_back(self, place: Place) -> None:
        """Balances `take`."""
        name, cell = place.key, place.cell
        if cell is not None:
            cell.add(-1)
        left = self._running[name] - 1
        if left:
            self._running[name] = left
        else:
            del self._running[name]
