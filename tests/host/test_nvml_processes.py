"""Who is on a GPU as the NVML reader tells it: three lists merged, MPS, MIG, SM %."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpushare.base.model import GpuProcess
from gpushare.base.units import GIB
from gpushare.connect import connect
from gpushare.host.nvml import NvmlReader, WorkSample
from gpushare.sim import admin
from tests.host.test_nvml import Altered
from tests.sim import mps, nvml_host


def on_gpu(spec: str, index: int = 0) -> dict[int, GpuProcess]:
    host = connect(spec).nvml.processes(index)
    return {process.pid: process for process in host}


def test_compute_and_graphics_processes_are_told_apart() -> None:
    compute = admin.add_process("sim:2xt4", "0", memory_bytes=2 * GIB, sm_percent=40)
    graphics = admin.add_process("sim:2xt4", "0", graphics=True, sm_percent=0)
    elsewhere = admin.add_process("sim:2xt4", "1")
    found = on_gpu("sim:2xt4")
    assert list(found) == sorted([compute, graphics])
    assert (found[compute].type, found[compute].memory_used_bytes, found[compute].sm_percent) == ("C", 2 * GIB, 40)
    assert (found[graphics].type, found[graphics].sm_percent) == ("G", 0)
    assert elsewhere in on_gpu("sim:2xt4", 1)


def test_the_last_work_of_a_process_is_its_newest_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(7, 3.0, 10), (7, 5.0, 20), (7, 4.0, 30), (7, 9.0, 0), (8, 2.5, 1)]
    asked: list[int] = []

    def utilization(_nvml: Any, _handle: Any, since_us: int) -> list[WorkSample]:
        asked.append(since_us)
        return [WorkSample(*row) for row in rows]

    monkeypatch.setattr("gpushare.host.nvml.read_utilization", utilization)
    assert connect("sim:2xt4").nvml.last_work(0, 2.5) == {7: 5.0, 8: 2.5}
    assert asked == [2_500_000]


def test_a_process_on_two_lists_is_one(sim_dir: Path) -> None:
    host = mps.new(sim_dir)
    host.start()
    outside = admin.add_process(host.host.spec, sm_percent=20)
    client = host.client(sm_percent=60)
    found = on_gpu(host.host.spec)
    server = client.mps_server
    assert server is not None
    assert {pid: process.type for pid, process in found.items()} == {outside: "C", client.pid: "M+C", server: "C"}
    # The driver books all work of MPS clients on their server: a client's share is unknown, not 0.
    assert found[client.pid].sm_percent is None
    assert found[server].sm_percent == 60
    assert found[outside].sm_percent == 20


def test_processes_in_mig_instances_have_their_ids_and_no_sm() -> None:
    admin.set_mig("sim:h200", "0", ["3g.71gb", "3g.71gb"])
    migs = connect("sim:h200").nvml.sweep()[0].mig_instances
    pids = [admin.add_process("sim:h200", "0", mig=mig.uuid) for mig in migs]
    found = on_gpu("sim:h200")
    for pid, mig in zip(pids, migs, strict=True):
        assert found[pid].gpu_instance_id == mig.gpu_instance_id
        assert found[pid].compute_instance_id == mig.compute_instance_id
        assert found[pid].sm_percent is None


@pytest.mark.parametrize("count", [64, 65, 300])
def test_more_processes_than_there_was_room_for(count: int) -> None:
    file = nvml_host.new_host("sim:t4")
    with file.changed() as state:
        pids = {nvml_host.add_process(state, state.gpus[0], sm_percent=1).pid for _ in range(count)}
    assert set(on_gpu(file.spec)) == pids


def test_no_sample_means_idle() -> None:
    pid = admin.add_process("sim:t4", sm_percent=0)
    assert on_gpu("sim:t4")[pid].sm_percent == 0


def test_no_support_for_samples_means_unknown() -> None:
    pid = admin.add_process("sim:t4", sm_percent=50)
    admin.set_fault("sim:t4", "not-supported", value="nvmlDeviceGetProcessUtilization")
    assert on_gpu("sim:t4")[pid].sm_percent is None


@pytest.mark.parametrize("kind", ["Compute", "Graphics", "MPSCompute"])
def test_one_list_that_the_driver_does_not_have_leaves_the_others(kind: str) -> None:
    compute, graphics = admin.add_process("sim:t4"), admin.add_process("sim:t4", graphics=True)
    admin.set_fault("sim:t4", "not-supported", value=f"nvmlDeviceGet{kind}RunningProcesses")
    expected = {"Compute": {graphics}, "Graphics": {compute}, "MPSCompute": {compute, graphics}}[kind]
    assert set(on_gpu("sim:t4")) == expected


def test_drivers_before_r510_have_the_second_version_of_the_lists() -> None:
    pid = admin.add_process("sim:t4")
    names = [f"nvmlDeviceGet{kind}RunningProcesses_v3" for kind in ("Compute", "Graphics", "MPSCompute")]
    reader = NvmlReader(Altered("sim:t4", **{name: lambda *_: 13 for name in names}))
    assert [process.pid for process in reader.processes(0) or ()] == [pid]


def test_an_unknown_memory_is_unknown_and_another_list_may_know_it(sim_dir: Path) -> None:
    host = mps.new(sim_dir)
    host.start()
    client = host.client(memory_bytes=GIB)

    def blind(handle: Any, count: Any, rows: Any) -> int:
        code: int = altered._library.nvmlDeviceGetComputeRunningProcesses_v3(handle, count, rows)
        for row in rows[: count._obj.value]:
            row.usedGpuMemory = 0xFFFFFFFFFFFFFFFF
        return code

    altered = Altered(host.host.spec, nvmlDeviceGetComputeRunningProcesses_v3=blind)
    reader = NvmlReader(altered)
    memory = {process.pid: process.memory_used_bytes for process in reader.processes(0) or ()}
    assert memory == {client.pid: GIB, client.mps_server: None}


def test_nonsense_samples_and_samples_of_nobody_are_left_out() -> None:
    pid = admin.add_process("sim:t4", sm_percent=30)

    def samples(_handle: Any, rows: Any, count: Any, _since: Any) -> int:
        given = [(pid, 1, 30), (pid, 3, 70), (pid, 2, 10), (pid, 4, 4_000_000_000), (0, 5, 50)]
        for row, (owner, stamp, busy) in zip(rows, given, strict=False):
            row.pid, row.timeStamp, row.smUtil = owner, stamp, busy
        count._obj.value = len(given)
        return 0

    reader = NvmlReader(Altered("sim:t4", nvmlDeviceGetProcessUtilization=samples))
    assert [process.sm_percent for process in reader.processes(0) or ()] == [70]


def test_in_another_pid_namespace_nobody_is_seen() -> None:
    admin.add_process("sim:t4")
    admin.set_fault("sim:t4", "blind")
    assert on_gpu("sim:t4") == {}
