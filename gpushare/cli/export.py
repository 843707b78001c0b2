"""``gpushare export``: configure another engine like this host; done by `gpushare/export/`."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import typer

from gpushare.base.errors import BadUsage, GpushareError
from gpushare.base.model import Way
from gpushare.base.selection import select, select_one
from gpushare.base.values import dataclass
from gpushare.cli import metrics
from gpushare.cli.options import GROUP, ONE_GPU_OPTION, WHOLE_GPU_OPTION, Command, flag, note, option, settings
from gpushare.export import description
from gpushare.export.containers import (
    ExportedDevice,
    cdi_export,
    compose_export,
    container_device,
    docker_export,
    mig_parted_export,
)
from gpushare.export.description import GpuDescription, HostDescription, as_wished, describe_host
from gpushare.export.document import Export, apply_script, check_word, joined_text, write_documents
from gpushare.export.dra import claims_export
from gpushare.export.ecs import ecs_export
from gpushare.export.k8s import operator_export
from gpushare.export.karpenter import node_pool_export
from gpushare.export.slurm import slurm_export
from gpushare.export.systemd import FILE, units_export
from gpushare.hostfile.diff import check_fits, diff_points
from gpushare.hostfile.file import HostFile, document_of
from gpushare.hostfile.kept import file_applied_by_root
from gpushare.hostfile.load import entries_of, load, with_place_in_file
from gpushare.hostfile.look import live_gpus
from gpushare.mig.driver import MigReader
from gpushare.mps.home import own_home
from gpushare.show.result import Result
from gpushare.snapshot import HostState

_NODE: Final = r"(?a)[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?"

_USUAL_PROGRAM: Final = "/usr/bin/gpushare"

FILE_OPTION: Final = option("-f --file", "FILE", "Take the sharing from this gpushare.yaml. [default: this host]")
_EVERY_GPU: Final = option(
    "-g --gpu", "GPU", "All GPUs of the node (the default): the device plugin cannot offer only some."
)
TO: Final = option("--to", "DIR", "Write the files there instead of printing them.")
NODE: Final = option("--node", "NAME", "The node's name in the cluster.")
REPLICAS: Final = option(
    "--replicas", "N", "How many programs share a GPU; 1: a time-sliced GPU is not shared. [default: 4]", min=1
)
MIG_REPLICAS: Final = option("--mig-replicas", "N", "How many programs share a MIG device. [default: 1]", min=1)


def dra(
    gpu: str | None = WHOLE_GPU_OPTION,
    file: str | None = FILE_OPTION,
    mig_replicas: int | None = MIG_REPLICAS,
    kubernetes: str = option("--kubernetes", "VERSION", "The version of the cluster, from 1.32 on.", default="1.34"),
    to: str | None = TO,
) -> Any:
    """Write a ResourceClaim for each shared GPU or MIG device, and a template for each that is not shared.

    A ResourceClaim sets sharing per GPU, with time-slice level and MPS limits; the device plugin cannot do that. Pods
    share a GPU when they name the same claim; a template makes a claim, and takes a GPU, for each pod.
    """
    export = claims_export(describe(gpu, file=file, mig_replicas=mig_replicas), kubernetes=kubernetes)
    return export_result("dra", export, to)


def karpenter(
    gpu: str | None = _EVERY_GPU,
    file: str | None = FILE_OPTION,
    replicas: int | None = REPLICAS,
    mig_replicas: int | None = MIG_REPLICAS,
    name: str = option("--name", "NAME", "The name of the NodePool and of the EC2NodeClass.", default="gpu-shared"),
    node_class: str | None = option("--node-class", "NAME", "An EC2NodeClass that exists. [default: write one]"),
    cluster: str | None = option(
        "--cluster", "NAME", "The EKS cluster, for the role and the tags of the EC2NodeClass."
    ),
    ami: str | None = option("--ami", "ALIAS", "The AMI of the EC2NodeClass: al2023@VERSION. [default: al2023@latest]"),
    role: str | None = option("--role", "NAME", "The role of its nodes. [default: KarpenterNodeRole-CLUSTER]"),
    tag: list[str] | None = option(
        "--tag", "KEY=VALUE", "The tag of its subnets and security groups. [default: karpenter.sh/discovery=CLUSTER]"
    ),
    instance_type: str | None = option("--instance-type", "TYPE", "One instance type. [default: by model and number]"),
    max_nodes: int | None = option("--max-nodes", "N", "Start no more nodes than this. [default: no limit]"),
    to: str | None = TO,
) -> Any:
    """Write an EC2NodeClass, a NodePool with a taint, and a NodeOverlay with the number of shares that a node offers.

    Karpenter does not know about time-slicing: without the overlay it starts a node for each pod.
    """
    export = node_pool_export(
        describe(gpu, file=file, replicas=replicas, mig_replicas=mig_replicas),
        name=name,
        node_class=node_class,
        ami=ami,
        cluster=cluster,
        role=role,
        tags=tag or (),
        instance_type=instance_type,
        max_nodes=max_nodes,
    )
    return export_result("karpenter", export, to)


def slurm(
    gpu: str | None = WHOLE_GPU_OPTION,
    file: str | None = FILE_OPTION,
    replicas: int | None = REPLICAS,
    autodetect: str | None = option("--autodetect", "HOW", "nvml or off. [default: nvml where there is MIG, else off]"),
    node: str | None = NODE,
    to: str | None = TO,
) -> Any:
    """Write gres.conf and the lines of slurm.conf; for MPS also a prolog, an epilog and a task prolog.

    Time-slicing becomes shards, MPS becomes gres/mps, MIG devices become typed GPUs. Slurm's sample prolog sets the
    compute mode by the number of the GPU and fails with more than ten GPUs; the scripts written here do not.
    """
    export = slurm_export(
        describe(gpu, file=file, node=node_name(node, short=True), replicas=replicas), autodetect=autodetect
    )
    return export_result("slurm", export, to)


def mig_parted(
    gpu: str | None = WHOLE_GPU_OPTION,
    file: str | None = FILE_OPTION,
    name: str = option("--name", "CONFIG", "The name of the config.", default="current"),
    placement: bool = flag("--placement", "Add exact placements, in a second document that mig-parted skips."),
    to: str | None = TO,
) -> Any:
    """Write the MIG layout as a mig-parted v1 file, for mig-parted and `gpushare mig apply -f`.

    GPUs with the same layout share an entry. mig-parted cannot express placements: --placement writes them to a
    second YAML document, which apply and check follow.
    """
    return export_result("mig-parted", mig_parted_export(describe(gpu, file=file), name=name, placement=placement), to)


def _container_device(gpu: str | None, file: str | None) -> ExportedDevice:
    """Return the device that a container gets: as it is, or as a gpushare.yaml (``file``) wants it."""
    state = HostState(settings.connect())
    device = select_one(gpu, state.gpus)
    host = describe_host(state, [device.gpu])
    if file is not None:
        host = _wanted_on_live_devices(state, file, load(file)[0], host)
    return container_device(host, device.uuid)


def cdi(gpu: str | None = ONE_GPU_OPTION, file: str | None = FILE_OPTION, to: str | None = TO) -> Any:
    """Write the flags that give a container one GPU, MIG device or MPS share by CDI; for MPS also the CDI file.

    nvidia-ctk writes the file of the GPU itself; its command is printed on stderr.
    """
    return export_result("cdi", cdi_export(_container_device(gpu, file)), to)


def docker(gpu: str | None = ONE_GPU_OPTION, file: str | None = FILE_OPTION, to: str | None = TO) -> Any:
    """Write the flags that give a container one GPU, MIG device or MPS share.

    To use them: docker run $(gpushare export docker) IMAGE
    """
    return export_result("docker", docker_export(_container_device(gpu, file)), to)


def compose(
    gpu: str | None = ONE_GPU_OPTION,
    file: str | None = FILE_OPTION,
    image: str | None = option("--image", "IMAGE", "The image of the service."),
    to: str | None = TO,
) -> Any:
    """Write a compose file with one service on one GPU, MIG device or MPS share."""
    return export_result("compose", compose_export(_container_device(gpu, file), image=image), to)


def ecs(
    gpu: str | None = ONE_GPU_OPTION,
    file: str | None = FILE_OPTION,
    image: str | None = option("--image", "IMAGE", "The image of the container."),
    name: str = option("--name", "NAME", "The family of the task definition.", default="gpu-shared"),
    to: str | None = TO,
) -> Any:
    """Write an ECS task definition with one container on an MPS share like that of this host, or on a whole GPU.

    ECS starts the MPS daemon itself, and places containers by GPU memory: the share needs a memory limit.
    """
    return export_result("ecs", ecs_export(_container_device(gpu, file), family=name, image=image), to)


def systemd(
    gpu: str | None = WHOLE_GPU_OPTION,
    file: str | None = FILE_OPTION,
    program: str | None = option(
        "--program", "PATH", f"Where gpushare is. [default: this one; of a simulated host {_USUAL_PROGRAM}]"
    ),
    at_boot: str | None = option("--at-boot", "FILE", "The file to apply at boot. [default: the last applied file]"),
    to: str | None = TO,
) -> Any:
    """Write a unit that applies gpushare.yaml at boot, and one for each MPS daemon that runs now or is in the file.

    If the file has rules for time-slices (slices:), another unit follows them: gpushare timeslice keep.

    Each MPS daemon runs in the foreground of its unit, so systemd notices its end. Stopping or restarting the unit waits
    up to 60 s for the clients; those that are left then lose the GPU and fail. The last applied file (gpushare apply
    keeps it) is used at boot, even if the units were made from another one.
    """
    host = describe(gpu, file=file, for_daemons=True)
    rules = _boot_file_has_rules(at_boot) if file is None else "slices" in host.sections
    export = units_export(host, program=program or _own_program(), file=at_boot or FILE, rules=rules)
    return export_result("systemd", export, to)


def _own_program() -> str:
    """Return the path of gpushare for a unit: of this program, or for a simulated host the usual one."""
    if settings.spec != "local":
        return _USUAL_PROGRAM
    # Not first by PATH: that of sudo may lack this gpushare, or have another one.
    this_program = os.path.abspath(sys.argv[0])
    if os.path.basename(this_program) == "gpushare":
        return this_program
    return shutil.which("gpushare") or _USUAL_PROGRAM


def _boot_file_has_rules(at_boot: str | None) -> bool:
    """Return whether the file of --at-boot has rules for time-slices; without one on this host, whether root's last has."""
    if at_boot is not None and os.path.exists(at_boot):
        return bool(load(at_boot)[0].rules)
    kept = file_applied_by_root(settings.connect())
    return kept is not None and bool(kept.rules)


