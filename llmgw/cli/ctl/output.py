"""What ctl prints: tables for people, JSON and TOML for programs. Server's text is made harmless where it goes to a terminal."""

from __future__ import annotations

import functools
import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import click

from llmgw.cli.ctl.client import Client
from llmgw.cli.ctl.places import find
from llmgw.cli.text import columns, one_line, printable, width
from llmgw.domain.errors import Invalid

FORMATS: Final = ("table", "json", "toml")


class Ctl:
    """One run of ctl: where it talks to and how it prints."""

    def __init__(self, server: str, output: str) -> None:
        self.server = server
        self.output = output

    @functools.cached_property
    def client(self) -> Client:
        """Looked up when first used, so that faults of the command line are told first."""
        return Client(find(self.server))

    def object(self, path: str) -> dict[str, Any]:
        """One object. Raises Invalid for an answer of another shape."""
        body = self.client.get(path).body
        if not isinstance(body, dict):
            raise Invalid("the answer is no object: is this the admin API's address?")
        return body

    def listing(self, noun: str) -> dict[str, Any]:
        """Every row of a listing, its pages put together."""
        body = self.client.get(noun).body
        rows = items(body, noun)
        if not isinstance(body, dict):
            return {noun: rows}
        cursor = body.get("next")
        while cursor:
            page = self.client.get(noun, {"cursor": cursor}).body
            rows = rows + items(page, noun)
            following = page.get("next") if isinstance(page, dict) else None
            cursor = None if following == cursor else following
        return {**{name: value for name, value in body.items() if name != "next"}, noun: rows}

    def print(self, data: Any, table: Callable[[], Sequence[str]]) -> None:
        """`data` as JSON or TOML, or the lines of `table()`."""
        if self.output == "json":
            echo(json_text(data, indent=2), steered=False)
        elif self.output == "toml":
            echo(toml_text(data), steered=False)
        else:
            for line in table():
                echo(line)

    def changed(self, answer: Any, sentence: str) -> None:
        """What a write changed, and its revision."""
        body = answer.body if isinstance(answer.body, dict) else {}

        def lines() -> list[str]:
            revision = body.get("revision", answer.etag.strip('"') or None)
            notes = [] if revision is None else [f"revision {revision}"]
            if body.get("durability"):
                notes.append(f"durability: {body['durability']}")
            return [f"{sentence} ({', '.join(notes)})" if notes else sentence]

        self.print(body, lines)


class Asked:
    """The shared options as they stood before the noun: `ctl --output json status`."""

    def __init__(self, server: str, output: str) -> None:
        self.server = server
        self.output = output


