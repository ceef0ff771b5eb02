"""A scripted engine on raw sockets, a raw client, and a real router process: what the tests of the data plane are made of."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from llmgw.cli.version import is_compiled
from tests.programs import ALTERED

interpreted_only = pytest.mark.skipif(is_compiled(), reason="puts a fault into a class, and a compiled one cannot be changed")
WAIT_S = 20.0  # for a state that must come; generous, because the machine may be busy

KEY = "K"
CHAT = b'{"model":"m1","messages":[{"role":"user","content":"hi"}]}'
CHAT_S = b'{"model":"m1","messages":[{"role":"user","content":"hi"}],"stream":true}'
assert (len(CHAT), len(CHAT_S)) == (58, 72)
CHAT2 = CHAT.replace(b"m1", b"m2")
CHAT2_S = CHAT_S.replace(b"m1", b"m2")

OK_BODY = (
    '{"id":"c1","object":"chat.completion","created":1,"model":"m1","choices":[{"index":0,"message":{"role":"assistant",'
    '"content":"ok"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}'
)
assert len(OK_BODY) == 223
SH = ["s", "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"]
END = ["s", "0\r\n\r\n"]


def answer(status: int, body: str, *headers: str, kind: str = "application/json") -> list[Any]:
    extra = "".join(f"{header}\r\n" for header in headers)
    return ["s", f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(body.encode())}\r\n{extra}\r\n{body}"]


OK = answer(200, OK_BODY)


def event(text: str, model: str = "m1") -> str:
    head = f'"id":"c1","object":"chat.completion.chunk","created":1,"model":"{model}"'
    return f'data: {{{head},"choices":[{{"index":0,"delta":{{"content":"{text}"}},"finish_reason":null}}]}}\n\n'


FIN_TEXT = event("x").replace('{"content":"x"}', "{}").replace('"finish_reason":null', '"finish_reason":"stop"')


def E(text: str) -> list[Any]:
    return ["c", event(text)]


FIN = ["c", FIN_TEXT]
DONE = ["c", "data: [DONE]\n\n"]
GOOD_S = [SH, E("a"), E("b"), E("c"), FIN, DONE, END]


def _chunk(text: str) -> bytes:
    data = text.encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


def _gone(sock: socket.socket) -> bool:
    ready = select.poll()  # which knows descriptors of any number
    ready.register(sock, select.POLLIN)
    try:
        return bool(ready.poll(0)) and sock.recv(1, socket.MSG_PEEK) == b""
    except OSError:
        return True


class Engine:
    """Plays `script` (a list of steps, or by "METHOD /path") to every request, and keeps a log of what it saw.

    Steps: ["s", text] raw, ["x", hex] raw bytes, ["c", text] one chunk, ["drip", ms, text] raw, a byte per write,
    ["rep", count, ms, text] chunks, ["w", ms] waits and notices a hang-up, ["close"], ["rst"], ["hold", event] waits for a
    threading.Event.

    `GET /metrics` plays `metrics` and is logged as a "poll", `GET /v1/models` plays `models` and is not logged; a connection that
    carries these leaves nothing else in the log.
    """

    def __init__(self, port: int = 0) -> None:
        self._listener = socket.create_server(("127.0.0.1", port), backlog=512)
        self.port: int = self._listener.getsockname()[1]
        self.script: Any = [OK]
        self.metrics: list[Any] = [answer(404, "{}")]
        self.models: list[Any] = [answer(404, "{}")]
        self.once: list[list[Any]] = []  # scripts for the next requests, used up one by one
        self.read_body = True
        self.log: list[dict[str, Any]] = []
        self._numbers = itertools.count(1)  # of connections, in the order of their first words
        self._open: set[socket.socket] = set()
        self._closing = False
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def say(self, **what: Any) -> None:
        self.log.append({"t": time.monotonic(), **what})

    @property
    def requests(self) -> list[dict[str, Any]]:
        return [entry for entry in list(self.log) if entry["ev"] == "request"]

    def count(self, kind: str) -> int:
        return sum(entry["ev"] == kind for entry in list(self.log))

    def _accept(self) -> None:
        while not self._closing:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._open.add(sock)
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _read(self, sock: socket.socket) -> tuple[bytes, bytes, bool]:
        data = b""
        while b"\r\n\r\n" not in data:
            more = sock.recv(65536)
            if not more:
                return data, b"", False
            data += more
        head, _, body = data.partition(b"\r\n\r\n")
        length = next((int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0)
        parts, size = [body], len(body)
        while size < length and self.read_body:
            more = sock.recv(1 << 20)
            if not more:
                return head, b"".join(parts), False
            parts.append(more)
            size += len(more)
        return head, b"".join(parts), True

    def _serve(self, sock: socket.socket) -> None:
        number = 0
        polls = False
        try:
            while True:
                head, body, whole = self._read(sock)
                if polls and not whole:
                    return
                if head.startswith(b"GET /metrics "):
                    polls = True
                    self.say(ev="poll", head=head.decode("latin-1"))
                    if not self._play(sock, number, self.metrics):
                        return
                    continue
                if head.startswith(b"GET ") and head.partition(b"\r\n")[0].endswith(b"/v1/models HTTP/1.1"):
                    polls = True
                    if not self._play(sock, number, self.models):
                        return
                    continue
                number = number or next(self._numbers)
                if not whole:
                    self.say(conn=number, ev="short_request" if head else "peer_closed")
                    return
                line = head.split(b"\r\n")[0].decode("latin-1")
                method, path, _ = line.split(" ", 2)
                self.say(conn=number, ev="request", line=line, path=path, head=head.decode("latin-1"), body=body)
                if self.once:
                    steps = self.once.pop(0)
                elif isinstance(self.script, dict):
                    steps = self.script.get(f"{method} {path}", self.script.get("*", []))
                else:
                    steps = self.script
                if not self._play(sock, number, steps):
                    return
        except OSError as err:
            if not polls:
                self.say(conn=number, ev="peer_closed", why=type(err).__name__)
        finally:
            self._open.discard(sock)
            sock.close()
            if not polls:
                self.say(conn=number, ev="closed")

    def _play(self, sock: socket.socket, number: int, steps: list[Any]) -> bool:
        for step, *rest in steps:
            if step == "s":
                sock.sendall(rest[0].encode())
            elif step == "x":
                sock.sendall(bytes.fromhex(rest[0]))
            elif step == "c":
                sock.sendall(_chunk(rest[0]))
            elif step == "drip":
                for byte in rest[1].encode():
                    sock.sendall(bytes([byte]))
                    time.sleep(rest[0] / 1000)
            elif step == "rep":
                count, pause_ms, text = rest
                for index in range(count):
                    if _gone(sock):
                        self.say(conn=number, ev="peer_closed", at=index)
                        return False
                    sock.sendall(_chunk(text.replace("{i}", str(index))))
                    self.say(conn=number, ev="sent", at=index)
                    time.sleep(pause_ms / 1000)
            elif step == "w":
                end = time.monotonic() + rest[0] / 1000
                while time.monotonic() < end:
                    if _gone(sock):
                        self.say(conn=number, ev="peer_closed")
                        return False
                    time.sleep(0.01)
            elif step == "hold":
                rest[0].wait(WAIT_S)
            elif step == "close":
                return False
            elif step == "rst":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return False
            else:
                raise AssertionError(step)
        return True

    def hang_up(self) -> None:
        """Ends every connection that is open now."""
        for sock in list(self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.hang_up()
        self._thread.join(WAIT_S)


class Answer:
    """A parsed answer: `body` is without the chunked coding, `whole` says whether its framing came to its end."""

    def __init__(self, status: int, headers: list[tuple[str, str]], body: bytes, whole: bool, interim: list[int]) -> None:
        self.status = status
        self.headers = headers
        self.body = body
        self.whole = whole
        self.interim = interim

    def get(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        found = self.json()["error"]
        assert isinstance(found, dict)
        assert isinstance(found["message"], str)
        assert found["message"]
        return found

    @property
    def events(self) -> list[str]:
        return [part for part in self.body.decode().split("\n\n") if part]


class Client:
    """One raw connection to the router."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.sock = socket.create_connection(address, timeout=WAIT_S)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = b""

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, *, reset: bool = False) -> None:
        if reset:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def more(self) -> bytes:
        try:
            return self.sock.recv(65536)
        except ConnectionResetError:
            return b""

    def until(self, mark: bytes) -> bytes:
        """Reads until `mark` has come; what came with it stays for the next read."""
        while mark not in self._buffer:
            data = self.more()
            assert data, f"the connection ended before {mark!r}: {self._buffer!r}"
            self._buffer += data
        end = self._buffer.index(mark) + len(mark)
        found, self._buffer = self._buffer[:end], self._buffer[end:]
        return found

    def count(self, mark: bytes, number: int) -> bytes:
        found = b""
        for _ in range(number):
            found += self.until(mark)
        return found

    def rest(self) -> bytes:
        """All that comes until the router closes."""
        found, self._buffer = self._buffer, b""
        while data := self.more():
            found += data
        return found

    def answer(self, *, head: bool = False) -> Answer:
        interim: list[int] = []
        while True:
            text = self.until(b"\r\n\r\n").decode("latin-1")
            lines = text.split("\r\n")
            status = int(lines[0].split(" ")[1])
            if status >= 200:
                break
            interim.append(status)
        headers = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines[1:] if line)]
        found = Answer(status, headers, b"", True, interim)
        if head or status == 204:
            return found
        if (found.get("transfer-encoding") or "") == "chunked":
            found.body, found.whole = self._chunks()
        elif (length := found.get("content-length")) is not None:
            found.body = self._exactly(int(length))
            found.whole = len(found.body) == int(length)
        else:
            found.body = self.rest()
        return found

    def _exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            data = self.more()
            if not data:
                break
            self._buffer += data
        found, self._buffer = self._buffer[:size], self._buffer[size:]
        return found

    def _chunks(self) -> tuple[bytes, bool]:
        body = b""
        while True:
            while b"\r\n" not in self._buffer:
                data = self.more()
                if not data:
                    return body, False
                self._buffer += data
            line, _, self._buffer = self._buffer.partition(b"\r\n")
            size = int(line, 16)
            part = self._exactly(size + 2)
            if len(part) < size + 2:
                return body + part[:size], False
            body += part[:size]
            if size == 0:
                return body, True


