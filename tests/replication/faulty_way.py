"""The way to an object store, which can be told to fail: bytes pass unchanged until then, and every request gets that answer after."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

JOIN_S_MAX: Final = 10.0
PIECE: Final = 65_536


class FaultyWay:
    """`fault` is what every request is answered with, b"" for a connection that is cut, None for the store's own answers."""

    def __init__(self, endpoint: str) -> None:
        where = urlsplit(endpoint)
        self._to = (where.hostname or "", where.port or 80)
        self._fault: bytes | None = None
        self._turn = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = False
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def fault(self) -> bytes | None:
        return self._fault

    @fault.setter
    def fault(self, answer: bytes | None) -> None:
        with self._turn:
            self._fault = answer
            self._cut()  # connections that are kept would go on as before

    def close(self) -> None:
        with self._turn:
            self._closed = True
            self._cut()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(JOIN_S_MAX)
            assert not thread.is_alive()
        self._listener.close()

    def _cut(self) -> None:
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._turn:
                if self._closed:
                    client.close()
                    return
                self._open.add(client)
                fault = self._fault
                thread = threading.Thread(target=self._serve, args=(client, fault))
                self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket, fault: bytes | None) -> None:
        with client, contextlib.suppress(OSError):
            if fault is None:
                self._pass_on(client)
            elif fault:
                head = b""
                while b"\r\n\r\n" not in head and (piece := client.recv(PIECE)):
                    head += piece
                client.sendall(fault)
                client.shutdown(socket.SHUT_WR)
                while client.recv(PIECE):  # its body; a close with unread bytes would cut the answer
                    pass
        with self._turn:
            self._open.discard(client)

    def _pass_on(self, client: socket.socket) -> None:
        with socket.create_connection(self._to) as store:
            with self._turn:
                self._open.add(store)
            back = threading.Thread(target=_copy, args=(store, client))
            back.start()
            _copy(client, store)
            back.join()
            with self._turn:
                self._open.discard(store)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(PIECE):
            target.sendall(piece)
    for one in (source, target):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def faulty_way(endpoint: str) -> Iterator[FaultyWay]:
    way = FaultyWay(endpoint)
    try:
        yield way
    finally:
        way.close()
