"""The schema's steps: numbered, forward only, each in one transaction with the number it leads to.

A process killed in the middle leaves the step before; the next start goes on from there. A file that a newer build has changed
says which builds may still read and write it. Knows the steps, never their tables' meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import Final

import apsw
import attrs

from llmgw.domain.errors import Invalid
from llmgw.settings.database_file import Contents, contents
from llmgw.store.rows import row

APPLICATION_ID: Final = 0x6C6C6D67  # "llmg" in SQLite's header: another program's database is refused, not changed
_LITESTREAM: Final = "_litestream"  # tables that a replicated file may hold beside ours


@attrs.frozen
class Step:
    """`sql` leads from `version - 1` to `version`. Builds below `min_reader` cannot read the result, below `min_writer` not write it."""

    version: int
    min_reader: int
    min_writer: int
    sql: str


def _step(version: int, name: str, *, min_reader: int, min_writer: int) -> Step:
    sql = resources.files("llmgw.store").joinpath("schema", f"{version:04}_{name}.sql").read_text()
    return Step(version, min_reader, min_writer, sql)


STEPS: Final = (
    _step(1, "first", min_reader=1, min_writer=1),
    _step(2, "settings", min_reader=1, min_writer=1),  # tables that an older build does not touch
    # An older build that leads would push keys of its file alone: it would bring back what was revoked, and refuse what was created.
    _step(3, "api_keys", min_reader=1, min_writer=3),
    _step(4, "usage", min_reader=1, min_writer=3),  # tables that an older build does not touch
    _step(5, "identities", min_reader=1, min_writer=3),  # likewise; no older build asks for certificates
)
SCHEMA: Final = STEPS[-1].version


def migrate(connection: apsw.Connection, steps: Sequence[Step] = STEPS) -> None:
    """Brings the file up to the last of `steps`. Raises `Invalid` for another program's file and for one that is too new to read."""
    ours = steps[-1].version
    while True:
        connection.execute("BEGIN IMMEDIATE")  # taken before the version is read: of two first starts one waits for the other
        try:
            found = version(connection)
            check_owner(contents(connection))
            if found >= ours:
                connection.execute("ROLLBACK")
                break
            step = next(step for step in steps if step.version == found + 1)
            connection.execute(step.sql)
            connection.execute("UPDATE meta SET min_reader = ?, min_writer = ?", (step.min_reader, step.min_writer))
            connection.pragma("application_id", APPLICATION_ID)
            connection.pragma("user_version", step.version)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
    if found > ours and (oldest := _limits(connection)[0]) > ours:
        raise Invalid(
            f"the store is at schema {found} and can be read by builds of schema {oldest} or newer; this build knows schema {ours}:"
            " upgrade llmgw, or restore a backup that this build made",
            code="schema_newer",
        )


def version(connection: apsw.Connection) -> int:
    """The number of the last step the file has seen; 0 for an empty file."""
    return int(connection.pragma("user_version"))


def may_write(connection: apsw.Connection, schema: int = SCHEMA) -> bool:
    """May a build that knows `schema` write this file?"""
    return version(connection) <= schema or _limits(connection)[1] <= schema


def may_read(connection: apsw.Connection, schema: int = SCHEMA) -> bool:
    """May a build that knows `schema` read this file?"""
    return version(connection) <= schema or _limits(connection)[0] <= schema


def _limits(connection: apsw.Connection) -> tuple[int, int]:
    min_reader, min_writer = row(connection, "SELECT min_reader, min_writer FROM meta")
    return int(min_reader), int(min_writer)


def check_owner(found: Contents) -> None:
    """Raises Invalid for the file of another program; an empty one is ours to fill."""
    foreign = [name for name in found.tables if not name.startswith((_LITESTREAM, "sqlite_"))]
    if found.application_id != APPLICATION_ID and (found.application_id or found.version or foreign):
        raise Invalid("the store's path names the database of another program; choose another path", code="not_our_database")
