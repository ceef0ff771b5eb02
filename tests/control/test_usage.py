"""Where usage comes to: the leader stores it and says so only then, a standby carries it, and what failed is told again."""

from __future__ import annotations

import random
from pathlib import Path

import attrs
import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from llmgw.control.controller import HOUSEKEEPING_S, MONTH_S
from llmgw.control.usage import CARRY_DEADLINE_S, WAITING_MAX, UsageLedger
from llmgw.domain.errors import Invalid, StaleEpoch, Unavailable
from llmgw.domain.usage import UsageBatch, UsageRow, hour_of
from llmgw.router.follow import Follower
from llmgw.router.usage import Tokens
from llmgw.router.usage_keeper import UsageKeeper
from llmgw.sim.machine import SimMachine
from llmgw.sim.router import SimRouter
from llmgw.store import usage
from llmgw.store.connection import MEMORY, FileStore, Store
from llmgw.store.usage import By
from tests.control.test_following import RouterProcess
from tests.control.world import URL, World, model, run_world

ROW = UsageRow(3600, "k", "m", 1, 0, 5, 0, 2)
BAD = [
    UsageBatch("", 1, (ROW,)),
    UsageBatch("r1", 0, (ROW,)),
    UsageBatch("r1", 1, (attrs.evolve(ROW, hour=3601),)),
    UsageBatch("r1", 1, (attrs.evolve(ROW, prompt=-1),)),
    UsageBatch("r1", 1, (attrs.evolve(ROW, cached=2**60),)),
    UsageBatch("r1", 1, (attrs.evolve(ROW, key="k" * 2000),)),
    UsageBatch("r1", 1, (ROW,) * 1001),
]


