"""One client connection: reads its requests, answers them, and carries each through the exchange with an engine.

One task per connection, linear: parse, decide, try, relay. Everything that is counted is taken with a scope. Until the
engine's first content another endpoint may be tried; from then on the only truth left to tell is the stream's own end.
"""

from __future__ import annotations

import contextlib
import math
import re
import socket
import ssl
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import attrs
import trio

from llmgw.domain.errors import Invalid, LlmgwError, NotFound, Overloaded, Unavailable
from llmgw.domain.ids import EndpointId
from llmgw.domain.policy import ApiKey, Policy
from llmgw.router import http1
from llmgw.router.body import Asked, inflate, is_json, read_body
from llmgw.router.breaker import Outcome
from llmgw.router.choose import Choice, Shortage, Why, choose
from llmgw.router.families import Family, Problem, Route, cut, error_body, error_event, family_of, problem_of
from llmgw.router.gate import BLOCK, Guard
from llmgw.router.http1 import Head, Request, RequestReader, ResponseReader
from llmgw.router.keys import ANONYMOUS
from llmgw.router.relay import READS_PER_TURN, BytesRelay, End, Ended, EventRelay, pull
from llmgw.router.retry import retry_after_s, retryable_status
from llmgw.router.sweeper import Kick, Kicked, Waiter
from llmgw.router.table import Candidate, Target
from llmgw.router.upstreams import READ_BYTES, EndpointState, Unreachable, Upstream

if TYPE_CHECKING:
    from llmgw.router.router import Router

HEAD_TIMEOUT_S: Final = 30.0  # chosen: a head of 16 KB at a modem's speed; ends who dribbles bytes to hold connections
LOCAL_TIMEOUT_S: Final = 30.0  # for sending an answer of our own to a client that reads slowly
LINGER_S: Final = 5.0  # after an early answer: how long what the client still sends is read and dropped, so that it sees the answer
ERROR_BODY_MAX: Final = 1024 * 1024  # bytes of an engine's error that are kept for the client
JOIN_MAX: Final = 16_384  # bytes; head and body go out in one piece below, in two above (router-measurements.md)
SEND_MAX: Final = 262_144  # bytes offered to the kernel at a time, so that an early answer is noticed between two
REST_DEFAULT_S: Final = 1.0  # for a 429 without Retry-After

_SANE_ID: Final = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}\Z")
# What of a client's head an engine may see; everything else stays here (cases.md, B170).
_FORWARDED: Final = frozenset(
    {b"accept", b"user-agent", b"traceparent", b"tracestate", b"openai-beta", b"anthropic-version", b"anthropic-beta"}
)
# What of an engine's head a client does not get: framing and hops are ours, and so are cookies, ids and CORS.
_WITHHELD: Final = frozenset(
    {
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer", b"transfer-encoding",
        b"upgrade", b"content-length", b"set-cookie", b"x-request-id", b"server", b"alt-svc", b"cache-control",
        b"x-accel-buffering", b"vary", b"strict-transport-security",
    }
)  # fmt: skip
_JSON: Final = (b"content-type", b"application/json")


class Exchange:
    """One request and what became of it: what the log line and the metrics are made of."""

    __slots__ = (
        "attempts", "close_after", "cors", "endpoint", "family", "first_s", "flags", "head", "id", "key", "model", "model_label", "path",
        "reason", "started_s", "status", "stream",
    )  # fmt: skip

    def __init__(self, head: Head | None, request_id: str, started_s: float) -> None:
        self.head = head
        self.id = request_id
        self.started_s = started_s
        self.path = head.target.partition(b"?")[0].decode("latin-1") if head is not None else ""
        self.family = family_of(self.path)
        self.cors: tuple[tuple[bytes, bytes], ...] = ()
        self.status = 0
        self.model = ""  # as the client named it
        self.model_label = ""  # as the table knows it, for metrics
        self.endpoint = ""
        self.key = ""
        self.stream = False
        self.first_s: float | None = None
        self.reason = ""
        self.flags: tuple[str, ...] = ()  # guard rules that found something and let it pass
        self.attempts = 0
        self.close_after = head is None or head.close


@attrs.define(eq=False)
class Call:
    """A request that is to be relayed. The body is let go with the first content: from then on nothing is sent again."""

    exchange: Exchange
    head: Head
    route: Route
    asked: Asked
    key: ApiKey
    policy: Policy

    def forget_body(self) -> None:
        self.asked = attrs.evolve(self.asked, body=b"")


@attrs.frozen
class Failure:
    """An attempt that gave the client nothing. `body` is the engine's own answer, where it gave one."""

    problem: Problem
    outcome: Outcome
    retry: bool
    body: bytes | None = None
    headers: tuple[tuple[bytes, bytes], ...] = ()
    withdrawn: bool = False  # the endpoint left the list while we connected: choosing again costs no retry


