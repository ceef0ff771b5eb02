"""Random schedules for the world: what happens to it is drawn from the seed, then everything heals and it must settle.

A kind is a set of faults; `run_schedule(seed, kind)` is one run, and says what was broken.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import attrs
import trio

from llmgw.control.controller import Controller
from llmgw.domain.holds import Hold
from llmgw.lease.rules import RULES, Rules
from llmgw.sim.lease_store import Fault
from tests.property.invariants import broken
from tests.property.world import TTL_S, Engine, Recorded, Shape, World, run_world

QUIET_S: Final = 180.0  # for everything to heal and settle: the grace, a drain, and the agents' longest pause between dials
STEADY_S: Final = 8.0  # it stays so, over a renewal and several heartbeats
FAULTS: Final = 8  # of one schedule
PAUSE_S: Final = 12.0  # the longest between two of them
MODELS: Final = ("a", "b")
Do = Callable[[World], Awaitable[None]]


@attrs.frozen
class Kind:
    """`engines_untouched`: none of its faults is a reason for any engine to start or stop."""

    name: str
    faults: tuple[Do, ...]
    engines_untouched: bool = False
    pause_s: float = PAUSE_S


async def freeze(world: World) -> None:
    """Past its lease or not; more than one may stand still at a time."""
    name = _plane(world)
    if name is not None:
        world.freeze(name)
        _later(world, world.rng.uniform(0.05, 3 * TTL_S), lambda: world.thaw(name))


async def kill(world: World) -> None:
    name = _plane(world)
    if name is not None:
        world.kill_plane(name, machine_too=world.rng.random() < 0.3)
        _start_later(world, name)


async def hand_over(world: World) -> None:
    async def give(controller: Controller) -> None:
        controller.leadership.hand_over()

    await world.order("hand over", give)


async def step_down_and_restart(world: World) -> None:
    """As systemd restarts a control plane: it leaves in order, and another process comes."""
    name = _plane(world)
    if name is None:
        return
    plane = world.planes[name]
    world.tell(f"stop {name}")
    plane.controller.leadership.step_down()
    with trio.move_on_after(10.0):
        await plane.controller.leadership.wait_left()
    if world.planes.get(name) is plane:
        world.kill_plane(name)
        _start_later(world, name)


async def blip_all(world: World) -> None:
    """The store is gone for everybody alike."""
    names = list(world.planes)
    for name in names:
        world.cut_store(name, True)
    _later(world, world.rng.uniform(0.5, 60.0), lambda: [world.cut_store(name, False) for name in names])


async def blip_one(world: World) -> None:
    name = _plane(world)
    if name is not None:
        world.cut_store(name, True, data=world.rng.random() < 0.7)
        _later(world, world.rng.uniform(0.5, 40.0), lambda: world.cut_store(name, False))


async def hurt_lease(world: World) -> None:
    """A lost reply, a write that is applied late, a conflict, a refusal, a slow store."""
    name = _plane(world)
    if name is not None:
        draw = world.rng.uniform
        fault = world.rng.choice(
            [
                Fault(lose_reply=True),
                Fault(late_s=draw(0.1, 20.0)),
                Fault(status=409),
                Fault(status=503),
                Fault(status=403),
                Fault(before_s=draw(0.1, 4.0)),
                Fault(after_s=draw(0.1, 4.0)),
            ]
        )
        world.hurt_next_lease_request(name, fault)


async def lose_reply_of_data(world: World) -> None:
    """Units are committed and nobody hears of it."""
    name = _plane(world)
    if name is not None:
        world.tell(f"replies of the data's store are lost for {name}")
        store = world.planes[name].store
        store.lose_reply = True

        def heal() -> None:
            store.lose_reply = False

        _later(world, world.rng.uniform(0.5, 5.0), heal)


async def cut_agent(world: World) -> None:
    """An agent hears one control plane and not the other."""
    node, plane = world.rng.choice(sorted(world.nodes)), f"ctl-{world.rng.randrange(world.shape.planes)}"
    world.cut(node, plane, True)
    _later(world, world.rng.uniform(0.5, 20.0), lambda: world.cut(node, plane, False))


async def cut_all_agents(world: World) -> None:
    """The leader sees the store and not the agents."""
    name = _plane(world)
    if name is not None:
        for node in sorted(world.nodes):
            world.cut(node, name, True)
        _later(world, world.rng.uniform(0.5, 20.0), lambda: [world.cut(node, name, False) for node in sorted(world.nodes)])


async def cut_peers(world: World) -> None:
    names = sorted(world.planes)
    if len(names) > 1:
        one, other = world.rng.sample(names, 2)
        world.cut(one, other, True)
        _later(world, world.rng.uniform(0.5, 20.0), lambda: world.cut(one, other, False))


async def cut_router(world: World) -> None:
    """The router of its own hears nothing from one control plane, which hears nothing from it."""
    name = _plane(world)
    if name is not None:
        world.cut("router", name, True)
        _later(world, world.rng.uniform(0.5, 20.0), lambda: world.cut("router", name, False))


async def blip_lease(world: World) -> None:
    """The lease's store is gone for everybody, the data's is there."""
    names = list(world.planes)
    for name in names:
        world.cut_store(name, True, data=False)
    _later(world, world.rng.uniform(5.0, 30.0), lambda: [world.cut_store(name, False) for name in names])


async def restart_agent(world: World, gone_s_max: float = 10.0) -> None:
    """For so long that its node may count as lost."""
    name = world.rng.choice(sorted(world.nodes))
    if not world.agents[name].cancel_called:
        world.kill_agent(name)
        _later(world, world.rng.uniform(0.1, gone_s_max), lambda: world.restart_agent(name))


async def restart_agent_quickly(world: World) -> None:
    await restart_agent(world, 2.0)


async def restart_router(world: World) -> None:
    if "router" in world.followers:
        world.kill_router("router")
        await trio.sleep(world.rng.uniform(0.1, 5.0))
        await world.start_router("router")


async def crash_engine(world: World) -> None:
    world.crash_engine()


async def scale(world: World) -> None:
    await world.scale(world.rng.choice(MODELS), world.rng.randrange(4))


async def choose(world: World) -> None:
    name, profile = world.rng.choice(MODELS), world.rng.choice(["p0", "p1"])

    async def give(controller: Controller) -> None:
        await controller.models.choose_engine(name, profile)

    await world.order(f"{name} runs {profile}", give)


async def hold(world: World) -> None:
    """A facility hold comes or goes; the nodes here have no facility, so it concerns none of them."""

    async def give(controller: Controller) -> None:
        if "room" in controller.holds.all:
            await controller.holds.remove("room")
        else:
            await controller.holds.add(Hold("room", "works"))

    await world.order("hold or open a room", give)


async def step_wall_clock(world: World) -> None:
    name = _plane(world)
    if name is not None:
        world.tell(f"the wall clock of {name} is stepped")
        world.planes[name].machine.wall_offset_s += world.rng.uniform(-1e5, 1e5)


_LEASE: Final = (freeze, freeze, kill, kill, hand_over, step_down_and_restart, blip_all, blip_one, hurt_lease, hurt_lease, step_wall_clock)
STORM: Final = Kind(
    "storm",
    (
        *_LEASE, cut_agent, cut_all_agents, cut_peers, cut_router, blip_lease, restart_agent, restart_router, crash_engine, scale, scale,
        choose, hold, lose_reply_of_data,
    ),
)  # fmt: skip
CONTROL: Final = Kind("control", (*_LEASE, cut_peers, restart_agent_quickly, restart_router, hold), engines_untouched=True)
# Orders come fast, and what has to reach agents and routers for them is cut in the middle.
BUSY: Final = Kind("busy", (choose, choose, scale, scale, cut_router, cut_router, cut_all_agents, blip_lease, hand_over), pause_s=4.0)
KINDS: Final = {kind.name: kind for kind in (STORM, CONTROL, BUSY)}


@attrs.frozen
class Outcome:
    """What was broken, by invariant; how many terms there were; the world as it ended."""

    wrong: dict[str, list[str]]
    terms: int
    world: World


def run_schedule(seed: int, kind: Kind = STORM, protect: Rules = RULES) -> Outcome:
    """One schedule. The shape is drawn from the seed too: how many control planes, on one machine or on several."""
    shape = Shape(planes=3 if seed % 5 == 0 else 2, one_machine=seed % 2 == 1, protect=protect)
    unsettled: list[str] = []

    async def main(world: World) -> None:
        await world.start()
        if world.rng.random() < 0.8:
            await world.wait_settled(60.0)
        for _ in range(FAULTS):
            await trio.sleep(world.rng.uniform(0.0, kind.pause_s))
            await world.rng.choice(kind.faults)(world)
        while world.healing:  # every fault heals by itself, within a minute
            await trio.sleep(1.0)
        try:
            await world.wait_settled(QUIET_S)
            await trio.sleep(STEADY_S)
            await world.wait_settled(STEADY_S, f" again after {STEADY_S:g} s without a fault")
        except AssertionError as err:
            unsettled.append(str(err))

    world = run_world(main, seed, shape)
    wrong = broken(world.history)
    if unsettled:
        wrong["NothingLeftToPlan"] = unsettled
    if kind.engines_untouched:
        engines = [entry for entry in world.history if isinstance(entry, Engine)]
        first = sum(spec.replicas.count for spec in world._specs)
        if len(engines) != first:
            text = f"{len(engines)} starts and stops where {first} starts were due"
            wrong["AdoptionIdempotent"] = [text, *map(str, engines[first : first + 3])]
    terms = len({entry.record.tenure for entry in world.history if isinstance(entry, Recorded)})
    return Outcome(wrong, terms, world)


def replay_line(seed: int, kind: Kind) -> str:
    """Runs this one schedule again, and prints its history."""
    return f"python -m tests.property.replay {kind.name} {seed}"


def _plane(world: World) -> str | None:
    """The leader more often than not: what happens to a standby is less telling."""
    leader = world.leader()
    if leader is not None and world.rng.random() < 0.6:
        return leader.name
    names = sorted(name for name, plane in world.planes.items() if not plane.machine.stopped)
    return world.rng.choice(names) if names else None


def _later(world: World, after_s: float, act: Callable[[], object]) -> None:
    """What heals a fault. Counted from here on, so that nobody takes the world for healed before it is."""

    async def heal() -> None:
        await trio.sleep(after_s)
        act()
        world.healing -= 1

    world.healing += 1
    world.nursery.start_soon(heal)


def _start_later(world: World, name: str) -> None:
    async def start() -> None:
        await trio.sleep(world.rng.uniform(0.1, 15.0))
        if name not in world.planes:
            await world.start_plane(name)
        world.healing -= 1

    world.healing += 1
    world.nursery.start_soon(start)
