"""What can be seen of a router's workers from outside: which run, their connections, descriptors and memory, and what may have grown."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import attrs
import psutil

SAMPLE_S = 0.1
SETTLE_S = 0.02  # a worker that runs accepts what waits for it sooner
SAMPLES_MIN = 30  # of a worker's life, for a judgement: three seconds
# What a worker's memory may still grow in the last third of its life over the third before. A leak of 20 bytes a request is 3 MiB
# in the last third of a million requests at two workers; noise is what a heap does whose streams differ in size from minute to minute.
GROWTH_MIB_MAX = 3.0
MIB = 1 << 20


def client_ports(worker: psutil.Process, port: int) -> set[int]:
    """The other ends of the connections to the router's `port` that this worker, which is stopped, holds or has not accepted yet.

    No client may connect meanwhile. What waits to be accepted by others is soon gone, what waits for this one stays.
    """
    looks: list[set[int]] = [{0}, {1}]
    while looks[-1] != looks[-2]:
        time.sleep(SETTLE_S)
        every = psutil.net_connections("tcp")
        looks.append({one.raddr.port for one in every if _waits(one) and one.laddr.port == port})
    return looks[-1] | {one.raddr.port for one in worker.net_connections("tcp") if one.raddr and one.laddr.port == port}


def surplus(worker: psutil.Process, port: int) -> list[str]:
    """What must not be there once all clients have gone: theirs, those at the router's `port`; more than one to an engine; dead ones."""
    found, engines = [], set()
    for one in worker.net_connections("tcp"):
        if one.raddr:
            if one.laddr.port == port or one.status != psutil.CONN_ESTABLISHED or one.raddr in engines:
                found.append(f"worker {worker.pid}: {one.laddr.port} to {one.raddr.port}, {one.status}")
            engines.add(one.raddr)
    return found


def descriptors(worker: psutil.Process) -> list[str]:
    """What each of its open descriptors is, in order, without numbers that differ from process to process, and without connections."""
    connected = {one.fd for one in worker.net_connections("tcp") if one.raddr}
    found = []
    for number in os.listdir(f"/proc/{worker.pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            if int(number) not in connected:
                found.append(os.readlink(f"/proc/{worker.pid}/fd/{number}").partition(":[")[0])
    return sorted(found)


def _waits(connection: Any) -> bool:
    """Is it open, and no process's?"""
    return connection.status == psutil.CONN_ESTABLISHED and connection.fd < 0


@attrs.define(eq=False)
class Memory:
    """The resident memory (bytes) of each worker, sampled over its life."""

    samples: dict[int, list[int]] = attrs.Factory(dict)

    def sample(self, workers: Sequence[psutil.Process]) -> None:
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                if resident := worker.memory_info().rss:  # none of one that ends
                    self.samples.setdefault(worker.pid, []).append(resident)

    def grown_mib(self) -> dict[int, float]:
        """By worker, those that lived long enough."""
        return {pid: grown_mib(samples) for pid, samples in self.samples.items() if len(samples) >= SAMPLES_MIN}


def grown_mib(samples: Sequence[int]) -> float:
    """By how much the median of the last third is above that of the third before, in MiB. The first third is for warming up."""
    third = len(samples) // 3
    return (statistics.median(samples[-third:]) - statistics.median(samples[-2 * third : -third])) / MIB
