"""Two control planes on one store, as real processes under load: whatever happens to them, no request fails and no engine moves.

The short form is part of `make test`; `make chaos` sets LLMGW_CHAOS=full, which gives the ttl of the field, faults of minutes and
many rounds. Nothing is asserted by time but that a takeover did not wait for the ttl: bounds are measured, and printed.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmgw.control.sessions import ANSWER_S
from llmgw.lease.outage import BACK
from llmgw.protocol.websocket import SESSION_PATH
from tests.chaos.planes import (
    FULL,
    MODEL,
    NODE_LOST_AFTER_S,
    NODES,
    PLANES,
    REPLICAS,
    RESTART_BACKOFF_S,
    SPARE,
    STREAM_S_MAX,
    Pair,
    Plane,
    Site,
    figure,
    freeze,
    locked,
    running_load,
    since,
)
from tests.chaos.starter import Starter
from tests.chaos.writer import Writer, Writing, lost_or_doubled
from tests.programs import call, chat, skip, wait_for

pytestmark = pytest.mark.slow

# A lease that nobody could wait for without being noticed, and one that is soon over.
LONG = {"ttl_s": 15.0, "renew_s": 5.0, "poll_s": 1.0} if FULL else {"ttl_s": 30.0, "renew_s": 1.0, "poll_s": 0.5}
SHORT = LONG if FULL else {"ttl_s": 3.0, "renew_s": 0.8, "poll_s": 0.25}
NOT_THE_TTL_S = LONG["ttl_s"] * 2 / 3
ROUNDS = 10 if FULL else 1
FREEZES = 3 if FULL else 1
LOCKED_S = (60.0,) if FULL else (3 * SHORT["ttl_s"],)
OUTAGE_S = 300.0 if FULL else 0.0  # in which a node is lost, too: short, as long as that takes
STARTS = 40 if FULL else 20
AT_ONCE = 4  # pairs side by side: most of a round is a wait for the standby's next look at the store
KILLS = 30 if FULL else 4
SMALL_DISK = "8m"
FILES_MODELS = ("of-one-file", "of-the-other")


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A site whose lease lasts long: whoever takes over at once has not waited for it."""
    site = Site(tmp_path_factory.mktemp("steady"), **LONG)
    try:
        site.start_all()
        yield site
    finally:
        site.close()


