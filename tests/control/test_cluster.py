"""A control plane with agents and a router: placing, healing, changing models, restarting, without a second way."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import attrs
import pytest
import trio
from structlog.testing import capture_logs

from llmgw.admin.api.leader import leader_view
from llmgw.admin.api.models import list_models
from llmgw.admin.api.status import status_view
from llmgw.admin.views import problems as found_problems
from llmgw.agent.fence import FILE as FENCE_FILE
from llmgw.control.controller import Controller, Objects
from llmgw.control.leadership import Candidacy
from llmgw.control.sessions import ANSWER_S
from llmgw.control.settings_in_force import SettingsInForce
from llmgw.domain.endpoint import AbsenceReason, EndpointUse
from llmgw.domain.errors import Conflict, Invalid, NotFound, PreconditionFailed, Unavailable
from llmgw.domain.event import Level
from llmgw.domain.files import STORAGE_UNAVAILABLE
from llmgw.domain.holds import Hold
from llmgw.domain.ids import ClusterId, EndpointId, OwnerId
from llmgw.domain.lease import FencingToken
from llmgw.domain.model import Catalog, ReplicaCounts
from llmgw.domain.node import NodeFacts, NodeState
from llmgw.domain.placed import Filter
from llmgw.domain.replica import ReplicaState
from llmgw.lease.outage import BACK
from llmgw.lease.record import LeaseRecord
from llmgw.lease.store import Unknown
from llmgw.protocol import messages as m
from llmgw.protocol.channel import ChannelClosed
from llmgw.settings.document import EMPTY, with_keys
from llmgw.settings.load import Loaded
from llmgw.settings.schema import ReconcileSettings, Settings
from llmgw.sim.channel import SimChannel, channel_pair
from llmgw.sim.node import gpus
from llmgw.sim.replicas import Behaviour
from llmgw.store.audit import CLUSTER
from llmgw.store.connection import FileStore
from tests.control.world import World, model, run_world

T = TypeVar("T")


def test_a_model_is_placed_loaded_and_published() -> None:
    async def main(world: World) -> None:
        await world.start_control(model("a"))
        await world.add_node("n1")
        await world.wait(lambda: len(world.served("a")) == 1)
        assert world.router.endpoints.endpoints[0].key == f"key-{world.served('a')[0]}"
        assert world.router.endpoints.absences == ()

    run_world(main)


def test_a_model_without_a_ready_replica_is_listed_with_its_reason() -> None:
    async def main(world: World) -> None:
        await world.start_control(model("a"), model("big", memory_mib=10**9))
        await world.add_node("n1", behaviour=Behaviour(load_s=lambda order: 5.0))
        await world.wait(lambda: any(a.reason is AbsenceReason.LOADING and "a" in a.names for a in world.router.endpoints.absences))
        await world.wait(lambda: len(world.served("a")) == 1)
        (absence,) = world.router.endpoints.absences
        assert absence.names == ("big",)
        assert absence.reason is AbsenceReason.NO_CAPACITY
        reason = world.control.controller.explain("model/big")
        assert "1000000000 MiB" in reason.rejections[0].text
        assert "262144" in reason.rejections[0].text

    run_world(main)


def test_a_model_that_waits_for_its_turn_to_start_says_so_and_needs_nobody() -> None:
    async def main(world: World) -> None:
        controller = await world.start_control(model("a"), model("b"), model("huge", memory_mib=10**9))
        await world.add_node("n1", behaviour=Behaviour(load_s=lambda order: 20.0))
        await world.wait(lambda: {a.names: a.reason for a in world.router.endpoints.absences}.get(("b",)) is AbsenceReason.WAITING)
        assert controller.explain("model/b").text == "waiting for its turn: as many replicas are starting as may at once (1)"
        observed = controller.observe()
        models = list_models(controller)
        assert next(view for view in models if view["name"] == "b")["state"] == "waiting"
        assert found_problems(models, observed.nodes, controller.replicas(), observed.now_s, controller.reconciler.reasons) == []
        await world.wait(lambda: world.served("a") != [] and world.served("b") != [])
        huge = [(("huge",), AbsenceReason.NO_CAPACITY)]
        await world.wait(lambda: [(a.names, a.reason) for a in world.router.endpoints.absences] == huge)

    run_world(main, settings=Settings(reconcile=ReconcileSettings(starts_max=1)))


def test_an_impossible_model_is_pending_and_makes_no_loop_of_errors() -> None:
    async def main(world: World) -> None:
        controller = await world.start_control(model("eight", engine="vllm", command=(), checkpoint="/x", gpus=8))
        await world.add_node("n1", devices=gpus(2, "n1"))
        await trio.sleep(60)
        events = await world.store_events()
        assert not [event for event in events if event.kind.startswith("replica.")]
        assert "asks for 8 GPUs, the node has 2" in controller.explain("model/eight").rejections[0].text

    run_world(main)


def test_a_crashed_engine_is_restarted_in_place_and_its_endpoint_leaves_at_once() -> None:
    async def main(world: World) -> None:
        await world.start_control(model("a"))
        node = await world.add_node("n1")
        await world.wait(lambda: len(world.served("a")) == 1)
        (replica,) = world.ready("a")
        node.replicas.crash(replica)
        await trio.sleep(0.1)
        assert world.served("a") == []
        await world.wait(lambda: world.served("a") == [replica])
        assert "exited with code 1 on attempt 1; next start in 1 s" in " ".join(event.text for event in await world.store_events())

    run_world(main)


def test_agents_are_told_what_routers_get_of_their_engines_and_rarely_where_all_is_well() -> None:
    async def main(world: World) -> None:
        await world.start_control(model("m1"), model("m2"), model("m3"))
        node = await world.add_node("n1")
        await world.wait(lambda: len(world.router.ids()) == 3)
        dumb, busy, idle = (EndpointId(world.served(name)[0]) for name in ("m1", "m2", "m3"))
        node.replicas.heard.clear()
        world.router.uses = {
            dumb: EndpointUse(unanswered=3),
            busy: EndpointUse(in_flight=4, silent_s=0.1, heard_s=0.1),
            idle: EndpointUse(last_used_s=900.0, answers=10, heard_s=900.0),
        }
        await trio.sleep(25.5)
        told = {name: [seen for seen in node.replicas.heard if seen.replica == name] for name in (dumb, busy, idle)}
        assert len(told[dumb]) >= 20
        assert told[dumb][0].unanswered == 3
        assert len(told[busy]) == 3
        assert told[busy][0].heard_s == 0.1
        assert told[idle] == []

    run_world(main)


def test_attempts_that_fail_are_told_while_they_fail() -> None:
    async def main(world: World) -> None:
        controller = await world.start_control(model("a"))
        behaviour = Behaviour(load_s=lambda order: 5.0, crashes=lambda order, attempt: attempt < 3)
        await world.add_node("n1", behaviour=behaviour)

        def problems() -> list[str]:
            observed = controller.observe()
            return found_problems([], observed.nodes, controller.replicas(), observed.now_s)

        await world.wait(lambda: any(replica.state is ReplicaState.LOADING for replica in controller.replicas()))
        assert problems() == []
        (replica,) = controller.replicas()
        assert controller.explain("model/a").text == f"0 of 1 replicas ready; {replica.id} is loading"
        for attempt in (2, 3):
            for state in (ReplicaState.STARTING, ReplicaState.LOADING):
                await world.wait(lambda: [(r.state, r.report.tries) for r in controller.replicas()] == [(state, attempt)])  # noqa: B023
                told = f"attempt {attempt} of 6, the one before: exited with code 1: simulated crash"
                assert problems() == [f"replica {replica.id} keeps failing: {told}"]
                assert controller.explain("model/a").text == f"0 of 1 replicas ready; {replica.id} is {state.value} ({told})"
                assert told in controller.explain(f"replica/{replica.id}").text
        await world.wait(lambda: world.ready("a") != [])
        assert problems() == []
        assert controller.explain("model/a").text == "1 of 1 replicas ready; nothing is to be done"

    run_world(main)


def test_a_replica_that_used_its_attempts_is_failed_closes_its_node_and_comes_back_when_asked() -> None:
    async def main(world: World) -> None:
        controller = await world.start_control(model("a"))
        broken = {"now": True}
        node = await world.add_node("n1", behaviour=Behaviour(load_s=lambda order: 0.5, crashes=lambda order, attempt: broken["now"]))
        await world.wait(lambda: any(r.state is ReplicaState.FAILED for r in controller.replicas()))
        started = node.replicas.started
        assert started == 6
        await trio.sleep(300)
        assert node.replicas.started == started
        assert "failed here" in controller.explain("model/a").rejections[0].text
        broken["now"] = False
        await controller.restart_model("a")
        await world.wait(lambda: len(world.served("a")) == 1)
        assert node.replicas.started == started + 1

    run_world(main)


def test_a_removed_model_is_withdrawn_before_its_engine_stops_and_nothing_else_restarts() -> None:
    async def main(world: World) -> None:
        controller = await world.start_control(model("a"), model("b"))
        node = await world.add_node("n1")
        await world.wait(lambda: bool(world.served("a") and world.served("b")))
        (of_b,) = world.ready("b")
        starts = node.replicas.started
        world.router.uses = {EndpointId(of_b): EndpointUse(in_flight=1)}
        await controller.models.remove("b")
        assert world.served("b") == []  # before anything was awaited further: publish comes before the planner wakes
        await trio.sleep(5)
        assert node.replicas.stopped == 0  # a request still runs there
        assert [r.state for r in controller.replicas() if r.id == of_b] == [ReplicaState.DRAINING]
        world.router.uses = {}
        await world.wait(lambda: node.replicas.stopped == 1)
        await world.wait(lambda: all(r.model != "b" for r in controller.replicas()))
        assert node.replicas.started == starts
        assert len(world.served("a")) == 1

    run_world(main)


def test_a_stop_waits_for_a_router_that_has_not_acknowledged_until_the_deadline() -> None:
    async def main(world: World) -> None:
        controller = await world.start_control(model("a"))
        node = await world.add_node("n1")
        await world.wait(lambda: len(world.served("a")) == 1)
        world.router.acknowledges = False
        await controller.models.scale("a", 0)
        await trio.sleep(world.settings.route.drain_s - 1)
        assert node.replicas.stopped == 0
        await world.wait(lambda: node.replicas.stopped == 1)

    run_world(main)


def test_scaling_starts_one_more_and_takes_away_the_youngest() -> None:
    async def main(world: World) -> None:
        controller = await world.start_control(model("a"))
        await world.add_node("n1")
        await world.wait(lambda: len(world.served("a")) == 1)
        (first,) = world.ready("a")
        await trio.sleep(10)
        await controller.models.scale("a", 2)
        await world.wait(lambda: len(world.served("a")) == 2)
        await controller.models.scale("a", 1)
        await world.wait(lambda: world.process_ends == 1)
        assert world.ready("a") == [first]
        with pytest.raises(Invalid):
            await controller.models.scale("a", 99)

    run_world(main)


def test_restarting_the_control_plane_starts_and_stops_nothing() -> None:
    async def main(world: World) -> None:
        await world.start_control(model("a", 2), model("b", 3))
        for name in ("n1", "n2", "n3"):
            await world.add_node(name)
        await world.wait(lambda: len(world.served("a")) == 2 and len(world.served("b")) == 3)
        before = (world.process_starts, world.process_ends)
        lists = len(world.router.history)
        controller = await world.restart_control()
        await world.wait(lambda: len(world.ready("a")) == 2 and len(world.ready("b")) == 3)
        await trio.sleep(120)
        assert (world.process_starts, world.process_ends) == before
        assert all(len(endpoints.endpoints) == 5 for _, endpoints in world.router.history[lists:])
        assert controller.leadership.epoch == 2
        assert world.router.history[-1][0].token.epoch == 2
        assert len(world.router.history) > lists

    run_world(main)


def test_nothing_is_placed_while_a_known_node_has_not_answered_within_its_grace() -> None:
    async def main(world: World) -> None:
        await world.start_control(model("a"))
        await world.add_node("n1")
        await world.add_node("n2")
        await world.wait(lambda: len(world.served("a")) == 1)
        (replica,) = world.ready("a")
        holder = next(name for name, node in world.nodes.items() if node.replicas.reports())
        world.kill_agent(holder)
        await world.restart_control()
        await trio.sleep(50)
        assert world.process_starts == 1  # the engine may well still run on the silent node
        await world.wait(lambda: world.process_starts == 2)
        world.start_agent(holder)  # it comes back with the replica that was given up: one too many, and one goes
        await world.wait(lambda: world.process_ends == 1)
        await trio.sleep(60)
        assert (world.process_starts, world.process_ends) == (2, 1)
        assert len(world.ready("a")) == 1
        assert replica

    run_world(main)


def test_a_restarted_agent_keeps_its_replicas() -> None:
    async def main(world: World) -> None:
        await world.start_control(model("a"))
        await world.add_node("n1")
        await world.wait(lambda: len(world.served("a")) == 1)
        served = world.served("a")
        world.kill_agent("n1")
        await trio.sleep(5)
        assert world.served("a") == served
        world.start_agent("n1")
        await trio.sleep(60)
        assert world.served("a") == served
        assert (world.process_starts, world.process_ends) == (1, 0)

    run_world(main)


def test_a_lost_nodes_replicas_are_placed_elsewhere() -> None:
    async def main(world: World) -> None:
        await world.start_control(model("a"))
        await world.add_node("n1")
        await world.wait(lambda: len(world.served("a")) == 1)
        await world.add_node("n2")
        world.kill_agent("n1")
        await trio.sleep(25)
        assert world.process_starts == 1
        await world.wait(lambda: world.nodes["n2"].replicas.started == 1)
        await world.wait(lambda: len(world.ready("a")) == 1)

    run_world(main)


def test_why_a_replica_is_where_it_is_stays_known_for_as_long_as_it_is_there() -> None:
    async def main(world: World) -> None:
        controller = await world.start_control(model("big", 1, memory_mib=200_000))
        await world.add_node("n1", facility="east")
        await world.wait(lambda: len(world.served("big")) == 1)
        await world.add_node("n2", facility="east")
        await world.add_node("n3", facility="west")
        await world.wait(lambda: sum(node.connected for node in controller.observe().nodes) == 3)
        await controller.models.apply((model("a", 1, memory_mib=100_000),))
        await world.wait(lambda: len(world.served("a")) == 1)
        await trio.sleep(60)  # many plans later
        (replica,) = world.ready("a")
        why = controller.explain(f"replica/{replica}")
        placed = (
            "1 wanted, 0 running or starting; 100000 MiB (the profile's memory_mib) on cpu of n2, the best of 2 nodes that fit: "
            "0 replicas of the model on it and 0 in facility 'east', 162144 MiB left beside it; 1 does not fit"
        )
        assert why.text == f"ready on n2, profile 'p0', 100000 MiB on cpu, port 20000; placed here because: {placed}"
        assert [(one.node, one.filter, one.text) for one in why.rejections] == [
            ("n3", Filter.SCORE, "it fits as well, and n2 comes first by name"),
            ("n1", Filter.MEMORY, "needs 100000 MiB by the profile's memory_mib; free are 62144 of 262144 MiB"),
        ]
        (event,) = [e for e in await world.store_events() if (e.kind, e.object) == ("replica.placed", f"replica/{replica}")]
        assert event.text == f"{replica} is placed on n2 (cpu, port 20000): {placed}"
        again = await world.restart_control()
        await world.wait(lambda: len(world.ready("a")) == 1)
        assert again.explain(f"replica/{replica}") == why
        await again.nodes.drain("n2", None)
        await world.wait(lambda: bool(again.reconciler.reasons.get(f"replica/{replica}")))
        leaving = again.explain(f"replica/{replica}")
        assert "it is to leave" in leaving.text
        assert leaving.text.endswith(f"placed here because: {placed}")

    run_world(main)


def test_which_part_of_the_score_decided_is_told_of_each_node_that_fits_too() -> None:
    async def main(world: World) -> None:
        controller = await world.start_control(model("a"))
        for name, facility in (("n1", "east"), ("n2", "east"), ("n3", "west"), ("n4", "north")):
            await world.add_node(name, facility=facility, devices=gpus(4 if name == "n4" else 2, name))
        await world.wait(lambda: len(world.served("a")) == 1)
        await controller.models.scale("a", 2)
        await world.wait(lambda: len(world.served("a")) == 2)
        second = next(replica for replica in controller.replicas() if "1 running or starting" in replica.report.order.placement.text)
        told = {one.node: one.text for one in controller.explain(f"replica/{second.id}").rejections}
        assert told == {
            "n4": "it has 4 idle GPUs, n3 has 2: the fewest go first",
            "n2": "facility 'east' has 1 replica of the model, 'west' has 0",
            "n1": "facility 'east' has 1 replica of the model, 'west' has 0",
        }
        await controller.models.scale("a", 4)
        await world.wait(lambda: len(world.served("a")) == 4)
        texts = {one.text for replica in controller.replicas() for one in controller.explain(f"replica/{replica.id}").rejections}
        assert "it has 1 replica of the model, n2 has 0" in texts

    run_world(main)


def test_a_lost_node_and_its_return_are_in_the_history() -> None:
    async def main(world: World) -> None:
        controller = await world.start_control()
        await world.add_node("n1")
        await world.add_node("n2")
        await world.wait(lambda: sum(node.state is NodeState.READY for node in controller.observe().nodes) == 2)
        world.kill_agent("n1")
        await trio.sleep(100)
        world.start_agent("n1")
        await trio.sleep(60)
        told = [(e.kind, e.object, e.level) for e in await world.store_events() if e.kind in ("node.lost", "node.back")]
        assert told == [("node.lost", "node/n1", Level.WARNING), ("node.back", "node/n1", Level.INFO)]
        lost, back = [e for e in await world.store_events() if e.kind in ("node.lost", "node.back")]
        assert lost.text == "node n1 is lost: silent for 30 s"
        silent_s = int(re.fullmatch(r"node n1 is back; it was silent for (\d+) s", back.text)[1])
        assert 95 <= silent_s <= 115
        assert 65 <= back.at - lost.at <= 85

    run_world(main)


def test_many_nodes_lost_at_once_make_a_few_events_with_how_many_and_the_first_few() -> None:
    async def main(world: World) -> None:
        controller = await world.start_control()
        names = [f"n{number:03}" for number in range(60)]
        for name in names:
            await world.add_node(name)
        await world.wait(lambda: sum(node.state is NodeState.READY for node in controller.observe().nodes) == 60)
        for name in names:
            world.kill_agent(name)
        await trio.sleep(60)
        lost = [event for event in await world.store_events() if event.kind == "node.lost"]
        assert 1 <= len(lost) <= 5
        counted = sum(int(event.text.split()[0]) if event.object == "nodes" else 1 for event in lost)
        assert counted == 60
        many = next(event for event in lost if event.object == "nodes")
        assert re.fullmatch(r"\d+ nodes are lost: silent for 3\d s or longer: (n\d+, ){4}n\d+ and \d+ more", many.text), many.text
        found = status_view(controller)["problems"]
        assert len(found) == 1
        assert re.fullmatch(r"60 nodes are lost: silent for \d+ s or longer: n000, n001, n002, n003, n004 and 55 more", found[0])
        for name in names:
            world.start_agent(name)
        await trio.sleep(60)
        back = [event for event in await world.store_events() if event.kind == "node.back"]
        assert sum(int(event.text.split()[0]) if event.object == "nodes" else 1 for event in back) == 60
        assert len(back) <= 5

    run_world(main)


def test_a_failed_model_is_one_problem_and_lost_nodes_are_one_cause() -> None:
    async def main(world: World) -> None:
        broken = Behaviour(load_s=lambda order: 0.1, crashes=lambda order, attempt: order.model == "speech")
        controller = await world.start_control(model("speech"), model("wide", memory_mib=200_000), model("wider", 3, memory_mib=200_000))
        for name in ("n1", "n2", "n3"):
            await world.add_node(name, behaviour=broken, devices=gpus(0, name))
            world.nodes[name].replicas.behaviour = broken
        await world.wait(lambda: sum(r.state is ReplicaState.FAILED for r in controller.replicas()) == 3)
        await trio.sleep(5)
        world.kill_agent("n2")
        await trio.sleep(3)
        world.kill_agent("n3")
        await trio.sleep(60)
        problems = status_view(controller)["problems"]
        (speech,) = [problem for problem in problems if "speech" in problem]
        assert speech.startswith("model speech: 0 of 1 ready, failed: 1 wanted, 0 running or starting; no node takes one more: ")
        assert "exited with code 1: simulated crash" in speech
        (wider,) = [problem for problem in problems if "model wider" in problem]
        assert "2 nodes: the node is lost" in wider
        assert wider.startswith("model wider: 0 of 3 ready, pending: 3 wanted, 0 running or starting; no node takes one more: ")

    run_world(main)


def test_draining_a_node_moves_its_replicas_first_and_stops_them_after() -> None:
    async def main(world: World) -> None:
        controller = await world.start_control(model("a"))
        await world.add_node("n1")
        await world.wait(lambda: len(world.served("a")) == 1)
        await controller.nodes.drain("n1", None)
        await trio.sleep(60)
        assert len(world.served("a")) == 1  # the last ready replica stays while nobody else can take it
        await world.add_node("n2")
        await world.wait(lambda: world.nodes["n1"].replicas.stopped == 1)
        assert world.nodes["n2"].replicas.started == 1
        assert all(endpoints.endpoints for _, endpoints in world.router.history[3:])

    run_world(main)


def test_an_order_for_one_replica_to_go_outlives_the_control_plane() -> None:
    async def main(world: World) -> None:
        controller = await world.start_control(model("a"))
        await world.add_node("n1", behaviour=Behaviour(load_s=lambda order: 20.0))
        await world.wait(lambda: len(world.served("a")) == 1)
        (first,) = world.ready("a")
        await controller.drain_replica(first)
        await trio.sleep(2)
        assert "asked to go" in controller.replica(first).report.reason
        await world.restart_control()
        await world.wait(lambda: len(world.served("a")) == 1 and world.served("a") != [first])
        await trio.sleep(60)
        assert first not in world.served("a")
        assert world.process_starts == 2
        assert all(endpoints.endpoints for _, endpoints in world.router.history[3:])

    run_world(main)


def test_scaling_a_model_of_a_plain_number_moves_its_bounds_along_each_time() -> None:
    async def main(world: World) -> None:
        controller = await world.start_control(attrs.evolve(model("a"), replicas=ReplicaCounts(1, 1, 1)))
        for count in (0, 3, 1, 2):
            await controller.models.scale("a", count)
            assert controller.models.get("a").replicas == ReplicaCounts(count, count, count)

    run_world(main)


def test_a_held_facility_gets_nothing_new() -> None:
    async def main(world: World) -> None:
        controller = await world.start_control()
        await world.add_node("n1", facility="room-1")
        await controller.holds.add(Hold("room-1", "works"))
        await controller.models.apply((model("a"),))
        await trio.sleep(10)
        assert world.process_starts == 0
        assert world.router.endpoints.absences[0].reason is AbsenceReason.HELD
        await controller.holds.remove("room-1")
        await world.wait(lambda: len(world.served("a")) == 1)

    run_world(main)


def test_a_changed_profile_is_rolled_out_one_at_a_time_with_traffic_served() -> None:
    async def main(world: World) -> None:
        controller = await world.start_control(model("a", 2))
        await world.add_node("n1")
        await world.wait(lambda: len(world.served("a")) == 2)
        old = set(world.served("a"))
        marker = len(world.router.history)
        await controller.models.apply((model("a", 2, args=("--new",)),))
        await world.wait(lambda: len(world.served("a")) == 2 and not old & set(world.served("a")))
        assert all(len(endpoints.endpoints) >= 2 for _, endpoints in world.router.history[marker:])

    run_world(main)


def test_an_update_stops_at_its_first_failure_and_the_old_replicas_go_on() -> None:
    async def main(world: World) -> None:
        controller = await world.start_control(model("a", 2))
        await world.add_node(
            "n1", behaviour=Behaviour(load_s=lambda order: 0.2, crashes=lambda order, attempt: "--bad" in order.profile.args)
        )
        await world.wait(lambda: len(world.served("a")) == 2)
        old = world.served("a")
        await controller.models.apply((model("a", 2, args=("--bad",)),))
        await world.wait(lambda: any(r.state is ReplicaState.FAILED for r in controller.replicas()))
        await trio.sleep(300)
        assert world.served("a") == old
        assert "the update has stopped" in controller.explain("model/a").text
        await controller.models.apply((model("a", 2),))  # taking it back leaves the old ones where they are
        await trio.sleep(60)
        assert world.served("a") == old
        assert [r.state for r in controller.replicas()] == [ReplicaState.READY] * 2

    run_world(main)


def test_a_model_changed_on_a_full_node_is_swapped() -> None:
    async def main(world: World) -> None:
        of = {"engine": "vllm", "command": (), "checkpoint": "/x", "gpus": 1}
        controller = await world.start_control(model("a", 1, **of))
        await world.add_node("n1", devices=gpus(1, "n1"))
        await world.wait(lambda: len(world.served("a")) == 1)
        old = world.served("a")
        await controller.models.apply((model("a", 1, **of, args=("--new",)),))
        await world.wait(lambda: len(world.served("a")) == 1 and world.served("a") != old)

    run_world(main)


def test_removing_and_adding_a_model_again_ends_with_one_replica_whatever_the_timing() -> None:
    for pause in (0.0, 0.2, 1.0, 3.0):

        async def main(world: World, pause: float = pause) -> None:
            controller = await world.start_control(model("a"), model("b"))
            await world.add_node("n1")
            await world.wait(lambda: bool(world.served("a") and world.served("b")))
            of_b = world.served("b")
            await controller.models.remove("a")
            await trio.sleep(pause)
            await controller.models.apply((model("a"),))
            await world.wait(lambda: len(world.served("a")) == 1)
            await trio.sleep(60)
            assert len(world.ready("a")) == 1
            assert world.served("b") == of_b

        run_world(main)


def test_a_refused_start_is_believed_and_tried_again_later_without_a_storm() -> None:
    async def main(world: World) -> None:
        controller = await world.start_control(model("a"))
        missing = {"now": True}
        asked: list[float] = []

        def refuses(order):
            asked.append(trio.current_time())
            return Invalid("checkpoint missing: /x", code="checkpoint_missing") if missing["now"] else None

        await world.add_node("n1", behaviour=Behaviour(refuses=refuses))
        await trio.sleep(100)
        assert 2 <= len(asked) <= 5
        assert "checkpoint missing: /x" in controller.explain("model/a").rejections[0].text
        missing["now"] = False
        await world.wait(lambda: len(world.served("a")) == 1)

    run_world(main)


def test_a_taken_port_is_answered_with_another_port() -> None:
    async def main(world: World) -> None:
        await world.start_control(model("a"))
        await world.add_node(
            "n1", behaviour=Behaviour(refuses=lambda order: Conflict("port taken", code="port_taken") if order.port == 20000 else None)
        )
        await world.wait(lambda: len(world.served("a")) == 1)
        assert world.router.endpoints.endpoints[0].url.endswith(":20001")

    run_world(main)


def test_a_command_of_a_deposed_leader_is_refused_by_the_agent() -> None:
    async def main(world: World) -> None:
        controller = await world.start_control(model("a"))
        node = await world.add_node("n1")
        await world.wait(lambda: len(world.served("a")) == 1)
        (replica,) = world.ready("a")
        old = controller.leadership.token
        controller = await world.restart_control()
        await world.wait(lambda: len(world.ready("a")) == 1)
        stale = m.Command(attrs.evolve(old), "late", 1, m.StopReplica(replica, "from the grave"))
        controller.sessions.send_nowait(node.id, stale)
        await trio.sleep(10)
        assert node.replicas.stopped == 0
        assert world.served("a") == [replica]

    run_world(main)


def test_a_leader_that_meets_a_higher_epoch_acquires_above_it() -> None:
    async def main(world: World) -> None:
        controller = await world.start_control(model("a"))
        node = await world.add_node("n1")
        await world.wait(lambda: len(world.served("a")) == 1)
        elsewhere = FencingToken(controller.leadership.cluster_id, 41, "ctl-other")
        controller.sessions.send_nowait(node.id, m.LeaderHello(elsewhere))
        await trio.sleep(1)
        await controller.models.scale("a", 2)
        await world.wait(lambda: len(world.served("a")) == 2)
        assert controller.leadership.epoch == 42

    run_world(main)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"not json", "node evil sent bytes that are not JSON"),
        (b'{"type":"Nope"}', "node evil sent a message of type 'Nope', which this build does not know"),
        (b'{"type":"Inventory","facts":1}', "node evil sent a malformed Inventory: "),
        (b"[" * 100_000, "node evil sent bytes that are not JSON"),
        (
            b'{"type":"LeaderHello","token":{"cluster_id":"c1","epoch":9,"owner":"x"}}',
            "node evil sent LeaderHello, which an agent does not send",
        ),
    ],
)
def test_a_malformed_or_unexpected_message_ends_that_session_with_a_reason_and_disturbs_nobody(data: bytes, reason: str) -> None:
    async def main(world: World) -> None:
        controller = await world.start_control(model("a"))
        node = await world.add_node("n1")
        await world.wait(lambda: len(world.served("a")) == 1)
        mine, theirs = channel_pair("evil")
        world.nursery.start_soon(controller.sessions.run, theirs)
        facts = attrs.evolve(node.facts(), id="evil", name="evil", boot_id="x")
        await mine.send(m.AgentHello(facts, "", 0, ""))
        assert isinstance(await mine.receive(), m.ServerHello)
        await mine.send_bytes(data)
        while not isinstance(message := await mine.receive(), m.Goodbye):
            pass
        assert reason in message.text
        await trio.sleep(30)
        assert len(world.served("a")) == 1
        assert controller.sessions.connected() == (node.id,)

    run_world(main)


def test_a_cloned_identity_a_foreign_cluster_and_a_taken_name_are_turned_away() -> None:
    """Of cases B190 and B191: an agent that cannot be understood, and one that is another's double, are told why."""

    async def main(world: World) -> None:
        controller = await world.start_control()
        node = await world.add_node("n1")
        await world.wait(lambda: controller.sessions.connected() == (node.id,))

        async def knock(hello: m.AgentHello) -> m.Goodbye:
            mine, theirs = channel_pair("other")
            world.nursery.start_soon(controller.sessions.run, theirs)
            await mine.send(hello)
            message = await mine.receive()
            assert isinstance(message, m.Goodbye)
            assert message.final
            return message

        facts = node.facts()
        assert "cloned disk" in (await knock(m.AgentHello(attrs.evolve(facts, boot_id="other"), "", 0, ""))).text
        foreign = (await knock(m.AgentHello(attrs.evolve(facts, id="x", name="y"), "other", 0, ""))).text
        assert "belongs to cluster other" in foreign
        assert f"remove {FENCE_FILE} from the agent's data directory" in foreign
        assert "belongs to node" in (await knock(m.AgentHello(attrs.evolve(facts, id="x"), "", 0, ""))).text
        assert "speaks protocol" in (await knock(m.AgentHello(facts, "", 0, "", protocol=99))).text
        assert controller.sessions.connected() == (node.id,)

    run_world(main)


