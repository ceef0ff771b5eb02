"""Reading the result of a query to its end: an unfinished cursor would hold its transaction open."""

from __future__ import annotations

from typing import Any

import apsw

from llmgw.domain.errors import Broken


def rows(connection: apsw.Connection, sql: str, bindings: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every row. The table's STRICT columns are the types."""
    return connection.execute(sql, bindings).fetchall()


def row(connection: apsw.Connection, sql: str, bindings: tuple[Any, ...] = ()) -> tuple[Any, ...]:
    """The only row of a query that has exactly one. Raises Broken where it has not."""
    found = rows(connection, sql, bindings)
    if len(found) != 1:
        raise Broken(f"the store expected one row and found {len(found)}")
    return found[0]
