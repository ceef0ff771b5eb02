"""Two control planes on one store, as `llmgw server` makes them: what is asked of a standby, and what they say to each other."""

from __future__ import annotations

import http.client
import http.server
import json
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlsplit

import apsw
import pytest
import trio
from structlog.testing import capture_logs

from llmgw.admin.auth import CALLER, HOP, hash_token
from llmgw.admin.peer_client import PRESENT_PATH, RELEASED_PATH
from llmgw.lease.file import LEASE_FILE
from llmgw.lease.outage import BACK
from llmgw.settings.load import Role, load_bytes
from llmgw.wiring.machine import RealMachine
from llmgw.wiring.server import CONTROL_TOKEN_FILE, Running, run_control_plane
from tests.plane_file import plane_file, shared_store

LIMIT_S = 20.0
MODEL = {"name": "m", "replicas": 1, "profile": [{"name": "p", "engine": "command", "command": ["/opt/engine"], "gpus": 0}]}


@asynccontextmanager
async def pair(folder: Path, advertise: Mapping[str, str] = MappingProxyType({})) -> AsyncIterator[tuple[Running, Running]]:
    """(the leader, the standby)."""
    (folder / "shared").mkdir()
    async with trio.open_nursery() as nursery:
        running = []
        for name in ("one", "two"):
            text = plane_file(folder, name, shared_store(folder), advertise=advertise.get(name, ""))
            loaded = load_bytes(text.encode(), source="test", role=Role.SERVER)
            running.append(await nursery.start(run_control_plane, RealMachine(), loaded))
        yield running[0], running[1]
        nursery.cancel_scope.cancel()


async def ask(to: Running, method: str, path: str, body: object = None, token: str | None = None, **headers: str) -> tuple[int, object]:
    def work() -> tuple[int, object]:
        connection = http.client.HTTPConnection(urlsplit(to.admin_url).netloc, timeout=LIMIT_S)
        data = None if body is None else json.dumps(body)
        sent = {"Authorization": f"Bearer {token or to.admin_token}", "Content-Type": "application/json", **headers}
        connection.request(method, path, data, sent)
        answer = connection.getresponse()
        raw = answer.read()
        connection.close()
        return answer.status, json.loads(raw) if raw else None

    return await trio.to_thread.run_sync(work)


async def until(condition: Callable[[], bool], what: str) -> None:
    with trio.move_on_after(LIMIT_S):
        while not condition():
            await trio.sleep(0.01)
        return
    raise AssertionError(f"never came true: {what}")


def name_of(one: Running) -> str:
    """What the store calls the token of that control plane's file."""
    return f"first-{hash_token(one.admin_token)[:6]}"


def code(answer: tuple[int, object]) -> tuple[int, str]:
    status, body = answer
    assert isinstance(body, dict)
    return status, body["error"]["code"]


async def test_an_order_that_reaches_a_standby_is_carried_to_the_leader_once_and_shown_at_both(tmp_path: Path):
    async with pair(tmp_path) as (leader, standby):
        order = ("PUT", "/api/v1/models/m", MODEL)
        headers = {"If-None-Match": "*", "Idempotency-Key": "k1"}
        status, body = await ask(standby, *order, **headers)
        assert (status, body["change"]) == (201, "created")
        again = await ask(standby, *order, **headers)
        assert again == (status, body)
        for one in (standby, leader):
            assert (await ask(one, "GET", "/api/v1/models/m"))[1]["model"]["name"] == "m"
        events = (await ask(standby, "GET", "/api/v1/events"))[1]["events"]
        told = [event["text"] for event in events if event["kind"] == "model.created"]
        assert told == [f"model m was created by {name_of(standby)}"]


async def test_what_only_the_leader_knows_is_asked_of_it(tmp_path: Path):
    async with pair(tmp_path) as (leader, standby):
        await ask(leader, "PUT", "/api/v1/models/m", MODEL, **{"If-None-Match": "*"})
        await until(lambda: "model/m" in leader.controller.reconciler.reasons, "the leader has planned")
        said = (await ask(leader, "GET", "/api/v1/explain/model/m"))[1]
        assert "no node" in said["text"]
        assert (await ask(standby, "GET", "/api/v1/explain/model/m"))[1] == said


