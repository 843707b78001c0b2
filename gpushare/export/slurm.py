"""Slurm: gres.conf, lines for slurm.conf, and the scripts that gres/mps needs. Pure.

Facts: SchedMD/slurm 26.05 (src/interfaces/gres.c, src/plugins/gres/common/gres_c_s.c, gpu_nvml.c), gres.conf(5). Slurm
shares per GPU: shard only counts programs, mps also caps their threads.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from gpushare.base.errors import BadUsage, NotSupported
from gpushare.base.model import Way
from gpushare.base.units import GIB, mps_memory, mps_memory_readback
from gpushare.export.description import GpuDescription, HostDescription, MigDescription, short_model
from gpushare.export.document import Document, Export, notes, render_file
from gpushare.export.k8s import DEFAULT_REPLICAS

STATE: Final = "/run/gpushare-slurm"


def _prolog(host: HostDescription, *, by_nvml: bool) -> str:
    """Return the script that Slurm runs before each job (Prolog), with the UUIDs and memory limits of the shared GPUs."""
    numbered = list(enumerate(slurm_order(host, by_nvml=by_nvml)))
    mps_uuids = {number: device.gpu.uuid for number, device in numbered if device.gpu.sharing is Way.MPS}
    shard_uuids = {number: device.gpu.uuid for number, device in numbered if device.gpu.sharing is Way.TIMESLICE}
    limits = "".join(
        f"    {gpu.uuid}) echo {mps_memory(limit)} {mps_memory_readback(limit)} ;;\n"
        for gpu in host.gpus
        if gpu.mps is not None and (limit := gpu.mps.limits.memory_limit_bytes) is not None
    )
    return _render_script(
        "prolog",
        CASES=_uuid_cases(mps_uuids),
        MPS=_numbers_with("mps", mps_uuids),
        SHARDS=_uuid_cases(shard_uuids),
        SHARD=_numbers_with("shard", shard_uuids),
        LIMITS=limits,
    )


def _uuid_cases(uuids: Mapping[int, str]) -> str:
    """Return the lines of a shell ``case`` that turn a GPU's number in Slurm, or its UUID, into the UUID."""
    return "".join(f"    {number} | {uuid}) echo {uuid} ;;\n" for number, uuid in uuids.items())


def _numbers_with(gres: str, uuids: Mapping[int, str]) -> str:
    """Return shell text for the numbers of a job's GPUs with a gres: of several the script asks slurmctld (empty: none)."""
    return ",".join(map(str, uuids)) if len(uuids) < 2 else f"$(numbers_of {gres})"


def _render_script(name: str, **values: str) -> str:
    """Return a script of Slurm with its values, after the functions that prolog and epilog share."""
    common = "" if name == "task-prolog" else render_file("slurm-common.sh", STATE=STATE)
    return render_file(f"slurm-{name}.sh", STATE=STATE, COMMON=common, **values)


_SCRIPTS: Final = "gpushare-prolog.sh gpushare-epilog.sh gpushare-task-prolog.sh"
# 100 per GPU: Slurm gives a job max(1, asked * 100 / Count) percent of the threads.
MPS_COUNT: Final = 100
_SLICES: Final = re.compile(r"(?:\d+c\.)?(\d+)g\.", re.ASCII)


def slurm_export(host: HostDescription, *, autodetect: str | None = None) -> Export:
    """Return the files that let Slurm share the GPUs of this node.

    ``autodetect`` nvml lets slurmd find GPUs and MIG devices (the default with MIG); off lists every device.
    """
    if autodetect not in {None, "nvml", "off"}:
        raise BadUsage(
            f"'{str(autodetect)[:40]}' is not a way to detect GPUs", "give nvml or off", code="bad_autodetect"
        )
    _check_expressible(host)
    has_mig = any(gpu.sharing is Way.MIG for gpu in host.gpus)
    by_nvml = has_mig if autodetect is None else autodetect == "nvml"
    with_mps = any(gpu.sharing is Way.MPS for gpu in host.gpus)
    documents = [
        Document(name="gres.conf", text=_gres_conf(host, by_nvml=by_nvml), kind="conf"),
        Document(name="slurm.conf.lines", text=_slurm_conf_lines(host, by_nvml=by_nvml), kind="conf"),
        Document(name="cgroup.conf.lines", text=_CGROUP, kind="conf"),
    ]
    if with_mps:
        documents += [
            Document(name="gpushare-prolog.sh", text=_prolog(host, by_nvml=by_nvml), kind="sh"),
            Document(name="gpushare-epilog.sh", text=_render_script("epilog"), kind="sh"),
            # A Prolog's own environment never reaches the job.
            Document(name="gpushare-task-prolog.sh", text=_render_script("task-prolog"), kind="sh"),
        ]
    traits = host.traits | ({"nvml"} if by_nvml else set())
    if any(slurm_type(gpu, mig, by_nvml=True) != slurm_type(gpu, mig) for gpu, mig in host.instances()):
        traits.add("named-by-memory")
    files = [f"/dev/nvidia{device.gpu.minor}" for device in slurm_order(host, by_nvml=False)]
    return Export(
        documents=tuple(documents),
        commands=(
            "sudo install -m 644 gres.conf /etc/slurm/gres.conf",
            *([f"sudo install -m 755 -t /etc/slurm {_SCRIPTS}"] if with_mps else []),
            "put slurm.conf.lines into slurm.conf (GresTypes, SelectType, TaskPlugin and Prolog may already be there: merge them)",
            "put cgroup.conf.lines into /etc/slurm/cgroup.conf",
            "sudo slurmd -G",
            "sudo systemctl restart slurmctld; on the node: sudo systemctl restart slurmd",
            "scontrol show node, and look for Gres=",
        ),
        needs=notes("slurm", "needs", traits, files=", ".join(dict.fromkeys(files))),
        lost=notes("slurm", "lost", traits, replicas=DEFAULT_REPLICAS),
    )


