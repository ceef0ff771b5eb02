"""Two control planes on one store, two agents and a router that follows them, as processes; and the load that must not notice."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import apsw
import psutil
import pytest

from tests.chaos import hash_engine
from tests.conftest import FIGURE
from tests.programs import WAIT_LIMIT_S, Admin, Program, call, chat, end_tree, free_port, free_ports, processes_with, wait_for

FULL: Final = os.environ.get("LLMGW_CHAOS") == "full"  # `make chaos`: a ttl of 15 s, long faults, more rounds
ROOT: Final = Path(__file__).parents[2]
MODEL: Final = "m"
REPLICAS: Final = 3
RATE: Final = 200.0  # requests a second; two cores carry the load, the router and everything else at that
STREAM_S_MAX: Final = 60.0 if FULL else 3.0
PLANES: Final = ("ctl-a", "ctl-b")
LOOPBACK: Final = "127.0.0.1"
NODES: Final = ("node-1", "node-2")
ENGINE_PORTS: Final = 10
HEARTBEAT_S: Final = 0.5
NODE_LOST_AFTER_S: Final = 3.0
RESTART_BACKOFF_S: Final = 0.5
SPARE: Final = "spare"  # a model that no load is on: its engines may be killed


class Kept(Protocol):
    """Where control planes keep their store, as their files say it. `environ` is what their processes need for it."""

    environ: Mapping[str, str]

    def table(self, plane: str) -> str:
        """What stands in [store] of the one of that name."""
        ...

    def prepare(self, data_dir: Path) -> None:
        """What must be in a control plane's data directory before it starts."""
        ...

    def lease(self) -> dict[str, Any]:
        """The record that decides who leads."""
        ...

    def restored(self) -> Path:
        """A folder with an `llmgw.db` of everything that the next leader would have."""
        ...


class SharedFile:
    """A file in `folder`, which they share; their tokens are made beside it."""

    environ: Mapping[str, str] = {}

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def table(self, plane: str) -> str:
        return f'path = "{self.folder}/llmgw.db"'

    def prepare(self, data_dir: Path) -> None:
        """Nothing."""

    def lease(self) -> dict[str, Any]:
        return lease_record(self.folder)

    def restored(self) -> Path:
        return self.folder


class Plane:
    """One control plane on a store that is kept so. `program` is its newest process.

    `tables` is the rest of its file, as TOML, and begins in [router]. `altered` may be set before it starts, as `Program` has it.
    `host` is the address of this machine under which agents and routers know it.
    """

    def __init__(self, name: str, folder: Path, kept: Kept, tables: str, host: str = LOOPBACK) -> None:
        self.name, self.folder, self.host = name, folder, host
        self.altered: Sequence[str] = ()
        self.environ = dict(kept.environ)
        self.data_dir = folder / name
        self.port, self.router_port = free_port(), free_port()
        self.log = folder / f"{name}.log"
        self.programs: list[Any] = []  # Program, or what a Starter has started
        self.file.write_text(
            f"""
[server]
name = "{name}"
data_dir = "{self.data_dir}"
admin_listen = "127.0.0.1:{self.port}"
[store]
{kept.table(name)}
[auth]
required = false
[router]
listen = "127.0.0.1:{self.router_port}"
{tables}
"""
        )
        kept.prepare(self.data_dir)

    @property
    def program(self) -> Any:
        return self.programs[-1]

    @property
    def file(self) -> Path:
        return self.folder / f"{self.name}.toml"

    @property
    def url(self) -> str:
        """As agents and routers know it."""
        return f"http://{self.host}:{self.port}"

    @property
    def router_address(self) -> str:
        """Of its embedded router."""
        return f"127.0.0.1:{self.router_port}"

    @property
    def token(self) -> str:
        return (self.data_dir / "admin-token").read_text().strip()

    @property
    def admin(self) -> Admin:
        return Admin(f"127.0.0.1:{self.port}", self.token)

    @property
    def output(self) -> str:
        return self.program.output

    def start(self) -> None:
        self.programs.append(Program(["server", "--config", str(self.file)], self.folder, self.name, self.environ, self.altered))

    def wait_serving(self) -> None:
        wait_for(lambda: self.serves() or self.program.process.poll() is not None, f"{self.name} serves")
        assert self.program.process.poll() is None, self.output

    def serves(self) -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException):
            return call(f"127.0.0.1:{self.port}", "GET", "/health", limit_s=5)[0] == 200
        return False

    def leader(self) -> dict[str, Any] | None:
        """What it says of who leads; None while it does not answer."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            headers = {"authorization": f"Bearer {self.token}"}
            status, answer = call(f"127.0.0.1:{self.port}", "GET", "/api/v1/leader", None, headers, 2)
            return answer if status == 200 else None
        return None

    def confirmed(self) -> bool:
        return (self.leader() or {}).get("power") == "confirmed"

    def log_of(self, what: str, since: int = 0) -> list[str]:
        """Lines that speak of `what`, from the place `since` in the log."""
        return [line for line in self.output[since:].splitlines() if what in line]


class Site:
    """The files of all roles in `folder`, and the processes.

    `store` is the folder that the control planes share, of which they have the agents' token at least; `kept` is where their store is
    when it is not there. `hosts` are those addresses of control planes that are not 127.0.0.1, by name.
    """

    def __init__(
        self,
        folder: Path,
        *,
        ttl_s: float,
        renew_s: float,
        poll_s: float,
        store: Path | None = None,
        kept: Kept | None = None,
        hosts: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.store = store or folder / "shared"
        self.store.mkdir(exist_ok=True)
        self.marker = str(folder)
        self.ttl_s = ttl_s
        tables = f"""
