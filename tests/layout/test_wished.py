"""The host as gpushare.yaml wants it, for other engines: every word of the file arrives."""

from __future__ import annotations

import pytest

from gpushare.errors import NotSupported
from gpushare.layout import dra, k8s, mig_parted, slurm
from gpushare.layout.description import HostDescription, Sharing
from gpushare.layout.hostfile_parse import parse
from gpushare.layout.node_sharing import of_node
from gpushare.layout.wished import wished
from gpushare.model import ComputeMode, Priority, TimeSlice
from gpushare.sim.catalogue import profiles_of
from gpushare.sim.models import find_model
from gpushare.units import GIB
from tests.layout.hosts import check_kubernetes, gpu, host, mig, mps

PROFILES = profiles_of(find_model("h100-80gb"))
H100S = host(*(gpu(index, name="NVIDIA H100 80GB HBM3", mig_capable=True) for index in range(4)))


def read(*entries: str, described: HostDescription = H100S) -> HostDescription:
    """Return the host with these ways of sharing, one per GPU."""
    lines = [f"- {{match: {{index: {index}}}, {entry}}}" for index, entry in enumerate(entries)]
    found = parse("version: 1\ngpus:\n" + "\n".join(lines) + "\n", "x")
    by_index = {int(one.match.values[0]): one for one in found.entries}
    return wished(described, by_index, dict.fromkeys(by_index, PROFILES))


def test_each_way_of_sharing() -> None:
    found = read(
        "timeslice: {level: long, replicas: 3}",
        "mps: {threads: 25, memory: 4G, priority: low, exclusive: true, replicas: 4}",
        "exclusive: true",
    )
    sliced, clients, alone, untouched = found.gpus
    assert (sliced.sharing, sliced.time_slice, sliced.replicas) == (Sharing.TIMESLICE, TimeSlice.LONG, 3)
    assert clients.mps is not None
    assert (clients.mps.threads_percent, clients.mps.memory_limit_bytes) == (25.0, 4 * GIB)
    assert (clients.mps.priority, clients.replicas) == (Priority.LOW, 4)
    assert clients.compute_mode is alone.compute_mode is ComputeMode.EXCLUSIVE_PROCESS
    assert alone.sharing is Sharing.EXCLUSIVE
    # No entry is for it.
    assert untouched == H100S.gpus[3]
    # What was there before and is not wished for is gone.
    before = host(gpu(0, Sharing.MIG, mig=(mig(),)), gpu(1, Sharing.MPS, mps=mps(), time_slice=TimeSlice.LONG))
    assert read("timeslice: default", described=before).gpus[0].mig == ()
    assert read("exclusive: true", "exclusive: true", described=before).gpus[1].mps is None


def test_mig_by_size_with_parts_and_sharing_inside() -> None:
    found = read(
        'mig: ["3g:4", {wish: "1g*2", mps: {threads: 50}}, "1c.2g.20gb*2", {wish: "1g.10gb", name: dev}]'
    ).gpus[0]
    assert [(one.profile, one.start, one.name) for one in found.mig] == [
        ("3g.40gb", 4, None),
        ("1g.10gb", None, None),
        ("1g.10gb", None, None),
        ("1c.2g.20gb", None, None),
        ("1c.2g.20gb", None, None),
        ("1g.10gb", None, "dev"),
    ]
    assert [one.mps is not None for one in found.mig] == [False, True, True, False, False, False]
    assert [one.index for one in found.mig] == list(range(6))


def test_a_profile_that_the_gpu_never_has() -> None:
    with pytest.raises(NotSupported) as refused:
        read('mig: ["9g.99gb"]')
    assert refused.value.code == "mig_profile_unknown"


def test_engines_take_it() -> None:
    alike = read(*['mig: [{wish: "1g.10gb*7", timeslice: {replicas: 2}}]'] * 4)
    assert of_node(alike).capacity(alike) == {"nvidia.com/mig-1g.10gb": 56}
    assert check_kubernetes(k8s.export(alike)) == 3
    # Each device is shared by its own pods, so each has its own claim.
    claims = [one.name for one in dra.export(alike).documents if not one.name.startswith("verify-")]
    assert len(claims) == len(set(claims)) == 28
    assert check_kubernetes(dra.export(alike)) == 56
    plain = read(*['mig: ["1g.10gb*7"]'] * 4)
    assert mig_parted.config_of(plain, "x")["mig-configs"]["x"] == [
        {"devices": "all", "mig-enabled": True, "mig-devices": {"1g.10gb": 7}}
    ]
    assert "gpu:nvidia_h100_80gb_hbm3_1g.10gb:28" in slurm.export(plain).documents[1].text
    with pytest.raises(NotSupported) as refused:
        # What is not there yet has no device nodes.
        slurm.export(plain, autodetect="off")
    assert refused.value.code == "no_capabilities"
