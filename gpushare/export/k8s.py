"""NVIDIA's device plugin under the GPU operator: ConfigMap, ClusterPolicy patch, labels, taint, verification. Pure.

Facts: NVIDIA/gpu-operator v26.7 (ClusterPolicy nvidia.com/v1; assets/state-device-plugin, where config-manager runs
with FALLBACK_STRATEGIES=empty: without a default or a label no sharing configuration is taken), NVIDIA's "Time-Slicing
GPUs in Kubernetes".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from gpushare.base.errors import BadUsage, NotSupported
from gpushare.base.model import Priority, TimeSlice, Way
from gpushare.base.units import MIB, format_bytes, format_percent, ranges
from gpushare.export import containers
from gpushare.export.description import GpuDescription, HostDescription
from gpushare.export.document import IMAGE, Document, Export, check_word, cluster_object, notes, yaml_document
from gpushare.hostfile.file import MpsWish
from gpushare.inputs import yaml_text

VERSION: Final = "v1"
PREFIX: Final = "nvidia.com/"
# MPS clients that the plugin allows: from compute capability 7.5 on, and below it (so a V100 gets 16).
MPS_REPLICAS: Final = 48
MPS_REPLICAS_OLD: Final = 16


@dataclass(frozen=True, kw_only=True)
class NodeSharing:
    """How the plugin of one node shares: by ``strategy`` (timeSlicing, mps or None), with ``replicas`` of each resource."""

    strategy: str | None = None
    replicas: Mapping[str, int] = field(default_factory=dict)
    # Of the whole node: a GPU has MIG devices, which are named by their profile (MIG strategy mixed).
    mig: bool = False
    # What the host has and the plugin cannot give.
    lost: tuple[str, ...] = field(default=(), compare=False)

    @property
    def key(self) -> str:
        """Return its key in the ConfigMap: ``timeslice-4``, ``mig-mps-8``, ``whole``."""
        words = ["mig"] if self.mig else []
        if self.strategy is not None:
            words += ["mps" if self.strategy == "mps" else "timeslice", *map(str, sorted(set(self.replicas.values())))]
        return "-".join(words) or "whole"

    def capacity(self, host: HostDescription) -> dict[str, int]:
        """Return the number of each resource that the node will offer (``kubectl describe node``, Capacity)."""
        return {name: number * self.replicas.get(name, 1) for name, number in device_counts(host).items()}


def resource_of(profile: str) -> str:
    """Return the resource name of a MIG profile under strategy mixed: the plugin writes + as a dot."""
    return f"{PREFIX}mig-{profile.replace('+', '.')}"


def plugin_config(sharing: NodeSharing) -> dict[str, Any]:
    config: dict[str, Any] = {"version": VERSION}
    if sharing.mig:
        config["flags"] = {"migStrategy": "mixed"}
    if sharing.strategy is not None:
        config["sharing"] = {
            sharing.strategy: {
                "renameByDefault": False,
                "failRequestsGreaterThanOne": True,
                "resources": [{"name": name, "replicas": number} for name, number in sharing.replicas.items()],
            }
        }
    return config


def check_mps(replicas: int, compute_capability: tuple[int, int] | None) -> None:
    """Raise BadUsage if the plugin refuses this number of MPS clients at its start (internal/rm)."""
    # Unknown counts as a current GPU: the plugin asks the GPU itself.
    most = MPS_REPLICAS if compute_capability is None or compute_capability >= (7, 5) else MPS_REPLICAS_OLD
    if replicas > most:
        raise BadUsage(
            f"device-plugin config: a GPU takes {most} MPS clients at most: {replicas} > {most}",
            "see: https://github.com/NVIDIA/k8s-device-plugin#configuration-option-details",
            code="bad_plugin_config",
        )


# A host does not know how many programs share its GPUs: --replicas says so.
DEFAULT_REPLICAS: Final = 4
_GPU: Final = f"{PREFIX}gpu"
_DRA: Final = "from Kubernetes 1.32 on, gpushare export dra sets it per GPU"
_ASSUMED: Final = (
    f"the host does not know how many programs share a GPU: {DEFAULT_REPLICAS} assumed; choose with --replicas N"
)


def device_counts(host: HostDescription) -> dict[str, int]:
    """Return the number of GPUs and MIG devices of a node by resource name."""
    names = [_GPU for gpu in host.gpus if gpu.sharing is not Way.MIG]
    names += [resource_of(mig.profile) for _, mig in host.instances()]
    return dict(Counter(names))


def sharing_of_node(host: HostDescription) -> NodeSharing:
    """Return how the plugin shares the GPUs of a host."""
    if not host.whole:
        raise NotSupported(
            "the device plugin offers every GPU of a node, not some of them",
            "drop -g; or: gpushare export dra -g ..., which sets it per GPU",
            code="per_node",
        )
    _check_default_slices(host)
    plain = [gpu for gpu in host.gpus if gpu.sharing is not Way.MIG]
    _check_alike(plain)
    has_mig = len(plain) < len(host.gpus)
    if has_mig:
        _check_mig(host, plain)
    shared = _share_plain_gpus(plain)
    mig_replicas = _replicas_by_resource(host)
    return replace(
        shared,
        # Inside MIG devices there is only time-slicing; beside MPS `_check_mig` refuses it.
        strategy=shared.strategy or ("timeSlicing" if mig_replicas else None),
        replicas={**shared.replicas, **mig_replicas},
        mig=has_mig,
    )


def _check_default_slices(host: HostDescription) -> None:
    """Refuse a time-slice level other than the default: the plugin has no setting for it."""
    for gpu in host.gpus:
        level = gpu.time_slice or TimeSlice.DEFAULT
        if gpu.sharing is Way.TIMESLICE and level is not TimeSlice.DEFAULT:
            raise NotSupported(
                f"the device plugin cannot set a slice length; GPU {gpu.index} has time-slice {level.title}",
                f"{_DRA} (TimeSlicingSettings); or: gpushare timeslice reset -g {gpu.index}",
                code="no_slice_length",
            )


def _check_alike(gpus: Sequence[GpuDescription]) -> None:
    """Refuse GPUs that are shared differently: the plugin's timeSlicing and mps settings hold for all GPUs of a node."""
    ways: dict[str, list[int]] = {}
    for gpu in gpus:
        ways.setdefault(_sharing_text(gpu), []).append(gpu.index)
    if len(ways) > 1:
        listing = "; ".join(f"GPU {ranges(indexes)}: {way}" for way, indexes in ways.items())
        raise NotSupported(
            f"the device plugin shares all GPUs of a node alike, and these differ: {listing}", _DRA, code="per_gpu"
        )


