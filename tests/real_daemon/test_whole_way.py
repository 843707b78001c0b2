"""Start, limits, status and stop of the real daemon beside a simulated GPU: everything but CUDA clients."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from gpushare.base.errors import NotFound, OperationFailed, TimedOut
from gpushare.base.model import Priority
from gpushare.base.selection import Device
from gpushare.base.units import GIB, MIB
from gpushare.host.host import Host
from gpushare.mps.control import MpsControl
from gpushare.mps.daemons import FoundDaemon, daemon_pid, find_daemons
from gpushare.mps.home import home_of
from gpushare.mps.limits import Limits
from gpushare.mps.set import plan_limits
from gpushare.mps.start import plan_start
from gpushare.mps.stop import Stop
from gpushare.plan import carry_out
from tests.cli.drive import until
from tests.errors import fails
from tests.real_daemon.conftest import PATIENCE_SECONDS, daemons_below, is_stopped, start_by_hand

LIMITS = Limits(threads_percent=25.0, memory_limit_bytes=1500 * MIB, priority=Priority.LOW)


def start(host: Host, device: Device, limits: Limits = LIMITS) -> FoundDaemon:
    """Start a daemon and return it as a look at the host finds it."""
    carry_out(plan_start(host, device, limits))
    return only_daemon(host, device)


def only_daemon(host: Host, device: Device) -> FoundDaemon:
    """Return the one daemon of the host."""
    (found,) = find_daemons(host, [device.gpu])
    return found


def test_start_sets_limits_that_the_daemon_holds(host: Host, device: Device, sim_dir: Path) -> None:
    daemon = start(host, device).daemon
    assert daemon.ours
    assert daemon.error is None
    assert [daemon.pid] == daemons_below(sim_dir)
    assert (daemon.threads_percent, daemon.priority) == (25.0, Priority.LOW)
    # Exact, although the program prints 1G.
    assert daemon.memory_limit_bytes == 1500 * MIB
    control = MpsControl(host.programs, str(daemon.pipe_directory))
    assert (control.threads(), control.memory(), control.priority()) == (25.0, "1G", Priority.LOW)
    # The program itself would make them writable for everybody.
    for directory in (daemon.pipe_directory, daemon.log_directory):
        assert Path(directory or "").stat().st_mode & 0o022 == 0
    carry_out(plan_limits(host, device, Limits(threads_percent=70.0, memory_limit_bytes=3 * GIB)))
    daemon = only_daemon(host, device).daemon
    assert (daemon.threads_percent, daemon.memory_limit_bytes, daemon.priority) == (70.0, 3 * GIB, Priority.LOW)


def test_the_daemon_sees_one_gpu_and_no_limits_of_the_caller(
    host: Host, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "10")
    monkeypatch.setenv("CUDA_MPS_CLIENT_PRIORITY", "1")
    daemon = start(host, device, Limits()).daemon
    assert (daemon.threads_percent, daemon.priority) == (100.0, Priority.NORMAL)
    environment = host.processes.environment(daemon.pid or 0)
    assert environment["CUDA_VISIBLE_DEVICES"] == device.uuid
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in environment


def test_stop_proves_that_the_process_is_gone(host: Host, device: Device, sim_dir: Path) -> None:
    found = start(host, device)
    stop = Stop(host, found, device, drain_seconds=0.0, force=False)
    stop.run()
    assert not stop.forced
    assert daemons_below(sim_dir) == []
    assert daemon_pid(host, str(found.daemon.pipe_directory)) is None
    assert find_daemons(host, [device.gpu]) == []


def kill(host: Host, device: Device, sim_dir: Path) -> None:
    """Start a daemon and kill it."""
    pid = start(host, device).daemon.pid
    os.kill(pid or 0, signal.SIGKILL)
    until(lambda: pid not in daemons_below(sim_dir), "the daemon has ended")


def test_a_killed_daemon_is_shown_as_gone_and_cleared_away(host: Host, device: Device, sim_dir: Path) -> None:
    kill(host, device, sim_dir)
    dead = only_daemon(host, device)
    assert dead.daemon.pid is None
    assert "gpushare mps stop" in dead.daemon.error
    with fails(NotFound, "dead_daemon"):
        plan_limits(host, device, Limits(threads_percent=10.0))
    stop = Stop(host, dead, device, drain_seconds=0.0, force=False)
    stop.run()
    assert not stop.forced
    assert find_daemons(host, [device.gpu]) == []
    assert home_of(host.run_directory, device.uuid).files_of_dead_daemon() == []


def test_start_works_again_after_kill(host: Host, device: Device, sim_dir: Path) -> None:
    found = start(host, device)
    os.kill(found.daemon.pid or 0, signal.SIGKILL)
    until(lambda: found.daemon.pid not in daemons_below(sim_dir), "the daemon has ended")
    again = start(host, device, Limits(threads_percent=50.0))
    assert again.daemon.pid not in {None, found.daemon.pid}
    assert (again.daemon.error, again.daemon.threads_percent) == (None, 50.0)
    assert daemons_below(sim_dir) == [again.daemon.pid]


def suspend(pid: int) -> None:
    """Stop a process, and wait until it is: all of its threads take a moment."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: is_stopped(pid), "it is stopped")


