"""`/settings` and `/pause` against a real control plane: what is written, refused, taken back and told."""

from __future__ import annotations

import hashlib
import json
import random

import pytest
import trio

from llmgw.admin.api import settings as api
from llmgw.control.controller import Objects
from llmgw.domain.model import Catalog
from llmgw.domain.settings_version import Held, PlaneSettings, RolloutPhase, RolloutRow
from llmgw.settings.decode import known_paths
from llmgw.settings.document import DOCUMENT_BYTES_MAX
from llmgw.settings.schema import Settings
from llmgw.store import audit
from llmgw.store import settings as rows
from llmgw.store.audit import Origin

from .conftest import OPERATOR, VIEWER, running_admin

PATH = "/api/v1/settings"


@pytest.fixture
async def admin(tmp_path):
    """With the version 1 that a first start imports."""
    async with running_admin(tmp_path, imported=False) as running:
        yield running


async def put(admin, body: object, version: int = 1, query: str = "", **headers: str):
    return await admin.call("PUT", PATH + query, body, OPERATOR, **{"If_Match": f'"{version}"', **headers})


async def patch(admin, body: object, version: int = 1, query: str = "", **headers: str):
    return await admin.call("PATCH", PATH + query, body, OPERATOR, **{"If_Match": f'"{version}"', **headers})


async def newest(admin) -> dict:
    return (await admin.call("GET", PATH, token=VIEWER)).json


# --- reading and writing


async def test_version_1_is_there_with_its_document_as_json_and_as_toml(admin):
    answer = await admin.call("GET", PATH, token=VIEWER)
    found = answer.json
    assert (answer.status, answer.headers["etag"]) == (200, '"1"')
    assert (found["version"], found["parent"], found["author"]) == (1, 0, "ctl-1")
    assert found["reason"] == "imported from the file at first start"
    assert found["sha256"] == hashlib.sha256(found["toml"].encode()).hexdigest()
    assert found["document"]["guard"]["max_messages"] == 2048
    assert found["toml"].startswith("[guard]\nmax_messages = 2048\n")
    assert (found["held"], found["desired"], found["pause"], found["durability"]) == (False, 1, None, "none")
    (plane,) = found["control_planes"]
    assert (plane["name"], plane["me"], plane["leads"], plane["heard_s"]) == ("ctl-1", True, True, 0.0)
    assert (plane["live"], plane["applied"], plane["pending"], plane["refused"]) == (1, 1, 0, 0)
    assert found["rollout"]["phase"] == "idle"


async def test_single_keys_are_set_and_unset_and_in_force_when_the_answer_is_there(admin):
    answer = await patch(admin, {"set": {"guard.max_messages": 7, "route.queue_max": 9}, "unset": ["guard.rule"], "reason": "too chatty"})
    assert (answer.status, answer.headers["etag"]) == (200, '"2"')
    body = answer.json
    assert (body["version"], body["parent"], body["dry_run"], body["restart"]) == (2, 1, False, [])
    told = {change["path"]: (change["before"], change["after"], change["applies"]) for change in body["changes"]}
    assert told["guard.max_messages"] == (2048, 7, "live")
    assert told["route.queue_max"] == (None, 9, "live")
    assert told["guard.rule"][1] is None
    assert admin.controller.settings.guard.max_messages == 7
    assert admin.controller.in_force.live == 2
    found = await newest(admin)
    assert (found["version"], found["author"], found["reason"]) == (2, "operator", "too chatty")
    assert found["document"]["guard"] == {"max_messages": 7}
    assert found["sha256"] == body["sha256"]
    entry = (await audit.latest(admin.controller.store))[0]
    assert (entry.who, entry.what, entry.object, entry.old_revision, entry.new_revision) == ("operator", "write", "settings", 1, 2)


