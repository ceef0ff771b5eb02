"""What can fail of a replica, told as it is: in the log, in `ctl status`, in the history and in metrics; and over by itself."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path

import attrs
import pytest
import trio
from structlog.testing import capture_logs

from llmgw.admin.api.status import own_problems
from llmgw.admin.metrics import Metrics
from llmgw.domain.errors import Invalid
from llmgw.replication.litestream_replica import LitestreamReplica
from llmgw.replication.programs import find
from llmgw.settings.object_place import ObjectPlace
from llmgw.sim.lease_store import Dialect
from llmgw.wiring import stores
from llmgw.wiring.machine import RealMachine
from llmgw.wiring.server import Running
from tests.lease.places import scripted_place
from tests.replication.faulty_way import faulty_way
from tests.replication.test_bases import Cluster, hold, holds, leads
from tests.s3_server import error, s3_server
from tests.wiring.test_standby import ask, until

FAULTS = {
    "credentials expired": (error(400, "ExpiredToken"), "the credentials have expired"),
    "credentials wrong": (error(403, "SignatureDoesNotMatch"), "the credentials are not right"),
    "not allowed": (error(403, "AccessDenied"), "the credentials do not allow it"),
    "bucket gone": (error(404, "NoSuchBucket"), "there is no such bucket"),
    "another region": (error(301, "PermanentRedirect"), "in another region"),
    "clocks apart": (error(403, "RequestTimeTooSkewed"), "clock and the store's are too far apart"),
    "cut": (b"", "cut the connection"),
}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is looked at every few seconds is looked at more often."""
    monkeypatch.setattr("llmgw.replication.term.KEEP_UP_S", 0.2)
    monkeypatch.setattr("llmgw.replication.litestream.POKE_S", 0.2)
    monkeypatch.setattr("llmgw.replication.litestream.SYNC_S", 1.0)
    monkeypatch.setattr("llmgw.control.controller.STORE_LOOK_S", 0.2)


def whys(logs: list[dict]) -> list[str]:
    return [str(entry.get("why")) for entry in logs if entry["log_level"] == "warning"]


def gauges(of: Running) -> dict[str, float]:
    lines = Metrics(of.controller).text().splitlines()
    return {name: float(value) for name, _, value in (line.partition(" ") for line in lines if line.startswith("llmgw_replica_"))}


@pytest.mark.usefixtures("program", "quick")
@pytest.mark.parametrize("name", FAULTS)
async def test_what_keeps_a_leader_from_its_replica_is_told_and_ends_by_itself(name, tmp_path, place):
    answer, words = FAULTS[name]
    with faulty_way(place.endpoint) as way:
        cluster = Cluster(tmp_path, attrs.evolve(place, prefix=place.prefix.replace(" ", "-"), endpoint=way.endpoint))
        with capture_logs() as logs:
            async with cluster.running("one") as one:
                await leads(one)
                assert await hold(one, "before") == 201
                assert gauges(one)["llmgw_replica_alive"] == 1
                assert own_problems(one.controller) == []
                logs.clear()
                way.fault = answer
                status, body = await ask(one, "PUT", "/api/v1/holds", {"facility": "during", "reason": "r"})
                assert status == 503, body
                assert any("orders are refused" in problem for problem in own_problems(one.controller))
                # Litestream's client tries a few of them again by itself, and the lease's tells them first.
                await until(lambda: any(words in text for text in (*own_problems(one.controller), *whys(logs))), "the reason is told")
                assert gauges(one)["llmgw_replica_pending"] >= 1
                told = [entry["event"] for entry in logs if entry["log_level"] == "warning" and words in str(entry.get("why"))]
                assert len(told) == len(set(told)), told  # each teller once: the storage as a whole, the replica, Litestream
                assert await holds(one) == {"before"}
                way.fault = None
                await until(lambda: not one.controller.store.trouble, "it takes writes again")
                await until(lambda: one.controller.leadership.confirmed(one.controller.machine.now_s()), "it leads as before")
                assert await hold(one, "after") == 201
                assert await holds(one) >= {"before", "after"}
                # Events are written beside; each is pending for a moment.
                await until(lambda: gauges(one)["llmgw_replica_pending"] == 0, "all is durable")
                await until(lambda: gauges(one)["llmgw_replica_lag_transactions"] == 0, "all is known to be in the bucket")
                assert own_problems(one.controller) == []
                with trio.fail_after(10):
                    while True:
                        events = (await ask(one, "GET", "/api/v1/events"))[1]["events"]
                        if refused := [event["text"] for event in events if event["kind"] == "store.refused"]:
                            break
                assert len(refused) == 1
                assert refused[0].startswith("the store took no writes for ")


