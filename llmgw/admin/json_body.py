"""Bodies of requests: JSON read strictly, so that what is odd is one clear 400 and never a guess or a crash."""

from __future__ import annotations

import json
import math
from typing import Any, Final

from llmgw.domain.errors import Invalid

DEPTH_MAX: Final = 64  # a model's table is 5 deep; beyond this it is an attack on somebody's stack
DIGITS_MAX: Final = 300  # of one number: a 64-bit integer has 20
_BOM: Final = b"\xef\xbb\xbf"


def parse(data: bytes) -> Any:
    """Plain data of a JSON text in UTF-8; a BOM before it is passed over. Raises Invalid (code `not_json`).

    Refused although Python would take it: NaN and infinities, a key twice in one object, half of a surrogate pair.
    """
    if data.startswith(_BOM):
        data = data[len(_BOM) :]
    if not data.strip():
        raise _not_json("the body is empty")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as err:
        raise _not_json(f"it is not UTF-8 at byte {err.start}") from err
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_float, parse_int=_int)
    except json.JSONDecodeError as err:
        raise _not_json(f"{err.msg} at line {err.lineno} column {err.colno}") from err
    except RecursionError as err:
        raise _not_json("it is nested too deeply") from err
    _check(value)
    return value


def parse_table(data: bytes) -> dict[str, Any]:
    """As `parse`, for a body that has to be an object."""
    value = parse(data)
    if not isinstance(value, dict):
        raise Invalid("the body has to be a JSON object", code="not_an_object")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _not_json(f"the key {twice[:100]!r} is there twice")
    return table


def _constant(name: str) -> Any:
    raise _not_json(f"{name} is no JSON number")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _not_json("a number is too large")
    return value


def _int(text: str) -> int:
    if len(text) > DIGITS_MAX:
        raise _not_json("a number is too large")
    return int(text)


def _check(value: Any) -> None:
    """Depth and texts, without recursion."""
    level = [value]
    for _ in range(DEPTH_MAX):
        below: list[Any] = []
        for one in level:
            if isinstance(one, str):
                _check_text(one)
            elif isinstance(one, dict):
                for key in one:
                    _check_text(key)
                below += one.values()
            elif isinstance(one, list):
                below += one
        if not below:
            return
        level = below
    raise _not_json(f"it is nested more than {DEPTH_MAX} deep")


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as err:
        raise _not_json("a text holds half of a surrogate pair") from err


def _not_json(why: str) -> Invalid:
    return Invalid(f"the body is not JSON that can be taken: {why}", code="not_json")
