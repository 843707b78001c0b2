"""Karpenter on EKS: a NodePool with the taint, and a NodeOverlay with the number of shares. Pure.

Karpenter does not know replicas (kubernetes-sigs/karpenter#729): it would start a node per pod. The NodeOverlay
(karpenter.sh/v1alpha1, feature gate NodeOverlay, from 1.7 on) gives it the number that the device plugin will offer:
physical GPUs times replicas. Facts: kubernetes-sigs/karpenter v1.14 (CRDs), aws/karpenter-provider-aws v1.14.
"""

from __future__ import annotations

import re
from typing import Any, Final

from gpushare.errors import BadUsage, NotSupported
from gpushare.export import k8s
from gpushare.export.containers import layout_name
from gpushare.export.description import HostDescription, short_model
from gpushare.export.document import Export, yaml_document
from gpushare.export.k8s import NodeSharing, of_node

_ONE_SHARE: Final = "requests for more than one GPU: a share is not a whole GPU, and a request for two is refused"
_NAME: Final = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)
_TYPE: Final = re.compile(r"[a-z0-9][a-z0-9-]*\.[a-z0-9-]+", re.ASCII)


def node_pool_export(
    host: HostDescription,
    *,
    name: str = "gpu-shared",
    node_class: str = "gpu-shared",
    instance_type: str | None = None,
    max_nodes: int | None = None,
    mig_strategy: str = "mixed",
) -> Export:
    """Return the NodePool and NodeOverlay of nodes like this one; the sharing itself is the device plugin's."""
    for word in (name, node_class):
        if _NAME.fullmatch(word) is None:
            raise BadUsage(f"'{word[:70]}' is not a valid object name", "for example: gpu-shared", code="bad_name")
    if instance_type is not None and _TYPE.fullmatch(instance_type) is None:
        raise BadUsage(
            f"'{instance_type[:40]}' is not an instance type", "for example: g4dn.12xlarge", code="bad_instance_type"
        )
    if max_nodes is not None and max_nodes < 1:
        raise BadUsage("--max-nodes must be at least 1", "for example: --max-nodes 4", code="bad_number")
    # Overlay and pods must use the same name, so shares keep the name of the GPU.
    sharing = of_node(host, rename=False, mig_strategy=mig_strategy)
    requirements = _requirements(host, instance_type)
    capacity = sharing.capacity(host)
    # Karpenter itself counts whole GPUs: those need no alpha feature.
    overlaid = bool(sharing.plugin.replicas) or any(gpu.mig for gpu in host.gpus)
    labels = {k8s.CONFIG_LABEL: sharing.key}
    if sharing.plugin.mig_strategy is not None:
        labels["nvidia.com/mig.config"] = layout_name(host)
    pool = _pool(name, node_class, labels, requirements)
    if max_nodes is not None:
        pool["spec"]["limits"] = {resource: str(number * max_nodes) for resource, number in capacity.items()}
    verify = k8s.verification(host, sharing, selector={"karpenter.sh/nodepool": name})
    documents = (
        yaml_document("node-pool.yaml", pool),
        *([yaml_document("node-overlay.yaml", _overlay(name, requirements, capacity))] if overlaid else []),
        *verify,
    )
    commands = [
        f"kubectl apply {'-f node-overlay.yaml ' if overlaid else ''}-f node-pool.yaml",
        *k8s.verified(verify, minutes=15),
    ]
    return Export(
        documents=documents,
        commands=tuple(commands),
        needs=tuple(_needs(sharing, node_class, instance_type, max_nodes, overlaid=overlaid)),
        lost=(*sharing.lost, *([_ONE_SHARE] if sharing.plugin.replicas else [])),
    )


def _requirements(host: HostDescription, instance_type: str | None) -> list[dict[str, Any]]:
    models = sorted({gpu.name or "" for gpu in host.gpus})
    if len(models) > 1:
        raise NotSupported(
            f"no instance type has GPUs of several models; this host has {', '.join(models)}",
            "use gpushare export k8s, which needs no instance type",
            code="several_models",
        )
    if instance_type is not None:
        return [_is("node.kubernetes.io/instance-type", instance_type)]
    model = short_model(models[0])
    if model is None:
        raise NotSupported(
            "the model of the GPUs is unknown", "name the instance type: --instance-type", code="no_model"
        )
    return [
        _is("karpenter.k8s.aws/instance-gpu-name", model),
        _is("karpenter.k8s.aws/instance-gpu-count", str(len(host.gpus))),
    ]


def _is(key: str, value: str) -> dict[str, Any]:
    return {"key": key, "operator": "In", "values": [value]}


def _pool(name: str, node_class: str, labels: dict[str, str], requirements: list[dict[str, Any]]) -> dict[str, Any]:
    template = {
        "metadata": {"labels": labels},
        "spec": {
            "nodeClassRef": {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": node_class},
            "requirements": requirements,
            "taints": [dict(k8s.TAINT)],
        },
    }
    return {
        "apiVersion": "karpenter.sh/v1",
        "kind": "NodePool",
        "metadata": {"name": name},
        "spec": {
            "template": template,
            "disruption": {"consolidationPolicy": "WhenEmptyOrUnderutilized", "consolidateAfter": "5m"},
        },
    }


def _overlay(name: str, requirements: list[dict[str, Any]], capacity: dict[str, int]) -> dict[str, Any]:
    numbers = {resource: str(number) for resource, number in capacity.items()}
    # With MIG on every GPU the node offers no whole GPU for Karpenter to count.
    numbers.setdefault("nvidia.com/gpu", "0")
    return {
        "apiVersion": "karpenter.sh/v1alpha1",
        "kind": "NodeOverlay",
        "metadata": {"name": name},
        "spec": {"requirements": [*requirements, _is("karpenter.sh/nodepool", name)], "capacity": numbers},
    }


def _needs(
    sharing: NodeSharing, node_class: str, instance_type: str | None, max_nodes: int | None, *, overlaid: bool
) -> list[str]:
    needs = [
        "the device plugin configured first: gpushare export k8s, with the same options",
        *(
            ["Karpenter 1.7 or later with its feature gate NodeOverlay=true (alpha, off by default)"]
            if overlaid
            else []
        ),
        f"an EC2NodeClass {node_class} with an NVIDIA AMI (Bottlerocket shares by its userData: rename-by-default = false)",
        "a toleration for nvidia.com/gpu in the pods, as in the verifying ones",
    ]
    if sharing.plugin.replicas:
        needs.append("node-overlay.yaml in step with the replicas: its capacity is physical GPUs times replicas")
    if instance_type is None:
        needs.append("any instance type with this model and number of GPUs is fine, or name one: --instance-type")
    if max_nodes is None:
        needs.append("no node limit is set: --max-nodes N bounds the cost")
    return needs
