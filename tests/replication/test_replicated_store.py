"""The store of several machines: what is read is durable, what a leader acknowledged the next one has, what a standby reads follows."""

from __future__ import annotations

import attrs
import pytest
import trio
import trio.testing

from llmgw.domain.errors import Invalid, StaleEpoch, Unavailable
from llmgw.domain.ids import ClusterId, OwnerId
from llmgw.replication.replicated_store import ReplicatedStore
from llmgw.store import meta, settings
from llmgw.store.connection import Claim
from llmgw.store.copies import Copy, Position
from llmgw.wiring.machine import RealMachine
from tests.replication.fake_replica import FakeReplica


@attrs.define
class Lease:
    """What the lease's record says."""

    epoch: int = 0
    base: str = ""
    settings_version: int = 0
    silent: trio.Event | None = None  # where there is one, no read of the lease is answered before it is set

    def claim(self, owner: str, cluster: str = "c") -> Claim:
        self.epoch += 1
        tenure, said = f"t{self.epoch}", (self.base, self.settings_version)
        return Claim(ClusterId(cluster), self.epoch, OwnerId(owner), tenure, *said, prove=self.prove, publish=self.publish)

    async def prove(self, epoch: int) -> None:
        if self.silent is not None:
            await self.silent.wait()
        if epoch != self.epoch:
            raise StaleEpoch("somebody else leads", epoch=self.epoch, owner="other")

    async def publish(self, base: str, settings_version: int) -> None:
        self.base, self.settings_version = base, settings_version


@pytest.fixture
def replica(tmp_path):
    return FakeReplica(tmp_path / "replica")


@pytest.fixture
def lease():
    return Lease()


@pytest.fixture
async def planes(tmp_path, replica, lease, nursery):
    """`await planes(name)`: a control plane's store, which runs."""
    opened = []

    async def make(name: str) -> ReplicatedStore:
        store = await ReplicatedStore.begin(RealMachine(), replica, tmp_path / name, "the replica", lease.base)
        await nursery.start(store.run)
        opened.append(store)
        return store

    yield make
    for store in opened:
        await store.end_lead(fenced=True)
        store.close()
    nursery.cancel_scope.cancel()


def add(con, epoch: int, name: str) -> None:
    con.execute("INSERT INTO facility_holds VALUES (?, 'r', 0, NULL, 'a')", (name,))


def holds(con) -> list[str]:
    return [name for (name,) in con.execute("SELECT facility FROM facility_holds ORDER BY facility")]


async def leads(store: ReplicatedStore, lease: Lease, owner: str = "a") -> int:
    await store.lead(lease.claim(owner))
    return lease.epoch


async def test_what_was_acknowledged_the_next_leader_has(planes, lease):
    one, two = await planes("one"), await planes("two")
    epoch = await leads(one, lease, "a")
    await one.write(add, epoch, "x")
    epoch = await leads(two, lease, "b")
    assert await two.read(holds) == ["x"]
    await two.write(add, epoch, "y")
    third = await planes("three")
    assert await third.read(holds) == ["x", "y"]
    assert (await meta.load(third)).cluster_id == "c"


async def test_a_deposed_leader_acknowledges_nothing_and_its_writes_reach_nobody(planes, lease):
    one, two = await planes("one"), await planes("two")
    old = await leads(one, lease, "a")
    await one.write(add, old, "x")
    new = await leads(two, lease, "b")
    with pytest.raises(Unavailable) as caught:  # a conflict would say that nothing was stored, which nobody knows here
        await one.write(add, old, "zombie")
    assert caught.value.code == "outcome_unknown"
    await two.write(add, new, "y")
    assert await one.read(holds) == ["x"]
    assert await two.read(holds) == ["x", "y"]
    await leads(one, lease, "a")
    assert await one.read(holds) == ["x", "y"]


async def test_a_write_whose_term_ends_while_it_waits_is_not_acknowledged(planes, lease, nursery):
    """It was: whoever waited was let go of without a failure."""
    one = await planes("one")
    epoch = await leads(one, lease, "a")
    lease.silent = trio.Event()
    caught = []

    async def write() -> None:
        try:
            caught.append(await one.write(add, epoch, "x"))
        except Unavailable as err:
            caught.append(err.code)

    nursery.start_soon(write)
    with trio.fail_after(10):
        while not one.pending:
            await trio.sleep(0.01)
        await one.end_lead(fenced=True)
        await trio.testing.wait_all_tasks_blocked()
    assert caught == ["outcome_unknown"]
    assert await one.read(holds) == []


