"""The role `router`: a data plane by itself, on the static list of its file, or following control planes.

Without control planes the file is the truth and is followed as it changes; with them it is the seed until the first push, and
what was last pushed is kept on disk. Streams are never touched by a reload or by a push.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import ssl
import stat
import sys
import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog
import trio

from llmgw.domain.endpoint import EndpointList, ListStamp
from llmgw.domain.errors import EXIT_OK, LlmgwError
from llmgw.domain.ids import ClusterId, OwnerId
from llmgw.domain.lease import FencingToken
from llmgw.domain.ports import Machine
from llmgw.router.listener import public_tls, serve
from llmgw.router.router import Router
from llmgw.settings.load import Loaded, Role, load_file
from llmgw.settings.schema import Settings
from llmgw.settings.secrets import resolve
from llmgw.wiring.data_dir import claim
from llmgw.wiring.inherited import take_listeners
from llmgw.wiring.logs import configure_logs
from llmgw.wiring.machine import RealMachine
from llmgw.wiring.notify import Notifier, take_notifier
from llmgw.wiring.runs import run_role
from llmgw.wiring.signals import Hangup, wait_for_stop

if TYPE_CHECKING:
    from llmgw.router.follow import Follower

FILE_LOOK_S: Final = 1.0  # chosen: an edit is live within a second or two, and a look is one stat call
LOG_FLUSH_S: Final = 0.1  # how long a line may wait for others; one write for many keeps the cost per request low
LOG_END_S: Final = 1.0  # how long the end of the process waits for a reader of its last lines; it must not hang on one
LOG_BYTES_MAX: Final = 8 * 1024 * 1024  # kept while nobody reads standard output; beyond it lines are dropped and counted
# A static list is its own publisher: there is no cluster, and each reload is one generation on.
STATIC_TOKEN: Final = FencingToken(ClusterId("static"), 1, OwnerId("file"))
log = structlog.get_logger("llmgw.router")


class LogWriter:
    """Writes access-log lines to a descriptor from a thread of its own, in blocks.

    A reader that does not read holds up no request, and not the end of the process either: the thread is a daemon, because a
    write that blocks for ever can be neither cancelled nor waited for.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lines: list[bytes] = []
        self._size = 0
        self._blocks: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._thread: threading.Thread | None = None
        self.dropped = 0

    def write(self, line: bytes) -> None:
        """Takes a line; it is written within LOG_FLUSH_S."""
        if self._size + len(line) > LOG_BYTES_MAX:
            self.dropped += 1
            return
        self._lines.append(line)
        self._size += len(line)

    def _hand_over(self) -> None:
        """Gives the thread what has gathered. One block at a time: while it writes, lines gather here, where they are counted."""
        if not self._lines or not self._idle.is_set():
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_forever, name="access-log", daemon=True)
            self._thread.start()
        self._idle.clear()
        self._blocks.put(b"".join(self._lines))
        self._lines.clear()
        self._size = 0

    def _write_forever(self) -> None:
        while True:
            view = memoryview(self._blocks.get())
            try:
                while view:
                    view = view[os.write(self._descriptor, view) :]
            except OSError:
                self.dropped += bytes(view).count(b"\n")  # a closed output ends the writing, never the router
            self._idle.set()

    async def run(self, machine: Machine) -> None:
        """Until cancelled."""
        while True:
            await machine.sleep_until(machine.now_s() + LOG_FLUSH_S)
            self._hand_over()

    def flush(self) -> None:
        """The last lines, at the end of the process; waits at most LOG_END_S for the reader."""
        for _ in range(2):  # what is being written, then what has gathered meanwhile
            if not self._idle.wait(LOG_END_S):
                return
            self._hand_over()
        self._idle.wait(LOG_END_S)


def router_main(path: Path) -> int:
    """Runs a router on the file at `path` until it is told to end. Raises LlmgwError when it cannot start."""
    loaded = load_file(path, role=Role.ROUTER)
    configure_logs(loaded.settings.log)
    writer = LogWriter(sys.stdout.fileno())
    try:
        inherited = take_listeners(os.environ)
        run_role(_main, path, loaded, writer, take_notifier(os.environ), inherited)
    finally:
        writer.flush()
    return EXIT_OK


async def _main(path: Path, loaded: Loaded, writer: LogWriter, notifier: Notifier, inherited: tuple[socket.socket, ...]) -> None:
    await run_router(RealMachine(), path, loaded, writer, notifier=notifier, inherited=inherited)


def make_router(machine: Machine, loaded: Loaded, writer: LogWriter) -> Router:
    """A router that obeys the policy of a file; endpoints are still to be set. Raises Invalid for a metrics token that cannot be read."""
    token = resolve(loaded.settings.metrics.token, "metrics.token")
    return Router(machine, loaded.policy, writer.write, report=log.error, metrics_token=token)


