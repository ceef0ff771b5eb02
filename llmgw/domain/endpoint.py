"""A published address of a ready replica, and the list of them that routers act on."""

from __future__ import annotations

import enum
import functools
import hashlib
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import attrs

from llmgw.domain.ids import EndpointId
from llmgw.domain.lease import FencingToken

# Which digests these are. Raised with every change of what a digest covers, or how: control plane and router compare theirs, and a
# router whose digests are of another form is sent whole lists.
DIGEST_FORM: Final = 1
_DIGEST_BITS: Final = 256


def _digest(row: object) -> int:
    return int.from_bytes(hashlib.sha256(json.dumps(row).encode()).digest())


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
    def digest(self) -> int:
        """A hash of everything that a router acts on; made once per endpoint, because lists share unchanged ones."""
        return _digest(
            [
                self.id, self.url, sorted(self.models), sorted(self.aliases.items()), sorted(self.names.items()), sorted(self.unlisted),
                self.engine, self.pool, float(self.weight), self.priority, self.key, self.max_inflight,
            ]
        )  # fmt: skip


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

    @functools.cached_property
    def digest(self) -> int:
        """As an endpoint's, and never equal to one."""
        return _digest([self.names, self.reason.value, self.text])


@attrs.frozen
class EndpointList:
    """Who may receive traffic. What a router acts on is here; the stamp that says who sent it travels beside."""

    endpoints: tuple[Endpoint, ...] = ()
    absences: tuple[Absence, ...] = ()

    @functools.cached_property
    def fingerprint(self) -> str:
        """Equal for lists that a router would act on equally: a hash of the content, whatever the order.

        The sum of its rows' digests. One change hashes one row; to add up 5,000 takes 0.1 ms (measured). It is no defence against
        whoever makes up a list: the sender of a list is trusted with all of it.
        """
        total = sum(endpoint.digest for endpoint in self.endpoints) + sum(absence.digest for absence in self.absences)
        return f"{total % 2**_DIGEST_BITS:0{_DIGEST_BITS // 4}x}"


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

    def beside(self, other: EndpointUse) -> EndpointUse:
        """What two that use one endpoint say of it together. Silence and refusal are judged by the more hopeful: one that gets bytes
        is enough. Attempts without a byte by the less hopeful: one that was last used yesterday says 0. They only lead to a probe.
        """
        return EndpointUse(
            in_flight=self.in_flight + other.in_flight,
            last_used_s=min(self.last_used_s, other.last_used_s),
            silent_s=min((one.silent_s for one in (self, other) if one.in_flight), default=0.0),
            answers=self.answers + other.answers,
            failures=self.failures + other.failures,
            refused=self.refused and other.refused,
            unanswered=max(self.unanswered, other.unanswered),
            heard_s=min((one.heard_s for one in (self, other) if one.heard_s is not None), default=None),
        )
