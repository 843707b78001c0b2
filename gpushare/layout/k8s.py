"""NVIDIA's device plugin under the GPU operator: ConfigMap, ClusterPolicy patch, labels, taint, a proof. Pure.

Facts: NVIDIA/gpu-operator v26.7 (ClusterPolicy nvidia.com/v1; assets/state-device-plugin, where config-manager runs
with FALLBACK_STRATEGIES=empty: without a default or a label no sharing configuration is taken), NVIDIA's "Time-Slicing
GPUs in Kubernetes".
"""

from __future__ import annotations

import re
from typing import Any, Final

from gpushare.errors import BadUsage
from gpushare.layout import mig_parted
from gpushare.layout.description import HostDescription, Sharing
from gpushare.layout.device_plugin import config_of
from gpushare.layout.export import Document, Export, yaml_document, yaml_text
from gpushare.layout.node_sharing import NodeSharing, of_node, physical
from gpushare.mig.parted_export import yaml_text as parted_text

PLUGIN_MAP: Final = "gpushare-device-plugin"
MIG_MAP: Final = "gpushare-mig-parted"
CONFIG_LABEL: Final = "nvidia.com/device-plugin.config"
TAINT: Final = {"key": "nvidia.com/gpu", "value": "true", "effect": "NoSchedule"}
TOLERATION: Final = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
# Runs a kernel and ends: what only lists GPUs would prove nothing.
IMAGE: Final = "nvcr.io/nvidia/k8s/cuda-sample:vectoradd-cuda12.5.0-ubuntu22.04"
LOOP: Final = "while /cuda-samples/vectorAdd; do sleep 1; done; exit 1"
_NAMESPACE: Final = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)


def export(
    host: HostDescription,
    *,
    namespace: str = "gpu-operator",
    rename: bool = False,
    mig_strategy: str = "mixed",
    every_node: bool = False,
) -> Export:
    """Return what makes a cluster share the GPUs of this node as the host does now.

    ``every_node`` makes it the default of the cluster; otherwise only the labelled node shares.

    Raises:
        NotSupported: the device plugin cannot say it; the hint names the engine that can.
        BadUsage: a namespace or a number that is refused upstream.
    """
    if _NAMESPACE.fullmatch(namespace) is None or namespace == "default":
        raise BadUsage(
            f"'{namespace[:70]}' is no namespace for the device plugin",
            "give the namespace of the GPU operator: --namespace gpu-operator (never default)",
            code="bad_namespace",
        )
    sharing = of_node(host, rename=rename, mig_strategy=mig_strategy)
    has_mig = any(gpu.sharing is Sharing.MIG for gpu in host.gpus)
    documents = [
        _config_map(sharing, namespace),
        *([_mig_map(host, namespace)] if has_mig else []),
        _policy(sharing, has_mig=has_mig, every_node=every_node),
        *(verification(host, sharing, selector={} if every_node else {CONFIG_LABEL: sharing.key})),
    ]
    return Export(
        documents=tuple(documents),
        commands=tuple(_commands(host, sharing, documents, namespace, every_node=every_node)),
        needs=tuple(_needs(sharing, has_mig=has_mig)),
        lost=(*sharing.lost, *_lost(host)),
    )


def standalone(host: HostDescription, *, rename: bool = False, mig_strategy: str = "mixed") -> Export:
    """Return values for the device plugin's own Helm chart, for a cluster without the GPU operator.

    The chart makes the ConfigMap of ``config.map`` and refuses namespace default; MIG is not its business.

    Raises:
        NotSupported, BadUsage: as `export`.
    """
    sharing = of_node(host, rename=rename, mig_strategy=mig_strategy)
    node, values = host.node or "NODE", "values.yaml"
    checks = verification(host, sharing, selector={CONFIG_LABEL: sharing.key})
    # GPU feature discovery gives the node the label that the MPS daemonset selects.
    chart = {"config": {"default": "none", "map": _configs(sharing)}, "gfd": {"enabled": True}}
    lines = [
        "helm repo add nvdp https://nvidia.github.io/k8s-device-plugin",
        f"helm upgrade -i nvdp nvdp/nvidia-device-plugin -n nvidia-device-plugin --create-namespace -f {values}",
        f"kubectl label node {node} {CONFIG_LABEL}={sharing.key} --overwrite",
        _taint(node),
    ]
    needs = [
        "no GPU operator: it has a device plugin of its own",
        "the keys of nodes that share in another way in the same values.yaml: a release has one map",
        *_needs(sharing, has_mig=False)[1:],
    ]
    if sharing.plugin.mig_strategy is not None:
        needs.append("MIG cut on the host first: gpushare apply, or gpushare export mig-parted")
    return Export(
        documents=(yaml_document(values, chart), *checks),
        commands=(*lines, *_verified(checks)),
        needs=tuple(needs),
        lost=(*sharing.lost, *_lost(host)),
    )


def _configs(sharing: NodeSharing) -> dict[str, str]:
    """Return the configurations by key: one that shares nothing, for every node without the label, and this node's."""
    none: dict[str, Any] = {"version": "v1"}
    if sharing.plugin.mig_strategy is not None:
        none["flags"] = {"migStrategy": sharing.plugin.mig_strategy}
    return {"none": yaml_text(none), sharing.key: yaml_text(config_of(sharing.plugin))}


def _config_map(sharing: NodeSharing, namespace: str) -> Document:
    return yaml_document(
        "device-plugin-config.yaml",
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": PLUGIN_MAP, "namespace": namespace},
            "data": _configs(sharing),
        },
    )


