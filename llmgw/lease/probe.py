"""Does a store compare before it writes? Asked at the start: several stores answer 200 and ignore the condition.

Writes only under a role of its own, which nobody leads by.
"""

from __future__ import annotations

import contextlib
from typing import Final

import attrs
import trio

from llmgw.domain.errors import Invalid, Unavailable
from llmgw.domain.ids import ClusterId, OwnerId
from llmgw.domain.ports import Machine
from llmgw.lease.record import RANDOM_BYTES, LeaseRecord, RecordState
from llmgw.lease.store import LeaseStore, Lost, Unknown

PROBE_ROLE: Final = "probe"
RACERS: Final = 8  # writes at once of which one may succeed (R-B24)
TRIES: Final = 5  # another control plane may probe at the same time
PROBE_TTL_S: Final = 1.0  # nobody waits for this record


async def probe(machine: Machine, store: LeaseStore) -> None:
    """Returns when the store keeps its promises. Raises Invalid for one that does not, Unavailable for one that is silent."""
    try:
        for _ in range(TRIES):
            if await _probe(machine, store):
                return
    except Unknown as err:
        raise Unavailable(f"the lease's store cannot be tried out: {err.why}", code="lease_unavailable") from err
    raise Unavailable("the lease's store cannot be tried out: others write there all the time", code="lease_unavailable")


async def _probe(machine: Machine, store: LeaseStore) -> bool:
    """False: somebody else wrote between, and nothing is known."""

    def after(record: LeaseRecord | None) -> LeaseRecord:
        return _record(machine.fresh_hex(RANDOM_BYTES), 1 if record is None else record.seq + 1)

    before = await store.read(PROBE_ROLE)
    first, second = after(before), after(before)
    try:
        await store.replace(PROBE_ROLE, before, first)
    except Lost:
        return False
    if (shown := await store.read(PROBE_ROLE)) != first:
        if shown == before:
            raise _refused("a read does not show the write before it")
        return False
    await _expect_refusal(store, PROBE_ROLE, before, after(first), "a write that expects what was replaced is taken")
    if before is not None:
        await _expect_refusal(store, PROBE_ROLE, None, after(first), "a write that expects no object is taken where there is one")
    nowhere = f"{PROBE_ROLE}-{machine.fresh_hex(RANDOM_BYTES)}"
    await _expect_refusal(store, nowhere, first, second, "a write that expects an object is taken where there is none")
    return await _race(store, first, [after(first) for _ in range(RACERS)])


async def _race(store: LeaseStore, expected: LeaseRecord, racers: list[LeaseRecord]) -> bool:
    won: list[LeaseRecord] = []

    async def race(new: LeaseRecord) -> None:
        with contextlib.suppress(Lost, Unknown):  # a conflict of two writes (409) is Unknown: no is what was asked for
            await store.replace(PROBE_ROLE, expected, new)
            won.append(new)

    async with trio.open_nursery() as nursery:
        for new in racers:
            nursery.start_soon(race, new)
    if len(won) > 1:
        raise _refused(f"of {len(racers)} writes at once that expect the same object {len(won)} are taken")
    return len(won) == 1


async def _expect_refusal(store: LeaseStore, role: str, expected: LeaseRecord | None, new: LeaseRecord, what: str) -> None:
    try:
        await store.replace(role, expected, new)
    except Lost:
        return
    raise _refused(what)


def _refused(what: str) -> Invalid:
    return Invalid(f"the lease's store cannot keep a lease: {what}", code="store_ignores_conditions")


def _record(write_id: str, seq: int) -> LeaseRecord:
    record = LeaseRecord(ClusterId("probe"), 1, OwnerId("probe"), "probe", write_id, "", seq, PROBE_TTL_S)
    return attrs.evolve(record, state=RecordState.RELEASED)
