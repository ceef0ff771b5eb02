"""The roll-out's rules by example: one restart at a time, the leader last, and a stop at the first failure."""

from __future__ import annotations

import json
from typing import Any

import attrs

from llmgw.control.rollout import (
    TOLD_S,
    TRIES_MAX,
    Grant,
    HandOver,
    Member,
    Rest,
    RestartMe,
    RolloutView,
    Save,
    Step,
    describe,
    desired_version,
    next_step,
    stands_back,
    start_version,
)
from llmgw.domain.settings_version import Held, PlaneSettings, RolloutPhase, RolloutRow
from llmgw.protocol.codec import structure, unstructure

REST = RolloutRow(version=1, proven=1)


def plane(address: str, applied: int = 1, pending: int = 0, *, age_s: float = 1.0, up_s: float = 900.0, **more: Any) -> Member:
    settings = PlaneSettings(live=applied, applied=applied, pending=pending, up_s=up_s, **more)
    return Member(address, f"ctl-{address}", age_s, settings)


def view(*members: Member, desired: int = 2, **more: Any) -> RolloutView:
    """The first one leads, for long, with a finished plan."""
    me = attrs.evolve(members[0], age_s=0.0, is_me=True)
    usual: dict[str, Any] = {"leads_s": 500.0, "confirmed_plan_s": 490.0, "saved_here": True, "granted_age_s": 1.0}
    return RolloutView((me, *members[1:]), me.address, desired, **{**usual, **more})


def under_way(phase: RolloutPhase = RolloutPhase.STANDBY, **more: Any) -> RolloutRow:
    usual: dict[str, Any] = {"version": 2, "proven": 1, "led": "a", "members": ("a", "b", "c")}
    return RolloutRow(phase, **{**usual, **more})


def saved(step: Step) -> RolloutRow:
    assert isinstance(step, Save), step
    return step.row


BEHIND_A = plane("a", 1, 2)
BEHIND_B = plane("b", 1, 2)
BEHIND_C = plane("c", 1, 2)


# --- beginning


def test_the_first_standby_by_address_gets_the_token_in_a_stored_row_and_is_told_after_that():
    row = saved(next_step(view(BEHIND_A, BEHIND_C, BEHIND_B), REST))
    assert (row.phase, row.version, row.token, row.led, row.members) == (RolloutPhase.STANDBY, 2, "b", "a", ("a", "b", "c"))
    assert next_step(view(BEHIND_A, BEHIND_B, BEHIND_C), row) == Grant(row, "b")


def test_a_grant_that_was_lost_is_said_again():
    row = under_way(token="b")
    assert next_step(view(BEHIND_A, BEHIND_B, granted_age_s=40.0), row) == Grant(row, "b")


def test_nobody_is_told_while_another_standby_is_not_heard_and_for_the_timeout_only():
    silent = plane("c", 1, 0, age_s=20.0)
    row = saved(next_step(view(BEHIND_A, BEHIND_B, silent), REST))
    assert (row.phase, row.token) == (RolloutPhase.STANDBY, "")
    assert next_step(view(BEHIND_A, BEHIND_B, silent, granted_age_s=60.0), row) == Rest("ctl-c is not there")
    assert saved(next_step(view(BEHIND_A, BEHIND_B, silent, granted_age_s=121.0), row)).token == "b"


def test_a_new_leader_begins_nothing_before_it_can_have_heard_who_is_there():
    assert isinstance(next_step(view(BEHIND_A, leads_s=3.0), REST), Rest)
    assert isinstance(next_step(view(BEHIND_A, BEHIND_B, leads_s=3.0), REST), Rest)


def test_where_nobody_is_behind_nothing_happens():
    assert isinstance(next_step(view(plane("a"), plane("b"), desired=1), REST), Rest)
    assert isinstance(next_step(view(plane("a"), plane("b"), desired=0), REST), Rest), "nothing pending is no version 0"


# --- the standbys


def test_the_first_with_a_version_has_to_run_it_for_the_delay_before_a_second_is_told():
    row = under_way(token="b")
    young = view(BEHIND_A, plane("b", 2, up_s=12.0), BEHIND_C, granted_age_s=20.0)
    assert next_step(young, row) == Rest("ctl-b is back, for 12 s of 30 s")
    after = saved(next_step(view(BEHIND_A, plane("b", 2, up_s=31.0), BEHIND_C, granted_age_s=40.0), row))
    assert (after.done, after.token) == (("b",), "c")


