"""`llmgw sim`: which control plane and token it uses, and a token that cannot be read is told once, whatever the number of nodes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import structlog
import trio

from llmgw.domain.errors import Invalid
from llmgw.settings.load import load_text
from llmgw.settings.running import hold
from llmgw.sim.fleet import FleetPlan
from llmgw.wiring.machine import RealMachine
from llmgw.wiring.sim import patient_dialler, running_dev, sim_main

NODES = 50


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = tmp_path / "llmgw" / "running"
    folder.mkdir(parents=True)
    return folder


def dev(folder: Path, port: int) -> int:
    file = folder / f"{port}.toml"
    file.write_text(f'server = "http://127.0.0.1:{port}"\ntoken = "t"\nagent_token_file = "/data/{port}/agent-token"\n')
    return hold(file)


def test_the_running_dev_is_found_and_of_two_the_one_that_was_named(running: Path) -> None:
    assert running_dev(()) is None
    first = dev(running, 1001)
    assert running_dev(()) == ("http://127.0.0.1:1001", Path("/data/1001/agent-token"))
    assert running_dev(("http://127.0.0.1:1002",)) is None
    second = dev(running, 1002)
    assert running_dev(()) is None
    assert running_dev(("http://127.0.0.1:1002",)) == ("http://127.0.0.1:1002", Path("/data/1002/agent-token"))
    os.close(second)
    assert running_dev(()) == ("http://127.0.0.1:1001", Path("/data/1001/agent-token"))
    os.close(first)


def test_where_no_token_is_found_it_says_where_one_is(running: Path) -> None:
    loaded = load_text(f'[server]\ndata_dir = "{running}"\n', source="x")
    before = structlog.get_config()  # a role sets up its process's logs; this process has other tests to run
    try:
        with pytest.raises(Invalid, match=r"--token-file names the agent-token of http://127\.0\.0\.1:1, which lies beside its store"):
            sim_main(loaded, FleetPlan(), server="http://127.0.0.1:1")
    finally:
        structlog.configure(**before)


async def test_a_token_that_cannot_be_read_is_told_once_and_every_node_waits_for_it(tmp_path: Path) -> None:
    token = tmp_path / "agent-token"
    token.write_text("x")  # too short for one
    dial = patient_dialler(RealMachine(), token)
    waiting, refused = [0], [0]

    async def node() -> None:
        waiting[0] += 1
        try:
            async with dial("http://127.0.0.1:1"):
                raise AssertionError("nothing listens there")
        except Exception:
            refused[0] += 1

    with structlog.testing.capture_logs() as logs, trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for _ in range(NODES):
                nursery.start_soon(node)
            while not logs or waiting[0] < NODES:
                await trio.sleep(0.01)
            assert refused == [0]
            token.write_text("a token that is long enough".replace(" ", "-"))
    assert refused == [NODES]
    assert [line["event"] for line in logs] == ["every node waits for the token"]
    assert str(token) in logs[0]["why"]
