"""``gpushare mps stop``."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpushare.base.errors import NotFound
from gpushare.base.model import ComputeMode
from gpushare.base.units import GIB
from gpushare.host.capabilities import user_name
from gpushare.mps import stop
from gpushare.mps.control import MpsControl
from gpushare.mps.daemons import find_daemons
from gpushare.mps.home import DaemonHome, home_of
from gpushare.plan import Plan, carry_out
from gpushare.sim.state import StateFile, parse_spec
from tests.cli.drive import Cli, Patch, Real, Refused, Words, World

TWO = "sim:2xh200"


@pytest.fixture
def daemon(cli: Cli, world: World) -> int:
    cli("mps", "start").ok()
    return world.state.daemons[0].pid


@pytest.fixture
def impatient(monkeypatch: Patch) -> None:
    """Let what does not answer be given up soon."""
    monkeypatch.setattr(stop, "_PROBE_SECONDS", 0.1)
    monkeypatch.setitem(MpsControl.ask.__kwdefaults__, "timeout", 0.1)


def test_stop(cli: Cli, world: World, daemon: int) -> None:
    (row,) = cli("mps", "stop", output="json").ok().data["stopped"]
    assert (row["pid"], row["gpu"], row["forced"], row["compute_mode"]) == (daemon, 0, False, None)
    assert world.state.daemons == []
    assert not list((world.directory / "run").rglob("daemon.json"))
    assert not list((world.directory / "run").rglob("pipe/*"))


def test_a_dry_run_shows_the_steps_that_are_carried_out(cli: Cli, world: World, monkeypatch: Patch) -> None:
    cli("mps", "start", "--exclusive").ok()
    (daemon,) = world.state.daemons
    planned = cli("mps", "stop", "-n", output="json").ok().data
    (row,) = planned["stopped"]
    assert (row["pid"], row["forced"], row["command"]) == (daemon.pid, None, planned["steps"][1]["command"])
    done: list[str] = []

    def noted(plan: Plan) -> None:
        done.extend(step.what for step in plan.steps)
        carry_out(plan)

    monkeypatch.setattr(stop, "carry_out", noted)
    cli("mps", "stop").ok()
    assert [step["what"] for step in planned["steps"]] == done
    assert [what.split()[0] for what in done] == ["wait", "end", "restore", "clean"]


@pytest.mark.usefixtures("daemon")
def test_clients_are_waited_for_also_by_two_stops_at_once(real: Real, world: World) -> None:
    pid = world.client()
    both = [real("mps", "stop"), real("mps", "stop")]
    for started in both:
        started.says(f"for 1 client: {pid}")
    assert world.state.daemons
    world.send(pid, signal.SIGKILL)
    # One of them may find that it is stopped already.
    assert sorted(started.result().code for started in both) in ([0, 6], [0, 0])
    assert world.state.daemons == []


@pytest.fixture
def slept(monkeypatch: Patch) -> list[float]:
    """Let only waiting take time, and return for how long was waited: the message says so."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(stop, "time", clock)
    monkeypatch.setattr("gpushare.cli.mps.time", clock)
    return now


@pytest.mark.usefixtures("daemon", "slept")
def test_clients_that_stay_are_not_forced_unasked(refused: Refused, world: World, monkeypatch: Patch) -> None:
    pid = world.client()
    monkeypatch.setattr("gpushare.cli.mps.note", lambda _: None)
    text = refused("mps", "stop", code="clients_left", exit_code=19)
    assert str(pid) in text
    assert "--drain 60s" in text
    assert world.process(pid).mps_server is not None


@pytest.mark.usefixtures("daemon")
def test_force_does_not_wait(cli: Cli, world: World, slept: list[float]) -> None:
    world.client()
    (row,) = cli("mps", "stop", "--force", output="json").ok().data["stopped"]
    assert (row["forced"], slept) == (True, [0.0])


@pytest.mark.usefixtures("daemon")
def test_force_asks_about_a_run_without_a_client(
    refused: Refused, world: World, daemon: int, monkeypatch: Patch
) -> None:
    """Its program has no CUDA context yet."""
    home = home_of(world.host.run_directory, world.uuid())
    with home.locked():
        lease = home.take_lease()
    text = refused("mps", "stop", "--force", asks=True, code="needs_consent", exit_code=19)
    assert f"used by gpushare run: {os.getpid()}" in text
    lease.release()
    # So it does where leases cannot be read.
    monkeypatch.setattr(DaemonHome, "live_leases", lambda _: None)
    text = refused("mps", "stop", "--force", asks=True, code="needs_consent", exit_code=19)
    assert "may be used by gpushare run: its leases cannot be read" in text


