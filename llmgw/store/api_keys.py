"""Keys of clients: a name, the hash of a secret, and what its holder may do. The secret itself is never here.

A revoked row stays for people to see, until its name is given out again; the audit keeps both.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

import apsw
import attrs

from llmgw.domain.errors import Conflict, NotFound, Unavailable
from llmgw.domain.files import STORAGE_UNAVAILABLE
from llmgw.domain.policy import ApiKey
from llmgw.store import audit
from llmgw.store.connection import Store
from llmgw.store.idempotency import recall, remember
from llmgw.store.rows import row, rows


@attrs.frozen
class StoredKey:
    """`key` is what routers are told. `prefix` is the beginning of the secret, for people, "" where only its hash was ever known.

    Times are wall time; `revoked_wall_s` None: not revoked. `revision` is never seen twice.
    """

    key: ApiKey
    prefix: str = ""
    created_wall_s: float = 0.0
    created_by: str = ""
    revoked_wall_s: float | None = None
    revoked_by: str = ""
    revision: int = 0

    @property
    def revoked(self) -> bool:
        return self.revoked_wall_s is not None


@attrs.frozen
class KeyRows:
    """Every key, sorted by name, revoked ones among them; `revision` is the set's. `imported`: a file's keys were taken once."""

    revision: int = 0
    keys: tuple[StoredKey, ...] = ()
    imported: bool = False

    def find(self, name: str) -> StoredKey | None:
        return next((stored for stored in self.keys if stored.key.name == name), None)


async def load(store: Store) -> KeyRows:
    """All keys at one instant."""
    return await store.read(_load)


async def create(
    store: Store, epoch: int, new: StoredKey, request: str, key: str | None = None, origin: audit.Origin = audit.CLUSTER
) -> tuple[StoredKey, bool]:
    """Adds a key; (its row, whether it is new). A repeat under the same idempotency key gets the row that the first one wrote.

    `request` is what was asked for, without the secret, which is another at each try. Raises Conflict (`key_exists`) for a name that
    a valid key has, and for a secret that any has.
    """
    return await store.write(_create, epoch, new, request, key, origin)


async def update(
    store: Store,
    epoch: int,
    after: ApiKey,
    expected_revision: int | None = None,
    key: str | None = None,
    origin: audit.Origin = audit.CLUSTER,
) -> StoredKey:
    """Replaces what the key of that name may do; its hash stays. `expected_revision` None: whichever is there.

    Raises NotFound, and Conflict: `revision_moved`, or `key_revoked` for one that is.
    """
    return await store.write(_update, epoch, after, expected_revision, key, origin)


async def revoke(store: Store, epoch: int, name: str, key: str | None = None, origin: audit.Origin = audit.CLUSTER) -> StoredKey:
    """The revoked row; one that was revoked before stays as it is. Raises NotFound."""
    return await store.write(_revoke, epoch, name, key, origin)


async def import_once(store: Store, epoch: int, keys: Iterable[ApiKey], at_wall_s: float) -> bool:
    """Takes a file's keys: True for the one caller of a cluster's life that did, False for every later one."""
    return await store.write(import_unit, epoch, tuple(keys), at_wall_s)


_COLUMNS: Final = (
    "name, revision, sha256, prefix, models, max_parallel, requests_per_minute, tokens_per_minute, operator, expires_wall_s,"
    " created_wall_s, created_by, revoked_wall_s, revoked_by"
)


def import_unit(connection: apsw.Connection, epoch: int, keys: tuple[ApiKey, ...], at_wall_s: float) -> bool:
    """What `import_once` does, for a write that imports more."""
    if row(connection, "SELECT imported FROM api_keys_set")[0]:
        return False
    connection.execute("UPDATE api_keys_set SET imported = 1")
    for key in keys:
        if not rows(connection, "SELECT 1 FROM api_keys WHERE name = ? OR sha256 = ?", (key.name, key.sha256)):
            stored = _write(connection, StoredKey(key, created_wall_s=at_wall_s))
            audit.record(connection, epoch, audit.Origin(at_wall_s=at_wall_s), "import", f"key/{key.name}", 0, stored.revision)
    return True


def _load(connection: apsw.Connection) -> KeyRows:
    revision, imported = row(connection, "SELECT revision, imported FROM api_keys_set")
    keys = tuple(_read(found) for found in rows(connection, f"SELECT {_COLUMNS} FROM api_keys ORDER BY name"))
    return KeyRows(revision, keys, bool(imported))


def _create(
    connection: apsw.Connection, epoch: int, new: StoredKey, request: str, key: str | None, origin: audit.Origin
) -> tuple[StoredKey, bool]:
    asked = f"create key {request}"
    if (answer := recall(connection, key, asked)) is not None:
        return _required(connection, str(answer)), False
    name = new.key.name
    before = _find(connection, name)
    if before is not None and not before.revoked:
        raise Conflict(f"a key named {name!r} is there already", code="key_exists")
    if taken := rows(connection, "SELECT name FROM api_keys WHERE sha256 = ? AND name <> ?", (new.key.sha256, name)):
        raise Conflict(f"the key {taken[0][0]!r} has this secret already", code="key_exists")
    if before is not None and before.key.sha256 == new.key.sha256:
        raise Conflict(f"this is the secret of the key {name!r} that was revoked: it needs another", code="key_exists")
    stored = _write(connection, attrs.evolve(new, created_wall_s=origin.at_wall_s, created_by=origin.who))
    audit.record(connection, epoch, origin, "create", f"key/{name}", before.revision if before else 0, stored.revision)
    remember(connection, key, name, asked, origin.at_wall_s)
    return stored, True


def _update(
    connection: apsw.Connection, epoch: int, after: ApiKey, expected: int | None, key: str | None, origin: audit.Origin
) -> StoredKey:
    request = f"update key {after.name} {json.dumps(attrs.asdict(after))} {expected}"
    if recall(connection, key, request) is not None:
        return _required(connection, after.name)
    before = _required(connection, after.name)
    if before.revoked:
        raise Conflict(f"the key {after.name!r} is revoked, for good: create another", code="key_revoked")
    if expected is not None and expected != before.revision:
        text = f"the key {after.name!r} is at revision {before.revision}, the edit began from {expected}"
        raise Conflict(text, code="revision_moved")
    wanted = attrs.evolve(after, sha256=before.key.sha256)
    stored = before
    if wanted != before.key:
        stored = _write(connection, attrs.evolve(before, key=wanted))
        audit.record(connection, epoch, origin, "update", f"key/{after.name}", before.revision, stored.revision)
    remember(connection, key, stored.revision, request, origin.at_wall_s)
    return stored


def _revoke(connection: apsw.Connection, epoch: int, name: str, key: str | None, origin: audit.Origin) -> StoredKey:
    request = f"revoke key {name}"
    if recall(connection, key, request) is not None:
        return _required(connection, name)
    stored = before = _required(connection, name)
    if not before.revoked:
        stored = _write(connection, attrs.evolve(before, revoked_wall_s=origin.at_wall_s, revoked_by=origin.who))
        audit.record(connection, epoch, origin, "revoke", f"key/{name}", before.revision, stored.revision)
    remember(connection, key, stored.revision, request, origin.at_wall_s)
    return stored


def _write(connection: apsw.Connection, stored: StoredKey) -> StoredKey:
    """Under the set's next revision."""
    connection.execute("UPDATE api_keys_set SET revision = revision + 1")
    stored = attrs.evolve(stored, revision=int(row(connection, "SELECT revision FROM api_keys_set")[0]))
    key = stored.key
    columns = [column.strip() for column in _COLUMNS.split(",")]
    changed = ", ".join(f"{column} = excluded.{column}" for column in columns if column != "name")
    connection.execute(
        f"INSERT INTO api_keys ({_COLUMNS}) VALUES ({', '.join('?' * len(columns))}) ON CONFLICT (name) DO UPDATE SET {changed}",
        (
            key.name,
            stored.revision,
            key.sha256,
            stored.prefix,
            json.dumps(key.models),
            key.max_parallel,
            key.requests_per_minute,
            key.tokens_per_minute,
            key.operator,
            key.expires_wall_s,
            stored.created_wall_s,
            stored.created_by,
            stored.revoked_wall_s,
            stored.revoked_by,
        ),
    )
    return stored


def _find(connection: apsw.Connection, name: str) -> StoredKey | None:
    found = rows(connection, f"SELECT {_COLUMNS} FROM api_keys WHERE name = ?", (name,))
    return _read(found[0]) if found else None


def _required(connection: apsw.Connection, name: str) -> StoredKey:
    found = _find(connection, name)
    if found is None:
        raise NotFound(f"there is no key {name[:100]!r}", code="no_such_key")
    return found


def _read(found: tuple[Any, ...]) -> StoredKey:
    name, revision, sha256, prefix, models, parallel, requests, tokens, operator, expires, created, by, revoked, revoked_by = found
    try:
        names = json.loads(models)
    except ValueError:
        names = None
    if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
        raise Unavailable(f"the stored key {name!r} cannot be read", code=STORAGE_UNAVAILABLE)
    key = ApiKey(name, sha256, tuple(names), parallel, requests, tokens, expires, bool(operator))
    return StoredKey(key, prefix, created, by, revoked, revoked_by, revision)
