"""Slurm: gres.conf, the lines of slurm.conf, and the scripts that gres/mps needs. Pure.

Facts: SchedMD/slurm 26.05 (src/interfaces/gres.c, src/plugins/gres/common/gres_c_s.c, gpu_nvml.c), gres.conf(5). Slurm
says sharing per GPU: shard only counts programs, mps also caps their threads.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Final

from gpushare.errors import BadUsage, NotSupported
from gpushare.layout import slurm_scripts
from gpushare.layout.description import GpuDescription, HostDescription, MigDescription, Sharing, short_model
from gpushare.layout.export import Document, Export
from gpushare.layout.node_sharing import DEFAULT_REPLICAS
from gpushare.model import TimeSlice
from gpushare.units import GIB, mps_memory

DETECTIONS: Final = ("nvml", "off")
# A percentage per GPU: Slurm gives a job max(1, asked * 100 / Count) percent of the threads.
MPS_COUNT: Final = 100
_SLICES: Final = re.compile(r"(?:\d+c\.)?(\d+)g\.", re.ASCII)


def export(host: HostDescription, *, autodetect: str | None = None) -> Export:
    """Return the files.

    ``autodetect`` nvml lets slurmd find GPUs and MIG devices (default where there is MIG), off writes every device.

    Raises:
        NotSupported: MPS on a MIG device; a GPU in MIG mode without devices; device numbers that are unknown.
        BadUsage: no such detection.
    """
    if autodetect not in {None, *DETECTIONS}:
        raise BadUsage(
            f"'{str(autodetect)[:40]}' is no way to detect GPUs here", "give nvml or off", code="bad_autodetect"
        )
    _check(host)
    has_mig = any(gpu.sharing is Sharing.MIG for gpu in host.gpus)
    by_nvml = has_mig if autodetect is None else autodetect == "nvml"
    with_mps = {gpu.minor: gpu for gpu in host.gpus if gpu.sharing is Sharing.MPS}
    documents = [
        Document(name="gres.conf", text=_gres(host, by_nvml=by_nvml), kind="conf"),
        Document(name="slurm.conf.lines", text=_lines(host, by_nvml=by_nvml), kind="conf"),
    ]
    if with_mps:
        uuids = {minor: gpu.uuid for minor, gpu in with_mps.items() if minor is not None}
        limits = {
            gpu.uuid: mps_memory(gpu.mps.memory_limit_bytes)
            for gpu in with_mps.values()
            if gpu.mps is not None and gpu.mps.memory_limit_bytes is not None
        }
        documents += [
            Document(name="gpushare-prolog.sh", text=slurm_scripts.prolog(uuids, limits), kind="sh"),
            Document(name="gpushare-epilog.sh", text=slurm_scripts.epilog(), kind="sh"),
            Document(name="gpushare-task-prolog.sh", text=slurm_scripts.task_prolog(), kind="sh"),
        ]
    return Export(
        documents=tuple(documents),
        commands=tuple(_commands(with_mps=bool(with_mps))),
        needs=tuple(_needs(host, by_nvml=by_nvml)),
        lost=tuple(_lost(host)),
    )


def type_of(gpu: GpuDescription, mig: MigDescription | None = None, *, by_nvml: bool = False) -> str:
    """Return the Type of a device: ``t4``; of a MIG device the driver's whole name with the profile.

    Where slurmd looks itself (``by_nvml``) it does not take the profile's name, but makes one of the slices of the GPU
    instance and its memory in whole GiB, rounded: 1g.18gb of an H200 is nvidia_h200_1g.16gb, and 3g.40gb of an A100
    ..._3g.39gb (gpu_nvml.c, _handle_mig). What slurm.conf says must be a part of that.
    """
    if mig is None:
        return short_model(gpu.name) or "gpu"
    name = re.sub(r"\s+", "_", (gpu.name or "gpu").strip().lower())
    slices = _SLICES.match(mig.profile)
    if not by_nvml or slices is None or mig.memory_total_bytes is None:
        return f"{name}_{mig.profile}"
    # Half a GiB goes up, as roundl does.
    return f"{name}_{slices[1]}g.{(mig.memory_total_bytes + GIB // 2) // GIB}gb"


def _check(host: HostDescription) -> None:
    for gpu in host.gpus:
        if gpu.minor is None:
            raise NotSupported(
                f"the device number of GPU {gpu.index} is unknown",
                "look where the driver tells it: gpushare doctor",
                gpu=str(gpu.index),
                code="no_minor",
            )
        if gpu.sharing is Sharing.MIG and not gpu.mig:
            raise NotSupported(
                f"GPU {gpu.index} is in MIG mode and has no MIG device; Slurm could hand out nothing of it",
                f"make some: gpushare mig apply -g {gpu.index} 1g*7; or: gpushare mig disable -g {gpu.index}",
                gpu=str(gpu.index),
                code="no_device",
            )
    for gpu, mig in host.instances():
        if mig.mps is not None or mig.replicas:
            what = "MPS" if mig.mps is not None else "shards"
            raise NotSupported(
                f"Slurm has no {what} on a MIG device ({mig.profile} of GPU {gpu.index}): a File of mps or shard must be a GPU's",
                "gpushare export dra can, and gpushare export docker, compose and cdi",
                code="sharing_on_mig",
            )


def _gres(host: HostDescription, *, by_nvml: bool) -> str:
    """Return gres.conf; records of shared resources name a File that a gpu record has."""
    lines = ["# Written by gpushare: gres.conf of this node.", f"AutoDetect={'nvml' if by_nvml else 'off'}"]
    gpus = sorted(host.gpus, key=lambda gpu: gpu.minor or 0)
    if not by_nvml:
        for gpu in gpus:
            lines += _devices(gpu)
    for gpu in gpus:
        if gpu.sharing is Sharing.TIMESLICE:
            lines.append(f"Name=shard Count={gpu.replicas or DEFAULT_REPLICAS} File=/dev/nvidia{gpu.minor}")
        elif gpu.sharing is Sharing.MPS:
            lines.append(f"Name=mps Count={MPS_COUNT} File=/dev/nvidia{gpu.minor}")
    return "\n".join(lines) + "\n"


def _devices(gpu: GpuDescription) -> list[str]:
    if gpu.sharing is not Sharing.MIG:
        return [f"Name=gpu Type={type_of(gpu)} File=/dev/nvidia{gpu.minor}"]
    lines = []
    for mig in gpu.mig:
        if mig.capabilities is None:
            raise NotSupported(
                f"the capability nodes of {mig.uuid or f'{mig.profile} of GPU {gpu.index}, which is not there yet,'} are unknown",
                "let slurmd find them: --autodetect nvml" + ("" if mig.uuid else "; or first: gpushare apply -f FILE"),
                gpu=str(gpu.index),
                code="no_capabilities",
            )
        nodes = [f"/dev/nvidia{gpu.minor}", *(f"/dev/nvidia-caps/nvidia-cap{one}" for one in mig.capabilities)]
        lines.append(f"Name=gpu Type={type_of(gpu, mig)} MultipleFiles={','.join(nodes)}")
    return lines


def _lines(host: HostDescription, *, by_nvml: bool) -> str:
    types: Counter[str] = Counter()
    shards = mps = 0
    for gpu in host.gpus:
        devices = [type_of(gpu, mig, by_nvml=by_nvml) for mig in gpu.mig]
        types.update(devices if gpu.sharing is Sharing.MIG else [type_of(gpu)])
        shards += (gpu.replicas or DEFAULT_REPLICAS) if gpu.sharing is Sharing.TIMESLICE else 0
        mps += MPS_COUNT if gpu.sharing is Sharing.MPS else 0
    shared = [f"mps:{mps}"] * bool(mps) + [f"shard:{shards}"] * bool(shards)
    names = ["gpu", *(one.partition(":")[0] for one in shared)]
    gres = ",".join([*(f"gpu:{kind}:{number}" for kind, number in sorted(types.items())), *shared])
    lines = ["# Written by gpushare: put these lines into slurm.conf, the same on every node."]
    lines.append(f"GresTypes={','.join(names)}")
    if shared:
        lines.append("SelectType=select/cons_tres")
    lines.append("AccountingStorageTRES=" + ",".join(f"gres/{name}" for name in names))
    if by_nvml and any(gpu.mig for gpu in host.gpus):
        lines += ["# MIG tells no utilization, and a slurmd that asks for it blocks every change of MIG."]
        lines += ["JobAcctGatherParams=DisableGPUAcct"]
    if mps:
        lines += [
            "# At the allocation, not at the first step.",
            "PrologFlags=Alloc",
            "Prolog=/etc/slurm/gpushare-prolog.sh",
            "Epilog=/etc/slurm/gpushare-epilog.sh",
            "TaskProlog=/etc/slurm/gpushare-task-prolog.sh",
        ]
    lines += ["# Put Gres into the node's own line, which also has its CPUs and memory."]
    lines += [f"NodeName={host.node or 'NODE'} Gres={gres}"]
    return "\n".join(lines) + "\n"


def _commands(*, with_mps: bool) -> list[str]:
    scripts = "gpushare-prolog.sh gpushare-epilog.sh gpushare-task-prolog.sh"
    return [
        "sudo install -m 644 gres.conf /etc/slurm/gres.conf",
        *([f"sudo install -m 755 -t /etc/slurm {scripts}"] if with_mps else []),
        "put slurm.conf.lines into slurm.conf (GresTypes, SelectType and Prolog may stand there already: merge them)",
        "sudo slurmd -G",
        "sudo systemctl restart slurmctld; on the node: sudo systemctl restart slurmd",
        "scontrol show node, and look for Gres=",
    ]


def _needs(host: HostDescription, *, by_nvml: bool) -> list[str]:
    needs = ["ConstrainDevices=yes in cgroup.conf: without it a job sees the GPUs of the others"]
    if by_nvml:
        needs.append("a slurmd that was built with NVML; else --autodetect off")
    if any(gpu.sharing is Sharing.MIG for gpu in host.gpus):
        needs += ["MIG is cut before slurmd starts; gpushare export systemd orders it so"]
        if by_nvml and _named_by_memory(host):
            needs.append("--gres by slurmd's own names: it calls MIG devices by their memory, not by their profile")
        needs += [] if by_nvml else ["gres.conf anew after every change of MIG: the capability numbers change"]
    if any(gpu.sharing is Sharing.MPS for gpu in host.gpus):
        needs += [
            "no MPS daemon of its own on these GPUs: gpushare mps stop -g all; Slurm starts one for its jobs",
            "setfacl (package acl): without it the daemon of a job is open to the job's group, not to its user alone",
            "one GPU with MPS per job and node, which is Slurm's default (no MULTIPLE_SHARING_GRES_PJ)",
        ]
    minors = sorted(gpu.minor or 0 for gpu in host.gpus)
    if minors != list(range(len(minors))):
        needs.append("GPU numbers that Slurm gives: they have gaps here, so compare with slurmd -G first")
    return needs


def _named_by_memory(host: HostDescription) -> bool:
    return any(type_of(gpu, mig, by_nvml=True) != type_of(gpu, mig) for gpu, mig in host.instances())


def _lost(host: HostDescription) -> list[str]:
    lost = []
    ways = {gpu.sharing for gpu in host.gpus}
    if Sharing.TIMESLICE in ways:
        if any(gpu.sharing is Sharing.TIMESLICE and gpu.replicas is None for gpu in host.gpus):
            lost.append(
                f"the host does not say how many programs share a GPU: {DEFAULT_REPLICAS} is taken; choose with --replicas N"
            )
        lost.append("shard only counts jobs: it limits neither memory nor threads")
    if any(gpu.time_slice not in {None, TimeSlice.DEFAULT} for gpu in host.gpus):
        lost.append("the slice length: it stays the host's; gpushare export systemd sets it at boot")
    if Sharing.MPS in ways:
        lost.append("the thread limit of the daemon: Slurm gives each job its own, --gres=mps:25 is 25 %")
        lost.append("users side by side: an MPS server serves one user, another user's job waits for it")
    if any(gpu.mps is not None and gpu.mps.priority for gpu in host.gpus):
        lost.append("priority low: Slurm sets none")
    if any(mig.name for _, mig in host.instances()):
        lost.append("names of instances: Slurm has types")
    return lost
