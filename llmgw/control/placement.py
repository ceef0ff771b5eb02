"""Where one replica may stand: hard filters that keep their numbers, then a score. Pure.

It never promises more memory on a device than the device has, and shares a GPU only where every profile on it allows it.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
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
# What others hold on a device changes by a few MiB at every look (a display, a driver). Rounded up, equal GPUs stay equal, and
# a promise leaves room for the next few. Chosen: 0.3 % of an 80 GiB GPU.
FOREIGN_STEP_MIB: Final = 256
REJECTIONS_MAX: Final = 64  # nodes up to which a successful placement also tells why each other node was not taken
_UNSEEN: Final = object()
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
    """What one node has given away, and its signature: nodes of equal signature take the same profiles, equally well."""

    def __init__(self, node: ObservedNode, domain: str) -> None:
        self.node = node
        self.domain = domain
        self.shares: dict[DeviceId, list[Share]] = {}
        self.ports: set[int] = set(node.taken_ports)
        self.closed: dict[tuple[str, str], str] = {}
        self.key = (node.name, node.id)

    def take(self, order: ReplicaOrder, memory_mib: int) -> None:
        each = per_device_mib(memory_mib, len(order.devices))
        shared = order.profile.share_gpu or order.profile.gpus == 0
        for device in order.devices:
            self.shares.setdefault(device, []).append(Share(each, shared))
        self.ports.add(order.port)

    def free_mib(self, device: Device) -> int:
        """All of a device's memory, less what others hold (rounded up), less what ours were promised."""
        given = self.shares.get(device.id)
        others = -(-device.foreign_mib // FOREIGN_STEP_MIB) * FOREIGN_STEP_MIB
        return device.total_mib - others - (sum(share.mib for share in given) if given else 0)

    def idle_gpus(self) -> int:
        return sum(device.kind is DeviceKind.GPU and device.id not in self.shares for device in self.node.facts.devices)

    def signature(self) -> tuple[object, ...]:
        node, facts = self.node, self.node.facts
        devices = tuple(
            (device.kind, device.known, self.free_mib(device), tuple(share.shared for share in self.shares.get(device.id, ())))
            for device in facts.devices
        )
        first, last = facts.ports
        room = any(port not in self.ports for port in range(first, last + 1))
        return (
            node.state, node.connected, node.cordoned, node.draining, facts.facility, self.domain, tuple(sorted(facts.labels.items())),
            tuple(engine.name for engine in facts.engines), devices, room,
        )  # fmt: skip


class _Bucket:
    """Nodes of one signature, sorted by name."""

    def __init__(self, domain: str) -> None:
        self.domain = domain
        self.nodes: list[tuple[tuple[str, NodeId], _NodeLedger]] = []

    def add(self, at: _NodeLedger) -> None:
        bisect.insort(self.nodes, (at.key, at), key=lambda item: item[0])

    def remove(self, at: _NodeLedger) -> None:
        del self.nodes[bisect.bisect_left(self.nodes, at.key, key=lambda item: item[0])]


class Ledger:
    """The cluster's devices, ports and closures while one plan is made: every placement of the plan is entered at once.

    Nodes are kept in buckets of equal signature, so that a plan's cost grows with the kinds of node there are.
    """

    def __init__(self, desired: Desired, observed: Observed) -> None:
        self._desired = desired
        self._now_s = observed.now_s
        self._holds = {hold.facility: hold for hold in reversed(desired.holds)}
        by = desired.settings.spread
        self._nodes: dict[NodeId, _NodeLedger] = {}
        for node in sorted(observed.nodes, key=lambda node: (node.name, node.id)):
            self._nodes[node.id] = _NodeLedger(node, node.facts.facility if by == "facility" else node.facts.labels.get(by, ""))
        self._siblings: dict[str, dict[NodeId, int]] = {}
        for replica in observed.replicas:
            at = self._nodes.get(replica.node)
            if at is None:
                continue
            order = replica.report.order
            if replica.state in HOLDS_MEMORY or replica.report.pid:
                at.take(order, max(order.memory_mib, replica.report.memory_mib))
                self._count(order.model, replica.node)
            elif replica.state is ReplicaState.FAILED:
                at.ports.add(order.port)
                # Used its attempts here: closed until the model changes or somebody asks.
                at.closed[order.model, order.profile.digest()] = f"replica {replica.id} failed here: {replica.report.reason}"
        for refusal in observed.refusals:
            if refusal.node in self._nodes:
                self._nodes[refusal.node].closed[refusal.model, refusal.digest] = f"the agent refused: {refusal.text}"
        self._buckets: dict[tuple[object, ...], _Bucket] = {}
        self._bucket_of: dict[NodeId, tuple[object, ...]] = {}
        for at in self._nodes.values():
            self._sort_in(at)
        self._fits: dict[tuple[str, tuple[object, ...]], Place | None] = {}

    def place(self, model: ModelSpec, profile: Profile) -> tuple[Place | None, tuple[Rejection, ...]]:
        """The best place for one more replica of this profile, and why other nodes were not one.

        All of them where there is no place; beside a place only in clusters of up to REJECTIONS_MAX nodes. Same ledger, same
        answer. The caller enters what it takes with `enter`.
        """
        digest = profile.digest()
        need = need_of(profile, self._desired)
        siblings = self._siblings.get(model.name, {})
        in_domain: dict[str, int] = {}
        for node, count in siblings.items():
            domain = self._nodes[node].domain
            in_domain[domain] = in_domain.get(domain, 0) + count
        best: tuple[tuple[float | str, ...], _NodeLedger] | None = None
        for signature, bucket in self._buckets.items():
            candidate = self._candidate(bucket, siblings, (model.name, digest))
            if candidate is None:
                continue
            fit = self._fits.get((digest, signature), _UNSEEN)
            if fit is _UNSEEN:
                found = self._fit(candidate, profile, need)
                fit = self._fits[digest, signature] = found if isinstance(found, Place) else None
            if not isinstance(fit, Place):
                continue
            score = self._score(candidate, siblings, in_domain.get(bucket.domain, 0), fit)
            if best is None or score < best[0]:
                best = (score, candidate)
        if best is None:
            return None, self._rejections(model, profile, digest, need)
        place = self._fit(best[1], profile, need)
        assert isinstance(place, Place), "nodes of one signature take the same profiles"
        few = len(self._nodes) <= REJECTIONS_MAX
        return place, self._rejections(model, profile, digest, need) if few else ()

    def enter(self, node: NodeId, order: ReplicaOrder) -> None:
        """This order is now part of the plan: what it takes is no longer there for the next."""
        at = self._nodes[node]
        signature = self._bucket_of[node]
        bucket = self._buckets[signature]
        bucket.remove(at)
        if not bucket.nodes:
            del self._buckets[signature]
        at.take(order, order.memory_mib)
        self._count(order.model, node)
        self._sort_in(at)

    def _sort_in(self, at: _NodeLedger) -> None:
        signature = at.signature()
        self._bucket_of[at.node.id] = signature
        bucket = self._buckets.get(signature)
        if bucket is None:
            bucket = self._buckets[signature] = _Bucket(at.domain)
        bucket.add(at)

    def _count(self, model: str, node: NodeId) -> None:
        of_model = self._siblings.setdefault(model, {})
        of_model[node] = of_model.get(node, 0) + 1

    @staticmethod
    def _candidate(bucket: _Bucket, siblings: Mapping[NodeId, int], closed: tuple[str, str]) -> _NodeLedger | None:
        """The bucket's best node for a model: without a sibling if there is one, else with the fewest; then by name."""
        best: _NodeLedger | None = None
        fewest = 0
        for _, at in bucket.nodes:
            if closed in at.closed:
                continue
            count = siblings.get(at.node.id, 0)
            if count == 0:
                return at
            if best is None or count < fewest:
                best, fewest = at, count
        return best

    def _rejections(self, model: ModelSpec, profile: Profile, digest: str, need: MemoryNeed) -> tuple[Rejection, ...]:
        found: list[Rejection] = []
        for at in self._nodes.values():
            looked = self._fit(at, profile, need)
            if isinstance(looked, Rejection):
                found.append(looked)
            elif closed := at.closed.get((model.name, digest)):
                found.append(Rejection(at.node.name, Filter.CLOSED, closed))
        return tuple(found)

    def _fit(self, at: _NodeLedger, profile: Profile, need: MemoryNeed) -> Place | Rejection:
        """Can this node take it? Depends on nothing that is not in the node's signature, but for which devices and port."""
        node, facts = at.node, at.node.facts

        def no(which: Filter, text: str) -> Rejection:
            return Rejection(node.name, which, text)

        if node.state is not NodeState.READY:
            return no(Filter.STATE, f"the node is {node.state.value}, last heard {self._now_s - node.heard_s:.0f} s ago")
        if not node.connected:
            return no(Filter.STATE, f"its agent has no session now, last heard {self._now_s - node.heard_s:.0f} s ago")
        if node.cordoned or node.draining:
            return no(Filter.CORDON, "the node is draining" if node.draining else "the node is cordoned")
        if hold := self._holds.get(facts.facility):
            return no(Filter.HOLD, f"facility {hold.facility!r} is held: {hold.reason}")
        for key, value in sorted(profile.selector.items()):
            if facts.labels.get(key) != value:
                return no(Filter.SELECTOR, f"label {key} is {facts.labels.get(key, '')!r}, the profile asks for {value!r}")
        # A program that only [engines.<name>] command names is looked for by the agent when it gets the order.
        told = profile.engine == "command" or bool(self._desired.settings.engine_commands.get(profile.engine))
        if not told and all(engine.name != profile.engine for engine in facts.engines):
            return no(Filter.ENGINE, f"engine {profile.engine!r} was not found on the node")
        devices = _pick_devices(at, profile, need)
        if isinstance(devices, Rejection):
            return devices
        port = next((port for port in range(facts.ports[0], facts.ports[1] + 1) if port not in at.ports), None)
        if port is None:
            return no(Filter.PORT, f"every port of {facts.ports[0]}-{facts.ports[1]} is in use")
        left_mib = sum(at.free_mib(device) for device in devices) - need.mib
        text = f"{need.mib} MiB ({need.origin}) on {', '.join(device.name for device in devices)} of {node.name}"
        return Place(node.id, tuple(device.id for device in devices), port, need.mib, left_mib, text)

    def _score(self, at: _NodeLedger, siblings: Mapping[NodeId, int], in_domain: int, fit: Place) -> tuple[float | str, ...]:
        """Lower is better: spread over domains, then over nodes, then pack (or not), then the name."""
        idle_gpus = at.idle_gpus()
        packing = (idle_gpus, fit.left_mib) if self._desired.settings.pack else (-idle_gpus, -fit.left_mib)
        return (in_domain, siblings.get(at.node.id, 0), *packing, *at.key)


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
