"""A simulated node: the agent's real sessions and fence over simulated replicas."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import trio

from llmgw import __version__
from llmgw.agent.fence import Fence
from llmgw.agent.session import Sessions
from llmgw.domain.errors import Unavailable
from llmgw.domain.ids import CPU_DEVICE, DeviceId, NodeId
from llmgw.domain.model import ENGINES
from llmgw.domain.node import Device, DeviceKind, FoundEngine, NodeFacts
from llmgw.protocol.channel import Channel
from llmgw.sim.channel import SimChannel, channel_pair
from llmgw.sim.machine import SimMachine
from llmgw.sim.replicas import Behaviour, SimReplicas

GPU_MIB: Final = 81_920
CPU_MIB: Final = 262_144
Accept = Callable[[SimChannel], Awaitable[None]]


def gpus(count: int, node: str) -> tuple[Device, ...]:
    """A CPU and `count` GPUs of 80 GiB."""
    cpu = Device(CPU_DEVICE, 0, DeviceKind.CPU, "cpu", CPU_MIB)
    return (cpu, *(Device(DeviceId(f"GPU-{node}-{index}"), index, DeviceKind.GPU, "Simulated 80 GB", GPU_MIB) for index in range(count)))


class SimNode:
    """`accepts` maps a control plane's url to what takes a new channel there; a missing one refuses the connection.

    `replicas` live in `nursery`, which is the machine; `run` is the agent, which may be cancelled and run again.
    """

    def __init__(
        self,
        machine: SimMachine,
        nursery: trio.Nursery,
        name: str,
        accepts: Mapping[str, Accept],
        *,
        devices: tuple[Device, ...] | None = None,
        behaviour: Behaviour | None = None,
        facility: str = "",
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self.machine = machine
        self.name = name
        self.id = NodeId(f"node-{name}")
        self._nursery = nursery
        self._accepts = accepts
        self._facility = facility
        self._labels = labels or {}
        self.replicas = SimReplicas(machine, nursery, behaviour or Behaviour(), devices or gpus(0, name))

    def facts(self) -> NodeFacts:
        return NodeFacts(
            id=self.id,
            name=self.name,
            machine_id=f"machine-{self.name}",
            boot_id=f"boot-{self.name}",
            build=__version__,
            facility=self._facility,
            labels=self._labels,
            devices=self.replicas.devices(),
            engines=tuple(FoundEngine(engine, "sim") for engine in ENGINES if engine != "openai"),
        )

    async def run(self) -> None:
        """The agent: sessions with every control plane, until cancelled."""
        fence = Fence(self.machine, Path("/agent"))
        await fence.load()
        sessions = Sessions(
            self.machine, fence, lambda: self.replicas, self.facts, self._dial, folder=Path("/agent"), control_planes=tuple(self._accepts)
        )
        self.replicas.changed = sessions.changed
        self.replicas.event = sessions.event
        await sessions.run()

    @asynccontextmanager
    async def _dial(self, url: str) -> AsyncIterator[Channel]:
        accept = self._accepts.get(url)
        if accept is None:
            raise Unavailable(f"{url} cannot be reached")
        mine, theirs = channel_pair(self.name, url)
        self._nursery.start_soon(accept, theirs)
        try:
            yield mine
        finally:
            await mine.close()
