"""The schema as rows for pages: one row per key, one section per table, in the order of the file. For example and reference only."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from typing import Any, Final

import attrs

from llmgw.domain.setting import TABLE, Scope, SettingMeta
from llmgw.domain.words import kind_word, kinds
from llmgw.settings.decode import field_types, join, number_text, range_text
from llmgw.settings.schema import EndpointTable, KeyTable, ModelTable, Settings, meta_of

ENGINE_SHOWN: Final = "vllm"  # the name that stands for <name> in [engines.<name>]


@attrs.frozen
class Row:
    """One key. `default` is what holds without it (`attrs.NOTHING`: it must be given)."""

    name: str
    meta: SettingMeta
    type_text: str
    default: Any

    @property
    def shown(self) -> Any:
        """What the example shows: an example where the default would teach nothing, else the default."""
        return self.default if self.meta.example is None else self.meta.example

    @property
    def required(self) -> bool:
        return self.default is attrs.NOTHING

    @property
    def range_text(self) -> str:
        if self.meta.choices:
            return " \\| ".join(f"`{choice}`" for choice in self.meta.choices)
        return range_text(self.meta.low, self.meta.high)


@attrs.frozen
class Section:
    """One table. `array` True: a `[[list]]` of them."""

    name: str
    help: str
    rows: tuple[Row, ...]
    scope: Scope
    array: bool = False

    @property
    def header(self) -> str:
        return f"[[{self.name}]]" if self.array else f"[{self.name}]"


def settings_sections() -> tuple[Section, ...]:
    """Every table of settings, machine's first."""
    sections = tuple(_sections(Settings, ""))
    return tuple(sorted(sections, key=lambda section: section.scope is not Scope.MACHINE))


def object_sections() -> tuple[Section, ...]:
    """The tables of objects."""
    return (
        *_of_class(ModelTable, "model", "What clients name, and what may serve it.", array=True),
        *_of_class(KeyTable, "auth.key", "A client of /v1. Only a hash of its key is kept.", array=True),
        *_of_class(EndpointTable, "endpoint", "An engine that answers somewhere already, for a router on a static list.", array=True),
    )


def _sections(cls: type, path: str) -> Iterator[Section]:
    types_of = field_types(cls)
    for field in attrs.fields(typing.cast(Any, cls)):
        if TABLE not in field.metadata:
            continue
        kind = types_of[field.name]
        inner = next(member for member in (kind, *typing.get_args(kind)) if attrs.has(member))
        origin = typing.get_origin(kind)
        named = isinstance(origin, type) and issubclass(origin, Mapping)
        name = f"{join(path, field.name)}.{ENGINE_SHOWN}" if named else join(path, field.name)
        yield from _of_class(inner, name, field.metadata[TABLE], array=origin is tuple)


def _of_class(cls: type, name: str, help: str, *, array: bool = False) -> Iterator[Section]:
    types_of = field_types(cls)
    rows = []
    for field in attrs.fields(typing.cast(Any, cls)):
        meta = meta_of(field)
        if meta is not None:
            rows.append(Row(field.name, meta, _type_text(types_of[field.name]), _default(field)))
    yield Section(name, help, tuple(rows), rows[0].meta.scope, array)
    yield from _sections(cls, name)


def _default(field: Any) -> Any:
    made = field.default
    return made.factory() if isinstance(made, attrs.Factory) else made  # type: ignore[arg-type]  # Factory is a class at run time


def _type_text(kind: Any) -> str:
    members = [member for member in typing.get_args(kind) if member is not type(None)]
    origin = typing.get_origin(kind)
    if origin is tuple:
        return f"list of {kinds(members[0])}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "table of strings"
    if members:
        return " or ".join("table" if attrs.has(member) else kind_word(member) for member in members)
    return kind_word(kind)


def toml_value(value: Any) -> str:
    """A value as TOML on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return number_text(value)
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, Mapping):
        inner = ", ".join(f"{join('', key)} = {toml_value(item)}" for key, item in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    return "[" + ", ".join(toml_value(item) for item in value) + "]"
