"""Very many random schedules of the roll-out's own rules. One that fails prints the line that replays it."""

from __future__ import annotations

import gc
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.control.rollout import RULES, Grant, HandOver, Member, Rest, RestartMe, RolloutView, Rules, Save, describe, next_step
from llmgw.domain.settings_version import Held, PlaneSettings, RolloutPhase, RolloutRow
from tests.conftest import SCHEDULES
from tests.property.rollout_model import INVARIANTS, REMOVALS, SELDOM, World, main, replay_line, run

MANY = 20_000  # in chunks, so that two workers share them
CHUNK = 2_500
SEEDS_TO_FAIL = 1_500  # most rules need fewer than 100


@pytest.fixture(autouse=True)
def _no_garbage_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, MANY, CHUNK))
def test_no_schedule_of_roll_outs_breaks_an_invariant(first: int, record_property: Callable[[str, Any], None]):
    for seed in range(first, first + CHUNK):
        wrong = run(seed)
        assert not wrong, f"{wrong}\n{replay_line(seed)}"
    record_property(f"{SCHEDULES}the roll-out", CHUNK)


def test_the_schedules_hold_restarts_failures_hand_overs_and_holds():
    restarts = 0
    seen: Counter[str] = Counter()
    for seed in range(1_000_000, 1_000_200):
        world = World(seed)
        assert not world.run(), replay_line(seed)
        restarts += world.restarts
        seen["held"] += bool(world.row.held)
        seen["died"] += bool(world.victims)
        seen["terms"] += world.term > 1
        seen["calm"] += world.calm
        seen["all run the newest"] += all(plane.applied == world.newest for plane in world.planes.values() if plane.up)
    assert restarts > 400
    assert min(seen.values()) > 30, seen


@pytest.mark.parametrize("rule", REMOVALS)
def test_each_rule_of_the_roll_out_is_missed_when_it_is_taken_away(rule: str):
    invariant, rules = REMOVALS[rule]
    first = SELDOM.get(rule, 0)
    failing = next((seed for seed in range(first, first + SEEDS_TO_FAIL) if invariant in run(seed, rules)), None)
    assert failing is not None, f"without this rule {SEEDS_TO_FAIL} schedules keep {invariant}"
    assert not run(failing), f"with the rule in place the same schedule holds\n{replay_line(failing)}"


def test_every_rule_is_taken_away_and_every_invariant_is_a_known_one():
    names = {field.name for field in attrs.fields(Rules)}
    taken = {name for _, rules in REMOVALS.values() for name in names if getattr(rules, name) != getattr(RULES, name)}
    assert taken == names
    assert {invariant for invariant, _ in REMOVALS.values()} <= set(INVARIANTS)


def test_one_seed_gives_one_history():
    assert history(7) == history(7)
    assert history(7) != history(8)


def history(seed: int) -> list[Any]:
    world = World(seed, tell=True)
    world.run()
    assert world.history
    return world.history


def test_the_replay_line_shows_what_is_wrong(capsys: pytest.CaptureFixture[str]):
    rule = "the leader is last"
    invariant, rules = REMOVALS[rule]
    seed = next(seed for seed in range(SEEDS_TO_FAIL) if invariant in run(seed, rules))
    main(*shlex.split(replay_line(seed, rule))[3:])
    assert f"{invariant}: " in capsys.readouterr().out


VERSIONS = st.integers(0, 4)
ADDRESSES = ("a", "b", "c")
SECONDS = st.sampled_from((0.0, 1.0, 4.0, 11.0, 31.0, 61.0, 200.0))
PLANES = st.builds(
    PlaneSettings,
    live=VERSIONS,
    applied=VERSIONS,
    pending=VERSIONS,
    restart_for_file=st.booleans(),
    refused=VERSIONS,
    why=st.sampled_from(("", "boom")),
    up_s=SECONDS,
)
ROWS = st.builds(
    RolloutRow,
    phase=st.sampled_from(RolloutPhase),
    version=VERSIONS,
    members=st.sets(st.sampled_from(ADDRESSES)).map(lambda some: tuple(sorted(some))),
    token=st.sampled_from(("", *ADDRESSES)),
    led=st.sampled_from(("", *ADDRESSES)),
    held=st.sets(st.integers(1, 4), max_size=3).map(lambda some: tuple(Held(version, "boom") for version in sorted(some))),
    reason=st.sampled_from(("", "because")),
    done=st.sets(st.sampled_from(ADDRESSES)).map(lambda some: tuple(sorted(some))),
    for_file=st.booleans(),
    proven=VERSIONS,
    successor=st.sampled_from(("", *ADDRESSES)),
    proving=VERSIONS,
)


@st.composite
def views(draw: st.DrawFn) -> RolloutView:
    there = draw(st.sets(st.sampled_from(ADDRESSES), min_size=1).map(sorted))
    me = draw(st.sampled_from(there))
    members = tuple(Member(one, f"ctl-{one}", 0.0 if one == me else draw(SECONDS) % 61.0, draw(PLANES), one == me) for one in there)
    return RolloutView(members, me, draw(VERSIONS), draw(SECONDS), draw(SECONDS), draw(st.booleans()), draw(SECONDS), draw(st.booleans()))


@settings(max_examples=400, deadline=None)
@given(views(), ROWS)
def test_every_view_of_every_row_has_an_answer_that_keeps_to_the_contract(view: RolloutView, row: RolloutRow):
    step = next_step(view, row)
    assert describe(row, view)
    match step:
        case Rest(why):
            assert why
        case Save(after):
            assert after != row, "a row that is stored again and again is no step"
        case Grant():
            assert step.row == row
            assert step.address == row.token != view.me
            assert row.for_file or not row.is_held(row.version)
        case RestartMe():
            assert step.row == row
            assert row.token == view.me
            assert len(view.members) == 1
        case HandOver():
            assert step.row == row
            assert len(view.members) > 1
