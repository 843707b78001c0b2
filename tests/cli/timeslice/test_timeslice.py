"""``gpushare timeslice``."""

from __future__ import annotations

import pytest

from gpushare.base.errors import InUse
from gpushare.base.model import ComputeMode, TimeSlice
from gpushare.base.selection import Device
from gpushare.host.smi import ComputePolicy
from gpushare.timeslice.policy import plan_level
from tests.cli.drive import Cli, Patch, Refused, Words, World
from tests.errors import fails

TWO = "sim:2xh200"


@pytest.mark.parametrize(
    ("level", "number"),
    [("default", 0), ("short", 1), ("medium", 2), ("long", 3), ("0", 0), ("1", 1), ("2", 2), ("3", 3), ("LONG", 3)],
)
def test_set_by_name_and_number(cli: Cli, world: World, level: str, number: int) -> None:
    cli("timeslice", "set", level).ok()
    assert world.state.gpus[0].time_slice == number
    (gpu,) = cli("timeslice", "show", output="json").ok().data["gpus"]
    assert gpu["time_slice"] == ["default", "short", "medium", "long"][number]


def test_set_says_what_it_equals_and_its_undo(cli: Cli, world: World) -> None:
    answer = cli("timeslice", "set", "long", output="json").ok()
    (step,) = answer.data["steps"]
    assert step["command"] == f"nvidia-smi compute-policy -i {world.uuid()} --set-timeslice 3"
    assert step["undo"] == f"nvidia-smi compute-policy -i {world.uuid()} --set-timeslice 0"
    assert answer.data["undo"] == "gpushare timeslice reset -g 0"
    assert "no millisecond" in answer.err
    again = cli("timeslice", "set", "long", output="json").ok()
    assert again.data["steps"] == []
    assert "already at time-slice long" in again.err
    # The undo is the level that was there.
    medium = cli("timeslice", "set", "medium").ok()
    assert medium.out == "time-slice level medium on GPU 0; undo: gpushare timeslice set long -g 0\n"
    default = cli("timeslice", "reset").ok()
    assert default.out == "time-slice level default on GPU 0; undo: gpushare timeslice set medium -g 0\n"
    # A dry run changes nothing.
    world.host.nvml.set_compute_mode(0, ComputeMode.PROHIBITED)
    data = cli("timeslice", "set", "short", "-n", output="json").ok().data
    assert data["dry_run"]
    assert [step["command"].split()[1] for step in data["steps"]] == ["-i", "compute-policy"]
    assert (world.state.gpus[0].time_slice, world.state.gpus[0].compute_mode) == (0, ComputeMode.PROHIBITED)
    assert not list(world.host.run_directory.glob("mode"))
    # Without -n the note is there.
    cli("timeslice", "set", "short").ok()
    assert list(world.host.run_directory.glob("mode/*.json"))


@pytest.mark.parametrize("level", ["4", "-1", "tiny", "", "1.0", "short,long"])
def test_unknown_level(refused: Refused, level: str) -> None:
    words = ("--", level) if level.startswith("-") else (level,)
    refused("timeslice", "set", *words, code="bad_level", exit_code=2)


def test_reset_restores_level_and_mode(cli: Cli, world: World, refused: Refused) -> None:
    world.host.nvml.set_compute_mode(0, ComputeMode.EXCLUSIVE_PROCESS)
    assert "it becomes default" in cli("timeslice", "set", "short").ok().err
    assert world.state.gpus[0].compute_mode == ComputeMode.DEFAULT
    cli("timeslice", "set", "long").ok()
    cli("timeslice", "reset").ok()
    assert (world.state.gpus[0].time_slice, world.state.gpus[0].compute_mode) == (0, ComputeMode.EXCLUSIVE_PROCESS)
    again = cli("timeslice", "reset", output="json").ok()
    assert again.data["steps"] == []
    assert "the time-slice is already default" in again.err
    world.host.nvml.set_compute_mode(0, ComputeMode.EXCLUSIVE_PROCESS)
    world.fault("user", "1000")
    assert "could not be undone" not in refused("timeslice", "set", "short", code="no_permission", exit_code=4)


def test_several_gpus(refused: Refused, cli: Cli) -> None:
    refused("timeslice", "set", "short", code="gpu_not_named", exit_code=2, host=TWO)
    refused("timeslice", "reset", code="gpu_not_named", exit_code=2, host=TWO)
    refused("timeslice", "set", "short", "-g", "5", code="unknown_gpu", exit_code=6, host=TWO)
    world = World(TWO)
    cli("timeslice", "set", "long", "-g", "all", host=TWO).ok()
    cli("timeslice", "reset", "-g", "1", host=TWO).ok()
    assert [gpu.time_slice for gpu in world.state.gpus] == [3, 0]


@pytest.mark.parametrize("words", [("set", "short"), ("reset",)])
def test_not_root_changes_nothing(refused: Refused, cli: Cli, world: World, words: Words) -> None:
    if words == ("reset",):
        cli("timeslice", "set", "long").ok()
    world.fault("user", "1000")
    message = refused("timeslice", *words, code="no_permission", exit_code=4)
    assert "needs root" in message
    # It was not done, so there is nothing that could not be undone.
    assert "could not be undone" not in message
    assert cli("timeslice", *words, "--dry-run").ok().out