class _Doubles:
    """Processes that say they are node n1's agent, as the network shows them to the control plane."""

    def __init__(self, world: World, facts: NodeFacts) -> None:
        self.world, self.facts, self.controller = world, facts, world.control.controller

    async def dial(self, instance: str, *, boot_id: str = "", answers: bool = True) -> tuple[SimChannel, m.Message]:
        """The process's end of a new session, and the first word that it is told there. `answers`: it lives."""
        mine, theirs = channel_pair(instance)
        self.world.nursery.start_soon(self.controller.sessions.run, theirs)
        facts = attrs.evolve(self.facts, boot_id=boot_id or self.facts.boot_id)
        await mine.send(m.AgentHello(facts, "", 0, "", instance=instance))
        first = await mine.receive()
        if answers:
            self.world.nursery.start_soon(self._live, mine)
        return mine, first

    async def _live(self, channel: SimChannel) -> None:
        with contextlib.suppress(ChannelClosed):
            while True:
                message = await channel.receive()
                if isinstance(message, m.LogRequest):
                    await channel.send(m.LogChunk(message.request_id, 0, 0, 0, "", error="there is none"))
                await channel.send(m.Heartbeat(self.facts))

    def peers(self) -> list[str]:
        return list(self.controller.sessions.peers().values())


