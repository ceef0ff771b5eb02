"""The control plane's end of routers that follow it: what they are sent, what they hold up, and for how long."""

from __future__ import annotations

import attrs
import pytest
import trio
import trio.testing

from llmgw.control.feed import HOLDS_NOTHING, RouterFeeds
from llmgw.domain.endpoint import DIGEST_FORM, Endpoint, EndpointList, EndpointUse, ListStamp
from llmgw.domain.ids import ClusterId, EndpointId, OwnerId
from llmgw.domain.lease import FencingToken
from llmgw.domain.model import Catalog, ModelSpec, Profile
from llmgw.domain.policy import ApiKey, Policy
from llmgw.protocol import list_delta
from llmgw.protocol.channel import ChannelClosed
from llmgw.protocol.messages import Goodbye, Message
from llmgw.protocol.router_messages import (
    ROUTER_SILENT_S,
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
    UseOf,
    WakeModel,
)
from llmgw.sim.channel import SimChannel, Wire, channel_pair
from llmgw.sim.machine import SimMachine

CATALOG = Catalog((ModelSpec("m", (Profile("p", "command", command=("/e",), env={"HF_TOKEN": "hf-secret"}),)),), 3)
E1, E2 = EndpointId("e1"), EndpointId("e2")


def listed(*names: str) -> EndpointList:
    return EndpointList(tuple(Endpoint(EndpointId(name), f"http://10.0.0.1/{name}", ("m",)) for name in names))


@attrs.define(eq=False)
class Claim:
    """A control plane's leadership, changed at will."""

    cluster_id: ClusterId = ClusterId("c1")
    owner: OwnerId = OwnerId("ctl-1")
    epoch: int = 1
    is_leader: bool = True
    higher: list[tuple[int, str]] = attrs.Factory(list)

    @property
    def token(self) -> FencingToken:
        assert self.is_leader
        return FencingToken(self.cluster_id, self.epoch, self.owner)

    def met(self, epoch: int, owner: str) -> None:
        if (epoch, owner) != (self.epoch, self.owner):
            self.higher.append((epoch, owner))


@attrs.define(eq=False)
class World:
    nursery: trio.Nursery
    machine: SimMachine = attrs.Factory(lambda: SimMachine(1))
    known: frozenset[EndpointId] | None = None
    pokes: int = 0
    woken: list[str] = attrs.Factory(list)
    generation: int = 0
    leadership: Claim = attrs.Factory(Claim)
    feeds: RouterFeeds = attrs.field(init=False)

    async def start(self, *, settled_routers: bool = True) -> World:
        self.feeds = RouterFeeds(
            self.machine,
            self.leadership,
            known_replicas=lambda: self.known,
            ttl_s=lambda: 12.0,
            poke=self._poke,
            wake=self.woken.append,
        )
        self.feeds.set_catalog(CATALOG)
        self.feeds.set_policy(Policy(keys=(ApiKey("a", "0" * 64),)))
        self.publish("e1")
        if settled_routers:
            await trio.sleep(ROUTER_SILENT_S)
        return self

    def _poke(self) -> None:
        self.pokes += 1

    def publish(self, *names: str) -> ListStamp:
        self.generation += 1
        stamp = ListStamp(self.leadership.token, self.generation)
        self.feeds.set_endpoints(listed(*names), stamp)
        return stamp

    def dial(self) -> SimChannel:
        """The router's end of a new session."""
        ours, theirs = channel_pair("router")
        self.nursery.start_soon(self.feeds.run, theirs)
        return ours

    async def router(self, name: str = "r1", highest: FencingToken | None = None, instance: str = "", digest_form: int = 0) -> SimChannel:
        end = self.dial()
        await end.send(RouterHello(name, instance or f"{name}-process", "0.1.0", highest, digest_form=digest_form))
        welcome = await end.receive()
        assert isinstance(welcome, RouterWelcome)
        assert (welcome.cluster_id, welcome.owner, welcome.ttl_s) == ("c1", "ctl-1", 12.0)
        return end

    async def report(self, end: SimChannel, generation: int, *, full: bool = False, push: int | None = None, **use: int) -> None:
        """What a router says of itself: the list that it acts on, and its requests in flight."""
        token = self.leadership.token
        rows = tuple(UseOf(EndpointId(name), EndpointUse(in_flight=count)) for name, count in use.items())
        acknowledged = Acknowledged(token, generation, generation if push is None else push)  # a push for each list, in most tests
        await end.send(RouterReport(token, acknowledged, rows, full=full))
        await trio.testing.wait_all_tasks_blocked()


@pytest.fixture
async def world(autojump_clock: object, nursery: trio.Nursery) -> World:
    return await World(nursery).start()


