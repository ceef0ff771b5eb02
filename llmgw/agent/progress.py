"""Is a ready engine alive? Judged by progress: by its own counters where it has them, else by what the routers see of it.

Pure: observations in, a verdict out. It asks nobody and reads no clock.
"""

from __future__ import annotations

import enum
from typing import Final

import attrs

from llmgw.agent.engines.description import Counters

FAILING_ANSWERS: Final = 5  # of the last 10 (agent.md 3)
SEEN_FRESH_S: Final = 30.0  # what routers said longer ago says nothing about now; three heartbeats
UNWELL_IN_A_ROW: Final = 3  # looks at the readiness path with a bad answer; one or two may be a hiccup of a busy engine
# An engine whose counters come from the loop that does its work tells none while that is stuck. The routers' view stands in then, as
# for one that has no counters. As long as what routers say is believed.
COUNTERS_FRESH_S: Final = SEEN_FRESH_S
PARDON_S: Final = 60.0  # how long old failures are overlooked after a return; ten answers come sooner unless there is hardly any traffic
PROOFS_TO_RETURN: Final = 3  # good probes in a row that end a bench for failing
UNANSWERED_IN_A_ROW: Final = 3  # attempts of the routers without a byte; as many as open their breakers by default


class Look(enum.Enum):
    """What a look at the readiness path brought."""

    GOOD = "good"
    BUSY = "busy"  # no answer in time: a busy engine is not a dead one
    BAD = "bad"  # an answer, and not a good one
    REFUSED = "refused"  # nothing listens: it is dead, whatever its process says


class Verdict(enum.Enum):
    FINE = "fine"
    SUSPECT = "suspect"  # ask it for one probe
    FAILING = "failing"  # take it out of rotation


@attrs.frozen
class Seen:
    """What the routers together saw, and when we heard it.

    `unanswered` attempts in a row brought no byte: refused or endless connects, broken connections, silence. `byte_s` is when a
    byte last came of the engine, None where none did.
    """

    in_flight: int
    silent_s: float
    answers: int
    failures: int
    heard_s: float
    unanswered: int = 0
    byte_s: float | None = None


@attrs.frozen
class Progress:
    """What is known of one ready engine.

    `moved_s` is when its counters last rose, or it had nothing to do; `counted_s` when it last told them; `answered_s` when it
    last answered a look, however badly. `forgiven`: the failures that routers still count from before it came back from the
    bench; they fall out of their last ten answers as new ones come. `excused`: the attempts without a byte that a good probe
    has answered for; only more of them are suspect again.
    """

    moved_s: float
    answered_s: float = attrs.field(default=attrs.Factory(lambda self: self.moved_s, takes_self=True))
    counters: Counters | None = None
    counted_s: float = 0.0
    seen: Seen | None = None
    bad_looks: int = 0
    forgiven: int = 0
    excused: int = 0
    pardoned_s: float = 0.0


def counted(progress: Progress, counters: Counters | None, now_s: float) -> Progress:
    """The engine's own counters; None (no answer in time) says nothing."""
    if counters is None:
        return progress
    before = progress.counters
    moved = counters.running == 0 or before is None or counters.progress != before.progress or before.running == 0
    return attrs.evolve(progress, counters=counters, counted_s=now_s, moved_s=now_s if moved else progress.moved_s)


def reported(progress: Progress, seen: Seen) -> Progress:
    """What routers saw."""
    forgiven, excused = min(progress.forgiven, seen.failures), min(progress.excused, seen.unanswered)
    return attrs.evolve(progress, seen=seen, forgiven=forgiven, excused=excused)


def looked(progress: Progress, look: Look, now_s: float) -> Progress:
    bad = progress.bad_looks + 1 if look is Look.BAD else 0
    return attrs.evolve(progress, bad_looks=bad, answered_s=progress.answered_s if look is Look.BUSY else now_s)


def worked(progress: Progress, now_s: float) -> Progress:
    """A probe succeeded: the clocks of suspicion start anew, and what routers said before it is out of date."""
    excused = progress.seen.unanswered if progress.seen else progress.excused
    return attrs.evolve(progress, moved_s=now_s, answered_s=now_s, bad_looks=0, seen=None, excused=excused)


def moved_since(progress: Progress, since_s: float) -> bool:
    """Did a byte of it reach a router after that? Then it works, though it found no time for a probe."""
    seen = progress.seen
    return seen is not None and seen.byte_s is not None and seen.byte_s > since_s


def pardoned(progress: Progress, now_s: float) -> Progress:
    """Back from the bench: old failures do not count against it, new ones do."""
    failures = progress.seen.failures if progress.seen else 0
    return attrs.evolve(worked(progress, now_s), forgiven=failures, pardoned_s=now_s)


def judge(progress: Progress, progress_limit_s: float, now_s: float) -> Verdict:
    """The engine's own counters are believed over the routers' view where it tells them and counts something as running.

    One that answers no look at all is busy for as long as bytes of it reach routers, and for `progress_limit_s` without.
    """
    seen = progress.seen if progress.seen and now_s - progress.seen.heard_s <= SEEN_FRESH_S else None
    forgiven = progress.forgiven if now_s - progress.pardoned_s <= PARDON_S else 0
    if seen and seen.failures >= FAILING_ANSWERS and seen.failures > forgiven:
        return Verdict.FAILING
    if progress.bad_looks >= UNWELL_IN_A_ROW:
        return Verdict.SUSPECT
    if seen and seen.unanswered >= UNANSWERED_IN_A_ROW and seen.unanswered > progress.excused:
        return Verdict.SUSPECT
    if now_s - progress.answered_s > progress_limit_s and not moved_since(progress, now_s - progress_limit_s):
        return Verdict.SUSPECT
    running = progress.counters.running if progress.counters is not None else 0
    still = running > 0 and now_s - progress.moved_s > progress_limit_s
    if running == 0 or now_s - progress.counted_s > COUNTERS_FRESH_S:
        still = still or (seen is not None and seen.in_flight > 0 and seen.silent_s > progress_limit_s)
    return Verdict.SUSPECT if still else Verdict.FINE
