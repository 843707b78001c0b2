"""Arranging simulated hosts: processes, faults, MIG, and forgetting them again."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from gpushare.base.errors import BadUsage, NotFound, NotSupported, OperationFailed
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


def test_listing_and_describing() -> None:
    assert admin.list_hosts() == []
    unused = admin.describe("sim:t4")
    assert (unused.used, len(unused.gpus)) == (False, 1)
    assert admin.list_hosts() == []
    pid = admin.add_process(SPEC, "1", name="train")
    open_simulated("sim:t4")
    assert [(host.spec, host.gpus, host.processes, host.daemons) for host in admin.list_hosts()] == [
        (SPEC, 2, 1, 0),
        ("sim:t4", 1, 0, 0),
    ]
    shown = admin.describe(SPEC)
    assert [(process.pid, process.on_gpu) for process in shown.processes] == [(pid, True)]
    assert shown.driver == state().driver


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


def test_mig_is_laid_out_and_taken_away() -> None:
    admin.set_mig(SPEC, "0", ["3g.71gb", "1g.18gb"])
    gpu = state().gpus[0]
    assert (gpu.mig_mode, sorted(instance.profile for instance in gpu.mig)) == (1, ["1g.18gb", "3g.71gb"])
    pid = admin.add_process(SPEC, "0", mig=gpu.mig[1].uuid)
    assert state().processes[0].gpu_instance_id == gpu.mig[1].gpu_instance_id
    with pytest.raises(OperationFailed):
        admin.set_mig(SPEC, "0", [])
    with pytest.raises(NotFound):
        admin.add_process(SPEC, "0", mig="99")
    admin.end_process(SPEC, pid)
    admin.set_mig(SPEC, "0", [])
    assert (state().gpus[0].mig_mode, state().gpus[0].mig) == (0, [])
    with pytest.raises(NotSupported):
        admin.set_mig("sim:t4", "0", ["1g.18gb"])


@pytest.mark.parametrize(
    ("kind", "value", "attribute", "expected"),
    [
        ("no-driver", None, "driver_loaded", False),
        ("no-nvml", None, "nvml_installed", False),
        ("no-permission", None, "permission_denied", True),
        ("blind", None, "pid_namespace_is_host", False),
        ("user", "1000", "uid", 1000),
        ("hang", "nvidia-smi", "hanging_programs", ["nvidia-smi"]),
        ("missing", "nvidia-cuda-mps-control", "missing_programs", ["nvidia-cuda-mps-control"]),
    ],
)
def test_faults_of_the_host_and_their_end(kind: str, value: str | None, attribute: str, expected: object) -> None:
    healthy = getattr(state(), attribute)
    admin.set_fault(SPEC, kind, value=value)
    admin.set_fault(SPEC, kind, value=value)
    assert getattr(state(), attribute) == expected
    admin.clear_faults(SPEC)
    assert getattr(state(), attribute) == healthy


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


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("bogus", None),
        ("not-supported", None),
        ("not-supported", "x"),
        ("hang", "ls"),
        ("missing", None),
        ("driver", "new"),
        ("user", None),
    ],
)
def test_wrong_faults_are_refused(kind: str, value: str | None) -> None:
    with pytest.raises(BadUsage) as caught:
        admin.set_fault(SPEC, kind, value=value)
    assert caught.value.hint
    assert caught.value.code == "bad_fault"


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
