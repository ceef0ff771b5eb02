"""Real `llmgw` processes: a control plane, agents and a static router, killed one after the other."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.programs import Admin, Program, chat, end_tree, free_port, free_ports, program, skip, wait_for

pytestmark = pytest.mark.slow
ENGINE = Path(__file__).parent / "stream_engine.py"


class Site:
    """A control plane with its embedded router, one agent, and where they keep things."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.admin_port, self.port = free_port(), free_port()
        self.ports = free_ports(20)
        self.marker = str(folder)  # engines hold it in their command line
        self.programs: list[Program] = []
        (folder / "server.toml").write_text(
            f"""
[server]
name = "ctl-1"
data_dir = "{folder}/server"
admin_listen = "127.0.0.1:{self.admin_port}"
[store]
path = "llmgw.db"
[router]
listen = "127.0.0.1:{self.port}"
[auth]
required = false
[reconcile]
heartbeat_s = 0.5
node_lost_after_s = 3
grace_s = 5
[route]
drain_s = 5
"""
        )
        (folder / "agent.toml").write_text(
            f"""
[agent]
name = "node-1"
control_planes = ["http://127.0.0.1:{self.admin_port}"]
data_dir = "{folder}/agent"
engine_ports = "{self.ports}"
token_file = "{folder}/server/agent-token"
"""
        )

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self, role: str) -> Program:
        one = Program([role, "--config", str(self.folder / f"{role}.toml")], self.folder, role)
        self.programs.append(one)
        return one

    def start_server(self) -> Program:
        one = self.start("server")
        wait_for(
            lambda: one.output.count("serving") >= sum(p.log == one.log for p in self.programs) or one.process.poll(), "the server serves"
        )
        assert one.process.poll() is None, one.output
        return one

    @property
    def admin(self) -> Admin:
        return Admin(f"127.0.0.1:{self.admin_port}", (self.folder / "server" / "admin-token").read_text().strip())

    def model(self, name: str, count: int = 1, **profile: Any) -> dict[str, Any]:
        command = [sys.executable, str(ENGINE), "--port", "{port}", "--mark", self.marker]
        return {
            "name": name,
            "replicas": {"min": 0, "max": 5, "count": count},
            "profile": [{"name": "p", "engine": "command", "command": command, **profile}],
        }

    def close(self) -> None:
        for one in self.programs:
            one.close()
        end_tree(self.marker)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    one = Site(tmp_path)
    yield one
    one.close()


class Stream(threading.Thread):
    """A streamed chat read in the background."""

    def __init__(self, address: str, model: str, tokens: int) -> None:
        super().__init__()
        self.address, self.model, self.tokens = address, model, tokens
        self.data = b""
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            connection = http.client.HTTPConnection(self.address, timeout=60)
            body = {"model": self.model, "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": self.tokens}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            while piece := answer.read1(65536):
                self.data += piece
            connection.close()
        except Exception as err:  # asserted on by the test
            self.error = err

    def finish(self) -> str:
        self.join(60)
        assert self.error is None, self.error
        text = self.data.decode()
        assert text.rstrip().endswith("data: [DONE]"), text[-300:]
        assert text.count("delta") == self.tokens + 1
        return text


def test_an_agent_killed_during_a_stream_comes_back_to_the_same_engine_and_the_stream_is_not_cut(site: Site) -> None:
    site.start_server()
    agent = site.start("agent")
    site.admin.apply(site.model("a"))
    (before,) = site.admin.wait_ready("a")
    stream = Stream(site.address, "a", 100)
    wait_for(lambda: stream.data.count(b"delta") > 5, "the stream runs")
    agent.kill()
    assert psutil.pid_exists(before["pid"])
    site.start("agent")
    wait_for(lambda: site.admin.events("replica.adopted"), "the adoption is told")
    (after,) = site.admin.wait_ready("a")
    assert (after["id"], after["pid"], after["attempt"]) == (before["id"], before["pid"], before["attempt"])
    assert f"{before['pid']}/99" in stream.finish()
    assert chat(site.address, "a")[1]["choices"][0]["message"]["content"] == f"pid {before['pid']}"


def test_a_control_plane_killed_and_started_again_starts_and_stops_no_replica(site: Site) -> None:
    server = site.start_server()
    site.start("agent")
    site.admin.apply(site.model("a", 2), site.model("b"))
    before = {row["id"]: row["pid"] for name, count in (("a", 2), ("b", 1)) for row in site.admin.wait_ready(name, count)}
    server.kill()
    assert all(psutil.pid_exists(pid) for pid in before.values())
    site.start_server()
    after = {row["id"]: row["pid"] for name, count in (("a", 2), ("b", 1)) for row in site.admin.wait_ready(name, count)}
    assert after == before
    wait_for(lambda: chat(site.address, "a")[0] == 200, "it serves again")
    leader = site.admin("GET", "/leader")
    assert leader["epoch"] == 2
    placed = site.admin.events("replica.placed")
    assert len(placed) == 3
    assert not site.admin.events("replica.withdrawn")


