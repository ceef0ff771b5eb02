"""Finds what the router must know in a JSON body (`model`, `stream`, `messages`) and where it stands. Never re-serialises.

Bodies are relayed as they came; what is ever changed (the value of `model`, `stream_options`) is spliced in place.
"""

from __future__ import annotations

import json
import re
import zlib
from typing import Any, Final

import msgspec

from llmgw.domain.errors import Invalid, TooLarge
from llmgw.router.members import ASKED, OUTPUT_TOKENS, AskedMembers

BOM: Final = b"\xef\xbb\xbf"
_STRING: Final = rb'"[^"\\]*(?:\\.[^"\\]*)*"'
_TOKEN: Final = re.compile(_STRING + rb"|[{}\[\]:,]", re.DOTALL)
# Not after a backslash: there the quote is one of a longer name's, as in "a\"model".
_MODEL_PAIR: Final = re.compile(rb'(?<!\\)"model"[ \t\r\n]*:[ \t\r\n]*(' + _STRING + rb")", re.DOTALL)
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
OUTPUT_TOKENS_MAX: Final = 10**10  # no engine gets there, and a count stays within 64 bits
_NUMBERS: Final = (int, float)
LARGE: Final = 2048  # bytes of a body from which on it is cut at its quotes: a fifth of the time for a long text
TEXT_BYTES_MIN: Final = 32  # bytes to a quote; with more quotes the pieces are many, and looks for names cost less
_ONCE: Final = (b"stream", b"messages")
_NAMED: Final = (b"model", b"stream_options", *_ONCE)


_Spans = dict[bytes, tuple[int, int]]
Piece = bytes | memoryview
Edit = tuple[int, int, bytes]  # the bytes from one position to another give way to these


class Asked:
    """What a request asks for. `body` is without a byte-order mark; spans are where the values of members stand in it.

    `options_span` is that of `stream_options`, None where there is none, and for a request that asks for no stream. `output_tokens`
    is how many the answer may have at most, 0 where it does not say.
    Whoever needs the body no more sets it to b"": a stream may run for an hour.
    """

    __slots__ = ("_long", "_spans", "body", "model", "output_tokens", "stream")

    def __init__(self, body: bytes, model: str, stream: bool, output_tokens: int, spans: _Spans | None, long: tuple[int, int]) -> None:
        """`spans` None: outside of the span `long`, `"model"` stands once in the body, and `"stream_options"` not at all."""
        self.body = body
        self.model = model
        self.stream = stream
        self.output_tokens = output_tokens
        self._spans = spans
        self._long = long

    @property
    def model_span(self) -> tuple[int, int]:
        """Looked for when it is asked for: most engines call a model as clients do."""
        if self._spans is not None:
            return self._spans[b"model"]
        start, end = self._long
        pair = _MODEL_PAIR.search(self.body, 0, start) or _MODEL_PAIR.search(self.body, end)
        assert pair is not None  # the decoder saw a model
        return pair.span(1)

    @property
    def options_span(self) -> tuple[int, int] | None:
        return self._spans.get(b"stream_options") if self._spans is not None and self.stream else None

    def as_sent(self, name: str, *edits: Edit) -> list[Piece]:
        """The body for an engine that calls the model `name`, with these edits, in pieces; as it came where nothing is to change."""
        if name != self.model:
            edits = (*edits, (*self.model_span, json.dumps(name).encode()))
        return pieces(self.body, *edits) if edits else [self.body]


def pieces(body: bytes, *edits: Edit) -> list[Piece]:
    """`body` after these edits, which do not overlap; every other byte is as it was, and none of a long one is copied."""
    view = body if len(body) < LARGE else memoryview(body)
    parts: list[Piece] = []
    at = 0
    for start, end, text in sorted(edits):
        parts += (view[at:start], text)
        at = end
    parts.append(view[at:])
    return parts


def edited(body: bytes, *edits: Edit) -> bytes:
    """`body` after these edits, which do not overlap; every other byte is as it was."""
    return b"".join(pieces(body, *edits))


