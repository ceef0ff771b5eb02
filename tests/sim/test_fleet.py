"""The simulator: one seed behaves one way, its engines answer like engines, and it speaks to a real control plane."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from llmgw.admin.api.status import status_view
from llmgw.domain.errors import Invalid
from llmgw.domain.ids import CPU_DEVICE, ReplicaId
from llmgw.domain.model import ModelKind, Profile
from llmgw.domain.replica import ReplicaOrder, ReplicaReport, ReplicaState
from llmgw.protocol.messages import LogRequest
from llmgw.sim.engine import SimEngine
from llmgw.sim.fleet import FleetPlan, behaviour, engine, run_fleet
from llmgw.sim.machine import SimMachine
from llmgw.sim.node import SimNode, gpus
from llmgw.sim.replicas import Behaviour, SimReplicas
from llmgw.wiring.dev import Simulated
from tests.control.world import URL, World, model, run_world
from tests.programs import Admin, call, chat, free_port, free_ports, program, wait_for


def order(port: int = 20000, name: str = "m-1") -> ReplicaOrder:
    return ReplicaOrder(ReplicaId(name), "m", ("m",), ModelKind.CHAT, Profile("p", "vllm", "/x"), (CPU_DEVICE,), port, 100)


def test_a_seed_decides_load_times_and_crashes() -> None:
    plan = FleetPlan(seed=3, crash_share=0.5)
    one, same, other = behaviour(plan), behaviour(plan), behaviour(FleetPlan(seed=4, crash_share=0.5))
    orders = [order(20000 + index) for index in range(50)]
    assert [one.load_s(o) for o in orders] == [same.load_s(o) for o in orders]
    assert [one.load_s(o) for o in orders] != [other.load_s(o) for o in orders]
    crashes = [one.crashes(o, 1) for o in orders]
    assert crashes == [same.crashes(o, 1) for o in orders]
    assert 10 < sum(crashes) < 40


@asynccontextmanager
async def serving(engine: Callable[[ReplicaReport], SimEngine], name: str = "m-1") -> AsyncIterator[tuple[SimEngine, int]]:
    """The engine at a free port, with the port."""
    port = free_port()
    made = engine(ReplicaReport(order(port, name), ReplicaState.READY, url=f"http://127.0.0.1:{port}"))
    async with trio.open_nursery() as nursery:
        await nursery.start(made.serve)
        yield made, port
        nursery.cancel_scope.cancel()


async def asked(port: int, path: str, body: object) -> tuple[int, Any]:
    return await trio.to_thread.run_sync(lambda: call(f"127.0.0.1:{port}", "POST", path, body))


async def test_a_seed_decides_speeds_and_words_whatever_a_replica_is_called() -> None:
    async def heard(plan: FleetPlan, name: str) -> tuple[float, str]:
        port = 20_000
        report = ReplicaReport(order(port, name), ReplicaState.READY)
        made = engine(SimMachine(1), plan, report)
        return made.tokens_per_s, "".join([word async for word in made._words(8)])

    fast = FleetPlan(seed=3, tokens_per_s=(2_000.0, 8_000.0))
    assert await heard(fast, "m-00000001") == await heard(fast, "m-ffffffff")
    assert await heard(fast, "m-1") != await heard(attrs.evolve(fast, seed=4), "m-1")


async def test_a_hung_request_ends_when_its_client_hangs_up_and_so_does_a_slow_one() -> None:
    for hang_share, stream in ((1.0, False), (0.0, False), (0.0, True)):
        async with serving(lambda report, share=hang_share: SimEngine(SimMachine(1), report, 5.0, share)) as (made, port):
            client = await trio.open_tcp_stream("127.0.0.1", port)
            body = json.dumps({"model": "m", "max_tokens": 10_000, "stream": stream}).encode()
            await client.send_all(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
            await until(lambda made=made: made.running == 1)
            await client.aclose()
            await until(lambda made=made: made.running == 0)


async def test_two_requests_sent_at_once_on_one_connection_do_not_end_each_other() -> None:
    async with serving(lambda report: SimEngine(SimMachine(1), report, 200.0)) as (made, port):
        client = await trio.open_tcp_stream("127.0.0.1", port)
        body = b'{"model": "m", "max_tokens": 20}'
        await client.send_all(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        await until(lambda: made.running == 1)
        await client.send_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        data = b""
        while data.count(b"HTTP/1.1 200") < 2:
            data += await client.receive_some()
        assert data.endswith(b'{"status": "ok"}')
        await client.aclose()


async def test_embeddings_are_answered_as_embeddings_and_what_is_not_simulated_is_refused() -> None:
    async with serving(lambda report: SimEngine(SimMachine(1), report, 1000.0)) as (_, port):
        status, answer = await asked(port, "/v1/embeddings", {"model": "m", "input": ["a", "b", "a"]})
        assert (status, answer["object"], answer["usage"]["prompt_tokens"]) == (200, "list", 3)
        vectors = [row["embedding"] for row in answer["data"]]
        assert [row["index"] for row in answer["data"]] == [0, 1, 2]
        assert vectors[0] == vectors[2] != vectors[1]
        assert len((await asked(port, "/v1/embeddings", {"model": "m", "input": "a"}))[1]["data"]) == 1
        status, refused = await asked(port, "/v1/rerank", {"model": "m", "query": "a", "documents": ["b"]})
        assert (status, refused["error"]["message"]) == (404, "a simulated engine does not serve /v1/rerank")


def test_a_simulated_agent_tells_what_a_real_one_tells() -> None:
    async def main(world: World) -> None:
        controller = await world.start_control(model("a"), model("b"))
        shaky = Behaviour(load_s=lambda order: 0.5, crashes=lambda order, attempt: order.model == "b")
        await world.add_node("n1", behaviour=shaky)
        await world.wait(lambda: len(world.served("a")) == 1)
        await world.wait(lambda: any(r.state is ReplicaState.FAILED for r in controller.replicas()))
        (of_a,) = world.ready("a")
        controller.restart_replica(of_a)
        await world.wait(lambda: world.served("a") == [])
        await world.wait(lambda: world.served("a") == [of_a])
        await controller.models.remove("a")
        await world.wait(lambda: all(r.model != "a" for r in controller.replicas()))
        told: dict[str, list[str]] = {}
        for event in await world.store_events():
            told.setdefault(event.object.partition("-")[0], []).append(event.kind)
        assert [kind for kind in told["replica/a"] if kind not in ("replica.placed", "replica.restart", "replica.withdrawn")] == [
            "replica.ready", "replica.restarting", "replica.ready", "replica.stopped",
        ]  # fmt: skip
        assert told["replica/b"] == ["replica.placed", *["replica.crashed"] * 5, "replica.failed"]

    run_world(main)


def test_simulated_nodes_have_the_time_of_day_of_the_machine_they_run_on_also_when_it_is_stepped() -> None:
    """They had a fixed date, so each of them stood among the problems of every control plane."""

    async def main(world: World) -> None:
        world.machine.wall_offset_s += 95_954_968
        controller = await world.start_control()
        await world.nursery.start(run_fleet, world.machine, FleetPlan(nodes=2, gpus=1), world.network.dial, (URL,))
        await world.wait(lambda: len(controller.observe().nodes) == 2)
        for step_s in (0.0, 3600.0):
            world.machine.wall_offset_s += step_s
            await world.wait(lambda: all(abs(node.clock_ahead_s) < 1 for node in controller.observe().nodes), "the right time")
        assert status_view(controller)["problems"] == []

    run_world(main)


async def test_a_simulated_log_has_each_line_once_however_it_is_read() -> None:
    async with trio.open_nursery() as nursery:
        replicas = SimReplicas(SimMachine(1), nursery, Behaviour(load_s=lambda order: 0.0), gpus(0, "n"))
        await replicas.start(order())
        await until(lambda: replicas.reports()[0].state is ReplicaState.READY)
        whole = await replicas.log(LogRequest("1", ReplicaId("m-1")))
        assert (whole.text, whole.attempts) == ("simulated engine of m, attempt 1\n", (1,))
        after = await replicas.log(LogRequest("2", ReplicaId("m-1"), offset=whole.next_offset))
        assert (after.text, after.offset, after.next_offset) == ("", whole.next_offset, whole.next_offset)
        assert (await replicas.log(LogRequest("3", ReplicaId("m-1"), offset=-3))).text == " 1\n"
        assert "not kept" in (await replicas.log(LogRequest("4", ReplicaId("m-1"), attempt=2))).error
        assert "is not on this node" in (await replicas.log(LogRequest("5", ReplicaId("m-2")))).error
        nursery.cancel_scope.cancel()


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(30):
        while not condition():
            await trio.sleep(0.01)


@pytest.mark.parametrize(
    ("plan", "named"),
    [
        (FleetPlan(nodes=0), "--nodes"),
        (FleetPlan(nodes=100_000), "--nodes"),
        (FleetPlan(gpus=99), "--gpus"),
        (FleetPlan(nodes=5000, serve=True), "has ports for"),
    ],
)
def test_an_impossible_fleet_is_refused_with_the_reason(plan: FleetPlan, named: str) -> None:
    with pytest.raises(Invalid, match=named):
        plan.check()


def test_dev_names_the_option_that_was_given() -> None:
    most = FleetPlan(serve=True).served_max
    Simulated(most).check()
    with pytest.raises(Invalid, match=rf"^--sim: this machine has ports for the engines of {most} nodes, not of 3000$"):
        Simulated(3000).check()


async def test_a_simulated_node_has_what_a_machine_of_its_gpus_has() -> None:
    async with trio.open_nursery() as nursery:
        for count in (0, 8):
            node = SimNode(SimMachine(1), nursery, "n1", lambda url: None, (), devices=gpus(count, "n1"))  # type: ignore[arg-type, return-value]
            facts = node.facts()
            assert facts.cpus >= 8 * count + 1
            assert facts.memory_mib == next(device.total_mib for device in facts.devices if device.id == CPU_DEVICE)
            assert facts.disk_free_mib > 1_000_000


def test_no_two_nodes_share_a_port() -> None:
    plan = FleetPlan(nodes=50, gpus=8)
    ports = [port for index in range(plan.nodes) for port in range(plan.ports(index)[0], plan.ports(index)[1] + 1)]
    assert len(set(ports)) == len(ports)


async def test_an_engine_answers_with_its_key_only_whole_and_streamed() -> None:
    port = free_port()
    report = ReplicaReport(order(port), ReplicaState.READY, url=f"http://127.0.0.1:{port}", key="secret")
    engine = SimEngine(SimMachine(1), report, tokens_per_s=1000.0)
    key = {"authorization": "Bearer secret"}

    async def ask(path: str, body: object, headers: dict[str, str]) -> tuple[int, object]:
        return await trio.to_thread.run_sync(lambda: call(f"127.0.0.1:{port}", "POST", path, body, headers))

    async with trio.open_nursery() as nursery:
        await nursery.start(engine.serve)
        assert (await ask("/v1/chat/completions", {"model": "m", "max_tokens": 3}, {}))[0] == 401
        status, answer = await ask("/v1/chat/completions", {"model": "m", "max_tokens": 3}, key)
        assert status == 200
        assert answer["usage"]["completion_tokens"] == 3
        assert (await ask("/v1/completions", {"model": "m", "max_tokens": 3}, key))[1]["choices"][0]["text"]
        assert (await ask("/v1/chat/completions", b"nonsense", key))[0] == 400
        status, text = await ask("/v1/chat/completions", {"model": "m", "max_tokens": 4, "stream": True}, key)
        assert text.count("data: {") == 5
        assert text.endswith("data: [DONE]\n\n")
        status, metrics = await trio.to_thread.run_sync(lambda: call(f"127.0.0.1:{port}", "GET", "/metrics"))
        assert "vllm:num_requests_running 0" in metrics
        assert engine.running == 0
        nursery.cancel_scope.cancel()


@pytest.mark.slow
def test_simulated_nodes_serve_through_a_real_control_plane_and_router(tmp_path: Path) -> None:
    admin_port, port = free_port(), free_port()
    config = tmp_path / "server.toml"
    config.write_text(
        f'[server]\ndata_dir = "{tmp_path}/s"\nadmin_listen = "127.0.0.1:{admin_port}"\n[store]\npath = "x.db"\n'
        f'[router]\nlisten = "127.0.0.1:{port}"\n[auth]\nrequired = false\n'
    )
    with program(["server", "--config", str(config)], tmp_path, "server") as server:
        server.wait_output("serving")
        admin = Admin(f"127.0.0.1:{admin_port}", (tmp_path / "s" / "admin-token").read_text().strip())
        command = ["sim", "--nodes", "3", "--gpus", "2", "--serve", "--server", f"http://127.0.0.1:{admin_port}"]
        with program([*command, "--token-file", str(tmp_path / "s" / "agent-token")], tmp_path, "sim") as sim:
            wait_for(lambda: len(admin("GET", "/nodes")["nodes"]) == 3, "three nodes")
            admin.apply({"name": "m", "replicas": 6, "profile": [{"engine": "vllm", "checkpoint": "x", "gpus": 1, "memory_mib": 70000}]})
            rows = admin.wait_ready("m", 6)
            assert len({(row["node"], tuple(row["gpus"])) for row in rows}) == 6
            assert chat(f"127.0.0.1:{port}", "m", max_tokens=3)[1]["usage"]["completion_tokens"] == 3
            assert sim.end() == 0
    with program(["sim", "--server", "http://127.0.0.1:1", "--token-file", str(tmp_path / "nowhere")], tmp_path, "lost") as lost:
        assert lost.process.wait(30) == 3
        assert "nowhere" in lost.output
        assert "Traceback" not in lost.output
    assert free_ports(2)


def ctl(state: Path, *args: str) -> str:
    """What `ctl` prints for a user whose state is there and who says neither server nor token."""
    environment = {key: value for key, value in os.environ.items() if key != "LLMGW_TOKEN"}
    environment |= {"XDG_STATE_HOME": str(state), "XDG_CONFIG_HOME": str(state)}
    command = [sys.executable, "-m", "llmgw", "ctl", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    return done.stdout + done.stderr


@pytest.mark.slow
def test_dev_shows_a_simulated_fleet_that_answers_and_ctl_and_sim_find_it(tmp_path: Path) -> None:
    port, admin_port = free_port(), free_port()
    state = tmp_path / "state"
    args = ["dev", "--sim", "4", "--port", str(port), "--admin-port", str(admin_port), "--data-dir", str(tmp_path / "d")]
    with program(args, tmp_path, "dev") as dev:
        dev.wait_output("Ctrl-C ends everything")
        assert "`llmgw ctl status` finds it by itself" in dev.output
        admin = Admin(f"127.0.0.1:{admin_port}", (tmp_path / "d" / "admin-token").read_text().strip())
        rows = admin.wait_ready("sim-small", 3)
        assert chat(f"127.0.0.1:{port}", "sim", max_tokens=2)[0] == 200
        admin.wait_ready("sim-large", 1)
        assert "sim-small  3/3" in ctl(state, "status")
        assert ctl(state, "status", "--check").startswith("ok: 2 models")
        assert "placed here because: " in ctl(state, "explain", "replica", rows[0]["id"])
        with program(["sim", "--nodes", "2", "--gpus", "1"], tmp_path, "sim") as sim:
            sim.wait_output("simulating")
            assert f"http://127.0.0.1:{admin_port}" in sim.output
            sim.end()
        second = ["dev", "--no-engine", "--port", "0", "--admin-port", "0", "--data-dir", str(tmp_path / "e")]
        with program(second, tmp_path, "second") as other:
            other.wait_output("Ctrl-C ends everything")
            named = re.search(r"`llmgw ctl --server (http://127\.0\.0\.1:\d+) status` finds it by itself", other.output)
            assert named
            assert "several `llmgw dev` run here" in ctl(state, "status")
            assert "models    none" in ctl(state, "--server", named[1], "status")
            assert "sim-small" in ctl(state, "--server", f"http://127.0.0.1:{admin_port}", "status")
            assert other.end() == 0
        assert dev.end() == 0
        assert "Traceback" not in dev.output
    assert "is a control plane running here?" in ctl(state, "--server", f"http://127.0.0.1:{admin_port}", "status")


@pytest.mark.slow
def test_without_a_home_to_write_to_dev_runs_and_says_how_ctl_reaches_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    args = ["dev", "--no-engine", "--port", "0", "--admin-port", "0", "--data-dir", str(tmp_path / "d")]
    with program(args, tmp_path, "dev", {"XDG_STATE_HOME": str(tmp_path / "file")}) as dev:
        dev.wait_output("Ctrl-C ends everything")
        assert re.search(r"`llmgw ctl --server http://127\.0\.0\.1:\d+ status` with LLMGW_TOKEN set to what that holds", dev.output)
        assert "Traceback" not in dev.output
        assert dev.end() == 0
