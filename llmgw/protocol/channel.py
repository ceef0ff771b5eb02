"""The channel port: an ordered, two-way stream of messages with one peer. Sessions see this and no socket."""

from __future__ import annotations

from typing import Protocol

from llmgw.domain.errors import Unavailable
from llmgw.protocol.codec import Shared
from llmgw.protocol.messages import Message


class ChannelClosed(Unavailable):
    """The peer or the network ended the channel."""

    default_code = "channel_closed"


class Channel(Protocol):
    """`peer` is for logs. One task receives; `send` may be called from any task."""

    @property
    def peer(self) -> str: ...

    async def send(self, message: Message | Shared) -> None:
        """Raises ChannelClosed. The caller bounds the wait."""
        ...

    async def receive(self) -> Message:
        """The next message. Raises ChannelClosed at the end, `Invalid` for a malformed one (the channel stays open)."""
        ...

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """Tells the peer and lets go; never raises, may be called twice."""
        ...
