"""The lease's task on simulated machines: who leads when, what is done under it, and what others are told."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator

import attrs
import pytest
import trio
from structlog.testing import capture_logs

from llmgw.domain.errors import Broken, Conflict, Invalid, StaleEpoch, Unavailable
from llmgw.domain.ids import ClusterId
from llmgw.domain.lease import LeaseRole, Power
from llmgw.lease.keeper import Term
from llmgw.lease.outage import BACK
from llmgw.lease.owner_file import parse_owner
from llmgw.lease.record import ROLE, LeaseRecord, decode, encode
from llmgw.lease.rules import UNTAKEN_S
from llmgw.lease.state import Desk, PeerView, Phase
from llmgw.lease.timings import LeaseTimings
from llmgw.sim.lease_store import FINE, Fault, Request, SimLock, SimLockClient
from llmgw.sim.machine import SimMachine
from tests.lease.candidates import EPOCH, OWNER, PLACE, Candidates, Plane

TIMINGS = LeaseTimings()
WAIT_S = TIMINGS.wait_s(TIMINGS.ttl_s)
LOOKS_S = 2 * TIMINGS.poll_s * 1.2 + 0.5
TWO = PeerView(heard=4, peer_heard=4, healthy_peers=1)


@pytest.fixture
async def world() -> AsyncIterator[Candidates]:
    """Every test that uses it asks for the clock, too: pytest-trio looks for one among a test's own arguments."""
    async with trio.open_nursery() as nursery:
        yield Candidates(nursery)
        nursery.cancel_scope.cancel()


@pytest.fixture
async def machine_world() -> AsyncIterator[Candidates]:
    """All of them are processes of one machine."""
    async with trio.open_nursery() as nursery:
        yield Candidates(nursery, one_machine=True)
        nursery.cancel_scope.cancel()


def written(world: Candidates) -> list[LeaseRecord]:
    return [decode(data) for _, data in world.bucket.writes]


def owners(world: Candidates) -> list[str]:
    """Who held the lease, one after another."""
    found: list[str] = []
    for record in written(world):
        if not found or record.owner != found[-1]:
            found.append(record.owner)
    return found


async def forever(term: Term) -> None:
    await trio.sleep_forever()


def leaves(err: BaseException) -> list[BaseException]:
    return [leaf for inner in err.exceptions for leaf in leaves(inner)] if isinstance(err, BaseExceptionGroup) else [err]


# --- leading


async def test_a_lone_candidate_on_a_new_store_leads_at_once_and_renews(world: Candidates, autojump_clock: object):
    plane = await world.start(store_is_new=True)
    assert await world.wait(lambda: plane.confirmed) < 1.0
    await world.hold(lambda: plane.confirmed, 120.0)
    assert (plane.keeper.epoch, owners(world)) == (1, [plane.keeper.owner])
    assert 20 <= len(world.bucket.writes) <= 26, "a write every 5 s"
    assert plane.keeper.transitions == 1


async def test_the_epoch_and_its_owner_are_on_disk_before_anything_is_done_under_it(world: Candidates, autojump_clock: object):
    plane = await world.start(store_is_new=True)
    on_disk: list[tuple[bytes, str]] = []

    async def look(term: Term) -> None:
        files = plane.machine.disk.files
        on_disk.append((files[EPOCH], parse_owner(files[OWNER], OWNER).owner))

    plane.work.before_warm = look
    await world.wait(lambda: plane.leads)
    assert on_disk == [(b"1\n", plane.keeper.owner)]
    assert parse_owner(plane.machine.disk.files[OWNER], OWNER).store == PLACE


async def test_there_are_no_powers_before_it_is_warm(world: Candidates, autojump_clock: object):
    plane = await world.start(store_is_new=True)
    warm = trio.Event()

    async def wait(term: Term) -> None:
        await warm.wait()

    plane.work.before_warm = wait
    await world.wait(lambda: bool(plane.work.seen))
    assert plane.keeper.lease_role(plane.machine.now_s()) is LeaseRole.WARMING
    assert plane.keeper.power(plane.machine.now_s()) is None
    warm.set()
    await world.wait(lambda: plane.leads)


