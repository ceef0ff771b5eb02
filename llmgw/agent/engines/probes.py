"""The smallest real request of each kind of model: what an engine must answer once before it counts as ready."""

from __future__ import annotations

import json
import struct
from typing import Final

import attrs

from llmgw.domain.model import ModelKind

_BOUNDARY: Final = "llmgw-probe-5f0c1e9a"  # no part below can hold it
_SAMPLE_RATE: Final = 16_000  # Hz; what speech models expect
_SILENCE_SAMPLES: Final = 1_600  # a tenth of a second


@attrs.frozen
class Request:
    """One POST."""

    path: str
    body: bytes
    content_type: str = "application/json"


def probe(kind: ModelKind, model: str) -> Request | None:
    """What to ask; None for kinds that only have a readiness path."""
    match kind:
        case ModelKind.CHAT:
            body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "stream": False}
            return _json("/v1/chat/completions", body)
        case ModelKind.COMPLETION:
            return _json("/v1/completions", {"model": model, "prompt": "hi", "max_tokens": 1, "stream": False})
        case ModelKind.EMBEDDING:
            return _json("/v1/embeddings", {"model": model, "input": "hi"})
        case ModelKind.RERANK:
            return _json("/v1/rerank", {"model": model, "query": "hi", "documents": ["hi"]})
        case ModelKind.SCORE:
            return _json("/v1/score", {"model": model, "text_1": "hi", "text_2": "hi"})
        case ModelKind.AUDIO:
            return _audio(model)
        case ModelKind.IMAGE:
            return _json("/v1/images/generations", {"model": model, "prompt": "a dot", "n": 1, "size": "256x256"})
        case ModelKind.OTHER:
            return None


def _json(path: str, body: object) -> Request:
    return Request(path, json.dumps(body).encode())


def _audio(model: str) -> Request:
    samples = b"\0\0" * _SILENCE_SAMPLES
    wave = b"".join(
        (
            b"RIFF", struct.pack("<I", 36 + len(samples)), b"WAVEfmt ",
            struct.pack("<IHHIIHH", 16, 1, 1, _SAMPLE_RATE, _SAMPLE_RATE * 2, 2, 16),
            b"data", struct.pack("<I", len(samples)), samples,
        )
    )  # fmt: skip
    line = f"--{_BOUNDARY}\r\n".encode()
    body = b"".join(
        (
            line, b'Content-Disposition: form-data; name="model"\r\n\r\n', model.encode(), b"\r\n",
            line, b'Content-Disposition: form-data; name="file"; filename="probe.wav"\r\nContent-Type: audio/wav\r\n\r\n', wave, b"\r\n",
            f"--{_BOUNDARY}--\r\n".encode(),
        )
    )  # fmt: skip
    return Request("/v1/audio/transcriptions", body, f"multipart/form-data; boundary={_BOUNDARY}")