def test_a_separate_static_router_does_not_notice_that_the_control_plane_died(site: Site, tmp_path: Path) -> None:
    server = site.start_server()
    site.start("agent")
    site.admin.apply(site.model("a"))
    (replica,) = site.admin.wait_ready("a")
    key = next(p for p in [psutil.Process(replica["pid"])]).environ()["LLMGW_API_KEY"]
    port = free_port()
    (tmp_path / "router.toml").write_text(
        f"""
[router]
listen = "127.0.0.1:{port}"
[auth]
required = false
[[endpoint]]
id = "u1"
url = "{replica["url"]}"
models = ["a"]
engine = "vllm"
api_key_env = "U1_KEY"
"""
    )
    with program(["router", "--config", str(tmp_path / "router.toml")], tmp_path, "router", {"U1_KEY": key}) as router:
        wait_for(lambda: _answers(f"127.0.0.1:{port}"), "the router answers")
        stream = Stream(f"127.0.0.1:{port}", "a", 60)
        wait_for(lambda: stream.data, "the stream runs")
        server.kill()
        for _ in range(20):
            assert chat(f"127.0.0.1:{port}", "a")[0] == 200
        stream.finish()
        assert router.end() == 0


def _answers(address: str) -> bool:
    try:
        return chat(address, "a")[0] == 200
    except OSError:
        return False


def test_a_killed_engine_leaves_the_list_at_once_is_restarted_in_place_and_the_event_says_why(site: Site) -> None:
    site.start_server()
    site.start("agent")
    site.admin.apply(site.model("a"), site.model("b"))
    (before,) = site.admin.wait_ready("a")
    (other,) = site.admin.wait_ready("b")
    os.kill(before["pid"], signal.SIGKILL)
    seen = wait_for(lambda: [row for row in site.admin.replicas("a") if row["pid"] != before["pid"]], "the death is seen", 5)
    assert seen[0]["id"] == before["id"]
    status, answer = chat(site.address, "a")
    assert status in (200, 503), answer  # never a hang and never an error of ours
    wait_for(lambda: chat(site.address, "a")[0] == 200, "it serves again")
    (after,) = site.admin.wait_ready("a")
    assert after["id"] == before["id"]
    assert after["pid"] != before["pid"]
    assert after["attempt"] == before["attempt"] + 1
    (crashed,) = site.admin.events("replica.crashed")
    assert "signal 9" in crashed["text"] or "SIGKILL" in crashed["text"]
    assert site.admin.wait_ready("b")[0]["pid"] == other["pid"]


@pytest.mark.parametrize("asked", [False, True])
def test_a_frozen_engine_leaves_the_list_with_its_reason_and_is_restarted_in_place(site: Site, asked: bool) -> None:
    """Its kernel still takes connections, and soon not even that. With and without clients that ask for it."""
    with (site.folder / "server.toml").open("a") as file:
        file.write("connect_timeout_s = 0.5\nfirst_byte_timeout_s = 1\n[engines.command]\nprogress_limit_s = 3\n")
    site.start_server()
    site.start("agent")
    site.admin.apply(site.model("m"))
    (row,) = site.admin.wait_ready("m")
    psutil.Process(row["pid"]).suspend()
    with contextlib.ExitStack() as held:
        for _ in range(20):  # the queue of connections that it does not take is full
            filler = held.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", int(row["url"].rpartition(":")[2])))

        def benched() -> bool:
            if asked:
                chat(site.address, "m")
            (now,) = site.admin.replicas("m")
            return not now["in_rotation"] and now["reason"] == "stalled"

        wait_for(benched, "it is out of rotation")
        assert "m" in " ".join(site.admin("GET", "/status")["problems"])
        status, answer = chat(site.address, "m")
        assert (status, answer["error"]["code"]) == (503, "unreachable")
    (after,) = wait_for(lambda: [one for one in site.admin.replicas("m") if one["in_rotation"]], "it is ready again")
    assert (after["id"], after["attempt"]) == (row["id"], 2)
    assert chat(site.address, "m")[0] == 200
    assert not psutil.pid_exists(row["pid"])
    assert "a probe failed" in site.admin.events("replica.stalled")[0]["text"]


def test_a_removed_model_is_withdrawn_before_its_engine_stops_and_its_stream_ends_whole(site: Site) -> None:
    site.start_server()
    site.start("agent")
    site.admin.apply(site.model("a"), site.model("b"))
    (of_a,) = site.admin.wait_ready("a")
    (of_b,) = site.admin.wait_ready("b")
    stream = Stream(site.address, "a", 40)
    wait_for(lambda: stream.data, "the stream runs")
    site.admin("DELETE", "/models/a", **{"if-match": "*"})
    status, answer = chat(site.address, "a")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert psutil.pid_exists(of_a["pid"])
    stream.finish()
    wait_for(lambda: not psutil.pid_exists(of_a["pid"]), "the engine is gone")
    assert site.admin.wait_ready("b")[0]["pid"] == of_b["pid"]
    assert chat(site.address, "b")[0] == 200