async def test_a_large_restore_that_comes_forward_may_take_long_and_one_that_does_not_is_given_up(
    world: Candidates, autojump_clock: object
):
    plane = await world.start(store_is_new=True)

    async def restore(term: Term) -> None:
        for _ in range(10):
            await trio.sleep(8.0)
            term.progress()

    plane.work.before_warm = restore
    await world.wait(lambda: plane.leads)
    assert [what[0] for what in plane.work.seen] == ["warm", "warmed"]

    other = await world.start()
    other.work.before_warm = forever
    plane.keeper.step_down()
    await world.wait(lambda: bool(other.work.seen))
    assert await world.wait(lambda: ("end", 2, False) in other.work.seen) < 11.0
    assert written(world)[-1].released


async def test_of_two_that_start_together_one_leads_and_the_other_knows_it(world: Candidates, autojump_clock: object):
    planes = [await world.start(store_is_new=True) for _ in range(2)]
    await world.wait(lambda: any(plane.leads for plane in planes))
    await world.hold(lambda: sum(plane.leads for plane in planes) == 1, 60.0)
    (leader,) = [plane for plane in planes if plane.leads]
    (standby,) = [plane for plane in planes if not plane.leads]
    seen = standby.keeper.record
    assert seen is not None
    assert seen.owner == leader.keeper.owner
    assert standby.work.seen == []
    assert standby.keeper.epoch == 0


# --- taking over


async def test_the_loss_of_the_leaders_machine_is_over_within_the_ttl_rule(world: Candidates, autojump_clock: object):
    leader = await world.start_leader()
    standby = await world.start()
    await trio.sleep(11.0)
    await leader.kill()
    took_s = await world.wait(lambda: standby.confirmed)
    assert TIMINGS.ttl_s - TIMINGS.renew_s < took_s < WAIT_S + LOOKS_S
    assert standby.keeper.epoch == 2


async def test_a_leader_that_died_on_this_machine_is_followed_within_two_seconds(machine_world: Candidates, autojump_clock: object):
    leader = await machine_world.start_leader()
    standby = await machine_world.start()
    await trio.sleep(7.0)
    await leader.kill()
    assert await machine_world.wait(lambda: standby.confirmed) < 2.0


async def test_a_frozen_leader_keeps_its_lock_and_falls_to_the_ttl_rule(machine_world: Candidates, autojump_clock: object):
    leader = await machine_world.start_leader()
    standby = await machine_world.start()
    await trio.sleep(7.0)
    leader.machine.freeze()
    assert TIMINGS.ttl_s - TIMINGS.renew_s < await machine_world.wait(lambda: standby.confirmed) < WAIT_S + LOOKS_S
    leader.machine.thaw()
    await machine_world.wait(lambda: leader.keeper.view.phase is Phase.FOLLOW)
    await machine_world.wait(lambda: machine_world.lock.holder is standby.lock)  # given up by one, taken by the other
    await standby.kill()
    assert await machine_world.wait(lambda: leader.confirmed) < 2.0


async def test_a_frozen_leader_is_not_confirmed_when_it_thaws(world: Candidates, autojump_clock: object):
    """Nothing runs in between: its own look at the clock has to tell."""
    leader = await world.start_leader()
    leader.machine.freeze()
    await trio.sleep(TIMINGS.ttl_s)
    assert leader.keeper.power(leader.machine.now_s()) is Power.UNCONFIRMED
    assert leader.keeper.seconds_left(leader.machine.now_s()) == 0.0


async def test_who_lost_the_lease_ends_its_work_and_stands_by_under_a_new_name_in_the_same_process(
    world: Candidates, autojump_clock: object
):
    leader = await world.start_leader()
    standby = await world.start()
    before = leader.keeper.owner
    await trio.sleep(6.0)
    with capture_logs() as logs:
        leader.leases.cut = True
        await world.wait(lambda: standby.confirmed)
        assert leader.leads, "a silent store proves nothing"
        leader.leases.cut = False
        await world.wait(lambda: leader.keeper.view.phase is Phase.FOLLOW)
    assert leader.work.seen[-1] == ("end", 1, True)
    assert leader.keeper.owner != before
    assert leader.keeper.owner.rpartition("-")[0] == before.rpartition("-")[0]
    assert [entry["log_level"] for entry in logs if entry["event"] == "the lease is lost"] == ["warning"]
    await standby.kill()
    await world.wait(lambda: leader.confirmed)
    assert leader.keeper.epoch == 3


