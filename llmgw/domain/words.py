"""What a person calls a type or a value in TOML and JSON: for messages, so that no word of Python's reaches an operator."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any, Final

_KINDS: Final[Mapping[type, str]] = {str: "string", int: "whole number", float: "number", bool: "true or false"}


def kind_word(kind: Any) -> str:
    """The kind alone, as a column of a page holds it."""
    return _KINDS[kind]


def a_kind(kind: Any) -> str:
    """What was expected: "a string", "true or false"."""
    return _KINDS[kind] if kind is bool else f"a {_KINDS[kind]}"


def kinds(kind: Any) -> str:
    """Several of a kind, as in "a list of strings"."""
    return _KINDS[kind] if kind is bool else f"{_KINDS[kind]}s"


def a_value(value: object) -> str:
    """What was given instead. The value itself is not repeated, since it may be a secret; which of two truths it is, is none."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return "a whole number"
    if isinstance(value, float):
        return "a number with a point"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return "a date or time"
    return "something else"  # bytes, say: neither TOML nor JSON has more kinds than the above