class Connection(Waiter):
    """A client's connection, for as long as it lasts. Its task is the only one that reads from or waits on its socket."""

    __slots__ = (
        "_admitted", "_call", "_comment_due_s", "_continued", "_first_byte", "_heard", "_held", "_idle_s", "_outbox", "_progress", "_seen",
        "_sending", "_state", "_total_deadline_s", "busy", "chunked", "descriptor", "exchange", "head_sent", "lingering", "peer_closed",
        "reader", "router", "sent_bytes", "sock",
    )  # fmt: skip

    def __init__(self, router: Router, sock: socket.socket) -> None:
        super().__init__()
        self.router = router
        self.sock = sock
        self.descriptor = sock.fileno()
        route = router.policy.route
        self.reader = RequestReader(route.max_header_bytes, route.max_body_bytes)
        self.exchange: Exchange | None = None
        self.busy = False
        self.lingering = False
        self.peer_closed = False
        self.head_sent = False
        self.chunked = False
        self.sent_bytes = 0
        self._admitted: Request | None = None
        self._continued: Request | None = None
        self._outbox = b""
        self._progress = 0
        self._seen = 0
        self._sending = False
        self._idle_s = 0.0
        self._first_byte = False
        self._heard = False
        self._total_deadline_s = math.inf
        self._comment_due_s = math.inf
        self._state: EndpointState | None = None
        self._held: Upstream | None = None
        self._call: Call | None = None

    # --- the connection's life

    async def run(self) -> None:
        """Serves the connection until it ends. Raises nothing but Cancelled."""
        self.router.hangups.watch(self.descriptor, self.gone)
        try:
            if isinstance(self.sock, ssl.SSLSocket):
                await self._handshake(self.sock)
            while await self._serve_one():
                if self.reader.finished:  # a client that sends many requests at once takes turns with the others
                    await trio.lowlevel.checkpoint()
        except Kicked:
            pass  # the client is gone, was silent for too long, or the router ends: nobody is left to tell
        except OSError:
            pass  # the client's connection broke
        finally:
            self.router.hangups.forget(self.descriptor)
            if not self.peer_closed and not self.lingering:
                self._say_goodbye()
            self.sock.close()

    async def _handshake(self, sock: ssl.SSLSocket) -> None:
        self.deadline_s = self.router.machine.now_s() + HEAD_TIMEOUT_S
        while True:
            try:
                return sock.do_handshake()
            except ssl.SSLWantReadError:
                await self.readable(self.descriptor)
            except ssl.SSLWantWriteError:
                await self.writable(self.descriptor)

    def gone(self) -> None:
        """The client has closed its side. Called by the hang-up watcher."""
        self.peer_closed = True
        if self.busy or self.lingering:
            self.kick(Kick.CLIENT_GONE)

    def close_idle(self) -> None:
        """The router is stopping: a connection without a request ends now, one with a request after its answer."""
        if not self.busy and self.reader.at_rest:
            self.kick(Kick.STOPPING)

    def sweep(self, now_s: float) -> None:
        """Called by the sweeper a few times a second."""
        if self._progress != self._seen:
            self._seen = self._progress
            if self._idle_s:
                self.deadline_s = now_s + self._idle_s
            if self._state is not None:
                self._state.heard(now_s)
        # A client that reads slowly is no silence of the engine: then only the limit for the whole counts.
        limit_s = self._total_deadline_s if self._sending else min(self.deadline_s, self._total_deadline_s)
        if now_s >= limit_s:
            self.kick(Kick.EXPIRED)
        elif now_s >= self._comment_due_s:
            self._comment(now_s)

    async def _serve_one(self) -> bool:
        """One request from its first byte to the end of its answer. False when the connection is over."""
        request = await self._next()
        if request is None:
            return False
        exchange = self._begin(request.head)
        try:
            try:
                await self._handle(request, exchange)
            except LlmgwError as err:
                await self._tell(exchange, problem_of(err))
        except Kicked as kick:
            self._mark(exchange, kick)
            raise
        finally:
            self._finish(exchange)
        if exchange.close_after or self.router.draining:
            if not self.reader.at_rest or self.reader.finished:
                await self._linger()
            return False
        return True

    def _mark(self, exchange: Exchange, kick: Kicked) -> None:
        """The client did not get its answer: what the log says of it."""
        if kick.why is Kick.CLIENT_GONE:
            exchange.status, exchange.reason = 499, "client_gone"
            self.router.metrics.hang_ups += 1
        elif kick.why is Kick.EXPIRED:
            exchange.status, exchange.reason = 408, "client_slow"
        else:
            exchange.status, exchange.reason = 503, "shutting_down"

    def _begin(self, head: Head | None) -> Exchange:
        router = self.router
        told = head.get(b"x-request-id") if head is not None else None
        request_id = told.decode("ascii") if told is not None and _SANE_ID.match(told) is not None else router.next_id()
        exchange = Exchange(head, request_id, router.machine.now_s())
        if router.draining:
            exchange.close_after = True
        if head is not None and router.policy.cors_origins:
            exchange.cors = router.cors(head.get(b"origin"))
        self.exchange = exchange
        self.busy = True
        if self.kicked is Kick.STOPPING:  # meant for an idle connection, and it is none any more
            self.kicked = None
        self.head_sent = False
        self.chunked = False
        self.sent_bytes = 0
        self._total_deadline_s = exchange.started_s + LOCAL_TIMEOUT_S
        self.deadline_s = math.inf
        self._idle_s = 0.0
        return exchange

    def _finish(self, exchange: Exchange) -> None:
        self.busy = False
        self.exchange = None
        self._comment_due_s = math.inf
        self._total_deadline_s = math.inf
        self._idle_s = 0.0
        if exchange.status == 0:  # the router itself was ended
            exchange.status, exchange.reason = 503, "cut_short"
        self.router.log(exchange, self.sent_bytes)

    async def _next(self) -> Request | None:
        """The next request, or None when there will be none. Faults are answered here."""
        reader, router = self.reader, self.router
        began_s = 0.0
        turns = 0
        while not reader.finished:
            turns += 1
            if turns % READS_PER_TURN == 0:
                await trio.lowlevel.checkpoint()
            if reader.fault is not None:
                await self._refuse_fault()
                return None
            if reader.current is not None and reader.current is not self._admitted:
                refusal = router.admit(reader.current.head)
                if refusal is not None:
                    await self._refuse(reader.current.head, refusal)
                    return None
                self._admitted = reader.current
            if reader.current is not None and reader.current.head.expect and self._continued is not reader.current:
                self._continued = reader.current
                await self._continue(reader.current)
            if router.draining and reader.at_rest:
                return None
            now_s = router.machine.now_s()
            route = router.policy.route
            if reader.current is not None:
                self.deadline_s = now_s + route.idle_timeout_s
            elif reader.at_rest:
                began_s = 0.0
                self.deadline_s = now_s + route.keep_alive_s
            else:
                began_s = began_s or now_s
                self.deadline_s = began_s + HEAD_TIMEOUT_S
            try:
                data = await self._receive()
            except Kicked as kick:
                if reader.at_rest:
                    return None
                if kick.why is Kick.EXPIRED and not self.peer_closed:
                    head = reader.current.head if reader.current is not None else None
                    await self._refuse(head, Problem(408, "request_timeout", "the request did not come to its end in time"))
                elif kick.why is not Kick.STOPPING:
                    self._left_early()
                return None
            except OSError:
                if not reader.at_rest:
                    self._left_early()
                raise
            if not data:
                if not reader.at_rest:
                    self._left_early()
                return None
            if reader.at_rest:  # the limits of the policy in force now, which may not be the one this wait began under
                reader.max_head = router.policy.route.max_header_bytes
                reader.max_body = router.policy.route.max_body_bytes
            reader.feed(data)
        self.deadline_s = math.inf
        return reader.finished.popleft()

    def _left_early(self) -> None:
        """The client is gone before its request was whole: nobody is left to answer, and the log tells."""
        current = self.reader.current
        exchange = self._begin(current.head if current is not None else None)
        self._mark(exchange, Kicked(Kick.CLIENT_GONE))
        self._finish(exchange)

    async def _receive(self) -> bytes:
        while True:
            try:
                return self.sock.recv(READ_BYTES)
            except (BlockingIOError, ssl.SSLWantReadError):
                await self.readable(self.descriptor)
            except ssl.SSLWantWriteError:
                await self.writable(self.descriptor)

    async def _continue(self, request: Request) -> None:
        if request.head.expect == b"100-continue":
            try:
                await self.send(http1.CONTINUE)
            except Kicked:
                self._left_early()
                raise

    async def _refuse_fault(self) -> None:
        fault = self.reader.fault
        assert fault is not None
        await self._refuse(self.reader.fault_head, Problem(fault.status, fault.code, fault.message))

    async def _refuse(self, head: Head | None, problem: Problem) -> None:
        """Answers before the request is whole, and closes in a way that lets the client read it."""
        exchange = self._begin(head)
        exchange.close_after = True
        try:
            await self._tell(exchange, problem)
        except Kicked as kick:
            self._mark(exchange, kick)
            raise
        finally:
            self._finish(exchange)
        await self._linger()

    async def _linger(self) -> None:
        """Reads and drops what the client still sends: a plain close would reset the connection, and with it our answer."""
        self.lingering = True
        with contextlib.suppress(OSError, Kicked):
            self._say_goodbye()
            self.sock.shutdown(socket.SHUT_WR)
            self.deadline_s = self.router.machine.now_s() + LINGER_S
            while not self.peer_closed and await self._receive():
                pass

    def _say_goodbye(self) -> None:
        """TLS tells an end of its own; without it an answer that the close delimits looks cut."""
        if isinstance(self.sock, ssl.SSLSocket):
            with contextlib.suppress(OSError, ValueError):
                self.sock.unwrap()

    # --- sending to the client

    async def send(self, data: bytes) -> None:
        """All of `data`. Raises Kicked when the client is gone or the whole takes too long."""
        if self._outbox:
            data, self._outbox = self._outbox + data, b""
        self.sent_bytes += len(data)
        sent = self._offer(data)
        if sent == len(data):
            return
        view = memoryview(data)[sent:]
        self._sending = True
        try:
            while view:
                await self.writable(self.descriptor)
                view = view[self._offer(view[:SEND_MAX]) :]
        finally:
            self._sending = False
            self._progress += 1

    def _offer(self, data: bytes | memoryview) -> int:
        try:
            return self.sock.send(data)
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return 0
        except OSError:
            self.kicked = Kick.CLIENT_GONE
            raise Kicked(Kick.CLIENT_GONE) from None

    def _head(self, exchange: Exchange, status: int, headers: Sequence[tuple[bytes, bytes]], length: int | None) -> bytes:
        """A head of ours. `length` None: chunked coding, or the close ends the body for an HTTP/1.0 client."""
        exchange.status = status
        rows = list(headers)
        rows.append((b"x-request-id", exchange.id.encode()))
        rows += exchange.cors
        if status == 204:
            pass  # RFC 9110, 8.6: it has no body and says no length
        elif length is not None:
            rows.append((b"content-length", b"%d" % length))
        elif exchange.head is not None and exchange.head.minor == 1:
            self.chunked = True
            rows.append((b"transfer-encoding", b"chunked"))
        else:
            exchange.close_after = True
        if exchange.close_after or self.router.draining:
            exchange.close_after = True
            rows.append((b"connection", b"close"))
        self.head_sent = True
        return http1.head_bytes(status, rows)

    async def answer(self, exchange: Exchange, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
        """A whole answer of our own."""
        head = self._head(exchange, status, headers, len(body))
        without_body = exchange.head is not None and exchange.head.method == "HEAD"
        await self.send(head if without_body else head + body)

    async def _tell(self, exchange: Exchange, problem: Problem) -> None:
        """An error, as an answer or, once a head is out, as the stream's last event."""
        exchange.reason = exchange.reason or problem.code
        if self.head_sent:
            exchange.status = problem.status
            exchange.close_after = True
            with contextlib.suppress(Kicked):
                event = error_event(problem, exchange.family)
                await self.send(http1.chunk(event) + http1.LAST_CHUNK if self.chunked else event)
            return
        headers = [_JSON, *problem.headers]
        if problem.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % max(1, math.ceil(problem.retry_after_s))))
        if problem.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        await self.answer(exchange, problem.status, headers, error_body(problem, exchange.family))

    def _comment(self, now_s: float) -> None:
        """Called by the sweeper while the task waits for the engine: a comment keeps proxies from cutting a silent stream."""
        exchange = self.exchange
        if exchange is None or self._sending or self._outbox:
            return
        self._comment_due_s = now_s + self.router.policy.route.sse_comment_interval_s
        data = b"" if self.head_sent else self._stream_head(exchange, [])
        comment = b": keep-alive\n\n"
        data += http1.chunk(comment) if self.chunked else comment
        with contextlib.suppress(Kicked):
            sent = self._offer(data)
            self._outbox = data[sent:]
            self.sent_bytes += sent

    # --- what a relay asks of its link

    def heard(self) -> None:
        self._progress += 1
        self._heard = True
        if self._first_byte:
            self._first_byte = False
            self._idle_s = self.router.policy.route.idle_timeout_s
            self.deadline_s = self.router.machine.now_s() + self._idle_s

    def set_deadline(self, after_s: float) -> None:
        self._idle_s = 0.0
        self.deadline_s = self.router.machine.now_s() + after_s

    def first_content(self) -> None:
        exchange = self.exchange
        if exchange is not None and exchange.first_s is None:
            exchange.first_s = self.router.machine.now_s() - exchange.started_s
            self._comment_due_s = math.inf
            if self._call is not None:
                self._call.forget_body()

    def expired_total(self) -> bool:
        return self.router.machine.now_s() >= self._total_deadline_s

    # --- deciding

    async def _handle(self, request: Request, exchange: Exchange) -> None:
        head = request.head
        refusal = None if self._admitted is request else self.router.admit(head)
        self._admitted = None
        if refusal is not None:
            return await self._tell(exchange, refusal)
        try:
            local = await self.router.local_answer(head, exchange)
            if local is not None:
                status, headers, body = local
                return await self.answer(exchange, status, headers, body)
            await self._relay_request(request, exchange)
        except Exception as err:
            if isinstance(err, Kicked | LlmgwError):
                raise
            self.router.report_bug(exchange.id, err)
            exchange.reason = "internal_error"
            problem = Problem(500, "internal_error", "the router failed while it worked on this request")
            if self.head_sent and self.chunked:  # a body that breaks by our fault must not look whole
                exchange.status = 500
                exchange.close_after = True
                return await self.send(http1.chunk(error_event(problem, exchange.family)))
            await self._tell(exchange, problem)

    async def _relay_request(self, request: Request, exchange: Exchange) -> None:
        router = self.router
        policy, guard = router.policy, router.gate.guard
        route = router.route_of(exchange.path)
        assert route is not None  # admitted
        key = router.authenticate(request.head)
        exchange.key = key.name if key is not ANONYMOUS else ""
        body = self._plain_body(request, policy)
        asked = read_body(body, needs_messages=route.needs_messages)
        request.parts = []  # the plain body is the only copy that is kept
        exchange.model = cut(asked.model, 128)
        exchange.stream = asked.stream
        target = self._target(asked.model, key)
        exchange.model_label = target.model
        self._judge(exchange, guard, route, asked, target, key)
        self._total_deadline_s = exchange.started_s + policy.route.total_timeout_s
        if asked.stream and policy.route.sse_comment_interval_s:
            self._comment_due_s = exchange.started_s + policy.route.sse_comment_interval_s
        if self.peer_closed:
            self.kick(Kick.CLIENT_GONE)
        router.budget.request(exchange.started_s)
        self._call = call = Call(exchange, request.head, route, asked, key, policy)
        del body, asked  # a stream may run for an hour, and would hold them
        try:
            with router.parallel.slot(key):
                await self._try_endpoints(call)
        finally:
            self._call = None

    def _plain_body(self, request: Request, policy: Policy) -> bytes:
        kind = (request.head.get(b"content-type") or b"").lower()
        if kind.startswith(b"multipart/"):
            raise Invalid("a JSON body (application/json) is accepted here, multipart is not", code="json_expected")
        coding = b",".join(request.head.all(b"content-encoding")).strip().lower()
        body = request.body()
        if coding in (b"", b"identity"):
            return body
        if coding == b"gzip":
            return inflate(body, policy.route.max_body_bytes)
        raise _UnsupportedCoding(coding)

    def _target(self, name: str, key: ApiKey) -> Target:
        """The target of a name. Raises NotFound, Denied (as a Problem in the family's shape)."""
        target = self.router.table.find(name)
        if target is None:
            raise self.router.no_model(name, key)
        if not target.allowed(key):
            raise _NotAllowed(name)
        return target

    def _judge(self, exchange: Exchange, guard: Guard, route: Route, asked: Asked, target: Target, key: ApiKey) -> None:
        """Raises Invalid where the guard refuses."""
        judged = guard.admit(route, asked.body, (target.model, target.name), key.name)
        for rule, action in judged.hits:
            self.router.metrics.hit(rule, action)
        exchange.flags = judged.flags
        if judged.refusal is not None:
            blocked = next((rule for rule, action in judged.hits if action == BLOCK), "")
            exchange.reason = f"block:{blocked}" if blocked else ""
            raise judged.refusal

    # --- trying endpoints

    async def _try_endpoints(self, call: Call) -> None:
        router, exchange, route = self.router, call.exchange, call.policy.route
        tried: set[EndpointId] = set()
        failure: Failure | None = None
        retries_left = route.retries
        while True:
            # Asked anew for each attempt: an endpoint that was withdrawn meanwhile gets no retry.
            target = self.router.table.find(call.asked.model)
            if target is None or target.absence is not None:
                if failure is not None:
                    return await self._give_up(call, failure)
                if target is not None:
                    router.wake(target.model)
                raise _absent(target, call.asked.model)
            now_s = router.machine.now_s()
            choice = choose(
                target.tiers,
                router.state,
                now_s,
                router.machine.rng,
                policy=route.policy,
                max_inflight=route.max_inflight_per_endpoint,
                tried=tried,
            )
            if isinstance(choice, Shortage):
                if failure is not None:
                    return await self._give_up(call, failure)
                raise _short(choice, call.asked.model)
            state = router.state(choice.candidate.endpoint.id)
            exchange.reason = choice.reason if exchange.attempts == 0 else "retry"
            exchange.attempts += 1
            failed = await self._attempt(call, choice, state)
            if failed is None:
                return None
            failure = failed
            if failed.withdrawn:
                exchange.attempts -= 1
                continue
            tried.add(choice.candidate.endpoint.id)
            if not failed.retry or retries_left <= 0:
                return await self._give_up(call, failure)
            if len(tried) < target.count:
                if not router.budget.take(router.machine.now_s(), route.retry_budget):
                    return await self._give_up(call, failure)
                retries_left -= 1
                router.metrics.retries += 1

    async def _give_up(self, call: Call, failure: Failure) -> None:
        """Nobody is left to ask: the client gets the engine's own answer, or ours about it."""
        exchange, problem = call.exchange, failure.problem
        exchange.reason = problem.code
        if problem.status == 429:
            failure = attrs.evolve(failure, headers=self._soonest(call, failure.headers))
        extra: list[tuple[bytes, bytes]] = []
        if exchange.attempts > 1:  # it was tried again already: a client that does the same multiplies the load
            extra.append((b"x-should-retry", b"false"))
        if self.head_sent or failure.body is None:
            return await self._tell(exchange, attrs.evolve(problem, headers=(*problem.headers, *extra)))
        encoded = any(name == b"content-encoding" and value.lower() != b"identity" for name, value in failure.headers)
        if encoded or is_json(failure.body):
            kept = list(failure.headers) if encoded else [_JSON, *(h for h in failure.headers if h[0] != b"content-type")]
            return await self.answer(exchange, problem.status, [*kept, *extra], failure.body)
        hints = tuple(header for header in failure.headers if header[0] == b"retry-after")
        return await self._tell(exchange, attrs.evolve(problem, headers=(*problem.headers, *hints, *extra)))

    def _soonest(self, call: Call, headers: tuple[tuple[bytes, bytes], ...]) -> tuple[tuple[bytes, bytes], ...]:
        """The engine's headers with a Retry-After that is true for the model: the soonest end of a rest of its endpoints."""
        target = self.router.table.find(call.asked.model)
        now_s = self.router.machine.now_s()
        rests = [self.router.state(c.endpoint.id).resting_until_s - now_s for tier in (target.tiers if target else ()) for c in tier]
        wait_s = max(1, math.ceil(min(rests, default=REST_DEFAULT_S)))
        return (*(h for h in headers if h[0] != b"retry-after"), (b"retry-after", b"%d" % wait_s))

    async def _attempt(self, call: Call, choice: Choice, state: EndpointState) -> Failure | None:
        """One endpoint's turn. None when the client has its answer (whole or broken). Raises Kicked when the client is gone."""
        exchange, route = call.exchange, call.policy.route
        exchange.endpoint = state.endpoint.id
        outcome = Outcome.LEFT
        state.began(exchange, self.router.machine.now_s())
        self._state = state
        self._heard = False
        self._seen = self._progress
        try:
            failure = await self._converse(call, choice.candidate, state)
            outcome = Outcome.ANSWERED if failure is None else failure.outcome
            if failure is not None and failure.problem.status == 0:  # the answer is given, though it broke
                return None
            return failure
        finally:
            self._state = None
            self._first_byte = False
            self._idle_s = 0.0
            self.deadline_s = math.inf
            state.left(
                exchange,
                outcome,
                self.router.machine.now_s(),
                heard=self._heard,
                failures_max=route.breaker_failures,
                cooldown_s=route.breaker_cooldown_s,
            )

    async def _converse(self, call: Call, candidate: Candidate, state: EndpointState) -> Failure | None:
        upstream = state.take()
        while True:
            if upstream is None:
                self.set_deadline(call.policy.route.connect_timeout_s)
                try:
                    upstream = await state.connect(self.router.machine, self)
                except Unreachable as err:
                    if err.local:
                        return Failure(_unreachable(str(err)), Outcome.LEFT, retry=False)
                    outcome = Outcome.REFUSED if err.refused else Outcome.FAILED
                    return Failure(_unreachable(str(err)), outcome, retry=True)
                except Kicked as kick:
                    if kick.why is Kick.EXPIRED and not self.expired_total():
                        text = f"connecting took longer than {call.policy.route.connect_timeout_s:g} s"
                        return Failure(_unreachable(text), Outcome.FAILED, retry=True)
                    return self._interrupted(kick)
            self._held = upstream
            try:
                if state.retired:
                    return Failure(_unreachable("the endpoint was withdrawn"), Outcome.LEFT, retry=True, withdrawn=True)
                reader = ResponseReader()
                ended = await self._ask(call, candidate, upstream, reader)
                if ended is None:
                    return await self._deliver(call, candidate, state, upstream, reader)
                if not (ended.end is End.LOST and upstream.reused and reader.untouched and not state.retired):
                    return self._no_answer(call, ended)
            finally:
                if self._held is not None:
                    self._held.close()
                    self._held = None
            upstream = None  # it had been closed by the engine while it was pooled: once more, on a fresh connection

    def _interrupted(self, kick: Kicked) -> Failure:
        """A wait for the engine was ended by the total limit or the router's end. Raises Kicked when the client is gone."""
        if kick.why is Kick.EXPIRED:
            return Failure(Problem(504, "timeout", "the request took longer than the total limit"), Outcome.LEFT, retry=False)
        if kick.why is Kick.STOPPING:
            return Failure(_STOPPING, Outcome.LEFT, retry=False)
        raise kick

    def _no_answer(self, call: Call, ended: Ended) -> Failure:
        """The engine gave no (whole) answer, and the client has got nothing yet."""
        if ended.end is End.SILENT:
            text = f"the engine gave no byte in time: {ended.text}"
            return Failure(Problem(504, "upstream_timeout", text, upstream=True), Outcome.SILENT, retry=True)
        if ended.end is End.LATE:
            limit_s = call.policy.route.total_timeout_s
            problem = Problem(504, "timeout", f"the request took longer than the total limit of {limit_s:g} s")
            return Failure(problem, Outcome.LEFT, retry=False)
        if ended.end is End.STOPPING:
            return Failure(_STOPPING, Outcome.LEFT, retry=False)
        code = "upstream_invalid" if ended.end is End.GARBLED else "upstream_disconnected"
        return Failure(Problem(502, code, ended.text, upstream=True), Outcome.FAILED, retry=True)

    def _engine_head(self, call: Call, state: EndpointState) -> bytes:
        exchange, head = call.exchange, call.head
        rows = [
            b"POST %b%b HTTP/1.1\r\nhost: %b\r\n" % (state.base, head.target, state.host_header),
            b"accept-encoding: identity\r\ncontent-type: application/json\r\nx-request-id: %b\r\n" % exchange.id.encode(),
        ]
        if state.endpoint.key:
            name = b"x-api-key: " if call.route.family is Family.ANTHROPIC else b""
            if name:
                rows.append(name + state.endpoint.key.encode("utf-8", "surrogateescape") + b"\r\n")
            rows.append(b"authorization: Bearer " + state.endpoint.key.encode("utf-8", "surrogateescape") + b"\r\n")
        named = {token.strip().lower() for value in head.all(b"connection") for token in value.split(b",")}
        rows += [b"%b: %b\r\n" % pair for pair in head.headers if pair[0] in _FORWARDED and pair[0] not in named]
        return b"".join(rows)

    async def _ask(self, call: Call, candidate: Candidate, upstream: Upstream, reader: ResponseReader) -> Ended | None:
        """Sends the request and reads the answer's head. None when that is whole."""
        asked = call.asked
        body = asked.body if candidate.engine_name == asked.model else asked.with_model(candidate.engine_name)
        head = self._engine_head(call, upstream.state) + b"content-length: %d\r\n\r\n" % len(body)
        self.set_deadline(call.policy.route.first_byte_timeout_s)
        self._first_byte = True
        pieces: list[bytes] = [head + body] if len(body) < JOIN_MAX else [head, body]
        try:
            for piece in pieces:
                view = memoryview(piece)
                while view and not reader.head_done:
                    sent = upstream.send(view[:SEND_MAX])
                    view = view[sent:]
                    if sent:
                        continue
                    early = upstream.receive()
                    if early:  # the engine answers while the body is still going out: it wants no more of it
                        self.heard()
                        reader.feed(early)
                        reader.refuse_reuse()
                        break
                    if early is not None:
                        return Ended(End.LOST, "the engine closed the connection while the request was sent")
                    await self.either(upstream.descriptor)
                    # A long body is no silence of the engine while it moves.
                    self.set_deadline(call.policy.route.first_byte_timeout_s)
        except Kicked as kick:
            if kick.why is Kick.CLIENT_GONE:
                raise
            if kick.why is Kick.STOPPING:
                return Ended(End.STOPPING)
            return Ended(End.LATE if self.expired_total() else End.SILENT, "the engine did not take the request")
        except OSError as err:  # it may have answered before it closed; what it said is still there to be read
            reader.refuse_reuse()
            with contextlib.suppress(OSError):
                while not reader.head_done and (early := upstream.receive()):
                    reader.feed(early)
            if not reader.head_done:
                return Ended(End.LOST, f"the engine closed the connection: {err.strerror or err}")
        while not reader.head_done:
            if reader.broken:
                return Ended(End.GARBLED, reader.broken)
            ended = await pull(self, upstream, reader)
            if ended is not None:
                return ended
        return None

    # --- the engine's answer

    async def _deliver(
        self, call: Call, candidate: Candidate, state: EndpointState, upstream: Upstream, reader: ResponseReader
    ) -> Failure | None:
        status = reader.status
        kind = (reader.get(b"content-type") or b"").lower()
        plain = (reader.get(b"content-encoding") or b"identity").lower() == b"identity"
        events = status < 300 and plain and kind.startswith(b"text/event-stream")
        if not events:  # a stream's first event may yet be an error
            state.answered(status)
        if status > 599:
            problem = Problem(
                502, "upstream_invalid", f"the engine answered with a status that HTTP does not have ({status})", upstream=True
            )
            return Failure(problem, Outcome.FAILED, retry=True)
        if status >= 400:
            return await self._engine_error(call, state, upstream, reader)
        if status >= 300:
            problem = Problem(502, "upstream_redirect", f"the engine answered with a redirect ({status})", upstream=True)
            return Failure(problem, Outcome.FAILED, retry=True)
        rename = call.asked.model if candidate.engine_name != call.asked.model or call.exchange.model_label != call.asked.model else None
        if events:
            return await self._deliver_events(call, state, upstream, reader, rename)
        return await self._deliver_bytes(call, state, upstream, reader, rename if plain and b"json" in kind else None)

    def _release(self, state: EndpointState, upstream: Upstream, reader: ResponseReader) -> None:
        """Back into the pool with it, if the answer was whole and nothing came after it."""
        if reader.surplus:
            self.router.metrics.surplus += 1
        if reader.reusable:
            self._held = None
            state.keep(upstream, self.router.machine.now_s())

    async def _engine_error(self, call: Call, state: EndpointState, upstream: Upstream, reader: ResponseReader) -> Failure:
        parts: list[bytes] = []
        size = 0
        while True:
            data = reader.take()
            if data:
                parts.append(data)
                size += len(data)
            if reader.complete or size > ERROR_BODY_MAX:
                break
            ended = await pull(self, upstream, reader)
            if ended is not None:
                if ended.end in (End.LATE, End.STOPPING):
                    return self._no_answer(call, ended)
                break  # what came of the error is what the client is told
        self._release(state, upstream, reader)
        status, body = reader.status, b"".join(parts)[:ERROR_BODY_MAX]
        if status == 429:
            wait_s = retry_after_s(reader.get(b"retry-after"), REST_DEFAULT_S)
            state.resting_until_s = self.router.machine.now_s() + wait_s
        text = cut(body.decode("utf-8", "replace").strip()) or "no text"
        problem = Problem(status, "upstream_error", f"the engine answered {status}: {text}", upstream=True)
        headers = tuple(_passed_on(reader.headers))
        outcome = Outcome.FAILED if status >= 500 else Outcome.ANSWERED
        return Failure(problem, outcome, retryable_status(status), body, headers)

    def _stream_head(self, exchange: Exchange, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
        rows = list(headers) or [(b"content-type", b"text/event-stream; charset=utf-8")]
        rows += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        return self._head(exchange, 200, rows, None)

    async def _deliver_events(
        self, call: Call, state: EndpointState, upstream: Upstream, reader: ResponseReader, rename: str | None
    ) -> Failure | None:
        exchange = call.exchange
        relay = EventRelay(self, upstream, reader, call.route, rename)
        first = await relay.begin()
        state.answered(first.status if isinstance(first, Problem) else reader.status)
        if isinstance(first, Ended):
            return self._no_answer(call, first)
        if isinstance(first, Problem):
            outcome = Outcome.FAILED if first.status >= 500 else Outcome.ANSWERED
            return Failure(first, outcome, retry=retryable_status(first.status))
        if not self.head_sent:
            await self.send(self._stream_head(exchange, _passed_on(reader.headers)))
        ended = await relay.run()
        if ended.end is End.DONE:
            self._release(state, upstream, reader)
            if self.chunked:
                await self._send_end(relay.ended)
            if relay.failed:
                exchange.reason, exchange.status = "upstream_error", 502
                return _given(Outcome.FAILED)
            return None
        return await self._break_off(call, ended)

    async def _send_end(self, had_everything: bool) -> None:
        """The end of the chunked coding. A client that left after the last event has lost nothing."""
        try:
            await self.send(http1.LAST_CHUNK)
        except Kicked:
            if not had_everything:
                raise

    async def _break_off(self, call: Call, ended: Ended) -> Failure:
        """The stream is out and cannot be finished: one error event tells so, and no `[DONE]`."""
        self.router.metrics.streams_broken += 1
        failure = self._no_answer(call, ended)
        self.deadline_s = math.inf
        self._total_deadline_s = self.router.machine.now_s() + LOCAL_TIMEOUT_S
        call.exchange.reason = failure.problem.code
        await self._tell(call.exchange, failure.problem)
        return _given(failure.outcome)

    async def _deliver_bytes(
        self, call: Call, state: EndpointState, upstream: Upstream, reader: ResponseReader, rename: str | None
    ) -> Failure | None:
        exchange = call.exchange
        relay = BytesRelay(self, upstream, reader, rename)
        ended = await relay.begin()
        if ended is not None:
            # The engine had begun to answer, so it did the work: asking another would do it twice.
            return attrs.evolve(self._no_answer(call, ended), retry=False)
        headers = [h for h in _passed_on(reader.headers) if h[0] != b"content-length"]
        if self.head_sent:  # comments went out for a stream, and the engine gave none
            problem = Problem(502, "upstream_invalid", "the engine answered without a stream", upstream=True)
            return Failure(problem, Outcome.ANSWERED, retry=False)
        whole = relay.whole
        if whole is not None:
            self.first_content()
            self._release(state, upstream, reader)
            bodyless = reader.status == 204
            await self.send(self._head(exchange, reader.status, headers, 0 if bodyless else len(whole)) + whole)
            return None
        length = reader.length if rename is None and reader.framing is http1.Framing.LENGTH else None
        await self.send(self._head(exchange, reader.status, headers, length))
        ended = await relay.run()
        if ended.end is End.DONE:
            if self.chunked:
                await self.send(http1.LAST_CHUNK)
            self._release(state, upstream, reader)
            return None
        # A body that is not a stream has no place for an error: it is cut, without the end that would make it look whole.
        failure = self._no_answer(call, ended)
        self.router.metrics.streams_broken += 1
        exchange.reason, exchange.status, exchange.close_after = failure.problem.code, failure.problem.status, True
        return _given(failure.outcome)


def _given(outcome: Outcome) -> Failure:
    """The client has got its answer, though a broken one; only the endpoint's account is left to settle."""
    return Failure(Problem(0, "", ""), outcome, retry=False)


def _passed_on(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [pair for pair in headers if pair[0] not in _WITHHELD and not pair[0].startswith(b"access-control-")]


_STOPPING: Final = Problem(503, "shutting_down", "the router is stopping; ask again", retry_after_s=1.0)
UNREACHABLE_RETRY_S: Final = 1.0


def _unreachable(text: str) -> Problem:
    return Problem(503, "unreachable", f"the engine cannot be reached: {text}", retry_after_s=UNREACHABLE_RETRY_S)


class _UnsupportedCoding(Invalid):
    """A content coding that we cannot undo."""

    status = 415
    default_code = "unsupported_encoding"

    def __init__(self, coding: bytes) -> None:
        super().__init__(f"the content encoding {cut(coding.decode('latin-1'), 40)!r} is not known here; gzip or none is accepted")


class _NotAllowed(LlmgwError):
    """The key has no right to the model."""

    status = 403
    default_code = "model_not_allowed"

    def __init__(self, name: str) -> None:
        super().__init__(f"the key may not use the model {cut(name, 100)!r}")


def _absent(target: Target | None, name: str) -> LlmgwError:
    if target is None or target.absence is None:
        return NotFound(f"the model {cut(name, 100)!r} does not exist", code="model_not_found")
    absence = target.absence
    text = f"the model {cut(name, 100)!r} has no ready endpoint ({absence.reason.value})"
    if absence.text:
        text += f": {cut(absence.text)}"
    return Unavailable(text, retry_after_s=ABSENT_RETRY_S, code=absence.reason.value)


ABSENT_RETRY_S: Final = 5.0  # chosen: a model that loads takes seconds to minutes; a client that asks every 5 s costs nothing


def _short(shortage: Shortage, name: str) -> LlmgwError:
    wait_s = shortage.retry_after_s
    shown = cut(name, 100)
    if shortage.why is Why.SATURATED:
        return Overloaded(f"every endpoint of the model {shown!r} is at its limit", retry_after_s=wait_s, code="overloaded")
    if shortage.why is Why.RESTING:
        return Overloaded(f"every endpoint of the model {shown!r} has asked for a pause", retry_after_s=wait_s, code="rate_limited")
    return Unavailable(f"no endpoint of the model {shown!r} can be reached", retry_after_s=wait_s, code="unreachable")