async def test_work_that_does_not_end_after_a_fence_ends_the_process(autojump_clock: object):
    with pytest.raises(BaseExceptionGroup) as ended:
        async with trio.open_nursery() as nursery:
            world = Candidates(nursery)
            leader = await world.start_leader()
            standby = await world.start()
            leader.work.before_end = forever
            leader.leases.cut = True
            await world.wait(lambda: standby.confirmed)
            leader.leases.cut = False
            await trio.sleep(60.0)
    (only,) = leaves(ended.value)
    assert isinstance(only, Broken)
    assert "did not end within 5 s" in only.message


async def test_a_leader_whose_work_no_longer_comes_round_loses_office(world: Candidates, autojump_clock: object):
    leader = await world.start_leader()
    standby = await world.start()
    await trio.sleep(20.0)
    leader.beats = False
    took_s = await world.wait(lambda: standby.confirmed)
    assert took_s < TIMINGS.ttl_s + TIMINGS.renew_s + WAIT_S + LOOKS_S
    await world.wait(lambda: ("end", 1, True) in leader.work.seen)


# --- a store that fails


async def test_a_store_that_is_silent_for_five_minutes_changes_no_role_and_is_told_in_two_lines(world: Candidates, autojump_clock: object):
    leader = await world.start_leader()
    standby = await world.start()
    await trio.sleep(9.0)
    with capture_logs() as logs:
        leader.leases.cut = standby.leases.cut = True
        await world.wait(lambda: not leader.confirmed)
        await world.hold(lambda: leader.leads and not leader.confirmed and not standby.leads, 300.0)
        leader.leases.cut = standby.leases.cut = False
        await world.wait(lambda: leader.confirmed)
        await trio.sleep(30.0)
    assert owners(world) == [leader.keeper.owner]
    told = [(entry["log_level"], entry["event"]) for entry in logs]
    assert told == 2 * [("warning", "the lease's store does not answer; whoever leads goes on")] + 2 * [("info", BACK)], "two lines of each"


@pytest.mark.parametrize("status", [401, 403, 409, 429, 500, 503])
async def test_an_answer_that_says_neither_yes_nor_no_deposes_nobody(world: Candidates, autojump_clock: object, status: int):
    leader = await world.start_leader()
    leader.leases.script = lambda request: Fault(status=status)
    await world.hold(lambda: leader.leads, 120.0)
    assert leader.leases.requests < 2 * 120 + 10, "no storm"
    leader.leases.script = lambda request: FINE
    assert await world.wait(lambda: leader.confirmed) < 2.0
    assert (leader.keeper.epoch, leader.work.seen[-1][0]) == (1, "warmed")


async def test_while_a_store_answers_reads_and_takes_no_writes_nobody_is_deposed(world: Candidates, autojump_clock: object):
    """Who writes first afterwards is a matter of seconds: the holder tries every second, a candidate once in a ttl."""
    leader = await world.start_leader()
    standby = await world.start()

    def refuse_writes(request: Request) -> Fault:
        return Fault(status=503) if request.method == "put" else FINE

    await trio.sleep(9.0)
    leader.leases.script = standby.leases.script = refuse_writes
    await world.hold(lambda: leader.leads and not standby.leads, 100.0)
    assert owners(world) == [leader.keeper.owner]
    leader.leases.script = standby.leases.script = lambda request: FINE
    await world.wait(lambda: leader.confirmed or standby.confirmed)
    await trio.sleep(2.0)
    await world.hold(lambda: leader.leads is not standby.leads, 30.0)


async def test_a_renewal_whose_reply_is_lost_counts_from_when_it_was_sent(world: Candidates, autojump_clock: object):
    leader = await world.start_leader()

    def lose_replies_of_writes(request: Request) -> Fault:
        return Fault(lose_reply=request.method == "put")

    leader.leases.script = lose_replies_of_writes
    await world.hold(lambda: leader.confirmed, 60.0)
    assert owners(world) == [leader.keeper.owner]


@pytest.mark.parametrize("number", range(12))
async def test_one_lost_reply_at_any_time_changes_nothing(world: Candidates, autojump_clock: object, number: int):
    leader = await world.start(store_is_new=True)
    leader.leases.script = lambda request: Fault(lose_reply=request.number == number)
    await world.wait(lambda: leader.confirmed)
    await world.hold(lambda: leader.confirmed, 40.0)
    assert leader.keeper.epoch == 1


