"""The cluster settings as one document: cluster keys and nothing else, in the one form that is hashed, stored and shown.

A document holds what somebody set; a key that is not in it has its default. What a version is, and who may write one, is
`store.settings` and `control.settings_writer`. Pure.
"""

from __future__ import annotations

import functools
import hashlib
import math
import tomllib
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Final

import attrs
import tomli_w

from llmgw.domain.errors import Fault, Invalid, NotFound
from llmgw.domain.setting import Applies, Scope, SettingMeta
from llmgw.settings.decode import field_types, join, known_paths, name_faults, read_table, unknown_key
from llmgw.settings.load import KEY_TABLE, OBJECT_TABLES, table_scope
from llmgw.settings.schema import NAMES, Settings, meta_of
from llmgw.settings.toml_text import parse_toml

DOCUMENT_BYTES_MAX: Final = 1024 * 1024  # chosen: a guard rule of 10,000 words fits ten times; a file given by mistake does not
PATH_MAX: Final = 300  # characters of one key

# What version 1 says of the guard where the file that it was imported from says nothing: limits that no honest client meets,
# and a mark on prompts that carry a private key. It blocks nobody by surprise.
BASELINE_GUARD: Final[Mapping[str, Any]] = {
    "max_messages": 2048,
    "rule": [
        {
            "name": "private-keys",
            "on": "prompt",
            "words": [
                "BEGIN PRIVATE KEY",
                "BEGIN ENCRYPTED PRIVATE KEY",
                "BEGIN RSA PRIVATE KEY",
                "BEGIN EC PRIVATE KEY",
                "BEGIN OPENSSH PRIVATE KEY",
            ],
            "action": "flag",
        }
    ],
}


@attrs.frozen
class Difference:
    """One key that two documents set differently. None: not set there, so that its default holds."""

    path: str
    before: Any
    after: Any
    applies: Applies


@attrs.frozen
class Document:
    """`values` is plain nested data in the schema's order; `settings` are all settings under it, machine keys at their defaults.

    Two documents are the same when their texts are.
    """

    text: str
    values: Mapping[str, Any] = attrs.field(eq=False, repr=False)
    settings: Settings = attrs.field(eq=False, repr=False)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def paths(self) -> tuple[str, ...]:
        """The dotted paths of every key that is set, in order; a list is one key."""
        return tuple(path_text(parts) for parts, _ in _leaves(self.values, ()))


def parse_document(text: str | bytes, source: str) -> Document:
    """From TOML. `source` names it in errors. Raises Invalid with every fault."""
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    _check_size(len(data), source)
    try:
        found = parse_toml(data.decode("utf-8"), source)
    except UnicodeDecodeError as err:
        line = data[: err.start].count(b"\n") + 1
        raise Invalid(f"{source} is not UTF-8 text (line {line})") from err
    return document_of(found, source)


def document_of(values: Mapping[str, Any], source: str) -> Document:
    """From plain data, as JSON or TOML holds it. Raises Invalid with every fault, each with its path."""
    faults = list(_foreign(values))
    kept = {table: value for table, value in values.items() if table_scope(str(table)) is Scope.CLUSTER}
    auth = kept.get("auth")
    if isinstance(auth, Mapping) and "key" in auth:
        faults.append(Fault("auth.key", _OBJECTS[KEY_TABLE]))
        kept["auth"] = {key: value for key, value in auth.items() if key != "key"}
    settings = read_table(Settings, kept, "", faults, elsewhere=known_paths(Settings))
    if faults or settings is None:
        raise Invalid.of(f"{source} is not valid", tuple(faults))
    ordered = _ordered(Settings, kept)
    text = tomli_w.dumps(ordered)
    _check_size(len(text.encode()), source)
    settings = read_table(Settings, ordered, "", faults)  # anew: a table that says nothing has left the text
    assert settings is not None
    assert not faults
    return Document(text, ordered, settings)


EMPTY: Final = Document("", {}, Settings())


def imported(values: Mapping[str, Any], source: str) -> Document:
    """A file's cluster keys (`Loaded.cluster_values`) as a first document, with the baseline guard policy where it has none."""
    return document_of({"guard": BASELINE_GUARD, **values}, source)