async def test_a_whole_document_replaces_what_was_there_as_json_or_as_toml(admin):
    assert (await put(admin, {"document": {"limits": {"max_parallel": 3}}})).json["version"] == 2
    assert (await newest(admin))["document"] == {"limits": {"max_parallel": 3}}
    again = await put(admin, {"toml": "# a comment\n[limits]\nmax_parallel = 3\n"}, 2)
    assert (again.status, again.json["version"], again.json["changes"]) == (200, 2, [])
    for half in ({"toml": ""}, {"toml": "# nothing"}, {"document": {}}, {"document": {"guard": {}}}):
        refused = await put(admin, half, 2)
        assert (refused.status, refused.code) == (400, "empty_document")
    emptied = await put(admin, {"toml": "", "reset": True}, 2)
    assert (emptied.json["version"], [change["after"] for change in emptied.json["changes"]]) == (3, [None])
    assert (await newest(admin))["document"] == {}
    assert admin.controller.settings.limits.max_parallel == 0


async def test_a_key_that_takes_a_restart_is_told_and_waits(admin):
    answer = await patch(admin, {"set": {"lease.ttl_s": 20}})
    assert answer.json["restart"] == ["lease.ttl_s"]
    assert answer.json["changes"][0]["applies"] == "restart"
    (plane,) = (await newest(admin))["control_planes"]
    assert (plane["live"], plane["applied"], plane["pending"]) == (2, 1, 2)


async def test_a_dry_run_writes_nothing_and_its_key_is_free_for_the_order_itself(admin):
    body = {"set": {"guard.max_messages": 7}}
    tried = await patch(admin, body, query="?dry_run=true", Idempotency_Key="k1")
    assert (tried.status, tried.json["dry_run"], tried.json["version"]) == (200, True, 1)
    assert [change["path"] for change in tried.json["changes"]] == ["guard.max_messages"]
    assert (await newest(admin))["version"] == 1
    assert (await patch(admin, body, Idempotency_Key="k1")).json["version"] == 2
    reused = await patch(admin, body, query="?dry_run=true", Idempotency_Key="k1")
    assert (reused.status, reused.code) == (409, "idempotency_key_reused")
    late = await patch(admin, body, query="?dry_run=true", Idempotency_Key="k3")
    assert (late.status, late.code) == (412, "revision_moved")
    assert (await patch(admin, body, 2, query="?dry_run=maybe")).code == "invalid"


async def test_a_check_tells_what_would_change_whatever_form_it_comes_in(admin):
    for body in ({"document": {}, "reset": True}, {"toml": "", "reset": True}, {"unset": ["guard.max_messages", "guard.rule"]}):
        answer = await admin.call("POST", f"{PATH}/check", body, OPERATOR)
        assert (answer.status, answer.json["dry_run"], answer.json["version"]) == (200, True, 1)
        assert [change["path"] for change in answer.json["changes"]] == ["guard.max_messages", "guard.rule"]
    refused = await admin.call("POST", f"{PATH}/check", {"toml": "[guard]\nmax_messages = -1\n"}, OPERATOR)
    assert (refused.status, [fault["path"] for fault in refused.json["error"]["faults"]]) == (400, ["guard.max_messages"])
    assert (await newest(admin))["version"] == 1


# --- races


async def test_an_edit_names_the_version_it_began_from(admin):
    body = {"set": {"guard.max_messages": 7}}
    missing = await admin.call("PATCH", PATH, body, OPERATOR)
    assert (missing.status, missing.code) == (428, "if_match_required")
    blind = await admin.call("PATCH", PATH, body, OPERATOR, If_Match="*")
    assert (blind.status, blind.code) == (428, "if_match_required")
    for wrong in ('"7"', "nonsense", '"0"'):
        assert (await admin.call("PATCH", PATH, body, OPERATOR, If_Match=wrong)).status == 412
        assert (await admin.call("PATCH", PATH, body, OPERATOR, If_Match=wrong, Idempotency_Key=f"k{wrong}")).status == 412
    assert (await newest(admin))["version"] == 1


async def test_of_two_editors_at_once_one_is_told_that_the_other_was_faster(admin):
    statuses = []

    async def edit(count: int) -> None:
        answer = await patch(admin, {"set": {"guard.max_messages": count}}, Idempotency_Key=f"k{count}")
        statuses.append(answer.status)
        if answer.status == 412:
            assert answer.code == "revision_moved"
            assert "version 2" in answer.json["error"]["message"] or "revision 2" in answer.json["error"]["message"]

    async with trio.open_nursery() as nursery:
        for count in range(2, 8):
            nursery.start_soon(edit, count)
    assert sorted(statuses) == [200, *[412] * 5]
    assert (await newest(admin))["version"] == 2


