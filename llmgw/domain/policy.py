"""What a router must obey, as one immutable value: route settings, keys, limits and the guard's limits.

In one process it is handed over by `Gate.replace`, in separate ones it is pushed; a request takes its reference once.
"""

from __future__ import annotations

import attrs

from llmgw.domain.setting import Applies, Scope, setting

_C, _L = Scope.CLUSTER, Applies.LIVE


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
        5.0, help="Between looks at an endpoint's metrics or health.", scope=_C, applies=_L, unit="s", low=0.1, high=3600
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


@attrs.frozen
class ApiKey:
    """A client's key: only its hash is kept. `models` names what it may use ("*": all); limits of 0 are "none set".

    `expires_wall_s` is wall time; None: never.
    """

    name: str
    sha256: str
    models: tuple[str, ...] = ("*",)
    max_parallel: int = 0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    expires_wall_s: float | None = None

    def may_use(self, model: str) -> bool:
        return "*" in self.models or model in self.models


@attrs.frozen
class Policy:
    """Everything a router obeys beside the endpoints. `auth_required` False: anybody may call /v1."""

    route: RouteSettings = RouteSettings()
    auth_required: bool = True
    keys: tuple[ApiKey, ...] = ()
    cors_origins: tuple[str, ...] = ()
