"""Whether this control plane leads, under which epoch, and what its claim may do now.

The lease decides who leads (`llmgw.lease`); this is the one place where the rest of the control plane asks about it. What has
to happen before the first plan of a term, and when a term is over, hooks in here. Logs nothing: the lease logs transitions.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import attrs
import trio

from llmgw.control import powers
from llmgw.domain.errors import Unavailable
from llmgw.domain.ids import ClusterId, OwnerId
from llmgw.domain.lease import FencingToken, LeaseRole, Power
from llmgw.domain.plan import Action
from llmgw.domain.ports import Machine
from llmgw.lease import rules, state
from llmgw.lease.keeper import LeaseKeeper, Term
from llmgw.lease.outage import Outage
from llmgw.lease.record import LeaseRecord
from llmgw.lease.rules import Rules
from llmgw.lease.sole import SoleStore
from llmgw.lease.state import Candidate, Desk, PeerView, Phase
from llmgw.lease.store import HolderLock, LeaseStore, NoLock
from llmgw.lease.timings import LeaseTimings
from llmgw.store.connection import Claim

OnLead = Callable[[int], Awaitable[None]]
OnEnd = Callable[[bool], Awaitable[None]]


@attrs.frozen
class Candidacy:
    """With what a control plane competes. `place` names where the record is, for people; `known_epoch` the highest epoch that
    the store's data has met."""

    me: Candidate
    store: LeaseStore
    data_dir: Path
    lock: HolderLock = attrs.field(factory=NoLock)
    timings: LeaseTimings = LeaseTimings()
    place: str = ""
    known_epoch: int = 0
    protect: Rules = rules.RULES  # only a test replaces one

    @classmethod
    def sole(cls, cluster_id: ClusterId, owner: OwnerId, data_dir: Path, known_epoch: int = 0) -> Candidacy:
        """Nobody else can compete: it leads by definition."""
        return cls(Candidate(cluster_id, owner, boot_id=""), SoleStore(cluster_id), data_dir, known_epoch=known_epoch)


