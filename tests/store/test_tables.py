"""What each family of tables promises."""

from __future__ import annotations

import attrs
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.domain.errors import Conflict, Invalid, NotFound, StaleEpoch, Unavailable
from llmgw.domain.event import Event, Level
from llmgw.domain.holds import Hold
from llmgw.domain.ids import NodeId
from llmgw.domain.model import ENGINES, Catalog, ModelKind, ModelSpec, Profile, ReplicaCounts
from llmgw.store import admin_tokens, audit, engine_choices, events, holds, idempotency, meta, models, nodes
from llmgw.store.admin_tokens import AdminToken, Role
from llmgw.store.audit import Origin
from llmgw.store.connection import MEMORY, FileStore, Store
from llmgw.store.nodes import StoredNode
from tests.store.runners import in_thread, inline


def spec(name: str, *aliases: str, count: int = 1) -> ModelSpec:
    return ModelSpec(
        name, (Profile("p", "command", command=("/bin/engine",)),), aliases, replicas=ReplicaCounts(min=0, max=count, count=count)
    )


ANN = Origin("ann", "192.0.2.7", 1000.0)


async def test_a_model_comes_back_as_it_was_put(store):
    revision = await models.put(store, 1, spec("org/m:q4", "fast"))
    rows = await models.load(store)
    assert rows.models == (spec("org/m:q4", "fast"),)
    assert (rows.revision, rows.revisions["org/m:q4"]) == (revision, revision)


async def test_an_edit_of_a_row_that_moved_is_refused(store):
    first = await models.put(store, 1, spec("m"))
    second = await models.put(store, 1, spec("m", count=2), expected_revision=first)
    with pytest.raises(Conflict, match=rf"revision {second}.*from {first}") as refused:
        await models.put(store, 1, spec("m", count=3), expected_revision=first)
    assert refused.value.code == "revision_moved"
    assert (await models.load(store)).models[0].replicas.count == 2


async def test_create_only_refuses_an_existing_row_and_a_removed_one_cannot_be_edited(store):
    first = await models.put(store, 1, spec("m"), expected_revision=0)
    with pytest.raises(Conflict, match="there already"):
        await models.put(store, 1, spec("m"), expected_revision=0)
    await models.remove(store, 1, "m")
    with pytest.raises(Conflict, match="not there any more"):
        await models.put(store, 1, spec("m"), expected_revision=first)
    assert await models.put(store, 1, spec("m"), expected_revision=0) > first


async def test_putting_the_same_again_keeps_the_revision(store):
    first = await models.put(store, 1, spec("m"))
    assert await models.put(store, 1, spec("m")) == first
    assert (await models.load(store)).revision == first


async def test_two_models_never_share_a_name(store):
    await models.put(store, 1, spec("a", "fast"))
    for other in (spec("fast"), spec("b", "fast"), spec("b", "a")):
        with pytest.raises(Conflict, match="already used by model 'a'"):
            await models.put(store, 1, other)
    await models.put(store, 1, spec("a"))
    await models.put(store, 1, spec("b", "fast"))


async def test_an_apply_of_many_takes_all_or_none_and_may_swap_names(store):
    await models.put_many(store, 1, [spec("a", "x"), spec("b", "y")])
    before = await models.load(store)
    with pytest.raises(Conflict):
        await models.put_many(store, 1, [spec("a", "z"), spec("c", "y")])
    assert await models.load(store) == before
    await models.put_many(store, 1, [spec("a", "y"), spec("b", "x")])
    assert [model.aliases for model in (await models.load(store)).models] == [("y",), ("x",)]
    assert Catalog((await models.load(store)).models)


async def test_an_apply_that_changes_nothing_keeps_the_sets_revision(store):
    revision = await models.put_many(store, 1, [spec("a"), spec("b")])
    assert await models.put_many(store, 1, [spec("a"), spec("b")]) == revision


async def test_removing_a_model_frees_its_names_and_forgets_its_choice(store):
    await models.put(store, 1, spec("a", "fast"))
    await engine_choices.choose(store, 1, "a", "p")
    await models.remove(store, 1, "a")
    assert dict(await engine_choices.load(store)) == {}
    await models.put(store, 1, spec("fast"))
    with pytest.raises(NotFound):
        await models.remove(store, 1, "a")


async def test_a_repeat_under_one_key_is_carried_out_once(store):
    first = await models.put(store, 1, spec("m"), 0, "key-1", ANN)
    assert await models.put(store, 1, spec("m"), 0, "key-1", ANN) == first
    removed = await models.remove(store, 1, "m", None, "key-2")
    assert await models.remove(store, 1, "m", None, "key-2") == removed
    assert (await models.load(store)).models == ()


async def test_a_key_used_for_something_else_is_refused(store):
    await models.put(store, 1, spec("m"), key="key-1")
    with pytest.raises(Conflict) as refused:
        await models.put(store, 1, spec("other"), key="key-1")
    assert refused.value.code == "idempotency_key_reused"
    assert len((await models.load(store)).models) == 1


