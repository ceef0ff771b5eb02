"""The role `server`: a control plane, with a router in the same process unless its file says otherwise.

`run_control_plane` is also what `dev` runs.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Final

import attrs
import structlog
import trio

from llmgw.admin.app import make_app
from llmgw.admin.auth import AdminAuth, hash_token
from llmgw.admin.peer_client import PeerClient
from llmgw.admin.relay import RouterAddress
from llmgw.admin.serve import bind_admin, serve_admin
from llmgw.admin.sign_in import SignIn
from llmgw.agent.checkpoints import size_bytes
from llmgw.control import settings_boot
from llmgw.control.controller import Controller, Objects, first_token
from llmgw.control.settings_boot import Boot
from llmgw.control.settings_in_force import SettingsInForce
from llmgw.control.settings_poller import boot
from llmgw.control.supervision import keep_running
from llmgw.domain.errors import EXIT_OK, Conflict, Invalid
from llmgw.domain.identity import MachineIdentity, MachineRole
from llmgw.domain.ids import OWNER_RANDOM_BYTES, OwnerId, owner_id
from llmgw.domain.ports import Machine
from llmgw.identity.trust import Trust
from llmgw.router.listener import public_tls, serve
from llmgw.router.router import Router
from llmgw.router.usage_keeper import USAGE_FILE, UsageKeeper
from llmgw.settings.address import parse_listen
from llmgw.settings.load import Loaded, Role, load_bytes
from llmgw.settings.schema import Settings
from llmgw.settings.secrets import resolve
from llmgw.store import identities as identity_rows
from llmgw.wiring.access_log_writer import LogWriter
from llmgw.wiring.data_dir import claim
from llmgw.wiring.dialling import identity_folder
from llmgw.wiring.dry_load import dry_load
from llmgw.wiring.identity_files import CA_CERTIFICATE, ca_folder, ensure_authority, load_authority
from llmgw.wiring.logs import configure_logs
from llmgw.wiring.machine import RealMachine
from llmgw.wiring.memory import calm_collector, keep_freed_memory
from llmgw.wiring.notify import Notifier, take_notifier
from llmgw.wiring.own_identity import OwnIdentity, check_authority, told_address
from llmgw.wiring.pending_join import redeem
from llmgw.wiring.router import make_router, router_tls
from llmgw.wiring.runs import allow_descriptors, run_role
from llmgw.wiring.signals import wait_for_stop
from llmgw.wiring.stores import open_store
from llmgw.wiring.tokens import ensure_token, follow_token

CONTROL_TOKEN_FILE: Final = "control-token"  # beside the store: what its control planes have for each other
ADMIN_TOKEN_FILE: Final = "admin-token"
AGENT_TOKEN_FILE: Final = "agent-token"
LET_IN_S: Final = 5.0  # chosen: agents are back a second or two after a start; who is not by then is not waited for
LET_IN_LOOK_S: Final = 0.05
STOP_MARGIN_S: Final = 2.0  # beyond the router's drain_s: then whatever is left is cut
log = structlog.get_logger("llmgw.server")


@attrs.frozen
class Running:
    """A control plane that serves: where, and how it is ended.

    `drain` steps down and returns when clients' answers are over or their time is up; `stop` does that and ends the rest.
    `console_link` makes an address that signs in to the console once, soon: for a terminal, never for a log.
    """

    controller: Controller
    admin_url: str
    router_listen: str  # "" without an embedded router
    admin_token: str = attrs.field(repr=False)
    agent_token_file: Path
    drain: Callable[[], Awaitable[None]]
    stop: Callable[[], None]
    console_link: Callable[[], str]
    own: OwnIdentity | None  # None: it has no certificate of the cluster's CA
    ca_file: Path | None  # what its admin port is checked by; None: by the system, or it is no TLS
    router_tls: bool


def server_main(loaded: Loaded) -> int:
    """Runs a control plane until it is told to end, or until its settings ask for a restart. Raises LlmgwError when it cannot run.

    A supervisor starts it again then; where there is none it becomes a new process in place.
    """
    configure_logs(loaded.settings.log)
    allow_descriptors()
    notifier = take_notifier(os.environ)
    ends = Ends()
    try:
        run_role(_main, loaded, notifier, ends)
    except Exception as err:
        ends.failed(err)
        raise
    if ends.restart and not notifier.supervised:
        os.execv(sys.executable, sys.orig_argv)
    return EXIT_OK


class Ends:
    """How this process came to its end: `restart` is why it is to start again, "" for good."""

    def __init__(self) -> None:
        self.restart = ""
        self._folder: Path | None = None
        self._version = 0
        self._began_s = 0.0

    def booting(self, machine: Machine, folder: Path, version: int) -> None:
        """The process has begun on this version of the settings."""
        self._folder, self._version, self._began_s = folder, version, machine.now_s()
        self._machine = machine

    def failed(self, err: Exception) -> None:
        """It ends by its own fault. Soon after its start that is put down to the version that it started with."""
        if isinstance(err, Invalid | Conflict):  # of a file or a port: a person repairs it, and no other version would do better
            return
        if self._folder is None or self._machine.now_s() - self._began_s > settings_boot.PROVEN_S:
            return
        marks = settings_boot.load_marks(self._machine.disk, self._folder)
        settings_boot.save_marks(self._machine.disk, self._folder, marks.failed(self._version, str(err) or type(err).__name__))


async def _main(loaded: Loaded, notifier: Notifier, ends: Ends) -> None:
    machine = RealMachine()
    stops: list[Callable[[], None]] = []
    async with trio.open_nursery() as nursery:

        def stop() -> None:
            notifier.stopping()
            if not stops:
                nursery.cancel_scope.cancel()  # told to end before it served
            for one in stops:
                one()

        await nursery.start(wait_for_stop, stop)

        def serving(running: Running) -> None:
            stops.append(running.stop)
            nursery.start_soon(notifier.beat, machine)
            notifier.ready()

        def restart(why: str) -> None:
            ends.restart = why
            stop()

        async def serve_all() -> None:
            await run_control_plane(
                machine,
                loaded,
                task_status=trio.TASK_STATUS_IGNORED,
                ready=serving,
                restart=restart,
                booting=ends.booting,
                reloading=notifier.reload,
            )
            nursery.cancel_scope.cancel()

        nursery.start_soon(serve_all)


async def run_control_plane(
    machine: Machine,
    loaded: Loaded,
    *,
    ready: Callable[[Running], None] = lambda running: None,
    restart: Callable[[str], None] | None = None,
    booting: Callable[[Machine, Path, int], None] = lambda machine, folder, version: None,
    reloading: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    stop_drain_s_max: float = float("inf"),
    task_status: trio.TaskStatus[Running] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Runs until `Running.stop` was called and everything has ended, or until cancelled. Says started() when it serves.

    Running answers are given `route.drain_s` at the end, and no more than `stop_drain_s_max`. `restart` is called when the settings
    ask for a graceful restart (None: nobody restarts this process). `booting` is told the version that it starts with; `reloading`
    stands around each change of the settings that is taken live.
    Raises Conflict when the data directory or a port belongs to another process. A store may be shared: one of its control
    planes leads, the others stand by.
    """
    settings = loaded.settings
    data_dir = settings.server.data_path
    with ExitStack() as held:
        held.enter_context(claim(data_dir))
        # Ports first: a taken one must not leave a new epoch behind.
        admin_sockets = bind_admin(settings.server.admin_listen)
        for one in admin_sockets:
            held.callback(one.close)
        on_loopback = _is_loopback(settings.server.admin_listen)
        secured = settings.tls.secures(loopback=on_loopback)
        if secured and settings.server.advertise.startswith("http://"):
            raise Invalid(
                f"server.advertise is {settings.server.advertise}, and {settings.server.admin_listen} speaks TLS: say https:// there, "
                'and in control_planes of agents and routers, or [tls] plain = "anywhere" where nobody else can listen in',
                param="server.advertise",
            )
        admin_url = f"{'https' if secured else 'http'}://{_dialled(admin_sockets[0])}"

        await redeem(machine, data_dir, settings.tls.ca)
        folder = ca_folder(settings)
        authority = await machine.run_sync(lambda: load_authority(machine, folder))  # `llmgw init` makes it before the store
        opened = await open_store(machine, settings, held, authority.cluster if authority is not None else "")
        store, cluster_id, shared = opened.store, opened.cluster_id, not opened.alone
        # Where strangers could listen in, machines join by certificate.
        public_secured = _public_by_ca(settings)
        needs_ca = public_secured or settings.tls.plain == "never" or (settings.tls.plain == "loopback" and not on_loopback)
        check_authority(authority, folder, cluster_id, (await identity_rows.load(store)).pin, needed=needs_ca)
        if needs_ca and authority is None:
            authority = await machine.run_sync(lambda: ensure_authority(machine, folder, cluster_id))
            check_authority(authority, folder, cluster_id, "", needed=True)
        file = "" if shared else str(loaded.path or loaded.source)
        begun = Boot() if file else await boot(machine, store, data_dir, loaded)
        in_force = SettingsInForce(
            loaded,
            begun.read,
            restarts=restart is not None,
            settles_alone=not shared,
            refused=begun.refused,
            why=begun.why,
        )
        if begun.refused:
            log.error("a settings version is not taken here; an earlier one is in force", version=begun.refused, why=begun.why)
        booting(machine, data_dir, in_force.started_with)
        settings = in_force.settings
        called = settings.server.name or socket.gethostname().partition(".")[0] or "ctl"
        owner = OwnerId(owner_id(called, machine.fresh_hex(OWNER_RANDOM_BYTES)))
        address = settings.server.advertise.rstrip("/") or admin_url
        reached_at = told_address(settings, admin_sockets[0].getsockname()[1])
        admin_token = ensure_token(machine, data_dir / ADMIN_TOKEN_FILE, "the admin token")
        agent_token_file = opened.tokens / AGENT_TOKEN_FILE
        agent_token = ensure_token(machine, agent_token_file, "the agents' token")
        control_token_file = opened.tokens / CONTROL_TOKEN_FILE
        control_token = ensure_token(machine, control_token_file, "the control planes' token") if shared else ""
        _check_apart({data_dir / ADMIN_TOKEN_FILE: admin_token, agent_token_file: agent_token, control_token_file: control_token})
        identity = MachineIdentity(cluster_id, MachineRole.SERVER, called)
        own = None if authority is None else OwnIdentity(machine, settings, identity_folder(data_dir), authority, identity)
        trusted = Trust(others=settings.tls.ca, system=not settings.tls.ca)

        def trust() -> Trust:
            return trusted if own is None else own.trust

        peers = PeerClient(lambda: control_token, lambda: controller.leadership.owner, trust) if shared else None
        candidacy = await opened.compete(owner, address, settings.lease)
        controller = Controller(
            machine,
            store,
            in_force,
            Objects(loaded.catalog, loaded.keys, loaded.endpoints),
            candidacy=candidacy,
            file=file,
            address=address,
            reached_at=reached_at,
            link=peers,
            token_sha256=hash_token(admin_token),
            size_of=_size_of,
            secret=lambda name: os.environ.get(name, ""),
            load=lambda data: attrs.evolve(load_bytes(data, source=str(loaded.path), role=Role.SERVER), path=loaded.path),
            dry_load=partial(dry_load, source=str(loaded.path or ""), running=(settings.server.admin_listen, settings.router.listen)),
            restart=restart or (lambda why: None),
            reloading=reloading,
        )
        controller.identities.authority = authority
        controller.identities.reaches = lambda: [reached_at, *controller.peers.addresses()]
        controller.identities.takes_servers = partial(_no_second_machine, settings)
        admin_tls = public_tls(settings.tls.certificate, settings.tls.key) if settings.tls.certificate else None
        if own is not None:
            await own.make(controller.identities)
            if admin_tls is not None:
                own.trust.ask(admin_tls)
            elif secured:
                admin_tls = own.admin_context()
        auth = AdminAuth(own=first_token(hash_token(admin_token), machine.wall_s()), control_token=control_token)
        controller.on_reread(partial(auth.reload, store))

        async def taken(token: str) -> None:
            """`llmgw init --new-admin-token` has written another one."""
            auth.use_own(first_token(hash_token(token), machine.wall_s()))
            controller.use_admin_token(hash_token(token))
            if controller.leadership.is_leader:
                await controller.ensure_admin_token(hash_token(token))

        async with trio.open_nursery() as nursery:
            router = usage = None
            writer = LogWriter(sys.stdout.fileno())
            held.callback(writer.flush)
            if settings.router.embedded:
                # In this process plain calls go both ways. It knows policy, catalog and endpoints before its port opens.
                router = make_router(machine, attrs.evolve(loaded, settings=settings), writer)
                controller.live.add_sink(router)
                controller.add_router(router, router, router)
                nursery.start_soon(writer.run, machine)
                usage = await _account(machine, controller, router, data_dir / USAGE_FILE)
                nursery.start_soon(keep_running, machine, "router's usage", usage.run)
            if opened.run is not None:
                await nursery.start(opened.run)
            await nursery.start(controller.run)
            metrics_token = resolve(settings.metrics.token, "metrics.token") if settings.metrics.token else ""
            # Browsers keep cookies per host: two clusters on one machine, and two control planes of one, have each its own.
            sign_in = SignIn(machine, auth, f"{cluster_id} {hash_token(admin_token)}")
            listening = ""
            public = None
            if router is not None:
                public = own.public_context() if own is not None and public_secured else router_tls(settings)
            secure_router = bool(settings.router.tls_certificate) or settings.tls.secures(loopback=_is_loopback(settings.router.listen))
            if own is not None:
                nursery.start_soon(keep_running, machine, "own certificate", partial(own.run, controller.identities))
            nursery.start_soon(keep_running, machine, "admin token", partial(follow_token, machine, data_dir / ADMIN_TOKEN_FILE, taken))

            def playground_router() -> RouterAddress:
                """Without one of our own: the unit of its own that reads the same file."""
                return RouterAddress(listening or settings.router.listen, secure_router)

            app = make_app(
                controller,
                auth,
                agent_token=lambda: agent_token,
                metrics_token=metrics_token,
                sign_in=sign_in,
                router=playground_router,
                peers=peers,
                plain=settings.tls.plain,
            )
            if router is not None:
                begin = trio.Event()
                listening = await nursery.start(partial(serve, begin=begin), router, settings.router.listen, public)
                nursery.start_soon(_let_in, machine, controller, begin)
            await nursery.start(partial(serve_admin, app, admin_sockets, tls=admin_tls))
            ca_file = folder / CA_CERTIFICATE if own is not None and secured and not settings.tls.certificate else None
            draining, drained, stopping = trio.Event(), trio.Event(), trio.Event()

            async def drain() -> None:
                draining.set()
                await drained.wait()

            def stop() -> None:
                draining.set()
                stopping.set()

            def console_link() -> str:
                return f"{admin_url}/console/#link={sign_in.new_link(admin_token)}"

            running = Running(
                controller, admin_url, listening, admin_token, agent_token_file, drain, stop, console_link, own, ca_file, public is not None
            )
            calm_collector()
            keep_freed_memory()
            log.info(
                "serving",
                admin=admin_url,
                router=listening or "none",
                cluster=cluster_id,
                store=store.place,
                role=controller.leadership.role(machine.now_s()).value,
            )
            ready(running)
            task_status.started(running)
            await draining.wait()
            # Stepping down comes before agents are let go; streams that run may end first.
            led = controller.leadership.is_leader
            controller.leadership.step_down()
            await controller.leadership.wait_left()
            if led:
                await controller.peers.wait_succeeded()
            if router is not None:
                drain_s = min(controller.settings.route.drain_s, stop_drain_s_max)
                with trio.move_on_after(drain_s + STOP_MARGIN_S):
                    await router.drain(machine.now_s() + drain_s)
            if usage is not None:
                await usage.close()
            drained.set()
            await stopping.wait()
            app.drain()  # agents and event streams are told goodbye; bounded by its own limit
            await app.ended.wait()
            nursery.cancel_scope.cancel()


