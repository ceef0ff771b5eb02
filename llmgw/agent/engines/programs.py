"""Finds the programs of engines on this node and asks each for its version. Blocking.

Starts a program for nothing but that question, and knows no replica.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from typing import Final

import attrs
import structlog

from llmgw.agent.engines.description import Program
from llmgw.agent.engines.environment import scrubbed
from llmgw.domain.files import reason

log = structlog.get_logger("llmgw.agent.programs")

ASK_LIMIT_S: Final = 5.0  # it prints one line; a build that looks for its GPU libraries first takes under a second
KILLED_LIMIT_S: Final = 1.0  # for a killed program to be gone
OUTPUT_BYTES_MAX: Final = 64 * 1024
VERSION_CHARACTERS_MAX: Final = 80  # goes to every control plane and into tables
# A command line may lead to its program through others (`nice`, a script), whose files we do not see change.
LOOKS_PER_ASK: Final = 20  # at the agent's 30 s between looks: ten minutes


@attrs.define
class _Told:
    """What a program said. `version` None: it does not run."""

    file: tuple[int, int, int]  # of the program: number, size, last change
    version: str | None
    looks: int = 0


class Programs:
    """Remembers what it was told until a program's file changes. Used by one thread at a time."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = {**scrubbed(environment), "CUDA_VISIBLE_DEVICES": ""}  # a question needs no GPU
        self._told: dict[tuple[str, ...], _Told] = {}

    def version(self, program: Program, command: tuple[str, ...] = ()) -> str | None:
        """The version of `command` (empty: of the program in PATH); "" where it does not tell, None where there is none that runs."""
        words = command or (program.name,)
        path = shutil.which(words[0], path=self._environment.get("PATH"))
        try:
            found = os.stat(path) if path else None
        except OSError:
            found = None
        if path is None or found is None:
            self._told.pop(words, None)
            return None
        file = (found.st_ino, found.st_size, found.st_mtime_ns)
        told = self._told.get(words)
        if told is None or told.file != file or told.looks >= LOOKS_PER_ASK:
            before = told
            told = self._told[words] = _Told(file, self._ask(program, path, words, warn=before is None or before.file != file))
        told.looks += 1
        return told.version

    def _ask(self, program: Program, path: str, words: tuple[str, ...], *, warn: bool) -> str | None:
        with tempfile.TemporaryFile() as output:  # never a pipe: what the program started may hold it open
            try:
                asked = subprocess.Popen(
                    [*words, "--version"],
                    executable=path,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            except (OSError, ValueError) as err:
                self._say(warn, path, reason(err) if isinstance(err, OSError) else str(err))
                return None
            try:
                code = asked.wait(ASK_LIMIT_S)
            except subprocess.TimeoutExpired:
                # Not reaped yet, so that the number of its group is nobody else's.
                os.killpg(asked.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    asked.wait(KILLED_LIMIT_S)
                self._say(warn, path, f"no answer to --version within {ASK_LIMIT_S:g} s")
                return ""  # slow is not broken: a cold disk, a driver that wakes up
            output.seek(0)
            text = output.read(OUTPUT_BYTES_MAX).decode("utf-8", "replace")
        if code != 0:
            lines = text.split("\n")
            last = next((line.strip() for line in reversed(lines) if line.strip()), f"it ended with code {code}")
            self._say(warn, path, last)
            return None
        match = program.version.search(text)
        return "".join(filter(str.isprintable, match[1]))[:VERSION_CHARACTERS_MAX] if match else ""

    @staticmethod
    def _say(warn: bool, path: str, why: str) -> None:
        if warn:
            log.warning("a program of an engine does not tell its version", program=path, why=why[:300])