def run_doubles(main: Callable[[_Doubles], Awaitable[None]]) -> None:
    async def body(world: World) -> None:
        await world.start_control()
        node = await world.add_node("n1")
        await world.wait(lambda: world.control.controller.sessions.connected() == (node.id,))
        world.kill_agent("n1")
        await world.wait(lambda: not world.control.controller.sessions.connected())
        await main(_Doubles(world, node.facts()))

    run_world(body)


def test_of_two_agents_with_one_copied_data_directory_the_first_is_kept_and_it_is_said_once() -> None:
    """They used to throw each other's session out in turns, for as long as both ran, without a word."""

    async def main(doubles: _Doubles) -> None:
        _, hello = await doubles.dial("first")
        assert isinstance(hello, m.ServerHello)
        with capture_logs() as logs:
            for _ in range(5):
                _, refused = await doubles.dial("copy")
                assert isinstance(refused, m.Goodbye)
                assert (refused.code, refused.final) == ("node_twice", False)
                assert "copy of its data directory" in refused.text
                assert "at first" in refused.text
                assert "a data_dir of its own" in refused.text
        assert doubles.peers() == ["first"]
        assert not [entry for entry in logs if entry["event"] == "session closed"]
        assert len([entry for entry in logs if entry["log_level"] == "warning"]) == 1
        (event,) = [event for event in await doubles.world.store_events() if event.kind == "node.twice"]
        assert (event.object, event.level) == ("node/n1", Level.WARNING)
        assert "at first is kept" in event.text
        assert "at copy on the same machine" in event.text

    run_doubles(main)