async def test_a_write_that_takes_the_lease_late_is_used(world: Candidates, autojump_clock: object):
    plane = await world.start(store_is_new=True)
    plane.leases.script = lambda request: Fault(late_s=1.0) if request.number == 1 else FINE
    await world.wait(lambda: plane.confirmed)
    assert [record.epoch for record in written(world)] == [1]
    assert plane.keeper.seconds_left(plane.machine.now_s()) < TIMINGS.valid_s(TIMINGS.ttl_s) - TIMINGS.request_timeout_s, "from its sending"


async def test_a_record_that_was_deleted_by_hand_is_written_anew_above_it(world: Candidates, autojump_clock: object):
    leader = await world.start_leader()
    standby = await world.start()
    await trio.sleep(7.0)
    world.bucket.delete(ROLE)
    await world.wait(lambda: leader.keeper.epoch == 2)
    await world.hold(lambda: not standby.leads, 60.0)


async def test_a_record_that_was_deleted_while_nobody_led_is_waited_for_a_full_ttl(world: Candidates, autojump_clock: object):
    leader = await world.start_leader()
    await leader.kill()
    world.bucket.delete(ROLE)
    standby = await world.start(known_epoch=5)
    assert await world.wait(lambda: standby.leads) >= TIMINGS.ttl_s
    assert standby.keeper.epoch == 6


async def test_a_record_that_was_put_back_by_hand_does_not_bring_an_old_epoch_back(world: Candidates, autojump_clock: object):
    leader = await world.start_leader(known_epoch=50)
    assert leader.keeper.epoch == 51
    held = leader.keeper.record
    assert held is not None
    await leader.kill()
    world.bucket.restore(ROLE, encode(attrs.evolve(held, epoch=1, seq=1, write_id="old")))
    restarted = SimMachine(9)
    restarted.disk.files.update(leader.machine.disk.files)
    again = await world.start(machine=restarted)
    await world.wait(lambda: again.leads)
    assert again.keeper.epoch == 52


async def test_a_record_that_cannot_be_read_is_waited_for_and_said(world: Candidates, autojump_clock: object):
    leader = await world.start_leader()
    with capture_logs() as logs:
        world.bucket.restore(ROLE, b'{"epoch": "seven"}')
        await world.hold(lambda: leader.leads, 60.0)
    warnings = [entry for entry in logs if entry["log_level"] == "warning"]
    assert [entry["event"] for entry in warnings] == ["the lease cannot be read; whoever leads goes on"]
    assert "epoch: must be a whole number" in warnings[0]["why"]


async def test_a_record_of_another_cluster_is_left_alone(world: Candidates, autojump_clock: object):
    leader = await world.start_leader(cluster_id="other")
    with capture_logs() as logs:
        standby = await world.start()
        await leader.kill()
        await world.hold(lambda: not standby.leads, 60.0)
    warnings = [entry["why"] for entry in logs if entry["event"] == "this control plane does not compete for the lease"]
    assert warnings == ["the lease is of cluster other, this is c"]


async def test_one_that_competes_again_says_so(world: Candidates, autojump_clock: object):
    leader = await world.start_leader(cluster_id="other")
    standby = await world.start()
    await leader.kill()
    await world.wait(lambda: bool(standby.keeper.view.trouble))
    with capture_logs() as logs:
        record = attrs.evolve(standby.keeper.record or decode(world.bucket.get(ROLE).data), cluster_id=ClusterId("c"))
        world.bucket.restore(ROLE, encode(record))
        await world.wait(lambda: standby.leads)
    told = [(entry["log_level"], entry["event"]) for entry in logs if "compete" in entry["event"]]
    assert told == [("info", "this control plane competes for the lease again")]


async def test_a_store_with_data_and_no_lease_is_waited_with_and_that_is_said(world: Candidates, autojump_clock: object):
    """An operator who adds a second control plane saw a process that did nothing for 16 s, without a word."""
    with capture_logs() as logs:
        plane = await world.start()
        took_s = await world.wait(lambda: plane.leads)
    (line,) = [entry for entry in logs if "is waited for" in entry["event"]]
    assert (line["log_level"], line["wait_s"]) == ("info", round(WAIT_S, 1))
    assert abs(took_s - line["wait_s"]) < LOOKS_S
    with capture_logs() as logs:
        await plane.kill()
        second = await world.start()
        await world.wait(lambda: second.leads)
    assert not [entry for entry in logs if "is waited for" in entry["event"]], "here a lease is known"