async def test_a_write_that_is_committed_when_its_term_has_ended_waits_for_nothing(planes, lease):
    one = await planes("one")
    await leads(one, lease, "a")
    term = one._term
    await one.end_lead(fenced=True)
    with trio.fail_after(10), pytest.raises(Unavailable) as caught:
        await term.settle()
    assert caught.value.code == "outcome_unknown"


async def test_nothing_is_read_before_it_is_durable(planes, lease, replica):
    one = await planes("one")
    epoch = await leads(one, lease)
    replica.silent = True
    with pytest.raises(Unavailable, match="outcome unknown") as caught:
        await one.write(add, epoch, "x")
    assert caught.value.code == "outcome_unknown"
    assert await one.read(holds) == []
    assert one.trouble
    assert one.pending == 1
    with pytest.raises(Unavailable, match="nothing was stored"):
        await one.write(add, epoch, "never")
    replica.silent = False
    await one.prove_writable()
    assert await one.read(holds) == ["x"]
    assert not one.trouble
    assert not one.pending


async def test_what_is_pending_becomes_durable_by_itself(planes, lease, replica, monkeypatch):
    monkeypatch.setattr("llmgw.replication.term.KEEP_UP_S", 0.05)
    one = await planes("one")
    told = []
    one.watch(told.append)
    epoch = await leads(one, lease)
    replica.silent = True
    with pytest.raises(Unavailable):
        await one.write(add, epoch, "x")
    replica.silent = False
    with trio.fail_after(5):
        while await one.read(holds) != ["x"] or told[-1]:  # it is told once it is there
            await trio.sleep(0.01)
    assert any(told)


async def test_a_repeat_is_answered_only_when_what_it_repeats_is_durable(planes, lease, replica):
    one = await planes("one")
    epoch = await leads(one, lease)
    replica.silent = True
    with pytest.raises(Unavailable):
        await one.write(add, epoch, "x")
    with pytest.raises(Unavailable):
        await one.read_newest(holds)
    replica.silent = False
    assert await one.read_newest(holds) == ["x"]
    assert await one.read(holds) == ["x"]


async def test_writes_that_come_together_cost_few_uploads(planes, lease, replica):
    one = await planes("one")
    epoch = await leads(one, lease)
    before = replica.syncs
    async with trio.open_nursery() as nursery:
        for number in range(50):
            nursery.start_soon(one.write, add, epoch, f"f{number:02}")
    assert len(await one.read(holds)) == 50
    assert replica.syncs - before < 50


async def test_a_unit_that_fails_changes_nothing_anywhere(planes, lease):
    one = await planes("one")
    epoch = await leads(one, lease)

    def fails(con, epoch: int) -> None:
        add(con, epoch, "x")
        raise Invalid("no")

    with pytest.raises(Invalid):
        await one.write(fails, epoch)
    await one.write(add, epoch, "y")
    assert await one.read(holds) == ["y"]


async def test_a_standby_follows_by_changes_and_begins_with_the_whole(planes, lease):
    one, two = await planes("one"), await planes("two")
    epoch = await leads(one, lease)
    await one.write(add, epoch, "x")
    news = await one.news(two.position)
    assert news.whole is not None
    assert await two.follow(news)
    assert await two.read(holds) == ["x"]
    await one.write(add, epoch, "y")
    news = await one.news(two.position)
    assert news.whole is None
    assert len(news.changes) == 1
    assert await two.follow(news)
    assert await two.read(holds) == ["x", "y"]
    assert two.position == one.position == Position(epoch, 2)
    assert two.age_s() is not None
    assert one.age_s() == 0.0


async def test_a_cascade_reaches_a_copy_once(planes, lease):
    one, two = await planes("one"), await planes("two")
    epoch = await leads(one, lease)

    def model(con, epoch: int) -> None:
        con.execute("INSERT INTO models VALUES ('m', 1, '{}')")
        con.execute("INSERT INTO model_names VALUES ('m', 'm'), ('alias', 'm')")

    def gone(con, epoch: int) -> None:
        con.execute("DELETE FROM models")

    await one.write(model, epoch)
    await two.follow(await one.news(two.position))
    await one.write(gone, epoch)
    await two.follow(await one.news(two.position))

    def names(con):
        return con.execute("SELECT count(*) FROM model_names").get

    assert await one.read(names) == await two.read(names) == 0


