"""One request as a handler sees it, and the routes' table: who may call, what is documented, how a repeat is answered.

A handler gets a `Call` and returns a `Reply`; it knows nothing of the web framework.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import attrs

from llmgw.admin import json_body
from llmgw.admin.auth import Principal
from llmgw.domain.errors import Invalid, PreconditionFailed, PreconditionRequired
from llmgw.domain.identity import Presented
from llmgw.store.admin_tokens import Role
from llmgw.store.audit import Origin
from llmgw.store.idempotency import KEY_BYTES_MAX

PAGE_MAX: Final = 10_000  # of one page of a list: a fleet's replicas fit, an answer stays below 10 MB
_KEY: Final = re.compile(r"[!-~]+\Z")
_ETAG: Final = re.compile(r'(?:W/)?"?([0-9]{1,18})"?\Z')


@attrs.frozen
class Reply:
    """`data` is the JSON body, None for none. `stream` replaces it by pieces of `content_type` as they come.

    `kept` False: nothing was done, so that the idempotency key it came with is free for the order itself.
    """

    data: Any = None
    status: int = 200
    headers: Mapping[str, str] = attrs.field(factory=dict)
    stream: Callable[[], AsyncGenerator[bytes, None]] | None = None
    content_type: str = "application/json"
    text: str | None = None
    kept: bool = True


@attrs.frozen
class Call:
    """`query` holds the last value of each parameter; `body` the bytes as they came; `headers` lower-case names."""

    principal: Principal
    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    peer: str
    at_wall_s: float
    request_id: str
    shown: Presented | None = None  # whose certificate it came with, on routes that are open to everybody

    @property
    def origin(self) -> Origin:
        """For the audit."""
        return Origin(self.principal.name, self.peer, self.at_wall_s)

    @property
    def key(self) -> str | None:
        """The idempotency key, made this token's own. Raises Invalid."""
        given = self.headers.get("idempotency-key")
        if given is None:
            return None
        if len(given) > KEY_BYTES_MAX or _KEY.match(given) is None:
            raise Invalid(f"an Idempotency-Key is 1 to {KEY_BYTES_MAX} printable characters without spaces", param="Idempotency-Key")
        return f"{self.principal.name}:{given}"

    def table(self, allowed: Sequence[str] | None = None, *, optional: bool = False) -> dict[str, Any]:
        """The body as an object; with `allowed`, unknown keys are refused. Raises Invalid."""
        if optional and not self.body.strip():
            return {}
        table = json_body.parse_table(self.body)
        if allowed is not None:
            for key in table:
                if key not in allowed:
                    raise Invalid(f"unknown key {key[:100]!r}; known: {', '.join(allowed)}", param=key[:100])
        return table

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        """A number from the query. Raises Invalid."""
        text = self.query.get(name)
        if text is None:
            return default
        if re.match(r"-?[0-9]{1,18}\Z", text) is None or not low <= int(text) <= high:
            raise Invalid(f"{name} is a number from {low} to {high}, not {text[:40]!r}", param=name)
        return int(text)

    def expected_revision(self, current: int) -> int | None:
        """The revision that an edit began from: 0 for "there must be none", None for any that is there; `current` 0: none.

        Raises PreconditionRequired where the request names none, PreconditionFailed where it cannot be the one that is there.
        """
        match = self.headers.get("if-match")
        if match is None:
            if self.headers.get("if-none-match", "").strip() == "*":
                return 0
            raise PreconditionRequired(
                'an edit names the revision it began from: If-Match: "REVISION" (or If-None-Match: * to create)', param="If-Match"
            )
        if match.strip() == "*" and current:
            return None
        named = [int(found[1]) for part in match.split(",") if (found := _ETAG.match(part.strip()))]
        if current and current in named:
            return current
        if named and named[0] > 0 and self.key is not None:
            # It may be a repeat of an order that was carried out just before its leader died: the store tells, in the write itself.
            return named[0]
        now = f"it is at revision {current}" if current else "it is not there"
        raise PreconditionFailed(f"the edit began from {match[:40]}, but {now}: read it again")


PAGED: Final = {"limit": f"a page holds at most {PAGE_MAX}", "cursor": "next of the page before"}  # the parameters of `page`


def page(call: Call, name: str, rows: Sequence[dict[str, Any]], key: str | Callable[[dict[str, Any]], str]) -> Reply:
    """`rows`, sorted by the text at `key` or that `key` makes of each, from the cursor on. `next` is that of the next page, or None."""
    place = key if callable(key) else lambda row: str(row[key])
    limit = call.integer("limit", PAGE_MAX, 1, PAGE_MAX)
    after = _cursor(call.query.get("cursor"))
    rest = [row for row in rows if after is None or place(row) > after]
    cut = rest[:limit]
    more = len(rest) > limit
    return Reply({name: cut, "next": _token(place(cut[-1])) if more else None})


def _token(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _cursor(token: str | None) -> str | None:
    if not token:
        return None
    try:
        return base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)).decode()
    except ValueError as err:
        raise Invalid("this cursor was not given out here", param="cursor") from err


Handler = Callable[..., Awaitable[Reply]]


@attrs.frozen
class Route:
    """`rule` in the web framework's notation. `role` None: open to everybody. `body` names the parts of a body, for the document.

    An order may come with an Idempotency-Key; a repeat of it is answered without being carried out again. `remembered` False:
    the key is passed over and the answer, which holds a secret or nothing that was done, is not kept. `local`: also where another
    control plane leads the answer is given here; orders are carried to the leader unless they are. `late`: a standby answers before
    it has read what the same client has changed through it. `beside`: of a question that a standby carries to the leader: what it
    tells with the leader's answer at hand.
    """

    method: str
    rule: str
    handler: Handler
    summary: str
    role: Role | None = Role.VIEWER
    body: Mapping[str, str] = attrs.field(factory=dict)
    query: Mapping[str, str] = attrs.field(factory=dict)
    remembered: bool = True
    local: bool | None = None
    late: bool = False
    beside: Callable[[Reply], Reply] | None = None

    @property
    def is_leaders(self) -> bool:
        """Is it for the leader to answer?"""
        return self.is_order and self.role is not None if self.local is None else not self.local

    @property
    def is_order(self) -> bool:
        return self.method not in ("GET", "HEAD")


def kept_answer(reply: Reply) -> dict[str, Any]:
    """What of an answer is kept for a repeat."""
    return {"status": reply.status, "headers": dict(reply.headers), "data": reply.data}


def given_again(kept: Mapping[str, Any]) -> Reply:
    return Reply(kept["data"], kept["status"], {**kept["headers"], "Idempotency-Replayed": "true"})


def request_text(call: Call) -> str:
    """What an idempotency key stands for: the same key for anything else is refused."""
    body: Any = call.body.decode("utf-8", "replace")
    asked = [call.method, call.path, body, call.headers.get("if-match"), call.headers.get("if-none-match")]
    if call.query:  # a dry run is another request than the order itself
        asked.append(sorted(call.query.items()))
    return json.dumps(asked)
