"""What is measured: which load, against which services, behind which engine. Values only; `rounds` carries them out."""

from __future__ import annotations

from typing import Final

import attrs

EVERYBODY: Final = ("direct", "llmgw", "llmgw interpreted", "nginx", "haproxy", "smg", "vllm-router")
SLOW: Final = "litellm"  # measured only when it is asked for: it takes 750 MB to install, and long to start


@attrs.frozen
class Scenario:
    """One kind of load. Its window is `seconds` long, `quick_s` in a quick run, and opens `warmup_s` after the start."""

    name: str
    title: str
    options: tuple[str | int, ...]
    warmup_s: float = 1.0
    seconds: float = 5.0
    quick_s: float = 1.5

    def load(self, quick: bool) -> tuple[str | int | float, ...]:
        """The options of the load."""
        return (*self.options, "--warmup", self.warmup_s, "--seconds", self.quick_s if quick else self.seconds)


@attrs.frozen
class Variant:
    """A service as a group starts it: under `name`, of the kind `service`, with so many of the group's engines.

    `only` names the scenarios that it takes part in; none: all.
    """

    name: str
    service: str
    engines: int = 1
    only: tuple[str, ...] = ()


@attrs.frozen
class Group:
    """Scenarios that share one engine and the services before it, all of which run at once and are loaded in turn."""

    name: str
    scenarios: tuple[Scenario, ...]
    variants: tuple[Variant, ...]
    content_type: str = "text/event-stream"
    body_max: int = 16_384  # bytes; some services size their buffers by it


ONE: Final = Scenario("one", "One connection, 0.5 KB", ("--connections", 1))
REQUESTS_16: Final = Scenario("requests-16", "16 connections, 0.5 KB", ("--connections", 16))
REQUESTS_64: Final = Scenario("requests-64", "64 connections, 0.5 KB", ("--connections", 64))
# The starts are spread over the first second, and what follows a start (buffers that grow, pools that fill) over the next.
STREAMS_200: Final = Scenario("streams-200", "200 streams of 50 chunks/s", ("--streams", 200), 2.5, 8.0, 2.0)
STREAMS_1000: Final = Scenario("streams-1000", "1,000 streams of 50 chunks/s", ("--streams", 1000), 2.5, 8.0, 2.0)
BODY_100K: Final = Scenario("body-100k", "16 connections, 100 KB", ("--connections", 16, "--body", 100_000))
BODY_1M: Final = Scenario("body-1m", "4 connections, 1 MB", ("--connections", 4, "--body", 1_000_000))
# What is no stream of events is held back until it is whole or 64 KB of it have come, which takes 7 s at this rate; so none of
# these ends, and none begins anew, before the window is over.
BYTES: Final = Scenario(
    "bytes",
    "200 streams of 50 chunks/s that are no events",
    ("--streams", 200, "--chunks", 1500, "--even", 0, "--path", "/v1/audio/speech"),
    9.0,
    8.0,
    2.0,
)
ENDPOINTS: Final = Scenario("endpoints", "16 connections, 0.5 KB, over 10 and over 1,000 endpoints", ("--connections", 16))

GROUPS: Final = (
    Group(
        "chat",
        (ONE, REQUESTS_16, REQUESTS_64, STREAMS_200, STREAMS_1000),
        (*(Variant(name, name) for name in EVERYBODY), Variant(SLOW, SLOW, only=(REQUESTS_16.name, STREAMS_200.name))),
    ),
    Group("bodies", (BODY_100K, BODY_1M), tuple(Variant(name, name) for name in EVERYBODY[1:]), body_max=1_100_000),
    Group("bytes", (BYTES,), (Variant("llmgw", "llmgw"), Variant("nginx", "nginx")), content_type="audio/mpeg"),
    Group("endpoints", (ENDPOINTS,), (Variant("10 endpoints", "llmgw", 10), Variant("1,000 endpoints", "llmgw", 1000))),
)
NAMES: Final = (*(scenario.name for group in GROUPS for scenario in group.scenarios), *EVERYBODY)


def chosen(only: tuple[str, ...] = (), *, slow: bool = False) -> tuple[Group, ...]:
    """The groups with what `only` names; no name of a kind means all of that kind.

    `slow`: the slow peer is measured too.
    """
    scenarios = {name for name in only if name not in EVERYBODY}
    services = {name for name in only if name in EVERYBODY} or set(EVERYBODY)
    with_slow = services | {SLOW} if slow else services
    groups = (
        attrs.evolve(
            group,
            scenarios=tuple(one for one in group.scenarios if not scenarios or one.name in scenarios),
            variants=tuple(one for one in group.variants if one.service in with_slow),
        )
        for group in GROUPS
    )
    return tuple(group for group in groups if group.scenarios and group.variants)
