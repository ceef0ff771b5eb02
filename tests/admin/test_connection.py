"""What a raw client sees of the admin port: framing, limits, keep-alive, hang-ups, and an end that always comes."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import subprocess

import pytest
import trio

from llmgw.admin.limits import Limits
from llmgw.admin.serve import bind_admin
from llmgw.domain.errors import Conflict, Invalid, Unavailable
from tests.programs import skip

from .conftest import ADMIN, DEADLINE_S, read_answer, running_admin, until

AUTH = f"Authorization: Bearer {ADMIN}\r\n"


async def at_end(stream: trio.SocketStream) -> bytes:
    """What still comes, up to the other side's end."""
    rest = b""
    with trio.fail_after(DEADLINE_S):
        while more := await stream.receive_some(65536):
            rest += more
    return rest


# --- V1: connections end and are kept as HTTP says


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
        b"GET /health HTTP/1.0\r\n\r\n",
        b"GET /nope HTTP/1.0\r\n\r\n",
    ],
)
async def test_a_client_that_asks_for_the_end_of_the_connection_gets_it(admin, head):
    async with await admin.connect() as stream:
        await stream.send_all(head)
        answer = await read_answer(stream)
        assert answer.status in (200, 404)
        assert await at_end(stream) == b""


async def test_a_kept_connection_serves_again_and_is_closed_when_idle(tmp_path):
    async with running_admin(tmp_path, Limits(keep_alive_s=0.3)) as admin, await admin.connect() as stream:
        for _ in range(3):
            await stream.send_all(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
            assert (await read_answer(stream)).status == 200
        assert await at_end(stream) == b""


async def test_a_head_that_never_ends_is_cut(tmp_path):
    async with running_admin(tmp_path, Limits(keep_alive_s=0.3)) as admin, await admin.connect() as stream:
        await stream.send_all(b"GET /health HTTP/1.1\r\nHost: a\r\nX-Slow: ")
        await at_end(stream)


async def test_two_pipelined_requests_are_both_answered_in_order(admin):
    async with await admin.connect() as stream:
        await stream.send_all(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\nGET /nope HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        buffer = bytearray()
        assert (await read_answer(stream, buffer)).status == 200
        assert (await read_answer(stream, buffer)).status == 404


async def test_an_idle_client_that_leaves_takes_its_connection_with_it(admin):
    stream = await admin.connect()
    await stream.send_all(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
    await read_answer(stream)
    assert admin.app.open_connections == 1
    await stream.aclose()
    await until(lambda: admin.app.open_connections == 0, "the connection has ended")


async def test_a_request_behind_one_that_ends_the_connection_leaves_nothing_open(admin):
    pipelined = f"GET /api/v1/status HTTP/1.1\r\nHost: a\r\n{AUTH}\r\n".encode()
    async with await admin.connect() as stream:
        await stream.send_all(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n" + pipelined)
        assert (await read_answer(stream)).status == 200
        assert await at_end(stream) == b""
    for cut_after_s in (0.0, 0.002):
        stream = await admin.connect()
        await stream.send_all(pipelined * 5)
        await trio.sleep(cut_after_s)
        stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # a reset in the middle of the answers
        await stream.aclose()
    await until(lambda: admin.app.open_connections == 0, "every connection has ended")


# --- V8, V9, V10: what is refused at the door


@pytest.mark.parametrize("order", ["both", "reversed"])
async def test_two_framings_are_refused_and_what_follows_is_no_request(admin, order):
    framing = ["Content-Length: 6", "Transfer-Encoding: chunked"]
    if order == "reversed":
        framing.reverse()
    head = f"POST /api/v1/models:apply HTTP/1.1\r\nHost: a\r\n{AUTH}" + "\r\n".join(framing) + "\r\n\r\n"
    async with await admin.connect() as stream:
        await stream.send_all(head.encode() + b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        answer = await read_answer(stream)
        assert (answer.status, answer.code, answer.headers["connection"]) == (400, "two_framings", "close")
        assert await at_end(stream) == b""


@pytest.mark.parametrize("pieces", [1, 2, 7])
@pytest.mark.parametrize(("size", "status"), [(16_000, 200), (16_600, 431), (60_000, 431), (300_000, 431)])
async def test_the_limit_of_a_head_is_one_number_however_it_arrives(admin, pieces, size, status):
    head = b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\nX-Fill: "
    data = head + b"x" * (size - len(head) - 4) + b"\r\n\r\n"
    cut = -(-len(data) // pieces)
    async with await admin.connect() as stream:
        with trio.fail_after(DEADLINE_S):
            try:
                for start in range(0, len(data), cut):
                    await stream.send_all(data[start : start + cut])
                    await trio.sleep(0.01)
            except trio.BrokenResourceError:
                assert size == 300_000  # it was refused before it was all there
            answer = await read_answer(stream)
    assert answer.status == status
    if status == 431:
        assert answer.code == "header_too_large"


async def test_an_upgrade_to_http2_is_passed_over(admin):
    answer = await admin.raw(
        b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, HTTP2-Settings, close\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n\r\n"
    )
    assert (answer.status, answer.json["status"]) == (200, "ok")


async def test_the_preface_of_http2_is_refused_as_a_request(admin):
    answer = await admin.raw(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    assert answer.status == 400
    assert answer.code


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 garbage \r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost : a\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /health HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET http://a/health HTTP/1.1\r\nHost: a\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n",
    ],
)
async def test_what_is_no_request_of_ours_gets_an_error_in_json(admin, data):
    answer = await admin.raw(data)
    assert 400 <= answer.status <= 501
    assert answer.code
    assert answer.headers["content-type"] == "application/json"
    assert (await admin.call("GET", "/health")).status == 200


async def test_no_header_tells_what_serves(admin):
    assert "server" not in (await admin.call("GET", "/health")).headers


# --- V13, V17: bodies


async def test_a_body_over_the_limit_is_refused_while_it_is_still_being_sent(tmp_path):
    async with running_admin(tmp_path, Limits(body_bytes=10_000)) as admin:
        answer = await admin.call("POST", "/api/v1/models:apply", b"x" * 3_000_000)
        assert (answer.status, answer.code) == (413, "too_large")
        chunks = b"".join(b"%x\r\n%s\r\n" % (4000, b"x" * 4000) for _ in range(300)) + b"0\r\n\r\n"
        head = f"POST /api/v1/models:apply HTTP/1.1\r\nHost: a\r\n{AUTH}Transfer-Encoding: chunked\r\n\r\n".encode()
        answer = await admin.raw(head + chunks)
        assert (answer.status, answer.code) == (413, "too_large")


async def test_a_stranger_with_a_large_body_reads_why_it_was_refused(admin):
    answer = await admin.call("POST", "/api/v1/models:apply", b"x" * 2_000_000, token="wrong")
    assert (answer.status, answer.code) == (401, "token_invalid")


async def test_a_body_that_stops_coming_is_given_up(tmp_path):
    async with running_admin(tmp_path, Limits(body_s=0.3)) as admin:
        answer = await admin.raw(f"POST /api/v1/models:apply HTTP/1.1\r\nHost: a\r\n{AUTH}Content-Length: 100\r\n\r\nhalf".encode())
        assert (answer.status, answer.code) == (408, "timeout")


async def test_expect_100_continue_is_tolerated(admin):
    body = json.dumps({"models": [], "dry_run": True}).encode()
    head = f"POST /api/v1/models:apply HTTP/1.1\r\nHost: a\r\n{AUTH}Expect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n"
    answer = await admin.raw(head.encode() + body)
    assert (answer.status, answer.code) == (400, "invalid")


# --- V14, V15


@pytest.mark.parametrize("path", ["/api/v1/events", "/api/v1/status", "/health", "/ready", "/metrics"])
async def test_head_is_answered_without_a_body_and_at_once(admin, path):
    async with await admin.connect() as stream:
        head = f"HEAD {path} HTTP/1.1\r\nHost: a\r\n{AUTH}Accept: text/event-stream\r\nConnection: close\r\n\r\n"
        await stream.send_all(head.encode())
        with trio.fail_after(DEADLINE_S):
            assert (await read_answer(stream, head=True)).status == 200
        assert await at_end(stream) == b""


@pytest.mark.parametrize(
    "path", ["//api/v1/status", "/api//v1/status", "/api/v1/status/", "/api/v1/%2e%2e/v1/status", "/API/v1/status", "/api/v1/../v1/status"]
)
async def test_a_path_by_a_trick_reaches_nothing(admin, path):
    assert (await admin.call("GET", path)).status == 404
    assert (await admin.call("GET", path, token=None)).status in (401, 404)


@pytest.mark.parametrize("path", ["/api/v1/%73tatus", "/api%2fv1%2fstatus", "/api/v1/statu%73"])
async def test_an_encoded_path_asks_for_the_same_token_as_the_plain_one(admin, path):
    assert (await admin.call("GET", path, token=None)).status == 401
    assert (await admin.call("GET", path)).status == 200


async def test_route_values_with_dots_are_names_and_nothing_else(admin):
    answer = await admin.call("GET", "/api/v1/models/%2e%2e%2f%2e%2e%2fetc%2fpasswd")
    assert (answer.status, answer.code) == (404, "not_found")


# --- V2, V3, V16: streams, silent readers, the end


async def open_stream(admin, receive_buffer=None) -> trio.SocketStream:
    stream = await admin.connect(receive_buffer)
    await stream.send_all(f"GET /api/v1/events HTTP/1.1\r\nHost: a\r\n{AUTH}Accept: text/event-stream\r\n\r\n".encode())
    return stream


async def read_until(stream: trio.SocketStream, mark: bytes) -> bytes:
    data = b""
    with trio.fail_after(DEADLINE_S):
        while mark not in data:
            more = await stream.receive_some(65536)
            assert more, data
            data += more
    return data


async def test_a_stream_outlives_the_web_frameworks_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("llmgw.admin.app.SLOW_ANSWER_S", 0.2)
    async with running_admin(tmp_path, Limits(comment_s=0.05)) as admin, await open_stream(admin) as stream:
        await read_until(stream, b"retry:")
        for _ in range(10):
            await read_until(stream, b": still here")
        admin.controller.events.record("test.kind", "test/one", "after the limit")
        assert b"after the limit" in await read_until(stream, b"test/one")


@pytest.mark.parametrize(("ours_s", "kernels_s"), [(0.5, 60.0), (60.0, 0.5)], ids=["our limit", "the kernel's limit"])
async def test_a_reader_that_stops_does_not_hold_up_the_end(tmp_path, ours_s, kernels_s):
    limits = Limits(send_stall_s=ours_s, drain_s=0.2, comment_s=0.01)
    async with running_admin(tmp_path, limits, kernel_stall_s=kernels_s) as admin:
        stream = await open_stream(admin, receive_buffer=2048)
        await read_until(stream, b"retry:")
        for number in range(400):
            admin.controller.events.record("test.kind", "test/flood", f"{number} " + "x" * 8000)
        await until(lambda: not admin.controller.events._waiting)
        await trio.sleep(0.3)
        admin.app.drain()
        with trio.fail_after(DEADLINE_S):
            await admin.served.wait()
        await stream.aclose()


async def test_a_reader_that_stops_is_let_go_while_others_are_served(tmp_path):
    async with running_admin(tmp_path, Limits(send_stall_s=0.3, comment_s=0.01)) as admin:
        stream = await open_stream(admin, receive_buffer=2048)
        await read_until(stream, b"retry:")
        for number in range(900):
            admin.controller.events.record("test.kind", "test/flood", f"{number} " + "x" * 8000)
        await until(lambda: not admin.controller.events._followers, "the follower is gone")
        assert (await admin.call("GET", "/api/v1/status")).status == 200
        await stream.aclose()


async def test_a_hang_up_in_a_stream_leaves_no_follower_behind(admin):
    for linger in (False, True):
        stream = await open_stream(admin)
        await read_until(stream, b"retry:")
        await until(lambda: len(admin.controller.events._followers) == 1)
        if linger:
            stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # a reset
        await stream.aclose()
        await until(lambda: not admin.controller.events._followers, "the follower is gone")


async def test_a_draining_server_tells_streams_closes_idle_connections_and_ends(admin):
    idle = await admin.connect()
    await idle.send_all(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
    await read_answer(idle)
    stream = await open_stream(admin)
    await read_until(stream, b"retry:")
    admin.app.drain()
    goodbye = await at_end(stream)
    assert b"event: error" in goodbye
    assert b"shutting_down" in goodbye
    assert goodbye.endswith(b"0\r\n\r\n")
    assert await at_end(idle) == b""
    with trio.fail_after(DEADLINE_S):
        await admin.served.wait()
    with pytest.raises(OSError):
        await admin.connect()
    await idle.aclose()
    await stream.aclose()


async def test_an_answer_under_way_while_draining_is_finished_and_says_close(tmp_path):
    async with running_admin(tmp_path, Limits(drain_s=10)) as admin, await admin.connect() as stream:
        body = json.dumps({"models": [], "dry_run": True}).encode()
        await stream.send_all(f"POST /api/v1/models:apply HTTP/1.1\r\nHost: a\r\n{AUTH}Content-Length: {len(body)}\r\n\r\n".encode())
        await trio.sleep(0.05)
        admin.app.drain()
        await trio.sleep(0.05)
        await stream.send_all(body)
        answer = await read_answer(stream)
        assert (answer.status, answer.headers["connection"]) == (400, "close")
        assert await at_end(stream) == b""
        with trio.fail_after(DEADLINE_S):
            await admin.served.wait()


async def test_many_clients_that_come_and_go_leave_nothing_open(admin):
    async def client(number: int) -> None:
        stream = await admin.connect()
        await stream.send_all(b"GET /api/v1/status HTTP/1.1\r\nHost: a\r\n" + (b"\r\n" if number % 2 else b""))
        if number % 3:
            await trio.sleep(0.001 * (number % 10))
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        for number in range(60):
            nursery.start_soon(client, number)
    assert (await admin.call("GET", "/api/v1/status")).status == 200
    admin.app.drain()
    with trio.fail_after(DEADLINE_S):
        await admin.served.wait()


# --- sockets


def test_a_port_that_is_taken_is_named():
    (first,) = bind_admin("127.0.0.1:0")
    port = first.getsockname()[1]
    with pytest.raises(Conflict, match=rf"cannot listen on 127\.0\.0\.1:{port}: the port is taken") as told:
        bind_admin(f"127.0.0.1:{port}")
    assert told.value.code == "port_taken"
    first.close()


@pytest.mark.parametrize("text", ["nonsense", "127.0.0.1:99999", "1.2.3.4.5:80:80", "unix:relative"])
def test_an_address_that_is_none_is_invalid(text):
    with pytest.raises(Invalid):
        bind_admin(text)


def test_an_address_of_another_machine_cannot_be_listened_on():
    with pytest.raises(Unavailable, match="cannot listen"):
        bind_admin("192.0.2.1:0")


def test_the_time_limit_on_silent_readers_stands_on_the_listening_socket():
    (listening,) = bind_admin("127.0.0.1:0", 20.0)
    assert listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000
    with socket.create_connection(listening.getsockname()):
        listening.setblocking(True)
        accepted, _ = listening.accept()
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000
        accepted.close()
    listening.close()


def test_a_unix_socket_left_behind_is_replaced_and_a_living_one_is_not(tmp_path):
    path = tmp_path / "admin.sock"
    (first,) = bind_admin(f"unix:{path}")
    with pytest.raises(Conflict, match="taken"):
        bind_admin(f"unix:{path}")
    first.close()
    (again,) = bind_admin(f"unix:{path}")
    assert path.stat().st_mode & 0o777 == 0o600
    again.close()
    (tmp_path / "file").write_text("precious")
    with pytest.raises(Unavailable, match="no socket"):
        bind_admin(f"unix:{tmp_path / 'file'}")
    assert (tmp_path / "file").read_text() == "precious"


async def test_tls_is_spoken_where_a_certificate_is_given(tmp_path):
    openssl = shutil.which("openssl")
    if openssl is None:
        skip("no openssl program to make a certificate with")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    files = ["-keyout", str(key), "-out", str(certificate)]
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    make = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject, *files]
    subprocess.run(make, check=True, capture_output=True)
    ours = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ours.load_cert_chain(certificate, key)
    theirs = ssl.create_default_context(cafile=certificate)
    async with running_admin(tmp_path, tls=ours) as admin:
        stranger = await admin.connect()
        await stream_of_plain_text(stranger)
        stream = trio.SSLStream(await admin.connect(), theirs, server_hostname="localhost", https_compatible=True)
        await stream.send_all(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert (await read_answer(stream)).status == 200
        assert await at_end(stream) == b""
        await stream.aclose()


async def stream_of_plain_text(stream: trio.SocketStream) -> None:
    await stream.send_all(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
    answered = await at_end(stream)
    assert answered.startswith(b"HTTP/1.1 400 ")
    assert b"tls_needed" in answered  # and nothing of what was asked for
    await stream.aclose()
