"""Tells the supervisor that started us how we are: systemd's notify socket, and its watchdog.

Without a supervisor that listens every call does nothing. Nobody waits for it: a message that cannot be sent is dropped.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, MutableMapping
from typing import Final

from llmgw.domain.ports import Machine

SOCKET_VARIABLE: Final = "NOTIFY_SOCKET"
WATCHDOG_VARIABLE: Final = "WATCHDOG_USEC"
WATCHDOG_PID_VARIABLE: Final = "WATCHDOG_PID"
BEATS_PER_LIMIT: Final = 3.0  # sd_watchdog_enabled(3) asks for two; with three, one that comes late costs nothing
_US_PER_S: Final = 1_000_000


class Notifier:
    """`address` as NOTIFY_SOCKET gives it, "" for none. `watchdog_s`: a silence of this length is taken for a hang; 0: none is."""

    def __init__(self, address: str = "", watchdog_s: float = 0.0) -> None:
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self.watchdog_s = watchdog_s
        self._serves = False

    @property
    def supervised(self) -> bool:
        """Does somebody listen, who starts this process again when it ends?"""
        return bool(self._address)

    def ready(self) -> None:
        """What this process is for, it now does; also said when a reload is over."""
        self._serves = True
        self._send("READY=1")

    def reloading(self) -> None:
        """The settings are read anew; `ready` must follow."""
        self._send("RELOADING=1")

    @contextlib.contextmanager
    def reload(self) -> Iterator[None]:
        """Around something that is read anew; before this process serves it is a part of the start."""
        if not self._serves:
            yield
            return
        self.reloading()
        try:
            yield
        finally:
            self.ready()

    def stopping(self) -> None:
        """The orderly end has begun."""
        self._send("STOPPING=1")

    async def beat(self, machine: Machine) -> None:
        """Shows until cancelled that the event loop turns. Returns at once where nobody watches."""
        while self._address and self.watchdog_s > 0:
            self._send("WATCHDOG=1")
            await machine.sleep_until(machine.now_s() + self.watchdog_s / BEATS_PER_LIMIT)

    def _send(self, message: str) -> None:
        if not self._address:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.setblocking(False)
            sock.sendto(message.encode(), self._address)


def take_notifier(environment: MutableMapping[str, str]) -> Notifier:
    """The supervisor that this environment names. Its variables are taken out: a child that spoke there would speak for us."""
    address = environment.pop(SOCKET_VARIABLE, "")
    limit, pid = environment.pop(WATCHDOG_VARIABLE, ""), environment.pop(WATCHDOG_PID_VARIABLE, "")
    ours = not pid or pid == str(os.getpid())
    watchdog_s = int(limit) / _US_PER_S if ours and limit.isascii() and limit.isdigit() else 0.0
    return Notifier(address if address.startswith(("/", "@")) else "", watchdog_s)