async def test_a_standby_waits_for_news_and_hears_when_the_leader_goes(planes, lease):
    one, two = await planes("one"), await planes("two")
    epoch = await leads(one, lease)
    await two.follow(await one.news(two.position))
    got = []

    async def ask() -> None:
        got.append(await one.news(two.position))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        await one.write(add, epoch, "x")
    assert len(got[0].changes) == 1
    await one.end_lead(fenced=False)
    with pytest.raises(Unavailable) as caught:
        await one.news(two.position)
    assert caught.value.code == "not_leader"


async def test_a_standby_that_was_left_behind_gets_the_whole(planes, lease, monkeypatch):
    one, two = await planes("one"), await planes("two")
    epoch = await leads(one, lease)
    await two.follow(await one.news(two.position))
    one._feed._bytes_max = 200
    for number in range(20):
        await one.write(add, epoch, f"f{number:02}")
    news = await one.news(two.position)
    assert news.whole is not None
    await two.follow(news)
    assert len(await two.read(holds)) == 20


async def test_a_term_that_is_over_leaves_nothing_running(planes, lease, replica):
    one = await planes("one")
    epoch = await leads(one, lease)
    await one.write(add, epoch, "x")
    assert len(replica.kept) == 1
    await one.end_lead(fenced=False)
    assert not replica.kept
    with pytest.raises(Unavailable) as caught:
        await one.write(add, epoch, "y")
    assert caught.value.code == "not_leader"
    assert await one.read(holds) == ["x"]


async def test_a_take_over_that_fails_publishes_nothing_and_can_be_tried_again(planes, lease, replica):
    one, two = await planes("one"), await planes("two")
    epoch = await leads(one, lease)
    await one.write(add, epoch, "x")
    base = lease.base
    replica.silent = True
    with pytest.raises(Unavailable):
        await leads(two, lease, "b")
    await two.end_lead(fenced=True)
    assert lease.base == base
    assert not [one for one in replica.kept if one != base]
    replica.silent = False
    await leads(two, lease, "b")
    assert await two.read(holds) == ["x"]


async def test_another_cluster_s_store_is_refused(planes, lease):
    one = await planes("one")
    await leads(one, lease)
    with pytest.raises(Invalid, match="do not belong together"):
        await one.lead(lease.claim("a", cluster="other"))


async def test_writes_through_failovers_with_lost_syncs_lose_nothing_acknowledged(planes, lease, replica):
    stores = [await planes("one"), await planes("two")]
    acknowledged = set()
    for turn in range(8):
        store = stores[turn % 2]
        epoch = await leads(store, lease, f"o{turn}")
        for number in range(5):
            replica.silent = number == 3
            try:
                await store.write(add, epoch, f"{turn}-{number}")
            except Unavailable:
                continue
            acknowledged.add(f"{turn}-{number}")
        replica.silent = False
        if turn % 3 == 0:
            await store.end_lead(fenced=True)
    final = stores[0]
    await leads(final, lease, "last")
    assert acknowledged <= set(await final.read(holds))
    assert len(acknowledged) >= 24


async def test_the_copy_of_an_earlier_process_is_read_where_nothing_else_is(tmp_path, planes, lease, replica):
    one = await planes("one")
    epoch = await leads(one, lease)
    await one.write(add, epoch, "x")
    await one.end_lead(fenced=False)
    one.close()
    again = await ReplicatedStore.begin(RealMachine(), replica, tmp_path / "one", "the replica", "")
    assert await again.read(holds) == ["x"]
    assert again.age_s() is None
    again.close()
    assert len(list((tmp_path / "one" / "copies").glob("*.db"))) == 1


