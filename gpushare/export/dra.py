"""NVIDIA's DRA driver: ResourceClaims and templates, which say sharing per GPU. Pure.

A claim is shared by all pods that name it; a ResourceClaimTemplate makes one claim, hence one GPU, per pod. So a shared
GPU becomes a ResourceClaim, and one that is not shared a template. Facts: kubernetes-sigs/dra-driver-nvidia-gpu (see
`dra_rules`), Kubernetes' resource.k8s.io API: v1 from 1.34, v1beta2 in 1.33, v1beta1 in 1.32.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from gpushare.errors import BadUsage, NotSupported
from gpushare.export.description import GpuDescription, HostDescription, MigDescription, MpsDescription
from gpushare.export.document import IMAGE, Document, Export, yaml_document
from gpushare.export.k8s import LOOP, TOLERATION
from gpushare.model import Priority, Sharing, TimeSlice
from gpushare.units import MIB, format_percent

GROUP: Final = "resource.nvidia.com/v1beta1"
DRIVER: Final = "gpu.nvidia.com"
INTERVALS: Final = ("Default", "Short", "Medium", "Long")
_QUANTITY: Final = re.compile(r"(\d{1,15})(Ki|Mi|Gi|Ti|k|M|G|T)?", re.ASCII)
_FACTORS: Final = {
    "": 1,
    "k": 1000,
    "M": 1000**2,
    "G": 1000**3,
    "T": 1000**4,
    "Ki": 1024,
    "Mi": 1024**2,
    "Gi": 1024**3,
    "Ti": 1024**4,
}
_DEVICE: Final = re.compile(r"\d{1,4}|GPU-[0-9a-f-]+", re.ASCII)


def check_parameters(raw: object) -> Mapping[str, Any]:
    """Return the parameters of one device configuration, if the driver takes them.

    Raises:
        BadUsage: it does not.
    """
    top = _fields(raw, "the parameters", ("apiVersion", "kind", "sharing"))
    if top.get("apiVersion") != GROUP:
        raise _refused(f"no kind of group {GROUP}")
    kind = top.get("kind")
    if kind not in {"GpuConfig", "MigDeviceConfig"}:
        raise _refused(f"no kind '{str(kind)[:40]}'")
    if "sharing" in top:
        _check_sharing(top["sharing"], is_mig=kind == "MigDeviceConfig")
    return top


def _check_sharing(raw: object, *, is_mig: bool) -> None:
    # A MIG device has no slice length, so its configuration has no such member.
    members = ("strategy", "mpsConfig") if is_mig else ("strategy", "timeSlicingConfig", "mpsConfig")
    sharing = _fields(raw, "'sharing'", members)
    strategy = sharing.get("strategy")
    if strategy not in {"TimeSlicing", "MPS"}:
        raise _refused(f"unknown GPU sharing strategy: {str(strategy)[:40]}")
    if strategy == "TimeSlicing":
        if "mpsConfig" in sharing:
            raise _refused("cannot use 'mpsConfig' with the TimeSlicing strategy")
        interval = _fields(sharing.get("timeSlicingConfig", {}), "'timeSlicingConfig'", ("interval",)).get("interval")
        if interval is not None and interval not in INTERVALS:
            raise _refused(f"unknown time-slice interval: {str(interval)[:40]}")
        return
    if "timeSlicingConfig" in sharing:
        raise _refused("cannot use 'timeSlicingConfig' with the MPS strategy")
    _check_mps(sharing.get("mpsConfig", {}))


def _check_mps(raw: object) -> None:
    members = (
        *("defaultActiveThreadPercentage", "defaultPinnedDeviceMemoryLimit", "defaultPerDevicePinnedMemoryLimit"),
        "multiUser",
    )
    config = _fields(raw, "'mpsConfig'", members)
    threads = config.get("defaultActiveThreadPercentage")
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or not 0 <= threads <= 100):
        raise _refused("'defaultActiveThreadPercentage' must be a whole number from 0 to 100")
    if "defaultPinnedDeviceMemoryLimit" in config:
        _check_memory(config["defaultPinnedDeviceMemoryLimit"])
    for device, limit in _fields(config.get("defaultPerDevicePinnedMemoryLimit", {}), "the limits", None).items():
        if not isinstance(device, str) or _DEVICE.fullmatch(device) is None:
            raise _refused(f"invalid device index: {str(device)[:60]}")
        _check_memory(limit)
    if not isinstance(config.get("multiUser", False), bool):
        raise _refused("'multiUser' is not true or false")


def _check_memory(raw: object) -> None:
    match = _QUANTITY.fullmatch(raw) if isinstance(raw, str) else None
    if match is None:
        raise _refused(f"'{str(raw)[:40]}' is no quantity")
    if int(match[1]) * _FACTORS[match[2] or ""] < MIB:
        raise _refused(f"the memory limit {raw}: value set too low (below 1Mi)")


def _fields(raw: object, what: str, members: tuple[str, ...] | None) -> Mapping[Any, Any]:
    if not isinstance(raw, Mapping):
        raise _refused(f"{what} is not a mapping")
    unknown = [key for key in raw if members is not None and key not in members]
    if unknown:
        raise _refused(f'strict decoding error: unknown field "{str(unknown[0])[:40]}" in {what}')
    return raw


def _refused(message: str) -> BadUsage:
    return BadUsage(f"DRA driver configuration: {message}", "see: gpushare export dra --help", code="bad_dra_config")


NEWEST: Final = "1.34"
_VERSIONS: Final = {"1.32": "v1beta1", "1.33": "v1beta2", "1.34": "v1"}
_VERSION: Final = re.compile(r"1\.(\d{1,3})", re.ASCII)
_ATTRIBUTES: Final = f"device.attributes['{DRIVER}']"


def api_version(kubernetes: str) -> str:
    """Return the version of resource.k8s.io that a Kubernetes has.

    Raises:
        BadUsage: not a version.
        NotSupported: older than 1.32.
    """
    match = _VERSION.fullmatch(kubernetes.removeprefix("v"))
    if match is None:
        raise BadUsage(
            f"'{kubernetes[:40]}' is no Kubernetes version", "give it like this: --kubernetes 1.34", code="bad_version"
        )
    if int(match[1]) < 32:
        raise NotSupported(
            f"Kubernetes {kubernetes} has no DRA that NVIDIA's driver works with (1.32 and later)",
            "take gpushare export k8s, the device plugin",
            code="no_dra",
        )
    return _VERSIONS.get(f"1.{match[1]}", "v1")


def export(host: HostDescription, *, kubernetes: str = NEWEST, any_gpu: bool = False) -> Export:
    """Return claims for every GPU and MIG device, and a Deployment that proves each shared one.

    ``any_gpu`` takes any GPU of the same model; otherwise exactly this one, by its UUID.

    Raises:
        NotSupported: the driver cannot say it.
        BadUsage: no Kubernetes version.
    """
    version = api_version(kubernetes)
    documents: list[Document] = []
    for gpu in host.gpus:
        if gpu.sharing is Sharing.MIG:
            documents += [
                one for mig in _distinct(gpu, any_gpu=any_gpu) for one in _mig(gpu, mig, version, any_gpu=any_gpu)
            ]
        else:
            documents += _whole(gpu, version, any_gpu=any_gpu)
    if not documents:
        raise NotSupported(
            "the GPUs are in MIG mode and have no MIG device",
            "make some: gpushare mig apply -g 0 1g*7",
            code="no_device",
        )
    # Equal claims for any GPU of a model are one document.
    unique = list({one.name: one for one in documents}.values())
    return Export(
        documents=tuple(unique),
        commands=tuple(_commands(unique)),
        needs=tuple(_needs(host, kubernetes)),
        lost=tuple(_lost(host)),
    )


def _distinct(gpu: GpuDescription, *, any_gpu: bool) -> list[MigDescription]:
    """Return the MIG devices that need a claim of their own: not shared ones of a profile share a template."""
    found: dict[object, MigDescription] = {}
    for mig in gpu.mig:
        if not mig.is_whole:
            raise NotSupported(
                f"the DRA driver offers no MIG device of a part of a GPU instance; GPU {gpu.index} has {mig.profile}",
                "gpushare export slurm can, and gpushare export docker, compose and cdi",
                code="partial_compute_instance",
            )
        is_shared = mig.mps is not None or bool(mig.replicas)
        found.setdefault(
            (mig.profile, mig.mps, mig.replicas, (mig.uuid or mig.index) if is_shared and not any_gpu else None), mig
        )
    return list(found.values())


def _whole(gpu: GpuDescription, version: str, *, any_gpu: bool) -> list[Document]:
    model = re.sub(r"[^a-z0-9]+", "-", (gpu.name or "gpu").lower()).strip("-")
    name = f"{model if any_gpu else f'gpu-{gpu.index}'}-{gpu.sharing.value}"
    attribute = f"productName == '{_quoted(gpu.name or '')}'" if any_gpu else f"uuid == '{gpu.uuid}'"
    request = _request("gpu", "gpu.nvidia.com", f"{_ATTRIBUTES}.{attribute}", version)
    if gpu.sharing is Sharing.EXCLUSIVE:
        return [_template(name, request, None, version)]
    if gpu.sharing is Sharing.TIMESLICE:
        level = gpu.time_slice or TimeSlice.DEFAULT
        sharing = {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": level.name.capitalize()}}
    else:
        sharing = _mps(gpu.mps or MpsDescription(), f"GPU {gpu.index}")
    return _shared(name, request, _parameters("GpuConfig", sharing), version)


def _mig(gpu: GpuDescription, mig: MigDescription, version: str, *, any_gpu: bool) -> list[Document]:
    slug = re.sub(r"[^a-z0-9]+", "-", mig.profile)
    parent = "" if any_gpu else f" && {_ATTRIBUTES}.parentUUID == '{gpu.uuid}'"
    expression = f"{_ATTRIBUTES}.profile == '{mig.profile}'{parent}"
    prefix = f"mig-{slug}" if any_gpu else f"gpu-{gpu.index}-mig-{slug}"
    if mig.mps is None and not mig.replicas:
        return [_template(prefix, _request("mig", "mig.nvidia.com", expression, version), None, version)]
    if not any_gpu and mig.uuid:
        # Which of them is shared matters.
        expression = f"{_ATTRIBUTES}.uuid == '{mig.uuid}'"
    if not any_gpu and mig.index is not None:
        prefix += f"-{mig.index}"
    request = _request("mig", "mig.nvidia.com", expression, version)
    if mig.mps is None:
        # The driver takes strategy TimeSlicing for a MIG device, and it has no effect there: a claim shared is enough.
        return _shared(f"{prefix}-timeslice", request, None, version)
    parameters = _parameters("MigDeviceConfig", _mps(mig.mps, f"{mig.profile} of GPU {gpu.index}"))
    return _shared(f"{prefix}-mps", request, parameters, version)


def _mps(mps: MpsDescription, where: str) -> dict[str, Any]:
    config: dict[str, Any] = {}
    if mps.limits.threads_percent is not None:
        if mps.limits.threads_percent != int(mps.limits.threads_percent):
            raise NotSupported(
                f"the DRA driver takes a whole percentage; {where} has {format_percent(mps.limits.threads_percent)}",
                "round it: gpushare mps set --threads; or: gpushare export systemd, which keeps it",
                code="fractional_threads",
            )
        config["defaultActiveThreadPercentage"] = int(mps.limits.threads_percent)
    if mps.limits.memory_limit_bytes is not None:
        config["defaultPinnedDeviceMemoryLimit"] = f"{mps.limits.memory_limit_bytes // MIB}Mi"
    return {"strategy": "MPS", **({"mpsConfig": config} if config else {})}


def _parameters(kind: str, sharing: dict[str, Any]) -> dict[str, Any]:
    found = {"apiVersion": GROUP, "kind": kind, "sharing": sharing}
    check_parameters(found)
    return found


def _request(name: str, device_class: str, expression: str, version: str) -> dict[str, Any]:
    asked = {"deviceClassName": device_class, "selectors": [{"cel": {"expression": expression}}]}
    # v1beta1 has no `exactly`.
    return {"name": name, **asked} if version == "v1beta1" else {"name": name, "exactly": asked}


def _devices(request: dict[str, Any], parameters: dict[str, Any] | None) -> dict[str, Any]:
    devices: dict[str, Any] = {"requests": [request]}
    if parameters is not None:
        devices["config"] = [{"requests": [request["name"]], "opaque": {"driver": DRIVER, "parameters": parameters}}]
    return {"devices": devices}


def _template(name: str, request: dict[str, Any], parameters: dict[str, Any] | None, version: str) -> Document:
    return yaml_document(
        f"{name}.yaml",
        {
            "apiVersion": f"resource.k8s.io/{version}",
            "kind": "ResourceClaimTemplate",
            "metadata": {"name": name},
            "spec": {"spec": _devices(request, parameters)},
        },
    )


def _shared(name: str, request: dict[str, Any], parameters: dict[str, Any] | None, version: str) -> list[Document]:
    claim = {
        "apiVersion": f"resource.k8s.io/{version}",
        "kind": "ResourceClaim",
        "metadata": {"name": name},
        "spec": _devices(request, parameters),
    }
    return [yaml_document(f"{name}.yaml", claim), yaml_document(f"verify-{name}.yaml", _deployment(name))]


def _deployment(claim: str) -> dict[str, Any]:
    """Return two pods that name one claim: they run side by side only if the GPU is shared."""
    labels = {"app.kubernetes.io/name": f"verify-{claim}"}
    container = {
        "name": "vectoradd",
        "image": IMAGE,
        "command": ["/bin/sh", "-c", LOOP],
        "resources": {"claims": [{"name": "gpu"}]},
    }
    pod = {
        "tolerations": [dict(TOLERATION)],
        "resourceClaims": [{"name": "gpu", "resourceClaimName": claim}],
        "containers": [container],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": f"verify-{claim}", "labels": labels},
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def _commands(documents: list[Document]) -> list[str]:
    checks = [one.name for one in documents if one.name.startswith("verify-")]
    lines = [f"kubectl apply -f {one.name}" for one in documents if one.name not in checks]
    for name in checks:
        lines += [
            f"kubectl apply -f {name}",
            f"kubectl rollout status deployment/{name.removesuffix('.yaml')} --timeout=5m",
            f"kubectl delete -f {name}",
        ]
    return lines


def _needs(host: HostDescription, kubernetes: str) -> list[str]:
    gates = []
    if any(gpu.sharing is Sharing.TIMESLICE for gpu in host.gpus):
        gates.append("TimeSlicingSettings=true")
    mps = any(gpu.mps is not None for gpu in host.gpus) or any(mig.mps is not None for _, mig in host.instances())
    gates += ["MPSSupport=true"] if mps else []
    needs = [
        f"Kubernetes {kubernetes}" + ("" if kubernetes == NEWEST else f" ({api_version(kubernetes)} of the API)"),
        "NVIDIA's DRA driver with its GPU part on (helm: gpuResourcesEnabledOverride=true), and no device plugin on the node",
    ]
    if any(gpu.mig for gpu in host.gpus):
        needs.append("the MIG devices there before its pod starts: it offers what it finds, and makes none by itself")
    if gates:
        needs.append("its feature gates " + ", ".join(gates) + " (alpha, off by default)")
    if mps:
        needs.append("its feature gates DynamicMIG and NVMLDeviceHealthCheck off: they exclude MPSSupport")
    return needs


def _lost(host: HostDescription) -> list[str]:
    lost = []
    daemons = [gpu.mps for gpu in host.gpus] + [mig.mps for _, mig in host.instances()]
    if any(mps is not None and mps.limits.priority is Priority.LOW for mps in daemons):
        lost.append("MPS priority low: the DRA driver sets none")
    if any(gpu.replicas for gpu in host.gpus) or any(gpu.sharing is Sharing.TIMESLICE for gpu in host.gpus):
        lost.append("a number of programs: any number of pods may name a claim (256 at most)")
    if any(mig.replicas for _, mig in host.instances()):
        lost.append("time-slicing inside MIG devices: pods that name one claim share it, without a number")
    if any(mig.name for _, mig in host.instances()):
        lost.append("names of instances: claims have the profile")
    return lost


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace("'", "\\'")
