"""Stands in for a program under engine `command`: `--port P --names A,B`, its secret from LLMGW_API_KEY, no counters."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from scripted import Answer, Server, Work, as_json, load, say, text_of

ANSWERED = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank", "/v1/score")


class AnyDialect:
    def __init__(self, key: str, names: list[str]) -> None:
        self.key = key
        self.names = names
        self.work = Work()

    def public(self, path: str) -> bool:
        return path == "/health"

    def loading(self) -> Answer:
        return as_json(503, {"error": "loading"})

    def refused(self) -> Answer:
        return as_json(401, {"error": "key"})

    def missing(self) -> Answer:
        return as_json(404, {"error": "path"})

    def get(self, path: str) -> Answer | None:
        if path == "/v1/models":
            return as_json(200, {"object": "list", "data": [{"id": name, "object": "model"} for name in self.names]})
        return as_json(200, {}) if path == "/health" else None

    def post(self, path: str, body: dict[str, Any]) -> Answer | None:
        if path not in ANSWERED:
            return None
        if body.get("model") not in self.names:
            return as_json(404, {"error": f"no model {body.get('model')}"})
        self.work.do(text_of(body))
        return as_json(200, {"model": body["model"], "choices": []})


def main() -> None:
    words = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    unknown = set(words) - {"--port", "--names"}
    if unknown:
        say(f"unknown option {min(unknown)}")
        sys.exit(2)
    server = Server(AnyDialect(os.environ["LLMGW_API_KEY"], words["--names"].split(",")), "127.0.0.1", int(words["--port"]))
    trouble = load()
    if trouble:
        say(trouble)
        sys.exit(1)
    server.up.set()
    threading.Event().wait()


if __name__ == "__main__":
    main()
