"""Amazon ECS: a task definition with one container that shares a GPU by MPS. Pure.

Facts: the ECS API (SharingStrategy, NvidiaMpsAllocation): ECS runs the MPS daemon itself, places containers by GPU memory
alone, and sets CUDA_MPS_PINNED_DEVICE_MEM_LIMIT and CUDA_MPS_ACTIVE_THREAD_PERCENTAGE in the container.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from gpushare.base.errors import NotFound, NotSupported
from gpushare.base.model import Way
from gpushare.base.units import MIB
from gpushare.export.containers import ExportedDevice
from gpushare.export.description import whole_percent
from gpushare.export.document import Document, Export, check_word, image_or_default, notes

FILE: Final = "task-definition.json"
# Host memory that ECS keeps for the container.
_HOST_MEBIBYTES: Final = 1024
_FAMILY: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,254}", re.ASCII)


def ecs_export(share: ExportedDevice, *, family: str = "gpu-shared", image: str | None = None) -> Export:
    """Return the task definition of one container on a share like this one."""
    check_word(family, _FAMILY, "the name of a task definition", "--name gpu-shared")
    container = {
        "name": "gpu",
        "image": image_or_default(image),
        "essential": True,
        "memoryReservation": _HOST_MEBIBYTES,
        "resourceRequirements": [{"type": "GPU", **_gpu_requirement(share)}],
    }
    task = {"family": family, "requiresCompatibilities": ["EC2"], "containerDefinitions": [container]}
    return Export(
        documents=(Document(name=FILE, text=json.dumps(task, indent=2) + "\n", kind="json"),),
        commands=(
            f"aws ecs register-task-definition --cli-input-json file://{FILE}",
            f"aws ecs run-task --cluster CLUSTER --launch-type EC2 --task-definition {family} --count 2",
        ),
        needs=notes("ecs", "needs", share.traits, memory=_HOST_MEBIBYTES),
        lost=notes("ecs", "lost", share.traits),
    )


def _gpu_requirement(share: ExportedDevice) -> dict[str, Any]:
    """Return what the container asks of ECS: a whole GPU, or a part of one by MPS.

    Raises:
        NotSupported: ECS has no MIG, no time-slicing and no fraction of a percent.
        NotFound: the daemon has no memory limit, by which ECS places containers.
    """
    if share.mig is not None or share.gpu.sharing is Way.MIG:
        raise NotSupported(
            f"ECS offers no MIG devices; {share.title} is one" if share.mig else "ECS offers no MIG devices",
            "gpushare export k8s, dra and slurm can, and gpushare export docker, compose and cdi",
            code="no_mig_there",
        )
    if share.gpu.sharing is Way.EXCLUSIVE:
        return {"value": "1"}
    if share.mps is None:
        raise NotSupported(
            f"ECS shares GPUs by MPS only; {share.title} is time-sliced",
            f"gpushare mps start -g {share.gpu.index} --memory 8G; or for one task per GPU: compute mode exclusive-process",
            code="no_time_slicing",
        )
    limits = share.mps.limits
    if limits.memory_limit_bytes is None:
        raise NotFound(
            f"ECS places containers by GPU memory, and the MPS daemon of {share.title} has no memory limit",
            f"give one: gpushare mps set -g {share.gpu.index} --memory 8G",
            code="no_memory_limit",
        )
    allocation = {"memory": limits.memory_limit_bytes // MIB}
    percent = limits.threads_percent
    if percent is not None and percent < 100:
        allocation["maxComputePercent"] = whole_percent(percent, "ECS", share.title)
    return {"sharingStrategy": {"nvidiaMps": allocation}}