def test_an_orderly_end_of_the_agent_leaves_its_engines_running(site: Site) -> None:
    site.start_server()
    agent = site.start("agent")
    site.admin.apply(site.model("a"))
    (before,) = site.admin.wait_ready("a")
    assert agent.end() == 0
    assert "left running" in agent.output
    assert psutil.pid_exists(before["pid"])
    assert chat(site.address, "a")[0] == 200


def test_a_hangup_ends_neither_a_server_nor_an_agent(site: Site) -> None:
    server = site.start_server()
    agent = site.start("agent")
    site.admin.apply(site.model("a"))
    (before,) = site.admin.wait_ready("a")
    for one in (server, agent):
        one.process.send_signal(signal.SIGHUP)
        one.wait_output("SIGHUP ends nothing here")
    assert chat(site.address, "a")[0] == 200
    assert site.admin.wait_ready("a")[0]["pid"] == before["pid"]


def test_an_agent_told_to_stop_its_engines_takes_them_along(site: Site) -> None:
    site.start_server()
    agent = Program(["agent", "--config", str(site.folder / "agent.toml"), "--stop-engines"], site.folder, "agent")
    site.programs.append(agent)
    site.admin.apply(site.model("a"))
    (before,) = site.admin.wait_ready("a")
    assert agent.end() == 0
    assert not psutil.pid_exists(before["pid"])


def test_agents_reach_a_control_plane_over_tls_and_refuse_one_they_cannot_check(site: Site, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        skip("openssl is not installed")
    certificate, key = tmp_path / "tls.pem", tmp_path / "tls-key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    with (tmp_path / "server.toml").open("a") as file:
        file.write(f'[tls]\ncertificate = "{certificate}"\nkey = "{key}"\n')
    text = (tmp_path / "agent.toml").read_text().replace("http://", "https://")
    (tmp_path / "agent.toml").write_text(text)
    server = site.start_server()
    assert "https://" in server.output
    agent = site.start("agent")
    agent.wait_output("shows a certificate that was made by another CA")
    agent.end()
    (tmp_path / "agent.toml").write_text(text + f'[tls]\nca = "{certificate}"\n')
    again = site.start("agent")
    again.wait_output("session open")
    again.end()


def test_a_second_server_on_the_same_data_directory_is_refused_by_pid(site: Site, tmp_path: Path) -> None:
    first = site.start_server()
    with program(["server", "--config", str(tmp_path / "server.toml")], tmp_path, "second") as second:
        assert second.process.wait(30) == 4
        assert f"in use by pid {first.process.pid}" in second.output
        assert "Traceback" not in second.output
    assert site.admin("GET", "/leader")["epoch"] == 1


@pytest.mark.parametrize("which", ["admin", "router"])
def test_a_taken_port_is_one_clear_line(site: Site, tmp_path: Path, which: str) -> None:
    taken = site.admin_port if which == "admin" else site.port
    with psutil_socket(taken):
        one = site.start("server")
        assert one.process.wait(30) in (4, 6)
        lines = [line for line in one.output.splitlines() if "level=" not in line]
        assert len(lines) == 1, one.output
        assert str(taken) in lines[0]
        assert "Traceback" not in one.output


def psutil_socket(port: int) -> Any:
    import socket

    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    one.bind(("127.0.0.1", port))
    one.listen()
    return one


def test_a_wrong_agent_token_is_refused_and_the_admin_token_is_not_the_agents(site: Site, tmp_path: Path) -> None:
    site.start_server()
    text = (tmp_path / "agent.toml").read_text().replace("agent-token", "admin-token")
    (tmp_path / "agent.toml").write_text(text)
    agent = site.start("agent")
    agent.wait_output("refused the agent's token")
    assert site.admin("GET", "/nodes")["nodes"] == []


def test_without_a_store_the_file_is_the_catalog_and_an_edit_of_it_is_live(site: Site, tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    table = f"""
[[model]]
name = "a"
[[model.profile]]
engine = "command"
command = ["{sys.executable}", "{ENGINE}", "--port", "{{port}}", "--mark", "{site.marker}"]
"""
    file.write_text(file.read_text().replace('[store]\npath = "llmgw.db"\n', "") + table)
    site.start_server()
    site.start("agent")
    (before,) = site.admin.wait_ready("a")
    file.write_text(file.read_text() + table.replace('"a"', '"b"'))
    site.admin.wait_ready("b")
    file.write_text(file.read_text() + "\n[route]\nretries = 'many'\n")
    wait_for(lambda: site.admin.events("settings.refused"), "the broken edit is told")
    assert site.admin.wait_ready("a")[0]["pid"] == before["pid"]
    from tests.programs import call

    status, answer = call(site.admin.address, "POST", "/api/v1/models:apply", {"models": [site.model("c")]}, site.admin.headers)
    assert status == 409
    assert str(file) in answer["error"]["message"]
