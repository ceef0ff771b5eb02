"""Which list counts: a leader's whole one, one of a leader that does not know all of its nodes yet, what a standby sees. Pure.

A standby's list is an observation of the same replicas. Only what can be seen counts: an endpoint is gone, has moved, is
ready. What somebody decided — weights, priorities, drains, which models there are, policy — stays as the leader left it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import attrs

from llmgw.domain.endpoint import Absence, AbsenceReason, Endpoint, EndpointList
from llmgw.domain.ids import EndpointId
from llmgw.domain.model import Catalog, ModelSpec

UNREACHABLE_TEXT: Final = "its replicas are gone, and no control plane leads now"


def unsettled_list(before: EndpointList, pushed: EndpointList, gone: Iterable[EndpointId], catalog: Catalog) -> EndpointList:
    """The list of a leader that has just begun and has not heard from all of its nodes yet.

    What it does not know it cannot list: endpoints of before stay until it knows better (`gone`: it knows the replica and
    does not list it), as long as their models are still in the catalog.
    """
    decided = {endpoint.id for endpoint in pushed.endpoints} | set(gone)
    kept = [
        endpoint
        for endpoint in before.endpoints
        if endpoint.id not in decided and all(catalog.get(model) is not None for model in endpoint.models)
    ]
    if not kept:
        return pushed
    served = {model for endpoint in kept for model in endpoint.models}
    endpoints = sorted((*pushed.endpoints, *kept), key=lambda endpoint: endpoint.id)
    return EndpointList(tuple(endpoints), tuple(absence for absence in pushed.absences if absence.names[0] not in served))


def may_take(leader_silent_s: float, ttl_s: float) -> bool:
    """May a standby's list be taken? Only after its leader has been silent for a whole ttl, on this router's clock."""
    return leader_silent_s >= ttl_s


@attrs.frozen
class Observation:
    """What one standby sees. `listed` are all endpoints that it has listed in this session.

    What it never listed it never saw: a standby that has just started, and that no agent has found yet, proves nothing gone.
    """

    endpoints: EndpointList
    listed: frozenset[EndpointId]


def observed_list(led: EndpointList, withdrawn: frozenset[EndpointId], catalog: Catalog, seen: Observation) -> EndpointList:
    """The leader's last list `led`, corrected by what a standby sees.

    `withdrawn` are endpoints that a leader took off its lists; it may be draining them, so they do not come back by hearsay.
    Same input, same output; applied again to `led` with the same observation it gives the same list.
    """
    by_id = {endpoint.id: endpoint for endpoint in seen.endpoints.endpoints}
    kept: list[Endpoint] = []
    for endpoint in led.endpoints:
        now = by_id.get(endpoint.id)
        if now is not None:
            kept.append(_moved(endpoint, now))
        elif endpoint.id not in seen.listed:
            kept.append(endpoint)
    known = {endpoint.id for endpoint in led.endpoints} | withdrawn
    for endpoint in seen.endpoints.endpoints:
        if endpoint.id not in known and (ready := _ready(endpoint, led.endpoints, catalog)) is not None:
            kept.append(ready)
    kept.sort(key=lambda endpoint: endpoint.id)
    return EndpointList(tuple(kept), _absences(led, kept, catalog))


def _moved(before: Endpoint, now: Endpoint) -> Endpoint:
    if (before.url, before.key) == (now.url, now.key):
        return before
    return attrs.evolve(before, url=now.url, key=now.key)


def _ready(endpoint: Endpoint, led: Iterable[Endpoint], catalog: Catalog) -> Endpoint | None:
    """An endpoint that no leader has listed yet, as a leader would list it; None where its models are none of the leader's."""
    sibling = next((other for other in led if set(endpoint.models) <= set(other.models) and other.engine == endpoint.engine), None)
    if sibling is not None:
        return attrs.evolve(sibling, id=endpoint.id, url=endpoint.url, key=endpoint.key, models=endpoint.models)
    if len(endpoint.models) != 1 or (spec := catalog.get(endpoint.models[0])) is None:
        return None
    profile = next((profile for profile in spec.profiles if profile.engine == endpoint.engine), None)
    if profile is None:
        return None
    return Endpoint(
        id=endpoint.id,
        url=endpoint.url,
        models=(spec.name,),
        aliases=dict.fromkeys(spec.aliases, spec.name),
        engine=profile.engine,
        pool=spec.pool,
        weight=profile.weight,
        priority=profile.priority,
        key=endpoint.key,
    )


def _absences(led: EndpointList, now: list[Endpoint], catalog: Catalog) -> tuple[Absence, ...]:
    """Models that are known and have no endpoint now: as the leader said, or gone since."""
    served = {model for endpoint in now for model in endpoint.models}
    told = [absence for absence in led.absences if absence.names[0] not in served]
    named = {absence.names[0] for absence in told}
    lost: dict[str, tuple[str, ...]] = {}
    for endpoint in led.endpoints:
        for model in endpoint.models:
            if model not in served and model not in named:
                lost.setdefault(model, _names(model, endpoint, catalog.get(model)))
    return (*told, *(Absence(names, AbsenceReason.UNREACHABLE, UNREACHABLE_TEXT) for names in lost.values()))


def _names(model: str, endpoint: Endpoint, spec: ModelSpec | None) -> tuple[str, ...]:
    if spec is not None:
        return spec.names
    return (model, *sorted(alias for alias, of in endpoint.aliases.items() if of == model))
