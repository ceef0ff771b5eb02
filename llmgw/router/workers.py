"""The parent of a router's workers: starts them, starts them anew when they die, and stands for all of them to whoever feeds a router.

It takes endpoints, catalog and policy as one router would and hands them to each worker; what it says back is true of all: a list
is acted on once every worker acts on it, use and metrics are sums. It opens the listening sockets and keeps them, so that clients of
a worker that died wait for the next; it never reads a client's byte. A worker is the same program in a process of its own, started
anew rather than forked: an epoll, a thread or a lock that two processes share goes wrong in ways of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import attrs
import structlog
import trio

from llmgw.domain.endpoint import Endpoint, EndpointList, EndpointUse, ListStamp
from llmgw.domain.errors import Broken, Unavailable
from llmgw.domain.ids import EndpointId
from llmgw.domain.model import Catalog
from llmgw.domain.policy import Policy
from llmgw.domain.ports import Machine, Wake
from llmgw.protocol.codec import unstructure
from llmgw.router.cells import SLOTS_MAX, Cells
from llmgw.router.listener import close_own, open_beside, open_shared, shown
from llmgw.router.metrics import Following, accounted, followed, staffed
from llmgw.router.metrics_sum import for_endpoints, outliving, plain, summed, text_of
from llmgw.router.slots import NO_SLOT, Slots
from llmgw.router.usage_book import UsageBook
from llmgw.router.worker_messages import (
    Acting,
    AllFigures,
    AskAllFigures,
    Begin,
    Family,
    Figures,
    FromWorker,
    Report,
    Serve,
    Stop,
    TakeCatalog,
    TakeEndpoints,
    TakePolicy,
    TellFigures,
    ToWorker,
    Value,
    encode,
    from_worker,
)
from llmgw.router.worker_messages import Wake as WakeWord
from llmgw.router.worker_pipe import Pipe, PipeEnded

log = structlog.get_logger("llmgw.router.workers")

RESTART_S: Final = (0.0, 1.0, 2.0, 4.0, 8.0)  # after the first death, the second in a row, and so on; the last for all that follow
STEADY_S: Final = 60.0  # who lived for so long starts the row anew
FIRST_STARTS_MAX: Final = 3  # where no worker has ever served: then it is no accident, and the router does not start
START_LIMIT_S: Final = 60.0  # from the start of the process until it acts on all that it was given
FIGURES_LIMIT_S: Final = 1.0  # for a worker's counts; one that is later is shown as it last was
TAKE_LIMIT_S: Final = 5.0  # for all workers to act on a file that was read anew
LOOK_S: Final = 1.0
SILENT_LOOKS_MAX: Final = 30  # looks in a row without a word of a worker: it hangs. Looks, not seconds: a suspended machine is no hang
STOP_GRACE_S: Final = 5.0  # beyond the deadline, for the last log lines
GONE_LIMIT_S: Final = 5.0  # for the end of a process whose pipe has ended
HELD_BACK: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # from a worker, until it ignores them: they are the parent's


def restart_delay_s(deaths: int) -> float:
    """How long a worker waits that has died so often in a row."""
    return RESTART_S[min(deaths, len(RESTART_S)) - 1] if deaths else 0.0


@attrs.frozen
class WorkerSettings:
    """What a worker is told of its machine's own settings."""

    tls_certificate: str = ""
    tls_key: str = ""
    metrics_token: str = attrs.field(default="", repr=False)
    log_level: str = "info"
    log_format: str = "auto"


@attrs.define(eq=False)
class _Worker:
    """One process, from its start to its end. `newest` are the values that it has not been sent yet, the newest of each kind."""

    number: int
    process: subprocess.Popen[bytes]
    pipe: Pipe
    newest: dict[type, Value]
    words: deque[ToWorker] = attrs.Factory(deque)
    news: trio.Event = attrs.Factory(trio.Event)
    first: int = 0  # it serves once it acts on this one
    reached: int = 0
    serves: bool = False
    silent_looks: int = 0
    use: Mapping[EndpointId, EndpointUse] = attrs.Factory(dict)
    used_at_s: float = 0.0
    families: list[Family] = attrs.Factory(list)
    figures_ask: int = 0

    def say(self, word: ToWorker) -> None:
        self.words.append(word)
        self.news.set()

    def take(self, value: Value) -> None:
        self.newest[type(value)] = value
        self.news.set()


