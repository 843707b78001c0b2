"""The driver's limit on a job: taken where all agrees, with nothing left where it does not."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gpushare.base.selection import Device, select
from gpushare.base.units import GIB
from gpushare.connect import connect
from gpushare.host.host import Host
from gpushare.memory.driver_limit import take_limit, why_not
from gpushare.sim import admin
from gpushare.sim.cgroups import FAULTS, SimulatedCgroups

SPEC = "sim:a100-80gb"


@pytest.fixture
def host() -> Host:
    admin.set_fault(SPEC, "driver", None, "615.71.09")
    return connect(SPEC)


def device(host: Host) -> Device:
    (only,) = select(None, host.nvml.sweep())
    return only


def left(host: Host) -> list[str]:
    return [path.name for path in host.cgroup_root.glob("gpushare*")]


def tree(host: Host) -> SimulatedCgroups:
    cgroups = host.open_cgroups()
    assert isinstance(cgroups, SimulatedCgroups)
    return cgroups


def test_a_limit_is_in_force_until_it_is_released(host: Host) -> None:
    limit = take_limit(host, device(host), 8 * GIB)
    assert limit is not None
    assert tree(host).limits(limit.cgroup.name) == {device(host).uuid: [0, 8 * GIB]}
    assert limit.used_bytes() == 0
    limit.release()
    assert left(host) == []


def test_where_the_kernel_has_no_controller_the_driver_counts_by_itself(host: Host) -> None:
    Path(tree(host).root, "cgroup.controllers").write_text("cpu memory misc\n")
    limit = take_limit(host, device(host), 8 * GIB)
    assert limit is not None
    assert limit.cgroup.hard_limit("00000000:01:00.0") is None
    limit.release()
    assert left(host) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_limit_that_does_not_read_back_as_set_is_taken_off(host: Host, fault: str) -> None:
    admin.set_fault(SPEC, "memory-limits", None, fault)
    assert take_limit(host, device(host), 8 * GIB) is None
    assert left(host) == []


def test_a_wrong_unit_shows_only_in_what_the_kernel_says(host: Host) -> None:
    admin.set_fault(SPEC, "memory-limits", None, "mib")
    cgroup = host.open_cgroups().create()
    assert host.nvml.set_memory_limit(0, cgroup.path, 8 * GIB)
    limits = host.nvml.memory_limits(0, cgroup.path)
    assert limits is not None
    assert limits.hard_bytes == 8 * GIB
    assert cgroup.hard_limit("00000000:01:00.0") == 8 * GIB << 20


@pytest.mark.parametrize("kind", ["not-supported", "refused"])
@pytest.mark.parametrize("call", ["nvmlDeviceSetMemoryLimits_v1", "nvmlDeviceGetMemoryLimits_v1"])
def test_calls_that_are_refused_leave_nothing(host: Host, kind: str, call: str) -> None:
    admin.set_fault(SPEC, kind, None, call)
    assert take_limit(host, device(host), 8 * GIB) is None
    assert left(host) == []


def test_a_call_that_fails_leaves_nothing(host: Host) -> None:
    admin.set_fault(SPEC, "fail-step", None, "1")
    assert take_limit(host, device(host), 8 * GIB) is None
    assert left(host) == []


def test_a_controller_that_cannot_be_enabled_leaves_nothing(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedCgroups, "_enable", lambda _self, _root: None)
    assert take_limit(host, device(host), 8 * GIB) is None
    assert left(host) == []


def test_a_tree_that_cannot_be_written_is_no_error(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object, **_named: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    gpu = device(host)
    monkeypatch.setattr("gpushare.host.cgroups.os.mkdir", refuse)
    assert take_limit(host, gpu, 8 * GIB) is None


def old_driver(_host: Host) -> None:
    admin.set_fault(SPEC, "driver", None, "610.43.02")


def a_user(_host: Host) -> None:
    admin.set_fault(SPEC, "user", None, "1000")


def no_tree(host: Host) -> None:
    Path(tree(host).root, "cgroup.controllers").unlink()


@pytest.mark.parametrize(
    ("change", "reason"), [(old_driver, "driver 610.43.02"), (a_user, "only root"), (no_tree, "no cgroup v2")]
)
def test_where_it_cannot_be(host: Host, change: Callable[[Host], None], reason: str) -> None:
    change(host)
    changed = connect(SPEC)
    assert reason in (why_not(changed, device(changed)) or "")
    assert take_limit(changed, device(changed), GIB) is None
    assert left(changed) == []


def test_not_on_mig(host: Host) -> None:
    host.nvml.restart()
    from gpushare.sim.current import changing
    from gpushare.sim.state import StateFile

    with changing(StateFile(SPEC)) as (state, _):
        state.gpus[0].mig_mode = state.gpus[0].mig_pending = 1
    (gpu,) = host.nvml.sweep()
    assert why_not(host, Device(gpu=gpu)) == "the driver has no such limit on MIG"


def test_a_process_that_is_left_keeps_its_limit(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpushare.memory.driver_limit._EMPTY_SECONDS", 0.05)
    limit = take_limit(host, device(host), 8 * GIB)
    assert limit is not None
    sleeper = subprocess.Popen(["sleep", "100"])
    limit.enter(sleeper.pid)
    assert limit.holds(sleeper.pid)
    limit.release()
    assert tree(host).limits(limit.cgroup.name) == {device(host).uuid: [0, 8 * GIB]}
    sleeper.kill()
    sleeper.wait()
    limit.release()
    assert left(host) == []
