"""What a transaction has changed, as bytes that do the same to a copy of the database: SQLite's changesets.

A changeset names the rows before and after, so that a copy which is not what the recording one was is found out instead of bent.
Rows of tables without a primary key are not recorded, and neither are changes of the schema: every table of ours has a key, and a
copy begins from a whole file of the schema at hand.
"""

from __future__ import annotations

from collections.abc import Iterable

import apsw

from llmgw.domain.errors import Conflict


class Diverged(Conflict):
    """The copy is not what the changes were made to: it is to be made anew from a whole one."""

    default_code = "copy_diverged"


class Recording:
    """What one transaction changes. Made before it begins, read before it commits, closed after."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._session = apsw.Session(connection, "main")
        self._session.attach()

    def changes(self) -> bytes:
        """So far; empty when no row changed."""
        return b"" if self._session.is_empty else self._session.changeset()

    def close(self) -> None:
        self._session.close()


def apply(connection: apsw.Connection, changesets: Iterable[bytes]) -> None:
    """Inside a transaction of a copy. What foreign keys did to the recorded one is recorded, and is not done twice.

    Raises Diverged, apsw.Error.
    """
    for changes in changesets:
        met: list[str] = []

        def conflict(reason: int, change: apsw.TableChange, met: list[str] = met) -> int:
            met.append(change.name)
            return apsw.SQLITE_CHANGESET_ABORT

        try:
            apsw.Changeset.apply(changes, connection, conflict=conflict, flags=apsw.SQLITE_CHANGESETAPPLY_FKNOACTION)
        except (apsw.AbortError, apsw.MisuseError, apsw.CorruptError, apsw.SchemaChangeError) as err:
            where = f" of {met[0]}" if met else ""
            raise Diverged(f"a copy of the store is not what a change was made to: a row{where} is another one here") from err
