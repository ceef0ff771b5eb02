"""Usage by hour, key and model, and which batches of it were counted: a batch that is told again changes nothing."""

from __future__ import annotations

import enum
from collections.abc import Iterable

import apsw

from llmgw.domain.usage import HOUR_MAX, UsageBatch, UsageRow
from llmgw.store.connection import Store
from llmgw.store.rows import rows

_COUNTS = ("requests", "unknown", "prompt", "cached", "completion")


class By(enum.Enum):
    """What sums are made for. Of a row's other names nothing is told."""

    KEY_AND_MODEL = "key,model"
    KEY = "key"
    MODEL = "model"
    HOUR = "hour"


async def add(store: Store, epoch: int, batches: Iterable[UsageBatch], at_wall_s: float) -> None:
    """Counts those of the batches (sound ones) that were not counted before; all of this or nothing."""
    await store.write(_add, epoch, tuple(batches), at_wall_s)


async def sums(store: Store, by: By, since: int = 0, until: int = HOUR_MAX) -> tuple[UsageRow, ...]:
    """Sums over the hours that begin at `since` or later and before `until`, sorted. Names that are not asked for are 0 and ""."""
    return await store.read(_sums, by, since, until)


async def trim(store: Store, epoch: int, before_wall_s: float) -> int:
    """Drops hours older than that, and what is known of batches that can hold nothing younger; returns how many hours' rows."""
    return await store.write(_trim, epoch, before_wall_s)


def _add(connection: apsw.Connection, epoch: int, batches: tuple[UsageBatch, ...], at_wall_s: float) -> None:
    for batch in batches:
        connection.execute(
            "INSERT INTO usage_batches (boot, number, at_wall_s) VALUES (?, ?, ?)"
            " ON CONFLICT (boot) DO UPDATE SET number = excluded.number, at_wall_s = excluded.at_wall_s"
            " WHERE excluded.number > usage_batches.number",
            (batch.boot, batch.number, at_wall_s),
        )
        if connection.changes() == 0:
            continue  # counted before
        connection.executemany(
            f"INSERT INTO usage_hourly (hour, key, model, {', '.join(_COUNTS)}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
            f" ON CONFLICT (hour, key, model) DO UPDATE SET {', '.join(f'{name} = {name} + excluded.{name}' for name in _COUNTS)}",
            ((row.hour, row.key, row.model, *(getattr(row, name) for name in _COUNTS)) for row in batch.rows),
        )


def _sums(connection: apsw.Connection, by: By, since: int, until: int) -> tuple[UsageRow, ...]:
    names = by.value.split(",")
    found = rows(
        connection,
        f"SELECT {by.value}, {', '.join(f'sum({name})' for name in _COUNTS)} FROM usage_hourly"
        f" WHERE hour >= ? AND hour < ? GROUP BY {by.value} ORDER BY {by.value}",
        (since, until),
    )
    nothing: dict[str, int | str] = {"hour": 0, "key": "", "model": ""}
    return tuple(UsageRow(**{**nothing, **dict(zip((*names, *_COUNTS), row, strict=True))}) for row in found)


def _trim(connection: apsw.Connection, epoch: int, before_wall_s: float) -> int:
    connection.execute("DELETE FROM usage_batches WHERE at_wall_s < ?", (before_wall_s,))
    connection.execute("DELETE FROM usage_hourly WHERE hour < ?", (int(before_wall_s),))
    return connection.changes()
