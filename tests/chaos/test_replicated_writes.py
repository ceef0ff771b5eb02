"""On a bucket no acknowledged change is lost, and the comparison that says so notices when the lease is not read before an answer.

The schedule is the one that needs this rule: a machine stops in the middle of a write, and when it wakes its Litestream uploads the
write before its control plane has heard that another one leads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.bucket import Bucket
from tests.chaos.faults import Faults
from tests.chaos.planes import FULL, Pair, figure
from tests.chaos.writer import SettingsWriter, Writer, Writing, lost_or_doubled, versions_lost_or_doubled
from tests.seaweed import seaweed

pytestmark = pytest.mark.slow

# Another leads before Litestream's answer is given up, which takes 5 s.
LEASE = "[lease]\nttl_s = 2\nrenew_s = 0.6\npoll_s = 0.2"
FREEZES = 10 if FULL else 2
TRIES = 10  # without the rule: until a change is lost


@pytest.fixture
def pair_on_a_bucket(tmp_path: Path) -> Iterator[Callable[..., tuple[Pair, Bucket]]]:
    """Makes the test's pair of two that are altered so, and starts it."""
    made: list[Pair] = []
    (tmp_path / "s3").mkdir()
    with seaweed(tmp_path / "s3") as server:

        def make(*changes: str) -> tuple[Pair, Bucket]:
            buckets: list[Bucket] = []

            def kept(folder: Path) -> Bucket:
                buckets.append(Bucket(server, folder))
                return buckets[0]

            pair = Pair(tmp_path / "pair", LEASE, kept=kept)
            made.append(pair)
            for plane in pair.planes:
                plane.altered = changes
            pair.start()
            return pair, buckets[0]

        yield make
        for pair in made:
            pair.close()


@pytest.mark.parametrize("without", [(), ("no-lease-read",)], ids=["as-shipped", "no-lease-read"])
def test_a_machine_that_wakes_in_the_middle_of_a_write_acknowledges_nothing_that_nobody_will_read(
    pair_on_a_bucket: Callable[..., tuple[Pair, Bucket]], request: pytest.FixtureRequest, without: Sequence[str]
) -> None:
    pair, bucket = pair_on_a_bucket(*without)
    models, settings = Writer("w", pair.planes, 1), SettingsWriter("s", pair.planes, 1)
    faults = Faults(pair.planes, bucket, [models, settings], 1)
    threads = [Writing(writer) for writer in (models, settings)]
    try:
        for _ in range(TRIES if without else FREEZES):
            if not models.wrong and not settings.wrong:
                faults.take_over(faults.freeze_machine)
    finally:
        for thread in threads:
            thread.finish()
    store = bucket.restored()
    found: list[Any] = [*models.wrong, *settings.wrong, *lost_or_doubled(store, [models]), *versions_lost_or_doubled(store, settings)]
    if without:
        assert found, "an acknowledged change was lost, and the comparison did not notice"
        figure(request, f"the same without the read of the lease, {len(faults.done)} freezes: found lost", len(found))
    else:
        assert found == []
        count = models.acknowledged + settings.acknowledged
        figure(request, f"machine frozen in mid-write, {FREEZES} times: acknowledged changes lost or doubled", f"0 of {count:,}")
