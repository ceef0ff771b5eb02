"""How long the short commands take, beside an interpreter that does nothing."""

from __future__ import annotations

import sys

from benchmarks.measure import Row, run_ms
from tests.programs import free_port, program, wait_for

ROUNDS = 15


def rows(folder) -> list[Row]:  # type: ignore[no-untyped-def]
    bare, _ = run_ms([sys.executable, "-c", "pass"], ROUNDS)
    version, version_cpu = run_ms([sys.executable, "-m", "llmgw", "version"], ROUNDS)
    admin, data = free_port(), folder / "startup"
    with program(["dev", "--no-engine", "--port", "0", "--admin-port", str(admin), "--data-dir", str(data)], folder, "startup") as dev:
        dev.wait_output("Ctrl-C ends everything")
        wait_for((data / "admin-token").exists, "the admin token")
        env = {"LLMGW_TOKEN": (data / "admin-token").read_text().strip()}
        status, status_cpu = run_ms([sys.executable, "-m", "llmgw", "ctl", "--server", f"http://127.0.0.1:{admin}", "status"], ROUNDS, env)
        dev.end()
    return [
        Row("`llmgw version`", f"{version:.0f} ms ({version_cpu:.0f} ms CPU; python alone {bare:.0f} ms)", "≤ 100 ms", version <= 100),
        Row("`llmgw ctl status`", f"{status:.0f} ms ({status_cpu:.0f} ms CPU)", "≤ 250 ms", status <= 250),
    ]