@pytest.fixture
def impatient(sim_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a stopped daemon up soon: it need not be waited for in a test. One that runs may take its time."""
    patient = MpsControl.ask

    def ask(self: MpsControl, command: str, *, timeout: float = PATIENCE_SECONDS) -> str:
        stopped = any(is_stopped(pid) for pid in daemons_below(sim_dir))
        return patient(self, command, timeout=0.2 if stopped else PATIENCE_SECONDS)

    monkeypatch.setattr(MpsControl, "ask", ask)


def test_a_hanging_daemon_is_shown_with_its_error(host: Host, device: Device, impatient: None) -> None:
    found = start(host, device)
    suspend(found.daemon.pid or 0)
    hanging = only_daemon(host, device).daemon
    assert hanging.pid == found.daemon.pid
    assert "did not answer" in (hanging.error or "")
    # What is known without it is still told.
    assert (hanging.threads_percent, hanging.memory_limit_bytes) == (25.0, 1500 * MIB)


def test_stop_of_a_hanging_daemon_times_out_and_leaves_it(
    host: Host, device: Device, impatient: None, sim_dir: Path
) -> None:
    found = start(host, device)
    suspend(found.daemon.pid or 0)
    with fails(TimedOut, "daemon_hangs", hint="--force"):
        Stop(host, found, device, drain_seconds=0.0, force=False).run()
    assert daemons_below(sim_dir) == [found.daemon.pid]
    os.kill(found.daemon.pid or 0, signal.SIGCONT)
    assert only_daemon(host, device).daemon.error is None


def test_a_forced_stop_ends_a_hanging_daemon(host: Host, device: Device, impatient: None, sim_dir: Path) -> None:
    found = start(host, device)
    suspend(found.daemon.pid or 0)
    stop = Stop(host, found, device, drain_seconds=0.0, force=True)
    stop.run()
    assert stop.forced
    assert daemons_below(sim_dir) == []
    assert find_daemons(host, [device.gpu]) == []


def _foreign(sim_dir: Path, visible: str) -> str:
    pipe = sim_dir / "other" / "pipe"
    assert start_by_hand(pipe, sim_dir / "other" / "log", visible).exit_code == 0
    return str(pipe)


def test_a_foreign_daemon_is_shown_as_not_ours(host: Host, device: Device, sim_dir: Path) -> None:
    pipe = _foreign(sim_dir, device.uuid)
    found = only_daemon(host, device)
    assert not found.daemon.ours
    assert (found.daemon.pipe_directory, found.daemon.gpu_index) == (pipe, 0)
    assert found.daemon.threads_percent == 100.0
    assert (found.home, found.record) == (None, None)


@pytest.mark.parametrize(
    ("setter", "honest", "lie"),
    [
        ("threads", "set_default_active_thread_percentage 25.0", "set_default_active_thread_percentage 500"),
        ("memory", "set_default_device_pinned_mem_limit 0 1500M", "set_default_device_pinned_mem_limit 0 1.5G"),
        ("priority", "set_default_client_priority 1", "set_default_client_priority 7"),
    ],
)
def test_a_limit_that_does_not_hold_takes_the_daemon_down_again(
    host: Host, device: Device, sim_dir: Path, monkeypatch: pytest.MonkeyPatch, setter: str, honest: str, lie: str
) -> None:
    """The daemon gets another command than the one that was meant, and answers as it really does: without complaint."""
    truthful = MpsControl.ask

    def ask(self: MpsControl, command: str, *, timeout: float = PATIENCE_SECONDS) -> str:
        return truthful(self, lie if command == honest else command, timeout=timeout)

    monkeypatch.setattr(MpsControl, "ask", ask)
    with pytest.raises(OperationFailed) as caught:
        carry_out(plan_start(host, device, LIMITS))
    assert caught.value.code == "limit_not_held", setter
    assert daemons_below(sim_dir) == []
    assert find_daemons(host, [device.gpu]) == []
    assert home_of(host.run_directory, device.uuid).files_of_dead_daemon() == []


def test_a_program_that_starts_nothing_and_exits_0_is_noticed(
    host: Host, device: Device, sim_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unknown option of the real program prints its usage and exits 0; here: a program that does nothing."""
    idle = sim_dir / "nvidia-cuda-mps-control"
    idle.write_text(
        f"#!{sys.executable}\nimport sys\nif not sys.argv[1:]: sys.exit('Cannot find MPS control daemon process')\n"
    )
    idle.chmod(0o755)
    monkeypatch.setenv("GPUSHARE_MPS_CONTROL", str(idle))
    monkeypatch.setattr("gpushare.mps.start._ANSWER_SECONDS", 0.1)
    with fails(OperationFailed, "daemon_silent"):
        carry_out(plan_start(host, device, LIMITS))
    assert find_daemons(host, [device.gpu]) == []
