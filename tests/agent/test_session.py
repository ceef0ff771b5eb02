"""The agent's side of a session: fence, barrier, known commands, pin, odd messages, reconnects. In memory, on a mock clock."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import attrs
import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from llmgw.agent.fence import FILE, Fence, Rule
from llmgw.agent.session import PLANES_FILE, RECONNECT_S_MAX, Sessions
from llmgw.domain import lease
from llmgw.domain.errors import Conflict, Invalid, NotFound, Unavailable
from llmgw.domain.ids import ClusterId, CommandId, NodeId, OwnerId, ReplicaId
from llmgw.domain.lease import FencingToken
from llmgw.domain.node import Device, NodeFacts
from llmgw.domain.replica import ReplicaOrder, ReplicaReport, ReplicaState
from llmgw.protocol.channel import Channel, ChannelClosed
from llmgw.protocol.messages import (
    AgentEvent,
    AgentHello,
    Command,
    CommandResult,
    ControlPlanes,
    EngineSeen,
    ForgetReplica,
    Goodbye,
    Heartbeat,
    Inventory,
    LeaderHello,
    LogChunk,
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
from llmgw.sim.channel import SimChannel, channel_pair
from llmgw.sim.machine import SimMachine
from tests.agent.harness import order

FOLDER = Path("/agent")
CLUSTER = ClusterId("cluster-1")
M = TypeVar("M", bound=Message)
M1 = ReplicaId("m1-00000001")


def token(epoch: int, owner: str = "ctl-a", cluster: str = CLUSTER) -> FencingToken:
    return FencingToken(ClusterId(cluster), epoch, OwnerId(owner))


class Fake:
    """Replicas that only note what was asked of them."""

    def __init__(self) -> None:
        self.asked: list[object] = []
        self.current: dict[ReplicaId, ReplicaReport] = {}
        self.refuse: Exception | None = None
        self.on_start: Callable[[], None] = lambda: None

    def reports(self) -> tuple[ReplicaReport, ...]:
        return tuple(self.current.values())

    def devices(self) -> tuple[Device, ...]:
        return ()

    async def start(self, order: ReplicaOrder) -> None:
        self.on_start()
        await trio.lowlevel.checkpoint()
        if self.refuse:
            raise self.refuse
        self.asked.append(("start", order.id))

    def stop(self, replica: ReplicaId, why: str, grace_s: float) -> None:
        if self.refuse:
            raise self.refuse
        self.asked.append(("stop", replica))

    def restart(self, replica: ReplicaId, why: str) -> None:
        self.asked.append(("restart", replica))

    async def forget(self, replica: ReplicaId) -> None:
        self.asked.append(("forget", replica))

    def seen(self, seen: EngineSeen) -> None:
        self.asked.append(("seen", seen.in_flight))

    async def log(self, request: LogRequest) -> LogChunk:
        return LogChunk(request.request_id, 1, 0, 4, "text")


class World:
    """One agent's sessions and the control planes' ends of their channels."""

    def __init__(self, rule: Rule = lease.fence) -> None:
        self.machine = SimMachine(1)
        self.replicas = Fake()
        self.rule = rule
        self.dialled: list[tuple[str, float]] = []
        self.unreachable: set[str] = set()
        self._arrivals: dict[str, tuple[trio.MemorySendChannel[SimChannel], trio.MemoryReceiveChannel[SimChannel]]] = {}

    def make(self, *planes: str) -> Sessions:
        self.fence = Fence(self.machine, FOLDER, self.rule)
        facts = NodeFacts(NodeId("node-1"), "n1", "machine", "boot", "0.1.0")
        self.sessions = Sessions(
            self.machine,
            self.fence,
            lambda: self.replicas,
            lambda: facts,
            self._dial,
            folder=FOLDER,
            control_planes=planes or ("http://a:1",),
        )
        return self.sessions

    @asynccontextmanager
    async def _dial(self, url: str) -> AsyncIterator[Channel]:
        self.dialled.append((url, self.machine.now_s()))
        if url in self.unreachable:
            raise Unavailable(f"{url} cannot be reached")
        ours, theirs = channel_pair()
        self._mailbox(url)[0].send_nowait(theirs)
        try:
            yield ours
        finally:
            await ours.close()

    def _mailbox(self, url: str) -> tuple[trio.MemorySendChannel[SimChannel], trio.MemoryReceiveChannel[SimChannel]]:
        if url not in self._arrivals:
            self._arrivals[url] = trio.open_memory_channel[SimChannel](100)
        return self._arrivals[url]

    async def arrival(self, url: str = "http://a:1") -> SimChannel:
        """The control plane's end of the next session with it."""
        return await self._mailbox(url)[1].receive()

    async def hello(
        self, url: str = "http://a:1", cluster: str = CLUSTER, heartbeat_s: float = 10.0, reached_at: str = ""
    ) -> tuple[SimChannel, AgentHello, Inventory]:
        """A session after the hellos and the warm inventory."""
        end = await self.arrival(url)
        greeting = await end.receive()
        assert isinstance(greeting, AgentHello)
        await end.send(ServerHello(ClusterId(cluster), OwnerId("ctl-a"), "0.1.0", heartbeat_s, reached_at=reached_at))
        warm = await end.receive()
        assert isinstance(warm, Inventory)
        return end, greeting, warm

    async def lead(self, end: SimChannel, by: FencingToken) -> Inventory:
        await end.send(LeaderHello(by))
        return await receive(end, Inventory)

    def stored(self) -> FencingToken:
        data = json.loads(self.machine.disk.files[FOLDER / FILE])
        return token(data["epoch"], data["owner"], data["cluster_id"])


