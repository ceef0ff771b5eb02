"""The role `sim`: simulated nodes that speak the agents' protocol with a real control plane, for load tests, drills and demos."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import structlog
import trio

from llmgw.domain.errors import EXIT_OK, Invalid
from llmgw.settings.address import url_fault
from llmgw.settings.load import Loaded
from llmgw.sim.fleet import FleetPlan, run_fleet
from llmgw.wiring.agent import default_token_file, dialler
from llmgw.wiring.logs import configure_logs
from llmgw.wiring.machine import RealMachine
from llmgw.wiring.runs import run_role
from llmgw.wiring.signals import wait_for_stop

LOCAL: Final = "http://127.0.0.1:8081"  # where a control plane of this machine listens unless it was told otherwise
__all__ = ["FleetPlan", "sim_main"]
log = structlog.get_logger("llmgw.sim")


def sim_main(loaded: Loaded, plan: FleetPlan, *, server: str = "", token_file: Path | None = None) -> int:
    """Runs until it is told to end. `server` and `token_file` come before what the file says. Raises LlmgwError."""
    plan.check()
    if server and (reason := url_fault(server)) is not None:
        raise Invalid(f"--server: {reason}", param="server")
    configure_logs(loaded.settings.log)
    agent = loaded.settings.agent
    control_planes = (server,) if server else agent.control_planes or (LOCAL,)
    token = token_file or (Path(agent.token_file) if agent.token_file else default_token_file(loaded.settings))
    if not token.exists():
        raise Invalid(f"the token file {token} is missing: --token-file names the control plane's agent-token", param="token_file")
    run_role(_main, plan, control_planes, token, loaded.settings.tls.ca)
    return EXIT_OK


async def _main(plan: FleetPlan, control_planes: tuple[str, ...], token_file: Path, ca: str) -> None:
    machine = RealMachine()
    async with trio.open_nursery() as nursery:
        await nursery.start(wait_for_stop, nursery.cancel_scope.cancel)
        log.info("simulating", nodes=plan.nodes, gpus=plan.gpus, seed=plan.seed, serve=plan.serve, control_planes=list(control_planes))
        await run_fleet(plan, dialler(machine, token_file, ca), control_planes)
