"""``gpushare run`` and signals: the program gets its own and time, its neighbours get no harm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.drive import ROOT, Cli, Real, Started, World, alive, until

HANDLER = """
import os, signal, sys, time
def say(text):
    # print() may not be called within print().
    os.write(1, (text + "\\n").encode())
def end(number, frame):
    say(f"got {{number}}")
    {then}
for number in {numbers}:
    signal.signal(number, end)
if signal.SIGINT not in {numbers}:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
say("ready")
while True:
    time.sleep(0.05)
"""


def program(*numbers: int, then: str = "sys.exit(5)") -> tuple[str, ...]:
    """Return a program that handles these signals."""
    return sys.executable, "-c", HANDLER.format(numbers=tuple(map(int, numbers)), then=then)


def ready(started: Started) -> None:
    assert started.line() == "ready\n"


def child_of(world: World) -> int:
    """Return the PID of the program, once it is a client."""
    until(world.attached, "attached")
    return world.state.processes[0].pid


def attached(started: Started) -> None:
    """Wait until gpushare says that the program is attached: its guard knows the program by then."""
    assert "is attached" in started.note()


def gone(world: World) -> None:
    until(lambda: world.state.daemons == [] and world.pids() == [], "all is gone")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("handled", [signal.SIGINT, signal.SIGTERM])
def test_a_program_with_a_handler_ends_itself(real: Real, world: World, number: int, handled: int) -> None:
    started = real("run", "--", *program(handled))
    ready(started)
    answer = started.end(number)
    # Its own signal if it handles it, else the one that it does.
    assert (answer.code, answer.out) == (5, f"got {int(handled)}\n")
    assert "was killed" not in answer.err
    gone(world)


def test_the_grace_of_a_program(real: Real, world: World) -> None:
    started = real("run", "--", *program(signal.SIGINT, then="time.sleep(0.7); print('saved', flush=True); exit(0)"))
    ready(started)
    answer = started.end()
    assert (answer.code, answer.out) == (0, "got 2\nsaved\n")
    gone(world)
    # It ignores its signal.
    started = real("run", "--grace", "0.3s", "--", *program(signal.SIGINT, then="pass"))
    ready(started)
    assert "and the program was killed" in started.end().ends(130).err
    gone(world)
    # A second Ctrl-C hurries.
    started = real("run", "--grace", "600s", "--", *program(signal.SIGINT, then="pass"))
    ready(started)
    started.signal(signal.SIGINT)
    assert (started.line(), started.end().code) == ("got 2\n", 130)
    gone(world)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_program_without_a_handler_is_ended_the_safe_way_at_once(real: Real, world: World, number: int) -> None:
    # So long a grace that only who has no use for it is ended within this test's life.
    started = real("run", "--grace", "600s", "--", "sleep", "600")
    child_of(world)
    answer = started.end(number)
    assert answer.code == 128 + number
    assert "was stopped, its queue drained" in answer.err
    gone(world)


@pytest.mark.parametrize(
    ("options", "start"),
    [((), ()), (("--slice", "2ms"), ()), (("--slice", "2ms"), ("bash", "-c", 'exec -a -bash "$@"', "-"))],
    ids=["mps", "slice", "login"],
)
def test_a_shell_that_runs_programs_in_turn_ends_at_once(
    real: Real, world: World, options: tuple[str, ...], start: tuple[str, ...]
) -> None:
    """bash catches SIGINT, and goes on if the program for which it waits does not die of SIGINT."""
    script = "while :; do sh -c 'echo $PPID; exec sleep 600'; done"
    started = real("run", *options, "--grace", "600s", "--", *start, "bash", "-c", script)
    shell = int(started.line())
    until(lambda: world.host.processes.catches(shell, signal.SIGINT), "bash waits for its child")
    assert started.end(signal.SIGTERM).code == 128 + signal.SIGTERM
    until(lambda: not alive(shell), "bash is gone")


def test_the_end_breaks_no_neighbour(real: Real, world: World) -> None:
    started = real("run", "--", "sleep", "600")
    child_of(world)
    neighbour = world.client(sm_percent=20, queue_seconds=0.2)
    assert started.end(signal.SIGTERM).code == 128 + signal.SIGTERM
    assert not world.process(neighbour).broken


def test_all_processes_of_the_program_end(real: Real, world: World) -> None:
    started = real("run", "--", "sh", "-c", "sleep 601 & echo $!; sleep 602")
    below = int(started.line())
    child_of(world)
    assert started.end(signal.SIGTERM).code == 128 + signal.SIGTERM
    until(lambda: not alive(below), "the one below is gone")
    gone(world)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT])
def test_other_signals_are_passed_on(real: Real, world: World, number: int) -> None:
    started = real("run", "--", *program(number, signal.SIGINT, then="sys.exit(5) if number == 2 else None"))
    ready(started)
    started.signal(number)
    assert (started.line(), started.end().code) == (f"got {int(number)}\n", 5)
    gone(world)


def test_death_of_gpushare_ends_the_program_and_the_daemon(real: Real, world: World, tmp_path: Path) -> None:
    started = real("run", "--", "sleep", "600")
    attached(started)
    child = child_of(world)
    started.signal(signal.SIGKILL)
    started.process.wait()
    until(lambda: not alive(child), "the program is gone")
    gone(world)
    until(lambda: not list(world.directory.rglob("daemon.json")), "its record is cleared away")
    # A program with a handler ends itself.
    mark = tmp_path / "mark"
    then = f"open({str(mark)!r}, 'w').write('saved'); sys.exit(0)"
    started = real("run", "--", *program(signal.SIGINT, then=then))
    ready(started)
    attached(started)
    started.signal(signal.SIGKILL)
    started.process.wait()
    until(mark.exists, "it saved")
    gone(world)


def test_death_of_one_leaves_the_daemon_to_the_other(real: Real, world: World) -> None:
    first = real("run", "--", "sleep", "600")
    child = child_of(world)
    second = real("run", "--", "sleep", "600")
    attached(first)
    until(lambda: len(world.attached()) == 2, "both")
    first.signal(signal.SIGKILL)
    first.process.wait()
    until(lambda: world.pids() and child not in world.pids(), "the first is gone")
    assert world.state.daemons
    assert not world.state.processes[0].broken
    assert second.end().code == 130
    gone(world)


def guard_of(pid: int) -> int:
    """Return the PID of the guard."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                words = Path(f"/proc/{entry}/cmdline").read_text().split("\0")
                parent = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1]
            except OSError:
                continue
            if parent == str(pid) and any(word.endswith("guard.py") for word in words):
                return int(entry)
    return 0


