"""The nouns of the API against a real control plane: what is answered, refused, repeated and recorded."""

from __future__ import annotations

import gzip
import json
import re
from urllib.parse import quote

import pytest
import trio

from llmgw.control.controller import Objects
from llmgw.domain.errors import Unavailable
from llmgw.domain.files import STORAGE_UNAVAILABLE
from llmgw.domain.model import Catalog, ModelSpec, Profile
from llmgw.store import audit
from llmgw.store.connection import MEMORY, FileStore

from .conftest import ADMIN, OPERATOR, VIEWER, running_admin, until


def table(name: str, **more: object) -> dict[str, object]:
    return {"name": name, "profile": [{"name": "p", "engine": "command", "command": ["/bin/engine", "{port}"]}], **more}


async def put(admin, name: str, body: object, **headers: str):
    return await admin.call("PUT", f"/api/v1/models/{name}", body, OPERATOR, **headers)


# --- models


async def test_a_model_is_created_read_changed_and_removed(admin):
    created = await put(admin, "m1", table("m1"), If_None_Match="*")
    assert (created.status, created.json["change"]) == (201, "created")
    read = await admin.call("GET", "/api/v1/models/m1")
    assert read.headers["etag"] == created.headers["etag"]
    assert read.json["model"] == {"name": "m1", "replicas": 1, "profile": table("m1")["profile"]}
    changed = await put(admin, "m1", table("m1", replicas=2), If_Match=read.headers["etag"])
    assert (changed.status, changed.json["change"]) == (200, "updated")
    assert changed.json["diff"] == [{"path": "replicas", "before": 1, "after": 2}]
    removed = await admin.call("DELETE", "/api/v1/models/m1", None, OPERATOR, If_Match=changed.headers["etag"])
    assert (removed.status, removed.json["change"]) == (200, "removed")
    assert removed.json["revision"] > changed.json["revision"]
    assert (await admin.call("GET", "/api/v1/models/m1")).code == "not_found"


async def test_an_edit_without_a_revision_is_428_and_a_lost_race_412(admin):
    missing = await put(admin, "m1", table("m1"))
    assert (missing.status, missing.code) == (428, "if_match_required")
    await put(admin, "m1", table("m1"), If_None_Match="*")
    again = await put(admin, "m1", table("m1"), If_None_Match="*")
    assert again.status == 412
    stale = await put(admin, "m1", table("m1", replicas=2), If_Match='"1"')
    assert (stale.status, stale.code) == (412, "revision_moved")
    assert (await put(admin, "nobody", table("nobody"), If_Match='"1"')).status == 412
    assert (await put(admin, "m1", table("m1", replicas=2), If_Match="*")).status == 200
    assert (await put(admin, "nobody", table("nobody"), If_Match="*")).status == 412
    assert (await put(admin, "m1", table("m1"), If_Match="nonsense")).status == 412
    assert (await admin.call("DELETE", "/api/v1/models/m1", None, OPERATOR, If_Match='"1"')).status == 412
    assert (await admin.call("DELETE", "/api/v1/models/m1", None, OPERATOR)).status == 428
    assert (await admin.call("DELETE", "/api/v1/models/none", None, OPERATOR)).status == 404


async def test_two_edits_from_one_revision_leave_exactly_one(admin):
    etag = (await put(admin, "m1", table("m1"), If_None_Match="*")).headers["etag"]
    statuses = []

    async def edit(count: int) -> None:
        statuses.append((await put(admin, "m1", table("m1", replicas=count), If_Match=etag)).status)

    async with trio.open_nursery() as nursery:
        for count in range(2, 8):
            nursery.start_soon(edit, count)
    assert sorted(statuses) == [200, *[412] * 5]


