"""Requests as clients and attackers really send them: one meaning per byte, or a refusal (the REQ cases and their neighbours)."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmgw.router.families import ROUTES
from tests.router.fakes import CHAT, CHAT_S, OK_BODY, Stage, get, post, staged

M = b'"messages":[{"role":"user","content":"hi"}]'
P = post(CHAT)
ORIGIN = "Origin: http://app.test\r\n"


def _line(line: str, more: str = "") -> bytes:
    return f"{line}\r\nHost: g\r\nAuthorization: Bearer K\r\n{more}\r\n".encode("latin-1")


def _framed(lines: str, body: bytes = CHAT) -> bytes:
    return post(body, length=lines)


def _chunked(body: bytes, more: str = "") -> bytes:
    return _framed(f"Transfer-Encoding: chunked\r\n{more}", body)


def _version(version: bytes) -> bytes:
    return P.replace(b"HTTP/1.1", version)


WHOLE = b"3a\r\n" + CHAT + b"\r\n"
LAST = b"0\r\n\r\n"
REFUSED: dict[str, tuple[bytes, int]] = {
    # the request line
    "two blanks": (P.replace(b"POST /", b"POST  /"), 400),
    "a tab for a blank": (P.replace(b"POST /", b"POST\t/"), 400),
    "a blank before it": (b" " + P, 400),
    "a blank after it": (_version(b"HTTP/1.1 "), 400),
    "a blank in the target": (_line("GET /v1/models x HTTP/1.1"), 400),
    "no target": (_line("GET  HTTP/1.1"), 400),
    "a relative target": (_line("GET v1/models HTTP/1.1"), 400),
    "no version": (_line("GET /v1/models"), 400),
    "version 0.9": (_version(b"HTTP/0.9"), 505),
    "version 1.2": (_version(b"HTTP/1.2"), 505),
    "version 2.0": (_version(b"HTTP/2.0"), 505),
    "version 11": (_version(b"HTTP/11"), 400),
    "version 1.10": (_version(b"HTTP/1.10"), 400),
    "a version in small letters": (_version(b"http/1.1"), 400),
    "RTSP": (_version(b"RTSP/1.0"), 400),
    "ICE": (_line("SOURCE /v1/models ICE/1.0"), 400),
    "a method in small letters": (P.replace(b"POST", b"post"), 400),
    "a method nobody knows": (P.replace(b"POST", b"FOO"), 400),
    "a letter that is none in the target": (_line("GET /v1/models/\xe9 HTTP/1.1"), 400),
    "a target of 20 KB": (_line(f"GET /{'a' * 20_000} HTTP/1.1"), 431),
    # headers
    "a blank in a name": (post(CHAT, "X Y: 1\r\n"), 400),
    "no name": (post(CHAT, ": 1\r\n"), 400),
    "no colon": (post(CHAT, "foo\r\n"), 400),
    "a blank line that is none": (post(CHAT, "  \r\n"), 400),
    "the first header folded": (P.replace(b"Host: g", b" Host: g"), 400),
    "a delete character": (post(CHAT, "X: a\x7fb\r\n"), 400),
    "a header of 16 KB": (post(CHAT, f"X: {'a' * 16_384}\r\n"), 431),
    "a host with a blank": (P.replace(b"Host: g", b"Host: a b"), 400),
    "a host that is a list": (P.replace(b"Host: g", b"Host: a, b"), 400),
    "a host with a user": (P.replace(b"Host: g", b"Host: u@h"), 400),
    "a host with a path": (P.replace(b"Host: g", b"Host: g/x"), 400),
    "the same host twice": (post(CHAT, "Host: g\r\n"), 400),
    # lengths
    "a length and a semicolon": (_framed("Content-Length: 58;\r\n"), 400),
    "a length in hex": (_framed("Content-Length: 0x3a\r\n"), 400),
    "a length with a point": (_framed("Content-Length: 58.0\r\n"), 400),
    "a length as a power": (_framed("Content-Length: 58e0\r\n"), 400),
    "a length listed twice": (_framed("Content-Length: 58,58\r\n"), 400),
    "a length beyond 64 bits": (_framed("Content-Length: 18446744073709551674\r\n"), 400),
    "a length in other digits": (_framed("Content-Length: \u0665\u0668\r\n"), 400),
    "identity": (_framed("Transfer-Encoding: identity\r\n"), 400),
    "identity beside a length": (_framed("Content-Length: 58\r\nTransfer-Encoding: identity\r\n"), 400),
    "an empty coding": (_framed("Transfer-Encoding: \r\n"), 400),
    "chunked and a comma": (_framed("Transfer-Encoding: chunked,\r\n", WHOLE + LAST), 400),
    "chunked twice in a line": (_framed("Transfer-Encoding: chunked, chunked\r\n", WHOLE + LAST), 400),
    "gzip and chunked": (_framed("Transfer-Encoding: gzip, chunked\r\n", WHOLE + LAST), 400),
    "chunked with a parameter": (_framed("Transfer-Encoding: chunked;x\r\n", WHOLE + LAST), 501),
    "chunked in quotes": (_framed('Transfer-Encoding: "chunked"\r\n', WHOLE + LAST), 501),
    # chunks
    "a size with a plus": (_chunked(b"+3a\r\n" + CHAT + b"\r\n" + LAST), 400),
    "a size with a blank before it": (_chunked(b" 3a\r\n" + CHAT + b"\r\n" + LAST), 400),
    "a size with an underscore": (_chunked(b"3_a\r\n" + CHAT + b"\r\n" + LAST), 400),
    "no size": (_chunked(b"\r\n" + CHAT + b"\r\n" + LAST), 400),
    "a size of 17 digits": (_chunked(b"1000000000000003a\r\n" + CHAT + b"\r\n" + LAST), 400),
    "a size and a bare line feed": (_chunked(b"3a\n" + CHAT + b"\r\n" + LAST), 400),
    "data and a bare line feed": (_chunked(b"3a\r\n" + CHAT + b"\n" + LAST), 400),
    "an extension with a carriage return": (_chunked(b"3a;a\rb\r\n" + CHAT + b"\r\n" + LAST), 400),
    "a trailer without a colon": (_chunked(WHOLE + b"0\r\nfoo\r\n\r\n"), 400),
    "a trailer with a blank before the colon": (_chunked(WHOLE + b"0\r\na : b\r\n\r\n"), 400),
    "a trailer that is folded": (_chunked(WHOLE + b"0\r\na: b\r\n c\r\n\r\n"), 400),
    "trailers of 30 KB": (_chunked(WHOLE + b"0\r\n" + b"a: b\r\n" * 5000 + b"\r\n"), 431),
}


@pytest.mark.case("T18", "B074", "B075", "B081")
@pytest.mark.parametrize("name", REFUSED)
def test_what_no_two_readers_read_alike_is_refused_and_the_connection_closed(stage: Stage, name: str) -> None:
    data, status = REFUSED[name]
    with stage.router.client() as client:
        client.send(data + get("/health"))  # what comes after it may be read by nobody
        got = client.answer()
        assert client.rest() == b""
    assert got.status == status  # and no 408, for which more would have been waited for
    assert got.error["message"]
    assert got.get("connection") == "close"
    assert stage.u1.requests == []


TAKEN: dict[str, bytes] = {
    "zeros before the length": _framed("Content-Length: 0000058\r\n"),
    "tabs around the length": _framed("Content-Length:\t58\t\r\n"),
    "chunked in capitals": _framed("TRANSFER-ENCODING: Chunked\r\n", WHOLE + LAST),
    "zeros before a size": _chunked(b"0000003A\r\n" + CHAT + b"\r\n000\r\n\r\n"),
    "an extension in quotes": _chunked(b'3a;a="b c"\r\n' + CHAT + b"\r\n" + LAST),
    "a trailer that names a length": _chunked(WHOLE + b"0\r\nContent-Length: 5\r\n\r\n"),
    "one byte a chunk": _chunked(b"".join(b"1\r\n%c\r\n" % byte for byte in CHAT) + LAST),
    "an underscore for a dash": post(CHAT, "Transfer_Encoding: chunked\r\nContent_Length: 5\r\n"),
    "empty lines before it": b"\r\n\r\n" + P,
    "a tab in a value": post(CHAT, "X: a\tb\r\n"),
    "letters that are none in a value": post(CHAT, "X: \xe9\r\n"),
    "a thousand headers": post(CHAT, "".join(f"X{number}: 1\r\n" for number in range(1000))),
    "an empty host": P.replace(b"Host: g", b"Host: "),
    "a host with a port": P.replace(b"Host: g", b"Host: [::1]:8080"),
    "the absolute form": P.replace(b"POST /", b"POST http://g/"),
    "the absolute form in capitals": P.replace(b"POST /", b"POST HTTP://G/"),
    "a query": post(CHAT, path="/v1/chat/completions?api-version=1"),
    "an upgrade": post(CHAT, "Connection: Upgrade\r\nUpgrade: websocket\r\n"),
    "an upgrade to HTTP/2": post(CHAT, "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"),
    "an expectation in capitals": post(CHAT, "Expect: 100-Continue\r\n"),
    "a word that holds close": post(CHAT, "Connection: x-close, closed\r\n"),
}


@pytest.mark.case("T18", "B078", "B080")
@pytest.mark.parametrize("name", TAKEN)
def test_what_has_one_meaning_is_one_request(stage: Stage, name: str) -> None:
    with stage.router.client() as client:
        client.send(TAKEN[name] + get("/health"))
        got = client.answer()
        assert (got.status, got.body.decode()) == (200, OK_BODY)
        assert client.answer().json() == {"status": "ok"}
    (seen,) = stage.u1.requests
    assert seen["body"] == CHAT
    names = [line.partition(":")[0] for line in seen["head"].lower().split("\r\n")[1:]]
    assert names.count("content-length") == 1
    assert "transfer-encoding" not in names
    assert "upgrade" not in names


@pytest.mark.case("T26")
def test_a_client_of_the_version_before_is_told_nothing_in_between(stage: Stage) -> None:
    head, _, body = post(CHAT, "Expect: 100-continue\r\n").replace(b"HTTP/1.1", b"HTTP/1.0").partition(b"\r\n\r\n")
    with stage.router.client() as client:
        client.send(head + b"\r\n\r\n" + body[:-1])
        assert stage.router.ask(get("/health")).status == 200  # by now the head has been read
        client.send(body[-1:])
        got = client.answer()
        assert (got.status, got.interim) == (200, [])
    assert stage.router.ask(post(CHAT, "Expect: x\r\n").replace(b"HTTP/1.1", b"HTTP/1.0")).status == 200


@pytest.mark.case("T26")
def test_a_refusal_comes_instead_of_the_word_to_continue(stage: Stage) -> None:
    for data, status in (
        (post(CHAT, "Expect: 100-continue\r\n", path="/v1/nope"), 404),
        (post(CHAT, "Expect: 100-continue\r\n", length="Content-Length: 99999999999\r\n"), 413),
        (_framed("Transfer-Encoding: xchunked\r\nExpect: 100-continue\r\n"), 501),
    ):
        with stage.router.client() as client:
            client.send(data.partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
            got = client.answer()
            assert (got.status, got.interim) == (status, [])
            assert client.rest() == b""


@pytest.mark.case("B080")
@pytest.mark.parametrize("target", ["a:443", "/v1/models", "/v1/chat/completions"])
def test_a_tunnel_is_no_method_here(stage: Stage, target: str) -> None:
    got = stage.router.ask(_line(f"CONNECT {target} HTTP/1.1"))
    assert (got.status, got.error["code"]) == (405, "method_not_allowed")
    assert got.get("allow")


@pytest.mark.case("T30", "B065")
@pytest.mark.parametrize("path", [*ROUTES, "/v1/models", "/v1/models/m1", "/health", "/ready", "/metrics"])
@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "TRACE"])
def test_another_method_is_405_on_every_route(stage: Stage, path: str, method: str) -> None:
    got = stage.router.ask(get(path, method=method))
    assert got.status == 405
    assert got.error["message"]
    assert got.get("allow")
    assert got.get("content-type") == "application/json"


@pytest.mark.case("B082", "T30")
@pytest.mark.parametrize(
    "path",
    [
        "//v1/models", "/v1//models", "/v1/./models", "/v1/chat/../models", "/v1%2fmodels", "/%761/models", "/V1/models", "/v1/models\\x",
        "/v1/%2e%2e/admin/keys", "/admin%2fkeys", "/..%2f..%2fetc/passwd", "/v1/chat/completions/", "/v1/chat/completions;x", "/", "*",
    ],
)  # fmt: skip
def test_no_two_paths_are_one(stage: Stage, path: str) -> None:
    for data in (get(path), get(path, key=""), post(CHAT, path=path)):
        got = stage.router.ask(data)
        assert got.status == 404
        assert got.error["code"] == "unknown_route"
    assert stage.u1.requests == []


@pytest.mark.case("B164", "T34")
@pytest.mark.parametrize("name", ["a header of 16 KB", "a host with a blank", "identity", "no size", "the same host twice"])
def test_a_browser_can_read_also_why_its_bytes_were_refused(stage: Stage, name: str) -> None:
    data, status = REFUSED[name]
    line, _, rest = data.partition(b"\r\n")
    told = line + b"\r\n" + ORIGIN.encode() + b"X-Request-Id: told-early\r\n" + rest
    got = stage.router.ask(told)
    assert got.status == status
    assert got.get("access-control-allow-origin") == "http://app.test"
    assert got.get("x-request-id") == "told-early"
    other = stage.router.ask(told.replace(b"http://app.test", b"http://evil.tst"))
    assert other.get("access-control-allow-origin") is None


def test_a_refused_head_is_told_in_the_shape_of_its_family_and_logged_with_its_path(stage: Stage) -> None:
    got = stage.router.ask(post(CHAT, f"X-Request-Id: big-head\r\nX: {'a' * 20_000}\r\n", path="/v1/messages"))
    assert got.status == 431
    assert got.json()["type"] == "error"
    line = stage.router.log_line("big-head")
    assert "path=/v1/messages" in line
    assert "method=POST" in line


BODIES: dict[str, tuple[bytes, int]] = {
    "a nul after it": (CHAT + b"\0", 400),
    "two byte-order marks": (b"\xef\xbb\xbf" * 2 + CHAT, 400),
    "a mark after a blank": (b" \xef\xbb\xbf" + CHAT, 400),
    "a mark alone": (b"\xef\xbb\xbf", 400),
    "UTF-16 without a mark": (CHAT.decode().encode("utf-16-le"), 400),
    "UTF-16 the other way": (b"\xfe\xff" + CHAT.decode().encode("utf-16-be"), 400),
    "UTF-32": (CHAT.decode().encode("utf-32"), 400),
    "overlong": (CHAT.replace(b"hi", b"\xc0\x80"), 400),
    "half a pair in UTF-8": (CHAT.replace(b"hi", b"\xed\xa0\x80"), 400),
    "beyond the last character": (CHAT.replace(b"hi", b"\xf4\x90\x80\x80"), 400),
    "half a character": (CHAT.replace(b"hi", b"\xe5\x8c"), 400),
    "a line feed in a string": (CHAT.replace(b"hi", b"a\nb"), 400),
    "a nul in a string": (CHAT.replace(b"hi", b"a\0b"), 400),
    "an escape that is none": (CHAT.replace(b"hi", b"\\x41"), 400),
    "a cut escape": (CHAT.replace(b"hi", b"\\u12"), 400),
    "a zero before a number": (b'{"model":"m1",' + M + b',"t":01}', 400),
    "a number without an end": (b'{"model":"m1",' + M + b',"t":1.}', 400),
    "a plus before a number": (b'{"model":"m1",' + M + b',"t":+1}', 400),
    "a number in hex": (b'{"model":"m1",' + M + b',"t":0x10}', 400),
    "nan in small letters": (b'{"model":"m1",' + M + b',"t":nan}', 400),
    "Python's words": (b'{"model":"m1",' + M + b',"t":True}', 400),
    "single quotes": (CHAT.replace(b'"', b"'"), 400),
    "a comment": (CHAT[:-1] + b"/*x*/}", 400),
    "a comma too many": (CHAT.replace(b'"hi"', b'["hi",]'), 400),
    "two values": (CHAT + CHAT, 400),
    "lines of JSON": (CHAT + b"\n" + CHAT, 400),
    "a form": (b"model=m1&messages=x", 400),
    "a list of requests": (b"[" + CHAT + b"]", 400),
    "two lists of messages": (b'{"model":"m1",' + M + b"," + M + b"}", 400),
    "two stream options": (b'{"model":"m1",' + M + b',"stream_options":{},"stream_options":null}', 400),
    "stream as 0": (b'{"model":"m1",' + M + b',"stream":0}', 400),
    "stream as text": (b'{"model":"m1",' + M + b',"stream":"false"}', 400),
    "stream as a list": (b'{"model":"m1",' + M + b',"stream":[]}', 400),
    "messages as true": (b'{"model":"m1","messages":true}', 400),
    "a model that is false": (b'{"model":false,' + M + b"}", 400),
    "a model of 5000 digits": (b'{"model":' + b"9" * 5000 + b"," + M + b"}", 400),
    "a model inside alone": (b'{"x":{"model":"m1"},' + M + b"}", 400),
    "a model of half a pair": (b'{"model":"\\ud800",' + M + b"}", 404),
    "a model with blanks": (b'{"model":" m1 ",' + M + b"}", 404),
    "a model with a line feed": (b'{"model":"m1\\n",' + M + b"}", 404),
    "a model with markup": (b'{"model":"<script>alert(1)</script>",' + M + b"}", 404),
    "5000 lists in each other": (b'{"model":"m1",' + M + b',"x":' + b"[" * 5000 + b"]" * 5000 + b"}", 400),
    "lists in each other beside half a pair": (b'{"model":"m1","y":"\\ud800","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
    "half a megabyte of brackets": (b"[" * 500_000, 400),
}


@pytest.mark.case("T22", "B053", "B054", "B055", "B056", "B058", "B060", "B062")
@pytest.mark.parametrize("name", BODIES)
def test_a_body_that_engines_would_read_differently_is_refused(stage: Stage, name: str) -> None:
    body, status = BODIES[name]
    got = stage.router.ask(post(body))
    assert (got.status, got.get("content-type")) == (status, "application/json")
    assert len(got.error["message"]) < 600
    assert all(character >= " " for character in got.error["message"])
    assert stage.u1.requests == []


KEPT: dict[str, bytes] = {
    "numbers beyond a float": b'{"model":"m1",' + M + b',"t":1e400,"u":-1e-999,"v":1E+5,"w":18446744073709551616,"x":-0}',
    "100,000 digits": b'{"model":"m1",' + M + b',"seed":' + b"9" * 100_000 + b"}",
    "numbers beyond a float and half a pair": b'{"model":"m1",' + M + b',"t":1e400,"x":"\\uDFFF"}',
    "900 lists in each other": b'{"model":"m1",' + M + b',"x":' + b"[" * 900 + b"]" * 900 + b"}",
    "a name twice that is not ours": b'{"model":"m1",' + M + b',"x":1,"x":2,"y":{"model":"a","model":"b"}}',
    "other capitals": b'{"model":"m1","Model":"x","STREAM":true,' + M + b"}",
    "an empty name": b'{"":1,"model":"m1",' + M + b"}",
    "escapes of every kind": CHAT.replace(b"hi", b'\\u0000\\/\\"\\ud83d\\ude00\\\\ud800'),
    "separators of lines": CHAT.replace(b"hi", "\u2028\u2029\x7f".encode()),
    "messages of every kind": b'{"model":"m1","messages":[null,1,"x",[],{"role":1}]}',
    "100,000 names": b'{"model":"m1",' + M + b"".join(b',"k%d":1' % number for number in range(100_000)) + b"}",
}


@pytest.mark.case("T22", "T27", "B056", "B070", "B071", "B072")
@pytest.mark.parametrize("name", KEPT)
def test_a_body_that_only_an_engine_can_judge_reaches_it_byte_for_byte(stage: Stage, name: str) -> None:
    body = KEPT[name]
    assert stage.router.ask(post(body)).status == 200
    assert stage.u1.requests[0]["body"] == body
    renamed = body.replace(b'"model":"m1"', b'"model":"fast"', 1)
    assert stage.router.ask(post(renamed)).status == 200
    assert stage.u1.requests[1]["body"] == body


@pytest.mark.case("B072", "B071")
def test_an_engine_is_asked_for_nothing_that_the_client_did_not_ask_for(stage: Stage) -> None:
    for _ in range(2):
        assert stage.router.ask(post(CHAT)).status == 200
        assert stage.router.ask(post(b'{"model":"m1","input":"x"}', path="/v1/embeddings")).status == 200
    assert [seen["body"] for seen in stage.u1.requests] == [CHAT, b'{"model":"m1","input":"x"}'] * 2


@pytest.mark.case("T20", "B076")
def test_a_request_that_is_pipelined_behind_a_close_is_nobodys(stage: Stage) -> None:
    with stage.router.client() as client:
        client.send(post(CHAT, "Connection: close\r\n") + post(CHAT_S))
        got = client.answer()
        assert (got.status, got.get("connection")) == (200, "close")
        assert client.rest() == b""
    assert len(stage.u1.requests) == 1


@pytest.mark.case("B064", "T24")
def test_a_limit_of_the_file_is_told_for_every_way_to_send_a_body(tmp_path: Path) -> None:
    with staged(tmp_path, change={"max_body_bytes = 52428800": "max_body_bytes = 1024"}) as stage:
        body = CHAT.replace(b"hi", b"a" * 2000)
        for data in (
            post(body),
            _chunked(b"%x\r\n%b\r\n" % (len(body), body) + LAST),
            _chunked(b"".join(b"1\r\na\r\n" for _ in range(2000)) + LAST),
            post(body, "Expect: 100-continue\r\n"),
        ):
            with stage.router.client() as client:
                client.send(data)
                got = client.answer()
                assert got.status == 413
                assert "1024 bytes" in got.error["message"]
                assert client.rest() == b""
        exact = CHAT.replace(b"hi", b"a" * (1024 - len(CHAT) + 2))
        assert stage.router.ask(post(exact)).status == 200
        assert [seen["body"] for seen in stage.u1.requests] == [exact]
