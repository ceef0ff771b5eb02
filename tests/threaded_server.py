"""A server of tests on loopback: a thread for each connection, all of which end with it."""

from __future__ import annotations

import contextlib
import socket
import threading
from abc import ABC, abstractmethod
from typing import Final

JOIN_S_MAX: Final = 10.0


class ThreadedServer(ABC):
    """Listens from its making, which is the last thing a subclass does, until `close`. `turn` guards what threads share."""

    def __init__(self) -> None:
        self.turn = threading.Condition()
        self.open: set[socket.socket] = set()
        self._closed = False
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.netloc = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @abstractmethod
    def serve(self, one: socket.socket) -> None:
        """One connection, to its end, in a thread of its own. OSError ends it."""

    def cut(self) -> None:
        """Ends every connection."""
        with self.turn:
            for one in self.open:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self.turn:
            self._closed = True
            self.cut()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(JOIN_S_MAX)
            assert not thread.is_alive()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                one, _ = self._listener.accept()
            except OSError:
                return
            with self.turn:
                if self._closed:
                    one.close()
                    return
                self.open.add(one)
                thread = threading.Thread(target=self._serve, args=(one,))
                self._threads.append(thread)
            thread.start()

    def _serve(self, one: socket.socket) -> None:
        with contextlib.suppress(OSError):
            self.serve(one)
        with self.turn:
            self.open.discard(one)