app = typer.Typer(
    **GROUP,
    help="Write the sharing of this host for another engine. What the engine cannot express is refused or reported as lost.",
)


def node_name(given: str | None, *, short: bool = False) -> str | None:
    """Return the given node name, else this machine's (``short``: up to the dot); None for a simulated host."""
    if given is None:
        if settings.spec != "local":
            return None
        host_name = socket.gethostname().lower()
        if short:
            host_name = host_name.partition(".")[0]
        # A host name that no node could have is not the user's mistake.
        return host_name if re.fullmatch(_NODE, host_name) else None
    check_word(given, _NODE, "the name of a node in a cluster", "--node gpu01", code="bad_node")
    return given


# Engines whose commands can be run one after the other.
_WITH_SCRIPT: Final = frozenset({"k8s", "dra", "karpenter", "systemd"})


@dataclass(frozen=True, kw_only=True)
class ExportAnswer(Export):
    """The answer of `export ENGINE`."""

    engine: str
    # The files that were written.
    written: tuple[str, ...]


def export_result(engine: str, export: Export, to: str | None) -> Result:
    """Return an export as a result; if a directory ``to`` is given, write the files, and a script that applies them, there."""
    written: Sequence[str] = ()
    notes = [f"apply: {command}" for command in export.commands]
    if to is None or engine not in _WITH_SCRIPT:
        notes += [f"needs: {text}" for text in export.needs]
    if to is not None:
        documents = list(export.documents)
        if engine in _WITH_SCRIPT:
            script = apply_script(engine, export)
            documents.append(script)
            # Its first argument is the node.
            takes_node = "${1:" in script.text
            path = shlex.quote(os.path.join(to, script.name))
            notes = [f"to apply them: sh {path}{' NODE' if takes_node else ''} (its first lines say what it needs)"]
        elif export.commands:
            notes[0] = f"apply: cd {shlex.quote(to)}; {export.commands[0]}"
        written = write_documents(documents, Path(to))
    notes += [f"lost: {text}" for text in export.lost]
    if settings.spec != "local":
        # No --host in the files: a unit or a prolog is of the machine on which it is installed.
        notes.append(f"{settings.spec} is simulated: the files are an example; for a real host, export there")
    if to is None and any(document.name in command for document in export.documents for command in export.commands):
        notes.insert(0, f"to write files: gpushare export {engine} --to DIR, with the same options")
    data = ExportAnswer(**vars(export), engine=engine, written=tuple(written))
    text = "\n".join(written) if written else joined_text(export.documents)
    return Result(data=data, text=text, notes=tuple(notes))


