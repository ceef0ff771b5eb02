"""Keys of clients in the store: written once, changed under their revision, revoked for good, imported once."""

from __future__ import annotations

import attrs
import pytest

from llmgw.domain.errors import Conflict, NotFound, StaleEpoch, Unavailable
from llmgw.domain.policy import ApiKey
from llmgw.store import api_keys, audit
from llmgw.store.api_keys import StoredKey
from llmgw.store.audit import Origin

ANN = Origin("ann", "192.0.2.7", 1000.0)
BOB = Origin("bob", "192.0.2.8", 2000.0)


def key(name: str = "team-a", digit: str = "a", **rights: object) -> ApiKey:
    return ApiKey(name, digit * 64, **rights)  # type: ignore[arg-type]


async def create(store, one: ApiKey, again: str | None = None) -> StoredKey:
    stored, _ = await api_keys.create(store, 1, StoredKey(one, "sk-12345"), one.name, again, ANN)
    return stored


async def entries(store) -> list[tuple[str, str, str, int, int]]:
    found = await audit.latest(store)
    return [(one.who, one.what, one.object, one.old_revision, one.new_revision) for one in reversed(found)]


async def test_a_key_comes_back_as_it_was_created_with_who_and_when(store):
    one = key(models=("m1", "org/m:q4"), max_parallel=3, requests_per_minute=60, tokens_per_minute=9000, expires_wall_s=9e9, operator=True)
    stored = await create(store, one)
    rows = await api_keys.load(store)
    assert rows.keys == (stored,)
    assert (stored.key, stored.prefix, stored.created_by, stored.created_wall_s, stored.revoked) == (one, "sk-12345", "ann", 1000.0, False)
    assert await entries(store) == [("ann", "create", "key/team-a", 0, stored.revision)]


async def test_a_name_and_a_secret_are_given_to_one_key_only(store):
    await create(store, key())
    for other in (key(digit="b"), key("team-b")):
        with pytest.raises(Conflict) as refused:
            await create(store, other)
        assert refused.value.code == "key_exists"
    assert len((await api_keys.load(store)).keys) == 1


async def test_a_repeat_of_a_creation_finds_the_first_ones_row_and_writes_nothing(store):
    first = await create(store, key(), "k1")
    again, is_new = await api_keys.create(store, 1, StoredKey(key(digit="c"), "sk-other"), "team-a", "k1", ANN)
    assert (again, is_new) == (first, False)
    with pytest.raises(Conflict) as reused:
        await api_keys.create(store, 1, StoredKey(key("other", "d")), "other", "k1", ANN)
    assert reused.value.code == "idempotency_key_reused"
    assert len(await entries(store)) == 1


async def test_an_update_changes_rights_under_the_revision_that_it_names_and_never_the_secret(store):
    first = await create(store, key())
    wanted = key(digit="f", models=("m1",), requests_per_minute=5)
    second = await api_keys.update(store, 1, wanted, first.revision, "u1", BOB)
    assert second.key == attrs.evolve(wanted, sha256=first.key.sha256)
    assert second.revision > first.revision
    assert (second.created_by, second.prefix) == ("ann", "sk-12345")
    with pytest.raises(Conflict, match=rf"at revision {second.revision}, the edit began from {first.revision}") as refused:
        await api_keys.update(store, 1, key(), first.revision, None, BOB)
    assert refused.value.code == "revision_moved"
    assert await api_keys.update(store, 1, wanted, first.revision, "u1", BOB) == second  # a repeat is no race
    assert await api_keys.update(store, 1, wanted, None, None, BOB) == second  # nothing to change
    assert [what for _, what, *_ in await entries(store)] == ["create", "update"]


async def test_what_is_revoked_stays_so_until_its_name_is_given_out_anew_with_another_secret(store):
    first = await create(store, key())
    revoked = await api_keys.revoke(store, 1, "team-a", None, BOB)
    assert (revoked.revoked_wall_s, revoked.revoked_by, revoked.created_by) == (2000.0, "bob", "ann")
    assert await api_keys.revoke(store, 1, "team-a", None, ANN) == revoked
    with pytest.raises(Conflict) as refused:
        await api_keys.update(store, 1, key(models=("m1",)), None, None, ANN)
    assert refused.value.code == "key_revoked"
    with pytest.raises(Conflict, match="needs another"):
        await create(store, key())
    with pytest.raises(Conflict, match="has this secret already"):
        await create(store, key("team-b"))
    anew = await create(store, key(digit="b"))
    assert not anew.revoked
    assert anew.revision > revoked.revision > first.revision
    assert [what for _, what, *_ in await entries(store)] == ["create", "revoke", "create"]


async def test_a_key_that_is_not_there_is_named(store):
    for order in (api_keys.update(store, 1, key("nobody"), None), api_keys.revoke(store, 1, "nobody")):
        with pytest.raises(NotFound, match="'nobody'"):
            await order


async def test_a_files_keys_are_taken_once_in_the_life_of_a_cluster(store):
    await create(store, key("mine", "a"))
    assert not (await api_keys.load(store)).imported
    assert await api_keys.import_once(store, 1, (key("mine", "e"), key("theirs", "b"), key("same", "a")), 5.0)
    rows = await api_keys.load(store)
    assert rows.imported
    assert [(stored.key.name, stored.key.sha256[0], stored.prefix) for stored in rows.keys] == [
        ("mine", "a", "sk-12345"),
        ("theirs", "b", ""),
    ]
    assert not await api_keys.import_once(store, 1, (key("later", "c"),), 6.0)
    assert len((await api_keys.load(store)).keys) == 2


async def test_a_deposed_leader_changes_no_key(store):
    await create(store, key())
    await store.claim_epoch(7, "b-2")
    for order in (
        api_keys.create(store, 1, StoredKey(key("x", "b")), "x"),
        api_keys.update(store, 1, key(models=("m",))),
        api_keys.revoke(store, 1, "team-a"),
    ):
        with pytest.raises(StaleEpoch):
            await order
    assert not (await api_keys.load(store)).keys[0].revoked


@pytest.mark.parametrize("models", ["[", "3", "[1]"])
async def test_a_row_that_cannot_be_read_is_an_outage_and_no_crash(store, models: str):
    await create(store, key())
    await store.write(lambda connection, epoch: connection.execute("UPDATE api_keys SET models = ?", (models,)).fetchall(), 1)
    with pytest.raises(Unavailable, match="'team-a' cannot be read"):
        await api_keys.load(store)
