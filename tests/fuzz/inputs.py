"""Where fuzzing begins: inputs of each target that mean something, and the words that its grammar is made of."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

from llmgw.settings.example import example_text, uncommented
from tests.router import test_bodies, test_http, test_splits
from tests.router.fakes import CHAT, CHAT_S, FIN_TEXT, OK_BODY, event
from tests.router.field import test_engines, test_events, test_requests

CORPUS: Final = Path(__file__).parent / "corpus"  # a folder per target: inputs that once failed, and stay
SIZE_MAX: Final = 4000  # bytes of an input; longer ones mostly repeat themselves


def _settings() -> list[bytes]:
    text = uncommented(example_text())
    return [part.encode() for part in text.split("\n\n") if part.strip()]


def _scripted(steps: list[list[object]]) -> bytes:
    """What an engine's script writes, all at once."""
    raw = b""
    for step in steps:
        if step[0] == "s":
            raw += str(step[1]).encode()
        elif step[0] == "x":
            raw += bytes.fromhex(str(step[1]))
    return raw


SEEDS: Final[dict[str, list[bytes]]] = {
    "requests": [
        *test_splits.REQUESTS,
        *(data for data, _ in test_http.FRAMINGS.values()),
        *(data for data, _ in test_requests.REFUSED.values()),
        *test_requests.TAKEN.values(),
    ],
    "answers": [*test_splits.ANSWERS, *map(_scripted, [*test_engines.NO_ANSWERS.values(), *test_engines.ODD_ANSWERS.values()])],
    "events": [
        *("".join(first.texts).encode() for first in test_events.FIRST.values()),
        *("".join(ending.texts).encode() for ending in test_events.ENDINGS.values()),
        (event("a") + FIN_TEXT).replace("\n", "\r\n").encode(),
        (event("北😀") + FIN_TEXT).replace("\n", "\r").encode(),
    ],
    "bodies": [
        CHAT,
        CHAT_S,
        *(body for body, _, _ in test_bodies.REFUSED.values()),
        *test_bodies.PASSED.values(),
        *(body for body, _ in test_requests.BODIES.values()),
        *test_requests.KEPT.values(),
    ],
    "prompts": [
        CHAT,
        b'{"model":"m1","messages":[{"role":"user","content":[{"type":"text","text":"secret"},{"type":"image_url","image_url":{"url":"x"}}]}]}',
        b'{"model":"m1","input":[{"role":"user","content":[{"type":"input_text","text":"hi"},{"type":"input_image"}]}],"max_output_tokens":5}',
        b'{"model":"m1","system":[{"type":"text","text":"gr\\u00f6\\u00dfe"}],"messages":[],"max_tokens":1e3}',
        b'{"model":"m1","prompt":[[1,2,3]],"n_predict":-1,"input":["a","b"],"instructions":"x","max_tokens":"7"}',
        b'{"model":"m1","messages":[{},{},{},{}],"tools":[{"function":{"description":"hi"}}],"x":"\\ud800"}',
    ],
    "renames": [
        OK_BODY.encode(),
        *(event(text)[6:].strip().encode() for text in ("a", '\\"model\\":\\"x\\"')),
        b'{"response":{"model":"x"}}',
    ],
    "settings": _settings(),
}
WORDS: Final[dict[str, list[bytes]]] = {
    "requests": [
        b"\r\n", b"\n", b"\r", b" ", b"\t", b":", b"Content-Length: ", b"Transfer-Encoding: chunked\r\n", b"Host: g\r\n", b"0\r\n\r\n",
        b"HTTP/1.1", b"HTTP/1.0", b"GET / ", b"POST / ", b"\r\n\r\n", b"5", b"1a\r\n", b";", b",", b"\0", b"\xff", b"+", b"-", b"0x",
        b"Expect: 100-continue\r\n", b"Connection: close\r\n", b"http://g", b"chunked", b"identity",
    ],
    "answers": [
        b"\r\n", b"\n", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 100 X\r\n\r\n", b"HTTP/1.0 ", b"Content-Length: 2\r\n", b"204", b"304", b"101",
        b"Transfer-Encoding: chunked\r\n", b"0\r\n\r\n", b"2\r\n{}\r\n", b"Connection: close\r\n", b"\r\n\r\n", b"{}", b"\0", b"099",
        b" ", b"0\r\nX: y\r\n\r\n",
    ],
    "events": [
        b"\r\n", b"\n", b"\r", b"\n\n", b"\r\r", b"\r\n\r\n", b"data:", b"data: ", b"data", b"event: ", b"event: error\n", b": ",
        b"id: 1", b"error:", b'{"error":{}}', b'{"error":"x"}', b"[DONE]", b'"finish_reason":"stop"', b"\xef\xbb\xbf", b"\0",
        b'"type":"error"', b" ",
    ],
    "bodies": [
        b'"model"', b'"mod\\u0065l"', b'"stream"', b"true", b"null", b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b'"m1"', b"1e999",
        b"-", b"\\ud800", b"\\u00", b"\\u006d", b"\xef\xbb\xbf", b"\xff", b"\xc3\xa9", b" ", b"\n", b"\0", b'"messages"', b"NaN",
        b'"stream_options"', b'"model":"x",', b'"mod\\u0065l":"x",',
    ],
    "prompts": [
        b'"messages":', b'"input":', b'"prompt":', b'"content":', b'"text":', b'"type":', b'"image_url"', b'"max_tokens":', b"[", b"]",
        b"{", b"}", b",", b":", b'"', b"\\", b"1e999", b"-1", b"null", b"true", b'"secret"', b"\\u0073", b"\\ud800",
        b'"max_\\u0074okens":9', b"\xc3\xb6", b'"system":', b'"n_predict":', b'"tools":',
    ],
    "renames": [
        b'"model"', b'"x"', b"{", b"}", b"[", b"]", b",", b":", b"null", b'"response":', b'"message":', b"\\", b'"', b" ", b"\\u006d",
        b'"model":"x",',
    ],
    "settings": [
        b"=", b"[", b"]", b"[[", b"]]", b'"', b".", b"\n", b"1", b"-1", b"1e999", b"nan", b"true", b"{}", b"[]", b"2030-01-01", b"\'\'\'",
        b"\\u0000", b"\xff", b"#", b"model", b"endpoint", b"auth.key", b"route", b",", b"a = 1", b"\\uD800", b"0x", b"_",
    ],
}  # fmt: skip


def kept(target: str) -> list[bytes]:
    """Inputs that once failed."""
    return [path.read_bytes() for path in sorted((CORPUS / target).glob("*"))]


def mutated(target: str, rng: random.Random) -> bytes:
    """A seed with a few things done to it that a seed of its kind is sensitive to."""
    seeds, words = SEEDS[target], WORDS[target]
    data = bytearray(rng.choice(seeds)[:SIZE_MAX])
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(data) + 1)
        what = rng.randrange(7)
        if what <= 1:
            data[at:at] = rng.choice(words)
        elif what == 2:
            data[at : at + rng.randrange(1, 8)] = b""
        elif what == 3 and at < len(data):
            data[at] = rng.randrange(256)
        elif what == 4:
            data[at : at + rng.randrange(1, 4)] = rng.choice(words)
        elif what == 5:
            other = rng.choice(seeds)[:SIZE_MAX]
            data[at:] = other[rng.randrange(len(other) + 1) :]
        else:
            data[at:at] = data[at : at + rng.randrange(1, 40)]
    return bytes(data[:SIZE_MAX])