def test_one_that_only_just_serves_is_not_back():
    row = under_way(token="c", done=("b",))
    assert isinstance(next_step(view(BEHIND_A, plane("b", 2), plane("c", 2, up_s=4.0), granted_age_s=9.0), row), Rest)


def test_one_that_comes_back_refusing_the_version_has_it_held_and_nobody_else_restarts():
    back = plane("b", 1, refused=2, why="it died twice", up_s=8.0)
    row = saved(next_step(view(BEHIND_A, back, BEHIND_C, granted_age_s=30.0), under_way(token="b")))
    assert (row.phase, row.token, row.held) == (RolloutPhase.FROZEN, "", (Held(2, "ctl-b came back without it: it died twice"),))
    assert row.reason == "version 2 is held: ctl-b came back without it: it died twice"
    assert next_step(view(plane("a"), back, plane("c"), desired=1), row) == Rest(row.reason)


def test_one_that_does_not_come_back_in_time_has_it_held_too():
    row = under_way(token="b")
    gone = plane("b", 1, 2, age_s=50.0)
    assert next_step(view(BEHIND_A, gone, BEHIND_C, granted_age_s=119.0), row) == Rest("waits for ctl-b")
    frozen = saved(next_step(view(BEHIND_A, BEHIND_C, granted_age_s=121.0), row))
    assert frozen.held == (Held(2, "b was not back within 120 s"),)


def test_one_that_refused_before_it_was_told_is_left_out_and_the_others_go_on():
    changed = plane("b", 1, refused=2, why="no such key here")
    row = saved(next_step(view(BEHIND_A, changed, BEHIND_C), under_way(token="b")))
    assert (row.token, row.held) == ("c", ())


def test_one_that_had_it_and_started_anew_by_itself_stops_the_others_once_the_token_has_settled():
    row = under_way(token="c", done=("b",))
    held = saved(next_step(view(BEHIND_A, plane("b", 2, up_s=3.0), BEHIND_C, granted_age_s=9.0), row))
    assert (held.held[0].version, held.token) == (2, "c")
    assert isinstance(next_step(view(BEHIND_A, plane("b", 2), plane("c", 1, 2, age_s=9.0), desired=1, granted_age_s=9.0), held), Rest)
    after = saved(next_step(view(plane("a"), plane("b", 2, 1), plane("c", 2, 1, up_s=6.0), desired=1, granted_age_s=9.0), held))
    assert (after.version, after.token) == (1, "c"), "they go back, one at a time, and first who may die of it soon"


def test_a_refusal_that_a_new_leader_finds_is_an_answer_to_what_the_one_before_has_told():
    """It was taken for one that came before it was told, since the new leader had stored the row for another reason, and a second died."""
    back = plane("b", 1, refused=2, why="it died twice", up_s=10.0)
    now = view(BEHIND_A, back, BEHIND_C, epoch=8)
    assert saved(next_step(now, under_way(token="b", given=7))).held == (Held(2, "ctl-b came back without it: it died twice"),)
    assert not saved(next_step(now, under_way(token="b", given=8))).held


def test_what_one_ran_that_started_anew_is_held_and_not_only_what_another_goes_back_to():
    """The older version was blamed, and the newer one was tried on a second."""
    row = under_way(token="c", done=("b",), held=())
    held = saved(next_step(view(plane("a", 1, 3), plane("b", 3, up_s=3.0), plane("c", 2, 2), desired=3, granted_age_s=9.0), row)).held
    assert [one.version for one in held] == [2, 3]


def test_a_new_leader_knows_from_its_age_that_one_that_had_it_has_started_anew():
    """A leader that had not seen it die told the next one."""
    row = under_way(token="c", done=("b",), given=7)
    new = {"saved_here": False, "leads_s": 3.0, "granted_age_s": 3.0, "epoch": 8}
    held = saved(next_step(view(BEHIND_A, plane("b", 2, up_s=6.0), BEHIND_C, **new), row))
    assert (held.held[0].version, held.token) == (2, "c")
    assert next_step(view(BEHIND_A, plane("b", 2, up_s=16.0), BEHIND_C, **new), row) == Grant(row, "c"), "so old it was when it had it"


