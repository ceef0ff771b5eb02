"""What engines say of their load: read from their texts, asked for in the background, and set beside our own count."""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from llmgw.domain.endpoint import Endpoint, EndpointList, ListStamp
from llmgw.domain.ids import ClusterId, EndpointId, OwnerId
from llmgw.domain.lease import FencingToken
from llmgw.domain.policy import Policy, RouteSettings
from llmgw.router import breaker
from llmgw.router.choose import Choice, choose
from llmgw.router.engine_load import (
    AGAIN_MAX_S,
    FRESH_PERIODS,
    LINE_MAX,
    NONE_AGAIN_MAX_S,
    POLL_S,
    POLLS_PER_S_MAX,
    EngineLoad,
    LoadText,
    again_s,
    engine_load,
    period_s,
)
from llmgw.router.load import BODY_MAX, poll_forever
from llmgw.router.reactor import Reactor
from llmgw.router.router import IN_USE_LOOK_S, IN_USE_S, Router
from llmgw.router.table import build_table
from llmgw.router.upstreams import EndpointState
from llmgw.sim.machine import SimMachine
from llmgw.wiring.machine import RealMachine
from tests.router.fakes import CHAT2, WAIT_S, Engine, Stage, answer, post, staged, until

VLLM = (
    "# HELP vllm:num_requests_running Number of requests in model execution batches.\n"
    "# TYPE vllm:num_requests_running gauge\n"
    'vllm:num_requests_running{engine="0",model_name="a,b} c"} 2.0\n'
    'vllm:num_requests_running{engine="1",model_name="a,b} c"} 1.0\n'
    "# TYPE vllm:num_requests_waiting gauge\n"
    'vllm:num_requests_waiting{engine="0",model_name="a,b} c"} 4.0\n'
    'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0\n'
)
SGLANG = (
    "# TYPE sglang:num_running_reqs gauge\n"
    'sglang:num_running_reqs{model_name="m",priority="",tp_rank="0"} 3.0\n'
    'sglang:num_running_reqs{model_name="m",priority="1",tp_rank="0"} 3.0\n'
    'sglang:num_queue_reqs{model_name="m",priority="",tp_rank="0"} 4.0\n'
    'sglang:num_queue_reqs{model_name="m",tp_rank="0",priority="0"} 4.0\n'
)
LLAMA = "llamacpp:requests_processing 3\nllamacpp:requests_deferred 4 1700000000000\nllamacpp:n_decode_total 70"
TEXTS = {"vllm": VLLM, "sglang": SGLANG, "llama.cpp": LLAMA}


def _read(*pieces: bytes) -> tuple[int, int] | None:
    text = LoadText()
    for piece in pieces:
        text.feed(piece)
    return text.load()


@pytest.mark.parametrize("name", TEXTS)
def test_each_kind_of_engine_tells_its_load(name: str) -> None:
    assert _read(TEXTS[name].encode()) == (3, 4)


@given(st.sampled_from(sorted(TEXTS)), st.lists(st.integers(0, 600)))
def test_any_split_of_a_text_reads_the_same(name: str, cuts: list[int]) -> None:
    data = TEXTS[name].encode()
    marks = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    assert _read(*(data[a:b] for a, b in itertools.pairwise(marks))) == (3, 4)


@pytest.mark.parametrize(
    "text",
    [
        "", "{}", "process_cpu_seconds_total 3\n", "vllm:num_requests_waiting 3\n", "x vllm:num_requests_running 3\n",
        "vllm:num_requests_running\n", "vllm:num_requests_running nope\n", "vllm:num_requests_running NaN\n",
        "vllm:num_requests_running -1\n", "vllm:num_requests_running +Inf\n", "vllm:num_requests_running 1e9\n",
        "vllm:num_requests_running{a=\"b\" 3\n", "vllm:num_requests_running 3\nvllm:num_requests_waiting nope\n",
        "vllm:num_requests_running_total 3\n",
    ],
)  # fmt: skip
def test_a_text_without_the_figures_or_with_nonsense_tells_nothing(text: str) -> None:
    assert _read(text.encode()) is None


