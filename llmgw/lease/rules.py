"""Who may lead: the lease's state machine as pure functions (control.md 2.1). No clock, no I/O, no randomness.

`step(view, event, now_s)` digests what happened, `decide(view, now_s, draw)` says what to do next and `role(view, now_s)`
what the claim is at this instant. `now_s` is the caller's own CLOCK_BOOTTIME; events may come at any time, also while a
request is in flight. Of requests there is never more than one in flight.

How to read it, with the common way through it:
- *Rules*: each rule that protects an invariant, a function of its own, held in `Rules`. A test that replaces one shows that it
  matters. The numbers are those of control.md 2.1.
- *What the rules know*: `Phase` with its legal moves, and `LeaseView`.
- *What happened* (events, digested by `step`) and *what to do next* (actions, given by `decide`).
- A candidate (FOLLOW) reads every `poll_s`. What an answer shows may be a `Chance`: the lease may be taken from exactly that
  record. The chance becomes a write (ACQUIRING); an answer that gives none takes the chance away again.
- A write is an `Attempt`. Without an answer it is in `doubt` until the record is read: its write id there means it had succeeded.
- Who won is WARMING: epoch to disk (StoreEpoch), then the hooks (StartWork, Warmed), then LEADING; renewed from the first moment.
- LEADING is CONFIRMED until `valid_until_s` and UNCONFIRMED after it; no event is needed for that.
- Whoever lets go (STEPPING_DOWN) ends the work, then releases; who is deposed (FENCED) ends the work, then draws a new owner id.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import attrs

from llmgw.domain.errors import Broken
from llmgw.domain.ids import ClusterId, OwnerId
from llmgw.domain.lease import LeaseRole, Power
from llmgw.lease.record import LeaseRecord, RecordState
from llmgw.lease.timings import POLL_JITTER, LeaseTimings

WARM_BUDGET_S: Final = 10.0  # getting ready to lead, progress apart; then somebody else may try (R-D.3)
RELEASE_DEADLINE_S: Final = 3.0  # a store that does not answer must not hold up a process that leaves (control.md 2)
DEAF_S: Final = 60.0  # a leader that hears fewer nodes than a peer for this long hands over (control.md 2.1, rule 8)
PEER_VIEW_AGE_S_MAX: Final = 10.0  # an older comparison says nothing about now; peers are compared every second or two
DISK_FAILURES: Final = 3  # renewals in a row at which the local disk refused (rule 7)
LOWER_READS: Final = 3  # reads of one older record before a store counts as rolled back; one may come from a lagging copy (R-D.3.12)
MET_EPOCH_MAX: Final = 10**15  # nobody gets there by leading; a file with junk in it does, and epochs above it could not be kept
DOUBTS_MAX: Final = 64  # attempts of unknown outcome remembered; a late write older than a minute of retries is a stranger's
UNTAKEN_S: Final = 3.0  # chosen: a standby that was told takes a released lease within 0.2 s, one that was not within its poll of 1 s
FOREVER: Final = math.inf


# --- the rules that decide safety, one function each


def holder_valid_until_s(timings: LeaseTimings, sent_s: float, received_s: float, ttl_s: float) -> float:
    """A holder counts from before it sent the write that succeeded (rule 2)."""
    return sent_s + timings.valid_s(ttl_s)


def silence_from_s(sent_s: float, received_s: float) -> float:
    """A candidate counts from after it received the record that it saw change (rule 2)."""
    return received_s


def wait_for_s(timings: LeaseTimings, record: LeaseRecord | None) -> float:
    """How long nothing may change before the lease is taken. The record's own ttl judges it (rule 2)."""
    return timings.wait_s(timings.ttl_s if record is None else record.ttl_s)


def silence_after_failure(since_s: float | None) -> float | None:
    """Silence counts over an unbroken run of answers only: a blip that hits all alike deposes nobody (rule 2)."""
    return None


def next_epoch(record: LeaseRecord | None, floor: int) -> int:
    """Above the record, this machine's epoch file and whatever agents and routers have met (rule 3)."""
    return 1 + max(0 if record is None else record.epoch, floor)


def own_attempt(record: LeaseRecord, doubt: tuple[Attempt, ...]) -> Attempt | None:
    """The attempt of unknown outcome that wrote this record: it had succeeded, and counts from when it was sent (rule 4)."""
    for attempt in doubt:
        if attempt.new.write_id == record.write_id:
            return attempt
    return None


def deposed_by(record: LeaseRecord, held: LeaseRecord) -> bool:
    """Only proof deposes (rule 4). Somebody who writes under our very tenure is a clone of this process, or its executor."""
    if record.deposes(held):
        return True
    return record.epoch == held.epoch and record.seq >= held.seq and record.write_id != held.write_id


def fenced_after_failures(failures: int) -> bool:
    """A store that cannot be reached is not evidence that somebody else leads, however often it is asked (rule 4)."""
    return False


def release_of(held: LeaseRecord, write_id: str) -> LeaseRecord:
    """A release writes, and keeps the epoch (rule 1)."""
    return attrs.evolve(held, seq=held.seq + 1, write_id=write_id, state=RecordState.RELEASED)


def works(now_s: float, beat_s: float, ttl_s: float) -> bool:
    """Renewal is skipped when the work has not beaten for a ttl, so that a wedged leader loses office (rule 6)."""
    return now_s - beat_s <= ttl_s