def test_nobody_is_told_while_one_that_had_it_is_not_there():
    row = under_way(token="c", done=("b",))
    gone = "ctl-b, which has version 2, is not there"
    assert next_step(view(BEHIND_A, plane("b", 2, age_s=4.0), BEHIND_C), row) == Rest(gone)
    assert next_step(view(BEHIND_A, BEHIND_C), row) == Rest(gone.replace("ctl-b", "b"))


def test_one_that_had_it_runs_it_for_as_long_again_when_it_restarts_for_its_file():
    """A new leader took it for one that had died of it."""
    row = under_way(token="b", done=("b",), for_file=True)
    young = view(BEHIND_A, plane("b", 2, up_s=6.0), BEHIND_C, granted_age_s=12.0)
    assert next_step(young, row) == Rest("ctl-b is back, for 6 s of 15 s")
    assert saved(next_step(young, attrs.evolve(row, done=()))).token == "c", "one that never had it need not"


AT_REST = RolloutRow(version=2, proven=1, led="a", done=("b",))  # the leader refuses it, so that nobody leads with it
REFUSES = plane("a", 1, refused=2)


def test_a_version_that_one_lost_while_the_roll_out_was_at_rest_is_tried_by_nobody_else():
    """One that joined later was told to try it."""
    put_aside = plane("b", 1, refused=2, why="it died twice")
    row = saved(next_step(view(REFUSES, put_aside, BEHIND_C, granted_age_s=9000.0), AT_REST))
    assert (row.phase, row.held) == (RolloutPhase.FROZEN, (Held(2, "ctl-b had it and refuses it now: it died twice"),))
    anew = view(REFUSES, plane("b", 2, up_s=20.0), BEHIND_C, granted_age_s=50.0)
    assert saved(next_step(anew, AT_REST)).held == (Held(2, "ctl-b had it, and has started anew by itself"),)


def test_that_a_machine_is_restarted_long_after_the_roll_out_came_to_rest_says_nothing_of_the_version():
    restarted = view(REFUSES, plane("b", 2, up_s=20.0), BEHIND_C, granted_age_s=9000.0)
    row = saved(next_step(restarted, AT_REST))
    assert (row.held, row.token, row.done) == ((), "c", ("b",)), "and it is watched on"
    gone = view(REFUSES, BEHIND_C, granted_age_s=9000.0)
    assert saved(next_step(gone, AT_REST)).done == (), "one that was not heard for a minute is not waited for"


def test_who_had_one_version_is_not_taken_for_one_that_had_another():
    """A version that a machine refused was held, as if it had run there before: it had gone back to an older one."""
    went_back = RolloutRow(RolloutPhase.FROZEN, 2, proven=1, led="a", done=("b",), held=(Held(2, "boom"),), reason="boom")
    refuses = plane("b", 1, refused=3)
    row = saved(next_step(view(plane("a", 1, refused=3), refuses, plane("c", 1, 3), desired=3), went_back))
    assert (row.version, row.done) == (3, ())
    assert saved(next_step(view(plane("a", 1, refused=3), refuses, plane("c", 1, 3), desired=3), row)).token == "c"


def test_while_two_have_just_started_into_a_held_version_nobody_is_told():
    """The one that was told was down while the other died of it."""
    row = under_way(version=1, held=(Held(2, "boom"),))
    both = view(plane("a"), plane("b", 2, 1, up_s=6.0), plane("c", 2, 1, up_s=6.0), desired=1)
    assert next_step(both, row) == Rest("ctl-c has just started into version 2, which is held, and may die of it")
    assert saved(next_step(view(plane("a"), plane("b", 2, 1, up_s=6.0), plane("c", 2, 1, up_s=16.0), desired=1), row)).token == "b"


# --- the leader


ONE_RUNS_IT = plane("b", 2)


def test_the_leader_hands_over_when_the_last_standby_that_can_has_the_version():
    refuses = plane("c", 1, refused=2)
    row = saved(next_step(view(BEHIND_A, ONE_RUNS_IT, refuses), under_way(done=("b",))))
    assert (row.phase, row.token) == (RolloutPhase.HANDING_OVER, "a")
    assert isinstance(next_step(view(BEHIND_A, ONE_RUNS_IT, refuses, granted_age_s=TOLD_S - 0.1), row), Rest), "the others read it first"
    assert next_step(view(BEHIND_A, ONE_RUNS_IT, refuses, granted_age_s=TOLD_S), row) == HandOver(row)


