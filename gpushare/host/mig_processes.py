"""Who is in one MIG instance, asked of the instance itself.

The lists of the whole GPU are for privileged users while MIG is on (nvml.h, nvmlDeviceGetComputeRunningProcesses_v3:
aggregate information "only if the caller has appropriate privileges"); those of a MIG device handle are for everybody.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from gpushare.errors import NotFound
from gpushare.host.nvml_lists import read_processes
from gpushare.model import GpuProcess

if TYPE_CHECKING:
    from gpushare.host.nvml import NvmlReader
    from gpushare.model import MigInstance


def processes_in(nvml: NvmlReader, mig: MigInstance, gpu: int) -> tuple[GpuProcess, ...] | None:
    """Return the processes in an instance (compute, graphics and MPS lists of its handle), by PID.

    None when the driver will not tell, or the instance is gone.

    Raises:
        GpushareError: NVML does not answer.
    """
    try:
        handle = nvml.ask(lambda api: api.nvmlDeviceGetHandleByUUID(mig.uuid), str(gpu))
        if handle is None:
            return None
        lists = {
            kind: nvml.ask(
                partial(read_processes, name=f"nvmlDeviceGet{kind}RunningProcesses_v3", handle=handle), str(gpu)
            )
            for kind in ("Compute", "Graphics", "MPSCompute")
        }
    except NotFound:
        return None
    if lists["Compute"] is None:
        return None
    pids = {kind: {row[0]: row[1] for row in rows or ()} for kind, rows in lists.items()}
    return tuple(
        GpuProcess(
            pid=pid,
            compute=pid in pids["Compute"],
            graphics=pid in pids["Graphics"],
            mps=pid in pids["MPSCompute"],
            gpu_instance_id=mig.gpu_instance_id,
            compute_instance_id=mig.compute_instance_id,
            memory_used_bytes=pids["Compute"].get(pid),
        )
        for pid in sorted({pid for known in pids.values() for pid in known})
    )
