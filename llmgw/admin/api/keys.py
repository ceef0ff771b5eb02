"""`/keys`: clients of /v1. Bodies are the `[[auth.key]]` tables of the file; a secret stands in the answer that created it, only."""

from __future__ import annotations

from typing import Any, Final

from llmgw.admin.calls import PAGED, Call, Reply, Route, page
from llmgw.admin.views import time_text
from llmgw.control.controller import Controller
from llmgw.domain.errors import Invalid
from llmgw.domain.model import Catalog
from llmgw.domain.policy import ApiKey
from llmgw.settings.objects import key_to_table
from llmgw.store.admin_tokens import Role
from llmgw.store.api_keys import StoredKey

RIGHTS: Final = ("models", "max_parallel", "requests_per_minute", "tokens_per_minute", "operator", "expires")


def routes(controller: Controller) -> tuple[Route, ...]:
    keys = controller.keys

    def view(stored: StoredKey) -> dict[str, Any]:
        return key_view(stored, controller.machine.wall_s())

    def changed(stored: StoredKey, change: str, status: int = 200, **more: Any) -> Reply:
        body = {**view(stored), "change": change, **more, "durability": keys.durability}
        if unknown := unknown_models(stored.key, controller.models.catalog):
            body["unknown_models"] = unknown
        return Reply(body, status, _etag(stored))

    async def list_(call: Call) -> Reply:
        return page(call, "keys", [view(stored) for stored in keys.all], "name")

    async def one(call: Call, name: str) -> Reply:
        stored = keys.get(name)
        return Reply(view(stored), headers=_etag(stored))

    async def create(call: Call) -> Reply:
        table = _table(call, ("name", "sha256", *RIGHTS))
        if "name" not in table:
            raise Invalid("name is what the key is called", param="name")
        made = await keys.create(table, call.key, call.origin)
        return changed(made.stored, "created" if made.new else "unchanged", 201 if made.new else 200, secret=made.secret or None)

    async def update(call: Call, name: str) -> Reply:
        changes = _table(call, RIGHTS)
        if not changes:
            raise Invalid(f"name what is to change: {', '.join(RIGHTS)}")
        expected = call.expected_revision(keys.get(name).revision)
        stored, differs = await keys.update(name, changes, expected, call.key, call.origin)
        return changed(stored, "updated" if differs else "unchanged")

    async def revoke(call: Call, name: str) -> Reply:
        call.table((), optional=True)
        stored, was_valid = await keys.revoke(name, call.key, call.origin)
        return changed(stored, "revoked" if was_valid else "unchanged")

    rights = {
        "models": 'names, ["*"]: all',
        "max_parallel": "requests at a time; 0: as in [limits]",
        "requests_per_minute": "0: as in [limits]",
        "tokens_per_minute": "0: as in [limits]",
        "operator": "true: may see and ask single endpoints",
        "expires": "RFC 3339, or null: never",
    }
    new = {"name": "its name", "sha256": "the hash of a secret of your own; without it one is made", **rights}
    return (
        Route("GET", "/api/v1/keys", list_, "Every key of clients, revoked ones among them; never a secret", query=PAGED),
        # The answer holds the secret, so it is not kept: the store tells a repeat, which gets the key without it.
        Route("POST", "/api/v1/keys", create, "Create a key; its secret stands in this answer only", Role.ADMIN, new, remembered=False),
        Route("GET", "/api/v1/keys/<name:name>", one, "One key; its ETag is its revision"),
        Route("PATCH", "/api/v1/keys/<name:name>", update, "Change what a key may do (If-Match)", Role.ADMIN, rights),
        Route("POST", "/api/v1/keys/<name:name>/revoke", revoke, "End a key, for good and everywhere", Role.ADMIN),
    )


def key_view(stored: StoredKey, wall_s: float) -> dict[str, Any]:
    """A key as it is told: `state` is active, expired or revoked."""
    key = stored.key
    state = "active"
    if stored.revoked_wall_s is not None:
        state = "revoked"
    elif key.expires_wall_s is not None and wall_s >= key.expires_wall_s:
        state = "expired"
    table = key_to_table(key)
    del table["sha256"]
    return {
        **table,
        "expires": table["expires"] or None,
        "prefix": stored.prefix,
        "state": state,
        "created_at": _time(stored.created_wall_s or None),
        "created_by": stored.created_by,
        "revoked_at": _time(stored.revoked_wall_s),
        "revoked_by": stored.revoked_by,
        "revision": stored.revision,
    }


def unknown_models(key: ApiKey, catalog: Catalog) -> list[str]:
    """What the key may use and is neither a model nor an alias now: a mistyped name, or one that is still to come."""
    if "*" in key.models:
        return []
    known = {name for model in catalog.models for name in model.names}
    return [name for name in key.models if name not in known]


def _table(call: Call, allowed: tuple[str, ...]) -> dict[str, Any]:
    """The body as a table of the file: JSON's null is TOML's empty text."""
    table = call.table(allowed)
    if "expires" in table and table["expires"] is None:
        table["expires"] = ""
    return table


def _etag(stored: StoredKey) -> dict[str, str]:
    return {"ETag": f'"{stored.revision}"'}


def _time(wall_s: float | None) -> str | None:
    return None if wall_s is None else time_text(wall_s)
