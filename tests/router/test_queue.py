"""Requests that wait for a place at a full model: whose turn it is, and every way a wait can end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trio

from llmgw.domain.endpoint import Endpoint, EndpointList
from llmgw.domain.ids import EndpointId
from llmgw.domain.policy import Policy, RouteSettings
from llmgw.router.listener import serve
from llmgw.router.router import Router
from llmgw.wiring.machine import RealMachine
from tests.router.fakes import CHAT, CHAT2, CHAT_S, OK, Answer, Client, Engine, RouterProcess, Stage, answer, get, post, until

FULL_AT_ONE = "max_inflight_per_endpoint = 1"


class Asked:
    """A request under way in a thread of its own."""

    def __init__(self, router: RouterProcess, data: bytes) -> None:
        self.client: Client = router.client()
        self.got: Answer | None = None
        self._thread = threading.Thread(target=self._run, args=(data,))
        self._thread.start()

    def _run(self, data: bytes) -> None:
        with self.client, suppress(OSError, AssertionError):  # the test may have closed it, and looks at `got`
            self.client.send(data)
            self.got = self.client.answer()

    def answer(self) -> Answer:
        self._thread.join(30)
        assert self.got is not None, "no answer came"
        return self.got


class Queued:
    """A stage whose engines hold every request until `let_go` is called; each model's endpoints take one at a time."""

    def __init__(self, stage: Stage, router: RouterProcess) -> None:
        self.stage = stage
        self.router = router
        self.held: list[threading.Event] = []
        stage.u1.once = [self._held() for _ in range(30)]

    def _held(self) -> list[Any]:
        event = threading.Event()
        self.held.append(event)
        return [["hold", event], OK]

    def let_go(self) -> None:
        self.held.pop(0).set()

    def waiting(self, model: str = "m1") -> float:
        return self.router.metric_of("llmgw_queue", f'model="{model}"')

    def wait(self, number: int, model: str = "m1") -> None:
        until(lambda: self.waiting(model) == number, f"{number} wait")

    def ask(self, data: bytes) -> Asked:
        """Asks, and comes back once the engine or the queue has it."""
        before = len(self.stage.u1.requests) + len(self.stage.u2.requests) + self.waiting("m1") + self.waiting("m2")
        asked = Asked(self.router, data)
        until(
            lambda: len(self.stage.u1.requests) + len(self.stage.u2.requests) + self.waiting("m1") + self.waiting("m2") > before,
            "it is served or waits",
        )
        return asked

    def tags(self) -> list[str]:
        """Who was served by the first engine, in order."""
        return [seen["body"].split(b'"user":"')[1].split(b'"')[0].decode() for seen in self.stage.u1.requests]


def tagged(tag: str, key: str = "K", body: bytes = CHAT) -> bytes:
    return post(body.replace(b'"messages"', b'"user":"%b","messages"' % tag.encode()), key=key)


@contextmanager
def queued(folder: Path, change: Callable[[str], str] = lambda text: text, route: str = FULL_AT_ONE) -> Iterator[Queued]:
    stage = Stage(folder, first_byte_s=20, route=route)
    stage.router.close()
    stage.text = change(stage.text.replace('name = "narrow"', 'name = "other"').replace('models = ["m2"]\n[[auth', "[[auth"))
    router = RouterProcess(folder, stage.text)
    try:
        yield Queued(stage, router)
    finally:
        router.close()
        stage.close()


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Queued]:
    with queued(tmp_path) as found:
        yield found


def test_keys_take_turns_and_nobody_new_overtakes(line: Queued) -> None:
    asked = [line.ask(tagged("a0"))]
    asked += [line.ask(tagged(f"a{number}")) for number in range(1, 4)]
    asked += [line.ask(tagged(f"b{number}", key="NARROW")) for number in range(1, 3)]
    line.wait(5)
    for served in range(2, 7):
        line.let_go()
        until(lambda served=served: len(line.stage.u1.requests) == served, "the next is served")
        if served == 3:
            asked.append(line.ask(tagged("a4")))
    line.let_go()
    line.let_go()
    assert [one.answer().status for one in asked] == [200] * 7
    assert line.tags() == ["a0", "a1", "b1", "a2", "b2", "a3", "a4"]
    line.router.at_rest()
    assert line.waiting() == 0
    assert line.router.metric("llmgw_queue_seconds_count") == 6
    until(lambda: len(line.router.log_lines("endpoint=u1")) == 7, "all are logged")
    assert len(line.router.log_lines("reason=only,waited:")) == 6


