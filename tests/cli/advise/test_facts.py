"""What is gathered of a host for advice: nothing invented, little asked, nobody lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpushare.advice.facts import HostFacts, host_facts
from gpushare.base.errors import DriverNotLoaded
from gpushare.base.model import ComputeMode
from gpushare.connect import connect
from gpushare.gpu_models import load_models
from gpushare.host.host import Host
from gpushare.host.nvml import NvmlReader, cores_per_multiprocessor
from gpushare.sim import admin, open_simulated
from gpushare.snapshot import HostState
from tests.cli.advise.asking import advised
from tests.cli.drive import World

# The sweep's, and what only advice asks: capability, cores, virtualisation.
CALLS_PER_GPU = 12 + 3
# Where the catalogue itself knows all of it.
KNOWN = [
    key
    for key, model in load_models().items()
    if None not in {model.multiprocessors, model.compute_capability, model.time_slice}
    and all(profile.id is not None for profile in model.profiles)
]


def gather(host: Host) -> HostFacts:
    return host_facts(HostState(host))


def test_most_models_are_known():
    assert {"h200-141gb", "a100-80gb", "a30-24gb", "t4-16gb", "b200-180gb"} <= set(KNOWN)
    assert len(KNOWN) > 15


@pytest.mark.parametrize("key", KNOWN)
def test_the_facts_are_the_models(key):
    model = load_models()[key]
    (gpu,) = gather(connect(f"sim:{model.short}")).gpus
    assert (gpu.name, gpu.multiprocessors, gpu.mig_capable) == (model.name, model.multiprocessors, bool(model.mig))
    assert ".".join(map(str, gpu.compute_capability)) == model.compute_capability
    assert gpu.largest_instance_count == max((profile.instances for profile in model.profiles), default=None)
    assert gpu.time_slice_settable is bool(model.time_slice)


def test_the_facts_of_the_host():
    facts = gather(connect("sim:h200"))
    assert (facts.host, facts.driver, facts.driver_major) == ("sim:h200", "580.159.04", 580)
    assert facts.root is True
    assert (facts.mps_program, facts.mps_version) == (True, 13000)
    (gpu,) = facts.gpus
    assert (gpu.compute_mode, gpu.mig_enabled, gpu.mps_daemons, gpu.processes) == (ComputeMode.DEFAULT, False, 0, 0)
    assert gpu.vgpu_capable is None
    assert gpu.error is None


def test_advice_on_a_few_processes_starts_no_program(cli, monkeypatch):
    versions = []
    monkeypatch.setattr(HostState, "mps_version", property(lambda _: versions.append(1)))
    with monkeypatch.context() as patched:
        patched.setattr(HostState, "start_reading_levels", lambda _: pytest.fail("nvidia-smi"))
        assert advised(cli, "h200", "--processes 4 --memory 8G --no-saturating")["winner"] == "mps"
    assert not versions
    # The version counts where more processes come.
    advised(cli, "h200", "--processes 50 --memory 1G --no-saturating")
    assert versions


def test_daemons_and_processes_are_counted(cli, world):
    cli("mps", "start", "-g", "0").ok()
    world.client()
    admin.add_process(world.spec, "0", memory_bytes=1024**3)
    (gpu,) = gather(world.host).gpus
    assert gpu.mps_daemons == 1
    assert gpu.processes == len({process.pid for process in world.host.nvml.sweep()[0].processes})


def test_instances_are_in_the_layout(world):
    world.mig("3g.71gb", "1g.18gb")
    (gpu,) = gather(world.host).gpus
    assert gpu.mig_enabled is True
    assert sorted(instance.profile.name for instance in gpu.layout.instances) == ["1g.18gb", "3g.71gb"]


def test_a_lost_gpu_costs_itself_only():
    World("sim:2xh200").fault("lost", gpu="1")
    first, lost = gather(connect("sim:2xh200")).gpus
    assert (first.multiprocessors, "fell off the bus" in lost.error) == (132, True)
    assert (lost.index, lost.multiprocessors, lost.mig_capable, lost.processes) == (1, None, None, None)


def test_what_nvml_does_not_support_is_unknown(world):
    for what in ("mig", "compute-mode", "memory", "processes", "nvmlDeviceGetNumGpuCores"):
        world.fault("not-supported", what, gpu="0")
    (gpu,) = gather(world.host).gpus
    assert (gpu.mig_capable, gpu.layout, gpu.compute_mode) == (False, None, None)
    assert (gpu.memory_total_bytes, gpu.multiprocessors, gpu.processes) == (None, None, None)


@pytest.mark.parametrize(("program", "field"), [("nvidia-smi", "levels"), ("nvidia-cuda-mps-control", "mps")])
def test_a_program_that_is_missing_costs_its_facts_only(world, program, field):
    world.fault("missing", program)
    facts = gather(world.host)
    assert facts.mps_program is (field != "mps")
    assert facts.mps_version == (None if field == "mps" else 13000)
    assert facts.gpus[0].time_slice_settable is (None if field == "levels" else True)


def test_what_cannot_be_seen_is_unknown_and_without_a_driver_there_are_no_facts(world):
    world.fault("blind")
    assert gather(world.host).gpus[0].processes is None
    world.fault("no-driver")
    with pytest.raises(DriverNotLoaded):
        gather(world.host)


@pytest.mark.parametrize(("mode", "capable"), [(0, None), (1, None), (2, False), (3, True), (4, True)])
def test_vgpu_by_the_virtualisation_mode(world, monkeypatch, mode, capable):
    """nvmlGpuVirtualizationMode_t: none, passthrough, guest, host with vGPUs, host with vSGA."""
    import pynvml

    monkeypatch.setattr(pynvml, "nvmlDeviceGetVirtualizationMode", lambda _handle: mode)
    assert gather(world.host).gpus[0].vgpu_capable is capable


@pytest.mark.parametrize("spec", ["sim:8xt4", "sim:4xa30"])
def test_little_is_asked(spec):
    simulated = open_simulated(spec)
    host = replace(connect(spec), nvml=NvmlReader(simulated.library))
    gather(host)
    calls = simulated.library.calls
    mig = sum(count for name, count in calls.items() if "GpuInstance" in name)
    asked = sum(count for name, count in calls.items() if name.startswith("nvmlDevice")) - mig
    count = int(spec[4])
    assert asked <= CALLS_PER_GPU * count + 1, calls
    # Per profile at most the versions of one query, and its placements; nothing without MIG.
    assert mig <= (80 * count if "a30" in spec else 0), calls


@pytest.mark.parametrize(
    ("capability", "cores"), [((3, 7), None), ((6, 0), 64), ((6, 1), 128), ((7, 0), 64), ((7, 5), 64), ((8, 0), 64), ((8, 6), 128), ((9, 0), 128), ((12, 0), 128)]
)  # fmt: skip
def test_cores_of_one_multiprocessor(capability, cores):
    assert cores_per_multiprocessor(capability) == cores
