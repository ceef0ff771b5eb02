"""`/replicas`: what runs, its logs, and the two orders that one replica takes."""

from __future__ import annotations

from typing import Any, Final

from llmgw.admin.calls import PAGED, Call, Reply, Route, page
from llmgw.admin.views import node_names, replica_view
from llmgw.control.controller import Controller
from llmgw.domain.ids import ReplicaId
from llmgw.store.admin_tokens import Role

LOG_BYTES_MAX: Final = 262_144  # of one look: an agent's answer travels in one message
LOG_BYTES: Final = 65_536
OFFSET_MAX: Final = 2**53


def routes(controller: Controller) -> tuple[Route, ...]:
    def view(replica_id: str) -> dict[str, Any]:
        replica = controller.replica(replica_id)
        return replica_view(replica, controller.sessions.name(replica.node), controller.machine.wall_s())

    async def list_(call: Call) -> Reply:
        return page(call, "replicas", list_replicas(controller, call.query.get("model"), call.query.get("node")), "id")

    async def one(call: Call, replica: str) -> Reply:
        return Reply(view(replica))

    async def logs(call: Call, replica: str) -> Reply:
        controller.replica(replica)
        attempt = call.integer("attempt", 0, 0, 1_000_000)
        limit = call.integer("limit", LOG_BYTES, 1, LOG_BYTES_MAX)
        offset = call.integer("offset", -limit, -OFFSET_MAX, OFFSET_MAX)
        chunk = await controller.sessions.read_log(ReplicaId(replica), attempt, offset, limit)
        return Reply(
            {
                "replica": replica,
                "attempt": chunk.attempt,
                "attempts": list(chunk.attempts),
                "offset": chunk.offset,
                "next_offset": chunk.next_offset,
                "text": chunk.text,
            }
        )

    async def drain(call: Call, replica: str) -> Reply:
        await controller.drain_replica(replica, call.origin)
        return Reply({**view(replica), "change": "draining"}, 202)

    async def restart(call: Call, replica: str) -> Reply:
        controller.restart_replica(replica, call.principal.name)
        return Reply({**view(replica), "change": "restarting"}, 202)

    which = {"model": "only of this model", "node": "only on this node", **PAGED}
    part = {"attempt": "0: the newest", "offset": "below 0: from the end", "limit": f"bytes, at most {LOG_BYTES_MAX}"}
    return (
        Route("GET", "/api/v1/replicas", list_, "Every replica as last reported", query=which),
        Route("GET", "/api/v1/replicas/<name:replica>/logs", logs, "A part of the engine's log", query=part),
        Route("GET", "/api/v1/replicas/<name:replica>", one, "One replica"),
        Route("POST", "/api/v1/replicas/<name:replica>/drain", drain, "Let it go; another takes its place first", Role.OPERATOR),
        Route("POST", "/api/v1/replicas/<name:replica>/restart", restart, "Restart it in place, at once", Role.OPERATOR),
    )


def list_replicas(controller: Controller, model: str | None = None, node: str | None = None) -> list[dict[str, Any]]:
    """Every replica's view, sorted by id, or those of one model (its name) or node (name or id)."""
    names = node_names(controller.observe().nodes)
    wall_s = controller.machine.wall_s()
    shown = [
        replica_view(replica, names.get(replica.node, replica.node), wall_s)
        for replica in sorted(controller.replicas(), key=lambda replica: replica.id)
        if node is None or node in (replica.node, names.get(replica.node))
    ]
    return [view for view in shown if model is None or view["model"] == model]
