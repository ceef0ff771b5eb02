"""The pipe between a router's parent and one worker: whole frames on a pair of connected sockets. Knows nothing of what is in them.

A frame is four bytes with its length, then so many bytes. The end of the pipe is the end of the process at the other end of it.
"""

from __future__ import annotations

import socket
from typing import Final

import trio

from llmgw.domain.errors import Broken, Unavailable

FRAME_BYTES_MAX: Final = 256 * 1024 * 1024  # chosen: far above a list of 5,000 endpoints (2 MB); what is longer is no length
READ_BYTES: Final = 262_144
_HEAD_BYTES: Final = 4


class PipeEnded(Unavailable):
    """The process at the other end is gone, or goes."""


class Pipe:
    """One end. One task sends and one receives at a time."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._stream = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
        self._buffer = bytearray()

    async def send(self, data: bytes) -> None:
        """Raises PipeEnded."""
        try:
            await self._stream.send_all(len(data).to_bytes(_HEAD_BYTES, "big") + data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as err:
            raise PipeEnded("the other end of the pipe is closed") from err

    async def receive(self) -> bytes:
        """The next frame. Raises PipeEnded, also in the middle of one; Broken for what is no frame."""
        await self._fill(_HEAD_BYTES)
        size = int.from_bytes(self._buffer[:_HEAD_BYTES], "big")
        if size > FRAME_BYTES_MAX:
            raise Broken(f"a frame of {size} bytes")
        await self._fill(_HEAD_BYTES + size)
        frame = bytes(self._buffer[_HEAD_BYTES : _HEAD_BYTES + size])
        del self._buffer[: _HEAD_BYTES + size]
        return frame

    async def _fill(self, size: int) -> None:
        while len(self._buffer) < size:
            try:
                data = await self._stream.receive_some(READ_BYTES)
            except (trio.BrokenResourceError, trio.ClosedResourceError) as err:
                raise PipeEnded("the other end of the pipe is closed") from err
            if not data:
                raise PipeEnded("the other end of the pipe is closed")
            self._buffer += data

    def close(self) -> None:
        self._stream.socket.close()