@pytest.mark.usefixtures("quick")
async def test_a_child_that_dies_is_started_again_and_counted(tmp_path, place, program):
    cluster = Cluster(tmp_path, attrs.evolve(place, prefix=place.prefix.replace(" ", "-")))
    with capture_logs() as logs:
        async with cluster.running("one") as one:
            await leads(one)
            replica = one.controller.store._replica
            assert isinstance(replica, LitestreamReplica)
            pid = replica._keeper.child_pid
            os.kill(pid, signal.SIGKILL)
            await until(lambda: replica._keeper.child_pid not in (None, pid) and replica.report.alive, "another child runs")
            assert await hold(one, "x") == 201
            await until(lambda: not replica.report.trouble, "it is told as over")
            assert gauges(one)["llmgw_replica_restarts_total"] == 1
            assert gauges(one)["llmgw_replica_alive"] == 1
            assert own_problems(one.controller) == []
    told = [entry["why"] for entry in logs if entry["event"] == "what is written does not reach the replica"]
    assert told
    assert {why for why in told if "does not answer" not in why} <= {
        "Litestream does not run: it was ended by SIGKILL"
    }  # or asked just then


@pytest.mark.usefixtures("program", "quick")
async def test_a_standby_tells_how_old_its_copy_is(tmp_path, place, monkeypatch):
    cluster = Cluster(tmp_path, attrs.evolve(place, prefix=place.prefix.replace(" ", "-")))
    async with cluster.running("one") as one:
        await leads(one)
        async with cluster.running("two") as two:
            await until(lambda: (two.controller.store.age_s() or 9) < 1, "it follows")
            assert gauges(two)["llmgw_replica_alive"] == 0
            assert 0 <= gauges(two)["llmgw_replica_copy_age_seconds"] < 2
            assert own_problems(two.controller) == []
            monkeypatch.setattr("llmgw.admin.api.status.COPY_OLD_S", -1.0)
            assert any("of the store is 0 s old" in problem for problem in own_problems(two.controller))


@pytest.mark.usefixtures("program")
@pytest.mark.parametrize("name", [name for name in FAULTS if FAULTS[name][0]])
async def test_a_start_without_its_store_waits_and_says_why_once(name, tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "ASK_AGAIN_S", 0.05)
    answer, words = FAULTS[name]
    with s3_server() as server, capture_logs() as logs:
        place = scripted_place(server.address, tmp_path)
        server.script = lambda asked: answer
        with ExitStack() as held:
            opened: list[object] = []

            async def begin() -> None:
                opened.append(await stores.open_store(RealMachine(), settings_of(place, tmp_path), held))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(begin)
                asked = len(server.asked)
                await until(lambda: len(server.asked) > asked + 5, "it asks again and again")
                told = [entry for entry in logs if entry["log_level"] == "warning"]
                assert [entry["event"] for entry in told] == ["the object store cannot be used yet; waiting for it"]
                assert words in told[0]["why"]
                server.script = lambda asked: None
                await until(lambda: any(entry["event"] == "the object store answers" for entry in logs), "it goes on")
                nursery.cancel_scope.cancel()


def settings_of(place: ObjectPlace, folder: Path):
    cluster = Cluster(folder, place)
    return cluster.loaded("one").settings


@pytest.mark.usefixtures("program")
async def test_a_store_that_ignores_conditions_is_refused(tmp_path):
    with s3_server(Dialect(conditions=False)) as server, ExitStack() as held:
        place = scripted_place(server.address, tmp_path)
        with pytest.raises(Invalid, match="cannot keep a lease") as caught:
            await stores.open_store(RealMachine(), settings_of(place, tmp_path), held)
        assert caught.value.code == "store_ignores_conditions"


def test_a_program_that_is_too_old_is_named(tmp_path, monkeypatch):
    old = tmp_path / "litestream"
    old.write_text("#!/bin/sh\necho v0.5.10\n")
    old.chmod(0o755)
    with pytest.raises(Invalid, match=r"0\.5\.10; 0\.5\.17 or newer is needed"):
        find({"PATH": str(tmp_path)})