def test_a_copy_that_was_turned_away_is_let_in_once_the_first_has_ended() -> None:
    async def main(doubles: _Doubles) -> None:
        first, _ = await doubles.dial("first")
        assert isinstance((await doubles.dial("copy"))[1], m.Goodbye)
        await first.close()
        await doubles.world.wait(lambda: not doubles.peers())
        assert isinstance((await doubles.dial("copy"))[1], m.ServerHello)
        # And whoever comes back then is the second of the two.
        assert isinstance((await doubles.dial("first"))[1], m.Goodbye)
        assert doubles.peers() == ["copy"]

    run_doubles(main)


def test_an_agent_that_dials_anew_replaces_its_half_open_session_at_once() -> None:
    async def main(doubles: _Doubles) -> None:
        await doubles.dial("first", answers=False)
        begun_s = trio.current_time()
        assert isinstance((await doubles.dial("first"))[1], m.ServerHello)
        assert trio.current_time() - begun_s < 0.1

    run_doubles(main)


@pytest.mark.parametrize("boot_id", ["", "boot-after"], ids=["same run of the machine", "power cut"])
def test_a_restarted_agent_does_not_wait_for_the_end_of_a_session_that_nobody_answers(boot_id: str) -> None:
    """After a power cut it used to be taken for a cloned disk, and turned away for good."""

    async def main(doubles: _Doubles) -> None:
        await doubles.dial("first", answers=False)
        begun_s = trio.current_time()
        assert isinstance((await doubles.dial("second", boot_id=boot_id))[1], m.ServerHello)
        assert trio.current_time() - begun_s <= ANSWER_S + 0.1
        assert doubles.peers() == ["second"]

    run_doubles(main)


