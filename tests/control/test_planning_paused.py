"""`ctl pause`: whatever the cluster looks like, nothing is begun, what was begun before finishes, and the reasons say so."""

from __future__ import annotations

import attrs
from hypothesis import given, settings

from llmgw.control.planning import IDLE_LOOK_AGAIN_S, plan_replicas
from llmgw.domain.plan import Forget, Start, Stop, Withdraw
from llmgw.domain.replica import ReplicaState
from tests.property.strategies import PlanWorld, fresh_ids, plan_worlds

PAUSED = "paused by ann: works"


def paused(world: PlanWorld) -> PlanWorld:
    return attrs.evolve(world, desired=attrs.evolve(world.desired, paused=PAUSED))


def plan(world: PlanWorld):
    return plan_replicas(world.desired, world.observed, fresh_ids())


@given(plan_worlds())
@settings(max_examples=300, deadline=None)
def test_nothing_is_placed_moved_or_scaled_while_the_cluster_is_paused(world: PlanWorld) -> None:
    closing = {closing.replica for closing in world.observed.closings}
    states = {replica.id: replica.state for replica in world.observed.replicas}
    for action in plan(paused(world)).actions:
        assert not isinstance(action, Start | Withdraw)
        if isinstance(action, Stop):
            assert action.replica in closing
        if isinstance(action, Forget):
            assert states[action.replica] is ReplicaState.STOPPED


@given(plan_worlds())
@settings(max_examples=300, deadline=None)
def test_what_was_withdrawn_before_the_pause_is_stopped_as_it_would_have_been(world: PlanWorld) -> None:
    closing = {closing.replica for closing in world.observed.closings}
    finishing = [action for action in plan(world).actions if isinstance(action, Stop) and action.replica in closing]
    assert [action for action in plan(paused(world)).actions if isinstance(action, Stop)] == finishing


@given(plan_worlds())
@settings(max_examples=300, deadline=None)
def test_every_model_for_which_something_would_be_done_says_that_the_cluster_is_paused(world: PlanWorld) -> None:
    found = plan(paused(world))
    said = {reason.object: reason.text for reason in found.reasons}
    assert all(text == f"{PAUSED}; nothing is placed, moved or scaled until `llmgw ctl resume`" for text in said.values())
    closing = {closing.replica for closing in world.observed.closings}
    models = {replica.id: replica.model for replica in world.observed.replicas}
    for action in plan(world).actions:
        if isinstance(action, Start):
            assert f"model/{action.order.model}" in said
        elif isinstance(action, Withdraw) or (isinstance(action, Stop) and action.replica not in closing):
            assert f"model/{models[action.replica]}" in said


@given(plan_worlds())
@settings(max_examples=200, deadline=None)
def test_a_pause_comes_to_rest_and_leaves_what_runs_as_it_is(world: PlanWorld) -> None:
    """Carrying the paused plan out leaves nothing to do, and no ready replica has gone that was not on its way out before."""
    closing = {closing.replica for closing in world.observed.closings}
    ready = {replica.id for replica in world.observed.replicas if replica.state is ReplicaState.READY}
    now = paused(world)
    for _ in range(5):
        now = now.after(plan(now))
    last = plan(now)
    assert last.actions == ()
    assert ready - closing <= {replica.id for replica in now.observed.replicas if replica.state is ReplicaState.READY}
    assert last.look_again_after_s == IDLE_LOOK_AGAIN_S or now.observed.closings


@given(plan_worlds())
@settings(max_examples=200, deadline=None)
def test_after_a_pause_the_plan_is_the_one_that_was_put_off(world: PlanWorld) -> None:
    resumed = attrs.evolve(paused(world), desired=attrs.evolve(paused(world).desired, paused=None))
    assert plan(resumed) == plan(world)
