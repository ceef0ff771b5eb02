"""The stand-in for systemd does what systemd's manual pages say, in their order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos import unit
from tests.programs import wait_for

READY = "import os, socket; socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'READY=1', os.environ['NOTIFY_SOCKET'])\n"
STAY = "import signal; signal.pause()\n"


class Run:
    """A unit under the stand-in. Its commands append to `notes`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes = folder / "notes"
        self.notes.write_text("")
        self.file = folder / "test.service"
        self.process: subprocess.Popen[bytes] | None = None

    def note(self, text: str) -> str:
        """A command line that notes `text`, variables filled in."""
        return f"/bin/sh -c 'echo \"{text}\" >> {self.notes}'"

    def program(self, *lines: str) -> str:
        """A command line that runs these lines of Python."""
        path = self.folder / f"main{len(list(self.folder.glob('main*')))}.py"
        path.write_text("".join(lines))
        return f"{sys.executable} {path}"

    def start(self, *lines: str, socket_unit: Path | None = None) -> None:
        self.file.write_text("[Service]\n" + "\n".join(lines) + "\n")
        command = [sys.executable, unit.__file__, str(self.file), *(["--socket", str(socket_unit)] if socket_unit else [])]
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(command, stderr=log, stdout=log)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def wait_log(self, text: str, count: int = 1) -> None:
        wait_for(lambda: self.log.count(text) >= count, f"{count} x {text!r} in {self.log}", 20)

    def wait_note(self, text: str) -> None:
        wait_for(lambda: text in self.noted, f"{text!r} in {self.noted}", 20)

    @property
    def noted(self) -> list[str]:
        return self.notes.read_text().splitlines()

    def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)

    def ended(self) -> int:
        assert self.process is not None
        return self.process.wait(20)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    one = Run(tmp_path)
    yield one
    if one.process is not None and one.process.poll() is None:
        one.process.kill()
        one.process.wait()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(tmp_path).encode() in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)
        except OSError:
            continue


def test_commands_run_in_order_and_the_last_one_learns_how_it_ended(run: Run) -> None:
    main = run.program(READY, STAY)
    run.start(
        "Type=notify",
        f"ExecStartPre={run.note('pre')}",
        f"ExecStart={main}",
        f"ExecStartPost={run.note('post')}",
        f"ExecStop={run.note('stop')}",
        f"ExecStopPost={run.note('after $SERVICE_RESULT $EXIT_CODE $EXIT_STATUS')}",
    )
    run.wait_log(": active")
    assert run.noted == ["pre", "post"]
    assert run.stop() == 0
    assert run.noted == ["pre", "post", "stop", "after success killed TERM"]


def test_a_start_that_fails_is_followed_by_the_last_command_and_tried_again_up_to_the_limit(run: Run) -> None:
    main = run.program("import sys; sys.exit(3)\n")
    run.start(
        "Type=notify",
        f"ExecStart={main}",
        f"ExecStopPost={run.note('after $SERVICE_RESULT $EXIT_STATUS')}",
        "Restart=always",
        "RestartSec=10ms",
        "StartLimitBurst=3",
    )
    assert run.ended() == 1
    assert run.noted == ["after exit-code 3"] * 3
    assert "start-limit-hit" in run.log


def test_a_unit_without_a_limit_is_tried_again_until_it_is_stopped(run: Run) -> None:
    main = run.program("import sys; sys.exit(3)\n")
    run.start(f"ExecStart={main}", "Restart=on-failure", "RestartSec=1ms", "StartLimitIntervalSec=0")
    run.wait_log("restarts in", 8)
    run.stop()
    assert ": inactive" in run.log


def test_what_fails_before_the_start_keeps_it_from_starting(run: Run) -> None:
    run.start("ExecStartPre=/bin/false", f"ExecStart={run.note('main')}", f"ExecStopPost={run.note('after $SERVICE_RESULT')}")
    assert run.ended() == 1
    assert run.noted == ["after exit-code"]


def test_a_dash_forgives_a_failure(run: Run) -> None:
    run.start("ExecStartPre=-/bin/false", f"ExecStart={run.note('main')}")
    assert run.ended() == 0
    assert run.noted == ["main"]


def test_a_program_that_ends_without_a_word_breaks_the_protocol(run: Run) -> None:
    run.start("Type=notify", "ExecStart=/bin/true", f"ExecStopPost={run.note('after $SERVICE_RESULT')}")
    assert run.ended() == 1
    assert run.noted == ["after protocol"]


def test_a_program_that_is_never_ready_is_ended(run: Run) -> None:
    run.start("Type=notify", f"ExecStart={run.program(STAY)}", "TimeoutStartSec=300ms", f"ExecStopPost={run.note('after $SERVICE_RESULT')}")
    assert run.ended() == 1
    assert run.noted == ["after timeout"]


@pytest.mark.parametrize(("mode", "left"), [("control-group", False), ("mixed", False), ("process", True)])
def test_a_child_in_a_session_of_its_own_is_of_the_group_and_lives_on_only_where_the_main_process_alone_is_ended(
    mode: str, left: bool, run: Run
) -> None:
    child = run.program(f"open({str(run.folder / 'child')!r}, 'w').write(str(__import__('os').getpid()))\n", STAY)
    main = run.program(f"import subprocess\nsubprocess.Popen({child.split()!r}, start_new_session=True)\n", READY, STAY)
    run.start("Type=notify", f"ExecStart={main}", f"KillMode={mode}")
    run.wait_log(": active")
    pid = int(wait_for(lambda: (run.folder / "child").exists() and (run.folder / "child").read_text(), "the child"))
    assert run.stop() == 0
    assert Path(f"/proc/{pid}").exists() is left


