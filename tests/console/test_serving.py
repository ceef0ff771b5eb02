"""The console's files, its sign-in and its way to the router, asked over plain sockets."""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import asynccontextmanager
from functools import partial
from importlib import resources
from typing import Any

import attrs
import pytest
import trio

from llmgw.admin.api.console import load_assets
from llmgw.admin.auth import AdminAuth, hash_token
from llmgw.admin.limits import Limits
from llmgw.admin.relay import RouterAddress
from llmgw.admin.sign_in import IDLE_S, LINK_S, SESSION_S, SignIn
from llmgw.domain.errors import Denied, Unauthenticated
from llmgw.store.admin_tokens import AdminToken, Role
from llmgw.wiring.machine import RealMachine
from tests.admin.conftest import ADMIN, DEADLINE_S, VIEWER, Answered, read_answer, running_admin, until

JSON = {"content-type": "application/json"}


@attrs.frozen
class Entered:
    cookie: str
    csrf: str
    answer: Answered


async def enter(admin: Any, token: str = ADMIN, **headers: str) -> Entered:
    answer = await admin.call("POST", "/session", {"token": token}, None, **{**JSON, **headers})
    assert answer.status == 201, answer.body
    return Entered(answer.headers["set-cookie"].partition(";")[0], answer.json["csrf"], answer)


@pytest.fixture
async def admin(tmp_path: Any) -> Any:
    async with running_admin(tmp_path) as running:
        yield running


# --- files


async def test_the_page_comes_with_a_strict_policy_and_is_asked_for_again_cheaply(admin: Any) -> None:
    page = await admin.call("GET", "/console/", token=None)
    assert page.status == 200
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["referrer-policy"] == "no-referrer"
    again = await admin.call("GET", "/console/", token=None, if_none_match=page.headers["etag"])
    assert (again.status, again.body) == (304, b"")


async def test_every_file_is_served_with_its_type_and_nothing_else_is(admin: Any) -> None:
    assets = load_assets()
    assert {"index.html", "app.js", "style.css", "vendor/preact.mjs"} <= set(assets)
    for name, asset in assets.items():
        got = await admin.call("GET", f"/console/{name}", token=None)
        assert (got.status, got.headers["content-type"]) == (200, asset.content_type)
    for path in (
        "/console/vendor/README.md",
        "/console/../auth.py",
        "/console/%2e%2e/auth.py",
        "/console//app.js",
        "/console/views",
        "/console/nothing.js",
    ):
        assert (await admin.call("GET", path, token=None)).status == 404, path


async def test_all_ways_in_are_relative(admin: Any) -> None:
    root = await admin.call("GET", "/", token=None)
    assert root.status == 200
    assert b'"console/"' in root.body
    script = re.search(rb"<script>(.*?)</script>", root.body)
    assert script is not None
    assert "'unsafe-inline'" not in root.headers["content-security-policy"]
    assert "sha256-" in root.headers["content-security-policy"]
    plain = await admin.call("GET", "/console", token=None)
    assert (plain.status, plain.headers["location"]) == (308, "console/")


def test_no_file_names_an_address_of_its_own_or_makes_html_of_text() -> None:
    for name, asset in load_assets().items():
        if name.startswith("vendor/"):
            continue
        text = asset.text.replace("http://www.w3.org/2000/svg", "").replace("ssh -L 8081:127.0.0.1:8081", "")
        assert not re.search(
            r"https?://|[\"'(=]//|(?:src|href)=\"/|fetch\(\"|innerHTML|insertAdjacentHTML|document\.write|\beval\(", text
        ), name
        if name.endswith(".html"):
            assert not re.search(r"<script(?![^>]*\bsrc=)|\son[a-z]+=|<style|\sstyle=", text), name


def test_the_libraries_are_those_that_the_readme_names() -> None:
    vendor = resources.files("llmgw.admin").joinpath("console", "vendor")
    told = vendor.joinpath("README.md").read_text()
    named = dict(re.findall(r"\| `([a-z.]+\.mjs)` \|.*\| `([0-9a-f]{64})` \|", told))
    there = {entry.name for entry in vendor.iterdir() if entry.name.endswith((".mjs", ".js"))}
    assert set(named) == there
    for name, sha256 in named.items():
        assert hashlib.sha256(vendor.joinpath(name).read_bytes()).hexdigest() == sha256
        library = name.partition(".")[0]
        assert vendor.joinpath(f"{library}.LICENSE.txt").is_file()


# --- sign-in


