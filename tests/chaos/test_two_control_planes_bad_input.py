"""What people do to a shared store, its lease and its agents: each is a clear error or a safe wait, and nothing is lost."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest

from llmgw.store.migrations import SCHEMA
from tests.chaos.planes import Pair, Plane, lease_record
from tests.programs import call, program, wait_for

pytestmark = pytest.mark.slow
BRISK = "[lease]\nttl_s = 3\nrenew_s = 0.8\npoll_s = 0.25"


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    one = Pair(tmp_path / "pair", BRISK)
    yield one
    one.close()


@pytest.fixture(scope="module")
def shared_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two that run, for what each test puts right again."""
    one = Pair(tmp_path_factory.mktemp("shared") / "pair", BRISK)
    try:
        one.start()
        yield one
    finally:
        one.close()


def edit(path: Path, statement: str, *values: Any) -> None:
    """What somebody does by hand to a database."""
    connection = apsw.Connection(str(path))
    connection.set_busy_timeout(10_000)
    connection.execute(statement, values)
    connection.close()


def put_record(store: Path, **changes: Any) -> None:
    text = json.dumps({**lease_record(store), **changes}).encode()
    edit(store / "lease.db", "UPDATE lease SET record = ? WHERE role = 'control-plane'", text)


def refused_start(plane: Plane, code: int) -> str:
    """What it says when it ends at once with that exit code."""
    plane.start()
    assert plane.program.process.wait(60) == code, plane.output
    assert "Traceback" not in plane.output
    return plane.output


def check_whole(pair: Pair, epoch: int) -> tuple[Plane, dict[str, Any]]:
    """One leads under a higher epoch, the models are there, and a change goes through."""
    leader, view = pair.wait_agreed()
    assert view["epoch"] > epoch
    assert [row["name"] for row in leader.admin("GET", "/models")["models"]] == ["from-the-file"]
    for count in (1, 0):
        leader.admin("POST", "/models/from-the-file/scale", {"count": count})
    assert not any("Traceback" in plane.output for plane in pair.planes)
    return leader, view


# --- at the start


def test_a_second_process_on_a_data_directory_is_refused_by_pid_and_the_first_goes_on(pair: Pair) -> None:
    leader, view = pair.start()
    with program(["server", "--config", str(leader.file)], pair.folder, "again") as again:
        assert again.process.wait(60) == 4
        assert f"in use by pid {leader.program.process.pid}" in again.output
    assert leader.leader()["owner"] == view["owner"]


def test_a_store_that_only_newer_builds_can_read_is_refused_with_both_schemas_named(pair: Pair) -> None:
    first, second = pair.planes
    first.start()
    first.wait_serving()
    first.program.end()
    edit(pair.store / "llmgw.db", "UPDATE meta SET min_reader = 9, min_writer = 9")
    edit(pair.store / "llmgw.db", "PRAGMA user_version = 9")
    said = refused_start(second, 3)
    assert "schema 9" in said
    assert f"schema {SCHEMA}" in said


def test_beside_a_store_that_newer_builds_write_this_one_stands_by_and_says_so(pair: Pair) -> None:
    first, second = pair.planes
    first.start()
    first.wait_serving()
    before = first.leader()
    first.program.end()
    edit(pair.store / "llmgw.db", "UPDATE meta SET min_reader = 1, min_writer = 9")
    edit(pair.store / "llmgw.db", "PRAGMA user_version = 9")
    put_record(pair.store, schema=9)
    second.start()
    second.wait_serving()
    wait_for(lambda: second.log_of("does not compete for the lease"), "it says why it does not lead")
    assert [row["name"] for row in second.admin("GET", "/models")["models"]] == ["from-the-file"]
    headers = {"authorization": f"Bearer {second.token}"}
    status, answer = call(f"127.0.0.1:{second.port}", "POST", "/api/v1/models/from-the-file/scale", {"count": 1}, headers)
    assert (status, answer["error"]["code"]) == (503, "no_leader")
    assert lease_record(pair.store)["epoch"] == before["epoch"]
    assert len(second.log_of("does not compete for the lease")) == 1


def test_a_store_copied_from_another_machine_with_its_lease_is_led_at_once_above_the_epoch_it_holds(pair: Pair, tmp_path: Path) -> None:
    there, before = pair.start()
    for plane in sorted(pair.planes, key=lambda plane: plane is there):  # the leader last: nobody takes over, and the epoch stays
        plane.program.kill()
    here = Pair(tmp_path / "copy")  # its ttl is 15 s: nobody waits for a holder of another machine's run
    shutil.copytree(pair.store, here.store, dirs_exist_ok=True)
    put_record(here.store, boot_id="0d6a7d2e-another-machine")
    (here.store / "lease.lock").write_text("")
    plane = here.planes[0]
    try:
        plane.start()
        plane.wait_serving()
        view = wait_for(lambda: (now := plane.leader()) and now["power"] == "confirmed" and now, "it leads", 10)
        assert view["epoch"] == before["epoch"] + 1
        assert view["cluster_id"] == before["cluster_id"]
        assert [row["name"] for row in plane.admin("GET", "/models")["models"]] == ["from-the-file"]
        assert len(plane.admin.events("models.imported")) == 1
    finally:
        here.close()


