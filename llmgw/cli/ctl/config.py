"""`ctl config`: the cluster's settings as versions: show, get, set, unset, check, apply, history, diff, rollback. `edit` is `editing`'s.

A file's syntax is checked here, so that a fault is told with its line; what the keys mean is the server's to say, whose build counts.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import click

from llmgw.cli.confirm import confirm
from llmgw.cli.ctl.client import Answer
from llmgw.cli.ctl.files import named, read_bytes
from llmgw.cli.ctl.output import Ctl, echo, items, key, shared, table, text, toml_text
from llmgw.cli.paths import PathOption
from llmgw.cli.text import printable
from llmgw.domain.errors import Conflict, Invalid, NotFound, PreconditionFailed

RACES_MAX: Final = 5  # times that one key is set anew because somebody wrote another one meanwhile
LINE_MAX: Final = 100  # characters of a value beyond which a list is told by what came and went
VERSION: Final = click.IntRange(0)
_reason = click.option("--reason", default="", metavar="TEXT", help="Why, for the history.")


@click.group()
def config() -> None:
    """The cluster's settings: one versioned document, the same for every control plane."""


@attrs.frozen
class Newest:
    """The newest version as the server tells it."""

    version: int
    toml: str
    body: Mapping[str, Any]

    @property
    def match(self) -> dict[str, str]:
        """The header of an edit that begins from it."""
        return {"If-Match": f'"{self.version}"'}


def newest(ctl: Ctl) -> Newest:
    """Raises Invalid for an answer of another shape."""
    return _version(ctl.object("settings"))


def _version(body: Mapping[str, Any]) -> Newest:
    version, toml = body.get("version"), body.get("toml")
    if not isinstance(version, int) or not isinstance(toml, str):
        raise Invalid("the answer holds no settings: is this the admin API's address?")
    return Newest(version, toml, body)


# --- reading


@config.command()
@click.option(
    "--layers", is_flag=True, help="Every key in force on the control plane asked: where it comes from, what a file holds in vain."
)
@shared
def show(ctl: Ctl, layers: bool) -> None:
    """The newest version as TOML, as `apply` takes it."""
    if layers:
        body = ctl.object("settings/effective")
        ctl.print(body, lambda: table(items(body, "keys"), _LAYERS, "no keys"))
        return
    found = newest(ctl)
    if ctl.output == "json":
        ctl.print(found.body, list)
        return
    for line in header(found):
        echo(f"# {line}")
    if found.toml.strip():
        echo(toml_text(found.body.get("document")), steered=False)
    echo(END.format(found.version))


def header(found: Newest) -> list[str]:
    """What stands above a version's text, a line each."""
    body = found.body
    by = f", written {when(body.get('created_at'))} by {body.get('author') or 'the cluster'}" if found.version else ""
    lines = [f"settings version {found.version}{by}" + (f": {body['reason']}" if body.get("reason") else "")]
    if body.get("held"):
        lines.append(f"this version is held, and {body.get('desired')} is in force: {body.get('why_held')}")
    if not found.toml.strip():
        lines.append("nothing is set: every key has its default")
    return [" ".join(line.split()) for line in lines]


_SHOWN: Final = re.compile(r"# settings version ([0-9]{1,18})\b")  # the first line that `show` prints above the text

# The last line. A file with the first and without this one was cut somewhere, and would put what is missing back to its defaults.
END: Final = "# end of settings version {}"

_LAYERS: Final = (
    ("KEY", key("path")),
    ("VALUE", lambda row: _cell(row.get("value"))),
    ("FROM", key("origin")),
    ("IN-VAIN", lambda row: _cell(row.get("in_vain"))),
)


def _cell(value: Any) -> str:
    """The beginning of a long value: `get` has all of it."""
    line = "" if value is None else toml_line(value)
    return line if len(line) <= LINE_MAX else f"{line[: LINE_MAX - 4]} ..."


