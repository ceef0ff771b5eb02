"""Two control planes on a bucket, as real processes under load, with Litestream and a real S3 server: what was acknowledged outlives
whatever happens to any of them, no request fails and no engine moves.

The short form is part of `make test`; `make chaos` sets LLMGW_CHAOS=full. LLMGW_FAILOVERS is how many there are, LLMGW_SEED of which
order. Nothing is asserted by time: what has a bound is measured, and printed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.chaos.bucket import Bucket, check_copies
from tests.chaos.faults import Faults
from tests.chaos.planes import (
    FULL,
    HEARTBEAT_S,
    MODEL,
    NODE_LOST_AFTER_S,
    NODES,
    REPLICAS,
    SPARE,
    STREAM_S_MAX,
    Plane,
    Site,
    figure,
    running_load,
    since,
)
from tests.chaos.writer import SettingsWriter, Writer, Writing, lost_or_doubled, versions_lost_or_doubled
from tests.programs import call, wait_for
from tests.seaweed import seaweed

pytestmark = pytest.mark.slow

LEASE = {"ttl_s": 5.0, "renew_s": 1.5, "poll_s": 0.5} if FULL else {"ttl_s": 3.0, "renew_s": 0.8, "poll_s": 0.25}
FAILOVERS = int(os.environ.get("LLMGW_FAILOVERS", "50" if FULL else "3"))
SEED = int(os.environ.get("LLMGW_SEED", "7"))
PAUSE_S = 0.05  # of a writer between two changes: the load has the other core
ROUNDS = 10 if FULL else 1
WRITES = 300 if FULL else 40


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    folder = tmp_path_factory.mktemp("bucket")
    with seaweed(folder) as server:
        yield Bucket(server, folder / "tokens")


@pytest.fixture(scope="module")
def site(bucket: Bucket, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("replicated"), **LEASE, store=bucket.folder, kept=bucket)
    for plane in site.planes.values():
        plane.altered = (f"freezes-before-a-command={switch(plane)}",)
    try:
        site.start_all()
        yield site
    finally:
        site.close()


def switch(plane: Plane) -> Path:
    """Once this is there, its next command finds it frozen."""
    return plane.folder / f"{plane.name}.switch"


def kept(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    return f"{ordered[len(ordered) // 2]:.2f} s, at most {ordered[-1]:.2f} s of {len(ordered)}"


def test_what_is_acknowledged_outlives_random_faults_of_leader_litestream_and_object_store(
    site: Site, bucket: Bucket, request: pytest.FixtureRequest
) -> None:
    planes = list(site.planes.values())
    models, settings = [Writer(f"w{number}", planes, SEED + number) for number in range(2)], SettingsWriter("s", planes, SEED)
    writers = [*models, settings]
    faults = Faults(planes, bucket, writers, SEED)
    with site.undisturbed() as load:
        threads = [Writing(writer, PAUSE_S) for writer in writers]
        try:
            for _ in range(FAILOVERS):
                if faults.rng.random() < 0.5:
                    faults.blip()
                faults.failover()
                assert [writer.wrong for writer in writers] == [[], [], []], faults.done[-3:]
        finally:
            for thread in threads:
                thread.finish()
        assert [writer.wrong for writer in writers] == [[], [], []], faults.done[-3:]
        store = bucket.restored()
        assert lost_or_doubled(store, models) == []
        assert versions_lost_or_doubled(store, settings) == []
        for plane in planes:
            check_copies(plane)
            assert {row["name"] for row in plane.admin("GET", "/models")["models"]} >= {name for one in models for name in one.rows}
            assert "Traceback" not in plane.output
    changes, again = sum(writer.acknowledged for writer in writers), sum(writer.again for writer in writers)
    figure(request, f"replicated, {FAILOVERS} failovers: acknowledged changes lost or doubled", f"0 of {changes:,} ({again:,} sent again)")
    figure(request, f"replicated, {FAILOVERS} failovers: requests failed", load.counts)
    for name, took_s in sorted(faults.took_s.items()):
        figure(request, f"replicated, ttl {site.ttl_s:g} s, {name.replace('_', ' ')}: other CONFIRMED after", kept(took_s))


def test_a_change_takes_an_upload_and_a_standby_shows_it_at_once(site: Site, request: pytest.FixtureRequest) -> None:
    site.wait_whole()
    leader = site.leader()
    other = site.other(leader)
    writer = Writer("l", [leader], 1)
    for _ in range(WRITES):
        writer.change()
    assert writer.wrong == []
    figure(request, "replicated: an order is acknowledged after", kept(writer.took_s))
    shown_s = []
    for number in range(WRITES // 4):
        leader.admin("PUT", "/holds", {"facility": f"rack-{number}", "reason": "a test"})
        begun_s = time.monotonic()
        wait_for(lambda: f"rack-{number}" in [one["facility"] for one in other.admin("GET", "/holds")["holds"]], "it is shown")  # noqa: B023
        shown_s.append(since(begun_s))
        leader.admin("DELETE", f"/holds/rack-{number}")
    figure(request, "replicated: what is acknowledged is shown at the standby after", kept(shown_s))
    assert other.admin("GET", "/status")["store"]["age_s"] < 5
    for name in writer.rows:
        leader.admin("DELETE", f"/models/{name}", **{"if-match": "*"})


@pytest.mark.parametrize("how", ["hand_over", "kill", "kill_as_a_unit"])
def test_another_leads_within_its_bound_and_no_request_fails(site: Site, bucket: Bucket, request: pytest.FixtureRequest, how: str) -> None:
    """The bounds: a hand-over 1 s, a lost machine ttl * 1.01 + 1 + 2 * poll + 2 s, a process whose machine lives 2 s."""
    faults = Faults(list(site.planes.values()), bucket, [], SEED)
    with site.undisturbed() as load:
        for _ in range(ROUNDS):
            site.wait_whole()
            faults.take_over(getattr(faults, how))
            load.wait_more(100)
    told = f"replicated, ttl {site.ttl_s:g} s, poll {LEASE['poll_s']:g} s, {how.replace('_', ' ')}"
    figure(request, f"{told}: other CONFIRMED after", kept(faults.took_s[how]))
    figure(request, f"{told}: requests failed", load.counts)


def pace(leader: Plane, **keys: float) -> None:
    """Of the agents' signs of life."""
    version = leader.admin("GET", "/settings")["version"]
    given = {f"reconcile.{name}": value for name, value in keys.items()}
    leader.admin("PATCH", "/settings", {"set": given, "reason": "a test"}, **{"if-match": f'"{version}"'})


