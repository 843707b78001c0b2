"""The process table of this machine: who a process is, signals to it, programs started."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import psutil
import pytest

from gpushare.base.errors import NoPermission, NotFound, OperationFailed
from gpushare.host import process
from gpushare.host.capabilities import user_name
from gpushare.host.identity import is_stopped
from gpushare.host.machine import Machine
from gpushare.host.process import Processes, ProcessInfo, starting_hint, starts_of, wait_gone
from gpushare.run.end import ask_to_end
from tests.cli.drive import until
from tests.clock import step_the_clock
from tests.errors import fails

if TYPE_CHECKING:
    from gpushare.host.host import Host

LOCAL = Processes()
NOBODY = 2**31 - 1
Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts a program, and end them all."""
    started: list[subprocess.Popen[bytes]] = []

    def run(*argv: str, **options: object) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options)  # type: ignore[call-overload]
        started.append(child)
        return child

    yield run
    for child in started:
        with child:
            child.kill()


def described(pid: int) -> ProcessInfo:
    found = LOCAL.describe(pid)
    assert found is not None
    return found


def test_this_process_is_described() -> None:
    found = described(os.getpid())
    assert (found.uid, found.user, found.stopped) == (os.geteuid(), user_name(os.geteuid()), False)
    assert found.command_line is not None
    assert found.started_at <= time.time()


@pytest.mark.needs_root
def test_a_program_with_the_rights_of_another_user_has_its_own_name_and_their_id(start: Start) -> None:
    child = start(sys.executable, "-c", "import os; os.setresuid(1, 2, 2); print(flush=True); input()")
    child.stdout.readline()
    info = described(child.pid)
    assert (info.uid, info.user) == (2, user_name(1))


@pytest.mark.needs_root
def test_a_process_that_is_hidden_is_there_and_unknown(start: Start) -> None:
    """With /proc mounted with hidepid=1 a stranger sees the number only."""
    child = start("cat")
    code = (
        "import os; from gpushare.host.process import Processes\n"
        f"os.setgroups([]); os.setgid(65534); os.setresuid(65534, 65534, 65534); print(Processes().describe({child.pid}))"
    )
    mount = f'mount -t proc -o hidepid=1 proc /proc && exec {sys.executable} -c "$0"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mount, code], check=False, capture_output=True, text=True, timeout=60
    )
    if "mount" in done.stderr:
        pytest.skip("this machine lets nobody mount /proc")
    assert f"ProcessInfo(pid={child.pid}, user=None, uid=None, name=None" in done.stdout, done.stderr