@pytest.mark.parametrize("later", [0, 1])
async def test_an_edit_repeated_after_its_leader_died_is_answered_as_carried_out(admin, later):
    """The write and its key were stored, the answer was not: the repeat names a version that is no longer the newest."""
    settings = admin.controller.cluster_settings
    _, before = await settings.newest()
    changed = api.with_keys(before, {"guard.max_messages": 7})
    await settings.write(changed, 1, "", "operator:k1", Origin("operator", "", 1.0))
    for count in range(later):
        await patch(admin, {"set": {"guard.max_messages": 100 + count}}, 2 + count)
    repeated = await patch(admin, {"set": {"guard.max_messages": 7}}, Idempotency_Key="k1")
    assert (repeated.status, repeated.json["version"], repeated.json["parent"]) == (200, 2, 1)
    assert [change["path"] for change in repeated.json["changes"]] == ["guard.max_messages"]
    assert (await newest(admin))["version"] == 2 + later


async def test_a_repeat_is_given_the_first_answer(admin):
    first = await put(admin, {"toml": "[limits]\nmax_parallel = 3\n"}, Idempotency_Key="k1")
    again = await put(admin, {"toml": "[limits]\nmax_parallel = 3\n"}, Idempotency_Key="k1")
    assert again.json == first.json
    assert again.headers["idempotency-replayed"] == "true"
    assert (await newest(admin))["version"] == 2


# --- bad input


@pytest.mark.parametrize(
    ("document", "path", "reason"),
    [
        ({"guard": {"max_mesages": 1}}, "guard.max_mesages", "unknown key; did you mean guard.max_messages?"),
        ({"gaurd": {}}, "gaurd", "did you mean guard?"),
        ({"guard": {"max_messages": "many"}}, "guard.max_messages", "expected a whole number"),
        ({"guard": {"max_messages": None}}, "guard.max_messages", "expected a whole number"),
        ({"guard": {"max_messages": -1}}, "guard.max_messages", "0"),
        ({"guard": 3}, "guard", "expected a table"),
        ({"lease": {"ttl_s": 15, "renew_s": 6}}, "lease.renew_s", "ttl_s"),
        ({"guard": {"rule": [{"name": "a"}]}}, "guard.rule[0]", "needs match or words"),
        ({"guard": {"rule": [{"name": "a", "match": "("}]}}, "guard.rule[0].match", "not a regular expression"),
        ({"server": {"name": "x"}}, "server", "one machine's own key"),
        ({"model": [{"name": "m"}]}, "model", "ctl model"),
        ({"auth": {"key": []}}, "auth.key", "llmgw ctl key"),
    ],
)
async def test_a_document_that_is_not_valid_is_refused_with_key_and_reason(admin, document, path, reason):
    for answer in (
        await put(admin, {"document": document}),
        await put(admin, {"document": document}, query="?dry_run=1"),
        await admin.call("POST", f"{PATH}/check", {"document": document}, OPERATOR),
    ):
        assert (answer.status, answer.code) == (400, "invalid")
        faults = {fault["path"]: fault["reason"] for fault in answer.json["error"]["faults"]}
        assert reason in faults[path]
        assert path in answer.json["error"]["message"]
    assert (await newest(admin))["version"] == 1
    assert admin.controller.in_force.live == 1


async def test_every_fault_is_told_at_once_and_a_flood_of_them_is_cut(admin):
    answer = await put(admin, {"document": {"guard": {"max_messages": -1, "x": 1}, "route": {"queue_max": "a"}}})
    assert {fault["path"] for fault in answer.json["error"]["faults"]} == {"guard.max_messages", "guard.x", "route.queue_max"}
    flood = await put(admin, {"document": {"guard": {f"k{n}": 1 for n in range(1000)}}})
    assert len(flood.json["error"]["faults"]) == api.FAULTS_MAX + 1
    assert flood.json["error"]["faults"][-1]["reason"] == "and 800 more faults"


