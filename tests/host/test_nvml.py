"""The NVML reader on simulated hosts: every model, every refusal, a GPU that is lost, two hosts in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gpushare.base.errors import (
    DriverNotLoaded,
    ExitCode,
    GpuLost,
    GpushareError,
    NoPermission,
    NotFound,
    NotSupported,
    NvmlMissing,
    OperationFailed,
)
from gpushare.base.model import ComputeMode, Gpu
from gpushare.base.units import GIB
from gpushare.connect import connect
from gpushare.gpu_models import load_models
from gpushare.host.nvml import NvmlReader, nvml_error
from gpushare.sim import admin
from tests.sim import nvml_host


class Altered:
    """A simulated library with some entry points replaced; ``real`` hides that it is simulated."""

    def __init__(self, spec: str, *, real: bool = False, **functions: Callable[..., int]) -> None:
        self._library = connect(spec).nvml._library
        self._real, self._functions = real, functions

    def __getattr__(self, name: str) -> Any:
        if name == "is_simulated" and self._real:
            raise AttributeError(name)
        return self._functions.get(name) or getattr(self._library, name)


@pytest.mark.parametrize("model", sorted(load_models()))
def test_every_model_is_read_whole(model: str) -> None:
    spec = f"sim:{load_models()[model].short}"
    (gpu,) = connect(spec).nvml.sweep()
    assert gpu.error is None
    assert gpu.name == load_models()[model].name
    assert gpu.uuid.startswith("GPU-")
    assert gpu.pci_bus_id == "00000000:01:00.0"
    # One shares the machine's memory, and NVML does not support the question.
    assert model == "thor-igpu-gb10b" or (gpu.memory_total_bytes or 0) > GIB
    assert gpu.compute_mode is ComputeMode.DEFAULT
    assert gpu.mig_capable is (load_models()[model].mig is not None and bool(load_models()[model].mig))
    assert gpu.processes == ()
    assert gpu.utilization_percent == 0


FIELDS: dict[str, Callable[[Gpu], object]] = {
    "utilization": lambda gpu: gpu.utilization_percent,
    "processes": lambda gpu: gpu.processes,
    "memory": lambda gpu: (gpu.memory_total_bytes or gpu.memory_used_bytes) or gpu.memory_reserved_bytes,
    "mig": lambda gpu: gpu.mig_enabled if gpu.mig_enabled is not None else gpu.mig_pending,
    "compute-mode": lambda gpu: gpu.compute_mode,
    "nvmlDeviceGetName": lambda gpu: gpu.name,
    "nvmlDeviceGetUUID": lambda gpu: gpu.uuid,
    "nvmlDeviceGetPciInfo": lambda gpu: gpu.pci_bus_id,
}


@pytest.mark.parametrize("fault", FIELDS)
def test_what_one_gpu_does_not_support_is_unknown_there_and_only_there(fault: str) -> None:
    host = connect("sim:2xh200")
    admin.set_fault(host.spec, "not-supported", gpu="0", value=fault)
    first, second = host.nvml.sweep()
    assert first.error is None
    assert FIELDS[fault](first) is None
    assert FIELDS[fault](second) is not None


def test_a_gpu_without_mig_says_so_and_one_with_mig_tells_its_mode() -> None:
    t4, h200 = connect("sim:t4,h200").nvml.sweep()
    assert (t4.mig_capable, t4.mig_enabled, t4.mig_pending) == (False, None, None)
    assert (h200.mig_capable, h200.mig_enabled, h200.mig_pending) == (True, False, False)
    admin.set_fault("sim:h200", "refused", gpu="0", value="nvmlDeviceGetMigMode")
    (untold,) = connect("sim:h200").nvml.sweep()
    assert (untold.mig_capable, untold.mig_enabled, untold.mig_pending) == (None, None, None)


def test_mig_instances_are_read_with_profile_memory_and_ids() -> None:
    host = connect("sim:h200")
    admin.set_mig(host.spec, "0", ["3g.71gb", "1g.18gb"])
    (gpu,) = host.nvml.sweep()
    assert gpu.mig_enabled is True
    assert {mig.profile for mig in gpu.mig_instances} == {"3g.71gb", "1g.18gb"}
    for mig in gpu.mig_instances:
        assert mig.uuid.startswith("MIG-")
        assert None not in {mig.gpu_instance_id, mig.compute_instance_id, mig.multiprocessors, mig.memory_total_bytes}
    assert host.nvml.identities()[0].mig_instances[0].uuid == gpu.mig_instances[0].uuid


def test_memory_is_version_2_where_used_is_without_the_reserved_part() -> None:
    host = connect("sim:h200")
    (gpu,) = host.nvml.sweep()
    assert gpu.memory_used_bytes == 0
    assert gpu.memory_reserved_bytes
    # An older library has version 1 only: used holds the reserved part, which is then unknown.
    without = Altered(host.spec, nvmlDeviceGetMemoryInfo_v2=lambda *_: 13)
    (old,) = NvmlReader(without).sweep()
    assert (old.memory_used_bytes, old.memory_reserved_bytes) == (gpu.memory_reserved_bytes, None)


def test_a_lost_gpu_is_a_row_with_its_error_and_the_others_stay() -> None:
    host = connect("sim:3xt4")
    admin.set_fault(host.spec, "lost", gpu="1")
    gpus = host.nvml.sweep()
    assert [gpu.error is None for gpu in gpus] == [True, False, True]
    assert gpus[1].error == "GPU 1: the GPU is lost: it fell off the bus"
    assert (gpus[1].index, gpus[1].uuid, gpus[1].compute_mode, gpus[1].processes) == (1, None, None, None)


def test_a_gpu_lost_in_the_middle_of_a_watch_keeps_its_name() -> None:
    host = connect("sim:2xh200")
    before = host.nvml.sweep()
    admin.set_fault(host.spec, "lost", gpu="0")
    after = host.nvml.sweep()
    assert (after[0].uuid, after[0].name) == (before[0].uuid, before[0].name)
    assert after[0].error is not None
    assert after[0].memory_total_bytes is None
    assert after[1] == before[1]
    with pytest.raises(GpuLost):
        host.nvml.compute_mode(0)
    admin.clear_faults(host.spec)
    assert host.nvml.sweep() == before


@pytest.mark.parametrize(
    ("fault", "error", "code"),
    [
        ("no-driver", DriverNotLoaded, ExitCode.DRIVER_NOT_LOADED),
        ("no-nvml", NvmlMissing, ExitCode.NVML_MISSING),
        ("no-permission", NoPermission, ExitCode.NO_PERMISSION),
    ],
)
def test_a_host_that_does_not_answer_is_an_error_with_its_exit_code(
    fault: str, error: type[GpushareError], code: ExitCode
) -> None:
    host = connect("sim:h200")
    admin.set_fault(host.spec, fault)
    with pytest.raises(error) as caught:
        host.nvml.sweep()
    assert caught.value.exit_code is code
    assert caught.value.hint


def test_a_machine_without_the_library_is_its_own_error(monkeypatch: pytest.MonkeyPatch, bindings: Any) -> None:
    def absent(_name: str) -> None:
        raise OSError

    monkeypatch.setattr(bindings, "CDLL", absent)
    with pytest.raises(NvmlMissing):
        NvmlReader().count()


def test_two_readers_of_different_hosts_take_turns() -> None:
    one, two = connect("sim:h200").nvml, connect("sim:2xt4").nvml
    for _ in range(2):
        assert [gpu.name for gpu in one.sweep()] == ["NVIDIA H200"]
        assert [gpu.name for gpu in two.sweep()] == ["Tesla T4", "Tesla T4"]


def test_the_real_library_and_a_simulated_host_take_turns(monkeypatch: pytest.MonkeyPatch, bindings: Any) -> None:
    monkeypatch.setattr(bindings, "CDLL", lambda _name: Altered("sim:2xv100-32gb", real=True))
    local, simulated = NvmlReader(), connect("sim:t4").nvml
    for _ in range(2):
        assert local.count() == 2
        assert simulated.count() == 1


def garbage_text(*arguments: Any) -> int:
    arguments[1].value = b"\xff\xfe\xfd"
    return 0


def garbage_bus(_handle: Any, info: Any) -> int:
    info._obj.busId = b"\xff\xfe"
    return 0


@pytest.mark.parametrize(
    ("function", "garbage", "field"),
    [
        ("nvmlDeviceGetName", garbage_text, "name"),
        ("nvmlDeviceGetUUID", garbage_text, "uuid"),
        ("nvmlDeviceGetPciInfo_v3", garbage_bus, "pci_bus_id"),
    ],
)
def test_garbage_instead_of_a_name_is_unknown(function: str, garbage: Callable[..., int], field: str) -> None:
    (gpu,) = NvmlReader(Altered("sim:h200", **{function: garbage})).sweep()
    assert (gpu.error, getattr(gpu, field)) == (None, None)


def test_garbage_instead_of_a_mig_uuid_is_an_error_of_that_gpu() -> None:
    admin.set_mig("sim:h200", "0", ["7g.141gb"])
    reader = NvmlReader(Altered("sim:h200", nvmlDeviceGetUUID=garbage_text))
    (gpu,) = reader.sweep()
    assert "garbage" in gpu.error


def test_a_compute_mode_that_is_not_known_yet_is_unknown() -> None:
    def newer(_handle: Any, mode: Any) -> int:
        mode._obj.value = 9
        return 0

    (gpu,) = NvmlReader(Altered("sim:h200", nvmlDeviceGetComputeMode=newer)).sweep()
    assert (gpu.error, gpu.compute_mode) == (None, None)


def test_the_compute_mode_is_set_and_refused() -> None:
    host = connect("sim:h200")
    host.nvml.set_compute_mode(0, ComputeMode.EXCLUSIVE_PROCESS)
    assert host.nvml.compute_mode(0) is ComputeMode.EXCLUSIVE_PROCESS
    with pytest.raises(NotSupported):
        host.nvml.set_compute_mode(0, ComputeMode.EXCLUSIVE_THREAD)


def test_small_questions() -> None:
    host = connect("sim:h200,p100")
    assert host.nvml.driver_version() == "580.159.04"
    assert host.nvml.compute_capability(0) == (9, 0)
    # Zero while MIG is off, as nvml.h says.
    assert (host.nvml.max_mig_devices(0), host.nvml.persistence(0)) == (0, True)
    assert host.nvml.gpu(1) == host.nvml.sweep()[1]


@pytest.mark.parametrize(
    ("code", "error"),
    [(3, NotSupported), (4, NoPermission), (6, NotFound), (9, DriverNotLoaded), (12, NvmlMissing), (15, GpuLost)],
)
def test_return_codes_equal_exit_codes(code: int, error: type[GpushareError]) -> None:
    found = nvml_error(code, "text", "3")
    assert type(found) is error
    # A lost GPU is one that is not found.
    assert found.exit_code == (6 if code == 15 else code)


@pytest.mark.parametrize(
    ("code", "stable"), [(10, "timeout"), (18, "driver_mismatch"), (19, "in_use"), (28, "not_found"), (999, "nvml")]
)
def test_other_return_codes_have_stable_codes(code: int, stable: str) -> None:
    found = nvml_error(code, "text", "3")
    assert found.code == stable
    assert isinstance(found, OperationFailed) or found.exit_code in {6, 19}


def test_nvml_starts_at_the_first_question() -> None:
    file = nvml_host.new_host("sim:t4", driver_loaded=False)
    host = connect(file.spec)
    assert host.nvml._bindings is None
