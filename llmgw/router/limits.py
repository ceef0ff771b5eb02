"""What a key may use at a time. Counts live here and are taken with a scope, so that no way out of a request can leak one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from llmgw.domain.errors import Overloaded
from llmgw.domain.policy import ApiKey

PARALLEL_RETRY_S: Final = 1.0  # chosen: a slot is free when any request of the key ends, and nobody knows when that is


class Parallel:
    """Requests in flight per key, by the key's name: an edit of a key's other fields keeps its count."""

    def __init__(self) -> None:
        self._running: dict[str, int] = {}

    def running(self, name: str) -> int:
        return self._running.get(name, 0)

    @contextmanager
    def slot(self, key: ApiKey) -> Iterator[None]:
        """One of the key's places, for as long as the block runs. Raises Overloaded when all are taken."""
        name = key.name
        now = self._running.get(name, 0)
        if key.max_parallel and now >= key.max_parallel:
            raise Overloaded(
                f"the key {name!r} may have {key.max_parallel} requests at a time, and has them",
                retry_after_s=PARALLEL_RETRY_S,
                code="parallel_limit",
            )
        self._running[name] = now + 1
        try:
            yield
        finally:
            left = self._running[name] - 1
            if left:
                self._running[name] = left
            else:
                del self._running[name]
