"""A small control plane for tests of routers: it serves their session, leads, publishes lists, and notes what they say of them.

It holds no rule of its own. A list goes out as the product's would: whole at first, then as what makes it of the one before.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio
import trio_websocket

from llmgw.domain.endpoint import Endpoint, EndpointList, ListStamp
from llmgw.domain.ids import ClusterId, EndpointId, OwnerId
from llmgw.domain.lease import FencingToken
from llmgw.protocol import list_delta
from llmgw.protocol.codec import MESSAGE_BYTES_MAX, decode, encode
from llmgw.protocol.messages import Message
from llmgw.protocol.router_messages import (
    STANDING_S,
    AskEndpoints,
    PushDelta,
    PushEndpoints,
    RouterHello,
    RouterReport,
    RouterWelcome,
    Standing,
)
from llmgw.protocol.websocket import ROUTER_SESSION_PATH

TOKEN = "agent-token-of-a-test-0123456789"
STATE_DEADLINE_S = 90.0


class RouterControlPlane:
    """Leads one router. `acknowledged` is the newest generation that all of it acts on, `in_flight` what it last said of each endpoint.

    `asked` counts lists that the router could not be sure of and asked for whole. `news` is replaced at each report.
    """

    def __init__(self) -> None:
        self.port = 0
        self.token = FencingToken(ClusterId("cluster-1"), 1, OwnerId("ctl-a"))
        self.endpoints = EndpointList()
        self.generation = 0
        self.acknowledged = 0
        self.in_flight: dict[EndpointId, int] = {}
        self.sessions = 0
        self.asked = 0
        self.reports = 0
        self.heard_s = 0.0  # when the last report came, on the monotonic clock
        self.news = trio.Event()
        self._socket: trio_websocket.WebSocketConnection | None = None
        self._out = trio.Lock()  # lists go out in the order of their generations

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def publish(self, *endpoints: Endpoint) -> int:
        """The generation of the list; the router has been sent it at the return, if it is there."""
        before, self.endpoints = self.endpoints, EndpointList(tuple(sorted(endpoints, key=lambda one: one.id)))
        self.generation += 1
        generation = self.generation
        change = list_delta.delta(before, self.endpoints)
        assert change is not None, "rows are in order"
        await self._send(PushDelta(ListStamp(self.token, generation), change, push=generation))
        return generation

    async def wait_acknowledged(self, generation: int) -> float:
        """Until every worker acts on this list or a later one. When the control plane heard that, on the monotonic clock."""
        await self.wait(lambda: self.acknowledged >= generation, f"list {generation} is acknowledged")
        return self.heard_s

    async def wait_drained(self, endpoint: EndpointId) -> None:
        """Until the router counts no request at an endpoint that it has acknowledged the withdrawal of."""
        await self.wait(lambda: self.in_flight.get(endpoint, 0) == 0, f"{endpoint} is drained")

    async def wait(self, condition: Callable[[], object], what: str) -> None:
        """Looks anew at each report. Raises AssertionError naming what never came."""
        with trio.move_on_after(STATE_DEADLINE_S):
            while not condition():
                await self.news.wait()
            return
        raise AssertionError(f"never came: {what}")

    async def serve(self, request: trio_websocket.WebSocketRequest) -> None:
        if request.path != ROUTER_SESSION_PATH:
            await request.reject(404)
            return
        if dict(request.headers).get(b"authorization") != f"Bearer {TOKEN}".encode():
            await request.reject(401)
            return
        socket = await request.accept()
        try:
            greeting = decode(_bytes(await socket.get_message()))
            assert isinstance(greeting, RouterHello)
            await socket.send_message(encode(RouterWelcome(self.token.cluster_id, self.token.owner, self.token.epoch, True, "0.1.0")))
            self._socket = socket
            self.sessions += 1
            await self._send_whole()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._stand)
                while True:
                    await self._take(decode(_bytes(await socket.get_message())))
        except* trio_websocket.ConnectionClosed:
            self._socket = None

    async def _stand(self) -> None:
        while True:
            await trio.sleep(STANDING_S)
            await self._send(Standing(self.token, self.generation))

    async def _take(self, message: Message) -> None:
        match message:
            case RouterReport(_, acknowledged, use, gone, full):
                if full:
                    self.in_flight.clear()
                self.in_flight |= {row.endpoint: row.use.in_flight for row in use}
                for endpoint in gone:
                    self.in_flight.pop(endpoint, None)
                if acknowledged is not None:
                    self.acknowledged = acknowledged.generation
                self.heard_s = time.monotonic()
                self.reports += 1
                self.news.set()
                self.news = trio.Event()
            case AskEndpoints():
                self.asked += 1
                await self._send_whole()

    async def _send_whole(self) -> None:
        await self._send(PushEndpoints(ListStamp(self.token, self.generation), self.endpoints, push=self.generation))

    async def _send(self, message: Message) -> None:
        async with self._out:
            if self._socket is not None:
                try:
                    await self._socket.send_message(encode(message))
                except trio_websocket.ConnectionClosed:  # it is told all of it in its next session
                    self._socket = None


def _bytes(data: str | bytes) -> bytes:
    return data.encode() if isinstance(data, str) else data


@asynccontextmanager
async def router_control_plane() -> AsyncIterator[RouterControlPlane]:
    """Serves until the block ends; then its session is cut."""
    async with trio.open_nursery() as nursery:
        made = RouterControlPlane()
        server = await nursery.start(
            lambda task_status: trio_websocket.serve_websocket(
                made.serve, "127.0.0.1", 0, None, max_message_size=MESSAGE_BYTES_MAX, task_status=task_status
            )
        )
        made.port = server.port
        yield made
        nursery.cancel_scope.cancel()
