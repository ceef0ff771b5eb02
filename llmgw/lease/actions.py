"""What to do next, as `decide.decide` says it. Of requests there is never more than one in flight."""

from __future__ import annotations

import attrs

from llmgw.lease.record import Attempt, LeaseRecord


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
