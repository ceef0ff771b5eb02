"""Liveness by progress, as pure rules."""

from __future__ import annotations

from llmgw.agent.engines.description import Counters
from llmgw.agent.progress import Look, Progress, Seen, Verdict, counted, judge, looked, moved_since, pardoned, reported, worked

LIMIT_S = 60.0


def watched(*samples: tuple[float, int, float]) -> Progress:
    """(second, running, progress) as an engine told them."""
    progress = Progress(0.0)
    for at_s, running, done in samples:
        progress = counted(answering(progress, at_s), Counters(running, done), at_s)
    return progress


def answering(progress: Progress, now_s: float) -> Progress:
    """It has just answered a look."""
    return looked(progress, Look.GOOD, now_s)


def seen(
    in_flight: int = 0,
    silent_s: float = 0.0,
    answers: int = 0,
    failures: int = 0,
    heard_s: float = 0.0,
    unanswered: int = 0,
    byte_s: float | None = None,
) -> Seen:
    return Seen(in_flight, silent_s, answers, failures, heard_s, unanswered, byte_s)


def test_running_requests_and_still_counters_for_longer_than_the_limit_are_suspect() -> None:
    stuck = watched((0, 1, 5), (10, 1, 5), (70, 1, 5))
    assert judge(stuck, LIMIT_S, 59.0) is Verdict.FINE
    assert judge(stuck, LIMIT_S, 61.0) is Verdict.SUSPECT


def test_an_idle_engine_is_never_suspect_and_its_clock_starts_with_its_first_request() -> None:
    idle = watched((0, 0, 5), (100, 0, 5), (200, 1, 5))
    assert judge(idle, LIMIT_S, 250.0) is Verdict.FINE
    assert judge(idle, LIMIT_S, 261.0) is Verdict.SUSPECT


def test_counters_that_rise_are_progress_however_slowly() -> None:
    assert judge(watched((0, 1, 5), (55, 1, 6), (110, 1, 7)), LIMIT_S, 160.0) is Verdict.FINE


def test_counters_that_could_not_be_read_say_nothing() -> None:
    assert judge(counted(watched((0, 1, 5), (50, 1, 6)), None, 100.0), LIMIT_S, 105.0) is Verdict.FINE


def test_an_engine_without_counters_is_judged_by_the_routers_while_their_word_is_fresh() -> None:
    silent = reported(Progress(0.0), seen(in_flight=1, silent_s=61.0, heard_s=100.0))
    assert judge(silent, LIMIT_S, 101.0) is Verdict.SUSPECT
    assert judge(answering(silent, 199.0), LIMIT_S, 200.0) is Verdict.FINE
    idle = reported(answering(Progress(0.0), 100.0), seen(in_flight=0, silent_s=61.0, heard_s=100.0))
    assert judge(idle, LIMIT_S, 101.0) is Verdict.FINE


def test_its_own_counters_are_believed_over_the_routers() -> None:
    works = reported(watched((0, 1, 5), (100, 1, 6)), seen(in_flight=1, silent_s=90.0, heard_s=100.0))
    assert judge(works, LIMIT_S, 101.0) is Verdict.FINE


def test_five_errors_of_the_last_ten_are_failing_and_four_are_not() -> None:
    assert judge(reported(Progress(0.0), seen(answers=10, failures=4)), LIMIT_S, 1.0) is Verdict.FINE
    assert judge(reported(Progress(0.0), seen(answers=5, failures=5)), LIMIT_S, 1.0) is Verdict.FAILING


def test_old_errors_do_not_bench_it_again_after_its_return_and_new_ones_do() -> None:
    back = pardoned(reported(Progress(0.0), seen(answers=10, failures=6)), 10.0)
    assert judge(reported(back, seen(answers=10, failures=6, heard_s=11.0)), LIMIT_S, 11.0) is Verdict.FINE
    assert judge(reported(back, seen(answers=10, failures=7, heard_s=11.0)), LIMIT_S, 11.0) is Verdict.FAILING
    mended = reported(back, seen(answers=10, failures=4, heard_s=11.0))
    assert judge(reported(mended, seen(answers=10, failures=5, heard_s=12.0)), LIMIT_S, 12.0) is Verdict.FAILING
    assert judge(reported(back, seen(answers=10, failures=6, heard_s=80.0)), LIMIT_S, 80.0) is Verdict.FAILING


