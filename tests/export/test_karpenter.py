"""Karpenter's NodePool and NodeOverlay: the taint, and a capacity that is what the device plugin will offer."""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema import validate

from gpushare.base.errors import BadCombination, BadUsage, GpushareError, NotSupported
from gpushare.base.model import TimeSlice, Way
from gpushare.export import k8s
from gpushare.export.description import HostDescription
from gpushare.export.karpenter import node_pool_export
from tests.errors import fails
from tests.export.hosts import check_kubernetes, gpu, host, loaded, mig, t4s

# Restated from the CRDs of kubernetes-sigs/karpenter v1.14: the members we write, and no others.
REQUIREMENT = {
    "type": "object",
    "additionalProperties": False,
    "required": ["key", "operator"],
    "properties": {
        "key": {"type": "string", "maxLength": 316},
        "operator": {"enum": ["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]},
        "values": {"type": "array", "items": {"type": "string"}},
    },
}
QUANTITIES = {"type": "object", "additionalProperties": {"type": "string", "pattern": "^[0-9]+$"}}


def closed(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": required, "properties": properties}


TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
REF = closed(["group", "kind", "name"], group={"type": "string"}, kind={"type": "string"}, name={"type": "string"})
TAINT = closed(
    ["key", "effect"],
    key={"type": "string"},
    value={"type": "string"},
    effect={"enum": ["NoSchedule", "PreferNoSchedule", "NoExecute"]},
)
NODE = closed(
    ["nodeClassRef", "requirements"],
    nodeClassRef=REF,
    requirements={"type": "array", "items": REQUIREMENT, "maxItems": 100},
    taints={"type": "array", "items": TAINT},
)
DISRUPTION = closed(
    ["consolidateAfter"],
    consolidationPolicy={"enum": ["WhenEmpty", "WhenEmptyOrUnderutilized", "Balanced"]},
    consolidateAfter={"type": "string", "pattern": r"^((([0-9]+(s|m|h))+)|Never)$"},
)
SCHEMAS = {
    "NodePool": closed(
        ["template"],
        template=closed(["spec"], metadata=closed([], labels=TEXTS), spec=NODE),
        disruption=DISRUPTION,
        limits=QUANTITIES,
    ),
    # karpenter.k8s.aws_ec2nodeclasses.yaml of aws/karpenter-provider-aws v1.14.
    "EC2NodeClass": closed(
        ["role", "amiSelectorTerms", "subnetSelectorTerms", "securityGroupSelectorTerms"],
        role={"type": "string", "minLength": 1},
        amiSelectorTerms={
            "type": "array",
            "items": closed(["alias"], alias={"type": "string", "maxLength": 30, "pattern": "^[a-zA-Z0-9]+@.+$"}),
        },
        subnetSelectorTerms={"type": "array", "minItems": 1, "items": closed(["tags"], tags=TEXTS)},
        securityGroupSelectorTerms={"type": "array", "minItems": 1, "items": closed(["tags"], tags=TEXTS)},
        userData={"type": "string"},
    ),
    "NodeOverlay": closed(["requirements"], requirements={"type": "array", "items": REQUIREMENT}, capacity=QUANTITIES),
}


def check_crds(found: Any) -> None:
    for name, kind, version in (
        ("node-class", "EC2NodeClass", "karpenter.k8s.aws/v1"),
        ("node-pool", "NodePool", "karpenter.sh/v1"),
        ("node-overlay", "NodeOverlay", "karpenter.sh/v1alpha1"),
    ):
        if f"{name}.yaml" not in {document.name for document in found.documents}:
            continue
        document = loaded(found, f"{name}.yaml")
        assert (document["kind"], document["apiVersion"]) == (kind, version)
        validate(document["spec"], SCHEMAS[kind])


def test_the_pool_and_what_karpenter_cannot_know() -> None:
    export = node_pool_export(t4s(4, replicas=5), max_nodes=3)
    check_crds(export)
    assert check_kubernetes(export) == 1
    pool = loaded(export, "node-pool.yaml")["spec"]
    assert pool["template"]["spec"]["taints"] == [{"key": "nvidia.com/gpu", "value": "true", "effect": "NoSchedule"}]
    assert pool["limits"] == {"nvidia.com/gpu": "60"}
    overlay = loaded(export, "node-overlay.yaml")["spec"]
    assert overlay["capacity"] == {"nvidia.com/gpu": "20"}
    # It must not speak of nodes of other pools.
    keys = {one["key"]: one["values"] for one in overlay["requirements"]}
    assert keys == {
        "karpenter.k8s.aws/instance-gpu-name": ["t4"],
        "karpenter.k8s.aws/instance-gpu-count": ["4"],
        "karpenter.sh/nodepool": ["gpu-shared"],
    }
    # The label is the key of the device plugin's ConfigMap.
    label = pool["template"]["metadata"]["labels"]["nvidia.com/device-plugin.config"]
    plugin = k8s.operator_export(t4s(4, replicas=5))
    assert label in loaded(plugin, "device-plugin-config.yaml")["data"]
    assert any("NodeOverlay=true" in text for text in export.needs)


def test_whole_gpus_need_no_overlay() -> None:
    export = node_pool_export(t4s(2, sharing=Way.EXCLUSIVE), max_nodes=3)
    assert [document.name for document in export.documents] == ["node-class.yaml", "node-pool.yaml", "verify-gpu.yaml"]
    assert export.commands[0] == "kubectl apply -f node-class.yaml -f node-pool.yaml"
    # An alpha feature for nothing.
    assert not any("NodeOverlay" in text or "node-overlay" in text for text in export.needs)
    assert loaded(export, "node-pool.yaml")["spec"]["limits"] == {"nvidia.com/gpu": "6"}


def test_one_instance_type_and_no_limit() -> None:
    export = node_pool_export(t4s(1, replicas=4), instance_type="g4dn.2xlarge", name="t4", node_class="al2023")
    check_crds(export)
    pool = loaded(export, "node-pool.yaml")["spec"]
    assert "limits" not in pool
    assert any("--max-nodes" in text for text in export.needs)
    assert pool["template"]["spec"]["nodeClassRef"]["name"] == "al2023"
    # It exists already: ours must not replace it.
    assert "node-class.yaml" not in {document.name for document in export.documents}
    assert loaded(export, "node-overlay.yaml")["spec"]["requirements"][0] == {
        "key": "node.kubernetes.io/instance-type",
        "operator": "In",
        "values": ["g4dn.2xlarge"],
    }


def test_mig_leaves_no_whole_gpu() -> None:
    export = node_pool_export(host(gpu(0, Way.MIG, mig=(mig(0), mig(1)))))
    check_crds(export)
    assert loaded(export, "node-overlay.yaml")["spec"]["capacity"] == {
        "nvidia.com/mig-1g.10gb": "2",
        "nvidia.com/gpu": "0",
    }
    assert (
        loaded(export, "node-pool.yaml")["spec"]["template"]["metadata"]["labels"]["nvidia.com/mig.config"]
        == "gpushare-2x1g.10gb"
    )


BAD_NAMES: list[dict[str, Any]] = [
    *({"name": "GPU"}, {"node_class": "A"}, {"tags": ("discovery",)}, {"cluster": "a b"}, {"role": "x y"}),
    *({"ami": ami} for ami in ("windows2022@latest", "bottlerocket@latest", "al2023@v2024_01")),
    {"instance_type": "big"},
]


@pytest.mark.parametrize(
    ("described", "options", "kind", "code"),
    [
        (host(gpu(0), gpu(1, name="NVIDIA L4")), {}, NotSupported, "several_models"),
        (t4s(name=None), {}, NotSupported, "no_model"),
        (t4s(time_slice=TimeSlice.SHORT), {}, NotSupported, "no_slice_length"),
        (host(gpu(0), gpu(1, Way.EXCLUSIVE)), {}, NotSupported, "per_gpu"),
        *((t4s(), options, BadUsage, "bad_name") for options in BAD_NAMES),
        (t4s(), {"node_class": "ours", "role": "nodes"}, BadCombination, "bad_combination"),
        (t4s(), {"node_class": "ours", "ami": "al2023@latest"}, BadCombination, "bad_combination"),
        (t4s(), {"max_nodes": 0}, BadUsage, "bad_number"),
    ],
)
def test_refused(described: HostDescription, options: dict[str, Any], kind: type[GpushareError], code: str) -> None:
    with fails(kind, code):
        node_pool_export(described, **options)


def test_the_node_class() -> None:
    export = node_pool_export(t4s(4, replicas=4), cluster="prod")
    spec = loaded(export, "node-class.yaml")["spec"]
    assert spec["role"] == "KarpenterNodeRole-prod"
    assert spec["subnetSelectorTerms"] == [{"tags": {"karpenter.sh/discovery": "prod"}}]
    assert loaded(export, "node-class.yaml")["metadata"]["name"] == "gpu-shared"
    # Two pools of a cluster have a node class each.
    other = node_pool_export(t4s(4, replicas=4), name="gpu-8")
    assert loaded(other, "node-class.yaml")["metadata"]["name"] == "gpu-8"
    assert loaded(other, "node-pool.yaml")["spec"]["template"]["spec"]["nodeClassRef"]["name"] == "gpu-8"
    own = node_pool_export(t4s(4, replicas=4), role="nodes", tags=("team=ml", "env=a=b"), ami="al2023@v20260801")
    check_crds(own)
    spec = loaded(own, "node-class.yaml")["spec"]
    assert (spec["role"], spec["amiSelectorTerms"]) == ("nodes", [{"alias": "al2023@v20260801"}])
    assert spec["securityGroupSelectorTerms"] == [{"tags": {"team": "ml", "env": "a=b"}}]
    assert not any("CLUSTER" in text for text in own.needs)
    assert any("--cluster NAME" in text for text in node_pool_export(t4s(4, replicas=4)).needs)
    assert any("new nodes: only those" in text for text in own.needs)


def test_as_many_pods_as_shares_and_one_more_that_stays_pending() -> None:
    export = node_pool_export(t4s(4, replicas=4), max_nodes=2)
    assert loaded(export, "verify-gpu.yaml")["spec"]["replicas"] == 32
    said = list(export.commands)
    scale = said.index("kubectl scale deployment/gpushare-verify-gpu --replicas=33")
    assert "status.phase=Pending" in said[scale + 1]
    assert said[scale + 2].startswith("kubectl get events")
    # Without a limit one more pod would start a node.
    assert not any("--replicas=" in text for text in node_pool_export(t4s(4, replicas=4)).commands)
