"""Who asked for what, from where, and what it did to the revision: a row that lives or dies with the change itself."""

from __future__ import annotations

import apsw
import attrs

from llmgw.store.connection import Store
from llmgw.store.rows import rows

ROWS_MAX = 1_000  # of one page: an audit is read by people


@attrs.frozen
class Origin:
    """Who asks for a write. `peer` is from where, `at_wall_s` wall time, for people; an empty `who` is the cluster itself."""

    who: str = ""
    peer: str = ""
    at_wall_s: float = 0.0


@attrs.frozen
class AuditEntry:
    """One change. Revisions are 0 where the changed thing has none, or was not there before."""

    id: int
    at_wall_s: float
    who: str
    peer: str
    what: str
    object: str
    epoch: int
    old_revision: int
    new_revision: int


CLUSTER = Origin()  # writes that nobody asked for: import, events, what agents report


async def latest(store: Store, limit: int = 100) -> tuple[AuditEntry, ...]:
    """The newest entries, the newest first."""
    return await store.read(_latest, limit)


async def trim(store: Store, epoch: int, before_wall_s: float) -> int:
    """Drops entries older than that; returns how many."""
    return await store.write(_trim, epoch, before_wall_s)


def record(connection: apsw.Connection, epoch: int, origin: Origin, what: str, about: str, old: int = 0, new: int = 0) -> None:
    """Inside the write that it tells of."""
    connection.execute(
        "INSERT INTO audit (at_wall_s, who, peer, what, object, epoch, old_revision, new_revision) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (origin.at_wall_s, origin.who, origin.peer, what, about, epoch, old, new),
    )


def _latest(connection: apsw.Connection, limit: int) -> tuple[AuditEntry, ...]:
    stored = rows(
        connection,
        "SELECT id, at_wall_s, who, peer, what, object, epoch, old_revision, new_revision FROM audit ORDER BY id DESC LIMIT ?",
        (max(0, min(limit, ROWS_MAX)),),
    )
    return tuple(AuditEntry(*found) for found in stored)


def _trim(connection: apsw.Connection, epoch: int, before_wall_s: float) -> int:
    connection.execute("DELETE FROM audit WHERE at_wall_s < ?", (before_wall_s,))
    return connection.changes()
