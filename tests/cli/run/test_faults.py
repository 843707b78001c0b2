"""`gpushare run` when something around it fails: the daemon, the caller's stderr, the caller's environment."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gpushare.base.errors import OperationFailed
from gpushare.base.selection import select_one
from gpushare.mps.limits import Limits
from gpushare.run.share import MpsShare
from gpushare.sim import admin
from tests.cli.drive import H200, Cli, Refused, World, until


def gpushare(*words: str, stderr: int | object = subprocess.PIPE) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "gpushare", "--host", H200, *words]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True)  # type: ignore[call-overload]


def until_attached(run: subprocess.Popen[str]) -> int:
    """Return the PID that the run says is attached."""
    assert run.stderr is not None
    for line in run.stderr:
        if "is attached" in line:
            return int(line.split()[2])
    raise AssertionError("it ended before it was attached")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_a_client_is_ended_the_safe_way_though_the_daemon_hangs(number: int) -> None:
    run = gpushare("run", "--", "sleep", "600")
    until_attached(run)
    admin.set_fault(H200, "hang", value="nvidia-cuda-mps-control")
    run.send_signal(number)
    _, errors = run.communicate(timeout=120)
    admin.clear_faults(H200)
    assert run.returncode == 128 + number
    assert "was stopped, its queue drained" in errors


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_behind_stderr_does_not_end_the_program(tmp_path: Path) -> None:
    done = tmp_path / "done"
    with open("/dev/full", "w", encoding="utf-8") as full:
        run = gpushare("run", "--", "sh", "-c", f"cat; echo finished > {done}; exit 5", stderr=full)
        # It says that the program is attached, to a disk that is full.
        world = World()
        until(lambda: world.begun and world.attached(), "attached")
        (log,) = world.directory.rglob("control.log")
        before = log.read_text().count("NEW UI")
        until(lambda: log.read_text().count("NEW UI") > before, "it asks who is attached")
        run.communicate(timeout=120)
    assert (run.returncode, done.read_text(encoding="utf-8")) == (5, "finished\n")


def test_a_server_in_fault_takes_no_new_client(cli: Cli, world: World) -> None:
    cli("mps", "start", "--threads", "50", "--memory", "8G", "--users", "all").ok()
    victim, neighbour = world.client(queue_seconds=5.0), world.client()
    world.send(victim, signal.SIGKILL)
    (server,) = world.state.daemons[0].servers
    assert server.status == "FAULT"
    with pytest.raises(OperationFailed, match="MPS_SERVER_NOT_READY"):
        world.client()
    for words in (("run", "--"), ("run", "-n", "--threads", "20", "--"), ("farm", "--copies", "2", "--")):
        error = cli("-o", "json", *words, "true").error
        assert (error["code"], error["gpu"]) == ("server_fault", "0"), words
        assert f"MPS server {server.pid} of GPU 0 is in state FAULT" in error["message"]
        restart = "gpushare mps stop -g 0 --force && gpushare mps start -g 0 --threads 50 --memory 8G --users all"
        assert error["hint"].endswith(f"or restart MPS: {restart}")
    # A share of the server is checked whether it may be used at all: who waits or is started again may find it well.
    MpsShare(world.host, select_one("0", world.host.nvml.sweep()), Limits()).check("true")
    # Outside MPS, and once the affected clients have ended, it runs.
    cli("run", "--slice", "2ms", "--", "true").ok()
    cli("stop", str(neighbour)).ok()
    cli("run", "--", "true").ok()


def test_the_death_of_the_daemon_is_told_and_cleared_away(cli: Cli) -> None:
    run = gpushare("run", "--", "cat")
    until_attached(run)
    World().send(admin.describe(H200).daemons[0].pid, signal.SIGKILL)
    assert run.stderr is not None
    # Its program ends with its input, and that with this test: a run that says something else is ended.
    watchdog = threading.Timer(60.0, run.kill)
    watchdog.start()
    assert any("died while the program was running" in line for line in run.stderr)
    watchdog.cancel()
    run.communicate(timeout=120)
    assert cli("mps", "status", "-o", "json").json["data"]["mps_daemons"] == []


def test_a_limit_that_the_daemon_lowers_is_told(cli: Cli) -> None:
    cli("mps", "start", "--threads", "20")
    run = gpushare("run", "--threads", "80", "--", "cat")
    assert run.stderr is not None
    errors = ""
    while "(threads 20 %" not in errors or "has lower limits than requested" not in errors:
        errors += (line := run.stderr.readline())
        assert line, errors
    run.communicate(timeout=120)


def test_a_file_that_may_not_be_executed(cli: Cli, tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text("exit 0\n", encoding="utf-8")
    os.chmod(script, 0o644)
    assert "no permission to execute" in cli("run", "--", str(script)).ends(126).err


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.EAGAIN])
def test_a_guard_that_does_not_start_is_said(cli: Cli, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Nothing runs unguarded, and the daemon goes."""
    real = subprocess.Popen

    def refuse(argv: list[str], *rest: object, **named: object) -> object:
        if any(word.endswith("guard.py") for word in argv):
            raise OSError(number, os.strerror(number), argv[0])
        return real(argv, *rest, **named)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "Popen", refuse)
    answer = cli("run", "--", "false", output="json").ends(1)
    (line,) = answer.lines("error")
    assert "the guard, which ends the program if gpushare dies, does not start" in line
    assert answer.lines("hint")
    assert World().state.daemons == []


# A client that fails; for the first tries as the servers' log shows it after a fatal error of a kernel.
CLIENT = """
echo try >> %s
%s -S -m gpushare.sim.job --seconds 0.3 >/dev/null
if [ $(wc -l < %s) -le %d ]; then
  echo "[2026-11-25 12:00:00.000 Server 4194306] Client {PID: 4267, Context ID: 0} encountered a fatal GPU error." \\
    >> $CUDA_MPS_PIPE_DIRECTORY/../log/server.log
fi
exit %d
"""


def client(path: Path, faults: int, code: int = 7) -> tuple[str, ...]:
    return "bash", "-c", CLIENT % (path, sys.executable, path, faults, code)


def test_a_client_is_started_again_only_after_a_fault(cli: Cli, refused: Refused, tmp_path: Path) -> None:
    refused("run", "--restart-on", "rain", "--", "true", code="bad_restart", exit_code=2)
    tries = tmp_path / "tries"
    answer = cli("run", "--restart-on", "mps-fault", "--threads", "50", "--", *client(tries, 1))
    # The second try failed by itself.
    assert (answer.code, tries.read_text().count("try")) == (7, 2)
    assert "its MPS server died: started again (1 of at most 3 times)" in answer.err
    tries.unlink()
    answer = cli("run", "--restart-on", "mps-fault", "--threads", "50", "--", *client(tries, 9))
    assert (answer.code, tries.read_text().count("try")) == (7, 4)
    assert "(3 of at most 3 times)" in answer.err
    tries.unlink()
    assert cli("run", "--threads", "50", "--", *client(tries, 9)).code == 7
    assert tries.read_text().count("try") == 1
