"""The lease of a control plane that has no store to share with anybody: it leads by definition (control.md 2).

The same machine keeps it, so that a new epoch, leaving and being met from above work as everywhere. The record is in memory:
who starts anew takes a new epoch, above that of its disk.
"""

from __future__ import annotations

from llmgw.domain.ids import ClusterId, OwnerId
from llmgw.lease.record import LeaseRecord, RecordState
from llmgw.lease.store import Lost
from llmgw.lease.timings import LeaseTimings

NOBODY = OwnerId("nobody")


class SoleStore:
    """A `LeaseStore` that one process alone can reach; it begins with a released record, which is taken at once."""

    def __init__(self, cluster_id: ClusterId) -> None:
        self._records: dict[str, LeaseRecord] = {}
        # In memory it need not be one that a file could hold: below the first epoch.
        self._first = LeaseRecord(cluster_id, 0, NOBODY, "none", "none", "", 0, LeaseTimings().ttl_s, RecordState.RELEASED)

    async def read(self, role: str) -> LeaseRecord | None:
        return self._records.get(role, self._first)

    async def replace(self, role: str, expected: LeaseRecord | None, new: LeaseRecord) -> None:
        current = self._records.get(role, self._first)
        if current != expected:
            raise Lost(current)
        self._records[role] = new
