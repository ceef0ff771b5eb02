"""The admin port: sockets opened with a time limit on silent readers, connections counted, and an end that always comes.

The caller owns the task and says when to drain; nothing here knows what is served.
"""

from __future__ import annotations

import errno
import math
import os
import socket
import ssl
import stat
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, cast

import structlog
import trio
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import AppWrapper

from llmgw.admin.connection import Connection, Stream, hypercorn_config
from llmgw.admin.door import Told
from llmgw.admin.edge import AdminApp
from llmgw.admin.limits import Limits
from llmgw.domain.errors import Conflict, Invalid, Unavailable
from llmgw.protocol.codec import MESSAGE_BYTES_MAX
from llmgw.settings.address import TcpAddress, UnixAddress, parse_listen

BACKLOG: Final = 512  # connections that wait to be accepted: a fleet of agents may come back at once
log = structlog.get_logger("llmgw.admin")


def bind_admin(listen: str | TcpAddress | UnixAddress, send_stall_s: float = Limits().send_stall_s) -> list[socket.socket]:
    """Listening sockets for every address that the name stands for. Raises `Unavailable` (port_taken, ...) and `Invalid`.

    `listen` may be the text of a file: host:port, [v6]:port, unix:/path. The caller closes them, or gives them to `serve_admin`.

    TCP_USER_TIMEOUT is set here and inherited by what is accepted: the kernel lets go of a peer that takes nothing, also
    where a cancel cannot reach.
    """
    address = _parse(listen) if isinstance(listen, str) else listen
    if isinstance(address, UnixAddress):
        return [_open_unix(address)]
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as err:
        raise Invalid(f"the host of {address} cannot be found: {err.strerror}", code="unknown_host") from err
    opened: list[socket.socket] = []
    try:
        for family, kind, protocol, _, where in dict.fromkeys(found):
            one = socket.socket(family, kind, protocol)
            opened.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(send_stall_s * 1000))
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            if not where[1] and len(opened) > 1:  # port 0: the kernel's choice for the first holds for all
                where = (where[0], opened[0].getsockname()[1], *where[2:])
            one.bind(where)
            one.listen(BACKLOG)
            one.setblocking(False)
    except OSError as err:
        for one in opened:
            one.close()
        raise _not_opened(address, err) from err
    return opened


def _parse(text: str) -> TcpAddress | UnixAddress:
    try:
        return parse_listen(text)
    except ValueError as err:
        raise Invalid(str(err), param="admin_listen") from err


def _open_unix(address: UnixAddress) -> socket.socket:
    one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            if not stat.S_ISSOCK(os.lstat(address.path).st_mode):
                raise OSError(errno.EEXIST, "what is there is no socket; move it away, or name another path")
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(address.path) == 0:
                    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
            os.unlink(address.path)  # left behind by a process that was killed
        except FileNotFoundError:
            pass
        one.bind(address.path)
        os.chmod(address.path, 0o600)
        one.listen(BACKLOG)
        one.setblocking(False)
    except OSError as err:
        one.close()
        raise _not_opened(address, err) from err
    return one


def _not_opened(address: TcpAddress | UnixAddress, err: OSError) -> Conflict | Unavailable:
    if err.errno == errno.EADDRINUSE:
        return Conflict(f"cannot listen on {address}: the port is taken by another program", code="port_taken")
    return Unavailable(f"cannot listen on {address}: {err.strerror or err}", code="cannot_listen")


async def serve_admin(
    app: AdminApp,
    sockets: Sequence[socket.socket],
    *,
    tls: ssl.SSLContext | None = None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serves `app` on listening sockets, which it closes. Says started() when connections are taken.

    Ends in order some time after `app.drain()`, and `app.ended` says so: no new connections, idle ones closed, answers under
    way are given `limits.drain_s`, then cut. A cancel ends at once, within `limits.send_stall_s` at the latest.
    """
    limits = app.limits
    config = hypercorn_config(limits, MESSAGE_BYTES_MAX)
    context = WorkerContext(None)
    empty = trio.Event()
    told = Told()

    async def asgi(scope: Any, receive: Any, send: Any, sync_spawn: Any, call_soon: Any) -> None:
        await app(scope, receive, send)

    async def handle(stream: Stream) -> None:
        app.open_connections += 1
        try:
            await Connection(cast(AppWrapper, asgi), config, context, limits, stream, told).run()
        except Exception as err:  # one client's connection must not end the others'
            log.error("a connection of the admin port crashed", exc_info=err)
        finally:
            app.open_connections -= 1
            if not app.open_connections and app.draining.is_set():
                empty.set()

    listeners: list[trio.SocketListener | trio.SSLListener[trio.SocketStream]] = []
    for one in sockets:
        plain = trio.SocketListener(trio.socket.from_stdlib_socket(one))
        listeners.append(plain if tls is None else trio.SSLListener(plain, tls, https_compatible=True))
    try:
        async with trio.open_nursery() as connections:
            async with trio.open_nursery() as accepting:
                await accepting.start(partial(trio.serve_listeners, handle, listeners, handler_nursery=connections))
                task_status.started()
                await app.draining.wait()
                accepting.cancel_scope.cancel()
            await context.terminated.set()
            if app.open_connections:
                with trio.move_on_after(limits.drain_s):
                    await empty.wait()
            connections.cancel_scope.cancel()
    finally:
        app.ended.set()
