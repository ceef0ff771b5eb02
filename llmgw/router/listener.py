"""Opens the public port, takes connections and gives each its task. Owns the one nursery of the data path.

Listening sockets carry a TCP user timeout, which accepted ones inherit: a peer that vanished without a word is dropped by the
kernel, whatever waits for it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
import stat
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

import trio

from llmgw.domain.errors import Conflict, Invalid, Unavailable
from llmgw.domain.files import UNUSABLE_FILE, unusable, words
from llmgw.router.lengths import learn_forever
from llmgw.router.load import poll_forever
from llmgw.router.proxy import Connection
from llmgw.router.router import Router
from llmgw.router.sweeper import Swept, sweep_forever
from llmgw.settings.address import TcpAddress, UnixAddress, parse_listen

BACKLOG: Final = 4096  # chosen: a burst of clients after a restart; the kernel caps it by somaxconn
ACCEPTS_PER_TURN: Final = 64  # connections taken before those that are open get their turn
USER_TIMEOUT_MS: Final = 120_000  # chosen: twice a mobile network's worst gap; the kernel drops a peer that is silent for longer
BAD_CERTIFICATE: Final = "bad_certificate"
PEM_BYTES_MAX: Final = 1024 * 1024  # chosen: a chain of certificates has a few KiB; a wrong path such as /dev/zero does not fill memory
EMFILE_PAUSE_S: Final = 0.1  # out of descriptors: some will be closed; accepting in a busy loop would not help


async def serve(
    router: Router,
    listen: str,
    tls: ssl.SSLContext | None = None,
    *,
    inherited: Sequence[socket.socket] = (),
    begin: trio.Event | None = None,
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serves until it is cancelled or the router is drained. Reports the real address (`host:port`, `[v6]:port`, `unix:/path`).

    `begin`: until it is set, clients wait in the kernel's queue: the port is open, and nobody is told that nothing can serve.
    `inherited`: listening sockets that are used in place of `listen`; they are closed here, and whoever opened them keeps them open.
    Raises Invalid for an address that is none, Conflict when it is taken, Unavailable when it cannot be opened.
    """
    if inherited:
        sockets = list(inherited)
        for sock in sockets:
            sock.setblocking(False)
            _set_options(sock)
    else:
        sockets = open_listeners(listen)
    close = _close_inherited if inherited else close_own
    try:
        router.loopback = all(_is_loopback(sock) for sock in sockets)
        router.reactor.open()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(router.reactor.run)
            nursery.start_soon(sweep_forever, router.machine, lambda: _swept(router))
            nursery.start_soon(learn_forever, router.machine, router.states, router.report_length_bug)
            nursery.start_soon(poll_forever, router.machine, router.polled, router.report_poll_bug)
            for sock in sockets:
                nursery.start_soon(_accept, router, sock, tls, nursery, begin)
            router.stop_listening = lambda: _stop_listening(sockets, close)
            task_status.started(shown(sockets[0]))
            await router.emptied.wait()
            nursery.cancel_scope.cancel()
    finally:
        for sock in sockets:
            close(sock)
        for state in router.states():
            state.close_idle()
        router.reactor.close()


def _stop_listening(sockets: list[socket.socket], close: Callable[[socket.socket], None]) -> None:
    """From here on new connections are refused by the kernel; on inherited sockets they wait for the process that comes next."""
    for sock in sockets:
        if sock.fileno() >= 0:
            trio.lowlevel.notify_closing(sock)
        close(sock)


def _swept(router: Router) -> Iterable[Swept]:
    return [router, *router.connections]


async def _accept(router: Router, sock: socket.socket, tls: ssl.SSLContext | None, nursery: trio.Nursery, begin: trio.Event | None) -> None:
    if begin is not None:
        await begin.wait()
    while True:
        if router.is_full:
            await router.wait_room()
        for _ in range(ACCEPTS_PER_TURN):
            if router.is_full:
                break  # somebody at the door is waited for first: only then does anybody wait
            try:
                accepted, _ = sock.accept()
            except BlockingIOError:
                break
            except OSError as err:
                if sock.fileno() < 0:
                    return  # draining
                if err.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    await router.machine.sleep_until(router.machine.now_s() + EMFILE_PAUSE_S)
                break  # the client gave up before it was taken
            accepted.setblocking(False)
            if tls is not None:
                try:
                    accepted = tls.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False)
                except OSError:  # it is gone already
                    accepted.close()
                    continue
            connection = Connection(router, accepted)
            router.connections.add(connection)
            nursery.start_soon(_serve, router, connection)
        else:
            await trio.lowlevel.checkpoint()
            continue
        try:
            await trio.lowlevel.wait_readable(sock)
        except (trio.ClosedResourceError, ValueError):
            return  # draining


async def _serve(router: Router, connection: Connection) -> None:
    try:
        await connection.run()
    finally:
        router.left(connection)