@pytest.mark.parametrize("path", ["org%2FModel-7B%3AQ4", "org/Model-7B:Q4", "org%2fModel-7B:Q4", "org%2FModel%2D7B%3AQ4"])
async def test_a_name_with_slashes_and_colons_is_one_model_however_it_is_written(admin, path):
    name = "org/Model-7B:Q4"
    await put(admin, "org%2FModel-7B%3AQ4", table(name), If_None_Match="*")
    assert (await admin.call("GET", f"/api/v1/models/{path}")).json["name"] == name
    assert (await admin.call("POST", f"/api/v1/models/{path}/scale", {"count": 3}, OPERATOR)).json["change"] == "updated"
    assert (await admin.call("GET", f"/api/v1/explain/model/{path}")).json["object"] == f"model/{name}"
    assert (await admin.call("DELETE", f"/api/v1/models/{path}", None, OPERATOR, If_Match="*")).status == 200


@pytest.mark.parametrize("name", ["a%2520b", "%2Fabs", "a%2F%2Fb", "%C3%BC", "a%3Fb%23c", "x%2Fscale", "scale", "a%25b", "...", "a%20b"])
async def test_odd_names_of_models_make_the_round_trip(admin, name):
    from urllib.parse import unquote

    created = await put(admin, name, {**table(""), "name": unquote(name)}, If_None_Match="*")
    assert created.status == 201, created.body
    assert (await admin.call("GET", f"/api/v1/models/{name}")).json["name"] == unquote(name)
    assert (await admin.call("POST", f"/api/v1/models/{name}/scale", {"count": 0}, OPERATOR)).status == 200
    assert (await admin.call("DELETE", f"/api/v1/models/{name}", None, OPERATOR, If_Match="*")).status == 200


@pytest.mark.parametrize("name", ["..", ".", "m\u202egnp"])
async def test_a_name_that_cannot_be_addressed_or_seen_is_refused(admin, name):
    for asked in (
        await put(admin, quote(name), table(name), If_None_Match="*"),
        await admin.call("POST", "/api/v1/models:apply", {"models": [table(name)]}, OPERATOR),
    ):
        assert asked.status == 400
        assert asked.json["error"]["faults"][0]["path"].endswith(".name")
    assert (await admin.call("GET", "/api/v1/models")).json["models"] == []


async def test_the_path_gives_the_name_where_the_table_has_none_and_a_second_one_is_refused(admin):
    body = table("x")
    del body["name"]
    assert (await put(admin, "m1", body, If_None_Match="*")).status == 201
    assert (await put(admin, "m1", table("other"), If_Match="*")).code == "invalid"


async def test_every_fault_of_a_table_is_told_with_its_path(admin):
    body = {"name": "m1", "replicas": -1, "profiles": [], "profile": [{"engine": "vlm", "gpus": "two"}]}
    refused = await put(admin, "m1", body, If_None_Match="*")
    assert refused.status == 400
    paths = [fault["path"] for fault in refused.json["error"]["faults"]]
    assert any("replicas" in path for path in paths)
    assert any("profiles" in path for path in paths)
    assert any("gpus" in path for path in paths)
    assert (await admin.call("GET", "/api/v1/models")).json["models"] == []


async def test_an_apply_takes_all_or_none_and_a_dry_run_writes_nothing(admin):
    dry = await admin.call("POST", "/api/v1/models:apply", {"models": [table("a"), table("b")], "dry_run": True}, OPERATOR)
    assert [change["change"] for change in dry.json["changes"]] == ["created", "created"]
    assert (await admin.call("GET", "/api/v1/models")).json["models"] == []
    bad = await admin.call("POST", "/api/v1/models:apply", {"models": [table("a"), table("b", aliases=["a"])]}, OPERATOR)
    assert bad.status == 400
    assert (await admin.call("GET", "/api/v1/models")).json["models"] == []
    await admin.call("POST", "/api/v1/models:apply", {"models": [table("a"), table("b")]}, OPERATOR)
    again = await admin.call("POST", "/api/v1/models:apply", {"models": [table("a"), table("b", replicas=4)]}, OPERATOR)
    assert [(change["model"], change["change"]) for change in again.json["changes"]] == [("a", "unchanged"), ("b", "updated")]
    assert [model["replicas_wanted"] for model in (await admin.call("GET", "/api/v1/models")).json["models"]] == [1, 4]


