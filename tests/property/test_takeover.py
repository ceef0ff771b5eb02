"""No acknowledged write is lost at a take-over, in very many schedules without any time in them; and why each rule is there."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import SCHEDULES
from tests.property.takeover_model import REMOVALS, Acknowledged, Leads, World, main, replay_line, run

MANY = 5_000
SEEDS_TO_FAIL = 2_000


@pytest.mark.slow
def test_no_schedule_of_take_overs_loses_an_acknowledged_write(record_property: Callable[[str, Any], None]):
    for seed in range(MANY):
        wrong = run(seed)
        assert not wrong, f"{wrong}\n{replay_line(seed)}"
    record_property(f"{SCHEDULES}the take-over", MANY)


def test_the_schedules_hold_take_overs_and_acknowledgements():
    histories = [World(seed).run() for seed in range(200)]
    assert sum(isinstance(entry, Acknowledged) for history in histories for entry in history) > 200
    assert sum(sum(isinstance(entry, Leads) for entry in history) > 1 for history in histories) > 100


@pytest.mark.parametrize("rule", REMOVALS)
def test_each_rule_of_the_take_over_is_missed_when_it_is_taken_away(rule: str):
    invariant, order = REMOVALS[rule]
    failing = next((seed for seed in range(SEEDS_TO_FAIL) if invariant in run(seed, order)), None)
    assert failing is not None, f"without this rule {SEEDS_TO_FAIL} schedules keep {invariant}"
    assert not run(failing), f"with the rule in place the same schedule holds\n{replay_line(failing)}"


def test_the_replay_line_shows_what_is_wrong(capsys: pytest.CaptureFixture[str]):
    rule = "and after its upload"
    invariant, order = REMOVALS[rule]
    seed = next(seed for seed in range(SEEDS_TO_FAIL) if invariant in run(seed, order))
    main(*shlex.split(replay_line(seed, rule))[3:])
    assert f"{invariant}: write " in capsys.readouterr().out