async def test_an_older_build_follows_and_does_not_lead(world: Candidates, autojump_clock: object):
    leader = await world.start_leader(schema=5)
    standby = await world.start(schema=4)
    await leader.kill()
    await world.hold(lambda: not standby.leads, 60.0)
    assert "schema 5" in standby.keeper.view.trouble


# --- leaving and handing over


async def test_stepping_down_releases_after_the_work_and_another_leads_within_three_seconds(world: Candidates, autojump_clock: object):
    leader = await world.start_leader()
    standby = await world.start()
    await trio.sleep(8.0)
    leader.keeper.step_down()
    assert leader.keeper.power(leader.machine.now_s()) is None, "from here on"
    await leader.keeper.wait_left()
    assert leader.work.seen[-1] == ("end", 1, False)
    assert await world.wait(lambda: standby.confirmed) < 3.0
    await leader.ended.wait()
    await standby.kill()
    await world.hold(lambda: not leader.leads, 60.0)


async def test_stepping_down_from_a_store_that_does_not_answer_takes_three_seconds(world: Candidates, autojump_clock: object):
    leader = await world.start_leader()
    leader.leases.cut = True
    leader.keeper.step_down()
    begun_s = trio.current_time()
    await leader.keeper.wait_left()
    assert trio.current_time() - begun_s <= 3.5


async def test_a_request_that_cannot_be_cancelled_does_not_keep_a_process_that_leaves(world: Candidates, autojump_clock: object):
    """A disk that hangs: the thread is waited for, its owner is not."""
    leader = await world.start_leader()
    stuck = trio.Event()

    async def hang(*args: object) -> None:
        with trio.CancelScope(shield=True):
            await stuck.wait()

    leader.leases.replace = hang  # type: ignore[method-assign,assignment]
    await trio.sleep(6.0)
    leader.keeper.step_down()
    begun_s = trio.current_time()
    await leader.keeper.wait_left()
    assert trio.current_time() - begun_s <= 3.5
    stuck.set()
    await leader.ended.wait()


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.05, 0.08, 0.12, 0.2])
async def test_a_lease_that_is_won_while_leaving_is_given_back(world: Candidates, autojump_clock: object, after_s: float):
    plane = await world.start(store_is_new=True)
    plane.leases.script = lambda request: Fault(before_s=0.03, after_s=0.03)
    await trio.sleep(after_s)
    plane.keeper.step_down()
    await plane.keeper.wait_left()
    await trio.sleep(10.0)
    assert not plane.leads
    assert all(what[0] != "warmed" for what in plane.work.seen) or plane.work.seen[-1][0] == "end"
    assert not world.bucket.writes or written(world)[-1].released


async def test_work_that_does_not_end_is_not_released_and_its_lock_not_let_go(machine_world: Candidates, autojump_clock: object):
    leader = await machine_world.start_leader()
    standby = await machine_world.start()
    leader.work.before_end = forever
    leader.keeper.step_down()
    await leader.keeper.wait_left()
    assert not any(record.released for record in written(machine_world))
    await machine_world.hold(lambda: not standby.leads, TIMINGS.ttl_s - TIMINGS.renew_s - 5.0)
    await machine_world.wait(lambda: standby.leads)


async def test_handing_over_lets_the_other_lead_and_stays(world: Candidates, autojump_clock: object):
    leader = await world.start_leader()
    standby = await world.start()
    await trio.sleep(8.0)
    leader.keeper.peers(TWO)
    leader.keeper.hand_over()
    assert await world.wait(lambda: standby.confirmed) < 3.0
    await world.hold(lambda: standby.confirmed and not leader.leads, 60.0)
    await standby.kill()
    await world.wait(lambda: leader.confirmed)


async def test_who_handed_over_leads_again_when_nobody_else_does(world: Candidates, autojump_clock: object):
    leader = await world.start_leader()
    leader.keeper.peers(TWO)
    leader.keeper.hand_over()
    await world.wait(lambda: not leader.leads)
    assert UNTAKEN_S < await world.wait(lambda: leader.leads) < UNTAKEN_S + LOOKS_S


