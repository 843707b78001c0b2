"""Claims for NVIDIA's DRA driver: per GPU, valid in each version of the API, and strict parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.base.errors import BadUsage, GpushareError, NotSupported
from gpushare.base.model import Priority, TimeSlice, Way
from gpushare.base.units import GIB
from gpushare.export.description import HostDescription
from gpushare.export.dra import claims_export
from tests.errors import fails
from tests.export.hosts import all_loaded, check_kubernetes, gpu, host, loaded, mig, mps, t4s

UNEVEN = host(
    gpu(0, time_slice=TimeSlice.LONG),
    gpu(1, Way.EXCLUSIVE),
    gpu(2, Way.MPS, mps=mps(30.0, memory_limit_bytes=4 * GIB, priority=Priority.LOW)),
    gpu(3, Way.MIG, mig=(mig(0), mig(1), mig(2, mps=mps(50.0)), mig(3, "3g.40gb", replicas=2))),
)


def parameters(claim: Any) -> Any:
    (config,) = claim["spec"]["devices"]["config"]
    assert config["opaque"]["driver"] == "gpu.nvidia.com"
    return config["opaque"]["parameters"]


def test_each_gpu_is_said_by_itself() -> None:
    export = claims_export(UNEVEN)
    # Two of the MIG devices are alike and not shared: one template makes a claim per pod of either.
    assert check_kubernetes(export) == 10
    sliced = loaded(export, "gpu-0-00000000-timeslice.yaml")
    assert sliced["kind"] == "ResourceClaim"
    assert parameters(sliced)["sharing"] == {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}}
    assert loaded(export, "gpu-1-00000001-exclusive.yaml")["kind"] == "ResourceClaimTemplate"
    assert parameters(loaded(export, "gpu-2-00000002-mps.yaml"))["sharing"] == {
        "strategy": "MPS",
        "mpsConfig": {"defaultActiveThreadPercentage": 30, "defaultPinnedDeviceMemoryLimit": "4096Mi"},
    }
    whole = loaded(export, "gpu-3-00000003-mig-1g-10gb.yaml")
    assert whole["kind"] == "ResourceClaimTemplate"
    assert "profile == '1g.10gb'" in str(whole)
    shared = loaded(export, "gpu-3-00000003-mig-1g-10gb-2-mps.yaml")
    assert parameters(shared)["kind"] == "MigDeviceConfig"
    # Time-slicing has no setting on MIG: the claim alone is shared.
    assert "config" not in loaded(export, "gpu-3-00000003-mig-3g-40gb-3-timeslice.yaml")["spec"]["devices"]
    for claim, check in (("gpu-0-00000000-timeslice", 2), ("gpu-2-00000002-mps", 2)):
        pod = loaded(export, f"verify-{claim}.yaml")["spec"]
        assert pod["replicas"] == check
        assert pod["template"]["spec"]["resourceClaims"] == [{"name": "gpu", "resourceClaimName": claim}]
    text = " ".join(export.needs)
    assert "TimeSlicingSettings=true, MPSSupport=true" in text
    assert "gpuResourcesEnabledOverride=true" in text
    assert [line.split(":")[0] for line in export.lost] == [
        "low MPS priority",
        "the number of programs",
        "the number of programs per MIG device",
    ]


@pytest.mark.parametrize(
    ("described", "lost"),
    [
        (host(gpu(0, Way.EXCLUSIVE)), []),
        (host(gpu(0, Way.TIMESLICE)), ["the number of programs"]),
        (host(gpu(0, Way.EXCLUSIVE, replicas=2)), ["the number of programs"]),
        (host(gpu(0, Way.MPS, mps=mps(priority=Priority.LOW))), ["low MPS priority"]),
        (host(gpu(0, Way.MIG, mig=(mig(0, mps=mps(priority=Priority.LOW)),))), ["low MPS priority"]),
        (host(gpu(0, Way.MIG, mig=(mig(0, replicas=2),))), ["the number of programs per MIG device"]),
    ],
)
def test_what_is_lost(described: HostDescription, lost: list[str]) -> None:
    assert [line.split(":")[0] for line in claims_export(described).lost] == lost


def test_claims_of_two_nodes_have_names_of_their_own() -> None:
    other = replace(gpu(0), uuid="GPU-abcdef01-0000-0000-0000-000000000000")
    mine = {document.name for document in claims_export(host(gpu(0))).documents}
    assert not mine & {document.name for document in claims_export(host(other)).documents}


def test_what_excludes_mps() -> None:
    (said,) = [text for text in claims_export(UNEVEN).needs if "exclude MPS" in text]
    # NVMLDeviceHealthCheck excludes DynamicMIG, not MPSSupport (pkg/featuregates).
    assert "DynamicMIG" in said
    assert "NVMLDeviceHealthCheck" not in said
    assert any("gpuCluster.deployCR=true" in text for text in claims_export(t4s()).needs)


def test_names_are_names_of_kubernetes() -> None:
    for one in all_loaded(claims_export(UNEVEN)):
        name = one["metadata"]["name"]
        assert name == name.lower()
        assert all(letter.isalnum() or letter == "-" for letter in name)


@pytest.mark.parametrize(
    ("kubernetes", "api"),
    [
        ("1.32", "v1beta1"),
        ("v1.33", "v1beta2"),
        ("1.34", "v1"),
        ("1.36", "v1"),
        ("v1.34.2", "v1"),
        ("v1.33.1-eks-1a2b", "v1beta2"),
    ],
)
def test_each_version_of_the_api(kubernetes: str, api: str) -> None:
    export = claims_export(UNEVEN, kubernetes=kubernetes)
    assert check_kubernetes(export, ".".join(kubernetes.removeprefix("v").split(".")[:2])) == 10
    assert loaded(export, "gpu-2-00000002-mps.yaml")["apiVersion"] == f"resource.k8s.io/{api}"


@pytest.mark.parametrize(
    ("described", "options", "kind", "code"),
    [
        (t4s(), {"kubernetes": "1.31"}, NotSupported, "no_dra"),
        (t4s(), {"kubernetes": "newest"}, BadUsage, "bad_version"),
        (t4s(), {"kubernetes": "1.34."}, BadUsage, "bad_version"),
        (t4s(sharing=Way.MPS, mps=mps(33.3)), {}, NotSupported, "fractional_threads"),
        (host(gpu(0, Way.MIG, mig=(mig(0, "1c.3g.40gb"),))), {}, NotSupported, "partial_compute_instance"),
        (host(gpu(0, Way.MIG)), {}, NotSupported, "no_device"),
    ],
)
def test_refused(described: HostDescription, options: dict[str, Any], kind: type[GpushareError], code: str) -> None:
    with fails(kind, code):
        claims_export(described, **options)


@given(
    percent=st.none() | st.integers(1, 100),
    mebibytes=st.none() | st.integers(1, 200_000),
    level=st.sampled_from(TimeSlice),
)
def test_what_is_written_means_the_same(percent: int | None, mebibytes: int | None, level: TimeSlice) -> None:
    limits = mps(None if percent is None else float(percent), memory_limit_bytes=mebibytes and mebibytes * 2**20)
    export = claims_export(host(gpu(0, time_slice=level), gpu(1, Way.MPS, mps=limits)))
    devices = loaded(export, "gpu-0-00000000-timeslice.yaml")["spec"]["devices"]
    # The default level needs no parameters, and so no alpha gate.
    assert ("config" in devices) is (level is not TimeSlice.DEFAULT)
    assert any("TimeSlicingSettings" in text for text in export.needs) is (level is not TimeSlice.DEFAULT)
    if "config" in devices:
        sharing = devices["config"][0]["opaque"]["parameters"]["sharing"]
        assert TimeSlice[sharing["timeSlicingConfig"]["interval"].upper()] is level
    sharing = parameters(loaded(export, "gpu-1-00000001-mps.yaml"))["sharing"].get("mpsConfig", {})
    assert sharing.get("defaultActiveThreadPercentage") == percent
    assert sharing.get("defaultPinnedDeviceMemoryLimit") == (None if mebibytes is None else f"{mebibytes}Mi")