def test_a_leader_keeps_the_lease_when_the_one_that_was_to_lead_goes_away_while_the_others_read_of_it():
    row = under_way(RolloutPhase.HANDING_OVER, token="a", done=("b",))
    assert next_step(view(BEHIND_A, plane("b", 2, age_s=4.0), granted_age_s=TOLD_S), row) == Rest(
        "ctl-b, which has version 2, is not there"
    )
    assert isinstance(next_step(view(BEHIND_A, plane("b", 2, up_s=1.0), granted_age_s=TOLD_S), row), Rest)
    assert saved(next_step(view(BEHIND_A, plane("b", 2, up_s=5.0), granted_age_s=6.0), row)).is_held(2), "it has started anew by itself"


def test_who_cannot_be_the_successor_stands_back_and_nobody_does_where_no_leader_hands_over():
    handing = under_way(RolloutPhase.HANDING_OVER, token="a", done=("b",))
    assert [stands_back(handing, *one) for one in (("a", 1), ("a", 2), ("b", 2), ("c", 1), ("d", 0))] == [True, True, False, True, True]
    assert not any(stands_back(attrs.evolve(handing, phase=phase), "c", 1) for phase in RolloutPhase if phase is not handing.phase)
    file = attrs.evolve(handing, for_file=True, held=(Held(1, "boom"),))
    assert [stands_back(file, *one) for one in (("a", 2), ("b", 2), ("b", 1), ("c", 3), ("d", 0))] == [True, False, True, False, True]


def test_the_leader_waits_for_a_standby_that_is_still_trying_the_version():
    trying = plane("c", 1)
    assert isinstance(next_step(view(BEHIND_A, ONE_RUNS_IT, trying), under_way(done=("b",))), Rest)


def test_a_leader_stays_as_it_is_where_no_standby_runs_the_version():
    step = next_step(view(BEHIND_A, plane("b", 1, refused=2)), REST)
    assert isinstance(step, Rest)
    assert step.why.startswith("ctl-a leads and stays as it is: no standby is there that could lead")


def test_a_standby_that_has_not_looked_at_the_version_yet_is_what_is_waited_for():
    step = next_step(view(BEHIND_A, plane("b", 1)), REST)
    assert isinstance(step, Rest)
    assert step.why == "ctl-b has not said yet whether version 2 loads there"


def test_the_successor_leads_for_the_delay_with_a_finished_plan_and_then_the_old_leader_is_told():
    handing = under_way(RolloutPhase.HANDING_OVER, token="a", done=("b",))
    new = {"leads_s": 3.0, "confirmed_plan_s": 1.0, "granted_age_s": 3.0}
    proving = saved(next_step(view(ONE_RUNS_IT, BEHIND_A, saved_here=False, **new), handing))
    assert (proving.phase, proving.successor, proving.proving) == (RolloutPhase.PROVING, "b", 2)
    assert isinstance(next_step(view(ONE_RUNS_IT, BEHIND_A, **new), proving), Rest)
    leader = saved(next_step(view(ONE_RUNS_IT, BEHIND_A, leads_s=40.0, confirmed_plan_s=31.0, granted_age_s=39.0), proving))
    assert (leader.phase, leader.token, leader.proven) == (RolloutPhase.LEADER, "a", 2)
    assert next_step(view(ONE_RUNS_IT, BEHIND_A), leader) == Grant(leader, "a")
    rest = saved(next_step(view(ONE_RUNS_IT, plane("a", 2, up_s=20.0), granted_age_s=30.0), leader))
    assert (rest.phase, rest.token, rest.version) == (RolloutPhase.IDLE, "", 2)


def test_a_lease_that_the_wrong_one_took_is_passed_on():
    handing = under_way(RolloutPhase.HANDING_OVER, token="a", done=("b",))
    refuses = plane("c", 1, refused=2)
    wrong = view(refuses, BEHIND_A, ONE_RUNS_IT, saved_here=False, leads_s=2.0, epoch=8)
    passes = saved(next_step(wrong, attrs.evolve(handing, released=7, tries=1)))
    assert (passes.phase, passes.released, passes.tries) == (RolloutPhase.HANDING_OVER, 8, 2)
    assert next_step(attrs.evolve(wrong, saved_here=True), passes) == HandOver(passes)
    again = view(BEHIND_A, ONE_RUNS_IT, saved_here=False, leads_s=2.0, epoch=9)
    assert not saved(next_step(again, passes)).held, "nobody has led since it was passed on"


