"""How things are measured: CPU time of whole process trees from the kernel's accounting, medians, and one table format."""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import psutil


@attrs.frozen
class Row:
    """One line of the page: what, the figure, the target and whether it is met (None: there is no target)."""

    what: str
    figure: str
    target: str = ""
    met: bool | None = None


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def cpu_ms(work: Callable[[], Any], rounds: int) -> float:
    """Median CPU time of one call in this process, in milliseconds."""
    taken = []
    for _ in range(rounds):
        before_s = time.process_time()
        work()
        taken.append((time.process_time() - before_s) * 1000)
    return median(taken)


def run_ms(command: Sequence[str], rounds: int, env: dict[str, str] | None = None) -> tuple[float, float]:
    """Median (wall, CPU) of a whole command, in milliseconds; the first run, which warms the caches, does not count."""
    walls, cpus = [], []
    for number in range(rounds + 1):
        began_s, before = time.perf_counter(), os.times()
        subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **(env or {})})
        after = os.times()
        if number:
            walls.append((time.perf_counter() - began_s) * 1000)
            cpus.append((after.children_user + after.children_system - before.children_user - before.children_system) * 1000)
    return median(walls), median(cpus)


def tree_cpu_s(process: psutil.Process) -> float:
    """CPU seconds of a process and its children so far."""
    total = 0.0
    for one in (process, *process.children(recursive=True)):
        try:
            times = one.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total


def pss_mib(process: psutil.Process) -> float:
    """Proportional set size: memory shared with others counts by its share."""
    return float(process.memory_full_info().pss) / 1024 / 1024
