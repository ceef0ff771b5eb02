"""The router's side of a session with a control plane: what it takes, refuses, tells and keeps. In memory, on a mock clock."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import attrs
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from llmgw.domain import lease
from llmgw.domain.endpoint import DIGEST_FORM, Absence, AbsenceReason, Endpoint, EndpointList, EndpointUse, ListStamp
from llmgw.domain.errors import Denied, Unavailable
from llmgw.domain.ids import ClusterId, EndpointId, OwnerId
from llmgw.domain.lease import FencingToken
from llmgw.domain.model import Catalog, ModelSpec, Profile
from llmgw.domain.policy import ApiKey, GuardPolicy, GuardRule, Policy
from llmgw.protocol import list_delta
from llmgw.protocol.channel import Channel, ChannelClosed
from llmgw.protocol.codec import decode, encode, unstructure
from llmgw.protocol.messages import ControlPlanes, Goodbye, Message
from llmgw.protocol.router_messages import (
    Acknowledged,
    AskEndpoints,
    PushCatalog,
    PushDelta,
    PushEndpoints,
    PushPolicy,
    RouterHello,
    RouterRefused,
    RouterReport,
    RouterWelcome,
    Standing,
    WakeModel,
)
from llmgw.router.follow import ASK_AGAIN_S, DENIED_AGAIN_S, RECONNECT_S_MAX, Follower, Rule
from llmgw.router.kept import ID_FILE, STATE_FILE
from llmgw.router.router import Router
from llmgw.sim.channel import SimChannel, channel_pair
from llmgw.sim.machine import SimMachine
from llmgw.sim.router import SimRouter

FOLDER = Path("/router")
CLUSTER = ClusterId("cluster-1")
M = TypeVar("M", bound=Message)
A, B = "http://a:1", "http://b:1"
CATALOG = Catalog((ModelSpec("m", (Profile("p", "command", command=("/e",)),)),), 3)
GUARD = GuardPolicy(max_images=3, rule=(GuardRule("r", words=("secret",), models=("m",)),))
POLICY = Policy(keys=(ApiKey("team", "0" * 64),), cors_origins=("https://servers.example",), guard=GUARD)


def token(epoch: int, owner: str = "ctl-a", cluster: str = CLUSTER) -> FencingToken:
    return FencingToken(ClusterId(cluster), epoch, OwnerId(owner))


def endpoint(name: str, **values: object) -> Endpoint:
    return Endpoint(EndpointId(name), f"http://10.0.0.1/{name}", ("m",), **values)  # type: ignore[arg-type]


def pushed(by: FencingToken, generation: int, *names: str, standby: bool = False) -> PushEndpoints:
    return PushEndpoints(ListStamp(by, generation, standby), EndpointList(tuple(endpoint(name) for name in names)))


def changed(by: FencingToken, generation: int, before: tuple[str, ...], *names: str, standby: bool = False) -> PushDelta:
    """What makes the list of `names` of the one of `before`."""
    whole, base = pushed(by, generation, *names, standby=standby), pushed(by, 0, *before)
    delta = list_delta.delta(base.endpoints, whole.endpoints)
    assert delta is not None
    return PushDelta(whole.stamp, delta, push=generation)


class World:
    """One router's follower, restarted on the same disk at will, and the control planes' ends of its channels."""

    def __init__(self, rule: Rule = lease.fence) -> None:
        self.machine = SimMachine(1)
        self.router = SimRouter()
        self.rule = rule
        self.dialled: list[tuple[str, float]] = []
        self.unreachable: set[str] = set()
        self.dial_s = 0.0  # how long it takes to find that out
        self.denied: set[str] = set()
        self._arrivals: dict[str, tuple[trio.MemorySendChannel[SimChannel], trio.MemoryReceiveChannel[SimChannel]]] = {}

    def make(self, *planes: str) -> Follower:
        self.router = SimRouter()
        self.follower = Follower(
            self.machine,
            self.router,
            self._dial,
            folder=FOLDER,
            control_planes=planes or (A,),
            name="host",
            cors_origins=("https://own.example",),
            rule=self.rule,
        )
        return self.follower

    @asynccontextmanager
    async def _dial(self, url: str) -> AsyncIterator[Channel]:
        self.dialled.append((url, self.machine.now_s()))
        if url in self.denied:
            raise Denied("the token is refused", code="token_invalid")
        if url in self.unreachable:
            await trio.sleep(self.dial_s)
            raise Unavailable(f"{url} cannot be reached")
        ours, theirs = channel_pair("router")
        self._mailbox(url)[0].send_nowait(theirs)
        try:
            yield ours
        finally:
            await ours.close()

    def _mailbox(self, url: str) -> tuple[trio.MemorySendChannel[SimChannel], trio.MemoryReceiveChannel[SimChannel]]:
        if url not in self._arrivals:
            self._arrivals[url] = trio.open_memory_channel[SimChannel](100)
        return self._arrivals[url]

    async def session(
        self, url: str = A, by: FencingToken | None = None, leads: bool = True, reached_at: str = ""
    ) -> tuple[SimChannel, RouterHello]:
        """The control plane's end of the next session with it, after the welcome."""
        end = await self._mailbox(url)[1].receive()
        greeting = await end.receive()
        assert isinstance(greeting, RouterHello)
        by = by or token(1)
        await end.send(RouterWelcome(by.cluster_id, by.owner, by.epoch, leads, "0.1.0", reached_at=reached_at))
        return end, greeting

    def stored(self) -> dict[str, object]:
        return json.loads(self.machine.disk.files[FOLDER / STATE_FILE])  # type: ignore[no-any-return]


async def receive(end: SimChannel, kind: type[M]) -> M:
    """The next message of that kind; others between are passed over."""
    with trio.fail_after(1000):
        while True:
            message = await end.receive()
            if isinstance(message, kind):
                return message


async def acknowledged(end: SimChannel, generation: int, by: FencingToken) -> RouterReport:
    """The next report that names this list."""
    with trio.fail_after(1000):
        while True:
            report = await receive(end, RouterReport)
            if report.acknowledged is not None and (report.acknowledged.generation, report.acknowledged.token) == (generation, by):
                return report