def dead_holder(record: LeaseRecord) -> str | None:
    """The name that a free lock must carry before it proves that this holder is dead (rule 9).

    A lock that carries another name was never this holder's: it may lead without, while a frozen predecessor keeps the lock.
    """
    return lock_name(record.owner, record.tenure)


def must_rise(met: int, held: int) -> bool:
    """An epoch as high as ours was met, of somebody else: nobody obeys us before ours is above it (rule 5)."""
    return met >= held


def disk_gives_up(failures: int, peers_fit: bool) -> bool:
    """The local disk refused renewals in a row: hand over if somebody is there who can do better, else go on (rule 7)."""
    return failures >= DISK_FAILURES and peers_fit


def deaf(heard: int, peer_heard: int) -> bool:
    """Does a peer hear more than twice the nodes that this leader hears (rule 8)?"""
    return heard * 2 < peer_heard


def released_is_free(now_s: float, yield_until_s: float) -> bool:
    """Anybody takes a released record at once, but whoever handed over or stands back lets the others go first (control.md 2)."""
    return now_s >= yield_until_s


def untaken(silence_s: float) -> bool:
    """A released record that nobody took is taken by whoever lets others go first, too: with no leader at all, nothing heals."""
    return silence_s >= UNTAKEN_S


def last_run(me_boot_id: str, record_boot_id: str) -> bool:
    """Did the holder die with an earlier run of this machine? Not where the kernel tells no boot id."""
    return bool(me_boot_id and record_boot_id) and me_boot_id != record_boot_id


@attrs.frozen
class Rules:
    """What protects an invariant, a field each. Nothing but a test replaces one."""

    holder_valid_until_s: Callable[[LeaseTimings, float, float, float], float] = holder_valid_until_s
    silence_from_s: Callable[[float, float], float] = silence_from_s
    wait_for_s: Callable[[LeaseTimings, LeaseRecord | None], float] = wait_for_s
    silence_after_failure: Callable[[float | None], float | None] = silence_after_failure
    next_epoch: Callable[[LeaseRecord | None, int], int] = next_epoch
    own_attempt: Callable[[LeaseRecord, tuple[Attempt, ...]], Attempt | None] = own_attempt
    deposed_by: Callable[[LeaseRecord, LeaseRecord], bool] = deposed_by
    fenced_after_failures: Callable[[int], bool] = fenced_after_failures
    release_of: Callable[[LeaseRecord, str], LeaseRecord] = release_of
    works: Callable[[float, float, float], bool] = works
    dead_holder: Callable[[LeaseRecord], str | None] = dead_holder
    must_rise: Callable[[int, int], bool] = must_rise
    disk_gives_up: Callable[[int, bool], bool] = disk_gives_up
    deaf: Callable[[int, int], bool] = deaf
    released_is_free: Callable[[float, float], bool] = released_is_free
    untaken: Callable[[float], bool] = untaken
    last_run: Callable[[str, str], bool] = last_run


RULES: Final = Rules()


# --- what the rules know


class Phase(enum.Enum):
    """What this control plane is doing about the lease. LEADING is CONFIRMED or UNCONFIRMED by the clock alone."""

    FOLLOW = "follow"
    ACQUIRING = "acquiring"
    WARMING = "warming"
    LEADING = "leading"
    STEPPING_DOWN = "stepping_down"
    FENCED = "fenced"
    LEFT = "left"  # stepped down for good: nothing more is read or written


MOVES: Final = {
    Phase.FOLLOW: {Phase.ACQUIRING, Phase.WARMING, Phase.STEPPING_DOWN, Phase.LEFT},  # WARMING: its late write took the lease
    Phase.ACQUIRING: {Phase.FOLLOW, Phase.WARMING, Phase.STEPPING_DOWN, Phase.LEFT},
    Phase.WARMING: {Phase.WARMING, Phase.LEADING, Phase.STEPPING_DOWN, Phase.FENCED},
    Phase.LEADING: {Phase.WARMING, Phase.STEPPING_DOWN, Phase.FENCED},  # WARMING: acquired again, above a higher epoch met
    Phase.STEPPING_DOWN: {Phase.FOLLOW, Phase.FENCED, Phase.LEFT},
    Phase.FENCED: {Phase.FOLLOW, Phase.LEFT},
    Phase.LEFT: set(),
}
HOLDS: Final = frozenset({Phase.WARMING, Phase.LEADING})  # the record is kept alive


class Work(enum.Enum):
    """The work done under the lease, which the rules start and end and others do."""

    NONE = "none"
    RUNS = "runs"
    ENDING = "ending"


@attrs.frozen
class Candidate:
    """Who competes. `cluster_id` "" takes whatever cluster the record is of, and makes no first record.

    `store_is_new`: the store has no cluster's data, so that a missing record was never written.
    """

    cluster_id: ClusterId
    owner: OwnerId
    boot_id: str
    addr: str = ""
    build: str = ""
    schema: int = 0
    one_machine: bool = False  # all candidates are processes of this machine: the holder's lock and boot id are proof
    store_is_new: bool = False


@attrs.frozen
class Attempt:
    """A write that was sent, and whose outcome may not be known."""

    expected: LeaseRecord | None
    new: LeaseRecord
    sent_s: float


@attrs.frozen
class Reading:
    sent_s: float


@attrs.frozen
class Locking:
    name: str


@attrs.frozen
class Chance:
    """The lease may be taken from `expected`: by right, or (`by_lock`) if its holder's lock turns out to be free."""

    expected: LeaseRecord | None
    tenure: str = ""  # drawn once the lock was asked for
    by_lock: bool = False


