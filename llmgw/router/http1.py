"""HTTP/1.1 as values: bytes of a client become requests, bytes of an engine become an answer. No sockets, no clock.

Any split of the same bytes gives the same result. What could be read in two ways (two lengths, a length beside chunked
coding, a folded header, a bare line feed) is refused: two readers that disagree are how requests are smuggled.
Clients and engines say the same head again and again, but for the number of their content-length: what was read once is
kept in a bounded memory (`Heads`) and found again by its bytes, so that a known head costs a comparison or a look-up.
Owns: head, framing, surplus (what an engine sends beyond the end of its answer).
"""

from __future__ import annotations

import enum
import re
from collections import deque
from typing import Any, Final, Generic, TypeVar

import attrs
import httptools

_BAD_IN_HEAD: Final = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_DIGITS: Final = re.compile(rb"[0-9]{1,19}\Z")  # 19 digits: below 2**64, far above any limit we would set
_CHUNK_SIZE: Final = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\x00-\x08\x0a-\x1f\x7f]*)?\Z")
_CHUNK_LINE_MAX: Final = 512  # chosen: extensions are unknown to engines and clients we know of; a long one is an attack
# RFC 9112, 2.1 and 3: one blank between the parts. httptools takes several, and speaks RTSP and ICE as well.
_REQUEST_LINE: Final = re.compile(rb"([A-Z-]+) ([!-~]+) HTTP/([0-9]\.[0-9])\Z")
_HOST: Final = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=%:\[\]-]*\Z")  # RFC 3986, 3.2: what a name, an address and a port are made of
_TRAILER: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:")
_ABSOLUTE: Final = re.compile(rb"(?i)https?://[^/?]*")
_TOLD_EARLY: Final = re.compile(rb"(?i)\r\n(origin|x-request-id):([^\r\n]*)(?=\r\n)")
_VERSIONS: Final = (b" HTTP/1.1", b" HTTP/1.0")
_CHUNKED_NAMES: Final = re.compile(rb"(?i)\r\ntransfer-encoding:[ \t]*([^\r\n]*)")
_KNOWN_CODINGS: Final = frozenset({b"chunked", b"identity", b"gzip", b"deflate", b"compress", b""})
READ_BYTES: Final = 65_536  # router-measurements.md: 64 KB beats 16 and 256
READ_MAX: Final = 1_048_576  # of a body that is known to be longer: what has come of it is then read by one call
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

    One head may belong to many requests, so nobody changes it once it is read. `sized`: it declares a length. `close`: the
    client wants the connection closed after the answer. `path` is what routes and rights are judged by; nothing in it is decoded
    or collapsed. `known` is for whoever works something out of it that holds as long
    as the head does; it begins as None. `form` is what finds it again.
    """

    __slots__ = ("chunked", "close", "expect", "form", "headers", "known", "length", "method", "minor", "path", "request_id", "target")

    def __init__(self) -> None:
        self.method = ""
        self.target = b""
        self.path = ""
        self.request_id: bytes | None = None
        self.minor = 1
        self.headers: list[tuple[bytes, bytes]] = []
        self.length = 0  # as declared by the request that was read first
        self.chunked = False
        self.close = False
        self.expect: bytes | None = None
        self.form: Form | None = None
        self.known: Any = None

    def get(self, name: bytes) -> bytes | None:
        """The first header of that lower-case name."""
        for key, value in self.headers:
            if key == name:
                return value
        return None

    def all(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key == name]


HEADS_MAX: Final = 256  # chosen: more kinds of clients than one router meets at a time; a memory of at most 1 MB
HEAD_KEPT_MAX: Final = 4096  # bytes; a longer one is read anew each time
_LENGTH_NAMES: Final = (b"\r\ncontent-length: ", b"\r\nContent-Length: ")
_LENGTH_NAME_SIZE: Final = len(_LENGTH_NAMES[0])
_LENGTH_DIGITS_MAX: Final = 19  # as in _DIGITS

_Read = TypeVar("_Read")


class Form:
    """A head's bytes before and after the digits of its content-length; all are before where it names none.

    Two heads of one form mean the same but for that number, because digits can mean nothing else.
    """

    __slots__ = ("after", "before")

    def __init__(self, before: bytes, after: bytes) -> None:
        self.before = before
        self.after = after

    def match(self, data: bytes, position: int) -> tuple[int, int]:
        """Where a head of this form that begins at `position` ends, and the length it names: -1 for none. (-1, -1): it is another."""
        before, after = self.before, self.after
        if not data.startswith(before, position):
            return -1, -1
        at = position + len(before)
        if not after:
            return at, -1
        first, last, length = at, min(len(data), at + _LENGTH_DIGITS_MAX), 0
        while at < last and 48 <= data[at] <= 57:
            length = length * 10 + data[at] - 48
            at += 1
        return (at + len(after), length) if at > first and data.startswith(after, at) else (-1, -1)


class Heads(Generic[_Read]):
    """Heads that were read before, by their forms. Forgets all when it is full. `last`: the one that was found or kept last.

    `beside` shares what another one knows, and not its last: a thousand engines of one kind say one head, which is then one object.
    """

    __slots__ = ("_known", "last")

    def __init__(self, beside: Heads[_Read] | None = None) -> None:
        self._known: dict[bytes, _Read] = {} if beside is None else beside._known
        self.last: _Read | None = None

    def get(self, form: Form) -> _Read | None:
        found = self._known.get(form.before + form.after)
        if found is not None:
            self.last = found
        return found

    def keep(self, form: Form, read: _Read) -> None:
        key = form.before + form.after
        if not 0 < len(key) <= HEAD_KEPT_MAX:
            return
        if len(self._known) >= HEADS_MAX:
            self._known.clear()
        self._known[key] = read
        self.last = read


def split_length(raw: bytes) -> tuple[Form, int]:
    """A head's form, and the number of its content-length, -1 where it names none.

    A head with something else in the place of the digits has no form (an empty one): it could look like one whose digits were taken
    out.
    """
    at = raw.find(_LENGTH_NAMES[0])
    if at < 0:
        at = raw.find(_LENGTH_NAMES[1])
        if at < 0:
            return Form(raw, b""), -1
    at += _LENGTH_NAME_SIZE
    end = raw.find(b"\r", at)
    digits = raw[at:end]
    if len(digits) > _LENGTH_DIGITS_MAX or not digits.isdigit():
        return Form(b"", b""), -1
    return Form(raw[:at], raw[end:]), int(digits)


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


class _Part(enum.Enum):
    """What of the chunked coding comes next."""

    SIZE = enum.auto()
    DATA = enum.auto()
    END = enum.auto()
    TRAILER = enum.auto()
    OVER = enum.auto()


class ChunkFault(enum.Enum):
    """Why bytes are no chunked coding that we accept."""

    GARBLED = "garbled"
    BODY = "body"  # more than the limit
    TRAILERS = "trailers"  # more than the limit


class Chunks:
    """Undoes the chunked coding. Trailers are counted and dropped. After `over` or a `fault` nothing more is read.

    `size` counts the bytes that were announced, so that a limit is met before they come. Limits are bytes, 0: none.
    """

    __slots__ = ("_buffer", "_left", "_part", "_trailers", "body_max", "fault", "over", "size", "trailers_max")

    def __init__(self, body_max: int, trailers_max: int) -> None:
        self.body_max = body_max
        self.trailers_max = trailers_max
        self.over = False
        self.fault: ChunkFault | None = None
        self.size = 0
        self._part = _Part.SIZE
        self._left = 0
        self._trailers = 0
        self._buffer = b""  # a line that is not whole yet

    def feed(self, data: bytes, position: int, parts: list[bytes]) -> int:
        """Reads from `position`, appends what belongs to the body to `parts`, and says where it stopped."""
        before = len(self._buffer)
        if before:
            data = self._buffer + data[position:]
            begin, position = position, 0
            self._buffer = b""
        else:
            begin = 0
        end = len(data)
        while position < end and not self.over and self.fault is None:
            if self._part is _Part.SIZE:
                line_end = data.find(b"\r\n", position, position + _CHUNK_LINE_MAX)
                size = _size_of(data[position:line_end]) if line_end >= 0 else 0
                stop = line_end + 2 + size
                if size > 0 and stop + 2 <= end and not self.body_max and data.startswith(b"\r\n", stop):  # a whole chunk
                    parts.append(data[line_end + 2 : stop])
                    self.size += size
                    position = stop + 2
                    continue
            if self._part is _Part.DATA:
                take = min(self._left, end - position)
                parts.append(data[position : position + take])
                position += take
                self._left -= take
                if not self._left:
                    self._part = _Part.END
            else:
                position = self._line(data, position)
        return position - before + begin if before else position

    @property
    def between(self) -> bool:
        """Does the next byte begin a chunk?"""
        return self._part is _Part.SIZE and not self._buffer

    def _line(self, data: bytes, position: int) -> int:
        """One line of the coding's own: a size, the end of a chunk, or a trailer."""
        end = data.find(b"\n", position)
        limit = self.trailers_max if self._part is _Part.TRAILER else _CHUNK_LINE_MAX
        if end < 0:
            if len(data) - position > limit:
                return self._fail(ChunkFault.GARBLED, data)
            self._buffer = data[position:]
            return len(data)
        line = data[position : end + 1]
        if len(line) > limit or not line.endswith(b"\r\n"):
            return self._fail(ChunkFault.GARBLED, data)
        text = line[:-2]
        if self._part is _Part.END:
            if text:
                return self._fail(ChunkFault.GARBLED, data)
            self._part = _Part.SIZE
        elif self._part is _Part.SIZE:
            size = _size_of(text)
            if size < 0:
                return self._fail(ChunkFault.GARBLED, data)
            self.size += size
            if self.body_max and self.size > self.body_max:
                return self._fail(ChunkFault.BODY, data)
            self._left = size
            self._part = _Part.DATA if size else _Part.TRAILER
        elif text:
            self._trailers += len(line)
            if self._trailers > self.trailers_max:
                return self._fail(ChunkFault.TRAILERS, data)
            if _TRAILER.match(text) is None or b"\r" in text or _BAD_IN_HEAD.search(text) is not None:
                return self._fail(ChunkFault.GARBLED, data)
        else:
            self._part = _Part.OVER
            self.over = True
        return end + 1

    def _fail(self, fault: ChunkFault, data: bytes) -> int:
        self.fault = fault
        return len(data)


