"""Move: a running job to another GPU of the same host, out to host memory and in again with the driver's pairs (`swap.py`).

Between two GPUs of one model, from driver 580, without root and whatever CUDA_VISIBLE_DEVICES shows to the program (two
H100, driver 580.159.04, 2026-11-25). A refused restore leaves the job in host memory, and it goes back to where it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from gpushare.base.errors import InUse, NotFound, NotSupported, OperationFailed
from gpushare.base.model import Gpu
from gpushare.base.units import format_bytes
from gpushare.host.host import Host
from gpushare.host.store import JobProcess
from gpushare.memory.room import room_kept
from gpushare.memory.swap import come_in, go_out
from gpushare.memory.swapped import SWAPS, Swap

# How the launchers of several processes tell each how many they are; such a job talks by NCCL or MPI.
_WORLD_SIZES: Final = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def check_single_rank(host: Host, title: str, processes: Sequence[JobProcess]) -> None:
    """Raise NotSupported if a job is one rank of several (code ``several_ranks``).

    After a move the driver still tells the old PCI address, so NCCL does not find the GPU (NVIDIA/cuda-checkpoint issue 48).
    """
    for process in processes:
        variables = host.processes.environment(process.pid) or {}
        for name in _WORLD_SIZES:
            size = variables.get(name, "")
            if size.isdecimal() and int(size) > 1:
                raise NotSupported(
                    f"{title} is one of {int(size)} ranks ({name}): NCCL does not find its GPU after a move",
                    "pause it instead: gpushare pause JOB",
                    code="several_ranks",
                )


def check_target(source: Gpu, target: Gpu) -> None:
    """Raise NotSupported unless both are whole GPUs of one model: the driver moves jobs between such GPUs only."""
    for gpu in (source, target):
        if gpu.mig_enabled:
            raise NotSupported(
                f"GPU {gpu.index} is in MIG mode, and a job moves only between whole GPUs",
                "see the GPUs: gpushare status",
                gpu=str(gpu.index),
                code="mig_enabled",
            )
    if (target.name, target.memory_total_bytes) != (source.name, source.memory_total_bytes):
        raise NotSupported(
            f"GPU {target.index} ({target.name or 'unknown model'}) is not of the same model as GPU {source.index} "
            f"({source.name or 'unknown model'})",
            "a job moves only between GPUs of one model",
            gpu=str(target.index),
            code="other_model",
        )


def possible_targets(source: Gpu, gpus: Sequence[Gpu]) -> list[Gpu]:
    """Return the GPUs that a job on ``source`` can move to, whether they have room or not."""
    movable = []
    for gpu in gpus:
        with contextlib.suppress(NotSupported):
            check_target(source, gpu)
            if gpu.error is None and gpu.uuid not in {None, source.uuid}:
                movable.append(gpu)
    return movable


def assign_gpus(needs: Mapping[int, int], free: Mapping[int, int]) -> dict[int, int]:
    """Return the index of the GPU that each job goes to, by the PID of the job: the largest first, each where most is free.

    ``needs`` are bytes by the PID of the job (`room.bytes_to_come_in`), ``free`` bytes by the index of the GPU. A job without room
    is left out.
    """
    still_free = dict(free)
    chosen: dict[int, int] = {}
    for pid, need in sorted(needs.items(), key=lambda job: (-job[1], job[0])):
        index = max(still_free, key=lambda index: (still_free[index], -index), default=None)
        if index is not None and still_free[index] >= need:
            chosen[pid] = index
            still_free[index] -= need
    return chosen


def move(host: Host, swap: Swap, target: Gpu, read_processes: Callable[[], Sequence[JobProcess]]) -> Swap:
    """Move a job whose room on ``target`` is reserved; return its record. The caller holds the lock and has the guard.

    Raises:
        GpushareError: as `go_out`: nothing has changed.
        OperationFailed: the driver refused (code ``move_refused``), and the job is back where it was, or swapped out if
            there is no longer room; or it is lost (``job_lost``).
        NotFound: it has ended.
    """
    moving = go_out(host, swap, read_processes, target_uuid=target.uuid)
    try:
        return come_in(host, moving)
    except (OperationFailed, InUse) as error:
        if error.code not in {"restore_refused", "no_room"}:
            raise
        out = SWAPS.read(swap.path)
        if out is None:
            raise NotFound(f"{swap.title} has ended", "see what runs: gpushare jobs", code="no_job") from error
        _bring_back(host, out, swap.gpu_uuid)
        raise OperationFailed(
            f"{swap.title} is where it was: {error.message}", "see: sudo dmesg | tail", code="move_refused"
        ) from error


def _bring_back(host: Host, out: Swap, source_uuid: str) -> None:
    """Bring a job that was refused on its new GPU back to the GPU it left. Raises InUse if that no longer has room."""
    to_source = retargeted(out, source_uuid)
    with room_kept(host, to_source, to_source.memory_bytes) as has_room:
        # None: unknown.
        if has_room is False:
            raise InUse(
                f"{out.title} is swapped out: its new GPU refused it, and another program took its {format_bytes(out.memory_bytes)}",
                f"bring it back when there is room: gpushare swap in {out.selector} --wait",
                code="no_room",
            )
        come_in(host, to_source)


def retargeted(out: Swap, uuid: str) -> Swap:
    """Return the record of a swapped-out job, changed so that the job comes in to GPU ``uuid``.

    The driver restores a process to the GPU that its image is of, or by pairs to another one. In the record all images are of
    ``left_uuid`` (None: of ``gpu_uuid``), but those of ``arrived``, which a broken-off move had brought to ``gpu_uuid``.

    Raises NotSupported: its processes are images of two GPUs, and this is a third (code ``several_gpus``).
    """
    if uuid == out.gpu_uuid:
        return out
    if uuid == out.left_uuid:
        # Back where it left: the processes that had arrived move again, and the images of the others are of this GPU.
        not_arrived = tuple(image.pid for image in out.images if image.pid not in out.arrived)
        return replace(out, gpu_uuid=uuid, left_uuid=out.gpu_uuid, arrived=not_arrived)
    if out.arrived:
        raise NotSupported(
            f"{out.title} was moved only halfway: it can come back only to one of its two GPUs",
            f"bring it back first: gpushare swap in {out.selector}",
            code="several_gpus",
        )
    return replace(out, gpu_uuid=uuid, left_uuid=out.left_uuid or out.gpu_uuid, arrived=())
