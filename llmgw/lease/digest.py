"""What becomes of the view when something has happened. Pure: `now_s` is the caller's own CLOCK_BOOTTIME."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import attrs

from llmgw.lease.events import (
    Answered,
    Barred,
    Beat,
    Done,
    EpochNotStored,
    EpochStored,
    Event,
    HandOver,
    LocalDiskFailed,
    LocalDiskFine,
    LockAnswered,
    MetEpoch,
    Publish,
    ReadNow,
    Reborn,
    StandBack,
    StepDown,
    Unknown,
    Warmed,
    WarmFailed,
    WarmProgress,
    WorkEnded,
)
from llmgw.lease.record import Attempt, LeaseRecord
from llmgw.lease.state import (
    FOREVER,
    HOLDS,
    PEER_VIEW_AGE_S_MAX,
    RELEASE_DEADLINE_S,
    WARM_BUDGET_S,
    Chance,
    LeaseView,
    Locking,
    Lower,
    PeerView,
    Phase,
    Reading,
    Work,
    change,
    give_up,
    gone,
    move,
    peers_fit,
    step_aside,
)
from llmgw.lease.timings import POLL_JITTER

DEAF_S: Final = 60.0  # a leader that hears fewer nodes than a peer for this long hands over (control.md 2.1, rule 8)
LOWER_READS: Final = 3  # reads of one older record before a store counts as rolled back; one may come from a lagging copy (R-D.3.12)
MET_EPOCH_MAX: Final = 10**15  # nobody gets there by leading; a file with junk in it does, and epochs above it could not be kept
DOUBTS_MAX: Final = 64  # attempts of unknown outcome remembered; a late write older than a minute of retries is a stranger's


def step(view: LeaseView, event: Event, now_s: float) -> LeaseView:
    """The view after `event`. Any event may come in any phase; one that is out of date changes nothing."""
    return _STEPS[type(event)](view, event, now_s)


def _answered(view: LeaseView, event: Answered, now_s: float) -> LeaseView:
    flight = view.in_flight
    if view.phase is Phase.LEFT:
        return change(view, in_flight=None)
    assert isinstance(flight, Attempt | Reading), "an answer belongs to a request"
    doubt = (*view.doubt, flight) if isinstance(flight, Attempt) else view.doubt
    poll_s = view.timings.poll_s * (1 + POLL_JITTER * (2 * event.jitter - 1))
    view = change(view, in_flight=None, doubt=doubt, failures=0, next_s=now_s + poll_s)
    record = event.record
    if record is not None and view.me.cluster_id not in ("", record.cluster_id):
        # Nothing is proven and nothing deleted: somebody has mixed up two clusters' stores.
        why = f"the lease is of cluster {record.cluster_id}, this is {view.me.cluster_id}"
        return _quiet(change(view, silent_since_s=None, trouble=why, read_due=True), now_s)
    if record is not None and (own := view.rules.own_attempt(record, doubt)) is not None:
        return _won(view, own, now_s)
    if view.held is not None:
        return _seen_by_holder(view, view.held, record, flight.sent_s, now_s)
    return _seen_by_candidate(view, record, flight.sent_s, now_s)


def _seen_by_holder(view: LeaseView, held: LeaseRecord, record: LeaseRecord | None, sent_s: float, now_s: float) -> LeaseView:
    """What stands in the store, to one who holds (or is about to release) `held`."""
    if record is not None and view.rules.deposed_by(record, held):
        return _deposed(view, record, now_s)
    if record is not None and record.write_id == held.write_id:
        return change(view, lower=None, seen=record, next_s=now_s)  # still ours; what is due may be sent at once
    # Absent, or older than ours: deleted or rolled back by hand, or a copy that lags. It proves nothing. Once it stood still as
    # long as any holder could be trusted (or while our own right is proven, so that nobody else can have one), take it anew.
    view = _count_lower(view, record, sent_s, now_s)
    assert view.lower is not None
    proven = now_s < view.valid_until_s and record is None
    if view.phase in HOLDS and (proven or _stands(view, view.lower, now_s)):
        return change(view, chance=Chance(record), next_s=now_s)
    return change(view, read_due=True, next_s=now_s + view.timings.retry_s)


def _seen_by_candidate(view: LeaseView, record: LeaseRecord | None, sent_s: float, now_s: float) -> LeaseView:
    """What stands in the store, to one who does not hold the lease."""
    seen = view.seen
    if seen is not None and (record is None or record.order < seen.order):
        view = _count_lower(view, record, sent_s, now_s)
        assert view.lower is not None
        if not _stands(view, view.lower, now_s):
            return _quiet(change(view, answered_s=now_s), now_s)
        # Deleted: nothing stood there for as long as any holder can be trusted. Rolled back: judged like any other, and a full
        # wait from now, so that the holder, who needs one wait to believe it, goes first.
        since_s = view.lower.since_s if record is None else None
        view = change(view, seen=record, silent_since_s=since_s, lower=None, doubt=())
    else:
        gone = record is not None and (seen is None or record.write_id != seen.write_id)
        # What stood there was replaced: no write that expected it can still succeed.
        view = change(view, lower=None, doubt=() if gone and view.doubt else view.doubt)
    anew = (
        view.silent_since_s is None
        or now_s - view.answered_s > view.timings.read_gap_s
        or (record is None) != (view.seen is None)
        or (record is not None and view.seen is not None and record.write_id != view.seen.write_id)
    )
    # Somebody has taken what we handed over, so a later release is open to us again. Who gave up goes on waiting: two that are
    # not fit to lead must not take turns.
    taken = record is not None and record.owner != view.me.owner and not view.gave_up
    view = change(
        view,
        yield_until_s=-FOREVER if taken else view.yield_until_s,
        seen=record,
        floor=view.floor if record is None else max(view.floor, record.epoch),
        silent_since_s=view.rules.silence_from_s(sent_s, now_s) if anew else view.silent_since_s,
        answered_s=now_s,
        chance=None,
        trouble="",
    )
    view = _quiet(view, now_s)
    return view if view.leaving else _look_for_chance(view, record, now_s)


def _look_for_chance(view: LeaseView, record: LeaseRecord | None, now_s: float) -> LeaseView:
    if view.barred:
        return change(view, trouble=view.barred)
    if record is not None and record.schema > view.me.schema:
        # An older build may follow, and must not lead over what a newer one has written.
        return change(view, trouble=f"the lease's holder wrote schema {record.schema}, this build knows {view.me.schema}")
    assert view.silent_since_s is not None
    silent = now_s - view.silent_since_s >= view.rules.wait_for_s(view.timings, record)
    if record is None:
        if view.me.cluster_id and (silent or (view.me.store_is_new and view.floor == 0)):
            return change(view, chance=Chance(None))
        return view
    rebooted = view.me.one_machine and view.rules.last_run(view.me.boot_id, record.boot_id)
    left = record.released and not view.gave_up and view.rules.untaken(now_s - view.silent_since_s)
    yield_until_s = max(view.yield_until_s, view.back_until_s)
    if silent or rebooted or left or (record.released and view.rules.released_is_free(now_s, yield_until_s)):
        return change(view, chance=Chance(record))
    if view.me.one_machine and not record.released:
        return change(view, chance=Chance(record, by_lock=True))
    return view


def _count_lower(view: LeaseView, record: LeaseRecord | None, sent_s: float, now_s: float) -> LeaseView:
    lower = view.lower
    same = lower is not None and (record.write_id if record else "") == (lower.record.write_id if lower.record else "")
    if lower is None or not same:
        return change(view, lower=Lower(record, view.rules.silence_from_s(sent_s, now_s)))
    return change(view, lower=attrs.evolve(lower, reads=lower.reads + 1))


def _stands(view: LeaseView, lower: Lower, now_s: float) -> bool:
    return lower.reads >= LOWER_READS and now_s - lower.since_s >= view.rules.wait_for_s(view.timings, lower.record)


def _quiet(view: LeaseView, now_s: float) -> LeaseView:
    """A request's outcome is known and it brought nothing: back to where one waits."""
    if view.phase is Phase.ACQUIRING:
        return move(view, Phase.FOLLOW)
    if view.phase is Phase.STEPPING_DOWN:
        return change(view, next_s=now_s + view.timings.retry_s, read_due=True)
    return view


