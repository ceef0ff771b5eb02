"""Clients that leave at awkward moments: the engine is let go, and nothing stays counted (the CAN cases and their neighbours)."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.router.fakes import CHAT, CHAT2, CHAT2_S, CHAT_S, GOOD_S, OK, SH, Client, E, Stage, answer, event, get, post, staged, until
from tests.router.field.conftest import PREFERRED

BIG_HEAD = "HTTP/1.1 200 OK\r\nContent-Type: audio/mpeg\r\nContent-Length: 50000000\r\n\r\n"


@pytest.fixture(scope="module")
def _patient_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    route = "breaker_failures = 100\nsse_comment_interval_s = 0.2"
    with staged(tmp_path_factory.mktemp("patient"), first_byte_s=60, idle_s=60, route=route, change=PREFERRED) as stage:
        yield stage


@pytest.fixture
def patient(_patient_stage: Stage) -> Stage:
    for engine in (_patient_stage.u1, _patient_stage.u2):
        engine.script = [OK]
        engine.log.clear()
    return _patient_stage


def _let_go(stage: Stage, client: Client, *, reset: bool) -> None:
    client.close(reset=reset)
    # Every limit of the router's is longer than this waits.
    until(lambda: stage.u1.count("peer_closed") + stage.u2.count("peer_closed"), "an engine sees the close")
    stage.router.at_rest()


@pytest.mark.case("B021", "T13")
@pytest.mark.parametrize("reset", [False, True])
def test_while_comments_keep_the_stream_alive(patient: Stage, reset: bool) -> None:
    patient.u1.script = [["w", 15_000]]
    client = patient.router.client()
    client.send(post(CHAT_S))
    client.until(b": keep-alive\n\n")
    _let_go(patient, client, reset=reset)


@pytest.mark.case("B022", "T13")
@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("body", [CHAT2, CHAT2_S], ids=["plain", "stream"])
def test_while_a_second_engine_is_asked(patient: Stage, body: bytes, reset: bool) -> None:
    patient.u1.script = [answer(500, "{}")]
    patient.u2.script = [["w", 15_000]]
    client = patient.router.client()
    client.send(post(body))
    until(lambda: patient.u2.requests, "the second engine is asked")
    _let_go(patient, client, reset=reset)


@pytest.mark.case("B021", "B216")
@pytest.mark.parametrize("reset", [False, True])
def test_in_the_middle_of_a_long_plain_answer(patient: Stage, reset: bool) -> None:
    patient.u1.script = [["s", BIG_HEAD], ["s", "a" * 1_000_000], ["w", 15_000]]
    client = patient.router.client()
    client.send(post(CHAT, path="/v1/audio/speech"))
    client.until(b"aaaa")
    _let_go(patient, client, reset=reset)


@pytest.mark.case("B031", "B032")
@pytest.mark.parametrize("reset", [False, True])
def test_while_it_reads_nothing_of_a_stream_that_flows(patient: Stage, reset: bool) -> None:
    patient.u1.script = [SH, ["rep", 200_000, 0, event("y" * 900)]]
    client = patient.router.client()
    client.send(post(CHAT_S))
    client.until(b"yyy")
    sent: list[int] = []

    def stalled() -> bool:
        sent.append(patient.u1.count("sent"))
        return len(sent) > 10 and sent[-10] == sent[-1]

    until(stalled, "the engine cannot send any more")
    _let_go(patient, client, reset=reset)


@pytest.mark.case("B021")
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/completions"])
def test_between_two_events_of_every_family(patient: Stage, path: str) -> None:
    patient.u1.script = [SH, E("a"), ["w", 15_000]]
    client = patient.router.client()
    client.send(post(CHAT_S, path=path))
    client.until(b"\n\n")
    _let_go(patient, client, reset=False)


@pytest.mark.case("B026")
def test_those_who_wait_and_leave_hold_up_nobody(patient: Stage) -> None:
    patient.u1.script = [["w", 15_000]]
    clients = [patient.router.client() for _ in range(30)]
    for number, client in enumerate(clients):
        client.send(post(CHAT if number % 2 else CHAT_S))
    until(lambda: len(patient.u1.requests) == 30, "all wait")
    assert patient.router.ask(get("/health")).status == 200
    assert patient.router.ask(get("/v1/models")).status == 200
    for client in clients:
        client.close(reset=True)
    until(lambda: patient.u1.count("peer_closed") == 30, "the engine sees every close")
    patient.router.at_rest()


@pytest.mark.case("B024")
def test_with_more_requests_behind_the_first(patient: Stage) -> None:
    patient.u1.script = [["w", 15_000]]
    client = patient.router.client()
    client.send(post(CHAT) + get("/v1/models") * 20 + post(CHAT_S))
    until(lambda: patient.u1.requests, "the engine has the first")
    _let_go(patient, client, reset=False)
    assert len(patient.u1.requests) == 1


def _leave(stage: Stage, body: bytes, number: int, key: str = "K") -> None:
    rng = random.Random(number)
    for _ in range(number):
        client = stage.router.client()
        client.send(post(body, key=key))
        time.sleep(rng.random() * 0.005)
        client.close(reset=rng.random() < 0.5)


@pytest.mark.case("B028", "T14")
def test_an_engines_only_place_is_never_lost(tmp_path: Path) -> None:
    with staged(tmp_path, route="max_inflight_per_endpoint = 1\nbreaker_failures = 100") as stage:
        stage.u1.script = [["w", 3], *GOOD_S]
        _leave(stage, CHAT_S, 200)
        stage.router.at_rest()
        stage.u1.script = [OK]
        assert stage.router.ask(post(CHAT)).status == 200
        assert stage.router.metric("llmgw_inflight") == 0


@pytest.mark.case("B030", "B096", "T14")
def test_a_keys_only_place_is_never_lost(patient: Stage) -> None:
    patient.u1.script = [["w", 3], *GOOD_S]
    _leave(patient, CHAT_S, 100, key="SINGLE")
    patient.router.at_rest()
    patient.u1.script = [OK]
    for _ in range(3):
        assert patient.router.ask(post(CHAT, key="SINGLE")).status == 200


PARTS: dict[str, list[Any]] = {
    "with a length": [["s", BIG_HEAD], ["w", 15_000]],
    "in chunks": [["s", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"], ["c", "a"], ["w", 15_000]],
    "until the close": [["s", "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\na"], ["w", 15_000]],
    "that is an error": [["s", "HTTP/1.1 400 X\r\nContent-Length: 100\r\n\r\n{"], ["w", 15_000]],
}


@pytest.mark.case("B022", "T13")
@pytest.mark.parametrize("name", PARTS)
def test_before_the_engine_has_finished_an_answer(patient: Stage, name: str) -> None:
    patient.u1.script = PARTS[name]
    client = patient.router.client()
    client.send(post(CHAT, f"X-Request-Id: left-{list(PARTS).index(name)}\r\n"))
    until(lambda: patient.u1.requests, "the engine answers")
    _let_go(patient, client, reset=False)
    assert "status=499" in patient.router.log_line(f"left-{list(PARTS).index(name)}")