async def receive(end: SimChannel, kind: type[M]) -> M:
    """The next message of that kind; heartbeats and the like between are passed over."""
    with trio.fail_after(1000):
        while True:
            message = await end.receive()
            if isinstance(message, kind):
                return message


@asynccontextmanager
async def running(world: World, *planes: str) -> AsyncIterator[World]:
    sessions = world.make(*planes)
    await world.fence.load()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sessions.run)
        yield world
        nursery.cancel_scope.cancel()


async def command(end: SimChannel, by: FencingToken, what: Order, command_id: str = "c1") -> CommandResult:
    await end.send(Command(by, CommandId(command_id), 7, what))
    return await receive(end, CommandResult)


STOP = StopReplica(M1, "why", 1.0)


async def test_a_leader_is_answered_with_an_inventory_that_names_it_after_its_token_is_on_disk(autojump_clock: object) -> None:
    async with running(World()) as world:
        end, greeting, warm = await world.hello()
        assert (greeting.epoch, greeting.owner, warm.epoch) == (0, "", 0)
        on_disk: list[FencingToken] = []
        world.replicas.reports = lambda: on_disk.append(world.stored()) or ()  # type: ignore[method-assign,func-returns-value]
        answer = await world.lead(end, token(3))
        assert (answer.epoch, answer.owner) == (3, "ctl-a")
        assert on_disk == [token(3)]


async def test_a_command_of_the_leader_is_carried_out_and_answered(autojump_clock: object) -> None:
    async with running(World()) as world:
        end, _, _ = await world.hello()
        await world.lead(end, token(3))
        result = await command(end, token(3), StartReplica(order()))
        assert (result.outcome, result.epoch, result.owner) == (Outcome.DONE, 3, "ctl-a")
        assert world.replicas.asked == [("start", M1)]


async def test_a_deposed_leaders_stop_is_refused_with_the_highest_epoch_met(autojump_clock: object) -> None:
    async with running(World()) as world:
        end, _, _ = await world.hello()
        await world.lead(end, token(3))
        await world.lead(end, token(4, "ctl-b"))
        result = await command(end, token(3), STOP)
        assert (result.outcome, result.epoch, result.owner) == (Outcome.STALE, 4, "ctl-b")
        assert world.replicas.asked == []


async def test_without_the_fence_a_deposed_leaders_stop_would_be_obeyed(autojump_clock: object) -> None:
    """The rule above matters: with it taken out of the one place that applies it, the harm is done."""
    async with running(World(rule=lambda highest, given: lease.Fence.OBEY)) as world:
        end, _, _ = await world.hello()
        await world.lead(end, token(4, "ctl-b"))
        result = await command(end, token(3), STOP)
        assert result.outcome is Outcome.DONE
        assert world.replicas.asked == [("stop", M1)]


