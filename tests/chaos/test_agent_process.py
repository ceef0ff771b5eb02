"""A real `llmgw agent` process with real engines, killed, restarted, fooled and turned away."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import trio
import trio_websocket

from llmgw.agent import processes
from llmgw.agent.facts import NODE_ID_FILE
from llmgw.domain.ids import CPU_DEVICE, ClusterId, NodeId, OwnerId, ReplicaId
from llmgw.domain.lease import FencingToken
from llmgw.domain.replica import ReplicaState
from llmgw.protocol.messages import AgentEvent, AgentHello, Goodbye, Outcome, StartReplica, StopReplica
from tests.agent.harness import chat, order
from tests.chaos.agent_control_plane import TOKEN, ControlPlane, control_plane

S = ReplicaState
M1 = ReplicaId("m1-00000001")
END_DEADLINE_S = 20.0


class Agent:
    """One agent's data directory, and the process that runs on it now."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data_dir = folder / "agent"
        self.token_file = folder / "agent-token"
        self.token_file.write_text(TOKEN + "\n")
        self.log = folder / "agent.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *urls: str) -> subprocess.Popen[bytes]:
        config = self.folder / "llmgw.toml"
        config.write_text(
            f'[agent]\nname = "n1"\ncontrol_planes = [{", ".join(map(repr, urls))}]\n'
            f'data_dir = "{self.data_dir}"\ntoken_file = "{self.token_file}"\nengine_ports = "20000-20999"\n'
        )
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "llmgw", "agent", "--config", str(config)],
                stdout=log,
                stderr=log,
                env={**os.environ, "HTTP_PROXY": "http://127.0.0.1:9"},
            )
        return self.process

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(END_DEADLINE_S)

    def ours(self) -> list[processes.Process]:
        node = NodeId((self.data_dir / NODE_ID_FILE).read_text().strip())
        return [process for process in processes.survey() if processes.is_ours(process.token, processes.node_tag(node))]


@contextmanager
def agent(folder: Path) -> Iterator[Agent]:
    made = Agent(folder)
    try:
        yield made
    finally:
        if made.process is not None and made.process.poll() is None:
            made.kill()
        if (made.data_dir / NODE_ID_FILE).exists():
            for process in made.ours():
                processes.send_signal(process.identity, signal.SIGKILL)
        print(made.log.read_text() if made.log.exists() else "")


async def ready_engine(plane: ControlPlane, mode: str = "") -> tuple[int, str]:
    await plane.wait(lambda: plane.known)
    result = await plane.command(StartReplica(order(mode)))
    assert result.outcome is Outcome.DONE, result
    report = await plane.wait_state(M1, S.READY)
    return report.pid, report.url


async def test_an_agent_registers_starts_an_engine_and_tells_of_its_node(tmp_path: Path) -> None:
    async with control_plane() as plane:
        with agent(tmp_path) as a:
            a.start(plane.url)
            _, url = await ready_engine(plane)
            assert await chat(url) == 200
            (hello,) = plane.all(AgentHello)
            assert hello.facts.name == "n1"
            assert {engine.name for engine in hello.facts.engines} >= {"command"}
            assert [device.id for device in hello.facts.devices if device.id == CPU_DEVICE] == [CPU_DEVICE]
            assert hello.facts.memory_mib > 0


async def test_an_engine_serves_on_while_its_agent_is_killed_and_is_adopted_when_it_returns(tmp_path: Path) -> None:
    async with control_plane() as plane:
        with agent(tmp_path) as a:
            a.start(plane.url)
            pid, url = await ready_engine(plane, "fork")
            a.kill()
            assert await chat(url) == 200
            plane.heard.clear()
            a.start(plane.url)
            await plane.wait(lambda: plane.known and plane.sessions == 2)
            assert (plane.replicas[M1].state, plane.replicas[M1].pid) == (S.READY, pid)
            assert len(a.ours()) == 3
            assert await chat(url) == 200
            await plane.wait(lambda: [event.kind for event in plane.all(AgentEvent)])
            assert plane.all(AgentEvent)[0].kind == "replica.adopted"
            os.kill(pid, signal.SIGKILL)
            await plane.wait(lambda: plane.replicas[M1].attempt == 2)
            again = await plane.wait_state(M1, S.READY)
            assert again.pid != pid
            assert (await plane.command(StopReplica(M1, "stop", 1.0))).outcome is Outcome.DONE
            await plane.wait_state(M1, S.STOPPED)
            assert a.ours() == []


async def test_an_agent_that_is_told_to_end_leaves_its_engines_running_and_says_so(tmp_path: Path) -> None:
    async with control_plane() as plane:
        with agent(tmp_path) as a:
            process = a.start(plane.url)
            pid, url = await ready_engine(plane)
            process.send_signal(signal.SIGTERM)
            with trio.fail_after(END_DEADLINE_S):
                assert await trio.to_thread.run_sync(process.wait) == 0
            assert await chat(url) == 200
            assert "left running" in a.log.read_text()
            assert str(pid) in a.log.read_text()
            assert "Traceback" not in a.log.read_text()


