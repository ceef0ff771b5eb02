"""Log files of engines: one per attempt, capped while the engine writes, read from any place.

The engine appends to the file itself (O_APPEND), so its log grows also while the agent is dead. The agent cuts a file that
has grown past its share: the newest part moves to a file beside it and the log begins anew at length 0, where the engine's
next line lands. A place in a log is counted over all that was ever written to it, so that a reader can follow across cuts.
Lines that the engine writes between the copy and the cut are lost; there is no way to cut a foreign file without that.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import attrs

from llmgw.domain.words import plain

LOG_BYTES_MAX: Final = 16 * 1024 * 1024  # of one attempt: half in the file that grows, half in the part cut from it
LOGS_KEPT: Final = 10  # newest attempts of a replica; above any default number of attempts, so that a whole crash loop is kept
TAIL_LINES: Final = 50
TAIL_BYTES: Final = 64 * 1024  # read for a tail; 50 lines of a traceback are far below
LINE_CHARACTERS_MAX: Final = 2_000  # one line of an engine that prints without ends must not fill a report
READ_BYTES_MAX: Final = 1024 * 1024  # in one answer; a message holds 8 MiB
FOLDER_MODE: Final = 0o700
_COPY_BYTES: Final = 1024 * 1024
_LOG: Final = re.compile(r"attempt-(\d+)\.log")
_CUT: Final = re.compile(r"attempt-(\d+)\.log\.(\d+)-(\d+)")


@attrs.frozen
class Part:
    """What was read: `text` begins at `offset` of all that was ever written, `next_offset` is where to go on."""

    offset: int
    next_offset: int
    text: str


@attrs.frozen
class ReplicaLogs:
    """The folder of one replica's logs. Every method blocks and may raise OSError."""

    folder: Path
    bytes_max: int = LOG_BYTES_MAX

    def path(self, attempt: int) -> Path:
        return self.folder / f"attempt-{attempt}.log"

    def prepare(self, attempt: int) -> Path:
        """Makes the folder, forgets all but the newest logs, and returns the path for this attempt."""
        self.folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        kept = sorted({*self.attempts(), attempt})[-LOGS_KEPT:]
        for entry in list(self.folder.iterdir()):
            match = _LOG.fullmatch(entry.name) or _CUT.fullmatch(entry.name)
            if match and int(match[1]) not in kept:
                entry.unlink(missing_ok=True)
        return self.path(attempt)

    def attempts(self) -> tuple[int, ...]:
        """The attempts whose logs are kept, oldest first."""
        if not self.folder.is_dir():
            return ()
        return tuple(sorted(int(match[1]) for entry in self.folder.iterdir() if (match := _LOG.fullmatch(entry.name))))

    def cap(self, attempt: int) -> bool:
        """Cuts the log if it has grown past its share; True when it did."""
        path = self.path(attempt)
        share = self.bytes_max // 2
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            return False
        if size <= share:
            return False
        base = self._base(attempt)
        end = base + size
        start = end - share
        cut = self.folder / f"{path.name}.{start}-{end}"
        old = [entry for entry, _, _ in self._cuts(attempt)]
        temporary = self.folder / f".{path.name}.cutting"
        with open(path, "rb") as source, open(temporary, "wb") as target:
            os.fchmod(target.fileno(), 0o600)
            source.seek(size - share)
            left = share
            while left > 0 and (data := source.read(min(left, _COPY_BYTES))):
                target.write(data)
                left -= len(data)
        os.replace(temporary, cut)
        os.truncate(path, 0)
        for entry in old:
            if entry != cut:
                entry.unlink(missing_ok=True)
        return True

    def read(self, attempt: int, offset: int, limit: int) -> Part:
        """Up to `limit` bytes from `offset` on; below 0 counts from the end. What was cut away is skipped.

        Raises FileNotFoundError for an attempt whose log is not kept.
        """
        limit = max(0, min(limit, READ_BYTES_MAX))
        path = self.path(attempt)
        base = self._base(attempt)
        with open(path, "rb") as log:
            end = base + os.fstat(log.fileno()).st_size
            pieces = [(start, stop, entry) for entry, start, stop in self._cuts(attempt) if stop == base]
            oldest = pieces[0][0] if pieces else base
            begin = max(oldest, end + offset) if offset < 0 else min(max(oldest, offset), end)
            data = b""
            if begin < base:
                start, stop, entry = pieces[0]
                with open(entry, "rb") as older:
                    older.seek(begin - start)
                    data = older.read(min(limit, stop - begin))
            if len(data) < limit and begin + len(data) >= base:
                log.seek(begin + len(data) - base)
                data += log.read(limit - len(data))
        return Part(begin, begin + len(data), data.decode("utf-8", "replace"))

    def tail(self, attempt: int) -> tuple[str, ...]:
        """The last lines, for people; empty where there is no log."""
        try:
            text = self.read(attempt, -TAIL_BYTES, TAIL_BYTES).text
        except OSError:
            return ()
        return last_lines(text.splitlines())

    def remove(self) -> None:
        """Takes the replica's folder away, logs and all."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.folder)

    def _cuts(self, attempt: int) -> list[tuple[Path, int, int]]:
        found = []
        for entry in self.folder.iterdir():
            match = _CUT.fullmatch(entry.name)
            if match and int(match[1]) == attempt:
                found.append((entry, int(match[2]), int(match[3])))
        return sorted(found, key=lambda cut: cut[2])

    def _base(self, attempt: int) -> int:
        """How much of the log was cut away: where byte 0 of the file stands in all that was written."""
        cuts = self._cuts(attempt)
        return cuts[-1][2] if cuts else 0


def last_lines(lines: Sequence[str]) -> tuple[str, ...]:
    """The last lines as a report may carry them, without what would steer a terminal."""
    return tuple(plain(line)[:LINE_CHARACTERS_MAX] for line in lines[-TAIL_LINES:])
