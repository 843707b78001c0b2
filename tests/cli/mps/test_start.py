"""``gpushare mps start``."""

from __future__ import annotations

import os
import signal
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from gpushare.base.errors import NotFound, OperationFailed
from gpushare.base.model import ComputeMode
from gpushare.base.selection import Device
from gpushare.base.units import GIB, MIB
from gpushare.cli.options import settings
from gpushare.host.nvml import NvmlReader
from gpushare.mps import start
from gpushare.mps.control import MpsControl
from gpushare.mps.daemons import own_daemon
from gpushare.mps.home import DaemonHome, home_of, pipe_users
from gpushare.mps.limits import Limits
from gpushare.mps.start import plan_start
from tests.cli.drive import Cli, Patch, Refused, Words, World, missing, refusals, same, sure

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
    client = world.process(world.client())
    assert (client.threads, client.memory_limit_bytes) == (25.0, 1500 * MIB)


def test_no_limits_also_where_the_callers_environment_has_some(cli: Cli, world: World, monkeypatch: Patch) -> None:
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


@pytest.mark.parametrize(("spec", "ignored"), [("sim:p100", True), ("sim:v100", False)])
def test_limits_before_volta_are_said_to_be_ignored(cli: Cli, spec: str, ignored: bool) -> None:
    text = "GPU 0 is older than Volta: MPS ignores limits of threads and memory there"
    for limits in (("--threads", "50"), ("--memory", "4G"), ()):
        for words in (("mps", "start", *limits, "-n"), ("run", *limits, "--", "true")):
            assert (text in cli(*words, host=spec).ok().err) == (ignored and limits != ()), words


def test_dry_run_needs_no_root_and_changes_nothing(cli: Cli, world: World) -> None:
    world.fault("user", "1000")
    before = same(world.spec)
    data = cli("mps", "start", "--threads", "25", "--exclusive", "-n", output="json").ok().data
    assert data["dry_run"]
    programs = [step["command"].split()[0].split("=")[0] for step in data["steps"]]
    assert programs == ["mkdir", "write", "nvidia-smi", "CUDA_VISIBLE_DEVICES", "echo", "write"]
    assert same(world.spec) == before
    assert not (world.directory / "run").exists()


@refusals(
    "bad_percentage 2: --threads 0 | --threads 101 | --threads many",
    "bad_limit 2: --threads 0=25,0=30 | --threads 0=25,30 | --threads 1=25",
    "bad_size 2: --memory 4 | --memory -4G | --memory none",
    "limit_above_gpu 2: --memory 1000T | --memory 150G",
    "bad_priority 2: --priority high",
    "usage 2: --pipe-directory /x",
    "bad_user 2: --users nobody,",
    "no_user 6: --users no-such-user",
)
def test_wrong_limits(refused: Refused, words: Words, code: str, exit_code: int) -> None:
    refused("mps", "start", *words, code=code, exit_code=exit_code)


@pytest.mark.parametrize(
    ("before", "restored"), [(ComputeMode.DEFAULT, "default"), (ComputeMode.EXCLUSIVE_PROCESS, None)]
)
def test_exclusive_and_back_to_what_was_there(
    cli: Cli, world: World, before: ComputeMode, restored: str | None
) -> None:
    world.host.nvml.set_compute_mode(0, before)
    cli("mps", "start", "--exclusive").ok()
    assert world.state.gpus[0].compute_mode == ComputeMode.EXCLUSIVE_PROCESS
    pid = world.client()
    assert world.process(pid).mps_server is not None
    world.send(pid, signal.SIGKILL)
    (row,) = cli("mps", "stop", output="json").ok().data["stopped"]
    assert (row["compute_mode"], world.state.gpus[0].compute_mode) == (restored, before)


def test_not_root_starts_a_daemon_of_its_own(cli: Cli, world: World) -> None:
    world.fault("user", "1000")
    cli("mps", "start", "--threads", "25").ok()
    assert world.state.daemons[0].uid == 1000
    cli("mps", "stop").ok()


