"""The world: two or three control planes, agents and routers as they really run, on simulated machines under faults by seed.

It starts the very functions that `wiring` starts (`Controller.run`, the agents' `Sessions.run`, `Follower.run`) over simulated
ports, and holds no rule of lease, plan or fence. Everything that happens goes into a history; `invariants` judges it.
A seed gives one history: trio's batch order, ids, jitter and faults are all drawn from it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import structlog
import trio
import trio.testing

from llmgw.control import rollout, settings_boot
from llmgw.control.controller import Controller, Objects
from llmgw.control.leadership import Candidacy
from llmgw.control.peers import Presence
from llmgw.control.settings_in_force import PROTECT, Read, SettingsInForce
from llmgw.control.settings_poller import boot
from llmgw.domain.endpoint import EndpointList, ListStamp
from llmgw.domain.errors import LlmgwError, Unavailable
from llmgw.domain.ids import ClusterId, owner_id
from llmgw.domain.lease import LeaseRole
from llmgw.domain.model import Catalog, ModelSpec, Profile, ReplicaCounts
from llmgw.domain.policy import Policy
from llmgw.domain.replica import ReplicaState
from llmgw.domain.settings_version import SettingsVersion
from llmgw.domain.usage import UsageBatch
from llmgw.lease.record import LeaseRecord, decode
from llmgw.lease.rules import RULES, Rules
from llmgw.lease.state import Candidate
from llmgw.lease.timings import LeaseTimings
from llmgw.protocol.messages import Command, Message
from llmgw.protocol.router_messages import PushDelta
from llmgw.router.follow import Follower
from llmgw.settings.document import cluster_values_of, document_of, with_keys
from llmgw.settings.load import Loaded, Role, load_bytes
from llmgw.settings.schema import LeaseSettings, PublishSettings, ReconcileSettings, RolloutSettings, RouteSettings, Settings
from llmgw.sim.channel import SimChannel, SimNetwork
from llmgw.sim.lease_store import FINE, Bucket, Fault, Request, SimLeases, SimLock, SimLockClient
from llmgw.sim.machine import SimMachine
from llmgw.sim.node import SimNode, gpus
from llmgw.sim.replicas import Behaviour
from llmgw.sim.router import SimRouter
from llmgw.store import settings as settings_rows
from llmgw.store.audit import Origin
from llmgw.store.connection import MEMORY, FileStore
from llmgw.store.copies import News, Position

CLUSTER = ClusterId("c1")
LOOK_S = 0.5  # between two looks at every claim and every node
TTL_S, RENEW_S, POLL_S = 6.0, 2.0, 0.5  # short, so that a schedule of minutes holds many terms
SETTINGS = Settings(
    lease=LeaseSettings(ttl_s=TTL_S, renew_s=RENEW_S, poll_s=POLL_S),
    reconcile=ReconcileSettings(tick_s=2.0, heartbeat_s=2.0, node_lost_after_s=6.0, grace_s=12.0),
    publish=PublishSettings(interval_s=2.0),
    route=RouteSettings(drain_s=5.0),
)
RULES_OF_ROLLOUT = rollout.RULES
FOLDER, FILE = Path("/data"), Path("/etc/llmgw.toml")
TIMEOUT_S, DELAY_S = 20.0, 8.0  # of a roll-out, short as well
DRY_LOAD_S = 0.3
SLOW_S = TIMEOUT_S + 12.0  # what a slow start takes
LATE_S = 6.0  # a version that crashes late does so before it has proved itself
LEADING_S = 1.5  # a version that cannot lead is found out so soon
DOES_NOT_LOAD = b"# does not load\n"
LIVE = frozenset({ReplicaState.PENDING, ReplicaState.STARTING, ReplicaState.LOADING, ReplicaState.READY})


# --- the history


@attrs.frozen
class Left:
    """A message left a process. `at_s` is the world's time, as in all of these."""

    at_s: float
    sender: str
    receiver: str
    message: Message


@attrs.frozen
class Arrived:
    """A process took a message."""

    at_s: float
    sender: str
    receiver: str
    message: Message


@attrs.frozen
class Claim:
    """What each running control plane's claim was at one instant."""

    at_s: float
    plane: str
    role: LeaseRole
    epoch: int
    owner: str


@attrs.frozen
class Listed:
    """A router took a list; `fingerprint` is that of all of it."""

    at_s: float
    router: str
    stamp: ListStamp
    ids: frozenset[str]
    fingerprint: str


@attrs.frozen
class Wrote:
    """A unit of work was committed under `epoch`; the store had met `met`."""

    at_s: float
    plane: str
    epoch: int
    met: int


@attrs.frozen
class Recorded:
    """The lease's record was replaced."""

    at_s: float
    record: LeaseRecord


@attrs.frozen
class Stood:
    """What ran at one instant: by model the live replicas of nodes that everybody can hear, and the most promised of any GPU."""

    at_s: float
    live: dict[str, int]
    wanted: dict[str, int]
    hidden: bool  # a node was lately out of somebody's hearing, so its replicas may run twice
    memory_over: str


@attrs.frozen
class Acknowledged:
    """An operator's order was acknowledged: model `model` has `count` replicas from here on."""

    at_s: float
    plane: str
    model: str
    count: int


