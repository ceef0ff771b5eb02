"""`/nodes`: the machines with GPUs, and what an operator orders about them."""

from __future__ import annotations

from typing import Any, Final

from llmgw.admin.calls import PAGED, Call, Reply, Route, page
from llmgw.admin.views import node_view
from llmgw.control.controller import Controller
from llmgw.control.observed import ObservedNode, ObservedReplica
from llmgw.domain.errors import Invalid, NotFound
from llmgw.domain.ids import NodeId
from llmgw.store.admin_tokens import Role
from llmgw.store.nodes import StoredNode

DEADLINE_S_MAX: Final = 30 * 86_400.0  # a drain that may take longer than a month is a cordon
LABELS_MAX: Final = 100
LABEL_CHARS_MAX: Final = 200


def routes(controller: Controller) -> tuple[Route, ...]:
    def seen(node: NodeId) -> ObservedNode:
        for observed in controller.observe().nodes:
            if observed.id == node:
                return observed
        raise NotFound("this node has not been heard since this control plane leads")

    def find(name: str) -> ObservedNode:
        for observed in controller.observe().nodes:
            if name in (observed.name, observed.id):
                return observed
        raise NotFound(f"there is no node {name[:100]!r}")

    def view(observed: ObservedNode) -> dict[str, Any]:
        stored = controller.nodes.known.get(observed.id)
        return node_view(observed, stored, controller.replicas(), controller.attention.now_s(), controller.machine.wall_s())

    def ordered(node: StoredNode, change: str) -> Reply:
        return Reply({**view(seen(node.id)), "change": change, "durability": controller.store.durability})

    async def list_(call: Call) -> Reply:
        return page(call, "nodes", list_nodes(controller), "name")

    async def one(call: Call, node: str) -> Reply:
        return Reply(view(find(node)))

    async def cordon(call: Call, node: str) -> Reply:
        call.table((), optional=True)
        return ordered(await controller.nodes.cordon(node, call.origin), "cordoned")

    async def drain(call: Call, node: str) -> Reply:
        deadline = call.table(("deadline_s",), optional=True).get("deadline_s")
        if deadline is not None and (type(deadline) not in (int, float) or not 0 <= deadline <= DEADLINE_S_MAX):
            raise Invalid(f"deadline_s is a number of seconds from 0 to {DEADLINE_S_MAX:.0f}", param="deadline_s")
        deadline_s = None if deadline is None else float(deadline)
        return ordered(await controller.nodes.drain(node, deadline_s, call.origin), "draining")

    async def resume(call: Call, node: str) -> Reply:
        call.table((), optional=True)
        return ordered(await controller.nodes.resume(node, call.origin), "resumed")

    async def remove(call: Call, node: str) -> Reply:
        call.table((), optional=True)
        removed = await controller.remove_node(node, call.origin)
        return Reply({"name": removed.name, "id": removed.id, "change": "removed", "durability": controller.store.durability})

    async def labels(call: Call, node: str) -> Reply:
        body = call.table()
        table = body["labels"] if set(body) == {"labels"} and isinstance(body["labels"], dict) else body
        return ordered(await controller.nodes.label(node, read_labels(table), call.origin), "labelled")

    operator = Role.OPERATOR
    return (
        Route("GET", "/api/v1/nodes", list_, "Every node with its devices", query=PAGED),
        Route("GET", "/api/v1/nodes/<name:node>", one, "One node"),
        Route("DELETE", "/api/v1/nodes/<name:node>", remove, "Forget a node on which nothing runs", operator),
        Route("POST", "/api/v1/nodes/<name:node>/cordon", cordon, "Place nothing new there", operator),
        Route("POST", "/api/v1/nodes/<name:node>/drain", drain, "Move work off", operator, {"deadline_s": "seconds from now, or null"}),
        Route("POST", "/api/v1/nodes/<name:node>/resume", resume, "Take replicas again", operator),
        Route("POST", "/api/v1/nodes/<name:node>/labels", labels, "Set labels; an empty text takes one away", operator,
              {"labels": "a table of texts"}),
    )  # fmt: skip


def list_nodes(controller: Controller) -> list[dict[str, Any]]:
    """Every node's view, sorted by name."""
    observed = controller.observe()
    replicas = controller.replicas()
    wall_s = controller.machine.wall_s()
    of_node: dict[NodeId, list[ObservedReplica]] = {}
    for replica in replicas:
        of_node.setdefault(replica.node, []).append(replica)
    shown = [
        node_view(node, controller.nodes.known.get(node.id), of_node.get(node.id, ()), observed.now_s, wall_s) for node in observed.nodes
    ]
    return sorted(shown, key=lambda view: view["name"])


def read_labels(raw: dict[str, Any]) -> dict[str, str]:
    """Raises Invalid for anything but a small table of texts; null counts as an empty text."""
    labels = {}
    if not raw or len(raw) > LABELS_MAX:
        raise Invalid(f"labels is a table of 1 to {LABELS_MAX} texts", param="labels")
    for key, value in raw.items():
        text = "" if value is None else value
        if not isinstance(text, str) or not key or max(len(key), len(text)) > LABEL_CHARS_MAX or not (key + text).isprintable():
            raise Invalid(f"a label and its value are texts of at most {LABEL_CHARS_MAX} printable characters", param=key[:100] or "labels")
        labels[key] = text
    return labels
