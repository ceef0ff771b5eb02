"""What our processes tell the supervisor that started them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from llmgw.sim.machine import SimMachine
from llmgw.wiring.notify import Notifier, take_notifier


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(10)
        yield sock


def test_every_change_is_one_message(supervisor: socket.socket) -> None:
    notifier = Notifier(supervisor.getsockname())
    notifier.ready()
    notifier.reloading()
    notifier.ready()
    notifier.stopping()
    assert [supervisor.recv(100) for _ in range(4)] == [b"READY=1", b"RELOADING=1", b"READY=1", b"STOPPING=1"]


def test_an_address_that_starts_with_an_at_sign_is_in_the_abstract_name_space() -> None:
    name = f"llmgw-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(f"\0{name}")
        sock.settimeout(10)
        take_notifier({"NOTIFY_SOCKET": f"@{name}"}).ready()
        assert sock.recv(100) == b"READY=1"


@pytest.mark.parametrize("address", ["", "relative", "/nowhere/notify", "vsock:2:1234"])
def test_a_supervisor_that_does_not_listen_is_no_fault(address: str) -> None:
    take_notifier({"NOTIFY_SOCKET": address}).ready()


def test_a_supervisor_that_does_not_read_is_not_waited_for(supervisor: socket.socket) -> None:
    notifier = Notifier(supervisor.getsockname())
    for _ in range(2000):  # more than any queue of a datagram socket holds
        notifier.ready()
    assert supervisor.recv(100) == b"READY=1"


def test_the_variables_are_not_passed_on_to_children() -> None:
    environment = {"NOTIFY_SOCKET": "/run/notify", "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid()), "PATH": "/bin"}
    assert take_notifier(environment).watchdog_s == 3.0
    assert environment == {"PATH": "/bin"}


@pytest.mark.parametrize(
    ("limit", "pid"),
    [("", ""), ("x", ""), ("-1", ""), ("3000000", "1"), ("\u0663", "")],
    ids=["none", "text", "negative", "another's", "digit"],
)
def test_a_watchdog_that_is_not_meant_for_us_is_none(limit: str, pid: str) -> None:
    assert take_notifier({"NOTIFY_SOCKET": "/run/notify", "WATCHDOG_USEC": limit, "WATCHDOG_PID": pid}).watchdog_s == 0.0


def test_the_watchdog_hears_from_us_three_times_within_its_limit(supervisor: socket.socket) -> None:
    async def main() -> None:
        with trio.move_on_after(29.0):
            await Notifier(supervisor.getsockname(), watchdog_s=30.0).beat(SimMachine(seed=1))

    trio.run(main, clock=MockClock(autojump_threshold=0))
    supervisor.settimeout(0.01)
    assert [supervisor.recv(100) for _ in range(3)] == [b"WATCHDOG=1"] * 3
    with pytest.raises(TimeoutError):
        supervisor.recv(100)


async def test_without_a_watchdog_nothing_beats(supervisor: socket.socket) -> None:
    await Notifier(supervisor.getsockname()).beat(SimMachine(seed=1))
    await Notifier("", watchdog_s=30.0).beat(SimMachine(seed=1))


@pytest.mark.parametrize("role", ["server", "router", "agent"])
def test_a_role_says_ready_once_it_serves_and_stopping_when_it_is_told_to_end(role: str, tmp_path: Path, supervisor: socket.socket) -> None:
    file = tmp_path / "llmgw.toml"
    file.write_text(
        f'[server]\ndata_dir = "{tmp_path}/server"\nadmin_listen = "127.0.0.1:0"\n[router]\nlisten = "127.0.0.1:0"\n[route]\ndrain_s = 1\n'
        f'[agent]\ncontrol_planes = ["http://127.0.0.1:9"]\ndata_dir = "{tmp_path}/agent"\n'
    )
    supervisor.settimeout(60)
    environment = {**os.environ, "NOTIFY_SOCKET": supervisor.getsockname(), "WATCHDOG_USEC": "60000000"}
    command = [sys.executable, "-m", "llmgw", role, "--config", str(file)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            assert sorted(supervisor.recv(100) for _ in range(2)) == [b"READY=1", b"WATCHDOG=1"]
            if role == "router":
                process.send_signal(1)
                assert [supervisor.recv(100) for _ in range(2)] == [b"RELOADING=1", b"READY=1"]
            process.terminate()
            assert supervisor.recv(100) == b"STOPPING=1"
            assert process.wait(30) == 0
        finally:
            process.kill()
