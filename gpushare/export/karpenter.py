"""Karpenter on EKS: an EC2NodeClass, a NodePool with the taint, and a NodeOverlay with the number of shares. Pure.

Karpenter does not know replicas (kubernetes-sigs/karpenter#729): it would start a node per pod. The NodeOverlay
(karpenter.sh/v1alpha1, feature gate NodeOverlay, from 1.7 on) gives it the number that the device plugin will offer:
physical GPUs times replicas. Facts: kubernetes-sigs/karpenter v1.14 (CRDs), aws/karpenter-provider-aws v1.14 (the CRD of
EC2NodeClass).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from gpushare.base.errors import BadCombination, BadUsage, NotSupported
from gpushare.export import k8s
from gpushare.export.containers import layout_name
from gpushare.export.description import HostDescription, short_model
from gpushare.export.document import Document, Export, check_word, cluster_object, notes, yaml_document
from gpushare.export.k8s import sharing_of_node

_DEFAULT_AMI: Final = "al2023@latest"
# A placeholder for the name of the cluster, where it is unknown.
_CLUSTER: Final = "CLUSTER"
_OBJECT: Final = r"(?a)[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
_TAG: Final = r"[^=\s]{1,128}=[^\s]{1,256}"


def node_pool_export(
    host: HostDescription,
    *,
    name: str = "gpu-shared",
    node_class: str | None = None,
    ami: str | None = None,
    cluster: str | None = None,
    role: str | None = None,
    tags: Sequence[str] = (),
    instance_type: str | None = None,
    max_nodes: int | None = None,
) -> Export:
    """Return the objects for nodes like this one; the sharing itself is the device plugin's.

    ``node_class`` names an EC2NodeClass that exists; without it one is written, with the name of the pool, so that pools
    of one cluster do not replace each other's. ``tags`` (KEY=VALUE) find its subnets and security groups.
    """
    if node_class is not None and (ami or cluster or role or tags):
        raise BadCombination(
            "--node-class names an EC2NodeClass that exists: --ami, --cluster, --role and --tag are for one that is written",
            "drop --node-class, or the others",
        )
    ami = ami or _DEFAULT_AMI
    for word, pattern, example in (
        (name, _OBJECT, "--name gpu-shared"),
        (node_class, _OBJECT, "--node-class gpu-nodes"),
        (ami, r"(?a)(?:al2|al2023)@[A-Za-z0-9.-]{1,20}", "--ami al2023@latest"),
        *((tag, _TAG, "--tag karpenter.sh/discovery=my-cluster") for tag in tags),
        (cluster, r"(?a)[A-Za-z0-9][\w-]{0,99}", "--cluster prod"),
        # Without its path (IAM API, RoleName).
        (role, r"(?a)[\w+=,.@-]{1,64}", "--role KarpenterNodeRole-prod"),
        (instance_type, r"(?a)[a-z0-9][a-z0-9-]*\.[a-z0-9-]+", "--instance-type g4dn.12xlarge"),
    ):
        if word is not None:
            check_word(word, pattern, f"valid for {example.split()[0]}", example)
    if max_nodes is not None and max_nodes < 1:
        raise BadUsage("--max-nodes must be at least 1", "for example: --max-nodes 4", code="bad_number")
    sharing = sharing_of_node(host)
    requirements = _node_requirements(host, instance_type)
    capacity = sharing.capacity(host)
    # Karpenter itself counts whole GPUs: those need no alpha feature.
    overlaid = bool(sharing.replicas) or any(gpu.mig for gpu in host.gpus)
    labels = {k8s.CONFIG_LABEL: sharing.key}
    if sharing.mig:
        labels["nvidia.com/mig.config"] = layout_name(host)
    # As many pods as the nodes have shares: all must run.
    shares = {resource: number * (max_nodes or 1) for resource, number in capacity.items()}
    checks = {
        k8s.verifying_deployment(resource, pods, {"karpenter.sh/nodepool": name}): pods
        for resource, pods in shares.items()
    }
    classes = [] if node_class else [_node_class(name, ami, cluster, role, tags)]
    pool = _node_pool(name, node_class or name, labels, requirements, {} if max_nodes is None else shares)
    overlays = [_node_overlay(name, requirements, capacity)] if overlaid else []
    # The overlay before the pool, which would start a node for each pod without it.
    files = " ".join(f"-f {document.name}" for document in (*classes, *overlays, pool))
    commands = [f"kubectl apply {files}"]
    for check, pods in checks.items():
        # A node starts first. In a bounded pool one more pod must wait.
        most_pods = None if max_nodes is None else pods
        commands += k8s.verifying_commands(check, minutes=15, most_pods=most_pods)
    conditions = {
        "new-class": node_class is None,
        "unnamed": cluster is None and not (role and tags),
        "latest": ami.endswith("@latest"),
        "overlaid": overlaid,
        "plugin-replicas": bool(sharing.replicas),
        "any-type": instance_type is None,
        "unbounded": max_nodes is None,
    }
    traits = {trait for trait, is_true in conditions.items() if is_true}
    return Export(
        documents=(*classes, pool, *overlays, *checks),
        commands=tuple(commands),
        needs=notes("karpenter", "needs", traits, cluster=_CLUSTER, node_class=node_class),
        lost=(*sharing.lost, *notes("karpenter", "lost", traits | host.traits)),
    )


def _node_class(name: str, ami: str, cluster: str | None, role: str | None, tags: Sequence[str]) -> Document:
    """Return the EC2NodeClass: role and AMI of the nodes, and the tags of their network."""
    where = dict(tag.split("=", 1) for tag in tags) or {"karpenter.sh/discovery": cluster or _CLUSTER}
    spec: dict[str, Any] = {
        "role": role or f"KarpenterNodeRole-{cluster or _CLUSTER}",
        "amiSelectorTerms": [{"alias": ami}],
        "subnetSelectorTerms": [{"tags": where}],
        "securityGroupSelectorTerms": [{"tags": dict(where)}],
    }
    return yaml_document("node-class.yaml", cluster_object("karpenter.k8s.aws/v1", "EC2NodeClass", name, spec))


def _node_requirements(host: HostDescription, instance_type: str | None) -> list[dict[str, Any]]:
    """Return which instances the pool may start: those of a type, else those with as many GPUs of this model."""
    models = sorted({gpu.name or "" for gpu in host.gpus})
    if len(models) > 1:
        raise NotSupported(
            f"no instance type has GPUs of several models; this host has {', '.join(models)}",
            "use gpushare export k8s, which needs no instance type",
            code="several_models",
        )
    if instance_type is not None:
        return [_requirement("node.kubernetes.io/instance-type", instance_type)]
    model = short_model(models[0])
    if model is None:
        raise NotSupported(
            "the model of the GPUs is unknown", "name the instance type: --instance-type", code="no_model"
        )
    return [
        _requirement("karpenter.k8s.aws/instance-gpu-name", model),
        _requirement("karpenter.k8s.aws/instance-gpu-count", str(len(host.gpus))),
    ]


def _requirement(key: str, value: str) -> dict[str, Any]:
    return {"key": key, "operator": "In", "values": [value]}


def _node_pool(
    name: str, node_class: str, labels: dict[str, str], requirements: list[dict[str, Any]], limits: dict[str, int]
) -> Document:
    """Return the NodePool: nodes with the labels of this sharing, and a taint against pods without a GPU.

    ``limits`` are the most shares of all its nodes, by resource; empty: it may grow without bound.
    """
    template = {
        "metadata": {"labels": labels},
        "spec": {
            "nodeClassRef": {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": node_class},
            "requirements": requirements,
            "taints": [dict(k8s.TAINT)],
        },
    }
    disruption = {"consolidationPolicy": "WhenEmptyOrUnderutilized", "consolidateAfter": "5m"}
    spec: dict[str, Any] = {"template": template, "disruption": disruption}
    if limits:
        spec["limits"] = {resource: str(number) for resource, number in limits.items()}
    return yaml_document("node-pool.yaml", cluster_object("karpenter.sh/v1", "NodePool", name, spec))


def _node_overlay(name: str, requirements: list[dict[str, Any]], capacity: dict[str, int]) -> Document:
    """Return the NodeOverlay, which tells Karpenter how many shares such a node offers."""
    numbers = {resource: str(number) for resource, number in capacity.items()}
    # With MIG on every GPU the node offers no whole GPU for Karpenter to count.
    numbers.setdefault("nvidia.com/gpu", "0")
    selected = [*requirements, _requirement("karpenter.sh/nodepool", name)]
    spec = {"requirements": selected, "capacity": numbers}
    overlay = cluster_object("karpenter.sh/v1alpha1", "NodeOverlay", name, spec)
    return yaml_document("node-overlay.yaml", overlay)