async def test_an_equal_epoch_of_another_owner_is_refused(autojump_clock: object) -> None:
    async with running(World()) as world:
        end, _, _ = await world.hello()
        await world.lead(end, token(4))
        result = await command(end, token(4, "ctl-b"), STOP)
        assert (result.outcome, result.owner) == (Outcome.STALE, "ctl-a")


async def test_a_higher_epoch_in_a_command_is_on_disk_before_it_is_carried_out(autojump_clock: object) -> None:
    async with running(World()) as world:
        end, _, _ = await world.hello()
        await world.lead(end, token(3))
        on_disk: list[FencingToken] = []
        world.replicas.on_start = lambda: on_disk.append(world.stored())
        await command(end, token(9, "ctl-b"), StartReplica(order()))
        assert on_disk == [token(9, "ctl-b")]


async def test_a_disk_that_does_not_take_the_epoch_means_that_nothing_is_carried_out(autojump_clock: object) -> None:
    async with running(World()) as world:
        end, _, _ = await world.hello()
        await world.lead(end, token(3))
        world.machine.disk.fail = OSError(28, "No space left on device")
        result = await command(end, token(4), STOP)
        assert (result.outcome, result.code) == (Outcome.REFUSED, "disk")
        assert world.replicas.asked == []
        world.machine.disk.fail = None
        assert (await command(end, token(4), STOP)).outcome is Outcome.DONE


async def test_a_restarted_agent_has_not_forgotten_the_epoch(autojump_clock: object) -> None:
    world = World()
    async with running(world):
        end, _, _ = await world.hello()
        await world.lead(end, token(5))
    async with running(world):
        end, greeting, _ = await world.hello()
        assert (greeting.cluster_id, greeting.epoch, greeting.owner) == (CLUSTER, 5, "ctl-a")
        assert (await command(end, token(4), STOP)).outcome is Outcome.STALE


async def test_a_token_file_that_is_broken_keeps_the_agent_from_starting() -> None:
    machine = SimMachine(1)
    for data in (b"", b"{", b"[]", b'{"epoch": "x"}'):
        machine.disk.files[FOLDER / FILE] = data
        with pytest.raises(Invalid, match=rf"{FILE} cannot be understood, .*; if this node is to join anew, move it away"):
            await Fence(machine, FOLDER).load()


async def test_a_command_of_another_cluster_is_refused_as_foreign(autojump_clock: object) -> None:
    async with running(World()) as world:
        end, _, _ = await world.hello()
        await world.lead(end, token(3))
        result = await command(end, token(99, cluster="cluster-2"), STOP)
        assert result.outcome is Outcome.FOREIGN
        assert world.stored() == token(3)


async def test_a_control_plane_of_another_cluster_gets_a_goodbye_and_is_tried_again_later(autojump_clock: object) -> None:
    world = World()
    async with running(world):
        await world.hello()
    async with running(world):
        end = await world.arrival()
        await end.receive()
        with capture_logs() as logged:
            await end.send(ServerHello(ClusterId("cluster-2"), OwnerId("x"), "0.1.0"))
            goodbye = await end.receive()
            again = await world.arrival()
        assert isinstance(goodbye, Goodbye)
        assert goodbye.code == "foreign_cluster"
        assert CLUSTER in goodbye.text
        assert isinstance(await again.receive(), AgentHello)
        (why,) = [line["why"] for line in logged if line["event"] == "no session with this control plane"]
        assert f"To move the node, stop its agent, remove {FOLDER / FILE} and start it again" in why


async def test_a_lost_control_plane_is_one_warning_and_its_return_one_info(autojump_clock: object) -> None:
    """Its end was met twice: the session ended, and then nobody listened at its address."""
    world = World()
    async with running(world):
        end, _, _ = await world.hello()
        with capture_logs() as logged:
            for _ in range(2):
                world.unreachable.add("http://a:1")
                await end.close()
                await trio.sleep(100)
                world.unreachable.clear()
                end, _, _ = await world.hello()
    told = [(line["log_level"], line["event"]) for line in logged]
    assert told == 2 * [("warning", "no session with this control plane"), ("info", "session open")]


