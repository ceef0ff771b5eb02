"""The history of what the cluster did and why. Sequence numbers rise by one and are never used again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import apsw
import attrs

from llmgw.domain.event import Event, Level
from llmgw.store.connection import Store
from llmgw.store.rows import row, rows

PAGE_MAX: Final = 1_000  # of one page: about 200 KB of JSON
TEXT_MAX: Final = 8_192  # characters: a log tail fits, a runaway engine's line does not fill the disk
_COLUMNS: Final = "seq, at, level, kind, object, epoch, text"


async def append(store: Store, epoch: int, events: Iterable[Event]) -> tuple[Event, ...]:
    """Stores all of these or none, and returns them with their `seq`, and this epoch where they name none.

    Texts beyond 8,192 characters are cut.
    """
    return await store.write(_append, epoch, tuple(events))


async def after(store: Store, seq: int, limit: int = 100) -> tuple[Event, ...]:
    """Events above `seq`, the oldest first; at most `limit`, itself at most 1,000."""
    return await store.read(_after, seq, limit)


async def latest(store: Store, limit: int = 100) -> tuple[Event, ...]:
    """The newest events, the oldest of them first."""
    return await store.read(_latest, limit)


async def latest_of(store: Store, about: str, limit: int = 100) -> tuple[Event, ...]:
    """As `latest`, of one object such as `replica/m1-0a1b2c3d`."""
    return await store.read(_latest_of, about, limit)


async def trim(store: Store, epoch: int, before_wall_s: float) -> int:
    """Drops events older than that; returns how many."""
    return await store.write(_trim, epoch, before_wall_s)


def _append(connection: apsw.Connection, epoch: int, events: tuple[Event, ...]) -> tuple[Event, ...]:
    stored = []
    for event in events:
        event = attrs.evolve(event, epoch=event.epoch or epoch, text=event.text[:TEXT_MAX])
        (seq,) = row(
            connection,
            "INSERT INTO events (at, level, kind, object, epoch, text) VALUES (?, ?, ?, ?, ?, ?) RETURNING seq",
            (event.at, event.level.value, event.kind, event.object, event.epoch, event.text),
        )
        stored.append(attrs.evolve(event, seq=seq))
    return tuple(stored)


def _after(connection: apsw.Connection, seq: int, limit: int) -> tuple[Event, ...]:
    stored = rows(connection, f"SELECT {_COLUMNS} FROM events WHERE seq > ? ORDER BY seq LIMIT ?", (seq, _page(limit)))
    return tuple(_event(*found) for found in stored)


def _latest(connection: apsw.Connection, limit: int) -> tuple[Event, ...]:
    stored = rows(connection, f"SELECT {_COLUMNS} FROM events ORDER BY seq DESC LIMIT ?", (_page(limit),))
    return tuple(_event(*found) for found in reversed(stored))


def _latest_of(connection: apsw.Connection, about: str, limit: int) -> tuple[Event, ...]:
    sql = f"SELECT {_COLUMNS} FROM events WHERE object = ? ORDER BY seq DESC LIMIT ?"
    return tuple(_event(*found) for found in reversed(tuple(rows(connection, sql, (about, _page(limit))))))


def _trim(connection: apsw.Connection, epoch: int, before_wall_s: float) -> int:
    connection.execute("DELETE FROM events WHERE at < ?", (before_wall_s,))
    return connection.changes()


def _page(limit: int) -> int:
    return max(0, min(limit, PAGE_MAX))


def _event(seq: int, at: float, level: str, kind: str, about: str, epoch: int, text: str) -> Event:
    return Event(kind, about, text, at, epoch, seq, Level(level))
