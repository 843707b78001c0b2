"""A farm of real, short programs on a simulated GPU, with copies that crash, hang, print nothing."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpushare.errors import BadUsage, InUse, NoPermission, NotFound
from gpushare.host.host import Host
from gpushare.memory.ledger import Lapses, Place, Request
from gpushare.mps.limits import Limits
from gpushare.run.farm import (
    Copy,
    FarmOptions,
    FarmReporter,
    farm,
    free_memory,
    numbered,
    share_of_memory,
    share_of_threads,
)
from gpushare.selection import Device
from gpushare.sim import admin
from gpushare.units import GIB
from tests.cli.drive import until
from tests.run.farm_command import shell


class Heard(FarmReporter):
    """Remembers what a farm says."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, str]] = []
        self.most = 0
        self.endings: list[tuple[int, bool]] = []

    def line(self, copy: int, text: str) -> None:
        self.lines.append((copy, text))

    def ended(self, copy: Copy, *, again: bool) -> None:
        self.endings.append((copy.number, again))

    def progress(self, copies: Sequence[Copy], seconds: float) -> None:
        self.most = max(self.most, sum(copy.state == "running" for copy in copies))


def test_each_copy_has_its_number_and_its_limits(host: Host, device: Device) -> None:
    heard = Heard()
    limits = Limits(threads_percent=50.0, memory_limit_bytes=4 * GIB)
    text = (
        "echo {} $GPUSHARE_COPY $GPUSHARE_COPIES $CUDA_MPS_ACTIVE_THREAD_PERCENTAGE $CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
    )
    result = farm(host, device, shell(text), FarmOptions(copies=4, limits=limits), heard)
    assert sorted(heard.lines) == [(copy, f"{copy} {copy} 4 50.0 0=4096M") for copy in range(4)]
    assert [copy.state for copy in result.copies] == ["done"] * 4
    assert not result.failed
    assert not host.processes.named("nvidia-cuda-mps-control")


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
    result = farm(host, device, command, FarmOptions(copies=3), Heard())
    assert [copy.number for copy in result.failed] == [1]
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
    result = farm(host, device, command, FarmOptions(copies=3, stall_seconds=500.0), heard)
    assert [copy.number for copy in result.failed] == [0]
    assert "printed nothing for 500 s" in (result.copies[0].failure or "")
    assert [result.copies[number].exit_code for number in (1, 2)] == [0, 0]


def test_a_copy_that_prints_nothing_and_ends_well_has_not_failed(host: Host, device: Device) -> None:
    result = farm(host, device, ["true"], FarmOptions(copies=2), Heard())
    assert not result.failed


def test_a_failed_copy_is_started_again_as_often_as_asked(host: Host, device: Device, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    heard = Heard()
    once = shell(f"if [ {{}} = 1 ] && ! [ -e {mark} ]; then touch {mark}; exit 7; fi")
    result = farm(host, device, once, FarmOptions(copies=2, restarts=1), heard)
    assert not result.failed
    assert [copy.tries for copy in result.copies] == [1, 2]
    assert (1, True) in heard.endings
    never = farm(host, device, shell("exit 7"), FarmOptions(copies=1, restarts=2), Heard())
    assert never.copies[0].tries == 3
    assert never.copies[0].failure == "exit code 7"


def test_what_copies_print_is_kept_per_copy_and_per_start(host: Host, device: Device, tmp_path: Path) -> None:
    logs = tmp_path / "logs" / "deep"
    options = FarmOptions(copies=2, restarts=1, logs=logs)
    result = farm(host, device, shell("echo out {}; echo err >&2; exit {}"), options, Heard())
    assert (logs / "copy-0.log").read_text() == "out 0\nerr\n"
    assert sorted(path.name for path in logs.iterdir()) == ["copy-0.log", "copy-1.1.log", "copy-1.log"]
    assert result.copies[1].log == str(logs / "copy-1.1.log")


def test_no_more_copies_run_than_fit_into_the_memory(host: Host, device: Device, tmp_path: Path) -> None:
    options = FarmOptions(copies=4, limits=Limits(memory_limit_bytes=60 * GIB))
    two = tmp_path / "two"

    class Seen(Heard):
        def progress(self, copies: Sequence[Copy], seconds: float) -> None:
            super().progress(copies, seconds)
            if self.most >= 2:
                two.touch()

    heard = Seen()
    # Each waits until two were seen to run: however slow the machine is, two run at once.
    result = farm(host, device, shell(f"while ! [ -e {two} ]; do sleep 0.02; done"), options, heard)
    assert heard.most == 2
    assert not result.failed


def test_a_copy_that_can_never_fit_is_refused_before_anything_starts(host: Host, device: Device) -> None:
    admin.add_process("sim:h200", gpu="0", memory_bytes=100 * GIB)
    options = FarmOptions(copies=2, limits=Limits(memory_limit_bytes=60 * GIB))
    with pytest.raises(InUse) as caught:
        farm(host, device, ["true"], options, Heard())
    assert caught.value.code == "memory_does_not_fit"
    assert not host.processes.named("nvidia-cuda-mps-control")


def test_what_others_reserve_and_never_use_counts_for_a_minute(
    host: Host, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its file says: it may be touched for as long as its owner likes."""
    place = Place(host, Request(memory_bytes=100 * GIB, keys=(device.uuid,), client=False))
    place.take(device.uuid)
    lapses, at = Lapses(), [1000.0]
    monkeypatch.setattr("gpushare.memory.ledger.time.monotonic", lambda: at[0])
    for seconds, reserved, pending in ((0, 100 * GIB, True), (60, 100 * GIB, True), (1, 0, False), (1, 0, False)):
        at[0] += seconds
        place.touch()
        free = free_memory(host, device, lapses=lapses)
        assert free is not None
        assert (free.reserved_bytes, free.pending) == (reserved, pending)
    place.leave()


def test_bad_farms_are_refused(host: Host, device: Device, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        farm(host, device, ["no-such-program"], FarmOptions(copies=2), Heard())
    with pytest.raises(BadUsage):
        farm(host, device, ["true"], FarmOptions(copies=0), Heard())
    (tmp_path / "file").write_text("")
    with pytest.raises(NoPermission):
        farm(host, device, ["true"], FarmOptions(copies=1, logs=tmp_path / "file"), Heard())


def test_a_signal_ends_all_copies_and_keeps_what_was_done(host: Host, device: Device) -> None:
    heard = Heard()

    def interrupt() -> None:
        # Two have printed, and the third has ended.
        until(lambda: len(heard.lines) == 2 and heard.endings, "the copies have begun")
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    command = shell("if [ {} = 2 ]; then exit 0; fi; echo on; sleep 600")
    result = farm(host, device, command, FarmOptions(copies=3, grace_seconds=0.2), heard)
    thread.join()
    assert result.ended_by == signal.SIGTERM
    assert [copy.state for copy in result.copies] == ["ended", "ended", "done"]
    assert not any(host.processes.alive(copy.pid or 0) for copy in result.copies)


def test_shares_are_what_was_measured_to_be_best(host: Host, device: Device) -> None:
    assert [share_of_threads(copies) for copies in (1, 2, 4, 16, 3)] == [None, None, 50.0, 12.5, 66.7]
    share = share_of_memory(host, device, 4)
    assert share is not None
    assert 30 * GIB < share < 36 * GIB
    assert numbered(["a", "--seed={}", "{}"], 3) == ["a", "--seed=3", "3"]
    with pytest.raises(InUse):
        share_of_memory(host, device, 1000)
