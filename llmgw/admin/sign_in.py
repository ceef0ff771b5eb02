"""Sign-in of the console: one-time links, sessions behind a cookie, and the token that guards writes against other pages.

Sessions live in this process and end with it; a session is no more than the admin token it began with, and ends when that is
revoked. Cookies, links and tokens are never logged; of cookies and links only hashes are kept.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import Final

import attrs

from llmgw.admin.auth import AdminAuth, Principal, hash_token
from llmgw.domain.errors import Denied, Unauthenticated
from llmgw.domain.ports import Machine

SECRET_BYTES: Final = 32  # 256 bits, as every secret here (operations.md 4)
LINK_S: Final = 600.0  # a link is for the person who has just started something, not for a bookmark
LINKS_MAX: Final = 100  # open at once; the oldest goes first
# A page that is open asks every few seconds, so this is how long a closed one may come back without signing in.
IDLE_S: Final = 12 * 3600.0
SESSION_S: Final = 7 * 86_400.0  # also a page that is never closed signs in once a week
SESSIONS_MAX: Final = 1_000  # the one that was silent for longest goes first
CSRF_HEADER: Final = b"x-csrf-token"
_SAFE: Final = ("GET", "HEAD")
Headers = Sequence[tuple[bytes, bytes]]


@attrs.frozen
class Session:
    """`csrf` is told to the page and comes back with each write. Times are this machine's `now_s`."""

    token_sha256: str = attrs.field(repr=False)
    csrf: str = attrs.field(repr=False)
    began_s: float
    used_s: float


@attrs.frozen
class Opened:
    """A session just begun: what its cookie holds, and who signed in."""

    cookie: str = attrs.field(repr=False)
    csrf: str = attrs.field(repr=False)
    principal: Principal


class SignIn:
    """Links and sessions of this control plane. Plain state between awaits."""

    def __init__(self, machine: Machine, auth: AdminAuth, of: str) -> None:
        """`of` names this control plane, the same over restarts and different from every other's."""
        self._machine = machine
        self._auth = auth
        # Cookies are kept per host and not per port: two control planes on one machine must not take each other's.
        self.cookie_name: Final = f"llmgw-{hash_token(of)[:8]}"
        self._links: dict[str, tuple[str, float]] = {}  # hash of the code -> hash of the token it stands for, until when
        self._sessions: dict[str, Session] = {}  # by the hash of the cookie, the longest unused first

    def new_link(self, token: str) -> str:
        """A code that signs in once, within LINK_S, as this admin token would."""
        self._drop_old()
        while len(self._links) >= LINKS_MAX:
            del self._links[next(iter(self._links))]
        code = self._machine.fresh_hex(SECRET_BYTES)
        self._links[hash_token(code)] = (hash_token(token), self._machine.now_s() + LINK_S)
        return code

    def by_link(self, code: str) -> Opened:
        """Raises Unauthenticated for a code that was used, is too old or never was."""
        self._drop_old()
        found = self._links.pop(hash_token(code), None)
        if found is None:
            raise Unauthenticated("this link was used already or is too old; take a new one, or the admin token", code="link_invalid")
        return self._open(found[0])

    def by_token(self, token: str) -> Opened:
        """Raises Unauthenticated."""
        return self._open(hash_token(token))

    def _open(self, token_sha256: str) -> Opened:
        principal = self._auth.find(token_sha256)
        if principal is None:
            raise Unauthenticated("the token is not valid here", code="token_invalid")
        self._drop_old()
        while len(self._sessions) >= SESSIONS_MAX:
            del self._sessions[next(iter(self._sessions))]
        cookie, csrf = self._machine.fresh_hex(SECRET_BYTES), self._machine.fresh_hex(SECRET_BYTES)
        now_s = self._machine.now_s()
        self._sessions[hash_token(cookie)] = Session(token_sha256, csrf, now_s, now_s)
        return Opened(cookie, csrf, principal)

    def has_cookie(self, headers: Headers) -> bool:
        return bool(self._cookies(headers))

    def check(self, headers: Headers, method: str) -> Opened:
        """Whose session a request belongs to. Raises Unauthenticated; Denied for a write without the session's own token."""
        self._drop_old()
        for name, value in headers:
            if name.lower() == b"sec-fetch-site" and value not in (b"same-origin", b"none"):
                raise Denied("another page may not use the console's session", code="cross_site")
        for cookie in self._cookies(headers):
            key = hash_token(cookie)
            session = self._sessions.pop(key, None)
            if session is None:
                continue
            principal = self._auth.find(session.token_sha256)
            if principal is None:  # revoked meanwhile
                continue
            self._sessions[key] = attrs.evolve(session, used_s=self._machine.now_s())
            if method not in _SAFE:
                given = [value for name, value in headers if name.lower() == CSRF_HEADER]
                if len(given) != 1 or not hmac.compare_digest(given[0], session.csrf.encode()):
                    raise Denied("a write from the console carries its X-CSRF-Token", code="csrf")
            return Opened(cookie, session.csrf, principal)
        raise Unauthenticated("the session has ended; sign in again", code="session_ended")

    def end(self, headers: Headers) -> None:
        """Signs out; a session that is over already does not matter."""
        for cookie in self._cookies(headers):
            self._sessions.pop(hash_token(cookie), None)

    def _cookies(self, headers: Headers) -> list[str]:
        """Every cookie of our name: a browser may hold one for this path and one for a path above it."""
        found = []
        for name, value in headers:
            if name.lower() == b"cookie":
                for pair in value.decode("latin1").split(";"):
                    key, _, content = pair.strip().partition("=")
                    if key == self.cookie_name:
                        found.append(content)
        return found

    def _drop_old(self) -> None:
        now_s = self._machine.now_s()
        self._links = {key: link for key, link in self._links.items() if link[1] > now_s}
        for key, session in list(self._sessions.items()):
            if now_s - session.used_s > IDLE_S or now_s - session.began_s > SESSION_S:
                del self._sessions[key]