async def next_of(end: SimChannel, kind: type[Message]) -> Message:
    with trio.fail_after(1000):
        while True:
            message = await end.receive()
            if isinstance(message, kind):
                return message


# --- what is pushed


async def test_a_router_gets_policy_catalog_and_list_in_this_order_and_then_a_beat_a_second(autojump_clock: object, world: World) -> None:
    end = await world.router()
    got = [await end.receive() for _ in range(6)]
    assert [type(one) for one in got] == [PushPolicy, PushCatalog, PushEndpoints, Standing, Standing, Standing]
    assert got[2] == PushEndpoints(ListStamp(world.leadership.token, 1), listed("e1"), push=1)
    assert got[3] == Standing(world.leadership.token, 1, 12.0, push=1)


async def test_a_change_goes_out_at_once_and_several_become_the_last_one(autojump_clock: object, world: World) -> None:
    end = await world.router()
    await next_of(end, Standing)
    started_s = trio.current_time()
    world.publish("e1", "e2")
    last = world.publish("e2")
    assert await next_of(end, PushEndpoints) == PushEndpoints(last, listed("e2"), push=3)
    assert trio.current_time() == started_s


async def test_what_engines_are_started_with_is_not_sent(autojump_clock: object, world: World) -> None:
    end = await world.router()
    catalog = await next_of(end, PushCatalog)
    assert "hf-secret" not in str(catalog)
    assert isinstance(catalog, PushCatalog)
    assert catalog.catalog.get("m") is not None


async def test_an_equal_policy_is_not_sent_again(autojump_clock: object, world: World) -> None:
    end = await world.router()
    await next_of(end, Standing)
    world.feeds.set_policy(Policy(keys=(ApiKey("a", "0" * 64),)))
    await next_of(end, Standing)
    world.feeds.set_policy(Policy(keys=()))
    assert await end.receive() == PushPolicy(world.leadership.token, Policy(keys=()))


async def test_all_is_sent_again_under_a_new_epoch_and_nothing_of_the_old_one(autojump_clock: object, world: World) -> None:
    end = await world.router()
    await next_of(end, Standing)
    world.leadership.epoch = 41
    policy = await next_of(end, PushPolicy)
    assert isinstance(policy, PushPolicy)
    assert policy.token.epoch == 41
    await next_of(end, Standing)
    stamp = world.publish("e1")
    pushed = await next_of(end, PushEndpoints)
    assert isinstance(pushed, PushEndpoints)
    assert pushed.stamp == stamp
    assert stamp.token.epoch == 41


async def test_a_control_plane_that_stepped_down_says_so_and_pushes_nothing(autojump_clock: object, world: World) -> None:
    end = await world.router()
    await next_of(end, Standing)
    world.leadership.is_leader = False
    world.feeds.set_policy(Policy(keys=()))
    while (beat := await next_of(end, Standing)) != Standing(None, 1, 12.0, push=1):
        assert isinstance(beat, Standing)
    assert isinstance(await end.receive(), Standing)


async def test_while_nodes_have_not_been_heard_the_list_says_so_and_names_what_is_gone(autojump_clock: object, world: World) -> None:
    world.known = frozenset({E1, E2})
    end = await world.router()
    first = await next_of(end, PushEndpoints)
    assert first == PushEndpoints(ListStamp(world.leadership.token, 1), listed("e1"), False, ("e2",), 2)
    world.known = frozenset({E1, E2, EndpointId("e3")})
    second = await next_of(end, PushEndpoints)
    assert isinstance(second, PushEndpoints)
    assert second.gone == ("e2", "e3")
    world.known = None
    assert await next_of(end, PushEndpoints) == PushEndpoints(ListStamp(world.leadership.token, 1), listed("e1"), push=4)


# --- deltas


async def pushes(end: SimChannel, count: int) -> list[PushEndpoints | PushDelta]:
    found: list[PushEndpoints | PushDelta] = []
    with trio.fail_after(1000):
        while len(found) < count:
            message = await end.receive()
            if isinstance(message, PushEndpoints | PushDelta):
                found.append(message)
    return found


async def test_a_router_that_checks_deltas_is_sent_the_whole_list_first_and_then_what_changes(autojump_clock: object, world: World) -> None:
    end = await world.router(digest_form=DIGEST_FORM)
    (whole,) = await pushes(end, 1)
    stamp = world.publish("e1", "e2")
    (change,) = await pushes(end, 1)
    assert whole == PushEndpoints(ListStamp(world.leadership.token, 1), listed("e1"), push=1)
    assert isinstance(change, PushDelta)
    assert (change.stamp, change.push, change.settled, change.gone) == (stamp, 2, True, ())
    assert change.delta.changed == listed("e2").endpoints
    assert list_delta.apply(listed("e1"), change.delta) == listed("e1", "e2")


