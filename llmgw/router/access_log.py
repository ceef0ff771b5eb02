"""One line per request, built by hand: a structured logger may cost as much as the request it describes. Pure.

`time status method path model endpoint key stream bytes ttft_s total_s request_id reason`. Prompts, completions and keys never
reach it; `key` is the key's name.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Final

_PLAIN: Final = re.compile(r"[!#-<>-\[\]-~]+\Z")  # printable ASCII without a blank, a quote, an equals sign or a backslash
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
    request_id: str,
    reason: str,
) -> bytes:
    """The line with its line feed. Times are seconds; `ttft_s` None: no content was sent."""
    at = datetime.fromtimestamp(wall_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    first = "-" if ttft_s is None else f"{ttft_s:.4f}"
    text = (
        f"time={at} status={status} method={value(method)} path={value(path)} model={value(model)} endpoint={value(endpoint)} "
        f"key={value(key)} stream={'true' if stream else 'false'} bytes={sent_bytes} ttft_s={first} total_s={total_s:.4f} "
        f"request_id={value(request_id)} reason={value(reason)}\n"
    )
    return text.encode("utf-8", "replace")
