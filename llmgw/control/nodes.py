"""The nodes that this cluster knows, and what operators ordered about them: cordon, drain, labels. The owner of both.

What runs on a node is `inventory`'s to know; this is what outlives the node's silence and our restart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs
import structlog

from llmgw.control.event_log import EventLog
from llmgw.domain.errors import Conflict, NotFound
from llmgw.domain.ids import NodeId
from llmgw.domain.node import NodeFacts
from llmgw.domain.ports import Machine
from llmgw.store import nodes as rows
from llmgw.store.audit import CLUSTER, Origin
from llmgw.store.connection import Store
from llmgw.store.nodes import StoredNode

log = structlog.get_logger("llmgw.nodes")


class Nodes:
    """`epoch` is asked at each write; `changed` is called after each change, so that the planner looks again.

    Where `may_write()` is False somebody else leads, and what is heard here is for that one to keep.
    """

    def __init__(
        self,
        machine: Machine,
        store: Store,
        epoch: Callable[[], int],
        events: EventLog,
        changed: Callable[[], None],
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        self._machine = machine
        self._store = store
        self._epoch = epoch
        self._events = events
        self._changed = changed
        self._may_write = may_write
        self._nodes: dict[NodeId, StoredNode] = {}

    async def reload(self) -> None:
        """What another leader may have changed."""
        self._nodes = {node.id: node for node in await rows.load(self._store) if not node.removed}

    @property
    def known(self) -> Mapping[NodeId, StoredNode]:
        return self._nodes

    def by_name(self, name: str) -> StoredNode:
        """Raises NotFound."""
        for node in self._nodes.values():
            if name in (node.name, node.id):
                return node
        raise NotFound(f"there is no node {name!r}")

    async def heard(self, facts: NodeFacts) -> None:
        """A node has opened a session: kept on disk when it is new or has changed its name, place or address.

        Raises Conflict when its name belongs to another node.
        """
        for other in self._nodes.values():
            if other.name == facts.name and other.id != facts.id:
                raise Conflict(
                    f"the name {facts.name!r} belongs to node {other.id}; set [agent] name to another one, or remove the old node",
                    code="node_name_taken",
                )
        if not self._may_write():
            return
        now_wall_s = self._machine.wall_s()
        before = self._nodes.get(facts.id)
        if before is None:
            node = StoredNode(id=facts.id, name=facts.name, facility=facts.facility, address=facts.address, last_seen_wall_s=now_wall_s)
        else:
            node = attrs.evolve(before, name=facts.name, facility=facts.facility, address=facts.address, last_seen_wall_s=now_wall_s)
            if (node.name, node.facility, node.address) == (before.name, before.facility, before.address):
                return
        await rows.save(self._store, self._epoch(), node)
        self._nodes[facts.id] = node
        if before is None:
            self._events.record("node.joined", f"node/{facts.name}", f"node {facts.name} joined from {facts.address}")

    async def cordon(self, name: str, origin: Origin = CLUSTER) -> StoredNode:
        """Nothing new is placed there."""
        return await self._order(name, "node.cordoned", f"cordoned{_by(origin)}", origin, lambda node: attrs.evolve(node, cordoned=True))

    async def drain(self, name: str, deadline_s: float | None, origin: Origin = CLUSTER) -> StoredNode:
        """Moves work off, by a deadline in seconds from now if one is given. The node stays cordoned until `resume`."""
        until = None if deadline_s is None else self._machine.wall_s() + deadline_s
        text = f"is being drained{_by(origin)}" + (f", by {deadline_s:.0f} s from now" if deadline_s is not None else "")
        return await self._order(
            name, "node.draining", text, origin, lambda node: attrs.evolve(node, cordoned=True, draining=True, drain_deadline_wall_s=until)
        )

    async def resume(self, name: str, origin: Origin = CLUSTER) -> StoredNode:
        return await self._order(
            name,
            "node.resumed",
            f"takes replicas again{_by(origin)}",
            origin,
            lambda node: attrs.evolve(node, cordoned=False, draining=False, drain_deadline_wall_s=None),
        )

    async def label(self, name: str, labels: Mapping[str, str], origin: Origin = CLUSTER) -> StoredNode:
        """Adds operator's labels over the agent's own; an empty value takes one away."""

        def merged(node: StoredNode) -> StoredNode:
            after = {**node.labels, **labels}
            return attrs.evolve(node, labels={key: value for key, value in after.items() if value})

        text = "labelled " + ", ".join(f"{key}={value}" for key, value in sorted(labels.items())) + _by(origin)
        return await self._order(name, "node.labelled", text, origin, merged)

    async def remove(self, name: str, origin: Origin = CLUSTER) -> StoredNode:
        """Forgotten altogether: one that comes back comes as a new one. Raises NotFound."""
        node = self.by_name(name)
        await rows.remove(self._store, self._epoch(), node.id, origin)
        self._nodes.pop(node.id, None)
        self._events.record("node.removed", f"node/{node.name}", f"node {node.name} was removed{_by(origin)}")
        self._changed()
        return node

    async def _order(self, name: str, kind: str, text: str, origin: Origin, change: Callable[[StoredNode], StoredNode]) -> StoredNode:
        before = self.by_name(name)
        after = change(before)
        if after != before:
            await rows.save(self._store, self._epoch(), after, kind, origin)  # durable before it is planned from
            self._nodes[after.id] = after
            self._events.record(kind, f"node/{after.name}", f"node {after.name} {text}")
            self._changed()
        return after


def _by(origin: Origin) -> str:
    return f" by {origin.who}" if origin.who else ""
