"""Outputs that are closed, full or read by nobody: what cannot be written is lost, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.router.fakes import CHAT, DONE, END, FIN, OK, SH, Client, E, Engine, get, post, until

FILE = """
[router]
listen = "127.0.0.1:{port}"
workers = {workers}
[auth]
required = false
[[endpoint]]
id = "u1"
url = "http://127.0.0.1:{engine}"
models = ["m1"]
"""


@pytest.fixture
def engine() -> Iterator[Engine]:
    found = Engine()
    yield found
    found.close()


def free() -> int:
    from tests.programs import free_port

    return free_port()


def ask(port: int) -> int:
    with Client(("127.0.0.1", port)) as client:
        client.send(post(CHAT, key=""))
        return client.answer().status


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("how", ["nobody reads", "full"])
def test_a_router_whose_log_cannot_be_written_goes_on_and_so_do_its_streams(engine: Engine, tmp_path: Path, how: str, workers: int) -> None:
    import threading

    go = threading.Event()
    port = free()
    config = tmp_path / "router.toml"
    config.write_text(FILE.format(port=port, engine=engine.port, workers=workers))
    reader, writer = os.pipe()
    output = writer if how == "nobody reads" else os.open("/dev/full", os.O_WRONLY)
    process = subprocess.Popen([sys.executable, "-m", "llmgw", "router", "--config", str(config)], stdout=output, stderr=output)
    try:
        os.close(writer)
        if how == "nobody reads":
            until(lambda: b"listening" in os.read(reader, 65536), "it serves")
        os.close(reader)
        if how == "full":
            os.close(output)
        until(lambda: _answers(port), "it serves")
        engine.script = [SH, E("a"), ["hold", go], FIN, DONE, END]
        with Client(("127.0.0.1", port)) as client:
            client.send(post(CHAT.replace(b"]}", b'],"stream":true}'), key=""))
            client.until(b'"a"')
            process.send_signal(signal.SIGHUP)
            engine.once = [[OK]] * 3
            for _ in range(3):
                assert ask(port) == 200
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            go.set()
            client.until(b"[DONE]")
        assert process.wait(20) == 0
    finally:
        go.set()
        if process.poll() is None:
            process.kill()
        process.wait()


def _answers(port: int) -> bool:
    try:
        with Client(("127.0.0.1", port)) as client:
            client.send(get("/health", key=""))
            return client.answer().status == 200
    except OSError:
        return False


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_outputs_that_are_closed_at_the_start_are_no_fault(closed: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m llmgw version {closed}"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_file_that_was_emptied_changes_nothing(engine: Engine, tmp_path: Path) -> None:
    port = free()
    config = tmp_path / "router.toml"
    config.write_text(FILE.format(port=port, engine=engine.port, workers=1))
    err = (tmp_path / "err").open("w+")
    process = subprocess.Popen([sys.executable, "-m", "llmgw", "router", "--config", str(config)], stdout=subprocess.DEVNULL, stderr=err)
    try:
        until(lambda: _answers(port), "it serves")
        config.write_text("")
        until(lambda: "not written whole" in (tmp_path / "err").read_text(), "it is told")
        assert ask(port) == 200
    finally:
        process.terminate()
        process.wait()
        err.close()
