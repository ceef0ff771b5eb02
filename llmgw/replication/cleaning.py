"""Removes the copies of epochs long gone from the bucket: never the base, never what is newer than it, and only while the lease is proven.

The last few stay, and what was written in the last week: a way back for an operator. Ages are by the store's own clock.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Final

import structlog
import trio

from llmgw.domain.ports import Machine
from llmgw.replication import rules
from llmgw.replication.prefix_store import PrefixStore
from llmgw.replication.rules import Rules

KEEP: Final = 3  # besides the one in use (control.md 3)
KEEP_AGE: Final = timedelta(days=7)
log = structlog.get_logger("llmgw.replication")


async def clean_up(
    machine: Machine,
    store: PrefixStore,
    base: str,
    confirmed: Callable[[], bool],
    *,
    keep: int = KEEP,
    keep_age: timedelta = KEEP_AGE,
    protect: Rules = rules.RULES,
) -> tuple[str, ...]:
    """The prefixes that it removed. `base` is our own prefix, which the lease names; `confirmed()` is asked before each few objects.

    Raises Unavailable, Invalid; what is half removed is no copy any more, and goes the next time.
    """
    removed: list[str] = []
    if not confirmed():
        return ()
    now = await machine.run_sync(store.now)
    if now is None:
        return ()
    old = protect.out_of_use(await machine.run_sync(store.prefixes), base, base)
    for prefix in old[: max(0, len(old) - keep)]:
        seen = await machine.run_sync(lambda prefix=prefix: store.look(prefix))  # type: ignore[misc]
        if seen is None or now - seen.written < keep_age:
            continue
        if not confirmed():
            break
        if not await machine.run_sync(lambda seen=seen: store.remove(seen, lambda: trio.from_thread.run_sync(confirmed))):  # type: ignore[misc]
            break
        removed.append(prefix)
        log.info("the copy of an epoch long gone is removed", prefix=prefix)
    return tuple(removed)
