"""Finds what the router must know in a JSON body (`model`, `stream`, `messages`) and where it stands. Never re-serialises.

Bodies are relayed as they came; the one thing that is ever changed is the value of `model`, spliced in place.
"""

from __future__ import annotations

import json
import re
import zlib
from typing import Any, Final

import attrs
import msgspec

from llmgw.domain.errors import Invalid, TooLarge

BOM: Final = b"\xef\xbb\xbf"
_STRING: Final = rb'"[^"\\]*(?:\\.[^"\\]*)*"'
_TOKEN: Final = re.compile(_STRING + rb"|[{}\[\]:,]", re.DOTALL)
_MODEL_PAIR: Final = re.compile(rb'"model"[ \t\r\n]*:[ \t\r\n]*(' + _STRING + rb")", re.DOTALL)
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
_NAMED: Final = (b"model", b"stream", b"stream_options", b"messages")


class _Asked(msgspec.Struct):
    """The members that matter; everything else is checked for syntax and skipped."""

    model: Any = msgspec.UNSET
    stream: Any = None
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_DECODER: Final = msgspec.json.Decoder(_Asked)


@attrs.frozen
class Asked:
    """What a request asks for. `body` is without a byte-order mark; `model_span` is where the value of `model` stands in it."""

    body: bytes
    model: str
    stream: bool
    model_span: tuple[int, int]

    def with_model(self, name: str) -> bytes:
        """The body with another model's name in the place of the client's."""
        return splice(self.body, self.model_span, name)


def splice(body: bytes, span: tuple[int, int], name: str) -> bytes:
    """`body` with the JSON text of `name` in the place of `span`; every other byte is as it was."""
    return b"".join((body[: span[0]], json.dumps(name).encode(), body[span[1] :]))


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
    span = _where(body)
    if found.model is msgspec.UNSET or found.model is None:
        raise Invalid("the request names no model", param="model", code="missing_model")
    if not isinstance(found.model, str) or not found.model:
        raise Invalid("model must be a string that is not empty", param="model", code="invalid_model")
    if found.stream is not None and not isinstance(found.stream, bool):
        raise Invalid("stream must be true or false", param="stream", code="invalid_type")
    if needs_messages:
        if found.messages is msgspec.UNSET:
            raise Invalid("messages is missing", param="messages", code="missing_messages")
        if bytes(found.messages).lstrip()[:1] != b"[":
            raise Invalid("messages must be a list", param="messages", code="invalid_type")
    assert span is not None  # the decoder saw a model, so the scan has found it
    return Asked(body, found.model, bool(found.stream), span)


def _decode(body: bytes) -> _Asked:
    try:
        return _DECODER.decode(body)
    except msgspec.ValidationError as err:
        if "$.model" in str(err):
            raise Invalid("model must be a string", param="model", code="invalid_model") from None
        if "$.stream" in str(err):
            raise Invalid("stream must be true or false", param="stream", code="invalid_type") from None
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


def _decode_plainly(body: bytes) -> _Asked:
    """Python's own reader takes half a surrogate pair, where the fast one does not."""
    try:
        value = json.loads(body, parse_constant=_refuse_constant, parse_int=float)
    except (ValueError, RecursionError):
        raise Invalid("the request body is not JSON", code="invalid_json") from None
    if not isinstance(value, dict):
        raise Invalid("the request body must be a JSON object: object expected", code="invalid_json")
    messages = value.get("messages", msgspec.UNSET)
    raw: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    if messages is not msgspec.UNSET:
        raw = msgspec.Raw(b"[]" if isinstance(messages, list) else b"null")
    return _Asked(value.get("model", msgspec.UNSET), value.get("stream"), raw)


def _where(body: bytes) -> tuple[int, int] | None:
    """Where the value of the top level's `model` stands. Raises Invalid when a name that matters is there twice.

    The scan is skipped where it can find nothing new: `"model"` and the others stand at most once in the whole body, and no
    key can be written in another way.
    """
    if not may_escape_names(body) and body.count(b'"model"') == 1 and all(body.count(b'"%b"' % name) <= 1 for name in _NAMED[1:]):
        pair = _MODEL_PAIR.search(body)
        return None if pair is None else pair.span(1)
    spans: dict[bytes, tuple[int, int]] = {}
    for name, start, end in top_level(body):
        if name in _NAMED:
            if name in spans:
                raise duplicate(name.decode())
            spans[name] = (start, end)
    return spans.get(b"model")


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
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError):
        return None
    if text.lstrip()[:1] != b"{":
        return None
    for name, start, end in top_level(text):
        if name == b"model" and text[start : start + 1] == b'"':
            return start, end
    return None


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
