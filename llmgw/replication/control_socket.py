"""Litestream's control socket: three questions, each under a deadline of ours, since its own is best effort (measured).

A Unix path has room for 107 bytes and a data directory may be deeper: the socket is reached through an open descriptor of its folder.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import attrs
import trio

from llmgw.domain.errors import Unavailable
from llmgw.domain.files import words
from llmgw.replication.troubles import Trouble, trouble

ANSWER_BYTES_MAX: Final = 64 * 1024  # an answer is 100 bytes, one that tells of a failure a few hundred
ASK_S: Final = 2.0  # what it answers out of its memory, within a millisecond
LATE_S: Final = 0.5  # beyond the time that a sync was given, for the answer that says so
SILENT: Final = "the replica did not take it in time"


class Failed(Unavailable):
    """It answered that it failed, or did not answer. `trouble` is why."""

    def __init__(self, trouble: Trouble) -> None:
        super().__init__(trouble.why, code="replica_down")
        self.trouble = trouble


@attrs.frozen
class Synced:
    """What is committed here and what is in the bucket, as Litestream says."""

    txid: int
    replicated_txid: int


@attrs.frozen
class ControlSocket:
    """`name` in `folder`. Every call raises Failed."""

    folder: Path
    name: str

    async def version(self) -> str:
        return str((await self._ask("GET", "/info", None, ASK_S)).get("version"))

    async def txid(self, database: Path) -> int:
        """The last transaction that Litestream has seen; what was committed since its last look is not counted."""
        return _number(await self._ask("GET", f"/txid?path={quote(str(database))}", None, ASK_S), "txid")

    async def sync(self, database: Path, within_s: float) -> Synced:
        """Everything committed before is uploaded when this returns, if the two numbers are equal."""
        asked = {"path": str(database), "wait": True, "timeout": max(1, math.ceil(within_s))}
        answer = await self._ask("POST", "/sync", asked, within_s + LATE_S)
        return Synced(_number(answer, "txid"), _number(answer, "replicated_txid"))

    async def _ask(self, method: str, target: str, body: object, within_s: float) -> dict[str, Any]:
        data = b"" if body is None else json.dumps(body).encode()
        # HTTP/1.0: the answer ends with the connection, and is never in pieces.
        head = f"{method} {target} HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        raw = b""
        try:
            with trio.fail_after(within_s):
                async with await self._connect() as stream:
                    await stream.send_all(head.encode() + data)
                    while chunk := await stream.receive_some():
                        raw += chunk
                        if len(raw) > ANSWER_BYTES_MAX:
                            raise Failed(Trouble("Litestream's answer is too long to be one"))
        except trio.TooSlowError as err:
            raise Failed(Trouble(SILENT, silent=True)) from err
        except (OSError, trio.BrokenResourceError) as err:
            raise Failed(Trouble(f"Litestream does not answer: {words(err)}")) from err
        return _read(raw)

    async def _connect(self) -> trio.SocketStream:
        folder = os.open(self.folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return await trio.open_unix_socket(f"/proc/self/fd/{folder}/{self.name}")
        finally:
            os.close(folder)


def _read(raw: bytes) -> dict[str, Any]:
    if not raw:
        raise Failed(Trouble("Litestream does not answer: it cut the connection"))
    head, _, body = raw.partition(b"\r\n\r\n")
    first = head.split(b"\r\n", 1)[0].split()
    try:
        status, answer = int(first[1]), json.loads(body)
    except (IndexError, ValueError) as err:
        raise Failed(Trouble("Litestream's answer cannot be understood")) from err
    if not isinstance(answer, dict):
        raise Failed(Trouble("Litestream's answer cannot be understood"))
    if status != 200:
        raise Failed(trouble(str(answer.get("error", ""))))
    return answer


def _number(answer: dict[str, Any], name: str) -> int:
    value = answer.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise Failed(Trouble("Litestream's answer cannot be understood"))
    return value
