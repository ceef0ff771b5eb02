"""A fake engine for tests of the agent: `eng.py --port P [--host H]`, its behaviour from FAKE_MODE, a comma list.

`crash`, `spew` (2 MiB of output), `deaf` (ignores TERM), `fork` (two children in sessions of their own that ignore TERM),
`hide` (one such child without an environment), `early` (/v1/models good before /health), `ready=SECONDS`,
`health=SECONDS` (slow /health), `hang=N` (no answer after N good ones), `err=N` (500 after N good ones), `key` (asks for
LLMGW_API_KEY), `after=SECONDS` (before the crash), `colours` (its last line steers a terminal).
"""

from __future__ import annotations

import http.server
import os
import signal
import subprocess
import sys
import time

MODES = [mode for mode in os.environ.get("FAKE_MODE", "").split(",") if mode]
STARTED_S = time.monotonic()
ANSWER = (
    b'{"id":"c1","object":"chat.completion","created":1,"model":"m1","choices":'
    b'[{"index":0,"message":{"role":"assistant","content":"ok"},"finish_reason":"stop"}]}'
)
DEAF_CHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(900)"


def value(name: str, default: float = 0.0) -> float:
    return next((float(mode.partition("=")[2]) for mode in MODES if mode.startswith(f"{name}=")), default)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    asked = 0

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        up = time.monotonic() - STARTED_S >= value("ready")
        if self.path == "/health":
            time.sleep(value("health"))
            self.answer(200 if up else 503, b"{}")
        else:
            self.answer(200 if up or "early" in MODES else 503, b'{"object":"list","data":[{"id":"m1","object":"model"}]}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if "key" in MODES and self.headers.get("Authorization") != f"Bearer {os.environ['LLMGW_API_KEY']}":
            self.answer(401, b"{}")
            return
        Handler.asked += 1
        if Handler.asked > value("hang", 1e9):
            time.sleep(900)
        self.answer(500 if Handler.asked > value("err", 1e9) else 200, ANSWER)

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    port = int(sys.argv[sys.argv.index("--port") + 1])
    if "crash" in MODES:
        time.sleep(value("after", 1.0))
        sys.stderr.write("\x1b]0;mine\x07\x1b[31mCUDA error: fake\x1b[0m\n" if "colours" in MODES else "CUDA error: fake\n")
        sys.exit(1)
    if "spew" in MODES:
        for _ in range(1024):
            for descriptor in (1, 2):
                os.write(descriptor, b"x" * 1023 + b"\n")
    if "deaf" in MODES:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "hide" in MODES:
        subprocess.Popen([sys.executable, "-c", DEAF_CHILD], start_new_session=True, env={})
    if "fork" in MODES:
        for _ in range(2):
            subprocess.Popen([sys.executable, "-c", DEAF_CHILD], start_new_session=True)
    print("serving", flush=True)
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
