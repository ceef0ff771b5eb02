"""Listening sockets that were open before we were: systemd's socket activation (`LISTEN_FDS`).

They stay open in systemd while this process is replaced, so that a client that connects meanwhile waits and is not refused.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from typing import Final

from llmgw.domain.errors import Invalid

FIRST_DESCRIPTOR: Final = 3  # sd_listen_fds(3)
COUNT_VARIABLE: Final = "LISTEN_FDS"
PID_VARIABLE: Final = "LISTEN_PID"
NAMES_VARIABLE: Final = "LISTEN_FDNAMES"


def take_listeners(environment: MutableMapping[str, str]) -> tuple[socket.socket, ...]:
    """The sockets that were handed to this process, none when they were meant for another. Raises Invalid for what is no listener.

    The variables are taken out of the environment, and the sockets are not passed on to children.
    """
    count, pid = environment.pop(COUNT_VARIABLE, ""), environment.pop(PID_VARIABLE, "")
    environment.pop(NAMES_VARIABLE, None)
    if pid != str(os.getpid()) or not (count.isascii() and count.isdigit()):
        return ()
    return tuple(_listener(FIRST_DESCRIPTOR + number) for number in range(int(count)))


def _listener(descriptor: int) -> socket.socket:
    try:
        sock = socket.socket(fileno=descriptor)
    except OSError as err:
        raise Invalid(f"descriptor {descriptor} of {COUNT_VARIABLE} is no socket: {err.strerror}", code="bad_listener") from err
    sock.set_inheritable(False)
    if sock.type != socket.SOCK_STREAM or not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        sock.detach()  # it is not ours to close
        raise Invalid(f"descriptor {descriptor} of {COUNT_VARIABLE} is no listening stream socket", code="bad_listener")
    return sock
