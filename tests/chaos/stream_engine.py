"""A small engine for tests: `--port P`. `/health` is 200; a chat answers at once, or streams one event every 50 ms for `max_tokens`.

With `--say TEXT`, as often as there are turns, a stream holds the words of the turn's text instead.
"""

from __future__ import annotations

import http.server
import json
import os
import sys
import time
from itertools import pairwise
from typing import Any

port = int(sys.argv[sys.argv.index("--port") + 1])
key = os.environ.get("LLMGW_API_KEY", "")
says = [text for flag, text in pairwise(sys.argv) if flag == "--say"]


def words(asked: dict[str, Any]) -> list[str]:
    if says:
        turn = sum(message["role"] == "user" for message in asked["messages"])
        return [f"{word} " for word in says[(turn - 1) % len(says)].split(" ")]
    return [f"{os.getpid()}/{number} " for number in range(int(asked.get("max_tokens", 10)))]


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.answer(200, {"pid": os.getpid()})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))))
        if key and self.headers.get("authorization") != f"Bearer {key}":
            self.answer(401, {"error": {"message": "wrong key"}})
            return
        choice = {"index": 0, "message": {"role": "assistant", "content": f"pid {os.getpid()}"}, "finish_reason": "stop"}
        if not asked.get("stream"):
            self.answer(200, {"id": "c", "object": "chat.completion", "created": 1, "model": asked["model"], "choices": [choice]})
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for word in words(asked):
            delta = {"index": 0, "delta": {"content": word}, "finish_reason": None}
            self.chunk({"id": "c", "object": "chat.completion.chunk", "created": 1, "model": asked["model"], "choices": [delta]})
            time.sleep(0.05)
        end = {"index": 0, "delta": {}, "finish_reason": "stop"}
        self.chunk({"id": "c", "object": "chat.completion.chunk", "created": 1, "model": asked["model"], "choices": [end]})
        self.wfile.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    def chunk(self, event: dict[str, Any]) -> None:
        data = f"data: {json.dumps(event)}\n\n".encode()
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def log_message(self, *args: Any) -> None:
        return


if __name__ == "__main__":
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