async def test_a_base_that_lacks_settings_which_were_acknowledged_is_not_led_from(planes, lease, replica):
    one, two = await planes("one"), await planes("two")
    epoch = await leads(one, lease)
    before = (replica.folder / f"{lease.base}.db").read_bytes()
    await settings.write_version(one, epoch, 0, "a = 1", "me", "")
    with trio.fail_after(5):
        while lease.settings_version != 1:
            await trio.sleep(0.01)
    (replica.folder / f"{lease.base}.db").write_bytes(before)  # a store that shows what was there once
    with pytest.raises(Unavailable, match="holds version 0 of the settings, and the last leader has kept version 1"):
        await leads(two, lease, "b")


async def test_what_a_standby_was_just_taking_does_not_overwrite_what_it_begins_to_lead_with(planes, lease, monkeypatch):
    one, two = await planes("one"), await planes("two")
    epoch = await leads(one, lease)
    await one.write(add, epoch, "x")
    old = await one.news(two.position)
    await one.write(add, epoch, "y")
    held = trio.Event()
    replace = Copy.replace

    async def slow(copy: Copy, fill, position: Position) -> None:
        if position == old.position:
            began.set()
            await held.wait()
        await replace(copy, fill, position)

    began = trio.Event()
    monkeypatch.setattr(Copy, "replace", slow)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(two.follow, old)
        await began.wait()
        nursery.start_soon(leads, two, lease, "b")
        await trio.testing.wait_all_tasks_blocked(0.3)
        held.set()
    assert await two.read(holds) == ["x", "y"]
    await two.write(add, lease.epoch, "z")
    assert await two.read(holds) == ["x", "y", "z"]
    await two.end_lead(fenced=False)
    assert two.age_s() < 5


async def test_what_is_restored_at_a_start_has_an_age(planes, lease):
    one = await planes("one")
    assert one.age_s() is None  # nobody has led yet
    await leads(one, lease)
    two = await planes("two")
    assert 0.0 <= two.age_s() < 60.0


async def test_a_standby_that_catches_up_has_all_that_was_durable_before(planes, lease):
    one, two = await planes("one"), await planes("two")
    epoch = await leads(one, lease)
    await two.follow(await one.news(two.position))

    async def follow() -> None:
        while True:
            await two.follow(await one.news(two.position))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(follow)
        for number in range(5):
            await one.write(add, epoch, f"f{number}")
            await two.catch_up()
            assert await two.read(holds) == [f"f{before}" for before in range(number + 1)]
        nursery.cancel_scope.cancel()


async def test_a_standby_that_hears_nobody_gives_up_catching_up(planes, lease, monkeypatch):
    monkeypatch.setattr("llmgw.replication.replicated_store.CATCH_UP_S", 0.1)
    one = await planes("one")
    with trio.fail_after(5):
        await one.catch_up()


async def test_nobody_begins_with_nothing_who_has_read_a_store(planes, lease):
    """The lease's record was removed, or the file names another bucket: else the cluster would lose every model and key."""
    one, two = await planes("one"), await planes("two")
    epoch = await leads(one, lease)
    await settings.write_version(one, epoch, 0, "a = 1", "me", "")
    await two.follow(await one.news(two.position))
    published, lease.base, lease.settings_version = lease.base, "", 0
    for store in (one, two):
        with pytest.raises(Invalid, match=r"names no store to begin with, .* has read one with settings version 1, which"):
            await leads(store, lease)
        assert await settings.newest_version(store) == 1
        assert lease.base == ""
    lease.base = published  # a person has put it back
    await leads(two, lease)
    assert await settings.newest_version(two) == 1


async def test_nobody_begins_with_a_file_of_before_who_has_read_more(planes, lease, replica, tmp_path):
    """A seed that was left lying has as many versions of the settings: none was written since, and the holds were made anew."""
    one = await planes("one")
    epoch = await leads(one, lease)
    await settings.write_version(one, epoch, 0, "a = 1", "me", "")
    await one.write(add, epoch, "x")
    replica.seed = tmp_path / "seed.db"
    replica.seed.write_bytes((replica.folder / f"{lease.base}.db").read_bytes())
    await one.write(add, epoch, "y")
    published, lease.base, lease.settings_version = lease.base, "", 0
    with pytest.raises(Invalid, match="has read one with hold of facility y, which would be lost"):
        await leads(one, lease)
    assert lease.base == ""
    replica.seed.write_bytes((replica.folder / f"{published}.db").read_bytes())  # a take-over that ended before it was published
    await leads(one, lease)
    assert await one.read(holds) == ["x", "y"]
