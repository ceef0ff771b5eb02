"""The role `server`: a control plane, with a router in the same process unless its file says otherwise.

`run_control_plane` is also what `dev` runs.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final

import attrs
import structlog
import trio

from llmgw.admin.app import make_app
from llmgw.admin.auth import AdminAuth, hash_token
from llmgw.admin.relay import RouterAddress
from llmgw.admin.serve import bind_admin, serve_admin
from llmgw.admin.sign_in import SignIn
from llmgw.agent.checkpoints import size_bytes
from llmgw.control.controller import Controller, Objects
from llmgw.control.settings_poller import poll_file
from llmgw.domain.errors import EXIT_OK, Invalid
from llmgw.domain.ids import OWNER_RANDOM_BYTES, OwnerId, owner_id
from llmgw.domain.ports import Machine
from llmgw.domain.setting import Scope
from llmgw.router.listener import public_tls, serve
from llmgw.settings.load import Loaded, Role, load_bytes, table_scope
from llmgw.settings.schema import Settings
from llmgw.settings.secrets import resolve
from llmgw.store import admin_tokens, meta
from llmgw.store.admin_tokens import AdminToken
from llmgw.store.connection import Store
from llmgw.wiring.data_dir import claim, claim_file
from llmgw.wiring.logs import configure_logs
from llmgw.wiring.machine import RealMachine
from llmgw.wiring.memory import calm_collector
from llmgw.wiring.notify import take_notifier
from llmgw.wiring.router import LogWriter, make_router, router_tls
from llmgw.wiring.runs import run_role
from llmgw.wiring.signals import wait_for_stop
from llmgw.wiring.tokens import ensure_token

PRIVATE_STORE: Final = "state.db"  # without [store]: nodes, events and holds of this control plane alone
ADMIN_TOKEN_FILE: Final = "admin-token"
AGENT_TOKEN_FILE: Final = "agent-token"
CLUSTER_ID_BYTES: Final = 8
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


def server_main(loaded: Loaded) -> int:
    """Runs a control plane until it is told to end. Raises LlmgwError when it cannot run."""
    configure_logs(loaded.settings.log)
    run_role(_main, loaded)
    return EXIT_OK


async def _main(loaded: Loaded) -> None:
    machine = RealMachine()
    notifier = take_notifier(os.environ)
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

        async def serve_all() -> None:
            await run_control_plane(machine, loaded, task_status=trio.TASK_STATUS_IGNORED, ready=serving)
            nursery.cancel_scope.cancel()

        nursery.start_soon(serve_all)


async def run_control_plane(
    machine: Machine,
    loaded: Loaded,
    *,
    ready: Callable[[Running], None] = lambda running: None,
    stop_drain_s_max: float = float("inf"),
    task_status: trio.TaskStatus[Running] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Runs until `Running.stop` was called and everything has ended, or until cancelled. Says started() when it serves.

    Running answers are given `route.drain_s` at the end, and no more than `stop_drain_s_max`.
    Raises Conflict when the data directory, the store's file or a port belongs to another process.
    """
    settings = loaded.settings
    data_dir = settings.server.data_path
    with ExitStack() as held:
        held.enter_context(claim(data_dir))
        store_path = settings.store_path
        if settings.store is not None and settings.store.replica:
            raise Invalid(
                "store.replica: a replicated store is not part of this build; leave it empty for one machine", param="store.replica"
            )
        path = store_path or data_dir / PRIVATE_STORE
        held.enter_context(claim_file(path.with_name(f"{path.name}.lock"), f"the store {path}"))
        # Ports first: a taken one must not leave a new epoch behind.
        admin_sockets = bind_admin(settings.server.admin_listen)
        for one in admin_sockets:
            held.callback(one.close)
        # TLS on the admin port as on the public one: this machine's certificate where there is one.
        admin_tls = public_tls(settings.tls.certificate, settings.tls.key) if settings.tls.certificate else None
        admin_url = f"{'https' if admin_tls else 'http'}://{_shown(admin_sockets[0])}"

        store = await Store.open(path, machine.run_sync)
        held.callback(store.close)
        facts = await meta.load(store)
        cluster_id = await meta.ensure_cluster_id(store, facts.epoch, f"c-{machine.fresh_hex(CLUSTER_ID_BYTES)}")
        owner = OwnerId(owner_id(settings.server.name or socket.gethostname().partition(".")[0], machine.fresh_hex(OWNER_RANDOM_BYTES)))
        controller = Controller(
            machine,
            store,
            settings,
            Objects(loaded.catalog, loaded.keys, loaded.endpoints),
            data_dir=data_dir,
            cluster_id=cluster_id,
            owner=owner,
            file="" if store_path is not None else str(loaded.path or loaded.source),
            size_of=_size_of,
            secret=lambda name: os.environ.get(name, ""),
        )
        admin_token = ensure_token(machine, data_dir / ADMIN_TOKEN_FILE, "the admin token")
        agent_token_file = path.with_name(AGENT_TOKEN_FILE) if store_path is not None else data_dir / AGENT_TOKEN_FILE
        agent_token = ensure_token(machine, agent_token_file, "the agents' token")
        if agent_token == admin_token:
            raise Invalid(
                f"{agent_token_file} holds the admin token; agents must have one of their own: remove the file to have it made anew"
            )

        async with trio.open_nursery() as nursery:
            router = None
            writer = LogWriter(sys.stdout.fileno())
            held.callback(writer.flush)
            if settings.router.embedded:
                # In this process plain calls go both ways. It knows policy, catalog and endpoints before its port opens.
                router = make_router(machine, loaded, writer)
                controller.live.add_sink(router)
                controller.add_router(router, router, router)
                nursery.start_soon(writer.run, machine)
            await nursery.start(controller.run)
            first = AdminToken("first", hash_token(admin_token), created_wall_s=machine.wall_s())
            await admin_tokens.ensure(store, controller.leadership.epoch, first)
            auth = AdminAuth()
            await auth.reload(store)
            metrics_token = resolve(settings.metrics.token, "metrics.token") if settings.metrics.token else ""
            sign_in = SignIn(machine, auth, cluster_id)
            listening = ""
            router_port_tls = router_tls(settings)

            def playground_router() -> RouterAddress:
                """Without one of our own: the unit of its own that reads the same file."""
                return RouterAddress(listening or settings.router.listen, router_port_tls is not None)

            app = make_app(
                controller, auth, agent_token=lambda: agent_token, metrics_token=metrics_token, sign_in=sign_in, router=playground_router
            )
            if router is not None:
                listening = await nursery.start(serve, router, settings.router.listen, router_port_tls)
            await nursery.start(partial(serve_admin, app, admin_sockets, tls=admin_tls))
            if loaded.path is not None:
                nursery.start_soon(_poll, machine, loaded, controller)
            draining, drained, stopping = trio.Event(), trio.Event(), trio.Event()

            async def drain() -> None:
                draining.set()
                await drained.wait()

            def stop() -> None:
                draining.set()
                stopping.set()

            def console_link() -> str:
                return f"{admin_url}/console/#link={sign_in.new_link(admin_token)}"

            running = Running(controller, admin_url, listening, admin_token, agent_token_file, drain, stop, console_link)
            calm_collector()
            log.info(
                "serving",
                admin=admin_url,
                router=listening or "none",
                cluster=cluster_id,
                store=str(path),
                epoch=controller.leadership.epoch,
            )
            ready(running)
            task_status.started(running)
            await draining.wait()
            # Stepping down comes before agents are let go; streams that run may end first.
            controller.leadership.step_down()
            if router is not None:
                drain_s = min(controller.settings.route.drain_s, stop_drain_s_max)
                with trio.move_on_after(drain_s + STOP_MARGIN_S):
                    await router.drain(machine.now_s() + drain_s)
            drained.set()
            await stopping.wait()
            app.drain()  # agents and event streams are told goodbye; bounded by its own limit
            await app.ended.wait()
            nursery.cancel_scope.cancel()


