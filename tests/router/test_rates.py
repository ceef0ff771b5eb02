"""Limits per minute, pure: in no minute more than was promised, and nothing lost or charged twice."""

from __future__ import annotations

import re

import attrs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmgw.domain.errors import Overloaded
from llmgw.domain.policy import ApiKey
from llmgw.router.answer_headers import duration, limit_lines, operator_lines
from llmgw.router.body import read_body
from llmgw.router.rates import Charge, Rates, estimate
from llmgw.router.window import GRAIN_S, WINDOW_S, Window

KEY = ApiKey("k", "")
TOKENS = 7
pauses = st.one_of(st.floats(0, 0.3), st.floats(0, 30), st.just(WINDOW_S))
ROUNDING_S = 1e-6


def admit(rates: Rates, key: ApiKey, now_s: float, tokens: int = TOKENS) -> Overloaded | None:
    try:
        rates.admit(key, tokens, now_s)
        return None
    except Overloaded as refused:
        return refused


def charged(rates: Rates, key: ApiKey, now_s: float) -> Charge:
    charge = rates.admit(key, TOKENS, now_s)
    assert charge is not None
    return charge


# --- the window


@given(st.integers(1, 8), st.lists(pauses, max_size=60))
@example(3, [0.0, 0.1, 0.2, 59.75, 0.1, 0.1])
def test_in_no_minute_more_than_the_limit_is_let_in(limit: int, steps: list[float]) -> None:
    window, now_s = Window(), 1000.0
    taken: list[float] = []
    for step in steps:
        now_s += step
        if window.wait_s(now_s, 1, limit) == 0.0:
            window.take(now_s, 1)
            taken.append(now_s)
        assert sum(now_s - WINDOW_S + ROUNDING_S < at_s for at_s in taken) <= limit


@given(st.integers(1, 8), st.lists(pauses, min_size=1, max_size=60))
def test_who_waits_as_long_as_told_is_let_in_and_who_is_spaced_out_waits_no_longer_than_needed(limit: int, steps: list[float]) -> None:
    window, now_s = Window(), 0.0
    taken: list[float] = []
    for step in steps:
        now_s += step
        wait_s = window.wait_s(now_s, 1, limit)
        assert 0.0 <= wait_s <= WINDOW_S
        if wait_s:
            soonest_s = sorted(taken)[-limit] + WINDOW_S  # by the exact times
            assert now_s + wait_s <= soonest_s + GRAIN_S + ROUNDING_S
            now_s += wait_s + ROUNDING_S
        assert window.wait_s(now_s, 1, limit) == 0.0
        window.take(now_s, 1)
        taken.append(now_s)


