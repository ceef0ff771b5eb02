"""Which profile an operator chose for a model, kept so that a failover keeps it. A fallback never overwrites it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import apsw

from llmgw.store import audit
from llmgw.store.connection import Store
from llmgw.store.rows import rows


async def load(store: Store) -> Mapping[str, str]:
    """Model name to the name of the chosen profile, which may have left the model since."""
    return await store.read(_load)


async def choose(store: Store, epoch: int, model: str, profile: str, origin: audit.Origin = audit.CLUSTER) -> None:
    await store.write(_choose, epoch, model, profile, origin)


async def clear(store: Store, epoch: int, model: str, origin: audit.Origin = audit.CLUSTER) -> bool:
    """Back to the first profile by priority; True where there was a choice."""
    return await store.write(_clear, epoch, model, origin)


def _load(connection: apsw.Connection) -> Mapping[str, str]:
    return MappingProxyType(dict(rows(connection, "SELECT model, profile FROM engine_choices ORDER BY model")))


def _choose(connection: apsw.Connection, epoch: int, model: str, profile: str, origin: audit.Origin) -> None:
    connection.execute("INSERT OR REPLACE INTO engine_choices (model, profile) VALUES (?, ?)", (model, profile))
    audit.record(connection, epoch, origin, f"choose engine {profile}", f"model/{model}")


def _clear(connection: apsw.Connection, epoch: int, model: str, origin: audit.Origin) -> bool:
    connection.execute("DELETE FROM engine_choices WHERE model = ?", (model,))
    cleared = connection.changes() > 0
    if cleared:
        audit.record(connection, epoch, origin, "clear engine choice", f"model/{model}")
    return cleared