def test_wrong_words_on_several_gpus(refused: Refused) -> None:
    for words, code, exit_code, said in (
        ("-g all --memory 20G", "limit_above_gpu", 2, "GPU 0"),
        ("-g 0 --memory 0=4G,1=8G", "bad_limit", 2, "-g 0,1"),
        ("-g 7", "unknown_gpu", 6, ""),
        ("", "gpu_not_named", 2, ""),
    ):
        assert said in refused("mps", "start", *words.split(), code=code, exit_code=exit_code, host=TWO)


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
    assert world.process(world.client(mig=uuids[1])).gpu_instance_id == world.state.gpus[0].mig[1].gpu_instance_id
    text = refused("mps", "start", "-g", uuids[1], code="daemon_exists", exit_code=19)
    assert f"gpushare mps set -g {uuids[1]}" in text
    cli("mps", "start", "-g", uuids[0]).ok()
    assert len(daemons(cli)) == 2


@pytest.mark.parametrize(
    ("fault", "words", "code", "exit_code"),
    [
        ("missing nvidia-cuda-mps-control", "", "program_missing", 3),
        # A plan that could not be carried out is no plan.
        ("missing nvidia-cuda-mps-control", "-n", "program_missing", 3),
        ("lost", "", "gpu_lost", 6),
        ("driver 550.163.01", "--users all", "no_multiuser", 3),
        ("user 1000", "--users all", "no_permission", 4),
        ("user 1000", "--exclusive", "no_permission", 4),
    ],
)
def test_an_unfit_host(refused: Refused, world: World, fault: str, words: str, code: str, exit_code: int) -> None:
    world.fault(*fault.split())
    assert "could not be undone" not in refused("mps", "start", *words.split(), code=code, exit_code=exit_code)


def test_a_program_that_hangs(refused: Refused, world: World, monkeypatch: Patch) -> None:
    monkeypatch.setattr(start, "_ANSWER_SECONDS", 0.1)
    monkeypatch.setitem(MpsControl.ask.__kwdefaults__, "timeout", 0.1)
    monkeypatch.setattr(MpsControl.answers, "__defaults__", (0.1,))
    monkeypatch.setattr("gpushare.mps.control._TIMEOUT", 0.1)
    world.fault("hang", "nvidia-cuda-mps-control")
    # No daemon hangs, so there is none to be ended.
    text = refused("mps", "start", code="program_hangs", exit_code=1)
    assert ("'nvidia-cuda-mps-control -v' did not answer" in text, "mps stop" in text) == (True, False)


@pytest.mark.parametrize("dry", [(), ("-n",)])
def test_path_too_long(refused: Refused, sim_dir: Path, monkeypatch: Patch, dry: Words) -> None:
    monkeypatch.setenv("GPUSHARE_SIM_DIR", str(sim_dir / ("x" * 60)))
    text = refused("mps", "start", *dry, code="path_too_long", exit_code=2)
    assert missing(text, "87 is the limit", "GPUSHARE_RUN_DIR") == []
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
def test_a_limit_that_does_not_hold(refused: Refused, world: World, monkeypatch: Patch, limit: str, value: str) -> None:
    world.host.nvml.identities()
    monkeypatch.setattr(MpsControl, limit, lambda *_: None)
    text = refused("mps", "start", "--exclusive", f"--{limit}", value, code="limit_not_held", exit_code=1)
    assert "holds none" in text
    assert (world.state.daemons, world.state.gpus[0].compute_mode) == ([], ComputeMode.DEFAULT)


def test_failure_on_the_second_gpu_rolls_the_first_back(refused: Refused, monkeypatch: Patch) -> None:
    world = World(TWO)
    world.host.nvml.identities()
    second, proper = world.uuid(1), MpsControl.threads

    def lying(self: MpsControl, server: int | None = None) -> float | None:
        return 77.0 if second[4:12] in self.pipe_directory else proper(self, server)

    monkeypatch.setattr(MpsControl, "threads", lying)
    refused("mps", "start", "-g", "0,1", "--threads", "25", code="limit_not_held", exit_code=1, host=TWO)
    assert world.state.daemons == []