[lease]
ttl_s = {ttl_s}
renew_s = {renew_s}
poll_s = {poll_s}
[reconcile]
heartbeat_s = {HEARTBEAT_S}
node_lost_after_s = {NODE_LOST_AFTER_S}
grace_s = 5
restart_backoff_s = [{RESTART_BACKOFF_S}]
[route]
drain_s = {STREAM_S_MAX + 5}
"""
        kept = kept or SharedFile(self.store)
        self.planes = {name: Plane(name, folder, kept, tables, (hosts or {}).get(name, LOOPBACK)) for name in PLANES}
        self.programs: dict[str, Program] = {}
        self.router_port = free_port()
        self._others: list[Program] = []
        urls = json.dumps([plane.url for plane in self.planes.values()])
        first = int(free_ports(ENGINE_PORTS * len(NODES)).partition("-")[0])  # the nodes are one machine: a range for each
        for index, node in enumerate(NODES):
            ports = f"{first + index * ENGINE_PORTS}-{first + (index + 1) * ENGINE_PORTS - 1}"
            (folder / f"{node}.toml").write_text(
                f"""
[agent]
name = "{node}"
control_planes = {urls}
data_dir = "{folder}/{node}"
engine_ports = "{ports}"
token_file = "{self.store}/agent-token"
"""
            )
        (folder / "router.toml").write_text(
            f"""
