"""What every engine's adapter must hold, started by the real supervisor against a stand-in with that engine's own manners.

A new engine adds a stand-in to `standins` and a row to ROWS; a test below fails while it has none.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from llmgw.agent import own_modules, processes
from llmgw.agent.asking import Answer, ask
from llmgw.agent.engines.probes import probe
from llmgw.agent.engines.registry import ENGINES
from llmgw.agent.engines.xllamacpp import ENTRY_MODULE
from llmgw.domain.errors import Invalid, Unavailable
from llmgw.domain.ids import ClusterId, OwnerId, ReplicaId
from llmgw.domain.lease import FencingToken
from llmgw.domain.model import ModelKind
from llmgw.domain.replica import ReplicaOrder, ReplicaReport, ReplicaState, RestartPolicy
from llmgw.protocol.messages import EngineSeen
from tests.agent.harness import STATE_DEADLINE_S, Bench, bench, bench_that_leaves, changed, order

STANDINS = Path(__file__).parent / "standins"
S = ReplicaState
M1 = ReplicaId("m1-00000001")
ONCE = RestartPolicy(backoff_s=(), attempts=1)
LIMIT_S = 1.0  # without progress; a stand-in's `crawl` takes three times as long


@attrs.frozen
class Row:
    """What is one engine's own.

    `command` runs the stand-in: the profile's for engine `command`, else the order's `engine_command`. `model_file`: does it get
    a checkpoint. `counts`: does it tell what it does. `key_variable`: where it takes its secret from. `cannot_load`: the last
    line of one whose load fails, and `bad_file`, for one with a checkpoint, of one whose file is no model. `knows_options`: its
    adapter refuses a wrong one before a process exists. `served`: the kinds whose probe it can answer.
    """

    name: str
    command: tuple[str, ...]
    model_file: bool
    counts: bool
    key_variable: str
    cannot_load: str
    bad_file: str = ""
    knows_options: bool = False
    env: Mapping[str, str] = attrs.field(factory=dict)
    served: tuple[ModelKind, ...] = (ModelKind.CHAT, ModelKind.COMPLETION, ModelKind.EMBEDDING, ModelKind.RERANK)
    not_served: tuple[ModelKind, ...] = ()

    def order(self, folder: Path, *, kind: ModelKind = ModelKind.CHAT, args: tuple[str, ...] = (), **script: Any) -> ReplicaOrder:
        script.setdefault("journal", str(folder / "journal"))
        model = folder / "model.gguf"
        if self.model_file and not model.exists():
            model.write_bytes(b"GGUF and more")
        made = order(
            engine=self.name,
            kind=kind,
            command=self.command if self.name == "command" else (),
            engine_command=() if self.name == "command" else self.command,
            checkpoint=str(model) if self.model_file else "",
            env={**self.env, "STANDIN": json.dumps(script)},
            progress_limit_s=LIMIT_S,
        )
        return changed(made, profile=attrs.evolve(made.profile, args=args))


LLAMA_NOT_SERVED = (ModelKind.SCORE, ModelKind.IMAGE)
ROWS = (
    Row(
        "command",
        (sys.executable, str(STANDINS / "any_engine.py"), "--port", "{port}", "--names", "{names}"),
        model_file=False,
        counts=False,
        key_variable="LLMGW_API_KEY",
        cannot_load="out of memory",
        served=(ModelKind.CHAT, ModelKind.COMPLETION, ModelKind.EMBEDDING, ModelKind.RERANK, ModelKind.SCORE),
    ),
    Row(
        "llama.cpp",
        (sys.executable, str(STANDINS / "llama_server.py")),
        model_file=True,
        counts=True,
        key_variable="LLAMA_API_KEY",
        cannot_load="llama_server: exiting due to model loading error",
        bad_file="llama_server: exiting due to model loading error",
        not_served=LLAMA_NOT_SERVED,
    ),
    Row(
        "xllamacpp",
        own_modules.command_line(ENTRY_MODULE),  # the one it has by itself; said here, so that no wheel need be installed
        model_file=True,
        counts=True,
        key_variable="LLMGW_API_KEY",
        cannot_load="Failed to init server, please check the input params.",
        bad_file="Failed to init server, please check the input params.",
        knows_options=True,
        env={"PYTHONPATH": os.pathsep.join((str(STANDINS / "wheel"), str(STANDINS)))},
        not_served=LLAMA_NOT_SERVED,
    ),
)
COUNTING = tuple(row for row in ROWS if row.counts)
WITH_FILE = tuple(row for row in ROWS if row.model_file)


def each(rows: tuple[Row, ...]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", rows, ids=lambda row: row.name)


def each_kind(pairs: list[tuple[Row, ModelKind]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("row", "kind"), pairs, ids=[f"{row.name}-{kind.value}" for row, kind in pairs])


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmgw.agent.replica.READY_POLL_S", 0.1)  # stand-ins load in a moment


def journal(folder: Path) -> list[str]:
    """One line per request that the stand-in answered: method, path, status."""
    path = folder / "journal"
    return path.read_text().splitlines() if path.exists() else []


async def post(report: ReplicaReport, kind: ModelKind, text: str = "hi", *, model: str = "m1", key: str | None = None) -> Answer:
    request = probe(kind, model)
    assert request is not None
    host, _, port = report.url.removeprefix("http://").partition(":")
    body = request.body.replace(b'"hi"', json.dumps(text).encode())
    return await ask(host, int(port), "POST", request.path, key=report.key if key is None else key, body=body)


async def say(report: ReplicaReport, text: str) -> None:
    """A chat that the engine may be killed over."""
    with contextlib.suppress(Unavailable):
        await post(report, ModelKind.CHAT, text)


def tell_seen(b: Bench, *, in_flight: int, silent_s: float) -> None:
    """What a leader tells of the routers' view."""
    b.supervisor.seen(EngineSeen(FencingToken(ClusterId("c"), 1, OwnerId("o")), M1, in_flight, silent_s, 0, 0))