@config.command()
@click.argument("name", metavar="KEY")
@shared
def get(ctl: Ctl, name: str) -> None:
    """The value in force of a key, or of every key of a table, and where it comes from."""
    rows = items(ctl.object("settings/effective"), "keys")
    path = _canonical(name)
    found = [row for row in rows if row.get("path") == path]
    if not found and (known := _of_a_name(ctl, path)):
        found = [known]
    whole = found or [row for row in rows if str(row.get("path")).startswith(f"{path}.")]
    if not whole and path == "engines":
        raise NotFound("nothing is set in [engines.<name>]; name a key of it, as engines.vllm.load_limit_s", code="unknown_key")
    if not whole:
        near = difflib.get_close_matches(path, [str(row.get("path")) for row in rows], n=1)
        raise NotFound(f"there is no key {name[:100]}" + (f"; did you mean {near[0]}?" if near else ""), code="unknown_key")
    if ctl.output == "toml":
        for row in whole:
            if row.get("value") is not None:
                echo(f"{row['path']} = {toml_line(row['value'])}")
        return
    ctl.print(found[0] if found else {"keys": whole}, lambda: [_in_force(row) for row in whole])


def _in_force(row: Mapping[str, Any]) -> str:
    vain = "" if row.get("in_vain") is None else f"; this machine's file says {toml_line(row['in_vain'])} in vain"
    return f"{row.get('path')} = {toml_line(row.get('value'))}  ({_ORIGINS.get(str(row.get('origin')), row.get('origin'))}{vain})"


_ORIGINS: Final = {"default": "by default", "file": "from this machine's file", "document": "from the settings"}


def _of_a_name(ctl: Ctl, path: str) -> dict[str, Any] | None:
    """A key of a table with a free name that nobody has set: its default."""
    for section in items(ctl.object("settings/schema"), "sections"):
        for row in section.get("keys") or ():
            pattern = re.escape(str(row.get("path"))).replace(re.escape("<name>"), r'(?:[A-Za-z0-9_-]+|"[^"]+")')
            if "<name>" in str(row.get("path")) and re.fullmatch(pattern, path):
                return {"path": path, "value": row.get("default"), "origin": "default", "in_vain": None}
    return None


@config.command()
@click.option("--limit", type=click.IntRange(1, 10_000), default=20, show_default=True, help="How many versions, the newest first.")
@shared
def history(ctl: Ctl, limit: int) -> None:
    """Versions, the newest first: who wrote them and why, who runs them, who refused them."""
    found: list[dict[str, Any]] = []
    cursor: object = None
    while len(found) < limit:
        body = ctl.client.get("settings/history", {"limit": min(limit - len(found), 200), "cursor": cursor}).body
        found += items(body, "versions")
        cursor = body.get("next") if isinstance(body, dict) else None
        if not cursor:
            break
    ctl.print({"versions": found}, lambda: table(found, _HISTORY, "no versions: the settings stand in the control plane's file"))


_HISTORY: Final = (
    ("VERSION", key("version")),
    ("WHEN", lambda row: when(row.get("created_at"))),
    ("AUTHOR", key("author")),
    ("CHANGES", key("changes")),
    ("REASON", key("reason")),
    ("RUN BY", key("applied_by")),
    ("REFUSED BY", lambda row: "; ".join(f"{one.get('name')}: {one.get('why')}" for one in row.get("refused_by") or ())),
    ("HELD", lambda row: text(row.get("why_held")) or text(row.get("held") or None)),
)


def when(moment: object) -> str:
    """To the second."""
    return re.sub(r"\.\d+Z\Z", "Z", moment) if isinstance(moment, str) else ""


@config.command()
@click.argument("before", type=VERSION, metavar="VERSION")
@click.argument("after", type=VERSION, metavar="VERSION", required=False)
@shared
def diff(ctl: Ctl, before: int, after: int | None) -> None:
    """What differs between two versions; without a second one, the newest."""
    body = ctl.client.get("settings/diff", {"from": before, "to": after}).body
    changes = items(body, "changes")
    ctl.print(body, lambda: change_lines(changes) or [f"versions {body.get('from')} and {body.get('to')} say the same"])


# --- changing


@config.command("set", context_settings={"ignore_unknown_options": True})  # a value may be a negative number
@click.argument("name", metavar="KEY")
@click.argument("value", metavar="VALUE")
@_reason
@shared
def set_key(ctl: Ctl, name: str, value: str, reason: str) -> None:
    """Set one key. VALUE is written as in TOML; a text needs no quotes."""
    from llmgw.settings.document import read_value

    found = read_value(name, value)
    _write(ctl, lambda: _patch(ctl, {"set": {_canonical(name): found}, "reason": reason}))