async def test_an_instance_is_one_process_over_all_its_sessions(autojump_clock: object) -> None:
    instances = []
    world = World()
    for _ in range(2):
        async with running(world):
            end, first, _ = await world.hello()
            await end.close()
            _, again, _ = await world.hello()
        assert first.instance == again.instance
        instances.append(first.instance)
    assert "" not in instances
    assert instances[0] != instances[1]


async def test_one_that_is_turned_away_as_a_copy_says_so_once_and_goes_on_dialling(autojump_clock: object) -> None:
    world = World()
    async with running(world):
        with capture_logs() as logged:
            for number in range(5):
                end = await world.arrival()
                await end.receive()
                await end.send(Goodbye("node_twice", f"node id n is in use by another agent, at 127.0.0.1:{number}"))
                await end.close()
            await world.hello()
    (why,) = [line["why"] for line in logged if line["event"] == "no session with this control plane"]
    assert "in use by another agent" in why


async def test_a_known_command_is_answered_with_its_stored_result_and_not_carried_out_again(autojump_clock: object) -> None:
    async with running(World()) as world:
        end, _, _ = await world.hello()
        await world.lead(end, token(3))
        world.replicas.refuse = Conflict("port 1 is taken", code="port_taken")
        first = await command(end, token(3), StartReplica(order()), "c7")
        world.replicas.refuse = None
        second = await command(end, token(4), StartReplica(order()), "c7")
        assert first == second
        assert (first.outcome, first.code) == (Outcome.REFUSED, "port_taken")
        assert world.replicas.asked == []
        assert (await command(end, token(3), StartReplica(order()), "c7")).outcome is Outcome.STALE


async def test_a_refused_command_carries_its_code_and_sentence(autojump_clock: object) -> None:
    async with running(World()) as world:
        end, _, _ = await world.hello()
        world.replicas.refuse = NotFound("replica x is not on this node", code="unknown_replica")
        result = await command(end, token(3), STOP)
        assert (result.outcome, result.code, result.text) == (Outcome.REFUSED, "unknown_replica", "replica x is not on this node")


async def test_a_stale_leader_is_answered_with_an_inventory_that_names_the_higher_one(autojump_clock: object) -> None:
    async with running(World(), "http://a:1", "http://b:1") as world:
        first, _, _ = await world.hello("http://a:1")
        second, _, _ = await world.hello("http://b:1")
        await world.lead(first, token(4))
        answer = await world.lead(second, token(3, "ctl-b"))
        assert (answer.epoch, answer.owner) == (4, "ctl-a")


async def test_every_control_plane_hears_of_every_change(autojump_clock: object) -> None:
    async with running(World(), "http://a:1", "http://b:1") as world:
        first, _, _ = await world.hello("http://a:1")
        second, _, _ = await world.hello("http://b:1")
        report = ReplicaReport(order(), ReplicaState.READY)
        world.sessions.changed(report)
        assert (await receive(first, ReplicaChanged)).report == report
        assert (await receive(second, ReplicaChanged)).report == report


async def test_heartbeats_come_at_the_asked_interval_and_carry_what_changed_by_itself(autojump_clock: object) -> None:
    async with running(World()) as world:
        world.replicas.current[M1] = ReplicaReport(order(), ReplicaState.READY, memory_mib=100)
        end, _, warm = await world.hello(heartbeat_s=3.0)
        assert warm.replicas[0].memory_mib == 100
        asked_s = world.machine.now_s()
        assert (await receive(end, Heartbeat)).changed == ()
        assert world.machine.now_s() - asked_s == pytest.approx(3.0, abs=0.1)
        world.replicas.current[M1] = attrs.evolve(world.replicas.current[M1], memory_mib=200, age_s=9.0)
        assert (await receive(end, Heartbeat)).changed[0].memory_mib == 200
        world.replicas.current[M1] = attrs.evolve(world.replicas.current[M1], age_s=20.0)
        assert (await receive(end, Heartbeat)).changed == ()


