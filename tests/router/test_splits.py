"""Any split of the bytes means the same, and our scan of JSON agrees with a real reader of it."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmgw.domain.errors import Invalid
from llmgw.router.body import read_body, top_level
from llmgw.router.http1 import AnswerHead, Chunks, Framing, Heads, RequestReader, ResponseReader, chunk, whole_chunk
from llmgw.router.sse import DONE, EventScanner, data_of, error_of, event_name, is_done, is_finish
from tests.fuzz.targets import bodies

CHAT = b'{"model":"m1","messages":[{"role":"user","content":"hi"}]}'
REQUESTS = (
    b"GET /health HTTP/1.1\r\nHost: g\r\n\r\n",
    b"\r\nGET /v1/models?a=b HTTP/1.1\r\nhost: g\r\nX-Y:  padded \r\n\r\n",
    b"POST /v1/x HTTP/1.1\r\nHost: g\r\nContent-Length: 58\r\n\r\n" + CHAT,
    b"POST /v1/x HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n1E;a=b\r\n"
    + CHAT[:30]
    + b"\r\n1c\r\n"
    + CHAT[30:]
    + b"\r\n0\r\nT: 1\r\n\r\n",
    b"POST /v1/x HTTP/1.1\r\nHost: g\r\nContent-Length: 500\r\n\r\n" + b"x" * 500,
    b"GET http://g/v1/models HTTP/1.1\r\nHost: g\r\n\r\n",
    b"GET / HTTP/1.0\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: g\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST / HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n",
    b"GET / HTTP/1.1\nHost: g\n\n",
    b"GET / HTTP/1.1\r\nHost: g\r\n folded\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: g\r\nX: " + b"y" * 300 + b"\r\n\r\n",
    b"\x16\x03\x01\x00\xc8\x01\x00",
)


def _cuts(data: bytes, marks: list[int]) -> list[bytes]:
    at = sorted({mark % (len(data) + 1) for mark in marks} | {0, len(data)})
    return [data[start:end] for start, end in itertools.pairwise(at)]


def _read(pieces: list[bytes]) -> tuple[Any, ...]:
    reader = RequestReader(max_head=256, max_body=400)
    for piece in pieces:
        reader.feed(piece)
    found = [(r.head.method, r.head.target, r.head.minor, r.head.headers, r.head.close, r.body(), r.size) for r in reader.finished]
    current = None if reader.current is None else (reader.current.head.target, reader.current.body())
    return found, reader.fault, current


@given(st.lists(st.sampled_from(REQUESTS), min_size=1, max_size=4), st.lists(st.integers(0, 10_000), max_size=12))
@example([REQUESTS[2], REQUESTS[3]], [1, 5, 60, 61, 62])
@example([REQUESTS[0]], list(range(60)))
def test_any_split_of_the_bytes_gives_the_same_requests(requests: list[bytes], marks: list[int]) -> None:
    data = b"".join(requests)
    assert _read(_cuts(data, marks)) == _read([data])


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=8))
def test_noise_never_raises_and_reads_the_same_in_pieces(data: bytes, marks: list[int]) -> None:
    assert _read(_cuts(data, marks)) == _read([data])


@given(st.sampled_from(REQUESTS), st.integers(0, 400), st.integers(0, 255), st.lists(st.integers(0, 400), max_size=6))
def test_a_request_with_one_wrong_byte_reads_the_same_in_pieces(request: bytes, at: int, byte: int, marks: list[int]) -> None:
    at %= len(request)
    data = request[:at] + bytes([byte]) + request[at + 1 :]
    assert _read(_cuts(data, marks)) == _read([data])


LENGTHS = (
    b"0", b"5", b"05", b"58", b"401", b"", b"+5", b"-5", b" 5", b"5 ", b"5;", b"5,5", b"\xb2", b"9" * 19, b"9" * 20, b"5\r\nX-Z: y",
    b"5\r\nContent-Length: 5", b"5\r\n\r\n", b"5\r\nTransfer-Encoding: chunked",
)  # fmt: skip
LENGTH_NAMES = (b"content-length", b"Content-Length", b"CONTENT-LENGTH")


@pytest.mark.parametrize("name", LENGTH_NAMES)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_head_that_came_before_is_read_as_by_who_meets_its_like_for_the_first_time(name: bytes, length: bytes) -> None:
    def seen(reader: RequestReader, length: bytes) -> tuple[Any, ...]:
        reader.feed(b"POST /v1/x HTTP/1.1\r\nHost: g\r\n%b: %b\r\nX-Y: z\r\n\r\nhello" % (name, length))
        found = [(r.head.target, r.body(), r.size) for r in reader.finished]
        reader.finished.clear()
        return found, reader.fault, None if reader.current is None else reader.current.body()

    experienced = RequestReader(256, 400)
    for _ in range(3):
        assert seen(experienced, b"5") == ([(b"/v1/x", b"hello", 5)], None, None)
    assert seen(experienced, length) == seen(RequestReader(256, 400), length)


def test_a_head_that_came_before_is_still_refused_when_the_limit_has_become_smaller() -> None:
    reader = RequestReader(256, 400)
    for _ in range(3):
        reader.feed(REQUESTS[2])
    assert reader.fault is None
    reader.max_head = 30
    reader.feed(REQUESTS[2])
    assert reader.fault is not None
    assert reader.fault.status == 431


@pytest.mark.parametrize("name", LENGTH_NAMES)
@pytest.mark.parametrize("length", LENGTHS)
def test_so_is_an_engines(name: bytes, length: bytes) -> None:
    def seen(heads: Heads[AnswerHead], length: bytes) -> tuple[Any, ...]:
        reader = ResponseReader(heads)
        reader.feed(b"HTTP/1.1 200 OK\r\n%b: %b\r\nX-Y: z\r\n\r\nhello" % (name, length))
        return reader.take(), reader.complete, reader.surplus, bool(reader.broken), reader.reusable, reader.framing

    heads: Heads[AnswerHead] = Heads()
    for _ in range(3):
        assert seen(heads, b"5") == (b"hello", True, False, False, True, Framing.LENGTH)
    assert seen(heads, length) == seen(Heads(), length)


ANSWERS = (
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n",
    b"HTTP/1.1 204 No Content\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 3\r\n\r\nxyz",
    b"HTTP/1.1 200 OK\r\n\r\nuntil the close",
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\n\r\n",
    b"SSH-2.0\r\n",
)


def _answer(pieces: list[bytes]) -> tuple[Any, ...]:
    reader = ResponseReader()
    body = b""
    for piece in pieces:
        reader.feed(piece)
        body += reader.take()
    return reader.status, reader.headers, body, reader.complete, reader.surplus, bool(reader.broken), reader.reusable


@given(
    st.sampled_from(ANSWERS), st.sampled_from((b"", b"x", b"HTTP/1.1 200 OK\r\n", ANSWERS[0])), st.lists(st.integers(0, 300), max_size=8)
)
def test_any_split_of_the_bytes_gives_the_same_answer(answer: bytes, more: bytes, marks: list[int]) -> None:
    data = answer + more
    assert _answer(_cuts(data, marks)) == _answer([data])


@given(st.sampled_from(ANSWERS[:5]), st.binary(min_size=1, max_size=40))
@example(ANSWERS[0], b"\r")
def test_bytes_after_an_answer_never_join_its_body_and_spoil_its_connection(answer: bytes, more: bytes) -> None:
    clean = _answer([answer])
    spoiled = _answer([answer, more])
    assert spoiled[:4] == clean[:4]
    assert spoiled[6] == (clean[6] and not more.strip(b"\r\n"))  # line ends may precede the next answer


LINES = st.sampled_from(
    ('data: {"a":1}', "data:x", "data", ": ping", ":", "event: e", "id: 1", "data: [DONE]", "retry: 5", "", "", "data: é😀")
)
ENDS = st.sampled_from(("\n", "\r\n", "\r"))


@given(st.lists(st.tuples(LINES, ENDS), max_size=30), st.lists(st.integers(0, 500), max_size=10))
@example([("data: x", "\r"), ("", "\r"), ("data: y", "\r\n"), ("", "\r\n")], [8, 9])
@example([("data: x", "\n"), ("", "\n"), ("", "\n")], [])
def test_any_split_of_the_bytes_gives_the_same_events_and_loses_none(lines: list[tuple[str, str]], marks: list[int]) -> None:
    data = "".join(line + end for line, end in lines).encode()

    def scan(pieces: list[bytes]) -> tuple[list[bytes], bytes]:
        scanner = EventScanner()
        found = [event for piece in pieces for event in scanner.feed(piece)]
        return found, scanner.rest()

    whole, rest = scan([data])
    assert b"".join(whole) + rest == data
    assert scan(_cuts(data, marks)) == (whole, rest)


@pytest.mark.parametrize("start", [b"data: ", b": "])
def test_an_event_of_megabytes_is_gathered_in_place(start: bytes) -> None:
    """It was copied anew with every read, which took seconds for one, and all others of the process waited."""
    scanner, piece, size = EventScanner(), b"x" * 65_536, 8 << 20
    tracemalloc.start()
    try:
        scanner.feed(start)
        for _ in range(size // len(piece)):
            assert scanner.feed(piece) == []
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 1.5 * size, "one copy, and room to grow"
    assert b"".join(scanner.feed(b"\n\n")) == start + b"x" * size + b"\n\n"


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b"data: x\n\n", b"x"),
        (b"data:x\n\n", b"x"),
        (b"data: a\ndata: b\n\n", b"a\nb"),
        (b"event: e\r\ndata:  a\r\n\r\n", b" a"),
        (b"data\n\n", b""),
        (b": data: x\n\n", None),
        (b"event: e\n\n", None),
        (b"database: x\n\n", None),
        (b"data: x\rdata: y\r\r", b"x\ny"),
    ],
)
def test_the_data_of_an_event_is_found(event: bytes, data: bytes | None) -> None:
    assert data_of(event) == data


def test_the_marks_of_a_stream_are_told_from_text_that_looks_like_them() -> None:
    assert is_done(DONE)
    assert is_done(b"data:[DONE]\r\n\r\n")
    assert not is_done(b'data: {"content":"data: [DONE]"}\n\n')
    assert is_finish(b'data: {"finish_reason" : "stop"}\n\n')
    assert not is_finish(b'data: {"finish_reason":null}\n\n')
    assert not is_finish(b'data: {"content":"\\"finish_reason\\":\\"stop\\""}\n\n')
    assert error_of(b'data: {"error":{"message":"x"}}\n\n') == {"message": "x"}
    assert error_of(b'data: {"error":null,"choices":[]}\n\n') is None
    assert error_of(b'data: {"choices":[{"delta":{"content":"error"}}]}\n\n') is None
    assert error_of(b'event: error\ndata: {"type":"error","error":{"type":"x"}}\n\n') == {"type": "x"}
    assert error_of(b'data: {"error" bad\n\n') is None
    assert event_name(b"event: a\ndata: b\n\n") == b"a"


LONG = {
    "one long text": b'[{"role":"user","content":"' + b"words \\n" * 800 + b'"}]',
    "many short texts": b"[" + b",".join([b'{"a":"b"}'] * 600) + b"]",
    "a text that looks like it": b'[{"content":"' + b"x" * 5000 + b'\\"model\\":\\"y\\", \\"stream\\""}]',
    "a name inside": b'[{"model":"y","stream":1,"messages":[],"content":"' + b"x" * 5000 + b'"}]',
}


@pytest.mark.parametrize("messages", LONG.values(), ids=LONG)
@pytest.mark.parametrize("again", [b'"model":"z"', b'"messages":[]', b'"stream":false', b'"mod\\u0065l":"z"', b'"\\u0073tream":true'])
def test_a_name_that_is_there_twice_is_found_in_a_long_body_too(messages: bytes, again: bytes) -> None:
    once = b'{"model":"m","messages":%b,"stream":true' % messages
    asked = read_body(once + b"}", needs_messages=True)
    assert (asked.model, asked.stream, b"".join(asked.as_sent("n"))) == ("m", True, (once + b"}").replace(b'"m"', b'"n"', 1))
    with pytest.raises(Invalid) as refused:
        read_body(b"%b,%b}" % (once, again), needs_messages=True)
    assert refused.value.code == "duplicate_key"


# What a top level may hold beside and inside of what is long: names of ours in every place and writing, and values that repeat.
LONG_TEXT = b'"' + b'words \\"model\\":1 ' * 200 + b'"'
LONG_LIST = b'[{"model":"deep","messages":[1],"stream":1},' + LONG_TEXT + b"]"
NAME_TEXTS = st.sampled_from(
    (b'"model"', b'"messages"', b'"input"', b'"prompt"', b'"stream"', b'"stream_options"', b'"mod\\u0065l"', b'"q\\"messages"', b'"x"')
)
VALUE_TEXTS = st.sampled_from(
    (
        b'"m"',
        b"true",
        b"null",
        b"[]",
        b"12",
        b'{"include_usage":true}',
        LONG_TEXT,
        LONG_LIST,
        b'{"messages":%b}' % LONG_LIST,
        b'{"model":"m"}',
    )
)
BLANKS = st.sampled_from((b"", b" ", b"\n\t"))


@given(st.lists(st.tuples(NAME_TEXTS, VALUE_TEXTS), min_size=1, max_size=6), BLANKS, st.booleans())
@example([(b'"messages"', LONG_LIST), (b'"model"', b'"m"'), (b'"messages"', LONG_LIST)], b"", False)
@example([(b'"x"', b'{"messages":%b}' % LONG_LIST), (b'"model"', b'"m"'), (b'"messages"', LONG_LIST)], b"", False)
@example([(b'"input"', b"12"), (b'"model"', b'"m"'), (b'"stream_options"', b"null"), (b'"input"', LONG_TEXT)], b" ", True)
def test_a_strict_reader_agrees_on_what_is_long(members: list[tuple[bytes, bytes]], blank: bytes, named: bool) -> None:
    if named:
        members = [*members, (b'"model"', b'"m"')]
    body = b"{%b}" % b",".join(b"%b%b:%b%b%b" % (name, blank, blank, value, blank) for name, value in members)
    bodies(body)


TEXTS = st.text(max_size=8) | st.sampled_from(("model", '"model":"x"'))
NAMES = st.sampled_from(("model", "a", 'q"', "é", "stream", "")) | st.text(max_size=4)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.sampled_from(("model", "stream", "messages", "x", "\u00e9")) | st.text(max_size=4), JSON, max_size=6)


@given(OBJECTS, st.booleans(), st.sampled_from((None, 1)))
def test_the_scan_agrees_with_a_real_reader_on_the_top_level(value: dict[str, Any], ascii_only: bool, indent: int | None) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "surrogatepass")
    found = [(name.decode("utf-8", "surrogatepass"), json.loads(body[start:end])) for name, start, end in top_level(body)]
    assert found == list(value.items())


@given(OBJECTS, st.text(min_size=1, max_size=6), st.booleans(), st.sampled_from((None, 2)), st.booleans())
def test_the_model_is_found_and_nothing_else_is_changed(
    rest: dict[str, Any], name: str, ascii_only: bool, indent: int | None, last: bool
) -> None:
    rest = {key: inner for key, inner in rest.items() if key not in ("model", "stream")}
    value = {**rest, "model": name} if last else {"model": name, **rest}
    body = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    asked = read_body(body, needs_messages=False)
    assert asked.model == name
    changed = json.loads(b"".join(asked.as_sent("other")))
    assert changed == {**value, "model": "other"}
    start, end = asked.model_span
    assert json.loads(body[start:end]) == name


@given(st.binary(max_size=200))
@example(b'{"model":"a","mod\\u0065l":"b"}')
def test_a_body_is_an_answer_or_an_honest_refusal(data: bytes) -> None:
    try:
        asked = read_body(data, needs_messages=False)
    except Invalid as err:
        refusal: Invalid | None = err
    else:
        refusal = None
        assert json.loads(asked.body)["model"] == asked.model
    assert refusal is None or (refusal.status == 400 and refusal.message)


CODED = st.sampled_from(
    (b"3\r\nabc\r\n", b"03\r\nabc\r\n", b"3;x\r\nabc\r\n", b"a\r\n0123456789\r\n", b"A\r\n0123456789\r\n", b"0\r\n\r\n")
)


@given(st.lists(CODED, max_size=3), st.binary(max_size=6), st.integers(0, 12))
@example([b"3\r\nabc\r\n"], b"", 0)
def test_what_is_taken_for_one_whole_chunk_is_that_to_the_reader_and_written_as_we_write_it(
    coded: list[bytes], more: bytes, cut: int
) -> None:
    for known in (b"3\r\nabc\r\n", b"a\r\n0123456789\r\n"):
        Chunks(0, 100).feed(known, 0, [])
    data = (b"".join(coded) + more)[cut:]
    at = whole_chunk(data)
    assert at == 0 or coded
    if at:
        chunks, parts = Chunks(0, 100), []
        assert chunks.feed(data, 0, parts) == len(data)
        assert chunks.between
        assert b"".join(parts) == data[at:-2]
        assert chunk(data[at:-2]) == data
    elif data in (b"3\r\nabc\r\n", b"a\r\n0123456789\r\n"):
        pytest.fail("a whole chunk went the long way")


def test_engines_that_say_one_head_share_it_and_each_keeps_its_own_last() -> None:
    shared: Heads[AnswerHead] = Heads()
    one, other = Heads(shared), Heads(shared)
    for heads, kind in ((one, b"a"), (other, b"b"), (other, b"a"), (one, b"b")):
        reader = ResponseReader(heads)
        reader.feed(b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: 0\r\n\r\n" % kind)
        assert reader.complete
        assert heads.last is reader.head
        assert reader.get(b"content-type") == kind
    assert one.last is not other.last
    reader = ResponseReader(other)
    reader.feed(b"HTTP/1.1 200 OK\r\ncontent-type: b\r\ncontent-length: 0\r\n\r\n")
    assert reader.head is one.last
