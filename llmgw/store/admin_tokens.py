"""Users of the admin API: a name, a role and the hash of a token. The token itself is never here."""

from __future__ import annotations

import enum

import apsw
import attrs

from llmgw.domain.errors import Conflict
from llmgw.store import audit
from llmgw.store.connection import Store
from llmgw.store.rows import rows


class Role(enum.Enum):
    """What a token may do: `viewer` reads, `operator` also gives orders, `admin` also changes who may."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"


@attrs.frozen
class AdminToken:
    """`sha256` is 64 hex digits of the token's text. Times are wall time; `revoked_wall_s` None: valid."""

    name: str
    sha256: str = attrs.field(repr=False)
    role: Role = Role.ADMIN
    created_wall_s: float = 0.0
    revoked_wall_s: float | None = None


async def load(store: Store) -> tuple[AdminToken, ...]:
    """Every token, sorted by name, revoked ones among them."""
    return await store.read(_load)


async def ensure(store: Store, epoch: int, token: AdminToken) -> bool:
    """Adds the token unless its hash is known; a name that another hash holds is given over to this one, which the file's
    owner has on disk. True where something changed. A revoked hash stays revoked."""
    return await store.write(_ensure, epoch, token)


async def add(store: Store, epoch: int, token: AdminToken, origin: audit.Origin = audit.CLUSTER) -> None:
    """Raises `Conflict` when the name or the hash is there already."""
    await store.write(_add, epoch, token, origin)


async def revoke(store: Store, epoch: int, name: str, at_wall_s: float, origin: audit.Origin = audit.CLUSTER) -> bool:
    """True where a valid token of that name was revoked."""
    return await store.write(_revoke, epoch, name, at_wall_s, origin)


def _load(connection: apsw.Connection) -> tuple[AdminToken, ...]:
    stored = rows(connection, "SELECT name, sha256, role, created_wall_s, revoked_wall_s FROM admin_tokens ORDER BY name")
    return tuple(AdminToken(name, sha256, Role(role), created, revoked) for name, sha256, role, created, revoked in stored)


def _ensure(connection: apsw.Connection, epoch: int, token: AdminToken) -> bool:
    if rows(connection, "SELECT 1 FROM admin_tokens WHERE sha256 = ?", (token.sha256,)):
        return False
    connection.execute("DELETE FROM admin_tokens WHERE name = ?", (token.name,))
    _insert(connection, token)
    audit.record(connection, epoch, audit.CLUSTER, "create token", f"token/{token.name}")
    return True


def _add(connection: apsw.Connection, epoch: int, token: AdminToken, origin: audit.Origin) -> None:
    if rows(connection, "SELECT 1 FROM admin_tokens WHERE name = ? OR sha256 = ?", (token.name, token.sha256)):
        raise Conflict(f"a token named {token.name!r}, or with this secret, is there already", code="token_exists")
    _insert(connection, token)
    audit.record(connection, epoch, origin, "create token", f"token/{token.name}")


def _revoke(connection: apsw.Connection, epoch: int, name: str, at_wall_s: float, origin: audit.Origin) -> bool:
    connection.execute("UPDATE admin_tokens SET revoked_wall_s = ? WHERE name = ? AND revoked_wall_s IS NULL", (at_wall_s, name))
    revoked = connection.changes() > 0
    if revoked:
        audit.record(connection, epoch, origin, "revoke token", f"token/{name}")
    return revoked


def _insert(connection: apsw.Connection, token: AdminToken) -> None:
    connection.execute(
        "INSERT INTO admin_tokens (name, sha256, role, created_wall_s, revoked_wall_s) VALUES (?, ?, ?, ?, ?)",
        (token.name, token.sha256, token.role.value, token.created_wall_s, token.revoked_wall_s),
    )