@given(st.binary(max_size=300))
def test_no_text_is_a_fault_of_ours(data: bytes) -> None:
    _read(b"vllm:num_requests_running", data)
    found = _read(b"vllm:num_requests_running 1\n", data)
    assert found is None or found >= (1, 0)


def test_a_line_without_end_is_passed_over_and_takes_no_memory() -> None:
    text = LoadText()
    for _ in range(40):
        text.feed(b"x" * LINE_MAX)
    text.feed(b"vllm:num_requests_running 7\nvllm:num_requests_running 1\n")
    assert text.load() == (1, 0)


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**4), st.integers(0, 10**4))
def test_our_own_count_is_the_floor_and_never_counts_twice(running: int, waiting: int, own: int, now: int) -> None:
    load = engine_load(running, waiting, own, 100.0, 1.5)
    assert now + load.others >= now
    assert load.others + own == max(running + waiting, own)
    assert load.until_s == 100.0 + FRESH_PERIODS * 1.5


@given(st.integers(1, 10_000), st.booleans())
def test_who_gives_nothing_is_asked_ever_more_rarely_but_not_never(failures: int, lasting: bool) -> None:
    wait_s = again_s(failures, POLL_S, lasting=lasting)
    assert POLL_S < wait_s <= again_s(failures + 1, POLL_S, lasting=lasting) <= (NONE_AGAIN_MAX_S if lasting else AGAIN_MAX_S)


@given(st.integers(0, 100_000))
def test_each_is_asked_once_a_second_at_most_and_all_together_within_a_bound(endpoints: int) -> None:
    assert period_s(endpoints) >= POLL_S
    assert endpoints / period_s(endpoints) <= POLLS_PER_S_MAX + 1e-6
    assert again_s(1, period_s(endpoints), lasting=False) >= period_s(endpoints)


class View:
    """A `choose.EndpointView` that is only loaded."""

    def __init__(self, in_flight: int, told: EngineLoad | None) -> None:
        self.in_flight = in_flight
        self.promised = 0
        self.breaker = breaker.CLOSED
        self.resting_until_s = 0.0
        self.engine_load = told


def _picked(views: dict[str, View]) -> set[str]:
    endpoints = EndpointList(tuple(Endpoint(EndpointId(name), f"http://{name}:1", ("m",)) for name in views))
    tiers = build_table(endpoints).targets["m"].tiers
    found = set()
    for seed in range(50):
        choice = choose(tiers, lambda known: views[known], 100.0, random.Random(seed), policy="least_load", max_inflight=20)
        assert isinstance(choice, Choice)
        found.add(str(choice.candidate.endpoint.id))
    return found


def test_others_requests_count_while_they_are_known() -> None:
    busy = EngineLoad(9, 0, 9, 101.0)
    assert _picked({"a": View(0, busy), "b": View(5, None)}) == {"b"}
    assert _picked({"a": View(0, EngineLoad(9, 0, 9, 100.0)), "b": View(5, None)}) == {"a"}  # too old
    assert _picked({"a": View(0, EngineLoad(500, 500, 1000, 101.0))}) == {"a"}  # never a reason not to choose
    assert _picked({"a": View(3, EngineLoad(0, 0, 0, 101.0)), "b": View(1, None)}) == {"b"}  # an engine that says nothing runs


async def test_only_endpoints_between_which_load_decides_are_asked() -> None:
    router = Router(SimMachine(1), Policy(), lambda line: None)
    rows = (("a", ("m1",)), ("b", ("m2",)), ("c", ("m2", "m3")))
    endpoints = EndpointList(tuple(Endpoint(EndpointId(name), f"http://{name}:1", models) for name, models in rows))
    router.set_endpoints(endpoints, ListStamp(FencingToken(ClusterId("c"), 1, OwnerId("o")), 1))
    assert {str(state.endpoint.id) for state in router.polled()} == {"b", "c"}
    assert router.polled() is router.polled()
    router.set_policy(Policy(RouteSettings(policy="weighted_random")))
    assert router.polled() == ()


