"""Facility holds: an operator's order that a facility gets nothing new, or is drained. The owner of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from llmgw.control.event_log import EventLog
from llmgw.domain.errors import Invalid, NotFound
from llmgw.domain.holds import Hold
from llmgw.domain.ports import Machine
from llmgw.store import holds as rows
from llmgw.store.audit import CLUSTER, Origin
from llmgw.store.connection import Store


class Holds:
    """`epoch` is asked at each write; `changed` is called after each change, so that the planner looks again."""

    def __init__(self, machine: Machine, store: Store, epoch: Callable[[], int], events: EventLog, changed: Callable[[], None]) -> None:
        self._machine = machine
        self._store = store
        self._epoch = epoch
        self._events = events
        self._changed = changed
        self._holds: dict[str, Hold] = {}

    async def reload(self) -> None:
        """What another leader may have changed."""
        self._holds = {hold.facility: hold for hold in await rows.load(self._store)}

    @property
    def all(self) -> Mapping[str, Hold]:
        return self._holds

    def active(self) -> tuple[Hold, ...]:
        """Those in force now, sorted."""
        wall_s = self._machine.wall_s()  # an end was given as a time of day by a person, so wall time judges it
        return tuple(hold for _, hold in sorted(self._holds.items()) if hold.active(wall_s))

    async def add(self, hold: Hold, origin: Origin = CLUSTER) -> Hold:
        """Replaces an earlier hold of the same facility. Raises Invalid without a reason."""
        if not hold.facility or not hold.reason.strip():
            raise Invalid("a hold names a facility and a reason", param="reason" if hold.facility else "facility")
        await rows.add(self._store, self._epoch(), hold, origin)
        self._holds[hold.facility] = hold
        what = "drained" if hold.drain else "held: it gets nothing new"
        self._events.record("hold.added", f"hold/{hold.facility}", f"facility {hold.facility} is {what}: {hold.reason}")
        self._changed()
        return hold

    async def remove(self, facility: str, origin: Origin = CLUSTER) -> None:
        """Raises NotFound."""
        if facility not in self._holds:
            raise NotFound(f"there is no hold on facility {facility!r}")
        await rows.remove(self._store, self._epoch(), facility, origin)
        del self._holds[facility]
        self._events.record("hold.removed", f"hold/{facility}", f"facility {facility} is open again")
        self._changed()
