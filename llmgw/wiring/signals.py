"""How a role is told to end: the first signal begins an orderly stop, the second ends the process at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Final

import structlog
import trio

SECOND_SIGNAL_EXIT: Final = 130  # what a shell reports for a process that Ctrl-C ended
STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
log = structlog.get_logger("llmgw.signals")


async def wait_for_stop(stop: Callable[[], None], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    """Calls `stop` at the first SIGINT or SIGTERM; at the second the process ends without another word.

    Runs until cancelled: it has to be there for the second signal.
    """
    with trio.open_signal_receiver(*STOP_SIGNALS) as signals:
        task_status.started()
        told = False
        async for number in signals:
            if told:
                os._exit(SECOND_SIGNAL_EXIT)
            told = True
            log.info("stopping", signal=signal.Signals(number).name)
            stop()