def test_the_commands_of_a_leader_that_was_frozen_are_refused_and_it_stands_by(site: Site, bucket: Bucket) -> None:
    """It wakes with a command in its hand that it had the right to send when it fell asleep."""
    site.wait_whole()
    leader = site.leader()
    other = site.other(leader)
    before, seen = leader.leader(), len(leader.output)
    agents = {node: len(site.programs[node].output) for node in NODES}
    process = psutil.Process(leader.program.process.pid)
    with site.undisturbed() as load:
        pace(leader, heartbeat_s=10, node_lost_after_s=30)  # of the field: with that of this site its sessions have ended when it wakes
        switch(leader).touch()
        try:
            leader.admin("POST", f"/models/{SPARE}/scale", {"count": 2})
            wait_for(lambda: process.status() == psutil.STATUS_STOPPED, "the leader is frozen")
            wait_for(other.confirmed, "the other one leads")
            other.admin.wait_ready(SPARE, 2)  # what was ordered is carried out, by the new leader
            engines = site.engines(SPARE)
            assert len(engines) == 2
        finally:
            process.resume()
        wait_for(lambda: (leader.leader() or {}).get("is_me") is False, "the one that was frozen stands by")
        wait_for(lambda: [one for one in other.leader()["standbys"] if one["name"] == leader.name], "its successor knows")
        load.wait_more(200)
        assert site.engines(SPARE) == engines
        assert len(other.admin.replicas(SPARE)) == 2
        refused = [line for node in NODES for line in site.programs[node].output[agents[node] :].splitlines() if "stale command" in line]
        assert len(refused) == 1
        assert f"epoch={before['epoch']} " in refused[0]
        assert len(leader.log_of("the lease is lost", seen)) == 1
        assert leader.program.process.poll() is None
        view = other.leader()
        assert view["epoch"] > before["epoch"]
        assert bucket.lease()["owner"] == view["owner"]
        other.admin("POST", f"/models/{SPARE}/scale", {"count": 1})
        wait_for(lambda: len(site.engines(SPARE)) == 1, "back to one")
        pace(other, heartbeat_s=HEARTBEAT_S, node_lost_after_s=NODE_LOST_AFTER_S)


def test_with_store_and_leader_gone_routing_goes_on_and_nothing_is_placed_until_the_store_is_back(
    site: Site, bucket: Bucket, request: pytest.FixtureRequest
) -> None:
    site.wait_whole()
    leader = site.leader()
    other = site.other(leader)
    (spare,) = site.engines(SPARE)
    lost = leader.admin.replicas(SPARE, "ready")[0]["node"]
    names = {row["name"] for row in other.admin("GET", "/models")["models"]}
    with running_load(site) as load:
        bucket.server.kill()
        leader.program.kill()
        begun_s = time.monotonic()
        site.programs[lost].kill()
        psutil.Process(spare).kill()
        kept_running = site.engines()
        # What would have followed with a leader: its takeover, the node's loss, and a start elsewhere.
        wait_for(lambda: since(begun_s) > 2 * site.ttl_s + 2 * NODE_LOST_AFTER_S + 5, "a leader would have acted by now")
        load.wait_more(200)
        assert not other.confirmed()
        assert site.engines(SPARE) == set()
        assert site.engines() == kept_running
        assert {row["name"] for row in other.admin("GET", "/models")["models"]} == names
        age_s = other.admin("GET", "/status")["store"]["age_s"]
        assert age_s > site.ttl_s, "it says how old that is"
        status, answer = call(
            f"127.0.0.1:{other.port}",
            "POST",
            f"/api/v1/models/{SPARE}/scale",
            {"count": 2},
            {"authorization": f"Bearer {other.token}"},
        )
        assert (status, answer["error"]["type"]) == (503, "unavailable")
        bucket.server.start()
        back_s = time.monotonic()
        wait_for(other.confirmed, "the other one leads", 120)
        leads_s = since(back_s)
        wait_for(lambda: [row for row in other.admin.replicas(SPARE, "ready") if row["node"] != lost], "it is placed anew")
        placed_s = since(back_s)
        site.start(lost)
        leader.start()
        leader.wait_serving()
        wait_for(lambda: len(site.engines()) == REPLICAS, "the surplus is gone once its node speaks again", STREAM_S_MAX + 60)
    assert load.told["failed"] == 0, load.told["failures"]
    site.wait_whole()
    site.leader().admin.wait_ready(MODEL, REPLICAS)
    figure(request, "store and leader gone at once: requests failed", load.counts)
    figure(request, "store and leader gone at once: other CONFIRMED after the store is back", f"{leads_s:.2f} s")
    figure(request, "store and leader gone at once: what was lost meanwhile is ready again after the store is back", f"{placed_s:.2f} s")