def test_a_copy_of_the_store_with_tokens_of_its_own_leads_the_same_cluster_and_takes_nothing_from_the_original(
    pair: Pair, tmp_path: Path
) -> None:
    leader, before = pair.start()
    _, args = agent(pair, "node-1")
    with program(args, pair.folder, "node-1") as node:
        wait_for(lambda: [node["state"] for node in leader.admin("GET", "/nodes")["nodes"]] == ["ready"], "the agent is there")
        here = Pair(tmp_path / "copy")
        shutil.copytree(pair.store, here.store, dirs_exist_ok=True)
        put_record(here.store, boot_id="0d6a7d2e-another-machine")
        for token in ("agent-token", "control-token"):
            (here.store / token).unlink()
        try:
            there, view = here.start()
            assert (view["epoch"], view["cluster_id"]) == (before["epoch"] + 1, before["cluster_id"])
            assert [row["name"] for row in there.admin("GET", "/models")["models"]] == ["from-the-file"]
            assert view["owner"] not in (before["owner"], None)
            for token in ("agent-token", "control-token"):
                assert (here.store / token).read_text() != (pair.store / token).read_text(), "it has made its own"
            # Of the two clusters' tokens each is good for its own.
            data_dir, args = agent(pair, "astray", here)
            with program(args, pair.folder, "astray") as astray:
                astray.wait_output("refused the agent's token")
                assert not (data_dir / "fence.json").exists()
            wait_for(lambda: there.leader()["standbys"], "its own standby presents itself")
            assert [one["state"] for one in there.admin("GET", "/nodes")["nodes"]] in (["unknown"], ["lost"]), "nobody speaks for it here"
            # The original goes on under its epoch, with its standby and its agent.
            now, after = pair.wait_agreed()
            assert (now, after["epoch"], after["owner"]) == (leader, before["epoch"], before["owner"])
            assert [node["state"] for node in leader.admin("GET", "/nodes")["nodes"]] == ["ready"]
            assert node.process.poll() is None
            for count in (1, 0):
                for one in (leader, there):
                    one.admin("POST", "/models/from-the-file/scale", {"count": count})
        finally:
            here.close()


@pytest.mark.parametrize(
    ("spoil", "code", "said"),
    [
        (lambda path: path.mkdir(), 3, "lease.db is not a file"),
        (lambda path: path.write_bytes(b"this is no database, whatever it is called\n" * 200), 6, "lease.db is damaged"),
        (lambda path: edit(path, "CREATE TABLE theirs(x)"), 3, "another program's database, not a lease file"),
    ],
    ids=["folder", "junk", "another-program"],
)
def test_what_is_no_lease_file_is_refused_by_name_and_left_alone(pair: Pair, spoil: Callable[[Path], None], code: int, said: str) -> None:
    path = pair.store / "lease.db"
    spoil(path)
    before = path.read_bytes() if path.is_file() else b""
    assert said in refused_start(pair.planes[0], code)
    assert (path.read_bytes() if path.is_file() else b"") == before


def test_of_two_clusters_that_share_a_folder_the_second_waits_and_says_whose_lease_it_is(pair: Pair) -> None:
    first, second = pair.planes
    second.file.write_text(second.file.read_text().replace("/llmgw.db", "/other.db"))
    first.start()
    first.wait_serving()
    view = first.leader()
    second.start()
    why = wait_for(lambda: second.log_of("does not compete for the lease"), "it says why")
    assert f"the lease is of cluster {view['cluster_id']}" in why[0]
    second.wait_serving()
    headers = {"authorization": f"Bearer {second.token}"}
    status, answer = call(f"127.0.0.1:{second.port}", "POST", "/api/v1/models/from-the-file/scale", {"count": 1}, headers)
    assert (status, answer["error"]["code"]) == (503, "no_leader")
    assert first.leader()["epoch"] == view["epoch"]
    assert first.confirmed()


# --- a lease that is changed by hand while both run


def junk(store: Path) -> None:
    edit(store / "lease.db", "UPDATE lease SET record = ?", b"\xff{junk")


def other_cluster(store: Path) -> None:
    put_record(store, cluster_id="c-another", write_id="by-hand")


