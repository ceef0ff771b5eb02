"""One client connection: reads its requests, decides about each, and carries it through the exchange with an engine.

A request is begun by `_start`, which never waits: head, key, body, guard, limits, choice, and the bytes to the engine on a
connection that stands already. Most requests go on from there in callbacks alone (`relay`). What has to wait (a connection to
be made, another endpoint to be tried, a client that reads slowly, a long body) is done by the connection's one task, in linear
code: it goes on where the callbacks left off. Everything that is counted is given back in one place, `_settle`.

States of a connection, and what moves it on:

    reading     no request is open          a request is whole: `_start`; an end or a fault: the task answers and ends
    relaying    `relay` is set              `relayed`: settled, or a Failure for the task; `gone`: settled as 499
    trying      the task has the call       an answer, or nobody is left to ask
    flushing    the answer is pushed        the client has taken it: settled; it has not in time: 408
    lingering   answered early, closing     the client has closed, or LINGER_S
"""

from __future__ import annotations

import contextlib
import math
import re
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

import attrs
import trio

from llmgw.domain.errors import Denied, Invalid, LlmgwError, NotFound, Overloaded, Unavailable
from llmgw.domain.policy import ApiKey
from llmgw.router import http1
from llmgw.router.answer_headers import ENDPOINT
from llmgw.router.body import Asked, inflate, is_json, read_body
from llmgw.router.breaker import Outcome
from llmgw.router.choose import OTHERS_WAIT, Choice, Shortage, Why
from llmgw.router.client import JSON, Client, header_lines
from llmgw.router.exchange import Call, Exchange, Failure, Known
from llmgw.router.families import Family, Problem, Route, cut, error_event, problem_of
from llmgw.router.gate import BLOCK, Guard
from llmgw.router.http1 import Head, Request, RequestReader
from llmgw.router.metrics import METRICS_HEADERS
from llmgw.router.queue import Ticket, cost_of
from llmgw.router.rates import estimate
from llmgw.router.reactor import GONE, READ, WRITE
from llmgw.router.relay import READS_PER_TURN, REST_DEFAULT_S, STOPPING, End, Ended, Relay, Verdict, no_answer, why_ended
from llmgw.router.sweeper import Kick, Kicked
from llmgw.router.table import Target
from llmgw.router.turns import Called
from llmgw.router.upstreams import EndpointState, Unreachable, Upstream
from llmgw.router.usage import refuses_usage

if TYPE_CHECKING:
    from llmgw.router.router import Router

HEAD_TIMEOUT_S: Final = 30.0  # chosen: a head of 16 KB at a modem's speed; ends who dribbles bytes to hold connections
LOCAL_TIMEOUT_S: Final = 30.0  # for sending an answer of our own to a client that reads slowly
LINGER_S: Final = 5.0  # after an early answer: how long what the client still sends is read and dropped, so that it sees the answer

_SANE_ID: Final = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}\Z")