@pytest.mark.parametrize(
    ("toml", "told"),
    [
        ("[guard]\nmax_messages = \n", ("line 2", "column", "max_messages")),
        ("[guard]\n[guard]\n", ("line 2", "[guard] is there already")),
        ("[guard", ("at its end", "not closed with ]")),
        ("a = " + "[" * 5000, ("nested too deeply",)),
        ("[guard]\nmax_messages = " + "9" * 5000, ("digits",)),
    ],
)
async def test_text_that_is_no_toml_is_refused_with_line_and_key(admin, toml, told):
    answer = await put(admin, {"toml": toml})
    assert (answer.status, answer.code) == (400, "invalid")
    for word in told:
        assert word in answer.json["error"]["message"]
    assert (await newest(admin))["version"] == 1


async def test_what_is_too_large_or_no_text_is_refused(admin):
    large = await put(admin, {"toml": "#" + "x" * DOCUMENT_BYTES_MAX})
    assert (large.status, large.code) == (400, "document_too_large")
    assert str(DOCUMENT_BYTES_MAX) in large.json["error"]["message"]
    huge = await put(admin, {"toml": "#" + "x" * 10_000_000})
    assert (huge.status, huge.code) == (413, "too_large")
    broken = await put(admin, b'{"toml": "\xff\xfe"}')
    assert (broken.status, broken.code) == (400, "not_json")
    assert "UTF-8" in broken.json["error"]["message"]
    assert (await newest(admin))["version"] == 1


@pytest.mark.parametrize(
    ("method", "path", "body", "param"),
    [
        ("PUT", "", {}, "document"),
        ("PUT", "", {"document": {}, "toml": ""}, "document"),
        ("PUT", "", {"document": []}, "document"),
        ("PUT", "", {"toml": 3}, "toml"),
        ("PUT", "", {"document": {}, "reason": 3}, "reason"),
        ("PUT", "", {"document": {"limits": {"max_parallel": 1}}, "reason": "x" * 1001}, "reason"),
        ("PUT", "", {"document": {}, "set": {}}, "set"),
        ("PATCH", "", {}, "document"),
        ("PATCH", "", {"set": {}}, "set"),
        ("PATCH", "", {"set": []}, "set"),
        ("PATCH", "", {"unset": "guard"}, "unset"),
        ("PATCH", "", {"unset": [3]}, "unset"),
        ("PATCH", "", {"set": {f"guard.x{n}": 1 for n in range(1001)}}, "set"),
        ("POST", "/check", {}, "document"),
        ("POST", "/rollback", {}, "version"),
        ("POST", "/rollback", {"version": True}, "version"),
        ("POST", "/rollback", {"version": 0}, "version"),
        ("POST", "/rollback", {"version": 10**30}, "version"),
    ],
)
async def test_a_body_of_another_shape_is_refused_naming_the_part(admin, method, path, body, param):
    answer = await admin.call(method, PATH + path, body, OPERATOR, If_Match='"1"')
    assert (answer.status, answer.json["error"]["param"]) == (400, param)
    assert (await newest(admin))["version"] == 1


@pytest.mark.parametrize(
    ("body", "path", "reason"),
    [
        ({"set": {"guard.max_mesages": 1}}, "guard.max_mesages", "did you mean guard.max_messages?"),
        ({"set": {"guard": {}}}, "guard", "name one of its keys"),
        ({"set": {"guard.rule.name": "x"}}, "guard.rule.name", "no keys of its own"),
        ({"set": {"server.name": "x"}}, "server.name", "that machine's file"),
        ({"unset": ["server.name"]}, "server.name", "that machine's file"),
        ({"unset": ["nothing.like.it"]}, "nothing", "unknown key"),
        ({"set": {"guard.max_messages": 1}, "unset": ["guard.max_messages"]}, "guard.max_messages", "at once"),
        ({"set": {"": 1}}, "", "no key"),
        ({"set": {"guard..x": 1}}, "guard..x", "no key"),
        ({"set": {"engines.vlm.command": ["x"]}}, "engines.vlm", "did you mean engines.vllm?"),
    ],
)
async def test_keys_that_cannot_be_set_are_named(admin, body, path, reason):
    answer = await patch(admin, body)
    assert (answer.status, answer.code) == (400, "invalid")
    told = [fault["reason"] for fault in answer.json["error"]["faults"] if fault["path"] == path]
    assert told, answer.json
    assert reason in told[0]


