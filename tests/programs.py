"""Real `llmgw` processes for tests: started on free loopback ports, watched, and ended with the test."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import psutil
import pytest

GIVEN_MAX = 4_000  # of the 4,536 that there are
_GIVEN: set[int] = set()
START_LIMIT_S = 90.0
WAIT_LIMIT_S = 60.0


def skip(why: str) -> NoReturn:
    """Skips a test for something that this machine lacks; where everything was to be installed, it fails instead."""
    if os.environ.get("LLMGW_TESTS_REQUIRE_ALL") == "1":
        pytest.fail(f"{why}, and nothing may be missing here")
    pytest.skip(why)


def compiled_builder() -> ModuleType:
    """`packaging/compiled.py`, which stands in a folder of scripts and in no package."""
    path = Path(__file__).parent.parent / "packaging" / "compiled.py"
    spec = importlib.util.spec_from_file_location("compiled", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def free_port() -> int:
    """Free on every address, never given twice by this process, and none of the kernel's ephemeral ports: a connection of somebody
    else could have taken one of those by the time that a program is started again."""
    while True:
        port = random.SystemRandom().randrange(61_000, 65_536)
        with contextlib.suppress(OSError), socket.socket() as one:
            one.bind(("0.0.0.0", port))
            if port not in _GIVEN:
                _GIVEN.add(port)
                return port
        if len(_GIVEN) > GIVEN_MAX:
            _GIVEN.clear()


def free_ports(count: int) -> str:
    """A range for engines, "FIRST-LAST", below the kernel's ephemeral ports and apart from other workers' ranges."""
    first = 10_000 + (os.getpid() * 37) % 200 * 100
    for offset in range(0, 20_000, count):
        start = 10_000 + (first - 10_000 + offset) % 20_000
        with contextlib.ExitStack() as held:
            try:
                for port in range(start, start + count):
                    one = held.enter_context(socket.socket())
                    one.bind(("127.0.0.1", port))
            except OSError:
                continue
        return f"{start}-{start + count - 1}"
    raise AssertionError("no free range of ports")


def wait_for(condition: Callable[[], Any], what: str, limit_s: float = WAIT_LIMIT_S) -> Any:
    """What the condition returns once it is true; an assertion names what never came."""
    ends_s = time.monotonic() + limit_s
    while time.monotonic() < ends_s:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError(f"never came: {what}")


ALTERED = Path(__file__).parent / "chaos" / "altered.py"


class Program:
    """One `llmgw` command as a process. `output` is everything it wrote so far, both streams.

    `altered` names what of it is not as shipped, as `tests/chaos/altered.py` knows it.
    """

    def __init__(
        self, args: Sequence[str], folder: Path, name: str, env: dict[str, str] | None = None, altered: Sequence[str] = ()
    ) -> None:
        self.log = folder / f"{name}.log"
        self.file = self.log.open("ab")
        self.process = subprocess.Popen(
            [sys.executable, *([str(ALTERED), *altered, "--"] if altered else ["-m", "llmgw"]), *args],
            stdin=subprocess.DEVNULL,
            stdout=self.file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "XDG_STATE_HOME": str(folder / "state"), **(env or {})},  # apart from a `dev` of the user's own
            start_new_session=True,
        )

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_output(self, text: str, limit_s: float = START_LIMIT_S) -> None:
        def seen() -> bool:
            assert self.process.poll() is None, f"ended with {self.process.returncode}: {self.output}"
            return text in self.output

        wait_for(seen, f"{text!r} in the output; so far: {self.output if self.log.exists() else ''}", limit_s)

    def kill(self) -> None:
        """SIGKILL of this process alone."""
        self.process.kill()
        self.process.wait(30)

    def end(self, number: int = signal.SIGTERM, limit_s: float = 40.0) -> int:
        """The exit code after this signal."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(limit_s)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(30)
        self.file.close()


@contextlib.contextmanager
def program(args: Sequence[str], folder: Path, name: str, env: dict[str, str] | None = None) -> Iterator[Program]:
    one = Program(args, folder, name, env)
    try:
        yield one
    finally:
        one.close()


def end_tree(marker: str) -> list[int]:
    """KILLs every process whose environment or command line holds `marker`: engines outlive their agent on purpose."""
    ended = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and any(marker in part for part in (*process.cmdline(), *process.environ().values())):
                process.kill()
                ended.append(process.pid)
    return ended


def processes_with(marker: str) -> list[psutil.Process]:
    """Processes whose command line holds `marker`."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if (
                process.pid != os.getpid()
                and process.status() != psutil.STATUS_ZOMBIE
                and any(marker in part for part in process.cmdline())
            ):
                found.append(process)
    return found


def children_of(pid: int) -> list[psutil.Process]:
    """The processes that this one has started and that still run, the eldest first."""
    found = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE:
                found.append((child.create_time(), child.pid, child))
    return [child for _, _, child in sorted(found, key=lambda one: one[:2])]


def call(
    address: str, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, limit_s: float = 30.0
) -> tuple[int, Any]:
    """One HTTP call: (status, decoded JSON or text)."""
    connection = http.client.HTTPConnection(address, timeout=limit_s)
    try:
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, data, {"content-type": "application/json", **(headers or {})})
        answer = connection.getresponse()
        raw = answer.read()
    finally:
        connection.close()
    with contextlib.suppress(ValueError):
        return answer.status, json.loads(raw)
    return answer.status, raw.decode(errors="replace")


def chat(address: str, model: str, text: str = "hi", **more: Any) -> tuple[int, Any]:
    return call(address, "POST", "/v1/chat/completions", {"model": model, "messages": [{"role": "user", "content": text}], **more})


class Admin:
    """The admin API of one control plane."""

    def __init__(self, address: str, token: str) -> None:
        self.address = address
        self.headers = {"authorization": f"Bearer {token}"}

    def __call__(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        status, answer = call(self.address, method, f"/api/v1{path}", body, {**self.headers, **headers})
        assert status < 300, (status, answer)
        return answer

    def replicas(self, model: str | None = None, state: str | None = None) -> list[dict[str, Any]]:
        rows = self("GET", "/replicas")["replicas"]
        return [row for row in rows if (model is None or row["model"] == model) and (state is None or row["state"] == state)]

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        return [event for event in self("GET", "/events?after=0&limit=1000")["events"] if event["kind"].startswith(kind)]

    def apply(self, *tables: dict[str, Any]) -> Any:
        return self("POST", "/models:apply", {"models": list(tables)})

    def wait_ready(self, model: str, count: int = 1) -> list[dict[str, Any]]:
        def ready() -> list[dict[str, Any]] | None:
            rows = self.replicas(model, "ready")
            return rows if len(rows) == count else None

        return wait_for(ready, f"{count} ready replicas of {model}; there are {self.replicas(model)}")