def _sharing_text(gpu: GpuDescription) -> str:
    """Return how a GPU is shared: ``mps, 4 replicas (25 % of the threads, 10.0 GiB)``."""
    replicas = f", {gpu.replicas} replicas" if gpu.replicas and gpu.sharing is not Way.EXCLUSIVE else ""
    limits = []
    if gpu.mps is not None and gpu.mps.limits.threads_percent:
        limits.append(f"{format_percent(gpu.mps.limits.threads_percent)} of the threads")
    if gpu.mps is not None and gpu.mps.limits.memory_limit_bytes:
        limits.append(format_bytes(gpu.mps.limits.memory_limit_bytes))
    limits_text = f" ({', '.join(limits)})" if limits else ""
    return f"{gpu.sharing.value}{replicas}{limits_text}"


def _share_plain_gpus(gpus: Sequence[GpuDescription]) -> NodeSharing:
    """Return how the plugin shares the GPUs without MIG, which the host shares alike."""
    if not gpus or gpus[0].sharing is Way.EXCLUSIVE:
        return NodeSharing()
    first = gpus[0]
    if first.replicas is not None and first.replicas < 2:
        raise BadUsage(
            f"number of replicas must be >= 2, not {first.replicas}",
            "for one program per GPU: gpushare export k8s on a GPU in compute mode exclusive-process",
            code="bad_replicas",
        )
    if first.sharing is Way.MPS:
        # Each GPU is checked: models differ in their number of clients, and so in what an equal part is.
        shared = [_share_by_mps(gpu, gpu.mps or MpsWish()) for gpu in gpus]
        return shared[0]
    lost = ["isolation of memory and faults: under time-slicing one program can take all the memory of a GPU"]
    if first.replicas is None:
        lost.insert(0, _ASSUMED)
    return NodeSharing(strategy="timeSlicing", replicas={_GPU: first.replicas or DEFAULT_REPLICAS}, lost=tuple(lost))


