"""What gateways with a database failed at in the field, on a replicated store: many writers at once, streams that end together, a full
disk, a file that is moved away, a second process.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.chaos.bucket import Bucket, check_copies
from tests.chaos.planes import FULL, PLANES, SPARE, Plane, Site, figure
from tests.chaos.test_replicated import LEASE
from tests.chaos.writer import Writer, lost_or_doubled
from tests.programs import call, chat, program, skip, wait_for
from tests.seaweed import seaweed

pytestmark = pytest.mark.slow

SMALL_DISK = "24m"
WRITERS = 20
CHANGES = 20 if FULL else 5
STREAMS = 100
ORDERS = 50


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    folder = tmp_path_factory.mktemp("bucket")
    with seaweed(folder) as server:
        yield Bucket(server, folder / "tokens")


@pytest.fixture(scope="module")
def site(bucket: Bucket, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Each control plane has its data directory on a small disk of its own, where this user may mount one."""
    folder = tmp_path_factory.mktemp("cases")
    with contextlib.ExitStack() as held:
        for name in PLANES:
            (folder / name).mkdir()
            mount = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK}", "llmgw-test", str(folder / name)]
            if shutil.which("mount") and subprocess.run(mount, capture_output=True, check=False).returncode == 0:
                held.callback(subprocess.run, ["umount", "-l", str(folder / name)], capture_output=True, check=True)
        site = Site(folder, **LEASE, store=bucket.folder, kept=bucket)
        held.callback(site.close)
        site.start_all()
        yield site


def at_once(*work: Callable[[], Any]) -> None:
    """Each in a thread of its own."""
    threads = [threading.Thread(target=one) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()


def order(plane: Plane) -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {plane.token}"}
    return call(f"127.0.0.1:{plane.port}", "POST", f"/api/v1/models/{SPARE}/scale", {"count": 1}, headers)


@pytest.mark.case("B205", "B206", "T44")
def test_many_that_read_and_write_at_once_lose_nothing_and_meet_no_error(
    site: Site, bucket: Bucket, request: pytest.FixtureRequest
) -> None:
    site.wait_whole()
    leader = site.leader()
    planes = [leader, site.other(leader)]
    writers = [Writer(f"many{number}", planes, number) for number in range(WRITERS)]

    def work(writer: Writer) -> None:
        for _ in range(CHANGES):
            writer.change()
            for plane in planes:
                plane.admin("GET", "/models")

    at_once(*(lambda writer=writer: work(writer) for writer in writers))  # type: ignore[misc]
    assert [writer.wrong for writer in writers] == [[]] * WRITERS
    assert sum(writer.again for writer in writers) == 0
    assert lost_or_doubled(bucket.restored(), writers) == []
    for plane in planes:
        check_copies(plane)
    took_s = sorted(one for writer in writers for one in writer.took_s)
    figure(request, f"replicated: {WRITERS} writers at once, an order is acknowledged after", f"{took_s[len(took_s) // 2]:.2f} s")
    for name in [name for writer in writers for name in writer.rows]:
        leader.admin("DELETE", f"/models/{name}", **{"if-match": "*"})


@pytest.mark.case("B212", "T44")
def test_streams_that_end_together_beside_many_orders_are_all_counted(site: Site) -> None:
    site.wait_whole()
    leader = site.leader()

    def counted() -> int:
        rows = leader.admin("GET", "/usage?by=model")["usage"]
        return sum(row["requests"] for row in rows if row["model"] == SPARE)  # which nobody else asks

    before = counted()
    answers: list[int] = []
    orders: list[int] = []
    at_once(
        *([lambda: answers.append(chat(site.address, SPARE, stream=True, max_tokens=5)[0])] * STREAMS),
        *([lambda: orders.append(order(leader)[0])] * ORDERS),
    )
    assert answers == [200] * STREAMS
    assert orders == [200] * ORDERS
    wait_for(lambda: counted() >= before + STREAMS, "every stream is counted")
    assert counted() == before + STREAMS


@pytest.mark.case("B208", "T44")
def test_a_full_disk_of_the_leader_passes_the_lease_on_and_no_request_fails(site: Site) -> None:
    site.wait_whole()
    leader = site.leader()
    other = site.other(leader)
    if not leader.data_dir.is_mount():
        skip("this user may not mount a small tmpfs")
    seen = len(leader.output)
    with site.undisturbed() as load:
        filler = leader.data_dir / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        try:
            wait_for(other.confirmed, "the other one leads")
            assert order(other)[0] == 200
            load.wait_more(100)
            assert leader.leader()["is_me"] is False
            assert [line for line in leader.log_of("level=warning", seen) if "disk" in line or "space" in line], "it says why"
            assert "Traceback" not in leader.output
        finally:
            filler.unlink()


@pytest.mark.case("B211", "T44")
def test_a_working_file_that_is_moved_away_is_told_and_no_empty_one_takes_its_place(site: Site) -> None:
    site.wait_whole()
    leader = site.leader()
    (file,) = (leader.data_dir / "epochs").glob("*/llmgw.db")
    with site.undisturbed():
        away = file.rename(file.with_name("moved"))
        try:
            status, answer = order(leader)
            assert (status, answer["error"]["code"]) == (503, "storage_unavailable")
            assert str(file) in answer["error"]["message"]
            assert not file.exists()
        finally:
            away.rename(file)
        wait_for(lambda: order(leader)[0] == 200, "it takes orders again")


@pytest.mark.case("T44")
def test_a_second_process_on_a_data_directory_is_refused_by_pid(site: Site) -> None:
    leader = site.leader()
    epoch = leader.leader()["epoch"]
    with program(["server", "--config", str(leader.file)], site.folder, "again", leader.environ) as again:
        assert again.process.wait(60) == 4
        assert f"in use by pid {leader.program.process.pid}" in again.output
    assert leader.leader()["epoch"] == epoch
