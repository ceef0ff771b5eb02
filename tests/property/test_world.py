"""The world under very many random schedules, and under the ones that have a name."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator

import attrs
import pytest
import trio

from llmgw.control import settings_boot
from llmgw.control.controller import Controller
from llmgw.domain.errors import Conflict
from llmgw.domain.holds import Hold
from llmgw.domain.ids import holder_name
from llmgw.domain.lease import LeaseRole
from llmgw.domain.settings_version import RolloutPhase, RolloutRow
from llmgw.lease.rules import RULES
from llmgw.protocol.messages import Command, CommandResult, ForgetReplica, LeaderHello, Outcome, RestartReplica, StartReplica, StopReplica
from llmgw.sim.lease_store import Fault
from tests.conftest import SCHEDULES
from tests.property.invariants import broken
from tests.property.schedules import BUSY, CONTROL, KINDS, LISTS, SETTINGS_KIND, STORM, Kind, replay_line, run_schedule
from tests.property.world import (
    DELAY_S,
    FOLDER,
    OPERATOR,
    TIMEOUT_S,
    TTL_S,
    Arrived,
    Bomb,
    Claim,
    Crashed,
    Edited,
    Engine,
    Happened,
    Left,
    Recorded,
    Restarts,
    Shape,
    Stored,
    World,
    file_of,
    model,
    quiet_logs,
    run_world,
)

# 620 schedules in all, in pieces that two workers share.
CHUNKS = [
    *((STORM, first, first + 30) for first in range(0, 210, 30)),
    *((CONTROL, first, first + 30) for first in range(0, 120, 30)),
    *((BUSY, first, first + 30) for first in range(0, 60, 30)),
    (LISTS, 0, 30),
    *((SETTINGS_KIND, first, first + 25) for first in range(0, 200, 25)),
]
SHAPES = [Shape(one_machine=True), Shape()]
one_or_two_machines = pytest.mark.parametrize("shape", SHAPES, ids=["one-machine", "two-machines"])


# Schedules of long explorations that broke something once.
FOUND = {
    "a leader that could not reach its standby for some seconds took itself for alone and restarted while it led": ("settings", 2000143),
    "a leader handed over with a stop under way, and its own router listed again what was about to end": ("busy", 2000145),
    "an engine died on its way out, and was stopped while routers that were told nothing yet still listed it": ("storm", 4001222),
    "nobody took the lease that was handed over, and a good version was blamed for it": ("settings", 261),
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with quiet_logs():
        yield


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "first", "end"), CHUNKS, ids=lambda value: value.name if isinstance(value, Kind) else str(value))
def test_no_schedule_breaks_an_invariant(kind: Kind, first: int, end: int, record_property: Callable[[str, object], None]):
    terms = 0
    for seed in range(first, end):
        outcome = run_schedule(seed, kind)
        assert not outcome.wrong, f"{outcome.wrong}\n{replay_line(seed, kind)}"
        terms += outcome.terms
    assert terms > end - first, "the lease changes hands"
    record_property(f"{SCHEDULES}the world", end - first)


@pytest.mark.parametrize("story", FOUND)
def test_what_an_exploration_has_found_stays_mended(story: str):
    kind, seed = FOUND[story]
    assert not run_schedule(seed, KINDS[kind]).wrong


def test_twenty_runs_of_a_seed_give_one_history():
    async def main(world: World) -> None:
        await world.start()
        await world.wait_settled(60)
        world.kill_plane(world.leader().name)
        await trio.sleep(2 * TTL_S)

    histories = {repr(run_world(main, 7).history) for _ in range(20)}
    assert len(histories) == 1
    assert repr(run_world(main, 8).history) not in histories


@pytest.mark.parametrize("kind", ["storm", "settings"])
def test_a_seed_gives_the_same_history_in_another_process(kind: str):
    """A schedule that fails is replayed by its line, elsewhere: nothing may hang on hashes or on addresses in memory."""
    told = set()
    for hashes in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hashes}
        done = subprocess.run(
            [sys.executable, "-m", "tests.property.replay", kind, "3"], env=environment, capture_output=True, check=True, timeout=120
        )
        told.add(done.stdout)
    assert len(told) == 1
    assert told.pop().endswith(b"held\n")


def checked(main: Callable[[World], Awaitable[None]], shape: Shape = SHAPES[1], seed: int = 1) -> World:
    """One run with a name; every invariant holds over it too."""
    world = run_world(main, seed, shape)
    assert not broken(world.history), broken(world.history)
    return world


def engines(world: World) -> list[Engine]:
    return [entry for entry in world.history if isinstance(entry, Engine)]


async def settled(world: World, *specs: object) -> None:
    await world.start(*specs)
    await world.wait_settled(60)


async def until(condition: Callable[[], bool], limit_s: float, what: str) -> float:
    """How long it took; an assertion beyond the limit."""
    began_s = trio.current_time()
    while not condition():
        assert trio.current_time() - began_s <= limit_s, f"not within {limit_s:g} s: {what}"
        await trio.sleep(0.01)
    return trio.current_time() - began_s


def standby(world: World) -> str:
    leader = world.leader()
    return next(name for name in world.planes if leader is None or name != leader.name)


# --- who leads


@one_or_two_machines
def test_two_that_start_together_are_one_leader_and_place_once(shape: Shape):
    async def main(world: World) -> None:
        await settled(world)
        await trio.sleep(30)

    world = checked(main, shape)
    assert [entry.what for entry in engines(world)] == ["started"] * 3
    assert len({entry.record.epoch for entry in world.history if isinstance(entry, Recorded)}) == 1


def test_a_process_that_was_killed_is_succeeded_at_once_where_its_death_can_be_seen():
    async def main(world: World) -> None:
        await settled(world)
        world.kill_plane(world.leader().name)
        assert await until(lambda: world.leader() is not None, 2.0, "another leads") <= 2.0
        await trio.sleep(30)

    assert len(engines(checked(main, SHAPES[0]))) == 3


def test_a_machine_that_is_gone_is_succeeded_within_the_ttl_rule():
    async def main(world: World) -> None:
        await settled(world)
        world.kill_plane(world.leader().name, machine_too=True)
        await until(lambda: world.leader() is not None, TTL_S * 1.02 + 1 + 2 * 0.6 + 2, "another leads")
        await trio.sleep(30)

    assert len(engines(checked(main))) == 3


@one_or_two_machines
def test_a_planned_hand_over_takes_less_than_a_second_and_touches_no_engine(shape: Shape):
    async def main(world: World) -> None:
        await settled(world)
        first = world.leader().name
        await trio.sleep(3)

        async def give(controller: Controller) -> None:
            controller.leadership.hand_over()

        assert await world.order("hand over", give)
        await until(lambda: (leader := world.leader()) is not None and leader.name != first, 1.0, "the other leads")
        await world.wait_settled(30)

    assert len(engines(checked(main, shape))) == 3


def test_a_lone_control_plane_hands_over_only_when_forced_and_takes_a_new_epoch():
    async def main(world: World) -> None:
        await settled(world)
        leadership = world.leader().controller.leadership
        epoch = leadership.epoch
        with pytest.raises(Conflict):
            leadership.hand_over()
        leadership.hand_over(force=True)
        await until(lambda: world.leader() is not None and leadership.epoch > epoch, 2.0, "it leads under a new epoch")
        await world.wait_settled(30)

    assert len(engines(checked(main, Shape(planes=1)))) == 3


@one_or_two_machines
def test_one_that_was_frozen_past_its_lease_stands_by_in_the_same_process_under_a_fresh_owner_id(shape: Shape):
    async def main(world: World) -> None:
        await settled(world)
        name = world.leader().name
        plane = world.planes[name]
        owner = plane.controller.leadership.owner
        world.freeze(name)
        await until(lambda: world.leader() is not None, 3 * TTL_S, "the other leads")
        world.thaw(name)
        await until(lambda: plane.controller.leadership.owner != owner, 5.0, "the frozen one has a fresh owner id")
        await world.wait_settled(30)
        assert world.planes[name] is plane
        assert plane.controller.leadership.role(plane.machine.now_s()) is LeaseRole.FOLLOW

    assert len(engines(checked(main, shape))) == 3


def test_both_suspended_with_their_wall_clocks_stepped_go_on_as_before():
    async def main(world: World) -> None:
        await settled(world)
        for name in world.planes:
            world.freeze(name)
        await trio.sleep(100)
        for name, plane in world.planes.items():
            plane.machine.wall_offset_s -= 1e6
            world.thaw(name)
        await world.wait_settled(60)

    assert len(engines(checked(main))) == 3


# --- the store


@pytest.mark.parametrize("length_s", [1.0, 10.0, 60.0, 300.0, 600.0])
@pytest.mark.parametrize("planes", [1, 2])
def test_a_store_that_is_gone_for_all_alike_changes_no_role_and_stops_no_healing(length_s: float, planes: int):
    async def main(world: World) -> None:
        await settled(world)
        leader = world.leader()
        epoch = leader.controller.leadership.epoch
        for name in world.planes:
            world.cut_store(name, True)
        await trio.sleep(length_s / 2)
        world.crash_engine()
        lost = next(name for name, node in world.nodes.items() if node.replicas.reports())
        if length_s >= 60.0:
            world.kill_agent(lost)  # its node is lost; what ran there is replaced elsewhere
            wanted = {"a": 2, "b": 1}
            live = lambda: {  # noqa: E731
                name: sum(r.order.model == name for node in world.nodes if node != lost for r in world.nodes[node].replicas.reports())
                for name in wanted
            }
            await until(lambda: live() == wanted, 30.0, "what was lost runs elsewhere")
        await trio.sleep(length_s / 2)
        for name in world.planes:
            world.cut_store(name, False)
        if length_s >= 60.0:
            world.restart_agent(lost)
        await world.wait_settled(120)
        assert world.leader() is leader
        assert leader.controller.leadership.epoch == epoch

    checked(main, Shape(planes=planes))


def test_while_the_store_is_gone_routing_is_untouched_and_orders_are_not_acknowledged():
    async def main(world: World) -> None:
        await settled(world)
        leader = world.leader()
        for name in world.planes:
            world.cut_store(name, True)
        await trio.sleep(2 * TTL_S)
        assert not leader.controller.leadership.confirmed(leader.machine.now_s())
        assert leader.controller.leadership.is_leader
        listed = leader.router.ids()
        await trio.sleep(60)
        assert leader.router.ids() == listed

    assert len(engines(checked(main))) == 3


def test_one_that_sees_the_store_takes_over_from_one_that_does_not():
    async def main(world: World) -> None:
        await settled(world)
        first = world.leader().name
        world.cut_store(first, True)
        await until(lambda: (leader := world.leader()) is not None and leader.name != first, 3 * TTL_S, "the other leads")
        await trio.sleep(20)
        world.cut_store(first, False)
        await world.wait_settled(60)

    assert len(engines(checked(main))) == 3


@pytest.mark.parametrize(
    "fault",
    [Fault(lose_reply=True), Fault(late_s=0.5), Fault(late_s=30.0), Fault(status=409), Fault(status=503), Fault(status=403)],
    ids=str,
)
def test_a_renewal_whose_outcome_is_unknown_is_read_back(fault: Fault):
    async def main(world: World) -> None:
        await settled(world)
        leader = world.leader()
        epoch = leader.controller.leadership.epoch
        world.hurt_next_lease_request(leader.name, fault)
        await trio.sleep(3 * TTL_S)
        assert world.leader() is leader
        assert leader.controller.leadership.epoch == epoch

    checked(main)


@pytest.mark.parametrize("by_hand", ["deleted", "rolled back"])
def test_a_record_that_was_deleted_or_put_back_by_hand_makes_no_second_leader(by_hand: str):
    async def main(world: World) -> None:
        await settled(world)
        bucket = world.bench.bucket
        old = bucket.writes[0]
        await trio.sleep(3 * TTL_S)
        if by_hand == "deleted":
            bucket.delete(old[0])
        else:
            bucket.restore(*old)
        await trio.sleep(60)
        await world.wait_settled(60)

    world = run_world(main, 1)
    wrong = broken(world.history)
    wrong.pop("EpochMonotoneStore", None)  # that is what the hand did
    assert not wrong, wrong
    assert len(engines(world)) == 3


# --- the fence


async def _start(controller: Controller, replica: str) -> None:
    await controller.models.scale("a", 3)


async def _stop(controller: Controller, replica: str) -> None:
    await controller.models.scale("a", 1)


async def _restart(controller: Controller, replica: str) -> None:
    controller.restart_replica(replica)


@pytest.mark.parametrize(
    ("order", "give"),
    [(StartReplica, _start), (StopReplica, _stop), (RestartReplica, _restart), (ForgetReplica, _stop)],
    ids=["start", "stop", "restart", "forget"],
)
def test_an_order_of_one_that_was_frozen_between_its_decision_and_the_send_is_refused(order: type, give: Callable[..., Awaitable[None]]):
    """It is confirmed when it decides, stands still past its lease, and what it had in its hands leaves it after that."""

    async def main(world: World) -> None:
        await settled(world)
        plane = world.leader()
        sessions = plane.controller.sessions
        send = sessions.send_nowait
        frozen = trio.Event()

        def send_then_freeze(node: object, message: object) -> None:
            send(node, message)
            if isinstance(message, Command) and isinstance(message.order, order) and not frozen.is_set():
                world.freeze(plane.name)
                frozen.set()

        sessions.send_nowait = send_then_freeze
        await give(plane.controller, plane.router.ids()[0])
        await frozen.wait()
        await until(lambda: world.leader() is not None, 4 * TTL_S, "the other leads")
        await trio.sleep(10)
        world.thaw(plane.name)
        await world.wait_settled(120)

    world = checked(main)
    frozen_s = next(entry.at_s for entry in world.history if isinstance(entry, Happened) and entry.text.startswith("freeze"))
    thawed_s = next(entry.at_s for entry in world.history if isinstance(entry, Happened) and entry.text.startswith("thaw"))
    late = {
        entry.message.command_id
        for entry in world.history
        if isinstance(entry, Left) and entry.at_s >= thawed_s and isinstance(entry.message, Command) and entry.message.token.epoch == 1
    }
    answers = [
        entry.message.outcome
        for entry in world.history
        if isinstance(entry, Left) and isinstance(entry.message, CommandResult) and entry.message.command_id in late
    ]
    assert all(answer is Outcome.STALE for answer in answers)
    assert not any(entry.what == "stopped" and frozen_s < entry.at_s < thawed_s for entry in engines(world) if order is RestartReplica)


def test_agents_that_are_split_between_an_old_and_a_new_leader_obey_one_each_and_the_old_one_comes_back_in_line():
    async def main(world: World) -> None:
        await settled(world)
        old, new = world.leader().name, standby(world)
        world.cut("n0", new, True)  # n0 hears only the old one, the others both
        world.cut_store(old, True)
        await until(lambda: (leader := world.leader()) is not None and leader.name == new, 3 * TTL_S, "the new one leads")
        await trio.sleep(10)
        world.cut("n0", new, False)
        world.cut_store(old, False)
        await world.wait_settled(120)

    checked(main)


def test_a_leader_that_sees_the_store_and_not_the_agents_hands_over():
    async def main(world: World) -> None:
        await settled(world)
        first = world.leader().name
        for node in world.nodes:
            world.cut(node, first, True)
        await until(lambda: (leader := world.leader()) is not None and leader.name != first, 90.0, "the one that hears them leads")
        await trio.sleep(10)
        for node in world.nodes:
            world.cut(node, first, False)
        await world.wait_settled(120)

    checked(main)


# --- what a new leader knows


@one_or_two_machines
def test_what_was_ordered_before_a_standby_took_over_is_what_it_keeps(shape: Shape):
    async def main(world: World) -> None:
        await settled(world)
        first = world.leader()
        await world.scale("a", 1)
        await world.order("choose", lambda controller: _choose(controller, "b", "p1"))
        await world.order("hold", _hold)
        world.kill_plane(first.name)  # at once: nothing of it may have been carried out yet
        await until(lambda: world.leader() is not None, 3 * TTL_S, "the other leads")
        controller = world.leader().controller
        assert controller.models.get("a").replicas.count == 1
        assert controller.models.choices == {"b": "p1"}
        assert [hold.facility for hold in controller.holds.active()] == ["room"]
        await world.start_plane(first.name)
        await world.wait_settled(120)
        profiles = {r.order.profile.name for node in world.nodes.values() for r in node.replicas.reports() if r.order.model == "b"}
        assert profiles == {"p1"}

    checked(main, shape)


async def _choose(controller: Controller, name: str, profile: str) -> None:
    await controller.models.choose_engine(name, profile)


async def _hold(controller: Controller) -> None:
    await controller.holds.add(Hold("room", "works"))


def test_a_standby_shows_what_the_leader_has_changed_within_two_seconds():
    async def main(world: World) -> None:
        await settled(world)
        other = world.planes[standby(world)].controller
        await world.scale("a", 3)
        await until(lambda: other.models.get("a").replicas.count == 3, 2.0, "the standby has read it")
        await until(lambda: len(world.planes[standby(world)].router.ids()) == 4, 20.0, "its own router serves it")

    checked(main)


# --- crashes at every step


@pytest.mark.parametrize("shape", SHAPES, ids=["one-machine", "two-machines"])
def test_a_hand_over_that_is_cut_short_at_any_step_ends_in_one_leader(shape: Shape):
    """The leader is killed after its n-th step from the order on, for every n until the hand-over is through."""

    class Steps(trio.abc.Instrument):
        def __init__(self, after: int, act: Callable[[], None]) -> None:
            self.left, self.act = after, act

        def after_task_step(self, task: trio.lowlevel.Task) -> None:
            self.left -= 1
            if self.left == 0:
                self.act()

    async def hand_over_and_crash(world: World, after: int) -> None:
        await settled(world, model("a", 1))
        await trio.sleep(2)
        leader = world.leader()
        leader.controller.leadership.hand_over()
        steps = Steps(after, lambda: world.kill_plane(leader.name))
        trio.lowlevel.add_instrument(steps)
        await until(lambda: (now := world.leader()) is not None and now.name != leader.name, 4 * TTL_S, "the other leads")
        trio.lowlevel.remove_instrument(steps)
        await trio.sleep(1)
        if leader.name not in world.planes:
            await world.start_plane(leader.name)
        await world.wait_settled(60)

    for after in [*range(1, 40), *range(40, 160, 10)]:
        small = Shape(nodes=1, one_machine=shape.one_machine, follower=False)
        world = checked(lambda world, after=after: hand_over_and_crash(world, after), small)
        assert len(engines(world)) == 1, f"killed after step {after}"


def test_a_kill_sends_nothing_and_writes_nothing_afterwards():
    async def main(world: World) -> None:
        await settled(world)
        await world.scale("a", 3)  # so that there is something to send
        leader = world.leader()
        disk = dict(leader.machine.disk.files)
        world.kill_plane(leader.name)
        world.tell("dead")
        await trio.sleep(30)
        assert leader.machine.disk.files == disk

    world = checked(main)
    dead = next(index for index, entry in enumerate(world.history) if isinstance(entry, Happened) and entry.text == "dead")
    (killed,) = (entry.text.split()[1] for entry in world.history if isinstance(entry, Happened) and entry.text.startswith("kill"))
    after = world.history[dead:]
    assert not [entry for entry in after if isinstance(entry, Left) and entry.sender == f"http://{killed}"]
    assert not [entry for entry in after if isinstance(entry, Recorded) and entry.record.owner.startswith(killed)]
    assert not [entry for entry in after if isinstance(entry, Claim) and entry.plane == killed]


def test_a_barrier_goes_to_every_agent_before_anything_else():
    async def main(world: World) -> None:
        await settled(world)
        world.kill_plane(world.leader().name)
        await trio.sleep(3 * TTL_S)

    world = checked(main)
    taken = [entry for entry in world.history if isinstance(entry, Arrived) and isinstance(entry.message, LeaderHello | Command)]
    for node in world.nodes:
        second = [entry for entry in taken if entry.receiver == node and entry.message.token.epoch > 1]
        assert isinstance(second[0].message, LeaderHello)


def test_the_world_uses_the_rules_that_the_product_uses():
    assert Shape().protect is RULES


# --- settings


PAIR, THREE = Shape(nodes=1, settings=True), Shape(planes=3, nodes=1, settings=True)


async def ctl_0_leads(world: World) -> None:
    await settled(world, model("a", 2))
    leader = world.leader()
    assert leader is not None
    if leader.name != "ctl-0":
        leader.controller.leadership.hand_over()
        await until(lambda: (now := world.leader()) is not None and now.name == "ctl-0", 5.0, "ctl-0 leads")
        await world.wait_settled(30)


def of(world: World, kind: type) -> list:  # type: ignore[type-arg]
    return [entry for entry in world.history if isinstance(entry, kind)]


def row(world: World) -> RolloutRow:
    leader = world.leader()
    assert leader is not None
    return leader.controller.settings_poller.row


async def frozen(world: World, version: int) -> None:
    """The version is held, and everybody runs the one before."""
    await until(lambda: world.leader() is not None and row(world).is_held(version), 90.0, "the version is held")

    def back() -> bool:
        in_force = [plane.controller.in_force for plane in world.planes.values()]
        all_back = len(in_force) == world.shape.planes and all(one.applied == version - 1 and not one.pending for one in in_force)
        return all_back and world.leader() is not None and row(world).phase is RolloutPhase.FROZEN

    await until(back, 90.0, "everybody runs the version before, and the roll-out is frozen")


def settings_checked(main: Callable[[World], Awaitable[None]], shape: Shape = PAIR, seed: int = 1) -> World:
    world = checked(main, shape, seed)
    assert [entry.what for entry in engines(world)] == ["started"] * 2, "settings touch no engine"
    return world


def test_two_first_starts_import_one_version():
    async def main(world: World) -> None:
        await ctl_0_leads(world)

    world = settings_checked(main, THREE)
    assert [(entry.version, entry.parent) for entry in of(world, Stored)] == [(1, 0)]


def test_a_live_change_and_its_way_back_are_in_force_everywhere_within_a_second():
    async def main(world: World) -> None:
        await ctl_0_leads(world)
        assert await world.edit()
        await until(lambda: not world.applied_everywhere(), 1.0, "the edit is in force, also in the router that follows")
        assert await world.roll_back(1)
        await until(lambda: not world.applied_everywhere(), 1.0, "what was before is in force")
        assert [version.parent for version in world.versions] == [0, 1, 2]

    assert not of(settings_checked(main), Restarts)


@pytest.mark.parametrize("shape", [PAIR, THREE, attrs.evolve(PAIR, one_machine=True)], ids=["two", "three", "one-machine"])
def test_a_restart_goes_standbys_first_and_to_the_leader_last_once_its_successor_has_led_for_the_delay(shape: Shape):
    async def main(world: World) -> None:
        await ctl_0_leads(world)
        assert await world.edit(restart=True)
        await world.wait_applied(120)

    world = settings_checked(main, shape)
    restarts = of(world, Restarts)
    assert [entry.plane for entry in restarts] == [*(f"ctl-{index}" for index in range(1, shape.planes)), "ctl-0"]
    proven = [entry.at_s for entry in of(world, Claim) if entry.plane != "ctl-0" and entry.role is LeaseRole.CONFIRMED]
    assert restarts[-1].at_s - proven[0] >= DELAY_S - 0.5


# With 3, 4, 11 and 15 the one that refuses it took the lease that the leader let go of for it, the old leader took it back from
# there, and a good version was held; with 6 and 8 it did so again when it was handed over once more.
@pytest.mark.parametrize("seed", [1, 3, 4, 6, 8, 11, 15])
def test_a_version_that_does_not_load_on_one_machine_is_refused_there_and_runs_elsewhere(seed: int):
    async def main(world: World) -> None:
        await ctl_0_leads(world)
        assert await world.edit(restart=True, bomb=Bomb("load", "ctl-1"))
        planes = {name: plane.controller for name, plane in world.planes.items()}
        await until(lambda: planes["ctl-1"].in_force.refused == 2, 5.0, "it is refused")
        await until(lambda: planes["ctl-2"].in_force.pending == 2 or "ctl-2" not in world.planes, 5.0, "it is wanted elsewhere")
        await until(lambda: all(_applied(world, name) == 2 for name in ("ctl-0", "ctl-2")), 90.0, "it runs elsewhere")
        assert _applied(world, "ctl-1") == 1
        said = await world.planes["ctl-2"].controller.cluster_settings.refused()
        assert said == ((2, "ctl-1", "it does not load on ctl-1"),)
        assert not row(world).held

    world = settings_checked(main, THREE, seed)
    assert "ctl-1" not in {holder_name(entry.record.owner) for entry in of(world, Recorded)}, "it leaves the lease to ctl-2"


def test_a_leader_does_not_let_go_of_the_lease_when_the_only_one_that_could_lead_has_just_died():
    async def main(world: World) -> None:
        await ctl_0_leads(world)
        assert await world.edit(restart=True, bomb=Bomb("load", "ctl-1"))
        await until(lambda: row(world).phase is RolloutPhase.HANDING_OVER, 60.0, "the leader is about to hand over")
        world.kill_plane("ctl-2", machine_too=True)
        await until(lambda: row(world).is_held(2), 2 * TIMEOUT_S, "what ctl-2 ran is held")

    world = settings_checked(main, THREE)
    assert len({entry.record.epoch for entry in of(world, Recorded)}) == 1


def test_whoever_leaves_the_lease_to_others_takes_it_when_they_are_dead():
    async def main(world: World) -> None:
        await ctl_0_leads(world)
        assert await world.edit(restart=True, bomb=Bomb("load", "ctl-1"))
        await until(lambda: row(world).phase is RolloutPhase.HANDING_OVER, 60.0, "the leader is about to hand over")
        await until(lambda: any(entry.record.released for entry in of(world, Recorded)), 10.0, "it is let go of")
        for name in ("ctl-0", "ctl-2"):
            world.kill_plane(name, machine_too=True)
        await until(lambda: (now := world.leader()) is not None and now.name == "ctl-1", TTL_S * 1.02 + 4.0, "ctl-1 leads")

    checked(main, THREE)


def _applied(world: World, name: str) -> int:
    plane = world.planes.get(name)
    return plane.controller.in_force.applied if plane is not None else 0


@pytest.mark.parametrize("kind", ["start", "late", "slow"])
def test_a_version_that_breaks_a_standby_is_held_and_the_leader_never_lets_go(kind: str):
    async def main(world: World) -> None:
        await ctl_0_leads(world)
        assert await world.edit(restart=True, bomb=Bomb(kind))
        await frozen(world, 2)
        assert world.leader().name == "ctl-0"

    world = settings_checked(main)
    assert len({entry.record.epoch for entry in of(world, Recorded)}) <= 2, "nobody else has led since"
    assert "ctl-0" not in {entry.plane for entry in of(world, Restarts)}


def test_a_version_that_breaks_only_while_leading_is_taken_back_by_the_leader_before():
    async def main(world: World) -> None:
        await ctl_0_leads(world)
        assert await world.edit(restart=True, bomb=Bomb("leading"))
        await frozen(world, 2)
        assert world.leader().name == "ctl-0"

    world = settings_checked(main)
    assert [entry.plane for entry in of(world, Crashed)] == ["ctl-1"]
    assert "ctl-0" not in {entry.plane for entry in of(world, Restarts)}


def test_an_edit_ends_what_a_bad_version_has_frozen():
    async def main(world: World) -> None:
        await ctl_0_leads(world)
        assert await world.edit(restart=True, bomb=Bomb("start"))
        await frozen(world, 2)
        assert await world.edit(restart=True)
        await world.wait_applied(120)

    settings_checked(main)


def test_of_two_editors_at_once_one_is_told_that_the_other_was_faster():
    async def main(world: World) -> None:
        await ctl_0_leads(world)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.edit)
            nursery.start_soon(world.edit)
        await trio.sleep(2)

    world = settings_checked(main)
    assert [entry.version for entry in of(world, Edited)] == [2]
    assert any("PreconditionFailed" in entry.text for entry in of(world, Happened))


def test_a_lone_control_plane_restarts_at_once_after_a_minute_in_which_it_heard_nobody():
    async def main(world: World) -> None:
        await ctl_0_leads(world)
        await trio.sleep(60)
        assert await world.edit(restart=True)
        await until(lambda: bool(of(world, Restarts)), 3.0, "it restarts")
        await world.wait_applied(60)
        await until(lambda: row(world).phase is RolloutPhase.IDLE and not row(world).token, 30.0, "the roll-out is over")

    settings_checked(main, Shape(planes=1, nodes=1, settings=True))


def test_two_machines_whose_files_change_at_once_restart_one_after_the_other():
    async def main(world: World) -> None:
        await ctl_0_leads(world)
        for name in world.planes:
            world.save_file(name, file_of(name, "warning"), torn_s=0.8)
        await trio.sleep(3)
        await world.wait_applied(120)

    assert [entry.plane for entry in of(settings_checked(main), Restarts)] == ["ctl-1", "ctl-0"]


def test_a_pause_holds_a_roll_out_up_until_somebody_resumes():
    async def main(world: World) -> None:
        await ctl_0_leads(world)
        controller = world.leader().controller
        await controller.cluster_settings.pause("works", OPERATOR)
        assert await world.edit(restart=True)
        await trio.sleep(40)
        assert not of(world, Restarts)
        await controller.cluster_settings.resume(OPERATOR)
        await world.wait_applied(120)

    settings_checked(main)


def test_one_that_stood_still_with_a_grant_in_its_hands_does_not_follow_it_later():
    """It wakes up when the roll-out has given it up, and the version is held."""

    async def main(world: World) -> None:
        await ctl_0_leads(world)
        assert await world.edit(restart=True)
        plane = world.planes["ctl-1"]
        await until(lambda: plane.controller.settings_poller.row.token == plane.url, 30.0, "it has read that it may restart")
        world.freeze("ctl-1")
        await until(lambda: row(world).is_held(2), 60.0, "it is given up")
        world.thaw("ctl-1")
        await trio.sleep(30)
        assert world.planes["ctl-1"] is plane

    assert not of(settings_checked(main), Restarts)


def test_a_leader_that_waits_for_a_grant_to_be_followed_looks_about_each_second():
    async def main(world: World) -> None:
        await ctl_0_leads(world)
        rollouts = world.leader().controller.rollouts
        look, looks = rollouts._look, Counter[int]()

        async def counted() -> None:
            looks[int(world.now_s())] += 1
            assert looks[int(world.now_s())] < 20, "it looks without a pause"
            await look()

        rollouts._look = counted
        assert await world.edit(restart=True)
        await until(lambda: bool(row(world).token), 30.0, "somebody may restart")
        world.freeze("ctl-1")
        await trio.sleep(5)

    run_world(main, 1, PAIR)


def test_a_leader_that_was_killed_and_comes_back_at_once_does_not_take_itself_for_a_standby():
    """The lease still names the process before it, at its own address."""

    async def main(world: World) -> None:
        await ctl_0_leads(world)
        world.kill_plane("ctl-0")
        plane = await world.start_plane("ctl-0")
        await trio.sleep(TTL_S / 2)
        assert "http://ctl-0" not in [one.address for one, _ in plane.controller.peers.standbys()]

    settings_checked(main)


def test_a_machine_whose_file_does_not_load_is_not_restarted_before_it_is_mended():
    """It would not come up again, and the version would be held for everybody."""

    async def main(world: World) -> None:
        await ctl_0_leads(world)
        world.save_file("ctl-1", file_of("ctl-1", "no such level"))
        await trio.sleep(3)
        assert await world.edit(restart=True)
        in_force = world.planes["ctl-1"].controller.in_force
        await until(lambda: in_force.refused == 2, 5.0, "it does not restart, and says why")
        assert "does not load" in in_force.why
        await trio.sleep(20)
        assert "ctl-1" not in {entry.plane for entry in of(world, Restarts)}
        world.save_file("ctl-1", file_of("ctl-1"))
        await world.wait_applied(120)

    settings_checked(main)


def test_a_file_that_was_edited_while_its_process_was_starting_is_noticed():
    async def main(world: World) -> None:
        await ctl_0_leads(world)
        world.plant(world.versions[0].sha256, Bomb("slow", "ctl-1"))
        world.kill_plane("ctl-1")
        world.bring_back("ctl-1")
        await trio.sleep(10)
        world.save_file("ctl-1", file_of("ctl-1", "warning"))
        await until(lambda: "ctl-1" in world.planes, 60.0, "it has begun")
        in_force = world.planes["ctl-1"].controller.in_force
        assert in_force.file.settings.log.level == "info"
        await until(lambda: bool(in_force.restart_for_file), 5.0, "it is noticed")

    checked(main, PAIR)


def test_what_a_process_is_told_to_start_with_outlives_what_its_predecessor_still_notes():
    """It proves its version at the very moment in which it is on its way out."""

    async def main(world: World) -> None:
        await ctl_0_leads(world)
        world.kill_plane("ctl-1")
        disk = (await world.start_plane("ctl-1")).machine.disk
        await trio.sleep(30)
        settings_boot.tell_next(disk, FOLDER, 7)
        await until(lambda: settings_boot.load_marks(disk, FOLDER).proven == 1, 90.0, "its version has run for a minute")
        assert settings_boot.load_marks(disk, FOLDER).told == 7

    settings_checked(main)


def test_a_restart_for_a_file_is_into_the_version_that_runs():
    """Another one may wait by then, and nobody has granted that."""

    async def main(world: World) -> None:
        await ctl_0_leads(world)
        world.save_file("ctl-1", file_of("ctl-1", "warning"))
        plane = world.planes["ctl-1"]
        await until(lambda: plane.controller.settings_poller.row.token == plane.url, 30.0, "it may restart for its file")
        plane.controller.in_force.pending = 2
        await until(lambda: bool(of(world, Restarts)), 5.0, "it restarts")

    world = run_world(main, 1, PAIR)
    assert [entry.version for entry in of(world, Restarts)] == [1]
