"""Litestream's process: how it starts, what it is told by its environment, how its end is seen. Knows nothing of what it does.

It must not outlive us by more than an instant, so the kernel kills it when the thread that started it ends: it is started in the main
thread, by a few lines of Python that ask for that and become the program. A thread of a pool would take it along when it is retired.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import trio

from llmgw.domain.errors import Unavailable
from llmgw.domain.files import words
from llmgw.settings.object_place import ACCESS_KEY_ID, SECRET_ACCESS_KEY, SESSION_TOKEN, Credentials

PR_SET_PDEATHSIG: Final = 1  # prctl(2)
LAUNCH: Final = f"""\
import ctypes, os, sys
if ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, {signal.SIGKILL.value}, 0, 0, 0) or os.getppid() != int(sys.argv[1]):
    sys.exit("its parent is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""
# A way to the object store that this machine needs; ours goes the same. Not AWS_CA_BUNDLE, which keeps Litestream from starting.
PASSED_ON: Final = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy", "SSL_CERT_FILE", "SSL_CERT_DIR")
LINE_BYTES_MAX: Final = 16 * 1024  # a line of its log is a few hundred bytes
READ_BYTES: Final = 64 * 1024
OUTPUT_BYTES_MAX: Final = 16 * 1024  # of a run to its end: the last words are those that matter


def environment(credentials: Credentials, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Everything that the child may know. Nothing else of ours decides for it where it goes or as whom."""
    environ = os.environ if environ is None else environ
    told = {name: environ[name] for name in PASSED_ON if environ.get(name)}
    told |= {
        ACCESS_KEY_ID: credentials.access_key_id,
        SECRET_ACCESS_KEY: credentials.secret_access_key,
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    if credentials.session_token:
        told[SESSION_TOKEN] = credentials.session_token
    return told


def how_ended(code: int) -> str:
    """For a sentence: "it ended with exit code 1"."""
    if code >= 0:
        return f"it ended with exit code {code}"
    try:
        return f"it was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"it was ended by signal {-code}"


class Child:
    """One process. Whoever started it awaits `end`, whatever happens."""

    def __init__(self, process: subprocess.Popen[bytes], output: int) -> None:
        self._process = process
        self._output = trio.lowlevel.FdStream(output)

    @classmethod
    def start(cls, argv: Sequence[str | Path], folder: Path, env: Mapping[str, str]) -> Child:
        """In the main thread; a few milliseconds. Raises Unavailable."""
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", LAUNCH, str(os.getpid()), *map(str, argv)],
                stdin=subprocess.DEVNULL,
                stdout=theirs,
                stderr=theirs,
                cwd=folder,
                env=dict(env),
                start_new_session=True,  # a Ctrl-C at our terminal is ours to answer
            )
        except OSError as err:
            os.close(ours)
            raise Unavailable(f"{argv[0]} cannot be started: {words(err)}", code="replica_down") from err
        finally:
            os.close(theirs)
        return cls(process, ours)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """Its exit code, below 0: minus the signal."""
        if self._process.returncode is not None:  # a signal that was to be sent has found it dead, and has waited for it
            return self._process.returncode
        descriptor = os.pidfd_open(self._process.pid)  # ours until it is waited for, so the number is still its own
        try:
            await trio.lowlevel.wait_readable(descriptor)
        finally:
            os.close(descriptor)
        return self._process.wait()

    async def lines(self) -> AsyncIterator[str]:
        """What it says, until its end; a line that is too long is cut."""
        rest = b""
        async for data in self._chunks():
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                yield line[:LINE_BYTES_MAX].decode("utf-8", "replace")
            rest = rest[:LINE_BYTES_MAX]
        if rest:
            yield rest.decode("utf-8", "replace")

    async def output(self) -> str:
        """The last of what it says, at its end."""
        said = b""
        async for data in self._chunks():
            said = (said + data)[-OUTPUT_BYTES_MAX:]
        return said.decode("utf-8", "replace")

    async def _chunks(self) -> AsyncIterator[bytes]:
        while True:
            try:
                data = await self._output.receive_some(READ_BYTES)
            except trio.BrokenResourceError:
                return
            if not data:
                return
            yield data

    async def end(self, grace_s: float = 0.0) -> None:
        """TERM, `grace_s`, then KILL; it is gone when this returns. A cancel waits for that too."""
        with trio.CancelScope(shield=True):  # KILL is certain, and a process that is not waited for stays a zombie
            if self._process.returncode is None:
                if grace_s > 0:
                    self._process.terminate()
                    with trio.move_on_after(grace_s):
                        await self.wait()
                if self._process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        self._process.kill()
                    await self.wait()
            await self._output.aclose()
