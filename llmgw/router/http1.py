"""HTTP/1.1 as values: bytes of a client become requests, bytes of an engine become an answer. No sockets, no clock.

Any split of the same bytes gives the same result. What could be read in two ways (two lengths, a length beside chunked
coding, a folded header, a bare line feed) is refused: two readers that disagree are how requests are smuggled.
Owns: head, framing, surplus (what an engine sends beyond the end of its answer).
"""

from __future__ import annotations

import enum
import re
from collections import deque
from typing import Any, Final

import attrs
import httptools

_BAD_IN_HEAD: Final = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_DIGITS: Final = re.compile(rb"[0-9]{1,19}\Z")  # 19 digits: below 2**64, far above any limit we would set
_CHUNK_SIZE: Final = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\x00-\x08\x0a-\x1f\x7f]*)?\Z")
_CHUNK_LINE_MAX: Final = 512  # chosen: extensions are unknown to engines and clients we know of; a long one is an attack
_CHUNKED_NAMES: Final = re.compile(rb"(?i)\r\ntransfer-encoding:[ \t]*([^\r\n]*)")
_KNOWN_CODINGS: Final = frozenset({b"chunked", b"identity", b"gzip", b"deflate", b"compress", b""})
RESPONSE_HEAD_MAX: Final = 65_536  # bytes of an engine's head, as in router-measurements.md, pitfall 7

REASONS: Final = {
    100: b"Continue", 200: b"OK", 201: b"Created", 202: b"Accepted", 204: b"No Content", 206: b"Partial Content",
    400: b"Bad Request", 401: b"Unauthorized", 403: b"Forbidden", 404: b"Not Found", 405: b"Method Not Allowed",
    408: b"Request Timeout", 409: b"Conflict", 413: b"Content Too Large", 415: b"Unsupported Media Type",
    417: b"Expectation Failed", 422: b"Unprocessable Content", 429: b"Too Many Requests",
    431: b"Request Header Fields Too Large", 500: b"Internal Server Error", 501: b"Not Implemented", 502: b"Bad Gateway",
    503: b"Service Unavailable", 504: b"Gateway Timeout", 505: b"HTTP Version Not Supported",
}  # fmt: skip


@attrs.frozen
class RequestFault:
    """Why the bytes are no request we accept. After it the connection is answered once and closed."""

    status: int
    code: str
    message: str


class Head:
    """A request's line and headers. `headers` have lower-case names and values without surrounding blanks.

    `length` is the declared body length (None with `chunked`, 0 where there is no body). `close`: the client wants the
    connection closed after the answer.
    """

    __slots__ = ("chunked", "close", "expect", "headers", "length", "method", "minor", "target")

    def __init__(self) -> None:
        self.method = ""
        self.target = b""
        self.minor = 1
        self.headers: list[tuple[bytes, bytes]] = []
        self.length: int | None = 0
        self.chunked = False
        self.close = False
        self.expect: bytes | None = None

    def get(self, name: bytes) -> bytes | None:
        """The first header of that lower-case name."""
        for key, value in self.headers:
            if key == name:
                return value
        return None

    def all(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key == name]


class Request:
    """A head and the parts of its body as they came; `size` is their sum in bytes."""

    __slots__ = ("head", "parts", "size")

    def __init__(self, head: Head) -> None:
        self.head = head
        self.parts: list[bytes] = []
        self.size = 0

    def body(self) -> bytes:
        return self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)


