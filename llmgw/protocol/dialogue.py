"""What agents and routers do alike in a session that they have dialled: greet, put up with malformed messages, part."""

from __future__ import annotations

import contextlib
import math
from typing import Final, TypeVar

import structlog
import trio

from llmgw.domain.errors import Denied, Invalid, LlmgwError, Unavailable
from llmgw.protocol.channel import Channel, ChannelClosed
from llmgw.protocol.messages import AgentHello, Goodbye, Message, ServerHello
from llmgw.protocol.router_messages import RouterHello, RouterWelcome

HELLO_LIMIT_S: Final = 10.0  # from the open channel to the control plane's answer
GOODBYE_LIMIT_S: Final = 1.0
FAULTS_MAX: Final = 10  # malformed messages in one session before it is ended: one may be a build's bug, many are an enemy
LOGGED_CHARACTERS_MAX: Final = 300  # of somebody else's text

Answer = TypeVar("Answer", ServerHello, RouterWelcome)


class TurnedAway(Denied):
    """Dialling again will not help until a person has changed something: the control plane said so, or it is another cluster's."""


class TooFar(Denied):
    """Its build and ours do not understand each other."""


async def greet(channel: Channel, hello: AgentHello | RouterHello, answer: type[Answer]) -> Answer:
    """The control plane's answer to `hello`, of our protocol or one next to it. Raises LlmgwError, TurnedAway and TooFar among them."""
    with trio.move_on_after(HELLO_LIMIT_S):
        await channel.send(hello)
        found = await channel.receive()
        if isinstance(found, Goodbye):
            raise farewell(found)
        if not isinstance(found, answer):
            raise Unavailable(f"{channel.peer} began with {type(found).__name__} and not with {answer.__name__}")
        if abs(found.protocol - hello.protocol) > 1:  # neighbouring builds understand each other, farther ones may not
            text = f"{channel.peer} speaks protocol {found.protocol}, this machine {hello.protocol}: bring their builds together"
            await part(channel, Goodbye("protocol", text))
            raise TooFar(text, code="protocol")
        return found
    raise Unavailable(f"{channel.peer} did not answer our hello within {HELLO_LIMIT_S:g} s")


async def part(channel: Channel, goodbye: Goodbye) -> None:
    """Says why we go, as far as the peer still listens."""
    with trio.move_on_after(GOODBYE_LIMIT_S, shield=True), contextlib.suppress(ChannelClosed):
        await channel.send(goodbye)


def farewell(goodbye: Goodbye) -> LlmgwError:
    """What a goodbye of the control plane means here."""
    text = f"{goodbye.text[:LOGGED_CHARACTERS_MAX]} ({goodbye.code[:LOGGED_CHARACTERS_MAX]})"
    return TurnedAway(text, code=goodbye.code) if goodbye.final else Unavailable(text, code=goodbye.code)


class Incoming:
    """The messages of one session. A control plane that says nothing for `silent_limit_s` is dead to us, whatever TCP says."""

    def __init__(self, channel: Channel, log: structlog.stdlib.BoundLogger, silent_limit_s: float = math.inf) -> None:
        self._channel = channel
        self._log = log
        self._silent_limit_s = silent_limit_s
        self._faults = 0

    async def next(self) -> Message:
        """The next one that can be understood. Raises LlmgwError when the session is over."""
        peer = self._channel.peer
        while True:
            try:
                with trio.move_on_after(self._silent_limit_s) as limit:
                    message = await self._channel.receive()
                if limit.cancelled_caught:
                    raise Unavailable(f"{peer} said nothing for {self._silent_limit_s:g} s")
            except Invalid as err:
                self._faults += 1
                self._log.warning("a message that cannot be understood", peer=peer, why=err.message[:LOGGED_CHARACTERS_MAX])
                if self._faults >= FAULTS_MAX:
                    raise Unavailable(f"{peer} sent {self._faults} messages that cannot be understood") from err
                continue
            if isinstance(message, Goodbye):
                raise farewell(message)
            return message