_sizes: dict[bytes, int] = {}  # lines that were read before: an engine's chunks have few sizes
_plain_sizes: dict[bytes, int] = {}  # those of them that are written as we write them, with nothing beside the number
_PLAIN_LINE_MAX: Final = 10  # bytes: the longest line that is kept, with its end


def _size_of(line: bytes) -> int:
    """The size that a chunk's line says, -1 for one that says none."""
    size = _sizes.get(line)
    if size is None:
        found = _CHUNK_SIZE.match(line)
        if found is None:
            return -1
        size = int(found[1], 16)
        if len(line) <= 8:  # with an extension it is not worth the memory
            if len(_sizes) >= HEADS_MAX:
                _sizes.clear()
                _plain_sizes.clear()
            _sizes[line] = size
            if size and line == b"%x" % size:
                _plain_sizes[line] = size
    return size


def whole_chunk(data: bytes) -> int:
    """Where the body's bytes begin in `data`, if it is one chunk and nothing else, framed as `chunk` frames it; they end two bytes
    before its end. 0 where it is none, or its size was not read of late.
    """
    at = data.find(b"\r\n", 0, _PLAIN_LINE_MAX)
    if at <= 0 or _plain_sizes.get(data[:at]) != len(data) - at - 4 or not data.endswith(b"\r\n"):
        return 0
    return at + 2


