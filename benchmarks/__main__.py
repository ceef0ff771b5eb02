"""`python -m benchmarks`: runs every part and writes docs/performance.md."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from pathlib import Path

import psutil

from benchmarks import fleet, guard, planner, startup
from benchmarks.measure import Row

PAGE = Path(__file__).parent.parent / "docs" / "performance.md"


def table(rows: list[Row]) -> str:
    lines = ["| what | measured | target | met |", "|---|---|---|---|"]
    lines += [
        f"| {row.what} | {row.figure} | {row.target or '—'} | {'—' if row.met is None else 'yes' if row.met else '**no**'} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="llmgw-bench-") as name:
        folder = Path(name)
        print("planner …", file=sys.stderr)
        parts = [("The planner", planner.rows())]
        print("guard …", file=sys.stderr)
        parts.append(("What the guard adds to a request", guard.rows()))
        print("start-up …", file=sys.stderr)
        parts.append(("Start-up", startup.rows(folder)))
        print("a fleet of 1,000 nodes (about three minutes) …", file=sys.stderr)
        parts.append(("One control plane, 1,000 nodes", fleet.rows(folder)))
    memory_gib = psutil.virtual_memory().total / 2**30
    machine = f"{os.cpu_count()} cores, {memory_gib:.0f} GiB, {platform.system()} {platform.release()}, Python {platform.python_version()}"
    text = [
        "# Performance",
        "",
        "Made by `make bench`; figures are medians of several. The control plane and the simulated fleet share the machine's cores, so the",
        "figures of the fleet hold the simulator's own load against us. Tests never assert a time.",
        "",
        f"Measured on: {machine}.",
    ]
    for title, rows in parts:
        text += ["", f"## {title}", "", table(rows)]
    PAGE.write_text("\n".join(text) + "\n", encoding="utf-8")
    print(PAGE.read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
