"""What is read of engines' words on tokens, and how they are asked for them. Pure."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmgw.router import sse
from llmgw.router.body import read_body
from llmgw.router.families import Family
from llmgw.router.usage import BODY_MAX, COUNT_MAX, Meter, Tokens, refuses_usage, usage_edit, without_null

ODD = st.none() | st.booleans() | st.integers(max_value=-1) | st.integers(min_value=COUNT_MAX + 1) | st.floats() | st.text() | st.just([])
COUNTS = st.integers(0, 10**6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


def body_of(value: Any, family: Family = Family.OPENAI) -> Tokens | None:
    meter = Meter(family)
    meter.feed(json.dumps(value).encode())
    return meter.tokens()


def data(value: Any) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


# --- answers as a whole

ANSWERS = {
    "chat": (Family.OPENAI, {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}, Tokens(9, 0, 4)),
    "chat_cached": (
        Family.OPENAI,
        {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 8, "audio_tokens": 0}},
        Tokens(9, 8, 4),
    ),
    "null_details": (Family.OPENAI, {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": None}, Tokens(9, 0, 4)),
    "embeddings": (Family.OPENAI, {"prompt_tokens": 7, "total_tokens": 7}, Tokens(7, 0, 0)),
    "rerank": (Family.OPENAI, {"total_tokens": 5}, Tokens(5, 0, 0)),
    "more_cached_than_there_are": (Family.OPENAI, {"prompt_tokens": 2, "prompt_tokens_details": {"cached_tokens": 9}}, Tokens(2, 2, 0)),
    "responses": (
        Family.RESPONSES,
        {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 3}, "output_tokens": 4, "total_tokens": 13},
        Tokens(9, 3, 4),
    ),
    "messages": (Family.ANTHROPIC, {"input_tokens": 9, "output_tokens": 4}, Tokens(9, 0, 4)),
    "messages_cached": (
        Family.ANTHROPIC,
        {"input_tokens": 9, "cache_read_input_tokens": 100, "cache_creation_input_tokens": 20, "output_tokens": 4},
        Tokens(129, 100, 4),
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_of_each_family_is_read_in_its_own_words(name: str) -> None:
    family, usage, tokens = ANSWERS[name]
    assert body_of({"id": "x", "usage": usage, "choices": []}, family) == tokens


@pytest.mark.parametrize(
    "value", [{}, {"usage": None}, {"usage": {}}, {"usage": 3}, {"usage": [1]}, [], "usage", {"x": {"usage": {"prompt_tokens": 1}}}]
)
def test_an_answer_that_says_nothing_of_tokens_is_unknown_and_not_zero(value: Any) -> None:
    assert body_of(value) is None


@given(st.dictionaries(st.sampled_from(("prompt_tokens", "completion_tokens", "total_tokens", "input_tokens", "output_tokens")), ODD), ODD)
def test_a_count_that_is_none_is_as_good_as_not_said(usage: dict[str, Any], details: Any) -> None:
    for family in Family:
        assert body_of({"usage": {**usage, "prompt_tokens_details": details}}, family) is None
        # A true one beside it still counts.
        assert body_of({"usage": {**usage, "completion_tokens": 5, "output_tokens": 5}}, family) == Tokens(0, 0, 5)


@given(st.binary(max_size=80), st.binary(max_size=40))
@example(b'{"usage":', b"")
@example(b"[" * 30_000, b'"usage":{')
def test_nothing_that_an_engine_says_raises(first: bytes, rest: bytes) -> None:
    meter = Meter(Family.OPENAI, hidden=True)
    meter.feed(first + b'"usage":{' + rest)
    assert meter.tokens() is None or meter.tokens().prompt >= 0
    event = b"data: " + first + b'"usage":{' + rest + b"\n\n"
    assert meter.event(event) in (event, b"")
    assert without_null(b"data: " + first + b'"usage":null' + rest + b"\n\n").startswith(b"data:")


@given(st.integers(0, 3), st.integers(1, 40_000), st.booleans())
def test_a_long_answer_is_read_at_its_ends_in_whatever_pieces_it_comes(extra: int, piece: int, first: bool) -> None:
    usage = {"prompt_tokens": 11, "total_tokens": 11}
    rest = {"data": [0.25] * (BODY_MAX // 4), "text": '"usage":{"prompt_tokens":3}' * 3}
    last = {"kv_transfer_params": None} if extra else {}
    value = {"object": "list", "usage": usage, **rest} if first else {"object": "list", **rest, "usage": usage, **last}
    raw = json.dumps(value).encode()
    meter = Meter(Family.OPENAI)
    for at in range(0, len(raw), piece):
        meter.feed(raw[at : at + piece])
    assert meter.tokens() == Tokens(11, 0, 0)


def test_half_a_surrogate_pair_in_a_text_does_not_hide_the_usage() -> None:
    raw = b'{"choices":[{"text":"\\ud83d"}],"usage":{"prompt_tokens":1,"completion_tokens":2}}'
    meter = Meter(Family.OPENAI)
    meter.feed(raw)
    assert meter.tokens() == Tokens(1, 0, 2)


# --- streams

USE = {"id": "c1", "choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}}


@pytest.mark.parametrize("hidden", [False, True])
def test_the_event_that_holds_nothing_but_usage_is_taken_out_where_the_client_did_not_ask(hidden: bool) -> None:
    meter = Meter(Family.OPENAI, hidden=hidden)
    assert meter.event(data(USE)) == (b"" if hidden else data(USE))
    assert meter.tokens() == Tokens(1, 0, 3)


NO_COUNT = st.recursive(
    ODD | st.just(float("inf")) | st.integers(10**18, 10**20),
    lambda inner: st.dictionaries(st.sampled_from(("prompt_tokens", "completion_tokens", "total_tokens", "x")), inner, max_size=3),
    max_leaves=6,
)


@given(NO_COUNT.filter(lambda usage: usage is not None), st.sampled_from(("[]", "[ ]", "null")))
@example({"prompt_tokens": -1, "completion_tokens": -1}, "[]")
@example("7", "[]")
@example([1], "[]")
def test_the_usage_that_only_we_asked_for_is_taken_out_however_wrong_it_is(usage: Any, choices: str) -> None:
    meter = Meter(Family.OPENAI, hidden=True)
    assert meter.event(b'data: {"id":"c1","choices":%s,"usage":%s}\n\n' % (choices.encode(), json.dumps(usage).encode())) == b""
    assert meter.tokens() is None


@pytest.mark.parametrize("count", ["1e400", "9" * 5_000, "-" + "9" * 5_000])
def test_a_number_beyond_all_readers_is_no_count_and_keeps_nothing_in_the_stream(count: str) -> None:
    meter = Meter(Family.OPENAI, hidden=True)
    assert meter.event(b'data: {"choices":[],"usage":{"prompt_tokens":%s,"completion_tokens":2}}\n\n' % count.encode()) == b""
    assert meter.tokens() == Tokens(0, 0, 2)


KEPT = {
    "content": {"choices": [{"index": 0, "delta": {"content": "x"}}], "usage": {"prompt_tokens": 1, "completion_tokens": 1}},
    "an_error": {"choices": [], "usage": {"prompt_tokens": 1}, "error": {"message": "boom"}},
    "no_choices": {"usage": {"prompt_tokens": 1, "completion_tokens": 1}},
    "a_text": {"choices": [{"delta": {"content": '"usage":{"prompt_tokens":1}'}}]},
    "filter": {"choices": [], "prompt_filter_results": [], "usage": {}},
}


@pytest.mark.parametrize("name", KEPT)
def test_an_event_that_says_anything_else_stays(name: str) -> None:
    value = {key: inner for key, inner in KEPT[name].items() if name != "filter" or key != "usage"}
    assert Meter(Family.OPENAI, hidden=True).event(data(value)) == data(value)


def test_the_last_word_of_a_stream_that_tells_more_than_once_counts() -> None:
    meter = Meter(Family.OPENAI)
    for count in (1, 2, 3):
        meter.event(data({"choices": [{}], "usage": {"prompt_tokens": 5, "completion_tokens": count}}))
    meter.event(data({"choices": [], "usage": None}))
    assert meter.tokens() == Tokens(5, 0, 3)


def test_a_stream_of_messages_tells_its_prompt_first_and_its_completion_last() -> None:
    meter = Meter(Family.ANTHROPIC)
    start = {
        "type": "message_start",
        "message": {"id": "m", "usage": {"input_tokens": 25, "cache_read_input_tokens": 5, "output_tokens": 1}},
    }
    delta = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 15}}
    began = b"event: message_start\n" + data(start)
    assert meter.event(began) == began
    assert meter.tokens() == Tokens(30, 5, 1)
    assert meter.event(b"event: message_delta\n" + data(delta)).endswith(data(delta))
    assert meter.tokens() == Tokens(30, 5, 15)


def test_a_stream_of_responses_tells_it_in_its_last_event() -> None:
    meter = Meter(Family.RESPONSES)
    assert meter.event(data({"type": "response.created", "response": {"usage": None}}))
    assert meter.tokens() is None
    last = {"type": "response.completed", "response": {"output": [{"usage": 1}], "usage": {"input_tokens": 3, "output_tokens": 2}}}
    assert meter.event(data(last)) == data(last)
    assert meter.tokens() == Tokens(3, 0, 2)


CHUNK = {"id": "c1", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": 'a "usage":null, b'}}]}


@given(st.sampled_from((None, (", ", ": "), (",", ":"))), st.integers(0, len(CHUNK)), st.sampled_from(("\n\n", "\r\n\r\n")), st.booleans())
def test_usage_null_goes_with_it_wherever_it_stands_and_nothing_else_does(
    separators: tuple[str, str] | None, place: int, end: str, hidden: bool
) -> None:
    members = list(CHUNK.items())
    value = dict([*members[:place], ("usage", None), *members[place:]])
    event = f"data: {json.dumps(value, separators=separators)}{end}".encode()
    meter = Meter(Family.OPENAI, hidden=hidden)
    got = meter.event(event)
    assert json.loads(sse.data_of(got) or b"") == (CHUNK if hidden else value)
    assert hidden or got == event
    assert meter.tokens() is None


@given(st.lists(st.sampled_from(("text", "null", "use", "comment")), max_size=6), st.data())
def test_any_split_of_a_stream_is_read_the_same(kinds: list[str], cuts: st.DataObject) -> None:
    made = {"text": data(CHUNK), "null": data({**CHUNK, "usage": None}), "use": data(USE), "comment": b": ping\n\n"}
    raw = b"".join(made[kind] for kind in kinds)

    def read(pieces: list[bytes]) -> tuple[bytes, Tokens | None]:
        scanner, meter = sse.EventScanner(), Meter(Family.OPENAI, hidden=True)
        out = b"".join(meter.event(event) for piece in pieces for event in scanner.feed(piece))
        return out, meter.tokens()

    places = sorted(cuts.draw(st.lists(st.integers(0, len(raw)), max_size=5)))
    pieces = [raw[a:b] for a, b in zip([0, *places], [*places, len(raw)], strict=True)]
    expected = b"".join(made["text" if kind == "null" else kind] for kind in kinds if kind != "use")
    assert read(pieces) == (expected, Tokens(1, 0, 3) if "use" in kinds else None)


# --- asking

OPTIONS: st.SearchStrategy[Any] = st.none() | st.dictionaries(
    st.sampled_from(("include_usage", "x", "y")), st.none() | st.booleans() | st.just(1)
)


@given(
    st.dictionaries(st.text(max_size=4), JSON, max_size=3),
    OPTIONS | st.just("absent") | st.just(5),
    st.booleans(),
    st.sampled_from((None, 2)),
    st.sampled_from(("", "\n ")),
)
def test_the_splice_asks_for_usage_and_keeps_all_else(
    rest: dict[str, Any], options: Any, last: bool, indent: int | None, tail: str
) -> None:
    names = ("model", "stream", "messages", "stream_options")
    value = {"model": "m", **{key: inner for key, inner in rest.items() if key not in names}, "stream": True}
    if options != "absent":
        value = {**value, "stream_options": options} if last else {"stream_options": options, **value}
    body = (json.dumps(value, indent=indent) + tail).encode()
    asked = read_body(body, needs_messages=False)
    edit = usage_edit(asked.body, asked.options_span)
    if edit is None:  # the client asked itself, or wrote what the engine is to judge
        assert options == 5 or options["include_usage"] in (True, 1)
        assert b"".join(asked.as_sent("m")) == body
        return
    sent = b"".join(asked.as_sent("other", edit))
    given_options = {} if options in (None, "absent") else options
    assert json.loads(sent) == {**value, "model": "other", "stream_options": {**given_options, "include_usage": True}}
    start, end, text = edit
    assert b"".join(asked.as_sent("m", edit)) == body[:start] + text + body[end:]
    assert list(json.loads(sent)) == list({**value, "stream_options": None})


def test_options_that_say_it_twice_are_left_to_the_engine() -> None:
    body = b'{"model":"m","stream":true,"stream_options":{"include_usage":false,"include_usage":true}}'
    asked = read_body(body, needs_messages=False)
    assert usage_edit(asked.body, asked.options_span) is None


def test_a_refusal_is_taken_for_ours_only_where_it_names_what_we_asked() -> None:
    assert refuses_usage(400, b'{"error":{"message":"Unknown field: stream_options"}}')
    assert refuses_usage(422, b'{"detail":[{"loc":["body","stream_options","include_usage"]}]}')
    assert not refuses_usage(400, b'{"error":{"message":"too long"}}')
    assert not refuses_usage(500, b"stream_options")
