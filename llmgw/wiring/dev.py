"""The role `dev`: control plane, router, agent and a real model in one process, on loopback, until Ctrl-C.

The agent is reached over its real session with its token, as on any other machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import attrs
import structlog
import tomli_w
import trio

from llmgw.agent.agent import kill_engines
from llmgw.domain.errors import EXIT_OK, Invalid
from llmgw.domain.files import words
from llmgw.domain.model import ModelSpec, Profile, ReplicaCounts
from llmgw.domain.ports import Machine
from llmgw.domain.replica import ReplicaState
from llmgw.settings.address import UnixAddress, parse_listen
from llmgw.settings.load import Loaded, own_endpoint_faults
from llmgw.settings.running import hold, running_files
from llmgw.settings.schema import Settings, StoreSettings
from llmgw.settings.user_dirs import running_dir
from llmgw.sim.fleet import FleetPlan, run_fleet
from llmgw.wiring import demo
from llmgw.wiring.agent import run_agent
from llmgw.wiring.dialling import dialler
from llmgw.wiring.logs import configure_logs
from llmgw.wiring.machine import RealMachine
from llmgw.wiring.runs import run_role
from llmgw.wiring.server import Running, run_control_plane
from llmgw.wiring.signals import Hangup, wait_for_stop

PORT: Final = 8080
ADMIN_PORT: Final = 8081
DRAIN_S: Final = 2.0  # somebody sits in front of it: Ctrl-C is quick
LOOK_S: Final = 0.1  # between looks at the demo model's progress
SAY_AGAIN_S: Final = 5.0  # between lines about it where no terminal shows a moving one
log = structlog.get_logger("llmgw.dev")


@attrs.frozen
class ThisMachine:
    """A real agent on this machine; `demo` False: without the demo model."""

    demo: bool = True


@attrs.frozen
class Simulated:
    """Simulated nodes that really answer, and two models for them."""

    nodes: int

    @property
    def fleet(self) -> FleetPlan:
        return FleetPlan(nodes=self.nodes, serve=True, load_s=(0.5, 4.0))

    def check(self) -> None:
        """Raises Invalid in the words of the option that was given."""
        if self.nodes > (most := self.fleet.served_max):
            raise Invalid(f"--sim: this machine has ports for the engines of {most} nodes, not of {self.nodes}", param="sim")
        self.fleet.check()


Nodes = ThisMachine | Simulated
SIM_MODELS: Final = (
    ModelSpec("sim-small", (Profile("vllm", "vllm", "sim/small", gpus=1, memory_mib=60_000),), ("sim",), replicas=ReplicaCounts(0, 64, 3)),
    ModelSpec("sim-large", (Profile("vllm", "vllm", "sim/large", gpus=4, memory_mib=280_000),), replicas=ReplicaCounts(0, 16, 1)),
)


def dev_main(loaded: Loaded, *, port: int | None, admin_port: int | None, data_dir: Path, nodes: Nodes) -> int:
    """Runs until Ctrl-C. Raises LlmgwError when it cannot run."""
    settings = dev_settings(loaded, port, admin_port, data_dir)
    if faults := own_endpoint_faults(settings.router.listen, loaded.endpoints):
        raise Invalid.of(f"{loaded.source} is not valid", tuple(faults))
    configure_logs(settings.log)
    if isinstance(nodes, ThisMachine) and nodes.demo:
        demo.check_installed()
    if isinstance(nodes, Simulated):
        nodes.check()
    # Not in the store's document: whether keys are asked for depends on where this run listens.
    habits = {} if "auth.required" in loaded.given else {"auth.required": settings.auth.required}
    run_role(_main, attrs.evolve(loaded, settings=settings, habits=habits), data_dir, nodes)
    return EXIT_OK


def dev_settings(loaded: Loaded, port: int | None, admin_port: int | None, data_dir: Path) -> Settings:
    """What the file says, with the places and habits of `dev` where it says nothing. Off loopback it asks for keys."""
    given = loaded.settings

    def listen(asked: int | None, path: str, from_file: str, default: int) -> str:
        if asked is None and path in loaded.given:
            return from_file
        return f"127.0.0.1:{default if asked is None else asked}"

    router = attrs.evolve(given.router, embedded=True, listen=listen(port, "router.listen", given.router.listen, PORT))
    if "auth.required" not in loaded.given:
        given = attrs.evolve(given, auth=attrs.evolve(given.auth, required=not is_loopback(router.listen)))
    if "log.level" not in loaded.given:
        given = attrs.evolve(given, log=attrs.evolve(given.log, level="warning"))
    admin = listen(admin_port, "server.admin_listen", given.server.admin_listen, ADMIN_PORT)
    return attrs.evolve(
        given,
        server=attrs.evolve(given.server, data_dir=str(data_dir), admin_listen=admin),
        store=given.store or StoreSettings(),
        router=router,
        agent=attrs.evolve(given.agent, name=given.agent.name or "dev", data_dir=str(data_dir / "agent")),
    )


def is_loopback(listen: str) -> bool:
    """Can only this machine reach it?"""
    address = parse_listen(listen)
    return isinstance(address, UnixAddress) or address.host in ("127.0.0.1", "::1", "localhost")


async def _main(loaded: Loaded, data_dir: Path, nodes: Nodes) -> None:
    machine = RealMachine()
    stop = trio.Event()
    ctl_files: list[Path] = []
    async with trio.open_nursery() as nursery:

        def leave_nothing() -> None:
            """Nobody starts a second `dev` to adopt what this one leaves."""
            for file in ctl_files:
                with contextlib.suppress(OSError):
                    os.unlink(file)
            if isinstance(nodes, ThisMachine):
                kill_engines(machine, Path(loaded.settings.agent.data_dir))

        await nursery.start(wait_for_stop, stop.set, Hangup.STOPS, leave_nothing)

        async def run() -> None:
            await _run(machine, loaded, data_dir, nodes, stop, ctl_files)
            nursery.cancel_scope.cancel()

        nursery.start_soon(run)


async def _run(machine: Machine, loaded: Loaded, data_dir: Path, nodes: Nodes, stop: trio.Event, ctl_files: list[Path]) -> None:
    ended, agent_ended = trio.Event(), trio.Event()
    async with trio.open_nursery() as nursery:

        async def control(task_status: trio.TaskStatus[Running]) -> None:
            await run_control_plane(machine, loaded, stop_drain_s_max=DRAIN_S, task_status=task_status)
            ended.set()

        running: Running = await nursery.start(control)
        models = running.controller.models
        if nodes != ThisMachine(demo=True) and models.catalog.get(demo.MODEL_NAME) is not None:
            await models.remove(demo.MODEL_NAME)  # of an earlier run; before an agent can start it
        with _told_to_ctl(machine, running, ctl_files) as ctl_words:
            agent_scope = trio.CancelScope()
            agent = attrs.evolve(
                loaded.settings.agent, control_planes=(running.admin_url,), token_file=str(running.agent_token_file), checkpoints_dir=""
            )

            async def run_nodes(task_status: trio.TaskStatus[object]) -> None:
                with agent_scope:
                    if isinstance(nodes, ThisMachine):
                        await run_agent(machine, agent, stop_engines=True, task_status=task_status)
                    else:
                        dial = dialler(machine, running.agent_token_file)
                        await run_fleet(machine, nodes.fleet, dial, (running.admin_url,), task_status=task_status)
                agent_ended.set()

            await nursery.start(run_nodes)
            async with trio.open_nursery() as work:
                work.start_soon(_show, machine, running, data_dir, nodes, ctl_words)
                await stop.wait()
                work.cancel_scope.cancel()
            _say("\nStopping; engines end too (Ctrl-C again ends at once) ...")
            await running.drain()  # first the clients' answers, then the engines, then the rest
            agent_scope.cancel()
            await agent_ended.wait()
            running.stop()
            await ended.wait()


@contextlib.contextmanager
def _told_to_ctl(machine: Machine, running: Running, written: list[Path]) -> Iterator[str]:
    """Lets `llmgw ctl`, and `llmgw sim`, find us for as long as we run; yields the words for the banner that work here.

    A home that cannot be written is no reason not to run. `written` is told the file first, for an end that comes before ours.
    """
    folder = running_dir(os.environ)
    file = folder / f"{running.admin_url.rpartition(':')[2]}.toml"  # of all that run, one has this port
    told = {"server": running.admin_url, "token": running.admin_token, "agent_token_file": str(running.agent_token_file)}
    if running.ca_file is not None:
        told["ca"] = str(running.ca_file)
    named = f"`llmgw ctl --server {running.admin_url} status`"
    written.append(file)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        machine.disk.write(file, tomli_w.dumps(told).encode())
        descriptor = hold(file)
    except OSError as err:
        log.warning("`llmgw ctl` cannot be told where this runs", why=words(err))
        yield f"{named} with LLMGW_TOKEN set to what that holds"
        return
    others = [other for other in running_files(folder) if other != file]
    try:
        yield f"{named} finds it by itself" if others else "`llmgw ctl status` finds it by itself"
    finally:
        with contextlib.suppress(OSError):
            os.unlink(file)
        os.close(descriptor)


async def _show(machine: Machine, running: Running, data_dir: Path, nodes: Nodes, ctl_words: str) -> None:
    """Puts the models into the catalog and tells how far the demo's is, then says how to use it all."""
    models = running.controller.models
    if isinstance(nodes, Simulated):
        if not models.catalog.models:
            await models.apply(SIM_MODELS)
        _say(f"{nodes.nodes} simulated nodes; their engines answer with made-up words.")
        _banner(running, data_dir, SIM_MODELS[0].name, ctl_words)
        return
    if not nodes.demo:
        _banner(running, data_dir, None, ctl_words)
        return
    line = _Progress()
    checkpoint = await machine.run_sync(
        lambda: demo.unpack(data_dir / "checkpoints", lambda share: line.show("Unpacking the demo model", share))
    )
    wanted = demo.demo_model(checkpoint)
    there = models.catalog.get(demo.MODEL_NAME)
    if there is None or there.preferred(None).checkpoint != wanted.preferred(None).checkpoint:
        await models.apply((wanted,))
    began_s = said_s = machine.now_s()
    tried_again = False
    while True:
        replicas = [replica for replica in running.controller.replicas() if replica.model == demo.MODEL_NAME]
        if any(endpoint.models == (demo.MODEL_NAME,) for endpoint in running.controller.publisher.current.endpoints):
            break
        failed = [replica for replica in replicas if replica.state is ReplicaState.FAILED]
        if failed and failed[0].report.age_s > machine.now_s() - began_s:
            if not tried_again:  # it failed in an earlier run; whoever starts dev again wants another try
                await running.controller.restart_model(demo.MODEL_NAME)
            tried_again = True
        elif failed:
            line.end()
            report = failed[0].report
            _say(f"The demo model failed: {report.reason}\n" + "\n".join(f"  {text}" for text in report.log_tail[-10:]))
            break
        now_s = machine.now_s()
        state = replicas[0].state.value if replicas else "being placed"
        if line.moving or now_s - said_s >= SAY_AGAIN_S:
            line.show(f"The demo model is {state}, {now_s - began_s:.0f} s", None)
            said_s = now_s
        await machine.sleep_until(now_s + LOOK_S)
    line.end()
    _banner(running, data_dir, demo.MODEL_ALIAS, ctl_words)


