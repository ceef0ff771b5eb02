"""`/console/v1/…`: the playground's way to the router, which is of another origin and which the browser may not call.

Relays one request to one fixed address, piece by piece, for whoever is signed in to the console. A hang-up of the browser ends
the request at the router, and so in the engine. Reads nothing of what it relays.
"""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import Callable
from typing import Final

import attrs
import h11
import trio

from llmgw.admin.edge import Receive, Scope, Send, answer
from llmgw.admin.errors import body_of, error_body, headers_of
from llmgw.admin.limits import Limits
from llmgw.admin.sign_in import SignIn
from llmgw.domain.errors import Invalid, LlmgwError, NotFound, TooLarge, Unavailable, UpstreamFailed
from llmgw.settings.address import UnixAddress, parse_listen

PREFIX: Final = "/console/v1/"
CONNECT_S: Final = 2.0  # to this machine
SILENCE_S: Final = 900.0  # the router's own limits are far below; this ends a wait for a router that hangs
READ_BYTES: Final = 65_536
_PATH: Final = re.compile(rb"/v1/[A-Za-z0-9/_.:%~-]+\Z")
_ASKED: Final = (b"content-type", b"accept", b"authorization", b"x-request-id")
_ANSWERED: Final = re.compile(rb"(content-type|content-length|retry-after|x-request-id|x-accel-buffering|x-ratelimit-.*)\Z")
_ANY: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}
Stream = trio.SocketStream | trio.SSLStream[trio.SocketStream]


@attrs.frozen
class RouterAddress:
    """Where this machine's router listens, as its settings write it."""

    listen: str
    tls: bool = False


class Relay:
    """An ASGI application for paths below PREFIX. `router` is asked at each request; None: this control plane knows of none."""

    def __init__(self, sign_in: SignIn, router: Callable[[], RouterAddress | None], limits: Limits) -> None:
        self._sign_in = sign_in
        self._router = router
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._sign_in.check(scope["headers"], scope["method"])
            path = target(scope)
            body = await self._body(receive)
            address = self._router()
            if address is None:
                raise NotFound("this control plane knows of no router on its machine", code="no_router")
            stream = await connect(address)
        except LlmgwError as err:
            extra = [(name.lower().encode(), value.encode()) for name, value in headers_of(err).items()]
            await answer(scope, receive, send, err.status, body_of(err), extra)
            return
        async with stream, trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_on_hang_up, receive, nursery.cancel_scope)
            await _exchange(stream, scope, path, body, send)
            nursery.cancel_scope.cancel()

    async def _body(self, receive: Receive) -> bytes:
        body = b""
        with trio.move_on_after(self._limits.body_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Invalid("the client hung up", code="hung_up")
                body += bytes(message.get("body", b""))
                if len(body) > self._limits.body_bytes:
                    raise TooLarge("the request's body is too large")
                if not message.get("more_body", False):
                    return body
        raise Invalid("the request's body did not arrive in time", code="timeout")


def target(scope: Scope) -> bytes:
    """The path as the router is to see it. Raises NotFound for what is no plain path of the public API."""
    raw: bytes = scope["raw_path"]
    path = raw.removeprefix(b"/console")
    if scope["method"] not in ("GET", "POST") or _PATH.match(path) is None or b".." in path or b"//" in path or b"%2e" in path.lower():
        raise NotFound("there is nothing at this path of the public API")
    return path


async def connect(address: RouterAddress) -> Stream:
    """Raises Unavailable."""
    where = parse_listen(address.listen)
    try:
        with trio.fail_after(CONNECT_S):
            if isinstance(where, UnixAddress):
                plain = await trio.open_unix_socket(where.path)
            else:
                plain = await trio.open_tcp_stream(_ANY.get(where.host, where.host), where.port)
            if not address.tls:
                return plain
            context = ssl.create_default_context()
            context.check_hostname = False  # it is this machine; the certificate names the address that clients use
            context.verify_mode = ssl.CERT_NONE
            secured = trio.SSLStream(plain, context, https_compatible=True)
            await secured.do_handshake()
            return secured
    except (OSError, trio.TooSlowError, trio.BrokenResourceError) as err:
        raise Unavailable(f"no router answers at {address.listen}", code="no_router") from err


async def _cancel_on_hang_up(receive: Receive, scope: trio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


async def _exchange(stream: Stream, scope: Scope, path: bytes, body: bytes, send: Send) -> None:
    connection = h11.Connection(h11.CLIENT)
    headers = [(name, value) for name, value in scope["headers"] if name.lower() in _ASKED]
    headers += [(b"host", b"llmgw"), (b"connection", b"close"), (b"accept-encoding", b"identity")]
    if scope["method"] == "POST":
        headers.append((b"content-length", str(len(body)).encode()))
    head = connection.send(h11.Request(method=scope["method"], target=path, headers=headers)) or b""
    began = streaming = False
    try:
        with trio.fail_after(SILENCE_S):
            await stream.send_all(head + body)
        connection.send(h11.Data(data=body if scope["method"] == "POST" else b""))
        connection.send(h11.EndOfMessage())
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                with trio.fail_after(SILENCE_S):
                    connection.receive_data(bytes(await stream.receive_some(READ_BYTES)))
            elif isinstance(event, h11.Response):
                kept = [(name, value) for name, value in event.headers if _ANSWERED.match(name)]
                kept += [(b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]
                streaming = any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in kept)
                began = True
                await send({"type": "http.response.start", "status": event.status_code, "headers": kept})
            elif isinstance(event, h11.Data):
                await send({"type": "http.response.body", "body": bytes(event.data), "more_body": True})
            elif isinstance(event, h11.EndOfMessage):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return
            elif isinstance(event, h11.ConnectionClosed):
                raise h11.RemoteProtocolError("the router closed the connection")
    except (OSError, trio.BrokenResourceError, trio.TooSlowError, h11.RemoteProtocolError) as err:
        message = "the router ended the connection before the answer was whole"
        failed = error_body("unavailable", "router_lost", message)
        if not began:
            status = UpstreamFailed.status
            data = json.dumps(failed).encode()
            start = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
            await send({"type": "http.response.start", "status": status, "headers": start})
            await send({"type": "http.response.body", "body": data, "more_body": False})
        elif streaming:  # after the first byte an error is an event in the stream
            await send({"type": "http.response.body", "body": b"\n\ndata: " + json.dumps(failed).encode() + b"\n\n", "more_body": False})
        else:
            raise UpstreamFailed(message) from err
