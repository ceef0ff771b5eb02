"""An engine whose every answer follows from the request alone: `--port P`. Whoever asked knows each byte that must come back.

`/health` is 200. A chat is answered at once, or as a stream of `max_tokens` events, one each `STEP_S`. The last message is the
seed of the text. Plain sockets and a thread per connection: it must keep up with some hundred requests a second beside
everything else on two cores.
"""

from __future__ import annotations

import hashlib
import json
import os
import socketserver
import sys
import time
from collections.abc import Iterator
from typing import Any

STEP_S = 0.1
WORDS = 12  # of an answer that is no stream


def word(seed: str, number: int) -> str:
    return hashlib.sha256(f"{seed}/{number}".encode()).hexdigest()[:16]


def whole(model: str, seed: str) -> bytes:
    """The body of an answer that is no stream."""
    message = {"role": "assistant", "content": " ".join(word(seed, number) for number in range(WORDS))}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return json.dumps({"id": seed, "object": "chat.completion", "created": 1, "model": model, "choices": [choice]}).encode()


def events(model: str, seed: str, count: int) -> Iterator[bytes]:
    """The pieces of a stream's body, the end among them."""
    for number in range(count):
        yield _event(model, seed, {"delta": {"content": word(seed, number)}, "finish_reason": None})
    yield _event(model, seed, {"delta": {}, "finish_reason": "stop"}) + b"data: [DONE]\n\n"


def _event(model: str, seed: str, choice: dict[str, Any]) -> bytes:
    body = {"id": seed, "object": "chat.completion.chunk", "created": 1, "model": model, "choices": [{"index": 0, **choice}]}
    return f"data: {json.dumps(body)}\n\n".encode()


class Handler(socketserver.StreamRequestHandler):
    disable_nagle_algorithm = True

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
            self._send(200, whole(asked["model"], seed))
            return
        self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for piece in events(asked["model"], seed, asked["max_tokens"]):
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            time.sleep(STEP_S)
        self.wfile.write(b"0\r\n\r\n")

    def _send(self, status: int, body: bytes) -> None:
        head = f"HTTP/1.1 {status} OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self.wfile.write(head.encode() + body)


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 256


if __name__ == "__main__":
    with Server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler) as server:
        server.serve_forever()