class _Stage(enum.Enum):
    HEAD = enum.auto()
    LENGTH = enum.auto()
    CHUNKED = enum.auto()
    DEAD = enum.auto()


class RequestReader:
    """Turns a client's bytes into requests. Feed it until `finished` holds one or `fault` is set.

    `current` is a request whose head is whole and whose body is still coming: it may be refused before the rest is sent.
    A `fault` counts after everything in `finished`; `fault_head` is the head it belongs to, where there is one. Limits are
    bytes and may be changed between requests. `heads`: what readers of other connections have read too.
    """

    __slots__ = (
        "_buffer", "_chunks", "_last", "_left", "_stage", "current", "fault", "fault_head", "finished", "heads", "max_body", "max_head",
    )  # fmt: skip

    def __init__(self, max_head: int, max_body: int, heads: Heads[Head] | None = None) -> None:
        self.max_head = max_head
        self.max_body = max_body
        self.heads: Heads[Head] = Heads() if heads is None else heads
        self.current: Request | None = None
        self.finished: deque[Request] = deque()
        self.fault: RequestFault | None = None
        self.fault_head: Head | None = None
        self._stage = _Stage.HEAD
        self._buffer = b""
        self._left = 0  # bytes still to come of the body
        self._chunks: Chunks | None = None
        self._last: Head | None = None  # a client says the same head again and again: this one needs no look-up

    @property
    def at_rest(self) -> bool:
        """Nothing of a next request has come yet."""
        return self._stage is _Stage.HEAD and not self._buffer

    @property
    def room(self) -> int:
        """How many bytes to read at a time, at most."""
        return READ_MAX if self._stage is _Stage.LENGTH and self._left > READ_BYTES else READ_BYTES

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
            elif stage is _Stage.LENGTH:
                position = self._body(data, position)
            else:
                position = self._chunked(data, position)
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
        last = self._last
        if last is not None and last.form is not None:
            end, length = last.form.match(data, position)
            if 0 <= end <= position + self.max_head:
                return self._begin(last, last.length if length < 0 else length, end)
        while data.startswith(b"\r\n", position):  # RFC 9112, 2.2: empty lines before a request line are skipped
            position += 2
        if position == len(data):
            return position
        end = data.find(b"\r\n\r\n", position)
        raw = data[position:] if end < 0 else data[position : end + 4]
        if end >= 0 and len(raw) <= self.max_head:
            form, length = split_length(raw)
            known = self.heads.get(form)
            if known is not None:
                self._last = known
                return self._begin(known, known.length if length < 0 else length, end + 4)
        # Judged as it comes, so that a TLS hello or a bare line feed is refused at once and not after a time-out.
        # Only the part within the limit is judged, so that the verdict does not depend on how the bytes were split.
        judged = raw if len(raw) <= self.max_head else raw[: self.max_head]
        feeds, returns, pairs = judged.count(b"\n"), judged.count(b"\r"), judged.count(b"\r\n")
        if feeds != pairs or returns - judged.endswith(b"\r") > pairs or _BAD_IN_HEAD.search(judged) is not None:
            self.fault_head = _sketch(judged)
            return self._fail(400, "bad_request", "the request head holds control characters, or lines that do not end in CR LF")
        if len(raw) > self.max_head:
            self.fault_head = _sketch(judged)
            return self._fail(431, "header_too_large", f"the request head is larger than {self.max_head} bytes")
        if end < 0:
            return self._keep(data, position)
        if b"\r\n " in raw or b"\r\n\t" in raw:
            self.fault_head = _sketch(raw)
            return self._fail(400, "bad_request", "folded header lines are not accepted")
        head = Head()
        if not self._parse(raw, head):
            self.fault_head = _sketch(raw)
            return -1
        head.form = split_length(raw)[0]
        self.heads.keep(head.form, head)
        return self._begin(head, head.length, end + 4)

    def _begin(self, head: Head, length: int, position: int) -> int:
        """A head is whole; its body begins at `position`."""
        request = Request(head)
        if head.chunked:
            self.current = request
            self._chunks = Chunks(self.max_body, self.max_head)
            self._stage = _Stage.CHUNKED
        elif length:
            self.current = request
            if length > self.max_body:
                return self._too_large()
            self._left = length
            self._stage = _Stage.LENGTH
        else:
            self.finished.append(request)
        return position

    def _too_large(self) -> int:
        return self._fail(413, "too_large", f"the request body is larger than the limit of {self.max_body} bytes")

    def _parse(self, raw: bytes, head: Head) -> bool:
        line = raw[: raw.index(b"\r\n")]
        if not line.endswith(_VERSIONS) or line.count(b" ") != 2:
            known = _REQUEST_LINE.match(line)
            if known is not None:
                version = known[3].decode()
                self._fail(505, "http_version", f"version {version} of HTTP is not spoken here; use 1.1")
            else:
                self._fail(400, "bad_request", "the request line is no method, target and version with one blank between each")
            return False
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
        if not head.target.startswith(b"/"):
            absolute = _ABSOLUTE.match(head.target)
            if absolute is not None:  # it means the same as its path
                path = head.target[absolute.end() :]
                head.target = path if path.startswith(b"/") else b"/" + path
        head.path = head.target.partition(b"?")[0].decode("latin-1")
        head.minor = 1 if line.endswith(b"1") else 0
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
                if _HOST.match(value) is None:
                    self._fail(400, "bad_request", "the Host header is no host and port")
                    return False
            elif name == b"x-request-id":
                head.request_id = head.request_id or value
            elif name == b"expect" and head.minor == 1:  # RFC 9110, 10.1.1: an older client waits for nothing
                head.expect = value.lower()
            elif name == b"connection" and any(token.strip() == b"close" for token in value.lower().split(b",")):
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
                head.chunked = True
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
        request.parts.append(data if take == len(data) else data[position : position + take])
        request.size += take
        self._left -= take
        if self._left == 0:
            self._finish()
        return position + take

    def _chunked(self, data: bytes, position: int) -> int:
        request, chunks = self.current, self._chunks
        assert request is not None
        assert chunks is not None
        before = len(request.parts)
        position = chunks.feed(data, position, request.parts)
        request.size += sum(map(len, request.parts[before:]))
        if chunks.fault is ChunkFault.BODY:
            return self._too_large()
        if chunks.fault is ChunkFault.TRAILERS:
            return self._fail(431, "header_too_large", f"the trailers are larger than {self.max_head} bytes")
        if chunks.fault is not None:
            return self._fail(400, "bad_request", "the chunked coding of the request body cannot be read")
        if chunks.over:
            self._chunks = None
            self._finish()
        return position

    def _finish(self) -> None:
        assert self.current is not None
        self.finished.append(self.current)
        self.current = None
        self._stage = _Stage.HEAD


