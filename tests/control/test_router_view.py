"""One view over several routers."""

from __future__ import annotations

from collections.abc import Mapping

from llmgw.control.router_view import merged_use
from llmgw.domain.endpoint import EndpointUse
from llmgw.domain.ids import EndpointId


class Source:
    def __init__(self, use: EndpointUse) -> None:
        self._use = use

    def use(self) -> Mapping[EndpointId, EndpointUse]:
        return {EndpointId("e"): self._use}

    def acknowledged(self) -> int:
        return 0


def test_bytes_at_one_router_are_life_and_attempts_without_any_at_another_are_still_told() -> None:
    lucky, unlucky = EndpointUse(in_flight=1, silent_s=0.2, heard_s=0.2), EndpointUse(in_flight=2, silent_s=70.0, unanswered=4)
    for sources in ((Source(lucky), Source(unlucky)), (Source(unlucky), Source(lucky))):
        (merged,) = merged_use(sources).values()
        assert (merged.in_flight, merged.silent_s, merged.heard_s, merged.unanswered) == (3, 0.2, 0.2, 4)
