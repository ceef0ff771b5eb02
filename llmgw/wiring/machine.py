"""The real Machine: the one module that reads a clock, sleeps, or draws randomness.

Everything else is handed a `domain.ports.Machine`, so that a simulated one can stand in.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import secrets
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import trio

from llmgw.domain.ports import Disk

T = TypeVar("T")

# trio's clock stands still while the machine is suspended. A sleep is cut into slices, so that after a resume it ends at most
# this late; one wake-up a second and sleeper costs nothing that can be measured.
SUSPEND_SLICE_S: Final = 1.0
WORKER_THREADS_MAX: Final = 16  # chosen: state files and /proc reads are short; more threads than this only queue on the disk
READ_BYTES_MAX: Final = 1024 * 1024 * 1024  # chosen: far above any state or settings file; a sparse giant must not fill memory
PRIVATE_MODE: Final = 0o600  # state files hold secrets


class RealDisk:
    """State files on a local file system. Every write is whole or not at all, and on the platter when it returns."""

    def read(self, path: Path) -> bytes | None:
        """The file's bytes, or None when there is none. Raises OSError, also for what is no file: a pipe would keep us waiting."""
        try:
            return self._read(path)
        except FileNotFoundError:
            return None
        except OSError as err:
            err.filename = str(path)  # what fails after the opening names no file, or a descriptor
            raise

    def _read(self, path: Path) -> bytes:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            if stat.S_ISDIR(found.st_mode):
                raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "it is no regular file")
            if found.st_size > READ_BYTES_MAX:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
            with open(descriptor, "rb", closefd=False) as file:
                return file.read()
        finally:
            os.close(descriptor)  # here, because open() would leave that of a folder open

    def write(self, path: Path, data: bytes) -> None:
        """Temporary name beside `path` (0600), fsync, rename, fsync of the folder. Raises OSError; `path` is then as it was."""
        try:
            self._write(path, data)
        except OSError as err:
            err.filename, err.filename2 = str(path), None  # a full disk names no file, a rename the temporary one
            raise

    def _write(self, path: Path, data: bytes) -> None:
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE_MODE)
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:  # re-raised: only the half-written file is taken away
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


class RealMachine:
    """This machine. Make one inside `trio.run`, and hand it down."""

    def __init__(self) -> None:
        self.disk: Disk = RealDisk()
        self.rng = random.Random(secrets.randbits(128))
        self._threads = trio.CapacityLimiter(WORKER_THREADS_MAX)

    def now_s(self) -> float:
        """Seconds since boot, suspend included."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def wall_s(self) -> float:
        """Seconds since 1970, for people and logs."""
        return time.time()

    async def sleep_until(self, at_s: float) -> None:
        """Returns once `now_s` has reached `at_s`; always a checkpoint."""
        left_s = at_s - self.now_s()
        if left_s <= 0:
            await trio.lowlevel.checkpoint()
        while left_s > 0:
            await trio.sleep(min(left_s, SUSPEND_SLICE_S))
            left_s = at_s - self.now_s()

    async def run_sync(self, work: Callable[[], T]) -> T:
        """Runs `work` in a thread. A cancel waits for its end, so that its outcome is known."""
        return await trio.to_thread.run_sync(work, limiter=self._threads)

    def fresh_hex(self, nbytes: int) -> str:
        """`nbytes` from the kernel's generator as hex text."""
        return secrets.token_hex(nbytes)
