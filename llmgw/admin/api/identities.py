"""`/join-tokens` and `/identities`: who may join, who has joined, and how it ends. A token stands in the answer that made it, only."""

from __future__ import annotations

from typing import Any, Final

from llmgw.admin.api.joining import NAME_MAX, role_of, shared_store
from llmgw.admin.calls import PAGED, Call, Reply, Route, page
from llmgw.admin.views import time_text
from llmgw.control.controller import Controller
from llmgw.control.identities import state_of, token_state
from llmgw.domain.errors import Invalid
from llmgw.domain.identity import MachineRole
from llmgw.domain.setting import name_fault
from llmgw.identity.bundle import Bundle, print_bundle
from llmgw.identity.ca import address_fault
from llmgw.identity.join_tokens import LIFE_S, LIFE_S_MAX, LIFE_S_MIN, parse_token
from llmgw.store.admin_tokens import Role
from llmgw.store.identities import StoredIdentity, StoredToken

ROLES: Final = {role.value: role for role in MachineRole}


def routes(controller: Controller) -> tuple[Route, ...]:
    identities = controller.identities

    def wall_s() -> float:
        return controller.machine.wall_s()

    async def list_tokens(call: Call) -> Reply:
        return page(call, "join-tokens", sorted((token_view(one, wall_s()) for one in identities.tokens), key=lambda row: row["id"]), "id")

    async def create_token(call: Call) -> Reply:
        table = call.table(("role", "name", "expires_in_s", "bundle", "address"))
        name, life_s = table.get("name") or "", table.get("expires_in_s", LIFE_S)
        if not isinstance(name, str) or len(name) > NAME_MAX or (fault := name_fault(name)) is not None:
            raise Invalid(f"name: {fault if isinstance(name, str) else 'a text is expected'}", param="name")
        if type(life_s) not in (int, float):
            raise Invalid("expires_in_s is a number of seconds", param="expires_in_s")
        role, address = role_of(table), _bundled_address(table, name)
        token, printed = await identities.create_token(role, name, float(life_s), call.origin)
        body = {**token_view(token, wall_s()), "token": printed, "change": "created", "durability": identities.durability}
        if address is not None:
            body["bundle"] = await bundle(token, printed, address)
        return Reply(body, 201)

    async def bundle(token: StoredToken, printed: str, address: str) -> str:
        version, document = await controller.cluster_settings.newest()
        return print_bundle(
            Bundle(
                controller.leadership.cluster_id,
                parse_token(printed),
                token.expires_wall_s,
                address,
                identities.needed_authority().pem,
                {name: value for name, value in shared_store(controller).items() if value},
                version.version,
                document.text,
            )
        )

    async def revoke_token(call: Call, token: str) -> Reply:
        call.table((), optional=True)
        found, ended = await identities.revoke_token(token, call.origin)
        change = "revoked" if ended else "unchanged"
        return Reply({**token_view(found, wall_s()), "change": change, "durability": identities.durability})

    async def list_(call: Call) -> Reply:
        rows = [identity_view(one, wall_s()) for one in identities.held]
        if (role := call.query.get("role")) is not None:
            rows = [row for row in rows if row["role"] == role_of({"role": role}).value]
        return page(call, "identities", sorted(rows, key=_place), _place)

    async def revoke(call: Call, role: str, name: str) -> Reply:
        call.table((), optional=True)
        if role not in ROLES:
            raise Invalid(f"a machine has joined as one of {', '.join(ROLES)}", param="role")
        ended, tokens = await identities.revoke(ROLES[role], name, call.origin)
        change = "revoked" if ended or tokens else "unchanged"
        body = {"role": role, "name": name, "certificates": ended, "join_tokens": tokens, "change": change}
        return Reply({**body, "durability": identities.durability})

    new = {
        "role": "what it lets in: server, agent or router",
        "name": "the machine's name; without it the machine chooses",
        "expires_in_s": f"{LIFE_S_MIN:g} to {LIFE_S_MAX:g}; {LIFE_S:g} without it",
        "bundle": "true: for a control plane with a name, the answer also holds the file that `llmgw init --bundle` takes",
        "address": "into the bundle: where other machines will reach the new one",
    }
    return (
        Route("GET", "/api/v1/join-tokens", list_tokens, "What may let a machine in, and what has", Role.ADMIN, query=PAGED),
        # The answer holds the token, so it is not kept: a repeat makes another one.
        Route("POST", "/api/v1/join-tokens", create_token, "Make a join token; it stands in this answer only", Role.ADMIN, new,
              remembered=False),
        Route("POST", "/api/v1/join-tokens/<token>/revoke", revoke_token, "End a join token that was not used", Role.ADMIN),
        Route("GET", "/api/v1/identities", list_, "Which machines have joined, by which certificate",
              query={**PAGED, "role": "server, agent or router"}),
        Route("POST", "/api/v1/identities/<role>/<name:name>/revoke", revoke, "End a machine's certificates, sessions and join tokens",
              Role.ADMIN),
    )  # fmt: skip


def _bundled_address(table: dict[str, Any], name: str) -> str | None:
    """The address for the bundle that is asked for, None where none is. Raises Invalid."""
    wanted, address = table.get("bundle", False), table.get("address") or ""
    if not isinstance(wanted, bool):
        raise Invalid("bundle is true or false", param="bundle")
    if not wanted:
        if address:
            raise Invalid("address goes with bundle", param="address")
        return None
    if role_of(table) is not MachineRole.SERVER or not name:
        raise Invalid("a bundle is for a control plane, and names it", param="bundle")
    if not isinstance(address, str) or (address and (fault := address_fault(address)) is not None):
        raise Invalid(f"address: {fault if isinstance(address, str) else 'a text is expected'}", param="address")
    return address


def token_view(token: StoredToken, wall_s: float) -> dict[str, Any]:
    return {
        "id": token.id,
        "role": token.role.value,
        "name": token.name or None,
        "state": token_state(token, wall_s),
        "created_at": time_text(token.created_wall_s),
        "created_by": token.created_by,
        "expires_at": time_text(token.expires_wall_s),
        "used_at": _time(token.used_wall_s),
        "used_by": token.used_name or None,
        "used_from": token.used_peer or None,
        "revoked_at": _time(token.revoked_wall_s),
        "revoked_by": token.revoked_by or None,
    }


def identity_view(held: StoredIdentity, wall_s: float) -> dict[str, Any]:
    return {
        "role": held.role.value,
        "name": held.name,
        "serial": held.serial,
        "state": state_of(held, wall_s),
        "addresses": list(held.addresses),
        "issued_at": time_text(held.issued_wall_s),
        "issued_for": held.issued_for,
        "expires_at": time_text(held.not_after_wall_s),
        "revoked_at": _time(held.revoked_wall_s),
        "revoked_by": held.revoked_by or None,
    }


def _place(row: dict[str, Any]) -> str:
    return "\t".join((row["role"], row["name"], row["issued_at"], row["serial"]))


def _time(wall_s: float | None) -> str | None:
    return None if wall_s is None else time_text(wall_s)
