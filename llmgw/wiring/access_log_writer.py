"""Writes the access log to standard output without ever holding up a request, or a process that ends."""

from __future__ import annotations

import os
import queue
import select
import threading
from collections.abc import Iterator
from typing import Final

from llmgw.domain.ports import Machine

LOG_FLUSH_S: Final = 0.1  # how long a line may wait for others; one write for many keeps the cost per request low
LOG_END_S: Final = 1.0  # how long the end of the process waits for a reader of its last lines; it must not hang on one
LOG_BYTES_MAX: Final = 8 * 1024 * 1024  # kept while nobody reads standard output; beyond it lines are dropped and counted
PIECE_BYTES_MAX: Final = select.PIPE_BUF  # what a pipe takes as one, whoever else writes to it


class LogWriter:
    """Writes access-log lines to a descriptor from a thread of its own, in blocks.

    A reader that does not read holds up no request, and not the end of the process either: the thread is a daemon, because a
    write that blocks for ever can be neither cancelled nor waited for. `shared`: other processes write to the same descriptor, so
    that it is written in pieces of whole lines that the kernel takes in one.
    """

    def __init__(self, descriptor: int, *, shared: bool = False) -> None:
        self._descriptor = descriptor
        self._shared = shared
        self._lines: list[bytes] = []
        self._size = 0
        self._blocks: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._thread: threading.Thread | None = None
        self.dropped = 0

    def write(self, line: bytes) -> None:
        """Takes a line; it is written within LOG_FLUSH_S."""
        if self._size + len(line) > LOG_BYTES_MAX:
            self.dropped += 1
            return
        self._lines.append(line)
        self._size += len(line)

    def _hand_over(self) -> None:
        """Gives the thread what has gathered. One block at a time: while it writes, lines gather here, where they are counted."""
        if not self._lines or not self._idle.is_set():
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_forever, name="access-log", daemon=True)
            self._thread.start()
        self._idle.clear()
        self._blocks.put(b"".join(self._lines))
        self._lines.clear()
        self._size = 0

    def _write_forever(self) -> None:
        while True:
            block = self._blocks.get()
            for piece in whole_lines(block, PIECE_BYTES_MAX) if self._shared else (block,):
                view = memoryview(piece)
                try:
                    while view:
                        view = view[os.write(self._descriptor, view) :]
                except OSError:
                    self.dropped += bytes(view).count(b"\n")  # a closed output ends the writing, never the router
            self._idle.set()

    async def run(self, machine: Machine) -> None:
        """Until cancelled."""
        while True:
            await machine.sleep_until(machine.now_s() + LOG_FLUSH_S)
            self._hand_over()

    def flush(self) -> None:
        """The last lines, at the end of the process; waits at most LOG_END_S for the reader."""
        for _ in range(2):  # what is being written, then what has gathered meanwhile
            if not self._idle.wait(LOG_END_S):
                return
            self._hand_over()
        self._idle.wait(LOG_END_S)


def whole_lines(block: bytes, size_max: int) -> Iterator[bytes]:
    """The lines of a block in pieces of at most so many bytes; a line that is longer is a piece by itself."""
    start = 0
    while start < len(block):
        if len(block) - start <= size_max:
            end = len(block)
        else:
            end = block.rfind(b"\n", start, start + size_max) + 1 or block.find(b"\n", start) + 1 or len(block)
        yield block[start:end]
        start = end
