"""What a control plane starts with: what it was told, what ran, the newest; never what is held, damaged or was put aside."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.control.settings_boot import (
    CACHE_FILE,
    FAILURES_MAX,
    MARKS_FILE,
    WHY_MAX,
    Boot,
    Failure,
    Marks,
    choose,
    load_cached,
    load_marks,
    save_cached,
    save_marks,
    tell_next,
)
from llmgw.domain.settings_version import Held, RolloutRow
from llmgw.settings.load import load_text
from llmgw.sim.machine import SimDisk
from tests.control.settings_world import version

FOLDER = Path("/d")
FILE = load_text("", source="f")
NOBODY = RolloutRow()
NEW = Marks()
VERSIONS = tuple(version(number, f"route.retries = {number}") for number in (4, 3, 2, 1))
DAMAGED = attrs.evolve(version(5, ""), sha256="0" * 64)


def chosen(marks: Marks = NEW, row: RolloutRow = NOBODY, versions=VERSIONS) -> tuple[int, int]:
    """(the version it starts with, the newest that was passed over by its own fault)."""
    found = choose(versions, row, marks, FILE)
    return (found.read.version.version if found.read is not None else 0), found.refused


def held(*numbers: int) -> RolloutRow:
    return RolloutRow(held=tuple(Held(number, "it failed") for number in numbers))


def aside(*numbers: int) -> tuple[Failure, ...]:
    return tuple(Failure(number, FAILURES_MAX, "boom") for number in numbers)


def test_a_first_start_takes_the_newest() -> None:
    assert chosen() == (4, 0)
    assert choose((), NOBODY, Marks(), FILE) == Boot()


def test_a_start_that_nobody_asked_for_takes_what_is_proven_since_it_is_no_roll_out() -> None:
    assert chosen(Marks(proven=2)) == (2, 0)
    assert chosen(row=RolloutRow(proven=3)) == (3, 0)
    assert chosen(Marks(proven=2), RolloutRow(proven=3)) == (2, 0)


def test_a_start_that_was_told_takes_what_it_was_told() -> None:
    assert chosen(Marks(proven=2, told=3)) == (3, 0)
    assert chosen(Marks(proven=3, told=2)) == (2, 0)


def test_a_version_that_is_not_there_any_more_is_not_waited_for() -> None:
    assert chosen(Marks(proven=9, told=8)) == (4, 0)


def test_a_held_version_is_never_started_with_and_that_is_no_fault_of_this_machine() -> None:
    assert chosen(row=held(4)) == (3, 0)
    assert chosen(Marks(told=4, proven=3), held(4)) == (3, 0)
    assert chosen(Marks(proven=4), held(4)) == (3, 0)
    assert chosen(row=held(4, 3, 2, 1)) == (0, 0)


def test_a_version_that_does_not_load_here_is_passed_over_and_told() -> None:
    found = choose((DAMAGED, *VERSIONS), NOBODY, Marks(), FILE)
    assert found.read is not None
    assert (found.read.version.version, found.refused) == (4, 5)
    assert "is not what was written" in found.why
    assert chosen(Marks(told=5, proven=2), versions=(DAMAGED, *VERSIONS)) == (2, 5)


def test_a_version_with_which_two_boots_failed_is_put_aside_and_told() -> None:
    found = choose(VERSIONS, NOBODY, Marks(told=4, proven=3, failures=aside(4)), FILE)
    assert found.read is not None
    assert (found.read.version.version, found.refused) == (3, 4)
    assert found.why == "it ended 2 times within 60 s of its start here: boom"
    assert chosen(Marks(failures=(Failure(4, 1, "boom"),))) == (4, 0)


def test_where_no_version_may_be_used_none_is() -> None:
    assert chosen(Marks(failures=aside(1, 2, 3, 4))) == (0, 4)


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6), st.sets(st.integers(1, 5)), st.sets(st.integers(1, 5)))
def test_what_is_chosen_is_never_held_damaged_or_put_aside_and_something_usable_is_always_found(told, here, there, holds, fails) -> None:
    versions = (DAMAGED, *VERSIONS)
    row = attrs.evolve(held(*sorted(holds)), proven=there)
    marks = Marks(told=told, proven=here, failures=aside(*sorted(fails)))
    usable = {1, 2, 3, 4} - holds - fails
    number, refused = chosen(marks, row, versions)
    assert (number in usable) if usable else number == 0
    if told in usable:
        assert number == told
    elif here in usable:
        assert number == here
    elif there in usable:
        assert number == there
    elif usable:
        assert number == max(usable)
    assert refused not in holds
    assert refused == 0 or refused in fails or refused == 5
    assert (number, refused) == chosen(marks, row, versions)


# --- marks


def test_failures_are_counted_by_version_and_the_second_puts_it_aside() -> None:
    once = Marks().failed(4, "first")
    assert once.aside(4) == ""
    twice = once.failed(3, "other").failed(4, "second")
    assert twice.failures == (Failure(3, 1, "other"), Failure(4, 2, "second"))
    assert twice.aside(4).endswith("second")
    assert twice.aside(3) == ""


def test_a_failure_is_not_put_down_to_a_version_that_was_proven_here_or_to_none() -> None:
    proven = Marks().prove(4)
    assert proven.failed(4, "x") == proven
    assert Marks().failed(0, "x") == Marks()


def test_a_version_that_has_run_for_long_enough_loses_its_failures_and_nothing_else() -> None:
    marks = Marks(proven=3, failures=(Failure(3, 1, "x"), Failure(4, 1, "y")), told=4)
    assert marks.prove(4) == Marks(proven=4, failures=(Failure(3, 1, "x"),))
    assert attrs.evolve(marks, told=5).prove(4).told == 5


def test_a_long_story_of_a_failure_is_cut() -> None:
    assert len(Marks().failed(4, "x" * 100_000).failures[0].why) == WHY_MAX


# --- the two files


def test_marks_and_the_last_version_come_back_as_they_were_saved() -> None:
    disk = SimDisk()
    assert (load_marks(disk, FOLDER), load_cached(disk, FOLDER)) == (Marks(), None)
    marks = Marks(3, (Failure(4, 1, "x"),), 4)
    save_marks(disk, FOLDER, marks)
    save_cached(disk, FOLDER, VERSIONS[0])
    assert (load_marks(disk, FOLDER), load_cached(disk, FOLDER)) == (marks, VERSIONS[0])
    tell_next(disk, FOLDER, 7)
    assert load_marks(disk, FOLDER) == attrs.evolve(marks, told=7)


BAD = [b"", b"{", b"[]", b"null", b"3", b'"x"', b"\xff\xfe", b'{"proven": "x"}', b'{"version": null}', b"[" * 100_000, b'{"failures": 3}']


@pytest.mark.parametrize("data", BAD)
def test_a_damaged_file_counts_as_none(data: bytes) -> None:
    disk = SimDisk()
    disk.files[FOLDER / MARKS_FILE] = disk.files[FOLDER / CACHE_FILE] = data
    assert load_marks(disk, FOLDER) == Marks()
    assert load_cached(disk, FOLDER) is None
    tell_next(disk, FOLDER, 2)
    assert load_marks(disk, FOLDER) == Marks(told=2)


def test_a_file_torn_at_any_byte_counts_as_none_or_as_it_was() -> None:
    disk = SimDisk()
    save_cached(disk, FOLDER, VERSIONS[0])
    whole = disk.files[FOLDER / CACHE_FILE]
    for length in range(len(whole)):
        disk.files[FOLDER / CACHE_FILE] = whole[:length]
        assert load_cached(disk, FOLDER) is None


def test_a_disk_that_takes_nothing_ends_no_process() -> None:
    disk = SimDisk()
    disk.fail = OSError(28, "No space left on device")
    save_marks(disk, FOLDER, Marks(proven=3))
    save_cached(disk, FOLDER, VERSIONS[0])
    assert disk.files == {}
