"""The WebSocket end of sessions, agents' and (in `routers`) routers': token first, then messages for `control`, as a `Channel`.

Whatever one peer sends, nobody else notices: a malformed or oversized message ends its own session with a reason.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import structlog
import trio

from llmgw.admin.auth import FailureLimit, is_token
from llmgw.admin.edge import Receive, Scope, Send, answer
from llmgw.admin.errors import body_of, headers_of
from llmgw.domain.errors import LlmgwError, Unauthenticated, Unavailable
from llmgw.protocol.channel import Channel, ChannelClosed
from llmgw.protocol.codec import Shared, decode, encode
from llmgw.protocol.messages import Message

CLOSE_DEADLINE_S: Final = 2.0  # for the peer's own close frame after ours
REASON_BYTES_MAX: Final = 120  # a close frame holds 123
GOING_AWAY: Final = 1001
log = structlog.get_logger("llmgw.admin")


class ServerChannel:
    """A `Channel` over an accepted ASGI WebSocket, which whoever accepted it ends."""

    def __init__(self, receive: Receive, send: Send, peer: str) -> None:
        self._receive = receive
        self._send = send
        self._peer = peer
        self._over = False  # the peer is gone, or we have said goodbye
        self._turn = trio.Lock()

    @property
    def peer(self) -> str:
        return self._peer

    async def send(self, message: Message | Shared) -> None:
        data = encode(message)
        async with self._turn:
            if self._over:
                raise ChannelClosed(f"the session with {self._peer} is over")
            await self._send({"type": "websocket.send", "bytes": data, "text": None})

    async def receive(self) -> Message:
        if self._over:
            raise ChannelClosed(f"the session with {self._peer} is over")
        event = await self._receive()
        if event["type"] != "websocket.receive":
            self._over = True
            raise ChannelClosed(f"{self._peer} closed the session")
        data = event.get("bytes")
        if data is None:
            data = (event.get("text") or "").encode("utf-8", "surrogatepass")
        return decode(data)

    async def close(self, code: int = 1000, reason: str = "") -> None:
        with trio.move_on_after(CLOSE_DEADLINE_S):
            async with self._turn:
                if self._over:
                    return
                self._over = True
                short = reason.encode()[:REASON_BYTES_MAX].decode("utf-8", "ignore")
                await self._send({"type": "websocket.close", "code": code, "reason": short})
            while (await self._receive())["type"] == "websocket.receive":
                pass  # sent before it saw our close: read, so that the connection ends in order


def make_agents_app(
    run: Callable[[Channel], Awaitable[None]], token: Callable[[], str], failures: FailureLimit, draining: trio.Event, who: str = "agent"
) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """The ASGI application of a sessions' path. `run` serves one session; `token` is what a peer, called `who`, has to present."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        client = scope.get("client") or ("local", 0)
        peer = f"[{client[0]}]:{client[1]}" if ":" in str(client[0]) else f"{client[0]}:{client[1]}"
        refused: LlmgwError | None = None
        if not is_token(scope["headers"], token()):
            log.warning("a peer without the right token was refused", who=who, peer=peer)
            refused = Unauthenticated(f"the {who}'s token is not valid here", code="token_invalid")
            try:
                failures.failed(str(client[0]))
            except LlmgwError as err:
                refused = err
        elif draining.is_set():
            refused = Unavailable("this control plane is stopping", retry_after_s=1.0, code="shutting_down")
        if refused is not None:
            extra = [(name.lower().encode(), value.encode()) for name, value in headers_of(refused).items()]
            await answer(scope, receive, send, refused.status, body_of(refused), extra)
            return
        if (await receive())["type"] != "websocket.connect":
            return
        await send({"type": "websocket.accept", "subprotocol": None, "headers": []})
        channel = ServerChannel(receive, send, peer)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_end_when_draining, channel, draining, nursery.cancel_scope)
            await run(channel)
            nursery.cancel_scope.cancel()

    return serve


async def _end_when_draining(channel: ServerChannel, draining: trio.Event, scope: trio.CancelScope) -> Any:
    await draining.wait()
    await channel.close(GOING_AWAY, "this control plane is stopping")
    scope.cancel()
