"""What ends a wait of the data path from outside, whoever has seen the reason first."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from llmgw.router.sweeper import Kick, Kicked, Waiter


async def _waiting(waiter: Waiter, ended: list[Kick]) -> None:
    try:
        await waiter.wait()
    except Kicked as kick:
        ended.append(kick.why)


@pytest.mark.parametrize("told", list(Kick))
async def test_a_hang_up_that_was_seen_while_the_task_slept_ends_its_wait_at_the_next_reason(told: Kick) -> None:
    waiter, ended = Waiter(), list[Kick]()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_waiting, waiter, ended)
        await trio.testing.wait_all_tasks_blocked()
        waiter.kicked = Kick.CLIENT_GONE  # a send has failed, in a callback
        waiter.kick(told)
        await trio.testing.wait_all_tasks_blocked()
        assert ended == [Kick.CLIENT_GONE]


async def test_an_expiry_is_only_for_a_task_that_waits() -> None:
    waiter = Waiter()
    waiter.kick(Kick.EXPIRED)
    waiter.wake()
    await waiter.wait()


@pytest.mark.parametrize("why", [Kick.CLIENT_GONE, Kick.STOPPING])
async def test_what_came_while_the_task_was_at_work_ends_its_next_wait(why: Kick) -> None:
    waiter = Waiter()
    waiter.kick(why)
    with pytest.raises(Kicked):
        await waiter.wait()
    assert waiter.kicked is (Kick.CLIENT_GONE if why is Kick.CLIENT_GONE else None)
