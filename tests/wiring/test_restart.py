"""A control plane whose file changes in a machine's key ends in order and is there again: by its supervisor, or by itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos import unit
from tests.programs import Program, call, children_of, free_port, wait_for

pytestmark = pytest.mark.slow


def settings(folder: Path, port: int, level: str, more: str = "") -> str:
    return f"""
[server]
data_dir = "{folder}/data"
admin_listen = "127.0.0.1:{port}"
[router]
embedded = false
[log]
level = "{level}"
{more}"""


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[tuple[Path, int, Program]]:
    """A control plane without a store and without a supervisor."""
    port = free_port()
    file = tmp_path / "llmgw.toml"
    file.write_text(settings(tmp_path, port, "info"))
    one = Program(["server", "--config", str(file)], tmp_path, "server")
    try:
        one.wait_output("event=serving")
        yield file, port, one
    finally:
        one.close()


def test_without_a_supervisor_it_becomes_its_successor_in_place(alone: tuple[Path, int, Program]) -> None:
    file, port, one = alone
    file.write_text(settings(file.parent, port, "debug"))
    wait_for(lambda: one.output.count("event=serving") == 2, f"it serves again; {one.output}")
    assert one.process.poll() is None
    assert "level=debug" in one.output
    assert call(f"127.0.0.1:{port}", "GET", "/health")[0] == 200
    assert one.end() == 0


def test_a_file_that_would_not_start_restarts_nothing(alone: tuple[Path, int, Program]) -> None:
    file, port, one = alone
    file.write_text(settings(file.parent, port, "info", '[tls]\ncertificate = "/nowhere.pem"\nkey = "/nowhere.key"\n'))
    wait_for(lambda: "the changed file was not taken" in one.output, "it says why")
    assert "/nowhere.pem" in one.output
    assert one.output.count("event=serving") == 1
    file.write_text(settings(file.parent, port, "info"))
    wait_for(lambda: "the changed file is in force" in one.output, "the old one again is fine")
    assert "event=restarting" not in one.output


def test_a_supervisor_starts_it_anew(tmp_path: Path) -> None:
    port = free_port()
    file = tmp_path / "llmgw.toml"
    file.write_text(settings(tmp_path, port, "info"))
    service = tmp_path / "test.service"
    command = f"{sys.executable} -m llmgw server --config {file}"
    service.write_text(f"[Service]\nType=notify\nExecStart={command}\nRestart=always\nRestartSec=0.2\n")
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, unit.__file__, str(service)], stdout=out, stderr=out)
    try:
        wait_for(lambda: log.read_text().count("event=serving") == 1, "it serves")
        (first,) = children_of(process.pid)
        file.write_text(settings(tmp_path, port, "debug"))
        wait_for(lambda: log.read_text().count("event=serving") == 2, f"it serves again; {log.read_text()}")
        (second,) = children_of(process.pid)
        assert second != first
    finally:
        process.terminate()
        process.wait(40)
