"""Processes that hold a GPU or a MIG instance by an open device node (``fuser -v``) and are not in NVML's lists.

Such a process blocks the destruction of an instance, a reset, and on Hopper and later the first GPU instance. Only root
sees all of them. What cannot be read is left out: nothing here makes a command fail.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from gpushare.base.errors import GpushareError, InUse, NotSupported
from gpushare.base.model import Holder
from gpushare.mig.plan import NoPlan, Why

if TYPE_CHECKING:
    from gpushare.base.model import Gpu
    from gpushare.host.capabilities import Place
    from gpushare.host.claims import Claim
    from gpushare.host.host import Host
    from gpushare.host.open_files import OpenFiles
    from gpushare.host.process import ProcessInfo

_PREFIX: Final = "/dev/nvidia"
# `Holder.what` of a claim; the word is part of the JSON.
CLAIM: Final = "lease"


class Remedy(NamedTuple):
    """How to make a known holder release the GPU; ``names`` are beginnings of process names."""

    names: tuple[str, ...]
    what: str


REMEDIES: Final = (
    # github.com/NVIDIA/DCGM issues 95 and 276: NVML handles of nv-hostengine keep a GPU instance in use.
    Remedy(("nv-hostengine", "dcgm-hostengine"), "sudo systemctl stop nvidia-dcgm"),
    # The exporter embeds the same engine: in a container, or in a pod of the GPU operator.
    Remedy(("dcgm-exporter",), "stop dcgm-exporter: its container, or its pod on this node"),
    # github.com/NVIDIA/gpu-operator issue 118: it blocks a reset.
    Remedy(("nvidia-persiste",), "sudo systemctl stop nvidia-persistenced, and start it again after the change"),
    # MIG User Guide, "Enable MIG Mode", and gpu-clients.yaml of NVIDIA's mig-parted: DGX systems run it.
    Remedy(("nvsm",), "sudo systemctl stop nvsm"),
    # MIG User Guide: no display server on a GPU that changes its mode.
    Remedy(("Xorg", "Xwayland", "X", "gdm", "gnome-shell", "sddm", "kwin"), "sudo systemctl isolate multi-user.target"),
    # Slurm FAQ: hwloc's OpenCL look opens the GPUs.
    Remedy(("slurmstepd", "slurmd"), "set HWLOC_COMPONENTS=-opencl for slurmd and restart it"),
    # NVIDIA's forum, GH200: a profiler's allocations make the first GPU instance fail.
    Remedy(("nsys", "nsight", "ncu"), "end the profiler: nsys shutdown, or close its window"),
    # HGX systems: no reset of a GPU while it runs.
    Remedy(("nv-fabricmanage",), "sudo systemctl stop nvidia-fabricmanager, and start it again after the change"),
    # github.com/NVIDIA/go-nvml issue 146; kubernetes device plugins hold NVML as the monitors do.
    Remedy(("nvidia-device-p", "gpu-feature-dis"), "stop the NVIDIA device plugin on this node"),
    Remedy(("nvidia-smi", "nvtop", "nvitop", "gpustat"), "end it: it looks at the GPU again and again"),
    # Each has the nodes of all GPUs open, as every program with NVML.
    Remedy(("gpushare run",), "wait until that gpushare run ends, or end it; see: gpushare status"),
    Remedy(
        ("gpushare timeslice",),
        "stop gpushare timeslice keep (sudo systemctl stop gpushare-timeslice), and start it again after the change",
    ),
    Remedy(("gpushare",), "end that gpushare command, and start it again after the change"),
    Remedy(("nvidia-cuda-mps",), "stop the daemon: gpushare mps stop; see: gpushare mps status"),
)


def look(host: Host) -> OpenFiles:
    """Return the processes with NVIDIA device nodes open, for all GPUs. ``complete`` needs root."""
    from gpushare.host.open_files import OpenFiles

    try:
        return host.processes.open_files(_PREFIX)
    except (GpushareError, OSError):
        return OpenFiles(by_pid={}, complete=False)


def instance_holders(host: Host, gpu: Gpu, files: OpenFiles | None = None) -> dict[Place, tuple[Holder, ...]]:
    """Return the processes that have capability nodes of instances open and are not in ``gpu.processes`` for them.

    By GPU instance id and compute instance id; None is the GPU instance's own node. ``files`` is an earlier `look`.
    """
    minor = _minor(host, gpu)
    if minor is None:
        return {}
    try:
        capabilities = host.capabilities.of_gpu(minor)
    except (GpushareError, OSError):
        return {}
    if not capabilities:
        return {}
    files = files or look(host)
    found = {}
    for place, capability in capabilities.items():
        pids = set(files.holders_of(capability.node)) - _listed(gpu, place)
        holders = _described(host, pids, capability.node)
        if holders:
            found[place] = holders
    return found


def gpu_holders(host: Host, gpu: Gpu, files: OpenFiles | None = None) -> tuple[Holder, ...]:
    """Return the processes with ``/dev/nvidiaN`` open that are not in ``gpu.processes``; ``files`` is an earlier `look`."""
    minor = _minor(host, gpu)
    if minor is None:
        return ()
    node = f"{_PREFIX}{minor}"
    pids = set((files or look(host)).holders_of(node)) - {one.pid for one in gpu.processes or ()}
    return _described(host, pids, node)


def claimed_instances(host: Host) -> dict[str, Holder] | None:
    """Return the claims on MIG instances (`gpushare run --mig`), by MIG UUID; None: they cannot be read."""
    from gpushare.host.claims import live_claims

    claims = live_claims(host)
    if claims is None:
        return None
    return {key: holder_of(host, one) for key, one in claims.items() if key.startswith("MIG-")}


def holder_of(host: Host, claim: Claim) -> Holder:
    """Return the first living process of a claim; its user is the owner of the file."""
    from gpushare.host.capabilities import user_name

    info = host.processes.describe(claim.pid)
    return Holder(pid=claim.pid, what=CLAIM, user=user_name(claim.uid), name=None if info is None else _called(info))


def blocking(holders: Iterable[Holder]) -> str:
    """Return holders in words: ``nv-hostengine (pid 812, root)``; each process once."""
    once = {holder.pid: holder for holder in holders}
    return ", ".join(
        f"{one.name or 'a process'} ({', '.join(filter(None, [f'pid {one.pid}', one.user]))})" for one in once.values()
    )


def remedy(holders: Iterable[Holder]) -> str | None:
    """Return how to make the known holders release the GPU, in one line; None: none is known."""
    return "; ".join(dict.fromkeys(one.what for holder in holders for one in _remedies_of(holder.name))) or None


def no_plan_error(found: NoPlan, gpu: int | None = None) -> GpushareError:
    """Return the error of a wish without a plan; its hint says how to stop known holders."""
    message, index = (found.message, None) if gpu is None else (f"GPU {gpu}: {found.message}", str(gpu))
    if found.why is Why.NEVER:
        return NotSupported(message, found.hint, gpu=index, code="never_fits")
    held = [part for _, gone in found.would_go for part in (gone.instance.holders, *(c.holders for c in gone.compute))]
    holders = [one for part in held for one in part or () if isinstance(one, Holder)]
    return InUse(message, remedy(holders) or found.hint, gpu=index, code="no_room")


def _remedies_of(name: str | None) -> Sequence[Remedy]:
    if name is None:
        return ()
    # A single letter is a whole name.
    return [
        one
        for one in REMEDIES
        if any(name == known or (len(known) > 1 and name.startswith(known)) for known in one.names)
    ][:1]


def _called(info: ProcessInfo) -> str | None:
    """Return the name of a process, of gpushare with its command: ``gpushare run``."""
    words = info.command_line or () if info.name == "gpushare" else ()
    return (
        " ".join(filter(None, [info.name, next((word for word in words if word in {"run", "timeslice"}), None)]))
        or None
    )


def _minor(host: Host, gpu: Gpu) -> int | None:
    if gpu.error is not None:
        return None
    try:
        return host.nvml.minor_number(gpu.index)
    except GpushareError:
        return None


def _listed(gpu: Gpu, place: Place) -> set[int]:
    """Return the PIDs that NVML lists in an instance; a process in a compute instance is in its GPU instance, too."""
    return {
        one.pid
        for one in gpu.processes or ()
        if one.gpu_instance_id == place[0] and place[1] in {None, one.compute_instance_id}
    }


def _described(host: Host, pids: Iterable[int], node: str) -> tuple[Holder, ...]:
    found = []
    for pid in sorted(set(pids) - {os.getpid()}):
        try:
            info = host.processes.describe(pid)
        except (GpushareError, OSError):
            found.append(Holder(pid=pid, what=node))
        else:
            # None: it has ended.
            if info is not None:
                found.append(Holder(pid=pid, what=node, user=info.user, name=_called(info)))
    return tuple(found)
