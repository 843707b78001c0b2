"""A signal that is ignored when gpushare starts stays ignored, in the program too; and a terminal that is gone hinders nothing."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.drive import H200, Real, World, alive, environment, until
from tests.cli.run.test_terminal import Screen, gpushare_run, on_terminal, screens

__all__ = ["screens"]
GPUSHARE = f"{sys.executable} -m gpushare --host {H200}"
# Says which signals it ignores, works for a moment, and leaves a mark.
PROGRAM = """
import signal, sys, time
names = [n for n in ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1") if signal.getsignal(getattr(signal, n)) is signal.SIG_IGN]
open(sys.argv[1] + ".ignored", "w").write(" ".join(names) or "none")
deadline = time.monotonic() + 60
while not __import__("os").path.exists(sys.argv[1] + ".go") and time.monotonic() < deadline: time.sleep(0.02)
open(sys.argv[1] + ".done", "w").close()
"""


class Marks:
    """What a program leaves below a path."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "mark"
        (directory / "program.py").write_text(PROGRAM)
        self.command = f"{sys.executable} {directory / 'program.py'} {self.path}"

    def ignored(self) -> str:
        """Wait until the program runs, and return the signals that it ignores."""
        file = Path(f"{self.path}.ignored")
        until(lambda: file.exists() and os.path.getsize(file), "the program runs")
        return file.read_text()

    def go(self) -> None:
        """Let the program end."""
        Path(f"{self.path}.go").touch()

    @property
    def done(self) -> bool:
        return Path(f"{self.path}.done").exists()


@pytest.fixture
def marks(tmp_path: Path) -> Marks:
    return Marks(tmp_path)


def lives_on(world: World, marks: Marks) -> None:
    """See that what runs goes on, and let it end."""
    time.sleep(0.5)
    assert world.attached()
    marks.go()


def gone(world: World) -> None:
    until(lambda: world.state.daemons == [] and world.pids() == [], "all is gone")


def hang_up(screen: Screen) -> None:
    """Close the terminal."""
    os.close(screen.descriptor)
    screen.descriptor = os.open(os.devnull, os.O_RDONLY)


def end_of(screen: Screen) -> int:
    """Wait for the end of what runs on a terminal that is gone, and return its exit code."""
    screen.status = os.waitstatus_to_exitcode(os.waitpid(screen.pid, 0)[1])
    return screen.status


@pytest.mark.parametrize("verb", ["run --", "farm --copies 2 --"])
def test_nohup_outlives_the_terminal(
    verb: str, screens: list[Screen], world: World, marks: Marks, tmp_path: Path
) -> None:
    line = f"cd {tmp_path}; nohup {GPUSHARE} {verb} {marks.command} & exec sleep 600"
    screens.append(screen := on_terminal("sh", "-c", line))
    assert "SIGHUP" in marks.ignored()
    hang_up(screen)
    # The terminal is gone, and its session's leader with it.
    end_of(screen)
    lives_on(world, marks)
    gone(world)
    assert marks.done


def test_a_closed_terminal_ends_the_program_the_safe_way(screens: list[Screen], world: World, marks: Marks) -> None:
    screens.append(screen := on_terminal(*gpushare_run("--", *marks.command.split())))
    marks.ignored()
    screen.until("is attached")
    pid = world.state.processes[0].pid
    hang_up(screen)
    # By itself, not by its guard: what it says to the terminal is lost, and that hinders nothing.
    assert end_of(screen) == 128 + signal.SIGHUP
    assert not alive(pid)
    assert not marks.done
    gone(world)


@pytest.mark.parametrize("verb", ["run --", "farm --copies 2 --"])
def test_a_terminal_that_is_gone_ends_nothing_where_its_signal_is_ignored(
    verb: str, screens: list[Screen], world: World, marks: Marks
) -> None:
    """Stdout and stderr are the terminal still: every word there fails."""
    screens.append(screen := on_terminal("sh", "-c", f"trap '' HUP; exec {GPUSHARE} {verb} {marks.command}"))
    assert marks.ignored() == "SIGHUP"
    hang_up(screen)
    lives_on(world, marks)
    assert (end_of(screen), marks.done) == (0, True)
    gone(world)


def test_a_background_job_of_a_script_ignores_ctrl_c(world: World, marks: Marks) -> None:
    """A shell without job control starts it with SIGINT and SIGQUIT ignored."""
    script = subprocess.Popen(
        ["sh", "-c", f"({GPUSHARE} run -- {marks.command} & echo $!; wait)"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment(),
        start_new_session=True,
    )
    assert script.stdout is not None
    pid = int(script.stdout.readline())
    assert marks.ignored() == "SIGINT SIGQUIT"
    until(world.attached, "attached")
    os.kill(pid, signal.SIGINT)
    os.kill(pid, signal.SIGQUIT)
    lives_on(world, marks)
    script.wait(60)
    script.stdout.close()
    assert marks.done
    gone(world)


def test_what_is_ignored_is_ignored_in_each_copy_and_an_end_is_quick(real: Real, world: World, marks: Marks) -> None:
    started = real("farm", "--copies", "2", "--", *marks.command.split(), preexec_fn=ignore_interrupts)
    assert marks.ignored() == "SIGINT SIGUSR1"
    until(lambda: len(world.attached()) == 2, "both are clients")
    started.signal(signal.SIGINT)
    time.sleep(0.3)
    assert (len(world.attached()), started.end(signal.SIGTERM).code) == (2, 128 + signal.SIGTERM)
    gone(world)


def ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def test_an_exit_code_is_told_where_ended_children_were_ignored(real: Real) -> None:
    ignore = functools.partial(signal.signal, signal.SIGCHLD, signal.SIG_IGN)
    assert real("run", "--", "sh", "-c", "exit 7", preexec_fn=ignore).result().code == 7


def test_a_script_that_ignores_ctrl_c_ends_tune_and_bench_by_sigterm(real: Real, world: World) -> None:
    job = f"{sys.executable} -m gpushare.sim.job --need 30"
    for words in (
        ("tune", "--production", job, "--opportunistic", job, "--metric", r"rate=([0-9.]+)"),
        ("bench", "--metric", r"rate=([0-9.]+)", "--for", "60s", "--", *job.split()),
    ):
        started = real(*words, preexec_fn=ignore_interrupts)
        until(
            lambda: world.begun and [process for process in world.state.processes if process.real],
            "something is measured",
        )
        started.signal(signal.SIGINT)
        time.sleep(0.3)
        assert started.process.poll() is None
        assert started.end(signal.SIGTERM).code == 128 + signal.SIGTERM
        gone(world)


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_a_closed_tmux_window_ends_the_program(world: World, marks: Marks, sim_dir: Path) -> None:
    tmux = ["tmux", "-f", "/dev/null", "-S", str(sim_dir / "tmux")]
    line = f"{GPUSHARE} run -- {marks.command}"
    subprocess.run([*tmux, "new-session", "-d", "-x", "80", "-y", "24", line], check=True, env=environment())
    try:
        marks.ignored()
        until(world.attached, "attached")
        subprocess.run([*tmux, "kill-window"], check=True)
        gone(world)
        assert not marks.done
    finally:
        subprocess.run([*tmux, "kill-server"], check=False, stderr=subprocess.DEVNULL)