def test_bad_answers_of_the_readiness_path_in_a_row_are_suspect_and_busy_ones_are_not() -> None:
    bad = Progress(0.0)
    for _ in range(2):
        bad = looked(bad, Look.BAD, 1.0)
    assert judge(bad, LIMIT_S, 1.0) is Verdict.FINE
    assert judge(looked(bad, Look.BAD, 1.0), LIMIT_S, 1.0) is Verdict.SUSPECT
    assert judge(looked(looked(bad, Look.BUSY, 1.0), Look.BAD, 1.0), LIMIT_S, 1.0) is Verdict.FINE


def test_a_probe_that_worked_clears_every_suspicion() -> None:
    stuck = looked(reported(watched((0, 1, 5), (70, 1, 5)), seen(in_flight=1, silent_s=90.0, heard_s=70.0)), Look.BAD, 70.0)
    assert judge(worked(stuck, 70.0), LIMIT_S, 71.0) is Verdict.FINE


def test_an_engine_that_stopped_telling_its_counters_is_judged_by_the_routers_like_one_that_has_none() -> None:
    """llama.cpp's counters come from the loop that does the work: stuck between two looks, it had told that nothing was running."""
    mute = answering(watched((0, 0, 5), (5, 0, 5)), 65.0)
    silent = reported(mute, seen(in_flight=1, silent_s=61.0, heard_s=70.0))
    assert judge(silent, LIMIT_S, 71.0) is Verdict.SUSPECT
    assert judge(reported(mute, seen(in_flight=0, silent_s=61.0, heard_s=70.0)), LIMIT_S, 71.0) is Verdict.FINE
    told = counted(silent, Counters(1, 6), 69.0)
    assert judge(told, LIMIT_S, 71.0) is Verdict.FINE


def test_an_engine_that_answers_no_look_for_the_limit_is_suspect_though_nobody_asks_it_anything() -> None:
    """A frozen process keeps its port: connects stand, or hang, and no look ever said more than "busy"."""
    mute = looked(answering(watched((0, 0, 5)), 10.0), Look.BUSY, 20.0)
    assert judge(mute, LIMIT_S, 69.0) is Verdict.FINE
    assert judge(mute, LIMIT_S, 71.0) is Verdict.SUSPECT
    assert judge(worked(mute, 71.0), LIMIT_S, 72.0) is Verdict.FINE


def test_an_engine_too_busy_for_looks_is_left_alone_for_as_long_as_bytes_of_it_come() -> None:
    mute = answering(Progress(0.0), 10.0)
    assert judge(reported(mute, seen(in_flight=9, heard_s=90.0, byte_s=89.0)), LIMIT_S, 91.0) is Verdict.FINE
    assert judge(reported(mute, seen(in_flight=9, heard_s=90.0, byte_s=20.0)), LIMIT_S, 91.0) is Verdict.SUSPECT


def test_a_byte_that_came_while_the_probe_waited_says_that_it_works() -> None:
    assert moved_since(reported(Progress(0.0), seen(byte_s=31.0)), 30.0)
    assert not moved_since(reported(Progress(0.0), seen(byte_s=29.0)), 30.0)
    assert not moved_since(reported(Progress(0.0), seen()), 30.0)


def test_attempts_in_a_row_without_a_byte_are_suspect_and_after_a_good_probe_only_further_ones() -> None:
    alive = answering(Progress(0.0), 100.0)
    assert judge(reported(alive, seen(unanswered=2, heard_s=100.0)), LIMIT_S, 100.0) is Verdict.FINE
    dumb = reported(alive, seen(unanswered=3, heard_s=100.0))
    assert judge(dumb, LIMIT_S, 100.0) is Verdict.SUSPECT
    assert judge(dumb, LIMIT_S, 131.0) is Verdict.FINE
    proved = worked(dumb, 100.0)
    assert judge(reported(proved, seen(unanswered=3, heard_s=101.0)), LIMIT_S, 101.0) is Verdict.FINE
    assert judge(reported(proved, seen(unanswered=4, heard_s=101.0)), LIMIT_S, 101.0) is Verdict.SUSPECT
    mended = reported(proved, seen(unanswered=0, heard_s=101.0))
    assert judge(reported(mended, seen(unanswered=3, heard_s=102.0)), LIMIT_S, 102.0) is Verdict.SUSPECT


def test_an_engine_that_counts_nothing_as_running_while_routers_wait_for_it_is_suspect() -> None:
    """Its front answers every look, and what does the work has stopped listening to it."""
    front = answering(watched((0, 0, 5), (100, 0, 5)), 100.0)
    assert judge(reported(front, seen(in_flight=1, silent_s=61.0, heard_s=100.0)), LIMIT_S, 101.0) is Verdict.SUSPECT
    assert judge(reported(front, seen(in_flight=1, silent_s=59.0, heard_s=100.0)), LIMIT_S, 101.0) is Verdict.FINE
