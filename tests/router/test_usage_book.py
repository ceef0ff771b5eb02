"""What a router has counted reaches a leader once: through lost answers, crashes, restarts and a disk that refuses."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest
import trio
from hypothesis import example, given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from llmgw.domain.usage import BATCH_ROWS_MAX, HOUR_S, UsageBatch, UsageRow, hour_of
from llmgw.router.usage import Tokens
from llmgw.router.usage_book import ROWS_MAX, BookState, UsageBook
from llmgw.router.usage_keeper import LAST_S, USAGE_FILE, USAGE_S, UsageKeeper
from llmgw.sim.machine import SimDisk, SimMachine

PATH = Path("/router") / USAGE_FILE
HOUR = 1_699_999_200


def test_an_answer_is_counted_in_the_hour_it_ended_in_by_its_key_and_model() -> None:
    book = UsageBook("b")
    book.add(HOUR + 3599.9, "team", "m", Tokens(5, 2, 3), unknown=False)
    book.add(HOUR + 3600.0, "team", "m", None, unknown=True)
    book.add(HOUR + 10.0, "team", "m", Tokens(1, 0, 1), unknown=False)
    book.add(HOUR + 10.0, "", "m", None, unknown=False)
    assert book.cut() == UsageBatch(
        "b", 1, (UsageRow(HOUR, "", "m", 1), UsageRow(HOUR, "team", "m", 2, 0, 6, 2, 4), UsageRow(HOUR + HOUR_S, "team", "m", 1, 1))
    )


def test_a_batch_stays_as_it_is_until_it_was_taken_whatever_comes_meanwhile() -> None:
    book = UsageBook("b")
    book.add(0.0, "k", "m", Tokens(1, 0, 1), unknown=False)
    first = book.cut()
    book.add(0.0, "k", "m", Tokens(7, 0, 7), unknown=False)
    assert book.cut() is first
    assert not book.taken("b", 2)
    assert not book.taken("other", 1)
    assert book.taken("b", 1)
    second = book.cut()
    assert second is not None
    assert (second.number, second.rows) == (2, (UsageRow(0, "k", "m", 1, 0, 7, 0, 7),))
    assert book.taken("b", 2)
    assert book.cut() is None


def test_more_rows_than_there_is_room_for_are_lost_with_a_count_and_known_ones_go_on() -> None:
    book = UsageBook("b")
    for number in range(ROWS_MAX + 3):
        book.add(0.0, f"k{number:06}", "m", None, unknown=False)
    book.add(0.0, "k000000", "m", None, unknown=False)
    assert book.lost == 3
    batch = book.cut()
    assert batch is not None
    assert (len(batch.rows), batch.rows[0]) == (BATCH_ROWS_MAX, UsageRow(0, "k000000", "m", 2))
    assert batch.fault() == ""


@pytest.mark.parametrize("wall_s", [-5.0, 0.0, 1e9 + 0.5, 1e12])
def test_an_hour_is_one_whatever_the_clock_says(wall_s: float) -> None:
    assert UsageRow(hour_of(wall_s), "k", "m").fault() == ""


# --- kept and told


@attrs.define
class Leader:
    """Counts as the store does: a batch of a number that was met changes nothing."""

    met: dict[str, int] = attrs.Factory(dict)
    requests: int = 0

    def count(self, batch: UsageBatch) -> None:
        assert batch.fault() == ""
        if batch.number > self.met.get(batch.boot, 0):
            self.met[batch.boot] = batch.number
            self.requests += sum(row.requests for row in batch.rows)


class LateDisk(SimDisk):
    """`late`: it says that it has failed when the file is there already."""

    late = False

    def write(self, path: Path, data: bytes) -> None:
        super().write(path, data)
        if self.late:
            raise OSError(5, "Input/output error")


def requests_of(state: BookState) -> int:
    waiting = state.waiting.rows if state.waiting is not None else ()
    return sum(row.requests for row in (*waiting, *state.open))


STEPS = st.sampled_from(("answer", "answers", "tell", "tell nobody", "tell, unanswered", "crash", "disk", "disk fails", "disk fails late"))


@given(st.lists(STEPS, max_size=40))
@example(["answer", "tell, unanswered", "answer", "crash", "tell"])
@example(["answer", "disk fails", "tell", "disk", "crash", "tell"])
def test_whatever_happens_nothing_is_counted_twice_and_only_what_a_crash_met_unsaved_is_lost(steps: list[str]) -> None:
    async def main() -> None:
        machine, leader = SimMachine(1), Leader()
        machine.disk = disk = LateDisk()
        heard: list[UsageBatch] = []
        answered = lost = unsaved = 0

        def tell(batch: UsageBatch) -> bool:
            heard.append(batch)
            return True

        keeper = UsageKeeper(machine, PATH, tell)
        for step in [*steps, "disk", *["tell"] * 4]:
            if step.startswith("answer"):
                count = 3 if step == "answers" else 1
                for number in range(count):
                    keeper.book.add(machine.wall_s(), f"k{number}", "m", Tokens(1, 0, 1), unknown=False)
                answered, unsaved = answered + count, unsaved + count
            elif step.startswith("tell"):
                await keeper.tell()
                unsaved = unsaved if disk.fail else 0
                for batch in heard:
                    if step != "tell nobody":
                        leader.count(batch)
                    if step == "tell":
                        keeper.taken(batch.boot, batch.number)
                heard.clear()
            elif step == "crash":
                lost, unsaved = lost + unsaved, 0
                keeper = UsageKeeper(machine, PATH, tell)
                await keeper.load()
            else:
                disk.fail, disk.late = OSError(28, "full") if step == "disk fails" else None, step == "disk fails late"
        assert requests_of(keeper.book.state()) == 0
        assert leader.requests == answered - lost

    with capture_logs():
        trio.run(main)


async def test_what_is_counted_is_told_and_saved_every_few_seconds(autojump_clock: object, nursery: trio.Nursery) -> None:
    machine = SimMachine(1)
    told: list[UsageBatch] = []
    keeper = UsageKeeper(machine, PATH, lambda batch: told.append(batch) is None)
    nursery.start_soon(keeper.run)
    keeper.book.add(machine.wall_s(), "k", "m", Tokens(1, 0, 1), unknown=False)
    await trio.sleep(USAGE_S * 1.5)
    assert [batch.number for batch in told] == [1]
    assert json.loads(machine.disk.files[PATH])["waiting"]["number"] == 1
    await trio.sleep(USAGE_S)
    assert [batch.number for batch in told] == [1, 1], "nobody has taken it"
    keeper.taken(told[0].boot, 1)
    await trio.sleep(USAGE_S)
    assert len(told) == 2
    assert json.loads(machine.disk.files[PATH])["waiting"] is None


@pytest.mark.parametrize("listens", ["a leader", "a leader that does not answer", "nobody"])
async def test_a_router_that_stops_tells_what_is_left_and_waits_for_a_leader_only_so_long(autojump_clock: object, listens: str) -> None:
    machine = SimMachine(1)
    told: list[UsageBatch] = []

    def tell(batch: UsageBatch) -> bool:
        told.append(batch)
        return listens != "nobody"

    keeper = UsageKeeper(machine, PATH, tell)
    for number in range(BATCH_ROWS_MAX + 1):
        keeper.book.add(machine.wall_s(), f"k{number}", "m", None, unknown=False)

    async def answer() -> None:
        while True:
            await trio.sleep(0.05)
            if listens == "a leader" and told:
                keeper.taken(told[-1].boot, told[-1].number)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer)
        began_s = trio.current_time()
        await keeper.close()
        took_s = trio.current_time() - began_s
        nursery.cancel_scope.cancel()
    if listens == "a leader":
        assert [batch.number for batch in told] == [1, 2]
        assert json.loads(machine.disk.files[PATH]) == {"format": 1, "waiting": None, "open": []}
        assert took_s < LAST_S
    else:
        assert took_s <= (0.0 if listens == "nobody" else LAST_S + 0.2)
        again = UsageKeeper(machine, PATH, tell)
        await again.load()
        assert requests_of(again.book.state()) == BATCH_ROWS_MAX + 1


@pytest.mark.parametrize(
    "junk",
    [
        b"",
        b"{",
        b"[]",
        b'{"format":2}',
        b'{"format":1,"open":[{"hour":1,"key":"k","model":"m"}]}',
        b'{"format":1,"waiting":{"boot":"","number":1,"rows":[]}}',
    ],
)
async def test_a_file_that_cannot_be_read_is_told_and_as_good_as_none(autojump_clock: object, junk: bytes) -> None:
    machine = SimMachine(1)
    machine.disk.files[PATH] = junk
    keeper = UsageKeeper(machine, PATH, lambda batch: True)
    with capture_logs() as logs:
        await keeper.load()
    assert ["cannot be read" in line["event"] for line in logs] == [True]
    keeper.book.add(machine.wall_s(), "k", "m", None, unknown=False)
    assert await keeper.tell()


async def test_a_full_disk_is_told_once_and_made_good_later(autojump_clock: object, nursery: trio.Nursery) -> None:
    machine = SimMachine(1)
    told: list[UsageBatch] = []
    keeper = UsageKeeper(machine, PATH, lambda batch: told.append(batch) is None)
    machine.disk.fail = OSError(28, "No space left on device")
    keeper.book.add(machine.wall_s(), "k", "m", None, unknown=False)
    with capture_logs() as logs:
        nursery.start_soon(keeper.run)
        await trio.sleep(USAGE_S * 4)
        assert told == []
        machine.disk.fail = None
        await trio.sleep(USAGE_S * 2)
    assert told
    assert [line["log_level"] for line in logs] == ["error", "info"]
