"""What NVIDIA's device plugin can say of a host: one way of sharing per node, none with a slice length. Pure.

What it cannot say is refused by name, with the engine that can. Facts: NVIDIA/k8s-device-plugin v0.20.0
(api/config/v1; cmd/mps-control-daemon gives each client total/replicas of the memory and 100/replicas percent).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gpushare.errors import BadUsage, NotSupported
from gpushare.layout.description import GpuDescription, HostDescription, MpsDescription, Sharing, ranges
from gpushare.layout.device_plugin import PREFIX, PluginSharing, check_mps, resource_of
from gpushare.model import Priority, TimeSlice
from gpushare.units import MIB, format_bytes, format_percent

# What a host cannot say itself; said with the export, and chosen with --replicas.
DEFAULT_REPLICAS: Final = 4
_GPU: Final = f"{PREFIX}gpu"
_DRA: Final = "gpushare export dra says it per GPU"


@dataclass(frozen=True, kw_only=True)
class NodeSharing:
    """The sharing of a node, its name as a key of the ConfigMap, and what gets lost by it."""

    key: str
    plugin: PluginSharing
    lost: tuple[str, ...]

    def capacity(self, host: HostDescription) -> dict[str, int]:
        """Return how many of each resource the node then offers (``kubectl describe node``, Capacity)."""
        found = physical(host, self.plugin.mig_strategy)
        replicas = dict(self.plugin.replicas)
        return {self.published(name): number * replicas.get(name, 1) for name, number in found.items()}

    def published(self, name: str) -> str:
        """Return the name under which a resource is offered: shared ones may be renamed."""
        return f"{name}.shared" if self.plugin.rename and name in dict(self.plugin.replicas) else name


def physical(host: HostDescription, mig_strategy: str | None) -> dict[str, int]:
    """Return how many GPUs and MIG devices a node has, by their resource names."""
    names = [_GPU for gpu in host.gpus if gpu.sharing is not Sharing.MIG]
    names += [_GPU if mig_strategy == "single" else resource_of(mig.profile) for _, mig in host.instances()]
    return dict(Counter(names))


def of_node(host: HostDescription, *, rename: bool = False, mig_strategy: str = "mixed") -> NodeSharing:
    """Return how the plugin shares the GPUs of a host.

    Raises:
        NotSupported: the plugin cannot say it: GPUs shared in different ways, a slice length, MPS on MIG.
        BadUsage: a number that the plugin refuses.
    """
    if mig_strategy not in {"single", "mixed"}:
        raise BadUsage(f"'{mig_strategy[:40]}' is no MIG strategy here", "give single or mixed", code="bad_strategy")
    if not host.whole:
        raise _cannot(
            "the device plugin offers every GPU of a node, not some of them",
            "leave -g out; or: gpushare export dra -g ..., which says it per GPU",
            "per_node",
        )
    _check_slices(host)
    plain = [gpu for gpu in host.gpus if gpu.sharing is not Sharing.MIG]
    _check_alike(plain)
    has_mig = len(plain) < len(host.gpus)
    if has_mig:
        _check_mig(host, plain, mig_strategy)
    lost: list[str] = []
    strategy, replicas = _shared(plain, lost)
    inside = _inside(host, mig_strategy)
    if strategy != "mps" and inside:
        strategy = "timeSlicing"
    return NodeSharing(
        key=_key(strategy, replicas, inside, mig=has_mig),
        plugin=PluginSharing(
            strategy=strategy,
            replicas=((*(((_GPU, replicas),) if replicas else ()), *inside)),
            rename=rename and strategy is not None,
            mig_strategy=mig_strategy if has_mig else None,
        ),
        lost=tuple(lost),
    )


def _key(strategy: str | None, replicas: int, inside: Sequence[tuple[str, int]], *, mig: bool) -> str:
    words = ["mig"] if mig else []
    if strategy is not None:
        numbers = sorted({number for number in (replicas, *(number for _, number in inside)) if number})
        words += ["mps" if strategy == "mps" else "timeslice", *map(str, numbers)]
    return "-".join(words) or "whole"


def _check_slices(host: HostDescription) -> None:
    odd = [gpu for gpu in host.gpus if gpu.time_slice not in {None, TimeSlice.DEFAULT} and _is_sliced(gpu)]
    if odd:
        level = odd[0].time_slice
        raise _cannot(
            f"the device plugin has no slice length; GPU {odd[0].index} has time-slice {level.title if level else ''}",
            f"{_DRA} (TimeSlicingSettings); or: gpushare timeslice reset -g {odd[0].index}",
            "no_slice_length",
        )


def _is_sliced(gpu: GpuDescription) -> bool:
    return gpu.sharing is Sharing.TIMESLICE


def _check_alike(gpus: Sequence[GpuDescription]) -> None:
    """One setting holds for all GPUs of a node: sharing.timeSlicing and sharing.mps name resources, not GPUs."""
    ways: dict[str, list[int]] = {}
    for gpu in gpus:
        ways.setdefault(_way(gpu), []).append(gpu.index)
    if len(ways) > 1:
        said = "; ".join(f"GPU {ranges(indexes)}: {way}" for way, indexes in ways.items())
        raise _cannot(f"the device plugin shares per node, not per GPU, and here is {said}", _DRA, "per_gpu")


def _way(gpu: GpuDescription) -> str:
    number = f", {gpu.replicas} replicas" if gpu.replicas and gpu.sharing is not Sharing.EXCLUSIVE else ""
    limits = ""
    if gpu.mps is not None:
        parts = [f"{format_percent(gpu.mps.threads_percent)} of the threads"] if gpu.mps.threads_percent else []
        parts += [format_bytes(gpu.mps.memory_limit_bytes)] if gpu.mps.memory_limit_bytes else []
        limits = f" ({', '.join(parts)})" if parts else ""
    return f"{gpu.sharing.value}{number}{limits}"


def _shared(gpus: Sequence[GpuDescription], lost: list[str]) -> tuple[str | None, int]:
    """Return the strategy and the replicas of the GPUs without MIG, which are all alike."""
    if not gpus or gpus[0].sharing is Sharing.EXCLUSIVE:
        return None, 0
    first = gpus[0]
    if first.replicas is not None and first.replicas < 2:
        raise BadUsage(
            f"number of replicas must be >= 2, not {first.replicas}",
            "for one program per GPU: gpushare export k8s on a GPU in compute mode exclusive-process",
            code="bad_replicas",
        )
    if first.sharing is Sharing.MPS:
        numbers = [_mps_replicas(gpu, gpu.mps or MpsDescription(), lost if gpu is first else []) for gpu in gpus]
        return "mps", numbers[0]
    if first.replicas is None:
        lost.append(_chosen())
    lost.append("memory and faults: time-slicing keeps neither apart; one program can take all memory of a GPU")
    return "timeSlicing", first.replicas or DEFAULT_REPLICAS


def _chosen() -> str:
    return f"the host does not say how many programs share a GPU: {DEFAULT_REPLICAS} is taken; choose with --replicas N"


def _mps_replicas(gpu: GpuDescription, mps: MpsDescription, lost: list[str]) -> int:
    """Return the replicas whose equal part is what the daemon's limits say; the plugin knows no other limits."""
    threads = mps.threads_percent
    number = gpu.replicas or (max(2, round(100 / threads)) if threads else DEFAULT_REPLICAS)
    check_mps(number, gpu.compute_capability)
    if threads is not None and 100 // number != threads:
        raise _cannot(
            f"the device plugin gives each of {number} MPS clients {100 // number} % of the threads; "
            f"GPU {gpu.index} has {format_percent(threads)}",
            f"{_DRA} (MPSSupport); or: gpushare mps set -g {gpu.index} --threads {100 // number}",
            "uneven_limits",
        )
    part = None if gpu.memory_total_bytes is None else gpu.memory_total_bytes // number // MIB
    wanted = None if mps.memory_limit_bytes is None else mps.memory_limit_bytes // MIB
    if wanted is not None and wanted != part:
        raise _cannot(
            f"the device plugin gives each of {number} MPS clients {part or '?'} MiB; GPU {gpu.index} has {wanted} MiB",
            f"{_DRA} (MPSSupport)" + (f"; or: gpushare mps set -g {gpu.index} --memory {part}M" if part else ""),
            "uneven_limits",
        )
    if threads is None:
        lost += [_chosen()] if gpu.replicas is None else []
        lost.append(f"no limit of threads: the plugin caps each client at {100 // number} %")
    if wanted is None and part is not None:
        lost.append(f"no limit of memory: the plugin caps each client process at {part} MiB")
    if mps.priority is Priority.LOW:
        lost.append("priority low: the plugin sets none")
    return number


