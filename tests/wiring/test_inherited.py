"""Listening sockets that systemd hands over."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from llmgw.domain.errors import Invalid
from llmgw.wiring.inherited import take_listeners
from tests.programs import call, wait_for

# What systemd does between fork and exec: the sockets become 3, 4, ..., and LISTEN_PID names the process that they are for.
HAND_OVER = """
import os, sys
for number, descriptor in enumerate(map(int, sys.argv[1].split(","))):
    os.dup2(descriptor, 3 + number, inheritable=True)
os.environ.update(LISTEN_FDS=str(len(sys.argv[1].split(","))), LISTEN_PID=str(os.getpid()), LISTEN_FDNAMES="llmgw-router.socket")
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


def run_with(sockets: list[socket.socket], *words: str, **more: object) -> subprocess.Popen[bytes]:
    # High numbers, so that handing one over never overwrites another.
    copies = [os.dup2(sock.fileno(), 100 + number, inheritable=True) for number, sock in enumerate(sockets)]
    try:
        command = [sys.executable, "-c", HAND_OVER, ",".join(map(str, copies)), *words]
        return subprocess.Popen(command, pass_fds=copies, **more)  # type: ignore[call-overload,no-any-return]
    finally:
        for copy in copies:
            os.close(copy)


def test_sockets_for_another_process_and_none_at_all_are_left_alone() -> None:
    for environment in (
        {},
        {"LISTEN_FDS": "1"},
        {"LISTEN_FDS": "1", "LISTEN_PID": "1"},
        {"LISTEN_FDS": "x", "LISTEN_PID": str(os.getpid())},
    ):
        assert take_listeners(environment) == ()
        assert environment == {}


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM], ids=["stream", "datagram"])
def test_a_socket_that_does_not_listen_is_refused_by_its_number(kind: socket.SocketKind) -> None:
    code = "import os\nfrom llmgw.wiring.inherited import take_listeners\ntake_listeners(os.environ)\n"
    with socket.socket(socket.AF_INET, kind) as sock, run_with([sock], "-c", code, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        said = process.stderr.read().decode()
    assert "descriptor 3 of LISTEN_FDS is no listening stream socket" in said
    assert Invalid.__name__ in said


@pytest.mark.parametrize("workers", [1, 2])
def test_a_router_serves_on_the_sockets_it_was_handed_and_leaves_them_open_for_the_next(tmp_path: Path, workers: int) -> None:
    file = tmp_path / "llmgw.toml"
    file.write_text(f'[router]\nlisten = "127.0.0.1:1"\nworkers = {workers}\n[route]\ndrain_s = 1\n')  # a port that it could not open
    path = tmp_path / "router.sock"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(path))
        unix.listen()
        address = f"127.0.0.1:{tcp.getsockname()[1]}"
        for _ in range(2):
            log = (tmp_path / "log").open("wb")
            with log, run_with([tcp, unix], "-m", "llmgw", "router", "--config", str(file), stdout=log, stderr=log) as process:
                try:
                    # Asked before it serves: the connection waits in the socket.
                    assert call(address, "GET", "/health", limit_s=60)[0] == 200
                    with socket.socket(socket.AF_UNIX) as client:
                        client.settimeout(60)
                        client.connect(str(path))
                        client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                        assert client.recv(100).startswith(b"HTTP/1.1 200")
                    wait_for(lambda: b"handed over" in (tmp_path / "log").read_bytes(), "a line about the sockets")
                    process.send_signal(signal.SIGTERM)
                    assert process.wait(30) == 0
                finally:
                    process.kill()
            assert path.exists(), "the name of a socket that is not ours stays"
