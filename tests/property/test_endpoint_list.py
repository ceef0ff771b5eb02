"""Properties of the endpoint list that a control plane makes of what it observes."""

from __future__ import annotations

import attrs
from hypothesis import given

from llmgw.control.endpoint_list import build_list
from llmgw.control.observed import Observed
from llmgw.domain.endpoint import EndpointList
from llmgw.protocol import list_delta
from tests.property.strategies import PlanWorld, plan_worlds


def answering(observed: Observed) -> Observed:
    """Each replica has told where it answers, the newest first; those that are ready are listed."""
    told = tuple(attrs.evolve(one, report=attrs.evolve(one.report, url=f"http://{one.id}")) for one in reversed(observed.replicas))
    return attrs.evolve(observed, replicas=told)


def listed(world: PlanWorld) -> EndpointList:
    return build_list(world.desired.catalog, {}, answering(world.observed), {})


@given(plan_worlds(), plan_worlds())
def test_a_change_from_any_list_to_any_other_can_be_said_by_a_delta(one: PlanWorld, other: PlanWorld) -> None:
    before, after = listed(one), listed(other)
    change = list_delta.delta(before, after)
    assert change is not None
    assert list_delta.apply(before, change) == after
