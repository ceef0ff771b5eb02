"""Ports of engines: is one free on this machine, and does the range clash with the kernel's own. Holds no state."""

from __future__ import annotations

import errno
import socket
from pathlib import Path
from typing import Final

_EPHEMERAL: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")


def why_taken(host: str, port: int) -> str | None:
    """Why an engine could not listen there, or None. Blocking; found out by binding, as the engine will."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as err:
        return f"{host} is no address of this machine: {err.strerror or err}"
    with socket.socket(family, kind, number) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that linger after a stop block nobody
        try:
            probe.bind(address)
            probe.listen(1)  # two sockets may bind with this option; only one may listen
        except OSError as err:
            if err.errno == errno.EADDRINUSE:
                return f"port {port} is taken on {host}"
            return f"port {port} on {host} cannot be used: {err.strerror or err}"
    return None


def clash(ports: tuple[int, int], ephemeral_text: str) -> str | None:
    """A warning when the range for engines overlaps the one that the kernel gives to outgoing connections, or None."""
    fields = ephemeral_text.split()
    if len(fields) != 2 or not all(field.isdigit() for field in fields):
        return None
    low, high = int(fields[0]), int(fields[1])
    if ports[1] < low or ports[0] > high:
        return None
    return (
        f"the engines' ports {ports[0]}-{ports[1]} overlap the kernel's own range {low}-{high}: "
        "an outgoing connection may hold an engine's port; choose another [agent] engine_ports"
    )


def kernel_range() -> str:
    """The kernel's text for its ephemeral range; empty where it cannot be read."""
    try:
        return _EPHEMERAL.read_text(encoding="ascii")
    except OSError:
        return ""
