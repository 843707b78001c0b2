"""Karpenter on EKS: an EC2NodeClass, a NodePool with the taint, and a NodeOverlay with the number of shares. Pure.

Karpenter does not know replicas (kubernetes-sigs/karpenter#729): it would start a node per pod. The NodeOverlay
(karpenter.sh/v1alpha1, feature gate NodeOverlay, from 1.7 on) gives it the number that the device plugin will offer:
physical GPUs times replicas. Facts: kubernetes-sigs/karpenter v1.14 (CRDs), aws/karpenter-provider-aws v1.14 (the CRD of
EC2NodeClass), Bottlerocket's settings kubelet-device-plugins.nvidia.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from gpushare.base.errors import BadCombination, BadUsage, NotSupported
from gpushare.export import k8s
from gpushare.export.containers import layout_name
from gpushare.export.description import HostDescription, short_model
from gpushare.export.document import Document, Export, yaml_document
from gpushare.export.k8s import NodeSharing, of_node

_ONE_SHARE: Final = "requests for more than one GPU: a share is not a whole GPU, and a request for two is refused"
_NAME: Final = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)
_AMI: Final = re.compile(r"(?:al2|al2023|bottlerocket)@[A-Za-z0-9.-]{1,20}", re.ASCII)
_DEFAULT_AMI: Final = "al2023@latest"
# Without its path, as Karpenter takes it (IAM API, RoleName).
_ROLE: Final = re.compile(r"[\w+=,.@-]{1,64}", re.ASCII)
_TAG: Final = re.compile(r"[^=\s]{1,128}=[^\s]{1,256}")
# A placeholder for the name of the cluster, where it is unknown.
_CLUSTER: Final = "CLUSTER"
_TYPE: Final = re.compile(r"[a-z0-9][a-z0-9-]*\.[a-z0-9-]+", re.ASCII)


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
    mig_strategy: str = "mixed",
) -> Export:
    """Return the objects for nodes like this one; the sharing itself is the device plugin's, or Bottlerocket's.

    ``node_class`` names an EC2NodeClass that exists; without it one is written, with the name of the pool, so that pools
    of one cluster do not replace each other's. ``tags`` (KEY=VALUE) find its subnets and security groups.
    """
    if node_class is not None and (ami or cluster or role or tags):
        raise BadCombination(
            "--node-class names an EC2NodeClass that exists: --ami, --cluster, --role and --tag are for one that is written",
            "drop --node-class, or the others",
        )
    ami = ami or _DEFAULT_AMI
    _check_node_class(ami, tags, cluster, role)
    for word in (name, node_class or name):
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
    pool = _pool(name, node_class or name, labels, requirements)
    if max_nodes is not None:
        pool["spec"]["limits"] = {resource: str(number * max_nodes) for resource, number in capacity.items()}
    verify = _verification(name, capacity, max_nodes)
    written = [] if node_class else [_node_class(name, sharing, ami, cluster, role, tags)]
    documents = (
        *written,
        yaml_document("node-pool.yaml", pool),
        *([yaml_document("node-overlay.yaml", _overlay(name, requirements, capacity))] if overlaid else []),
        *verify,
    )
    files = ["node-class.yaml"] * bool(written) + ["node-overlay.yaml"] * overlaid + ["node-pool.yaml"]
    commands = [f"kubectl apply {' '.join(f'-f {file}' for file in files)}", *_verified(verify, max_nodes)]
    return Export(
        documents=documents,
        commands=tuple(commands),
        needs=tuple(_needs(sharing, node_class, ami, cluster, role, tags, instance_type, max_nodes, overlaid=overlaid)),
        lost=(*sharing.lost, *([_ONE_SHARE] if sharing.plugin.replicas else [])),
    )


def _check_node_class(ami: str, tags: Sequence[str], cluster: str | None, role: str | None) -> None:
    if _AMI.fullmatch(ami) is None:
        raise BadUsage(
            f"'{ami[:40]}' is not the alias of an AMI for GPUs",
            "for example: --ami al2023@latest, or bottlerocket@latest",
            code="bad_ami",
        )
    odd = next((tag for tag in tags if _TAG.fullmatch(tag) is None), None)
    if odd is not None:
        raise BadUsage(
            f"'{odd[:60]}' is not a tag", "for example: --tag karpenter.sh/discovery=my-cluster", code="bad_tag"
        )
    if cluster is not None and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}", cluster, re.ASCII) is None:
        raise BadUsage(f"'{cluster[:60]}' is not the name of a cluster", "for example: --cluster prod", code="bad_name")
    if role is not None and _ROLE.fullmatch(role) is None:
        raise BadUsage(
            f"'{role[:60]}' is not the name of an IAM role",
            "for example: --role KarpenterNodeRole-prod",
            code="bad_name",
        )


def _node_class(
    name: str, sharing: NodeSharing, ami: str, cluster: str | None, role: str | None, tags: Sequence[str]
) -> Document:
    where = dict(tag.split("=", 1) for tag in tags) or {"karpenter.sh/discovery": cluster or _CLUSTER}
    spec: dict[str, Any] = {
        "role": role or f"KarpenterNodeRole-{cluster or _CLUSTER}",
        "amiSelectorTerms": [{"alias": ami}],
        "subnetSelectorTerms": [{"tags": where}],
        "securityGroupSelectorTerms": [{"tags": dict(where)}],
    }
    if ami.startswith("bottlerocket@"):
        spec["userData"] = _bottlerocket(sharing)
    head = {"apiVersion": "karpenter.k8s.aws/v1", "kind": "EC2NodeClass", "metadata": {"name": name}}
    return yaml_document("node-class.yaml", {**head, "spec": spec})


def _bottlerocket(sharing: NodeSharing) -> str:
    """Return the settings of Bottlerocket, which brings its own device plugin."""
    plugin = sharing.plugin
    if plugin.mig_strategy is not None:
        raise NotSupported(
            "the MIG settings of Bottlerocket are not known well enough to write them",
            "use --ami al2023@latest, or an EC2NodeClass of your own: --node-class NAME",
            code="no_mig_there",
        )
    section = "settings.kubelet-device-plugins.nvidia"
    way = {"timeSlicing": "time-slicing", "mps": "mps"}.get(plugin.strategy or "", "none")
    lines = [f"[{section}]", f'device-sharing-strategy = "{way}"']
    if way != "none":
        (number,) = {number for _, number in plugin.replicas}
        # Under the old name, which the overlay and the pods use.
        lines += ["", f"[{section}.{way}]", f"replicas = {number}", "rename-by-default = false"]
        lines += ["fail-requests-greater-than-one = true"] if way == "time-slicing" else []
    return "\n".join(lines) + "\n"


def _verification(name: str, capacity: dict[str, int], max_nodes: int | None) -> list[Document]:
    """Return a Deployment per resource with as many pods as the nodes have shares: all must run."""
    found = []
    for resource, number in capacity.items():
        title = "verify-" + re.sub(r"[^a-z0-9]+", "-", resource.partition("/")[2])
        pods = number * (max_nodes or 1)
        node = {"nodeSelector": {"karpenter.sh/nodepool": name}}
        found.append(
            yaml_document(f"{title}.yaml", k8s.deployment(f"gpushare-{title}", pods, {"limits": {resource: 1}}, **node))
        )
    return found


def _verified(checks: Sequence[Document], max_nodes: int | None) -> list[str]:
    lines: list[str] = []
    for check in checks:
        name = f"gpushare-{check.name.removesuffix('.yaml')}"
        lines += [f"kubectl apply -f {check.name}", f"kubectl rollout status deployment/{name} --timeout=15m"]
        if max_nodes is not None:
            # Where the pool may not grow, one pod more than shares must stay pending.
            pods = int(re.search(r"^  replicas: (\d+)$", check.text, re.MULTILINE)[1])  # type: ignore[index]
            pending = f"kubectl get pods -l app.kubernetes.io/name={name} --field-selector=status.phase=Pending -o name"
            lines += [
                f"kubectl scale deployment/{name} --replicas={pods + 1}",
                f"sleep 60; test $({pending} | wc -l) -eq 1",
            ]
        lines += ["kubectl get events --sort-by=.lastTimestamp", f"kubectl delete -f {check.name}"]
    return lines


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
    sharing: NodeSharing,
    node_class: str | None,
    ami: str,
    cluster: str | None,
    role: str | None,
    tags: Sequence[str],
    instance_type: str | None,
    max_nodes: int | None,
    *,
    overlaid: bool,
) -> list[str]:
    own_plugin = node_class is None and ami.startswith("bottlerocket@")
    needs = [
        *([] if own_plugin else ["the device plugin configured first: gpushare export k8s, with the same options"]),
        *(
            ["Karpenter 1.7 or later with its feature gate NodeOverlay=true (alpha, off by default)"]
            if overlaid
            else []
        ),
        *(
            [
                f"an EC2NodeClass {node_class} with an NVIDIA AMI (Bottlerocket shares by its userData: rename-by-default = false)"
            ]
            if node_class
            else []
        ),
        "a toleration for nvidia.com/gpu in the pods, as in the verifying ones",
    ]
    if sharing.plugin.replicas:
        needs.append("node-overlay.yaml in step with the replicas: its capacity is physical GPUs times replicas")
    if instance_type is None:
        needs.append("any instance type with this model and number of GPUs is fine, or name one: --instance-type")
    if node_class is None and cluster is None and not (role and tags):
        needs.insert(0, f"the name of the cluster in node-class.yaml in place of {_CLUSTER}: --cluster NAME")
    if node_class is None and ami.endswith("@latest"):
        needs.append(
            "for production an AMI release instead of latest, which replaces nodes when a new one is out: --ami"
        )
    needs.append("new nodes: only those take a changed file; Karpenter replaces the others by drift")
    if max_nodes is None:
        needs.append("no node limit is set: --max-nodes N bounds the cost")
    return needs
