"""The process: stopping, reloading, surviving its surroundings (cases T40, T41)."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing

from llmgw.domain.policy import Policy
from llmgw.router.listener import serve
from llmgw.router.router import Router
from llmgw.wiring.machine import RealMachine
from llmgw.wiring.runs import DESCRIPTORS_RESERVED, clients_within
from tests.router.fakes import (
    CHAT,
    CHAT_S,
    DONE,
    END,
    FIN,
    OK,
    SH,
    WAIT_S,
    Client,
    E,
    RouterProcess,
    Stage,
    event,
    get,
    post,
    router_command,
    staged,
    until,
)


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Stage]:
    with staged(tmp_path, first_byte_s=20, idle_s=20) as stage:
        yield stage


@pytest.mark.case("T40")
def test_a_stop_lets_answers_finish_and_tells_the_endless_ones(fresh: Stage) -> None:
    router, u1 = fresh.router, fresh.u1
    idle = router.client()
    idle.send(get("/health"))
    assert idle.answer().status == 200
    u1.once = [[SH, ["rep", 10, 100, event("s")], FIN, DONE, END]]
    short = router.client()
    short.send(post(CHAT_S))
    short.until(b"\n\n")
    u1.script = [SH, ["rep", 600, 100, event("x")]]
    endless = router.client()
    endless.send(post(CHAT_S))
    endless.count(b"\n\n", 2)
    silent = router.client()
    u1.script = [["w", 20_000]]
    silent.send(post(CHAT))
    upload = router.client()
    upload.send(post(CHAT)[:-20])
    until(lambda: len(u1.requests) == 3, "all are under way")
    router.signal(signal.SIGTERM)
    assert idle.rest() == b""
    with pytest.raises(OSError):
        until(lambda: Client(router.address).close(), "a new connection is refused")
    assert b"[DONE]" in short.rest()
    told = endless.rest()
    assert b"shutting_down" in told
    assert b"[DONE]" not in told
    assert silent.answer().status == 503
    assert router.process.wait(10) == 0
    for client in (idle, short, endless, silent, upload):
        client.close()
    until(lambda: fresh.u1.count("peer_closed"), "the engines are let go")


def test_a_request_under_way_is_served_on_a_stop_and_its_connection_closed(fresh: Stage) -> None:
    hold = threading.Event()
    fresh.u1.script = [["hold", hold], OK]
    with fresh.router.client() as client:
        client.send(post(CHAT))
        until(lambda: fresh.u1.requests, "it is under way")
        fresh.router.signal(signal.SIGTERM)
        until(lambda: "stopping" in fresh.router.err.read_text(), "the router is stopping")
        hold.set()
        got = client.answer()
        assert (got.status, got.get("connection")) == (200, "close")
        assert client.rest() == b""
    assert fresh.router.process.wait(10) == 0


@pytest.mark.case("T40")
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(fresh: Stage, second: signal.Signals) -> None:
    fresh.u1.script = [["w", 20_000]]
    with fresh.router.client() as client:
        client.send(post(CHAT))
        until(lambda: fresh.u1.requests, "it is under way")
        fresh.router.signal(signal.SIGTERM)
        until(lambda: "stopping" in fresh.router.err.read_text(), "the router is stopping")
        fresh.router.signal(second)
        assert fresh.router.process.wait(WAIT_S) == 130
        assert client.rest() == b"", "the answer was not waited for"


def test_clients_leave_descriptors_for_engines_and_the_next_ones_wait(tmp_path: Path) -> None:
    bound = 20
    with staged(tmp_path, descriptors_max=2 * bound + DESCRIPTORS_RESERVED) as stage, contextlib.ExitStack() as held:
        router = stage.router
        taken = [held.enter_context(router.client()) for _ in range(bound)]
        waiting = [held.enter_context(router.client()) for _ in range(2 * DESCRIPTORS_RESERVED)]
        until(lambda: router.told("new ones wait until others leave"), "the bound is told")
        for client in waiting:
            client.send(get("/health"))
        for client in taken:
            client.send(post(CHAT))
        assert [client.answer().status for client in taken] == [200] * bound, "engines are reached"
        assert not select.select([client.sock for client in waiting], [], [], 0)[0]
        for client in taken:
            client.close()
        for client in waiting:
            assert client.answer().status == 200
            client.close()
        assert len(router.told("new ones wait until others leave")) == 1
        assert not router.told("Too many open files")


@pytest.mark.parametrize(
    ("limit", "expected"), [(0, 8), (DESCRIPTORS_RESERVED + 17, 8), (1024, 448), (524_288, 262_080), (resource.RLIM_INFINITY, sys.maxsize)]
)
def test_half_of_the_open_files_beyond_a_reserve_are_for_clients(limit: int, expected: int) -> None:
    assert clients_within(limit) == expected


@pytest.mark.case("T40")
def test_a_changed_file_is_taken_and_streams_go_on(fresh: Stage) -> None:
    router = fresh.router
    go = threading.Event()
    fresh.u1.script = [SH, E("a"), ["hold", go], FIN, DONE, END]
    with router.client() as client:
        client.send(post(CHAT_S))
        client.until(b"\n\n")
        text = fresh.text.replace('models = ["m1", "m2", "org/Model-7B:Q4_K_M"]\naliases = { fast = "m1" }', 'models = ["m9"]')
        assert text != fresh.text
        replacement = router.config.with_suffix(".new")
        replacement.write_text(text)
        os.replace(replacement, router.config)
        router.signal(signal.SIGHUP)
        until(lambda: "m9" in router.ask(get("/v1/models")).body.decode(), "the new list is in force")
        assert router.ask(post(CHAT)).status == 404
        go.set()
        assert b"[DONE]" in client.until(b"0\r\n\r\n")
    router.config.write_text(fresh.text)  # and by itself, without a signal
    until(lambda: '"m1"' in router.ask(get("/v1/models")).body.decode(), "the file is looked at")


def test_a_file_that_does_not_load_changes_nothing_and_says_why(fresh: Stage) -> None:
    router = fresh.router
    for text, reason in (
        (fresh.text + "\n[rout]\nretries = 1\n", "route"),
        ("listen = ", "is not TOML"),
        (fresh.text.replace("retries = 1", 'retries = "x"'), "route.retries"),
    ):
        router.config.write_text(text)
        router.signal(signal.SIGHUP)
        until(lambda reason=reason: reason in router.err.read_text().partition("does not load")[2], "the reason is told")
        assert router.ask(post(CHAT)).status == 200
    os.unlink(router.config)
    router.signal(signal.SIGHUP)
    until(lambda: "there is no file" in router.err.read_text(), "the reason is told")
    assert router.ask(post(CHAT)).status == 200


def test_whatever_takes_the_place_of_the_file_is_told_once_by_itself_and_changes_nothing(fresh: Stage) -> None:
    """A link that leads to itself was told only on SIGHUP, and a file of a comment took every endpoint and key away."""
    router, config = fresh.router, fresh.router.config

    def linked(target: Path) -> None:
        config.unlink(missing_ok=True)
        config.symlink_to(target)

    def comment() -> None:
        config.unlink()
        config.write_text("# hello\n")

    for place, reason in (
        (config.unlink, f"there is no file {config}"),
        (partial(linked, config), "Too many levels of symbolic links"),
        (partial(linked, config.with_name("nowhere")), f"it is a link to {config.with_name('nowhere')}, which is not there"),
        (comment, "it sets nothing, which is taken for a file that was not written whole"),
    ):
        told = len(router.told("does not load"))
        place()
        until(lambda told=told: len(router.told("does not load")) > told, "it is told")
        assert reason in router.told("does not load")[-1]
        assert router.ask(post(CHAT)).status == 200
    assert len(router.told("does not load")) == 4
    config.write_text(f"{fresh.text}\n# again\n")
    until(lambda: router.told("event=reloaded"), "the file is taken again")
    assert len(router.told("does not load")) == 4


@pytest.mark.case("T35", "B166")
def test_a_revoked_key_is_refused_on_the_next_request_of_an_open_connection(fresh: Stage) -> None:
    with fresh.router.client() as client:
        client.send(post(CHAT))
        assert client.answer().status == 200
        fresh.router.config.write_text(fresh.text.replace('key = "K"', 'key = "OTHER"'))
        fresh.router.signal(signal.SIGHUP)
        until(lambda: "event=reloaded" in fresh.router.err.read_text(), "the file is taken")
        client.send(post(CHAT))
        assert client.answer().status == 401
    assert fresh.router.ask(get("/v1/models", key="OTHER")).status == 200


def test_a_taken_port_is_one_clear_line(tmp_path: Path) -> None:
    with staged(tmp_path) as stage, socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = tmp_path / "taken.toml"
        config.write_text(stage.text.replace("127.0.0.1:0", f"127.0.0.1:{port}"))
        done = subprocess.run(router_command(config), capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 4
    assert f"cannot listen on 127.0.0.1:{port}: the port is taken" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.case("T41")
def test_proxy_variables_do_not_touch_the_way_to_engines(tmp_path: Path) -> None:
    with staged(tmp_path) as stage:
        stage.router.close()
        away = "http://127.0.0.1:9"
        environ = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy"), away) | {"NO_PROXY": "10.0.0.0/8"}
        router = RouterProcess(tmp_path, stage.text, environ)
        try:
            assert router.ask(post(CHAT)).status == 200
        finally:
            router.close()


def test_a_log_that_nobody_reads_holds_up_neither_a_request_nor_the_end(tmp_path: Path) -> None:
    with staged(tmp_path) as stage:
        stage.router.close()
        config = tmp_path / "piped.toml"
        config.write_text(stage.text)
        err = tmp_path / "piped.err"
        with err.open("wb") as errors:
            process = subprocess.Popen(router_command(config), stdout=subprocess.PIPE, stderr=errors)
        try:
            line = until(lambda: next((row for row in err.read_text().splitlines() if "event=listening" in row), None), "it listens")
            port = int(line.split("address=127.0.0.1:")[1].split(" ")[0])
            with Client(("127.0.0.1", port)) as client:
                for _ in range(600):  # 600 lines are more than a pipe holds
                    client.send(get("/health"))
                    assert client.answer().status == 200
            process.terminate()
            assert process.wait(15) == 0
        finally:
            process.kill()
            assert process.stdout is not None
            process.stdout.close()
            process.wait(10)


@pytest.mark.parametrize("workers", [1, 2])
def test_lines_of_a_log_that_is_closed_are_counted(tmp_path: Path, workers: int) -> None:
    with staged(tmp_path, workers=workers) as stage:
        stage.router.close()
        read, write = os.pipe()
        os.close(read)
        router = RouterProcess(tmp_path, stage.text, stdout=write)
        os.close(write)
        try:
            assert router.ask(get("/health")).status == 200
            until(lambda: router.metric("llmgw_log_lines_dropped_total") >= 1, "the line is counted")
        finally:
            router.close()


async def test_until_it_is_let_in_a_client_waits_and_is_not_refused(tmp_path: Path) -> None:
    """Right after a control plane's start nobody knows yet what runs: every model would be without a replica."""
    begin = trio.Event()
    router = Router(RealMachine(), Policy(auth_required=False), lambda line: None)
    async with trio.open_nursery() as nursery:
        address = await nursery.start(partial(serve, begin=begin), router, "127.0.0.1:0")
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=20) as client:
            client.send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert not select.select([client], [], [], 0)[0]
            begin.set()
            assert (await trio.to_thread.run_sync(client.recv, 1000)).startswith(b"HTTP/1.1 200 ")
        nursery.cancel_scope.cancel()
