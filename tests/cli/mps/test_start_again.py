"""``gpushare mps start`` where a daemon is, or was, and with each branch of the driver."""

from __future__ import annotations

import signal
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from gpushare.base.errors import NotFound, OperationFailed
from gpushare.base.model import ComputeMode
from gpushare.base.selection import Device
from gpushare.base.units import MIB
from gpushare.cli.options import settings
from gpushare.host.nvml import NvmlReader
from gpushare.mps.control import MpsControl
from gpushare.mps.daemons import own_daemon
from gpushare.mps.home import DaemonHome, home_of
from gpushare.mps.limits import Limits
from gpushare.mps.start import plan_start
from tests.cli.drive import Cli, Refused, World
from tests.cli.mps.test_start import TWO, daemons


def test_a_daemon_that_nobody_noted_is_not_taken_down(
    refused: Refused, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody's daemon listens in our directory: a second start fails there, and its way back must not end it."""
    home = home_of(world.host.run_directory, world.uuid())
    home.create()
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(home.pipe), "CUDA_VISIBLE_DEVICES": "GPU-elsewhere"}
    with monkeypatch.context() as patched:
        patched.setattr("gpushare.sim.mps_control.daemon_devices", lambda *_: [None])
        assert world.host.programs.run(["nvidia-cuda-mps-control", "-d"], env=environment).exit_code == 0
    sockets = home.files_of_dead_daemon()
    refused("mps", "start", code="daemon_exists", exit_code=19)
    assert len(world.state.daemons) == 1
    assert home.files_of_dead_daemon() == sockets != []


def test_dead_daemon_then_start(cli: Cli, world: World) -> None:
    cli("mps", "start", "--threads", "25").ok()
    world.send(world.state.daemons[0].pid, signal.SIGKILL)
    (dead,) = daemons(cli)
    assert (dead["pid"], "is gone" in str(dead["error"])) == (None, True)
    cli("mps", "start", "--threads", "50").ok()
    (daemon,) = daemons(cli)
    assert (daemon["threads_percent"], daemon["error"]) == (50.0, None)


