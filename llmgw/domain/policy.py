"""What a router must obey, as one immutable value: route settings, keys, limits and the guard.

In one process it is handed over by a call, in separate ones it is pushed; a request takes its reference once.
"""

from __future__ import annotations

import re
import warnings
from typing import Final

import attrs

from llmgw.domain.errors import Fault
from llmgw.domain.fold import fold
from llmgw.domain.setting import Applies, Scope, needed_name_fault, setting, tables

_C, _L = Scope.CLUSTER, Applies.LIVE
_COUNT_MAX: Final = 1_000_000_000  # chosen: nobody counts so far, and a typo of three zeros is caught


def _affinity_fault(value: str) -> str | None:
    if value in ("none", "prefix") or (value.startswith("header:") and len(value) > len("header:")):
        return None
    return 'must be "none", "prefix" or "header:NAME"'


@attrs.frozen
class RouteSettings:
    """`[route]`: how requests are relayed. Every field is live."""

    first_byte_timeout_s: float = setting(
        300.0, help="Until the engine's first byte.", scope=_C, applies=_L, unit="s", low=0.05, high=86400
    )
    idle_timeout_s: float = setting(
        120.0, help="Longest silence between bytes of an answer.", scope=_C, applies=_L, unit="s", low=0.05, high=86400
    )
    total_timeout_s: float = setting(
        3600.0, help="Longest time for one request in all.", scope=_C, applies=_L, unit="s", low=0.1, high=604800
    )
    connect_timeout_s: float = setting(
        2.0, help="Until a connection to an engine stands.", scope=_C, applies=_L, unit="s", low=0.05, high=300
    )
    retries: int = setting(1, help="Other endpoints tried before the first content was relayed.", scope=_C, applies=_L, low=0, high=10)
    retry_budget: float = setting(
        0.2, help="Retries as a share of requests over 10 s; 10 a second are always allowed.", scope=_C, applies=_L, low=0, high=1
    )
    breaker_failures: int = setting(3, help="Failures in a row that take an endpoint out.", scope=_C, applies=_L, low=1, high=1000)
    breaker_cooldown_s: float = setting(
        10.0, help="How long an endpoint stays out before one trial.", scope=_C, applies=_L, unit="s", low=0.05, high=3600
    )
    queue_max: int = setting(100, help="Waiting requests per model; more are refused.", scope=_C, applies=_L, low=0, high=1_000_000)
    queue_wait_s: float = setting(30.0, help="Longest wait for a free endpoint.", scope=_C, applies=_L, unit="s", low=0, high=3600)
    max_body_bytes: int = setting(
        52_428_800, help="Largest request body.", scope=_C, applies=_L, unit="bytes", low=1024, high=4_294_967_296
    )
    max_header_bytes: int = setting(
        16_384, help="Largest request head in all.", scope=_C, applies=_L, unit="bytes", low=1024, high=1_048_576
    )
    keep_alive_s: float = setting(
        75.0, help="How long an idle client connection is kept.", scope=_C, applies=_L, unit="s", low=0.1, high=3600
    )
    drain_s: float = setting(
        30.0, help="How long a stopping router lets answers finish.", scope=_C, applies=_L, unit="s", low=0, high=86400
    )
    health_interval_s: float = setting(
        5.0, help="Between looks at an endpoint's health.", scope=_C, applies=_L, unit="s", low=0.1, high=3600
    )
    sse_comment_interval_s: float = setting(
        0.0, help="Comment lines while a stream waits for its first token; 0: none.", scope=_C, applies=_L, unit="s", low=0, high=3600
    )
    max_inflight_per_endpoint: int = setting(
        0, help="Requests in flight per endpoint; 0: no limit.", scope=_C, applies=_L, low=0, high=1_000_000
    )
    policy: str = setting(
        "least_load", help="How an endpoint is chosen: least loaded of two, or at random by weight.", scope=_C, applies=_L,
        choices=("least_load", "weighted_random"),
    )  # fmt: skip
    affinity: str = setting(
        "none", help='Keeps like requests on one endpoint: "none", "prefix" or "header:NAME".', scope=_C, applies=_L, check=_affinity_fault
    )


def _regex_fault(value: str) -> str | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what Python may read differently one day is no fault, and would be shown with a line of code
            re.compile(value)
    except (re.error, RecursionError, OverflowError) as err:
        return f"not a regular expression: {err}"
    return None


