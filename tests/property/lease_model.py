"""A seeded simulator of candidates for one lease: the product's own rules, and a world that does its worst to them.

Some thousand schedules a second on one core, because nothing waits: a heap of events, plain calls of `step` and `decide`.
Each process has a clock of its own, which may run fast or slow within the bound that the rules allow for (and, in one kind of
schedule, stand still or leap, as under a hypervisor). The store is one linearizable record; requests and replies take as long
as they like, and what a client gave up on is applied all the same. A suspend is a freeze: the rules' clock goes on in it.

One line replays a schedule:  python -m tests.property.lease_model SEED [KIND] [RULE]
"""

from __future__ import annotations

import heapq
import itertools
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs

from llmgw.domain.ids import ClusterId, OwnerId
from llmgw.lease import actions, events, rules, state
from llmgw.lease.actions import Draw
from llmgw.lease.decide import decide
from llmgw.lease.digest import DEAF_S, step
from llmgw.lease.record import Attempt, LeaseRecord, RecordState
from llmgw.lease.rules import Rules
from llmgw.lease.state import Candidate, LeaseView, Phase
from llmgw.lease.timings import RHO, SIGMA_S, LeaseTimings

ACT_S: Final = 0.9  # from "I am confirmed" until what was sent because of it arrives; below sigma, which allows for it
SPIN_MAX: Final = 200  # decisions in a row without waiting; more is a loop that never ends
NODES_MAX: Final = 3
BEAT_S: Final = 2.0  # between beats of the work, when something else happens anyhow
# A deletion under a first write that is still on its way lets that one in, too: nothing tells it from a rightful one.
FIRST_DELETION_S: Final = 14.0
BLIP_S_MAX: Final = 30.0
HANDOVER_S_MAX: Final = 3.0  # R-D.10: from being told to leave until the next leader is CONFIRMED, where nothing fails
PEER_VIEW_S: Final = 2.0  # between two comparisons of what control planes hear
NODES_HEARD: Final = 10
SETTLE_S: Final = 70.0  # from the last fault until somebody must lead: two waits, the retries and the way between


# --- histories


@attrs.frozen
class Written:
    at_s: float
    record: LeaseRecord


@attrs.frozen
class Claimed:
    """From now until `until_s` (true time) this process calls its lease proven; at_s >= until_s ends it."""

    at_s: float
    process: str
    until_s: float


@attrs.frozen
class Led:
    """Got ready to lead: powers from here on."""

    at_s: float
    owner: str
    epoch: int
    tenure: str


@attrs.frozen
class Fenced:
    at_s: float
    process: str
    tenure: str


@attrs.frozen
class Cut:
    """A leader's machine has lost the store for good."""

    at_s: float
    owner: str


@attrs.frozen
class Told:
    """A leader was told to step down or to hand over."""

    at_s: float
    owner: str


@attrs.frozen
class Ended:
    """The end of the schedule: how many lead, whether one of them is confirmed and fit to, and whether one must (`due`)."""

    at_s: float
    leaders: int
    led: bool
    due: bool
    disturbed: bool  # a process was slow, cut off, killed or told to go; else only the store as a whole was silent
    faults: int  # that were injected, requests that failed or came late among them


Entry = Written | Claimed | Led | Fenced | Cut | Told | Ended
History = list[Entry]


# --- invariants: each a predicate over a history, None where it holds


def epoch_unique(history: History) -> str | None:
    epochs: dict[int, str] = {}
    for entry in history:
        if type(entry) is Written:
            record = entry.record
            if epochs.setdefault(record.epoch, record.tenure) != record.tenure:
                return f"epoch {record.epoch} was acquired twice"
    return None


def led_epoch_unique(history: History) -> str | None:
    """Also where the record was deleted or rolled back by hand: agents have met every epoch that anybody led under."""
    epochs: dict[int, str] = {}
    for entry in history:
        if type(entry) is Led and epochs.setdefault(entry.epoch, entry.tenure) != entry.tenure:
            return f"two led under epoch {entry.epoch}"
    return None


def epoch_monotone_store(history: History) -> str | None:
    before: LeaseRecord | None = None
    for entry in history:
        if type(entry) is Written:
            record = entry.record
            if before is not None and (record.epoch < before.epoch or record.seq != before.seq + 1):
                return f"{record.epoch}.{record.seq} was written after {before.epoch}.{before.seq}"
            before = record
    return None


