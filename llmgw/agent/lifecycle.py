"""The life of one replica on its node, as pure rules: which state comes next, when a start is tried again, when it is given up.

States move only as `domain.replica.MOVES` says, and only here. This module starts nothing and reads no clock.
"""

from __future__ import annotations

import enum
from typing import Final

import attrs

from llmgw.domain.replica import ReplicaState, RestartPolicy, may_move

S = ReplicaState

LIVE = frozenset({S.STARTING, S.LOADING, S.READY, S.DRAINING})  # a process may exist
OVER = frozenset({S.STOPPED, S.FAILED})  # none exists, and none will without a new command
FAILURE_LINE_MAX: Final = 200  # characters; the report carries the last lines whole


class Want(enum.Enum):
    """What is to become of the replica; an order's wish outlives the agent."""

    RUN = "run"
    STOP = "stop"


@attrs.frozen
class Life:
    """Where a replica is.

    `attempt` counts every start of its life and names the log file; `tries` counts starts in a row, and being ready for the
    policy's `reset_after_s` sets it back. `failure` is how the try before this one ended, until this one is ready. `since_s` is
    when `state` or `reason` last changed, `start_at_s` when the next attempt is due (STARTING only). `exit_code` None in FAILED:
    unknown. `in_rotation` is False while ready but not to be used.
    """

    state: ReplicaState = S.PENDING
    reason: str = ""
    since_s: float = 0.0
    attempt: int = 0
    tries: int = 0
    start_at_s: float = 0.0
    in_rotation: bool = True
    exit_code: int | None = None
    want: Want = Want.RUN
    failure: str = ""

    @property
    def over(self) -> bool:
        return self.state in OVER


def _moved(life: Life, state: ReplicaState, reason: str, now_s: float) -> Life:
    assert may_move(life.state, state), f"{life.state} -> {state}"
    return attrs.evolve(life, state=state, reason=reason, since_s=now_s)


def ordered(life: Life, now_s: float) -> Life:
    """A new command starts it: a first time, or again after a failure, with a fresh count of tries."""
    fresh = attrs.evolve(_anew(life, now_s), want=Want.RUN)
    return _moved(fresh, S.STARTING, "", now_s)


def _anew(life: Life, now_s: float) -> Life:
    """A next attempt, due now, with a fresh count of tries."""
    return attrs.evolve(life, tries=1, attempt=life.attempt + 1, start_at_s=now_s, exit_code=None, in_rotation=True, failure="")


def spawned(life: Life, now_s: float) -> Life:
    """The process of this attempt exists."""
    return _moved(life, S.LOADING, "", now_s)


def probing(life: Life, now_s: float) -> Life:
    """The readiness path has answered and the first probe is under way."""
    assert life.state is S.LOADING
    return attrs.evolve(life, reason="probing", since_s=now_s)


def proved(life: Life, now_s: float) -> Life:
    """It did its work once."""
    return attrs.evolve(_moved(life, S.READY, "", now_s), in_rotation=True, failure="")


def benched(life: Life, reason: str, now_s: float) -> Life:
    """Ready, but routers must not choose it, and why."""
    assert life.state is S.READY
    return attrs.evolve(life, in_rotation=False, reason=reason, since_s=now_s)


def returned(life: Life, now_s: float) -> Life:
    """Back from the bench."""
    assert life.state is S.READY
    return attrs.evolve(life, in_rotation=True, reason="", since_s=now_s)


def ended(life: Life, policy: RestartPolicy, reason: str, exit_code: int | None, now_s: float, last_line: str = "") -> Life:
    """An attempt is over and its whole tree is gone: the next one is due after the back-off, or the attempts are used up.

    `last_line` is what it wrote last. The result is STARTING with `start_at_s`, or FAILED. Being ready for long enough before
    forgives earlier failures.
    """
    assert life.state in (S.STARTING, S.LOADING, S.READY)
    rested = life.state is S.READY and life.in_rotation and now_s - life.since_s >= policy.reset_after_s
    tries = (0 if rested else life.tries) + 1
    life = attrs.evolve(life, failure=f"{reason}: {last_line[:FAILURE_LINE_MAX]}" if last_line else reason)
    if tries > policy.attempts:
        return attrs.evolve(_moved(life, S.FAILED, reason, now_s), exit_code=exit_code, in_rotation=True)
    again = _moved(life, S.STARTING, reason, now_s)
    delay_s = policy.delay_s(tries)
    return attrs.evolve(again, tries=tries, attempt=life.attempt + 1, start_at_s=now_s + delay_s, exit_code=exit_code, in_rotation=True)


def restarted(life: Life, reason: str, now_s: float) -> Life:
    """A command starts it anew in place, with a fresh count; its tree is gone already."""
    return _anew(_moved(life, S.STARTING, reason, now_s), now_s)


def stopping(life: Life, reason: str, now_s: float) -> Life:
    """A command ends it. From now on nothing restarts it. In a state that is over already only STOPPED is left."""
    if life.state in (S.DRAINING, S.STOPPED):
        return attrs.evolve(life, want=Want.STOP)
    return attrs.evolve(_moved(life, S.DRAINING, reason, now_s), want=Want.STOP)


def stopped(life: Life, now_s: float) -> Life:
    """Its whole tree is gone."""
    return attrs.evolve(_moved(life, S.STOPPED, life.reason, now_s), in_rotation=True)
