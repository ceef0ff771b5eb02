"""Engines that are programs of their own: found in PATH or where an order said, with their versions."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from llmgw.agent import facts, processes
from llmgw.agent.engines.description import Program
from llmgw.agent.engines.programs import LOOKS_PER_ASK, Programs
from llmgw.agent.supervisor import found_engines
from llmgw.domain.ids import NodeId
from llmgw.domain.replica import ReplicaState
from tests.agent.harness import bench, order

STANDIN = Path(__file__).parent / "standins" / "llama_server.py"
VERSION = "0.6.0-dev (build 11434, commit 930e2fa59)"  # what the stand-in prints
THING = Program("thing", re.compile(r"version (.*)"))


def script(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def llama_server(folder: Path) -> Path:
    return script(folder, "llama-server", f'exec {shlex.quote(sys.executable)} {shlex.quote(str(STANDIN))} "$@"')


def looking_in(folder: Path) -> Programs:
    return Programs({"PATH": f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin"})


def test_a_node_offers_llama_cpp_with_its_version_where_llama_server_is_in_its_path(tmp_path: Path) -> None:
    assert "llama.cpp" not in [engine.name for engine in found_engines(looking_in(tmp_path), {})]
    llama_server(tmp_path)
    found = {engine.name: engine.version for engine in found_engines(looking_in(tmp_path), {})}
    assert found["llama.cpp"] == VERSION
    assert found["command"] == ""


def test_where_an_order_says_that_an_engine_is_stands_in_for_the_path(tmp_path: Path) -> None:
    elsewhere = llama_server(tmp_path / "opt")
    found = found_engines(looking_in(tmp_path), {"llama.cpp": ("/usr/bin/env", str(elsewhere))})
    assert ("llama.cpp", VERSION) in [(engine.name, engine.version) for engine in found]


def test_the_facts_of_a_node_name_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama_server(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    fixed = facts.Fixed(NodeId("n"), "n", "", "", {}, "127.0.0.1", (20000, 20999), tmp_path)
    keeper = facts.FactsKeeper(fixed, lambda: ())
    keeper.refresh()
    assert ("llama.cpp", VERSION) in [(engine.name, engine.version) for engine in keeper().engines]


async def test_an_agent_whose_replicas_run_it_from_elsewhere_knows_where_it_is(tmp_path: Path) -> None:
    elsewhere = llama_server(tmp_path / "opt")
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    async with bench(tmp_path / "agent") as b:
        assert b.supervisor.engine_commands() == {}
        await b.supervisor.start(order(engine="llama.cpp", command=(), engine_command=(str(elsewhere),), checkpoint=str(model)))
        await b.wait_state(ReplicaState.READY)
        assert b.supervisor.engine_commands() == {"llama.cpp": (str(elsewhere),)}


def test_a_program_is_asked_again_when_its_file_has_changed_and_else_only_now_and_then(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    script(tmp_path, "thing", f"echo x >> {asked}; echo version 1")
    programs = looking_in(tmp_path)
    assert [programs.version(THING) for _ in range(LOOKS_PER_ASK)] == ["1"] * LOOKS_PER_ASK
    assert len(asked.read_text().split()) == 1
    programs.version(THING)
    assert len(asked.read_text().split()) == 2
    script(tmp_path, "thing", "echo version 22")
    assert programs.version(THING) == "22"
    (tmp_path / "thing").unlink()
    assert programs.version(THING) is None


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("echo version 7 >&2", "7"),
        ("echo no such word", ""),
        ("printf 'version \\033[1m9\\007\\n'", "[1m9"),
        ("echo cannot open libcuda.so.1 >&2; exit 127", None),
        ("kill -9 $$", None),
    ],
)
def test_one_that_does_not_run_is_not_offered_and_one_that_says_odd_things_is(tmp_path: Path, text: str, version: str | None) -> None:
    script(tmp_path, "thing", text)
    assert looking_in(tmp_path).version(THING) == version


def test_a_file_that_is_no_program_is_not_offered(tmp_path: Path) -> None:
    path = tmp_path / "thing"
    path.write_bytes(b"\x7fELF nonsense")
    path.chmod(0o755)
    assert looking_in(tmp_path).version(THING) is None
    assert looking_in(tmp_path).version(THING, (str(tmp_path),)) is None
    assert looking_in(tmp_path).version(THING, ("thing\0",)) is None


def test_one_that_hangs_over_the_question_is_ended_with_what_it_started_and_offered_without_a_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmgw.agent.engines.programs.ASK_LIMIT_S", 0.5)
    pids = tmp_path / "pids"
    script(tmp_path, "thing", f"sleep 900 & echo $! > {pids}; sleep 900")
    assert looking_in(tmp_path).version(THING) == ""
    child = int(pids.read_text())
    _wait_gone(child)


def _wait_gone(pid: int) -> None:
    import time

    deadline_s = time.monotonic() + 20
    while processes.identify(pid) is not None:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_the_question_is_asked_without_our_secrets_and_without_gpus(tmp_path: Path) -> None:
    script(tmp_path, "thing", 'echo "version [$LLMGW_TOKEN][$LLAMA_ARG_HF_REPO][${CUDA_VISIBLE_DEVICES-unset}]"')
    environment = {"PATH": f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin", "LLMGW_TOKEN": "s", "LLAMA_ARG_HF_REPO": "x"}
    assert Programs(environment).version(THING) == "[][][]"
