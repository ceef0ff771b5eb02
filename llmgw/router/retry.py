"""When another endpoint may be tried, and how many retries the router allows itself in all."""

from __future__ import annotations

from typing import Final

BUDGET_WINDOW_S: Final = 10  # product.md, retry_budget: a share of requests over 10 s
ALWAYS_PER_S: Final = 10  # product.md: 10 a second are always allowed


class RetryBudget:
    """Retries as a share of the requests of the last 10 s. Buckets of one second; a few integers, no history."""

    def __init__(self) -> None:
        self._requests = [0] * BUDGET_WINDOW_S
        self._retries = [0] * BUDGET_WINDOW_S
        self._second = 0

    def _turn(self, now_s: float) -> int:
        second = int(now_s)
        for step in range(min(second - self._second, BUDGET_WINDOW_S)):
            index = (second - step) % BUDGET_WINDOW_S
            self._requests[index] = self._retries[index] = 0
        self._second = max(self._second, second)
        return self._second % BUDGET_WINDOW_S

    def request(self, now_s: float) -> None:
        """A client's request came."""
        self._requests[self._turn(now_s)] += 1

    def take(self, now_s: float, share: float) -> bool:
        """May one more retry be made now? Counts it when it may."""
        index = self._turn(now_s)
        if self._retries[index] >= ALWAYS_PER_S and sum(self._retries) >= share * sum(self._requests):
            return False
        self._retries[index] += 1
        return True


def retryable_status(status: int) -> bool:
    """Is this an engine's own failure, which another engine may not share? A client's 4xx is the same everywhere."""
    return status >= 500 or status == 429


def retry_after_s(value: bytes | None, default_s: float) -> float:
    """Seconds of a Retry-After header. A date is not worked out (no wall clock decides here): the default stands for it."""
    if value is None:
        return default_s
    try:
        told = float(value)
    except ValueError:
        return default_s
    return min(told, RETRY_AFTER_MAX_S) if told >= 0 else default_s


RETRY_AFTER_MAX_S: Final = 3600.0  # chosen: an engine that says more is asked again after an hour all the same
