"""Which version a control plane starts with, so that a bad one cannot keep every control plane down.

The one that the process before was told to restart into; else the one that last ran here for a minute, since a start that
nobody asked for is no roll-out; else the one that is proven; else the newest. Never one that is held, does not load on this
machine, or was put aside here: with which this process has ended twice by its own fault within a minute of its start. Also what
a start without the store goes by: the last document that was in force here. Both are small files in the data directory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import attrs
import structlog

from llmgw.control.settings_in_force import Read, newest_loadable
from llmgw.domain.errors import Invalid
from llmgw.domain.files import words
from llmgw.domain.ports import Disk
from llmgw.domain.settings_version import RolloutRow, SettingsVersion
from llmgw.protocol.codec import structure, unstructure
from llmgw.settings.load import Loaded

MARKS_FILE: Final = "settings-boots.json"
CACHE_FILE: Final = "settings-cache.json"
PROVEN_S: Final = 60.0  # a boot that lasts so long is no fault of the version (control.md 4)
FAILURES_MAX: Final = 2
WHY_MAX: Final = 500  # characters of an error that are kept
log = structlog.get_logger("llmgw.settings")


@attrs.frozen
class Failure:
    version: int
    count: int
    why: str


@attrs.frozen
class Marks:
    """`proven`: the newest version that has run here for PROVEN_S; `failures` of those that have not, sorted by version.

    `told`: the version that the process before was told to restart into, 0 for none.
    """

    proven: int = 0
    failures: tuple[Failure, ...] = ()
    told: int = 0

    def aside(self, version: int) -> str:
        """Why that version is put aside here; "" when it is not."""
        for failure in self.failures:
            if failure.version == version and failure.count >= FAILURES_MAX:
                return f"it ended {failure.count} times within {PROVEN_S:.0f} s of its start here: {failure.why}"
        return ""

    def failed(self, version: int, why: str) -> Marks:
        """A boot with that version ended by its own fault. One that was proven here before is not put down to it."""
        if version <= 0 or version == self.proven:
            return self
        count = next((failure.count for failure in self.failures if failure.version == version), 0) + 1
        others = tuple(failure for failure in self.failures if failure.version != version)
        return attrs.evolve(self, failures=tuple(sorted((*others, Failure(version, count, why[:WHY_MAX])), key=lambda one: one.version)))

    def prove(self, version: int) -> Marks:
        """That version has run here for long enough; one that is told to come after it still is."""
        failures = tuple(one for one in self.failures if one.version != version)
        return attrs.evolve(self, proven=version, failures=failures, told=0 if self.told == version else self.told)


@attrs.frozen
class Boot:
    """`read` None: no version that loads here; `refused` is the newest that was passed over, with `why`."""

    read: Read | None = None
    refused: int = 0
    why: str = ""


def choose(versions: tuple[SettingsVersion, ...], row: RolloutRow, marks: Marks, file: Loaded) -> Boot:
    """`versions` newest first. What was passed over is told; a held version is not: that is the cluster's decision, not a fault here."""
    first = [version for number in (marks.told, marks.proven, row.proven) for version in versions if version.version == number]
    versions = tuple(dict.fromkeys((*first, *versions)))

    def usable(version: int) -> str:
        held = next((held.why for held in row.held if held.version == version), None)
        return HELD if held is not None else marks.aside(version)

    read, passed = newest_loadable(versions, usable, file)
    refused = next(((version, why) for version, why in passed if why != HELD), (0, ""))
    return Boot(read, *refused)


HELD: Final = "held for the cluster"


def load_marks(disk: Disk, folder: Path) -> Marks:
    """What cannot be read counts as nothing: the marks save a person work, and decide nothing that is not decided again."""
    return _load(disk, folder / MARKS_FILE, Marks) or Marks()


def save_marks(disk: Disk, folder: Path, marks: Marks) -> None:
    _save(disk, folder / MARKS_FILE, marks)


def tell_next(disk: Disk, folder: Path, version: int) -> None:
    """The process that comes after this one is to start with that version."""
    save_marks(disk, folder, attrs.evolve(load_marks(disk, folder), told=version))


def load_cached(disk: Disk, folder: Path) -> SettingsVersion | None:
    """The version that was last in force here."""
    return _load(disk, folder / CACHE_FILE, SettingsVersion)


def save_cached(disk: Disk, folder: Path, version: SettingsVersion) -> None:
    _save(disk, folder / CACHE_FILE, version)


def _load(disk: Disk, path: Path, kind: type[Any]) -> Any | None:
    try:
        data = disk.read(path)
        return None if data is None else structure(json.loads(data), kind)
    except (OSError, ValueError, RecursionError, Invalid) as err:
        log.warning("a file of the data directory is not used", file=str(path), why=words(err))
        return None


def _save(disk: Disk, path: Path, value: Any) -> None:
    try:
        disk.write(path, json.dumps(unstructure(value)).encode())
    except OSError as err:
        log.warning("a file of the data directory cannot be written", file=str(path), why=words(err))
