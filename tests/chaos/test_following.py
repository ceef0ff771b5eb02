"""Real processes: a control plane without a router of its own, a router that follows it, an agent; killed one after the other."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.chaos.test_processes import ENGINE, Site, Stream
from tests.programs import Program, call, chat, free_port, wait_for

pytestmark = pytest.mark.slow


class FollowedSite(Site):
    """`port` is the router's; the control plane serves no /v1."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        server = folder / "server.toml"
        server.write_text(server.read_text().replace(f'listen = "127.0.0.1:{self.port}"', "embedded = false"))
        (folder / "router.toml").write_text(
            f"""
[router]
listen = "127.0.0.1:{self.port}"
control_planes = ["http://127.0.0.1:{self.admin_port}"]
data_dir = "{folder}/router"
token_file = "{folder}/server/agent-token"
"""
        )

    def start_router(self) -> Program:
        before = self.router_starts()
        one = self.start("router")
        wait_for(lambda: self.router_starts() > before or one.process.poll() is not None, "the router listens")
        assert one.process.poll() is None, one.output
        return one

    def router_starts(self) -> int:
        log = self.folder / "router.log"
        return log.read_text().count("listening") if log.exists() else 0

    def sessions(self) -> int:
        text = call(self.address, "GET", "/metrics")[1]
        return sum(line.startswith("llmgw_router_session{") and line.endswith(" 1.0") for line in text.splitlines())

    def metric(self, name: str) -> float:
        text = call(self.address, "GET", "/metrics")[1]
        (line,) = [line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
        return float(line.rsplit(" ", 1)[1])


@pytest.fixture
def site(tmp_path: Path) -> Iterator[FollowedSite]:
    one = FollowedSite(tmp_path)
    yield one
    one.close()


class Load(threading.Thread):
    """One client that asks again and again until it is told to end. `answers` holds every (status, who answered or why not)."""

    def __init__(self, address: str, model: str) -> None:
        super().__init__()
        self.address, self.model = address, model
        self.answers: list[tuple[int, str]] = []
        self._end = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._end.is_set():
            try:
                status, answer = chat(self.address, self.model)
            except OSError as err:
                self.answers.append((0, str(err)))
                continue
            self.answers.append((status, answer["choices"][0]["message"]["content"] if status == 200 else str(answer)))

    def finish(self) -> list[tuple[int, str]]:
        """Every answer; an assertion when one of them failed."""
        self._end.set()
        self.join(60)
        assert [answer for answer in self.answers if answer[0] != 200] == []
        return self.answers


def test_a_router_serves_through_the_death_of_its_control_plane_and_after_its_own_restart_without_one(site: FollowedSite) -> None:
    router = site.start_router()
    status, answer = chat(site.address, "a")  # nobody has pushed anything: it says so, and refuses no key and no model
    assert (status, answer["error"]["code"]) == (503, "no_list")
    assert call(site.address, "GET", "/ready")[1]["reasons"] == ["no control plane has been heard yet"]
    server = site.start_server()
    site.start("agent")
    site.admin.apply(site.model("a", 2))
    pids = {f"pid {row['pid']}" for row in site.admin.wait_ready("a", 2)}
    wait_for(lambda: chat(site.address, "a")[0] == 200, "the router answers")
    assert site.admin("GET", "/status")["router"]["following"][0]["generation"] > 0
    assert site.metric("llmgw_router_session") == 1
    assert site.metric("llmgw_router_epoch") == 1
    wait_for(lambda: len(json.loads((site.folder / "router" / "pushed.json").read_text())["endpoints"]["endpoints"]) == 2, "on disk")
    assert (site.folder / "router" / "pushed.json").stat().st_mode & 0o777 == 0o600  # it holds engines' secrets

    load, stream = Load(site.address, "a"), Stream(site.address, "a", 60)
    wait_for(lambda: stream.data, "the stream runs")
    server.kill()
    wait_for(lambda: site.metric("llmgw_router_session") == 0, "the end of the session is seen")
    before = len(load.answers)
    wait_for(lambda: len(load.answers) > before + 20, "requests go on")
    stream.finish()
    assert {who for _, who in load.finish()} <= pids

    assert router.end() == 0
    router = site.start_router()
    assert chat(site.address, "a")[0] == 200, "it serves what is on its disk before it has heard from anybody"
    assert router.output.count("Traceback") == 0

    site.start_server()
    wait_for(lambda: site.metric("llmgw_router_epoch") == 2, "the control plane that is back is obeyed")
    assert {f"pid {row['pid']}" for row in site.admin.wait_ready("a", 2)} == pids
    assert chat(site.address, "a")[0] == 200


def test_a_replica_is_withdrawn_from_a_separate_router_before_it_is_stopped_and_no_request_fails(site: FollowedSite) -> None:
    site.start_server()
    site.start_router()
    site.start("agent")
    site.admin.apply(site.model("a", 2))
    site.admin.wait_ready("a", 2)
    wait_for(lambda: chat(site.address, "a")[0] == 200, "the router answers")
    wait_for(lambda: site.metric("llmgw_endpoints_generation") == site.admin("GET", "/status")["router"]["generation"], "the whole list")
    loads = [Load(site.address, "a") for _ in range(4)]
    wait_for(lambda: all(len(load.answers) > 5 for load in loads), "the load runs")
    for count in (1, 2, 1):
        site.admin("POST", "/models/a/scale", {"count": count})
        site.admin.wait_ready("a", count)
        wait_for(lambda: len(site.admin.replicas("a")) == count, "the other one is stopped and gone")  # noqa: B023
    (left,) = site.admin.wait_ready("a", 1)
    before = len(loads[0].answers)
    wait_for(lambda: len(loads[0].answers) > before + 5, "the load goes on")
    answers = [answer for load in loads for answer in load.finish()]
    assert len({who for _, who in answers}) == 3  # two at first, one of them gone, a third one come and gone
    assert psutil.pid_exists(left["pid"])
    kinds = [event["kind"] for event in site.admin.events("replica.") if event["kind"] in ("replica.withdrawn", "replica.stopped")]
    assert kinds.count("replica.withdrawn") == 2, kinds


def test_a_wrong_token_is_told_once_and_the_right_one_is_taken_without_a_restart(site: FollowedSite) -> None:
    token = site.folder / "token"
    token.write_text("0" * 64 + "\n")
    file = site.folder / "router.toml"
    file.write_text(file.read_text().replace(f"{site.folder}/server/agent-token", str(token)))
    site.start_server()
    router = site.start_router()
    router.wait_output("token")
    assert chat(site.address, "a")[1]["error"]["code"] == "no_list"
    token.write_text((site.folder / "server" / "agent-token").read_text())
    wait_for(lambda: chat(site.address, "a")[1]["error"]["code"] == "model_not_found", "the list is there")
    assert router.output.count("no session with this control plane") == 1


def test_two_routers_of_one_data_directory_are_refused_by_pid(site: FollowedSite) -> None:
    first = site.start_router()
    file = site.folder / "second.toml"
    file.write_text((site.folder / "router.toml").read_text().replace(f":{site.port}", f":{free_port()}"))
    second = Program(["router", "--config", str(file)], site.folder, "second")
    site.programs.append(second)
    assert second.process.wait(30) == 4
    assert f"in use by pid {first.process.pid}" in second.output
    assert "Traceback" not in second.output


def test_a_router_goes_over_to_the_control_plane_that_takes_the_lease_and_no_request_fails(site: FollowedSite) -> None:
    second_port = free_port()
    server = (site.folder / "server.toml").read_text()
    server = server.replace('"ctl-1"', '"ctl-2"').replace(f"{site.folder}/server", f"{site.folder}/server-2")
    server = server.replace(f":{site.admin_port}", f":{second_port}").replace('"llmgw.db"', f'"{site.folder}/server/llmgw.db"')
    (site.folder / "server-2.toml").write_text(server)
    for role in ("router", "agent"):
        file = site.folder / f"{role}.toml"
        first = f'"http://127.0.0.1:{site.admin_port}"'
        file.write_text(file.read_text().replace(first, f'{first}, "http://127.0.0.1:{second_port}"'))
    leader = site.start_server()
    site.start_router()
    site.start("agent")
    site.admin.apply(site.model("a", 2))
    site.admin.wait_ready("a", 2)
    standby = Program(["server", "--config", str(site.folder / "server-2.toml")], site.folder, "server-2")
    site.programs.append(standby)
    standby.wait_output("serving")
    wait_for(lambda: site.sessions() == 2, "the router follows both")
    wait_for(lambda: chat(site.address, "a")[0] == 200, "the router answers")
    loads, stream = [Load(site.address, "a") for _ in range(2)], Stream(site.address, "a", 100)
    wait_for(lambda: stream.data and all(len(load.answers) > 5 for load in loads), "the load runs")
    leader.kill()
    wait_for(lambda: site.metric("llmgw_router_epoch") == 2, "the standby leads, and the router obeys it")
    assert site.metric("llmgw_router_by_standby") == 0
    before = len(loads[0].answers)
    wait_for(lambda: len(loads[0].answers) > before + 20, "requests go on")
    stream.finish()
    for load in loads:
        load.finish()


def test_a_file_with_endpoints_is_served_until_something_is_pushed_and_an_edit_of_it_changes_nothing_from_there_on(
    site: FollowedSite,
) -> None:
    port = free_port()
    engine = subprocess.Popen([sys.executable, str(ENGINE), "--port", str(port), "--mark", site.marker])
    try:
        file = site.folder / "router.toml"
        seed = f'[auth]\nrequired = false\n[[endpoint]]\nid = "e"\nurl = "http://127.0.0.1:{port}"\nmodels = ["seeded"]\n'
        file.write_text(f"{file.read_text()}\n{seed}")
        router = site.start_router()
        wait_for(lambda: chat(site.address, "seeded")[0] == 200, "the seed is served")
        site.start_server()
        wait_for(lambda: chat(site.address, "seeded")[0] == 404, "what was pushed is in force")
        router.process.send_signal(signal.SIGHUP)
        router.wait_output("the file is a seed only")
        assert chat(site.address, "seeded")[0] == 404
        router.kill()
        site.start_router()
        assert chat(site.address, "seeded")[0] == 404, "what was once pushed counts as newer than a file"
    finally:
        engine.kill()
        engine.wait()
