"""What may be fed anything: each target takes bytes and fails an assertion where a promise about them is broken.

Where two readers exist, ours is held against one that shares no code with it: h11 for HTTP, the standard library for JSON, and the
specification's own algorithm, written out here, for server-sent events.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable
from typing import Any, Final, TypeVar

import h11

from llmgw.domain.errors import Invalid
from llmgw.domain.policy import GuardPolicy, GuardRule
from llmgw.router import sse
from llmgw.router.body import BOM, LARGE, read_body, renamed
from llmgw.router.families import ROUTES, Family, engine_problem, error_event
from llmgw.router.gate import Guard
from llmgw.router.http1 import RequestReader, ResponseReader
from llmgw.settings.load import load_bytes

T = TypeVar("T")

MAX_HEAD: Final = 2048  # bytes; small, so that limits are met often
MAX_BODY: Final = 4096
DEPTH_MAX: Final = 50  # brackets that every reader takes; between this and 1000 it depends on the stack


def pieces_of(data: bytes) -> list[bytes]:
    """The bytes in pieces that follow from the bytes alone, so that a failing input fails again."""
    rng = random.Random(data)
    at = sorted({rng.randrange(len(data) + 1) for _ in range(rng.randrange(6))} | {0, len(data)})
    return [data[start:end] for start, end in itertools.pairwise(at)]


def _taken(reader: Callable[..., T], *given: Any, **named: Any) -> T | Invalid:
    """What it makes of its input, or its refusal; any other error is a broken promise."""
    try:
        return reader(*given, **named)
    except Invalid as refusal:
        return refusal


# --- requests


def _requests(pieces: list[bytes]) -> tuple[list[tuple[Any, ...]], Any]:
    reader = RequestReader(MAX_HEAD, MAX_BODY)
    for piece in pieces:
        reader.feed(piece)
    return [(r.head.method, r.head.target, r.head.minor, tuple(r.head.headers), r.body()) for r in reader.finished], reader.fault


def _as_h11_reads(data: bytes) -> tuple[list[tuple[str, bytes]], bool]:
    """(method, body) of every request, and whether h11 refuses what comes then. It stops at a request after which it would close."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    connection.receive_data(data)
    found: list[tuple[str, bytes]] = []
    method, body = "", b""
    try:
        while True:
            event = connection.next_event()
            if event in (h11.NEED_DATA, h11.PAUSED) or isinstance(event, h11.ConnectionClosed):
                return found, False
            if isinstance(event, h11.Request):
                method, body = event.method.decode(), b""
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                found.append((method, body))
                connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                connection.send(h11.EndOfMessage())
                if connection.our_state is h11.MUST_CLOSE or connection.their_state is h11.MUST_CLOSE:
                    return found, False
                connection.start_next_cycle()
    except h11.ProtocolError as err:
        # It knows no empty lines before a request line (RFC 9112, 2.2), and judges trailers, which we drop, as if they were headers.
        return found, not any(text in str(err) for text in ("request line", "Content-Length", "Transfer-Encoding", "Host"))


def requests(data: bytes) -> None:
    """No split changes what is read, what is accepted has one meaning, and another strict reader sees no other requests in it."""
    whole, fault = _requests([data])
    assert _requests(pieces_of(data)) == (whole, fault)
    assert fault is None or (400 <= fault.status <= 505 and fault.message)
    for method, target, minor, headers, body in whole:
        assert re.fullmatch("[A-Z-]+", method)
        assert re.fullmatch(rb"[!-~]+", target)
        names = [name for name, _ in headers]
        assert all(re.fullmatch(rb"[!#$%&'*+.^_`|~0-9a-z-]+", name) for name in names)
        assert not any(set(value) & {0, 10, 13} for _, value in headers)
        assert names.count(b"host") <= 1
        assert minor == 0 or b"host" in names
        assert all(re.fullmatch(rb"[0-9]+", value) for name, value in headers if name == b"content-length")
        assert names.count(b"content-length") + names.count(b"transfer-encoding") <= 1
        assert len(body) <= MAX_BODY
    ours = [(method, body) for method, _, _, _, body in whole]
    theirs, refused = _as_h11_reads(data)
    shared = min(len(ours), len(theirs))
    assert ours[:shared] == theirs[:shared]
    assert not refused or len(ours) <= len(theirs)


# --- answers


def _answer(pieces: list[bytes]) -> tuple[Any, ...]:
    reader = ResponseReader()
    body = b""
    for piece in pieces:
        reader.feed(piece)
        body += reader.take()
        if reader.broken:
            return ("broken",)
    return reader.status, tuple(reader.headers), body, reader.complete, reader.surplus, reader.reusable


