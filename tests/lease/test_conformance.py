"""Every kind of `LeaseStore` against the one suite, and what tells a store that cannot keep a lease."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmgw.domain.errors import Invalid, Unavailable
from llmgw.lease.file import FileLeases
from llmgw.lease.probe import probe
from llmgw.lease.store import LeaseStore, Unknown
from llmgw.sim.lease_store import AWS, BROKEN_DIALECTS, DIALECTS, Bucket, Fault, SimLeases
from llmgw.sim.machine import SimMachine
from tests.lease.conformance import CHECKS, ROLE, Check
from tests.lease.machines import ThreadMachine
from tests.lease.records import later, record


@pytest.fixture(params=["file", *DIALECTS])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], LeaseStore]]:
    if request.param == "file":
        opened: list[FileLeases] = []

        def open_file() -> LeaseStore:
            opened.append(FileLeases(ThreadMachine(), tmp_path / "lease.db"))
            return opened[-1]

        yield open_file
        for one in opened:
            one.close()
        return
    machine = SimMachine(1)
    bucket = Bucket(lambda: 0.0, DIALECTS[request.param])
    yield lambda: SimLeases(machine, bucket)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_a_lease_store(check: Check, open_store: Callable[[], LeaseStore]):
    await check(open_store)


async def test_a_store_that_compares_passes_the_probe_and_again(open_store: Callable[[], LeaseStore]):
    await probe(SimMachine(2), open_store())
    await probe(SimMachine(3), open_store())


@pytest.mark.parametrize("name", BROKEN_DIALECTS)
async def test_a_store_that_ignores_conditions_is_refused(name: str, autojump_clock: object):
    machine = SimMachine(1)
    with pytest.raises(Invalid, match="cannot keep a lease") as refused:
        await probe(machine, SimLeases(machine, Bucket(machine.now_s, BROKEN_DIALECTS[name])))
    assert refused.value.code == "store_ignores_conditions"


async def test_a_store_that_does_not_answer_the_probe_is_unavailable_and_not_broken(autojump_clock: object):
    machine = SimMachine(1)
    leases = SimLeases(machine, Bucket(machine.now_s), lambda request: Fault(status=503))
    with pytest.raises(Unavailable, match="503"):
        await probe(machine, leases)


@pytest.mark.parametrize("status", [409, 403, 429, 500, 503])
async def test_an_answer_that_is_neither_yes_nor_no_is_unknown(status: int, autojump_clock: object):
    machine = SimMachine(1)
    bucket = Bucket(machine.now_s)
    leases = SimLeases(machine, bucket)
    await leases.replace(ROLE, None, one := record())
    leases.script = lambda request: Fault(status=status)
    with pytest.raises(Unknown, match=str(status)):
        await leases.replace(ROLE, one, later(one))
    with pytest.raises(Unknown):
        await leases.read(ROLE)
    assert len(bucket.writes) == 1


async def test_a_late_write_is_refused_once_somebody_else_has_written(autojump_clock: object):
    import trio

    machine = SimMachine(1)
    bucket = Bucket(machine.now_s)
    first, second = SimLeases(machine, bucket), SimLeases(machine, bucket)
    await first.replace(ROLE, None, one := record())
    assert await second.read(ROLE) == one
    first.script = lambda request: Fault(late_s=20.0)
    with trio.move_on_after(3.0) as gave_up:
        await first.replace(ROLE, one, later(one))
    assert gave_up.cancelled_caught
    await second.replace(ROLE, one, two := later(one, owner="b-1", epoch=2, tenure="t2"))
    await trio.sleep(30.0)
    assert await second.read(ROLE) == two


async def test_a_late_write_that_nobody_came_before_is_seen(autojump_clock: object):
    import trio

    machine = SimMachine(1)
    leases = SimLeases(machine, Bucket(machine.now_s, AWS))
    await leases.replace(ROLE, None, one := record())
    leases.script = lambda request: Fault(late_s=20.0)
    with trio.move_on_after(3.0):
        await leases.replace(ROLE, one, two := later(one))
    leases.script = lambda request: Fault()
    assert await leases.read(ROLE) == one
    await trio.sleep(20.0)
    assert await leases.read(ROLE) == two


async def test_equal_bytes_are_one_version_where_etags_are_hashes_and_so_every_write_differs(autojump_clock: object):
    machine = SimMachine(1)
    bucket = Bucket(machine.now_s, AWS)
    first, second = SimLeases(machine, bucket), SimLeases(machine, bucket)
    await first.replace(ROLE, None, one := record())
    await second.read(ROLE)
    await first.replace(ROLE, one, two := later(one))
    await first.replace(ROLE, two, one)  # a holder that wrote the same bytes again: nobody could tell
    await second.replace(ROLE, one, later(one))
