"""Where one replica may stand: hard filters that keep their numbers, then a score. Pure.

It never promises more memory on a device than the device has, and shares a GPU only where every profile on it allows it.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import attrs

from llmgw.control.observed import Desired, MemoryNeed, Observed, ObservedNode
from llmgw.domain.ids import DeviceId, NodeId
from llmgw.domain.model import ModelSpec, Profile
from llmgw.domain.node import Device, DeviceKind, NodeState
from llmgw.domain.placed import Filter, Placement, Rejection
from llmgw.domain.replica import ReplicaOrder, ReplicaState
from llmgw.domain.words import counted

# States in which a replica's processes may hold memory and a port on a node that can be heard.
HOLDS_MEMORY: Final = frozenset(
    {ReplicaState.PENDING, ReplicaState.STARTING, ReplicaState.LOADING, ReplicaState.READY, ReplicaState.DRAINING, ReplicaState.LOST}
)
# What others hold on a device changes by a few MiB at every look (a display, a driver). Rounded up, equal GPUs stay equal, and
# a promise leaves room for the next few. Chosen: 0.3 % of an 80 GiB GPU.
FOREIGN_STEP_MIB: Final = 256
REJECTIONS_MAX: Final = 64  # nodes up to which a successful placement also tells why each other node was not taken
# What a placement tells of nodes that were passed over goes into the order, and so into every report and onto the agent's disk:
# some 5 KB. In a large cluster the nodes are a few kinds many times over, and the next best of other kinds say most of it.
PASSED_MAX: Final = 32
PASSED_OF_MANY: Final = 3
UNSTATED: Final = MemoryNeed(512, "512 MiB where nothing is known")


@attrs.frozen
class Place:
    """A node that fits, with the devices and the port that the replica is to have. `left_mib` stays free on them.

    `text` says what it takes there, as the start of a sentence; `placement` goes on with why it is this node.
    """

    node: NodeId
    devices: tuple[DeviceId, ...]
    port: int
    memory_mib: int
    left_mib: int
    text: str
    placement: Placement = Placement()


class _Score(NamedTuple):
    """How well a node takes one more replica of a model; the lower, the better, part by part."""

    in_domain: int  # replicas of the model in its facility, or what else they are spread over
    on_node: int  # of those, on the node itself
    idle_gpus: int  # negative where replicas are not to be packed
    left_mib: int  # likewise
    key: tuple[str, NodeId]


@attrs.frozen
class _Fit:
    """A node that takes one more, and how well."""

    score: _Score
    at: _NodeLedger


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
                end = replica.report.failure or replica.report.reason
                at.closed[order.model, order.profile.digest()] = f"replica {replica.id} failed here: {end}"
        for refusal in observed.refusals:
            if refusal.node in self._nodes:
                self._nodes[refusal.node].closed[refusal.model, refusal.digest] = f"the agent refused: {refusal.text}"
        self._closed = {key for at in self._nodes.values() for key in at.closed}
        self._buckets: dict[tuple[object, ...], _Bucket] = {}
        self._bucket_of: dict[NodeId, tuple[object, ...]] = {}
        for at in self._nodes.values():
            self._sort_in(at)
        self._fits: dict[tuple[str, tuple[object, ...]], Place | None] = {}

    def place(self, model: ModelSpec, profile: Profile) -> tuple[Place | None, tuple[Rejection, ...]]:
        """The best place for one more replica of this profile, with why; where there is none, why each node is not one.

        Same ledger, same answer. The caller enters what it takes with `enter`.
        """
        digest = profile.digest()
        need = need_of(profile, self._desired)
        siblings, in_domain = self._spread(model)
        fits, fitting = self._fits_of(model, profile, digest, need, siblings, in_domain)
        best = min(fits, key=lambda fit: fit.score, default=None)
        if best is None:
            return None, tuple(rejection for _, rejection in self._rejections(model, profile, digest, need))
        place = self._fit(best.at, profile, need)
        assert isinstance(place, Place), "nodes of one signature take the same profiles"
        few = len(self._nodes) <= REJECTIONS_MAX
        passed = self._all_passed(model, profile, digest, need, siblings, in_domain, best) if few else self._next_best(fits, best)
        praise = self._praise(best, fitting, len(self._nodes) - fitting)
        return attrs.evolve(place, placement=Placement(f"{place.text}, {praise}", passed)), ()

    def _all_passed(
        self,
        model: ModelSpec,
        profile: Profile,
        digest: str,
        need: MemoryNeed,
        siblings: Mapping[NodeId, int],
        in_domain: Mapping[str, int],
        best: _Fit,
    ) -> tuple[Rejection, ...]:
        """Every other node, those that fit first, the best of them first; the texts of PASSED_MAX."""
        unfit = self._rejections(model, profile, digest, need)
        out = {best.at.node.id, *(node for node, _ in unfit)}
        others = [
            _Fit(self._score(at, siblings, in_domain, found), at)
            for node, at in self._nodes.items()
            if node not in out and isinstance(found := self._fit(at, profile, need), Place)
        ]
        others.sort(key=lambda fit: fit.score)
        return (*(self._outscored(fit, best) for fit in others[:PASSED_MAX]), *(rejection for _, rejection in unfit))[:PASSED_MAX]

    def _next_best(self, fits: Sequence[_Fit], best: _Fit) -> tuple[Rejection, ...]:
        """The best of PASSED_OF_MANY other kinds of node."""
        ranked = heapq.nsmallest(PASSED_OF_MANY + 1, fits, key=lambda fit: fit.score)
        return tuple(self._outscored(fit, best) for fit in ranked[1:])

    def _spread(self, model: ModelSpec) -> tuple[Mapping[NodeId, int], Mapping[str, int]]:
        """How many replicas of the model stand on each node, and in each facility."""
        siblings = self._siblings.get(model.name, {})
        in_domain: dict[str, int] = {}
        for node, count in siblings.items():
            domain = self._nodes[node].domain
            in_domain[domain] = in_domain.get(domain, 0) + count
        return siblings, in_domain

    def _fits_of(
        self,
        model: ModelSpec,
        profile: Profile,
        digest: str,
        need: MemoryNeed,
        siblings: Mapping[NodeId, int],
        in_domain: Mapping[str, int],
    ) -> tuple[list[_Fit], int]:
        """The best node of each kind that takes the profile, and how many nodes take it in all."""
        closing = (model.name, digest)
        some_closed = closing in self._closed
        fits: list[_Fit] = []
        fitting = 0
        for signature, bucket in self._buckets.items():
            candidate = self._candidate(bucket, siblings, closing)
            if candidate is None:
                continue
            key = (digest, signature)
            if key not in self._fits:
                found = self._fit(candidate, profile, need)
                self._fits[key] = found if isinstance(found, Place) else None
            fit = self._fits[key]
            if fit is not None:
                fits.append(_Fit(self._score(candidate, siblings, in_domain, fit), candidate))
                fitting += sum(closing not in at.closed for _, at in bucket.nodes) if some_closed else len(bucket.nodes)
        return fits, fitting

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

    def _rejections(self, model: ModelSpec, profile: Profile, digest: str, need: MemoryNeed) -> list[tuple[NodeId, Rejection]]:
        """Every node that does not take the profile, by name."""
        found: list[tuple[NodeId, Rejection]] = []
        for node, at in self._nodes.items():
            looked = self._fit(at, profile, need)
            if isinstance(looked, Rejection):
                found.append((node, looked))
            elif closed := at.closed.get((model.name, digest)):
                found.append((node, Rejection(at.node.name, Filter.CLOSED, closed)))
        return found

    def _fit(self, at: _NodeLedger, profile: Profile, need: MemoryNeed) -> Place | Rejection:
        """Can this node take it? Depends on nothing that is not in the node's signature, but for which devices and port."""
        node, facts = at.node, at.node.facts

        def no(which: Filter, text: str) -> Rejection:
            return Rejection(node.name, which, text)

        if node.state is not NodeState.READY:
            return self._silent(node, f"the node is {node.state.value}")
        if not node.connected:
            return self._silent(node, "its agent has no session now")
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

    def _silent(self, node: ObservedNode, cause: str) -> Rejection:
        return Rejection(node.name, Filter.STATE, f"{cause}, last heard {self._now_s - node.heard_s:.0f} s ago", cause)

    def _score(self, at: _NodeLedger, siblings: Mapping[NodeId, int], in_domain: Mapping[str, int], fit: Place) -> _Score:
        """Lower is better: spread over domains, then over nodes, then pack (or not), then the name."""
        sign = 1 if self._desired.settings.pack else -1
        return _Score(in_domain.get(at.domain, 0), siblings.get(at.node.id, 0), sign * at.idle_gpus(), sign * fit.left_mib, at.key)

    def _praise(self, best: _Fit, fitting: int, unfit: int) -> str:
        """The parts of the score of the node that was taken, and against how many it was."""
        score, at = best.score, best.at
        among = "the only node that fits" if fitting == 1 else f"the best of {fitting} nodes that fit"
        there = f" and {score.in_domain} in {self._desired.settings.spread} {at.domain!r}" if at.domain else ""
        parts = [f"{counted(score.on_node, 'replica')} of the model on it{there}"]
        if any(device.kind is DeviceKind.GPU for device in at.node.facts.devices):
            parts.append(counted(abs(score.idle_gpus), "idle GPU"))
        parts.append(f"{abs(score.left_mib)} MiB left beside it")
        return f"{among}: {', '.join(parts)}" + (f"; {unfit} {'does' if unfit == 1 else 'do'} not fit" if unfit else "")

    def _outscored(self, fit: _Fit, taken: _Fit) -> Rejection:
        """The part of the score that decided between two nodes that fit."""
        spread, pack = self._desired.settings.spread, self._desired.settings.pack
        worse, best, name = fit.score, taken.score, taken.at.node.name
        if worse.in_domain != best.in_domain:
            theirs, ours = fit.at.domain, taken.at.domain
            text = f"{spread} {theirs!r} has {counted(worse.in_domain, 'replica')} of the model, {ours!r} has {best.in_domain}"
        elif worse.on_node != best.on_node:
            text = f"it has {counted(worse.on_node, 'replica')} of the model, {name} has {best.on_node}"
        elif worse.idle_gpus != best.idle_gpus:
            first = "fewest" if pack else "most"
            text = f"it has {counted(abs(worse.idle_gpus), 'idle GPU')}, {name} has {abs(best.idle_gpus)}: the {first} go first"
        elif worse.left_mib != best.left_mib:
            first = "least" if pack else "most"
            text = f"{abs(worse.left_mib)} MiB would be left, on {name} {abs(best.left_mib)}: the {first} goes first"
        else:
            text = f"it fits as well, and {name} comes first by name"
        return Rejection(fit.at.node.name, Filter.SCORE, text)


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