@attrs.frozen
class Lower:
    """Reads in a row that showed one record older than one seen before."""

    record: LeaseRecord | None
    since_s: float
    reads: int = 1


@attrs.frozen
class PeerView:
    """An event: what this control plane and the best of its healthy peers hear of the nodes."""

    heard: int = 0
    peer_heard: int = 0
    healthy_peers: int = 0


@attrs.frozen
class Desk:
    """What the holder wants the record to say beside who it is; written with the next renewal, at once when it changes."""

    base: str = ""
    settings_version: int = 0


@attrs.frozen(slots=False)
class LeaseView:
    """Everything that the rules know. Times are the caller's `now_s`."""

    me: Candidate
    timings: LeaseTimings
    rules: Rules = RULES
    phase: Phase = Phase.FOLLOW
    # The newest record that the store has shown, since when it stands unchanged over answers in a row, and the last answer.
    seen: LeaseRecord | None = None
    silent_since_s: float | None = None
    answered_s: float = -FOREVER
    lower: Lower | None = None
    # What this process holds, if it holds, and until when that is proven.
    held: LeaseRecord | None = None
    valid_until_s: float = -FOREVER
    renew_at_s: float = 0.0
    doubt: tuple[Attempt, ...] = ()
    in_flight: Attempt | Reading | Locking | None = None
    next_s: float = 0.0  # no request before
    read_due: bool = True  # nothing is written before the next answer
    failures: int = 0  # requests in a row without an answer
    floor: int = 0  # the highest epoch of the local file, of any record seen, and that anybody has met
    above: bool = False  # acquire again on top of our own record
    chance: Chance | None = None
    lock: str = ""  # the name under which this process has the holder's lock
    lock_asked: bool = False  # since the last renewal
    # Until then a released record is left to others: by one that handed over, until somebody has taken it, and by one that was told
    # to stand back, also when a first one has taken it and released it again.
    yield_until_s: float = -FOREVER
    back_until_s: float = -FOREVER
    work: Work = Work.NONE
    work_epoch: int = 0  # the epoch under which it was last started
    stored: bool = True  # the epoch held is on the local disk
    storing: bool = False
    warm_until_s: float = FOREVER
    beat_s: float = -FOREVER
    desk: Desk = Desk()
    disk_failures: int = 0
    peers: PeerView = PeerView()
    peers_s: float = -FOREVER
    deaf_since_s: float | None = None
    leaving: bool = False  # step down was asked: never again in this process
    release_until_s: float = FOREVER
    barred: str = ""  # for people: why it may not lead whatever the record says, as of a control plane that was removed
    trouble: str = ""  # for people: why this one does not compete
    gave_up: str = ""  # for people: why it last let go of the lease by itself


FIELDS: Final = len(attrs.fields(LeaseView))

if TYPE_CHECKING:
    from attrs import evolve as _change
else:

    def _change(view: LeaseView, **changes: Any) -> LeaseView:
        """attrs.evolve for this one class, 15 times as fast: it is what very many schedules of the simulator spend their time on."""
        new = object.__new__(LeaseView)
        fields = view.__dict__ | changes
        assert len(fields) == FIELDS, "a field that a view does not have"
        object.__setattr__(new, "__dict__", fields)
        return new


def first_view(me: Candidate, timings: LeaseTimings, *, floor: int = 0, now_s: float, rules: Rules = RULES) -> LeaseView:
    """A process that has just started. `floor` is the highest epoch that its disk, or its store, has met."""
    return LeaseView(me, timings, rules, floor=floor, next_s=now_s)


def role(view: LeaseView, now_s: float) -> LeaseRole:
    """What the claim is at this instant; asked at each use, never kept."""
    if view.phase is Phase.LEADING:
        return LeaseRole.CONFIRMED if now_s < view.valid_until_s else LeaseRole.UNCONFIRMED
    return LeaseRole.FOLLOW if view.phase is Phase.LEFT else LeaseRole(view.phase.value)


def power(view: LeaseView, now_s: float) -> Power | None:
    """What a leader may do now; None for everybody else."""
    if view.phase is not Phase.LEADING:
        return None
    return Power.CONFIRMED if now_s < view.valid_until_s else Power.UNCONFIRMED


def lock_name(owner: OwnerId, tenure: str) -> str:
    return f"{owner} {tenure}"


# --- what happened


@attrs.frozen
class Answered:
    """The store has shown its record (None: there is none), to a read or to a write that it refused.

    `jitter` from 0 to below 1 spreads the next look.
    """

    record: LeaseRecord | None
    jitter: float = 0.5


@attrs.frozen
class Done:
    """The write in flight is in the store."""


@attrs.frozen
class Unknown:
    """The request in flight got no answer: 5xx, time-out, DNS, 401, 403. `local_disk`: our own disk refused it."""

    local_disk: bool = False


@attrs.frozen
class LockAnswered:
    taken: bool


@attrs.frozen
class EpochStored:
    """The epoch in force, and who holds it, are on the local disk."""


@attrs.frozen
class EpochNotStored:
    """The local disk did not take it."""


@attrs.frozen
class LocalDiskFailed:
    """The local disk refused the small write that goes with a renewal."""


@attrs.frozen
class LocalDiskFine:
    pass


@attrs.frozen
class Warmed:
    """Ready to lead under this epoch: hooks done, store open, first durable sync through."""

    epoch: int


@attrs.frozen
class WarmProgress:
    """Getting ready takes long and comes forward: a large restore."""

    epoch: int


