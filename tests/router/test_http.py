"""HTTP/1.1 at the edge of a real router: one meaning per byte, and connections that end when they should (T16 to T18, T20, T26)."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from tests.router.fakes import CHAT, CHAT_S, GOOD_S, OK, OK_BODY, RouterProcess, Stage, get, post, staged, until

SMUGGLED = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer K\r\nContent-Type: application/json\r\nContent-Length: 6\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n3a\r\n"
    + CHAT
    + b"\r\n0\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer K\r\n\r\n"
)


@pytest.mark.case("T16", "B051")
def test_surplus_bytes_of_an_engine_reach_nobody(stage: Stage) -> None:
    leak = (
        "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
        'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 13\r\n\r\n{"leak":true}'
    )
    stage.u1.once = [[["s", leak]]]
    with stage.router.client() as client:
        client.send(post(CHAT))
        first = client.answer()
        time.sleep(0.1)
        client.send(post(CHAT))
        second = client.answer()
    assert first.body == b"{}"
    assert second.body.decode() == OK_BODY
    assert {entry["conn"] for entry in stage.u1.requests} != {stage.u1.requests[0]["conn"]}


@pytest.mark.case("B051")
def test_surplus_bytes_that_come_late_spoil_the_pooled_connection(stage: Stage) -> None:
    stage.u1.once = [[OK, ["w", 50], ["s", 'HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n{"leak":true}']]]
    assert stage.router.ask(post(CHAT)).body.decode() == OK_BODY
    time.sleep(0.2)
    assert stage.router.ask(post(CHAT)).body.decode() == OK_BODY


@pytest.mark.case("B051")
def test_surplus_after_a_stream_is_dropped(stage: Stage) -> None:
    stage.u1.script = [*GOOD_S, ["s", "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nleak"]]
    got = stage.router.ask(post(CHAT_S))
    assert got.whole
    assert b"leak" not in got.body
    assert stage.router.ask(post(CHAT_S)).body == got.body


def _closed_with(stage: Stage, data: bytes) -> bytes:
    with stage.router.client() as client:
        client.send(data)
        return client.rest()


@pytest.mark.case("T17", "B074")
def test_a_request_with_two_framings_is_refused_and_nothing_after_it_is_read(stage: Stage) -> None:
    got = _closed_with(stage, SMUGGLED)
    assert got.startswith(b"HTTP/1.1 400 ")
    assert b"\r\nconnection: close\r\n" in got
    assert got.count(b"HTTP/1.1") == 1
    assert stage.u1.requests == []


def _framed(lines: str, body: bytes = CHAT) -> bytes:
    return post(body, length=lines)


FRAMINGS: dict[str, tuple[bytes, tuple[int, ...]]] = {
    "two lengths": (_framed("Content-Length: 58\r\nContent-Length: 59\r\n"), (400,)),
    "two equal lengths": (_framed("Content-Length: 58\r\nContent-Length: 58\r\n"), (400,)),
    "plus": (_framed("Content-Length: +58\r\n"), (400,)),
    "list": (_framed("Content-Length: 58, 59\r\n"), (400,)),
    "minus": (_framed("Content-Length: -1\r\n"), (400,)),
    "blank inside": (_framed("Content-Length: 5 8\r\n"), (400,)),
    "5000 digits": (_framed(f"Content-Length: {'9' * 5000}\r\n"), (400,)),
    "empty length": (_framed("Content-Length: \r\n"), (400,)),
    "unknown coding": (_framed("Transfer-Encoding: xchunked\r\n"), (501,)),
    "chunked first": (_framed("Transfer-Encoding: chunked, identity\r\n"), (400, 501)),
    "two codings": (_framed("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n"), (400,)),
    "blank before colon": (_framed("Content-Length : 58\r\n"), (400,)),
    "vertical tab": (_framed("Transfer-Encoding:\x0bchunked\r\n"), (400,)),
    "bad size": (_framed("Transfer-Encoding: chunked\r\n", b"zz\r\n" + CHAT), (400,)),
    "negative size": (_framed("Transfer-Encoding: chunked\r\n", b"-3a\r\n" + CHAT), (400,)),
    "hex size": (_framed("Transfer-Encoding: chunked\r\n", b"0x3a\r\n" + CHAT), (400,)),
    "long extension": (_framed("Transfer-Encoding: chunked\r\n", b"3a " + b";a" * 10_240 + b"\r\n" + CHAT + b"\r\n0\r\n\r\n"), (400,)),
    "chunk longer than its size": (_framed("Transfer-Encoding: chunked\r\n", b"3\r\nabcdef\r\n0\r\n\r\n"), (400,)),
    "two hosts": (post(CHAT, "Host: h\r\n"), (400,)),
    "no host": (post(CHAT).replace(b"Host: g\r\n", b""), (400,)),
    "nul": (post(CHAT, "X: a\0b\r\n"), (400,)),
    "folded line": (post(CHAT, "X: a\r\n b\r\n"), (400,)),
    "bare line feeds": (post(CHAT).replace(b"\r\n", b"\n"), (400,)),
    "bare carriage return": (post(CHAT, "X: a\rb\r\n"), (400,)),
    "tls hello": (bytes.fromhex("16030100c8010000c403033f"), (400,)),
    "http2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (400, 505)),
    "http/1.0 with chunks": (_framed("Transfer-Encoding: chunked\r\n").replace(b"HTTP/1.1", b"HTTP/1.0"), (400,)),
    "too long a key": (post(CHAT, key="x" * 102_400), (431,)),
}


@pytest.mark.case("T18", "B075", "B081")
@pytest.mark.parametrize("name", FRAMINGS)
def test_what_can_be_read_in_two_ways_is_refused_at_once(stage: Stage, name: str) -> None:
    data, statuses = FRAMINGS[name]
    got = _closed_with(stage, data)
    assert int(got.split(b" ", 2)[1]) in statuses
    assert got.count(b"HTTP/1.1 ") == 1
    assert b'"error"' in got
    assert stage.u1.requests == []


@pytest.mark.case("B078")
def test_a_chunked_request_reaches_the_engine_with_a_length(stage: Stage) -> None:
    body = b"1e;x=y\r\n" + CHAT[:30] + b"\r\n1C\r\n" + CHAT[30:] + b"\r\n0\r\nX-Trailer: 1\r\n\r\n"
    with stage.router.client() as client:
        for part in (_framed("Transfer-Encoding: chunked\r\n", b""), body[:20], body[20:]):
            client.send(part)
            time.sleep(0.02)
        assert client.answer().status == 200
        client.send(get("/health"))
        assert client.answer().status == 200
    seen = stage.u1.requests[0]
    assert seen["body"] == CHAT
    assert "content-length: 58" in seen["head"]
    assert "transfer-encoding" not in seen["head"].lower()
    assert "trailer" not in seen["head"].lower()


def test_pipelined_requests_are_answered_in_order(stage: Stage) -> None:
    with stage.router.client() as client:
        client.send(post(CHAT) + get("/health") + get("/v1/models") + post(CHAT))
        answers = [client.answer() for _ in range(4)]
    assert [got.status for got in answers] == [200, 200, 200, 200]
    assert answers[0].body == answers[3].body == OK_BODY.encode()
    assert answers[1].json() == {"status": "ok"}
    assert answers[2].json()["object"] == "list"


@pytest.mark.case("T20", "B076")
@pytest.mark.parametrize(
    "data",
    [
        b"GET /health HTTP/1.0\r\n\r\n",
        get("/health", "Connection: close\r\n"),
        get("/v1/models").replace(b"HTTP/1.1", b"HTTP/1.0"),
        get("/v1/models", "Connection: close\r\n"),
        post(CHAT_S).replace(b"HTTP/1.1", b"HTTP/1.0"),
        post(CHAT_S, "Connection: close\r\n"),
    ],
)
def test_a_connection_that_is_to_close_closes_after_its_answer(stage: Stage, data: bytes) -> None:
    stage.u1.script = GOOD_S
    with stage.router.client() as client:
        client.send(data)
        got = client.rest()  # an idle connection would stay for longer than this waits
    assert got.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close" in got
    if b"HTTP/1.0" in data:
        assert b"chunked" not in got.partition(b"\r\n\r\n")[0]


@pytest.mark.case("T20", "B076")
def test_idle_connections_are_closed_and_leave_nothing(tmp_path: Path) -> None:
    with staged(tmp_path, route="keep_alive_s = 1") as stage:
        before = stage.router.descriptors()
        clients = [stage.router.client() for _ in range(50)]
        for client in clients:
            client.send(get("/health"))
            assert client.answer().status == 200
        assert all(client.rest() == b"" for client in clients)
        until(lambda: stage.router.descriptors() <= before, "descriptors are back")
        for client in clients:
            client.close()


@pytest.mark.case("T26")
def test_a_client_that_waits_to_be_told_to_continue_is_told(stage: Stage) -> None:
    head, _, body = post(CHAT, "Expect: 100-continue\r\n").partition(b"\r\n\r\n")
    with stage.router.client() as client:
        client.send(head + b"\r\n\r\n")
        assert client.until(b"\r\n\r\n").startswith(b"HTTP/1.1 100 ")
        client.send(body)
        assert client.answer().status == 200
    assert "expect" not in stage.u1.requests[0]["head"].lower()
    with stage.router.client() as client:
        client.send(post(CHAT, "Expect: 100-continue\r\n", key="wrong").partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
        assert client.answer().status == 401
        assert client.rest() == b""
    assert stage.router.ask(post(CHAT, "Expect: x\r\n")).status == 417


def test_interim_answers_of_an_engine_are_swallowed(stage: Stage) -> None:
    stage.u1.script = [["s", "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"], ["w", 30], OK]
    got = stage.router.ask(post(CHAT))
    assert (got.status, got.interim, got.body.decode()) == (200, [], OK_BODY)
    assert got.get("link") is None


@pytest.mark.case("B037")
def test_a_pooled_connection_that_the_engine_closed_costs_nothing(stage: Stage) -> None:
    stage.u1.script = [OK, ["w", 30], ["close"]]
    for _ in range(3):
        assert stage.router.ask(post(CHAT)).status == 200
        time.sleep(0.1)
    assert len(stage.u1.requests) == 3


@pytest.mark.case("B038")
@pytest.mark.parametrize("how", ["close", "rst"])
def test_a_reused_connection_that_dies_without_a_byte_is_tried_once_on_a_fresh_one(stage: Stage, how: str) -> None:
    stage.u1.once = [[OK], [["w", 20], [how]]]
    with stage.router.client() as client:
        for _ in range(2):
            client.send(post(CHAT))
            assert client.answer().status == 200
    assert len(stage.u1.requests) == 3


def test_a_fresh_connection_that_dies_without_a_byte_is_an_honest_502(stage: Stage) -> None:
    stage.u1.once = [[OK, ["close"]]]
    stage.router.ask(post(CHAT))
    until(lambda: stage.u1.count("closed"), "the pooled connection is gone")
    stage.u1.once = [[["close"]]]
    got = stage.router.ask(post(CHAT))
    assert got.status == 502
    assert got.error["code"] == "upstream_disconnected"


@pytest.mark.case("B038")
def test_an_answer_that_breaks_after_its_head_is_a_502_and_not_asked_for_again(stage: Stage) -> None:
    stage.u1.script = [["s", "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 223\r\n\r\n" + OK_BODY[:100]], ["close"]]
    got = stage.router.ask(post(CHAT))
    assert got.status == 502
    assert len(stage.u1.requests) == 1


def test_bytes_that_are_no_http_are_a_502(stage: Stage) -> None:
    stage.u1.once = [[["s", "SSH-2.0-OpenSSH_9.2\r\n"], ["close"]]]
    got = stage.router.ask(post(CHAT))
    assert (got.status, got.error["code"]) == (502, "upstream_invalid")


def test_an_answer_without_a_length_ends_with_the_engines_close(stage: Stage) -> None:
    stage.u1.script = [["s", "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n" + OK_BODY], ["close"]]
    assert stage.router.ask(post(CHAT)).body.decode() == OK_BODY


@pytest.mark.case("B050")
def test_an_early_answer_to_a_long_upload_reaches_the_client(stage: Stage) -> None:
    stage.u1.read_body = False
    refusal = '{"error":{"message":"too big","type":"x","code":null}}'
    stage.u1.script = [
        ["s", f"HTTP/1.1 413 X\r\nContent-Type: application/json\r\nContent-Length: {len(refusal)}\r\n\r\n{refusal}"],
        ["close"],
    ]
    body = CHAT.replace(b'"hi"', b'"' + b"a" * 20_000_000 + b'"')
    got = stage.router.ask(post(body))
    assert (got.status, got.body.decode()) == (413, refusal)


@pytest.mark.case("B050")
def test_an_early_answer_on_a_connection_that_stays_open_reaches_the_client_too(stage: Stage) -> None:
    stage.u1.read_body = False
    stage.u1.script = [OK, ["w", 300]]
    body = CHAT.replace(b'"hi"', b'"' + b"a" * 20_000_000 + b'"')
    got = stage.router.ask(post(body))
    assert (got.status, got.body.decode()) == (200, OK_BODY)
    until(lambda: stage.u1.count("closed"), "the half-sent connection is not kept")


@pytest.mark.case("B080")
@pytest.mark.parametrize("method", ["CONNECT", "OPTIONS"])
def test_odd_forms_of_a_request_crash_nothing(stage: Stage, method: str) -> None:
    target = "a:443" if method == "CONNECT" else "*"
    got = stage.router.ask(f"{method} {target} HTTP/1.1\r\nHost: g\r\n\r\n".encode())
    assert got.status in (204, 404, 405)


@pytest.mark.case("B080")
def test_an_upgrade_that_is_not_taken_is_ignored(stage: Stage) -> None:
    got = stage.router.ask(get("/health", "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"))
    assert got.status == 200


def test_head_is_answered_without_a_body(stage: Stage) -> None:
    with stage.router.client() as client:
        client.send(get("/health", method="HEAD"))
        assert client.answer(head=True).get("content-length") == "15"
        client.send(get("/v1/models", method="HEAD"))
        assert client.answer(head=True).status == 200
        client.send(get("/health"))
        assert client.answer().status == 200


def test_a_head_that_dribbles_in_is_read_as_one(stage: Stage) -> None:
    with stage.router.client() as client:
        for byte in post(CHAT):
            client.send(bytes([byte]))
        assert client.answer().status == 200


def test_the_router_listens_on_a_unix_socket_also_where_a_killed_one_left_its_own(tmp_path: Path) -> None:
    path = tmp_path / "r.sock"
    with staged(tmp_path) as stage:
        text = stage.text.replace('listen = "127.0.0.1:0"', f'listen = "unix:{path}"')
    for _ in range(2):
        router = RouterProcess(tmp_path, text)
        try:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(10)
                sock.connect(str(path))
                sock.sendall(get("/health", "Connection: close\r\n"))
                data = b""
                while more := sock.recv(65536):
                    data += more
            assert data.startswith(b"HTTP/1.1 200 ")
        finally:
            router.close()


BIG = CHAT.replace(b'"hi"', b'"%b"' % (b"words " * 60_000))


@pytest.mark.parametrize("body", [CHAT, BIG], ids=["short", "long"])
def test_a_later_body_may_come_in_pieces(stage: Stage, body: bytes) -> None:
    with stage.router.client() as client:
        client.send(post(CHAT))
        assert client.answer().status == 200
        data = post(body)
        for piece in (data[:-40], data[-40:-20], data[-20:]):
            client.send(piece)
            assert stage.router.ask(get("/health")).status == 200  # the piece has been read by then
        assert client.answer().status == 200
    assert stage.u1.requests[-1]["body"] == body


def test_a_later_body_that_stops_coming_is_not_waited_for(tmp_path: Path) -> None:
    with staged(tmp_path) as stage, stage.router.client() as client:
        client.send(post(CHAT))
        assert client.answer().status == 200
        client.send(post(CHAT)[:-20])
        assert client.answer().status == 408
        assert client.rest() == b""


def test_a_client_that_leaves_in_a_later_body_is_one_line_of_499(tmp_path: Path) -> None:
    with staged(tmp_path) as stage:
        client = stage.router.client()
        for end in (None, -20):
            client.send(post(CHAT, "X-Request-Id: half\r\n")[:end])
            if end is None:
                assert client.answer().status == 200
        assert stage.router.ask(get("/health")).status == 200  # the half has been read by then
        client.close()
        assert "path=/v1/chat/completions" in stage.router.log_line("status=499")
        stage.router.at_rest()
