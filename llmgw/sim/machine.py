"""A simulated Machine: its clock is trio's (a mock one in tests), its randomness comes from a seed, its disk is memory.

Work runs inline: a thread in flight would let a mock clock jump. A process on it can be frozen, which stops it between any two
steps, and killed: then nothing leaves it any more, whatever its tasks still do while they are cancelled.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import trio

T = TypeVar("T")
SLEEP_S_MIN: Final = 1e-6  # of sums of floats: without it a sleep could end a hair early, again and again


class SimDisk:
    """Files in memory. `fail` makes every write raise what it holds, as a full or read-only disk would; `cut` loses writes."""

    def __init__(self) -> None:
        self.files: dict[Path, bytes] = {}
        self.fail: OSError | None = None
        self.cut = False

    def read(self, path: Path) -> bytes | None:
        return self.files.get(path)

    def write(self, path: Path, data: bytes) -> None:
        if self.fail is not None:
            raise self.fail
        if not self.cut:
            self.files[path] = data


class SimMachine:
    """`booted_s` sets this machine's clock apart from every other's and `rate` makes it run faster or slower.

    The time of day is `wall_offset_s`, which may be stepped, beyond trio's clock; or that of `time_of_day` (seconds since 1970) where
    the machine has to do with real ones.
    """

    def __init__(
        self,
        seed: int,
        *,
        booted_s: float = 1000.0,
        wall_offset_s: float = 1_700_000_000.0,
        rate: float = 1.0,
        time_of_day: Callable[[], float] | None = None,
    ) -> None:
        self.disk = SimDisk()
        self.rng = random.Random(seed)
        self.booted_s = booted_s
        self.wall_offset_s = wall_offset_s
        self.rate = rate
        self._time_of_day = time_of_day
        self.killed = False
        self._thawed: trio.Event | None = None

    # --- what a test does to the process

    def freeze(self) -> None:
        """It stands still, as by SIGSTOP or in a suspended machine; its clock goes on."""
        if self._thawed is None:
            self._thawed = trio.Event()

    def thaw(self) -> None:
        thawed, self._thawed = self._thawed, None
        if thawed is not None:
            thawed.set()

    def kill(self) -> None:
        """Nothing leaves it from here on. Whoever runs its tasks cancels them next."""
        self.killed = True
        self.disk.cut = True

    @property
    def stopped(self) -> bool:
        """Frozen or killed: it takes no step."""
        return self.killed or self._thawed is not None

    async def running(self) -> None:
        """Returns when the process takes steps; never after it was killed."""
        while self.stopped:
            if self.killed:
                await trio.sleep_forever()
            assert self._thawed is not None
            await self._thawed.wait()

    # --- the port

    def now_s(self) -> float:
        return self.booted_s + trio.current_time() * self.rate

    def wall_s(self) -> float:
        return self.wall_offset_s + trio.current_time() if self._time_of_day is None else self._time_of_day()

    async def sleep_until(self, at_s: float) -> None:
        left_s = at_s - self.now_s()
        if left_s <= 0:
            await trio.lowlevel.checkpoint()
        while left_s > 0:
            await trio.sleep(max(left_s / self.rate, SLEEP_S_MIN))
            left_s = at_s - self.now_s()
        await self.running()

    async def run_sync(self, work: Callable[[], T]) -> T:
        await trio.lowlevel.checkpoint()
        await self.running()
        result = work()
        await self.running()
        return result

    def fresh_hex(self, nbytes: int) -> str:
        return self.rng.randbytes(nbytes).hex()