@pytest.mark.parametrize("form", [0, DIGEST_FORM + 1, -1])
async def test_a_router_of_another_build_with_other_digests_or_none_is_sent_whole_lists(
    autojump_clock: object, world: World, form: int
) -> None:
    end = await world.router(digest_form=form)
    await pushes(end, 1)
    stamp = world.publish("e1", "e2")
    assert await pushes(end, 1) == [PushEndpoints(stamp, listed("e1", "e2"), push=2)]


async def test_several_changes_at_once_are_one_delta_over_what_the_router_has(autojump_clock: object, world: World) -> None:
    end = await world.router(digest_form=DIGEST_FORM)
    await pushes(end, 1)
    world.publish("e1", "e2")
    world.publish("e2", "e3")
    (change,) = await pushes(end, 1)
    assert isinstance(change, PushDelta)
    assert list_delta.apply(listed("e1"), change.delta) == listed("e2", "e3")


async def test_what_is_only_said_anew_beside_an_unchanged_list_is_a_delta_of_nothing(autojump_clock: object, world: World) -> None:
    world.known = frozenset({E1, E2})
    end = await world.router(digest_form=DIGEST_FORM)
    await pushes(end, 1)
    world.known = None
    (change,) = await pushes(end, 1)
    assert isinstance(change, PushDelta)
    assert change.delta == list_delta.ListDelta(listed("e1").fingerprint, listed("e1").fingerprint)
    assert change.settled


async def test_a_list_that_no_delta_can_say_goes_whole(autojump_clock: object, world: World) -> None:
    end = await world.router(digest_form=DIGEST_FORM)
    await pushes(end, 1)
    stamp = world.publish("e2", "e1")
    assert await pushes(end, 1) == [PushEndpoints(stamp, listed("e2", "e1"), push=2)]


async def test_a_router_that_asks_is_sent_the_whole_list_at_once_and_deltas_over_it_afterwards(
    autojump_clock: object, world: World
) -> None:
    end, other = await world.router("r1", digest_form=DIGEST_FORM), await world.router("r2", digest_form=DIGEST_FORM)
    await pushes(end, 1)
    stamp = world.publish("e1", "e2")
    await pushes(end, 1)
    started_s = trio.current_time()
    await end.send(AskEndpoints("it does not fit"))
    assert await pushes(end, 1) == [PushEndpoints(stamp, listed("e1", "e2"), push=2)]
    assert trio.current_time() == started_s
    world.publish("e1")
    assert isinstance((await pushes(end, 1))[0], PushDelta)
    assert [type(one) for one in await pushes(other, 3)] == [PushEndpoints, PushDelta, PushDelta], "nobody else is sent it again"


async def test_a_push_is_made_once_for_all_routers_that_have_the_same_list(autojump_clock: object, world: World) -> None:
    sent: list[Message] = []
    ends = []
    for number in range(3):
        ours, theirs = channel_pair("router", wire=Wire(left=lambda sender, receiver, message: sent.append(message)))
        world.nursery.start_soon(world.feeds.run, theirs)
        await ours.send(RouterHello(f"r{number}", f"i{number}", "0", digest_form=DIGEST_FORM))
        await pushes(ours, 1)
        ends.append(ours)
    world.publish("e1", "e2")
    for end in ends:
        await pushes(end, 1)
    for kind in (PushEndpoints, PushDelta):
        assert len({id(message) for message in sent if isinstance(message, kind)}) == 1


# --- what they hold up


async def test_with_no_router_nothing_is_held_up(autojump_clock: object, world: World) -> None:
    assert world.feeds.acknowledged() == HOLDS_NOTHING
    assert world.feeds.use() == {}


async def test_a_control_plane_that_has_just_started_waits_for_routers_before_it_counts_anything_as_acknowledged(
    autojump_clock: object, nursery: trio.Nursery
) -> None:
    world = await World(nursery).start(settled_routers=False)
    assert world.feeds.acknowledged() == 0
    await trio.sleep(ROUTER_SILENT_S - 0.1)
    assert world.feeds.acknowledged() == 0
    await trio.sleep(0.2)
    assert world.feeds.acknowledged() == HOLDS_NOTHING


