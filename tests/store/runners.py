"""How a store's work is run in tests: at once, or in a thread as in a control plane."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import trio

T = TypeVar("T")


async def inline(work: Callable[[], T]) -> T:
    return work()


async def in_thread(work: Callable[[], T]) -> T:
    return await trio.to_thread.run_sync(work)
