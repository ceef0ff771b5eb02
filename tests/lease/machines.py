"""A machine with threads and a clock that moves, for stores on a real disk."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import TypeVar

import trio

from llmgw.sim.machine import SimMachine

T = TypeVar("T")


class ThreadMachine(SimMachine):
    def __init__(self) -> None:
        super().__init__(secrets.randbits(32))

    async def run_sync(self, work: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(work)
