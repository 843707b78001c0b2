"""NVIDIA's DRA driver: ResourceClaims and templates, which set sharing per GPU. Pure.

A claim is shared by all pods that name it; a ResourceClaimTemplate makes one claim, hence one GPU, per pod. So a shared
GPU becomes a ResourceClaim, and one that is not shared a template. Facts: kubernetes-sigs/dra-driver-nvidia-gpu (its
rules: tests/export/dra_parameters.py), Kubernetes' resource.k8s.io API: v1 from 1.34, v1beta2 in 1.33, v1beta1 in 1.32.
"""

from __future__ import annotations

import re
from typing import Any, Final

from gpushare.base.errors import BadUsage, NotSupported
from gpushare.base.model import TimeSlice, Way
from gpushare.base.units import MIB
from gpushare.export.description import GpuDescription, HostDescription, MigDescription, whole_percent
from gpushare.export.document import Document, Export, cluster_object, notes, yaml_document
from gpushare.export.k8s import deployment, slug, verifying_commands
from gpushare.hostfile.file import MpsWish

GROUP: Final = "resource.nvidia.com/v1beta1"
DRIVER: Final = "gpu.nvidia.com"
NEWEST: Final = "1.34"
_VERSIONS: Final = {"1.32": "v1beta1", "1.33": "v1beta2", "1.34": "v1"}
# As `kubectl version` prints it, too: v1.34.2, v1.33.1-eks-1a2b3c.
_VERSION: Final = re.compile(r"1\.(\d{1,3})(?:\.\d{1,4}(?:[-+][0-9A-Za-z.+-]{1,40})?)?", re.ASCII)
_ATTRIBUTES: Final = f"device.attributes['{DRIVER}']"


def api_version(kubernetes: str) -> str:
    """Return the version of the API of claims (resource.k8s.io) that a Kubernetes has: ``v1beta1`` of 1.32."""
    match = _VERSION.fullmatch(kubernetes.removeprefix("v"))
    if match is None:
        raise BadUsage(
            f"'{kubernetes[:40]}' is not a Kubernetes version", "for example: --kubernetes 1.34", code="bad_version"
        )
    if int(match[1]) < 32:
        raise NotSupported(
            f"Kubernetes {kubernetes} is too old for NVIDIA's DRA driver: 1.32 or later is needed",
            "update Kubernetes; or, if all GPUs are shared alike, use the device plugin: gpushare export k8s",
            code="no_dra",
        )
    return _VERSIONS.get(f"1.{match[1]}", "v1")


def claims_export(host: HostDescription, *, kubernetes: str = NEWEST) -> Export:
    """Return claims for every GPU and MIG device, by UUID, and a Deployment that verifies each shared one."""
    version = api_version(kubernetes)
    documents: list[Document] = []
    for gpu in host.gpus:
        if gpu.sharing is Way.MIG:
            documents += [document for mig in _distinct_devices(gpu) for document in _mig_documents(gpu, mig, version)]
        else:
            documents += _gpu_documents(gpu, version)
    if not documents:
        # Each is in MIG mode.
        indexes = ",".join(str(gpu.index) for gpu in host.gpus)
        raise NotSupported(
            "the GPUs are in MIG mode without any MIG device",
            f"make one on each: gpushare mig apply -g {indexes} 1g",
            code="no_device",
        )
    checks = [document for document in documents if document.name.startswith("verify-")]
    traits = host.traits
    gates = []
    if any(gpu.sharing is Way.TIMESLICE and gpu.time_slice not in {None, TimeSlice.DEFAULT} for gpu in host.gpus):
        gates.append("TimeSlicingSettings=true")
    if "daemons" in traits:
        gates.append("MPSSupport=true")
    if gates:
        traits.add("gates")
    versions_text = f"{kubernetes} ({version} of the API)"
    if kubernetes == NEWEST:
        versions_text = f"{kubernetes} or later (1.32 or 1.33: name it with --kubernetes)"
    return Export(
        documents=tuple(documents),
        # First all objects, then each verifying Deployment.
        commands=(
            *(f"kubectl apply -f {document.name}" for document in documents if document not in checks),
            *(line for check in checks for line in verifying_commands(check, prefix="")),
        ),
        needs=notes("dra", "needs", traits, kubernetes=versions_text, gates=", ".join(gates)),
        lost=notes("dra", "lost", traits),
    )


def _name_of_gpu(gpu: GpuDescription) -> str:
    """Return the name of one GPU in objects of a cluster, in which each node has a GPU 0."""
    return "-".join(filter(None, ["gpu", str(gpu.index), gpu.uuid.removeprefix("GPU-")[:8].lower()]))


def _distinct_devices(gpu: GpuDescription) -> list[MigDescription]:
    """Return the MIG devices that need a document of their own: one template serves all unshared ones of a profile."""
    distinct: dict[object, MigDescription] = {}
    for mig in gpu.mig:
        mig.check_whole("the DRA driver", gpu.index)
        is_shared = mig.mps is not None or bool(mig.replicas)
        distinct.setdefault((mig.uuid or mig.index) if is_shared else mig.profile, mig)
    return list(distinct.values())


