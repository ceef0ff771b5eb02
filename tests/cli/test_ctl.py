"""ctl against a server that speaks the admin API's contract: what it sends, what it prints, how it ends."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from llmgw.cli.ctl import waiting
from llmgw.cli.ctl.output import Ctl
from llmgw.domain.errors import Unavailable
from tests.cli.conftest import Run
from tests.cli.fake_api import TOKEN, FakeApi, Request, Says, error

STATUS = {
    "cluster_id": "c1",
    "leader": {"owner": "ctl-1-ab", "holder": "ctl-1", "epoch": 3, "is_me": True, "power": "confirmed"},
    "build": "0.1.0",
    "store": {"mode": "file", "durability": "local"},
    "models": {"degraded": 1},
    "replicas": {"ready": 1, "failed": 0},
    "nodes": {"ready": 1},
    "router": {"embedded": True, "generation": 4, "endpoints": 1, "following": [{"id": "r1"}]},
    "problems": [],
    "problems_more": 0,
}
MODELS = {"models": [{"name": "m1", "replicas_wanted": 2, "ready": 1, "state": "degraded", "reason": "no_capacity"}], "next": None}
NODES = {"nodes": [{"name": "gpu-1", "state": "ready", "cordoned": True, "facility": "room-1"}], "next": None}


def on_status(api: FakeApi, *answers: object) -> None:
    api.on("GET /api/v1/status", *answers)
    api.on("GET /api/v1/models", MODELS)
    api.on("GET /api/v1/nodes", NODES)


def test_status_shows_who_leads_what_is_ready_and_what_is_wrong(ctl: Run, api: FakeApi):
    on_status(api, STATUS)
    ran = ctl("status")
    assert ran.code == 0
    assert "leader    ctl-1 (epoch 3, confirmed)" in ran.out
    assert "store     file, durability local" in ran.out
    assert "router    embedded, 1 following, generation 4, 1 endpoint\n" in ran.out
    assert "models    1 degraded\n" in ran.out
    assert "replicas  1 ready\n" in ran.out
    assert "nodes     1 ready\n" in ran.out
    assert "m1     1/2    degraded  no_capacity" in ran.out
    assert "gpu-1  ready,cordoned  room-1" in ran.out
    assert ran.out.endswith("no problems\n")


@pytest.mark.parametrize(
    ("following", "said"),
    [
        ([{"id": "r1", "endpoints": 2}], "1 following, generation 2, 0 endpoints published (the router acts on 2, as told before)"),
        ([{"id": "r1", "endpoints": 1}, {"id": "r2", "endpoints": 0}], "0 endpoints published (routers act on 0 to 1, as told before)"),
        ([{"id": "r1", "endpoints": 0}], "1 following, generation 2, 0 endpoints\n"),
        ([{"id": "r1", "endpoints": None}], "1 following, generation 2, 0 endpoints\n"),
    ],
)
def test_status_tells_what_routers_act_on_where_a_leader_that_has_just_begun_has_published_something_else(
    ctl: Run, api: FakeApi, following: list[object], said: str
):
    on_status(api, {**STATUS, "router": {"embedded": False, "generation": 2, "endpoints": 0, "following": following}})
    assert said in ctl("status").out


def test_status_of_a_large_cluster_is_counts_and_asks_for_no_lists(ctl: Run, api: FakeApi):
    many = {"models": {"ready": 400, "loading": 3}, "nodes": {"ready": 299, "lost": 1}, "problems": ["node n2 is lost"], "problems_more": 7}
    on_status(api, {**STATUS, **many})
    ran = ctl("status")
    assert "models    400 ready, 3 loading\n" in ran.out
    assert "nodes     299 ready, 1 lost\n" in ran.out
    assert ran.out.endswith("problems:\n  - node n2 is lost\n  - and 7 more\n")
    assert [request.path for request in api.requests] == ["/api/v1/status"]
    assert ctl("status", "--check").out == "not well: node n2 is lost; and 7 more\n"


def test_status_check_is_one_line_and_an_exit_code(ctl: Run, api: FakeApi):
    api.on("GET /api/v1/status", STATUS, {**STATUS, "problems": ["model m1: 1 of 2 ready", "node n2 is lost"]})
    well = ctl("status", "--check")
    assert (well.code, well.out) == (0, "ok: 1 model, led by ctl-1 (epoch 3, confirmed)\n")
    unwell = ctl("status", "--check")
    assert (unwell.code, unwell.out) == (7, "not well: model m1: 1 of 2 ready; node n2 is lost\n")


def test_status_of_a_cluster_that_nobody_leads_says_so(ctl: Run, api: FakeApi):
    api.on("GET /api/v1/status", {**STATUS, "leader": None, "models": {}, "nodes": {}, "router": None})
    ran = ctl("status")
    assert ran.code == 0
    assert "nobody is known to lead" in ran.out
    assert "models    none" in ran.out


def test_output_is_json_or_toml_where_it_is_asked_for_before_or_after_the_noun(ctl: Run, api: FakeApi):
    api.on("GET /api/v1/status", {**STATUS, "note": None})
    assert json.loads(ctl("status", "--output", "json").out) == {**STATUS, "note": None}
    assert json.loads(ctl("--output", "json", "status").out) == {**STATUS, "note": None}
    assert tomllib.loads(ctl("status", "-o", "toml").out) == STATUS
    assert tomllib.loads(ctl("-o", "json", "status", "-o", "toml").out) == STATUS


@pytest.mark.parametrize(
    ("says", "code", "text"),
    [
        (error(400, "the count is negative", "invalid"), 3, "the count is negative"),
        (error(401, "no", "unauthenticated"), 5, "no"),
        (error(403, "a viewer may not", "denied"), 5, "a viewer may not"),
        (error(404, "there is no model m9", "not_found"), 4, "there is no model m9"),
        (error(409, "the state forbids it", "conflict"), 4, "the state forbids it"),
        (error(412, "the revision moved", "revision_moved"), 4, "the revision moved"),
        (error(413, "too much", "too_large"), 3, "too much"),
        (error(428, "name the revision", "if_match_required"), 3, "name the revision"),
        (error(429, "slow down", "overloaded", Retry_After="7"), 6, "slow down"),
        (error(500, "a bug", "broken"), 1, "a bug"),
        (error(502, "the engine failed", "upstream_failed"), 6, "the engine failed"),
        (error(503, "no leader is known", "unavailable", Retry_After="60"), 6, "no leader is known"),
        (error(504, "no answer in time", "timeout"), 6, "no answer in time"),
        (Says(raw=b"<html>oops</html>", status=500), 1, "answered 500 without saying why"),
        (Says(raw=b"<html>hello</html>"), 3, "not JSON"),
        (Says(status=302, headers={"Location": "http://elsewhere/"}), 3, "redirect"),
        (Says({"error": {"message": "bad", "code": 7, "faults": [{"path": "a.b", "reason": "no"}]}}, 400), 3, "  a.b: no"),
        (Says({"error": "text"}, 418), 3, "answered 418"),
        (Says(raw=b"not here", status=404), 4, "answered 404 without saying why: is this the admin API's address?"),
        (error(404, "this is a router's port", "router_port"), 3, "is a router's port and no admin API: "),
    ],
)
def test_an_error_of_the_api_is_one_sentence_and_its_exit_code(ctl: Run, api: FakeApi, says: Says, code: int, text: str):
    api.on("GET /api/v1/models/m9", says)
    ran = ctl("model", "show", "m9")
    assert ran.code == code
    assert ran.out == ""
    assert ran.err.startswith("llmgw: ")
    assert text in ran.err
    assert "Traceback" not in ran.err


def test_a_write_that_met_a_hand_over_is_tried_again_under_the_same_key(ctl: Run, api: FakeApi):
    api.on(
        "POST /api/v1/models/m1/scale",
        Says(hang_up=True),
        error(503, "no leader is known", "unavailable", Retry_After="0"),
        {"revision": 9},
    )
    ran = ctl("model", "scale", "m1", "2")
    assert (ran.code, ran.out) == (0, "model m1: 2 replicas wanted (revision 9)\n")
    assert [request.body for request in api.requests] == [{"count": 2}] * 3
    keys = {request.headers["idempotency-key"] for request in api.requests}
    assert len(keys) == 1
    assert len(keys.pop()) == 32


def test_two_writes_have_two_keys(ctl: Run, api: FakeApi):
    api.on("POST /api/v1/models/m1/restart", {})
    ctl("model", "restart", "m1")
    ctl("model", "restart", "m1")
    assert len({request.headers["idempotency-key"] for request in api.requests}) == 2


def test_a_server_that_is_not_there_is_unavailable(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LLMGW_TOKEN", "t")
    ran = run("ctl", "--server", "http://127.0.0.1:1", "status")
    assert ran.code == 6
    assert ran.err == "llmgw: nothing answers at http://127.0.0.1:1: Connection refused\n"


def test_no_proxy_of_the_environment_is_used(ctl: Run, api: FakeApi, monkeypatch: pytest.MonkeyPatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    on_status(api, STATUS)
    assert ctl("status").code == 0


def test_a_servers_path_goes_first(run: Run, api: FakeApi, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LLMGW_TOKEN", "t0ken-of-the-test")
    api.on("GET /admin/api/v1/status", {**STATUS, "models": {}, "nodes": {}})
    assert run("ctl", "--server", f"{api.url}/admin/", "status").code == 0


# --- models ---


def test_models_are_listed_over_all_their_pages(ctl: Run, api: FakeApi):
    row = {"name": "m1", "ready": 1, "replicas_wanted": 1, "state": "ready", "kind": "chat", "aliases": ["fast", "slow"]}
    api.on(
        "GET /api/v1/models",
        lambda r: Says({"models": [{**row, "name": "m2"}]} if "cursor=c" in r.path else {"models": [row], "next": "c"}),
    )
    ran = ctl("model", "list")
    assert ran.out.splitlines() == [
        "MODEL  READY  STATE  KIND  ALIASES",
        "m1     1/1    ready  chat  fast,slow",
        "m2     1/1    ready  chat  fast,slow",
    ]
    assert [model["name"] for model in json.loads(ctl("model", "list", "-o", "json").out)["models"]] == ["m1", "m2"]


def test_an_empty_listing_says_so(ctl: Run, api: FakeApi):
    for noun, none in (("model", "no models"), ("replica", "no replicas"), ("node", "no nodes"), ("hold", "no holds")):
        api.on(f"GET /api/v1/{noun}s", {f"{noun}s": [], "next": None})
        ran = ctl(noun, "list")
        assert ran.code == 0
        assert ran.out.startswith(none)


def test_a_listing_of_another_shape_is_an_error_and_no_crash(ctl: Run, api: FakeApi):
    for body in ([1], {"models": "x"}, {"models": [1]}, "x", None, 3):
        api.on("GET /api/v1/models", Says(body))
        ran = ctl("model", "list")
        assert ran.code == 3
        assert "admin API" in ran.err


def test_a_models_name_is_one_segment_of_the_path(ctl: Run, api: FakeApi):
    api.on(
        "GET /api/v1/models/org%2FModel-7B%3AQ4_K_M",
        {"name": "org/Model-7B:Q4_K_M", "replicas": {"min": 1}, "profile": [{"engine": "vllm", "args": ["-a"]}]},
    )
    ran = ctl("model", "show", "org/Model-7B:Q4_K_M")
    assert ran.code == 0
    assert "name      org/Model-7B:Q4_K_M" in ran.out
    assert "profile:\n- engine" in ran.out


MODEL = '[[model]]\nname = "m1"\nreplicas = 2\n[[model.profile]]\nengine = "command"\ncommand = ["/bin/x", "{port}"]\n'


def test_apply_sends_the_tables_and_prints_what_changed_and_the_revision(ctl: Run, api: FakeApi, tmp_path: Path):
    file = tmp_path / "m.toml"
    file.write_text(MODEL)
    api.on(
        "POST /api/v1/models:apply",
        {
            "changes": [{"model": "m1", "change": "updated", "diff": ["replicas: 1 -> 2", {"path": "pool", "old": "a", "new": "b"}]}],
            "revision": 5,
        },
    )
    ran = ctl("model", "apply", "-f", str(file))
    assert (ran.code, ran.out) == (0, "model m1: updated\n  replicas: 1 -> 2\n  pool: a -> b\nrevision 5\n")
    (request,) = api.requests
    assert request.body == {
        "models": [{"name": "m1", "replicas": 2, "profile": [{"engine": "command", "command": ["/bin/x", "{port}"]}]}],
        "dry_run": False,
    }


def test_apply_tells_of_a_place_holder_that_nobody_fills_in(ctl: Run, api: FakeApi, tmp_path: Path):
    file = tmp_path / "m.toml"
    file.write_text(MODEL.replace("{port}", "{prot}"))
    api.on("POST /api/v1/models:apply", {"changes": [{"model": "m1", "change": "created", "diff": []}], "revision": 5})
    ran = ctl("model", "apply", "--file", str(file))
    assert ran.code == 0
    told = "model 'm1', profile 'command': command: {prot} is no place-holder and stays as it is; did you mean {port}?"
    assert ran.err == f"llmgw: warning: {file}: {told}\n"


def test_a_dry_run_of_apply_says_that_nothing_was_written(ctl: Run, api: FakeApi, tmp_path: Path):
    file = tmp_path / "m.toml"
    file.write_text(MODEL)
    api.on("POST /api/v1/models:apply", {"changes": [{"model": "m1", "change": "created", "diff": []}], "revision": 5})
    ran = ctl("model", "apply", "--file", str(file), "--dry-run")
    assert ran.out == "model m1: would be created\ndry run: nothing was written\n"
    assert api.requests[0].body["dry_run"] is True


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "there is no [[model]] table"),
        ("[route]\nretries = 1\n" + MODEL, "route: only [[model]] tables are applied"),
        (MODEL.replace('"command"', '"comand"'), "did you mean 'command'?"),
        ("[[model]\n", "is not TOML at line 1"),
        (MODEL + MODEL, "the name 'm1' is already used by model[0]"),
    ],
)
def test_a_file_of_models_that_is_wrong_is_refused_before_anything_is_sent(ctl: Run, api: FakeApi, tmp_path: Path, text: str, part: str):
    file = tmp_path / "m.toml"
    file.write_text(text)
    ran = ctl("model", "apply", "-f", str(file))
    assert ran.code == 3
    assert part in ran.err
    assert api.requests == []


def test_a_file_of_models_that_is_not_there_is_refused(ctl: Run, api: FakeApi):
    ran = ctl("model", "apply", "-f", "/nowhere/m.toml")
    assert ran.code == 4
    assert "there is no file /nowhere/m.toml" in ran.err


@pytest.mark.parametrize("order", [("model", "rm", "m1"), ("key", "revoke", "m1")])
def test_without_a_terminal_nothing_is_ended_unless_yes_is_said(ctl: Run, api: FakeApi, order: tuple[str, ...]):
    """A model was removed, and a key revoked, by a line of a script that had meant to ask."""
    api.on("GET /api/v1/models/m1", {"name": "m1"})
    ran = ctl(*order)
    assert (ran.code, "say --yes" in ran.err) == (2, True)
    assert {request.method for request in api.requests} <= {"GET"}


def test_rm_names_the_revision_it_saw(ctl: Run, api: FakeApi):
    api.on("GET /api/v1/models/m1", Says({"name": "m1"}, headers={"ETag": '"7"'}))
    api.on("DELETE /api/v1/models/m1", {"revision": 8})
    ran = ctl("model", "rm", "m1", "--yes")
    assert (ran.code, ran.out) == (0, "model m1: removed (revision 8)\n")
    assert api.requests[-1].headers["if-match"] == '"7"'
    assert ctl("model", "rm", "m2", "--yes").code == 4


def test_waiting_ends_when_every_model_has_what_it_wants(ctl: Run, api: FakeApi):
    def models(ready: int, state: str) -> dict[str, object]:
        return {"models": [{"name": "m1", "ready": ready, "replicas_wanted": 2, "state": state, "reason": "loading"}]}

    api.on("POST /api/v1/models/m1/scale", {"revision": 2})
    api.on("GET /api/v1/models", models(1, "failed"), models(1, "degraded"), models(2, "ready"))
    ran = ctl("model", "scale", "m1", "2", "--wait")
    assert (ran.code, ran.out) == (0, "model m1: 2 replicas wanted (revision 2)\n")
    assert ran.err == "model m1: 1/2 failed: loading\nmodel m1: 1/2 degraded: loading\n"


def test_waiting_ends_at_its_limit_with_how_far_it_came(ctl: Run, api: FakeApi):
    api.on("DELETE /api/v1/models/m1", {"revision": 2})
    api.on("GET /api/v1/models/m1", {"name": "m1"})
    api.on(
        "GET /api/v1/replicas",
        {"replicas": [{"id": "r", "model": "m1", "state": "draining"}, {"id": "s", "model": "m2", "state": "ready"}]},
    )
    ran = ctl("model", "rm", "m1", "--yes", "--wait", "--wait-limit", "0")
    assert ran.code == 6
    assert "llmgw: not done after 0 s: 1 replica left (draining)" in ran.err


def test_waiting_for_a_model_that_stays_failed_ends(api: FakeApi, monkeypatch: pytest.MonkeyPatch):
    look = waiting.models_ready(Ctl(api.url, "table"), ["m1"])
    monkeypatch.setenv("LLMGW_TOKEN", TOKEN)
    api.on("GET /api/v1/models", {"models": [{"name": "m1", "state": "failed", "reason": "exit code 1"}]})
    for _ in range(waiting.FAILED_LOOKS):
        assert look() == "model m1: 0/0 failed: exit code 1"
    with pytest.raises(Unavailable, match="model m1: failed: exit code 1"):
        look()


def test_draining_waits_for_what_was_to_go(ctl: Run, api: FakeApi):
    gone = {"replicas": [{"id": "r", "node": "gpu-1", "state": "stopped"}]}
    api.on("POST /api/v1/nodes/gpu-1/drain", {})
    api.on("POST /api/v1/replicas/r/drain", {})
    for what in (("node", "drain", "gpu-1"), ("replica", "drain", "r")):
        api.on("GET /api/v1/replicas", {"replicas": [{"id": "r", "node": "gpu-1", "state": "draining"}]}, gone)
        ran = ctl(*what, "-w")
        assert ran.out.endswith(": drained\n")
        assert "draining" in ran.err


def test_a_models_table_comes_out_as_apply_takes_it(ctl: Run, api: FakeApi, tmp_path: Path):
    asked = {"name": "m1", "replicas": 2, "profile": [{"name": "command", "engine": "command", "command": ["/bin/x", "a b"]}]}
    api.on("GET /api/v1/models/m1", {"name": "m1", "model": asked, "replicas": [{"id": "m1-0a", "state": "ready"}]})
    api.on("POST /api/v1/models:apply", {"changes": []})
    file = tmp_path / "m.toml"
    file.write_text(ctl("model", "show", "m1", "--as-file").out)
    assert ctl("model", "apply", "-f", str(file)).code == 0
    assert api.requests[-1].body["models"] == [asked]
    whole = ctl("model", "show", "m1").out
    assert whole.startswith("name  m1\n\nREPLICA  STATE\nm1-0a    ready\n\n[[model]]\n")


def test_engine_chooses_a_profile(ctl: Run, api: FakeApi):
    api.on("POST /api/v1/models/m1/engine", Says({"durability": "local"}, headers={"ETag": '"4"'}))
    assert ctl("model", "engine", "m1", "small").out == "model m1: profile small chosen (revision 4, durability: local)\n"
    assert api.requests[0].body == {"profile": "small"}
    assert ctl("model", "engine", "m1", "--by-priority").out.startswith("model m1: the first profile by priority again")
    assert api.requests[1].body == {"profile": None}
    assert ctl("model", "engine", "m1").code == 2
    assert ctl("model", "engine", "m1", "small", "--by-priority").code == 2


# --- replicas ---

REPLICA = {
    "id": "m1-0a",
    "model": "m1",
    "profile": "p",
    "node": "gpu-1",
    "gpus": ["GPU-1"],
    "state": "ready",
    "reason": "",
    "age_s": 130,
    "attempt": 1,
}


def test_replicas_are_listed_and_shown(ctl: Run, api: FakeApi):
    api.on("GET /api/v1/replicas", {"replicas": [REPLICA, {**REPLICA, "id": "m2-0b", "model": "m2"}]})
    api.on("GET /api/v1/replicas/m1-0a", REPLICA)
    lines = ctl("replica", "list", "--model", "m1").out.splitlines()
    assert lines[0].split() == ["REPLICA", "MODEL", "PROFILE", "NODE", "GPUS", "STATE", "AGE", "ATTEMPT"]
    assert lines[1:] == ["m1-0a    m1     p        gpu-1  GPU-1  ready  2 min  1"]
    assert "state    ready" in ctl("replica", "show", "m1-0a").out


def test_logs_are_read_to_their_end(ctl: Run, api: FakeApi):
    text = "one\ntwo\nthree"

    def page(request: Request) -> Says:
        offset = int(request.path.partition("offset=")[2].partition("&")[0])
        chunk = text[offset : offset + 5]
        return Says({"attempt": 2, "attempts": 2, "offset": offset, "next_offset": offset + len(chunk), "text": chunk})

    api.on("GET /api/v1/replicas/m1-0a/logs", page)
    ran = ctl("replica", "logs", "m1-0a")
    assert (ran.code, ran.out) == (0, text)
    assert "attempt" not in api.requests[0].path
    assert "attempt=2" in api.requests[1].path
    ctl("replica", "logs", "m1-0a", "--attempt", "1")
    assert "attempt=1" in api.requests[4].path


def test_the_tail_of_a_log_is_its_last_lines(ctl: Run, api: FakeApi):
    api.on(
        "GET /api/v1/replicas/r/logs",
        {"attempt": 1, "attempts": [1], "offset": 90, "next_offset": 96, "text": "a\nb\nc\n"},
        {"attempt": 1, "text": ""},
    )
    assert ctl("replica", "logs", "r", "--tail", "2").out == "b\nc\n"
    assert "offset=-65536" in api.requests[0].path
    assert "offset=96" in api.requests[1].path


def test_following_logs_goes_on_with_the_next_attempt_and_ends_when_the_replica_is_gone(ctl: Run, api: FakeApi):
    def page(attempt: int, attempts: int, offset: int, text: str) -> Says:
        return Says({"attempt": attempt, "attempts": attempts, "offset": offset, "next_offset": offset + len(text), "text": text})

    api.on(
        "GET /api/v1/replicas/m1-0a/logs",
        page(1, 1, 0, "a\n"),
        page(1, 2, 2, ""),
        page(2, 2, 0, "b\n"),
        error(404, "there is no replica m1-0a", "not_found"),
    )
    ran = ctl("replica", "logs", "m1-0a", "-f")
    assert (ran.code, ran.out) == (0, "a\nb\n")
    assert "--- attempt 2 ---" in ran.err
    assert "m1-0a is gone" in ran.err


def test_logs_of_a_replica_that_does_not_exist_are_not_found(ctl: Run, api: FakeApi):
    assert ctl("replica", "logs", "nope").code == 4
    assert ctl("replica", "logs", "nope", "-f").code == 4


def test_orders_to_a_replica_say_what_was_asked(ctl: Run, api: FakeApi):
    for order in ("drain", "restart"):
        api.on(f"POST /api/v1/replicas/m1-0a/{order}", {"id": "m1-0a"})
    assert ctl("replica", "drain", "m1-0a").out == "replica m1-0a: draining\n"
    assert ctl("replica", "restart", "m1-0a").out == "replica m1-0a: restart asked for\n"


# --- nodes, holds, leader, explain ---


def test_nodes_are_listed_and_ordered(ctl: Run, api: FakeApi):
    api.on(
        "GET /api/v1/nodes",
        {"nodes": [{"name": "gpu-1", "state": "ready", "draining": True, "gpus": 0, "heard_age_s": 1.2, "labels": {"gpu": "h100"}}]},
    )
    assert ctl("node", "list").out.splitlines()[1] == "gpu-1  ready,draining  cpu   1 s ago  gpu=h100"
    for order in ("cordon", "drain", "resume", "labels"):
        api.on(f"POST /api/v1/nodes/gpu-1/{order}", {"revision": 3})
    assert ctl("node", "cordon", "gpu-1").out == "node gpu-1: cordoned (revision 3)\n"
    assert ctl("node", "drain", "gpu-1", "--deadline", "30").code == 0
    assert api.requests[-1].body == {"deadline_s": 30}
    assert ctl("node", "resume", "gpu-1").code == 0
    assert ctl("node", "label", "gpu-1", "a=b", "c=").code == 0
    assert api.requests[-1].body == {"labels": {"a": "b", "c": None}}
    assert ctl("node", "label", "gpu-1", "a").code == 2


def test_a_hold_is_listed_added_and_taken_away(ctl: Run, api: FakeApi):
    api.on("GET /api/v1/holds", Says({"holds": [{"facility": "room 1", "reason": "power", "drain": True, "until": None, "author": "ops"}]}))
    api.on("POST /api/v1/holds", {"revision": 2})
    api.on("DELETE /api/v1/holds/room%201", {"revision": 3})
    assert ctl("hold", "list").out.splitlines()[1] == "room 1    yes    taken away  ops     power"
    assert ctl("hold", "add", "room 1", "--reason", "power", "--until", "2030-01-01T00:00:00Z", "--drain").code == 0
    assert api.requests[-1].body == {"facility": "room 1", "reason": "power", "drain": True, "until": "2030-01-01T00:00:00Z"}
    assert ctl("hold", "rm", "room 1").out == "facility room 1: no longer held (revision 3)\n"
    assert ctl("hold", "add", "room 1").code == 2
    assert ctl("hold", "add", "room 1", "--reason", "x", "--until", "2030-01-01T00:00:00").code == 2


def test_the_end_of_a_hold_counts_from_the_servers_clock(ctl: Run, api: FakeApi):
    api.on("GET /api/v1/holds", Says({"holds": []}, headers={"Date": "Tue, 01 Jan 2030 00:00:00 GMT"}))
    api.on("POST /api/v1/holds", {})
    assert ctl("hold", "add", "r", "--reason", "x", "--until", "90m").code == 0
    assert api.requests[-1].body["until"] == "2030-01-01T01:30:00Z"


COUNTS = {"requests": 2, "unknown": 1, "prompt_tokens": 10, "cached_tokens": 3, "completion_tokens": 5}
USAGE = {
    "usage": [{"key": "", "model": "m", **COUNTS}, {"key": "team a", "model": "m", **COUNTS}],
    "total": {**COUNTS, "requests": 4},
    "by": "key,model",
    "since": "2030-01-01T00:00:00.000Z",
    "until": None,
    "next": None,
}


def test_usage_is_a_table_with_its_sum_or_data(ctl: Run, api: FakeApi):
    api.on("GET /api/v1/usage", USAGE)
    assert ctl("usage").out == (
        "KEY       MODEL  REQUESTS  PROMPT  CACHED  COMPLETION  UNKNOWN\n"
        "(no key)  m      2         10      3       5           1\n"
        "team a    m      2         10      3       5           1\n"
        "total            4         10      3       5           1\n"
    )
    assert api.requests[-1].path == "/api/v1/usage"
    shown = json.loads(ctl("usage", "--output", "json").out)
    assert shown == {name: value for name, value in USAGE.items() if name != "next"}
    assert tomllib.loads(ctl("usage", "-o", "toml").out)["usage"] == USAGE["usage"]


@pytest.mark.parametrize("by", ["key", "model", "hour"])
def test_usage_by_one_thing_asks_for_it_and_shows_it_alone(ctl: Run, api: FakeApi, by: str):
    api.on("GET /api/v1/usage", {**USAGE, "usage": [{by: "x", **COUNTS}]})
    lines = ctl("usage", "--by", by, "--since", "2030-01-01T00:00:00+05:30").out.splitlines()
    assert api.requests[-1].path == f"/api/v1/usage?by={by}&since=2030-01-01T00%3A00%3A00%2B05%3A30"
    assert [line.split()[:2] for line in lines] == [[by.upper(), "REQUESTS"], ["x", "2"], ["total", "4"]]


def test_usage_puts_pages_together_and_says_where_there_is_none(ctl: Run, api: FakeApi):
    first, second = ({**USAGE, "usage": [row], "next": after} for row, after in zip(USAGE["usage"], ("c1", None), strict=True))
    api.on("GET /api/v1/usage", first, second)
    assert json.loads(ctl("usage", "--output", "json").out)["usage"] == USAGE["usage"]
    assert api.requests[-1].path == "/api/v1/usage?cursor=c1"
    api.on("GET /api/v1/usage", {**USAGE, "usage": []})
    assert ctl("usage").out == "no usage since 2030-01-01T00:00:00.000Z\n"


def test_a_span_of_usage_counts_back_from_the_servers_clock(ctl: Run, api: FakeApi):
    api.on("GET /api/v1/usage", USAGE)
    api.on("GET /api/v1/leader", Says({}, headers={"Date": "Tue, 01 Jan 2030 00:00:00 GMT"}))
    assert ctl("usage", "--since", "7d", "--until", "90m").code == 0
    assert api.requests[-1].path == "/api/v1/usage?since=2029-12-25T00%3A00%3A00Z&until=2029-12-31T22%3A30%3A00Z"
    for wrong in ("yesterday", "2030-01-01T00:00:00", "999999d", "9" * 3_000, "long ago " * 300):
        ran = ctl("usage", "--since", wrong)
        assert (ran.code, "--since: " in ran.err, len(ran.err) < 500) == (2, True, True)


def test_explain_prints_the_plans_reasons(ctl: Run, api: FakeApi):
    api.on(
        "GET /api/v1/explain/model/m1",
        {
            "object": "model/m1",
            "text": "no node takes it",
            "rejections": [{"node": "gpu-1", "filter": "memory", "text": "needs 43008 MiB, 20480 MiB free"}],
            "plan": 4,
        },
    )
    ran = ctl("explain", "model", "m1")
    assert ran.out == "model/m1: no node takes it\n\nNODE   FILTER  WHY NOT\ngpu-1  memory  needs 43008 MiB, 20480 MiB free\n\nplan  4\n"
    assert ctl("explain", "replica", "x").code == 4


def test_handing_over_is_refused_on_a_lone_control_plane_without_force(ctl: Run, api: FakeApi):
    api.on(
        "POST /api/v1/leader/hand-over",
        lambda r: Says({"holder": "ctl-2"}) if r.body["force"] else error(409, "nobody would take over", "conflict"),
    )
    api.on("GET /api/v1/leader", {"holder": "ctl-1", "epoch": 3})
    assert ctl("leader", "hand-over").code == 4
    assert ctl("leader", "hand-over", "--force").out.startswith("leadership is being handed over")
    assert ctl("leader", "show").out == "holder  ctl-1\nepoch   3\n"


# --- events ---


def event(seq: int, level: str = "info") -> dict[str, object]:
    return {
        "seq": seq,
        "at": "2026-01-01T00:00:00.000Z",
        "kind": "replica.ready",
        "object": "replica/m1-0a",
        "epoch": 1,
        "text": "it answers",
        "level": level,
    }


def test_events_are_a_line_each(ctl: Run, api: FakeApi):
    api.on("GET /api/v1/events", {"events": [event(1), event(2, "error")], "next": 2})
    ran = ctl("events")
    assert ran.out.splitlines() == [
        "    1  2026-01-01T00:00:00.000Z  replica.ready  replica/m1-0a  it answers",
        "    2  2026-01-01T00:00:00.000Z  ERROR  replica.ready  replica/m1-0a  it answers",
    ]


def test_events_since_a_number_are_paged_through(ctl: Run, api: FakeApi):
    def page(request: Request) -> Says:
        after = int(request.path.partition("after=")[2].partition("&")[0])
        return Says({"events": [event(seq) for seq in range(after + 1, min(after + 500, 700) + 1)]})

    api.on("GET /api/v1/events", page)
    assert len(json.loads(ctl("events", "--since", "10", "-o", "json").out)["events"]) == 690


def test_following_events_goes_on_after_a_broken_stream_where_it_was(ctl: Run, api: FakeApi):
    def stream(request: Request) -> Says:
        if request.headers["accept"] != "text/event-stream":
            return Says({"events": [event(1)]})
        last = int(request.headers["last-event-id"])
        if last >= 3:
            return error(403, "the token was revoked", "denied")
        first, second = (f"data: {json.dumps(event(seq))}" for seq in (last, last + 1))
        data = f": hello\n\nid: {last}\n{first}\n\nid: {last + 1}\nevent: event\n{second}\n\ndata: broken"
        return Says(raw=data.encode(), headers={"Content-Type": "text/event-stream"})

    api.on("GET /api/v1/events", stream)
    ran = ctl("events", "-f", "-o", "json")
    assert ran.code == 5
    assert [json.loads(line)["seq"] for line in ran.out.splitlines()] == [1, 2, 3]
