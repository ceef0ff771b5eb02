"""One client connection of the admin port: Hypercorn's HTTP/1.1 and WebSocket, with what we want of a connection around them.

Here stand the answers to what was found by running the stack: no HTTP/2 by the back door, an error that the parser finds is
JSON like any other, a peer that stops reading is let go, an answer is not lost because the client is still sending, and a
draining server says so. It knows no route.
"""

from __future__ import annotations

import contextlib
import json
import math
from io import BytesIO, StringIO
from typing import Any, Final, cast

import h11
import structlog
import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.events import EndBody, Response
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.h11 import H11Protocol, H11WSConnection
from hypercorn.protocol.ws_stream import WebsocketBuffer, WSStream
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.worker_context import TrioSingleTask, WorkerContext
from hypercorn.typing import AppWrapper, ConnectionState
from hypercorn.utils import parse_socket_addr
from wsproto.events import Message, TextMessage

from llmgw.admin.door import PRESENTED, Told
from llmgw.admin.errors import error_body
from llmgw.admin.limits import Limits
from llmgw.domain.identity import Presented
from llmgw.identity.trust import PLAIN_TEXT, is_plain_text, presented, refusal

Stream = trio.SocketStream | trio.SSLStream[trio.SocketStream]

ABNORMAL_CLOSURE: Final = 1006  # RFC 6455, 7.4.1: no close frame was seen
READ_BYTES: Final = 65_536  # of one read: as much as a socket usually has
# What h11 may hold of an unfinished head. Far above the limit that we apply ourselves, so that it is ours that decides and the
# same request does not pass or fail by how it was cut into segments.
HEAD_BYTES_UNFINISHED_MAX: Final = 262_144
# States of a client (None: of a WebSocket) in which closing at once could reset the connection under our own last words.
_STILL_SENDING: Final = (h11.SEND_BODY, h11.ERROR, None)
_PARSER_SAYS: Final = {
    400: ("malformed_request", "this is not a valid HTTP/1.1 request"),
    431: ("header_too_large", "the request's headers are too large"),
    501: ("not_implemented", "this transfer encoding is not supported; use chunked or Content-Length"),
}


_TLS_BODY: Final = json.dumps(error_body("invalid", "tls_needed", "this port speaks TLS: https:// is asked for")).encode()
_TLS_NEEDED: Final = b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (
    len(_TLS_BODY),
    _TLS_BODY,
)
log = structlog.get_logger("llmgw.admin")


class _LastRequest(h11.Connection):
    """What follows a request that ends the connection is not looked at: it must not spoil the answer that is under way."""

    def next_event(self) -> Any:
        return h11.NEED_DATA if self.their_state is h11.MUST_CLOSE else super().next_event()


