"""Two control planes on one store, as real processes under load: whatever happens to them, no request fails and no engine moves.

The short form is part of `make test`; `make chaos` sets LLMGW_CHAOS=full, which gives the ttl of the field, faults of minutes and
many rounds. Nothing is asserted by time but that a takeover did not wait for the ttl: bounds are measured, and printed.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import psutil
import pytest

from llmgw.protocol.websocket import SESSION_PATH
from tests.chaos.planes import FULL, MODEL, NODES, REPLICAS, SPARE, Pair, Plane, Site, figure, running_load, since
from tests.chaos.starter import Starter
from tests.programs import call, skip, wait_for

pytestmark = pytest.mark.slow

# A lease that nobody could wait for without being noticed, and one that is soon over.
LONG = {"ttl_s": 15.0, "renew_s": 5.0, "poll_s": 1.0} if FULL else {"ttl_s": 30.0, "renew_s": 1.0, "poll_s": 0.5}
SHORT = LONG if FULL else {"ttl_s": 3.0, "renew_s": 0.8, "poll_s": 0.25}
NOT_THE_TTL_S = LONG["ttl_s"] * 2 / 3
ROUNDS = 10 if FULL else 1
LOCKED_S = (60.0, 300.0) if FULL else (3 * SHORT["ttl_s"],)
STARTS = 40 if FULL else 20
AT_ONCE = 4  # pairs side by side: most of a round is a wait for the standby's next look at the store
KILLS = 30 if FULL else 4
SMALL_DISK = "8m"


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


def test_a_planned_hand_over_is_quick_and_the_one_that_led_stays(steady: Site, request: pytest.FixtureRequest) -> None:
    took = []
    with steady.undisturbed():
        for _ in range(ROUNDS):
            steady.wait_whole()
            pid = steady.leader().program.process.pid
            stays, _, took_s = take_over(steady, lambda plane: plane.admin("POST", "/leader/hand-over", {}))
            took.append(took_s)
            assert stays.program.process.pid == pid
            assert stays.program.process.poll() is None
    assert max(took) < NOT_THE_TTL_S
    figure(request, "planned hand-over: other CONFIRMED after", kept(took))


def test_a_leader_told_to_end_is_followed_before_it_lets_its_agents_go(steady: Site, request: pytest.FixtureRequest) -> None:
    took = []
    with steady.undisturbed():
        for _ in range(ROUNDS):
            steady.wait_whole()
            told = {name: len(plane.output) for name, plane in steady.planes.items()}
            ends, leads, took_s = take_over(steady, lambda plane: plane.program.process.send_signal(signal.SIGTERM))
            took.append(took_s)
            assert ends.program.process.wait(40) == 0
            (led,) = leads.log_of("event=leading", told[leads.name])
            let_go = ends.log_of('event="session closed"', told[ends.name])
            assert len(let_go) == len(NODES)
            assert all(time_of(led) < time_of(line) for line in let_go)
            ends.start()
            ends.wait_serving()
    assert max(took) < NOT_THE_TTL_S
    figure(request, "leader ended (SIGTERM): other CONFIRMED after", kept(took))


def time_of(line: str) -> str:
    """The time stamp of a log line, all of them of this machine; compares as text."""
    return line.partition(" ")[0].partition("=")[2]


def test_a_leader_frozen_beyond_its_lease_wakes_up_fenced_and_stands_by_in_the_same_process(
    brisk: Site, request: pytest.FixtureRequest
) -> None:
    with brisk.undisturbed() as load:
        before = brisk.leader()
        owner, seen = before.leader()["owner"], len(before.output)
        frozen, leads, took_s = take_over(brisk, lambda plane: plane.program.process.send_signal(signal.SIGSTOP))
        figure(request, f"leader frozen (SIGSTOP, ttl {brisk.ttl_s:g} s): other CONFIRMED after", f"{took_s:.2f} s")
        load.wait_more(100)
        frozen.program.process.send_signal(signal.SIGCONT)
        view = wait_for(lambda: (now := frozen.leader()) is not None and not now["is_me"] and now, "the frozen one is awake")
        assert view["owner"] == leads.leader()["owner"]
        assert frozen.program.process.poll() is None
        wait_for(lambda: frozen.log_of("the lease is lost", seen), "it says that it was fenced")
        standby = wait_for(lambda: leads.leader()["standbys"], "it stands by")
        assert standby[-1]["name"] == frozen.name
        assert standby[-1]["owner"] != owner, "whoever was fenced has a name of its own again"
    assert len(frozen.log_of("the lease is lost", seen)) == 1


@contextlib.contextmanager
def locked(*paths: Path) -> Iterator[None]:
    """Another process's writer, which does not let go."""
    connections = [apsw.Connection(str(path)) for path in paths]
    try:
        for connection in connections:
            connection.set_busy_timeout(10_000)
            connection.execute("BEGIN IMMEDIATE")
        yield
    finally:
        for connection in connections:
            connection.execute("ROLLBACK")
            connection.close()


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
    """What its log says of the lease's store, however long that was silent."""
    first, last = plane.log_of("the lease's store", seen)
    assert "does not answer; whoever leads goes on" in first
    assert "answers again" in last


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
            for plane in brisk.planes.values():
                assert "lease's store does not answer" in refused_write(plane)["message"]
            wait_for(lambda: since(begun_s) > for_s, "the store was locked for long enough", for_s + 60)
            assert unconfirmed(leader)
            load.wait_more(100)
        wait_for(leader.confirmed, "the claim is proven again")
        leader.admin.apply(brisk.model(SPARE, 1))
    after = leader.leader()
    assert (after["owner"], after["epoch"]) == (before["owner"], before["epoch"])
    for plane in brisk.planes.values():
        check_two_lines(plane, seen[plane.name])
    figure(request, f"store locked for {for_s:g} s: a killed engine is back after", f"{took_s:.2f} s")