@pytest.mark.parametrize(
    "body",
    [{}, {"models": []}, {"models": "m"}, {"models": [1]}, {"models": {"name": "m"}}, {"models": [], "x": 1}, [], "m", {"model": []}],
)
async def test_an_apply_of_something_else_is_invalid(admin, body):
    refused = await admin.call("POST", "/api/v1/models:apply", body, OPERATOR)
    assert refused.status == 400
    assert refused.code in ("invalid", "not_an_object")


async def test_a_dry_run_that_is_no_boolean_writes_nothing(admin):
    assert (await admin.call("POST", "/api/v1/models:apply", {"models": [table("a")], "dry_run": "no"}, OPERATOR)).status == 400
    assert (await admin.call("GET", "/api/v1/models")).json["models"] == []


async def test_scaling_takes_whole_numbers_within_the_bounds(admin):
    await put(admin, "m1", table("m1", replicas={"min": 1, "max": 3, "count": 2}), If_None_Match="*")
    for count in (True, 1.5, "2", None, -1, 4, 10**30):
        refused = await admin.call("POST", "/api/v1/models/m1/scale", {"count": count}, OPERATOR)
        assert (refused.status, refused.json["error"]["param"]) == (400, "count"), count
    scaled = await admin.call("POST", "/api/v1/models/m1/scale", {"count": 3}, OPERATOR)
    assert scaled.json["diff"] == [{"path": "replicas.count", "before": 2, "after": 3}]
    assert (await admin.call("POST", "/api/v1/models/none/scale", {"count": 1}, OPERATOR)).status == 404


async def test_an_engine_is_chosen_and_let_go(admin):
    two = table("m1")
    two["profile"] = [{"name": "a", "engine": "command", "command": ["a"]}, {"name": "b", "engine": "command", "command": ["b"]}]
    await put(admin, "m1", two, If_None_Match="*")
    assert (await admin.call("POST", "/api/v1/models/m1/engine", {"profile": "b"}, OPERATOR)).json["profile"] == "b"
    shown = (await admin.call("GET", "/api/v1/models/m1")).json
    assert (shown["profile"], shown["chosen"]) == ("b", "b")
    assert (await admin.call("POST", "/api/v1/models/m1/engine", {"profile": "c"}, OPERATOR)).status == 404
    assert (await admin.call("POST", "/api/v1/models/m1/engine", {"profile": None}, OPERATOR)).json["profile"] == "a"


async def test_a_client_of_v1_is_told_that_this_is_not_its_port(admin):
    told = await admin.call("POST", "/v1/chat/completions", {})
    assert (told.status, told.json["error"]["code"]) == (404, "not_found")
    assert (
        told.json["error"]["message"]
        == "there is nothing at /v1/chat/completions: /v1 is at the router's port, [router] listen, by default 8080"
    )
    assert (await admin.call("GET", "/v2")).json["error"]["message"] == "there is nothing at /v2"


async def test_models_of_a_file_are_shown_and_cannot_be_changed_here(tmp_path):
    spec = ModelSpec("m1", (Profile("p", "command", command=("x",)),))
    async with running_admin(tmp_path, objects=Objects(Catalog((spec,))), file="/etc/llmgw/llmgw.toml") as admin:
        assert [model["name"] for model in (await admin.call("GET", "/api/v1/models")).json["models"]] == ["m1"]
        refused = await put(admin, "m1", table("m1", replicas=2), If_Match="*")
        assert (refused.status, refused.code) == (409, "models_in_file")
        assert "/etc/llmgw/llmgw.toml" in refused.json["error"]["message"]