def slurm_type(gpu: GpuDescription, mig: MigDescription | None = None, *, by_nvml: bool = False) -> str:
    """Return the Type of a device: ``t4``; of a MIG device the driver's whole name with the profile.

    Where slurmd detects devices (``by_nvml``) it does not use the profile's name, but makes one from the slices of the GPU
    instance and its memory in whole GiB, rounded: 1g.18gb of an H200 is nvidia_h200_1g.16gb, and 3g.40gb of an A100
    ..._3g.39gb (gpu_nvml.c, _handle_mig). What slurm.conf says must be a part of that.
    """
    if mig is None:
        return short_model(gpu.name) or "gpu"
    name = re.sub(r"\s+", "_", (gpu.name or "gpu").strip().lower())
    slices = _SLICES.match(mig.profile)
    if not by_nvml or slices is None or mig.memory_total_bytes is None:
        return f"{name}_{mig.profile}"
    # Half a GiB is rounded up, as roundl does.
    return f"{name}_{slices[1]}g.{(mig.memory_total_bytes + GIB // 2) // GIB}gb"


class SlurmDevice(NamedTuple):
    """A device as a record of gres/gpu, with its Type."""

    type: str
    gpu: GpuDescription
    mig: MigDescription | None = None


_CGROUP: Final = """\
# Written by gpushare: cgroup.conf needs this line. Without it a job can open all GPUs of the node: a MIG job can use
# the other instances, and any job can use the GPUs that MPS serves.
ConstrainDevices=yes
"""


def _devices_by_minor(host: HostDescription, *, by_nvml: bool) -> list[SlurmDevice]:
    """Return the records of gres/gpu in the order of gres.conf."""
    return [
        SlurmDevice(slurm_type(gpu, mig, by_nvml=by_nvml), gpu, mig)
        for gpu in sorted(host.gpus, key=lambda gpu: gpu.minor or 0)
        for mig in (gpu.mig if gpu.sharing is Way.MIG else (None,))
    ]


def slurm_order(host: HostDescription, *, by_nvml: bool) -> list[SlurmDevice]:
    """Return the devices in the order in which Slurm numbers the GPUs of jobs, whatever the device files are.

    Without detection: by type as in the Gres of slurm.conf, and within a type as in gres.conf (_merge_config in
    src/interfaces/gres.c; seen with slurmctld 22.05 and 24.11). With NVML: the GPUs by PCI bus id, then the MIG devices by
    file (_merge_system_gres_conf in gres_gpu.c).
    """
    devices = _devices_by_minor(host, by_nvml=by_nvml)
    if by_nvml:
        gpus = [device for device in devices if device.mig is None]
        migs = [device for device in devices if device.mig is not None]
        # Indexes are in the order of PCI bus ids; the MIG devices are in the order of their files already.
        return [*sorted(gpus, key=lambda device: device.gpu.index), *migs]
    types = list(_count_types(devices))
    return sorted(devices, key=lambda device: types.index(device.type))


def _count_types(devices: Iterable[SlurmDevice]) -> Counter[str]:
    """Return how many devices each type has, in the order for slurm.conf.

    MIG devices come last, because Slurm 22.05 counts each of their files as a device of gres/mps.
    """
    return Counter(device.type for device in sorted(devices, key=lambda device: device.mig is not None))


