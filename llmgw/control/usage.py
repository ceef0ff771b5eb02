"""Where batches of usage come to: the leader puts them into the store, a standby carries those of its own router to the leader.

Taking one never waits; whoever gave it is told once it is stored. What cannot be stored now is let go of: its router tells it again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import structlog
import trio

from llmgw.domain.errors import Invalid, LlmgwError, Unavailable
from llmgw.domain.files import STORAGE_UNAVAILABLE
from llmgw.domain.ports import Machine
from llmgw.domain.usage import UsageBatch
from llmgw.store import usage as usage_rows
from llmgw.store.connection import Store

WAITING_MAX: Final = 1000  # routers whose batch waits for the store; one more tells its batch again later
CARRY_DEADLINE_S: Final = 5.0  # as long as a router waits before it tells a batch again
Taken = Callable[[str, int], None]
log = structlog.get_logger("llmgw.usage")


class UsageLedger:
    """`epoch` and `may_write` are leadership's; `leader` is the address of another control plane that leads, "" for none, and
    `carry(address, batch)` returns once that one has stored it."""

    def __init__(
        self,
        machine: Machine,
        store: Store,
        *,
        epoch: Callable[[], int],
        may_write: Callable[[], bool],
        leader: Callable[[], str],
        carry: Callable[[str, UsageBatch], Awaitable[None]],
    ) -> None:
        self._machine = machine
        self._store = store
        self._epoch = epoch
        self._may_write = may_write
        self._leader = leader
        self._carry = carry
        self._waiting: dict[str, tuple[UsageBatch, Taken]] = {}
        self._wake = trio.Event()
        self._refused = ""

    def offer(self, batch: UsageBatch, taken: Taken) -> bool:
        """Takes a batch; `taken(boot, number)` is called once it is stored, or never. False where nobody is known to lead."""
        if fault := batch.fault():
            # No build of ours makes one. Told again for ever it would keep the good ones of its router from being counted.
            log.error("a router's usage cannot be counted; it is lost", router=batch.boot[:40], why=fault)
            taken(batch.boot, batch.number)
            return True
        if len(self._waiting) >= WAITING_MAX or not (self._may_write() or self._leader()):
            return False
        self._waiting[batch.boot] = (batch, taken)
        self._wake.set()
        return True

    async def take(self, batch: UsageBatch) -> None:
        """Returns once it is stored. Raises Invalid, Unavailable, StaleEpoch."""
        if fault := batch.fault():
            raise Invalid(f"usage that cannot be counted: {fault}", code="malformed_message")
        if not self._may_write():
            raise Unavailable("this control plane does not lead", code="not_leader")
        await usage_rows.add(self._store, self._epoch(), (batch,), self._machine.wall_s())

    async def run(self) -> None:
        """Stores, or carries, what was taken, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            given, self._waiting = list(self._waiting.values()), {}
            try:
                if self._may_write():  # all in one transaction: a hundred routers cost one commit
                    batches = tuple(batch for batch, _ in given)
                    await usage_rows.add(self._store, self._epoch(), batches, self._machine.wall_s())
                    for batch, taken in given:
                        taken(batch.boot, batch.number)
                elif address := self._leader():
                    for batch, taken in given:
                        with trio.fail_after(CARRY_DEADLINE_S):
                            await self._carry(address, batch)
                        taken(batch.boot, batch.number)
            except trio.TooSlowError:
                self._tell_refusal("the leader does not answer in time")
            except LlmgwError as err:
                if err.code != STORAGE_UNAVAILABLE:  # that is told as an outage
                    self._tell_refusal(err.message)
            else:
                self._refused = ""

    def _tell_refusal(self, why: str) -> None:
        if why != self._refused:
            log.warning("usage cannot be stored; routers keep it and tell it again", why=why)
        self._refused = why
