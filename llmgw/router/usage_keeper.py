"""Keeps a router's book of usage on disk, and tells it in batches until a leader has stored each.

A batch is told only once it is on disk as it was cut: a process that is started anew tells the same one again, and nothing twice
under another number. A disk that takes nothing holds up no request; what is counted waits in memory, untold, until it does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog
import trio

from llmgw.domain.errors import Invalid
from llmgw.domain.files import words
from llmgw.domain.ports import Machine
from llmgw.domain.usage import UsageBatch
from llmgw.router.state_file import decode_state, encode_state
from llmgw.router.usage_book import BookState, UsageBook

USAGE_S: Final = 5.0  # between batches, and between writes to the disk: what a crash of the router loses at most
LAST_S: Final = 2.0  # how long a router that stops waits for its last batch to be taken
AGAIN_S: Final = 0.1  # between looks meanwhile
USAGE_FILE: Final = "usage.json"  # in the data directory of whoever runs the router
STATE_FORMAT: Final = 1
BOOT_BYTES: Final = 8
Tell = Callable[[UsageBatch], bool]
log = structlog.get_logger("llmgw.router.usage")


class UsageKeeper:
    """`path` is where the book is kept. `tell(batch)` sends it to whoever leads, without waiting, and is False where nobody is
    known to; `taken` is called once it is stored, or never.

    `load` first, then `run`; `close` when no more answers are counted.
    """

    def __init__(self, machine: Machine, path: Path, tell: Tell) -> None:
        self.book = UsageBook(machine.fresh_hex(BOOT_BYTES))
        self._machine = machine
        self._path = path
        self._tell = tell
        self._saved = BookState()
        self._failed = False
        self._told: UsageBatch | None = None
        self._turn = trio.Lock()

    async def load(self) -> None:
        """Goes on with what the process before has left. A file that cannot be used is told, and as good as none."""
        try:
            data = await self._machine.run_sync(lambda: self._machine.disk.read(self._path))
            if data is None:
                return
            state = _decode(data)
        except (OSError, Invalid) as err:
            why = err.message if isinstance(err, Invalid) else words(err)
            log.error("the usage that was not yet stored cannot be read; it is lost", file=str(self._path), why=why)
            return
        self._saved = state
        self.book.restore(state)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._machine.sleep_until(self._machine.now_s() + USAGE_S)
            await self.tell()

    async def tell(self) -> bool:
        """What is to be told goes out now; False where nothing went. A disk that refuses is told, and raises nothing."""
        async with self._turn:
            batch = self.book.cut()
            # Its rows may still stand open on the disk: told now and read anew after a crash they would count twice.
            if not await self._save() or batch is None:
                return False
            self._told = batch
            return self._tell(batch)

    def taken(self, boot: str, number: int) -> None:
        """A leader has stored this batch."""
        self.book.taken(boot, number)

    async def close(self) -> None:
        """The last batch, for as long as LAST_S, and what is left onto the disk."""
        until_s = self._machine.now_s() + LAST_S
        listens = await self.tell()
        while listens and self.book.state() != BookState() and self._machine.now_s() < until_s:
            await self._machine.sleep_until(self._machine.now_s() + AGAIN_S)
            if self.book.cut() not in (None, self._told):
                listens = await self.tell()
        async with self._turn:
            await self._save()

    async def _save(self) -> bool:
        state = self.book.state()
        if state == self._saved:
            return True
        try:
            await self._machine.run_sync(lambda: self._machine.disk.write(self._path, encode_state(state, STATE_FORMAT)))
        except OSError as err:
            if not self._failed:
                log.error("usage cannot be kept on disk; it waits in memory and is told to nobody", file=str(self._path), why=words(err))
            self._failed = True
            return False
        if self._failed:
            log.info("usage is on disk again", file=str(self._path))
        self._failed = False
        self._saved = state
        return True


def _decode(data: bytes) -> BookState:
    """Raises Invalid."""
    found = decode_state(data, BookState, STATE_FORMAT)
    fault = found.waiting.fault() if found.waiting is not None else ""
    if fault := fault or next((fault for row in found.open if (fault := row.fault())), ""):
        raise Invalid(fault)
    return found
