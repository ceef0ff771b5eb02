"""What a control plane knows of the lease, what its claim is worth, and the moves that digesting and deciding both make. Pure."""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING, Any, Final

import attrs

from llmgw.domain.errors import Broken
from llmgw.domain.ids import ClusterId, OwnerId
from llmgw.domain.lease import LeaseRole, Power
from llmgw.lease.record import Attempt, LeaseRecord
from llmgw.lease.rules import RULES, Rules
from llmgw.lease.timings import LeaseTimings

WARM_BUDGET_S: Final = 10.0  # getting ready to lead, progress apart; then somebody else may try (R-D.3)
RELEASE_DEADLINE_S: Final = 3.0  # a store that does not answer must not hold up a process that leaves (control.md 2)
PEER_VIEW_AGE_S_MAX: Final = 10.0  # an older comparison says nothing about now; peers are compared every second or two
FOREVER: Final = math.inf


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
    change = attrs.evolve
else:

    def change(view: LeaseView, **changes: Any) -> LeaseView:
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


def may_prove(view: LeaseView) -> bool:
    """Can a read show that the lease is ours? Also while what was done under it ends."""
    return view.phase in HOLDS or (view.phase is Phase.STEPPING_DOWN and view.work is not Work.NONE)


def peers_fit(view: LeaseView, now_s: float) -> bool:
    return view.peers.healthy_peers > 0 and now_s - view.peers_s <= PEER_VIEW_AGE_S_MAX


def move(view: LeaseView, to: Phase) -> LeaseView:
    if to not in MOVES[view.phase]:
        raise Broken(f"the lease cannot go from {view.phase.value} to {to.value}")
    return change(view, phase=to)


def gone(view: LeaseView, now_s: float) -> LeaseView:
    """The lease is let go of, or given up."""
    view = change(
        view, held=None, valid_until_s=-FOREVER, doubt=(), chance=None, above=False, lower=None, stored=True, storing=False,
        release_until_s=FOREVER, silent_since_s=None, read_due=True, next_s=now_s + view.timings.poll_s, warm_until_s=FOREVER,
        desk=Desk(), work=Work.NONE,
    )  # fmt: skip
    return move(view, Phase.LEFT if view.leaving else Phase.FOLLOW)


def give_up(view: LeaseView, why: str, now_s: float) -> LeaseView:
    """Release and stay, and let somebody else try."""
    return change(step_aside(view, now_s), gave_up=why)


def step_aside(view: LeaseView, now_s: float) -> LeaseView:
    view = change(view, yield_until_s=now_s + 2 * view.timings.ttl_s, deaf_since_s=None, above=False, chance=None)
    if view.phase in HOLDS:
        ending = change(move(view, Phase.STEPPING_DOWN), warm_until_s=FOREVER)
        return ending if view.work is Work.RUNS else change(ending, release_until_s=now_s + RELEASE_DEADLINE_S)
    return view
