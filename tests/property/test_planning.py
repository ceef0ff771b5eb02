"""Properties of the planner: what must hold for every cluster, however it came to be."""

from __future__ import annotations

import random

import attrs
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.control.observed import Desired, Observed, ObservedNode, ObservedReplica
from llmgw.control.placement import HOLDS_MEMORY, Ledger, per_device_mib
from llmgw.control.planning import plan_replicas
from llmgw.domain.ids import NodeId, ReplicaId
from llmgw.domain.model import Catalog, ModelSpec, Profile, ReplicaCounts
from llmgw.domain.node import DeviceKind, FoundEngine, NodeFacts, NodeState
from llmgw.domain.placed import Filter
from llmgw.domain.plan import Forget, Plan, Start, Stop, Withdraw
from llmgw.domain.replica import ReplicaOrder, ReplicaReport, ReplicaState
from llmgw.sim.node import gpus
from tests.property.strategies import PlanWorld, fresh_ids, plan_worlds

ROUNDS_MAX = 60  # far above what five replicas and starts_max 1 can need


def plan(world: PlanWorld) -> Plan:
    return plan_replicas(world.desired, world.observed, fresh_ids())


def settle(world: PlanWorld) -> tuple[PlanWorld, Plan]:
    """Carries out plan after plan until one asks for nothing."""
    for round_number in range(ROUNDS_MAX):
        last = plan_replicas(world.desired, world.observed, fresh_ids(f"r{round_number}"))
        if not last.actions:
            return world, last
        world = world.after(last)
    raise AssertionError(f"still planning after {ROUNDS_MAX} rounds: {last.actions}")


@given(plan_worlds())
@settings(max_examples=400, deadline=None)
def test_no_plan_promises_more_memory_on_a_device_than_it_has(world: PlanWorld) -> None:
    made = plan(world)
    for node in world.observed.nodes:
        starts = [action for action in made.actions if isinstance(action, Start) and action.node == node.id]
        for device in node.facts.devices:
            here = [start.order for start in starts if device.id in start.order.devices]
            if not here:
                continue
            there = [
                replica.report.order
                for replica in world.observed.replicas
                if replica.node == node.id
                and device.id in replica.report.order.devices
                and (replica.state in HOLDS_MEMORY or replica.report.pid)
            ]
            promised = sum(per_device_mib(order.memory_mib, len(order.devices)) for order in (*here, *there))
            assert promised + device.foreign_mib <= device.total_mib
            assert device.known
            if device.kind is DeviceKind.GPU and len(here) + len(there) > 1:
                assert all(order.profile.share_gpu for order in (*here, *there))


@given(plan_worlds())
@settings(max_examples=400, deadline=None)
def test_carrying_out_a_plan_leaves_nothing_more_to_plan(world: PlanWorld) -> None:
    settled, last = settle(world)
    assert last.actions == ()
    for model in world.desired.catalog.models:
        running = [r for r in settled.observed.replicas if r.model == model.name and r.state is ReplicaState.READY]
        closing = {closing.replica for closing in settled.observed.closings}
        heard = {node.id for node in settled.observed.nodes if node.state is NodeState.READY and node.connected}
        staying = [r for r in running if r.id not in closing and r.node in heard]
        unheard = [r for r in running if r.node not in heard]
        assert (
            len(staying) <= model.replicas.count + len(unheard)
            or any(node.draining for node in settled.observed.nodes)
            or world.desired.holds
        )