def _share_by_mps(gpu: GpuDescription, mps: MpsWish) -> NodeSharing:
    """Return how the plugin shares a GPU by MPS: it gives each client an equal part, and can set no other limits.

    Raises:
        NotSupported: the limits of the daemon are not an equal part.
        BadUsage: the GPU cannot have that many clients.
    """
    threads = mps.limits.threads_percent
    clients = gpu.replicas or (max(2, round(100 / threads)) if threads else DEFAULT_REPLICAS)
    check_mps(clients, gpu.compute_capability)
    percent = 100 // clients
    mebibytes = None if gpu.memory_total_bytes is None else gpu.memory_total_bytes // clients // MIB
    limit = None if mps.limits.memory_limit_bytes is None else mps.limits.memory_limit_bytes // MIB
    if threads not in {None, percent} or limit not in {None, mebibytes}:
        memory = "" if mebibytes is None else f" --memory {mebibytes}M"
        raise NotSupported(
            f"the device plugin gives each of {clients} MPS clients {percent} % of the threads and {mebibytes or '?'} MiB; "
            f"GPU {gpu.index} has other limits: {_sharing_text(gpu)}",
            f"{_DRA} (MPSSupport); or: gpushare mps set -g {gpu.index} --threads {percent}{memory}",
            code="uneven_limits",
        )
    lost = [_ASSUMED] if threads is None and gpu.replicas is None else []
    if threads is None or limit is None:
        lost.append(
            "clients without a limit of threads or memory: "
            f"the plugin caps each at {percent} % of the threads and {mebibytes or '?'} MiB"
        )
    if mps.limits.priority is Priority.LOW:
        lost.append("low priority: the plugin sets no priority")
    return NodeSharing(strategy="mps", replicas={_GPU: clients}, lost=tuple(lost))


def _check_mig(host: HostDescription, plain: Sequence[GpuDescription]) -> None:
    """Refuse what the plugin cannot do with MIG: MPS, and parts of GPU instances."""
    if any(gpu.sharing is Way.MPS for gpu in plain):
        raise NotSupported(
            "the device plugin does not support MPS with --mig-strategy=mixed: some GPUs here use MIG and others MPS",
            _DRA,
            code="mps_beside_mig",
        )
    for gpu, mig in host.instances():
        if mig.mps is not None:
            raise NotSupported(
                f"the device plugin does not support MPS on MIG devices; {mig.profile} of GPU {gpu.index} uses it",
                "gpushare export dra can, and gpushare export docker, compose and cdi",
                code="mps_on_mig",
            )
        mig.check_whole("the device plugin", gpu.index)


def _replicas_by_resource(host: HostDescription) -> dict[str, int]:
    """Return the replicas of MIG devices by resource; all devices of a profile have the same."""
    numbers_of: dict[str, set[int]] = {}
    for _, mig in host.instances():
        numbers_of.setdefault(resource_of(mig.profile), set()).add(mig.replicas or 1)
    for name, numbers in numbers_of.items():
        if len(numbers) > 1:
            listing = " and ".join(map(str, sorted(numbers)))
            raise NotSupported(
                f"the device plugin shares all {name} of a node alike, and these differ: {listing}",
                _DRA,
                code="per_gpu",
            )
    return {name: number for name, (number,) in numbers_of.items() if number > 1}