def test_a_full_queue_refuses_and_says_when_to_come_again(tmp_path: Path) -> None:
    with queued(tmp_path, lambda text: text.replace("queue_max = 10", "queue_max = 2")) as line:
        asked = [line.ask(tagged(f"a{number}")) for number in range(3)]
        got = line.router.ask(post(CHAT))
        assert (got.status, got.error["code"], got.get("retry-after")) == (429, "overloaded", "1")
        assert "2 requests wait" in got.error["message"]
        assert "reason=queue_full" in line.router.log_line("status=429")
        assert line.router.ask(get("/v1/models")).status == 200  # only what needs an engine waits
        other = Asked(line.router, tagged("b", key="NARROW"))  # one key's flood shuts no other out
        crowded = asked.pop().answer()
        assert (crowded.status, crowded.error["code"]) == (429, "overloaded")
        for _ in range(3):
            line.let_go()
        assert [one.answer().status for one in [*asked, other]] == [200] * 3
        assert line.tags() == ["a0", "a1", "b"]


def test_a_wait_has_its_limit(tmp_path: Path) -> None:
    with queued(tmp_path, route=f"{FULL_AT_ONE}\nqueue_wait_s = 0.2") as line:
        running = line.ask(tagged("a"))
        got = line.router.ask(post(CHAT))
        assert (got.status, got.error["code"]) == (429, "overloaded")
        assert got.get("retry-after") is not None
        assert "within 0.2 s" in got.error["message"]
        assert "reason=queue_timeout" in line.router.log_line("status=429")
        line.let_go()
        assert running.answer().status == 200
        assert len(line.stage.u1.requests) == 1
        line.router.at_rest()
        assert line.waiting() == 0


def test_the_total_limit_holds_while_waiting(tmp_path: Path) -> None:
    with queued(tmp_path, lambda text: text.replace("total_timeout_s = 30", "total_timeout_s = 0.5")) as line:
        line.stage.u1.once = [[["w", 20_000]]] * 2
        first = Asked(line.router, post(CHAT))
        until(lambda: line.stage.u1.requests, "the place is taken")
        second = Asked(line.router, post(CHAT))
        assert {first.answer().status, second.answer().status} == {504}


def test_a_client_that_hangs_up_while_it_waits_leaves_nothing(line: Queued) -> None:
    running = line.ask(tagged("a0"))
    gone = line.ask(tagged("gone"))
    stays = line.ask(tagged("a1"))
    gone.client.sock.shutdown(2)
    line.wait(1)
    assert "reason=client_gone" in line.router.log_line("status=499")
    line.let_go()
    line.let_go()
    assert (running.answer().status, stays.answer().status) == (200, 200)
    assert line.tags() == ["a0", "a1"]


def test_many_that_hang_up_at_any_moment_leave_no_place_taken(line: Queued) -> None:
    line.stage.u1.once = []
    line.stage.u1.script = [["w", 20], OK]
    for number in range(60):
        client = line.router.client()
        client.send(post(CHAT))
        if number % 3:
            client.sock.settimeout(0.002 * (number % 5) + 0.001)
            with suppress(TimeoutError):
                client.sock.recv(1)
        client.close(reset=bool(number % 2))
    line.wait(0)
    line.router.at_rest()
    assert line.router.ask(post(CHAT)).status == 200


def test_a_router_that_stops_tells_those_who_wait_and_finishes_what_runs(line: Queued) -> None:
    running = line.ask(tagged("a0"))
    waits = line.ask(tagged("a1"))
    line.router.signal(signal.SIGTERM)
    got = waits.answer()
    assert (got.status, got.error["code"]) == (503, "shutting_down")
    assert got.get("retry-after") is not None
    line.let_go()
    assert running.answer().status == 200
    assert line.router.process.wait(20) == 0


def test_an_endpoint_that_appears_serves_those_who_wait(line: Queued) -> None:
    running = line.ask(tagged("a0"))
    waits = line.ask(tagged("a1"))
    line.router.config.write_text(line.stage.text.replace('models = ["m2"]', 'models = ["m1", "m2"]'))
    line.router.signal(signal.SIGHUP)
    assert waits.answer().status == 200
    assert len(line.stage.u2.requests) == 1
    line.let_go()
    assert running.answer().status == 200


def test_a_model_that_goes_ends_the_wait_for_it(line: Queued) -> None:
    running = line.ask(tagged("a0"))
    waiting = [line.ask(tagged(f"a{number}")) for number in range(1, 3)]
    line.router.config.write_text(line.stage.text.replace('models = ["m1", "m2", "org', 'models = ["org').replace('{ fast = "m1" }', "{}"))
    line.router.signal(signal.SIGHUP)
    for one in waiting:
        got = one.answer()
        assert (got.status, got.error["code"]) == (404, "model_not_found")
    line.let_go()
    assert running.answer().status == 200


def test_a_higher_limit_lets_those_in_who_wait(line: Queued) -> None:
    running = line.ask(tagged("a0"))
    waiting = [line.ask(tagged(f"a{number}")) for number in range(1, 4)]
    line.router.config.write_text(line.stage.text.replace(FULL_AT_ONE, "max_inflight_per_endpoint = 3"))
    line.router.signal(signal.SIGHUP)
    line.wait(1)
    until(lambda: len(line.stage.u1.requests) == 3, "two more are there")
    for _ in range(4):
        line.let_go()
    assert [one.answer().status for one in [running, *waiting]] == [200] * 4


