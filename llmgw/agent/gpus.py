"""The node's devices: its GPUs as NVML tells them, and the CPU as one device with the node's memory.

A probe that hangs or says nonsense makes the GPUs unknown, never the node; at most one probe is in flight, also one that
hangs for ever. What NVML says is read by `gpu_reader` in a process of its own.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Collection, Mapping
from typing import Final

import attrs
import msgspec
import trio

from llmgw.agent import own_modules
from llmgw.domain.errors import Invalid
from llmgw.domain.files import words
from llmgw.domain.ids import CPU_DEVICE, DeviceId
from llmgw.domain.node import Device, DeviceKind
from llmgw.domain.ports import Machine
from llmgw.protocol.codec import structure

PROBE_LIMIT_S: Final = 5.0  # the node must be known again within 6 s (agent.md 2)
CLOSE_LIMIT_S: Final = 1.0  # a killed process is gone in milliseconds, or stuck
ABSENT_AGAIN_S: Final = 300.0  # a machine without NVIDIA's library is asked again this seldom: somebody may install it
ANSWER_BYTES_MAX: Final = 1024 * 1024  # 8 GPUs with a hundred processes each are 30 KiB
UNKNOWN_GPU: Final = DeviceId("gpu-unknown")  # stands for GPUs that have never been told
READER_MODULE: Final = "llmgw.agent.gpu_reader"
_MIB: Final = 1024 * 1024
_KIB: Final = 1024


@attrs.frozen
class GpuProcess:
    pid: int
    used_mib: int


@attrs.frozen
class Gpu:
    """One GPU or slice as it was told. `error` is why its numbers are not to be believed."""

    uuid: str
    index: int
    name: str
    total_mib: int = 0
    used_mib: int = 0
    processes: tuple[GpuProcess, ...] = ()
    error: str = ""


@attrs.frozen
class Absent:
    """This machine has no NVIDIA GPU that could be asked."""

    why: str


@attrs.frozen
class Unknown:
    """The probe hung or said nonsense."""

    why: str


@attrs.frozen
class Told:
    gpus: tuple[Gpu, ...]


Answer = Absent | Unknown | Told


@attrs.frozen
class _RawGpu:
    index: int
    uuid: str = ""
    name: str = "GPU"
    total: int = 0
    used: int = 0
    processes: tuple[tuple[int, int], ...] = ()
    error: str = ""


@attrs.frozen
class _RawAnswer:
    devices: tuple[_RawGpu, ...] = ()
    absent: str = ""
    error: str = ""


def parse(line: bytes) -> Answer:
    """What one line of the reader means. Never raises: nonsense is an answer too."""
    try:
        told = msgspec.json.decode(line)
        if not isinstance(told, dict) or not told.keys() & {"devices", "absent", "error"}:
            return Unknown("the GPU probe answered nonsense: an object with devices is expected")
        raw = structure(told, _RawAnswer)
    except (msgspec.DecodeError, Invalid, RecursionError) as err:
        return Unknown(f"the GPU probe answered nonsense: {str(err)[:200]}")
    if raw.absent:
        return Absent(raw.absent)
    if raw.error:
        return Unknown(f"NVML: {raw.error}")
    return Told(tuple(_gpu(one) for one in raw.devices))


def _gpu(raw: _RawGpu) -> Gpu:
    wrong = raw.error or ("" if 0 <= raw.used <= raw.total and raw.total > 0 else f"memory of {raw.used} in {raw.total} bytes")
    uuid = raw.uuid or f"gpu-{raw.index}"
    if wrong:
        return Gpu(uuid, raw.index, raw.name, error=wrong)
    processes = tuple(GpuProcess(pid, used // _MIB) for pid, used in raw.processes)
    return Gpu(uuid, raw.index, raw.name, raw.total // _MIB, raw.used // _MIB, processes)


def devices(answer: Answer, before: tuple[Device, ...], ours: Collection[int]) -> tuple[Device, ...]:
    """The GPUs as the inventory names them. `ours` are the pids of our replicas' processes; `before` the last devices told."""
    match answer:
        case Absent():
            return ()
        case Unknown():
            known = tuple(attrs.evolve(device, known=False) for device in before if device.kind is DeviceKind.GPU)
            return known or (Device(UNKNOWN_GPU, 0, DeviceKind.GPU, "GPU unknown", 0, known=False),)
        case Told(gpus):
            last = {device.id: device for device in before}
            return tuple(_device(gpu, last.get(DeviceId(gpu.uuid)), ours) for gpu in gpus)