PLUGIN_MAP: Final = "gpushare-device-plugin"
MIG_MAP: Final = "gpushare-mig-parted"
CONFIG_LABEL: Final = "nvidia.com/device-plugin.config"
TAINT: Final = {"key": "nvidia.com/gpu", "value": "true", "effect": "NoSchedule"}
TOLERATION: Final = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
LOOP: Final = "while /cuda-samples/vectorAdd; do sleep 1; done; exit 1"
_NAMESPACE: Final = re.compile(r"(?!default$)[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)


def operator_export(host: HostDescription, *, namespace: str = "gpu-operator") -> Export:
    """Return the documents that make a cluster share the GPUs of this node as the host does now."""
    what, example = "a namespace for the device plugin", "--namespace gpu-operator (never default)"
    check_word(namespace, _NAMESPACE, what, example, code="bad_namespace")
    sharing = sharing_of_node(host)
    traits = host.traits | ({"plugin-mps"} if sharing.strategy == "mps" else set())
    # For nodes without a label, and for this node.
    unshared = NodeSharing(mig=sharing.mig)
    data = {"none": yaml_text(plugin_config(unshared)), sharing.key: yaml_text(plugin_config(sharing))}
    documents = [
        _config_map_document("device-plugin-config.yaml", PLUGIN_MAP, namespace, data),
        *([_mig_map(host, namespace)] if sharing.mig else []),
        _policy_patch(has_mig=sharing.mig),
        *verification(host, sharing),
    ]
    return Export(
        documents=tuple(documents),
        commands=tuple(_commands(host, sharing, documents, namespace)),
        needs=notes("k8s", "needs", traits, mig_map=MIG_MAP),
        lost=(*sharing.lost, *notes("k8s", "lost", host.traits)),
    )


def _mig_map(host: HostDescription, namespace: str) -> Document:
    """Return the ConfigMap with the MIG layout of this node for the operator's mig-manager."""
    # Nodes with another layout read the same map, so each layout needs a name of its own.
    config = containers.mig_config(host, containers.layout_name(host))
    # The mig-manager falls back to all-disabled, and takes a node out of MIG with it.
    config["mig-configs"] = {"all-disabled": [{"devices": "all", "mig-enabled": False}], **config["mig-configs"]}
    return _config_map_document("mig-parted-config.yaml", MIG_MAP, namespace, {"config.yaml": yaml_text(config)})


def _config_map_document(file: str, name: str, namespace: str, data: dict[str, str]) -> Document:
    metadata = {"name": name, "namespace": namespace}
    return yaml_document(file, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})


def _policy_patch(*, has_mig: bool) -> Document:
    """Return a merge patch: a whole ClusterPolicy has nine required members that are not ours to set."""
    spec: dict[str, Any] = {}
    if has_mig:
        spec["mig"] = {"strategy": "mixed"}
    spec["devicePlugin"] = {"config": {"name": PLUGIN_MAP, "default": "none"}}
    if has_mig:
        spec["migManager"] = {"config": {"name": MIG_MAP}}
    patch = cluster_object("nvidia.com/v1", "ClusterPolicy", "cluster-policy", spec)
    return yaml_document("cluster-policy-patch.yaml", patch)


def verification(host: HostDescription, sharing: NodeSharing) -> list[Document]:
    """Return one Deployment per resource. Of shared devices it has a pod more than there are devices: all run only if shared."""
    checks = []
    for name, devices in device_counts(host).items():
        pods = devices + (1 if name in sharing.replicas else 0)
        checks.append(verifying_deployment(name, pods, {CONFIG_LABEL: sharing.key}))
    return checks


def verifying_deployment(resource: str, pods: int, labels: dict[str, str]) -> Document:
    """Return a Deployment of pods that each want one of a resource, on nodes with these labels."""
    title = f"verify-{slug(resource.partition('/')[2])}"
    body = deployment(f"gpushare-{title}", pods, {"limits": {resource: 1}}, nodeSelector=labels)
    return yaml_document(f"{title}.yaml", body)