def describe(
    gpu: str | None,
    *,
    file: str | None = None,
    node: str | None = None,
    replicas: int | None = None,
    mig_replicas: int | None = None,
    for_daemons: bool = False,
) -> HostDescription:
    """Return the host as it is, or as a gpushare.yaml wants it, with the replicas from the options.

    ``for_daemons``: the engine starts daemons by the UUID of their device, so the devices of the file must exist.
    """
    state = HostState(settings.connect())
    devices = select(gpu, state.gpus)
    if any(device.mig is not None for device in devices):
        raise BadUsage("this engine needs whole GPUs, not a MIG instance", "name the GPU: -g 0", code="whole_gpu")
    host = describe_host(state, [device.gpu for device in devices], node=node)
    if file is None:
        wanted = file_applied_by_root(state.host)
    else:
        # Once: stdin cannot be read again.
        wanted, _ = load(file)
        if for_daemons:
            host = _wanted_on_live_devices(state, file, wanted, host, daemons_only=True)
        else:
            host = _describe_wanted(state, wanted, host)
    if wanted is not None:
        host = replace(host, sections=frozenset(document_of(wanted)) - {"version", "gpus"})
    return replace(host, gpus=tuple(_with_replicas(gpu, replicas, mig_replicas) for gpu in host.gpus))


