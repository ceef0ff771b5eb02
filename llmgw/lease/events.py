"""What happened, as `digest.step` takes it in. Any may come at any time, also while a request is in flight."""

from __future__ import annotations

import attrs

from llmgw.domain.ids import OwnerId
from llmgw.lease.record import LeaseRecord
from llmgw.lease.state import Desk, PeerView


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
