"""Backup and restore of a store in a file, with the product's own code on real files: what may happen between the two, by a seed.

A store is backed up; then it goes on, under epochs that rise; perhaps a byte of the archive changes where it lies; perhaps somebody has
the store open while it is restored. A restore is refused and changes nothing, or everything of the archive is there.

One line replays a schedule:  python -m tests.property.restore_model SEED [RULE]
"""

from __future__ import annotations

import contextlib
import random
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final
from unittest import mock

import apsw
import attrs
import trio

from llmgw.domain.errors import LlmgwError
from llmgw.replication import bases
from llmgw.settings.load import Loaded, Role, load_bytes
from llmgw.store import archive
from llmgw.store.archive import Part
from llmgw.store.connection import FileStore
from llmgw.store.meta import ensure_cluster_id
from llmgw.wiring import restore
from llmgw.wiring.backup import Fetched, take_backup
from llmgw.wiring.machine import RealMachine
from llmgw.wiring.restore import restore_backup

DAMAGED: Final = 0.5
IN_USE: Final = 0.5
HOLDS_MAX: Final = 5
EPOCHS_MAX: Final = 50
Rows = Collection[tuple[Any, ...]]


@attrs.frozen
class Removal:
    """`remove` takes the rule away in the product's module."""

    invariant: str
    remove: Callable[[], AbstractContextManager[object]]


def _unchecked(tar: Any, member: Any, into: Any, read: Callable[..., Part] = archive._read) -> Part:
    return attrs.evolve(read(tar, member, into), sha256=mock.ANY)


@contextlib.contextmanager
def _beside_others(path: Path) -> Iterator[apsw.Connection]:
    with contextlib.closing(apsw.Connection(str(path))) as connection:
        yield connection


REMOVALS: Final[Mapping[str, Removal]] = {
    "each part of a backup is held against its checksum": Removal(
        "RestoredIsWhatWasBackedUp", lambda: mock.patch.object(archive, "_read", _unchecked)
    ),
    "a restored store begins above every epoch that is known": Removal("EpochAbove", lambda: mock.patch.object(bases, "next_epoch", max)),
    "a store that somebody has open is not restored": Removal(
        "InUseIsRefused", lambda: mock.patch.object(restore, "_alone", _beside_others)
    ),
}


def run(seed: int, removed: str = "") -> dict[str, str]:
    """The invariants that do not hold, with what was seen."""
    with REMOVALS[removed].remove() if removed else contextlib.nullcontext(), tempfile.TemporaryDirectory() as folder:
        return trio.run(_schedule, random.Random(seed), Path(folder))


async def _schedule(rng: random.Random, folder: Path) -> dict[str, str]:
    machine, loaded, path, target = RealMachine(), _loaded(folder), folder / "llmgw.db", folder / "a.tar"
    store = await FileStore.open(path, machine.run_sync)
    await ensure_cluster_id(store, 0, "c-1")
    store.close()
    _go_on(rng, path)
    before, _ = _look(path)
    await take_backup(machine, loaded, target, secrets=False, fetch=_nobody_runs)
    for _ in range(rng.randint(0, 2)):
        _go_on(rng, path)
    if damaged := rng.random() < DAMAGED:
        _damage(rng, target)
    there, known = _look(path)
    wrong = {}
    with contextlib.ExitStack() as held:
        if in_use := rng.random() < IN_USE:
            other = held.enter_context(contextlib.closing(apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)))
            other.execute("SELECT * FROM meta").fetchall()
        try:
            await restore_backup(machine, loaded, target, replace=False, say=lambda text: None)
        except LlmgwError as err:
            if not (damaged or in_use):
                wrong["SoundIsRestored"] = err.message
            if _look(path) != (there, known):
                wrong["RefusedChangesNothing"] = err.message
            return wrong
    after, epoch = _look(path)
    if in_use:
        wrong["InUseIsRefused"] = "somebody had it open, and it was restored"
    if after != before:
        wrong["RestoredIsWhatWasBackedUp"] = f"{before} were backed up, {after} came back"
    if epoch <= known:
        wrong["EpochAbove"] = f"epoch {epoch}, and {known} was met"
    return wrong


def replay_line(seed: int) -> str:
    return f"python -m tests.property.restore_model {seed}"


def _loaded(folder: Path) -> Loaded:
    text = f'[server]\ndata_dir = "{folder / "data"}"\n[store]\npath = "{folder / "llmgw.db"}"\n'
    (folder / "data").mkdir()
    return load_bytes(text.encode(), source="model", role=Role.SERVER)


def _go_on(rng: random.Random, path: Path) -> None:
    """A term of some leader's, with what it was asked."""
    with contextlib.closing(apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)) as connection:
        connection.execute("UPDATE meta SET epoch = epoch + ?", (rng.randint(1, EPOCHS_MAX),))
        for _ in range(rng.randint(1, HOLDS_MAX)):
            row = (f"room-{rng.randrange(100)}", f"reason-{rng.randrange(10**9):09}")
            connection.execute("INSERT OR REPLACE INTO facility_holds VALUES (?, ?, 0, NULL, 'a')", row)


def _look(path: Path) -> tuple[Rows, int]:
    with contextlib.closing(apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)) as connection:
        rows = connection.execute("SELECT * FROM facility_holds ORDER BY facility").fetchall()
        return rows, int(connection.execute("SELECT epoch FROM meta").get)


def _damage(rng: random.Random, target: Path) -> None:
    """One byte of a text that a row holds: no page is out of order by it."""
    data = bytearray(target.read_bytes())
    at = data.index(b"reason-") + len(b"reason-") + rng.randrange(9)
    data[at] = ord("x")
    target.write_bytes(data)


def _nobody_runs(into: Path) -> Fetched:
    raise AssertionError("no control plane runs")


def main(seed: str, removed: str = "") -> None:
    for name, wrong in run(int(seed), removed).items():
        print(f"{name}: {wrong}")


if __name__ == "__main__":
    main(*sys.argv[1:])
