"""What a GPU measures of itself, what a process uses of the host, and who descends from whom."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from gpushare.base.errors import GpuLost
from gpushare.base.model import GpuSensors
from gpushare.base.units import GIB
from gpushare.connect import connect
from gpushare.host.machine import Machine
from gpushare.host.process import Processes
from gpushare.sim import admin
from tests.cli.drive import World


def test_sensors_follow_the_load() -> None:
    world = World("sim:h100")
    nvml = connect(world.spec).nvml
    idle = nvml.sensors(0)
    admin.add_process(world.spec, "0", memory_bytes=GIB, sm_percent=100)
    busy = nvml.sensors(0)
    assert (idle.power_watts or 0) < (busy.power_watts or 0) <= (busy.power_limit_watts or 0) == 700
    assert (idle.temperature_celsius or 0) < (busy.temperature_celsius or 0)
    assert (busy.sm_clock_mhz, busy.fan_percent, busy.slowed_by) == (busy.sm_clock_max_mhz, None, ())
    assert nvml.pcie_traffic(0)[0]
    # Power and heat; an idle GPU (1) is no harm.
    world.fault("slowed", 0x04 | 0x20 | 0x40 | 0x01, gpu=0)
    assert nvml.sensors(0).slowed_by == ("power limit", "heat")


def test_what_a_gpu_does_not_tell_is_unknown() -> None:
    world = World("sim:h100")
    nvml = connect(world.spec).nvml
    for name in ("PowerUsage", "EnforcedPowerLimit", "Temperature", "ClockInfo", "MaxClockInfo", "EncoderUtilization",
                 "DecoderUtilization", "CurrentClocksEventReasons", "CurrentClocksThrottleReasons", "PcieThroughput"):  # fmt: skip
        world.fault("not-supported", f"nvmlDeviceGet{name}", gpu=0)
    assert nvml.sensors(0) == GpuSensors()
    assert nvml.pcie_traffic(0) == (None, None)
    world.fault("lost", gpu=0)
    with pytest.raises(GpuLost):
        nvml.sensors(0)


def test_the_use_of_the_host_and_the_family_of_a_process() -> None:
    processes = Processes()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        own = processes.usage(os.getpid())
        assert own.cpu_seconds > 0
        assert own.memory_bytes > 1 << 20
        families = processes.families([os.getpid(), child.pid, 1 << 30])
        assert families[os.getpid()][0] == os.getpid()
        assert child.pid in families[os.getpid()]
        assert list(families[child.pid]) == [child.pid]
        assert 1 << 30 not in families
    finally:
        child.communicate()
    assert processes.usage(child.pid) is None


def test_the_load_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    load = Machine().load()
    assert 0 < load.busy_seconds < load.all_seconds
    assert 0 < load.memory_free <= load.memory_total
    monkeypatch.setattr(psutil, "PROCFS_PATH", "/nonexistent")
    assert Machine().load() is None


@pytest.mark.filterwarnings("error")
def test_the_load_where_a_container_has_its_own_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.joinpath("meminfo").write_text("MemTotal: 8 kB\nMemFree: 2 kB\nMemAvailable: 4 kB\n")
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    for fields, is_known in (("1 2 3 4 5 6 7 8 9 10", True), ("1 2 3 4", False)):
        tmp_path.joinpath("stat").write_text(f"cpu {fields}\n")
        load = Machine().load()
        assert (load is not None) is is_known
        assert load is None or (load.memory_total, load.memory_free) == (8 << 10, 4 << 10)
