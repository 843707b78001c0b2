"""How busy a GPU is: GPM where there is one, else the utilization; unknown is None."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest

from gpushare.connect import connect
from gpushare.host import activity
from gpushare.host.activity import Activity, ActivityMeter, samples_since
from gpushare.host.nvml import NvmlReader
from gpushare.sim import admin
from tests.host.test_nvml import Altered


@pytest.fixture(autouse=True)
def short_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "_WINDOW_SECONDS", 0.001)


@pytest.mark.parametrize(
    ("spec", "source"), [("sim:h200", "gpm"), ("sim:a100-80gb", "utilization"), ("sim:p100", "utilization")]
)
def test_a_busy_gpu_and_an_idle_one(spec: str, source: str) -> None:
    meter = ActivityMeter(connect(spec).nvml, 0)
    assert meter.read() == Activity(0.0, source)
    admin.add_process(spec, sm_percent=60)
    found = meter.read()
    assert (found.source, round(found.percent)) == (source, 60)


def test_one_mig_instance_is_measured_for_itself() -> None:
    admin.set_mig("sim:h200", "0", ["3g.71gb", "3g.71gb"])
    host = connect("sim:h200")
    busy, idle = host.nvml.sweep()[0].mig_instances
    admin.add_process(host.spec, mig=busy.uuid, sm_percent=80)
    rows = [ActivityMeter(host.nvml, 0, mig.gpu_instance_id).read() for mig in (busy, idle)]
    assert rows[0] is not None
    assert rows[0].percent > 50
    assert rows[1] == Activity(0.0, "gpm")


def test_without_gpm_a_mig_instance_is_unknown() -> None:
    admin.set_mig("sim:a100-80gb", "0", ["3g.40gb"])
    host = connect("sim:a100-80gb")
    assert ActivityMeter(host.nvml, 0, host.nvml.sweep()[0].mig_instances[0].gpu_instance_id).read() is None


def test_a_driver_that_does_not_tell_is_unknown() -> None:
    admin.set_fault("sim:t4", "not-supported", value="utilization")
    assert ActivityMeter(connect("sim:t4").nvml, 0).read() is None


@pytest.mark.parametrize("spec", ["sim:h200", "sim:t4"])
@pytest.mark.parametrize("measured_before", [False, True])
def test_a_lost_gpu_is_unknown_and_no_error(spec: str, measured_before: bool) -> None:
    meter = ActivityMeter(connect(spec).nvml, 0)
    if measured_before:
        assert meter.read() is not None
    admin.set_fault(spec, "lost")
    assert meter.read() is None


def metric(value: float, code: int = 0) -> Callable[[Any], int]:
    def get(request: Any) -> int:
        request._obj.metrics[0].value, request._obj.metrics[0].nvmlReturn = value, code
        return 0

    return get


@pytest.mark.parametrize("get", [metric(math.nan), metric(math.inf), metric(50.0, code=3), lambda *_: 999])
def test_a_sample_that_is_no_number_is_unknown(get: Callable[[Any], int]) -> None:
    assert ActivityMeter(NvmlReader(Altered("sim:h200", nvmlGpmMetricsGet=get)), 0).read() is None


def test_no_sample_is_left_behind() -> None:
    host = connect("sim:h200")
    library: Any = host.nvml._library
    for _ in range(3):
        ActivityMeter(host.nvml, 0).read()
    admin.set_fault(host.spec, "lost")
    ActivityMeter(host.nvml, 0).read()
    assert library.samples == {}


def test_a_failed_second_sample_frees_the_first() -> None:
    calls: list[int] = []

    def once(sample: Any) -> int:
        calls.append(1)
        return int(altered._library.nvmlGpmSampleAlloc(sample)) if len(calls) == 1 else 20

    freed: list[int] = []

    def free(sample: Any) -> int:
        freed.append(1)
        return int(altered._library.nvmlGpmSampleFree(sample))

    altered = Altered("sim:h200", nvmlGpmSampleAlloc=once, nvmlGpmSampleFree=free)
    assert ActivityMeter(NvmlReader(altered), 0).read() is None
    assert (len(calls), len(freed)) == (2, 1)


# -- who was busy ----------------------------------------------------------------------------------


def test_who_has_used_the_gpu_since_then() -> None:
    host = connect("sim:t4")
    assert samples_since(host.nvml, 0, time.time() - 1) == []
    pid = admin.add_process("sim:t4", sm_percent=40)
    admin.add_process("sim:t4", sm_percent=0)
    assert samples_since(host.nvml, 0, time.time() - 1) == [(pid, 40)]
    # Nothing has happened since a time to come.
    assert samples_since(host.nvml, 0, time.time() + 60) == []


@pytest.mark.parametrize("fault", [("not-supported", "nvmlDeviceGetProcessUtilization"), ("lost", None)])
def test_where_nobody_tells_who_was_busy_it_is_unknown(fault: tuple[str, str | None]) -> None:
    admin.add_process("sim:t4", sm_percent=40)
    host = connect("sim:t4")
    host.nvml.sweep()
    admin.set_fault("sim:t4", fault[0], value=fault[1])
    assert samples_since(host.nvml, 0, time.time() - 1) is None