def slug(text: str) -> str:
    """Return a text as a name in a cluster may have it, with - for other characters: ``mig-1g-10gb``."""
    return re.sub(r"[^a-z0-9]+", "-", text)


def deployment(name: str, pods: int, resources: dict[str, Any], **pod: Any) -> dict[str, Any]:
    """Return a Deployment that runs only if all its pods get their GPU; ``pod`` are further members of its template."""
    labels = {"app.kubernetes.io/name": name}
    container = {"name": "vectoradd", "image": IMAGE, "command": ["/bin/sh", "-c", LOOP], "resources": resources}
    template = {**pod, "tolerations": [dict(TOLERATION)], "containers": [container]}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "replicas": pods,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": template},
        },
    }


def _commands(host: HostDescription, sharing: NodeSharing, documents: list[Document], namespace: str) -> list[str]:
    """Return the commands that apply the documents to a cluster and verify that the node offers its shares."""
    node = host.node or "NODE"
    # Server-side, with a manager of its own: the keys of other nodes stay.
    kept = f"--server-side --force-conflicts --field-manager=gpushare-{sharing.key}"
    lines = [f"kubectl apply {kept} -f device-plugin-config.yaml"]
    if sharing.mig:
        lines.append("kubectl apply -f mig-parted-config.yaml")
    lines.append(
        "kubectl patch clusterpolicies.nvidia.com/cluster-policy --type merge --patch-file cluster-policy-patch.yaml"
    )
    lines.append(f"kubectl label node {node} {CONFIG_LABEL}={sharing.key} --overwrite")
    if sharing.mig:
        # The state of an earlier layout would end the wait at once.
        lines.append(f"kubectl label node {node} nvidia.com/mig.config.state-")
        lines.append(f"kubectl label node {node} nvidia.com/mig.config={containers.layout_name(host)} --overwrite")
        lines.append(
            "kubectl wait --for=jsonpath='{.metadata.labels.nvidia\\.com/mig\\.config\\.state}'=success "
            f"node/{node} --timeout=15m"
        )
    sets = ["nvidia-device-plugin-daemonset", "gpu-feature-discovery"]
    if sharing.strategy == "mps":
        # Reads the same configuration (assets/state-mps-control-daemon).
        sets.append("nvidia-device-plugin-mps-control-daemon")
    lines += [
        f"kubectl taint node {node} {TAINT['key']}={TAINT['value']}:{TAINT['effect']} --overwrite",
        # The operator does not watch the ConfigMap's content.
        f"kubectl rollout restart -n {namespace} {' '.join(f'daemonset/{name}' for name in sets)}",
        f"kubectl rollout status -n {namespace} daemonset/nvidia-device-plugin-daemonset --timeout=5m",
        # That the pods of the plugin were started again, or why not.
        f"kubectl get events -n {namespace} --sort-by=.lastTimestamp",
    ]
    checks = (document for document in documents if document.name.startswith("verify-"))
    return lines + [line for check in checks for line in verifying_commands(check)]


def verifying_commands(
    check: Document, *, prefix: str = "gpushare-", minutes: int = 5, most_pods: int | None = None
) -> list[str]:
    """Return the commands that run a verifying Deployment; of more than ``most_pods`` pods one must wait."""
    name = prefix + check.name.removesuffix(".yaml")
    lines = [f"kubectl apply -f {check.name}", f"kubectl rollout status deployment/{name} --timeout={minutes}m"]
    if most_pods is not None:
        pending = f"kubectl get pods -l app.kubernetes.io/name={name} --field-selector=status.phase=Pending -o name"
        lines.append(f"kubectl scale deployment/{name} --replicas={most_pods + 1}")
        lines.append(f"sleep 60; test $({pending} | wc -l) -eq 1")
    # Why a pod was not started, if one was not.
    return [*lines, "kubectl get events --field-selector type=Warning", f"kubectl delete -f {check.name}"]