def test_a_model_scaled_down_during_its_update_lets_what_is_ready_and_outdated_go_without_waiting_for_what_is_coming() -> None:
    facts = NodeFacts(NodeId("n"), "n", "m", "b", "0", devices=gpus(2, "n"), engines=(FoundEngine("vllm"),), ports=(20_000, 20_009))
    new = Profile("p", "vllm", "/new", gpus=1, memory_mib=1000)
    model = ModelSpec("m", (new,), replicas=ReplicaCounts(0, 1, 0))

    def replica(number: int, profile: Profile, state: ReplicaState) -> ObservedReplica:
        device = facts.devices[1 + number].id
        order = ReplicaOrder(ReplicaId(f"m-{number:08x}"), "m", model.names, model.kind, profile, (device,), 20_000 + number, 1000, 1)
        return ObservedReplica(NodeId("n"), ReplicaReport(order, state, pid=100 + number), state)

    replicas = (replica(0, attrs.evolve(new, checkpoint="/old"), ReplicaState.READY), replica(1, new, ReplicaState.LOADING))
    found = plan_replicas(Desired(Catalog((model,))), Observed((ObservedNode(facts, NodeState.READY),), replicas), fresh_ids())
    assert [(type(action), getattr(action, "replica", "")) for action in found.actions] == [(Withdraw, "m-00000000")]


@given(plan_worlds())
@settings(max_examples=300, deadline=None)
def test_with_nothing_newly_asked_or_lost_no_ready_replica_moves(world: PlanWorld) -> None:
    settled, _ = settle(world)
    again = plan_replicas(settled.desired, settled.observed, fresh_ids("again"))
    assert again.actions == ()
    older = attrs.evolve(
        settled,
        observed=attrs.evolve(
            settled.observed,
            replicas=tuple(attrs.evolve(r, since_s=r.since_s - 3600) for r in settled.observed.replicas),
        ),
    )
    assert plan(older).actions == ()


