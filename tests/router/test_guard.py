"""The guard of a real router process: refusals in the family's shape, live changes, and what log and metrics say (case B161)."""

from __future__ import annotations

import gzip
import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.router.fakes import CHAT, CHAT_S, DONE, END, FIN, SH, E, RouterProcess, Stage, get, post, staged, until

GUARD = """
[guard]
max_messages = 3
max_output_tokens = 100
max_images = 1
[[guard.rule]]
name = "code-name"
words = ["Blue Heron"]
[[guard.rule]]
name = "watched"
words = ["hi"]
action = "flag"
keys = ["single"]
[[guard.rule]]
name = "m2-only"
words = ["hi"]
models = ["m2"]
[[guard.rule]]
name = "later"
match = "[0-9]{16}"
"""
SECRET = CHAT.replace(b'"hi"', b'"about the BLUE\\u0020h\\u0065ron"')


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with staged(tmp_path_factory.mktemp("guard"), route=GUARD) as stage:
        yield stage


def seen(stage: Stage) -> int:
    return len(stage.u1.requests) + len(stage.u2.requests)


def test_a_blocked_prompt_is_a_400_that_names_the_rule_and_reaches_nobody(guarded: Stage) -> None:
    router, before = guarded.router, seen(guarded)
    got = router.ask(post(SECRET, "X-Request-Id: blocked-1\r\n"))
    assert got.status == 400
    assert got.error == {
        "message": "the rule 'code-name' of this gateway does not let the request pass",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "guard_blocked",
    }
    packed = gzip.compress(SECRET)
    assert router.ask(post(packed, "Content-Encoding: gzip\r\n")).error["code"] == "guard_blocked"
    assert seen(guarded) == before
    assert "reason=block:code-name" in router.log_line("request_id=blocked-1")
    assert router.metric_of("llmgw_guard_hits_total", 'action="block",rule="code-name"') >= 2
    for told in (router.out, router.err):
        assert "heron" not in told.read_text().lower()


def test_a_refusal_leaves_the_connection_open_for_the_next_request(guarded: Stage) -> None:
    with guarded.router.client() as client:
        for body, status in ((SECRET, 400), (CHAT, 200), (SECRET, 400), (CHAT, 200)):
            client.send(post(body))
            assert client.answer().status == status


def test_a_stream_is_refused_as_an_answer_and_not_as_an_event(guarded: Stage) -> None:
    got = guarded.router.ask(post(SECRET.replace(b"}]}", b'}],"stream":true}')))
    assert (got.status, got.get("content-type")) == (400, "application/json")


def test_each_family_is_told_in_its_own_shape(guarded: Stage) -> None:
    claude = guarded.router.ask(post(SECRET, path="/v1/messages")).json()
    assert claude["type"] == "error"
    assert (claude["error"]["type"], claude["error"]["code"]) == ("invalid_request_error", "guard_blocked")
    answers = guarded.router.ask(post(b'{"model":"m1","input":"blue heron"}', path="/v1/responses"))
    assert (answers.status, answers.error["param"]) == (400, "input")


@pytest.mark.parametrize(
    ("path", "body", "code", "param"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}] * 4}, "too_many_messages", "messages"),
        ("/v1/messages", {"messages": [{"role": "user", "content": ""}] * 4, "max_tokens": 5}, "too_many_messages", "messages"),
        ("/v1/responses", {"input": [{"role": "user", "content": ""}] * 4}, "too_many_messages", "input"),
        ("/v1/chat/completions", {"messages": [], "max_completion_tokens": 101}, "too_many_output_tokens", "max_completion_tokens"),
        ("/v1/responses", {"input": "", "max_output_tokens": 101}, "too_many_output_tokens", "max_output_tokens"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://i"}}] * 2}]},
            "too_many_images",
            "messages",
        ),
    ],
)
def test_what_is_over_a_limit_is_refused_with_its_member(guarded: Stage, path: str, body: dict[str, object], code: str, param: str) -> None:
    before = seen(guarded)
    got = guarded.router.ask(post(json.dumps({"model": "m1", **body}).encode(), path=path))
    assert got.status == 400
    assert got.error["code"] == code
    assert "/v1/messages" in path or got.error["param"] == param
    assert seen(guarded) == before


def test_a_flag_lets_pass_and_is_counted_and_logged(guarded: Stage) -> None:
    router = guarded.router
    assert router.ask(post(CHAT, "X-Request-Id: flag-1\r\n", key="SINGLE")).status == 200
    assert router.log_line("request_id=flag-1").endswith("reason=only,flag:watched")
    assert router.metric_of("llmgw_guard_hits_total", 'action="flag",rule="watched"') == 1
    assert router.ask(post(CHAT, "X-Request-Id: plain-1\r\n")).status == 200
    assert router.log_line("request_id=plain-1").endswith("reason=only")


def test_a_rule_for_one_model_is_for_no_other(guarded: Stage) -> None:
    assert guarded.router.ask(post(CHAT)).status == 200
    assert guarded.router.ask(post(CHAT.replace(b"m1", b"fast"))).status == 200
    assert guarded.router.ask(post(CHAT.replace(b"m1", b"m2"))).error["code"] == "guard_blocked"


def test_an_unknown_model_and_a_wrong_key_are_told_before_the_guard_is_asked(guarded: Stage) -> None:
    assert guarded.router.ask(post(SECRET.replace(b"m1", b"nope"))).status == 404
    assert guarded.router.ask(post(SECRET, key="NARROW")).status == 403
    assert guarded.router.ask(post(SECRET, key="wrong")).status == 401


def test_bytes_that_pass_are_the_clients_own(guarded: Stage) -> None:
    body = b' {"messages" : [{"role":"user","content":"h\\u0069 \\u00e9"}], "model":"m1","max_tokens":1e2}\n'
    assert guarded.router.ask(post(body)).status == 200
    assert guarded.u1.requests[-1]["body"] == body


def test_what_is_not_in_force_yet_is_told_at_the_start(guarded: Stage) -> None:
    assert "guard.rule 'later': match has no effect in this build yet" in guarded.router.err.read_text()


def reload(router: RouterProcess, text: str) -> None:
    before = router.err.read_text().count("event=reloaded")
    router.config.write_text(text)
    router.signal(signal.SIGHUP)
    until(lambda: router.err.read_text().count("event=reloaded") > before, "the file is taken")


def test_a_changed_guard_holds_for_the_next_request_and_a_running_stream_ends_under_its_own(tmp_path: Path) -> None:
    with staged(tmp_path, first_byte_s=20, idle_s=20) as stage:
        go = threading.Event()
        stage.u1.script = [SH, E("a"), ["hold", go], FIN, DONE, END]
        with stage.router.client() as client:
            client.send(post(CHAT_S))
            client.until(b"\n\n")
            reload(stage.router, f'{stage.text}\n[[guard.rule]]\nname = "new"\nwords = ["hi"]\n')
            assert stage.router.ask(post(CHAT)).error["code"] == "guard_blocked"
            go.set()
            assert b"[DONE]" in client.until(b"0\r\n\r\n")
            client.send(post(CHAT))  # the connection is older than the guard, its next request is not
            assert client.answer().error["code"] == "guard_blocked"
            assert stage.router.ask(post(CHAT)).status == 400  # and it stays so
        stage.router.config.write_text(stage.text)
        stage.router.signal(signal.SIGHUP)
        until(lambda: stage.router.ask(get("/health")).status == 200 and stage.router.ask(post(CHAT)).status == 200, "the rule is gone")
