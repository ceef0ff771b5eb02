"""An engine whose every answer follows from the request alone: `--port P`. Whoever asked knows each byte that must come back.

`/health` is 200. A chat is answered at once, or as a stream of `max_tokens` events, one each `STEP_S` (`--step` seconds). The last
message is the seed of the text. With `--name N` each answer says in `system_fingerprint` who gave it; with `--size B` each event of a
stream holds so many bytes of text or a few more, for streams that must be heavy rather than long. Plain sockets and a thread per
connection: it must keep up with some hundred requests a second beside everything else on two cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import socketserver
import time
from collections.abc import Iterator
from typing import Any

STEP_S = 0.1
WORDS = 12  # of an answer that is no stream
NAME = re.compile(rb'"system_fingerprint": "([^"]*)"')


def word(seed: str, number: int) -> str:
    return hashlib.sha256(f"{seed}/{number}".encode()).hexdigest()[:16]


def whole(model: str, seed: str, name: str = "") -> bytes:
    """The body of an answer that is no stream."""
    message = {"role": "assistant", "content": " ".join(word(seed, number) for number in range(WORDS))}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return _body("chat.completion", model, seed, choice, name)


def events(model: str, seed: str, count: int, name: str = "", size: int = 0) -> Iterator[bytes]:
    """The pieces of a stream's body, the end among them."""
    for number in range(count):
        text = word(seed, number)
        yield _event(model, seed, {"delta": {"content": text * max(1, -(-size // len(text)))}, "finish_reason": None}, name)
    yield _event(model, seed, {"delta": {}, "finish_reason": "stop"}, name) + b"data: [DONE]\n\n"


def name_in(answer: bytes) -> str:
    """Who gave this answer, or the beginning of a stream; "" when it does not say."""
    found = NAME.search(answer)
    return found.group(1).decode() if found else ""


def _event(model: str, seed: str, choice: dict[str, Any], name: str) -> bytes:
    return b"data: " + _body("chat.completion.chunk", model, seed, {"index": 0, **choice}, name) + b"\n\n"


def _body(kind: str, model: str, seed: str, choice: dict[str, Any], name: str) -> bytes:
    named = {"system_fingerprint": name} if name else {}
    return json.dumps({"id": seed, "object": kind, "created": 1, "model": model, **named, "choices": [choice]}).encode()


class Handler(socketserver.StreamRequestHandler):
    disable_nagle_algorithm = True
    server: Server

    def handle(self) -> None:
        try:
            while self._one():
                pass
        except ConnectionError:  # whoever asked has gone
            return

    def _one(self) -> bool:
        """One request; False at the end of the connection."""
        line = self.rfile.readline()
        if not line:
            return False
        headers = {}
        while (header := self.rfile.readline()) not in (b"\r\n", b""):
            name, _, value = header.partition(b":")
            headers[name.strip().lower()] = value.strip()
        body = self.rfile.read(int(headers.get(b"content-length", b"0")))
        if line.startswith(b"GET "):
            self._send(200, b"{}")
        elif headers.get(b"authorization", b"").decode() != f"Bearer {os.environ['LLMGW_API_KEY']}":
            self._send(401, b'{"error":{"message":"wrong key"}}')
        else:
            self._chat(json.loads(body))
        return True

    def _chat(self, asked: dict[str, Any]) -> None:
        seed = asked["messages"][-1]["content"]
        if not asked.get("stream"):
            self._send(200, whole(asked["model"], seed, self.server.name))
            return
        self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for piece in events(asked["model"], seed, asked["max_tokens"], self.server.name, self.server.size):
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            time.sleep(self.server.step_s)
        self.wfile.write(b"0\r\n\r\n")

    def _send(self, status: int, body: bytes) -> None:
        head = f"HTTP/1.1 {status} OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self.wfile.write(head.encode() + body)


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, port: int, step_s: float, size: int, name: str) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.step_s, self.size, self.name = step_s, size, name


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--port", type=int, required=True)
    options.add_argument("--step", type=float, default=STEP_S)
    options.add_argument("--size", type=int, default=0)
    options.add_argument("--name", default="")
    options.add_argument("--mark", default="")
    given = options.parse_args()
    with Server(given.port, given.step, given.size, given.name) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
