"""The life of a replica as pure rules: any order of events keeps to the legal moves and to the policy."""

from __future__ import annotations

import attrs
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llmgw.agent import lifecycle
from llmgw.agent.lifecycle import Life, Want
from llmgw.domain.replica import ReplicaState, RestartPolicy, may_move

S = ReplicaState
POLICY = RestartPolicy(backoff_s=(1.0, 2.0, 4.0), attempts=4, reset_after_s=100.0)


def ready(at_s: float = 0.0) -> Life:
    return lifecycle.proved(lifecycle.probing(lifecycle.spawned(lifecycle.ordered(Life(), at_s), at_s), at_s), at_s)


def crash_until_over(life: Life) -> tuple[Life, list[float]]:
    delays = []
    while life.state is not S.FAILED:
        life = lifecycle.ended(lifecycle.spawned(life, 0.0), POLICY, "crashed", 1, 0.0)
        if life.state is S.STARTING:
            delays.append(life.start_at_s)
    return life, delays


def test_attempts_are_spaced_by_the_policy_and_used_up_after_its_count() -> None:
    life, delays = crash_until_over(lifecycle.ordered(Life(), 0.0))
    assert delays == [1.0, 2.0, 4.0]
    assert life.attempt == POLICY.attempts
    assert life.exit_code == 1


def test_being_ready_for_long_forgives_earlier_failures_and_being_ready_briefly_does_not() -> None:
    tired = attrs.evolve(ready(), tries=POLICY.attempts)
    assert lifecycle.ended(tired, POLICY, "crashed", 1, 99.0).state is S.FAILED
    rested = lifecycle.ended(tired, POLICY, "crashed", 1, 100.0)
    assert (rested.state, rested.tries) == (S.STARTING, 1)


def test_time_on_the_bench_is_no_rest() -> None:
    benched = lifecycle.benched(attrs.evolve(ready(), tries=POLICY.attempts), "failing", 0.0)
    assert lifecycle.ended(benched, POLICY, "failing", None, 500.0).state is S.FAILED


def test_a_command_after_a_failure_gives_all_attempts_anew_and_new_log_files() -> None:
    failed, _ = crash_until_over(lifecycle.ordered(Life(), 0.0))
    again, delays = crash_until_over(lifecycle.ordered(failed, 0.0))
    assert delays == [1.0, 2.0, 4.0]
    assert again.attempt == 2 * POLICY.attempts


def test_how_the_try_before_ended_is_kept_until_this_one_is_ready_or_a_command_comes() -> None:
    again = lifecycle.ended(lifecycle.ordered(Life(), 0.0), POLICY, "exited with code 1", 1, 0.0, "no memory")
    assert again.failure == "exited with code 1: no memory"
    loading = lifecycle.probing(lifecycle.spawned(again, 1.0), 2.0)
    assert (loading.failure, loading.tries) == (again.failure, 2)
    assert lifecycle.proved(loading, 3.0).failure == ""
    assert lifecycle.restarted(loading, "asked", 3.0).failure == ""
    failed, _ = crash_until_over(again)
    assert failed.failure
    assert lifecycle.ordered(failed, 4.0).failure == ""


def test_a_stop_of_what_is_failed_ends_in_stopped() -> None:
    failed, _ = crash_until_over(lifecycle.ordered(Life(), 0.0))
    assert lifecycle.stopped(lifecycle.stopping(failed, "stop", 0.0), 0.0).state is S.STOPPED


def test_one_that_was_stopped_on_the_bench_is_not_on_it_any_more() -> None:
    gone = lifecycle.stopped(lifecycle.stopping(lifecycle.benched(ready(), "failing", 0.0), "stop", 0.0), 0.0)
    assert gone.in_rotation


class Lives(RuleBasedStateMachine):
    """Whatever happens, in any order: moves are legal, a stop is final, attempts never repeat, tries keep to the policy."""

    def __init__(self) -> None:
        super().__init__()
        self.life = Life()
        self.now_s = 0.0

    def move(self, life: Life) -> None:
        before, self.life = self.life, life
        assert before.state is life.state or may_move(before.state, life.state)
        assert life.attempt >= before.attempt
        if before.want is Want.STOP:
            assert life.state in (S.DRAINING, S.STOPPED)

    @initialize()
    def order(self) -> None:
        self.move(lifecycle.ordered(self.life, self.now_s))

    @rule(seconds=st.floats(0.0, 200.0))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @precondition(lambda self: self.life.state is S.STARTING)
    @rule()
    def spawn(self) -> None:
        self.move(lifecycle.spawned(self.life, self.now_s))

    @precondition(lambda self: self.life.state is S.LOADING)
    @rule()
    def prove(self) -> None:
        self.move(lifecycle.proved(lifecycle.probing(self.life, self.now_s), self.now_s))

    @precondition(lambda self: self.life.state is S.READY)
    @rule(good=st.booleans())
    def bench(self, good: bool) -> None:
        rule = lifecycle.returned(self.life, self.now_s) if good else lifecycle.benched(self.life, "failing", self.now_s)
        self.move(rule)

    @precondition(lambda self: self.life.state in (S.STARTING, S.LOADING, S.READY))
    @rule(code=st.none() | st.integers(-15, 255))
    def end(self, code: int | None) -> None:
        self.move(lifecycle.ended(self.life, POLICY, "ended", code, self.now_s))

    @precondition(lambda self: self.life.want is Want.RUN and self.life.state is not S.STOPPED)
    @rule()
    def restart(self) -> None:
        self.move(lifecycle.restarted(self.life, "asked", self.now_s))

    @rule()
    def stop(self) -> None:
        self.move(lifecycle.stopping(self.life, "asked", self.now_s))

    @precondition(lambda self: self.life.state is S.DRAINING)
    @rule()
    def gone(self) -> None:
        self.move(lifecycle.stopped(self.life, self.now_s))

    @invariant()
    def tries_keep_to_the_policy(self) -> None:
        assert self.life.tries <= POLICY.attempts
        assert self.life.tries <= self.life.attempt

    @invariant()
    def only_a_ready_one_is_out_of_rotation(self) -> None:
        assert self.life.in_rotation or self.life.state in (S.READY, S.DRAINING)


TestLives = Lives.TestCase
