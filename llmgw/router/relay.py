"""One conversation with an engine: sends the request, moves the answer to the client, and says how it ended.

Everything here is called by the reactor and waits for nothing; whoever started the conversation is told its end by one call of
`Client.relayed`. Until the first content nothing has been given, and the end is a Failure that another endpoint may make good.
*Bytes*: nothing to change. *Events*: each event is let go as soon as it is whole, with the client's model name in it where the
engine was asked by another, and the end is made true: one `[DONE]` or none. The parser reads first and only the answer's own
body is passed on, so bytes beyond its end reach nobody. Memory is bounded: nothing is read while the client is slow.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal

import attrs

from llmgw.router import http1, sse
from llmgw.router.answer_headers import ENDPOINT
from llmgw.router.body import Piece, is_json, model_span, renamed
from llmgw.router.breaker import Outcome
from llmgw.router.client import SEND_MAX, Client, header_lines
from llmgw.router.exchange import Call, Failure
from llmgw.router.families import LAST_EVENTS, Family, Problem, cut, engine_problem
from llmgw.router.http1 import READ_BYTES, AnswerHead, Framing, ResponseReader
from llmgw.router.metrics import Histogram
from llmgw.router.reactor import GONE, READ, WRITE
from llmgw.router.retry import retry_after_s, retryable_status
from llmgw.router.sweeper import Kick, Kicked
from llmgw.router.upstreams import EndpointState, Upstream, User
from llmgw.router.usage import USAGE_KEY, Meter

if TYPE_CHECKING:
    from llmgw.router.router import Router
    from llmgw.router.table import Candidate

SNIFF_MAX: Final = 8192  # bytes looked at for a first content before the answer is passed on as it is (cases.md, B006)
HOLD_MAX: Final = 65_536  # bytes of JSON held back, so that an engine that dies early is a 502 and not a cut body; sound is let go at once
RENAME_MAX: Final = 64 * 1024 * 1024  # bytes of a plain answer that can be renamed; beyond it the body is passed on unchanged
ERROR_BODY_MAX: Final = 1024 * 1024  # bytes of an engine's error that are kept for the client
TAIL_S: Final = 1.0  # how long the end of the message may take after `[DONE]`; then the connection is given up
READS_PER_TURN: Final = 16  # reads without a wait before other connections get their turn: 1 MB
JOIN_MAX: Final = 16_384  # bytes; head and body go out in one piece below, in two above (router-measurements.md)
REST_DEFAULT_S: Final = 1.0  # for a 429 without Retry-After

# What of an engine's head a client does not get: framing and hops are ours, and so are cookies, ids and CORS.
_WITHHELD: Final = frozenset(
    {
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer", b"transfer-encoding",
        b"upgrade", b"content-length", b"set-cookie", b"x-request-id", b"server", b"alt-svc", b"cache-control",
        b"x-accel-buffering", b"vary", b"strict-transport-security", b"www-authenticate", ENDPOINT,
    }
)  # fmt: skip
# Limits that an engine tells of are those of our account there, and no client's.
_WITHHELD_BEGINNINGS: Final = (b"access-control-", b"x-ratelimit-", b"anthropic-ratelimit-")


class End(enum.Enum):
    """How a conversation ended."""

    DONE = "done"
    LOST = "lost"  # the engine's connection broke, or its answer did not end as it should
    SILENT = "silent"  # no byte for the idle limit
    LATE = "late"  # the total limit has passed
    STOPPING = "stopping"  # the router ends
    GARBLED = "garbled"  # what came is no HTTP


@attrs.frozen
class Ended:
    """The client was given an answer. `text` tells an operator what was seen, `outcome` what it says of the endpoint.

    `events`: what broke is a stream of events, in which an error has a place.
    """

    end: End
    text: str = ""
    outcome: Outcome = Outcome.ANSWERED
    events: bool = False


_DONE: Final = Ended(End.DONE)
Verdict = Ended | Failure


class AnswerKind:
    """What an engine's head says of its body, and the header lines of it that a client gets."""

    __slots__ = ("events", "json", "lines")

    def __init__(self, head: AnswerHead) -> None:
        kind = (head.get(b"content-type") or b"").lower()
        plain = (head.get(b"content-encoding") or b"identity").lower() == b"identity"
        self.events = head.status < 300 and plain and kind.startswith(b"text/event-stream")
        self.json = plain and b"json" in kind
        self.lines = header_lines(passed_on(head.headers))


