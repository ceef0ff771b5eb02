"""Asks an engine something beside the requests of clients, with GET, on a connection that is in no pool."""

from __future__ import annotations

from collections.abc import Callable

from llmgw.router.http1 import ResponseReader
from llmgw.router.sweeper import Waiter
from llmgw.router.upstreams import EndpointState, Upstream


class NoAnswer(Exception):
    """The engine gave no answer that is of use. `lasting`: asking again soon would change nothing."""

    def __init__(self, *, lasting: bool) -> None:
        super().__init__()
        self.lasting = lasting


async def ask(upstream: Upstream, waiter: Waiter, path: bytes, take: Callable[[bytes], None], body_max: int) -> bool:
    """Gives the body to `take` piece by piece. May the connection be used again? Raises OSError, NoAnswer."""
    upstream.waiter = waiter
    view = memoryview(_request(upstream.state, path))
    while view:
        sent = upstream.send(view)
        view = view[sent:]
        if not sent:
            await waiter.wait()
    reader, size = ResponseReader(), 0
    while not reader.complete:
        data = upstream.receive()
        if data is None:
            await waiter.wait()
            continue
        if data:
            reader.feed(data)
        else:
            reader.end()
        if reader.broken or not (data or reader.complete):
            raise NoAnswer(lasting=False)
        if reader.head_done and reader.status != 200:
            raise NoAnswer(lasting=reader.status < 500)
        body = reader.take()
        size += len(body)
        if size > body_max:
            raise NoAnswer(lasting=True)
        take(body)
    return reader.reusable


def _request(state: EndpointState, path: bytes) -> bytes:
    key = state.endpoint.key.encode("utf-8", "surrogateescape")
    rows = [
        b"GET %b%b HTTP/1.1\r\nhost: %b\r\naccept-encoding: identity\r\n" % (state.base, path, state.host_header),
        b"authorization: Bearer %b\r\n" % key if key else b"",
        b"\r\n",
    ]
    return b"".join(rows)
