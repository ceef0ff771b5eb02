"""The ports: what a task may know of its machine, and the few things rooms ask of each other.

Only the Machine port reads a clock. `wiring.machine` is the real one; `sim` has those of tests and simulations.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

from llmgw.domain.endpoint import EndpointList, EndpointUse, ListStamp
from llmgw.domain.ids import EndpointId
from llmgw.domain.model import Catalog
from llmgw.domain.policy import Policy

T = TypeVar("T")


class Disk(Protocol):
    """Small state files. Paths are the caller's; every write is whole or not at all."""

    def read(self, path: Path) -> bytes | None:
        """The file's bytes, or None when there is none. Raises OSError."""
        ...

    def write(self, path: Path, data: bytes) -> None:
        """Written to a temporary name (mode 0600), fsynced, renamed over `path`, the folder fsynced. Raises OSError."""
        ...


class Machine(Protocol):
    """What a task may know of the machine it runs on.

    `now_s` is CLOCK_BOOTTIME: it counts through suspend and says nothing about any other machine. `wall_s` is for people
    and logs. `rng` draws ids and jitter, so that a seed gives one history.
    """

    @property
    def disk(self) -> Disk: ...

    @property
    def rng(self) -> random.Random: ...

    def now_s(self) -> float: ...

    def wall_s(self) -> float: ...

    async def sleep_until(self, at_s: float) -> None:
        """Returns at once when `at_s` has passed."""
        ...

    async def run_sync(self, work: Callable[[], T]) -> T:
        """Runs a short blocking function off the loop. Not abandoned on cancel, so that its outcome is known."""
        ...

    def fresh_hex(self, nbytes: int) -> str:
        """`nbytes` of randomness as hex text, fit for secrets on a real machine."""
        ...


class EndpointSink(Protocol):
    """Takes who may receive traffic. A sink that cannot take a list raises; the publisher then keeps it as not taken."""

    def set_endpoints(self, endpoints: EndpointList, stamp: ListStamp) -> None: ...


class CatalogSink(Protocol):
    """Told when the catalog changes; not asked per request."""

    def set_catalog(self, catalog: Catalog) -> None: ...


class PolicySink(Protocol):
    def set_policy(self, policy: Policy) -> None: ...


class UsageSource(Protocol):
    """What goes back from a router. Snapshots, read once a tick, whose cost does not grow with traffic."""

    def use(self) -> Mapping[EndpointId, EndpointUse]:
        """Every endpoint of the current list that was used since the router started, and withdrawn ones still in use."""
        ...

    def acknowledged(self) -> int:
        """The generation that every worker of this router now acts on; 0 before the first."""
        ...


Wake = Callable[[str], None]  # wake(model): somebody waits for a model that has no replica