@config.command()
@click.argument("name", metavar="KEY")
@_reason
@shared
def unset(ctl: Ctl, name: str, reason: str) -> None:
    """Take one key back to its default."""
    _write(ctl, lambda: _patch(ctl, {"unset": [_canonical(name)], "reason": reason}))


def _patch(ctl: Ctl, body: Mapping[str, Any]) -> Answer:
    """One key means the same whatever the others are: where somebody was faster, it is set on top of theirs."""
    for left in reversed(range(RACES_MAX)):
        try:
            return ctl.client.send("PATCH", "settings", body, newest(ctl).match)
        except PreconditionFailed:
            if not left:
                raise
    raise AssertionError("the last try returns or raises")


@config.command()
@_reason
@shared
def edit(ctl: Ctl, reason: str) -> None:
    """Edit the document in $VISUAL or $EDITOR; what changes is shown before it is saved."""
    from llmgw.cli.ctl.editing import edit_settings

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("edit needs a terminal; without one: `llmgw ctl config show > FILE`, then `llmgw ctl config apply -f FILE`")
    edit_settings(ctl, reason)


@config.command()
@click.argument("file", type=PathOption(allow_dash=True))
@shared
def check(ctl: Ctl, file: Path) -> None:
    """Tell every fault of FILE (- for standard input) as the cluster's document, or what it would change; exit 3 for faults."""
    answer = ctl.client.send("POST", "settings/check", {"toml": read_document(file)})
    _print_change(ctl, answer, f"{named(file)}: fine", dry_run=True)


@config.command()
@click.option("--file", "-f", type=PathOption(allow_dash=True), required=True, help="The whole document as TOML; - for standard input.")
@click.option("--dry-run", is_flag=True, help="Print what would change and write nothing.")
@_reason
@shared
def apply(ctl: Ctl, file: Path, dry_run: bool, reason: str) -> None:
    """Replace the whole document by FILE: what it does not name goes back to its default."""
    toml = read_document(file)
    _check_says_something(toml, named(file))
    path = "settings?dry_run=true" if dry_run else "settings"
    now = newest(ctl)
    taken = _SHOWN.match(toml)
    if taken is not None and (version := int(taken[1])) != now.version:
        raise Conflict(
            f"{named(file)} was taken from version {version}, and the newest is {now.version}: applying it would undo what came since"
            f" (`llmgw ctl config diff {version}` tells what); take it anew, or remove its first line where that is meant",
            code="revision_moved",
        )
    answer = ctl.client.send("PUT", path, {"toml": toml, "reason": reason}, now.match)
    _print_change(ctl, answer, "dry run: nothing was written" if dry_run else "", dry_run=dry_run)


@config.command()
@click.argument("version", type=click.IntRange(1), metavar="VERSION")
@_reason
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@shared
def rollback(ctl: Ctl, version: int, reason: str, yes: bool) -> None:
    """Write what VERSION says as a new version."""
    now = newest(ctl)
    if not yes:
        changes = items(ctl.client.get("settings/diff", {"from": now.version, "to": version}).body, "changes")
        for line in change_lines(changes) or [f"version {now.version} says the same"]:
            echo(line)
    confirm(f"Go back to what version {version} says?", yes)
    answer = ctl.client.send("POST", "settings/rollback", {"version": version, "reason": reason}, now.match)
    _print_change(ctl, answer, "", dry_run=False)


def _write(ctl: Ctl, send: Callable[[], Answer]) -> None:
    _print_change(ctl, send(), "", dry_run=False)


def _print_change(ctl: Ctl, answer: Answer, end: str, *, dry_run: bool) -> None:
    body = answer.body
    if not isinstance(body, dict):
        raise Invalid("the answer is no object: is this the admin API's address?")
    warn(body)
    ctl.print(body, lambda: written_lines(body, end, dry_run=dry_run))


def warn(body: Mapping[str, Any]) -> None:
    for warning in body.get("warnings") or ():
        click.echo(printable(f"llmgw: warning: {warning}", sys.stderr.isatty()), err=True)


