"""What one look at a host costs: calls of NVML per GPU, and children. Counted, not timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from gpushare.connect import connect
from gpushare.host.host import Host
from gpushare.host.nvml import NvmlReader
from gpushare.host.program import Pending
from gpushare.sim import open_simulated
from gpushare.sim.admin import add_process
from gpushare.snapshot import Observer
from tests.test_snapshot import CountedPrograms

if TYPE_CHECKING:
    from gpushare.sim.library import SimulatedLibrary

CALLS_PER_GPU = 12


def observed(spec: str) -> tuple[Observer, SimulatedLibrary, CountedPrograms]:
    """Return an observer of a simulated host, with the two counters."""
    host = connect(spec)
    library = open_simulated(spec).library
    programs = CountedPrograms(host.programs)
    counted: Host = replace(host, nvml=NvmlReader(library), programs=programs)
    return Observer(counted), library, programs


@pytest.mark.parametrize("spec", ["sim:h200", "sim:8xh100", "sim:4xt4", "sim:2xa10,2xrtx-4090"])
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_calls_per_gpu(spec: str, busy: bool) -> None:
    observer, library, _ = observed(spec)
    gpus = observer.read().gpus
    if busy:
        for gpu in gpus:
            add_process(spec, str(gpu.index))
            add_process(spec, str(gpu.index))
    observer, library, _ = observed(spec)
    seen = observer.read().gpus
    assert sum(len(gpu.processes or ()) for gpu in seen) == (2 * len(gpus) if busy else 0)
    per_host = {
        "nvmlInit_v2",
        "nvmlInitWithFlags",
        "nvmlShutdown",
        "nvmlSystemGetDriverVersion",
        "nvmlDeviceGetCount_v2",
    }
    per_gpu = {name: count for name, count in library.calls.items() if name not in per_host and count}
    assert sum(per_gpu.values()) <= CALLS_PER_GPU * len(gpus), per_gpu
    assert all(library.calls[name] <= 1 for name in per_host), library.calls


def test_a_second_look_asks_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handles, names and UUIDs are read once."""
    monkeypatch.setattr("gpushare.snapshot._SLOW_SECONDS", 3600.0)
    observer, library, _ = observed("sim:8xh100")
    observer.read()
    first = sum(library.calls.values())
    library.calls.clear()
    observer.read()
    assert 0 < sum(library.calls.values()) < first
    for name in (
        "nvmlInit_v2",
        "nvmlInitWithFlags",
        "nvmlDeviceGetName",
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetPciInfo_v3",
    ):
        assert library.calls[name] == 0, name


def test_one_look_starts_nvidia_smi_once_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    # However long the first look takes, the second comes soon after it.
    monkeypatch.setattr("gpushare.snapshot._SLOW_SECONDS", 3600.0)
    observer, _, programs = observed("sim:8xh100")
    observer.read()
    assert programs.started == ["nvidia-smi"]
    # Looking again at once asks NVML alone.
    observer.read()
    assert programs.started == ["nvidia-smi"]


def test_nvidia_smi_starts_before_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that both take their time at the same time."""
    observer, library, programs = observed("sim:h200")
    order = []
    start = CountedPrograms.start

    def noted(self: CountedPrograms, argv: Sequence[str], **named: object) -> Pending:
        order.append((argv[0], sum(library.calls.values())))
        return start(self, argv, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(CountedPrograms, "start", noted)
    observer.read()
    assert order == [("nvidia-smi", 0)]
    assert programs.started == ["nvidia-smi"]
