"""The cluster's one history of what it did and why: recorded by the leader, kept in the store, followed by whoever asks.

Recording never waits. One task writes batches to the store, which gives each event its `seq`; followers and pages see an
event only after it is stored. A store that cannot take them is told in the log once; events wait in a bounded buffer. Where
somebody else leads, what is recorded here goes to the log alone, and followers see what the leader has stored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final

import structlog
import trio

from llmgw.domain.errors import LlmgwError, StaleEpoch
from llmgw.domain.event import Event, Level
from llmgw.domain.files import STORAGE_UNAVAILABLE
from llmgw.domain.ports import Machine

RECENT_MAX: Final = 2000  # events kept in memory for followers that reconnect; older ones are read from the store
WAITING_MAX: Final = 10_000  # events that wait for a store that does not answer; the oldest are dropped with a count
FOLLOWER_MAX: Final = 1000  # events that a slow follower may lag behind before it is cut off
FLUSH_S_MAX: Final = 1.0  # of a leader that lets go: its last events must not hold up the next one
RETRY_S: Final = 1.0

Append = Callable[[tuple[Event, ...]], Awaitable[tuple[Event, ...]]]
log = structlog.get_logger("llmgw.events")


class EventLog:
    """`append` stores a batch and returns it with `seq` filled in. `epoch` is asked at each record, and so is `may_write`."""

    def __init__(self, machine: Machine, append: Append, epoch: Callable[[], int], may_write: Callable[[], bool] = lambda: True) -> None:
        self._machine = machine
        self._append = append
        self._epoch = epoch
        self._may_write = may_write
        self._waiting: deque[Event] = deque(maxlen=WAITING_MAX)
        self._recent: deque[Event] = deque(maxlen=RECENT_MAX)
        self._followers: set[trio.MemorySendChannel[Event]] = set()
        self._wake = trio.Event()
        self._written = trio.Event()  # replaced after each batch
        self._seen = 0  # the highest seq that followers have been shown
        self.dropped = 0

    def record(self, kind: str, of: str, text: str, level: Level = Level.INFO, age_s: float = 0.0) -> None:
        """Remember that something happened `age_s` ago; `of` names it, such as `replica/m1-0a1b2c3d`."""
        if not self._may_write():
            log.debug(text, kind=kind, object=of)
            return
        if len(self._waiting) == WAITING_MAX:
            self.dropped += 1
        self._waiting.append(Event(kind, of, text, self._machine.wall_s() - age_s, self._epoch(), 0, level))
        getattr(log, level.value)(text, kind=kind, object=of)
        self._wake.set()

    async def run(self) -> None:
        """Writes what was recorded, until cancelled."""
        silent = False
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            while self._waiting:
                batch = tuple(self._waiting)
                try:
                    stored = await self._append(batch)
                except StaleEpoch as err:  # somebody else writes the history now
                    log.warning("events of a term that is over are lost", lost=len(batch), epoch=err.epoch)
                    self.dropped += len(batch)
                    stored = ()
                except LlmgwError as err:
                    if not silent and err.code != STORAGE_UNAVAILABLE:  # that is told as an outage of the store
                        log.warning("events cannot be stored; they wait in memory", error=str(err), waiting=len(batch))
                    silent = True
                    await self._machine.sleep_until(self._machine.now_s() + RETRY_S)
                    continue
                silent = False
                for _ in range(min(len(batch), len(self._waiting))):
                    self._waiting.popleft()
                self._publish(stored)
                self._written.set()
                self._written = trio.Event()

    async def flush(self) -> None:
        """Returns when everything recorded is stored, or after FLUSH_S_MAX."""
        with trio.move_on_after(FLUSH_S_MAX):
            while self._waiting:
                await self._written.wait()

    async def catch_up(
        self, latest: Callable[[], Awaitable[tuple[Event, ...]]], after: Callable[[int], Awaitable[tuple[Event, ...]]]
    ) -> None:
        """Shows followers what another control plane has stored. `latest()` gives the newest events, `after(seq)` those above."""
        events = await (after(self._seen) if self._seen else latest())
        self._publish(tuple(event for event in events if event.seq > self._seen))

    def _publish(self, events: tuple[Event, ...]) -> None:
        if events:
            self._seen = max(self._seen, events[-1].seq)
        self._recent.extend(events)
        for follower in list(self._followers):
            try:
                for event in events:
                    follower.send_nowait(event)
            except (trio.WouldBlock, trio.BrokenResourceError):
                self._followers.discard(follower)
                follower.close()

    def recent(self, after: int) -> tuple[Event, ...] | None:
        """Stored events after `seq`, from memory; None when memory does not reach back that far."""
        if self._recent and self._recent[0].seq > after + 1:
            return None
        return tuple(event for event in self._recent if event.seq > after)

    @contextmanager
    def follow(self) -> Iterator[trio.MemoryReceiveChannel[Event]]:
        """A channel of events from now on. It ends when the follower lags by more than FOLLOWER_MAX."""
        send, receive = trio.open_memory_channel[Event](FOLLOWER_MAX)
        self._followers.add(send)
        try:
            yield receive
        finally:
            self._followers.discard(send)
            send.close()
            receive.close()