def passed_on(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    # RFC 9110, 7.6.1: what the engine's `Connection` names is for this hop alone.
    hop = {token.strip().lower() for name, value in headers if name == b"connection" for token in value.split(b",")}
    return [pair for pair in headers if pair[0] not in _WITHHELD and pair[0] not in hop and not pair[0].startswith(_WITHHELD_BEGINNINGS)]


def _rest(several: list[Piece], sent: int) -> list[memoryview]:
    """What is left of pieces after so many bytes."""
    left: list[memoryview] = []
    for piece in several:
        size = len(piece)
        if sent < size:
            left.append(memoryview(piece)[sent:])
        sent = sent - size if sent > size else 0
    return left


class _Answer:
    """How one kind of answer is handled. `had_everything`: the client has got all that matters, so that it may leave.

    `plain`: pieces may come that go on as they are; `pass_on` is asked for each before it is read.
    """

    __slots__ = ("had_everything", "plain")

    def __init__(self) -> None:
        self.had_everything = False
        self.plain = False

    def pass_on(self, data: bytes) -> bool:
        """Is `data` one whole piece, and was it passed on as it is? Where not, nothing has happened. Raises Kicked."""
        return False

    def step(self) -> Verdict | None:
        """More of it has come. None to go on."""
        raise NotImplementedError

    def broken(self, ended: Ended) -> Verdict:
        """The conversation ended without the message's end."""
        raise NotImplementedError


class Relay(User):
    """One conversation on one connection. Ends with exactly one call of `relayed` or `gone`, also where it is told to end."""

    __slots__ = ("_answer", "_missed", "_unsent", "call", "link", "over", "reader", "reads", "router", "state", "tail", "upstream")

    def __init__(self, link: Client, router: Router, call: Call, state: EndpointState, upstream: Upstream) -> None:
        super().__init__()
        self.link = link
        self.router = router
        self.call = call
        self.state = state
        self.upstream = upstream
        self.reader = ResponseReader(state.heads)
        self.reads = 0  # how often something came: the sweep tells silence by it
        self.tail = False  # the client has everything, only the message's end is still awaited
        self.over = False
        self._answer: _Answer | None = None
        self._unsent: list[memoryview] = []
        self._missed = False  # there may be more to read, but the client was slow
        upstream.user = self

    def start(self, head: bytes, body: list[Piece], size: int) -> None:
        """Sends the request. `size`: of the whole body."""
        self.link.set_deadline(self.call.policy.route.first_byte_timeout_s)
        upstream, size, first = self.upstream, size + len(head), body[0]
        several: list[Piece] = [head, *body]
        try:
            if size < JOIN_MAX:
                whole = head + first if len(body) == 1 and isinstance(first, bytes) else b"".join(several)
                sent = upstream.send(whole)
                if sent == size:
                    return None
                several = [whole]
            elif upstream.secure:
                sent = 0
            else:  # by one call, so that no packet goes out with the head alone
                sent = upstream.send_pieces(several)
        except OSError as err:
            return self._not_taken(err)
        if sent < size:
            self._unsent = _rest(several, sent)
            if upstream.secure:
                self._send()
        return None

    # --- what the reactor tells

    def engine_ready(self, events: int) -> None:
        if self._unsent and events & WRITE:
            self._send()
        if events & READ and not self.over:
            self._read(bool(events & GONE))

    def failed(self, error: Exception) -> None:
        self.drop()
        self.link.failed(error)

    def resume(self) -> None:
        """The client has taken everything: go on reading."""
        if self._missed and not self.over:
            self._missed = False
            self._read(True)

    def _send(self) -> None:
        unsent, upstream = self._unsent, self.upstream
        try:
            while unsent:
                view = unsent[0]
                sent = upstream.send(view[:SEND_MAX])
                if not sent:
                    return
                self.link.set_deadline(self.call.policy.route.first_byte_timeout_s)  # a long body is no silence while it moves
                if sent == len(view):
                    del unsent[0]
                else:
                    unsent[0] = view[sent:]
        except OSError as err:
            self._not_taken(err)

    def _not_taken(self, err: OSError) -> None:
        """The engine closed while it was sent to. It may have answered before that; what it said is still there to be read."""
        self._unsent = []
        self.reader.refuse_reuse()
        with contextlib.suppress(OSError):
            while not self.reader.head_done and (early := self.upstream.receive()):
                self.reads += 1
                self.reader.feed(early)
        if not self.reader.head_done:
            return self.end(Ended(End.LOST, f"the engine closed the connection: {err.strerror or err}"))
        self._step()
        if not self.over:
            self._read(True)
        return None

    def _read(self, to_the_end: bool) -> None:
        """Reads what is there. `to_the_end`: a short read does not mean that nothing is left."""
        reader, upstream, link = self.reader, self.upstream, self.link
        to_the_end = to_the_end or upstream.secure
        for _ in range(READS_PER_TURN):
            if link.out:
                self._missed = True
                return None
            try:
                data = upstream.receive()
            except OSError as err:  # a reset ends nothing: not even an answer that is delimited by the close
                return self.end(Ended(End.LOST, f"the engine's connection broke: {err.strerror or err}"))
            if data is None:
                return None
            if data:
                self.reads += 1
                answer = self._answer
                if answer is not None and answer.plain and self._passed(answer, data):
                    if self.over:
                        return None
                    if len(data) < READ_BYTES and not to_the_end:
                        return None
                    continue
                reader.feed(data)
                if self._unsent:  # the engine answers while the body is still going out
                    reader.refuse_reuse()
                    if reader.head_done:  # and wants no more of it
                        self._unsent = []
            else:
                reader.end()
                if not reader.complete:
                    while_sent = " while the request was sent" if self._unsent else ""
                    return self.end(Ended(End.LOST, f"the engine closed the connection{while_sent}"))
            self._step()
            if self.over:
                return None
            if len(data) < READ_BYTES and not to_the_end:
                return None
        self.router.reactor.again(self.upstream, READ | (GONE if to_the_end else 0))
        return None

    def _passed(self, answer: _Answer, data: bytes) -> bool:
        """Was what has come passed on as it is? The shortest way, which nearly every piece of a stream goes."""
        try:
            return answer.pass_on(data)
        except Kicked:
            self.client_gone()
            return True

    def _step(self) -> None:
        reader = self.reader
        try:
            if reader.broken:
                return self.end(Ended(End.GARBLED, reader.broken))
            answer = self._answer
            if answer is None:
                if not reader.head_done:
                    return None
                found = self._begin()
                if isinstance(found, Failure):
                    return self._finish(found)
                self._answer = answer = found
            verdict = answer.step()
            if verdict is not None:
                self._finish(verdict)
        except Kicked:
            self.client_gone()
        return None

    # --- how it ends

    def end(self, ended: Ended) -> None:
        """It is over although the message is not: the engine's connection broke, or somebody's patience is at its end."""
        if self.over:
            return
        reader = self.reader
        try:
            if self._answer is not None:
                self._finish(self._answer.broken(ended))
            elif ended.end is End.LOST and self.upstream.reused and reader.untouched and not self.state.retired:
                self._finish(attrs.evolve(no_answer(self.call, ended), stale=True))
            else:
                if ended.end is End.SILENT and self._unsent:
                    ended = Ended(End.SILENT, "the engine did not take the request")
                self._finish(no_answer(self.call, ended))
        except Kicked:
            self.client_gone()

    def client_gone(self) -> None:
        """Nobody is left to relay to."""
        if self.over:
            return None
        if self._answer is not None and self._answer.had_everything:  # it left after the last event
            return self._finish(_DONE)
        self.drop()
        self.link.gone()
        return None

    def drop(self) -> None:
        """Gives the conversation up without a word."""
        self.over = True
        self._unsent = []
        self._answer = None
        self.upstream.close()

    def _finish(self, verdict: Verdict) -> None:
        self.over = True
        self._unsent = []
        self._answer = None  # it knows us: nobody shall have to look for the circle
        reader = self.reader
        if reader.surplus:
            self.router.metrics.surplus += 1
        if reader.reusable:
            self.state.keep(self.upstream, self.router.reactor.now_s)
        else:
            self.upstream.close()
        self.link.relayed(self, verdict)

    # --- the engine's answer

    def _begin(self) -> _Answer | Failure:
        reader, call = self.reader, self.call
        head = reader.head
        kind = head.known
        if kind is None:
            kind = head.known = AnswerKind(head)
        status = head.status
        if not kind.events:  # a stream's first event may yet be an error
            self.state.answered(status)
        if status > 599:
            text = f"the engine answered with a status that HTTP does not have ({status})"
            return Failure(Problem(502, "upstream_invalid", text, upstream=True), Outcome.FAILED, retry=True)
        if status >= 400:
            return _Refusal(self)
        if status >= 300:
            problem = Problem(502, "upstream_redirect", f"the engine answered with a redirect ({status})", upstream=True)
            return Failure(problem, Outcome.FAILED, retry=True)
        meter = call.exchange.meter = Meter(call.route.family, hidden=call.hidden)
        asked = call.asked.model
        candidate = _candidate(call)
        rename = asked if candidate.engine_name != asked or call.exchange.model_label != asked else None
        if kind.events:
            return _Events(self, kind, meter, rename)
        return _Bytes(self, kind, meter, rename if kind.json else None)


def _candidate(call: Call) -> Candidate:
    assert call.choice is not None  # a conversation belongs to an attempt
    return call.choice.candidate


# Engines whose server is asyncio's, which sets TCP_NODELAY on every connection: they wait for no acknowledgement.
_SENDS_AT_ONCE: Final = frozenset({"vllm", "sglang"})
# Of one chunk with one event of one line: the coding's own two, and the two that end the event.
_RETURNS: Final = 2
_LINE_FEEDS: Final = 4


class _Events(_Answer):
    """A stream of events. Nothing is given before its first content."""

    __slots__ = (
        "_done", "_ended", "_failed", "_finished", "_gaps", "_held", "_kind", "_last", "_last_s", "_meter", "_relay", "_rename", "_scanner",
        "_size", "_streams",
    )  # fmt: skip

    def __init__(self, relay: Relay, kind: AnswerKind, meter: Meter, rename: str | None) -> None:
        super().__init__()
        route = relay.call.route
        self._relay = relay
        self._kind = kind
        self._meter = meter
        self._rename = rename
        self._done = route.done
        self._last = LAST_EVENTS.get(route.family, frozenset())
        self._scanner = sse.EventScanner()
        self._held: list[bytes] = []  # events before the first content
        self._gaps: Histogram | None = None  # of the time between two pieces
        self._last_s = 0.0
        self._size = 0
        self._streams = False  # the first content was there
        self._ended = False  # the family's last event was passed on
        self._finished = False  # a choice has said why it ended
        self._failed = False  # an error event of the engine was passed on

    def step(self) -> Verdict | None:
        relay = self._relay
        reader = relay.reader
        data = reader.take()
        events = self._scanner.feed(data) if data else []
        if not self._streams:
            self._size += len(data)
            found = self._sniff(events)
            if found is not True:
                return found
            events, self._held = self._held, []
        elif self._scanner.overflow:
            return self._cut(Ended(End.GARBLED, f"one event is larger than {sse.EVENT_MAX} bytes"))
        out = self._passed(events) if events else b""
        if out:
            now_s = relay.router.reactor.now_s
            if self._gaps is not None:
                self._gaps.add(now_s - self._last_s)
            else:
                self._gaps = relay.router.metrics.itl(relay.call.exchange.model_label)
            self._last_s = now_s
        # What has something to be changed, or may be the last, goes the long way; so does what ends otherwise than by `[DONE]`.
        self.plain = (
            self._done
            and self._rename is None
            and relay.link.chunked
            and not (self._finished or self._failed or self._ended)
            and reader.between_chunks
            and self._scanner.at_rest
        )
        if reader.complete:
            return self._end(out)
        if out:
            relay.link.push(http1.chunk(out) if relay.link.chunked else out)
        if self._ended and not self.had_everything:
            self.had_everything = relay.tail = True
            relay.link.set_deadline(TAIL_S)
        return None

    def pass_on(self, data: bytes) -> bool:
        # The same questions as in `EventScanner.feed` and `_passed`, asked of the chunk as it came: one event on one line that is an
        # object, and in it no error, no usage and no end. Nothing else is touched: with a thousand streams, what lies in memory here
        # and there (reader, chunks, scanner) has left the processor's cache by the next piece.
        relay, gaps = self._relay, self._gaps
        at = http1.whole_chunk(data)
        if (
            not at
            or gaps is None
            or not data.startswith(b"data: {", at)
            or not data.endswith(b"\n\n\r\n")
            or data.count(b"\n") != _LINE_FEEDS
            or data.count(b"\r") != _RETURNS
            or data.find(b"error") >= 0
            or data.find(USAGE_KEY) >= 0
            or data.count(b"finish_reason") != data.count(b'"finish_reason":null')
        ):
            return False
        now_s = relay.router.reactor.now_s
        gaps.add(now_s - self._last_s)
        self._last_s = now_s
        relay.link.push(data)
        return True

    def _sniff(self, events: list[bytes]) -> Failure | Literal[True] | None:
        """Looks for a first content: True when it is there, None while it may come.

        A first event that is an error, or an end before any content, is a Failure.
        """
        relay = self._relay
        for index, event in enumerate(events):
            self._held.append(event)
            error = sse.error_of(event)
            if error is not None:
                return self._refused(error)
            content = sse.data_of(event)
            if content is None or not content.strip() or sse.event_name(event) == b"ping":
                continue
            self._held += events[index + 1 :]
            self._begin()
            return True
        if relay.reader.complete:
            error = sse.error_of(self._scanner.rest())  # the empty line after it is missing, and the message is whole all the same
            if error is not None:
                return self._refused(error)
            relay.state.answered(relay.reader.status)
            return no_answer(relay.call, Ended(End.LOST, "the engine ended its stream before any content"))
        if self._size > SNIFF_MAX:
            self._begin()
            return True
        return None

    def _refused(self, error: object) -> Failure:
        problem = engine_problem(error)
        self._relay.state.answered(problem.status)
        outcome = Outcome.FAILED if problem.status >= 500 else Outcome.ANSWERED
        return Failure(problem, outcome, retry=retryable_status(problem.status))

    def _begin(self) -> None:
        """From here on the client gets what comes. Raises Kicked."""
        relay = self._relay
        link = relay.link
        self._streams = True
        relay.state.answered(relay.reader.status)
        if not link.head_sent:
            link.push(link.stream_head(relay.call.exchange, self._kind.lines))
        link.first_content()
        if relay.state.endpoint.engine in _SENDS_AT_ONCE:
            relay.upstream.acknowledge_rarely()

    def _passed(self, events: list[bytes]) -> bytes:
        """What the client gets of these events."""
        out: list[bytes] = []
        for event in events:
            if self._ended:
                break  # nothing follows the last event
            if self._done:
                if event.find(b"[DONE]") >= 0 and sse.is_done(event):
                    self._ended = True
                    if not self._failed:
                        out.append(event)
                    break
            elif sse.event_name(event) in self._last:
                self._finished = True
            # Nearly every chunk of the OpenAI family says that it is not the last: what says it as all do is not looked at further.
            if not self._finished and event.count(b"finish_reason") > event.count(b'"finish_reason":null') and sse.is_finish(event):
                self._finished = True
            if not self._failed and event.find(b"error") >= 0 and sse.data_of(event) is not None and sse.error_of(event) is not None:
                self._failed = True
            if event.find(USAGE_KEY) >= 0 and not (event := self._meter.event(event)):
                continue
            out.append(event if self._rename is None else self._renamed(event, self._rename))
        return out[0] if len(out) == 1 else b"".join(out)

    @staticmethod
    def _renamed(event: bytes, name: str) -> bytes:
        if b'"model"' not in event:
            return event
        data = sse.data_of(event)
        if data is None:
            return event
        changed = renamed(data, name)
        return event if changed is data else sse.with_data(event, data, changed)

    def _end(self, out: bytes) -> Verdict:
        """The message is whole; `out` is the last of it. Is the stream?"""
        reader = self._relay.reader
        rest = self._scanner.rest()
        if rest and not self._ended:
            clean = rest.rstrip(b"\r\n")
            # The last event's empty line is missing. It was whole all the same where its data are; half an event reaches nobody.
            if reader.framing is not Framing.EOF and (sse.is_done(clean) or is_json(sse.data_of(clean) or b"")):
                out += self._passed([clean + b"\n\n"])
        if self._failed:
            return self._close(out, Ended(End.DONE, "the engine reported an error in the stream", Outcome.FAILED))
        if self._ended:
            return self._close(out, _DONE)
        if self._done:
            if not self._finished:
                return self._cut(Ended(End.LOST, "the engine ended its stream before the answer was finished"), out)
            return self._close(out + sse.DONE, _DONE)
        family = self._relay.call.route.family
        if family is not Family.OPENAI and not self._finished:
            return self._cut(Ended(End.LOST, "the engine ended its stream before the answer was finished"), out)
        return self._close(out, _DONE)

    def broken(self, ended: Ended) -> Verdict:
        """What the family calls the end may have come all the same."""
        if not self._streams:
            return no_answer(self._relay.call, ended)
        if ended.end in (End.LOST, End.SILENT, End.GARBLED) and (self._ended or self._failed):
            return self._close(b"", Ended(End.DONE, ended.text, Outcome.FAILED if self._failed else Outcome.ANSWERED))
        if ended.end is End.LOST and self._finished and self._done:
            return self._close(sse.DONE, Ended(End.DONE, ended.text))
        return self._cut(ended)

    def _cut(self, ended: Ended, out: bytes = b"") -> Ended:
        link = self._relay.link
        if out:
            link.push(http1.chunk(out) if link.chunked else out)
        return attrs.evolve(ended, outcome=no_answer(self._relay.call, ended).outcome, events=True)

    def _close(self, out: bytes, ended: Ended) -> Verdict:
        link = self._relay.link
        if link.chunked:
            out = http1.chunk(out) + http1.LAST_CHUNK if out else http1.LAST_CHUNK
        if out:
            link.push(out)
        if self._failed:
            exchange = self._relay.call.exchange
            exchange.reason, exchange.status = "upstream_error", 502
        return ended


class _Bytes(_Answer):
    """An answer that is not a stream of events. A small one is held back until it is whole."""

    __slots__ = ("_held", "_hold_max", "_kind", "_meter", "_relay", "_rename", "_size", "_streams")

    def __init__(self, relay: Relay, kind: AnswerKind, meter: Meter, rename: str | None) -> None:
        super().__init__()
        self._relay = relay
        self._kind = kind
        self._meter = meter
        self._rename = rename
        self._held: list[bytes] = []
        self._size = 0
        self._hold_max = RENAME_MAX if rename is not None else HOLD_MAX if kind.json else 0
        self._streams = False

    def step(self) -> Verdict | None:
        relay = self._relay
        reader, link = relay.reader, relay.link
        data = reader.take()
        if data:
            self._meter.feed(data)
        if self._streams:
            if data:
                link.push(http1.chunk(data) if link.chunked else data)
            if not reader.complete:
                return None
            if link.chunked:
                link.push(http1.LAST_CHUNK)
            return _DONE
        if data:
            self._held.append(data)
            self._size += len(data)
        if not reader.complete and (not self._size or self._size <= self._hold_max):
            return None
        if link.head_sent:  # comments went out for a stream, and the engine gave none
            problem = Problem(502, "upstream_invalid", "the engine answered without a stream", upstream=True)
            return Failure(problem, Outcome.ANSWERED, retry=False)
        exchange, status = relay.call.exchange, reader.status
        body = self._held[0] if len(self._held) == 1 else b"".join(self._held)
        self._held = []
        link.first_content()
        if reader.complete:
            if self._rename is not None and (model_span(body) is not None or b'"model"' in body):
                body = renamed(body, self._rename)
            link.push(link.begin_answer(exchange, status, self._kind.lines, len(body)) + body)
            return _DONE
        self._streams = True
        left = reader.length
        length = left + len(body) if left is not None and self._rename is None else None
        head = link.begin_answer(exchange, status, self._kind.lines, length)
        link.push(head + (http1.chunk(body) if link.chunked else body))
        return None

    def broken(self, ended: Ended) -> Verdict:
        if self._streams:
            return attrs.evolve(ended, outcome=no_answer(self._relay.call, ended).outcome)
        # The engine had begun to answer, so it did the work: asking another would do it twice.
        return attrs.evolve(no_answer(self._relay.call, ended), retry=False)


class _Refusal(_Answer):
    """An engine's error: kept, because another endpoint may do better."""

    __slots__ = ("_parts", "_relay", "_size")

    def __init__(self, relay: Relay) -> None:
        super().__init__()
        self._relay = relay
        self._parts: list[bytes] = []
        self._size = 0

    def step(self) -> Verdict | None:
        reader = self._relay.reader
        data = reader.take()
        if data:
            self._parts.append(data)
            self._size += len(data)
        return self._failure() if reader.complete or self._size > ERROR_BODY_MAX else None

    def broken(self, ended: Ended) -> Verdict:
        if ended.end in (End.LATE, End.STOPPING):
            return no_answer(self._relay.call, ended)
        return self._failure()  # what came of the error is what the client is told

    def _failure(self) -> Failure:
        relay = self._relay
        reader = relay.reader
        status, body = reader.status, b"".join(self._parts)[:ERROR_BODY_MAX]
        if status == 429:
            wait_s = retry_after_s(reader.get(b"retry-after"), REST_DEFAULT_S)
            relay.state.resting_until_s = relay.router.reactor.now_s + wait_s
        text = cut(body.decode("utf-8", "replace").strip()) or "no text"
        problem = Problem(status, "upstream_error", f"the engine answered {status}: {text}", upstream=True)
        outcome = Outcome.FAILED if status >= 500 else Outcome.ANSWERED
        return Failure(problem, outcome, retryable_status(status), body, tuple(passed_on(reader.headers)))


STOPPING: Final = Problem(503, "shutting_down", "the router is stopping; ask again", retry_after_s=1.0)


def no_answer(call: Call, ended: Ended) -> Failure:
    """The engine gave no (whole) answer, and the client has got nothing yet."""
    if ended.end is End.SILENT:
        text = f"the engine gave no byte in time: {ended.text}"
        return Failure(Problem(504, "upstream_timeout", text, upstream=True), Outcome.SILENT, retry=True)
    if ended.end is End.LATE:
        limit_s = call.policy.route.total_timeout_s
        problem = Problem(504, "timeout", f"the request took longer than the total limit of {limit_s:g} s")
        return Failure(problem, Outcome.LEFT, retry=False)
    if ended.end is End.STOPPING:
        return Failure(STOPPING, Outcome.LEFT, retry=False)
    code = "upstream_invalid" if ended.end is End.GARBLED else "upstream_disconnected"
    return Failure(Problem(502, code, ended.text, upstream=True), Outcome.FAILED, retry=True)


def why_ended(kick: Kick, late: bool) -> Ended:
    """A conversation is ended from outside. `late`: the total limit has passed."""
    if kick is Kick.STOPPING:
        return Ended(End.STOPPING, "the router is stopping")
    if late:
        return Ended(End.LATE, "the total limit has passed")
    return Ended(End.SILENT, "the engine was silent for too long")