def _done(view: LeaseView, event: Done, now_s: float) -> LeaseView:
    attempt = view.in_flight
    assert isinstance(attempt, Attempt), "only a write is done"
    if view.phase is Phase.LEFT:
        return change(view, in_flight=None)  # nobody leads by it: it expires
    return _won(change(view, in_flight=None, failures=0), attempt, now_s)


def _won(view: LeaseView, attempt: Attempt, now_s: float) -> LeaseView:
    """Our write is what stands in the store."""
    new = attempt.new
    met = view.floor >= new.epoch  # reported while this was on its way
    view = change(view, seen=new, lower=None, doubt=(), floor=max(view.floor, new.epoch), trouble="")
    if new.released:
        return gone(view, now_s)
    until_s = view.rules.holder_valid_until_s(view.timings, attempt.sent_s, now_s, new.ttl_s)
    renew_at_s = max(now_s, attempt.sent_s + view.timings.renew_s)
    held = view.held
    if held is not None and held.epoch == new.epoch and held.tenure == new.tenure:
        until_s = max(until_s, view.valid_until_s)
        return change(view, held=new, valid_until_s=until_s, renew_at_s=renew_at_s, next_s=now_s, lock_asked=False)
    me = attrs.evolve(view.me, store_is_new=False, cluster_id=new.cluster_id)
    view = change(
        view, held=new, valid_until_s=until_s, renew_at_s=renew_at_s, next_s=now_s, above=met, chance=None, stored=False, storing=False,
        lock_asked=False, disk_failures=0, deaf_since_s=None, me=me,
    )  # fmt: skip
    if view.leaving or view.phase is Phase.STEPPING_DOWN:
        # It was asked to leave while this was on its way: given back, before anything was done under it.
        if view.phase is not Phase.STEPPING_DOWN:
            view = move(view, Phase.STEPPING_DOWN)
        return change(view, release_until_s=min(view.release_until_s, now_s + RELEASE_DEADLINE_S))
    return change(move(view, Phase.WARMING), warm_until_s=now_s + WARM_BUDGET_S, read_due=view.read_due or met)