@attrs.frozen
class WarmFailed:
    """Getting ready failed; `met` above the epoch says that an epoch as high was met, which is no failure of this process."""

    epoch: int
    reason: str
    met: int = 0


@attrs.frozen
class Beat:
    """The work loop came round."""


@attrs.frozen
class MetEpoch:
    """An agent, a router or the store has met this epoch, of somebody else when it is ours."""

    epoch: int


@attrs.frozen
class ReadNow:
    """Somebody wants to see the record again."""


@attrs.frozen
class Publish:
    desk: Desk


@attrs.frozen
class StepDown:
    """Leave for good."""


@attrs.frozen
class HandOver:
    """Release and stay. `anew`: nobody is there to hand over to, take a new epoch."""

    anew: bool = False


@attrs.frozen
class StandBack:
    """Leave a released lease to others for `for_s`; one that nobody takes for UNTAKEN_S, or that expires, is taken all the same."""

    for_s: float


@attrs.frozen
class Barred:
    """This control plane may not lead, for a reason beside the lease; "" lifts it. A term that has begun is not ended by it."""

    why: str


@attrs.frozen
class WorkEnded:
    """What was done under the lease has ended; `clean` False: it has not within its time, so nothing may be released."""

    clean: bool = True


@attrs.frozen
class Reborn:
    """A fresh owner id, drawn after a fence."""

    owner: OwnerId


Event = (
    Answered | Done | Unknown | LockAnswered
    | EpochStored | EpochNotStored | LocalDiskFailed | LocalDiskFine
    | Warmed | WarmProgress | WarmFailed | WorkEnded
    | Beat | MetEpoch | ReadNow | Publish | PeerView | StepDown | HandOver | StandBack | Barred | Reborn
)  # fmt: skip


# --- what to do next


@attrs.frozen
class Draw:
    """Randomness for one decision: ids of RANDOM_BYTES each as hex."""

    write_id: str
    tenure: str


@attrs.frozen
class Wait:
    """Nothing before `until_s`, unless something happens."""

    until_s: float


@attrs.frozen
class Read:
    """Answered or Unknown follows."""


@attrs.frozen
class Replace:
    """Compare-and-set. Done, Answered (refused: what stands there instead) or Unknown follows."""

    attempt: Attempt


@attrs.frozen
class TakeLock:
    """Take the holder's lock if it is free and, with `if_named`, still carries that name. LockAnswered follows."""

    name: str
    if_named: str | None


@attrs.frozen
class LetGoLock:
    pass


@attrs.frozen
class StoreEpoch:
    """Write down the epoch and owner of this record, and sync. EpochStored or EpochNotStored follows."""

    record: LeaseRecord


@attrs.frozen
class StartWork:
    """Get ready to lead under this record; what ran under an earlier epoch is replaced. Warmed or WarmFailed follows."""

    record: LeaseRecord


@attrs.frozen
class EndWork:
    """End what is done under this record, and whatever it started. WorkEnded follows; after `fenced` it is no use to be slow."""

    record: LeaseRecord
    fenced: bool


@attrs.frozen
class DrawOwner:
    """Reborn follows."""


@attrs.frozen
class Stop:
    """Left, and nothing is held."""


Action = Wait | Read | Replace | TakeLock | LetGoLock | StoreEpoch | StartWork | EndWork | DrawOwner | Stop


# --- digesting


def step(view: LeaseView, event: Event, now_s: float) -> LeaseView:
    """The view after `event`. Any event may come in any phase; one that is out of date changes nothing."""
    return _STEPS[type(event)](view, event, now_s)


def _answered(view: LeaseView, event: Answered, now_s: float) -> LeaseView:
    flight = view.in_flight
    if view.phase is Phase.LEFT:
        return _change(view, in_flight=None)
    assert isinstance(flight, Attempt | Reading), "an answer belongs to a request"
    doubt = (*view.doubt, flight) if isinstance(flight, Attempt) else view.doubt
    poll_s = view.timings.poll_s * (1 + POLL_JITTER * (2 * event.jitter - 1))
    view = _change(view, in_flight=None, doubt=doubt, failures=0, next_s=now_s + poll_s)
    record = event.record
    if record is not None and view.me.cluster_id not in ("", record.cluster_id):
        # Nothing is proven and nothing deleted: somebody has mixed up two clusters' stores.
        why = f"the lease is of cluster {record.cluster_id}, this is {view.me.cluster_id}"
        return _quiet(_change(view, silent_since_s=None, trouble=why, read_due=True), now_s)
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
        return _change(view, lower=None, seen=record, next_s=now_s)  # still ours; what is due may be sent at once
    # Absent, or older than ours: deleted or rolled back by hand, or a copy that lags. It proves nothing. Once it stood still as
    # long as any holder could be trusted (or while our own right is proven, so that nobody else can have one), take it anew.
    view = _count_lower(view, record, sent_s, now_s)
    assert view.lower is not None
    proven = now_s < view.valid_until_s and record is None
    if view.phase in HOLDS and (proven or _stands(view, view.lower, now_s)):
        return _change(view, chance=Chance(record), next_s=now_s)
    return _change(view, read_due=True, next_s=now_s + view.timings.retry_s)


