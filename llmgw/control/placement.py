"""Where one replica may stand: hard filters that keep their numbers, then a score. Pure.

It never promises more memory on a device than the device has, and shares a GPU only where every profile on it allows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs

from llmgw.control.observed import Desired, MemoryNeed, Observed, ObservedNode
from llmgw.domain.ids import DeviceId, NodeId
from llmgw.domain.model import ModelSpec, Profile
from llmgw.domain.node import Device, DeviceKind, NodeState
from llmgw.domain.plan import Filter, Rejection
from llmgw.domain.replica import ReplicaOrder, ReplicaState

# States in which a replica's processes may hold memory and a port on a node that can be heard.
HOLDS_MEMORY: Final = frozenset(
    {ReplicaState.PENDING, ReplicaState.STARTING, ReplicaState.LOADING, ReplicaState.READY, ReplicaState.DRAINING, ReplicaState.LOST}
)
UNSTATED: Final = MemoryNeed(512, "512 MiB where nothing is known")


@attrs.frozen
class Place:
    """A node that fits, with the devices and the port that the replica is to have. `left_mib` stays free on them."""

    node: NodeId
    devices: tuple[DeviceId, ...]
    port: int
    memory_mib: int
    left_mib: int
    text: str


@attrs.frozen
class Share:
    """What one of our replicas was promised on one device. `shared`: its profile allows others beside it."""

    mib: int
    shared: bool


def per_device_mib(memory_mib: int, devices: int) -> int:
    """An engine splits its memory evenly over its devices; rounded up, so that the sum is never short."""
    return -(-memory_mib // max(devices, 1))


def need_of(profile: Profile, desired: Desired) -> MemoryNeed:
    """What a replica of this profile needs: the operator's figure, else what `desired` knows, else the least we assume."""
    if profile.memory_mib:
        return MemoryNeed(profile.memory_mib, "the profile's memory_mib")
    return desired.needs.get(profile.digest(), UNSTATED)


class _NodeLedger:
    """What one node has given away. `version` rises with each change, so that an earlier look at the node can be kept."""

    def __init__(self, node: ObservedNode) -> None:
        self.node = node
        self.version = 0
        self.shares: dict[DeviceId, list[Share]] = {}
        self.ports: set[int] = set(node.taken_ports)
        self.closed: dict[tuple[str, str], str] = {}
        self.siblings: dict[str, int] = {}

    def take(self, order: ReplicaOrder, memory_mib: int) -> None:
        each = per_device_mib(memory_mib, len(order.devices))
        shared = order.profile.share_gpu or order.profile.gpus == 0
        for device in order.devices:
            self.shares.setdefault(device, []).append(Share(each, shared))
        self.siblings[order.model] = self.siblings.get(order.model, 0) + 1
        self.ports.add(order.port)
        self.version += 1

    def free_mib(self, device: Device) -> int:
        """All of a device's memory, less what others hold, less what ours were promised."""
        return device.total_mib - device.foreign_mib - sum(share.mib for share in self.shares.get(device.id, ()))


