"""The role `router`: a data plane by itself, on the static list of its file, or following control planes.

Without control planes the file is the truth and is followed as it changes; with them it is the seed until the first push, and
what was last pushed is kept on disk. Streams are never touched by a reload or by a push.
"""

from __future__ import annotations

import os
import signal
import socket
import ssl
import stat
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import structlog
import trio

from llmgw.domain.endpoint import EndpointList, ListStamp
from llmgw.domain.errors import EXIT_OK, Invalid, LlmgwError
from llmgw.domain.ids import ClusterId, OwnerId
from llmgw.domain.lease import FencingToken
from llmgw.domain.policy import Policy
from llmgw.domain.ports import Machine
from llmgw.router.listener import public_tls, serve
from llmgw.router.router import Router
from llmgw.router.workers import Workers, WorkerSettings
from llmgw.settings.address import parse_listen
from llmgw.settings.load import HALF_WRITTEN, Loaded, Role, load_file
from llmgw.settings.schema import Settings
from llmgw.settings.secrets import resolve
from llmgw.wiring.access_log_writer import LogWriter
from llmgw.wiring.data_dir import claim
from llmgw.wiring.inherited import take_listeners
from llmgw.wiring.logs import configure_logs
from llmgw.wiring.machine import RealMachine
from llmgw.wiring.memory import keep_freed_memory
from llmgw.wiring.notify import Notifier, take_notifier
from llmgw.wiring.public_port import keep_fresh
from llmgw.wiring.runs import allow_descriptors, clients_max, run_role
from llmgw.wiring.signals import Hangup, wait_for_stop
from llmgw.wiring.worker import worker_command

if TYPE_CHECKING:
    from llmgw.router.follow import Follower

IDENTITY_FOLDER: Final = "identity"  # as `wiring.identity_files` has it, which a router on a static list does not load
CERTIFICATE: Final = "certificate.pem"
KEY: Final = "key.pem"
FILE_LOOK_S: Final = 1.0  # chosen: an edit is live within a second or two, and a look is one stat call
# A static list is its own publisher: there is no cluster, and each reload is one generation on.
STATIC_TOKEN: Final = FencingToken(ClusterId("static"), 1, OwnerId("file"))
log = structlog.get_logger("llmgw.router")


def router_main(path: Path) -> int:
    """Runs a router on the file at `path` until it is told to end. Raises LlmgwError when it cannot start."""
    loaded = load_file(path, role=Role.ROUTER)
    configure_logs(loaded.settings.log)
    allow_descriptors()
    keep_freed_memory()
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
    return Router(
        machine,
        loaded.policy,
        writer.write,
        report=log.error,
        metrics_token=token,
        log_dropped=lambda: writer.dropped,
        clients_max=clients_max(),
    )


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

    SIGHUP and a change of the file reload it. `inherited` sockets are used in place of `router.listen`. With `router.workers` above
    1 this process is their parent and serves nobody itself. Reports the address it listens on. Raises LlmgwError (in a group).
    """
    settings = loaded.settings
    plane: Router | Workers
    tls = None
    if settings.router.workers > 1:
        plane = workers = make_workers(machine, loaded, inherited)
        serving, last_act, wait_taken = workers.run, workers.kill, workers.wait_taken
    else:
        plane = make_router(machine, loaded, writer)
        tls = router_tls(settings)
        serving = partial(serve, plane, settings.router.listen, tls, inherited=inherited)
        last_act, wait_taken = _nothing, _taken_at_once
    stop = trio.Event()
    with ExitStack() as held:
        follower = usage = None
        if settings.router.control_planes:
            from llmgw.wiring.following import keep_following, load_follower, load_usage, router_folder

            held.enter_context(claim(router_folder(settings)))
            follower = await load_follower(machine, plane, settings)
            usage = await load_usage(machine, follower, settings)
            plane.following, plane.wake, plane.book = follower.following, follower.wake, usage.book
            if isinstance(plane, Workers):
                plane.told = follower.look_again
        file = FileFollower(machine, plane, path, loaded, notifier, follower, wait_taken)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.run, machine)
            await nursery.start(wait_for_stop, stop.set, Hangup.ELSEWHERE, last_act)
            await nursery.start(file.run)
            if tls is not None and (files := public_certificate(settings)) is not None:
                nursery.start_soon(keep_fresh, machine, tls, *files)
            if follower is not None and usage is not None:
                await nursery.start(keep_following, machine, follower, usage, settings)
            address = await nursery.start(serving)
            nursery.start_soon(notifier.beat, machine)
            notifier.ready()
            if inherited:
                log.info("the listening sockets were handed over; router.listen has no effect")
            log.info("listening", address=address, endpoints=plane.listed, workers=settings.router.workers, pid=os.getpid())
            task_status.started(address)
            await stop.wait()
            notifier.stopping()
            await plane.drain(machine.now_s() + plane.policy.route.drain_s)
            if usage is not None:
                await usage.close()
            nursery.cancel_scope.cancel()


def make_workers(machine: Machine, loaded: Loaded, inherited: Sequence[socket.socket]) -> Workers:
    """What starts and feeds the workers of a file. Raises Invalid for what no worker could start with."""
    settings = loaded.settings
    router_tls(settings)  # told here, once, and not by each worker
    certificate, key = public_certificate(settings) or ("", "")
    given = WorkerSettings(
        tls_certificate=certificate,
        tls_key=key,
        metrics_token=resolve(settings.metrics.token, "metrics.token"),
        log_level=settings.log.level,
        log_format=settings.log.format,
    )
    count = settings.router.workers
    return Workers(machine, loaded.policy, given, count=count, command=worker_command, listen=settings.router.listen, inherited=inherited)


def router_tls(settings: Settings) -> ssl.SSLContext | None:
    """The public port's TLS, None for plain HTTP. Raises Invalid for unusable files, and as `public_certificate` does."""
    files = public_certificate(settings)
    return None if files is None else public_tls(*files)