class Plane:
    """A control plane's ledger, and the leader that it would carry to."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.epoch = 1
        self.leader = ""
        self.carried: list[tuple[str, UsageBatch]] = []
        self.refuses: Exception | None = None
        self.hangs = False
        self.taken: list[tuple[str, int]] = []
        self.ledger = UsageLedger(
            SimMachine(1),
            store,
            epoch=lambda: self.epoch,
            may_write=lambda: self.epoch > 0,
            leader=lambda: self.leader,
            carry=self._carry,
        )

    async def _carry(self, address: str, batch: UsageBatch) -> None:
        if self.hangs:
            await trio.sleep_forever()
        if self.refuses is not None:
            raise self.refuses
        self.carried.append((address, batch))

    async def offer(self, number: int = 1, boot: str = "r1") -> bool:
        offered = self.ledger.offer(UsageBatch(boot, number, (ROW,)), lambda *named: self.taken.append(named))
        await trio.testing.wait_all_tasks_blocked()
        return offered

    async def requests(self) -> int:
        return sum(row.requests for row in await usage.sums(self.store, By.MODEL))


@pytest.fixture
async def plane(autojump_clock: object, nursery: trio.Nursery) -> Plane:
    made = Plane(await FileStore.open(MEMORY, SimMachine(1).run_sync))
    nursery.start_soon(made.ledger.run)
    return made


async def test_a_leader_says_that_it_has_a_batch_once_it_is_stored_and_again_where_it_was_before(plane: Plane) -> None:
    assert await plane.offer(1)
    assert (plane.taken, await plane.requests()) == ([("r1", 1)], 1)
    assert await plane.offer(1)
    assert (plane.taken, await plane.requests()) == ([("r1", 1)] * 2, 1)


async def test_what_the_store_does_not_take_is_not_taken_and_the_next_is(plane: Plane) -> None:
    await plane.store.claim_epoch(3, "another")
    with capture_logs() as logs:
        assert await plane.offer(1)
        assert await plane.offer(1)
    assert (plane.taken, [line["log_level"] for line in logs]) == ([], ["warning"]), "told once"
    plane.epoch = 3
    assert await plane.offer(1)
    assert (plane.taken, await plane.requests()) == ([("r1", 1)], 1)


async def test_a_standby_carries_it_to_the_leader_and_says_so_once_that_one_has_it(plane: Plane) -> None:
    plane.epoch, plane.leader, plane.refuses = 0, "http://other", Unavailable("it does not answer", code="leader_unreachable")
    assert await plane.offer(1)
    assert plane.taken == []
    plane.refuses, plane.hangs = None, True
    assert await plane.offer(1)
    await trio.sleep(CARRY_DEADLINE_S + 1)
    assert plane.taken == []
    plane.hangs = False
    assert await plane.offer(1)
    assert (plane.taken, [address for address, _ in plane.carried], await plane.requests()) == ([("r1", 1)], ["http://other"], 0)


async def test_where_nobody_leads_nothing_is_taken(plane: Plane) -> None:
    plane.epoch = 0
    assert not await plane.offer(1)
    with pytest.raises(Unavailable, match="does not lead"):
        await plane.ledger.take(UsageBatch("r1", 1, (ROW,)))


async def test_what_a_standby_carries_is_stored_when_the_call_returns(plane: Plane) -> None:
    await plane.ledger.take(UsageBatch("r1", 1, (ROW,)))
    assert await plane.requests() == 1
    await plane.store.claim_epoch(9, "another")
    with pytest.raises(StaleEpoch):
        await plane.ledger.take(UsageBatch("r1", 2, (ROW,)))


@pytest.mark.parametrize("batch", BAD, ids=range(len(BAD)))
async def test_a_batch_that_cannot_be_counted_is_told_and_does_not_keep_its_router_from_going_on(plane: Plane, batch: UsageBatch) -> None:
    with pytest.raises(Invalid):
        await plane.ledger.take(batch)
    with capture_logs() as logs:
        assert plane.ledger.offer(batch, lambda *named: plane.taken.append(named))
    assert [line["log_level"] for line in logs] == ["error"]
    assert plane.taken == [(batch.boot, batch.number)]
    assert await plane.requests() == 0


async def test_more_routers_than_there_is_room_for_tell_again_later(autojump_clock: object) -> None:
    plane = Plane(await FileStore.open(MEMORY, SimMachine(1).run_sync))
    batches = [UsageBatch(f"r{number}", 1, (ROW,)) for number in range(WAITING_MAX + 1)]
    offered = [plane.ledger.offer(batch, lambda *named: plane.taken.append(named)) for batch in batches]
    assert offered == [True] * WAITING_MAX + [False]


# --- through a whole control plane


class Accounting:
    """A router of its own that counts; `answer` is one answer of 5 and 2 tokens."""

    def __init__(self, world: World) -> None:
        self.process = RouterProcess(world, 7)
        self.answers = 0

    async def start(self) -> None:
        machine = self.process.machine
        self.follower = Follower(machine, SimRouter(), self.process._dial, folder=Path("/router"), control_planes=(URL,))
        self.keeper = UsageKeeper(machine, Path("/router/usage.json"), self.follower.tell_usage)
        self.follower.usage_taken = self.keeper.taken
        await self.follower.load()
        await self.keeper.load()
        self.scope = trio.CancelScope()
        self.process.world.nursery.start_soon(self._run)

    async def _run(self) -> None:
        with self.scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.follower.run)
                nursery.start_soon(self.keeper.run)

    def answer(self, key: str = "k") -> None:
        self.keeper.book.add(self.process.machine.wall_s(), key, "a", Tokens(5, 1, 2), unknown=False)
        self.answers += 1


async def stored(world: World) -> tuple[int, int, int, int]:
    found = await usage.sums(world.control.controller.store, By.MODEL)
    assert len(found) <= 1
    return (found[0].requests, found[0].prompt, found[0].cached, found[0].completion) if found else (0, 0, 0, 0)


async def becomes_whole(world: World, router: Accounting) -> None:
    with trio.move_on_after(60):
        while await stored(world) != (router.answers, 5 * router.answers, router.answers, 2 * router.answers):
            await trio.sleep(1)
        return
    raise AssertionError(f"{router.answers} answers, stored {await stored(world)}")


@pytest.mark.parametrize("seed", range(5))
def test_sums_are_what_was_answered_through_restarts_of_control_plane_and_router_and_lost_sessions(seed: int) -> None:
    async def main(world: World) -> None:
        rng = random.Random(seed)
        await world.start_control(model("a"))
        router = Accounting(world)
        await router.start()
        for _ in range(15):
            for _ in range(rng.randrange(4)):
                router.answer(rng.choice("kl"))
            await trio.sleep(rng.uniform(0.0, 8.0))
            match rng.randrange(4):
                case 0:
                    await router.process.lose_sessions()
                    await world.restart_control()
                case 1:
                    await router.process.lose_sessions()
                case 2:  # stopped in order, while its batch may be anywhere
                    await router.keeper.close()
                    await router.process.lose_sessions()
                    router.scope.cancel()
                    await router.start()
        await becomes_whole(world, router)
        await trio.sleep(30)
        await becomes_whole(world, router)

    run_world(main, seed, embedded=False)


def test_months_that_are_over_go() -> None:
    async def main(world: World) -> None:
        controller = await world.start_control(model("a"))
        now_s = world.machine.wall_s()
        old, young = hour_of(now_s - 14 * MONTH_S), hour_of(now_s - 12 * MONTH_S)
        await controller.usage.take(UsageBatch("r", 1, tuple(UsageRow(hour, "k", "m", 1) for hour in (old, young))))
        await trio.sleep(HOUSEKEEPING_S + 1)
        assert [row.hour for row in await usage.sums(controller.store, By.HOUR)] == [young]

    run_world(main)
