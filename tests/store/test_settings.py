"""Versions of the cluster settings in the store: one line of them, written once each, by whoever leads."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path

import apsw
import attrs
import pytest
import trio
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from llmgw.domain.errors import Broken, Conflict, NotFound, StaleEpoch, Unavailable
from llmgw.domain.model import ModelSpec, Profile
from llmgw.domain.settings_version import Applied, Held, Pause, PlaneSettings, RolloutPhase, RolloutRow
from llmgw.store import audit, idempotency, models, settings
from llmgw.store.audit import Origin
from llmgw.store.connection import MEMORY, FileStore, Store
from tests.store.runners import in_thread, inline

ANN = Origin("ann", "192.0.2.7", 1000.0)
A, B, C = "[lease]\nttl_s = 20\n", "[lease]\nttl_s = 30\n", "[lease]\nttl_s = 40\n"


async def write(store: Store, parent: int, document: str, key: str | None = None, epoch: int = 1, reason: str = "why"):
    return await settings.write_version(store, epoch, parent, document, "ann", reason, key, ANN)


async def numbers(store: Store) -> list[int]:
    return [version.version for version in await settings.history(store)]


async def test_a_store_without_a_version_says_so(store):
    assert await settings.newest(store) is None
    assert await settings.head(store) == (None, RolloutRow(), None)
    assert await settings.history(store) == ()
    with pytest.raises(NotFound, match="no version 1; the newest is 0") as caught:
        await settings.version(store, 1)
    assert caught.value.code == "no_such_version"


async def test_a_version_comes_back_as_it_was_written_with_the_digest_of_its_text(store):
    written = await write(store, 0, A)
    assert (written.version, written.parent, written.document, written.author, written.reason) == (1, 0, A, "ann", "why")
    assert written.sha256 == hashlib.sha256(A.encode()).hexdigest()
    assert written.created_wall_s == ANN.at_wall_s
    assert await settings.version(store, 1) == written == await settings.newest(store)
    assert (await settings.head(store))[0] == (1, written.sha256)


async def test_versions_make_one_line_each_one_above_its_parent(store):
    for parent, document in enumerate((A, B, C, A)):
        assert (await write(store, parent, document)).parent == parent
    assert [(one.version, one.parent) for one in await settings.history(store)] == [(4, 3), (3, 2), (2, 1), (1, 0)]


@pytest.mark.parametrize("parent", [0, 1, 3, -1, 99])
async def test_an_edit_of_a_version_that_is_not_the_newest_is_refused_and_writes_nothing(store, parent):
    await write(store, 0, A)
    await write(store, 1, B)
    with pytest.raises(Conflict, match=rf"at version 2, the edit began from {parent}") as refused:
        await write(store, parent, C, key="k")
    assert refused.value.code == "revision_moved"
    assert await numbers(store) == [2, 1]
    assert await idempotency.find(store, "k") is None
    assert len(await audit.latest(store)) == 2


async def test_a_document_that_says_what_its_parent_says_makes_no_version(store):
    first = await write(store, 0, A)
    assert await write(store, 1, A, key="k", reason="another") == first
    assert await numbers(store) == [1]
    assert [entry.what for entry in await audit.latest(store)] == ["write"]


async def test_a_repeat_under_the_same_key_gets_the_first_answer_whatever_came_since(store):
    first = await write(store, 0, A, key="k")
    await write(store, 1, B)
    await write(store, 2, C)
    assert await write(store, 0, A, key="k") == first
    assert await numbers(store) == [3, 2, 1]


async def test_a_repeat_of_an_edit_that_changed_nothing_gets_that_version_again(store):
    first = await write(store, 0, A)
    await write(store, 1, A, key="k")
    await write(store, 1, B)
    assert await write(store, 1, A, key="k") == first


@pytest.mark.parametrize(("parent", "document", "reason"), [(1, B, "why"), (0, B, "why"), (0, A, "another")])
async def test_a_key_that_was_used_for_another_edit_is_refused(store, parent, document, reason):
    await write(store, 0, A, key="k")
    with pytest.raises(Conflict) as refused:
        await write(store, parent, document, key="k", reason=reason)
    assert refused.value.code == "idempotency_key_reused"
    assert await numbers(store) == [1]


async def test_who_wrote_a_version_stands_in_the_audit_with_both_numbers(store):
    await write(store, 0, A)
    await write(store, 1, B, epoch=4)
    (entry, _) = await audit.latest(store)
    assert (entry.who, entry.peer, entry.what, entry.object) == ("ann", "192.0.2.7", "write", "settings")
    assert (entry.epoch, entry.old_revision, entry.new_revision) == (4, 1, 2)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE cluster_settings SET document = ''",
        "UPDATE cluster_settings SET author = 'bob' WHERE version = 1",
        "DELETE FROM cluster_settings",
    ],
)
async def test_a_version_is_never_changed_and_never_removed(store, statement):
    written = await write(store, 0, A)
    with pytest.raises((Broken, Unavailable)) as refused:
        await store.write(lambda connection, epoch: connection.execute(statement), 1)
    assert isinstance(refused.value.__cause__, apsw.ConstraintError)
    assert await settings.history(store) == (written,)


@pytest.mark.parametrize(("version", "parent"), [(3, 1), (2, 0), (0, -1)])
async def test_the_store_itself_refuses_a_version_that_is_not_one_above_its_parent(store, version, parent):
    await write(store, 0, A)
    row = (version, parent, B, "0" * 64, "", "", 0.0)
    with pytest.raises((Broken, Unavailable)):
        await store.write(lambda connection, epoch: connection.execute("INSERT INTO cluster_settings VALUES (?, ?, ?, ?, ?, ?, ?)", row), 1)
    assert await numbers(store) == [1]


async def test_a_history_comes_in_pages_newest_first(store):
    for parent in range(5):
        await write(store, parent, (A, B)[parent % 2])
    assert [one.version for one in await settings.history(store, 2)] == [5, 4]
    assert [one.version for one in await settings.history(store, 2, before=4)] == [3, 2]
    assert [one.version for one in await settings.history(store, 2, before=2)] == [1]
    assert await settings.history(store, 2, before=1) == ()
    assert [one.version for one in await settings.history(store, 0)] == [5]
    assert len(await settings.history(store, 10_000)) == 5


async def test_a_page_of_the_history_has_an_end(store):
    for parent in range(settings.PAGE_MAX + 5):
        await write(store, parent, (A, B)[parent % 2])
    assert len(await settings.history(store, 10**9)) == settings.PAGE_MAX


# --- who writes


UNITS = {
    "write": lambda store, epoch: write(store, 1, B, epoch=epoch),
    "repeat": lambda store, epoch: write(store, 0, A, key="k", epoch=epoch),
    "import": lambda store, epoch: settings.import_first(store, epoch, B, "ctl", 1.0),
    "applied": lambda store, epoch: settings.save_applied(store, epoch, [Applied("http://a", "a", PlaneSettings(live=1), 1.0)]),
    "rollout": lambda store, epoch: settings.save_rollout(store, epoch, RolloutRow(token="http://a")),
    "pause": lambda store, epoch: settings.pause(store, epoch, Pause("works", "ann", 1.0)),
    "resume": settings.resume,
}


@pytest.mark.parametrize("unit", UNITS)
async def test_nothing_is_written_by_who_does_not_lead_any_more(store, unit):
    await write(store, 0, A, key="k", epoch=5)
    before = await settings.head(store)
    with pytest.raises(StaleEpoch) as refused:
        await UNITS[unit](store, 4)
    assert refused.value.epoch == 5
    assert await settings.head(store) == before
    assert await settings.load_applied(store) == ()


@pytest.mark.parametrize("writers", [8])
async def test_of_writers_that_begin_from_one_parent_exactly_one_wins(tmp_path: Path, writers: int):
    """Two processes' connections on one file, each with several writers at once, each from a thread of its own."""
    stores = [await FileStore.open(tmp_path / "s.db", in_thread) for _ in range(2)]
    try:
        await write(stores[0], 0, A)
        won: list[int] = []
        lost: list[int] = []

        async def one(number: int) -> None:
            try:
                version = await write(stores[number % 2], 1, f"[events]\nkeep_days = {number + 1}\n", key=f"k{number}")
            except Conflict:
                lost.append(number)
            else:
                assert version.version == 2
                won.append(number)

        async with trio.open_nursery() as nursery:
            for number in range(writers):
                nursery.start_soon(one, number)
        assert (len(won), len(lost)) == (1, writers - 1)
        newest = await settings.newest(stores[1])
        assert newest is not None
        assert newest.document == f"[events]\nkeep_days = {won[0] + 1}\n"
        assert await numbers(stores[0]) == [2, 1]
        assert (await write(stores[1], 1, newest.document, key=f"k{won[0]}")) == newest
    finally:
        for store in stores:
            store.close()


