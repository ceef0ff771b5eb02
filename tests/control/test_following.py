"""A control plane without a router of its own, and routers that follow it: withdrawal before stop, restarts of either side."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from llmgw.domain.endpoint import EndpointUse
from llmgw.domain.errors import Unavailable
from llmgw.domain.ids import EndpointId
from llmgw.protocol.channel import Channel
from llmgw.protocol.router_messages import ROUTER_SILENT_S
from llmgw.router.follow import Follower
from llmgw.sim.channel import SimChannel, channel_pair
from llmgw.sim.machine import SimMachine
from llmgw.sim.router import SimRouter
from tests.control.world import URL, World, model, run_world


class RouterProcess:
    """A router of its own, on a disk that outlives it. `cut` True: it reaches nobody."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.machine = SimMachine(seed)
        self.router = SimRouter()
        self.cut = False
        self._channels: list[SimChannel] = []
        self._scope = trio.CancelScope()

    async def start(self) -> SimRouter:
        self.router = SimRouter()
        self._scope = trio.CancelScope()
        follower = Follower(self.machine, self.router, self._dial, folder=Path("/router"), control_planes=(URL,))
        await follower.load()
        self.world.nursery.start_soon(self._run, follower)
        return self.router

    async def _run(self, follower: Follower) -> None:
        with self._scope:
            await follower.run()

    async def lose_sessions(self) -> None:
        """As the network loses them: neither end says a word."""
        for channel in self._channels:
            await channel.close()

    async def kill(self) -> None:
        await self.lose_sessions()
        self._scope.cancel()

    @asynccontextmanager
    async def _dial(self, url: str) -> AsyncIterator[Channel]:
        if self.cut or self.world.control is None:
            raise Unavailable(f"{url} cannot be reached")
        ours, theirs = channel_pair("router")
        self._channels = [ours, theirs]
        self.world.nursery.start_soon(self.world.control.controller.routers.run, theirs)
        try:
            yield ours
        finally:
            await ours.close()


async def site(world: World, routers: int = 1, count: int = 2) -> list[RouterProcess]:
    """A model with `count` ready replicas, which every router has been told of."""
    await world.start_control(model("a", count))
    await world.add_node("n1")
    found = [RouterProcess(world, 100 + number) for number in range(routers)]
    for one in found:
        await one.start()
    await world.wait(lambda: all(len(one.router.ids()) == count for one in found), "every router has the whole list")
    await trio.sleep(ROUTER_SILENT_S)
    return found


def stopped(world: World) -> bool:
    return world.process_ends > 0


def followed(main: object, seed: int = 1) -> None:
    run_world(main, seed, embedded=False)  # type: ignore[arg-type]


def test_a_replica_is_stopped_once_every_router_acts_on_a_list_without_it_and_not_before() -> None:
    async def main(world: World) -> None:
        first, second = await site(world, routers=2)
        second.router.acknowledges = False
        await world.control.controller.models.scale("a", 1)
        await world.wait(lambda: len(first.router.ids()) == len(second.router.ids()) == 1, "it is withdrawn")
        await trio.sleep(20)
        assert not stopped(world), "one router has not acknowledged"
        second.router.acknowledges = True
        asked_s = trio.current_time()
        await world.wait(lambda: stopped(world), "the stop")
        assert trio.current_time() - asked_s < 2.0

    followed(main)


def test_requests_that_run_at_a_withdrawn_replica_end_before_it_is_stopped_and_their_end_is_noticed_at_once() -> None:
    async def main(world: World) -> None:
        (one,) = await site(world)
        one.router.uses = {EndpointId(known): EndpointUse(in_flight=1) for known in one.router.ids()}
        await world.control.controller.models.scale("a", 1)
        await world.wait(lambda: len(one.router.ids()) == 1, "it is withdrawn")
        await trio.sleep(15)  # route.drain_s is 30
        assert not stopped(world)
        one.router.uses = {}
        ended_s = trio.current_time()
        await world.wait(lambda: stopped(world), "the stop")
        assert trio.current_time() - ended_s < 1.0

    followed(main)


