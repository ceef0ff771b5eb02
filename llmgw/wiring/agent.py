"""The role `agent`: a node's agent in a process of its own. `run_agent` is also what `dev` runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

import structlog
import trio

from llmgw.agent.agent import AgentPlan
from llmgw.agent.agent import run_agent as run
from llmgw.agent.session import stored_planes
from llmgw.domain.errors import EXIT_OK, Invalid
from llmgw.domain.identity import MachineRole
from llmgw.domain.ports import Machine
from llmgw.protocol.planes import dialled
from llmgw.settings.address import parse_ports
from llmgw.settings.load import Loaded
from llmgw.settings.schema import AgentSettings
from llmgw.wiring.data_dir import claim
from llmgw.wiring.dialling import default_token_file, dialler, identity_folder
from llmgw.wiring.logs import configure_logs
from llmgw.wiring.machine import RealMachine
from llmgw.wiring.notify import take_notifier
from llmgw.wiring.renewal import keep_renewed
from llmgw.wiring.runs import run_role
from llmgw.wiring.signals import wait_for_stop

CHECKPOINTS_FOLDER: Final = "checkpoints"  # below data_dir where `checkpoints_dir` is empty
log = structlog.get_logger("llmgw.agent")


def agent_plan(settings: AgentSettings) -> AgentPlan:
    """What `[agent]` means. Raises `Invalid` when it names no control plane."""
    if not settings.control_planes:
        raise Invalid("agent.control_planes: at least one address is needed, such as http://127.0.0.1:8081", param="agent.control_planes")
    data_dir = _path(settings.data_dir)
    checkpoints_dir = _path(settings.checkpoints_dir) if settings.checkpoints_dir else data_dir / CHECKPOINTS_FOLDER
    return AgentPlan(
        data_dir=data_dir,
        checkpoints_dir=checkpoints_dir,
        control_planes=settings.control_planes,
        name=settings.name,
        facility=settings.facility,
        labels=settings.labels,
        address=settings.address,
        ports=parse_ports(settings.engine_ports),
    )


def _path(text: str) -> Path:
    return Path(text).expanduser().absolute()


async def run_agent(
    machine: Machine,
    settings: AgentSettings,
    *,
    token_file: Path | None = None,
    ca: str = "",
    stop_engines: bool = False,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Runs an agent until cancelled. Holds the data directory: raises `Conflict` when another process does.

    `token_file` stands in where `settings.token_file` is empty; `ca` is a file of certificates that control planes are checked
    against (empty: the system's). `stop_engines`: the agent ends its engines with itself.
    """
    plan = agent_plan(settings)
    file = _path(settings.token_file) if settings.token_file else token_file
    if file is None:
        raise Invalid("agent.token_file: no token file is known", param="agent.token_file")
    with claim(plan.data_dir):
        joined = identity_folder(plan.data_dir)
        async with trio.open_nursery() as nursery:

            def known() -> Sequence[str]:
                return dialled(plan.control_planes, stored_planes(machine, plan.data_dir)[1], {})

            nursery.start_soon(keep_renewed, machine, joined, MachineRole.AGENT, known, ca)
            await run(machine, plan, dialler(machine, file, ca, joined=joined), stop_engines=stop_engines, task_status=task_status)
            nursery.cancel_scope.cancel()


def agent_main(loaded: Loaded, *, stop_engines: bool = False) -> int:
    """Runs the agent until it is told to end. Raises LlmgwError when it cannot run; a broken invariant ends it too."""
    configure_logs(loaded.settings.log)
    run_role(_main, loaded, stop_engines)
    return EXIT_OK


async def _main(loaded: Loaded, stop_engines: bool) -> None:
    machine = RealMachine()
    notifier = take_notifier(os.environ)
    async with trio.open_nursery() as nursery:

        def stop() -> None:
            notifier.stopping()
            said = "its engines are stopped with it" if stop_engines else "its engines are left running"
            log.info("the agent stops", engines=said)
            nursery.cancel_scope.cancel()

        await nursery.start(wait_for_stop, stop)
        settings = loaded.settings
        start_agent = partial(
            run_agent, machine, settings.agent, token_file=default_token_file(settings), ca=settings.tls.ca, stop_engines=stop_engines
        )
        # Ready once its engines are adopted: whether a control plane answers is not for its own start to wait for.
        await nursery.start(start_agent)
        nursery.start_soon(notifier.beat, machine)
        notifier.ready()
