"""The role `sim`: simulated nodes that speak the agents' protocol with a real control plane, for load tests, drills and demos."""

from __future__ import annotations

import os
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import structlog
import trio

from llmgw.agent.session import Dial
from llmgw.domain.errors import EXIT_OK, Invalid, LlmgwError
from llmgw.domain.ports import Machine
from llmgw.protocol.channel import Channel
from llmgw.settings.address import url_fault
from llmgw.settings.load import Loaded
from llmgw.settings.running import running_files
from llmgw.settings.user_dirs import running_dir
from llmgw.sim.fleet import FleetPlan, run_fleet
from llmgw.wiring.dialling import default_token_file, dialler, read_token
from llmgw.wiring.logs import configure_logs
from llmgw.wiring.machine import RealMachine
from llmgw.wiring.runs import run_role
from llmgw.wiring.signals import wait_for_stop

LOCAL: Final = "http://127.0.0.1:8081"  # where a control plane of this machine listens unless it was told otherwise
__all__ = ["FleetPlan", "sim_main"]
log = structlog.get_logger("llmgw.sim")


TOKEN_AGAIN_S: Final = 1.0  # between looks at a token that cannot be read


def sim_main(loaded: Loaded, plan: FleetPlan, *, server: str = "", token_file: Path | None = None) -> int:
    """Runs until it is told to end. `server` and `token_file` come before what the file says. Raises LlmgwError."""
    plan.check()
    if server and (reason := url_fault(server)) is not None:
        raise Invalid(f"--server: {reason}", param="server")
    configure_logs(loaded.settings.log)
    agent = loaded.settings.agent
    given = token_file or (Path(agent.token_file) if agent.token_file else None)
    control_planes = (server,) if server else agent.control_planes
    dev = None if given else running_dev(control_planes)
    control_planes = control_planes or ((dev[0],) if dev else (LOCAL,))
    token = given or (dev[1] if dev else default_token_file(loaded.settings))
    if not token.exists():
        raise Invalid(
            f"the token file {token} is missing: --token-file names the agent-token of {control_planes[0]}, which lies beside its store, "
            "else in its [server] data_dir; `llmgw dev` keeps it in its data directory",
            param="token_file",
        )
    run_role(_main, plan, control_planes, token, loaded.settings.tls.ca)
    return EXIT_OK


def running_dev(control_planes: tuple[str, ...]) -> tuple[str, Path] | None:
    """Address and token file of the `llmgw dev` of this user that is meant: the one at that address, else the only one that runs."""
    found = []
    for file in running_files(running_dir(os.environ)):
        try:
            told = tomllib.loads(file.read_text(encoding="utf-8"))
            found.append((str(told["server"]), Path(str(told["agent_token_file"]))))
        except (OSError, ValueError, KeyError):
            continue  # of another build
    meant = [dev for dev in found if not control_planes or dev[0] in control_planes]
    return meant[0] if len(meant) == 1 else None


async def _main(plan: FleetPlan, control_planes: tuple[str, ...], token_file: Path, ca: str) -> None:
    machine = RealMachine()
    read_token(machine, token_file)
    async with trio.open_nursery() as nursery:
        await nursery.start(wait_for_stop, nursery.cancel_scope.cancel)
        log.info("simulating", nodes=plan.nodes, gpus=plan.gpus, seed=plan.seed, serve=plan.serve, control_planes=list(control_planes))
        await run_fleet(machine, plan, patient_dialler(machine, token_file, ca), control_planes)


def patient_dialler(machine: Machine, token_file: Path, ca: str = "") -> Dial:
    """As the agent's, for nodes that share one token: where it cannot be read, that is told once and all of them wait."""
    dial = dialler(machine, token_file, ca)
    one_looks = trio.Lock()

    @asynccontextmanager
    async def open_session(url: str) -> AsyncIterator[Channel]:
        async with one_looks:
            said = False
            while True:
                try:
                    await machine.run_sync(lambda: read_token(machine, token_file))
                    break
                except LlmgwError as err:
                    if not said:
                        log.warning("every node waits for the token", why=err.message)
                    said = True
                await machine.sleep_until(machine.now_s() + TOKEN_AGAIN_S)
        async with dial(url) as channel:
            yield channel

    return open_session
