"""`/join` and `/renew`: how a machine gets its certificate. A join token, or the certificate that it has, says who asks."""

from __future__ import annotations

from typing import Any, Final

from llmgw.admin.calls import Call, Reply, Route
from llmgw.control.controller import Controller
from llmgw.domain.errors import Denied, Invalid, Unauthenticated
from llmgw.domain.identity import MachineRole
from llmgw.identity.ca import Issued

SECRET_MAX: Final = 200  # characters
NAME_MAX: Final = 128


def routes(controller: Controller) -> tuple[Route, ...]:
    identities = controller.identities

    async def authority(call: Call) -> Reply:
        found = identities.needed_authority()
        return Reply({"certificate": found.pem, "pin": found.pin, "cluster_id": controller.leadership.cluster_id})

    async def join(call: Call) -> Reply:
        table = call.table(("token", "role", "name", "request", "addresses"))
        secret, role, name = text_of(table, "token", SECRET_MAX), role_of(table), text_of(table, "name", NAME_MAX)
        issued = await identities.join(secret, role, name, text_of(table, "request"), texts_of(table, "addresses"), call.origin)
        answer = given(controller, issued)
        if role is MachineRole.SERVER:
            # Whoever is let in as a control plane may lead, and a leader makes certificates. It came over TLS by our pin.
            answer["ca_key"] = identities.needed_authority().key_pem
            answer["store"] = shared_store(controller)
        return Reply(answer, 201)

    async def renew(call: Call) -> Reply:
        table = call.table(("request", "addresses"))
        if call.shown is None:
            raise Unauthenticated(
                "a certificate of this cluster is renewed by whoever shows it, and none was shown", code="certificate_missing"
            )
        if call.shown.identity.role is MachineRole.SERVER:
            raise Denied("a control plane makes its certificates itself", code="certificate_role")
        issued = await identities.renew(call.shown, text_of(table, "request"), texts_of(table, "addresses"), call.origin)
        return Reply(given(controller, issued))

    parts = {
        "token": "the secret of a join token",
        "role": "server, agent or router",
        "name": "of the machine",
        "request": "a request for a certificate (PEM, PKCS #10)",
        "addresses": "host names and IP addresses that it is reached at",
    }
    return (
        Route("GET", "/api/v1/join/ca", authority, "The cluster's CA; a machine that joins knows it by its pin", None),
        Route("POST", "/api/v1/join", join, "Join by a token: a certificate for a request", None, parts, remembered=False, local=False),
        Route("POST", "/api/v1/renew", renew, "Another certificate for the machine that shows its own", None,
              {name: parts[name] for name in ("request", "addresses")}, remembered=False, local=False),
    )  # fmt: skip


def shared_store(controller: Controller) -> dict[str, str]:
    """What every control plane's `[store]` says alike. Credentials are each machine's own."""
    store = controller.settings.store
    return {} if store is None else {name: getattr(store, name) for name in ("replica", "s3_endpoint", "s3_region")}


def given(controller: Controller, issued: Issued) -> dict[str, Any]:
    """What a machine is told that got a certificate."""
    return {
        "cluster_id": issued.identity.cluster,
        "role": issued.identity.role.value,
        "name": issued.identity.name,
        "certificate": issued.pem,
        "serial": issued.serial,
        "control_planes": sorted({url for url in controller.identities.reaches() if url.startswith("https://")}),
    }


def role_of(table: dict[str, Any]) -> MachineRole:
    """Raises Invalid."""
    known = {one.value: one for one in MachineRole}
    role = known.get(str(table.get("role")))
    if role is None:
        raise Invalid(f"role is one of {', '.join(known)}", param="role")
    return role


def text_of(table: dict[str, Any], name: str, most: int = 16_384) -> str:
    """Raises Invalid; the value is never repeated: it may be a secret."""
    value = table.get(name)
    if not isinstance(value, str) or not value or len(value) > most:
        raise Invalid(f"{name} is a text of 1 to {most} characters", param=name)
    return value


def texts_of(table: dict[str, Any], name: str) -> tuple[str, ...]:
    """Raises Invalid."""
    value = table.get(name, [])
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise Invalid(f"{name} is a list of texts", param=name)
    return tuple(dict.fromkeys(value))
