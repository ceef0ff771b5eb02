"""A small control plane for tests of the agent: it serves the WebSocket, checks the token, leads, and notes what it hears."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import attrs
import trio
import trio_websocket

from llmgw.domain.ids import ClusterId, CommandId, OwnerId, ReplicaId
from llmgw.domain.lease import FencingToken
from llmgw.domain.replica import ReplicaReport, ReplicaState
from llmgw.protocol.codec import MESSAGE_BYTES_MAX, decode, encode
from llmgw.protocol.messages import (
    AgentHello,
    Command,
    CommandResult,
    Heartbeat,
    Inventory,
    LeaderHello,
    Message,
    Order,
    ReplicaChanged,
    ServerHello,
)
from llmgw.protocol.websocket import SESSION_PATH

TOKEN = "agent-token-of-a-test-0123456789"
STATE_DEADLINE_S = 40.0
M = TypeVar("M", bound=Message)


class ControlPlane:
    """Leads with `token`; `heard` is every message in order, over all sessions."""

    def __init__(self, port: int, *, epoch: int = 1, cluster: str = "cluster-1", owner: str = "ctl-a") -> None:
        self.port = port
        self.token = FencingToken(ClusterId(cluster), epoch, OwnerId(owner))
        self.heard: list[Message] = []
        self.replicas: dict[ReplicaId, ReplicaReport] = {}
        self.sessions = 0
        self.known = False  # the barrier was answered in the present session
        self._socket: trio_websocket.WebSocketConnection | None = None
        self._commands = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def send(self, message: Message) -> None:
        await self.send_bytes(encode(message))

    async def send_bytes(self, data: bytes | str) -> None:
        assert self._socket is not None
        await self._socket.send_message(data)

    async def command(self, order: Order, token: FencingToken | None = None) -> CommandResult:
        self._commands += 1
        name = CommandId(f"c{self.port}-{self._commands}")
        await self.send(Command(token or self.token, name, 1, order))
        await self.wait(lambda: self._result(name) is not None)
        result = self._result(name)
        assert result is not None
        return result

    def _result(self, name: CommandId) -> CommandResult | None:
        return next((one for one in self.all(CommandResult) if one.command_id == name), None)

    def all(self, kind: type[M]) -> list[M]:
        return [message for message in self.heard if isinstance(message, kind)]

    async def wait(self, condition: Callable[[], object]) -> None:
        with trio.fail_after(STATE_DEADLINE_S):
            while not condition():
                await trio.sleep(0.02)

    async def wait_state(self, replica: ReplicaId, state: ReplicaState) -> ReplicaReport:
        await self.wait(lambda: replica in self.replicas and self.replicas[replica].state is state)
        return self.replicas[replica]

    async def drop(self) -> None:
        """Ends the present session."""
        if self._socket is not None:
            await self._socket.aclose(1001, "going away")

    async def serve(self, request: trio_websocket.WebSocketRequest) -> None:
        headers = dict(request.headers)
        if request.path != SESSION_PATH:
            await request.reject(404)
            return
        if headers.get(b"authorization") != f"Bearer {TOKEN}".encode():
            await request.reject(401)
            return
        self._socket = await request.accept()
        self.sessions += 1
        self.known = False
        try:
            while True:
                data = await self._socket.get_message()
                await self._take(decode(data.encode() if isinstance(data, str) else data))
        except trio_websocket.ConnectionClosed:
            self.known = False

    async def _take(self, message: Message) -> None:
        self.heard.append(message)
        match message:
            case AgentHello():
                await self.send(ServerHello(self.token.cluster_id, self.token.owner, "0.1.0", heartbeat_s=0.5))
                await self.send(LeaderHello(self.token))
            case Inventory(_, replicas, epoch, owner):
                self.replicas = {report.order.id: report for report in replicas}
                self.known = self.known or (epoch, owner) == (self.token.epoch, self.token.owner)
            case Heartbeat(_, changed):
                self.replicas |= {report.order.id: report for report in changed}
            case ReplicaChanged(report):
                self.replicas[report.order.id] = attrs.evolve(report)


@asynccontextmanager
async def control_plane(port: int = 0, **options: int | str) -> AsyncIterator[ControlPlane]:
    """Serves until the block ends; then its sessions are cut."""
    async with trio.open_nursery() as nursery:
        made = ControlPlane(port, **options)  # type: ignore[arg-type]
        server = await nursery.start(
            lambda task_status: trio_websocket.serve_websocket(
                made.serve, "127.0.0.1", port, None, max_message_size=MESSAGE_BYTES_MAX, task_status=task_status
            )
        )
        made.port = server.port
        yield made
        nursery.cancel_scope.cancel()