@pytest.fixture(scope="module")
def brisk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A site whose lease is soon over, with its store on a small disk of its own where this user may mount one."""
    folder = tmp_path_factory.mktemp("brisk")
    store = folder / "shared"
    store.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK}", "llmgw-test", str(store)]
    mounted = shutil.which("mount") is not None and subprocess.run(mount, capture_output=True, check=False).returncode == 0
    site = Site(folder, store=store, **SHORT)
    try:
        site.start_all()
        yield site
    finally:
        site.close()
        if mounted:
            subprocess.run(["umount", "-l", str(store)], capture_output=True, check=True)


def take_over(site: Site, act: Callable[[Plane], None]) -> tuple[Plane, Plane, float]:
    """(who led, who leads now, seconds from `act` until it is CONFIRMED)."""
    before = site.leader()
    after = site.other(before)
    epoch = before.leader()["epoch"]
    begun_s = time.monotonic()
    act(before)
    wait_for(after.confirmed, f"{after.name} is confirmed")
    took_s = since(begun_s)
    assert after.leader()["epoch"] > epoch
    return before, after, took_s


def kept(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    return f"{ordered[len(ordered) // 2]:.2f} s, at most {ordered[-1]:.2f} s of {len(ordered)}"


def test_a_killed_leader_is_followed_at_once_and_nobody_but_its_log_notices(steady: Site, request: pytest.FixtureRequest) -> None:
    took = []
    with steady.undisturbed() as load:
        for _ in range(ROUNDS):
            steady.wait_whole()
            dead, _, took_s = take_over(steady, lambda plane: plane.program.kill())
            took.append(took_s)
            load.wait_more(100)
            dead.start()
            dead.wait_serving()
    assert max(took) < NOT_THE_TTL_S
    figure(request, "leader killed (SIGKILL): other CONFIRMED after", kept(took))
    figure(request, "leader killed: requests failed", load.counts)


def test_the_embedded_router_of_a_standby_serves_on_when_the_leader_is_killed(steady: Site, request: pytest.FixtureRequest) -> None:
    steady.wait_whole()
    engines = steady.engines()
    other = steady.other(steady.leader())
    with running_load(steady, other.router_address) as load:
        dead, leads, _ = take_over(steady, lambda plane: plane.program.kill())
        assert leads is other
        load.wait_more(200)
        dead.start()
        dead.wait_serving()
        wait_for(lambda: chat(dead.router_address, MODEL)[0] == 200, "the router of the one that came back serves")
    assert load.told["failed"] == 0, load.told["failures"]
    assert steady.engines() == engines
    figure(request, "leader killed: requests failed at the embedded router of the other", load.counts)


def test_a_planned_hand_over_is_quick_and_the_one_that_led_stays(steady: Site, request: pytest.FixtureRequest) -> None:
    took = []
    with steady.undisturbed() as load:
        for _ in range(ROUNDS):
            steady.wait_whole()
            pid = steady.leader().program.process.pid
            stays, _, took_s = take_over(steady, lambda plane: plane.admin("POST", "/leader/hand-over", {}))
            took.append(took_s)
            assert stays.program.process.pid == pid
            assert stays.program.process.poll() is None
    assert max(took) < NOT_THE_TTL_S
    figure(request, "planned hand-over: other CONFIRMED after", kept(took))
    figure(request, "planned hand-over: requests failed", load.counts)


def test_a_leader_told_to_end_is_followed_before_it_lets_its_agents_go(steady: Site, request: pytest.FixtureRequest) -> None:
    took = []
    with steady.undisturbed() as load:
        for _ in range(ROUNDS):
            steady.wait_whole()
            told = {name: len(plane.output) for name, plane in steady.planes.items()}
            ends, leads, took_s = take_over(steady, lambda plane: plane.program.process.send_signal(signal.SIGTERM))
            took.append(took_s)
            assert ends.program.process.wait(40) == 0
            assert "event=stopped" in wait_for(lambda: ends.log_of("event=stopped", told[ends.name]), "its last line")[-1]  # noqa: B023
            assert ends.output.rstrip().endswith("event=stopped")
            (led,) = leads.log_of("event=leading", told[leads.name])
            let_go = ends.log_of('event="session closed"', told[ends.name])
            assert len(let_go) == len(NODES)
            assert all(time_of(led) < time_of(line) for line in let_go)
            ends.start()
            ends.wait_serving()
    assert max(took) < NOT_THE_TTL_S
    figure(request, "leader ended (SIGTERM): other CONFIRMED after", kept(took))
    figure(request, "leader ended: requests failed", load.counts)


def time_of(line: str) -> str:
    """The time stamp of a log line, all of them of this machine; compares as text."""
    return line.partition(" ")[0].partition("=")[2]


def test_a_leader_frozen_beyond_its_lease_wakes_up_fenced_and_stands_by_in_the_same_process(
    brisk: Site, request: pytest.FixtureRequest
) -> None:
    took = []
    with brisk.undisturbed() as load:
        for _ in range(FREEZES):
            brisk.wait_whole()
            before = brisk.leader()
            owner, seen = before.leader()["owner"], len(before.output)
            frozen, leads, took_s = take_over(brisk, lambda plane: freeze(plane, brisk.store))
            took.append(took_s)
            load.wait_more(100)
            frozen.program.process.send_signal(signal.SIGCONT)
            view = wait_for(lambda: (now := frozen.leader()) is not None and not now["is_me"] and now, "the frozen one is awake")  # noqa: B023
            assert view["owner"] == leads.leader()["owner"]
            assert frozen.program.process.poll() is None
            wait_for(lambda: frozen.log_of("the lease is lost", seen), "it says that it was fenced")  # noqa: B023
            # Under a name of its own again, as whoever was fenced; the new leader may still know its old one.
            wait_for(
                lambda: [one for one in leads.leader()["standbys"] if one["name"] == frozen.name and one["owner"] != owner],  # noqa: B023
                "it stands by",
            )
            assert len(frozen.log_of("the lease is lost", seen)) == 1
    figure(request, f"leader frozen (SIGSTOP, ttl {brisk.ttl_s:g} s): other CONFIRMED after", kept(took))
    figure(request, "leader frozen: requests failed", load.counts)


def unconfirmed(plane: Plane) -> bool:
    view = plane.leader()
    return view is not None and view["is_me"] and view["power"] == "unconfirmed"


def killed_engine_is_back(site: Site) -> float:
    """Kills the engine of the model that no load is on; seconds until another process of it is ready, as the leader sees it."""
    (old,) = site.engines(SPARE)
    leader = next(plane for plane in site.planes.values() if (plane.leader() or {}).get("is_me"))
    begun_s = time.monotonic()
    psutil.Process(old).kill()
    wait_for(lambda: (row := leader.admin.replicas(SPARE, "ready")) and row[0]["pid"] != old, "the engine is back")
    took_s = since(begun_s)
    body = {"model": SPARE, "messages": [{"role": "user", "content": "x"}]}
    # The router is told of it within a tenth of a second of the leader's knowing.
    wait_for(lambda: call(site.address, "POST", "/v1/chat/completions", body)[0] == 200, "it is served again")
    return took_s


def refused_write(plane: Plane) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {plane.token}"}
    status, answer = call(f"127.0.0.1:{plane.port}", "POST", f"/api/v1/models/{SPARE}/scale", {"count": 2}, headers)
    assert status == 503, answer
    return answer["error"]


def check_two_lines(plane: Plane, seen: int) -> None:
    """What its log says of the storage, whatever of it failed and however long, apart from what happened to replicas meanwhile."""
    told = [line for word in ("warning", "error") for line in plane.log_of(f"level={word}", seen) if "kind=" not in line]
    assert len(told) == 1, told
    (back,) = plane.log_of(BACK, seen)
    assert "level=info" in back


@pytest.mark.parametrize("for_s", LOCKED_S)
def test_a_store_that_is_locked_for_long_changes_no_role_and_stops_no_healing(
    brisk: Site, request: pytest.FixtureRequest, for_s: float
) -> None:
    leader = brisk.leader()
    before = leader.leader()
    seen = {plane.name: len(plane.output) for plane in brisk.planes.values()}
    with brisk.undisturbed() as load:
        with locked(brisk.store / "lease.db", brisk.store / "llmgw.db"):
            begun_s = time.monotonic()
            wait_for(lambda: unconfirmed(leader), "the claim is no longer proven")
            took_s = killed_engine_is_back(brisk)
            check_writes_refused(brisk)
            wait_for(lambda: since(begun_s) > for_s, "the store was locked for long enough", for_s + 60)
            assert unconfirmed(leader)
            load.wait_more(100)
        wait_for(leader.confirmed, "the claim is proven again")
        leader.admin.apply(brisk.model(SPARE, 1))
    check_same_roles(brisk, before, seen)
    figure(request, f"store locked for {for_s:g} s: a killed engine is back after", f"{took_s:.2f} s")
    figure(request, f"store locked for {for_s:g} s: requests failed", load.counts)


def check_writes_refused(site: Site) -> None:
    """With the reason, at either control plane."""
    for plane in site.planes.values():
        error = refused_write(plane)
        assert error["code"] in ("unconfirmed", "storage_unavailable"), error
        assert "lease's store does not answer" in error["message"]


def check_same_roles(site: Site, before: dict[str, Any], seen: dict[str, int]) -> None:
    """Nobody has led since but whoever led `before`, under the same epoch, and the logs are short."""
    views = [plane.leader() for plane in site.planes.values()]
    assert {(view["owner"], view["epoch"]) for view in views} == {(before["owner"], before["epoch"])}
    for plane in site.planes.values():
        assert not plane.log_of("event=leading", seen[plane.name])
        check_two_lines(plane, seen[plane.name])


def test_what_ran_on_a_node_that_is_lost_is_placed_anew_while_the_store_is_silent(brisk: Site, request: pytest.FixtureRequest) -> None:
    """And at full length everything else that must go on in one and the same silence of five minutes."""
    brisk.wait_whole()
    leader = brisk.leader()
    before = leader.leader()
    seen = {plane.name: len(plane.output) for plane in brisk.planes.values()}
    engines = brisk.engines()
    with running_load(brisk) as load:
        with locked(brisk.store / "lease.db", brisk.store / "llmgw.db"):
            locked_s = time.monotonic()
            wait_for(lambda: unconfirmed(leader), "the claim is no longer proven")
            engine_s = killed_engine_is_back(brisk)
            check_writes_refused(brisk)
            wait_for(lambda: since(locked_s) > OUTAGE_S / 2, "half of the outage is over", OUTAGE_S + 60)
            lost = next(row["node"] for row in leader.admin.replicas(MODEL, "ready"))
            begun_s = time.monotonic()
            brisk.programs[lost].kill()  # its engines go on: what is lost is the word of them

            def placed_anew() -> bool:
                rows = leader.admin.replicas(MODEL, "ready")
                return len(rows) == REPLICAS and {row["node"] for row in rows}.isdisjoint({lost})

            wait_for(placed_anew, "every replica is ready on the other node")
            node_s = since(begun_s)
            assert engines < brisk.engines(), "nothing was stopped"
            wait_for(lambda: since(locked_s) > OUTAGE_S, "the outage is over", OUTAGE_S + 60)
            load.wait_more(100)
            assert unconfirmed(leader)
            assert engines < brisk.engines(), "nothing was stopped"
            check_writes_refused(brisk)
        outage = f"store locked for {since(locked_s):.0f} s"
        wait_for(leader.confirmed, "the claim is proven again")
        brisk.start(lost)
        # What the surplus had begun to answer is answered first.
        wait_for(lambda: len(brisk.engines()) == REPLICAS, "the surplus is gone once its node speaks again", STREAM_S_MAX + 60)
    assert load.told["failed"] == 0, load.told["failures"]
    brisk.wait_whole()
    leader.admin.wait_ready(MODEL, REPLICAS)
    check_same_roles(brisk, before, seen)
    figure(request, f"{outage}: a killed engine (restart_backoff_s {RESTART_BACKOFF_S:g}) is back after", f"{engine_s:.2f} s")
    figure(request, f"{outage}: replicas of a lost node (node_lost_after_s {NODE_LOST_AFTER_S:g}) ready elsewhere", f"{node_s:.2f} s")
    figure(request, f"{outage}, a node lost: requests failed", load.counts)


def test_a_full_disk_under_the_store_changes_no_role_and_stops_no_healing(brisk: Site, request: pytest.FixtureRequest) -> None:
    if not brisk.store.is_mount():
        skip("this user may not mount a small tmpfs")
    leader = brisk.leader()
    before, seen = leader.leader(), len(leader.output)
    with brisk.undisturbed() as load:
        filler = brisk.store / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        try:
            begun_s = time.monotonic()
            wait_for(lambda: write_refused(leader), "a write is refused")
            took_s = killed_engine_is_back(brisk)
            wait_for(lambda: since(begun_s) > 3 * brisk.ttl_s, "the disk was full for long enough", 3 * brisk.ttl_s + 60)
            assert leader.leader()["is_me"]
            load.wait_more(100)
        finally:
            filler.unlink()
        wait_for(leader.confirmed, "the claim is proven again")
        leader.admin.apply(brisk.model(SPARE, 1))
    after = leader.leader()
    assert (after["owner"], after["epoch"]) == (before["owner"], before["epoch"])
    check_two_lines(leader, seen)
    figure(request, f"store on a full disk for {3 * brisk.ttl_s:g} s: a killed engine is back after", f"{took_s:.2f} s")


def test_an_agent_on_a_copied_data_directory_is_turned_away_once_and_throws_nobody_out(brisk: Site) -> None:
    """The two threw each other's session out in turns, at both control planes, and no log said why."""
    brisk.wait_whole()
    leader, node = brisk.leader(), NODES[0]
    seen = {plane.name: len(plane.output) for plane in brisk.planes.values()}
    (brisk.folder / "copy").mkdir()
    for file in ("node-id", "fence.json"):
        shutil.copy(brisk.folder / node / file, brisk.folder / "copy" / file)
    settings = (brisk.folder / f"{node}.toml").read_text().replace(f"{brisk.folder}/{node}", f"{brisk.folder}/copy")
    (brisk.folder / "copy.toml").write_text(settings)
    copy = brisk.start("copy")
    for plane in brisk.planes.values():
        wait_for(lambda: plane.log_of("two agents live under the id", seen[plane.name]), f"{plane.name} says so")  # noqa: B023
    wait_for(lambda: copy.output.count("looks like a copy of its data directory") == len(PLANES), "it says why it has no session")
    wait_for(lambda: copy.output.count("no session with this control plane") == len(PLANES), "and says it once of each")
    for plane in brisk.planes.values():
        assert not plane.log_of('event="session closed"', seen[plane.name])
        assert len(plane.log_of("two agents live", seen[plane.name])) == 1
    (event,) = leader.admin.events("node.twice")
    assert event["object"] == f"node/{node}"
    copy.kill()
    brisk.programs[node].kill()
    begun_s = time.monotonic()
    brisk.start(node)
    brisk.wait_whole()
    assert since(begun_s) < NOT_THE_TTL_S + ANSWER_S