def _banner(running: Running, data_dir: Path, model: str | None, ctl_words: str) -> None:
    base = (
        f"{'https' if running.router_tls else 'http'}://{running.router_listen}"
        if not running.router_listen.startswith("unix:")
        else running.router_listen
    )
    key = "no key needed" if not running.controller.policy().auth_required else "it asks for a key: `llmgw ctl key create NAME` makes one"
    _say(f"llmgw serves at {base}/v1 ({key}).")
    if sys.stderr.isatty():  # it signs in, so it is for a person's screen and for no file
        _say(f"Console, for the next 10 minutes and once: {running.console_link()}")
        _say(f"Later it asks for the admin token: {data_dir / 'admin-token'}; {ctl_words}.")
    else:
        _say(f"Console at {running.admin_url}/console/, its token in {data_dir / 'admin-token'}; {ctl_words}.")
    if model:
        body = json.dumps({"model": model, "max_tokens": 60, "messages": [{"role": "user", "content": "Say hello."}]})
        _say(f"Try:\n  curl {base}/v1/chat/completions -H 'content-type: application/json' -d '{body}'")
    _say("Ctrl-C ends everything, engines too.")


class _Progress:
    """One line that moves on a terminal; plain lines elsewhere, one for each tenth."""

    def __init__(self) -> None:
        self.moving = sys.stderr.isatty()
        self._said = -1
        self._open = False

    def show(self, what: str, share: float | None) -> None:
        """`share` 0 to 1, or None where it is not known. May be called from a thread."""
        percent = -1 if share is None else int(share * 100)
        text = what if share is None else f"{what}: {percent} %"
        if self.moving:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()
            self._open = True
        elif share is None or percent // 10 > self._said:
            self._said = percent // 10
            _say(text)

    def end(self) -> None:
        if self._open:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._open = False


def _say(text: str) -> None:
    """For the person in front of it; a closed terminal does not matter."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