async def test_the_slowest_router_counts(autojump_clock: object, world: World) -> None:
    first, second = await world.router("r1"), await world.router("r2")
    assert world.feeds.acknowledged() == 0  # connected, and has acknowledged nothing
    for _ in range(3):
        world.publish("e1")
    await world.report(first, 4)
    assert world.feeds.acknowledged() == 0
    await world.report(second, 2)
    assert world.feeds.acknowledged() == 2
    await world.report(second, 4)
    assert world.feeds.acknowledged() == 4


async def test_an_acknowledgement_of_another_token_counts_for_nothing(autojump_clock: object, world: World) -> None:
    end = await world.router()
    token = world.leadership.token
    for other in (attrs.evolve(token, epoch=token.epoch - 1), attrs.evolve(token, owner=OwnerId("ctl-0"))):
        await end.send(RouterReport(token, Acknowledged(other, 99)))
        await trio.testing.wait_all_tasks_blocked()
        assert world.feeds.acknowledged() == 0


async def test_what_a_router_has_kept_from_a_leader_before_is_not_let_go_of_by_a_generation_that_never_held_it(
    autojump_clock: object, nursery: trio.Nursery
) -> None:
    world = World(nursery)
    world.known = frozenset({E1})
    await world.start()
    end = await world.router()
    await world.report(end, 1, push=1)
    assert world.feeds.acknowledged() == 1
    world.known = frozenset({E1, E2})  # a node answered: it runs e2, which this leader has never listed and wants to stop
    assert world.feeds.acknowledged() == 0, "the router may have e2 from the leader before us, and does not know yet that it goes"
    pushed = await next_of(end, PushEndpoints)
    while isinstance(pushed, PushEndpoints) and pushed.gone != (E2,):
        pushed = await next_of(end, PushEndpoints)
    assert isinstance(pushed, PushEndpoints)
    assert pushed.stamp.generation == 1
    await world.report(end, 1, push=pushed.push)
    assert world.feeds.acknowledged() == 1
    world.known = None  # all nodes are heard: from here on only what is listed counts, which the router is still to be told
    assert world.feeds.acknowledged() == 0
    pushed = await next_of(end, PushEndpoints)
    assert isinstance(pushed, PushEndpoints)
    assert pushed.settled
    await world.report(end, 1, push=pushed.push)
    assert world.feeds.acknowledged() == 1


async def test_a_router_that_is_silent_for_five_seconds_holds_up_nothing_until_it_speaks_again(
    autojump_clock: object, world: World
) -> None:
    end = await world.router()
    await world.report(end, 1, e1=3)
    world.publish()
    await trio.sleep(ROUTER_SILENT_S - 0.1)
    assert world.feeds.acknowledged() == 1
    assert world.feeds.use()[E1].in_flight == 3
    await trio.sleep(0.2)
    assert world.feeds.acknowledged() == HOLDS_NOTHING
    assert world.feeds.use() == {}
    await world.report(end, 1, e1=3)
    assert world.feeds.acknowledged() == 1
    assert world.feeds.use()[E1].in_flight == 3


async def test_a_router_that_has_left_is_forgotten_after_five_seconds(autojump_clock: object, world: World) -> None:
    end = await world.router()
    await world.report(end, 1, e1=1)
    await end.close()
    await trio.sleep(1)
    assert world.feeds.acknowledged() == 1  # it may be back in a moment, with requests still running
    assert world.feeds.use()[E1].in_flight == 1
    assert world.feeds.connected() == ()
    await trio.sleep(ROUTER_SILENT_S)
    assert world.feeds.acknowledged() == HOLDS_NOTHING
    assert world.feeds.use() == {}


async def test_a_router_that_comes_back_is_one_router(autojump_clock: object, world: World) -> None:
    end = await world.router()
    await world.report(end, 1, e1=1)
    await end.close()
    again = await world.router(highest=world.leadership.token)
    await world.report(again, 1, full=True, e1=1)
    assert world.feeds.use()[E1].in_flight == 1
    assert [one.id for one in world.feeds.connected()] == ["r1"]


async def test_two_processes_of_one_copied_data_directory_are_two_routers(autojump_clock: object, world: World) -> None:
    first, second = await world.router("r1", instance="a"), await world.router("r1", instance="b")
    await world.report(first, 1, e1=1)
    await world.report(second, 1, e1=2)
    assert world.feeds.use()[E1].in_flight == 3
    assert len(world.feeds.connected()) == 2


async def test_use_keeps_what_is_not_said_again_with_its_age_and_drops_what_is_gone(autojump_clock: object, world: World) -> None:
    end = await world.router()
    await world.report(end, 1, full=True, e1=0, e2=1)
    for _ in range(3):
        await trio.sleep(1)
        await world.report(end, 1, e2=1)
    assert world.feeds.use()[E1].last_used_s == pytest.approx(3.0, abs=0.1)
    token = world.leadership.token
    await end.send(RouterReport(token, Acknowledged(token, 1), gone=(E2,)))
    await trio.testing.wait_all_tasks_blocked()
    assert set(world.feeds.use()) == {E1}
    await world.report(end, 1, full=True, e2=1)
    assert set(world.feeds.use()) == {E2}


