"""The ports of the lease: where its record is read and replaced, and the lock that a holder of one machine keeps.

A store compares and sets, and knows no rule. What stands in it is one record for each role.
"""

from __future__ import annotations

from typing import Protocol

from llmgw.lease.record import LeaseRecord


class Lost(Exception):
    """The record is not the expected one; nothing was written by this call. `current` stands there instead (None: no record).

    Where a client library repeats a request by itself, `current` may be this very write.
    """

    def __init__(self, current: LeaseRecord | None) -> None:
        super().__init__("the lease's record is not the expected one")
        self.current = current


class Unknown(Exception):
    """No answer, or one that says neither yes nor no: a read failed, a write may be in the store, now or later.

    `local_disk`: this machine's own disk refused it. `fault`: waiting does not help; what the store holds is no lease record, or it
    refuses to say, for want of a right, a bucket or the like.
    """

    def __init__(self, why: str, *, local_disk: bool = False, fault: bool = False) -> None:
        super().__init__(why)
        self.why = why
        self.local_disk = local_disk
        self.fault = fault


class LeaseStore(Protocol):
    """Linearizable on one role: a read shows every replace that returned before it was sent."""

    async def read(self, role: str) -> LeaseRecord | None:
        """What stands there now. Raises Unknown."""
        ...

    async def replace(self, role: str, expected: LeaseRecord | None, new: LeaseRecord) -> None:
        """Writes `new` if exactly `expected` (None: no record) stands there. Raises Lost, Unknown."""
        ...


class HolderLock(Protocol):
    """A lock that the kernel drops when its holder's process ends, and that carries its last holder's name."""

    async def take(self, name: str, if_named: str | None) -> bool:
        """Takes the lock and writes `name` on it, if it is free and, with `if_named`, still carries that name. Held already: renamed.

        False: another process has it, or its name is another one; it is then as it was.
        """
        ...

    async def let_go(self) -> None: ...


class NoLock:
    """For stores that several machines share: nobody's death can be seen."""

    async def take(self, name: str, if_named: str | None) -> bool:
        return False

    async def let_go(self) -> None:
        return None
