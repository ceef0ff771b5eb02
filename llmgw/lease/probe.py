"""Does a store compare before it writes? Asked at the start: several stores answer 200 and ignore the condition (R-B24).

Writes only under names of its own, drawn anew each time, which nobody else writes and nobody leads by; they are removed.
"""

from __future__ import annotations

import contextlib
from typing import Final, Protocol

import attrs
import structlog
import trio

from llmgw.domain.errors import Invalid, Unavailable
from llmgw.domain.ids import ClusterId, OwnerId
from llmgw.domain.ports import Machine
from llmgw.lease.record import RANDOM_BYTES, LeaseRecord, RecordState
from llmgw.lease.store import LeaseStore, Lost, Unknown

PROBE_ROLE: Final = "probe"  # what the names begin with
RACERS: Final = 8  # writes at once of which one may succeed
RACES_MAX: Final = 5  # a race that nobody has won says nothing: each may have met another's conflict
PROBE_S_MAX: Final = 60.0  # chosen: some 20 requests, of which a store that is loaded answers a few after seconds
REMOVE_S_MAX: Final = 5.0  # for what it leaves behind; 400 bytes that stay there harm nobody
PROBE_TTL_S: Final = 1.0  # nobody waits for these records
LEFT_BEHIND: Final = "what was written to try the lease's store out is left there"
log = structlog.get_logger("llmgw.lease")


class ProbedStore(LeaseStore, Protocol):
    async def remove(self, role: str) -> None:
        """Deletes what a probe wrote; no lease's record is ever deleted. Raises Unknown."""
        ...


async def probe(machine: Machine, store: ProbedStore, place: str) -> None:
    """Returns when the store keeps its promises. `place` names it in what is raised.

    Raises Invalid for one that does not, Unavailable for one that is silent.
    """
    names = [f"{PROBE_ROLE}-{machine.fresh_hex(RANDOM_BYTES)}" for _ in range(2)]
    tell = log.warning
    try:
        with trio.move_on_after(PROBE_S_MAX) as scope:
            await _Probe(machine, store, place).run(*names)
    except Unknown as err:
        tell = log.debug  # it is told already that the store does not answer
        raise Unavailable(f"the lease's store cannot be tried out: {err.why}", code="lease_unavailable") from err
    finally:
        with trio.move_on_after(REMOVE_S_MAX, shield=True) as removal:
            for name in names:
                try:
                    await store.remove(name)
                except (Unknown, Invalid) as err:
                    tell(LEFT_BEHIND, store=place, why=str(err))
        if removal.cancelled_caught:
            tell(LEFT_BEHIND, store=place, why="no answer in time")
    if scope.cancelled_caught:
        raise Unavailable(f"the lease's store cannot be tried out: {place} is too slow", code="lease_unavailable")


@attrs.frozen
class _Probe:
    machine: Machine
    store: ProbedStore
    place: str

    async def run(self, role: str, nowhere: str) -> None:
        first = self._record(1)
        await self._expect_done(role, None, first, "a write that expects no object is refused where there is none")
        if await self.store.read(role) != first:
            raise self._broken("a read does not show the write before it")
        await self._expect_refusal(role, None, self._record(1), "a write that expects no object is taken where there is one")
        second = self._record(2)
        await self._expect_done(role, first, second, "a write that expects what stands there is refused")
        await self._expect_refusal(role, first, self._record(2), "a write that expects what was replaced is taken")
        await self._expect_refusal(nowhere, first, self._record(2), "a write that expects an object is taken where there is none")
        for _ in range(RACES_MAX):
            if await self._race(role, second):
                return
        raise Unknown(f"{self.place}: of {RACERS} writes at once none is taken")

    async def _race(self, role: str, expected: LeaseRecord) -> bool:
        """Has one of them won? Raises Invalid when several have."""
        won: list[LeaseRecord] = []

        async def race(new: LeaseRecord) -> None:
            with contextlib.suppress(Lost, Unknown, Invalid):  # a conflict of two writes (409) is Unknown; the read below tells the rest
                await self.store.replace(role, expected, new)
                won.append(new)

        async with trio.open_nursery() as nursery:
            for _ in range(RACERS):
                nursery.start_soon(race, self._record(3))
        if len(won) > 1:
            raise self._broken(f"of {RACERS} writes at once that expect the same object {len(won)} are taken")
        standing = await self.store.read(role)
        if won and standing != won[0]:
            raise self._broken(f"of {RACERS} writes at once that expect the same object another than the first is taken, too")
        return standing != expected  # also one whose answer was lost

    async def _expect_done(self, role: str, expected: LeaseRecord | None, new: LeaseRecord, what: str) -> None:
        try:
            await self.store.replace(role, expected, new)
        except Lost as err:
            if err.current != new:  # what is under a fresh name is ours; something on the way has repeated the request
                raise self._broken(what) from err

    async def _expect_refusal(self, role: str, expected: LeaseRecord | None, new: LeaseRecord, what: str) -> None:
        try:
            await self.store.replace(role, expected, new)
        except Lost:
            return
        raise self._broken(what)

    def _record(self, seq: int) -> LeaseRecord:
        write_id = self.machine.fresh_hex(RANDOM_BYTES)
        record = LeaseRecord(ClusterId("probe"), 1, OwnerId("probe"), "probe", write_id, "", seq, PROBE_TTL_S)
        return attrs.evolve(record, state=RecordState.RELEASED)

    def _broken(self, what: str) -> Invalid:
        return Invalid(f"{self.place} cannot keep a lease: {what}", code="store_ignores_conditions")
