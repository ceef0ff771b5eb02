"""Text for a terminal: columns, server's text made harmless, errors cut. Prints nothing itself."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Final

WORD_MAX: Final = 200  # chosen: paths and addresses of people stay whole
LINE_MAX: Final = 2_000  # chosen: a list of what is known stays whole
_LONG_WORD: Final = re.compile(rf"\S{{{WORD_MAX + 1},}}")
_LONG_LINE: Final = re.compile(rf"[^\n]{{{LINE_MAX + 1},}}")
_KEPT: Final = "\n\t"
# Characters that reorder or hide text on a terminal, though they are not control characters by category.
_BIDI: Final = frozenset("\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u2028\u2029")


def printable(text: str, terminal: bool) -> str:
    """`text` with what would steer a terminal shown as escapes; as it is when the output is no terminal.

    Names of models and lines of logs come from outside: an escape sequence in them could rewrite what a person reads.
    """
    if not terminal or (text.isascii() and text.isprintable()):
        return text
    return "".join(_shown(c) for c in text)


def _shown(c: str) -> str:
    if c in _KEPT or not (unicodedata.category(c) in ("Cc", "Cs") or c in _BIDI):
        return c
    return f"\\x{ord(c):02x}" if ord(c) < 0x100 else f"\\u{ord(c):04x}"


def readable(text: str) -> str:
    """`text` of an error without the middle of what is very long in it: a value that somebody gave, as a rule."""
    return _LONG_LINE.sub(_without_middle, _LONG_WORD.sub(_without_middle, text))


def _without_middle(match: re.Match[str]) -> str:
    whole, kept = match[0], (WORD_MAX if match.re is _LONG_WORD else LINE_MAX) // 2
    return f"{whole[:kept]} ... {whole[-kept:]}"


def one_line(text: str) -> str:
    """For a cell of a table: line breaks and tabs become spaces."""
    return " ".join(text.split())


def width(text: str) -> int:
    """Columns that `text` takes: wide characters take two, combining ones none."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table as lines: columns as wide as they need, two spaces between, nothing after the last."""
    cells = [list(header), *([one_line(cell) for cell in row] for row in rows)]
    widths = [max(width(row[index]) for row in cells) for index in range(len(header))]
    return ["  ".join(cell + " " * (widths[index] - width(cell)) for index, cell in enumerate(row)).rstrip() for row in cells]
