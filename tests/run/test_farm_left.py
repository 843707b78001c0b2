"""What copies of a farm leave behind: processes that outlive their program, logs of an earlier farm, a full disk."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpushare.base.errors import NoPermission
from gpushare.base.selection import Device
from gpushare.host.guard import Guard
from gpushare.host.host import Host
from gpushare.run import several as left_behind
from gpushare.run.farm import Copy, Farm
from gpushare.run.several import Group
from tests.cli.drive import alive, until
from tests.run.farm_command import Heard, farm, interrupted_when, shell, sized


def when_started(monkeypatch: pytest.MonkeyPatch, act: Callable[[Copy], None]) -> None:
    """Call a function with each copy of a farm as soon as it was started."""
    start = Farm._start

    def start_and_act(self: Farm, copy: Copy, *more: Any) -> None:
        start(self, copy, *more)
        act(copy)

    monkeypatch.setattr(Farm, "_start", start_and_act)


def pid_in(file: Path) -> int:
    """Return the PID that a program has written."""
    return int(file.read_text())


# -- processes ---------------------------------------------------------------------------------------


def test_what_a_copy_that_ended_well_has_left_running_is_ended_and_named(
    host: Host, device: Device, tmp_path: Path
) -> None:
    heard = Heard()
    command = shell(f"sleep 600 & echo $! > {tmp_path}/{{}}; echo bye")
    result = farm(host, [device], command, sized(device, copies=2), heard)
    pids = [pid_in(tmp_path / str(number)) for number in range(2)]
    assert not any(alive(pid) for pid in pids)
    assert [copy.left_behind for copy in result.copies] == [(pids[0],), (pids[1],)]
    assert sorted(heard.left) == [(0, (pids[0],)), (1, (pids[1],))]
    # It did what it should.
    assert [(copy.state, copy.exit_code) for copy in result.copies] == [("done", 0)] * 2


def test_a_copy_is_started_again_only_when_what_the_last_one_left_is_gone(
    host: Host, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_alive: list[list[bool]] = []
    when_started(monkeypatch, lambda copy: left_alive.append([alive(pid) for pid in copy.left_behind]))
    command = shell("sleep 600 & exit 7")
    result = farm(host, [device], command, sized(device, copies=1, restarts=1), Heard())
    assert result.copies[0].tries == 2
    assert left_alive == [[], [False]]
    assert len(result.copies[0].left_behind) == 2
    assert not any(alive(pid) for pid in result.copies[0].left_behind)
    assert result.copies[0].failure == "exit code 7"


def test_a_helper_that_ends_a_moment_later_was_not_left_behind(
    host: Host, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpushare.run.end.HELPER_SECONDS", 600.0)
    result = farm(host, [device], shell("sleep 0.2 & exit 0"), sized(device, copies=1), Heard())
    assert result.copies[0].left_behind == ()


def test_what_does_not_heed_its_signal_is_killed(host: Host, device: Device, tmp_path: Path) -> None:
    deaf = f"(trap '' INT TERM; touch {tmp_path}/deaf; while :; do sleep 0.05; done) & echo $! > {tmp_path}/pid"
    command = shell(f"{deaf}; while ! [ -e {tmp_path}/deaf ]; do sleep 0.02; done")
    result = farm(host, [device], command, sized(device, copies=1, grace_seconds=0.2), Heard())
    assert result.copies[0].left_behind[0] == pid_in(tmp_path / "pid")
    assert not alive(pid_in(tmp_path / "pid"))


def test_what_cannot_be_ended_fails_its_copy_alone_and_nothing_is_started_on_top(
    host: Host, device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def may_not(*_words: Any, **_more: Any) -> None:
        raise NoPermission("not allowed to send SIGTERM to process 7: it belongs to another user", "ask its owner")

    monkeypatch.setattr(left_behind, "end_programs", may_not)
    command = shell("if [ {} = 0 ]; then sleep 600 & fi; echo good")
    result = farm(host, [device], command, sized(device, copies=2, restarts=3), Heard())
    assert [(copy.state, copy.tries) for copy in result.copies] == [("failed", 1), ("done", 1)]
    (pid,) = result.copies[0].left_behind
    os.kill(pid, signal.SIGKILL)
    assert result.copies[0].failure == (
        f"left process {pid} behind: not allowed to send SIGTERM to process 7: it belongs to another user"
    )
    assert result.copies[0].hint == "ask its owner"


def test_the_guard_knows_what_is_being_ended(host: Host, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were gpushare killed meanwhile, what it had stopped would stay so, and keep its memory."""
    told: list[str] = []
    tell, end = Guard._tell, left_behind.end_programs

    def noted(self: Guard, word: str) -> None:
        told.append(word)
        tell(self, word)

    def ends(*words: Any, **more: Any) -> Any:
        told.append("now")
        return end(*words, **more)

    monkeypatch.setattr(Guard, "_tell", noted)
    monkeypatch.setattr(left_behind, "end_programs", ends)
    (copy,) = farm(host, [device], shell("sleep 600 & exit 0"), sized(device, copies=1), Heard()).copies
    (pid,) = copy.left_behind
    at = told.index("now")
    assert told[at - 1].startswith(f"{pid} ")
    assert int(told[at - 1].split()[1]) > 0
    assert told[at + 1] == f"{pid} ended"


def test_a_hung_copy_takes_with_it_what_it_has_orphaned(
    host: Host, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The subshell ends, so that the sleep is no descendant any more.
    command = shell(f"(sleep 600 & echo $! > {tmp_path}/pid); exec sleep 600")
    pid_file = tmp_path / "pid"

    def wait_for_the_sleep(_copy: Copy) -> None:
        until(lambda: pid_file.exists() and pid_file.read_text().endswith("\n"), "it has begun")

    when_started(monkeypatch, wait_for_the_sleep)
    result = farm(host, [device], command, sized(device, copies=1, stall_seconds=0.1), Heard())
    assert "printed nothing for 0.1 s" in (result.copies[0].failure or "")
    # It went together with the copy: one drain for both.
    assert result.copies[0].left_behind == ()
    assert not alive(pid_in(tmp_path / "pid"))


def test_a_signal_ends_what_copies_have_orphaned_too(host: Host, device: Device, tmp_path: Path) -> None:
    heard = Heard()
    command = shell(f"(sleep 600 & echo $! > {tmp_path}/{{}}); echo on; exec sleep 600")
    with interrupted_when(lambda: len(heard.lines) == 2):
        result = farm(host, [device], command, sized(device, copies=2, grace_seconds=0.2), heard)
    assert result.ended_by == signal.SIGTERM
    assert not any(alive(pid_in(tmp_path / str(number))) for number in range(2))


def test_a_signal_while_something_left_behind_has_its_time_cuts_it_short_and_ends_the_farm(
    host: Host, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = Group.end_left_behind

    def told_meanwhile(self: Group, *words: Any, **more: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        end(self, *words, **more)

    monkeypatch.setattr(Group, "end_left_behind", told_meanwhile)
    command = shell("(trap '' INT TERM; echo deaf; while :; do sleep 0.05; done) & sleep 0.2; exit {}")
    # Were it not cut short, this would never end.
    options = sized(device, copies=2, parallel=1, restarts=1, grace_seconds=1e6)
    result = farm(host, [device], command, options, Heard())
    assert result.ended_by == signal.SIGTERM
    assert [(copy.state, copy.tries) for copy in result.copies] == [("done", 1), ("skipped", 0)]
    assert not alive(result.copies[0].left_behind[0])