def confirmed_exclusion(history: History) -> str | None:
    until: dict[str, float] = {}
    for entry in history:
        if type(entry) is Claimed:
            if entry.until_s > entry.at_s:
                for other, until_s in until.items():
                    if other != entry.process and until_s + ACT_S > entry.at_s:
                        return f"{entry.process} is confirmed at {entry.at_s:.2f}, and {other} is until {until_s:.2f}"
                until[entry.process] = entry.until_s
            else:
                until.pop(entry.process, None)  # it has ended what it did, or is dead
    return None


def no_write_after_release(history: History) -> str | None:
    released: set[str] = set()
    for entry in history:
        if type(entry) is Written:
            if entry.record.tenure in released:
                return f"a tenure that had released wrote {entry.record.epoch}.{entry.record.seq}"
            if entry.record.released:
                released.add(entry.record.tenure)
    return None


def blip_tolerance(history: History) -> str | None:
    """Nobody is fenced without a successor, and a silence of the store that hits all alike changes no holder."""
    tenures: list[str] = []
    for entry in history:
        if type(entry) is Written and (not tenures or entry.record.tenure != tenures[-1]):
            tenures.append(entry.record.tenure)
        elif type(entry) is Fenced and tenures[-1:] == [entry.tenure]:
            return f"{entry.process} was fenced and nobody had taken the lease"
        elif type(entry) is Ended and not entry.disturbed and len(tenures) > 1:
            return f"{len(tenures)} tenures, and only the store was silent"
    return None


def eventual_leader(history: History) -> str | None:
    """In peace one leads, and nobody else believes to."""
    end = history[-1]
    if type(end) is Ended and end.due and not (end.led and end.leaders == 1):
        return f"{end.leaders} lead at {end.at_s:.1f}, {'one' if end.led else 'none'} of them proven and fit"
    return None


def no_flap(history: History) -> str | None:
    """The lease changes its holder no more often than something happens."""
    holders: list[str] = []
    for entry in history:
        if type(entry) is Written and (not holders or entry.record.owner != holders[-1]):
            holders.append(entry.record.owner)
        elif type(entry) is Ended and len(holders) - 1 > entry.faults:
            return f"{len(holders) - 1} changes of holder after {entry.faults} faults: {' '.join(holders)}"
    return None


def handover_bound(history: History) -> str | None:
    """Promised where nothing but the hand-over happens."""
    took_s = seconds_without(history, Told)
    return f"somebody else led {took_s:.2f} s after the hand-over" if took_s is not None and took_s > HANDOVER_S_MAX else None


def seconds_without(history: History, lost: type[Told] | type[Cut]) -> float | None:
    """From the entry of that kind until another owner leads: None where there is no such entry, inf where nobody does."""
    first: Told | Cut | None = None
    for entry in history:
        if isinstance(entry, lost):
            first = first or entry
        elif first is not None and type(entry) is Led and entry.owner != first.owner:
            return entry.at_s - first.at_s
    return None if first is None else float("inf")


INVARIANTS: Final[Mapping[str, Callable[[History], str | None]]] = {
    "EpochUnique": epoch_unique,
    "EpochMonotoneStore": epoch_monotone_store,
    "ConfirmedExclusion": confirmed_exclusion,
    "NoWriteAfterRelease": no_write_after_release,
    "BlipTolerance": blip_tolerance,
    "LedEpochUnique": led_epoch_unique,
    "EventualLeader": eventual_leader,
    "NoFlap": no_flap,
    "HandoverBound": handover_bound,
}


# --- the world


class Node:
    """A machine's process. A restart is a new owner on the same machine, with the same epoch file."""

    __slots__ = (
        "alive", "bad_disk", "boot", "claim_s", "cut_s", "deaf", "disk_epoch", "frozen_s", "name", "offset_s", "phase", "process", "rate",
        "starts", "timings", "view", "wake", "wedged",
    )  # fmt: skip

    def __init__(self, name: str, rate: float, offset_s: float, timings: LeaseTimings, boot: str) -> None:
        self.name = name
        self.rate = rate
        self.offset_s = offset_s
        self.timings = timings
        self.boot = boot
        self.starts = 0
        self.disk_epoch = 0
        self.frozen_s = 0.0
        self.cut_s = 0.0
        self.alive = False
        self.wedged = False
        self.wake = 0
        self.process = ""
        self.claim_s = 0.0
        self.phase = Phase.FOLLOW
        self.deaf = False
        self.bad_disk = False
        self.view: LeaseView

    def local(self, at_s: float) -> float:
        return self.offset_s + at_s * self.rate

    def true(self, local_s: float) -> float:
        return (local_s - self.offset_s) / self.rate


