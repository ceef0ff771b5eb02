"""Many simulated nodes from one seed: how each behaves, and where its engines listen. What `llmgw sim` and `dev --sim` run."""

from __future__ import annotations

import random
from typing import Final

import attrs
import structlog
import trio

from llmgw.agent.session import Dial
from llmgw.domain.errors import Invalid
from llmgw.domain.ports import Machine
from llmgw.domain.replica import ReplicaOrder, ReplicaReport
from llmgw.sim.engine import SimEngine
from llmgw.sim.machine import SimMachine
from llmgw.sim.node import SimNode, gpus
from llmgw.sim.replicas import Behaviour, Serve

NODES_MAX: Final = 10_000
GPUS_MAX: Final = 16
FACILITY_NODES: Final = 16  # simulated nodes a rack
PORT_FIRST: Final = 10_000
PORT_LAST: Final = 32_000  # below the kernel's ephemeral range
PORTS_SPARE: Final = 4  # beyond a replica a GPU: those of replicas that are on their way out
log = structlog.get_logger("llmgw.sim")


@attrs.frozen
class FleetPlan:
    """What to simulate. Shares are of attempts or requests, 0 to 1; times are seconds.

    `load_s` is the range from which each replica draws its load time, `tokens_per_s` that of its speed.
    """

    nodes: int = 8
    gpus: int = 8
    seed: int = 1
    serve: bool = False
    load_s: tuple[float, float] = (1.0, 5.0)
    tokens_per_s: tuple[float, float] = (20.0, 80.0)
    crash_share: float = 0.0
    hang_share: float = 0.0
    join_s: float = 0.0  # over which the nodes come up

    def check(self) -> None:
        """Raises Invalid with the reason."""
        if not 1 <= self.nodes <= NODES_MAX:
            raise Invalid(f"--nodes must be 1 to {NODES_MAX}, not {self.nodes}", param="nodes")
        if not 0 <= self.gpus <= GPUS_MAX:
            raise Invalid(f"--gpus must be 0 to {GPUS_MAX}, not {self.gpus}", param="gpus")
        if self.serve and self.nodes > self.served_max:
            raise Invalid(f"--serve with {self.gpus} GPUs a node has ports for {self.served_max} nodes, not {self.nodes}", param="nodes")

    @property
    def served_max(self) -> int:
        """Nodes whose engines all find a port on this machine."""
        return (PORT_LAST - PORT_FIRST + 1) // (self.gpus + PORTS_SPARE)

    def ports(self, index: int) -> tuple[int, int]:
        """Node `index`'s range; no two overlap, because all listen on this machine."""
        span = self.gpus + PORTS_SPARE
        first = PORT_FIRST + index * span
        return first, first + span - 1


def seed_of(plan: FleetPlan, order: ReplicaOrder, what: str) -> str:
    """What a replica's randomness begins from: its model and its port, which no two nodes share. Its id is new at each start."""
    return f"{plan.seed}/{order.model}/{order.port}/{what}"


def behaviour(plan: FleetPlan) -> Behaviour:
    """The same for the same seed, model and port, whenever it is asked."""

    def drawn(order: ReplicaOrder, what: str, low: float, high: float) -> float:
        return random.Random(seed_of(plan, order, what)).uniform(low, high)

    def crashes(order: ReplicaOrder, attempt: int) -> bool:
        return drawn(order, f"crash {attempt}", 0.0, 1.0) < plan.crash_share

    return Behaviour(load_s=lambda order: drawn(order, "load", *plan.load_s), crashes=crashes)


def engine(machine: Machine, plan: FleetPlan, report: ReplicaReport) -> SimEngine:
    """A replica's engine: its speed, its words and which of its requests hang follow from the seed, its model and its port."""
    speed = random.Random(seed_of(plan, report.order, "speed")).uniform(*plan.tokens_per_s)
    return SimEngine(machine, report, speed, plan.hang_share, seed_of(plan, report.order, "answers"))


async def run_fleet(
    host: Machine,
    plan: FleetPlan,
    dial: Dial,
    control_planes: tuple[str, ...],
    *,
    task_status: trio.TaskStatus[tuple[SimNode, ...]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Runs every node until cancelled. `host` is what they run on: its time of day is theirs, as if all kept the right time.

    Raises Invalid for an impossible plan.
    """
    plan.check()
    conduct = behaviour(plan)
    async with trio.open_nursery() as nursery:
        nodes = []
        for index in range(plan.nodes):
            name = f"sim-{index + 1:04d}"
            machine = SimMachine(plan.seed * NODES_MAX + index, time_of_day=host.wall_s)
            serve = _server(machine, plan) if plan.serve else None
            nodes.append(
                SimNode(
                    machine,
                    nursery,
                    name,
                    dial,
                    control_planes,
                    devices=gpus(plan.gpus, name),
                    behaviour=conduct,
                    facility=f"rack-{index // FACILITY_NODES + 1}",
                    labels={"gpu": "sim"},
                    ports=plan.ports(index),
                    serve=serve,
                )
            )
        task_status.started(tuple(nodes))
        for index, node in enumerate(nodes):
            nursery.start_soon(_join, node, plan.join_s * index / plan.nodes)


async def _join(node: SimNode, after_s: float) -> None:
    await node.machine.sleep_until(node.machine.now_s() + after_s)
    await node.run()


def _server(machine: Machine, plan: FleetPlan) -> Serve:
    async def serve(report: ReplicaReport, *, task_status: trio.TaskStatus[object]) -> None:
        await engine(machine, plan, report).serve(task_status=task_status)

    return serve
