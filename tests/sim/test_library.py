"""The simulated libnvidia-ml beneath the real pynvml: the library, GPUs, memory, modes, faults."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from gpushare.gpu_models import GpuModel, load_models
from gpushare.sim.library import SimulatedLibrary
from gpushare.sim.state import StateFile
from tests.sim.nvml_host import add_process, initialised, loaded, new_host, state_of

MODELS = list(load_models().values())


def refused(nvml: Any, call: Callable[[], object]) -> int:
    with pytest.raises(nvml.NVMLError) as caught:
        call()
    return int(caught.value.value)


def optional(nvml: Any, call: Callable[[], object]) -> object:
    """Return the answer, or None for NOT_SUPPORTED; anything else is a failure of the test."""
    try:
        return call()
    except nvml.NVMLError_NotSupported:
        return None


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.key)
def test_the_whole_sweep_works_on_every_model(model: GpuModel) -> None:
    with initialised(new_host(f"sim:2x{model.short}")) as (nvml, _):
        assert nvml.nvmlDeviceGetCount() == 2
        handle = nvml.nvmlDeviceGetHandleByIndex(1)
        assert nvml.nvmlDeviceGetName(handle) == model.name
        assert nvml.nvmlDeviceGetMinorNumber(handle) == 1
        same = nvml.nvmlDeviceGetHandleByUUID(nvml.nvmlDeviceGetUUID(handle))
        assert nvml.nvmlDeviceGetMinorNumber(same) == 1
        assert nvml.nvmlDeviceGetComputeMode(handle) == nvml.NVML_COMPUTEMODE_DEFAULT
        assert nvml.nvmlDeviceGetPersistenceMode(handle) == 1
        assert nvml.nvmlDeviceGetUtilizationRates(handle).gpu == 0
        assert nvml.nvmlDeviceGetComputeRunningProcesses(handle) == []
        assert nvml.nvmlDeviceGetMaxMigDeviceCount(handle) == 0
        assert optional(nvml, lambda: nvml.nvmlDeviceGetMigMode(handle)) == ([0, 0] if model.mig else None)
        memory = optional(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        assert getattr(memory, "total", None) == model.memory_bytes
        capability = optional(nvml, lambda: nvml.nvmlDeviceGetCudaComputeCapability(handle))
        assert capability is None or ".".join(map(str, capability)) == model.compute_capability  # type: ignore[call-overload]
        assert bool(nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice) == (model.arch in {"hopper", "blackwell"})


def test_an_h200_answers_as_the_real_one() -> None:
    """Values of one H200, driver 580.159.04, idle."""
    file = new_host("sim:h200")
    with initialised(file) as (nvml, _):
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
        assert nvml.nvmlSystemGetDriverVersion() == "580.159.04"
        assert nvml.nvmlSystemGetCudaDriverVersion_v2() == 13000
        assert nvml.nvmlDeviceGetName(handle) == "NVIDIA H200"
        assert nvml.nvmlDeviceGetNumGpuCores(handle) == 16896
        assert nvml.nvmlDeviceGetPciInfo(handle).pciDeviceId == 0x233510DE
        assert refused(nvml, lambda: nvml.nvmlDeviceGetAttributes(handle)) == nvml.NVML_ERROR_NOT_SUPPORTED
        assert refused(nvml, lambda: nvml.nvmlDeviceGetGpuInstanceId(handle)) == nvml.NVML_ERROR_INVALID_ARGUMENT
        assert refused(nvml, lambda: nvml.nvmlDeviceGetComputeInstanceId(handle)) == nvml.NVML_ERROR_INVALID_ARGUMENT
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        assert (memory.total, memory.free, memory.used) == (150754820096, 150109880320, 644939776)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        assert (memory.total, memory.reserved, memory.used) == (150754820096, 644939776, 0)
        with file.changed() as state:
            add_process(state, state.gpus[0], memory_bytes=5 * 2**30)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        assert memory.used == 5 * 2**30
        assert memory.reserved + memory.used + memory.free == memory.total


def test_a_wrong_struct_version_and_a_gpu_that_is_not_there_are_refused() -> None:
    with initialised(new_host("sim:3xt4")) as (nvml, _):
        handle = nvml.nvmlDeviceGetHandleByIndex(2)
        assert nvml.nvmlDeviceGetPciInfo(handle).busId == "00000000:03:00.0"
        code = refused(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle, version=0x02000004))
        assert code == nvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH
        assert refused(nvml, lambda: nvml.nvmlDeviceGetHandleByUUID("GPU-none")) == nvml.NVML_ERROR_NOT_FOUND
        assert refused(nvml, lambda: nvml.nvmlDeviceGetHandleByIndex(3)) == nvml.NVML_ERROR_INVALID_ARGUMENT


def test_only_root_sets_the_compute_mode_and_the_file_keeps_it() -> None:
    file = new_host("sim:h200,a30")
    with initialised(file) as (nvml, _):
        handle = nvml.nvmlDeviceGetHandleByIndex(1)
        nvml.nvmlDeviceSetComputeMode(handle, nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS)
        assert nvml.nvmlDeviceGetComputeMode(handle) == nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS
        assert nvml.nvmlDeviceGetComputeMode(nvml.nvmlDeviceGetHandleByIndex(0)) == 0
        assert refused(nvml, lambda: nvml.nvmlDeviceSetComputeMode(handle, 1)) == nvml.NVML_ERROR_NOT_SUPPORTED
        assert refused(nvml, lambda: nvml.nvmlDeviceSetComputeMode(handle, 9)) == nvml.NVML_ERROR_INVALID_ARGUMENT
        with file.changed() as state:
            state.fault_uid = 1000
        assert refused(nvml, lambda: nvml.nvmlDeviceSetComputeMode(handle, 0)) == nvml.NVML_ERROR_NO_PERMISSION
        assert nvml.nvmlDeviceGetComputeMode(handle) == nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS
    assert [gpu.compute_mode for gpu in state_of(file).gpus] == [0, 3]


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ({"driver_loaded": False}, "NVMLError_DriverNotLoaded"),
        ({"nvml_installed": False}, "NVMLError_LibraryNotFound"),
        ({"permission_denied": True}, "NVMLError_NoPermission"),
    ],
)
def test_faults_of_the_host_show_at_init(fault: dict[str, bool], error: str) -> None:
    with loaded(new_host("sim:h200", **fault)) as (nvml, _):
        with pytest.raises(getattr(nvml, error)):
            nvml.nvmlInit()
        with pytest.raises(nvml.NVMLError_Uninitialized):
            nvml.nvmlDeviceGetCount()


def test_a_lost_gpu_leaves_the_others_alone() -> None:
    file = new_host("sim:2xh200")
    with initialised(file) as (nvml, _):
        lost, well = (nvml.nvmlDeviceGetHandleByIndex(index) for index in range(2))
        with file.changed() as state:
            state.gpus[0].lost = True
        assert nvml.nvmlDeviceGetCount() == 2
        with pytest.raises(nvml.NVMLError_GpuIsLost, match="GPU is lost"):
            nvml.nvmlDeviceGetMemoryInfo(lost)
        with pytest.raises(nvml.NVMLError_GpuIsLost):
            nvml.nvmlDeviceGetHandleByIndex(0)
        assert nvml.nvmlDeviceGetName(well) == "NVIDIA H200"


def test_entry_points_can_be_unsupported_by_name_without_version() -> None:
    file = new_host("sim:2xh200")
    with file.changed() as state:
        state.gpus[0].not_supported = ["nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetMemoryInfo_v2"]
    with initialised(file) as (nvml, _):
        first, second = (nvml.nvmlDeviceGetHandleByIndex(index) for index in range(2))
        for call in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetMemoryInfo):
            assert refused(nvml, lambda call=call: call(first)) == nvml.NVML_ERROR_NOT_SUPPORTED  # type: ignore[misc]
            call(second)


def test_an_entry_point_that_is_not_there_is_function_not_found() -> None:
    with initialised(new_host("sim:h200")) as (nvml, library):
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
        with pytest.raises(nvml.NVMLError_FunctionNotFound):
            nvml.nvmlDeviceGetFanSpeedRPM(handle)
        with pytest.raises(AttributeError):
            library.nvmlNoSuchThing  # noqa: B018


def test_calls_need_init_and_end_with_shutdown() -> None:
    with loaded(new_host("sim:h200")) as (nvml, _):
        assert refused(nvml, nvml.nvmlDeviceGetCount) == nvml.NVML_ERROR_UNINITIALIZED
        nvml.nvmlInit()
        nvml.nvmlInit()
        nvml.nvmlShutdown()
        assert nvml.nvmlDeviceGetCount() == 1
        nvml.nvmlShutdown()
        assert refused(nvml, nvml.nvmlDeviceGetCount) == nvml.NVML_ERROR_UNINITIALIZED


def test_a_host_that_was_never_used_can_be_read_without_a_trace() -> None:
    file = StateFile("sim:2xt4")
    with initialised(file) as (nvml, _):
        assert nvml.nvmlDeviceGetCount() == 2
        assert not file.exists()


def test_the_file_is_read_again_only_when_it_changed() -> None:
    class Counting(StateFile):
        reads = 0

        def read(self) -> Any:
            self.reads += 1
            return super().read()

    file = new_host("sim:h200")
    counting = Counting(file.spec)
    with initialised(counting) as (nvml, _):
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
        before = counting.reads
        for _ in range(50):
            nvml.nvmlDeviceGetName(handle)
        assert counting.reads == before
        with file.changed() as state:
            state.gpus[0].compute_mode = 2
        assert nvml.nvmlDeviceGetComputeMode(handle) == 2
        assert counting.reads == before + 1


def test_below_the_bindings_it_takes_c_arguments_and_returns_codes() -> None:
    library = SimulatedLibrary(new_host("sim:h200"))
    count = ctypes.c_uint()
    assert library.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 1
    assert library.nvmlInitWithFlags(0) == 0
    assert library.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0
    assert count.value == 1
    assert library.nvmlErrorString(15) == b"GPU is lost"
    assert library.nvmlErrorString(12345) == b"Unknown Error"
    name = ctypes.create_string_buffer(4)
    handle = ctypes.c_void_p()
    assert library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(0), ctypes.byref(handle)) == 0
    assert library.nvmlDeviceGetName(handle, name, ctypes.c_uint(4)) == 7
    assert library.nvmlDeviceGetName(ctypes.c_void_p(None), name, ctypes.c_uint(4)) == 2


def test_field_values_tell_about_mig() -> None:
    with initialised(new_host("sim:h200,a100-80gb,t4")) as (nvml, _):
        answers = []
        for index in range(3):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            values = nvml.nvmlDeviceGetFieldValues(handle, [184, 199, 1])
            answers.append([value.value.uiVal if value.nvmlReturn == 0 else None for value in values])
    assert answers == [[1, 1, None], [0, 1, None], [None, None, None]]
