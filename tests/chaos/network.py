"""A network of a test's own: a namespace with nothing in it but loopback, in which single ways may be cut.

A way is an address of its own that leads to 127.0.0.1 as well: whoever is told it, and nobody else, is cut off with it. The thread
that makes the network is in it until the end, and so is every process and thread that it starts.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from typing import Final

from tests.programs import skip

CLONE_NEWNET: Final = 0x40000000
BLACK_HOLE, RESET = "black hole", "reset"  # nothing comes back; a TCP reset does
RULES: Final = """
table ip test {
  chain lead { type nat hook output priority -100; }
  chain cut { type filter hook output priority 0; }
}
"""


class Network:
    def way(self, number: int) -> str:
        """An address that leads to 127.0.0.1."""
        address = f"127.0.1.{number}"
        nft(f"add rule ip test lead ip daddr {address} dnat to 127.0.0.1")
        return address

    @contextlib.contextmanager
    def cut(self, way: str, how: str) -> Iterator[None]:
        """Connections over this way, those that are open too."""
        if how == BLACK_HOLE:
            nft(f"add rule ip test cut ct original ip daddr {way} drop")
        else:
            nft(f"add rule ip test cut ct direction original meta l4proto tcp ct original ip daddr {way} reject with tcp reset")
        try:
            yield
        finally:
            nft("flush chain ip test cut")


def nft(command: str) -> None:
    done = subprocess.run(["nft", "-f", "-"], input=command, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def own_network() -> Iterator[Network]:
    """Skips the test where this user, or this machine, has none to give."""
    for program in ("ip", "nft"):
        if shutil.which(program) is None:
            skip(f"the program {program} is not installed")
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.unshare(CLONE_NEWNET) != 0:
            skip(f"this user may not have a network of its own ({os.strerror(ctypes.get_errno())})")
        try:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True, timeout=30)
            nft(RULES)
            yield Network()
        finally:
            assert libc.setns(before, CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
    finally:
        os.close(before)
