"""How a role is told to end: the first signal begins an orderly stop, the second ends the process at once.

Engines of a server's or an agent's live on then and are adopted by the next agent; `dev` takes its own along.

SIGHUP ends nothing. A router reloads its file on it; the other roles watch their file anyway, or have nothing to reload. In
`dev` it means that the terminal was closed, which is Ctrl-C.
"""

from __future__ import annotations

import enum
import os
import signal
from collections.abc import Callable
from typing import Final

import structlog
import trio

SECOND_SIGNAL_EXIT: Final = 130  # what a shell reports for a process that Ctrl-C ended
STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
log = structlog.get_logger("llmgw.signals")


class Hangup(enum.Enum):
    """What SIGHUP means to a role."""

    STOPS = "stops"
    IGNORED = "ignored"
    ELSEWHERE = "elsewhere"  # somebody else of this process takes it


def _nothing() -> None:
    """Most roles leave what they started."""


async def wait_for_stop(
    stop: Callable[[], None],
    hangup: Hangup = Hangup.IGNORED,
    last_act: Callable[[], None] = _nothing,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Calls `stop` at the first SIGINT or SIGTERM; at the second the process ends without another word, after `last_act`.

    Runs until cancelled: it has to be there for the second signal. `last_act` blocks and is short.
    """
    watched = STOP_SIGNALS if hangup is Hangup.ELSEWHERE else (*STOP_SIGNALS, signal.SIGHUP)
    with trio.open_signal_receiver(*watched) as signals:
        task_status.started()
        told = False
        async for number in signals:
            if number == signal.SIGHUP and hangup is Hangup.IGNORED:
                log.info("SIGHUP ends nothing here; a changed file is taken by itself, where there is one")
                continue
            if told:
                try:
                    last_act()
                finally:  # whatever became of it
                    os._exit(SECOND_SIGNAL_EXIT)
            told = True
            log.info("stopping", signal=signal.Signals(number).name)
            stop()
