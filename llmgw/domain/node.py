"""A machine with GPUs, as its agent reports it and as the leader sees it."""

from __future__ import annotations

import enum
from collections.abc import Mapping

import attrs

from llmgw.domain.ids import DeviceId, NodeId


class NodeState(enum.Enum):
    """Cordoned and draining are flags beside these."""

    UNKNOWN = "unknown"  # has not answered this leader's barrier yet
    READY = "ready"
    LOST = "lost"  # silent for longer than node_lost_after_s
    REMOVED = "removed"


class DeviceKind(enum.Enum):
    GPU = "gpu"
    CPU = "cpu"


@attrs.frozen
class Device:
    """One GPU, or the CPU as one device with the node's memory. Memory in MiB.

    `used_mib` is everything that is measured as in use, `ours_mib` the part that our replicas' processes hold.
    `known` is False when the probe hung or printed nonsense: nothing is placed there, the node goes on.
    """

    id: DeviceId
    index: int
    kind: DeviceKind
    name: str
    total_mib: int
    used_mib: int = 0
    ours_mib: int = 0
    known: bool = True

    @property
    def foreign_mib(self) -> int:
        """Memory that processes which are not ours hold."""
        return max(0, self.used_mib - self.ours_mib)


@attrs.frozen
class FoundEngine:
    """An engine that the agent found on its node. `version` is empty where it could not be told."""

    name: str
    version: str = ""


@attrs.frozen
class NodeFacts:
    """What an agent says of its node. `ports` is the inclusive range for engines; `disk_free_mib` of the checkpoints folder."""

    id: NodeId
    name: str
    machine_id: str
    boot_id: str
    build: str
    facility: str = ""
    labels: Mapping[str, str] = attrs.field(factory=dict)
    address: str = "127.0.0.1"
    ports: tuple[int, int] = (20000, 20999)
    cpus: int = 0
    memory_mib: int = 0
    disk_free_mib: int = 0
    devices: tuple[Device, ...] = ()
    engines: tuple[FoundEngine, ...] = ()
    skew_s: float = 0.0  # wall clock against the control plane's, for people only

    def device(self, device_id: DeviceId) -> Device | None:
        return next((device for device in self.devices if device.id == device_id), None)