def _unknown(view: LeaseView, event: Unknown, now_s: float) -> LeaseView:
    flight = view.in_flight
    assert isinstance(flight, Attempt | Reading), "what failed is a request"
    if view.phase is Phase.LEFT:
        return change(view, in_flight=None)
    failures = view.failures + 1
    writes = isinstance(flight, Attempt)
    doubt = (*view.doubt, flight)[-DOUBTS_MAX:] if isinstance(flight, Attempt) else view.doubt
    view = change(
        view,
        in_flight=None,
        doubt=doubt,
        failures=failures,
        read_due=True,
        chance=None,
        next_s=now_s + view.timings.retry_s,
        # Also after a write: where ours does not get through, a holder's renewals may not either, though both can read.
        silent_since_s=view.rules.silence_after_failure(view.silent_since_s),
        lower=view.lower if writes else None,
    )
    if event.local_disk and writes and not view.me.one_machine:  # on one machine they share the disk under the lease
        view = _local_disk_failed(view, LocalDiskFailed(), now_s)
    if view.held is not None and view.phase in HOLDS and view.rules.fenced_after_failures(failures):
        return _deposed(view, view.held, now_s)
    return view


def _deposed(view: LeaseView, by: LeaseRecord, now_s: float) -> LeaseView:
    """Somebody else holds the lease: proof."""
    view = change(
        view,
        seen=by,
        silent_since_s=now_s,
        answered_s=now_s,
        floor=max(view.floor, by.epoch),
        doubt=(),
        lower=None,
        chance=None,
        above=False,
    )
    if view.phase is Phase.STEPPING_DOWN and view.work is Work.NONE:
        return gone(view, now_s)
    return view if view.phase is Phase.FENCED else move(view, Phase.FENCED)