async def until(condition: Callable[[], object], what: str = "") -> None:
    with trio.move_on_after(300):
        while not condition():
            await trio.sleep(0.01)
        return
    raise AssertionError(f"never came true: {what}")


async def stand(end: SimChannel, by: FencingToken | None, ttl_s: float = 15.0) -> None:
    """Says every second that it is there, for as long as the test runs."""
    try:
        while True:
            await end.send(Standing(by, 0, ttl_s))
            await trio.sleep(1)
    except ChannelClosed:
        return


@asynccontextmanager
async def running(world: World, *planes: str) -> AsyncIterator[trio.Nursery]:
    follower = world.make(*planes)
    await follower.load()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(follower.run)
        yield nursery
        nursery.cancel_scope.cancel()


# --- taking


async def test_what_a_leader_pushes_is_acted_on_acknowledged_and_on_disk(autojump_clock: object) -> None:
    world = World()
    async with running(world):
        end, greeting = await world.session()
        assert greeting.highest is None
        assert greeting.router.startswith("host-")
        await end.send(PushPolicy(token(1), POLICY))
        await end.send(PushCatalog(token(1), CATALOG))
        await end.send(pushed(token(1), 4, "e1", "e2"))
        report = await acknowledged(end, 4, token(1))
        assert report.highest == token(1)
        assert world.router.ids() == ("e1", "e2")
        assert world.router.catalog == CATALOG
        assert world.router.policy is not None
        assert (world.router.policy.keys, world.router.policy.guard) == (POLICY.keys, GUARD)
        assert world.router.policy.cors_origins == ("https://own.example",)  # a [router] key is this machine's own
        await until(lambda: world.stored()["endpoints"]["endpoints"], "on disk")  # type: ignore[index]
        assert world.stored()["highest"] == {"cluster_id": CLUSTER, "epoch": 1, "owner": "ctl-a"}


async def test_a_router_serves_at_once_from_its_disk_when_no_control_plane_can_be_reached(autojump_clock: object) -> None:
    world = World()
    async with running(world):
        end, first = await world.session()
        for message in (PushPolicy(token(1), POLICY), PushCatalog(token(1), CATALOG), pushed(token(1), 4, "e1")):
            await end.send(message)
        await acknowledged(end, 4, token(1))
        await until(lambda: world.follower.is_kept)
    world.unreachable.add(A)
    async with running(world):
        assert world.router.ids() == ("e1",)
        assert world.router.catalog == CATALOG
        assert world.router.policy is not None
        assert (world.router.policy.keys, world.router.policy.guard) == (POLICY.keys, GUARD)
        await trio.sleep(100)
        assert world.router.ids() == ("e1",)
        world.unreachable.clear()
        _, again = await world.session()
        assert again.highest == token(1)
        assert again.acknowledged is not None
        assert again.acknowledged.generation == 4
        assert again.router == first.router
        assert again.instance != first.instance


async def test_an_unchanged_list_under_a_new_token_touches_nothing_but_the_numbers(autojump_clock: object) -> None:
    world = World()
    async with running(world):
        end, _ = await world.session()
        await end.send(PushCatalog(token(1), CATALOG))
        await end.send(pushed(token(1), 9, "e1"))
        await acknowledged(end, 9, token(1))
        catalog = world.router.catalog
        await end.send(PushCatalog(token(2), CATALOG))
        await end.send(pushed(token(2), 1, "e1"))
        await acknowledged(end, 1, token(2))
        assert world.router.catalog is catalog  # not set again: building a table of thousands costs
        assert world.router.highest == token(2)


async def test_a_late_list_of_the_same_leader_is_not_taken(autojump_clock: object) -> None:
    world = World()
    async with running(world):
        end, _ = await world.session()
        await end.send(pushed(token(1), 5, "e5"))
        await end.send(pushed(token(1), 4, "e4"))
        await end.send(pushed(token(1), 6, "e6"))
        await acknowledged(end, 6, token(1))
        assert [stamp.generation for stamp, _ in world.router.history] == [5, 6]


async def test_a_leader_that_does_not_know_its_nodes_yet_takes_no_endpoint_away(autojump_clock: object) -> None:
    world = World()
    async with running(world):
        end, _ = await world.session()
        await end.send(PushCatalog(token(1), CATALOG))
        await end.send(pushed(token(1), 5, "e1", "e2", "e3"))
        await acknowledged(end, 5, token(1))
        absent = EndpointList((), (Absence(("m",), AbsenceReason.NO_CAPACITY),))
        await end.send(PushEndpoints(ListStamp(token(2), 1), absent, settled=False, gone=(EndpointId("e2"),)))
        await acknowledged(end, 1, token(2))
        assert world.router.ids() == ("e1", "e3")
        await end.send(PushEndpoints(ListStamp(token(2), 1), EndpointList((endpoint("e3"),))))
        await until(lambda: world.router.ids() == ("e3",))


async def test_a_list_is_taken_without_the_endpoints_that_have_no_address(autojump_clock: object) -> None:
    world = World()
    async with running(world):
        end, _ = await world.session()
        bad = attrs.evolve(endpoint("bad"), url="http://[::1:99999/")
        await end.send(PushEndpoints(ListStamp(token(1), 1), EndpointList((bad, endpoint("good")))))
        await acknowledged(end, 1, token(1))
        assert world.router.ids() == ("good",)


# --- deltas


async def test_a_router_says_that_it_checks_deltas_and_acts_on_acknowledges_and_keeps_what_they_make(autojump_clock: object) -> None:
    world = World()
    async with running(world):
        end, greeting = await world.session()
        assert greeting.digest_form == DIGEST_FORM
        await end.send(pushed(token(1), 1, "e1", "e2"))
        await end.send(changed(token(1), 2, ("e1", "e2"), "e2", "e3"))
        report = await acknowledged(end, 2, token(1))
        assert report.acknowledged is not None
        assert report.acknowledged.push == 2
        assert world.router.ids() == ("e2", "e3")
        await until(lambda: world.follower.is_kept)
        assert [row["id"] for row in world.stored()["endpoints"]["endpoints"]] == ["e2", "e3"]  # type: ignore[index]
        assert world.stored()["withdrawn"] == ["e1"]


