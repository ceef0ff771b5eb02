"""A replicated store without any time in it: arbitrary stalls, crashes and take-overs at any moment, and the product's own rules.

What it asks: is a write that was acknowledged known to every later leader? Order and rules are those of `llmgw.replication.rules`,
the record's those of `llmgw.lease.rules`; the bucket and Litestream are what was measured of them. A process is a generator, and each
`yield` a moment at which any other may go on; one that is never chosen again has stalled for ever, and its Litestream goes on. A
process that crashes takes its Litestream along. Whoever looks may take over: nothing here waits for a lease to expire.

One line replays a schedule:  python -m tests.property.replication_model SEED [RULE]
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import attrs

from llmgw.domain.ids import ClusterId, OwnerId
from llmgw.lease import rules as lease_rules
from llmgw.lease.record import LeaseRecord, RecordState
from llmgw.replication import prefixes, rules
from llmgw.replication.rules import Rules, Step

PROCESSES: Final = 3
STEPS: Final = (40, 160)
SWITCH: Final = 0.25  # of steps that another process takes
CRASH: Final = 0.01
CHILD: Final = 0.15  # of steps at which some Litestream uploads of itself
NOT_UPLOADED: Final = 0.1  # of syncs that are answered without an upload: 200, and two numbers that differ (R-B43, R-B50)
RELEASES: Final = 0.5
CLEANS: Final = 0.3
ROUNDS_MAX: Final = 3  # of writes that are acknowledged together
WRITES_MAX: Final = 3
SYNCS_MAX: Final = 3  # until a take-over is given up
TTL_S: Final = 15.0  # not used: whoever looks may take over

Write = tuple[int, int]  # the epoch under which it was made, and a number
Prefix = str


@attrs.frozen
class Acknowledged:
    write: Write


@attrs.frozen
class Leads:
    """From here on: with what it restored."""

    epoch: int
    tenure: str
    restored: frozenset[Write]


@attrs.frozen
class Uploaded:
    prefix: Prefix
    epoch: int
    tenure: str


@attrs.frozen
class Released:
    """Handed over in order, with everything that was stored."""

    epoch: int
    tenure: str
    stored: frozenset[Write]


@attrs.frozen
class Missing:
    """The base that the lease names has no copy under it, for the holder who looks."""

    base: Prefix
    epoch: int


Entry = Acknowledged | Leads | Uploaded | Released | Missing
History = list[Entry]


def durable_ack(history: History) -> str | None:
    """Whatever was acknowledged under an epoch is in what every leader of a higher one began with."""
    leaders = [entry for entry in history if isinstance(entry, Leads)]
    for entry in history:
        if isinstance(entry, Acknowledged):
            for leader in leaders:
                if leader.epoch > entry.write[0] and entry.write not in leader.restored:
                    return f"write {entry.write} was acknowledged, and the leader of epoch {leader.epoch} has not got it"
    return None


def epoch_unique(history: History) -> str | None:
    tenures: dict[int, str] = {}
    for entry in history:
        if isinstance(entry, Leads) and tenures.setdefault(entry.epoch, entry.tenure) != entry.tenure:
            return f"two led under epoch {entry.epoch}"
    return None


def single_writer_prefix(history: History) -> str | None:
    tenures: dict[Prefix, str] = {}
    for entry in history:
        if isinstance(entry, Uploaded) and tenures.setdefault(entry.prefix, entry.tenure) != entry.tenure:
            return f"two wrote into {entry.prefix}"
    return None


def base_is_there(history: History) -> str | None:
    """What the lease names as the base can be restored by whoever holds the lease."""
    for entry in history:
        if isinstance(entry, Missing):
            return f"the holder of epoch {entry.epoch} found nothing under {entry.base or 'no prefix'}"
    return None


def no_write_after_release(history: History) -> str | None:
    released = set()
    for entry in history:
        if isinstance(entry, Released):
            released.add(entry.tenure)
        elif isinstance(entry, Uploaded) and entry.tenure in released:
            return f"the holder of epoch {entry.epoch} wrote into {entry.prefix} after it had released"
    return None


def handover_whole(history: History) -> str | None:
    """Whoever leads next after a hand-over has everything that was stored, acknowledged or not."""
    for index, entry in enumerate(history):
        if isinstance(entry, Released):
            for later in history[index:]:
                if isinstance(later, Leads) and later.epoch > entry.epoch and not entry.stored <= later.restored:
                    return (
                        f"epoch {entry.epoch} was handed over with {sorted(entry.stored - later.restored)} missing at epoch {later.epoch}"
                    )
    return None


INVARIANTS: Final[Mapping[str, Callable[[History], str | None]]] = {
    "DurableAck": durable_ack,
    "EpochUnique": epoch_unique,
    "SingleWriterPrefix": single_writer_prefix,
    "BaseIsThere": base_is_there,
    "NoWriteAfterRelease": no_write_after_release,
    "HandoverWhole": handover_whole,
}


@attrs.frozen
class Removal:
    """A rule taken away: the invariant that misses it, and the world without it."""

    invariant: str
    world: dict[str, Any]


def _without(**changed: Any) -> dict[str, Any]:
    return {"protect": attrs.evolve(rules.RULES, **changed)}


REMOVALS: Final[Mapping[str, Removal]] = {
    "the lease is read before a write is acknowledged": Removal("DurableAck", _without(acknowledgement=(Step.UPLOAD,))),
    "and after its upload": Removal("DurableAck", _without(acknowledgement=(Step.PROVE, Step.UPLOAD))),
    "a write is uploaded before it is acknowledged": Removal("DurableAck", _without(acknowledgement=(Step.PROVE,))),
    "a sync counts only with both numbers equal": Removal("DurableAck", _without(uploaded=lambda txid, replicated_txid: True)),
    "the base is listed after the lease was won": Removal(
        "DurableAck", _without(take_over=(Step.RESTORE, Step.ACQUIRE, Step.REPLICATE, Step.UPLOAD, Step.PUBLISH))
    ),
    "a base is published after its first upload": Removal(
        "BaseIsThere", _without(take_over=(Step.ACQUIRE, Step.RESTORE, Step.REPLICATE, Step.PUBLISH, Step.UPLOAD))
    ),
    "the base is the last that was published": Removal(
        "BaseIsThere", _without(base_of=lambda record: prefixes.prefix_of(record.epoch, record.tenure) if record else "")
    ),
    "each epoch has a prefix of its own": Removal("SingleWriterPrefix", _without(prefix_of=lambda epoch, tenure: "e/1-all")),
    "no prefix is out of use that is newer than ours": Removal(
        "BaseIsThere", _without(out_of_use=lambda found, ours, base: tuple(sorted(set(found) - {ours, base})))
    ),
    "a base is published by comparing": Removal("DurableAck", {"compares": False}),
    "a release keeps the epoch": Removal(
        "EpochUnique", {"release_of": lambda held, write_id: attrs.evolve(lease_rules.release_of(held, write_id), epoch=0, seq=0)}
    ),
    "whoever hands over takes no more writes": Removal(
        "HandoverWhole", _without(hand_over=(Step.UPLOAD, Step.END_CHILD, Step.RELEASE))
    ),
    "whoever hands over uploads what is left": Removal(
        "HandoverWhole", _without(hand_over=(Step.REFUSE, Step.END_CHILD, Step.RELEASE))
    ),
    "the child ends before the release": Removal(
        "NoWriteAfterRelease", _without(hand_over=(Step.REFUSE, Step.UPLOAD, Step.RELEASE, Step.END_CHILD))
    ),
}  # fmt: skip


class Bucket:
    def __init__(self) -> None:
        self.record: LeaseRecord | None = None
        self.prefixes: dict[Prefix, list[Write]] = {}

    def replace(self, expected: LeaseRecord | None, new: LeaseRecord) -> bool:
        if self.record is not expected:  # a value is made once and handed on, so it is the version, too
            return False
        self.record = new
        return True


class Child:
    """Litestream: a file for each transaction of the working copy, by its number, over whatever stands under that number."""

    def __init__(self, bucket: Bucket, history: History, prefix: Prefix, held: LeaseRecord, rows: list[Write]) -> None:
        self._bucket = bucket
        self._history = history
        self.prefix = prefix
        self._held = held
        self._rows = rows
        self._position = len(rows) if bucket.prefixes.get(prefix) else 0
        self._uploads = 0

    @property
    def behind(self) -> bool:
        return self._position < len(self._rows) or self._uploads == 0

    def upload(self) -> None:
        """One file; the first is of everything that there is. With nothing new it gathers files of before into one."""
        first = self._uploads == 0 and self._position == 0
        to = len(self._rows) if first else min(self._position + 1, len(self._rows))
        there = self._bucket.prefixes.get(self.prefix, [])
        self._bucket.prefixes[self.prefix] = [*there[: self._position], *self._rows[self._position : to], *there[to:]]
        self._position = to
        self._uploads += 1
        self._history.append(Uploaded(self.prefix, self._held.epoch, self._held.tenure))

    @property
    def numbers(self) -> tuple[int, int]:
        """What a sync answers. The first transaction is the empty database's."""
        return 1 + len(self._rows), self._uploads and 1 + self._position


