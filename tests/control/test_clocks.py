"""Wrong clocks: B200 and B201 of the field's cases. Durations are never judged by a time of day, and a wrong one is shown."""

from __future__ import annotations

import trio

from llmgw.admin.api.status import status_view
from llmgw.domain.node import NodeState
from tests.control.world import World, model, run_world


def test_a_node_whose_clock_is_wrong_by_minutes_is_heard_as_any_other_and_shown() -> None:
    async def main(world: World) -> None:
        controller = await world.start_control(model("a"))
        node = await world.add_node("n1")
        other = await world.add_node("n2")
        node.machine.wall_offset_s += 600
        other.machine.wall_offset_s -= 600
        await world.wait(lambda: len(world.served("a")) == 1)
        await trio.sleep(300)
        assert [one.state for one in controller.observe().nodes] == [NodeState.READY] * 2
        assert status_view(controller)["problems"] == [
            "node n1: its clock is 600 s ahead of this machine's",
            "node n2: its clock is 600 s behind this machine's",
        ]

    run_world(main)


def test_a_wall_clock_that_is_stepped_by_an_hour_fires_no_time_out_and_restarts_nothing() -> None:
    async def main(world: World) -> None:
        controller = await world.start_control(model("a", 2))
        await world.add_node("n1")
        await world.wait(lambda: len(world.served("a")) == 2)
        starts = world.process_starts
        for step_s in (3600.0, -7200.0, 3600.0):
            world.machine.wall_offset_s += step_s
            await trio.sleep(120)
        assert len(world.served("a")) == 2
        assert (world.process_starts, world.process_ends) == (starts, 0)
        assert [one.state for one in controller.observe().nodes] == [NodeState.READY]
        assert controller.leadership.transitions == 1

    run_world(main)


def test_a_control_plane_that_stood_still_for_long_gives_its_nodes_a_round_before_it_judges_them() -> None:
    """As after a suspend: nothing is lost for a silence that was its own."""

    async def main(world: World) -> None:
        controller = await world.start_control(model("a", 2))
        await world.add_node("n1")
        await world.wait(lambda: len(world.served("a")) == 2)
        starts = world.process_starts
        world.machine.freeze()
        await trio.sleep(600)
        world.machine.thaw()
        await trio.sleep(120)
        assert (world.process_starts, world.process_ends) == (starts, 0)
        assert [one.state for one in controller.observe().nodes] == [NodeState.READY]

    run_world(main)