async def run_router(
    machine: Machine,
    path: Path,
    loaded: Loaded,
    writer: LogWriter,
    *,
    notifier: Notifier = Notifier(),  # noqa: B008 - it holds no state
    inherited: tuple[socket.socket, ...] = (),
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serves until the first SIGTERM or SIGINT, then lets answers finish for `route.drain_s`; a second signal ends at once.

    SIGHUP and a change of the file reload it. `inherited` sockets are used in place of `router.listen`. Reports the address it
    listens on. Raises LlmgwError (in a group).
    """
    settings = loaded.settings
    tls = router_tls(settings)
    router = make_router(machine, loaded, writer)
    stop = trio.Event()
    with ExitStack() as held:
        follower = None
        if settings.router.control_planes:
            from llmgw.wiring.following import keep_following, load_follower, router_folder

            held.enter_context(claim(router_folder(settings)))
            follower = await load_follower(machine, router, settings)
            router.following, router.wake = follower.following, follower.wake
        file = FileFollower(machine, router, path, loaded, notifier, follower)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.run, machine)
            await nursery.start(wait_for_stop, stop.set, Hangup.ELSEWHERE)
            await nursery.start(file.run)
            if follower is not None:
                await nursery.start(keep_following, machine, follower)
            address = await nursery.start(partial(serve, router, settings.router.listen, tls, inherited=inherited))
            nursery.start_soon(notifier.beat, machine)
            notifier.ready()
            if inherited:
                log.info("the listening sockets were handed over; router.listen has no effect")
            log.info("listening", address=address, endpoints=len(router.states()), pid=os.getpid())
            task_status.started(address)
            await stop.wait()
            notifier.stopping()
            await router.drain(machine.now_s() + router.policy.route.drain_s)
            nursery.cancel_scope.cancel()


def router_tls(settings: Settings) -> ssl.SSLContext | None:
    """The public port's TLS: its own certificate, else this machine's, else none. Raises Invalid for unusable files."""
    if settings.router.tls_certificate:
        return public_tls(settings.router.tls_certificate, settings.router.tls_key)
    return public_tls(settings.tls.certificate, settings.tls.key) if settings.tls.certificate else None


class FileFollower:
    """Keeps a router on what its file says: all of it, or with a `follower` whatever nobody has pushed yet.

    A file that does not load changes nothing.
    """

    def __init__(
        self, machine: Machine, router: Router, path: Path, loaded: Loaded, notifier: Notifier, follower: Follower | None = None
    ) -> None:
        self._machine = machine
        self._notifier = notifier
        self._router = router
        self._follower = follower
        self._path = path
        self._sha256 = loaded.sha256
        self._listen = loaded.settings.router.listen
        self._generation = 0
        self._seen = _state_of(path)
        self._apply(loaded)

    def _apply(self, loaded: Loaded) -> None:
        if self._follower is not None:
            self._seed(loaded, self._follower)
            return
        self._generation += 1
        self._router.set_policy(loaded.policy)
        self._router.set_endpoints(EndpointList(loaded.endpoints), ListStamp(STATIC_TOKEN, self._generation))

    def _seed(self, loaded: Loaded, follower: Follower) -> None:
        pushed = follower.pushed
        if pushed.policy is None:
            self._router.set_policy(loaded.policy)
        if pushed.stamp is None:
            if loaded.endpoints:
                self._router.seed(EndpointList(loaded.endpoints))
            else:
                self._router.waiting = True
        if pushed.policy is not None or pushed.stamp is not None:
            given = [table for table, there in (("[[endpoint]]", loaded.endpoints), ("[[auth.key]]", loaded.keys)) if there]
            if given:
                log.info("the file is a seed only; what control planes have pushed is in force", not_in_force=given)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Looks at the file every second, and at once when SIGHUP comes."""
        with trio.open_signal_receiver(signal.SIGHUP) as hangups:
            task_status.started()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch)
                async for _ in hangups:
                    log.info("reloading", file=str(self._path), why="SIGHUP")
                    self._notifier.reloading()
                    await self._reload(asked=True)
                    self._notifier.ready()

    async def _watch(self) -> None:
        while True:
            await self._machine.sleep_until(self._machine.now_s() + FILE_LOOK_S)
            seen = _state_of(self._path)
            if seen == self._seen:
                continue
            settled = seen  # an editor may still be writing: a change counts once it has stood for one more look
            await self._machine.sleep_until(self._machine.now_s() + FILE_LOOK_S / 4)
            if _state_of(self._path) == settled:
                self._seen = settled
                await self._reload(asked=False)

    async def _reload(self, *, asked: bool) -> None:
        self._seen = _state_of(self._path)
        try:
            loaded = await self._machine.run_sync(lambda: load_file(self._path, role=Role.ROUTER))
        except LlmgwError as err:
            log.error("the file does not load; all stays as it was", file=str(self._path), reason=err.message)
            return
        if loaded.sha256 == self._sha256 and not asked:
            return
        self._sha256 = loaded.sha256
        for warning in loaded.warnings:
            log.warning(warning)
        if loaded.settings.router.listen != self._listen:
            log.warning("router.listen takes effect at the next start", listen=loaded.settings.router.listen)
        self._apply(loaded)
        log.info("reloaded", file=str(self._path), endpoints=len(loaded.endpoints), keys=len(loaded.keys))


def _state_of(path: Path) -> tuple[int, int, int, int] | None:
    """What changes when a file is written, replaced, or its link turned; None when it is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
