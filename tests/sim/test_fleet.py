"""The simulator: one seed behaves one way, its engines answer like engines, and it speaks to a real control plane."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from llmgw.domain.errors import Invalid
from llmgw.domain.ids import CPU_DEVICE, ReplicaId
from llmgw.domain.model import ModelKind, Profile
from llmgw.domain.replica import ReplicaOrder, ReplicaReport, ReplicaState
from llmgw.sim.engine import SimEngine
from llmgw.sim.fleet import FleetPlan, behaviour
from llmgw.sim.machine import SimMachine
from llmgw.sim.node import SimNode, gpus
from tests.programs import Admin, call, chat, free_port, free_ports, program, wait_for


def order(port: int = 20000) -> ReplicaOrder:
    return ReplicaOrder(ReplicaId("m-1"), "m", ("m",), ModelKind.CHAT, Profile("p", "vllm", "/x"), (CPU_DEVICE,), port, 100)


def test_a_seed_decides_load_times_and_crashes() -> None:
    plan = FleetPlan(seed=3, crash_share=0.5)
    one, same, other = behaviour(plan), behaviour(plan), behaviour(FleetPlan(seed=4, crash_share=0.5))
    orders = [order(20000 + index) for index in range(50)]
    assert [one.load_s(o) for o in orders] == [same.load_s(o) for o in orders]
    assert [one.load_s(o) for o in orders] != [other.load_s(o) for o in orders]
    crashes = [one.crashes(o, 1) for o in orders]
    assert crashes == [same.crashes(o, 1) for o in orders]
    assert 10 < sum(crashes) < 40


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


@pytest.mark.slow
def test_dev_shows_a_simulated_fleet_that_answers(tmp_path: Path) -> None:
    port, admin_port = free_port(), free_port()
    args = ["dev", "--sim", "4", "--port", str(port), "--admin-port", str(admin_port), "--data-dir", str(tmp_path / "d")]
    with program(args, tmp_path, "dev") as dev:
        dev.wait_output("Ctrl-C ends everything")
        admin = Admin(f"127.0.0.1:{admin_port}", (tmp_path / "d" / "admin-token").read_text().strip())
        admin.wait_ready("sim-small", 3)
        assert chat(f"127.0.0.1:{port}", "sim", max_tokens=2)[0] == 200
        assert dev.end() == 0
        assert "Traceback" not in dev.output
