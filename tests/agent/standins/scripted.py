"""What the stand-ins for engines share: an HTTP server that loads, asks for its key, works, and misbehaves when it is told to.

How it behaves is in STANDIN, a JSON object: `load_s` (until it is up), `fail` (it cannot load), `deaf` (it ignores the stop signal),
`fork` (two children in sessions of their own that ignore it), `journal` (a file that gets a line per request). What a client says
does the rest: a text with `crawl` is worked on for CRAWL_S, one with `stall` gets a slot and never moves again, and one with `wedge`
stops the engine's loop, so that even its counters are not told any more. One request is worked on at a time.
"""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any, Protocol

SCRIPT: dict[str, Any] = json.loads(os.environ.get("STANDIN", "{}"))
CRAWL_S = 3.0
STEP_S = 0.05
FOREVER_S = 900.0
DEAF_CHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(900)"


class Work:
    """What the engine is doing, and what it counts."""

    def __init__(self) -> None:
        self.slot = threading.Lock()
        self.count = threading.Lock()
        self.waiting = 0
        self.working = 0
        self.steps = 0
        self.answers = 0
        self.wedged = threading.Event()

    def do(self, text: str) -> None:
        """One piece of work, when its turn has come."""
        with self.count:
            self.waiting += 1
        with self.slot:
            with self.count:
                self.waiting -= 1
                self.working += 1
            if "wedge" in text:
                self.wedged.set()
            if "stall" in text or "wedge" in text:
                time.sleep(FOREVER_S)
            until_s = time.monotonic() + (CRAWL_S if "crawl" in text else 0.0)
            while True:
                with self.count:
                    self.steps += 1
                if time.monotonic() >= until_s:
                    break
                time.sleep(STEP_S)
            with self.count:
                self.working -= 1
                self.answers += 1

    def held(self) -> None:
        """What the engine's loop answers is not answered once that is stuck."""
        if self.wedged.is_set():
            time.sleep(FOREVER_S)


Answer = tuple[int, str, str]  # status, type, text


def as_json(status: int, value: object) -> Answer:
    return status, "application/json; charset=utf-8", json.dumps(value)


class Dialect(Protocol):
    """How one engine speaks."""

    key: str
    work: Work

    def public(self, path: str) -> bool: ...
    def loading(self) -> Answer: ...
    def refused(self) -> Answer: ...
    def get(self, path: str) -> Answer | None: ...
    def post(self, path: str, body: dict[str, Any]) -> Answer | None: ...
    def missing(self) -> Answer: ...


def text_of(body: dict[str, Any]) -> str:
    """Whatever a client said, in whichever field."""
    return json.dumps([body.get(name) for name in ("messages", "prompt", "input", "query", "documents", "text_1")])


class Server:
    """Listens at once, answers as loading until `up` is set."""

    def __init__(self, dialect: Dialect, host: str, port: int) -> None:
        self.up = threading.Event()
        up = self.up

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.answer(lambda: dialect.get(self.path))

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.answer(lambda: dialect.post(self.path, json.loads(raw)))

            def answer(self, ask: Any) -> None:
                allowed = not dialect.key or self.headers.get("Authorization") == f"Bearer {dialect.key}" or dialect.public(self.path)
                if not up.is_set():
                    found = dialect.loading()
                elif not allowed:
                    found = dialect.refused()
                else:
                    found = ask() or dialect.missing()
                status, kind, text = found
                journal(f"{self.command} {self.path} {status}")
                data = text.encode()
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

            def log_error(self, *_: object) -> None:
                pass

        class Quiet(http.server.ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                pass  # a prober that hangs up is no news

        self.http = Quiet((host, port), Handler)
        self.thread = threading.Thread(target=self.http.serve_forever, daemon=True)
        self.thread.start()


def journal(line: str) -> None:
    if "journal" in SCRIPT:
        with open(SCRIPT["journal"], "a", encoding="utf-8") as file:
            file.write(line + "\n")


def load() -> str:
    """Takes its time; what keeps it from loading, or nothing."""
    if SCRIPT.get("deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if SCRIPT.get("fork"):
        for _ in range(2):
            subprocess.Popen([sys.executable, "-c", DEAF_CHILD], start_new_session=True)
    time.sleep(float(SCRIPT.get("load_s", 0.0)))
    return str(SCRIPT.get("fail", ""))


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