def _mig_map(host: HostDescription, namespace: str) -> Document:
    # Nodes of another layout read the same map: a name that two layouts had would cut theirs anew.
    config = mig_parted.config_of(host, mig_parted.layout_name(host))
    # The mig-manager falls back to it, and a node is taken out of MIG by it.
    config["mig-configs"] = {"all-disabled": [{"devices": "all", "mig-enabled": False}], **config["mig-configs"]}
    return yaml_document(
        "mig-parted-config.yaml",
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": MIG_MAP, "namespace": namespace},
            "data": {"config.yaml": parted_text(config)},
        },
    )


def _policy(sharing: NodeSharing, *, has_mig: bool, every_node: bool) -> Document:
    """Return a merge patch: a whole ClusterPolicy has nine required members that are not ours to say."""
    spec: dict[str, Any] = {}
    if has_mig:
        spec["mig"] = {"strategy": sharing.plugin.mig_strategy}
    spec["devicePlugin"] = {"config": {"name": PLUGIN_MAP, "default": sharing.key if every_node else "none"}}
    if has_mig:
        spec["migManager"] = {"config": {"name": MIG_MAP}}
    head = {"apiVersion": "nvidia.com/v1", "kind": "ClusterPolicy", "metadata": {"name": "cluster-policy"}}
    return yaml_document("cluster-policy-patch.yaml", {**head, "spec": spec})


def verification(host: HostDescription, sharing: NodeSharing, *, selector: dict[str, str]) -> list[Document]:
    """Return one Deployment per resource; one pod more than there are devices, where they are shared: all must run."""
    shared = dict(sharing.plugin.replicas)
    found = []
    for name, devices in physical(host, sharing.plugin.mig_strategy).items():
        pods = devices + (1 if name in shared else 0)
        title = "verify-" + re.sub(r"[^a-z0-9]+", "-", name.partition("/")[2])
        found.append(
            yaml_document(f"{title}.yaml", _deployment(f"gpushare-{title}", sharing.published(name), pods, selector))
        )
    return found


def _deployment(name: str, resource: str, pods: int, selector: dict[str, str]) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": name}
    container = {
        "name": "vectoradd",
        "image": IMAGE,
        "command": ["/bin/sh", "-c", LOOP],
        "resources": {"limits": {resource: 1}},
    }
    pod = {
        **({"nodeSelector": selector} if selector else {}),
        "tolerations": [dict(TOLERATION)],
        "containers": [container],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "replicas": pods,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def _commands(
    host: HostDescription, sharing: NodeSharing, documents: list[Document], namespace: str, *, every_node: bool
) -> list[str]:
    node = host.node or "NODE"
    # By field and manager: the keys of nodes that share in another way stay.
    kept = f"--server-side --force-conflicts --field-manager=gpushare-{sharing.key}"
    lines = [f"kubectl apply {kept} -f device-plugin-config.yaml"]
    lines += [f"kubectl apply -f {one.name}" for one in documents if one.name == "mig-parted-config.yaml"]
    lines.append(
        "kubectl patch clusterpolicies.nvidia.com/cluster-policy --type merge --patch-file cluster-policy-patch.yaml"
    )
    if not every_node:
        lines.append(f"kubectl label node {node} {CONFIG_LABEL}={sharing.key} --overwrite")
    if sharing.plugin.mig_strategy is not None:
        # A state that an earlier layout left would end the wait at once.
        lines.append(f"kubectl label node {node} nvidia.com/mig.config.state-")
        lines.append(f"kubectl label node {node} nvidia.com/mig.config={mig_parted.layout_name(host)} --overwrite")
        lines.append(
            "kubectl wait --for=jsonpath='{.metadata.labels.nvidia\\.com/mig\\.config\\.state}'=success "
            f"node/{node} --timeout=15m"
        )
    lines += [
        _taint(node),
        # The operator does not watch the ConfigMap's content.
        f"kubectl rollout restart -n {namespace} daemonset/nvidia-device-plugin-daemonset daemonset/gpu-feature-discovery",
        f"kubectl rollout status -n {namespace} daemonset/nvidia-device-plugin-daemonset --timeout=5m",
    ]
    return lines + _verified([one for one in documents if one.name.startswith("verify-")])


def _verified(checks: list[Document]) -> list[str]:
    lines = []
    for one in checks:
        lines += [
            f"kubectl apply -f {one.name}",
            f"kubectl rollout status deployment/gpushare-{one.name.removesuffix('.yaml')} --timeout=5m",
            f"kubectl delete -f {one.name}",
        ]
    return lines


def _taint(node: str) -> str:
    return f"kubectl taint node {node} {TAINT['key']}={TAINT['value']}:{TAINT['effect']} --overwrite"


def _needs(sharing: NodeSharing, *, has_mig: bool) -> list[str]:
    needs = [
        "the NVIDIA GPU operator, with its ClusterPolicy named cluster-policy",
        "pods for the tainted node tolerate nvidia.com/gpu, as the one that verifies does (the operator's own do)",
    ]
    if sharing.plugin.strategy == "mps":
        needs += [
            "the label nvidia.com/mps.capable=true on the node: GPU feature discovery must be enabled",
            "one user id for all pods of a GPU: an MPS server serves one user at a time",
        ]
    if has_mig:
        needs.append(
            f"the layouts of all nodes in the one ConfigMap {MIG_MAP}: where it is there already, add its mig-configs to the file"
        )
        needs.append(
            "an idle node: the mig-manager stops the GPU pods, then sets nvidia.com/mig.config.state=success or failed"
        )
    return needs


def _lost(host: HostDescription) -> list[str]:
    lost = mig_parted.lost_of(host) if any(gpu.sharing is Sharing.MIG for gpu in host.gpus) else []
    lost = [one for one in lost if "GPUs without MIG" not in one and "replicas" not in one]
    if any(gpu.mig for gpu in host.gpus):
        lost.append("places of MIG instances: the mig-manager finds its own")
    return lost
