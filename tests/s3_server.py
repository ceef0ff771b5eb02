"""An S3 server of ours on loopback: the objects and dialects of `sim.lease_store`, said in bytes, and every fault by script."""

from __future__ import annotations

import contextlib
import enum
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Iterator
from typing import BinaryIO, Final
from urllib.parse import unquote

import attrs

from llmgw.sim.lease_store import AWS, Bucket, Dialect, Put
from tests.threaded_server import ThreadedServer

BUCKET: Final = "bucket"
PAIR_S_MAX: Final = 0.5  # how long a store that compares too early waits for another write to compare as well
REASONS: Final = {
    200: "OK", 204: "No Content", 301: "Moved Permanently", 304: "Not Modified", 400: "Bad Request", 401: "Unauthorized",
    403: "Forbidden", 404: "Not Found", 409: "Conflict", 412: "Precondition Failed", 429: "Too Many Requests",
    500: "Internal Server Error", 501: "Not Implemented", 502: "Bad Gateway", 503: "Slow Down",
}  # fmt: skip
CODES: Final = {304: "", 404: "NoSuchKey", 409: "ConditionalRequestConflict", 412: "PreconditionFailed"}


class Play(enum.Enum):
    """What happens to one request instead of an answer."""

    HANG = "not done; silence"
    CUT = "not done; the connection ends"
    LOSE_REPLY = "done; the connection ends"
    LATE = "silence; done when the test says `let_late_writes_through`"


SILENT: Final = (Play.HANG, Play.LATE)


@attrs.frozen
class Asked:
    method: str
    key: str
    headers: dict[str, str]
    body: bytes


Script = Callable[[Asked], bytes | Play | None]


def answer(status: int, body: bytes = b"", **headers: str) -> bytes:
    """A whole answer as bytes."""
    lines = [f"HTTP/1.1 {status} {REASONS[status]}", *(f"{name}: {value}" for name, value in headers.items())]
    if status not in (204, 304):
        lines.append(f"Content-Length: {len(body)}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


def error(status: int, code: str, **more: str) -> bytes:
    """As a store refuses: the code that it has for it in XML, with `more` elements."""
    rest = "".join(f"<{name}>{value}</{name}>" for name, value in more.items())
    body = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code>{rest}<RequestId>7</RequestId></Error>' if code else ""
    return answer(status, body.encode())


def content(data: bytes, etag: str = "e") -> bytes:
    return answer(200, data, ETag=f'"{etag}"')


class S3Server(ThreadedServer):
    """Listens from the start until `close`. `script` may be replaced at any time; `asked` holds every request, in its order."""

    def __init__(self, dialect: Dialect = AWS, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self._silences = 0
        self._late = False
        self.bucket = Bucket(lambda: float(self._late), dialect)
        self.script: Script = lambda asked: None
        self.asked: list[Asked] = []
        self._compared: Counter[tuple[str, str | None]] = Counter()  # by key and version
        super().__init__()
        self.address = f"http{'s' if tls else ''}://{self.netloc}"

    def let_late_writes_through(self) -> None:
        with self.turn:
            self._late = True

    @property
    def hanging(self) -> int:
        """Requests that are met with silence now."""
        with self.turn:
            return self._silences

    def names(self) -> tuple[str, ...]:
        with self.turn:
            return self.bucket.names()

    def serve(self, one: socket.socket) -> None:
        with self._wrapped(one) as one, one.makefile("rb") as file:
            while (asked := _read(file)) is not None:
                with self.turn:
                    self.asked.append(asked)
                    play = self.script(asked)
                    if play is Play.LATE and asked.method == "PUT":
                        self.bucket.put_late(_put(asked), 1.0)
                    self._silences += play in SILENT
                if play in SILENT:
                    file.read(1)  # until the client gives up
                    with self.turn:
                        self._silences -= 1
                    break
                if play is Play.CUT:
                    break
                data = play if isinstance(play, bytes) else self._do(asked)
                if play is Play.LOSE_REPLY:
                    break
                one.sendall(data)
                if isinstance(play, bytes) and not _whole(play):
                    break

    def _wrapped(self, one: socket.socket) -> socket.socket:
        if self._tls is None:
            return one
        try:
            return self._tls.wrap_socket(one, server_side=True)
        except OSError:  # a client that does not trust it
            one.close()
            raise

    def _do(self, asked: Asked) -> bytes:
        with self.turn:
            if asked.method == "GET":
                found = self.bucket.get(asked.key)
                return error(404, "NoSuchKey") if found is None else content(found.data, found.etag)
            if asked.method == "DELETE":
                self.bucket.delete(asked.key)
                return answer(204)
            assert asked.method == "PUT", asked
            put = _put(asked)
            if self.bucket.dialect.atomic:
                status, etag = self.bucket.put(put)
            else:
                status, etag = self._put_late_by_a_moment(put)
            return answer(200, ETag=f'"{etag}"') if status == 200 else error(status, CODES[status])

    def _put_late_by_a_moment(self, put: Put) -> tuple[int, str]:
        if (status := self.bucket.compare(put)) != 200:
            return status, ""
        expected = put.key, put.if_match
        self._compared[expected] += 1
        self.turn.notify_all()
        self.turn.wait_for(lambda: self._compared[expected] > 1, PAIR_S_MAX)
        etag = self.bucket.set(put)
        return 200, etag


@contextlib.contextmanager
def s3_server(dialect: Dialect = AWS) -> Iterator[S3Server]:
    server = S3Server(dialect)
    try:
        yield server
    finally:
        server.close()


def _read(file: BinaryIO) -> Asked | None:
    """The next request; None at the end of them, and for what is no request."""
    first = file.readline().decode("latin-1").split()
    if len(first) != 3:
        return None
    headers: dict[str, str] = {}
    while line := file.readline().decode("latin-1").strip():
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    body = file.read(int(headers.get("content-length", "0")))
    return Asked(first[0], unquote(first[1]).removeprefix(f"/{BUCKET}/"), headers, body)


def _put(asked: Asked) -> Put:
    match = asked.headers.get("if-match")
    return Put(asked.key, asked.body, None if match is None else match.strip('"'), asked.headers.get("if-none-match") == "*")


def _whole(data: bytes) -> bool:
    """May another answer follow on the same connection?"""
    head, end, body = data.partition(b"\r\n\r\n")
    if not end or not head.startswith(b"HTTP/1.1 "):
        return False
    lengths = [line.split(b":")[1] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    return (int(lengths[0]) if lengths else 0) == len(body)
