"""`/keys` against a real control plane: who may, what is told, and that a secret is told once."""

from __future__ import annotations

import hashlib
import json
import re

import pytest

from llmgw.control.controller import Objects
from llmgw.domain.model import Catalog
from llmgw.domain.policy import ApiKey
from llmgw.settings.objects import model_from_table
from llmgw.store import audit, idempotency

from .conftest import ADMIN, OPERATOR, VIEWER, running_admin

PATH = "/api/v1/keys"


async def create(admin, name: str = "team-a", **table: object):
    answer = await admin.call("POST", PATH, {"name": name, **table}, ADMIN)
    assert answer.status == 201, answer.json
    return answer.json


def routers_hashes(admin) -> dict[str, str]:
    return {key.name: key.sha256 for key in admin.controller.policy().keys}


async def test_a_created_keys_secret_is_told_once_and_routers_know_its_hash(admin):
    made = await create(admin, models=["m1"], requests_per_minute=60, expires="2090-01-01T00:00:00+02:00", operator=True)
    secret = made.pop("secret")
    assert re.fullmatch(r"sk-[0-9a-f]{64}", secret)
    assert secret.startswith(made["prefix"])
    assert (made["change"], made["state"], made["created_by"], made["expires"]) == ("created", "active", "admin", "2089-12-31T22:00:00Z")
    assert routers_hashes(admin) == {"team-a": hashlib.sha256(secret.encode()).hexdigest()}
    one = await admin.call("GET", f"{PATH}/team-a", token=VIEWER)
    assert one.headers["etag"] == f'"{made["revision"]}"'
    assert {**one.json, "change": "created", "durability": "none", "unknown_models": ["m1"]} == made
    listed = await admin.call("GET", PATH, token=VIEWER)
    assert listed.json == {"keys": [one.json], "next": None}
    for answer in (one, listed):
        assert secret not in answer.body.decode()
        assert hashlib.sha256(secret.encode()).hexdigest() not in answer.body.decode()


async def test_a_repeat_of_a_creation_gets_the_key_and_no_secret_which_is_kept_nowhere(admin):
    body = {"name": "team-a"}
    first = await admin.call("POST", PATH, body, ADMIN, Idempotency_Key="k1")
    again = await admin.call("POST", PATH, body, ADMIN, Idempotency_Key="k1")
    assert (first.status, again.status) == (201, 200)
    assert (again.json["change"], again.json["secret"], again.json["revision"]) == ("unchanged", None, first.json["revision"])
    secret = first.json["secret"]
    assert routers_hashes(admin)["team-a"] == hashlib.sha256(secret.encode()).hexdigest()
    other = await admin.call("POST", PATH, {"name": "team-b"}, ADMIN, Idempotency_Key="k1")
    assert (other.status, other.code) == (409, "idempotency_key_reused")
    store = admin.controller.store
    kept = await idempotency.find(store, "admin:k1", f"create key {json.dumps(body)}")
    assert kept == "team-a"
    dump = await store.read(lambda con: [con.execute(f"SELECT * FROM {table}").fetchall() for table in ("idempotency", "audit", "events")])
    assert secret not in repr(dump)


async def test_a_secret_of_ones_own_comes_as_its_hash(admin):
    digest = hashlib.sha256(b"mine").hexdigest()
    made = await create(admin, sha256=digest.upper())
    assert (made["secret"], made["prefix"]) == (None, "")
    assert routers_hashes(admin) == {"team-a": digest}


