"""Descriptions of hosts, for tests of exports."""

from __future__ import annotations

import io
import warnings
from dataclasses import replace
from typing import Any

import pytest
import yaml

from gpushare.base.model import Way
from gpushare.base.units import GIB
from gpushare.export.description import GpuDescription, HostDescription, MigDescription
from gpushare.export.document import Export
from gpushare.export.k8s import PLUGIN_MAP
from gpushare.hostfile.file import MpsWish
from gpushare.mps.limits import Limits
from tests.export.dra_parameters import check_parameters
from tests.export.plugin_config import from_config

T4_BYTES = 15 * GIB


def gpu(index: int = 0, sharing: Way = Way.TIMESLICE, **changes: Any) -> GpuDescription:
    """Return a T4, or with MIG devices an H100."""
    is_mig = sharing is Way.MIG
    found = GpuDescription(
        index=index,
        uuid=f"GPU-{index:08x}-0000-0000-0000-000000000000",
        sharing=sharing,
        name="NVIDIA H100 80GB HBM3" if is_mig else "Tesla T4",
        minor=index,
        memory_total_bytes=80 * GIB if is_mig else T4_BYTES,
        compute_capability=(9, 0) if is_mig else (7, 5),
        mig_capable=is_mig,
    )
    return replace(found, **changes)


def mig(number: int = 0, profile: str = "1g.10gb", **changes: Any) -> MigDescription:
    """Return a MIG device."""
    found = MigDescription(
        profile=profile,
        uuid=f"MIG-{number:08x}-0000-0000-0000-000000000000",
        index=number,
        start=number,
        capabilities=(100 + 2 * number, 101 + 2 * number),
    )
    return replace(found, **changes)


def host(*gpus: GpuDescription, **changes: Any) -> HostDescription:
    """Return a host with these GPUs."""
    return replace(HostDescription(gpus=gpus, driver="580.0", node="gpu01"), **changes)


def t4s(count: int = 4, **changes: Any) -> HostDescription:
    """Return a host with time-sliced T4s."""
    return host(*(gpu(index, **changes) for index in range(count)))


def mps(percent: float | None = 25.0, **changes: Any) -> MpsWish:
    """Return an MPS daemon."""
    limits = {name: changes.pop(name) for name in ("memory_limit_bytes", "priority") if name in changes}
    found = MpsWish(limits=Limits(threads_percent=percent, **limits), pipe_directory="/run/gpushare/mps/gpu-0/pipe")
    return replace(found, **changes)


def text(found: Export, name: str) -> str:
    """Return the text of a document."""
    return next(document.text for document in found.documents if document.name == name)


def loaded(found: Export, name: str) -> Any:
    """Return a YAML document."""
    return _taken(yaml.safe_load(text(found, name)))


def all_loaded(found: Export) -> list[Any]:
    """Return all YAML documents."""
    return [
        _taken(yaml.safe_load(io.StringIO(document.text))) for document in found.documents if document.kind == "yaml"
    ]


def _taken(document: Any) -> Any:
    """Return a document that NVIDIA's own parser takes."""
    kind = document.get("kind")
    if kind == "ConfigMap" and document["metadata"]["name"] == PLUGIN_MAP:
        for config in document["data"].values():
            from_config(yaml.safe_load(config))
    elif kind in {"ResourceClaim", "ResourceClaimTemplate"}:
        spec = document["spec"] if kind == "ResourceClaim" else document["spec"]["spec"]
        for device in spec["devices"].get("config", ()):
            check_parameters(device["opaque"]["parameters"])
    return document


def check_kubernetes(found: Export, version: str = "1.34") -> int:
    """Check what Kubernetes itself defines against its schema, strictly; return how many documents that were."""
    validate = pytest.importorskip("kubernetes_validate").validate
    core = [one for one in all_loaded(found) if one["apiVersion"] in {"v1", "apps/v1"} or "k8s.io" in one["apiVersion"]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for one in core:
            validate(one, version, strict=True)
    return len(core)
