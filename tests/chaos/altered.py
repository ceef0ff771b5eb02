"""Runs `llmgw` with something of it swapped before its command begins: `python tests/chaos/altered.py CHANGE... -- COMMAND...`.

What is swapped is a name in the product's own modules; nothing in the product knows of this file. CHANGE is a name of `CHANGES`, or
`NAME=FILE` where FILE turns it on and off while the process runs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def taken(file: Path) -> bool:
    """Was it there? It is not any more."""
    try:
        file.unlink()
    except FileNotFoundError:
        return False
    return True


def no_epoch_check() -> None:
    """A write does not compare its epoch with the one that the store has met."""
    from llmgw.store import connection

    connection._check_epoch = lambda *given: None


def freezes_before_a_change(file: Path) -> None:
    """Stops its own process (SIGSTOP), once, between everything that is asked of a change of a model and its transaction.

    It does so for the first change after `file` is there, which it removes, while none of its threads holds a lock of SQLite's.
    """
    from llmgw.lease.file import LeaseFile
    from llmgw.store import models
    from llmgw.store.connection import Store

    write, open_lease = Store.write, LeaseFile._open
    leases: set[LeaseFile] = set()

    def seen(self: LeaseFile) -> Any:
        leases.add(self)
        return open_lease(self)

    async def stops(self: Store, unit: Any, *given: Any, **named: Any) -> Any:
        if unit is models._put and taken(file):
            async with self._write_turn:
                with contextlib.ExitStack() as turns:
                    for lease in leases:
                        turns.enter_context(lease._turn)
                    os.kill(os.getpid(), signal.SIGSTOP)
        return await write(self, unit, *given, **named)

    LeaseFile._open = seen  # type: ignore[method-assign]
    Store.write = stops  # type: ignore[method-assign]


def freezes_in_a_renewal(file: Path) -> None:
    """Stops its own process (SIGSTOP), once, while it has the lock of `lease.db`; when `file` is there, which it removes."""
    from llmgw.lease import file as lease_file

    transaction = lease_file.transaction

    @contextlib.contextmanager
    def stops(con: Any, begin: str = "BEGIN IMMEDIATE") -> Iterator[None]:
        with transaction(con, begin):
            if begin == "BEGIN IMMEDIATE" and taken(file):
                os.kill(os.getpid(), signal.SIGSTOP)
            yield

    lease_file.transaction = stops


def freezes_in_a_write(file: Path) -> None:
    """Stops its own process (SIGSTOP), once, while it has the lock of the store's file; when `file` is there, which it removes."""
    from llmgw.store import connection

    transaction = connection.transaction

    @contextlib.contextmanager
    def stops(con: Any, begin: str = "BEGIN IMMEDIATE") -> Iterator[None]:
        with transaction(con, begin):
            if begin == "BEGIN IMMEDIATE" and taken(file):
                os.kill(os.getpid(), signal.SIGSTOP)
            yield

    connection.transaction = stops


def answers_before_the_commit(file: Path) -> None:
    """While `file` is there, every write is answered in a transaction that stays open, and this process reads what it wrote."""
    from llmgw.store import connection
    from llmgw.store.connection import Store

    transaction, read, is_on = connection.transaction, Store.read, file.exists

    @contextlib.contextmanager
    def stays_open(con: Any, begin: str = "BEGIN IMMEDIATE") -> Iterator[None]:
        if not is_on():
            with transaction(con, begin):
                yield
            return
        if not con.in_transaction:
            con.execute("BEGIN IMMEDIATE")
        with con:  # a savepoint: a unit that raises has written nothing
            yield

    async def reads_own(self: Store, unit: Any, *given: Any, **named: Any) -> Any:
        if not is_on():
            return await read(self, unit, *given, **named)
        async with self._write_turn:
            return await self._run(lambda: self._read(self._writer, lambda con: unit(con, *given, **named)))

    connection.transaction = stays_open
    Store.read = reads_own  # type: ignore[method-assign]


def wall_clock(file: Path) -> None:
    """This process's wall clock is ahead by the number of seconds in `file`, if there is any."""
    real = time.time

    def stepped() -> float:
        with contextlib.suppress(OSError, ValueError):
            return real() + float(file.read_text())
        return real()

    time.time = stepped


CHANGES: dict[str, Callable[..., None]] = {
    "no-epoch-check": no_epoch_check,
    "freezes-before-a-change": freezes_before_a_change,
    "freezes-in-a-renewal": freezes_in_a_renewal,
    "freezes-in-a-write": freezes_in_a_write,
    "answers-before-the-commit": answers_before_the_commit,
    "wall-clock": wall_clock,
}


def main(given: list[str]) -> int:
    changes, args = given[: given.index("--")], given[given.index("--") + 1 :]
    for change in changes:
        name, _, file = change.partition("=")
        CHANGES[name](*([Path(file)] if file else []))
    from llmgw.cli.main import main as llmgw

    return llmgw(args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