def test_drain_forces_in_the_end(cli: Cli, world: World, daemon: int) -> None:
    pid = world.client()
    begun = time.monotonic()
    (row,) = cli("mps", "stop", "--drain", "0.3s", output="json").ok().data["stopped"]
    assert row["forced"]
    assert time.monotonic() - begun >= 0.3
    assert world.process(pid).broken
    assert daemon not in [daemon.pid for daemon in world.state.daemons]


@pytest.mark.usefixtures("impatient")
@pytest.mark.usefixtures("impatient", "daemon")
def test_a_hanging_daemon_is_stopped_only_by_force(refused: Refused, world: World, daemon: int, cli: Cli) -> None:
    world.send(daemon, signal.SIGSTOP)
    assert "--force" in refused("mps", "stop", code="daemon_hangs", exit_code=1)
    world.fault("hang", "nvidia-cuda-mps-control")
    (row,) = cli("mps", "stop", "--force", output="json").ok().data["stopped"]
    assert row["forced"]
    assert world.state.daemons == []
    assert not list((world.directory / "run").rglob("daemon.json"))


def test_dead_daemon_is_cleared_away(cli: Cli, world: World) -> None:
    cli("mps", "start", "--exclusive").ok()
    world.send(world.state.daemons[0].pid, signal.SIGKILL)
    steps = cli("mps", "stop", "-n", output="json").ok().data["steps"]
    assert [step["what"].split()[0] for step in steps] == ["end", "restore", "clean"]
    answer = cli("mps", "stop").ok()
    assert answer.out == "removed the files of a dead MPS daemon of GPU 0; compute mode default restored\n"
    assert world.state.gpus[0].compute_mode == ComputeMode.DEFAULT
    assert not list((world.directory / "run").rglob("daemon.json"))


def test_nothing_there(refused: Refused) -> None:
    refused("mps", "stop", code="no_daemon", exit_code=6)
    refused("mps", "stop", "-g", "0", code="no_daemon", exit_code=6)
    refused("mps", "stop", "-g", "1", code="unknown_gpu", exit_code=6)
    refused("mps", "stop", "--pipe-directory", "/nowhere", code="no_daemon", exit_code=6)


def test_foreign_daemon_only_by_its_directory_and_yes(refused: Refused, cli: Cli, world: World, sim_dir: Path) -> None:
    pid = world.foreign_daemon(sim_dir)
    for words in ((), ("-g", "0"), ("-g", "all"), ("--force",), ("-y",)):
        text = refused("mps", "stop", *words, code="no_daemon", exit_code=6)
        assert "or one that gpushare did not start by --pipe-directory" in text
    text = refused("mps", "stop", "--pipe-directory", f"{sim_dir}/p", asks=True, code="needs_consent", exit_code=19)
    assert f"to do it: gpushare mps stop -y --pipe-directory {sim_dir}/p" in text
    assert cli("mps", "stop", "--pipe-directory", f"{sim_dir}/p", "-n", output="json").ok().data["dry_run"]
    (row,) = cli("mps", "stop", "--pipe-directory", f"{sim_dir}/p/", "--yes", output="json").ok().data["stopped"]
    assert (row["pid"], world.state.daemons) == (pid, [])


@pytest.mark.parametrize(
    ("words", "code", "hint"),
    [
        (("--drain", "x"), "bad_duration", ""),
        (("--drain", "-1"), "bad_duration", ""),
        (("-g", "0", "--pipe-directory", "/x"), "two_names", ""),
        (("--drain", "5", "--force"), "bad_combination", "for example: gpushare mps stop -g 0 --drain 60s"),
    ],
)
@pytest.mark.usefixtures("daemon")
def test_wrong_usage(refused: Refused, words: Words, code: str, hint: str) -> None:
    assert hint in refused("mps", "stop", *words, code=code, exit_code=2)