def splice(body: bytes, span: tuple[int, int], name: str) -> bytes:
    """`body` with the JSON text of `name` in the place of `span`; every other byte is as it was."""
    return edited(body, (*span, json.dumps(name).encode()))


def read_body(body: bytes, *, needs_messages: bool) -> Asked:
    """Raises Invalid (400) with `param` where one member is wrong: not UTF-8, not JSON, not an object, a name twice."""
    if body.startswith(BOM):
        body = body[len(BOM) :]
    if not body.isascii():
        try:
            body.decode("utf-8")
        except UnicodeDecodeError:
            raise Invalid("the request body is not UTF-8", code="invalid_utf8") from None
    found = _decode(body)
    long = _long_span(body, found) if len(body) >= LARGE else _NO_SPAN
    spans = _where(body, long)
    if found.model is msgspec.UNSET or found.model is None:
        raise Invalid("the request names no model", param="model", code="missing_model")
    if not isinstance(found.model, str) or not found.model:
        raise Invalid("model must be a string that is not empty", param="model", code="invalid_model")
    if found.stream is not None and not isinstance(found.stream, bool):
        raise Invalid("stream must be true or false", param="stream", code="invalid_type")
    if needs_messages:
        if found.messages is msgspec.UNSET:
            raise Invalid("messages is missing", param="messages", code="missing_messages")
        if bytes(memoryview(found.messages)[:1]) != b"[":  # no copy of it all
            raise Invalid("messages must be a list", param="messages", code="invalid_type")
    return Asked(body, found.model, bool(found.stream), _output_tokens(found), spans, long)


def _output_tokens(found: AskedMembers) -> int:
    """The most that is asked for by any name. What is no number, or none that an engine could mean, asks for none."""
    most = 0
    for asked in (found.max_tokens, found.max_completion_tokens, found.max_output_tokens, found.n_predict):
        if isinstance(asked, _NUMBERS) and not isinstance(asked, bool) and most < asked <= OUTPUT_TOKENS_MAX:
            most = int(asked)
    return most


def _decode(body: bytes) -> AskedMembers:
    try:
        return ASKED.decode(body)
    except msgspec.ValidationError as err:
        fault = str(err)
        if "$.model" in fault:
            raise Invalid("model must be a string", param="model", code="invalid_model") from None
        if "$.stream" in fault:
            raise Invalid("stream must be true or false", param="stream", code="invalid_type") from None
        if "$." in fault:  # a number of tokens beyond what a float holds; engines decide
            return _decode_plainly(body)
        raise Invalid("the request body must be a JSON object: object expected", code="invalid_json") from None
    except msgspec.DecodeError as err:
        if _SURROGATE.search(body) is not None:  # half a surrogate pair is JSON's grammar, though no text; engines decide
            return _decode_plainly(body)
        if not body:
            raise Invalid("the request body is empty; JSON was expected", code="invalid_json") from None
        raise Invalid(f"the request body is not JSON: {err}", code="invalid_json") from None
    except RecursionError:
        raise Invalid("the request body is nested too deeply", code="invalid_json") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _decode_plainly(body: bytes) -> AskedMembers:
    """Python's own reader takes half a surrogate pair, where the fast one does not."""
    try:
        # As text: given bytes, it guesses their encoding, and would take what is UTF-16 to all other readers here and there.
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant, parse_int=float)
    except (ValueError, RecursionError):
        raise Invalid("the request body is not JSON", code="invalid_json") from None
    if not isinstance(value, dict):
        raise Invalid("the request body must be a JSON object: object expected", code="invalid_json")
    messages = value.get("messages", msgspec.UNSET)
    raw: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    if messages is not msgspec.UNSET:
        raw = msgspec.Raw(b"[]" if isinstance(messages, list) else b"null")
    tokens: dict[str, Any] = {name: value.get(name) for name in OUTPUT_TOKENS}
    return AskedMembers(model=value.get("model", msgspec.UNSET), stream=value.get("stream"), messages=raw, **tokens)


