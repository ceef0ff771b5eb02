"""Engines as real processes under the supervisor: T37 and B112 to B138 for engine `command`."""

# ruff: noqa: ASYNC240 - the tests read /proc and small files where they stand
from __future__ import annotations

import os
import signal
import stat
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from llmgw.agent import processes
from llmgw.domain.errors import Conflict, Invalid, LlmgwError, NotFound
from llmgw.domain.ids import ClusterId, OwnerId, ReplicaId
from llmgw.domain.lease import FencingToken
from llmgw.domain.model import ModelKind
from llmgw.domain.replica import ReplicaState, RestartPolicy, may_move
from llmgw.protocol.messages import EngineSeen, LogRequest
from llmgw.wiring.machine import RealMachine
from tests.agent.harness import QUICK, Bench, bench, changed, chat, order
from tests.programs import free_port

S = ReplicaState
M1 = ReplicaId("m1-00000001")


def seen(in_flight: int = 0, silent_s: float = 0.0, answers: int = 0, failures: int = 0) -> EngineSeen:
    token = FencingToken(ClusterId("c"), 1, OwnerId("o"))
    return EngineSeen(token, M1, in_flight, silent_s, answers, failures)


async def test_an_engine_is_ready_after_it_did_its_work_once_and_stopped_when_its_tree_is_gone(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        await b.supervisor.start(order("key"))
        report = await b.wait_state(S.READY)
        assert report.url.startswith("http://127.0.0.1:")
        assert await chat(report.url, report.key) == 200
        assert await chat(report.url, "not-the-key") == 401
        b.supervisor.stop(M1, "not wanted any more", 2.0)
        await b.wait_state(S.STOPPED)
        assert b.states() == [S.STARTING, S.LOADING, S.READY, S.DRAINING, S.STOPPED]
        assert b.ours() == []
        assert "replica.ready" in b.kinds()
        assert "replica.stopped" in b.kinds()


async def test_every_move_that_is_reported_is_a_legal_one(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        await b.supervisor.start(order("crash,after=0.1"))
        await b.wait_state(S.FAILED)
        states = b.states()
        assert all(may_move(before, after) for before, after in pairwise(states))


async def test_the_secret_is_in_the_environment_and_a_private_file_and_never_in_argv(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        command = (
            sys.executable,
            str(Path(__file__).parent.parent / "chaos" / "eng.py"),
            "--port",
            "{port}",
            "--key-file",
            "{api_key_file}",
        )
        await b.supervisor.start(order("key", command=command))
        report = await b.wait_state(S.READY)
        argv = Path(f"/proc/{report.pid}/cmdline").read_bytes().split(b"\0")
        assert report.key.encode() not in b"".join(argv)
        key_file = Path(argv[argv.index(b"--key-file") + 1].decode())
        assert key_file.read_text() == report.key
        assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
        assert stat.S_IMODE((tmp_path / "replicas" / M1 / "state.json").stat().st_mode) == 0o600


async def test_our_secrets_and_proxies_do_not_reach_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "https_proxy", "AWS_SECRET_ACCESS_KEY", "LLMGW_TOKEN", "OPENAI_API_KEY", "NOTIFY_SOCKET"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("HARMLESS", "yes")
    async with bench(tmp_path) as b:
        await b.supervisor.start(order(env={"HF_TOKEN": "given on purpose"}))
        report = await b.wait_state(S.READY)
        environment = dict(entry.partition(b"=")[::2] for entry in Path(f"/proc/{report.pid}/environ").read_bytes().split(b"\0") if entry)
        assert b"http://127.0.0.1:9" not in environment.values()
        assert environment[b"HARMLESS"] == b"yes"
        assert environment[b"HF_TOKEN"] == b"given on purpose"
        assert environment[b"LLMGW_START"].startswith(b"m1-00000001.1.")
        assert environment[b"CUDA_VISIBLE_DEVICES"] == b""


async def test_a_crashing_engine_is_tried_with_back_off_and_then_failed_with_its_code_and_last_lines(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        await b.supervisor.start(order("crash,after=0.1"))
        report = await b.wait_state(S.FAILED)
        assert report.exit_code == 1
        assert report.reason == "exited with code 1"
        assert report.log_tail[-1] == "CUDA error: fake"
        assert report.attempt == QUICK.attempts
        chunk = await b.supervisor.log(LogRequest("r", M1, attempt=1))
        assert chunk.attempts == (1, 2, 3)
        assert "CUDA error: fake" in chunk.text
        assert b.kinds().count("replica.crashed") == QUICK.attempts - 1
        assert b.kinds().count("replica.failed") == 1


async def test_what_an_engine_writes_steers_nobodys_terminal(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        await b.supervisor.start(order("crash,colours,after=0.1"))
        report = await b.wait_state(S.FAILED)
        assert report.log_tail[-1] == "CUDA error: fake"
        assert [event.text for event in b.events if "last line: CUDA error: fake" in event.text]
        assert not [event.text for event in b.events if not event.text.isprintable()]


async def test_while_attempts_fail_the_report_says_which_this_is_and_how_the_one_before_ended(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        await b.supervisor.start(order("crash,after=0"))
        failed = await b.wait_state(S.FAILED)
        told = [(report.state, report.tries, report.failure) for report in b.reports if report.state in (S.STARTING, S.LOADING)]
        end = "exited with code 1: CUDA error: fake"
        assert [one for index, one in enumerate(told) if one not in told[:index]] == [
            (S.STARTING, 1, ""), (S.LOADING, 1, ""), (S.STARTING, 2, end), (S.LOADING, 2, end), (S.STARTING, 3, end), (S.LOADING, 3, end),
        ]  # fmt: skip
        assert (failed.tries, failed.failure) == (3, end)


async def test_a_failed_replica_starts_again_only_by_a_command_and_with_a_fresh_count(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        await b.supervisor.start(order("crash,after=0.1"))
        await b.wait_state(S.FAILED)
        b.supervisor.restart(M1, "an operator asked")
        await b.wait_state(S.LOADING)
        report = await b.wait_state(S.FAILED)
        assert report.attempt == 2 * QUICK.attempts
        assert b.kinds().count("replica.failed") == 2


async def test_a_start_that_takes_too_long_says_so_and_one_with_more_time_gets_ready(tmp_path: Path) -> None:
    once = RestartPolicy(backoff_s=(), attempts=1)
    async with bench(tmp_path) as b:
        await b.supervisor.start(order("ready=3", load_limit_s=1.0, restart=once))
        report = await b.wait_state(S.FAILED)
        assert report.reason == "start timed out after 1 s"
        await b.supervisor.start(order("ready=3", load_limit_s=20.0, restart=once))
        await b.wait_state(S.READY)


async def test_a_models_list_that_answers_early_does_not_make_an_engine_ready(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        started_s = b.machine.now_s()
        await b.supervisor.start(order("early,ready=2"))
        await b.wait_state(S.READY)
        assert b.machine.now_s() - started_s >= 2.0


@pytest.mark.parametrize("mode", ["hang=0", "err=0"])
async def test_an_engine_that_cannot_do_its_work_is_never_ready_and_fails_with_reason_probe(tmp_path: Path, mode: str) -> None:
    async with bench(tmp_path) as b:
        await b.supervisor.start(order(mode, progress_limit_s=0.5, stop_grace_s=0.5))
        report = await b.wait_state(S.FAILED)
        assert report.reason == "probe"
        assert S.READY not in b.states()


async def test_a_kind_without_a_probe_is_ready_by_its_readiness_path(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        await b.supervisor.start(order("err=0", kind=ModelKind.OTHER))
        await b.wait_state(S.READY)


async def test_a_stop_ends_children_in_their_own_sessions_that_ignore_term(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        await b.supervisor.start(order("fork,deaf"))
        report = await b.wait_state(S.READY)
        assert len(b.ours()) == 3
        asked_s = b.machine.now_s()
        b.supervisor.stop(M1, "stop", 1.0)
        assert b.report().state is S.DRAINING
        await b.wait_state(S.STOPPED)
        assert b.ours() == []
        assert processes.identify(report.pid) is None
        assert b.machine.now_s() - asked_s >= 1.0, "the grace was not given"


async def test_children_of_a_killed_engine_are_gone_before_it_is_started_again(tmp_path: Path) -> None:
    slow = RestartPolicy(backoff_s=(2.0,), attempts=3)
    async with bench(tmp_path) as b:
        await b.supervisor.start(order("fork", restart=slow))
        report = await b.wait_state(S.READY)
        children = [process for process in b.ours() if process.pid != report.pid]
        assert len(children) == 2
        os.kill(report.pid, signal.SIGKILL)
        again = await b.wait_state(S.STARTING)
        assert again.reason == "killed by signal 9"
        assert again.exit_code == -9
        assert [process for process in b.ours() if process in children] == []
        after = await b.wait_state(S.READY)
        assert after.attempt == 2
        assert after.pid != report.pid


async def test_a_child_that_dropped_its_environment_and_session_is_ended_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmgw.agent.supervisor.SURVEY_S", 0.2)
    patient = RestartPolicy(backoff_s=(600.0,), attempts=3)
    async with bench(tmp_path) as b:
        await b.supervisor.start(order("hide", restart=patient))
        report = await b.wait_state(S.READY)
        (child,) = [process for process in processes.survey() if process.parent == report.pid]
        assert child.token == ""
        await b.wait(lambda: child.identity in b.supervisor._replicas[M1].members)
        os.kill(report.pid, signal.SIGKILL)
        await b.wait_state(S.STARTING)
        assert processes.identify(child.pid) != child.identity


async def test_a_killed_engine_is_out_of_rotation_before_its_children_are_gone(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        await b.supervisor.start(order("fork"))
        report = await b.wait_state(S.READY)
        b.reports.clear()
        os.kill(report.pid, signal.SIGKILL)
        await b.wait_state(S.STARTING)
        assert b.reports[0].state is S.READY
        assert not b.reports[0].in_rotation


async def test_an_engine_behind_a_shell_dies_with_it(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        script = f'"{sys.executable}" "{Path(__file__).parent.parent / "chaos" / "eng.py"}" --port {{port}}; true'
        await b.supervisor.start(order(command=("/bin/sh", "-c", script)))
        await b.wait_state(S.READY)
        assert len(b.ours()) == 2
        b.supervisor.stop(M1, "stop", 5.0)
        await b.wait_state(S.STOPPED)
        assert b.ours() == []


async def test_output_that_nobody_reads_does_not_block_an_engine_and_stays_within_the_cap(tmp_path: Path) -> None:
    cap = 256 * 1024
    async with bench(tmp_path, log_bytes_max=cap) as b:
        await b.supervisor.start(order("spew"))
        report = await b.wait_state(S.READY)
        assert await chat(report.url) == 200
        folder = tmp_path / "replicas" / M1
        await b.wait(lambda: sum(entry.stat().st_size for entry in folder.iterdir() if ".log" in entry.name) <= cap)
        chunk = await b.supervisor.log(LogRequest("r", M1, offset=-20))
        assert chunk.text.endswith("x\n") or chunk.text.endswith("serving\n")
        assert chunk.next_offset >= 2 * 1024 * 1024


async def test_an_engine_without_progress_at_the_routers_is_probed_benched_as_stalled_and_restarted(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        await b.supervisor.start(order("hang=1", progress_limit_s=1.0))
        report = await b.wait_state(S.READY)
        b.reports.clear()
        b.supervisor.seen(seen(in_flight=2, silent_s=1.5))
        await b.wait(lambda: b.report().attempt == 2)
        stalled = next(one for one in b.reports if one.reason == "stalled")
        assert stalled.state is S.READY
        assert not stalled.in_rotation
        after = await b.wait_state(S.READY)
        assert after.pid != report.pid
        assert after.in_rotation
        assert "replica.stalled" in b.kinds()


async def test_a_slow_engine_that_answers_the_probe_is_left_alone(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        await b.supervisor.start(order(progress_limit_s=0.5))
        report = await b.wait_state(S.READY)
        for _ in range(3):
            b.supervisor.seen(seen(in_flight=2, silent_s=30.0))
            await trio.sleep(0.4)
        assert b.report().pid == report.pid
        assert b.report().in_rotation


async def test_slow_answers_of_the_readiness_path_do_not_restart_an_engine(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        await b.supervisor.start(order("health=6", progress_limit_s=1.0))  # slower than a look waits for
        report = await b.wait_state(S.READY)
        for _ in range(8):
            assert await chat(report.url) == 200
            await trio.sleep(1.0)
        assert b.report().pid == report.pid
        assert b.report().in_rotation


async def test_a_frozen_engine_that_nobody_asks_leaves_the_rotation_and_is_started_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmgw.agent.replica.WATCH_LOOK_LIMIT_S", 0.3)
    async with bench(tmp_path) as b:
        await b.supervisor.start(order(progress_limit_s=1.0))
        before = await b.wait_state(S.READY)
        os.kill(before.pid, signal.SIGSTOP)
        await b.wait(lambda: b.report().attempt == 2)
        stalled = next(report for report in b.reports if report.state is S.READY and not report.in_rotation)
        assert stalled.reason == "stalled"
        after = await b.wait_state(S.READY)
        assert after.in_rotation
        assert processes.identify(before.pid) is None


async def test_an_engine_that_routers_get_no_byte_of_is_probed_at_once(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        await b.supervisor.start(order("hang=1", progress_limit_s=2.0))
        before = await b.wait_state(S.READY)
        b.supervisor.seen(attrs.evolve(seen(), unanswered=3))
        await b.wait(lambda: b.report().attempt == 2)
        assert "replica.stalled" in b.kinds()
        assert (await b.wait_state(S.READY)).pid != before.pid


async def test_a_probe_that_waits_behind_much_work_does_not_end_an_engine_that_works(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        await b.supervisor.start(order("hang=1", progress_limit_s=0.5))
        before = await b.wait_state(S.READY)
        b.supervisor.seen(attrs.evolve(seen(in_flight=9), unanswered=3))
        for _ in range(8):
            await trio.sleep(0.25)
            b.supervisor.seen(attrs.evolve(seen(in_flight=9, silent_s=0.1), heard_s=0.0))
        assert (b.report().pid, b.report().in_rotation) == (before.pid, True)
        assert "replica.stalled" not in b.kinds()


async def test_an_engine_whose_answers_are_errors_is_benched_as_failing(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        await b.supervisor.start(order("err=1", progress_limit_s=5.0))
        await b.wait_state(S.READY)
        b.supervisor.seen(seen(answers=10, failures=5))
        await b.wait(lambda: b.report().reason == "failing")
        assert b.report().state is S.READY
        assert not b.report().in_rotation


async def test_an_engine_that_failed_for_a_while_returns_to_rotation_after_good_probes(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        await b.supervisor.start(order(progress_limit_s=1.0))
        report = await b.wait_state(S.READY)
        b.supervisor.seen(seen(answers=10, failures=6))
        await b.wait(lambda: not b.report().in_rotation)
        await b.wait(lambda: b.report().in_rotation)
        b.supervisor.seen(seen(answers=10, failures=6))  # the routers still count the old ones
        await trio.sleep(0.6)
        assert b.report().in_rotation
        assert b.report().pid == report.pid


async def test_a_port_that_is_taken_is_a_refused_start(tmp_path: Path) -> None:
    import socket

    async with bench(tmp_path) as b:
        with socket.create_server(("127.0.0.1", 0)) as holder, pytest.raises(Conflict) as caught:
            await b.supervisor.start(order(port=holder.getsockname()[1]))
        assert caught.value.code == "port_taken"
        port = free_port()
        await b.supervisor.start(order(port=port))
        with pytest.raises(Conflict, match="m1-00000001"):
            await b.supervisor.start(order(port=port, replica="m1-00000002"))


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        ({"engine": "warp"}, "unknown_engine", "unknown engine 'warp'"),
        ({"checkpoint": "/nowhere/model.gguf"}, "checkpoint_missing", "checkpoint missing: /nowhere/model.gguf"),
        ({"checkpoint": "not-there.gguf"}, "checkpoint_missing", "checkpoints/not-there.gguf"),
        ({"command": ("/nowhere/engine",)}, "program_missing", "program not found: /nowhere/engine"),
        ({"command": ()}, "bad_command", "command line"),
        ({"devices": ("GPU-1",)}, "unknown_device", "no device GPU-1"),
        ({"devices": ()}, "no_device", "no device"),
        ({"replica": "../../etc"}, "bad_id", "../../etc"),
        ({"port": 70000}, "bad_port", "70000"),
        ({"command": (sys.executable, "a\0b")}, "bad_command", "zero byte"),
        ({"env": {"A=B": "c"}}, "bad_command", "A=B"),
        ({"env": {"A": "\ud800"}}, "bad_command", "environment"),
        ({"memory_mib": 99_000_000}, "no_memory", "99000000 are needed"),
        ({"engine": "xllamacpp", "command": (), "checkpoint": "/etc/hostname", "args": 1}, "bad_args", "--warp"),
    ],
)
async def test_what_cannot_work_is_refused_before_a_process_exists(
    tmp_path: Path, changes: dict[str, object], code: str, text: str
) -> None:
    import attrs

    with_args = bool(changes.pop("args", None))
    wanted = order(**changes)
    if with_args:
        wanted = changed(wanted, profile=attrs.evolve(wanted.profile, args=("--warp", "9")))
    async with bench(tmp_path) as b:
        with pytest.raises((Invalid, Conflict)) as caught:
            await b.supervisor.start(wanted)
        assert caught.value.code == code
        assert text in caught.value.message
        assert b.supervisor.reports() == ()
        assert b.ours() == []


async def test_the_same_order_twice_starts_one_process_and_another_under_its_id_is_refused(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        wanted = order()
        await b.supervisor.start(wanted)
        await b.supervisor.start(wanted)
        await b.wait_state(S.READY)
        assert len(b.ours()) == 1
        with pytest.raises(Conflict):
            await b.supervisor.start(changed(wanted, memory_mib=1))


async def test_commands_for_replicas_that_are_not_there_are_refused_and_forgetting_one_is_not(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        with pytest.raises(NotFound):
            b.supervisor.stop(ReplicaId("nope"), "", 1.0)
        with pytest.raises(NotFound):
            b.supervisor.restart(ReplicaId("nope"), "")
        await b.supervisor.forget(ReplicaId("nope"))
        chunk = await b.supervisor.log(LogRequest("r", ReplicaId("nope")))
        assert chunk.error


async def test_forgetting_takes_the_logs_and_is_refused_while_the_replica_lives(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        await b.supervisor.start(order())
        await b.wait_state(S.READY)
        with pytest.raises(LlmgwError):
            await b.supervisor.forget(M1)
        b.supervisor.stop(M1, "stop", 1.0)
        await b.wait_state(S.STOPPED)
        await b.wait(lambda: not b.supervisor._replicas[M1].task_runs)
        await b.supervisor.forget(M1)
        assert not (tmp_path / "replicas" / M1).exists()
        assert b.supervisor.reports() == ()


async def test_a_stop_that_comes_while_it_waits_for_its_next_start_is_obeyed_at_once(tmp_path: Path) -> None:
    patient = RestartPolicy(backoff_s=(600.0,), attempts=3)
    async with bench(tmp_path) as b:
        await b.supervisor.start(order("crash,after=0", restart=patient))
        await b.wait(lambda: b.report().attempt == 2)
        b.supervisor.stop(M1, "stop", 1.0)
        await b.wait_state(S.STOPPED)


@pytest.mark.parametrize("mode", ["crash,after=0", ""])
@pytest.mark.parametrize("call", range(8))
async def test_a_stop_that_comes_while_it_waits_for_anything_else_is_obeyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int, mode: str
) -> None:
    """After each of the blocking calls of its task: its process is made, its state written, its log read."""
    calls = 0
    run_sync = RealMachine.run_sync
    async with bench(tmp_path) as b:

        async def watched(machine: RealMachine, work: Callable[[], Any]) -> Any:
            nonlocal calls
            found = await run_sync(machine, work)
            calls += 1
            if calls == call + 1:
                b.supervisor.stop(M1, "enough", 1.0)
            return found

        await b.supervisor.start(order(mode))
        monkeypatch.setattr(RealMachine, "run_sync", watched)
        await b.wait_state(S.STOPPED)
        assert calls > call
        await b.wait(lambda: not b.ours())
        assert all(may_move(*pair) for pair in pairwise(b.states()))


async def test_a_restart_on_command_gives_a_new_process_and_a_fresh_count(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        await b.supervisor.start(order())
        before = await b.wait_state(S.READY)
        b.supervisor.restart(M1, "an operator asked")
        await b.wait(lambda: b.report().attempt == 2)
        after = await b.wait_state(S.READY)
        assert after.pid != before.pid
        assert len(b.ours()) == 1


async def test_memory_is_measured_and_attributed_to_the_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmgw.agent.supervisor.SURVEY_S", 0.2)
    async with bench(tmp_path) as b:
        await b.supervisor.start(order())
        await b.wait_state(S.READY)
        await b.wait(lambda: b.report().memory_mib > 0)
        (cpu,) = b.supervisor.devices()
        assert cpu.ours_mib >= b.report().memory_mib > 0
        assert cpu.total_mib > 0


async def test_an_agent_that_takes_its_engines_along_leaves_no_process(tmp_path: Path) -> None:
    b = Bench(tmp_path)

    async def run(task_status: trio.TaskStatus[None]) -> None:
        await b.supervisor.run(stop_engines=True, task_status=task_status)

    async with trio.open_nursery() as nursery:
        await nursery.start(run)
        await b.supervisor.start(order("fork"))
        await b.wait_state(S.READY)
        nursery.cancel_scope.cancel()
    assert b.ours() == []
    assert b.report().state is S.STOPPED
