"""A small HTTP server that answers as it is told: what ctl is tested against. It keeps every request it got."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import attrs

TOKEN = "t0ken-of-the-test"


@attrs.frozen
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: Any


@attrs.frozen
class Says:
    """One answer. `raw` replaces the JSON; `hang_up` closes the connection without any."""

    body: Any = None
    status: int = 200
    headers: dict[str, str] = attrs.field(factory=dict)
    raw: bytes | None = None
    hang_up: bool = False


class FakeApi:
    """`answers` maps "METHOD /path" to what is said, in turn; the last one repeats. Anything else is a 404 of the API's shape."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.answers: dict[str, list[Says | Callable[[Request], Says]]] = {}
        self.url = ""
        self.unauthenticated = error(401, "this token is not known", "unauthenticated")

    def on(self, what: str, *answers: Any) -> None:
        self.answers[what] = [answer if isinstance(answer, Says) or callable(answer) else Says(answer) for answer in answers]

    def answer(self, request: Request) -> Says:
        self.requests.append(request)
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return self.unauthenticated
        found = self.answers.get(f"{request.method} {request.path}") or self.answers.get(
            f"{request.method} {request.path.partition('?')[0]}"
        )
        if not found:
            return error(404, f"there is no {request.path}", "not_found")
        answer = found[0] if len(found) == 1 else found.pop(0)
        return answer if isinstance(answer, Says) else answer(request)


def error(status: int, message: str, code: str, **headers: str) -> Says:
    return Says(
        {"error": {"message": message, "type": code, "param": None, "code": code}},
        status,
        {k.replace("_", "-"): v for k, v in headers.items()},
    )


@contextmanager
def fake_api() -> Iterator[FakeApi]:
    api = FakeApi()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            raw = self.rfile.read(length)
            headers = {name.lower(): value for name, value in self.headers.items()}
            says = api.answer(Request(self.command, self.path, headers, json.loads(raw) if raw else None))
            self.close_connection = True
            if says.hang_up:
                return
            data = says.raw if says.raw is not None else json.dumps(says.body).encode()
            self.send_response_only(says.status)
            for name, value in says.headers.items():
                self.send_header(name, value)
            if "content-type" not in {name.lower() for name in says.headers}:
                self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_one

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    api.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield api
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
