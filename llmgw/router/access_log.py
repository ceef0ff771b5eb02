"""One line per request, built by hand: a structured logger may cost as much as the request it describes. Pure.

`time status method path model endpoint key stream bytes ttft_s total_s request_id reason`. Prompts, completions and keys never
reach it; `key` is the key's name.
"""

from __future__ import annotations

import functools
import re
import string
from datetime import UTC, datetime
from typing import Final

_PLAIN: Final = re.compile(r"[!#-<>-\[\]-~]+\Z")  # printable ASCII without a blank, a quote, an equals sign or a backslash
_PLAIN_ID: Final = string.ascii_letters.encode() + string.digits.encode() + b"._:/+@-"  # all but `=` of what an id may be made of
VALUE_MAX: Final = 256  # characters of a client's text in one line


def value(text: str) -> str:
    """A value as logfmt writes it: quoted where it has to be, bounded, on one line."""
    if not text:
        return "-"
    if len(text) > VALUE_MAX:
        text = text[:VALUE_MAX] + "…"
    if _PLAIN.match(text) is not None:
        return text
    quoted = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c >= " " and c != "\x7f" else f"\\x{ord(c):02x}" for c in quoted) + '"'


KEPT_MAX: Final = 1024  # chosen: kinds of requests of a large cluster; at most 2 MB, and mostly 300 KB
_kept: dict[tuple[str, str, str, str, str, bool], bytes] = {}  # what was written before: few kinds of requests make most lines
_last_second: tuple[int, bytes] = (-1, b"")  # the last one, as it is written


def _second(wall_s: int) -> bytes:
    global _last_second
    if wall_s != _last_second[0]:
        _last_second = (wall_s, datetime.fromtimestamp(wall_s, UTC).strftime("%Y-%m-%dT%H:%M:%S").encode())
    return _last_second[1]


@functools.lru_cache(maxsize=KEPT_MAX)  # few reasons make most lines
def _reason(text: str) -> bytes:
    return value(text).encode("utf-8", "replace")


def line(
    wall_s: float,
    status: int,
    method: str,
    path: str,
    model: str,
    endpoint: str,
    key: str,
    stream: bool,
    sent_bytes: int,
    ttft_s: float | None,
    total_s: float,
    request_id: bytes,
    reason: str,
) -> bytes:
    """The line with its line feed. Times are seconds; `ttft_s` None: no content was sent."""
    kind = (method, path, model, endpoint, key, stream)
    shown = _kept.get(kind)
    if shown is None:
        shown = (
            f"method={value(method)} path={value(path)} model={value(model)} endpoint={value(endpoint)} key={value(key)} "
            f"stream={'true' if stream else 'false'}"
        ).encode("utf-8", "replace")
        if len(path) <= VALUE_MAX:
            if len(_kept) >= KEPT_MAX:
                _kept.clear()
            _kept[kind] = shown
    wall_ms = int(wall_s * 1000)
    first = b"-" if ttft_s is None else b"%.4f" % ttft_s
    if request_id.translate(None, _PLAIN_ID):
        request_id = value(request_id.decode("latin-1")).encode("utf-8", "replace")
    return b"time=%b.%03dZ status=%d %b bytes=%d ttft_s=%b total_s=%.4f request_id=%b reason=%b\n" % (
        _second(wall_ms // 1000), wall_ms % 1000, status, shown, sent_bytes, first, total_s, request_id, _reason(reason),
    )  # fmt: skip