async def test_the_values_of_an_environment_are_hidden_from_who_may_only_look(admin):
    secret = table("m1")
    secret["profile"] = [{"name": "p", "engine": "command", "command": ["x"], "env": {"HF_TOKEN": "hf_secret"}}]
    await put(admin, "m1", secret, If_None_Match="*")
    looked = await admin.call("GET", "/api/v1/models/m1", None, VIEWER)
    assert b"hf_secret" not in looked.body
    assert looked.json["model"]["profile"][0]["env"] == {"HF_TOKEN": "***"}
    assert b"hf_secret" in (await admin.call("GET", "/api/v1/models/m1", None, OPERATOR)).body


# --- idempotency


async def test_a_repeat_with_the_same_key_gets_the_first_answer_and_changes_nothing(admin):
    body = {"models": [table("m1")]}
    first = await admin.call("POST", "/api/v1/models:apply", body, OPERATOR, Idempotency_Key="k-1")
    await admin.call("DELETE", "/api/v1/models/m1", None, OPERATOR, If_Match="*")
    again = await admin.call("POST", "/api/v1/models:apply", body, OPERATOR, Idempotency_Key="k-1")
    assert (again.status, again.json) == (first.status, first.json)
    assert again.headers["idempotency-replayed"] == "true"
    assert (await admin.call("GET", "/api/v1/models")).json["models"] == []


async def test_a_key_for_another_request_is_refused_and_each_token_has_its_own(admin):
    await admin.call("POST", "/api/v1/models:apply", {"models": [table("m1")]}, OPERATOR, Idempotency_Key="k-1")
    other = await admin.call("POST", "/api/v1/models:apply", {"models": [table("m2")]}, OPERATOR, Idempotency_Key="k-1")
    assert (other.status, other.code) == (409, "idempotency_key_reused")
    assert (await admin.call("POST", "/api/v1/models:apply", {"models": [table("m2")]}, ADMIN, Idempotency_Key="k-1")).status == 200


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
async def test_an_edit_whose_leader_died_before_it_answered_may_be_repeated_with_the_same_key(admin, method):
    """The change was in the store and its answer was not: the repeat was told 412, by the change's own revision."""
    etag = (await put(admin, "m1", table("m1"), If_None_Match="*")).headers["etag"]
    body = table("m1", replicas=2) if method == "PUT" else None
    first = await admin.call(method, "/api/v1/models/m1", body, OPERATOR, If_Match=etag, Idempotency_Key="k-1")

    def forget_answers(connection, epoch):
        connection.execute("DELETE FROM idempotency WHERE key LIKE 'http:%'")

    await admin.controller.store.write(forget_answers, admin.controller.leadership.epoch)
    again = await admin.call(method, "/api/v1/models/m1", body, OPERATOR, If_Match=etag, Idempotency_Key="k-1")
    assert (again.status, again.json["revision"]) == (200, first.json["revision"])
    late = await admin.call("PUT", "/api/v1/models/m1", table("m1", replicas=3), OPERATOR, If_Match=etag, Idempotency_Key="k-2")
    assert (late.status, late.code) == (412, "revision_moved")


async def test_many_at_once_with_one_key_are_carried_out_once(admin):
    await put(admin, "m1", table("m1"), If_None_Match="*")
    answers = []

    async def restart() -> None:
        answers.append((await admin.call("POST", "/api/v1/models/m1/restart", {}, OPERATOR, Idempotency_Key="k-1")).body)

    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(restart)
    assert len(set(answers)) == 1
    await until(lambda: not admin.controller.events._waiting)
    told = (await admin.call("GET", "/api/v1/events?limit=1000")).json["events"]
    assert sum(event["kind"] == "model.restart" for event in told) == 1


