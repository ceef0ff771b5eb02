"""A real control plane that speaks TLS by its own CA, on an address of loopback, and what joins it."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import attrs
import trio

from llmgw.domain.identity import MachineRole
from llmgw.identity.join_tokens import parse_token
from llmgw.settings.load import Role, load_bytes
from llmgw.wiring import joining
from llmgw.wiring.identity_files import Held, load_held, save_held
from llmgw.wiring.machine import RealMachine
from llmgw.wiring.server import Running, run_control_plane
from tests.plane_file import plane_file, shared_store

HOST = "127.0.0.2"
LIMIT_S = 20.0


def file_of(folder: Path, name: str = "ctl-1", *, plain: str = "never", host: str = HOST, more: str = "") -> str:
    return plane_file(folder, name, shared_store(folder), host=host, plain=plain, more=more)


class Machine(RealMachine):
    """This one, with a wall clock that a test may set forward."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead_s = 0.0

    def wall_s(self) -> float:
        return super().wall_s() + self.ahead_s


@attrs.define
class Plane:
    running: Running
    folder: Path
    machine: Machine

    @property
    def url(self) -> str:
        return self.running.admin_url

    @property
    def ca_file(self) -> Path:
        return self.folder / "shared" / "ca" / "ca.pem"

    async def call(self, method: str, path: str, body: object = None, **headers: str) -> tuple[int, Any]:
        """With the admin token, as ctl does."""

        def work() -> tuple[int, Any]:
            where = urlsplit(self.url)
            connection = http.client.HTTPConnection(where.netloc, timeout=LIMIT_S)
            if where.scheme == "https":
                context = ssl.create_default_context(cafile=str(self.ca_file))
                connection = http.client.HTTPSConnection(where.netloc, timeout=LIMIT_S, context=context)
            sent = {"Authorization": f"Bearer {self.running.admin_token}", "Content-Type": "application/json", **headers}
            connection.request(method, path, None if body is None else json.dumps(body), sent)
            answer = connection.getresponse()
            raw = answer.read()
            connection.close()
            return answer.status, json.loads(raw) if raw else None

        return await trio.to_thread.run_sync(work)

    async def token(self, role: MachineRole = MachineRole.AGENT, name: str = "", **more: Any) -> str:
        status, body = await self.call("POST", "/api/v1/join-tokens", {"role": role.value, "name": name, **more})
        assert status == 201, body
        return str(body["token"])

    async def join(self, folder: Path, name: str, role: MachineRole = MachineRole.AGENT, token: str = "", addresses=()) -> Held:
        """What `llmgw join` does, into that folder."""
        text = token or await self.token(role, name)

        def work() -> Held:
            joined = joining.join(parse_token(text), name, addresses)
            save_held(self.machine, folder, joined.key_pem, joined.certificate_pem, joined.ca_pem)
            held = load_held(self.machine, folder, role)
            assert held is not None
            return held

        return await trio.to_thread.run_sync(work)


@asynccontextmanager
async def plane(folder: Path, text: str = "", name: str = "ctl-1") -> AsyncIterator[Plane]:
    (folder / "shared").mkdir(exist_ok=True)
    machine = Machine()
    async with trio.open_nursery() as nursery:
        loaded = load_bytes((text or file_of(folder, name)).encode(), source="test", role=Role.SERVER)
        running = await nursery.start(run_control_plane, machine, loaded)
        yield Plane(running, folder, machine)
        nursery.cancel_scope.cancel()


async def until(condition: Callable[[], Any], what: str) -> None:
    with trio.move_on_after(LIMIT_S):
        while not condition():
            await trio.sleep(0.01)
        return
    raise AssertionError(f"never came true: {what}")
