"""Join tokens: what a machine brings to be let into the cluster, once. Values and their printed form.

A token is 256 random bits that the cluster knows the hash of, and beside them what a new machine must know to find the right
cluster: where its control planes are, and the pin of its CA. Whoever has the text may join in its role until it expires.
"""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any, Final

import attrs

from llmgw.domain.errors import Invalid
from llmgw.domain.identity import MachineRole
from llmgw.domain.setting import name_fault
from llmgw.settings.address import url_fault

SECRET_BYTES: Final = 32  # 256 bits (operations.md 4)
TOKEN_BEGIN: Final = "llmgw-join-1."  # the number is the form's: another one is told apart from a damaged text
TOKEN_MAX: Final = 8_192
LIFE_S: Final = 3_600.0  # chosen: an hour from the command on one machine to its use on the other
LIFE_S_MAX: Final = 7 * 86_400.0  # a token that lies around for longer is one that somebody finds
LIFE_S_MIN: Final = 60.0
CHECK_DIGITS: Final = 8  # of a hash over the rest: a text that was cut while it was copied is told as that
ADDRESSES_MAX: Final = 16


@attrs.frozen
class JoinToken:
    """`secret` is hex text; `name` is "" where the new machine may choose one. `addresses` are https, and never none."""

    secret: str = attrs.field(repr=False)
    role: MachineRole
    name: str
    pin: str
    addresses: tuple[str, ...]


def print_token(token: JoinToken) -> str:
    """One word without anything that a shell reads."""
    told = {"s": token.secret, "r": token.role.value, "n": token.name, "p": token.pin, "a": list(token.addresses)}
    body = base64.urlsafe_b64encode(json.dumps(told, separators=(",", ":")).encode()).decode().rstrip("=")
    return f"{TOKEN_BEGIN}{body}.{_check(body)}"


def parse_token(text: str) -> JoinToken:
    """Raises Invalid, which never repeats the text."""
    text = text.strip()
    if not text:
        raise Invalid("no join token was given", code="join_token_malformed")
    if not text.startswith(TOKEN_BEGIN) or len(text) > TOKEN_MAX:
        raise Invalid(f"this is no join token: one begins with {TOKEN_BEGIN}", code="join_token_malformed")
    body, _, check = text.removeprefix(TOKEN_BEGIN).rpartition(".")
    if not body or check != _check(body):
        raise Invalid("the join token is not whole: copy all of it, to its last character", code="join_token_malformed")
    try:
        told = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
        return _token(told)
    except (ValueError, KeyError, TypeError) as err:
        raise Invalid("the join token cannot be read: it is of another build of llmgw", code="join_token_malformed") from err


def _token(told: dict[str, Any]) -> JoinToken:
    secret, name, pin, addresses = told["s"], told["n"], told["p"], tuple(told["a"])
    if not all(isinstance(text, str) for text in (secret, name, pin, *addresses)) or not 1 <= len(addresses) <= ADDRESSES_MAX:
        raise ValueError("a text is expected")
    if name_fault(name) or any(url_fault(address) or not address.startswith("https://") for address in addresses):
        raise ValueError("a name or an address")
    return JoinToken(secret, MachineRole(told["r"]), name, pin, addresses)


def hash_secret(secret: str) -> str:
    """What is kept of a token."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def token_id(sha256: str) -> str:
    """The short name of a token, which tells nothing of its secret."""
    return f"j-{sha256[:10]}"


def _check(body: str) -> str:
    return hashlib.sha256(body.encode("utf-8", "surrogatepass")).hexdigest()[:CHECK_DIGITS]
