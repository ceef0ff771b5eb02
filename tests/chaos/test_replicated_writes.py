"""On a bucket no acknowledged change is lost, and the comparison that says so notices when the lease is not read before an answer.

The schedule is the one that needs this rule: a machine stops in the middle of a write; when it wakes, its Litestream uploads the
write, and its control plane hears of that before it hears that another one leads.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.chaos.bucket import Bucket
from tests.chaos.faults import child_of, frozen, pass_time
from tests.chaos.planes import FULL, Pair, Plane, figure
from tests.chaos.writer import Writer, lost_or_doubled
from tests.programs import wait_for
from tests.seaweed import seaweed

pytestmark = pytest.mark.slow

# Another leads before Litestream's answer is given up, which takes 5 s.
LEASE = "[lease]\nttl_s = 2\nrenew_s = 0.6\npoll_s = 0.2"
LONG = "[lease]\nttl_s = 60\nrenew_s = 1\npoll_s = 0.25"
FREEZES = 10 if FULL else 2
CHANGES = 5
QUIET_S = 0.3  # the history is written after each change; the first thing that waits for a frozen Litestream is to be a change


@pytest.fixture
def pair_on_a_bucket(tmp_path: Path) -> Iterator[Callable[..., tuple[Pair, Bucket]]]:
    """Makes the test's pair of two that are altered so, and starts it."""
    made: list[Pair] = []
    (tmp_path / "s3").mkdir()
    with seaweed(tmp_path / "s3") as server:

        def make(*changes: str, lease: str = LEASE) -> tuple[Pair, Bucket]:
            buckets: list[Bucket] = []

            def kept(folder: Path) -> Bucket:
                buckets.append(Bucket(server, folder))
                return buckets[0]

            pair = Pair(tmp_path / "pair", lease, kept=kept)
            made.append(pair)
            for plane in pair.planes:
                plane.altered = [change.replace("FILE", str(switch(plane))) for change in changes]
            pair.start()
            return pair, buckets[0]

        yield make
        for pair in made:
            pair.close()


def woken_in_mid_write(pair: Pair, bucket: Bucket, writer: Writer) -> None:
    """Where the writer is to be when this returns: everything that it was told must be there."""
    leader, _ = pair.wait_agreed()
    (other,) = [plane for plane in pair.planes if plane is not leader]
    writer.planes = [leader, other]
    for _ in range(CHANGES):
        writer.change()
    pass_time(QUIET_S)
    (child,) = child_of(leader)
    base = bucket.lease()["base"]
    change = threading.Thread(target=writer.change)
    with contextlib.ExitStack() as process:
        with frozen(child.pid):
            writer.planes = [leader]
            change.start()
            pass_time(QUIET_S)
            process.enter_context(frozen(leader.program.process.pid))
            upto = bucket.uploaded(base)
            wait_for(other.confirmed, "the other one leads")
        wait_for(lambda: bucket.uploaded(base) > upto, "the write is uploaded")
        switch(leader).touch()
    writer.planes = [leader, other]
    change.join(120)
    switch(leader).unlink()
    wait_for(lambda: (leader.leader() or {}).get("is_me") is False, "the one that was frozen stands by")


def switch(plane: Plane) -> Path:
    """While this is there, nothing tells it that another one leads."""
    return plane.folder / f"{plane.name}.switch"


@pytest.mark.parametrize("without", [(), ("no-lease-read",)], ids=["as-shipped", "no-lease-read"])
def test_a_machine_that_wakes_in_the_middle_of_a_write_acknowledges_nothing_that_nobody_will_read(
    pair_on_a_bucket: Callable[..., tuple[Pair, Bucket]], request: pytest.FixtureRequest, without: Sequence[str]
) -> None:
    pair, bucket = pair_on_a_bucket("no-lease-answers=FILE", *without)
    leader, _ = pair.wait_agreed()
    writer = Writer("w", [leader], 1)
    for _ in range(1 if without else FREEZES):
        woken_in_mid_write(pair, bucket, writer)
    for _ in range(CHANGES):
        writer.change()
    found = [*writer.wrong, *lost_or_doubled(bucket.restored(), [writer])]
    if without:
        assert found, "an acknowledged change was lost, and the comparison did not notice"
        figure(request, "the same, and the lease is not read before an answer: acknowledged changes found lost", len(found))
    else:
        assert found == []
        figure(
            request, f"machine frozen in mid-write, {FREEZES} times: acknowledged changes lost or doubled", f"0 of {writer.acknowledged}"
        )


def test_with_no_leader_a_control_plane_shows_what_is_in_the_bucket_and_how_old_that_is(
    pair_on_a_bucket: Callable[..., tuple[Pair, Bucket]],
) -> None:
    """The one that led is dead, and its lease is not over yet."""
    pair, _ = pair_on_a_bucket(lease=LONG)
    leader, view = pair.wait_agreed()
    (other,) = [plane for plane in pair.planes if plane is not leader]
    other.program.end()
    writer = Writer("w", [leader], 1)
    for _ in range(CHANGES):
        writer.change()
    assert writer.wrong == []
    leader.program.kill()
    other.start()
    other.wait_serving()
    rows = other.admin("GET", "/models")["models"]
    assert {(row["name"], row["revision"]) for row in rows} >= {(name, revision) for name, (revision, _) in writer.rows.items()}
    first_s = other.admin("GET", "/status")["store"]["age_s"]
    assert first_s is not None
    wait_for(lambda: other.admin("GET", "/status")["store"]["age_s"] > first_s, "it grows older")
    now = other.leader()
    assert now is not None
    assert (now["is_me"], now["owner"]) == (False, view["owner"])
