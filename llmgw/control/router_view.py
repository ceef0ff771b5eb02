"""What the routers together say of endpoints: the sum of their requests in flight, the generation that all have reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmgw.domain.endpoint import EndpointUse
from llmgw.domain.ids import EndpointId
from llmgw.domain.ports import UsageSource


def merged_use(sources: Sequence[UsageSource]) -> Mapping[EndpointId, EndpointUse]:
    """One view over several routers. Silence and refusal are judged by the most hopeful: one that gets bytes is enough.

    Attempts without a byte by the least hopeful: one that was last used yesterday says 0. They only lead to a probe.
    """
    if len(sources) == 1:
        return sources[0].use()
    merged: dict[EndpointId, EndpointUse] = {}
    for source in sources:
        for endpoint, use in source.use().items():
            before = merged.get(endpoint)
            if before is None:
                merged[endpoint] = use
                continue
            busy = [one.silent_s for one in (before, use) if one.in_flight]
            merged[endpoint] = EndpointUse(
                in_flight=before.in_flight + use.in_flight,
                last_used_s=min(before.last_used_s, use.last_used_s),
                silent_s=min(busy, default=0.0),
                answers=before.answers + use.answers,
                failures=before.failures + use.failures,
                refused=before.refused and use.refused,
                unanswered=max(before.unanswered, use.unanswered),
                heard_s=min((one.heard_s for one in (before, use) if one.heard_s is not None), default=None),
            )
    return merged


def acknowledged_by_all(sources: Sequence[UsageSource], generation: int) -> int:
    """The generation that every router acts on; with no router connected nobody has to let go of anything."""
    return min((source.acknowledged() for source in sources), default=generation)