def _check_mig(host: HostDescription, plain: Sequence[GpuDescription], strategy: str) -> None:
    if any(gpu.sharing is Sharing.MPS for gpu in plain) and strategy == "mixed":
        raise _cannot(
            "using --mig-strategy=mixed is not supported with MPS: here some GPUs have MIG and others MPS",
            _DRA,
            "mps_beside_mig",
        )
    for gpu, mig in host.instances():
        if mig.mps is not None:
            raise _cannot(
                f"sharing using MPS is not supported for MIG devices by the device plugin; {mig.profile} of GPU {gpu.index} has it",
                "gpushare export dra can, and gpushare export docker, compose and cdi",
                "mps_on_mig",
            )
        if not mig.is_whole:
            raise _cannot(
                f"the device plugin publishes no MIG device of a part of a GPU instance; "
                f"GPU {gpu.index} has {mig.profile}",
                "gpushare export slurm can, and gpushare export docker, compose and cdi",
                "partial_compute_instance",
            )
    if strategy == "single":
        _check_single(host, plain)


def _check_single(host: HostDescription, plain: Sequence[GpuDescription]) -> None:
    hint = "take --mig-strategy mixed"
    if plain:
        raise _cannot(
            "strategy single: all devices on the node must be configured with the same migEnabled value",
            hint,
            "mig_single",
        )
    empty = next((gpu.index for gpu in host.gpus if not gpu.mig), None)
    if empty is not None:
        raise _cannot(f"strategy single: device {empty} has no MIG devices configured", hint, "mig_single")
    if len({mig.profile for _, mig in host.instances()}) > 1:
        raise _cannot("strategy single: more than one MIG device type present on node", hint, "mig_single")


def _inside(host: HostDescription, strategy: str) -> tuple[tuple[str, int], ...]:
    """Return the replicas of MIG devices by resource; one number holds for all devices of a profile."""
    found: dict[str, set[int]] = {}
    for _, mig in host.instances():
        name = _GPU if strategy == "single" else resource_of(mig.profile)
        found.setdefault(name, set()).add(mig.replicas or 1)
    for name, numbers in found.items():
        if len(numbers) > 1:
            said = " and ".join(map(str, sorted(numbers)))
            raise _cannot(f"the device plugin shares all {name} of a node alike, and here is {said}", _DRA, "per_gpu")
    return tuple((name, number) for name, (number,) in found.items() if number > 1)


def _cannot(message: str, hint: str, code: str) -> NotSupported:
    return NotSupported(message, hint, code=code)
