"""What every `LeaseStore` does, whatever it is made of. `open_store()` opens one more client of the same, empty store."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio

from llmgw.lease.record import LeaseRecord, RecordState
from llmgw.lease.store import LeaseStore, Lost
from tests.lease.records import later, record

ROLE = "control-plane"
OpenStore = Callable[[], LeaseStore]
Check = Callable[[OpenStore], Awaitable[None]]
CHECKS: list[Check] = []


def check(function: Check) -> Check:
    CHECKS.append(function)
    return function


async def refused(store: LeaseStore, expected: LeaseRecord | None, new: LeaseRecord) -> LeaseRecord | None:
    with pytest.raises(Lost) as lost:
        await store.replace(ROLE, expected, new)
    return lost.value.current


@check
async def a_record_that_was_never_written_is_absent(open_store: OpenStore) -> None:
    assert await open_store().read(ROLE) is None


@check
async def what_is_written_is_read_back_by_every_client(open_store: OpenStore) -> None:
    fields: dict[str, Any] = {"base": "e/1-ab", "settings_version": 7, "addr": "https://ctl-1:8081", "build": "1.2.3", "schema": 4}
    new = record(epoch=12, seq=34, owner="höst-1", state=RecordState.RELEASED, ttl_s=2.5, **fields)
    writer, reader = open_store(), open_store()
    await writer.replace(ROLE, None, new)
    assert await writer.read(ROLE) == new
    assert await reader.read(ROLE) == new


@check
async def a_record_is_made_only_where_there_is_none(open_store: OpenStore) -> None:
    first, second = open_store(), open_store()
    new = record()
    await first.replace(ROLE, None, new)
    assert await refused(second, None, record(owner="b-1")) == new
    assert await first.read(ROLE) == new


@check
async def a_record_is_replaced_only_as_it_is_expected(open_store: OpenStore) -> None:
    first, second = open_store(), open_store()
    one = record()
    await first.replace(ROLE, None, one)
    assert await second.read(ROLE) == one
    two = later(one)
    await first.replace(ROLE, one, two)
    assert await refused(second, one, later(one, owner="b-1")) == two
    await second.replace(ROLE, two, later(two))


@check
async def a_holder_may_renew_many_times_without_reading(open_store: OpenStore) -> None:
    store = open_store()
    held = record()
    await store.replace(ROLE, None, held)
    for _ in range(20):
        held, before = later(held), held
        await store.replace(ROLE, before, held)
    assert await open_store().read(ROLE) == held


@check
async def an_equal_place_in_the_order_is_not_the_same_record(open_store: OpenStore) -> None:
    first, second = open_store(), open_store()
    await first.replace(ROLE, None, one := record())
    twin = record()
    assert twin.order == one.order
    assert await refused(second, twin, later(twin)) == one


@check
async def a_record_that_is_expected_and_missing_is_refused(open_store: OpenStore) -> None:
    store = open_store()
    assert await refused(store, record(), record(seq=2)) is None
    assert await store.read(ROLE) is None


@check
async def roles_do_not_meet(open_store: OpenStore) -> None:
    store = open_store()
    await store.replace(ROLE, None, one := record())
    await store.replace("another", None, other := record(owner="b-1"))
    assert await store.read(ROLE) == one
    assert await store.read("another") == other


@check
async def of_many_writes_at_once_one_is_taken(open_store: OpenStore) -> None:
    setter = open_store()
    await setter.replace(ROLE, None, start := record())
    taken: list[LeaseRecord] = []

    async def race(store: LeaseStore, new: LeaseRecord) -> None:
        await store.read(ROLE)
        try:
            await store.replace(ROLE, start, new)
        except Lost:
            return
        taken.append(new)

    async with trio.open_nursery() as nursery:
        for number in range(8):
            nursery.start_soon(race, open_store(), later(start, owner=f"n-{number}"))
    assert len(taken) == 1
    assert await setter.read(ROLE) == taken[0]