def test_an_agent_killed_and_started_again_is_let_in_at_once() -> None:
    async def main(doubles: _Doubles) -> None:
        first, _ = await doubles.dial("first", answers=False)
        begun_s = trio.current_time()
        await first.close()  # the kernel does, of a process that is gone
        assert isinstance((await doubles.dial("second"))[1], m.ServerHello)
        assert trio.current_time() - begun_s < 0.1

    run_doubles(main)


def test_while_a_leader_warms_its_owner_is_shown() -> None:
    async def main(world: World) -> None:
        controller = Controller(
            world.machine,
            await FileStore.open(":memory:", world.machine.run_sync),
            SettingsInForce(Loaded(Settings())),
            Objects(Catalog()),
            candidacy=Candidacy.sole(ClusterId("c1"), OwnerId("ctl-1"), Path("/data")),
        )
        go_on = trio.Event()

        async def hold(epoch: int) -> None:
            await go_on.wait()

        controller.leadership.on_lead(hold)
        world.nursery.start_soon(controller.run)
        await world.wait(lambda: leader_view(controller)["role"] == "warming")
        shown = leader_view(controller)
        assert (shown["owner"], shown["holder"], shown["epoch"], shown["is_me"]) == ("ctl-1", "ctl", 1, False)
        go_on.set()
        await world.wait(lambda: leader_view(controller)["is_me"])

    run_world(main)


