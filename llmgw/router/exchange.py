"""One request on its way: what is known of it, what it may still try, and what became of it. Values and accounts, no sockets.

`Known` is what a head says of every request that has it, worked out once per head and policy. `Exchange` is what the log line
and the metrics are made of. `Call` is a request that goes to an engine; `Failure` is an attempt that gave the client nothing.
"""

from __future__ import annotations

from typing import Final

import attrs

from llmgw.domain.ids import EndpointId
from llmgw.domain.policy import ApiKey, Policy
from llmgw.router.answer_headers import ENDPOINT
from llmgw.router.body import Asked
from llmgw.router.breaker import Outcome
from llmgw.router.choose import Choice
from llmgw.router.families import Family, Problem, Route, family_of
from llmgw.router.http1 import Head
from llmgw.router.limits import Place
from llmgw.router.rates import Charge
from llmgw.router.table import Target
from llmgw.router.usage import ASKABLE, Meter, usage_edit

# What of a client's head an engine may see; everything else stays here (cases.md, B170).
_FORWARDED: Final = frozenset(
    {b"accept", b"user-agent", b"traceparent", b"tracestate", b"openai-beta", b"anthropic-version", b"anthropic-beta"}
)


class Known:
    """What a relayed request's head says, under one policy. `forwarded`: the header lines that the engine is given.

    `permitted` is what it was last found to have a right to: most clients ask for one model again and again.
    `caller` is the key where its answers tell of it; `asked_endpoints` the only ones that may be asked: none for any, and more than
    one is a contradiction.
    """

    __slots__ = ("asked_endpoints", "caller", "coding", "forwarded", "key", "multipart", "permitted", "policy", "route")

    def __init__(self, head: Head, policy: Policy, route: Route, key: ApiKey) -> None:
        self.policy = policy
        self.route = route
        self.key = key
        self.permitted: Target | None = None
        self.caller = key if key.told else None
        self.asked_endpoints = frozenset(value.decode("latin-1") for value in head.all(ENDPOINT))
        self.multipart = (head.get(b"content-type") or b"").lower().startswith(b"multipart/")
        self.coding = b",".join(head.all(b"content-encoding")).strip().lower()
        named = {token.strip().lower() for value in head.all(b"connection") for token in value.split(b",")}
        rows = [b"%b: %b\r\n" % pair for pair in head.headers if pair[0] in _FORWARDED and pair[0] not in named]
        self.forwarded = b"".join(rows)


class Exchange:
    """One request and what became of it."""

    __slots__ = (
        "asked_s", "attempts", "caller", "charge", "close_after", "cors", "endpoint", "first_s", "flags", "head", "id", "key", "meter",
        "model", "model_label", "place", "reason", "started_s", "status", "stream",
    )  # fmt: skip

    def __init__(self, head: Head | None, request_id: bytes, started_s: float) -> None:
        self.head = head
        self.id = request_id
        self.started_s = started_s
        self.cors = b""  # header lines
        self.status = 0
        self.model = ""  # as the client named it
        self.model_label = ""  # as the table knows it, for metrics
        self.endpoint = ""
        self.key = ""
        self.stream = False
        self.first_s: float | None = None
        self.asked_s: float | None = None  # when the endpoint was asked that answers
        self.meter: Meter | None = None  # of the answer that the client gets
        self.caller: ApiKey | None = None  # whose limits and rights the answer's head tells of
        self.charge: Charge | None = None
        self.reason = ""
        self.flags: tuple[str, ...] = ()  # guard rules that found something and let it pass
        self.attempts = 0
        self.place: Place | None = None  # of its key's, that it holds
        self.close_after = head is None or head.close

    @property
    def path(self) -> str:
        return self.head.path if self.head is not None else ""

    @property
    def family(self) -> Family:
        return family_of(self.path)

    @property
    def without_body(self) -> bool:
        """Is the answer's body only announced?"""
        return self.head is not None and self.head.method == "HEAD"


@attrs.frozen
class Failure:
    """An attempt that gave the client nothing. `body` is the engine's own answer, where it gave one."""

    problem: Problem
    outcome: Outcome
    retry: bool
    body: bytes | None = None
    headers: tuple[tuple[bytes, bytes], ...] = ()
    withdrawn: bool = False  # the endpoint left the list while we connected: choosing again costs no retry
    stale: bool = False  # a pooled connection had been closed by the engine: the same endpoint is asked again, on a fresh one

    @property
    def told(self) -> bytes:
        """What the engine said."""
        return self.body if self.body is not None else self.problem.message.encode("utf-8", "replace")


class Call:
    """A request that is relayed. The body is let go with the first content: from then on nothing is sent again.

    `usage` makes the engine tell what the client did not ask for; `hidden`: the attempt that is on was sent with it; `doubted`: the
    endpoint has refused it with that. `choice` is the attempt that is on, `failure` what it has come to where it gave nothing;
    `last` is that of the one before.
    """

    __slots__ = (
        "asked", "choice", "doubted", "exchange", "failure", "head", "hidden", "known", "last", "policy", "retries_left", "tried", "usage",
        "waited_s",
    )  # fmt: skip

    def __init__(self, exchange: Exchange, head: Head, known: Known, asked: Asked) -> None:
        self.exchange = exchange
        self.head = head
        self.known = known
        self.policy = known.policy
        self.asked = asked
        self.tried: set[EndpointId] = set()
        self.waited_s = 0.0  # for a place at an endpoint
        self.retries_left = known.policy.route.retries
        self.choice: Choice | None = None
        self.failure: Failure | None = None
        self.last: Failure | None = None
        self.usage = usage_edit(asked.body, asked.options_span) if asked.stream and known.route.path in ASKABLE else None
        self.hidden = False
        self.doubted = False

    @property
    def route(self) -> Route:
        return self.known.route

    def forget_body(self) -> None:
        self.asked.body = b""
