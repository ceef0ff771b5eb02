"""What ends a wait from outside: hang-ups, time-outs, the end of the router. One coarse sweep for all, no scope per request.

A task of the data path waits only through its `Waiter`; `kick` wakes it, and the wait raises `Kicked` with the reason. Owns:
kick, sweep, how a task is parked and woken. Never reads or writes a client's or an engine's bytes.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable
from typing import Final, Protocol

import trio

from llmgw.domain.ports import Machine
from llmgw.router.reactor import Source

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


class Waiter(Source):
    """How one task waits until something has happened, and how others wake it.

    What happened is not told: the task tries again what it waited for. `deadline_s` (math.inf: none) is looked at by the
    sweep. A hang-up stays known once seen; the other reasons are used up when they are raised.
    """

    __slots__ = ("_task", "_woken", "deadline_s", "kicked")

    def __init__(self) -> None:
        super().__init__()
        self.deadline_s = math.inf
        self.kicked: Kick | None = None
        self._task: trio.lowlevel.Task | None = None
        self._woken = False

    @property
    def waits(self) -> bool:
        """Does the task wait now?"""
        return self._task is not None

    def wake(self) -> None:
        """Something has happened. A wake that comes while the task runs ends its next wait at once."""
        task = self._task
        if task is None:
            self._woken = True
        else:
            self._task = None
            trio.lowlevel.reschedule(task)

    def kick(self, why: Kick) -> None:
        """Wakes the task if it waits; else its next wait raises. An expiry is only for a task that waits."""
        if why is Kick.EXPIRED and self._task is None:
            return
        if self.kicked is not Kick.CLIENT_GONE:
            self.kicked = why
        self.wake()  # also where the hang-up is known: whoever saw it may have left the task asleep

    def check(self) -> None:
        """Raises Kicked when there is a reason to."""
        why = self.kicked
        if why is not None:
            if why is not Kick.CLIENT_GONE:
                self.kicked = None
            raise Kicked(why)

    async def wait(self) -> None:
        """Until something has happened, or may have. Raises Kicked."""
        self.check()
        if self._woken:  # it happened while the task was at work
            self._woken = False
            await trio.lowlevel.checkpoint_if_cancelled()
        else:
            self._task = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(self._abort)
        self.check()

    def _abort(self, _: Callable[[], object]) -> trio.lowlevel.Abort:
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED


class Swept(Protocol):
    def sweep(self, now_s: float) -> None: ...


async def sweep_forever(machine: Machine, everything: Callable[[], Iterable[Swept]]) -> None:
    """Looks at every connection five times a second and lets it see whether its time is over."""
    while True:
        await machine.sleep_until(machine.now_s() + SWEEP_S)
        now_s = machine.now_s()
        for one in list(everything()):
            one.sweep(now_s)