async def test_a_refused_write_leaves_its_key_unused(store):
    await models.put(store, 1, spec("m"))
    with pytest.raises(Conflict):
        await models.put(store, 1, spec("m", count=2), 99, "key-1")
    revision = (await models.load(store)).revisions["m"]
    assert await models.put(store, 1, spec("m", count=2), revision, "key-1") > revision


async def test_answers_are_kept_for_a_day(store):
    await idempotency.keep(store, 1, "old", "r", {"status": 200}, 1000.0)
    await idempotency.keep(store, 1, "new", "r", [1, "ü"], 90_000.0)
    assert await idempotency.find(store, "old", "r") == {"status": 200}
    day_later_s = 1000.0 + idempotency.KEEP_S + 1
    assert await idempotency.trim(store, 1, day_later_s) == 0  # a clock that is wrong by a day drops nothing
    assert await idempotency.trim(store, 1, day_later_s, kept_min=1) == 1
    assert await idempotency.find(store, "old", "r") is None
    assert await idempotency.find(store, "new", "r") == [1, "ü"]


async def test_two_stores_on_one_file_import_a_files_models_once(tmp_path):
    stores = [await FileStore.open(tmp_path / "llmgw.db", in_thread) for _ in range(2)]
    answers: list[bool] = []

    async def start(own: Store, name: str) -> None:
        answers.append(await models.import_once(own, 1, [spec(name)]))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(start, stores[0], "a")
        nursery.start_soon(start, stores[1], "b")
    assert sorted(answers) == [False, True]
    rows = await models.load(stores[0])
    assert len(rows.models) == 1
    assert rows.imported
    for own in stores:
        own.close()


async def test_an_import_of_nothing_also_counts_and_a_removed_model_does_not_come_back(store):
    assert await models.import_once(store, 1, [spec("a")])
    await models.remove(store, 1, "a")
    assert not await models.import_once(store, 1, [spec("a")])
    assert (await models.load(store)).models == ()


async def test_a_cluster_id_is_made_once(store):
    assert (await meta.load(store)).cluster_id is None
    assert await meta.ensure_cluster_id(store, 1, "first") == "first"
    assert await meta.ensure_cluster_id(store, 1, "second") == "first"


async def test_a_row_that_cannot_be_read_names_its_model(store):
    await models.put(store, 1, spec("m"))
    await store.write(lambda con, epoch: con.execute("UPDATE models SET spec = '{}'").fetchall(), 1)
    with pytest.raises(Unavailable, match="'m'"):
        await models.load(store)


async def test_a_text_that_is_not_unicode_is_invalid(store):
    with pytest.raises(Invalid):
        await engine_choices.choose(store, 1, "m\ud800", "p")


async def test_engine_choices_are_kept_and_cleared(store):
    await engine_choices.choose(store, 1, "m", "vllm")
    await engine_choices.choose(store, 1, "m", "llama")
    assert dict(await engine_choices.load(store)) == {"m": "llama"}
    assert await engine_choices.clear(store, 1, "m")
    assert not await engine_choices.clear(store, 1, "m")


async def test_a_facility_has_one_hold_and_the_later_replaces_it(store):
    assert await holds.add(store, 1, Hold("room-1", "power", author="ann"))
    assert not await holds.add(store, 1, Hold("room-1", "water", drain=True, until_wall_s=5.5))
    assert await holds.load(store) == (Hold("room-1", "water", True, 5.5),)
    assert await holds.remove(store, 1, "room-1")
    assert not await holds.remove(store, 1, "room-1")


async def test_nodes_come_back_as_saved(store):
    node = StoredNode(NodeId("n1"), "gpu-1", "room-1", "10.0.0.1", True, True, 99.5, {"gpu": "h100"}, 12.25, False)
    await nodes.save(store, 1, node)
    await nodes.save_many(store, 1, [StoredNode(NodeId("n0"), "gpu-0"), attrs.evolve(node, last_seen_wall_s=13.0)])
    assert await nodes.load(store) == (StoredNode(NodeId("n0"), "gpu-0"), attrs.evolve(node, last_seen_wall_s=13.0))
    assert await nodes.remove(store, 1, NodeId("n1"))
    assert not await nodes.remove(store, 1, NodeId("n1"))


async def test_events_get_numbers_that_are_never_used_again(store):
    first = await events.append(store, 3, [Event("a.b", "replica/x", "one", 10.0), Event("a.c", "node/y", "two", 20.0, level=Level.ERROR)])
    assert [(event.seq, event.epoch) for event in first] == [(1, 3), (2, 3)]
    assert await events.trim(store, 3, 30.0) == 2
    (third,) = await events.append(store, 4, [Event("a.d", "o", "x" * 10_000, 30.0, epoch=3)])
    assert (third.seq, third.epoch, len(third.text)) == (3, 3, events.TEXT_MAX)


