"""Each changing MIG call through the real bindings: what every return code and activationStatus becomes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpushare.base.errors import (
    ExitCode,
    GpushareError,
    InUse,
    NoPermission,
    NotFound,
    NotSupported,
    OperationFailed,
    TimedOut,
)
from gpushare.connect import connect
from gpushare.host.host import Host
from gpushare.mig import driver as changing
from gpushare.mig.driver import MigChanges, MigReader, may_change
from gpushare.mig.profile import Placement
from gpushare.sim import admin, library_mig
from gpushare.sim.nvml_abi import Code, Refused

A100, H100 = "sim:a100-80gb", "sim:h100-80gb"
G1, G3, G7 = 19, 9, 0


@pytest.fixture
def host() -> Iterator[Host]:
    host = connect(H100)
    MigChanges(host.nvml).set_mode(0, enabled=True)
    yield host
    host.nvml.restart()


def changes(host: Host) -> MigChanges:
    return MigChanges(host.nvml)


def raised(call: Any, *arguments: Any, **named: Any) -> GpushareError:
    with pytest.raises(GpushareError) as caught:
        call(*arguments, **named)
    assert caught.value.hint
    assert caught.value.gpu == "0"
    return caught.value


# -- mode ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [A100, H100])
def test_both_modes_are_as_wished(spec: str) -> None:
    found = changes(connect(spec))
    assert found.mode(0) == (False, False)
    found.set_mode(0, enabled=True)
    assert found.mode(0) == (True, True)
    found.set_mode(0, enabled=False)
    assert found.mode(0) == (False, False)


def test_a_gpu_without_mig_has_no_mode() -> None:
    found = changes(connect("sim:t4"))
    assert found.mode(0) is None
    assert isinstance(raised(found.set_mode, 0, enabled=True), NotSupported)


@pytest.mark.parametrize(
    ("status", "kind", "exit_code"),
    [
        (Code.IN_USE, InUse, ExitCode.IN_USE),
        (Code.RESET_REQUIRED, OperationFailed, ExitCode.FAILED),
        (Code.NOT_SUPPORTED, NotSupported, ExitCode.NOT_SUPPORTED),
        (Code.TIMEOUT, TimedOut, ExitCode.FAILED),
        (Code.UNKNOWN, OperationFailed, ExitCode.FAILED),
        # Accepted, and the mode that is read back says something else.
        (Code.SUCCESS, OperationFailed, ExitCode.FAILED),
    ],
)
def test_an_activation_status_is_never_success(
    monkeypatch: pytest.MonkeyPatch, status: Code, kind: type[GpushareError], exit_code: ExitCode
) -> None:
    found = changes(connect(A100))

    def pending(gpu: Any, _model: Any, mode: int, _residents: Any) -> Code:
        gpu.mig_pending = mode
        return status

    monkeypatch.setattr(library_mig, "set_mode", pending)
    error = raised(found.set_mode, 0, enabled=True)
    assert isinstance(error, kind)
    assert (error.code, error.exit_code) == ("mode_pending", exit_code)
    assert ("off, pending on" in error.message) is (status is Code.SUCCESS)
    assert found.mode(0) == (False, True)


def test_who_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    host = connect(H100)
    host.nvml.count()
    assert may_change(host)
    admin.set_fault(H100, "user", None, "1000")
    user = connect(H100)
    assert not may_change(user)
    for call in (
        lambda: changes(user).set_mode(0, enabled=True),
        lambda: changes(user).create_gpu_instance(0, G1, Placement(0, 1)),
    ):
        assert isinstance(raised(call), NoPermission)


# -- instances -------------------------------------------------------------------------------------


def test_each_change_is_made_and_told(host: Host) -> None:
    found = changes(host)
    instance = found.create_gpu_instance(0, G3, Placement(4, 4))
    whole = found.create_gpu_instance(0, G1, Placement(2, 1))
    parts = [found.create_compute_instance(0, instance, slices) for slices in (2, 1)]
    found.create_compute_instance(0, whole, 1)
    layout = MigReader(host.nvml).layout(host.nvml.gpu(0))
    assert {
        (instance.id, instance.profile.name, instance.start, tuple(c.profile.slices for c in instance.compute))
        for instance in layout.instances
    } == {(instance, "3g.40gb", 4, (1, 2)), (whole, "1g.10gb", 2, (1,))}
    host.nvml.restart()
    for part in parts:
        found.destroy_compute_instance(0, instance, part)
    found.destroy_gpu_instance(0, instance)
    host.nvml.restart()
    left = MigReader(host.nvml).layout(host.nvml.gpu(0)).instances
    assert [one.id for one in left] == [whole]


def test_a_compute_instance_goes_where_it_is_wished(host: Host) -> None:
    found = changes(host)
    instance = found.create_gpu_instance(0, G3, Placement(0, 4))
    found.create_compute_instance(0, instance, 1, Placement(1, 1))
    (one,) = MigReader(host.nvml).layout(host.nvml.gpu(0)).instances
    assert one.compute[0].placement == Placement(1, 1)


def test_an_old_driver_places_compute_instances_itself(host: Host) -> None:
    admin.set_fault(H100, "not-supported", None, "nvmlGpuInstanceCreateComputeInstanceWithPlacement")
    found = changes(host)
    instance = found.create_gpu_instance(0, G3, Placement(0, 4))
    error = raised(found.create_compute_instance, 0, instance, 1, Placement(1, 1))
    # "Not supported" is about this one; only an entry point that is missing lets the driver choose.
    assert isinstance(error, NotSupported)
    assert found.create_compute_instance(0, instance, 1) == 0


def test_an_entry_point_that_is_missing_lets_the_driver_choose(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> None:
        raise Refused(Code.FUNCTION_NOT_FOUND)

    monkeypatch.setattr(library_mig, "_placement", missing)
    admin.set_mig(H100, "0", ["3g.40gb:0"])
    found = changes(host)
    found.destroy_compute_instance(0, 1, 0)
    assert found.create_compute_instance(0, 1, 1, Placement(1, 1)) == 0


def test_what_the_driver_refuses(host: Host) -> None:
    found = changes(host)
    instance = found.create_gpu_instance(0, G3, Placement(4, 4))
    found.create_compute_instance(0, instance, 3)
    full = raised(found.create_gpu_instance, 0, G1, Placement(4, 1))
    # Not that another program uses it.
    assert (full.code, full.exit_code) == ("insufficient_resources", ExitCode.FAILED)
    assert raised(found.create_compute_instance, 0, instance, 1).code == "insufficient_resources"
    assert raised(found.create_compute_instance, 0, instance, 7).code == "mig_profile_unknown"
    assert isinstance(raised(found.destroy_gpu_instance, 0, instance), InUse)
    assert isinstance(raised(found.destroy_gpu_instance, 0, 13), NotFound)
    assert isinstance(raised(found.destroy_compute_instance, 0, instance, 5), NotFound)
    assert isinstance(raised(found.create_compute_instance, 0, 13, 1), NotFound)
    admin.add_process(H100, mig=str(instance))
    assert isinstance(raised(found.destroy_compute_instance, 0, instance, 0), InUse)
    assert isinstance(raised(found.create_gpu_instance, 0, G1, Placement(7, 1)), OperationFailed)


# -- a driver that says yes and does otherwise -----------------------------------------------------


@pytest.mark.parametrize("stays", [False, True])
def test_another_place_than_asked_is_an_error(host: Host, monkeypatch: pytest.MonkeyPatch, stays: bool) -> None:
    real = library_mig.create_gpu_instance

    def elsewhere(gpu: Any, model: Any, profile: int, _placement: Any, residents: Any) -> int:
        return real(gpu, model, profile, Placement(6, 1), residents)

    def refuse(*_: object) -> None:
        raise OperationFailed("it is in use", "see")

    found = changes(host)
    monkeypatch.setattr(library_mig, "create_gpu_instance", elsewhere)
    if stays:
        monkeypatch.setattr(found, "destroy_gpu_instance", refuse)
    error = raised(found.create_gpu_instance, 0, G1, Placement(0, 1))
    assert error.code == "not_held"
    strays = found.gpu_instance_ids(0, G1)
    if stays:
        assert error.message.endswith("created as 19 at 6, where it stays: it is in use")
        assert error.hint == f"destroy it: sudo nvidia-smi mig -dgi -i 0 -gi {strays[0]}"
    else:
        assert (error.message.endswith("created as 19 at 6"), strays) == (True, ())


@pytest.mark.parametrize("what", ["gpu", "compute"])
def test_what_is_said_to_be_destroyed_and_stays_is_an_error(
    host: Host, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    found = changes(host)
    instance = found.create_gpu_instance(0, G1, Placement(0, 1))
    if what == "compute":
        found.create_compute_instance(0, instance, 1)
    monkeypatch.setattr(library_mig, f"destroy_{what}_instance", lambda *_: None)
    call = found.destroy_gpu_instance if what == "gpu" else found.destroy_compute_instance
    error = raised(call, 0, instance, *([] if what == "gpu" else [0]))
    assert (error.code, error.exit_code) == ("not_held", ExitCode.FAILED)
    assert "still there" in error.message


def test_a_lost_gpu_is_told(host: Host) -> None:
    admin.set_fault(H100, "lost", "0", None)
    found = changes(host)
    for call in (
        lambda: found.mode(0),
        lambda: found.set_mode(0, enabled=False),
        lambda: found.create_gpu_instance(0, G7, Placement(0, 8)),
    ):
        assert raised(call).code == "gpu_lost"


def test_whether_a_reset_is_needed() -> None:
    assert changes(connect(A100)).switches_without_reset(0) is False
    assert changes(connect(H100)).switches_without_reset(0) is True


# -- below the bindings ----------------------------------------------------------------------------


def test_every_placement_reaches_c_by_reference(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    real = library_mig._placement

    def watched(argument: Any) -> Placement:
        seen.append(hasattr(argument, "_obj"))
        return real(argument)

    monkeypatch.setattr(library_mig, "_placement", watched)
    found = changes(host)
    found.create_compute_instance(0, found.create_gpu_instance(0, G3, Placement(0, 4)), 1, Placement(0, 1))
    assert seen == [True, True]


# -- rights, handles and exit codes ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("uid", "simulated", "opens", "may"),
    [
        (0, False, False, True),
        (1000, False, True, True),
        (1000, False, False, False),
        # The node is the real machine's, and says nothing of a simulated host.
        (1000, True, True, False),
    ],
)
def test_who_may_change_a_real_host(
    monkeypatch: pytest.MonkeyPatch, uid: int, simulated: bool, opens: bool, may: bool
) -> None:
    asked: list[tuple[str, int]] = []

    def access(path: str, how: int) -> bool:
        asked.append((path, how))
        return opens

    monkeypatch.setattr(changing, "os", SimpleNamespace(access=access, R_OK=os.R_OK))
    assert may_change(cast("Any", SimpleNamespace(root=uid == 0, is_simulated=simulated))) is may
    assert asked == ([] if uid == 0 or simulated else [("/dev/nvidia-caps/nvidia-cap1", os.R_OK)])


def test_after_a_change_of_the_mode_no_handle_of_before_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """nvml.h, nvmlDeviceSetMigMode: the device may be unbound or reset."""
    host = connect(H100)
    before = host.nvml.handle(0)
    calls: list[str] = []
    restart = host.nvml.restart
    monkeypatch.setattr(host.nvml, "restart", lambda: (calls.append("restart"), restart()))
    MigChanges(host.nvml).set_mode(0, enabled=True)
    assert calls == ["restart"]
    assert host.nvml.handle(0) is not before
