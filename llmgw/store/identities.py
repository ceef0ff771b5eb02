"""Join tokens, and who holds which certificate: rows of both, and the transaction in which one becomes the other.

That a token lets in one machine and no second is decided here. No secret is here: tokens by their hashes, keys by theirs.
"""

from __future__ import annotations

import json
from typing import Any, Final

import apsw
import attrs

from llmgw.domain.errors import Conflict, Denied, NotFound
from llmgw.domain.identity import MachineRole
from llmgw.store import audit
from llmgw.store.connection import Store
from llmgw.store.rows import rows

SELF: Final = "self"
RENEWAL: Final = "renewal"


@attrs.frozen
class StoredToken:
    """Times are wall time. `used_key` is the hash of the public key that joined by it."""

    id: str
    sha256: str = attrs.field(repr=False)
    role: MachineRole
    name: str
    created_wall_s: float
    created_by: str
    expires_wall_s: float
    used_wall_s: float | None = None
    used_name: str = ""
    used_key: str = ""
    used_peer: str = ""
    revoked_wall_s: float | None = None
    revoked_by: str = ""


@attrs.frozen
class StoredIdentity:
    """One certificate. `issued_for` is the id of a join token, RENEWAL or SELF. `serial` is as `domain.identity.plain_serial` has it."""

    serial: str
    role: MachineRole
    name: str
    key: str
    addresses: tuple[str, ...]
    issued_wall_s: float
    issued_for: str
    not_after_wall_s: float
    revoked_wall_s: float | None = None
    revoked_by: str = ""


@attrs.frozen
class IdentityRows:
    """All of one instant: tokens by creation, identities by role, name and issue. `pin` is "" before the cluster has a CA."""

    pin: str = ""
    tokens: tuple[StoredToken, ...] = ()
    identities: tuple[StoredIdentity, ...] = ()


async def load(store: Store) -> IdentityRows:
    return await store.read(_load)


async def ensure_ca(store: Store, epoch: int, pin: str, certificate: str) -> str:
    """The pin of the cluster's CA; this one becomes it where there is none yet."""
    return await store.write(_ensure_ca, epoch, pin, certificate)


async def add_token(store: Store, epoch: int, token: StoredToken, origin: audit.Origin = audit.CLUSTER) -> None:
    """Raises Conflict where its name is held by a machine that has joined."""
    await store.write(_add_token, epoch, token, origin)


async def revoke_token(store: Store, epoch: int, token_id: str, origin: audit.Origin) -> tuple[StoredToken, bool]:
    """(the token, whether it could still have been used). Raises NotFound."""
    return await store.write(_revoke_token, epoch, token_id, origin)


async def join(store: Store, epoch: int, sha256: str, new: StoredIdentity, origin: audit.Origin) -> None:
    """The token with that hash lets in the holder of this certificate, and nobody after it.

    Raises Denied, with a code for each reason: `join_token_unknown`, `_used`, `_expired`, `_revoked`, `_role`, `_name`; Conflict
    where another machine holds the name.
    """
    await store.write(_join, epoch, sha256, new, origin)


async def renew(store: Store, epoch: int, serial: str, new: StoredIdentity, origin: audit.Origin) -> None:
    """The holder of `serial` gets another certificate. Raises Denied where that one is revoked."""
    await store.write(_renew, epoch, serial, new, origin)


async def record_own(store: Store, epoch: int, new: StoredIdentity) -> None:
    """A control plane's certificate, which it has made itself; one that is known already stays as it is."""
    await store.write(_record_own, epoch, new)


async def revoke(store: Store, epoch: int, role: MachineRole, name: str, origin: audit.Origin) -> tuple[int, int]:
    """Ends every certificate of that machine, and every join token by its name: (how many were valid, how many open).

    The token that it joined by ends too: within its hour it would let the same key in again. Raises NotFound where there never was
    a certificate and no token is open.
    """
    return await store.write(_revoke, epoch, role, name, origin)


async def trim(store: Store, epoch: int, before_wall_s: float) -> int:
    """Drops what has expired before that; returns how many rows."""
    return await store.write(_trim, epoch, before_wall_s)


_TOKEN: Final = (
    "id, sha256, role, name, created_wall_s, created_by, expires_wall_s, used_wall_s, used_name, used_key, used_peer, revoked_wall_s,"
    " revoked_by"
)
_IDENTITY: Final = "serial, role, name, key, addresses, issued_wall_s, issued_for, not_after_wall_s, revoked_wall_s, revoked_by"


