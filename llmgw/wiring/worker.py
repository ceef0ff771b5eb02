"""One of several worker processes of a router, from its first line to its last. Its parent (`router.workers`) tells it everything.

It reads no file and heeds no signal: those that stop or reload a router are sent to its whole group by terminals and by some
supervisors, and it is the parent who passes them on.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from functools import partial
from typing import Final

import structlog
import trio

from llmgw.domain.errors import EXIT_OK, EXIT_UNAVAILABLE, Broken
from llmgw.domain.policy import Policy
from llmgw.router.cells import Cells
from llmgw.router.listener import public_tls, serve
from llmgw.router.router import Router
from llmgw.router.worker import WorkerEnd
from llmgw.router.worker_messages import Begin, to_worker
from llmgw.router.worker_pipe import Pipe, PipeEnded
from llmgw.router.workers import HELD_BACK
from llmgw.settings.schema import LogSettings
from llmgw.wiring.access_log_writer import LogWriter
from llmgw.wiring.logs import configure_logs
from llmgw.wiring.machine import RealMachine
from llmgw.wiring.memory import keep_freed_memory
from llmgw.wiring.public_port import keep_fresh
from llmgw.wiring.runs import clients_max

OPTION: Final = "--worker"  # of `llmgw router`, hidden: with the descriptor of the pipe
log = structlog.get_logger("llmgw.router.worker")


def worker_command(descriptor: int) -> list[str]:
    """The command line of a worker: that of this process, and which descriptor its pipe is."""
    return [sys.executable, *sys.orig_argv[1:], OPTION, str(descriptor)]


def worker_main(descriptor: int) -> int:
    """Serves until its parent stops it, or is gone. Raises LlmgwError (in a group) when it cannot start."""
    for number in HELD_BACK:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)
    keep_freed_memory()
    writer = LogWriter(sys.stdout.fileno(), shared=True)
    code = EXIT_OK
    try:
        trio.run(_main, descriptor, writer)
    except* PipeEnded:
        log.error("the parent is gone, and so this worker ends", pid=os.getpid())
        code = EXIT_UNAVAILABLE
    finally:
        writer.flush()
    return code


async def _main(descriptor: int, writer: LogWriter) -> None:
    import prometheus_client.core  # noqa: F401 - 60 ms that no stream shall wait for later

    pipe = Pipe(_handed_over(descriptor))
    begin = to_worker(await pipe.receive())
    if not isinstance(begin, Begin):
        raise Broken(f"a worker is first told to begin, not {type(begin).__name__}")
    configure_logs(LogSettings(begin.log_level, begin.log_format), worker=begin.worker)
    os.set_inheritable(begin.cells, False)
    machine = RealMachine()
    router = Router(
        machine,
        Policy(),
        writer.write,
        report=log.error,
        metrics_token=begin.metrics_token,
        log_dropped=lambda: writer.dropped,
        clients_max=clients_max(),
    )
    tls = public_tls(begin.tls_certificate, begin.tls_key) if begin.tls_certificate else None
    listeners = [_handed_over(listener) for listener in begin.listeners]
    end = WorkerEnd(machine, router, pipe, Cells(begin.cells, begin.workers), begin.worker)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(writer.run, machine)
        nursery.start_soon(end.run)
        if tls is not None:
            nursery.start_soon(keep_fresh, machine, tls, begin.tls_certificate, begin.tls_key)
        if await end.wait_begun():
            await nursery.start(partial(serve, router, "", tls, inherited=listeners))
            await end.stop.wait()
            await router.drain(machine.now_s() + end.stop_within_s)
            await end.last_words()
        nursery.cancel_scope.cancel()


def _handed_over(descriptor: int) -> socket.socket:
    sock = socket.socket(fileno=descriptor)
    sock.set_inheritable(False)
    return sock