async def test_events_are_read_in_pages_oldest_first(store):
    await events.append(store, 1, [Event("k", "o", str(number), 0.0) for number in range(10)])
    page = await events.after(store, 3, 4)
    assert [event.seq for event in page] == [4, 5, 6, 7]
    assert [event.seq for event in await events.latest(store, 3)] == [8, 9, 10]
    assert await events.after(store, 10) == ()
    assert len(await events.after(store, 0, 10**9)) == 10
    assert await events.after(store, 0, -5) == ()


async def test_events_of_a_refused_epoch_are_not_stored(store):
    await store.claim_epoch(5, "ctl-1")
    with pytest.raises(StaleEpoch):
        await events.append(store, 4, [Event("k", "o", "t", 0.0)])
    assert await events.latest(store) == ()


async def test_tokens_are_added_once_found_and_revoked(store):
    token = AdminToken("ann", "a" * 64, Role.OPERATOR, 5.0)
    await admin_tokens.add(store, 1, token, ANN)
    for other in (token, AdminToken("ann", "b" * 64), AdminToken("bob", "a" * 64)):
        with pytest.raises(Conflict):
            await admin_tokens.add(store, 1, other)
    assert await admin_tokens.revoke(store, 1, "ann", 9.0)
    assert not await admin_tokens.revoke(store, 1, "ann", 10.0)
    assert await admin_tokens.load(store) == (attrs.evolve(token, revoked_wall_s=9.0),)


async def test_the_machines_own_token_is_ensured_and_replaced_when_the_file_was_made_anew(store):
    assert await admin_tokens.ensure(store, 1, AdminToken("admin-token", "a" * 64))
    assert not await admin_tokens.ensure(store, 1, AdminToken("admin-token", "a" * 64))
    assert await admin_tokens.ensure(store, 1, AdminToken("admin-token", "b" * 64))
    assert [token.sha256[0] for token in await admin_tokens.load(store)] == ["b"]


async def test_a_revoked_token_stays_revoked_when_its_file_is_read_again(store):
    await admin_tokens.ensure(store, 1, AdminToken("admin-token", "a" * 64))
    await admin_tokens.revoke(store, 1, "admin-token", 9.0)
    assert not await admin_tokens.ensure(store, 1, AdminToken("admin-token", "a" * 64))
    assert (await admin_tokens.load(store))[0].revoked_wall_s == 9.0


async def test_every_order_leaves_who_what_from_where_and_both_revisions(store):
    first = await models.put(store, 1, spec("m"), origin=ANN)
    second = await models.put(store, 1, spec("m", count=2), origin=ANN)
    await holds.add(store, 1, Hold("room-1", "power"), ANN)
    entries = await audit.latest(store)
    assert [(entry.what, entry.object, entry.old_revision, entry.new_revision) for entry in entries] == [
        ("hold", "facility/room-1", 0, 0),
        ("put", "model/m", first, second),
        ("put", "model/m", 0, first),
    ]
    assert {(entry.who, entry.peer, entry.at_wall_s, entry.epoch) for entry in entries} == {("ann", "192.0.2.7", 1000.0, 1)}
    assert await audit.trim(store, 1, 1000.5) == 3


# --- the round trip of any model that a catalog accepts

texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
names = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=20)
tables = st.dictionaries(texts, texts, max_size=3)


@st.composite
def profiles(draw: st.DrawFn, name: str) -> Profile:
    engine = draw(st.sampled_from(ENGINES))
    return Profile(
        name,
        engine,
        checkpoint=draw(names),
        gpus=draw(st.integers(0, 64)),
        share_gpu=draw(st.booleans()),
        memory_mib=draw(st.integers(0, 2**40)),
        args=tuple(draw(st.lists(texts, max_size=3))),
        env=draw(tables),
        selector=draw(tables),
        priority=draw(st.integers(-(2**31), 2**31)),
        weight=draw(st.floats(0, 1e308) | st.integers(0, 10).map(float)),
        command=tuple(draw(st.lists(texts, min_size=1, max_size=3))) if engine == "command" else (),
        ready_path="/" + draw(texts),
        url="https://" + draw(texts) if engine == "openai" else "",
        api_key_env=draw(texts),
    )


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    used = draw(st.lists(names, min_size=1, max_size=4, unique=True))
    least = draw(st.integers(0, 5))
    count = draw(st.integers(least, 10))
    return ModelSpec(
        used[0],
        tuple(draw(profiles(name)) for name in draw(st.lists(names, min_size=1, max_size=3, unique=True))),
        tuple(used[1:]),
        draw(st.sampled_from(ModelKind)),
        draw(texts),
        ReplicaCounts(least, draw(st.integers(count, 10)), count),
        draw(st.floats(0, 1e12)),
    )


@given(specs())
@settings(max_examples=60, deadline=None)
def test_any_model_that_a_catalog_accepts_comes_back_equal(model):
    Catalog((model,))

    async def main() -> None:
        store = await FileStore.open(MEMORY, inline)
        await models.put(store, 1, model)
        assert (await models.load(store)).models == (model,)
        store.close()

    trio.run(main)