async def test_an_update_names_the_revision_that_it_edits(admin):
    made = await create(admin, requests_per_minute=60)
    path, match = f"{PATH}/team-a", f'"{made["revision"]}"'
    assert (await admin.call("PATCH", path, {"max_parallel": 2}, ADMIN)).status == 428
    changed = await admin.call("PATCH", path, {"max_parallel": 2, "expires": "2090-01-01T00:00:00Z"}, ADMIN, If_Match=match)
    assert (changed.status, changed.json["change"]) == (200, "updated")
    found = changed.json
    assert (found["max_parallel"], found["requests_per_minute"], found["expires"]) == (2, 60, "2090-01-01T00:00:00Z")
    late = await admin.call("PATCH", path, {"max_parallel": 3}, ADMIN, If_Match=match)
    assert (late.status, late.code) == (412, "revision_moved")
    match = f'"{found["revision"]}"'
    same = await admin.call("PATCH", path, {"max_parallel": 2}, ADMIN, If_Match=match)
    assert (same.json["change"], same.json["revision"]) == ("unchanged", found["revision"])
    never = await admin.call("PATCH", path, {"expires": None}, ADMIN, If_Match=match)
    assert never.json["expires"] is None
    (key,) = admin.controller.policy().keys
    assert (key.max_parallel, key.expires_wall_s) == (2, None)


async def test_a_key_is_changed_to_what_may_use_something_only(admin):
    made = await create(admin, models=["m1"])
    answer = await admin.call("PATCH", f"{PATH}/team-a", {"models": []}, ADMIN, If_Match=f'"{made["revision"]}"')
    assert (answer.status, answer.json["error"]["param"]) == (400, "models")
    (key,) = admin.controller.policy().keys
    assert key.models == ("m1",)


async def test_names_of_no_model_are_told_beside_the_key_that_is_made(admin):
    profile = {"engine": "openai", "url": "http://127.0.0.1:9"}
    await admin.controller.models.apply((model_from_table({"name": "m1", "aliases": ["fast"], "profile": [profile]}),))
    assert "unknown_models" not in await create(admin, "a", models=["m1", "fast"])
    assert "unknown_models" not in await create(admin, "b", models=["*", "later"])
    assert "unknown_models" not in await create(admin, "c")
    made = await create(admin, "d", models=["m1", "later", "fsat"])
    assert made["unknown_models"] == ["later", "fsat"]
    assert routers_hashes(admin).keys() == {"a", "b", "c", "d"}
    later = await admin.call("PATCH", f"{PATH}/d", {"models": ["fsat"]}, ADMIN, If_Match=f'"{made["revision"]}"')
    assert later.json["unknown_models"] == ["fsat"]


async def test_a_revoked_key_is_gone_from_the_policy_and_told_of_as_revoked(admin):
    await create(admin)
    gone = await admin.call("POST", f"{PATH}/team-a/revoke", token=ADMIN)
    assert (gone.status, gone.json["change"], gone.json["state"], gone.json["revoked_by"]) == (200, "revoked", "revoked", "admin")
    assert routers_hashes(admin) == {}
    again = await admin.call("POST", f"{PATH}/team-a/revoke", {}, ADMIN)
    assert (again.json["change"], again.json["revision"]) == ("unchanged", gone.json["revision"])
    edited = await admin.call("PATCH", f"{PATH}/team-a", {"max_parallel": 1}, ADMIN, If_Match=f'"{gone.json["revision"]}"')
    assert (edited.status, edited.code) == (409, "key_revoked")
    anew = await create(admin)
    assert anew["state"] == "active"
    kinds = [one["kind"] for one in (await admin.call("GET", "/api/v1/events", token=VIEWER)).json["events"]]
    assert [kind for kind in kinds if kind.startswith("key.")] == ["key.created", "key.revoked", "key.created"]
    found = await audit.latest(admin.controller.store)
    assert [(one.who, one.what, one.object) for one in found][::-1][-3:] == [
        ("admin", "create", "key/team-a"),
        ("admin", "revoke", "key/team-a"),
        ("admin", "create", "key/team-a"),
    ]


