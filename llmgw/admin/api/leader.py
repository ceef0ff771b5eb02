"""`/leader`: who leads, and handing it over."""

from __future__ import annotations

from typing import Any

from llmgw.admin.calls import Call, Reply, Route
from llmgw.control.controller import Controller
from llmgw.domain.errors import Invalid
from llmgw.domain.ids import holder_name
from llmgw.store.admin_tokens import Role


def routes(controller: Controller) -> tuple[Route, ...]:
    async def show(call: Call) -> Reply:
        return Reply(leader_view(controller))

    async def hand_over(call: Call) -> Reply:
        force = call.table(("force",), optional=True).get("force", False)
        if not isinstance(force, bool):
            raise Invalid("force is true or false", param="force")
        controller.leadership.hand_over(force=force)
        return Reply({**leader_view(controller), "change": "handing over"}, 202)

    return (
        Route("GET", "/api/v1/leader", show, "Who leads, under which epoch, with which powers"),
        Route("POST", "/api/v1/leader/hand-over", hand_over, "Let another control plane lead", Role.OPERATOR,
              {"force": "true: also where there is none; takes a new epoch"}),
    )  # fmt: skip


def leader_view(controller: Controller) -> dict[str, Any]:
    """`owner` is null while nobody is known to lead."""
    leadership = controller.leadership
    power = leadership.power(controller.machine.now_s())
    leads = leadership.is_leader
    return {
        "cluster_id": leadership.cluster_id,
        "owner": leadership.owner if leads else None,
        "holder": holder_name(leadership.owner) if leads else None,
        "epoch": leadership.epoch,
        "is_me": leads,
        "power": None if power is None else power.value,
    }