@attrs.frozen
class GuardRule:
    """`[[guard.rule]]`: what to look for in prompts or completions, and what then. Needs match or words.

    `models` are names as clients say them: a model's own covers its aliases, an alias covers itself (as with the rights of keys).
    `keys` are keys' names; only "*" covers callers without a key.
    """

    name: str = setting(
        help="What the rule is called in answers, logs and metrics.",
        scope=_C,
        applies=_L,
        check=needed_name_fault,
        example="card-numbers",
    )
    on: str = setting("prompt", help="Where it looks.", scope=_C, applies=_L, choices=("prompt", "completion"))
    match: str = setting("", help="A regular expression.", scope=_C, applies=_L, check=_regex_fault, example="\\b[0-9]{16}\\b")
    words: tuple[str, ...] = setting((), help="Words or phrases, whatever their case.", scope=_C, applies=_L, example=("secret",))
    action: str = setting("block", help="What happens to a hit.", scope=_C, applies=_L, choices=("block", "redact", "flag"))
    models: tuple[str, ...] = setting(("*",), help='For these models; "*": all.', scope=_C, applies=_L)
    keys: tuple[str, ...] = setting(("*",), help='For clients with these keys; "*": all.', scope=_C, applies=_L)

    def faults(self, path: str) -> list[Fault]:
        found = []
        if not self.match and not self.words:
            found.append(Fault(path, "needs match or words", (f"{path}.match", f"{path}.words")))
        for name, listed in (("models", self.models), ("keys", self.keys)):
            if not listed:
                found.append(
                    Fault(f"{path}.{name}", 'names nobody, so that the rule would find nothing; without it, or with "*", it holds for all')
                )
        if any(not fold(word) for word in self.words):
            found.append(Fault(f"{path}.words", "an empty word is found everywhere"))
        if self.match and re.compile(self.match).search(""):
            found.append(Fault(f"{path}.match", "matches the empty text, and so everything"))
        return found


@attrs.frozen
class GuardPolicy:
    """`[guard]`: what a request may hold. 0: no limit.

    A policy that was pushed may hold words for `on` and `action` that only a later build knows.
    """

    max_messages: int = setting(2048, help="Messages of one request; 0: no limit.", scope=_C, applies=_L, low=0, high=_COUNT_MAX)
    max_output_tokens: int = setting(0, help="Tokens a request may ask for; 0: no limit.", scope=_C, applies=_L, low=0, high=_COUNT_MAX)
    max_images: int = setting(0, help="Images of one request; 0: no limit.", scope=_C, applies=_L, low=0, high=_COUNT_MAX)
    rule: tuple[GuardRule, ...] = tables("Rules on what prompts and completions hold.")

    def faults(self, path: str) -> list[Fault]:
        found = []
        seen: dict[str, str] = {}
        for index, rule in enumerate(self.rule):
            at = f"{path}.rule[{index}].name"
            if (first := seen.setdefault(rule.name, at)) != at:
                found.append(Fault(at, f"the rule {rule.name!r} is there twice", (at, first)))
        return found


@attrs.frozen
class ApiKey:
    """A client's key: only its hash is kept. `models` names what it may use ("*": all); limits of 0 are "none set".

    `expires_wall_s` is wall time; None: never. `operator`: its answers tell which endpoint gave them and how long that took, and
    it may ask one endpoint by its id.
    """

    name: str
    sha256: str
    models: tuple[str, ...] = ("*",)
    max_parallel: int = 0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    expires_wall_s: float | None = None
    operator: bool = False

    @property
    def told(self) -> bool:
        """Do the heads of its answers tell anything of it: limits per minute, or what an operator sees?"""
        return bool(self.requests_per_minute or self.tokens_per_minute or self.operator)

    def may_use(self, model: str) -> bool:
        return "*" in self.models or model in self.models


@attrs.frozen
class Policy:
    """Everything a router obeys beside the endpoints. `auth_required` False: anybody may call /v1."""

    route: RouteSettings = RouteSettings()
    auth_required: bool = True
    keys: tuple[ApiKey, ...] = ()
    cors_origins: tuple[str, ...] = ()
    guard: GuardPolicy = GuardPolicy()