async def _account(machine: Machine, controller: Controller, router: Router, path: Path) -> UsageKeeper:
    """What this process's own router counts goes by plain calls to whoever leads."""
    usage = UsageKeeper(machine, path, lambda batch: controller.usage.offer(batch, usage.taken))
    await usage.load()
    router.book = usage.book
    return usage


async def _let_in(machine: Machine, controller: Controller, begin: trio.Event) -> None:
    """Lets clients in once it is known what runs: right after a start every model would be without a replica."""
    until_s = machine.now_s() + LET_IN_S
    while controller.inventory.awaits() and machine.now_s() < until_s:
        await machine.sleep_until(machine.now_s() + LET_IN_LOOK_S)
    controller.publisher.publish_now()
    begin.set()


def _check_apart(tokens: Mapping[Path, str]) -> None:
    """Raises Invalid where one token stands in two files: each kind gives other rights."""
    seen: dict[str, Path] = {}
    for path, token in tokens.items():
        if token and (first := seen.setdefault(token, path)) != path:
            raise Invalid(f"{path} holds the token of {first}; each has one of its own: remove {path} to have it made anew")


def _public_by_ca(settings: Settings) -> bool:
    """Does the embedded router's port show the certificate of the cluster's CA?"""
    given = settings.router.tls_certificate or settings.tls.certificate
    return settings.router.embedded and not given and settings.tls.secures(loopback=_is_loopback(settings.router.listen))


def _no_second_machine(settings: Settings) -> str:
    """Why a control plane on another machine cannot join, "" where it can."""
    if settings.store is not None and settings.store.replica:
        return ""
    kept = f"the store is the file {settings.store_path}" if settings.store is not None else "there is no [store]"
    return f"a control plane on another machine needs a replicated store ([store] replica), and here {kept}: only this machine can use that"


def _is_loopback(listen: str) -> bool:
    return parse_listen(listen).loopback


def _size_of(checkpoint: str) -> int | None:
    """Bytes of a checkpoint's files, where this machine has them."""
    return size_bytes(checkpoint) or None if os.path.isabs(checkpoint) else None


def _dialled(bound: socket.socket) -> str:
    """How this machine itself reaches that port."""
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
