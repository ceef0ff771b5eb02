"""Over which session a router tells what clients have used: the leader's, where that one counts."""

from __future__ import annotations

import pytest
import trio

from llmgw.domain.ids import OwnerId
from llmgw.domain.usage import UsageBatch, UsageRow
from llmgw.protocol.router_messages import RouterHello, RouterReport, RouterWelcome, Standing, UsageReport, UsageTaken
from tests.router.test_follow import CLUSTER, A, B, World, pushed, receive, running, token, until

BATCH = UsageBatch("boot", 1, (UsageRow(3600, "k", "m", 1),))


async def test_usage_goes_to_the_leader_alone_and_after_a_change_to_the_next_one(autojump_clock: object) -> None:
    world = World()
    async with running(world, A, B):
        first, _ = await world.session(A)
        second, _ = await world.session(B, leads=False)
        taken: list[tuple[str, int]] = []
        world.follower.usage_taken = lambda *named: taken.append(named)
        assert not world.follower.tell_usage(BATCH), "nobody has said that it leads"
        await first.send(Standing(token(1)))
        await until(lambda: world.follower.tell_usage(BATCH), "the leader is heard")
        assert await receive(first, UsageReport) == UsageReport(BATCH)
        await first.send(UsageTaken("boot", 1))
        await until(lambda: taken == [("boot", 1)], "it is told to be taken")
        await second.send(pushed(token(2, "ctl-b"), 1, "e1"))
        await until(lambda: world.router.ids() == ("e1",), "another leads")
        assert world.follower.tell_usage(BATCH)
        assert await receive(second, UsageReport) == UsageReport(BATCH)
        await first.close()
        await second.close()
        await until(lambda: not world.follower.tell_usage(BATCH), "no session is open")


@pytest.mark.parametrize("protocol", [1, 2])
async def test_a_leader_of_a_build_that_does_not_count_is_told_nothing(autojump_clock: object, protocol: int) -> None:
    world = World()
    async with running(world):
        end = await world._mailbox(A)[1].receive()
        assert isinstance(await end.receive(), RouterHello)
        await end.send(RouterWelcome(CLUSTER, OwnerId("ctl-a"), 1, True, "0.0.9", protocol=protocol))
        await end.send(Standing(token(1)))
        for _ in range(3):  # the second report is sent by who has heard the leader
            await receive(end, RouterReport)
            await trio.sleep(0.5)
        assert world.follower.tell_usage(BATCH) == (protocol == 2)