def test_a_lease_is_passed_on_only_to_one_that_is_there_and_not_for_ever():
    handing = under_way(RolloutPhase.HANDING_OVER, token="a", done=("b",), released=7, tries=1)
    refuses = plane("c", 1, refused=2)
    young = {"saved_here": False, "leads_s": 2.0, "epoch": 8}
    for fit in (plane("b", 2, age_s=4.0), plane("b", 2, up_s=1.0)):
        assert isinstance(next_step(view(refuses, BEHIND_A, fit, **young), handing), Rest)
    late = view(refuses, BEHIND_A, saved_here=False, leads_s=11.0, epoch=8)
    assert saved(next_step(late, handing)).is_held(2)
    assert saved(next_step(view(refuses, BEHIND_A, ONE_RUNS_IT, **young), attrs.evolve(handing, tries=TRIES_MAX))).is_held(2)


def test_an_old_leader_that_leads_again_says_who_failed_and_holds_the_version():
    handing = under_way(RolloutPhase.HANDING_OVER, token="a", done=("b",))
    row = saved(next_step(view(BEHIND_A, saved_here=False, leads_s=2.0), handing))
    assert (row.phase, row.held[0].version) == (RolloutPhase.FROZEN, 2)
    proving = under_way(RolloutPhase.PROVING, token="a", done=("b",), successor="b", proving=2)
    row = saved(next_step(view(BEHIND_A, ONE_RUNS_IT, saved_here=False, leads_s=2.0), proving))
    assert row.reason == "version 2 is held: in place of ctl-a, ctl-b did not keep the lease"


def test_a_version_that_was_taken_live_is_not_blamed_for_a_leader_that_dies_right_after_it():
    """Keys were asked for from one moment to the next, the leader was killed, and nobody asked for them any more."""
    other = plane("a", 3)
    live = attrs.evolve(plane("b", 3), settings=PlaneSettings(live=3, applied=3, up_s=900.0, started=1))
    step = next_step(view(live, other, desired=3, saved_here=False, leads_s=2.0, confirmed_plan_s=1.0), attrs.evolve(REST, version=3))
    assert isinstance(step, Rest)
    started = attrs.evolve(live, settings=attrs.evolve(live.settings, started=3))
    assert (
        saved(
            next_step(view(started, other, desired=3, saved_here=False, leads_s=2.0, confirmed_plan_s=1.0), attrs.evolve(REST, version=3))
        ).successor
        == "b"
    )


def test_a_lease_that_nobody_took_is_handed_over_again_and_no_version_is_blamed():
    """A standby was busy giving back a lease, the old leader took its own again, and a good version was held."""
    handing = under_way(RolloutPhase.HANDING_OVER, token="a", done=("b",), released=7, tries=1)
    back = view(BEHIND_A, ONE_RUNS_IT, saved_here=False, leads_s=2.0, epoch=8)
    row = saved(next_step(back, handing))
    assert (row.phase, row.held, row.tries) == (RolloutPhase.HANDING_OVER, (), 2)
    assert saved(next_step(attrs.evolve(back, epoch=9), handing)).is_held(2)  # somebody has led between
    assert saved(next_step(back, attrs.evolve(handing, tries=TRIES_MAX))).is_held(2)


def test_a_successor_without_a_finished_plan_has_failed_and_lets_another_lead():
    proving = under_way(RolloutPhase.PROVING, token="a", done=("b",), successor="b", proving=2)
    leads = {"leads_s": 160.0, "confirmed_plan_s": 0.0}
    row = saved(next_step(view(ONE_RUNS_IT, BEHIND_A, granted_age_s=151.0, **leads), proving))
    assert row.held == (Held(2, "ctl-b leads, and has no finished plan after 151 s"),)
    assert next_step(view(plane("b", 2, 1), plane("a"), desired=1, **leads), row) == HandOver(row)


def test_an_old_leader_that_does_not_come_back_has_nothing_held_when_the_others_run_the_version():
    leader = under_way(RolloutPhase.LEADER, token="a", done=("b",), proven=2)
    row = saved(next_step(view(ONE_RUNS_IT, granted_age_s=121.0), leader))
    assert (row.phase, row.held, row.reason) == (RolloutPhase.IDLE, (), "a was not back within 120 s")


