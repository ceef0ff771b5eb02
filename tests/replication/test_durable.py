"""When a write is acknowledged: upload, then the lease; one round for all who ask at once, and never one that began before."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from llmgw.domain.errors import OutcomeUnknown, StaleEpoch, Unavailable
from llmgw.replication.durable import Durability


class Store:
    """Commits are counted; an upload takes what is committed when it begins."""

    def __init__(self) -> None:
        self.committed = self.uploaded = 0
        self.said: list[str] = []
        self.gate = trio.Event()
        self.began = trio.Event()
        self.fails: Exception | None = None
        self.proof_fails: Exception | None = None

    async def sync(self) -> None:
        taken = self.committed
        self.began.set()
        self.said.append("upload")
        await self.gate.wait()
        if self.fails is not None:
            raise self.fails
        self.uploaded = taken

    async def prove(self, epoch: int) -> None:
        await trio.lowlevel.checkpoint()
        self.said.append(f"prove {epoch}")
        if self.proof_fails is not None:
            raise self.proof_fails


async def settled() -> None:
    await trio.testing.wait_all_tasks_blocked()


async def test_the_upload_comes_before_the_proof():
    store = Store()
    store.gate.set()
    await Durability(7, store.sync, store.prove).acknowledge()
    assert store.said == ["upload", "prove 7"]


async def test_who_comes_while_an_upload_is_under_way_shares_the_next_one():
    store = Store()
    durability = Durability(7, store.sync, store.prove)
    sure: list[int] = []

    async def write() -> None:
        store.committed += 1
        mine = store.committed
        await durability.acknowledge()
        assert store.uploaded >= mine
        sure.append(mine)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        await store.began.wait()
        for _ in range(30):
            nursery.start_soon(write)
        await settled()
        assert store.said == ["upload"]
        assert not sure
        store.gate.set()
    assert sorted(sure) == list(range(1, 32))
    assert store.said == ["upload", "prove 7"] * 2


async def test_who_began_a_round_and_is_cancelled_leaves_it_to_the_next():
    store = Store()
    durability = Durability(7, store.sync, store.prove)
    sure: list[str] = []

    async def write(name: str) -> None:
        await durability.acknowledge()
        sure.append(name)

    async with trio.open_nursery() as nursery:
        async with trio.open_nursery() as first:
            first.start_soon(write, "first")
            await settled()
            first.start_soon(write, "second")
            nursery.start_soon(write, "third")
            await settled()
            first.cancel_scope.cancel()
        store.gate.set()
    assert sure == ["third"]
    assert store.said[-2:] == ["upload", "prove 7"]


async def test_a_round_that_fails_is_unknown_to_all_of_it_and_the_next_may_succeed():
    store = Store()
    store.gate.set()
    store.fails = Unavailable("the bucket is gone")
    durability = Durability(7, store.sync, store.prove)
    failed: list[OutcomeUnknown] = []

    async def write() -> None:
        try:
            await durability.acknowledge()
        except OutcomeUnknown as err:
            failed.append(err)

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(write)
    assert {err.message for err in failed} == {"stored, outcome unknown, retry with the same key"}
    assert {(err.status, err.code) for err in failed} == {(503, "outcome_unknown")}
    assert len(failed) == 3
    assert "prove 7" not in store.said
    store.fails = None
    await durability.acknowledge()


@pytest.mark.parametrize("failure", [Unavailable("no answer"), StaleEpoch("epoch 9 was met", epoch=9, owner="b")])
async def test_a_lease_that_does_not_show_us_acknowledges_nothing(failure: Exception):
    store = Store()
    store.gate.set()
    store.proof_fails = failure
    expected = StaleEpoch if isinstance(failure, StaleEpoch) else OutcomeUnknown
    with pytest.raises(expected) as raised:
        await Durability(7, store.sync, store.prove).acknowledge()
    if isinstance(raised.value, StaleEpoch):
        assert (raised.value.epoch, raised.value.owner) == (9, "b")


async def test_what_is_no_trouble_of_the_world_is_not_hidden():
    async def broken() -> None:
        await trio.lowlevel.checkpoint()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await Durability(7, broken, Store().prove).acknowledge()
