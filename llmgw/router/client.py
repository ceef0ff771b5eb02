"""A client's side of the exchange: what it is sent, and how that waits for a client that reads slowly.

Everything is offered to the kernel at once; what it does not take is kept, and the engine is not read from meanwhile, so what
is kept for one client is bounded by one read. Owns: the client's socket, the head of an answer, errors in their family's shape;
and what a relay may ask of whom it relays to, which `proxy` fills in.
"""

from __future__ import annotations

import math
import socket
import ssl
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from llmgw.router import http1
from llmgw.router.exchange import Exchange
from llmgw.router.families import Problem, error_body, error_event
from llmgw.router.http1 import READ_BYTES
from llmgw.router.sweeper import Kick, Kicked, Waiter

if TYPE_CHECKING:
    from llmgw.router.relay import Relay, Verdict
    from llmgw.router.router import Router

SEND_MAX: Final = 262_144  # bytes offered to the kernel at a time of what it did not take at once
JSON: Final = b"content-type: application/json\r\n"


class Client(Waiter):
    """A client's connection as something to write to. `out` is what it has still to take of what was pushed."""

    __slots__ = ("chunked", "descriptor", "exchange", "head_sent", "out", "peer_closed", "router", "secure", "sent_bytes", "sock")

    def __init__(self, router: Router, sock: socket.socket) -> None:
        super().__init__()
        self.router = router
        self.sock = sock
        self.descriptor = sock.fileno()
        self.secure = isinstance(sock, ssl.SSLSocket)
        self.exchange: Exchange | None = None
        self.peer_closed = False
        self.head_sent = False
        self.chunked = False
        self.sent_bytes = 0
        self.out: list[memoryview] = []

    def receive(self, size: int = READ_BYTES) -> bytes | None:
        """What is there; b"" when the client has closed, None when nothing is there yet. Raises OSError."""
        try:
            return self.sock.recv(size)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None

    def push(self, data: bytes) -> bool:
        """Sends, or keeps for later. Has the kernel taken all? Raises Kicked."""
        self.sent_bytes += len(data)
        if self.out:
            self.out.append(memoryview(data))
            return False
        sent = self._offer(data)
        if sent == len(data):
            return True
        self.out.append(memoryview(data)[sent:])
        return False

    def flush(self) -> bool:
        """Sends what was kept. Is nothing left? Raises Kicked."""
        out = self.out
        while out:
            view = out[0]
            sent = self._offer(view[:SEND_MAX])
            if sent == 0:
                return False
            if sent == len(view):
                del out[0]
            else:
                out[0] = view[sent:]
        return True

    def _offer(self, data: bytes | memoryview) -> int:
        try:
            return self.sock.send(data)
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return 0
        except OSError:
            self.kicked = Kick.CLIENT_GONE
            raise Kicked(Kick.CLIENT_GONE) from None

    async def flushed(self) -> None:
        """Until the client has taken everything. Raises Kicked."""
        while self.out:
            await self.wait()

    # --- what a relay asks. No protocol: compiled, calls of a class are direct

    def set_deadline(self, after_s: float) -> None:
        """The engine's next byte must come within so many seconds."""
        raise NotImplementedError

    def first_content(self) -> None:
        """Now the client gets the engine's first content."""
        raise NotImplementedError

    def relayed(self, relay: Relay, verdict: Verdict) -> None:
        """The conversation is over: an answer that was given, whole (DONE) or broken, or a Failure that gave nothing."""
        raise NotImplementedError

    def gone(self) -> None:
        """The client is gone, and the conversation has been given up for it."""
        raise NotImplementedError

    # --- heads

    def begin_answer(self, exchange: Exchange, status: int, rows: bytes, length: int | None) -> bytes:
        """A head of ours around `rows` (header lines). `length` None: chunked coding, or the close ends the body for HTTP/1.0."""
        exchange.status = status
        if status == 204:
            framing = b""  # RFC 9110, 8.6: it has no body and says no length
        elif length is not None:
            framing = b"content-length: %d\r\n" % length
        elif exchange.head is not None and exchange.head.minor == 1:
            self.chunked = True
            framing = b"transfer-encoding: chunked\r\n"
        else:
            exchange.close_after = True
            framing = b""
        if exchange.close_after or self.router.draining:
            exchange.close_after = True
            framing += b"connection: close\r\n"
        self.head_sent = True
        if exchange.caller is not None:
            rows += self.router.told(exchange.caller, exchange)
        line = http1.status_line(status)
        return b"%b%bx-request-id: %b\r\n%b%b\r\n" % (line, rows, exchange.id, exchange.cors, framing)

    def answer(self, exchange: Exchange, status: int, rows: bytes, body: bytes) -> None:
        """A whole answer. Raises Kicked."""
        head = self.begin_answer(exchange, status, rows, len(body))
        self.push(head if exchange.without_body else head + body)

    def stream_head(self, exchange: Exchange, rows: bytes) -> bytes:
        """The head of a stream of events around the engine's header lines, b"" where it has said nothing yet."""
        rows = rows or b"content-type: text/event-stream; charset=utf-8\r\n"
        return self.begin_answer(exchange, 200, rows + b"cache-control: no-cache\r\nx-accel-buffering: no\r\n", None)

    def tell(self, exchange: Exchange, problem: Problem) -> None:
        """An error, as an answer or, once a head is out, as the stream's last event. Raises Kicked."""
        exchange.reason = exchange.reason or problem.code
        if self.head_sent:
            exchange.status = problem.status
            exchange.close_after = True
            event = error_event(problem, exchange.family)
            self.push(http1.chunk(event) + http1.LAST_CHUNK if self.chunked else event)
            return
        rows = JSON + header_lines(problem.headers)
        if problem.retry_after_s is not None:
            rows += b"retry-after: %d\r\n" % max(1, math.ceil(problem.retry_after_s))
        if problem.status == 401:
            rows += b"www-authenticate: Bearer\r\n"
        self.answer(exchange, problem.status, rows, error_body(problem, exchange.family))


def header_lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Values come from us or from a parser that has refused line breaks."""
    return b"".join([b"%b: %b\r\n" % pair for pair in headers])
