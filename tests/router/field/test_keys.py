"""Who may call, and what of a key is ever seen again (the AUT cases and their neighbours)."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from tests.router.fakes import (
    CHAT,
    CHAT_S,
    DONE,
    END,
    FIN,
    OK,
    SH,
    Client,
    E,
    RouterProcess,
    Stage,
    answer,
    event,
    get,
    post,
    router_command,
    staged,
    until,
)

SECRET = "sk-the-key-that-nobody-may-see"
PROMPT = "the-prompt-that-nobody-may-see"
ANSWER = "the-answer-that-nobody-may-see"
GOOD = ["Authorization: BEARER K", "Authorization: Bearer K\t", "X-API-KEY: K", "x-api-key: K\r\nx-api-key: K", "AUTHORIZATION:Bearer K"]
BAD = [
    "Authorization: K", "Authorization: Bearer\tK", "Authorization: BearerK", "Authorization: Bearer K, Bearer K",
    "Authorization: Bearer K K", 'Authorization: Bearer "K"', "Authorization: Bearer k", "Authorization: Token K", "Authorization:",
    "Authorization:\r\nx-api-key: K", "Authorization: Basic Szo=\r\nx-api-key: K", "x-api-key: K\r\nx-api-key: L",
    "x-api-key: Bearer K", "x-api-key: k", "api-key: K", "Proxy-Authorization: Bearer K", "Cookie: authorization=Bearer K; key=k\xe9y",
    "Authorization: Bearer \x80\xff", "x-api-key: \x80", f"Authorization: Bearer {'K' * 10_000}",
]  # fmt: skip


def _with(header: str, data: bytes) -> bytes:
    return data.replace(b"Host: g\r\n", b"Host: g\r\n" + header.encode("latin-1") + b"\r\n")


@pytest.mark.case("B171", "T35")
@pytest.mark.parametrize("header", GOOD)
def test_a_key_is_a_key_in_any_writing_of_its_header(stage: Stage, header: str) -> None:
    assert stage.router.ask(_with(header, post(CHAT, key=""))).status == 200
    assert stage.router.ask(_with(header, get("/v1/models", key=""))).status == 200


@pytest.mark.case("B165", "B171", "T35")
@pytest.mark.parametrize("header", BAD)
def test_what_only_looks_like_a_key_is_401_on_every_route(stage: Stage, header: str) -> None:
    for data in (post(CHAT, key=""), post(CHAT, key="", path="/v1/messages"), get("/v1/models", key=""), get("/v1/models/m1", key="")):
        got = stage.router.ask(_with(header, data))
        assert got.status == 401
        assert got.error["code"] == "invalid_api_key"
        assert got.get("www-authenticate") == "Bearer"
    assert stage.router.ask(post(CHAT, key="", path="/v1/chat/completions?api_key=K&key=K")).status == 401
    assert stage.u1.requests == []


@pytest.mark.case("B163", "T34")
@pytest.mark.parametrize(
    "origin", ["null", "HTTP://APP.TEST", "http://app.test.evil", "http://app.test:80", "https://app.test", "http://app.test/", ""]
)
def test_an_origin_is_allowed_exactly_as_it_stands_in_the_file(stage: Stage, origin: str) -> None:
    preflight = f"OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: g\r\nOrigin: {origin}\r\nAccess-Control-Request-Method: POST\r\n\r\n"
    for data in (preflight.encode(), post(CHAT, f"Origin: {origin}\r\n"), post(CHAT, f"Origin: {origin}\r\n", key="wrong")):
        got = stage.router.ask(data)
        assert not [name for name, _ in got.headers if name.startswith("access-control")]
        assert got.get("vary") == "Origin"


@pytest.mark.case("B164", "T34")
def test_every_error_can_be_read_by_an_allowed_page(stage: Stage) -> None:
    stage.u1.once = [[answer(400, "{}", "Vary: Accept")], [["s", "SSH-2.0\r\n"], ["close"]]]
    origin = "Origin: http://app.test\r\n"
    for data, status in (
        (post(CHAT, origin), 400),
        (post(CHAT, origin), 502),
        (post(b"{", origin), 400),
        (post(CHAT, origin, key=""), 401),
        (post(CHAT, origin, key="NARROW"), 403),
        (get("/v1/nope", origin), 404),
        (get("/v1/chat/completions", origin), 405),
        (post(b"", origin, length="Content-Length: 99999999999\r\n"), 413),
        (post(CHAT.replace(b"m1", b"dead"), origin), 503),
    ):
        got = stage.router.ask(data)
        assert got.status == status
        assert [value for name, value in got.headers if name == "access-control-allow-origin"] == ["http://app.test"]
        assert [value for name, value in got.headers if name == "vary"] == ["Origin"]
        assert got.get("access-control-allow-credentials") is None


@pytest.mark.case("B163", "B164")
def test_any_origin_is_told_as_any_and_never_with_credentials(tmp_path: Path) -> None:
    with staged(tmp_path, change={'cors_origins = ["http://app.test"]': 'cors_origins = ["*"]'}) as stage:
        for data in (post(CHAT, "Origin: http://x.test\r\n"), post(CHAT, "Origin: null\r\n", key="wrong")):
            got = stage.router.ask(data)
            assert got.get("access-control-allow-origin") == "*"
            assert got.get("access-control-allow-credentials") is None


@pytest.mark.case("B172")
def test_no_key_no_prompt_and_no_answer_is_seen_in_logs_or_command_lines(tmp_path: Path) -> None:
    digest = hashlib.sha256(SECRET.encode()).hexdigest()
    change = {
        '[[auth.key]]\nname = "user"\nkey = "K"': f'[[auth.key]]\nname = "user"\nsha256 = "{digest}"',
        "[router]\n": '[log]\nlevel = "debug"\n[router]\n',
        'id = "u1"\n': 'id = "u1"\napi_key_env = "U1_KEY"\n',
    }
    with staged(tmp_path) as stage:
        text = stage.text
        for old, new in change.items():
            assert old in text
            text = text.replace(old, new)
        stage.router.close()
        engine_key = "the-engines-key-that-nobody-may-see"
        stage.router = RouterProcess(tmp_path, text, {"U1_KEY": engine_key})
        bodies = [body.replace(b"hi", PROMPT.encode()) for body in (CHAT, CHAT_S, CHAT[:-3])]
        scripts = [
            [answer(200, f'{{"x":"{ANSWER}"}}')],
            [SH, ["c", event(ANSWER)], FIN, DONE, END],
            [SH, ["c", event(ANSWER)], ["close"]],
            [["s", f"{ANSWER}\r\n\r\n"], ["close"]],
        ]
        for script in scripts:
            stage.u1.script = script
            for body in bodies:
                for key in (SECRET, SECRET + "x"):
                    stage.router.ask(post(body, "X-Request-Id: watched\r\n", key=key))
        assert stage.u1.requests
        assert all(engine_key in seen["head"] and SECRET not in seen["head"] for seen in stage.u1.requests)
        until(lambda: len(stage.router.log_lines("watched")) == 24, "the log is written")
        seen = stage.router.out.read_text() + stage.router.err.read_text() + stage.router.ask(get("/metrics")).body.decode()
        seen += Path(f"/proc/{stage.router.process.pid}/cmdline").read_text()
        for secret in (SECRET, PROMPT, ANSWER, engine_key):
            assert secret not in seen


@pytest.mark.case("B174")
def test_metrics_are_open_on_loopback_and_ask_for_a_token_elsewhere(tmp_path: Path) -> None:
    with staged(tmp_path) as stage:
        assert stage.router.ask(get("/metrics", key="")).status == 200
        stage.router.close()
        everywhere = stage.text.replace('listen = "127.0.0.1:0"', 'listen = "0.0.0.0:0"') + '\n[tls]\nplain = "anywhere"\n'
        bare = RouterProcess(tmp_path, everywhere)
        bare.address = ("127.0.0.1", bare.address[1])
        try:
            for key in ("", "K"):
                refused = bare.ask(get("/metrics", key=key))
                assert refused.status == 403
                assert b"m1" not in refused.body
        finally:
            bare.close()
        stage.router = RouterProcess(tmp_path, everywhere + '[metrics]\ntoken = "env:METRICS_TOKEN"\n', {"METRICS_TOKEN": "scrape"})
        stage.router.address = ("127.0.0.1", stage.router.address[1])
        for shown, status in ((b"", 401), (b"Bearer K", 401), (b"Bearer scrape", 200), (b"Bearer scrapE", 401), (b"Bearer \xe9", 401)):
            data = get("/metrics", key="").replace(b"Host: g\r\n", b"Host: g\r\nAuthorization: " + shown + b"\r\n")
            assert stage.router.ask(data).status == status


EXPIRIES = [
    ("2030-01-01T00:00:00Z", True), ("2030-01-01T00:00:00+02:00", True), ("2030-01-01T00:00:00.5-11:30", True),
    ("2030-01-01T00:00:00", False), ("2030-01-01", False), ("x", False), ("2030-13-01T00:00:00Z", False), ("9999999999", False),
]  # fmt: skip


@pytest.mark.case("B175", "T35")
@pytest.mark.parametrize(("told", "good"), EXPIRIES)
def test_an_expiry_is_taken_or_refused_when_it_is_written_and_never_breaks_a_request(tmp_path: Path, told: str, good: bool) -> None:
    text = f'[router]\nlisten = "127.0.0.1:0"\n[[auth.key]]\nname = "a"\nkey = "K"\nexpires = "{told}"\n'
    if good:
        router = RouterProcess(tmp_path, text)
        try:
            assert router.ask(get("/v1/models")).status == 200
            router.config.write_text(text.replace(told, "2020-01-01T00:00:00Z"))
            router.signal(signal.SIGHUP)
            until(lambda: router.ask(get("/v1/models")).status == 401, "it has expired")
        finally:
            router.close()
    else:
        config = tmp_path / "router.toml"
        config.write_text(text)
        done = subprocess.run(router_command(config), capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 3
        assert "auth.key[0].expires" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.case("B166", "T35")
def test_a_key_that_is_taken_away_ends_at_once_and_its_stream_may_finish(tmp_path: Path) -> None:
    with staged(tmp_path) as stage:
        go = threading.Event()
        stage.u1.script = [SH, E("a"), ["hold", go], FIN, DONE, END]
        with stage.router.client() as streaming, stage.router.client() as kept:
            streaming.send(post(CHAT_S))
            streaming.until(b"\n\n")
            kept.send(get("/v1/models"))
            assert kept.answer().status == 200
            stage.router.config.write_text(stage.text.replace('key = "K"', 'key = "OTHER"'))
            stage.router.signal(signal.SIGHUP)
            until(lambda: "event=reloaded" in stage.router.err.read_text(), "the file is taken")
            for data in (get("/v1/models"), get("/v1/models/m1")):
                kept.send(data)
                assert kept.answer().status == 401
            kept.send(post(CHAT))
            assert kept.answer().status == 401
            go.set()
            assert b"[DONE]" in streaming.until(b"0\r\n\r\n")
        stage.u1.script = [OK]
        assert stage.router.ask(post(CHAT, key="OTHER")).status == 200


@pytest.mark.case("B170")
def test_no_header_of_a_client_reaches_an_engine_but_those_that_are_known(stage: Stage) -> None:
    kept = {"accept": "a/b", "user-agent": "u", "traceparent": "00-1-2-01", "tracestate": "t", "openai-beta": "o", "anthropic-version": "1"}
    lost = [
        "Cookie", "X-Api-Key", "X-Secret", "Proxy-Authorization", "X-Forwarded-For", "Forwarded", "Via", "Te", "Trailer", "Keep-Alive",
        "Api-Key", "X-Amz-Security-Token", "Openai-Organization", "Openai-Project", "Origin", "Referer", "Accept-Language", "Range",
        "X-Foo",
    ]  # fmt: skip
    extra = "".join(f"{name}: {value}\r\n" for name, value in kept.items())
    extra += "".join(f"{name}: {'K' if name == 'X-Api-Key' else 'lost-value'}\r\n" for name in lost) + "Connection: x-foo, tracestate\r\n"
    assert stage.router.ask(post(CHAT, extra)).status == 200
    head = stage.u1.requests[0]["head"]
    names = {line.partition(":")[0] for line in head.split("\r\n")[1:]}
    del kept["tracestate"]  # the client's hop named it as its own
    assert names == {"host", "accept-encoding", "content-type", "content-length", "x-request-id", *kept}
    assert "lost-value" not in head


def test_a_second_connection_never_inherits_the_first_ones_right(stage: Stage) -> None:
    with Client(stage.router.address) as first:
        first.send(post(CHAT))
        assert first.answer().status == 200
        first.send(post(CHAT, key=""))
        assert first.answer().status == 401
        first.send(post(CHAT, key="NARROW"))
        assert first.answer().status in (401, 403)