def write_refused(plane: Plane) -> bool:
    """Does an order get the answer of a store that takes none? While there is room in its log, a small one is still taken."""
    headers = {"authorization": f"Bearer {plane.token}"}
    hold = {"facility": "nowhere", "reason": "x" * 1000}
    status, answer = call(f"127.0.0.1:{plane.port}", "PUT", "/api/v1/holds", hold, headers)
    assert status in (200, 201, 503), answer
    return status == 503


def agent_tokens_taken(pair: Pair) -> list[bool]:
    """Does each take the agents' token that is in the file? A session's handshake is refused for its token before anything else."""
    token = (pair.store / "agent-token").read_text().strip()
    taken = []
    for plane in pair.planes:
        with contextlib.closing(socket.create_connection(("127.0.0.1", plane.port), 10)) as connection:
            head = f"GET {SESSION_PATH} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\nupgrade: websocket\r\n"
            more = "connection: Upgrade\r\nsec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
            connection.sendall((head + more).encode())
            status = int(connection.recv(100).split()[1])
            assert status in (101, 401), status
            taken.append(status == 101)
    return taken


def check_pair(pair: Pair) -> None:
    """One leads, the other knows it, and they are one cluster that imported its models once."""
    for plane in pair.planes:
        plane.wait_serving()

    leader, view = pair.wait_agreed()
    assert view["epoch"] == 1
    assert len({plane.admin("GET", "/leader")["cluster_id"] for plane in pair.planes}) == 1
    found = set()
    for plane in pair.planes:
        rows = wait_for(lambda: plane.admin("GET", "/models")["models"], "the models are there")  # noqa: B023
        found.add(tuple(row["name"] for row in rows))
    assert found in [{(model,)} for model in FILES_MODELS], "one file was imported, and nothing of the other"
    assert len(leader.admin.events("models.imported")) == 1
    assert sum(len(plane.log_of("event=leading")) for plane in pair.planes) == 1
    wait_for(lambda: leader.leader()["standbys"], "the other presents itself, with a token that both have")
    assert agent_tokens_taken(pair) == [True, True]
    assert not any("Traceback" in plane.output for plane in pair.planes)


