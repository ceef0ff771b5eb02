"""Facility holds: at most one per facility, a later one replaces it."""

from __future__ import annotations

import apsw

from llmgw.domain.holds import Hold
from llmgw.store import audit
from llmgw.store.connection import Store
from llmgw.store.rows import rows


async def load(store: Store) -> tuple[Hold, ...]:
    """Every hold, sorted by facility, also those whose end has passed."""
    return await store.read(_load)


async def add(store: Store, epoch: int, hold: Hold, origin: audit.Origin = audit.CLUSTER) -> bool:
    """Adds or replaces the facility's hold; True where there was none."""
    return await store.write(_add, epoch, hold, origin)


async def remove(store: Store, epoch: int, facility: str, origin: audit.Origin = audit.CLUSTER) -> bool:
    """True where there was one."""
    return await store.write(_remove, epoch, facility, origin)


def _load(connection: apsw.Connection) -> tuple[Hold, ...]:
    stored = rows(connection, "SELECT facility, reason, drain, until_wall_s, author FROM facility_holds ORDER BY facility")
    return tuple(Hold(facility, reason, bool(drain), until, author) for facility, reason, drain, until, author in stored)


def _add(connection: apsw.Connection, epoch: int, hold: Hold, origin: audit.Origin) -> bool:
    fresh = not rows(connection, "SELECT 1 FROM facility_holds WHERE facility = ?", (hold.facility,))
    connection.execute(
        "INSERT OR REPLACE INTO facility_holds (facility, reason, drain, until_wall_s, author) VALUES (?, ?, ?, ?, ?)",
        (hold.facility, hold.reason, hold.drain, hold.until_wall_s, hold.author),
    )
    audit.record(connection, epoch, origin, "drain" if hold.drain else "hold", f"facility/{hold.facility}")
    return fresh


def _remove(connection: apsw.Connection, epoch: int, facility: str, origin: audit.Origin) -> bool:
    connection.execute("DELETE FROM facility_holds WHERE facility = ?", (facility,))
    removed = connection.changes() > 0
    if removed:
        audit.record(connection, epoch, origin, "remove hold", f"facility/{facility}")
    return removed
