"""What makes a router follow control planes. Apart from `wiring.router`, so that a router on a static list loads none of it."""

from __future__ import annotations

import socket
from pathlib import Path

import trio

from llmgw.control.supervision import keep_running
from llmgw.domain.identity import MachineRole
from llmgw.domain.ports import Machine
from llmgw.router.follow import Followed, Follower
from llmgw.router.usage_keeper import USAGE_FILE, UsageKeeper
from llmgw.settings.schema import Settings
from llmgw.wiring.dialling import default_token_file, dialler, identity_folder
from llmgw.wiring.renewal import keep_renewed


def router_folder(settings: Settings) -> Path:
    """`[router] data_dir`, absolute."""
    return _absolute(settings.router.data_dir)


async def load_follower(machine: Machine, router: Followed, settings: Settings) -> Follower:
    """What follows the control planes for this router, which serves from here on by what was last pushed.

    The caller holds the data directory. Raises Invalid for a `tls.ca` that cannot be used.
    """
    given = settings.router.token_file
    token_file = _absolute(given) if given else default_token_file(settings)
    follower = Follower(
        machine,
        router,
        dialler(machine, token_file, settings.tls.ca, MachineRole.ROUTER, identity_folder(router_folder(settings))),
        folder=router_folder(settings),
        control_planes=settings.router.control_planes,
        name=socket.gethostname() or "router",
        workers=settings.router.workers,
        cors_origins=settings.router.cors_origins,
    )
    await follower.load()
    return follower


async def load_usage(machine: Machine, follower: Follower, settings: Settings) -> UsageKeeper:
    """What tells the leader, through the follower's sessions, what clients have used."""
    keeper = UsageKeeper(machine, router_folder(settings) / USAGE_FILE, follower.tell_usage)
    follower.usage_taken = keeper.taken
    await keeper.load()
    return keeper


async def keep_following(
    machine: Machine,
    follower: Follower,
    usage: UsageKeeper,
    settings: Settings,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Until cancelled; a crash of either starts it again a few times, as the control plane's own tasks. Raises Broken (in a group) then."""
    task_status.started()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_running, machine, "follower", follower.run)
        nursery.start_soon(keep_running, machine, "usage", usage.run)
        joined = identity_folder(router_folder(settings))
        nursery.start_soon(keep_renewed, machine, joined, MachineRole.ROUTER, follower.control_planes, settings.tls.ca)


def _absolute(text: str) -> Path:
    return Path(text).expanduser().absolute()