async def test_who_may_call_v1_is_an_admins_to_say(admin):
    made = await create(admin)
    match = {"If_Match": f'"{made["revision"]}"'}
    for token in (OPERATOR, VIEWER):
        assert (await admin.call("POST", PATH, {"name": "x"}, token)).status == 403
        assert (await admin.call("PATCH", f"{PATH}/team-a", {"max_parallel": 1}, token, **match)).status == 403
        assert (await admin.call("POST", f"{PATH}/team-a/revoke", token=token)).status == 403
    assert (await admin.call("GET", PATH, token=None)).status == 401
    assert list(routers_hashes(admin)) == ["team-a"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "name is what the key is called"),
        ({"name": ""}, "key.name"),
        ({"name": "a", "key": "plain"}, "unknown key 'key'"),
        ({"name": "a", "expires": "2090-01-01"}, "key.expires"),
        ({"name": "a", "expires": "2090-01-01T00:00:00"}, "the zone is missing"),
        ({"name": "a", "sha256": "abc"}, "64 hex digits"),
        ({"name": "a", "models": "m1"}, "key.models"),
        ({"name": "a", "models": []}, "the key could use nothing"),
        ({"name": "a", "max_parallel": -1, "tokens_per_minute": "many"}, "key.tokens_per_minute"),
        ({"name": "a", "operator": 1}, "key.operator"),
        ({"name": "k", "sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"}, "the hash of nothing"),
        ({"name": "k", "expires": "2020-01-01T00:00:00Z"}, "lies in the past"),
    ],
)
async def test_what_is_wrong_with_a_key_is_told_by_its_place_and_nothing_is_written(admin, body: dict, words: str):
    answer = await admin.call("POST", PATH, body, ADMIN)
    assert (answer.status, words in answer.json["error"]["message"]) == (400, True), answer.json
    assert (await admin.call("GET", PATH)).json["keys"] == []


async def test_a_key_that_is_not_there_is_404_and_the_nearest_is_named(admin):
    await create(admin, "team/a:1")
    assert (await admin.call("GET", f"{PATH}/team%2Fa:1")).json["name"] == "team/a:1"
    for method, path in (("GET", f"{PATH}/team/a:2"), ("POST", f"{PATH}/team/a:2/revoke"), ("PATCH", f"{PATH}/team/a:2")):
        answer = await admin.call(method, path, {"max_parallel": 1} if method == "PATCH" else None, ADMIN, If_Match='"1"')
        assert (answer.status, answer.code) == (404, "no_such_key")
        assert "did you mean 'team/a:1'?" in answer.json["error"]["message"]
    assert (await admin.call("POST", PATH, {"name": "team/a:1"}, ADMIN)).code == "key_exists"


async def test_without_a_store_the_files_keys_are_shown_and_changed_there(tmp_path):
    objects = Objects(Catalog(), keys=(ApiKey("b", "b" * 64), ApiKey("a", "a" * 64, expires_wall_s=1.0)))
    async with running_admin(tmp_path, objects=objects, file="/etc/llmgw/llmgw.toml") as admin:
        found = (await admin.call("GET", PATH, token=VIEWER)).json["keys"]
        assert [(row["name"], row["state"], row["created_at"], row["prefix"]) for row in found] == [
            ("a", "expired", None, ""),
            ("b", "active", None, ""),
        ]
        for method, path in (("POST", PATH), ("POST", f"{PATH}/a/revoke")):
            answer = await admin.call(method, path, {"name": "c"} if path == PATH else {}, ADMIN)
            assert (answer.status, answer.code) == (409, "file_holds_it")
            assert "/etc/llmgw/llmgw.toml" in answer.json["error"]["message"]


async def test_a_stores_first_leader_imports_its_files_keys_once(tmp_path):
    objects = Objects(Catalog(), keys=(ApiKey("b", "b" * 64, ("m1",)), ApiKey("a", "a" * 64)))
    async with running_admin(tmp_path, objects=objects) as admin:
        found = (await admin.call("GET", PATH)).json["keys"]
        assert [(row["name"], row["models"], row["created_by"]) for row in found] == [("a", ["*"], ""), ("b", ["m1"], "")]
        assert admin.controller.policy().keys == tuple(sorted(objects.keys, key=lambda key: key.name))
        await admin.call("POST", f"{PATH}/b/revoke", token=ADMIN)
        await admin.controller.reread()
        assert list(routers_hashes(admin)) == ["a"]