def _with_replicas(gpu: GpuDescription, replicas: int | None, mig_replicas: int | None) -> GpuDescription:
    """Return a GPU with the numbers of programs that --replicas and --mig-replicas let share it, or each MIG device."""
    if replicas == 1 and gpu.sharing is Way.TIMESLICE:
        return replace(gpu, sharing=Way.EXCLUSIVE, time_slice=None, replicas=None)
    instances = gpu.mig
    if mig_replicas is not None:
        # None: a device that is not shared.
        of_instance = None if mig_replicas == 1 else mig_replicas
        instances = tuple(replace(mig, replicas=of_instance) for mig in gpu.mig)
    return replace(gpu, replicas=replicas if gpu.sharing in {Way.TIMESLICE, Way.MPS} else None, mig=instances)


def _wanted_on_live_devices(
    state: HostState, path: str, file: HostFile, live: HostDescription, *, daemons_only: bool = False
) -> HostDescription:
    """Return the host as a file wants it, with the UUIDs and pipe directories of the devices that exist."""
    apply = f"{'' if state.host.root else 'sudo '}gpushare apply -f {shlex.quote(path)}"
    return description.with_live_devices(
        _describe_wanted(state, file, live),
        live,
        lambda uuid: str(own_home(state.host, uuid).pipe),
        apply=apply,
        daemons_only=daemons_only,
    )


