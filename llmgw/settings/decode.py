"""Plain data to the schema's values: every fault at once, each with its dotted path. Reads no file and knows no table by name."""

from __future__ import annotations

import difflib
import functools
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, TypeVar, Union

import attrs

from llmgw.domain.errors import Fault
from llmgw.domain.setting import TABLE, SettingMeta
from llmgw.domain.words import a_kind, a_value, kinds
from llmgw.settings.schema import NAMES, Checked, meta_of

T = TypeVar("T")
_BARE: Final = re.compile(r"[A-Za-z0-9_-]+\Z")
_NEAREST_SHARE: Final = 0.6  # difflib's own default: `retrys` finds `retries`, `foo` finds nothing
# Integers beyond 64 bits are legal for Python's parser but for no key of ours, and a database column refuses them.
_INT_BITS_MAX: Final = 63
_REASON_MAX: Final = 400  # characters: a fault stays readable when somebody pastes a file into a value
_KEY_MAX: Final = 100


class _Missing:
    """What a reader returns when it has told a fault instead."""


MISSING: Final = _Missing()


def join(path: str, key: str) -> str:
    """`path.key`, the key quoted as TOML wants it."""
    key = short(key, _KEY_MAX)
    part = key if _BARE.match(key) else '"' + key.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return f"{path}.{part}" if path else part


def short(text: str, limit: int = _REASON_MAX) -> str:
    """`text`, or its beginning where it is very long."""
    return text if len(text) <= limit else f"{text[: limit - 4]} ..."


@functools.cache
def field_types(cls: type) -> Mapping[str, Any]:
    """The types of a schema class's fields, evaluated."""
    return MappingProxyType(typing.get_type_hints(cls))


def unknown_key(path: str, key: str, known: Mapping[str, Any] | tuple[str, ...], elsewhere: tuple[str, ...] = ()) -> Fault:
    """The fault of a key that nobody knows: it names the nearest known one, here or in another table.

    `elsewhere` are dotted paths; one of them may stand here too, such as a list of tables that somebody else reads.
    """
    here = [name.removeprefix(f"{path}.") if path else name for name in elsewhere if name.rpartition(".")[0] == path]
    known = tuple(dict.fromkeys((*known, *here)))
    near = difflib.get_close_matches(key, list(known), n=1, cutoff=_NEAREST_SHARE)
    if near:
        return Fault(join(path, key), f"unknown key; did you mean {join(path, near[0])}?")
    same = [name for name in elsewhere if name.rpartition(".")[2] == key]
    if same:
        return Fault(join(path, key), f"unknown key here; did you mean {' or '.join(same[:3])}?")
    return Fault(join(path, key), f"unknown key; known here: {', '.join(sorted(known))}" if known else "unknown key")


def read_table(cls: type[T], raw: object, path: str, faults: list[Fault], elsewhere: tuple[str, ...] = ()) -> T | None:
    """An instance of the schema class `cls`, or None where `raw` is no table. Whatever is wrong is added to `faults`.

    Beside faults an instance holds stand-ins where values are not good, so that the rest can be checked further (see `sound`):
    callers look at `faults` before they use it.
    """
    if not isinstance(raw, Mapping):
        faults.append(Fault(path, f"expected a table, not {a_value(raw)}"))
        return None
    before = len(faults)
    types_of = field_types(typing.cast(Any, cls))
    given: dict[str, Any] = {}
    known = tuple(field.name for field in attrs.fields(typing.cast(Any, cls)))
    for key in raw:
        if key not in known:
            faults.append(unknown_key(path, str(key), known, elsewhere))
    for field in attrs.fields(typing.cast(Any, cls)):
        at = join(path, field.name)
        if field.name not in raw:
            if field.default is attrs.NOTHING:
                faults.append(Fault(at, "is missing"))
            continue
        value = _read_value(types_of[field.name], raw[field.name], at, faults, elsewhere)
        meta = meta_of(field)
        if value is not MISSING and meta is not None and (reason := _value_fault(meta, value)) is not None:
            faults.append(Fault(at, short(reason)))
            value = MISSING
        if value is MISSING:
            continue
        if NAMES in field.metadata:
            faults += name_faults(field.metadata[NAMES], value, at)
        given[field.name] = value
    table = _with_stand_ins(cls, given)
    if isinstance(table, Checked):
        faults += sound(table.faults(path), faults[before:])
    return table


