"""The data plane's own event loop inside Trio's: one private edge-triggered epoll that one task waits for.

Each socket is registered once, for as long as it lives; what happens on it is told to its `Source` by a plain call, so that a
wake-up of Trio (about 14 us, router-measurements.md) is paid once for all that has come meanwhile. A source tries its socket
first and reads on until it would block: an edge is told once. Owns: epoll, the order of turns, how a task is parked and woken.
Never reads or writes a socket. The epoll is made where the loop is, after any fork.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from typing import Final

import trio
from mypy_extensions import mypyc_attr

READ: Final = select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR | select.EPOLLRDHUP  # there is something to read, if only an end
WRITE: Final = select.EPOLLOUT | select.EPOLLHUP | select.EPOLLERR
GONE: Final = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR  # the peer has closed its side; half a close counts as a close
_MASK: Final = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET
EVENTS_MAX: Final = 256  # told between two looks at what else Trio has to do
POLLS_MAX: Final = 4  # router-measurements.md: looks before Trio gets its turn; saves 4 to 12 % of a request


@mypyc_attr(allow_interpreted_subclasses=True)  # compiled, it may still be wrapped: tests count what happens
class Source:
    """One registered descriptor, and what is to be done when something happens on it."""

    __slots__ = ("_added_in",)

    def __init__(self) -> None:
        self._added_in = 0

    def ready(self, events: int) -> None:
        """Something has happened: bits of READ, WRITE and GONE. A hint; the socket tells what is so. Must not wait."""
        raise NotImplementedError

    def failed(self, error: Exception) -> None:
        """`ready` has raised: a fault of ours. What this source serves must end; the others go on."""
        raise NotImplementedError


@mypyc_attr(allow_interpreted_subclasses=True)
class Reactor:
    """The loop. Open it, and keep `run` running; sources may come and go at any time, also from inside `ready`.

    `now_s` is the clock of the data path: seconds as of the last look at what has happened, or of the last sweep. Asking the
    kernel for each of a request's ten times would cost 2 us.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.now_s = clock()
        self._sources: dict[int, Source] = {}
        self._turn = 1
        self._again: list[tuple[Source, int]] = []
        self._waits = False
        self._epoll: select.epoll | None = None
        self._stir = -1

    def open(self) -> None:
        """Before anything is added. Idempotent; after `close` it begins anew."""
        if self._epoll is None:
            self._epoll = select.epoll()
            self._stir = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._epoll.register(self._stir, select.EPOLLIN | select.EPOLLET)

    def close(self) -> None:
        """When `run` has ended. Idempotent; what is still added is known no more."""
        if self._epoll is not None:
            self._sources.clear()
            self._epoll.close()
            self._epoll = None
            os.close(self._stir)

    def add(self, descriptor: int, source: Source) -> None:
        """What has happened on it already is told too. Raises OSError when the kernel takes no more."""
        assert self._epoll is not None
        source._added_in = self._turn
        self._epoll.register(descriptor, _MASK)
        self._sources[descriptor] = source

    def remove(self, descriptor: int) -> None:
        """Call before the descriptor is closed: its number may be given to another connection at once."""
        if self._sources.pop(descriptor, None) is not None and self._epoll is not None:
            self._epoll.unregister(descriptor)

    def again(self, source: Source, events: int) -> None:
        """Tell it `events` once more when the others have had their turn: it stopped although there was more to do."""
        self._again.append((source, events))
        if self._waits:
            self._waits = False
            os.eventfd_write(self._stir, 1)

    async def run(self) -> None:
        """Until cancelled."""
        epoll, sources = self._epoll, self._sources
        assert epoll is not None
        descriptor = epoll.fileno()
        while True:
            if self._again:
                await trio.lowlevel.checkpoint()
            else:
                self._waits = True
                await trio.lowlevel.wait_readable(descriptor)
                self._waits = False
            for _ in range(POLLS_MAX):
                self._turn += 1
                turn = self._turn
                events = epoll.poll(0, EVENTS_MAX)
                self.now_s = self._clock()
                for number, bits in events:
                    source = sources.get(number)
                    # One that was added since the look has a number that belonged to another: what happened was the other's.
                    if source is not None and source._added_in != turn:
                        try:
                            source.ready(bits)
                        except Exception as err:  # one exchange fails, never the loop and with it every other
                            source.failed(err)
                again, self._again = self._again, []
                for source, bits in again:
                    try:
                        source.ready(bits)
                    except Exception as err:
                        source.failed(err)
                if not events and not again:
                    break

    def tick(self, now_s: float) -> None:
        """The time, where nothing else has happened."""
        self.now_s = max(self.now_s, now_s)