def test_what_the_main_process_leaves_when_it_crashes_is_ended_before_the_next_start(run: Run) -> None:
    child = run.program(STAY)
    main = run.program(
        f"import os, signal, subprocess\none = subprocess.Popen({child.split()!r}, start_new_session=True)\n"
        f"open({str(run.notes)!r}, 'a').write(str(one.pid) + chr(10))\n",
        READY,
        "os.kill(os.getpid(), signal.SIGKILL)\n",
    )
    run.start("Type=notify", f"ExecStart={main}", "Restart=always", "RestartSec=5s")
    run.wait_log("restarts in 5 s (signal)")
    assert not Path(f"/proc/{run.noted[0]}").exists()


def test_a_program_that_does_not_end_in_time_is_killed(run: Run) -> None:
    main = run.program("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n", READY, "while True: signal.pause()\n")
    run.start("Type=notify", f"ExecStart={main}", "TimeoutStopSec=300ms", f"ExecStopPost={run.note('after $SERVICE_RESULT $EXIT_STATUS')}")
    run.wait_log(": active")
    run.stop()
    assert run.noted == ["after timeout KILL"]


def test_a_watchdog_that_hears_nothing_ends_the_program_and_it_is_started_again(run: Run) -> None:
    run.start("Type=notify", f"ExecStart={run.program(READY, STAY)}", "WatchdogSec=300ms", "Restart=on-watchdog", "RestartSec=1ms")
    run.wait_log(": active", 2)
    assert "restarts in 0.001 s (watchdog)" in run.log


def test_a_program_that_beats_stays(run: Run) -> None:
    beat = "import time\nfor _ in range(10):\n    time.sleep(0.1)\n    " + READY.replace("READY", "WATCHDOG").replace(
        "import os, socket; ", ""
    )
    run.start("Type=notify", f"ExecStart={run.program(READY, beat)}", "WatchdogSec=800ms")
    assert run.ended() == 0
    assert "hears nothing" not in run.log


def test_only_the_main_process_is_heard(run: Run) -> None:
    child = run.program(READY)
    main = run.program(f"import subprocess, signal\nsubprocess.run({child.split()!r})\nsignal.pause()\n")
    run.start("Type=notify", f"ExecStart={main}")
    run.wait_log("is not heard")
    assert ": active" not in run.log
    run.stop()


def test_a_reload_runs_its_command_with_the_main_pid(run: Run) -> None:
    handler = f"import signal\nsignal.signal(signal.SIGUSR1, lambda *_: open({str(run.notes)!r}, 'a').write('asked\\n'))\n"
    run.start(
        "Type=notify", f"ExecStart={run.program(handler, READY, 'while True: signal.pause()')}", "ExecReload=/bin/kill -USR1 $MAINPID"
    )
    run.wait_log(": active")
    assert run.process is not None
    run.process.send_signal(signal.SIGHUP)
    run.wait_note("asked")
    run.stop()


def test_drop_ins_come_after_the_file_and_an_empty_value_clears(run: Run) -> None:
    (run.folder / "test.service.d").mkdir()
    (run.folder / "test.service.d" / "my.conf").write_text(
        f"[Service]\nExecStart=\nExecStart={run.note('mine $WHO')}\nEnvironment=WHO=me\n"
    )
    run.start(f"ExecStart={run.note('shipped')}", "Environment=WHO=them")
    assert run.ended() == 0
    assert run.noted == ["mine me"]


def test_the_first_folder_that_has_a_unit_or_a_drop_in_wins(tmp_path: Path) -> None:
    for folder in ("etc", "lib"):
        (tmp_path / folder / "x.service.d").mkdir(parents=True)
        (tmp_path / folder / "x.service").write_text("[Service]\n")
        (tmp_path / folder / "x.service.d" / f"{folder}.conf").write_text("")
        (tmp_path / folder / "x.service.d" / "same.conf").write_text("")
    found = unit.find("x.service", [str(tmp_path / "etc"), str(tmp_path / "lib")])
    names = [str(path.relative_to(tmp_path)) for path in found]
    assert names == ["etc/x.service", "etc/x.service.d/etc.conf", "lib/x.service.d/lib.conf", "etc/x.service.d/same.conf"]


def test_the_sockets_of_a_socket_unit_are_handed_over(run: Run) -> None:
    (run.folder / "test.socket").write_text(f"[Socket]\nListenStream=127.0.0.1:0\nListenStream={run.folder}/s\n")
    main = run.program(
        "import os, socket\nassert os.environ['LISTEN_PID'] == str(os.getpid())\n"
        "found = [socket.socket(fileno=3 + n).family.name for n in range(int(os.environ['LISTEN_FDS']))]\n"
        f"open({str(run.notes)!r}, 'a').write(' '.join(found) + chr(10))\n"
    )
    run.start(f"ExecStart={main}", socket_unit=run.folder / "test.socket")
    assert run.ended() == 0
    assert run.noted == ["AF_INET AF_UNIX"]


def test_spans_of_time_are_read_as_systemd_reads_them() -> None:
    settings = unit.Settings([])
    for text, seconds in {"5": 5.0, "100ms": 0.1, "1min 30s": 90.0, "2h": 7200.0, "infinity": float("inf")}.items():
        settings._values["T"] = [text]
        assert settings.span_s("T", 0.0) == seconds
    assert settings.span_s("U", 7.0) == 7.0
