"""Processes that hold a GPU or a MIG instance by an open device node (``fuser -v``) and are not in NVML's lists.

Such a process blocks the destruction of an instance, a reset, and on Hopper and later the first GPU instance. Only root
sees all of them. What cannot be read is left out: nothing here makes a command fail.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeVar

from gpushare.base.errors import GpushareError, InUse, NotSupported, or_none
from gpushare.base.model import Gpu, GpuProcess, Holder
from gpushare.base.package import package_rows
from gpushare.host.capabilities import InstanceIds, user_name
from gpushare.host.claims import Claim, live_claims
from gpushare.mig.plan import NoPlan, Why

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.host.open_files import OpenFiles

_PREFIX: Final = "/dev/nvidia"
H = TypeVar("H", bound=GpuProcess | Holder)
# `Holder.what` of a claim; the word is part of the JSON.
CLAIM: Final = "lease"


def open_device_files(host: Host) -> OpenFiles:
    """Return the processes with NVIDIA device nodes open, for all GPUs. ``complete`` needs root."""
    return host.processes.open_files(_PREFIX)


def instance_holders(host: Host, gpu: Gpu, files: OpenFiles | None = None) -> dict[InstanceIds, tuple[Holder, ...]]:
    """Return by instance processes that keep it from being destroyed: its node open, and not in ``gpu.processes`` for it.

    A compute instance id None stands for the GPU instance itself. ``files`` were read before.
    """
    minor = _minor_or_none(host, gpu)
    capabilities = {} if minor is None else host.capabilities.of_gpu(minor)
    if not capabilities:
        return {}
    files = files or open_device_files(host)
    holders_at = {}
    for (instance, compute), capability in capabilities.items():
        listed = {
            process.pid
            for process in gpu.processes or ()
            if process.gpu_instance_id == instance and compute in {None, process.compute_instance_id}
        }
        holders = _describe_holders(host, set(files.holders_of(capability.node)) - listed, capability.node)
        if holders:
            holders_at[instance, compute] = holders
    return holders_at


def gpu_holders(host: Host, gpu: Gpu, files: OpenFiles | None = None) -> tuple[Holder, ...]:
    """Return processes that block a reset: ``/dev/nvidiaN`` open, and not in ``gpu.processes``; ``files`` were read before."""
    minor = _minor_or_none(host, gpu)
    if minor is None:
        return ()
    node = f"{_PREFIX}{minor}"
    pids = set((files or open_device_files(host)).holders_of(node)) - {process.pid for process in gpu.processes or ()}
    return _describe_holders(host, pids, node)


def claimed_instances(host: Host) -> dict[str, Holder] | None:
    """Return the claims on MIG instances (`gpushare run --mig`), by MIG UUID; None: they cannot be read."""
    claims = live_claims(host)
    if claims is None:
        return None
    return {key: claim_holder(host, claim) for key, claim in claims.items() if key.startswith("MIG-")}


def with_name(host: Host, process: H) -> H:
    """Return a process with its name and user, which NVML does not tell; as it is if it has ended."""
    info = None if process.name is not None else host.processes.describe(process.pid)
    return process if info is None else replace(process, name=info.name, user=info.user)


def claim_holder(host: Host, claim: Claim) -> Holder:
    """Return the process that a claim names, with the owner of the claim's file as its user."""
    info = host.processes.describe(claim.pid)
    return Holder(pid=claim.pid, what=CLAIM, user=user_name(claim.uid), name=None if info is None else info.name)


def release_remedy(holders: Iterable[Holder]) -> str | None:
    """Return how to make the known holders release the GPU (``data/holders.yaml``), in one line; None: none is known."""
    remedies = (_remedy_of(holder.name) for holder in holders if holder.name is not None)
    return "; ".join(dict.fromkeys(filter(None, remedies))) or None


def no_plan_error(no_plan: NoPlan, gpu: int | None = None) -> GpushareError:
    """Return the error of a wish without a plan; its hint says how to stop known holders."""
    message = no_plan.message if gpu is None else f"GPU {gpu}: {no_plan.message}"
    if no_plan.why is Why.NEVER:
        return NotSupported(message, no_plan.hint, gpu=gpu, code="never_fits")
    in_the_way = [holder for _, change in no_plan.would_go for holder in change.known_holders]
    # Remedies are known only for what holds an instance without a CUDA context.
    holders = [holder for holder in in_the_way if isinstance(holder, Holder)]
    return InUse(message, release_remedy(holders) or no_plan.hint, gpu=gpu, code="no_room")


def _remedy_of(name: str) -> str | None:
    """Return how a known program is made to release the GPU, by its name."""
    for row in package_rows("holders.yaml"):
        # Names begin so, but a single letter (X) is a whole name.
        if any(name == start or (len(start) > 1 and name.startswith(start)) for start in row["names"]):
            return str(row["remedy"])
    return None


def _minor_or_none(host: Host, gpu: Gpu) -> int | None:
    """Return the N of ``/dev/nvidiaN``; None: the GPU does not answer."""
    return None if gpu.error is not None else or_none(lambda: host.nvml.minor_number(gpu.index))


def _describe_holders(host: Host, pids: Iterable[int], node: str) -> tuple[Holder, ...]:
    """Return these processes, without this one and those that have ended, as holders of a node."""
    holders = []
    for pid in sorted(set(pids) - {os.getpid()}):
        info = host.processes.describe(pid)
        if info is not None:
            holders.append(Holder(pid=pid, what=node, user=info.user, name=info.name))
    return tuple(holders)