# A record that was deleted by hand has broken these by itself. One that was put back may also be the very one that a candidate
# had been watching: it cannot know, and what keeps two holders from doing harm is the fence of the agents. The same holds for a
# clock that stands still or leaps. The bound of a hand-over is for schedules in which nothing else happens.
BROKEN_BY_DELETION: Final = frozenset({"EpochUnique", "EpochMonotoneStore", "NoWriteAfterRelease", "BlipTolerance", "NoFlap"})
BROKEN_BY_ROLLBACK: Final = BROKEN_BY_DELETION | {"ConfirmedExclusion"}
BROKEN_BY_CLOCKS: Final = frozenset({"ConfirmedExclusion"})


@attrs.frozen
class Kind:
    """A family of schedules. Shares are of 1."""

    name: str
    faults: int = 3  # at most
    slow: float = 0.3  # of trips that are not fast
    tail: float = 0.17  # of slow trips that outlast every time-out
    near_s: float = 0.2  # how long a fast trip takes at most
    warm_s: float = 0.5  # how long getting ready takes at most
    lost: float = 0.05  # of replies
    refused: float = 0.03  # of requests: 409, 403, 503
    own_ttl: float = 0.2  # of schedules where a process has a ttl of its own
    one_machine: float = 0.4
    settles: float = 0.1  # of schedules that end in peace, and somebody must lead
    poll_s: tuple[float, ...] = (3.0, 5.0)  # seldom, so that a schedule is short in events
    horizon_s: float = 36.0  # an election, some renewals, a loss, a takeover and what comes after
    cut: bool = False  # the leader is cut off for good
    worst_clocks: bool = False  # its clock is slow, and the others' are fast
    deleted: bool = False  # the record is deleted by hand, and reads may be old
    rolled_back: bool = False  # and an older one is put in its place
    alike: bool = False  # nothing happens but that the store is silent, to all alike
    leaving: bool = False  # all that is done to it is to be told to go
    handover: bool = False  # nothing happens but that the leader is told to go
    all_stand_back: bool = False  # before it is told, everybody is told to leave the lease to others
    clocks: bool = False  # a machine's clock stands still with it, or leaps
    peers: bool = False  # control planes compare what they hear, and the leader's ears or disk fail

    @property
    def not_promised(self) -> frozenset[str]:
        broken = frozenset() if self.handover and not self.all_stand_back else frozenset({"HandoverBound"})
        if self.clocks:
            return broken | BROKEN_BY_CLOCKS
        return broken | (BROKEN_BY_ROLLBACK if self.rolled_back else BROKEN_BY_DELETION if self.deleted else frozenset())


STORM: Final = Kind("storm", poll_s=(5.0,), horizon_s=30.0)  # the shortest, as it is run most often
CALM: Final = Kind("calm", faults=2, slow=0.02, lost=0.0, refused=0.0, settles=1.0)
BLIP: Final = Kind("blip", slow=0.0, lost=0.3, refused=0.3, own_ttl=0.0, alike=True)
HANDOVER: Final = Kind("handover", slow=0.0, near_s=0.05, lost=0.0, refused=0.0, poll_s=(1.0,), horizon_s=20.0, handover=True)
STAND_BACK: Final = attrs.evolve(HANDOVER, name="stand-back", settles=1.0, all_stand_back=True)
LEAVING: Final = Kind("leaving", lost=0.1, leaving=True)
CLOCKS: Final = Kind("clocks", slow=0.05, settles=0.3, clocks=True)
PEERS: Final = Kind("peers", faults=1, slow=0.0, lost=0.0, refused=0.0, settles=1.0, peers=True)
# R-E: one way of three is slow, one reply of twenty is lost, and the leader is cut off at some time.
CUT: Final = Kind("cut", faults=1, refused=0.0, own_ttl=0.0, one_machine=0.0, settles=0.0, poll_s=(1.0,), horizon_s=80.0, cut=True)
# What the rule of sending and receiving is for: reads that are slow and answered, and nobody loses a moment.
EDGE: Final = attrs.evolve(
    CUT, name="edge", slow=0.4, tail=0.0, near_s=0.02, warm_s=0.02, lost=0.0, settles=0.1, poll_s=(0.5,), horizon_s=36.0, worst_clocks=True
)
DELETED: Final = Kind("deleted", slow=0.1, own_ttl=0.0, settles=0.3, horizon_s=60.0, deleted=True)
ROLLED_BACK: Final = attrs.evolve(DELETED, name="rolled-back", settles=1.0, rolled_back=True)
KINDS: Final = {
    kind.name: kind for kind in (STORM, CALM, BLIP, HANDOVER, STAND_BACK, LEAVING, CLOCKS, PEERS, CUT, EDGE, DELETED, ROLLED_BACK)
}


