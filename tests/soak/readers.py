"""Clients that read heavy streams slowly, hold every byte against what must come, and hang up in the middle now and then.

A stream that ends early is no failure where its cause is known: the worker that held the connection was killed, or the engine that
gave it was. Then what did come must be right all the same, and a dead engine must have been told as one error event.
"""

from __future__ import annotations

import enum
import json
import random
from collections.abc import Callable

import attrs
import h11
import trio

from tests.chaos.hash_engine import events, name_in

MODEL = "long"
EVENT_BYTES = 2048  # of text in each event: heavy enough to fill every buffer between engine and client
EVENTS_MAX = 1500
BUFFER_BYTES = 16_384  # of the client's socket: what it does not read soon stands still at the router
PIECE_BYTES = 65_536
PAUSE_S_MAX = 0.02  # between two reads; some streams take one long pause besides
LONG_PAUSE_S = 2.0
ABORTED_SHARE = 0.2
ANSWER_S_MAX = 120.0  # longer is a hang
ERROR_EVENT = b'data: {"error"'
FAILURES_KEPT = 20


class End(enum.Enum):
    """How a stream ended, where that was right."""

    WHOLE = "whole"
    ABORTED = "aborted"
    WITH_ITS_WORKER = "with the worker that was killed"
    WITH_ITS_ENGINE = "with the engine that was killed"


@attrs.define(eq=False)
class Readers:
    """`lost_ports` are client ports whose worker was killed, `killed` the engines that were; whoever kills fills them in before."""

    port: int
    lost_ports: set[int] = attrs.Factory(set)
    killed: set[str] = attrs.Factory(set)
    open_ports: set[int] = attrs.Factory(set)
    ends: dict[End, int] = attrs.Factory(lambda: dict.fromkeys(End, 0))
    failures: list[str] = attrs.Factory(list)
    failed: int = 0
    bytes: int = 0

    async def read(self, number: int, is_over: Callable[[], bool]) -> None:
        """One stream after another until it is over; the last one is read to its end."""
        rng, count = random.Random(number), 0
        while not is_over():
            count += 1
            seed = f"r{number}-{count}"
            end: End | str = f"no end within {ANSWER_S_MAX:g} s"
            with trio.move_on_after(ANSWER_S_MAX):
                end = await self._stream(seed, rng)
            if isinstance(end, End):
                self.ends[end] += 1
            else:
                self.failed += 1
                if len(self.failures) < FAILURES_KEPT:
                    self.failures.append(f"{seed}: {end}")

    async def _stream(self, seed: str, rng: random.Random) -> End | str:
        """How it ended, or what was wrong."""
        count = rng.randint(20, EVENTS_MAX)
        stop_at = rng.randint(0, count * EVENT_BYTES) if rng.random() < ABORTED_SHARE else None
        with trio.socket.socket() as sock:
            sock.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, BUFFER_BYTES)
            await sock.connect(("127.0.0.1", self.port))
            own_port = sock.getsockname()[1]
            self.open_ports.add(own_port)
            self.lost_ports.discard(own_port)  # of a connection before this one
            try:
                status, got, broken = await _answer(sock, _asked(seed, count), stop_at, rng)
            finally:
                self.open_ports.discard(own_port)
        self.bytes += len(got)
        if status not in (0, 200):
            return f"status {status}: {got[:300]!r}"
        name = name_in(got)
        expected = b"".join(events(MODEL, seed, count, name, EVENT_BYTES))
        left = stop_at is not None and len(got) >= stop_at
        end = judged(got, expected, broken, left=left, worker_lost=own_port in self.lost_ports, engine_killed=name in self.killed)
        return end or f"wrong after {len(got)} of {len(expected)} bytes of {name or 'nobody'}: {broken or 'ended'} after {got[-200:]!r}"


def judged(got: bytes, expected: bytes, broken: str, *, left: bool, worker_lost: bool, engine_killed: bool) -> End | None:
    """How a stream ended of which `got` was read, or None where that was wrong. `left`: the client went away before its end."""
    right = expected.startswith(got)
    if broken:
        return End.WITH_ITS_WORKER if right and worker_lost else None
    if got == expected:
        return End.WHOLE
    if left and right:
        return End.ABORTED
    before, mark, error = got.rpartition(ERROR_EVENT)
    told = bool(mark) and error.count(b"\n\n") == 1 and error.endswith(b"\n\n") and expected.startswith(before)
    return End.WITH_ITS_ENGINE if told and engine_killed else None


def _asked(seed: str, count: int) -> bytes:
    body = {"model": MODEL, "stream": True, "max_tokens": count, "messages": [{"role": "user", "content": seed}]}
    return json.dumps(body).encode()


async def _answer(sock: trio.socket.SocketType, body: bytes, stop_at: int | None, rng: random.Random) -> tuple[int, bytes, str]:
    """(status, 0 before there was any; the body's bytes; why the connection broke, "" for a whole answer or one left at `stop_at`)."""
    client = h11.Connection(h11.CLIENT)
    headers = [("host", "router"), ("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
    request = client.send(h11.Request(method="POST", target="/v1/chat/completions", headers=headers))
    whole = b"".join(part or b"" for part in (request, client.send(h11.Data(data=body)), client.send(h11.EndOfMessage())))
    status, got = 0, bytearray()
    long_pause = rng.random() < ABORTED_SHARE
    try:
        await trio.SocketStream(sock).send_all(whole)
        while True:
            event = client.next_event()
            if event is h11.NEED_DATA:
                await trio.sleep(rng.uniform(0.0, PAUSE_S_MAX))
                if long_pause and len(got) > PIECE_BYTES:
                    long_pause = False
                    await trio.sleep(LONG_PAUSE_S)
                client.receive_data(await sock.recv(PIECE_BYTES))
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                got += event.data
                if stop_at is not None and len(got) >= stop_at:
                    return status, bytes(got), ""
            elif isinstance(event, h11.EndOfMessage):
                return status, bytes(got), ""
            else:
                return status, bytes(got), f"ended by {event!r}"
    except (OSError, trio.BrokenResourceError, h11.RemoteProtocolError) as err:
        return status, bytes(got), f"{type(err).__name__}: {err}"
