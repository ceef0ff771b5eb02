"""A steady load on `/v1`, as a process of its own: `python -m tests.chaos.load HOST:PORT MODEL RATE LONGEST_S REPORT`.

Open loop: RATE requests a second are begun at their times, however long the ones before take. One in `STREAM_EVERY` is a stream of
1 s to LONGEST_S. Each answer is compared by its hash with what `hash_engine` must say. A failed request is any status but 200, a cut or
silent answer, or a wrong byte. REPORT is a JSON file, written anew every `REPORT_S` and a last time, with "done", after stdin has
ended and every request has been answered. Of each engine that names itself it holds when the first of its answers had come, and when
the last request was sent that it answered, on the monotonic clock that all processes of a machine share.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import trio

from tests.chaos.hash_engine import STEP_S, events, name_in, whole

STREAM_EVERY = 40
STREAM_S_MIN = 1.0
REPORT_S = 0.2
ANSWER_S_MAX = 30.0  # beyond a stream's own length: longer is a hang
FAILURES_KEPT = 20
IDLE_S_MAX = 5.0  # of a connection that is used again: below what any router keeps it for


class Load:
    def __init__(self, address: str, model: str, rate: float, longest_s: float) -> None:
        host, _, port = address.rpartition(":")
        self.where, self.address, self.model, self.rate, self.longest_s = (host, int(port)), address, model, rate, longest_s
        self.rng = random.Random(1)
        self.idle: list[tuple[trio.SocketStream, float]] = []
        self.told: dict[str, Any] = {"sent": 0, "answered": 0, "failed": 0, "streams": 0, "late_s": 0.0, "slowest_s": 0.0}
        self.failures: list[str] = []
        self.engines: dict[str, dict[str, float]] = {}

    async def run(self, report: Path) -> None:
        ended = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._wait_for_end, ended)
            nursery.start_soon(self._report, report)
            async with trio.open_nursery() as requests:
                begun_s = trio.current_time()
                while not ended.is_set():
                    due_s = begun_s + self.told["sent"] / self.rate
                    await trio.sleep_until(due_s)
                    self.told["late_s"] = max(self.told["late_s"], round(trio.current_time() - due_s, 3))
                    self.told["sent"] += 1
                    requests.start_soon(self._ask, self.told["sent"])
            nursery.cancel_scope.cancel()
        self._write(report, done=True)

    async def _wait_for_end(self, ended: trio.Event) -> None:
        async with trio.lowlevel.FdStream(os.dup(sys.stdin.fileno())) as stdin:
            while await stdin.receive_some(1):
                pass
        ended.set()

    async def _report(self, report: Path) -> None:
        while True:
            self._write(report, done=False)
            await trio.sleep(REPORT_S)

    def _write(self, report: Path, done: bool) -> None:
        part = report.with_suffix(".part")
        part.write_text(json.dumps({**self.told, "failures": self.failures, "engines": self.engines, "done": done}))
        part.rename(report)

    async def _ask(self, number: int) -> None:
        begun_s = trio.current_time()
        stream = number % STREAM_EVERY == 0
        count = round(self.rng.uniform(STREAM_S_MIN, self.longest_s) / STEP_S)
        seed = f"n{number}"
        limit_s = ANSWER_S_MAX + (count * STEP_S if stream else 0.0)
        why = f"no answer within {limit_s:g} s"
        with trio.move_on_after(limit_s):
            why = await self._exchange(seed, count if stream else 0)
        took_s = trio.current_time() - begun_s
        self.told["answered"] += 1
        self.told["streams"] += stream
        if not stream:
            self.told["slowest_s"] = max(self.told["slowest_s"], round(took_s, 3))
        if why:
            self.told["failed"] += 1
            if len(self.failures) < FAILURES_KEPT:
                self.failures.append(f"{time.strftime('%H:%M:%S')} {seed}{' (stream)' if stream else ''} after {took_s:.2f} s: {why}")

    async def _exchange(self, seed: str, count: int) -> str:
        """Why it failed; "" when every byte was right."""
        asked: dict[str, Any] = {"model": self.model, "messages": [{"role": "user", "content": seed}]}
        if count:
            asked |= {"stream": True, "max_tokens": count}
        body = json.dumps(asked).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {self.address}\r\ncontent-type: application/json\r\n"
        try:
            connection = await self._connection()
            sent_s = time.monotonic()
            await connection.send_all(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            status, got, again = await _read(connection)
        except (OSError, trio.BrokenResourceError, EOFError, ValueError) as err:
            return f"{type(err).__name__}: {err}"
        why, name = "", name_in(got)
        expected = b"".join(events(self.model, seed, count, name)) if count else whole(self.model, seed, name)
        if status != 200:
            why = f"status {status}: {got[:300]!r}"
        elif hashlib.sha256(got).digest() != hashlib.sha256(expected).digest():
            why = f"wrong bytes: {got[-200:]!r} and not {expected[-200:]!r}"
        if name and not why:
            told = self.engines.setdefault(name, {"first_answered_s": time.monotonic(), "last_sent_s": sent_s})
            told["last_sent_s"] = max(told["last_sent_s"], sent_s)
        if again and not why:
            self.idle.append((connection, trio.current_time()))
        else:  # after a failed answer it may be about to close: a failure is counted once
            await connection.aclose()
        return why

    async def _connection(self) -> trio.SocketStream:
        while self.idle:
            connection, since_s = self.idle.pop()
            if trio.current_time() - since_s < IDLE_S_MAX:
                return connection
            with contextlib.suppress(OSError, trio.BrokenResourceError):
                await connection.aclose()
        return await trio.open_tcp_stream(*self.where)


async def _read(connection: trio.SocketStream) -> tuple[int, bytes, bool]:
    """(status, body, may the connection be used again). Raises EOFError for an answer that is cut, ValueError for junk."""
    data = bytearray()

    async def more() -> None:
        piece = await connection.receive_some(65536)
        if not piece:
            raise EOFError(f"cut after {bytes(data[-100:])!r}")
        data.extend(piece)

    async def upto(mark: bytes) -> bytes:
        while (found := data.find(mark)) < 0:
            await more()
        taken = bytes(data[:found])
        del data[: found + len(mark)]
        return taken

    async def exactly(count: int) -> bytes:
        while len(data) < count:
            await more()
        taken = bytes(data[:count])
        del data[:count]
        return taken

    line, *rest = (await upto(b"\r\n\r\n")).decode("latin1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (header.partition(":") for header in rest)}
    status = int(line.split()[1])
    if "chunked" in headers.get("transfer-encoding", ""):
        body = bytearray()
        while size := int(await upto(b"\r\n"), 16):
            body += await exactly(size)
            await exactly(2)
        await upto(b"\r\n")
    else:
        body = bytearray(await exactly(int(headers["content-length"])))
    return status, bytes(body), headers.get("connection", "").lower() != "close"


if __name__ == "__main__":
    trio.run(Load(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])).run, Path(sys.argv[5]))