@attrs.frozen
class Engine:
    """`what` is started, stopped (by order) or crashed (by a fault)."""

    at_s: float
    what: str
    node: str
    replica: str


@attrs.frozen
class Happened:
    """A fault began or ended."""

    at_s: float
    text: str


@attrs.frozen
class Stored:
    """A settings version stands in the store, edited from `parent`. `marker` is its `route.queue_max`: each edit has its own."""

    at_s: float
    version: int
    parent: int
    sha256: str
    marker: int


@attrs.frozen
class Edited:
    """An editor, who began from version `base`, was told that the edit is `version`."""

    at_s: float
    base: int
    version: int


@attrs.frozen
class InForce:
    """A control plane acts on this from here on: the text of the document hashes to `sha256`, `file_sha256` is of its own file."""

    at_s: float
    plane: str
    live: int
    applied: int
    sha256: str
    file_sha256: str


@attrs.frozen
class Obeys:
    """A router was given a policy; `marker` is its `route.queue_max`."""

    at_s: float
    router: str
    marker: int


@attrs.frozen
class Refuses:
    """A document with this hash does not load on that machine."""

    at_s: float
    plane: str
    sha256: str


@attrs.frozen
class FileSaved:
    """A machine's file was written as a whole."""

    at_s: float
    plane: str
    sha256: str


@attrs.frozen
class Serves:
    """A process has begun, with this version of the settings."""

    at_s: float
    plane: str
    version: int


@attrs.frozen
class Restarts:
    """A process begins the restart that its settings ask for, into `version` (its own one for a file).

    `leads`: it holds the lease. `others`: those that have served for a while and can be reached.
    """

    at_s: float
    plane: str
    version: int
    leads: bool
    others: tuple[str, ...]


@attrs.frozen
class Crashed:
    """A process ends by its own fault: that of the version that it started with."""

    at_s: float
    plane: str
    version: int


@attrs.frozen
class Gone:
    """A process was killed, or ended in order."""

    at_s: float
    plane: str


Entry = (
    Left | Arrived | Claim | Listed | Wrote | Recorded | Stood | Acknowledged | Engine | Happened
    | Stored | Edited | InForce | Obeys | Refuses | FileSaved | Serves | Restarts | Crashed | Gone
)  # fmt: skip


# --- its parts


class WatchedStore(FileStore):
    """One control plane's way to the shared database: `cut` makes every unit fail, `lose_reply` those that were committed."""

    world: World
    plane: str
    cut = False
    lose_reply = False

    async def write(self, unit: Any, epoch: int, *args: Any, **kwargs: Any) -> Any:
        self._check_cut()
        if unit.__module__ == settings_rows.__name__:
            unit = self._noted(unit)
        result = await super().write(unit, epoch, *args, **kwargs)
        self.world.record(Wrote(self.world.now_s(), self.plane, epoch, self.met()))
        self._check_cut(lost=self.lose_reply)
        return result

    async def read(self, unit: Any, *args: Any, **kwargs: Any) -> Any:
        self._check_cut()
        return await super().read(unit, *args, **kwargs)

    async def claim_epoch(self, epoch: int, owner: str) -> None:
        self._check_cut()
        await super().claim_epoch(epoch, owner)

    def _noted(self, unit: Callable[..., Any]) -> Callable[..., Any]:
        """Before the transaction ends: what is committed may be read elsewhere before its writer hears of it."""

        def noted(connection: Any, *given: Any, **named: Any) -> Any:
            result = unit(connection, *given, **named)
            self.world.note_versions(settings_rows.read_newest(connection))
            return result

        return noted

    def met(self) -> int:
        return int(next(iter(self._writer.execute("SELECT epoch FROM meta")))[0])

    def _check_cut(self, *, lost: bool = False) -> None:
        if self.cut or lost:
            raise Unavailable("the store does not answer", code="storage_unavailable")


@attrs.define(eq=False)
class Plane:
    """One control plane's process, and what it leaves behind when it is killed: its machine's disk."""

    name: str
    url: str
    machine: SimMachine
    controller: Controller
    store: WatchedStore
    leases: SimLeases
    lock: SimLockClient
    router: SimRouter
    scope: trio.CancelScope = attrs.Factory(trio.CancelScope)


class WatchedInForce(SettingsInForce):
    """Tells the history of what this process acts on."""

    world: World
    plane: str

    def take(self, read: Read) -> tuple[str, ...]:
        waits = super().take(read)
        self.tell()
        return waits

    def take_file(self, file: Loaded) -> tuple[str, ...]:
        waits = super().take_file(file)
        self.tell()
        return waits

    def tell(self) -> None:
        text = self.read.version.document if self.read is not None else ""
        self.world.record(InForce(self.world.now_s(), self.plane, self.live, self.applied, sha256(text), self.file.sha256))


@attrs.frozen
class Bomb:
    """What is wrong with a document, on one machine or ("") on all.

    `load`: it does not load there. A process that starts with it: `start` ends within seconds, `late` after LATE_S, `leading` once
    it leads, `slow` takes longer to begin than a roll-out waits.
    """

    kind: str
    machine: str = ""


