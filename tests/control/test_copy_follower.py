"""A standby's copy: it asks the leader for what is new, begins anew with each leader, and reads the replica while none tells."""

from __future__ import annotations

import attrs
import trio
import trio.testing
from structlog.testing import capture_logs

from llmgw.control.copy_follower import ASK_AGAIN_S, RESTORE_S, CopyFollower
from llmgw.domain.errors import LlmgwError, Unavailable
from llmgw.sim.machine import SimMachine
from llmgw.store.changes import Diverged
from llmgw.store.copies import News, Position


@attrs.define
class Record:
    epoch: int = 1
    base: str = "e/1-a"


@attrs.define(eq=False)
class Standby:
    """All that a follower asks of its control plane, and what it did."""

    machine: SimMachine = attrs.Factory(lambda: SimMachine(1))
    address: str = "http://leader"
    record: Record | None = attrs.Factory(Record)
    may_write: bool = False
    changed: trio.Event = attrs.Factory(trio.Event)
    position: Position = Position()
    answer: News | LlmgwError = attrs.Factory(lambda: News(Position(1, 0), (), b"whole"))
    diverges: bool = False
    asked: list[Position] = attrs.Factory(list)
    taken: list[News] = attrs.Factory(list)
    restored: list[str] = attrs.Factory(list)
    told: int = 0

    def leader_address(self) -> str:
        return self.address

    async def news(self, address: str, position: Position) -> News:
        self.asked.append(position)
        await self.machine.sleep_until(self.machine.now_s() + 1)  # the leader waits a moment for something new
        if isinstance(self.answer, LlmgwError):
            raise self.answer
        return self.answer

    async def follow(self, news: News) -> bool:
        if self.diverges:
            raise Diverged("not what was changed")
        self.taken.append(news)
        self.position = news.position
        return news.whole is not None or bool(news.changes)

    async def restore_copy(self, base: str) -> None:
        self.restored.append(base)
        self.position = Position()

    def tell(self) -> None:
        self.told += 1

    async def run(self, seconds: float) -> None:
        with trio.move_on_after(seconds):
            await CopyFollower(self.machine, self, self, self, self, self.tell).run()  # type: ignore[arg-type]


async def test_a_new_standby_takes_the_whole_and_then_what_is_new(autojump_clock):
    standby = Standby()
    await standby.run(1.5)
    standby.answer = News(Position(1, 2), (b"a", b"b"))
    await standby.run(1.5)
    standby.answer = News(Position(1, 2))
    await standby.run(1.5)
    assert standby.asked[0] == Position()
    assert standby.asked[2] == Position(1, 0)
    assert [len(news.changes) for news in standby.taken] == [0, 2, 0]
    assert standby.told == 2


async def test_of_another_leader_the_whole_is_wanted(autojump_clock):
    standby = Standby(record=Record(epoch=3), position=Position(2, 9), answer=News(Position(3, 1), (), b"whole"))
    await standby.run(1.5)
    assert standby.asked[0] == Position()


async def test_a_leader_that_has_been_succeeded_is_not_followed(autojump_clock):
    standby = Standby(record=Record(epoch=3), answer=News(Position(2, 9), (b"zombie",)))
    await standby.run(5)
    assert standby.taken == []


async def test_while_no_leader_tells_the_replica_is_read_now_and_then_and_that_is_told_once(autojump_clock):
    standby = Standby(answer=Unavailable("no answer"))
    with capture_logs() as logs:
        await standby.run(2.5 * RESTORE_S)
    assert standby.restored == ["e/1-a"] * 2
    assert standby.told == 2
    assert len([one for one in logs if "do not come" in one["event"]]) == 1
    standby.answer = News(Position(1, 0), (), b"whole")
    await standby.run(ASK_AGAIN_S + 1)
    assert standby.taken


async def test_a_copy_that_diverged_is_read_anew_at_once(autojump_clock):
    standby = Standby(diverges=True)
    await standby.run(1.5)
    assert standby.restored == ["e/1-a"]


async def test_without_a_leader_and_a_base_nothing_is_read(autojump_clock):
    standby = Standby(address="", record=Record(base=""))
    await standby.run(3 * RESTORE_S)
    assert (standby.asked, standby.restored) == ([], [])


async def test_a_leader_asks_nobody(autojump_clock):
    standby = Standby(may_write=True)
    await standby.run(3 * RESTORE_S)
    assert (standby.asked, standby.restored) == ([], [])
