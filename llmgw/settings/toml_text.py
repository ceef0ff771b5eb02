"""TOML's syntax: text to plain data, and what is wrong with it in words of TOML, with line, column and the key where there is one.

The parser's own messages speak of Python ("Cannot declare ('server',) twice"). Knows no table of ours.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable
from typing import Any, Final

from llmgw.domain.errors import Invalid
from llmgw.settings.decode import join

_POSITION: Final = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")
_KEY: Final = re.compile(r"\s*([A-Za-z0-9_.\"' -]+?)\s*=")


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """TOML to plain data. Raises Invalid with the line, column and key of what is no TOML; a value is not repeated."""
    try:
        return tomllib.loads(text.removeprefix("\ufeff"))  # some editors begin a file with a byte order mark
    except tomllib.TOMLDecodeError as err:
        raise Invalid(f"{source} is not TOML{_told(str(err), text)}") from err
    except RecursionError as err:
        raise Invalid(f"{source} is nested too deeply") from err
    except ValueError as err:  # an int of more digits than Python converts
        raise Invalid(f"{source} is not TOML: a whole number has more digits than any setting takes") from err


def _told(message: str, text: str) -> str:
    found = _POSITION.search(message)
    if found is None:
        return f": {_in_words(message, None)}"
    line, column = found.groups()
    reason = message[: found.start()]
    if line is None:
        if reason == "Invalid value":
            return " at its end: a value is missing, or a list is not closed with ]"
        return f" at its end: {_in_words(reason, None)}"
    lines = text.replace("\r\n", "\n").split("\n")  # as the parser counts them
    return f" at line {line}, column {column}: {_in_words(reason, _key_of(lines[int(line) - 1]))}"


def _key_of(line: str) -> str | None:
    """The key that a line gives a value to; never a part of the value."""
    match = _KEY.match(line)
    return match[1] if match else None


def _in_words(reason: str, key: str | None) -> str:
    for pattern, words in _WORDS:
        if (match := re.fullmatch(pattern, reason, re.DOTALL)) is not None:
            return words(match, key)
    return reason


def _path(match: re.Match[str], _: str | None = None) -> str:
    """A name that the parser prints as a tuple, as TOML writes it."""
    path = ""
    for part in ast.literal_eval(match[1]):
        path = join(path, part)
    return path


def _said(text: str) -> Callable[[re.Match[str], str | None], str]:
    return lambda match, key: text


def _of_key(text: str, otherwise: str) -> Callable[[re.Match[str], str | None], str]:
    return lambda match, key: text.format(key) if key else otherwise


def _overwritten(match: re.Match[str], key: str | None) -> str:
    return f"the key {key} is given a second time" if key else "this name stands for something else already"


_IN_LINE: Final = "was given whole before, in braces or brackets, and nothing is added to it"
_CANNOT_BE_READ: Final = "no value that TOML knows; text stands in quotes"
# The parser's messages, and what each means for whoever wrote the file.
_WORDS: Final[tuple[tuple[str, Callable[[re.Match[str], str | None], str]], ...]] = (
    (r"Cannot declare (\(.*\)) twice", lambda match, key: f"the table [{_path(match)}] is there already"),
    (r"Cannot mutate immutable namespace (\(.*\))", lambda match, key: f"{_path(match)} {_IN_LINE}"),
    (
        r"Cannot redefine namespace (\(.*\))",
        lambda match, key: f"the table [{_path(match)}] has a header of its own; its keys stand there",
    ),
    (r"Cannot overwrite a value", _overwritten),
    (r"Duplicate inline table key (.*)", lambda match, key: f"the key {join('', ast.literal_eval(match[1]))} stands twice in the braces"),
    (r"Invalid value", _of_key(f"the key {{}} has {_CANNOT_BE_READ}", f"here is {_CANNOT_BE_READ}")),
    (r"Invalid statement", _said("neither a key nor a table's header can begin like this")),
    (r"Invalid initial character for a key part", _said("a name is missing, or a character of it has to stand in quotes")),
    (r"Expected '=' after a key in a key/value pair", _said("expected = after the key")),
    (r"Expected newline or end of document after a statement", _said("something follows where the line should end")),
    (
        r"Expected '(\]+)' at the end of an? (?:table|array) declaration",
        lambda match, key: f"the table's header is not closed with {match[1]}",
    ),
    (r"Expected '(\\n|'+|\"+)'", _said("a quote is missing")),
    (r'Expected "(\'+)"', _said("a quote is missing")),
    (r"Unterminated string", _said("a quote is missing")),
    (r"Unclosed array", _said("a list is not closed with ]")),
    (r"Unclosed inline table", _said("a table in braces is not closed with } on its line")),
    (
        r"Unescaped '\\\\?' in a string",
        _said("a backslash in a text in double quotes is written twice, or the text put in single quotes"),
    ),
    (r"Invalid hex value", _said("after \\u come 4 hexadecimal digits, after \\U 8")),
    (r"Escaped character is not a Unicode scalar value", _said("the number after \\u or \\U is no character")),
    (r"Illegal character '\\n'", _said("a text in quotes ends on its own line")),
    (r"Found invalid character '\\n'", _said("a text in quotes ends on its own line")),
    (
        r"(?:Illegal|Found invalid) character (.*)",
        lambda match, key: f"a character that may not stand here (U+{ord(ast.literal_eval(match[1])):04X})",
    ),
    (r"Invalid date or datetime", _said("this date or time does not exist")),
)
