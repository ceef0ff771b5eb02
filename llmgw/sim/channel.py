"""Two ends of a channel in memory. Messages pass through the real codec, so that what cannot be sent is noticed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio

from llmgw.domain.errors import Unavailable
from llmgw.protocol.channel import Channel, ChannelClosed
from llmgw.protocol.codec import decode, encode
from llmgw.protocol.messages import Message

IN_FLIGHT_MAX = 1000  # messages on the way in one direction; a sender waits beyond it, as TCP would make it


class SimChannel:
    """One end. `closed_with` is the code and reason it was first closed with."""

    def __init__(self, peer: str, send: trio.MemorySendChannel[bytes], receive: trio.MemoryReceiveChannel[bytes]) -> None:
        self.peer = peer
        self.closed_with: tuple[int, str] | None = None
        self._send = send
        self._receive = receive

    async def send(self, message: Message) -> None:
        await self.send_bytes(encode(message))

    async def send_bytes(self, data: bytes) -> None:
        """Raw bytes, for tests of what a peer should never send."""
        try:
            await self._send.send(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as err:
            raise ChannelClosed(f"{self.peer} is gone") from err

    async def receive(self) -> Message:
        try:
            return decode(await self._receive.receive())
        except (trio.EndOfChannel, trio.ClosedResourceError) as err:
            raise ChannelClosed(f"{self.peer} is gone") from err

    async def close(self, code: int = 1000, reason: str = "") -> None:
        if self.closed_with is None:
            self.closed_with = (code, reason)
        self._send.close()
        self._receive.close()


def channel_pair(agent: str = "agent", control_plane: str = "control-plane") -> tuple[SimChannel, SimChannel]:
    """(the agent's end, the control plane's end)."""
    up_send, up_receive = trio.open_memory_channel[bytes](IN_FLIGHT_MAX)
    down_send, down_receive = trio.open_memory_channel[bytes](IN_FLIGHT_MAX)
    return SimChannel(control_plane, up_send, down_receive), SimChannel(agent, down_send, up_receive)


Accept = Callable[[SimChannel], Awaitable[None]]


class SimNetwork:
    """Connections in memory: `accepts` maps a control plane's url to what takes a new channel there.

    A url that is missing refuses the connection. Accepted channels are served in `nursery`.
    """

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self.accepts: dict[str, Accept] = {}

    @asynccontextmanager
    async def dial(self, url: str) -> AsyncIterator[Channel]:
        """An agent's `Dial`."""
        accept = self.accepts.get(url)
        if accept is None:
            raise Unavailable(f"{url} cannot be reached")
        mine, theirs = channel_pair("agent", url)
        self._nursery.start_soon(accept, theirs)
        try:
            yield mine
        finally:
            await mine.close()
