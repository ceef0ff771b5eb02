"""Moves an engine's answer to the client, behind one small interface: begin, run, and how it ended.

*Bytes*: nothing to change. *Events*: each event is let go as soon as it is whole, with the client's model name in it where
the engine was asked by another, and the end is made true: one `[DONE]` or none. The parser reads first and only the answer's
own body is passed on, so bytes beyond its end reach nobody. Memory is bounded: nothing is read while the client is slow.
"""

from __future__ import annotations

import enum
from typing import Final, Protocol

import attrs
import trio

from llmgw.router import http1, sse
from llmgw.router.body import model_span, renamed
from llmgw.router.families import LAST_EVENTS, Family, Problem, Route, engine_problem
from llmgw.router.http1 import Framing, ResponseReader
from llmgw.router.sweeper import Kick, Kicked
from llmgw.router.upstreams import Upstream

SNIFF_MAX: Final = 8192  # bytes looked at for a first content before the answer is passed on as it is (cases.md, B006)
HOLD_MAX: Final = 65_536  # bytes of a plain answer held back, so that an engine that dies early is a 502 and not a cut body
RENAME_MAX: Final = 64 * 1024 * 1024  # bytes of a plain answer that can be renamed; beyond it the body is passed on unchanged
TAIL_S: Final = 1.0  # how long the end of the message may take after `[DONE]`; then the connection is given up
READS_PER_TURN: Final = 16  # reads without a wait before other connections get their turn: 1 MB


class End(enum.Enum):
    """How a relay ended."""

    DONE = "done"
    LOST = "lost"  # the engine's connection broke, or its answer did not end as it should
    SILENT = "silent"  # no byte for the idle limit
    LATE = "late"  # the total limit has passed
    STOPPING = "stopping"  # the router ends
    GARBLED = "garbled"  # what came is no HTTP


@attrs.frozen
class Ended:
    """`text` tells an operator what was seen."""

    end: End
    text: str = ""


class Link(Protocol):
    """The client's side of a relay, and the one place it waits."""

    head_sent: bool
    chunked: bool

    async def send(self, data: bytes) -> None:
        """All of it. Raises Kicked."""
        ...

    async def readable(self, descriptor: int) -> None: ...

    def heard(self) -> None:
        """A byte came from the engine: silence is counted anew."""
        ...

    def set_deadline(self, after_s: float) -> None:
        """The wait must end this many seconds from now, whatever comes."""
        ...

    def first_content(self) -> None:
        """Now the client gets the engine's first content."""
        ...

    def expired_total(self) -> bool:
        """Was it the total limit that has just passed?"""
        ...


async def pull(link: Link, upstream: Upstream, reader: ResponseReader) -> Ended | None:
    """Reads once from the engine into `reader`, waiting if it must. Says how it ended, None to go on. Raises Kicked for the client."""
    while True:
        try:
            data = upstream.receive()
        except OSError as err:  # a reset ends nothing: not even an answer that is delimited by the close
            return Ended(End.LOST, f"the engine's connection broke: {err.strerror or err}")
        if data is None:
            try:
                await link.readable(upstream.descriptor)
            except Kicked as kick:
                if kick.why is Kick.EXPIRED:
                    if link.expired_total():
                        return Ended(End.LATE, "the total limit has passed")
                    return Ended(End.SILENT, "the engine was silent for too long")
                if kick.why is Kick.STOPPING:
                    return Ended(End.STOPPING, "the router is stopping")
                raise
            continue
        if not data:
            reader.end()
            return None if reader.complete else Ended(End.LOST, "the engine closed the connection")
        link.heard()
        reader.feed(data)
        if reader.broken:
            return Ended(End.GARBLED, reader.broken)
        return None


