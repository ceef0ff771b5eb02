"""`python -m benchmarks`: runs every part and writes docs/performance.md; `python -m benchmarks PART` runs one and prints it."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil

from benchmarks import fleet, guard, planner, publish, startup
from benchmarks.page import page, rows_table, sections_of
from benchmarks.router import scenarios
from benchmarks.router.rounds import Results, measure, measure_memory
from benchmarks.router.section import memory_rows, section
from benchmarks.router.tools import Missing, built, raise_file_limit

PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
ROUNDS, QUICK_ROUNDS = 5, 2
NOT_TRIED = {"production-stack": "it is in no registry"}


def options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure, and write docs/performance.md.")
    parser.add_argument("part", nargs="?", choices=tuple(PARTS), help="one part, which is printed; none: all, and the page is written")
    parser.add_argument(
        "--write", action="store_true", help="write the part into the page, beside what was measured on this machine before"
    )
    parser.add_argument("--quick", action="store_true", help="router, memory: short windows and two rounds, to see which way it goes")
    parser.add_argument("--rounds", type=_positive, help=f"router: how often each is measured ({ROUNDS}; quick: {QUICK_ROUNDS})")
    parser.add_argument("--only", type=_names, default=(), metavar="NAME,...", help=f"router: of {', '.join(scenarios.NAMES)}")
    parser.add_argument("--litellm", action="store_true", help="router: measure LiteLLM as well, which takes 750 MB to install")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in scenarios.NAMES:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(scenarios.NAMES)}")
    return names


def _router(folder: Path, given: argparse.Namespace) -> str:
    if len(os.sched_getaffinity(0)) < 2:
        raise Missing("the router's part needs two cores: one for the service and one for its load")
    built("engine")
    built("load")
    raise_file_limit()
    results = Results()
    for group in scenarios.chosen(given.only, slow=given.litellm):
        measure(group, given.rounds or (QUICK_ROUNDS if given.quick else ROUNDS), given.quick, results)
    if not given.only:
        results.absent.update(NOT_TRIED if given.litellm else {**NOT_TRIED, scenarios.SLOW: "only with --litellm"})
    return section(results)


def _memory(folder: Path, given: argparse.Namespace) -> str:
    built("engine")
    built("load")
    raise_file_limit()
    return rows_table(memory_rows(measure_memory(given.quick)))


Part = Callable[[Path, argparse.Namespace], str]
PARTS: dict[str, tuple[str, Part]] = {
    "planner": ("The planner", lambda folder, given: rows_table(planner.rows())),
    "publish": ("What routers are told of a change", lambda folder, given: rows_table(publish.rows())),
    "guard": ("What the guard adds to a request", lambda folder, given: rows_table(guard.rows())),
    "startup": ("Start-up", lambda folder, given: rows_table(startup.rows(folder))),
    "fleet": ("One control plane, 1,000 nodes", lambda folder, given: rows_table(fleet.rows(folder))),
    "memory": ("The router's memory", _memory),
    "router": ("The router", _router),
}


def main() -> int:
    given = options(sys.argv[1:])
    memory_gib = psutil.virtual_memory().total / 2**30
    machine = f"{os.cpu_count()} cores, {memory_gib:.0f} GiB, {platform.system()} {platform.release()}, Python {platform.python_version()}"
    found = sections_of(PAGE.read_text(encoding="utf-8"), machine) if given.part else {}
    if given.part and given.write and not found:
        print("benchmarks: the page was measured on another machine, so all parts of it must be measured anew", file=sys.stderr)
        return 1
    made = {}
    with tempfile.TemporaryDirectory(prefix="llmgw-bench-") as name:
        for part in (given.part,) if given.part else PARTS:
            title, run = PARTS[part]
            print(f"{title} …", file=sys.stderr)
            try:
                made[title] = run(Path(name), given)
            except Missing as err:
                print(f"benchmarks: {err}", file=sys.stderr)
                return 1
    sections = {title: {**found, **made}[title] for title, _ in PARTS.values() if title in found or title in made}
    if given.write or not given.part:
        PAGE.write_text(page(machine, sections), encoding="utf-8")
    print(page(machine, made))
    return 0


if __name__ == "__main__":
    sys.exit(main())