def _load(connection: apsw.Connection) -> IdentityRows:
    pins = rows(connection, "SELECT pin FROM cluster_ca")
    tokens = tuple(_token(found) for found in rows(connection, f"SELECT {_TOKEN} FROM join_tokens ORDER BY created_wall_s, id"))
    held = rows(connection, f"SELECT {_IDENTITY} FROM identities ORDER BY role, name, issued_wall_s, serial")
    return IdentityRows(pins[0][0] if pins else "", tokens, tuple(_identity(found) for found in held))


def _ensure_ca(connection: apsw.Connection, epoch: int, pin: str, certificate: str) -> str:
    connection.execute("INSERT OR IGNORE INTO cluster_ca (one, pin, certificate) VALUES (1, ?, ?)", (pin, certificate))
    return str(rows(connection, "SELECT pin FROM cluster_ca")[0][0])


def _add_token(connection: apsw.Connection, epoch: int, token: StoredToken, origin: audit.Origin) -> None:
    if token.name:
        _check_free(connection, token.role, token.name, "", origin.at_wall_s)
    connection.execute(
        f"INSERT INTO join_tokens ({_TOKEN}) VALUES ({', '.join('?' * 13)})",
        (
            token.id, token.sha256, token.role.value, token.name, token.created_wall_s, token.created_by, token.expires_wall_s,
            token.used_wall_s, token.used_name, token.used_key, token.used_peer, token.revoked_wall_s, token.revoked_by,
        ),
    )  # fmt: skip
    audit.record(connection, epoch, origin, "create join token", f"join-token/{token.id}")


def _revoke_token(connection: apsw.Connection, epoch: int, token_id: str, origin: audit.Origin) -> tuple[StoredToken, bool]:
    found = rows(connection, f"SELECT {_TOKEN} FROM join_tokens WHERE id = ?", (token_id,))
    if not found:
        raise NotFound(f"there is no join token {token_id[:100]!r}", code="no_such_join_token")
    token = _token(found[0])
    if token.used_wall_s is not None or token.revoked_wall_s is not None:
        return token, False
    revoked = attrs.evolve(token, revoked_wall_s=origin.at_wall_s, revoked_by=origin.who)
    connection.execute("UPDATE join_tokens SET revoked_wall_s = ?, revoked_by = ? WHERE id = ?", (origin.at_wall_s, origin.who, token_id))
    audit.record(connection, epoch, origin, "revoke join token", f"join-token/{token_id}")
    return revoked, origin.at_wall_s < token.expires_wall_s


def _join(connection: apsw.Connection, epoch: int, sha256: str, new: StoredIdentity, origin: audit.Origin) -> None:
    found = rows(connection, f"SELECT {_TOKEN} FROM join_tokens WHERE sha256 = ?", (sha256,))
    if not found:
        raise Denied("the join token is not known here", code="join_token_unknown")
    token = _token(found[0])
    if (fault := token_fault(token, new.role, new.name, new.key, new.issued_wall_s)) is not None:
        code, words = fault
        raise Denied(words, code=code)
    _check_free(connection, new.role, new.name, new.key, new.issued_wall_s)
    connection.execute(
        "UPDATE join_tokens SET used_wall_s = ?, used_name = ?, used_key = ?, used_peer = ? WHERE id = ?",
        (new.issued_wall_s, new.name, new.key, origin.peer, token.id),
    )
    _insert(connection, attrs.evolve(new, issued_for=token.id))
    audit.record(connection, epoch, attrs.evolve(origin, who=f"join token {token.id}"), "join", f"{new.role.value}/{new.name}")


def token_fault(token: StoredToken, role: MachineRole, name: str, key: str, now_wall_s: float) -> tuple[str, str] | None:
    """(code, words) where this token does not let in a machine of that role, name and key now; None where it does."""
    if token.revoked_wall_s is not None:
        return "join_token_revoked", f"the join token {token.id} was revoked: make another one"
    if token.used_wall_s is not None and token.used_key != key:
        return "join_token_used", f"the join token {token.id} has let in {token.used_name} already; each is good for one machine"
    if now_wall_s >= token.expires_wall_s:
        return "join_token_expired", f"the join token {token.id} has expired: make another one"
    if token.role is not role:
        return "join_token_role", f"the join token {token.id} lets in a machine as {token.role.value}, not as {role.value}"
    if token.name and token.name != name:
        return "join_token_name", f"the join token {token.id} is for {token.name}, not for {name}"
    return None


