"""What the routers together say of endpoints: the sum of their requests in flight, the generation that all have reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmgw.domain.endpoint import EndpointUse
from llmgw.domain.ids import EndpointId
from llmgw.domain.ports import UsageSource


def merged_use(sources: Sequence[UsageSource]) -> Mapping[EndpointId, EndpointUse]:
    """One view over several routers."""
    if len(sources) == 1:
        return sources[0].use()
    merged: dict[EndpointId, EndpointUse] = {}
    for source in sources:
        for endpoint, use in source.use().items():
            before = merged.get(endpoint)
            merged[endpoint] = use if before is None else before.beside(use)
    return merged


def acknowledged_by_all(sources: Sequence[UsageSource], generation: int) -> int:
    """The generation that every router acts on; with no router connected nobody has to let go of anything."""
    return min((source.acknowledged() for source in sources), default=generation)