@pytest.mark.parametrize("spoil", [junk, other_cluster])
def test_a_lease_that_cannot_be_read_is_waited_for_and_the_leader_goes_on_with_what_it_may(
    shared_pair: Pair, spoil: Callable[[Path], None]
) -> None:
    leader, view = shared_pair.wait_agreed()
    good = lease_record(shared_pair.store)
    spoil(shared_pair.store)
    wait_for(lambda: (now := leader.leader()) is not None and now["power"] == "unconfirmed", "the claim is no longer proven")
    assert leader.leader()["owner"] == view["owner"]
    headers = {"authorization": f"Bearer {leader.token}"}
    status, answer = call(f"127.0.0.1:{leader.port}", "POST", "/api/v1/models/from-the-file/scale", {"count": 1}, headers)
    assert (status, answer["error"]["code"]) == (503, "unconfirmed")
    for plane in shared_pair.planes:
        assert plane is leader or not plane.leader()["is_me"]
    text = json.dumps(good).encode()
    edit(shared_pair.store / "lease.db", "UPDATE lease SET record = ? WHERE role = 'control-plane'", text)
    check_whole(shared_pair, view["epoch"] - 1)


def delete_row(store: Path) -> None:
    edit(store / "lease.db", "DELETE FROM lease")


def delete_file(store: Path) -> None:
    for name in ("lease.db", "lease.db-wal", "lease.db-shm"):
        (store / name).unlink(missing_ok=True)


def put_back_an_old_one_and_delete_the_lock(store: Path) -> None:
    wait_for(lambda: lease_record(store)["seq"] > 2, "there is an older one")
    (store / "lease.lock").unlink()
    put_record(store, seq=1, write_id="rolled-back")


@pytest.mark.parametrize("spoil", [delete_row, delete_file, put_back_an_old_one_and_delete_the_lock])
def test_a_lease_that_is_deleted_or_put_back_is_taken_anew_by_whoever_led(shared_pair: Pair, spoil: Callable[[Path], None]) -> None:
    leader, view = shared_pair.wait_agreed()
    spoil(shared_pair.store)
    wait_for(lambda: (leader.leader() or {}).get("epoch", 0) > view["epoch"], "it is taken anew")
    now, after = check_whole(shared_pair, view["epoch"])
    assert (now, after["owner"]) == (leader, view["owner"])


def test_a_stranger_written_over_the_lease_fences_the_leader_and_is_followed_after_its_time(shared_pair: Pair) -> None:
    leader, view = shared_pair.wait_agreed()
    seen = len(leader.output)
    put_record(shared_pair.store, epoch=view["epoch"] + 5, owner="nobody-00000000000000aa", tenure="by-hand", write_id="by-hand")
    wait_for(lambda: leader.log_of("the lease is lost", seen), "the leader is fenced")
    check_whole(shared_pair, view["epoch"] + 5)


# --- agents


def agent(pair: Pair, name: str, other: Pair | None = None) -> tuple[Path, list[str]]:
    """(its data directory, the arguments that start it). With the token of `pair` it goes to that pair, or to `other`."""
    data_dir = pair.folder / name
    data_dir.mkdir()
    file = pair.folder / f"{name}.toml"
    file.write_text(
        f"""
[agent]
name = "{name}"
control_planes = {json.dumps([plane.url for plane in (other or pair).planes])}
data_dir = "{data_dir}"
token_file = "{pair.store}/agent-token"
"""
    )
    return data_dir, ["agent", "--config", str(file)]


def test_an_agent_of_another_cluster_obeys_nobody_here_and_says_so(shared_pair: Pair) -> None:
    leader, view = shared_pair.wait_agreed()
    data_dir, args = agent(shared_pair, "stranger")
    fence = json.dumps({"cluster_id": "c-theirs", "epoch": 7, "owner": "ctl-9"})
    (data_dir / "fence.json").write_text(fence)
    with program(args, shared_pair.folder, "stranger") as one:
        one.wait_output("belongs to cluster c-theirs")
        assert view["cluster_id"] in one.output
        assert "data directory" in one.output
        assert (data_dir / "fence.json").read_text() == fence
        assert "stranger" not in [node["name"] for node in leader.admin("GET", "/nodes")["nodes"]]
        assert one.process.poll() is None


@pytest.mark.parametrize("text", ['{"cluster_id": "c', "[]", '{"cluster_id": "c-1", "epoch": "many", "owner": "x"}', "\x00"])
def test_an_agent_whose_fence_holds_junk_ends_and_says_what_to_do(shared_pair: Pair, text: str) -> None:
    data_dir, args = agent(shared_pair, f"junk-{abs(hash(text))}")
    (data_dir / "fence.json").write_text(text)
    with program(args, shared_pair.folder, data_dir.name) as one:
        assert one.process.wait(60) == 3
        assert f"{data_dir}/fence.json cannot be understood" in one.output
        assert "move it away" in one.output
        assert "Traceback" not in one.output
    assert (data_dir / "fence.json").read_text() == text
