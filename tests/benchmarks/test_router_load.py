"""The fake engine and the load: they build, their figures are right, and whatever is wrong with an answer is counted as an error."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import socket
import threading
from collections.abc import Iterator

import pytest

from benchmarks.router.services import running
from benchmarks.router.tools import Engine, Figures, body_hash, engine, load, tree
from tests.programs import call, skip

STAMP = b"@0000000000000000001@"
CHUNK = b'data: {"choices":[{"delta":{"content":"' + STAMP + b'"}}]}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    if shutil.which("cc") is None:
        skip("there is no C compiler")


@pytest.fixture(scope="module")
def fast() -> Iterator[Engine]:
    """An engine whose chunks follow each other by a millisecond."""
    with engine(rate=1000) as one:
        yield one


def plain(body: bytes, *, status: bytes = b"200 OK", length: int | None = None) -> bytes:
    head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(body) if length is None else length) + body


def chunked(*parts: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"".join(
        b"%x\r\n%s\r\n" % (len(part), part) for part in (*parts, b"")
    )


def answered(answer: bytes, *options: str | int, step: int = 0) -> Figures:
    """What the load says of a server that gives this answer to each request, `step` bytes at a time (0: at once), and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)

        def serve() -> None:
            with listener.accept()[0] as one:
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while b"]}" not in one.recv(65_536):
                    pass
                size = step or len(answer) + 1
                for at in range(0, len(answer), size):
                    one.sendall(answer[at : at + size])
                one.shutdown(socket.SHUT_WR)
                while one.recv(65_536):
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            return load(listener.getsockname()[1], "--requests", 1, *options)
        finally:
            thread.join()


PLAIN = ("--connections", 1)
STREAM = ("--streams", 1, "--chunks", 2)


def test_every_request_of_a_closed_loop_is_counted_with_its_latency(fast: Engine) -> None:
    found = load(fast.port, "--connections", 4, "--requests", 200, pids=tree(fast.process))
    assert (found.requests, found.errors, found.chunks, found.connects) == (200, 0, 0, 4)
    assert found.latency_us.count == 200
    assert 0 < found.latency_us.p50 <= found.latency_us.p99 <= found.latency_us.max
    assert found.cpu_s > 0


def test_every_chunk_of_a_stream_is_counted_with_its_delay(fast: Engine) -> None:
    found = load(fast.port, "--streams", 4, "--requests", 8, "--chunks", 5, "--even", 0)
    assert (found.requests, found.errors, found.chunks) == (8, 0, 40)
    assert (found.delay_us.count, found.ttft_us.count, found.latency_us.count) == (40, 8, 0)
    assert found.delay_us.p50 > 0


def test_the_first_streams_are_shorter_so_that_later_ones_begin_evenly(fast: Engine) -> None:
    assert load(fast.port, "--streams", 2, "--requests", 2, "--chunks", 3).chunks == 2 + 3


def test_a_third_is_aborted_and_no_error(fast: Engine) -> None:
    found = load(fast.port, "--connections", 4, "--requests", 300, "--abort-every", 3)
    assert (found.requests, found.aborted, found.errors) == (200, 100, 0)


@pytest.mark.parametrize("size", [500, 100_000, 1_000_000])
def test_a_body_has_the_size_that_was_asked_for_and_is_a_chat(fast: Engine, size: int) -> None:
    seen: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with listener.accept()[0] as one:
                while not seen or not seen[-1].endswith(b"]}"):
                    seen.append(one.recv(1 << 20))
                one.sendall(plain(b'{"content":"' + STAMP + b'"}'))

        thread = threading.Thread(target=serve)
        thread.start()
        found = load(listener.getsockname()[1], "--connections", 1, "--requests", 1, "--body", size)
        thread.join()
    head, _, body = b"".join(seen).partition(b"\r\n\r\n")
    assert found.errors == 0
    assert b"\r\nAuthorization: Bearer sk-" in head
    assert abs(len(body) - size) < 64
    assert {message["role"] for message in json.loads(body)["messages"]} == {"user"}
    assert load(fast.port, "--connections", 2, "--requests", 4, "--body", size).errors == 0


