"""The planner and the endpoint list at 1,000 nodes with 8 GPUs and 5,000 replicas."""

from __future__ import annotations

import attrs

from benchmarks.measure import Row, cpu_ms
from llmgw.control.endpoint_list import build_list
from llmgw.control.observed import Desired, Observed, ObservedNode, ObservedReplica, PlanSettings
from llmgw.control.planning import plan_replicas
from llmgw.domain.ids import CPU_DEVICE, DeviceId, NodeId, ReplicaId
from llmgw.domain.model import Catalog, ModelSpec, Profile, ReplicaCounts
from llmgw.domain.node import Device, DeviceKind, FoundEngine, NodeFacts, NodeState
from llmgw.domain.replica import ReplicaOrder, ReplicaReport, ReplicaState

NODES, GPUS, REPLICAS, MODELS, LOST = 1000, 8, 5000, 100, 100
ROUNDS = 7


def fresh_ids():
    number = 0
    while True:
        number += 1
        yield f"{number:08x}"


def cluster() -> tuple[Desired, Observed]:
    """A full cluster at rest. What others hold on each GPU differs from node to node, as it does in life."""
    models = [
        ModelSpec(f"m{i:03}", (Profile("p", "vllm", "/x", gpus=1, memory_mib=60_000),), replicas=ReplicaCounts(0, 100, REPLICAS // MODELS))
        for i in range(MODELS)
    ]
    nodes, replicas = [], []
    for n in range(NODES):
        gpus = tuple(Device(DeviceId(f"G{n}-{g}"), g, DeviceKind.GPU, "80 GB", 81_920, used_mib=(n * 7 + g) % 200) for g in range(GPUS))
        cpu = Device(CPU_DEVICE, 0, DeviceKind.CPU, "cpu", 262_144)
        facts = NodeFacts(
            NodeId(f"n{n:04}"),
            f"node-{n:04}",
            "m",
            "b",
            "0",
            facility=f"room-{n % 10}",
            devices=(cpu, *gpus),
            engines=(FoundEngine("vllm"),),
        )
        nodes.append(ObservedNode(facts, NodeState.READY))
        for g in range(REPLICAS // NODES):
            number = len(replicas)
            model = models[number % MODELS]
            order = ReplicaOrder(
                ReplicaId(f"{model.name}-{number:08x}"),
                model.name,
                model.names,
                model.kind,
                model.profiles[0],
                (gpus[g].id,),
                20_000 + g,
                60_000,
                1,
            )
            report = ReplicaReport(order, ReplicaState.READY, pid=100 + number, url=f"http://127.0.0.1:{20_000 + g}", key="k" * 32)
            replicas.append(ObservedReplica(facts.id, report, ReplicaState.READY))
    return Desired(Catalog(tuple(models), 1)), Observed(tuple(nodes), tuple(replicas))


def rows() -> list[Row]:
    desired, observed = cluster()
    lost = {f"n{n:04}" for n in range(LOST)}
    broken = Observed(
        tuple(attrs.evolve(node, state=NodeState.LOST) if node.id in lost else node for node in observed.nodes),
        tuple(attrs.evolve(replica, state=ReplicaState.LOST) if replica.node in lost else replica for replica in observed.replicas),
    )
    at_once = attrs.evolve(desired, settings=PlanSettings(starts_max=10_000))
    assert not plan_replicas(desired, observed, fresh_ids()).actions
    assert len(plan_replicas(at_once, broken, fresh_ids()).actions) == LOST * REPLICAS // NODES
    idle = cpu_ms(lambda: plan_replicas(desired, observed, fresh_ids()), ROUNDS)
    heal = cpu_ms(lambda: plan_replicas(at_once, broken, fresh_ids()), ROUNDS)
    listed = build_list(desired.catalog, {}, observed, {})
    build = cpu_ms(lambda: build_list(desired.catalog, {}, observed, {}).fingerprint, ROUNDS)
    assert len(listed.endpoints) == REPLICAS
    return [
        Row(f"plan, {NODES:,} nodes × {GPUS} GPUs, {REPLICAS:,} replicas, nothing to do", f"{idle:.1f} ms CPU", "≤ 20 ms CPU", idle <= 20),
        Row(
            f"the same, {LOST} nodes lost, {LOST * REPLICAS // NODES} replicas placed anew",
            f"{heal:.0f} ms CPU",
            "≤ 500 ms CPU",
            heal <= 500,
        ),
        Row(f"endpoint list of {REPLICAS:,} built and fingerprinted from nothing", f"{build:.0f} ms CPU"),
    ]