async def test_the_planner_is_woken_by_an_acknowledgement_and_by_the_end_of_what_ran_at_a_withdrawn_endpoint_only(
    autojump_clock: object, world: World
) -> None:
    end = await world.router()
    await world.report(end, 1, e1=1)
    before = world.pokes
    await world.report(end, 1, e1=2)  # a published endpoint: the planner has nothing to learn from it
    assert world.pokes == before
    world.publish()
    await world.report(end, 2, e1=2)
    assert world.pokes == before + 1
    await world.report(end, 2, e1=1)
    assert world.pokes == before + 2
    await world.report(end, 2, e1=1)
    assert world.pokes == before + 2


async def test_a_wish_to_wake_reaches_the_planner(autojump_clock: object, world: World) -> None:
    end = await world.router()
    await end.send(WakeModel("cold"))
    await trio.testing.wait_all_tasks_blocked()
    assert world.woken == ["cold"]


# --- the fence, and bad peers


@pytest.mark.parametrize("how", ["hello", "report", "refused"])
async def test_a_higher_epoch_met_at_a_router_makes_this_control_plane_acquire_above_it(
    autojump_clock: object, world: World, how: str
) -> None:
    met = FencingToken(ClusterId("c1"), 30, OwnerId("ctl-9"))
    end = await world.router(highest=met if how == "hello" else None)
    if how == "report":
        await end.send(RouterReport(met, None))
    if how == "refused":
        await end.send(RouterRefused("stale_epoch", "x", 30, OwnerId("ctl-9")))
    await trio.testing.wait_all_tasks_blocked()
    assert world.leadership.higher[0] == (30, "ctl-9")


async def test_a_routers_own_echo_of_our_token_changes_nothing(autojump_clock: object, world: World) -> None:
    end = await world.router(highest=world.leadership.token)
    await world.report(end, 1)
    assert world.leadership.higher == []


FOREIGN = FencingToken(ClusterId("c2"), 1, OwnerId("o"))
BAD_HELLOS = {
    "another cluster's": RouterHello("r", "i", "0", FOREIGN),
    "a far protocol": RouterHello("r", "i", "0", protocol=9),
    "no name": RouterHello("", "i", "0"),
    "no instance": RouterHello("r", "", "0"),
    "a name that is none": RouterHello("r\n", "i", "0"),
    "a name without end": RouterHello("r" * 5000, "i", "0"),
    "an epoch that is none": RouterHello("r", "i", "0", FencingToken(ClusterId("c1"), -1, OwnerId("o"))),
    "an epoch beyond any": RouterHello("r", "i", "0", FencingToken(ClusterId("c1"), 2**60, OwnerId("o"))),
    "no hello": WakeModel("m"),
}


@pytest.mark.parametrize("hello", BAD_HELLOS.values(), ids=BAD_HELLOS.keys())
async def test_a_bad_hello_is_answered_with_the_reason_and_disturbs_nobody(autojump_clock: object, world: World, hello: Message) -> None:
    good = await world.router("good")
    end = world.dial()
    await end.send(hello)
    goodbye = await next_of(end, Goodbye)
    assert isinstance(goodbye, Goodbye)
    assert goodbye.text
    with pytest.raises(ChannelClosed):
        await end.receive()
    assert world.leadership.higher == []
    await world.report(good, 1)
    assert [one.id for one in world.feeds.connected()] == ["good"]


BAD_MESSAGES = [b"{", b'{"type": "Nonsense"}', b'{"type": "RouterReport"}', b"\xff", b"[" * 100_000, b'{"type": "Standing"}']


@pytest.mark.parametrize("data", BAD_MESSAGES)
async def test_junk_ends_its_own_session_only(autojump_clock: object, world: World, data: bytes) -> None:
    good, bad = await world.router("good"), await world.router("bad")
    await bad.send_bytes(data)
    assert isinstance(await next_of(bad, Goodbye), Goodbye)
    await world.report(good, 1)
    assert [one.id for one in world.feeds.connected()] == ["good"]


async def test_a_peer_that_says_nothing_or_goes_silent_is_let_go(autojump_clock: object, world: World) -> None:
    mute, silent = world.dial(), await world.router()
    await next_of(mute, Goodbye)
    with pytest.raises(ChannelClosed), trio.fail_after(60):
        while True:
            await silent.receive()
