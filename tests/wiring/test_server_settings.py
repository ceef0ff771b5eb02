"""A control plane as a process, and its settings: it restarts in place for a key that needs it, and a signal is no failure."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmgw.control.settings_boot import MARKS_FILE
from llmgw.domain.errors import EXIT_INVALID, EXIT_OK
from tests.programs import Program, call, free_port, wait_for

SERVING = "serving "


class Server:
    """`text` is what its file says beside its places."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.router_port = free_port()
        self.file = folder / "llmgw.toml"
        self.programs: list[Program] = []

    def say(self, text: str) -> None:
        """Replaces the file, as an editor does."""
        new = self.folder / "new.toml"
        new.write_text(
            f'server = {{data_dir = "{self.folder / "data"}", admin_listen = "127.0.0.1:{self.port}"}}\n'
            f'router.listen = "127.0.0.1:{self.router_port}"\n{text}\n'
        )
        os.replace(new, self.file)

    def start(self) -> Program:
        env = dict.fromkeys(("NOTIFY_SOCKET", "WATCHDOG_USEC"), "")
        started = Program(["server", "--config", str(self.file)], self.folder, "server", env)
        self.programs.append(started)
        return started

    def wait_starts(self, count: int) -> None:
        """Until it has begun to serve so many times."""
        wait_for(lambda: self.output.count(SERVING) >= count, f"serving {count} times; so far: {self.output}")

    @property
    def output(self) -> str:
        return self.programs[-1].output

    @property
    def failures(self) -> list[dict[str, object]]:
        marks = self.folder / "data" / MARKS_FILE
        return json.loads(marks.read_text())["failures"] if marks.exists() else []


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    for program in made.programs:
        program.close()


def test_without_a_supervisor_it_becomes_a_new_process_in_place_for_a_machine_key(server: Server) -> None:
    server.say("log.format = 'logfmt'")
    program = server.start()
    server.wait_starts(1)
    server.say("log.format = 'json'")
    wait_for(lambda: '"event":"serving"' in server.output.replace(" ", ""), "it serves again, with the new key")
    assert server.output.count("restarting") == 1
    assert program.process.poll() is None
    assert call(f"127.0.0.1:{server.port}", "GET", "/health")[0] == 200
    assert "Traceback" not in server.output
    assert program.end() == EXIT_OK
    assert server.failures == []


def test_b154_sighup_ends_no_control_plane_and_a_live_key_of_its_file_is_taken_without_a_restart(server: Server) -> None:
    """mostlygeek/llama-swap#160: SIGHUP, which is how a reload is asked for everywhere, ended the process."""
    server.say("auth.required = true")
    program = server.start()
    server.wait_starts(1)
    assert call(f"127.0.0.1:{server.router_port}", "GET", "/v1/models")[0] == 401
    server.say("auth.required = false")
    program.process.send_signal(signal.SIGHUP)
    wait_for(lambda: call(f"127.0.0.1:{server.router_port}", "GET", "/v1/models")[0] == 200, f"the key is in force: {server.output}")
    assert server.output.count(SERVING) == 1
    assert program.end() == EXIT_OK


def test_an_end_by_a_signal_soon_after_the_start_is_no_failure_of_a_settings_version(server: Server) -> None:
    server.say("[store]")
    for count in range(1, 4):
        program = server.start()
        server.wait_starts(count)
        assert program.end() == EXIT_OK
    program = server.start()
    server.wait_starts(4)
    program.kill()
    assert server.failures == []


def test_b156_a_broken_file_at_the_first_start_is_exit_3_with_the_key_that_a_reload_would_name(server: Server) -> None:
    for text, words in (("log.levle = 'info'", "log.levle: unknown key; did you mean log.level?"), ("[log", "is not TOML")):
        server.say(text)
        assert server.start().process.wait(30) == EXIT_INVALID
        assert words in server.output
        assert "Traceback" not in server.output
