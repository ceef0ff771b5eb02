"""A simulated Machine: its clock is trio's (a mock one in tests), its randomness comes from a seed, its disk is memory.

Work runs inline: a thread in flight would let a mock clock jump.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import trio

T = TypeVar("T")


class SimDisk:
    """Files in memory. `fail` makes every write raise what it holds, as a full or read-only disk would."""

    def __init__(self) -> None:
        self.files: dict[Path, bytes] = {}
        self.fail: OSError | None = None

    def read(self, path: Path) -> bytes | None:
        return self.files.get(path)

    def write(self, path: Path, data: bytes) -> None:
        if self.fail is not None:
            raise self.fail
        self.files[path] = data


class SimMachine:
    """`booted_s` sets this machine's clock apart from every other's; `wall_offset_s` its idea of the time of day."""

    def __init__(self, seed: int, *, booted_s: float = 1000.0, wall_offset_s: float = 1_700_000_000.0) -> None:
        self.disk = SimDisk()
        self.rng = random.Random(seed)
        self.booted_s = booted_s
        self.wall_offset_s = wall_offset_s

    def now_s(self) -> float:
        return self.booted_s + trio.current_time()

    def wall_s(self) -> float:
        return self.wall_offset_s + trio.current_time()

    async def sleep_until(self, at_s: float) -> None:
        await trio.sleep(max(0.0, at_s - self.now_s()))

    async def run_sync(self, work: Callable[[], T]) -> T:
        await trio.lowlevel.checkpoint()
        return work()

    def fresh_hex(self, nbytes: int) -> str:
        return self.rng.randbytes(nbytes).hex()
