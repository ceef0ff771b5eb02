"""Where a value comes from: default, this machine's file, the cluster's document. One place merges them. Pure.

A machine's own keys come from its file; the cluster's from the document, once there is one, whatever the file says of them.
"""

from __future__ import annotations

import enum
from typing import Any

import attrs

from llmgw.domain.setting import Scope
from llmgw.settings.decode import known_paths
from llmgw.settings.document import Document, path_parts
from llmgw.settings.load import Loaded, table_scope
from llmgw.settings.schema import Settings


class Origin(enum.Enum):
    DEFAULT = "default"
    FILE = "file"
    DOCUMENT = "document"


@attrs.frozen
class Layer:
    """One key: its value in force, and whose it is. `in_vain`: what the file says of it to no effect, None for nothing."""

    path: str
    value: Any
    origin: Origin
    in_vain: Any = None


def effective(file: Loaded, document: Document | None) -> Settings:
    """What is in force on the machine of this file. `document` None: there is no store, or nothing in it yet."""
    if document is None:
        return file.settings
    own = {field.name: getattr(file.settings, field.name) for field in attrs.fields(Settings) if table_scope(field.name) is Scope.MACHINE}
    settings = attrs.evolve(document.settings, **own)
    for path, value in file.habits.items():
        if path not in document.paths:
            table, key = path.split(".")
            settings = attrs.evolve(settings, **{table: attrs.evolve(getattr(settings, table), **{key: value})})
    return settings


def layers(file: Loaded, document: Document | None) -> tuple[Layer, ...]:
    """Every key in the schema's order."""
    settings = effective(file, document)
    set_there = set(document.paths) if document is not None else set()
    found = []
    for path in _paths(settings, set_there | file.given):
        cluster = table_scope(path_parts(path)[0]) is Scope.CLUSTER
        in_file = _is_given(path, file.given)
        value = _value(settings, path)
        if document is not None and cluster:
            origin = Origin.DOCUMENT if path in set_there else Origin.DEFAULT
            found.append(Layer(path, value, origin, _value(file.settings, path) if in_file else None))
        else:
            found.append(Layer(path, value, Origin.FILE if in_file else Origin.DEFAULT))
    return tuple(found)


def ignored(file: Loaded, document: Document | None) -> tuple[str, ...]:
    """The cluster keys that the file holds in vain, because a document holds them."""
    return () if document is None else file.cluster_keys


def _is_given(path: str, given: frozenset[str]) -> bool:
    """A key whose value is itself a table is given when any of its parts is."""
    return path in given or any(other.startswith(f"{path}.") for other in given)


def _paths(settings: Settings, named: set[str] | frozenset[str]) -> list[str]:
    """The schema's keys; a table of tables is shown by the keys that somebody gave in it."""
    found: list[str] = []
    for path in known_paths(Settings):
        if path == "engines":
            found += sorted(other for other in named if other.startswith("engines."))
        elif settings.store is not None or not path.startswith("store."):
            found.append(path)
    return found


def _value(settings: Settings, path: str) -> Any:
    value: Any = settings
    parts = path_parts(path)
    if parts[0] == "engines":  # one that only the file names is there with its defaults
        value, parts = settings.engine(parts[1]), parts[2:]
    for part in parts:
        value = getattr(value, part, None)
    return value
