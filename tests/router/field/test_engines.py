"""Engines as they really answer, break and refuse: what is tried again, what counts against them, what a client is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmgw.router.families import ROUTES
from tests.router.fakes import (
    CHAT,
    CHAT2,
    CHAT2_S,
    CHAT_S,
    DONE,
    END,
    FIN,
    GOOD_S,
    OK,
    OK_BODY,
    SH,
    E,
    Stage,
    answer,
    event,
    get,
    post,
    staged,
    until,
)

HEAD = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
SMALL = '{"a":1}'
ERROR = '{"error":{"message":"no","type":"x","code":null}}'
CLOSE = ["close"]


def _s(text: str) -> list[Any]:
    return ["s", text]


NO_ANSWERS: dict[str, list[Any]] = {
    "a status below 100": [_s(f"HTTP/1.1 099 X\r\nContent-Length: 7\r\n\r\n{SMALL}")],
    "a status above 599": [_s(f"HTTP/1.1 600 X\r\nContent-Length: 7\r\n\r\n{SMALL}")],
    "a status of two digits": [_s(f"HTTP/1.1 20 X\r\nContent-Length: 7\r\n\r\n{SMALL}")],
    "another version": [_s(f"HTTP/2.0 200 OK\r\nContent-Length: 7\r\n\r\n{SMALL}")],
    "frames of HTTP/2": [["x", "000006040000000000000400100000"], CLOSE],
    "a negative length": [_s(HEAD + f"Content-Length: -7\r\n\r\n{SMALL}"), CLOSE],
    "a length that is no number": [_s(HEAD + f"Content-Length: x\r\n\r\n{SMALL}"), CLOSE],
    "two lengths": [_s(HEAD + f"Content-Length: 7\r\nContent-Length: 8\r\n\r\n{SMALL}")],
    "a length beside chunks": [_s(HEAD + f"Content-Length: 7\r\nTransfer-Encoding: chunked\r\n\r\n7\r\n{SMALL}\r\n0\r\n\r\n")],
    "an unknown coding": [_s(HEAD + f"Transfer-Encoding: gzip, chunked\r\n\r\n7\r\n{SMALL}\r\n0\r\n\r\n")],
    "a chunk size that is none": [_s(HEAD + f"Transfer-Encoding: chunked\r\n\r\nzz\r\n{SMALL}\r\n0\r\n\r\n")],
    "a chunk size that overflows": [_s(HEAD + f"Transfer-Encoding: chunked\r\n\r\n{'f' * 17}\r\n{SMALL}\r\n0\r\n\r\n")],
    "chunks cut": [_s(HEAD + f"Transfer-Encoding: chunked\r\n\r\n7\r\n{SMALL}\r\n"), CLOSE],
    "bare line feeds": [_s(f"HTTP/1.1 200 OK\nContent-Length: 7\n\n{SMALL}"), CLOSE],
    "a nul in a header": [_s(HEAD + f"X: a\0b\r\nContent-Length: 7\r\n\r\n{SMALL}")],
    "a folded header": [_s(HEAD + f"X: a\r\n b\r\nContent-Length: 7\r\n\r\n{SMALL}")],
    "a header without a colon": [_s(HEAD + f"foo\r\nContent-Length: 7\r\n\r\n{SMALL}")],
    "a head of 200 KB": [_s(HEAD + f"X: {'a' * 200_000}\r\nContent-Length: 7\r\n\r\n{SMALL}")],
    "half a head": [_s("HTTP/1.1 200 OK\r\nContent-"), CLOSE],
    "empty lines": [_s("\r\n\r\n"), CLOSE],
    "an interim answer alone": [_s("HTTP/1.1 100 Continue\r\n\r\n"), CLOSE],
    "another protocol by upgrade": [_s("HTTP/1.1 101 X\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n")],
    "a redirect": [answer(307, "", "Location: http://127.0.0.1:9/")],
}


@pytest.mark.case("B038")
@pytest.mark.parametrize("name", NO_ANSWERS)
def test_what_is_no_answer_is_a_502_and_spoils_nothing_after_it(steady: Stage, name: str) -> None:
    steady.u1.script = NO_ANSWERS[name]
    got = steady.router.ask(post(CHAT))
    assert got.status == 502  # no time-out was waited for: that were a 504
    assert got.error["code"] in ("upstream_invalid", "upstream_disconnected", "upstream_redirect")
    steady.u1.script = [OK]
    assert steady.router.ask(post(CHAT)).body.decode() == OK_BODY


@pytest.mark.case("B048", "T31")
@pytest.mark.parametrize("name", [name for name in NO_ANSWERS if name != "chunks cut"])  # that one had begun to answer
def test_what_is_no_answer_is_asked_for_elsewhere(steady: Stage, name: str) -> None:
    steady.u1.script = NO_ANSWERS[name]
    got = steady.router.ask(post(CHAT2))
    assert (got.status, got.body.decode()) == (200, OK_BODY)
    assert (len(steady.u1.requests), len(steady.u2.requests)) == (1, 1)


ODD_ANSWERS: dict[str, list[Any]] = {
    "chunks in capitals": [_s(HEAD + f"Transfer-Encoding: Chunked\r\n\r\n7;x=y\r\n{SMALL}\r\n0;z\r\n\r\n")],
    "trailers": [_s(HEAD + f"Transfer-Encoding: chunked\r\n\r\n7\r\n{SMALL}\r\n0\r\nX-Trailer: 1\r\nContent-Type: text/html\r\n\r\n")],
    "no reason": [_s(f"HTTP/1.1 200\r\nContent-Length: 7\r\n\r\n{SMALL}")],
    "the version before": [_s(f"HTTP/1.0 200 OK\r\n\r\n{SMALL}"), CLOSE],
    "interim answers": [_s("HTTP/1.1 100 X\r\n\r\n" * 100 + f"HTTP/1.1 199 X\r\nX-Early: 1\r\n\r\n{HEAD}Content-Length: 7\r\n\r\n{SMALL}")],
    "empty lines before": [_s("\r\n\r\n" + HEAD + f"Content-Length: 7\r\n\r\n{SMALL}")],
    "a head of 40 KB": [_s(HEAD + f"X: {'a' * 40_000}\r\nContent-Length: 7\r\n\r\n{SMALL}")],
    "a close that is told": [_s(HEAD + f"Connection: close\r\nContent-Length: 7\r\n\r\n{SMALL}"), CLOSE],
}  # fmt: skip


@pytest.mark.case("B051")
@pytest.mark.parametrize("name", ODD_ANSWERS)
def test_an_odd_answer_is_an_answer(steady: Stage, name: str) -> None:
    steady.u1.script = ODD_ANSWERS[name]
    got = steady.router.ask(post(CHAT))
    assert (got.status, got.body.decode()) == (200, SMALL)
    assert got.get("x-trailer") is None
    assert got.get("x-early") is None
    assert sum(key == "content-type" for key, _ in got.headers) <= 1
    steady.u1.script = [OK]
    assert steady.router.ask(post(CHAT)).body.decode() == OK_BODY


SURPLUS: dict[str, tuple[list[Any], int]] = {
    "line ends": ([answer(200, OK_BODY), _s("\r\n\r\n")], 200),
    "after no content": ([_s('HTTP/1.1 204 No Content\r\n\r\n{"leak":true}')], 204),
    "after an error": ([answer(400, ERROR), _s('HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n{"leak":true}')], 400),
    "after chunks": ([_s(HEAD + f'Transfer-Encoding: chunked\r\n\r\n7\r\n{SMALL}\r\n0\r\n\r\n{{"leak":true}}')], 200),
    "in one write with noise": ([_s(answer(200, OK_BODY)[1] + "\x00\x01leak")], 200),
}


@pytest.mark.case("B051", "T16")
@pytest.mark.parametrize("name", SURPLUS)
def test_what_follows_an_answer_is_nobodys(steady: Stage, name: str) -> None:
    steady.u1.script, status = SURPLUS[name]
    with steady.router.client() as client:
        client.send(post(CHAT))
        first = client.answer()
        assert first.status == status
        assert b"leak" not in first.body
        steady.u1.script = [OK]
        client.send(post(CHAT))
        assert client.answer().body.decode() == OK_BODY


CLIENTS_FAULTS = [400, 401, 403, 404, 408, 409, 413, 422]


@pytest.mark.case("B036", "T31")
@pytest.mark.parametrize("status", CLIENTS_FAULTS)
@pytest.mark.parametrize("body", [CHAT2, CHAT2_S], ids=["plain", "stream"])
def test_a_clients_fault_is_told_as_it_is_and_asked_of_nobody_else(steady: Stage, status: int, body: bytes) -> None:
    steady.u1.script = [answer(status, ERROR)]
    before = steady.router.metric("llmgw_endpoint_failures_total")
    got = steady.router.ask(post(body))
    assert (got.status, got.body.decode(), got.get("content-type")) == (status, ERROR, "application/json")
    assert (len(steady.u1.requests), len(steady.u2.requests)) == (1, 0)
    assert steady.router.metric("llmgw_endpoint_failures_total") == before


@pytest.mark.case("B038", "T31")
@pytest.mark.parametrize("status", [500, 501, 502, 503, 504, 529, 429])
@pytest.mark.parametrize("body", [CHAT2, CHAT2_S], ids=["plain", "stream"])
def test_an_engines_fault_is_asked_of_another(steady: Stage, status: int, body: bytes) -> None:
    steady.u1.script = [answer(status, ERROR, "Retry-After: 0")]
    steady.u2.script = GOOD_S if body is CHAT2_S else [OK]
    got = steady.router.ask(post(body))
    assert got.status == 200
    assert (len(steady.u1.requests), len(steady.u2.requests)) == (1, 1)
    until(lambda: steady.router.metric_of("llmgw_endpoint_resting", 'endpoint="u1"') == 0, "no rest is left for the next row")


@pytest.mark.case("B038")
def test_another_engine_gets_the_whole_body_again(steady: Stage) -> None:
    body = CHAT2.replace(b"hi", bytes(range(0x20, 0x7F)).replace(b'"', b"").replace(b"\\", b"") * 50_000)
    steady.u1.script = [answer(500, ERROR)]
    assert steady.router.ask(post(body)).status == 200
    assert steady.u1.requests[0]["body"] == steady.u2.requests[0]["body"] == body


@pytest.mark.case("B038")
@pytest.mark.parametrize("body", [CHAT2, CHAT2_S], ids=["plain", "stream"])
def test_an_answer_that_has_begun_is_asked_of_nobody_else(steady: Stage, body: bytes) -> None:
    head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 223\r\n\r\n"
    steady.u1.script = [*GOOD_S[:3], CLOSE] if body is CHAT2_S else [_s(head + OK_BODY[:100]), CLOSE]
    got = steady.router.ask(post(body))
    assert got.status == (200 if body is CHAT2_S else 502)
    assert b"upstream_disconnected" in got.body
    assert (len(steady.u1.requests), len(steady.u2.requests)) == (1, 0)


RETRY_AFTER = ["7.5", "-1", "inf", "nan", "1e9", "9" * 400, "", "0", "soon", "Wed, 21 Oct 2037 07:28:00 GMT"]


@pytest.mark.case("B044")
@pytest.mark.parametrize("told", RETRY_AFTER)
def test_a_hint_to_wait_is_whole_seconds_whatever_the_engine_says(steady: Stage, told: str) -> None:
    steady.u1.script = [answer(429, ERROR, f"Retry-After: {told}")]
    for _ in range(2):  # a model's only engine is asked again, whatever it said
        got = steady.router.ask(post(CHAT))
        assert (got.status, got.body.decode()) == (429, ERROR)
        assert 1 <= int(got.get("retry-after") or "") <= 3600
    assert len(steady.u1.requests) == 2
    steady.u1.script = [answer(429, ERROR, "Retry-After: 0")]
    assert steady.router.ask(post(CHAT)).status == 429


@pytest.mark.case("B042")
def test_a_client_that_repeats_by_itself_does_not_multiply_the_calls(tmp_path: Path) -> None:
    with staged(tmp_path) as stage:
        stage.u1.script = stage.u2.script = [answer(503, ERROR)]
        attempts = 0
        while attempts < 3:  # as the official clients do: twice more, unless they are told not to
            attempts += 1
            got = stage.router.ask(post(CHAT2))
            assert got.status == 503
            if got.get("x-should-retry") == "false":
                break
        assert attempts == 1
        assert len(stage.u1.requests) + len(stage.u2.requests) == 2


@pytest.mark.case("B046")
@pytest.mark.parametrize("body", [CHAT2, CHAT2_S], ids=["plain", "stream"])
def test_without_retries_nobody_else_is_asked(tmp_path: Path, body: bytes) -> None:
    change = {"retries = 1": "retries = 0", 'id = "u2"': 'id = "u2"\npriority = 5'}
    with staged(tmp_path, change=change, route="breaker_failures = 100") as stage:
        for script, status in (([answer(500, ERROR)], 500), ([CLOSE], 502), ([["w", 20_000]], 504)):
            stage.u1.script = script
            assert stage.router.ask(post(body)).status == status
        assert stage.u2.requests == []


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with staged(tmp_path_factory.mktemp("hasty"), first_byte_s=0.4, idle_s=0.6, route="breaker_failures = 100") as stage:
        yield stage


def _at_once(stage: Stage, requests: list[bytes]) -> list[int]:
    """The statuses of requests that are made side by side."""
    found: list[int] = []
    tasks = [threading.Thread(target=lambda data=data: found.append(stage.router.ask(data).status)) for data in requests]
    for task in tasks:
        task.start()
    for task in tasks:
        task.join()
    return found


@pytest.mark.case("B040", "B041", "T32")
def test_the_limits_of_the_file_are_those_of_every_route(hasty: Stage) -> None:
    requests = [post(body, path=path) for path in sorted(ROUTES) for body in (CHAT, CHAT_S)]
    for script, limit_s in (([["w", 20_000]], 0.4), ([_s(HEAD + "Content-Length: 7\r\n\r\n{"), ["w", 20_000]], 0.6)):
        hasty.u1.script = script
        began = time.monotonic()
        assert set(_at_once(hasty, requests)) == {504}
        # Not sooner: a busy machine only adds to that. Nor by a default's 120 or 300 s or the total of 30 s: the clients wait for 20.
        assert time.monotonic() - began >= limit_s / 2


@pytest.mark.case("B035")
def test_one_engine_that_says_nothing_takes_no_share_of_the_other(hasty: Stage) -> None:
    hasty.u1.script = [["w", 20_000]]
    hasty.u1.log.clear()
    hasty.u2.log.clear()
    assert set(_at_once(hasty, [post(CHAT2)] * 60)) == {200}
    assert len(hasty.u2.requests) == 60
    hasty.router.at_rest()


@pytest.mark.case("B052")
def test_an_engine_that_knows_no_health_is_used(tmp_path: Path) -> None:
    with staged(tmp_path, change={'id = "u1"': 'id = "u1"\nengine = "openai"'}) as stage:
        stage.u1.script = {"POST /v1/chat/completions": [OK], "*": [answer(404, ERROR)]}
        for _ in range(3):
            assert stage.router.ask(post(CHAT)).status == 200
        assert stage.router.ask(get("/ready")).status == 200


@pytest.mark.case("B037")
def test_connections_that_an_engine_closes_when_idle_cost_no_request(steady: Stage) -> None:
    steady.u1.script = [OK, ["w", 10], CLOSE]
    for body in (CHAT, CHAT_S, CHAT):
        assert steady.router.ask(post(body)).status == 200
        until(lambda: steady.u1.count("closed") == len(steady.u1.requests), "the engine has closed it")
    assert len(steady.u1.requests) == 3


LONG = 100_000  # bytes; more than is held back before a plain answer begins to be passed on
CUT: dict[str, list[Any]] = {
    "with a length": [_s(HEAD + f"Content-Length: {2 * LONG}\r\n\r\n" + "a" * LONG), CLOSE],
    "with a length, by silence": [_s(HEAD + f"Content-Length: {2 * LONG}\r\n\r\n" + "a" * LONG), ["w", 20_000]],
    "in chunks": [_s(HEAD + "Transfer-Encoding: chunked\r\n\r\n"), ["c", "a" * LONG], CLOSE],
    "in chunks, by noise": [_s(HEAD + "Transfer-Encoding: chunked\r\n\r\n"), ["c", "a" * LONG], ["w", 50], _s("zz\r\n"), ["w", 20_000]],
    "until a reset": [_s("HTTP/1.1 200 OK\r\nContent-Type: audio/mpeg\r\n\r\n" + "a" * LONG), ["w", 50], ["rst"]],
}


@pytest.mark.case("B014", "B038")
@pytest.mark.parametrize("name", CUT)
def test_a_long_answer_that_is_cut_never_looks_whole(hasty: Stage, name: str) -> None:
    hasty.u1.script = CUT[name]
    mark = f"cut-{list(CUT).index(name)}"
    got = hasty.router.ask(post(CHAT, f"X-Request-Id: {mark}\r\n"))
    assert got.body == b"a" * LONG
    assert not got.whole
    line = hasty.router.log_line(mark)
    assert "status=50" in line
    assert "reason=upstream_" in line
    hasty.u1.script = [OK]
    assert hasty.router.ask(post(CHAT)).body.decode() == OK_BODY


@pytest.mark.case("B010", "T10")
def test_comments_of_an_engine_and_slow_events_are_no_silence(hasty: Stage) -> None:
    ping = [["c", ": ping\n\n"], ["w", 350]]
    hasty.u1.script = [SH, *ping * 4, E("a"), ["w", 350], E("b"), ["w", 350], FIN, DONE, END]
    got = hasty.router.ask(post(CHAT_S))
    assert got.events[-1] == "data: [DONE]"
    assert b"error" not in got.body


@pytest.mark.case("B032", "T11")
def test_a_client_that_pauses_is_no_silence_of_its_engine(hasty: Stage) -> None:
    hasty.u1.script = [SH, ["rep", 25, 0, event("y" * 500_000)], FIN, DONE, END]
    seen: list[int] = []

    def stalled() -> bool:  # for longer than the engine may be silent
        seen.append(hasty.u1.count("sent"))
        return len(seen) > 150 and seen[-150] == seen[-1]

    hasty.u1.log.clear()
    with hasty.router.client() as client:
        client.send(post(CHAT_S, "Connection: close\r\n"))
        client.until(b"yyy")
        until(stalled, "nothing moves")
        assert client.rest().endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.case("B024")
def test_what_stands_behind_a_stream_is_answered_after_it(steady: Stage) -> None:
    steady.u1.script = [SH, E("a"), ["w", 100], FIN, DONE, END]
    for behind, status in ((get("/health"), 200), (b"noise\r\n\r\n", 400), (post(b"{"), 400)):
        with steady.router.client() as client:
            client.send(post(CHAT_S) + behind)
            stream = client.answer()
            assert stream.events[-1] == "data: [DONE]"
            assert client.answer().status == status


@pytest.mark.case("B015", "B164")
@pytest.mark.parametrize("status", [200, 400])
def test_what_an_engine_says_to_its_own_hop_stays_there(stage: Stage, status: int) -> None:
    kept = {"x-engine": "1", "content-type": "application/json", "retry-after": "3", "openai-processing-ms": "12"}
    lost = [
        "Set-Cookie",
        "Server",
        "X-Request-Id",
        "Keep-Alive",
        "Te",
        "Trailer",
        "Upgrade",
        "Proxy-Authenticate",
        "Vary",
        "Alt-Svc",
        "X-Hop",
    ]
    lost += ["Access-Control-Allow-Origin", "Access-Control-Allow-Credentials", "Strict-Transport-Security"]
    more = [f"{name}: {value}" for name, value in kept.items() if name != "content-type"] + [f"{name}: lost-value" for name in lost]
    stage.u1.script = [answer(status, SMALL, *more, "Connection: keep-alive, x-hop")]
    got = stage.router.ask(post(CHAT, "X-Request-Id: mine\r\n"))
    assert (got.status, got.body.decode()) == (status, SMALL)
    told = dict(got.headers)
    assert {name: told[name] for name in kept} == kept
    assert told["x-request-id"] == "mine"
    assert "lost-value" not in told.values()