class _HeadCallbacks:
    """What httptools calls while it reads one head."""

    __slots__ = ("done", "head")

    def __init__(self, head: Head) -> None:
        self.head = head
        self.done = False

    def on_url(self, url: bytes) -> None:
        self.head.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.head.headers.append((name.lower(), value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        self.done = True


class _Stage(enum.Enum):
    HEAD = enum.auto()
    LENGTH = enum.auto()
    CHUNK_LINE = enum.auto()
    CHUNK_DATA = enum.auto()
    CHUNK_END = enum.auto()
    TRAILER = enum.auto()
    DEAD = enum.auto()


class RequestReader:
    """Turns a client's bytes into requests. Feed it until `finished` holds one or `fault` is set.

    `current` is a request whose head is whole and whose body is still coming: it may be refused before the rest is sent.
    A `fault` counts after everything in `finished`; `fault_head` is the head it belongs to, where there is one. Limits are
    bytes and may be changed between requests.
    """

    __slots__ = ("_buffer", "_left", "_overhead", "_stage", "current", "fault", "fault_head", "finished", "max_body", "max_head")

    def __init__(self, max_head: int, max_body: int) -> None:
        self.max_head = max_head
        self.max_body = max_body
        self.current: Request | None = None
        self.finished: deque[Request] = deque()
        self.fault: RequestFault | None = None
        self.fault_head: Head | None = None
        self._stage = _Stage.HEAD
        self._buffer = b""
        self._left = 0  # bytes still to come of the body, or of the chunk
        self._overhead = 0  # bytes of trailers so far

    @property
    def at_rest(self) -> bool:
        """Nothing of a next request has come yet."""
        return self._stage is _Stage.HEAD and not self._buffer

    def feed(self, data: bytes) -> None:
        if self._stage is _Stage.DEAD:
            return
        if self._buffer:
            data = self._buffer + data
            self._buffer = b""
        position, end = 0, len(data)
        while position < end:
            stage = self._stage
            if stage is _Stage.HEAD:
                position = self._head(data, position)
            elif stage is _Stage.LENGTH or stage is _Stage.CHUNK_DATA:
                position = self._body(data, position)
            else:
                position = self._line(data, position)
            if position < 0:  # the rest is kept, or nothing more is read
                return

    def _fail(self, status: int, code: str, message: str) -> int:
        self.fault = RequestFault(status, code, message)
        if self.current is not None:
            self.fault_head = self.current.head
            self.current = None
        self._stage = _Stage.DEAD
        self._buffer = b""
        return -1

    def _keep(self, data: bytes, position: int) -> int:
        self._buffer = data[position:] if position else data
        return -1

    def _head(self, data: bytes, position: int) -> int:
        while data.startswith(b"\r\n", position):  # RFC 9112, 2.2: empty lines before a request line are skipped
            position += 2
        if position == len(data):
            return position
        end = data.find(b"\r\n\r\n", position)
        raw = data[position:] if end < 0 else data[position : end + 4]
        # Judged as it comes, so that a TLS hello or a bare line feed is refused at once and not after a time-out.
        # Only the part within the limit is judged, so that the verdict does not depend on how the bytes were split.
        judged = raw if len(raw) <= self.max_head else raw[: self.max_head]
        feeds, returns, pairs = judged.count(b"\n"), judged.count(b"\r"), judged.count(b"\r\n")
        if feeds != pairs or returns - judged.endswith(b"\r") > pairs or _BAD_IN_HEAD.search(judged) is not None:
            return self._fail(400, "bad_request", "the request head holds control characters, or lines that do not end in CR LF")
        if len(raw) > self.max_head:
            return self._fail(431, "header_too_large", f"the request head is larger than {self.max_head} bytes")
        if end < 0:
            return self._keep(data, position)
        if b"\r\n " in raw or b"\r\n\t" in raw:
            return self._fail(400, "bad_request", "folded header lines are not accepted")
        head = Head()
        if not self._parse(raw, head):
            return -1
        request = Request(head)
        if head.chunked:
            self.current = request
            self._stage = _Stage.CHUNK_LINE
            self._overhead = 0
        elif head.length:
            self.current = request
            if head.length > self.max_body:
                return self._too_large()
            self._left = head.length
            self._stage = _Stage.LENGTH
        else:
            self.finished.append(request)
        return end + 4

    def _too_large(self) -> int:
        return self._fail(413, "too_large", f"the request body is larger than the limit of {self.max_body} bytes")

    def _parse(self, raw: bytes, head: Head) -> bool:
        callbacks = _HeadCallbacks(head)
        parser = httptools.HttpRequestParser(callbacks)
        error = ""
        try:
            parser.feed_data(raw)
        except httptools.HttpParserUpgrade:
            pass  # CONNECT, or an upgrade we do not take: the request is answered as if it had not asked
        except httptools.HttpParserError as err:
            error = str(err)
        if error or not callbacks.done:
            coding = _CHUNKED_NAMES.search(raw)
            if coding is not None and b"content-length:" not in raw.lower() and self._unknown_coding(coding[1]):
                self._fail(501, "unknown_transfer_coding", "the transfer coding of the request is not known here")
            else:
                self._fail(400, "bad_request", f"the request head cannot be read: {error or 'it is not whole'}")
            return False
        head.method = parser.get_method().decode("latin-1")
        if head.target.startswith((b"http://", b"https://")):  # the absolute form means the same as its path
            slash = head.target.find(b"/", head.target.find(b"//") + 2)
            head.target = head.target[slash:] if slash >= 0 else b"/"
        version = parser.get_http_version()
        if version not in ("1.1", "1.0"):
            self._fail(505, "http_version", f"HTTP/{version} is not spoken here; use HTTP/1.1")
            return False
        head.minor = 1 if version == "1.1" else 0
        head.close = head.minor == 0 or not parser.should_keep_alive()
        return self._frame(head)

    @staticmethod
    def _unknown_coding(value: bytes) -> bool:
        return any(part.strip().lower() not in _KNOWN_CODINGS for part in value.split(b","))

    def _frame(self, head: Head) -> bool:
        lengths: list[bytes] = []
        codings: list[bytes] = []
        hosts = 0
        for name, value in head.headers:
            if name == b"content-length":
                lengths.append(value)
            elif name == b"transfer-encoding":
                codings.append(value)
            elif name == b"host":
                hosts += 1
            elif name == b"expect":
                head.expect = value.lower()
            elif name == b"connection" and b"close" in value.lower():
                head.close = True
        if hosts > 1 or (hosts == 0 and head.minor == 1):
            self._fail(400, "bad_request", "a request carries exactly one Host header")
            return False
        if codings:
            if lengths:
                self._fail(400, "bad_request", "a request carries Content-Length or Transfer-Encoding, not both")
            elif head.minor == 0:
                self._fail(400, "bad_request", "HTTP/1.0 knows no Transfer-Encoding")
            elif len(codings) == 1 and codings[0].lower() == b"chunked":
                head.chunked, head.length = True, None
                return True
            elif self._unknown_coding(b",".join(codings)):
                self._fail(501, "unknown_transfer_coding", "the transfer coding of the request is not known here")
            else:
                self._fail(400, "bad_request", "the only transfer coding accepted is chunked")
            return False
        if lengths:
            if len(lengths) > 1 or _DIGITS.match(lengths[0]) is None:
                self._fail(400, "bad_request", "Content-Length must be one decimal number")
                return False
            head.length = int(lengths[0])
        return True

    def _body(self, data: bytes, position: int) -> int:
        request = self.current
        assert request is not None
        take = min(self._left, len(data) - position)
        if take:
            part = data if take == len(data) else data[position : position + take]
            request.parts.append(part)
            request.size += take
            self._left -= take
            position += take
        if self._left == 0:
            if self._stage is _Stage.LENGTH:
                self._finish()
            else:
                self._stage = _Stage.CHUNK_END
        return position

    def _finish(self) -> None:
        assert self.current is not None
        self.finished.append(self.current)
        self.current = None
        self._stage = _Stage.HEAD

    def _line(self, data: bytes, position: int) -> int:
        """One line of the chunked coding's own: a size, the end of a chunk, or a trailer."""
        end = data.find(b"\n", position)
        limit = self.max_head if self._stage is _Stage.TRAILER else _CHUNK_LINE_MAX
        if end < 0:
            if len(data) - position > limit:
                return self._bad_chunk()
            return self._keep(data, position)
        line = data[position : end + 1]
        if len(line) > limit or not line.endswith(b"\r\n"):
            return self._bad_chunk()
        text = line[:-2]
        if self._stage is _Stage.CHUNK_END:
            if text:
                return self._bad_chunk()
            self._stage = _Stage.CHUNK_LINE
        elif self._stage is _Stage.CHUNK_LINE:
            found = _CHUNK_SIZE.match(text)
            if found is None:
                return self._bad_chunk()
            size = int(found[1], 16)
            assert self.current is not None
            if self.current.size + size > self.max_body:
                return self._too_large()
            self._left = size
            self._stage = _Stage.CHUNK_DATA if size else _Stage.TRAILER
        elif text:  # a trailer: counted and dropped, engines are sent a plain length
            self._overhead += len(line)
            if self._overhead > self.max_head:
                return self._fail(431, "header_too_large", f"the trailers are larger than {self.max_head} bytes")
            if b":" not in text or text[:1] in b" \t" or _BAD_IN_HEAD.search(text) is not None:
                return self._bad_chunk()
        else:
            self._finish()
        return end + 1

    def _bad_chunk(self) -> int:
        return self._fail(400, "bad_request", "the chunked coding of the request body cannot be read")


class Framing(enum.Enum):
    """How an engine's answer says where it ends."""

    LENGTH = "length"
    CHUNKED = "chunked"
    EOF = "eof"
    NONE = "none"


class ResponseReader:
    """Turns an engine's bytes into one answer. Interim answers (1xx) are swallowed.

    `broken` says why the bytes are no answer. `surplus`: bytes came after the end; they are dropped, and the connection
    they came on must not be used again. `reusable` is true when the answer is complete and the engine keeps the connection.
    """

    __slots__ = (
        "_fed",
        "_interim",
        "_keep_alive",
        "_parser",
        "_parts",
        "_spoiled",
        "broken",
        "complete",
        "framing",
        "head_done",
        "headers",
        "length",
        "status",
        "surplus",
    )  # fmt: skip

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.framing = Framing.NONE
        self.length: int | None = None
        self.head_done = False
        self.complete = False
        self.surplus = False
        self.broken = ""
        self._parts: list[bytes] = []
        self._fed = 0
        self._interim = False
        self._keep_alive = False
        self._spoiled = False
        self._parser: Any = httptools.HttpResponseParser(self)

    @property
    def reusable(self) -> bool:
        return self.complete and not (self.surplus or self.broken or self._spoiled) and self._keep_alive and self.framing is not Framing.EOF

    def get(self, name: bytes) -> bytes | None:
        for key, value in self.headers:
            if key == name:
                return value
        return None

    def feed(self, data: bytes) -> None:
        if self.complete:
            self.surplus = True
        if self.complete or self.broken:
            return
        if not self.head_done:
            self._fed += len(data)
            if self._fed > RESPONSE_HEAD_MAX + 65_536:  # one read may hold the head and much of the body
                self.broken = "the head of the engine's answer is too large"
                return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.broken = "the engine switched protocols"
        except httptools.HttpParserError as err:
            if self._over():
                self.surplus = True
            else:
                self.broken = f"the engine's answer is not HTTP: {err}"

    def _over(self) -> bool:
        return self.complete

    @property
    def untouched(self) -> bool:
        """Has no byte come yet?"""
        return self._fed == 0

    def refuse_reuse(self) -> None:
        """Something else than the answer spoils the connection: the request was not sent whole."""
        self._keep_alive = False
        self._spoiled = True

    def end(self) -> None:
        """The engine closed. That ends an answer that is delimited by it, and no other."""
        if self.head_done and self.framing is Framing.EOF and not self.broken:
            self.complete = True

    def take(self) -> bytes:
        """The body's bytes since the last call."""
        parts = self._parts
        if not parts:
            return b""
        self._parts = []
        return parts[0] if len(parts) == 1 else b"".join(parts)

    # What httptools calls.

    def on_message_begin(self) -> None:
        if self.complete:
            self.surplus = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.complete:
            self.headers.append((name.lower(), value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        if self.complete:
            return
        status = self._parser.get_status_code()
        if status < 200:
            self._interim = True
            self.headers = []
            return
        self.status = status
        # Asked here and not after the feed: afterwards it has been reset and says "close" for every small answer.
        self._keep_alive = self._parser.should_keep_alive()
        coded = self.get(b"transfer-encoding")
        length = self.get(b"content-length")
        if status in (204, 304):
            self.framing = Framing.NONE
        elif coded is not None:
            if coded.lower() == b"chunked":
                self.framing = Framing.CHUNKED
            else:
                self.broken = "the engine used an unknown transfer coding"
                return
        elif length is not None:
            self.framing = Framing.LENGTH
            self.length = int(length) if _DIGITS.match(length) else 0
        else:
            self.framing = Framing.EOF
        self.head_done = True

    def on_body(self, data: bytes) -> None:
        if not self.complete and not self._interim:
            self._parts.append(data)

    def on_message_complete(self) -> None:
        if self._interim:
            self._interim = False
        elif self.head_done:
            self.complete = True


def status_line(status: int, minor: int = 1) -> bytes:
    reason = REASONS.get(status, b"Unknown")
    return b"HTTP/1.1 %d %b\r\n" % (status, reason)


def head_bytes(status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
    """A response head. Values come from us or from a parser that has refused line breaks."""
    lines = [status_line(status)]
    lines += [b"%b: %b\r\n" % pair for pair in headers]
    lines.append(b"\r\n")
    return b"".join(lines)


def chunk(data: bytes) -> bytes:
    """One chunk of the chunked coding; `data` must not be empty, an empty one would end the message."""
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST_CHUNK: Final = b"0\r\n\r\n"
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