class CannotStart(Exception):
    """The process ends before it serves."""


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class Bench:
    """The lease's store, which tells the history of each write."""

    def __init__(self, world: World) -> None:
        self.bucket = Bucket(world.now_s)
        put = self.bucket._put

        def watched(asked: Any) -> tuple[int, str]:
            answer = put(asked)
            if answer[0] == 200:
                world.record(Recorded(world.now_s(), decode(asked.data)))
            return answer

        self.bucket._put = watched  # type: ignore[method-assign]


class _Peers:
    """How one control plane reaches another, past HTTP: the callee's frozen, killed or absent process answers as such."""

    def __init__(self, world: World, plane: str, machine: SimMachine) -> None:
        self._world = world
        self._plane = plane
        self._machine = machine

    async def _reach(self, address: str) -> Controller:
        await self._machine.running()
        await self._world.network.link(self._plane, address).wait_open()
        other = next((plane for plane in self._world.planes.values() if plane.url == address), None)
        if other is None:
            raise Unavailable(f"{address} cannot be reached")
        await other.machine.running()
        return other.controller

    async def present(self, address: str, presence: Presence) -> None:
        await (await self._reach(address)).peers.heard_from(presence)

    async def say_released(self, address: str) -> bool:
        leadership = (await self._reach(address)).leadership
        leadership.look()
        return leadership.is_leader

    async def say_changed(self, address: str) -> None:
        (await self._reach(address)).look_at_store()

    async def give_usage(self, address: str, batch: UsageBatch) -> None:
        await (await self._reach(address)).usage.take(batch)

    async def news(self, address: str, position: Position) -> News:
        raise Unavailable("the store is a file here", code="not_replicated")


@attrs.frozen
class Shape:
    """`one_machine`: the control planes share a clock and the holder's lock, as in file mode; else each has its own clock."""

    planes: int = 2
    nodes: int = 3
    one_machine: bool = False
    protect: Rules = RULES
    follower: bool = True  # a router of its own follows all control planes
    settings: bool = False  # control planes start from their files and the store, and restart when their settings ask for it


def model(name: str, count: int) -> ModelSpec:
    """Each replica fills most of a GPU; there are two profiles to choose from."""
    profiles = tuple(
        Profile(f"p{index}", "command", command=("/opt/engine", f"{index}"), gpus=1, memory_mib=60_000, priority=index) for index in (0, 1)
    )
    return ModelSpec(name, profiles, replicas=ReplicaCounts(0, 6, count))


