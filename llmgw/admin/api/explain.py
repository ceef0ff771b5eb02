"""`/explain`: the reasons of the plan that was made last, for a replica or a model. Nothing is worked out here."""

from __future__ import annotations

from typing import Any

from llmgw.admin.calls import Call, Reply, Route
from llmgw.control.controller import Controller
from llmgw.domain.plan import Reason


def routes(controller: Controller) -> tuple[Route, ...]:
    async def replica(call: Call, name: str) -> Reply:
        return Reply(reason_view(controller.explain(f"replica/{name}")))

    async def model(call: Call, name: str) -> Reply:
        return Reply(reason_view(controller.explain(f"model/{name}")))

    return (
        Route("GET", "/api/v1/explain/replica/<name:name>", replica, "Why a replica is where it is", local=False),
        Route("GET", "/api/v1/explain/model/<name:name>", model, "Why a model has the replicas that it has", local=False),
    )


def reason_view(reason: Reason) -> dict[str, Any]:
    return {
        "object": reason.object,
        "text": reason.text,
        "rejections": [{"node": one.node, "filter": one.filter.value, "text": one.text} for one in reason.rejections],
    }
