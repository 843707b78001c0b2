"""The simulated libnvidia-ml: who is on a GPU, and GPM."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from gpushare.gpu_models import find_model
from gpushare.sim.mig import place_instances
from gpushare.sim.state import SimulatedDaemon, SimulatedServer, StateFile, now
from tests.sim.nvml_host import add_process, initialised, new_host


def pids(processes: list[Any]) -> list[int]:
    return [process.pid for process in processes]


def mps_host() -> tuple[StateFile, int, list[int]]:
    """Return a host with a daemon, its server and two busy clients: the server's PID and the clients'."""
    file = new_host("sim:h200")
    with file.changed() as state:
        gpu = state.gpus[0]
        daemon = SimulatedDaemon(
            pid=state.new_pid(), uid=0, pipe_directory="/tmp/mps", log_directory="/tmp/mps", visible=[gpu.uuid]
        )
        server = SimulatedServer(pid=state.new_pid(), uid=1000)
        daemon.servers.append(server)
        state.daemons.append(daemon)
        client = {"mps_daemon": daemon.pid, "mps_server": server.pid, "memory_bytes": 977272832}
        clients = [add_process(state, gpu, sm_percent=percent, **client).pid for percent in (20, 40)]
    return file, server.pid, clients


def test_lists_follow_the_size_protocol_of_c() -> None:
    file = new_host("sim:h200")
    with file.changed() as state:
        first, second = (add_process(state, state.gpus[0], memory_bytes=2**20 * size) for size in (1, 2))
    with initialised(file) as (nvml, library):
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
        count = ctypes.c_uint(0)
        call = library.nvmlDeviceGetComputeRunningProcesses_v3
        assert call(handle, ctypes.byref(count), None) == nvml.NVML_ERROR_INSUFFICIENT_SIZE
        assert count.value == 2
        count.value = 1
        infos = (nvml.c_nvmlProcessInfo_v3_t * 7)()
        assert call(handle, ctypes.byref(count), infos) == nvml.NVML_ERROR_INSUFFICIENT_SIZE
        assert (count.value, infos[0].pid) == (2, 0)
        count.value = 7
        assert call(handle, ctypes.byref(count), infos) == nvml.NVML_SUCCESS
        assert count.value == 2
        assert [info.pid for info in infos[:3]] == [first.pid, second.pid, 0]
        assert infos[1].usedGpuMemory == 2 * 2**20
        assert infos[1].gpuInstanceId == infos[1].computeInstanceId == 0xFFFFFFFF


def test_compute_and_graphics_processes_are_listed_apart() -> None:
    file = new_host("sim:2xh200")
    with file.changed() as state:
        compute = add_process(state, state.gpus[0])
        graphics = add_process(state, state.gpus[0], graphics=True, name="Xorg")
    with initialised(file) as (nvml, _):
        first, second = (nvml.nvmlDeviceGetHandleByIndex(index) for index in range(2))
        for suffix in ("", "_v2", "_v3"):
            lists = {
                kind: getattr(nvml, f"nvmlDeviceGet{kind}RunningProcesses{suffix}")
                for kind in ("Compute", "Graphics", "MPSCompute")
            }
            assert pids(lists["Compute"](first)) == [compute.pid]
            assert pids(lists["Graphics"](first)) == [graphics.pid]
            assert lists["MPSCompute"](first) == lists["Compute"](second) == []


def test_mps_clients_are_in_both_lists_and_their_server_in_one() -> None:
    """As seen on an H200, driver 580.159.04."""
    file, server, clients = mps_host()
    with initialised(file) as (nvml, _):
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
        compute = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        assert pids(compute) == [server, *clients]
        assert [process.usedGpuMemory for process in compute] == [69206016, 977272832, 977272832]
        assert pids(nvml.nvmlDeviceGetMPSComputeRunningProcesses(handle)) == clients
        samples = nvml.nvmlDeviceGetProcessUtilization(handle, 0)
        assert [(sample.pid, sample.smUtil) for sample in samples] == [(server, 60)]
        assert nvml.nvmlDeviceGetUtilizationRates(handle).gpu == 60


def test_time_slicing_processes_share_the_gpu() -> None:
    file = new_host("sim:h200")
    with file.changed() as state:
        big, small = (add_process(state, state.gpus[0], sm_percent=percent) for percent in (100, 60))
        add_process(state, state.gpus[0], sm_percent=0)
    with initialised(file) as (nvml, _):
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
        samples = nvml.nvmlDeviceGetProcessUtilization(handle, 0)
        assert [(sample.pid, sample.smUtil) for sample in samples] == [(big.pid, 62), (small.pid, 38)]
        assert nvml.nvmlDeviceGetUtilizationRates(handle).gpu == 100


def test_an_idle_gpu_has_no_samples() -> None:
    with initialised(new_host("sim:h200")) as (nvml, _):
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
        with pytest.raises(nvml.NVMLError_NotFound):
            nvml.nvmlDeviceGetProcessUtilization(handle, 0)


def test_samples_older_than_asked_for_are_not_given() -> None:
    file = new_host("sim:h200")
    with file.changed() as state:
        add_process(state, state.gpus[0], sm_percent=50)
    with initialised(file) as (nvml, _):
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
        with pytest.raises(nvml.NVMLError_NotFound):
            nvml.nvmlDeviceGetProcessUtilization(handle, int((now() + 60) * 1e6))


def test_a_stopped_process_is_busy_until_its_queue_has_drained() -> None:
    file = new_host("sim:h200")
    with file.changed() as state:
        process = add_process(state, state.gpus[0], sm_percent=80, queue_seconds=100.0, stopped_at=now())
    with initialised(file) as (nvml, _):
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
        assert nvml.nvmlDeviceGetUtilizationRates(handle).gpu == 80
        with file.changed() as state:
            state.processes[0].stopped_at = now() - 101
        assert nvml.nvmlDeviceGetUtilizationRates(handle).gpu == 0
        assert pids(nvml.nvmlDeviceGetComputeRunningProcesses(handle)) == [process.pid]


def test_in_a_foreign_pid_namespace_nobody_is_seen() -> None:
    file = new_host("sim:h200", pid_namespace_is_host=False)
    with file.changed() as state:
        add_process(state, state.gpus[0], sm_percent=50)
    with initialised(file) as (nvml, _):
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
        assert nvml.nvmlDeviceGetComputeRunningProcesses(handle) == []
        assert nvml.nvmlDeviceGetUtilizationRates(handle).gpu == 50


def gpm(nvml: Any, take: Any) -> dict[int, float | None]:
    first, second = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
    try:
        take(first)
        take(second)
        request = nvml.c_nvmlGpmMetricsGet_t()
        request.version = nvml.NVML_GPM_METRICS_GET_VERSION
        wanted = [nvml.NVML_GPM_METRIC_GRAPHICS_UTIL, nvml.NVML_GPM_METRIC_SM_UTIL, nvml.NVML_GPM_METRIC_SM_OCCUPANCY]
        wanted += [nvml.NVML_GPM_METRIC_DRAM_BW_UTIL, 248]
        request.numMetrics, request.sample1, request.sample2 = len(wanted), first, second
        for index, metric in enumerate(wanted):
            request.metrics[index].metricId = metric
        nvml.nvmlGpmMetricsGet(request)
        answers = request.metrics[: len(wanted)]
        return {answer.metricId: answer.value if answer.nvmlReturn == 0 else None for answer in answers}
    finally:
        nvml.nvmlGpmSampleFree(first)
        nvml.nvmlGpmSampleFree(second)


def test_gpm_shows_the_busy_processes() -> None:
    file = new_host("sim:h200")
    with file.changed() as state:
        add_process(state, state.gpus[0], sm_percent=96)
    with initialised(file) as (nvml, library):
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
        metrics = gpm(nvml, lambda sample: nvml.nvmlGpmSampleGet(handle, sample))
        assert metrics[1] == metrics[2] == 96
        assert metrics[3] == pytest.approx(17)
        assert metrics[10] == pytest.approx(20)
        assert metrics[248] is None
        assert library.samples == {}


def test_gpm_is_for_hopper_and_later() -> None:
    with initialised(new_host("sim:a100-80gb")) as (nvml, _):
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
        sample = nvml.nvmlGpmSampleAlloc()
        with pytest.raises(nvml.NVMLError_NotSupported):
            nvml.nvmlGpmSampleGet(handle, sample)
        nvml.nvmlGpmSampleFree(sample)
        with pytest.raises(nvml.NVMLError_InvalidArgument):
            nvml.nvmlGpmSampleFree(sample)


def test_gpm_samples_must_be_taken_before_they_are_compared() -> None:
    with initialised(new_host("sim:h200")) as (nvml, _), pytest.raises(nvml.NVMLError_InvalidArgument):
        gpm(nvml, lambda _: None)


def test_gpm_tells_mig_instances_apart() -> None:
    file = new_host("sim:h200")
    with file.changed() as state:
        state.gpus[0] = place_instances(state.gpus[0], find_model("h200"), ["3g.71gb", "4g.71gb:0"])
        four, three = state.gpus[0].mig
        place_of = {"gpu_instance_id": three.gpu_instance_id, "compute_instance_id": 0}
        add_process(state, state.gpus[0], sm_percent=66, **place_of)
    with initialised(file) as (nvml, _):
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
        for instance, expected in ((three, 66), (four, 0)):
            taken = gpm(nvml, lambda sample, gi=instance.gpu_instance_id: nvml.nvmlGpmMigSampleGet(handle, gi, sample))
            assert taken[2] == expected
        # 60 of the 132 SMs are that instance's.
        assert gpm(nvml, lambda sample: nvml.nvmlGpmSampleGet(handle, sample))[2] == pytest.approx(30)
        with pytest.raises(nvml.NVMLError_InvalidArgument):
            gpm(nvml, lambda sample: nvml.nvmlGpmMigSampleGet(handle, 13, sample))