def test_storage_that_fails_as_a_whole_is_two_lines_though_an_engine_dies_meanwhile() -> None:
    """A full disk told of itself three times: the lease's file, the store's watch, and the events that waited."""

    async def main(world: World) -> None:
        controller = await world.start_control(model("a"))
        await world.add_node("n1")
        await world.wait(lambda: len(world.served("a")) == 1)
        full = Unavailable("storage unavailable: the disk is full", code=STORAGE_UNAVAILABLE)
        lease, run = controller.leadership._keeper._store, world.store._run
        alive = True

        class Full:
            async def read(self, role: str) -> LeaseRecord | None:
                if not alive:
                    raise Unknown("the disk is full", local_disk=True)
                return await lease.read(role)

            async def replace(self, role: str, expected: LeaseRecord | None, new: LeaseRecord) -> None:
                if not alive:
                    raise Unknown("the disk is full", local_disk=True)
                await lease.replace(role, expected, new)

        async def refuse(work: Callable[[], T]) -> T:
            if not alive:
                raise full
            return await run(work)

        controller.leadership._keeper._store, world.store._run = Full(), refuse
        with capture_logs() as logs:
            alive = False
            await world.wait(lambda: not controller.leadership.confirmed(world.machine.now_s()))
            (replica,) = world.ready("a")
            world.nodes["n1"].replicas.crash(replica)
            await world.wait(lambda: bool(world.store.trouble), "an event could not be stored")
            await trio.sleep(60)
            alive = True
            await world.wait(lambda: not world.store.trouble and controller.leadership.confirmed(world.machine.now_s()))
            await trio.sleep(30)
        told = [
            (entry["log_level"], entry["event"])
            for entry in logs
            if entry["log_level"] in ("warning", "error", "info") and "kind" not in entry
        ]
        assert told == [("warning", "the lease's store does not answer; whoever leads goes on"), ("info", BACK)]
        assert next(entry["after_s"] for entry in logs if entry["event"] == BACK) > 60
        await world.wait(lambda: len(world.served("a")) == 1)

    run_world(main)


