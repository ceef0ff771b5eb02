"""Putting a few keys into the text of a settings file, where everything else, comments too, stays as it is. Pure."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from typing import Any

import tomli_w

from llmgw.domain.errors import Conflict

_HEADER = re.compile(r"\s*\[")


def with_keys(text: str, table: str, keys: Mapping[str, Any]) -> str:
    """`text` with these keys of `[table]`; each replaced where it stands on one line, else added. Raises Conflict where it cannot be
    done by lines, with what a person has to write."""
    before = tomllib.loads(text)
    lines = text.splitlines()
    header = next((at for at, line in enumerate(lines) if re.match(rf"\s*\[\s*{re.escape(table)}\s*\]\s*(#.*)?\Z", line)), None)
    if header is None:
        lines += ["", f"[{table}]"] if lines and lines[-1].strip() else [f"[{table}]"]
        header = len(lines) - 1
    end = next((at for at in range(header + 1, len(lines)) if _HEADER.match(lines[at])), len(lines))
    for key, value in keys.items():
        written = f"{key} = {_value(value)}"
        at = next((at for at in range(header + 1, end) if re.match(rf"\s*{re.escape(key)}\s*=", lines[at])), None)
        if at is not None:
            lines[at] = written
        else:
            lines.insert(header + 1, written)
            end += 1
    after = "\n".join(lines) + "\n"
    expected = {**before, table: {**before.get(table, {}), **keys}}
    try:
        right = tomllib.loads(after) == expected
    except tomllib.TOMLDecodeError:
        right = False
    if not right:
        told = "\n".join(f"  {key} = {_value(value)}" for key, value in keys.items())
        raise Conflict(f"the file cannot be changed line by line; put into its [{table}] by hand:\n{told}", code="edit_by_hand")
    return after


def _value(value: Any) -> str:
    """In one line, as `with_keys` can find it again."""
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(one) for one in value) + "]"
    return tomli_w.dumps({"x": value}).removeprefix("x = ").strip()
