"""The wall clock of one control plane is stepped by a day while it runs: roles, nodes and orders do not notice.

No rule reads it; it is for people. The processes are the real ones under a wall clock that a test sets (`altered`).
"""

from __future__ import annotations

import contextlib
import datetime
import http.client
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.chaos.bucket import Bucket
from tests.chaos.faults import release_lease
from tests.chaos.planes import Kept, Pair, Plane, SharedFile
from tests.chaos.writer import Writer, lost_or_doubled
from tests.programs import call, program, wait_for
from tests.seaweed import seaweed

pytestmark = pytest.mark.slow

DAY_S = 86_400.0
# Long enough that no pause of this machine ends it; whoever judged it by a wall clock would do so at the next look.
LEASE = "[lease]\nttl_s = 30\nrenew_s = 0.5\npoll_s = 0.25"
RENEWALS = 4  # of which the standby sees eight looks


@pytest.fixture(params=["file", "bucket"])
def pair(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Each control plane of it reads a wall clock of its own, `clock_of`."""
    with contextlib.ExitStack() as held:
        kept: Callable[[Path], Kept] = SharedFile
        if request.param == "bucket":
            (tmp_path / "s3").mkdir()
            kept = partial(Bucket, held.enter_context(seaweed(tmp_path / "s3")))
        one = Pair(tmp_path / "pair", LEASE, kept=kept)
        held.callback(one.close)
        for plane in one.planes:
            plane.altered = (f"wall-clock={clock_of(plane)}",)
        one.start()
        yield one


def clock_of(plane: Plane) -> Path:
    return plane.folder / f"{plane.name}.wall-clock"


def wall_s(plane: Plane) -> float:
    """What its wall clock says, by the date of an answer, which is whole seconds."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", plane.port, timeout=30)) as connection:
        connection.request("GET", "/health")
        date = connection.getresponse().headers["date"]
    return datetime.datetime.strptime(date, "%a, %d %b %Y %H:%M:%S GMT").replace(tzinfo=datetime.UTC).timestamp()


def test_a_step_of_one_wall_clock_by_a_day_changes_no_role_loses_no_node_and_no_order(pair: Pair) -> None:
    leader, before = pair.wait_agreed()
    (other,) = [plane for plane in pair.planes if plane is not leader]
    writer = Writer("w", pair.planes, 1)
    for plane in pair.planes:  # a standby's token is valid at the leader once it has presented itself
        taken = {"authorization": f"Bearer {writer.token}"}
        wait_for(lambda: call(f"127.0.0.1:{plane.port}", "GET", "/api/v1/leader", None, taken)[0] == 200, "the token is known")  # noqa: B023
    node = pair.folder / "node.toml"
    node.write_text(
        f"""
[agent]
name = "node-1"
control_planes = ["{leader.url}", "{other.url}"]
data_dir = "{pair.folder}/node-1"
token_file = "{pair.store}/agent-token"
"""
    )
    with program(["agent", "--config", str(node)], pair.folder, "node-1"):
        for plane in pair.planes:
            wait_for(lambda: [one["state"] for one in plane.admin("GET", "/nodes")["nodes"]] == ["ready"], "the node is there")  # noqa: B023
        for stepped in (leader, other):
            for step_s in (DAY_S, -DAY_S):
                now_s = wall_s(stepped)
                clock_of(stepped).write_text(f"{step_s}")
                wait_for(lambda: abs(wall_s(stepped) - now_s) > DAY_S / 2, "the clock is stepped")  # noqa: B023
                upto = pair.kept.lease()["seq"] + RENEWALS
                while pair.kept.lease()["seq"] < upto and not writer.wrong:
                    writer.change()
                assert leader.confirmed()
                clock_of(stepped).unlink()
        assert [one["state"] for one in leader.admin("GET", "/nodes")["nodes"]] == ["ready"]
        assert leader.admin.events("node.lost") == []
    now, after = pair.wait_agreed()
    assert (now, after["epoch"], after["owner"]) == (leader, before["epoch"], before["owner"])
    assert sum(len(plane.log_of("event=leading")) for plane in pair.planes) == 1
    for plane in pair.planes:
        assert not plane.log_of("the lease is lost")
        assert not plane.log_of("letting go")
    assert writer.wrong == []

    clock_of(other).write_text(f"{-DAY_S}")
    leader.program.kill()
    release_lease(leader)  # on a bucket nobody else can see that its process is gone
    wait_for(other.confirmed, "the one whose clock is a day behind leads")
    writer.planes = [other]
    for _ in range(20):
        writer.change()
    assert writer.wrong == []
    assert lost_or_doubled(pair.kept.restored(), [writer]) == []
