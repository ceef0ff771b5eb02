"""Writes `docs/reference/settings.md`: a table per table of the file. Says nothing that the schema does not.

`python -m llmgw.settings.reference FILE` writes it; a test holds the page to this.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from llmgw.domain.setting import Applies, Scope
from llmgw.settings.layout import ENGINE_SHOWN, Row, Section, object_sections, settings_sections, toml_value

_HEAD: Final = """\
# Settings

This page is written from the program (`python -m llmgw.settings.reference`), and a test holds it to the program.

`llmgw.toml` is TOML, by default `/etc/llmgw/llmgw.toml`; every role takes `--config FILE`, and `llmgw check FILE` tells every
fault of a file at once, with its path. Unknown keys are faults that name the nearest known one. Nothing is expanded in a file:
secrets are named by `env:NAME` or `file:/PATH`.

- **Machine keys** are one machine's own and take effect at the next start.
- **Cluster keys** are the same everywhere. With a `[store]` they are imported once, as version 1, and live in the store from then
  on; without one, the file is the truth. *live*: a change takes effect in place; *restart*: processes restart, one at a time.
- **Objects** (`[[model]]`, `[[auth.key]]`, `[[endpoint]]`) name things. Without a `[store]` the file holds them; with one they are
  imported once and changed by `llmgw ctl` from then on.

| process | cluster keys in its file | `[[model]]` | `[[auth.key]]` | `[[endpoint]]` |
|---|---|---|---|---|
| `router` without `control_planes` | the truth | no effect, warned | the truth | the truth |
| `server` without `[store]` | the truth | the catalog | the truth | published beside the replicas |
| `server` with `[store]` | imported once | imported once | imported once | seed of its own router |
| `router` that follows control planes | until the first push | no effect, warned | until the first push | until the first push |
"""


def reference_text() -> str:
    """The page's text."""
    parts = [_HEAD]
    for title, sections in (
        ("Machine keys", [section for section in settings_sections() if section.scope is Scope.MACHINE]),
        ("Cluster keys", [section for section in settings_sections() if section.scope is Scope.CLUSTER]),
        ("Objects", list(object_sections())),
    ):
        parts.append(f"## {title}\n")
        parts += [_section(section) for section in sections]
    return "\n".join(parts)


def _section(section: Section) -> str:
    name = section.header.replace(f"engines.{ENGINE_SHOWN}", "engines.<name>")
    lines = [f"### `{name}`\n", f"{section.help}\n", "| key | type | default | range | applies | effect |", "|---|---|---|---|---|---|"]
    lines += [_row(row) for row in section.rows]
    return "\n".join(lines) + "\n"


def _row(row: Row) -> str:
    if row.required:
        default = "must be given"
    else:
        default = f"`{_cell(toml_value(row.default))}`" if row.default is not None else ""
    kind = f"{row.type_text}, {row.meta.unit}" if row.meta.unit else row.type_text
    applies = "live" if row.meta.applies is Applies.LIVE else "restart"
    cells = (f"`{row.name}`", kind, default, row.range_text, applies, _cell(row.meta.help))
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/reference/settings.md")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(reference_text(), encoding="utf-8")
