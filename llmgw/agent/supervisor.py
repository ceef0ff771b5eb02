"""Owns every replica of this node: takes orders, adopts what an agent before it left running, reaps what is nobody's.

One task per replica. Sessions see it through `Replicas`, so that a simulator can stand in. It knows nothing of leaders: what
reaches it has passed the fence.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final, Protocol

import attrs
import structlog
import trio

from llmgw.agent import adoption, checkpoints, processes
from llmgw.agent.adoption import Adopted, Record
from llmgw.agent.engines.environment import engine_environment
from llmgw.agent.engines.programs import Programs
from llmgw.agent.engines.registry import ENGINES
from llmgw.agent.gpus import Absent, Answer, GpuProbe, cpu_device, devices, memory_by_process
from llmgw.agent.lifecycle import Life, Want, ordered
from llmgw.agent.logs import LOG_BYTES_MAX
from llmgw.agent.ports import why_taken
from llmgw.agent.processes import Process
from llmgw.agent.progress import Seen
from llmgw.agent.replica import KEY_BYTES, STATE_FILE, Replica, Site
from llmgw.domain.errors import Conflict, Invalid, LlmgwError, NotFound
from llmgw.domain.event import Level
from llmgw.domain.files import reason, words
from llmgw.domain.ids import CPU_DEVICE, NodeId, ReplicaId
from llmgw.domain.node import Device, FoundEngine
from llmgw.domain.ports import Machine
from llmgw.domain.replica import ReplicaOrder, ReplicaReport, ReplicaState
from llmgw.domain.words import plain_line
from llmgw.protocol.messages import AgentEvent, EngineSeen, LogChunk, LogRequest

log = structlog.get_logger("llmgw.agent.supervisor")

SURVEY_S: Final = 5.0  # between surveys of processes, memory and GPUs; half a heartbeat, so that each one has fresh numbers
CAP_S: Final = 1.0  # between looks at the sizes of logs: what an engine can write in it is the most a log exceeds its cap by
STOP_ALL_MARGIN_S: Final = 15.0  # beyond the longest grace; covers KILL and the confirmation that memory is free
ENDED_KEPT_MAX: Final = 200  # records of ended replicas; a leader forgets them long before
_REPLICA_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")  # names a folder
REPLICAS_FOLDER: Final = "replicas"  # in the data directory, a folder each
MEMORY_FILE: Final = Path("/proc/meminfo")


class Replicas(Protocol):
    """What a session asks of whoever runs the replicas."""

    def reports(self) -> tuple[ReplicaReport, ...]: ...

    def devices(self) -> tuple[Device, ...]: ...

    async def start(self, order: ReplicaOrder) -> None:
        """Begins; reports tell the rest. Raises LlmgwError when it is refused, which is believed."""
        ...

    def stop(self, replica: ReplicaId, why: str, grace_s: float) -> None: ...

    def restart(self, replica: ReplicaId, why: str) -> None: ...

    async def forget(self, replica: ReplicaId) -> None: ...

    def seen(self, seen: EngineSeen) -> None: ...

    async def log(self, request: LogRequest) -> LogChunk: ...


@attrs.frozen
class Listener:
    """Who hears of changes and events. Neither may block."""

    changed: Callable[[ReplicaReport], None]
    event: Callable[[AgentEvent], None]


@attrs.frozen
class Place:
    """Where this agent keeps things and where its engines listen."""

    node: NodeId
    boot_id: str
    data_dir: Path
    checkpoints_dir: Path
    address: str


class Supervisor:
    """The real `Replicas`. `run` must be running for anything to happen."""

    def __init__(
        self,
        machine: Machine,
        place: Place,
        listener: Listener,
        *,
        gpus: GpuProbe | None = None,
        log_bytes_max: int = LOG_BYTES_MAX,
    ) -> None:
        self._machine = machine
        self._listener = listener
        self._tag = processes.node_tag(place.node)
        self._gpus = gpus or GpuProbe(machine)
        self._gpu_lock = trio.Lock()  # one probe in flight
        self._devices: tuple[Device, ...] = ()
        self._replicas: dict[ReplicaId, Replica] = {}
        self._starting: set[ReplicaId] = set()
        self._nursery: trio.Nursery | None = None
        self._site = Site(
            machine=machine,
            tag=self._tag,
            boot_id=place.boot_id,
            replicas_dir=place.data_dir / REPLICAS_FOLDER,
            checkpoints_dir=place.checkpoints_dir,
            address=place.address,
            python=sys.executable,
            environment=dict(os.environ),
            changed=listener.changed,
            tell=self._tell,
            gpu_pids=self._gpu_pids,
            log_bytes_max=log_bytes_max,
        )

    async def run(self, *, stop_engines: bool = False, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Adopts, reaps, then tends every replica until cancelled. `stop_engines`: then ends them all in order."""
        await self._take_over()
        await self._look_round()
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery  # commands come from sessions and start tasks here; it ends with this function
                for replica in self._replicas.values():
                    if adoption.wants_to_run(replica.life):
                        self._run(replica)
                nursery.start_soon(self._survey)
                nursery.start_soon(self._cap_logs)
                task_status.started()
        finally:
            self._nursery = None
            await self._leave(stop_engines)

    # --- what sessions ask

    def reports(self) -> tuple[ReplicaReport, ...]:
        return tuple(self._replicas[name].report() for name in sorted(self._replicas))

    def devices(self) -> tuple[Device, ...]:
        return self._devices

    def engine_commands(self) -> dict[str, tuple[str, ...]]:
        """Where engines are on this node, by name, as the newest orders say. May be called from another thread."""
        replicas = sorted(self._replicas.values(), key=lambda one: one.order.generation)
        return {one.order.profile.engine: one.order.engine_command for one in replicas if one.order.engine_command}

    async def start(self, order: ReplicaOrder) -> None:
        """Raises `Invalid` (unknown engine, checkpoint missing, bad arguments …) and `Conflict` (port taken, id in use)."""
        if not _REPLICA_ID.fullmatch(order.id):
            raise Invalid(f"no id of a replica: {order.id[:60]!r}", code="bad_id")
        known = self._replicas.get(order.id)
        if known is not None and not known.life.over:
            if known.order == order and known.life.want is Want.RUN:
                return  # it runs already: the same command under another id
            raise Conflict(f"replica {order.id} is {known.life.state.value} here", code="replica_exists")
        if order.id in self._starting:
            raise Conflict(f"replica {order.id} is being started", code="replica_exists")
        self._check_engine(order)
        self._check_devices(order)
        # A port is promised from here on: the check below takes a moment, and another start may come meanwhile.
        for other in self._replicas.values():
            if other.order.port == order.port and other.id != order.id and not other.life.over:
                raise Conflict(f"port {order.port} is taken by replica {other.id}", code="port_taken")
        self._starting.add(order.id)
        try:
            key = self._machine.fresh_hex(KEY_BYTES)
            await self._machine.run_sync(lambda: self._check_place(order, key))
            if known is not None and known is self._replicas.get(order.id):
                while known.task_runs:  # it is over and only writes that down
                    await known.wait_over()
                    await self._machine.sleep_until(self._machine.now_s())
                known.start_again(order)
                self._run(known)
                return
            life = ordered(Life(since_s=self._machine.now_s()), self._machine.now_s())
            replica = Replica(self._site, Record(self._site.boot_id, order, life, key))
            self._replicas[order.id] = replica
            self._listener.changed(replica.report())
            self._run(replica)
        finally:
            self._starting.discard(order.id)

    def stop(self, replica: ReplicaId, why: str, grace_s: float) -> None:
        """Raises `NotFound`."""
        found = self._find(replica)
        if found.life.state is ReplicaState.STOPPED:
            return
        found.stop(why, grace_s)
        self._run(found)

    def restart(self, replica: ReplicaId, why: str) -> None:
        """Raises `NotFound`, and `Conflict` for one that is stopping or stopped."""
        found = self._find(replica)
        if found.life.want is Want.STOP:
            raise Conflict(f"replica {replica} is {found.life.state.value}", code="replica_stopping")
        found.restart(why)
        self._run(found)

    async def forget(self, replica: ReplicaId) -> None:
        """Drops record and logs. Raises `Conflict` while it is not over."""
        found = self._replicas.get(replica)
        if found is None:
            return
        if not found.life.over or found.task_runs:
            raise Conflict(f"replica {replica} is {found.life.state.value}, not ended", code="not_ended")
        del self._replicas[replica]
        await self._machine.run_sync(found.logs.remove)

    def seen(self, seen: EngineSeen) -> None:
        found = self._replicas.get(seen.replica)
        if found is not None:
            now_s = self._machine.now_s()
            byte_s = None if seen.heard_s is None else now_s - seen.heard_s
            found.seen(Seen(seen.in_flight, seen.silent_s, seen.answers, seen.failures, now_s, seen.unanswered, byte_s))

    async def log(self, request: LogRequest) -> LogChunk:
        found = self._replicas.get(request.replica)
        attempt = request.attempt or (found.life.attempt if found else 0)
        try:
            if found is None:
                raise NotFound(f"replica {request.replica} is not on this node")
            logs = found.logs
            attempts = await self._machine.run_sync(logs.attempts)
            if not request.attempt and attempts:
                attempt = attempts[-1]  # the newest attempt may still wait for its start
            part = await self._machine.run_sync(lambda: logs.read(attempt, request.offset, request.limit))
        except NotFound as err:
            return LogChunk(request.request_id, attempt, 0, 0, "", (), err.message)
        except FileNotFoundError:
            return LogChunk(request.request_id, attempt, 0, 0, "", attempts, f"the log of attempt {attempt} is not kept")
        except OSError as err:
            return LogChunk(request.request_id, attempt, 0, 0, "", (), f"the log cannot be read: {err.strerror or err}")
        return LogChunk(request.request_id, attempt, part.offset, part.next_offset, part.text, attempts)

    # --- checks before a start

    def _check_engine(self, order: ReplicaOrder) -> None:
        name = order.profile.engine
        engine = ENGINES.get(name)
        if engine is None:
            raise Invalid(f"unknown engine {name!r}: this node can start {', '.join(sorted(ENGINES))}", code="unknown_engine")
        if engine.distribution and not order.engine_command and _version(engine.distribution) is None:
            raise Invalid(
                f"engine {name!r} is not installed on this node: the package {engine.distribution} is missing", code="engine_missing"
            )

    def _check_devices(self, order: ReplicaOrder) -> None:
        if not order.devices:
            raise Invalid(f"replica {order.id} was given no device", code="no_device")
        known = {device.id: device for device in self._devices}
        for wanted in order.devices:
            device = known.get(wanted)
            if device is None:
                raise Invalid(f"this node has no device {wanted}", code="unknown_device")
            if not device.known:
                raise Invalid(f"device {wanted} does not answer at the moment", code="unknown_device")

    def _check_place(self, order: ReplicaOrder, key: str) -> None:
        """Blocking. What could be found wrong before a process exists is a refusal and not a crash loop."""
        if not 1 <= order.port <= 65535:
            raise Invalid(f"no port: {order.port}", code="bad_port")
        place = self._site.place(order, key)
        launch = ENGINES[order.profile.engine].launch(place)
        environment = engine_environment(self._site.environment, place, launch, "")
        processes.check_words(launch.argv, environment)
        try:
            processes.find_program(launch.argv[0], environment.get("PATH"))
        except Invalid as err:
            if order.profile.engine == "command":
                raise  # the operator's own word
            name = order.profile.engine
            raise Invalid(
                f'engine "{name}" is not on this node: {err.message} ([engines."{name}"] command says where it is)', code=err.code
            ) from err
        self._check_memory(order, place.checkpoint)
        taken = why_taken(place.host, place.port)
        if taken:
            raise Conflict(taken, code="port_taken")

    def _check_memory(self, order: ReplicaOrder, checkpoint: str) -> None:
        """Blocking. Placement promised the memory from numbers that may be old; here are the newest.

        Foreign memory counts as measured, ours as promised or measured, whichever is more: an engine that loads will take
        what it was promised.
        """
        need_mib = order.memory_mib or math.ceil(checkpoints.estimate_mib(checkpoint) / len(order.devices))
        for device in self._devices:
            if device.id not in order.devices:
                continue
            others = [one for one in self._replicas.values() if device.id in one.order.devices and not one.life.over and one.id != order.id]
            ours_mib = sum(max(one.order.memory_mib, one.memory_mib // len(one.order.devices)) for one in others)
            free_mib = device.total_mib - device.foreign_mib - ours_mib
            if need_mib > free_mib:
                raise Conflict(
                    f"{device.name} ({device.id}) has {max(0, free_mib)} MiB free of {device.total_mib}: others hold "
                    f"{device.foreign_mib} and {len(others)} replicas {ours_mib}; {need_mib} are needed",
                    code="no_memory",
                )

    # --- taking over from the agent before

    async def _take_over(self) -> None:
        """Reads what was written down, adopts what still runs, and ends whatever else is ours."""
        site = self._site
        records = await self._machine.run_sync(lambda: list(_read_records(site.replicas_dir, self._machine)))
        everything = await self._machine.run_sync(processes.survey)
        alive = {process.pid: process for process in everything}
        now_s = self._machine.now_s()
        reap: set[str] = set()
        for entry in records:
            if isinstance(entry, str):
                self._tell("agent.state_unreadable", entry, "node", Level.ERROR)
                continue
            record = attrs.evolve(entry, life=adoption.rebased(entry, site.boot_id, now_s))
            if record.order.profile.engine not in ENGINES:
                text = f"engine {record.order.profile.engine!r} is unknown to this agent"
                self._tell("agent.state_unreadable", text, f"replica/{record.order.id}", Level.ERROR)
                continue
            found = alive.get(record.main.pid) if record.main else None
            verdict = adoption.adopt(record, site.boot_id, found.identity if found else None, found.token if found else "")
            if isinstance(verdict, Adopted):
                self._tell("replica.adopted", f"process {verdict.main.pid} runs on", f"replica/{record.order.id}", Level.INFO)
                replica = Replica(site, attrs.evolve(record, boot_id=site.boot_id))
            else:
                ran = record.main is not None
                if record.token:
                    reap.add(record.token)
                lost = attrs.evolve(record, main=None, token="", boot_id=site.boot_id)
                if ran and record.life.want is Want.RUN:
                    lost = attrs.evolve(lost, life=adoption.away(lost.life, record.order.restart, verdict.why, now_s))
                    kind = "replica.failed" if lost.life.state is ReplicaState.FAILED else "replica.crashed"
                    self._tell(kind, verdict.why, f"replica/{record.order.id}", Level.WARNING)
                replica = Replica(site, lost)
            self._replicas[replica.id] = replica
            await self._machine.run_sync(replica.recall)
        await self._reap_orphans(everything, reap)
        await self._machine.run_sync(self._cap_all)  # before anything else is written

    async def _reap_orphans(self, everything: Iterable[Process], also: Iterable[str] = ()) -> None:
        """Ends every process with a start token of ours that no replica claims, with its whole tree."""
        candidates = ({process.token for process in everything if processes.is_ours(process.token, self._tag)} | set(also)) - self._tokens()
        if not candidates:
            return
        # A replica may have ended its tree since; what is still there in a second look, and still unclaimed, is an orphan.
        again = await self._machine.run_sync(processes.survey)
        for token in sorted(candidates - self._tokens()):
            members = processes.tree(again, None, token)
            if not members:
                continue
            pids = ", ".join(str(process.pid) for process in members)
            replica = token.split(".")[0]
            self._tell("replica.orphan_reaped", f"processes {pids} were left of an earlier start", f"replica/{replica}", Level.WARNING)
            await processes.end_tree(
                self._machine,
                None,
                token,
                watched=False,
                grace_s=0.0,
                on_stuck=lambda names, of=replica: self._tell(  # type: ignore[misc]
                    "replica.stuck", f"processes that KILL does not end: {names}", f"replica/{of}", Level.ERROR
                ),
            )

    # --- tasks

    def _run(self, replica: Replica) -> None:
        """Starts the replica's task unless it runs."""
        if replica.task_runs or self._nursery is None:
            return
        replica.task_runs = True
        self._nursery.start_soon(self._tend, replica)

    async def _tend(self, replica: Replica) -> None:
        try:
            await replica.run()
        finally:
            replica.task_runs = False
        # A command that came while the last state was written found the task still there.
        if adoption.wants_to_run(replica.life) or replica.restart_wanted:
            self._run(replica)
        self._drop_oldest_ended()

    def _drop_oldest_ended(self) -> None:
        ended = [replica for replica in self._replicas.values() if replica.life.over and not replica.task_runs]
        for replica in sorted(ended, key=lambda one: one.life.since_s)[:-ENDED_KEPT_MAX]:
            del self._replicas[replica.id]
            replica.logs.remove()

    async def _survey(self) -> None:
        while True:
            await self._machine.sleep_until(self._machine.now_s() + SURVEY_S)
            await self._reap_orphans(await self._look_round())

    async def _look_round(self) -> tuple[Process, ...]:
        """Measures processes, memory and devices."""
        answer = await self._ask_gpus()
        everything = await self._machine.run_sync(processes.survey)
        on_gpu = memory_by_process(answer)
        ours: set[int] = set()
        resident_mib = 0.0
        for replica in self._replicas.values():
            record = replica.record
            if not record.token:
                continue
            watched = record.main is not None
            members = processes.tree(everything, record.main, record.token, watched=watched, also=replica.members)
            replica.members = frozenset(process.identity for process in members)
            ours |= {process.pid for process in members}
            own_resident_mib = sum(process.resident_mib for process in members)
            resident_mib += own_resident_mib
            on_cpu = all(device == CPU_DEVICE for device in record.order.devices)
            replica.memory_mib = int(own_resident_mib if on_cpu else sum(on_gpu.get(process.pid, 0) for process in members))
        memory_text = await self._machine.run_sync(_memory_text)
        self._devices = (*devices(answer, self._devices, ours), cpu_device(memory_text, resident_mib))
        return everything

    async def _ask_gpus(self) -> Answer:
        async with self._gpu_lock:
            return await self._gpus.ask()

    async def _gpu_pids(self) -> frozenset[int]:
        answer = await self._ask_gpus()
        return frozenset() if isinstance(answer, Absent) else frozenset(memory_by_process(answer))

    async def _cap_logs(self) -> None:
        while True:
            await self._machine.sleep_until(self._machine.now_s() + CAP_S)
            await self._machine.run_sync(self._cap_all)

    def _cap_all(self) -> None:
        """Blocking."""
        for replica in list(self._replicas.values()):
            try:
                if replica.life.attempt and replica.logs.cap(replica.life.attempt):
                    log.info("log cut", replica=replica.id, attempt=replica.life.attempt)
            except OSError as err:
                log.warning("a log cannot be cut", replica=replica.id, error=words(err))

    async def _leave(self, stop_engines: bool) -> None:
        """What happens to the engines when the agent ends."""
        live = [replica for replica in self._replicas.values() if replica.record.main is not None]
        if not stop_engines:
            for replica in live:
                assert replica.record.main is not None
                log.info("engine left running", replica=replica.id, pid=replica.record.main.pid)
        else:
            longest_s = max((replica.record.grace_s for replica in live), default=0.0)
            with trio.move_on_after(longest_s + STOP_ALL_MARGIN_S, shield=True):
                async with trio.open_nursery() as nursery:
                    for replica in self._replicas.values():
                        nursery.start_soon(replica.end_now)
        await self._gpus.close()

    # --- bits

    def _tokens(self) -> set[str]:
        """The start tokens that replicas claim now."""
        return {replica.record.token for replica in self._replicas.values() if replica.record.token}

    def _find(self, replica: ReplicaId) -> Replica:
        found = self._replicas.get(replica)
        if found is None:
            raise NotFound(f"replica {replica} is not on this node", code="unknown_replica")
        return found

    def _tell(self, kind: str, text: str, subject: str, level: Level) -> None:
        text = plain_line(text)  # it may hold an engine's own words
        log.log(_LEVELS[level], text, kind=kind, object=subject)
        self._listener.event(AgentEvent(kind, subject, text, level))


def found_engines(programs: Programs, commands: Mapping[str, tuple[str, ...]]) -> tuple[FoundEngine, ...]:
    """The engines that this node can start, with versions. `commands`: where some of them are, by name. Blocking."""
    found = []
    for name in sorted(ENGINES):
        engine, command = ENGINES[name], commands.get(name, ())
        version: str | None = ""
        if engine.program is not None:
            version = programs.version(engine.program, command)
        elif engine.distribution is not None and not command:
            version = _version(engine.distribution)
        if version is not None:
            found.append(FoundEngine(name, version))
    return tuple(found)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _memory_text() -> str:
    try:
        return MEMORY_FILE.read_text(encoding="ascii")
    except OSError:
        return ""


def _read_records(folder: Path, machine: Machine) -> Iterable[Record | str]:
    """Every record below `folder`, or what is wrong with it. Blocking."""
    if not folder.is_dir():
        return
    for entry in sorted(folder.iterdir()):
        path = entry / STATE_FILE
        try:
            data = machine.disk.read(path)
            if data is None:
                continue
            record = adoption.decode(data)
        except (OSError, LlmgwError) as err:
            why = reason(err) if isinstance(err, OSError) else str(err)
            yield f"{path} cannot be used, so its replica is unknown and what runs of it is ended: {why}"
            continue
        if record.order.id == entry.name:
            yield record
        else:
            yield f"{path} names replica {record.order.id}"


_LEVELS: Final = {Level.DEBUG: 10, Level.INFO: 20, Level.WARNING: 30, Level.ERROR: 40}