def test_death_of_the_guard_does_not_end_the_program_and_it_hears_no_signal_of_ours(real: Real, world: World) -> None:
    started = real("run", "--", *program(signal.SIGINT))
    ready(started)
    os.kill(until(lambda: guard_of(started.pid), "the guard"), signal.SIGKILL)
    child = child_of(world)
    until(lambda: guard_of(started.pid) == 0 or not alive(guard_of(started.pid)), "no guard")
    assert alive(child)
    assert started.end().code == 5
    gone(world)
    started = real("run", "--", *program(signal.SIGINT), start_new_session=True)
    ready(started)
    guard = until(lambda: guard_of(started.pid), "the guard")
    assert os.getsid(guard) != os.getsid(started.pid)
    os.killpg(started.pid, signal.SIGINT)
    assert started.result().code == 5
    until(lambda: not alive(guard), "the guard has ended with it")
    gone(world)


def test_a_limit_that_nobody_watches_is_said(real: Real, cli: Cli, world: World) -> None:
    started = real("run", "--name", "lim", "--memory", "8G", "--", *program(signal.SIGINT))
    ready(started)
    until(lambda: cli("jobs", output="json").ok().data["jobs"][0]["memory_limit_bytes"], "its limit is known")
    assert "memory.limit" not in cli("doctor").out
    os.kill(guard_of(started.pid), signal.SIGKILL)
    started.signal(signal.SIGKILL)
    until(lambda: not alive(started.pid), "gpushare is gone")
    checks = cli("doctor", output="json").ok().data["checks"]
    (check,) = [check for check in checks if check["id"] == "memory.limit"]
    child = child_of(world)
    seen = f"the memory limit of 'lim' (process {child}), 8.0 GiB, is no longer watched"
    assert (check["verdict"], check["seen"]) == ("warn", seen)
    cli(*check["remedy"].rpartition("gpushare ")[2].split()).ok()
    assert not alive(child)


def test_a_daemon_that_dies_meanwhile_does_not_end_the_program(real: Real, world: World) -> None:
    started = real("run", "--", *program(signal.SIGINT))
    ready(started)
    child_of(world)
    world.send(world.state.daemons[0].pid, signal.SIGKILL)
    assert started.end().code == 5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_start_that_is_ended_rolls_back(real: Real, world: World, number: int) -> None:
    world.fault("hang", "nvidia-cuda-mps-control")
    started = real("mps", "start", "--exclusive")
    until(lambda: world.state.gpus[0].compute_mode == 3, "half way")
    answer = started.end(number)
    assert (answer.code, answer.lines("error")) == (128 + number, ["error: interrupted"])
    assert (world.state.daemons, world.state.gpus[0].compute_mode) == ([], 0)


def test_ctrl_c_while_a_class_is_compiled_does_not_change_the_exit_code(tmp_path: Path) -> None:
    """Python ends with SIGINT if one came within exec(), even if the program handled it and has an exit code."""
    (tmp_path / "sitecustomize.py").write_text(
        "import gpushare.cli\n"
        "def main():\n"
        "    try:\n"
        "        exec('raise KeyboardInterrupt')\n"
        "    except KeyboardInterrupt:\n"
        "        return 130\n"
        "gpushare.cli.main = main\n"
    )
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    done = subprocess.run([sys.executable, "-m", "gpushare"], env={**os.environ, "PYTHONPATH": path}, check=False)
    assert done.returncode == 130
