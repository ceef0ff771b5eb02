"""Starts `llmgw` processes at nearly the same instant: a process that has imported everything forks for each.

An interpreter takes the better part of a second to get to its first line of ours, and by then two that were started together are far
apart. As a process, it takes a JSON line `{"args": [...], "log": PATH}` for each and answers with the pid.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.programs import wait_for

ROOT = Path(__file__).parents[2]


class Started:
    """One process of a `Starter`, with what tests use of a `Program`."""

    def __init__(self, pid: int, log: Path) -> None:
        self.log = log
        self.process = self
        self._process: psutil.Process | None = None
        with contextlib.suppress(psutil.NoSuchProcess):  # it may be over already
            self._process = psutil.Process(pid)

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def poll(self) -> int | None:
        """None while it runs."""
        return None if self._process is not None and self._process.is_running() else 0

    def close(self) -> None:
        if self._process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._process.kill()
        wait_for(lambda: self.poll() is not None, "the process is gone")


class Starter:
    def __init__(self) -> None:
        args = [sys.executable, "-m", "tests.chaos.starter"]
        self._process = subprocess.Popen(args, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(self, *wanted: tuple[Sequence[str], Path]) -> list[Started]:
        """(arguments, log) for each, all at once."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("".join(json.dumps({"args": list(args), "log": str(log)}) + "\n" for args, log in wanted))
        self._process.stdin.flush()
        return [Started(int(self._process.stdout.readline()), log) for _, log in wanted]

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(30)


def _become(asked: dict[str, Any]) -> int:
    from llmgw.cli.main import main

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, to in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, to)
    return main(asked["args"])


def _serve() -> None:
    import llmgw.wiring.server  # noqa: F401 - what each of them would import first

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets each that ends
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                code = _become(json.loads(line))
            finally:
                sys.stderr.flush()
                os._exit(code)
        print(pid, flush=True)


if __name__ == "__main__":
    _serve()