@hypothesis_settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from((A, B, C)), st.none() | st.sampled_from("xy")), max_size=12))
def test_whatever_is_tried_in_any_order_the_line_of_versions_is_whole(tries):
    async def main() -> None:
        store = await FileStore.open(MEMORY, inline)
        accepted: dict[int, str] = {}
        answers: dict[str, tuple[tuple[int, str], int]] = {}
        for parent, document, key in tries:
            try:
                version = await write(store, parent, document, key)
            except Conflict:
                continue
            if key is not None:
                asked, answer = answers.setdefault(key, ((parent, document), version.version))
                assert (asked, answer) == ((parent, document), version.version)
            assert accepted.setdefault(version.version, document) == document
        found = await settings.history(store)
        assert [one.version for one in found] == list(range(len(found), 0, -1))
        assert {one.version: one.document for one in found} == accepted
        assert all(one.document != other.document for one, other in itertools.pairwise(found))
        store.close()

    trio.run(main)


# --- the first version


SPEC = ModelSpec("m", (Profile("p", "command", command=("/bin/engine",)),))


async def test_the_first_start_imports_and_every_later_one_finds_a_version(store):
    first = await settings.import_first(store, 1, A, "ctl-1", 5.0)
    assert first is not None
    assert (first.version, first.parent, first.document, first.author, first.created_wall_s) == (1, 0, A, "ctl-1", 5.0)
    assert await settings.import_first(store, 2, B, "ctl-2", 6.0) is None
    assert await settings.history(store) == (first,)
    (entry,) = await audit.latest(store)
    assert (entry.who, entry.what, entry.new_revision) == ("ctl-1", "import", 1)


