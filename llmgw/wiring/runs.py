"""Running a role, to its last line: trio's groups of exceptions become the one error that the command line shows."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar, TypeVarTuple

import attrs
import structlog
import trio

from llmgw.domain.errors import LlmgwError
from llmgw.settings.schema import LogSettings
from llmgw.wiring.logs import configure_logs

# Of the open files that a process may have: for listening sockets, logs, files of state, polls of engines' load, sessions with control
# planes and connections that are kept for the next request. Measured: a router that serves nobody has about 20.
DESCRIPTORS_RESERVED: Final = 128
CLIENTS_MIN: Final = 8  # where the limit is too low for all of this, somebody is served all the same
log = structlog.get_logger("llmgw")
T = TypeVar("T")
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


def clients_max() -> int:
    """How many clients a router of this process may have at once."""
    return clients_within(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def clients_within(descriptors: int) -> int:
    """The same for a limit of open files: so many that each of them can be given a connection to an engine."""
    return sys.maxsize if descriptors == resource.RLIM_INFINITY else max(CLIENTS_MIN, (descriptors - DESCRIPTORS_RESERVED) // 2)


def allow_descriptors() -> None:
    """As many open files as this process may have: a shell gives 1,024 as a rule, and every client takes one. For who starts no engines."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def run_command(work: Callable[[], Awaitable[T]]) -> T:
    """What a command that is over soon does, under trio; of the log only what needs a person. Raises as `run_role` does."""
    configure_logs(attrs.evolve(LogSettings(), level="warning"))
    try:
        return trio.run(work)
    except* LlmgwError as group:
        raise leaves(group)[0] from group