async def tell_silence_until_started_anew(b: Bench) -> None:
    """Again and again, as routers do: a probe that comes before the request itself is answered, and ends the first suspicion."""
    with trio.fail_after(STATE_DEADLINE_S):
        while b.report().attempt == 1:
            tell_seen(b, in_flight=1, silent_s=LIMIT_S + 1)
            await trio.sleep(0.1)


def words_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def environment_of(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(entry.partition("=")[::2] for entry in entries if entry)


def test_every_registered_engine_has_its_row() -> None:
    assert [row.name for row in ROWS] == sorted(ENGINES)
    assert all((ENGINES[row.name].metrics_path is not None) == row.counts for row in ROWS)


# --- start


@each(ROWS)
async def test_it_is_ready_once_its_readiness_path_said_so_and_it_answered_one_probe(tmp_path: Path, row: Row) -> None:
    async with bench(tmp_path / "agent") as b:
        await b.supervisor.start(row.order(tmp_path, load_s=0.6))
        await b.wait_state(S.READY)
        ready_path = ENGINES[row.name].ready_path(b.report().order)
        asked = journal(tmp_path)
        first_good = asked.index(f"GET {ready_path} 200")
        assert f"GET {ready_path} 503" in asked[:first_good], "it never said that it was loading"
        assert not any(line.startswith("POST") for line in asked[:first_good]), "asked to work before it was up"
        assert asked[first_good + 1] == "POST /v1/chat/completions 200"


@each_kind([(row, kind) for row in ROWS for kind in row.served if kind is not ModelKind.CHAT])
async def test_the_probe_is_a_piece_of_work_of_its_models_kind(tmp_path: Path, row: Row, kind: ModelKind) -> None:
    request = probe(kind, "m1")
    assert request is not None
    async with bench(tmp_path / "agent") as b:
        await b.supervisor.start(changed(row.order(tmp_path, kind=kind), restart=ONCE))
        await b.wait(lambda: b.report().state in (S.READY, S.FAILED))
        assert b.report().state is S.READY, b.report().reason
        assert f"POST {request.path} 200" in journal(tmp_path)


@each_kind([(row, kind) for row in ROWS for kind in row.not_served])
async def test_a_kind_that_it_has_no_path_for_is_a_refused_start_and_not_a_crash_loop(tmp_path: Path, row: Row, kind: ModelKind) -> None:
    async with bench(tmp_path / "agent") as b:
        with pytest.raises(Invalid, match=rf"engine {row.name} cannot serve kind '{kind.value}'"):
            await b.supervisor.start(row.order(tmp_path, kind=kind))
        assert b.supervisor.reports() == ()


@each(ROWS)
async def test_its_secret_is_asked_for_is_its_own_and_stands_in_no_command_line_and_no_log(tmp_path: Path, row: Row) -> None:
    async with bench(tmp_path / "agent") as b:
        await b.supervisor.start(row.order(tmp_path, fork=True))
        report = await b.wait_state(S.READY)
        assert (await post(report, ModelKind.CHAT)).status == 200
        assert (await post(report, ModelKind.CHAT, key="")).status == 401
        assert (await post(report, ModelKind.CHAT, key="another")).status == 401
        tree = b.ours()
        assert len(tree) == 3
        assert not any(report.key.encode() in words_of(process.pid) for process in tree)
        environment = environment_of(report.pid)
        assert environment[row.key_variable] == report.key
        assert environment["CUDA_VISIBLE_DEVICES"] == ""
        assert report.key not in b.supervisor._replicas[M1].logs.read(1, 0, 1_000_000).text


@each(ROWS)
async def test_it_answers_under_the_models_name_and_to_its_aliases(tmp_path: Path, row: Row) -> None:
    async with bench(tmp_path / "agent") as b:
        await b.supervisor.start(row.order(tmp_path))
        report = await b.wait_state(S.READY)
        answer = await post(report, ModelKind.CHAT)
        assert json.loads(answer.body)["model"] == "m1"
        assert (await post(report, ModelKind.CHAT, model="fast")).status == 200


# --- failing starts


@each(ROWS)
async def test_a_load_that_fails_tells_the_engines_last_line(tmp_path: Path, row: Row) -> None:
    async with bench(tmp_path / "agent") as b:
        await b.supervisor.start(changed(row.order(tmp_path, fail="out of memory"), restart=ONCE))
        report = await b.wait_state(S.FAILED)
        assert report.exit_code == 1
        assert report.log_tail[-1].endswith(row.cannot_load)
        assert any("out of memory" in line for line in report.log_tail)
        failed = next(event for event in b.events if event.kind == "replica.failed")
        assert "exited with code 1" in failed.text
        assert row.cannot_load in failed.text


@each(WITH_FILE)
async def test_a_file_that_is_no_model_fails_with_what_the_engine_says_of_it(tmp_path: Path, row: Row) -> None:
    (tmp_path / "model.gguf").write_bytes(b"<html>404</html>")
    async with bench(tmp_path / "agent") as b:
        await b.supervisor.start(changed(row.order(tmp_path), restart=ONCE))
        report = await b.wait_state(S.FAILED)
        assert report.log_tail[-1].endswith(row.bad_file)
        assert any("invalid magic" in line for line in report.log_tail)


@each(ROWS)
async def test_an_option_that_it_does_not_know_is_told_by_name(tmp_path: Path, row: Row) -> None:
    async with bench(tmp_path / "agent") as b:
        wanted = changed(row.order(tmp_path, args=("--warp", "9")), restart=ONCE)
        if row.knows_options:
            with pytest.raises(Invalid, match="--warp"):
                await b.supervisor.start(wanted)
            assert b.ours() == []
        else:
            await b.supervisor.start(wanted)
            report = await b.wait_state(S.FAILED)
            assert any("--warp" in line for line in report.log_tail)


@each(tuple(row for row in ROWS if row.name != "command"))
async def test_a_node_without_its_program_refuses_the_start_and_names_the_engine(tmp_path: Path, row: Row) -> None:
    async with bench(tmp_path / "agent") as b:
        with pytest.raises(Invalid, match=f'engine "{row.name}" is not on this node: program not found: /nowhere/engine') as caught:
            await b.supervisor.start(changed(row.order(tmp_path), engine_command=("/nowhere/engine",)))
        assert caught.value.code == "program_missing"
        assert b.supervisor.reports() == ()


# --- at work


@each(COUNTING)
async def test_its_counters_tell_how_many_requests_run(tmp_path: Path, row: Row) -> None:
    async with bench(tmp_path / "agent") as b, trio.open_nursery() as clients:
        await b.supervisor.start(row.order(tmp_path))
        report = await b.wait_state(S.READY)
        await b.wait(lambda: b.report().running == 0)
        for _ in range(2):  # one in its slot, one that waits for it: both are somebody's
            clients.start_soon(say, report, "crawl")
        await b.wait(lambda: b.report().running == 2)
        await b.wait(lambda: b.report().running == 0)


@each(ROWS)
async def test_an_engine_that_works_for_long_and_moves_is_left_alone(tmp_path: Path, row: Row) -> None:
    async with bench(tmp_path / "agent") as b:
        await b.supervisor.start(row.order(tmp_path))
        report = await b.wait_state(S.READY)
        async with trio.open_nursery() as clients:
            clients.start_soon(say, report, "crawl")  # three times the limit
            if not row.counts:
                for _ in range(10):
                    tell_seen(b, in_flight=1, silent_s=0.1)  # its stream says something all the time
                    await trio.sleep(0.25)
        assert (b.report().pid, b.report().attempt, b.report().in_rotation) == (report.pid, 1, True)
        assert "replica.stalled" not in b.kinds()
        assert journal(tmp_path).count("POST /v1/chat/completions 200") == 2, "it was probed though it moved"


@each(ROWS)
async def test_an_engine_that_stands_still_over_a_request_leaves_the_rotation_and_is_started_anew(tmp_path: Path, row: Row) -> None:
    async with bench(tmp_path / "agent") as b, trio.open_nursery() as clients:
        await b.supervisor.start(row.order(tmp_path))
        before = await b.wait_state(S.READY)
        clients.start_soon(say, before, "stall")
        if not row.counts:
            await tell_silence_until_started_anew(b)
        await b.wait(lambda: b.report().attempt == 2)
        after = await b.wait_state(S.READY)
        assert after.pid != before.pid
        assert processes.identify(before.pid) is None
        stalled = next(report for report in b.reports if report.state is S.READY and not report.in_rotation)
        assert stalled.reason == "stalled"
        assert "replica.stalled" in b.kinds()


@each(COUNTING)
async def test_an_engine_whose_counters_stop_being_told_is_judged_by_what_routers_see(
    tmp_path: Path, row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmgw.agent.progress.COUNTERS_FRESH_S", 1.0)
    monkeypatch.setattr("llmgw.agent.replica.WATCH_LOOK_LIMIT_S", 0.5)
    async with bench(tmp_path / "agent") as b, trio.open_nursery() as clients:
        await b.supervisor.start(row.order(tmp_path))
        before = await b.wait_state(S.READY)
        await b.wait(lambda: b.report().running == 0)
        clients.start_soon(say, before, "wedge")
        await tell_silence_until_started_anew(b)
        assert "replica.stalled" in b.kinds()
        await b.wait_state(S.READY)


# --- ends


@each(ROWS)
async def test_its_stop_signal_ends_it_within_the_grace_and_its_whole_tree_is_gone(tmp_path: Path, row: Row) -> None:
    async with bench(tmp_path / "agent") as b:
        await b.supervisor.start(row.order(tmp_path))
        report = await b.wait_state(S.READY)
        asked_s = b.machine.now_s()
        b.supervisor.stop(M1, "not wanted any more", 25.0)
        await b.wait_state(S.STOPPED)
        assert b.machine.now_s() - asked_s < 20.0, "it was killed, not asked"
        assert b.ours() == []
        assert processes.identify(report.pid) is None


@each(ROWS)
async def test_one_that_ignores_its_stop_signal_and_its_children_are_killed_after_the_grace(tmp_path: Path, row: Row) -> None:
    async with bench(tmp_path / "agent") as b:
        await b.supervisor.start(row.order(tmp_path, deaf=True, fork=True))
        await b.wait_state(S.READY)
        assert len(b.ours()) == 3
        asked_s = b.machine.now_s()
        b.supervisor.stop(M1, "not wanted any more", 0.5)
        await b.wait_state(S.STOPPED)
        assert b.machine.now_s() - asked_s >= 0.5
        assert b.ours() == []


@each(ROWS)
async def test_it_lives_on_without_its_agent_and_the_next_one_goes_on_with_it(tmp_path: Path, row: Row) -> None:
    async with bench_that_leaves(tmp_path / "agent") as before:
        await before.supervisor.start(row.order(tmp_path))
        ready = await before.wait_state(S.READY)
    asked = len(journal(tmp_path))
    async with bench(tmp_path / "agent") as after:
        report = after.report()
        assert (report.pid, report.key, report.state, report.attempt) == (ready.pid, ready.key, S.READY, 1)
        assert not any(line.startswith("POST") for line in journal(tmp_path)[asked:]), "proved anew though it ran"
        assert (await post(report, ModelKind.CHAT)).status == 200
        if row.counts:
            await after.wait(lambda: after.report().running == 0)
        os.kill(report.pid, signal.SIGKILL)
        await after.wait(lambda: after.report().attempt == 2)
        again = await after.wait_state(S.READY)
        assert again.pid != report.pid
        assert len(after.ours()) == 1


# --- the stand-ins themselves


def test_the_wheels_stand_in_has_no_name_that_the_wheel_has_not() -> None:
    wheel = pytest.importorskip("xllamacpp")
    stand_in = _module("wheel_stand_in", STANDINS / "wheel" / "xllamacpp" / "__init__.py")
    for name in ("CommonParams", "CommonParamsModel", "CpuParams"):
        assert set(getattr(stand_in, name).__slots__) <= set(dir(getattr(wheel, name))), name
    for name in ("llama_pooling_type", "llama_load_mode"):
        real = {one.name: int(one) for one in getattr(wheel, name)}
        assert {one.name: int(one) for one in getattr(stand_in, name)}.items() <= real.items(), name


def test_the_stand_in_for_llama_server_takes_no_option_that_llama_cpp_has_not() -> None:
    """The wheel holds llama.cpp's own parser, with every option's name as a string of its own."""
    wheel = pytest.importorskip("xllamacpp")
    (library,) = Path(wheel.__file__).parent.glob("xllamacpp*.so")
    data = library.read_bytes()
    stand_in = _module("llama_server_stand_in", STANDINS / "llama_server.py")
    options = {*stand_in.WHOLE_NUMBERS, *stand_in.TEXTS, *stand_in.SWITCHES}
    assert [option for option in sorted(options) if f"{option}\0".encode() not in data] == []
    for counter in ("requests_processing", "requests_deferred", "n_decode_total", "prompt_tokens_cached_total", "tokens_predicted_total"):
        assert f"{counter}\0".encode() in data


def _module(name: str, path: Path) -> Any:
    import importlib.util

    sys.path.insert(0, str(STANDINS))  # as a program that runs from there has it
    try:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(STANDINS))
