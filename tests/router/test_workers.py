"""Several workers as one router: real processes, killed, stopped and reloaded with streams going on."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import trio

from llmgw.domain.endpoint import Endpoint, EndpointList, ListStamp
from llmgw.domain.errors import Unavailable
from llmgw.domain.ids import ClusterId, EndpointId, OwnerId
from llmgw.domain.lease import FencingToken
from llmgw.domain.model import Catalog, ModelSpec, Profile
from llmgw.domain.policy import Policy
from llmgw.protocol.channel import Channel
from llmgw.protocol.router_messages import PushEndpoints, RouterHello, RouterReport, RouterWelcome, WakeModel
from llmgw.router.follow import Follower
from llmgw.router.usage_book import UsageBook
from llmgw.router.workers import SILENT_LOOKS_MAX, Workers, WorkerSettings, wait_gone
from llmgw.sim.channel import SimChannel, channel_pair
from llmgw.wiring.machine import RealMachine
from tests.programs import children_of
from tests.router.fakes import (
    CHAT,
    CHAT2,
    CHAT_S,
    DONE,
    END,
    FIN,
    OK,
    SH,
    WAIT_S,
    Client,
    E,
    Engine,
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
def two(tmp_path: Path) -> Iterator[Stage]:
    with staged(tmp_path, first_byte_s=20, idle_s=20, workers=2) as stage:
        yield stage


def pids(router: RouterProcess) -> list[int]:
    """The workers that run now."""
    return [child.pid for child in children_of(router.process.pid)]


def has(pid: int, client: Client) -> bool:
    """Does this process hold the connection?"""
    port = client.sock.getsockname()[1]
    return any(one.raddr and one.raddr.port == port for one in psutil.Process(pid).net_connections("tcp"))


@contextlib.contextmanager
def clients_of_each(router: RouterProcess) -> Iterator[dict[int, Client]]:
    """A connection to each worker, by its pid."""
    with contextlib.ExitStack() as held:
        found: dict[int, Client] = {}

        def all_found() -> bool:
            client = held.enter_context(router.client())
            client.send(get("/health"))
            assert client.answer().status == 200  # it is taken
            for pid in pids(router):
                if pid not in found and has(pid, client):
                    found[pid] = client
            return len(found) == 2

        until(all_found, "a connection to each worker")
        yield found


def test_each_worker_serves_and_metrics_are_the_sum_whoever_is_asked(two: Stage) -> None:
    sent = 0
    with clients_of_each(two.router) as clients:
        for number, client in enumerate(clients.values(), start=3):
            for _ in range(number):
                client.send(post(CHAT))
                assert client.answer().status == 200
                sent += 1
        for client in clients.values():
            client.send(get("/metrics"))
            text = client.answer().body.decode()
            assert f'llmgw_requests_total{{model="m1",status="200"}} {sent}.0' in text
            assert f'llmgw_request_seconds_count{{model="m1"}} {sent}.0' in text
            assert f'llmgw_endpoint_requests_total{{endpoint="u1"}} {sent}.0' in text
            assert "llmgw_workers 2.0" in text
            assert text.count("# TYPE llmgw_requests_total counter") == 1
    assert len(two.u1.requests) == sent
    assert len(until(lambda: two.router.log_lines("chat/completions")[sent - 1 :], "a whole line for each")) == 1


def test_a_killed_worker_costs_its_own_streams_only_and_is_there_again(two: Stage) -> None:
    router, go = two.router, threading.Event()
    two.u1.script = [SH, E("a"), ["hold", go], FIN, DONE, END]
    with clients_of_each(router) as clients:
        for client in clients.values():
            client.send(post(CHAT_S))
            client.until(b"\n\n")
        assert router.metric_of("llmgw_inflight", 'endpoint="u1"') == 2
        (victim, lost), (survivor, stays) = clients.items()
        os.kill(victim, signal.SIGKILL)
        assert b"[DONE]" not in lost.rest()
        until(lambda: len(pids(router)) == 2 and victim not in pids(router), "another in its place")
        assert survivor in pids(router)
        until(lambda: router.metric_of("llmgw_inflight", 'endpoint="u1"') == 1, "what it had in flight is over")
        go.set()
        assert b"[DONE]" in stays.until(b"0\r\n\r\n")
    two.u1.script = [OK]
    with clients_of_each(router) as clients:
        for client in clients.values():
            client.send(post(CHAT))
            assert client.answer().status == 200
    router.at_rest()
    assert router.metric("llmgw_worker_restarts_total") == 1
    assert f"pid={victim} how=SIGKILL" in router.err.read_text()


def test_no_client_is_refused_while_a_worker_is_started_again(two: Stage) -> None:
    router = two.router
    os.kill(pids(router)[0], signal.SIGKILL)
    for _ in range(20):
        assert router.ask(post(CHAT)).status == 200
    until(lambda: len(pids(router)) == 2, "two again")


def test_what_a_killed_worker_had_counted_is_kept(two: Stage) -> None:
    router = two.router
    with clients_of_each(router) as clients:
        for client in clients.values():
            client.send(post(CHAT))
            assert client.answer().status == 200
        labels = 'model="m1",status="200"'
        assert router.metric_of("llmgw_requests_total", labels) == 2
        for pid in clients:
            os.kill(pid, signal.SIGKILL)
        until(lambda: not set(clients) & set(pids(router)) and len(pids(router)) == 2, "two others")
    assert router.metric_of("llmgw_requests_total", labels) == 2
    assert router.metric_of("llmgw_request_seconds_count", 'model="m1"') == 2
    assert router.metric_of("llmgw_endpoint_requests_total", 'endpoint="u1"') == 2


def test_a_key_has_its_limit_over_all_workers(two: Stage) -> None:
    hold = threading.Event()
    two.u1.script = [["hold", hold], OK]
    two.u2.script = [["hold", hold], OK]
    with clients_of_each(two.router) as clients:
        first, second = clients.values()
        first.send(post(CHAT, key="SINGLE"))
        until(lambda: two.u1.requests, "it is under way")
        second.send(post(CHAT, key="SINGLE"))
        refused = second.answer()
        assert (refused.status, refused.error["code"]) == (429, "parallel_limit")
        hold.set()
        assert first.answer().status == 200

        def let_in() -> bool:  # the place is free once the other worker has ended the request, which its client need not await
            second.send(post(CHAT, key="SINGLE"))
            return second.answer().status == 200

        until(let_in, "the place is free again")


def test_an_endpoint_has_its_limit_over_all_workers(tmp_path: Path) -> None:
    hold = threading.Event()
    change = {"queue_max = 10": "queue_max = 0"}
    with staged(tmp_path, first_byte_s=20, idle_s=20, workers=2, route="max_inflight_per_endpoint = 1", change=change) as stage:
        stage.u1.script = [["hold", hold], OK]
        stage.u2.script = [["hold", hold], OK]
        with clients_of_each(stage.router) as clients, stage.router.client() as third:
            for client in clients.values():  # m2 has two endpoints: whoever comes second takes the other
                client.send(post(CHAT2))
                until(lambda: stage.u1.requests or stage.u2.requests, "it is under way")
            until(lambda: (len(stage.u1.requests), len(stage.u2.requests)) == (1, 1), "one at each")
            third.send(post(CHAT2))
            assert third.answer().status in (429, 503)
            hold.set()
            assert [client.answer().status for client in clients.values()] == [200, 200]


def test_a_changed_file_is_taken_by_each_worker_and_streams_go_on(two: Stage) -> None:
    router, go = two.router, threading.Event()
    two.u1.script = [SH, E("a"), ["hold", go], FIN, DONE, END]
    with clients_of_each(router) as clients, clients_of_each(router) as others:
        for client in clients.values():
            client.send(post(CHAT_S))
            client.until(b"\n\n")
        router.config.write_text(two.text.replace('key = "K"', 'key = "OTHER"'))
        router.signal(signal.SIGHUP)
        until(lambda: "event=reloaded" in router.err.read_text(), "the file is taken")
        for other in others.values():
            other.send(post(CHAT))
            assert other.answer().status == 401
        go.set()
        for client in clients.values():
            assert b"[DONE]" in client.until(b"0\r\n\r\n")
    two.u1.script = [OK]
    router.config.write_text(two.text)  # and by itself, without a signal
    until(lambda: router.err.read_text().count("event=reloaded") == 2, "the file is looked at")
    assert router.ask(post(CHAT)).status == 200
    router.config.write_text(two.text.replace("retries = 1", 'retries = "x"'))
    router.signal(signal.SIGHUP)
    until(lambda: "route.retries" in router.err.read_text(), "the reason is told, once")
    assert router.err.read_text().count("the file does not load") == 1
    assert router.ask(post(CHAT)).status == 200


def test_a_worker_that_is_started_again_obeys_what_was_read_since(two: Stage) -> None:
    router = two.router
    router.config.write_text(two.text.replace('key = "K"', 'key = "OTHER"'))
    router.signal(signal.SIGHUP)
    until(lambda: "event=reloaded" in router.err.read_text(), "the file is taken")
    before = pids(router)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    until(lambda: not set(before) & set(pids(router)) and len(pids(router)) == 2, "two others")
    with clients_of_each(router) as clients:
        for client in clients.values():
            client.send(post(CHAT, key="OTHER"))
            assert client.answer().status == 200
            client.send(post(CHAT))
            assert client.answer().status == 401


@pytest.mark.parametrize("whole_group", [False, True], ids=["parent", "whole group"])
def test_a_stop_lets_answers_of_each_worker_finish_and_tells_the_endless_ones(two: Stage, whole_group: bool) -> None:
    """Some supervisors, and terminals, signal the parent and its workers: for a worker that is no second signal."""
    router = two.router
    two.u1.once = [[SH, ["rep", 10, 100, event("s")], FIN, DONE, END], [SH, ["rep", 600, 100, event("x")]]]
    with clients_of_each(router) as clients, clients_of_each(router) as idle:
        short, endless = clients.values()
        short.send(post(CHAT_S))
        short.until(b"\n\n")
        endless.send(post(CHAT_S))
        endless.count(b"\n\n", 2)
        workers = pids(router)
        for pid in [*workers, router.process.pid] if whole_group else [router.process.pid]:
            os.kill(pid, signal.SIGTERM)
        for client in idle.values():
            assert client.rest() == b""
        with pytest.raises(OSError):
            until(lambda: Client(router.address).close(), "a new connection is refused")
        assert b"[DONE]" in short.rest()
        told = endless.rest()
        assert b"shutting_down" in told
        assert b"[DONE]" not in told
    assert router.process.wait(10) == 0
    assert not any(psutil.pid_exists(pid) for pid in workers)
    assert len(router.log_lines("reason=")) >= 2, "the last lines are written"
    assert "died" not in router.err.read_text()


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_all_of_it_at_once(two: Stage, second: signal.Signals) -> None:
    router = two.router
    two.u1.script = [["w", 20_000]]
    with router.client() as client:
        client.send(post(CHAT))
        until(lambda: two.u1.requests, "it is under way")
        workers = pids(router)
        router.signal(signal.SIGTERM)
        until(lambda: "stopping" in router.err.read_text(), "the router is stopping")
        router.signal(second)
        assert router.process.wait(10) == 130
        assert client.rest() == b""
    until(lambda: not any(psutil.pid_exists(pid) for pid in workers), "no worker is left")


def test_a_stop_while_a_worker_is_started_again_is_an_orderly_one(two: Stage) -> None:
    router = two.router
    two.u1.once = [[SH, ["rep", 10, 100, event("s")], FIN, DONE, END]]
    with clients_of_each(router) as clients:
        (_, stream), (victim, _) = clients.items()
        stream.send(post(CHAT_S))
        stream.until(b"\n\n")
        os.kill(victim, signal.SIGKILL)
        until(lambda: "a worker died" in router.err.read_text(), "its death is seen")
        router.signal(signal.SIGTERM)
        assert b"[DONE]" in stream.rest()
    assert router.process.wait(10) == 0
    assert router.err.read_text().count("a worker died") == 1


def test_workers_end_with_a_parent_that_is_killed(two: Stage) -> None:
    router = two.router
    two.u1.script = [["w", 20_000]]
    with router.client() as client:
        client.send(post(CHAT))
        until(lambda: two.u1.requests, "it is under way")
        workers = pids(router)
        router.process.kill()
        router.process.wait(WAIT_S)
        until(lambda: not any(psutil.pid_exists(pid) for pid in workers), "no worker is left")
    assert router.err.read_text().count("the parent is gone") == 2
    assert "Traceback" not in router.err.read_text()


def test_workers_share_a_unix_socket_and_take_its_name_along_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "router.sock"
    with staged(tmp_path) as stage:
        stage.router.close()
        text = stage.text.replace("127.0.0.1:0", f"unix:{path}").replace("workers = 1", "workers = 2")
        router = RouterProcess(tmp_path, text)
        try:
            for _ in range(10):
                with socket.socket(socket.AF_UNIX) as client:
                    client.settimeout(WAIT_S)
                    client.connect(str(path))
                    client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                    assert client.recv(100).startswith(b"HTTP/1.1 200")
            router.signal(signal.SIGTERM)
            assert router.process.wait(10) == 0
            assert not path.exists()
        finally:
            router.close()


def test_a_port_that_another_router_shares_among_its_workers_is_taken(two: Stage, tmp_path: Path) -> None:
    port = two.router.address[1]
    config = tmp_path / "second.toml"
    for workers in (1, 2):
        config.write_text(two.text.replace("127.0.0.1:0", f"127.0.0.1:{port}").replace("workers = 2", f"workers = {workers}"))
        done = subprocess.run(router_command(config), capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 4
        assert f"cannot listen on 127.0.0.1:{port}: the port is taken" in done.stderr


# --- the parent alone, in this process, with real workers

TOKEN = FencingToken(ClusterId("c"), 1, OwnerId("ctl-1"))
CATALOG = Catalog((ModelSpec("m", (Profile("p", "command", command=("/e",)),)),))


def command(descriptor: int) -> list[str]:
    return [sys.executable, "-m", "llmgw", "router", "--worker", str(descriptor)]


def workers_of(machine: RealMachine, count: int = 2, command=command) -> Workers:  # type: ignore[no-untyped-def]
    policy = Policy(auth_required=False)
    return Workers(machine, policy, WorkerSettings(log_level="error"), count=count, command=command, listen="127.0.0.1:0")


def list_of(*ports: int) -> EndpointList:
    return EndpointList(tuple(Endpoint(EndpointId(f"e{port}"), f"http://127.0.0.1:{port}", ("m",)) for port in ports))


class Hurried(RealMachine):
    """Short waits take a fifth of their time: looks, and pauses before a start."""

    async def sleep_until(self, at_s: float) -> None:
        left_s = at_s - self.now_s()
        await super().sleep_until(self.now_s() + (left_s / 5 if left_s < 5 else left_s))


def pid_of(workers: Workers, number: int) -> int:
    return workers._workers[number].process.pid


async def receive_until(end: SimChannel, wanted) -> object:  # type: ignore[no-untyped-def]
    """The next message for which `wanted` holds."""
    with trio.fail_after(WAIT_S):
        while True:
            message = await end.receive()
            if wanted(message):
                return message


async def test_a_withdrawn_endpoint_is_acknowledged_once_each_worker_has_let_go_of_it(tmp_path: Path) -> None:
    ours, theirs = channel_pair("router")

    @asynccontextmanager
    async def dial(url: str) -> AsyncIterator[Channel]:
        yield ours

    machine = RealMachine()
    workers = workers_of(machine)
    follower = Follower(machine, workers, dial, folder=tmp_path, control_planes=("http://a:1",), workers=2)
    await follower.load()
    workers.waiting = True
    workers.told, workers.wake, workers.following = follower.look_again, follower.wake, follower.following
    engine = Engine()
    async with trio.open_nursery() as nursery:
        host, _, port = (await nursery.start(workers.run)).rpartition(":")
        nursery.start_soon(follower.run)
        hello = await theirs.receive()
        assert isinstance(hello, RouterHello)
        assert hello.workers == 2
        await theirs.send(RouterWelcome(TOKEN.cluster_id, TOKEN.owner, 1, True, "0.1.0"))

        def acknowledges(generation: int):  # type: ignore[no-untyped-def]
            return lambda it: isinstance(it, RouterReport) and it.acknowledged is not None and it.acknowledged.generation == generation

        both = list_of(engine.port, engine.port + 1)
        await theirs.send(PushEndpoints(ListStamp(TOKEN, 1), both))
        await receive_until(theirs, acknowledges(1))

        os.kill(pid_of(workers, 1), signal.SIGSTOP)  # it takes connections still, as far as anybody knows
        await theirs.send(PushEndpoints(ListStamp(TOKEN, 2), list_of(engine.port)))
        await trio.to_thread.run_sync(lambda: until(lambda: workers._workers[0].reached == workers._number, "the other acts on it"))
        for _ in range(3):  # reports come each second, and at news
            report = await receive_until(theirs, lambda it: isinstance(it, RouterReport))
            assert isinstance(report, RouterReport)
            assert report.acknowledged is not None
            assert report.acknowledged.generation == 1
        os.kill(pid_of(workers, 1), signal.SIGCONT)
        await receive_until(theirs, acknowledges(2))

        os.kill(pid_of(workers, 1), signal.SIGSTOP)  # one that is dead lets go of everything
        await theirs.send(PushEndpoints(ListStamp(TOKEN, 3), EndpointList()))
        os.kill(pid_of(workers, 1), signal.SIGKILL)
        await receive_until(theirs, acknowledges(3))

        def ask() -> int:
            with Client((host, int(port))) as client:
                client.send(post(CHAT.replace(b"m1", b"m"), key=""))
                return client.answer().status

        await theirs.send(PushEndpoints(ListStamp(TOKEN, 4), list_of(engine.port)))
        await receive_until(theirs, acknowledges(4))
        assert await trio.to_thread.run_sync(ask) == 200
        used = await receive_until(theirs, lambda it: isinstance(it, RouterReport) and bool(it.use) and it.use[0].use.heard_s is not None)
        assert isinstance(used, RouterReport)
        assert used.use[0].endpoint == f"e{engine.port}"
        nursery.cancel_scope.cancel()
    engine.close()


async def test_requests_in_flight_are_told_at_once_also_of_withdrawn_endpoints(tmp_path: Path) -> None:
    machine, hold, engine = RealMachine(), threading.Event(), Engine()
    engine.script = [["hold", hold], OK]
    workers = workers_of(machine)
    workers.set_endpoints(list_of(engine.port), ListStamp(TOKEN, 1))
    known = EndpointId(f"e{engine.port}")
    async with trio.open_nursery() as nursery:
        host, _, port = (await nursery.start(workers.run)).rpartition(":")
        clients = [Client((host, int(port))) for _ in range(6)]
        for client in clients:
            client.send(post(CHAT.replace(b"m1", b"m"), key=""))
        await trio.to_thread.run_sync(lambda: until(lambda: len(engine.requests) == 6, "all are under way"))
        assert workers.use()[known].in_flight == 6
        workers.set_endpoints(EndpointList(), ListStamp(TOKEN, 2))
        await workers.wait_taken()
        assert workers.acknowledged() == 2
        assert workers.use()[known].in_flight == 6
        hold.set()
        assert [(await trio.to_thread.run_sync(client.answer)).status for client in clients] == [200] * 6
        await trio.to_thread.run_sync(lambda: until(lambda: known not in workers.use(), "nothing runs there any more"))
        for client in clients:
            client.close()
        nursery.cancel_scope.cancel()
    engine.close()


async def test_what_a_dead_worker_had_in_flight_counts_no_more_and_when_an_endpoint_was_used_is_not_forgotten() -> None:
    machine, engine = RealMachine(), Engine()
    engine.script = [["w", 20_000]]
    workers = workers_of(machine)
    workers.set_endpoints(list_of(engine.port), ListStamp(TOKEN, 1))
    known = EndpointId(f"e{engine.port}")
    async with trio.open_nursery() as nursery:
        host, _, port = (await nursery.start(workers.run)).rpartition(":")
        clients = [Client((host, int(port))) for _ in range(6)]
        for client in clients:
            client.send(post(CHAT.replace(b"m1", b"m"), key=""))
        await trio.to_thread.run_sync(lambda: until(lambda: len(engine.requests) == 6, "all are under way"))
        pid = [pid_of(workers, number) for number in range(2)]
        held = sum(has(pid[1], client) for client in clients)
        await trio.to_thread.run_sync(
            lambda: until(lambda: all(worker.use for worker in workers._workers.values()) or held in (0, 6), "told")
        )
        os.kill(pid[0], signal.SIGKILL)
        await trio.to_thread.run_sync(lambda: until(lambda: workers.use()[known].in_flight == held, "those of the other are left"))
        os.kill(pid[1], signal.SIGKILL)
        await trio.to_thread.run_sync(lambda: until(lambda: workers.use()[known].in_flight == 0, "none is left"))
        assert workers.use()[known].last_used_s > 0
        for client in clients:
            client.close()
        nursery.cancel_scope.cancel()
    engine.close()


async def test_a_model_without_a_replica_is_wished_for_through_the_parent() -> None:
    machine = RealMachine()
    workers = workers_of(machine)
    wished: list[str] = []
    workers.wake = wished.append
    workers.set_catalog(CATALOG)
    workers.set_endpoints(EndpointList(), ListStamp(TOKEN, 1))
    async with trio.open_nursery() as nursery:
        host, _, port = (await nursery.start(workers.run)).rpartition(":")

        def ask() -> int:
            with Client((host, int(port))) as client:
                client.send(post(CHAT.replace(b"m1", b"m"), key=""))
                return client.answer().status

        assert await trio.to_thread.run_sync(ask) == 503
        await trio.to_thread.run_sync(lambda: until(lambda: wished, "the parent is told"))
        assert set(wished) == {"m"}
        assert WakeModel("m").model == wished[0]
        nursery.cancel_scope.cancel()


async def test_workers_that_never_start_are_an_error_and_not_a_loop() -> None:
    workers = workers_of(Hurried(), command=lambda descriptor: [sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.RaisesGroup(Unavailable, allow_unwrapped=False, flatten_subgroups=True) as raised:
        await workers.run()
    assert "ended 3 times before it served (exit code 3)" in str(raised.value.exceptions[0])


async def test_a_worker_that_hangs_is_ended_and_started_again() -> None:
    assert SILENT_LOOKS_MAX > 10  # workers report each second, and so within five looks of this machine
    workers = workers_of(Hurried())
    async with trio.open_nursery() as nursery:
        await nursery.start(workers.run)
        hangs, other = pid_of(workers, 0), pid_of(workers, 1)
        os.kill(hangs, signal.SIGSTOP)
        await trio.to_thread.run_sync(
            lambda: until(lambda: 0 in workers._workers and pid_of(workers, 0) != hangs and workers._workers[0].serves, "another serves")
        )
        assert pid_of(workers, 1) == other
        nursery.cancel_scope.cancel()


async def test_while_a_worker_dies_again_and_again_the_others_have_its_clients(tmp_path: Path) -> None:
    flag = tmp_path / "broken"

    def sometimes(descriptor: int) -> list[str]:
        return [sys.executable, "-c", "raise SystemExit(3)"] if flag.exists() else command(descriptor)

    workers = workers_of(RealMachine(), command=sometimes)
    async with trio.open_nursery() as nursery:
        host, _, port = (await nursery.start(workers.run)).rpartition(":")
        flag.touch()
        os.kill(pid_of(workers, 0), signal.SIGKILL)
        await trio.to_thread.run_sync(lambda: until(lambda: not workers._listeners[0], "it waits for its next start"))

        def ask() -> int:
            with Client((host, int(port))) as client:
                client.send(get("/health"))
                return client.answer().status

        for _ in range(20):
            assert await trio.to_thread.run_sync(ask) == 200
        flag.unlink()
        await trio.to_thread.run_sync(lambda: until(lambda: 0 in workers._workers and workers._workers[0].serves, "it serves again"))
        assert await trio.to_thread.run_sync(ask) == 200
        nursery.cancel_scope.cancel()


async def test_what_every_worker_counted_of_usage_is_in_the_book_of_the_parent() -> None:
    machine = RealMachine()
    workers = workers_of(machine)
    workers.book = UsageBook("b")
    engine = Engine()
    async with trio.open_nursery() as nursery:
        host, _, port = (await nursery.start(workers.run)).rpartition(":")
        workers.set_endpoints(list_of(engine.port), ListStamp(TOKEN, 1))
        with trio.fail_after(WAIT_S):
            await workers.wait_taken()

        def ask() -> int:
            with Client((host, int(port))) as client:
                client.send(post(CHAT.replace(b"m1", b"m"), key=""))
                return client.answer().status

        for _ in range(8):  # the kernel spreads connections over the workers
            assert await trio.to_thread.run_sync(ask) == 200

        def counted() -> list[tuple[int, int, int]]:
            assert workers.book is not None
            return [(row.requests, row.prompt, row.completion) for row in workers.book.state().open]

        with trio.fail_after(WAIT_S):
            while sum(row[0] for row in counted()) < 8:
                await trio.sleep(0.02)
        assert [sum(column) for column in zip(*counted(), strict=True)] == [8, 8, 8]
        nursery.cancel_scope.cancel()
    engine.close()


async def test_a_worker_that_was_found_dead_when_it_was_to_be_killed_is_not_waited_for_again() -> None:
    process = subprocess.Popen(["/bin/sh", "-c", "exit 3"])
    until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE, "it has ended")
    process.kill()
    await wait_gone(process)
    assert process.returncode == 3