class Ledger:
    """The cluster's devices, ports and closures while one plan is made: every placement of the plan is entered at once."""

    def __init__(self, desired: Desired, observed: Observed) -> None:
        self._desired = desired
        ordered = sorted(observed.nodes, key=lambda node: (node.name, node.id))
        self._nodes = {node.id: _NodeLedger(node) for node in ordered}
        self._holds = {hold.facility: hold for hold in reversed(desired.holds)}
        self._looked: dict[tuple[NodeId, str, str], tuple[int, Place | Rejection]] = {}
        for replica in observed.replicas:
            at = self._nodes.get(replica.node)
            if at is None:
                continue
            order = replica.report.order
            if replica.state in HOLDS_MEMORY or replica.report.pid:
                at.take(order, max(order.memory_mib, replica.report.memory_mib))
            elif replica.state is ReplicaState.FAILED:
                at.ports.add(order.port)
                # Used its attempts here: closed until the model changes or somebody asks.
                at.closed[order.model, order.profile.digest()] = f"replica {replica.id} failed here: {replica.report.reason}"
        for refusal in observed.refusals:
            if refusal.node in self._nodes:
                self._nodes[refusal.node].closed[refusal.model, refusal.digest] = f"the agent refused: {refusal.text}"

    def place(self, model: ModelSpec, profile: Profile) -> tuple[Place | None, tuple[Rejection, ...]]:
        """The best place for one more replica of this profile, and why each other node was not one.

        Same ledger, same answer. The caller enters what it takes with `enter`.
        """
        best: tuple[tuple[float | str, ...], Place] | None = None
        rejections: list[Rejection] = []
        in_domain: dict[str, int] = {}
        for at in self._nodes.values():
            if count := at.siblings.get(model.name, 0):
                domain = self._domain(at.node)
                in_domain[domain] = in_domain.get(domain, 0) + count
        digest = profile.digest()
        need = need_of(profile, self._desired)
        for at in self._nodes.values():
            key = (at.node.id, model.name, digest)
            looked = self._looked.get(key)
            if looked is None or looked[0] != at.version:
                looked = self._looked[key] = (at.version, self._fit(at, model, profile, digest, need))
            found = looked[1]
            if isinstance(found, Rejection):
                rejections.append(found)
                continue
            score = self._score(at, model, in_domain.get(self._domain(at.node), 0), found)
            if best is None or score < best[0]:
                best = (score, found)
        return (best[1] if best else None), tuple(rejections)

    def enter(self, node: NodeId, order: ReplicaOrder) -> None:
        """This order is now part of the plan: what it takes is no longer there for the next."""
        self._nodes[node].take(order, order.memory_mib)

    def _fit(self, at: _NodeLedger, model: ModelSpec, profile: Profile, digest: str, need: MemoryNeed) -> Place | Rejection:
        node, facts = at.node, at.node.facts

        def no(which: Filter, text: str) -> Rejection:
            return Rejection(node.name, which, text)

        if node.state is not NodeState.READY:
            return no(Filter.STATE, f"the node is {node.state.value}, last heard {node.unheard_s:.0f} s ago")
        if not node.connected:
            return no(Filter.STATE, f"its agent has no session now, last heard {node.unheard_s:.0f} s ago")
        if node.cordoned or node.draining:
            return no(Filter.CORDON, "the node is draining" if node.draining else "the node is cordoned")
        if hold := self._holds.get(facts.facility):
            return no(Filter.HOLD, f"facility {hold.facility!r} is held: {hold.reason}")
        for key, value in sorted(profile.selector.items()):
            if facts.labels.get(key) != value:
                return no(Filter.SELECTOR, f"label {key} is {facts.labels.get(key, '')!r}, the profile asks for {value!r}")
        if profile.engine != "command" and all(engine.name != profile.engine for engine in facts.engines):
            return no(Filter.ENGINE, f"engine {profile.engine!r} was not found on the node")
        if closed := at.closed.get((model.name, digest)):
            return no(Filter.CLOSED, closed)
        devices = _pick_devices(at, profile, need)
        if isinstance(devices, Rejection):
            return devices
        port = next((port for port in range(facts.ports[0], facts.ports[1] + 1) if port not in at.ports), None)
        if port is None:
            return no(Filter.PORT, f"every port of {facts.ports[0]}-{facts.ports[1]} is in use")
        left_mib = sum(at.free_mib(device) for device in devices) - need.mib
        text = f"{need.mib} MiB ({need.origin}) on {', '.join(device.name for device in devices)} of {node.name}"
        return Place(node.id, tuple(device.id for device in devices), port, need.mib, left_mib, text)

    def _domain(self, node: ObservedNode) -> str:
        by = self._desired.settings.spread
        return node.facts.facility if by == "facility" else node.facts.labels.get(by, "")

    def _score(self, at: _NodeLedger, model: ModelSpec, in_domain: int, place: Place) -> tuple[float | str, ...]:
        """Lower is better: spread over domains, then over nodes, then pack (or not), then the name."""
        idle_gpus = sum(device.kind is DeviceKind.GPU and not at.shares.get(device.id) for device in at.node.facts.devices)
        packing = (idle_gpus, place.left_mib) if self._desired.settings.pack else (-idle_gpus, -place.left_mib)
        return (in_domain, at.siblings.get(model.name, 0), *packing, at.node.name, at.node.id)


def _pick_devices(at: _NodeLedger, profile: Profile, need: MemoryNeed) -> tuple[Device, ...] | Rejection:
    node = at.node
    wanted = max(profile.gpus, 1)
    kind = DeviceKind.GPU if profile.gpus else DeviceKind.CPU
    of_kind = [device for device in node.facts.devices if device.kind is kind]
    if len(of_kind) < wanted:
        text = (
            f"the profile asks for {profile.gpus} GPUs, the node has {len(of_kind)}" if profile.gpus else "the node reports no CPU device"
        )
        return Rejection(node.name, Filter.DEVICES, text)
    open_ones = [device for device in of_kind if device.known and _admits(kind, profile, at.shares.get(device.id, ()))]
    if len(open_ones) < wanted:
        unknown = sum(not device.known for device in of_kind)
        text = f"the profile asks for {wanted} free GPUs, {len(open_ones)} of {len(of_kind)} are free"
        return Rejection(node.name, Filter.DEVICES, text + (f", {unknown} cannot be read" if unknown else ""))
    each = per_device_mib(need.mib, wanted)
    fitting = [device for device in open_ones if at.free_mib(device) >= each]
    if len(fitting) < wanted:
        free = " + ".join(str(at.free_mib(device)) for device in open_ones)
        per = f"{each} MiB on each of {wanted} GPUs, {need.mib} in all," if wanted > 1 else f"{each} MiB"
        of = " + ".join(str(device.total_mib) for device in open_ones)
        return Rejection(node.name, Filter.MEMORY, f"needs {per} by {need.origin}; free are {free} of {of} MiB")
    # The fullest that still fit, so that large models find whole GPUs later; index breaks ties.
    fitting.sort(key=lambda device: (at.free_mib(device), device.index, device.id))
    return tuple(sorted(fitting[:wanted], key=lambda device: (device.index, device.id)))


def _admits(kind: DeviceKind, profile: Profile, there: Sequence[Share]) -> bool:
    """May one more stand on a device with these on it? The CPU takes any number as far as memory goes."""
    return kind is DeviceKind.CPU or not there or (profile.share_gpu and all(share.shared for share in there))
