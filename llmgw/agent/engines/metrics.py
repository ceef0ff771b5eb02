"""Reads single numbers out of the Prometheus text that engines answer with. Knows no engine."""

from __future__ import annotations

import math


def samples(text: str) -> dict[str, float]:
    """Name to value, summed over labels. Lines that are no samples, and values that are no finite numbers, are skipped."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        head, _, rest = line.partition("}") if "{" in line else line.partition(" ")
        fields = rest.split()
        if not fields:
            continue
        name = head.partition("{")[0].strip()
        try:
            value = float(fields[0])
        except ValueError:
            continue
        if math.isfinite(value):
            found[name] = found.get(name, 0.0) + value
    return found
