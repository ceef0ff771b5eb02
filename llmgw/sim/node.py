"""A simulated node: the agent's real sessions and fence over simulated replicas."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import trio

from llmgw import __version__
from llmgw.agent.fence import Fence
from llmgw.agent.session import Dial, Sessions
from llmgw.domain.ids import CPU_DEVICE, DeviceId, NodeId
from llmgw.domain.model import ENGINES
from llmgw.domain.node import Device, DeviceKind, FoundEngine, NodeFacts
from llmgw.domain.ports import Machine
from llmgw.sim.replicas import Behaviour, Serve, SimReplicas

GPU_MIB: Final = 81_920
CPU_MIB: Final = 262_144
# Of a node: what machines of so many GPUs are sold with, rounded.
CPUS: Final = 8
CPUS_PER_GPU: Final = 16
DISK_FREE_MIB: Final = 4 * 1024 * 1024
FOLDER: Final = Path("/agent")  # on the simulated disk


def gpus(count: int, node: str) -> tuple[Device, ...]:
    """A CPU and `count` GPUs of 80 GiB."""
    cpu = Device(CPU_DEVICE, 0, DeviceKind.CPU, "cpu", CPU_MIB)
    return (cpu, *(Device(DeviceId(f"GPU-{node}-{index}"), index, DeviceKind.GPU, "Simulated 80 GB", GPU_MIB) for index in range(count)))


class SimNode:
    """`replicas` live in `nursery`, which is the machine; `run` is the agent, which may be cancelled and run again.

    `serve` gives each ready replica a real address; without it, it has one where nothing listens.
    """

    def __init__(
        self,
        machine: Machine,
        nursery: trio.Nursery,
        name: str,
        dial: Dial,
        control_planes: tuple[str, ...],
        *,
        devices: tuple[Device, ...] | None = None,
        behaviour: Behaviour | None = None,
        facility: str = "",
        engines: tuple[str, ...] = ENGINES,
        labels: Mapping[str, str] | None = None,
        ports: tuple[int, int] = (20000, 20999),
        serve: Serve | None = None,
    ) -> None:
        self.machine = machine
        self.name = name
        self.id = NodeId(f"node-{name}")
        self._dial = dial
        self._control_planes = control_planes
        self._facility = facility
        self._engines = engines
        self._labels = labels or {}
        self._ports = ports
        self.replicas = SimReplicas(machine, nursery, behaviour or Behaviour(), devices or gpus(0, name), serve=serve)

    def facts(self) -> NodeFacts:
        devices = self.replicas.devices()
        return NodeFacts(
            id=self.id,
            name=self.name,
            machine_id=f"machine-{self.name}",
            boot_id=f"boot-{self.name}",
            build=__version__,
            facility=self._facility,
            labels=self._labels,
            ports=self._ports,
            cpus=CPUS + CPUS_PER_GPU * sum(device.kind is DeviceKind.GPU for device in devices),
            memory_mib=sum(device.total_mib for device in devices if device.kind is DeviceKind.CPU),
            disk_free_mib=DISK_FREE_MIB,
            devices=devices,
            engines=tuple(FoundEngine(engine, "sim") for engine in self._engines if engine != "openai"),
        )

    async def run(self) -> None:
        """The agent: sessions with every control plane, until cancelled."""
        fence = Fence(self.machine, FOLDER)
        await fence.load()
        sessions = Sessions(
            self.machine, fence, lambda: self.replicas, self.facts, self._dial, folder=FOLDER, control_planes=self._control_planes
        )
        self.replicas.changed = sessions.changed
        self.replicas.event = sessions.event
        await sessions.run()