class World:
    """Start it with `start`; what a schedule does to it are its methods; `history` is what happened."""

    def __init__(self, nursery: trio.Nursery, seed: int, shape: Shape = Shape()) -> None:
        self.nursery = nursery
        self.seed = seed
        self.shape = shape
        self.rng = random.Random(seed)
        self.history: list[Entry] = []
        self.network = SimNetwork(nursery)
        self.network.left = self._left
        self.network.arrived = lambda sender, receiver, message: self.record(Arrived(self.now_s(), sender, receiver, message))
        self.bench = Bench(self)
        self.lock = SimLock()
        self.planes: dict[str, Plane] = {}
        self.machines: dict[str, SimMachine] = {}  # of control planes and routers, kept over restarts
        self.nodes: dict[str, SimNode] = {}
        self.agents: dict[str, trio.CancelScope] = {}
        self.followers: dict[str, tuple[Follower, SimRouter, trio.CancelScope]] = {}
        self.clients: dict[str, SimMachine] = {}  # of agents and routers
        self.wanted: dict[str, int] = {}
        self.unheard_s: dict[str, float] = {}  # when a node was last out of somebody's hearing
        self._served: dict[str, list[trio.CancelScope]] = {}  # sessions by the control plane that holds them
        self.healing = 0  # faults that are still to heal
        self._served_once: set[str] = set()
        self._specs: tuple[ModelSpec, ...] = ()
        self._store: FileStore | None = None
        self.bombs: dict[str, Bomb] = {}  # by the document's hash
        self.versions: list[SettingsVersion] = []  # as they were written
        self.torn: set[str] = set()  # whose file is only half written now
        self.edits = 0
        self.damaged = 0  # the version whose row is not what was written

    def now_s(self) -> float:
        return trio.current_time()

    def record(self, entry: Entry) -> None:
        self.history.append(entry)

    def _left(self, sender: str, receiver: str, message: Message) -> None:
        if isinstance(message, Command) and (plane := self.planes.get(sender.removeprefix("http://"))) is not None:
            self._claim(plane)  # what its sender may do at this very instant
        self.record(Left(self.now_s(), sender, receiver, message))

    def _claim(self, plane: Plane) -> None:
        leads = plane.controller.leadership
        self.record(Claim(self.now_s(), plane.name, leads.role(plane.machine.now_s()), leads.epoch, leads.owner))

    def tell(self, text: str) -> None:
        self.record(Happened(self.now_s(), text))

    # --- beginning

    async def start(self, *specs: ModelSpec) -> None:
        specs = specs or (model("a", 2), model("b", 1))
        self.wanted = {spec.name: spec.replicas.count for spec in specs}
        self._specs = specs
        urls = tuple(f"http://ctl-{index}" for index in range(self.shape.planes))
        for index in range(self.shape.planes):
            if self.shape.settings:
                self._machine(f"ctl-{index}").disk.write(FILE, file_of(f"ctl-{index}"))
                self.record(FileSaved(self.now_s(), f"ctl-{index}", hashlib.sha256(file_of(f"ctl-{index}")).hexdigest()))
            await self.start_plane(f"ctl-{index}")
        for index in range(self.shape.nodes):
            self._add_node(f"n{index}", urls)
        if self.shape.follower:
            await self.start_router("router", urls)
        self.nursery.start_soon(self._look)

    def _machine(self, name: str) -> SimMachine:
        before = self.machines.get(name)
        seed = self.rng.randrange(2**32)
        if self.shape.one_machine and name.startswith("ctl-"):
            machine = SimMachine(seed, booted_s=1000.0)
        elif before is not None:
            machine = SimMachine(seed, booted_s=before.booted_s, rate=before.rate)
        else:
            machine = SimMachine(seed, booted_s=self.rng.uniform(10, 1e6), rate=self.rng.uniform(0.9951, 1.0049))
        if before is not None:
            machine.disk.files = before.disk.files  # a process that starts anew finds its disk as the killed one left it
        self.machines[name] = machine
        return machine

    async def _open_store(self, plane: str) -> WatchedStore:
        async def run(work: Callable[[], Any]) -> Any:
            return await self.machines[plane].run_sync(work)

        if self._store is None:
            self._store = await FileStore.open(MEMORY, run)
        store = WatchedStore.sharing(self._store, self.machines[plane].run_sync)
        store.world, store.plane = self, plane
        return store

    async def start_plane(self, name: str) -> Plane:
        """A new process of this control plane, with a fresh owner id."""
        assert name not in self.planes
        machine = self._machine(name)
        new = self._store is None
        store = await self._open_store(name)
        url = f"http://{name}"
        leases = SimLeases(machine, self.bench.bucket)
        lock = SimLockClient(self.lock)
        owner = owner_id(name, machine.fresh_hex(8))
        boot_id = "boot-1" if self.shape.one_machine else f"boot-{name}"
        me = Candidate(CLUSTER, owner, boot_id, url, one_machine=self.shape.one_machine, store_is_new=new)
        timings = LeaseTimings.of(TTL_S, RENEW_S, POLL_S)
        in_force: SettingsInForce = SettingsInForce(Loaded(SETTINGS, cluster_values=cluster_values_of(SETTINGS)))
        wired: dict[str, Any] = {}
        if self.shape.settings:
            in_force, wired = await self._boot(name, machine, store)
            lease = in_force.settings.lease
            timings = LeaseTimings.of(lease.ttl_s, lease.renew_s, lease.poll_s)
        candidacy = Candidacy(me, leases, FOLDER, timings=timings, known_epoch=store.met(), protect=self.shape.protect)
        if self.shape.one_machine:
            candidacy = attrs.evolve(candidacy, lock=lock)
        controller = Controller(
            machine,
            store,
            in_force,
            Objects(Catalog(self._specs)),
            candidacy=candidacy,
            address=url,
            link=_Peers(self, name, machine),
            **wired,
        )
        controller.rollouts.rules = RULES_OF_ROLLOUT
        plane = self.planes[name] = Plane(name, url, machine, controller, store, leases, lock, SimRouter())
        self._watch_router(f"{name}/router", plane.router)
        controller.live.add_sink(plane.router)
        controller.add_router(plane.router, plane.router, plane.router)
        started = trio.Event()

        async def run() -> None:
            with plane.scope:
                async with trio.open_nursery() as nursery:
                    await nursery.start(controller.run)
                    started.set()

        self.network.machines[url] = machine
        self.network.break_off(url)  # whoever still holds a connection to the process before is told so by the new one's kernel

        async def accept(channel: SimChannel) -> None:
            with trio.CancelScope() as scope:
                self._served.setdefault(name, []).append(scope)
                client = channel.peer
                await (controller.routers.run(channel) if client.startswith("router") else controller.sessions.run(channel))

        async def listen() -> None:
            await started.wait()
            if self.planes.get(name) is plane:
                self.network.accepts[url] = accept

        self.nursery.start_soon(run)
        self.nursery.start_soon(listen)
        if self.shape.settings:
            self.record(Serves(self.now_s(), name, in_force.started_with))
            self.nursery.start_soon(self._go_off, plane)
        return plane

    async def _boot(self, name: str, machine: SimMachine, store: WatchedStore) -> tuple[SettingsInForce, dict[str, Any]]:
        """What `wiring.server` does before it builds the controller, with a trial of documents by what the schedule says of them."""

        def load(data: bytes) -> Loaded:
            return attrs.evolve(load_bytes(data, source=f"{name}:{FILE}", role=Role.SERVER), path=FILE)

        async def dry_load(file: bytes, document: str) -> str:
            await machine.sleep_until(machine.now_s() + DRY_LOAD_S)
            return self.does_not_load(name, file, sha256(document))

        text = machine.disk.read(FILE) or b""
        try:
            if name in self.torn or self.does_not_load(name, text, ""):
                raise CannotStart
            file = load(text)
            begun = await boot(machine, store, FOLDER, file)
        except LlmgwError as err:
            raise CannotStart from err
        in_force = WatchedInForce(file, begun.read, refused=begun.refused, why=begun.why, protect=PROTECT)
        in_force.world, in_force.plane = self, name
        mine = sha256(begun.read.version.document) if begun.read is not None else ""
        if self.does_not_load(name, b"", mine):  # what a trial would have found, a start stumbles over
            self._mark_crash(name, machine, in_force.started_with)
            raise CannotStart
        bomb = self.bombs.get(mine)
        if bomb is not None and bomb.kind == "slow" and bomb.machine in ("", name):
            await machine.sleep_until(machine.now_s() + SLOW_S)
        in_force.tell()
        return in_force, {"load": load, "dry_load": dry_load, "restart": lambda why: self._restart(name, why)}

    def does_not_load(self, name: str, file: bytes, document_sha256: str) -> str:
        """Why, or ""."""
        bomb = self.bombs.get(document_sha256)
        if bomb is not None and bomb.kind == "load" and bomb.machine in ("", name):
            return f"it does not load on {name}"
        return "the file does not load" if DOES_NOT_LOAD in file else ""

    async def _go_off(self, plane: Plane) -> None:
        """Ends a process by its own fault, if it has started with a version that makes it."""
        read = plane.controller.in_force.read
        bomb = self.bombs.get(sha256(read.version.document)) if read is not None else None
        if bomb is None or bomb.machine not in ("", plane.name):
            return
        mine = read

        def bad() -> bool:  # what came since may have mended it
            return self.planes.get(plane.name) is plane and plane.controller.in_force.read == mine

        version = plane.controller.in_force.started_with
        match bomb.kind:
            case "start":
                await trio.sleep(self.rng.uniform(0.3, 3.0))
            case "late":
                await trio.sleep(LATE_S)
            case "leading":
                led_s = 0.0
                while led_s < LEADING_S:
                    await trio.sleep(LOOK_S)
                    if not bad():
                        return
                    led_s = led_s + LOOK_S if plane.controller.leadership.is_leader and not plane.machine.stopped else 0.0
            case _:
                return
        await plane.machine.running()
        if bad():
            self._mark_crash(plane.name, plane.machine, version, plane)
            self.kill_plane(plane.name)
            self.bring_back(plane.name)

    def _mark_crash(self, name: str, machine: SimMachine, version: int, plane: Plane | None = None) -> None:
        """What `wiring.server.Ends` does."""
        self.record(Crashed(self.now_s(), name, version))
        began_s = plane.controller.rollouts.up_s if plane is not None else 0.0
        if began_s <= settings_boot.PROVEN_S:
            marks = settings_boot.load_marks(machine.disk, FOLDER)
            settings_boot.save_marks(machine.disk, FOLDER, marks.failed(version, "it crashed"))

    def bring_back(self, name: str, least_s: float = 0.5, most_s: float = 3.0) -> None:
        """As a supervisor does: another process of this name, and another until one serves."""

        async def start() -> None:
            while name not in self.planes:
                await trio.sleep(self.rng.uniform(least_s, most_s))
                with contextlib.suppress(CannotStart):
                    await self.start_plane(name)
            self.healing -= 1

        self.healing += 1
        self.nursery.start_soon(start)

    def _restart(self, name: str, why: str) -> None:
        """The settings of this process ask for its graceful restart: what `wiring.server` does then, and a supervisor after it."""
        plane = self.planes[name]
        controller = plane.controller
        marks = settings_boot.load_marks(plane.machine.disk, FOLDER)
        leads = controller.leadership.epoch > 0
        others = tuple(
            other.name
            for other in self.planes.values()
            if other is not plane and other.controller.rollouts.up_s > 10.0 and not other.machine.stopped
        )
        self.tell(f"{name} restarts: {why}")
        self.record(Restarts(self.now_s(), name, marks.told, leads, others))

        async def leave() -> None:
            led = controller.leadership.is_leader
            controller.leadership.step_down()
            with trio.move_on_after(30.0):
                await controller.leadership.wait_left()
                if led:
                    await controller.peers.wait_succeeded()
            if self.planes.get(name) is plane:
                self.kill_plane(name)
                self.bring_back(name)
            self.healing -= 1

        self.healing += 1
        self.nursery.start_soon(leave)

    def note_versions(self, newest: SettingsVersion | None) -> None:
        if newest is not None and (not self.versions or newest != self.versions[-1]):
            if self.versions and newest.version == self.versions[-1].version and newest.parent == self.versions[-1].parent:
                return  # a row that a fault has damaged
            self.versions.append(newest)
            self.record(Stored(self.now_s(), newest.version, newest.parent, newest.sha256, marker_of(newest)))

    def _watch_router(self, name: str, router: SimRouter) -> None:
        take = router.set_endpoints

        def watched(endpoints: EndpointList, stamp: ListStamp) -> None:
            take(endpoints, stamp)
            ids = frozenset(str(endpoint.id) for endpoint in endpoints.endpoints)
            self._served_once |= ids
            self.record(Listed(self.now_s(), name, stamp, ids, endpoints.fingerprint))

        router.set_endpoints = watched  # type: ignore[method-assign]
        if not self.shape.settings:
            return
        obey = router.set_policy

        def obeys(policy: Policy) -> None:
            obey(policy)
            self.record(Obeys(self.now_s(), name, policy.route.queue_max))

        router.set_policy = obeys  # type: ignore[method-assign]

    def _add_node(self, name: str, urls: tuple[str, ...]) -> None:
        machine = self.clients[name] = SimMachine(
            self.rng.randrange(2**32), booted_s=self.rng.uniform(10, 1e6), rate=self.rng.uniform(0.9951, 1.0049)
        )
        behaviour = Behaviour(load_s=lambda order: self.rng.uniform(0.5, 3.0))
        node = SimNode(machine, self.nursery, name, self.network.dialler(name, machine), urls, devices=gpus(2, name), behaviour=behaviour)
        self.nodes[name] = node
        start, stop = node.replicas.start, node.replicas.stop

        async def started(order: Any) -> None:
            await start(order)
            self.record(Engine(self.now_s(), "started", name, order.id))

        def stopped(replica: Any, why: str, grace_s: float) -> None:
            stop(replica, why, grace_s)
            self.record(Engine(self.now_s(), "stopped", name, replica))

        node.replicas.start = started  # type: ignore[method-assign]
        node.replicas.stop = stopped  # type: ignore[method-assign]
        self.start_agent(name)

    def start_agent(self, name: str) -> None:
        scope = self.agents[name] = trio.CancelScope()

        async def agent() -> None:
            with scope:
                await self.nodes[name].run()

        self.nursery.start_soon(agent)

    async def start_router(self, name: str, urls: tuple[str, ...] = ()) -> None:
        machine = self._machine(name)
        self.clients[name] = machine
        router = SimRouter()
        self._watch_router(name, router)
        follower = Follower(
            machine,
            router,
            self.network.dialler(name, machine),
            folder=Path("/router"),
            control_planes=urls or tuple(f"http://ctl-{index}" for index in range(self.shape.planes)),
        )
        await follower.load()
        scope = trio.CancelScope()
        self.followers[name] = (follower, router, scope)

        async def run() -> None:
            with scope:
                await follower.run()

        self.nursery.start_soon(run)

    # --- faults

    def kill_plane(self, name: str, *, machine_too: bool = False) -> None:
        """SIGKILL: first nothing leaves it any more, then its tasks end. `machine_too`: nobody closes its connections either."""
        plane = self.planes.pop(name)
        self.record(Gone(self.now_s(), name))
        self.tell(f"kill {name}{' and its machine' if machine_too else ''}")
        plane.machine.kill()
        self.network.accepts.pop(plane.url, None)
        plane.scope.cancel()
        for scope in self._served.pop(name, []):
            scope.cancel()
        if not machine_too:
            plane.lock.die()
            self.network.break_off(plane.url)

    def kill_agent(self, name: str) -> None:
        self.tell(f"kill agent {name}")
        self.unheard_s[name] = self.now_s()
        self.agents[name].cancel()
        self.network.break_off(name)

    def restart_agent(self, name: str) -> None:
        self.tell(f"start agent {name}")
        self.unheard_s[name] = self.now_s()
        self.start_agent(name)

    def kill_router(self, name: str) -> None:
        self.tell(f"kill {name}")
        _, _, scope = self.followers.pop(name)
        self.machines[name].kill()
        scope.cancel()
        self.network.break_off(name)

    def freeze(self, name: str) -> None:
        self.tell(f"freeze {name}")
        self.planes[name].machine.freeze()

    def thaw(self, name: str) -> None:
        self.tell(f"thaw {name}")
        if name in self.planes:
            self.planes[name].machine.thaw()

    def cut_store(self, name: str, cut: bool, *, lease: bool = True, data: bool = True) -> None:
        """What `name` asks of the lease's store, of the data's, or of both is not answered."""
        self.tell(f"{'cut' if cut else 'heal'} the store for {name}")
        if (plane := self.planes.get(name)) is not None:
            plane.leases.cut = cut and lease
            plane.store.cut = cut and data

    def hurt_next_lease_request(self, name: str, fault: Fault) -> None:
        """Once, at its next write of the record."""
        self.tell(f"the next lease write of {name}: {fault}")
        if (plane := self.planes.get(name)) is None:
            return
        leases = plane.leases

        def script(request: Request) -> Fault:
            if request.method != "put":
                return FINE
            leases.script = lambda later: FINE
            return fault

        leases.script = script

    def cut(self, client: str, plane: str, cut: bool) -> None:
        """Between an agent (or a router, or another control plane) and a control plane nothing arrives."""
        self.tell(f"{'cut' if cut else 'heal'} {client} and {plane}")
        link = self.network.link(client, f"http://{plane}")
        if cut:
            link.hold()
            self.unheard_s[client] = self.now_s()
        else:
            link.open()

    def lose_deltas(self, plane: str, count: int) -> None:
        """The next so many changes of a list do not reach the router of its own; what comes after them does."""
        self.tell(f"lose {count} deltas of {plane}" if count else f"{plane} loses no more deltas")
        left = [count]

        def loses(message: Message) -> bool:
            if not left[0] or not isinstance(message, PushDelta):
                return False
            left[0] -= 1
            return True

        self.network.link("router", f"http://{plane}").loses = loses

    def crash_engine(self) -> None:
        ready = [
            (name, report.order.id)
            for name, node in sorted(self.nodes.items())
            for report in node.replicas.reports()
            if report.state is ReplicaState.READY
        ]
        if ready:
            name, replica = self.rng.choice(ready)
            self.tell(f"crash {replica} on {name}")
            self.record(Engine(self.now_s(), "crashed", name, replica))
            self.nodes[name].replicas.crash(replica)

    # --- what operators do

    def leader(self) -> Plane | None:
        for plane in self.planes.values():
            if plane.controller.leadership.confirmed(plane.machine.now_s()) and not plane.machine.stopped:
                return plane
        return None

    async def order(self, what: str, give: Callable[[Controller], Awaitable[None]]) -> bool:
        """An order to the leader, if anybody is; True when it was acknowledged."""
        plane = self.leader()
        if plane is None:
            return False
        self.tell(f"{plane.name}: {what}")
        done = False
        with trio.move_on_after(10.0):
            try:
                await give(plane.controller)
                done = True
            except LlmgwError as err:
                self.tell(f"{plane.name} answers {type(err).__name__}: {err.message}")
        return done

    async def scale(self, name: str, count: int) -> None:
        plane = self.leader()
        self.wanted[name] = max(self.wanted[name], count)  # until it is known, either may run
        done = await self.order(f"scale {name} to {count}", lambda controller: _ignore(controller.models.scale(name, count)))
        if done and plane is not None:
            self.wanted[name] = count
            self.record(Acknowledged(self.now_s(), plane.name, name, count))

    async def edit(self, *, live: bool = True, restart: bool = False, bomb: Bomb | None = None) -> bool:
        """Somebody edits the newest version; one that takes a restart is another poll of the lease."""
        self.edits += 1
        given: dict[str, Any] = {"route.queue_max": 1000 + self.edits} if live else {}
        if restart:
            given["lease.poll_s"] = POLL_S + self.edits / 1000

        async def give(controller: Controller) -> None:
            owner = controller.cluster_settings
            version, document = await owner.newest()
            edited = with_keys(document, given)
            if bomb is not None:
                self.plant(edited.sha256, bomb)
            written, _ = await owner.write(edited, version.version, "", None, OPERATOR)
            self.record(Edited(self.now_s(), version.version, written.version))

        return await self.order(f"edit {given}{f', which is bad: {bomb}' if bomb is not None else ''}", give)

    def plant(self, document_sha256: str, bomb: Bomb) -> None:
        self.bombs[document_sha256] = bomb
        if bomb.kind == "load":
            for name in self.machines:
                if bomb.machine in ("", name):
                    self.record(Refuses(self.now_s(), name, document_sha256))

    async def roll_back(self, number: int) -> bool:
        async def give(controller: Controller) -> None:
            owner = controller.cluster_settings
            newest, _ = await owner.newest()
            _, document = await owner.version(number)
            await owner.write(document, newest.version, f"back to {number}", None, OPERATOR)

        return await self.order(f"roll back to {number}", give)

    def damage_newest(self, damaged: bool) -> None:
        """The row of the newest version says something else from here on, or again what was written."""
        self.damaged = self.versions[-1].version if damaged else self.damaged
        whole = self.versions[self.damaged - 1]
        text = whole.document + "# not written by anybody\n" if damaged else whole.document
        self.tell(f"version {self.damaged} is {'damaged' if damaged else 'whole again'}")
        assert self._store is not None
        writer = self._store._writer
        guards = list(writer.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger' AND tbl_name = 'cluster_settings'"))
        for trigger, _ in guards:  # no statement may change a version; a bad disk may
            writer.execute(f"DROP TRIGGER {trigger}")
        writer.execute("UPDATE cluster_settings SET document = ? WHERE version = ?", (text, whole.version))
        for _, statement in guards:
            writer.execute(statement)
        if not damaged:
            self.damaged = 0

    def save_file(self, name: str, data: bytes, torn_s: float = 0.0) -> None:
        """The machine's file is written; `torn_s`: only its first half at first."""
        disk = self.machines[name].disk
        self.tell(f"the file of {name} is written")
        self.record(FileSaved(self.now_s(), name, hashlib.sha256(data).hexdigest()))
        if not torn_s:
            disk.files[FILE] = data
            return
        lines = data.splitlines(keepends=True)
        disk.files[FILE] = b"".join(lines[: len(lines) // 2])
        self.torn.add(name)

        async def rest() -> None:
            await trio.sleep(torn_s)
            disk.files[FILE] = data
            self.torn.discard(name)
            self.healing -= 1

        self.healing += 1
        self.nursery.start_soon(rest)

    # --- looking

    def applied_everywhere(self) -> str:
        """What is not as the newest version says, or ""."""
        newest = self.versions[-1]
        if len(self.planes) < self.shape.planes:
            return "a control plane is down"
        for name, plane in self.planes.items():
            in_force = plane.controller.in_force
            if in_force.applied != newest.version or in_force.pending or in_force.restart_for_file:
                return f"{name} says {in_force.said(0.0)}, the newest version is {newest.version}"
            if in_force.file.sha256 != hashlib.sha256(plane.machine.disk.read(FILE) or b"").hexdigest():
                return f"{name} does not go by its file"
        routers = [plane.router for plane in self.planes.values()] + [router for _, router, _ in self.followers.values()]
        if any(router.policy is None or router.policy.route.queue_max != marker_of(newest) for router in routers):
            return "a router obeys another policy"
        return ""

    async def wait_applied(self, limit_s: float) -> None:
        """An assertion when it takes longer."""
        with trio.move_on_after(limit_s):
            while self.applied_everywhere():
                await trio.sleep(LOOK_S)
            return
        leader = self.leader()
        row = leader.controller.rollouts.describe() if leader is not None else "nobody leads"
        raise AssertionError(f"not within {limit_s:g} s: {self.applied_everywhere()}; the roll-out: {row}")

    async def _look(self) -> None:
        while True:
            self.look()
            await trio.sleep(LOOK_S)

    def look(self) -> None:
        now_s = self.now_s()
        for plane in self.planes.values():
            self._claim(plane)
        live = dict.fromkeys(self.wanted, 0)
        over = ""
        leader = self.leader()
        if leader is None:
            self.unheard_s["a confirmed leader"] = now_s  # what runs twice is stopped by nobody else
        hidden = any(now_s - at_s < 30.0 for at_s in self.unheard_s.values()) or any(link.holds for link in self.network._links.values())
        listed = frozenset(leader.router.ids()) if leader is not None else frozenset()
        for name, node in self.nodes.items():
            for report in node.replicas.reports():
                # What was withdrawn is on its way out, and counts no more.
                withdrawn = report.state is ReplicaState.READY and report.order.id in self._served_once and report.order.id not in listed
                if report.state in LIVE and not withdrawn:
                    live[report.order.model] += 1
            for device in node.replicas.devices():
                if device.used_mib > device.total_mib:
                    over = f"{name}/{device.id}: {device.used_mib} of {device.total_mib} MiB"
        self.record(Stood(now_s, live, dict(self.wanted), hidden, over))

    def describe(self) -> str:
        lines = []
        for name, plane in self.planes.items():
            leads = plane.controller.leadership
            lines.append(f"{name}: {leads.role(plane.machine.now_s()).value} epoch {leads.epoch}, list {plane.router.ids()}")
        for name, node in self.nodes.items():
            lines.append(f"{name}: " + ", ".join(f"{r.order.id} {r.state.value}" for r in node.replicas.reports()))
        for name, (_, router, _) in self.followers.items():
            lines.append(f"{name}: list {router.ids()} under {router.highest}")
        leader = self.leader()
        if leader is not None:
            lines.append(f"plan {leader.controller.reconciler.plan}")
        return "\n".join(lines)

    def settled(self) -> bool:
        """One leads, what is asked for runs and nothing else, and every router knows it."""
        leader = self.leader()
        if leader is None or len(self.planes) < self.shape.planes:
            return False
        ready = {}
        for node in self.nodes.values():
            for report in node.replicas.reports():
                if report.state in LIVE or report.state is ReplicaState.DRAINING:
                    ready.setdefault(report.order.model, []).append((report.order.id, report.state))
        counts = {spec.name: spec.replicas.count for spec in leader.controller.live.current.models}
        for name, count in counts.items():
            mine = ready.get(name, [])
            if len(mine) != count or any(state is not ReplicaState.READY for _, state in mine):
                return False
        ids = tuple(sorted(replica for mine in ready.values() for replica, _ in mine))
        routers = [plane.router for plane in self.planes.values()] + [router for _, router, _ in self.followers.values()]
        return all(router.ids() == ids for router in routers)

    async def wait_settled(self, limit_s: float, why: str = "") -> None:
        """An assertion when it does not settle."""
        with trio.move_on_after(limit_s):
            while not self.settled():
                await trio.sleep(LOOK_S)
            return
        raise AssertionError(f"it did not settle within {limit_s:g} s{why}\n{self.describe()}")


OPERATOR = Origin("somebody")
CLUSTER_VALUES = cluster_values_of(attrs.evolve(SETTINGS, rollout=RolloutSettings(TIMEOUT_S, DELAY_S)))


def file_of(name: str, level: str = "info", tail: str = "") -> bytes:
    """A machine's own file: its log level takes a restart, `tail` is more of it."""
    own = f'[server]\nname = "{name}"\n[log]\nformat = "json"\nlevel = "{level}"\n'
    return (own + document_of(CLUSTER_VALUES, "the world").text + tail).encode()


def marker_of(version: SettingsVersion) -> int:
    found = [line for line in version.document.splitlines() if line.startswith("queue_max = ")]
    return int(found[0].partition("= ")[2]) if found else RouteSettings().queue_max


async def _ignore(awaited: Awaitable[object]) -> None:
    await awaited


def run_world(main: Callable[[World], Awaitable[None]], seed: int = 1, shape: Shape = Shape()) -> World:
    """One simulated run on a mock clock, with trio's batch order from the seed; returns the world with its history."""
    worlds: list[World] = []

    async def body() -> None:
        async with trio.open_nursery() as nursery:
            world = World(nursery, seed, shape)
            worlds.append(world)
            await main(world)
            nursery.cancel_scope.cancel()

    # Trio's private switch: without it tasks that an event wakes run in the order of their addresses in memory.
    run = trio._core._run
    before = run._ALLOW_DETERMINISTIC_SCHEDULING
    run._ALLOW_DETERMINISTIC_SCHEDULING = True
    run._r = random.Random(seed)
    try:
        trio.run(body, clock=trio.testing.MockClock(autojump_threshold=0))
    finally:
        run._ALLOW_DETERMINISTIC_SCHEDULING = before
    return worlds[0]


@contextmanager
def quiet_logs() -> Iterator[None]:
    """Very many schedules would write very many lines."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)