def test_of_two_that_start_at_the_same_instant_one_leads_in_one_cluster_that_imports_its_models_once(tmp_path: Path) -> None:
    starter = Starter()
    try:
        for first in range(0, STARTS, AT_ONCE):
            pairs = [Pair(tmp_path / str(number), models=FILES_MODELS) for number in range(first, first + AT_ONCE)]
            planes = [plane for pair in pairs for plane in pair.planes]
            try:
                started = starter.start(*((["server", "--config", str(plane.file)], plane.log) for plane in planes))
                for plane, one in zip(planes, started, strict=True):
                    plane.programs.append(one)
                for pair in pairs:
                    check_pair(pair)
            finally:
                for pair in pairs:
                    pair.close()
    finally:
        starter.close()


def test_every_acknowledged_change_outlives_random_kills_of_the_leader(steady: Site, request: pytest.FixtureRequest) -> None:
    steady.wait_whole()
    rng = random.Random(7)
    planes = list(steady.planes.values())
    writers = [Writer(f"w{number}", planes, number) for number in range(2)]
    threads = [Writing(writer) for writer in writers]
    for _ in range(KILLS):
        leader = steady.leader()
        upto = sum(len(writer.changes) for writer in writers) + rng.randint(1, 40)
        wait_for(lambda: sum(len(writer.changes) for writer in writers) >= upto or any(w.wrong for w in writers), "changes go through")  # noqa: B023
        leader.program.kill()
        wait_for(steady.other(leader).confirmed, "the other one leads")
        leader.start()
        leader.wait_serving()
    for thread in threads:
        thread.finish()
    assert [writer.wrong for writer in writers] == [[], []]
    assert lost_or_doubled(steady.store, writers) == []
    changes, again = sum(len(writer.changes) for writer in writers), sum(writer.again for writer in writers)
    assert changes > KILLS
    figure(request, f"{KILLS} kills of the leader: acknowledged changes lost or doubled", f"0 of {changes:,} ({again} sent again)")
    for plane in planes:
        for writer in writers:
            assert {row["name"] for row in plane.admin("GET", "/models")["models"]} >= set(writer.rows)
    for name in [name for writer in writers for name in writer.rows]:
        steady.leader().admin("DELETE", f"/models/{name}", **{"if-match": "*"})
