"""Two control planes on a bucket, as real processes under load, with Litestream and a real S3 server: what was acknowledged outlives
whatever happens to any of them, no request fails and no engine moves.

The short form is part of `make test`; `make chaos` sets LLMGW_CHAOS=full. LLMGW_FAILOVERS is how many there are, LLMGW_SEED of which
order. Nothing is asserted by time: what has a bound is measured, and printed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.chaos.bucket import Bucket, check_copies
from tests.chaos.faults import Faults
from tests.chaos.planes import FULL, Site, figure
from tests.chaos.writer import SettingsWriter, Writer, Writing, lost_or_doubled, versions_lost_or_doubled
from tests.seaweed import seaweed

pytestmark = pytest.mark.slow

LEASE = {"ttl_s": 5.0, "renew_s": 1.5, "poll_s": 0.5} if FULL else {"ttl_s": 3.0, "renew_s": 0.8, "poll_s": 0.25}
FAILOVERS = int(os.environ.get("LLMGW_FAILOVERS", "50" if FULL else "3"))
SEED = int(os.environ.get("LLMGW_SEED", "7"))
PAUSE_S = 0.05  # of a writer between two changes: the load has the other core


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    folder = tmp_path_factory.mktemp("bucket")
    with seaweed(folder) as server:
        yield Bucket(server, folder / "tokens")


@pytest.fixture(scope="module")
def site(bucket: Bucket, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("replicated"), **LEASE, store=bucket.folder, kept=bucket)
    try:
        site.start_all()
        yield site
    finally:
        site.close()


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