class EventRelay:
    """Relays a stream of events. First `begin` until it has content (or tells why not), then the head is sent, then `run`."""

    def __init__(self, link: Link, upstream: Upstream, reader: ResponseReader, route: Route, rename: str | None) -> None:
        self.link = link
        self.upstream = upstream
        self.reader = reader
        self.route = route
        self.rename = rename
        self.scanner = sse.EventScanner()
        self.held: list[bytes] = []  # events before the first content
        self.ended = False  # the family's last event was passed on
        self.finished = False  # a choice has said why it ended
        self.failed = False  # an error event of the engine was passed on
        self.parse_warnings = 0

    async def begin(self) -> Ended | Problem | None:
        """Until the first content is at hand: None. A first event that is an error is a Problem; an end before content is Ended."""
        size = 0
        while True:
            data = self.reader.take()
            size += len(data)
            events = self.scanner.feed(data) if data else []
            for index, event in enumerate(events):
                self.held.append(event)
                content = sse.data_of(event)
                if content is None or not content.strip():
                    continue
                error = sse.error_of(event)
                if error is not None:
                    return engine_problem(error)
                self.held += events[index + 1 :]
                return None
            if self.reader.complete:
                return Ended(End.LOST, "the engine ended its stream before any content")
            if size > SNIFF_MAX:
                return None
            ended = await pull(self.link, self.upstream, self.reader)
            if ended is not None:
                return ended

    async def run(self) -> Ended:
        """Passes on all that comes until the end. The head must have been sent. Raises Kicked when the client is gone."""
        held, self.held = self.held, []
        out = self._events(held)
        if out:
            self.link.first_content()
            await self._send(out)
        turns = 0
        while True:
            data = self.reader.take()
            if data:
                out = self._events(self.scanner.feed(data))
                if self.scanner.overflow:
                    return Ended(End.GARBLED, f"one event is larger than {sse.EVENT_MAX} bytes")
                if out:
                    self.link.first_content()
                    await self._send(out)
                if self.ended and not self.reader.complete:
                    self.link.set_deadline(TAIL_S)
            if self.reader.complete:
                return await self._end()
            turns += 1
            if turns % READS_PER_TURN == 0:
                await trio.lowlevel.checkpoint()
            try:
                ended = await pull(self.link, self.upstream, self.reader)
            except Kicked:
                if self.ended:  # the client left after the stream's last event: it had everything
                    return Ended(End.DONE, "the client left after the last event")
                raise
            if ended is not None:
                return await self._broken(ended)

    def _events(self, events: list[bytes]) -> bytes:
        """What the client gets of these events."""
        out: list[bytes] = []
        for event in events:
            if self.ended:
                break  # nothing follows the last event
            if self.route.done and sse.is_done(event):
                self.ended = True
                if not self.failed:
                    out.append(event)
                break
            if not self.finished and sse.is_finish(event):
                self.finished = True
            if not self.failed and b'"error"' in event and sse.error_of(event) is not None:
                self.failed = True
            if not self.route.done and sse.event_name(event) in LAST_EVENTS.get(self.route.family, ()):
                self.finished = True
            out.append(event if self.rename is None else self._renamed(event, self.rename))
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

    async def _send(self, data: bytes) -> None:
        await self.link.send(http1.chunk(data) if self.link.chunked else data)

    async def _end(self) -> Ended:
        rest = self.scanner.rest()
        if rest and not self.ended:
            clean = rest.rstrip(b"\r\n")
            if clean and self.reader.framing is not Framing.EOF:  # the last event's empty line is missing: it was whole all the same
                out = self._events([clean + b"\n\n"])
                if out:
                    await self._send(out)
        if self.failed:
            return Ended(End.DONE, "the engine reported an error in the stream")
        if self.ended:
            return Ended(End.DONE)
        if self.route.done:
            if not self.finished:
                return Ended(End.LOST, "the engine ended its stream before the answer was finished")
            await self._send(sse.DONE)
            return Ended(End.DONE)
        if self.reader.framing is Framing.EOF and self.route.family is not Family.OPENAI and not self.finished:
            return Ended(End.LOST, "the engine closed the connection before its stream was finished")
        return Ended(End.DONE)

    async def _broken(self, ended: Ended) -> Ended:
        """The connection ended without the message's end. What the family calls the end may have come all the same."""
        if ended.end in (End.LOST, End.SILENT, End.GARBLED) and (self.ended or self.failed):
            return Ended(End.DONE, ended.text)
        if ended.end is End.LOST and self.finished and self.route.done:
            await self._send(sse.DONE)
            return Ended(End.DONE, ended.text)
        return ended


class BytesRelay:
    """Relays an answer that is not a stream of events. `begin` holds back a small one until it is whole."""

    def __init__(self, link: Link, upstream: Upstream, reader: ResponseReader, rename: str | None) -> None:
        self.link = link
        self.upstream = upstream
        self.reader = reader
        self.rename = rename
        self.held: list[bytes] = []
        self.size = 0

    async def begin(self) -> Ended | None:
        """Until the whole answer is at hand, or more of it than is held back."""
        limit = HOLD_MAX if self.rename is None else RENAME_MAX
        while True:
            data = self.reader.take()
            if data:
                self.held.append(data)
                self.size += len(data)
            if self.reader.complete:
                if self.rename is not None:
                    whole = b"".join(self.held)
                    if model_span(whole) is not None or b'"model"' in whole:
                        whole = renamed(whole, self.rename)
                    self.held, self.size = [whole], len(whole)
                return None
            if self.size > limit:
                return None
            ended = await pull(self.link, self.upstream, self.reader)
            if ended is not None:
                return ended

    @property
    def whole(self) -> bytes | None:
        """The whole body, when `begin` has it."""
        return b"".join(self.held) if self.reader.complete else None

    async def run(self) -> Ended:
        """Passes on the rest. The head must have been sent. Raises Kicked when the client is gone."""
        self.link.first_content()
        data = b"".join(self.held)
        self.held = []
        turns = 0
        while True:
            if data:
                await self.link.send(http1.chunk(data) if self.link.chunked else data)
            data = self.reader.take()
            if data:
                continue
            if self.reader.complete:
                return Ended(End.DONE)
            turns += 1
            if turns % READS_PER_TURN == 0:
                await trio.lowlevel.checkpoint()
            ended = await pull(self.link, self.upstream, self.reader)
            if ended is not None:
                return ended
            data = self.reader.take()
