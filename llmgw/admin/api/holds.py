"""`/holds`: facilities that get nothing new, or are drained."""

from __future__ import annotations

from typing import Any, Final

from llmgw.admin.calls import PAGED, Call, Reply, Route, page
from llmgw.admin.views import hold_view
from llmgw.control.controller import Controller
from llmgw.domain.errors import Invalid
from llmgw.domain.holds import Hold
from llmgw.settings.objects import parse_time
from llmgw.store.admin_tokens import Role

TEXT_MAX: Final = 1_000  # characters of a reason
FACILITY_MAX: Final = 200


def routes(controller: Controller) -> tuple[Route, ...]:
    def view(hold: Hold) -> dict[str, Any]:
        return hold_view(hold, controller.machine.wall_s())

    async def list_(call: Call) -> Reply:
        return page(call, "holds", [view(hold) for _, hold in sorted(controller.holds.all.items())], "facility")

    async def put(call: Call, facility: str | None = None) -> Reply:
        hold = read_hold(call.table(("facility", "reason", "drain", "until")), facility, call.principal.name)
        fresh = hold.facility not in controller.holds.all
        await controller.holds.add(hold, call.origin)
        change = "created" if fresh else "updated"
        return Reply({**view(hold), "change": change, "durability": controller.store.durability}, 201 if fresh else 200)

    async def remove(call: Call, facility: str) -> Reply:
        await controller.holds.remove(facility, call.origin)
        return Reply({"facility": facility, "change": "removed", "durability": controller.store.durability})

    parts = {"facility": "its name", "reason": "why", "drain": "true: also move work off", "until": "RFC 3339, or null: until removed"}
    return (
        Route("GET", "/api/v1/holds", list_, "Every hold", query=PAGED),
        Route("POST", "/api/v1/holds", put, "Hold the facility that the body names", Role.OPERATOR, parts),
        Route("PUT", "/api/v1/holds", put, "Hold the facility that the body names", Role.OPERATOR, parts),
        Route("PUT", "/api/v1/holds/<name:facility>", put, "Hold a facility", Role.OPERATOR, parts),
        Route("DELETE", "/api/v1/holds/<name:facility>", remove, "Open the facility again", Role.OPERATOR),
    )


def read_hold(table: dict[str, Any], facility: str | None, author: str) -> Hold:
    """Raises Invalid, naming the field."""
    named = table.get("facility", facility)
    if not isinstance(named, str) or not 0 < len(named) <= FACILITY_MAX or not named.isprintable():
        raise Invalid(f"facility is a text of 1 to {FACILITY_MAX} printable characters", param="facility")
    if facility is not None and named != facility:
        raise Invalid(f"the path names facility {facility[:100]!r}, the body another", param="facility")
    reason, drain, until = table.get("reason"), table.get("drain", False), table.get("until")
    if not isinstance(reason, str) or not reason.strip() or len(reason) > TEXT_MAX:
        raise Invalid(f"reason is a text of 1 to {TEXT_MAX} characters", param="reason")
    if not isinstance(drain, bool):
        raise Invalid("drain is true or false", param="drain")
    until_wall_s = None
    if until not in (None, ""):
        if not isinstance(until, str):
            raise Invalid('until is a time such as "2030-01-01T00:00:00Z"', param="until")
        try:
            until_wall_s = parse_time(until)
        except ValueError as err:
            raise Invalid(f"until: {err}", param="until") from err
    return Hold(named, reason, drain, until_wall_s, author)
