"""Usage through a real router: asked for behind the client's back, never shown to who did not ask, counted (B008 B018 B020, T03 T08)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.router.fakes import CHAT, CHAT2_S, CHAT_S, DONE, END, FIN, OK, SH, E, Engine, Stage, answer, event, get, post, staged, until

USE_TEXT = 'data: {"id":"c1","choices":[],"usage":{"prompt_tokens":1,"completion_tokens":3,"total_tokens":4}}\n\n'
USE = ["c", USE_TEXT]
TOLD = [SH, E("a"), FIN, USE, DONE, END]
REFUSED = '{"error":{"message":"Unrecognized request argument: stream_options","type":"invalid_request_error"}}'


def asking(options: str) -> bytes:
    return CHAT_S[:-1] + b',"stream_options":' + options.encode() + b"}"


def sent(engine: Engine) -> dict[str, Any]:
    found = json.loads(engine.requests[-1]["body"])
    assert isinstance(found, dict)
    return found


class Counted:
    """What the router's metrics have risen by since this was made."""

    def __init__(self, stage: Stage, model: str = "m1") -> None:
        self._stage = stage
        self._model = model
        self._before = self._now()

    def _now(self) -> list[float]:
        rows: dict[str, float] = {}
        for line in self._stage.router.ask(get("/metrics")).body.decode().splitlines():
            if line.startswith(("llmgw_tokens_total{", "llmgw_usage_unknown_total{")):
                name, _, value = line.rpartition(" ")
                rows[name] = float(value)
        names = [f'llmgw_tokens_total{{kind="{kind}",model="{self._model}"}}' for kind in ("prompt", "cached", "completion")]
        return [rows.get(name, 0.0) for name in (*names, f'llmgw_usage_unknown_total{{model="{self._model}"}}')]

    def since(self) -> tuple[float, ...]:
        """(prompt, cached, completion, answers of which nothing is known)."""
        return tuple(now - before for now, before in zip(self._now(), self._before, strict=True))

    def becomes(self, *counts: float) -> None:
        until(lambda: self.since() == counts, f"{counts} are counted, now {self.since()}")


@pytest.mark.parametrize(
    ("body", "options", "shown"),
    [
        (CHAT_S, {"include_usage": True}, False),
        (asking("null"), {"include_usage": True}, False),
        (asking('{"x":1}'), {"include_usage": True, "x": 1}, False),
        (asking('{"include_usage":false,"x":1}'), {"include_usage": True, "x": 1}, False),
        (asking('{"x":1,"include_usage":true}'), {"include_usage": True, "x": 1}, True),
    ],
)
@pytest.mark.case("B008", "B020", "T08")
def test_usage_is_asked_for_and_counted_and_shown_only_to_who_asked(
    stage: Stage, body: bytes, options: dict[str, Any], shown: bool
) -> None:
    stage.u1.script = TOLD
    counted = Counted(stage)
    got = stage.router.ask(post(body))
    assert got.body.decode() == event("a") + FIN[1] + (USE_TEXT if shown else "") + DONE[1]
    assert got.whole
    assert sent(stage.u1)["stream_options"] == options
    if shown:
        assert stage.u1.requests[-1]["body"] == body
    counted.becomes(1, 0, 3, 0)


def test_events_of_one_byte_each_are_counted_and_cut_the_same(stage: Stage) -> None:
    text = event("a") + FIN[1] + USE_TEXT + DONE[1]
    stage.u1.script = [SH, *[["c", one] for one in text], END]
    counted = Counted(stage)
    got = stage.router.ask(post(CHAT_S))
    assert got.body.decode() == text.replace(USE_TEXT, "")
    counted.becomes(1, 0, 3, 0)


def test_usage_null_in_each_chunk_is_not_shown_to_who_did_not_ask_and_costs_one_log_line(stage: Stage) -> None:
    nulled = event("a").replace("}\n\n", ',"usage":null}\n\n')
    stage.u1.script = [SH, ["rep", 1000, 0, nulled], FIN, USE, DONE, END]
    errors = stage.router.err.read_text()
    counted = Counted(stage)
    got = stage.router.ask(post(CHAT_S, "X-Request-Id: nulls\r\n"))
    assert got.body.decode() == event("a") * 1000 + FIN[1] + DONE[1]
    assert "status=200" in stage.router.log_line("request_id=nulls ")
    assert stage.router.err.read_text() == errors
    counted.becomes(1, 0, 3, 0)
    asked = stage.router.ask(post(asking('{"include_usage":true}')))
    assert asked.body.decode() == nulled * 1000 + FIN[1] + USE_TEXT + DONE[1]


def test_an_alias_and_the_hidden_question_go_out_together(stage: Stage) -> None:
    stage.u1.script = TOLD
    counted = Counted(stage)
    got = stage.router.ask(post(CHAT_S.replace(b"m1", b"fast")))
    assert sent(stage.u1) == {**json.loads(CHAT_S), "stream_options": {"include_usage": True}}
    assert '"usage"' not in got.body.decode()
    assert '"model":"fast"' in got.events[0].replace(" ", "")
    counted.becomes(1, 0, 3, 0)