def test_gpu_without_time_slice(refused: Refused, cli: Cli) -> None:
    for words in (("set", "short"), ("reset",)):
        message = refused("timeslice", *words, code="not_supported", exit_code=3, host="sim:p100")
        assert "gpushare timeslice show" in message
    host = "sim:p100,h200"
    refused("timeslice", "set", "short", "-g", "0", code="no_time_slice", exit_code=3, host=host)
    refused("timeslice", "set", "short", "-g", "all", code="no_time_slice", exit_code=3, host=host)
    cli("timeslice", "set", "short", "-g", "1", host=host).ok()
    shown = cli("timeslice", "show", host=host, output="json").ok()
    assert [gpu["time_slice"] for gpu in shown.data["gpus"]] == [None, "short"]
    assert [gpu["supported"] for gpu in shown.data["gpus"]] == [False, True]
    assert "lists no time-slice for GPU 0" in shown.err


def test_mig_instance_and_lost_gpu(refused: Refused, world: World) -> None:
    (uuid,) = world.mig("3g.71gb")
    for words in (("set", "short"), ("reset",)):
        assert "name the GPU: -g 0" in refused("timeslice", *words, "-g", uuid, code="not_supported", exit_code=3)
    world.fault("lost")
    refused("timeslice", "set", "short", code="gpu_lost", exit_code=6)


def test_beside_mps(refused: Refused, cli: Cli, world: World) -> None:
    cli("mps", "start").ok()
    assert "gpushare mps stop -g 0" in refused("timeslice", "set", "short", code="mps_in_force", exit_code=19)
    assert world.state.gpus[0].time_slice == 0
    # A dead daemon is no hindrance, and none is none.
    world.send(world.state.daemons[0].pid, 9)
    cli("timeslice", "set", "medium").ok()
    assert world.state.gpus[0].time_slice == 2
    cli("mps", "stop").ok()
    cli("timeslice", "set", "long").ok()
    # On another GPU it is no hindrance either.
    cli("mps", "start", "-g", "0", host=TWO).ok()
    cli("timeslice", "set", "short", "-g", "1", host=TWO).ok()
    assert [gpu.time_slice for gpu in World(TWO).state.gpus] == [0, 1]


def test_failure_on_the_second_gpu_rolls_the_first_back(refused: Refused, cli: Cli, monkeypatch: Patch) -> None:
    world = World(TWO)
    world.host.nvml.set_compute_mode(0, ComputeMode.EXCLUSIVE_PROCESS)
    second, proper = world.uuid(1), ComputePolicy.set

    def refusing(self: ComputePolicy, uuid: str, level: object) -> object:
        return None if uuid == second else proper(self, uuid, level)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(ComputePolicy, "set", refusing)
        refused("timeslice", "set", "short", "-g", "all", code="not_held", exit_code=1, host=TWO)
    cli("timeslice", "set", "short", "-g", "all", host=TWO).ok()
    with monkeypatch.context() as patched:
        patched.setattr(ComputePolicy, "set", refusing)
        refused("timeslice", "reset", "-g", "all", code="not_held", exit_code=1, host=TWO)
    cli("timeslice", "reset", "-g", "all", host=TWO).ok()
    assert world.state.gpus[0].compute_mode == ComputeMode.EXCLUSIVE_PROCESS


def test_a_failed_second_set_keeps_what_was_found(refused: Refused, cli: Cli, world: World, monkeypatch: Patch) -> None:
    world.host.nvml.set_compute_mode(0, ComputeMode.EXCLUSIVE_PROCESS)
    cli("timeslice", "set", "short").ok()
    world.host.nvml.set_compute_mode(0, ComputeMode.PROHIBITED)
    with monkeypatch.context() as patched:
        patched.setattr(ComputePolicy, "set", lambda *_: None)
        refused("timeslice", "set", "long", code="not_held", exit_code=1)
    cli("timeslice", "reset").ok()
    assert world.state.gpus[0].compute_mode == ComputeMode.EXCLUSIVE_PROCESS


def test_show_of_each_output(cli: Cli) -> None:
    for form in ("table", "plain", "json", "yaml", "csv"):
        assert "default" in cli("timeslice", "show", host=TWO, output=form).ok().out


def test_a_reset_beside_a_daemon_prints_no_undo_that_is_refused(cli: Cli) -> None:
    cli("timeslice", "set", "short").ok()
    cli("mps", "start").ok()
    assert "undo" not in cli("timeslice", "reset").ok().out


def test_missing_smi(refused: Refused, world: World) -> None:
    world.fault("missing", "nvidia-smi")
    refused("timeslice", "set", "short", code="program_missing", exit_code=3)
    refused("timeslice", "show", code="program_missing", exit_code=3)
    # Without NVML it says that too.
    world.fault("no-nvml")
    refused("timeslice", "show", code="nvml_missing", exit_code=12)


def test_levels_beside_what_others_set(world: World, cli: Cli) -> None:
    world.host.nvml.set_compute_mode(0, ComputeMode.EXCLUSIVE_PROCESS)
    device = Device(gpu=world.host.nvml.sweep()[0])
    step = plan_level(world.host, [device], TimeSlice.SHORT).steps[0]
    world.host.nvml.set_compute_mode(0, ComputeMode.DEFAULT)
    step.do()
    assert step.revert is not None
    step.revert()
    assert world.state.gpus[0].compute_mode == ComputeMode.DEFAULT
    device = Device(gpu=world.host.nvml.gpu(0))
    cli("mps", "start").ok()
    assert plan_level(world.host, [device], TimeSlice.SHORT, beside_mps=True).steps
    cli("mps", "stop").ok()
    cli("mps", "start", "--exclusive").ok()
    with fails(InUse, "mps_in_force"):
        plan_level(world.host, [device], TimeSlice.SHORT, beside_mps=True)
