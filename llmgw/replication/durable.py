"""When a write may be acknowledged: its upload, then a read of the lease that still shows it to be ours (R-C.8).

Nothing is applied, fed to others or shown as current before. Writes that ask at once share one upload and one read. Keeps no clock:
both of what it waits for end by themselves.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import attrs
import structlog
import trio

from llmgw.domain.errors import LlmgwError, OutcomeUnknown, StaleEpoch, Unavailable
from llmgw.replication import rules
from llmgw.replication.orders import carry_out
from llmgw.replication.rules import Rules, Step

Sync = Callable[[], Awaitable[None]]
Prove = Callable[[int], Awaitable[None]]
LEVEL: Final = "replicated"  # how far an acknowledged write reaches, as an answer says it
log = structlog.get_logger("llmgw.replication")


@attrs.define(eq=False)
class _Round:
    """Those whose writes were committed before it began."""

    done: bool = False
    failed: LlmgwError | None = None


class Durability:
    """Of one epoch. `sync()` returns when everything committed before it is uploaded, and `prove(epoch)` when a read of the lease
    that was sent after the call shows the lease to be ours; both raise Unavailable, `prove` also StaleEpoch."""

    def __init__(self, epoch: int, sync: Sync, prove: Prove, protect: Rules = rules.RULES) -> None:
        self.epoch = epoch
        self._doing: dict[Step, Callable[[], Awaitable[None]]] = {Step.UPLOAD: sync, Step.PROVE: lambda: prove(epoch)}
        self._order = protect.acknowledgement
        self._turn = trio.Lock()
        self._next: _Round | None = None  # the one that has not begun

    async def acknowledge(self) -> None:
        """Returns when everything committed before this call is durable.

        Raises OutcomeUnknown when that is not known (a later call may still find it durable), and StaleEpoch when the lease is
        somebody else's: such a write is read by nobody.
        """
        mine = self._next = self._next or _Round()
        async with self._turn:  # in the order in which they came, so nobody of a later round is before one of an earlier
            if not mine.done:  # the first of its round, or the one before was cancelled
                if self._next is mine:
                    self._next = None  # what is committed from here on may miss the upload
                await self._carry_out(mine)
        if mine.failed is None:
            return
        if isinstance(mine.failed, StaleEpoch):
            raise StaleEpoch(mine.failed.message, epoch=mine.failed.epoch, owner=mine.failed.owner) from mine.failed
        raise OutcomeUnknown from mine.failed

    async def _carry_out(self, mine: _Round) -> None:
        try:
            await carry_out(self._order, self._doing)
        except (Unavailable, StaleEpoch) as err:
            log.debug("a write is not known to be durable", epoch=self.epoch, why=err.message)
            mine.failed = err
        mine.done = True
