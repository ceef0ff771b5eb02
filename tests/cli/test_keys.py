"""`ctl key`: what it sends, what it prints, and that a secret is shown once with a word of warning."""

from __future__ import annotations

import json
import tomllib

import pytest

from tests.cli.conftest import Run
from tests.cli.fake_api import FakeApi, Says, error

SECRET = "sk-" + "5" * 64
ROW = {
    "name": "team a", "models": ["m1", "m2"], "max_parallel": 0, "requests_per_minute": 60, "tokens_per_minute": 0,
    "expires": "2090-01-01T00:00:00Z", "operator": True, "prefix": "sk-5555555", "state": "active",
    "created_at": "2026-01-02T03:04:05.678Z", "created_by": "ops", "revoked_at": None, "revoked_by": "", "revision": 4,
}  # fmt: skip
MADE = {**ROW, "change": "created", "secret": SECRET, "durability": "local"}
REVOKED = {**ROW, "name": "old", "state": "revoked", "revoked_at": "2026-02-02T03:04:05.678Z"}


def test_a_secret_is_printed_once_and_a_warning_says_so(ctl: Run, api: FakeApi):
    api.on("POST /api/v1/keys", Says(MADE, 201))
    ran = ctl("key", "create", "team a", "--model", "m1", "--model", "m2", "--requests-per-minute", "60", "--operator")
    assert (ran.code, ran.out.splitlines()) == (0, ["key team a: created (revision 4, durability: local)", SECRET])
    assert ran.err.splitlines() == ["llmgw: the secret is shown this once and can never be read again: keep it now"]
    (sent,) = api.requests
    assert sent.body == {"name": "team a", "models": ["m1", "m2"], "requests_per_minute": 60, "operator": True}
    assert len(sent.headers["idempotency-key"]) == 32


def test_a_created_key_is_json_or_toml_for_programs(ctl: Run, api: FakeApi):
    api.on("POST /api/v1/keys", Says(MADE, 201))
    as_json, as_toml = ctl("key", "create", "team a", "-o", "json"), ctl("key", "create", "team a", "-o", "toml")
    assert json.loads(as_json.out)["secret"] == tomllib.loads(as_toml.out)["secret"] == SECRET
    assert "keep it now" in as_json.err


def test_a_secret_that_was_lost_on_its_way_is_an_error_that_says_what_to_do(ctl: Run, api: FakeApi):
    api.on("POST /api/v1/keys", Says(hang_up=True), Says({**MADE, "change": "unchanged", "secret": None}))
    ran = ctl("key", "create", "team a")
    assert (ran.code, ran.out) == (6, "")
    told = "key team a was created, and the answer with its secret was lost: `llmgw ctl key revoke 'team a'`, then create it anew"
    assert ran.err == f"llmgw: {told}\n"
    assert len({request.headers["idempotency-key"] for request in api.requests}) == 1


def test_a_secret_of_ones_own_is_sent_as_its_hash_and_none_is_shown(ctl: Run, api: FakeApi):
    api.on("POST /api/v1/keys", Says({**MADE, "secret": None}, 201))
    ran = ctl("key", "create", "team a", "--sha256", "a" * 64)
    assert (ran.code, ran.out, ran.err) == (0, "key team a: created (revision 4, durability: local)\n", "")
    assert api.requests[0].body == {"name": "team a", "sha256": "a" * 64}


def test_an_end_may_be_a_span_by_the_servers_clock_or_a_moment_or_never(ctl: Run, api: FakeApi):
    api.on("GET /api/v1/keys", Says({"keys": []}, headers={"Date": "Thu, 01 Jan 2026 00:00:00 GMT"}))
    api.on("POST /api/v1/keys", Says(MADE, 201))
    for given, sent in (("90d", "2026-04-01T00:00:00Z"), ("2030-01-01T00:00:00+02:00",) * 2, ("never", None)):
        assert ctl("key", "create", "x", "--expires", given).code == 0
        assert api.requests[-1].body == {"name": "x", "expires": sent}
    wrong = ctl("key", "create", "x", "--expires", "2030-01-01")
    assert (wrong.code, "RFC 3339" in wrong.err, "like 90m, 2h, 3d" in wrong.err) == (2, True, True)


@pytest.mark.parametrize("span", ["9999999d", "99999999d", "9" * 30 + "s"])
def test_a_span_that_is_too_large_is_told_as_one(ctl: Run, api: FakeApi, span: str):
    """It was told that a time like 2030-01-01T00:00:00Z was expected."""
    api.on("GET /api/v1/keys", Says({"keys": []}, headers={"Date": "Thu, 01 Jan 2026 00:00:00 GMT"}))
    ran = ctl("key", "create", "x", "--expires", span)
    assert (ran.code, ran.out) == (2, "")
    assert f"--expires: the span {span} is too large: no date is so far from now" in ran.err
    assert all(request.method == "GET" for request in api.requests)


