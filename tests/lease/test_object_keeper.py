"""The lease's task on object stores over HTTP: a real one that freezes and is killed, and ours that keeps one candidate out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final

import pytest
import trio
from structlog.testing import capture_logs

from llmgw.domain.ids import ClusterId, owner_id
from llmgw.lease.keeper import LeaseKeeper
from llmgw.lease.object_leases import ObjectLeases
from llmgw.lease.object_store import LeaseBucket
from llmgw.lease.outage import BACK, LEASE_FAULT
from llmgw.lease.record import ROLE, LeaseRecord
from llmgw.lease.state import Candidate, PeerView
from llmgw.lease.timings import LeaseTimings
from llmgw.settings.object_place import ObjectPlace
from llmgw.wiring.machine import RealMachine
from tests.lease.candidates import Work
from tests.lease.places import scripted_place, seaweed_place, write_credentials
from tests.s3_server import Asked, Play, S3Server, error, s3_server
from tests.seaweed import Seaweed, seaweed

pytestmark = pytest.mark.slow

TIMINGS: Final = LeaseTimings.of(ttl_s=4.0, renew_s=1.0, poll_s=0.2)
TAKEABLE_S: Final = TIMINGS.wait_s(TIMINGS.ttl_s)
PATIENCE_S: Final = 60.0
LOOK_S: Final = 0.02
TWO: Final = PeerView(heard=1, peer_heard=1, healthy_peers=1)


class Plane:
    """One candidate with real threads, clock and disk. `scope` cancelled is its crash: it releases nothing."""

    def __init__(self, name: str, place: ObjectPlace, folder: Path, *, new: bool) -> None:
        self.machine = RealMachine()
        self.work = Work()
        data_dir = folder / name
        data_dir.mkdir()
        me = Candidate(ClusterId("c"), owner_id(name, self.machine.fresh_hex(8)), f"boot-{name}", store_is_new=new)
        leases = ObjectLeases(self.machine, place, TIMINGS)
        self.keeper = LeaseKeeper(self.machine, leases, me, TIMINGS, self.work, data_dir, place=str(place))
        self.scope = trio.CancelScope()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with self.scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._beat)
                await self.keeper.run(task_status)
                nursery.cancel_scope.cancel()

    async def _beat(self) -> None:
        while True:
            await self.machine.sleep_until(self.machine.now_s() + 0.5)
            self.keeper.beat()

    @property
    def confirmed(self) -> bool:
        return self.keeper.confirmed(self.machine.now_s())

    @property
    def follows(self) -> bool:
        """Stands by, and knows who leads."""
        return not self.keeper.is_leader and self.keeper.record is not None


class Planes:
    def __init__(self, nursery: trio.Nursery, folder: Path) -> None:
        self._nursery = nursery
        self._folder = folder
        self.all: list[Plane] = []

    async def start(self, place: ObjectPlace) -> Plane:
        plane = Plane(f"ctl-{len(self.all) + 1}", place, self._folder, new=not self.all)
        self.all.append(plane)
        await self._nursery.start(plane.run)
        return plane

    async def two(self, first: ObjectPlace, second: ObjectPlace) -> tuple[Plane, Plane]:
        """The first one leads, the other one stands by."""
        leader = await self.start(first)
        await self.wait(lambda: leader.confirmed)
        standby = await self.start(second)
        await self.wait(lambda: standby.follows)
        for plane in (leader, standby):
            plane.keeper.peers(TWO)
        return leader, standby

    async def wait(self, condition: Callable[[], bool]) -> None:
        with trio.move_on_after(PATIENCE_S):
            while not condition():
                await trio.sleep(LOOK_S)
        assert condition(), [(plane.keeper.view.phase, plane.keeper.record) for plane in self.all]

    async def wait_s(self, plane: Plane, for_s: float) -> None:
        until_s = plane.machine.now_s() + for_s
        await self.wait(lambda: plane.machine.now_s() >= until_s)


@pytest.fixture
async def planes(tmp_path: Path) -> AsyncIterator[Planes]:
    async with trio.open_nursery() as nursery:
        yield Planes(nursery, tmp_path)
        nursery.cancel_scope.cancel()


def standing(place: ObjectPlace) -> LeaseRecord:
    found = LeaseBucket(place, PATIENCE_S).read(ROLE)
    assert found is not None
    return found


# --- on a real store


async def test_a_hand_over_moves_the_lease_to_the_standby(planes: Planes, seaweed_server: Seaweed, tmp_path: Path):
    place = seaweed_place(seaweed_server, tmp_path)
    leader, standby = await planes.two(place, place)
    leader.keeper.hand_over()
    await planes.wait(lambda: standby.confirmed)
    assert (standby.keeper.epoch, leader.keeper.is_leader) == (2, False)
    await planes.wait(lambda: leader.keeper.record is not None and leader.keeper.record.owner == standby.keeper.owner)
    assert [seen[0] for seen in leader.work.seen] == ["warm", "warmed", "end"]


async def test_a_leader_that_leaves_is_followed_at_once_and_never_leads_again(planes: Planes, seaweed_server: Seaweed, tmp_path: Path):
    place = seaweed_place(seaweed_server, tmp_path)
    leader, standby = await planes.two(place, place)
    leader.keeper.step_down()
    await leader.keeper.wait_left()
    await planes.wait(lambda: standby.confirmed)
    assert standing(place).owner == standby.keeper.owner


async def test_after_a_crash_the_standby_takes_the_lease_above_the_dead_ones_epoch(planes: Planes, seaweed_server: Seaweed, tmp_path: Path):
    place = seaweed_place(seaweed_server, tmp_path)
    leader, standby = await planes.two(place, place)
    dead = leader.keeper.owner
    leader.scope.cancel()
    await planes.wait(lambda: standby.confirmed)
    assert standby.keeper.epoch == 2
    assert standing(place).owner == standby.keeper.owner != dead


@pytest.mark.parametrize("fault", ["frozen", "killed"])
async def test_a_store_that_is_gone_for_longer_than_the_lease_moves_it_nowhere(fault: str, planes: Planes, tmp_path: Path):
    folder = tmp_path / "store"
    folder.mkdir()
    with seaweed(folder) as server:
        place = seaweed_place(server, tmp_path)
        leader, standby = await planes.two(place, place)
        with capture_logs() as logs:
            server.freeze() if fault == "frozen" else server.kill()
            await planes.wait(lambda: not leader.confirmed)
            await planes.wait_s(standby, TAKEABLE_S + 1.0)
            assert leader.keeper.is_leader
            assert not standby.keeper.is_leader
            if fault == "frozen":
                server.thaw()
            else:
                await trio.to_thread.run_sync(server.start)
            await planes.wait(lambda: leader.confirmed)
            await planes.wait(lambda: standby.keeper.silent_since_s is None)
        assert (leader.keeper.epoch, leader.keeper.transitions, standby.keeper.transitions) == (1, 1, 0)
        assert standing(place).owner == leader.keeper.owner
        assert {log["event"] for log in logs if log["log_level"] == "info"} == {BACK}


# --- on ours, which tells them apart by their keys


def two_places(server: S3Server, folder: Path) -> tuple[ObjectPlace, ObjectPlace]:
    places = []
    for name in ("LEADER", "STANDBY"):
        (folder / name).mkdir()
        places.append(scripted_place(server.address, folder / name))
        write_credentials(folder / name / "credentials", name)
    return places[0], places[1]


def to(server: S3Server, name: str, what: bytes | Play) -> None:
    """From now on, to every request of the one with this key."""

    def script(asked: Asked) -> bytes | Play | None:
        return what if f"Credential={name}/" in asked.headers["authorization"] else None

    server.script = script


@pytest.mark.parametrize("what", [Play.HANG, Play.CUT, error(403, "AccessDenied"), error(503, "SlowDown")])
async def test_a_leader_that_the_store_does_not_answer_is_followed_and_stands_by_when_it_hears_of_it(
    what: bytes | Play, planes: Planes, tmp_path: Path
):
    with s3_server() as server:
        places = two_places(server, tmp_path)
        leader, standby = await planes.two(*places)
        old = leader.keeper.owner
        to(server, "LEADER", what)
        await planes.wait(lambda: standby.confirmed)
        assert not leader.confirmed, "before anybody may follow"
        server.script = lambda asked: None
        await planes.wait(lambda: leader.follows and leader.keeper.owner != old)
        assert standby.confirmed
        assert leader.work.seen[-1] == ("end", 1, True)


async def test_a_leader_whose_answers_are_lost_finds_its_own_writes_and_goes_on(planes: Planes, tmp_path: Path):
    with s3_server() as server:
        places = two_places(server, tmp_path)
        leader, standby = await planes.two(*places)
        lost = 0

        def lose_writes(asked: Asked) -> Play | None:
            nonlocal lost
            if asked.method == "PUT":
                lost += 1
                return Play.LOSE_REPLY
            return None

        server.script = lose_writes
        await planes.wait(lambda: lost >= 5)
        await planes.wait(lambda: leader.confirmed)
        assert (leader.keeper.epoch, leader.keeper.transitions, standby.keeper.transitions) == (1, 1, 0)


async def test_expired_credentials_are_an_outage_that_says_so_and_ends_when_they_are_replaced(planes: Planes, tmp_path: Path):
    with s3_server() as server:
        place = scripted_place(server.address, tmp_path)
        leader, standby = await planes.two(place, place)
        with capture_logs() as logs:
            server.script = lambda asked: None if "Credential=NEW/" in asked.headers["authorization"] else error(403, "ExpiredToken")
            await planes.wait(lambda: not leader.confirmed)
            assert leader.keeper.is_leader
            write_credentials(tmp_path / "credentials", "NEW")
            await planes.wait(lambda: leader.confirmed)
            await planes.wait(lambda: standby.keeper.silent_since_s is None)
        assert (leader.keeper.epoch, leader.keeper.transitions, standby.keeper.transitions) == (1, 1, 0)
        told = [log for log in logs if log["log_level"] == "warning"]
        assert {log["event"] for log in told} == {LEASE_FAULT}
        assert all("it answered 403 ExpiredToken: the credentials have expired" in log["why"] for log in told)


async def test_of_many_that_start_on_an_empty_store_at_once_one_leads(planes: Planes, tmp_path: Path):
    """Of the first four writes the store says that another one was under way: neither yes nor no."""
    with s3_server() as server:
        place = scripted_place(server.address, tmp_path)
        told: set[bytes] = set()

        def conflict(asked: Asked) -> bytes | None:
            if asked.method == "PUT" and len(told) < 4:
                told.add(asked.body)
                return error(409, "ConditionalRequestConflict")
            return None

        server.script = conflict
        async with trio.open_nursery() as nursery:
            for number in range(4):
                planes.all.append(Plane(f"ctl-{number}", place, tmp_path, new=True))
                nursery.start_soon(planes.all[-1].run)
            await planes.wait(lambda: sum(plane.confirmed for plane in planes.all) == 1 and sum(plane.follows for plane in planes.all) == 3)
            assert len(told) == 4
            nursery.cancel_scope.cancel()
