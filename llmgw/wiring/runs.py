"""Running a role, to its last line: trio's groups of exceptions become the one error that the command line shows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVarTuple

import structlog
import trio

from llmgw.domain.errors import LlmgwError

log = structlog.get_logger("llmgw")
Ts = TypeVarTuple("Ts")


def run_role(main: Callable[[*Ts], Awaitable[None]], *args: *Ts) -> None:
    """Runs `main` under trio until it ends, and says so. Raises the first LlmgwError of what ended it, else what ended it."""
    try:
        trio.run(main, *args)
    except* LlmgwError as group:
        raise leaves(group)[0] from group
    log.info("stopped")


def leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    """The plain exceptions of a group, whatever the depth."""
    found: list[BaseException] = []
    for err in group.exceptions:
        found += leaves(err) if isinstance(err, BaseExceptionGroup) else [err]
    return found