async def test_a_refused_order_may_be_repeated_with_the_same_key(admin):
    assert (await admin.call("POST", "/api/v1/models/m1/scale", {"count": 1}, OPERATOR, Idempotency_Key="k-1")).status == 404
    await put(admin, "m1", table("m1"), If_None_Match="*")
    assert (await admin.call("POST", "/api/v1/models/m1/scale", {"count": 2}, OPERATOR, Idempotency_Key="k-1")).status == 200


@pytest.mark.parametrize("key", ["a b", "x" * 256, "\xe9"])
async def test_a_key_that_is_none_is_invalid(admin, key):
    assert (await admin.call("POST", "/api/v1/models:apply", {"models": [table("m")]}, Idempotency_Key=key)).status == 400


# --- holds, nodes, leader, pages


async def test_a_hold_is_put_listed_and_taken_away(admin):
    added = await admin.call("POST", "/api/v1/holds", {"facility": "room-1", "reason": "power", "drain": False, "until": None}, OPERATOR)
    assert (added.status, added.json["author"]) == (201, "operator")
    body = {"reason": "water", "drain": True, "until": "2100-01-01T00:00:00Z"}
    again = await admin.call("PUT", "/api/v1/holds/room-1", body, OPERATOR)
    assert (again.status, again.json["until"], again.json["active"]) == (200, "2100-01-01T00:00:00.000Z", True)
    assert [hold["reason"] for hold in (await admin.call("GET", "/api/v1/holds")).json["holds"]] == ["water"]
    assert (await admin.call("DELETE", "/api/v1/holds/room-1", None, OPERATOR)).status == 200
    assert (await admin.call("DELETE", "/api/v1/holds/room-1", None, OPERATOR)).status == 404


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"reason": "x"}, "facility"),
        ({"facility": "", "reason": "x"}, "facility"),
        ({"facility": 1, "reason": "x"}, "facility"),
        ({"facility": "a\nb", "reason": "x"}, "facility"),
        ({"facility": "a"}, "reason"),
        ({"facility": "a", "reason": " "}, "reason"),
        ({"facility": "a", "reason": "x", "drain": 1}, "drain"),
        ({"facility": "a", "reason": "x", "until": "tomorrow"}, "until"),
        ({"facility": "a", "reason": "x", "until": "2030-01-01T00:00:00"}, "until"),
        ({"facility": "a", "reason": "x", "until": 5}, "until"),
        ({"facility": "a", "reason": "x", "untill": None}, "untill"),
    ],
)
async def test_a_hold_that_is_none_names_the_field(admin, body, param):
    refused = await admin.call("POST", "/api/v1/holds", body, OPERATOR)
    assert (refused.status, refused.json["error"]["param"]) == (400, param)


async def test_nodes_that_are_not_there_and_bodies_that_are_none(admin):
    for order in ("cordon", "drain", "resume"):
        assert (await admin.call("POST", f"/api/v1/nodes/gpu-1/{order}", {}, OPERATOR)).status == 404
        assert (await admin.call("POST", f"/api/v1/nodes/gpu-1/{order}", None, OPERATOR)).status == 404
    for deadline in (-1, "5", True, 10**9, [1]):
        refused = await admin.call("POST", "/api/v1/nodes/gpu-1/drain", {"deadline_s": deadline}, OPERATOR)
        assert (refused.status, refused.json["error"]["param"]) == (400, "deadline_s"), deadline
    for labels in ({}, {"labels": {}}, {"a": 1}, {"": "x"}, {"a": "b\n"}):
        assert (await admin.call("POST", "/api/v1/nodes/gpu-1/labels", labels, OPERATOR)).status == 400
    assert (await admin.call("GET", "/api/v1/nodes/gpu-1")).status == 404


async def test_replicas_that_are_not_there(admin):
    for method, path in (("GET", ""), ("GET", "/logs"), ("POST", "/drain"), ("POST", "/restart")):
        answer = await admin.call(method, f"/api/v1/replicas/m1-00000000{path}", {} if method == "POST" else None, OPERATOR)
        assert (answer.status, answer.code) == (404, "not_found")
    assert (await admin.call("GET", "/api/v1/explain/replica/none")).status == 404


