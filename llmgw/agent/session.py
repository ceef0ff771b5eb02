"""The agent's sessions: one with every control plane it knows, the same reports to all, obedience to one by the fence.

What a control plane sends is checked here: malformed, foreign or stale, it ends in an answer or the end of that session,
and disturbs nothing else.
"""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Final, Protocol

import attrs
import structlog
import trio

from llmgw.agent import fence as fence_file
from llmgw.agent.fence import Fence
from llmgw.agent.supervisor import Replicas
from llmgw.domain import lease
from llmgw.domain.errors import Denied, LlmgwError, Unavailable
from llmgw.domain.files import unusable, words
from llmgw.domain.ids import CommandId, ReplicaId
from llmgw.domain.lease import FencingToken
from llmgw.domain.node import NodeFacts
from llmgw.domain.ports import Machine
from llmgw.domain.replica import ReplicaReport
from llmgw.protocol.channel import Channel
from llmgw.protocol.dialogue import Incoming, TurnedAway, greet, part
from llmgw.protocol.losses import Loss
from llmgw.protocol.messages import (
    AgentEvent,
    AgentHello,
    Command,
    CommandResult,
    ControlPlanes,
    EngineSeen,
    ForgetReplica,
    FromAgent,
    Goodbye,
    Heartbeat,
    Inventory,
    LeaderHello,
    LogRequest,
    Message,
    Order,
    Outcome,
    ReplicaChanged,
    ReplicaForgotten,
    RestartReplica,
    ServerHello,
    StartReplica,
    StopReplica,
)
from llmgw.protocol.planes import dialled, remembered, without_second_names
from llmgw.protocol.side_by_side import until_one_ends

log = structlog.get_logger("llmgw.agent.session")

RECONNECT_S_MAX: Final = 10.0  # full jitter over it (agent.md 1)
RECONNECT_S_FIRST: Final = 1.0  # the window doubles from here: one restart of a server is over in seconds
FOREIGN_AGAIN_S: Final = 60.0  # another cluster answers at this address until a person changes something
SEND_LIMIT_S: Final = 10.0  # a control plane that takes nothing for so long is dead to us; the next session tells all
HEARTBEAT_S_MIN: Final = 0.2
HEARTBEAT_S_MAX: Final = 60.0
OUTBOX_MAX: Final = 4096  # messages waiting for one control plane; full: the session ends, and a new inventory tells all
RESULTS_MAX: Final = 10_000  # results of commands that are remembered: hours of a busy cluster, 2 MB
EVENTS_MAX: Final = 500  # events kept while no leader listens; the oldest go first
INSTANCE_BYTES: Final = 8
PLANES_FILE: Final = "control-planes.json"

Dial = Callable[[str], AbstractAsyncContextManager[Channel]]


class Facts(Protocol):
    """Says what there is to say of the node now."""

    def __call__(self) -> NodeFacts: ...


@attrs.define
class _Open:
    """One open session: what is still to be sent, and what was last told of each replica."""

    send: trio.MemorySendChannel[FromAgent]
    scope: trio.CancelScope
    heartbeat_s: float
    resting: trio.CancelScope | None = None  # until the next heartbeat
    told: dict[ReplicaId, ReplicaReport] = attrs.field(factory=dict)


@attrs.frozen
class _Kept:
    event: AgentEvent
    at_s: float