async def test_of_very_many_only_those_are_asked_whose_models_somebody_asks_for(autojump_clock: object) -> None:
    machine = SimMachine(1)
    router = Router(machine, Policy(), lambda line: None)
    rows = [*((f"a{number}", "m1") for number in range(POLLS_PER_S_MAX)), ("b0", "m2"), ("b1", "m2")]
    endpoints = tuple(Endpoint(EndpointId(name), f"http://{name}:1", (model,)) for name, model in rows)
    router.set_endpoints(EndpointList(endpoints), ListStamp(FencingToken(ClusterId("c"), 1, OwnerId("o")), 1))
    assert router.polled() == ()
    router.metrics.asked("m2", 0.0)
    await machine.sleep_until(machine.now_s() + IN_USE_LOOK_S)
    asked = router.polled()
    assert {str(state.endpoint.id) for state in asked} == {"b0", "b1"}
    router.metrics.asked("m2", 0.0)
    await machine.sleep_until(machine.now_s() + IN_USE_S - IN_USE_LOOK_S)
    assert router.polled() is asked
    await machine.sleep_until(machine.now_s() + IN_USE_S)
    assert router.polled() == ()
    fewer = EndpointList(endpoints[2:])
    router.set_endpoints(fewer, ListStamp(FencingToken(ClusterId("c"), 1, OwnerId("o")), 2))
    assert len(router.polled()) == len(fewer.endpoints)


class Polled:
    """Endpoints whose engines are really asked."""

    def __init__(self, *engines: Engine) -> None:
        self.reactor = Reactor(RealMachine().now_s)
        self.states = tuple(
            EndpointState(Endpoint(EndpointId(f"e{number}"), f"http://127.0.0.1:{engine.port}/v1", ("m",), key="secret"), self.reactor, 0.0)
            for number, engine in enumerate(engines)
        )
        self.bugs: list[Exception] = []


@asynccontextmanager
async def polled(*engines: Engine) -> AsyncIterator[Polled]:
    found = Polled(*engines)
    found.reactor.open()
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(found.reactor.run)
            nursery.start_soon(poll_forever, RealMachine(), lambda: found.states, lambda _, err: found.bugs.append(err))
            yield found
            nursery.cancel_scope.cancel()
    finally:
        found.reactor.close()
    assert found.bugs == []


async def comes(condition: Callable[[], Any], what: str) -> None:
    with trio.move_on_after(WAIT_S):
        while not condition():
            await trio.sleep(0.01)
        return
    raise AssertionError(f"never came: {what}")


@pytest.fixture
def engine() -> Iterator[Engine]:
    found = Engine()
    yield found
    found.close()


def text(body: str) -> list[Any]:
    return answer(200, body, kind="text/plain")


@pytest.mark.parametrize("name", TEXTS)
async def test_an_engine_is_asked_with_its_key_on_one_connection(engine: Engine, name: str) -> None:
    engine.metrics = [text(TEXTS[name])]
    async with polled(engine) as found:
        (state,) = found.states
        await comes(lambda: state.engine_load is not None, "a figure")
        assert state.engine_load is not None
        assert (state.engine_load.running, state.engine_load.waiting, state.engine_load.others) == (3, 4, 7)
        await comes(lambda: engine.count("poll") == 2, "the next question")
        assert len(engine._open) == 1
        assert "authorization: Bearer secret" in engine.log[0]["head"]
        assert (state.in_flight, state.used, state.idle) == (0, False, [])  # it counts as no use
    await comes(lambda: not engine._open, "the connection is closed")