def _check_expressible(host: HostDescription) -> None:
    """Raise NotSupported if Slurm cannot share the GPUs as this host does."""
    for gpu in host.gpus:
        if gpu.minor is None:
            raise NotSupported(
                f"the device number of GPU {gpu.index} is unknown",
                "see why: gpushare doctor",
                gpu=gpu.index,
                code="no_minor",
            )
        if gpu.sharing is Way.MIG and not gpu.mig:
            raise NotSupported(
                f"GPU {gpu.index} is in MIG mode without any MIG device, so Slurm could not hand it out",
                f"make one: gpushare mig apply -g {gpu.index} 1g; or: gpushare mig disable -g {gpu.index}",
                gpu=gpu.index,
                code="no_device",
            )
    for gpu, mig in host.instances():
        if mig.mps is not None or mig.replicas:
            sharing = "MPS" if mig.mps is not None else "shards"
            raise NotSupported(
                f"Slurm has no {sharing} on a MIG device ({mig.profile} of GPU {gpu.index}): the File of mps and shard must be a GPU",
                "gpushare export dra can, and gpushare export docker, compose and cdi",
                code="sharing_on_mig",
            )


def _gres_conf(host: HostDescription, *, by_nvml: bool) -> str:
    """Return gres.conf. Records of shared resources name the File of a gpu record."""
    lines = ["# Written by gpushare: gres.conf of this node.", f"AutoDetect={'nvml' if by_nvml else 'off'}"]
    gpus = sorted(host.gpus, key=lambda gpu: gpu.minor or 0)
    if not by_nvml:
        for gpu in gpus:
            lines += _device_lines(gpu)
    for gpu in gpus:
        if gpu.sharing is Way.TIMESLICE:
            lines.append(f"Name=shard Count={gpu.replicas or DEFAULT_REPLICAS} File=/dev/nvidia{gpu.minor}")
        elif gpu.sharing is Way.MPS:
            lines.append(f"Name=mps Count={MPS_COUNT} File=/dev/nvidia{gpu.minor}")
    return "\n".join(lines) + "\n"


def _device_lines(gpu: GpuDescription) -> list[str]:
    """Return the records of gres/gpu for a GPU, or for each of its MIG devices."""
    if gpu.sharing is not Way.MIG:
        # So that a job of several GPUs gets connected ones; with AutoDetect slurmd finds them (gres.conf(5), Links).
        links = f" Links={','.join(map(str, gpu.links))}" if any(link > 0 for link in gpu.links) else ""
        return [f"Name=gpu Type={slurm_type(gpu)} File=/dev/nvidia{gpu.minor}{links}"]
    lines = []
    for mig in gpu.mig:
        if mig.capabilities is None:
            device = mig.uuid or f"{mig.profile} of GPU {gpu.index}, which does not exist yet,"
            raise NotSupported(
                f"the capability nodes of {device} are unknown",
                "let slurmd find them: --autodetect nvml" + ("" if mig.uuid else "; or first: gpushare apply -f FILE"),
                gpu=gpu.index,
                code="no_capabilities",
            )
        nodes = (f",/dev/nvidia-caps/nvidia-cap{capability}" for capability in mig.capabilities)
        lines.append(f"Name=gpu Type={slurm_type(gpu, mig)} MultipleFiles=/dev/nvidia{gpu.minor}{''.join(nodes)}")
    return lines


def _slurm_conf_lines(host: HostDescription, *, by_nvml: bool) -> str:
    """Return the lines for slurm.conf; their types are in the order of `slurm_order`."""
    types = _count_types(_devices_by_minor(host, by_nvml=by_nvml))
    mps = sum(MPS_COUNT for gpu in host.gpus if gpu.sharing is Way.MPS)
    shards = sum(gpu.replicas or DEFAULT_REPLICAS for gpu in host.gpus if gpu.sharing is Way.TIMESLICE)
    shared = {name: number for name, number in (("mps", mps), ("shard", shards)) if number}
    names = ["gpu", *shared]
    typed = {f"gpu:{kind}": number for kind, number in types.items()}
    gres = ",".join(f"{name}:{number}" for name, number in {**typed, **shared}.items())
    lines = ["# Written by gpushare: put these lines into slurm.conf, the same on every node."]
    lines.append(f"GresTypes={','.join(names)}")
    if shared:
        lines.append("SelectType=select/cons_tres")
    lines += [
        "# With ConstrainDevices=yes in cgroup.conf: a task can open the devices of its job only.",
        "ProctrackType=proctrack/cgroup",
        "TaskPlugin=task/cgroup,task/affinity",
        "# Only if slurmdbd runs: without slurmdbd, slurmctld does not start with this line.",
        "#AccountingStorageTRES=" + ",".join(f"gres/{name}" for name in names),
    ]
    if by_nvml and any(gpu.mig for gpu in host.gpus):
        lines += ["# MIG devices report no utilization, and a slurmd that asks for it blocks every MIG change."]
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
    if mps and len(types) > 1 and not by_nvml:
        lines += ["# Keep the order of the types: the numbers in the prolog follow it."]
    lines += [f"NodeName={host.node or 'NODE'} Gres={gres}"]
    return "\n".join(lines) + "\n"