class Sessions:
    """Every session of this agent. One instance; `run` must be running for anything to happen."""

    def __init__(
        self,
        machine: Machine,
        fence: Fence,
        replicas: Callable[[], Replicas],
        facts: Facts,
        dial: Dial,
        *,
        folder: Path,
        control_planes: tuple[str, ...],
    ) -> None:
        """`control_planes` are the configured addresses; those pushed later are kept in `folder` and dialled too.

        `replicas` is asked at each use: it and the sessions know each other.
        """
        self._machine = machine
        self._instance = machine.fresh_hex(INSTANCE_BYTES)
        self._fence = fence
        self._replicas = replicas
        self._facts = facts
        self._dial = dial
        self._planes_path = folder / PLANES_FILE
        self._configured = control_planes
        self._remembered: tuple[str, ...] = ()
        self._stored: tuple[str, ...] = ()
        self._reached_at: dict[str, str] = {}  # what each address that answered has said of itself
        self._open: list[_Open] = []
        self._dialling: dict[str, trio.CancelScope] = {}
        self._nursery: trio.Nursery | None = None
        # Admission and execution are one step: else a command could be admitted, wait, and run after a higher epoch was met.
        self._executing = trio.Lock()
        self._results: OrderedDict[CommandId, CommandResult] = OrderedDict()
        self._events: deque[_Kept] = deque(maxlen=EVENTS_MAX)
        self._generation = 0
        self._leader: _Open | None = None

    async def run(self) -> None:
        """Keeps a session with every control plane until cancelled."""
        cluster, urls = await self._machine.run_sync(lambda: stored_planes(self._machine, self._planes_path.parent))
        if cluster == self._fence.highest.cluster_id:  # an agent that was moved forgets those of the cluster before
            self._remembered = self._stored = urls
        async with trio.open_nursery() as nursery:
            self._nursery = nursery  # a pushed list of control planes starts and ends tasks here
            self._dial_exactly()
            await self._machine.sleep_until(float("inf"))

    # --- what the supervisor tells

    def changed(self, report: ReplicaReport) -> None:
        """Goes to every control plane at once."""
        for session in self._open:
            session.told[report.order.id] = report
            self._put(session, ReplicaChanged(report))

    def event(self, event: AgentEvent) -> None:
        """Goes to the leader, now or when there is one."""
        self._events.append(_Kept(event, self._machine.now_s()))
        self._send_events()

    # --- one control plane

    async def _keep(self, url: str, scope: trio.CancelScope) -> None:
        """Dials again and again, with full jitter, until told not to."""
        window_s = RECONNECT_S_FIRST
        loss = Loss()
        with scope:
            while True:
                opened_s = self._machine.now_s()
                wait_s: float | None = None
                ended: LlmgwError | None = None
                try:
                    async with self._dial(url) as channel:
                        await self._converse(channel, url, loss)
                except TurnedAway as err:
                    log.error("turned away: this control plane is not dialled again until the agent is restarted", url=url, why=err.message)
                    return
                except _Foreign as err:
                    ended, wait_s = err, FOREIGN_AGAIN_S
                except LlmgwError as err:
                    ended = err
                if self._machine.now_s() - opened_s > RECONNECT_S_MAX:
                    window_s = RECONNECT_S_FIRST  # it had worked
                if loss.is_news(ended):
                    log.warning("no session with this control plane", url=url, why=ended.message if ended else "the session ended")
                await self._machine.sleep_until(self._machine.now_s() + (wait_s or self._machine.rng.uniform(0.0, window_s)))
                window_s = min(window_s * 2, RECONNECT_S_MAX)

    async def _converse(self, channel: Channel, url: str, loss: Loss) -> None:
        """One session from hello to end; a `loss` before it is over once both have agreed to hold it.

        Raises LlmgwError for every end that is not a cancel.
        """
        highest = self._fence.highest
        first = AgentHello(
            self._facts(), highest.cluster_id, highest.epoch, highest.owner, wall_s=self._machine.wall_s(), instance=self._instance
        )
        hello = await greet(channel, first, ServerHello)
        try:
            ours = await self._fence.pin(hello.cluster_id)
        except OSError as err:
            raise unusable(err, fence_file.WHAT, self._fence.path) from err
        if not ours:
            text = f"this node belongs to cluster {self._fence.highest.cluster_id}, and {url} is of cluster {hello.cluster_id}"
            await part(channel, Goodbye("foreign_cluster", text, final=True))
            raise _Foreign(
                f"{text}. To move the node, stop its agent, remove {self._fence.path} and start it again", code="foreign_cluster"
            )
        loss.over()
        await self._meet(url, hello.reached_at)
        log.info("session open", url=url, cluster=hello.cluster_id, server=hello.owner, build=hello.build)
        send, outbox = trio.open_memory_channel[FromAgent](OUTBOX_MAX)
        ours_to_end = True
        with trio.CancelScope() as scope:
            session = _Open(send, scope, _bounded(hello.heartbeat_s))
            self._open.append(session)
            try:
                # Warm, unasked: a standby routes by it, nobody places by it. The leader's hello is answered with another.
                self._put(session, self._inventory(session))
                await until_one_ends(
                    lambda: self._write(channel, outbox),
                    lambda: self._beat(session),
                    lambda: self._listen(channel, session),
                )
            except LlmgwError:
                ours_to_end = False
                raise
            finally:
                self._open.remove(session)
                if self._leader is session:
                    self._leader = None
                if ours_to_end:
                    await part(channel, Goodbye("session_ends", "the agent ends this session"))
        raise Unavailable("the control plane does not take messages as fast as they come")

    async def _write(self, channel: Channel, outbox: trio.MemoryReceiveChannel[FromAgent]) -> None:
        async for message in outbox:
            with trio.move_on_after(SEND_LIMIT_S) as limit:
                await channel.send(message)
            if limit.cancelled_caught:
                raise Unavailable(f"{channel.peer} took no message for {SEND_LIMIT_S:g} s")

    async def _beat(self, session: _Open) -> None:
        while True:
            with trio.CancelScope() as session.resting:
                await self._machine.sleep_until(self._machine.now_s() + session.heartbeat_s)
            if session.resting.cancelled_caught:
                continue  # another pace holds from here on
            changed = tuple(report for report in self._replicas().reports() if _still(report) != _still(session.told.get(report.order.id)))
            session.told.update({report.order.id: report for report in changed})
            self._put(session, Heartbeat(self._facts(), changed))

    async def _listen(self, channel: Channel, session: _Open) -> None:
        incoming = Incoming(channel, log)
        while True:
            await self._take(await incoming.next(), session, channel.peer)

    async def _take(self, message: Message, session: _Open, peer: str) -> None:
        match message:
            case LeaderHello(token):
                await self._follow(token, session, peer)
            case Command():
                self._put(session, await self._obey(message))
            case EngineSeen(token):
                if await self._admit(token) is lease.Fence.OBEY:
                    self._replicas().seen(message)
            case LogRequest():
                self._put(session, await self._replicas().log(message))
            case ControlPlanes():
                if session is self._leader:
                    self._remembered = remembered(self._remembered, message)
                    await self._use_planes()
            case ServerHello():  # said again when the settings have changed
                session.heartbeat_s = _bounded(message.heartbeat_s)
                if session.resting is not None:
                    session.resting.cancel()
            case _:
                log.warning("a message that is not for an agent", peer=peer, type=type(message).__name__)

    # --- under the fence

    async def _follow(self, token: FencingToken, session: _Open, peer: str) -> None:
        """The barrier: the token is on disk first, then a full inventory names it. A stale leader gets the higher one's name."""
        async with self._executing:
            met = self._fence.highest
            verdict = await self._admit(token)
            if verdict is lease.Fence.FOREIGN:
                log.warning("a leader of another cluster is not obeyed", peer=peer, cluster=token.cluster_id)
                return
            if verdict is lease.Fence.OBEY:
                if self._leader is not session:
                    log.info("obeys a leader", peer=peer, owner=token.owner, epoch=token.epoch)
                self._leader = session
                if met.epoch != token.epoch:  # the others learn whom we obey, the deposed one among them
                    for other in self._open:
                        if other is not session:
                            self._put(other, self._inventory(other))
            else:
                highest = self._fence.highest
                log.warning("a stale leader is not obeyed", peer=peer, epoch=token.epoch, highest=highest.epoch, owner=highest.owner)
            self._put(session, self._inventory(session))
        self._send_events()

    async def _admit(self, token: FencingToken) -> lease.Fence:
        """As the fence says. Raises `Unavailable` when a higher token cannot be put on disk: nothing under it is obeyed then."""
        try:
            return await self._fence.admit(token)
        except OSError as err:
            raise Unavailable(f"the epoch cannot be stored on this node's disk: {words(err)}", code="disk") from err

    async def _obey(self, command: Command) -> CommandResult:
        async with self._executing:
            highest = self._fence.highest
            try:
                verdict = await self._admit(command.token)
            except Unavailable as err:  # not remembered: the same command may be sent again once the disk takes it
                log.error("a command is refused", code=err.code, why=err.message)
                return CommandResult(command.command_id, Outcome.REFUSED, err.code, err.message, highest.epoch, highest.owner)
            highest = self._fence.highest
            result = CommandResult(command.command_id, Outcome.DONE, epoch=highest.epoch, owner=highest.owner)
            if verdict is lease.Fence.FOREIGN:
                return attrs.evolve(
                    result, outcome=Outcome.FOREIGN, code="foreign_cluster", text=f"this node belongs to cluster {highest.cluster_id}"
                )
            if verdict is lease.Fence.STALE:
                log.warning("a stale command is refused", epoch=command.token.epoch, owner=command.token.owner, highest=highest.epoch)
                text = f"epoch {command.token.epoch} of {command.token.owner}: this node obeys epoch {highest.epoch} of {highest.owner}"
                return attrs.evolve(result, outcome=Outcome.STALE, code="stale_epoch", text=text)
            known = self._results.get(command.command_id)
            if known is not None:
                return known
            try:
                await self._execute(command.order)
            except LlmgwError as err:
                log.warning("a command is refused", order=type(command.order).__name__, code=err.code, why=err.message)
                result = attrs.evolve(result, outcome=Outcome.REFUSED, code=err.code, text=err.message)
            except OSError as err:
                log.error("a command could not be carried out", order=type(command.order).__name__, error=words(err))
                result = attrs.evolve(result, outcome=Outcome.REFUSED, code="disk", text=words(err))
            self._generation = max(self._generation, command.generation)
            self._results[command.command_id] = result
            if len(self._results) > RESULTS_MAX:
                self._results.popitem(last=False)
            return result

    async def _execute(self, order: Order) -> None:
        """Begins what the order asks for. Raises LlmgwError when it is refused."""
        replicas = self._replicas()
        match order:
            case StartReplica(wanted):
                await replicas.start(wanted)
            case StopReplica(replica, why, grace_s):
                replicas.stop(replica, why, grace_s)
            case RestartReplica(replica, why):
                replicas.restart(replica, why)
            case ForgetReplica(replica):
                await replicas.forget(replica)
                for session in self._open:
                    session.told.pop(replica, None)
                    self._put(session, ReplicaForgotten(replica))

    # --- bits

    def _put(self, session: _Open, message: FromAgent) -> None:
        try:
            session.send.send_nowait(message)
        except trio.WouldBlock:
            session.scope.cancel()

    def _inventory(self, session: _Open) -> Inventory:
        reports = self._replicas().reports()
        session.told = {report.order.id: report for report in reports}
        highest = self._fence.highest
        return Inventory(self._facts(), reports, highest.epoch, highest.owner, self._generation)

    def _send_events(self) -> None:
        leader = self._leader
        while leader is not None and self._events:
            kept = self._events.popleft()
            self._put(leader, attrs.evolve(kept.event, age_s=max(0.0, self._machine.now_s() - kept.at_s)))

    def _dial_exactly(self) -> None:
        """One task for each address, none for another. One that was turned away for good is not dialled again."""
        wanted = dialled(self._configured, self._remembered, self._reached_at)
        for url in [url for url in self._dialling if url not in wanted]:
            self._dialling.pop(url).cancel()
        for url in wanted:
            if url not in self._dialling and self._nursery is not None:
                self._dialling[url] = scope = trio.CancelScope()
                self._nursery.start_soon(self._keep, url, scope)

    async def _meet(self, url: str, reached_at: str) -> None:
        """Whoever answers there has another name beside it: by that one it is not dialled again, where it would end this session."""
        if reached_at and self._reached_at.get(url) != reached_at:
            self._reached_at[url] = reached_at
            await self._use_planes()

    async def _use_planes(self) -> None:
        """What is known of control planes is kept on disk and dialled; the configured addresses always stay."""
        kept = without_second_names(self._configured, self._remembered, self._reached_at)
        if kept != self._stored:
            log.info("other control planes are known", control_planes=list(kept))
            data = json.dumps({"cluster_id": self._fence.highest.cluster_id, "control_planes": kept}).encode()
            try:
                await self._machine.run_sync(lambda: self._machine.disk.write(self._planes_path, data))
                self._stored = kept
            except OSError as err:
                log.error("the list of control planes cannot be stored", file=str(self._planes_path), error=words(err))
        self._dial_exactly()


def stored_planes(machine: Machine, folder: Path) -> tuple[str, tuple[str, ...]]:
    """(cluster, the control planes that its leader told the agent with this data directory of, beside those of its file). Blocking."""
    path = folder / PLANES_FILE
    try:
        data = machine.disk.read(path)
        found = json.loads(data) if data else {"cluster_id": "", "control_planes": []}
        return str(found["cluster_id"]), tuple(str(url) for url in found["control_planes"])
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as err:
        why = words(err) if isinstance(err, OSError) else "it is not the JSON that an agent writes"
        log.warning("the stored list of control planes cannot be used; those of [agent] are dialled", file=str(path), why=why)
        return "", ()


class _Foreign(Denied):
    """It is another cluster's."""


def _bounded(heartbeat_s: float) -> float:
    return min(max(heartbeat_s, HEARTBEAT_S_MIN), HEARTBEAT_S_MAX)


def _still(report: ReplicaReport | None) -> ReplicaReport | None:
    """The report without what changes by itself."""
    return attrs.evolve(report, age_s=0.0) if report is not None else None