class Connection(Client):
    """A client's connection, for as long as it lasts."""

    __slots__ = (
        "_admitted", "_began_s", "_call", "_comment_due_s", "_connect_s", "_continued", "_figures", "_heard", "_over", "_reads", "_rests",
        "_starting", "_state", "_total_deadline_s", "_unread", "lingering", "reader", "relay",
    )  # fmt: skip

    def __init__(self, router: Router, sock: socket.socket) -> None:
        super().__init__(router, sock)
        route = router.policy.route
        self.reader = RequestReader(route.max_header_bytes, route.max_body_bytes, router.heads)
        self.lingering = False
        self.relay: Relay | None = None
        self._call: Call | None = None  # the open request, where it goes to an engine
        self._figures: Callable[[], Awaitable[bytes]] | None = None  # the open request asks for what all workers have counted
        self._state: EndpointState | None = None  # of the attempt that is on
        self._began_s = 0.0
        self._connect_s = 0.0  # that the attempt took to get a connection: the engine's time, not ours
        self._reads = 0  # of the relay, when the sweep last looked
        self._heard = False  # the attempt that is on has brought a byte
        self._rests = False  # the task waits for a request: callbacks may begin one
        self._starting = False
        self._unread = True  # there may be bytes in the socket that nobody has read
        self._over = False  # no further request is read
        self._admitted: Request | None = None
        self._continued: Request | None = None
        self._total_deadline_s = math.inf
        self._comment_due_s = math.inf

    # --- the connection's life

    async def run(self) -> None:
        """Serves the connection until it ends. Raises nothing but Cancelled."""
        try:
            self.router.reactor.tick(self.router.machine.now_s())  # it was not the reactor that has brought us here
            self.router.reactor.add(self.descriptor, self)
            if isinstance(self.sock, ssl.SSLSocket):
                await self._handshake(self.sock)
            while self.exchange is not None or not self._over:
                if self.exchange is None:
                    await self._read()
                else:
                    await self._go_on()
            if not self.peer_closed and (not self.reader.at_rest or self.reader.finished):
                await self._linger()
        except Kicked:
            pass  # the client is gone, was silent for too long, or the router ends: nobody is left to tell
        except OSError:
            pass  # the client's connection broke
        finally:
            if self.relay is not None:
                self.relay.drop()
                self.relay = None
            self._settle()
            self.router.reactor.remove(self.descriptor)
            if not self.peer_closed and not self.lingering:
                self._say_goodbye()
            self.sock.close()

    async def _handshake(self, sock: ssl.SSLSocket) -> None:
        self.deadline_s = self.router.reactor.now_s + HEAD_TIMEOUT_S
        while True:
            try:
                return sock.do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                await self.wait()

    @property
    def busy(self) -> bool:
        """Is a request being answered?"""
        return self.exchange is not None

    # --- what the reactor tells

    def ready(self, events: int) -> None:
        if events & GONE:
            self.peer_closed = True
            if self.exchange is not None or self.lingering:
                return self.kick(Kick.CLIENT_GONE)
        if events & READ:
            self._unread = True
        if self.out:
            if events & WRITE:
                self._flush()
        elif self._rests and self.exchange is None:
            if self._unread and not self._read_nowait():
                self.wake()
        elif self.relay is None:
            self.wake()
        return None

    def _flush(self) -> None:
        try:
            if not self.flush():
                return None
        except Kicked:
            return self.kick(Kick.CLIENT_GONE)
        if self.relay is not None:
            self.relay.resume()
        else:
            self.wake()
        return None

    def failed(self, error: Exception) -> None:
        """A fault of ours in a callback: the exchange ends with an error, and the connection with it."""
        exchange = self.exchange
        if self.relay is not None:
            self.relay.drop()
            self.relay = None
        self._end_attempt(Outcome.LEFT)
        self._call = None
        self._over = True
        self._patience(LOCAL_TIMEOUT_S)
        with contextlib.suppress(Kicked):
            if exchange is not None:
                self._tell_bug(exchange, error)
            else:
                self.router.report_bug(b"", error)
        self.wake()

    # --- what ends a wait

    def kick(self, why: Kick) -> None:
        """The client is gone, its time is over, or the router ends: whoever is at work on the connection hears of it."""
        relay = self.relay
        if relay is None:
            return super().kick(why)
        if why is Kick.CLIENT_GONE:
            self.kicked = why
            return relay.client_gone()
        if self.out and why is Kick.EXPIRED:  # the client does not read
            self._heard = relay.reads > 0
            relay.drop()
            return self._give_up_on_client(why)
        return relay.end(why_ended(why, self._late()))

    def _late(self) -> bool:
        return self.router.reactor.now_s >= self._total_deadline_s

    def gone(self) -> None:
        """Called by the relay, which has been dropped."""
        if self.relay is not None:
            self._heard = self.relay.reads > 0
        self._give_up_on_client(Kick.CLIENT_GONE)

    def _give_up_on_client(self, why: Kick) -> None:
        """In the middle of a relay: nobody gets the rest."""
        self.relay = None
        if self.exchange is not None:
            self._mark(self.exchange, why)
        self.out.clear()
        self.peer_closed = self._over = True
        self._settle()
        self.wake()

    def close_idle(self) -> None:
        """The router is stopping: a connection without a request ends now, one with a request after its answer."""
        if self.exchange is None and self.reader.at_rest:
            self.kick(Kick.STOPPING)

    def sweep(self, now_s: float) -> None:
        """Called by the sweeper a few times a second."""
        relay = self.relay
        if relay is not None and relay.reads != self._reads:
            self._reads = relay.reads
            if not relay.tail:
                self.deadline_s = now_s + relay.call.policy.route.idle_timeout_s
            relay.state.heard(now_s)
        # A client that reads slowly is no silence of the engine: then only the limit for the whole counts.
        limit_s = self._total_deadline_s if self.out else min(self.deadline_s, self._total_deadline_s)
        if now_s >= limit_s:
            self.kick(Kick.EXPIRED)
        elif now_s >= self._comment_due_s:
            self._comment(now_s)

    # --- reading

    async def _read(self) -> None:
        """Waits for what the client sends, and begins what has come. Returns when the task is needed elsewhere, or `_over`."""
        reader, router = self.reader, self.router
        began_s = 0.0
        while not self._read_nowait():
            if self.exchange is not None or self._over:
                return None
            if reader.fault is not None:
                fault = reader.fault
                return await self._refuse(reader.fault_head, Problem(fault.status, fault.code, fault.message))
            current = reader.current
            if current is not None and current is not self._admitted:
                refusal = router.admit(current.head)
                if refusal is not None:
                    return await self._refuse(current.head, refusal)
                self._admitted = current
            if current is not None and current.head.expect == b"100-continue" and self._continued is not current:
                self._continued = current
                await self._continue()
            if self._unread:  # a very long body: others get their turn
                await trio.lowlevel.checkpoint()
                continue
            if router.draining and reader.at_rest:
                self._over = True
                return None
            now_s = router.reactor.now_s
            if current is not None:
                self.deadline_s = now_s + router.policy.route.idle_timeout_s
            else:  # a head that is not whole
                began_s = began_s or now_s
                self.deadline_s = began_s + HEAD_TIMEOUT_S
            if not await self._heard_more():
                return None
        # All that came is answered or on its way.
        if router.draining and self.exchange is None and reader.at_rest:
            self._over = True
            return None
        if self.exchange is None and reader.current is None:
            self.deadline_s = router.reactor.now_s + router.policy.route.keep_alive_s
        self._rests = True
        try:
            await self._heard_more()
        finally:
            self._rests = False

    async def _heard_more(self) -> bool:
        """Waits. False when nothing more will come: the client was told so, or nobody is left to tell."""
        reader = self.reader
        try:
            await self.wait()
        except Kicked as kick:
            self._over = True
            if reader.at_rest or self.exchange is not None:
                return False
            if kick.why is Kick.EXPIRED and not self.peer_closed:
                head = reader.current.head if reader.current is not None else None
                await self._refuse(head, Problem(408, "request_timeout", "the request did not come to its end in time"))
            elif kick.why is not Kick.STOPPING:
                self._left_early()
            return False
        return True

    def _read_nowait(self) -> bool:
        """Reads and begins what can be. False when the task is needed: for a head that is not whole or not known, a fault, a very long
        body, the end.
        """
        reader = self.reader
        reads = 0
        while True:
            while reader.finished and not self._over:
                if not self.busy:
                    self._start(reader.finished.popleft())
                if self.busy:
                    return self.relay is not None
            if self._over or reader.fault is not None:
                return False
            current = reader.current
            if current is not None and current is not self._admitted and not self._admit_nowait(current):
                return False
            if not self._unread:
                return reader.at_rest or self._awaits_body()
            size = reader.room
            try:
                data = self.receive(size)
            except OSError:
                data = b""
            if data is None:
                self._unread = False
                return reader.at_rest or self._awaits_body()
            if not data:
                if not reader.at_rest:
                    self._left_early()
                self._over = True
                return False
            if len(data) < size and not self.peer_closed and not self.secure:
                self._unread = False
            if reader.at_rest:  # the limits of the policy in force now, which may not be the one this wait began under
                route = self.router.policy.route
                reader.max_head = route.max_header_bytes
                reader.max_body = route.max_body_bytes
            reader.feed(data)
            reads += 1
            if reads >= READS_PER_TURN and self._unread and not reader.finished:
                return False  # the task reads it, and takes turns with the others

    def _admit_nowait(self, current: Request) -> bool:
        """May a request go on whose body is still coming? Only what was found of its like before is gone by."""
        if current.head.expect is not None or self.router.know(current.head) is None:
            return False
        self._admitted = current
        return True

    def _awaits_body(self) -> bool:
        """Is nothing to be done until more of an admitted request's body comes? A head that is not whole is the task's."""
        if self.reader.current is None:
            return False
        self.deadline_s = self.router.reactor.now_s + self.router.policy.route.idle_timeout_s
        return True

    def _left_early(self) -> None:
        """The client is gone before its request was whole: nobody is left to answer, and the log tells."""
        current = self.reader.current
        exchange = self._begin(current.head if current is not None else None)
        self._mark(exchange, Kick.CLIENT_GONE)
        self._settle()

    async def _continue(self) -> None:
        try:
            self.push(http1.CONTINUE)
            await self.flushed()
        except Kicked:
            self._left_early()
            raise

    async def _refuse(self, head: Head | None, problem: Problem) -> None:
        """Answers before the request is whole, and closes in a way that lets the client read it."""
        exchange = self._begin(head)
        exchange.close_after = True
        self._over = True
        try:
            self.tell(exchange, problem)
            await self.flushed()
        except Kicked as kick:
            self._mark(exchange, kick.why)
            raise
        finally:
            self._settle()
        await self._linger()

    async def _linger(self) -> None:
        """Reads and drops what the client still sends: a plain close would reset the connection, and with it our answer."""
        if self.lingering:
            return
        self.lingering = True
        with contextlib.suppress(OSError, Kicked):
            self._say_goodbye()
            self.sock.shutdown(socket.SHUT_WR)
            self.deadline_s = self.router.reactor.now_s + LINGER_S
            turns = 0
            while not self.peer_closed:
                data = self.receive()
                if data == b"":
                    return
                turns += 1
                if data is None:
                    await self.wait()
                elif turns % READS_PER_TURN == 0:
                    await trio.lowlevel.checkpoint()

    def _say_goodbye(self) -> None:
        """TLS tells an end of its own; without it an answer that the close delimits looks cut."""
        if isinstance(self.sock, ssl.SSLSocket):
            with contextlib.suppress(OSError, ValueError):
                self.sock.unwrap()

    # --- one exchange, from its begin to its end

    def _begin(self, head: Head | None) -> Exchange:
        router = self.router
        told = head.request_id if head is not None else None
        request_id = told if told is not None and _SANE_ID.match(told) is not None else router.next_id()
        exchange = Exchange(head, request_id, router.reactor.now_s)
        if router.draining:
            exchange.close_after = True
        if head is not None and router.policy.cors_origins:
            exchange.cors = header_lines(router.cors(head.get(b"origin")))
        self.exchange = exchange
        if self.kicked is Kick.STOPPING:  # meant for an idle connection, and it is none any more
            self.kicked = None
        self.head_sent = False
        self.chunked = False
        self.sent_bytes = 0
        self._total_deadline_s = exchange.started_s + LOCAL_TIMEOUT_S
        self.deadline_s = math.inf
        return exchange

    def _settle(self) -> None:
        """The one end of an exchange: gives back what it holds, logs it, and says whether another may follow. Idempotent."""
        exchange = self.exchange
        if exchange is None:
            return
        router = self.router
        self._end_attempt(Outcome.LEFT)
        self._call = self._figures = None
        self.exchange = None
        self._comment_due_s = math.inf
        self._total_deadline_s = math.inf
        self.deadline_s = router.reactor.now_s + router.policy.route.keep_alive_s
        if exchange.status == 0:  # the router itself was ended
            exchange.status, exchange.reason = 503, "cut_short"
        if exchange.place is not None:
            router.parallel.give_back(exchange.place)
            exchange.place = None
        router.log(exchange, self.sent_bytes)
        if exchange.close_after or router.draining:
            self._over = True

    def _mark(self, exchange: Exchange, why: Kick) -> None:
        """The client did not get its answer: what the log says of it."""
        if why is Kick.CLIENT_GONE:
            exchange.status, exchange.reason = 499, "client_gone"
            self.router.metrics.hang_ups += 1
        elif why is Kick.EXPIRED:
            exchange.status, exchange.reason = 408, "client_slow"
        else:
            exchange.status, exchange.reason = 503, "shutting_down"

    def _start(self, request: Request) -> None:
        """Begins a whole request, and ends it where nothing has to wait. `exchange` is None afterwards, or it goes on."""
        exchange = self._begin(request.head)
        self._starting = True
        try:
            try:
                self._decide(request, exchange)
                if self._call is not None:
                    self._try_nowait(self._call)
            except LlmgwError as err:
                self._call = None
                self.tell(exchange, problem_of(err))
            except Kicked:
                raise
            except Exception as err:
                self._tell_bug(exchange, err)
        except Kicked as kick:
            self._mark(exchange, kick.why)
            self._call = None
            self.out.clear()
            self.peer_closed = self._over = True
        self._starting = False
        if self._call is None and self._figures is None and not self.out:
            self._settle()

    async def _go_on(self) -> None:
        """The open exchange has come to something that waits."""
        exchange = self.exchange
        assert exchange is not None
        try:
            try:
                self.check()
                if self._call is not None:
                    await self._try_endpoints(self._call)
                elif self._figures is not None:
                    figures, self._figures = self._figures, None
                    self.answer(exchange, 200, header_lines(METRICS_HEADERS), await figures())
            except LlmgwError as err:
                self._call = None
                self.tell(exchange, problem_of(err))
            except (Kicked, OSError):
                raise
            except Exception as err:
                self._tell_bug(exchange, err)
            await self.flushed()
        except Kicked as kick:
            if self.exchange is exchange:
                self._mark(exchange, kick.why)
            if self.relay is not None:
                self.relay.drop()
                self.relay = None
            self.out.clear()
            self.peer_closed = self._over = True
        finally:
            self._settle()

    def _tell_bug(self, exchange: Exchange, error: Exception) -> None:
        """A fault of our own, told to the operator, and to the client without a word of what it was. Raises Kicked."""
        self.router.report_bug(exchange.id, error)
        exchange.reason = "internal_error"
        problem = Problem(500, "internal_error", "the router failed while it worked on this request")
        self._call = None
        if self.relay is not None:
            self.relay.drop()
            self.relay = None
        if self.head_sent and self.chunked:  # a body that breaks by our fault must not look whole
            exchange.status = 500
            exchange.close_after = True
            self.push(http1.chunk(error_event(problem, exchange.family)))
        else:
            self.tell(exchange, problem)

    # --- deciding

    def _decide(self, request: Request, exchange: Exchange) -> None:
        """Answers what needs no engine; for the rest sets `_call`. Raises LlmgwError, Kicked."""
        router, head = self.router, request.head
        known = router.know(head)
        if known is None:
            refusal = None if self._admitted is request else router.admit(head)
            self._admitted = None
            if refusal is not None:
                return self.tell(exchange, refusal)
            if head.path == "/metrics" and router.all_figures is not None:
                self._figures = router.all_figures  # the parent of several workers has to be asked
                return None
            local = router.local_answer(head, exchange)
            if local is not None:
                status, headers, body = local
                return self.answer(exchange, status, header_lines(headers), body)
            known = router.learn(head)
        self._admitted = None
        if self.peer_closed:
            raise Kicked(Kick.CLIENT_GONE)
        policy, guard, key = known.policy, router.gate.guard, known.key
        exchange.key = key.name
        exchange.caller = known.caller
        if known.asked_endpoints:
            if not key.operator:
                text = f"the key may not choose an endpoint by {ENDPOINT.decode()}: that takes an operator's key"
                raise Denied(text, code="endpoint_not_allowed")
            if len(known.asked_endpoints) > 1:
                raise Invalid(
                    f"two different endpoints are asked for by {ENDPOINT.decode()}", param=ENDPOINT.decode(), code="unknown_endpoint"
                )
        body = self._plain_body(request, known)
        asked = read_body(body, needs_messages=known.route.needs_messages)
        request.parts = []  # the plain body is the only copy that is kept
        exchange.stream = asked.stream
        target = router.table.find(asked.model)
        if target is None or target is not known.permitted:
            if target is None or not target.allowed(key):
                exchange.model = cut(asked.model, 128)
                raise router.no_model(asked.model, key) if target is None else _NotAllowed(asked.model)
            known.permitted = target
        exchange.model = asked.model
        exchange.model_label = target.model
        if len(body) >= guard.looks_from:
            self._judge(exchange, guard, known.route, asked, target, key)
        started_s = exchange.started_s
        self._total_deadline_s = started_s + policy.route.total_timeout_s
        if asked.stream and policy.route.sse_comment_interval_s:
            self._comment_due_s = started_s + policy.route.sse_comment_interval_s
        router.budget.request(started_s)
        exchange.place = router.parallel.take(key)
        exchange.charge = router.rates.admit(key, estimate(len(asked.body), asked.output_tokens), started_s)
        self._call = Call(exchange, head, known, asked)
        return None

    def _plain_body(self, request: Request, known: Known) -> bytes:
        if known.multipart:
            raise Invalid("a JSON body (application/json) is accepted here, multipart is not", code="json_expected")
        body = request.body()
        if known.coding in (b"", b"identity"):
            return body
        if known.coding == b"gzip":
            return inflate(body, known.policy.route.max_body_bytes)
        raise _UnsupportedCoding(known.coding)

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

    def _try_nowait(self, call: Call) -> None:
        """The first attempt, where a connection to the engine stands; else the task makes one. Raises LlmgwError."""
        choice = self._choose(call)
        if not isinstance(choice, Choice):
            return
        state = self._enter(call, choice)
        upstream = state.take()
        if upstream is not None:
            self._ask(call, choice, state, upstream)

    async def _try_endpoints(self, call: Call) -> None:
        """Until the client has an answer, whole or broken. Raises LlmgwError, Kicked."""
        fresh = False
        while True:
            choice = call.choice
            if choice is None:
                found: Choice | Shortage | Failure | None = self._choose(call)
                if isinstance(found, Shortage):
                    found = await self._wait_turn(call)
                    if found is None:
                        continue
                if isinstance(found, Failure):
                    return self._give_up(call, found)
                if found is None:
                    return None
                choice = found
                self._enter(call, choice)
            if self.relay is None and call.failure is None:
                call.failure = await self._connect(call, choice, fresh=fresh)
            while self.relay is not None:
                await self.wait()
            failure, call.failure = call.failure, None
            if self._call is not call or failure is None:
                return None  # the relay has settled it
            fresh = failure.stale
            if call.hidden and refuses_usage(failure.problem.status, failure.told):
                call.usage, call.doubted = None, True  # what the client did not write must cost it nothing: once more, as it wrote it
            elif not fresh and not self._goes_on(call, choice, failure):
                return self._give_up(call, failure)

    def _choose(self, call: Call) -> Choice | Shortage | None:
        """Asked anew for each attempt: an endpoint that was withdrawn meanwhile gets no retry. A Shortage is to be waited out.

        None: the client was told. Raises LlmgwError where nobody has been asked yet and there is nothing to wait for.
        """
        router = self.router
        target = router.table.find(call.asked.model)
        if target is None or target.absence is not None:
            if call.last is not None:
                self._give_up(call, call.last)
                return None
            if target is not None:
                router.wake(target.model)
            raise _absent(target, call.asked.model)
        for endpoint in call.known.asked_endpoints:
            target = target.pinned(endpoint)
        if router.turns.queue.size and not call.tried and target.model in router.turns.queue:
            choice: Choice | Shortage = OTHERS_WAIT  # nobody overtakes those who wait; a retry has had its turn
        else:
            choice = router.choose(target, call.tried)
        if isinstance(choice, Shortage):
            if call.tried and call.last is not None:
                self._give_up(call, call.last)
                return None
            if choice.why is not Why.SATURATED:
                raise _short(choice, call.asked.model)
        return choice

    async def _wait_turn(self, call: Call) -> Choice | Failure | None:
        """Until a place is free and everybody before has had theirs. None: things have changed, look again.

        Raises Overloaded when the queue is full or the wait too long, Kicked when the client is gone.
        """
        router, route, exchange, turns = self.router, call.policy.route, call.exchange, self.router.turns
        if router.draining:
            return Failure(STOPPING, Outcome.LEFT, retry=False)
        began_s = router.reactor.now_s
        model = exchange.model_label
        ticket = Ticket(model, exchange.key, cost_of(len(call.asked.body)), began_s, self.wake)
        name = cut(call.asked.model, 100)
        if not turns.join(ticket, route.queue_max if route.queue_wait_s > 0 else 0):
            exchange.reason = "queue_full"
            raise _overloaded(name, f"{turns.queue.waiting(model)} requests wait for it already", router.wait_estimate_s(model))
        self.deadline_s = began_s + route.queue_wait_s - call.waited_s
        try:
            while True:
                called = turns.called(ticket)
                if called is None:
                    await self.wait()
                elif called is Called.TURN:
                    turns.redeem(ticket)
                    target = router.table.find(call.asked.model)
                    if target is None or target.model != model:  # an alias that means something else by now
                        return None
                    for endpoint in call.known.asked_endpoints:
                        target = target.pinned(endpoint)
                    choice = router.choose(target)
                    if isinstance(choice, Choice):
                        turns.took(ticket)
                        return choice
                    if not choice.passes:
                        turns.dismiss(model)
                elif called is Called.LOOK:
                    return None
                elif called is Called.STOPPING:
                    return Failure(STOPPING, Outcome.LEFT, retry=False)
                else:
                    exchange.reason = "queue_full"
                    raise _overloaded(name, "others have fewer requests waiting for it", router.wait_estimate_s(model))
        except Kicked as kick:
            if kick.why is Kick.CLIENT_GONE:
                raise
            if kick.why is Kick.STOPPING or self._late():
                return no_answer(call, why_ended(kick.why, late=True))
            exchange.reason = "queue_timeout"
            turns.leave(ticket)
            why = f"no place became free within {route.queue_wait_s:g} s"
            raise _overloaded(name, why, router.wait_estimate_s(model)) from None
        finally:
            self.deadline_s = math.inf
            turns.leave(ticket)
            waited_s = router.reactor.now_s - began_s
            call.waited_s += waited_s
            router.metrics.waited(model, waited_s)

    def _enter(self, call: Call, choice: Choice) -> EndpointState:
        """The endpoint's turn begins. Balanced by `_end_attempt`."""
        router, exchange = self.router, call.exchange
        state = router.state(choice.candidate.endpoint.id)
        exchange.endpoint = state.endpoint.id
        exchange.reason = choice.reason if exchange.attempts == 0 else "retry"
        if call.waited_s:
            exchange.reason += f",waited:{call.waited_s:.3f}s"
        exchange.attempts += 1
        exchange.asked_s = self._began_s = router.reactor.now_s
        state.began(exchange, self._began_s)
        if router.turns.queue.size:
            router.turns.give()
        call.choice = choice
        self._state = state
        self._connect_s = 0.0
        self._heard = False
        return state

    def _end_attempt(self, outcome: Outcome) -> None:
        """What the attempt that is on says of its endpoint. Idempotent."""
        state = self._state
        if state is None:
            return
        self._state = None
        self.deadline_s = math.inf
        router, exchange = self.router, self.exchange
        assert exchange is not None  # an attempt is part of one
        route, now_s = router.policy.route, router.reactor.now_s
        state.left(
            exchange,
            outcome,
            now_s,
            heard=self._heard,
            failures_max=route.breaker_failures,
            cooldown_s=route.breaker_cooldown_s,
        )
        router.place_left(state, exchange.model_label, now_s - self._began_s if outcome is Outcome.ANSWERED else None)

    def _goes_on(self, call: Call, choice: Choice, failure: Failure) -> bool:
        """An attempt has given the client nothing. May another be made?"""
        router = self.router
        self._end_attempt(failure.outcome)
        call.choice = None
        call.last = failure
        if failure.withdrawn:
            call.exchange.attempts -= 1
            return True
        call.tried.add(choice.candidate.endpoint.id)
        if not failure.retry or call.retries_left <= 0:
            return False
        target = router.table.find(call.asked.model)
        if target is not None and len(call.tried) < target.count:
            if not router.budget.take(router.reactor.now_s, call.policy.route.retry_budget):
                return False
            call.retries_left -= 1
            router.metrics.retries += 1
        return True

    def _give_up(self, call: Call, failure: Failure) -> None:
        """Nobody is left to ask: the client gets the engine's own answer, or ours about it. Raises Kicked."""
        exchange, problem = call.exchange, failure.problem
        self._call = None
        self._patience(LOCAL_TIMEOUT_S)
        exchange.reason = problem.code
        if problem.status == 429:
            failure = attrs.evolve(failure, headers=self._soonest(call, failure.headers))
        extra: list[tuple[bytes, bytes]] = []
        if exchange.attempts > 1:  # it was tried again already: a client that does the same multiplies the load
            extra.append((b"x-should-retry", b"false"))
        if self.head_sent or failure.body is None:
            return self.tell(exchange, attrs.evolve(problem, headers=(*problem.headers, *extra)))
        encoded = any(name == b"content-encoding" and value.lower() != b"identity" for name, value in failure.headers)
        if encoded or is_json(failure.body):
            kept = header_lines([*(h for h in failure.headers if encoded or h[0] != b"content-type"), *extra])
            return self.answer(exchange, problem.status, kept if encoded else JSON + kept, failure.body)
        hints = tuple(header for header in failure.headers if header[0] == b"retry-after")
        return self.tell(exchange, attrs.evolve(problem, headers=(*problem.headers, *hints, *extra)))

    def _soonest(self, call: Call, headers: tuple[tuple[bytes, bytes], ...]) -> tuple[tuple[bytes, bytes], ...]:
        """The engine's headers with a Retry-After that is true for the model: the soonest end of a rest of its endpoints."""
        target = self.router.table.find(call.asked.model)
        now_s = self.router.reactor.now_s
        rests = [self.router.state(c.endpoint.id).resting_until_s - now_s for tier in (target.tiers if target else ()) for c in tier]
        wait_s = max(1, math.ceil(min(rests, default=REST_DEFAULT_S)))
        return (*(h for h in headers if h[0] != b"retry-after"), (b"retry-after", b"%d" % wait_s))

    async def _connect(self, call: Call, choice: Choice, *, fresh: bool) -> Failure | None:
        """Asks the endpoint, on a pooled connection unless `fresh`. None: the relay has it. Raises Kicked when the client is gone."""
        state, route = self._state, call.policy.route
        assert state is not None  # entered
        upstream = None if fresh else state.take()
        if upstream is None:
            self.set_deadline(route.connect_timeout_s)
            began_s = self.router.machine.now_s()
            try:
                upstream = await state.connect(self.router.machine, self)
            except Unreachable as err:
                if err.local:
                    return Failure(_unreachable(str(err)), Outcome.LEFT, retry=False)
                return Failure(_unreachable(str(err)), Outcome.REFUSED if err.refused else Outcome.FAILED, retry=True)
            except Kicked as kick:
                if kick.why is Kick.CLIENT_GONE:
                    raise
                if kick.why is Kick.EXPIRED and not self._late():
                    text = f"connecting took longer than {route.connect_timeout_s:g} s"
                    return Failure(_unreachable(text), Outcome.FAILED, retry=True)
                return no_answer(call, why_ended(kick.why, late=True))
            self._connect_s = self.router.machine.now_s() - began_s
        if state.retired:
            upstream.close()
            return Failure(_unreachable("the endpoint was withdrawn"), Outcome.LEFT, retry=True, withdrawn=True)
        self._ask(call, choice, state, upstream)
        return None

    def _ask(self, call: Call, choice: Choice, state: EndpointState, upstream: Upstream) -> None:
        """Sends the request; from here on the relay has it."""
        asked, known = call.asked, call.known
        engine_name = choice.candidate.engine_name
        call.hidden = call.usage is not None and state.tells_usage
        body = asked.as_sent(engine_name, *((call.usage,) if call.usage is not None and call.hidden else ()))
        size = len(body[0]) if len(body) == 1 else sum(map(len, body))
        head = b"POST %b%b HTTP/1.1\r\n%b%bx-request-id: %b\r\ncontent-length: %d\r\n\r\n" % (
            state.base, call.head.target, state.head_lines(known.route.family is Family.ANTHROPIC), known.forwarded,
            call.exchange.id, size,
        )  # fmt: skip
        if call.exchange.attempts == 1:  # read anew, because the reactor's clock stands still while we work
            router = self.router
            overhead_s = router.machine.now_s() - call.exchange.started_s - call.waited_s - self._connect_s
            router.metrics.asked(call.exchange.model_label, overhead_s if overhead_s > 0 else 0.0)
        self._reads = 0
        self.relay = relay = Relay(self, self.router, call, state, upstream)
        relay.start(head, body, size)

    # --- what a relay asks

    def set_deadline(self, after_s: float) -> None:
        self.deadline_s = self.router.reactor.now_s + after_s

    def _patience(self, after_s: float) -> None:
        """From now on only the client is waited for."""
        self.deadline_s = math.inf
        self._total_deadline_s = self.router.reactor.now_s + after_s

    def first_content(self) -> None:
        exchange = self.exchange
        if exchange is not None and exchange.first_s is None:
            exchange.first_s = self.router.reactor.now_s - exchange.started_s
            self._comment_due_s = math.inf
            if self._call is not None:
                self._call.forget_body()

    def relayed(self, relay: Relay, verdict: Verdict) -> None:
        self._heard = relay.reads > 0
        self.relay = None
        call, exchange = self._call, self.exchange
        assert call is not None
        assert exchange is not None
        if isinstance(verdict, Failure):
            call.failure = verdict
            return self.wake()
        if call.doubted:
            relay.state.tells_usage = False  # it was our question; an error may also name it because it quotes the request
        self._end_attempt(verdict.outcome)
        self._call = None
        try:
            if verdict.end is not End.DONE:
                self._break_off(call, verdict)
            elif verdict.outcome is Outcome.FAILED:
                exchange.reason, exchange.status = "upstream_error", 502
        except Kicked:
            return self._give_up_on_client(Kick.CLIENT_GONE)
        if self.out:
            self._patience(LOCAL_TIMEOUT_S)
            return self.wake()
        self._settle()  # here and not in the task: a client that leaves now has had its answer
        if self.kicked is Kick.CLIENT_GONE:  # as one did that has left after its last event: its end has been told, and is told once
            self._over = True
        if not self._starting and not (self._rests and not self._over and self._read_nowait()):
            self.wake()
        return None

    def _break_off(self, call: Call, ended: Ended) -> None:
        """The answer is out and cannot be finished. In a stream one error event tells so, and no `[DONE]`. Raises Kicked.

        A body that is not a stream has no place for an error: it is cut, without the end that would make it look whole.
        """
        exchange, problem = call.exchange, no_answer(call, ended).problem
        self.router.metrics.streams_broken += 1
        exchange.reason = problem.code
        if ended.events:
            self.tell(exchange, problem)
        else:
            exchange.status, exchange.close_after = problem.status, True

    def _comment(self, now_s: float) -> None:
        """Called by the sweeper while the engine is waited for: a comment keeps proxies from cutting a silent stream."""
        exchange = self.exchange
        if exchange is None or self._call is None or self.out:
            return
        self._comment_due_s = now_s + self.router.policy.route.sse_comment_interval_s
        data = b"" if self.head_sent else self.stream_head(exchange, b"")
        comment = b": keep-alive\n\n"
        with contextlib.suppress(Kicked):
            self.push(data + (http1.chunk(comment) if self.chunked else comment))


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


def _overloaded(name: str, why: str, wait_s: float) -> Overloaded:
    return Overloaded(f"every endpoint of the model {name!r} is at its limit, and {why}", retry_after_s=wait_s)


def _short(shortage: Shortage, name: str) -> LlmgwError:
    wait_s = shortage.retry_after_s
    shown = cut(name, 100)
    if shortage.why is Why.RESTING:
        return Overloaded(f"every endpoint of the model {shown!r} has asked for a pause", retry_after_s=wait_s, code="rate_limited")
    text = f"every endpoint of the model {shown!r} has failed of late, and is tried again after a pause"
    return Unavailable(text, retry_after_s=wait_s, code="unreachable")
