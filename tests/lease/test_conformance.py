"""Every kind of `LeaseStore` against the one suite, and what tells a store that cannot keep a lease."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

from llmgw.domain.errors import Invalid, Unavailable
from llmgw.lease.file import FileLeases
from llmgw.lease.object_leases import ObjectLeases
from llmgw.lease.probe import ProbedStore, probe
from llmgw.lease.record import decode
from llmgw.lease.store import LeaseStore, Unknown
from llmgw.lease.timings import LeaseTimings
from llmgw.sim.lease_store import AWS, BROKEN_DIALECTS, DIALECTS, Bucket, Fault, SimLeases
from llmgw.sim.machine import SimMachine
from tests.lease.conformance import CHECKS, ROLE, Check
from tests.lease.machines import ThreadMachine
from tests.lease.places import scripted_place, seaweed_place
from tests.lease.records import later, record
from tests.s3_server import Asked, error, s3_server

PLACE = "s3://place"


# Of many writers at once a real store lets some wait for seconds.
PATIENT = LeaseTimings(ttl_s=180.0, renew_s=60.0, request_timeout_s=30.0)
# Those that several machines can share: in memory, our own server that speaks the same dialects over HTTP, and a real one.
SHARED = [*(f"sim {name}" for name in DIALECTS), *(f"http {name}" for name in DIALECTS), "seaweed"]


@contextlib.contextmanager
def shared_store(which: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], ProbedStore]]:
    kind, _, name = which.partition(" ")
    if kind == "sim":
        machine = SimMachine(1)
        bucket = Bucket(lambda: 0.0, DIALECTS[name])
        yield lambda: SimLeases(machine, bucket)
    elif kind == "http":
        with s3_server(DIALECTS[name]) as server:
            place = scripted_place(server.address, tmp_path)
            yield lambda: ObjectLeases(ThreadMachine(), place, PATIENT)
    else:
        place = seaweed_place(request.getfixturevalue("seaweed_server"), tmp_path)
        yield lambda: ObjectLeases(ThreadMachine(), place, PATIENT)


@pytest.fixture(params=SHARED)
def open_shared(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], ProbedStore]]:
    with shared_store(request.param, request, tmp_path) as open_one:
        yield open_one


@pytest.fixture(params=["file", *SHARED])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], LeaseStore]]:
    if request.param != "file":
        with shared_store(request.param, request, tmp_path) as open_one:
            yield open_one
        return
    opened: list[FileLeases] = []

    def open_file() -> LeaseStore:
        opened.append(FileLeases(ThreadMachine(), tmp_path / "lease.db"))
        return opened[-1]

    yield open_file
    for one in opened:
        one.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_a_lease_store(check: Check, open_store: Callable[[], LeaseStore]):
    await check(open_store)


async def test_a_store_that_compares_passes_the_probe_and_again(open_shared: Callable[[], ProbedStore]):
    await probe(ThreadMachine(), open_shared(), PLACE)
    await probe(ThreadMachine(), open_shared(), PLACE)


@pytest.mark.parametrize("name", DIALECTS)
async def test_a_probe_leaves_nothing_behind_and_touches_no_lease(name: str, tmp_path: Path):
    with s3_server(DIALECTS[name]) as server:
        leases = ObjectLeases(ThreadMachine(), scripted_place(server.address, tmp_path), PATIENT)
        await leases.replace(ROLE, None, one := record())
        await leases.check()
        assert server.names() == (f"a/prefix/lease/{ROLE}.json",)
        assert await leases.read(ROLE) == one


REFUSALS = {
    "ignores": "a write that expects no object is taken where there is one",
    "writes-where-missing": "a write that expects an object is taken where there is none",
    "compares-too-early": "of 8 writes at once that expect the same object",
}


@pytest.mark.parametrize("name", BROKEN_DIALECTS)
async def test_a_store_that_ignores_conditions_is_refused_over_http_too(name: str, tmp_path: Path):
    with s3_server(BROKEN_DIALECTS[name]) as server:
        leases = ObjectLeases(ThreadMachine(), scripted_place(server.address, tmp_path), PATIENT)
        with pytest.raises(Invalid) as refused:
            await leases.check()
        assert refused.value.code == "store_ignores_conditions"
        assert refused.value.message.startswith(f"s3://bucket/a/prefix at {server.address} cannot keep a lease: {REFUSALS[name]}")
        assert server.names() == (), "what the probe wrote is removed all the same"


async def test_a_store_that_takes_a_write_which_it_refuses_is_refused_too(tmp_path: Path):
    def take_all_the_same(asked: Asked) -> bytes | None:
        if asked.method != "PUT" or decode(asked.body).seq != 3:  # those at once
            return None
        there = server.bucket.get(asked.key)
        if there is None or decode(there.data).seq != 3:  # the one that wins
            return None
        server.bucket.restore(asked.key, asked.body)
        return error(409, "ConditionalRequestConflict")

    with s3_server() as server:
        server.script = take_all_the_same
        with pytest.raises(Invalid, match="another than the first is taken, too"):
            await ObjectLeases(ThreadMachine(), scripted_place(server.address, tmp_path), PATIENT).check()


async def test_a_probe_that_is_cut_short_leaves_nothing_behind(tmp_path: Path):
    with s3_server() as server:
        scope = trio.CancelScope()
        token = trio.lowlevel.current_trio_token()

        def cut_short(asked: Asked) -> None:
            if len(server.asked) == 4:
                trio.from_thread.run_sync(scope.cancel, trio_token=token)

        server.script = cut_short
        with scope:
            await ObjectLeases(ThreadMachine(), scripted_place(server.address, tmp_path), PATIENT).check()
        assert scope.cancelled_caught
        assert server.names() == ()


@pytest.mark.parametrize("name", BROKEN_DIALECTS)
async def test_a_store_that_ignores_conditions_is_refused(name: str, autojump_clock: object):
    machine = SimMachine(1)
    with pytest.raises(Invalid, match=f"s3://place cannot keep a lease: {REFUSALS[name]}") as refused:
        await probe(machine, SimLeases(machine, Bucket(machine.now_s, BROKEN_DIALECTS[name])), PLACE)
    assert refused.value.code == "store_ignores_conditions"


async def test_a_store_that_does_not_answer_the_probe_is_unavailable_and_not_broken(autojump_clock: object):
    machine = SimMachine(1)
    leases = SimLeases(machine, Bucket(machine.now_s), lambda request: Fault(status=503))
    with pytest.raises(Unavailable, match="503"):
        await probe(machine, leases, PLACE)


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
