"""Reads what an engine says of its tokens, and has it say so where the client did not ask. Pure: bytes and counts, no state elsewhere.

Never raises for what an engine sends, and takes no count that is none: what is negative, no whole number or beyond COUNT_MAX is as
good as not said. Owns the terms *tokens* and *hidden*: usage that we asked for and the client did not, so that it never sees it.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

import msgspec

from llmgw.router import sse
from llmgw.router.body import Edit, is_json, top_level
from llmgw.router.families import Family
from llmgw.router.members import COUNT_MAX, PLAIN, SAID, SaidMembers

USAGE_KEY: Final = b'"usage"'  # what an answer or an event must hold to be worth a look
BODY_MAX: Final = 65_536  # bytes of a plain answer that are read as a whole; of a longer one its two ends
END_MAX: Final = 8_192  # bytes of each end: usage stands right before the answer's end (vLLM) or before its data (llama.cpp)
ASKABLE: Final = frozenset({"/v1/chat/completions", "/v1/completions"})  # whose streams tell usage only when they are asked to
# Whose answers tell usage: one without it is counted as unknown. Elsewhere a request is counted and most have no tokens.
TELLS: Final = ASKABLE | {"/v1/responses", "/v1/embeddings", "/v1/messages"}

DIGITS_MAX: Final = len(str(COUNT_MAX))

_VALUE: Final = re.compile(rb'"usage"[ \t\r\n]*:[ \t\r\n]*(null|[^ \t\r\n])')
_NULL_MEMBER: Final = re.compile(rb',[ ]?"usage":[ ]?null(?=[,}])')
_OPTIONS: Final = b'"stream_options":{"include_usage":true}'
_ASK: Final = b'"include_usage":true'
_REFUSALS: Final = (400, 422)
# What the families call the same: OpenAI's, then that of Responses and Messages.
_PROMPT: Final = ("prompt_tokens", "input_tokens")
_COMPLETION: Final = ("completion_tokens", "output_tokens")
_DETAILS: Final = ("prompt_tokens_details", "input_tokens_details")
_CACHE_READ, _CACHE_WRITTEN = "cache_read_input_tokens", "cache_creation_input_tokens"
_TOTAL: Final = "total_tokens"


class Tokens:
    """What one answer has cost. `prompt` holds `cached`, those that the engine had at hand from before. Nobody changes one.

    A plain class, because each answer makes one: an attrs class is never compiled, and costs 0.8 us.
    """

    __slots__ = ("cached", "completion", "prompt")

    def __init__(self, prompt: int, cached: int, completion: int) -> None:
        self.prompt = prompt
        self.cached = cached
        self.completion = completion

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokens) and (self.prompt, self.cached, self.completion) == (other.prompt, other.cached, other.completion)

    def __hash__(self) -> int:
        return hash((self.prompt, self.cached, self.completion))


class Meter:
    """Reads one answer's usage, a stream's by `event` or another's by `feed`. `hidden`: the client did not ask for it."""

    __slots__ = ("_counts", "_ends", "_family", "_hidden", "_size", "_whole")

    def __init__(self, family: Family, *, hidden: bool = False) -> None:
        self._family = family
        self._hidden = hidden
        self._counts: dict[str, int] = {}
        self._whole: list[bytes] = []
        self._ends: tuple[bytes, bytes] | None = None
        self._size = 0

    def tokens(self) -> Tokens | None:
        """What was told so far; None: nothing. Reads a plain answer anew each time."""
        counts = dict(self._counts)
        if self._ends is not None:
            head, tail = self._ends
            if not _take(counts, _object_after(tail, tail.rfind(USAGE_KEY))):
                _take(counts, _object_after(head, head.find(USAGE_KEY)))
        elif self._whole:
            whole = self._whole[0] if len(self._whole) == 1 else b"".join(self._whole)
            if (plain := _plain_tokens(whole)) is not None:
                return plain
            if USAGE_KEY in whole and (said := _said(whole)) is not None:
                _take(counts, said.usage)
        return _tokens(counts, self._family)

    def event(self, event: bytes) -> bytes:
        """What the client gets of a stream's event: itself, as a rule; b"" for the one that is there only because we asked."""
        if USAGE_KEY not in event:
            return event
        found = _VALUE.findall(event)
        if all(value == b"null" for value in found):
            return without_null(event) if self._hidden and found else event
        said = _said(sse.data_of(event) or b"")
        if said is None:
            return event
        _take(self._counts, said.usage)
        for inner in (said.response, said.message):
            if inner is not msgspec.UNSET and (told := _said(bytes(inner))) is not None:
                _take(self._counts, told.usage)
        return b"" if self._hidden and _is_usage_alone(said) else event

    def feed(self, data: bytes) -> None:
        """The next bytes of an answer that is no stream of events."""
        self._size += len(data)
        if self._ends is not None:
            self._ends = (self._ends[0], data[-END_MAX:] if len(data) >= END_MAX else (self._ends[1] + data)[-END_MAX:])
            return
        self._whole.append(data)
        if self._size > BODY_MAX:
            whole = b"".join(self._whole)
            self._ends = (whole[:END_MAX], whole[-END_MAX:])
            self._whole.clear()


def _take(counts: dict[str, int], usage: Any) -> bool:
    """Later counts replace those of before: a stream that tells more than once tells sums. False where nothing was told."""
    if not isinstance(usage, dict):
        return False
    for name in (*_PROMPT, *_COMPLETION, _TOTAL, _CACHE_READ, _CACHE_WRITTEN):
        _keep(counts, name, usage.get(name))
    for name in _DETAILS:
        details = usage.get(name)
        if isinstance(details, dict):
            _keep(counts, "cached_tokens", details.get("cached_tokens"))
    return bool(counts)


