"""MPS daemons that are found again: of earlier versions, with limits that others set, stopped, or started by several at once."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gpushare.base.errors import TimedOut
from gpushare.base.units import GIB
from gpushare.host.program import Completed
from gpushare.hostfile.look import unit_device
from gpushare.mps.daemons import find_daemons
from gpushare.mps.home import home_of, pipe_directory
from gpushare.sim.programs import SimulatedPrograms
from tests.cli.drive import Cli, Patch, Real, World


def shown(cli: Cli) -> dict[str, Any]:
    (daemon,) = cli("mps", "status", output="json").ok().data["mps_daemons"]
    return dict(daemon)


def test_a_daemon_of_ours_without_a_record(cli: Cli, world: World) -> None:
    cli("mps", "start", "--threads", "25").ok()
    (home_of(world.host.run_directory, world.uuid()).directory / "daemon.json").unlink()
    assert shown(cli)["ours"] is True
    cli("mps", "stop").ok()
    assert world.state.daemons == []


def test_the_unit_of_a_device_is_known_by_its_pipe_directory(world: World) -> None:
    gpus = world.host.nvml.sweep()
    uuid = world.uuid()
    daemon = _found(world, pipe_directory(uuid), uuid)
    assert unit_device(daemon, gpus) == uuid
    # Anybody can say that it listens there.
    assert unit_device(dataclasses.replace(daemon, trusted=False), gpus) is None
    world.send(daemon.daemon.pid or 0, signal.SIGKILL)
    assert unit_device(_found(world, pipe_directory("GPU-ffffffff-0000-0000-0000-000000000000"), "0"), gpus) is None


def _found(world: World, pipe: str, visible: str) -> Any:
    environment = {"CUDA_MPS_PIPE_DIRECTORY": pipe, "CUDA_VISIBLE_DEVICES": visible}
    assert world.host.programs.run(["nvidia-cuda-mps-control", "-d"], env=environment).exit_code == 0
    return next(daemon for daemon in find_daemons(world.host, (), deep=False) if daemon.daemon.pipe_directory == pipe)


@pytest.mark.parametrize(("device", "value", "limit"), [("0", "3G", 3 * GIB), ("UUID", "3G", None)])
def test_a_limit_of_another_is_shown_and_captured(
    cli: Cli, world: World, device: str, value: str, limit: int | None
) -> None:
    """Of a limit by UUID the daemon prints nothing."""
    cli("mps", "start").ok()
    assert shown(cli)["memory_limit_bytes"] is None
    pipe = world.state.daemons[0].pipe_directory
    command = f"set_default_device_pinned_mem_limit {device.replace('UUID', world.uuid())} {value}\n"
    world.host.programs.run(["nvidia-cuda-mps-control"], stdin=command, env={"CUDA_MPS_PIPE_DIRECTORY": pipe})
    assert shown(cli)["memory_limit_bytes"] == limit
    assert (f"memory: {value}" in cli("capture").ok().out.replace("'", "")) == (limit is not None)
    clear = f"set_default_device_pinned_mem_limit {device.replace('UUID', world.uuid())} 0G\n"
    world.host.programs.run(["nvidia-cuda-mps-control"], stdin=clear, env={"CUDA_MPS_PIPE_DIRECTORY": pipe})
    assert shown(cli)["memory_limit_bytes"] is None


def test_a_limit_in_the_environment_of_a_foreign_daemon_is_shown(cli: Cli, world: World, sim_dir: Path) -> None:
    environment = {
        "CUDA_MPS_PIPE_DIRECTORY": str(sim_dir / "p"),
        "CUDA_MPS_LOG_DIRECTORY": str(sim_dir / "l"),
        "CUDA_VISIBLE_DEVICES": world.uuid(),
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=5G",
    }
    assert world.host.programs.run(["nvidia-cuda-mps-control", "-d"], env=environment).exit_code == 0
    assert shown(cli)["memory_limit_bytes"] == 5 * GIB


def test_a_stopped_daemon_is_still_mps(cli: Cli, world: World, monkeypatch: Patch) -> None:
    monkeypatch.setattr("gpushare.mps.daemons.LOOK_SECONDS", 0.2)
    cli("mps", "start").ok()
    world.send(world.state.daemons[0].pid, signal.SIGSTOP)
    data = cli("status", output="json").data
    assert data["gpus"][0]["sharing"] == "mps"
    for daemon in (data["mps_daemons"][0], shown(cli)):
        assert "did not answer" in daemon["error"]
        assert "within 0.2 s" in daemon["error"]


def test_another_users_daemon_is_asked_with_v_only(cli: Cli, world: World, sim_dir: Path) -> None:
    cli("status").ok()
    world.fault("user", "61000")
    world.foreign_daemon(sim_dir, uuid=world.uuid())
    world.fault("user", "0")
    quiet, asked = shown(cli), cli("mps", "status", "-v", output="json").ok().data["mps_daemons"][0]
    assert (quiet["threads_percent"], asked["threads_percent"]) == (None, 100.0)
    assert ("status -v" in quiet["note"], asked["note"], quiet["error"]) == (True, None, None)
    assert "not asked" in cli("mps", "status").ok().out
    checks = {check["id"]: check["verdict"] for check in cli("doctor", output="json").data["checks"]}
    assert checks["mps.foreign"] == "warn"
    assert "gpushare_mps_daemon_up{" not in cli("export", "prometheus").ok().out


def test_a_daemon_whose_first_answer_is_late_is_waited_for(cli: Cli, monkeypatch: Patch) -> None:
    """On a machine that is very busy, or while somebody else's conversation with it stands still."""
    run = SimulatedPrograms.run
    cli("status").ok()
    late: list[str] = []

    def slow(self: SimulatedPrograms, argv: Sequence[str], **named: Any) -> Completed:
        done = run(self, argv, **named)
        if "-d" in argv:
            late.extend(["once", "twice"])
        elif late:
            late.pop()
            raise TimedOut("no answer", "wait")
        return done

    monkeypatch.setattr(SimulatedPrograms, "run", slow)
    cli("mps", "start", "--threads", "50").ok()
    assert late == []
    monkeypatch.setattr("gpushare.mps.start._ANSWER_SECONDS", -1.0)
    cli("mps", "stop").ok()
    assert cli("mps", "start", output="json").error["code"] == "daemon_hangs"


