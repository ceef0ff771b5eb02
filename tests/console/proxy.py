"""A reverse proxy as many run one: it answers below one path, takes that path away, and passes streams on as they come."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import re
import threading
from collections.abc import Iterator


class Proxy(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, upstream: str, prefix: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.upstream, self.prefix = upstream, prefix
        self.seen: list[tuple[str, str, int]] = []
        self.cut = ""  # an expression for paths below the prefix whose requests get no answer but a closed connection
        self.address = f"127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def pass_on(self) -> None:
        prefix = self.server.prefix
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.path != prefix and not self.path.startswith(f"{prefix}/"):
            self.server.seen.append((self.command, self.path, 404))
            self.send_error(404)
            return
        if self.server.cut and re.match(self.server.cut, self.path.removeprefix(prefix)):
            self.server.seen.append((self.command, self.path, 0))
            self.close_connection = True
            return
        upstream = http.client.HTTPConnection(self.server.upstream, timeout=60)
        with contextlib.closing(upstream), contextlib.suppress(OSError):
            kept = {name: value for name, value in self.headers.items() if name.lower() not in ("connection", "host")}
            upstream.request(self.command, self.path.removeprefix(prefix) or "/", body, {**kept, "connection": "close"})
            answer = upstream.getresponse()
            self.server.seen.append((self.command, self.path, answer.status))
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("connection", "transfer-encoding", "date", "server"):
                    self.send_header(name, value)
            self.send_header("connection", "close")
            self.end_headers()
            self.close_connection = True
            while data := answer.read1(65536):
                self.wfile.write(data)
                self.wfile.flush()

    do_GET = do_POST = do_DELETE = do_PUT = pass_on

    def log_message(self, *args: object) -> None:
        return


@contextlib.contextmanager
def stripping_proxy(upstream: str, prefix: str) -> Iterator[Proxy]:
    with Proxy(upstream, prefix) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(10)
