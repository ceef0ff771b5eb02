"""Watches this machine's file, and hands on each change that loads. What does not load leaves everything as it was.

A file counts when it hashes the same twice and is not empty, so that a half-written one is never read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from llmgw.domain.errors import LlmgwError
from llmgw.domain.files import words
from llmgw.domain.ports import Machine
from llmgw.settings.load import Loaded

POLL_S: Final = 1.0  # control.md 4: each control plane looks every second
log = structlog.get_logger("llmgw.settings")


async def poll_file(
    machine: Machine, path: Path, load: Callable[[bytes], Loaded], apply: Callable[[Loaded], None], refused: Callable[[str], None]
) -> None:
    """Until cancelled. `load` raises LlmgwError with every fault; `refused` is told why a changed file was not taken."""
    in_force = _digest(machine, path)
    before = in_force
    while True:
        await machine.sleep_until(machine.now_s() + POLL_S)
        now = _digest(machine, path)
        stable, before = now == before, now
        if now is None or now == in_force or not stable:
            continue
        in_force = now
        try:
            loaded = load(machine.disk.read(path) or b"")
            apply(loaded)
        except (LlmgwError, OSError) as err:
            fault = words(err) if isinstance(err, OSError) else str(err)
            log.error("the changed file was not taken; what was in force stays", file=str(path), fault=fault)
            refused(fault)
        else:
            log.info("the changed file is in force", file=str(path), models=len(loaded.catalog.models))


def _digest(machine: Machine, path: Path) -> str | None:
    try:
        data = machine.disk.read(path)
    except OSError:
        return None
    return hashlib.sha256(data).hexdigest() if data else None
