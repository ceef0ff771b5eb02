"""`/pause`: roll-outs, moves and scaling stand still until somebody resumes; routing and restarts in place go on."""

from __future__ import annotations

from llmgw.admin.api.settings import load_pause, pause_view, read_reason
from llmgw.admin.calls import Call, Reply, Route
from llmgw.control.controller import Controller
from llmgw.domain.errors import Conflict
from llmgw.store.admin_tokens import Role


def routes(controller: Controller) -> tuple[Route, ...]:
    settings = controller.cluster_settings

    async def show(call: Call) -> Reply:
        return Reply({"pause": pause_view(await load_pause(controller))})

    async def pause(call: Call) -> Reply:
        reason = read_reason(call.table(("reason",), optional=True))
        _check_kept(controller)
        stands = await settings.pause(reason, call.origin)
        change = "paused" if stands.since_wall_s == call.origin.at_wall_s else "unchanged"
        return Reply({"pause": pause_view(stands), "change": change, "durability": settings.durability})

    async def resume(call: Call) -> Reply:
        _check_kept(controller)
        change = "resumed" if await settings.resume(call.origin) else "unchanged"
        return Reply({"pause": None, "change": change, "durability": settings.durability})

    return (
        Route("GET", "/api/v1/pause", show, "The pause that stands; null for none"),
        Route("POST", "/api/v1/pause", pause, "Freeze roll-outs, moves and scaling", Role.OPERATOR, {"reason": "why, for whoever asks"}),
        Route("DELETE", "/api/v1/pause", resume, "End the pause", Role.OPERATOR),
    )


def _check_kept(controller: Controller) -> None:
    """Raises Conflict where no store could keep a pause over a restart."""
    if controller.file:
        raise Conflict(f"a pause is kept in a [store], and {controller.file} names none", code="file_holds_it")
