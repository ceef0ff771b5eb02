"""The task that keeps or seeks the lease: carries out what `decide` says, and tells `digest` what came of it.

It alone writes the record, with one request in flight. It decides nothing: what the claim is worth is asked of `state` at
each use. What is done under the lease belongs to the `LeaseWork` it is given.

    keeper = LeaseKeeper(machine, store, me, timings, work, data_dir, lock=..., place=..., known_epoch=...)
    await nursery.start(keeper.run)      # until it left, or is cancelled, which releases nothing (a crash does no more)

Asked at each use, never kept:  `is_leader` `power(now_s)` `confirmed(now_s)` `lease_role(now_s)` `seconds_left(now_s)`
                                `epoch` `owner` `record` (who leads), `changed` (an event, replaced at each change)
Told, plain calls at any time:  `beat()` by the work loop, at least once a ttl · `met(epoch, owner)` for every StaleEpoch, and
                                every epoch that an agent or a router names · `peers(PeerView)` every second or two ·
                                `look()` when somebody says that the record has changed · `stand_back(for_s)` by one that another
                                should lead in place of · `bar(why)` of one that may not lead at all
Asked for, plain calls:         `step_down()`, then `await wait_left()`, then cancel `run` · `hand_over(force=...)`
Waited for:                     `prove(epoch)` a read sent from now on shows the lease as ours · `publish(Desk)`
Called, never two at once:      `work.warm(term)` at each epoch won, powers begin when it returns · `work.end(term, fenced)`
                                when the term is over, before anything is released; 5 s, then `run` raises Broken
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

import attrs
import structlog
import trio

from llmgw.domain.errors import Broken, Conflict, Invalid, LlmgwError, StaleEpoch, Unavailable
from llmgw.domain.files import words
from llmgw.domain.ids import OWNER_RANDOM_BYTES, OwnerId, holder_name, owner_id
from llmgw.domain.lease import LeaseRole, Power
from llmgw.domain.ports import Machine
from llmgw.lease import actions, events, rules, state
from llmgw.lease.actions import Draw
from llmgw.lease.decide import decide
from llmgw.lease.digest import step
from llmgw.lease.epoch_file import EPOCH_FILE, read_epoch, write_epoch
from llmgw.lease.outage import LEASE_FAULT, Outage, Part
from llmgw.lease.owner_file import OWNER_FILE, write_owner
from llmgw.lease.record import RANDOM_BYTES, ROLE, Attempt, LeaseRecord
from llmgw.lease.rules import Rules
from llmgw.lease.state import Candidate, Desk, LeaseView, PeerView, Phase
from llmgw.lease.store import HolderLock, LeaseStore, Lost, NoLock, Unknown
from llmgw.lease.timings import LeaseTimings

WORK_END_S_MAX: Final = 5.0  # what was done as a leader must have ended by then, or the process ends (control.md 2.1)
log = structlog.get_logger("llmgw.lease")


@attrs.frozen
class Term:
    """A time of holding the lease under one epoch. `progress()` asks for more time to get ready: a large restore."""

    record: LeaseRecord
    progress: Callable[[], None] = attrs.field(eq=False, repr=False)

    @property
    def epoch(self) -> int:
        return self.record.epoch

    @property
    def owner(self) -> OwnerId:
        return self.record.owner


class LeaseWork(Protocol):
    """What is done under the lease. Never two calls at once."""

    async def warm(self, term: Term) -> None:
        """Gets ready to lead under `term`; the claim has powers once it has returned. Cancelled when the term ends before.

        A term after another without `end` between them is a higher epoch of the same holder: what belongs to the old one is
        replaced. Raises StaleEpoch for an epoch met that is not below ours, anything else when it cannot get ready.
        """
        ...

    async def end(self, term: Term, fenced: bool) -> None:
        """Ends everything that was done under `term`, also when `warm` was cut short. `fenced`: somebody else leads already."""
        ...


@attrs.define(eq=False)
class _Proof:
    """Somebody waits for a read that is sent after this was made."""

    epoch: int
    done: trio.Event = attrs.Factory(trio.Event)
    record: LeaseRecord | None = None
    failed: str = ""


class LeaseKeeper:
    """One candidate for the lease. Everything but `run`, `prove`, `publish` and `wait_left` is a plain call that may come any time.

    `place` is where the record is, for the owner file; `known_epoch` the highest epoch that the store's data has met; `outage`
    tells of a store that does not answer, together with whoever else uses that storage. Whoever runs it calls `step_down`, waits
    for `wait_left` and only then cancels `run`.
    """

    def __init__(
        self,
        machine: Machine,
        store: LeaseStore,
        me: Candidate,
        timings: LeaseTimings,
        work: LeaseWork,
        data_dir: Path,
        *,
        lock: HolderLock | None = None,
        place: str = "",
        role: str = ROLE,
        known_epoch: int = 0,
        protect: Rules = rules.RULES,
        outage: Outage | None = None,
    ) -> None:
        self._machine = machine
        self._store = store
        self._lock = lock or NoLock()
        self._work = work
        self._outage = outage or Outage()
        self._role = role
        self._place = place
        self._epoch_file = data_dir / EPOCH_FILE
        self._owner_file = data_dir / OWNER_FILE
        self._view = state.first_view(me, timings, floor=known_epoch, now_s=machine.now_s(), rules=protect)
        self._told: tuple[Phase, LeaseRole, int, str] = (Phase.FOLLOW, LeaseRole.FOLLOW, 0, "")
        self._trouble = ""
        self._not_ready = self._lock_trouble = ""  # what was told last
        self._told_no_record = False
        self._silent_from_s: float | None = None  # the store has not answered since
        self._silent_to_writes = False  # what it did not answer was a write
        self._wake = trio.Event()
        self._stepped = trio.Event()  # replaced at each event
        self._left = trio.Event()
        self._proofs: list[_Proof] = []
        self._work_turn = trio.Lock()
        self._warming = trio.CancelScope()
        self._checking_disk = False
        self._runs = False
        self.transitions = 0  # how often this process has begun to lead
        self.changed = trio.Event()  # replaced at each change of role, epoch or holder

    # --- what the claim is

    @property
    def view(self) -> LeaseView:
        return self._view

    @property
    def stepped(self) -> trio.Event:
        """Replaced whenever the rules have digested anything."""
        return self._stepped

    @property
    def owner(self) -> OwnerId:
        """Drawn anew after a fence."""
        return self._view.me.owner

    @property
    def is_leader(self) -> bool:
        return self._view.phase is Phase.LEADING

    @property
    def epoch(self) -> int:
        """The epoch held; 0 while nothing is held."""
        return self._view.held.epoch if self._view.held is not None else 0

    @property
    def record(self) -> LeaseRecord | None:
        """The newest record that the store has shown: who leads, as far as this process knows."""
        return self._view.seen

    def lease_role(self, now_s: float) -> LeaseRole:
        return state.role(self._view, now_s)

    def power(self, now_s: float) -> Power | None:
        return state.power(self._view, now_s)

    def confirmed(self, now_s: float) -> bool:
        """Is the right to lead proven at this instant? Asked at each use, never kept."""
        return state.power(self._view, now_s) is Power.CONFIRMED

    def seconds_left(self, now_s: float) -> float:
        """Until CONFIRMED ends if no renewal comes; 0 for everybody else."""
        return max(0.0, self._view.valid_until_s - now_s) if self.is_leader else 0.0

    # --- what others tell it

    @property
    def silent_since_s(self) -> float | None:
        """Since when the lease's store has not answered; None while it does."""
        return self._silent_from_s

    def met(self, epoch: int, owner: str = "") -> None:
        """An agent, a router or the store has met this epoch; with our own owner at our own epoch that is no news."""
        if not (owner == self.owner and epoch == self.epoch):
            self._apply(events.MetEpoch(epoch))

    def beat(self) -> None:
        """The work loop came round. Without it for a ttl a leader is not renewed."""
        self._apply(events.Beat(), quiet=True)

    def look(self) -> None:
        """Somebody says that the record has changed: read it now and not at the next poll."""
        self._apply(events.ReadNow())

    def peers(self, seen: PeerView) -> None:
        """What is heard here and at the best of the healthy other control planes; every second or two."""
        self._apply(seen)

    def step_down(self) -> None:
        """Leave: this process never leads again. The claim has no powers from here on; `wait_left` waits for the rest."""
        self._apply(events.StepDown())

    def hand_over(self, *, force: bool = False) -> None:
        """Release and stand by. A lone control plane is refused, and with `force` takes a new epoch itself. Raises Conflict."""
        if self._view.phase not in state.HOLDS:
            raise Conflict("this control plane does not lead", code="not_leader")
        alone = not state.peers_fit(self._view, self._machine.now_s())
        if alone and not force:
            raise Conflict(
                "this is the only control plane: there is nobody to hand over to (--force takes a new epoch)", code="lone_control_plane"
            )
        self._apply(events.HandOver(anew=alone))

    def stand_back(self, for_s: float) -> None:
        """Leave a released lease to others for so many seconds, whoever has it meanwhile. An expired one is not left, and a released
        one that nobody takes for UNTAKEN_S neither: no leader at all means that nothing heals."""
        self._apply(events.StandBack(for_s), quiet=True)

    def bar(self, why: str) -> None:
        """This control plane may not lead, for a reason beside the lease; "" when it may. A term that has begun goes on."""
        self._apply(events.Barred(why))

    async def wait_left(self) -> None:
        """Returns when, after `step_down`, the lease is released or given up. Under a few seconds, whatever the store does."""
        await self._left.wait()

    async def prove(self, epoch: int) -> None:
        """Returns when a read sent after this call has shown the lease to be ours under `epoch`. Raises StaleEpoch, Unavailable."""
        if not state.may_prove(self._view):
            raise Unavailable("this control plane does not hold the lease", code="lease_unproven")
        proof = _Proof(epoch)
        self._proofs.append(proof)
        self._apply(events.ReadNow())
        await proof.done.wait()
        if proof.failed:
            raise Unavailable(proof.failed, code="lease_unproven")
        held, shown = self._view.held, proof.record
        if held is None or shown is None or held.epoch != epoch or (shown.epoch, shown.tenure) != (epoch, held.tenure):
            now = shown or held
            raise StaleEpoch(f"epoch {epoch} no longer holds the lease", epoch=now.epoch if now else 0, owner=now.owner if now else "")

    async def publish(self, desk: Desk) -> None:
        """Returns when the record says this beside who leads. Raises Unavailable when the lease is let go of or lost before."""
        held = self._view.held
        epoch = held.epoch if held is not None else 0
        self._apply(events.Publish(desk))
        while True:
            held = self._view.held
            if held is None or held.epoch != epoch or self._view.phase not in state.HOLDS:
                raise Unavailable("the lease is no longer held under the epoch that this was for", code="lease_unproven")
            if not self._runs:
                raise Unavailable("this control plane no longer keeps the lease", code="lease_unproven")
            if (held.base, held.settings_version) == (desk.base or held.base, desk.settings_version or held.settings_version):
                return
            await self._stepped.wait()

    # --- the loop

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keeps or seeks the lease until it was left, or until cancelled, which releases nothing.

        Says started() once the epoch file is read. Raises Invalid for one that holds junk, OSError and, in a group, Broken when
        what was done under a lost lease did not end, and whatever `work.end` raised.
        """
        epoch = await self._machine.run_sync(lambda: read_epoch(self._machine.disk, self._epoch_file))
        self._view = attrs.evolve(self._view, floor=max(self._view.floor, epoch))
        task_status.started()
        self._runs = True
        try:
            async with trio.open_nursery() as nursery:
                while True:
                    self._wake = trio.Event()
                    draw = Draw(self._machine.fresh_hex(RANDOM_BYTES), self._machine.fresh_hex(RANDOM_BYTES))
                    self._view, action = decide(self._view, self._machine.now_s(), draw)
                    self._tell()
                    match action:
                        case actions.Wait(until_s):
                            await self._wait(until_s)
                        case actions.Read():
                            nursery.start_soon(self._read)
                        case actions.Replace(attempt):
                            nursery.start_soon(self._replace, attempt)
                        case actions.TakeLock(name, if_named):
                            nursery.start_soon(self._take_lock, name, if_named)
                        case actions.LetGoLock():
                            await self._lock.let_go()
                        case actions.StoreEpoch(record):
                            nursery.start_soon(self._store_epoch, record)
                        case actions.StartWork(record):
                            self._warming.cancel()
                            self._warming = trio.CancelScope()
                            nursery.start_soon(self._warm, record, self._warming)
                        case actions.EndWork(record, fenced):
                            self._warming.cancel()
                            nursery.start_soon(self._end, record, fenced)
                        case actions.DrawOwner():
                            fresh = owner_id(holder_name(self.owner), self._machine.fresh_hex(OWNER_RANDOM_BYTES))
                            self._apply(events.Reborn(fresh))
                        case actions.Stop():
                            break
                self._left.set()  # before the end of a request that hangs
                nursery.cancel_scope.cancel()
        finally:
            # Whoever still waits for something of it is told, not left waiting.
            self._runs = False
            self._fail_proofs("this control plane no longer keeps the lease")
            self._stepped.set()

    async def _wait(self, until_s: float) -> None:
        if self.confirmed(self._machine.now_s()):
            until_s = min(until_s, self._view.valid_until_s)  # only so that others hear that CONFIRMED is over
        if math.isinf(until_s):
            await self._wake.wait()
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._alarm, until_s, nursery.cancel_scope)
            await self._wake.wait()
            nursery.cancel_scope.cancel()

    async def _alarm(self, until_s: float, scope: trio.CancelScope) -> None:
        await self._machine.sleep_until(until_s)
        scope.cancel()

    async def _read(self) -> None:
        proofs, self._proofs = self._proofs, []  # whoever asks from here on needs a later read
        outcome: events.Event = events.Unknown()
        trouble: Unknown | None = _SILENT
        record = None
        try:
            with trio.move_on_after(self._view.timings.request_timeout_s):
                try:
                    record = await self._store.read(self._role)
                    outcome, trouble = events.Answered(record, self._machine.rng.random()), None
                except (Unknown, Invalid) as err:
                    outcome, trouble = _unknown(err)
        finally:
            for proof in proofs:
                proof.record, proof.failed = record, "" if trouble is None else trouble.why
                proof.done.set()
        wrote = record is not None and self._view.seen is not None and record.write_id != self._view.seen.write_id
        self._outcome(outcome, trouble, of_write=False, takes_writes=wrote)

    async def _replace(self, attempt: Attempt) -> None:
        outcome: events.Event = events.Unknown()
        trouble: Unknown | None = _SILENT
        with trio.move_on_after(self._view.timings.request_timeout_s):
            try:
                await self._store.replace(self._role, attempt.expected, attempt.new)
                outcome, trouble = events.Done(), None
            except Lost as err:
                outcome, trouble = events.Answered(err.current, self._machine.rng.random()), None
            except (Unknown, Invalid) as err:
                outcome, trouble = _unknown(err)
        self._outcome(outcome, trouble, of_write=True, takes_writes=True)
        held = self._view.held
        if self._view.phase in state.HOLDS and held is not None and held.tenure == attempt.new.tenure and not _of_local_disk(outcome):
            await self._check_disk(attempt.new)

    def _outcome(self, outcome: events.Event, trouble: Unknown | None, *, of_write: bool, takes_writes: bool) -> None:
        """`takes_writes`: an answer shows that writes get through. One that was only read ends no silence to writes."""
        if trouble is not None:
            self._silent_to_writes |= of_write
            if self._silent_from_s is None:
                self._silent_from_s = self._machine.now_s()
            self._outage.failed(Part.LEASE, trouble.why, self._silent_from_s, event=LEASE_FAULT if trouble.fault else "")
        elif self._silent_from_s is not None and (takes_writes or not self._silent_to_writes):
            self._outage.works(Part.LEASE, self._machine.now_s())
            self._silent_from_s, self._silent_to_writes = None, False
        self._apply(outcome)
        self._tell_if_no_record()

    def _tell_if_no_record(self) -> None:
        """Data whose lease has no record yet is waited with for as long as somebody may lead it who has not been seen."""
        view = self._view
        if view.seen is not None or view.trouble:
            self._told_no_record = False
        elif view.phase is Phase.FOLLOW and view.silent_since_s is not None and view.chance is None and not self._told_no_record:
            self._told_no_record = True
            log.info(
                "no lease is known of this store yet; it is waited for, in case somebody leads",
                wait_s=round(view.rules.wait_for_s(view.timings, None), 1),
                why="the store has data, and nobody's lease beside it says that its last leader is gone",
            )

    async def _check_disk(self, record: LeaseRecord) -> None:
        """A small write that is synced, once a renewal: a leader whose own disk is full or gone makes room for another."""
        if self._checking_disk:
            return
        self._checking_disk = True
        try:
            await self._machine.run_sync(lambda: write_owner(self._machine.disk, self._owner_file, record, self._role, self._place))
        except OSError as err:
            self._outage.failed(Part.DATA_DIR, words(err), self._machine.now_s())
            self._apply(events.LocalDiskFailed())
        else:
            self._outage.works(Part.DATA_DIR, self._machine.now_s())
            self._apply(events.LocalDiskFine())
        finally:
            self._checking_disk = False

    async def _take_lock(self, name: str, if_named: str | None) -> None:
        try:
            taken = await self._lock.take(name, if_named)
        except OSError as err:  # it only makes a takeover faster; without it the ttl decides
            why = err.strerror or str(err)
            if why != self._lock_trouble:
                log.warning("the holder's lock cannot be used; a takeover after a crash waits for the ttl", why=why)
            self._lock_trouble, taken = why, False
        else:
            self._lock_trouble = ""
        self._apply(events.LockAnswered(taken))

    async def _store_epoch(self, record: LeaseRecord) -> None:
        def work() -> None:
            write_epoch(self._machine.disk, self._epoch_file, record.epoch)
            write_owner(self._machine.disk, self._owner_file, record, self._role, self._place)

        try:
            await self._machine.run_sync(work)
        except (OSError, LlmgwError) as err:
            why = words(err) if isinstance(err, OSError) else str(err)
            log.warning("the epoch could not be written to the local disk", epoch=record.epoch, why=why)
            self._apply(events.EpochNotStored())
        else:
            self._apply(events.EpochStored())

    async def _warm(self, record: LeaseRecord, scope: trio.CancelScope) -> None:
        term = Term(record, lambda: self._apply(events.WarmProgress(record.epoch)))
        with scope:
            async with self._work_turn:
                try:
                    await self._work.warm(term)
                except Exception as err:
                    # Whatever it is, this process cannot lead now and another may. It is logged here, where its chain ends.
                    stale = _stale(err)
                    if stale is None and isinstance(err, LlmgwError):  # of the world, in words; told once for as long as it is the same
                        if err.message != self._not_ready:
                            log.warning("not ready to lead; the lease is given back", epoch=record.epoch, why=err.message)
                        self._not_ready = err.message
                    elif stale is None:
                        log.error("not ready to lead; the lease is given back", epoch=record.epoch, exc_info=err)
                    self._apply(events.WarmFailed(record.epoch, str(err) or type(err).__name__, 0 if stale is None else stale.epoch))
                else:
                    self._not_ready = ""
                    self._apply(events.Warmed(record.epoch))

    async def _end(self, record: LeaseRecord, fenced: bool) -> None:
        with trio.move_on_after(WORK_END_S_MAX) as scope:
            async with self._work_turn:
                await self._work.end(Term(record, lambda: None), fenced)
        clean = not scope.cancelled_caught
        if not clean and not self._view.leaving:
            raise Broken(f"what was done under epoch {record.epoch} did not end within {WORK_END_S_MAX:g} s of losing the lease")
        self._apply(events.WorkEnded(clean))

    # --- telling

    def _apply(self, event: events.Event, *, quiet: bool = False) -> None:
        self._view = step(self._view, event, self._machine.now_s())
        if quiet:
            return
        self._stepped.set()
        self._stepped = trio.Event()
        self._tell()
        self._wake.set()

    def _tell(self) -> None:
        """Logs transitions, and nothing else."""
        view, now_s = self._view, self._machine.now_s()
        role, held, seen = state.role(view, now_s), view.held, view.seen
        told = (view.phase, role, held.epoch if held else 0, seen.owner if seen else "")
        if view.trouble != self._trouble:
            self._trouble = view.trouble
            if view.trouble:
                log.warning("this control plane does not compete for the lease", why=view.trouble)
            else:
                log.info("this control plane competes for the lease again")
        if not state.may_prove(view):
            self._fail_proofs("this control plane does not hold the lease")
        if told == self._told:
            return
        before, self._told = self._told, told
        if view.phase is not before[0]:
            self._tell_phase(before[0], view, held, seen)
        elif told[3] != before[3] and view.phase is Phase.FOLLOW and seen is not None:
            log.debug("standing by", holder=seen.owner, epoch=seen.epoch, ttl_s=seen.ttl_s)
        self.changed.set()
        self.changed = trio.Event()

    def _fail_proofs(self, why: str) -> None:
        proofs, self._proofs = self._proofs, []
        for proof in proofs:
            proof.failed = why
            proof.done.set()

    def _tell_phase(self, before: Phase, view: LeaseView, held: LeaseRecord | None, seen: LeaseRecord | None) -> None:
        if view.phase is Phase.LEADING:
            self.transitions += 1
            log.info("leading", epoch=held.epoch if held else 0, owner=view.me.owner)
        elif view.phase is Phase.FENCED:
            # This process was too slow, and whatever made it slow is still true.
            log.warning(
                "the lease is lost", epoch=held.epoch if held else 0, to=seen.owner if seen else "", their_epoch=seen.epoch if seen else 0
            )
        elif view.phase is Phase.STEPPING_DOWN:
            log.info("letting go of the lease", epoch=held.epoch if held else 0, why=view.gave_up or "asked to")


_SILENT: Final = Unknown("the lease's store did not answer in time")


def _unknown(err: Unknown | Invalid) -> tuple[events.Event, Unknown]:
    trouble = err if isinstance(err, Unknown) else Unknown(err.message, fault=True)
    return events.Unknown(local_disk=trouble.local_disk), trouble


def _of_local_disk(outcome: events.Event) -> bool:
    return isinstance(outcome, events.Unknown) and outcome.local_disk


def _stale(err: BaseException) -> StaleEpoch | None:
    """The StaleEpoch that `err` is or, as a group, holds."""
    if isinstance(err, StaleEpoch):
        return err
    if isinstance(err, BaseExceptionGroup):
        return next((found for inner in err.exceptions if (found := _stale(inner)) is not None), None)
    return None