async def test_a_token_opens_a_session_that_works_like_the_token(admin: Any) -> None:
    entered = await enter(admin)
    cookie = entered.answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert "Path" not in cookie
    assert ADMIN not in cookie
    assert ADMIN.encode() not in entered.answer.body
    got = await admin.call("GET", "/api/v1/status", token=None, cookie=entered.cookie)
    assert got.status == 200
    who = await admin.call("GET", "/session", token=None, cookie=f"other=1; {entered.cookie}")
    assert who.json == {"name": "admin", "role": "admin", "csrf": entered.csrf}


async def test_a_write_needs_the_sessions_own_token(admin: Any) -> None:
    entered = await enter(admin)
    body = {"facility": "room-1", "reason": "power"}
    for headers in ({}, {"x_csrf_token": "0" * 64}, {"x_csrf_token": (await enter(admin)).csrf}):
        refused = await admin.call("POST", "/api/v1/holds", body, None, cookie=entered.cookie, **headers)
        assert (refused.status, refused.code) == (403, "csrf")
    assert (await admin.call("POST", "/api/v1/holds", body, None, cookie=entered.cookie, x_csrf_token=entered.csrf)).status == 201
    assert (await admin.call("DELETE", "/session", None, None, cookie=entered.cookie)).status == 403
    assert (await admin.call("GET", "/session", token=None, cookie=entered.cookie)).status == 200


async def test_a_session_has_its_tokens_role_and_no_more(admin: Any) -> None:
    entered = await enter(admin, VIEWER)
    got = await admin.call(
        "POST", "/api/v1/holds", {"facility": "a", "reason": "b"}, None, cookie=entered.cookie, x_csrf_token=entered.csrf
    )
    assert (got.status, got.code) == (403, "role")


async def test_other_pages_may_neither_use_a_session_nor_open_one(admin: Any) -> None:
    entered = await enter(admin)
    for site in ("cross-site", "same-site"):
        assert (await admin.call("GET", "/api/v1/status", token=None, cookie=entered.cookie, sec_fetch_site=site)).status == 403
        assert (await admin.call("POST", "/session", {"token": ADMIN}, None, **JSON, sec_fetch_site=site)).status == 403
    form = await admin.call("POST", "/session", b'{"token": "x"}', None, content_type="text/plain")
    assert form.status == 400


async def test_the_cookie_is_secure_wherever_the_page_is_not_plain_http_on_loopback(admin: Any) -> None:
    async def flags(**headers: str) -> bool:
        return "Secure" in (await enter(admin, **headers)).answer.headers["set-cookie"]

    assert not await flags(origin="http://127.0.0.1:8081")
    assert not await flags(origin="http://localhost:8081")
    assert not await flags(origin="http://[::1]:8081")
    assert await flags(origin="https://127.0.0.1:8081")
    assert await flags(origin="https://llmgw.example")
    assert await flags(origin="http://gpu-1.example:8081")


async def test_signing_out_ends_the_session_and_a_second_time_is_no_error(admin: Any) -> None:
    entered = await enter(admin)
    for _ in range(2):
        left = await admin.call("DELETE", "/session", None, None, cookie=entered.cookie, x_csrf_token=entered.csrf)
        assert left.status == 200
        assert "Max-Age=0" in left.headers["set-cookie"]
    got = await admin.call("GET", "/api/v1/status", token=None, cookie=entered.cookie)
    assert (got.status, got.code) == (401, "session_ended")


async def test_a_revoked_token_ends_its_sessions(admin: Any) -> None:
    entered = await enter(admin, VIEWER)
    admin.auth.replace([AdminToken("admin", hash_token(ADMIN), Role.ADMIN)])
    assert (await admin.call("GET", "/api/v1/status", token=None, cookie=entered.cookie)).code == "session_ended"


async def test_a_wrong_token_beside_a_good_cookie_is_wrong(admin: Any) -> None:
    entered = await enter(admin)
    assert (await admin.call("GET", "/api/v1/status", token="x" * 32, cookie=entered.cookie)).code == "token_invalid"


@pytest.mark.parametrize(
    "body", [{}, {"token": ""}, {"token": 1}, {"link": None}, {"token": "a", "link": "b"}, {"other": "a"}, [], "x", {"token": "a" * 5000}]
)
async def test_odd_sign_ins_are_one_clear_error(admin: Any, body: Any) -> None:
    answer = await admin.call("POST", "/session", body, None, **JSON)
    assert answer.status == 400
    assert answer.code


async def test_guessing_tokens_and_links_is_slowed_down(tmp_path: Any) -> None:
    async with running_admin(tmp_path, Limits(failures_max=3)) as admin:
        for how in ("token", "link", "token"):
            assert (await admin.call("POST", "/session", {how: "f" * 64}, None, **JSON)).status == 401
        slowed = await admin.call("POST", "/session", {"link": "f" * 64}, None, **JSON)
        assert (slowed.status, slowed.code) == (429, "too_many_failures")
        await enter(admin)  # the right one always passes