def test_several_gpus(refused: Refused, cli: Cli) -> None:
    world = World(TWO)
    cli("mps", "start", "-g", "all", host=TWO).ok()
    refused("mps", "stop", code="gpu_not_named", exit_code=2, host=TWO)
    cli("mps", "stop", "-g", "1", host=TWO).ok()
    (left,) = world.state.daemons
    assert left.visible == [world.uuid(0)]
    refused("mps", "stop", "-g", "1", code="no_daemon", exit_code=6, host=TWO)
    # Also the only one that is left: a change on a host with several GPUs names its GPU.
    refused("mps", "stop", code="gpu_not_named", exit_code=2, host=TWO)
    cli("mps", "stop", "-g", "0", host=TWO).ok()
    assert world.state.daemons == []
    refused("mps", "stop", code="no_daemon", exit_code=6, host=TWO)
    world = World(TWO)
    cli("mps", "start", "-g", "all", "--exclusive", host=TWO).ok()
    world.fault("lost", gpu="0")
    cli("mps", "stop", "-g", "1", host=TWO).ok()
    assert [daemon.visible for daemon in world.state.daemons] == [[world.state.gpus[0].uuid]]


def test_all_in_use_is_an_error_after_one_wait(cli: Cli, slept: list[float]) -> None:
    world = World(TWO)
    cli("mps", "start", "-g", "all", host=TWO).ok()
    for index in (0, 1):
        world.client(index=index, daemon=index)
    answer = cli("mps", "stop", "-g", "all", host=TWO, output="json")
    assert (answer.code, answer.json["status"]) == (19, "error")
    assert (answer.data["stopped"], [error["gpu"] for error in answer.json["errors"]]) == ([], ["0", "1"])
    assert all("still has 1 client after" in error["message"] for error in answer.json["errors"])
    # Ten seconds for all of them, not for each.
    assert 10.0 <= slept[0] < 11.0
    assert len(world.state.daemons) == 2


@pytest.mark.usefixtures("slept")
def test_all_with_one_in_use_is_partial(cli: Cli) -> None:
    world = World(TWO)
    cli("mps", "start", "-g", "all", host=TWO).ok()
    world.client(index=0, daemon=0)
    answer = cli("mps", "stop", "-g", "all", host=TWO, output="json")
    assert (answer.code, answer.json["status"]) == (19, "partial")
    assert [row["gpu"] for row in answer.data["stopped"]] == [1]
    assert [(error["code"], error["gpu"]) for error in answer.json["errors"]] == [("clients_left", "0")]


def test_mig(refused: Refused, cli: Cli, world: World) -> None:
    uuids = world.mig("3g.71gb", "1g.18gb")
    cli("mps", "start", "-g", ",".join(uuids)).ok()
    assert "(-g)" in refused("mps", "stop", code="no_daemon", exit_code=6)
    cli("mps", "stop", "-g", uuids[0]).ok()
    assert [daemon.visible for daemon in world.state.daemons] == [[uuids[1]]]
    # The only one that is left needs no name.
    cli("mps", "stop").ok()
    cli("mps", "start", "-g", ",".join(uuids)).ok()
    cli("mps", "stop", "-g", "all").ok()
    assert world.state.daemons == []


def test_mode_that_cannot_be_restored(cli: Cli, world: World) -> None:
    cli("mps", "start", "--exclusive").ok()
    pipe = world.state.daemons[0].pipe_directory
    uuid = world.uuid()
    world.fault("not-supported", "nvmlDeviceSetComputeMode")
    answer = cli("mps", "stop", "--pipe-directory", pipe, output="json").ends(1, "not_restored")
    assert f"sudo nvidia-smi -i {uuid} -c DEFAULT" in answer.err
    assert world.state.daemons == []
    # It is still noted: the next stop tries again.
    world.clear()
    assert "compute mode default restored" in cli("mps", "stop").ok().out


@pytest.mark.usefixtures("daemon")
def test_another_users_daemon(refused: Refused, world: World) -> None:
    world.fault("user", "61000")
    owner = user_name(os.geteuid())
    assert f"belongs to user {owner}\n" in refused("mps", "stop", code="not_your_daemon", exit_code=4)
    said = refused("mps", "stop", "--force", code="not_your_daemon", exit_code=4).replace(world.uuid(), "0")
    assert "sudo gpushare mps stop -g 0 --force" in said
    text = refused("mps", "start", code="daemon_exists", exit_code=19)
    assert "run in it: gpushare run -g 0 -- CMD; its owner and root can change its limits" in text
    assert "needs root" in refused("timeslice", "set", "long", code="no_permission", exit_code=4)