def _keep(counts: dict[str, int], name: str, value: Any) -> None:
    if type(value) is int and 0 <= value <= COUNT_MAX:
        counts[name] = value


def _tokens(counts: dict[str, int], family: Family) -> Tokens | None:
    prompt = next((counts[name] for name in _PROMPT if name in counts), None)
    completion = next((counts[name] for name in _COMPLETION if name in counts), None)
    total = counts.get(_TOTAL)
    if prompt is None and completion is None and total is None:
        return None
    if family is Family.ANTHROPIC:  # its input_tokens are those beyond the cache
        cached = counts.get(_CACHE_READ, 0)
        return Tokens((prompt or 0) + cached + counts.get(_CACHE_WRITTEN, 0), cached, completion or 0)
    if prompt is None:
        prompt = max(0, (total or 0) - (completion or 0))
    if completion is None:
        completion = max(0, (total or 0) - prompt)
    return Tokens(prompt, min(prompt, counts.get("cached_tokens", 0)), completion)


def _plain_tokens(whole: bytes) -> Tokens | None:
    """By far the most common kind of answer, in one step; None for any other."""
    try:
        usage = PLAIN.decode(whole).usage
    except (msgspec.DecodeError, RecursionError):  # ValidationError is one
        return None
    details = usage.prompt_tokens_details
    cached = details.cached_tokens or 0 if details is not None else 0
    return Tokens(usage.prompt_tokens, min(usage.prompt_tokens, cached), usage.completion_tokens)


def _said(text: bytes) -> SaidMembers | None:
    try:
        return SAID.decode(text)
    except RecursionError:
        return None
    except msgspec.DecodeError:
        return _said_plainly(text)


def _said_plainly(text: bytes) -> SaidMembers | None:
    """Python's own reader takes half a surrogate pair in a text and numbers without bounds, where the fast one does not."""
    try:
        value = json.loads(text, parse_int=_whole)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    raws = {name: msgspec.Raw(json.dumps(value[name]).encode()) for name in ("choices", "response", "message") if name in value}
    return SaidMembers(value.get("usage"), error=value.get("error"), **raws)


def _whole(digits: str) -> int | None:
    """A number of JSON, None for one that is no count anyway: Python refuses to read very long ones."""
    return int(digits) if len(digits) <= DIGITS_MAX else None


def _is_usage_alone(said: SaidMembers) -> bool:
    """Does the event say nothing but usage, however wrong?"""
    if said.usage is None or said.error is not None or said.choices is msgspec.UNSET:
        return False
    choices = bytes(said.choices).strip()
    return choices == b"null" or (choices[:1] == b"[" and not choices[1:-1].strip())


def _object_after(text: bytes, at: int) -> Any:
    """The object that is the value of the key at `at`; None where there is no whole one. A text's own quotes are escaped: it is a key."""
    if at < 0:
        return None
    rest = text[at + len(USAGE_KEY) :].lstrip()
    if rest[:1] != b":":
        return None
    try:
        return json.JSONDecoder().raw_decode(rest[1:].decode("utf-8", "replace").lstrip())[0]
    except (ValueError, RecursionError):
        return None


def without_null(event: bytes) -> bytes:
    """The event without `"usage":null` at the top level of its data, which by the API's own words stands there for who asked."""
    found = _NULL_MEMBER.search(event)
    if found is not None:
        rest = event[found.end() :]
        # What engines write. One brace is left, which can close nothing but the whole: the member stands at the top.
        if rest.endswith(b"}\n\n") and rest.count(b"}") == 1 and b"]" not in rest and event.count(USAGE_KEY) == 1:
            return event[: found.start()] + rest
    data = sse.data_of(event)
    if data is None or data.lstrip()[:1] != b"{" or not is_json(data):
        return event
    for name, start, end in top_level(data):
        if name == b"usage" and data[start:end] == b"null":
            return sse.with_data(event, data, _without_member(data, start, end))
    return event


def _without_member(data: bytes, start: int, end: int) -> bytes:
    """The object without the member `usage` whose value has that span."""
    key = data.rfind(USAGE_KEY, 0, start)
    if key < 0 or data[key + len(USAGE_KEY) : start].strip() != b":":  # written in another way: let it be
        return data
    before = data[:key].rstrip()
    if before.endswith(b","):
        return before[:-1] + data[end:]
    rest = data[end:].lstrip()
    return before + (rest[1:].lstrip() if rest.startswith(b",") else rest)


def usage_edit(body: bytes, span: tuple[int, int] | None) -> Edit | None:
    """What must change in the body of a stream's request so that the engine tells its usage.

    `span` is where the value of `stream_options` stands, None where the request has none. None: the client asked itself, or wrote
    what the engine is to judge. `body` must be a valid JSON object that is not empty.
    """
    if span is None:
        at = body.rindex(b"}")
        return (at, at, b"," + _OPTIONS)
    start, end = span
    options = body[start:end]
    if options == b"null":
        return (start, end, b"{" + _ASK + b"}")
    if options[:1] != b"{":
        return None
    members = top_level(options)
    asked = [(first, last) for name, first, last in members if name == b"include_usage"]
    if not asked:
        return (start + 1, start + 1, _ASK + (b"," if members else b""))
    begins, ends = asked[0]
    if len(asked) > 1 or options[begins:ends] not in (b"false", b"null"):
        return None
    return (start + begins, start + ends, b"true")


def refuses_usage(status: int, told: bytes) -> bool:
    """Does the engine refuse the request because of what we put into it?"""
    return status in _REFUSALS and (b"stream_options" in told or b"include_usage" in told)