def test_a_holder_that_comes_to_lead_gives_the_token_back():
    row = under_way(token="b")
    assert saved(next_step(view(BEHIND_B, BEHIND_A, saved_here=False), row)).token == "a"


def test_a_leader_with_an_unproven_version_tells_nobody_before_it_has_proven_it():
    young = {"leads_s": 4.0, "confirmed_plan_s": 2.0, "granted_age_s": 4.0}
    row = saved(next_step(view(ONE_RUNS_IT, BEHIND_A, BEHIND_C, saved_here=False, **young), under_way(token="c", done=("b",))))
    assert (row.successor, row.proving, row.token) == ("b", 2, "c")
    assert isinstance(next_step(view(ONE_RUNS_IT, BEHIND_A, BEHIND_C, **young), row), Rest)


# --- alone


def test_a_lone_control_plane_restarts_at_once_and_closes_the_row_when_it_is_back():
    row = saved(next_step(view(BEHIND_A), REST))
    assert (row.token, row.members) == ("a", ("a",))
    assert next_step(view(BEHIND_A), row) == RestartMe(row)
    again = {"leads_s": 6.0, "confirmed_plan_s": 4.0, "granted_age_s": 6.0, "saved_here": False}
    row = saved(next_step(view(plane("a", 2, up_s=7.0), **again), row))
    assert (row.token, row.done) == ("", ("a",))


def test_it_does_not_restart_once_somebody_else_is_heard():
    row = under_way(token="a", members=("a",))
    assert saved(next_step(view(BEHIND_A, BEHIND_B), row)).token == "b"


def test_a_lone_control_plane_that_came_back_without_the_version_holds_it():
    row = under_way(token="a", members=("a",))
    back = plane("a", 1, refused=2, why="it died twice", up_s=7.0)
    assert saved(next_step(view(back, leads_s=6.0, saved_here=False), row)).held == (Held(2, "ctl-a came back without it: it died twice"),)


# --- files, pauses, versions on versions


def test_a_changed_file_takes_the_same_token_and_holds_no_version():
    b, a = plane("b", restart_for_file=True), plane("a", restart_for_file=True)
    row = saved(next_step(view(a, b, desired=1), REST))
    assert (row.token, row.for_file) == ("b", True), "both want to, one may"
    assert next_step(view(a, b, desired=1), row) == Grant(row, "b")
    frozen = saved(next_step(view(a, desired=1, granted_age_s=121.0), row))
    assert (frozen.phase, frozen.held, frozen.token) == (RolloutPhase.FROZEN, (), "b")
    assert isinstance(next_step(view(a, desired=1), frozen), Rest), "it may be that every machine was given the same file"
    assert saved(next_step(view(a, plane("b"), desired=1), frozen)).phase is RolloutPhase.IDLE


def test_a_pause_gives_out_nothing_and_lets_the_holder_finish():
    assert next_step(view(BEHIND_A, BEHIND_B, paused=True), REST) == Rest("paused")
    row = under_way(token="b")
    assert next_step(view(BEHIND_A, BEHIND_B, paused=True), row) == Grant(row, "b")
    after = saved(next_step(view(BEHIND_A, plane("b", 2, up_s=40.0), BEHIND_C, paused=True, granted_age_s=50.0), row))
    assert (after.token, after.done) == ("", ("b",))
    assert next_step(view(BEHIND_A, ONE_RUNS_IT, BEHIND_C, paused=True), after) == Rest("paused")


def test_a_newer_version_waits_until_the_token_has_settled_and_then_begins_anew():
    row = under_way(token="b")
    down = plane("b", 1, 2, age_s=9.0)
    assert isinstance(next_step(view(plane("a", 1, 3), down, desired=3, granted_age_s=20.0), row), Rest)
    after = saved(next_step(view(plane("a", 1, 3), plane("b", 2, 3, up_s=31.0), desired=3, granted_age_s=40.0), row))
    assert (after.version, after.token, after.done) == (3, "b", ())