class World:
    def __init__(
        self, seed: int, kind: Kind = STORM, protect: Rules = rules.RULES, *, conditions: bool = True, margins: bool = True
    ) -> None:
        self.rng = random.Random(seed)
        self.back_rng = random.Random(f"stands back {seed}")  # apart, so that it moves nothing else of a schedule
        self.kind = kind
        self.protect = protect
        self.conditions = conditions
        self.margins = margins
        self.history: History = []
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.count = itertools.count()
        self.draw = self.fresh()  # used up by whoever writes
        self.record: LeaseRecord | None = None
        self.stood: list[LeaseRecord | None] = [None]
        self.hands = 0  # laid on the record
        self.lagging_s = 0.0  # reads show what stood before, now and then, until then
        self.agents = 0  # the highest epoch that any agent has met
        self.silent_s = 0.0  # the store answers nobody until then
        self.lock_holder: Node | None = None
        self.lock_name = ""
        self.now_s = 0.0
        self.peace_s = float("inf")  # no faults from then on
        self.lossy_s = float("inf")  # no lost replies and refusals from then on
        self.disturbed = not kind.alike
        self.faults = 0
        if kind.handover:
            self.peace_s = 0.0
        if kind.worst_clocks:
            self.lossy_s = 0.0
        rng = self.rng
        self.one_machine = rng.random() < kind.one_machine
        rho, sigma_s = (RHO, SIGMA_S) if margins else (0.0, 0.0)
        poll_s = rng.choice(kind.poll_s)
        usual = LeaseTimings(15.0, 5.0, poll_s, rho=rho, sigma_s=sigma_s)
        short = LeaseTimings(6.0, 2.0, poll_s, 1.5, 0.5, rho=rho, sigma_s=sigma_s)
        self.nodes = []
        differ = rng.random() < kind.own_ttl
        one_clock = rng.choice((1 - RHO, 1.0, 1 + RHO))
        for number in range(2 if rng.random() < 0.75 else NODES_MAX):
            rate = one_clock if self.one_machine else rng.choice((1 - RHO, 1.0, 1 + RHO))
            if kind.worst_clocks:
                rate = 1 + RHO if number else 1 - RHO
            offset_s = 0.0 if self.one_machine else rng.random() * 1e6
            boot = f"b{number}"
            if self.one_machine:
                boot = "" if rng.random() < 0.1 else "b"  # one that may not read it
            node = Node(f"n{number}", rate, offset_s, short if differ and rng.random() < 0.5 else usual, boot)
            self.nodes.append(node)
            self.at(1.5 * number if kind.worst_clocks else rng.random() * (0.5 if kind.deleted else 3.0), self.start, node)

    def fresh(self) -> Draw:
        number = next(self.count)
        return Draw(f"w{number}", f"t{number}")

    # --- time

    def at(self, at_s: float, what: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self.heap, (at_s, next(self.count), what, args))

    def run(self) -> History:
        rng, kind = self.rng, self.kind
        settles = rng.random() < kind.settles
        end_s = kind.horizon_s
        last_s = 0.0
        if kind.alike:
            self.at(12.0, self.blip)
            end_s = 12.0 + BLIP_S_MAX + 20.0
        elif kind.handover:
            if kind.all_stand_back:
                self.at(7.5, self.stand_back)
            self.at(8.0 + 6.0 * rng.random(), self.tell_to_go)
        else:
            for _ in range(rng.randint(1, kind.faults)):
                at_s = (FIRST_DELETION_S if kind.deleted else 2.0) + rng.random() * (kind.horizon_s - 20.0)
                last_s = max(last_s, at_s)
                self.at(at_s, self.fault)
            if settles:
                self.peace_s = last_s + 0.001
                end_s = self.peace_s + SETTLE_S
            if kind.peers:
                end_s += DEAF_S
                for number in range(1, int(end_s / PEER_VIEW_S)):
                    self.at(number * PEER_VIEW_S, self.compare)
        heap = self.heap
        while heap and heap[0][0] <= end_s:
            self.now_s, _, what, args = heapq.heappop(heap)
            what(*args)
        heap.clear()  # what it holds refers back to this world; so it is freed without the garbage collector
        self.now_s = end_s
        led = any(
            n.alive and n.phase is Phase.LEADING and not (n.wedged or n.deaf or n.bad_disk) and n.local(end_s) < n.view.valid_until_s
            for n in self.nodes
        )
        leaders = sum(n.alive and n.phase is Phase.LEADING and n.cut_s <= end_s for n in self.nodes)  # who is cut off cannot know
        self.history.append(Ended(end_s, leaders, led, settles, self.disturbed, self.faults))
        return self.history

    # --- processes

    def start(self, node: Node) -> None:
        if node.alive:
            return
        node.starts += 1
        node.alive = True
        node.wedged = False
        node.process = f"{node.name}.{node.starts}"
        me = Candidate(
            ClusterId("c"),
            OwnerId(node.process),
            node.boot,
            one_machine=self.one_machine,
            store_is_new=self.record is None and node.starts == 1,
        )
        node.view = state.first_view(me, node.timings, floor=node.disk_epoch, now_s=node.local(self.now_s), rules=self.protect)
        node.phase = Phase.FOLLOW
        self.pump(node)

    def kill(self, node: Node) -> None:
        if not node.alive:
            return
        self.claim(node, self.now_s)
        node.alive = False
        node.wake += 1
        if self.lock_holder is node:
            self.lock_holder = None

    def tell(self, node: Node, process: str, event: events.Event) -> None:
        """An event for a process, unless it is no more; a frozen one gets it when it thaws."""
        if not node.alive or node.process != process:
            return
        if node.frozen_s > self.now_s:
            self.at(node.frozen_s, self.tell, node, process, event)
            return
        if type(event) in _REPLIES and node.view.in_flight is None:
            return
        node.view = step(node.view, event, node.local(self.now_s))
        self.pump(node)

    def warm(self, node: Node, process: str, epoch: int, tenure: str) -> None:
        """The hooks are done: agents are greeted, and say when they have met an epoch as high."""
        if not node.alive or node.process != process or node.view.work is not state.Work.RUNS:
            return
        if node.frozen_s > self.now_s:
            self.at(node.frozen_s, self.warm, node, process, epoch, tenure)
        elif self.agents >= epoch:
            self.tell(node, process, events.WarmFailed(epoch, "met", self.agents))
        elif self.now_s < min(self.peace_s, self.lossy_s) and self.disturbed and self.rng.random() < 0.03:
            self.faults += 1
            self.tell(node, process, events.WarmFailed(epoch, "a hook failed"))
        else:
            self.agents = epoch
            self.history.append(Led(self.now_s, process, epoch, tenure))
            self.tell(node, process, events.Warmed(epoch))
            for other in self.nodes:
                if other is not node and other.alive:  # agents tell all whom they obey
                    self.at(self.now_s + 0.2 * self.rng.random(), self.tell, other, other.process, events.MetEpoch(epoch))

    def woken(self, node: Node, wake: int) -> None:
        if node.wake != wake or not node.alive:
            return
        if node.frozen_s > self.now_s:
            self.at(node.frozen_s, self.woken, node, wake)
            return
        self.pump(node)

    def pump(self, node: Node) -> None:
        now_s, local_s, rng = self.now_s, node.local(self.now_s), self.rng
        node.wake += 1
        for spin in itertools.count():
            assert spin < SPIN_MAX, f"{node.process} does not come to rest in {node.view.phase}"
            view, action = decide(node.view, local_s, self.draw)
            node.view = view
            kind = type(action)
            if kind is actions.Wait:
                if action.until_s < state.FOREVER:
                    # a microsecond late: the way from one clock to another rounds, and too early would be again and again
                    self.at(max(now_s, node.true(action.until_s)) + 1e-6, self.woken, node, node.wake)
                break
            if kind is actions.Read or kind is actions.Replace:
                if kind is actions.Replace:
                    self.draw = self.fresh()
                    self.send(node, action.attempt)
                else:
                    self.send(node, None)
                if view.phase is Phase.FOLLOW or view.phase is Phase.ACQUIRING or view.phase is Phase.LEADING:
                    break  # with a request in flight these do nothing but wait
            elif kind is actions.TakeLock:
                node.view = step(view, events.LockAnswered(self.take_lock(node, action)), local_s)
            elif kind is actions.LetGoLock:
                if self.lock_holder is node:
                    self.lock_holder = None
            elif kind is actions.StoreEpoch and node.bad_disk:
                node.view = step(view, events.EpochNotStored(), local_s)
            elif kind is actions.StoreEpoch:
                node.disk_epoch = max(node.disk_epoch, action.record.epoch)
                node.view = step(view, events.EpochStored(), local_s)
            elif kind is actions.StartWork:
                epoch = action.record.epoch
                self.at(now_s + rng.random() * self.kind.warm_s, self.warm, node, node.process, epoch, action.record.tenure)
            elif kind is actions.EndWork:
                self.at(now_s + rng.random() * 0.5, self.tell, node, node.process, events.WorkEnded())
            elif kind is actions.DrawOwner:
                node.starts += 1
                node.wedged = False
                node.process = f"{node.name}.{node.starts}"
                node.view = step(view, events.Reborn(OwnerId(node.process)), local_s)
            else:
                assert kind is actions.Stop
                self.kill(node)
                self.at(now_s + 1.0 + 5.0 * rng.random(), self.start, node)
                return
        self.look(node)

    def look(self, node: Node) -> None:
        """What others see of it, into the history."""
        view = node.view
        if view.phase is Phase.LEADING:
            local_s = node.local(self.now_s)
            if not node.wedged and local_s - view.beat_s > BEAT_S:
                node.view = view = step(view, _BEAT, local_s)
            self.claim(node, node.true(view.valid_until_s))
        elif node.claim_s > 0.0:
            self.claim(node, self.now_s)
        if view.phase is not node.phase:
            node.phase = view.phase
            if view.phase is Phase.FENCED:
                assert view.held is not None
                self.history.append(Fenced(self.now_s, node.process, view.held.tenure))

    def claim(self, node: Node, until_s: float) -> None:
        if until_s == node.claim_s:
            return
        if until_s <= self.now_s and node.claim_s + ACT_S <= self.now_s:
            return
        node.claim_s = until_s
        self.history.append(Claimed(self.now_s, node.name, until_s))

    def take_lock(self, node: Node, action: actions.TakeLock) -> bool:
        if self.lock_holder not in (None, node) or (action.if_named is not None and self.lock_name != action.if_named):
            return False
        self.lock_holder, self.lock_name = node, action.name
        return True

    # --- the store

    def trip_s(self) -> float:
        if self.now_s >= self.peace_s or self.rng.random() >= self.kind.slow:
            return 0.005 + self.rng.random() * (self.kind.near_s - 0.005)
        return 2.9 + self.rng.random() * 9.1 if self.rng.random() < self.kind.tail else 0.2 + self.rng.random() * 2.7

    def send(self, node: Node, attempt: Attempt | None) -> None:
        rng, now_s, view = self.rng, self.now_s, node.view
        there_s, back_s = self.trip_s(), self.trip_s()
        timeout_s = node.timings.request_timeout_s / node.rate
        lossy = now_s < min(self.peace_s, self.lossy_s)
        if (
            self.disturbed and lossy and rng.random() < 0.01 and self.record is not None
        ):  # frozen between the clock's reading and the sending
            node.frozen_s = now_s + rng.random() * 20.0
            there_s += node.frozen_s - now_s
            self.faults += 1
        if node.cut_s > now_s or (lossy and rng.random() < 0.02):
            self.faults += 1
            back_s = float("inf")
            if self.kind.cut or rng.random() < 0.7:
                there_s = float("inf")
        refused = lossy and rng.random() < self.kind.refused
        lost = lossy and rng.random() < self.kind.lost
        give_up_s = now_s + timeout_s
        if refused or lost or there_s + back_s >= timeout_s:
            self.faults += 1
        if there_s < float("inf"):
            self.at(now_s + there_s, self.arrive, node, node.process, attempt, view.in_flight, back_s, refused, lost, give_up_s)
        if there_s >= timeout_s:
            self.at(give_up_s, self.reply, node, node.process, view.in_flight, _UNKNOWN)

    def arrive(
        self,
        node: Node,
        process: str,
        attempt: Attempt | None,
        flight: object,
        back_s: float,
        refused: bool,
        lost: bool,
        give_up_s: float,
    ) -> None:
        event: events.Event = _UNKNOWN
        if self.silent_s > self.now_s:
            lost = True
        elif not refused:
            if attempt is None:
                old = self.lagging_s > self.now_s and self.rng.random() < 0.3
                event = events.Answered(self.rng.choice(self.stood[-4:]) if old else self.record, self.rng.random())
            else:
                there, expected = self.record, attempt.expected
                same = (there.write_id if there else "") == (expected.write_id if expected else "")
                if same or not self.conditions:
                    self.record = attempt.new
                    self.stood.append(attempt.new)
                    self.history.append(Written(self.now_s, attempt.new))
                    event = _DONE
                else:
                    event = events.Answered(there, self.rng.random())
        back_at_s = self.now_s + back_s
        if self.now_s >= give_up_s:
            return
        if lost or back_at_s >= give_up_s:
            self.at(give_up_s, self.reply, node, process, flight, _UNKNOWN)
        else:
            self.at(back_at_s, self.reply, node, process, flight, event)

    def reply(self, node: Node, process: str, flight: object, event: events.Event) -> None:
        if not node.alive or node.process != process or node.view.in_flight is not flight:
            return  # it has given up on this one
        if node.frozen_s > self.now_s:
            self.at(node.frozen_s, self.reply, node, process, flight, event)
            return
        wrote = type(flight) is Attempt
        node.view = step(node.view, event, node.local(self.now_s))
        if wrote and node.bad_disk and node.view.phase in state.HOLDS:
            node.view = step(node.view, _DISK_FAILED, node.local(self.now_s))
        self.pump(node)

    # --- faults

    def fault(self) -> None:
        rng, now_s = self.rng, self.now_s
        leaders = [node for node in self.nodes if node.alive and node.phase is Phase.LEADING]
        node = leaders[0] if leaders and rng.random() < 0.75 else rng.choice(self.nodes)
        what = rng.random()
        self.faults += 1
        if self.back_rng.random() < 0.3:
            one = self.back_rng.choice(self.nodes)
            self.tell(one, one.process, events.StandBack(self.back_rng.random() * 40.0))
        if self.kind.cut:
            node.cut_s = float("inf")
            if node in leaders:
                self.history.append(Cut(now_s, node.process))
        elif self.kind.leaving:
            self.tell(node, node.process, events.StepDown() if what < 0.5 else events.HandOver())
        elif self.kind.peers:
            node.deaf, node.bad_disk = what < 0.5, what >= 0.5
        elif self.kind.clocks and what < 0.4:
            node.frozen_s = now_s + rng.random() * 40.0  # the machine and its clock stand still
            node.offset_s -= (node.frozen_s - now_s) * node.rate
            self.peace_s = max(self.peace_s, node.frozen_s) if self.peace_s < float("inf") else self.peace_s
        elif self.kind.clocks and what < 0.7:
            node.offset_s += rng.random() * 40.0
            self.pump(node) if node.alive and node.frozen_s <= now_s else None
        elif self.kind.deleted and rng.random() < 0.6:
            if what < 0.6:
                if self.hands >= 1 and not self.kind.rolled_back:
                    return  # a second one hides from a candidate who leads between them
                self.hands += 1
                self.record = rng.choice(self.stood[-8:]) if self.kind.rolled_back and rng.random() < 0.5 else None
            else:
                self.lagging_s = now_s + rng.random() * 15.0
        elif what < 0.15:
            self.kill(node)
            self.at(now_s + 1.0 + rng.random() * 20.0, self.start, node)
        elif what < 0.40:
            node.frozen_s = now_s + 0.2 + rng.random() * 30.0
            self.peace_s = max(self.peace_s, node.frozen_s) if self.peace_s < float("inf") else self.peace_s
        elif what < 0.62:
            node.cut_s = now_s + 1.0 + rng.random() * 30.0
        elif what < 0.70:
            self.silent_s = now_s + rng.random() * 20.0
        elif what < 0.76:
            self.tell(node, node.process, events.StepDown())
        elif what < 0.84:
            self.tell(node, node.process, events.HandOver())
        elif what < 0.90:
            met = node.view.held.epoch if node.alive and node.view.held else 1
            self.tell(node, node.process, events.MetEpoch(met + rng.randint(0, 2)))
        elif what < 0.96:
            node.wedged = node.phase is Phase.LEADING  # its work hangs, and its keeper does not
        else:
            self.tell(node, node.process, events.HandOver(anew=True))

    def stand_back(self) -> None:
        """For longer than the schedule lasts."""
        for node in self.nodes:
            self.tell(node, node.process, events.StandBack(3600.0))

    def tell_to_go(self) -> None:
        """At any instant, a request in flight or not."""
        for node in self.nodes:
            if node.phase is Phase.LEADING:
                self.faults += 1
                self.history.append(Told(self.now_s, node.process))
                self.tell(node, node.process, events.StepDown() if self.rng.random() < 0.5 else events.HandOver())
                return

    def compare(self) -> None:
        """What each hears of the nodes, and the best of the others that live."""
        for node in self.nodes:
            others = [0 if other.deaf else NODES_HEARD for other in self.nodes if other is not node and other.alive and not other.bad_disk]
            heard = state.PeerView(0 if node.deaf else NODES_HEARD, max(others, default=0), len(others))
            self.tell(node, node.process, heard)

    def blip(self) -> None:
        self.silent_s = self.now_s + self.rng.random() * BLIP_S_MAX
        self.lossy_s = self.silent_s