def test_a_daemon_that_dies_right_after_its_start_is_noticed(cli: Cli, world: World, monkeypatch: Patch) -> None:
    run = SimulatedPrograms.run
    cli("status").ok()

    def dying(self: SimulatedPrograms, argv: Sequence[str], **named: Any) -> Completed:
        done = run(self, argv, **named)
        if "-d" in argv:
            world.send(world.state.daemons[-1].pid, signal.SIGKILL)
        return done

    monkeypatch.setattr(SimulatedPrograms, "run", dying)
    # Whoever waited for its answer would never come back.
    monkeypatch.setattr("gpushare.mps.start._ANSWER_SECONDS", 1e9)
    answer = cli("mps", "start", "--exclusive", output="json")
    (error,) = answer.json["errors"]
    assert (error["code"], answer.code) == ("daemon_silent", 1)
    assert "right after its start" in error["message"]
    assert world.state.gpus[0].compute_mode == 0


def test_several_starts_at_once(real: Real, cli: Cli, world: World) -> None:
    """One wins; the others say so, and none of them calls the winner's daemon somebody else's."""
    cli("status").ok()
    for _ in range(3):
        started = [real("-o", "json", "mps", "start", "--exclusive") for _ in range(4)]
        answers = [one.process.communicate(timeout=120) for one in started]
        codes = sorted(one.process.returncode for one in started)
        assert codes == [0, 19, 19, 19], answers
        for one, (out, err) in zip(started, answers, strict=True):
            if one.process.returncode:
                assert '"daemon_exists"' in out, (out, err)
                assert "gpushare mps set" in out
        assert len(world.state.daemons) == 1
        cli("mps", "stop").ok()
        assert world.state.gpus[0].compute_mode == 0


@pytest.mark.parametrize(("driver", "anybody"), [("535.261.03", True), ("550.163.01", False)])
def test_whose_limits_every_user_may_change_is_said(cli: Cli, world: World, driver: str, anybody: bool) -> None:
    world.fault("user", "0")
    world.fault("driver", driver)
    cli("mps", "start").ok()

    def warned() -> list[str]:
        return [check["id"] for check in cli("doctor", output="json").data["checks"] if check["id"] == "mps.open"]

    assert warned() == ["mps.open"] * anybody
    Path(world.state.daemons[0].pipe_directory).chmod(0o700)
    assert warned() == []
