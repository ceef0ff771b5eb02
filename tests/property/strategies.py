"""Hypothesis strategies for worlds: nodes, models, what runs, what is held."""

from __future__ import annotations

import attrs
from hypothesis import strategies as st

from llmgw.control.observed import Closing, Desired, MemoryNeed, Observed, ObservedNode, ObservedReplica, PlanSettings
from llmgw.domain.holds import Hold
from llmgw.domain.ids import CPU_DEVICE, DeviceId, NodeId, ReplicaId
from llmgw.domain.model import Catalog, ModelSpec, Profile, ReplicaCounts
from llmgw.domain.node import Device, DeviceKind, FoundEngine, NodeFacts, NodeState
from llmgw.domain.plan import Forget, Plan, Start, Stop, Withdraw
from llmgw.domain.replica import ReplicaOrder, ReplicaReport, ReplicaState

FACILITIES = ("room-1", "room-2")
S = ReplicaState


@attrs.frozen
class PlanWorld:
    """What is asked for and what is; `after(plan)` is the world once everyone has done what the plan says."""

    desired: Desired
    observed: Observed

    def after(self, plan: Plan) -> PlanWorld:
        """Starts become ready, withdrawn replicas are let go at once, stopped and forgotten ones are gone."""
        replicas = {replica.id: replica for replica in self.observed.replicas}
        closings = {closing.replica: closing for closing in self.observed.closings}
        for action in plan.actions:
            match action:
                case Start(node, order, _):
                    replicas[order.id] = ObservedReplica(node, ReplicaReport(order, S.READY, pid=1), S.READY, since_s=1.0)
                case Withdraw(_, replica, why, deadline_s):
                    closings[replica] = Closing(replica, why, withdrawn=True, used=False, left_s=deadline_s)
                case Stop(_, replica, _, _) | Forget(_, replica, _):
                    replicas.pop(replica, None)
                    closings.pop(replica, None)
        for replica_id, replica in list(replicas.items()):
            if replica.state in (S.PENDING, S.STARTING, S.LOADING):
                replicas[replica_id] = attrs.evolve(replica, state=S.READY, report=attrs.evolve(replica.report, state=S.READY))
            elif replica.state is S.DRAINING:
                del replicas[replica_id]
        closings = {replica: closing for replica, closing in closings.items() if replica in replicas}
        ordered = tuple(replicas[key] for key in sorted(replicas))
        return attrs.evolve(self, observed=attrs.evolve(self.observed, replicas=ordered, closings=tuple(closings.values())))


def fresh_ids(prefix: str = "f"):
    """An endless supply of replica ids, the same at every call."""
    number = 0
    while True:
        number += 1
        yield f"{prefix}{number:07x}"


@st.composite
def nodes(draw: st.DrawFn, index: int) -> ObservedNode:
    gpus = draw(st.integers(0, 3))
    devices = [Device(CPU_DEVICE, 0, DeviceKind.CPU, "cpu", draw(st.sampled_from((1024, 4096))), 0)]
    for gpu in range(gpus):
        total = draw(st.sampled_from((8192, 24576)))
        used = draw(st.sampled_from((0, 0, 4096, 8192)))
        known = draw(st.integers(0, 9)) > 0
        devices.append(Device(DeviceId(f"gpu-{index}-{gpu}"), gpu, DeviceKind.GPU, f"GPU {gpu}", total, used, 0, known))
    facts = NodeFacts(
        id=NodeId(f"id-{index}"),
        name=f"node-{index}",
        machine_id=f"m{index}",
        boot_id="b",
        build="0",
        facility=draw(st.sampled_from(FACILITIES)),
        labels={"gpu": draw(st.sampled_from(("a", "b")))},
        ports=(20000, 20000 + draw(st.sampled_from((2, 99)))),
        devices=tuple(devices),
        engines=(FoundEngine("vllm"), FoundEngine("command")),
    )
    state = draw(st.sampled_from((NodeState.READY,) * 6 + (NodeState.LOST, NodeState.UNKNOWN)))
    return ObservedNode(
        facts,
        state,
        connected=state is NodeState.READY and draw(st.integers(0, 9)) > 0,
        heard_s=0.0 if state is NodeState.READY else -100.0,
        awaited_since_s=draw(st.sampled_from((-1.0, -100.0))),
        cordoned=draw(st.integers(0, 5)) == 0,
        draining=draw(st.integers(0, 7)) == 0,
        drain_left_s=draw(st.sampled_from((None, 10.0, -1.0))),
    )


