"""What happens when a task of the control plane crashes: some are started again a few times, then the process goes down."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from llmgw.domain.errors import Broken
from llmgw.domain.ports import Machine

RESTARTS_MAX: Final = 3
RESTART_WINDOW_S: Final = 60.0  # three restarts in 60 s, then the process goes down in order (control.md 1)
log = structlog.get_logger("llmgw.supervision")


async def keep_running(machine: Machine, name: str, task: Callable[[], Awaitable[None]]) -> None:
    """Runs `task` until cancelled, and again when it crashes. Raises Broken at the crash after the third in 60 s."""
    crashes: deque[float] = deque()
    while True:
        try:
            await task()
        except Exception as err:
            now_s = machine.now_s()
            while crashes and now_s - crashes[0] > RESTART_WINDOW_S:
                crashes.popleft()
            if len(crashes) >= RESTARTS_MAX:
                raise Broken(f"{name} crashed {len(crashes) + 1} times within {RESTART_WINDOW_S:.0f} s") from err
            crashes.append(now_s)
            log.error("a task crashed and is started again", task=name, crashes=len(crashes), exc_info=err)
        else:
            raise Broken(f"{name} ended, which it never should")
