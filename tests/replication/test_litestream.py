"""A replicated store with real Litestream on a real S3 server: what was acknowledged is there, whatever dies meanwhile."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import attrs
import pytest
import trio

from llmgw.domain.errors import OutcomeUnknown, StaleEpoch, Unavailable
from llmgw.replication import rules
from llmgw.replication.programs import Found
from llmgw.replication.rules import Rules, Step
from llmgw.settings.object_place import ObjectPlace
from llmgw.wiring.machine import RealMachine
from tests.replication.epochs import Epoch, Lease, leading, restored, until
from tests.seaweed import Seaweed

pytestmark = pytest.mark.slow
TAKE_OVERS = 8


async def test_what_was_acknowledged_is_what_the_next_leader_begins_with(
    machine: RealMachine, place: ObjectPlace, tmp_path: Path, program: Found
):
    lease = Lease()
    async with leading(machine, place, lease, tmp_path / "a", program) as first:
        for _ in range(5):
            await first.acknowledge()
        report = first.litestream.report
        assert (report.alive, report.lag, report.trouble, report.restarts) == (True, 0, "", 0)
        assert report.txid > 0
        assert first.folder.meta.is_dir()
        assert not (first.folder.path / ".llmgw.db-litestream").exists()  # its state is of this epoch alone (R-B51)
    async with leading(machine, place, lease, tmp_path / "b", program) as second:
        assert second.began_with == set(first.acknowledged)
        await second.acknowledge()
    async with leading(machine, place, lease, tmp_path / "a", program) as third:
        assert third.began_with == {*first.acknowledged, *second.acknowledged}


async def test_writes_that_ask_at_once_share_an_upload(machine: RealMachine, place: ObjectPlace, tmp_path: Path, program: Found):
    async with leading(machine, place, Lease(), tmp_path, program) as one:
        await one.acknowledge()
        before = one.litestream.report.txid
        async with trio.open_nursery() as nursery:
            for _ in range(40):
                nursery.start_soon(one.acknowledge)
        assert len(one.acknowledged) == 41
        uploads = [path for path in (one.folder.meta / "ltx" / "0").glob("*.ltx") if int(path.name[:16], 16) > before]
        assert 0 < len(uploads) < 40
        assert await restored(machine, place, one.prefix, tmp_path, program) == set(one.acknowledged)


async def test_a_child_that_is_killed_comes_back_and_loses_nothing(
    machine: RealMachine, place: ObjectPlace, tmp_path: Path, program: Found
):
    async with leading(machine, place, Lease(), tmp_path, program) as one:
        for _ in range(5):
            await one.acknowledge()
            pid = one.litestream.child_pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await one.acknowledge()  # waits for the next child
        assert one.litestream.report.restarts == 5
        assert await restored(machine, place, one.prefix, tmp_path, program) == set(one.acknowledged)


async def test_a_child_that_is_frozen_makes_the_outcome_unknown_and_nothing_else(
    machine: RealMachine, place: ObjectPlace, tmp_path: Path, program: Found
):
    async with leading(machine, place, Lease(), tmp_path, program) as one:
        pid = one.litestream.child_pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(OutcomeUnknown, match="stored, outcome unknown, retry with the same key"):
            await one.acknowledge()
        assert one.litestream.report.trouble == "the replica did not take it in time"
        os.kill(pid, signal.SIGCONT)
        await one.acknowledge()
        assert one.litestream.report.trouble == ""
        assert await restored(machine, place, one.prefix, tmp_path, program) == {"1.0", "1.1"}


async def test_a_zombie_goes_on_writing_where_nobody_reads(machine: RealMachine, place: ObjectPlace, tmp_path: Path, program: Found):
    """E2, E3, E4, E6, E9: the old leader freezes or loses its way, a successor works, the old one goes on."""
    lease = Lease()
    async with leading(machine, place, lease, tmp_path / "a", program) as old:
        await old.acknowledge()
        async with leading(machine, place, lease, tmp_path / "b", program) as new:
            for _ in range(3):
                await new.acknowledge()
            with pytest.raises(StaleEpoch):
                await old.acknowledge()
            for _ in range(8):
                await old.write()
            await old.litestream.sync()  # its uploads succeed, into its own prefix
            await new.acknowledge()
            mine = {*old.acknowledged, *new.acknowledged}
            assert await restored(machine, place, lease.base, tmp_path / "c", program) == mine
    async with leading(machine, place, lease, tmp_path / "a", program) as third:
        assert third.began_with == mine
    assert "1.1" not in mine


async def test_a_leader_that_died_before_it_published_leaves_the_base_as_it_was(
    machine: RealMachine, place: ObjectPlace, tmp_path: Path, program: Found
):
    lease = Lease()
    async with leading(machine, place, lease, tmp_path / "a", program) as old:
        await old.acknowledge()
        base = lease.base
        lease.acquire()  # and dies
        async with leading(machine, place, lease, tmp_path / "b", program) as new:
            assert new.began_with == set(old.acknowledged)
            assert lease.base == new.prefix != base


async def test_an_object_store_that_is_frozen_or_killed_costs_answers_and_no_row(
    machine: RealMachine, place: ObjectPlace, tmp_path: Path, program: Found, seaweed_server: Seaweed
):
    async with leading(machine, place, Lease(), tmp_path, program) as one:
        await one.acknowledge()
        seaweed_server.freeze()
        try:
            with pytest.raises(OutcomeUnknown):
                await one.acknowledge()
            assert one.litestream.report.trouble
        finally:
            seaweed_server.thaw()
        await one.acknowledge()
        await trio.to_thread.run_sync(seaweed_server.kill)
        try:
            with pytest.raises(OutcomeUnknown) as raised:
                await one.acknowledge()
            assert isinstance(raised.value.__cause__, Unavailable)
        finally:
            await trio.to_thread.run_sync(seaweed_server.start)
        await until(lambda: one.litestream.report.lag == 0 and not one.litestream.report.trouble, "it uploads by itself")
        await one.acknowledge()
        assert await restored(machine, place, one.prefix, tmp_path, program) == {f"1.{number}" for number in range(5)}


async def lost_by_take_overs(machine: RealMachine, place: ObjectPlace, tmp_path: Path, program: Found, protect: Rules) -> int:
    """How many acknowledged writes no leader has in the end. Leaders go on when a successor leads already, and children are killed."""
    rng = random.Random(7)
    lease = Lease()
    acknowledged: set[str] = set()

    async def lead(number: int, *, task_status: trio.TaskStatus[Epoch]) -> None:
        async with leading(machine, place, lease, tmp_path / str(number), program, protect) as one:
            task_status.started(one)
            for _ in range(60):
                try:
                    acknowledged.add(await one.acknowledge())
                except OutcomeUnknown:
                    continue
                except StaleEpoch:
                    return

    async with trio.open_nursery() as nursery:
        for number in range(TAKE_OVERS):
            one = await nursery.start(lead, number)
            await until(lambda one=one: len(one.acknowledged) >= 3, "the leader acknowledges")
            if rng.random() < 0.5 and one.litestream.child_pid is not None:
                os.kill(one.litestream.child_pid, signal.SIGKILL)
    assert len(acknowledged) >= 3 * TAKE_OVERS
    return len(acknowledged - await restored(machine, place, lease.base, tmp_path, program))


async def test_take_overs_in_a_row_lose_nothing_that_was_acknowledged(
    machine: RealMachine, place: ObjectPlace, tmp_path: Path, program: Found
):
    assert await lost_by_take_overs(machine, place, tmp_path, program, rules.RULES) == 0


async def test_without_the_lease_read_the_same_take_overs_lose_some(
    machine: RealMachine, place: ObjectPlace, tmp_path: Path, program: Found
):
    protect = attrs.evolve(rules.RULES, acknowledgement=(Step.UPLOAD,))
    assert await lost_by_take_overs(machine, place, tmp_path, program, protect) > 0
