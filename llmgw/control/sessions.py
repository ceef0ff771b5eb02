"""Sessions with agents: who is connected, what comes in goes to the inventory, what is to go out waits in a bounded outbox.

One channel per node. It sees messages and no socket, and it decides nothing about replicas.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Final

import attrs
import structlog
import trio

from llmgw import __version__
from llmgw.control.event_log import EventLog
from llmgw.control.inventory import Inventory
from llmgw.control.leadership import Leadership
from llmgw.control.nodes import Nodes
from llmgw.domain.errors import Conflict, Invalid, LlmgwError, NotFound, TimedOut, Unavailable
from llmgw.domain.event import Level
from llmgw.domain.ids import NodeId, ReplicaId
from llmgw.domain.lease import FencingToken
from llmgw.domain.ports import Machine
from llmgw.protocol import messages as m
from llmgw.protocol.channel import Channel, ChannelClosed
from llmgw.protocol.side_by_side import until_one_ends

HELLO_DEADLINE_S: Final = 10.0  # a peer that says nothing for so long is no agent
SEND_DEADLINE_S: Final = 10.0  # a message that the network does not take for so long: the session is over
OUTBOX_MAX: Final = 256  # messages that wait for one agent; full means that it does not read, and the session ends
LOG_DEADLINE_S: Final = 5.0  # an answer to a look into a log
ANSWER_S: Final = 5.0  # of an agent that lives: milliseconds. Below the 10 s that a newcomer waits for its hello to be answered
CLOCK_WRONG_S: Final = 30.0  # further apart than any network explains: one of the two clocks is wrong
SILENT_AFTER_HEARTBEATS: Final = 3  # a session without a message for so many intervals is dead, whatever TCP says
log = structlog.get_logger("llmgw.sessions")


@attrs.define(eq=False)
class _Session:
    node: NodeId
    name: str
    boot_id: str
    instance: str
    channel: Channel
    outbox: trio.MemorySendChannel[m.ToAgent]
    scope: trio.CancelScope
    replaced: bool = False
    listening: trio.CancelScope | None = None
    paced: bool = False
    certified: bool = False

    def is_of(self, hello: m.AgentHello) -> bool:
        """Is it the process that says this? One that does not name its instance is taken for that of the same run of its machine."""
        if self.boot_id != hello.facts.boot_id:
            return False
        return not self.instance or not hello.instance or self.instance == hello.instance


class Sessions:
    def __init__(
        self,
        machine: Machine,
        leadership: Leadership,
        nodes: Nodes,
        inventory: Inventory,
        events: EventLog,
        heartbeat_s: Callable[[], float],
        reached_at: str = "",
    ) -> None:
        """`reached_at` is the address that this control plane is told of by, "" where it has none."""
        self._machine = machine
        self._leadership = leadership
        self._nodes = nodes
        self._inventory = inventory
        self._events = events
        self._heartbeat_s = heartbeat_s
        self._reached_at = reached_at
        self._planes: m.ControlPlanes | None = None
        self._pace_s = heartbeat_s()  # as every agent knows it
        self._sessions: dict[NodeId, _Session] = {}
        self._on_open: list[Callable[[NodeId], None]] = []
        self._on_result: list[Callable[[NodeId, m.CommandResult], None]] = []
        self._twins: dict[NodeId, tuple[str, str]] = {}  # the instances kept and turned away of which was told last
        self._log_waiters: dict[str, tuple[NodeId, trio.MemorySendChannel[m.LogChunk]]] = {}

    def on_open(self, hook: Callable[[NodeId], None]) -> None:
        self._on_open.append(hook)

    def on_result(self, hook: Callable[[NodeId, m.CommandResult], None]) -> None:
        self._on_result.append(hook)

    def connected(self) -> tuple[NodeId, ...]:
        return tuple(sorted(self._sessions))

    def name(self, node: NodeId) -> str:
        session = self._sessions.get(node)
        entry = self._inventory.entry(node)
        return session.name if session else entry.facts.name if entry else node

    def peers(self) -> Mapping[NodeId, str]:
        return {node: session.channel.peer for node, session in self._sessions.items()}

    def send_nowait(self, node: NodeId, message: m.ToAgent) -> None:
        """Into the node's outbox. Raises Unavailable when there is no session, or it no longer takes anything."""
        session = self._sessions.get(node)
        if session is None:
            raise Unavailable(f"node {self.name(node)} has no session now", code="node_not_connected")
        try:
            session.outbox.send_nowait(message)
        except (trio.WouldBlock, trio.BrokenResourceError) as err:
            session.scope.cancel()
            raise Unavailable(f"node {session.name} does not take messages", code="node_not_connected") from err

    def set_planes(self, planes: m.ControlPlanes | None) -> None:
        """What a leader tells agents of the control planes; None while this one does not lead."""
        if planes == self._planes:
            return
        self._planes = planes
        for node in list(self._sessions):
            with contextlib.suppress(Unavailable):  # the next session is told
                self.tell_planes(node)

    def tell_planes(self, node: NodeId) -> None:
        """An agent that shows the token of this machine is told nothing: another machine's control plane would not let it in by that.

        It takes them from the leader that it obeys, so after the barrier. Raises Unavailable.
        """
        session = self._sessions.get(node)
        if session is not None and session.certified and self._planes is not None:
            self.send_nowait(node, self._planes)

    def end(self, node: NodeId) -> None:
        """Lets go of a node's session, where it has one."""
        if (session := self._sessions.get(node)) is not None:
            session.scope.cancel()

    def set_pace(self) -> None:
        """The settings may name another heartbeat: every agent is told, and its silence is judged by it from here on."""
        if (pace_s := self._heartbeat_s()) == self._pace_s:
            return
        self._pace_s = pace_s
        for node, session in list(self._sessions.items()):
            with contextlib.suppress(Unavailable):  # the next session begins with it
                self.send_nowait(node, self._hello())
            session.paced = True
            if session.listening is not None:
                session.listening.cancel()

    def _hello(self) -> m.ServerHello:
        leads = self._leadership
        return m.ServerHello(leads.cluster_id, leads.owner, __version__, self._heartbeat_s(), reached_at=self._reached_at)

    async def read_log(self, replica: ReplicaId, attempt: int, offset: int, limit: int) -> m.LogChunk:
        """A part of a replica's log, from its agent. Raises NotFound, Unavailable, TimedOut."""
        found = self._inventory.find(replica)
        if found is None:
            raise NotFound(f"there is no replica {replica!r}")
        node = found[0]
        request_id = self._machine.fresh_hex(8)
        send, receive = trio.open_memory_channel[m.LogChunk](1)
        self._log_waiters[request_id] = (node, send)
        try:
            self.send_nowait(node, m.LogRequest(request_id, replica, attempt, offset, limit))
            with trio.move_on_after(LOG_DEADLINE_S):
                chunk = await receive.receive()
                if chunk.error:
                    raise NotFound(chunk.error)
                return chunk
        except trio.EndOfChannel as err:
            raise Unavailable(f"node {self.name(node)} went away", code="node_not_connected") from err
        finally:
            self._log_waiters.pop(request_id, None)
            send.close()
        raise TimedOut(f"node {self.name(node)} did not send the log within {LOG_DEADLINE_S:.0f} s")

    async def run(self, channel: Channel, certified: str = "") -> None:
        """One session, from the agent's hello to its end. Never raises for what a peer does: the channel is closed with a reason.

        `certified` is the name in the agent's certificate, which it may not exceed; "" where it came with the token of this machine.
        """
        try:
            with trio.move_on_after(HELLO_DEADLINE_S) as hello_scope:
                try:
                    hello = await channel.receive()
                except Invalid as err:
                    raise Invalid(f"{channel.peer} sent {err.message}", code=err.code) from err
            if hello_scope.cancelled_caught:
                raise Invalid(f"no AgentHello within {HELLO_DEADLINE_S:.0f} s", code="no_hello")
            if not isinstance(hello, m.AgentHello):
                raise Invalid(f"{channel.peer} sent {type(hello).__name__}, and a session begins with AgentHello", code="no_hello")
            if certified and hello.facts.name != certified:
                raise Conflict(
                    f"the certificate is of agent {certified}, and this agent calls itself {hello.facts.name}: set [agent] name to "
                    f'"{certified}", or join anew under the other name',
                    code="certificate_name",
                )
            await self._admit(hello, channel, bool(certified))
        except ChannelClosed as err:
            log.debug("session ended", peer=channel.peer, why=str(err))
        except LlmgwError as err:
            if not isinstance(err, _Twin | _Clone):  # told already, and once
                log.warning("session refused", peer=channel.peer, code=err.code, why=err.message)
            await self._part(channel, err)
        finally:
            with trio.move_on_after(2.0, shield=True):
                await channel.close()

    async def _part(self, channel: Channel, err: LlmgwError) -> None:
        final = isinstance(err, Conflict) and not isinstance(err, _Twin)
        with trio.move_on_after(2.0):
            try:
                await channel.send(m.Goodbye(err.code, err.message, final))
            except ChannelClosed:
                return
            await channel.close(1008, err.message)

    async def _admit(self, hello: m.AgentHello, channel: Channel, certified: bool) -> None:
        facts = hello.facts
        if not facts.id or not facts.name:
            raise Invalid("an agent names its node's id and name", code="malformed_message")
        if hello.protocol != m.PROTOCOL:
            raise Conflict(
                f"agent {facts.build} speaks protocol {hello.protocol}, this control plane {__version__} speaks {m.PROTOCOL}",
                code="protocol",
            )
        if hello.cluster_id not in ("", self._leadership.cluster_id):
            raise Conflict(
                f"node {facts.name} belongs to cluster {hello.cluster_id}, this is {self._leadership.cluster_id}; "
                "to move it, stop its agent, remove fence.json from the agent's data directory and start it again",
                code="foreign_cluster",
            )
        await self._check_only_one(hello, channel)
        await self._nodes.heard(facts)
        await self._check_only_one(hello, channel)  # whoever came while the store was asked
        if hello.epoch:
            self._leadership.met(hello.epoch, hello.owner)
        if (live := self._sessions.get(facts.id)) is not None:  # the same agent dialled anew before the old session's end was noticed
            self._replace(live)
        send, receive = trio.open_memory_channel[m.ToAgent](OUTBOX_MAX)
        with trio.CancelScope() as scope:
            session = _Session(facts.id, facts.name, facts.boot_id, hello.instance, channel, send, scope, certified=certified)
            self._sessions[facts.id] = session
            ahead_s = hello.wall_s - self._machine.wall_s() if hello.wall_s else 0.0
            self._inventory.opened(facts, ahead_s)
            if abs(ahead_s) > CLOCK_WRONG_S:  # logs of the two will not fit together; nothing is judged by it
                log.warning("a node's clock is not ours", node=facts.name, ahead_s=round(ahead_s))
            log.info("session opened", node=facts.name, peer=channel.peer, build=facts.build)
            send.send_nowait(self._hello())
            try:
                await self._serve(session, receive)
            finally:
                send.close()
                if self._sessions.get(facts.id) is session:
                    del self._sessions[facts.id]
                    self._inventory.closed(facts.id)
                    for node, waiter in self._log_waiters.values():
                        if node == facts.id:
                            waiter.close()
                log.info("session closed", node=facts.name, replaced=session.replaced)

    async def _check_only_one(self, hello: m.AgentHello, channel: Channel) -> None:
        """Returns when no other agent lives under this node id. Raises Conflict where one does: that one is kept.

        The process that has the session may be dead without our knowing it: its machine lost power, or the network between was
        cut. So it is asked, and only an answer keeps it. One that was killed has closed its connection, and one that dials anew
        is the same instance: neither waits. A machine that was started again waits ANSWER_S at most, far less than the silence
        after which its old session would be dead by itself. To keep the newcomer instead would let a copy of a data directory
        throw out the agent that it was made of, which supervises the engines, and be thrown out by it in turn.
        """
        while (live := self._sessions.get(hello.facts.id)) is not None and not live.replaced and not live.is_of(hello):
            if await self._answers(live):
                raise self._twice(live, hello, channel)
            if self._sessions.get(hello.facts.id) is live:
                self._replace(live)
                return

    async def _answers(self, session: _Session) -> bool:
        """Does the agent of this session live? Any agent answers a look into a log, be it that there is none."""
        request_id = self._machine.fresh_hex(8)
        send, receive = trio.open_memory_channel[m.LogChunk](1)
        self._log_waiters[request_id] = (session.node, send)
        try:
            self.send_nowait(session.node, m.LogRequest(request_id, ReplicaId("")))
            with trio.move_on_after(ANSWER_S):
                await receive.receive()
                return True
        except (trio.EndOfChannel, Unavailable):  # it has ended meanwhile
            return False
        finally:
            self._log_waiters.pop(request_id, None)
            send.close()
        return False

    def _replace(self, session: _Session) -> None:
        session.replaced = True
        session.scope.cancel()

    def _twice(self, kept: _Session, hello: m.AgentHello, channel: Channel) -> Conflict:
        """What the newcomer is told. Said here once for each two."""
        facts = hello.facts
        same_machine = kept.boot_id == facts.boot_id
        where = "on the same machine" if same_machine else "on another machine"
        if self._twins.get(facts.id) != (kept.instance, hello.instance):
            self._twins[facts.id] = (kept.instance, hello.instance)
            text = (
                f"two agents live under the id of node {kept.name}: the one at {kept.channel.peer} is kept, and the one at {channel.peer} "
                f"{where}, which calls itself {facts.name}, is turned away"
            )
            self._events.record("node.twice", f"node/{kept.name}", text, Level.WARNING)
            if not self._leadership.may_write:  # a standby's history is the log
                log.warning(text, node=kept.name)
        if same_machine:
            return _Twin(
                f"node id {facts.id} is in use by another agent {where}, at {kept.channel.peer}: this looks like a copy of its data "
                "directory; end one of the two, or give this one a data_dir of its own, empty, and start it again",
                code="node_twice",
            )
        return _Clone(
            f"node id {facts.id} is in use by {kept.name} {where}, at {kept.channel.peer}: this looks like a cloned disk; "
            "remove the node-id file in this agent's data directory and start it again",
            code="cloned_identity",
        )

    async def _serve(self, session: _Session, outbox: trio.MemoryReceiveChannel[m.ToAgent]) -> None:
        for hook in self._on_open:
            hook(session.node)
        await until_one_ends(lambda: self._send_all(session, outbox), lambda: self._receive_all(session))

    async def _send_all(self, session: _Session, outbox: trio.MemoryReceiveChannel[m.ToAgent]) -> None:
        async for message in outbox:
            with trio.move_on_after(SEND_DEADLINE_S) as scope:
                await session.channel.send(message)
            if scope.cancelled_caught:
                raise ChannelClosed(f"node {session.name} did not take a message within {SEND_DEADLINE_S:.0f} s")

    async def _receive_all(self, session: _Session) -> None:
        while True:
            silence_s = max(SILENT_AFTER_HEARTBEATS * self._heartbeat_s(), 1.0)
            with trio.move_on_after(silence_s) as scope:
                session.listening = scope
                try:
                    message = await session.channel.receive()
                except Invalid as err:  # a channel knows a peer's address, and not whose it is
                    raise Invalid(f"node {session.name} sent {err.message}", code=err.code) from err
            if scope.cancelled_caught:
                if session.paced:
                    session.paced = False
                    continue
                raise ChannelClosed(f"node {session.name} said nothing for {silence_s:.0f} s")
            self._take(session, message)
            if isinstance(message, m.Goodbye):
                return

    def _take(self, session: _Session, message: m.Message) -> None:
        node = session.node
        self._inventory.heard(node)
        match message:
            case m.Inventory():
                self._same_node(session, message.facts.id)
                obeyed = FencingToken(self._leadership.cluster_id, message.epoch, message.owner)
                if message.epoch:
                    self._leadership.met(message.epoch, message.owner)
                # A standby routes by what agents report under whoever they obey; nobody places by it.
                self._inventory.take(node, message, self._leadership.token if self._leadership.is_leader else obeyed, obeyed)
            case m.Heartbeat():
                self._same_node(session, message.facts.id)
                self._inventory.heard(node, message.facts)
                for report in message.changed:
                    self._inventory.report(node, report)
            case m.ReplicaChanged():
                self._inventory.report(node, message.report)
            case m.ReplicaForgotten():
                self._inventory.gone(node, message.replica)
            case m.CommandResult():
                for hook in self._on_result:
                    hook(node, message)
            case m.AgentEvent():
                of = f"node/{session.name}" if message.object == "node" else message.object
                self._events.record(message.kind, of, f"{session.name}: {message.text}", message.level, message.age_s)
            case m.LogChunk():
                waiter = self._log_waiters.get(message.request_id)
                if waiter is not None and waiter[0] == node:
                    with contextlib.suppress(trio.WouldBlock):  # a second answer to one question
                        waiter[1].send_nowait(message)
            case m.Goodbye():
                log.info("an agent said goodbye", node=session.name, code=message.code, text=message.text)
            case _:
                raise Invalid(f"node {session.name} sent {type(message).__name__}, which an agent does not send", code="unexpected_message")

    def _same_node(self, session: _Session, node: NodeId) -> None:
        if node != session.node:
            raise Invalid(f"the session is of node {session.node}, the message of {node}", code="unexpected_message")


class _Clone(Conflict):
    """Another machine's agent lives under the same node id."""


class _Twin(Conflict):
    """Another agent of the same machine does. It may dial again: the other may have been ended meanwhile."""