def odd(rng: random.Random, depth: int = 0) -> object:
    """Anything that JSON can hold, often in the place of what is expected."""
    paths = [
        "guard",
        "guard.rule",
        "guard.max_messages",
        "lease.ttl_s",
        "engines",
        "engines.vllm",
        "set",
        "",
        "a.b",
        "\u2028",
        "rule",
        "vllm",
    ]
    kinds = [None, True, 0, -1, 10**18, 10**200, 0.5, 1e308, "", "x", "\0", "a" * 500, [], {}]
    match rng.randrange(4 if depth < 4 else 1):
        case 0 | 1:
            return rng.choice(kinds)
        case 2:
            return [odd(rng, depth + 1) for _ in range(rng.randrange(3))]
        case _:
            return {rng.choice(paths): odd(rng, depth + 1) for _ in range(rng.randrange(4))}


async def test_no_body_is_a_crash_and_what_is_refused_changes_nothing(admin, capsys):
    rng = random.Random(7)
    version = 1
    for _ in range(300):
        method, path = rng.choice([("PUT", ""), ("PATCH", ""), ("POST", "/check"), ("POST", "/rollback")])
        names = ["document", "toml", "set", "unset", "reason", "version"]
        body = {rng.choice(names): odd(rng) for _ in range(rng.randrange(3))}
        answer = await admin.call(method, PATH + path, body, OPERATOR, If_Match=f'"{version}"')
        assert answer.status in (200, 400, 404), (answer.body, body)
        if answer.status == 200 and path != "/check":
            version = answer.json["version"]
        assert admin.controller.in_force.live == version
    assert "crashed" not in capsys.readouterr().out


async def test_whoever_may_only_look_changes_nothing(admin):
    for method, path, body in (
        ("PUT", "", {"toml": ""}),
        ("PATCH", "", {"unset": ["guard.rule"]}),
        ("POST", "/rollback", {"version": 1}),
        ("POST", "/check", {"toml": ""}),
    ):
        assert (await admin.call(method, PATH + path, body, VIEWER, If_Match='"1"')).code == "role"
    assert (await admin.call("POST", "/api/v1/pause", {}, VIEWER)).code == "role"
    assert (await admin.call("DELETE", "/api/v1/pause", None, VIEWER)).code == "role"
    assert (await newest(admin))["version"] == 1


# --- history, diff, rollback


async def test_a_rollback_writes_what_an_earlier_version_says_as_a_new_one(admin):
    await patch(admin, {"set": {"guard.max_messages": 7}})
    tried = await admin.call("POST", f"{PATH}/rollback?dry_run=true", {"version": 1}, OPERATOR, If_Match='"2"')
    assert [(change["before"], change["after"]) for change in tried.json["changes"]] == [(7, 2048)]
    assert (await newest(admin))["version"] == 2
    back = await admin.call("POST", f"{PATH}/rollback", {"version": 1}, OPERATOR, If_Match='"2"')
    assert (back.status, back.json["version"]) == (200, 3)
    found = await newest(admin)
    assert (found["reason"], found["document"]["guard"]["max_messages"]) == ("back to version 1", 2048)
    assert admin.controller.settings.guard.max_messages == 2048
    first = (await admin.call("GET", f"{PATH}/versions/1")).json
    assert first["sha256"] == found["sha256"]
    assert "control_planes" not in first
    stale = await admin.call("POST", f"{PATH}/rollback", {"version": 2}, OPERATOR, If_Match='"2"')
    assert stale.status == 412
    nowhere = await admin.call("POST", f"{PATH}/rollback", {"version": 9}, OPERATOR, If_Match='"3"')
    assert (nowhere.status, nowhere.code) == (404, "no_such_version")


async def write_as_it_is(admin, document: str) -> None:
    """A version that an older build took, and this one would not."""
    controller = admin.controller
    await rows.write_version(controller.store, controller.leadership.epoch, 1, document, "older", "")
    await controller.settings_poller.look()


async def test_a_rollback_to_a_version_that_does_not_load_any_more_tells_every_fault_and_writes_nothing(admin):
    await write_as_it_is(admin, "[guard]\nmax_messages = 5\nold_key = 1\n\n[route]\nqueue_max = -4\n")
    await put(admin, {"toml": "", "reset": True}, 2)
    answer = await admin.call("POST", f"{PATH}/rollback", {"version": 2}, OPERATOR, If_Match='"3"')
    assert (answer.status, answer.code) == (400, "invalid")
    assert "version 2 does not load with this build, so nothing was changed" in answer.json["error"]["message"]
    assert {fault["path"] for fault in answer.json["error"]["faults"]} == {"guard.old_key", "route.queue_max"}
    assert (await newest(admin))["version"] == 3


