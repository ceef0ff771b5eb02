"""The task that owns one replica on this node: starts its engine, proves it, watches it, restarts it in place, ends it.

The rules of its life are `lifecycle`'s and `progress`'s; which replica runs here is the leader's choice. What it must
remember it writes down before it acts on it, so that the next agent can go on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final

import attrs
import structlog
import trio

from llmgw.agent import adoption, checkpoints, lifecycle, ports, processes, progress
from llmgw.agent.adoption import Record
from llmgw.agent.asking import ConnectRefused, ask
from llmgw.agent.engines.description import Counters, Engine, Place
from llmgw.agent.engines.environment import engine_environment
from llmgw.agent.engines.probes import probe
from llmgw.agent.engines.registry import ENGINES
from llmgw.agent.lifecycle import Life, Want
from llmgw.agent.logs import LOG_BYTES_MAX, ReplicaLogs
from llmgw.agent.processes import Identity
from llmgw.agent.progress import Look, Progress, Seen, Verdict
from llmgw.domain.errors import Invalid, LlmgwError, Unavailable
from llmgw.domain.event import Level
from llmgw.domain.files import words
from llmgw.domain.ids import CPU_DEVICE, ReplicaId
from llmgw.domain.ports import Machine
from llmgw.domain.replica import ReplicaOrder, ReplicaReport, ReplicaState

log = structlog.get_logger("llmgw.agent.replica")

READY_POLL_S: Final = 0.5  # between looks while it loads; a load takes seconds to minutes
READY_LOOK_LIMIT_S: Final = 15.0  # one look while it loads: some engines answer slowly while they read weights
WATCH_LOOK_LIMIT_S: Final = 5.0  # one look at a ready engine; no answer in time only says that it is busy
WATCH_S_MAX: Final = 5.0  # between looks at a ready engine; its end is seen at once by other means
WATCH_S_MIN: Final = 0.2
WATCHES_PER_LIMIT: Final = 4  # so that a stall is noticed at most a quarter of the limit late
REFUSED_AGAIN_S: Final = 0.5  # a second refused connect this much later, and it is dead
MEMORY_FREE_LIMIT_S: Final = 10.0  # a driver frees within a second or two; then it is told and the stop goes on
MEMORY_LOOK_S: Final = 1.0
KEY_BYTES: Final = 24  # of randomness in an engine's secret
TOKEN_BYTES: Final = 8  # of randomness in a start token
STATE_FILE: Final = "state.json"
KEY_FILE: Final = "api-key"
CONFIRM_EXIT_S: Final = 1.0  # a refused connect usually means that the process is ending: its exit code tells more


@attrs.frozen
class Site:
    """What every replica of this node shares. `changed` is called after each change of a report, `tell` with an event."""

    machine: Machine
    tag: str  # marks our start tokens
    boot_id: str
    replicas_dir: Path
    checkpoints_dir: Path
    address: str
    python: str
    environment: Mapping[str, str]
    changed: Callable[[ReplicaReport], None]
    tell: Callable[[str, str, str, Level], None]  # kind, text, object, level
    gpu_pids: Callable[[], Awaitable[frozenset[int]]]  # who holds GPU memory now
    log_bytes_max: int = LOG_BYTES_MAX

    def folder(self, replica: ReplicaId) -> Path:
        return self.replicas_dir / replica

    def place(self, order: ReplicaOrder, key: str) -> Place:
        """Blocking. Raises `Invalid` where the checkpoint is missing."""
        # What only we can tell from a path is a path: an engine that knows repositories would resolve a repo id itself.
        checkpoint = checkpoints.resolve(order.profile.checkpoint, self.checkpoints_dir)
        key_file = str(self.folder(order.id) / KEY_FILE)
        return Place(order, self.address, order.port, checkpoint, key, key_file, self.python)


@attrs.frozen
class _Died:
    exit_code: int | None


@attrs.frozen
class _Unwell:
    """It must be ended, and why. `detail` is for the event."""

    reason: str
    detail: str


@attrs.frozen
class _Asked:
    """A command came."""


_Outcome = _Died | _Unwell | _Asked


class Replica:
    """One replica. Commands change it at once and its task carries them out."""

    def __init__(self, site: Site, record: Record) -> None:
        self._site = site
        self._machine = site.machine
        self._record = record
        self._engine: Engine = ENGINES[record.order.profile.engine]
        self.logs = ReplicaLogs(site.folder(record.order.id), site.log_bytes_max)
        self.memory_mib = 0  # measured by the supervisor's survey
        # Seen by that survey too: a child that dropped its environment and its session is known by its descent only, and that
        # only while its parent lives.
        self.members: frozenset[Identity] = frozenset()
        self.task_runs = False  # kept by the supervisor
        self._progress = Progress(site.machine.now_s())
        self._restart_why: str | None = None
        self._scope: trio.CancelScope | None = None
        self._log_tail: tuple[str, ...] = ()
        self._saving = trio.Lock()
        self._over = trio.Event()

    # --- what others may know

    @property
    def id(self) -> ReplicaId:
        return self._record.order.id

    @property
    def order(self) -> ReplicaOrder:
        return self._record.order

    @property
    def record(self) -> Record:
        return self._record

    @property
    def life(self) -> Life:
        return self._record.life

    @property
    def restart_wanted(self) -> bool:
        """A restart was asked for and not begun."""
        return self._restart_why is not None

    def report(self) -> ReplicaReport:
        life, order = self.life, self.order
        running = self._progress.counters.running if self._progress.counters and life.state is ReplicaState.READY else None
        has_process = self._record.main is not None
        return ReplicaReport(
            order=order,
            state=life.state,
            reason=life.reason,
            age_s=max(0.0, self._machine.now_s() - life.since_s),
            attempt=life.attempt,
            pid=self._record.main.pid if self._record.main else 0,
            url="" if life.over else f"http://{_host(self._site.address)}:{order.port}",
            key="" if life.over else self._record.key,
            running=running,
            memory_mib=self.memory_mib if has_process else 0,
            exit_code=life.exit_code,
            log_tail=self._log_tail,
            in_rotation=life.in_rotation,
            tries=life.tries,
            failure=life.failure,
        )

    def recall(self) -> None:
        """Reads back the last lines of what failed before this agent began. Blocking."""
        if self.life.state is ReplicaState.FAILED:
            self._log_tail = self.logs.tail(self.life.attempt)
        elif self.life.state is ReplicaState.STARTING and self.life.attempt > 1:
            self._log_tail = self.logs.tail(self.life.attempt - 1)

    # --- commands

    def stop(self, why: str, grace_s: float) -> None:
        """From now on nothing restarts it; its task ends the tree. May be called again."""
        self._record = attrs.evolve(self._record, grace_s=grace_s)
        self._become(lifecycle.stopping(self.life, why, self._machine.now_s()))
        self._interrupt()

    def restart(self, why: str) -> None:
        """Ends the tree and starts anew with a fresh count. Raises `Invalid` when it is being stopped."""
        if self._asked_to_stop():
            raise Invalid(f"replica {self.id} is being stopped", code="stopping")
        self._restart_why = why
        self._interrupt()

    def start_again(self, order: ReplicaOrder) -> None:
        """A new command for one that is over; its task is to be started anew by the caller."""
        life = attrs.evolve(self.life, state=ReplicaState.PENDING) if self.life.state is ReplicaState.STOPPED else self.life
        self._engine = ENGINES[order.profile.engine]
        self._restart_why = None
        self._over = trio.Event()
        self._record = attrs.evolve(self._record, order=order)
        self._become(lifecycle.ordered(life, self._machine.now_s()))

    def seen(self, seen: Seen) -> None:
        """What the routers saw."""
        self._progress = progress.reported(self._progress, seen)

    async def wait_over(self) -> None:
        """Until it is stopped or failed."""
        await self._over.wait()

    # --- its task

    async def run(self) -> None:
        """Tends the replica until it is stopped or failed."""
        while True:
            if self._asked_to_stop():
                await self._stop()
                break
            if self._restart_why is not None:
                await self._restart(self._restart_why)
            if self.life.over:
                break
            if self._record.main is None:
                await self._save()
                if not await self._wait_due() or not await self._start():
                    continue
            outcome = await self._tend()
            if not isinstance(outcome, _Asked):
                await self._close_attempt(outcome)
        await self._save()
        self._over.set()

    async def _wait_due(self) -> bool:
        """Waits out the back-off; False when a command came."""
        with self._interruptible():
            await self._machine.sleep_until(self.life.start_at_s)
        return not self._asked

    async def _start(self) -> bool:
        """One attempt's process; False when it could not be started, which counts as an attempt."""
        try:
            main, token = await self._spawn()
        except (LlmgwError, OSError) as err:
            text = err.message if isinstance(err, LlmgwError) else words(err)
            await self._close_attempt(_Unwell(text, "it could not be started"))
            return False
        # No checkpoint since the process exists: from here on it is written down, come what may.
        self._record = attrs.evolve(self._record, main=main, token=token)
        runs = self._advance(lifecycle.spawned)
        self._log_tail = ()
        with trio.CancelScope(shield=True):  # a local write; an agent that is told to end here must not leave an orphan
            await self._save()
        return runs

    async def _spawn(self) -> tuple[Identity, str]:
        """Raises LlmgwError and OSError."""
        order, attempt = self.order, self.life.attempt
        token = processes.start_token(order.id, attempt, self._site.tag, self._machine.fresh_hex(TOKEN_BYTES))
        self._record = attrs.evolve(self._record, token=token)
        await self._save()  # so that whatever is found with this token later is known to be of this attempt

        def work() -> Identity:
            place = self._site.place(order, self._record.key)
            taken = ports.why_taken(place.host, place.port)
            if taken:
                raise Unavailable(taken, code="port_taken")
            log_path = self.logs.prepare(attempt)
            self._machine.disk.write(Path(place.key_file), place.key.encode())
            launch = self._engine.launch(place)
            environment = engine_environment(self._site.environment, place, launch, token)
            return processes.spawn(launch.argv, environment, log_path)

        return await self._machine.run_sync(work), token

    async def _tend(self) -> _Outcome:
        """Watches the process until it ends, must be ended, or a command comes."""
        main = self._record.main
        assert main is not None
        found: list[_Outcome] = []
        with self._interruptible():
            async with trio.open_nursery() as nursery:

                async def watch_end() -> None:
                    code = await processes.wait_ended(self._machine, main)
                    found.append(_Died(code))  # an end that is seen says more than what made us suspicious
                    nursery.cancel_scope.cancel()

                nursery.start_soon(watch_end)
                unwell = await self._prove() if self.life.state is ReplicaState.LOADING else None
                unwell = unwell or await self._watch()
                if unwell.reason == _REFUSED:
                    await self._machine.sleep_until(self._machine.now_s() + CONFIRM_EXIT_S)
                found.append(unwell)
                nursery.cancel_scope.cancel()
        if found:
            return found[0]
        return _Asked()

    # --- loading

    async def _prove(self) -> _Unwell | None:
        """Waits for the readiness path, then for one piece of real work."""
        order = self.order
        until_s = self.life.since_s + order.load_limit_s
        probing = self.life.reason == "probing"
        while not probing:
            look = await self._look(min(READY_LOOK_LIMIT_S, max(WATCH_S_MIN, until_s - self._machine.now_s())))
            if look is Look.GOOD:
                break
            now_s = self._machine.now_s()
            if now_s >= until_s:
                return _Unwell(
                    f"start timed out after {order.load_limit_s:g} s", f"{self._engine.ready_path(order)} did not answer in time"
                )
            await self._machine.sleep_until(min(now_s + READY_POLL_S, until_s))
        self._advance(lifecycle.probing)
        failure = await self._probe(order.progress_limit_s)
        if failure:
            return _Unwell("probe", f"its first probe failed: {failure}")
        self._progress = Progress(self._machine.now_s())
        # On disk before it is told: an agent that ends right after must not come back to an engine that is "loading" again.
        if not self._asked_to_stop():
            await self._save(attrs.evolve(self._record, life=lifecycle.proved(self.life, self._machine.now_s())))
        if self._advance(lifecycle.proved):
            self._tell("replica.ready", f"ready on attempt {self.life.attempt}", Level.INFO)
        return None

    # --- ready

    async def _watch(self) -> _Unwell:
        """Looks at a ready engine until it must be ended."""
        limit_s = self.order.progress_limit_s
        between_s = min(WATCH_S_MAX, max(WATCH_S_MIN, limit_s / WATCHES_PER_LIMIT))
        proofs = 0
        while True:
            look = await self._look(WATCH_LOOK_LIMIT_S)
            if look is Look.REFUSED:
                await self._machine.sleep_until(self._machine.now_s() + REFUSED_AGAIN_S)
                if await self._look(WATCH_LOOK_LIMIT_S) is Look.REFUSED:
                    return self._bench(_REFUSED, "nothing listens on its port any more")
            self._progress = progress.looked(self._progress, look, self._machine.now_s())
            if look is not Look.BUSY:
                self._progress = progress.counted(self._progress, await self._counters(), self._machine.now_s())
            if self.life.in_rotation:
                verdict = progress.judge(self._progress, limit_s, self._machine.now_s())
                if verdict is Verdict.FAILING:
                    seen = self._progress.seen
                    assert seen is not None
                    proofs = 0
                    self._bench("failing", f"{seen.failures} of its last {seen.answers} answers were errors")
                    await self._save()
                elif verdict is Verdict.SUSPECT:
                    began_s = self._machine.now_s()
                    failure = await self._probe(limit_s)
                    if failure and not progress.moved_since(self._progress, began_s):
                        return self._bench("stalled", f"no progress, and a probe failed: {failure}")
                    self._progress = progress.worked(self._progress, self._machine.now_s())
            else:
                failure = await self._probe(limit_s)
                proofs = 0 if failure else proofs + 1
                if proofs >= progress.PROOFS_TO_RETURN:
                    self._progress = progress.pardoned(self._progress, self._machine.now_s())
                    if self._advance(lifecycle.returned):
                        self._tell("replica.returned", f"{proofs} probes in a row succeeded: in rotation again", Level.INFO)
                    await self._save()
                elif failure and self._machine.now_s() - self.life.since_s >= limit_s:
                    return _Unwell(self.life.reason, f"its probes failed for {limit_s:g} s: {failure}")
            await self._machine.sleep_until(self._machine.now_s() + between_s)

    def _bench(self, reason: str, detail: str) -> _Unwell:
        if self._advance(lambda life, now_s: lifecycle.benched(life, reason, now_s)):
            self._tell(f"replica.{reason.split()[-1]}", f"out of rotation: {detail}", Level.WARNING)
        return _Unwell(reason, detail)

    async def _look(self, limit_s: float) -> Look:
        """One look at the readiness path."""
        with trio.move_on_after(limit_s):
            try:
                answer = await ask(self._site.address, self.order.port, "GET", self._engine.ready_path(self.order), key=self._record.key)
            except ConnectRefused:
                return Look.REFUSED
            except LlmgwError:
                return Look.BAD
            return Look.GOOD if answer.good else Look.BAD
        return Look.BUSY

    async def _probe(self, limit_s: float) -> str:
        """One piece of real work; empty when it was done, else what went wrong."""
        request = probe(self.order.kind, self.order.names[0] if self.order.names else self.order.model)
        if request is None:
            look = await self._look(limit_s)
            return "" if look is Look.GOOD else f"{self._engine.ready_path(self.order)} is {look.value}"
        with trio.move_on_after(limit_s):
            try:
                answer = await ask(
                    self._site.address,
                    self.order.port,
                    "POST",
                    request.path,
                    key=self._record.key,
                    body=request.body,
                    content_type=request.content_type,
                )
            except LlmgwError as err:
                return err.message
            return "" if answer.good else f"{request.path} answered {answer.status}: {answer.body[:200].decode('utf-8', 'replace')}"
        return f"{request.path} did not answer within {limit_s:g} s"

    async def _counters(self) -> Counters | None:
        path = self._engine.metrics_path
        if path is None:
            return None
        with trio.move_on_after(WATCH_LOOK_LIMIT_S), contextlib.suppress(LlmgwError):
            answer = await ask(self._site.address, self.order.port, "GET", path, key=self._record.key)
            if answer.good:
                return self._engine.counters(answer.body.decode("utf-8", "replace"))
        return None

    # --- ends

    async def _close_attempt(self, outcome: _Died | _Unwell) -> None:
        """Ends whatever is left of the attempt, and says what comes next."""
        died = isinstance(outcome, _Died)
        reason, detail = (_ending(outcome.exit_code), "") if isinstance(outcome, _Died) else (outcome.reason, outcome.detail)
        if died and self.life.state is ReplicaState.READY:
            self._become(lifecycle.benched(self.life, reason, self._machine.now_s()))  # its children may take a moment to end
        elif not died and self._record.main is not None:
            log.warning("engine is ended", replica=self.id, reason=reason, detail=detail)
        await self._end_tree(0.0 if died else self.order.stop_grace_s)
        if self._asked_to_stop():
            return
        exit_code = outcome.exit_code if isinstance(outcome, _Died) else None
        attempt = self.life.attempt
        self._log_tail = await self._machine.run_sync(lambda: self.logs.tail(attempt))
        if self._asked_to_stop():  # it may have come while the log was read
            return
        last_line = self._log_tail[-1] if self._log_tail else ""
        self._become(lifecycle.ended(self.life, self.order.restart, reason, exit_code, self._machine.now_s(), last_line))
        text = f"{reason}{f' ({detail})' if detail else ''} on attempt {attempt}"
        last = f"; last line: {last_line}" if last_line else ""
        if self.life.state is ReplicaState.FAILED:
            self._tell("replica.failed", f"{text}; all {self.order.restart.attempts} attempts are used up{last}", Level.ERROR)
        else:
            due_s = max(0.0, self.life.start_at_s - self._machine.now_s())
            self._tell("replica.crashed", f"{text}; next start in {due_s:.0f} s{last}", Level.WARNING)
        await self._save()

    async def _restart(self, why: str) -> None:
        """A command asked for it. A stop that comes meanwhile wins."""
        self._restart_why = None
        if self.life.state is ReplicaState.READY:
            self._become(lifecycle.benched(self.life, "restarting", self._machine.now_s()))
        await self._end_tree(self.order.stop_grace_s)
        if self._asked_to_stop():
            return
        self._become(lifecycle.restarted(self.life, why, self._machine.now_s()))
        self._tell("replica.restarting", why, Level.INFO)
        await self._save()

    async def _stop(self) -> None:
        await self._save()  # the wish survives the agent
        await self._end_tree(self._record.grace_s)
        if self.life.state is not ReplicaState.STOPPED:
            self._become(lifecycle.stopped(self.life, self._machine.now_s()))
            self._tell("replica.stopped", self.life.reason or "stopped", Level.INFO)

    async def _end_tree(self, grace_s: float) -> None:
        """Until no process of this start is left and no GPU memory is theirs."""
        record = self._record
        if record.token:
            pids = await processes.end_tree(
                self._machine,
                record.main,
                record.token,
                watched=record.main is not None,
                grace_s=grace_s,
                also=self.members,
                stop_signal=self._engine.stop_signal,
                on_stuck=lambda names: self._tell("replica.stuck", f"processes that KILL does not end: {names}", Level.ERROR),
            )
            if any(device != CPU_DEVICE for device in record.order.devices):
                await self._wait_memory_free(pids)
        self._record = attrs.evolve(self._record, main=None, token="")
        self.memory_mib = 0
        self.members = frozenset()

    async def _wait_memory_free(self, pids: frozenset[int]) -> None:
        until_s = self._machine.now_s() + MEMORY_FREE_LIMIT_S
        while held := pids & await self._site.gpu_pids():
            if self._machine.now_s() >= until_s:
                names = ", ".join(map(str, sorted(held)))
                self._tell("replica.memory_held", f"GPU memory of its ended processes is not freed: {names}", Level.WARNING)
                return
            await self._machine.sleep_until(self._machine.now_s() + MEMORY_LOOK_S)

    async def end_now(self) -> None:
        """Ends it in order without its task, which is cancelled already: the agent itself stops and takes its engines along."""
        if not self.life.over:
            if not self._asked_to_stop():
                self._record = attrs.evolve(self._record, grace_s=self.order.stop_grace_s)
                self._become(lifecycle.stopping(self.life, "the agent stopped with its engines", self._machine.now_s()))
            await self._stop()
            await self._save()

    # --- bits

    def _asked_to_stop(self) -> bool:
        return self.life.want is Want.STOP

    @property
    def _asked(self) -> bool:
        return self._asked_to_stop() or self._restart_why is not None

    def _interruptible(self) -> trio.CancelScope:
        """A scope that a command cancels; cancelled at once when one has come already."""
        scope = trio.CancelScope()
        if self._asked:
            scope.cancel()
        self._scope = scope
        return scope

    def _interrupt(self) -> None:
        if self._scope is not None:
            self._scope.cancel()

    def _advance(self, rule: Callable[[Life, float], Life]) -> bool:
        """What its task has brought about; False, and nothing, where a stop has come while the task waited for that."""
        if self._asked_to_stop():
            return False
        self._become(rule(self.life, self._machine.now_s()))
        return True

    def _become(self, life: Life) -> None:
        self._record = attrs.evolve(self._record, life=life, boot_id=self._site.boot_id)
        self._site.changed(self.report())

    async def _save(self, ahead: Record | None = None) -> None:
        """Writes the newest record, or what it is about to become. A disk that refuses is told and does not stop the engine."""
        async with self._saving:
            record = ahead or self._record
            folder = self._site.folder(record.order.id)

            def work() -> None:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._machine.disk.write(folder / STATE_FILE, adoption.encode(record))

            try:
                await self._machine.run_sync(work)
            except OSError as err:
                log.error("the state of a replica cannot be written: it may not be adopted", replica=self.id, error=words(err))

    def _tell(self, kind: str, text: str, level: Level) -> None:
        self._site.tell(kind, text, f"replica/{self.id}", level)


_REFUSED: Final = "connection refused"


def _ending(exit_code: int | None) -> str:
    """How a process ended, in words."""
    if exit_code is None:
        return "ended with an unknown exit code (adopted)"
    return f"killed by signal {-exit_code}" if exit_code < 0 else f"exited with code {exit_code}"


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address