def test_what_ran_on_a_node_that_is_lost_is_placed_anew_while_the_store_is_silent(brisk: Site, request: pytest.FixtureRequest) -> None:
    brisk.wait_whole()
    leader = brisk.leader()
    before = leader.leader()
    engines = brisk.engines()
    with running_load(brisk) as load:
        with locked(brisk.store / "lease.db", brisk.store / "llmgw.db"):
            wait_for(lambda: unconfirmed(leader), "the claim is no longer proven")
            lost = next(row["node"] for row in leader.admin.replicas(MODEL, "ready"))
            begun_s = time.monotonic()
            brisk.programs[lost].kill()  # its engines go on: what is lost is the word of them

            def placed_anew() -> bool:
                rows = leader.admin.replicas(MODEL, "ready")
                return len(rows) == REPLICAS and {row["node"] for row in rows}.isdisjoint({lost})

            wait_for(placed_anew, "every replica is ready on the other node")
            took_s = since(begun_s)
            assert unconfirmed(leader)
            assert engines < brisk.engines(), "nothing was stopped"
        wait_for(leader.confirmed, "the claim is proven again")
        brisk.start(lost)
        wait_for(lambda: len(brisk.engines()) == REPLICAS, "the surplus is gone once its node speaks again")
    assert load.told["failed"] == 0, load.told["failures"]
    brisk.wait_whole()
    leader.admin.wait_ready(MODEL, REPLICAS)
    after = leader.leader()
    assert (after["owner"], after["epoch"]) == (before["owner"], before["epoch"])
    figure(request, "store locked, a node lost (node_lost_after_s 3): its replicas are ready elsewhere after", f"{took_s:.2f} s")


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
    for plane in pair.planes:
        rows = wait_for(lambda: plane.admin("GET", "/models")["models"], "the models are there")  # noqa: B023
        assert [row["name"] for row in rows] == ["from-the-file"]
    assert len(leader.admin.events("models.imported")) == 1
    assert sum(len(plane.log_of("event=leading")) for plane in pair.planes) == 1
    wait_for(lambda: leader.leader()["standbys"], "the other presents itself, with a token that both have")
    assert agent_tokens_taken(pair) == [True, True]
    assert not any("Traceback" in plane.output for plane in pair.planes)


def test_of_two_that_start_at_the_same_instant_one_leads_in_one_cluster_that_imports_its_models_once(tmp_path: Path) -> None:
    starter = Starter()
    try:
        for first in range(0, STARTS, AT_ONCE):
            pairs = [Pair(tmp_path / str(number)) for number in range(first, first + AT_ONCE)]
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


