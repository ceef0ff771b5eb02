"""When a write may be acknowledged (placeholder of the branch)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from llmgw.domain.errors import Unavailable

Sync = Callable[[], Awaitable[None]]


class OutcomeUnknown(Unavailable):
    default_code = "outcome_unknown"


class Durability:
    def __init__(self, epoch: int, sync: Sync, prove: Callable[[int], Awaitable[None]]) -> None:
        self._epoch, self._sync, self._prove = epoch, sync, prove

    async def acknowledge(self) -> None:
        try:
            await self._sync()
            await self._prove(self._epoch)
        except Unavailable as err:
            raise OutcomeUnknown(f"stored, outcome unknown, retry with the same key: {err.message}") from err