[router]
listen = "127.0.0.1:{self.router_port}"
control_planes = {urls}
data_dir = "{folder}/router"
token_file = "{self.store}/agent-token"
"""
        )

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.router_port}"

    def start(self, name: str) -> Program:
        """An agent or the router."""
        role = "router" if name == "router" else "agent"
        self.programs[name] = one = Program([role, "--config", str(self.folder / f"{name}.toml")], self.folder, name)
        self._others.append(one)
        return one

    def start_all(self) -> None:
        """Until one control plane leads, the other stands by, and every replica answers through the router."""
        for plane in self.planes.values():
            plane.start()
        for plane in self.planes.values():
            plane.wait_serving()
        for name in (*NODES, "router"):
            self.start(name)
        leader = self.leader()
        leader.admin.apply(self.model(MODEL, REPLICAS), self.model(SPARE, 1))
        leader.admin.wait_ready(MODEL, REPLICAS)
        leader.admin.wait_ready(SPARE)
        wait_for(self._answers, "the router answers")
        self.wait_whole()

    def _answers(self) -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException):
            return chat(self.address, MODEL)[0] == 200
        return False

    def wait_whole(self) -> None:
        """Both control planes run, one leads, the other is known to stand by, both hear both nodes, the router hears both."""

        def whole() -> bool:
            views = [plane.leader() for plane in self.planes.values()]
            leaders = [view for view in views if view is not None and view["power"] == "confirmed"]
            if None in views or len(leaders) != 1 or [one["name"] for one in leaders[0]["standbys"] if one["heard_age_s"] < 3] == []:
                return False
            for plane in self.planes.values():
                if sum(node["state"] == "ready" for node in plane.admin("GET", "/nodes")["nodes"]) != len(NODES):
                    return False
            return self.sessions() == {1.0}

        wait_for(whole, "one leads, one stands by, both hear both nodes and the router")

    def sessions(self) -> set[float]:
        """The router's llmgw_router_session over its control planes."""
        lines = call(self.address, "GET", "/metrics")[1].splitlines()
        return {float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("llmgw_router_session{")}

    def leader(self) -> Plane:
        """The one that leads now."""

        def found() -> Plane | None:
            leading = [plane for plane in self.planes.values() if plane.confirmed()]
            return leading[0] if len(leading) == 1 else None

        return wait_for(found, "exactly one leads")

    def other(self, plane: Plane) -> Plane:
        (other,) = [one for one in self.planes.values() if one is not plane]
        return other

    def model(self, name: str, count: int, **more: Any) -> dict[str, Any]:
        command = [sys.executable, hash_engine.__file__, "--port", "{port}", "--mark", self.engine_mark(name)]
        profile = {"name": "p", "engine": "command", "command": command}
        return {"name": name, "replicas": {"min": 0, "max": 5, "count": count}, "profile": [profile], **more}

    def engine_mark(self, model: str) -> str:
        return f"{self.marker}-engine-{model}"

    def engines(self, model: str = MODEL) -> set[int]:
        """Pids of the processes, whatever anybody says of them."""
        return {process.pid for process in processes_with(self.engine_mark(model))}

    def replica_events(self, model: str = MODEL) -> list[tuple[int, str, str]]:
        """What was done to a model's replicas, by the history in the store."""
        events = self.leader().admin.events("replica.")
        return [(event["seq"], event["kind"], event["text"]) for event in events if event["object"].startswith(f"replica/{model}-")]

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[Load]:
        """Meanwhile: no request fails, no engine starts or stops, and nobody orders it. Begins and ends with a whole site."""
        self.wait_whole()
        engines, events = self.engines(), self.replica_events()
        with running_load(self) as load:
            yield load
            load.wait_more(RATE / 2)  # the load goes on after it
        assert self.engines() == engines
        self.wait_whole()
        assert self.replica_events() == events
        assert load.told["failed"] == 0, load.told["failures"]

    def close(self) -> None:
        for one in [*self._others, *(program for plane in self.planes.values() for program in plane.programs)]:
            if one.process.poll() is None:
                one.process.send_signal(signal.SIGCONT)
            one.close()
        end_tree(self.marker)


class Pair:
    """Two control planes alone, without routers; nothing else knows of them. Each one's file holds a model."""

    def __init__(
        self, folder: Path, lease: str = "", models: Sequence[str] = ("from-the-file",) * 2, kept: Callable[[Path], Kept] = SharedFile
    ) -> None:
        """`lease` is the table of that name, for both; `models` names the model of each; `kept(folder)` where their store is."""
        self.folder = folder
        self.store = folder / "shared"
        self.store.mkdir(parents=True)
        self.kept = kept(self.store)
        self.planes = [
            Plane(name, folder, self.kept, f"embedded = false\n{lease}\n{model_table(model)}")
            for name, model in zip(PLANES, models, strict=True)
        ]

    def start(self) -> tuple[Plane, dict[str, Any]]:
        """As wait_agreed, of two that were just started."""
        for plane in self.planes:
            plane.start()
        for plane in self.planes:
            plane.wait_serving()
        return self.wait_agreed()

    def wait_agreed(self) -> tuple[Plane, dict[str, Any]]:
        """(who leads, what it says of that), once one is confirmed, and the other says the same."""

        def agreed() -> tuple[Plane, dict[str, Any]] | None:
            views = [(plane, plane.leader()) for plane in self.planes]
            leading = [(plane, view) for plane, view in views if view is not None and view["power"] == "confirmed"]
            named = {(view["owner"], view["epoch"]) if view is not None else None for _, view in views}
            return leading[0] if len(leading) == 1 and len(named) == 1 else None

        return wait_for(agreed, "exactly one leads, and the other knows it")

    def close(self) -> None:
        for plane in self.planes:
            for one in plane.programs:
                one.close()


