"""Reads the GPUs through NVML, in a process of its own, which `gpus` starts.

A driver whose GPU has fallen off the bus may block its caller for ever, where no signal reaches. Then this process hangs and
the agent does not. A line in asks, one line of JSON answers; it ends when its input does, so it never outlives the agent.
"""

from __future__ import annotations

import json
import sys
from typing import Any, TextIO


def read(nvml: Any) -> dict[str, Any]:
    """Everything the agent asks of NVML, as plain data. `nvml` is pynvml, initialised, or what stands in for it.

    One GPU that fails is listed with its fault; the others are told as they are. A GPU that is divided (MIG) is told as its
    slices. Raises what the driver raises when the GPUs cannot even be counted.
    """
    devices: list[dict[str, Any]] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            name = _text(nvml.nvmlDeviceGetName(handle))
            slices = _slices(nvml, handle)
            if slices is None:
                devices.append(_device(nvml, handle, index, name))
            else:
                devices += [_device(nvml, part, index, f"{name} slice {number}") for number, part in enumerate(slices)]
        except nvml.NVMLError as err:
            devices.append({"index": index, "uuid": _uuid(nvml, index), "error": str(err)})
    return {"devices": devices}


def _device(nvml: Any, handle: Any, index: int, name: str) -> dict[str, Any]:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:  # not told on some cards and in some containers; the used memory still is
        running = []
    return {
        "index": index,
        "uuid": _text(nvml.nvmlDeviceGetUUID(handle)),
        "name": name,
        "total": int(memory.total),
        "used": int(memory.used),
        "processes": [[int(process.pid), int(process.usedGpuMemory or 0)] for process in running],
    }


def _slices(nvml: Any, handle: Any) -> list[Any] | None:
    """The handles of a divided GPU's slices, in order; None when it is whole."""
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError:  # cards without MIG say "not supported"
        return None
    if not current:
        return None
    found = []
    for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number))
        except nvml.NVMLError:  # places without a slice
            continue
    return found


def _uuid(nvml: Any, index: int) -> str:
    try:
        return _text(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(index)))
    except nvml.NVMLError:
        return ""


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def serve(nvml: Any, questions: TextIO, answers: TextIO) -> None:
    """Answers each line until there are no more."""
    initialised = False
    for _ in questions:
        try:
            if not initialised:
                nvml.nvmlInit()
                initialised = True
            answer = read(nvml)
        except (nvml.NVMLError_LibraryNotFound, nvml.NVMLError_DriverNotLoaded) as err:
            answer = {"absent": str(err)}
        except nvml.NVMLError as err:
            answer = {"error": str(err)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    import pynvml

    serve(pynvml, sys.stdin, sys.stdout)
