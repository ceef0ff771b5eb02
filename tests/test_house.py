"""The rules of the house: which way imports run, which modules may do I/O, who may read a clock."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import llmgw

ROOT = Path(llmgw.__file__).parent

# A room sees what stands in its row, and itself.
MAY_SEE = {
    "domain": set(),
    "settings": {"domain"},
    "identity": {"domain", "settings"},  # what TLS is made of: every room that dials or listens needs it
    "protocol": {"domain", "settings", "identity"},
    "lease": {"domain", "settings", "protocol"},
    "store": {"domain", "settings", "protocol"},
    "replication": {"domain", "settings", "protocol", "lease", "store"},
    "control": {"domain", "settings", "identity", "protocol", "lease", "store"},
    "admin": {"domain", "settings", "identity", "protocol", "lease", "store", "control"},
    "router": {"domain", "settings", "protocol"},
    "agent": {"domain", "settings", "protocol"},
    "sim": {"domain", "settings", "protocol", "lease", "store", "control", "router", "agent"},
    "wiring": {"domain", "settings", "identity", "protocol", "lease", "store", "replication", "control", "admin", "router", "agent", "sim"},
    "cli": {"domain", "settings", "identity", "lease", "wiring"},
}
CTL_MAY_SEE = {"domain", "settings", "cli"}

# Modules of these rooms that may wait, open a socket, touch SQLite or start a process; every other one is pure.
MAY_DO_IO = {
    "identity": {"trust": "contexts of TLS are made of files"},
    "control": {
        "controller": "the nursery",
        "leadership": "waits until the lease has settled who leads",
        "peers": "a word to the other control planes every second",
        "copy_follower": "asks the leader what is new in the store",
        "settings_poller": "looks at file and store every second",
        "restart": "looks whose turn it is every second",
        "sessions": "one task per agent, bounded outboxes",
        "publisher": "waits for a change or the interval",
        "reconciler": "waits for a hint or the tick",
        "event_log": "writes batches, feeds followers",
        "feed": "two tasks per router that follows",
        "usage": "waits for batches, and for the store",
        "identities": "an event that sessions wait for: whose certificate has ended",
    },
    "router": {
        "listener": "accepts connections",
        "proxy": "the exchange's task",
        "relay": "moves bytes",
        "upstreams": "connects to engines",
        "client": "sends to a client",
        "reactor": "the epoll that one task waits for",
        "sweeper": "time-outs",
        "router": "opens the listener and the sweeper",
        "access_log": "writes lines",
        "follow": "one task per control plane",
        "kept": "one writer at a time",
        "load": "asks engines for their load",
        "asking": "one question to an engine",
        "lengths": "asks engines for their models",
        "usage_keeper": "waits between batches; the book on disk through the machine",
        "workers": "starts, feeds and watches worker processes",
        "worker": "a worker's end of the pipe to its parent",
        "worker_pipe": "frames on a pair of sockets",
        "cells": "memory that workers share",
    },
    "agent": {
        "agent": "the nursery",
        "session": "one task per control plane",
        "fence": "one writer at a time",
        "facts": "what the kernel says of this machine",
        "supervisor": "one task per replica",
        "replica": "a replica's task",
        "processes": "starts, watches and ends processes",
        "adoption": "reads what an agent before it left",
        "asking": "asks engines over HTTP",
        "checkpoints": "reads file sizes",
        "gpus": "runs the probe",
        "gpu_reader": "the probe: NVML in a process of its own",
        "logs": "reads and caps log files",
        "ports": "binds to find out what is free",
        "engines.programs": "asks installed programs for their versions",
        "engines.xllamacpp": "looks for the wheel",
        "engines.xllamacpp_server": "the engine's own process",
    },
    "lease": {
        "keeper": "the one task that keeps or seeks the lease",
        "probe": "eight writes at once",
        "bucket": "opens an object store",
        "object_store": "requests to an object store",
        "object_leases": "the threads that those are made in",
        "file": "lease.db and the holder's lock",
    },
    "replication": {
        "replicated_store": "holds what a term has running",
        "term": "the one task that makes writes durable",
        "feed": "an event for who waits for news",
        "litestream_replica": "the files and children of a term",
        "litestream": "the one task that keeps the child",
        "children": "starts, watches and ends a process",
        "control_socket": "asks the child",
        "durable": "writes that wait share a turn",
        "restoring": "runs the program to its end",
        "bases": "watches the lease; an upload while nobody leads",
        "cleaning": "asks on the loop whether to go on",
        "prefix_store": "requests to an object store",
        "programs": "asks the program for its version",
        "folders": "makes, holds and removes working copies",
        "seeding": "SQLite's backup",
        "copies": "reads a database as it lies",
    },
}
IO_MODULES = {
    "apsw", "asyncio", "http", "obstore", "os", "pathlib", "psutil", "pynvml", "select", "socket", "ssl", "subprocess", "threading", "trio",
    "trio_websocket",
}  # fmt: skip
PURE_PARTS = {"pathlib": {"Path", "PurePath"}, "http": {"HTTPStatus"}}  # a Path is a name; reading it is what needs a reason

CLOCKS = {("time", None), ("trio", "sleep"), ("trio", "sleep_until"), ("trio", "current_time"), ("datetime", "now"), ("datetime", "utcnow")}
MAY_READ_A_CLOCK = {
    "wiring.machine": "the real Machine",
    "sim.machine": "the simulated one, on trio's clock",
    "agent.gpu_reader": "a process of its own",
    "agent.engines.xllamacpp_server": "a process of its own",
    "cli": "synchronous commands wait by themselves",
}


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        yield name, ast.parse(path.read_text(), str(path))


def imports(tree: ast.Module) -> Iterator[tuple[str, str | None]]:
    """(module, name) of every import, wherever it stands; those for type checking only count too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, None
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                yield node.module, alias.name


