"""No acknowledged write is lost at a take-over, in very many schedules without any time in them. `test_suite_bites` takes rules away."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import SCHEDULES
from tests.property.replication_model import REMOVALS, Acknowledged, Leads, Released, World, main, replay_line, run

SHARDS = 10
EACH = 10_000  # a shard takes about 3 s


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
def test_no_schedule_of_take_overs_loses_an_acknowledged_write(shard: int, record_property: Callable[[str, Any], None]):
    for seed in range(shard * EACH, (shard + 1) * EACH):
        wrong = run(seed)
        assert not wrong, f"{wrong}\n{replay_line(seed)}"
    record_property(f"{SCHEDULES}the replicated store", EACH)


def test_the_schedules_hold_take_overs_acknowledgements_and_hand_overs():
    histories = [World(seed).run() for seed in range(400)]
    assert sum(isinstance(entry, Acknowledged) for history in histories for entry in history) > 400
    assert sum(sum(isinstance(entry, Leads) for entry in history) > 1 for history in histories) > 200
    assert sum(isinstance(entry, Released) for history in histories for entry in history) > 40


def test_the_replay_line_shows_what_is_wrong(capsys: pytest.CaptureFixture[str]):
    rule = "and after its upload"
    removal = REMOVALS[rule]
    seed = next(seed for seed in range(2_000) if removal.invariant in run(seed, **removal.world))
    main(*shlex.split(replay_line(seed, rule))[3:])
    assert f"{removal.invariant}: write " in capsys.readouterr().out