@pytest.mark.parametrize("pid", [0, -1, NOBODY, 2**40])
def test_nobody_is_not_described_not_alive_and_not_signalled(pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.kill

    def careful(to: int, number: int) -> None:
        # kill(2) would take 0 and -1 for whole groups: this machine's.
        assert to > 0
        real(to, number)

    monkeypatch.setattr(os, "kill", careful)
    assert LOCAL.describe(pid) is None
    assert not LOCAL.alive(pid)
    assert LOCAL.environment(pid) is None
    assert LOCAL.catches(pid, signal.SIGINT) is None


def test_a_stopped_process_is_told(start: Start) -> None:
    child = start("cat")
    os.kill(child.pid, signal.SIGSTOP)
    until(lambda: described(child.pid).stopped, "the process table shows it")
    assert is_stopped(child.pid)
    os.kill(child.pid, signal.SIGCONT)
    until(lambda: not described(child.pid).stopped, "the process table shows it")
    assert not is_stopped(child.pid)


def test_a_zombie_is_not_alive_but_there(start: Start) -> None:
    child = start("cat")
    child.kill()
    until(lambda: not LOCAL.alive(child.pid), "the process table shows it")
    assert LOCAL.describe(child.pid) is not None


def test_a_pid_that_was_given_out_again_is_another_process(start: Start) -> None:
    child = start("cat")
    begun = described(child.pid).started
    assert LOCAL.alive(child.pid, begun)
    assert not LOCAL.alive(child.pid, begun - 100)


def test_the_environment_is_the_one_it_began_with(start: Start) -> None:
    child = start("cat", env={"A": "1", "B": "x=y", "C": "two\r\nlines", "PATH": os.environ["PATH"]})
    until(lambda: (LOCAL.environment(child.pid) or {}).get("A"), "the process table shows it")
    found = LOCAL.environment(child.pid) or {}
    assert (found["A"], found["B"], found["C"]) == ("1", "x=y", "two\r\nlines")


def test_an_environment_that_may_not_be_read_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr("builtins.open", refused)
    assert LOCAL.environment(os.getpid()) is None


@pytest.mark.parametrize("gone", [False, True])
def test_processes_are_found_by_the_name_of_their_program(start: Start, sim_dir: Path, gone: bool) -> None:
    shell = os.path.realpath(shutil.which("sh") or "/bin/sh")
    # The kernel's own short name is the same for both.
    children = {}
    for name in ("gs-mps-long-name-control", "gs-mps-long-name-server"):
        shutil.copy(shell, sim_dir / name)
        children[name] = start("other-argv0", "-c", "read x", executable=str(sim_dir / name))
    until(lambda: all(LOCAL.pids_of_program(name) for name in children), "the process table shows it")
    if gone:
        shutil.rmtree(sim_dir)
    for name, child in children.items():
        assert list(LOCAL.pids_of_program(name)) == [child.pid]
    assert list(LOCAL.pids_of_program("gs-mps-long-name")) == []


def test_where_the_program_may_not_be_read_the_command_line_tells(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = start("/opt/gs-hidden-name", "-c", "read x", executable=shutil.which("sh"))

    def refused(_path: str) -> str:
        raise PermissionError

    monkeypatch.setattr(os, "readlink", refused)
    until(lambda: list(LOCAL.pids_of_program("gs-hidden-name")) == [child.pid], "the process table shows it")


def test_descendants_are_those_of_a_process(start: Start) -> None:
    child = start("sh", "-c", "sleep 600 & sleep 600; wait")
    until(lambda: len(LOCAL.descendants(child.pid)) == 3, "the process table shows it")
    found = LOCAL.descendants(child.pid)
    assert found[0] == child.pid
    assert LOCAL.descendants(NOBODY) == []
    for pid in found[1:]:
        os.kill(pid, signal.SIGKILL)


def test_whether_a_process_has_its_own_handler(start: Start) -> None:
    code = "import signal, sys; signal.signal(signal.SIGTERM, print); print('ready', flush=True); sys.stdin.read()"
    child = start(sys.executable, "-c", code)
    child.stdout.readline()
    assert LOCAL.catches(child.pid, signal.SIGTERM) is True
    assert LOCAL.catches(child.pid, signal.SIGHUP) is False


@pytest.mark.parametrize("also", [False, True], ids=["all threads", "not all threads"])
def test_a_signal_that_a_process_waits_for_does_not_kill_it(start: Start, also: bool) -> None:
    """With sigwait or signalfd it has no handler; but a thread that does not block the signal would be killed by it."""
    code = (
        "import signal, threading\n"
        f"{'threading.Thread(target=threading.Event().wait, daemon=True).start()' if also else ''}\n"
        "signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        "print('ready', flush=True)\n"
        "signal.sigwait([signal.SIGTERM]); raise SystemExit(7)"
    )
    child = start(sys.executable, "-c", code)
    child.stdout.readline()
    assert LOCAL.catches(child.pid, signal.SIGTERM) is not also
    assert LOCAL.catches(child.pid, signal.SIGHUP) is False
    host = cast("Host", SimpleNamespace(processes=LOCAL))
    identity = LOCAL.identity(child.pid)
    # A client of MPS is asked only where that does not kill it.
    asked = ask_to_end(host, {child.pid: identity.started}, None, signal.SIGTERM)
    assert bool(asked) is not also
    if not also:
        assert child.wait(10) == 7


def test_a_program_runs_in_a_group_of_its_own_and_its_status_is_known() -> None:
    child = LOCAL.spawn(["sh", "-c", 'test "$A" = 1 && exit 7'], {"A": "1", "PATH": os.environ["PATH"]})
    until(lambda: child.poll() is not None, "the process table shows it")
    assert (child.poll(), child.stopped_by()) == (7, None)


def test_a_program_that_is_stopped_and_killed_is_told_so() -> None:
    child = LOCAL.spawn(["sleep", "600"], os.environ)
    assert os.getpgid(child.pid) == child.pid
    os.kill(child.pid, signal.SIGSTOP)
    until(lambda: child.stopped_by() == signal.SIGSTOP, "the process table shows it")
    assert (child.stopped_by(), child.poll()) == (None, None)
    os.kill(child.pid, signal.SIGKILL)
    until(lambda: child.poll() is not None, "the process table shows it")
    assert child.poll() == -signal.SIGKILL


def test_the_hint_on_a_program_that_cannot_be_started_has_the_likely_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert starting_hint("no-such") == "check the spelling: command -v no-such"
    assert starting_hint("./train.py") == "check the spelling: ls -l ./train.py"
    remedy = "name its interpreter (python3 ./train); or make it executable, with a first line such as #!/bin/sh: chmod +x ./train"
    (tmp_path / "train").write_text("1\n")
    assert starting_hint("./train") == starting_hint("train") == remedy
    (tmp_path / "train").chmod(0o755)
    # The kernel does not execute a script without a line #!.
    with pytest.raises(OperationFailed) as caught:
        LOCAL.spawn(["./train"], os.environ)
    assert caught.value.hint == remedy


def test_a_program_that_cannot_be_started_is_an_error(sim_dir: Path) -> None:
    with fails(NotFound, "command_not_found"):
        LOCAL.spawn(["gs-no-such-program"], os.environ)
    with fails(NoPermission, "command_not_executable"):
        LOCAL.spawn([str(sim_dir)], os.environ)
    broken = sim_dir / "broken"
    broken.write_bytes(b"\x7fELFgarbage")
    broken.chmod(0o755)
    with pytest.raises(OperationFailed, match="cannot execute"):
        LOCAL.spawn([str(broken)], os.environ)


def test_waiting_until_processes_are_gone(start: Start) -> None:
    stays, goes = start("cat"), start("cat")
    starts = starts_of(LOCAL, [stays.pid, goes.pid])
    goes.kill()
    assert wait_gone(LOCAL, {goes.pid: starts[goes.pid]}, 120.0) == []
    assert wait_gone(LOCAL, {**starts, NOBODY: 0}, 0.1) == [stays.pid]


def test_the_pid_namespace_is_compared_with_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    here = os.stat("/proc/self/ns/pid").st_ino
    monkeypatch.setattr(process, "HOST_PID_SPACE", here)
    assert LOCAL.namespace_is_host() is True
    monkeypatch.setattr(process, "HOST_PID_SPACE", here + 1)
    assert LOCAL.namespace_is_host() is False


@pytest.mark.parametrize(
    ("title", "words"),
    [("ray::IDLE worker", ("ray::IDLE", "worker")), ("VLLM::EngineCore", ("VLLM::EngineCore",)), ("", None)],
)
def test_a_title_that_is_shorter_than_the_arguments_is_read_without_the_rest(
    start: Start, title: str, words: tuple[str, ...] | None
) -> None:
    """As setproctitle writes it: over the arguments, with NUL up to their end."""
    code = """
import ctypes, sys
fields = open("/proc/self/stat").read().rpartition(")")[2].split()
begin, end = map(int, fields[45:47])
ctypes.memset(begin, 0, end - begin)
ctypes.memmove(begin, sys.argv[1].encode(), len(sys.argv[1]))
print("ready", flush=True)
sys.stdin.read()
"""
    child = start(sys.executable, "-c", code, title)
    child.stdout.readline()
    assert described(child.pid).command_line == words


def test_a_clock_that_is_set_makes_nobody_a_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the time that is shown moves with the clock."""
    own = os.getpid()
    before = described(own)
    shown = before.started_at
    assert shown == pytest.approx(psutil.Process(own).create_time(), abs=2)
    step_the_clock(monkeypatch, 3600.0)
    after = described(own)
    assert after == before
    assert after.started_at == pytest.approx(shown + 3600.0, abs=2)
    assert LOCAL.alive(own, before.started)


def test_what_a_process_shows_is_read_to_a_bound(start: Start) -> None:
    """Any user can let his process show gigabytes as its arguments (PR_SET_MM): root's memory is not his."""
    sleep = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
    one = start(*sleep, *["x" * 20_000] * 10)
    one.stdout.readline()
    found = described(one.pid)
    assert found.command_line is None
    assert found.name
    assert found.uid == os.geteuid()


def test_an_environment_that_is_too_long_counts_as_unreadable(start: Start) -> None:
    variables = {f"GPUSHARE_TEST_{number}": "x" * 100_000 for number in range(12)}
    one = start("sleep", "60", env={"PATH": os.environ["PATH"], **variables})
    other = start("sleep", "60", env={"PATH": os.environ["PATH"], "GPUSHARE_TEST_0": "y"})
    until(lambda: LOCAL.environment(other.pid), "the process table shows it")
    until(lambda: described(one.pid).name == "sleep", "the process table shows it")
    until(lambda: LOCAL.environment(one.pid) is None, "the process table shows it")
    found = Machine().environments({"GPUSHARE_TEST_0"})
    assert one.pid not in found
    assert found[other.pid] == {"GPUSHARE_TEST_0": "y"}


def test_the_words_of_a_command_line_are_whole(start: Start) -> None:
    one = start(sys.executable, "-c", "import time; time.sleep(60)", "a b", "", "")
    until(lambda: (described(one.pid).command_line or ("",))[0] == sys.executable, "the process table shows it")
    assert described(one.pid).command_line == (sys.executable, "-c", "import time; time.sleep(60)", "a b")


@pytest.mark.parametrize("name", ["a-program-with-a-long-name", "a) Z (b"])
def test_a_long_name_and_one_with_a_bracket_are_told_whole(start: Start, sim_dir: Path, name: str) -> None:
    """The kernel cuts it at 15 bytes; the command line has the rest."""
    path = sim_dir / name
    shutil.copy(shutil.which("sleep") or "", path)
    one = start(str(path), "60")
    until(lambda: described(one.pid).name == name, "the process table shows it")
    assert LOCAL.alive(one.pid)


@pytest.mark.parametrize("reason", [None, errno.ENOSYS, errno.EPERM, errno.EMFILE])
def test_a_signal_reaches_the_process_that_is_meant_also_where_there_is_no_descriptor_for_it(
    monkeypatch: pytest.MonkeyPatch, start: Start, reason: int | None
) -> None:
    """Linux before 5.3, a sandbox, too many open files: the look right before the signal must do."""

    def refused(pid: int) -> int:
        raise OSError(reason, os.strerror(reason))

    child = start("sleep", "600")
    begun = described(child.pid).started
    assert begun is not None
    if reason is not None:
        monkeypatch.setattr(os, "pidfd_open", refused)
    for other in (begun - 1, begun + 1):
        with pytest.raises(NotFound):
            LOCAL.send_to(child.pid, other, signal.SIGTERM)
    assert child.poll() is None
    LOCAL.send_to(child.pid, begun, signal.SIGTERM)
    assert child.wait(60.0) == -signal.SIGTERM
    with pytest.raises(NotFound):
        LOCAL.send_to(child.pid, begun, signal.SIGKILL)


@pytest.mark.parametrize(("scope", "called"), [("1\n", True), ("0\n", False), ("2\n", False), ("", False)])
def test_a_program_lets_gpushare_reach_its_channels_where_yama_is_in_force(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scope: str, called: bool
) -> None:
    """The child process that calls the driver is no ancestor of the program."""
    note = tmp_path / "calls"

    def prctl(*arguments: Any) -> int:
        note.write_text(" ".join(str(getattr(one, "value", one)) for one in arguments))
        return 0

    read = process.read_text
    monkeypatch.setattr(process, "read_text", lambda path: scope if "yama" in path else read(path))
    monkeypatch.setattr("ctypes.CDLL", lambda _name: SimpleNamespace(prctl=prctl))
    child = LOCAL.spawn(["true"], {})
    while child.poll() is None:
        time.sleep(0.01)
    # PR_SET_PTRACER of linux/prctl.h.
    assert (note.read_text() if note.exists() else None) == (f"{0x59616D61} {os.getpid()} 0 0 0" if called else None)