def public_certificate(settings: Settings) -> tuple[str, str] | None:
    """The files of certificate and key that the public port shows: its own, else this machine's, else what it joined by where plain
    HTTP may not be spoken; else None. Raises Invalid where there is none, and other machines would speak plain HTTP to it."""
    router, tls = settings.router, settings.tls
    if router.tls_certificate:
        return router.tls_certificate, router.tls_key
    if tls.certificate:
        return tls.certificate, tls.key
    if not tls.secures(loopback=parse_listen(router.listen).loopback):
        return None
    folder = Path(router.data_dir).expanduser().absolute() / IDENTITY_FOLDER
    files = folder / CERTIFICATE, folder / KEY
    if all(file.exists() for file in files):
        return str(files[0]), str(files[1])
    raise Invalid(
        f"router.listen is {router.listen}, and there is no certificate for it: requests, answers and clients' keys could be read on their "
        'way; set router.tls_certificate and router.tls_key, or say [tls] plain = "anywhere" where something before it speaks TLS',
        param="router.listen",
        code="no_certificate",
    )


class Fed(Protocol):
    """What is kept on a file: a router, or several workers as one."""

    waiting: bool

    def set_policy(self, policy: Policy) -> None: ...
    def set_endpoints(self, endpoints: EndpointList, stamp: ListStamp) -> None: ...
    def seed(self, endpoints: EndpointList) -> None: ...


def _nothing() -> None:
    """One process takes along what it has."""


async def _taken_at_once() -> None:
    """One process acts on what it was given when the call returns."""


class FileFollower:
    """Keeps a router on what its file says: all of it, or with a `follower` whatever nobody has pushed yet.

    A file that does not load changes nothing.
    """

    def __init__(
        self,
        machine: Machine,
        router: Fed,
        path: Path,
        loaded: Loaded,
        notifier: Notifier,
        follower: Follower | None,
        wait_taken: Callable[[], Awaitable[None]],
    ) -> None:
        self._machine = machine
        self._notifier = notifier
        self._router = router
        self._follower = follower
        self._wait_taken = wait_taken
        self._path = path
        self._taken = loaded
        self._first = loaded.settings.router
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
            if loaded.sets_nothing and not self._taken.sets_nothing:
                raise Invalid(HALF_WRITTEN)
        except LlmgwError as err:
            log.error("the file does not load; all stays as it was", file=str(self._path), reason=err.message)
            return
        if loaded.sha256 == self._taken.sha256 and not asked:
            return
        self._taken = loaded
        for warning in loaded.warnings:
            log.warning(warning)
        now = loaded.settings.router
        if now.listen != self._first.listen:
            log.warning("router.listen takes effect at the next start", listen=now.listen)
        if now.workers != self._first.workers:
            log.warning("router.workers takes effect at the next start", workers=now.workers)
        self._apply(loaded)
        await self._wait_taken()
        log.info("reloaded", file=str(self._path), endpoints=len(loaded.endpoints), keys=len(loaded.keys))


def _state_of(path: Path) -> tuple[int, ...]:
    """What changes when a file is written, replaced, or its link turned, and when something else keeps it from being read."""
    try:
        found = os.stat(path)
    except OSError as err:
        return (err.errno or 0, os.path.islink(path))
    if not stat.S_ISREG(found.st_mode):
        return (found.st_dev, found.st_ino)
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
