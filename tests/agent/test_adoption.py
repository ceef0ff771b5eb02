"""What an agent makes of what one before it left: adopted by identity, reaped by start token, never taken from others."""

# ruff: noqa: ASYNC222, ASYNC240 - the tests read /proc and reap children that have ended
from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
import pytest

from llmgw.agent import adoption, facts, processes
from llmgw.agent.adoption import Adopted, Ended, Record
from llmgw.agent.engines.environment import START_VARIABLE
from llmgw.agent.lifecycle import Life, Want
from llmgw.agent.processes import Identity
from llmgw.domain.errors import Invalid
from llmgw.domain.ids import ReplicaId
from llmgw.domain.replica import ReplicaState, RestartPolicy
from tests.agent.harness import DEAF_SLEEP, bench, bench_that_leaves, chat, clean_up, node_of, order

S = ReplicaState
M1 = ReplicaId("m1-00000001")
TAG = "0123abcd"
RUNNING = Life(S.READY, attempt=1, tries=1)


def record(**changes: object) -> Record:
    made = Record("boot-1", order(), RUNNING, "key", f"m1-00000001.1.{TAG}aa", Identity(100, 5))
    return attrs.evolve(made, **changes)  # type: ignore[arg-type]


def test_a_record_survives_its_file() -> None:
    made = record()
    assert adoption.decode(adoption.encode(made)) == made


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b'{"format": 1}', b'{"format": 99}', b"\xff\xfe", b"[" * 100_000])
def test_a_state_file_that_is_broken_is_one_clear_error(data: bytes) -> None:
    with pytest.raises(Invalid):
        adoption.decode(data)


@pytest.mark.parametrize(
    ("boot", "alive", "token", "why"),
    [
        ("boot-1", Identity(100, 5), f"m1-00000001.1.{TAG}aa", None),
        ("boot-2", Identity(100, 5), f"m1-00000001.1.{TAG}aa", "restarted"),
        ("boot-1", None, "", "ended while the agent was away"),
        ("boot-1", Identity(100, 6), f"m1-00000001.1.{TAG}aa", "another program"),
        ("boot-1", Identity(100, 5), "", "start token"),
        ("boot-1", Identity(100, 5), f"m1-00000001.2.{TAG}bb", "start token"),
    ],
)
def test_only_the_same_process_of_the_same_boot_with_our_token_is_adopted(
    boot: str, alive: Identity | None, token: str, why: str | None
) -> None:
    verdict = adoption.adopt(record(), boot, alive, token)
    if why is None:
        assert verdict == Adopted(Identity(100, 5))
    else:
        assert isinstance(verdict, Ended)
        assert why in verdict.why