async def test_either_token_is_valid_at_both(tmp_path: Path):
    async with pair(tmp_path) as (leader, standby):
        await until(lambda: bool(leader.controller.peers.standbys()), "the standby has presented itself")
        assert (await ask(standby, "GET", "/api/v1/status", token=leader.admin_token))[0] == 200
        assert (await ask(leader, "GET", "/api/v1/status", token=standby.admin_token))[0] == 200
        assert code(await ask(standby, "POST", "/api/v1/leader/hand-over", token="x" * 64)) == (401, "token_invalid")


async def test_an_order_is_carried_no_further_than_once(tmp_path: Path):
    async with pair(tmp_path) as (_, standby):
        answer = await ask(standby, "PUT", "/api/v1/models/m", MODEL, **{"If-None-Match": "*", HOP: "ctl-x"})
        assert code(answer) == (503, "not_leader")


async def test_what_control_planes_say_to_each_other_nobody_else_may(tmp_path: Path):
    async with pair(tmp_path) as (leader, standby):
        control_token = (tmp_path / "shared" / CONTROL_TOKEN_FILE).read_text().strip()
        agent_token = leader.agent_token_file.read_text().strip()
        word = {"owner": "ctl-x-1", "address": "http://127.0.0.1:1", "build": "0", "nodes_heard": 0}
        for path in (PRESENT_PATH, RELEASED_PATH):
            assert code(await ask(leader, "POST", path, word)) == (403, "role")
            assert code(await ask(leader, "POST", path, word, agent_token)) == (401, "token_invalid")
            assert code(await ask(leader, "POST", path, word, control_token)) == (401, "token_malformed")
            assert code(await ask(leader, "POST", path, word, control_token, **{CALLER: "king ctl"})) == (401, "token_malformed")
        assert (await ask(leader, "POST", PRESENT_PATH, word, control_token, **{CALLER: "admin ctl"}))[0] == 200
        for bad in ({}, {**word, "owner": 3}, {**word, "nodes_heard": -1}, {**word, "nodes_heard": True}, {**word, "address": "x" * 500}):
            assert (await ask(leader, "POST", PRESENT_PATH, bad, control_token, **{CALLER: "admin ctl"}))[0] == 400
        # A control plane's token gives the rights of whom it brings, and no others.
        viewer = {CALLER: "viewer somebody"}
        assert code(await ask(standby, "PUT", "/api/v1/models/m", MODEL, control_token, **viewer)) == (403, "role")


async def test_a_leader_that_ends_is_succeeded_before_its_agents_are_let_go(tmp_path: Path):
    async with pair(tmp_path) as (leader, standby):
        await until(lambda: bool(leader.controller.peers.standbys()), "the standby has presented itself")
        await leader.drain()
        assert standby.controller.leadership.is_leader
        assert (await ask(standby, "PUT", "/api/v1/models/m", MODEL, **{"If-None-Match": "*"}))[0] == 201


@pytest.mark.parametrize("force", [False, True])
async def test_the_leader_hands_over_to_the_standby_and_stands_by(tmp_path: Path, force: bool):
    async with pair(tmp_path) as (leader, standby):
        await until(lambda: bool(leader.controller.peers.standbys()), "the standby has presented itself")
        assert (await ask(standby, "POST", "/api/v1/leader/hand-over", {"force": force}))[0] == 202
        await until(lambda: standby.controller.leadership.is_leader, "the standby leads")
        await until(lambda: bool(standby.controller.peers.standbys()), "the one before presents itself")
        shown = (await ask(leader, "GET", "/api/v1/leader"))[1]
        assert (shown["is_me"], shown["owner"], shown["role"]) == (False, standby.controller.leadership.owner, "follow")