async def test_a_version_that_does_not_load_here_is_shown_as_it_is_and_named_as_refused(admin):
    await write_as_it_is(admin, "[guard]\nold_key = 1\n")
    found = await newest(admin)
    assert (found["version"], found["document"], found["desired"]) == (2, {"guard": {"old_key": 1}}, 2)
    (plane,) = found["control_planes"]
    assert (plane["live"], plane["refused"]) == (1, 2)
    assert "guard.old_key" in plane["why"]
    problems = (await admin.call("GET", "/api/v1/status")).json["problems"]
    assert [one for one in problems if one.startswith("settings version 2 is not taken by ctl-1: ") and "guard.old_key" in one]
    metrics = (await admin.call("GET", "/metrics", token=None)).body.decode()
    assert "llmgw_settings_version 1.0" in metrics
    assert "llmgw_settings_desired_version 2.0" in metrics
    assert "llmgw_settings_refused 1.0" in metrics
    assert (await put(admin, {"toml": "", "reset": True}, 2)).json["version"] == 3
    assert (await admin.call("GET", "/api/v1/status")).json["problems"] == []


async def test_the_history_tells_who_wrote_runs_and_refused_each_version_page_by_page(admin):
    controller = admin.controller
    await patch(admin, {"set": {"guard.max_messages": 7, "route.queue_max": 9}, "reason": "one"})
    await patch(admin, {"set": {"guard.max_messages": 8}, "reason": "two"}, 2)
    refused = rows.Applied("http://other", "ctl-2", PlaneSettings(live=2, applied=2, refused=3, why="no disk for it"), 1.0)
    await rows.save_applied(controller.store, controller.leadership.epoch, (refused,))
    page = (await admin.call("GET", f"{PATH}/history?limit=2", token=VIEWER)).json
    assert [(one["version"], one["author"], one["reason"], one["changes"]) for one in page["versions"]] == [
        (3, "operator", "two", 1),
        (2, "operator", "one", 2),
    ]
    assert page["versions"][0]["applied_by"] == ["ctl-1"]
    assert page["versions"][0]["refused_by"] == [{"name": "ctl-2", "why": "no disk for it"}]
    rest = (await admin.call("GET", f"{PATH}/history?limit=2&cursor={page['next']}")).json
    assert [(one["version"], one["parent"], one["changes"]) for one in rest["versions"]] == [(1, 0, 2)]
    assert rest["next"] is None
    for bad in ("limit=0", "limit=x", "cursor=x", "limit=10001"):
        assert (await admin.call("GET", f"{PATH}/history?{bad}")).status == 400


async def test_a_long_history_comes_whole_whatever_a_page_is_asked_to_hold(admin):
    controller = admin.controller
    for version in range(1, 450):
        await rows.write_version(controller.store, controller.leadership.epoch, version, f"[limits]\nmax_parallel = {version}\n", "", "")
    found, cursor = [], ""
    while cursor is not None:
        page = (await admin.call("GET", f"{PATH}/history?limit=1000{cursor and f'&cursor={cursor}'}")).json
        found += page["versions"]
        cursor = page["next"]
    assert [one["version"] for one in found] == list(range(450, 0, -1))
    assert [one["changes"] for one in found] == [*[1] * 448, 3, 2]


async def test_two_versions_are_compared_in_either_direction(admin):
    await patch(admin, {"set": {"guard.max_messages": 7}})
    forth = (await admin.call("GET", f"{PATH}/diff?from=1")).json
    assert forth == {
        "from": 1,
        "to": 2,
        "changes": [{"path": "guard.max_messages", "before": 2048, "after": 7, "applies": "live"}],
    }
    back = (await admin.call("GET", f"{PATH}/diff?from=2&to=1")).json
    assert (back["changes"][0]["before"], back["changes"][0]["after"]) == (7, 2048)
    assert len((await admin.call("GET", f"{PATH}/diff?from=0&to=1")).json["changes"]) == 2
    assert (await admin.call("GET", f"{PATH}/diff")).json["error"]["param"] == "from"
    assert (await admin.call("GET", f"{PATH}/diff?from=1&to=99")).code == "no_such_version"
    assert (await admin.call("GET", f"{PATH}/diff?from=a")).status == 400
    assert (await admin.call("GET", f"{PATH}/versions/99")).code == "no_such_version"
    assert (await admin.call("GET", f"{PATH}/versions/x")).status == 400