def sound(found: Iterable[Fault], faults: Iterable[Fault]) -> list[Fault]:
    """Those of `found` whose keys are each without a fault of their own in `faults`: what a stand-in would say is not told."""
    faulty = [fault.path for fault in faults]
    return [
        fault
        for fault in found
        if not any(_within(at, other) or _within(other, at) for at in fault.looked_at or (fault.path,) for other in faulty)
    ]


def _within(path: str, whole: str) -> bool:
    return path == whole or path.startswith((f"{whole}.", f"{whole}["))


def _with_stand_ins(cls: type[T], given: Mapping[str, Any]) -> T:
    """An instance of `given`, with something harmless for each key that must be given and was not, or not well."""
    types_of = field_types(typing.cast(Any, cls))
    needed = [field.name for field in attrs.fields(typing.cast(Any, cls)) if field.default is attrs.NOTHING and field.name not in given]
    return cls(**given, **{name: () if typing.get_origin(types_of[name]) is tuple else types_of[name]() for name in needed})


def name_faults(known: tuple[str, ...], given: Mapping[str, Any], path: str) -> list[Fault]:
    """The faults of a table of tables whose names are fixed."""
    found = []
    for name in given:
        if name in known:
            continue
        # `[engines.llama.cpp]` is TOML for cpp in llama: what begins with the name is meant before what looks like it.
        near = [other for other in known if other.startswith(f"{name}.")] or difflib.get_close_matches(
            name, known, n=1, cutoff=_NEAREST_SHARE
        )
        hint = f"did you mean {join(path, near[0])}? " if near else ""
        found.append(Fault(join(path, name), f"unknown name; {hint}known: {', '.join(known)}"))
    return found


def _read_value(kind: Any, raw: object, path: str, faults: list[Fault], elsewhere: tuple[str, ...]) -> Any:
    origin = typing.get_origin(kind)
    if origin in (Union, types.UnionType):
        return _read_union(kind, raw, path, faults, elsewhere)
    if attrs.has(kind):
        found = read_table(kind, raw, path, faults, elsewhere)
        return _with_stand_ins(kind, {}) if found is None else found  # keeps the place of what follows it in a list
    if origin is tuple:
        return _read_list(typing.get_args(kind)[0], raw, path, faults, elsewhere)
    if origin is not None and issubclass(origin, Mapping):
        return _read_map(typing.get_args(kind)[1], raw, path, faults, elsewhere)
    return _read_plain(kind, raw, path, faults)


def _read_union(kind: Any, raw: object, path: str, faults: list[Fault], elsewhere: tuple[str, ...]) -> Any:
    """The schema's unions are `X | None`, where None only means "not given", and "a table or a number"."""
    members = [member for member in typing.get_args(kind) if member is not type(None)]
    tables = [member for member in members if attrs.has(member)]
    if tables and (isinstance(raw, Mapping) or len(members) == 1):
        return _read_value(tables[0], raw, path, faults, elsewhere)
    plain = next(member for member in members if member not in tables)
    if tables and (isinstance(raw, bool) or not isinstance(raw, plain)):
        faults.append(Fault(path, f"expected {a_kind(plain)} or a table, not {a_value(raw)}"))
        return MISSING
    return _read_value(plain, raw, path, faults, elsewhere)


def _read_list(kind: Any, raw: object, path: str, faults: list[Fault], elsewhere: tuple[str, ...]) -> Any:
    if not isinstance(raw, list | tuple):
        what = "a list of tables" if attrs.has(kind) else f"a list of {kinds(kind)}"
        faults.append(Fault(path, f"expected {what}, not {a_value(raw)}"))
        return MISSING
    values = [_read_value(kind, value, f"{path}[{index}]", faults, elsewhere) for index, value in enumerate(raw)]
    return MISSING if any(value is MISSING for value in values) else tuple(values)


