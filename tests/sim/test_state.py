"""The state file: shared by processes, never torn, no update lost."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.base.errors import NoPermission
from gpushare.sim import admin, devices, open_simulated
from gpushare.sim.current import changing, current
from gpushare.sim.devices import Device
from gpushare.sim.state import SimulatedGpu, SimulatedMigInstance, StateFile

SPEC = "sim:h200"
ROUNDS = 25


def add_many(spec: str) -> None:
    for _ in range(ROUNDS):
        admin.add_process(spec)


def read_until_full(spec: str, wanted: int) -> None:
    """Read as fast as it goes; exit with 1 when a read fails or the number of processes shrinks."""
    file, seen = StateFile(spec), 0
    while seen < wanted:
        state = file.read()
        assert state is not None
        assert seen <= len(state.processes)
        seen = len(state.processes)


def test_eight_writers_lose_no_update_and_a_reader_sees_no_torn_file() -> None:
    open_simulated(SPEC)
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=add_many, args=(SPEC,)) for _ in range(8)]
    reader = context.Process(target=read_until_full, args=(SPEC, 8 * ROUNDS))
    for process in (reader, *writers):
        process.start()
    for process in (*writers, reader):
        process.join(300)
    assert [process.exitcode for process in (reader, *writers)] == [0] * 9
    state = StateFile(SPEC).read()
    assert state is not None
    assert len({process.pid for process in state.processes}) == 8 * ROUNDS


def test_a_change_that_fails_changes_nothing() -> None:
    open_simulated(SPEC)

    def fail() -> None:
        with changing(StateFile(SPEC)) as (state, _):
            state.fault_uid = 77
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert current(StateFile(SPEC)).fault_uid is None


def test_everything_survives_the_file(sim_dir: Path) -> None:
    admin.set_mig(SPEC, "0", ["1g.18gb"])
    admin.add_process(SPEC)
    file = StateFile(SPEC)
    before = file.read()
    with file.changed() as state:
        assert asdict(state) == asdict(before)  # type: ignore[arg-type]
    assert [path.name for path in sorted(file.directory.iterdir())] == ["lock", "state.json"]
    assert file.directory.parent == sim_dir


def test_a_host_that_was_never_used_has_no_state_until_it_is_changed() -> None:
    file = StateFile(SPEC)
    assert (file.exists(), file.read()) == (False, None)
    with file.changed() as state:
        assert [gpu.model for gpu in state.gpus] == ["h200-141gb"]
    assert file.read() is not None


def test_an_unusable_directory_is_told_with_its_remedy(sim_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (sim_dir / "file").write_text("")
    monkeypatch.setenv("GPUSHARE_SIM_DIR", str(sim_dir / "file"))
    with pytest.raises(NoPermission) as caught:
        open_simulated(SPEC)
    assert "GPUSHARE_SIM_DIR" in caught.value.hint


def test_a_state_of_another_user_is_told_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    # Root may read anything: the refusal itself is made up.
    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(NoPermission, match="cannot read the state") as caught:
        StateFile(SPEC).read()
    assert "GPUSHARE_SIM_DIR" in caught.value.hint


def make_devices(count: int) -> list[Device]:
    return [Device(SimulatedGpu(model="h200", uuid=f"GPU-{index:08d}", pci_bus_id="")) for index in range(count)]


@given(
    st.integers(0, 8),
    st.lists(st.sampled_from(["0", "1", "7", "9", "GPU-0000000", "GPU-00000001", "GPU-", "x", "-1"]), max_size=6),
)
def test_visible_devices_are_distinct_devices_of_the_host(count: int, names: list[str]) -> None:
    host = make_devices(count)
    found = devices.visible_devices(host, names)
    uuids = [device.uuid for device in found]
    assert len(set(uuids)) == len(uuids)
    assert set(uuids) <= {device.uuid for device in host}


def test_visible_devices_as_cuda_shows_them() -> None:
    host = make_devices(3)
    uuids = [device.uuid for device in host]
    assert [device.uuid for device in devices.visible_devices(host, ["2", "0"])] == [uuids[2], uuids[0]]
    # The first entry that names nothing ends the list.
    assert [device.uuid for device in devices.visible_devices(host, ["1", "9", "0"])] == [uuids[1]]
    assert devices.visible_devices(host, ["-1"]) == []
    instances = [
        SimulatedMigInstance(profile="1g.18gb", start=i, gpu_instance_id=7 + i, compute_instance_id=0, uuid=f"MIG-{i}")
        for i in range(2)
    ]
    mig = [Device(host[0].gpu, instance) for instance in instances]
    # Of a MIG GPU CUDA enumerates one instance; any can be named.
    assert [device.uuid for device in devices.visible_devices([*mig, host[1]], [])] == ["MIG-0", uuids[1]]
    assert [device.uuid for device in devices.visible_devices([*mig, host[1]], ["MIG-1"])] == ["MIG-1"]
