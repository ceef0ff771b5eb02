"""Old copies in the bucket: which go, which stay, and who may remove them."""

from __future__ import annotations

from datetime import timedelta

import obstore
import pytest

from llmgw.domain.errors import Broken, Unavailable
from llmgw.lease.bucket import open_bucket
from llmgw.replication.cleaning import clean_up
from llmgw.replication.prefix_store import LEASE, REMOVE_BATCH, PrefixStore, Seen
from llmgw.settings.object_place import ObjectPlace
from llmgw.wiring.machine import RealMachine

pytestmark = pytest.mark.slow
NONE = timedelta(0)


def put(place: ObjectPlace, *names: str) -> None:
    client = open_bucket(place, "", timedelta(seconds=10))
    for name in names:
        obstore.put(client, name, b"x")


def names(place: ObjectPlace) -> set[str]:
    client = open_bucket(place, "", timedelta(seconds=10))
    return {one["path"] for batch in obstore.list(client) for one in batch}


def yes() -> bool:
    return True


@pytest.fixture
def old(place: ObjectPlace) -> set[str]:
    """Ten epochs, of which the ninth is ours; a lease; what is not ours to remove."""
    everything = {f"e/{epoch}-a/000{level}/1-1.ltx" for epoch in range(1, 11) for level in (0, 9)}
    everything |= {LEASE, "e/notes/0000/1-1.ltx", "backup/e/1-a/x"}
    put(place, *sorted(everything))
    return everything


async def test_the_last_few_stay_and_ours_and_what_is_newer(machine: RealMachine, place: ObjectPlace, old: set[str]):
    removed = await clean_up(machine, PrefixStore(place), "e/9-a", yes, keep_age=NONE)
    assert removed == tuple(f"e/{epoch}-a" for epoch in range(1, 6))
    assert names(place) == {name for name in old if not name.startswith(tuple(f"{prefix}/" for prefix in removed))}


async def test_what_was_written_in_the_last_week_stays(machine: RealMachine, place: ObjectPlace, old: set[str]):
    assert await clean_up(machine, PrefixStore(place), "e/9-a", yes) == ()
    assert names(place) == old


async def test_only_who_leads_removes_and_stops_in_the_middle_when_that_is_over(machine: RealMachine, place: ObjectPlace, old: set[str]):
    store = PrefixStore(place)
    assert await clean_up(machine, store, "e/9-a", lambda: False, keep_age=NONE) == ()
    assert names(place) == old
    answers = iter([True, True, True, False])  # at first, for the first copy, for its objects, and no more
    assert await clean_up(machine, store, "e/9-a", lambda: next(answers, False), keep_age=NONE) == ("e/1-a",)
    assert {name for name in old if not name.startswith("e/1-a/")} == names(place)


def test_a_prefix_is_looked_at_to_its_end(place: ObjectPlace):
    put(place, "e/1-a/0000/1-1.ltx", "e/1-ab/0000/1-1.ltx")
    store = PrefixStore(place)
    assert store.prefixes() == ("e/1-a", "e/1-ab")
    seen = store.look("e/1-a")
    assert seen is not None
    assert seen.names == ("e/1-a/0000/1-1.ltx",)
    assert store.look("e/2-a") is None


async def test_a_copy_of_many_objects_is_left_half_removed_when_the_lease_is_gone(machine: RealMachine, place: ObjectPlace):
    many = {f"e/1-a/0000/{number:04}.ltx" for number in range(REMOVE_BATCH + 10)}
    put(place, *sorted(many), LEASE)  # the lease last: by its time the others are judged
    answers = iter([True, True, True, False])
    assert await clean_up(machine, PrefixStore(place), "e/2-a", lambda: next(answers, False), keep=0, keep_age=NONE) == ()
    assert len(names(place) & many) == 10


async def test_without_a_lease_nothing_is_removed(machine: RealMachine, place: ObjectPlace):
    put(place, "e/1-a/0000/1-1.ltx")
    assert await clean_up(machine, PrefixStore(place), "e/9-a", yes, keep=0, keep_age=NONE) == ()


async def test_a_store_that_does_not_answer_is_told(machine: RealMachine, place: ObjectPlace):
    gone = ObjectPlace(place.bucket, place.prefix, "http://127.0.0.1:1", place.region, place.credentials)
    with pytest.raises(Unavailable, match="it refuses connections"):
        await clean_up(machine, PrefixStore(gone), "e/9-a", yes)


def test_the_lease_is_never_removed(place: ObjectPlace, old: set[str]):
    store = PrefixStore(place)
    now = store.now()
    assert now is not None
    with pytest.raises(Broken, match=r"lease/control-plane\.json is not of an epoch's copy"):
        store.remove(Seen("lease", (LEASE,), now), yes)
    assert names(place) == old