BAD_DELTAS = {
    "over another list": changed(token(1), 2, ("e1", "e2", "e9"), "e2"),
    "that makes another list": attrs.evolve(
        changed(token(1), 2, ("e1", "e2"), "e2"),
        delta=attrs.evolve(changed(token(1), 2, ("e1", "e2"), "e2").delta, removed=(EndpointId("e2"),)),
    ),
}


@pytest.mark.parametrize("bad", BAD_DELTAS.values(), ids=BAD_DELTAS.keys())
async def test_a_delta_that_does_not_fit_is_neither_acted_on_nor_acknowledged_and_the_whole_list_is_asked_for_at_once(
    autojump_clock: object, bad: PushDelta
) -> None:
    world = World()
    async with running(world):
        end, _ = await world.session()
        await end.send(pushed(token(1), 1, "e1", "e2"))
        await acknowledged(end, 1, token(1))
        started_s = trio.current_time()
        await end.send(bad)
        assert (await receive(end, AskEndpoints)).why
        assert trio.current_time() == started_s
        await end.send(changed(token(1), 3, ("e2",), "e2", "e3"))  # was under way; what it is over is not here
        report = await receive(end, RouterReport)
        assert report.acknowledged is not None
        assert (report.acknowledged.generation, world.router.ids()) == (1, ("e1", "e2"))
        await end.send(pushed(token(1), 3, "e2", "e3"))
        await end.send(changed(token(1), 4, ("e2", "e3"), "e3"))
        await acknowledged(end, 4, token(1))
        assert world.router.ids() == ("e3",)
        assert [stamp.generation for stamp, _ in world.router.history] == [1, 3, 4]


async def test_a_delta_before_any_list_of_its_session_is_asked_about(autojump_clock: object) -> None:
    world = World()
    async with running(world):
        end, _ = await world.session()
        await end.send(pushed(token(1), 1, "e1"))
        await acknowledged(end, 1, token(1))
        await end.close()
        end, _ = await world.session()
        await end.send(changed(token(1), 2, ("e1",), "e2"))  # the list is on our disk, but nobody said it in this session
        await receive(end, AskEndpoints)
        assert world.router.ids() == ("e1",)


async def test_a_list_that_never_arrived_is_noticed_by_the_next_beat(autojump_clock: object) -> None:
    world = World()
    async with running(world):
        end, _ = await world.session()
        await end.send(attrs.evolve(pushed(token(1), 1, "e1"), push=1))
        await acknowledged(end, 1, token(1))
        await end.send_bytes(b"{")  # a list, and it broke on its way
        started_s = trio.current_time()
        await end.send(Standing(token(1), 2, push=2))
        await receive(end, AskEndpoints)
        assert trio.current_time() == started_s


@pytest.mark.parametrize("numbered", [True, False], ids=["numbered", "of a build that does not number its beats"])
async def test_nothing_is_asked_while_every_list_arrives(autojump_clock: object, numbered: bool) -> None:
    world = World()
    async with running(world):
        end, _ = await world.session()
        await end.send(attrs.evolve(pushed(token(1), 1, "e1"), push=1))
        for generation in range(2, 6):
            await end.send(changed(token(1), generation, ("e1",), "e1"))
            await end.send(Standing(token(1), generation, push=generation if numbered else 0))
            await trio.sleep(1)
        got: list[Message] = []
        with trio.move_on_after(3):
            while True:
                got.append(await end.receive())
        assert {type(message) for message in got} == {RouterReport}
        assert world.router.history[-1][0].generation == 5


async def test_a_whole_list_that_does_not_come_is_asked_for_again_after_a_while_and_not_at_each_beat(autojump_clock: object) -> None:
    world = World()
    async with running(world) as nursery:
        end, _ = await world.session()

        async def beat() -> None:
            while True:
                await end.send(Standing(token(1), 1, push=1))
                await trio.sleep(1)

        nursery.start_soon(beat)
        asked_s = []
        for _ in range(3):
            await receive(end, AskEndpoints)
            asked_s.append(trio.current_time())
    assert all(ASK_AGAIN_S <= after - before <= ASK_AGAIN_S + 1.1 for before, after in pairwise(asked_s))


async def test_a_stale_control_planes_deltas_are_refused_and_fit_when_it_comes_back_above(autojump_clock: object) -> None:
    world = World()
    async with running(world, A, B):
        leader, _ = await world.session(A)
        await leader.send(pushed(token(7), 1, "e1"))
        await acknowledged(leader, 1, token(7))
        other, _ = await world.session(B)
        await other.send(pushed(token(6, "ctl-b"), 1, "o1"))
        await other.send(changed(token(6, "ctl-b"), 2, ("o1",), "o1", "o2"))
        await receive(other, RouterRefused)
        assert world.router.ids() == ("e1",)
        await other.send(changed(token(8, "ctl-b"), 1, ("o1", "o2"), "o2"))
        await acknowledged(other, 1, token(8, "ctl-b"))
        assert world.router.ids() == ("o2",)


async def test_what_a_standby_sees_may_come_as_deltas_too(autojump_clock: object) -> None:
    world = World()
    async with running(world, A, B) as nursery:
        leader, _ = await world.session(A)
        standby, _ = await world.session(B, leads=False)
        await leader.send(PushCatalog(token(1), CATALOG))
        await leader.send(pushed(token(1), 1, "e1", "e2"))
        await acknowledged(leader, 1, token(1))
        nursery.start_soon(stand, standby, None)
        await standby.send(pushed(token(1), 50, "e1", "e2", standby=True))
        await standby.send(changed(token(1), 51, ("e1", "e2"), "e1", standby=True))
        await until(lambda: world.router.ids() == ("e1",))


async def test_a_delta_over_a_list_of_which_an_endpoint_was_left_out_fits(autojump_clock: object) -> None:
    world = World()
    async with running(world):
        end, _ = await world.session()
        bad, good, more = attrs.evolve(endpoint("bad"), url="http://[::1:99999/"), endpoint("good"), endpoint("more")
        before, after = EndpointList((bad, good)), EndpointList((bad, good, more))
        delta = list_delta.delta(before, after)
        assert delta is not None
        await end.send(PushEndpoints(ListStamp(token(1), 1), before))
        await end.send(PushDelta(ListStamp(token(1), 2), delta))
        await acknowledged(end, 2, token(1))
        assert world.router.ids() == ("good", "more")