def _describe_wanted(state: HostState, file: HostFile, host: HostDescription) -> HostDescription:
    """Return the host as it will be once a gpushare.yaml is applied; what is applied already stays as it is."""
    matched = entries_of(file, state.gpus)
    if matched.missing:
        raise matched.missing[0]
    for text in matched.notes:
        note(text)
    # The MIG profiles of the exported GPUs that have an entry; none of a GPU that the entry does not partition.
    profiles = {}
    reader = MigReader(state.host.nvml)
    exported = {gpu.index for gpu in host.gpus}
    for gpu in state.gpus:
        entry = matched.entries.get(gpu.index)
        if entry is None or gpu.index not in exported:
            continue
        profiles[gpu.index] = reader.profiles(gpu.index) if entry.sharing is Way.MIG and gpu.mig_capable else ()
        try:
            check_fits(gpu, entry, profiles[gpu.index])
        except GpushareError as error:
            raise with_place_in_file(error, file, gpu.index, entry) from None
    # Where the MIG devices of the file exist, the host itself is described: they have UUIDs and capability nodes.
    with_mig = [gpu for gpu in state.gpus if profiles.get(gpu.index)]
    applied = {
        live.gpu.index for live in live_gpus(state, with_mig) if not diff_points(live, matched.entries[live.gpu.index])
    }
    return as_wished(host, {index: entry for index, entry in matched.entries.items() if index not in applied}, profiles)


def k8s(
    gpu: str | None = _EVERY_GPU,
    file: str | None = FILE_OPTION,
    replicas: int | None = REPLICAS,
    mig_replicas: int | None = MIG_REPLICAS,
    namespace: str = option("--namespace", "NAME", "Where the GPU operator runs.", default="gpu-operator"),
    node: str | None = NODE,
    to: str | None = TO,
) -> Any:
    """Write the device-plugin ConfigMap, the patch of the ClusterPolicy, and a Deployment that verifies both.

    On stderr: the commands that apply them, with the label and the taint of the node. The plugin shares all GPUs of a
    node alike and cannot set a time-slice level. A host that needs more is refused: use `gpushare export dra`.
    """
    host = describe(gpu, file=file, node=node_name(node), replicas=replicas, mig_replicas=mig_replicas)
    return export_result("k8s", operator_export(host, namespace=namespace), to)


app.command(cls=Command, short_help="ResourceClaims for NVIDIA's DRA driver.")(dra)
app.command(cls=Command, short_help="NodePool and NodeOverlay for Karpenter.")(karpenter)
app.command(cls=Command, short_help="gres.conf, slurm.conf lines, prolog and epilog.")(slurm)
app.command(cls=Command, short_help="The MIG layout as a mig-parted file.")(mig_parted)
app.command(cls=Command, short_help="One device as CDI flags and file.")(cdi)
app.command(cls=Command, short_help="One device as flags of docker run.")(docker)
app.command(cls=Command, short_help="One device as a compose file.")(compose)
app.command(cls=Command, short_help="A task definition for Amazon ECS.")(ecs)
app.command(cls=Command, short_help="Units that restore the sharing at boot.")(systemd)
app.command(cls=Command, short_help="Device-plugin config for the GPU operator.")(k8s)
app.command("prometheus", cls=Command, short_help="Metrics as text, alert rules, a dashboard.")(metrics.prometheus)
