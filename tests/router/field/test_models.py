"""Names of models as people give them: listed, found and refused alike everywhere (the MOD cases and their neighbours)."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from llmgw.router.families import ROUTES, Family
from tests.router.fakes import CHAT, CHAT_S, OK_BODY, RouterProcess, Stage, get, post, staged

NAMES = [
    "org/Model-7B:Q4_K_M", "a b", "a+b", "50%", "c?d#e", "größe-北", 'quo"te', "a%2Fb", "x:latest", "trailing/", "v1/models", "m&n=o;p",
]  # fmt: skip
ENDPOINTS = """
[[endpoint]]
id = "odd"
url = "http://127.0.0.1:{port}"
models = {names}
unlisted = ["a b", "hidden"]
aliases = {{ hidden = "a+b", shown = "a+b" }}
[[endpoint]]
id = "ollama"
url = "http://127.0.0.1:{port}"
models = ["llama3.2:latest", "tagged:8b"]
engine = "ollama"
"""


@pytest.fixture(scope="module")
def _odd_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("odd")
    with staged(folder) as stage:
        stage.router.close()
        names = json.dumps(NAMES, ensure_ascii=False)
        stage.router = RouterProcess(folder, stage.text + ENDPOINTS.format(port=stage.u1.port, names=names))
        yield stage


@pytest.fixture
def odd(_odd_stage: Stage) -> Stage:
    _odd_stage.u1.log.clear()
    return _odd_stage


def _listed(stage: Stage) -> list[str]:
    return [row["id"] for row in stage.router.ask(get("/v1/models")).json()["data"]]


@pytest.mark.case("B084", "T29")
@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_found_by_its_path_and_by_a_body(odd: Stage, name: str) -> None:
    rows = [odd.router.ask(get(f"/v1/models/{quote(name, safe=safe)}")) for safe in ("", "/", "/:+")]
    assert [row.status for row in rows] == [200] * 3
    assert all(row.json()["id"] == name for row in rows)
    body = json.dumps({"model": name, "messages": []}, ensure_ascii=False).encode()
    assert odd.router.ask(post(body)).status == 200
    assert odd.u1.requests[-1]["body"] == body
    assert (name in _listed(odd)) == (name != "a b")


@pytest.mark.case("B088")
def test_an_alias_is_listed_or_not_as_the_file_says_and_callable_all_the_same(odd: Stage) -> None:
    listed = _listed(odd)
    assert "shown" in listed
    assert "hidden" not in listed
    assert len(listed) == len(set(listed))
    for name in (b"shown", b"hidden"):
        assert odd.router.ask(post(CHAT.replace(b"m1", name))).status == 200
        assert json.loads(odd.u1.requests[-1]["body"])["model"] == "a+b"
        assert odd.router.ask(get(f"/v1/models/{name.decode()}")).json()["id"] == name.decode()


@pytest.mark.case("B091")
def test_an_engine_of_ollamas_kind_knows_its_models_with_and_without_the_tag(odd: Stage) -> None:
    for name, found in (("llama3.2", 200), ("llama3.2:latest", 200), ("tagged", 404), ("tagged:8b", 200), ("x", 404)):
        assert odd.router.ask(post(CHAT.replace(b"m1", name.encode()))).status == found
        assert odd.router.ask(get(f"/v1/models/{name}")).status == found
    assert {json.loads(seen["body"])["model"] for seen in odd.u1.requests} == {"llama3.2:latest", "tagged:8b"}


@pytest.mark.case("B092", "T30")
@pytest.mark.parametrize("path", sorted(ROUTES))
def test_an_unknown_model_is_one_404_on_every_route(stage: Stage, path: str) -> None:
    for body in (CHAT, CHAT_S):
        got = stage.router.ask(post(body.replace(b"m1", b"nope"), path=path))
        assert (got.status, got.get("content-type")) == (404, "application/json")
        assert got.error["code"] == "model_not_found"
        assert got.error["type"] == ("not_found_error" if ROUTES[path].family is Family.ANTHROPIC else "invalid_request_error")
        assert got.error["message"] == "the model 'nope' does not exist"
    assert stage.u1.requests == []


@pytest.mark.case("B095")
def test_a_name_works_every_time(stage: Stage) -> None:
    for name in (b"m1", b"fast", b"m2") * 3:
        assert name.decode() in _listed(stage)
        assert stage.router.ask(post(CHAT.replace(b"m1", name))).status == 200


@pytest.mark.case("B090")
@pytest.mark.parametrize("name", ["M1", "m1 ", " m1", "m1\\u0000", "m1/", "m1:latest", "Fast", "m\\u0131"])
def test_names_are_taken_exactly(stage: Stage, name: str) -> None:
    got = stage.router.ask(post(CHAT.replace(b"m1", name.encode())))
    assert (got.status, got.error["code"]) == (404, "model_not_found")
    assert stage.u1.requests == []


@pytest.mark.case("B085", "B086", "T29")
def test_models_are_told_while_no_engine_takes_a_connection(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as deaf, contextlib.ExitStack() as held, staged(tmp_path) as stage:
        address = deaf.getsockname()
        for _ in range(4):  # fills the queue of connections that nobody takes; further ones hang
            filler = held.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(address)
        stage.router.close()
        text = stage.text.replace(f"127.0.0.1:{stage.u1.port}", f"127.0.0.1:{address[1]}")
        stage.router = RouterProcess(tmp_path, text.replace(f"127.0.0.1:{stage.u2.port}", f"127.0.0.1:{address[1]}"))
        waiting = held.enter_context(stage.router.client())
        waiting.send(post(CHAT))
        assert _listed(stage) == ["dead", "fast", "m1", "m2", "org/Model-7B:Q4_K_M"]
        assert waiting.answer().error["code"] == "unreachable"
        assert _listed(stage) == ["dead", "fast", "m1", "m2", "org/Model-7B:Q4_K_M"]


@pytest.mark.case("B058")
def test_an_answer_that_is_no_json_passes_as_it_is(stage: Stage) -> None:
    text = '{"logprob":-Infinity,"t":NaN,"model":"m1"}'
    stage.u1.script = [["s", f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n{text}"]]
    for name in (b"m1", b"fast"):
        got = stage.router.ask(post(CHAT.replace(b"m1", name)))
        assert got.status == 200
        assert got.body.decode().startswith('{"logprob":-Infinity,"t":NaN,"model":')


@pytest.mark.case("T29")
def test_every_word_of_an_answer_but_the_models_name_is_the_engines(stage: Stage) -> None:
    text = OK_BODY.replace('"ok"', '"\\"model\\":\\"m1\\" 北 \\ud800"').replace('"created":1', '"created":1.0, "x" : 9007199254740993')
    stage.u1.script = [["s", f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(text.encode())}\r\n\r\n{text}"]]
    assert stage.router.ask(post(CHAT)).body.decode() == text
    assert stage.router.ask(post(CHAT.replace(b"m1", b"fast"))).body.decode() == text.replace('"model":"m1",', '"model":"fast",')