@contextmanager
def program(*argv: str, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(argv, env={**os.environ, **(env or {})}, start_new_session=True, stdout=subprocess.DEVNULL) as running:
        try:
            yield running
        finally:
            running.kill()


async def test_an_engine_is_adopted_with_its_pid_secret_and_state(tmp_path: Path) -> None:
    async with bench_that_leaves(tmp_path) as before:
        await before.supervisor.start(order("key"))
        ready = await before.wait_state(S.READY)
    async with bench(tmp_path) as after:
        report = after.report()  # at once: nothing is probed anew before it counts
        assert (report.pid, report.key, report.state, report.attempt) == (ready.pid, ready.key, S.READY, 1)
        assert await chat(report.url, report.key) == 200
        assert "replica.adopted" in after.kinds()
        assert len(after.ours()) == 1


async def test_an_engine_that_loads_while_agents_change_becomes_ready(tmp_path: Path) -> None:
    async with bench_that_leaves(tmp_path) as before:
        await before.supervisor.start(order("ready=2"))
        loading = await before.wait_state(S.LOADING)
    async with bench(tmp_path) as after:
        ready = await after.wait_state(S.READY)
        assert ready.pid == loading.pid


async def test_the_end_of_an_adopted_engine_is_seen_and_it_is_restarted_in_place(tmp_path: Path) -> None:
    async with bench_that_leaves(tmp_path) as before:
        await before.supervisor.start(order())
        ready = await before.wait_state(S.READY)
    async with bench(tmp_path) as after:
        os.kill(ready.pid, signal.SIGKILL)
        await after.wait(lambda: after.report().attempt == 2)
        again = await after.wait_state(S.READY)
        assert again.pid != ready.pid
        assert len(after.ours()) == 1


async def test_an_engine_that_ended_while_no_agent_ran_is_restarted_in_place(tmp_path: Path) -> None:
    async with bench_that_leaves(tmp_path) as before:
        await before.supervisor.start(order("fork"))
        ready = await before.wait_state(S.READY)
    os.kill(ready.pid, signal.SIGKILL)
    os.waitpid(ready.pid, 0)
    assert len(before.ours()) == 2, "its children live on"
    async with bench(tmp_path) as after:
        assert after.report().state is S.STARTING
        again = await after.wait_state(S.READY)
        assert again.attempt == 2
        assert "replica.orphan_reaped" in after.kinds()
        assert len(after.ours()) == 3


async def test_a_failed_replica_stays_failed_when_the_agent_returns(tmp_path: Path) -> None:
    async with bench_that_leaves(tmp_path) as before:
        await before.supervisor.start(order("crash,after=0"))
        await before.wait_state(S.FAILED)
        await before.wait(lambda: not before.supervisor._replicas[M1].task_runs)
    async with bench(tmp_path) as after:
        report = after.report()
        assert report.state is S.FAILED
        assert report.exit_code == 1
        assert "CUDA error: fake" in report.log_tail
        assert after.ours() == []


async def test_a_stop_that_was_under_way_is_finished_by_the_next_agent(tmp_path: Path) -> None:
    async with bench_that_leaves(tmp_path) as before:
        await before.supervisor.start(order("deaf", stop_grace_s=60.0))
        await before.wait_state(S.READY)
        before.supervisor.stop(M1, "stop", 2.0)
        state_file = tmp_path / "replicas" / M1 / "state.json"
        await before.wait(lambda: adoption.decode(state_file.read_bytes()).life.want is Want.STOP)
    async with bench(tmp_path) as after:
        await after.wait_state(S.STOPPED)
        assert after.ours() == []


async def test_a_pid_that_another_program_has_now_is_not_adopted_and_not_touched(tmp_path: Path) -> None:
    with program(sys.executable, "-c", DEAF_SLEEP) as other:
        found = processes.identify(other.pid)
        assert found is not None
        policy = RestartPolicy(backoff_s=(600.0,), attempts=3)
        fabricated = attrs.evolve(record(), boot_id=facts.boot_id(), main=found, order=order(restart=policy))
        folder = tmp_path / "replicas" / M1
        folder.mkdir(parents=True)
        (folder / "state.json").write_bytes(adoption.encode(fabricated))
        async with bench(tmp_path) as after:
            report = after.report()
            assert report.state is S.STARTING
            assert report.pid == 0
            assert "start token" in report.reason
        assert other.poll() is None


async def test_an_orphan_whose_parent_died_is_reaped_by_its_start_token_with_what_it_started(tmp_path: Path) -> None:
    token = f"m1-0000dead.4.{processes.node_tag(node_of(tmp_path))}ff"
    child = f"[sys.executable, '-c', {DEAF_SLEEP!r}], env={{}}, start_new_session=True"
    script = f"import subprocess, sys, time; subprocess.Popen({child}); time.sleep(900)"
    with program(sys.executable, "-c", script, env={START_VARIABLE: token}) as orphan:
        await_children(orphan.pid, 1)
        (started,) = [process for process in processes.survey() if process.parent == orphan.pid]
        async with bench(tmp_path) as after:
            assert "replica.orphan_reaped" in after.kinds()
            event = next(event for event in after.events if event.kind == "replica.orphan_reaped")
            assert str(orphan.pid) in event.text
            assert event.object == "replica/m1-0000dead"
            assert orphan.wait(5) == -signal.SIGKILL
            assert processes.identify(started.pid) != started.identity


def await_children(pid: int, count: int) -> None:
    import time

    deadline_s = time.monotonic() + 20
    while sum(process.parent == pid for process in processes.survey()) < count:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


async def test_engines_of_another_agent_on_the_same_machine_are_left_alone(tmp_path: Path) -> None:
    async with bench(tmp_path / "a") as first:
        await first.supervisor.start(order())
        ready = await first.wait_state(S.READY)
        async with bench(tmp_path / "b") as second:
            assert second.events == []
            assert second.supervisor.reports() == ()
        assert await chat(ready.url) == 200


async def test_an_orphan_that_appears_while_the_agent_runs_is_reaped_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmgw.agent.supervisor.SURVEY_S", 0.2)
    async with bench(tmp_path) as b:
        await b.supervisor.start(order())
        ready = await b.wait_state(S.READY)
        with program(sys.executable, "-c", DEAF_SLEEP, env={START_VARIABLE: f"m1-0000dead.1.{b.tag}00"}) as orphan:
            await b.wait(lambda: "replica.orphan_reaped" in b.kinds())
            await b.wait(lambda: orphan.poll() is not None)
        assert b.report().pid == ready.pid


async def test_a_broken_state_file_costs_its_replica_and_nothing_else(tmp_path: Path) -> None:
    async with bench_that_leaves(tmp_path) as before:
        await before.supervisor.start(order())
        await before.supervisor.start(order(replica="m1-00000002"))
        await before.wait_state(S.READY)
        kept = await before.wait_state(S.READY, "m1-00000002")
    (tmp_path / "replicas" / M1 / "state.json").write_text('{"format": 1, "order": 7}')
    async with bench(tmp_path) as after:
        (report,) = after.supervisor.reports()
        assert report.pid == kept.pid
        assert "agent.state_unreadable" in after.kinds()
        assert [process.pid for process in after.ours()] == [kept.pid], "what could not be adopted is stopped"


async def test_a_log_that_grew_past_its_cap_while_the_agent_was_dead_is_cut_on_its_return(tmp_path: Path) -> None:
    cap = 64 * 1024
    script = "import os, sys, time\nfor n in range(40_000):\n    os.write(1, b'line %06d\\n' % n)\ntime.sleep(900)"
    slow = order(command=(sys.executable, "-c", script), load_limit_s=600.0)
    async with bench_that_leaves(tmp_path) as before:
        await before.supervisor.start(slow)
        loading = await before.wait_state(S.LOADING)
    folder = tmp_path / "replicas" / M1
    log = folder / "attempt-1.log"
    await before.wait(lambda: log.stat().st_size >= 40_000 * 12)
    try:
        async with bench(tmp_path, log_bytes_max=cap) as after:
            assert sum(entry.stat().st_size for entry in folder.iterdir() if ".log" in entry.name) <= cap
            assert after.report().pid == loading.pid
            text = after.supervisor._replicas[M1].logs.read(1, -24, 24).text
            assert text.endswith("line 039999\n")
    finally:
        clean_up(before)


async def test_a_zombie_counts_as_dead(tmp_path: Path) -> None:
    child = os.posix_spawn("/bin/true", ["true"], {})
    try:
        import time

        deadline_s = time.monotonic() + 20
        while processes.identify(child) is not None:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        assert Path(f"/proc/{child}").exists()
        assert all(process.pid != child for process in processes.survey())
    finally:
        os.waitpid(child, 0)


def test_a_record_does_not_show_its_secret_when_it_is_printed() -> None:
    assert "s3cr3t" not in repr(record(key="s3cr3t"))