# --- the schema, and what is in force


async def test_the_schema_holds_every_key_with_what_a_form_needs(admin):
    sections = (await admin.call("GET", f"{PATH}/schema", token=VIEWER)).json["sections"]
    keys = {row["path"]: row for section in sections for row in section["keys"]}
    for path in known_paths(Settings):
        assert path == "engines" or path in keys or any(key.startswith(f"{path}.") for key in keys), path
    row = keys["guard.max_messages"]
    assert (row["type"], row["default"], row["low"], row["scope"], row["applies"]) == ("whole number", 2048, 0, "cluster", "live")
    assert keys["engines.<name>.command"]["scope"] == "cluster"
    assert keys["guard.rule.name"]["required"]
    assert next(section for section in sections if section["name"] == "guard.rule")["array"]
    assert {section["scope"] for section in sections} == {"machine", "cluster"}


async def test_what_is_in_force_is_told_with_whose_value_it_is(admin):
    await patch(admin, {"set": {"limits.max_parallel": 3, "engines.vllm.load_limit_s": 60}})
    found = (await admin.call("GET", f"{PATH}/effective", token=VIEWER)).json
    keys = {row["path"]: (row["value"], row["origin"]) for row in found["keys"]}
    assert found["version"] == 2
    assert keys["limits.max_parallel"] == (3, "document")
    assert keys["limits.tokens_per_minute"] == (0, "default")
    assert keys["engines.vllm.load_limit_s"] == (60, "document")
    assert keys["guard.rule"][0][0]["name"] == "private-keys"
    assert keys["server.name"][1] == "default"


# --- roll-outs and the pause


async def test_a_held_version_and_a_frozen_roll_out_are_problems_until_they_are_over(admin):
    controller = admin.controller
    await patch(admin, {"set": {"guard.max_messages": 7}})
    row = RolloutRow(RolloutPhase.FROZEN, 2, ("a",), "", "", (Held(2, "ctl-2 did not come back"),), "version 2: ctl-2 did not come back")
    await rows.save_rollout(controller.store, controller.leadership.epoch, row)
    await controller.settings_poller.look()
    found = await newest(admin)
    assert (found["version"], found["held"], found["why_held"], found["desired"]) == (2, True, "ctl-2 did not come back", 1)
    assert (found["rollout"]["phase"], found["rollout"]["reason"]) == ("frozen", "version 2: ctl-2 did not come back")
    status = (await admin.call("GET", "/api/v1/status")).json
    stands, held = status["problems"]
    assert stands == "the roll-out of settings stands still: version 2: ctl-2 did not come back"
    assert held.startswith("settings version 2 is held: version 1 is in force, also for keys that are live;")
    on_top = await patch(admin, {"set": {"limits.max_parallel": 3}}, query="?dry_run=true", version=2)
    assert any("what it says is tried again: guard.max_messages" in warning for warning in on_top.json["warnings"])
    assert (status["settings"]["version"], status["settings"]["desired"], status["settings"]["held"]) == (2, 1, True)
    assert "llmgw_rollout_frozen 1.0" in (await admin.call("GET", "/metrics", token=None)).body.decode()
    again = await admin.call("POST", f"{PATH}/rollback", {"version": 2}, OPERATOR, If_Match='"2"')
    assert any("version 2 is held (ctl-2 did not come back)" in warning for warning in again.json["warnings"])
    await rows.save_rollout(controller.store, controller.leadership.epoch, RolloutRow(held=(Held(2, "it ended twice"),)))
    await controller.settings_poller.look()
    problems = (await admin.call("GET", "/api/v1/status")).json["problems"]
    assert problems == []  # version 3 says the same, and is not held
    same = await patch(admin, {"set": {"guard.max_messages": 7}}, version=3)
    assert same.json["version"] == 3  # the newest again, and not held
    await rows.save_rollout(controller.store, controller.leadership.epoch, RolloutRow(held=(Held(3, "it ended twice"),)))
    await controller.settings_poller.look()
    assert (await patch(admin, {"set": {"guard.max_messages": 7}}, version=3)).json["version"] == 4  # a held one is written again


