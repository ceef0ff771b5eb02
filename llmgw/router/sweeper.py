"""What ends a wait from outside: hang-ups, time-outs, the end of the router. One coarse sweep for all, no scope per request.

A task of the data path waits only through its `Waiter`; `kick` wakes it, and the wait raises `Kicked` with the reason. Owns:
kick, sweep, hang-up. Never reads or writes a client's or an engine's bytes.
"""

from __future__ import annotations

import enum
import math
import select
from collections.abc import Callable, Iterable
from typing import Final, Protocol

import trio

from llmgw.domain.ports import Machine

# Between sweeps. A limit of 2 s ends between 2.0 and 2.2 s; a sweep over 10,000 idle connections costs a few milliseconds.
SWEEP_S: Final = 0.2


class Kick(enum.Enum):
    """Why a wait ended before its time."""

    CLIENT_GONE = "client_gone"
    EXPIRED = "expired"
    STOPPING = "stopping"


class Kicked(Exception):
    """A wait ended from outside. Never leaves the connection's task."""

    def __init__(self, why: Kick) -> None:
        super().__init__(why.value)
        self.why = why


class Waiter:
    """How one task waits on one descriptor at a time, and how others wake it.

    `deadline_s` (math.inf: none) is looked at by the sweep. A hang-up stays known once seen; the other reasons are used up
    when they are raised.
    """

    __slots__ = ("deadline_s", "kicked", "waiting_on")

    def __init__(self) -> None:
        self.deadline_s = math.inf
        self.waiting_on = -1
        self.kicked: Kick | None = None

    def kick(self, why: Kick) -> None:
        """Wakes the task if it waits; else its next wait raises. An expiry is only for a task that waits."""
        if self.kicked is Kick.CLIENT_GONE or (why is Kick.EXPIRED and self.waiting_on < 0):
            return
        self.kicked = why
        if self.waiting_on >= 0:
            trio.lowlevel.notify_closing(self.waiting_on)

    def check(self) -> None:
        """Raises Kicked when there is a reason to."""
        if self.kicked is not None:
            self._raise()

    def _raise(self) -> None:
        why = self.kicked
        assert why is not None
        if why is not Kick.CLIENT_GONE:
            self.kicked = None
        raise Kicked(why)

    async def readable(self, descriptor: int) -> None:
        """Until `descriptor` can be read. Raises Kicked."""
        self.check()
        self.waiting_on = descriptor
        try:
            await trio.lowlevel.wait_readable(descriptor)
        except trio.ClosedResourceError:
            pass  # our own kick; the reason stands in `kicked`
        else:
            if self.kicked is Kick.EXPIRED:  # it came true in the very moment: what came counts
                self.kicked = None
        finally:
            self.waiting_on = -1
        self.check()

    async def writable(self, descriptor: int) -> None:
        """Until `descriptor` can be written. Raises Kicked."""
        self.check()
        self.waiting_on = descriptor
        try:
            await trio.lowlevel.wait_writable(descriptor)
        except trio.ClosedResourceError:
            pass
        else:
            if self.kicked is Kick.EXPIRED:
                self.kicked = None
        finally:
            self.waiting_on = -1
        self.check()

    async def either(self, descriptor: int) -> None:
        """Until `descriptor` can be read or written: while a body is sent, an engine may refuse it early. Raises Kicked."""
        both = select.epoll(1)
        try:
            both.register(descriptor, select.EPOLLIN | select.EPOLLOUT)
            await self.readable(both.fileno())
        finally:
            both.close()


class Hangups:
    """One shared edge-triggered epoll that tells when a peer closes, also while nobody reads from it.

    Only closing is asked for, so that bytes wake nobody. Half a close counts as a close.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._told: dict[int, Callable[[], None]] = {}

    def watch(self, descriptor: int, gone: Callable[[], None]) -> None:
        """`gone` is called once, from the watcher's task; it must not block or raise."""
        self._told[descriptor] = gone
        self._epoll.register(descriptor, select.EPOLLRDHUP | select.EPOLLET)

    def forget(self, descriptor: int) -> None:
        """Call before the descriptor is closed: its number may be given to another connection at once."""
        if self._told.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    async def run(self) -> None:
        while True:
            await trio.lowlevel.wait_readable(self._epoll.fileno())
            for descriptor, _ in self._epoll.poll(0):
                gone = self._told.get(descriptor)
                if gone is not None:
                    gone()

    def close(self) -> None:
        self._epoll.close()


class Swept(Protocol):
    def sweep(self, now_s: float) -> None: ...


async def sweep_forever(machine: Machine, everything: Callable[[], Iterable[Swept]]) -> None:
    """Looks at every connection five times a second and lets it see whether its time is over."""
    while True:
        await machine.sleep_until(machine.now_s() + SWEEP_S)
        now_s = machine.now_s()
        for one in list(everything()):
            one.sweep(now_s)
