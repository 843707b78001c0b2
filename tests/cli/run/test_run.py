"""``gpushare run``: the program, its share and the proof."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpushare.base.units import MIB
from tests.cli.drive import Cli, Patch, Real, Refused, Started, Words, World, environment, missing, refusals, until
from tests.cli.run.test_mig import PRINT, variables

TWO = "sim:2xh200"


@pytest.mark.parametrize("code", [0, 1, 7, 255])
def test_own_exit_code(cli: Cli, world: World, code: int) -> None:
    for dashes in (("--",), ()):
        assert cli("run", *dashes, "sh", "-c", f"exit {code}").code == code
    assert world.state.daemons == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_ended_by_a_signal_of_its_own(cli: Cli, number: int) -> None:
    assert cli("run", "--", "sh", "-c", f"kill -{int(number)} $$").code == 128 + number


def test_a_program_of_this_directory_is_not_forbidden(refused: Refused, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train").write_text("#!/bin/sh\n")
    (tmp_path / "train").chmod(0o755)
    assert "./train" in refused("run", "--", "train", code="command_not_found", exit_code=127)


@refusals(
    "command_not_found 127: -- no-such-program | -n -- no-such-program",
    "command_not_executable 126: -- /etc/passwd",
    "usage 2:  | -- | --nonsense -- true",
    "bad_percentage 2: --threads 0 -- true",
    "bad_size 2: --memory x -- true",
    "limit_above_gpu 2: --memory 1T -- true",
    "bad_priority 2: --priority x -- true",
    "bad_duration 2: --grace x -- true",
    "unknown_gpu 6: -g 4 -- true",
)
def test_wrong_usage(refused: Refused, words: Words, code: str, exit_code: int) -> None:
    refused("run", *words, code=code, exit_code=exit_code)


def test_several_gpus(refused: Refused, cli: Cli) -> None:
    refused("run", "--", "true", code="gpu_not_named", exit_code=2, host=TWO)
    refused("run", "-g", "all", "--", "true", code="one_gpu", exit_code=2, host=TWO)
    assert cli("run", "-g", "1", "--", "true", host=TWO).code == 0


@pytest.mark.parametrize(
    ("fault", "value", "code", "exit_code"),
    [
        ("no-driver", None, "driver_not_loaded", 9),
        ("no-nvml", None, "nvml_missing", 12),
        ("lost", None, "gpu_lost", 6),
        ("missing", "nvidia-cuda-mps-control", "program_missing", 3),
    ],
)
def test_an_unfit_host(
    refused: Refused, world: World, fault: str, value: str | None, code: str, exit_code: int
) -> None:
    world.fault(fault, value)
    refused("run", "--", "true", code=code, exit_code=exit_code)


def test_foreign_daemon(refused: Refused, cli: Cli, world: World, sim_dir: Path) -> None:
    world.foreign_daemon(sim_dir)
    text = refused("run", "--", "true", code="foreign_daemon", exit_code=19)
    assert f"without gpushare: CUDA_MPS_PIPE_DIRECTORY={sim_dir / 'p'} CMD; or outside MPS: " in text
    cli(
        *text.partition("or outside MPS: gpushare ")[2].partition(" CMD; or stop it: gpushare mps stop")[0].split(),
        "true",
    ).ok()
    # A job that may choose takes a GPU without one.
    two = World("sim:2xh100")
    for name in ("two", "more"):
        (sim_dir / name).mkdir()
    # A dead one of our own there changes nothing.
    cli("mps", "start", "-g", "0", host=two.spec).ok()
    two.send(two.state.daemons[0].pid, signal.SIGKILL)
    two.foreign_daemon(sim_dir / "two", uuid=two.uuid(0))
    for words in (("-g", "any", "--memory", "1G"), ("-g", "0,1", "--threads", "25"), ("-g", "any", "--wait")):
        cli("run", *words, "--", "sh", "-c", 'test "$GPUSHARE_GPU" = 0 && exit 9; true', host=two.spec).ok()
    two.foreign_daemon(sim_dir / "more", uuid=two.uuid(1))
    assert cli("run", "-g", "any", "--", "true", host=two.spec).code == 19


def test_dry_run(cli: Cli, world: World) -> None:
    data = cli("run", "-n", "--threads", "25", "--", "sh", "-c", "exit 3", output=None).ok()
    assert missing(data.out, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25.0", "sh -c 'exit 3'") == []
    assert world.state.daemons == []
    steps = cli("-o", "json", "run", "-n", "--", "true").ok().data["steps"]
    assert [step["what"].split()[0] for step in steps] == ["create", "record", "start", "record", "run"]
    cli("mps", "start").ok()
    assert len(cli("-o", "json", "run", "-n", "--", "true").ok().data["steps"]) == 1


def with_input(real: Real, *words: str, **named: Any) -> Started:
    """Start a gpushare whose program may run until its input ends, which `Started.result` does."""
    return real(*words, stdin=subprocess.PIPE, **named)


def test_environment_of_the_program(real: Real, world: World) -> None:
    words = ("--threads", "25", "--memory", "4G", "--priority", "low", "--", sys.executable, "-c", PRINT)
    found = variables(real("run", *words))
    assert found.pop("CUDA_MPS_PIPE_DIRECTORY").startswith(str(world.directory))
    assert found.pop("CUDA_MPS_LOG_DIRECTORY").startswith(str(world.directory))
    assert found == {
        "CUDA_VISIBLE_DEVICES": world.uuid(),
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25.0",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=3584M",
        "CUDA_MPS_CLIENT_PRIORITY": "1",
    }
    # The user's own variables.
    own = {
        "CUDA_VISIBLE_DEVICES": "7",
        "CUDA_MPS_PIPE_DIRECTORY": "/elsewhere",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "10",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=1G",
        "CUDA_LAUNCH_BLOCKING": "1",
    }
    found = variables(real("run", "--threads", "25", "--", sys.executable, "-c", PRINT, env=own))
    assert found.pop("CUDA_MPS_PIPE_DIRECTORY") != "/elsewhere"
    assert found.pop("CUDA_MPS_LOG_DIRECTORY")
    # What names the share is ours, a limit of theirs stays unless one is given, the rest is theirs.
    assert found == {
        "CUDA_VISIBLE_DEVICES": world.uuid(),
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25.0",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=1G",
        "CUDA_LAUNCH_BLOCKING": "1",
    }


def test_attached_line_and_limits_in_status(real: Real, cli: Cli, world: World) -> None:
    started = real("run", "--threads", "25", "--memory", "4G", "--priority", "low", "--", "sleep", "600")
    line = started.note()
    assert "is attached to MPS server" in line
    assert "(threads 25 %, memory limit 3.5 GiB, low priority)" in line
    (daemon,) = cli("status", output="json").ok().data["mps_daemons"]
    (client,) = daemon["servers"][0]["clients"]
    assert f"process {client['pid']} is attached" in line
    assert (client["threads_percent"], client["memory_limit_bytes"], client["priority"]) == (25.0, 3584 * MIB, "low")
    assert daemon["transient"]
    assert started.end(signal.SIGTERM).code == 128 + signal.SIGTERM
    assert (world.state.daemons, world.pids()) == ([], [])


def test_quiet_says_nothing(real: Real, world: World) -> None:
    started = with_input(real, "-q", "run", "--", "sh", "-c", "cat; echo out")
    until(lambda: world.begun and world.attached(), "attached")
    (log,) = world.directory.rglob("control.log")
    before = log.read_text().count("NEW UI")
    # What it learns now it would say, before it sees that the program has ended.
    until(lambda: log.read_text().count("NEW UI") > before, "it asks who is attached")
    answer = started.result()
    assert (answer.code, answer.out, answer.err) == (0, "out\n", "")


def test_the_proof_of_a_short_program(cli: Cli, world: World, monkeypatch: Patch) -> None:
    answer = cli("run", "--", "true")
    assert "was attached to MPS on GPU 0" in answer.err
    assert "not proved" not in answer.err
    monkeypatch.setenv("GPUSHARE_SIM_ATTACH_DELAY", "6000")
    assert "is not proved" in cli("run", "--", "true").ok().err
    assert world.state.daemons == []


def test_outside_is_said_loudly(real: Real, world: World) -> None:
    # Also when nobody wants notes.
    for words in ((), ("-q",)):
        started = with_input(real, *words, "run", "--", "cat", env={"GPUSHARE_SIM_OUTSIDE": "1"})
        assert started.says("outside MPS").startswith("error: ")
        assert started.says("hint: ")
        assert started.result().code == 0
    answer = real("run", "--strict", "--", "sleep", "600", env={"GPUSHARE_SIM_OUTSIDE": "1"}).result().ends(1)
    assert "outside MPS" in answer.err
    assert (world.state.daemons, world.pids()) == ([], [])
    started = with_input(real, "run", "--strict", "--", "sh", "-c", "cat; exit 4")
    started.says("is attached to MPS server")
    assert started.result().code == 4


def test_another_users_clients_make_it_wait(real: Real, cli: Cli, world: World) -> None:
    cli("mps", "start").ok()
    world.client(user="nobody")
    started = real("run", "--", "sleep", "600")
    assert "waits: another user's clients hold the MPS server" in started.note()
    until(lambda: [job["state"] for job in cli("jobs", output="json").ok().data["jobs"]] == ["waiting"], "it is said")
    assert started.end(signal.SIGTERM).code == 128 + signal.SIGTERM


def test_streams_are_untouched(real: Real, sim_dir: Path) -> None:
    started = real("run", "--", "cat", stdin=subprocess.PIPE)
    data = os.urandom(200_000).hex()
    out, err = started.process.communicate(data, timeout=120)
    assert (started.process.returncode, out) == (0, data)
    assert "gpushare:" in err
    code = "import os; os.write(1, bytes(range(256)) * 300)"
    done = subprocess.run(
        [sys.executable, "-m", "gpushare", "--host", "sim:h200", "run", "--", sys.executable, "-c", code],
        capture_output=True,
        env=environment(),
        check=True,
        timeout=120,
    )
    assert done.stdout == bytes(range(256)) * 300


def test_a_daemon_of_mps_start(cli: Cli, world: World) -> None:
    cli("mps", "start", "--threads", "50").ok()
    pid = world.state.daemons[0].pid
    assert cli("run", "--threads", "80", "--", "true").code == 0
    assert [daemon.pid for daemon in world.state.daemons] == [pid]
    # A dead one is replaced.
    world.send(world.state.daemons[0].pid, signal.SIGKILL)
    assert (cli("run", "--", "sh", "-c", "exit 5").code, world.state.daemons) == (5, [])


def test_not_root(cli: Cli, world: World) -> None:
    world.fault("user", "1000")
    assert cli("run", "--threads", "25", "--", "sh", "-c", "exit 5").code == 5


def test_two_share_one_daemon_and_the_last_one_stops_it(real: Real, world: World) -> None:
    first = real("run", "--", "sleep", "600")
    until(world.attached, "the first")
    second = real("run", "--", "sleep", "600")
    until(lambda: len(world.attached()) == 2, "the second")
    (daemon,) = world.state.daemons
    assert (first.end().code, [each.pid for each in world.state.daemons]) == (130, [daemon.pid])
    (process,) = world.state.processes
    assert not process.broken
    assert second.end().code == 130
    until(lambda: world.state.daemons == [], "no daemon")
    # Six at the same moment.
    world.host.nvml.identities()
    started = [with_input(real, "run", "--", "sh", "-c", "cat; exit 4") for _ in range(6)]
    for job in started:
        job.says("is attached to MPS server")
    (daemon,) = world.state.daemons
    assert {process.mps_daemon for process in world.attached()} == {daemon.pid}
    assert [job.result().code for job in started] == [4] * 6
    until(lambda: world.state.daemons == [], "no daemon")


def test_client_kept_after_the_program_keeps_the_daemon(real: Real, world: World) -> None:
    """What the program leaves behind still uses the daemon: a guard waits for it."""
    started = real("run", "--", "sleep", "600")
    until(world.attached, "attached")
    other = world.client()
    assert started.end().code == 130
    assert world.state.daemons
    world.send(other, signal.SIGKILL)
    until(lambda: world.state.daemons == [], "no daemon")


def test_its_help_leaves_rare_options_to_all_of_it(cli: Cli, monkeypatch: Patch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    short, long = cli("run", "--help").ok().out, cli("run", "--help-all").ok().out
    assert len([line for line in short.splitlines() if line.startswith("  -")]) <= 24
    for option in ("--strict", "--metric", "--grace"):
        assert option not in short
        assert option in long


def test_an_instance_is_named_by_its_name(cli: Cli, refused: Refused, world: World) -> None:
    world.mig("1g.18gb", "1g.18gb")
    cli("mig", "name", "alice", "1g.18gb:0").ok()
    uuid = cli("mig", "env", "alice").ok().out.strip().rpartition("=")[2]
    assert f"CUDA_VISIBLE_DEVICES={uuid} " in cli("run", "-g", "alice", "-n", "--", "true").ok().out
    assert "-g NAME" in refused("run", "-g", "bob", "--", "true", code="unknown_gpu", exit_code=6)
