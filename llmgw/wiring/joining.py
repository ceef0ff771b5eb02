"""How a machine asks to be let in: the CA first, known by its pin; then a token and a request for a certificate, for the certificate.

Synchronous, over `http.client`: asked once, by a command. Uses no proxy from the environment: a join token must not travel through one.
"""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import attrs

from llmgw.domain.errors import Conflict, Denied, Invalid, LlmgwError, NotFound, Overloaded, Unauthenticated, Unavailable
from llmgw.domain.files import words
from llmgw.domain.identity import MachineRole
from llmgw.identity import ca, pin
from llmgw.identity.join_tokens import JoinToken
from llmgw.identity.trust import Trust, refusal, refused, wrong_server

CA_PATH: Final = "/api/v1/join/ca"
JOIN_PATH: Final = "/api/v1/join"
RENEW_PATH: Final = "/api/v1/renew"
ANSWER_S: Final = 15.0  # above what a standby waits for the leader (10 s)
ANSWER_BYTES_MAX: Final = 256 * 1024  # a certificate, a CA and some addresses are 4 KiB
_KINDS: Final[dict[int, type[LlmgwError]]] = {400: Invalid, 401: Unauthenticated, 403: Denied, 404: NotFound, 409: Conflict, 412: Conflict}


@attrs.frozen
class Joined:
    """What a machine was given. `ca_key_pem` is "" but for a control plane."""

    name: str
    role: MachineRole
    cluster: str
    key_pem: str = attrs.field(repr=False)
    certificate_pem: str
    ca_pem: str
    control_planes: tuple[str, ...]
    ca_key_pem: str = attrs.field(default="", repr=False)
    store: dict[str, str] = attrs.field(factory=dict)


def join(token: JoinToken, name: str, addresses: Sequence[str], others: str = "", key_pem: str = "", ca_pem: str = "") -> Joined:
    """Blocking. Raises what refuses it, each in one sentence; `others` is a file of CAs that may have made the control planes' own.

    `key_pem` is the machine's key, "" for a new one; `ca_pem` the CA's certificate, "" to ask for it. The same key may ask again by
    the same token.
    """
    key_pem = key_pem or ca.make_key()
    ca_pem = ca_pem or fetch_ca(token)
    body = {
        "token": token.secret,
        "role": token.role.value,
        "name": name,
        "request": ca.make_request(key_pem),
        "addresses": list(addresses),
    }
    answer = post(token.addresses, JOIN_PATH, body, Trust(ca_pem, others))
    try:
        planes = tuple(str(one) for one in answer["control_planes"])
        store = {str(name): str(value) for name, value in (answer.get("store") or {}).items()}
        return Joined(
            str(answer["name"]),
            token.role,
            str(answer["cluster_id"]),
            key_pem,
            str(answer["certificate"]),
            ca_pem,
            planes or token.addresses,
            str(answer.get("ca_key") or ""),
            store,
        )
    except (KeyError, TypeError, AttributeError) as err:
        raise Invalid("the control plane's answer to a join cannot be read: is it of another build?") from err


def fetch_ca(token: JoinToken) -> str:
    """The CA's certificate, from a peer that is not trusted yet: its pin says whether it is the one. Raises LlmgwError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # nothing is told here, and what is answered is checked by the pin
    context.verify_mode = ssl.CERT_NONE
    answer = _try_each(token.addresses, "GET", CA_PATH, None, context)
    pem = str(answer.get("certificate", ""))
    found = pin.pin_of(ca.read_ca(pem.encode()))
    if not pin.same_pin(found, token.pin):
        raise Denied(
            "the control plane's CA is not the one of the join token: somebody stands between, or the token is of another cluster",
            code="wrong_pin",
        )
    return pem


def post(addresses: Sequence[str], path: str, body: object, trust: Trust) -> dict[str, Any]:
    """Asks one control plane after the other until one answers. Raises what the last one said, or a refusal at once."""
    return _try_each(addresses, "POST", path, body, trust.client())


def _try_each(addresses: Sequence[str], method: str, path: str, body: object, context: ssl.SSLContext) -> dict[str, Any]:
    last: LlmgwError | None = None
    for address in addresses:
        try:
            return _ask(address, method, path, body, context)
        except (Unavailable, Overloaded) as err:
            last = err
    raise last or Invalid("no control plane with an https:// address is known")


def _ask(address: str, method: str, path: str, body: object, context: ssl.SSLContext) -> dict[str, Any]:
    where = urlsplit(address)
    connection = http.client.HTTPSConnection(where.hostname or "", where.port or 443, timeout=ANSWER_S, context=context)
    try:
        try:
            connection.connect()
            assert isinstance(connection.sock, ssl.SSLSocket)
            if context.verify_mode != ssl.CERT_NONE and (why := wrong_server(connection.sock.getpeercert())):
                raise Denied(f"{address} {why}", code="certificate_role")
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, where.path.rstrip("/") + path, data, {"Content-Type": "application/json", "User-Agent": "llmgw"})
            response = connection.getresponse()
            raw = response.read(ANSWER_BYTES_MAX)
        except (OSError, http.client.HTTPException) as err:
            raise _unreachable(address, err) from err
    finally:
        connection.close()
    try:
        answer = json.loads(raw)
    except (ValueError, RecursionError):
        answer = None
    if response.status >= 300 or not isinstance(answer, dict):
        raise _refused(address, response.status, answer, response.headers.get("Retry-After"))
    return answer


def _unreachable(address: str, err: Exception) -> LlmgwError:
    if (fault := refusal(err)) is not None:
        return Denied(f"the certificate of the control plane at {address} {fault[1]}", code=fault[0])
    if (fault := refused(err)) is not None:
        return Denied(f"the control plane at {address} refuses this machine: {fault[1]}", code=fault[0])
    return Unavailable(f"the control plane at {address} cannot be reached: {words(err) or type(err).__name__}", code="unreachable")


def _refused(address: str, status: int, answer: object, retry_after: str | None) -> LlmgwError:
    try:
        error = answer["error"]  # type: ignore[index]
        message, code = str(error["message"]), str(error["code"])
    except (KeyError, TypeError):
        return Unavailable(f"{address} answered {status}, and is no control plane's admin port", code="not_a_control_plane")
    if status == 429:
        wait_s = float(retry_after) if retry_after is not None and retry_after.isdecimal() else 1.0
        return Overloaded(message, retry_after_s=wait_s, code=code)
    kind = _KINDS.get(status)
    return Unavailable(f"{address}: {message}", code=code) if kind is None else kind(message, code=code)
