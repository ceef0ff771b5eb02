"""The ports on a bucket: `LeaseStore`, and what a probe needs besides.

A request that nobody waits for any more is left to its thread, which its own time-out ends: neither leaving nor the next look at the
lease waits for a store that is silent. What such a request still does is what a late write does, and conditions are for that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import trio

from llmgw.domain.ports import Machine
from llmgw.lease.object_store import LeaseBucket
from llmgw.lease.probe import RACERS, probe
from llmgw.lease.record import LeaseRecord
from llmgw.lease.timings import LeaseTimings
from llmgw.settings.object_place import ObjectPlace

T = TypeVar("T")
THREADS_MAX: Final = 2 * RACERS  # those of a probe at once, and as many that nobody waits for any more


class ObjectLeases:
    """The port `LeaseStore` on a bucket. Each call is one hop to a thread of its own few, which a cancel does not wait for."""

    def __init__(self, machine: Machine, place: ObjectPlace, timings: LeaseTimings) -> None:
        self._machine = machine
        self.bucket = LeaseBucket(place, timings.request_timeout_s)
        self._threads = trio.CapacityLimiter(THREADS_MAX)

    async def read(self, role: str) -> LeaseRecord | None:
        return await self._run(lambda: self.bucket.read(role))

    async def replace(self, role: str, expected: LeaseRecord | None, new: LeaseRecord) -> None:
        # Cancelled between two of its requests, it sends no further one: a write would leave beside the next call's.
        await self._run(lambda: self.bucket.replace(role, expected, new, trio.from_thread.check_cancelled))

    async def remove(self, role: str) -> None:
        await self._run(lambda: self.bucket.remove(role))

    async def check(self) -> None:
        """Does the store keep its promises? Once, at the start. Raises Invalid for one that does not, and Unavailable."""
        await probe(self._machine, self, str(self.bucket.place))

    @property
    def idle(self) -> bool:
        """Is no request under way, not even one that nobody waits for any more?"""
        return self._threads.borrowed_tokens == 0

    async def _run(self, work: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(work, limiter=self._threads, abandon_on_cancel=True)
