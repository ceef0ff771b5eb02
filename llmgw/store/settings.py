"""Versions of the cluster settings, what control planes make of them, the roll-out's row and the pause.

A version is written once, with its number one above its parent's, in the transaction that checks that nobody was faster.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from typing import Any, Final

import apsw

from llmgw.domain.errors import Conflict, Invalid, NotFound, Unavailable
from llmgw.domain.files import STORAGE_UNAVAILABLE
from llmgw.domain.settings_version import Applied, Pause, PlaneSettings, RolloutRow, SettingsVersion
from llmgw.protocol.codec import structure, unstructure
from llmgw.store import audit
from llmgw.store.connection import Store
from llmgw.store.idempotency import recall, remember
from llmgw.store.rows import row, rows

PAGE_MAX: Final = 200  # versions of one page
_COLUMNS: Final = "version, parent, document, sha256, author, reason, created_wall_s"


async def newest(store: Store) -> SettingsVersion | None:
    """The newest version; None in a store that has none yet."""
    return await store.read(read_newest)


async def newest_version(store: Store) -> int:
    """The newest version's number; 0 in a store that has none yet."""
    return await store.read(lambda connection: int(row(connection, "SELECT coalesce(max(version), 0) FROM cluster_settings")[0]))


async def head(store: Store) -> tuple[tuple[int, str] | None, RolloutRow, Pause | None]:
    """What a poller compares: (newest version and its SHA-256, the roll-out's row, the pause), of one instant."""
    return await store.read(_head)


async def version(store: Store, number: int) -> SettingsVersion:
    """Raises NotFound."""
    return await store.read(_version, number)


async def history(store: Store, limit: int = 50, before: int | None = None) -> tuple[SettingsVersion, ...]:
    """Newest first, those below `before`."""
    return await store.read(_history, limit, before)


async def write_version(
    store: Store,
    epoch: int,
    parent: int,
    document: str,
    author: str,
    reason: str,
    key: str | None = None,
    origin: audit.Origin = audit.CLUSTER,
) -> SettingsVersion:
    """Adds a version that was edited from `parent`; a document equal to that of `parent` adds none and returns it,
    unless that version is held: then it is to be tried again.

    Raises Conflict (`revision_moved`) where `parent` is not the newest. A repeat under the same idempotency key gets the version
    that was written first, whatever came since.
    """
    return await store.write(_write_version, epoch, parent, document, author, reason, key, origin)


async def import_first(
    store: Store,
    epoch: int,
    document: str,
    author: str,
    at_wall_s: float,
    import_objects: Callable[[apsw.Connection, int], object] = lambda connection, epoch: None,
) -> SettingsVersion | None:
    """Version 1, where there is none: the version for the one caller that wrote it, None for every later one.

    `import_objects` runs in the same transaction, whether or not there was a version: what it imports has a mark of its own.
    """
    return await store.write(_import_first, epoch, document, author, at_wall_s, import_objects)


async def save_applied(store: Store, epoch: int, said: Iterable[Applied]) -> None:
    """What control planes make of the versions; what one refuses stays in the history after it has come round."""
    await store.write(_save_applied, epoch, tuple(said))


async def load_applied(store: Store) -> tuple[Applied, ...]:
    """What was last heard of each control plane, sorted by address."""
    return await store.read(_load_applied)


async def load_refused(store: Store) -> tuple[tuple[int, str, str], ...]:
    """(version, name of a control plane, why), sorted."""
    return await store.read(_load_refused)


async def save_rollout(store: Store, epoch: int, row: RolloutRow) -> None:
    await store.write(_save_rollout, epoch, row)


async def load_rollout(store: Store) -> RolloutRow:
    return await store.read(read_rollout)


async def pause(store: Store, epoch: int, pause: Pause, origin: audit.Origin = audit.CLUSTER) -> Pause:
    """The pause that stands: this one, or the one that was there before it."""
    return await store.write(_pause, epoch, pause, origin)


async def resume(store: Store, epoch: int, origin: audit.Origin = audit.CLUSTER) -> bool:
    """True where there was a pause."""
    return await store.write(_resume, epoch, origin)


async def load_pause(store: Store) -> Pause | None:
    return await store.read(read_pause)


def read_newest(connection: apsw.Connection) -> SettingsVersion | None:
    found = rows(connection, f"SELECT {_COLUMNS} FROM cluster_settings ORDER BY version DESC LIMIT 1")
    return SettingsVersion(*found[0]) if found else None


def read_rollout(connection: apsw.Connection) -> RolloutRow:
    found = rows(connection, "SELECT row FROM rollout")
    return _read(found[0][0], RolloutRow, "the roll-out") if found else RolloutRow()


def read_pause(connection: apsw.Connection) -> Pause | None:
    found = rows(connection, "SELECT reason, author, since_wall_s FROM pauses")
    return Pause(*found[0]) if found else None


def _head(connection: apsw.Connection) -> tuple[tuple[int, str] | None, RolloutRow, Pause | None]:
    found = rows(connection, "SELECT version, sha256 FROM cluster_settings ORDER BY version DESC LIMIT 1")
    return (tuple(found[0]) if found else None), read_rollout(connection), read_pause(connection)