@pytest.mark.parametrize(
    ("answer", "options"),
    [
        pytest.param(plain(b'{"content":"' + STAMP + b'"}'), PLAIN, id="plain"),
        pytest.param(chunked(b'{"content":"' + STAMP[:9], STAMP[9:] + b'"', b"}"), PLAIN, id="plain in chunks"),
        pytest.param(b"HTTP/1.1 100 Continue\r\n\r\n" + plain(b'{"content":"' + STAMP + b'"}'), PLAIN, id="after an interim answer"),
        pytest.param(chunked(CHUNK, CHUNK, DONE), STREAM, id="stream"),
        pytest.param(chunked(CHUNK + CHUNK[:50], CHUNK[50:] + DONE), STREAM, id="stream cut otherwise"),
        pytest.param(chunked(CHUNK, CHUNK, DONE)[:-2] + b"trailer: 1\r\n\r\n", STREAM, id="stream with a trailer"),
        pytest.param(b"HTTP/1.1 200 OK\r\n\r\n" + CHUNK + CHUNK + DONE, STREAM, id="stream until the close"),
    ],
)
@pytest.mark.parametrize("step", [0, 1])
def test_a_right_answer_is_no_error_however_its_bytes_arrive(answer: bytes, options: tuple[str | int, ...], step: int) -> None:
    found = answered(answer, *options, step=step)
    assert (found.requests, found.errors, found.error) == (1, 0, "")
    assert found.chunks == (2 if "--streams" in options else 0)


@pytest.mark.parametrize(
    ("answer", "options", "told"),
    [
        pytest.param(plain(b'{"error":1}', status=b"503 No"), PLAIN, "status 503", id="status"),
        pytest.param(plain(b'{"content":""}'), PLAIN, "without its end", id="another answer"),
        pytest.param(plain(b'{"content":"' + STAMP + b'"'), PLAIN, "without its end", id="not closed"),
        pytest.param(plain(b'{"content":"' + STAMP + b'"}', length=900), PLAIN, "ended in an answer", id="cut"),
        pytest.param(plain(b'{"content":"' + STAMP + b'"}') + b"x", PLAIN, "bytes after the end", id="surplus"),
        pytest.param(chunked(CHUNK, DONE), STREAM, "1 chunks in place of 2", id="a chunk missing"),
        pytest.param(chunked(CHUNK, CHUNK, CHUNK, DONE), STREAM, "3 chunks in place of 2", id="a chunk twice"),
        pytest.param(chunked(CHUNK, CHUNK), STREAM, "ends in", id="no [DONE]"),
        pytest.param(chunked(CHUNK, CHUNK, DONE)[:-5], STREAM, "ended in an answer", id="no last chunk"),
        pytest.param(chunked(CHUNK, CHUNK, DONE).replace(b"\r\ne\r\n", b"\r\nd\r\n"), STREAM, "broken framing", id="a chunk's size"),
        pytest.param(b"", PLAIN, "ended before an answer", id="nothing"),
    ],
)
def test_whatever_is_wrong_with_an_answer_is_counted_as_an_error(answer: bytes, options: tuple[str | int, ...], told: str) -> None:
    found = answered(answer, *options)
    assert (found.requests, found.errors) == (0, 1)
    assert told in found.error


@pytest.mark.parametrize(("options", "text"), [(PLAIN, b'{"model":"m","max_tokens":180,"messages":[]}'), (STREAM, b"")])
def test_every_byte_of_an_answer_is_held_against_the_hash_of_one_that_the_engine_gave(
    fast: Engine, options: tuple[str | int, ...], text: bytes
) -> None:
    body = text or b'{"model":"m","max_tokens":2,"stream":true,"messages":[]}'
    connection = http.client.HTTPConnection("127.0.0.1", fast.port)
    connection.request("POST", "/v1/chat/completions", body)
    given = connection.getresponse().read()
    connection.close()
    right = load(fast.port, *options, "--even", 0, "--requests", 3, "--hash", body_hash(given))
    assert (right.requests, right.errors) == (3, 0)
    wrong = load(fast.port, *options, "--even", 0, "--requests", 3, "--hash", body_hash(given.replace(b"bench", b"bunch")))
    assert (wrong.requests, wrong.errors, wrong.cut) == (0, 3, 0)
    assert "whose hash is" in wrong.error


def test_an_answer_from_before_its_request_is_an_error_where_answers_are_hashed() -> None:
    body = b'{"content":"' + STAMP + b'"}'
    found = answered(plain(body), *PLAIN, "--hash", body_hash(body))
    assert (found.requests, found.errors, found.error) == (0, 1, "an answer from before its request")


