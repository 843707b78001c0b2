"""A farm of real, short programs on a simulated GPU, with copies that crash, hang, print nothing."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpushare.base.errors import BadUsage
from gpushare.base.selection import Device, select
from gpushare.base.units import GIB
from gpushare.connect import connect
from gpushare.host.host import Host
from gpushare.memory.limit import MemoryBudget
from gpushare.mps.limits import Limits
from gpushare.run.farm import Copy, FarmOptions, command_of
from tests.errors import fails
from tests.run.farm_command import Heard, farm, interrupted_when, shell, sized


def test_each_copy_has_its_number_and_its_limits(host: Host, device: Device) -> None:
    heard = Heard()
    limits = Limits(threads_percent=50.0)
    text = (
        "echo {} $GPUSHARE_COPY $GPUSHARE_COPIES $CUDA_MPS_ACTIVE_THREAD_PERCENTAGE $CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
    )
    result = farm(host, [device], shell(text), sized(device, copies=4, limits=limits), heard)
    assert sorted(heard.lines) == [(copy, f"{copy} {copy} 4 50.0 0=3584M") for copy in range(4)]
    assert [copy.state for copy in result.copies] == ["done"] * 4
    assert not result.failed
    assert not host.processes.pids_of_program("nvidia-cuda-mps-control")


@pytest.mark.parametrize(("outside", "attached"), [("0", True), ("1", False)])
def test_a_copy_that_ends_before_it_is_looked_at_is_proved_by_the_log(
    host: Host, device: Device, monkeypatch: pytest.MonkeyPatch, outside: str, attached: bool
) -> None:
    monkeypatch.setenv("GPUSHARE_SIM_OUTSIDE", outside)
    monkeypatch.setattr("gpushare.run.farm._CLIENT_CHECKS", (1e6,))
    result = farm(host, [device], shell("exec sleep 0.1"), sized(device, copies=3), Heard())
    assert [copy.attached for copy in result.copies] == [attached] * 3


@pytest.mark.parametrize(
    ("does", "failure"),
    [
        ("echo bad luck; exit 3", "exit code 3: bad luck"),
        ("kill -SEGV $$", "killed by SIGSEGV"),
        ("exit 1", "exit code 1"),
    ],
)
def test_a_copy_that_fails_is_named_and_the_others_go_on(host: Host, device: Device, does: str, failure: str) -> None:
    command = shell(f"if [ {{}} = 1 ]; then {does}; fi; echo good")
    result = farm(host, [device], command, sized(device, copies=3), Heard())
    assert [copy.copy for copy in result.failed] == [1]
    assert result.copies[1].failure == failure
    assert [result.copies[number].exit_code for number in (0, 2)] == [0, 0]


def test_a_copy_that_hangs_is_ended_and_the_others_are_kept(
    host: Host, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Heard()
    # Its time is over when the others have ended: a slow machine hangs nobody.
    told = SimpleNamespace(monotonic=lambda: time.monotonic() + 1000.0 * (len(heard.endings) >= 2))
    monkeypatch.setattr("gpushare.run.farm.time", told)
    command = shell("if [ {} = 0 ]; then exec sleep 600; fi; echo good")
    result = farm(host, [device], command, sized(device, copies=3, stall_seconds=500.0), heard)
    assert [copy.copy for copy in result.failed] == [0]
    assert "printed nothing for 500 s" in (result.copies[0].failure or "")
    assert [result.copies[number].exit_code for number in (1, 2)] == [0, 0]


def test_a_failed_copy_is_started_again_as_often_as_asked(host: Host, device: Device, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    heard = Heard()
    once = shell(f"if [ {{}} = 1 ] && ! [ -e {mark} ]; then touch {mark}; exit 7; fi")
    result = farm(host, [device], once, sized(device, copies=2, restarts=1), heard)
    assert not result.failed
    assert [copy.tries for copy in result.copies] == [1, 2]
    assert any(copy == 1 and again for copy, _, again in heard.endings)
    never = farm(host, [device], shell("exit 7"), sized(device, copies=1, restarts=2), Heard())
    assert never.copies[0].tries == 3
    assert never.copies[0].failure == "exit code 7"


def test_what_copies_print_is_kept_per_copy_and_per_start(host: Host, device: Device, tmp_path: Path) -> None:
    logs = tmp_path / "logs" / "deep"
    options = sized(device, copies=2, restarts=1, logs=logs)
    result = farm(host, [device], shell("echo out {}; echo err >&2; exit {}"), options, Heard())
    assert (logs / "copy-0.log").read_text() == "out 0\nerr\n"
    assert sorted(path.name for path in logs.iterdir()) == ["copy-0.log", "copy-1.1.log", "copy-1.log", "farm.jsonl"]
    assert result.copies[1].log == str(logs / "copy-1.1.log")


def test_no_more_copies_run_than_fit_into_the_memory(host: Host, device: Device, tmp_path: Path) -> None:
    options = sized(device, size=60 * GIB, copies=4)
    two = tmp_path / "two"

    class Seen(Heard):
        def progress(self, copies: Sequence[Copy], seconds: float) -> None:
            super().progress(copies, seconds)
            if self.most >= 2:
                two.touch()

    heard = Seen()
    # Each waits until two were seen to run: however slow the machine is, two run at once.
    result = farm(host, [device], shell(f"while ! [ -e {two} ]; do sleep 0.02; done"), options, heard)
    assert heard.most == 2
    assert not result.failed


def test_a_copy_that_can_never_fit_is_refused_before_anything_starts(host: Host, device: Device) -> None:
    with fails(BadUsage, "never_fits"):
        farm(host, [device], ["true"], sized(device, size=160 * GIB, copies=2), Heard())
    assert not host.processes.pids_of_program("nvidia-cuda-mps-control")


def test_a_signal_ends_all_copies_and_keeps_what_was_done(host: Host, device: Device) -> None:
    heard = Heard()
    command = shell("if [ {} = 2 ]; then exit 0; fi; echo on; sleep 600")
    # Two have printed, and the third has ended.
    with interrupted_when(lambda: len(heard.lines) == 2 and heard.endings):
        result = farm(host, [device], command, sized(device, copies=3, grace_seconds=0.2), heard)
    assert result.ended_by == signal.SIGTERM
    assert [copy.state for copy in result.copies] == ["ended", "ended", "done"]
    assert not any(host.processes.alive(copy.pid or 0) for copy in result.copies)


def test_the_number_or_the_line_of_a_copy_stands_in_its_command() -> None:
    copy = Copy(copy=3)
    assert command_of(["a", "--seed={}", "{}"], copy) == ["a", "--seed=3", "3"]
    copy.line = "b c"
    assert command_of(["a", "--seed={}", "{}"], copy) == ["a", "--seed=b c", "b c"]


def test_a_signal_ends_the_copies_of_all_gpus_at_the_same_time() -> None:
    host = connect("sim:2xh200")
    devices = select("all", host.nvml.sweep())
    heard = Heard()
    deaf = shell("trap '' INT TERM; echo on; while :; do sleep 0.05; done")
    options = FarmOptions(copies=2, budget=MemoryBudget(bytes=4 * GIB), grace_seconds=2.0)
    began = time.monotonic()
    with interrupted_when(lambda: len(heard.lines) == 2):
        result = farm(host, devices, deaf, options, heard)
    assert [(copy.state, copy.gpu_indexes) for copy in result.copies] == [("ended", (0,)), ("ended", (1,))]
    # One grace for both.
    assert time.monotonic() - began < 2 * 2.0 + 1.5
    assert not any(host.processes.alive(copy.pid or 0) for copy in result.copies)
    assert not host.processes.pids_of_program("nvidia-cuda-mps-control")