def _read_map(kind: Any, raw: object, path: str, faults: list[Fault], elsewhere: tuple[str, ...]) -> Any:
    if not isinstance(raw, Mapping):
        faults.append(Fault(path, f"expected a table, not {a_value(raw)}"))
        return MISSING
    values = {key: _read_value(kind, value, join(path, str(key)), faults, elsewhere) for key, value in raw.items()}
    return MISSING if any(value is MISSING for value in values.values()) else MappingProxyType(values)


def _read_plain(kind: Any, raw: object, path: str, faults: list[Fault]) -> Any:
    reason = f"expected {a_kind(kind)}, not {a_value(raw)}"
    if kind is float and type(raw) in (int, float):
        number = _float(raw)
        if math.isfinite(number):
            return number
        reason = f"expected a finite number, not {str(raw)[:40]}"
    elif kind is int and type(raw) is int:
        if raw.bit_length() <= _INT_BITS_MAX:
            return raw
        reason = "the number is too large"
    elif kind is str and isinstance(raw, str):
        if not any("\ud800" <= c <= "\udfff" for c in raw) and "\0" not in raw:
            return str(raw)
        reason = "holds half of a character pair (a lone surrogate) or a NUL"
    elif kind is bool and type(raw) is bool:
        return raw
    faults.append(Fault(path, reason))
    return MISSING


def _float(raw: Any) -> float:
    try:
        return float(raw)
    except OverflowError:  # an int beyond what a float holds
        return math.inf


def _value_fault(meta: SettingMeta, value: Any) -> str | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        unit = f" {meta.unit}" if meta.unit else ""
        low, high = meta.low, meta.high
        if (low is not None and value < low) or (high is not None and value > high):
            return (
                f"must be {range_text(low, high)}{unit}, not {value:g}"
                if isinstance(value, float)
                else f"must be {range_text(low, high)}{unit}, not {value}"
            )
    if meta.choices and value not in meta.choices:
        near = difflib.get_close_matches(str(value), meta.choices, n=1, cutoff=_NEAREST_SHARE)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"must be one of {', '.join(meta.choices)}, not {value!r}{hint}"
    return meta.check(value) if meta.check is not None else None


def range_text(low: float | None, high: float | None) -> str:
    """An inclusive range in words; "" without bounds."""
    if low is not None and high is not None:
        return f"between {number_text(low)} and {number_text(high)}"
    if low is not None:
        return f"at least {number_text(low)}"
    return "" if high is None else f"at most {number_text(high)}"


def number_text(number: float) -> str:
    """A number as a person writes it: no exponent, no needless point."""
    return str(int(number)) if float(number).is_integer() else repr(number)


def given_paths(raw: Mapping[str, Any], path: str = "") -> tuple[str, ...]:
    """The dotted paths of every key that stands in `raw`: tables are gone into (an empty one says nothing), lists are not."""
    found: list[str] = []
    for key, value in raw.items():
        at = join(path, str(key))
        if isinstance(value, Mapping):
            found += given_paths(value, at)
        else:
            found.append(at)
    return tuple(found)


@functools.cache
def known_paths(cls: type, path: str = "") -> tuple[str, ...]:
    """The dotted paths of every key that the schema class knows, lists and tables of tables not gone into."""
    found: list[str] = []
    types_of = field_types(cls)
    for field in attrs.fields(typing.cast(Any, cls)):
        at = join(path, field.name)
        kind = types_of[field.name]
        inner = next((member for member in (kind, *typing.get_args(kind)) if attrs.has(member)), None)
        if TABLE in field.metadata and inner is not None and typing.get_origin(kind) is not tuple and not _is_map(kind):
            found += known_paths(inner, at)
        else:
            found.append(at)
    return tuple(found)


def _is_map(kind: Any) -> bool:
    origin = typing.get_origin(kind)
    return isinstance(origin, type) and issubclass(origin, Mapping)
