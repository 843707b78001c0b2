"""The simulated libnvidia-ml changes MIG: every return code, through the real bindings."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpushare.sim import admin
from gpushare.sim import mig as mig_layout
from gpushare.sim.state import SimulatedGpu, StateFile
from tests.sim.nvml_host import add_process, free_count, initialised, new_host, state_of

PROJECT = Path(__file__).resolve().parent.parent.parent
H100, A100 = "sim:h100-80gb", "sim:a100-80gb"
# Profile ids (-lgip) of both.
G1, G1_ME, G1_DOUBLE, G2, G3, G4, G7 = 19, 20, 15, 14, 9, 5, 0
C1, C2, C3, C4, C7 = range(5)


def gpu_of(file: StateFile) -> SimulatedGpu:
    return state_of(file).gpus[0]


def layout_of(file: StateFile) -> list[tuple[str, int, int]]:
    return [
        (instance.profile, instance.start, instance.gpu_instance_id)
        for instance in mig_layout.gpu_instances(gpu_of(file))
    ]


@contextmanager
def host(spec: str, *, mig: bool = True, **changes: Any) -> Iterator[tuple[Any, Any, StateFile]]:
    """Yield pynvml, the handle of the only GPU, and the state file of a host; with MIG on."""
    file = new_host(spec, **changes)
    with initialised(file) as (nvml, _):
        gpu = nvml.nvmlDeviceGetHandleByIndex(0)
        if mig:
            with file.changed() as state:
                state.gpus[0].mig_mode = state.gpus[0].mig_pending = 1
        yield nvml, gpu, file


def refused(nvml: Any, code: int, call: Callable[..., Any], *arguments: Any) -> None:
    with pytest.raises(nvml.NVMLError) as raised:
        call(*arguments)
    assert raised.value.value == code


def create(nvml: Any, gpu: Any, profile: int, start: int, size: int) -> Any:
    place = nvml.c_nvmlGpuInstancePlacement_t(start=start, size=size)
    return nvml.nvmlDeviceCreateGpuInstanceWithPlacement(gpu, profile, ctypes.byref(place))


def create_compute(nvml: Any, instance: Any, profile: int, start: int, size: int) -> Any:
    place = nvml.c_nvmlComputeInstancePlacement_t(start=start, size=size)
    return nvml.nvmlGpuInstanceCreateComputeInstanceWithPlacement(instance, profile, ctypes.byref(place))


# -- mode -----------------------------------------------------------------------------------------


def test_hopper_switches_at_once_also_beside_a_process() -> None:
    with host("sim:h200", mig=False) as (nvml, gpu, file):
        with file.changed() as state:
            busy = add_process(state, state.gpus[0], memory_bytes=2**30)
        assert nvml.nvmlDeviceSetMigMode(gpu, 1) == nvml.NVML_SUCCESS
        assert nvml.nvmlDeviceGetMigMode(gpu) == [1, 1]
        assert [process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(gpu)] == [busy.pid]
        # The check moved to the first GPU instance.
        refused(nvml, nvml.NVML_ERROR_IN_USE, nvml.nvmlDeviceCreateGpuInstance, gpu, G1)
        refused(nvml, nvml.NVML_ERROR_IN_USE, create, nvml, gpu, G1, 0, 1)
        assert layout_of(file) == []
        with file.changed() as state:
            state.processes.clear()
        nvml.nvmlDeviceCreateGpuInstance(gpu, G1)
        assert nvml.nvmlDeviceGetMigMode(gpu) == [1, 1]


def test_ampere_switches_when_idle_and_stays_pending_when_busy() -> None:
    with host(A100, mig=False) as (nvml, gpu, file):
        with file.changed() as state:
            add_process(state, state.gpus[0], graphics=True)
        assert nvml.nvmlDeviceSetMigMode(gpu, 1) == nvml.NVML_ERROR_IN_USE
        assert nvml.nvmlDeviceGetMigMode(gpu) == [0, 1]
        # Asking for what is in force takes the pending change back.
        assert nvml.nvmlDeviceSetMigMode(gpu, 0) == nvml.NVML_SUCCESS
        assert nvml.nvmlDeviceGetMigMode(gpu) == [0, 0]
        assert len(state_of(file).processes) == 1
        with file.changed() as state:
            state.processes.clear()
        assert nvml.nvmlDeviceSetMigMode(gpu, 1) == nvml.NVML_SUCCESS
        assert nvml.nvmlDeviceGetMigMode(gpu) == [1, 1]
        assert nvml.nvmlDeviceSetMigMode(gpu, 0) == nvml.NVML_SUCCESS
        assert nvml.nvmlDeviceGetMigMode(gpu) == [0, 0]


@pytest.mark.parametrize("spec", [H100, A100])
def test_mig_is_not_switched_off_over_instances(spec: str) -> None:
    with host(spec) as (nvml, gpu, file):
        instance = nvml.nvmlDeviceCreateGpuInstance(gpu, G7)
        assert nvml.nvmlDeviceSetMigMode(gpu, 0) == nvml.NVML_ERROR_IN_USE
        assert nvml.nvmlDeviceGetMigMode(gpu) == [1, 0]
        assert layout_of(file) == [("7g.80gb", 0, 0)]
        nvml.nvmlGpuInstanceDestroy(instance)
        assert nvml.nvmlDeviceGetMigMode(gpu) == [1, 0]
        assert nvml.nvmlDeviceSetMigMode(gpu, 0) == nvml.NVML_SUCCESS
        assert nvml.nvmlDeviceGetMigMode(gpu) == [0, 0]


def test_a_mode_change_that_needs_a_reset_is_only_pending() -> None:
    with host("sim:h200", mig=False) as (nvml, gpu, _):
        admin.set_fault("sim:h200", "reset-required")
        assert nvml.nvmlDeviceSetMigMode(gpu, 1) == nvml.NVML_ERROR_RESET_REQUIRED
        assert nvml.nvmlDeviceGetMigMode(gpu) == [0, 1]
        admin.clear_faults("sim:h200")
        assert nvml.nvmlDeviceSetMigMode(gpu, 1) == nvml.NVML_SUCCESS
        assert nvml.nvmlDeviceGetMigMode(gpu) == [1, 1]


def test_mig_brings_the_default_compute_mode() -> None:
    with host("sim:h200", mig=False) as (nvml, gpu, _):
        nvml.nvmlDeviceSetComputeMode(gpu, nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS)
        nvml.nvmlDeviceSetMigMode(gpu, 1)
        assert nvml.nvmlDeviceGetComputeMode(gpu) == nvml.NVML_COMPUTEMODE_DEFAULT
        refused(nvml, nvml.NVML_ERROR_NOT_SUPPORTED, nvml.nvmlDeviceSetComputeMode, gpu, 3)


def test_refused_modes() -> None:
    with host("sim:t4", mig=False) as (nvml, gpu, _):
        refused(nvml, nvml.NVML_ERROR_NOT_SUPPORTED, nvml.nvmlDeviceSetMigMode, gpu, 1)
    with host("sim:h200", mig=False) as (nvml, gpu, _):
        refused(nvml, nvml.NVML_ERROR_INVALID_ARGUMENT, nvml.nvmlDeviceSetMigMode, gpu, 2)


def test_only_root_changes_mig() -> None:
    with host(H100) as (nvml, gpu, file):
        three, one = create(nvml, gpu, G3, 0, 4), create(nvml, gpu, G1, 4, 1)
        compute = nvml.nvmlGpuInstanceCreateComputeInstance(three, C1)
        before = layout_of(file)
        admin.set_fault(H100, "user", value="1000")
        code = nvml.NVML_ERROR_NO_PERMISSION
        refused(nvml, code, nvml.nvmlDeviceSetMigMode, gpu, 0)
        refused(nvml, code, nvml.nvmlDeviceCreateGpuInstance, gpu, G1)
        refused(nvml, code, create, nvml, gpu, G1, 5, 1)
        refused(nvml, code, nvml.nvmlGpuInstanceDestroy, one)
        refused(nvml, code, nvml.nvmlGpuInstanceCreateComputeInstance, three, C1)
        refused(nvml, code, create_compute, nvml, three, C1, 0, 1)
        refused(nvml, code, nvml.nvmlComputeInstanceDestroy, compute)
        assert layout_of(file) == before
        assert len(gpu_of(file).mig) == 1


# -- GPU instances --------------------------------------------------------------------------------


def test_an_explicit_place_gives_the_id_of_the_place_and_a_bare_gpu_instance() -> None:
    with host(H100) as (nvml, gpu, file):
        instance = create(nvml, gpu, G2, 2, 2)
        info = nvml.nvmlGpuInstanceGetInfo(instance)
        assert (info.id, info.profileId, info.placement.start, info.placement.size) == (4, G2, 2, 2)
        assert nvml.nvmlDeviceGetUUID(info.device) == gpu_of(file).uuid
        # No MIG device yet, and the room is taken.
        with pytest.raises(nvml.NVMLError_NotFound):
            nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0)
        assert free_count(file, G2) == 2
        assert nvml.nvmlGpuInstanceGetInfo(nvml.nvmlDeviceGetGpuInstanceById(gpu, 4)).profileId == G2
        rows, count = (nvml.c_nvmlGpuInstance_t * 3)(), ctypes.c_uint()
        nvml.nvmlDeviceGetGpuInstances(gpu, G2, rows, ctypes.byref(count))
        assert count.value == 1


def test_refused_gpu_instances() -> None:
    with host(H100, mig=False) as (nvml, gpu, _):
        refused(nvml, nvml.NVML_ERROR_NOT_SUPPORTED, nvml.nvmlDeviceCreateGpuInstance, gpu, G1)
        refused(nvml, nvml.NVML_ERROR_NOT_SUPPORTED, create, nvml, gpu, G1, 0, 1)
    with host(H100) as (nvml, gpu, file):
        invalid, no_room = nvml.NVML_ERROR_INVALID_ARGUMENT, nvml.NVML_ERROR_INSUFFICIENT_RESOURCES
        refused(nvml, invalid, nvml.nvmlDeviceCreateGpuInstance, gpu, 1)
        refused(nvml, invalid, create, nvml, gpu, G3, 2, 4)
        refused(nvml, invalid, create, nvml, gpu, G3, 0, 3)
        create(nvml, gpu, G3, 0, 4)
        refused(nvml, no_room, create, nvml, gpu, G3, 0, 4)
        refused(nvml, no_room, create, nvml, gpu, G1, 3, 1)
        refused(nvml, no_room, nvml.nvmlDeviceCreateGpuInstance, gpu, G7)
        create(nvml, gpu, G1_ME, 6, 1)
        # A second +me has a place, and no media engines.
        refused(nvml, no_room, create, nvml, gpu, G1_ME, 4, 1)
        refused(nvml, no_room, nvml.nvmlDeviceCreateGpuInstance, gpu, G1_ME)
        assert layout_of(file) == [("3g.40gb", 0, 1), ("1g.10gb+me", 6, 13)]


def test_the_placement_is_passed_by_reference() -> None:
    """Without byref the real library takes the numbers for an address; the simulated one must not let that pass."""
    with host(H100) as (nvml, gpu, file):
        place = nvml.c_nvmlGpuInstancePlacement_t(start=4, size=4)
        wrong = nvml.NVML_ERROR_INVALID_ARGUMENT
        refused(nvml, wrong, nvml.nvmlDeviceCreateGpuInstanceWithPlacement, gpu, G3, place)
        refused(nvml, wrong, nvml.nvmlDeviceCreateGpuInstanceWithPlacement, gpu, G3, None)
        instance = nvml.nvmlDeviceCreateGpuInstanceWithPlacement(gpu, G3, ctypes.byref(place))
        inside = nvml.c_nvmlComputeInstancePlacement_t(start=0, size=1)
        refused(nvml, wrong, nvml.nvmlGpuInstanceCreateComputeInstanceWithPlacement, instance, C1, inside)
        nvml.nvmlGpuInstanceCreateComputeInstanceWithPlacement(instance, C1, ctypes.byref(inside))
        assert layout_of(file) == [("3g.40gb", 4, 2)]
        assert len(gpu_of(file).mig) == 1


# -- compute instances ----------------------------------------------------------------------------


def test_destroying_is_refused_while_something_is_inside() -> None:
    with host(H100) as (nvml, gpu, file):
        instance = create(nvml, gpu, G3, 4, 4)
        compute = nvml.nvmlGpuInstanceCreateComputeInstance(instance, C3)
        with file.changed() as state:
            add_process(state, state.gpus[0], gpu_instance_id=2, compute_instance_id=0)
        refused(nvml, nvml.NVML_ERROR_IN_USE, nvml.nvmlComputeInstanceDestroy, compute)
        refused(nvml, nvml.NVML_ERROR_IN_USE, nvml.nvmlGpuInstanceDestroy, instance)
        with file.changed() as state:
            state.processes.clear()
        refused(nvml, nvml.NVML_ERROR_IN_USE, nvml.nvmlGpuInstanceDestroy, instance)
        nvml.nvmlComputeInstanceDestroy(compute)
        assert layout_of(file) == [("3g.40gb", 4, 2)]
        assert gpu_of(file).mig == []
        nvml.nvmlGpuInstanceDestroy(instance)
        assert layout_of(file) == []
        # The handles lead nowhere now.
        refused(nvml, nvml.NVML_ERROR_INVALID_ARGUMENT, nvml.nvmlComputeInstanceDestroy, compute)
        refused(nvml, nvml.NVML_ERROR_INVALID_ARGUMENT, nvml.nvmlGpuInstanceDestroy, instance)
        with pytest.raises(nvml.NVMLError_NotFound):
            nvml.nvmlDeviceGetGpuInstanceById(gpu, 2)


def test_a_process_in_one_compute_instance_holds_only_that() -> None:
    with host(H100) as (nvml, gpu, file):
        instance = create(nvml, gpu, G2, 0, 2)
        first, second = (nvml.nvmlGpuInstanceCreateComputeInstance(instance, C1) for _ in range(2))
        with file.changed() as state:
            add_process(state, state.gpus[0], gpu_instance_id=3, compute_instance_id=1, memory_bytes=2**30)
        # Memory is the GPU instance's, also when another compute instance uses it.
        device = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0)
        assert nvml.nvmlDeviceGetMemoryInfo(device).used == 2**30
        assert nvml.nvmlDeviceGetComputeRunningProcesses(device) == []
        refused(nvml, nvml.NVML_ERROR_IN_USE, nvml.nvmlComputeInstanceDestroy, second)
        nvml.nvmlComputeInstanceDestroy(first)
        assert [instance.compute_instance_id for instance in gpu_of(file).mig] == [1]


def test_partial_compute_instances_show_their_part() -> None:
    with host("sim:h200") as (nvml, gpu, _):
        instance = create(nvml, gpu, G3, 0, 4)
        nvml.nvmlGpuInstanceCreateComputeInstance(instance, C2)
        create_compute(nvml, instance, C1, 2, 1)
        devices = [nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index) for index in range(2)]
        names = [nvml.nvmlDeviceGetName(device) for device in devices]
        assert names == ["NVIDIA H200 MIG 2c.3g.71gb", "NVIDIA H200 MIG 1c.3g.71gb"]
        attributes = [nvml.nvmlDeviceGetAttributes(device) for device in devices]
        shown = [
            (one.multiprocessorCount, one.gpuInstanceSliceCount, one.computeInstanceSliceCount, one.memorySizeMB)
            for one in attributes
        ]
        # A 1c of a 3g has 16 SMs (H100, driver 580).
        assert shown == [(32, 3, 2, 71424), (16, 3, 1, 71424)]


def test_refused_compute_instances() -> None:
    with host("sim:h200") as (nvml, gpu, file):
        two, double = create(nvml, gpu, G2, 0, 2), create(nvml, gpu, G1_DOUBLE, 2, 2)
        make = nvml.nvmlGpuInstanceCreateComputeInstance
        refused(nvml, nvml.NVML_ERROR_INVALID_ARGUMENT, make, two, 9)
        refused(nvml, nvml.NVML_ERROR_NOT_SUPPORTED, make, two, C3)
        refused(nvml, nvml.NVML_ERROR_NOT_SUPPORTED, make, double, C1)
        refused(nvml, nvml.NVML_ERROR_INVALID_ARGUMENT, create_compute, nvml, two, C1, 2, 1)
        refused(nvml, nvml.NVML_ERROR_INVALID_ARGUMENT, create_compute, nvml, two, C1, 0, 2)
        create_compute(nvml, two, C1, 0, 1)
        refused(nvml, nvml.NVML_ERROR_INSUFFICIENT_RESOURCES, create_compute, nvml, two, C1, 0, 1)
        refused(nvml, nvml.NVML_ERROR_INSUFFICIENT_RESOURCES, make, two, C2)
        # One slice with double memory has a profile of its own.
        info = nvml.nvmlComputeInstanceGetInfo(make(double, 7))
        assert (info.id, info.profileId, info.placement.size) == (0, 7, 1)
        assert [(instance.profile, instance.compute_profile) for instance in gpu_of(file).mig] == [
            ("2g.35gb", 0),
            ("1g.35gb", None),
        ]


def test_an_mps_server_holds_its_instance() -> None:
    """The server has a context of its own, though no client is left."""
    from gpushare.sim.state import SimulatedDaemon, SimulatedServer

    with host("sim:h200") as (nvml, gpu, file):
        compute = nvml.nvmlGpuInstanceCreateComputeInstance(create(nvml, gpu, G3, 0, 4), C3)
        with file.changed() as state:
            daemon = SimulatedDaemon(state.new_pid(), 0, "/tmp/p", "/tmp/l", visible=[state.gpus[0].mig[0].uuid])
            daemon.servers.append(SimulatedServer(state.new_pid(), 1000))
            state.daemons.append(daemon)
        refused(nvml, nvml.NVML_ERROR_IN_USE, nvml.nvmlComputeInstanceDestroy, compute)
        with file.changed() as state:
            state.daemons[0].servers.clear()
        nvml.nvmlComputeInstanceDestroy(compute)


# -- faults ---------------------------------------------------------------------------------------


def test_the_nth_changing_call_fails_once() -> None:
    with host("sim:h200") as (nvml, gpu, file):
        admin.set_fault("sim:h200", "fail-step", value="3")
        create(nvml, gpu, G1, 0, 1)
        # A refused call is a call; reading is none.
        refused(nvml, nvml.NVML_ERROR_INSUFFICIENT_RESOURCES, create, nvml, gpu, G1, 0, 1)
        assert free_count(file, G1) == 6
        refused(nvml, nvml.NVML_ERROR_UNKNOWN, create, nvml, gpu, G1, 1, 1)
        assert layout_of(file) == [("1g.18gb", 0, 7)]
        create(nvml, gpu, G1, 1, 1)
        assert state_of(file).fail_step == 0


CRASHING = """
from ctypes import byref
from gpushare.sim.library import SimulatedLibrary
from gpushare.sim.state import StateFile
import pynvml
pynvml.nvmlLib = SimulatedLibrary(StateFile("sim:h200"))
pynvml.nvmlInit()
gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
for start in range(7):
    try:
        pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(gpu, 19, byref(pynvml.c_nvmlGpuInstancePlacement_t(start, 1)))
    except pynvml.NVMLError:
        pass
"""


def test_the_process_dies_right_after_the_nth_change_took_effect() -> None:
    with host("sim:h200") as (nvml, gpu, file):
        create(nvml, gpu, G1, 0, 1)
    admin.set_fault("sim:h200", "crash-step", value="2")
    done = subprocess.run([sys.executable, "-c", CRASHING], cwd=PROJECT, check=False, timeout=120)
    assert done.returncode == 137
    # The first of its calls was refused, which changed nothing and does not count.
    assert layout_of(file) == [("1g.18gb", start, 7 + start) for start in range(3)]
    assert state_of(file).crash_step == 0
    assert subprocess.run([sys.executable, "-c", CRASHING], cwd=PROJECT, check=False, timeout=120).returncode == 0
    assert len(layout_of(file)) == 7
