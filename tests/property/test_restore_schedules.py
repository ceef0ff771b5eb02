"""Schedules of a backup and a restore: one is refused and changes nothing, or everything that was backed up is there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.property import restore_model
from tests.property.world import quiet_logs

SCHEDULES = 50


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with quiet_logs():
        yield


def test_every_schedule_holds():
    wrong = {seed: found for seed in range(SCHEDULES) if (found := restore_model.run(seed))}
    assert not wrong, f"{wrong}\n{restore_model.replay_line(min(wrong))}"