def _check_free(connection: apsw.Connection, role: MachineRole, name: str, key: str, now_wall_s: float) -> None:
    """A name is of one machine at a time. A control plane's certificates of its own making do not take its name: it makes them anew."""
    held = rows(
        connection,
        "SELECT 1 FROM identities WHERE role = ? AND name = ? AND key <> ? AND revoked_wall_s IS NULL AND not_after_wall_s > ?",
        (role.value, name, key, now_wall_s),
    )
    if held:
        command = "node" if role is MachineRole.AGENT else role.value
        text = f"{role.value} {name} has joined already: `llmgw {command} rm {name}` first, or choose another name"
        raise Conflict(text, code="name_taken")


def _renew(connection: apsw.Connection, epoch: int, serial: str, new: StoredIdentity, origin: audit.Origin) -> None:
    if rows(connection, "SELECT 1 FROM identities WHERE serial = ? AND revoked_wall_s IS NOT NULL", (serial,)):
        raise Denied(f"the certificate of {new.role.value} {new.name} was revoked", code="certificate_revoked")
    _insert(connection, attrs.evolve(new, issued_for=RENEWAL))
    audit.record(connection, epoch, origin, "renew", f"{new.role.value}/{new.name}")


def _record_own(connection: apsw.Connection, epoch: int, new: StoredIdentity) -> None:
    if not rows(connection, "SELECT 1 FROM identities WHERE serial = ?", (new.serial,)):
        _insert(connection, attrs.evolve(new, issued_for=SELF))


def _revoke(connection: apsw.Connection, epoch: int, role: MachineRole, name: str, origin: audit.Origin) -> tuple[int, int]:
    open_by_name = "role = ? AND revoked_wall_s IS NULL AND expires_wall_s > ? AND used_wall_s IS NULL AND name = ?"
    machine = (role.value, origin.at_wall_s, name)
    tokens = len(rows(connection, f"SELECT 1 FROM join_tokens WHERE {open_by_name}", machine))
    if not tokens and not rows(connection, "SELECT 1 FROM identities WHERE role = ? AND name = ?", (role.value, name)):
        raise NotFound(f"no certificate was ever given to {role.value} {name[:100]!r}", code="no_such_identity")
    connection.execute(
        "UPDATE identities SET revoked_wall_s = ?, revoked_by = ? WHERE role = ? AND name = ? AND revoked_wall_s IS NULL",
        (origin.at_wall_s, origin.who, role.value, name),
    )
    ended = connection.changes()
    for which in (open_by_name, "role = ? AND revoked_wall_s IS NULL AND expires_wall_s > ? AND used_name = ?"):
        connection.execute(
            f"UPDATE join_tokens SET revoked_wall_s = ?, revoked_by = ? WHERE {which}", (origin.at_wall_s, origin.who, *machine)
        )
    if ended or tokens:
        audit.record(connection, epoch, origin, "revoke certificates", f"{role.value}/{name}")
    return ended, tokens


def _insert(connection: apsw.Connection, new: StoredIdentity) -> None:
    connection.execute(
        f"INSERT INTO identities ({_IDENTITY}) VALUES ({', '.join('?' * 10)})",
        (
            new.serial, new.role.value, new.name, new.key, json.dumps(new.addresses), new.issued_wall_s, new.issued_for,
            new.not_after_wall_s, new.revoked_wall_s, new.revoked_by,
        ),
    )  # fmt: skip


def _trim(connection: apsw.Connection, epoch: int, before_wall_s: float) -> int:
    connection.execute("DELETE FROM join_tokens WHERE expires_wall_s < ?", (before_wall_s,))
    dropped = connection.changes()
    connection.execute("DELETE FROM identities WHERE not_after_wall_s < ?", (before_wall_s,))
    return dropped + connection.changes()


def _token(found: tuple[Any, ...]) -> StoredToken:
    token_id, sha256, role, *rest = found
    return StoredToken(token_id, sha256, MachineRole(role), *rest)


def _identity(found: tuple[Any, ...]) -> StoredIdentity:
    serial, role, name, key, addresses, *rest = found
    return StoredIdentity(serial, MachineRole(role), name, key, tuple(json.loads(addresses)), *rest)
