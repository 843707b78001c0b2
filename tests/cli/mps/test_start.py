"""``gpushare mps start``."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from gpushare.base.model import ComputeMode
from gpushare.base.units import GIB, MIB
from gpushare.mps import start
from gpushare.mps.control import MpsControl
from gpushare.mps.home import pipe_users
from tests.cli.drive import Cli, Refused, World, same

TWO = "sim:2xt4,a30"


def daemons(cli: Cli, host: str = "sim:h200") -> list[dict[str, object]]:
    return cli("mps", "status", host=host, output="json").ok().data["mps_daemons"]


def test_limits_are_set_and_shown(cli: Cli, world: World) -> None:
    data = cli("mps", "start", "--threads", "25", "--memory", "1500M", "--priority", "low", output="json").ok().data
    assert data["dry_run"] is False
    assert len(data["steps"]) == 7
    (daemon,) = daemons(cli)
    assert (daemon["threads_percent"], daemon["memory_limit_bytes"], daemon["priority"]) == (25.0, 1500 * MIB, "low")
    assert (daemon["ours"], daemon["transient"], daemon["gpu_index"]) == (True, False, 0)
    (simulated,) = world.state.daemons
    assert (simulated.threads, simulated.memory, simulated.priority) == (25.0, {"0": 1500}, 1)
    assert simulated.visible == [world.uuid()]
    pid = world.client()
    client = world.process(pid)
    assert (client.threads, client.memory_limit_bytes) == (25.0, 1500 * MIB)


def test_no_limits_also_where_the_callers_environment_has_some(
    cli: Cli, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "10")
    monkeypatch.setenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=1G")
    monkeypatch.setenv("CUDA_MPS_CLIENT_PRIORITY", "1")
    answer = cli("mps", "start").ok()
    assert (answer.out, answer.err) == ("MPS on GPU 0: no limits; undo: gpushare mps stop -g 0\n", "")
    (daemon,) = world.state.daemons
    assert (daemon.threads, daemon.memory, daemon.priority) == (100.0, {}, 0)
    (shown,) = daemons(cli)
    assert (shown["threads_percent"], shown["memory_limit_bytes"], shown["priority"]) == (100.0, None, "normal")


def test_limits_per_gpu(cli: Cli) -> None:
    cli("mps", "start", "-g", "0,1", "--memory", "0=4G,1=8G", "--threads", "1=50", host=TWO).ok()
    limits = [(one["gpu_index"], one["memory_limit_bytes"], one["threads_percent"]) for one in daemons(cli, TWO)]
    assert limits == [(0, 4 * GIB, 100.0), (1, 8 * GIB, 50.0)]


def test_dry_run_needs_no_root_and_changes_nothing(cli: Cli, world: World) -> None:
    world.fault("user", "1000")
    before = same(world.spec)
    data = cli("mps", "start", "--threads", "25", "--exclusive", "-n", output="json").ok().data
    assert data["dry_run"]
    programs = [step["command"].split()[0].split("=")[0] for step in data["steps"]]
    assert programs == ["mkdir", "write", "nvidia-smi", "CUDA_VISIBLE_DEVICES", "echo", "write"]
    assert same(world.spec) == before
    assert not (world.directory / "run").exists()


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--threads", "0"), "bad_percentage"),
        (("--threads", "101"), "bad_percentage"),
        (("--threads", "many"), "bad_percentage"),
        (("--threads", "0=25,0=30"), "bad_limit"),
        (("--threads", "0=25,30"), "bad_limit"),
        (("--threads", "1=25"), "bad_limit"),
        (("--memory", "4"), "bad_size"),
        (("--memory", "-4G"), "bad_size"),
        (("--memory", "none"), "bad_size"),
        (("--memory", "1000T"), "limit_above_gpu"),
        (("--memory", "150G"), "limit_above_gpu"),
        (("--priority", "high"), "bad_priority"),
        (("--pipe-directory", "/x"), "usage"),
    ],
)
def test_wrong_limits(refused: Refused, words: tuple[str, ...], code: str) -> None:
    refused("mps", "start", *words, code=code, exit_code=2)


def test_exclusive_and_back(cli: Cli, world: World) -> None:
    cli("mps", "start", "--exclusive").ok()
    assert world.state.gpus[0].compute_mode == ComputeMode.EXCLUSIVE_PROCESS
    pid = world.client()
    assert world.process(pid).mps_server is not None
    world.send(pid, signal.SIGKILL)
    (row,) = cli("mps", "stop", output="json").ok().data["stopped"]
    assert row["compute_mode"] == "default"
    assert world.state.gpus[0].compute_mode == ComputeMode.DEFAULT


def test_exclusive_that_was_there_stays(cli: Cli, world: World) -> None:
    world.host.nvml.set_compute_mode(0, ComputeMode.EXCLUSIVE_PROCESS)
    cli("mps", "start", "--exclusive").ok()
    (row,) = cli("mps", "stop", output="json").ok().data["stopped"]
    assert row["compute_mode"] is None
    assert world.state.gpus[0].compute_mode == ComputeMode.EXCLUSIVE_PROCESS


def test_not_root_starts_a_daemon_of_its_own(cli: Cli, refused: Refused, world: World) -> None:
    world.fault("user", "1000")
    assert "could not be undone" not in refused("mps", "start", "--exclusive", code="no_permission", exit_code=4)
    cli("mps", "start", "--threads", "25").ok()
    assert world.state.daemons[0].uid == 1000
    cli("mps", "stop").ok()


@pytest.mark.parametrize(
    ("words", "code", "exit_code", "said"),
    [
        (("-g", "all", "--memory", "20G"), "limit_above_gpu", 2, "GPU 0"),
        (("-g", "0", "--memory", "0=4G,1=8G"), "bad_limit", 2, "-g 0,1"),
        (("-g", "7"), "unknown_gpu", 6, ""),
        ((), "gpu_not_named", 2, ""),
    ],
)
def test_wrong_words_on_several_gpus(
    refused: Refused, words: tuple[str, ...], code: str, exit_code: int, said: str
) -> None:
    assert said in refused("mps", "start", *words, code=code, exit_code=exit_code, host=TWO)


def test_modes_that_are_in_the_way(refused: Refused, world: World) -> None:
    world.host.nvml.set_compute_mode(0, ComputeMode.PROHIBITED)
    text = refused("mps", "start", code="compute_prohibited", exit_code=19)
    assert f"sudo nvidia-smi -i {world.uuid()} -c DEFAULT" in text
    large, small = world.mig("3g.71gb", "1g.18gb")
    assert f"-g {large}" in refused("mps", "start", code="mig_enabled", exit_code=3)
    refused("mps", "start", "-g", large, "--exclusive", code="exclusive_on_mig", exit_code=3)
    refused("mps", "start", "-g", small, "--memory", "20G", code="limit_above_gpu", exit_code=2)


def test_mig_instance(cli: Cli, refused: Refused, world: World) -> None:
    uuids = world.mig("3g.71gb", "1g.18gb")
    cli("mps", "start", "-g", uuids[1], "--memory", "4G").ok()
    (daemon,) = daemons(cli)
    assert (daemon["device_uuid"], daemon["gpu_index"]) == (uuids[1], 0)
    assert world.state.daemons[0].visible == [uuids[1]]
    pid = world.client(mig=uuids[1])
    assert world.process(pid).gpu_instance_id == world.state.gpus[0].mig[1].gpu_instance_id
    text = refused("mps", "start", "-g", uuids[1], code="daemon_exists", exit_code=19)
    assert f"gpushare mps set -g {uuids[1]}" in text
    cli("mps", "start", "-g", uuids[0]).ok()
    assert len(daemons(cli)) == 2


def test_missing_program(refused: Refused, world: World) -> None:
    world.fault("missing", "nvidia-cuda-mps-control")
    refused("mps", "start", code="program_missing", exit_code=3)
    # A plan that could not be carried out is no plan.
    refused("mps", "start", "-n", code="program_missing", exit_code=3)


def test_a_program_that_hangs(refused: Refused, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "_ANSWER_SECONDS", 0.1)
    monkeypatch.setitem(MpsControl.ask.__kwdefaults__, "timeout", 0.1)
    monkeypatch.setattr(MpsControl.answers, "__defaults__", (0.1,))
    monkeypatch.setattr("gpushare.mps.control._TIMEOUT", 0.1)
    world.fault("hang", "nvidia-cuda-mps-control")
    # No daemon hangs, so there is none to be ended.
    text = refused("mps", "start", code="program_hangs", exit_code=1)
    assert ("'nvidia-cuda-mps-control -v' did not answer" in text, "mps stop" in text) == (True, False)


def test_a_lost_gpu(refused: Refused, world: World) -> None:
    world.fault("lost")
    refused("mps", "start", code="gpu_lost", exit_code=6)


@pytest.mark.parametrize("dry", [(), ("-n",)])
def test_path_too_long(refused: Refused, sim_dir: Path, monkeypatch: pytest.MonkeyPatch, dry: tuple[str, ...]) -> None:
    monkeypatch.setenv("GPUSHARE_SIM_DIR", str(sim_dir / ("x" * 60)))
    text = refused("mps", "start", *dry, code="path_too_long", exit_code=2)
    assert "87 is the limit" in text
    assert "GPUSHARE_RUN_DIR" in text
    assert not (World().directory / "run").exists()


def test_unwritable_directory(refused: Refused, world: World) -> None:
    world.host.nvml.identities()
    world.directory.joinpath("run").write_text("in the way")
    refused("mps", "start", code="directory_unwritable", exit_code=4)


@pytest.mark.needs_root
def test_wrong_owner(refused: Refused, world: World) -> None:
    run = world.host.run_directory
    run.mkdir()
    os.chown(run, 12345, 12345)
    assert "belongs to user 12345" in refused("mps", "start", code="wrong_owner", exit_code=4)


def test_directory_open_to_others(refused: Refused, world: World) -> None:
    run = world.host.run_directory
    run.mkdir()
    run.chmod(0o777)
    assert f"chmod go-w {run}" in refused("mps", "start", code="directory_open", exit_code=4)


@pytest.mark.parametrize(("limit", "value"), [("threads", "25"), ("memory", "4G"), ("priority", "low")])
def test_a_limit_that_does_not_hold_rolls_everything_back(
    refused: Refused, world: World, monkeypatch: pytest.MonkeyPatch, limit: str, value: str
) -> None:
    world.host.nvml.identities()
    monkeypatch.setattr(MpsControl, limit, lambda *_: None)
    text = refused("mps", "start", "--exclusive", f"--{limit}", value, code="limit_not_held", exit_code=1)
    assert "holds none" in text
    assert (world.state.daemons, world.state.gpus[0].compute_mode) == ([], ComputeMode.DEFAULT)


def test_failure_on_the_second_gpu_rolls_the_first_back(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(TWO)
    world.host.nvml.identities()
    second, proper = world.uuid(1), MpsControl.threads

    def lying(self: MpsControl, server: int | None = None) -> float | None:
        return 77.0 if second[4:12] in self.pipe_directory else proper(self, server)

    monkeypatch.setattr(MpsControl, "threads", lying)
    refused("mps", "start", "-g", "0,1", "--threads", "25", code="limit_not_held", exit_code=1, host=TWO)
    assert world.state.daemons == []


def test_ctrl_c_in_the_middle_rolls_back(cli: Cli, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(MpsControl, "set_threads", interrupted)
    answer = cli("mps", "start", "--threads", "25", "--exclusive", output="json")
    assert (answer.code, answer.json["errors"][0]["code"]) == (130, "interrupted")
    assert (world.state.daemons, world.state.gpus[0].compute_mode) == ([], ComputeMode.DEFAULT)


def test_programs_that_run_already_are_named(cli: Cli, world: World) -> None:
    world.fault("busy")
    (pid,) = world.pids()
    assert f"1 process on GPU 0 outside MPS until restarted: {pid}" in cli("mps", "start").ok().err


# -- several users at the same time ------------------------------------------------------------------


@pytest.mark.needs_root
def test_a_daemon_for_all_users_serves_them_at_the_same_time(cli: Cli, world: World) -> None:
    answer = cli("mps", "start", "--users", "all", "--threads", "30").ok()
    assert "for all users at the same time" in answer.out
    assert "share one server, which runs as root" in answer.err
    assert answer.out.rstrip().endswith("undo: gpushare mps stop -g 0")
    pids = [world.client(user=user) for user in ("nobody", "daemon")]
    assert [world.process(pid).mps_server is not None for pid in pids] == [True, True]
    assert len(world.state.daemons[0].servers) == 1
    # What takes a stop back starts the same daemon.
    planned = cli("mps", "stop", "--force", "-n", output="json").ok().data
    assert "gpushare mps start -g 0 --threads 30 --users all" in planned["undo"]


@pytest.mark.needs_root
def test_only_these_users_may_enter(cli: Cli, world: World) -> None:
    cli("mps", "start", "--users", "nobody,daemon").ok()
    assert pipe_users(Path(world.state.daemons[0].pipe_directory)) == ("daemon", "nobody")
    file = cli("capture").ok().out
    assert "multiuser: true" in file
    assert "nvidia-cuda-mps-control -f -M\n" in cli("export", "systemd").ok().out
    exported = cli("export", "docker", "-g", "0").ok()
    assert "one user at a time" not in exported.out + exported.err
    assert cli("mps", "stop").ok().code == 0
    cli("mps", "start", "--users", "all").ok()
    assert pipe_users(Path(world.state.daemons[0].pipe_directory)) == ()


@pytest.mark.parametrize(
    ("words", "fault", "code", "exit_code"),
    [
        ("all", ("driver", "550.163.01"), "no_multiuser", 3),
        ("all", ("user", "1000"), "no_permission", 4),
        ("nobody,", None, "bad_user", 2),
        ("no-such-user", None, "no_user", 6),
    ],
)
def test_users_that_are_refused(
    refused: Refused, world: World, words: str, fault: tuple[str, str] | None, code: str, exit_code: int
) -> None:
    if fault is not None:
        world.fault(*fault)
    refused("mps", "start", "--users", words, code=code, exit_code=exit_code)
