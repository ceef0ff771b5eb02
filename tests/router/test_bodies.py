"""Bodies, names and listings through a real router (cases T22, T23, T24, T27, T29, T30)."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from tests.router.fakes import CHAT, CHAT_S, OK, OK_BODY, SH, Stage, answer, event, get, post, staged

M = b'"messages":[{"role":"user","content":"hi"}]'
# body -> status, param (None: not looked at)
REFUSED: dict[str, tuple[bytes, int, str | None]] = {
    "empty": (b"", 400, None),
    "x": (b"x", 400, None),
    "open": (b"{", 400, None),
    "trailing comma": (b'{"model":"m1",}', 400, None),
    "list": (b"[]", 400, None),
    "string": (b'"x"', 400, None),
    "null": (b"null", 400, None),
    "number": (b"1", 400, None),
    "no members": (b"{}", 400, "model"),
    "no model": (b'{"messages":[]}', 400, "model"),
    "model null": (b'{"model":null,' + M + b"}", 400, "model"),
    "model number": (b'{"model":1,' + M + b"}", 400, "model"),
    "model huge number": (b'{"model":1e999,' + M + b"}", 400, "model"),
    "model empty": (b'{"model":"",' + M + b"}", 400, "model"),
    "model list": (b'{"model":["m1"],' + M + b"}", 400, "model"),
    "model object": (b'{"model":{"a":1},' + M + b"}", 400, "model"),
    "model with nul": (b'{"model":"m1\\u0000",' + M + b"}", 404, None),
    "long model": (b'{"model":"' + b"n" * 10_240 + b'",' + M + b"}", 404, None),
    "no messages": (b'{"model":"m1"}', 400, "messages"),
    "messages string": (b'{"model":"m1","messages":"x"}', 400, "messages"),
    "messages number": (b'{"model":"m1","messages":1}', 400, "messages"),
    "messages object": (b'{"model":"m1","messages":{}}', 400, "messages"),
    "messages null": (b'{"model":"m1","messages":null}', 400, "messages"),
    "stream string": (b'{"model":"m1",' + M + b',"stream":"true"}', 400, "stream"),
    "stream number": (b'{"model":"m1",' + M + b',"stream":1}', 400, "stream"),
    "utf-16": (b"\xff\xfe" + CHAT.decode().encode("utf-16-le"), 400, None),
    "bad utf-8": (CHAT.replace(b'"hi"', b'"h\xffi"'), 400, None),
    "nan": (b'{"model":"m1",' + M + b',"temperature":NaN}', 400, None),
    "infinity": (b'{"model":"m1",' + M + b',"temperature":Infinity}', 400, None),
    "minus infinity": (b'{"model":"m1",' + M + b',"temperature":-Infinity}', 400, None),
    "nan beside half a pair": (b'{"model":"m1",' + M + b',"t":NaN,"x":"\\ud800"}', 400, None),
    "two models": (b'{"model":"m1","model":"secret",' + M + b"}", 400, "model"),
    "two models, one escaped": (b'{"model":"m1","mod\\u0065l":"secret",' + M + b"}", 400, "model"),
    "two streams": (b'{"model":"m1","stream":true,"stream":false,' + M + b"}", 400, "stream"),
    "deep list": (b"[" * 100_000, 400, None),
    "deep object": (b'{"a":' * 100_000, 400, None),
    "deep inside": (b'{"model":"m1","messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, None),
    "text after": (CHAT + b" {}", 400, None),
}


@pytest.mark.case("T22", "B053", "B054", "B055", "B058", "B060", "B062")
@pytest.mark.parametrize("name", REFUSED)
def test_a_body_that_is_not_right_is_refused_with_the_reason(stage: Stage, name: str) -> None:
    body, status, param = REFUSED[name]
    got = stage.router.ask(post(body))
    assert got.status == status
    assert got.get("content-type") == "application/json"
    assert param is None or got.error["param"] == param
    assert len(got.error["message"]) < 600
    assert stage.u1.requests == []
    assert stage.router.ask(get("/health")).status == 200


PASSED: dict[str, bytes] = {
    "messages empty": b'{"model":"m1","messages":[]}',
    "messages odd": b'{"model":"m1","messages":[null]}',
    "stream null": b'{"model":"m1",' + M + b',"stream":null}',
    "half a surrogate pair": CHAT.replace(b'"hi"', b'"\\ud800"'),
    "a seed of 5000 digits": b'{"model":"m1",' + M + b',"seed":' + b"9" * 5000 + b"}",
    "one model by an escaped name": b'{"mod\\u0065l":"m1",' + M + b"}",
    "a model in a message": b'{"messages":[{"role":"user","content":"\\"model\\":\\"x\\"","model":"deep"}],"model":"m1"}',
    "white space": b' \n{ "model" : "m1" , "messages" : [ ] }\t\n',
    "strange fields": '{"model":"m1", "zeta":1.0,"big":9007199254740993,"x_new":{"a":[1,2.50,1e3]},"e":"é\\u00e9",'
    '"messages":[{"role":"user","content":"hi"}],"top_k":5}'.encode(),
}


@pytest.mark.case("T22", "T27", "B056", "B070", "B071")
@pytest.mark.parametrize("name", PASSED)
def test_what_an_engine_may_judge_reaches_it_byte_for_byte(stage: Stage, name: str) -> None:
    body = PASSED[name]
    assert stage.router.ask(post(body)).status == 200
    assert stage.u1.requests[0]["body"] == body


@pytest.mark.case("T22", "B061")
def test_a_byte_order_mark_is_taken_off(stage: Stage) -> None:
    assert stage.router.ask(post(b"\xef\xbb\xbf" + CHAT)).status == 200
    assert stage.u1.requests[0]["body"] == CHAT


@pytest.mark.case("T22")
def test_other_content_types_are_taken_as_json(stage: Stage) -> None:
    for data in (post(CHAT).replace(b"application/json", b"text/plain"), post(CHAT).replace(b"Content-Type: application/json\r\n", b"")):
        assert stage.router.ask(data).status == 200
    assert all("content-type: application/json" in seen["head"] for seen in stage.u1.requests)
    form = stage.router.ask(post(CHAT).replace(b"application/json", b"multipart/form-data; boundary=x"))
    assert form.status == 400
    assert "JSON" in form.error["message"]


@pytest.mark.case("T27", "B071")
@pytest.mark.parametrize("name", ["strange fields", "one model by an escaped name", "a model in a message", "white space"])
def test_an_alias_changes_nothing_but_the_value_of_the_model(stage: Stage, name: str) -> None:
    body = PASSED[name]
    where = body.rindex(b'"m1"')
    asked = body[:where] + b'"fast"' + body[where + 4 :]
    assert stage.router.ask(post(asked)).status == 200
    assert stage.u1.requests[0]["body"] == body


@pytest.mark.case("T29")
def test_answers_to_an_alias_name_the_alias(stage: Stage) -> None:
    engine_name = "/models/x.gguf"
    stage.u1.script = [answer(200, OK_BODY.replace('"m1"', f'"{engine_name}"'))]
    plain = stage.router.ask(post(CHAT.replace(b"m1", b"fast")))
    assert plain.body.decode() == OK_BODY.replace('"m1"', '"fast"')
    text = event("a", engine_name)
    text_fin = '{"model":"ENGINE","choices":[{"index":0,"delta":{"content":"\\"model\\":\\"x\\""},"finish_reason":"stop"}]}'
    fin = "data: " + text_fin.replace("ENGINE", engine_name) + "\n\n"
    stage.u1.script = [SH, ["c", text[:50]], ["c", text[50:]], ["c", fin + "data: [DONE]\n\n"], ["s", "0\r\n\r\n"]]
    stream = stage.router.ask(post(CHAT_S.replace(b"m1", b"fast")))
    assert stream.body.decode() == (text + fin + "data: [DONE]\n\n").replace(engine_name, "fast")
    same = stage.router.ask(post(CHAT_S))
    assert engine_name in same.body.decode()


@pytest.mark.case("B170", "B016")
def test_the_engine_sees_only_what_it_may(stage: Stage) -> None:
    secrets = "Cookie: c=1\r\nX-Api-Key: K\r\nX-Secret: s\r\nProxy-Authorization: p\r\nConnection: x-foo, user-agent\r\nX-Foo: 1\r\n"
    assert stage.router.ask(post(CHAT, secrets + "Accept-Encoding: gzip, br\r\nUser-Agent: u\r\nTraceparent: 00-1-2-01\r\n")).status == 200
    head = stage.u1.requests[0]["head"].lower()
    names = {line.split(":")[0] for line in head.split("\r\n")[1:]}
    assert names == {"host", "accept-encoding", "content-type", "x-request-id", "content-length", "traceparent"}
    assert "accept-encoding: identity" in head


def test_a_gzip_body_is_unpacked_and_others_are_refused(stage: Stage) -> None:
    packed = gzip.compress(CHAT)
    assert stage.router.ask(post(packed, "Content-Encoding: gzip\r\n")).status == 200
    seen = stage.u1.requests[0]
    assert seen["body"] == CHAT
    assert "content-encoding" not in seen["head"]
    assert stage.router.ask(post(packed[:-10], "Content-Encoding: gzip\r\n")).status == 400
    for coding in ("br", "zstd", "gzip, gzip", "x"):
        got = stage.router.ask(post(packed, f"Content-Encoding: {coding}\r\n"))
        assert got.status == 415
        assert got.get("accept-encoding") == "gzip"
    bomb = gzip.compress(b"\0" * 80_000_000)
    before = stage.router.rss_kib()
    assert stage.router.ask(post(bomb, "Content-Encoding: gzip\r\n")).status == 413
    assert stage.router.rss_kib() - before < 2 * 52_428_800 // 1024


def _sized(size: int) -> bytes:
    return CHAT.replace(b'"hi"', b'"' + b"a" * (size - len(CHAT) + 2) + b'"')


@pytest.mark.case("T24", "B064")
def test_large_bodies_pass_up_to_the_limit(stage: Stage) -> None:
    for size in (10_485_760, 52_428_800):
        body = _sized(size)
        assert len(body) == size
        assert stage.router.ask(post(body)).status == 200
        assert stage.u1.requests[-1]["body"] == body
        stage.u1.log.clear()
    for data in (
        post(_sized(52_428_801)),
        post(b"%x\r\n%b\r\n0\r\n\r\n" % (52_428_801, _sized(52_428_801)), length="Transfer-Encoding: chunked\r\n"),
        post(b"", length="Content-Length: 99999999999\r\n"),
    ):
        with stage.router.client() as client:
            client.send(data)
            got = client.answer()
            assert got.status == 413
            assert "52428800" in got.error["message"]
            assert client.rest() == b""
    assert stage.u1.requests == []  # its load is asked for once a second, whatever comes


@pytest.mark.case("T24")
def test_an_upload_holds_up_nobody(stage: Stage) -> None:
    data = post(_sized(41_943_040))
    piece = len(data) // 10
    with stage.router.client() as client:
        for at in range(0, len(data), piece):
            client.send(data[at : at + piece])
            assert stage.router.ask(get("/health")).status == 200
        assert client.answer().status == 200


@pytest.mark.case("T29", "B084", "B085")
def test_models_are_listed_without_any_engine(stage: Stage) -> None:
    got = stage.router.ask(get("/v1/models")).json()
    assert got["object"] == "list"
    assert [row["id"] for row in got["data"]] == ["dead", "fast", "m1", "m2", "org/Model-7B:Q4_K_M"]
    assert all(row["object"] == "model" and isinstance(row["created"], int) and row["owned_by"] for row in got["data"])
    paths = ("org/Model-7B:Q4_K_M", "org%2FModel-7B:Q4_K_M", "org%2FModel-7B%3AQ4_K_M")
    rows = [stage.router.ask(get(f"/v1/models/{path}")).json() for path in paths]
    assert rows[0]["id"] == "org/Model-7B:Q4_K_M"
    assert rows[0] == rows[1] == rows[2]
    assert stage.router.ask(get("/v1/models/nope")).error["code"] == "model_not_found"
    narrow = stage.router.ask(get("/v1/models", key="NARROW")).json()
    assert [row["id"] for row in narrow["data"]] == ["m2"]
    assert stage.router.ask(get("/v1/models/m1", key="NARROW")).status == 404
    denied = stage.router.ask(post(CHAT, key="NARROW"))
    assert (denied.status, denied.error["code"]) == (403, "model_not_allowed")
    assert stage.u1.requests == []


@pytest.mark.case("T30", "B065", "B082")
def test_errors_are_json_and_say_what_is_wrong(stage: Stage) -> None:
    cases: list[tuple[bytes, int, str]] = [
        (post(CHAT.replace(b"m1", b"nope")), 404, "model_not_found"),
        (get("/v1/nope"), 404, "unknown_route"),
        (get("/v1/chat/completions"), 405, "method_not_allowed"),
        (post(CHAT, path="/v1/models"), 405, "method_not_allowed"),
        (get("/v1/models/m1", method="DELETE"), 405, "method_not_allowed"),
        (get("/v1/batches"), 404, "not_offered"),
        (post(b"{}", path="/v1/files"), 404, "not_offered"),
        (get("/v1/realtime"), 404, "not_offered"),
        (post(b"{}", path="/v1/fine_tuning/jobs"), 404, "not_offered"),
        (get("/v1/assistants/x"), 404, "not_offered"),
        (get("//v1/models"), 404, "unknown_route"),
        (get("/v1/%2e%2e/admin/keys"), 404, "unknown_route"),
        (get("/admin%2fkeys"), 404, "unknown_route"),
        (get("/api/v1/status", key=""), 404, "router_port"),
        (get("/console/"), 404, "router_port"),
        (get("/apiary"), 404, "unknown_route"),
        (post(CHAT, path="/chat/completions"), 404, "unknown_route"),
    ]
    for number, (data, status, code) in enumerate(cases):
        mark = f"err-{number}"
        got = stage.router.ask(data.replace(b"Host: g\r\n", f"Host: g\r\nX-Request-Id: {mark}\r\n".encode()))
        assert (got.status, got.error["code"]) == (status, code), data
        assert got.get("x-request-id") == mark
        assert status != 405 or got.get("allow")
        assert f"request_id={mark} " in stage.router.log_line(mark)
    elsewhere = stage.router.ask(get("/api/v1/status")).error["message"]
    assert (
        elsewhere
        == "this is a router's port, which has /v1; the admin API and the console are at [server] admin_listen, by default port 8081"
    )


@pytest.mark.case("B090")
def test_a_404_names_the_nearest_model_on_every_route_that_takes_one(stage: Stage) -> None:
    for asked, near in (("M1", "m1"), ("org/Model-7B", "org/Model-7B:Q4_K_M"), ("Model-7B:Q4_K_M", "org/Model-7B:Q4_K_M")):
        told = f"the model {asked!r} does not exist; did you mean {near!r}?"
        assert stage.router.ask(post(CHAT.replace(b"m1", asked.encode()))).error["message"] == told
        assert stage.router.ask(get(f"/v1/models/{asked}")).error["message"] == told
    assert stage.router.ask(get("/v1/models/zzz")).error["message"] == "the model 'zzz' does not exist"
    hidden = stage.router.ask(get("/v1/models/M1", key="NARROW")).error["message"]  # what a key may not use is not named to it
    assert hidden == "the model 'M1' does not exist"


@pytest.mark.parametrize(
    ("asked", "near"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/models", "/v1/models"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/embeddings/", "/v1/embeddings"),
        ("/v1/modles", "/v1/models"),
        ("/healthz", "/health"),
        ("/v1/ready", "/ready"),
        ("/" + "x" * 9000, None),
        ("/", None),
    ],
)
def test_a_404_names_the_nearest_route(stage: Stage, asked: str, near: str | None) -> None:
    message = stage.router.ask(get(asked)).error["message"]
    assert message.endswith(f"; did you mean {near}?") == (near is not None)
    assert len(message) < 400


def test_the_messages_family_gets_errors_in_its_own_shape(stage: Stage) -> None:
    for body, key, kind in (
        (b"{}", "K", "invalid_request_error"),
        (CHAT, "wrong", "authentication_error"),
        (CHAT, "NARROW", "permission_error"),
    ):
        got = stage.router.ask(post(body, path="/v1/messages", key=key)).json()
        assert got["type"] == "error"
        assert got["error"]["type"] == kind
        assert got["error"]["message"]


@pytest.mark.case("B015")
def test_an_answer_in_a_coding_nobody_asked_for_still_agrees_with_its_header(stage: Stage) -> None:
    packed = gzip.compress(OK_BODY.encode())
    for status in (200, 400):
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Encoding: gzip\r\nContent-Length: {len(packed)}\r\n\r\n"
        stage.u1.script = [["s", head], ["x", packed.hex()]]
        got = stage.router.ask(post(CHAT))
        assert (got.status, got.get("content-encoding")) == (status, "gzip")
        assert gzip.decompress(got.body).decode() == OK_BODY


@pytest.mark.case("B065")
def test_a_non_json_error_of_an_engine_is_wrapped_and_cut(stage: Stage) -> None:
    stage.u1.script = [answer(422, "<html>" + "x" * 5000, kind="text/html")]
    got = stage.router.ask(post(CHAT))
    assert got.status == 422
    assert got.error["message"].startswith("the engine answered 422: <html>xxx")
    assert len(got.error["message"]) < 1200


def test_an_insane_request_id_is_replaced(stage: Stage) -> None:
    for told in ("a b", "x" * 200, "ü"):
        got = stage.router.ask(post(CHAT, f"X-Request-Id: {told}\r\n"))
        assert got.get(
            "x-request-id",
        ).startswith("req-")  # type: ignore[union-attr]


@pytest.mark.case("B172")
def test_no_key_and_no_prompt_reaches_a_log(stage: Stage) -> None:
    secret = "prompt-that-must-not-be-logged"
    stage.router.ask(post(json.dumps({"model": "m1", "messages": [{"role": "user", "content": secret}]}).encode(), key="K-WRONG-SECRET"))
    stage.router.ask(post(CHAT.replace(b"hi", secret.encode()), "X-Request-Id: secret-check\r\n"))
    stage.router.log_line("secret-check")
    text = stage.router.out.read_text() + stage.router.err.read_text()
    assert secret not in text
    assert "K-WRONG-SECRET" not in text


def test_names_of_an_engine_stand_in_for_the_models(tmp_path: Any) -> None:
    with staged(tmp_path) as stage:
        stage.router.close()
        text = stage.text.replace('aliases = { fast = "m1" }', 'aliases = { fast = "m1" }\nnames = { m1 = "/models/x.gguf" }')
        from tests.router.fakes import RouterProcess

        router = RouterProcess(tmp_path, text)
        try:
            stage.u1.script = [answer(200, OK_BODY.replace('"m1"', '"/models/x.gguf"'))]
            for name in (b"m1", b"fast"):
                got = router.ask(post(CHAT.replace(b"m1", name)))
                assert stage.u1.requests[-1]["body"] == CHAT.replace(b"m1", b"/models/x.gguf")
                assert got.json()["model"] == name.decode()
        finally:
            router.close()


def test_bytes_that_are_no_text_pass_untouched(stage: Stage) -> None:
    audio = bytes(range(256)) * 1000
    stage.u1.script = [["s", f"HTTP/1.1 200 OK\r\nContent-Type: audio/mpeg\r\nContent-Length: {len(audio)}\r\n\r\n"], ["x", audio.hex()]]
    got = stage.router.ask(post(b'{"model":"fast","input":"x"}', path="/v1/audio/speech"))
    assert got.body == audio
    assert stage.u1.requests[0]["body"] == b'{"model":"m1","input":"x"}'
    stage.u1.script = [OK]
