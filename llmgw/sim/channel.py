"""Two ends of a channel in memory, and a network of them. Messages pass through the real codec, so that what cannot be sent is
noticed. A frozen or killed process neither sends nor takes anything; a link that holds what is sent delivers it later.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import attrs
import trio

from llmgw.domain.errors import Unavailable
from llmgw.protocol.channel import Channel, ChannelClosed
from llmgw.protocol.codec import Shared, decode, encode
from llmgw.protocol.messages import Message
from llmgw.sim.machine import SimMachine

IN_FLIGHT_MAX = 1000  # messages on the way in one direction; a sender waits beyond it, as TCP would make it
Watch = Callable[[str, str, Message], None]  # (who sent it, to whom, what)


class Link:
    """The way between two processes. While it `holds`, nothing arrives in either direction, and nobody is told. A message that it
    `loses` never arrives, and those after it do."""

    def __init__(self) -> None:
        self.holds = False
        self.loses: Callable[[Message], bool] = lambda message: False
        self._open = trio.Event()

    def hold(self) -> None:
        self.holds = True

    def open(self) -> None:
        self.holds = False
        self._open.set()
        self._open = trio.Event()

    async def wait_open(self) -> None:
        while self.holds:
            await self._open.wait()


@attrs.define(eq=False)
class Wire:
    """What a test may do to a channel and see of it: its link, and who watches what leaves and what arrives."""

    link: Link = attrs.Factory(Link)
    left: Watch = lambda sender, receiver, message: None
    arrived: Watch = lambda sender, receiver, message: None


class SimChannel:
    """One end. `closed_with` is the code and reason it was first closed with. `machine` is that of its own process."""

    def __init__(
        self,
        peer: str,
        send: trio.MemorySendChannel[bytes],
        receive: trio.MemoryReceiveChannel[bytes],
        own: str = "",
        machine: SimMachine | None = None,
        wire: Wire | None = None,
    ) -> None:
        self.peer = peer
        self.closed_with: tuple[int, str] | None = None
        self._send = send
        self._receive = receive
        self._own = own
        self._machine = machine
        self._wire = wire

    async def send(self, message: Message | Shared) -> None:
        data = encode(message)
        if self._machine is not None:
            await self._machine.running()
        if self._wire is not None:
            said = message.message if isinstance(message, Shared) else message
            self._wire.left(self._own, self.peer, said)
            if self._wire.link.loses(said):
                return
        await self.send_bytes(data)

    async def send_bytes(self, data: bytes) -> None:
        """Raw bytes, for tests of what a peer should never send."""
        try:
            await self._send.send(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as err:
            raise ChannelClosed(f"{self.peer} is gone") from err

    async def receive(self) -> Message:
        try:
            data = await self._receive.receive()
            if self._wire is not None:
                await self._wire.link.wait_open()
        except (trio.EndOfChannel, trio.ClosedResourceError) as err:
            raise ChannelClosed(f"{self.peer} is gone") from err
        if self._machine is not None:
            await self._machine.running()
        message = decode(data)
        if self._wire is not None:
            self._wire.arrived(self.peer, self._own, message)
        return message

    async def close(self, code: int = 1000, reason: str = "") -> None:
        if self._machine is not None and self._machine.killed:
            return  # the kernel closes what it had; see `SimNetwork.break_off`
        self.close_now(code, reason)

    def close_now(self, code: int = 1000, reason: str = "") -> None:
        if self.closed_with is None:
            self.closed_with = (code, reason)
        self._send.close()
        self._receive.close()


def channel_pair(
    agent: str = "agent",
    control_plane: str = "control-plane",
    machines: tuple[SimMachine | None, SimMachine | None] = (None, None),
    wire: Wire | None = None,
) -> tuple[SimChannel, SimChannel]:
    """(the agent's end, the control plane's end); `machines` in the same order."""
    up_send, up_receive = trio.open_memory_channel[bytes](IN_FLIGHT_MAX)
    down_send, down_receive = trio.open_memory_channel[bytes](IN_FLIGHT_MAX)
    return (
        SimChannel(control_plane, up_send, down_receive, agent, machines[0], wire),
        SimChannel(agent, down_send, up_receive, control_plane, machines[1], wire),
    )


Accept = Callable[[SimChannel], Awaitable[None]]
Dial = Callable[[str], AbstractAsyncContextManager[Channel]]


@attrs.define(eq=False)
class _Open:
    client: str
    url: str
    ends: tuple[SimChannel, SimChannel]


class SimNetwork:
    """Connections in memory: `accepts` maps a url to what takes a new channel there, `machines` to whose process that is.

    A url that is missing refuses the connection. Accepted channels are served in `nursery`. `left` and `arrived` are told of
    every message as it leaves and as it is taken.
    """

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._open: list[_Open] = []
        self._links: dict[tuple[str, str], Link] = {}
        self.accepts: dict[str, Accept] = {}
        self.machines: dict[str, SimMachine] = {}
        self.left: Watch = lambda sender, receiver, message: None
        self.arrived: Watch = lambda sender, receiver, message: None

    def link(self, client: str, url: str) -> Link:
        return self._links.setdefault((client, url), Link())

    def dialler(self, client: str = "agent", machine: SimMachine | None = None) -> Dial:
        """An agent's or a router's `Dial`."""

        @asynccontextmanager
        async def dial(url: str) -> AsyncIterator[Channel]:
            if machine is not None:
                await machine.running()
            link = self.link(client, url)
            await link.wait_open()
            accept = self.accepts.get(url)
            if accept is None:
                raise Unavailable(f"{url} cannot be reached")
            wire = Wire(link, self.left, self.arrived)
            opened = _Open(client, url, channel_pair(client, url, (machine, self.machines.get(url)), wire))
            self._open.append(opened)
            mine, theirs = opened.ends
            self._nursery.start_soon(accept, theirs)
            try:
                yield mine
            finally:
                self._open.remove(opened)
                await mine.close()

        return dial

    def dial(self, url: str) -> AbstractAsyncContextManager[Channel]:
        """As an agent without a machine of its own."""
        return self.dialler()(url)

    def break_off(self, who: str) -> None:
        """The process `who` (a client's name or a url) is gone: the kernel closes its connections, and both sides notice."""
        for opened in list(self._open):
            if who in (opened.client, opened.url):
                for end in opened.ends:
                    end.close_now()
