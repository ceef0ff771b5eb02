"""How llama.cpp's own server speaks, for the two stand-ins that hold it: paths, refusals, names and counters as seen of the real one."""

from __future__ import annotations

from typing import Any

import scripted
from scripted import Answer, Work, as_json, text_of


class LlamaDialect:
    def __init__(self, *, key: str, names: set[str], metrics: bool, embedding: bool, reranking: bool) -> None:
        self.key = key
        self.name = min(names)  # of several it reports whichever sorts first
        self.metrics = metrics
        self.embedding = embedding
        self.reranking = reranking
        self.work = Work()

    def public(self, path: str) -> bool:
        return path in ("/health", "/v1/health")

    def loading(self) -> Answer:
        return self.error(503, "Loading model", "unavailable_error")

    def refused(self) -> Answer:
        return self.error(401, "Invalid API Key", "authentication_error")

    def missing(self) -> Answer:
        return self.error(404, "File Not Found", "not_found_error")

    @staticmethod
    def error(code: int, message: str, kind: str) -> Answer:
        return as_json(code, {"error": {"message": message, "type": kind, "code": code}})

    def unsupported(self, what: str) -> Answer:
        return self.error(501, f"This server does not support {what}", "not_supported_error")

    def get(self, path: str) -> Answer | None:
        match path:
            case "/health" | "/v1/health":
                return as_json(200, {"status": "ok"})
            case "/v1/models" | "/models":
                return as_json(200, {"object": "list", "data": [{"id": self.name, "object": "model", "owned_by": "llamacpp"}]})
            case "/metrics" if not self.metrics:
                return self.unsupported("metrics endpoint. Start it with `--metrics`")
            case "/metrics":
                self.work.held()
                return 200, "text/plain; version=0.0.4", self.counters()
        return None

    def post(self, path: str, body: dict[str, Any]) -> Answer | None:
        match path:
            case "/v1/chat/completions":
                self.work.do(text_of(body))
                message = {"role": "assistant", "content": "ok"}
                return self.completion("chat.completion", {"index": 0, "message": message, "finish_reason": "length"})
            case "/v1/completions":
                self.work.do(text_of(body))
                return self.completion("text_completion", {"index": 0, "text": "ok", "logprobs": None, "finish_reason": "length"})
            case "/v1/embeddings" if not self.embedding:
                return self.unsupported("embeddings. Start it with `--embeddings`")
            case "/v1/embeddings":
                self.work.do(text_of(body))
                vector = {"object": "embedding", "index": 0, "embedding": [0.1, 0.2]}
                return as_json(200, {"object": "list", "model": self.name, "data": [vector]})
            case "/v1/rerank" | "/v1/reranking" | "/rerank" if not self.reranking:
                return self.unsupported("reranking. Start it with `--reranking`")
            case "/v1/rerank" | "/v1/reranking" | "/rerank":
                self.work.do(text_of(body))
                return as_json(200, {"object": "list", "model": self.name, "results": [{"index": 0, "relevance_score": 0.5}]})
        return None

    def completion(self, kind: str, choice: dict[str, Any]) -> Answer:
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return as_json(200, {"id": "chatcmpl-1", "object": kind, "created": 1, "model": self.name, "choices": [choice], "usage": usage})

    def counters(self) -> str:
        work = self.work
        rows = (
            ("prompt_tokens_total", "counter", work.answers),
            ("prompt_tokens_cached_total", "counter", 0),
            ("prompt_seconds_total", "counter", 0.1 * work.answers),
            ("tokens_predicted_total", "counter", work.answers),
            ("tokens_predicted_seconds_total", "counter", 0.1 * work.answers),
            ("n_decode_total", "counter", work.steps),
            ("n_tokens_max", "counter", 2),
            ("prompt_tokens_seconds", "gauge", 0),
            ("predicted_tokens_seconds", "gauge", 0),
            ("requests_processing", "gauge", work.working),
            ("requests_deferred", "gauge", work.waiting),
            ("n_busy_slots_per_decode", "gauge", 1),
        )
        return "".join(
            f"# HELP llamacpp:{name} x\n# TYPE llamacpp:{name} {kind}\nllamacpp:{name} {value:g}\n" for name, kind, value in rows
        )


def broken(path: str) -> str:
    """Why that file is no model; empty where it is one. The stand-ins' models begin as real ones do."""
    try:
        with open(path, "rb") as file:
            magic = file.read(4)
    except OSError:
        return f"gguf_init_from_file: failed to open GGUF file '{path}'"
    return "" if magic == b"GGUF" else f"gguf_init_from_file_ptr: invalid magic characters: '{magic!r}', expected 'GGUF'"


__all__ = ["LlamaDialect", "broken", "scripted"]
