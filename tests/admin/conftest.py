"""A real control plane on a store in memory, served by the real admin port on loopback, and a client of raw bytes."""

from __future__ import annotations

import json
import socket
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio

from llmgw.admin.app import make_app
from llmgw.admin.auth import AdminAuth, hash_token
from llmgw.admin.limits import Limits
from llmgw.admin.serve import bind_admin, serve_admin
from llmgw.control.controller import Controller, Objects
from llmgw.control.leadership import Candidacy
from llmgw.control.settings_in_force import SettingsInForce
from llmgw.domain.ids import ClusterId, OwnerId
from llmgw.domain.model import Catalog
from llmgw.settings.load import Loaded
from llmgw.settings.schema import Settings
from llmgw.store import settings as settings_rows
from llmgw.store.admin_tokens import AdminToken, Role
from llmgw.store.connection import MEMORY, FileStore
from llmgw.wiring.machine import RealMachine

ADMIN, OPERATOR, VIEWER, AGENT = ("admin-" + "a" * 32, "operator-" + "b" * 32, "viewer-" + "c" * 32, "agent-" + "d" * 32)
DEADLINE_S = 15.0


async def inline(work):
    return work()


@attrs.define
class Answered:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        error = self.json["error"]
        assert isinstance(error["message"], str)
        assert error["message"]
        assert set(error) - {"faults"} == {"message", "type", "param", "code"}
        return error["code"]


@attrs.define(eq=False)
class Admin:
    """What a test sees of a running control plane."""

    controller: Controller
    app: Any
    auth: AdminAuth
    port: int
    nursery: trio.Nursery
    served: trio.Event

    async def connect(self, receive_buffer: int | None = None) -> trio.SocketStream:
        plain = trio.socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        if receive_buffer is not None:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        try:
            await plain.connect(("127.0.0.1", self.port))
        except OSError:
            plain.close()
            raise
        return trio.SocketStream(plain)

    async def raw(self, data: bytes) -> Answered:
        """One request's bytes, one answer."""
        stream = await self.connect()
        async with stream:
            with trio.fail_after(DEADLINE_S):
                await stream.send_all(data)
                return await read_answer(stream)

    async def call(self, method: str, path: str, body: Any = None, token: str | None = ADMIN, **headers: str) -> Answered:
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [f"{method} {path} HTTP/1.1", "Host: a", "Connection: close", f"Content-Length: {len(data)}"]
        if token is not None:
            lines.append(f"Authorization: Bearer {token}")
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        return await self.raw("\r\n".join([*lines, "", ""]).encode("latin1") + data)


async def read_answer(stream: trio.SocketStream, buffer: bytearray | None = None, head: bool = False) -> Answered:
    """One answer; what was read beyond it stays in `buffer`."""
    data = bytearray() if buffer is None else buffer
    while b"\r\n\r\n" not in data:
        more = await stream.receive_some(65536)
        assert more, f"the connection ended before an answer: {bytes(data)!r}"
        data += more
    raw_head, _, _ = bytes(data).partition(b"\r\n\r\n")
    del data[: len(raw_head) + 4]
    lines = raw_head.decode("latin1").split("\r\n")
    status = int(lines[0].split(" ")[1])
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    if 100 <= status < 200 and status != 101:
        return await read_answer(stream, data, head)
    if head or status == 101:
        return Answered(status, headers, b"")
    body = bytearray()
    if headers.get("transfer-encoding") == "chunked":
        while True:
            while b"\r\n" not in data:
                data += await some(stream)
            size = int(bytes(data[: data.index(b"\r\n")]), 16)
            start = data.index(b"\r\n") + 2
            while len(data) < start + size + 2:
                data += await some(stream)
            body += data[start : start + size]
            del data[: start + size + 2]
            if not size:
                break
    elif "content-length" in headers:
        length = int(headers["content-length"])
        while len(data) < length:
            data += await some(stream)
        body += data[:length]
        del data[:length]
    else:
        while more := await stream.receive_some(65536):
            data += more
        body += data
    return Answered(status, headers, bytes(body))


async def some(stream: trio.SocketStream) -> bytes:
    more = await stream.receive_some(65536)
    assert more, "the connection ended in the middle of an answer"
    return bytes(more)


async def until(condition, what: str = "a state") -> None:
    """Waits until `condition()` holds."""
    with trio.move_on_after(DEADLINE_S):
        while not condition():
            await trio.sleep(0.005)
        return
    raise AssertionError(f"did not come about in {DEADLINE_S} s: {what}")


@asynccontextmanager
async def running_admin(
    data_dir, limits=None, *, imported=True, objects=None, store=None, tls=None, kernel_stall_s=None, router=lambda: None, **more
):
    limits = limits or Limits()
    machine = RealMachine()
    store = store or await FileStore.open(MEMORY, inline)
    if imported:
        await settings_rows.import_first(store, 0, "", "", 0.0)  # so that a test's own events and entries are the first
    controller = Controller(
        machine,
        store,
        SettingsInForce(Loaded(Settings())),
        objects or Objects(Catalog()),
        candidacy=Candidacy.sole(ClusterId("c1"), OwnerId("ctl-1-0011223344556677"), data_dir),
        **more,
    )
    auth = AdminAuth(
        AdminToken(role.value, hash_token(token), role)
        for token, role in ((ADMIN, Role.ADMIN), (OPERATOR, Role.OPERATOR), (VIEWER, Role.VIEWER))
    )
    app = make_app(controller, auth, agent_token=lambda: AGENT, limits=limits, router=router)
    (listening,) = bind_admin("127.0.0.1:0", kernel_stall_s or limits.send_stall_s)
    port = listening.getsockname()[1]
    served = trio.Event()

    async def serve(task_status=trio.TASK_STATUS_IGNORED):
        await serve_admin(app, [listening], tls=tls, task_status=task_status)
        served.set()

    async with trio.open_nursery() as nursery:
        await nursery.start(controller.run)
        await nursery.start(serve)
        yield Admin(controller, app, auth, port, nursery, served)
        nursery.cancel_scope.cancel()
    store.close()


@pytest.fixture
async def admin(tmp_path):
    async with running_admin(tmp_path) as running:
        yield running