def test_edits_race_by_revision() -> None:
    async def main(world: World) -> None:
        controller = await world.start_control()
        change = await controller.models.put(model("a"), 0)
        assert change.change == "created"
        with pytest.raises(PreconditionFailed):
            await controller.models.put(model("a", 2), 0)
        await controller.models.put(model("a", 2), change.revision)
        with pytest.raises(PreconditionFailed):
            await controller.models.put(model("a", 3), change.revision)
        with pytest.raises(NotFound, match="did you mean"):
            controller.models.get("aa")
        with pytest.raises(Invalid, match="already by model"):
            await controller.models.apply((attrs.evolve(model("b"), aliases=("a",)),))
        assert controller.models.catalog.get("a").replicas == ReplicaCounts(0, 10, 2)

    run_world(main)


def test_without_a_store_the_file_is_the_catalog_and_ctl_is_told_so() -> None:
    async def main(world: World) -> None:
        controller = await world.start_control(model("a"))
        await world.add_node("n1")
        await world.wait(lambda: len(world.served("a")) == 1)
        with pytest.raises(Conflict, match=r"/etc/llmgw\.toml"):
            await controller.models.apply((model("b"),))

    run_world(main, file="/etc/llmgw.toml")


def test_a_full_disk_is_known_until_it_has_room_again_though_nobody_orders_anything() -> None:
    async def main(world: World) -> None:
        full = False

        async def run(work: Callable[[], T]) -> T:
            if full:
                raise Unavailable("storage unavailable: the disk is full", code=STORAGE_UNAVAILABLE)
            return work()

        world.store = await FileStore.open(":memory:", run)
        controller = await world.start_control()
        await world.wait(lambda: controller.reconciler.plans > 0)
        full = True
        with pytest.raises(Unavailable):
            await controller.models.apply((model("a"),))
        await trio.sleep(60)
        assert "the disk is full" in controller.store.trouble
        full = False
        await world.wait(lambda: controller.store.trouble == "")

    run_world(main)


