"""The WebSocket end of sessions, agents' and (in `routers`) routers': who it is first, then messages for `control`, as a `Channel`.

Whatever one peer sends, nobody else notices: a malformed or oversized message ends its own session with a reason.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import structlog
import trio

from llmgw.admin.door import Door
from llmgw.admin.edge import Receive, Scope, Send, answer
from llmgw.admin.errors import body_of, headers_of
from llmgw.domain.errors import LlmgwError, Unavailable
from llmgw.domain.identity import MachineRole, Presented
from llmgw.protocol.channel import Channel, ChannelClosed
from llmgw.protocol.codec import Shared, decode, encode
from llmgw.protocol.messages import Message

CLOSE_DEADLINE_S: Final = 2.0  # for the peer's own close frame after ours
REASON_BYTES_MAX: Final = 120  # a close frame holds 123
GOING_AWAY: Final = 1001
POLICY_VIOLATION: Final = 1008
log = structlog.get_logger("llmgw.admin")
Run = Callable[[Channel, str], Awaitable[None]]


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


def make_sessions_app(run: Run, door: Door, role: MachineRole, draining: trio.Event) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """The ASGI application of a sessions' path, for machines that have joined as `role`.

    `run` serves one session; it is told the name that the peer's certificate holds it to, "" of one that came with the token.
    """

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        client = scope.get("client") or ("local", 0)
        peer = f"[{client[0]}]:{client[1]}" if ":" in str(client[0]) else f"{client[0]}:{client[1]}"
        refused: LlmgwError | None = None
        shown: Presented | None = None
        try:
            shown = door.admit(scope, role)
            if draining.is_set():
                refused = Unavailable("this control plane is stopping", retry_after_s=1.0, code="shutting_down")
        except LlmgwError as err:
            refused = err
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
            if shown is not None:
                nursery.start_soon(_end_when_revoked, channel, door, shown, role, nursery.cancel_scope)
            await run(channel, shown.identity.name if shown is not None else "")
            nursery.cancel_scope.cancel()

    return serve


async def _end_when_revoked(channel: ServerChannel, door: Door, shown: Presented, role: MachineRole, scope: trio.CancelScope) -> None:
    while (fault := door.certificates.refusal(shown, role)) is None:
        await door.certificates.changed.wait()
    log.warning("a session ends: its peer may not have it any more", who=role.value, peer=channel.peer, code=fault[0], why=fault[1])
    await channel.close(POLICY_VIOLATION, fault[1])
    scope.cancel()


async def _end_when_draining(channel: ServerChannel, draining: trio.Event, scope: trio.CancelScope) -> Any:
    await draining.wait()
    await channel.close(GOING_AWAY, "this control plane is stopping")
    scope.cancel()
