"""Usage in the store: a batch counts once, sums are of the hours that were asked for, and what is old goes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from datetime import datetime, timedelta, timezone

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from llmgw.domain.errors import StaleEpoch
from llmgw.domain.usage import HOUR_S, UsageBatch, UsageRow
from llmgw.store import usage
from llmgw.store.connection import MEMORY, FileStore
from llmgw.store.usage import By
from tests.store.runners import inline

HOUR = 1_699_999_200
ONE = UsageRow(HOUR, "a", "m", 2, 1, 10, 3, 5)


def batch(number: int, *rows: UsageRow, boot: str = "r1") -> UsageBatch:
    return UsageBatch(boot, number, rows)


async def test_rows_add_up_and_are_summed_by_what_is_asked_for(store):
    later = UsageRow(HOUR + HOUR_S, "b", "m", 1, 0, 7, 0, 1)
    await usage.add(store, 0, [batch(1, ONE, UsageRow(HOUR, "", "n", 1)), batch(1, later, ONE, boot="r2")], 1.0)
    assert await usage.sums(store, By.KEY_AND_MODEL) == (
        UsageRow(0, "", "n", 1),
        UsageRow(0, "a", "m", 4, 2, 20, 6, 10),
        UsageRow(0, "b", "m", 1, 0, 7, 0, 1),
    )
    assert await usage.sums(store, By.MODEL) == (UsageRow(0, "", "m", 5, 2, 27, 6, 11), UsageRow(0, "", "n", 1))
    assert [row.key for row in await usage.sums(store, By.KEY)] == ["", "a", "b"]
    assert [(row.hour, row.requests) for row in await usage.sums(store, By.HOUR)] == [(HOUR, 5), (HOUR + HOUR_S, 1)]
    assert [row.key for row in await usage.sums(store, By.KEY, HOUR + 1)] == ["b"]
    assert [row.key for row in await usage.sums(store, By.KEY, 0, HOUR + HOUR_S)] == ["", "a"]


async def test_a_batch_that_is_told_again_changes_nothing_and_neither_does_an_older_one(store):
    for number in (1, 1, 2, 1, 2):
        await usage.add(store, 0, [batch(number, ONE)], 1.0)
    await usage.add(store, 0, [batch(1, ONE, boot="r2"), batch(1, ONE, boot="r2")], 1.0)
    assert (await usage.sums(store, By.MODEL))[0].requests == 3 * ONE.requests


async def test_who_does_not_lead_any_more_counts_nothing(store):
    await store.claim_epoch(5, "ctl-2")
    with pytest.raises(StaleEpoch):
        await usage.add(store, 4, [batch(1, ONE)], 1.0)
    await usage.add(store, 5, [batch(1, ONE)], 1.0)
    assert (await usage.sums(store, By.MODEL))[0].requests == ONE.requests


async def test_what_is_old_goes_with_the_batches_that_can_hold_nothing_younger(store):
    await usage.add(store, 0, [batch(1, ONE)], HOUR + 10.0)
    await usage.add(store, 0, [batch(1, UsageRow(HOUR + HOUR_S, "a", "m", 1), boot="r2")], HOUR + HOUR_S + 10.0)
    assert await usage.trim(store, 0, HOUR + 60.0) == 1
    await usage.add(store, 0, [batch(1, ONE, boot="r2")], HOUR + HOUR_S + 10.0)
    assert [row.hour for row in await usage.sums(store, By.HOUR)] == [HOUR + HOUR_S]


@given(
    st.lists(st.integers(0, 72), min_size=1, max_size=20),
    st.sampled_from((-570, -480, 0, 330, 345, 540)),
)
def test_days_of_any_zone_one_after_the_other_add_up_to_the_whole(hours: list[int], offset_min: int) -> None:
    zone = timezone(timedelta(minutes=offset_min))
    start = datetime(2030, 1, 1, tzinfo=zone)

    async def main() -> None:
        store = await FileStore.open(MEMORY, inline)
        first = int(datetime(2030, 1, 1, tzinfo=timezone.utc).timestamp())  # noqa: UP017 - beside a zone of its own making
        rows = [UsageRow(first + hour * HOUR_S, "k", "m", 1) for hour in hours]
        for number, row in enumerate(rows, 1):
            await usage.add(store, 0, [batch(number, row)], 0.0)
        days = [int((start + timedelta(days=day)).timestamp()) for day in range(-1, 6)]
        daily = [await usage.sums(store, By.KEY, since, until) for since, until in itertools.pairwise(days)]
        assert sum(row.requests for found in daily for row in found) == len(hours)
        store.close()

    trio.run(main)


COUNTS = st.integers(0, 5)
ROWS = st.builds(UsageRow, st.sampled_from((0, HOUR)), st.sampled_from(("", "a", "é")), st.sampled_from(("m", "n")), *[COUNTS] * 5)


@given(st.lists(st.tuples(st.sampled_from(("r1", "r2")), st.lists(ROWS, max_size=4)), max_size=8), st.data())
def test_batches_that_come_in_their_order_and_any_of_them_again_count_once(
    told: list[tuple[str, list[UsageRow]]], again: st.DataObject
) -> None:
    numbers = {"r1": 0, "r2": 0}
    batches: list[UsageBatch] = []
    for boot, rows in told:
        numbers[boot] += 1
        batches.append(batch(numbers[boot], *rows, boot=boot))

    def total(rows: Iterable[UsageRow]) -> tuple[int, ...]:
        found = tuple(rows)
        return tuple(sum(getattr(row, name) for row in found) for name in ("requests", "unknown", "prompt", "cached", "completion"))

    async def main() -> None:
        store = await FileStore.open(MEMORY, inline)
        for place, one in enumerate(batches):
            repeats = again.draw(st.lists(st.sampled_from(batches[:place]), max_size=2)) if place else []
            await usage.add(store, 0, [*repeats, one], 0.0)
        assert total(await usage.sums(store, By.KEY_AND_MODEL)) == total(row for one in batches for row in one.rows)
        store.close()

    trio.run(main)