async def test_events_wait_for_a_leader_and_say_how_old_they_are(autojump_clock: object) -> None:
    async with running(World()) as world:
        end, _, _ = await world.hello(heartbeat_s=60.0)
        world.sessions.event(AgentEvent("replica.adopted", "replica/x", "text"))
        await world.machine.sleep_until(world.machine.now_s() + 60.0)
        await world.lead(end, token(3))
        event = await receive(end, AgentEvent)
        assert event.kind == "replica.adopted"
        assert event.age_s >= 60.0
        world.sessions.event(AgentEvent("replica.ready", "replica/x", "text"))
        assert (await receive(end, AgentEvent)).kind == "replica.ready"


async def test_what_routers_saw_counts_only_under_the_fence(autojump_clock: object) -> None:
    async with running(World()) as world:
        end, _, _ = await world.hello()
        await world.lead(end, token(4))
        await end.send(EngineSeen(token(3), M1, 1, 0.0, 0, 0))
        await end.send(EngineSeen(token(4), M1, 2, 0.0, 0, 0))
        await command(end, token(4), RestartReplica(M1, "why"))
        assert world.replicas.asked == [("seen", 2), ("restart", M1)]


async def test_a_log_is_read_for_whoever_asks(autojump_clock: object) -> None:
    async with running(World()) as world:
        end, _, _ = await world.hello()
        await end.send(LogRequest("r9", M1))
        chunk = await receive(end, LogChunk)
        assert (chunk.request_id, chunk.text) == ("r9", "text")


async def test_all_are_told_of_a_forgotten_replica(autojump_clock: object) -> None:
    async with running(World(), "http://a:1", "http://b:1") as world:
        first, _, _ = await world.hello("http://a:1")
        second, _, _ = await world.hello("http://b:1")
        await command(first, token(1), ForgetReplica(M1))
        assert (await receive(second, ReplicaForgotten)).replica == M1


@pytest.mark.parametrize(
    "junk",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"\xff\xfe",
        b'{"type": 7}',
        b'{"type": "Nope"}',
        b'{"type": "Command"}',
        b'{"type": "LeaderHello", "token": 5}',
        b"[" * 5000,
    ],
)
async def test_messages_that_cannot_be_understood_disturb_nothing(autojump_clock: object, junk: bytes) -> None:
    async with running(World()) as world:
        end, _, _ = await world.hello()
        await end.send_bytes(junk)
        await end.send(AgentHello(NodeFacts(NodeId("n"), "n", "m", "b", "0"), CLUSTER, 0, OwnerId("")))  # not for an agent
        assert (await command(end, token(1), STOP)).outcome is Outcome.DONE


async def test_one_who_sends_nothing_but_junk_loses_the_session(autojump_clock: object) -> None:
    async with running(World()) as world:
        end, _, _ = await world.hello()
        for _ in range(10):
            await end.send_bytes(b"junk")
        with pytest.raises(ChannelClosed):
            await receive(end, LogChunk)
        await world.hello()  # and may come again


async def test_a_control_plane_that_says_no_hello_is_left_and_dialled_again(autojump_clock: object) -> None:
    async with running(World()) as world:
        await world.arrival()
        again = await world.arrival()
        assert isinstance(await again.receive(), AgentHello)


async def test_the_first_dial_is_at_once_and_later_ones_spread_over_ten_seconds(autojump_clock: object) -> None:
    world = World()
    world.unreachable.add("http://a:1")
    async with running(world):
        await world.machine.sleep_until(world.machine.now_s() + 300.0)
    times = [at_s for _, at_s in world.dialled]
    gaps = [after - before for before, after in pairwise(times)]
    assert times[0] == pytest.approx(1000.0)
    assert max(gaps) <= RECONNECT_S_MAX
    assert max(gaps) > RECONNECT_S_MAX / 2
    assert min(gaps) < RECONNECT_S_MAX / 4, "full jitter begins at 0"