async def test_the_leader_is_shown_and_a_lone_one_hands_over_only_when_forced(admin):
    shown = (await admin.call("GET", "/api/v1/leader")).json
    assert (shown["holder"], shown["is_me"], shown["power"], shown["epoch"]) == ("ctl-1", True, "confirmed", 1)
    refused = await admin.call("POST", "/api/v1/leader/hand-over", {}, OPERATOR)
    assert (refused.status, refused.code) == (409, "lone_control_plane")
    assert (await admin.call("POST", "/api/v1/leader/hand-over", {"force": 1}, OPERATOR)).status == 400
    assert (await admin.call("POST", "/api/v1/leader/hand-over", {"force": True}, OPERATOR)).status == 202
    await until(lambda: admin.controller.leadership.is_leader and admin.controller.leadership.epoch == 2)


async def test_lists_come_in_pages_that_hold_everything_once(admin):
    names = [f"m{number:02}" for number in range(7)]
    await admin.call("POST", "/api/v1/models:apply", {"models": [table(name) for name in names]}, OPERATOR)
    found, cursor = [], ""
    for _ in range(10):
        body = (await admin.call("GET", f"/api/v1/models?limit=3{cursor}")).json
        found += [model["name"] for model in body["models"]]
        if body["next"] is None:
            break
        cursor = f"&cursor={body['next']}"
    assert found == names
    for query in ("limit=0", "limit=x", "limit=99999999999999999999", "cursor=%00%ff"):
        assert (await admin.call("GET", f"/api/v1/models?{query}")).status == 400


async def test_status_tells_what_needs_a_person(admin):
    assert (await admin.call("GET", "/api/v1/status")).json["problems"] == []
    await put(admin, "m1", table("m1"), If_None_Match="*")
    await until(lambda: admin.controller.reconciler.reasons.get("model/m1") is not None)
    status = (await admin.call("GET", "/api/v1/status")).json
    assert (sum(status["models"].values()), status["replicas"], status["nodes"]) == (1, {}, {})
    (problem,) = status["problems"]
    assert problem.startswith("model m1: 0 of 1 ready")
    assert set(status) == {
        "cluster_id", "leader", "build", "store", "settings", "models", "replicas", "nodes", "router", "problems", "problems_more",
    }  # fmt: skip


async def test_status_stays_small_however_large_the_cluster_is(admin):
    names = [f"m{number:04}" for number in range(300)]
    assert (await admin.call("POST", "/api/v1/models:apply", {"models": [table(name) for name in names]}, OPERATOR)).status == 200
    await until(lambda: len(admin.controller.reconciler.reasons) == 300)
    answer = await admin.call("GET", "/api/v1/status")
    assert sum(answer.json["models"].values()) == 300
    assert (len(answer.json["problems"]), answer.json["problems_more"]) == (100, 200)
    assert len(answer.body) < 20_000
    assert len((await admin.call("GET", "/api/v1/models")).json["models"]) == 300


async def test_a_store_that_takes_no_writes_is_a_problem_until_it_does_again(tmp_path):
    full = False

    async def run(work):
        if full:
            raise Unavailable("storage unavailable: the disk is full", code=STORAGE_UNAVAILABLE)
        return work()

    async with running_admin(tmp_path, store=await FileStore.open(MEMORY, run)) as admin:
        await until(lambda: admin.controller.reconciler.plans > 0)
        full = True
        refused = await admin.call("POST", "/api/v1/models:apply", {"models": [table("m1")]}, OPERATOR)
        assert (refused.status, refused.code) == (503, "storage_unavailable")
        (problem,) = (await admin.call("GET", "/api/v1/status")).json["problems"]
        assert problem == "the store takes no writes, and orders are refused: storage unavailable: the disk is full"
        ready = await admin.call("GET", "/ready", token=None)
        assert (ready.status, "the disk is full" in ready.json["reasons"][0]) == (503, True)
        full = False
        assert (await admin.call("POST", "/api/v1/models:apply", {"models": [table("m1")]}, OPERATOR)).status == 200
        assert not [text for text in (await admin.call("GET", "/api/v1/status")).json["problems"] if "writes" in text]
        assert (await admin.call("GET", "/ready", token=None)).status == 200


