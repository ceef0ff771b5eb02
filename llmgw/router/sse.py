"""Server-sent events as bytes: finds where each event ends and what kind it is. Any split of the bytes gives the same events.

Events are passed on as they came; only the data of one may be replaced. Knows nothing of API families beyond `[DONE]`.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

# A line ends in CR LF, LF or CR. A CR that stands last may be half a CR LF, so it ends nothing yet.
_EVENT_END: Final = re.compile(rb"(?:\r\n|\n|\r(?=\r))(?:\r\n|\n|\r(?=[^\n]))")
_LINE_END: Final = re.compile(rb"\r\n|\n|\r")
_COMMENT_LINE: Final = re.compile(rb":[^\r\n]*(?:\r\n|\n)")
_FINISHED: Final = re.compile(rb'"finish_reason"[ \t\r\n]*:[ \t\r\n]*"')
_ERROR_LINE: Final = re.compile(rb"(?:\A|[\r\n])error:([^\r\n]*)")
_DONE_LINE: Final = re.compile(rb"(?:\A|[\r\n])data:[ ]?\[DONE\][ \t]*(?=[\r\n]|\Z)")
LINE_ENDS: Final = b"\r\n"
COLON: Final = 0x3A
EVENT_MAX: Final = 16 * 1024 * 1024  # bytes; an image in base64 fits, and a stream's memory stays bounded
DONE: Final = b"data: [DONE]\n\n"


class EventScanner:
    """Cuts bytes into events. An event is all its lines and the empty line that ends it, byte for byte.

    Lines that are only comments are let go as soon as each is whole, when no event has begun. `overflow` is set when an event
    grows beyond EVENT_MAX bytes.
    """

    __slots__ = ("_buffer", "_looked", "overflow")

    def __init__(self) -> None:
        self._buffer: bytes | bytearray = b""  # what came of an event that is not whole; a bytearray once more of it has come
        self._looked = 0
        self.overflow = False

    def feed(self, data: bytes) -> list[bytes]:
        if (
            not self._buffer
            and data.find(b"\r") < 0
            and data.endswith(b"\n\n")
            and data.count(b"\n\n") == 1
            and data[:1] not in b"\n:"
            and data[-3:-2] != b"\n"
        ):
            return [data]  # one whole event: by far the most common read
        buffer: bytes | bytearray = data
        if self._buffer:
            if not isinstance(self._buffer, bytearray):
                self._buffer = bytearray(self._buffer)
            self._buffer += data  # in place: an event of megabytes comes in hundreds of reads
            buffer = self._buffer
        found: list[bytes] = []
        start = 0
        while start < len(buffer):
            if buffer[start] in LINE_ENDS:  # an empty line before any field ends no event; it travels on its own
                blank = _blank(buffer, start)
                if blank == 0:
                    break
                found.append(bytes(buffer[start : start + blank]))
                start += blank
                self._looked = 0
                continue
            # One that has no line feed in what is new is no comment line yet, however long it is.
            if buffer[start] == COLON and buffer.find(b"\n", start + self._looked) >= 0:
                comment = _COMMENT_LINE.match(buffer, start)
                if comment is not None:
                    found.append(bytes(comment[0]))
                    start = comment.end()
                    self._looked = 0
                    continue
            end = _EVENT_END.search(buffer, max(start, start + self._looked - 3))
            if end is None:
                self._looked = len(buffer) - start
                break
            found.append(bytes(buffer[start : end.end()]))
            start = end.end()
            self._looked = 0
        if start == len(buffer):
            self._buffer = b""
        elif isinstance(buffer, bytearray):
            del buffer[:start]
        else:
            self._buffer = buffer[start:]
        if len(self._buffer) > EVENT_MAX:
            self.overflow = True
        return found

    @property
    def at_rest(self) -> bool:
        """Has no event begun?"""
        return not self._buffer

    def rest(self) -> bytes:
        """What came after the last whole event; the scanner is empty afterwards."""
        buffer, self._buffer, self._looked = bytes(self._buffer), b"", 0
        return buffer


def _blank(buffer: bytes | bytearray, start: int) -> int:
    """How many bytes the line end at `start` has; 0 when one more byte is needed to tell."""
    if buffer[start] == 0x0A:
        return 1
    if start + 1 == len(buffer):
        return 0
    return 2 if buffer[start + 1] == 0x0A else 1


def data_of(event: bytes) -> bytes | None:
    """The event's data, its `data:` lines joined by line feeds; None when it has none (comments, blanks, `event:` alone)."""
    if event.startswith(b"data: ") and b"\r" not in event and event.count(b"\n") == 2:
        return event[6:-2]
    lines: list[bytes] = []
    for line in _LINE_END.split(event):
        if line == b"data":
            lines.append(b"")
        elif line.startswith(b"data:"):
            lines.append(line[6:] if line.startswith(b"data: ") else line[5:])
    return b"\n".join(lines) if lines else None


def is_done(event: bytes) -> bool:
    """Is this the `[DONE]` that ends a stream of the OpenAI family?"""
    return b"[DONE]" in event and _DONE_LINE.search(event) is not None


def is_finish(event: bytes) -> bool:
    """Does a choice say why it ended? Inside a JSON string the quotes would be escaped, so text cannot look like it."""
    return b"finish_reason" in event and _FINISHED.search(event) is not None


def event_name(event: bytes) -> bytes:
    """The event's `event:` field, empty when it has none."""
    if b"event:" not in event:
        return b""
    for line in _LINE_END.split(event):
        if line.startswith(b"event:"):
            return line[6:].strip()
    return b""


def error_of(event: bytes) -> Any | None:
    """The error that an event carries as a value (a dict, a string), or None for an event that is none.

    `error: {...}` in the place of `data:` is what llama.cpp's server wrote until 2025.
    """
    if b"error" not in event:
        return None
    data = data_of(event)
    named = event_name(event) == b"error"
    if data is None:
        old = _ERROR_LINE.search(event)
        if old is None:
            return None
        data, named = old[1].strip(), True
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return data.decode("utf-8", "replace") if named else None
    if not isinstance(value, dict):
        return value if named and value else None
    if value.get("error"):
        return value["error"]
    if named or value.get("object") == "error" or value.get("type") == "error":
        return value
    return None


def with_data(event: bytes, data: bytes, changed: bytes) -> bytes:
    """The event with its data replaced, where that stands in one piece; lines that are not data stay as they were."""
    position = event.find(data)
    if position < 0:  # data over several lines: written anew, as lines again
        kept = [line for line in _LINE_END.split(event) if line and not line.startswith(b"data")]
        kept += [b"data: " + line for line in changed.split(b"\n")]
        return b"\n".join(kept) + b"\n\n"
    return event[:position] + changed + event[position + len(data) :]