def _answer_as_h11_reads(data: bytes) -> tuple[int, list[bytes], bytes] | None:
    """The final status, the headers' names and the body of the first answer, where h11 reads it to its end."""
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
    connection.send(h11.Request(method="POST", target="/", headers=[("host", "g"), ("content-length", "0")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(data)
    status, names, body = 0, [], b""
    try:
        while True:
            event = connection.next_event()
            if event in (h11.NEED_DATA, h11.PAUSED) or isinstance(event, h11.ConnectionClosed):
                return None
            if isinstance(event, h11.Response):
                status, names = event.status_code, [bytes(name) for name, _ in event.headers]
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return status, names, body
    except h11.ProtocolError:
        return None


def answers(data: bytes) -> None:
    """No split changes the answer; what is complete is what another reader reads; nothing after the end is part of it."""
    whole = _answer([data])
    split = _answer(pieces_of(data))
    if whole != ("broken",) and split != ("broken",):  # what is broken may show a piece earlier or later, and is an error in both
        assert split == whole
    if whole == ("broken",):
        return
    status, headers, body, complete, surplus, reusable = whole
    assert not (reusable and (surplus or not complete))
    theirs = _answer_as_h11_reads(data)
    if complete and theirs is not None:
        assert theirs == (status, [name for name, _ in headers], body)


# --- events


def _events(pieces: list[bytes]) -> tuple[list[bytes], bytes]:
    scanner = sse.EventScanner()
    found = [event for piece in pieces for event in scanner.feed(piece)]
    return found, scanner.rest()


def _data_as_specified(text: bytes) -> list[bytes]:
    """The data of every event that the specification would dispatch (WHATWG HTML, 9.2.6), those with empty data too."""
    found: list[bytes] = []
    data: list[bytes] = []
    for line in re.split(rb"\r\n|\n|\r", text)[:-1]:
        if not line:
            if data:
                found.append(b"\n".join(data))
            data = []
            continue
        name, colon, value = line.partition(b":")
        if name == b"data":
            data.append(value.removeprefix(b" ") if colon else b"")
    return found


def events(data: bytes) -> None:
    """No split changes the events, no byte is lost, and their data are what the specification says; what looks at one never raises."""
    found, rest = _events([data])
    assert _events(pieces_of(data)) == (found, rest)
    assert b"".join(found) + rest == data
    assert [text for text in map(sse.data_of, found) if text is not None] == _data_as_specified(b"".join(found))
    for event in found:
        error = sse.error_of(event)
        if error is not None:
            problem = engine_problem(error)
            assert 400 <= problem.status <= 599
            assert problem.message
            assert all(error_event(problem, family).endswith(b"\n\n") for family in Family)
        sse.is_done(event)
        sse.is_finish(event)
        sse.event_name(event)
        text = sse.data_of(event)
        if text is not None:
            assert sse.with_data(event, text, text) == event or b"\n" in text or b"\r" in event


# --- bodies


class _Refused(AssertionError):
    """The standard library's reader, asked strictly, takes it for no request of ours."""


def _strictly(body: bytes) -> dict[str, Any]:
    twice: list[str] = []

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in found]
        nonlocal twice
        twice = [name for name in ("model", "stream", "stream_options", "messages") if names.count(name) > 1]  # the last call is the top
        return dict(found)

    def constant(name: str) -> None:
        raise _Refused(name)

    try:
        value = json.loads(body.decode("utf-8"), object_pairs_hook=pairs, parse_constant=constant, parse_int=float)
    except (ValueError, RecursionError) as err:
        raise _Refused(str(err)) from None
    if not isinstance(value, dict) or twice:
        raise _Refused
    return value


def bodies(data: bytes) -> None:
    """What is taken is JSON with that model and stream and with no name of ours twice; what is refused, a strict reader refuses.

    The same of a body that is long: it is read in another way.
    """
    _judge_body(data)
    longer = data.replace(b'"hi"', b'"%b"' % (b"hi" * LARGE), 1)
    if len(longer) > len(data):
        _judge_body(longer)


def _judge_body(data: bytes) -> None:
    asked = _taken(read_body, data, needs_messages=False)
    if isinstance(asked, Invalid):
        assert asked.status == 400
        assert asked.message
        if max(data.count(b"["), data.count(b"{")) > DEPTH_MAX:
            return
        try:
            value = _strictly(data.removeprefix(BOM))
        except _Refused:
            return
        assert not (isinstance(value.get("model"), str) and value["model"]) or not isinstance(value.get("stream"), bool | None)
        return
    value = _strictly(asked.body)
    assert value["model"] == asked.model
    assert bool(value.get("stream")) == asked.stream
    start, end = asked.model_span
    assert json.loads(asked.body[start:end]) == asked.model
    changed = b"".join(asked.as_sent("other"))
    assert (changed[:start], changed[len(changed) - (len(asked.body) - end) :]) == (asked.body[:start], asked.body[end:])
    assert _strictly(changed) == {**value, "model": "other"}


_GUARD: Final = Guard.of(
    GuardPolicy(
        max_messages=3,
        max_output_tokens=100,
        max_images=1,
        rule=(GuardRule("blocks", words=("secret", "größe")), GuardRule("flags", words=("hi",), action="flag")),
    )
)


def prompts(data: bytes) -> None:
    """A body that is taken is judged on every route, and a refusal tells why and never what stands in the prompt."""
    asked = _taken(read_body, data, needs_messages=False)
    if isinstance(asked, Invalid):
        return
    for route in ROUTES.values():
        judged = _GUARD.admit(route, asked.body, (asked.model,), "key")
        if judged.refusal is not None:
            assert judged.refusal.status == 400
            assert judged.refusal.message
            assert "secret" not in judged.refusal.message


def renames(data: bytes) -> None:
    """An answer with another model's name differs in that alone, and what is no JSON object passes as it is."""
    changed = renamed(data, "other")
    if changed == data:
        return
    try:
        before = json.loads(data)
    except (ValueError, RecursionError):  # bytes that merely look like an answer's beginning: one name in them was changed
        assert changed.count(b'"other"') == data.count(b'"other"') + 1
        return
    after = json.loads(changed)
    assert isinstance(before, dict)
    for value in (after, after.get("response"), after.get("message")):
        if isinstance(value, dict) and value.get("model") == "other":
            return
    raise AssertionError(changed)


# --- settings


def settings(data: bytes) -> None:
    """A file is taken, or refused by our own error, which tells why."""
    loaded = _taken(load_bytes, data, source="t", environ={})
    assert not isinstance(loaded, Invalid) or loaded.message


TARGETS: Final[dict[str, Callable[[bytes], None]]] = {
    target.__name__: target for target in (requests, answers, events, bodies, prompts, renames, settings)
}
