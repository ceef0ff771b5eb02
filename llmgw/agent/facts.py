"""What an agent says of its node: who it is, where it stands, what it has. Reads files and asks engines' programs for their
versions; decides nothing."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import attrs

from llmgw import __version__
from llmgw.agent import checkpoints
from llmgw.agent.engines.programs import Programs
from llmgw.agent.supervisor import found_engines
from llmgw.domain.errors import Invalid
from llmgw.domain.files import unusable
from llmgw.domain.ids import NodeId
from llmgw.domain.node import Device, NodeFacts
from llmgw.domain.ports import Machine

NODE_ID_FILE: Final = "node-id"
NODE_ID_BYTES: Final = 8
_MACHINE_ID: Final = Path("/etc/machine-id")
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def node_id(machine: Machine, data_dir: Path) -> NodeId:
    """The node's id, made once and kept. Blocking. Raises `Invalid` for a file that holds none, `Unavailable` for a full disk."""
    path = data_dir / NODE_ID_FILE
    try:
        data = machine.disk.read(path)
        if data is None:
            made = NodeId(f"node-{machine.fresh_hex(NODE_ID_BYTES)}")
            machine.disk.write(path, made.encode() + b"\n")
            return made
    except OSError as err:
        raise unusable(err, "the file of this node's id", path, "move it away to give this node a new one") from err
    text = data.decode("utf-8", "replace").strip()
    if not text or not text.isprintable() or len(text) > 100:
        raise Invalid(f"{path} does not hold a node id; move it away to give this node a new one")
    return NodeId(text)


def boot_id() -> str:
    """Changes with every start of the machine; empty where the kernel does not tell."""
    return _line(_BOOT_ID)


def _line(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


@attrs.frozen
class Fixed:
    """What does not change while the agent runs."""

    id: NodeId
    name: str
    boot_id: str
    facility: str
    labels: Mapping[str, str]
    address: str
    ports: tuple[int, int]
    checkpoints_dir: Path


class FactsKeeper:
    """The node's facts, as fresh as the last `refresh`, with the devices as they are now.

    `engine_commands` says where engines are that are not in PATH; it is asked from another thread.
    """

    def __init__(
        self,
        fixed: Fixed,
        devices: Callable[[], tuple[Device, ...]],
        engine_commands: Callable[[], Mapping[str, tuple[str, ...]]] = dict,
    ) -> None:
        self._devices = devices
        self._engine_commands = engine_commands
        self._programs = Programs(os.environ)
        self._checkpoints_dir = fixed.checkpoints_dir
        self._facts = NodeFacts(
            id=fixed.id,
            name=fixed.name or socket.gethostname(),
            machine_id=_line(_MACHINE_ID),
            boot_id=fixed.boot_id,
            build=__version__,
            facility=fixed.facility,
            labels=fixed.labels,
            address=fixed.address,
            ports=fixed.ports,
            cpus=len(os.sched_getaffinity(0)),
        )

    def refresh(self) -> None:
        """Blocking, one at a time: looks at the disk and at what is installed, and asks programs for their versions."""
        free_mib = checkpoints.free_mib(self._checkpoints_dir)
        self._facts = attrs.evolve(self._facts, disk_free_mib=free_mib, engines=found_engines(self._programs, self._engine_commands()))

    def __call__(self) -> NodeFacts:
        devices = self._devices()
        memory_mib = next((device.total_mib for device in devices if device.id == "cpu"), 0)
        return attrs.evolve(self._facts, devices=devices, memory_mib=memory_mib)
