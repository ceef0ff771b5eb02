"""Keys and browsers (cases T34, T35)."""

from __future__ import annotations

import pytest

from tests.router.fakes import CHAT, Stage, answer, get, post

PREFLIGHT = (
    "OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: g\r\nOrigin: {}\r\nAccess-Control-Request-Method: POST\r\n"
    "Access-Control-Request-Headers: authorization,content-type,x-stainless-os\r\n\r\n"
)
GOOD = ["Authorization: Bearer K", "Authorization: bearer K", "Authorization: Bearer  K", "Authorization: Bearer K ", "x-api-key: K"]
GOOD += ["Authorization: Bearer K\r\nX-Api-Key: K"]
BAD = ["Authorization: Bearer k\xe9y", "Authorization: Bearer", "Authorization: Basic Szo=", "X: y", "x-api-key: k\xe9y", "x-api-key: "]
BAD += ["Authorization: Bearer K\r\nx-api-key: L", "Authorization: Bearer K\r\nAuthorization: Bearer L", "Cookie: K"]


def _with(header: str, data: bytes) -> bytes:
    return data.replace(b"Host: g\r\n", b"Host: g\r\n" + header.encode("latin-1") + b"\r\n")


@pytest.mark.case("T35", "B171")
@pytest.mark.parametrize("header", GOOD)
def test_a_key_is_taken_in_every_usual_form(stage: Stage, header: str) -> None:
    assert stage.router.ask(_with(header, post(CHAT, key=""))).status == 200


@pytest.mark.case("T35", "B165")
@pytest.mark.parametrize("header", BAD)
def test_what_is_no_key_is_401_in_one_shape(stage: Stage, header: str) -> None:
    for data in (post(CHAT, key=""), get("/v1/models", key="")):
        got = stage.router.ask(_with(header, data))
        assert got.status == 401
        assert got.error["code"] == "invalid_api_key"
        assert got.get("www-authenticate") == "Bearer"
        assert "k\xe9y" not in got.body.decode()
    assert stage.u1.requests == []


def test_health_and_readiness_ask_for_no_key(stage: Stage) -> None:
    assert stage.router.ask(get("/health", key="")).json() == {"status": "ok"}
    ready = stage.router.ask(get("/ready", key=""))
    assert (ready.status, ready.json()["status"]) == (200, "ready")


@pytest.mark.case("T34", "B163")
def test_a_browsers_preflight_needs_no_key(stage: Stage) -> None:
    allowed = stage.router.ask(PREFLIGHT.format("http://app.test").encode())
    assert allowed.status == 204
    assert allowed.get("access-control-allow-origin") == "http://app.test"
    assert "POST" in (allowed.get("access-control-allow-methods") or "")
    assert allowed.get("access-control-allow-headers") == "authorization,content-type,x-stainless-os"
    assert allowed.get("vary") == "Origin"
    other = stage.router.ask(PREFLIGHT.format("http://evil.test").encode())
    assert all(not name.startswith("access-control") for name, _ in other.headers)


@pytest.mark.case("T34", "B164")
def test_errors_can_be_read_by_a_browser_too(stage: Stage) -> None:
    origin = "Origin: http://app.test\r\n"
    good = stage.router.ask(post(CHAT, origin))
    bad = stage.router.ask(post(CHAT, origin, key="nope"))
    stage.u1.once = [[answer(500, "{}", "Access-Control-Allow-Origin: *", "Set-Cookie: a=b")]]
    failed = stage.router.ask(post(CHAT, origin))
    assert [got.status for got in (good, bad, failed)] == [200, 401, 500]
    for got in (good, bad, failed):
        assert [value for name, value in got.headers if name == "access-control-allow-origin"] == ["http://app.test"]
        assert got.get("access-control-allow-credentials") is None
        assert got.get("set-cookie") is None
    assert stage.router.ask(post(CHAT, "Origin: http://evil.test\r\n")).get("access-control-allow-origin") is None
