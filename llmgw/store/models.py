"""The models' rows. A row's revision is the set's counter when it was written, so a revision is never seen twice.

Rows hold what a `Catalog` accepts; that two models share no name is held here as well, by a table of names.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import apsw
import attrs

from llmgw.domain.errors import Conflict, Invalid, NotFound, Unavailable
from llmgw.domain.files import STORAGE_UNAVAILABLE
from llmgw.domain.model import ModelSpec
from llmgw.protocol.codec import structure, unstructure
from llmgw.store import audit, meta
from llmgw.store.connection import Store
from llmgw.store.idempotency import recall, remember
from llmgw.store.rows import rows


def _frozen(value: Mapping[str, int]) -> Mapping[str, int]:
    return MappingProxyType(dict(value))


@attrs.frozen
class ModelRows:
    """Every model, sorted by name, with its row's revision; `revision` is the set's. `imported`: a file's models were taken once."""

    revision: int
    models: tuple[ModelSpec, ...]
    revisions: Mapping[str, int] = attrs.field(factory=dict, converter=_frozen)
    imported: bool = False


async def load(store: Store) -> ModelRows:
    """All models at one instant."""
    return await store.read(read_models)


async def put(
    store: Store,
    epoch: int,
    spec: ModelSpec,
    expected_revision: int | None = None,
    key: str | None = None,
    origin: audit.Origin = audit.CLUSTER,
) -> int:
    """Adds or replaces one model; returns its row's revision, which stays where nothing changed.

    `expected_revision`: the row's revision that this edit began from, 0 for "there must be none", None for any. Raises
    `Conflict` (code `revision_moved`, or `name_taken` where another model uses one of its names).
    """
    return await store.write(_put, epoch, spec, expected_revision, key, origin)


async def put_many(
    store: Store, epoch: int, specs: Iterable[ModelSpec], key: str | None = None, origin: audit.Origin = audit.CLUSTER
) -> int:
    """Adds or replaces all of these or none, and leaves the others alone; returns the set's revision."""
    return await store.write(_put_many, epoch, tuple(specs), key, origin)


async def remove(
    store: Store,
    epoch: int,
    name: str,
    expected_revision: int | None = None,
    key: str | None = None,
    origin: audit.Origin = audit.CLUSTER,
) -> int:
    """Removes a model and its engine choice; returns the set's revision. Raises `NotFound`, and `Conflict` as `put` does."""
    return await store.write(_remove, epoch, name, expected_revision, key, origin)


async def import_once(store: Store, epoch: int, models: Iterable[ModelSpec]) -> bool:
    """Takes a file's models at the first start of a cluster: True for the one caller that did, False for every later one."""
    return await store.write(import_unit, epoch, tuple(models))


def read_models(connection: apsw.Connection) -> ModelRows:
    found = rows(connection, "SELECT name, revision, spec FROM models ORDER BY name")
    facts = meta.read_meta(connection)
    models = tuple(_decode(name, text) for name, _, text in found)
    return ModelRows(facts.models_revision, models, {name: revision for name, revision, _ in found}, facts.models_imported)


def _put(connection: apsw.Connection, epoch: int, spec: ModelSpec, expected: int | None, key: str | None, origin: audit.Origin) -> int:
    text = _encode(spec)
    request = f"put model {spec.name} {text}"
    if (answer := recall(connection, key, request)) is not None:
        return int(answer)
    _check_revision(connection, spec.name, expected)
    old = _row_revision(connection, spec.name)
    revision = old if _is_stored(connection, spec.name, text) else _write(connection, spec, text, meta.next_models_revision(connection))
    audit.record(connection, epoch, origin, "put", f"model/{spec.name}", old, revision)
    remember(connection, key, revision, request, origin.at_wall_s)
    return revision