class Leadership:
    """`begin(claim)` makes the store ready to be written under a new epoch, before it is used; raises StaleEpoch.

    `heard()` returns (nodes heard, nodes that count), for the powers of an unconfirmed claim. `outage` tells of a lease's store
    that does not answer.
    """

    def __init__(
        self,
        machine: Machine,
        candidacy: Candidacy,
        begin: Callable[[Claim], Awaitable[None]],
        heard: Callable[[], tuple[int, int]],
        outage: Outage | None = None,
    ) -> None:
        self._begin = begin
        self._heard = heard
        self._on_lead: list[OnLead] = []
        self._on_end: list[OnEnd] = []
        self.cluster_id = candidacy.me.cluster_id
        self._keeper = LeaseKeeper(
            machine,
            candidacy.store,
            candidacy.me,
            candidacy.timings,
            self,
            candidacy.data_dir,
            lock=candidacy.lock,
            place=candidacy.place,
            known_epoch=candidacy.known_epoch,
            protect=candidacy.protect,
            outage=outage,
        )

    # --- what the claim is

    @property
    def owner(self) -> OwnerId:
        return self._keeper.owner

    @property
    def is_leader(self) -> bool:
        return self._keeper.is_leader

    @property
    def may_write(self) -> bool:
        """Is there an epoch to write under: this process leads, or gets ready to? The store compares it again at each write."""
        return self._keeper.view.phase in state.HOLDS

    @property
    def epoch(self) -> int:
        """The epoch held; 0 while this control plane holds none, which no store takes a write under."""
        return self._keeper.epoch

    @property
    def token(self) -> FencingToken:
        """What goes with every command. Raises Unavailable while this control plane does not lead."""
        if not self.is_leader:
            raise Unavailable("this control plane does not lead", code="not_leader")
        return FencingToken(self.cluster_id, self.epoch, self.owner)

    @property
    def record(self) -> LeaseRecord | None:
        """Who leads, as far as the lease's store has shown."""
        return self._keeper.record

    @property
    def store_silent(self) -> bool:
        """Does the lease's store not answer this control plane now?"""
        return self._keeper.silent_since_s is not None

    @property
    def transitions(self) -> int:
        """How often this process has begun to lead."""
        return self._keeper.transitions

    @property
    def changed(self) -> trio.Event:
        """Replaced at each change of role, epoch or holder."""
        return self._keeper.changed

    def role(self, now_s: float) -> LeaseRole:
        return self._keeper.lease_role(now_s)

    def seconds_left(self, now_s: float) -> float:
        """Until CONFIRMED ends unless the lease is renewed; 0 for everybody else."""
        return self._keeper.seconds_left(now_s)

    def power(self, now_s: float) -> Power | None:
        """What the claim may do at this instant; None while it does not lead."""
        return self._keeper.power(now_s)

    def confirmed(self, now_s: float) -> bool:
        """Is the right to lead proven at this instant? Asked at each use, never kept."""
        return self._keeper.confirmed(now_s)

    def allows(self, action: Action, now_s: float) -> bool:
        power = self.power(now_s)
        return power is not None and powers.allows(power, action, *self._heard())

    # --- what hooks in, and what it is told

    def on_lead(self, hook: OnLead) -> None:
        """`hook(epoch)` re-reads what a leader before may have changed. Run one after another before the first plan."""
        self._on_lead.append(hook)

    def on_end(self, hook: OnEnd) -> None:
        """`hook(fenced)` ends what belongs to a term, before the lease is released; `fenced`: somebody else leads already."""
        self._on_end.append(hook)

    def met(self, epoch: int, owner: str = "") -> None:
        """An agent, a router or the store reported this epoch. One that is not below ours, from elsewhere, makes us acquire above it."""
        self._keeper.met(epoch, owner)

    def beat(self) -> None:
        """The work loop came round; a leader whose loop does not for a ttl loses office."""
        self._keeper.beat()

    def look(self) -> None:
        """Another control plane says that it has let go of the lease."""
        self._keeper.look()

    def peers(self, seen: PeerView) -> None:
        """What is heard here, and what the best of the other control planes hears; every second or two."""
        self._keeper.peers(seen)

    # --- running

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keeps or seeks the lease until it was left, or until cancelled, which releases nothing.

        Says started() once it is known whether this control plane leads or follows, or that the lease's store does not answer.
        """
        async with trio.open_nursery() as nursery:
            await nursery.start(self._keeper.run)
            while not self._settled():
                await self._keeper.stepped.wait()
            task_status.started()

    def _settled(self) -> bool:
        view = self._keeper.view
        if view.phase is not Phase.FOLLOW:
            return view.phase in (Phase.LEADING, Phase.LEFT)
        return (
            view.in_flight is None
            and view.chance is None
            and (view.seen is not None or view.silent_since_s is not None or view.failures > 0 or bool(view.trouble))
        )

    async def warm(self, term: Term) -> None:
        """The keeper calls this when the lease is taken: everything that the first plan needs."""
        record = term.record
        await self._begin(
            Claim(
                record.cluster_id,
                record.epoch,
                record.owner,
                record.tenure,
                record.base,
                record.settings_version,
                term.progress,
                self._keeper.prove,
                self._publish,
            )
        )
        for hook in self._on_lead:
            await hook(term.epoch)

    async def _publish(self, base: str, settings_version: int) -> None:
        await self._keeper.publish(Desk(base, settings_version))

    async def end(self, term: Term, fenced: bool) -> None:
        """The keeper calls this when a term is over, before anything is released."""
        for hook in self._on_end:
            await hook(fenced)

    def step_down(self) -> None:
        """Leaving: this process never leads again. Called before agents are let go; `wait_left` waits until the lease is free."""
        self._keeper.step_down()

    async def wait_left(self) -> None:
        await self._keeper.wait_left()

    def hand_over(self, *, force: bool = False) -> None:
        """Release and stay. A lone control plane has nobody to hand over to: with `force` it takes a new epoch itself.

        Raises Conflict without force.
        """
        self._keeper.hand_over(force=force)

    def bar(self, why: str) -> None:
        """This control plane may not lead; "" when it may. A term that has begun goes on."""
        self._keeper.bar(why)

    def stand_back(self, for_s: float) -> None:
        """Leave a released lease to others for so many seconds. One that expires, or that nobody takes for 3 s, is taken all the same."""
        self._keeper.stand_back(for_s)
