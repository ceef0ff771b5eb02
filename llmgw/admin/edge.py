"""The first look at every request of the admin port, before any framework: what is refused whatever the route.

Holds the sessions of agents and routers apart from the rest, keeps a crash of ours from reaching a client as anything but an
error, and knows when the server drains.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import structlog
import trio

from llmgw.admin.errors import error_body
from llmgw.admin.limits import Limits

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
App = Callable[[Any, Any, Any], Awaitable[None]]

CONTROL_PLANE: Final = "x-llmgw-control-plane"  # in every answer of an admin port: whoever calls it knows that it met one
CONTROL_PLANE_VALUE: Final = "1"
HEADER_OVERHEAD: Final = 4  # ": " and the line's end, as they came over the wire
LINE_OVERHEAD: Final = 12  # two spaces, HTTP/1.1 and the line's end
log = structlog.get_logger("llmgw.admin")


class AdminApp:
    """The whole admin port as one ASGI application.

    `http` answers requests, `sessions` holds what serves each path of WebSockets, `relay` serves what the playground asks of the
    router (below `relayed`).
    """

    def __init__(self, http: App, sessions: Mapping[str, App], relay: App, relayed: str, draining: trio.Event, limits: Limits) -> None:
        self._http = http
        self._sessions = sessions
        self._relay = relay
        self._relayed = relayed
        self.draining = draining
        self.ended = trio.Event()  # set by whoever serves this app, once nothing of it runs any more
        self.open_connections = 0  # kept by whoever serves this app
        self.limits = limits

    def drain(self) -> None:
        """Begin to end: streams say goodbye, idle connections close. May be called twice."""
        self.draining.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return
        began = False

        async def watched_send(message: dict[str, Any]) -> None:
            nonlocal began
            began = True
            await send(message)

        try:
            await self._serve(scope, receive, watched_send)
        except Exception as err:  # the last line: a client sees an error of ours, and the log sees the cause
            log.error("a request of the admin port crashed", path=scope.get("path"), exc_info=err)
            if not began:
                message = "something went wrong on this control plane; its log says what"
                await answer(scope, receive, send, 500, error_body("broken", "broken", message))

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = refusal(scope, self.limits.head_bytes)
        if refused is not None:
            status, code, message = refused
            await answer(scope, receive, send, status, error_body("not_found" if status == 404 else "invalid", code, message))
        elif scope["type"] == "http" and scope["path"].startswith(self._relayed):
            await self._relay(scope, receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        elif (session := self._sessions.get(scope["path"])) is not None:
            await session(scope, receive, send)
        else:
            body = error_body("not_found", "not_found", f"no WebSocket is offered here; there are {', '.join(self._sessions)}")
            await answer(scope, receive, send, 404, body)


def refusal(scope: Scope, head_bytes_max: int) -> tuple[int, str, str] | None:
    """(status, code, message) for a request that no route is asked about, or None."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    line = len(scope.get("method", "GET")) + len(scope["raw_path"]) + len(scope["query_string"]) + LINE_OVERHEAD
    if line + sum(len(name) + len(value) + HEADER_OVERHEAD for name, value in headers) > head_bytes_max:
        return 431, "header_too_large", f"the request line and headers are over {head_bytes_max} bytes"
    if scope["http_version"] not in ("1.0", "1.1"):
        return 400, "http_version", "only HTTP/1.1 is spoken on this port"
    names = [name.lower() for name, _ in headers]
    if b"transfer-encoding" in names and b"content-length" in names:
        # whoever stands in front of us may believe the other of the two: the rest of the connection would be misread
        return 400, "two_framings", "a request has Transfer-Encoding or Content-Length, not both"
    if scope["type"] == "websocket" and (b"transfer-encoding" in names or b"content-length" in names):
        return 400, "malformed_request", "a WebSocket's handshake has no body"
    if not scope["raw_path"].startswith(b"/"):
        return 400, "malformed_request", "the request's target is a path that begins with /"
    if scope["raw_path"].startswith(b"//"):  # the framework would take //x for /x
        return 404, "not_found", "there is nothing at a path that begins with two slashes"
    return None


async def answer(
    scope: Scope, receive: Receive, send: Send, status: int, body: dict[str, Any], extra: list[tuple[bytes, bytes]] | None = None
) -> None:
    """A whole answer, and the end of the connection. What the client still sends is taken and dropped meanwhile."""
    data = json.dumps(body).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(data)).encode()),
        (b"connection", b"close"),
        (CONTROL_PLANE.encode(), CONTROL_PLANE_VALUE.encode()),
        *(extra or []),
    ]
    kind = "websocket.http.response" if scope["type"] == "websocket" else "http.response"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_drop, receive)
        await send({"type": f"{kind}.start", "status": status, "headers": headers})
        await send({"type": f"{kind}.body", "body": data, "more_body": False})
        nursery.cancel_scope.cancel()


async def _drop(receive: Receive) -> None:
    while (await receive())["type"] not in ("http.disconnect", "websocket.disconnect"):
        pass
