"""What programs print in odd ways, and what a benchmark makes of it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from gpushare.base.benchmark import BenchCell, CopiesResult, Metric
from gpushare.base.errors import OperationFailed, TimedOut
from gpushare.base.selection import Device
from gpushare.host.host import Host
from gpushare.measure.bench import Settings, measure, prepare
from gpushare.measure.metric import Printed, bounded
from gpushare.measure.statistics import summarize
from gpushare.measure.ways import parse_ways
from gpushare.show.bench import _throughput_text
from tests.cli.drive import alive
from tests.errors import fails

RATE = Metric(pattern="rate=(.+)")
BAR = "import sys, time\nfor n in range(10**9):\n    sys.stdout.write(f'\\r{n}% 12.5it/s')\n    sys.stdout.flush()\n    time.sleep(0.01)"

Together = Callable[..., CopiesResult]


def test_a_progress_bar_can_be_measured_for_a_while(together: Together) -> None:
    found = together(
        BAR, metric=Metric(pattern=r"([0-9.]+)it/s"), python=True, window=500.0, over=lambda told: told.printed(0) > 2
    )
    assert found.copies[0].failure is None
    assert found.copies[0].value == 12.5


@pytest.mark.parametrize("text", ["-5", "nan", "1.2.3", "many"])
def test_what_is_no_rate_is_no_number(together: Together, text: str) -> None:
    (copy,) = together(f"echo rate={text}", metric=RATE).copies
    assert copy.failure == "printed no rate or time that --metric matches"
    assert copy.last_line == f"rate={text}"


def test_the_time_of_a_run_begins_with_its_first_copy(together: Together) -> None:
    found = together("exit 0", "exit 0", "exit 0")
    assert found.seconds >= max(copy.seconds for copy in found.copies)


def test_what_a_copy_leaves_behind_is_ended_and_told_of(
    together: Together, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpushare.run.end.HELPER_SECONDS", 0.05)
    file = tmp_path / "pid"
    found = together(f"sleep 600 & echo $! > {file}; echo rate=2", "echo rate=2", metric=RATE)
    pid = int(file.read_text())
    assert f"left process {pid} behind" in (found.copies[0].failure or "")
    assert found.copies[1].failure is None
    assert not alive(pid)


def test_a_helper_that_ends_a_moment_later_is_none(together: Together, tmp_path: Path) -> None:
    """It ends when it sees that the copy has."""
    file = tmp_path / "fifo"
    script = f"mkfifo {file}; cat {file} >/dev/null & exec 9>{file}; echo rate=2"
    assert together(script, metric=RATE).copies[0].failure is None


def test_a_mean_of_nothing_has_no_percentage() -> None:
    assert _throughput_text(BenchCell(way="mps", copies=2, throughput=summarize([0.0, 0.0])), None) == "0"


def request(script: str, ways: str, metric: Metric = RATE) -> Settings:
    cells = [(way, 2) for way in parse_ways(ways)]
    return Settings(argv=["sh", "-c", script], metric=metric, cells=cells, repeat=1)


@pytest.mark.parametrize(
    ("script", "message", "hint"),
    [
        ("echo rate=0", "a rate of 0", "--for"),
        ("echo tempo=5", "printed no rate or time that --metric matches", "its last line: tempo=5"),
        ("echo rate=fast", "printed no rate or time that --metric matches", "its last line: rate=fast"),
        ("echo boom; exit 3", "exit code 3: boom", "by hand"),
    ],
)
def test_a_command_that_cannot_be_measured_is_told_how_it_could(
    host: Host, script: str, message: str, hint: str, device: Device
) -> None:
    with pytest.raises(OperationFailed) as caught:
        measure(host, device, prepare(host, device, request(script, "queue,timeslice")))
    assert (caught.value.code, message in caught.value.message, hint in caught.value.hint) == (
        "command_failed",
        True,
        True,
    ), caught.value


# -- an expression that never ends -------------------------------------------------------------------


def test_an_expression_that_never_ends_is_given_up() -> None:
    before = signal.getsignal(signal.SIGVTALRM)
    endless = Printed(Metric(pattern="(a+)+b"))
    with fails(TimedOut, "slow_metric", message="(a+)+b"), bounded("(a+)+b", 0.05):
        endless._match_line("a" * 60, 1.0)
    assert signal.getsignal(signal.SIGVTALRM) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_outside_the_main_thread_nothing_is_bounded() -> None:
    seen: list[str] = []

    def work() -> None:
        with bounded("x", 0.001):
            seen.append("done")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == ["done"]
