"""The simulated libnvidia-ml: MIG profiles, instances and MIG devices."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from gpushare.gpu_models import GpuModel, find_model, load_models
from gpushare.sim.mig import place_instances
from gpushare.sim.state import StateFile
from tests.sim.nvml_host import add_process, free_count, initialised, new_host

# nvidia-smi mig -lgip and -lgipp, and nvmlDeviceGetGpuInstanceProfileInfoV, of an idle H200, driver 580.159.04:
# enum: name, id, slices, instances, free, SM, CE, DEC, ENC, JPEG, OFA, MiB, starts, size.
H200 = {
    0: ("MIG 1g.18gb", 19, 1, 7, 7, 16, 1, 1, 0, 1, 0, 16384, [0, 1, 2, 3, 4, 5, 6], 1),
    7: ("MIG 1g.18gb+me", 20, 1, 1, 1, 16, 1, 1, 0, 1, 1, 16384, [0, 1, 2, 3, 4, 5, 6], 1),
    9: ("MIG 1g.35gb", 15, 1, 4, 4, 26, 1, 1, 0, 1, 0, 33280, [0, 2, 4, 6], 2),
    1: ("MIG 2g.35gb", 14, 2, 3, 3, 32, 2, 2, 0, 2, 0, 33280, [0, 2, 4], 2),
    2: ("MIG 3g.71gb", 9, 3, 2, 2, 60, 3, 3, 0, 3, 0, 71424, [0, 4], 4),
    3: ("MIG 4g.71gb", 5, 4, 1, 1, 64, 4, 4, 0, 4, 0, 71424, [0], 4),
    4: ("MIG 7g.141gb", 0, 7, 1, 1, 132, 8, 7, 0, 7, 1, 143360, [0], 8),
}


def mig_host(spec: str, requests: list[str]) -> StateFile:
    file = new_host(spec)
    with file.changed() as state:
        state.gpus[0] = place_instances(state.gpus[0], find_model(state.gpus[0].model), requests)
    return file


def placements(nvml: Any, handle: Any, profile_id: int) -> list[tuple[int, int]]:
    count = ctypes.c_uint()
    nvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, profile_id, None, ctypes.byref(count))
    array = (nvml.c_nvmlGpuInstancePlacement_t * count.value)()
    nvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, profile_id, array, ctypes.byref(count))
    return [(one.start, one.size) for one in array]


def row(nvml: Any, handle: Any, number: int, file: StateFile) -> tuple[Any, ...]:
    info = nvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, number)
    free = free_count(file, info.id)
    engines = (info.copyEngineCount, info.decoderCount, info.encoderCount, info.jpegCount, info.ofaCount)
    places = placements(nvml, handle, info.id)
    head = (info.name, info.id, info.sliceCount, info.instanceCount, free, info.multiprocessorCount)
    return (*head, *engines, info.memorySizeMB, [start for start, _ in places], places[0][1])


def test_the_profiles_of_an_h200_are_those_of_the_real_one() -> None:
    file = new_host("sim:h200")
    with initialised(file) as (nvml, _):
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
        for number in range(17):
            if number in H200:
                assert row(nvml, handle, number, file) == H200[number]
            else:
                with pytest.raises(nvml.NVMLError_NotSupported):
                    nvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, number)
        with pytest.raises(nvml.NVMLError_InvalidArgument):
            nvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, 17)


def test_profile_structs_of_every_version_agree() -> None:
    with initialised(new_host("sim:h200")) as (nvml, _):
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
        for version in (1, 2):
            profile = nvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, 2, version=version)
            assert (profile.id, profile.memorySizeMB) == (9, 71424)


@pytest.mark.parametrize("model", load_models().values(), ids=lambda model: model.key)
def test_every_model_lists_its_published_profiles(model: GpuModel) -> None:
    file = new_host(f"sim:{model.short}")
    with initialised(file) as (nvml, _):
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
        names = []
        for number in range(17):
            try:
                info = nvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, number)
            except nvml.NVMLError_NotSupported:
                continue
            names.append(info.name)
            assert info.memorySizeMB > 0
            assert info.multiprocessorCount > 0
            assert 0 < free_count(file, info.id) <= info.instanceCount
        assert sorted(names) == sorted(f"MIG {profile.name}" for profile in model.profiles if profile.id is not None)


def test_without_mig_there_is_no_mig_device() -> None:
    with initialised(new_host("sim:t4,h200")) as (nvml, _):
        for index, error in enumerate((nvml.NVMLError_NotSupported, nvml.NVMLError_NotFound)):
            with pytest.raises(error):
                nvml.nvmlDeviceGetMigDeviceHandleByIndex(nvml.nvmlDeviceGetHandleByIndex(index), 0)


def test_mig_devices_lead_to_their_ids_and_back() -> None:
    file = mig_host("sim:h200", ["3g.71gb:0", "1g.18gb+me:6"])
    state = file.read()
    assert state is not None
    with initialised(file) as (nvml, _):
        gpu = nvml.nvmlDeviceGetHandleByIndex(0)
        assert nvml.nvmlDeviceGetMigMode(gpu) == [1, 1]
        assert nvml.nvmlDeviceGetMaxMigDeviceCount(gpu) == 7
        devices = [nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index) for index in range(2)]
        with pytest.raises(nvml.NVMLError_NotFound):
            nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 2)
        assert [nvml.nvmlDeviceGetUUID(device) for device in devices] == [mig.uuid for mig in state.gpus[0].mig]
        assert [nvml.nvmlDeviceGetGpuInstanceId(device) for device in devices] == [1, 13]
        assert [nvml.nvmlDeviceGetComputeInstanceId(device) for device in devices] == [0, 0]
        # The MIG device has the name of its compute instance, without +me.
        assert [nvml.nvmlDeviceGetName(device) for device in devices] == [
            "NVIDIA H200 MIG 3g.71gb",
            "NVIDIA H200 MIG 1g.18gb",
        ]
        for device in devices:
            same = nvml.nvmlDeviceGetHandleByUUID(nvml.nvmlDeviceGetUUID(device))
            assert nvml.nvmlDeviceGetGpuInstanceId(same) == nvml.nvmlDeviceGetGpuInstanceId(device)
        attributes = nvml.nvmlDeviceGetAttributes(devices[0])
        assert (attributes.multiprocessorCount, attributes.memorySizeMB) == (60, 71424)
        assert (attributes.gpuInstanceSliceCount, attributes.sharedCopyEngineCount) == (3, 3)
        assert nvml.nvmlDeviceGetMemoryInfo(devices[1]).total == 16384 * 2**20


def test_a_mig_device_sees_only_its_own_processes() -> None:
    file = mig_host("sim:h200", ["3g.71gb:0", "1g.18gb:6"])
    with file.changed() as state:
        at = [
            {"gpu_instance_id": mig.gpu_instance_id, "compute_instance_id": mig.compute_instance_id}
            for mig in state.gpus[0].mig
        ]
        mine = [add_process(state, state.gpus[0], memory_bytes=2**30, sm_percent=50, **one) for one in at]
    with initialised(file) as (nvml, _):
        gpu = nvml.nvmlDeviceGetHandleByIndex(0)
        everybody = nvml.nvmlDeviceGetComputeRunningProcesses(gpu)
        assert [(one.pid, one.gpuInstanceId, one.computeInstanceId) for one in everybody] == [
            (mine[0].pid, 1, 0),
            (mine[1].pid, 13, 0),
        ]
        for index, process in enumerate(mine):
            device = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)
            assert [process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(device)] == [process.pid]
            assert nvml.nvmlDeviceGetMemoryInfo(device).used == 2**30
            for call in (nvml.nvmlDeviceGetUtilizationRates, nvml.nvmlDeviceGetTotalEnergyConsumption):
                with pytest.raises(nvml.NVMLError_NotSupported):
                    call(device)
        with pytest.raises(nvml.NVMLError_NotSupported):
            nvml.nvmlDeviceGetProcessUtilization(gpu, 0)
        with pytest.raises(nvml.NVMLError_NotSupported):
            nvml.nvmlDeviceGetUtilizationRates(gpu)


def test_free_counts_fall_as_instances_are_there() -> None:
    file = mig_host("sim:h200", ["3g.71gb:0", "1g.18gb+me:4"])
    with initialised(file) as (nvml, _):
        gpu = nvml.nvmlDeviceGetHandleByIndex(0)
        free = {value[1]: free_count(file, value[1]) for value in H200.values()}
        assert free == {19: 2, 20: 0, 15: 1, 14: 0, 9: 0, 5: 0, 0: 0}
        # Possible placements are all there are, not only the free ones.
        assert placements(nvml, gpu, 9) == [(0, 4), (4, 4)]


def test_gpu_instances_and_their_compute_instances_can_be_read() -> None:
    with initialised(mig_host("sim:h200", ["1g.18gb:4", "1g.18gb:6", "2g.35gb:0", "1g.35gb:2"])) as (nvml, _):
        gpu = nvml.nvmlDeviceGetHandleByIndex(0)
        count = ctypes.c_uint()
        array = (nvml.c_nvmlGpuInstance_t * 7)()
        nvml.nvmlDeviceGetGpuInstances(gpu, 19, array, ctypes.byref(count))
        infos = [nvml.nvmlGpuInstanceGetInfo(array[index]) for index in range(count.value)]
        assert [(info.id, info.profileId, info.placement.start, info.placement.size) for info in infos] == [
            (11, 19, 4, 1),
            (13, 19, 6, 1),
        ]
        assert nvml.nvmlDeviceGetName(infos[0].device) == "NVIDIA H200"
        two = nvml.nvmlDeviceGetGpuInstanceById(gpu, 3)
        with pytest.raises(nvml.NVMLError_NotFound):
            nvml.nvmlDeviceGetGpuInstanceById(gpu, 0)
        profiles = [nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(two, number, 0) for number in (0, 1)]
        assert [(profile.name, profile.instanceCount, profile.multiprocessorCount) for profile in profiles] == [
            ("MIG 1c.2g.35gb", 2, 16),
            ("MIG 2g.35gb", 1, 32),
        ]
        with pytest.raises(nvml.NVMLError_NotSupported):
            nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(two, 4, 0)
        with pytest.raises(nvml.NVMLError_InvalidArgument):
            nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(two, 9, 0)
        computes = (nvml.c_nvmlComputeInstance_t * 2)()
        nvml.nvmlGpuInstanceGetComputeInstances(two, 1, computes, ctypes.byref(count))
        assert count.value == 1
        info = nvml.nvmlComputeInstanceGetInfo(computes[0])
        assert (info.id, info.profileId, info.placement.start, info.placement.size) == (0, 1, 0, 2)
        assert nvml.nvmlGpuInstanceGetInfo(info.gpuInstance).id == 3
        # Double memory has a compute instance profile of its own, 7.
        double = nvml.nvmlDeviceGetGpuInstanceById(gpu, 4)
        info = nvml.nvmlComputeInstanceGetInfo(nvml.nvmlGpuInstanceGetComputeInstanceById(double, 0))
        assert info.profileId == 7


def test_a_handle_of_an_instance_that_is_gone_is_refused() -> None:
    file = mig_host("sim:h200", ["3g.71gb"])
    with initialised(file) as (nvml, _):
        device = nvml.nvmlDeviceGetMigDeviceHandleByIndex(nvml.nvmlDeviceGetHandleByIndex(0), 0)
        with file.changed() as state:
            state.gpus[0].mig.clear()
        with pytest.raises(nvml.NVMLError_InvalidArgument):
            nvml.nvmlDeviceGetUUID(device)
