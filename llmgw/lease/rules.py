"""The rules that protect an invariant, a function each (control.md 2.1). Pure; a test that replaces one shows that it matters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import attrs

from llmgw.domain.ids import OwnerId
from llmgw.lease.record import Attempt, LeaseRecord, RecordState
from llmgw.lease.timings import LeaseTimings

DISK_FAILURES: Final = 3  # renewals in a row at which the local disk refused (rule 7)
UNTAKEN_S: Final = 3.0  # chosen: a standby that was told takes a released lease within 0.2 s, one that was not within its poll of 1 s


def lock_name(owner: OwnerId, tenure: str) -> str:
    return f"{owner} {tenure}"


def holder_valid_until_s(timings: LeaseTimings, sent_s: float, received_s: float, ttl_s: float) -> float:
    """A holder counts from before it sent the write that succeeded (rule 2)."""
    return sent_s + timings.valid_s(ttl_s)


def silence_from_s(sent_s: float, received_s: float) -> float:
    """A candidate counts from after it received the record that it saw change (rule 2)."""
    return received_s


def wait_for_s(timings: LeaseTimings, record: LeaseRecord | None) -> float:
    """How long nothing may change before the lease is taken. The record's own ttl judges it (rule 2)."""
    return timings.wait_s(timings.ttl_s if record is None else record.ttl_s)


def silence_after_failure(since_s: float | None) -> float | None:
    """Silence counts over an unbroken run of answers only: a blip that hits all alike deposes nobody (rule 2)."""
    return None


def next_epoch(record: LeaseRecord | None, floor: int) -> int:
    """Above the record, this machine's epoch file and whatever agents and routers have met (rule 3)."""
    return 1 + max(0 if record is None else record.epoch, floor)


def own_attempt(record: LeaseRecord, doubt: tuple[Attempt, ...]) -> Attempt | None:
    """The attempt of unknown outcome that wrote this record: it had succeeded, and counts from when it was sent (rule 4)."""
    for attempt in doubt:
        if attempt.new.write_id == record.write_id:
            return attempt
    return None


def deposed_by(record: LeaseRecord, held: LeaseRecord) -> bool:
    """Only proof deposes (rule 4). Somebody who writes under our very tenure is a clone of this process, or its executor."""
    if record.deposes(held):
        return True
    return record.epoch == held.epoch and record.seq >= held.seq and record.write_id != held.write_id


def fenced_after_failures(failures: int) -> bool:
    """A store that cannot be reached is not evidence that somebody else leads, however often it is asked (rule 4)."""
    return False


def release_of(held: LeaseRecord, write_id: str) -> LeaseRecord:
    """A release writes, and keeps the epoch (rule 1)."""
    return attrs.evolve(held, seq=held.seq + 1, write_id=write_id, state=RecordState.RELEASED)


def works(now_s: float, beat_s: float, ttl_s: float) -> bool:
    """Renewal is skipped when the work has not beaten for a ttl, so that a wedged leader loses office (rule 6)."""
    return now_s - beat_s <= ttl_s


def dead_holder(record: LeaseRecord) -> str | None:
    """The name that a free lock must carry before it proves that this holder is dead (rule 9).

    A lock that carries another name was never this holder's: it may lead without, while a frozen predecessor keeps the lock.
    """
    return lock_name(record.owner, record.tenure)


def must_rise(met: int, held: int) -> bool:
    """An epoch as high as ours was met, of somebody else: nobody obeys us before ours is above it (rule 5)."""
    return met >= held


def disk_gives_up(failures: int, peers_fit: bool) -> bool:
    """The local disk refused renewals in a row: hand over if somebody is there who can do better, else go on (rule 7)."""
    return failures >= DISK_FAILURES and peers_fit


def deaf(heard: int, peer_heard: int) -> bool:
    """Does a peer hear more than twice the nodes that this leader hears (rule 8)?"""
    return heard * 2 < peer_heard


def released_is_free(now_s: float, yield_until_s: float) -> bool:
    """Anybody takes a released record at once, but whoever handed over or stands back lets the others go first (control.md 2)."""
    return now_s >= yield_until_s


def untaken(silence_s: float) -> bool:
    """A released record that nobody took is taken by whoever lets others go first, too: with no leader at all, nothing heals."""
    return silence_s >= UNTAKEN_S


def last_run(me_boot_id: str, record_boot_id: str) -> bool:
    """Did the holder die with an earlier run of this machine? Not where the kernel tells no boot id."""
    return bool(me_boot_id and record_boot_id) and me_boot_id != record_boot_id


@attrs.frozen
class Rules:
    """What protects an invariant, a field each. Nothing but a test replaces one."""

    holder_valid_until_s: Callable[[LeaseTimings, float, float, float], float] = holder_valid_until_s
    silence_from_s: Callable[[float, float], float] = silence_from_s
    wait_for_s: Callable[[LeaseTimings, LeaseRecord | None], float] = wait_for_s
    silence_after_failure: Callable[[float | None], float | None] = silence_after_failure
    next_epoch: Callable[[LeaseRecord | None, int], int] = next_epoch
    own_attempt: Callable[[LeaseRecord, tuple[Attempt, ...]], Attempt | None] = own_attempt
    deposed_by: Callable[[LeaseRecord, LeaseRecord], bool] = deposed_by
    fenced_after_failures: Callable[[int], bool] = fenced_after_failures
    release_of: Callable[[LeaseRecord, str], LeaseRecord] = release_of
    works: Callable[[float, float, float], bool] = works
    dead_holder: Callable[[LeaseRecord], str | None] = dead_holder
    must_rise: Callable[[int, int], bool] = must_rise
    disk_gives_up: Callable[[int, bool], bool] = disk_gives_up
    deaf: Callable[[int, int], bool] = deaf
    released_is_free: Callable[[float, float], bool] = released_is_free
    untaken: Callable[[float], bool] = untaken
    last_run: Callable[[str, str], bool] = last_run


RULES: Final = Rules()
