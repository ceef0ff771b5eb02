"""A published address of a ready replica, and the list of them that routers act on."""

from __future__ import annotations

import enum
import functools
import hashlib
import json
from collections.abc import Mapping
from types import MappingProxyType

import attrs

from llmgw.domain.ids import EndpointId
from llmgw.domain.lease import FencingToken


def _frozen_map(value: Mapping[str, str]) -> Mapping[str, str]:
    return MappingProxyType(dict(value))


@attrs.frozen
class Endpoint:
    """Where one engine answers, for which models, and how much of their traffic it should get.

    `url` has no trailing slash. `aliases` maps a client's name to one of `models`, `names` a model to what the engine
    calls it where that differs. `unlisted` names are served but left out of /v1/models. `key` is what the router presents
    to the engine. `priority`: lower is preferred. `max_inflight` 0: no limit of its own.
    """

    id: EndpointId
    url: str
    models: tuple[str, ...]
    aliases: Mapping[str, str] = attrs.field(factory=dict, converter=_frozen_map)
    names: Mapping[str, str] = attrs.field(factory=dict, converter=_frozen_map)
    unlisted: tuple[str, ...] = ()
    engine: str = "openai"
    pool: str = "default"
    weight: float = 1.0
    priority: int = 0
    key: str = attrs.field(default="", repr=False)
    max_inflight: int = 0

    @functools.cached_property
    def digest(self) -> str:
        """A hash of everything that a router acts on; made once per endpoint, because lists share unchanged ones."""
        row = json.dumps(
            [
                self.id, self.url, sorted(self.models), sorted(self.aliases.items()), sorted(self.names.items()), sorted(self.unlisted),
                self.engine, self.pool, self.weight, self.priority, self.key, self.max_inflight,
            ]
        )  # fmt: skip
        return hashlib.sha256(row.encode()).hexdigest()


class AbsenceReason(enum.Enum):
    """Why a known model has no ready endpoint: the 503's reason."""

    LOADING = "loading"
    WAITING = "waiting"  # for its turn to start
    NO_CAPACITY = "no_capacity"
    DRAINING = "draining"
    UNREACHABLE = "unreachable"
    HELD = "held"


@attrs.frozen
class Absence:
    """A model that is known but has no ready endpoint. `names` are the model's own and its aliases."""

    names: tuple[str, ...]
    reason: AbsenceReason
    text: str = ""


@attrs.frozen
class EndpointList:
    """Who may receive traffic. What a router acts on is here; the stamp that says who sent it travels beside."""

    endpoints: tuple[Endpoint, ...] = ()
    absences: tuple[Absence, ...] = ()

    def fingerprint(self) -> str:
        """Equal for lists that a router would act on equally: a hash of the content, whatever the order."""
        rows = sorted(endpoint.digest for endpoint in self.endpoints)
        rows += sorted(json.dumps([*a.names, a.reason.value, a.text]) for a in self.absences)
        return hashlib.sha256("\n".join(rows).encode()).hexdigest()


@attrs.frozen
class ListStamp:
    """Travels beside every list, also an unchanged one. `generation` counts the publisher's lists within an epoch."""

    token: FencingToken
    generation: int
    from_standby: bool = False


@attrs.frozen
class EndpointUse:
    """What one router has seen of one endpoint, also of a withdrawn one while requests still run there.

    `last_used_s` is seconds since it was last given a request. `silent_s` is how long no byte and no end has come from
    any of its `in_flight` requests (0 with none). `failures` of the last `answers` (at most 10) were 5xx. `unanswered` attempts in
    a row brought no byte of it: no connection, a broken one, or silence that was given up. `heard_s` is seconds since a byte last
    came, None where none did.
    """

    in_flight: int = 0
    last_used_s: float = 0.0
    silent_s: float = 0.0
    answers: int = 0
    failures: int = 0
    refused: bool = False  # the last connect was refused: nothing listens there
    unanswered: int = 0
    heard_s: float | None = None