@pytest.mark.parametrize("how", ["killed", "cut off"])
def test_a_router_that_is_silent_holds_up_a_stop_for_five_seconds_and_no_longer(how: str) -> None:
    async def main(world: World) -> None:
        (one,) = await site(world)
        one.cut = True
        await (one.kill() if how == "killed" else one.lose_sessions())
        silent_s = trio.current_time()
        await world.control.controller.models.scale("a", 1)
        await trio.sleep(ROUTER_SILENT_S - 1.2)
        assert not stopped(world), "it may be back in a moment, and it still sends requests there"
        await world.wait(lambda: stopped(world), "the stop")
        assert trio.current_time() - silent_s < ROUTER_SILENT_S + 3.0
        if how == "cut off":
            assert len(one.router.ids()) == 2, "it serves what it has; a refused connect sends its requests elsewhere"

    followed(main)


def test_a_control_plane_that_is_killed_and_comes_back_before_its_agents_takes_nothing_off_a_router() -> None:
    async def main(world: World) -> None:
        (one,) = await site(world)
        before, history = one.router.ids(), len(one.router.history)
        starts = world.process_starts
        world.kill_agent("n1")
        await one.lose_sessions()
        controller = await world.restart_control()
        await world.wait(
            lambda: controller.routers.connected() != () and controller.routers.connected()[0].generation > 0, "it follows again"
        )
        await trio.sleep(30)  # within the node's grace
        assert controller.publisher.current.endpoints == ()
        assert [following.endpoints for following in controller.routers.connected()] == [2], "what it acts on is shown"
        world.start_agent("n1")
        await world.wait(lambda: len(world.ready("a")) == 2, "the agent is back")
        await trio.sleep(30)
        assert {ids for _, endpoints in one.router.history[history:] for ids in [tuple(e.id for e in endpoints.endpoints)]} == {before}
        assert (world.process_starts, world.process_ends) == (starts, 0)
        assert one.router.highest == controller.leadership.token

    followed(main)


def test_a_model_removed_while_its_node_is_away_leaves_the_router_before_its_replicas_are_stopped() -> None:
    async def main(world: World) -> None:
        (one,) = await site(world)
        chosen: tuple[str, ...] = one.router.ids()
        world.kill_agent("n1")
        await one.lose_sessions()
        controller = await world.restart_control()
        await world.wait(lambda: controller.routers.connected() != (), "it follows again")
        await controller.models.remove("a")
        world.start_agent("n1")
        while not stopped(world):
            chosen = one.router.ids()
            await trio.sleep(0.01)
        assert chosen == (), "stopped while the router still chose it"

    followed(main)


def test_a_router_restarted_while_no_control_plane_runs_has_its_list_and_the_next_control_plane_knows_its_epoch() -> None:
    async def main(world: World) -> None:
        (one,) = await site(world)
        before = one.router.ids()
        epoch = world.control.controller.leadership.epoch
        one.cut = True
        await one.kill()
        router = await one.start()
        assert router.ids() == before
        world.store = None  # another store: its epochs begin anew, which no router obeys
        world.machine.disk.files.clear()
        one.cut = False
        controller = await world.restart_control()
        await world.wait(
            lambda: controller.leadership.is_leader and controller.leadership.epoch > epoch, "it acquires above what the router met"
        )

    followed(main)


def test_the_time_of_last_use_reaches_the_control_plane() -> None:
    async def main(world: World) -> None:
        (one,) = await site(world, count=1)
        (known,) = one.router.ids()
        one.router.uses = {EndpointId(known): EndpointUse(last_used_s=7.0, answers=1)}
        controller = world.control.controller
        await world.wait(lambda: EndpointId(known) in controller.use(), "the use is told")
        assert controller.use()[EndpointId(known)].last_used_s == pytest.approx(7.0, abs=1.0)

    followed(main)