def cluster_values_of(settings: Settings) -> dict[str, Any]:
    """The cluster keys that differ from their defaults, as plain data: what a file that says the same would hold."""
    default = Settings()
    found: dict[str, Any] = {}
    for field in attrs.fields(Settings):
        value = getattr(settings, field.name)
        if table_scope(field.name) is Scope.CLUSTER and value != getattr(default, field.name):
            found[field.name] = _plain(value, getattr(default, field.name))
    return found


def _plain(value: Any, default: Any = None) -> Any:
    if attrs.has(type(value)):
        mine = type(value)
        usual = default if isinstance(default, mine) else None
        return {
            field.name: _plain(inner, getattr(usual, field.name, None))
            for field in attrs.fields(mine)
            if (inner := getattr(value, field.name)) != (getattr(usual, field.name) if usual is not None else field.default)
        }
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


# --- one key


def with_keys(document: Document, given: Mapping[str, Any], unset: Iterable[str] = ()) -> Document:
    """The document with these keys set and those not set any more; `given` is by dotted path. Raises Invalid as `document_of`,
    and for a key that nobody knows or that is in both."""
    values = _copy(document.values)
    faults: dict[Fault, None] = {}  # in their order, each once
    gone: set[tuple[str, ...]] = set()  # by parts: one key may be spelled in two ways
    put: dict[tuple[str, ...], Any] = {}
    for path in unset:
        if (fault := _path_fault(path)) is not None:
            faults[fault] = None
        else:
            gone.add(path_parts(path))
    for path, value in given.items():
        if (fault := _path_fault(path)) is not None:
            faults[fault] = None
        elif (parts := path_parts(path)) in gone or parts in put:
            faults[Fault(path, "cannot be set and unset at once" if parts in gone else "is set twice")] = None
        else:
            put[parts] = value
    for parts in gone:
        _remove(values, parts)
    for parts, value in put.items():
        table = values
        for part in parts[:-1]:
            table = table.setdefault(part, {})
        table[parts[-1]] = value
    try:
        changed = document_of(values, "the change")
    except Invalid as err:  # what is wrong with the values is told beside what is wrong with the keys
        raise Invalid.of("the change is not valid", (*faults, *err.faults)) if err.faults else err from None
    if faults:
        raise Invalid.of("the change is not valid", tuple(faults))
    return changed


def value_at(document: Document, path: str) -> Any:
    """What the document sets at `path` (a key or a whole table); None for nothing. Raises NotFound for a key that nobody knows."""
    if (fault := _path_fault(path, tables=True)) is not None:
        raise NotFound(f"there is no key {fault.path}: {fault.reason}", code="unknown_key")
    value: Any = document.values
    for part in path_parts(path):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def read_value(path: str, text: str) -> Any:
    """What a person typed as the value of a key: TOML, or the text as it stands for a key that takes text. Raises Invalid."""
    if (fault := _path_fault(path)) is not None:
        raise Invalid.of("the change is not valid", (fault,))
    kind = _kind_at(path_parts(path))
    try:
        found = tomllib.loads(f"value = {text}")
        if set(found) != {"value"}:
            raise ValueError
        value = found["value"]
    except (ValueError, RecursionError) as err:
        if kind is str:
            return text
        raise Invalid(f"{path}: {text[:100]!r} is no value that TOML knows; text stands in quotes", param=path) from err
    if isinstance(value, float) and not math.isfinite(value):  # TOML knows such numbers, and JSON cannot carry them
        raise Invalid(f"{path}: expected a finite number, not {text.strip()[:40]}", param=path)
    return text if kind is str and not isinstance(value, str) else value


# --- two documents


def differences(before: Document, after: Document) -> tuple[Difference, ...]:
    """Every key that is set otherwise, in the schema's order. Also of documents that another build has written."""
    old, new = dict(_leaves(before.values, ())), dict(_leaves(after.values, ()))
    changed = [parts for parts in {**old, **new} if (parts in old, old.get(parts)) != (parts in new, new.get(parts))]
    return tuple(Difference(path_text(parts), old.get(parts), new.get(parts), _applies(parts)) for parts in sorted(changed, key=_place))


def restart_keys(before: Settings, after: Settings, scope: Scope = Scope.CLUSTER) -> tuple[str, ...]:
    """Keys of that scope whose change takes a restart, and which differ between the two, sorted as the schema."""
    return tuple(
        path
        for path in known_paths(Settings)
        if table_scope(path.partition(".")[0]) is scope
        and (meta := _meta_at(tuple(path.split(".")))) is not None
        and meta.applies is Applies.RESTART
        and _setting(before, path) != _setting(after, path)
    )


