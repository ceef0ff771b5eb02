"""Restores a published base into an epoch's folder: listed anew at each try, checked twice, and never put over a file that is there.

The bucket is asked first, by our own client: Litestream tries for minutes to reach one that is gone, and says little of it. It is
ended when its file has not grown for a while, not after so many seconds: a restore may be large.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog
import trio

from llmgw.domain.errors import Broken, Unavailable
from llmgw.domain.files import unusable
from llmgw.domain.ports import Machine
from llmgw.replication import prefixes
from llmgw.replication.children import Child, environment, how_ended
from llmgw.replication.configuration import configuration
from llmgw.replication.copies import DAMAGED, Copy
from llmgw.replication.folders import SOCKET, Folder
from llmgw.replication.prefix_store import PrefixStore
from llmgw.replication.programs import Found, find
from llmgw.replication.seeding import settle
from llmgw.replication.troubles import trouble
from llmgw.settings.object_place import ObjectPlace

TRIES: Final = 3  # each with a fresh plan: what one has listed may be compacted away under it (R-B48)
STALL_S: Final = 20.0  # without a byte more; a small store takes 0.1 to 0.3 s in all
LOOK_S: Final = 0.5
CONFIGURATION: Final = "restore.yml"
log = structlog.get_logger("llmgw.replication")


def _nobody() -> None:
    """Is told of the progress where nobody else wants to be."""


async def restore(
    machine: Machine,
    place: ObjectPlace,
    base: str,
    folder: Folder,
    *,
    program: Found | None = None,
    progress: Callable[[], None] = _nobody,
) -> Copy:
    """What is in the folder's database then. `progress` is called for as long as the copy grows.

    Raises Unavailable (`copy_damaged` for a copy that fails its check three times, `base_missing` where the prefix is empty), and
    Invalid for a program or credentials that are not there. The folder's database is then as it was: not there.
    """
    if prefixes.parse(base) is None:
        raise Broken(f"{base!r} is no prefix of an epoch")
    if program is None:
        program = await machine.run_sync(find)
    store = PrefixStore(place)
    if not await machine.run_sync(lambda: store.has(base)):
        raise Unavailable(f"the lease names {base} of {place} as the base of the store, and nothing is there", code="base_missing")
    attempt = _Attempt(machine, place, base, folder, program, progress)
    for number in range(1, TRIES + 1):
        try:
            found = await attempt.run(folder.path / f"restored-{number}.partial")
        except Unavailable as err:
            if number == TRIES:
                raise
            log.warning("a restore failed and is tried again", base=base, why=err.message)
        else:
            log.info("the store is restored", base=base, bytes=found.bytes, settings_version=found.settings_version)
            return found
    raise AssertionError("the last try returns or raises")


class _Attempt:
    def __init__(
        self, machine: Machine, place: ObjectPlace, base: str, folder: Folder, program: Found, progress: Callable[[], None]
    ) -> None:
        self._machine = machine
        self._place = place
        self._base = base
        self._folder = folder
        self._program = program
        self._progress = progress

    async def run(self, target: Path) -> Copy:
        """Raises Unavailable, Invalid."""
        folder = self._folder
        written = folder.path / CONFIGURATION

        def prepare() -> dict[str, str]:
            try:
                for left in target.parent.glob(f"{target.name}*"):  # by a call before; Litestream writes over nothing
                    left.unlink()
                text = configuration(self._place, self._base, folder.database, folder.meta, SOCKET)
                self._machine.disk.write(written, text)
            except OSError as err:
                raise unusable(err, "Litestream's configuration", written) from err
            return environment(self._place.read_credentials())

        env = await self._machine.run_sync(prepare)
        options: list[str | Path] = ["-config", written, "-no-expand-env", "-o", target, "-integrity-check", "quick"]
        child = Child.start([self._program.path, "restore", *options, folder.database], folder.path, env)
        stalled = False
        said, code = "", 0
        try:
            async with trio.open_nursery() as nursery:

                async def watch() -> None:
                    nonlocal stalled
                    stalled = await self._stalls(target)
                    nursery.cancel_scope.cancel()

                nursery.start_soon(watch)
                said = await child.output()
                code = await child.wait()
                nursery.cancel_scope.cancel()
        finally:
            await child.end()
        if stalled:
            raise Unavailable(f"the restore of {self._base} has made no progress for {STALL_S:g} s", code="restore_failed")
        if code != 0:
            found = trouble(said)
            where = DAMAGED if "check" in found.why else "restore_failed"
            raise Unavailable(f"the restore of {self._base} failed ({how_ended(code)}): {found.why}", code=where)
        return await self._machine.run_sync(lambda: settle(target, folder))

    async def _stalls(self, target: Path) -> bool:
        """Returns when the copy has not grown for STALL_S."""
        size, grown_s = -1, self._machine.now_s()
        while True:
            await self._machine.sleep_until(self._machine.now_s() + LOOK_S)
            now = await self._machine.run_sync(lambda: _size(target))
            if now != size:
                size, grown_s = now, self._machine.now_s()
                self._progress()
            elif self._machine.now_s() - grown_s >= STALL_S:
                return True


def _size(target: Path) -> int:
    """Of everything whose name begins with the target's: it is written under another one first."""
    total = 0
    for path in target.parent.glob(f"{target.name}*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total
