"""Streams as engines really write them: how they begin, fail and end (the SSE cases and their neighbours)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from tests.router.fakes import (
    CHAT,
    CHAT2_S,
    CHAT_S,
    DONE,
    END,
    FIN,
    FIN_TEXT,
    GOOD_S,
    OK,
    SH,
    Answer,
    E,
    Stage,
    answer,
    event,
    get,
    interpreted_only,
    post,
    staged,
)
from tests.router.test_streams import EVENT_63

A = event("a")
DONE_TEXT = "data: [DONE]\n\n"
USE_TEXT = 'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":3,"total_tokens":4}}\n\n'
WITH_USAGE = CHAT_S.replace(b'"stream":true', b'"stream":true,"stream_options":{"include_usage":true}')
CLOSE = ["close"]
ERROR_400 = '{"error":{"message":"boom","type":"x","code":400}}'


def _asks(stage: Stage, path: str, texts: list[str], end: list[Any], mark: str = "") -> Answer:
    stage.u1.script = [SH, *[["c", text] for text in texts], end]
    return stage.router.ask(post(CHAT_S, f"X-Request-Id: {mark}\r\n" if mark else "", path=path))


@pytest.mark.case("T03")
def test_a_stream_that_comes_byte_by_byte_arrives_byte_for_byte(stage: Stage) -> None:
    text = EVENT_63.decode() + FIN_TEXT + USE_TEXT + DONE_TEXT
    raw = "".join(f"{len(part.encode()):x}\r\n{part}\r\n" for part in (EVENT_63.decode(), FIN_TEXT, USE_TEXT, DONE_TEXT))
    stage.u1.script = [SH, ["drip", 1, raw], END]
    got = stage.router.ask(post(WITH_USAGE))
    assert got.body.decode() == text
    assert got.whole


@pytest.mark.case("B004")
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_line_ends_of_every_kind_pass_unchanged_however_they_are_cut(stage: Stage, size: int) -> None:
    text = (
        ": ping\r\n\r\n"
        'event: a\rid: 1\rdata:{"x":1}\r\r'
        "retry: 5\n\n"
        'data: {"y":\r\ndata: 2}\r\n\r\n'
        "data:\n\n"
        "data: 北😀\r\n\n" + A + FIN_TEXT.replace("\n\n", "\r\n\r\n") + DONE_TEXT
    ).encode()
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    stage.u1.script = [SH, *[["x", (b"%x\r\n%b\r\n" % (len(part), part)).hex()] for part in parts], END]
    got = stage.router.ask(post(CHAT_S))
    assert got.body == text
    assert got.whole


@attrs.frozen
class First:
    """What an engine says first under a 200, and the status that is meant."""

    texts: list[str]
    status: int
    path: str = "/v1/chat/completions"
    end: list[Any] = END
    says: str = "boom"


def _error(fields: str) -> list[str]:
    return ['data: {"error":{"message":"boom"' + fields + "}}\n\n"]


FIRST = {
    "a number": First(_error(',"code":429'), 429),
    "a number as text": First(_error(',"code":"503"'), 503),
    "a number that is no error": First(_error(',"code":200'), 502),
    "a number that is no status": First(_error(',"code":4000'), 502),
    "no code": First(_error(""), 502),
    "a null code": First(_error(',"code":null'), 502),
    "a name of a client's fault": First(_error(',"type":"invalid_request_error","code":"context_length_exceeded"'), 400),
    "a type alone": First(_error(',"type":"BadRequestError"'), 400),
    "a name of a limit": First(_error(',"code":"rate_limit_exceeded"'), 429),
    "a string": First(['data: {"error":"boom"}\n\n'], 502),
    "an object of kind error": First(['data: {"object":"error","message":"boom","type":"BadRequestError","code":400}\n\n'], 400),
    "an event named error": First(['event: error\ndata: {"message":"boom","code":400}\n\n'], 400),
    "an event named error with text": First(["event: error\ndata: boom\n\n"], 502),
    "a line named error": First(['error: {"code":400,"message":"boom","type":"invalid_request_error"}\n\n'], 400),
    "carriage returns": First([f"data:{ERROR_400}\r\n\r\n"], 400),
    "two data lines": First(['data: {"error":\ndata: {"message":"boom","code":400}}\n\n'], 400),
    "after comments": First([": ping\n\n"] * 30 + [f"data: {ERROR_400}\n\n"], 400),
    "after empty data, an id and a retry": First(["data:\n\ndata: \n\n", "id: 7\n\n", "retry: 10\n\n", f"data: {ERROR_400}\n\n"], 400),
    "in pieces": First([f"data: {ERROR_400}"[:20], f"data: {ERROR_400}\n\n"[20:]], 400),
    "without its empty line": First([f"data: {ERROR_400}"], 400),
    "with done after it": First([f"data: {ERROR_400}\n\n", DONE_TEXT], 400),
    "and a close": First([f"data: {ERROR_400}\n\n"], 400, end=CLOSE),
    "in the messages family": First(
        [
            'event: ping\ndata: {"type":"ping"}\n\n',
            'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"boom"}}\n\n',
        ],
        503,
        "/v1/messages",
    ),
    "in the responses family": First(
        ['event: error\ndata: {"type":"error","code":"server_error","message":"boom"}\n\n'], 502, "/v1/responses"
    ),
    "nothing": First([], 502, says="before any content"),
    "comments alone": First([": a\n\n", ": b\n\n"], 502, says="before any content"),
}


@pytest.mark.case("B006")
@pytest.mark.parametrize("name", FIRST)
def test_an_error_before_any_content_is_an_http_error(steady: Stage, name: str) -> None:
    first = FIRST[name]
    got = _asks(steady, first.path, first.texts, first.end)
    assert got.status == first.status
    assert got.get("content-type") == "application/json"
    assert first.says in got.error["message"]
    assert steady.u2.requests == []


@attrs.frozen
class Ending:
    """How a stream that has begun ends. `passed`: the texts that reach the client; `error`: whether one event tells of a break."""

    texts: list[str]
    passed: list[str]
    error: bool = False
    end: list[Any] = END
    path: str = "/v1/chat/completions"
    own: bool = False  # the engine's own error is among `passed`


COMPLETION = ['data: {"choices":[{"text":"a","finish_reason":null}]}\n\n', 'data: {"choices":[{"text":"","finish_reason":"length"}]}\n\n']
CREATED = 'event: response.created\ndata: {"type":"response.created"}\n\n'
COMPLETED = 'event: response.completed\ndata: {"type":"response.completed"}\n\n'
STARTED = 'event: message_start\ndata: {"type":"message_start"}\n\n'
STOPPED = 'event: message_stop\ndata: {"type":"message_stop"}\n\n'
OOM = 'data: {"error":{"message":"oom","code":500}}\n\n'
FINISH_AS_TEXT = 'data: {"choices":[{"delta":{"content":"\\"finish_reason\\":\\"stop\\""}}]}\n\n'
ENDINGS = {
    "done": Ending([A, FIN_TEXT, DONE_TEXT], [A, FIN_TEXT, DONE_TEXT]),
    "done without a finish": Ending([A, DONE_TEXT], [A, DONE_TEXT]),
    "done alone": Ending([DONE_TEXT], [DONE_TEXT]),
    "done twice": Ending([A, FIN_TEXT, DONE_TEXT * 2, DONE_TEXT], [A, FIN_TEXT, DONE_TEXT]),
    "done without a blank": Ending([A, FIN_TEXT, "data:[DONE]\n\n"], [A, FIN_TEXT, "data:[DONE]\n\n"]),
    "done without its empty line": Ending([A, FIN_TEXT, "data: [DONE]"], [A, FIN_TEXT, DONE_TEXT]),
    "done without its empty line, and a close": Ending([A, FIN_TEXT, "data: [DONE]\n"], [A, FIN_TEXT, DONE_TEXT], end=CLOSE),
    "more after done": Ending([A, FIN_TEXT, DONE_TEXT, A], [A, FIN_TEXT, DONE_TEXT]),
    "finish alone": Ending([A, FIN_TEXT], [A, FIN_TEXT, DONE_TEXT]),
    "finish and a close": Ending([A, FIN_TEXT], [A, FIN_TEXT, DONE_TEXT], end=CLOSE),
    "a finish as text": Ending([FINISH_AS_TEXT], [FINISH_AS_TEXT], error=True),
    "no finish": Ending([A], [A], error=True),
    "no finish and a close": Ending([A], [A], error=True, end=CLOSE),
    "half an event": Ending([A, A[:30]], [A], error=True),
    "half an event and a close": Ending([A, A[:30]], [A], error=True, end=CLOSE),
    "an event without its empty line": Ending([A, FIN_TEXT.rstrip("\n")], [A, FIN_TEXT, DONE_TEXT]),
    "an event that is no JSON": Ending([A, "data: {bad\n\n", FIN_TEXT, DONE_TEXT], [A, "data: {bad\n\n", FIN_TEXT, DONE_TEXT]),
    "an event of 300 KB": Ending([event("y" * 300_000), FIN_TEXT, DONE_TEXT], [event("y" * 300_000), FIN_TEXT, DONE_TEXT]),
    "an error": Ending([A, OOM], [A, OOM], own=True),
    "an error and done": Ending([A, OOM, DONE_TEXT], [A, OOM], own=True),
    "an error and a close": Ending([A, OOM], [A, OOM], own=True, end=CLOSE),
    "an event named error": Ending([A, "event: error\ndata: oom\n\n"], [A, "event: error\ndata: oom\n\n"], own=True, end=CLOSE),
    "a line named error": Ending([A, 'error: {"message":"oom"}\n\n'], [A, 'error: {"message":"oom"}\n\n'], error=True),
    "completions": Ending(COMPLETION, [*COMPLETION, DONE_TEXT], path="/v1/completions"),
    "completions cut": Ending(COMPLETION[:1], COMPLETION[:1], error=True, path="/v1/completions"),
    "responses": Ending([CREATED, COMPLETED], [CREATED, COMPLETED], path="/v1/responses"),
    "responses with done": Ending([CREATED, COMPLETED, DONE_TEXT], [CREATED, COMPLETED, DONE_TEXT], path="/v1/responses"),
    "responses ended early": Ending([CREATED], [CREATED], error=True, path="/v1/responses"),
    "responses closed early": Ending([CREATED], [CREATED], error=True, end=CLOSE, path="/v1/responses"),
    "messages": Ending([STARTED, STOPPED], [STARTED, STOPPED], path="/v1/messages"),
    "messages ended early": Ending([STARTED], [STARTED], error=True, path="/v1/messages"),
    "messages closed early": Ending([STARTED], [STARTED], error=True, end=CLOSE, path="/v1/messages"),
}


@pytest.mark.case("B005", "B007", "B011")
@pytest.mark.parametrize("name", ENDINGS)
def test_the_end_of_a_stream_is_true(steady: Stage, name: str) -> None:
    ending = ENDINGS[name]
    mark = f"ending-{list(ENDINGS).index(name)}"
    got = _asks(steady, ending.path, ending.texts, ending.end, mark)
    text = got.body.decode()
    passed = "".join(ending.passed)
    assert text.startswith(passed)
    rest = text[len(passed) :]
    assert rest.count('"error": {') == ending.error
    assert rest.count("\n\n") == ending.error
    assert ("upstream_disconnected" in rest) == ending.error
    if ending.error or ending.own:
        assert "[DONE]" not in text
    assert ("status=502" in steady.router.log_line(mark)) == (ending.error or ending.own)
    assert len(steady.u1.requests) == 1
    assert steady.u2.requests == []


@pytest.mark.case("B018")
def test_ten_thousand_usages_that_are_null_are_one_line_of_the_log(stage: Stage) -> None:
    text = A.replace("}\n\n", ',"usage":null}\n\n')
    stage.u1.script = [SH, ["s", f"{len(text):x}\r\n{text}\r\n" * 10_000], FIN, DONE, END]
    got = stage.router.ask(post(CHAT_S, "X-Request-Id: many-nulls\r\n"))
    assert got.body.count(b"data: ") == 10_002
    assert "status=200" in stage.router.log_line("many-nulls")
    assert "many-nulls" not in stage.router.err.read_text()


@pytest.mark.case("B012")
def test_forty_bytes_leave_before_the_next_forty_come(stage: Stage) -> None:
    go = [threading.Event() for _ in range(3)]
    texts = [f'data: {{"i":{index},"pad":"xxxxxxxxxxxx"}}\n\n' for index in range(3)]
    held = [step for text, gate in zip(texts, go, strict=True) for step in (["c", text], ["hold", gate])]
    stage.u1.script = [SH, *held, FIN, DONE, END]
    with stage.router.client() as client:
        client.send(post(CHAT_S))
        for text, gate in zip(texts, go, strict=True):
            client.until(text.encode())  # the engine says nothing more until this has been read
            gate.set()
        client.until(b"[DONE]")


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with staged(tmp_path_factory.mktemp("faulty"), altered=["fails-at-a-word"]) as stage:
        yield stage


@interpreted_only
@pytest.mark.case("B014", "T30")
def test_a_fault_of_our_own_is_told_and_never_looks_like_an_end(faulty: Stage) -> None:
    asking = faulty.router.ask(post(CHAT.replace(b"hi", b"fail-in-asking"), "X-Request-Id: own-1\r\n"))
    assert (asking.status, asking.error["code"], asking.get("x-request-id")) == (500, "internal_error", "own-1")
    assert "status=500" in faulty.router.log_line("own-1")
    faulty.u1.script = [SH, E("a"), ["w", 100], E("fail-in-answering"), FIN, DONE, END]
    answering = faulty.router.ask(post(CHAT_S))
    assert "internal_error" in answering.events[-1]
    assert b"[DONE]" not in answering.body
    assert not answering.whole
    for text in (asking.body.decode(), answering.body.decode()):
        assert "RuntimeError" not in text
        assert "as the test wants it" not in text
    assert "as the test wants it" not in faulty.router.err.read_text()
    assert faulty.router.ask(get("/health")).status == 200
    faulty.u1.script = [OK]
    assert faulty.router.ask(post(CHAT)).status == 200
    faulty.router.at_rest()


NOTHING_YET = {
    "a first event that is an error": [SH, ["c", OOM], END],
    "a head and a close": [SH, CLOSE],
    "a head and a reset": [SH, ["w", 20], ["rst"]],
    "comments and a close": [SH, ["c", ": ping\n\n"], CLOSE],
    "an end without an event": [SH, END],
    "empty data and an end": [SH, ["c", "data:\n\n"], END],
    "an EOF-delimited nothing": [["s", "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"], CLOSE],
    "half a first event and a close": [SH, ["c", A[:20]], CLOSE],
}


@pytest.mark.case("B048")
@pytest.mark.parametrize("name", NOTHING_YET)
def test_a_stream_that_fails_before_its_first_content_is_another_engines(steady: Stage, name: str) -> None:
    steady.u1.script = NOTHING_YET[name]
    steady.u2.script = GOOD_S
    got = steady.router.ask(post(CHAT2_S))
    assert got.status == 200
    assert got.body.decode() == event("a") + event("b") + event("c") + FIN_TEXT + DONE_TEXT
    assert (len(steady.u1.requests), len(steady.u2.requests)) == (1, 1)


@pytest.mark.case("B006", "B036")
def test_prompts_that_are_too_long_bench_nobody_though_the_engine_says_so_in_a_stream(tmp_path: Path) -> None:
    with staged(tmp_path) as stage:
        for script in (FIRST["a name of a client's fault"].texts, FIRST["a line named error"].texts):
            stage.u1.script = stage.u2.script = [SH, *[["c", text] for text in script], END]
            for _ in range(10):
                assert stage.router.ask(post(CHAT2_S)).status == 400
        assert len(stage.u1.requests) + len(stage.u2.requests) == 20
        assert stage.router.metric("llmgw_breaker_state") == 0
        assert stage.router.metric("llmgw_endpoint_failures_total") == 0


@pytest.fixture(scope="module")
def commented(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    route = "breaker_failures = 100\nsse_comment_interval_s = 0.2"
    with staged(tmp_path_factory.mktemp("commented"), first_byte_s=1, route=route) as stage:
        yield stage


LATE: dict[str, tuple[str, list[Any], str]] = {
    "a refusal": ("/v1/chat/completions", [answer(400, ERROR_400)], "boom"),
    "a refusal of the messages family": ("/v1/messages", [answer(400, ERROR_400)], "boom"),
    "a refusal of the responses family": ("/v1/responses", [answer(400, ERROR_400)], "boom"),
    "a first event that is an error": ("/v1/chat/completions", [SH, ["c", f"data: {ERROR_400}\n\n"], END], "boom"),
    "an answer that is no stream": ("/v1/chat/completions", [OK], "without a stream"),
    "a close": ("/v1/chat/completions", [CLOSE], "upstream_disconnected"),
    "silence": ("/v1/chat/completions", [["w", 10_000]], "upstream_timeout"),
}


@pytest.mark.case("B010", "T10")
@pytest.mark.parametrize("name", LATE)
def test_once_comments_are_out_every_failure_is_one_event_in_the_familys_shape(commented: Stage, name: str) -> None:
    path, steps, says = LATE[name]
    commented.u1.script = [["w", 500], *steps]
    got = commented.router.ask(post(CHAT_S, path=path))
    assert (got.status, got.whole) == (200, True)
    comments, told = got.events[:-1], got.events[-1]
    assert comments
    assert set(comments) == {": keep-alive"}
    assert told.startswith("data: {" if path == "/v1/chat/completions" else "event: error\ndata: {")
    assert says in told
    assert b"[DONE]" not in got.body
