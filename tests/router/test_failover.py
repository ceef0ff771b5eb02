"""What happens when engines fail: benches, trials, time-outs, pauses (cases T31, T32 and their kind)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.router.fakes import CHAT, CHAT2, CHAT2_S, CHAT_S, GOOD_S, OK, OK_BODY, Answer, Stage, answer, get, post, staged, until

ERROR = '{"error":{"message":"no","type":"x","code":null}}'


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Stage]:
    with staged(tmp_path) as stage:
        yield stage


@pytest.mark.case("T31", "B036")
def test_a_clients_own_fault_benches_nobody(fresh: Stage) -> None:
    fresh.u1.script = fresh.u2.script = [answer(400, ERROR)]
    for _ in range(20):
        got = fresh.router.ask(post(CHAT2))
        assert (got.status, got.body.decode()) == (400, ERROR)
    assert len(fresh.u1.requests) + len(fresh.u2.requests) == 20
    fresh.u1.script = fresh.u2.script = [OK]
    assert fresh.router.ask(post(CHAT2)).status == 200
    assert fresh.router.metric("llmgw_breaker_state") == 0


@pytest.mark.case("T31")
def test_a_refused_connect_benches_at_once(fresh: Stage) -> None:
    fresh.u1.close()
    for _ in range(20):
        assert fresh.router.ask(post(CHAT2)).status == 200
    assert len(fresh.u2.requests) == 20
    until(lambda: fresh.router.metric_of("llmgw_endpoint_failures_total", 'endpoint="u1"') >= 1, "the bench")
    assert fresh.router.metric_of("llmgw_endpoint_failures_total", 'endpoint="u1"') <= 3  # the first, and trials after 2 s
    (line,) = fresh.router.told("endpoint=u1")
    assert "an endpoint is out of use" in line
    assert "it refuses connections" in line
    assert "tried_again_in_s=2" in line


@pytest.mark.case("T31", "B045")
def test_an_engine_that_always_fails_is_benched_and_then_tried_once(fresh: Stage) -> None:
    fresh.u1.script = [answer(500, ERROR)]
    statuses = {fresh.router.ask(post(CHAT2)).status for _ in range(40)}
    assert statuses == {200}
    assert len(fresh.u1.requests) == 3
    assert fresh.router.metric_of("llmgw_breaker_state", 'endpoint="u1"') == 2
    until(lambda: fresh.router.metric_of("llmgw_breaker_state", 'endpoint="u1"') == 1, "the cool-down is over")
    for _ in range(20):
        assert fresh.router.ask(post(CHAT2)).status == 200
    assert len(fresh.u1.requests) == 4
    (line,) = fresh.router.told("endpoint=u1")
    assert "3 requests in a row failed" in line
    fresh.u1.script = [OK]
    until(lambda: fresh.router.metric_of("llmgw_breaker_state", 'endpoint="u1"') == 1, "the cool-down is over again")
    until(lambda: [fresh.router.ask(post(CHAT2)) for _ in range(5)] and len(fresh.u1.requests) > 8, "it is in use again")
    assert fresh.router.metric("llmgw_breaker_state") == 0
    assert ["in use again" in line for line in fresh.router.told("endpoint=u1")] == [False, True]


@pytest.mark.case("B042")
def test_when_everybody_fails_the_client_gets_the_engines_answer_and_a_hint_not_to_repeat(fresh: Stage) -> None:
    fresh.u1.script = fresh.u2.script = [answer(503, ERROR)]
    got = fresh.router.ask(post(CHAT2))
    assert (got.status, got.body.decode(), got.get("x-should-retry")) == (503, ERROR, "false")
    assert len(fresh.u1.requests) == len(fresh.u2.requests) == 1


@pytest.mark.case("B044")
def test_a_pause_that_is_asked_for_is_kept_and_told(fresh: Stage) -> None:
    fresh.u1.script = [answer(429, ERROR, "Retry-After: 9")]
    fresh.u2.script = [answer(429, ERROR, "Retry-After: 5")]
    for _ in range(3):
        got = fresh.router.ask(post(CHAT2))
        assert (got.status, got.get("retry-after")) == (429, "5")
    assert len(fresh.u1.requests) == len(fresh.u2.requests) == 1
    assert fresh.router.metric("llmgw_breaker_state") == 0
    alone = fresh.router.ask(post(CHAT))  # a model's only endpoint is never benched for its 429
    assert alone.status == 429
    assert len(fresh.u1.requests) == 2


def test_one_engines_pause_sends_the_request_to_another(fresh: Stage) -> None:
    fresh.u1.script = [answer(429, ERROR)]
    assert {fresh.router.ask(post(CHAT2)).status for _ in range(10)} == {200}


SILENT_ROUTES = [
    ("/v1/chat/completions", CHAT), ("/v1/chat/completions", CHAT_S), ("/v1/completions", CHAT), ("/v1/embeddings", CHAT),
    ("/v1/responses", CHAT_S), ("/v1/rerank", CHAT), ("/v1/messages", CHAT), ("/v1/audio/transcriptions", CHAT),
]  # fmt: skip


@pytest.mark.case("T32", "B035", "B040")
def test_a_silent_engine_is_a_504_on_every_route_and_disturbs_nobody(fresh: Stage) -> None:
    fresh.u1.script = [["w", 20_000]]
    found: list[Answer] = []

    def ask(path: str, body: bytes) -> None:
        found.append(fresh.router.ask(post(body, path=path)))

    tasks = [threading.Thread(target=ask, args=route) for route in SILENT_ROUTES + [("/v1/chat/completions", CHAT)] * 92]
    for task in tasks:
        task.start()
    for _ in range(20):
        assert fresh.router.ask(get("/health")).status == 200
        assert fresh.router.ask(post(CHAT2)).status == 200
    for task in tasks:
        task.join()
    assert len(found) == 100
    assert {got.status for got in found} == {504}  # all other limits are longer than the clients wait
    assert all(b"upstream_timeout" in got.body for got in found)
    until(lambda: fresh.u1.count("peer_closed") >= 100, "the engine sees every close")
    # Sequentially too: time-outs bench no model's only endpoint.
    for _ in range(2):
        began = time.monotonic()
        assert fresh.router.ask(post(CHAT)).status == 504
        # It was asked and given its time, not refused at once. A busy machine only adds to that, so this cannot flake.
        assert time.monotonic() - began >= 1.0


@pytest.mark.case("T32")
@pytest.mark.parametrize("body", [CHAT2, CHAT2_S])
def test_a_silent_engine_is_left_for_another(fresh: Stage, body: bytes) -> None:
    fresh.u1.script = [["w", 20_000]]
    fresh.u2.script = GOOD_S if body is CHAT2_S else [OK]
    until(lambda: fresh.router.ask(post(body)).status == 200 and fresh.u1.requests, "the silent one was asked first", 60)
    until(lambda: fresh.u1.count("peer_closed"), "the engine sees the close")
    fresh.router.at_rest()
    assert fresh.router.metric("llmgw_retries_total") == 1


def test_a_model_nobody_serves_any_more_is_503_with_the_reason(fresh: Stage) -> None:
    got = fresh.router.ask(post(CHAT.replace(b"m1", b"dead")))
    assert (got.status, got.error["code"]) == (503, "unreachable")
    assert got.get("retry-after") is not None
    again = fresh.router.ask(post(CHAT.replace(b"m1", b"dead")))
    assert (again.status, again.error["code"]) == (503, "unreachable")


def test_the_total_limit_ends_a_stream_with_an_error_event(tmp_path: Path) -> None:
    with staged(tmp_path, route="") as stage:
        stage.router.close()
        from tests.router.fakes import SH, RouterProcess, event

        router = RouterProcess(tmp_path, stage.text.replace("total_timeout_s = 30", "total_timeout_s = 1"))
        try:
            stage.u1.script = [SH, ["rep", 200, 50, event("x")]]
            got = router.ask(post(CHAT_S))
            assert got.whole
            assert '"code": "timeout"' in got.events[-1]
            stage.u1.script = [["w", 10_000]]
            assert router.ask(post(CHAT)).status == 504
        finally:
            router.close()


def test_an_endpoint_at_its_limit_lets_the_next_tier_serve_and_then_refuses(tmp_path: Path) -> None:
    with staged(tmp_path, route="max_inflight_per_endpoint = 1") as stage:
        stage.router.close()
        from tests.router.fakes import RouterProcess

        text = stage.text.replace('id = "u2"', 'id = "u2"\npriority = 5').replace("queue_max = 10", "queue_max = 0")
        router = RouterProcess(tmp_path, text)
        try:
            hold = threading.Event()
            stage.u1.script = stage.u2.script = [["hold", hold], OK]
            waiting = [threading.Thread(target=router.ask, args=(post(CHAT2),)) for _ in range(2)]
            waiting[0].start()
            until(lambda: stage.u1.requests, "the preferred one is taken")
            waiting[1].start()
            until(lambda: stage.u2.requests, "then the next tier")
            got = router.ask(post(CHAT2))
            assert (got.status, got.error["code"]) == (429, "overloaded")
            assert got.get("retry-after") is not None
            assert router.ask(get("/v1/models")).status == 200
            hold.set()
            for one in waiting:
                one.join()
            stage.u1.script = stage.u2.script = [OK]
            assert router.ask(post(CHAT2)).status == 200
        finally:
            router.close()


@pytest.mark.case("B098")
def test_slow_requests_spread_evenly(fresh: Stage) -> None:
    hold = threading.Event()
    fresh.u1.script = fresh.u2.script = [["hold", hold], OK]
    tasks = [threading.Thread(target=fresh.router.ask, args=(post(CHAT2),)) for _ in range(40)]
    for task in tasks:
        task.start()
    until(lambda: len(fresh.u1.requests) + len(fresh.u2.requests) == 40, "all are under way")
    assert abs(len(fresh.u1.requests) - 20) <= 2
    assert fresh.router.metric("llmgw_inflight") == 40
    hold.set()
    for task in tasks:
        task.join()
    fresh.router.at_rest()


def test_client_keys_and_engine_bodies_stay_apart_under_load(fresh: Stage) -> None:
    def ask(number: int) -> None:
        with fresh.router.client() as client:
            for _ in range(20):
                client.send(post(CHAT2))
                assert client.answer().body.decode() == OK_BODY

    tasks = [threading.Thread(target=ask, args=(number,)) for number in range(10)]
    for task in tasks:
        task.start()
    for task in tasks:
        task.join()
    assert len(fresh.u1.requests) + len(fresh.u2.requests) == 200