@given(st.lists(st.tuples(pauses, st.integers(0, 100), st.booleans()), max_size=60))
def test_what_counts_is_what_was_used_in_the_last_minute_whatever_was_given_back(steps: list[tuple[float, int, bool]]) -> None:
    window, now_s = Window(), 5.0
    rows: list[list[float]] = []
    for step, amount, back in steps:
        now_s += step
        entry = window.take(now_s, amount)
        kept = amount
        if back:
            window.give_back(entry, amount // 2)
            kept -= amount // 2
        rows.append([now_s, kept])
        exact = sum(kept for at_s, kept in rows if now_s < at_s + WINDOW_S)
        late = sum(kept for at_s, kept in rows if at_s + WINDOW_S <= now_s < at_s + WINDOW_S + GRAIN_S)
        assert exact <= window.used(now_s)
        assert window.used(now_s) <= exact + late
    assert window.used(now_s + WINDOW_S) == 0
    assert window.empty_s(now_s + WINDOW_S) == 0.0


def test_memory_is_bounded_however_much_is_used() -> None:
    window = Window()
    for number in range(100_000):
        window.take(number / 1000, 1)
    assert len(window._entries) <= WINDOW_S / GRAIN_S + 1
    assert window.used(99.999) >= 60_000


def test_time_that_goes_back_frees_nothing() -> None:
    window = Window()
    window.take(100.0, 1)
    window.take(50.0, 1)
    assert window.used(0.0) == 2
    assert window.used(159.9) == 2
    assert window.used(160.0) == 0


def test_what_is_given_back_after_its_minute_takes_nothing_from_what_counts_now() -> None:
    window = Window()
    entry = window.take(0.0, 10)
    window.take(70.0, 3)
    window.give_back(entry, 10)
    assert window.used(70.0) == 3


# --- keys


def test_requests_beyond_the_limit_wait_for_the_first_to_be_a_minute_old() -> None:
    rates = Rates()
    key = attrs.evolve(KEY, requests_per_minute=2, tokens_per_minute=20)
    assert admit(rates, key, 0.0) is None
    assert admit(rates, key, 2.0) is None
    refused = admit(rates, key, 3.0)
    assert refused is not None
    assert (refused.code, refused.retry_after_s) == ("rate_limit_exceeded", 57.0)
    assert "2 requests a minute" in refused.message


def test_tokens_are_estimated_at_first_and_charged_as_the_engine_says() -> None:
    rates = Rates()
    key = ApiKey("k", "", tokens_per_minute=100)
    use = rates.use("k")
    charge = charged(rates, key, 0.0)
    assert use.tokens.used(0.0) == 7
    charge.settle(95, 1.0)
    charge.settle(95, 1.0)
    assert use.tokens.used(1.0) == 95
    refused = admit(rates, key, 2.0)
    assert refused is not None
    assert (refused.code, refused.retry_after_s) == ("rate_limit_exceeded", 58.0)
    assert "95 are used" in refused.message
    cheap = charged(rates, key, 61.0)
    cheap.settle(0, 61.5)
    assert use.tokens.used(61.5) == 0


def test_a_request_for_more_than_the_whole_limit_is_let_in_alone() -> None:
    rates = Rates()
    key = ApiKey("k", "", tokens_per_minute=10)
    assert admit(rates, key, 0.0, 100_000) is None
    assert admit(rates, key, 1.0) is not None
    assert admit(rates, key, 60.0, 100_000) is None


def test_tokens_beyond_the_limit_are_owed() -> None:
    rates = Rates()
    key = ApiKey("k", "", tokens_per_minute=100)
    charge = charged(rates, key, 0.0)
    charge.settle(1000, 30.0)
    assert admit(rates, key, 89.0) is not None
    assert admit(rates, key, 90.0) is None


def test_a_limit_that_changes_finds_what_was_used_and_a_revoked_keys_count_outlives_it_for_a_minute() -> None:
    rates = Rates()
    key = ApiKey("k", "", requests_per_minute=10)
    for _ in range(5):
        assert admit(rates, key, 0.0) is None
    assert admit(rates, attrs.evolve(key, requests_per_minute=5), 1.0) is not None
    assert admit(rates, attrs.evolve(key, requests_per_minute=6), 1.0) is None
    rates.keep((), 59.0)
    assert admit(rates, attrs.evolve(key, requests_per_minute=6), 59.0) is not None
    rates.keep((), 200.0)
    assert rates._uses == {}


@given(
    st.integers(1, 5),
    st.integers(8, 40),
    st.lists(st.tuples(pauses, st.one_of(st.none(), st.integers(0, 60)), st.integers(1, 5), st.integers(8, 40)), max_size=40),
)
def test_whatever_limits_and_answers_are_no_count_is_negative_and_a_refusal_counts_nothing(
    requests: int, tokens: int, steps: list[tuple[float, int | None, int, int]]
) -> None:
    rates, now_s = Rates(), 0.0
    key = ApiKey("k", "", requests_per_minute=requests, tokens_per_minute=tokens)
    use = rates.use("k")
    for step, said, requests, tokens in steps:
        now_s += step
        before = (use.requests.used(now_s), use.tokens.used(now_s))
        assert min(before) >= 0
        fits = before[0] < key.requests_per_minute and before[1] + min(7, key.tokens_per_minute) <= key.tokens_per_minute
        if not fits:
            refused = admit(rates, key, now_s)
            assert refused is not None
            assert 0 < refused.retry_after_s <= WINDOW_S
            assert (use.requests.used(now_s), use.tokens.used(now_s)) == before
        else:
            charge = charged(rates, key, now_s)
            assert use.requests.used(now_s) == before[0] + 1
            if said is not None:
                charge.settle(said, now_s)
        key = attrs.evolve(key, requests_per_minute=requests, tokens_per_minute=tokens)


@pytest.mark.parametrize(
    ("members", "asked"),
    [
        ("", 0),
        ('"max_tokens":50', 50),
        ('"max_completion_tokens" : 50,"a":1', 50),
        ('"max_tokens":5,"max_completion_tokens":90', 90),
        ('"max_output_tokens":7', 7),
        ('"n_predict":-1', 0),
        ('"max_tokens":null', 0),
        ('"max_tokens":true', 0),
        ('"max_tokens":"50"', 0),
        ('"max_tokens":50.0', 50),
        ('"max_tokens":99999999999', 0),
        ('"max_tokens":1e999', 0),
        ('"a":"\\"max_tokens\\":50"', 0),
        ('"a":{"max_tokens":50}', 0),
        ('"a":"\\ud800","max_tokens":50', 50),
    ],
)
def test_a_request_is_taken_for_its_bytes_and_what_it_asks_for(members: str, asked: int) -> None:
    body = f'{{"model":"m1"{"," if members else ""}{members}}}'.encode()
    assert estimate(len(body), read_body(body, needs_messages=False).output_tokens) == len(body) // 4 + asked


# --- headers


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0, "0s"),
        (-1.0, "0s"),
        (0.0059, "6ms"),
        (0.006, "6ms"),
        (0.9991, "1s"),
        (1.0, "1s"),
        (7.25, "7.25s"),
        (59.9999, "1m0s"),
        (60.0, "1m0s"),
        (61.5, "1m1.5s"),
        (3600.0, "1h0m0s"),
    ],
)
def test_a_duration_is_written_as_openai_writes_it(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


@given(st.floats(0, 100_000))
def test_a_duration_is_never_shorter_than_it_is(seconds: float) -> None:
    text = duration(seconds)
    found = re.fullmatch(r"(?:(\d+)ms|(?:(\d+)h)?(?:(\d+)m)?(\d+(?:\.\d{1,3})?)s)", text)
    assert found is not None, text
    ms, hours, minutes, rest = found.groups()
    told = int(ms) / 1000 if ms else int(hours or 0) * 3600 + int(minutes or 0) * 60 + float(rest)
    assert seconds - ROUNDING_S <= told <= seconds + 0.001 + ROUNDING_S


def test_headers_tell_of_the_limits_that_a_key_has() -> None:
    rates = Rates()
    key = ApiKey("k", "", requests_per_minute=3)
    for at_s in (0.0, 10.0):
        assert admit(rates, key, at_s) is None
    assert limit_lines(key, rates.use("k"), 12.0) == (
        b"x-ratelimit-limit-requests: 3\r\nx-ratelimit-remaining-requests: 1\r\nx-ratelimit-reset-requests: 58s\r\n"
    )
    assert limit_lines(KEY, rates.use("other"), 12.0) == b""
    over = attrs.evolve(key, requests_per_minute=1, tokens_per_minute=5)
    told = limit_lines(over, rates.use("k"), 12.0)
    for line in (b"x-ratelimit-remaining-requests: 0", b"x-ratelimit-remaining-tokens: 5", b"x-ratelimit-reset-tokens: 0s"):
        assert line in told.split(b"\r\n")


def test_an_operator_reads_who_answered_and_where_the_time_went() -> None:
    assert operator_lines("u1", 1.0, 1.0012, 1.5) == b"x-llmgw-endpoint: u1\r\nserver-timing: router;dur=1.2, engine;dur=498.8\r\n"
    assert operator_lines("", 1.0, None, 1.5) == b"server-timing: router;dur=500.0\r\n"