_UNKNOWN: Final = events.Unknown()
_DONE: Final = events.Done()
_BEAT: Final = events.Beat()
_DISK_FAILED: Final = events.LocalDiskFailed()
_REPLIES: Final = (events.Done, events.Answered, events.Unknown, events.LockAnswered)


def violations(history: History, kind: Kind) -> list[tuple[str, str]]:
    """(invariant, what is wrong), for each that does not hold."""
    return [(name, wrong) for name, holds in INVARIANTS.items() if name not in kind.not_promised and (wrong := holds(history)) is not None]


# --- rules that may be taken away, each with the invariant that then fails


@attrs.frozen
class Removal:
    invariant: str
    kind: Kind
    world: Mapping[str, Any]


def _removed(**fields: Any) -> Mapping[str, Any]:
    return {"protect": attrs.evolve(rules.RULES, **fields)}


REMOVALS: Final[Mapping[str, Removal]] = {
    "a holder counts from when it sent": Removal(
        "ConfirmedExclusion",
        STORM,
        _removed(holder_valid_until_s=lambda timings, sent_s, received_s, ttl_s: received_s + timings.valid_s(ttl_s)),
    ),
    "a candidate counts from when it received": Removal(
        "ConfirmedExclusion", EDGE, _removed(silence_from_s=lambda sent_s, received_s: sent_s)
    ),
    "the record's own ttl judges it": Removal(
        "ConfirmedExclusion", STORM, _removed(wait_for_s=lambda timings, record: timings.wait_s(timings.ttl_s))
    ),
    "margins for clocks and lateness": Removal("ConfirmedExclusion", EDGE, {"margins": False}),
    "a free lock must carry the holder's name": Removal("ConfirmedExclusion", STORM, _removed(dead_holder=lambda record: None)),
    "a boot id that is not known proves no death": Removal(
        "ConfirmedExclusion", STORM, _removed(last_run=lambda me_boot_id, record_boot_id: me_boot_id != record_boot_id)
    ),
    "the epoch rises at each acquisition": Removal(
        "EpochUnique", STORM, _removed(next_epoch=lambda record, floor: max(1, record.epoch if record else 0))
    ),
    "an epoch met makes the holder acquire above it": Removal("EventualLeader", ROLLED_BACK, _removed(must_rise=lambda met, held: False)),
    "the store compares before it sets": Removal("EpochUnique", STORM, {"conditions": False}),
    "a release keeps the epoch": Removal(
        "EpochMonotoneStore",
        STORM,
        _removed(release_of=lambda held, write_id: attrs.evolve(rules.release_of(held, write_id), epoch=1, seq=1)),
    ),
    "a release is a write of its own": Removal(
        "NoWriteAfterRelease", LEAVING, _removed(release_of=lambda held, write_id: attrs.evolve(held, state=RecordState.RELEASED))
    ),
    "an own write id read back is a success": Removal("BlipTolerance", BLIP, _removed(own_attempt=lambda record, doubt: None)),
    "silence counts over unbroken answers": Removal("BlipTolerance", BLIP, _removed(silence_after_failure=lambda since_s: since_s)),
    "only proof deposes": Removal("BlipTolerance", BLIP, _removed(fenced_after_failures=lambda failures: failures >= 5)),
    "proof deposes": Removal("EventualLeader", CALM, _removed(deposed_by=lambda record, held: False)),
    "a wedged leader is not renewed": Removal("EventualLeader", CALM, _removed(works=lambda now_s, beat_s, ttl_s: True)),
    "a leader that hears too little gives way": Removal("EventualLeader", PEERS, _removed(deaf=lambda heard, peer_heard: False)),
    "a leader whose disk refuses gives way": Removal("EventualLeader", PEERS, _removed(disk_gives_up=lambda failures, peers_fit: False)),
    "whoever hands over lets others go first": Removal(
        "HandoverBound", HANDOVER, _removed(released_is_free=lambda now_s, yield_until_s: True)
    ),
    "what all stand back from is taken all the same": Removal("EventualLeader", STAND_BACK, _removed(untaken=lambda silence_s: False)),
}


def run(seed: int, kind: Kind = STORM, **world: Any) -> list[tuple[str, str]]:
    return violations(World(seed, kind, **world).run(), kind)


def replay_line(seed: int, kind: Kind, removed: str = "") -> str:
    return f"python -m tests.property.lease_model {seed} {kind.name}" + (f" {removed!r}" if removed else "")


def main(seed: str, kind: str = "storm", removed: str = "") -> None:
    family = KINDS[kind]
    history = World(int(seed), family, **(REMOVALS[removed].world if removed else {})).run()
    for entry in history:
        if isinstance(entry, Written):
            record = entry.record
            print(f"{entry.at_s:7.2f} written {record.epoch}.{record.seq} {record.owner} {record.state.value} ttl {record.ttl_s:g}")
        else:
            print(f"{entry.at_s:7.2f} {entry}")
    for name, wrong in violations(history, family):
        print(f"{name}: {wrong}")


if __name__ == "__main__":
    main(*sys.argv[1:])