def _lock_answered(view: LeaseView, event: LockAnswered, now_s: float) -> LeaseView:
    flight = view.in_flight
    assert isinstance(flight, Locking), "a lock was asked for"
    view = change(view, in_flight=None, lock=flight.name if event.taken else view.lock, lock_asked=True)
    if view.chance is not None and view.chance.by_lock and not event.taken:
        return change(view, chance=None)
    return view


def _epoch_stored(view: LeaseView, event: EpochStored, now_s: float) -> LeaseView:
    return change(view, stored=True, storing=False, disk_failures=0)


def _epoch_not_stored(view: LeaseView, event: EpochNotStored, now_s: float) -> LeaseView:
    view = change(view, storing=False)
    if view.phase is Phase.WARMING:
        # An epoch that is not on disk may not be used: a restart here could begin below it.
        return give_up(view, "the epoch could not be written to the local disk", now_s)
    return view


def _local_disk_failed(view: LeaseView, event: LocalDiskFailed, now_s: float) -> LeaseView:
    view = change(view, disk_failures=view.disk_failures + 1)
    if view.phase in HOLDS and view.rules.disk_gives_up(view.disk_failures, peers_fit(view, now_s)):
        return give_up(view, f"the local disk refused {view.disk_failures} renewals in a row", now_s)
    return view


def _local_disk_fine(view: LeaseView, event: LocalDiskFine, now_s: float) -> LeaseView:
    return change(view, disk_failures=0) if view.disk_failures else view


def _warmed(view: LeaseView, event: Warmed, now_s: float) -> LeaseView:
    if view.phase is not Phase.WARMING or view.held is None or not event.epoch == view.held.epoch == view.work_epoch:
        return view
    return change(move(view, Phase.LEADING), warm_until_s=FOREVER, beat_s=now_s, gave_up="")


def _warm_progress(view: LeaseView, event: WarmProgress, now_s: float) -> LeaseView:
    if view.phase is not Phase.WARMING or view.held is None or event.epoch != view.held.epoch:
        return view
    return change(view, warm_until_s=now_s + WARM_BUDGET_S)


def _warm_failed(view: LeaseView, event: WarmFailed, now_s: float) -> LeaseView:
    if view.phase is not Phase.WARMING or view.held is None or event.epoch != view.held.epoch:
        return view
    if event.met >= view.held.epoch:
        return _met(change(view, warm_until_s=FOREVER), MetEpoch(event.met), now_s)
    return give_up(view, event.reason, now_s)


def _beat(view: LeaseView, event: Beat, now_s: float) -> LeaseView:
    return change(view, beat_s=now_s)


def _met(view: LeaseView, event: MetEpoch, now_s: float) -> LeaseView:
    if event.epoch > MET_EPOCH_MAX:
        return view
    if event.epoch > view.floor:
        # Somebody took the lease and led, whether or not the store shows it (the record was deleted or put back by hand): what a
        # candidate took for silence was none.
        view = change(view, floor=event.epoch, silent_since_s=None, lower=None, chance=None)
    if view.phase in HOLDS and view.held is not None and view.rules.must_rise(event.epoch, view.held.epoch):
        # No longer ours: fenced by what the read shows. Still ours: acquired again on top (rule 5).
        return _read_now(change(view, above=True), ReadNow(), now_s)
    return view


def _read_now(view: LeaseView, event: ReadNow, now_s: float) -> LeaseView:
    return change(view, read_due=True, next_s=min(view.next_s, now_s) if not view.failures else view.next_s)


