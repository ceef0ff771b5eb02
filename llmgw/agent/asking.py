"""One HTTP/1.1 question to an engine over a connection of its own: readiness, probe, counters.

No pool, no redirects, no proxies, nothing of the environment: an engine is asked where it was started and nowhere else.
"""

from __future__ import annotations

from typing import Final

import attrs
import httptools
import trio

from llmgw.domain.errors import TooLarge, Unavailable, UpstreamFailed
from llmgw.domain.files import words

ANSWER_BYTES_MAX: Final = 8 * 1024 * 1024  # a probe's picture in base64 stays below


@attrs.frozen
class Answer:
    status: int
    body: bytes

    @property
    def good(self) -> bool:
        return 200 <= self.status < 300


class ConnectRefused(Unavailable):
    """Nothing listens there."""

    default_code = "connect_refused"


class _Reading:
    """What httptools calls back."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.done = False
        self.status = 0
        self.parser = httptools.HttpResponseParser(self)

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.status = self.parser.get_status_code()
        self.done = self.status >= 200  # 100 Continue comes before the answer
        if not self.done:
            self.body.clear()


def host_header(host: str, port: int) -> str:
    """`host:port` with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def ask(
    host: str, port: int, method: str, path: str, *, key: str = "", body: bytes = b"", content_type: str = "application/json"
) -> Answer:
    """The whole answer. The caller bounds the wait.

    Raises ConnectRefused, `Unavailable` when the connection breaks, `UpstreamFailed` for an answer that is not HTTP.
    """
    peer = host_header(host, port)
    head = [f"{method} {path} HTTP/1.1", f"Host: {peer}", "Connection: close", "Accept-Encoding: identity"]
    if key:
        head.append(f"Authorization: Bearer {key}")
    if method == "POST":
        head += [f"Content-Type: {content_type}", f"Content-Length: {len(body)}"]
    try:
        stream = await trio.open_tcp_stream(host, port)
    except OSError as err:
        if _refused(err):
            raise ConnectRefused(f"nothing listens at {peer}") from err
        raise Unavailable(f"{peer} cannot be reached: {words(err)}") from err
    reading = _Reading()
    try:
        await stream.send_all("\r\n".join([*head, "", ""]).encode("utf-8") + body)
        while not reading.done:
            data = await stream.receive_some(65536)
            if not data:
                break
            reading.parser.feed_data(data)
            if len(reading.body) > ANSWER_BYTES_MAX:
                raise TooLarge(f"{peer} answered with more than {ANSWER_BYTES_MAX} bytes")
    except (trio.BrokenResourceError, trio.ClosedResourceError, OSError) as err:
        raise Unavailable(f"{peer} broke the connection: {words(err)}") from err
    except httptools.HttpParserError as err:
        raise UpstreamFailed(f"{peer} did not answer in HTTP: {err}") from err
    finally:
        await trio.aclose_forcefully(stream)
    if not reading.done:
        status = reading.parser.get_status_code()
        if not status or not reading.body:
            raise Unavailable(f"{peer} closed the connection without an answer")
        return Answer(status, bytes(reading.body))  # framed by the end of the connection
    return Answer(reading.status, bytes(reading.body))


def _refused(err: OSError) -> bool:
    """open_tcp_stream tries every address of a name and wraps what each said."""
    if isinstance(err, ConnectionRefusedError):
        return True
    cause = err.__cause__
    if isinstance(cause, BaseExceptionGroup):
        return all(isinstance(one, ConnectionRefusedError) for one in cause.exceptions)
    return isinstance(cause, ConnectionRefusedError)
