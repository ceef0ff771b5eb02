"""In which order a replicated store is taken over, acknowledged and handed over, and what may be deleted. Pure.

Litestream does not protect a replica from a second writer, and what it calls synced may not be: these rules do (R-C.8). Each is a
field of `Rules`; a test that replaces one shows what it is for. Who carries the steps out is told them and picks no order of its own.

- The base is asked for and listed *after* the lease was won: what the leader before could still acknowledge is then in it.
- What an epoch writes goes into a prefix of its own. A predecessor that has been frozen goes on writing where nobody reads.
- A base is published once its first sync is durable; until then the one before stays the base of whoever comes next.
- A write is acknowledged after its upload *and then* a read of the lease that shows it to be ours.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection
from typing import Final

import attrs

from llmgw.lease.record import LeaseRecord
from llmgw.replication import prefixes


class Step(enum.Enum):
    ACQUIRE = "win the lease"
    RESTORE = "list the published base and restore it to a new folder"
    REPLICATE = "start the child on the epoch's own prefix"
    UPLOAD = "wait until everything committed is in the bucket"
    PUBLISH = "name the prefix as the base, by compare-and-set"
    PROVE = "read the lease: it still shows our epoch and tenure"
    REFUSE = "take no more writes"
    END_CHILD = "end the child, and see its end"
    RELEASE = "release the lease"


TAKE_OVER: Final = (Step.ACQUIRE, Step.RESTORE, Step.REPLICATE, Step.UPLOAD, Step.PUBLISH)
ACKNOWLEDGEMENT: Final = (Step.UPLOAD, Step.PROVE)
HAND_OVER: Final = (Step.REFUSE, Step.UPLOAD, Step.END_CHILD, Step.RELEASE)


def base_of(record: LeaseRecord | None) -> str:
    """The prefix that a take-over restores: the last that was published, which may be epochs back. "": there is none yet."""
    return "" if record is None else record.base


def uploaded(txid: int, replicated_txid: int) -> bool:
    """Is it durable? Litestream has answered 200 with either of the two the higher one, and nothing uploaded (R-B43, R-B50)."""
    return txid == replicated_txid > 0


def out_of_use(found: Collection[str], ours: str, base: str) -> tuple[str, ...]:
    """Which prefixes nobody begins from any more, oldest first: below our epoch, and neither ours nor the base.

    A leader that has been frozen may ask: what is newer than its own is its successor's. What is not a prefix of ours stays.
    """
    mine = prefixes.parse(ours)
    if mine is None:
        return ()
    old = [(parsed, name) for name in found if (parsed := prefixes.parse(name)) is not None and parsed.epoch < mine.epoch]
    return tuple(name for _, name in sorted(old) if name not in (ours, base))


@attrs.frozen
class Rules:
    """What protects an acknowledged write, a field each. Nothing but a test replaces one."""

    take_over: tuple[Step, ...] = TAKE_OVER
    acknowledgement: tuple[Step, ...] = ACKNOWLEDGEMENT
    hand_over: tuple[Step, ...] = HAND_OVER
    base_of: Callable[[LeaseRecord | None], str] = base_of
    prefix_of: Callable[[int, str], str] = prefixes.prefix_of
    uploaded: Callable[[int, int], bool] = uploaded
    out_of_use: Callable[[Collection[str], str, str], tuple[str, ...]] = out_of_use


RULES: Final = Rules()
