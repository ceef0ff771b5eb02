"""Who calls: bearer tokens against the hashes in the store, and the token of agents. Tokens are never kept, logged or echoed."""

from __future__ import annotations

import hashlib
import hmac
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final
from urllib.parse import quote, unquote

import attrs

from llmgw.admin.limits import Limits
from llmgw.domain.errors import Denied, Overloaded, Unauthenticated
from llmgw.domain.identity import Presented, parse_uri
from llmgw.store import admin_tokens
from llmgw.store.admin_tokens import AdminToken, Role
from llmgw.store.connection import Store

FAILURE_WINDOW_S: Final = 60.0
FAILING_PEERS_MAX: Final = 10_000  # addresses remembered; the oldest are forgotten first
HOP: Final = "x-llmgw-hop"  # names the control plane that carried this request here
SHOWN: Final = "x-llmgw-certificate"  # whose certificate the request came with that is carried; as CALLER
CALLER: Final = "x-llmgw-caller"  # whose order it is; only a control plane's own token vouches for it
_RANK: Final = {Role.VIEWER: 0, Role.OPERATOR: 1, Role.ADMIN: 2}


@attrs.frozen
class Principal:
    """The token that a request came with, by name. `peer`: another control plane has brought it."""

    name: str
    role: Role
    peer: bool = False

    def may(self, needed: Role) -> bool:
        return _RANK[self.role] >= _RANK[needed]

    def require(self, needed: Role) -> None:
        """Raises Denied."""
        if not self.may(needed):
            raise Denied(f"token {self.name!r} has the role {self.role.value}; this needs {needed.value}", code="role")


class AdminAuth:
    """The valid tokens. `reload` reads them from the store: at the start, on leading, and after each change of them.

    `own` is that of this machine's file, which is valid here also before a leader has put it into the store. `control_token`
    is what control planes have for each other.
    """

    def __init__(self, tokens: Iterable[AdminToken] = (), own: AdminToken | None = None, control_token: str = "") -> None:
        self._tokens: tuple[AdminToken, ...] = ()
        self._own = own
        self._control_token = control_token
        self.replace(tokens)

    def use_own(self, own: AdminToken) -> None:
        """The file of this machine holds another token now; the one before it stays valid where the store knows it."""
        self._own = own
        self.replace((*self._tokens, own))

    def replace(self, tokens: Iterable[AdminToken]) -> None:
        known = tuple(tokens)
        if self._own is not None and all(token.sha256 != self._own.sha256 for token in known):
            known = (*known, self._own)
        self._tokens = tuple(token for token in known if token.revoked_wall_s is None)

    async def reload(self, store: Store) -> None:
        self.replace(await admin_tokens.load(store))

    def check(self, headers: Sequence[tuple[bytes, bytes]], *, vouched: bool = False, local: bool = True) -> Principal:
        """Whose request it is. `vouched`: it came with a control plane's certificate; `local`: the control planes' token counts for
        its sender. Raises Unauthenticated."""
        if self.is_peer(headers, vouched=vouched, local=local):
            return _brought(headers)
        found = self.find(hash_token(bearer(headers)))
        if found is None:
            raise Unauthenticated("the token is not valid here", code="token_invalid")
        return found

    def is_peer(self, headers: Sequence[tuple[bytes, bytes]], *, vouched: bool, local: bool) -> bool:
        """Has another control plane sent it? One that shows its certificate marks what it brings."""
        if vouched and marked_by(headers) is not None:
            return True
        return local and is_token(headers, self._control_token)

    def find(self, sha256: str) -> Principal | None:
        """Whose valid token has this hash. Every hash is compared, each in constant time."""
        found: AdminToken | None = None
        for token in self._tokens:
            if hmac.compare_digest(token.sha256.encode(), sha256.encode()):
                found = token
        return None if found is None else Principal(found.name, found.role)


def marked_by(headers: Sequence[tuple[bytes, bytes]]) -> str | None:
    """The owner id of the control plane that its sender calls itself, None where it calls itself none."""
    return next((value.decode("latin1") for name, value in headers if name.lower() == HOP.encode()), None)


def caller(principal: Principal) -> str:
    """The value of the CALLER header."""
    return f"{principal.role.value} {quote(principal.name)}"


def tell_presented(shown: Presented) -> str:
    """The value of the SHOWN header."""
    return f"{shown.serial} {shown.not_before_wall_s:.0f} {shown.not_after_wall_s:.0f} {shown.identity.uri}"


def told_presented(headers: Sequence[tuple[bytes, bytes]]) -> Presented | None:
    """Whose certificate another control plane says that a request came with; None where it says nothing that can be read."""
    value = next((value.decode("latin1") for name, value in headers if name.lower() == SHOWN.encode()), "")
    parts = value.split(" ")
    if len(parts) != 4 or not (parts[1].isdecimal() and parts[2].isdecimal()) or (identity := parse_uri(parts[3])) is None:
        return None
    return Presented(identity, parts[0], float(parts[1]), float(parts[2]))


def _brought(headers: Sequence[tuple[bytes, bytes]]) -> Principal:
    """Whose request another control plane has brought. Raises Unauthenticated."""
    value = next((value.decode("latin1") for name, value in headers if name.lower() == CALLER.encode()), "")
    role, _, name = value.partition(" ")
    if role not in [known.value for known in Role] or not name:
        raise Unauthenticated(f"a control plane names whose request it brings: {CALLER}: ROLE NAME", code="token_malformed")
    return Principal(unquote(name), Role(role), peer=True)


class FailureLimit:
    """Slows down guessing: an address that failed too often within a minute is told to wait. Right tokens never come here."""

    def __init__(self, now_s: Callable[[], float], limits: Limits) -> None:
        self._now_s = now_s
        self._max = limits.failures_max
        self._failures: dict[str, deque[float]] = {}

    def failed(self, peer: str) -> None:
        """Counts one failure. Raises Overloaded when there were too many."""
        now_s = self._now_s()
        if peer not in self._failures and len(self._failures) >= FAILING_PEERS_MAX:
            del self._failures[next(iter(self._failures))]
        times = self._failures.setdefault(peer, deque(maxlen=self._max + 1))
        while times and now_s - times[0] > FAILURE_WINDOW_S:
            times.popleft()
        times.append(now_s)
        if len(times) > self._max:
            raise Overloaded(
                "too many requests with a wrong token from this address",
                retry_after_s=max(1.0, FAILURE_WINDOW_S - (now_s - times[0])),
                code="too_many_failures",
            )


def bearer(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The token of the one Authorization header, as bytes: it may be anything. Raises Unauthenticated."""
    values = [value.strip() for name, value in headers if name.lower() == b"authorization"]
    if not values:
        raise Unauthenticated("a token is needed: Authorization: Bearer TOKEN", code="token_missing")
    scheme, _, token = values[0].partition(b" ")
    token = token.strip()
    if len(values) > 1 or scheme.lower() != b"bearer" or not token:
        raise Unauthenticated("one Authorization header is expected, in the form: Bearer TOKEN", code="token_malformed")
    return token


def hash_token(token: bytes | str) -> str:
    """What is kept of a token: the SHA-256 of its bytes, in hex."""
    return hashlib.sha256(token if isinstance(token, bytes) else token.encode("utf-8", "surrogateescape")).hexdigest()


def is_token(headers: Sequence[tuple[bytes, bytes]], expected: str) -> bool:
    """Does the request carry exactly this token? An empty `expected` is carried by nobody."""
    try:
        found = bearer(headers)
    except Unauthenticated:
        return False
    return bool(expected) and hmac.compare_digest(hash_token(found), hash_token(expected))
