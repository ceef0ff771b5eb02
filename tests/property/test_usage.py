"""Usage under random schedules: leaders change, stores blip, routers die, and each answer is counted once."""

from __future__ import annotations

import random

import pytest
import trio

from llmgw.router.follow import Follower
from llmgw.router.usage import Tokens
from llmgw.router.usage_book import BookState
from llmgw.router.usage_keeper import USAGE_FILE, UsageKeeper
from llmgw.sim.machine import SimMachine
from llmgw.store import usage
from llmgw.store.usage import By
from tests.property.schedules import FAULTS, PAUSE_S, QUIET_S, STORM
from tests.property.world import FOLDER, Shape, World, quiet_logs, run_world

ANSWER_S: float = 3.0  # the longest between two answers
LOOK_S: float = 0.05


class Counting:
    """The world's separate router counts answers. `sure` were on its disk before it could die; of `maybe` nobody knows."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.rng = random.Random(seed)
        self.sure = self.maybe = 0
        self.answers = True
        self.keeper: UsageKeeper | None = None

    async def run(self) -> None:
        """Goes with the router's process, whichever it is."""
        current: Follower | None = None
        scope = trio.CancelScope()
        while True:
            found = self.world.followers.get("router")
            if found is not None and found[0] is not current:
                scope.cancel()
                current, scope = found[0], trio.CancelScope()
                self.world.nursery.start_soon(self._live, current, self.world.machines["router"], scope)
            await trio.sleep(LOOK_S)

    async def _live(self, follower: Follower, machine: SimMachine, scope: trio.CancelScope) -> None:
        with scope:
            keeper = UsageKeeper(machine, FOLDER / USAGE_FILE, follower.tell_usage)
            follower.usage_taken = keeper.taken
            await keeper.load()
            self.keeper = keeper
            async with trio.open_nursery() as nursery:
                nursery.start_soon(keeper.run)
                while True:
                    await trio.sleep(self.rng.uniform(0.0, ANSWER_S))
                    if self.answers:
                        keeper.book.add(machine.wall_s(), self.rng.choice("kl"), "a", Tokens(5, 1, 2), unknown=False)
                        self.maybe += 1
                        await keeper.tell()
                        self.maybe, self.sure = self.maybe - 1, self.sure + 1

    def told(self) -> bool:
        return self.keeper is not None and self.keeper.book.state() == BookState()


@pytest.mark.parametrize("seed", range(20))
def test_each_answer_is_counted_once_whatever_happens_to_control_planes_and_router(seed: int) -> None:
    async def main(world: World) -> None:
        await world.start()
        counting = Counting(world, seed)
        world.nursery.start_soon(counting.run)
        for _ in range(FAULTS):
            await trio.sleep(world.rng.uniform(0.0, PAUSE_S))
            await world.rng.choice(STORM.faults)(world)
        while world.healing:
            await trio.sleep(1.0)
        counting.answers = False
        await world.wait_settled(QUIET_S)
        with trio.fail_after(QUIET_S):
            while not counting.told():
                await trio.sleep(1.0)
        leader = world.leader()
        assert leader is not None
        (found,) = await usage.sums(leader.store, By.MODEL)
        assert counting.sure <= found.requests <= counting.sure + counting.maybe
        assert (found.prompt, found.cached, found.completion) == (5 * found.requests, found.requests, 2 * found.requests)

    with quiet_logs():
        run_world(main, seed, Shape(planes=2 + seed % 2, one_machine=seed % 3 == 0))