async def test_a_pause_stands_with_its_reason_until_somebody_resumes(admin):
    assert (await admin.call("GET", "/api/v1/pause", token=VIEWER)).json == {"pause": None}
    paused = await admin.call("POST", "/api/v1/pause", {"reason": "power work"}, OPERATOR)
    assert (paused.status, paused.json["change"]) == (200, "paused")
    assert paused.json["pause"]["reason"] == "power work"
    assert (await admin.call("GET", "/api/v1/pause")).json["pause"] == paused.json["pause"]
    again = await admin.call("POST", "/api/v1/pause", {"reason": "others' work"}, OPERATOR)
    assert (again.json["change"], again.json["pause"]) == ("unchanged", paused.json["pause"])
    assert (await newest(admin))["pause"]["author"] == "operator"
    status = (await admin.call("GET", "/api/v1/status")).json
    assert status["settings"]["pause"] == paused.json["pause"]
    assert [one for one in status["problems"] if one.startswith("paused by operator since ") and "power work" in one]
    assert "llmgw_paused 1.0" in (await admin.call("GET", "/metrics", token=None)).body.decode()
    assert (await admin.call("DELETE", "/api/v1/pause", None, OPERATOR)).json["change"] == "resumed"
    assert (await admin.call("DELETE", "/api/v1/pause", None, OPERATOR)).json["change"] == "unchanged"
    assert (await admin.call("GET", "/api/v1/status")).json["problems"] == []
    assert (await admin.call("POST", "/api/v1/pause", None, OPERATOR)).status == 200
    assert (await admin.call("POST", "/api/v1/pause", {"reason": "x" * 1001}, OPERATOR)).json["error"]["param"] == "reason"
    assert (await admin.call("POST", "/api/v1/pause", {"reason": 3}, OPERATOR)).json["error"]["param"] == "reason"


# --- without a store


async def test_without_a_store_the_file_is_shown_and_holds_what_is_changed(tmp_path):
    async with running_admin(tmp_path, objects=Objects(Catalog()), file="/etc/llmgw/llmgw.toml") as admin:
        found = await newest(admin)
        assert (found["version"], found["document"], found["toml"], found["created_at"]) == (0, {}, "", None)
        assert "/etc/llmgw/llmgw.toml" in found["reason"]
        effective = (await admin.call("GET", f"{PATH}/effective")).json
        assert {row["path"]: row["value"] for row in effective["keys"]}["guard.rule"] == []
        assert (await admin.call("GET", f"{PATH}/history")).json == {"versions": [], "next": None}
        assert (await admin.call("GET", f"{PATH}/diff?from=0&to=0")).json["changes"] == []
        assert (await admin.call("GET", f"{PATH}/versions/1")).status == 404
        assert (await admin.call("POST", f"{PATH}/check", {"toml": "[limits]\nmax_parallel = 1\n"}, OPERATOR)).status == 200
        for method, path, body in (
            ("PUT", PATH, {"toml": ""}),
            ("PATCH", PATH, {"set": {"guard.max_messages": 1}}),
            ("POST", f"{PATH}/rollback", {"version": 1}),
            ("POST", "/api/v1/pause", {}),
            ("DELETE", "/api/v1/pause", None),
        ):
            refused = await admin.call(method, path, body, OPERATOR, If_Match='"0"')
            assert (refused.status, refused.code) == (409, "file_holds_it")
            assert "/etc/llmgw/llmgw.toml" in refused.json["error"]["message"]
        status = (await admin.call("GET", "/api/v1/status")).json
        assert (status["settings"]["version"], status["settings"]["live"]) == (0, 0)


async def test_a_write_that_the_store_does_not_take_is_applied_nowhere(admin):
    controller = admin.controller
    admin.controller.store.close()
    answer = await patch(admin, {"set": {"guard.max_messages": 7}})
    assert answer.status == 503
    assert controller.in_force.live == 1
    assert controller.settings.guard.max_messages == 2048
    assert json.loads(answer.body)["error"]["type"] == "unavailable"