class Http1(H11Protocol):
    """Hypercorn's protocol with our refusals and errors."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.connection = _LastRequest(h11.SERVER, max_incomplete_event_size=self.config.h11_max_incomplete_size)

    async def stream_send(self, event: StreamEvent) -> None:
        if isinstance(event, Response) and event.status_code >= 200 and self.context.terminated.is_set():
            event = Response(event.stream_id, [*event.headers, (b"connection", b"close")], event.status_code)
        await super().stream_send(event)
        if isinstance(event, EndBody) and isinstance(self.connection, H11WSConnection):
            await self.send(Closed())  # a handshake that was refused: nothing comes after the answer

    async def _check_protocol(self, event: h11.Request) -> None:
        """HTTP/2 is not spoken here: an upgrade to it is passed over (RFC 9110, 7.8), its preface is refused as a request."""

    async def _create_stream(self, request: h11.Request) -> None:
        await super()._create_stream(request)
        if isinstance(self.stream, WSStream):
            self.stream.buffer = _BoundedBuffer(self.config.websocket_max_message_size)

    async def _close_stream(self) -> None:
        stream = self.stream
        # Frames before the handshake's answer make Hypercorn refuse it over the head of whoever serves the session.
        untold = isinstance(stream, WSStream) and stream.closed
        await super()._close_stream()
        if untold and isinstance(stream, WSStream) and stream.app_put is not None:
            await stream.app_put({"type": "websocket.disconnect", "code": ABNORMAL_CLOSURE})

    async def _send_h11_event(self, event: Any) -> None:
        try:
            data = self.connection.send(event)
        except h11.LocalProtocolError:  # the peer's bytes have broken the exchange: no answer fits any more
            await self.send(Closed())
        else:
            await self.send(RawData(data=data))

    async def _send_error_response(self, status_code: int) -> None:
        code, message = _PARSER_SAYS.get(status_code, _PARSER_SAYS[400])
        body = json.dumps(error_body("invalid", code, message)).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
            *self.config.response_headers("h11"),
        ]
        whole = b""
        try:
            for event in (h11.Response(status_code=status_code, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                whole += cast(h11.Connection, self.connection).send(event) or b""
        except h11.LocalProtocolError:
            return  # an answer is under way already
        await self.send(RawData(data=whole))  # at once: an answer that the application begins meanwhile comes too late


class _BoundedBuffer(WebsocketBuffer):
    """Keeps one byte above the limit and drops the rest: who decodes the message finds it too large and says so to the peer."""

    def extend(self, event: Message[Any]) -> None:
        if self.value is None:
            self.value = StringIO() if isinstance(event, TextMessage) else BytesIO()
        self.length += cast(Any, self.value).write(event.data[: max(0, self.max_length + 1 - self.length)])


class Connection:
    """Serves one accepted stream from its first byte to its last. `run` never raises for what a client does."""

    def __init__(self, app: AppWrapper, config: Config, context: WorkerContext, limits: Limits, stream: Stream, told: Told) -> None:
        self._app = app
        self._config = config
        self._context = context
        self._limits = limits
        self._stream = stream
        self._told = told
        self._protocol: Http1
        self._tasks: TaskGroup
        self._idle = TrioSingleTask()
        self._send_turn = trio.Lock()
        self._closing = False
        self._handling = trio.CancelScope()
        self._reader = trio.lowlevel.current_task()  # the task that makes a connection also runs it
        self._ended = trio.Event()  # nothing more comes from the client

    async def run(self) -> None:
        try:
            transport = await self._handshake()
            if transport is None:
                return
            client = parse_socket_addr(transport.family, transport.getpeername())
            server = parse_socket_addr(transport.family, transport.getsockname())
            async with TaskGroup() as self._tasks:
                self._protocol = Http1(
                    self._app,
                    self._config,
                    cast(Any, self._context),
                    self._tasks,
                    ConnectionState(cast(Any, {PRESENTED: self._shown()})),
                    isinstance(self._stream, trio.SSLStream),
                    client,
                    server,
                    self._take,
                )
                await self._idle.restart(self._tasks, self._close_when_idle)
                await self._read_all()
        except* OSError:
            pass  # the peer went away between two of our steps
        finally:
            await trio.aclose_forcefully(self._stream)

    async def _handshake(self) -> trio.socket.SocketType | None:
        if not isinstance(self._stream, trio.SSLStream):
            return self._stream.socket
        try:
            with trio.fail_after(self._limits.handshake_s):
                await self._stream.do_handshake()
        except (trio.BrokenResourceError, trio.TooSlowError) as err:
            await self._refuse(err, self._stream.transport_stream)
            return None
        return self._stream.transport_stream.socket

    async def _refuse(self, err: Exception, transport: trio.SocketStream) -> None:
        """Says why, here and, where TLS does not, to the peer. A client that does not trust us is no news: it has said so to its user."""
        plain = is_plain_text(err)
        fault = (PLAIN_TEXT, "it speaks plain HTTP, and this port speaks TLS: https://") if plain else refusal(err)
        if fault is None:
            return
        try:
            host, port = parse_socket_addr(transport.socket.family, transport.socket.getpeername()) or ("local", 0)
        except OSError:
            return
        if self._told.is_news(host, fault[0]):
            why = fault[1] if plain else f"its certificate {fault[1]}"
            log.warning("a peer was refused", who="any", peer=f"{host}:{port}", code=fault[0], why=why)
        # What TLS has to say of the refusal: OpenSSL has made it, and trio leaves it in its buffer. The peer would know nothing.
        alert = getattr(self._stream, "_outgoing", None)
        last_words = _TLS_NEEDED if plain else alert.read() if alert is not None else b""
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError), trio.move_on_after(self._limits.linger_s):
            await transport.send_all(last_words)
            await transport.send_eof()
            while await transport.receive_some(READ_BYTES):  # to its end, so that our words are not lost to a reset
                pass

    def _shown(self) -> Presented | None:
        if not isinstance(self._stream, trio.SSLStream):
            return None
        return presented(self._stream.getpeercert(), self._stream.getpeercert(binary_form=True))

    async def _take(self, event: Event) -> None:
        """What the protocol wants of the connection: bytes out, an end, or the idle timer."""
        if isinstance(event, RawData):
            await self._send(event.data)
        elif isinstance(event, Closed):
            if trio.lowlevel.current_task() is self._reader and self._protocol.connection.our_state is h11.SEND_BODY:
                return  # what follows the request is no HTTP: the answer that is under way is finished first, and its end closes
            await self._close()
            await self._protocol.handle(Closed())
            self._handling.cancel()  # where it was the reader that closed: it reads on, and handles nothing more
        elif isinstance(event, Updated):
            if event.idle and not self._ended.is_set():
                await self._idle.restart(self._tasks, self._close_when_idle)
            else:
                await self._idle.stop()

    async def _send(self, data: bytes) -> None:
        """Shielded, so that half a frame never goes out, and bounded, so that a peer who does not read cannot hold us."""
        taken = False
        async with self._send_turn:
            if self._closing:
                return
            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                with trio.move_on_after(self._limits.send_stall_s, shield=True):
                    await self._stream.send_all(data)
                    taken = True
        if not taken:
            self._closing = True
            self._free_reader()
            await trio.aclose_forcefully(self._stream)
            await self._protocol.handle(Closed())

    async def _read_all(self) -> None:
        while True:
            try:
                data = await self._stream.receive_some(READ_BYTES)
            except (trio.ClosedResourceError, trio.BrokenResourceError):
                break
            if self._closing:  # our answer is out and the end announced: what still comes is of no interest
                if not data:
                    break
                continue
            with trio.CancelScope() as self._handling:
                await self._protocol.handle(RawData(bytes(data)))
            if not data:
                break
        self._ended.set()
        await self._idle.stop()
        await self._protocol.handle(Closed())

    async def _close(self) -> None:
        """Says that nothing more comes from us; a client that is still sending is let finish."""
        if self._closing:
            return
        self._closing = True
        self._free_reader()
        async with self._send_turn:
            if isinstance(self._stream, trio.SocketStream):
                with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError):  # it is gone already
                    await self._stream.send_eof()
        if self._protocol.connection.their_state in _STILL_SENDING:
            self._tasks.spawn(self._linger)
        else:
            await trio.aclose_forcefully(self._stream)

    def _free_reader(self) -> None:
        """A request that was pipelined behind the last answer holds up the reader for a turn that never comes."""
        if trio.lowlevel.current_task() is not self._reader:
            self._handling.cancel()

    async def _linger(self) -> None:
        with trio.move_on_after(self._limits.linger_s):
            await self._ended.wait()
        await trio.aclose_forcefully(self._stream)

    async def _close_when_idle(self) -> None:
        with trio.move_on_after(self._config.keep_alive_timeout):
            await self._context.terminated.wait()
        await self._protocol.handle(Closed())
        await trio.aclose_forcefully(self._stream)


def hypercorn_config(limits: Limits, message_bytes_max: int) -> Config:
    """Every default that matters set on purpose; nothing is logged by Hypercorn itself."""
    config = Config()
    config.accesslog = None
    config.errorlog = None
    config.include_server_header = False
    config.h11_max_incomplete_size = HEAD_BYTES_UNFINISHED_MAX
    config.keep_alive_timeout = cast(Any, limits.keep_alive_s)
    config.keep_alive_max_requests = cast(Any, math.inf)
    config.websocket_max_message_size = message_bytes_max
    return config