def _sketch(raw: bytes) -> Head:
    """What a head that is refused tells all the same, for its answer and its log line: who asks from where, for what."""
    head = Head()
    line = _REQUEST_LINE.match(raw[: raw.find(b"\r\n")])
    if line is not None:
        head.method, head.target = line[1].decode(), line[2]
        head.path = head.target.partition(b"?")[0].decode("latin-1")
    head.headers = [(name.lower(), value.strip(b" \t")) for name, value in _TOLD_EARLY.findall(raw)]
    head.request_id = head.get(b"x-request-id")
    head.close = True
    return head


class Framing(enum.Enum):
    """How an engine's answer says where it ends."""

    LENGTH = "length"
    CHUNKED = "chunked"
    EOF = "eof"
    NONE = "none"


class AnswerHead:
    """An engine's status and headers (lower-case names, values without surrounding blanks), and how the body is framed.

    One head may belong to many answers, so nobody changes it once it is read. `known` is for whoever works something out of
    it that holds as long as the head does; it begins as None. `form` is what finds it again.
    """

    __slots__ = ("form", "framing", "headers", "keep_alive", "known", "length", "status")

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.framing = Framing.NONE
        self.length = 0  # as declared by the answer that was read first
        self.keep_alive = False
        self.form: Form | None = None
        self.known: Any = None

    def get(self, name: bytes) -> bytes | None:
        """The first header of that lower-case name."""
        for key, value in self.headers:
            if key == name:
                return value
        return None


