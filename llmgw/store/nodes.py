"""What the cluster must remember of its nodes: who they are, and what an operator ordered. What they run, agents tell."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import apsw
import attrs

from llmgw.domain.ids import NodeId
from llmgw.store import audit
from llmgw.store.connection import Store
from llmgw.store.rows import rows


def _frozen(value: Mapping[str, str]) -> Mapping[str, str]:
    return MappingProxyType(dict(value))


@attrs.frozen
class StoredNode:
    """`labels` are the operator's own, beside those of the agent's file. `*_wall_s` is wall time; a deadline of None: no drain, or no end.

    `removed`: kept so that a node that comes back is known as removed.
    """

    id: NodeId
    name: str
    facility: str = ""
    address: str = ""
    cordoned: bool = False
    draining: bool = False
    drain_deadline_wall_s: float | None = None
    labels: Mapping[str, str] = attrs.field(factory=dict, converter=_frozen)
    last_seen_wall_s: float = 0.0
    removed: bool = False


async def load(store: Store) -> tuple[StoredNode, ...]:
    """Every node, sorted by id, removed ones among them."""
    return await store.read(_load)


async def save(store: Store, epoch: int, node: StoredNode, what: str = "", origin: audit.Origin = audit.CLUSTER) -> None:
    """Adds or replaces one node. `what` is the operator's order for the audit; "" is routine and leaves no entry."""
    await store.write(_save, epoch, (node,), what, origin)


async def save_many(store: Store, epoch: int, nodes: Iterable[StoredNode]) -> None:
    """Adds or replaces all of these in one transaction, such as the last time each was seen."""
    await store.write(_save, epoch, tuple(nodes), "", audit.CLUSTER)


async def remove(store: Store, epoch: int, node: NodeId, origin: audit.Origin = audit.CLUSTER) -> bool:
    """Forgets the node altogether; True where it was known."""
    return await store.write(_remove, epoch, node, origin)


def _load(connection: apsw.Connection) -> tuple[StoredNode, ...]:
    stored = rows(
        connection,
        "SELECT id, name, facility, address, cordoned, draining, drain_deadline_wall_s, labels, last_seen_wall_s, removed"
        " FROM nodes ORDER BY id",
    )
    return tuple(
        StoredNode(NodeId(node), name, facility, address, bool(cordoned), bool(draining), deadline, json.loads(labels), seen, bool(removed))
        for node, name, facility, address, cordoned, draining, deadline, labels, seen, removed in stored
    )


def _save(connection: apsw.Connection, epoch: int, nodes: tuple[StoredNode, ...], what: str, origin: audit.Origin) -> None:
    connection.executemany(
        "INSERT OR REPLACE INTO nodes"
        " (id, name, facility, address, cordoned, draining, drain_deadline_wall_s, labels, last_seen_wall_s, removed)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            (
                node.id, node.name, node.facility, node.address, node.cordoned, node.draining, node.drain_deadline_wall_s,
                json.dumps(dict(node.labels), sort_keys=True), node.last_seen_wall_s, node.removed,
            )
            for node in nodes
        ),
    )  # fmt: skip
    if what:
        for node in nodes:
            audit.record(connection, epoch, origin, what, f"node/{node.name}")


def _remove(connection: apsw.Connection, epoch: int, node: NodeId, origin: audit.Origin) -> bool:
    connection.execute("DELETE FROM nodes WHERE id = ?", (node,))
    removed = connection.changes() > 0
    if removed:
        audit.record(connection, epoch, origin, "remove", f"node/{node}")
    return removed
