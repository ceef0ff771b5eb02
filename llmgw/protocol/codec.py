"""Messages to bytes and back: JSON objects with a `type`, cattrs hooks, every fault of a message at once.

Unknown fields are skipped, so that neighbouring builds can speak. Raises `Invalid` for anything else that is odd.
"""

from __future__ import annotations

import enum
import functools
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs
import cattrs
import msgspec
from cattrs.strategies import configure_tagged_union

from llmgw.domain.endpoint import Endpoint
from llmgw.domain.errors import Fault, Invalid
from llmgw.domain.plan import Action
from llmgw.domain.words import a_kind, a_value
from llmgw.protocol import messages as m

MESSAGE_BYTES_MAX: Final = 8 * 1024 * 1024  # a full inventory of 1,000 replicas with log tails stays below 4 MiB
ENDPOINTS_REMEMBERED: Final = 20_000  # the largest list that is measured is 5,000; a remembered one costs about 1 KB


class _Odd(ValueError):
    """A fault in our own words."""


def _structure_mapping(value: Any, hint: Any) -> Mapping[str, str]:
    if not isinstance(value, dict) or not all(isinstance(k, str) and isinstance(v, str) for k, v in value.items()):
        raise _Odd("expected a table of strings")
    return types.MappingProxyType(dict(value))


def _is_mapping(hint: Any) -> bool:
    return typing.get_origin(hint) is Mapping


def _strict(kind: type) -> Any:
    def structure(value: Any, _: Any) -> Any:
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind:
            raise _Odd(f"expected {a_kind(kind)}, not {a_value(value)}")
        if isinstance(value, float) and not math.isfinite(value):
            raise _Odd("expected a finite number")
        return value

    return structure


def _remembering(structure: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """An endpoint that came before is the same value again: of a list of 5,000 a change touches few, and making all of them anew
    would hold up a router's streams for 0.2 s (measured), five times as long as this does."""
    known: dict[bytes, Any] = {}

    def remembering(value: Any, kind: Any) -> Any:
        row = _ENCODER.encode(value)
        found = known.get(row)
        if found is None:
            found = structure(value, kind)
            if len(known) >= ENDPOINTS_REMEMBERED:
                known.clear()
            known[row] = found
        return found

    return remembering


def make_converter() -> cattrs.Converter:
    """A converter for domain and protocol values: strict about types, deaf to unknown fields."""
    converter = cattrs.Converter(detailed_validation=True)
    for kind in (str, int, float, bool):
        converter.register_structure_hook(kind, _strict(kind))
    converter.register_structure_hook_func(_is_mapping, _structure_mapping)
    converter.register_unstructure_hook(types.MappingProxyType, dict)
    converter.register_unstructure_hook_func(_is_mapping, dict)
    converter.register_structure_hook(Endpoint, _remembering(converter.get_structure_hook(Endpoint)))
    for union in (m.Order, Action, m.Message):
        configure_tagged_union(union, converter, tag_name="type")
    return converter


_ENCODER: Final = msgspec.json.Encoder()
_CONVERTER: Final = make_converter()
_TYPES: Final = frozenset(kind.__name__ for kind in typing.get_args(m.Message))
_FIRST_TYPE: Final = re.compile(rb'\s*\{\s*"type"\s*:\s*"([A-Za-z]{1,40})"')


@attrs.frozen(eq=False)
class Shared:
    """A message for several peers: what it is in bytes is worked out once, when the first of them is sent it."""

    message: m.Message

    @functools.cached_property
    def data(self) -> bytes:
        return encode(self.message)


def encode(message: m.Message | Shared) -> bytes:
    """One message as JSON. Its type comes first, so that it can be told of one that is too large to be read."""
    if isinstance(message, Shared):
        return message.data
    raw = _CONVERTER.unstructure(message, m.Message)
    return _ENCODER.encode({"type": raw.pop("type"), **raw})


def decode(data: bytes) -> m.Message:
    """One message from JSON. Raises `Invalid` with every fault and its path; it names the message's type where that is known.

    The error's text is what came, so that a caller who knows the sender may say "NAME sent ...".
    """
    if len(data) > MESSAGE_BYTES_MAX:  # how much more, nobody knows: the rest was not kept
        kind = _FIRST_TYPE.match(data)
        what = f"a message {kind[1].decode()}" if kind else "a message of unknown type"
        raise Invalid(f"{what} that is over the limit of {MESSAGE_BYTES_MAX} bytes for one message", code="message_too_large")
    try:
        raw = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
        raise Invalid(f"bytes that are not JSON: {err}", code="malformed_message") from err
    if not isinstance(raw, dict) or not isinstance(raw.get("type"), str):
        raise Invalid("something that is not a message: an object with a type is expected", code="malformed_message")
    if raw["type"] not in _TYPES:
        raise Invalid(f"a message of type {raw['type'][:40]!r}, which this build does not know", code="unknown_message")
    try:
        return typing.cast(m.Message, _CONVERTER.structure(raw, typing.cast(Any, m.Message)))
    except (cattrs.BaseValidationError, KeyError, ValueError, TypeError, Invalid) as err:
        faults = _faults(err, raw["type"])
        raise Invalid(
            f"a malformed {raw['type'][:40]}: {'; '.join(map(str, faults[:5]))}", faults=faults, code="malformed_message"
        ) from err


def structure(raw: Any, kind: type[Any]) -> Any:
    """Any domain value from plain JSON data, such as a state file's. Raises `Invalid` with every fault."""
    try:
        return _CONVERTER.structure(raw, kind)
    except (cattrs.BaseValidationError, KeyError, ValueError, TypeError) as err:
        faults = _faults(err, kind.__name__)
        raise Invalid(f"malformed {kind.__name__}: {'; '.join(map(str, faults[:5]))}", faults=faults) from err


def unstructure(value: Any) -> Any:
    """Plain JSON data of any domain value."""
    return _CONVERTER.unstructure(value, type(value) if attrs.has(type(value)) else None)


def _faults(err: BaseException, path: str) -> tuple[Fault, ...]:
    if isinstance(err, KeyError):
        return (Fault(path, f"missing or unknown: {err.args[0]!r}"),)
    if not isinstance(err, cattrs.BaseValidationError):
        return (Fault(path, str(err)),)
    found: list[Fault] = []
    for text in cattrs.transform_error(err, path=path, format_exception=_in_words):
        reason, _, where = text.rpartition(" @ ")
        found.append(Fault(where, reason))
    return tuple(found)


def _in_words(err: BaseException, kind: type | None) -> str:
    """What one value lacks; the library's own words name Python's types and classes of ours."""
    if isinstance(err, _Odd | Invalid):
        return str(err)
    if isinstance(err, KeyError):
        return "is missing" if kind is None or not _is_union(kind) else f"is of no known type: {str(err.args[0])[:40]!r}"
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return f"must be one of {', '.join(str(member.value) for member in kind)}"
    if isinstance(err, TypeError):
        return "is a value of another kind than expected"
    return "cannot be understood"


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (types.UnionType, typing.Union)