@st.composite
def profiles(draw: st.DrawFn, name: str, priority: int) -> Profile:
    gpus = draw(st.integers(0, 2))
    return Profile(
        name=name,
        engine="vllm",
        checkpoint=draw(st.sampled_from(("/a", "/b"))),
        gpus=gpus,
        share_gpu=gpus > 0 and draw(st.booleans()),
        memory_mib=draw(st.sampled_from((0, 600, 5000, 20000))),
        selector=draw(st.sampled_from(({}, {}, {"gpu": "a"}))),
        priority=priority,
    )


@st.composite
def models(draw: st.DrawFn, name: str) -> ModelSpec:
    count = draw(st.integers(0, 4))
    listed = [draw(profiles(f"p{index}", index)) for index in range(draw(st.integers(1, 2)))]
    return ModelSpec(name, tuple(listed), replicas=ReplicaCounts(min(1, count), max(count, 4), count))


@st.composite
def plan_worlds(draw: st.DrawFn) -> PlanWorld:
    """A cluster in any state that plans, crashes and operators may have left it in."""
    all_nodes = [draw(nodes(index)) for index in range(draw(st.integers(0, 4)))]
    catalog = Catalog(tuple(draw(models(f"m{index}")) for index in range(draw(st.integers(0, 3)))), generation=7)
    holds = tuple(Hold(facility, "works", drain=draw(st.booleans())) for facility in FACILITIES if draw(st.integers(0, 6)) == 0)
    replicas: list[ObservedReplica] = []
    closings: list[Closing] = []
    gone = ModelSpec("gone", (Profile("p0", "vllm", "/a"),))
    if all_nodes:
        for index in range(draw(st.integers(0, 5))):
            node = draw(st.sampled_from(all_nodes))
            model = draw(st.sampled_from((*catalog.models, gone)))
            profile = draw(st.sampled_from(model.profiles))
            if draw(st.integers(0, 4)) == 0:
                profile = attrs.evolve(profile, args=("--old",))
            kind = DeviceKind.GPU if profile.gpus else DeviceKind.CPU
            able = [device.id for device in node.facts.devices if device.kind is kind]
            if len(able) < max(profile.gpus, 1):
                continue
            order = ReplicaOrder(
                id=ReplicaId(f"{model.name}-{index:08x}"),
                model=model.name,
                names=model.names,
                kind=model.kind,
                profile=profile,
                devices=tuple(able[: max(profile.gpus, 1)]),
                port=20000 + index,
                memory_mib=profile.memory_mib or 512,
                generation=6,
            )
            state = draw(st.sampled_from((S.READY,) * 5 + (S.PENDING, S.STARTING, S.LOADING, S.FAILED, S.STOPPED, S.DRAINING)))
            shown = S.LOST if node.state is NodeState.LOST and state not in (S.FAILED, S.STOPPED) else state
            pid = 0 if state in (S.FAILED, S.STOPPED) else 100 + index
            report = ReplicaReport(order, state, pid=pid, attempt=1)
            replicas.append(ObservedReplica(node.id, report, shown, since_s=-float(index), ordered_to_drain=draw(st.integers(0, 9)) == 0))
            if state is S.READY and draw(st.integers(0, 5)) == 0:
                closings.append(Closing(order.id, "because", draw(st.booleans()), draw(st.booleans()), draw(st.sampled_from((5.0, -1.0)))))
    needs = {profile.digest(): MemoryNeed(600, "test") for model in catalog.models for profile in model.profiles}
    settings = PlanSettings(starts_max=draw(st.sampled_from((1, 3, 8))), pack=draw(st.booleans()))
    choices = {model.name: model.profiles[-1].name for model in catalog.models if draw(st.integers(0, 3)) == 0}
    desired = Desired(catalog, choices, needs, holds, settings)
    return PlanWorld(desired, Observed(tuple(all_nodes), tuple(replicas), tuple(closings)))