def live_merge(running: Settings, wanted: Settings) -> Settings:
    """`wanted` as far as a running process can take it: keys that take a restart stay as they are in `running`."""
    kept: dict[str, Any] = {}
    for field in attrs.fields(Settings):
        old, new = getattr(running, field.name), getattr(wanted, field.name)
        if table_scope(field.name) is Scope.MACHINE:
            kept[field.name] = old
        elif attrs.has(type(old)):
            stay = {
                inner.name: getattr(old, inner.name)
                for inner in attrs.fields(type(old))
                if (meta := meta_of(inner)) is not None and meta.applies is Applies.RESTART
            }
            kept[field.name] = attrs.evolve(new, **stay) if stay else new
    return attrs.evolve(wanted, **kept)


# --- paths


def path_parts(path: str) -> tuple[str, ...]:
    """A dotted path as TOML writes it (`engines."llama.cpp".load_limit_s`). Raises Invalid."""
    if not path or len(path) > PATH_MAX or any(c in path for c in "\n\r=#[]{}"):
        raise Invalid(f"{path[:100]!r} is no key: expected table.key", param=path[:100])
    try:
        found: Any = tomllib.loads(f"{path} = 0")
    except ValueError as err:
        raise Invalid(f"{path[:100]!r} is no key: expected table.key", param=path[:100]) from err
    parts = []
    while isinstance(found, dict):
        (part,) = found
        parts.append(part)
        found = found[part]
    return tuple(parts)


def path_text(parts: Iterable[str]) -> str:
    """The parts as one dotted path."""
    return functools.reduce(join, parts, "")


def _path_fault(path: str, *, tables: bool = False) -> Fault | None:
    try:
        parts = path_parts(path)
    except Invalid as err:
        return Fault(path[:100], err.message)
    scope = table_scope(parts[0])
    if scope is Scope.MACHINE:
        return Fault(path, _MACHINES)
    if (why := _OBJECTS.get(KEY_TABLE if parts[:2] == ("auth", "key") else parts[0])) is not None:
        return Fault(path, why)
    kind: Any = Settings
    for index, part in enumerate(parts):
        if _is_map(kind):
            if named := name_faults(_names_in(parts[:index]), {part: None}, path_text(parts[:index])):
                return named[0]
            kind = _inner(kind)
            continue
        table = _table_in(kind)
        if table is None:
            return Fault(path, "has no keys of its own")
        if part not in field_types(table):
            return unknown_key(path_text(parts[:index]), part, tuple(field_types(table)), known_paths(Settings))
        kind = field_types(table)[part]
    if not tables and _holds_keys(kind):
        return Fault(path, "is a table; name one of its keys")
    return None


_MACHINES: Final = "is one machine's own key; it stands in that machine's file"
_OBJECTS: Final[Mapping[str, str]] = {
    "model": "is no setting; models are changed with `llmgw ctl model`",
    KEY_TABLE: "is no setting; clients' keys are changed with `llmgw ctl key`",
    "endpoint": "is no setting; endpoints come from models' replicas, also those that somebody else runs (a profile with "
    'engine = "openai"); [[endpoint]] tables stand in the file of a router',
}


def _foreign(values: Mapping[str, Any]) -> Iterable[Fault]:
    for table in values:
        if table in OBJECT_TABLES:
            yield Fault(table, _OBJECTS[table])
        elif (scope := table_scope(table)) is Scope.MACHINE:
            yield Fault(table, f"[{table}] {_MACHINES}")
        elif scope is None:
            clusters = tuple(name for name in field_types(Settings) if table_scope(name) is Scope.CLUSTER)
            yield unknown_key("", table, clusters, known_paths(Settings))