def test_dead_daemon_is_remembered_by_a_start_that_fails(
    refused: Refused, cli: Cli, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli("mps", "start", "--exclusive").ok()
    world.send(world.state.daemons[0].pid, signal.SIGKILL)
    before = (world.directory / "run").rglob("daemon.json")
    assert len(list(before)) == 1
    with monkeypatch.context() as patched:
        patched.setattr(MpsControl, "threads", lambda *_: 99.0)
        answer = cli("mps", "start", "--threads", "30")
        assert answer.code == 1
    assert len(list((world.directory / "run").rglob("daemon.json"))) == 1
    cli("mps", "stop").ok()
    assert world.state.gpus[0].compute_mode == ComputeMode.DEFAULT


@pytest.mark.parametrize("after_a_dead_one", [False, True])
def test_a_new_daemon_that_could_not_be_ended_keeps_its_record(
    cli: Cli, world: World, monkeypatch: pytest.MonkeyPatch, after_a_dead_one: bool
) -> None:
    """The compute mode could not be restored either: a stop does both."""
    if after_a_dead_one:
        cli("mps", "start").ok()
        world.send(world.state.daemons[0].pid, signal.SIGKILL)
    set_mode = NvmlReader.set_compute_mode

    def only_exclusive(self: NvmlReader, index: int, mode: ComputeMode) -> None:
        if mode is ComputeMode.EXCLUSIVE_PROCESS:
            set_mode(self, index, mode)

    def stays(*_: object, **__: object) -> bool:
        raise OperationFailed("it still runs", "end it", code="daemon_stays")

    with monkeypatch.context() as patched:
        patched.setattr(MpsControl, "threads", lambda *_: 99.0)
        patched.setattr("gpushare.mps.start.end_daemon", stays)
        patched.setattr(NvmlReader, "set_compute_mode", only_exclusive)
        assert cli("mps", "start", "--threads", "30", "--exclusive").code != 0
    assert len(world.state.daemons) == 1
    assert world.state.gpus[0].compute_mode == ComputeMode.EXCLUSIVE_PROCESS
    cli("mps", "stop").ok()
    assert world.state.daemons == []
    assert world.state.gpus[0].compute_mode == ComputeMode.DEFAULT


@pytest.mark.parametrize("again", [(), ("--exclusive",)])
def test_compute_mode_of_a_dead_daemon_is_restored_by_the_next(cli: Cli, world: World, again: tuple[str, ...]) -> None:
    cli("mps", "start", "--exclusive").ok()
    world.send(world.state.daemons[0].pid, signal.SIGKILL)
    cli("mps", "start", *again).ok()
    cli("mps", "stop").ok()
    assert world.state.gpus[0].compute_mode == ComputeMode.DEFAULT


def test_foreign_daemon_of_another_gpu(cli: Cli, sim_dir: Path) -> None:
    world = World(TWO)
    world.foreign_daemon(sim_dir, uuid=world.uuid(1))
    cli("mps", "start", "-g", "0", host=TWO).ok()


@pytest.mark.parametrize("driver", ["535.261.03", "550.163.01", "580.159.04", "595.45.04"])
def test_every_driver_branch(cli: Cli, world: World, driver: str) -> None:
    world.fault("driver", driver)
    cli("mps", "start", "--threads", "12.5", "--memory", "2000M", "--priority", "low").ok()
    world.client()
    (daemon,) = daemons(cli)
    assert (daemon["threads_percent"], daemon["memory_limit_bytes"], daemon["error"]) == (12.5, 2000 * MIB, None)
    cli("mps", "set", "--threads", "50").ok()
    cli("mps", "stop", "--force").ok()
    assert world.state.daemons == []


def test_two_at_once_the_loser_leaves_the_compute_mode(cli: Cli, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one starts after this one has made its first plan, and before it has the lock."""
    proper, others = DaemonHome.locked, iter([("mps", "start", "--exclusive")])

    def locked(self: DaemonHome) -> AbstractContextManager[None]:
        mine = dict(vars(settings))
        for words in others:
            cli(*words).ok()
        vars(settings).update(mine)
        return proper(self)

    monkeypatch.setattr(DaemonHome, "locked", locked)
    answer = cli("mps", "start", "--exclusive", output="json")
    assert answer.json["errors"][0]["code"] == "daemon_exists"
    assert world.state.gpus[0].compute_mode == ComputeMode.EXCLUSIVE_PROCESS
    cli("mps", "stop").ok()
    assert world.state.gpus[0].compute_mode == ComputeMode.DEFAULT


def test_a_plan_reverts_only_the_mode_that_it_set(world: World) -> None:
    device = Device(gpu=world.host.nvml.sweep()[0])
    (step,) = [
        step for step in plan_start(world.host, device, Limits(), exclusive=True).steps if "nvidia-smi" in step.command
    ]
    world.host.nvml.set_compute_mode(0, ComputeMode.EXCLUSIVE_PROCESS)
    step.do()
    assert step.revert is not None
    step.revert()
    assert world.state.gpus[0].compute_mode == ComputeMode.EXCLUSIVE_PROCESS


def test_a_dead_daemon_of_ours_does_not_hide_a_shared_one(cli: Cli, world: World, sim_dir: Path) -> None:
    cli("mps", "start").ok()
    device = Device(gpu=world.host.nvml.sweep()[0])
    live = home_of(world.host.run_directory, device.uuid)
    record = live.read()
    assert record is not None
    dead = home_of(sim_dir / "r", device.uuid)
    dead.create()
    dead.write(replace(record, pid=4_190_000))
    host = replace(world.host, run_directory=sim_dir / "r", shared_run_directories=(world.host.run_directory,))
    assert own_daemon(host, device)[0] == live
    world.send(record.pid, signal.SIGKILL)
    with pytest.raises(NotFound, match="4190000"):
        own_daemon(host, device)