def test_stopped_by_somebody_else_meanwhile(cli: Cli, world: World, daemon: int) -> None:
    (found,) = find_daemons(world.host, world.host.nvml.sweep(), deep=False)
    cli("mps", "stop").ok()
    cli("mps", "start").ok()
    with pytest.raises(NotFound, match=f"stopped or replaced the MPS daemon {daemon}"):
        stop.Stop(world.host, found, None, drain_seconds=0, force=True).run()
    assert len(world.state.daemons) == 1


@pytest.mark.usefixtures("daemon")
def test_the_lock_is_free_while_clients_are_waited_for(cli: Cli, world: World, monkeypatch: Patch) -> None:
    monkeypatch.setattr("gpushare.mps.home._LOCK_SECONDS", 0.0)
    pid, proper, entered = world.client(), stop.clients_of, []

    def waiting(*more: object, **named: object) -> object:
        if not entered:
            with home_of(world.host.run_directory, world.uuid()).locked():
                entered.append(pid)
            world.send(pid, signal.SIGKILL)
        return proper(*more, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(stop, "clients_of", waiting)
    cli("mps", "stop", "--drain", "600s").ok()
    assert (entered, world.state.daemons) == ([pid], [])


def test_a_daemon_that_its_last_run_ended_while_we_waited_is_stopped_as_wanted(cli: Cli, world: World) -> None:
    cli("mps", "start").ok()
    (found,) = find_daemons(world.host, world.host.nvml.sweep(), deep=False)
    assert found.record is not None
    transient = replace(found, record=replace(found.record, transient=True))
    cli("mps", "stop").ok()
    stop.Stop(world.host, transient, None, drain_seconds=0, force=False).run()


def test_a_process_that_claims_a_daemons_directory_is_not_stopped_for_it(cli: Cli, world: World, sim_dir: Path) -> None:
    """The unit of a daemon stops it by its directory; any user can start a process that names the same one."""
    cli("status").ok()
    world.fault("user", "61000")
    (sim_dir / "a").mkdir()
    forged = world.foreign_daemon(sim_dir / "a")
    world.fault("user", "0")
    real = world.foreign_daemon(sim_dir)
    with StateFile(parse_spec(world.spec).text).changed() as state:
        by_pid = {daemon.pid: daemon for daemon in state.daemons}
        by_pid[forged].environment["CUDA_MPS_PIPE_DIRECTORY"] = by_pid[real].pipe_directory
    cli("mps", "stop", "--pipe-directory", str(sim_dir / "p"), "--yes").ok()
    assert [daemon.pid for daemon in world.state.daemons] == [forged]


def test_the_undo_of_a_stop_starts_the_same_daemon(cli: Cli, world: World) -> None:
    cli("mps", "start", "--threads", "30", "--memory", "4G").ok()
    undo = "gpushare mps start -g 0 --threads 30 --memory 4G"
    planned = cli("mps", "stop", "-n", output="json").ok().data
    assert [step["undo"] for step in planned["steps"] if step["what"].startswith("end the MPS daemon")] == [undo]
    assert planned["undo"] == undo
    assert f"undo: {undo}" in cli("mps", "stop").ok().out
    cli(*undo.split()[1:]).ok()
    (daemon,) = cli("mps", "status", output="json").ok().data["mps_daemons"]
    assert (daemon["threads_percent"], daemon["memory_limit_bytes"]) == (30.0, 4 << 30)
    # With the limits that others set since.
    (found,) = find_daemons(world.host, [world.host.nvml.gpu(0)])
    control = found.control(world.host)
    control.set_threads(12)
    control.set_memory(7 * GIB)
    answer = cli("mps", "stop", "-g", "0", "-n", output="json").ok()
    assert "gpushare mps start -g 0 --threads 12 --memory 7G" in {step["undo"] for step in answer.data["steps"]}


@pytest.mark.parametrize(
    ("words", "undo"),
    [
        (("mps", "start", "-g", "0"), "gpushare mps stop -g 0"),
        (("mig", "apply", "-g", "1", "3g"), "gpushare mig disable -g 1 --destroy"),
        (("timeslice", "set", "short", "-g", "0"), "gpushare timeslice reset -g 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_dry_run_names_the_undo(cli: Cli, words: Words, undo: str) -> None:
    answer = cli(*words, "-n", host="sim:2xh100", output="table").ok()
    assert f"note: undo: {undo}" in answer.err
    assert "undo: none" not in answer.out
    assert cli(*words, "-n", host="sim:2xh100", output="json").ok().data["undo"] == undo