def _put_many(connection: apsw.Connection, epoch: int, specs: tuple[ModelSpec, ...], key: str | None, origin: audit.Origin) -> int:
    texts = [(spec, _encode(spec)) for spec in specs]
    request = f"put models {json.dumps([text for _, text in texts])}"
    if (answer := recall(connection, key, request)) is not None:
        return int(answer)
    changed = [(spec, text) for spec, text in texts if not _is_stored(connection, spec.name, text)]
    before = meta.read_meta(connection).models_revision
    revision = meta.next_models_revision(connection) if changed else before
    # all old names go first: two models of one apply may swap an alias
    for spec, _ in changed:
        connection.execute("DELETE FROM model_names WHERE model = ?", (spec.name,))
    for spec, text in changed:
        old = _row_revision(connection, spec.name)
        _write(connection, spec, text, revision)
        audit.record(connection, epoch, origin, "put", f"model/{spec.name}", old, revision)
    remember(connection, key, revision, request, origin.at_wall_s)
    return revision


def _remove(connection: apsw.Connection, epoch: int, name: str, expected: int | None, key: str | None, origin: audit.Origin) -> int:
    request = f"remove model {name}"
    if (answer := recall(connection, key, request)) is not None:
        return int(answer)
    old = _row_revision(connection, name)
    if not old:
        raise NotFound(f"no model is named {name!r}")
    _check_revision(connection, name, expected)
    connection.execute("DELETE FROM models WHERE name = ?", (name,))
    connection.execute("DELETE FROM engine_choices WHERE model = ?", (name,))
    revision = meta.next_models_revision(connection)
    audit.record(connection, epoch, origin, "remove", f"model/{name}", old, revision)
    remember(connection, key, revision, request, origin.at_wall_s)
    return revision


def import_unit(connection: apsw.Connection, epoch: int, specs: tuple[ModelSpec, ...]) -> bool:
    """What `import_once` does, for a write that imports more."""
    if meta.read_meta(connection).models_imported:
        return False
    connection.execute("UPDATE meta SET models_imported = 1")
    revision = meta.next_models_revision(connection)
    for spec in specs:
        if not _row_revision(connection, spec.name):
            _write(connection, spec, _encode(spec), revision)
            audit.record(connection, epoch, audit.CLUSTER, "import", f"model/{spec.name}", 0, revision)
    return True


def _write(connection: apsw.Connection, spec: ModelSpec, text: str, revision: int) -> int:
    connection.execute(
        "INSERT INTO models (name, revision, spec) VALUES (?, ?, ?)"
        " ON CONFLICT (name) DO UPDATE SET revision = excluded.revision, spec = excluded.spec",
        (spec.name, revision, text),
    )
    connection.execute("DELETE FROM model_names WHERE model = ?", (spec.name,))
    for name in dict.fromkeys(spec.names):
        taken = rows(connection, "SELECT model FROM model_names WHERE name = ?", (name,))
        if taken:
            raise Conflict(f"the name {name!r} of model {spec.name!r} is already used by model {taken[0][0]!r}", code="name_taken")
        connection.execute("INSERT INTO model_names (name, model) VALUES (?, ?)", (name, spec.name))
    return revision


def _check_revision(connection: apsw.Connection, name: str, expected: int | None) -> None:
    if expected is None:
        return
    stored = _row_revision(connection, name)
    if stored == expected:
        return
    if expected == 0:
        raise Conflict(f"model {name!r} is there already, at revision {stored}", code="revision_moved")
    now = f"is at revision {stored}" if stored else "is not there any more"
    raise Conflict(f"model {name!r} {now}, the edit began from {expected}", code="revision_moved")


def _row_revision(connection: apsw.Connection, name: str) -> int:
    found = rows(connection, "SELECT revision FROM models WHERE name = ?", (name,))
    return int(found[0][0]) if found else 0


def _is_stored(connection: apsw.Connection, name: str, text: str) -> bool:
    return bool(rows(connection, "SELECT 1 FROM models WHERE name = ? AND spec = ?", (name, text)))


def _encode(spec: ModelSpec) -> str:
    return json.dumps(unstructure(spec), sort_keys=True)


def _decode(name: str, text: str) -> ModelSpec:
    try:
        spec: ModelSpec = structure(json.loads(text), ModelSpec)
    except (Invalid, ValueError) as err:
        raise Unavailable(f"the stored model {name!r} cannot be read", code=STORAGE_UNAVAILABLE) from err
    return spec
