"""``gpushare export``: this host as other engines write it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpushare.cli import metrics
from gpushare.cli.common import Command, Group, gpus_of, note, settings
from gpushare.cli.export_engines import FileOption, GpuOption, MigReplicas, MigStrategy, Node, Replicas, To, add
from gpushare.errors import BadUsage, GpushareError

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.layout.description import GpuDescription, HostDescription

group = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Write the sharing of this host for another engine. What it cannot say is refused, or said to be lost.",
)
Rename = Annotated[
    bool, typer.Option("--rename", help="Offer shared GPUs as nvidia.com/gpu.shared, not as nvidia.com/gpu.")
]


def register(app: typer.Typer) -> None:
    """Add the group."""
    app.add_typer(group, name="export", cls=Group, short_help="Write this host for Kubernetes, Slurm, Docker, systemd.")
    group.command("k8s", cls=Command, short_help="Device-plugin config for the GPU operator.")(k8s)
    add(group)
    group.command("prometheus", cls=Command, short_help="Metrics as text, alert rules, a dashboard.")(
        metrics.prometheus
    )


def described(
    gpu: str | None,
    *,
    file: str | None = None,
    node: str | None = None,
    replicas: int | None = None,
    mig_replicas: int | None = None,
    for_daemons: bool = False,
) -> HostDescription:
    """Return the host as it is, or as a gpushare.yaml wants it, with what it cannot say itself.

    ``for_daemons``: the engine starts daemons, by the UUIDs of their devices; those of the file have to be there then.

    Raises:
        BadUsage: -g names a MIG instance, a number is too small, or the file is none.
        NotFound: the file names a GPU that is not there.
    """
    from gpushare.actions.describe_host import describe_host
    from gpushare.layout.description import Sharing
    from gpushare.selection import select

    for name, number in (("--replicas", replicas), ("--mig-replicas", mig_replicas)):
        if number is not None and number < 2:
            raise BadUsage(
                f"{name} {number}: number of replicas must be >= 2", f"for one leave {name} out", code="bad_replicas"
            )
    host = settings.connect()
    devices = select(gpu, gpus_of(host))
    if any(device.mig is not None for device in devices):
        raise BadUsage("this engine takes whole GPUs, not a MIG instance", "name the GPU: -g 0", code="whole_gpu")
    found = describe_host(host, [device.gpu for device in devices], node=node)
    if file is not None:
        found = in_place(host, file, found, daemons_only=True) if for_daemons else _as_in(host, file, found)

    def filled(one: GpuDescription) -> GpuDescription:
        shared = one.sharing in {Sharing.TIMESLICE, Sharing.MPS}
        inside = tuple(replace(mig, replicas=mig_replicas or mig.replicas) for mig in one.mig)
        return replace(one, replicas=(replicas or one.replicas) if shared else None, mig=inside)

    return replace(found, gpus=tuple(filled(one) for one in found.gpus))


def in_place(host: Host, path: str, live: HostDescription, *, daemons_only: bool = False) -> HostDescription:
    """Return the host as a file wants it, with the UUIDs and pipes of what is there; see `wished.in_place`.

    Raises:
        NotFound: a MIG device of the file is not there yet; or as `described`.
    """
    import shlex

    from gpushare.host.mps_home import home_of
    from gpushare.layout import wished

    apply = f"{'sudo ' if host.uid else ''}gpushare apply -f {shlex.quote(path)}"
    wanted = _as_in(host, path, live)
    return wished.in_place(
        wanted,
        live,
        lambda uuid: str(home_of(host.run_directory, uuid).pipe),
        apply=apply,
        daemons_only=daemons_only,
    )


def _as_in(host: Host, path: str, found: HostDescription) -> HostDescription:
    """Return the host as a file wants it."""
    from gpushare.actions.host_fit import check_fits
    from gpushare.cli.host_file import entries_of, host_file, placed
    from gpushare.host.mig import MigReader
    from gpushare.layout.description import Sharing
    from gpushare.layout.wished import wished

    wanted, _ = host_file(path)
    gpus = gpus_of(host)
    matched = entries_of(wanted, gpus)
    if matched.missing:
        raise matched.missing[0]
    for one in matched.notes:
        note(one)
    reader, profiles = MigReader(host.nvml), {}
    exported = {one.index for one in found.gpus}
    for gpu in gpus:
        entry = matched.entries.get(gpu.index)
        if entry is None or gpu.index not in exported:
            continue
        profiles[gpu.index] = reader.profiles(gpu.index) if entry.sharing is Sharing.MIG and gpu.mig_capable else ()
        try:
            check_fits(gpu, entry, profiles[gpu.index])
        except GpushareError as error:
            raise placed(error, wanted, gpu.index, entry) from None
    return wished(found, matched.entries, profiles)


def k8s(
    gpu: GpuOption = None,
    file: FileOption = None,
    replicas: Replicas = None,
    mig_replicas: MigReplicas = None,
    rename: Rename = False,
    mig_strategy: MigStrategy = "mixed",
    namespace: Annotated[
        str, typer.Option("--namespace", metavar="NAME", help="Where the GPU operator runs.")
    ] = "gpu-operator",
    every_node: Annotated[
        bool, typer.Option("--every-node", help="Make it the default of all nodes, not of the labelled one.")
    ] = False,
    helm: Annotated[
        bool, typer.Option("--helm", help="Write values for the device plugin's own chart: no GPU operator.")
    ] = False,
    node: Node = None,
    to: To = None,
) -> Any:
    """Write the device-plugin ConfigMap, the patch of the ClusterPolicy, and a Deployment that proves it.

    On stderr: the commands that apply them, with the label and the taint of the node. The plugin shares per node,
    not per GPU, and has no slice length: a host that needs one is refused, and `gpushare export dra` can say it.
    """
    from gpushare.cli.exported import exported, node_name
    from gpushare.layout.k8s import export, standalone

    if helm and (every_node or namespace != "gpu-operator"):
        raise BadUsage(
            "--helm goes without --every-node and --namespace",
            "they are options of the GPU operator's way",
            code="two_ways",
        )

    host = described(gpu, file=file, node=node_name(node), replicas=replicas, mig_replicas=mig_replicas)
    if helm:
        return exported("k8s", standalone(host, rename=rename, mig_strategy=mig_strategy), to)
    found = export(host, namespace=namespace, rename=rename, mig_strategy=mig_strategy, every_node=every_node)
    return exported("k8s", found, to)