def test_an_engine_that_dies_ends_the_wait_for_it(line: Queued) -> None:
    line.stage.u1.once = [[["hold", line.held[0]], ["rst"]]]
    running = line.ask(tagged("a0"))
    waiting = [line.ask(tagged(f"a{number}")) for number in range(1, 4)]
    line.stage.u1._listener.shutdown(2)
    line.stage.u1._listener.close()
    line.let_go()
    assert running.answer().status == 502
    assert {(got.status, got.error["code"]) for got in (one.answer() for one in waiting)} == {(503, "unreachable")}
    assert line.waiting() == 0


def test_an_endpoint_that_comes_back_serves_those_who_wait(line: Queued) -> None:
    line.stage.u1.once = []
    line.stage.u1.script = [answer(500, "{}")]
    until(lambda: line.router.ask(post(CHAT)).status and line.router.metric("llmgw_breaker_state") == 2, "the first is benched")
    line.stage.u1.script = [OK]
    held = threading.Event()
    line.stage.u2.script = [["hold", held], OK]
    failed = len(line.stage.u1.requests)
    running = Asked(line.router, post(CHAT2))
    until(lambda: line.stage.u2.requests, "the second is full")
    waits = Asked(line.router, post(CHAT2))
    assert waits.answer().status == 200  # by the trial, once the first has cooled down
    assert len(line.stage.u1.requests) == failed + 1
    held.set()
    assert running.answer().status == 200


def test_the_next_tier_is_full_too_before_anybody_waits(tmp_path: Path) -> None:
    with queued(tmp_path, lambda text: text.replace('id = "u2"', 'id = "u2"\npriority = 5')) as line:
        held = threading.Event()
        line.stage.u2.script = [["hold", held], OK]
        asked = [line.ask(tagged(f"a{number}", body=CHAT2)) for number in range(3)]
        assert (len(line.stage.u1.requests), len(line.stage.u2.requests), line.waiting("m2")) == (1, 1, 1)
        held.set()
        until(lambda: len(line.stage.u2.requests) == 2, "whichever is free serves")
        line.let_go()
        assert [one.answer().status for one in asked] == [200] * 3


def test_models_that_share_an_endpoint_take_turns_at_it(tmp_path: Path) -> None:
    with queued(tmp_path, lambda text: text.replace('models = ["m2"]\n', 'models = ["m3"]\n')) as line:
        asked = [line.ask(tagged("m1-0")), line.ask(tagged("m1-1")), line.ask(tagged("m1-2")), line.ask(tagged("m2-0", body=CHAT2))]
        assert (line.waiting("m1"), line.waiting("m2")) == (2, 1)
        for _ in range(4):
            line.let_go()
        assert [one.answer().status for one in asked] == [200] * 4
        assert line.tags() == ["m1-0", "m1-1", "m2-0", "m1-2"]


def test_a_stream_that_waits_gets_comments(tmp_path: Path) -> None:
    with queued(tmp_path, route=f"{FULL_AT_ONE}\nsse_comment_interval_s = 0.2\nqueue_wait_s = 1") as line:
        running = line.ask(tagged("a0"))
        got = line.router.ask(post(CHAT_S))
        assert got.status == 200
        assert got.whole
        assert got.events[0] == ": keep-alive"
        assert '"code": "overloaded"' in got.events[-1]
        line.let_go()
        assert running.answer().status == 200


def test_without_a_queue_a_full_model_refuses_at_once(tmp_path: Path) -> None:
    with queued(tmp_path, route=f"{FULL_AT_ONE}\nqueue_wait_s = 0") as line:
        running = line.ask(tagged("a0"))
        got = line.router.ask(post(CHAT))
        assert (got.status, got.error["code"]) == (429, "overloaded")
        line.let_go()
        assert running.answer().status == 200


async def test_a_newcomer_does_not_take_the_place_that_those_who_wait_have_not_been_told_of() -> None:
    engine = Engine()
    router = Router(RealMachine(), Policy(RouteSettings(max_inflight_per_endpoint=1), auth_required=False), lambda _: None)
    router.seed(EndpointList((Endpoint(EndpointId("u1"), f"http://127.0.0.1:{engine.port}", ("m1",)),)))
    try:
        async with trio.open_nursery() as nursery:
            host, _, port = (await nursery.start(serve, router, "127.0.0.1:0")).rpartition(":")
            streams = [await trio.open_tcp_stream(host, int(port)) for _ in range(2)]
            state = router.state(EndpointId("u1"))
            state.running += 1  # somebody has the place
            await streams[0].send_all(tagged("first"))
            with trio.fail_after(20):
                while not router.turns.queue.size:
                    await trio.lowlevel.checkpoint()
                await streams[1].send_all(tagged("second"))
                state.running -= 1
                for stream in streams:
                    assert (await stream.receive_some(65536)).startswith(b"HTTP/1.1 200")
                    await stream.aclose()
            nursery.cancel_scope.cancel()
    finally:
        router.reactor.close()
        engine.close()
    assert [b"first" in seen["body"] for seen in engine.requests] == [True, False]
