"""The dialling end of a channel over WebSocket (trio-websocket), agents' and routers': present the token, speak messages."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, cast
from urllib.parse import urlsplit

import trio
import trio_websocket

from llmgw.domain.errors import Denied, Invalid, Unavailable
from llmgw.identity.trust import Trust, refusal, refused, wrong_server
from llmgw.protocol.channel import Channel, ChannelClosed
from llmgw.protocol.codec import MESSAGE_BYTES_MAX, Shared, decode, encode
from llmgw.protocol.messages import Message

SESSION_PATH: Final = "/api/v1/agents/session"
ROUTER_SESSION_PATH: Final = "/api/v1/routers/session"
CONNECT_DEADLINE_S: Final = 10.0  # a control plane that does not answer in this time is tried again later
CLOSE_DEADLINE_S: Final = 2.0
RECEIVE_BYTES: Final = 65536
SAID_MAX: Final = 300  # characters of the peer's own words
# A machine that is gone is noticed in about 20 s: below the 30 s after which the other side calls us lost.
KEEPALIVE_IDLE_S: Final = 10
KEEPALIVE_INTERVAL_S: Final = 3
KEEPALIVE_PROBES: Final = 3


class WebSocketChannel:
    """A `Channel` over an open trio-websocket connection, which its opener closes."""

    def __init__(self, connection: trio_websocket.WebSocketConnection, peer: str) -> None:
        self._connection = connection
        self._peer = peer

    @property
    def peer(self) -> str:
        return self._peer

    async def send(self, message: Message | Shared) -> None:
        try:
            await self._connection.send_message(encode(message))
        except trio_websocket.ConnectionClosed as err:
            raise ChannelClosed(f"{self._peer} closed the session: {_why(err)}") from err

    async def receive(self) -> Message:
        try:
            data = await self._connection.get_message()
        except trio_websocket.ConnectionClosed as err:
            raise ChannelClosed(f"{self._peer} closed the session: {_why(err)}") from err
        return decode(data.encode() if isinstance(data, str) else data)

    async def close(self, code: int = 1000, reason: str = "") -> None:
        with trio.move_on_after(CLOSE_DEADLINE_S):
            await self._connection.aclose(code, reason[:120])  # a close frame's reason is bounded by 123 bytes


def _why(err: trio_websocket.ConnectionClosed) -> str:
    reason = err.reason
    if reason is None:
        return "connection lost"
    return str(reason.reason or reason.name or reason.code)


@asynccontextmanager
async def dial(url: str, token: str, trust: Trust | None = None, path: str = SESSION_PATH) -> AsyncIterator[Channel]:
    """Opens a session with the control plane at `url` (http:// or https://, as in `[agent] control_planes`), at `path` of it.

    `token` is "" for one whose certificate, in `trust`, says who it is. Proxy variables of the environment are not looked at.
    Raises `Invalid` for a URL that is none, `Denied` when the token or the certificate is refused, `Unavailable` for everything else
    that keeps the session from opening.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise Invalid(f"not an address of a control plane: {url!r} (http://HOST:PORT or https://HOST:PORT is expected)")
    secure = parts.scheme == "https"
    try:
        port = parts.port or (443 if secure else 80)
    except ValueError as err:
        raise Invalid(f"not an address of a control plane: {url!r} (the port must be a number from 1 to 65535)") from err
    host = parts.hostname
    peer = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    headers = [(b"authorization", b"Bearer " + token.encode("utf-8", "surrogateescape"))] if token else []
    raised: list[Exception] = []
    stream: trio.SocketStream | _Stream | None = None
    try:
        async with trio.open_nursery() as nursery:
            with trio.fail_after(CONNECT_DEADLINE_S) as opening:
                plain = await trio.open_tcp_stream(host, port)
                _notice_a_dead_peer(plain.socket)
                stream = plain
                if secure:
                    context = (trust or Trust(system=True)).client()
                    secured = trio.SSLStream(plain, context, server_hostname=host, https_compatible=True)
                    stream = _Stream(secured, opening)
                    await secured.do_handshake()  # the library would wait for its own deadline when this fails inside it
                    if why := wrong_server(secured.getpeercert()):
                        raise Denied(f"{peer} {why}", code="certificate_role")
                connection = await trio_websocket.wrap_client_stream(
                    nursery,
                    cast(trio.SocketStream, stream),  # it needs nothing but a stream
                    peer,
                    parts.path.rstrip("/") + path,
                    extra_headers=headers,
                    max_message_size=MESSAGE_BYTES_MAX,
                    receive_buffer_size=RECEIVE_BYTES,
                )
            try:
                yield WebSocketChannel(connection, peer)
            except Exception as err:  # kept out of the nursery's group: the caller raised it and knows it by its type
                raised.append(err)
            finally:
                with trio.move_on_after(CLOSE_DEADLINE_S, shield=True):
                    await connection.aclose()
                nursery.cancel_scope.cancel()
    # The caller's own errors are kept apart above. What is left is the network's, or the library's about a peer that speaks
    # something else, for which it has no type of its own: a stray answer ends in an error of its HTTP parser.
    except* Exception as group:
        # What is raised in this block would come out in a group again. TLS 1.3 tells of a refused certificate when we first read,
        # inside the library, which says of it only that the connection is gone.
        raised.append(_refusal(peer, _failure_of(stream) or _first(group)))
    finally:
        if stream is not None:
            with trio.CancelScope(shield=True):  # only lets go; does not wait for the peer
                await trio.aclose_forcefully(stream)
    if raised:
        raise raised[0]


class _Stream(trio.abc.Stream):
    """A connection under TLS as the library sees it. Keeps the error in which it broke, which may be the peer's refusal of us, and ends
    `opening` by it: the library would wait for an answer. `transport` is closed with it."""

    def __init__(self, transport: trio.SSLStream[trio.SocketStream], opening: trio.CancelScope) -> None:
        self._transport = transport
        self._opening = opening
        self.failure: trio.BrokenResourceError | None = None

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._transport.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._transport.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        try:
            return bytes(await self._transport.receive_some(max_bytes))
        except trio.BrokenResourceError as err:
            self.failure = err
            self._opening.cancel()
            raise

    async def aclose(self) -> None:
        await self._transport.aclose()


def _failure_of(stream: object) -> trio.BrokenResourceError | None:
    return stream.failure if isinstance(stream, _Stream) else None


def _refusal(peer: str, why: BaseException) -> Denied | Unavailable:
    """What it means that a session did not open, or broke outside the caller's code."""
    if isinstance(why, Denied):
        return why
    if isinstance(why, trio_websocket.ConnectionRejected):
        error: Denied | Unavailable = Unavailable(f"{peer} refused the session with status {why.status_code}")
        code, said = _told(why.body)
        if code == "tls_needed":
            error = Unavailable(f"{peer} speaks TLS, and is dialled without: https:// is asked for", code=code)
        elif why.status_code in (401, 403) and code.startswith("certificate_"):
            error = Denied(f"{peer} refuses this machine: {said}", code=code)
        elif why.status_code in (401, 403):
            error = Denied(f"{peer} refused the agent's token", code="token_refused")
    elif isinstance(why, trio.TooSlowError):
        error = Unavailable(f"{peer} did not answer within {CONNECT_DEADLINE_S:g} s")
    elif (fault := refusal(why)) is not None:
        error = Unavailable(f"{peer} shows a certificate that {fault[1]}", code="certificate")
    elif (fault := refused(why)) is not None:
        error = Denied(f"{peer} refuses this machine: {fault[1]}", code=fault[0])
    else:
        told = str(why) or str(why.__cause__ or "") or type(why).__name__
        error = Unavailable(f"{peer} cannot be reached: {told}")
    error.__cause__ = why
    return error


def _told(body: bytes | None) -> tuple[str, str]:
    """(code, message) of an error of the admin API, ("", "") for anything else."""
    try:
        error = json.loads(body or b"{}")["error"]
        return str(error["code"]), str(error["message"])[:SAID_MAX]
    except (ValueError, KeyError, TypeError, RecursionError):
        return "", ""


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Nurseries may nest groups in groups; the first plain exception tells the story."""
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found


def _notice_a_dead_peer(socket: trio.socket.SocketType) -> None:
    """Makes the kernel end the connection when the peer's machine is gone: neither idle nor in mid-send do we wait for ever."""
    socket.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_KEEPALIVE, 1)
    for option, value in (
        (trio.socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S),
        (trio.socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S),
        (trio.socket.TCP_KEEPCNT, KEEPALIVE_PROBES),
        (trio.socket.TCP_USER_TIMEOUT, KEEPALIVE_IDLE_S * 2 * 1000),
    ):
        socket.setsockopt(trio.socket.IPPROTO_TCP, option, value)