def _device(gpu: Gpu, before: Device | None, ours: Collection[int]) -> Device:
    if gpu.error:
        if before is not None:
            return attrs.evolve(before, known=False)
        return Device(DeviceId(gpu.uuid), gpu.index, DeviceKind.GPU, gpu.name, 0, known=False)
    ours_mib = sum(process.used_mib for process in gpu.processes if process.pid in ours)
    return Device(DeviceId(gpu.uuid), gpu.index, DeviceKind.GPU, gpu.name, gpu.total_mib, gpu.used_mib, min(ours_mib, gpu.used_mib))


def memory_by_process(answer: Answer) -> Mapping[int, int]:
    """MiB of GPU memory that each process holds, over all GPUs."""
    held: dict[int, int] = {}
    if isinstance(answer, Told):
        for gpu in answer.gpus:
            for process in gpu.processes:
                held[process.pid] = held.get(process.pid, 0) + process.used_mib
    return held


def cpu_device(memory_text: str, ours_mib: float) -> Device:
    """The CPU: its memory is the node's. `memory_text` is /proc/meminfo's."""
    kibibytes = {}
    for line in memory_text.splitlines():
        name, _, value = line.partition(":")
        fields = value.split()
        if fields and fields[0].isdigit():
            kibibytes[name] = int(fields[0])
    total_mib = kibibytes.get("MemTotal", 0) // _KIB
    # Available, not free: what the kernel caches it gives back. Mapped checkpoints are cache, so `ours` may be more than `used`.
    available_mib = kibibytes.get("MemAvailable", kibibytes.get("MemFree", 0)) // _KIB
    return Device(CPU_DEVICE, 0, DeviceKind.CPU, "CPU", total_mib, max(0, total_mib - available_mib), int(ours_mib), known=total_mib > 0)


class GpuProbe:
    """Asks the reader process; owns it. One caller at a time."""

    def __init__(self, machine: Machine, reader: tuple[str, ...] = ()) -> None:
        self._machine = machine
        self._reader = reader or own_modules.command_line(READER_MODULE)
        self._process: trio.Process | None = None
        self._absent: Absent | None = None
        self._ask_at_s = 0.0

    async def ask(self) -> Answer:
        """The GPUs now, within PROBE_LIMIT_S. Never raises for what the driver does."""
        if self._absent is not None and self._machine.now_s() < self._ask_at_s:
            return self._absent
        if self._process is not None and self._process.poll() is None and self._process.stdin is None:
            return Unknown("an earlier GPU probe still hangs")
        answer: Answer = Unknown(f"the GPU probe did not answer within {PROBE_LIMIT_S:g} s")
        done = False
        try:
            with trio.move_on_after(PROBE_LIMIT_S):
                answer = await self._ask()
                done = True
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as err:
            answer = Unknown(f"the GPU probe ended: {words(err)}")
        finally:
            if not done:
                self._give_up()
        self._absent = answer if isinstance(answer, Absent) else None
        if self._absent is not None:
            self._ask_at_s = self._machine.now_s() + ABSENT_AGAIN_S
            self._give_up()  # nothing to keep a process for
        return answer

    async def close(self) -> None:
        """Ends the reader; one that hangs in the driver is left to the kernel."""
        self._give_up()
        if self._process is not None:
            with trio.move_on_after(CLOSE_LIMIT_S, shield=True):
                await self._process.wait()

    async def _ask(self) -> Answer:
        process = self._process
        if process is None or process.poll() is not None:
            environment = {name: value for name, value in os.environ.items() if not name.startswith("LLMGW_")}
            process = await trio.lowlevel.open_process(
                list(self._reader),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env=environment,
            )
            self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        await process.stdin.send_all(b"?\n")
        line = b""
        while not line.endswith(b"\n"):
            piece = await process.stdout.receive_some(65536)
            if not piece or len(line) > ANSWER_BYTES_MAX:
                self._give_up()
                return Unknown("the GPU probe ended without an answer" if not piece else "the GPU probe answered without end")
            line += piece
        return parse(line)

    def _give_up(self) -> None:
        process = self._process
        if process is None:
            return
        with contextlib.suppress(OSError):
            process.kill()
        for stream in (process.stdin, process.stdout):
            if isinstance(stream, trio.lowlevel.FdStream):
                stream.close()
        process.stdin = process.stdout = None
        if process.poll() is not None:
            self._process = None
