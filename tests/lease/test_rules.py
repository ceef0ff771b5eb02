"""The lease's state machine alone: any event in any phase, and the steps that no schedule of the simulator shows clearly."""

from __future__ import annotations

import itertools

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.domain.ids import ClusterId, OwnerId
from llmgw.lease import actions, events, rules, state
from llmgw.lease.actions import Draw
from llmgw.lease.decide import decide
from llmgw.lease.digest import step
from llmgw.lease.record import LeaseRecord
from llmgw.lease.state import Candidate, LeaseView, Phase
from llmgw.lease.timings import LeaseTimings
from tests.lease.records import later, record

TIMINGS = LeaseTimings()
ME = Candidate(ClusterId("c"), OwnerId("me-1"), "boot", store_is_new=True)
SPIN_MAX = 50
TOLD = st.sampled_from(
    [
        events.MetEpoch(0), events.MetEpoch(1), events.MetEpoch(2), events.MetEpoch(9), events.ReadNow(), events.StepDown(),
        events.HandOver(), events.HandOver(anew=True), events.Beat(), events.Warmed(1), events.Warmed(2), events.WarmProgress(1),
        events.WarmFailed(1, "no"), events.WarmFailed(1, "met", 5), events.LocalDiskFailed(), events.LocalDiskFine(),
        events.EpochStored(), events.EpochNotStored(), events.Publish(state.Desk("e/1", 3)), state.PeerView(1, 9, 1),
        state.PeerView(9, 9, 1), events.WorkEnded(), events.WorkEnded(clean=False), events.StandBack(0.0), events.StandBack(30.0),
        events.Barred("no"), events.Barred(""), events.Reborn(OwnerId("me-9")),
    ]
)  # fmt: skip


class Machine:
    """Drives one view. The store holds one record; what is asked of others waits until it is answered."""

    def __init__(self, me: Candidate = ME, floor: int = 0) -> None:
        self.now_s = 1000.0
        self.view = state.first_view(me, TIMINGS, floor=floor, now_s=self.now_s)
        self.numbers = itertools.count()
        self.stored: LeaseRecord | None = None
        self.asked: list[actions.Action] = []
        self.settle()

    def settle(self) -> None:
        """Decides until there is nothing to do but wait."""
        for _ in range(SPIN_MAX):
            number = next(self.numbers)
            self.view, action = decide(self.view, self.now_s, Draw(f"w{number}", f"t{number}"))
            if isinstance(action, actions.Wait):
                assert action.until_s > self.now_s or self.view.phase is not Phase.FOLLOW or action.until_s == self.now_s
                if action.until_s > self.now_s:
                    self.until_s = action.until_s
                    return
            elif isinstance(action, actions.Stop):
                self.until_s = state.FOREVER
                return
            elif isinstance(action, actions.DrawOwner):
                self.tell(events.Reborn(OwnerId(f"me-{number}")))
            elif not isinstance(action, actions.LetGoLock):
                self.asked.append(action)
        raise AssertionError(f"it does not come to rest in {self.view.phase}")

    def tell(self, event: events.Event) -> None:
        self.view = step(self.view, event, self.now_s)
        requests = [one for one in self.asked if isinstance(one, actions.Read | actions.Replace | actions.TakeLock)]
        assert len(requests) <= 1 or self.view.phase is Phase.LEFT, "one request in flight"

    def answer(self, how: str) -> None:
        """The oldest of what is asked is answered: "yes" does it, "no" refuses it, "silence" says nothing, "done" does it in silence."""
        action = self.asked.pop(0)
        if isinstance(action, actions.Read):
            self.tell(events.Unknown() if how in ("silence", "done") else events.Answered(self.stored))
        elif isinstance(action, actions.Replace):
            same = (self.stored and self.stored.write_id) == (action.attempt.expected and action.attempt.expected.write_id)
            if same and how in ("yes", "done"):
                self.stored = action.attempt.new
            if how in ("silence", "done"):
                self.tell(events.Unknown())
            else:
                self.tell(events.Done() if same and how == "yes" else events.Answered(self.stored))
        elif isinstance(action, actions.TakeLock):
            self.tell(events.LockAnswered(how == "yes"))
        elif isinstance(action, actions.StoreEpoch):
            self.tell(events.EpochStored() if how == "yes" else events.EpochNotStored())
        elif isinstance(action, actions.StartWork):
            self.tell(events.Warmed(action.record.epoch) if how == "yes" else events.WarmFailed(action.record.epoch, how))
        else:
            assert isinstance(action, actions.EndWork)
            self.tell(events.WorkEnded(clean=how == "yes"))
        self.settle()

    def wait(self, for_s: float) -> None:
        self.now_s += for_s
        self.settle()

    def lead(self) -> Machine:
        while self.view.phase is not Phase.LEADING:
            self.answer("yes") if self.asked else self.wait(self.until_s - self.now_s)
        return self


STEPS = st.one_of(
    TOLD.map(lambda event: ("tell", event)),
    st.sampled_from(["yes", "yes", "yes", "no", "silence", "done"]).map(lambda how: ("answer", how)),
    st.sampled_from([0.2, 1.0, 3.0, 6.0, 16.0, 40.0]).map(lambda for_s: ("wait", for_s)),
    st.sampled_from(["other", "released", "gone", "mine, cloned"]).map(lambda what: ("store", what)),
)