def test_the_same_list_is_not_sent_twice() -> None:
    async def main(world: World) -> None:
        await world.start_control(model("a"))
        await world.add_node("n1")
        await world.wait(lambda: len(world.served("a")) == 1)
        sent = len(world.router.history)
        await trio.sleep(120)
        assert len(world.router.history) == sent

    run_world(main)


def test_one_seed_gives_one_history() -> None:
    def history(seed: int) -> list[object]:
        seen: list[object] = []

        async def main(world: World) -> None:
            await world.start_control(model("a", 3), model("b", 2))
            for name in ("n1", "n2", "n3"):
                await world.add_node(name)
            await world.wait(lambda: len(world.served("a")) == 3 and len(world.served("b")) == 2)
            seen.extend((stamp, endpoints) for stamp, endpoints in world.router.history)

        run_world(main, seed)
        return seen

    assert history(5) == history(5)
    assert history(5) != history(6)


def test_an_engine_whose_program_the_settings_name_is_placed_where_the_agent_found_none() -> None:
    async def main(world: World) -> None:
        controller = await world.start_control(model("a", engine="vllm", command=(), checkpoint="/x"))
        node = await world.add_node("n1", engines=())
        await trio.sleep(10)
        assert "was not found on the node" in controller.explain("model/a").rejections[0].text
        document = with_keys(controller.in_force.document or EMPTY, {"engines.vllm.command": ["/opt/vllm"]})
        await controller.cluster_settings.write(document, 1, "", None, CLUSTER)
        await world.wait(lambda: len(world.served("a")) == 1)
        assert node.replicas.reports()[0].order.engine_command == ("/opt/vllm",)

    run_world(main)
