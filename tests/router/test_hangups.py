"""A client that hangs up ends the engine's work, on every route and at every moment (cases T13, T14)."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.router.fakes import (
    CHAT,
    CHAT2,
    CHAT_S,
    DONE,
    END,
    FIN,
    GOOD_S,
    OK,
    SH,
    Client,
    E,
    RouterProcess,
    Stage,
    event,
    get,
    post,
    staged,
    until,
)

STREAM = [SH, ["rep", 600, 100, event("x")]]
MOMENTS: dict[str, tuple[bytes, list[Any]]] = {
    "while events flow": (CHAT_S, STREAM),
    "after the head": (CHAT_S, [SH, ["w", 15000]]),
    "before the head of a stream": (CHAT_S, [["w", 15000]]),
    "before a plain answer": (CHAT, [["w", 15000]]),
}


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with staged(tmp_path_factory.mktemp("patient"), first_byte_s=60, idle_s=60) as stage:
        yield stage


def _hang_up(stage: Stage, data: bytes, steps: list[Any], *, reset: bool) -> None:
    stage.u1.script = steps
    stage.u1.log.clear()
    client = stage.router.client()
    client.send(data)
    if steps is STREAM:
        client.count(b"\n\n", 3)
    else:
        until(lambda: stage.u1.requests, "the engine has the request")
        time.sleep(0.05)
    client.close(reset=reset)
    until(lambda: stage.u1.count("peer_closed"), "the engine sees the close")  # every limit of the router's is longer than this waits
    stage.router.at_rest()


@pytest.mark.case("T13", "B021", "B022", "B031")
@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("moment", MOMENTS)
def test_the_engine_is_let_go_at_once(patient: Stage, moment: str, reset: bool) -> None:
    data, steps = MOMENTS[moment]
    mark = f"hang-{abs(hash((moment, reset)))}"
    _hang_up(patient, post(data, f"X-Request-Id: {mark}\r\n"), steps, reset=reset)
    assert "status=499" in patient.router.log_line(mark)
    assert "Traceback" not in patient.router.err.read_text()


@pytest.mark.case("T13", "B216")
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/rerank", "/v1/audio/speech"])
def test_the_same_on_every_route(patient: Stage, path: str) -> None:
    _hang_up(patient, post(CHAT_S, path=path), STREAM, reset=False)


def test_half_a_close_is_a_hang_up_for_what_an_engine_works_on_and_for_nothing_else(patient: Stage) -> None:
    patient.u1.script = [["w", 15000]]
    patient.u1.log.clear()
    with patient.router.client() as client:
        client.send(post(CHAT, "X-Request-Id: half-closed\r\n"))
        until(lambda: patient.u1.requests, "the engine has the request")
        client.sock.shutdown(socket.SHUT_WR)
        until(lambda: patient.u1.count("peer_closed"), "the engine sees the close")
        assert client.rest() == b""
    assert "status=499" in patient.router.log_line("half-closed")
    for path in ("/health", "/ready", "/v1/models", "/v1/nope"):
        with patient.router.client() as own:
            own.send(get(path))
            own.sock.shutdown(socket.SHUT_WR)
            assert own.answer().status == (404 if path == "/v1/nope" else 200)
            assert own.rest() == b""
    patient.router.at_rest()


@pytest.mark.case("B024")
def test_a_pipelined_request_does_not_hide_the_hang_up(patient: Stage) -> None:
    _hang_up(patient, post(CHAT_S) + get("/health"), [SH, ["w", 15000]], reset=False)


@pytest.mark.case("B030")
def test_a_closed_stream_frees_the_place_of_its_key(patient: Stage) -> None:
    patient.u1.script = [SH, ["w", 15000]]
    patient.u1.log.clear()
    client = patient.router.client()
    client.send(post(CHAT_S, key="SINGLE"))
    until(lambda: patient.u1.requests, "the engine has the request")
    second = patient.router.ask(post(CHAT, key="SINGLE"))
    assert second.status == 429
    assert second.error["code"] == "parallel_limit"
    assert second.get("retry-after") is not None
    client.close()
    patient.router.at_rest()
    patient.u1.script = [OK]
    assert patient.router.ask(post(CHAT, key="SINGLE")).status == 200


@pytest.mark.case("T14", "B025", "B096")
def test_hundreds_of_clients_that_leave_at_random_leak_nothing(tmp_path: Path) -> None:
    with staged(tmp_path) as stage:
        router = stage.router
        stage.u1.script = [["w", 50], *GOOD_S]
        assert router.ask(post(CHAT_S)).status == 200
        router.at_rest()
        before = router.descriptors()
        end = time.monotonic() + 4.0

        def leave(seed: int) -> None:
            rng = random.Random(seed)
            while time.monotonic() < end:
                client = Client(router.address)
                client.send(post(CHAT_S, key="K"))
                time.sleep(rng.random() * 0.03)
                client.close(reset=rng.random() < 0.3)

        workers = [threading.Thread(target=leave, args=(seed,)) for seed in range(20)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        router.at_rest()
        stage.u1.script = [OK]
        assert router.ask(post(CHAT)).status == 200
        until(lambda: abs(router.descriptors() - before) <= 5, "descriptors are back")
        stage.u1.log.clear()
        stage.u2.log.clear()
        with router.client() as client:
            for _ in range(100):
                client.send(post(CHAT2))
                assert client.answer().status == 200
        share = len(stage.u1.requests)
        assert share + len(stage.u2.requests) == 100
        assert 30 <= share <= 70  # a fair coin leaves this band once in 10,000 runs
        assert router.ask(post(CHAT, key="SINGLE")).status == 200
        assert "Traceback" not in router.err.read_text()


HALVES = {"of a head": b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nX-Req", "of a body": post(CHAT, "X-Request-Id: half\r\n")[:-20]}


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("half", HALVES)
def test_a_client_that_leaves_before_its_request_is_whole_is_one_line_of_499(tmp_path: Path, half: str, reset: bool) -> None:
    with staged(tmp_path) as stage:
        client = stage.router.client()
        client.send(HALVES[half])
        assert stage.router.ask(get("/health", "X-Request-Id: after\r\n")).status == 200  # the half has been read by then
        client.close(reset=reset)
        line = stage.router.log_line("reason=client_gone")
        assert "status=499" in line
        assert ("path=/v1/chat/completions" in line) == (half == "of a body")
        stage.router.at_rest()


def test_connections_that_say_nothing_are_no_lines(tmp_path: Path) -> None:
    with staged(tmp_path) as stage:
        for said in (b"", b"\r\n"):
            client = stage.router.client()
            client.send(said)
            client.close()
        assert stage.router.ask(get("/health", "X-Request-Id: after\r\n")).status == 200
        stage.router.log_line("request_id=after")
        assert stage.router.log_lines("status=4") == []


def test_a_client_that_leaves_after_done_has_its_whole_answer(patient: Stage) -> None:
    patient.u1.script = [SH, E("a"), FIN, DONE, ["w", 300], END]
    with patient.router.client() as client:
        client.send(post(CHAT_S, "X-Request-Id: left-after-done\r\n"))
        client.until(b"[DONE]\n\n")
    assert "status=200" in patient.router.log_line("left-after-done")


def test_the_connections_of_clients_that_leave_after_done_are_closed_at_once(patient: Stage) -> None:
    before = patient.router.descriptors()
    for _ in range(10):
        with patient.router.client() as client:
            # The second request of a client that waits for it goes on a connection that stands: everything is done in callbacks.
            for _ in range(2):
                patient.u1.script = [OK]
                client.send(post(CHAT))
                assert client.answer().status == 200
                patient.router.at_rest()
            patient.u1.script = [SH, E("a"), FIN, DONE, ["w", 15000]]
            client.send(post(CHAT_S))
            client.until(b"[DONE]\n\n")
    until(lambda: patient.router.descriptors() <= before + 2, "no descriptor waits for the keep-alive limit to pass")


@pytest.mark.parametrize("step", range(len(GOOD_S) + 1))
def test_a_hang_up_at_any_point_of_the_exchange_leaves_nothing_behind(patient: Stage, step: int) -> None:
    patient.u1.script = [*GOOD_S[:step], ["w", 15000]]
    patient.u1.log.clear()
    before = patient.router.descriptors()
    client = patient.router.client()
    client.send(post(CHAT_S))
    until(lambda: patient.u1.requests, "the engine has the request")
    if step > 1:
        client.until((GOOD_S[min(step, len(GOOD_S) - 1) - 1][1]).encode())
    client.close()
    until(lambda: patient.u1.count("peer_closed"), "the engine sees the close")
    patient.router.at_rest()
    until(lambda: patient.router.descriptors() <= before, "descriptors are back")


def test_a_hang_up_while_the_body_goes_out_ends_the_upload(patient: Stage) -> None:
    release = threading.Event()
    patient.u1.read_body = False
    patient.u1.script = [["hold", release]]
    patient.u1.log.clear()
    before = patient.router.descriptors()
    try:
        client = patient.router.client()
        client.send(post(CHAT.replace(b'"hi"', b'"' + b"a" * 20_000_000 + b'"'), "X-Request-Id: left-while-sending\r\n"))
        until(lambda: patient.u1.requests, "the engine has the head, and reads no further")
        assert patient.router.metric("llmgw_inflight") == 1
        client.close()
        assert "status=499" in patient.router.log_line("left-while-sending")
        patient.router.at_rest()
        until(lambda: patient.router.descriptors() <= before, "the engine's connection is closed")
        assert not release.is_set()
    finally:
        release.set()
        patient.u1.read_body = True


def test_a_connect_that_hangs_is_bounded_and_given_up_with_the_client(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as deaf, contextlib.ExitStack() as held, staged(tmp_path) as stage:
        address = deaf.getsockname()
        for _ in range(4):  # fills the queue of connections that nobody takes; further ones hang
            filler = held.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(address)
        stage.router.close()
        text = stage.text.replace(f"http://127.0.0.1:{stage.u1.port}", f"http://127.0.0.1:{address[1]}")
        router = RouterProcess(tmp_path, text)
        try:
            client = router.client()
            client.send(post(CHAT, "X-Request-Id: gave-up\r\n"))
            until(lambda: router.metric("llmgw_inflight") == 1, "it is connecting")
            client.close()
            assert "status=499" in router.log_line("gave-up")
            assert router.metric("llmgw_inflight") == 0
            got = router.ask(post(CHAT))  # the kernel alone would go on for two minutes
            assert (got.status, got.error["code"]) == (503, "unreachable")
            assert router.ask(post(CHAT2)).status == 200
        finally:
            router.close()