def public_tls(certificate: str, key: str) -> ssl.SSLContext:
    """What the public port presents. Raises Invalid when the files cannot be read or do not belong together."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _check_pem("certificate", certificate, b"-----BEGIN CERTIFICATE-----")
    _check_pem("key", key, b"PRIVATE KEY-----")
    try:
        context.load_cert_chain(certificate, key, _no_password)
    except (OSError, ValueError) as err:
        if getattr(err, "reason", None) == "KEY_VALUES_MISMATCH":
            raise Invalid(f"the key {key} is not that of the certificate {certificate}", code=BAD_CERTIFICATE) from err
        if isinstance(err, _Encrypted):
            raise Invalid(f"the key {key} is encrypted; write it without a password", code=BAD_CERTIFICATE) from err
        why = words(err) if isinstance(err, ssl.SSLError) and err.reason else "one of them is damaged"
        raise Invalid(f"the certificate {certificate} and its key {key} cannot be used: {why}", code=BAD_CERTIFICATE) from err
    return context


def _check_pem(what: str, path: str, mark: bytes) -> None:
    """What TLS says of a file that it cannot use names neither the file nor what is wrong with it."""
    try:
        with open(path, "rb") as file:
            found = mark in file.read(PEM_BYTES_MAX)
    except OSError as err:
        raise Invalid(f"the {what} {path} cannot be read: {err.strerror}", code=BAD_CERTIFICATE) from err
    if not found:
        raise Invalid(f"the {what} {path} holds no {what} in PEM form", code=BAD_CERTIFICATE)


def _no_password() -> str:
    """Asked for where a key is encrypted; without this the library would ask on the terminal and wait."""
    raise _Encrypted


class _Encrypted(ValueError):
    """A key that only a password opens."""


def open_listeners(listen: str) -> list[socket.socket]:
    """Non-blocking listening sockets for an address. Raises Invalid, Conflict, Unavailable."""
    address = _parsed(listen)
    return [_unix(address.path)] if isinstance(address, UnixAddress) else _tcp(address)


def _parsed(listen: str) -> TcpAddress | UnixAddress:
    try:
        return parse_listen(listen)
    except ValueError as err:
        raise Invalid(f"router.listen: {err}", param="router.listen") from err


def open_shared(listen: str, workers: int) -> list[list[socket.socket]]:
    """Listening sockets for each of so many workers: TCP ports are bound once for each, and the kernel spreads connections over them;
    a Unix socket is one for all. Raises Invalid, Conflict, Unavailable.

    A port that another program has is refused as for one process, also where that program would share it.
    """
    address = _parsed(listen)
    if isinstance(address, UnixAddress):
        shared = _unix(address.path)
        return [[shared] for _ in range(workers)]
    claims = _tcp(address, listens=False)
    opened: list[list[socket.socket]] = []
    try:
        for _ in range(workers):
            opened.append([])
            for claim in claims:
                opened[-1].append(open_beside(claim))
    except OSError as err:
        for sockets in opened:
            for sock in sockets:
                sock.close()
        raise Unavailable(f"cannot listen on {address}: {err.strerror or err}") from err
    finally:
        for claim in claims:
            claim.close()
    return opened


def open_beside(other: socket.socket) -> socket.socket:
    """One more listening socket for the address of another, for one more process. Raises OSError."""
    sock = socket.socket(other.family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if other.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, other.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY))
        _set_options(sock)
        sock.bind(other.getsockname())
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def _tcp(address: TcpAddress, *, listens: bool = True) -> list[socket.socket]:
    try:
        rows = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as err:
        raise Unavailable(f"cannot listen on {address}: {err.strerror or err}") from err
    opened: list[socket.socket] = []
    try:
        for family, where in dict.fromkeys((row[0], row[4]) for row in rows):
            if address.port == 0 and opened:
                break  # a second family would get another port
            sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            opened.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1 if address.host != "::" else 0)
            _set_options(sock)
            sock.bind(where)
            if listens:
                sock.listen(BACKLOG)
    except OSError as err:
        for sock in opened:
            sock.close()
        if err.errno == errno.EADDRINUSE:
            raise Conflict(f"cannot listen on {address}: the port is taken by another program", code="port_taken") from err
        raise Unavailable(f"cannot listen on {address}: {err.strerror or err}") from err
    return opened


def _set_options(sock: socket.socket) -> None:
    """What accepted connections take over from the socket they came in by."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)


def _unix(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        _clear_stale(path)
        sock.bind(path)
        sock.listen(BACKLOG)
    except OSError as err:
        sock.close()
        if err.errno == errno.EADDRINUSE:
            raise Conflict(f"cannot listen on unix:{path}: it is taken by another program", code="port_taken") from err
        raise unusable(err, "the socket to listen on", Path(path)) from err
    except Invalid:
        sock.close()
        raise
    return sock


def _clear_stale(path: str) -> None:
    """Takes away the socket of a process that is no more; a living one's stays.

    Raises Invalid for anything that is no socket, which stays too: it may be a file that somebody needs.
    """
    if not _is_socket(path):
        if os.path.lexists(path):
            raise Invalid(
                f"cannot listen on unix:{path}: what is there is no socket; move it away, or name another path", code=UNUSABLE_FILE
            )
        return
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        if probe.connect_ex(path) == errno.ECONNREFUSED:
            os.unlink(path)
    finally:
        probe.close()


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def close_own(sock: socket.socket) -> None:
    """The socket, and a Unix socket's name with it, unless somebody has put something else there meanwhile."""
    if sock.fileno() < 0:
        return
    with contextlib.suppress(OSError):
        if sock.family == socket.AF_UNIX and _is_socket(sock.getsockname()):
            os.unlink(sock.getsockname())
    sock.close()


def _close_inherited(sock: socket.socket) -> None:
    """Our hold on it alone: a Unix socket's name belongs to whoever made it."""
    sock.close()


def _is_loopback(sock: socket.socket) -> bool:
    if sock.family == socket.AF_UNIX:
        return True
    host = sock.getsockname()[0]
    return bool(host == "::1" or host.startswith("127."))


def shown(sock: socket.socket) -> str:
    """Its address: `host:port`, `[v6]:port`, `unix:/path`."""
    if sock.family == socket.AF_UNIX:
        return f"unix:{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