# --- the fence


@pytest.mark.parametrize("stale", [token(6), token(7, "ctl-b")], ids=["a lower epoch", "an equal epoch of another owner"])
async def test_a_stale_control_plane_is_refused_with_the_highest_token_and_none_of_its_values_is_taken(
    stale: FencingToken, autojump_clock: object
) -> None:
    world = World()
    async with running(world, A, B):
        leader, _ = await world.session(A)
        await leader.send(pushed(token(7), 1, "e1"))
        await acknowledged(leader, 1, token(7))
        other, _ = await world.session(B)
        await other.send(PushPolicy(stale, POLICY))
        await other.send(PushCatalog(stale, CATALOG))
        await other.send(pushed(stale, 99, "other"))
        refused = await receive(other, RouterRefused)
        assert (refused.code, refused.epoch, refused.owner) == ("stale_epoch", 7, "ctl-a")
        await receive(other, RouterReport)
        assert world.router.ids() == ("e1",)
        assert world.router.policy is None
        assert world.router.catalog == Catalog()
        await other.send(pushed(token(8, "ctl-b"), 1, "other"))  # it acquired above
        await acknowledged(other, 1, token(8, "ctl-b"))
        await leader.send(pushed(token(7), 2, "e1"))
        assert (await receive(leader, RouterRefused)).epoch == 8
        assert world.router.ids() == ("other",)


async def test_a_router_restarted_between_two_leaders_still_refuses_the_older_one(autojump_clock: object) -> None:
    world = World()
    async with running(world):
        end, _ = await world.session()
        await end.send(Standing(token(9)))
        await until(lambda: (FOLDER / STATE_FILE) in world.machine.disk.files)
    async with running(world):
        end, greeting = await world.session()
        assert greeting.highest == token(9)
        await end.send(pushed(token(8), 1, "old"))
        assert (await receive(end, RouterRefused)).epoch == 9
        assert world.router.ids() == ()


async def test_a_higher_token_is_on_disk_before_anything_is_done_under_it(autojump_clock: object) -> None:
    world = World()
    seen: list[int] = []

    def set_endpoints(endpoints: EndpointList, stamp: ListStamp) -> None:
        seen.append(world.stored()["highest"]["epoch"])  # type: ignore[index]

    async with running(world):
        world.router.set_endpoints = set_endpoints  # type: ignore[method-assign]
        end, _ = await world.session()
        for epoch in (3, 5):
            await end.send(pushed(token(epoch), 1, "e1"))
        await until(lambda: len(seen) == 2)
        assert seen == [3, 5]


async def test_nothing_is_acknowledged_while_the_disk_still_writes_the_token_it_came_under(autojump_clock: object) -> None:
    world = World()
    async with running(world):
        end, _ = await world.session()
        await end.send(pushed(token(1), 7, "e1", "e2"))
        await acknowledged(end, 7, token(1))
        write, written = world.machine.run_sync, trio.Event()

        async def slow(work: Callable[[], object]) -> object:
            await written.wait()
            return await write(work)

        world.machine.run_sync = slow  # type: ignore[method-assign, assignment]
        await end.send(pushed(token(2), 1, "e1"))
        await until(lambda: world.follower.pushed.highest == token(2))
        for _ in range(3):
            report = await receive(end, RouterReport)
            assert report.acknowledged is not None
            assert report.acknowledged.token == token(1), "e2 may still be chosen"
        assert world.router.ids() == ("e1", "e2")
        written.set()
        await acknowledged(end, 1, token(2))
        assert world.router.ids() == ("e1",)


