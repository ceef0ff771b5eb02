"""Streams through a real router: they leave at once, byte for byte, and their end is true (cases T01, T02, T06, T07, T10, T11)."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from typing import Any

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
    OK_BODY,
    SH,
    WAIT_S,
    E,
    Stage,
    answer,
    event,
    post,
    staged,
    until,
)

EVENT_63 = bytes.fromhex(
    "646174613a207b2263686f69636573223a5b7b22696e646578223a302c2264656c7461223a7b22636f6e74656e74223a22e58c97f09f9880227d7d5d7d0a0a"
)
TOO_LONG = '{"error":{"message":"too long","type":"bad","code":"ctx_len"}}'


@pytest.mark.case("T01", "B001", "B012")
def test_each_event_leaves_before_the_next_one_comes(stage: Stage) -> None:
    seen = [threading.Event() for _ in range(5)]
    stage.u1.script = [SH, *[step for i in range(5) for step in (E(f"x{i}"), ["hold", seen[i]])], FIN, DONE, END]
    with stage.router.client() as client:
        client.send(post(CHAT_S))
        head = client.until(b"\r\n\r\n").lower()
        for i in range(5):  # the engine says the next one only after this: had any been held for the next, none would have come
            client.until(f"x{i}".encode())
            seen[i].set()
        rest = client.until(b"0\r\n\r\n")
    assert b"200 ok" in head
    assert b"content-type: text/event-stream" in head
    assert b"cache-control: no-cache" in head
    assert b"x-accel-buffering: no" in head
    assert b"content-length" not in head
    assert b"content-encoding" not in head
    assert b"data: [DONE]" in rest


@pytest.mark.case("T02", "B002")
@pytest.mark.parametrize("chunks", [1, 3])
def test_a_character_cut_across_writes_arrives_byte_for_byte(stage: Stage, chunks: int) -> None:
    parts = (EVENT_63[:51], EVENT_63[51:54], EVENT_63[54:])
    if chunks == 1:
        writes = [b"3f\r\n" + parts[0], parts[1], parts[2] + b"\r\n0\r\n\r\n"]
    else:
        writes = [b"%x\r\n%b\r\n" % (len(part), part) for part in parts]
        writes[-1] += b"0\r\n\r\n"
    stage.u1.script = [SH, *[step for data in writes for step in (["x", data.hex()], ["w", 30])]]
    got = stage.router.ask(post(CHAT_S))
    assert got.body.startswith(EVENT_63)
    assert b"\xef\xbf\xbd" not in got.body


@pytest.mark.case("B004", "B011")
def test_events_of_every_shape_pass_unchanged(stage: Stage) -> None:
    text = (
        ': ping\r\n\r\nevent: x\r\nid: 7\r\ndata:{"a":1}\r\n\r\ndata: {bad\n\ndata: one\ndata: two\n\n'
        + event("z")
        + 'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\r\n\r\n: bye\n\ndata: [DONE]\r\n\r\n'
    )
    stage.u1.script = [SH, *[["c", text[i : i + 7]] for i in range(0, len(text), 7)], END]
    got = stage.router.ask(post(CHAT_S))
    assert got.body.decode() == text
    assert got.whole


@pytest.mark.case("T06", "B006")
def test_an_engine_that_refuses_a_stream_is_an_http_error(stage: Stage) -> None:
    stage.u1.script = [answer(400, TOO_LONG)]
    refused = stage.router.ask(post(CHAT_S))
    assert (refused.status, refused.body.decode()) == (400, TOO_LONG)
    stage.u1.script = [answer(429, TOO_LONG, "Retry-After: 7")]
    limited = stage.router.ask(post(CHAT_S))
    assert (limited.status, limited.get("retry-after"), limited.body.decode()) == (429, "7", TOO_LONG)
    stage.u1.script = [SH, ["c", ": ping\n\n"], ["c", 'data: {"error":{"message":"boom","type":"server_error","code":500}}\n\n'], END]
    first_event = stage.router.ask(post(CHAT_S))
    assert first_event.status == 500
    assert "boom" in first_event.error["message"]
    stage.u1.script = [["s", "HTTP/1.1 500 X\r\nContent-Length: 4\r\n\r\noops"]]
    plain = stage.router.ask(post(CHAT_S))
    assert plain.status == 500
    assert "oops" in plain.error["message"]
    assert all("event-stream" not in (got.get("content-type") or "") for got in (refused, limited, first_event, plain))


@pytest.fixture
def fresh(tmp_path: Path) -> Any:
    with staged(tmp_path) as found:
        yield found


BREAKS = {
    "close": [SH, E("a"), E("b"), E("c"), ["close"]],
    "reset": [SH, E("a"), E("b"), E("c"), ["w", 100], ["rst"]],
    "eof_delimited": [
        ["s", "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n" + event("a") + event("b") + event("c")],
        ["close"],
    ],
    "half_an_event": [SH, E("a"), E("b"), E("c"), ["c", 'data: {"id":"c1","ob'], ["close"]],
    "ended_early": [SH, E("a"), E("b"), E("c"), END],
}


@pytest.mark.case("T07", "B007")
@pytest.mark.parametrize("how", BREAKS)
def test_a_stream_that_breaks_ends_with_one_error_event_and_no_done(fresh: Stage, how: str) -> None:
    fresh.u1.script = fresh.u2.script = BREAKS[how]
    got = fresh.router.ask(post(CHAT2_S))
    events = got.events
    assert got.status == 200
    assert [f'"{text}"' in shown for text, shown in zip("abc", events, strict=False)] == [True] * 3
    assert len(events) == 4
    assert '"error"' in events[3]
    assert '"code": "upstream_disconnected"' in events[3]
    assert "[DONE]" not in got.body.decode()
    assert len(fresh.u1.requests) + len(fresh.u2.requests) == 1
    line = fresh.router.log_line("path=/v1/chat/completions")
    assert "status=502" in line
    assert "reason=upstream_disconnected" in line
    assert fresh.router.metric("llmgw_endpoint_failures_total") == 1


@pytest.mark.case("B005")
def test_an_eof_delimited_stream_that_says_done_is_complete(stage: Stage) -> None:
    head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    stage.u1.script = [["s", head + event("a") + FIN[1] + "data: [DONE]\n\n"], ["close"]]
    got = stage.router.ask(post(CHAT_S))
    assert got.events[-1] == "data: [DONE]"
    assert "error" not in got.body.decode()


@pytest.mark.case("B005")
@pytest.mark.parametrize("steps", [[SH, E("a"), FIN, END], [SH, E("a"), FIN, ["close"]], [SH, E("a"), FIN, DONE, DONE, END]])
def test_a_finished_stream_has_exactly_one_done(stage: Stage, steps: list[Any]) -> None:
    stage.u1.script = steps
    got = stage.router.ask(post(CHAT_S))
    assert got.whole
    assert got.body.count(b"[DONE]") == 1
    assert got.events[-1] == "data: [DONE]"


@pytest.mark.case("B005")
def test_done_ends_the_answer_although_the_engine_never_ends_its_message(stage: Stage) -> None:
    stage.u1.script = [SH, E("a"), FIN, DONE, ["w", 8000]]
    got = stage.router.ask(post(CHAT_S))
    assert got.whole
    assert got.events[-1] == "data: [DONE]"
    until(lambda: stage.u1.count("peer_closed"), "the engine sees the close")


def test_an_error_event_in_mid_stream_is_passed_on_and_never_followed_by_done(stage: Stage) -> None:
    stage.u1.script = [SH, E("a"), ["c", 'data: {"error":{"message":"oom","code":500}}\n\n'], DONE, END]
    got = stage.router.ask(post(CHAT_S))
    assert len(got.events) == 2
    assert "oom" in got.events[1]
    assert "[DONE]" not in got.body.decode()


@pytest.mark.case("B005")
def test_a_stream_that_falls_silent_ends_with_an_error_event(tmp_path: Path) -> None:
    with staged(tmp_path, idle_s=0.5) as stage:
        stage.u1.script = [SH, E("a"), FIN, ["w", 10000]]
        got = stage.router.ask(post(CHAT_S))
        assert "upstream_timeout" in got.events[-1]
        assert "[DONE]" not in got.body.decode()
        until(lambda: stage.u1.count("peer_closed"), "the engine sees the close")


@pytest.mark.case("B048")
def test_a_stream_that_closes_before_its_first_event_is_tried_elsewhere(fresh: Stage) -> None:
    fresh.u1.script = [SH, ["c", ": ping\n\n"], ["close"]]
    fresh.u2.script = GOOD_S
    for _ in range(4):
        got = fresh.router.ask(post(CHAT2_S))
        assert got.status == 200
        assert b"".join(e.encode() + b"\n\n" for e in got.events).count(b"[DONE]") == 1
        assert b"ping" not in got.body


@pytest.mark.case("B007")
def test_the_other_families_break_off_in_their_own_shape(stage: Stage) -> None:
    start = ["c", 'event: message_start\ndata: {"type":"message_start","message":{"model":"x"}}\n\n']
    stage.u1.script = {"POST /v1/messages": [SH, start, ["close"]], "POST /v1/responses": [SH, start, ["close"]]}
    anthropic = stage.router.ask(post(CHAT_S, path="/v1/messages"))
    assert anthropic.events[-1].startswith('event: error\ndata: {"type": "error", "error": {"type": "api_error"')
    responses = stage.router.ask(post(CHAT_S, path="/v1/responses"))
    assert responses.events[-1].startswith('event: error\ndata: {"type": "error", "code": "upstream_disconnected"')
    assert b"[DONE]" not in anthropic.body + responses.body


def test_an_http_1_0_client_gets_a_plain_stream_that_the_close_ends(stage: Stage) -> None:
    stage.u1.script = GOOD_S
    with stage.router.client() as client:
        client.send(post(CHAT_S).replace(b"HTTP/1.1", b"HTTP/1.0"))
        got = client.rest()
    head, _, body = got.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert body.startswith(b'data: {"id"')
    assert body.endswith(b"data: [DONE]\n\n")


@pytest.mark.case("T10", "B010")
def test_comments_keep_a_waiting_stream_alive_when_they_are_asked_for(tmp_path: Path) -> None:
    with staged(tmp_path, first_byte_s=20, idle_s=20, route="sse_comment_interval_s = 0.5") as stage:
        commented = threading.Event()
        stage.u1.script = [["hold", commented], *GOOD_S]
        with stage.router.client() as client:
            client.send(post(CHAT_S))
            client.until(b"200 OK")
            body = client.count(b": keep-alive\n\n", 2)
            commented.set()
            body += client.until(b"[DONE]")
        assert body.index(b"keep-alive") < body.index(b"data:")
        stage.u1.script = [["w", 100], answer(400, TOO_LONG)]
        assert stage.router.ask(post(CHAT_S)).status == 400
        stage.u1.script = [["w", 1500], answer(400, TOO_LONG)]
        late = stage.router.ask(post(CHAT_S))
        assert late.status == 200
        assert "too long" in late.events[-1]
        assert late.events[-1].startswith("data: ")
        assert b"[DONE]" not in late.body
        stage.u1.script = [["w", 1200], answer(200, OK_BODY)]
        assert stage.router.ask(post(CHAT)).body.decode() == OK_BODY


@pytest.mark.case("T11", "B032")
def test_a_client_that_stops_reading_costs_no_memory_and_does_not_hold_up_the_end(tmp_path: Path) -> None:
    with staged(tmp_path, first_byte_s=60, idle_s=60) as stage:
        text = event("y" * 900)
        stage.u1.script = [SH, ["rep", 200_000, 0, text]]
        before = stage.router.rss_kib()
        with stage.router.client() as client:
            client.send(post(CHAT_S))
            client.until(b"yyy")
            sent = until(lambda: _stalled(stage), "the engine cannot send any more")
            assert sent < 200_000
            assert stage.router.rss_kib() - before < 10_240
            stage.router.signal(signal.SIGTERM)
            assert stage.router.process.wait(WAIT_S) == 0  # nothing but the end of the drain ends this one sooner


def _stalled(stage: Stage) -> int:
    sent = stage.u1.count("sent")
    time.sleep(0.5)
    return sent if sent and stage.u1.count("sent") == sent else 0


def test_a_slow_reader_gets_every_event_of_a_fast_stream(stage: Stage) -> None:
    count = 4000
    text = 'data: {"i":{i},"pad":"' + "p" * 500 + '"}\n\n'
    stage.u1.script = [SH, ["rep", count, 0, text], FIN, DONE, END]
    with stage.router.client() as client:
        client.send(post(CHAT_S))
        time.sleep(0.5)
        got = client.answer()
    numbers = [int(e.split('"i":')[1].split(",")[0]) for e in got.events if '"i":' in e]
    assert numbers == list(range(count))
    assert got.whole


def _piece(text: str, *, size: str = "{:x}") -> list[Any]:
    return ["s", size.format(len(text.encode())) + "\r\n" + text + "\r\n"]


# What is in a stream beside plain events: all that must not be passed on as it is, or only after a look.
ODD: dict[str, list[list[Any]]] = {
    "plain": [_piece(event("b")), _piece(event("c"))],
    "a word that is no error": [_piece(event('an error, \\"usage\\" and [DONE]')), _piece(event("c"))],
    "white space in the event": [_piece(event("b").replace(",", ", ")), _piece(event("c"))],
    "an event over lines": [_piece('data: {"choices":[\ndata: ]}\n\n'), _piece(event("c"))],
    "line ends of the other kind": [_piece(event("b").replace("\n", "\r\n")), _piece(event("c"))],
    "a chunk that is half an event": [_piece(event("b")[:30]), _piece(event("b")[30:]), _piece(event("c"))],
    "two events in a chunk": [_piece(event("b") + event("c"))],
    "a chunk with an extension": [_piece(event("b"), size="{:x};a=b"), _piece(event("c"))],
    "a chunk written otherwise": [_piece(event("b"), size="0{:X}"), _piece(event("c"))],
    "a comment": [_piece(": hello\n\n"), _piece(event("c"))],
    "usage of nothing": [_piece(event("b").replace("}]}", '}],"usage":null}')), _piece(event("c"))],
    "usage": [_piece('data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2,"total_tokens":3}}\n\n'), _piece(event("c"))],
    "an error": [_piece('data: {"error":{"message":"broken"}}\n\n'), _piece(event("c"))],
    "an end that is none": [_piece("data: [DONE]x\n\n"), _piece(event("c"))],
    "more after the end": [_piece(FIN_TEXT), _piece("data: [DONE]\n\n"), _piece(event("never"))],
}


@pytest.mark.parametrize("odd", ODD)
def test_a_stream_is_the_same_whether_its_chunks_come_one_by_one_or_at_once(stage: Stage, odd: str) -> None:
    begin, end = [SH, E("a"), E("b"), E("c")], [FIN, DONE, END]
    told = []
    for script in ([step for one in (*begin, *ODD[odd], *end) for step in (one, ["w", 20])], [_joined([*begin, *ODD[odd], *end])]):
        stage.u1.script = script
        got = stage.router.ask(post(CHAT_S))
        told.append((got.status, got.body))
    assert told[0] == told[1]
    assert b"never" not in told[0][1]


def _joined(script: list[list[Any]]) -> list[Any]:
    return ["s", "".join(step[1] if step[0] == "s" else "".join(_piece(step[1])[1]) for step in script)]