def written_lines(body: Mapping[str, Any], end: str, *, dry_run: bool) -> list[str]:
    """What a write changed, or would, its version, and who restarts for it."""
    changes, restart = items(body, "changes"), [str(path) for path in body.get("restart") or ()]
    lines = change_lines(changes)
    durability = f" (durability: {body['durability']})" if body.get("durability") else ""
    if not changes:
        lines.append(f"nothing {'would change' if dry_run else 'changed'}: version {body.get('version')} says that already")
    elif not dry_run:
        lines.append(f"settings version {body.get('version')} is written{durability}")
    if changes and restart:
        does = "would restart" if dry_run else "restart"
        lines.append(f"control planes {does} for {', '.join(restart)}, one after another" + ("" if dry_run else ": `llmgw ctl status`"))
    elif changes:
        lines.append("no restart is needed")
    if end:
        lines.append(end)
    return lines


def change_lines(changes: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each key that differs; of long lists, what came and went."""
    lines = []
    for change in changes:
        before, after = change.get("before"), change.get("after")
        mark = "  (restart)" if change.get("applies") == "restart" else ""
        told = f"{toml_line(before)} -> {toml_line(after)}"
        lists = all(value is None or isinstance(value, list) for value in (before, after))
        if len(told) <= LINE_MAX or not lists:
            lines.append(f"{change.get('path')}: {told}{mark}")
            continue
        old, new = before or [], after or []
        moved = [f"  - {toml_line(item)}" for item in old if item not in new] + [
            f"  + {toml_line(item)}" for item in new if item not in old
        ]
        lines += [f"{change.get('path')}:{mark}", *(moved or ["  in another order"])]
    return lines


def toml_line(value: Any) -> str:
    """A value as TOML on one line."""
    import tomli_w

    from llmgw.settings.decode import join

    if value is None:
        return "not set"
    if isinstance(value, Mapping):
        inner = ", ".join(f"{join('', name)} = {toml_line(item)}" for name, item in value.items() if item is not None)
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))  # 15 and 15.0 are one setting
    if isinstance(value, list):
        return "[" + ", ".join(toml_line(item) for item in value) + "]"
    return tomli_w.dumps({"v": value}).partition(" = ")[2].rstrip("\n")


# --- files and keys


def read_document(file: Path) -> str:
    """A file's text, which is TOML and no machine's own file. Raises NotFound, Invalid."""
    from llmgw.settings.document import DOCUMENT_BYTES_MAX

    data = read_bytes(file, DOCUMENT_BYTES_MAX, ": that is no settings document")
    found = checked_text(data, named(file))
    shown = _SHOWN.match(found)
    if shown is not None and found.rstrip().rpartition("\n")[2] != (end := END.format(shown[1])):
        raise Invalid(
            f"{named(file)} begins as version {shown[1]} and does not end with {end!r}: that is taken for a file that was not written "
            "whole; remove its first line where it is meant"
        )
    return found


def checked_text(data: bytes, source: str) -> str:
    """Raises Invalid for what is no TOML in UTF-8, and for a machine's own file."""
    from llmgw.domain.setting import Scope
    from llmgw.settings.load import table_scope
    from llmgw.settings.toml_text import parse_toml

    try:
        found = data.decode("utf-8")
    except UnicodeDecodeError as err:
        line = data[: err.start].count(b"\n") + 1
        raise Invalid(f"{source} is not UTF-8 text (line {line})") from err
    machine = [f"[{name}]" for name in parse_toml(found, source) if table_scope(name) is Scope.MACHINE]
    if machine:
        raise Invalid(
            f"{source} holds {', '.join(machine)}, which are a machine's own: that is a machine's llmgw.toml and not the cluster's "
            "document, which `llmgw ctl config show` prints"
        )
    return found


def _check_says_something(toml: str, source: str) -> None:
    """A file that was truncated must not put the whole cluster back to defaults."""
    from llmgw.settings.toml_text import parse_toml

    if not any(value not in ({}, []) for value in parse_toml(toml, source).values()):
        raise Invalid(
            f"{source} sets nothing, and applying it would put every key back to its default: that is taken for a file that was not "
            "written whole; `llmgw ctl config unset KEY` takes one key back"
        )


def _canonical(name: str) -> str:
    """A key as the server writes it. Raises Invalid for what is no dotted key."""
    from llmgw.settings.document import path_parts, path_text

    return path_text(path_parts(name))
