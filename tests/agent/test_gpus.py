"""Devices against answers in NVML's form, written by hand, and a probe that hangs or says nonsense."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmgw.agent import gpu_reader, gpus
from llmgw.agent.gpus import Absent, GpuProbe, Told, Unknown, cpu_device, devices, memory_by_process, parse
from llmgw.domain.ids import CPU_DEVICE
from llmgw.domain.node import DeviceKind
from llmgw.wiring.machine import RealMachine

MIB = 1024 * 1024


class NvmlError(Exception):
    pass


class NotFound(NvmlError):
    pass


class Recorded:
    """Answers as NVML gave them: one table per GPU. A value that is an error is raised."""

    NVMLError = NvmlError
    NVMLError_LibraryNotFound = type("LibraryNotFound", (NvmlError,), {})
    NVMLError_DriverNotLoaded = type("DriverNotLoaded", (NvmlError,), {})

    def __init__(self, *cards: dict[str, Any], init: Exception | None = None) -> None:
        self.cards = cards
        self.init = init

    def nvmlInit(self) -> None:
        if self.init:
            raise self.init

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:
        return self.cards[index]

    def __getattr__(self, name: str) -> Any:
        def answer(handle: dict[str, Any]) -> Any:
            value = handle.get(name, NvmlError("Not Supported"))
            if isinstance(value, Exception):
                raise value
            return value

        return answer

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: dict[str, Any], index: int) -> dict[str, Any]:
        slices: list[dict[str, Any] | None] = handle["slices"]
        found = slices[index]
        if found is None:
            raise NotFound("Not Found")
        return found


def card(
    uuid: str, total_mib: int = 24576, used_mib: int = 0, processes: tuple[tuple[int, int | None], ...] = (), **more: Any
) -> dict[str, Any]:
    running = [SimpleNamespace(pid=pid, usedGpuMemory=None if used is None else used * MIB) for pid, used in processes]
    return {
        "nvmlDeviceGetName": "NVIDIA A10",
        "nvmlDeviceGetUUID": uuid,
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=total_mib * MIB, used=used_mib * MIB),
        "nvmlDeviceGetComputeRunningProcesses": running,
        **more,
    }


def told(*cards: dict[str, Any]) -> Told:
    answer = parse(json.dumps(gpu_reader.read(Recorded(*cards))).encode())
    assert isinstance(answer, Told)
    return answer


def test_eight_cards_are_listed_by_uuid_with_what_others_hold_apart_from_ours() -> None:
    answer = told(*(card(f"GPU-{n}", used_mib=4096, processes=((100, 1000), (200, 3000))) for n in range(8)))
    found = devices(answer, (), {100})
    assert [(device.id, device.index, device.kind) for device in found] == [(f"GPU-{n}", n, DeviceKind.GPU) for n in range(8)]
    assert (found[0].total_mib, found[0].used_mib, found[0].ours_mib, found[0].foreign_mib) == (24576, 4096, 1000, 3096)
    assert memory_by_process(answer) == {100: 8000, 200: 24000}


def test_a_divided_card_is_listed_as_its_slices() -> None:
    slices = [card("MIG-a", 9856), None, card("MIG-b", 9856, 100)]
    whole = card("GPU-0", 40960, nvmlDeviceGetMigMode=(1, 1), nvmlDeviceGetMaxMigDeviceCount=3, slices=slices)
    found = devices(told(whole, card("GPU-1", nvmlDeviceGetMigMode=(0, 0))), (), ())
    assert [(device.id, device.total_mib) for device in found] == [("MIG-a", 9856), ("MIG-b", 9856), ("GPU-1", 24576)]
    assert all(device.known for device in found)


def test_processes_whose_memory_is_not_told_do_not_break_the_inventory() -> None:
    found = devices(
        told(card("GPU-0", used_mib=10, processes=((5, None),)), card("GPU-1", nvmlDeviceGetComputeRunningProcesses=NvmlError("N/A"))),
        (),
        {5},
    )
    assert [(device.used_mib, device.ours_mib) for device in found] == [(10, 0), (0, 0)]


def test_one_card_that_fell_off_the_bus_is_unknown_and_the_others_are_told() -> None:
    before = devices(told(card("GPU-0"), card("GPU-1", used_mib=7)), (), ())
    lost = card("GPU-1", nvmlDeviceGetMemoryInfo=NvmlError("GPU is lost"))
    found = devices(told(card("GPU-0"), lost), before, ())
    assert [(device.id, device.known, device.total_mib) for device in found] == [("GPU-0", True, 24576), ("GPU-1", False, 24576)]


def test_numbers_that_cannot_be_are_not_believed() -> None:
    (found,) = devices(told(card("GPU-0", 100, 200)), (), ())
    assert not found.known


@pytest.mark.parametrize(
    "line", [b"", b"ERR!\n", b"[]", b"{}", b'{"devices": 7}', b'{"devices": [{"index": "x"}]}', b"{" * 9999, b"\xff\xfe"]
)
def test_nonsense_makes_the_gpus_unknown_and_never_raises(line: bytes) -> None:
    answer = parse(line)
    assert isinstance(answer, Unknown)
    before = devices(told(card("GPU-0", used_mib=5)), (), ())
    (found,) = devices(answer, before, ())
    assert (found.id, found.used_mib, found.known) == ("GPU-0", 5, False)
    (placeholder,) = devices(answer, (), ())
    assert not placeholder.known


def test_a_machine_without_the_library_has_no_gpus() -> None:
    answers = io.StringIO()
    gpu_reader.serve(Recorded(init=Recorded.NVMLError_LibraryNotFound("no library")), io.StringIO("?\n"), answers)
    assert parse(answers.getvalue().encode()) == Absent("no library")
    assert devices(Absent(""), (), ()) == ()


def test_a_driver_that_cannot_be_initialised_makes_the_gpus_unknown() -> None:
    answers = io.StringIO()
    gpu_reader.serve(Recorded(init=NvmlError("Unknown Error")), io.StringIO("?\n?\n"), answers)
    lines = answers.getvalue().splitlines()
    assert len(lines) == 2
    assert isinstance(parse(lines[0].encode()), Unknown)


def test_the_cpu_is_one_device_with_the_nodes_memory() -> None:
    device = cpu_device("MemTotal:  1048576 kB\nMemFree:  1 kB\nMemAvailable:  786432 kB\nHugePages_Total:  0\n", 100.0)
    assert (device.id, device.kind, device.total_mib, device.used_mib, device.ours_mib) == (CPU_DEVICE, DeviceKind.CPU, 1024, 256, 100)
    assert not cpu_device("", 0.0).known


def script(tmp_path: Path, text: str) -> tuple[str, ...]:
    path = tmp_path / "reader.py"
    path.write_text(text)
    return (sys.executable, str(path))


async def test_a_probe_that_hangs_is_unknown_in_time_and_a_second_one_is_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "PROBE_LIMIT_S", 2.0)
    # As a process in the kernel's uninterruptible sleep would be: killed, and still there.
    monkeypatch.setattr(subprocess.Popen, "poll", lambda self: None)
    machine = RealMachine()
    started = tmp_path / "started"
    probe = GpuProbe(machine, script(tmp_path, f"open({str(started)!r}, 'a').write('x'); import time; time.sleep(900)"))
    began_s = machine.now_s()
    assert isinstance(await probe.ask(), Unknown)
    assert machine.now_s() - began_s < 6.0
    assert isinstance(await probe.ask(), Unknown)
    monkeypatch.undo()
    assert started.read_text() == "x"
    await probe.close()


async def test_a_probe_that_dies_is_unknown_and_started_anew_the_next_time(tmp_path: Path) -> None:
    probe = GpuProbe(RealMachine(), script(tmp_path, "import sys; sys.exit(15)"))
    assert isinstance(await probe.ask(), Unknown)
    assert isinstance(await probe.ask(), Unknown)
    await probe.close()


async def test_a_probe_that_answers_is_asked_again_in_the_same_process(tmp_path: Path) -> None:
    answer = '{"devices": [{"index": 0, "uuid": "GPU-%d", "total": 1048576}]}'
    text = f"import os, sys\nfor _ in sys.stdin:\n    print({answer!r} % os.getpid(), flush=True)"
    probe = GpuProbe(RealMachine(), script(tmp_path, text))
    first, second = await probe.ask(), await probe.ask()
    assert isinstance(first, Told)
    assert first == second
    await probe.close()


async def test_the_real_reader_answers_on_this_machine() -> None:
    probe = GpuProbe(RealMachine())
    assert isinstance(await probe.ask(), Absent | Told)
    await probe.close()
