"""Programs that run beside a control plane, and die when they like."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from llmgw.replication.children import Child
from tests.programs import wait_for


def dead(folder: Path) -> Child:
    """One that has ended, and that nobody has waited for."""
    child = Child.start(["/bin/sh", "-c", "exit 3"], folder, {})
    wait_for(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE, "it has ended")
    return child


@pytest.mark.parametrize("grace_s", [0.0, 5.0])
async def test_one_that_died_just_before_it_is_to_be_ended_is_ended_like_any_other(tmp_path: Path, grace_s: float) -> None:
    """Sending it a signal waits for it, and then there was no such process to wait for."""
    child = dead(tmp_path)
    await child.end(grace_s)
    assert await child.wait() == 3
    assert not psutil.pid_exists(child.pid)


async def test_an_exit_code_is_told_as_often_as_it_is_asked_for(tmp_path: Path) -> None:
    child = dead(tmp_path)
    assert [await child.wait(), await child.wait()] == [3, 3]
    await child.end()
