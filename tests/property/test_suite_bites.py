"""The suite bites: each rule that protects an invariant, taken away at its own seam, is missed by the invariant named beside it.

The same seeds run clean with the rule in place. A new table of rules is one more generator in `BITES`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import attrs
import pytest

from llmgw.lease import rules as lease_rules
from llmgw.replication import rules as replication_rules
from tests.property import lease_model, replication_model, restore_model, schedules
from tests.property.world import quiet_logs
from tests.property.world_rules import WORLD_RULES


@attrs.frozen
class Bite:
    """`without(seed)` and `with_rule(seed)` run one schedule and return the names of the invariants that do not hold."""

    rule: str
    invariant: str
    without: Callable[[int], Collection[str]]
    with_rule: Callable[[int], Collection[str]]
    seeds: int  # within so many schedules the rule must be missed
    replay: Callable[[int], str]  # the line that replays a schedule with the rule in place
    first: int = 0  # the seed that the search begins with


def lease_bites() -> Iterator[Bite]:
    for rule, removal in lease_model.REMOVALS.items():
        kind, world = removal.kind, removal.world
        yield Bite(
            rule,
            removal.invariant,
            without=lambda seed, kind=kind, world=world: dict(lease_model.run(seed, kind, **world)),
            with_rule=lambda seed, kind=kind: dict(lease_model.run(seed, kind)),
            seeds=2_500,  # most need fewer than 100
            replay=lambda seed, kind=kind: lease_model.replay_line(seed, kind),
        )


def world_bites() -> Iterator[Bite]:
    for name, rule in WORLD_RULES.items():

        def without(seed: int, rule=rule) -> Collection[str]:  # type: ignore[no-untyped-def]
            with rule.remove():
                return schedules.run_schedule(seed, rule.kind).wrong

        yield Bite(
            name,
            rule.invariant,
            without=without,
            with_rule=lambda seed, rule=rule: schedules.run_schedule(seed, rule.kind).wrong,
            seeds=80,
            replay=lambda seed, rule=rule: schedules.replay_line(seed, rule.kind),
            first=rule.first,
        )


def replication_bites() -> Iterator[Bite]:
    for rule, removal in replication_model.REMOVALS.items():
        yield Bite(
            rule,
            removal.invariant,
            without=lambda seed, world=removal.world: replication_model.run(seed, **world),
            with_rule=replication_model.run,
            seeds=500,  # most need fewer than 10
            replay=replication_model.replay_line,
        )


def restore_bites() -> Iterator[Bite]:
    for rule, removal in restore_model.REMOVALS.items():
        yield Bite(
            rule,
            removal.invariant,
            without=lambda seed, rule=rule: restore_model.run(seed, rule),
            with_rule=restore_model.run,
            seeds=40,  # most need fewer than 5
            replay=restore_model.replay_line,
        )


BITES = [*lease_bites(), *replication_bites(), *restore_bites(), *world_bites()]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with quiet_logs():
        yield


@pytest.mark.parametrize("bite", BITES, ids=lambda bite: bite.rule)
def test_a_rule_that_is_taken_away_is_missed(bite: Bite):
    for seed in range(bite.first, bite.first + bite.seeds):
        missed = bite.invariant in bite.without(seed)
        clean = not bite.with_rule(seed)
        assert clean, f"with the rule in place the same schedule holds\n{bite.replay(seed)}"
        if missed:
            return
    pytest.fail(f"without this rule {bite.seeds} schedules keep {bite.invariant}: {bite.rule}")


def test_every_rule_of_the_lease_that_the_suite_can_take_away_is_taken_away():
    taken = {name for removal in lease_model.REMOVALS.values() for name in changed(removal.world, lease_rules.RULES)}
    assert taken == {field.name for field in attrs.fields(lease_rules.Rules)}


def test_every_rule_of_replication_is_taken_away():
    taken = {name for removal in replication_model.REMOVALS.values() for name in changed(removal.world, replication_rules.RULES)}
    assert taken == {field.name for field in attrs.fields(replication_rules.Rules)}


def changed(world: dict[str, object], whole: attrs.AttrsInstance) -> set[str]:
    """Which rules the world is without."""
    protect = world.get("protect", whole)
    return {name for name in attrs.fields_dict(type(whole)) if getattr(protect, name) is not getattr(whole, name)}
