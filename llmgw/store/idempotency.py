"""Answers that were given under an idempotency key, so that a repeated order is carried out once.

`remember` stands in the write whose answer it keeps: both are there, or neither.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

import apsw

from llmgw.domain.errors import Conflict
from llmgw.store.connection import Store
from llmgw.store.rows import rows

KEEP_S: Final = 24 * 3600.0  # a client that retries does so within minutes; a day covers a person who comes back
KEPT_MIN: Final = 10_000  # the newest stay whatever the clock says: one that is a day ahead would let orders be carried out twice
KEY_BYTES_MAX: Final = 255


async def trim(store: Store, epoch: int, now_wall_s: float, kept_min: int = KEPT_MIN) -> int:
    """Drops answers that are older than a day, but for the newest `kept_min`; returns how many."""
    return await store.write(_trim, epoch, now_wall_s - KEEP_S, kept_min)


async def find(store: Store, key: str, request: str = "") -> Any | None:
    """The answer given under `key`, or None. Raises Conflict as `recall` does."""
    return await store.read_newest(recall, key, request)


async def keep(store: Store, epoch: int, key: str, request: str, answer: Any, at_wall_s: float) -> None:
    """Keeps an answer of something that wrote nothing else to the store."""
    await store.write(_keep, epoch, key, request, answer, at_wall_s)


def recall(connection: apsw.Connection, key: str | None, request: str = "") -> Any | None:
    """The answer that was given under `key`, as plain JSON data; None for no key and for a new one.

    Raises Conflict when the key was used for another `request`.
    """
    if key is None:
        return None
    found = rows(connection, "SELECT request, answer FROM idempotency WHERE key = ?", (key,))
    if not found:
        return None
    if found[0][0] != _digest(request):
        raise Conflict("this idempotency key was used for another request before", code="idempotency_key_reused")
    return json.loads(found[0][1])


def remember(connection: apsw.Connection, key: str | None, answer: Any, request: str = "", at_wall_s: float = 0.0) -> None:
    """Keeps `answer` (plain JSON data) under `key`; does nothing without one."""
    if key is not None:
        connection.execute(
            "INSERT OR IGNORE INTO idempotency (key, request, answer, at_wall_s) VALUES (?, ?, ?, ?)",
            (key, _digest(request), json.dumps(answer), at_wall_s),
        )


def _keep(connection: apsw.Connection, epoch: int, key: str, request: str, answer: Any, at_wall_s: float) -> None:
    remember(connection, key, answer, request, at_wall_s)


def _trim(connection: apsw.Connection, epoch: int, before_wall_s: float, kept_min: int) -> int:
    connection.execute(
        "DELETE FROM idempotency WHERE at_wall_s < ? AND key NOT IN (SELECT key FROM idempotency ORDER BY at_wall_s DESC LIMIT ?)",
        (before_wall_s, kept_min),
    )
    return connection.changes()


def _digest(request: str) -> str:
    return hashlib.sha256(request.encode("utf-8", "surrogatepass")).hexdigest()