def model_table(name: str) -> str:
    """A model that runs nowhere, as a file has it."""
    return f"""
[[model]]
name = "{name}"
replicas = {{ min = 0, max = 1, count = 0 }}
[[model.profile]]
engine = "command"
command = ["/bin/true"]
"""


def lease_record(store: Path) -> dict[str, Any]:
    """What stands in the lease's file now."""
    connection = apsw.Connection(str(store / "lease.db"))
    try:
        connection.set_busy_timeout(10_000)
        (row,) = connection.execute("SELECT record FROM lease WHERE role = 'control-plane'").fetchall()
    finally:
        connection.close()
    record: dict[str, Any] = json.loads(row[0])
    return record


class Load:
    """The load's process, and what it has told so far. It asks the router at `address`."""

    def __init__(self, folder: Path, number: int, address: str) -> None:
        self.report = folder / f"load-{number}.json"
        self.log = folder / f"load-{number}.log"
        args = [sys.executable, "-m", "tests.chaos.load", address, MODEL, f"{RATE}", f"{STREAM_S_MAX}", str(self.report)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                args, cwd=ROOT, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    @property
    def told(self) -> dict[str, Any]:
        return json.loads(self.report.read_text()) if self.report.exists() else {"sent": 0, "answered": 0, "done": False}

    @property
    def counts(self) -> str:
        """For a figure: how many requests failed, of how many."""
        told = self.told
        return f"{told['failed']} of {told['answered']:,}, {told['streams']:,} of them streams"

    def wait_more(self, count: float, limit_s: float = WAIT_LIMIT_S) -> None:
        """So many further requests have been answered."""
        upto = self.told["answered"] + count
        wait_for(lambda: self.told["answered"] >= upto or self.process.poll() is not None, f"{count:g} more answers", limit_s)
        assert self.process.poll() is None, self.log.read_text()

    def end(self) -> None:
        """Returns when every request that was begun has been answered."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(STREAM_S_MAX + 60)
        assert self.told["done"], self.log.read_text()


class Served(Protocol):
    """What a load runs on: where it keeps its files, and HOST:PORT of the router it asks."""

    @property
    def folder(self) -> Path: ...
    @property
    def address(self) -> str: ...


@contextlib.contextmanager
def running_load(site: Served, address: str = "") -> Iterator[Load]:
    """On the site's router, or on the one at `address`. Ends when every request has been answered."""
    load = Load(site.folder, len(list(site.folder.glob("load-*.log"))), address or site.address)
    try:
        load.wait_more(RATE / 2)
        yield load
        load.end()
    finally:
        assert load.process.stdin is not None
        load.process.stdin.close()
        if load.process.poll() is None:
            load.process.kill()
            load.process.wait(30)


def freeze(plane: Plane, store: Path) -> None:
    """SIGSTOP of its process, at an instant at which it has no lock of SQLite's: a frozen process keeps that, too."""
    process = psutil.Process(plane.program.process.pid)
    while True:
        process.send_signal(signal.SIGSTOP)
        wait_for(lambda: process.status() == psutil.STATUS_STOPPED, f"{plane.name} is frozen")
        with contextlib.suppress(apsw.BusyError), locked(store / "lease.db", store / "llmgw.db", limit_s=2.0):
            return
        process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def locked(*paths: Path, limit_s: float = 10.0) -> Iterator[None]:
    """Another process's writer, which does not let go. Raises apsw.BusyError when it does not come to it within the limit."""
    connections = [apsw.Connection(str(path)) for path in paths]
    try:
        for connection in connections:
            connection.set_busy_timeout(round(limit_s * 1000))
            connection.execute("BEGIN IMMEDIATE")
        yield
    finally:
        for connection in connections:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            connection.close()


def since(begun_s: float) -> float:
    return time.monotonic() - begun_s


def figure(request: pytest.FixtureRequest, name: str, value: Any) -> None:
    """One row of the table that the run ends with."""
    request.node.user_properties.append((f"{FIGURE}{name}", value))