class _AnswerCallbacks:
    """What httptools calls while it reads one head of an answer."""

    __slots__ = ("_head", "_parser", "done", "fault")

    def __init__(self, head: AnswerHead) -> None:
        self._head = head
        self.done = False
        self.fault = ""
        self._parser: Any = httptools.HttpResponseParser(self)

    def read(self, raw: bytes) -> str:
        """Why `raw` is no head, "" when it is one."""
        try:
            self._parser.feed_data(raw)
        except httptools.HttpParserUpgrade:
            return "the engine switched protocols"
        except httptools.HttpParserError as err:
            return f"the engine's answer is not HTTP: {err}"
        return self.fault or ("" if self.done else "the head of the engine's answer is not whole")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head.headers.append((name.lower(), value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        head = self._head
        head.status = self._parser.get_status_code()
        if head.status < 100 or self._parser.get_http_version() not in ("1.1", "1.0"):
            self.fault = "the engine's answer is not HTTP/1.1, or has a status that HTTP does not have"
            return
        # Asked here and not after the feed: afterwards it has been reset and says "close" for every small answer.
        head.keep_alive = self._parser.should_keep_alive()
        coded = head.get(b"transfer-encoding")
        length = head.get(b"content-length")
        if head.status in (204, 304) or head.status < 200:
            head.framing = Framing.NONE
        elif coded is not None:
            if coded.lower() == b"chunked":
                head.framing = Framing.CHUNKED
            else:
                self.fault = "the engine used an unknown transfer coding"
        elif length is not None:
            head.framing = Framing.LENGTH
            head.length = int(length) if _DIGITS.match(length) else 0
        else:
            head.framing = Framing.EOF
        self.done = True


def _is_surplus(data: bytes) -> bool:
    """Line ends may precede an answer, so they spoil none."""
    return bool(data.strip(b"\r\n"))


_NO_HEAD: Final = AnswerHead()
_VERSION: Final = b"HTTP/1."


class ResponseReader:
    """Turns an engine's bytes into one answer. Interim answers (1xx) are swallowed.

    `broken` says why the bytes are no answer. `surplus`: bytes came after the end; they are dropped, and the connection
    they came on must not be used again. `reusable` is true when the answer is complete and the engine keeps the connection.
    `heads`: what readers of other answers have read too.
    """

    __slots__ = (
        "_buffer",
        "_chunks",
        "_left",
        "_parts",
        "_spoiled",
        "broken",
        "complete",
        "head",
        "head_done",
        "heads",
        "surplus",
        "untouched",
    )

    def __init__(self, heads: Heads[AnswerHead] | None = None) -> None:
        self.heads: Heads[AnswerHead] = Heads() if heads is None else heads
        self.head = _NO_HEAD
        self.head_done = False
        self.complete = False
        self.surplus = False
        self.untouched = True  # no byte has come yet
        self.broken = ""
        self._parts: list[bytes] = []
        self._buffer = b""
        self._left = 0
        self._chunks: Chunks | None = None
        self._spoiled = False

    @property
    def status(self) -> int:
        return self.head.status

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        return self.head.headers

    @property
    def framing(self) -> Framing:
        return self.head.framing

    @property
    def length(self) -> int | None:
        """Bytes of the body still to come, as the engine has told it; None where it has not."""
        return self._left if self.head.framing is Framing.LENGTH else None

    @property
    def reusable(self) -> bool:
        return (
            self.complete
            and not (self.surplus or self.broken or self._spoiled)
            and self.head.keep_alive
            and self.head.framing is not Framing.EOF
        )

    def get(self, name: bytes) -> bytes | None:
        return self.head.get(name)

    def feed(self, data: bytes) -> None:
        if self.complete:
            self.surplus = self.surplus or _is_surplus(data)
            return
        if self.broken:
            return
        self.untouched = False
        position = 0
        if not self.head_done:
            if self._buffer:
                data = self._buffer + data
                self._buffer = b""
            position = self._read_head(data)
            if position < 0:
                return
        framing = self.head.framing
        if framing is Framing.CHUNKED:
            chunks = self._chunks
            assert chunks is not None
            position = chunks.feed(data, position, self._parts)
            if chunks.fault is not None:
                self.broken = "the chunked coding of the engine's answer cannot be read"
                return
            self.complete = chunks.over
        elif framing is Framing.LENGTH:
            left = self._left
            has = len(data) - position
            if has >= left:
                if left:
                    self._parts.append(data if left == len(data) else data[position : position + left])
                position += left
                self._left = 0
                self.complete = True
            elif has:
                self._parts.append(data[position:] if position else data)
                self._left = left - has
                return
        elif framing is Framing.EOF:
            if position < len(data):
                self._parts.append(data[position:] if position else data)
            return
        else:
            self.complete = True
        if self.complete and position < len(data):
            self.surplus = _is_surplus(data[position:])

    @property
    def between_chunks(self) -> bool:
        """Does the next byte begin a chunk, and was all before it taken? What is one `whole_chunk` then needs not be read here."""
        chunks = self._chunks
        return chunks is not None and chunks.between and not (self._parts or self.complete or self.broken)

    def _read_head(self, data: bytes) -> int:
        """Where the body begins in `data`; -1 when the head is not whole, or is none."""
        position = 0
        last = self.heads.last
        if last is not None and last.form is not None:
            end, length = last.form.match(data, 0)
            if end >= 0:
                self._begin(last, length)
                return end
        while True:
            while data.startswith(b"\r\n", position):
                position += 2
            end = data.find(b"\r\n\r\n", position)
            if end < 0:
                self._keep(data, position)
                return -1
            raw = data[position : end + 4]
            position = end + 4
            form, length = split_length(raw)
            head = self.heads.get(form)
            if head is None:
                head = AnswerHead()
                if len(raw) > RESPONSE_HEAD_MAX:
                    self.broken = "the head of the engine's answer is too large"
                    return -1
                self.broken = _AnswerCallbacks(head).read(raw)
                if self.broken:
                    return -1
                if head.status < 200:
                    continue
                head.form = form
                self.heads.keep(form, head)
            self._begin(head, length)
            return position

    def _begin(self, head: AnswerHead, length: int) -> None:
        self.head = head
        self._left = head.length if length < 0 else length
        if head.framing is Framing.CHUNKED:
            self._chunks = Chunks(0, RESPONSE_HEAD_MAX)
        self.head_done = True

    def _keep(self, data: bytes, position: int) -> None:
        rest = data[position:]
        if len(rest) > RESPONSE_HEAD_MAX:
            self.broken = "the head of the engine's answer is too large"
        elif (rest != b"\r" and not rest.startswith(_VERSION[: len(rest)])) or b"\n\n" in rest:
            self.broken = "the engine's answer is not HTTP"
        else:
            self._buffer = rest

    def refuse_reuse(self) -> None:
        """Something else than the answer spoils the connection: the request was not sent whole."""
        self._spoiled = True

    def end(self) -> None:
        """The engine closed. That ends an answer that is delimited by it, and no other."""
        if self.head_done and self.head.framing is Framing.EOF and not self.broken:
            self.complete = True

    def take(self) -> bytes:
        """The body's bytes since the last call."""
        parts = self._parts
        if not parts:
            return b""
        self._parts = []
        return parts[0] if len(parts) == 1 else b"".join(parts)


def status_line(status: int) -> bytes:
    """An answer's first line."""
    line = _LINES.get(status)
    return b"HTTP/1.1 %d Unknown\r\n" % status if line is None else line


_LINES: Final = {status: b"HTTP/1.1 %d %b\r\n" % (status, reason) for status, reason in REASONS.items()}


def chunk(data: bytes) -> bytes:
    """One chunk of the chunked coding; `data` must not be empty, an empty one would end the message."""
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST_CHUNK: Final = b"0\r\n\r\n"
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
