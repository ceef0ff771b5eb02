"""The fake engine and the load generator: built from the C sources beside this file, started, and read."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import cattrs
import psutil

from tests.programs import free_port

SOURCES = Path(__file__).parent
PLACE = SOURCES.parent.parent / "build" / "bench"
SERVICE_CORE, LOAD_CORE = 0, 1
START_LIMIT_S = 20.0
STAMP = re.compile(rb"@[0-9]+")
FNV_START, FNV_PRIME = 0xCBF29CE484222325, 0x100000001B3  # FNV-1a of 64 bits
KEY = "sk-4b1f0c7d2e9a48635f0e1d7c92ab86e3"  # a client's; of the form that LiteLLM asks for, and of no use elsewhere


class Missing(Exception):
    """Something that this machine lacks: the text says what to install."""


@attrs.frozen
class Percentiles:
    """Of a run's samples, in microseconds; zeros when there was none."""

    count: int
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0


@attrs.frozen
class Figures:
    """What one run of the load saw. `cpu_s` is of the processes that were watched, in the window of `seconds`.

    `cut` are those of the `errors` in which the connection broke.
    """

    seconds: float
    cpu_s: float
    requests: int
    errors: int
    cut: int
    error: str
    aborted: int
    connects: int
    chunks: int
    latency_us: Percentiles
    delay_us: Percentiles
    ttft_us: Percentiles


def built(name: str) -> Path:
    """The program, compiled once for each text of its source. Raises Missing without a C compiler, or one that it does not pass."""
    source = SOURCES / f"{name}.c"
    program = PLACE / f"{name}-{hashlib.sha256(source.read_bytes()).hexdigest()[:12]}"
    if program.exists():
        return program
    compiler = shutil.which("cc")
    if compiler is None:
        raise Missing("no C compiler (apt install gcc libc6-dev)")
    PLACE.mkdir(parents=True, exist_ok=True)
    made = PLACE / f"{program.name}.{os.getpid()}"  # renamed, because two runs may build at once
    done = subprocess.run([compiler, "-O2", "-Wall", "-Wextra", "-o", made, source], check=False)
    if done.returncode:
        raise Missing(f"{compiler} does not compile {source.name} (apt install gcc libc6-dev)")
    made.replace(program)
    return program


def pinned(core: int) -> list[str]:
    """The start of a command line that keeps what follows on one of the cores that this process may use."""
    cores = sorted(os.sched_getaffinity(0))
    return ["taskset", "-c", str(cores[core % len(cores)])]


@attrs.frozen
class Engine:
    """A running engine. `urls` are its addresses, of which the first is 127.0.0.1."""

    process: subprocess.Popen[str]
    port: int
    urls: tuple[str, ...]


@contextlib.contextmanager
def engine(*, addresses: int = 1, rate: float = 50.0, content_type: str = "text/event-stream") -> Iterator[Engine]:
    """An engine on the load's core, until the block ends."""
    port = free_port()
    options = ["--port", str(port), "--addresses", str(addresses), "--rate", str(rate), "--content-type", content_type]
    process = subprocess.Popen([*pinned(LOAD_CORE), built("engine"), *options], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        if process.stdout.readline() != "listening\n":
            raise RuntimeError("the engine did not start")
        yield Engine(process, port, tuple(f"http://127.0.{at // 250}.{at % 250 + 1}:{port}" for at in range(addresses)))
    finally:
        process.terminate()
        process.wait(START_LIMIT_S)
        if process.stdout is not None:
            process.stdout.close()


def load(port: int, *options: str | int | float, pids: Sequence[int] = ()) -> Figures:
    """One run of the load against 127.0.0.1:`port`, with the options of `load.c`; `pids` are the processes whose CPU time counts.

    Raises RuntimeError when the load itself fails; what it sees go wrong is counted in the figures.
    """
    command = [*pinned(LOAD_CORE), built("load"), "--port", str(port), "--key", KEY, "--pids", ",".join(map(str, pids)), *map(str, options)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    return cattrs.structure(json.loads(done.stdout), Figures)


def body_hash(body: bytes) -> str:
    """What `load --hash` asks for, of an answer that the engine gave: everything but the digits of its stamps."""
    found = FNV_START
    for byte in STAMP.sub(b"@", body):
        found = (found ^ byte) * FNV_PRIME % 2**64
    return f"{found:016x}"


def raise_file_limit() -> None:
    """As many open files as this process and its children may have: 1,000 streams are 2,000 sockets of a router."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def tree(process: subprocess.Popen[Any]) -> list[int]:
    """The process and all that it has started, by id, in order."""
    one = psutil.Process(process.pid)
    return sorted((one.pid, *(child.pid for child in one.children(recursive=True))))
