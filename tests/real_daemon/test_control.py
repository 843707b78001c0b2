"""The conversation with the real daemon, through `MpsControl` and `Programs`."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from gpushare.base.errors import NotFound, OperationFailed, TimedOut
from gpushare.base.model import Priority
from gpushare.base.units import MIB, mps_memory_readback
from gpushare.host.program import Programs
from gpushare.mps.control import MAX_PIPE_DIRECTORY_BYTES, PROGRAM, MpsControl, Overview, probe_version
from gpushare.mps.limits import Limits
from tests.cli.drive import until
from tests.errors import fails
from tests.real_daemon.conftest import daemons_below, start_by_hand


def test_without_a_daemon_it_is_not_found(sim_dir: Path) -> None:
    """The program's own text for it is known."""
    control = MpsControl(Programs(), str(sim_dir / "nobody"))
    with fails(NotFound, "no_daemon"):
        control.ask("get_server_list")
    assert control.answers() is False


@pytest.mark.parametrize(("sent", "stored"), [("1.5G", "1M"), ("1024K", "1G"), ("0G", "")])
def test_why_sizes_are_sent_as_whole_mebibytes_only(control: MpsControl, sent: str, stored: str) -> None:
    """The program misreads other forms, without a word: if this ever changes, units.py may be simpler."""
    assert control.ask(f"set_default_device_pinned_mem_limit 0 {sent}").strip() == ""
    assert control.ask("get_default_device_pinned_mem_limit 0").strip() == stored


def test_all_defaults_stand_in_one_overview(control: MpsControl) -> None:
    """That single answers are as on a simulated host is shown in test_same_as_simulated.py."""
    fresh = Limits(threads_percent=100.0, priority=Priority.NORMAL)
    assert (control.overview(), control.clients()) == (Overview(fresh, (), ()), [])
    control.set_threads(25.0)
    control.set_memory(1500 * MIB)
    control.set_priority(Priority.LOW)
    limits = Limits(threads_percent=25.0, memory_limit_bytes=1024 * MIB, priority=Priority.LOW)
    assert control.overview().limits == limits
    with fails(OperationFailed, "limit_not_held"):
        control.set_threads(400.0)
    assert (control.threads(), control.memory()) == (25.0, mps_memory_readback(1500 * MIB))
    control.set_memory(None)
    assert control.overview().limits.memory_limit_bytes is None


def test_a_stopped_daemon_is_a_time_out_with_its_own_code(sim_dir: Path, control: MpsControl) -> None:
    (pid,) = daemons_below(sim_dir)
    os.kill(pid, signal.SIGSTOP)
    with fails(TimedOut, "daemon_hangs"):
        control.ask("get_server_list", timeout=0.2)
    os.kill(pid, signal.SIGCONT)
    until(control.answers, "the daemon answers")


@pytest.mark.parametrize("force", [False, True])
def test_quit_ends_the_process(sim_dir: Path, control: MpsControl, force: bool) -> None:
    (pid,) = daemons_below(sim_dir)
    control.quit(force=force)
    until(lambda: pid not in daemons_below(sim_dir), "the daemon has ended")
    assert control.answers() is False


def test_the_probe_of_the_version_starts_nothing_and_talks_to_nobody(
    sim_dir: Path, control: MpsControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before driver 580 ``-v`` is no option: the program would wait for commands to whatever daemon it finds."""
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", control.pipe_directory)
    log = sim_dir / "hand" / "log" / "control.log"
    before = _conversations(control, log, "get_server_list")
    version = probe_version(Programs())
    assert version is None or version >= 13000
    assert _conversations(control, log, "get_default_device_pinned_mem_limit 0") == before + 1
    assert len(daemons_below(sim_dir)) == 1


def _conversations(control: MpsControl, log: Path, command: str) -> int:
    """Return how many conversations the daemon has logged, this one included: it writes its log after it has answered."""
    control.ask(command)
    until(
        lambda: "UI closed" in log.read_text().rpartition(f"Cmd:{command}")[2] and f"Cmd:{command}" in log.read_text(),
        "it has logged the conversation",
    )
    return log.read_text().count("NEW UI")


def _directory_of(length: int, root: Path) -> Path:
    path = root / ("p" * (length - len(str(root)) - 1))
    assert len(os.fsencode(path)) == length
    return path


def test_the_longest_pipe_directory_works(sim_dir: Path) -> None:
    pipe = _directory_of(MAX_PIPE_DIRECTORY_BYTES, sim_dir)
    assert start_by_hand(pipe, sim_dir / "log").exit_code == 0
    control = MpsControl(Programs(), str(pipe))
    until(control.answers, "the daemon answers")


def test_one_byte_more_and_the_program_dies_without_a_word(sim_dir: Path) -> None:
    """Why gpushare checks the length itself before it starts anything."""
    done = start_by_hand(_directory_of(MAX_PIPE_DIRECTORY_BYTES + 1, sim_dir), sim_dir / "log")
    assert done.exit_code != 0
    assert done.text == ""
    assert daemons_below(sim_dir) == []


def test_the_program_is_found_where_the_variable_says(real_program: str) -> None:
    assert Programs().find(PROGRAM) == real_program