def shared(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds `--server` and `--output` to a command and hands it a `Ctl` first; an option here beats one before the noun."""

    @click.option("--server", default="", metavar="URL", help="The control plane's admin API.")
    @click.option("--output", "-o", type=click.Choice(FORMATS), help="How to print.")
    @functools.wraps(function)
    def wrapped(server: str, output: str | None, **kwargs: Any) -> Any:
        asked = click.get_current_context().find_object(Asked) or Asked("", "")
        return function(Ctl(server or asked.server, output or asked.output or "table"), **kwargs)

    return wrapped


def echo(text: str, *, steered: bool = True) -> None:
    """Prints a line. On a terminal nothing in it can steer the terminal (`steered` False: its escapes are made already)."""
    terminal = sys.stdout.isatty()
    shown = printable(text, terminal) if steered else text
    encoding = sys.stdout.encoding or "utf-8"
    click.echo(shown.encode(encoding, "replace").decode(encoding))


def json_text(data: Any, indent: int | None = None) -> str:
    """JSON. On a terminal characters beyond ASCII that could steer it are escaped, which JSON knows how to do."""
    return _escaped(json.dumps(data, indent=indent, ensure_ascii=False))


def toml_text(data: Any) -> str:
    """TOML, which has no null: such keys are left out."""
    import tomli_w

    whole = data if isinstance(data, dict) else {"items": data}
    return _escaped(tomli_w.dumps(_without_null(whole)).rstrip("\n"))


def _without_null(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _without_null(value) for key, value in data.items() if value is not None}
    if isinstance(data, list):
        return [_without_null(value) for value in data if value is not None]
    return data


def _escaped(text: str) -> str:
    if text.isascii() or not sys.stdout.isatty():
        return text
    return "".join(c if c in "\n\t" or printable(c, True) == c else f"\\u{ord(c):04x}" for c in text)


def items(body: Any, noun: str) -> list[dict[str, Any]]:
    """The rows of a listing. Raises Invalid for an answer of another shape."""
    found = body.get(noun) if isinstance(body, dict) else body
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise Invalid(f"the answer holds no list of {noun}: is this the admin API's address?")
    return found


def table(rows: Sequence[Mapping[str, Any]], shown: Sequence[tuple[str, Callable[[Mapping[str, Any]], object]]], none: str) -> list[str]:
    """Rows as columns: `shown` names each column and what it holds. Columns that are empty in every row are left out."""
    rows = [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list | tuple) else []
    if not rows:
        return [none]
    cells = [[text(make(row)) for _, make in shown] for row in rows]
    kept = [index for index in range(len(shown)) if index == 0 or any(row[index] for row in cells)]
    header, body = [shown[index][0] for index in kept], [[one_line(row[index]) for index in kept] for row in cells]
    lines = columns(header, body)
    room = shutil.get_terminal_size().columns
    if sys.stdout.isatty() and max(map(width, lines)) > room:
        return _folded(header, body, room)
    return lines


def _folded(header: Sequence[str], rows: Sequence[Sequence[str]], room: int) -> list[str]:
    """Columns that are too wide for the terminal, each folded into its share of it. Only here is rich worth its 80 ms."""
    import io

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    whole = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for name in header:
        whole.add_column(Text(name), overflow="fold")
    for row in rows:
        whole.add_row(*(Text(printable(cell, True)) for cell in row))
    out = io.StringIO()
    Console(file=out, width=room, color_system=None, markup=False, highlight=False).print(whole)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def key(name: str) -> Callable[[Mapping[str, Any]], object]:
    """The value under `name`."""
    return lambda row: row.get(name)


def text(value: object) -> str:
    """A value in a cell or a line."""
    if value is None or value == "":
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple) and all(isinstance(item, str | int | float) for item in value):
        return ",".join(str(item) for item in value)
    if isinstance(value, Mapping) and all(isinstance(item, str | int | float) for item in value.values()):
        return ",".join(f"{name}={text(item)}" for name, item in value.items())
    if isinstance(value, Mapping | list | tuple):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def details(data: Mapping[str, Any], indent: str = "") -> list[str]:
    """One object as `name  value` lines, nested tables indented."""
    flat = {name: value for name, value in data.items() if not _nested(value)}
    wide = max((len(name) for name in flat), default=0)
    lines = [f"{indent}{name:<{wide}}  {one_line(text(value))}".rstrip() for name, value in flat.items() if text(value)]
    for name, value in data.items():
        if not _nested(value):
            continue
        lines.append(f"{indent}{name}:")
        for item in value if isinstance(value, list) else [value]:
            inner = details(item, indent + "  ") if isinstance(item, Mapping) else [f"{indent}  {one_line(text(item))}"]
            if isinstance(value, list) and inner:
                inner[0] = f"{indent}- {inner[0].lstrip()}"
            lines += inner
    return lines


def _nested(value: object) -> bool:
    if isinstance(value, Mapping):
        return bool(value) and not all(isinstance(item, str | int | float) for item in value.values())
    return isinstance(value, list) and any(isinstance(item, Mapping | list) or (isinstance(item, str) and " " in item) for item in value)


def age(seconds: object) -> str:
    """Seconds as a person says them."""
    if not isinstance(seconds, int | float) or isinstance(seconds, bool):
        return ""
    for limit, unit, size in ((120, "s", 1), (7200, "min", 60), (172_800, "h", 3600)):
        if seconds < limit:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds // 86_400)} d"
