"""Words for people: what they call a type or a value in TOML and JSON, how many there are, and texts made harmless.

So that no word of Python's and no escape sequence of a stranger's reaches an operator.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from typing import Any, Final

_KINDS: Final[Mapping[type, str]] = {str: "string", int: "whole number", float: "number", bool: "true or false"}
# What steers a terminal: CSI and OSC sequences and their like, whole; other escapes; control characters but for tab and line
# break; and what turns the direction of text around.
_STEERS: Final = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|(?:\x1b[\]PX^_]|[\x90\x98\x9d\x9e\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?|\x1b[ -/]*[0-~]?"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def plain(text: str) -> str:
    """`text` without what would steer a terminal: colours, cursor moves, titles. Tabs and line breaks stay.

    For what engines and strangers wrote, wherever it may meet a person's screen.
    """
    return text if text.isascii() and text.isprintable() else _STEERS.sub("", text)


def plain_line(text: str) -> str:
    """The same, on one line."""
    return " ".join(plain(text).split())


def counted(number: int, what: str) -> str:
    """ "1 node", "2 nodes"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


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
