"""A control plane's feed and the routers that follow it, over channels that lose what they carry: what comes is what was published."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from llmgw.control.feed import RouterFeeds
from llmgw.domain.endpoint import Absence, AbsenceReason, Endpoint, EndpointList, ListStamp
from llmgw.domain.ids import ClusterId, EndpointId, OwnerId
from llmgw.domain.lease import FencingToken
from llmgw.protocol.channel import Channel
from llmgw.protocol.messages import Message
from llmgw.protocol.router_messages import PushDelta, PushEndpoints
from llmgw.router.follow import ASK_AGAIN_S, Follower
from llmgw.sim.channel import Link, SimChannel, Wire, channel_pair
from llmgw.sim.machine import SimMachine
from llmgw.sim.router import SimRouter

ROUTERS = 2
SETTLE_S = 3 * ASK_AGAIN_S  # a list may be lost, asked for, lost again
MODELS = ("m", "n")


@attrs.frozen
class Publish:
    """`weights` by endpoint; what has none is not listed."""

    weights: dict[str, int]
    absent: frozenset[str]


@attrs.frozen
class Lose:
    """The next `count` lists on the way to one router, whole or not."""

    router: int
    count: int


@attrs.frozen
class Break:
    """One router's session ends; it dials again."""

    router: int


PUBLISHES = st.builds(
    Publish,
    weights=st.dictionaries(st.sampled_from(("e1", "e2", "e3")), st.integers(1, 2)),
    absent=st.frozensets(st.sampled_from(MODELS)),
)
ROUTER = st.integers(0, ROUTERS - 1)
STEPS = st.lists(st.one_of(PUBLISHES, PUBLISHES, st.builds(Lose, ROUTER, st.integers(1, 2)), st.builds(Break, ROUTER)), max_size=12)


def listed(step: Publish) -> EndpointList:
    endpoints = tuple(Endpoint(EndpointId(name), f"http://{name}", ("m",), weight=step.weights[name]) for name in sorted(step.weights))
    return EndpointList(endpoints, tuple(Absence((model,), AbsenceReason.LOADING) for model in sorted(step.absent)))


class Leader:
    """It leads, and nobody disputes it."""

    cluster_id = ClusterId("c1")
    owner = OwnerId("ctl-1")
    epoch = 1
    is_leader = True
    token = FencingToken(cluster_id, epoch, owner)

    def met(self, epoch: int, owner: str) -> None:
        assert (epoch, owner) == (self.epoch, self.owner)


class Following:
    """A router of its own, and what its way loses."""

    def __init__(self, nursery: trio.Nursery, feeds: RouterFeeds, number: int) -> None:
        self.router = SimRouter()
        self.lose = 0
        self.lost = 0
        self.deltas = 0
        self.ends: tuple[SimChannel, ...] = ()
        self._nursery = nursery
        self._feeds = feeds
        self._link = Link()
        self._link.loses = self._loses
        self.follower = Follower(
            SimMachine(number), self.router, self._dial, folder=Path("/router"), control_planes=("http://ctl",), name=f"r{number}"
        )

    def _loses(self, message: Message) -> bool:
        if not isinstance(message, PushEndpoints | PushDelta):
            return False
        if self.lose:
            self.lose -= 1
            self.lost += 1
            return True
        self.deltas += isinstance(message, PushDelta)
        return False

    @asynccontextmanager
    async def _dial(self, url: str) -> AsyncIterator[Channel]:
        self.ends = channel_pair("router", wire=Wire(self._link))
        self._nursery.start_soon(self._feeds.run, self.ends[1])
        try:
            yield self.ends[0]
        finally:
            await self.ends[0].close()

    async def run(self) -> None:
        await self.follower.load()
        await self.follower.run()

    async def break_off(self) -> None:
        for end in self.ends:
            await end.close()


async def life(steps: list[Publish | Lose | Break]) -> list[Following]:
    published: dict[int, EndpointList] = {}
    leader = Leader()
    feeds = RouterFeeds(SimMachine(0), leader, known_replicas=lambda: None, ttl_s=lambda: 15.0, poke=lambda: None, wake=lambda model: None)

    def publish(step: Publish) -> None:
        endpoints = listed(step)
        published[len(published) + 1] = endpoints
        feeds.set_endpoints(endpoints, ListStamp(leader.token, len(published)))

    async with trio.open_nursery() as nursery:
        routers = [Following(nursery, feeds, number) for number in range(ROUTERS)]
        for one in routers:
            nursery.start_soon(one.run)
        publish(Publish({"e1": 1}, frozenset()))
        await trio.sleep(1)
        for step in steps:
            match step:
                case Publish():
                    publish(step)
                case Lose(router, count):
                    routers[router].lose = count
                case Break(router):
                    await routers[router].break_off()
            await trio.testing.wait_all_tasks_blocked()
        for one in routers:
            one.lose = 0
        await trio.sleep(SETTLE_S)
        nursery.cancel_scope.cancel()
    for one in routers:
        assert all(endpoints == published[stamp.generation] for stamp, endpoints in one.router.history), "acted on what nobody published"
        assert one.router.endpoints == published[len(published)]
    return routers


def run(steps: list[Publish | Lose | Break]) -> list[Following]:
    return trio.run(life, steps, clock=trio.testing.MockClock(autojump_threshold=0))


@given(STEPS)
def test_whatever_is_lost_on_the_way_a_router_acts_on_published_lists_only_and_on_the_last_one_in_the_end(
    steps: list[Publish | Lose | Break],
) -> None:
    run(steps)


def test_lists_that_were_lost_are_made_good_for_the_one_router_and_change_nothing_for_the_other() -> None:
    both = Publish({"e1": 1, "e2": 1}, frozenset())
    loser, other = run([Lose(0, 2), both, Publish({"e2": 2}, frozenset(MODELS)), both])
    assert (loser.lost, other.lost, other.deltas) == (2, 0, 3)
    assert [stamp.generation for stamp, _ in other.router.history] == [1, 2, 3, 4]
    assert loser.router.history[-1] == other.router.history[-1]
