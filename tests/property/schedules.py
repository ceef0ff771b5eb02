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
from tests.property.world import (
    DOES_NOT_LOAD,
    OPERATOR,
    TTL_S,
    Bomb,
    Engine,
    Recorded,
    Shape,
    World,
    file_of,
    model,
    run_world,
)

QUIET_S: Final = 180.0  # for everything to heal and settle: the grace, a drain, and the agents' longest pause between dials
APPLIED_S: Final = 150.0  # until everybody runs the newest version: three control planes, one at a time, after one was waited for
STEADY_S: Final = 8.0  # it stays so, over a renewal and several heartbeats
FAULTS: Final = 8  # of one schedule
PAUSE_S: Final = 12.0  # the longest between two of them
MODELS: Final = ("a", "b")
Do = Callable[[World], Awaitable[None]]


@attrs.frozen
class Kind:
    """`engines_untouched`: none of its faults is a reason for any engine to start or stop. `settings`: control planes have
    settings in their store, and in the end everybody must run what somebody asked for last."""

    name: str
    faults: tuple[Do, ...]
    engines_untouched: bool = False
    pause_s: float = PAUSE_S
    settings: bool = False
    count: int = FAULTS
    steady_s: float = STEADY_S


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


async def lose_deltas(world: World) -> None:
    """What no network does and a bug may: of what a session carries, some changes are missing. The whole list that is asked for
    arrives: without it a stop would be held up until its deadline, which is short here, and then go on."""
    name = _plane(world)
    if name is not None:
        world.lose_deltas(name, world.rng.randrange(1, 4))
        _later(world, world.rng.uniform(0.5, 10.0), lambda: world.lose_deltas(name, 0))


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


# --- settings


async def edit_live(world: World) -> None:
    await world.edit()


async def edit_restart(world: World) -> None:
    await world.edit(live=False, restart=True)


async def edit_both(world: World) -> None:
    await world.edit(restart=True)


async def edit_badly(world: World) -> None:
    """On one machine or on all it does not load, or the processes that start with it come to grief."""
    kind = world.rng.choice(["load", "start", "late", "leading", "slow"])
    machine = world.rng.choice(["", f"ctl-{world.rng.randrange(world.shape.planes)}"])
    if await world.edit(live=world.rng.random() < 0.5, restart=True, bomb=Bomb(kind, machine)):
        await trio.sleep(world.rng.uniform(5.0, 30.0))  # a restart into it begins about 10 s later


async def roll_back(world: World) -> None:
    if world.versions:
        await world.roll_back(world.rng.randrange(world.versions[-1].version) + 1)


async def two_editors(world: World) -> None:
    """At once, from one version; one of them is told that the other was faster."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(edit_live, world)
        nursery.start_soon(edit_both, world)


async def edit_file(world: World) -> None:
    """One machine's: half written for a moment, with keys that take a restart, or with what does not load until it is mended."""
    name = f"ctl-{world.rng.randrange(world.shape.planes)}"
    if name in world.torn:
        return
    good = file_of(name, world.rng.choice(["info", "warning", "error"]), f"# {world.rng.random()}\n")
    if world.rng.random() < 0.3:
        world.save_file(name, good + world.rng.choice([DOES_NOT_LOAD, b"[log]\n", b"colour = 1\n"]))
        _later(world, world.rng.uniform(1.0, 20.0), lambda: world.save_file(name, good))
    else:
        world.save_file(name, good, torn_s=world.rng.uniform(0.3, 0.8))


async def pause(world: World) -> None:
    async def give(controller: Controller) -> None:
        await controller.cluster_settings.pause("works", OPERATOR)

    async def resume() -> None:
        await trio.sleep(world.rng.uniform(1.0, 15.0))
        while world.leader() is None or not await world.order("resume", _resume):
            await trio.sleep(1.0)
        world.healing -= 1

    if world.leader() is not None:  # also where nobody was told that it is in force
        await world.order("pause", give)
        world.healing += 1
        world.nursery.start_soon(resume)


async def _resume(controller: Controller) -> None:
    await controller.cluster_settings.resume(OPERATOR)


