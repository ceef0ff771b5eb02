"""How a control plane's process ends: what is put down to the settings version that it started with, and what is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmgw.control.settings_boot import PROVEN_S, Failure, Marks, load_marks, save_marks
from llmgw.domain.errors import Conflict, Invalid, LlmgwError
from llmgw.sim.machine import SimMachine
from llmgw.wiring.server import Ends

FOLDER = Path("/d")


def begun(machine: SimMachine, version: int) -> Ends:
    ends = Ends()
    ends.booting(machine, FOLDER, version)
    return ends


async def test_a_version_with_which_two_processes_failed_soon_after_their_start_is_put_aside(autojump_clock) -> None:
    machine = SimMachine(1)
    begun(machine, 7).failed(RuntimeError("no answer of the kernel"))
    assert load_marks(machine.disk, FOLDER).aside(7) == ""
    begun(machine, 7).failed(RuntimeError("boom again"))
    assert load_marks(machine.disk, FOLDER) == Marks(failures=(Failure(7, 2, "boom again"),))
    assert load_marks(machine.disk, FOLDER).aside(7).endswith("boom again")


async def test_a_failure_counts_for_a_minute_and_no_longer(autojump_clock) -> None:
    machine = SimMachine(1)
    for after_s, count in ((PROVEN_S + 0.1, 0), (PROVEN_S - 0.1, 1)):
        ends = begun(machine, 7)
        await machine.sleep_until(machine.now_s() + after_s)
        ends.failed(RuntimeError("boom"))
        assert sum(failure.count for failure in load_marks(machine.disk, FOLDER).failures) == count


async def test_what_ends_before_a_version_was_chosen_or_without_one_is_put_down_to_none(autojump_clock) -> None:
    machine = SimMachine(1)
    Ends().failed(RuntimeError("the data directory is in use by pid 3"))
    begun(machine, 0).failed(RuntimeError("boom"))
    assert load_marks(machine.disk, FOLDER) == Marks()


async def test_what_was_told_meanwhile_is_kept_beside_the_failure(autojump_clock) -> None:
    machine = SimMachine(1)
    ends = begun(machine, 7)
    save_marks(machine.disk, FOLDER, Marks(proven=6, told=8))
    ends.failed(RuntimeError("boom"))
    assert load_marks(machine.disk, FOLDER) == Marks(proven=6, failures=(Failure(7, 1, "boom"),), told=8)


async def test_a_failure_of_the_version_that_is_proven_here_is_not_its_fault(autojump_clock) -> None:
    machine = SimMachine(1)
    save_marks(machine.disk, FOLDER, Marks(proven=7))
    for _ in range(3):
        begun(machine, 7).failed(RuntimeError("the disk is full"))
    assert load_marks(machine.disk, FOLDER) == Marks(proven=7)


@pytest.mark.parametrize("err", [Invalid("metrics.token: not set"), Conflict("the port is taken")])
async def test_what_a_person_repairs_on_the_machine_is_not_the_versions_fault(err: LlmgwError, autojump_clock) -> None:
    machine = SimMachine(1)
    begun(machine, 7).failed(err)
    assert load_marks(machine.disk, FOLDER) == Marks()


async def test_a_full_disk_does_not_hide_why_the_process_ends(autojump_clock) -> None:
    machine = SimMachine(1)
    machine.disk.fail = OSError(28, "No space left on device")
    begun(machine, 7).failed(RuntimeError("boom"))
    assert load_marks(machine.disk, FOLDER) == Marks()
