"""Everything is killed in random order while models change; at the end what runs is what was asked for, and nothing else."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.chaos.test_processes import Site
from tests.programs import chat, processes_with, wait_for

pytestmark = pytest.mark.slow
ROUNDS = int(os.environ.get("LLMGW_KILL_ROUNDS", "25"))
MODELS = ("a", "b", "c")


@pytest.mark.parametrize("seed", [int(os.environ.get("LLMGW_KILL_SEED", "1"))])
def test_random_kills_and_edits_end_in_what_was_asked_for(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    site = Site(tmp_path)
    wanted = dict.fromkeys(MODELS, 0)
    try:
        server, agent = site.start_server(), site.start("agent")
        for _ in range(ROUNDS):
            what = rng.choice(("server", "agent", "engine", "engine", "scale", "scale", "remove", "both"))
            if what in ("server", "both"):
                server.kill()
            if what in ("agent", "both"):
                agent.kill()
            if what in ("agent", "both"):
                agent = site.start("agent")
            if what in ("server", "both"):
                server = site.start_server()
            if what == "engine":
                running = sorted(processes_with(site.marker + "-engine"), key=lambda process: process.pid)
                if running:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(rng.choice(running).pid, signal.SIGKILL)
            if what == "scale":
                name = rng.choice(MODELS)
                wanted[name] = rng.randint(0, 3)
                table = site.model(name, wanted[name])
                table["profile"][0]["command"][-1] = site.marker + "-engine"
                site.admin.apply(table)
            if what == "remove":
                name = rng.choice(MODELS)
                if any(row["name"] == name for row in site.admin("GET", "/models")["models"]):
                    site.admin("DELETE", f"/models/{name}", **{"if-match": "*"})
                wanted[name] = 0
            time.sleep(rng.choice((0.0, 0.1, 0.5, 1.5)))

        def settled() -> bool:
            rows = site.admin.replicas()
            ready = {name: sum(row["model"] == name and row["state"] == "ready" for row in rows) for name in MODELS}
            return ready == wanted and len(rows) == sum(wanted.values()) and len(processes_with(site.marker + "-engine")) == len(rows)

        wait_for(settled, f"seed {seed}: {wanted}; last seen {site.admin.replicas()}", 120)
        pids = {row["pid"] for row in site.admin.replicas()}
        assert {process.pid for process in processes_with(site.marker + "-engine")} == pids
        for name, count in wanted.items():
            if count:
                assert chat(site.address, name)[0] == 200
        time.sleep(3)  # and it stays so: nothing flaps afterwards, which only the passing of time can show
        assert settled()
        assert "Traceback" not in server.output + agent.output
        placed = [event for event in site.admin.events() if event["kind"] == "replica.placed"]
        assert len({event["object"] for event in placed}) == len(placed)
    finally:
        site.close()
