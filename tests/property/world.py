"""The world: two or three control planes, agents and routers as they really run, on simulated machines under faults by seed.

It starts the very functions that `wiring` starts (`Controller.run`, the agents' `Sessions.run`, `Follower.run`) over simulated
ports, and holds no rule of lease, plan or fence. Everything that happens goes into a history; `invariants` judges it.
A seed gives one history: trio's batch order, ids, jitter and faults are all drawn from it.
"""

from __future__ import annotations

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

from llmgw.control.controller import Controller, Objects
from llmgw.control.leadership import Candidacy
from llmgw.control.peers import Presence
from llmgw.domain.endpoint import EndpointList, ListStamp
from llmgw.domain.errors import LlmgwError, Unavailable
from llmgw.domain.ids import ClusterId, owner_id
from llmgw.domain.lease import LeaseRole
from llmgw.domain.model import Catalog, ModelSpec, Profile, ReplicaCounts
from llmgw.domain.replica import ReplicaState
from llmgw.lease.record import LeaseRecord, decode
from llmgw.lease.rules import RULES, Candidate, Rules
from llmgw.lease.timings import LeaseTimings
from llmgw.protocol.messages import Command, Message
from llmgw.router.follow import Follower
from llmgw.settings.schema import LeaseSettings, PublishSettings, ReconcileSettings, RouteSettings, Settings
from llmgw.sim.channel import SimChannel, SimNetwork
from llmgw.sim.lease_store import FINE, Bucket, Fault, Request, SimLeases, SimLock, SimLockClient
from llmgw.sim.machine import SimMachine
from llmgw.sim.node import SimNode, gpus
from llmgw.sim.replicas import Behaviour
from llmgw.sim.router import SimRouter
from llmgw.store.connection import MEMORY, Store

CLUSTER = ClusterId("c1")
LOOK_S = 0.5  # between two looks at every claim and every node
TTL_S, RENEW_S, POLL_S = 6.0, 2.0, 0.5  # short, so that a schedule of minutes holds many terms
SETTINGS = Settings(
    lease=LeaseSettings(ttl_s=TTL_S, renew_s=RENEW_S, poll_s=POLL_S),
    reconcile=ReconcileSettings(tick_s=2.0, heartbeat_s=2.0, node_lost_after_s=6.0, grace_s=12.0),
    publish=PublishSettings(interval_s=2.0),
    route=RouteSettings(drain_s=5.0),
)
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
    """A router took a list."""

    at_s: float
    router: str
    stamp: ListStamp
    ids: frozenset[str]


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


Entry = Left | Arrived | Claim | Listed | Wrote | Recorded | Stood | Acknowledged | Engine | Happened


# --- its parts


class WatchedStore(Store):
    """One control plane's way to the shared database: `cut` makes every unit fail, `lose_reply` those that were committed."""

    world: World
    plane: str
    cut = False
    lose_reply = False

    async def write(self, unit: Any, epoch: int, *args: Any, **kwargs: Any) -> Any:
        self._check_cut()
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


@attrs.frozen
class Shape:
    """`one_machine`: the control planes share a clock and the holder's lock, as in file mode; else each has its own clock."""

    planes: int = 2
    nodes: int = 3
    one_machine: bool = False
    protect: Rules = RULES
    follower: bool = True  # a router of its own follows all control planes


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
        self._store: Store | None = None

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
            self._store = await Store.open(MEMORY, run)
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
        candidacy = Candidacy(me, leases, Path("/data"), timings=timings, known_epoch=store.met(), protect=self.shape.protect)
        if self.shape.one_machine:
            candidacy = attrs.evolve(candidacy, lock=lock)
        controller = Controller(
            machine,
            store,
            SETTINGS,
            Objects(Catalog(self._specs)),
            candidacy=candidacy,
            address=url,
            link=_Peers(self, name, machine),
        )
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
        return plane

    def _watch_router(self, name: str, router: SimRouter) -> None:
        take = router.set_endpoints

        def watched(endpoints: EndpointList, stamp: ListStamp) -> None:
            take(endpoints, stamp)
            ids = frozenset(str(endpoint.id) for endpoint in endpoints.endpoints)
            self._served_once |= ids
            self.record(Listed(self.now_s(), name, stamp, ids))

        router.set_endpoints = watched  # type: ignore[method-assign]

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

    # --- looking

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