async def test_a_lone_control_plane_hands_over_only_by_force_and_then_takes_a_new_epoch(world: Candidates, autojump_clock: object):
    leader = await world.start_leader()
    with pytest.raises(Conflict) as refused:
        leader.keeper.hand_over()
    assert refused.value.code == "lone_control_plane"
    leader.keeper.hand_over(force=True)
    await world.wait(lambda: leader.leads and leader.keeper.epoch == 2)
    assert [what[0] for what in leader.work.seen] == ["warm", "warmed", "warm", "warmed"]


async def test_who_does_not_lead_cannot_hand_over(world: Candidates, autojump_clock: object):
    await world.start_leader()
    standby = await world.start()
    with pytest.raises(Conflict) as refused:
        standby.keeper.hand_over(force=True)
    assert refused.value.code == "not_leader"


async def test_a_leader_that_hears_less_than_half_of_what_a_peer_hears_gives_way_after_a_minute(world: Candidates, autojump_clock: object):
    leader = await world.start_leader()
    standby = await world.start()
    for _ in range(31):
        leader.keeper.peers(PeerView(heard=3, peer_heard=8, healthy_peers=1))
        await trio.sleep(2.0)
    assert await world.wait(lambda: standby.leads) < 3.0
    assert "hears 3 nodes" in leader.keeper.view.gave_up


# --- what it meets


async def test_an_epoch_met_above_ours_is_answered_with_one_above_it_and_no_hand_over(world: Candidates, autojump_clock: object):
    leader = await world.start_leader()
    owner = leader.keeper.owner
    leader.keeper.met(41, "ctl-9-aa")
    await world.wait(lambda: leader.keeper.epoch == 42 and leader.leads)
    assert leader.keeper.owner == owner
    assert not any(record.released for record in written(world))


async def test_our_own_epoch_and_junk_are_no_news(world: Candidates, autojump_clock: object):
    leader = await world.start_leader()
    leader.keeper.met(1, leader.keeper.owner)
    leader.keeper.met(10**16, "junk")
    await world.hold(lambda: leader.confirmed and leader.keeper.epoch == 1, 30.0)


async def test_an_epoch_met_that_was_taken_by_somebody_fences_what_did_not_know_it(world: Candidates, autojump_clock: object):
    leader = await world.start_leader()
    standby = await world.start()
    leader.machine.freeze()
    await world.wait(lambda: standby.confirmed)
    leader.machine.thaw()
    leader.keeper.met(2, standby.keeper.owner)
    await world.wait(lambda: ("end", 1, True) in leader.work.seen)
    assert standby.confirmed


async def test_warming_that_meets_a_higher_epoch_is_begun_above_it(world: Candidates, autojump_clock: object):
    plane = await world.start(store_is_new=True)

    async def greet(term: Term) -> None:
        if term.epoch < 10:
            raise StaleEpoch("met", epoch=9, owner="ctl-9-aa")

    plane.work.before_warm = greet
    await world.wait(lambda: plane.leads)
    assert plane.keeper.epoch == 10


async def test_a_hook_that_fails_gives_the_lease_to_another(world: Candidates, autojump_clock: object):
    failing = await world.start(store_is_new=True)

    async def fail(term: Term) -> None:
        raise ValueError("no catalog")

    failing.work.before_warm = fail
    with capture_logs() as logs:
        await world.wait(lambda: ("end", 1, False) in failing.work.seen)
        other = await world.start()
        assert await world.wait(lambda: other.confirmed) < 3.0
    assert [entry["event"] for entry in logs if entry["log_level"] == "error"] == ["not ready to lead; the lease is given back"]
    assert failing.keeper.view.gave_up == "no catalog"


# --- what is asked of it


async def test_a_proof_is_a_read_that_was_sent_after_it_was_asked_for(world: Candidates, autojump_clock: object):
    leader = await world.start_leader()
    reads = leader.leases.requests
    await leader.keeper.prove(1)
    assert leader.leases.requests > reads
    with pytest.raises(StaleEpoch):
        await leader.keeper.prove(7)


async def test_what_ends_before_a_release_can_still_prove_and_after_it_nothing_does(world: Candidates, autojump_clock: object):
    """A leader that leaves acknowledges its last writes."""
    leader = await world.start_leader()
    proven: list[int] = []

    async def last_writes(term: Term) -> None:
        await leader.keeper.prove(term.epoch)
        proven.append(term.epoch)

    leader.work.before_end = last_writes
    leader.keeper.step_down()
    await leader.keeper.wait_left()
    assert proven == [1]
    with pytest.raises(Unavailable):
        await leader.keeper.prove(1)


