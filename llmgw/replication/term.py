"""One term of a leader on a replicated store: its working file, what became of each write, and what is known to be durable.

A write is committed to the working file at once and waits until it is durable; then the copy that everybody reads has it, and not
before. One task makes them durable, so that writes that come together cost one upload. A write whose upload fails stays in the
working file: a later one carries it along, or it ends with this term's prefix.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import apsw
import attrs
import trio

from llmgw.domain.errors import LlmgwError, OutcomeUnknown, StaleEpoch, Unavailable
from llmgw.domain.files import STORAGE_UNAVAILABLE
from llmgw.domain.ports import Machine
from llmgw.protocol.waiting import wait_woken
from llmgw.replication.feed import Feed
from llmgw.store.changes import Diverged
from llmgw.store.connection import RETRY_AFTER_S, FileStore
from llmgw.store.copies import Copy, Position, copy_whole

T = TypeVar("T")

SETTINGS: Final = b"cluster_settings"  # a changeset names the tables that it is of
KEEP_UP_S: Final = 5.0  # what is pending is tried again as often (R-B44: Litestream by itself waits up to 5 min after an outage)


@attrs.define(eq=False)
class _Waiter:
    """Somebody waits until what was written before is durable."""

    done: trio.Event = attrs.Factory(trio.Event)
    failed: LlmgwError | None = None


class TermStore:
    """`work` is open and recorded by nobody else; `acknowledge()` returns once all that was committed before the call is durable.

    `told(trouble)` hears of each write that became durable ("") or did not, `new_version()` of each new version of the settings.
    """

    def __init__(
        self,
        machine: Machine,
        epoch: int,
        work: FileStore,
        copy: Copy,
        feed: Feed,
        acknowledge: Callable[[], Awaitable[None]],
        told: Callable[[str], None],
        new_version: Callable[[], None],
    ) -> None:
        self._machine = machine
        self._epoch = epoch
        self.work = work
        self._copy = copy
        self._feed = feed
        self._acknowledge = acknowledge
        self._told = told
        self._new_version = new_version
        self._pending: deque[bytes] = deque()  # committed, not yet known to be durable, in their order
        self._waiters: list[_Waiter] = []
        self._wanted = trio.Event()
        self.trouble = ""  # why nothing becomes durable
        self._ended = False  # whoever comes now waits for nothing
        work.record(self._pending.append)

    @property
    def pending(self) -> int:
        """Writes that are committed here and not known to be durable."""
        return len(self._pending)

    async def write(self, unit: Callable[[apsw.Connection], T], *, touches: bool) -> T:
        """Returns when it is durable. Raises what the unit raises, Unavailable: `outcome_unknown`, or nothing was stored."""
        if self.trouble and not touches:
            raise Unavailable(
                f"nothing was stored, the replica takes no writes: {self.trouble}", code=STORAGE_UNAVAILABLE, retry_after_s=RETRY_AFTER_S
            )
        result = await self.work._write(unit, touches=touches)
        if touches or self._pending:  # what a unit has read may be pending though it wrote nothing
            await self.settle()
        return result

    async def settle(self) -> None:
        """Returns when everything that was committed before is durable and in the copy. Raises Unavailable."""
        if self._ended:
            raise _over()
        waiter = _Waiter()
        self._waiters.append(waiter)
        self._wanted.set()
        await waiter.done.wait()
        if waiter.failed is not None:
            raise waiter.failed

    async def run(self) -> None:
        """Makes what is written durable, until cancelled; then nobody waits any more."""
        try:
            while True:
                if not self._waiters:
                    until_s = self._machine.now_s() + KEEP_UP_S if self._pending or self.trouble else float("inf")
                    await self._wait(until_s)
                self._wanted = trio.Event()
                await self._settle_all()
        finally:
            self._let_go()

    async def begin(self) -> None:
        """The copy becomes what the working file is, all of which is durable. Before anybody writes."""
        async with self._copy.turn:
            await self._copy.replace(copy_whole(self.work.path), Position(self._epoch))
            self._feed.begin(self._copy.position)

    async def _wait(self, until_s: float) -> None:
        if until_s == float("inf"):
            await self._wanted.wait()
        else:
            await wait_woken(self._machine, self._wanted, until_s)

    async def _settle_all(self) -> None:
        waiters, self._waiters = self._waiters, []
        committed = len(self._pending)
        failed: LlmgwError | None = _over()  # also for a cancel, which ends the term: what was waited for did not come
        try:
            await self._acknowledge()
        except StaleEpoch as err:
            # No conflict, which would say that nothing was stored: what was uploaded before the one who leads now has listed is theirs.
            self.trouble = err.message
            self._told(err.message)
        except Unavailable as err:
            failed = err
            self.trouble = _why(err)
            self._told(self.trouble)
        else:
            await self._make_current(committed)
            failed = None
            self.trouble = ""
            self._told("")
        finally:
            for waiter in waiters:
                waiter.failed = failed
                waiter.done.set()

    async def _make_current(self, committed: int) -> None:
        async with self._copy.turn:
            changes = [self._pending[index] for index in range(committed)]
            position = Position(self._epoch, self._feed.position.number + len(changes))
            try:
                await self._copy.apply(changes, position)
            except Diverged:  # a fault of ours; the working file has the truth, and all of it up to here is durable or waits
                await self._settle_whole(position)
            for _ in changes:
                self._pending.popleft()
            self._feed.add(changes)
            if any(SETTINGS in one for one in changes):
                self._new_version()

    async def _settle_whole(self, position: Position) -> None:
        await self._acknowledge()
        await self._copy.replace(copy_whole(self.work.path), position)

    def _let_go(self) -> None:
        self._ended = True
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.failed = _over()
            waiter.done.set()

    def close(self) -> None:
        with contextlib.suppress(LlmgwError):
            self.work.close()


def _over() -> Unavailable:
    return Unavailable("this control plane does not lead any more; retry with the same key", code="outcome_unknown")


def _why(err: LlmgwError) -> str:
    """For an operator: that an outcome is unknown is what its client is told; what keeps it so is the cause."""
    cause = err.__cause__
    return cause.message if isinstance(err, OutcomeUnknown) and isinstance(cause, LlmgwError) else err.message