async def test_b160_an_import_that_is_left_in_place_imports_once(store):
    """gpustack/gpustack#3070: a one-shot migration ran again at each restart and failed."""
    await settings.import_first(store, 1, A, "ctl", 1.0)
    await write(store, 1, B)
    for epoch in (1, 2, 3):
        assert await settings.import_first(store, epoch, A, "ctl", 1.0) is None
    newest = await settings.newest(store)
    assert newest is not None
    assert newest.document == B


async def test_settings_and_models_are_imported_together_or_not_at_all(store):
    def import_models_and_die(connection: apsw.Connection, epoch: int) -> None:
        import_models(connection, epoch)
        raise Unavailable("the disk is full")

    def import_models(connection: apsw.Connection, epoch: int) -> None:
        models.import_unit(connection, epoch, (SPEC,))

    with pytest.raises(Unavailable):
        await settings.import_first(store, 1, A, "ctl", 1.0, import_models_and_die)
    assert await settings.newest(store) is None
    assert (await models.load(store)).models == ()
    assert await audit.latest(store) == ()
    await settings.import_first(store, 1, A, "ctl", 1.0, import_models)
    assert (await models.load(store)).models == (SPEC,)
    assert await numbers(store) == [1]


async def test_what_is_imported_beside_the_settings_has_a_mark_of_its_own(store):
    """A store of a build before settings versions has models and no version: its first start with this build imports the settings alone."""
    calls = []
    await settings.import_first(store, 1, A, "ctl", 1.0, lambda connection, epoch: calls.append(epoch))
    await settings.import_first(store, 2, A, "ctl", 1.0, lambda connection, epoch: calls.append(epoch))
    assert calls == [1, 2]


# --- what is kept beside the versions


def said(address: str, name: str = "a", at: float = 1.0, **values) -> Applied:
    return Applied(address, name, PlaneSettings(**values), at)


async def test_what_a_control_plane_says_replaces_what_it_said_before(store):
    await settings.save_applied(store, 1, [said("http://b", live=1, applied=1), said("http://a", live=1)])
    newer = said("http://a", "renamed", 2.0, live=2, applied=1, pending=2, restart_for_file=True, up_s=7.5)
    await settings.save_applied(store, 1, [newer])
    assert await settings.load_applied(store) == (newer, said("http://b", live=1, applied=1))


async def test_what_was_refused_stays_in_the_history_after_it_has_come_round(store):
    await settings.save_applied(
        store, 1, [said("http://a", live=1, refused=2, why="no such file"), said("http://b", "b", refused=3, why="x")]
    )
    await settings.save_applied(store, 1, [said("http://a", live=3, applied=3)])
    assert await settings.load_refused(store) == ((2, "a", "no such file"), (3, "b", "x"))
    await settings.save_applied(store, 1, [said("http://a", live=3, refused=2, why="newer words")])
    assert (await settings.load_refused(store))[0] == (2, "a", "newer words")


async def test_a_roll_out_comes_back_as_it_was_saved(store):
    assert await settings.load_rollout(store) == RolloutRow()
    row = RolloutRow(
        RolloutPhase.PROVING, 7, ("http://a", "http://b"), "http://a", "http://a", (Held(5, "x"), Held(6, "y")), "why", ("http://b",), True
    )
    await settings.save_rollout(store, 1, row)
    await settings.save_rollout(store, 1, attrs.evolve(row, token=""))
    assert await settings.load_rollout(store) == attrs.evolve(row, token="")
    assert (await settings.head(store))[1].is_held(6)


async def test_a_pause_stands_until_somebody_resumes(store):
    assert await settings.load_pause(store) is None
    assert await settings.resume(store, 1, ANN) is False
    ann = Pause("works", "ann", 5.0)
    assert await settings.pause(store, 1, ann, ANN) == ann
    assert await settings.pause(store, 1, Pause("more works", "bob", 6.0), ANN) == ann
    assert await settings.load_pause(store) == ann == (await settings.head(store))[2]
    assert await settings.resume(store, 1, ANN) is True
    assert await settings.load_pause(store) is None
    assert [entry.what for entry in await audit.latest(store)] == ["resume", "pause"]


@pytest.mark.parametrize("text", ["{", "[]", '{"phase": "dancing"}', '{"members": 3}'])
async def test_a_row_that_cannot_be_read_is_told_and_not_taken_for_an_empty_one(store, text):
    await settings.save_rollout(store, 1, RolloutRow(token="http://a"))
    await store.write(lambda connection, epoch: connection.execute("UPDATE rollout SET row = ?", (text,)), 1)
    with pytest.raises(Unavailable, match="cannot be read") as caught:
        await settings.load_rollout(store)
    assert caught.value.code == "storage_unavailable"
