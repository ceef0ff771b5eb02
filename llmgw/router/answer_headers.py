"""What an answer's head tells beside the engine's: how much of its limits a key has left, and to operators who answered. Pure."""

from __future__ import annotations

import functools
from typing import Final

from llmgw.domain.policy import ApiKey
from llmgw.router.rates import KeyUse
from llmgw.router.window import Window

ENDPOINT: Final = b"x-llmgw-endpoint"  # on an answer: who gave it; on a request: who is to
SERVER_TIMING: Final = b"server-timing"
ROUNDING_MS: Final = 1e-6  # a rounding error is no millisecond
LIMIT_HEADERS: Final = tuple(f"x-ratelimit-{what}-{of}" for of in ("requests", "tokens") for what in ("limit", "remaining", "reset"))
_REQUESTS: Final = b"x-ratelimit-limit-requests: %d\r\nx-ratelimit-remaining-requests: %d\r\nx-ratelimit-reset-requests: %b\r\n"
_TOKENS: Final = b"x-ratelimit-limit-tokens: %d\r\nx-ratelimit-remaining-tokens: %d\r\nx-ratelimit-reset-tokens: %b\r\n"


def limit_lines(key: ApiKey, use: KeyUse, now_s: float) -> bytes:
    """OpenAI's headers, for those limits that the key has."""
    lines = b""
    if key.requests_per_minute:
        lines = _lines(_REQUESTS, key.requests_per_minute, use.requests, now_s)
    if key.tokens_per_minute:
        lines += _lines(_TOKENS, key.tokens_per_minute, use.tokens, now_s)
    return lines


def _lines(form: bytes, limit: int, window: Window, now_s: float) -> bytes:
    left = limit - window.used(now_s)
    return form % (limit, left if left > 0 else 0, _written(_whole_ms(window.empty_s(now_s))))


@functools.lru_cache(maxsize=4096)  # every answer tells two of them, and a minute has 60,000 of which a busy key tells few
def _written(total_ms: int) -> bytes:
    return duration(total_ms / 1000).encode()


def _whole_ms(seconds: float) -> int:
    """Rounded up, by hand: math.ceil costs as much as the rest of a line."""
    exact_ms = _ms(seconds) - ROUNDING_MS
    whole_ms = int(exact_ms)
    return whole_ms + 1 if whole_ms < exact_ms else whole_ms


def operator_lines(endpoint: str, started_s: float, asked_s: float | None, now_s: float) -> bytes:
    """For a key that may see them. `asked_s`: when the endpoint was asked that answers, None where none was."""
    if asked_s is None:
        return b"server-timing: router;dur=%.1f\r\n" % _ms(now_s - started_s)
    timing = b"server-timing: router;dur=%.1f, engine;dur=%.1f\r\n" % (_ms(asked_s - started_s), _ms(now_s - asked_s))
    return b"x-llmgw-endpoint: %b\r\n%b" % (endpoint.encode("ascii", "replace"), timing)


def duration(seconds: float) -> str:
    """As OpenAI writes one, rounded up: `0s`, `6ms`, `1s`, `7.25s`, `1m0s`, `1h0m0s`."""
    total_ms = max(0, _whole_ms(seconds))
    if 0 < total_ms < 1000:
        return f"{total_ms}ms"
    minutes, rest_ms = divmod(total_ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    shown = f"{rest_ms / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    if hours:
        return f"{hours}h{minutes}m{shown}"
    return f"{minutes}m{shown}" if minutes else shown


def _ms(seconds: float) -> float:
    return seconds * 1000
