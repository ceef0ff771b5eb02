"""One control plane, its nodes and a router, simulated: the real control tasks and the agents' real sessions."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import attrs
import trio
import trio.testing

from llmgw.control.controller import Controller, Objects
from llmgw.control.leadership import Candidacy
from llmgw.control.settings_in_force import SettingsInForce
from llmgw.domain.ids import ClusterId, OwnerId
from llmgw.domain.model import ENGINES, Catalog, ModelSpec, Profile, ReplicaCounts
from llmgw.domain.node import Device
from llmgw.domain.replica import ReplicaState
from llmgw.settings.document import cluster_values_of
from llmgw.settings.load import Loaded
from llmgw.settings.schema import Settings
from llmgw.sim.channel import SimChannel, SimNetwork
from llmgw.sim.machine import SimMachine
from llmgw.sim.node import SimNode
from llmgw.sim.replicas import Behaviour
from llmgw.sim.router import SimRouter
from llmgw.store import events
from llmgw.store.connection import FileStore, Store

URL = "http://ctl"
WAIT_LIMIT_S = 600.0


def model(name: str, count: int = 1, **profile: object) -> ModelSpec:
    """A CPU model of one profile."""
    values = {"name": "p0", "engine": "command", "command": ("/opt/engine",), "gpus": 0, "memory_mib": 1000, **profile}
    return ModelSpec(name, (Profile(**values),), replicas=ReplicaCounts(0, 10, count))


@attrs.define(eq=False)
class ControlPlane:
    machine: SimMachine
    store: Store
    controller: Controller
    scope: trio.CancelScope = attrs.Factory(trio.CancelScope)


class World:
    """`control` is the control plane that runs now; `restart_control` ends it as SIGKILL would and starts another.

    `embedded` False: `router` is not wired to the control plane; whoever made the world feeds it otherwise.
    """

    def __init__(
        self, nursery: trio.Nursery, seed: int = 1, *, settings: Settings | None = None, file: str = "", embedded: bool = True
    ) -> None:
        self.embedded = embedded
        self.nursery = nursery
        self.seed = seed
        self.settings = settings or Settings()
        self.file = file
        self.machine = SimMachine(seed)
        self.router = SimRouter()
        self.nodes: dict[str, SimNode] = {}
        self.agents: dict[str, trio.CancelScope] = {}
        self.control: ControlPlane | None = None
        self.store: Store | None = None
        self.starts = 0
        self.network = SimNetwork(nursery)
        self.network.accepts[URL] = self._accept

    async def start_control(self, *specs: ModelSpec) -> Controller:
        if self.store is None:
            self.store = await FileStore.open(":memory:", self.machine.run_sync)
        self.starts += 1
        controller = Controller(
            self.machine,
            self.store,
            SettingsInForce(Loaded(self.settings, cluster_values=cluster_values_of(self.settings))),
            Objects(Catalog(specs)),
            candidacy=Candidacy.sole(ClusterId("c1"), OwnerId(f"ctl-{self.starts}"), Path("/data")),
            file=self.file,
        )
        self.control = ControlPlane(self.machine, self.store, controller)
        started = trio.Event()
        self.nursery.start_soon(self._run_control, self.control, started)
        await started.wait()
        if self.embedded:
            controller.live.add_sink(self.router)
            controller.add_router(self.router, self.router, self.router, serves_already=self.starts > 1)
        return controller

    async def _run_control(self, control: ControlPlane, started: trio.Event) -> None:
        with control.scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(control.controller.run)
                started.set()

    async def restart_control(self) -> Controller:
        assert self.control is not None
        control, self.control = self.control, None
        for session in list(control.controller.sessions._sessions.values()):
            await session.channel.close()
        control.scope.cancel()
        return await self.start_control()

    async def add_node(
        self,
        name: str,
        *,
        devices: tuple[Device, ...] | None = None,
        behaviour: Behaviour | None = None,
        facility: str = "",
        engines: tuple[str, ...] = ENGINES,
        seed: int | None = None,
    ) -> SimNode:
        machine = SimMachine(seed or self.seed * 1000 + len(self.nodes), booted_s=50.0 * len(self.nodes))
        node = SimNode(
            machine, self.nursery, name, self.network.dial, (URL,), devices=devices, behaviour=behaviour, facility=facility, engines=engines
        )
        self.nodes[name] = node
        self.start_agent(name)
        return node

    async def _accept(self, channel: SimChannel) -> None:
        if self.control is None:
            await channel.close()
            return
        await self.control.controller.sessions.run(channel)

    def start_agent(self, name: str) -> None:
        scope = trio.CancelScope()
        self.agents[name] = scope

        async def agent() -> None:
            with scope:
                await self.nodes[name].run()

        self.nursery.start_soon(agent)

    def kill_agent(self, name: str) -> None:
        self.agents[name].cancel()

    async def wait(self, condition: Callable[[], bool], what: str = "") -> None:
        """Until it holds; an assertion after ten simulated minutes."""
        with trio.move_on_after(WAIT_LIMIT_S):
            while not condition():
                await trio.sleep(0.05)
            return
        raise AssertionError(f"never came true: {what or condition}; {self.describe()}")

    def describe(self) -> str:
        assert self.control is not None
        controller = self.control.controller
        replicas = [(r.id, r.state.value, r.report.reason) for r in controller.replicas()]
        return f"replicas {replicas}; router {self.router.ids()}; plan {controller.reconciler.plan}"

    def ready(self, name: str) -> list[str]:
        assert self.control is not None
        return [r.id for r in self.control.controller.replicas() if r.model == name and r.state is ReplicaState.READY]

    def served(self, name: str) -> list[str]:
        return [endpoint.id for endpoint in self.router.endpoints.endpoints if name in endpoint.models]

    async def store_events(self):
        """Every stored event."""
        assert self.store is not None
        await trio.sleep(0.1)
        return await events.after(self.store, 0, 1000)

    @property
    def process_starts(self) -> int:
        return sum(node.replicas.started for node in self.nodes.values())

    @property
    def process_ends(self) -> int:
        return sum(node.replicas.stopped for node in self.nodes.values())


def run_world(main: Callable[[World], Awaitable[None]], seed: int = 1, **options: object) -> None:
    """One simulated run: mock clock, and trio's batch order from the seed."""

    async def body() -> None:
        async with trio.open_nursery() as nursery:
            world = World(nursery, seed, **options)
            await main(world)
            nursery.cancel_scope.cancel()

    trio._core._run._r = random.Random(seed)
    trio.run(body, clock=trio.testing.MockClock(autojump_threshold=0))
