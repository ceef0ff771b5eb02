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


def no_lease_read() -> None:
    """A write to a replicated store is acknowledged once it is uploaded, whoever leads by then."""
    from llmgw.replication import rules

    object.__setattr__(rules.RULES, "acknowledgement", (rules.Step.UPLOAD,))


def no_lease_answers(file: Path) -> None:
    """While `file` is there, no request about a lease in a bucket is answered to this process; those of its Litestream are."""
    from llmgw.lease.object_leases import ObjectLeases
    from llmgw.lease.store import Unknown

    run, is_on = ObjectLeases._run, file.exists

    async def cut(self: ObjectLeases, work: Any) -> Any:
        if is_on():
            raise Unknown("the test answers nothing")
        return await run(self, work)

    ObjectLeases._run = cut  # type: ignore[method-assign]


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


def freezes_before_a_command(file: Path) -> None:
    """Stops its own process (SIGSTOP), once, between its right to send a command and the sending; when `file` is there, which it
    removes."""
    from llmgw.control.sessions import Sessions
    from llmgw.protocol.messages import Command

    send = Sessions.send_nowait

    def stops(self: Sessions, node: Any, message: Any) -> None:
        if isinstance(message, Command) and taken(file):
            os.kill(os.getpid(), signal.SIGSTOP)
        send(self, node, message)

    Sessions.send_nowait = stops  # type: ignore[method-assign]


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
    from llmgw.store.connection import FileStore

    transaction, read, is_on = connection.transaction, FileStore.read, file.exists

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

    async def reads_own(self: FileStore, unit: Any, *given: Any, **named: Any) -> Any:
        if not is_on():
            return await read(self, unit, *given, **named)
        async with self._write_turn:
            return await self._run(lambda: self._read(self._writer, lambda con: unit(con, *given, **named)))

    connection.transaction = stays_open
    FileStore.read = reads_own  # type: ignore[method-assign]


def wall_clock(file: Path) -> None:
    """This process's wall clock is ahead by the number of seconds in `file`, if there is any."""
    real = time.time

    def stepped() -> float:
        with contextlib.suppress(OSError, ValueError):
            return real() + float(file.read_text())
        return real()

    time.time = stepped


RETRIES_UNKNOWN = 7  # a version that sets route.retries to this is none for a machine whose older build does not know it
POLL_STARTING_S, POLL_LEADING_S = 0.31, 0.32  # versions that set lease.poll_s to this end whoever starts, or leads, with them


def knows_one_key_less() -> None:
    """This machine's build does not know what a version says."""
    from llmgw.control import settings_in_force
    from llmgw.domain.errors import Fault, Invalid

    parse = settings_in_force.parse_document

    def refusing(text: str | bytes, source: str) -> Any:
        document = parse(text, source)
        if document.settings.route.retries == RETRIES_UNKNOWN:
            raise Invalid.of(f"{source} is not valid", (Fault("route.retries", "unknown key on this machine"),))
        return document

    settings_in_force.parse_document = refusing


def dies_starting() -> None:
    """A version that loads, and ends the process that starts with it."""
    from llmgw.wiring import stores

    make = stores.file_candidacy

    def dying(machine: Any, store: Any, data_dir: Any, me: Any, lease: Any, known_epoch: int) -> Any:
        if lease.poll_s == POLL_STARTING_S:
            raise RuntimeError("this version does not start")
        return make(machine, store, data_dir, me, lease, known_epoch)

    stores.file_candidacy = dying


def dies_leading() -> None:
    """A version that runs well until its process leads."""
    from llmgw.control.controller import Controller

    reload = Controller._reload

    async def dying(self: Controller, epoch: int) -> None:
        if self.settings.lease.poll_s == POLL_LEADING_S:
            os._exit(70)
        await reload(self, epoch)

    Controller._reload = dying  # type: ignore[method-assign]


def fails_at_a_word() -> None:
    """The router fails by its own fault at a prompt that says "fail-in-asking", and at an event that says "fail-in-answering"."""
    from llmgw.router.body import Asked
    from llmgw.router.exchange import Call, Exchange, Known
    from llmgw.router.http1 import Head
    from llmgw.router.sse import EventScanner

    begin, feed = Call.__init__, EventScanner.feed
    text = "as the test wants it"  # apart from the line that raises, which a report shows

    def begins(self: Call, exchange: Exchange, head: Head, known: Known, asked: Asked) -> None:
        if b"fail-in-asking" in asked.body:
            raise RuntimeError(text)
        begin(self, exchange, head, known, asked)

    def feeds(self: EventScanner, data: bytes) -> list[bytes]:
        if b"fail-in-answering" in data:
            raise RuntimeError(text)
        return feed(self, data)

    Call.__init__ = begins  # type: ignore[method-assign]
    EventScanner.feed = feeds  # type: ignore[method-assign]


CHANGES: dict[str, Callable[..., None]] = {
    "fails-at-a-word": fails_at_a_word,
    "no-epoch-check": no_epoch_check,
    "no-lease-read": no_lease_read,
    "no-lease-answers": no_lease_answers,
    "freezes-before-a-change": freezes_before_a_change,
    "freezes-before-a-command": freezes_before_a_command,
    "freezes-in-a-renewal": freezes_in_a_renewal,
    "freezes-in-a-write": freezes_in_a_write,
    "answers-before-the-commit": answers_before_the_commit,
    "wall-clock": wall_clock,
    "knows-one-key-less": knows_one_key_less,
    "dies-starting": dies_starting,
    "dies-leading": dies_leading,
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
