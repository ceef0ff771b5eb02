"""What a store holds that people would miss, to tell whether another one has it too. Reads only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import apsw

from llmgw.store.connection import Store
from llmgw.store.rows import rows

# What it is called, by which word of the row, and what makes it the same thing. No counters and no times of last sight: they change
# by themselves. Secrets are here as their hashes.
_HELD: Final = {
    "settings version": "SELECT version, sha256 FROM cluster_settings",
    "model": "SELECT name, spec FROM models",
    "engine choice of model": "SELECT model, profile FROM engine_choices",
    "hold of facility": "SELECT facility, drain FROM facility_holds",
    "key": "SELECT name, sha256, revoked_wall_s IS NULL FROM api_keys",
    "admin token": "SELECT name, sha256, revoked_wall_s IS NULL FROM admin_tokens",
    "node": "SELECT name, id FROM nodes WHERE removed = 0",
    "certificate of": "SELECT name, serial, revoked_wall_s IS NULL FROM identities",
}
Held = frozenset[tuple[object, ...]]


async def load(store: Store) -> Held:
    return await store.read(_load)


def missing(wanted: Held, there: Held) -> tuple[str, ...]:
    """What of `wanted` is not `there`, or is another one, in words; sorted."""
    return tuple(sorted({f"{what} {name}" for what, name, *_ in wanted - there}))


def _load(connection: apsw.Connection) -> Held:
    found: Iterable[tuple[object, ...]] = ((what, *row) for what, select in _HELD.items() for row in rows(connection, select))
    return frozenset(found)
