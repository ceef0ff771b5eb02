"""Writes `llmgw.toml.example`: every key with unit, default and effect. Says nothing that the schema does not.

`python -m llmgw.settings.example FILE` writes it; a test holds the file to this.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Final

from llmgw.domain.setting import Applies, Scope
from llmgw.settings.decode import range_text
from llmgw.settings.layout import Row, Section, object_sections, settings_sections, toml_value

WIDTH: Final = 118  # columns of a comment
_HEAD: Final = """\
llmgw.toml: every setting with its unit, default and effect. Written from the program; see docs/reference/settings.md.

A line like `#key = value` is a setting that may be uncommented. It shows the default, or an example where the default is empty
(then the text above it says so). `llmgw check FILE` tells every fault of a file at once, with its path.
"""
_MACHINE: Final = """\
Machine keys: this machine's own. A change takes effect at the next start.
"""
_CLUSTER: Final = """\
Cluster keys: the same everywhere. With a [store] they are imported once, as version 1, and live in the store from then on;
without one, this file is the truth and a change to a live key takes effect at once.
"""
_OBJECTS: Final = """\
Objects. Without a [store] these tables are the truth; with one they are imported once, and `llmgw ctl` changes them from then on.
"""
# Keys that belong to one engine stand in a profile of their own, so that the whole example is valid once uncommented.
_PROFILES: Final = (
    ("command", ("command", "ready_path"), 'engine = "command" is any program:'),
    ("openai", ("url", "api_key_env"), 'engine = "openai" is an address that somebody else runs, routed to and never started:'),
)


def example_text() -> str:
    """The example file's text."""
    lines = [*_comment(_HEAD), ""]
    scope = None
    for section in settings_sections():
        if section.scope is not scope:
            scope = section.scope
            lines += [_rule(), *_comment(_MACHINE if scope is Scope.MACHINE else _CLUSTER), _rule(), ""]
        lines += _section(section, header_counts=section.name == "store" or section.array)
    lines += [_rule(), *_comment(_OBJECTS), _rule(), ""]
    for section in object_sections():
        if section.name == "model.profile":
            lines += _profiles(section)
        elif section.name == "auth.key":
            lines += _section(section, header_counts=True, leave_out=("key",))
            key = next(row for row in section.rows if row.name == "key")
            lines += [*_comment(f"{key.meta.help} The hash is better: `printf %s KEY | sha256sum`."), "#[[auth.key]]"]
            lines += ['#name = "team-b"', '#key = "a-long-random-text"', ""]
        else:
            lines += _section(section, header_counts=True)
    return "\n".join(lines).rstrip("\n") + "\n"


def _profiles(section: Section) -> list[str]:
    special = tuple(name for _, names, _ in _PROFILES for name in names)
    lines = _section(section, header_counts=True, leave_out=special)
    for engine, names, help in _PROFILES:
        lines += [*_comment(help), "#[[model.profile]]", f'#engine = "{engine}"']
        for row in section.rows:
            if row.name in names:
                lines += _row(row)
        lines.append("")
    return lines


def _section(section: Section, *, header_counts: bool, leave_out: tuple[str, ...] = ()) -> list[str]:
    """`header_counts`: the table's being there says something by itself, so its header is a comment too."""
    lines = [*_comment(section.help), f"#{section.header}" if header_counts else section.header]
    for row in section.rows:
        if row.name not in leave_out:
            lines += _row(row)
    return [*lines, ""]


def _row(row: Row) -> list[str]:
    facts = []
    if row.meta.unit:
        facts.append(row.meta.unit)
    if row.meta.choices:
        facts.append(" | ".join(row.meta.choices))
    elif bounds := range_text(row.meta.low, row.meta.high):
        facts.append(bounds)
    if row.required:
        facts.append("must be given")
    elif row.meta.example is not None and row.default is not None:
        facts.append(f"default {toml_value(row.default)}")
    if row.meta.scope is Scope.CLUSTER:
        facts.append("live" if row.meta.applies is Applies.LIVE else "restart")
    text = f"{row.meta.help} ({'; '.join(facts)})" if facts else row.meta.help
    return [*_comment(text), f"#{row.name} = {toml_value(row.shown)}"]


def _comment(text: str) -> list[str]:
    lines: list[str] = []
    for paragraph in text.strip().split("\n\n"):
        if lines:
            lines.append("#")
        lines += [f"# {line}" for line in textwrap.wrap(" ".join(paragraph.split()), WIDTH, break_on_hyphens=False)]
    return lines


def _rule() -> str:
    return "# " + "-" * WIDTH


def uncommented(text: str) -> str:
    """The example with every `#key = value` and `#[table]` in force: a test holds that this loads too."""
    return "\n".join(line[1:] if line.startswith("#") and line[1:2] not in ("", " ") else line for line in text.split("\n"))


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else "llmgw.toml.example").write_text(example_text(), encoding="utf-8")
