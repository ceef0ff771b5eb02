"""A simulated router: takes lists as the real one does, and says what a test tells it to of its requests in flight."""

from __future__ import annotations

from collections.abc import Mapping

from llmgw.domain.endpoint import EndpointList, EndpointUse, ListStamp
from llmgw.domain.errors import Conflict, StaleEpoch
from llmgw.domain.ids import EndpointId
from llmgw.domain.lease import Fence, FencingToken, fence
from llmgw.domain.model import Catalog
from llmgw.domain.policy import Policy


class SimRouter:
    """`history` holds every (stamp, list) taken, in order. `acknowledges` False: withdrawals are taken but not confirmed.

    `settles` False: one of its workers does not act yet on what it was given last.
    """

    def __init__(self) -> None:
        self.endpoints = EndpointList()
        self.catalog = Catalog()
        self.policy: Policy | None = None
        self.highest: FencingToken | None = None
        self.history: list[tuple[ListStamp, EndpointList]] = []
        self.acknowledges = True
        self.settles = True
        self.uses: dict[EndpointId, EndpointUse] = {}
        self._generation = 0

    def set_endpoints(self, endpoints: EndpointList, stamp: ListStamp) -> None:
        verdict = fence(self.highest, stamp.token)
        if verdict is Fence.FOREIGN:
            raise Conflict("the list is another cluster's")
        if verdict is Fence.STALE:
            assert self.highest is not None
            raise StaleEpoch("a higher epoch was met", epoch=self.highest.epoch, owner=self.highest.owner)
        self.highest = stamp.token
        self.endpoints = endpoints
        self._generation = stamp.generation
        self.history.append((stamp, endpoints))

    def set_catalog(self, catalog: Catalog) -> None:
        self.catalog = catalog

    def set_policy(self, policy: Policy) -> None:
        self.policy = policy

    def use(self) -> Mapping[EndpointId, EndpointUse]:
        return self.uses

    def acknowledged(self) -> int:
        return self._generation if self.acknowledges else 0

    def settled(self) -> bool:
        return self.settles

    def ids(self) -> tuple[str, ...]:
        """The endpoints it would choose from now."""
        return tuple(endpoint.id for endpoint in self.endpoints.endpoints)