async def test_one_that_is_started_while_the_store_is_locked_waits_for_it(tmp_path: Path):
    (tmp_path / "shared").mkdir()
    loaded = load_bytes(plane_file(tmp_path, "one", shared_store(tmp_path)).encode(), source="test", role=Role.SERVER)
    holder = apsw.Connection(str(tmp_path / "shared" / "llmgw.db"))
    holder.execute("BEGIN EXCLUSIVE")
    with capture_logs() as told:
        async with trio.open_nursery() as nursery:
            started = trio.Event()

            async def run() -> None:
                await nursery.start(run_control_plane, RealMachine(), loaded)
                started.set()

            nursery.start_soon(run)
            with trio.fail_after(LIMIT_S):
                while not any("waiting for it" in line["event"] for line in told):
                    await trio.sleep(0.01)
            assert not started.is_set()
            holder.execute("ROLLBACK")
            holder.close()
            with trio.fail_after(LIMIT_S):
                await started.wait()
            nursery.cancel_scope.cancel()


async def test_one_that_is_started_while_the_lease_is_locked_stands_by_until_it_is_free(tmp_path: Path):
    """It used to end with exit 6, where one that runs already waits."""
    async with pair(tmp_path):
        pass
    other = apsw.Connection(str(tmp_path / "shared" / LEASE_FILE))
    other.execute("BEGIN IMMEDIATE")
    with capture_logs() as logs:
        async with trio.open_nursery() as nursery:
            loaded = load_bytes(plane_file(tmp_path, "one", shared_store(tmp_path)).encode(), source="test", role=Role.SERVER)
            running = await nursery.start(run_control_plane, RealMachine(), loaded)
            assert (await ask(running, "GET", "/api/v1/leader"))[1]["role"] == "follow"
            other.execute("ROLLBACK")
            other.close()
            await until(lambda: running.controller.leadership.is_leader, "it leads")
            nursery.cancel_scope.cancel()
    told = [(entry["log_level"], entry["event"]) for entry in logs if entry["event"].startswith(("the lease", "storage"))]
    assert told == [("warning", "the lease's store does not answer; whoever leads goes on"), ("info", BACK)]


async def test_an_answer_of_something_else_is_not_passed_on_as_the_leaders(tmp_path: Path):
    """The port of a router in `advertise`: its 404 was what an operator got."""

    class Router(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(404)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        do_PUT = do_GET = do_POST

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Router)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        wrong = f"http://127.0.0.1:{server.server_port}"
        async with pair(tmp_path, advertise={"one": wrong}) as (leader, standby):
            answer = await ask(standby, "PUT", "/api/v1/models/m", MODEL, **{"If-None-Match": "*"})
            assert code(answer) == (503, "not_a_control_plane")
            said = answer[1]["error"]["message"]
            assert wrong in said
            assert "no control plane's admin port" in said
            assert (await ask(leader, "PUT", "/api/v1/models/m", MODEL, **{"If-None-Match": "*"}))[0] == 201, "nothing was carried out"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def test_a_standby_that_has_just_come_tells_of_the_cluster_what_the_leader_knows(tmp_path: Path):
    async with pair(tmp_path) as (leader, standby):
        assert (await ask(leader, "PUT", "/api/v1/models/m", MODEL, **{"If-None-Match": "*"}))[0] == 201
        _, known = await ask(leader, "GET", "/api/v1/status")
        _, told = await ask(standby, "GET", "/api/v1/status")
        assert known["problems"]
        assert (told["problems"], told["models"]) == (known["problems"], known["models"])
        assert (known["leader"]["is_me"], told["leader"]["is_me"]) == (True, False)


async def test_an_order_with_a_parameter_that_nobody_knows_is_not_carried_out(tmp_path: Path):
    async with pair(tmp_path) as (leader, standby):
        for asked in (leader, standby):
            status, body = await ask(
                asked, "PATCH", "/api/v1/settings?dryrun=true", {"set": {"guard.max_messages": 7}}, **{"If-Match": '"1"'}
            )
            assert (status, body["error"]["param"]) == (400, "dryrun")
            assert "known: dry_run" in body["error"]["message"]
        assert (await ask(leader, "GET", "/api/v1/settings"))[1]["version"] == 1
