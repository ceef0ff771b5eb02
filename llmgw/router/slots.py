"""Which slot of the workers' cells counts what. Pure: the parent decides, and tells its workers with each list.

A slot goes to another name only when the one before is wanted no more and nobody counts there; otherwise what still runs at a
withdrawn endpoint would be taken for load of a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from types import MappingProxyType
from typing import Final

NO_SLOT: Final = -1  # all are taken: whoever counts there counts for itself alone


class Slots:
    """At most `size` names have a slot at a time."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._by_name: dict[Hashable, int] = {}
        self._free: list[int] = []

    @property
    def taken(self) -> Mapping[Hashable, int]:
        return MappingProxyType(self._by_name)

    def of(self, name: Hashable) -> int:
        """The slot of a name, its own or a free one; NO_SLOT when there is none."""
        found = self._by_name.get(name)
        if found is not None:
            return found
        if self._free:
            slot = self._free.pop()
        elif len(self._by_name) < self._size:
            slot = len(self._by_name)
        else:
            return NO_SLOT
        self._by_name[name] = slot
        return slot

    def let_go(self, wanted: Collection[Hashable], is_idle: Callable[[int], bool]) -> None:
        """Frees the slots of names that are not in `wanted`, as far as nobody counts there."""
        for name, slot in list(self._by_name.items()):
            if name not in wanted and is_idle(slot):
                del self._by_name[name]
                self._free.append(slot)