def _seen_by_candidate(view: LeaseView, record: LeaseRecord | None, sent_s: float, now_s: float) -> LeaseView:
    """What stands in the store, to one who does not hold the lease."""
    seen = view.seen
    if seen is not None and (record is None or record.order < seen.order):
        view = _count_lower(view, record, sent_s, now_s)
        assert view.lower is not None
        if not _stands(view, view.lower, now_s):
            return _quiet(_change(view, answered_s=now_s), now_s)
        # Deleted: nothing stood there for as long as any holder can be trusted. Rolled back: judged like any other, and a full
        # wait from now, so that the holder, who needs one wait to believe it, goes first.
        since_s = view.lower.since_s if record is None else None
        view = _change(view, seen=record, silent_since_s=since_s, lower=None, doubt=())
    else:
        gone = record is not None and (seen is None or record.write_id != seen.write_id)
        # What stood there was replaced: no write that expected it can still succeed.
        view = _change(view, lower=None, doubt=() if gone and view.doubt else view.doubt)
    anew = (
        view.silent_since_s is None
        or now_s - view.answered_s > view.timings.read_gap_s
        or (record is None) != (view.seen is None)
        or (record is not None and view.seen is not None and record.write_id != view.seen.write_id)
    )
    # Somebody has taken what we handed over, so a later release is open to us again. Who gave up goes on waiting: two that are
    # not fit to lead must not take turns.
    taken = record is not None and record.owner != view.me.owner and not view.gave_up
    view = _change(
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
        return _change(view, trouble=view.barred)
    if record is not None and record.schema > view.me.schema:
        # An older build may follow, and must not lead over what a newer one has written.
        return _change(view, trouble=f"the lease's holder wrote schema {record.schema}, this build knows {view.me.schema}")
    assert view.silent_since_s is not None
    silent = now_s - view.silent_since_s >= view.rules.wait_for_s(view.timings, record)
    if record is None:
        if view.me.cluster_id and (silent or (view.me.store_is_new and view.floor == 0)):
            return _change(view, chance=Chance(None))
        return view
    rebooted = view.me.one_machine and view.rules.last_run(view.me.boot_id, record.boot_id)
    left = record.released and not view.gave_up and view.rules.untaken(now_s - view.silent_since_s)
    yield_until_s = max(view.yield_until_s, view.back_until_s)
    if silent or rebooted or left or (record.released and view.rules.released_is_free(now_s, yield_until_s)):
        return _change(view, chance=Chance(record))
    if view.me.one_machine and not record.released:
        return _change(view, chance=Chance(record, by_lock=True))
    return view


def _count_lower(view: LeaseView, record: LeaseRecord | None, sent_s: float, now_s: float) -> LeaseView:
    lower = view.lower
    same = lower is not None and (record.write_id if record else "") == (lower.record.write_id if lower.record else "")
    if lower is None or not same:
        return _change(view, lower=Lower(record, view.rules.silence_from_s(sent_s, now_s)))
    return _change(view, lower=attrs.evolve(lower, reads=lower.reads + 1))


def _stands(view: LeaseView, lower: Lower, now_s: float) -> bool:
    return lower.reads >= LOWER_READS and now_s - lower.since_s >= view.rules.wait_for_s(view.timings, lower.record)


def _quiet(view: LeaseView, now_s: float) -> LeaseView:
    """A request's outcome is known and it brought nothing: back to where one waits."""
    if view.phase is Phase.ACQUIRING:
        return _move(view, Phase.FOLLOW)
    if view.phase is Phase.STEPPING_DOWN:
        return _change(view, next_s=now_s + view.timings.retry_s, read_due=True)
    return view


def _done(view: LeaseView, event: Done, now_s: float) -> LeaseView:
    attempt = view.in_flight
    assert isinstance(attempt, Attempt), "only a write is done"
    if view.phase is Phase.LEFT:
        return _change(view, in_flight=None)  # nobody leads by it: it expires
    return _won(_change(view, in_flight=None, failures=0), attempt, now_s)


def _won(view: LeaseView, attempt: Attempt, now_s: float) -> LeaseView:
    """Our write is what stands in the store."""
    new = attempt.new
    met = view.floor >= new.epoch  # reported while this was on its way
    view = _change(view, seen=new, lower=None, doubt=(), floor=max(view.floor, new.epoch), trouble="")
    if new.released:
        return _gone(view, now_s)
    until_s = view.rules.holder_valid_until_s(view.timings, attempt.sent_s, now_s, new.ttl_s)
    renew_at_s = max(now_s, attempt.sent_s + view.timings.renew_s)
    held = view.held
    if held is not None and held.epoch == new.epoch and held.tenure == new.tenure:
        until_s = max(until_s, view.valid_until_s)
        return _change(view, held=new, valid_until_s=until_s, renew_at_s=renew_at_s, next_s=now_s, lock_asked=False)
    me = attrs.evolve(view.me, store_is_new=False, cluster_id=new.cluster_id)
    view = _change(
        view, held=new, valid_until_s=until_s, renew_at_s=renew_at_s, next_s=now_s, above=met, chance=None, stored=False, storing=False,
        lock_asked=False, disk_failures=0, deaf_since_s=None, me=me,
    )  # fmt: skip
    if view.leaving or view.phase is Phase.STEPPING_DOWN:
        # It was asked to leave while this was on its way: given back, before anything was done under it.
        if view.phase is not Phase.STEPPING_DOWN:
            view = _move(view, Phase.STEPPING_DOWN)
        return _change(view, release_until_s=min(view.release_until_s, now_s + RELEASE_DEADLINE_S))
    return _change(_move(view, Phase.WARMING), warm_until_s=now_s + WARM_BUDGET_S, read_due=view.read_due or met)


def _unknown(view: LeaseView, event: Unknown, now_s: float) -> LeaseView:
    flight = view.in_flight
    assert isinstance(flight, Attempt | Reading), "what failed is a request"
    if view.phase is Phase.LEFT:
        return _change(view, in_flight=None)
    failures = view.failures + 1
    writes = isinstance(flight, Attempt)
    doubt = (*view.doubt, flight)[-DOUBTS_MAX:] if isinstance(flight, Attempt) else view.doubt
    view = _change(
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
    view = _change(
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
        return _gone(view, now_s)
    return view if view.phase is Phase.FENCED else _move(view, Phase.FENCED)


def _gone(view: LeaseView, now_s: float) -> LeaseView:
    """The lease is let go of, or given up."""
    view = _change(
        view, held=None, valid_until_s=-FOREVER, doubt=(), chance=None, above=False, lower=None, stored=True, storing=False,
        release_until_s=FOREVER, silent_since_s=None, read_due=True, next_s=now_s + view.timings.poll_s, warm_until_s=FOREVER,
        desk=Desk(), work=Work.NONE,
    )  # fmt: skip
    return _move(view, Phase.LEFT if view.leaving else Phase.FOLLOW)


def _move(view: LeaseView, to: Phase) -> LeaseView:
    if to not in MOVES[view.phase]:
        raise Broken(f"the lease cannot go from {view.phase.value} to {to.value}")
    return _change(view, phase=to)


def _lock_answered(view: LeaseView, event: LockAnswered, now_s: float) -> LeaseView:
    flight = view.in_flight
    assert isinstance(flight, Locking), "a lock was asked for"
    view = _change(view, in_flight=None, lock=flight.name if event.taken else view.lock, lock_asked=True)
    if view.chance is not None and view.chance.by_lock and not event.taken:
        return _change(view, chance=None)
    return view


def _epoch_stored(view: LeaseView, event: EpochStored, now_s: float) -> LeaseView:
    return _change(view, stored=True, storing=False, disk_failures=0)


def _epoch_not_stored(view: LeaseView, event: EpochNotStored, now_s: float) -> LeaseView:
    view = _change(view, storing=False)
    if view.phase is Phase.WARMING:
        # An epoch that is not on disk may not be used: a restart here could begin below it.
        return _give_up(view, "the epoch could not be written to the local disk", now_s)
    return view


def _local_disk_failed(view: LeaseView, event: LocalDiskFailed, now_s: float) -> LeaseView:
    view = _change(view, disk_failures=view.disk_failures + 1)
    if view.phase in HOLDS and view.rules.disk_gives_up(view.disk_failures, peers_fit(view, now_s)):
        return _give_up(view, f"the local disk refused {view.disk_failures} renewals in a row", now_s)
    return view


def _local_disk_fine(view: LeaseView, event: LocalDiskFine, now_s: float) -> LeaseView:
    return _change(view, disk_failures=0) if view.disk_failures else view


def _warmed(view: LeaseView, event: Warmed, now_s: float) -> LeaseView:
    if view.phase is not Phase.WARMING or view.held is None or not event.epoch == view.held.epoch == view.work_epoch:
        return view
    return _change(_move(view, Phase.LEADING), warm_until_s=FOREVER, beat_s=now_s, gave_up="")


def _warm_progress(view: LeaseView, event: WarmProgress, now_s: float) -> LeaseView:
    if view.phase is not Phase.WARMING or view.held is None or event.epoch != view.held.epoch:
        return view
    return _change(view, warm_until_s=now_s + WARM_BUDGET_S)


def _warm_failed(view: LeaseView, event: WarmFailed, now_s: float) -> LeaseView:
    if view.phase is not Phase.WARMING or view.held is None or event.epoch != view.held.epoch:
        return view
    if event.met >= view.held.epoch:
        return _met(_change(view, warm_until_s=FOREVER), MetEpoch(event.met), now_s)
    return _give_up(view, event.reason, now_s)


def _beat(view: LeaseView, event: Beat, now_s: float) -> LeaseView:
    return _change(view, beat_s=now_s)


def _met(view: LeaseView, event: MetEpoch, now_s: float) -> LeaseView:
    if event.epoch > MET_EPOCH_MAX:
        return view
    if event.epoch > view.floor:
        # Somebody took the lease and led, whether or not the store shows it (the record was deleted or put back by hand): what a
        # candidate took for silence was none.
        view = _change(view, floor=event.epoch, silent_since_s=None, lower=None, chance=None)
    if view.phase in HOLDS and view.held is not None and view.rules.must_rise(event.epoch, view.held.epoch):
        # No longer ours: fenced by what the read shows. Still ours: acquired again on top (rule 5).
        return _read_now(_change(view, above=True), ReadNow(), now_s)
    return view


def _read_now(view: LeaseView, event: ReadNow, now_s: float) -> LeaseView:
    return _change(view, read_due=True, next_s=min(view.next_s, now_s) if not view.failures else view.next_s)


def _publish(view: LeaseView, event: Publish, now_s: float) -> LeaseView:
    return _change(view, desk=event.desk, renew_at_s=min(view.renew_at_s, now_s))


def _peer_view(view: LeaseView, event: PeerView, now_s: float) -> LeaseView:
    hears_less = event.healthy_peers > 0 and view.rules.deaf(event.heard, event.peer_heard)
    unbroken = view.deaf_since_s is not None and now_s - view.peers_s <= PEER_VIEW_AGE_S_MAX
    since_s = (view.deaf_since_s if unbroken else now_s) if hears_less else None
    view = _change(view, peers=event, peers_s=now_s, deaf_since_s=since_s)
    if view.phase is Phase.LEADING and since_s is not None and now_s - since_s >= DEAF_S:
        return _give_up(view, f"hears {event.heard} nodes where another control plane hears {event.peer_heard}", now_s)
    return view


def may_prove(view: LeaseView) -> bool:
    """Can a read show that the lease is ours? Also while what was done under it ends."""
    return view.phase in HOLDS or (view.phase is Phase.STEPPING_DOWN and view.work is not Work.NONE)


def peers_fit(view: LeaseView, now_s: float) -> bool:
    return view.peers.healthy_peers > 0 and now_s - view.peers_s <= PEER_VIEW_AGE_S_MAX


def _give_up(view: LeaseView, why: str, now_s: float) -> LeaseView:
    """Release and stay, and let somebody else try."""
    return _change(_step_aside(view, now_s), gave_up=why)


def _step_aside(view: LeaseView, now_s: float) -> LeaseView:
    view = _change(view, yield_until_s=now_s + 2 * view.timings.ttl_s, deaf_since_s=None, above=False, chance=None)
    if view.phase in HOLDS:
        ending = _change(_move(view, Phase.STEPPING_DOWN), warm_until_s=FOREVER)
        return ending if view.work is Work.RUNS else _change(ending, release_until_s=now_s + RELEASE_DEADLINE_S)
    return view


def _step_down(view: LeaseView, event: StepDown, now_s: float) -> LeaseView:
    if view.leaving:
        return view
    view = _change(view, leaving=True)
    if view.phase in HOLDS:
        return _step_aside(view, now_s)
    if view.phase is Phase.ACQUIRING or view.doubt or isinstance(view.in_flight, Attempt):
        # Whether it takes the lease is not known yet; if it does, it is given back.
        return _change(view, release_until_s=now_s + RELEASE_DEADLINE_S, chance=None)
    if view.phase is Phase.FOLLOW:
        return _change(_move(view, Phase.LEFT), chance=None)
    return view


def _hand_over(view: LeaseView, event: HandOver, now_s: float) -> LeaseView:
    if event.anew and view.phase in HOLDS:
        return _read_now(_change(view, above=True), ReadNow(), now_s)
    return _step_aside(view, now_s) if view.phase in HOLDS else view


def _stand_back(view: LeaseView, event: StandBack, now_s: float) -> LeaseView:
    return _change(view, back_until_s=now_s + event.for_s)


def _barred(view: LeaseView, event: Barred, now_s: float) -> LeaseView:
    if event.why == view.barred:
        return view
    view = _change(view, barred=event.why)
    if view.held is not None or not event.why:
        return view
    return _change(view, chance=None, trouble=event.why)


def _work_ended(view: LeaseView, event: WorkEnded, now_s: float) -> LeaseView:
    if view.work is not Work.ENDING:
        return view
    view = _change(view, work=Work.NONE, release_until_s=now_s + RELEASE_DEADLINE_S, next_s=min(view.next_s, now_s))
    if view.phase is Phase.STEPPING_DOWN and not event.clean:
        # Nothing is released, the lock least of all, while something may still run under it: it expires instead.
        return _gone(_change(view, lock=""), now_s)
    return view


def _reborn(view: LeaseView, event: Reborn, now_s: float) -> LeaseView:
    if view.phase is not Phase.FENCED:
        return view
    view = _gone(view, now_s)
    return _change(view, me=attrs.evolve(view.me, owner=event.owner), next_s=now_s)


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


# --- deciding


def decide(view: LeaseView, now_s: float, draw: Draw) -> tuple[LeaseView, Action]:
    """The next thing to do, and the view once it has begun. Called again after each event and when a wait is over."""
    if view.phase is Phase.FOLLOW or view.phase is Phase.ACQUIRING:
        return _decide_to_follow(view, now_s, draw)
    if view.phase is Phase.WARMING or view.phase is Phase.LEADING:
        return _decide_to_hold(view, now_s, draw)
    if view.phase is Phase.STEPPING_DOWN:
        return _decide_to_release(view, now_s, draw)
    if view.phase is Phase.FENCED:
        if view.work is Work.RUNS:
            return _end_work(view, fenced=True)
        if view.work is Work.ENDING or view.in_flight is not None:
            return view, Wait(FOREVER)
        return (_gone(view, now_s), Wait(now_s)) if view.leaving else (view, DrawOwner())
    if isinstance(view.in_flight, Locking):
        return view, Wait(FOREVER)
    if view.lock:
        return _change(view, lock=""), LetGoLock()
    return view, Stop()  # a request that hangs is no reason to stay: whatever it brings, nobody here leads by it


def _decide_to_follow(view: LeaseView, now_s: float, draw: Draw) -> tuple[LeaseView, Action]:
    if view.leaving and (now_s >= view.release_until_s or not (view.doubt or view.in_flight)):
        return _move(view, Phase.LEFT), Wait(now_s)
    if view.in_flight is not None:
        return view, Wait(view.release_until_s)
    chance = view.chance
    if chance is not None and not view.read_due and not view.barred:
        tenure = chance.tenure or draw.tenure
        if view.me.one_machine and not chance.tenure:
            # Named before it is written who holds: whoever finds the lock free under this name knows that we are dead.
            name = lock_name(view.me.owner, tenure)
            if_named = view.rules.dead_holder(chance.expected) if chance.by_lock and chance.expected is not None else None
            view = _change(view, chance=Chance(chance.expected, tenure, chance.by_lock), in_flight=Locking(name))
            return view, TakeLock(name, if_named)
        attempt = Attempt(chance.expected, _acquisition(view, chance.expected, tenure, draw.write_id), now_s)
        view = _move(view, Phase.ACQUIRING) if view.phase is Phase.FOLLOW else view
        return _change(view, chance=None, in_flight=attempt), Replace(attempt)
    if view.lock and not view.doubt:
        return _change(view, lock=""), LetGoLock()
    if now_s >= view.next_s:
        return _read(view, now_s)
    return view, Wait(min(view.next_s, view.release_until_s))


def _decide_to_hold(view: LeaseView, now_s: float, draw: Draw) -> tuple[LeaseView, Action]:
    held = view.held
    assert held is not None, "a holder holds"
    if view.phase is Phase.WARMING:
        if not view.stored and not view.storing:
            return _change(view, storing=True), StoreEpoch(held)
        if view.stored and view.work_epoch != held.epoch:
            begun = _change(view, work=Work.RUNS, work_epoch=held.epoch, warm_until_s=now_s + WARM_BUDGET_S)
            return begun, StartWork(held)
        if now_s >= view.warm_until_s:
            return _give_up(view, f"it was not ready to lead after {WARM_BUDGET_S:g} s", now_s), Wait(now_s)
    if view.in_flight is not None:
        return view, Wait(view.warm_until_s)
    if view.read_due:
        return _read(view, now_s) if now_s >= view.next_s else (view, Wait(min(view.next_s, view.warm_until_s)))
    due_s = view.next_s if view.above or view.chance is not None else max(view.next_s, view.renew_at_s)
    if now_s < due_s:
        return view, Wait(min(due_s, view.warm_until_s))
    if view.above or view.chance is not None:
        # On top of what the last answer showed: our own record, or what stands where ours was.
        expected = held if view.chance is None else view.chance.expected
        attempt = Attempt(expected, _acquisition(view, expected, draw.tenure, draw.write_id), now_s)
        return _change(view, chance=None, in_flight=attempt), Replace(attempt)
    if view.phase is Phase.LEADING and not view.rules.works(now_s, view.beat_s, held.ttl_s):
        view, action = _read(view, now_s)  # so that it learns of its successor
        return _change(view, renew_at_s=now_s + view.timings.renew_s), action
    name = lock_name(held.owner, held.tenure)
    if view.me.one_machine and not view.lock_asked:
        # A predecessor that is frozen may have kept it, a candidate had it for a moment, or somebody has deleted its file: tried
        # once at each renewal.
        return _change(view, in_flight=Locking(name)), TakeLock(name, None)
    attempt = Attempt(held, _renewal(view, held, draw.write_id), now_s)
    return _change(view, in_flight=attempt), Replace(attempt)


def _decide_to_release(view: LeaseView, now_s: float, draw: Draw) -> tuple[LeaseView, Action]:
    held = view.held
    assert held is not None, "what is released is held"
    if view.work is Work.RUNS:
        return _end_work(view, fenced=False)
    if view.work is Work.ENDING:
        if view.read_due and view.in_flight is None:  # what is ended may ask for proof, to acknowledge its last writes
            return _read(view, now_s) if now_s >= view.next_s else (view, Wait(view.next_s))
        return view, Wait(FOREVER)
    if now_s >= view.release_until_s and (view.leaving or view.in_flight is None):
        return _gone(view, now_s), Wait(now_s)  # it expires
    if view.in_flight is not None:
        return view, Wait(view.release_until_s if view.leaving else FOREVER)
    if now_s < view.next_s:
        return view, Wait(min(view.next_s, view.release_until_s))
    if view.read_due:
        return _read(view, now_s)
    attempt = Attempt(held, view.rules.release_of(held, draw.write_id), now_s)
    return _change(view, in_flight=attempt), Replace(attempt)


def _end_work(view: LeaseView, *, fenced: bool) -> tuple[LeaseView, Action]:
    assert view.held is not None
    return _change(view, work=Work.ENDING), EndWork(view.held, fenced)


def _read(view: LeaseView, now_s: float) -> tuple[LeaseView, Action]:
    return _change(view, in_flight=Reading(now_s), read_due=False), Read()


def _acquisition(view: LeaseView, expected: LeaseRecord | None, tenure: str, write_id: str) -> LeaseRecord:
    me = view.me
    known = expected or view.held  # a holder whose record was removed knows what it has published
    return LeaseRecord(
        cluster_id=me.cluster_id or (expected.cluster_id if expected is not None else me.cluster_id),
        epoch=view.rules.next_epoch(expected, view.floor),
        owner=me.owner,
        tenure=tenure,
        write_id=write_id,
        boot_id=me.boot_id,
        seq=1 if expected is None else expected.seq + 1,
        ttl_s=view.timings.ttl_s,
        base="" if known is None else known.base,  # until we publish our own, this stays where the next one restores from
        settings_version=0 if known is None else known.settings_version,
        addr=me.addr,
        build=me.build,
        schema=me.schema,
    )


def _renewal(view: LeaseView, held: LeaseRecord, write_id: str) -> LeaseRecord:
    desk = view.desk
    return attrs.evolve(
        held,
        seq=held.seq + 1,
        write_id=write_id,
        ttl_s=view.timings.ttl_s,
        base=desk.base or held.base,
        settings_version=desk.settings_version or held.settings_version,
    )