@pytest.mark.parametrize("resend", [1, 0])
def test_a_connection_that_ends_under_a_later_request_is_an_error_where_nothing_is_sent_again(resend: int) -> None:
    right = plain(b'{"content":"' + STAMP + b'"}')
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)

        def serve() -> None:
            for _ in range(3 if resend else 2):  # one answer on each connection, and the end of it under the next request
                with listener.accept()[0] as one:
                    one.recv(65_536)
                    one.sendall(right)
                    one.recv(65_536)

        thread = threading.Thread(target=serve)
        thread.start()
        found = load(listener.getsockname()[1], "--connections", 1, "--requests", 3, "--resend", resend)
        thread.join()
    assert (found.requests, found.errors, found.cut) == ((3, 0, 0) if resend else (2, 1, 1))


def test_what_is_wrong_is_told_rather_than_what_broke_before_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)

        def serve() -> None:
            for answer in (b"", plain(b"", status=b"502 No"), b""):
                with listener.accept()[0] as one:
                    one.recv(65_536)
                    one.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        found = load(listener.getsockname()[1], "--connections", 1, "--requests", 3)
        thread.join()
    assert (found.errors, found.cut, found.error) == (3, 2, "status 502: ")


def test_a_service_that_refuses_connections_ends_the_run_with_errors() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: it stays refused
        found = load(taken.getsockname()[1], "--connections", 2, "--requests", 3)
    assert (found.requests, found.errors) == (0, 3)
    assert "refused" in found.error


def test_an_answer_before_the_request_was_read_counts_and_its_connection_is_not_used_again() -> None:
    right = plain(b'{"content":"' + STAMP + b'"}')
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as held:
        listener.settimeout(30)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)  # the kernel takes in only a part of such a body by itself

        def serve() -> None:
            for _ in range(2):
                one = held.enter_context(listener.accept()[0])
                one.recv(1000)
                one.sendall(right)

        thread = threading.Thread(target=serve)
        thread.start()
        found = load(listener.getsockname()[1], "--connections", 1, "--requests", 2, "--body", 16_000_000)
        thread.join()
    assert (found.requests, found.errors, found.error, found.connects) == (2, 0, "", 2)


def test_the_engine_answers_what_routers_ask_beside_chats(fast: Engine) -> None:
    address = f"127.0.0.1:{fast.port}"
    assert call(address, "GET", "/health") == (200, "ok\n")
    assert call(address, "GET", "/v1/models")[1]["data"][0]["id"] == "m"
    assert "vllm:num_requests_running" in call(address, "GET", "/metrics")[1]
    assert call(address, "GET", "/nothing")[0] == 404


def test_the_engine_tells_usage_in_a_stream_that_asks_for_it(fast: Engine) -> None:
    body = {"model": "m", "stream": True, "max_tokens": 2, "messages": []}
    address, path = f"127.0.0.1:{fast.port}", "/v1/chat/completions"
    without = call(address, "POST", path, body)[1]
    told = call(address, "POST", path, {**body, "stream_options": {"include_usage": True}})[1]
    assert (without.count("data: "), told.count("data: ")) == (3, 4)
    assert '"usage"' not in without
    assert '"usage"' in told


def test_the_engine_answers_at_each_of_its_addresses() -> None:
    with engine(addresses=252) as one:
        assert one.urls[-1] == f"http://127.0.1.2:{one.port}"
        assert {call(url.removeprefix("http://"), "GET", "/health")[0] for url in one.urls} == {200}


def test_a_router_with_all_its_features_on_passes_the_load_without_an_error(fast: Engine, tmp_path) -> None:  # type: ignore[no-untyped-def]
    with running("llmgw", tmp_path / "llmgw", fast.urls) as service:
        requests = load(service.port, "--connections", 4, "--requests", 50)
        streams = load(service.port, "--streams", 4, "--requests", 8, "--chunks", 5, "--even", 0)
    lines = (tmp_path / "llmgw" / "access.log").read_text().splitlines()
    assert (requests.requests, requests.errors) == (50, 0)
    assert (streams.requests, streams.chunks, streams.errors) == (8, 40, 0)
    assert len(lines) == 1 + 50 + 8  # one more for the request that waited until it was up