async def test_a_sign_in_is_never_kept_for_an_idempotency_key(admin: Any) -> None:
    first = await enter(admin, idempotency_key="k1")
    second = await enter(admin, idempotency_key="k1")
    assert first.cookie != second.cookie
    assert "idempotency-replayed" not in second.answer.headers


@attrs.define
class Clock:
    at_s: float = 1000.0

    def now_s(self) -> float:
        return self.at_s


def make_sign_in() -> tuple[SignIn, Clock]:
    clock = Clock()
    machine = RealMachine()
    machine.now_s = clock.now_s  # type: ignore[method-assign]
    return SignIn(machine, AdminAuth([AdminToken("a", hash_token(ADMIN), Role.ADMIN)]), "c1"), clock


def cookie_of(sign_in: SignIn, cookie: str) -> list[tuple[bytes, bytes]]:
    return [(b"cookie", f"{sign_in.cookie_name}={cookie}".encode())]


async def test_a_link_signs_in_once_and_not_after_ten_minutes() -> None:
    sign_in, clock = make_sign_in()
    code = sign_in.new_link(ADMIN)
    assert sign_in.by_link(code).principal.name == "a"
    with pytest.raises(Unauthenticated, match="used already"):
        sign_in.by_link(code)
    late = sign_in.new_link(ADMIN)
    clock.at_s += LINK_S
    with pytest.raises(Unauthenticated, match="too old"):
        sign_in.by_link(late)
    with pytest.raises(Unauthenticated):
        sign_in.by_link(ADMIN)


async def test_a_session_ends_when_nobody_asks_for_long_and_once_a_week_at_the_latest() -> None:
    sign_in, clock = make_sign_in()
    opened = sign_in.by_token(ADMIN)
    headers = cookie_of(sign_in, opened.cookie)
    began_s = clock.at_s
    while clock.at_s + IDLE_S < began_s + SESSION_S:
        clock.at_s += IDLE_S
        sign_in.check(headers, "GET")
    clock.at_s = began_s + SESSION_S + 1
    with pytest.raises(Unauthenticated):
        sign_in.check(headers, "GET")
    headers = cookie_of(sign_in, sign_in.by_token(ADMIN).cookie)
    clock.at_s += IDLE_S + 1
    with pytest.raises(Unauthenticated):
        sign_in.check(headers, "GET")


async def test_an_old_cookie_from_a_path_above_does_not_hide_the_good_one() -> None:
    sign_in, _ = make_sign_in()
    opened = sign_in.by_token(ADMIN)
    both = [(b"Cookie", f"{sign_in.cookie_name}=old; {sign_in.cookie_name}={opened.cookie}".encode())]
    assert sign_in.check(both, "GET").csrf == opened.csrf
    with pytest.raises(Denied):
        sign_in.check(both, "POST")


# --- the way to the router


@attrs.define(eq=False)
class FakeRouter:
    """Answers one request with what the test says, and sees what came."""

    port: int
    asked: bytes = b""
    gone: trio.Event = attrs.Factory(trio.Event)
    go_on: trio.Event = attrs.Factory(trio.Event)


