"""Ports, checkpoints, asking, the real machine and the WebSocket: small parts against the real thing."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
import trio_websocket

from llmgw.agent import checkpoints, ports, processes
from llmgw.agent.asking import ANSWER_BYTES_MAX, ConnectRefused, ask
from llmgw.domain.errors import Denied, Invalid, TooLarge, Unavailable, UpstreamFailed
from llmgw.domain.ids import NodeId, ReplicaId
from llmgw.protocol.channel import ChannelClosed
from llmgw.protocol.messages import Goodbye
from llmgw.protocol.websocket import dial
from llmgw.wiring.machine import RealDisk, RealMachine
from tests.chaos.agent_control_plane import TOKEN, control_plane
from tests.programs import free_port


def test_a_free_port_is_free_and_a_held_one_is_named() -> None:
    assert ports.why_taken("127.0.0.1", free_port()) is None
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        assert ports.why_taken("127.0.0.1", port) == f"port {port} is taken on 127.0.0.1"
    with socket.create_server(("0.0.0.0", 0)) as everywhere:
        assert ports.why_taken("127.0.0.1", everywhere.getsockname()[1])


def test_a_port_with_lingering_connections_of_a_server_that_is_gone_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        client = socket.create_connection(address)
        accepted, _ = server.accept()
        accepted.close()  # the server's side lingers after it closed first
        client.close()
    assert ports.why_taken(*address) is None


def test_an_address_that_is_not_this_machines_is_said_so() -> None:
    assert "192.0.2.1" in (ports.why_taken("192.0.2.1", 20000) or "")
    assert "no-such-host.invalid" in (ports.why_taken("no-such-host.invalid", 20000) or "")


@pytest.mark.parametrize(
    ("text", "clashes"),
    [("32768\t60999\n", False), ("20500 30000", True), ("1024 65535", True), ("1 19999", False), ("", False), ("x y", False)],
)
def test_a_range_that_overlaps_the_kernels_own_is_warned_about(text: str, clashes: bool) -> None:
    assert (ports.clash((20000, 20999), text) is not None) is clashes


def test_a_checkpoint_is_a_path_or_below_the_checkpoints_folder(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"x")
    assert checkpoints.resolve("m.gguf", tmp_path) == str(tmp_path / "m.gguf")
    assert checkpoints.resolve(str(tmp_path / "m.gguf"), Path("/elsewhere")) == str(tmp_path / "m.gguf")
    assert checkpoints.resolve("", tmp_path) == ""
    with pytest.raises(Invalid, match=f"checkpoint missing: {tmp_path}/gone") as caught:
        checkpoints.resolve("gone", tmp_path)
    assert caught.value.code == "checkpoint_missing"


def test_memory_is_estimated_from_the_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("a", "sub/b"):
        with open(tmp_path / name, "wb") as file:
            file.truncate(512 * 1024 * 1024)
    os.symlink(tmp_path / "nowhere", tmp_path / "dangling")
    assert checkpoints.estimate_mib(str(tmp_path)) == 1229 + 512
    assert checkpoints.estimate_mib(str(tmp_path / "a")) == 615 + 512
    assert checkpoints.estimate_mib("") == 512
    assert checkpoints.free_mib(tmp_path / "not" / "there") > 0


@pytest.mark.parametrize(
    ("token", "ours"),
    [("m1-1.1.TAGff", True), ("m.1-1.1.TAGff", True), ("m1-1.1.othr", False), ("", False), ("TAG", False), ("m1.TAG", False)],
)
def test_a_start_token_tells_its_node(token: str, ours: bool) -> None:
    tag = processes.node_tag(NodeId("n"))
    assert processes.is_ours(token.replace("TAG", tag), tag) is ours
    assert processes.is_ours(processes.start_token(ReplicaId("m1-1"), 2, tag, "ff"), tag)


@contextmanager
def server(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """Answers one connection as the test says."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(20)


def sends(*pieces: bytes) -> Callable[[socket.socket], None]:
    def answer(connection: socket.socket) -> None:
        connection.recv(65536)
        for piece in pieces:
            connection.sendall(piece)

    return answer


async def test_an_answer_is_read_in_any_framing() -> None:
    for pieces in (
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n", b"ok"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\no\r\n1\r", b"\nk\r\n0\r\n\r\n"),
        (b"HTTP/1.1 200 OK\r\n\r\n", b"ok"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",),
    ):
        with server(sends(*pieces)) as port:
            answer = await ask("127.0.0.1", port, "GET", "/x")
            assert (answer.status, answer.body, answer.good) == (200, b"ok", True)