def test_a_model_that_is_not_there_is_warned_about_and_the_key_is_made_and_changed(ctl: Run, api: FakeApi):
    api.on("POST /api/v1/keys", Says({**MADE, "models": ["m1", "nope"], "unknown_models": ["nope"]}, 201))
    ran = ctl("key", "create", "team a", "--model", "m1", "--model", "nope")
    assert (ran.code, ran.out.splitlines()[-1]) == (0, SECRET)
    warning = "llmgw: warning: key team a may use 'nope': no model has that name or alias now"
    assert ran.err.splitlines()[-1] == warning
    api.on("GET /api/v1/keys/team%20a", Says(ROW, headers={"ETag": '"4"'}))
    api.on("PATCH /api/v1/keys/team%20a", {**ROW, "change": "updated", "unknown_models": ["nope"]})
    assert ctl("key", "update", "team a", "--model", "nope").err.splitlines() == [warning]


def test_keys_are_listed_without_revoked_ones_unless_asked(ctl: Run, api: FakeApi):
    api.on("GET /api/v1/keys", {"keys": [REVOKED, ROW], "next": None})
    head, row = ctl("key", "list").out.splitlines()
    assert head.split() == ["KEY", "BEGINS", "STATE", "MODELS", "REQUESTS/MIN", "OPERATOR", "EXPIRES", "CREATED", "BY"]
    assert row.split() == ["team", "a", "sk-5555555", "active", "m1,m2", "60", "yes", "2090-01-01T00:00:00Z", "2026-01-02T03:04:05Z", "ops"]
    assert [one["name"] for one in json.loads(ctl("key", "list", "--all", "-o", "json").out)["keys"]] == ["old", "team a"]
    assert "2026-02-02T03:04:05Z" in ctl("key", "list", "--all").out
    api.on("GET /api/v1/keys", {"keys": [REVOKED], "next": None})
    assert ctl("key", "list").out == "no keys: `llmgw ctl key create NAME` adds one\n"


def test_one_key_is_shown_whole(ctl: Run, api: FakeApi):
    api.on("GET /api/v1/keys/team%20a", ROW)
    ran = ctl("key", "show", "team a")
    assert ran.code == 0
    assert "created_by           ops" in ran.out
    assert json.loads(ctl("key", "show", "team a", "-o", "json").out) == ROW


def test_an_update_names_what_changes_and_the_revision_that_it_edits(ctl: Run, api: FakeApi):
    api.on("GET /api/v1/keys/team%20a", Says(ROW, headers={"ETag": '"4"'}))
    api.on("PATCH /api/v1/keys/team%20a", {**ROW, "change": "updated", "revision": 5, "durability": "local"})
    ran = ctl("key", "update", "team a", "--no-operator", "--max-parallel", "0", "--expires", "never")
    assert (ran.code, ran.out) == (0, "key team a: updated (revision 5, durability: local)\n")
    assert (api.requests[-1].body, api.requests[-1].headers["if-match"]) == ({"operator": False, "max_parallel": 0, "expires": None}, '"4"')
    nothing = ctl("key", "update", "team a")
    assert (nothing.code, "name what is to change" in nothing.err) == (2, True)


def test_a_key_is_revoked_and_a_second_time_is_told_as_such(ctl: Run, api: FakeApi):
    path = "POST /api/v1/keys/team%20a/revoke"
    api.on(path, {**REVOKED, "change": "revoked", "revision": 6}, {**REVOKED, "change": "unchanged", "revision": 6})
    assert ctl("key", "revoke", "team a", "--yes").out == "key team a: revoked (revision 6)\n"
    assert ctl("key", "revoke", "team a", "--yes").out == "key team a: was revoked before (revision 6)\n"


@pytest.mark.parametrize(
    ("says", "code"),
    [
        (error(409, "without [store] the keys stand in /etc/llmgw/llmgw.toml", "file_holds_it"), 4),
        (error(403, "that takes the role admin", "denied"), 5),
        (error(400, "the key is not valid", "invalid"), 3),
        (error(429, "slow down", "overloaded", Retry_After="9"), 6),
    ],
)
def test_a_refusal_is_one_sentence_and_no_secret_is_promised(ctl: Run, api: FakeApi, says: Says, code: int):
    api.on("POST /api/v1/keys", says)
    ran = ctl("key", "create", "x")
    assert (ran.code, ran.out) == (code, "")
    assert ran.err == f"llmgw: {says.body['error']['message']}\n"