_NO_SPAN: Final = (0, 0)


def _long_span(body: bytes, found: AskedMembers) -> tuple[int, int]:
    """Where the value stands that takes up most of a long body; an empty span where there is none such, or it is not found at once.

    It is one whole value that belongs to a key somewhere, so no key of the top level is inside it. That much is sure of any place
    after `"name":` in valid JSON where what the decoder gave as the value of such a key stands byte for byte: no text can hold
    those quotes unescaped, and a value tells by itself where it ends.
    """
    for name, raw in ((b'"messages"', found.messages), (b'"input"', found.input), (b'"prompt"', found.prompt)):
        if isinstance(raw, msgspec.Raw):
            size = memoryview(raw).nbytes
            if size * 2 > len(body):
                start = _value_from(body, body.find(name) + len(name))
                if start and body[start] in b'["{' and body.startswith(raw, start):
                    return start, start + size
    return _NO_SPAN


def _value_from(body: bytes, at: int) -> int:
    """Where the value begins whose colon is the next thing at `at`; 0 where none is. `body` must be a valid JSON object."""
    last = len(body) - 1
    while at < last and body[at] in b" \t\r\n":
        at += 1
    if body[at] != 0x3A:
        return 0
    at += 1
    while at < last and body[at] in b" \t\r\n":
        at += 1
    return at


def _where(body: bytes, long: tuple[int, int]) -> _Spans | None:
    """Where the values of the top level's `model` and `stream_options` stand. Raises Invalid when a name that matters is there twice.

    `long`: a value in which no key of the top level is. The scan is skipped, and None returned, where it can find nothing new.
    """
    begin, end = long
    left_out = end - begin
    short = body[:begin] + _STAND_IN + body[end:] if left_out else body
    if _stands_once(short):
        return None
    left_out -= len(_STAND_IN)
    spans: _Spans = {}
    for name, start, stop in top_level(short):
        if name in _NAMED:
            if name in spans:
                raise duplicate(name.decode())
            # What stands behind the long value is in its own place in the body.
            behind = left_out if end and start > begin else 0
            spans[name] = (start + behind, stop + (left_out if end and stop > begin else 0))
    return spans


_STAND_IN: Final = b"0"  # any value, for the long one


def _stands_once(body: bytes) -> bool:
    """Does `"model"` stand once in the whole body, the others at most once and `"stream_options"` not at all, and can no key be
    written in another way? This is asked of every request, so it is written out.
    """
    if len(body) >= LARGE:
        # Each look for a name costs ten times a look for a byte; so it is cut at its quotes once, where these are few.
        most = len(body) // TEXT_BYTES_MIN
        between = body.split(b'"', most)
        if len(between) <= most:
            return (
                (b"\\" not in body or b"\\u00" not in body)
                and between.count(b"model") == 1
                and between.count(b"messages") <= 1
                and between.count(b"stream") <= 1
                and b"stream_options" not in between
            )
    return (
        b"\\u00" not in body
        and body.count(b'"model"') == 1
        and body.count(b'"messages"') <= 1
        and body.count(b'"stream"') <= 1
        and b'"stream_options"' not in body
    )


def may_escape_names(body: bytes) -> bool:
    r"""May a name of ours be there in another way than it is usually written? They are of a-z and `_`: \u005f, \u0061 to \u007a."""
    return b"\\u00" in body and any(mark in body for mark in (b"\\u005", b"\\u006", b"\\u007"))


def duplicate(name: str) -> Invalid:
    """A name that is there twice, where engines differ in which of both they take."""
    return Invalid(f"{name} is there twice in the request body", param=name, code="duplicate_key")


def named_twice(body: bytes, names: tuple[bytes, ...]) -> str | None:
    """The first of `names` that the top level has twice. `body` must be a valid JSON object."""
    if not may_escape_names(body) and all(body.count(b'"%b"' % name) <= 1 for name in names):
        return None
    seen: set[bytes] = set()
    for name, _, _ in top_level(body):
        if name in names and name in seen:
            return name.decode()
        seen.add(name)
    return None