def test_whoever_runs_a_held_version_goes_back_one_at_a_time():
    frozen = under_way(RolloutPhase.FROZEN, held=(Held(2, "boom"),), reason="version 2 is held: boom")
    back = [plane("b", 2, 1), plane("c", 2, 1)]
    row = saved(next_step(view(plane("a"), *back, desired=1), frozen))
    assert (row.version, row.token) == (1, "b")
    done = saved(next_step(view(plane("a"), plane("b", 1, up_s=40.0), plane("c"), desired=1, granted_age_s=60.0), row))
    assert (done.phase, done.version, done.reason) == (RolloutPhase.FROZEN, 2, "version 2 is held: boom"), "told until the next version"
    assert saved(next_step(view(plane("a", 1, 3), plane("b"), plane("c"), desired=3), done)).phase is RolloutPhase.IDLE


def test_a_leader_that_runs_a_held_version_first_lets_one_lead_that_does_not():
    frozen = under_way(RolloutPhase.FROZEN, held=(Held(2, "boom"),))
    assert next_step(view(plane("b", 2, 1), plane("a"), plane("c", 2, 1), desired=1), frozen) == HandOver(frozen)


def test_one_that_refuses_every_newer_version_goes_back_to_the_one_that_loads():
    frozen = RolloutRow(RolloutPhase.FROZEN, 3, held=(Held(3, "boom"),), proven=1)
    row = saved(next_step(view(plane("a", 1, refused=2), plane("b", 3, 1, refused=2), desired=2), frozen))
    assert (row.version, row.token) == (1, "b")


def test_the_last_version_left_is_not_held_and_stops_everybody():
    row = RolloutRow(RolloutPhase.STANDBY, 1, ("a", "b"), "b", "a")
    frozen = saved(next_step(view(plane("a", 0, 1), desired=1, granted_age_s=121.0), row))
    assert (frozen.phase, frozen.held) == (RolloutPhase.FROZEN, ())
    assert frozen.reason == "version 1 goes no further, and no other is left to go back to: b was not back within 120 s"
    assert next_step(view(plane("a", 0, 1), plane("c", 0, 1), desired=1), frozen) == Rest(frozen.reason)


def test_what_came_between_the_proven_version_and_the_failed_one_is_held_with_it():
    row = RolloutRow(RolloutPhase.STANDBY, 4, ("a", "b"), "b", "a", proven=2)
    held = saved(next_step(view(plane("a", 2, 4), desired=4, granted_age_s=121.0), row)).held
    assert [one.version for one in held] == [3, 4], "to go back to version 3 would be to try another"


# --- versions, words, storing


def test_the_desired_version_is_the_newest_that_is_not_held():
    assert [desired_version(3, ()), desired_version(3, (3, 2)), desired_version(2, (1, 2)), desired_version(0, ())] == [3, 1, 0, 0]


def test_a_process_starts_into_what_it_was_told_else_what_it_ran_else_what_is_proven_else_one_before_these_else_the_newest():
    assert start_version(5, 4, 3, 6, ()) == 5
    assert start_version(5, 4, 3, 6, (5,)) == 4
    assert start_version(0, 0, 3, 6, ()) == 3
    assert start_version(0, 0, 0, 6, (6,)) == 5
    assert start_version(1, 0, 0, 1, (1,)) == 0
    assert start_version(0, 2, 2, 3, (2,)) == 1, "where the proven one is put aside, the one before, and not one that nobody has tried"
    assert start_version(0, 2, 2, 3, (1, 2)) == 3


def test_one_sentence_says_where_it_stands():
    row = under_way(token="b")
    away = plane("b", 1, 2, age_s=9.0)
    assert describe(row, view(BEHIND_A, away, granted_age_s=12.0)) == "version 2: waiting for ctl-b to come back, 12 s of 120 s"
    assert describe(row, view(BEHIND_A, BEHIND_B)) == "version 2: ctl-b is told to restart, 1 s of 120 s"
    assert describe(under_way(RolloutPhase.FROZEN, reason="version 2 is held: boom"), view(BEHIND_A)) == "version 2 is held: boom"
    assert describe(REST, view(plane("a"), desired=1)) == "everybody runs what can run there"


def test_the_row_survives_being_stored_as_json():
    row = under_way(RolloutPhase.PROVING, token="a", held=(Held(1, "boom"),), done=("b",), for_file=True, successor="b", proving=2)
    assert structure(json.loads(json.dumps(unstructure(row))), RolloutRow) == row