async def test_a_large_list_comes_compressed_to_those_who_take_it_so(admin):
    names = [f"m{number:03}" for number in range(200)]
    await admin.call("POST", "/api/v1/models:apply", {"models": [table(name) for name in names]}, OPERATOR)
    whole = await admin.call("GET", "/api/v1/models")
    assert "content-encoding" not in whole.headers
    assert whole.headers["vary"] == "Accept-Encoding"
    for accepted, packed in (("gzip, deflate, br", True), ("br, gzip;q=0", False), ("identity", False)):
        got = await admin.call("GET", "/api/v1/models", accept_encoding=accepted)
        assert ("content-encoding" in got.headers) == packed
        data = gzip.decompress(got.body) if packed else got.body
        assert [model["name"] for model in json.loads(data)["models"]] == names
        assert not packed or len(got.body) * 8 < len(whole.body)
    small = await admin.call("GET", "/api/v1/nodes", accept_encoding="gzip")
    assert small.json == {"nodes": [], "next": None}


async def test_ready_has_reasons_and_metrics_follow_the_cluster(admin):
    await until(lambda: admin.controller.reconciler.plans > 0)
    assert (await admin.call("GET", "/ready", token=None)).json == {"ready": True, "reasons": []}
    await put(admin, "m1", table("m1"), If_None_Match="*")
    text = (await admin.call("GET", "/metrics", token=None)).body.decode()
    assert 'llmgw_model_replicas_wanted{model="m1"} 1.0' in text
    assert 'llmgw_admin_requests_total{method="PUT",route="/api/v1/models/<name:name>",status="201"} 1.0' in text
    admin.controller.leadership.step_down()
    answer = await admin.call("GET", "/ready", token=None)
    assert (answer.status, answer.json["ready"]) == (503, False)
    assert answer.json["reasons"]


async def test_every_order_leaves_an_entry_with_who_and_from_where(admin):
    await put(admin, "m1", table("m1"), If_None_Match="*")
    await admin.call("POST", "/api/v1/holds", {"facility": "room-1", "reason": "power"}, ADMIN)
    entries = await audit.latest(admin.controller.store, 2)
    assert [(entry.who, entry.peer, entry.what, entry.object) for entry in entries] == [
        ("admin", "127.0.0.1", "hold", "facility/room-1"),
        ("operator", "127.0.0.1", "put", "model/m1"),
    ]


async def test_the_document_names_every_route_and_every_route_answers_its_method(admin):
    document = (await admin.call("GET", "/api/v1/openapi.json")).json
    assert {"/api/v1/status", "/api/v1/models/{name}", "/api/v1/events", "/health"} <= set(document["paths"])
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            where = path.replace("{name}", "x").replace("{node}", "x").replace("{replica}", "x").replace("{facility}", "x")
            answer = await admin.call(method.upper(), where, None, None)
            assert answer.status == (401 if operation["security"] else 200), (method, path)


async def test_a_method_that_is_not_offered_is_405_with_the_ones_that_are(admin):
    answer = await admin.call("PATCH", "/api/v1/models/m1", {})
    assert (answer.status, answer.code) == (405, "method_not_allowed")
    assert set(answer.headers["allow"].split(", ")) == {"DELETE", "GET", "HEAD", "PUT"}
    assert (await admin.call("DELETE", "/api/v1/status")).status == 405


