"""The admin API over http.client: time-outs, retries under one idempotency key, errors in the product's own kinds.

Uses no proxy from the environment: an admin token must not travel through one. Follows no redirect.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import http.client
import json
import os
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final
from urllib.parse import quote, urlencode

import attrs

from llmgw.cli.ctl.places import ROUTER_PORT, Target, router_port, split_url
from llmgw.domain.errors import (
    Broken,
    Conflict,
    Denied,
    Invalid,
    LlmgwError,
    NotFound,
    Overloaded,
    PreconditionFailed,
    PreconditionRequired,
    TimedOut,
    TooLarge,
    Unauthenticated,
    Unavailable,
    UpstreamFailed,
)
from llmgw.domain.files import unusable

CONNECT_S: Final = 5.0  # chosen: a machine that has not taken a connection by then will not
ANSWER_S: Final = 30.0  # chosen: above every deadline of the API itself (a durable write, a forwarded one)
STREAM_SILENCE_S: Final = 60.0  # the API sends a comment at least every 15 s; four missed ones are a dead peer
TRIES: Final = 3
RETRY_WAIT_S: Final = (0.3, 1.0)  # between tries; a hand-over of leadership takes at most 1 s (testing.md 3)
RETRY_AFTER_S_MAX: Final = 3.0  # a longer Retry-After is the person's to wait for
_OF_THE_CLOCK: Final = frozenset({9, 10})  # what OpenSSL calls not yet valid and expired
_OF_THE_CA: Final = frozenset({18, 19, 20, 21})  # and made by somebody who is not trusted
BODY_BYTES_MAX: Final = 64 * 1024 * 1024  # chosen: above any listing; what answers more is not our API
PIECE: Final = 256 * 1024

_KINDS: Final[Mapping[int, type[LlmgwError]]] = {
    400: Invalid,
    401: Unauthenticated,
    403: Denied,
    404: NotFound,
    405: Invalid,
    409: Conflict,
    412: PreconditionFailed,
    413: TooLarge,
    415: Invalid,
    422: Invalid,
    428: PreconditionRequired,
    500: Broken,
    502: UpstreamFailed,
    503: Unavailable,
    504: TimedOut,
}


@attrs.frozen
class Answer:
    """`body` is what the JSON held, an empty dict for an empty body."""

    status: int
    headers: Mapping[str, str]
    body: Any

    @property
    def etag(self) -> str:
        return self.headers.get("etag", "")


def segment(name: str) -> str:
    """A name as one segment of a path: names of models may hold `/` and `:`."""
    return quote(name, safe="", errors="surrogateescape")


class Client:
    """Requests to one control plane, a connection each."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.scheme, self.host, self.port, self.base = split_url(target.server)
        self._ssl: ssl.SSLContext | None = None

    def get(self, path: str, query: Mapping[str, object] | None = None) -> Answer:
        """GET; raises the error that the answer means."""
        return self._request("GET", path, query, None, {})

    def send(self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None) -> Answer:
        """A write. Every try of it carries the same idempotency key, so that it happens once."""
        key = os.urandom(16).hex()
        return self._request(method, path, None, body, {"Idempotency-Key": key, **(headers or {})})

    def _request(self, method: str, path: str, query: Mapping[str, object] | None, body: object, headers: Mapping[str, str]) -> Answer:
        where = self._where(path, query)
        for left in reversed(range(TRIES)):
            try:
                return self._once(method, where, body, headers)
            except Unavailable as err:
                wait_s = RETRY_WAIT_S[min(TRIES - 1 - left, len(RETRY_WAIT_S) - 1)]
                if err.retry_after_s is not None:
                    wait_s = max(wait_s, err.retry_after_s)
                if left == 0 or isinstance(err, TimedOut) or err.code == "unreachable" or wait_s > RETRY_AFTER_S_MAX:
                    raise
                wait(wait_s)
        raise AssertionError("the last try returns or raises")

    def _once(self, method: str, where: str, body: object, headers: Mapping[str, str]) -> Answer:
        connection = self._connect()
        try:
            data = None if body is None else json.dumps(body).encode("ascii")
            sent = {**self._headers("application/json"), **headers}
            if data is not None:
                sent["Content-Type"] = "application/json"
            connection.request(method, where, body=data, headers=sent)
            response = connection.getresponse()
            raw = response.read(BODY_BYTES_MAX + 1)
        except TimeoutError as err:
            raise TimedOut(f"{self.target.server} did not answer within {ANSWER_S:g} s") from err
        except (OSError, http.client.HTTPException) as err:
            raise Unavailable(f"the connection to {self.target.server} broke: {_reason(err)}", code="connection_broken") from err
        finally:
            connection.close()
        if len(raw) > BODY_BYTES_MAX:
            raise Invalid(f"{self.target.server} answered more than {BODY_BYTES_MAX} bytes")
        found = {name.lower(): value for name, value in response.getheaders()}
        if response.status >= 300:
            raise self._error(response.status, raw, found)
        return Answer(response.status, found, self._json(raw))

    def lines(self, path: str, headers: Mapping[str, str]) -> Iterator[str]:
        """The lines of a stream (server-sent events) until it ends. Raises Unavailable when it breaks or falls silent."""
        connection = self._connect()
        try:
            try:
                connection.request("GET", self._where(path, None), headers={**self._headers("text/event-stream"), **headers})
                response = connection.getresponse()
                if response.status >= 300:
                    raise self._error(response.status, response.read(BODY_BYTES_MAX), {n.lower(): v for n, v in response.getheaders()})
                if connection.sock is not None:
                    connection.sock.settimeout(STREAM_SILENCE_S)
                while line := response.readline(BODY_BYTES_MAX):
                    yield line.decode("utf-8", "replace").rstrip("\r\n")
            except TimeoutError as err:
                raise TimedOut(f"{self.target.server} fell silent") from err
            except (OSError, http.client.HTTPException) as err:
                raise Unavailable(f"the connection to {self.target.server} broke: {_reason(err)}", code="connection_broken") from err
        finally:
            connection.close()

    def download(self, path: str, into: Path) -> tuple[Mapping[str, str], str]:
        """What is answered, as a new file (0600): its headers, and the SHA-256 of what came. Nothing is left of it where it fails.

        Raises the error that the answer means, Unavailable when it breaks or is cut, and Invalid or Unavailable for the file.
        """
        connection = self._connect()
        digest = hashlib.sha256()
        try:
            connection.request("GET", self._where(path, None), headers=self._headers("*/*"))
            response = connection.getresponse()
            if response.status >= 300:
                raise self._error(response.status, response.read(BODY_BYTES_MAX), {n.lower(): v for n, v in response.getheaders()})
            with _new_file(into) as file:
                while piece := response.read(PIECE):
                    digest.update(piece)
                    file.write(piece)
                if response.length:
                    raise Unavailable(f"{self.target.server} cut its answer off", code="connection_broken")
            return {name.lower(): value for name, value in response.getheaders()}, digest.hexdigest()
        except TimeoutError as err:
            raise TimedOut(f"{self.target.server} fell silent") from err
        except OSError as err:
            if err.filename is not None or err.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS):
                raise unusable(err, "the copy of the store", into) from err
            raise Unavailable(f"the connection to {self.target.server} broke: {_reason(err)}", code="connection_broken") from err
        except http.client.HTTPException as err:
            raise Unavailable(f"the connection to {self.target.server} broke: {_reason(err)}", code="connection_broken") from err
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        if self.scheme == "https":
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                self.host, self.port, timeout=CONNECT_S, context=self._tls()
            )
        else:
            connection = http.client.HTTPConnection(self.host, self.port, timeout=CONNECT_S)
        try:
            connection.connect()
        except socket.gaierror as err:
            raise Unavailable(f"the host {self.host} is not known: {_reason(err)}", code="unreachable") from err
        except ssl.SSLCertVerificationError as err:
            raise Unavailable(self._not_trusted(err), code="unreachable") from err
        except ssl.SSLError as err:
            raise Unavailable(f"{self.target.server} is not trusted or speaks no TLS: {_reason(err)}", code="unreachable") from err
        except (OSError, http.client.HTTPException) as err:
            raise Unavailable(f"nothing answers at {self.target.server}: {_reason(err)}", code="unreachable") from err
        assert connection.sock is not None
        connection.sock.settimeout(ANSWER_S)
        return connection

    def _tls(self) -> ssl.SSLContext:
        if self._ssl is None:
            try:
                self._ssl = ssl.create_default_context(cafile=self.target.ca or None)
            except (OSError, ssl.SSLError) as err:
                raise Invalid(f"the certificates in {self.target.ca} cannot be used: {_reason(err)}") from err
        return self._ssl

    def _not_trusted(self, err: ssl.SSLCertVerificationError) -> str:
        """Why the certificate that was shown is not taken, with what helps where that is known."""
        why = f"{self.target.server} is not trusted: {err.verify_message or _reason(err)}"
        if err.verify_code in _OF_THE_CLOCK:
            return f"{why}; is this machine's clock right?"
        if err.verify_code not in _OF_THE_CA:
            return why
        if self.target.ca:
            return f"{why}; {self.target.ca} holds no CA that made its certificate"
        return f"{why}; for a cluster's own CA, LLMGW_CA names the file of its certificate (ca/ca.pem of a control plane)"

    def _headers(self, accept: str) -> dict[str, str]:
        if not (self.target.token.isascii() and self.target.token.isprintable()):
            raise Unauthenticated("the token holds characters that no token has", code="no_token")
        return {"Accept": accept, "Authorization": f"Bearer {self.target.token}", "User-Agent": "llmgw-ctl"}

    def _where(self, path: str, query: Mapping[str, object] | None) -> str:
        given = {name: value for name, value in (query or {}).items() if value is not None}
        return f"{self.base}/api/v1/{path}{'?' + urlencode(given) if given else ''}"

    def _json(self, raw: bytes) -> Any:
        if not raw.strip():
            return {}
        try:
            return json.loads(raw)
        except (ValueError, RecursionError) as err:
            raise Invalid(f"{self.target.server} answered something that is not JSON: is this the admin API's address?") from err

    def _error(self, status: int, raw: bytes, headers: Mapping[str, str]) -> LlmgwError:
        if 300 <= status < 400:
            return Invalid(f"{self.target.server} answered with a redirect ({status}): use the address it points to")
        try:
            found = json.loads(raw)["error"]
            message, code = str(found["message"]), found.get("code")
            lines = [f"  {fault['path']}: {fault['reason']}" for fault in found.get("faults") or () if fault["reason"] not in message]
            message = "\n".join([message, *lines])
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
            message, code = f"{self.target.server} answered {status} without saying why", None
            if status < 500:
                message += ": is this the admin API's address?"
        code = code if isinstance(code, str) else None
        if code == ROUTER_PORT:
            return router_port(self.target.server)
        retry_after_s = _seconds(headers.get("retry-after"))
        if status == 429:
            return Overloaded(message, retry_after_s=retry_after_s or 1.0, code=code)
        kind = _KINDS.get(status) or (Broken if status >= 500 else Invalid)
        if issubclass(kind, Unavailable):
            return kind(message, retry_after_s=retry_after_s, code=code)
        return kind(message, code=code)


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[IO[bytes]]:
    with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600), "wb") as file:
        try:
            yield file
        except BaseException:  # re-raised: only the half-written file is taken away
            with contextlib.suppress(OSError):
                path.unlink()
            raise


def wait(seconds: float) -> None:
    """Waits; Ctrl-C ends it."""
    threading.Event().wait(seconds)


def _seconds(text: str | None) -> float | None:
    try:
        return max(0.0, float(text)) if text else None
    except ValueError:
        return None


def _reason(err: Exception) -> str:
    return getattr(err, "strerror", None) or str(err) or type(err).__name__