async def _poll(machine: Machine, loaded: Loaded, controller: Controller) -> None:
    path = loaded.path
    assert path is not None

    def load(data: bytes) -> Loaded:
        return load_bytes(data, source=str(path), role=Role.SERVER)

    def apply(changed: Loaded) -> None:
        controller.replace_settings(
            live_part(controller.settings, changed.settings), Objects(changed.catalog, changed.keys, changed.endpoints)
        )
        for warning in changed.warnings:
            log.warning(warning, file=str(path))

    def refused(why: str) -> None:
        controller.events.record("settings.refused", "settings", f"{path} was changed and does not load: {why}")

    await poll_file(machine, path, load, apply, refused)


def live_part(before: Settings, after: Settings) -> Settings:
    """`after`, with the machine keys of `before`: those take effect at the next start."""
    kept = {field.name: getattr(before, field.name) for field in attrs.fields(Settings) if table_scope(field.name) is Scope.MACHINE}
    if any(getattr(after, name) != value for name, value in kept.items()):
        log.warning("machine keys have changed; they take effect at the next start")
    return attrs.evolve(after, **kept)


def _size_of(checkpoint: str) -> int | None:
    """Bytes of a checkpoint's files, where this machine has them."""
    return size_bytes(checkpoint) or None if os.path.isabs(checkpoint) else None


def _shown(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
