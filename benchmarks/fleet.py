"""One real control plane with 1,000 simulated agents over real sessions and 5,000 replicas: at rest, and from ready to routable."""

from __future__ import annotations

import http.client
import threading
import time
from pathlib import Path

import psutil

from benchmarks.measure import Row, median, pss_mib, tree_cpu_s
from tests.programs import Admin, free_port, program, wait_for

NODES, GPUS, MODELS, REPLICAS = 1000, 8, 100, 5000
REST_S = 60.0
PROBES = 15


def rows(folder: Path) -> list[Row]:
    admin_port, port = free_port(), free_port()
    config = folder / "fleet.toml"
    config.write_text(
        f"""
[server]
data_dir = "{folder}/fleet"
admin_listen = "127.0.0.1:{admin_port}"
[store]
path = "llmgw.db"
[router]
listen = "127.0.0.1:{port}"
[auth]
required = false
[reconcile]
starts_max = 10000
"""
    )
    token_file = folder / "fleet" / "agent-token"
    with program(["server", "--config", str(config)], folder, "fleet-server") as server:
        wait_for(token_file.exists, "the agent token")
        server.wait_output("serving")
        sim_args = [
            "sim",
            "--nodes",
            str(NODES),
            "--gpus",
            str(GPUS),
            "--server",
            f"http://127.0.0.1:{admin_port}",
            "--token-file",
            str(token_file),
        ]
        with program([*sim_args, "--join-s", "20"], folder, "fleet-sim"):
            admin = Admin(f"127.0.0.1:{admin_port}", (folder / "fleet" / "admin-token").read_text().strip())
            wait_for(lambda: admin("GET", "/status")["router"] is not None and _ready_nodes(admin) == NODES, "every node is ready", 180)
            began_s = time.monotonic()
            admin.apply(*({**_model(f"m{i:03}"), "replicas": {"min": 0, "max": 100, "count": REPLICAS // MODELS}} for i in range(MODELS)))
            wait_for(lambda: admin("GET", "/status")["replicas"].get("ready", 0) == REPLICAS, "every replica is ready", 300)
            filled_s = time.monotonic() - began_s
            # Each node joined, each replica was placed and became ready: simulated agents tell what real ones tell.
            wait_for(lambda: _last_event(admin) >= NODES + 2 * REPLICAS, "all of it in the history", 60)
            process = psutil.Process(server.process.pid)
            time.sleep(15)  # the last events are written, the last list is taken
            before_s, at_s = tree_cpu_s(process), time.monotonic()
            time.sleep(REST_S)
            share = (tree_cpu_s(process) - before_s) / (time.monotonic() - at_s)
            memory = pss_mib(process)
            delays = [_routable_ms(admin, port, number) for number in range(PROBES)]
    return [
        Row(
            f"one control plane, {NODES:,} agents at rest (heartbeat 10 s), {REPLICAS:,} replicas: CPU",
            f"{share:.1%} of one core",
            "≤ 10 %",
            share <= 0.10,
        ),
        Row("the same: memory", f"{memory:.0f} MB", "≤ 300 MB", memory <= 300),
        Row(f"{REPLICAS:,} replicas placed, loaded (1 to 5 s) and published", f"{filled_s:.0f} s"),
        Row(
            f"replica ready → routable, beside {REPLICAS:,} others: p50 / worst of {PROBES}",
            f"{median(delays):.0f} / {max(delays):.0f} ms",
            "≤ 100 ms",
            median(delays) <= 100,
        ),
    ]


def _model(name: str) -> dict[str, object]:
    return {"name": name, "profile": [{"name": "p", "engine": "vllm", "checkpoint": "sim/x", "gpus": 1, "memory_mib": 60_000}]}


def _ready_nodes(admin: Admin) -> int:
    return int(admin("GET", "/status")["nodes"].get("ready", 0))


def _last_event(admin: Admin) -> int:
    return int(admin("GET", "/events?limit=1")["next"])


def _routable_ms(admin: Admin, port: int, number: int) -> float:
    """From the agent's word that a replica is ready (its event's own time) to the router's list holding it, looked at every 2 ms."""
    name = f"probe-{number}"
    seen: list[float] = []

    def watch() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        ends_s = time.monotonic() + 60
        while time.monotonic() < ends_s:
            connection.request("GET", f"/v1/models/{name}")
            answer = connection.getresponse()
            body = answer.read()
            if answer.status == 200 and b"not_ready" not in body:
                seen.append(time.time())
                return
            time.sleep(0.002)

    admin.apply({**_model(name), "replicas": 1})
    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    row = wait_for(lambda: admin.replicas(name, "ready"), f"{name} is ready")[0]
    return max(0.0, (seen[0] - _ready_wall_s(row)) * 1000)


def _ready_wall_s(row: dict[str, object]) -> float:
    from datetime import datetime

    return datetime.fromisoformat(str(row["since"]).replace("Z", "+00:00")).timestamp()