def _gpu_documents(gpu: GpuDescription, version: str) -> list[Document]:
    """Return the objects of a GPU without MIG: a template if it is exclusive, else a claim that pods share."""
    name = f"{_name_of_gpu(gpu)}-{gpu.sharing.value}"
    request = _device_request("gpu", "gpu.nvidia.com", f"{_ATTRIBUTES}.uuid == '{gpu.uuid}'", version)
    if gpu.sharing is Way.EXCLUSIVE:
        return [_template(name, request, version)]
    if gpu.sharing is Way.TIMESLICE:
        level = gpu.time_slice or TimeSlice.DEFAULT
        if level is TimeSlice.DEFAULT:
            # Sharing the claim is enough; only another level needs the alpha gate.
            return _shared_claim(name, request, None, version)
        sharing = {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": level.name.capitalize()}}
    else:
        sharing = _mps_sharing(gpu.mps or MpsWish(), f"GPU {gpu.index}")
    return _shared_claim(name, request, {"apiVersion": GROUP, "kind": "GpuConfig", "sharing": sharing}, version)


def _mig_documents(gpu: GpuDescription, mig: MigDescription, version: str) -> list[Document]:
    """Return the objects of a MIG device: a template for its profile, or a claim if programs share it."""
    expression = f"{_ATTRIBUTES}.profile == '{mig.profile}' && {_ATTRIBUTES}.parentUUID == '{gpu.uuid}'"
    prefix = f"{_name_of_gpu(gpu)}-mig-{slug(mig.profile)}"
    if mig.mps is None and not mig.replicas:
        return [_template(prefix, _device_request("mig", "mig.nvidia.com", expression, version), version)]
    if mig.uuid:
        # Which of them is shared matters.
        expression = f"{_ATTRIBUTES}.uuid == '{mig.uuid}'"
    if mig.index is not None:
        prefix += f"-{mig.index}"
    request = _device_request("mig", "mig.nvidia.com", expression, version)
    if mig.mps is None:
        # Strategy TimeSlicing has no effect on a MIG device: sharing the claim is enough.
        return _shared_claim(f"{prefix}-timeslice", request, None, version)
    sharing = _mps_sharing(mig.mps, f"{mig.profile} of GPU {gpu.index}")
    parameters = {"apiVersion": GROUP, "kind": "MigDeviceConfig", "sharing": sharing}
    return _shared_claim(f"{prefix}-mps", request, parameters, version)


def _mps_sharing(mps: MpsWish, where: str) -> dict[str, Any]:
    """Return the limits of an MPS daemon in the form of the DRA driver's parameters; ``where`` is for the message."""
    config: dict[str, Any] = {}
    if mps.limits.threads_percent is not None:
        config["defaultActiveThreadPercentage"] = whole_percent(mps.limits.threads_percent, "the DRA driver", where)
    if mps.limits.memory_limit_bytes is not None:
        config["defaultPinnedDeviceMemoryLimit"] = f"{mps.limits.memory_limit_bytes // MIB}Mi"
    return {"strategy": "MPS", **({"mpsConfig": config} if config else {})}


def _device_request(name: str, device_class: str, expression: str, version: str) -> dict[str, Any]:
    """Return a request for one device of a class that a CEL expression selects."""
    asked = {"deviceClassName": device_class, "selectors": [{"cel": {"expression": expression}}]}
    # v1beta1 has no `exactly`.
    return {"name": name, **asked} if version == "v1beta1" else {"name": name, "exactly": asked}


def _claim_devices(request: dict[str, Any], parameters: dict[str, Any] | None) -> dict[str, Any]:
    """Return the devices of a claim: the request, and how the driver shares what it selects."""
    devices: dict[str, Any] = {"requests": [request]}
    if parameters is not None:
        devices["config"] = [{"requests": [request["name"]], "opaque": {"driver": DRIVER, "parameters": parameters}}]
    return {"devices": devices}


def _template(name: str, request: dict[str, Any], version: str) -> Document:
    """Return a template: each pod gets a claim, hence a device, of its own."""
    spec = {"spec": _claim_devices(request, None)}
    template = cluster_object(f"resource.k8s.io/{version}", "ResourceClaimTemplate", name, spec)
    return yaml_document(f"{name}.yaml", template)


def _shared_claim(
    name: str, request: dict[str, Any], parameters: dict[str, Any] | None, version: str
) -> list[Document]:
    """Return a claim that several pods name, and a Deployment of two such pods that verifies it."""
    spec = _claim_devices(request, parameters)
    claim = cluster_object(f"resource.k8s.io/{version}", "ResourceClaim", name, spec)
    # Two pods that name one claim run at the same time only if the GPU is shared.
    asked = [{"name": "gpu", "resourceClaimName": name}]
    check = deployment(f"verify-{name}", 2, {"claims": [{"name": "gpu"}]}, resourceClaims=asked)
    return [yaml_document(f"{name}.yaml", claim), yaml_document(f"verify-{name}.yaml", check)]
