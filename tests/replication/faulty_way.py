"""The way to an object store, which can be told to fail: bytes pass unchanged until then, and every request gets that answer after."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

from tests.threaded_server import ThreadedServer

PIECE: Final = 65_536


class FaultyWay(ThreadedServer):
    """`fault` is what every request is answered with, b"" for a connection that is cut, None for the store's own answers."""

    def __init__(self, endpoint: str) -> None:
        where = urlsplit(endpoint)
        self._to = (where.hostname or "", where.port or 80)
        self._fault: bytes | None = None
        super().__init__()
        self.endpoint = f"http://{self.netloc}"

    @property
    def fault(self) -> bytes | None:
        return self._fault

    @fault.setter
    def fault(self, answer: bytes | None) -> None:
        with self.turn:
            self._fault = answer
            self.cut()  # connections that are kept would go on as before

    def serve(self, client: socket.socket) -> None:
        with self.turn:
            fault = self._fault
        with client:
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

    def _pass_on(self, client: socket.socket) -> None:
        with socket.create_connection(self._to) as store:
            with self.turn:
                self.open.add(store)
            back = threading.Thread(target=_copy, args=(store, client))
            back.start()
            _copy(client, store)
            back.join()
            with self.turn:
                self.open.discard(store)


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