async def test_a_request_id_comes_back_when_it_is_sane(admin):
    assert (await admin.call("GET", "/health", X_Request_ID="abc-123")).headers["x-request-id"] == "abc-123"
    for odd in ("a b", "x" * 200, "<script>"):
        answered = (await admin.call("GET", "/nope", X_Request_ID=odd)).headers["x-request-id"]
        assert answered != odd
        assert len(answered) == 32


async def test_a_crash_of_ours_is_an_error_without_a_trace(admin, monkeypatch):
    def broken(*arguments):
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(admin.controller, "observe", broken)
    answer = await admin.call("GET", "/api/v1/nodes")
    assert (answer.status, answer.code) == (500, "broken")
    assert b"secret detail" not in answer.body
    assert b"Traceback" not in answer.body
    assert (await admin.call("GET", "/health")).status == 200


async def test_a_store_that_cannot_be_written_answers_503_and_reads_go_on(tmp_path):
    async def in_thread(work):
        return await trio.to_thread.run_sync(work)

    store = await FileStore.open(tmp_path / "llmgw.db", in_thread)
    async with running_admin(tmp_path, store=store) as admin:
        assert (await put(admin, "m1", table("m1"), If_None_Match="*")).json["durability"] == "local"
        (tmp_path / "llmgw.db").rename(tmp_path / "away.db")
        refused = await put(admin, "m2", table("m2"), If_None_Match="*")
        assert (refused.status, refused.code) == (503, "storage_unavailable")
        assert [model["name"] for model in (await admin.call("GET", "/api/v1/models")).json["models"]] == ["m1"]
        (tmp_path / "away.db").rename(tmp_path / "llmgw.db")
        assert (await put(admin, "m2", table("m2"), If_None_Match="*")).status == 201


async def test_fifty_calls_at_once_on_a_real_file_all_answer(tmp_path):
    async def in_thread(work):
        return await trio.to_thread.run_sync(work)

    statuses = []
    store = await FileStore.open(tmp_path / "llmgw.db", in_thread)
    async with running_admin(tmp_path, store=store) as admin:

        async def one(number: int) -> None:
            statuses.append((await put(admin, f"m{number}", table(f"m{number}"), If_None_Match="*")).status)
            statuses.append((await admin.call("GET", "/api/v1/status")).status)

        async with trio.open_nursery() as nursery:
            for number in range(50):
                nursery.start_soon(one, number)
        assert sorted(statuses) == [*[200] * 50, *[201] * 50]


async def test_no_route_passes_over_a_parameter_that_it_does_not_know(admin):
    document = (await admin.call("GET", "/api/v1/openapi.json")).json
    asked = 0
    for path, operations in document["paths"].items():
        if not path.startswith("/api/v1/"):
            continue  # what probes of others ask for stays open to their habits
        for method, operation in operations.items():
            known = [part["name"] for part in operation["parameters"] if part["in"] == "query"]
            got = await admin.call(method.upper(), f"{re.sub('{[^}]*}', 'x', path)}?{'&'.join(f'{name}=1' for name in known)}&sinse=1", {})
            assert (got.status, got.json["error"]["param"]) == (400, "sinse"), (method, path)
            assert (", ".join(known) if known else "knows none") in got.json["error"]["message"]
            asked += 1
    assert asked > 30


async def test_every_list_says_in_its_document_that_it_comes_in_pages(admin):
    document = (await admin.call("GET", "/api/v1/openapi.json")).json
    for noun in ("models", "replicas", "nodes", "holds", "keys", "events", "usage", "settings/history"):
        known = {part["name"] for part in document["paths"][f"/api/v1/{noun}"]["get"]["parameters"]}
        assert {"limit", "cursor"} <= known, noun
        first = "0" if noun == "events" else ""
        assert (await admin.call("GET", f"/api/v1/{noun}?limit=1&cursor={first}")).status == 200, noun