async def test_an_answer_that_is_none_is_an_error_of_its_kind() -> None:
    with pytest.raises(ConnectRefused):
        await ask("127.0.0.1", free_port(), "GET", "/x")
    with pytest.raises(ConnectRefused):
        await ask("localhost", free_port(), "GET", "/x")
    with server(sends()) as port, pytest.raises(Unavailable):
        await ask("127.0.0.1", port, "GET", "/x")
    with server(sends(b"SSH-2.0-x\r\n")) as port, pytest.raises(UpstreamFailed):
        await ask("127.0.0.1", port, "GET", "/x")
    with server(sends(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n")) as port, pytest.raises(Unavailable):
        await ask("127.0.0.1", port, "GET", "/x")


async def test_an_answer_without_end_is_cut_off() -> None:
    def endless(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        try:
            for _ in range(2 * ANSWER_BYTES_MAX // 65536):
                connection.sendall(b"x" * 65536)
        except OSError:
            pass

    with server(endless) as port, pytest.raises(TooLarge):
        await ask("127.0.0.1", port, "GET", "/x")


def test_a_state_file_is_whole_private_and_as_it_was_when_a_write_fails(tmp_path: Path) -> None:
    disk = RealDisk()
    path = tmp_path / "state.json"
    assert disk.read(path) is None
    disk.write(path, b"one")
    assert disk.read(path) == b"one"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    disk.write(path, b"two")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(OSError, match="No such file"):
        disk.write(tmp_path / "no" / "state.json", b"x")
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


async def test_the_machines_clock_counts_and_its_sleep_reaches_the_time() -> None:
    machine = RealMachine()
    until_s = machine.now_s() + 0.05
    await machine.sleep_until(until_s)
    assert machine.now_s() >= until_s
    await machine.sleep_until(0.0)
    with trio.move_on_after(0.05) as scope:
        await machine.sleep_until(float("inf"))
    assert scope.cancelled_caught
    assert machine.fresh_hex(4) != machine.fresh_hex(4)
    assert await machine.run_sync(lambda: 7) == 7


async def test_a_session_that_does_not_open_is_one_plain_error() -> None:
    async with control_plane() as plane:
        with pytest.raises(Denied, match="refused the agent's token"):
            async with dial(plane.url, "wrong"):
                pass
        with pytest.raises(Unavailable, match="status 404"):
            async with dial(f"{plane.url}/elsewhere", TOKEN):
                pass
    with pytest.raises(Unavailable, match="cannot be reached"):
        async with dial(f"http://127.0.0.1:{free_port()}", TOKEN):
            pass
    with pytest.raises(Unavailable, match="cannot be reached"):
        async with dial("http://no-such-host.invalid:1", TOKEN):
            pass
    with server(sends(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")) as port, pytest.raises(Unavailable):
        async with dial(f"http://127.0.0.1:{port}", TOKEN):
            pass
    with server(sends(b"not http at all\r\n\r\n")) as port, pytest.raises(Unavailable):
        async with dial(f"http://127.0.0.1:{port}", TOKEN):
            pass
    with server(sends(b"not http at all\r\n\r\n")) as port, pytest.raises(Unavailable):
        async with dial(f"https://127.0.0.1:{port}", TOKEN):
            pass
    for url in ("", "ftp://x", "http://", "127.0.0.1:8081", "http://x:99999", "http://x:y"):
        with pytest.raises(Invalid):
            async with dial(url, TOKEN):
                pass


async def test_what_the_caller_raises_in_a_session_comes_out_as_it_is() -> None:
    async with control_plane() as plane:
        with pytest.raises(ZeroDivisionError):
            async with dial(plane.url, TOKEN):
                raise ZeroDivisionError
        with pytest.raises(OSError, match="mine"):
            async with dial(plane.url, TOKEN):
                raise OSError("mine")


async def test_a_session_that_the_server_ends_is_a_closed_channel_in_both_directions() -> None:
    async with control_plane() as plane, dial(plane.url, TOKEN) as channel:
        await plane.drop()
        with pytest.raises(ChannelClosed, match="going away"):
            await channel.receive()
        with pytest.raises(ChannelClosed):
            await channel.send(Goodbye("x", "y"))
        await channel.close()
        await channel.close()


async def test_a_cancelled_session_ends_at_once_also_when_the_server_does_not_answer() -> None:
    hung = trio.Event()

    async def deaf(request: trio_websocket.WebSocketRequest) -> None:
        connection = await request.accept()
        hung.set()
        del connection
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        listener = await nursery.start(
            lambda task_status: trio_websocket.serve_websocket(deaf, "127.0.0.1", 0, None, task_status=task_status)
        )
        with trio.fail_after(20), trio.CancelScope() as scope:
            async with dial(f"http://127.0.0.1:{listener.port}", TOKEN):
                await hung.wait()
                scope.cancel()
                await trio.sleep_forever()
        assert scope.cancelled_caught
        nursery.cancel_scope.cancel()