def post(body: bytes, extra: str = "", *, path: str = "/v1/chat/completions", key: str = KEY, length: str | None = None) -> bytes:
    size = f"Content-Length: {len(body)}\r\n" if length is None else length
    auth = f"Authorization: Bearer {key}\r\n" if key else ""
    return f"POST {path} HTTP/1.1\r\nHost: g\r\n{auth}Content-Type: application/json\r\n{size}{extra}\r\n".encode() + body


def get(path: str, extra: str = "", *, key: str = KEY, method: str = "GET") -> bytes:
    auth = f"Authorization: Bearer {key}\r\n" if key else ""
    return f"{method} {path} HTTP/1.1\r\nHost: g\r\n{auth}{extra}\r\n".encode()


def until(condition: Callable[[], Any], what: str, within_s: float = WAIT_S) -> Any:
    """Waits for a state; says which one never came."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(0.01)
    raise AssertionError(f"never came: {what}")


def router_command(config: Path, altered: Sequence[str] = ()) -> list[str]:
    """`altered` names what of the router is not as shipped, as tests/chaos/altered.py knows it."""
    program = [str(ALTERED), *altered, "--"] if altered else ["-m", "llmgw"]
    return [sys.executable, *program, "router", "--config", str(config)]


def within(descriptors_max: int | None) -> list[str]:
    """What stands before a command line for a process that may have no more files open."""
    return [] if descriptors_max is None else ["sh", "-c", 'ulimit -n "$0" && exec "$@"', str(descriptors_max)]


FIXTURE = """
[router]
listen = "127.0.0.1:{port}"
cors_origins = ["http://app.test"]
[route]
first_byte_timeout_s = {first_byte_s}
idle_timeout_s = {idle_s}
total_timeout_s = 30
retries = 1
breaker_cooldown_s = 2
max_body_bytes = 52428800
max_header_bytes = 16384
queue_max = 10
drain_s = 3
health_interval_s = 1
{route}
[auth]
required = true
[[auth.key]]
name = "user"
key = "K"
[[auth.key]]
name = "narrow"
key = "NARROW"
models = ["m2"]
[[auth.key]]
name = "single"
key = "SINGLE"
max_parallel = 1
[[endpoint]]
id = "u1"
url = "http://127.0.0.1:{u1}"
models = ["m1", "m2", "org/Model-7B:Q4_K_M"]
aliases = {{ fast = "m1" }}
[[endpoint]]
id = "u2"
url = "http://127.0.0.1:{u2}"
models = ["m2"]
[[endpoint]]
id = "nobody"
url = "http://127.0.0.1:{dead}"
models = ["dead"]
"""


class RouterProcess:
    """A real `llmgw router` on a file."""

    def __init__(
        self,
        folder: Path,
        text: str,
        environ: dict[str, str] | None = None,
        stdout: int | None = None,
        altered: Sequence[str] = (),
        descriptors_max: int | None = None,
    ) -> None:
        self.config = folder / "router.toml"
        self.config.write_text(text)
        self.out = folder / "stdout"
        self.err = folder / "stderr"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [*within(descriptors_max), *router_command(self.config, altered)],
                stdout=out if stdout is None else stdout,
                stderr=err,
                env={**os.environ, **(environ or {})},
            )
        found = until(self._listening, "the router listens")
        host, _, port = found.rpartition(":")
        self.address = (host, 0 if found.startswith("unix:") else int(port))

    def _listening(self) -> str | None:
        assert self.process.poll() is None, self.err.read_text()
        for line in self.err.read_text().splitlines():
            if "event=listening" in line:
                return line.split("address=")[1].split(" ")[0]
        return None

    def client(self) -> Client:
        return Client(self.address)

    def ask(self, data: bytes) -> Answer:
        with self.client() as client:
            client.send(data)
            return client.answer()

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        text = self.ask(get("/metrics")).body.decode()
        rows = [line for line in text.splitlines() if line.startswith((name + " ", name + "{"))]
        assert rows, f"no metric {name}"
        return sum(float(row.rsplit(" ", 1)[1]) for row in rows)

    def metric_of(self, name: str, labels: str) -> float:
        text = self.ask(get("/metrics")).body.decode()
        return next(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(f"{name}{{{labels}}} "))

    def at_rest(self) -> None:
        until(lambda: self.metric("llmgw_inflight") == 0, "nothing in flight")

    def log_lines(self, mark: str = "") -> list[str]:
        return [line for line in self.out.read_text().splitlines() if mark in line]

    def log_line(self, mark: str) -> str:
        found: list[str] = until(lambda: self.log_lines(mark), f"a log line with {mark}")
        assert len(found) == 1, found
        return found[0]

    def told(self, mark: str) -> list[str]:
        """Lines of its other log."""
        return [line for line in self.err.read_text().splitlines() if mark in line]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def rss_kib(self) -> int:
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1])
        raise AssertionError("no VmRSS")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(WAIT_S)


class Stage:
    """Two engines, a port where nobody listens, and a router before them, with the settings of cases.md 16.0.

    `route` is more of `[route]`; `change` says which texts of the file are others.
    """

    def __init__(
        self,
        folder: Path,
        *,
        first_byte_s: float = 2,
        idle_s: float = 3,
        route: str = "",
        workers: int = 1,
        change: Mapping[str, str] = MappingProxyType({}),
        altered: Sequence[str] = (),
        descriptors_max: int | None = None,
    ) -> None:
        self.u1 = Engine()
        self.u2 = Engine()
        self._dead = socket.socket()  # bound and never listening: a connect is refused, and nobody else gets the port
        self._dead.bind(("127.0.0.1", 0))
        self.text = FIXTURE.format(
            port=0,
            u1=self.u1.port,
            u2=self.u2.port,
            dead=self._dead.getsockname()[1],
            first_byte_s=first_byte_s,
            idle_s=idle_s,
            route=route,
        ).replace("[route]\n", f"workers = {workers}\n[route]\n", 1)
        for old, new in change.items():
            assert old in self.text, old
            self.text = self.text.replace(old, new)
        self.router = RouterProcess(folder, self.text, altered=altered, descriptors_max=descriptors_max)

    def close(self) -> None:
        self.router.close()
        self.u1.close()
        self.u2.close()
        self._dead.close()


@contextlib.contextmanager
def staged(folder: Path, **settings: Any) -> Iterator[Stage]:
    stage = Stage(folder, **settings)
    try:
        yield stage
    finally:
        stage.close()