def top_level(body: bytes) -> list[tuple[bytes, int, int]]:
    """Each key of the top level as UTF-8, with where its value begins and ends. `body` must be a valid JSON object."""
    found: list[tuple[bytes, int, int]] = []
    depth = 0
    key: bytes | None = None  # raw, with its quotes
    value_from = -1  # right after the colon
    for token in _TOKEN.finditer(body):
        first = body[token.start()]
        if first == 0x22:  # a string
            if depth == 1 and value_from < 0:
                key = token[0]
        elif first == 0x7B or first == 0x5B:
            depth += 1
        elif first == 0x3A:
            if depth == 1 and value_from < 0:
                value_from = token.end()
        else:  # } ] ,
            if depth == 1 and value_from >= 0 and key is not None:
                start, end = value_from, token.start()
                while start < end and body[start] in b" \t\r\n":
                    start += 1
                while end > start and body[end - 1] in b" \t\r\n":
                    end -= 1
                name = json.loads(key).encode("utf-8", "surrogatepass") if b"\\" in key else key[1:-1]
                found.append((name, start, end))
                key, value_from = None, -1
            if first != 0x2C:
                depth -= 1
    return found


def model_span(text: bytes) -> tuple[int, int] | None:
    """Where an answer's top-level `model` has a string as its value; None when it has none or is no JSON object."""
    if b'"model"' not in text:
        return None
    if text.count(b'"model"') == 1 and text.lstrip()[:1] == b"{":
        pair = _MODEL_PAIR.search(text)
        if pair is None:
            return None
        before = text[: pair.start()]
        if before.count(b"{") == 1 and b"[" not in before:  # nothing was opened before it but the object itself
            return pair.span(1)
    if text.lstrip()[:1] != b"{":
        return None
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
        spans = [(start, end) for name, start, end in top_level(text) if name == b"model"]
    except (msgspec.DecodeError, RecursionError, ValueError):  # ValueError: a name that is no UTF-8, which engines may write
        return None
    if not spans or text[spans[-1][0] : spans[-1][0] + 1] != b'"':  # of a name that is there twice, readers take the last
        return None
    return spans[-1]


def renamed(text: bytes, name: str) -> bytes:
    """An answer (or one event's data) with `name` as its `model`; as it was where it has none."""
    span = model_span(text)
    if span is None:
        span = _response_model_span(text)
    return text if span is None else splice(text, span, name)


_WRAPPERS: Final = (b"response", b"message")  # the Responses and Messages families tell the model one level down


def _response_model_span(text: bytes) -> tuple[int, int] | None:
    if b'"model"' not in text or text.lstrip()[:1] != b"{":
        return None
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
        members = top_level(text)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return None
    for name, start, end in members:
        if name in _WRAPPERS and text[start : start + 1] == b"{":
            inner = model_span(text[start:end])
            if inner is not None:
                return start + inner[0], start + inner[1]
    return None


def is_json(text: bytes) -> bool:
    """Is it JSON from the first to the last byte?"""
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
        return bool(text.strip())
    except (msgspec.DecodeError, RecursionError):
        return False


def inflate(body: bytes, limit: int) -> bytes:
    """The plain bytes of a gzip body. Raises Invalid when it is broken or cut, TooLarge beyond `limit` bytes."""
    inflater = zlib.decompressobj(16 + zlib.MAX_WBITS)
    try:
        plain = inflater.decompress(body, limit + 1)
    except zlib.error:
        raise Invalid("the request body is not gzip, though Content-Encoding says so", code="invalid_encoding") from None
    if len(plain) > limit:
        raise TooLarge(f"the request body is larger than the limit of {limit} bytes once unpacked")
    if not inflater.eof:
        raise Invalid("the gzip request body is cut short", code="invalid_encoding")
    if inflater.unused_data:
        raise Invalid("bytes follow the end of the gzip request body", code="invalid_encoding")
    return plain