@attrs.define
class Process:
    """One run of a control plane. Its Litestream is scheduled beside it."""

    program: Iterator[None]
    child: Child | None = None


class World:
    def __init__(
        self,
        seed: int,
        protect: Rules = rules.RULES,
        *,
        compares: bool = True,
        release_of: Callable[[LeaseRecord, str], LeaseRecord] = lease_rules.release_of,
    ) -> None:
        self.rng = random.Random(seed)
        self.protect = protect
        self.compares = compares
        self.release_of = release_of
        self.bucket = Bucket()
        self.history: History = []
        self.numbers = itertools.count(1)
        self.processes: list[Process] = []

    def run(self) -> History:
        rng, draw = self.rng, self.rng.random
        processes = self.processes = [self.process() for _ in range(PROCESSES)]
        current = 0
        for _ in range(rng.randint(*STEPS)):
            if draw() < SWITCH:
                current = rng.randrange(PROCESSES)
            if draw() < CRASH:
                processes[current] = self.process()
            if draw() < CHILD:
                child = processes[rng.randrange(PROCESSES)].child
                if child is not None:
                    child.upload()
            next(processes[current].program)
        return self.history

    def process(self) -> Process:
        process = Process(iter(()))
        process.program = self.compete(process)
        return process

    def compete(self, process: Process) -> Iterator[None]:
        """A control plane that competes for ever."""
        owner = OwnerId(f"p{next(self.numbers)}")
        while True:
            term = _Term(self, process, owner)
            yield from term.take_over()
            if term.leads:
                yield from term.lead()
                if term.proven and self.rng.random() < RELEASES:
                    yield from term.hand_over()
            process.child = None  # ended, and the folder is never used again
            yield


