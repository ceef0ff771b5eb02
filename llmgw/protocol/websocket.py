"""The agent's end of a channel over WebSocket (trio-websocket): dial, present the token, speak messages."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final
from urllib.parse import urlsplit

import trio
import trio_websocket

from llmgw.domain.errors import Denied, Invalid, Unavailable
from llmgw.protocol.channel import Channel, ChannelClosed
from llmgw.protocol.codec import MESSAGE_BYTES_MAX, decode, encode
from llmgw.protocol.messages import Message

SESSION_PATH: Final = "/api/v1/agents/session"
CONNECT_DEADLINE_S: Final = 10.0  # a control plane that does not answer in this time is tried again later
CLOSE_DEADLINE_S: Final = 2.0


class WebSocketChannel:
    """A `Channel` over an open trio-websocket connection, which its opener closes."""

    def __init__(self, connection: trio_websocket.WebSocketConnection, peer: str) -> None:
        self._connection = connection
        self._peer = peer

    @property
    def peer(self) -> str:
        return self._peer

    async def send(self, message: Message) -> None:
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
async def dial(url: str, token: str, tls: ssl.SSLContext | None = None) -> AsyncIterator[Channel]:
    """Opens a session with the control plane at `url` (http:// or https://, as in `[agent] control_planes`).

    Proxy variables of the environment are not looked at. Raises `Invalid` for a URL that is none, `Denied` when the token
    is refused, `Unavailable` for everything else that keeps the session from opening.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise Invalid(f"not an address of a control plane: {url!r} (http://HOST:PORT or https://HOST:PORT is expected)")
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    host = parts.hostname
    peer = f"{host}:{port}"
    use_tls: bool | ssl.SSLContext = (tls or ssl.create_default_context()) if secure else False
    try:
        async with trio.open_nursery() as nursery:
            with trio.fail_after(CONNECT_DEADLINE_S):
                connection = await trio_websocket.connect_websocket(
                    nursery,
                    host,
                    port,
                    parts.path.rstrip("/") + SESSION_PATH,
                    use_ssl=use_tls,
                    extra_headers=[(b"authorization", b"Bearer " + token.encode("utf-8", "surrogateescape"))],
                    max_message_size=MESSAGE_BYTES_MAX,
                )
            try:
                yield WebSocketChannel(connection, peer)
            finally:
                with trio.move_on_after(CLOSE_DEADLINE_S, shield=True):
                    await connection.aclose()
                nursery.cancel_scope.cancel()
    except* trio_websocket.ConnectionRejected as group:
        rejected = group.exceptions[0]
        status = rejected.status_code if isinstance(rejected, trio_websocket.ConnectionRejected) else 0
        if status in (401, 403):
            raise Denied(f"{peer} refused the agent's token", code="token_refused") from group
        raise Unavailable(f"{peer} refused the session with status {status}") from group
    except* (OSError, trio.TooSlowError, trio_websocket.HandshakeError, trio.BrokenResourceError) as group:
        raise Unavailable(f"{peer} cannot be reached: {group.exceptions[0]}") from group
