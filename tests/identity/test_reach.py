"""Machines that joined while there was one control plane go on with one that came later."""

from __future__ import annotations

import json
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from llmgw.agent.session import PLANES_FILE
from llmgw.domain.identity import MachineRole
from llmgw.settings.load import Loaded, Role, load_bytes
from llmgw.sim.router import SimRouter
from llmgw.wiring.agent import run_agent
from llmgw.wiring.dialling import identity_folder
from llmgw.wiring.following import load_follower
from llmgw.wiring.machine import RealMachine
from llmgw.wiring.server import Running, run_control_plane
from tests.identity.conftest import HOST, Machine, Plane, file_of, until
from tests.programs import free_port


def loaded(folder: Path, name: str, url: str) -> Loaded:
    (folder / "shared").mkdir(exist_ok=True)
    text = file_of(folder, name).replace(f'admin_listen = "{HOST}:0"', f'admin_listen = "{url.removeprefix("https://")}"')
    return load_bytes(text.encode(), source="test", role=Role.SERVER)


@asynccontextmanager
async def control_plane(folder: Path, name: str, url: str) -> AsyncIterator[Running]:
    async with trio.open_nursery() as nursery:
        yield await nursery.start(run_control_plane, RealMachine(), loaded(folder, name, url))
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def machines(folders: tuple[Path, Path], url: str) -> AsyncIterator[None]:
    """An agent and a router that have joined, with one control plane in their files."""
    text = f"""
        [agent]
        name = "gpu-1"
        control_planes = ["{url}"]
        data_dir = "{folders[0]}"
        token_file = "/nowhere"
        [router]
        control_planes = ["{url}"]
        data_dir = "{folders[1]}"
        token_file = "/nowhere"
    """
    settings = load_bytes(text.encode(), source="test").settings
    follower = await load_follower(RealMachine(), SimRouter(), settings)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(follower.run)
        await nursery.start(run_agent, RealMachine(), settings.agent)
        yield
        nursery.cancel_scope.cancel()


def both(one: Running) -> bool:
    """Do the agent and the router hold sessions with it?"""
    return bool(one.controller.sessions.connected()) and bool(one.controller.routers.connected())


async def test_an_agent_and_a_router_go_on_with_a_control_plane_that_came_after_they_joined(tmp_path: Path):
    url, other = (f"https://{HOST}:{port}" for port in (free_port(), free_port()))
    folders = tmp_path / "gpu-1", tmp_path / "edge-1"
    kept = folders[0] / PLANES_FILE
    async with trio.open_nursery() as nursery:
        async with control_plane(tmp_path, "ctl-1", url) as first:
            control = Plane(first, tmp_path, Machine())
            await control.join(identity_folder(folders[0]), "gpu-1")
            await control.join(identity_folder(folders[1]), "edge-1", MachineRole.ROUTER)
            async with machines(folders, url):
                await until(lambda: both(first), "both are there")
                second = await nursery.start(run_control_plane, RealMachine(), loaded(tmp_path, "ctl-2", other))
                await until(lambda: both(second), "the one that came later is dialled")
        await until(lambda: second.controller.leadership.is_leader, "it leads")
        assert stat.S_IMODE(kept.stat().st_mode) == 0o600
        assert json.loads(kept.read_text())["control_planes"] == [other]
        async with machines(folders, url):
            await until(lambda: both(second), "it is dialled after a restart too, though no file names it")
        # Another leads again; the one that came later is removed, and forgotten.
        async with control_plane(tmp_path, "ctl-1", url) as first, machines(folders, url):
            await until(lambda: both(first) and both(second), "both are dialled")
            await until(second.controller.peers.healthy, "the other stands by")
            second.controller.leadership.hand_over()
            await until(lambda: first.controller.leadership.is_leader, "the other leads")
            assert (await Plane(first, tmp_path, Machine()).call("POST", "/api/v1/identities/server/ctl-2/revoke"))[0] == 200
            await until(lambda: json.loads(kept.read_text())["control_planes"] == [], "the agent has forgotten it")
            await until(lambda: not second.controller.sessions.connected() and not second.controller.routers.connected(), "both have left")
            assert both(first)
        nursery.cancel_scope.cancel()