def test_ctrl_c_in_the_middle_rolls_back(cli: Cli, world: World, monkeypatch: Patch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(MpsControl, "set_threads", interrupted)
    cli("mps", "start", "--threads", "25", "--exclusive", output="json").ends(130, "interrupted")
    assert (world.state.daemons, world.state.gpus[0].compute_mode) == ([], ComputeMode.DEFAULT)


def test_programs_that_run_already_are_named(cli: Cli, world: World) -> None:
    world.fault("busy")
    (pid,) = world.pids()
    assert f"1 process on GPU 0 outside MPS until restarted: {pid}" in cli("mps", "start").ok().err


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
    assert "multiuser: true" in cli("capture").ok().out
    assert "nvidia-cuda-mps-control -f -M\n" in cli("export", "systemd").ok().out
    exported = cli("export", "docker", "-g", "0").ok()
    assert "one user at a time" not in exported.out + exported.err
    assert cli("mps", "stop").ok().code == 0
    cli("mps", "start", "--users", "all").ok()
    assert pipe_users(Path(world.state.daemons[0].pipe_directory)) == ()


def test_a_daemon_that_nobody_noted_is_not_taken_down(refused: Refused, world: World, monkeypatch: Patch) -> None:
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


def test_dead_daemon_is_remembered_by_a_start_that_fails(cli: Cli, world: World, monkeypatch: Patch) -> None:
    cli("mps", "start", "--exclusive").ok()
    world.send(world.state.daemons[0].pid, signal.SIGKILL)
    assert len(list((world.directory / "run").rglob("daemon.json"))) == 1
    with monkeypatch.context() as patched:
        patched.setattr(MpsControl, "threads", lambda *_: 99.0)
        cli("mps", "start", "--threads", "30").ends(1)
    assert len(list((world.directory / "run").rglob("daemon.json"))) == 1
    cli("mps", "stop").ok()
    assert world.state.gpus[0].compute_mode == ComputeMode.DEFAULT


@pytest.mark.parametrize("after_a_dead_one", [False, True])
def test_a_daemon_that_stays_keeps_its_record(
    cli: Cli, world: World, monkeypatch: Patch, after_a_dead_one: bool
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
    assert (len(world.state.daemons), world.state.gpus[0].compute_mode) == (1, ComputeMode.EXCLUSIVE_PROCESS)
    cli("mps", "stop").ok()
    assert (world.state.daemons, world.state.gpus[0].compute_mode) == ([], ComputeMode.DEFAULT)


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


def test_two_at_once_the_loser_leaves_the_compute_mode(cli: Cli, world: World, monkeypatch: Patch) -> None:
    """The other one starts after this one has made its first plan, and before it has the lock."""
    proper, others = DaemonHome.locked, iter([("mps", "start", "--exclusive")])

    def locked(self: DaemonHome) -> AbstractContextManager[None]:
        mine = dict(vars(settings))
        for words in others:
            cli(*words).ok()
        vars(settings).update(mine)
        return proper(self)

    monkeypatch.setattr(DaemonHome, "locked", locked)
    assert cli("mps", "start", "--exclusive", output="json").json["errors"][0]["code"] == "daemon_exists"
    assert world.state.gpus[0].compute_mode == ComputeMode.EXCLUSIVE_PROCESS
    cli("mps", "stop").ok()
    assert world.state.gpus[0].compute_mode == ComputeMode.DEFAULT


def test_a_plan_reverts_only_the_mode_that_it_set(world: World) -> None:
    steps = plan_start(world.host, Device(gpu=world.host.nvml.sweep()[0]), Limits(), exclusive=True).steps
    (step,) = [step for step in steps if "nvidia-smi" in step.command]
    world.host.nvml.set_compute_mode(0, ComputeMode.EXCLUSIVE_PROCESS)
    step.do()
    assert step.revert is not None
    step.revert()
    assert world.state.gpus[0].compute_mode == ComputeMode.EXCLUSIVE_PROCESS


def test_a_dead_daemon_of_ours_does_not_hide_a_shared_one(cli: Cli, world: World, sim_dir: Path) -> None:
    cli("mps", "start").ok()
    device = Device(gpu=world.host.nvml.sweep()[0])
    live = home_of(world.host.run_directory, device.uuid)
    record = sure(live.read())
    dead = home_of(sim_dir / "r", device.uuid)
    dead.create()
    dead.write(replace(record, pid=4_190_000))
    host = replace(world.host, run_directory=sim_dir / "r", shared_run_directories=(world.host.run_directory,))
    assert own_daemon(host, device)[0] == live
    world.send(record.pid, signal.SIGKILL)
    with pytest.raises(NotFound, match="4190000"):
        own_daemon(host, device)