async def test_another_clusters_control_plane_is_told_so_and_left_alone_for_a_minute(
    autojump_clock: object, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World()
    async with running(world, A, B):
        end, _ = await world.session(A)
        await end.send(pushed(token(1), 1, "e1"))
        await acknowledged(end, 1, token(1))
        foreign, _ = await world.session(B, token(50, "x", "cluster-2"))
        assert (await receive(foreign, Goodbye)).code == "foreign_cluster"
        before = len(world.dialled)
        await trio.sleep(50)
        assert [url for url, _ in world.dialled[before:] if url == B] == []
        await world.session(B, token(50, "x", "cluster-2"))
        assert world.router.ids() == ("e1",)
    told = [line for line in capsys.readouterr().out.splitlines() if "cluster-2" in line and "warning" in line]
    assert len(told) == 1, told


@pytest.mark.parametrize("epoch", [-1, 10**30])
async def test_an_epoch_that_is_none_is_not_met(epoch: int, autojump_clock: object) -> None:
    world = World()
    async with running(world):
        end, _ = await world.session()
        await end.send(pushed(token(epoch), 1, "e1"))
        with pytest.raises(ChannelClosed):
            await receive(end, Goodbye)
        end, greeting = await world.session()
        assert greeting.highest is None
        await end.send(pushed(token(1), 1, "e2"))
        await acknowledged(end, 1, token(1))
        assert world.router.ids() == ("e2",)


async def test_a_list_of_another_cluster_than_the_welcome_ends_the_session(autojump_clock: object) -> None:
    world = World()
    async with running(world):
        end, _ = await world.session()
        await end.send(pushed(token(1), 1, "e1"))
        await acknowledged(end, 1, token(1))
        await end.send(pushed(token(2, cluster="cluster-2"), 1, "theirs"))
        with pytest.raises(ChannelClosed):
            await receive(end, Goodbye)
        assert world.router.ids() == ("e1",)


async def test_without_the_fence_a_stale_list_would_be_taken(autojump_clock: object) -> None:
    world = World(rule=lambda highest, by: lease.Fence.OBEY)
    async with running(world):
        taken: list[ListStamp] = []
        world.router.set_endpoints = lambda endpoints, stamp: taken.append(stamp)  # type: ignore[method-assign]
        end, _ = await world.session()
        await end.send(pushed(token(7), 1, "e1"))
        await end.send(pushed(token(6), 1, "old"))
        await until(lambda: len(taken) == 2)
        assert taken[1].token == token(6)


# --- what goes back


async def test_use_is_told_every_second_whole_at_first_then_what_changed(autojump_clock: object) -> None:
    world = World()
    async with running(world):
        e1, e2 = EndpointId("e1"), EndpointId("e2")
        world.router.uses = {e1: EndpointUse(answers=3), e2: EndpointUse(in_flight=2, silent_s=1.0)}
        end, _ = await world.session()
        report = await receive(end, RouterReport)
        assert report.full
        assert {row.endpoint: row.use for row in report.use} == world.router.uses
        await end.send(pushed(token(1), 1, "e1", "e2"))
        await acknowledged(end, 1, token(1))
        world.router.uses = {e1: EndpointUse(answers=3, last_used_s=1.0), e2: EndpointUse(in_flight=2, silent_s=2.0)}
        started_s = trio.current_time()
        report = await receive(end, RouterReport)
        assert 0.5 <= trio.current_time() - started_s <= 1.5
        assert [row.endpoint for row in report.use] == ["e2"]  # what runs is always told; an age goes on by itself
        world.router.uses = {e1: EndpointUse(answers=3, last_used_s=0.0)}
        report = await receive(end, RouterReport)
        assert [row.endpoint for row in report.use] == ["e1"]  # used again
        assert report.gone == ("e2",)
        assert not report.full


async def test_the_end_of_a_request_at_a_withdrawn_endpoint_is_told_at_once(autojump_clock: object) -> None:
    world = World()
    async with running(world):
        end, _ = await world.session()
        await end.send(pushed(token(1), 1, "e1"))
        await acknowledged(end, 1, token(1))
        world.router.uses = {EndpointId("e1"): EndpointUse(in_flight=1)}
        started_s = trio.current_time()
        await end.send(pushed(token(1), 2))
        report = await acknowledged(end, 2, token(1))
        assert trio.current_time() - started_s < 0.05
        assert [(row.endpoint, row.use.in_flight) for row in report.use] == [("e1", 1)]
        await trio.sleep(0.3)
        world.router.uses = {}
        started_s = trio.current_time()
        while not (report := await receive(end, RouterReport)).gone:
            pass
        assert report.gone == ("e1",)
        assert trio.current_time() - started_s < 0.2


async def test_a_list_is_acknowledged_only_once_it_is_acted_on(autojump_clock: object) -> None:
    world = World()
    async with running(world):
        world.router.acknowledges = False
        end, _ = await world.session()
        await end.send(pushed(token(1), 3, "e1"))
        for _ in range(3):
            report = await receive(end, RouterReport)
            assert report.acknowledged is None or report.acknowledged.generation == 0
        world.router.acknowledges = True
        await acknowledged(end, 3, token(1))


async def test_everything_is_said_again_in_a_new_session(autojump_clock: object) -> None:
    world = World()
    async with running(world):
        end, _ = await world.session()
        await end.send(pushed(token(1), 3, "e1"))
        world.router.uses = {EndpointId("e1"): EndpointUse(answers=1)}
        await acknowledged(end, 3, token(1))
        await trio.sleep(3)
        await end.close()
        end, _ = await world.session()
        report = await receive(end, RouterReport)
        assert report.full
        assert [row.endpoint for row in report.use] == ["e1"]
        assert report.acknowledged is not None
        assert report.acknowledged.generation == 3


async def test_a_wish_to_wake_a_model_goes_to_every_control_plane_once(autojump_clock: object) -> None:
    world = World()
    async with running(world, A, B):
        ends = [(await world.session(A))[0], (await world.session(B))[0]]
        for end in ends:
            await receive(end, RouterReport)
        for _ in range(5):
            world.follower.wake("cold")
        for end in ends:
            assert await receive(end, WakeModel) == WakeModel("cold")
            assert not isinstance(await end.receive(), WakeModel)
        for _ in range(10):
            await trio.sleep(0.05)
            world.follower.wake("cold")
        assert isinstance(await ends[0].receive(), RouterReport)  # a thousand clients a second ask once a second
        await trio.sleep(1)
        world.follower.wake("cold")
        assert await receive(ends[0], WakeModel) == WakeModel("cold")


# --- standbys


async def test_a_standby_is_not_listened_to_while_the_leader_is_heard(autojump_clock: object) -> None:
    world = World()
    async with running(world, A, B) as nursery:
        leader, _ = await world.session(A)
        standby, _ = await world.session(B, leads=False)
        await leader.send(pushed(token(1), 1, "e1", "e2"))
        await acknowledged(leader, 1, token(1))
        nursery.start_soon(stand, leader, token(1))
        nursery.start_soon(stand, standby, None)
        await standby.send(pushed(token(1), 50, "e1", "e2", standby=True))
        await standby.send(pushed(token(1), 51, "e1", standby=True))
        await trio.sleep(100)
        assert world.router.ids() == ("e1", "e2")


async def test_after_a_ttl_of_a_leaders_silence_what_a_standby_sees_counts_and_the_leaders_list_again_once_it_is_heard(
    autojump_clock: object,
) -> None:
    world = World()
    async with running(world, A, B) as nursery:
        leader, _ = await world.session(A)
        standby, _ = await world.session(B, leads=False)
        await leader.send(PushCatalog(token(1), CATALOG))
        await leader.send(pushed(token(1), 1, "e1", "e2"))
        await acknowledged(leader, 1, token(1))
        nursery.start_soon(stand, standby, None, 20.0)
        await leader.send(Standing(token(1), 1, 20.0))
        world.unreachable.add(A)
        await standby.send(pushed(token(1), 50, "e1", "e2", standby=True))
        await standby.send(pushed(token(1), 51, "e1", standby=True))
        await trio.sleep(19)
        assert world.router.ids() == ("e1", "e2")
        await trio.sleep(3)
        assert world.router.ids() == ("e1",)
        report = await receive(standby, RouterReport)
        while report.acknowledged is not None:
            report = await receive(standby, RouterReport)
        assert world.follower.pushed.endpoints.endpoints == (endpoint("e1"), endpoint("e2"))  # what is kept is the leader's
        world.unreachable.clear()
        again, _ = await world.session(A)
        await again.send(Standing(token(1), 1, 20.0))
        await until(lambda: world.router.ids() == ("e1", "e2"))
        await acknowledged(again, 1, token(1))


async def test_what_a_standby_saw_go_does_not_come_back_while_the_next_leader_does_not_know_its_nodes_yet(autojump_clock: object) -> None:
    world = World()
    async with running(world, A, B):
        leader, _ = await world.session(A)
        standby, _ = await world.session(B, leads=False)
        await leader.send(PushCatalog(token(1), CATALOG))
        await leader.send(pushed(token(1), 1, "e1", "e2"))
        await acknowledged(leader, 1, token(1))
        world.unreachable.add(A)
        await leader.close()
        async with trio.open_nursery() as beats:
            beats.start_soon(stand, standby, None)
            await standby.send(pushed(token(1), 50, "e1", "e2", standby=True))
            await standby.send(pushed(token(1), 51, "e1", standby=True))
            await until(lambda: world.router.ids() == ("e1",))
            beats.cancel_scope.cancel()
        figures = world.follower.following()
        assert figures.by_standby
        assert figures.leader_silent_s > 10
        assert figures.list_age_s < 2
        await standby.send(Standing(token(2, "ctl-b"), 0))  # it leads now, and its list is still to come
        await until(lambda: world.follower.pushed.highest == token(2, "ctl-b"))
        await trio.sleep(1)
        assert world.router.ids() == ("e1",)
        await standby.send(PushEndpoints(ListStamp(token(2, "ctl-b"), 1), EndpointList(), settled=False))
        await acknowledged(standby, 1, token(2, "ctl-b"))
        assert world.router.ids() == ("e1",)
        figures = world.follower.following()
        assert (figures.leader, figures.epoch, figures.by_standby) == (B, 2, False)
        assert dict(figures.sessions) == {A: False, B: True}


async def test_what_a_leader_withdrew_does_not_come_back_by_a_standby_even_after_a_restart_of_the_router(autojump_clock: object) -> None:
    world = World()
    async with running(world):
        leader, _ = await world.session(A)
        await leader.send(pushed(token(1), 1, "e1", "drained"))
        await leader.send(pushed(token(1), 2, "e1"))
        await acknowledged(leader, 2, token(1))
        await until(lambda: world.follower.is_kept)
    world.unreachable.add(A)
    async with running(world, A, B) as nursery:
        standby, _ = await world.session(B, leads=False)
        nursery.start_soon(stand, standby, None)
        await standby.send(pushed(token(1), 7, "drained", "e1", "e9", standby=True))
        await until(lambda: "e9" in world.router.ids())
        assert world.router.ids() == ("e1", "e9")


async def test_of_two_standbys_the_one_whose_agents_obey_the_higher_epoch_counts(autojump_clock: object) -> None:
    world = World()
    async with running(world, A, B, "http://c:1") as nursery:
        leader, _ = await world.session(A)
        await leader.send(pushed(token(1), 1, "e1", "e2", "e3"))
        await acknowledged(leader, 1, token(1))
        for url, epoch, gone in ((B, 1, "e1"), ("http://c:1", 2, "e2")):
            standby, _ = await world.session(url, leads=False)
            nursery.start_soon(stand, standby, None)
            await standby.send(pushed(token(epoch), 50, "e1", "e2", "e3", standby=True))
            await standby.send(pushed(token(epoch), 51, *(name for name in ("e1", "e2", "e3") if name != gone), standby=True))
        await until(lambda: world.router.ids() == ("e1", "e3"))
        await trio.sleep(10)
        assert world.router.ids() == ("e1", "e3")
        assert world.follower.pushed.highest == token(2)


async def test_a_standbys_view_of_a_lower_epoch_is_refused(autojump_clock: object) -> None:
    world = World()
    async with running(world, A, B) as nursery:
        leader, _ = await world.session(A)
        await leader.send(pushed(token(4), 1, "e1"))
        await acknowledged(leader, 1, token(4))
        standby, _ = await world.session(B, leads=False)
        nursery.start_soon(stand, standby, None)
        await standby.send(pushed(token(3, "ctl-z"), 7, "e1", "e2", standby=True))
        assert (await receive(standby, RouterRefused)).epoch == 4
        await trio.sleep(60)
        assert world.router.ids() == ("e1",)


# --- what goes wrong


async def test_a_control_plane_that_cannot_be_reached_is_dialled_with_jitter_below_the_time_it_waits_for_routers(
    autojump_clock: object, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World()
    world.unreachable.add(A)
    async with running(world):
        await trio.sleep(200)
    gaps = [after - before for (_, before), (_, after) in pairwise(world.dialled)]
    assert max(gaps) <= RECONNECT_S_MAX
    assert len(set(gaps)) > 10
    assert len(world.dialled) < 300
    assert capsys.readouterr().out.count("no session with this control plane") == 1


async def test_a_control_plane_behind_a_wall_is_told_of_once_however_long_each_try_takes(
    autojump_clock: object, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World()
    world.unreachable.add(A)
    world.dial_s = 10.0
    async with running(world):
        await trio.sleep(200)
    assert len(world.dialled) > 10
    assert capsys.readouterr().out.count("no session with this control plane") == 1


async def test_a_lost_control_plane_is_one_warning_and_its_return_one_info(autojump_clock: object) -> None:
    world = World()
    async with running(world):
        end, _ = await world.session()
        await receive(end, RouterReport)
        with capture_logs() as logged:
            for _ in range(2):
                world.unreachable.add(A)
                await end.close()
                await trio.sleep(100)
                world.unreachable.clear()
                end, _ = await world.session()
                await receive(end, RouterReport)
    told = [(line["log_level"], line["event"]) for line in logged]
    lost = ("warning", "no session with this control plane; the router serves what it has")
    assert told == 2 * [lost, ("info", "follows")]


async def test_a_refused_token_is_tried_again_seldom_because_the_other_end_logs_it(autojump_clock: object) -> None:
    world = World()
    world.denied.add(A)
    async with running(world):
        await trio.sleep(99)
        assert [after - before for (_, before), (_, after) in pairwise(world.dialled)] == [pytest.approx(DENIED_AGAIN_S)] * 9
        world.denied.clear()
        await world.session()


async def test_a_silent_control_plane_is_left_and_dialled_anew(autojump_clock: object) -> None:
    world = World()
    async with running(world):
        await world.session()
        await world.session()
        assert trio.current_time() < 30


BAD = [b"{", b"[]", b'{"type": "Nonsense"}', b'{"type": "PushEndpoints"}', b"\xff", b'{"type": "Standing", "token": 3}', b"[" * 100_000]


async def test_junk_from_a_control_plane_changes_nothing_and_does_not_end_the_session(autojump_clock: object) -> None:
    world = World()
    async with running(world):
        end, _ = await world.session()
        await end.send(pushed(token(1), 1, "e1"))
        for data in BAD:
            await end.send_bytes(data)
        await end.send(pushed(token(1), 2, "e1", "e2"))
        await acknowledged(end, 2, token(1))
        assert world.router.ids() == ("e1", "e2")


async def test_a_control_plane_that_speaks_a_far_protocol_is_told_and_left_for_a_minute(autojump_clock: object) -> None:
    world = World()
    async with running(world):
        end = await world._mailbox(A)[1].receive()
        await end.receive()
        await end.send(RouterWelcome(CLUSTER, OwnerId("o"), 1, True, "9", protocol=9))
        assert (await receive(end, Goodbye)).code == "protocol"
        before = len(world.dialled)
        await trio.sleep(50)
        assert len(world.dialled) == before


@pytest.mark.parametrize(
    "junk",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"format": 99}',
        b'{"format": 1, "endpoints": 3}',
        b"\xff\xfe",
        b'{"format": 1, "stamp": {}}',
        b"[" * 99_999,
    ],
)
async def test_a_state_file_that_cannot_be_understood_is_told_and_the_next_push_replaces_it(
    junk: bytes, autojump_clock: object, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World()
    world.machine.disk.files[FOLDER / STATE_FILE] = junk
    async with running(world):
        assert world.router.history == []
        end, greeting = await world.session()
        assert greeting.highest is None
        await end.send(pushed(token(1), 1, "e1"))
        await acknowledged(end, 1, token(1))
        await until(lambda: world.follower.is_kept)
    assert capsys.readouterr().out.count("cannot be read") == 1
    async with running(world):
        assert world.router.ids() == ("e1",)


async def test_a_full_disk_stops_no_push_is_told_once_and_made_good_later(
    autojump_clock: object, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World()
    async with running(world):
        end, _ = await world.session()
        world.machine.disk.fail = OSError(28, "No space left on device")
        for generation in range(1, 6):
            await end.send(pushed(token(generation), generation, f"e{generation}"))
            await acknowledged(end, generation, token(generation))
        assert world.router.ids() == ("e5",)
        assert (FOLDER / STATE_FILE) not in world.machine.disk.files
        world.machine.disk.fail = None
        await until(lambda: (FOLDER / STATE_FILE) in world.machine.disk.files)
        assert world.stored()["highest"]["epoch"] == 5  # type: ignore[index]
    told = capsys.readouterr().out
    assert told.count("cannot be kept on disk") == 1
    assert told.count("on disk again") == 1


async def test_a_disk_that_is_full_from_the_start_does_not_keep_a_router_from_following(autojump_clock: object) -> None:
    world = World()
    world.machine.disk.fail = OSError(30, "Read-only file system")
    async with running(world):
        end, greeting = await world.session()
        assert greeting.router.startswith("host-")
        await end.send(pushed(token(1), 1, "e1"))
        await acknowledged(end, 1, token(1))
    assert (FOLDER / ID_FILE) not in world.machine.disk.files


# --- neighbouring builds


def as_an_older_build_wrote(policy: Policy) -> dict[str, Any]:
    """A policy from before there was a guard in it."""
    raw = unstructure(policy)
    del raw["guard"]
    return raw  # type: ignore[no-any-return]


def test_a_policy_without_a_guard_is_one_with_the_usual_guard() -> None:
    message = PushPolicy(token(1), Policy(keys=POLICY.keys))
    raw = json.loads(encode(message))
    raw["policy"] = as_an_older_build_wrote(message.policy)
    assert decode(json.dumps(raw).encode()) == message
    assert message.policy.guard == GuardPolicy()


def test_a_policy_of_a_later_build_is_taken_with_what_this_one_knows_of_it() -> None:
    raw = json.loads(encode(PushPolicy(token(1), POLICY)))
    raw["policy"]["brand_new"] = {"x": 1}
    raw["policy"]["guard"]["brand_new"] = 1
    raw["policy"]["guard"]["rule"][0]["brand_new"] = "x"
    assert decode(json.dumps(raw).encode()) == PushPolicy(token(1), POLICY)
    raw["policy"]["guard"]["rule"][0]["action"] = "mask"
    later = decode(json.dumps(raw).encode())
    assert isinstance(later, PushPolicy)
    assert later.policy.guard.rule[0].action == "mask"


async def test_a_state_on_disk_without_a_guard_is_one_with_the_usual_guard(autojump_clock: object) -> None:
    world = World()
    world.machine.disk.files[FOLDER / STATE_FILE] = json.dumps({**STATE, "policy": as_an_older_build_wrote(POLICY)}).encode()
    world.unreachable.add(A)
    async with running(world):
        assert world.router.policy == attrs.evolve(POLICY, cors_origins=("https://own.example",), guard=GuardPolicy())
        assert world.router.ids() == ("e1", "e2")


async def test_rules_that_this_build_does_not_enforce_are_told_by_name(autojump_clock: object, capsys: pytest.CaptureFixture[str]) -> None:
    world = World()
    async with running(world):
        end, _ = await world.session()
        await end.send(PushPolicy(token(1), attrs.evolve(POLICY, guard=GuardPolicy(rule=(*GUARD.rule, GuardRule("later", match="x"))))))
        await until(lambda: world.router.policy is not None)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "does not enforce" in line]
    assert "['later']" in line


# --- what is on disk, and properties


def kept(world: World) -> dict[str, object]:
    """A state with something of everything, as it stands on the disk."""

    async def fill() -> None:
        async with running(world):
            end, _ = await world.session()
            for message in (PushPolicy(token(1), POLICY), PushCatalog(token(1), CATALOG), pushed(token(1), 4, "e1", "gone")):
                await end.send(message)
            await end.send(pushed(token(1), 5, "e1", "e2"))
            await acknowledged(end, 5, token(1))
            await until(lambda: world.follower.is_kept)

    trio.run(fill, clock=trio.testing.MockClock(autojump_threshold=0))
    return world.stored()


STATE = kept(World())
JUNK = st.sampled_from([None, True, -1, 10**30, 0.5, "", "x", "http://[::1:99999/", "\ud800", [], ["x"], {}, {"x": 1}, [[]], [{}]])


def places(value: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """Every place inside a JSON value."""
    inner: list[tuple[object, object]] = []
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = list(enumerate(value))
    return [found for key, part in inner for found in ((*path, key), *places(part, (*path, key)))]


def with_junk(value: Any, path: tuple[Any, ...], junk: object) -> Any:
    if not path:
        return junk
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = with_junk(copy[path[0]], path[1:], junk)
    return copy


@given(st.sampled_from(places(STATE)), JUNK)
def test_a_state_file_with_anything_anywhere_keeps_no_router_from_starting_or_following(path: tuple[object, ...], junk: object) -> None:
    world = World()
    world.machine.disk.files[FOLDER / STATE_FILE] = json.dumps(with_junk(STATE, path, junk)).encode()

    async def body() -> None:
        router = Router(world.machine, Policy(), lambda line: None)
        follower = Follower(world.machine, router, world._dial, folder=FOLDER, control_planes=(A,))
        await follower.load()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(follower.run)
            highest = follower.pushed.highest
            by = token(1) if highest is None else attrs.evolve(highest, epoch=highest.epoch + 1)
            end, _ = await world.session(by=by)
            await end.send(pushed(by, 1, "new"))
            await acknowledged(end, 1, by)
            nursery.cancel_scope.cancel()
        assert [state.endpoint.id for state in router.states()] == ["new"]

    trio.run(body, clock=trio.testing.MockClock(autojump_threshold=0))


@given(st.lists(st.one_of(st.none(), st.tuples(st.integers(1, 4), st.sampled_from(("ctl-a", "ctl-b"))))))
def test_no_list_of_a_lower_epoch_or_of_another_owner_of_the_same_is_taken_whatever_order_they_come_in_and_whenever_it_restarts(
    steps: list[tuple[int, str] | None],
) -> None:
    """None is a crash of the router: nothing in memory is left."""
    world = World()
    taken: list[FencingToken] = []

    async def life(lists: list[tuple[int, str]]) -> None:
        async with running(world):
            end, _ = await world.session()
            for epoch, owner in lists:
                await end.send(pushed(token(epoch, owner), 1, f"{owner}-{epoch}"))
                await trio.testing.wait_all_tasks_blocked()
            taken.extend(stamp.token for stamp, _ in world.router.history)

    lives: list[list[tuple[int, str]]] = [[]]
    for step in steps:
        if step is None:
            lives.append([])
        else:
            lives[-1].append(step)
    for one in lives:
        trio.run(life, one, clock=trio.testing.MockClock(autojump_threshold=0))
    assert [one.epoch for one in taken] == sorted(one.epoch for one in taken)
    assert len({one.epoch for one in taken}) == len(set(taken)), "one epoch, two owners"
    if any(steps):
        assert max(one.epoch for one in taken) == max(step[0] for step in steps if step is not None)


async def test_a_list_is_acknowledged_once_every_worker_acts_on_it_and_the_one_before_until_then(autojump_clock: object) -> None:
    """Also where only the push is new: the same generation with more that is let go of."""
    world = World()
    async with running(world):
        end, _ = await world.session()
        await end.send(attrs.evolve(pushed(token(1), 4, "e1"), push=1))
        await acknowledged(end, 4, token(1))
        world.router.settles = False
        await end.send(attrs.evolve(pushed(token(1), 4, "e1"), push=2))
        await until(lambda: len(world.router.history) == 2, "it is given to the workers")
        for _ in range(3):
            report = await receive(end, RouterReport)
            assert report.acknowledged is not None
            assert (report.acknowledged.generation, report.acknowledged.push) == (4, 1)
        world.router.settles = True
        started_s = trio.current_time()
        world.follower.look_again()
        while (report := await acknowledged(end, 4, token(1))).acknowledged != Acknowledged(token(1), 4, 2):
            pass
        assert trio.current_time() - started_s < 0.05
        # of another leader, counted anew: the generation of the one before is none of its own
        world.router.settles = False
        await end.send(pushed(token(2), 1, "e1"))
        await until(lambda: len(world.router.history) == 3, "it is given to the workers")
        report = await receive(end, RouterReport)
        assert report.acknowledged is not None
        assert report.acknowledged.token == token(1)
        world.router.settles = True
        world.follower.look_again()
        await acknowledged(end, 1, token(2))


async def test_the_leaders_list_of_control_planes_is_followed_kept_and_dropped_when_it_drops_them(autojump_clock: object) -> None:
    world = World()
    async with running(world):
        leader, _ = await world.session(reached_at="http://second-name:1")
        await leader.send(Standing(token(1)))
        await leader.send(ControlPlanes(("http://second-name:1", B), whole=True))
        standby, _ = await world.session(B, leads=False)
        await standby.send(ControlPlanes(("http://evil:1",), whole=True))
        await until(lambda: world.follower.is_kept, "what is known is on disk")
        await trio.sleep(1)
        assert world.follower.control_planes() == (A, B)
    async with running(world):
        standby, _ = await world.session(B, leads=False)
        leader, _ = await world.session()
        await leader.send(Standing(token(1)))
        await leader.send(ControlPlanes(()))
        await leader.send(ControlPlanes((A,), whole=True))
        assert isinstance(await receive(standby, Goodbye), Goodbye)
        assert set(world.follower.following().sessions) == {A}
    assert {url for url, _ in world.dialled} == {A, B}
