"""Whatever moment gpushare is killed at, the guard knows the program: it says so itself, before it runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpushare.base.errors import OperationFailed
from gpushare.connect import connect
from gpushare.host.process import Processes
from tests.cli.drive import H200, World, alive, clear_up, environment, until

# gpushare, killed in the middle of the start: what stands in {patch} runs before the command line.
KILLED = """
import os, signal, subprocess, sys
def die(): os.kill(os.getpid(), signal.SIGKILL)
{patch}
from gpushare.cli import main
sys.exit(main(sys.argv[1:]))
"""
PROGRAM = "open({mark!r}, 'w').write(str(__import__('os').getpid())); __import__('time').sleep(600)"
# The program in its own process, before exec: gpushare dies first, the program after that goes on.
BEFORE_IT_IS_TOLD = """
from gpushare.host import guard as module
announce = module.Guard.announce
def told(guard, pid, started):
    parent = os.getppid()
    os.kill(parent, signal.SIGKILL)
    while os.getppid() == parent: pass
    announce(guard, pid, started)
module.Guard.announce = told
"""
AFTER_IT_IS_TOLD = """
from gpushare.host import guard as module
announce = module.Guard.announce
def told(guard, pid, started):
    announce(guard, pid, started)
    os.kill(os.getppid(), signal.SIGKILL)
module.Guard.announce = told
"""
WHEN_IT_RUNS = """
import gpushare.host.process as child
real = child.Child.__init__
def init(self, process):
    import time
    deadline = time.monotonic() + 30
    while not os.path.exists(os.environ["MARK"]) and time.monotonic() < deadline: time.sleep(0.01)
    die()
child.Child.__init__ = init
"""
POINTS = {"before it is told": BEFORE_IT_IS_TOLD, "after it is told": AFTER_IT_IS_TOLD, "when it runs": WHEN_IT_RUNS}
VERBS = {
    "run": ["run", "--"],
    "copies": ["farm", "--copies", "2", "--"],
    "bench": ["bench", "--ways", "mps", "--copies", "2", "--for", "30s", "--metric", "([0-9]+)", "--"],
}


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("verb", VERBS)
def test_a_kill_in_the_middle_of_the_start_leaves_no_program(verb: str, point: str, tmp_path: Path) -> None:
    world, mark = World(), tmp_path / "mark"
    killed = subprocess.Popen(
        [
            sys.executable,
            "-c",
            KILLED.format(patch=POINTS[point]),
            "--host",
            H200,
            *VERBS[verb],
            sys.executable,
            "-c",
            PROGRAM.format(mark=str(mark)),
        ],
        env=environment(MARK=str(mark)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert killed.wait(60) == -signal.SIGKILL
        until(lambda: not children_left(mark), "the guard has ended the program")
        until(lambda: world.state.daemons == [], "and the daemon")
    finally:
        clear_up([killed], world)


def children_left(mark: Path) -> bool:
    """Return whether the program lives, by its own word or its command line."""
    needle = str(mark).encode()
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                words = Path(f"/proc/{entry}/cmdline").read_bytes()
            except OSError:
                continue
            # The guard names no program; gpushare itself is gone.
            if needle in words and alive(int(entry)):
                return True
    return False


def test_nothing_runs_when_the_guard_is_gone(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)

    def announce(pid: int, _started: int | None) -> None:
        os.write(write, f"program {pid} -\n".encode())

    mark = tmp_path / "mark"
    with pytest.raises(OperationFailed, match="guard") as caught:
        Processes().spawn(["touch", str(mark)], os.environ, announce=announce)
    os.close(write)
    assert caught.value.code == "guard_gone"
    time.sleep(0.1)
    assert not mark.exists()


@pytest.mark.parametrize("make", [Processes, lambda: connect(H200).processes])
def test_what_is_announced_is_the_process_and_its_start(make: Callable[[], Processes]) -> None:
    processes = make()
    read, write = os.pipe()

    def announce(pid: int, started: int | None) -> None:
        os.write(write, f"{pid} {started}\n".encode())

    child = processes.spawn(["sleep", "600"], os.environ, announce=announce)
    pid, started = os.read(read, 200).split()
    os.close(read)
    os.close(write)
    info = processes.describe(child.pid)
    os.kill(child.pid, signal.SIGKILL)
    assert (int(pid), int(started)) == (child.pid, info.started)
    until(lambda: child.poll() is not None, "it is gone")


@pytest.mark.parametrize("number", [signal.SIGPIPE, signal.SIGXFSZ])
def test_a_program_dies_of_what_python_ignores_for_itself(number: int) -> None:
    """``yes | head`` in a program must end."""
    child = Processes().spawn(["sh", "-c", f"kill -{int(number)} $$; exit 3"], os.environ)
    until(lambda: child.poll() is not None, "it is gone")
    assert child.poll() == -number
