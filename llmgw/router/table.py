"""The routing table: which endpoints may serve a name. Immutable, worked out once per list and shared by all requests.

A name is a model's own or an alias. A real model's name wins over an alias of the same text. What is known but has no
endpoint carries the reason (the 503's), and only what nobody knows is 404.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import attrs

from llmgw.domain.endpoint import Absence, AbsenceReason, Endpoint, EndpointList
from llmgw.domain.errors import Invalid
from llmgw.domain.model import Catalog
from llmgw.domain.policy import ApiKey

SHOWN_MAX: Final = 10  # endpoints named in an error
PART_LENGTH_MIN: Final = 3  # characters of a name that may stand for a longer one


@attrs.frozen
class Candidate:
    """An endpoint that may serve a name, and what its engine calls the model."""

    endpoint: Endpoint
    engine_name: str


@attrs.frozen
class Target:
    """What a client's name leads to. `tiers`: candidates by priority, the preferred first; empty with an `absence`.

    `rename`: the answer's `model` must be the client's name, because the engine was asked by another one.
    """

    name: str
    model: str
    tiers: tuple[tuple[Candidate, ...], ...] = ()
    absence: Absence | None = None

    @property
    def count(self) -> int:
        return sum(len(tier) for tier in self.tiers)

    def pinned(self, endpoint: str) -> Target:
        """With that endpoint as its only candidate. Raises Invalid where it serves no such name."""
        found = tuple(c for tier in self.tiers for c in tier if c.endpoint.id == endpoint)
        if not found:
            ids = ", ".join(sorted(c.endpoint.id for tier in self.tiers for c in tier)[:SHOWN_MAX])
            text = f"no endpoint {endpoint[:100]!r} serves the model {self.name[:100]!r}; among those that do: {ids}"
            raise Invalid(text, param="x-llmgw-endpoint", code="unknown_endpoint")
        return attrs.evolve(self, tiers=(found,))

    def allowed(self, key: ApiKey) -> bool:
        """A right to the model covers its aliases; one to the alias alone covers the alias."""
        return key.may_use(self.model) or key.may_use(self.name)


class RoutingTable:
    """Every name that is known. `listed` are those that /v1/models shows, sorted. Nobody changes one.

    A plain class, because each request asks it: compiled, its calls are direct, and those of an attrs class are not.
    """

    __slots__ = ("_targets", "listed", "targets")

    def __init__(self, targets: dict[str, Target], listed: tuple[str, ...]) -> None:
        self._targets = targets
        self.targets: Mapping[str, Target] = MappingProxyType(targets)
        self.listed = listed

    def find(self, name: str) -> Target | None:
        """The target of a client's name; an Ollama-style `name:latest` and `name` lead to each other."""
        found = self._targets.get(name)
        if found is None:
            other = name.removesuffix(":latest") if name.endswith(":latest") else f"{name}:latest"
            found = self._targets.get(other)
            if found is not None and not any(c.endpoint.engine == "ollama" for tier in found.tiers for c in tier):
                return None
        return found

    def near(self, name: str, key: ApiKey) -> str | None:
        """A known name, listed and allowed to the key, that looks like this one."""
        names = [listed for listed in self.listed if self.targets[listed].allowed(key)]
        for listed in names:
            if listed.lower() == name.lower():
                return listed
        for listed in names:  # a part of a long name has little in common with all of it
            if len(name) >= PART_LENGTH_MIN and (listed.startswith(name) or listed.rpartition("/")[2] == name.rpartition("/")[2]):
                return listed
        close = difflib.get_close_matches(name[:100], names, n=1, cutoff=0.8)
        return close[0] if close else None


def build_table(endpoints: EndpointList, catalog: Catalog | None = None) -> RoutingTable:
    """The table of a list. `catalog` adds names that have no endpoint yet: they are known, and not ready."""
    by_model: dict[str, list[Endpoint]] = {}
    aliases: dict[str, str] = {}
    unlisted: set[str] = set()
    ordered = sorted(endpoints.endpoints, key=lambda endpoint: (endpoint.priority, endpoint.id))
    for endpoint in ordered:
        for model in endpoint.models:
            by_model.setdefault(model, []).append(endpoint)
        for alias, model in endpoint.aliases.items():
            aliases.setdefault(alias, model)  # two endpoints at odds: the preferred one is right
        unlisted.update(endpoint.unlisted)
    targets: dict[str, Target] = {}
    for model, serving in by_model.items():
        targets[model] = Target(model, model, _tiers(model, model, serving))
    for alias, model in aliases.items():
        if alias not in targets and model in by_model:
            targets[alias] = Target(alias, model, _tiers(alias, model, by_model[model]))
    for absence in endpoints.absences:
        for name in absence.names:
            targets.setdefault(name, Target(name, absence.names[0], absence=absence))
    for spec in catalog.models if catalog is not None else ():
        absent = Absence(spec.names, AbsenceReason.LOADING, "no replica of it is ready yet")
        for name in spec.names:
            targets.setdefault(name, Target(name, spec.name, absence=absent))
    listed = tuple(sorted(name for name in targets if name not in unlisted))
    return RoutingTable(targets, listed)


def _tiers(name: str, model: str, serving: list[Endpoint]) -> tuple[tuple[Candidate, ...], ...]:
    tiers: dict[int, list[Candidate]] = {}
    for endpoint in serving:
        engine_name = endpoint.names.get(name) or endpoint.names.get(model) or model
        tiers.setdefault(endpoint.priority, []).append(Candidate(endpoint, engine_name))
    return tuple(tuple(tiers[priority]) for priority in sorted(tiers))


EMPTY = build_table(EndpointList())
