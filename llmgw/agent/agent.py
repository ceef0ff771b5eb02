"""The agent of one node: puts supervisor, fence, facts and sessions together and runs them until it is cancelled.

Engines live on when it ends, unless it is told to take them along.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import attrs
import structlog
import trio

from llmgw.agent import facts, ports, processes
from llmgw.agent.fence import Fence
from llmgw.agent.gpus import GpuProbe
from llmgw.agent.logs import LOG_BYTES_MAX
from llmgw.agent.session import Dial, Sessions
from llmgw.agent.supervisor import REPLICAS_FOLDER, Listener, Place, Supervisor
from llmgw.domain.files import unusable
from llmgw.domain.ids import NodeId
from llmgw.domain.ports import Machine
from llmgw.domain.replica import ReplicaReport
from llmgw.protocol.messages import AgentEvent

log = structlog.get_logger("llmgw.agent")

REFRESH_S: Final = 30.0  # between looks at the disk and at the installed engines; placement needs no fresher numbers
FOLDER_MODE: Final = 0o700


@attrs.frozen
class AgentPlan:
    """Everything an agent is told at its start."""

    data_dir: Path
    checkpoints_dir: Path
    control_planes: tuple[str, ...]
    name: str = ""
    facility: str = ""
    labels: Mapping[str, str] = attrs.field(factory=dict)
    address: str = "127.0.0.1"
    ports: tuple[int, int] = (20000, 20999)
    log_bytes_max: int = LOG_BYTES_MAX


async def run_agent(
    machine: Machine,
    plan: AgentPlan,
    dial: Dial,
    *,
    stop_engines: bool = False,
    gpus: GpuProbe | None = None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Runs until cancelled; `started` once engines are adopted and sessions are being opened.

    The caller holds the data directory. `stop_engines`: at the end every engine is stopped in order, else all are left
    running. Raises `Invalid` for what stands in the data directory and cannot be used, `Unavailable` for a full disk.
    """
    await machine.run_sync(lambda: _make_folders(plan.data_dir))
    node = await machine.run_sync(lambda: facts.node_id(machine, plan.data_dir))
    fence = Fence(machine, plan.data_dir)
    await fence.load()
    warning = ports.clash(plan.ports, await machine.run_sync(ports.kernel_range))
    if warning:
        log.warning(warning)
    boot = await machine.run_sync(facts.boot_id)
    place = Place(node, boot, plan.data_dir, plan.checkpoints_dir, plan.address)
    sessions: Sessions

    # Each is told by the other: the sessions of changes and events, the supervisor of orders.
    def changed(report: ReplicaReport) -> None:
        sessions.changed(report)

    def event(told: AgentEvent) -> None:
        sessions.event(told)

    supervisor = Supervisor(
        machine,
        place,
        Listener(changed, event),
        gpus=gpus,
        log_bytes_max=plan.log_bytes_max,
    )
    fixed = facts.Fixed(node, plan.name, boot, plan.facility, plan.labels, plan.address, plan.ports, plan.checkpoints_dir)
    keeper = facts.FactsKeeper(fixed, supervisor.devices, supervisor.engine_commands)
    sessions = Sessions(machine, fence, lambda: supervisor, keeper, dial, folder=plan.data_dir, control_planes=plan.control_planes)
    await machine.run_sync(keeper.refresh)
    log.info("agent starts", node=node, data_dir=str(plan.data_dir), control_planes=len(plan.control_planes))

    async def refresh() -> None:
        while True:
            await machine.sleep_until(machine.now_s() + REFRESH_S)
            await machine.run_sync(keeper.refresh)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(refresh)
        # Engines before control planes: the first inventory must hold what was adopted.
        await nursery.start(_supervise, supervisor, stop_engines)
        nursery.start_soon(sessions.run)
        task_status.started()


def kill_engines(machine: Machine, data_dir: Path) -> None:
    """Ends at once, with their trees, all engines of the agent that keeps its state there, running or adopted. Blocking.

    Raises OSError where the node's id cannot be read.
    """
    known = machine.disk.read(data_dir / facts.NODE_ID_FILE)
    if known is not None:
        processes.kill_all(processes.node_tag(NodeId(known.decode("utf-8", "replace").strip())))


def _make_folders(data_dir: Path) -> None:
    """Blocking."""
    for what, folder in (("the data directory", data_dir), ("the folder of replicas", data_dir / REPLICAS_FOLDER)):
        try:
            folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        except OSError as err:
            raise unusable(err, what, folder, "move it away") from err


async def _supervise(supervisor: Supervisor, stop_engines: bool, task_status: trio.TaskStatus[None]) -> None:
    await supervisor.run(stop_engines=stop_engines, task_status=task_status)