@settings(max_examples=600, deadline=None)
@given(st.lists(STEPS, max_size=60), st.booleans())
def test_any_events_in_any_order_keep_the_machine_whole(steps: list[tuple[str, object]], one_machine: bool):
    """No illegal move, no loop that never rests, one request in flight; who is asked nothing more is at rest or waits for a time."""
    machine = Machine(attrs.evolve(ME, one_machine=one_machine))
    for what, value in steps:
        if what == "tell":
            machine.tell(value)  # type: ignore[arg-type]
            machine.settle()
        elif what == "answer" and machine.asked:
            machine.answer(str(value))
        elif what == "wait":
            machine.wait(float(value))  # type: ignore[arg-type]
        elif what == "store" and machine.stored is not None:
            before = machine.stored
            changed = {
                "other": later(before, epoch=before.epoch + 1, owner="b-1", tenure="tb"),
                "released": rules.release_of(before, f"hand-{before.seq}"),
                "mine, cloned": later(before),
                "gone": None,
            }
            machine.stored = changed[str(value)]
        view = machine.view
        assert (view.held is not None) == (view.phase in state.HOLDS | {Phase.STEPPING_DOWN, Phase.FENCED})
        assert view.floor >= (view.held.epoch if view.held else 0)
        if state.power(view, machine.now_s) is not None:
            assert view.work is state.Work.RUNS
            assert not view.leaving
    assert machine.asked or machine.view.phase is Phase.LEFT or machine.until_s < state.FOREVER


def test_confirmed_ends_by_the_clock_alone():
    machine = Machine().lead()
    assert state.role(machine.view, machine.view.valid_until_s - 0.001).value == "confirmed"
    assert state.role(machine.view, machine.view.valid_until_s).value == "unconfirmed"


def test_a_holder_counts_from_when_it_sent_and_a_candidate_from_when_it_received():
    machine = Machine().lead()
    machine.wait(TIMINGS.renew_s)
    sent_s = machine.now_s
    machine.now_s += 2.5
    machine.answer("yes")
    assert machine.view.valid_until_s == sent_s + TIMINGS.valid_s(TIMINGS.ttl_s)

    candidate = Machine(attrs.evolve(ME, owner=OwnerId("b-1")))
    candidate.stored = machine.stored
    candidate.now_s += 2.5
    candidate.answer("yes")
    assert candidate.view.silent_since_s == candidate.now_s


def watch(candidate: Machine, until_s: float) -> Phase:
    """Reads at every poll; the phase at the end."""
    while candidate.now_s < until_s and candidate.view.phase is Phase.FOLLOW:
        candidate.answer("yes") if candidate.asked else candidate.wait(candidate.until_s - candidate.now_s)
    return candidate.view.phase


@pytest.mark.parametrize("ttl_s", [6.0, 15.0, 60.0])
def test_the_records_own_ttl_says_how_long_it_is_waited_for(ttl_s: float):
    candidate = Machine()
    candidate.stored = record(owner="a-1", ttl_s=ttl_s)
    begun_s = candidate.now_s
    watch(candidate, begun_s + 200.0)
    assert candidate.now_s - begun_s == pytest.approx(TIMINGS.wait_s(ttl_s), abs=1.1)


def test_one_failed_read_begins_the_silence_anew():
    candidate = Machine()
    candidate.stored = record(owner="a-1")
    begun_s = candidate.now_s
    assert watch(candidate, begun_s + 12.0) is Phase.FOLLOW
    while not candidate.asked:
        candidate.wait(candidate.until_s - candidate.now_s)
    candidate.answer("silence")
    assert watch(candidate, begun_s + 12.0 + TIMINGS.ttl_s) is Phase.FOLLOW
    assert watch(candidate, begun_s + 60.0) is not Phase.FOLLOW


def test_a_gap_between_two_reads_begins_the_silence_anew():
    """Who was frozen has not watched: the holder, frozen as long, must have its chance to renew."""
    candidate = Machine()
    candidate.stored = record(owner="a-1")
    watch(candidate, candidate.now_s + 3.0)
    candidate.now_s += 60.0
    assert watch(candidate, candidate.now_s + 10.0) is Phase.FOLLOW


def test_an_older_record_than_the_one_seen_is_a_late_answer():
    machine = Machine().lead()
    held = machine.view.held
    assert held is not None
    machine.wait(TIMINGS.renew_s)
    machine.answer("yes")
    machine.tell(events.ReadNow())
    machine.settle()
    current, machine.stored = machine.stored, held
    machine.answer("yes")
    assert machine.view.phase is Phase.LEADING
    machine.stored = current
    machine.wait(1.1)
    machine.answer("yes")
    assert machine.view.phase is Phase.LEADING


def test_a_clone_of_this_process_is_met_as_somebody_else():
    machine = Machine().lead()
    assert machine.stored is not None
    machine.stored = later(machine.stored)
    machine.wait(TIMINGS.renew_s)
    machine.answer("yes")
    assert machine.view.phase is Phase.FENCED


def test_a_boot_id_proves_a_death_only_where_both_are_known():
    def first_phase(mine: str, theirs: str) -> Phase:
        candidate = Machine(attrs.evolve(ME, boot_id=mine, one_machine=True))
        candidate.stored = record(owner="a-1", boot_id=theirs)
        candidate.answer("yes")
        if candidate.asked:
            candidate.answer("no")  # its lock is not free
        return candidate.view.phase

    assert first_phase("b2", "b1") is Phase.ACQUIRING
    assert first_phase("b1", "b1") is Phase.FOLLOW
    assert first_phase("", "b1") is Phase.FOLLOW
    assert first_phase("b2", "") is Phase.FOLLOW


def test_the_views_fields_can_be_changed_as_quickly_as_the_simulator_needs_and_no_other():
    view: LeaseView = Machine().view
    with pytest.raises(AssertionError):
        state.change(view, no_such_field=1)
