"""NVML's list calls in one C call each, instead of one for the size and one for the rows."""

from __future__ import annotations

import time
from ctypes import byref, c_uint, c_ulonglong
from typing import Any, Final

from gpushare.host.nvml_errors import INSUFFICIENT_SIZE

_NO_INSTANCE: Final = 0xFFFFFFFF
_NO_VALUE: Final = 0xFFFFFFFFFFFFFFFF
# One C call instead of two: the size is asked for again only when a GPU holds more processes than this.
_PROCESS_ROOM: Final = 64
_SAMPLE_ROOM: Final = 256
# Samples of the last two seconds: older ones speak of work that is over.
_SAMPLE_WINDOW_US: Final = 2_000_000
_MOST_ROOM: Final = 2**16


def read_processes(nvml: Any, name: str, handle: Any) -> list[tuple[int, int | None, int | None, int | None]]:
    """Return (PID, bytes, GPU instance, compute instance) of one process list, by its entry point's name.

    Raises:
        pynvml.NVMLError: as the driver answers.
    """
    function = nvml._nvmlGetFunctionPointer(name)
    room = _PROCESS_ROOM
    while True:
        count, rows = c_uint(room), (nvml.c_nvmlProcessInfo_v2_t * room)()
        code = function(handle, byref(count), rows)
        if code != INSUFFICIENT_SIZE or room >= _MOST_ROOM:
            nvml._nvmlCheckReturn(code)
            break
        room = max(2 * room, count.value + 16)
    return [
        (
            row.pid,
            None if row.usedGpuMemory == _NO_VALUE else row.usedGpuMemory,
            None if row.gpuInstanceId == _NO_INSTANCE else row.gpuInstanceId,
            None if row.computeInstanceId == _NO_INSTANCE else row.computeInstanceId,
        )
        for row in rows[: count.value]
    ]


def read_samples(nvml: Any, handle: Any) -> dict[int, int]:
    """Return the newest SM % by PID of the last two seconds (nvmlDeviceGetProcessUtilization).

    Raises:
        pynvml.NVMLError: as the driver answers; NotFound when there is no sample.
    """
    since = max(0, int(time.time() * 1e6) - _SAMPLE_WINDOW_US)
    newest: dict[int, tuple[int, int]] = {}
    for pid, stamp, percent in read_utilization(nvml, handle, since):
        if stamp >= newest.get(pid, (0, 0))[0]:
            newest[pid] = (stamp, percent)
    return {pid: percent for pid, (_, percent) in newest.items()}


def read_utilization(nvml: Any, handle: Any, since_us: int) -> list[tuple[int, int, int]]:
    """Return (PID, time in microseconds, SM %) of every sample since then (nvmlDeviceGetProcessUtilization).

    Processes that ended meanwhile are among them; idle ones are not.

    Raises:
        pynvml.NVMLError: as the driver answers; NotFound when there is no sample.
    """
    function = nvml._nvmlGetFunctionPointer("nvmlDeviceGetProcessUtilization")
    since = c_ulonglong(since_us)
    room = _SAMPLE_ROOM
    while True:
        count, rows = c_uint(room), (nvml.c_nvmlProcessUtilizationSample_t * room)()
        code = function(handle, rows, byref(count), since)
        if code != INSUFFICIENT_SIZE or room >= _MOST_ROOM:
            nvml._nvmlCheckReturn(code)
            break
        room = max(2 * room, count.value + 16)
    # Some drivers report nonsense above 100 % for a process that just ended.
    return [(row.pid, row.timeStamp, row.smUtil) for row in rows[: count.value] if row.pid and row.smUtil <= 100]