async def test_there_is_no_proof_while_the_store_is_silent_and_none_after_the_lease_was_taken(world: Candidates, autojump_clock: object):
    leader = await world.start_leader()
    standby = await world.start()
    leader.leases.cut = True
    with pytest.raises(Unavailable):
        await leader.keeper.prove(1)
    await world.wait(lambda: standby.confirmed)
    leader.leases.cut = False
    with pytest.raises((StaleEpoch, Unavailable)):
        await leader.keeper.prove(1)
    await standby.keeper.prove(2)


async def test_who_waits_for_a_proof_is_told_when_the_keeper_ends(world: Candidates, autojump_clock: object):
    leader = await world.start_leader()
    leader.leases.cut = True
    failed: list[str] = []

    async def ask() -> None:
        with pytest.raises(Unavailable):
            await leader.keeper.prove(1)
        failed.append("proof")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await trio.sleep(1.0)
        leader.scope.cancel()
    assert failed == ["proof"]


async def test_what_is_published_is_in_the_record_at_once_and_stays(world: Candidates, autojump_clock: object):
    leader = await world.start_leader()
    begun_s = trio.current_time()
    await leader.keeper.publish(Desk(base="e/1-ab", settings_version=7))
    assert trio.current_time() - begun_s < 1.0
    await trio.sleep(20.0)
    assert (written(world)[-1].base, written(world)[-1].settings_version) == ("e/1-ab", 7)
    standby = await world.start()
    with pytest.raises(Unavailable):
        await standby.keeper.publish(Desk(settings_version=8))
    await leader.kill()
    await world.wait(lambda: standby.leads)
    assert written(world)[-1].base == "e/1-ab", "the next leader restores from there until it has one of its own"


async def test_others_hear_when_confirmed_is_over(world: Candidates, autojump_clock: object):
    leader = await world.start_leader()
    leader.leases.cut = True
    while leader.confirmed:
        await leader.keeper.changed.wait()
    assert leader.keeper.lease_role(leader.machine.now_s()) is LeaseRole.UNCONFIRMED


# --- the local disk


async def test_junk_in_the_epoch_file_is_refused_by_name(world: Candidates, autojump_clock: object):
    plane = Plane(world, 1)
    plane.machine.disk.files[EPOCH] = b"many\n"
    with pytest.raises(Invalid, match=str(EPOCH)):
        await plane.keeper.run()


async def test_an_epoch_that_cannot_be_stored_is_not_used(world: Candidates, autojump_clock: object):
    plane = Plane(world, 1, store_is_new=True)
    plane.machine.disk.fail = OSError(errno.ENOSPC, "No space left on device")
    world.nursery.start_soon(plane.run)
    await world.wait(lambda: len(world.bucket.writes) >= 2)
    assert plane.work.seen == []
    assert written(world)[-1].released
    plane.machine.disk.fail = None
    await world.wait(lambda: plane.leads)


@pytest.mark.parametrize("alone", [True, False])
async def test_a_leader_whose_disk_refuses_three_renewals_gives_way_if_somebody_is_there(
    world: Candidates, autojump_clock: object, alone: bool
):
    leader = await world.start_leader()
    standby = None if alone else await world.start()
    leader.machine.disk.fail = OSError(errno.EROFS, "Read-only file system")
    for _ in range(18):
        leader.keeper.peers(PeerView() if alone else TWO)
        await trio.sleep(1.0)
    if standby is None:
        assert leader.confirmed
    else:
        assert await world.wait(lambda: standby.confirmed) < 3.0


async def test_a_process_that_is_dead_takes_no_lock_though_its_tasks_are_not_unwound_yet():
    """Of the stand-in: a renewal in the instant of a kill took the lock back for a dead holder, whom the ttl had to outlast then."""
    lock = SimLock()
    first, second = SimLockClient(lock), SimLockClient(lock)
    assert first.take_now("a", None)
    first.die()
    assert not first.take_now("a", None)
    assert second.take_now("b", "a")
    await second.let_go()
    assert second.take_now("b", None), "who let go of it is alive"