class Workers:
    """`count` of them. Feed it as a router (`set_endpoints`, `seed`, `waiting`, `set_catalog`, `set_policy`), and keep `run` running.

    `command` makes the command line of a worker from the number of the descriptor that it finds its pipe at. `inherited` are
    listening sockets that all of them share, in place of `listen`. `told` is called when something that was given is in force;
    `following` and `wake` are what a router has under these names.
    """

    def __init__(
        self,
        machine: Machine,
        policy: Policy,
        settings: WorkerSettings,
        *,
        count: int,
        command: Callable[[int], Sequence[str]],
        listen: str,
        inherited: Sequence[socket.socket] = (),
    ) -> None:
        self._machine = machine
        self._settings = settings
        self._count = count
        self._command = command
        self._listen = listen
        self._inherited = tuple(inherited)
        self.policy = policy
        self.following: Callable[[], Following] | None = None
        self.wake: Wake = _nobody_wakes
        self.book: UsageBook | None = None  # set where there is a control plane to account to
        self.told: Callable[[], None] = _nobody_asks
        self._cells = Cells.create(count)
        self._slots = Slots(SLOTS_MAX)
        self._number = 0  # of the last value given
        self._listed_by = 0  # that of the last list
        self._endpoints = EndpointList()
        self._stamp: ListStamp | None = None
        self._waiting = False
        self._values: dict[type, Value] = {}
        self._workers: dict[int, _Worker] = {}
        self._listeners: list[list[socket.socket]] = []
        self._ever_served = False
        self._not_up = set(range(count))  # have neither served nor died yet
        self._up = trio.Event()
        self._all_gone = trio.Event()
        self._stopping = trio.Event()
        self._restarts = 0
        self._past_use: dict[EndpointId, tuple[EndpointUse, float]] = {}  # what workers that died had seen, and when
        self._past_families: list[Family] = []
        self._merged: tuple[dict[EndpointId, EndpointUse], float] | None = None  # what all reports say together, and when that was so
        self._asked: list[tuple[_Worker, int]] = []
        self._ask_news = trio.Event()
        self._ask = 0
        self._figures_news = trio.Event()
        self._taken_news = trio.Event()
        self.set_policy(policy)

    # --- what is given

    @property
    def waiting(self) -> bool:
        """Has nobody named any endpoint yet? Until then every call of /v1 is told so."""
        return self._waiting

    @waiting.setter
    def waiting(self, waits: bool) -> None:
        assert waits, "a list ends the wait"
        self._waiting = True
        self._give(TakeEndpoints(self._next(), None, None, []))

    def set_endpoints(self, endpoints: EndpointList, stamp: ListStamp) -> None:
        """On its way to every worker at the return; `settled` says when all act on it. The caller has judged the stamp."""
        self._stamp = stamp
        self._list(endpoints, stamp)

    def seed(self, endpoints: EndpointList) -> None:
        """A list that nobody has pushed, to serve by until somebody does."""
        self._list(endpoints, None)

    def _list(self, endpoints: EndpointList, stamp: ListStamp | None) -> None:
        self._waiting = False
        self._endpoints = endpoints
        self._let_slots_go()
        slots = [self._slots.of(_address(endpoint)) for endpoint in endpoints.endpoints]
        self._listed_by = self._next()
        told = None if stamp is None else unstructure(stamp)
        self._give(TakeEndpoints(self._listed_by, unstructure(endpoints), told, slots))

    def set_catalog(self, catalog: Catalog) -> None:
        self._give(TakeCatalog(self._next(), unstructure(catalog)))

    def set_policy(self, policy: Policy) -> None:
        self.policy = policy
        self._let_slots_go()
        slots = {key.name: self._slots.of(key.name) for key in policy.keys if key.max_parallel}
        shared = {name: slot for name, slot in slots.items() if slot != NO_SLOT}
        self._give(TakePolicy(self._next(), unstructure(policy), shared))

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _give(self, value: Value) -> None:
        self._values[type(value)] = value
        for worker in self._workers.values():
            worker.take(value)

    def _let_slots_go(self) -> None:
        """Only while all act on what they were given last: a worker on an older list may still send requests where nobody counts."""
        if all(worker.reached == self._number for worker in self._workers.values()):
            wanted = {_address(endpoint) for endpoint in self._endpoints.endpoints} | {key.name for key in self.policy.keys}
            self._slots.let_go(wanted, lambda slot: self._cells.total(slot) == 0)

    # --- what goes back

    @property
    def listed(self) -> int:
        """Endpoints of the list that was given last."""
        return len(self._endpoints.endpoints)

    async def wait_taken(self) -> None:
        """Until every worker that takes connections acts on all that was given up to now; one that hangs is not waited for."""
        number = self._number
        with trio.move_on_after(TAKE_LIMIT_S):
            while any(worker.reached < number for worker in self._serving()):
                await self._taken_news.wait()

    def settled(self) -> bool:
        """Does every worker that takes connections act on the last list? One that starts will before it takes any."""
        return all(worker.reached >= self._listed_by for worker in self._serving())

    def acknowledged(self) -> int:
        """The generation of the last list once all act on it, 0 before."""
        return self._stamp.generation if self._stamp is not None and self.settled() else 0

    def use(self) -> Mapping[EndpointId, EndpointUse]:
        """Over all workers. Requests in flight are as they are now, the rest as it was a second ago at most."""
        now_s = self._machine.now_s()
        if self._merged is None:
            self._merged = self._merge(now_s), now_s
        merged, at_s = self._merged
        found = {known: _aged(use, now_s - at_s) for known, use in merged.items()}
        for known, running in self._running().items():
            seen = found.get(known)
            if seen is not None:
                found[known] = attrs.evolve(seen, in_flight=running)
            elif running:
                found[known] = EndpointUse(running)
        listed = {endpoint.id for endpoint in self._endpoints.endpoints}
        return MappingProxyType({known: use for known, use in found.items() if known in listed or use.in_flight})

    def _merge(self, now_s: float) -> dict[EndpointId, EndpointUse]:
        found = {known: _aged(use, now_s - at_s) for known, (use, at_s) in self._past_use.items()}
        for worker in self._workers.values():
            for known, use in worker.use.items():
                aged = _aged(use, now_s - worker.used_at_s)
                before = found.get(known)
                found[known] = aged if before is None else before.beside(aged)
        return found

    def _running(self) -> dict[EndpointId, int]:
        """Requests in flight by endpoint, at all of its addresses."""
        found: dict[EndpointId, int] = {}
        for name, slot in self._slots.taken.items():
            if isinstance(name, tuple):
                found[name[0]] = found.get(name[0], 0) + self._cells.total(slot)
        return found

    def _serving(self) -> list[_Worker]:
        return [worker for worker in self._workers.values() if worker.serves]

    # --- the processes

    async def run(self, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
        """Until all have ended after `drain`, or until it is cancelled: then they are killed. Reports the address they listen on.

        Raises Invalid for an address that is none, Conflict when it is taken, Unavailable when it cannot be opened or when no
        worker starts.
        """
        if self._inherited:
            self._listeners = [list(self._inherited) for _ in range(self._count)]
        else:
            self._listeners = open_shared(self._listen, self._count)
        try:
            async with trio.open_nursery() as nursery:
                for number in range(self._count):
                    nursery.start_soon(self._keep, number)
                nursery.start_soon(self._watch)
                nursery.start_soon(self._answer_for_all)
                await self._up.wait()
                task_status.started(shown(self._listeners[0][0]))
                await self._all_gone.wait()
                nursery.cancel_scope.cancel()
        finally:
            self.kill()
            self._close_listeners()

    async def drain(self, deadline_s: float) -> None:
        """No new connections from here on; answers may finish until `deadline_s` (on the machine's clock). Returns when all have ended."""
        self._stopping.set()
        self._close_listeners()
        for worker in self._workers.values():
            worker.say(Stop(max(deadline_s - self._machine.now_s(), 0.0)))
        if not self._workers:
            self._all_gone.set()
        with trio.move_on_after(max(deadline_s - self._machine.now_s(), 0.0) + STOP_GRACE_S):
            await self._all_gone.wait()
        self._all_gone.set()

    def kill(self) -> None:
        """Every worker, at once and without a word. Blocks until they are gone, which takes milliseconds."""
        for worker in self._workers.values():
            worker.process.kill()
        for worker in self._workers.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(GONE_LIMIT_S)

    async def _keep(self, number: int) -> None:
        """One worker after another."""
        deaths = 0
        while not self._stopping.is_set():
            delay_s = restart_delay_s(deaths)
            if delay_s:
                await self._pause(number, delay_s)
                if self._stopping.is_set():
                    return
            began_s = self._machine.now_s()
            pid, how = await self._live(number)
            if self._stopping.is_set():
                return
            deaths = deaths + 1 if self._machine.now_s() - began_s < STEADY_S else 1
            self._restarts += 1
            log.error("a worker died and is started again", worker=number, pid=pid, how=how, again_in_s=restart_delay_s(deaths))
            if not self._ever_served and deaths >= FIRST_STARTS_MAX:
                raise Unavailable(f"the workers do not start: worker {number} ended {deaths} times before it served ({how})")
            self._is_up(number)

    async def _pause(self, number: int, delay_s: float) -> None:
        """Clients do not wait for a worker that dies again and again: meanwhile its share of them goes to the others."""
        apart = not self._inherited and self._listeners[number][0].family != socket.AF_UNIX  # its own sockets, not those of all
        if apart and any(sockets for other, sockets in enumerate(self._listeners) if other != number):
            for sock in self._listeners[number]:
                sock.close()
            self._listeners[number] = []
        await self._machine.sleep_until(self._machine.now_s() + delay_s)
        if self._stopping.is_set() or self._listeners[number]:
            return
        others = next(sockets for sockets in self._listeners if sockets)  # whoever is the last to be open stays open
        try:
            self._listeners[number] = [open_beside(sock) for sock in others]
        except OSError as err:
            raise Unavailable(f"cannot listen beside the other workers: {err.strerror or err}") from err

    async def _live(self, number: int) -> tuple[int, str]:
        """One worker's life; returns who it was, and how it ended."""
        try:
            worker = self._start(number)
        except OSError as err:
            return 0, f"it could not be started: {err.strerror or err}"
        await self._attend(worker)
        return worker.process.pid, _how(worker.process.returncode)

    def _start(self, number: int) -> _Worker:
        """Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        listeners = self._listeners[number]
        # What stops or reloads a router goes to its whole group from a terminal, and from some supervisors: it is for the parent alone.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
        try:
            process = subprocess.Popen(
                self._command(theirs.fileno()),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), self._cells.descriptor, *(sock.fileno() for sock in listeners)),
            )
        except OSError:
            ours.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        worker = _Worker(number, process, Pipe(ours), dict(self._values), first=self._number)
        settings = self._settings
        worker.say(
            Begin(
                number,
                self._count,
                self._cells.descriptor,
                tuple(sock.fileno() for sock in listeners),
                settings.tls_certificate,
                settings.tls_key,
                settings.metrics_token,
                settings.log_level,
                settings.log_format,
            )
        )
        self._workers[number] = worker
        return worker

    async def _attend(self, worker: _Worker) -> None:
        """Returns when its process has ended."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send, worker)
                nursery.start_soon(self._limit_start, worker)
                await self._receive(worker)
                nursery.cancel_scope.cancel()
            await wait_gone(worker.process)
            self._bury(worker)
        finally:
            worker.pipe.close()

    async def _limit_start(self, worker: _Worker) -> None:
        await self._machine.sleep_until(self._machine.now_s() + START_LIMIT_S)
        if not worker.serves:
            log.error("a worker does not come to serve and is ended", worker=worker.number, pid=worker.process.pid, limit_s=START_LIMIT_S)
            worker.process.kill()

    async def _send(self, worker: _Worker) -> None:
        with contextlib.suppress(PipeEnded):  # the receiving side sees the end, and what was said before it
            while True:
                await worker.news.wait()
                worker.news = trio.Event()
                while worker.words or worker.newest:
                    if worker.words:
                        message: ToWorker = worker.words.popleft()
                    else:  # in the order in which they were given, so that `Acting` holds for all before
                        message = worker.newest.pop(min(worker.newest, key=lambda kind: worker.newest[kind].number))
                    await worker.pipe.send(encode(message))

    async def _receive(self, worker: _Worker) -> None:
        try:
            while True:
                message = from_worker(await worker.pipe.receive())
                worker.silent_looks = 0
                self._hear(worker, message)
        except PipeEnded:
            return
        except Broken as err:  # it is of another build, installed since we started
            log.error("a worker is not understood and is ended", worker=worker.number, pid=worker.process.pid, why=err.message)
            worker.process.kill()

    def _hear(self, worker: _Worker, message: FromWorker) -> None:
        match message:
            case Acting(number):
                worker.reached = number
                if not worker.serves and number >= worker.first:
                    self._let_serve(worker)
                self._tell()
            case Report(use, families, usage):
                if self.book is not None:
                    self.book.add_rows(usage)
                worker.use, worker.used_at_s = {EndpointId(known): one for known, one in use.items()}, self._machine.now_s()
                self._merged = None
                if families is not None:
                    worker.families = families
            case Figures(ask, families):
                worker.families, worker.figures_ask = families, ask
                self._figures_news.set()
                self._figures_news = trio.Event()
            case AskAllFigures(ask):
                self._asked.append((worker, ask))
                self._ask_news.set()
            case WakeWord(model):
                self.wake(model)

    def _tell(self) -> None:
        self._taken_news.set()
        self._taken_news = trio.Event()
        self.told()

    def _let_serve(self, worker: _Worker) -> None:
        worker.serves = True  # before it is told: from here on nothing is settled without it
        worker.say(Serve())
        self._ever_served = True
        log.info("a worker serves", worker=worker.number, pid=worker.process.pid)
        self._is_up(worker.number)

    def _is_up(self, number: int) -> None:
        self._not_up.discard(number)
        if not self._not_up and self._ever_served:
            self._up.set()

    def _bury(self, worker: _Worker) -> None:
        """It counts nothing any more; what it had counted for good stays."""
        del self._workers[worker.number]
        self._merged = None
        self._cells.clear(worker.number, self._slots.taken.values())
        now_s = self._machine.now_s()
        for known, use in worker.use.items():
            over = attrs.evolve(_aged(use, now_s - worker.used_at_s), in_flight=0, silent_s=0.0, refused=False, unanswered=0)
            before = self._past_use.get(known)
            past = over if before is None else over.beside(_aged(before[0], now_s - before[1]))
            self._past_use[known] = (attrs.evolve(past, answers=0, failures=0), now_s)
        listed = {endpoint.id for endpoint in self._endpoints.endpoints}
        for known in self._past_use.keys() - listed:
            del self._past_use[known]
        self._past_families = for_endpoints(summed([self._past_families, outliving(worker.families)]), listed)
        self._figures_news.set()
        self._figures_news = trio.Event()
        self._tell()
        if self._stopping.is_set() and not self._workers:
            self._all_gone.set()

    async def _watch(self) -> None:
        """Ends a worker that hangs; a death is then a death like any other."""
        while True:
            await self._machine.sleep_until(self._machine.now_s() + LOOK_S)
            for worker in self._serving():
                worker.silent_looks += 1
                if worker.silent_looks > SILENT_LOOKS_MAX:
                    log.error(
                        "a worker hangs and is ended", worker=worker.number, pid=worker.process.pid, silent_s=SILENT_LOOKS_MAX * LOOK_S
                    )
                    worker.process.kill()

    def _close_listeners(self) -> None:
        for sock in {sock for sockets in self._listeners for sock in sockets}:
            sock.close() if self._inherited else close_own(sock)
        self._listeners = [[] for _ in range(self._count)]

    # --- /metrics

    async def _answer_for_all(self) -> None:
        """Whoever asks while others are answered is answered by the next sum, so that it holds whatever was counted before."""
        while True:
            await self._ask_news.wait()
            self._ask_news = trio.Event()
            asked, self._asked = self._asked, []
            text = await self.figures()
            for worker, ask in asked:
                worker.say(AllFigures(ask, text))

    async def figures(self) -> bytes:
        """The text of /metrics over all workers. One that says nothing for FIGURES_LIMIT_S is shown as it last was."""
        self._ask += 1
        for worker in self._serving():
            worker.say(TellFigures(self._ask))
        with trio.move_on_after(FIGURES_LIMIT_S):
            while any(worker.figures_ask < self._ask for worker in self._serving()):
                await self._figures_news.wait()
        serving = self._serving()
        families = summed([*(worker.families for worker in serving), self._past_families])
        families += plain(staffed(len(serving), self._restarts))
        if self.following is not None:
            families += plain(followed(self.following()))
        if self.book is not None:
            families += plain(accounted(self.book.lost))
        return text_of(families)


async def wait_gone(process: subprocess.Popen[bytes]) -> None:
    """Until it has ended. Its pipe has ended already: who lingers on is killed."""
    if process.returncode is not None:  # a signal that was to be sent has found it dead, and has waited for it
        return
    descriptor = os.pidfd_open(process.pid)
    try:
        with trio.move_on_after(GONE_LIMIT_S):
            await trio.lowlevel.wait_readable(descriptor)
        process.kill()
        await trio.lowlevel.wait_readable(descriptor)
    finally:
        os.close(descriptor)
    process.wait()


def _how(code: int) -> str:
    """How a process ended, for people."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


def _aged(use: EndpointUse, by_s: float) -> EndpointUse:
    """As it is so much later, when nothing more was said. That an engine is silent is not concluded from a worker that is."""
    return attrs.evolve(use, last_used_s=use.last_used_s + by_s, heard_s=None if use.heard_s is None else use.heard_s + by_s)


def _address(endpoint: Endpoint) -> tuple[EndpointId, str, str]:
    """What a router keeps one state for: what runs at an old address is no load of the new one."""
    return endpoint.id, endpoint.url, endpoint.key


def _nobody_wakes(model: str) -> None:
    """A router on a static list has nobody to tell."""


def _nobody_asks() -> None:
    """On a static list nobody waits for an acknowledgement."""
