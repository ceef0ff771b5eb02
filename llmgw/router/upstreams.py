"""Connections to engines: opening, keeping, dropping them, and what is known of each endpoint. Never reads HTTP.

A pooled connection that dies, or on which bytes come that nobody asked for, is dropped at once (the reactor tells). Every
connection belongs to the endpoint state it was opened for; when an endpoint is withdrawn or moves, its state is retired and
nothing new is sent there.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import select
import socket
import ssl
from collections import deque
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from llmgw.domain.endpoint import Endpoint, EndpointUse
from llmgw.domain.ports import Machine
from llmgw.router import breaker
from llmgw.router.body import Piece
from llmgw.router.breaker import Breaker, Outcome
from llmgw.router.cells import Cell
from llmgw.router.engine_load import EngineLoad
from llmgw.router.http1 import READ_BYTES, AnswerHead, Heads
from llmgw.router.reactor import READ, Reactor, Source
from llmgw.router.sweeper import Waiter

POOL_IDLE_S: Final = 4.0  # below the keep-alive limit of uvicorn (5 s), which most engines use
POOL_IDLE_MAX: Final = 256  # per endpoint, chosen: above any batch size we know of; more are closed after use
RESOLVED_S: Final = 30.0  # how long a name's addresses are kept; chosen: a moved engine is found within half a minute
OUTCOMES_KEPT: Final = 10  # domain.endpoint.EndpointUse
TRIED_ADDRESSES_MAX: Final = 3
IMPATIENT_S: Final = 5.0  # chosen: a client that leaves sooner without a byte says nothing about the engine


class Unreachable(Exception):
    """No connection could be made. `refused`: nothing listens there. `local`: this machine is out of something, not the engine."""

    def __init__(self, text: str, *, refused: bool = False, local: bool = False) -> None:
        super().__init__(text)
        self.refused = refused
        self.local = local


class User:
    """Whom a connection serves now. A class and no protocol: compiled, calls of it are direct."""

    __slots__ = ()

    def engine_ready(self, events: int) -> None:
        """Something has happened on the connection: bits of `reactor`. Must not wait."""
        raise NotImplementedError

    def failed(self, error: Exception) -> None:
        """`engine_ready` has raised: a fault of ours."""
        raise NotImplementedError


class Upstream(Source):
    """One connection to an engine. `reused`: it has carried an answer before. `user`: whom it serves; None while it is pooled."""

    __slots__ = ("_poll", "descriptor", "idle_since_s", "reused", "secure", "sock", "state", "user", "waiter")

    def __init__(self, sock: socket.socket, state: EndpointState, waiter: Waiter) -> None:
        super().__init__()
        self.sock = sock
        self.descriptor = sock.fileno()
        self.secure = False
        self.state = state
        self.reused = False
        self.idle_since_s = 0.0
        self.user: User | None = None
        self._poll = select.poll()
        self._poll.register(self.descriptor, select.POLLIN | select.POLLRDHUP)
        self.waiter: Waiter | None = waiter  # whose task waits for it: until it stands, or for good where it is in no pool

    def ready(self, events: int) -> None:
        if self.user is not None:
            self.user.engine_ready(events)
        elif self.waiter is not None:
            self.waiter.wake()
        elif events & READ and not self.fresh():  # while it was pooled
            self.state.drop(self)

    def failed(self, error: Exception) -> None:
        if self.user is not None:
            self.user.failed(error)
        else:
            self.state.drop(self)

    def receive(self) -> bytes | None:
        """What is there; b"" when the engine has closed, None when nothing is there yet. Raises OSError."""
        try:
            return self.sock.recv(READ_BYTES)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None

    def send(self, data: bytes | memoryview) -> int:
        """How many bytes were taken, 0 when it would block. Raises OSError."""
        try:
            return self.sock.send(data)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return 0

    def send_pieces(self, several: list[Piece]) -> int:
        """How many bytes of all of them were taken, 0 when it would block. Not over TLS. Raises OSError."""
        try:
            return self.sock.sendmsg(several)
        except BlockingIOError:
            return 0

    def acknowledge_rarely(self) -> None:
        """From here on the kernel tells the engine of every second piece that it has come, and not of each at once: a packet less costs
        about 1 us less. Only for engines that do not wait for it (by Nagle's algorithm) before they send the next piece. The kernel goes
        back to its own way by itself where no second piece comes within 40 ms.
        """
        with contextlib.suppress(OSError):
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)

    def fresh(self) -> bool:
        """Is a pooled connection still open and silent? Bytes that nobody asked for spoil it."""
        if not self.secure:
            return not self._poll.poll(0)  # a third of what a look with recv costs, which raises where nothing is there
        try:
            return self.receive() is None
        except OSError:
            return False

    def close(self) -> None:
        """Idempotent."""
        self.user = self.waiter = None
        if self.descriptor >= 0:
            self.state.reactor.remove(self.descriptor)
            self.descriptor = -1
            self.sock.close()


class EndpointState:
    """What the router knows of one endpoint at one address with one key. Owns its pooled connections.

    `running` are this process's own requests there; `cell` is where it counts them for the router's other workers to see. `heads` is
    what endpoints have told that it may share.
    """

    def __init__(
        self, endpoint: Endpoint, reactor: Reactor, now_s: float, cell: Cell | None = None, heads: Heads[AnswerHead] | None = None
    ) -> None:
        self.endpoint = endpoint
        self.reactor = reactor
        self.heads: Heads[AnswerHead] = Heads(heads)
        self.running = 0
        self._cell = cell
        self.promised = 0  # places kept for those who waited for one (`turns`)
        self.engine_load: EngineLoad | None = None  # set by `load`
        self.polled = False  # is its engine asked for its load?
        self.lengths: Mapping[str, int] = {}  # tokens that its models take at most, by its own names; set by `lengths`
        self.breaker: Breaker = breaker.CLOSED
        self.out_since_s: float | None = None  # as it was last told: since when it is out of use
        self.resting_until_s = 0.0
        self.last_used_at_s = now_s
        self.used = False
        self.refused = False
        self.retired = False
        self.tells_usage = True  # until it has taken a request without our question that it had refused with it
        self.requests = 0
        self.failures = 0
        self.outcomes: deque[bool] = deque(maxlen=OUTCOMES_KEPT)  # True: a 5xx
        self.unanswered = 0  # attempts in a row that brought no byte
        self._began_at_s: dict[object, float] = {}  # of those in flight, the oldest first
        self._heard_at_s: float | None = None  # when a byte or an end last came of any
        self.idle: list[Upstream] = []
        split = urlsplit(endpoint.url)
        self.tls = split.scheme == "https"
        self.host = split.hostname or ""
        self.port = split.port or (443 if self.tls else 80)
        self.base = split.path.rstrip("/").removesuffix("/v1").encode("ascii", "replace")  # routes bring their own /v1
        self.host_header = split.netloc.rpartition("@")[2].encode("idna" if not split.netloc.isascii() else "ascii")
        key = endpoint.key.encode("utf-8", "surrogateescape")
        lines = b"host: %b\r\naccept-encoding: identity\r\ncontent-type: application/json\r\n" % self.host_header
        bearer = b"authorization: Bearer %b\r\n" % key if key else b""
        self._lines = lines + bearer
        self._lines_anthropic = (lines + b"x-api-key: %b\r\n" % key if key else lines) + bearer
        self._addresses: list[tuple[int, tuple[str, int]]] = []
        self._resolved_at_s = -RESOLVED_S

    def head_lines(self, anthropic: bool) -> bytes:
        """The header lines that every request to this endpoint has."""
        return self._lines_anthropic if anthropic else self._lines

    # --- what is counted

    @property
    def in_flight(self) -> int:
        """Requests there now, those of the router's other workers too: what choosing goes by."""
        return self.running if self._cell is None else self._cell.total()

    def _count(self, number: int) -> None:
        self.running += number
        if self._cell is not None:
            self._cell.add(number)

    def began(self, exchange: object, now_s: float) -> None:
        """A request is given to this endpoint. Balanced by `left`, in a `finally`."""
        self._count(1)
        self.requests += 1
        self.used = True
        self.last_used_at_s = now_s
        self._began_at_s[exchange] = now_s
        if self.breaker is not breaker.CLOSED:
            self.breaker = self.breaker.began(now_s)

    def heard(self, now_s: float) -> None:
        """A byte came."""
        self._heard_at_s = now_s
        self.unanswered = 0

    def left(self, exchange: object, outcome: Outcome, now_s: float, *, heard: bool, failures_max: int, cooldown_s: float) -> None:
        """The request is over there, however it ended. `heard`: the engine gave at least a byte."""
        self._count(-1)
        self.last_used_at_s = now_s
        waited_s = now_s - self._began_at_s.pop(exchange, now_s)
        if heard:
            self.unanswered = 0
            if outcome in (Outcome.ANSWERED, Outcome.FAILED):  # the engine ended it
                self._heard_at_s = now_s
        elif outcome is not Outcome.LEFT or waited_s >= IMPATIENT_S:
            self.unanswered += 1
        if outcome is not Outcome.ANSWERED or self.breaker is not breaker.CLOSED:
            self.breaker = self.breaker.ended(outcome, now_s, failures_max=failures_max, cooldown_s=cooldown_s)
        if outcome is Outcome.REFUSED:
            self.refused = True
        elif outcome is not Outcome.LEFT:
            self.refused = False
        if outcome in (Outcome.FAILED, Outcome.REFUSED, Outcome.SILENT):
            self.failures += 1

    def answered(self, status: int) -> None:
        """The engine gave a status."""
        self.outcomes.append(status >= 500)

    def use(self, now_s: float) -> EndpointUse:
        heard_s = None if self._heard_at_s is None else max(now_s - self._heard_at_s, 0.0)
        silent_s = max(now_s - next(iter(self._began_at_s.values()), now_s), 0.0)  # since the oldest began, or since a byte came of any
        return EndpointUse(
            self.running,
            max(now_s - self.last_used_at_s, 0.0),
            silent_s if heard_s is None else min(silent_s, heard_s),
            len(self.outcomes),
            sum(self.outcomes),
            self.refused,
            self.unanswered,
            heard_s,
        )

    # --- connections

    def take(self) -> Upstream | None:
        """A pooled connection that is still good, the youngest first."""
        while self.idle:
            upstream = self.idle.pop()
            if upstream.fresh():
                return upstream
            upstream.close()
        return None

    def keep(self, upstream: Upstream, now_s: float) -> None:
        """Puts a connection back after a whole answer; closes it where it is no longer wanted."""
        if self.retired or len(self.idle) >= POOL_IDLE_MAX:
            upstream.close()
            return
        upstream.user = None
        upstream.reused = True
        upstream.idle_since_s = now_s
        self.idle.append(upstream)

    def drop(self, upstream: Upstream) -> None:
        """A pooled connection is of no use any more."""
        if upstream in self.idle:
            self.idle.remove(upstream)
        upstream.close()

    def sweep(self, now_s: float) -> None:
        """Closes what has been idle for too long; the oldest stand first."""
        while self.idle and now_s - self.idle[0].idle_since_s > POOL_IDLE_S:
            self.idle.pop(0).close()

    def retire(self) -> None:
        """Withdrawn, or moved: nothing new is sent. What runs ends undisturbed."""
        self.retired = True
        self.close_idle()

    def close_idle(self) -> None:
        while self.idle:
            self.idle.pop().close()

    async def connect(self, machine: Machine, waiter: Waiter) -> Upstream:
        """A new connection. The caller's deadline bounds it. Raises Unreachable, Kicked."""
        last = Unreachable("its name has no address")
        for family, address in (await self._resolve(machine))[:TRIED_ADDRESSES_MAX]:
            try:
                return await self._connect_one(family, address, waiter)
            except OSError as err:
                if err.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL):
                    raise Unreachable(f"this machine can open no connection: {err.strerror or err}", local=True) from err
                if self._resolved_at_s != float("inf"):
                    self._resolved_at_s = -RESOLVED_S  # it may have moved: ask again next time
                refused = isinstance(err, ConnectionRefusedError)
                last = Unreachable(f"the connection failed: {err.strerror or err}", refused=refused)
        raise last

    async def _connect_one(self, family: int, address: tuple[str, int], waiter: Waiter) -> Upstream:
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        upstream = Upstream(sock, self, waiter)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            code = sock.connect_ex(address)
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, os.strerror(code))
            self.reactor.add(upstream.descriptor, upstream)
            while code in (errno.EINPROGRESS, errno.EALREADY):
                await waiter.wait()
                code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or sock.connect_ex(address)
            if code not in (0, errno.EISCONN):
                raise OSError(code, os.strerror(code))
            if self.tls:
                await self._handshake(upstream, waiter)
            upstream.waiter = None
        except BaseException:  # re-raised: whatever ended it, the descriptor must not leak
            upstream.close()
            raise
        return upstream

    async def _handshake(self, upstream: Upstream, waiter: Waiter) -> None:
        # The descriptor stays the same, and with it what the reactor knows of it.
        wrapped = _tls_context().wrap_socket(upstream.sock, server_hostname=self.host, do_handshake_on_connect=False)
        upstream.sock = wrapped
        upstream.secure = True
        while True:
            try:
                return wrapped.do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                await waiter.wait()

    async def _resolve(self, machine: Machine) -> list[tuple[int, tuple[str, int]]]:
        if not self._addresses:
            with contextlib.suppress(ValueError):
                literal = ipaddress.ip_address(self.host)
                family = socket.AF_INET6 if literal.version == 6 else socket.AF_INET
                self._addresses = [(family, (self.host, self.port))]
                self._resolved_at_s = float("inf")
        now_s = machine.now_s()
        if now_s - self._resolved_at_s < RESOLVED_S or self._resolved_at_s == float("inf"):
            return self._addresses
        try:
            rows = await machine.run_sync(lambda: socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM))
        except OSError as err:
            if self._addresses:  # the old answer is better than none
                return self._addresses
            raise Unreachable(f"its name cannot be resolved: {err.strerror or err}") from err
        found: list[tuple[int, tuple[str, int]]] = [(int(row[0]), (str(row[4][0]), self.port)) for row in rows]
        self._addresses = list(dict.fromkeys(found))
        self._resolved_at_s = now_s
        return self._addresses


def _tls_context() -> ssl.SSLContext:
    global _context
    if _context is None:
        _context = ssl.create_default_context()
        _context.set_alpn_protocols(["http/1.1"])
    return _context


_context: ssl.SSLContext | None = None  # loading the CA bundle costs 20 ms and more, so once and only where it is needed
