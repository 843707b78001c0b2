"""The engines of ``gpushare export`` besides the device plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpushare.cli.common import GPU_HELP, Command, gpus_of, settings
from gpushare.cli.exported import exported, node_name

if TYPE_CHECKING:
    from gpushare.layout.containers import Share

GpuOption = Annotated[str | None, typer.Option("-g", "--gpu", metavar="GPU", help=GPU_HELP)]
OneDevice = Annotated[
    str | None, typer.Option("-g", "--gpu", metavar="GPU", help="One GPU or MIG device: index, UUID or PCI bus id.")
]
FileOption = Annotated[
    str | None,
    typer.Option("-f", "--file", metavar="FILE", help="Take the sharing from this gpushare.yaml. [default: as it is]"),
]
To = Annotated[str | None, typer.Option("--to", metavar="DIR", help="Write the files there instead of printing them.")]
Node = Annotated[str | None, typer.Option("--node", metavar="NAME", help="The node's name in the cluster.")]
Replicas = Annotated[
    int | None, typer.Option("--replicas", metavar="N", help="How many programs share a GPU. [default: 4]")
]
MigReplicas = Annotated[
    int | None, typer.Option("--mig-replicas", metavar="N", help="How many programs share a MIG device. [default: 1]")
]
MigStrategy = Annotated[
    str, typer.Option("--mig-strategy", metavar="NAME", help="How MIG devices are named: mixed or single.")
]


def add(group: typer.Typer) -> None:
    """Add the commands."""
    group.command("dra", cls=Command, short_help="ResourceClaims for NVIDIA's DRA driver.")(dra)
    group.command("karpenter", cls=Command, short_help="NodePool and NodeOverlay for Karpenter.")(karpenter)
    group.command("slurm", cls=Command, short_help="gres.conf, slurm.conf lines, prolog and epilog.")(slurm)
    group.command("mig-parted", cls=Command, short_help="The MIG layout as a mig-parted file.")(mig_parted)
    group.command("cdi", cls=Command, short_help="One device as CDI flags and file.")(cdi)
    group.command("docker", cls=Command, short_help="One device as flags of docker run.")(docker)
    group.command("compose", cls=Command, short_help="One device as a compose file.")(compose)
    group.command("systemd", cls=Command, short_help="Units that bring it back after a reboot.")(systemd)


def dra(
    gpu: GpuOption = None,
    file: FileOption = None,
    mig_replicas: MigReplicas = None,
    kubernetes: Annotated[
        str, typer.Option("--kubernetes", metavar="VERSION", help="The version of the cluster, from 1.32 on.")
    ] = "1.34",
    any_gpu: Annotated[
        bool, typer.Option("--any-gpu", help="Claim any GPU of the same model, not exactly these.")
    ] = False,
    to: To = None,
) -> Any:
    """Write a ResourceClaim for each shared GPU or MIG device, and a template for each that is not shared.

    It says sharing per GPU, with slice length and MPS limits, which the device plugin cannot. Pods share a GPU when
    they name the same claim; a template makes a claim, and takes a GPU, for each pod.
    """
    from gpushare.cli.export import described
    from gpushare.layout.dra import export

    found = export(described(gpu, file=file, mig_replicas=mig_replicas), kubernetes=kubernetes, any_gpu=any_gpu)
    return exported("dra", found, to)


def karpenter(
    gpu: GpuOption = None,
    file: FileOption = None,
    replicas: Replicas = None,
    mig_replicas: MigReplicas = None,
    mig_strategy: MigStrategy = "mixed",
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="The name of the NodePool.")] = "gpu-shared",
    node_class: Annotated[
        str, typer.Option("--node-class", metavar="NAME", help="The EC2NodeClass of its nodes.")
    ] = "gpu-shared",
    instance_type: Annotated[
        str | None,
        typer.Option("--instance-type", metavar="TYPE", help="One instance type. [default: by model and number]"),
    ] = None,
    max_nodes: Annotated[
        int | None, typer.Option("--max-nodes", metavar="N", help="Start no more nodes than this. [default: no limit]")
    ] = None,
    to: To = None,
) -> Any:
    """Write a NodePool with the taint, and the NodeOverlay that tells Karpenter how many shares a node offers.

    Karpenter does not know of time-slicing: without the overlay it starts a node for each pod.
    """
    from gpushare.cli.export import described
    from gpushare.layout.karpenter import export

    found = export(
        described(gpu, file=file, replicas=replicas, mig_replicas=mig_replicas),
        name=name,
        node_class=node_class,
        instance_type=instance_type,
        max_nodes=max_nodes,
        mig_strategy=mig_strategy,
    )
    return exported("karpenter", found, to)


def slurm(
    gpu: GpuOption = None,
    file: FileOption = None,
    replicas: Replicas = None,
    autodetect: Annotated[
        str | None,
        typer.Option("--autodetect", metavar="HOW", help="nvml or off. [default: nvml where there is MIG, else off]"),
    ] = None,
    node: Node = None,
    to: To = None,
) -> Any:
    """Write gres.conf and the lines of slurm.conf; for MPS also a prolog, an epilog and a task prolog.

    Time-slicing becomes shards, MPS becomes gres/mps, MIG devices become typed GPUs. Slurm's sample prolog sets the
    compute mode by the GPU's number, and loses track from ten GPUs on; these do not.
    """
    from gpushare.cli.export import described
    from gpushare.layout.slurm import export

    found = export(
        described(gpu, file=file, node=node_name(node, short=True), replicas=replicas), autodetect=autodetect
    )
    return exported("slurm", found, to)


def mig_parted(
    gpu: GpuOption = None,
    file: FileOption = None,
    name: Annotated[str, typer.Option("--name", metavar="CONFIG", help="The name of the config.")] = "current",
    to: To = None,
) -> Any:
    """Write the MIG layout as a mig-parted v1 file, as `gpushare mig export` does, with what it needs and loses."""
    from gpushare.cli.export import described
    from gpushare.layout.mig_parted import export
    from gpushare.mig.parted_export import check_config_name

    return exported("mig-parted", export(described(gpu, file=file), name=check_config_name(name)), to)


def _share(gpu: str | None, file: str | None) -> Share:
    """Return the one device that a container gets."""
    from gpushare.actions.describe_host import describe_host
    from gpushare.cli.export import in_place
    from gpushare.layout.containers import share_of
    from gpushare.selection import select_one

    host = settings.connect()
    device = select_one(gpu, gpus_of(host))
    found = describe_host(host, [device.gpu])
    return share_of(found if file is None else in_place(host, file, found), device.uuid)


def cdi(gpu: OneDevice = None, file: FileOption = None, to: To = None) -> Any:
    """Write the flags that give a container one GPU, MIG device or MPS share by CDI; for MPS also the CDI file.

    The file of the GPU itself is written by nvidia-ctk, whose command stands on stderr.
    """
    from gpushare.layout.containers import cdi as export

    return exported("cdi", export(_share(gpu, file)), to)


def docker(gpu: OneDevice = None, file: FileOption = None, to: To = None) -> Any:
    """Write the flags that give a container one GPU, MIG device or MPS share: docker run $(gpushare export docker)."""
    from gpushare.layout.containers import docker as export

    return exported("docker", export(_share(gpu, file)), to)


def compose(
    gpu: OneDevice = None,
    file: FileOption = None,
    image: Annotated[str | None, typer.Option("--image", metavar="IMAGE", help="The image of the service.")] = None,
    service: Annotated[str, typer.Option("--service", metavar="NAME", help="The name of the service.")] = "gpu",
    by_cdi: Annotated[bool, typer.Option("--cdi", help="Name the device as CDI does.")] = False,
    to: To = None,
) -> Any:
    """Write a compose file with one service on one GPU, MIG device or MPS share."""
    from gpushare.layout.containers import compose as export

    found = export(_share(gpu, file), image=image, service=service, by_cdi=by_cdi)
    return exported("compose", found, to)


def systemd(
    gpu: GpuOption = None,
    file: FileOption = None,
    program: Annotated[
        str | None, typer.Option("--program", metavar="PATH", help="Where gpushare is. [default: this one]")
    ] = None,
    at_boot: Annotated[
        str | None,
        typer.Option("--at-boot", metavar="FILE", help="What is applied at boot. [default: the last file that held]"),
    ] = None,
    to: To = None,
) -> Any:
    """Write a unit that applies gpushare.yaml at boot, and one for each MPS daemon of now, or of the file.

    A daemon of a unit runs in the foreground, so systemd sees it die; stopping the unit waits for its clients.
    At boot the last file is applied that held (gpushare apply keeps it), also when the units are made from another.
    """
    import shutil

    from gpushare.cli.export import described
    from gpushare.layout.systemd import FILE, export

    where = program or (None if settings.spec != "local" else shutil.which("gpushare")) or "/usr/bin/gpushare"
    found = described(gpu, file=file, for_daemons=True)
    return exported("systemd", export(found, program=where, file=at_boot or FILE), to)