def _publish(view: LeaseView, event: Publish, now_s: float) -> LeaseView:
    return change(view, desk=event.desk, renew_at_s=min(view.renew_at_s, now_s))


def _peer_view(view: LeaseView, event: PeerView, now_s: float) -> LeaseView:
    hears_less = event.healthy_peers > 0 and view.rules.deaf(event.heard, event.peer_heard)
    unbroken = view.deaf_since_s is not None and now_s - view.peers_s <= PEER_VIEW_AGE_S_MAX
    since_s = (view.deaf_since_s if unbroken else now_s) if hears_less else None
    view = change(view, peers=event, peers_s=now_s, deaf_since_s=since_s)
    if view.phase is Phase.LEADING and since_s is not None and now_s - since_s >= DEAF_S:
        return give_up(view, f"hears {event.heard} nodes where another control plane hears {event.peer_heard}", now_s)
    return view


def _step_down(view: LeaseView, event: StepDown, now_s: float) -> LeaseView:
    if view.leaving:
        return view
    view = change(view, leaving=True)
    if view.phase in HOLDS:
        return step_aside(view, now_s)
    if view.phase is Phase.ACQUIRING or view.doubt or isinstance(view.in_flight, Attempt):
        # Whether it takes the lease is not known yet; if it does, it is given back.
        return change(view, release_until_s=now_s + RELEASE_DEADLINE_S, chance=None)
    if view.phase is Phase.FOLLOW:
        return change(move(view, Phase.LEFT), chance=None)
    return view


def _hand_over(view: LeaseView, event: HandOver, now_s: float) -> LeaseView:
    if event.anew and view.phase in HOLDS:
        return _read_now(change(view, above=True), ReadNow(), now_s)
    return step_aside(view, now_s) if view.phase in HOLDS else view


def _stand_back(view: LeaseView, event: StandBack, now_s: float) -> LeaseView:
    return change(view, back_until_s=now_s + event.for_s)


def _barred(view: LeaseView, event: Barred, now_s: float) -> LeaseView:
    if event.why == view.barred:
        return view
    view = change(view, barred=event.why)
    if view.held is not None or not event.why:
        return view
    return change(view, chance=None, trouble=event.why)


def _work_ended(view: LeaseView, event: WorkEnded, now_s: float) -> LeaseView:
    if view.work is not Work.ENDING:
        return view
    view = change(view, work=Work.NONE, release_until_s=now_s + RELEASE_DEADLINE_S, next_s=min(view.next_s, now_s))
    if view.phase is Phase.STEPPING_DOWN and not event.clean:
        # Nothing is released, the lock least of all, while something may still run under it: it expires instead.
        return gone(change(view, lock=""), now_s)
    return view


def _reborn(view: LeaseView, event: Reborn, now_s: float) -> LeaseView:
    if view.phase is not Phase.FENCED:
        return view
    view = gone(view, now_s)
    return change(view, me=attrs.evolve(view.me, owner=event.owner), next_s=now_s)


_STEPS: Final[dict[type, Callable[..., LeaseView]]] = {
    Answered: _answered,
    Done: _done,
    Unknown: _unknown,
    LockAnswered: _lock_answered,
    EpochStored: _epoch_stored,
    EpochNotStored: _epoch_not_stored,
    LocalDiskFailed: _local_disk_failed,
    LocalDiskFine: _local_disk_fine,
    Warmed: _warmed,
    WarmProgress: _warm_progress,
    WarmFailed: _warm_failed,
    Beat: _beat,
    MetEpoch: _met,
    ReadNow: _read_now,
    Publish: _publish,
    PeerView: _peer_view,
    StepDown: _step_down,
    HandOver: _hand_over,
    StandBack: _stand_back,
    Barred: _barred,
    WorkEnded: _work_ended,
    Reborn: _reborn,
}
