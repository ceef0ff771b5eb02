"""Who may call: tokens, roles, and what strangers get to read."""

from __future__ import annotations

import pytest

from llmgw.admin.auth import AdminAuth, FailureLimit, Principal, bearer, hash_token, is_token
from llmgw.admin.limits import Limits
from llmgw.domain.errors import Denied, Overloaded, Unauthenticated
from llmgw.store import admin_tokens
from llmgw.store.admin_tokens import AdminToken, Role
from llmgw.store.connection import MEMORY, FileStore

from .conftest import ADMIN, AGENT, OPERATOR, VIEWER, inline, running_admin


@pytest.mark.parametrize("header", ["Bearer {}", "bearer {}", "BEARER  {}", "Bearer {}  ", "  Bearer   {}"])
async def test_a_right_token_is_taken_however_it_is_spaced(admin, header):
    answer = await admin.call("GET", "/api/v1/status", token=None, Authorization=header.format(ADMIN))
    assert answer.status == 200


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer ",
        "Bearer x",
        f"Basic {ADMIN}",
        ADMIN,
        f"Bearer {ADMIN}x",
        "Bearer k\xe9y",
        "Bearer \xff\xfe",
        f"Bearer {AGENT}",
    ],
)
async def test_a_wrong_token_is_401_in_our_shape_and_is_not_repeated(admin, header):
    answer = await admin.call("GET", "/api/v1/status", token=None, Authorization=header)
    assert (answer.status, answer.json["error"]["type"]) == (401, "denied")
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert ADMIN not in answer.body.decode()


async def test_no_token_and_two_tokens_are_401(admin):
    assert (await admin.call("GET", "/api/v1/status", token=None)).code == "token_missing"
    two = "GET /api/v1/status HTTP/1.1\r\nHost: a\r\nConnection: close\r\n" + f"Authorization: Bearer {ADMIN}\r\n" * 2 + "\r\n"
    assert (await admin.raw(two.encode())).status == 401


async def test_a_token_as_long_as_the_head_allows_is_401_and_a_longer_one_431(admin):
    assert (await admin.call("GET", "/api/v1/status", token="x" * 10_000)).status == 401
    assert (await admin.call("GET", "/api/v1/status", token="x" * 100_000)).status == 431


async def test_a_path_that_is_not_there_tells_a_stranger_nothing(admin):
    assert (await admin.call("GET", "/api/v1/secret", token=None)).status == 401
    assert (await admin.call("GET", "/api/v1/secret")).status == 404
    assert (await admin.call("GET", "/elsewhere", token=None)).status == 404


@pytest.mark.parametrize(("token", "status"), [(VIEWER, 403), (OPERATOR, 404), (ADMIN, 404)])
async def test_a_viewer_looks_and_an_operator_orders(admin, token, status):
    assert (await admin.call("GET", "/api/v1/models", token=token)).status == 200
    answer = await admin.call("POST", "/api/v1/models/none/restart", {}, token)
    assert answer.status == status
    if status == 403:
        assert answer.code == "role"


async def test_what_monitors_ask_needs_no_token_on_loopback(admin):
    for path in ("/health", "/metrics"):
        assert (await admin.call("GET", path, token=None)).status == 200


async def test_guessing_from_one_address_is_slowed_down_and_a_right_token_still_passes(tmp_path):
    async with running_admin(tmp_path, Limits(failures_max=5)) as admin:
        statuses = [(await admin.call("GET", "/api/v1/status", token=f"guess-{number}")).status for number in range(8)]
        assert statuses == [401] * 5 + [429] * 3
        slowed = await admin.call("GET", "/api/v1/status", token="guess")
        assert 1 <= int(slowed.headers["retry-after"]) <= 61
        assert (await admin.call("GET", "/api/v1/status")).status == 200


def test_the_slowing_ends_after_a_minute_and_remembers_a_bounded_number_of_addresses():
    now_s = 0.0
    limit = FailureLimit(lambda: now_s, Limits(failures_max=2))
    limit.failed("a")
    limit.failed("a")
    with pytest.raises(Overloaded) as told:
        limit.failed("a")
    assert told.value.retry_after_s == 60.0
    now_s = 60.5
    limit.failed("a")
    for number in range(10_050):
        limit.failed(f"address-{number}")
    assert len(limit._failures) <= 10_000


async def test_a_revoked_token_is_refused_from_the_next_reload_on():
    store = await FileStore.open(MEMORY, inline)
    auth = AdminAuth()
    headers = [(b"authorization", b"Bearer secret")]
    with pytest.raises(Unauthenticated):
        auth.check(headers)
    await admin_tokens.add(store, 1, AdminToken("ann", hash_token("secret"), Role.OPERATOR))
    await auth.reload(store)
    assert auth.check(headers) == Principal("ann", Role.OPERATOR)
    await admin_tokens.revoke(store, 1, "ann", 1.0)
    await auth.reload(store)
    with pytest.raises(Unauthenticated):
        auth.check(headers)
    store.close()


def test_roles_are_ranked():
    with pytest.raises(Denied):
        Principal("v", Role.VIEWER).require(Role.OPERATOR)
    Principal("o", Role.OPERATOR).require(Role.VIEWER)
    Principal("a", Role.ADMIN).require(Role.OPERATOR)
    with pytest.raises(Denied):
        Principal("o", Role.OPERATOR).require(Role.ADMIN)


def test_an_empty_expected_token_is_carried_by_nobody():
    assert not is_token([(b"authorization", b"Bearer ")], "")
    assert not is_token([(b"authorization", b"Bearer x")], "")
    assert is_token([(b"Authorization", b"Bearer x")], "x")
    assert bearer([(b"authorization", b"Bearer \xff")]) == b"\xff"
