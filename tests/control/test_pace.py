"""A heartbeat that is changed in the settings: agents and control plane agree on it at once, and no session ends for it."""

from __future__ import annotations

import itertools

import pytest
import trio

from llmgw.domain.ids import NodeId
from llmgw.protocol import messages as m
from llmgw.settings.document import with_keys
from llmgw.settings.schema import ReconcileSettings, Settings
from llmgw.store.audit import CLUSTER
from tests.control.world import World, model, run_world


class Beats:
    """When each heartbeat of a node came, and how often it has opened a session."""

    def __init__(self, world: World) -> None:
        assert world.control is not None
        sessions = world.control.controller.sessions
        self.sessions = sessions
        self.at_s: list[float] = []
        self.opened: list[NodeId] = []
        sessions.on_open(self.opened.append)
        taken = sessions._take

        def take(session, message) -> None:
            if isinstance(message, m.Heartbeat):
                self.at_s.append(trio.current_time())
            taken(session, message)

        sessions._take = take

    def gaps_since(self, at_s: float) -> list[float]:
        times = [at_s, *(time for time in self.at_s if time >= at_s)]
        return [round(after - before, 2) for before, after in itertools.pairwise(times)]


async def set_heartbeat(world: World, seconds: float) -> None:
    assert world.control is not None
    writer = world.control.controller.cluster_settings
    version, document = await writer.newest()
    changed = with_keys(document, {"reconcile.heartbeat_s": seconds, "reconcile.node_lost_after_s": 3 * seconds})
    await writer.write(changed, version.version, "", None, CLUSTER)


@pytest.mark.parametrize(("before_s", "after_s"), [(2.0, 40.0), (40.0, 2.0), (10.0, 0.5), (0.5, 10.0), (20.0, 20.5)])
@pytest.mark.parametrize("into_s", [0.0, 0.9, 0.999])
def test_another_heartbeat_takes_effect_at_once_and_no_session_ends(before_s: float, after_s: float, into_s: float) -> None:
    """Whatever part of the old interval is over: the agent beats in the new one, and is not taken for silent meanwhile."""

    async def main(world: World) -> None:
        await world.start_control(model("a"))
        beats = Beats(world)
        await world.add_node("n1")
        await world.wait(lambda: len(world.served("a")) == 1)
        count = len(beats.at_s)
        await world.wait(lambda: len(beats.at_s) > count)
        await trio.sleep(into_s * before_s)
        changed_s = trio.current_time()
        await set_heartbeat(world, after_s)
        await trio.sleep(20 * max(before_s, after_s))
        gaps = beats.gaps_since(changed_s)
        assert gaps[0] <= after_s + 0.1
        assert all(abs(gap - after_s) <= 0.1 for gap in gaps[1:])
        assert beats.opened == [world.nodes["n1"].facts().id]
        assert len(world.ready("a")) == 1
        assert world.process_starts == 1
        assert "node.lost" not in [event.kind for event in await world.store_events()]

    run_world(main, settings=Settings(reconcile=ReconcileSettings(heartbeat_s=before_s, node_lost_after_s=3 * before_s)))


def test_an_agent_that_falls_silent_right_after_a_change_is_noticed_by_the_new_pace() -> None:
    async def main(world: World) -> None:
        await world.start_control(model("a"))
        beats = Beats(world)
        node = await world.add_node("n1")
        await world.wait(lambda: len(world.served("a")) == 1)
        node.machine.freeze()
        await set_heartbeat(world, 1.0)
        frozen_s = trio.current_time()
        await world.wait(lambda: not beats.sessions.connected())
        assert trio.current_time() - frozen_s <= 2 * 3 * 1.0 + 0.5

    run_world(main, settings=Settings(reconcile=ReconcileSettings(heartbeat_s=60, node_lost_after_s=180)))


def test_settings_that_leave_the_heartbeat_alone_say_nothing_to_agents() -> None:
    async def main(world: World) -> None:
        await world.start_control(model("a"))
        beats = Beats(world)
        await world.add_node("n1")
        await world.wait(lambda: len(world.served("a")) == 1)
        sent: list[object] = []
        send = beats.sessions.send_nowait
        beats.sessions.send_nowait = lambda node, message: (sent.append(message), send(node, message))[1]
        assert world.control is not None
        writer = world.control.controller.cluster_settings
        version, document = await writer.newest()
        await writer.write(with_keys(document, {"route.retries": 5}), version.version, "", None, CLUSTER)
        await trio.sleep(5)
        assert not any(isinstance(message, m.ServerHello) for message in sent)

    run_world(main)
