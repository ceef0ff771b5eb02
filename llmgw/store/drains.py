"""Replicas that an operator asked to go. The order outlives a control plane; it ends with the replica."""

from __future__ import annotations

from collections.abc import Iterable

import apsw

from llmgw.domain.ids import ReplicaId
from llmgw.store import audit
from llmgw.store.connection import Store
from llmgw.store.rows import rows


async def load(store: Store) -> frozenset[ReplicaId]:
    return await store.read(_load)


async def add(store: Store, epoch: int, replicas: Iterable[ReplicaId], origin: audit.Origin = audit.CLUSTER) -> None:
    """Adds these; one that is there already stays."""
    await store.write(_add, epoch, tuple(replicas), origin)


async def remove(store: Store, epoch: int, replicas: Iterable[ReplicaId]) -> None:
    """Forgets the orders of replicas that are gone."""
    await store.write(_remove, epoch, tuple(replicas))


def _load(connection: apsw.Connection) -> frozenset[ReplicaId]:
    return frozenset(ReplicaId(replica) for (replica,) in rows(connection, "SELECT replica FROM replica_drains"))


def _add(connection: apsw.Connection, epoch: int, replicas: tuple[ReplicaId, ...], origin: audit.Origin) -> None:
    for replica in replicas:
        connection.execute("INSERT OR IGNORE INTO replica_drains (replica) VALUES (?)", (replica,))
        audit.record(connection, epoch, origin, "drain", f"replica/{replica}")


def _remove(connection: apsw.Connection, epoch: int, replicas: tuple[ReplicaId, ...]) -> None:
    connection.executemany("DELETE FROM replica_drains WHERE replica = ?", ((replica,) for replica in replicas))