def test_nobody_is_asked_where_the_answer_tells_by_itself(stage: Stage) -> None:
    messages = CHAT_S[:-1] + b',"max_tokens":1}'
    start = 'event: message_start\ndata: {"type":"message_start","message":{"model":"m1","usage":{"input_tokens":7,"output_tokens":1}}}\n\n'
    delta = 'event: message_delta\ndata: {"type":"message_delta","usage":{"output_tokens":9}}\n\n'
    stop = 'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    for path, body, script, counts in (
        ("/v1/chat/completions", CHAT, [OK], (1, 0, 1, 0)),
        ("/v1/messages", messages, [SH, ["c", start], ["c", delta], ["c", stop], END], (7, 0, 9, 0)),
        ("/v1/embeddings", b'{"model":"m1","input":"x"}', [answer(200, '{"data":[],"usage":{"prompt_tokens":5}}')], (5, 0, 0, 0)),
        ("/v1/tokenize", b'{"model":"m1","prompt":"x"}', [answer(200, '{"tokens":[1]}')], (0, 0, 0, 0)),
    ):
        stage.u1.script = script
        counted = Counted(stage)
        got = stage.router.ask(post(body, path=path))
        assert got.status == 200
        assert stage.u1.requests[-1]["body"] == body
        counted.becomes(*counts)


def test_an_answer_larger_than_what_is_held_back_is_counted(stage: Stage) -> None:
    body = json.dumps({"data": [{"embedding": [0.125] * 40_000}], "usage": {"prompt_tokens": 12, "total_tokens": 12}})
    stage.u1.script = [answer(200, body)]
    counted = Counted(stage)
    assert stage.router.ask(post(b'{"model":"m1","input":"x"}', path="/v1/embeddings")).body.decode() == body
    counted.becomes(12, 0, 0, 0)


@pytest.mark.case("B020")
def test_an_engine_that_does_not_tell_is_counted_as_unknown_and_not_as_zero(stage: Stage) -> None:
    stage.u1.script = [SH, E("a"), FIN, DONE, END]
    counted = Counted(stage)
    assert stage.router.ask(post(CHAT_S)).whole
    counted.becomes(0, 0, 0, 1)


def test_tokens_that_were_told_before_a_stream_broke_are_kept(stage: Stage) -> None:
    so_far = event("a").replace("}\n\n", ',"usage":{"prompt_tokens":4,"completion_tokens":1}}\n\n')
    stage.u1.script = [SH, ["c", so_far], ["close"]]
    counted = Counted(stage)
    assert '"error"' in stage.router.ask(post(CHAT_S)).events[-1]
    counted.becomes(4, 0, 1, 0)


def test_a_request_that_brought_no_content_counts_nothing(stage: Stage) -> None:
    stage.u1.script = [answer(400, '{"error":{"message":"too long"}}')]
    counted = Counted(stage)
    assert stage.router.ask(post(CHAT_S)).status == 400
    stage.u1.script = [SH, ["c", 'data: {"error":{"message":"boom","code":400}}\n\n'], END]
    assert stage.router.ask(post(CHAT_S)).status == 400
    assert stage.u1.count("request") == 2, "what is not about our question is not asked twice"
    counted.becomes(0, 0, 0, 0)


@pytest.mark.parametrize("how", ["an answer", "a first event"])
def test_an_engine_that_knows_no_stream_options_is_asked_once_more_as_it_came_and_so_from_then_on(tmp_path: Path, how: str) -> None:
    refusal = [answer(400, REFUSED)] if how == "an answer" else [SH, ["c", f'data: {REFUSED[:-2]},"code":400}}}}\n\n'], END]
    good = [SH, E("a"), FIN, DONE, END]
    with staged(tmp_path) as stage:
        stage.u1.once = [refusal, good]
        got = stage.router.ask(post(CHAT_S))
        assert (got.status, got.body.decode()) == (200, event("a") + FIN[1] + DONE[1])
        assert ["stream_options" in json.loads(one["body"]) for one in stage.u1.requests] == [True, False]
        stage.u1.script = good
        assert stage.router.ask(post(CHAT_S)).status == 200
        assert stage.u1.requests[-1]["body"] == CHAT_S
        # What the client itself writes still goes to that engine, and its refusal to the client.
        stage.u1.script = [answer(400, REFUSED)]
        refused = stage.router.ask(post(asking('{"include_usage":true}')))
        assert (refused.status, refused.body.decode()) == (400, REFUSED)
        # Another endpoint has said nothing yet.
        stage.u1.script = stage.u2.script = TOLD
        until(lambda: stage.router.ask(post(CHAT2_S)).status == 200 and stage.u2.requests, "the other endpoint is asked")
        assert sent(stage.u2)["stream_options"] == {"include_usage": True}
        assert stage.router.metric("llmgw_retries_total") == 0


def test_an_engine_that_quotes_a_bad_request_in_its_refusal_is_asked_for_usage_again_next_time(stage: Stage) -> None:
    quoting = answer(422, '{"detail":[{"loc":["body","temperature"],"input":{"stream_options":{"include_usage":true}}}]}')
    stage.u1.script = [quoting]
    assert stage.router.ask(post(CHAT_S)).status == 422
    assert ["stream_options" in json.loads(one["body"]) for one in stage.u1.requests] == [True, False]
    stage.u1.script = TOLD
    counted = Counted(stage)
    assert stage.router.ask(post(CHAT_S)).status == 200
    counted.becomes(1, 0, 3, 0)


def test_options_that_are_there_twice_are_refused(stage: Stage) -> None:
    got = stage.router.ask(post(CHAT_S[:-1] + b',"stream_options":null,"stream_options":{}}'))
    assert (got.status, got.error["param"], got.error["code"]) == (400, "stream_options", "duplicate_key")
