"""What is set is read back, and what did not hold is taken back: compute mode beside the time-slice, limits of MPS."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpushare.base.errors import BadUsage
from gpushare.base.model import ComputeMode, TimeSlice
from gpushare.base.selection import Device, select_one
from gpushare.host.nvml import NvmlReader
from gpushare.host.smi import ComputePolicy
from gpushare.mps.control import MpsControl
from gpushare.mps.limits import check_memory
from gpushare.timeslice.policy import plan_level
from tests.cli.drive import Cli, Patch, Refused, World, sure


def test_a_compute_mode_that_does_not_hold_is_an_error(refused: Refused, world: World, monkeypatch: Patch) -> None:
    world.host.nvml.set_compute_mode(0, ComputeMode.EXCLUSIVE_PROCESS)
    monkeypatch.setattr(NvmlReader, "set_compute_mode", lambda *_: None)
    said = refused("timeslice", "set", "short", code="not_held", exit_code=1)
    assert "the compute mode of GPU 0 was set to default but reads back as exclusive-process" in said


def test_a_time_slice_that_cannot_be_read_back_is_an_error_and_taken_back(refused: Refused, monkeypatch: Patch) -> None:
    put, read, told = ComputePolicy.set, ComputePolicy.read, []

    def heard(self: ComputePolicy, uuid: str, level: TimeSlice) -> object:
        told.append(level)
        return put(self, uuid, level)

    monkeypatch.setattr(ComputePolicy, "set", heard)
    monkeypatch.setattr(ComputePolicy, "read", lambda self: {0: None} if told[-1:] == [TimeSlice.SHORT] else read(self))
    said = refused("timeslice", "set", "short", code="not_held", exit_code=1)
    assert "the time-slice of GPU 0 was set to short but reads back as unknown" in said
    assert told[:2] == [TimeSlice.SHORT, TimeSlice.DEFAULT]


def test_what_could_not_go_back_is_named_with_its_command(cli: Cli, world: World, monkeypatch: Patch) -> None:
    cli("mps", "start").ok()
    world.client()
    # From the first try on no priority is taken, not even the old one.
    monkeypatch.setattr(MpsControl, "priority", lambda _: None)
    answer = cli("mps", "set", "--threads", "25", "--priority", "low").ends(1)
    assert "could not be undone" in answer.lines("error")[0]


def test_a_server_that_came_after_the_plan_is_left_alone(cli: Cli, world: World, monkeypatch: Patch) -> None:
    """The way back touches the servers that the plan knew, and only those that are still there."""
    cli("mps", "start").ok()
    world.client()
    touched: list[int] = []
    proper = MpsControl.servers
    monkeypatch.setattr(MpsControl, "servers", lambda self: [*proper(self), 4242] if touched else proper(self))
    real, memory = MpsControl.set_threads, MpsControl.memory

    def watched(self: MpsControl, percent: float, server: int | None = None) -> None:
        touched.extend([] if server is None else [server])
        real(self, percent, server)

    monkeypatch.setattr(MpsControl, "set_threads", watched)
    monkeypatch.setattr(MpsControl, "memory", lambda self, server=None: "7M" if server else memory(self))
    cli("mps", "set", "--threads", "25", "--memory", "2G").ends(1)
    (server,) = world.state.daemons[0].servers
    assert touched == [server.pid, server.pid]


def test_a_memory_limit_may_be_all_of_the_gpu_and_not_more(world: World) -> None:
    device = select_one(None, world.host.nvml.sweep())
    total = sure(device.memory_total_bytes)
    check_memory(device, total)
    check_memory(device, None)
    with pytest.raises(BadUsage) as caught:
        check_memory(device, total + 1)
    assert caught.value.code == "limit_above_gpu"
    check_memory(Device(gpu=replace(device.gpu, memory_total_bytes=None)), 2**60)


def test_each_step_names_the_command_that_takes_it_back(world: World) -> None:
    world.host.nvml.set_compute_mode(0, ComputeMode.EXCLUSIVE_PROCESS)
    device = select_one(None, world.host.nvml.sweep())
    mode, level = plan_level(world.host, [device], TimeSlice.SHORT).steps
    uuid = device.uuid
    assert (mode.command, mode.undo) == (
        f"nvidia-smi -i {uuid} -c DEFAULT",
        f"nvidia-smi -i {uuid} -c EXCLUSIVE_PROCESS",
    )
    assert (level.command, level.undo) == (
        f"nvidia-smi compute-policy -i {uuid} --set-timeslice 1",
        f"nvidia-smi compute-policy -i {uuid} --set-timeslice 0",
    )


def test_the_undo_of_a_first_limit_is_none_at_all(cli: Cli) -> None:
    cli("mps", "start").ok()
    said = cli("mps", "set", "--threads", "25", "--memory", "2G", "--priority", "low").ok().out
    assert "gpushare mps set -g 0 --threads 100 --memory none --priority normal" in said