def _version(connection: apsw.Connection, number: int) -> SettingsVersion:
    found = rows(connection, f"SELECT {_COLUMNS} FROM cluster_settings WHERE version = ?", (number,))
    if not found:
        last = read_newest(connection)
        raise NotFound(f"there is no version {number}; the newest is {last.version if last else 0}", code="no_such_version")
    return SettingsVersion(*found[0])


def _history(connection: apsw.Connection, limit: int, before: int | None) -> tuple[SettingsVersion, ...]:
    found = rows(
        connection,
        f"SELECT {_COLUMNS} FROM cluster_settings WHERE ? IS NULL OR version < ? ORDER BY version DESC LIMIT ?",
        (before, before, max(1, min(limit, PAGE_MAX))),
    )
    return tuple(SettingsVersion(*each) for each in found)


def _write_version(
    connection: apsw.Connection, epoch: int, parent: int, document: str, author: str, reason: str, key: str | None, origin: audit.Origin
) -> SettingsVersion:
    request = f"settings from {parent} {document} {author} {reason}"
    if (answer := recall(connection, key, request)) is not None:
        return _version(connection, int(answer))
    last = read_newest(connection)
    head = last.version if last else 0
    _check_parent(head, parent)
    if last is not None and last.document == document and not read_rollout(connection).is_held(head):  # held: it is tried again
        remember(connection, key, head, request, origin.at_wall_s)
        return last
    _insert(connection, head + 1, document, author, reason, origin.at_wall_s)
    audit.record(connection, epoch, origin, "write", "settings", head, head + 1)
    remember(connection, key, head + 1, request, origin.at_wall_s)
    return _version(connection, head + 1)


def _import_first(
    connection: apsw.Connection,
    epoch: int,
    document: str,
    author: str,
    at_wall_s: float,
    import_objects: Callable[[apsw.Connection, int], object],
) -> SettingsVersion | None:
    import_objects(connection, epoch)
    if read_newest(connection) is not None:
        return None
    _insert(connection, 1, document, author, "imported from the file at first start", at_wall_s)
    _save_rollout(connection, epoch, RolloutRow(version=1, proven=1))
    audit.record(connection, epoch, audit.Origin(author, "", at_wall_s), "import", "settings", 0, 1)
    return _version(connection, 1)


def _check_parent(head: int, parent: int) -> None:
    if head != parent:
        raise Conflict(f"the settings are at version {head}, the edit began from {parent}: read them again", code="revision_moved")


def _insert(connection: apsw.Connection, number: int, document: str, author: str, reason: str, at_wall_s: float) -> None:
    connection.execute(
        f"INSERT INTO cluster_settings ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (number, number - 1, document, hashlib.sha256(document.encode()).hexdigest(), author, reason, at_wall_s),
    )


def _save_applied(connection: apsw.Connection, epoch: int, said: tuple[Applied, ...]) -> None:
    for one in said:
        connection.execute(
            "INSERT OR REPLACE INTO settings_applied (address, name, said, at_wall_s) VALUES (?, ?, ?, ?)",
            (one.address, one.name, json.dumps(unstructure(one.settings)), one.at_wall_s),
        )
        if one.settings.refused:
            connection.execute(
                "INSERT OR REPLACE INTO settings_refused (version, name, why, at_wall_s) VALUES (?, ?, ?, ?)",
                (one.settings.refused, one.name, one.settings.why, one.at_wall_s),
            )


def _load_applied(connection: apsw.Connection) -> tuple[Applied, ...]:
    stored = rows(connection, "SELECT address, name, said, at_wall_s FROM settings_applied ORDER BY address")
    return tuple(Applied(address, name, _read(said, PlaneSettings, address), at) for address, name, said, at in stored)


def _load_refused(connection: apsw.Connection) -> tuple[tuple[int, str, str], ...]:
    stored = rows(connection, "SELECT version, name, why FROM settings_refused ORDER BY version, name")
    return tuple((version, name, why) for version, name, why in stored)


def _save_rollout(connection: apsw.Connection, epoch: int, row: RolloutRow) -> None:
    connection.execute("INSERT OR REPLACE INTO rollout (one, row) VALUES (1, ?)", (json.dumps(unstructure(row)),))


def _pause(connection: apsw.Connection, epoch: int, pause: Pause, origin: audit.Origin) -> Pause:
    if (stands := read_pause(connection)) is not None:
        return stands
    connection.execute(
        "INSERT INTO pauses (one, reason, author, since_wall_s) VALUES (1, ?, ?, ?)",
        (pause.reason, pause.author, pause.since_wall_s),
    )
    audit.record(connection, epoch, origin, "pause", "cluster")
    return pause


def _resume(connection: apsw.Connection, epoch: int, origin: audit.Origin) -> bool:
    connection.execute("DELETE FROM pauses")
    removed = connection.changes() > 0
    if removed:
        audit.record(connection, epoch, origin, "resume", "cluster")
    return removed


def _read(text: str, kind: type[Any], what: str) -> Any:
    try:
        data = json.loads(text)
        if not isinstance(data, dict):
            raise ValueError("no object")  # a list would be read as one that says nothing
        return structure(data, kind)
    except (Invalid, ValueError) as err:
        raise Unavailable(f"what the store holds of {what} cannot be read", code=STORAGE_UNAVAILABLE) from err