async def damage(world: World) -> None:
    """A version is not what was written, for a while, before everybody has read it."""
    if not await world.edit(restart=world.rng.random() < 0.5) or world.damaged:
        return
    world.damage_newest(True)
    _later(world, world.rng.uniform(1.0, 10.0), lambda: world.damage_newest(False))


async def kill_and_bring_back(world: World) -> None:
    name = _plane(world)
    if name is not None:
        world.kill_plane(name, machine_too=world.rng.random() < 0.3)
        world.bring_back(name, 0.1, 10.0)


async def edit_and_freeze(world: World) -> None:
    """Whoever restarts for it stands still at some moment of the roll-out."""
    if await world.edit(restart=True):
        await trio.sleep(world.rng.uniform(0.0, 20.0))
        await freeze(world)


async def blip_shortly(world: World) -> None:
    name = _plane(world)
    if name is not None:
        world.cut_store(name, True, data=world.rng.random() < 0.7)
        _later(world, world.rng.uniform(0.5, 15.0), lambda: world.cut_store(name, False))


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
# What is listed changes all the time, and does not always arrive.
LISTS: Final = Kind(
    "lists",
    (
        lose_deltas, lose_deltas, lose_deltas, lose_deltas, choose, scale, scale, crash_engine, restart_router, cut_router, hand_over, kill,
        restart_agent,
    ),
    pause_s=4.0,
    count=12,
)  # fmt: skip
_BAD: Final = (edit_badly,) * 7
SETTINGS_KIND: Final = Kind(
    "settings",
    (
        *_BAD, edit_live, edit_restart, edit_both, roll_back, two_editors, two_editors, edit_file, edit_file, edit_file, pause, damage,
        damage, kill_and_bring_back, kill_and_bring_back, freeze, edit_and_freeze, hand_over, blip_shortly, lose_reply_of_data, cut_peers,
        cut_router, restart_router,
    ),
    engines_untouched=True,
    settings=True,
    count=3,
    pause_s=6.0,
    steady_s=2.0,
)  # fmt: skip
KINDS: Final = {kind.name: kind for kind in (STORM, CONTROL, BUSY, LISTS, SETTINGS_KIND)}


@attrs.frozen
class Outcome:
    """What was broken, by invariant; how many terms there were; the world as it ended."""

    wrong: dict[str, list[str]]
    terms: int
    world: World


def run_schedule(seed: int, kind: Kind = STORM, protect: Rules = RULES) -> Outcome:
    """One schedule. The shape is drawn from the seed too: how many control planes, on one machine or on several."""
    nodes = 1 if kind.settings else 3
    shape = Shape(planes=3 if seed % 5 == 0 else 2, nodes=nodes, one_machine=seed % 2 == 1, protect=protect, settings=kind.settings)
    unsettled: list[str] = []
    wrong_at_last: list[str] = []

    async def main(world: World) -> None:
        await world.start(*([model("a", 2)] if kind.settings else []))
        if world.rng.random() < 0.8:
            await world.wait_settled(60.0)
        for _ in range(kind.count):
            await trio.sleep(world.rng.uniform(0.0, kind.pause_s))
            await world.rng.choice(kind.faults)(world)
        while world.healing:  # every fault heals by itself, within a minute
            await trio.sleep(1.0)
        if kind.settings:
            while not await world.edit(restart=world.rng.random() < 0.25):  # the way out of whatever came before
                await trio.sleep(1.0)
            try:
                await world.wait_applied(APPLIED_S)
            except AssertionError as err:
                wrong_at_last.append(str(err))
        try:
            await world.wait_settled(QUIET_S)
            await trio.sleep(kind.steady_s)
            await world.wait_settled(kind.steady_s, f" again after {kind.steady_s:g} s without a fault")
        except AssertionError as err:
            unsettled.append(str(err))

    world = run_world(main, seed, shape)
    wrong = broken(world.history)
    if unsettled:
        wrong["NothingLeftToPlan"] = unsettled
    if wrong_at_last:
        wrong["AppliedAtLast"] = wrong_at_last
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