BAD: dict[str, list[Any]] = {
    "404": [answer(404, "{}")],
    "500": [answer(500, "{}")],
    "no such figures": [text("up 1\n")],
    "nonsense": [text("vllm:num_requests_running many\n")],
    "10 MB": [text("vllm:num_requests_running 1\n" * (10 * BODY_MAX // 28))],
    "silence": [["w", 20_000]],
    "no end": [["s", "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nvllm:num_requests_running 1\n"], ["w", 20_000]],
    "cut": [["s", "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nvllm:num_requests_running 1\n"], ["close"]],
    "reset": [["rst"]],
    "no HTTP": [["s", "vllm:num_requests_running 1\r\n\r\n"]],
}


@pytest.mark.parametrize("what", BAD)
async def test_what_cannot_be_read_makes_the_load_unknown_and_nothing_else(engine: Engine, what: str) -> None:
    engine.metrics = [text(VLLM)]
    async with polled(engine) as found:
        (state,) = found.states
        await comes(lambda: state.engine_load is not None, "a figure")
        engine.metrics = BAD[what]
        await comes(lambda: state.engine_load is None, "it is unknown")
        assert state.breaker.open_until_s is None
        await comes(lambda: not engine._open or what == "10 MB", "the connection is given up")
        engine.metrics = [text(VLLM)]
        if what in ("silence", "reset"):
            await comes(lambda: state.engine_load is not None, "it is known again")


@pytest.mark.case("B102")
async def test_an_engine_that_hangs_holds_up_no_other(engine: Engine) -> None:
    silent = Engine()
    silent.metrics = [["w", 20_000]]
    engine.metrics = [text(VLLM)]
    try:
        async with polled(*[silent] * 20, engine) as found:
            await comes(lambda: found.states[-1].engine_load is not None, "a figure")
            assert all(state.engine_load is None for state in found.states[:-1])
    finally:
        silent.close()


async def test_very_many_are_asked_in_turn(engine: Engine) -> None:
    engine.metrics = [text(LLAMA)]
    async with polled(*[engine] * 100) as found:
        await comes(lambda: all(state.engine_load is not None for state in found.states), "all are known")


async def test_a_withdrawn_endpoint_is_asked_no_more(engine: Engine) -> None:
    engine.metrics = [text(VLLM)]
    async with polled(engine) as found:
        (state,) = found.states
        await comes(lambda: state.engine_load is not None, "a figure")
        found.states = ()
        await comes(lambda: not state.polled, "it is let go")
        assert state.engine_load is None
        await comes(lambda: not engine._open, "the connection is closed")


async def test_an_answer_that_the_close_delimits_is_read_too(engine: Engine) -> None:
    engine.metrics = [["s", f"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\n{VLLM}"], ["close"]]
    async with polled(engine) as found:
        (state,) = found.states
        await comes(lambda: state.engine_load is not None, "a figure")
        await comes(lambda: engine.count("poll") == 2 and state.engine_load is not None, "the next question")


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with staged(tmp_path) as found:
        yield found


def test_requests_go_where_others_are_fewer(stage: Stage) -> None:
    stage.u1.metrics = [text("vllm:num_requests_running 30\nvllm:num_requests_waiting 20\n")]
    stage.u2.metrics = [text("vllm:num_requests_running 1\n")]
    until(lambda: _known(stage) == 2, "both are known")
    assert stage.router.metric_of("llmgw_endpoint_running", 'endpoint="u1"') == 30
    assert stage.router.metric_of("llmgw_endpoint_waiting", 'endpoint="u1"') == 20
    stage.u1.log.clear()
    assert {stage.router.ask(post(CHAT2)).status for _ in range(30)} == {200}
    assert stage.u1.requests == []
    stage.u1.metrics = [["w", 20_000]]  # nobody is punished for a figure that is missing
    until(lambda: _known(stage) == 1, "one is unknown")
    until(lambda: stage.router.ask(post(CHAT2)).status == 200 and stage.u1.requests, "it is chosen again")


def _known(stage: Stage) -> float:
    try:
        return stage.router.metric("llmgw_endpoint_load_known")
    except AssertionError:  # not asked yet
        return 0
