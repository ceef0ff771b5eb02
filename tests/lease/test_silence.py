"""What counts as silence of a holder, and whose turn it is after a hand-over."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import apsw
import pytest
import trio

from llmgw.domain.errors import Invalid
from llmgw.lease import file as lease_file
from llmgw.lease.file import LeaseFile
from llmgw.lease.rules import UNTAKEN_S
from llmgw.lease.state import PeerView
from llmgw.lease.store import Unknown
from llmgw.lease.timings import LeaseTimings
from llmgw.sim.lease_store import FINE, Fault
from tests.lease.candidates import Candidates, Plane
from tests.lease.records import later, record

ROLE = "control-plane"
TWO = PeerView(heard=1, peer_heard=1, healthy_peers=1)


@pytest.fixture
async def world() -> AsyncIterator[Candidates]:
    async with trio.open_nursery() as nursery:
        yield Candidates(nursery)
        nursery.cancel_scope.cancel()


async def test_whoever_handed_over_takes_the_lease_at_once_when_its_successor_lets_go_of_it(world: Candidates, autojump_clock: object):
    """It waited for a ttl: it went on letting others go first after somebody had taken what it released."""
    first = await world.start_leader()
    second = await world.start()
    await trio.sleep(3.0)
    first.keeper.peers(TWO)
    first.keeper.hand_over()
    await world.wait(lambda: second.confirmed)
    await trio.sleep(3.0)
    second.keeper.step_down()
    assert await world.wait(lambda: first.confirmed) < 3.0


async def three(world: Candidates) -> tuple[Plane, Plane, Plane]:
    """The first one leads."""
    planes = await world.start_leader(), await world.start(), await world.start()
    await trio.sleep(3.0)
    planes[0].keeper.peers(TWO)
    return planes


@pytest.mark.parametrize("back", [1, 2])
async def test_who_stands_back_leaves_a_lease_that_is_let_go_of_to_the_other(world: Candidates, autojump_clock: object, back: int):
    planes = await three(world)
    planes[back].keeper.stand_back(60.0)
    planes[0].keeper.hand_over()
    assert await world.wait(lambda: planes[3 - back].confirmed) < UNTAKEN_S


async def test_who_stands_back_does_so_also_when_another_took_the_lease_and_passed_it_on(world: Candidates, autojump_clock: object):
    """The one that had handed over took it back from there, and found that nobody had kept it."""
    old, wrong, fit = await three(world)
    old.keeper.stand_back(60.0)
    fit.keeper.stand_back(5.0)  # so that the wrong one has it first
    old.keeper.hand_over()
    await world.wait(lambda: wrong.confirmed)
    await trio.sleep(6.0)
    wrong.keeper.stand_back(60.0)
    wrong.keeper.peers(TWO)
    wrong.keeper.hand_over()
    assert await world.wait(lambda: fit.confirmed) < UNTAKEN_S


async def test_who_is_barred_takes_no_lease_whatever_becomes_of_it_until_the_bar_is_lifted(world: Candidates, autojump_clock: object):
    first, second = await world.start_leader(), await world.start()
    first.keeper.peers(TWO)
    second.keeper.bar("it was removed")
    first.keeper.hand_over()
    await world.wait(lambda: first.confirmed)  # it takes back what the other left
    first.scope.cancel()
    await trio.sleep(100.0)
    assert second.work.seen == []
    assert second.keeper.view.trouble == "it was removed"
    second.keeper.bar("")
    await world.wait(lambda: second.confirmed)


async def test_a_bar_does_not_end_a_term_and_counts_when_it_is_over(world: Candidates, autojump_clock: object):
    first, second = await world.start_leader(), await world.start()
    first.keeper.bar("it was removed")
    await trio.sleep(60.0)
    assert first.confirmed
    first.keeper.peers(TWO)
    first.keeper.hand_over()
    await world.wait(lambda: second.confirmed)
    second.keeper.step_down()
    await trio.sleep(100.0)
    assert not first.keeper.is_leader


async def test_a_lease_that_all_stand_back_from_is_taken_all_the_same(world: Candidates, autojump_clock: object):
    planes = await three(world)
    for plane in planes:
        plane.keeper.stand_back(3600.0)
    planes[0].keeper.hand_over()
    await world.wait(lambda: not planes[0].leads)
    assert await world.wait(lambda: any(plane.confirmed for plane in planes)) < UNTAKEN_S + 3.0


async def test_nobody_stands_back_from_a_lease_that_expires(world: Candidates, autojump_clock: object):
    old, one, other = await three(world)
    for plane in (one, other):
        plane.keeper.stand_back(3600.0)
    await old.kill()
    timings = LeaseTimings()
    assert await world.wait(lambda: one.confirmed or other.confirmed) < timings.wait_s(timings.ttl_s) + 3.0


async def test_a_store_that_takes_no_writes_deposes_nobody_although_it_is_read(world: Candidates, autojump_clock: object):
    """A standby counted the silence of a holder whose renewals the store refused, and raced it when they got through again."""
    leader = await world.start_leader()
    standby = await world.start()
    await trio.sleep(8.0)
    for plane in world.planes:
        plane.leases.script = lambda request: Fault(status=503) if request.method == "put" else FINE
    # Long enough for one attempt of the standby; its second one is not due when the store is back.
    wait_s = LeaseTimings().wait_s(15.0)
    await trio.sleep(1.5 * wait_s)
    assert leader.leads
    assert not leader.confirmed
    for plane in world.planes:
        plane.leases.script = lambda request: FINE
    await world.wait(lambda: leader.confirmed)
    await world.hold(lambda: leader.leads and not standby.leads, 60.0)


def test_a_lease_file_that_somebody_keeps_locked_is_not_read_either(tmp_path: Path):
    """An unchanged record in it would look like a holder that is silent."""
    leases = LeaseFile(tmp_path / "lease.db")
    leases.replace(ROLE, None, record())
    other = apsw.Connection(str(tmp_path / "lease.db"))
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(Unknown, match="locked by another process"):
        leases.read(ROLE)
    other.execute("ROLLBACK")
    assert leases.read(ROLE) is not None
    other.close()
    leases.close()


def test_once_the_disk_refused_a_write_nothing_is_read_until_it_takes_one(tmp_path: Path):
    leases = LeaseFile(tmp_path / "lease.db")
    first = record()
    leases.replace(ROLE, None, first)

    def full(cursor: object, statement: str, bindings: object) -> bool:
        """The disk refuses whatever changes a page, and lets everything be read."""
        if statement.upper().startswith(("INSERT", "PRAGMA")):
            raise apsw.FullError("database or disk is full")
        return True

    leases._open().exec_trace = full
    with pytest.raises(Unknown) as refused:
        leases.replace(ROLE, first, later(first))
    assert refused.value.local_disk
    leases._open().exec_trace = full
    with pytest.raises(Unknown):
        leases.read(ROLE)
    leases._open().exec_trace = None
    assert leases.read(ROLE) == first
    leases._open().exec_trace = full
    assert leases.read(ROLE) == first, "what is read from here on writes nothing"
    leases.close()


def test_a_lease_on_a_network_file_system_is_refused_by_its_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lease_file, "network_file_system", lambda folder: "nfs4")
    with pytest.raises(Invalid, match="network file system \\(nfs4\\)") as refused:
        LeaseFile(tmp_path / "lease.db")
    assert refused.value.code == "network_file_system"
    assert str(tmp_path / "lease.db") in refused.value.message
