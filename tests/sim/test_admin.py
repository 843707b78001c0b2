"""Arranging simulated hosts: processes, faults, MIG, and forgetting them again."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from gpushare.base.errors import BadUsage, NotFound
from gpushare.host.process import Processes, wait_gone
from gpushare.sim import admin, open_simulated
from gpushare.sim.state import SimulatedHostState
from tests.sim import mps

SPEC = "sim:2xh200"


def state(spec: str = SPEC) -> SimulatedHostState:
    state = open_simulated(spec).state_file.read()
    assert state is not None
    return state


def test_opening_a_host_creates_it_once(sim_dir: Path) -> None:
    host = open_simulated("sim:h200, H200")
    assert host.spec == SPEC
    assert host.run_directory.parent.parent == sim_dir
    assert (host.uid, host.root) == (os.geteuid(), True)
    admin.set_fault(SPEC, "user", value="1000")
    host = open_simulated(SPEC)
    assert (host.uid, host.root) == (1000, False)
    assert len(admin.list_hosts()) == 1
    with pytest.raises(BadUsage):
        open_simulated("sim:nothing")


def test_a_broken_state_file_does_not_hide_the_other_hosts(sim_dir: Path) -> None:
    open_simulated(SPEC)
    (sim_dir / "other").mkdir()
    (sim_dir / "other" / "state.json").write_text("{")
    assert [host.spec for host in admin.list_hosts()] == [SPEC]


def test_processes_come_and_go() -> None:
    uuid = state().gpus[1].uuid
    first = admin.add_process(SPEC, uuid[:10], memory_bytes=5, sm_percent=7, user="1234", graphics=True)
    process = state().processes[0]
    assert (process.gpu_uuid, process.memory_bytes, process.sm_percent, process.uid, process.graphics) == (
        uuid,
        5,
        7,
        1234,
        True,
    )
    second = admin.add_process(SPEC, "0", name="x")
    assert second != first
    admin.end_process(SPEC, first)
    assert [process.pid for process in state().processes] == [second]
    with pytest.raises(NotFound):
        admin.end_process(SPEC, first)
    for gpu in ("7", "GPU-", "x"):
        with pytest.raises(NotFound):
            admin.add_process(SPEC, gpu)


def test_faults_of_gpus() -> None:
    admin.set_fault(SPEC, "lost", gpu="1")
    assert [gpu.lost for gpu in state().gpus] == [False, True]
    admin.set_fault(SPEC, "persistence-off")
    assert [gpu.persistence for gpu in state().gpus] == [False, False]
    admin.set_fault(SPEC, "not-supported", gpu="0", value="utilization")
    admin.set_fault(SPEC, "not-supported", gpu="0", value="nvmlDeviceGetPowerUsage")
    assert {"nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage"} < set(state().gpus[0].not_supported)
    admin.clear_faults(SPEC)
    assert not any(gpu.lost or gpu.not_supported or not gpu.persistence for gpu in state().gpus)
    admin.set_fault(SPEC, "busy", gpu="1")
    assert [(process.gpu_uuid, process.sm_percent) for process in state().processes] == [(state().gpus[1].uuid, 100)]


def test_reset_forgets_everything_but_real_processes(sim_dir: Path) -> None:
    host = mps.new(sim_dir, SPEC)
    daemon = host.start()
    simulated = admin.add_process(SPEC)
    host.host.run_directory.mkdir()
    child = host.host.processes.spawn([sys.executable, "-c", "import time; time.sleep(600)"], dict(os.environ))
    try:
        done = admin.reset(SPEC)
        assert (set(done.ended), done.left_alone) == ({simulated, daemon}, (child.pid,))
        assert child.poll() is None
        assert not host.host.state_file.directory.exists()
        assert admin.list_hosts() == []
        assert admin.reset(SPEC).ended == ()
    finally:
        os.kill(child.pid, 9)
        assert wait_gone(Processes(), [child.pid], 120.0) == []
        child.poll()
