"""Snapshots made by hand: what a real host can look like at its worst, and at its quietest."""

from __future__ import annotations

from typing import Any

from gpushare.base.model import (
    ComputeMode,
    Gpu,
    GpuProcess,
    MigInstance,
    MpsClient,
    MpsDaemon,
    MpsServer,
    Priority,
    Snapshot,
    TimeSlice,
)

MIB = 1024**2
GIB = 1024**3
NOW = 1_790_000_000.0
H100_TOTAL = 81559 * MIB


def uuid(index: int) -> str:
    return f"GPU-{index:08x}-5e1f-4c02-9a77-0d3b6e{index:06x}"


def mig_uuid(number: int) -> str:
    return f"MIG-{number:08x}-91c4-5d0e-8b13-7f2a4c{number:06x}"


def h100(index: int, **more: Any) -> Gpu:
    """An idle H100 with nothing set up; ``more`` overrides."""
    given: dict[str, Any] = {
        "index": index,
        "uuid": uuid(index),
        "name": "NVIDIA H100 80GB HBM3",
        "pci_bus_id": f"00000000:{0x18 + 0x10 * index:02X}:00.0",
        "memory_total_bytes": H100_TOTAL,
        "memory_used_bytes": 4 * MIB,
        "utilization_percent": 0,
        "compute_mode": ComputeMode.DEFAULT,
        "mig_capable": True,
        "mig_enabled": False,
        "mig_pending": False,
        "time_slice": TimeSlice.DEFAULT,
        "processes": (),
    }
    return Gpu(**{**given, **more})


def process(pid: int, user: str, memory_mib: int | None, command: str, **more: Any) -> GpuProcess:
    argv = tuple(command.split())
    given: dict[str, Any] = {
        "pid": pid,
        "compute": True,
        "user": user,
        "name": argv[0].rsplit("/", 1)[-1],
        "command_line": argv,
        "started_at": NOW - 187,
        "memory_used_bytes": None if memory_mib is None else memory_mib * MIB,
        "sm_percent": 40,
    }
    return GpuProcess(**{**given, **more})


def _mig(number: int, profile: str, place: tuple[int, int], sms: int, total_mib: int, used_mib: int) -> MigInstance:
    return MigInstance(
        uuid=mig_uuid(number), gpu_instance_id=place[0], compute_instance_id=place[1], profile=profile,
        multiprocessors=sms, memory_total_bytes=total_mib * MIB, memory_used_bytes=used_mib * MIB,
    )  # fmt: skip


def _time_sliced(index: int) -> Gpu:
    return h100(
        index,
        time_slice=TimeSlice.LONG,
        utilization_percent=100,
        memory_used_bytes=60_817 * MIB,
        processes=(
            process(20411, "marta", 18_422, "/opt/conda/bin/python -m train --config configs/llama3/8b-lora.yaml"),
            process(
                20977,
                "Łukasz",
                42_391,
                "python3 -u /srv/jobs/diffusion/finetune.py --model stabilityai/sdxl --resolution 1024 "
                "--gradient-checkpointing --mixed-precision bf16 --output-dir /scratch/łukasz/out",
                started_at=NOW - 2 * 86400 - 100,
                sm_percent=59,
            ),
        ),
    )


def _partitioned(index: int) -> Gpu:
    return h100(
        index,
        utilization_percent=None,
        memory_used_bytes=12_700 * MIB,
        mig_enabled=True,
        mig_pending=True,
        time_slice=None,
        mig_instances=(
            _mig(1, "1c.3g.40gb", (1, 0), 16, 40_448, 12_650),
            _mig(2, "2c.3g.40gb", (1, 1), 32, 40_448, 12_650),
            _mig(3, "1g.10gb", (11, 0), 16, 9_984, 15),
        ),
        processes=(
            process(
                31002,
                "root",
                12_600,
                "tritonserver --model-repository=/models",
                gpu_instance_id=1,
                compute_instance_id=1,
                sm_percent=None,
                container="triton-prod",
                started_at=NOW - 5 * 3600,
            ),
        ),
    )


def _shared_by_mps(index: int) -> Gpu:
    serve = "python serve.py --port 80"
    return h100(
        index,
        compute_mode=ComputeMode.EXCLUSIVE_PROCESS,
        utilization_percent=97,
        memory_used_bytes=9_412 * MIB,
        processes=(
            process(40090, "root", 30, "nvidia-cuda-mps-server", sm_percent=0, started_at=NOW - 3600),
            process(40102, "王小明", 6_144, serve + "01", mps=True, compute=False, sm_percent=71),
            process(
                40177, "anna", 3_072, serve + "02", mps=True, compute=False, sm_percent=24, container="4f1c0ffee123"
            ),
        ),
    )


def _client(pid: int, user: str, limit_gib: int, priority: Priority, *threads: float) -> MpsClient:
    """Return a client with its limits, and those of the next one."""
    now, later = threads
    return MpsClient(
        pid=pid, server_pid=40090, name="python", user=user, threads_percent=now, next_threads_percent=later,
        memory_limit_bytes=limit_gib * GIB, next_memory_limit_bytes=limit_gib * GIB,
        priority=priority, next_priority=priority,
    )  # fmt: skip


def _daemons(index: int) -> tuple[MpsDaemon, ...]:
    clients = (
        _client(40102, "王小明", 40, Priority.NORMAL, 75.0, 75.0),
        _client(40177, "anna", 4, Priority.LOW, 25.0, 20.0),
    )
    return (
        MpsDaemon(
            pid=40085, ours=True, pipe_directory=f"/run/gpushare/mps/{uuid(index)}",
            log_directory="/var/log/gpushare/mps", device_uuid=uuid(index), gpu_index=index, user="root",
            threads_percent=75.0, memory_limit_bytes=40 * GIB, priority=Priority.NORMAL, max_clients=60,
            servers=(MpsServer(pid=40090, user="root", status="ACTIVE", threads_percent=75.0, clients=clients),),
        ),
        MpsDaemon(
            pid=911, ours=False, pipe_directory="/tmp/nvidia-mps", user="slurm", error="the pipe does not answer"
        ),
    )  # fmt: skip


def mixed_host() -> Snapshot:
    """Eight H100: idle, time-sliced, MIG, MPS, exclusive, lost, an unknown process list, MIG pending."""
    return Snapshot(
        host="gpu-node-07",
        driver_version="580.159.04",
        taken_at=NOW,
        gpus=(
            h100(0),
            _time_sliced(1),
            _partitioned(2),
            _shared_by_mps(3),
            h100(4, compute_mode=ComputeMode.EXCLUSIVE_PROCESS, time_slice=TimeSlice.SHORT),
            Gpu(index=5, pci_bus_id="00000000:68:00.0", error="GPU is lost"),
            h100(6, processes=None, compute_mode=ComputeMode.PROHIBITED, time_slice=None),
            h100(7, mig_pending=True, utilization_percent=None),
        ),
        daemons=_daemons(3),
        warnings=("nvidia-smi compute-policy gave no time-slice for GPU 6",),
    )


def quiet_host() -> Snapshot:
    """One idle GPU and nobody on it."""
    return Snapshot(host="local", driver_version="580.159.04", taken_at=NOW, gpus=(h100(0),))