def room(module: str) -> str:
    return module.split(".")[0]


def test_imports_run_one_way() -> None:
    wrong = []
    for name, tree in modules():
        if room(name) in ("__init__", "__main__"):
            continue
        sees = MAY_SEE[room(name)] | {room(name)}
        if name.startswith("cli.ctl"):
            sees = CTL_MAY_SEE
        for module, imported in imports(tree):
            if not module.startswith("llmgw"):
                continue
            target = module.removeprefix("llmgw").lstrip(".") or (imported or "")
            if target and target != "__version__" and room(target) not in sees:
                wrong.append(f"{name} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_the_domain_uses_attrs_and_the_standard_library_only() -> None:
    for name, tree in modules():
        if room(name) == "domain":
            for module, _ in imports(tree):
                top = module.split(".")[0]
                assert top in sys.stdlib_module_names or top in ("attrs", "llmgw"), f"{name} imports {module}"


def test_only_listed_modules_do_io() -> None:
    wrong = []
    for name, tree in modules():
        listed = MAY_DO_IO.get(room(name))
        if listed is None or name.partition(".")[2] in listed or name.endswith("__init__"):
            continue
        for module, imported in imports(tree):
            top = module.split(".")[0]
            if top in IO_MODULES and imported not in PURE_PARTS.get(top, set()):
                wrong.append(f"{name} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_the_list_of_modules_that_do_io_names_no_other() -> None:
    there = {name for name, _ in modules()}
    for where, listed in MAY_DO_IO.items():
        for module, why in listed.items():
            assert why
            assert f"{where}.{module}" in there, f"{where}.{module} is listed and does not exist"


def test_only_the_machine_reads_a_clock() -> None:
    wrong = []
    for name, tree in modules():
        if any(name == allowed or name.startswith(f"{allowed}.") for allowed in MAY_READ_A_CLOCK):
            continue
        for module, imported in imports(tree):
            if (module, None) in CLOCKS or (module, imported) in CLOCKS:
                wrong.append(f"{name} imports {module}.{imported}")
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and (node.value.id, node.attr) in CLOCKS:
                wrong.append(f"{name}:{node.lineno} uses {node.value.id}.{node.attr}")
    assert not wrong, "\n".join(wrong)


def test_every_module_says_what_it_is_for() -> None:
    bare = [name for name, tree in modules() if tree.body and not ast.get_docstring(tree)]
    assert not bare, bare


def test_synchronous_commands_load_no_server() -> None:
    for command in (["version"], ["check", "--help"], ["ctl", "status", "--help"]):
        code = (
            "import sys\nfrom llmgw.cli.main import main\n"
            f"main({command!r})\n"
            "bad = sorted(set(sys.modules) & {'trio', 'quart', 'hypercorn', 'apsw', 'httptools', 'xllamacpp'})\n"
            "assert not bad, bad\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
