"""The devices that ``-g`` names for a job: one, a set, or ``any``: all that it may have."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from gpushare.base.errors import BadUsage, GpushareError, NotSupported
from gpushare.base.selection import Device, select, select_for_change
from gpushare.base.units import quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpushare.base.model import Gpu


def is_any(gpu: str | None) -> bool:
    """Return whether ``-g any`` was given."""
    return gpu is not None and gpu.strip().lower() == "any"


def candidates(gpu: str | None, gpus: Sequence[Gpu], say: Callable[[str], None]) -> tuple[Device, ...]:
    """Return the devices that a job may have. ``say`` tells that ``any`` is of CUDA_VISIBLE_DEVICES.

    Raises:
        BadUsage: none is named on a host with several GPUs (code ``gpu_not_named``).
        GpushareError: as `select_for_change`.
    """
    if gpu is None and len(gpus) > 1:
        raise BadUsage(
            f"this host has {len(gpus)} GPUs; say on which to run",
            "name one: -g 0; or take the one where it harms least: -g any",
            code="gpu_not_named",
        )
    if not is_any(gpu):
        return select_for_change(gpu, gpus)
    # Any GPU is one that answers.
    answering = [each for each in gpus if each.error is None] or gpus
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return select_for_change("all", answering) if given is None else _given(given, answering, say)


def _given(text: str, gpus: Sequence[Gpu], say: Callable[[str], None]) -> tuple[Device, ...]:
    """Return the GPUs that a batch system, or the user, has left to this job: the others belong to other jobs."""
    # CUDA takes those before the first that there is not: "0,-1,1" is GPU 0.
    words: list[str] = []
    for word in text.split(","):
        try:
            select(word, gpus)
        except GpushareError:
            break
        words.append(word)
    if not words:
        raise BadUsage(
            f"-g any takes one of the GPUs in CUDA_VISIBLE_DEVICES, and {quoted(text)} names none of this host",
            "name one: -g 0; or for any of the host: env -u CUDA_VISIBLE_DEVICES gpushare run --wait -g any -- CMD",
            code="bad_gpu",
        )
    found = select(",".join(words), gpus)
    if len(found) < len(gpus):
        say(f"-g any: of the GPUs in CUDA_VISIBLE_DEVICES: {', '.join(one.title for one in found)}")
    return found


def usable(devices: Sequence[Device], *, instances: bool) -> tuple[Device, ...]:
    """Return the devices that ``-g any`` chooses from: GPUs without MIG, and the instances of the others.

    ``devices`` may be instances, of a job that a batch system has given some.
    """
    found: list[Device] = []
    for device in devices:
        if not device.gpu.mig_enabled or (device.mig is not None and instances):
            found.append(device)
        elif instances:
            found += [Device(gpu=device.gpu, mig=one) for one in device.gpu.mig_instances]
    if not found:
        raise NotSupported(
            "all GPUs are in MIG mode" + (" without an instance" if instances else ", where jobs cannot be swapped"),
            "see: gpushare mig status; to run in an instance: gpushare run --mig PROFILE -- CMD",
            code="mig_enabled",
        )
    return tuple(found)