class _Term:
    """What one acquisition does. Carries the product's steps out in the product's order."""

    def __init__(self, world: World, process: Process, owner: OwnerId) -> None:
        self.world = world
        self.process = process
        self.owner = owner
        self.rows: list[Write] = []  # of the working copy
        self.held: LeaseRecord | None = None
        self.leads = False
        self.proven = True
        self.refuses = False
        self.pending: list[Write] = []  # stored and not acknowledged

    def take_over(self) -> Iterator[None]:
        world, bucket = self.world, self.world.bucket
        expected = bucket.record
        yield
        for step in world.protect.take_over:
            if step is Step.ACQUIRE:
                self.held = self.acquisition(expected)
                if not bucket.replace(expected, self.held):
                    return
            elif step is Step.RESTORE:
                base = world.protect.base_of(expected)
                if base and base not in bucket.prefixes:
                    if self.held is not None and self.mine():  # else a successor has led since, and may have removed it
                        world.history.append(Missing(base, self.held.epoch))
                    return
                self.rows = list(bucket.prefixes.get(base, ()))
            elif step is Step.REPLICATE:
                assert self.held is not None
                prefix = world.protect.prefix_of(self.held.epoch, self.held.tenure)
                self.process.child = Child(bucket, world.history, prefix, self.held, self.rows)
            elif step is Step.UPLOAD:
                for _ in range(SYNCS_MAX):
                    yield from self.sync()
                    if world.protect.uploaded(*self.said):
                        break
                else:
                    return
            elif step is Step.PUBLISH:
                assert self.held is not None
                assert self.process.child is not None
                compared = self.held if world.compares else bucket.record
                published = self.next(compared or self.held, base=self.process.child.prefix)
                if not bucket.replace(compared, published):
                    return
                self.held = published if world.compares else attrs.evolve(published, epoch=self.held.epoch, tenure=self.held.tenure)
            yield
        assert self.held is not None
        self.leads = True
        world.history.append(Leads(self.held.epoch, self.held.tenure, frozenset(self.rows)))

    def lead(self) -> Iterator[None]:
        world, rng = self.world, self.world.rng
        for _ in range(rng.randint(1, ROUNDS_MAX)):
            for _ in range(rng.randint(1, WRITES_MAX)):
                self.write()
                yield
            batch, proven, uploaded = list(self.pending), True, True
            for step in world.protect.acknowledgement:
                if step is Step.UPLOAD:
                    yield from self.sync()
                    uploaded = world.protect.uploaded(*self.said)
                else:
                    proven = self.mine()
                yield
                if not uploaded or not proven:
                    break
            self.proven = proven
            if not proven:
                return
            if uploaded:
                world.history.extend(map(Acknowledged, batch))
                del self.pending[: len(batch)]
            if rng.random() < CLEANS:
                yield from self.clean()

    def clean(self) -> Iterator[None]:
        assert self.process.child is not None
        ours = self.process.child.prefix
        found = tuple(self.world.bucket.prefixes)
        yield
        for prefix in self.world.protect.out_of_use(found, ours, ours):
            self.world.bucket.prefixes.pop(prefix, None)
            yield

    def hand_over(self) -> Iterator[None]:
        world = self.world
        whole = False
        for step in world.protect.hand_over:
            if step is Step.REFUSE:
                self.refuses = True
            elif step is Step.UPLOAD:
                yield from self.sync()
                whole = world.protect.uploaded(*self.said)
                if not whole:
                    return  # it is let expire
            elif step is Step.END_CHILD:
                self.process.child = None
            elif step is Step.RELEASE:
                current = world.bucket.record
                if current is None or self.held is None or current.deposes(self.held) or current.order < self.held.order:
                    return
                released = self.release(current)
                if world.bucket.replace(current, released):
                    world.history.append(Released(self.held.epoch, self.held.tenure, frozenset(self.rows)))
            if not self.refuses and self.held is not None:
                self.write()  # somebody who asks meanwhile
            yield

    # --- what the steps are made of

    def write(self) -> None:
        assert self.held is not None
        write = (self.held.epoch, next(self.world.numbers))
        self.rows.append(write)
        self.pending.append(write)

    def sync(self) -> Iterator[None]:
        """`said` is the answer: (txid, replicated_txid)."""
        child = self.process.child
        self.said = 0, 0
        if child is None or self.world.rng.random() < NOT_UPLOADED:
            yield
            self.said = (0, 0) if child is None else child.numbers
            return
        committed = len(self.rows)
        while child.behind and (child.numbers[1] <= committed):
            child.upload()
            yield
        self.said = child.numbers

    def mine(self) -> bool:
        current = self.world.bucket.record
        return current is not None and self.held is not None and current.epoch == self.held.epoch and not current.deposes(self.held)

    def acquisition(self, expected: LeaseRecord | None) -> LeaseRecord:
        epoch = lease_rules.next_epoch(expected, 0)
        number = next(self.world.numbers)
        base = "" if expected is None else expected.base
        seq = 1 if expected is None else expected.seq + 1
        return LeaseRecord(ClusterId("c"), epoch, self.owner, f"t{number}", f"w{number}", "", seq, TTL_S, base=base)

    def next(self, held: LeaseRecord, base: str) -> LeaseRecord:
        return attrs.evolve(held, seq=held.seq + 1, write_id=f"w{next(self.world.numbers)}", base=base)

    def release(self, held: LeaseRecord) -> LeaseRecord:
        released = self.world.release_of(held, f"w{next(self.world.numbers)}")
        assert released.state is RecordState.RELEASED
        return released


def run(seed: int, **world: Any) -> dict[str, str]:
    """The invariants that do not hold, each with what is wrong."""
    history = World(seed, **world).run()
    return {name: wrong for name, holds in INVARIANTS.items() if (wrong := holds(history)) is not None}


def replay_line(seed: int, removed: str = "") -> str:
    return f"python -m tests.property.replication_model {seed}" + (f" {removed!r}" if removed else "")


def main(seed: str, removed: str = "") -> None:
    world = REMOVALS[removed].world if removed else {}
    for entry in World(int(seed), **world).run():
        print(entry)
    for name, wrong in run(int(seed), **world).items():
        print(f"{name}: {wrong}")


if __name__ == "__main__":
    main(*sys.argv[1:])
