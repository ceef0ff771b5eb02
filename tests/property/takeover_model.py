"""The take-over of a replicated store without any time in it: arbitrary stalls, crashes and take-overs at any moment.

What it asks: is a write that was acknowledged known to every later leader? The record and its rules are the product's; the
bucket (a prefix for each epoch, the base that the record names) is what control.md 3 says of it. A process is a generator, and
each `yield` a moment at which any other may go on; one that is never chosen again has stalled for ever.

One line replays a schedule:  python -m tests.property.takeover_model SEED [RULE]
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import attrs

from llmgw.domain.ids import ClusterId, OwnerId
from llmgw.lease import rules
from llmgw.lease.record import LeaseRecord

PROCESSES: Final = 3
STEPS: Final = (40, 160)
SWITCH: Final = 0.25  # of steps that another process takes
CRASH: Final = 0.01
RELEASES: Final = 0.5
WRITES_MAX: Final = 4
TTL_S: Final = 15.0  # not used: whoever looks may take over


@attrs.frozen
class Order:
    """How a take-over goes, a field for each rule that may be taken away."""

    lists_after_acquiring: bool = True
    prefix_per_epoch: bool = True
    base_is_the_published: bool = True
    publishes_by_comparing: bool = True
    reads_the_lease_to_acknowledge: bool = True
    and_after_the_upload: bool = True
    release_keeps_the_epoch: bool = True


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


Entry = Acknowledged | Leads | Uploaded
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


INVARIANTS: Final[Mapping[str, Callable[[History], str | None]]] = {
    "DurableAck": durable_ack,
    "EpochUnique": epoch_unique,
    "SingleWriterPrefix": single_writer_prefix,
}
# Each rule, what goes wrong without it, and the order without it.
REMOVALS: Final[Mapping[str, tuple[str, Order]]] = {
    "the lease is read before a write is acknowledged": ("DurableAck", Order(reads_the_lease_to_acknowledge=False)),
    "and after its upload": ("DurableAck", Order(and_after_the_upload=False)),
    "the base is listed after the lease was won": ("DurableAck", Order(lists_after_acquiring=False)),
    "each epoch has a prefix of its own": ("SingleWriterPrefix", Order(prefix_per_epoch=False)),
    "the base is the last that was published": ("DurableAck", Order(base_is_the_published=False)),
    "a base is published by comparing": ("DurableAck", Order(publishes_by_comparing=False)),
    "a release keeps the epoch": ("EpochUnique", Order(release_keeps_the_epoch=False)),
}


class Bucket:
    def __init__(self) -> None:
        self.record: LeaseRecord | None = None
        self.prefixes: dict[Prefix, list[Write]] = {"": []}

    def replace(self, expected: LeaseRecord | None, new: LeaseRecord) -> bool:
        if self.record != expected:
            return False
        self.record = new
        return True


class World:
    def __init__(self, seed: int, order: Order = Order()) -> None:
        self.rng = random.Random(seed)
        self.order = order
        self.bucket = Bucket()
        self.history: History = []
        self.numbers = itertools.count(1)

    def run(self) -> History:
        rng = self.rng
        processes = [self.process() for _ in range(PROCESSES)]
        current = 0
        for _ in range(rng.randint(*STEPS)):
            if rng.random() < SWITCH:
                current = rng.randrange(PROCESSES)
            if rng.random() < CRASH:
                processes[current] = self.process()
            next(processes[current])
        return self.history

    def process(self) -> Iterator[None]:
        """A control plane that competes for ever."""
        order, bucket = self.order, self.bucket
        owner = OwnerId(f"p{next(self.numbers)}")
        while True:
            expected = bucket.record
            yield
            before = list(bucket.prefixes.get(base_of(expected, order), []))
            if not order.lists_after_acquiring:
                yield
            held = self.acquisition(expected, owner)
            if not bucket.replace(expected, held):
                continue
            yield
            if order.lists_after_acquiring:
                before = list(bucket.prefixes.get(base_of(expected, order), []))
                yield
            prefix = f"e/{held.epoch}" if order.prefix_per_epoch else ""
            bucket.prefixes[prefix] = list(before)
            self.history.append(Uploaded(prefix, held.epoch, held.tenure))
            yield
            published = self.next(held, base=prefix)
            if order.publishes_by_comparing:
                if not bucket.replace(held, published):
                    continue
            else:
                current = bucket.record
                bucket.record = self.next(current or held, base=prefix)
            held = published
            self.history.append(Leads(held.epoch, held.tenure, frozenset(before)))
            yield from self.lead(held, prefix, before)
            current = bucket.record
            if self.rng.random() < RELEASES and current is not None and not current.deposes(held) and current.order >= held.order:
                kept = rules.release_of(current, f"w{next(self.numbers)}")
                bucket.replace(current, kept if order.release_keeps_the_epoch else attrs.evolve(kept, epoch=0, seq=0))
            yield

    def lead(self, held: LeaseRecord, prefix: Prefix, have: list[Write]) -> Iterator[None]:
        order, bucket = self.order, self.bucket
        for _ in range(self.rng.randint(1, WRITES_MAX)):
            write = (held.epoch, next(self.numbers))
            have = [*have, write]
            yield
            earlier = self.mine(held)
            yield
            # What Litestream does: its files are numbered, and it overwrites what stands under its next number.
            there = bucket.prefixes[prefix]
            bucket.prefixes[prefix] = [*there[: len(have) - 1], write, *there[len(have) :]]
            self.history.append(Uploaded(prefix, held.epoch, held.tenure))
            yield
            proven = self.mine(held) if order.and_after_the_upload else earlier
            if order.reads_the_lease_to_acknowledge and not proven:
                return
            self.history.append(Acknowledged(write))
            yield

    def mine(self, held: LeaseRecord) -> bool:
        current = self.bucket.record
        return current is not None and current.epoch == held.epoch and not current.deposes(held)

    def acquisition(self, expected: LeaseRecord | None, owner: OwnerId) -> LeaseRecord:
        epoch = rules.next_epoch(expected, 0)
        number = next(self.numbers)
        base = "" if expected is None else expected.base
        seq = 1 if expected is None else expected.seq + 1
        return LeaseRecord(ClusterId("c"), epoch, owner, f"t{number}", f"w{number}", "", seq, TTL_S, base=base)

    def next(self, held: LeaseRecord, base: str) -> LeaseRecord:
        return attrs.evolve(held, seq=held.seq + 1, write_id=f"w{next(self.numbers)}", base=base)


def base_of(record: LeaseRecord | None, order: Order) -> Prefix:
    if record is None or not order.prefix_per_epoch:
        return ""
    if order.base_is_the_published:
        return record.base
    return f"e/{record.epoch}"


def run(seed: int, order: Order = Order()) -> dict[str, str]:
    """The invariants that do not hold, each with what is wrong."""
    history = World(seed, order).run()
    return {name: wrong for name, holds in INVARIANTS.items() if (wrong := holds(history)) is not None}


def replay_line(seed: int, removed: str = "") -> str:
    return f"python -m tests.property.takeover_model {seed}" + (f" {removed!r}" if removed else "")


def main(seed: str, removed: str = "") -> None:
    order = REMOVALS[removed][1] if removed else Order()
    for entry in World(int(seed), order).run():
        print(entry)
    for name, wrong in run(int(seed), order).items():
        print(f"{name}: {wrong}")


if __name__ == "__main__":
    main(*sys.argv[1:])