@given(plan_worlds(), st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_the_order_of_the_input_changes_nothing(world: PlanWorld, rng: random.Random) -> None:
    def shuffled(items):
        listed = list(items)
        rng.shuffle(listed)
        return tuple(listed)

    parts = [field.name for field in attrs.fields(Observed) if field.name != "now_s"]
    observed = Observed(*(shuffled(getattr(world.observed, part)) for part in parts))
    desired: Desired = attrs.evolve(world.desired, holds=shuffled(world.desired.holds))
    assert plan_replicas(desired, observed, fresh_ids()) == plan(world)


@given(plan_worlds())
@settings(max_examples=300, deadline=None)
def test_nothing_is_placed_on_a_node_that_is_cordoned_held_lost_or_not_heard(world: PlanWorld) -> None:
    held = {hold.facility for hold in world.desired.holds}
    nodes = {node.id: node for node in world.observed.nodes}
    for action in plan(world).actions:
        node = nodes[action.node]
        assert node.state is NodeState.READY
        assert node.connected
        if isinstance(action, Start):
            assert not node.cordoned
            assert not node.draining
            assert node.facts.facility not in held
            labels = node.facts.labels
            assert all(labels.get(key) == value for key, value in action.order.profile.selector.items())
            assert node.facts.ports[0] <= action.order.port <= node.facts.ports[1]


@given(plan_worlds())
@settings(max_examples=300, deadline=None)
def test_nothing_is_started_before_every_known_node_has_answered_or_its_grace_has_passed(world: PlanWorld) -> None:
    awaited = [n for n in world.observed.nodes if n.state is NodeState.UNKNOWN and -n.awaited_since_s < world.desired.settings.grace_s]
    starts = [action for action in plan(world).actions if isinstance(action, Start)]
    assert not (awaited and starts)


@given(plan_worlds())
@settings(max_examples=300, deadline=None)
def test_a_replica_is_stopped_only_after_it_was_withdrawn_and_let_go_or_overdue(world: PlanWorld) -> None:
    closings = {closing.replica: closing for closing in world.observed.closings}
    states = {replica.id: replica.state for replica in world.observed.replicas}
    for action in plan(world).actions:
        if isinstance(action, Stop):
            assert action.replica in closings
            closing = closings[action.replica]
            assert closing.withdrawn or closing.left_s <= 0
            assert not closing.used or closing.left_s <= 0 or states[action.replica] is not ReplicaState.READY
        if isinstance(action, Withdraw):
            assert action.replica not in closings
        if isinstance(action, Forget):
            assert states[action.replica] in (ReplicaState.STOPPED, ReplicaState.FAILED)


@given(plan_worlds())
@settings(max_examples=300, deadline=None)
def test_no_two_starts_share_a_port_or_an_id_and_no_more_start_than_may(world: PlanWorld) -> None:
    starts = [action for action in plan(world).actions if isinstance(action, Start)]
    used = [(r.node, r.report.order.port) for r in world.observed.replicas if r.state is not ReplicaState.STOPPED]
    ports = [(start.node, start.order.port) for start in starts]
    assert len(set(ports)) == len(ports)
    assert not set(ports) & set(used)
    assert len({start.order.id for start in starts}) == len(starts)
    coming = sum(r.state in (ReplicaState.PENDING, ReplicaState.STARTING, ReplicaState.LOADING) for r in world.observed.replicas)
    assert len(starts) <= max(0, world.desired.settings.starts_max - coming)


@given(plan_worlds())
@settings(max_examples=300, deadline=None)
def test_every_model_that_lacks_a_replica_says_why(world: PlanWorld) -> None:
    settled, last = settle(world)
    said = {reason.object for reason in last.reasons}
    closing = {closing.replica for closing in settled.observed.closings}
    for model in settled.desired.catalog.models:
        live = [
            r
            for r in settled.observed.replicas
            if r.model == model.name
            and r.id not in closing
            and r.state in (ReplicaState.READY, ReplicaState.PENDING, ReplicaState.STARTING, ReplicaState.LOADING)
        ]
        if len(live) < model.replicas.count:
            assert f"model/{model.name}" in said


@given(plan_worlds())
@settings(max_examples=300, deadline=None)
def test_an_order_says_how_many_nodes_would_have_taken_it_and_names_those_that_were_passed_over(world: PlanWorld) -> None:
    start = next((action for action in plan(world).actions if isinstance(action, Start)), None)
    if start is None:
        return
    names = {node.id: node.name for node in world.observed.nodes}
    model = next(model for model in world.desired.catalog.models if model.name == start.order.model)
    fitting = {
        node.name
        for node in world.observed.nodes
        if Ledger(world.desired, attrs.evolve(world.observed, nodes=(node,))).place(model, start.order.profile)[0] is not None
    }
    placement = start.order.placement
    among = "the only node that fits" if len(fitting) == 1 else f"the best of {len(fitting)} nodes that fit"
    assert f"of {names[start.node]}, {among}: " in placement.text
    scored = {one.node for one in placement.passed if one.filter is Filter.SCORE}
    assert scored == fitting - {names[start.node]}
    assert fitting.isdisjoint(one.node for one in placement.passed if one.filter not in (Filter.SCORE, Filter.CLOSED))


def test_in_a_large_cluster_an_order_names_the_next_best_of_other_kinds_of_node() -> None:
    def node(number: int) -> ObservedNode:
        used = 20_000 if number % 10 == 0 else 0
        devices = tuple(attrs.evolve(device, used_mib=used) for device in gpus(2, str(number)))
        facts = NodeFacts(
            NodeId(f"n{number:03}"), f"n{number:03}", "m", "b", "0", devices=devices, engines=(FoundEngine("vllm"),), ports=(20_000, 20_009)
        )
        return ObservedNode(facts, NodeState.LOST if number >= 190 else NodeState.READY)

    model = ModelSpec("m", (Profile("p", "vllm", "/x", gpus=1, memory_mib=60_000),), replicas=ReplicaCounts(0, 1, 1))
    world = Desired(Catalog((model,))), Observed(tuple(node(number) for number in range(200)))
    (start,) = plan_replicas(*world, fresh_ids()).actions
    assert isinstance(start, Start)
    assert "of n000, the best of 190 nodes that fit: 0 replicas of the model on it, 2 idle GPUs, " in start.order.placement.text
    assert start.order.placement.text.endswith("; 10 do not fit")
    (passed,) = start.order.placement.passed
    assert (passed.node, passed.filter) == ("n001", Filter.SCORE)
    assert passed.text == "21920 MiB would be left, on n000 1696: the least goes first"
