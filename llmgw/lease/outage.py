"""Storage that does not answer, told as one thing: one line when the first part of it fails, one when the last is back.

The lease's file, the store and the data directory fail together as a rule (one disk is full, one program keeps it all locked),
and each is tried by a task of its own. They report here what they met; an operator reads of one outage, with its length. Decides
nothing: what a claim is worth meanwhile is of `rules`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import structlog

log = structlog.get_logger("llmgw.storage")


class Part(enum.Enum):
    """What can fail. The value is for people."""

    LEASE = "the lease"
    STORE = "writes to the store"
    READS = "reads of the store"
    DATA_DIR = "the data directory"


LEASE_FAULT: Final = "the lease cannot be read; whoever leads goes on"
BACK: Final = "storage answers again"
FIRST: Final[Mapping[Part, str]] = MappingProxyType({
    Part.LEASE: "the lease's store does not answer; whoever leads goes on",
    Part.STORE: "the store takes no writes; what was asked for is kept up",
    Part.READS: "the store does not answer; what was read last is shown",
    Part.DATA_DIR: "the data directory takes no writes",
})  # fmt: skip


class Outage:
    """One for each control plane. `now_s` is the caller's clock, the same for all of them."""

    def __init__(self) -> None:
        self._failing: dict[Part, str] = {}  # with why, as it was last met
        self._since_s = 0.0

    def failed(self, part: Part, why: str, now_s: float, *, event: str = "") -> None:
        """`part` was tried and failed. Told if nothing failed before; `event` in place of its usual line."""
        if not self._failing:
            self._since_s = now_s
            log.warning(event or FIRST[part], why=why)
        elif part not in self._failing:
            log.debug("another part of the storage fails too", part=part.value, why=why)
        self._failing[part] = why

    def why(self, part: Part) -> str:
        """What its last failure was; "" while it works."""
        return self._failing.get(part, "")

    def works(self, part: Part, now_s: float) -> None:
        """`part` was tried and works. Told if it was the last that did not."""
        if part in self._failing:
            del self._failing[part]
            if not self._failing:
                log.info(BACK, after_s=round(now_s - self._since_s, 1))