class Writer(threading.Thread):
    """Changes models through either control plane and remembers what was acknowledged. Owns the models whose names begin with `name`.

    Each change has an Idempotency-Key and is sent again, to whichever, until it is answered: with one token, because a key is its
    token's own. `rows` is what must be in the store
    then; `changes` every acknowledged change as (model, revision).
    """

    def __init__(self, name: str, planes: list[Plane], seed: int) -> None:
        super().__init__()
        self.name_, self.planes, self.rng, self.token = name, planes, random.Random(seed), planes[0].token
        self.rows: dict[str, tuple[int, str]] = {}
        self.changes: list[tuple[str, int]] = []
        self.again = 0
        self.wrong: list[Any] = []
        self._end = threading.Event()
        self.start()

    def run(self) -> None:
        for number in itertools.count():
            if self._end.is_set() or self.wrong:
                return
            mark = f"{self.name_}-{number}"
            known = sorted(self.rows)
            if known and self.rng.random() < 0.1:
                model = self.rng.choice(known)
                if self._send("DELETE", model, mark, None, {"if-match": f'"{self.rows[model][0]}"'}):
                    del self.rows[model]
                continue
            model = self.rng.choice(known) if len(known) > 5 else mark
            expected = {"if-match": f'"{self.rows[model][0]}"'} if model in self.rows else {"if-none-match": "*"}
            table = {
                "replicas": {"min": 0, "max": 1, "count": 0},
                "profile": [{"name": "p", "engine": "command", "command": ["/bin/true", mark]}],
            }
            if answer := self._send("PUT", model, mark, table, expected):
                self.rows[model] = (answer["revision"], mark)
                self.changes.append((model, answer["revision"]))

    def _send(self, method: str, model: str, key: str, table: Any, headers: dict[str, str]) -> Any:
        while True:
            plane = self.rng.choice(self.planes)
            try:
                headers = {**headers, "authorization": f"Bearer {self.token}", "idempotency-key": key}
                status, answer = call(f"127.0.0.1:{plane.port}", method, f"/api/v1/models/{model}", table, headers)
            except (OSError, http.client.HTTPException) as err:  # it died before, or in the middle of, its answer
                status, answer = 0, str(err)
            if status in (200, 201):
                return answer
            if status not in (0, 503):
                self.wrong.append((status, answer, method, model, key, headers))
                return None
            self.again += 1
            time.sleep(0.02)

    def finish(self) -> None:
        self._end.set()
        self.join(120)
        assert not self.is_alive()
        assert self.wrong == []


def test_every_acknowledged_change_outlives_random_kills_of_the_leader(steady: Site, request: pytest.FixtureRequest) -> None:
    steady.wait_whole()
    rng = random.Random(7)
    planes = list(steady.planes.values())
    writers = [Writer(f"w{number}", planes, number) for number in range(2)]
    for _ in range(KILLS):
        leader = steady.leader()
        upto = sum(len(writer.changes) for writer in writers) + rng.randint(1, 40)
        wait_for(lambda: sum(len(writer.changes) for writer in writers) >= upto or any(w.wrong for w in writers), "changes go through")  # noqa: B023
        leader.program.kill()
        wait_for(steady.other(leader).confirmed, "the other one leads")
        leader.start()
        leader.wait_serving()
    for writer in writers:
        writer.finish()
    store = apsw.Connection(str(steady.store / "llmgw.db"), flags=apsw.SQLITE_OPEN_READWRITE)
    store.set_busy_timeout(10_000)
    rows = {name: (revision, spec) for name, revision, spec in store.execute("SELECT name, revision, spec FROM models")}
    audit = [(name, revision) for name, revision in store.execute("SELECT object, new_revision FROM audit WHERE what = 'put'")]
    store.close()
    for writer in writers:
        assert {name for name in rows if name.startswith(f"{writer.name_}-")} == set(writer.rows)
        for model, (revision, mark) in writer.rows.items():
            stored, spec = rows[model]
            assert (stored, f'"{mark}"' in spec) == (revision, True), (model, spec)
        for model, revision in writer.changes:
            assert audit.count((f"model/{model}", revision)) == 1
    changes, again = sum(len(writer.changes) for writer in writers), sum(writer.again for writer in writers)
    assert changes > KILLS
    figure(request, f"{KILLS} kills of the leader: acknowledged changes lost", f"0 of {changes} ({again} sent again)")
    for plane in planes:
        for writer in writers:
            assert {row["name"] for row in plane.admin("GET", "/models")["models"]} >= set(writer.rows)
    for name in [name for writer in writers for name in writer.rows]:
        steady.leader().admin("DELETE", f"/models/{name}", **{"if-match": "*"})
