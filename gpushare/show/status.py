"""``gpushare status``: a snapshot as data, as tables for people and as one rectangle for CSV."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

from gpushare.errors import ExitCode, GpuLost, GpushareError, OperationFailed
from gpushare.model import HIDDEN_DEVICES, Gpu, GpuProcess, Snapshot, mechanism
from gpushare.show.result import Column, Result, Table, jsonable
from gpushare.show.status_tables import command_of, is_lost, people_tables

CSV_GPU: Final = (
    *("gpu_index", "gpu_uuid", "gpu_name", "pci_bus_id", "mechanism", "compute_mode", "time_slice"),
    *("mig_enabled", "mig_pending", "utilization_percent", "memory_used_bytes", "memory_total_bytes", "gpu_error"),
)
CSV_PROCESS: Final = (
    *("pid", "type", "user", "gpu_instance_id", "compute_instance_id", "sm_percent"),
    *("process_memory_used_bytes", "started_at", "container", "command_line"),
)


def status_result(snapshot: Snapshot, *, errors: Sequence[GpushareError] = ()) -> Result:
    """Return the result of ``gpushare status``.

    ``errors`` are those of single GPUs, known by ``error.gpu`` (index or UUID); a GPU with an error
    that is not among them gets one made from its text. The command fails only if no GPU works.
    """
    working = [gpu for gpu in snapshot.gpus if gpu.error is None]
    return Result(
        command="status",
        data=status_data(snapshot),
        text=_header(snapshot),
        tables=people_tables(snapshot),
        csv=csv_table(snapshot),
        notes=tuple(_notes(snapshot)),
        errors=tuple(_errors(snapshot, errors)),
        exit_code=ExitCode.OK if working else ExitCode.FAILED,
    )


def status_data(snapshot: Snapshot) -> dict[str, Any]:
    """Return the data for machines: the model's own field names, processes and instances nested."""
    return {
        "host": snapshot.host,
        "driver_version": snapshot.driver_version,
        "taken_at": snapshot.taken_at,
        "gpus": [_gpu_data(gpu, snapshot) for gpu in snapshot.gpus],
        "mps_daemons": jsonable(snapshot.daemons),
        "warnings": list(snapshot.warnings),
    }


def _gpu_data(gpu: Gpu, snapshot: Snapshot) -> dict[str, Any]:
    data: dict[str, Any] = jsonable(gpu)
    data["mechanism"] = jsonable(mechanism(gpu, snapshot.daemons))
    if gpu.processes is not None:
        data["processes"] = [{"type": process.type, **jsonable(process)} for process in gpu.processes]
    if gpu.error is not None:
        # An empty list would say that there are none.
        data["mig_instances"] = jsonable(gpu.mig_instances) or None
        data["processes"] = data["processes"] or None
    if data.pop("mig_hidden"):
        data["mig_instances"] = data["mig_instances"] or None
    return data


def _header(snapshot: Snapshot) -> str:
    parts = [snapshot.host, f"driver {snapshot.driver_version or '-'}"]
    if snapshot.taken_at is not None:
        parts.append(time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(snapshot.taken_at)))
    return "   ".join(parts)


def _notes(snapshot: Snapshot) -> Iterable[str]:
    yield from snapshot.warnings
    for gpu in snapshot.gpus:
        if gpu.error is not None:
            continue
        if gpu.processes is None:
            yield f"GPU {gpu.index}: who is on it is unknown"
        if gpu.mig_hidden:
            yield f"GPU {gpu.index}: {HIDDEN_DEVICES}"
        elif gpu.mig_enabled and not gpu.mig_instances:
            yield (
                f"GPU {gpu.index} is in MIG mode without instances, no CUDA program can use it: "
                f"gpushare mig profiles -g {gpu.index} lists what can be created"
            )
    for daemon in snapshot.daemons:
        place = f"the MPS daemon at {daemon.pipe_directory or 'an unknown pipe directory'}"
        if daemon.error is not None:
            yield f"{place} could not be asked: {daemon.error}"
        elif daemon.note is not None:
            yield f"{place}: {daemon.note}"


def _errors(snapshot: Snapshot, given: Sequence[GpushareError]) -> Iterable[GpushareError]:
    yield from given
    known = {error.gpu for error in given}
    for gpu in snapshot.gpus:
        if gpu.error is not None and not known & {str(gpu.index), gpu.uuid or str(gpu.index)}:
            yield _gpu_error(gpu, gpu.error)
    if not snapshot.gpus and not given:
        hint = "gpushare doctor looks for the cause; gpushare sim list shows hosts to try without a GPU"
        yield OperationFailed(f"no GPU is visible on {snapshot.host}", hint, code="no_gpu")


def _gpu_error(gpu: Gpu, reason: str) -> GpushareError:
    # NVML's reasons begin with the GPU already.
    message = f"GPU {gpu.index} does not answer: {reason.removeprefix(f'GPU {gpu.index}: ')}"
    if is_lost(reason):
        hint = "the kernel log has the cause: sudo dmesg | grep -i xid; a lost GPU comes back with a reboot"
        return GpuLost(message, hint, gpu=str(gpu.index))
    return OperationFailed(message, f"nvidia-smi -q -i {gpu.index} shows what the driver says", gpu=str(gpu.index))


def csv_table(snapshot: Snapshot) -> Table:
    """Return one row per GPU and process; a GPU without processes has one row."""
    rows: list[dict[str, Any]] = []
    for gpu in snapshot.gpus:
        own = _csv_gpu(gpu, snapshot)
        rows += [{**own, **_csv_process(process)} for process in gpu.processes or ()] or [own]
    columns = tuple(Column(key=key, title=key) for key in (*CSV_GPU, *CSV_PROCESS))
    return Table(name="status", columns=columns, rows=tuple(rows))


def _csv_gpu(gpu: Gpu, snapshot: Snapshot) -> dict[str, Any]:
    renamed = {"gpu_index": "index", "gpu_uuid": "uuid", "gpu_name": "name", "gpu_error": "error"}
    row = {key: getattr(gpu, renamed.get(key, key)) for key in CSV_GPU if key != "mechanism"}
    return {**row, "mechanism": mechanism(gpu, snapshot.daemons)}


def _csv_process(process: GpuProcess) -> dict[str, Any]:
    own = {"process_memory_used_bytes": process.memory_used_bytes, "command_line": command_of(process)}
    return {key: own[key] if key in own else getattr(process, key) for key in CSV_PROCESS}