async def test_a_final_goodbye_ends_the_dialling_of_that_control_plane_only(autojump_clock: object) -> None:
    async with running(World(), "http://a:1", "http://b:1") as world:
        end, _, _ = await world.hello("http://a:1")
        await world.hello("http://b:1")
        await end.send(Goodbye("identity_clash", "two live agents with this identity", final=True))
        await world.machine.sleep_until(world.machine.now_s() + 300.0)
        assert [url for url, _ in world.dialled].count("http://a:1") == 1
        report = ReplicaReport(order(), ReplicaState.READY)
        world.sessions.changed(report)  # the other session goes on


async def test_the_leaders_list_of_control_planes_is_dialled_kept_on_disk_and_dropped_when_it_drops_them(autojump_clock: object) -> None:
    world = World()
    async with running(world):
        end, _, _ = await world.hello()
        await end.send(LeaderHello(token(1)))
        await end.send(ControlPlanes(("http://a:1", "http://b:1", "ftp://x", "http://b:1/")))
        second, _, _ = await world.hello("http://b:1")
        kept = json.loads(world.machine.disk.files[FOLDER / PLANES_FILE])
        assert kept == {"cluster_id": CLUSTER, "control_planes": ["http://b:1"]}
        # Who does not know them all takes none away; who does not lead is not asked.
        await end.send(ControlPlanes(("http://a:1",)))
        await second.send(ControlPlanes(("http://evil:1",), whole=True))
        await world.machine.sleep_until(world.machine.now_s() + 1.0)
    async with running(world):
        second, _, _ = await world.hello("http://b:1")
        first, _, _ = await world.hello("http://a:1")
        await first.send(LeaderHello(token(1)))
        await first.send(ControlPlanes(("http://a:1",), whole=True))
        assert isinstance(await receive(second, Goodbye), Goodbye)
        assert json.loads(world.machine.disk.files[FOLDER / PLANES_FILE])["control_planes"] == []
        assert {url for url, _ in world.dialled} == {"http://a:1", "http://b:1"}


@pytest.mark.parametrize("stored", [b'{"cluster_id": "c-0", "control_planes": ["http://b:1"]}', b"[1]", b"junk", b'{"cluster_id": 1}'])
async def test_what_is_of_another_cluster_or_no_list_is_not_dialled(autojump_clock: object, stored: bytes) -> None:
    """An agent that was moved would be taken back by whoever of its old cluster answers first."""
    world = World()
    world.machine.disk.files[FOLDER / PLANES_FILE] = stored
    async with running(world):
        await world.hello()
        await world.machine.sleep_until(world.machine.now_s() + 30.0)
    assert {url for url, _ in world.dialled} == {"http://a:1"}


async def test_a_control_plane_is_not_dialled_by_a_second_name(autojump_clock: object) -> None:
    """Each of the two sessions would end the other at the control plane, for ever."""
    world = World()
    for _ in range(2):
        async with running(world, "http://127.0.0.1:1"):
            end, _, _ = await world.hello("http://127.0.0.1:1", reached_at="http://ctl-1:1")
            await end.send(LeaderHello(token(1)))
            await end.send(ControlPlanes(("http://ctl-1:1", "http://ctl-2:1"), whole=True))
            await world.hello("http://ctl-2:1", reached_at="http://ctl-2:1")
            await world.machine.sleep_until(world.machine.now_s() + 30.0)
        assert {url for url, _ in world.dialled} == {"http://127.0.0.1:1", "http://ctl-2:1"}


async def test_a_control_plane_that_takes_nothing_loses_the_session_and_gets_everything_in_the_next(autojump_clock: object) -> None:
    async with running(World()) as world:
        end, _, _ = await world.hello()
        report = ReplicaReport(order(), ReplicaState.READY)
        for _ in range(6000):
            world.sessions.changed(report)
        world.replicas.current[M1] = report
        _, _, warm = await world.hello()
        assert warm.replicas == (report,)
        assert end is not None


async def test_the_agent_says_goodbye_when_it_ends(autojump_clock: object) -> None:
    world = World()
    async with running(world):
        end, _, _ = await world.hello()
    assert isinstance(await receive(end, Goodbye), Goodbye)