@asynccontextmanager
async def routed(tmp_path: Any, pieces: list[bytes], *, cut: bool = False) -> Any:
    """A control plane whose router sends these pieces, each further one after `go_on`, and then ends or cuts the connection."""

    async def serve(stream: trio.SocketStream) -> None:
        async with stream:
            while b"\r\n\r\n" not in fake.asked:
                fake.asked += await stream.receive_some(65536)
            head, _, body = fake.asked.partition(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            while length is not None and len(body) < int(length[1]):
                more = await stream.receive_some(65536)
                fake.asked += more
                body += more
            for index, piece in enumerate(pieces):
                if index:
                    await fake.go_on.wait()
                await stream.send_all(piece)
            if not cut:
                assert await stream.receive_some(1) == b""
        fake.gone.set()

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        fake = FakeRouter(listener.socket.getsockname()[1])
        async with running_admin(tmp_path, router=lambda: RouterAddress(f"0.0.0.0:{fake.port}")) as admin:
            yield admin, fake
        nursery.cancel_scope.cancel()


EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\nset-cookie: a=b\r\n\r\n7\r\ndata: 1\r\n"


def asking(entered: Entered, path: str = "/console/v1/chat/completions", method: str = "POST", csrf: bool = True) -> bytes:
    body = b'{"model": "m"}' if method == "POST" else b""
    lines = [
        f"{method} {path} HTTP/1.1",
        "Host: a",
        f"Cookie: {entered.cookie}",
        f"Content-Length: {len(body)}",
        "Authorization: Bearer sk-1",
    ]
    if csrf:
        lines.append(f"X-CSRF-Token: {entered.csrf}")
    return "\r\n".join([*lines, "", ""]).encode() + body


async def test_a_streamed_answer_passes_piece_by_piece_and_secrets_of_the_session_do_not(tmp_path: Any) -> None:
    async with routed(tmp_path, [EVENTS, b"7\r\ndata: 2\r\n0\r\n\r\n"]) as (admin, fake):
        entered = await enter(admin)
        stream = await admin.connect()
        async with stream:
            with trio.fail_after(DEADLINE_S):
                await stream.send_all(asking(entered))
                data = b""
                while b"data: 1" not in data:
                    data += await stream.receive_some(65536)
                assert b"data: 2" not in data
                fake.go_on.set()
                while b"data: 2" not in data:
                    data += await stream.receive_some(65536)
        head = data.partition(b"\r\n\r\n")[0].lower()
        assert b"no-store" in head
        assert b"set-cookie" not in head
        assert fake.asked.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
        assert b"Bearer sk-1" in fake.asked
        assert fake.asked.endswith(b'{"model": "m"}')
        for secret in (entered.cookie.partition("=")[2], entered.csrf):
            assert secret.encode() not in fake.asked


async def test_a_browser_that_hangs_up_ends_the_request_at_the_router(tmp_path: Any) -> None:
    async with routed(tmp_path, [EVENTS]) as (admin, fake):
        stream = await admin.connect()
        async with stream:
            with trio.fail_after(DEADLINE_S):
                await stream.send_all(asking(await enter(admin)))
                data = b""
                while b"data: 1" not in data:
                    data += await stream.receive_some(65536)
        with trio.fail_after(DEADLINE_S):
            await fake.gone.wait()
        await until(lambda: admin.app.open_connections == 0, "the connection is gone")


async def test_a_router_that_dies_in_mid_stream_is_an_error_event_and_before_it_a_502(tmp_path: Any) -> None:
    async with routed(tmp_path, [EVENTS], cut=True) as (admin, _):
        answer = await admin.raw(asking(await enter(admin)))
        assert answer.status == 200
        error = json.loads(answer.body.rpartition(b"data: ")[2])
        assert error["error"]["code"] == "router_lost"
    async with routed(tmp_path, [b""], cut=True) as (admin, _):
        answer = await admin.raw(asking(await enter(admin)))
        assert (answer.status, answer.code) == (502, "router_lost")


async def test_a_router_that_is_not_there_is_told(tmp_path: Any) -> None:
    async with running_admin(tmp_path, router=lambda: RouterAddress("127.0.0.1:1")) as admin:
        answer = await admin.raw(asking(await enter(admin)))
        assert (answer.status, answer.code) == (503, "no_router")
    async with running_admin(tmp_path) as admin:
        answer = await admin.raw(asking(await enter(admin)))
        assert (answer.status, answer.code) == (404, "no_router")


async def test_nobody_reaches_the_router_without_a_session_or_beyond_its_public_paths(tmp_path: Any) -> None:
    async with routed(tmp_path, [EVENTS]) as (admin, fake):
        entered = await enter(admin)
        stranger = Entered("llmgw=x", "", entered.answer)
        assert (await admin.raw(asking(stranger))).status == 401
        assert (await admin.raw(asking(entered, csrf=False))).status == 403
        for path in ("/console/v1/../metrics", "/console/v1/%2e%2e/metrics", "/console/v1//x"):
            answer = await admin.raw(asking(entered, path))
            assert answer.status == 404, path
        assert (await admin.raw(asking(entered, method="DELETE"))).status == 404
        large = b"POST /console/v1/x HTTP/1.1\r\nHost: a\r\nCookie: %b\r\nX-CSRF-Token: %b\r\nContent-Length: 9000000\r\n\r\n"
        stream = await admin.connect()
        async with stream:
            with trio.fail_after(DEADLINE_S):
                await stream.send_all(large % (entered.cookie.encode(), entered.csrf.encode()) + b"x" * 4_500_000)
                assert (await read_answer(stream)).status == 413
        assert b"metrics" not in fake.asked


async def test_the_history_of_one_object_can_be_asked_for(admin: Any) -> None:
    for name in ("a", "b", "a"):
        admin.controller.events.record("replica.ready", f"replica/{name}", f"of {name}")
    await until(lambda: not admin.controller.events._waiting)
    got = (await admin.call("GET", "/api/v1/events?object=replica/a")).json
    assert [event["text"] for event in got["events"]] == ["of a", "of a"]