async def test_a_control_plane_that_is_gone_stops_nothing_and_a_crash_is_mended_without_it(tmp_path: Path) -> None:
    with agent(tmp_path) as a:
        async with control_plane() as plane:
            a.start(plane.url)
            pid, url = await ready_engine(plane)
            port = plane.port
        os.kill(pid, signal.SIGKILL)
        with trio.fail_after(END_DEADLINE_S):
            while not [process for process in a.ours() if process.pid != pid]:
                await trio.sleep(0.05)
        async with control_plane(port) as back:
            await back.wait(lambda: back.known)
            report = await back.wait_state(M1, S.READY)
            assert report.attempt == 2
            assert await chat(url) == 200


async def test_a_deposed_leader_is_refused_also_after_the_agent_was_killed(tmp_path: Path) -> None:
    with agent(tmp_path) as a:
        async with control_plane(epoch=5, owner="ctl-new") as plane:
            a.start(plane.url)
            await ready_engine(plane)
            port = plane.port
        a.kill()
        async with control_plane(port, epoch=4, owner="ctl-old") as old:
            a.start(old.url)
            await old.wait(lambda: M1 in old.replicas)
            result = await old.command(StopReplica(M1, "I still lead", 1.0))
            assert (result.outcome, result.epoch, result.owner) == (Outcome.STALE, 5, "ctl-new")
            assert old.replicas[M1].state is S.READY
            assert not old.known


async def test_another_cluster_is_told_goodbye_and_commands_nothing(tmp_path: Path) -> None:
    with agent(tmp_path) as a:
        async with control_plane() as plane:
            a.start(plane.url)
            _, url = await ready_engine(plane)
            port = plane.port
        a.kill()
        async with control_plane(port, cluster="cluster-2", epoch=99) as other:
            a.start(other.url)
            await other.wait(lambda: other.all(Goodbye))
            assert other.all(Goodbye)[0].code == "foreign_cluster"
            assert await chat(url) == 200


async def test_odd_bytes_of_a_control_plane_disturb_nothing(tmp_path: Path) -> None:
    async with control_plane() as plane:
        with agent(tmp_path) as a:
            a.start(plane.url)
            _, url = await ready_engine(plane)
            for junk in (b"", b"\xff\xfe", "text", b'{"type": "Command"}', b"[" * 10_000):
                await plane.send_bytes(junk)
            foreign = FencingToken(ClusterId("other"), 99, OwnerId("x"))
            assert (await plane.command(StopReplica(M1, "x", 1.0), foreign)).outcome is Outcome.FOREIGN
            with suppress(trio_websocket.ConnectionClosed):  # beyond what a message may hold: the session ends
                await plane.send_bytes(b"x" * (9 * 1024 * 1024))
            await plane.wait(lambda: plane.sessions == 2 and plane.known)
            assert plane.replicas[M1].state is S.READY
            assert await chat(url) == 200
            assert "Traceback" not in a.log.read_text()


async def test_a_wrong_token_is_said_and_a_right_one_is_taken_without_a_restart(tmp_path: Path) -> None:
    async with control_plane() as plane:
        with agent(tmp_path) as a:
            a.token_file.write_text("not-the-token-0123456789\n")
            a.start(plane.url)
            await plane.wait(lambda: a.log.exists() and "refused the agent's token" in a.log.read_text())
            a.token_file.write_text(TOKEN + "\n")
            await plane.wait(lambda: plane.known)


async def test_a_second_agent_on_one_data_directory_is_refused_naming_the_first(tmp_path: Path) -> None:
    async with control_plane() as plane:
        with agent(tmp_path) as a:
            first = a.start(plane.url)
            await plane.wait(lambda: plane.known)
            second = a.start(plane.url)
            try:
                with trio.fail_after(END_DEADLINE_S):
                    assert await trio.to_thread.run_sync(second.wait) == 4
                assert f"in use by pid {first.pid}" in a.log.read_text()
                assert "Traceback" not in a.log.read_text()
            finally:
                a.process = first


async def test_a_port_that_somebody_holds_is_a_refused_command(tmp_path: Path) -> None:
    async with control_plane() as plane:
        with agent(tmp_path) as a:
            a.start(plane.url)
            await plane.wait(lambda: plane.known)
            with socket.create_server(("127.0.0.1", 0)) as holder:
                result = await plane.command(StartReplica(order(port=holder.getsockname()[1])))
            assert (result.outcome, result.code) == (Outcome.REFUSED, "port_taken")
            result = await plane.command(StartReplica(order(engine="warp")))
            assert (result.outcome, result.code) == (Outcome.REFUSED, "unknown_engine")
            result = await plane.command(StartReplica(order(checkpoint="/nowhere/m.gguf")))
            assert (result.outcome, result.text) == (Outcome.REFUSED, "checkpoint missing: /nowhere/m.gguf")


async def test_a_session_that_is_cut_is_opened_again(tmp_path: Path) -> None:
    async with control_plane() as plane:
        with agent(tmp_path) as a:
            a.start(plane.url)
            await plane.wait(lambda: plane.known)
            await plane.drop()
            await plane.wait(lambda: plane.sessions == 2 and plane.known)
