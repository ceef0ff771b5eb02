"""The next thing to do about the lease, and the view once it has begun. Pure."""

from __future__ import annotations

import attrs

from llmgw.lease.actions import Action, Draw, DrawOwner, EndWork, LetGoLock, Read, Replace, StartWork, Stop, StoreEpoch, TakeLock, Wait
from llmgw.lease.record import Attempt, LeaseRecord
from llmgw.lease.rules import lock_name
from llmgw.lease.state import FOREVER, WARM_BUDGET_S, Chance, LeaseView, Locking, Phase, Reading, Work, change, give_up, gone, move


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
        return (gone(view, now_s), Wait(now_s)) if view.leaving else (view, DrawOwner())
    if isinstance(view.in_flight, Locking):
        return view, Wait(FOREVER)
    if view.lock:
        return change(view, lock=""), LetGoLock()
    return view, Stop()  # a request that hangs is no reason to stay: whatever it brings, nobody here leads by it


def _decide_to_follow(view: LeaseView, now_s: float, draw: Draw) -> tuple[LeaseView, Action]:
    if view.leaving and (now_s >= view.release_until_s or not (view.doubt or view.in_flight)):
        return move(view, Phase.LEFT), Wait(now_s)
    if view.in_flight is not None:
        return view, Wait(view.release_until_s)
    chance = view.chance
    if chance is not None and not view.read_due and not view.barred:
        tenure = chance.tenure or draw.tenure
        if view.me.one_machine and not chance.tenure:
            # Named before it is written who holds: whoever finds the lock free under this name knows that we are dead.
            name = lock_name(view.me.owner, tenure)
            if_named = view.rules.dead_holder(chance.expected) if chance.by_lock and chance.expected is not None else None
            view = change(view, chance=Chance(chance.expected, tenure, chance.by_lock), in_flight=Locking(name))
            return view, TakeLock(name, if_named)
        attempt = Attempt(chance.expected, _acquisition(view, chance.expected, tenure, draw.write_id), now_s)
        view = move(view, Phase.ACQUIRING) if view.phase is Phase.FOLLOW else view
        return change(view, chance=None, in_flight=attempt), Replace(attempt)
    if view.lock and not view.doubt:
        return change(view, lock=""), LetGoLock()
    if now_s >= view.next_s:
        return _read(view, now_s)
    return view, Wait(min(view.next_s, view.release_until_s))


def _decide_to_hold(view: LeaseView, now_s: float, draw: Draw) -> tuple[LeaseView, Action]:
    held = view.held
    assert held is not None, "a holder holds"
    if view.phase is Phase.WARMING:
        if not view.stored and not view.storing:
            return change(view, storing=True), StoreEpoch(held)
        if view.stored and view.work_epoch != held.epoch:
            begun = change(view, work=Work.RUNS, work_epoch=held.epoch, warm_until_s=now_s + WARM_BUDGET_S)
            return begun, StartWork(held)
        if now_s >= view.warm_until_s:
            return give_up(view, f"it was not ready to lead after {WARM_BUDGET_S:g} s", now_s), Wait(now_s)
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
        return change(view, chance=None, in_flight=attempt), Replace(attempt)
    if view.phase is Phase.LEADING and not view.rules.works(now_s, view.beat_s, held.ttl_s):
        view, action = _read(view, now_s)  # so that it learns of its successor
        return change(view, renew_at_s=now_s + view.timings.renew_s), action
    name = lock_name(held.owner, held.tenure)
    if view.me.one_machine and not view.lock_asked:
        # A predecessor that is frozen may have kept it, a candidate had it for a moment, or somebody has deleted its file: tried
        # once at each renewal.
        return change(view, in_flight=Locking(name)), TakeLock(name, None)
    attempt = Attempt(held, _renewal(view, held, draw.write_id), now_s)
    return change(view, in_flight=attempt), Replace(attempt)


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
        return gone(view, now_s), Wait(now_s)  # it expires
    if view.in_flight is not None:
        return view, Wait(view.release_until_s if view.leaving else FOREVER)
    if now_s < view.next_s:
        return view, Wait(min(view.next_s, view.release_until_s))
    if view.read_due:
        return _read(view, now_s)
    attempt = Attempt(held, view.rules.release_of(held, draw.write_id), now_s)
    return change(view, in_flight=attempt), Replace(attempt)


def _end_work(view: LeaseView, *, fenced: bool) -> tuple[LeaseView, Action]:
    assert view.held is not None
    return change(view, work=Work.ENDING), EndWork(view.held, fenced)


def _read(view: LeaseView, now_s: float) -> tuple[LeaseView, Action]:
    return change(view, in_flight=Reading(now_s), read_due=False), Read()


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
