"""docs/performance.md as text: one table format, and sections of which a run may replace some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.measure import Row

INTRODUCTION = """# Performance

Made by `make bench`; figures are medians of several. The control plane and the simulated fleet share the machine's cores, so the
figures of the fleet hold the simulator's own load against us. Tests never assert a time."""


def rows_table(rows: Sequence[Row]) -> str:
    return table(
        ("what", "measured", "target", "met"),
        [(row.what, row.figure, row.target or "—", "—" if row.met is None else "yes" if row.met else "**no**") for row in rows],
    )


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, *lines)).replace("\n", "\n|" + "---|" * len(head) + "\n", 1)


def page(machine: str, sections: Mapping[str, str]) -> str:
    """The whole page; sections in their order, each under its title."""
    parts = [INTRODUCTION, f"Measured on: {machine}.", *(f"## {title}\n\n{text}" for title, text in sections.items())]
    return "\n\n".join(parts) + "\n"


def sections_of(text: str, machine: str) -> dict[str, str]:
    """The sections of a page that was measured on this machine; none of one that was measured on another."""
    if f"\nMeasured on: {machine}.\n" not in text:
        return {}
    found = {}
    for part in text.split("\n## ")[1:]:
        title, _, rest = part.partition("\n")
        found[title] = rest.strip()
    return found