def _ordered(cls: type, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Plain data in the schema's order, without tables that say nothing, whole numbers without a point."""
    types_of = field_types(cls)
    found: dict[str, Any] = {}
    for name, kind in types_of.items():
        if name not in raw:
            continue
        value = _tidy(kind, raw[name])
        if value != {} or not _holds_keys(kind):
            found[name] = value
    return found


def _tidy(kind: Any, value: Any) -> Any:
    table = _table_in(kind)
    if _is_list(kind):
        (inner, *_) = typing.get_args(kind)
        return [_tidy(inner, item) for item in value]
    if _is_map(kind) and isinstance(value, Mapping):
        inner = _inner(kind)
        tidied = {name: _tidy(inner, item) for name, item in sorted(value.items())}
        return {name: item for name, item in tidied.items() if item != {}} if attrs.has(inner) else tidied
    if table is not None and isinstance(value, Mapping):
        return _ordered(table, value)
    if isinstance(value, float) and value.is_integer():
        return int(value)  # 15 and 15.0 are one setting, and one text
    return value


def _leaves(values: Mapping[str, Any], above: tuple[str, ...]) -> Iterable[tuple[tuple[str, ...], Any]]:
    for name, value in values.items():
        parts = (*above, name)
        if isinstance(value, Mapping) and not _is_plain_map(parts):
            yield from _leaves(value, parts)
        else:
            yield parts, value


def _is_plain_map(parts: tuple[str, ...]) -> bool:
    """Is it a key whose value is a table of texts, rather than a table of keys?"""
    kind = _kind_at(parts)
    return _is_map(kind) and not attrs.has(_inner(kind))


def _kind_at(parts: tuple[str, ...]) -> Any:
    """The declared type at a known path; None for an unknown one."""
    kind: Any = Settings
    for part in parts:
        if _is_map(kind):
            kind = _inner(kind)
            continue
        table = _table_in(kind)
        if table is None or part not in field_types(table):
            return None
        kind = field_types(table)[part]
    return kind


def _meta_at(parts: tuple[str, ...]) -> SettingMeta | None:
    above = _kind_at(parts[:-1])
    table = _table_in(above)
    if table is None:
        return None
    field = next((field for field in attrs.fields(table) if field.name == parts[-1]), None)
    return None if field is None else meta_of(field)


def _names_in(parts: tuple[str, ...]) -> tuple[str, ...]:
    """The names that the table of tables at a known path may hold."""
    field = next(field for field in attrs.fields(_table_in(_kind_at(parts[:-1]))) if field.name == parts[-1])
    names: tuple[str, ...] = field.metadata[NAMES]
    return names


def _applies(parts: tuple[str, ...]) -> Applies:
    meta = _meta_at(parts)
    return Applies.LIVE if meta is None else meta.applies


def _place(parts: tuple[str, ...]) -> tuple[tuple[int, str], ...]:
    """Sorts as the schema: keys as declared, free names by name, what this build does not know behind what it does."""
    found = []
    kind: Any = Settings
    for part in parts:
        if _is_map(kind):
            found.append((0, part))
            kind = _inner(kind)
            continue
        table = _table_in(kind)
        known = () if table is None else tuple(field_types(table))
        found.append((known.index(part), "") if part in known else (len(known), part))
        kind = field_types(table)[part] if part in known else None
    return tuple(found)


def _setting(settings: Settings, path: str) -> Any:
    value: Any = settings
    for part in path.split("."):
        value = getattr(value, part, None)
    return value


def _is_map(kind: Any) -> bool:
    origin = typing.get_origin(kind)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _is_list(kind: Any) -> bool:
    return typing.get_origin(kind) is tuple


def _holds_keys(kind: Any) -> bool:
    """Is it a table of keys, or a table of such tables?"""
    return attrs.has(_inner(kind)) if _is_map(kind) else _table_in(kind) is not None


def _inner(kind: Any) -> Any:
    return typing.get_args(kind)[1]


def _table_in(kind: Any) -> Any:
    if attrs.has(kind):
        return kind
    if _is_map(kind) or _is_list(kind):
        return None
    return next((member for member in typing.get_args(kind) if attrs.has(member)), None)


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _copy(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copy(item) for item in value]
    return value


def _remove(values: dict[str, Any], parts: tuple[str, ...]) -> None:
    table = values
    for part in parts[:-1]:
        inner = table.get(part)
        if not isinstance(inner, dict):
            return
        table = inner
    table.pop(parts[-1], None)


def _check_size(size: int, source: str) -> None:
    if size > DOCUMENT_BYTES_MAX:
        raise Invalid(f"{source} is larger than {DOCUMENT_BYTES_MAX} bytes: that is no settings document", code="document_too_large")
