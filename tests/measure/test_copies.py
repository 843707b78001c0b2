"""Copies of a command: those that do well, and each way to go wrong, named, with the rest kept."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from gpushare.base.benchmark import CopiesResult, Metric
from gpushare.base.errors import NotFound
from gpushare.base.selection import Device
from gpushare.host.host import Host
from gpushare.measure.bench import Copies, Launch
from gpushare.measure.metric import parse_metric
from gpushare.measure.usage import UsageMeter
from tests.cli.drive import alive
from tests.measure.conftest import ENDLESS, Told, experiment_with, meter_of, words

Together = Callable[..., CopiesResult]
RATE = parse_metric(r"rate=(\S+)")
FIRST = """
import os, time
while not os.path.exists({there!r}):
    print("rate=1", flush=True)
    open({alone!r}, "w").close()
    time.sleep(0.02)
while True:
    print("rate=2", flush=True)
    time.sleep(0.02)
"""
SECOND = """
import os, time
while not os.path.exists({alone!r}):
    time.sleep(0.02)
open({there!r}, "w").close()
while not os.path.exists({read!r}):
    time.sleep(0.02)
"""


def test_copies_that_finish(together: Together) -> None:
    found = together("exit 0", "sleep 0.2")
    assert found.failures == []
    assert [copy.exit_code for copy in found.copies] == [0, 0]
    assert [copy.copy for copy in found.copies] == [0, 1]
    assert all(copy.seconds > 0 for copy in found.copies)
    assert found.seconds > 0


def test_the_last_number_counts_without_a_window(together: Together) -> None:
    found = together("echo rate=1; echo rate=5", "echo rate=7 >&2", metric=RATE)
    assert [copy.value for copy in found.copies] == [5.0, 7.0]
    assert found.failures == []


def test_one_that_exits_with_a_code_is_named_and_the_rest_kept(together: Together) -> None:
    found = together("echo rate=3", "echo out of memory >&2; exit 3", metric=RATE)
    assert found.copies[0].value == 3.0
    assert found.copies[0].failure is None
    (text,) = found.failures
    assert text.startswith("copy 1 (process ")
    assert text.endswith("exit code 3: out of memory")


def test_one_that_crashes_is_named_by_its_signal(together: Together) -> None:
    found = together("kill -SEGV $$", "exit 0")
    assert found.copies[0].failure == "killed by SIGSEGV"
    assert found.copies[0].exit_code == -signal.SIGSEGV
    assert found.copies[1].failure is None


def test_one_that_prints_nothing(together: Together) -> None:
    found = together("echo hello", "echo rate=2", metric=RATE)
    assert found.copies[0].failure == "printed no rate or time that --metric matches"
    assert found.copies[1].value == 2.0


def test_one_that_hangs_is_ended_and_the_rest_kept(together: Together) -> None:
    found = together("exec sleep 600", "echo rate=2", metric=RATE, limit=500.0, over=lambda told: told.ends)
    assert found.hung
    assert found.copies[0].failure == "did not end within 500 s"
    assert found.copies[1].failure is None
    assert not alive(found.copies[0].pid)


def test_one_that_hangs_and_ignores_its_signal_is_killed(together: Together, tmp_path: Path) -> None:
    deaf = tmp_path / "deaf"
    script = f"trap '' INT TERM; touch {deaf}; while :; do sleep 0.05; done"
    found = together(script, limit=500.0, grace=0.2, over=lambda _: deaf.exists())
    assert found.hung
    assert not alive(found.copies[0].pid)


def test_what_it_started_ends_with_it(together: Together, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    written = f"echo $! > {file}.new; mv {file}.new {file}"
    together(f"sleep 600 & {written}; wait", limit=500.0, grace=0.2, over=lambda _: file.exists())
    assert not alive(int(file.read_text()))


def test_a_window_measures_programs_that_never_end(together: Together) -> None:
    def over(told: Told) -> bool:
        return told.printed(0) > 0 and told.printed(1) > 0

    found = together(ENDLESS, ENDLESS, metric=RATE, window=500.0, over=over)
    assert found.failures == []
    assert [copy.value for copy in found.copies] == [10.0, 10.0]
    assert not any(alive(copy.pid) for copy in found.copies)
    assert not found.hung


def test_what_went_to_a_session_of_its_own_and_was_on_the_gpu_is_ended(
    together: Together, host: Host, tmp_path: Path
) -> None:
    file = tmp_path / "pid"

    class Seen(UsageMeter):
        """Has seen it on the GPU while its program ran."""

        def sample(self, programs: Collection[int]) -> None:
            if file.exists() and file.read_text().endswith("\n"):
                self._mine |= {*programs, int(file.read_text())}

    script = f"setsid sleep 600 & echo $! > {file}; sleep 0.3"
    meter = Seen(host, Device(gpu=host.nvml.gpu(0)))
    found = together(script, usage=meter)
    left = int(file.read_text())
    assert not alive(left)
    assert found.copies[0].failure is not None
    assert f"left process {left} behind" in found.copies[0].failure


def test_the_window_opens_when_all_have_printed(together: Together, tmp_path: Path) -> None:
    """The first prints 1 while it is alone, and 2 from when the second is there, which prints when that was read."""
    files = {name: str(tmp_path / name) for name in ("alone", "there", "read")}

    def over(told: Told) -> bool:
        if told.copies[0].printed.last == 2:
            (tmp_path / "read").touch()
        return told.printed(0) > 2 and told.printed(1) > 2

    scripts = FIRST.format(**files), SECOND.format(**files) + ENDLESS
    found = together(*scripts, metric=RATE, window=500.0, limit=1e9, python=True, over=over)
    assert [copy.value for copy in found.copies] == [2.0, 10.0]


def test_one_that_ends_before_the_window_closes(together: Together) -> None:
    found = together("echo rate=1", ENDLESS, metric=RATE, window=500.0, limit=1e9, over=lambda told: told.ends)
    assert found.copies[0].failure == "ended before it was measured for 500 s"


def test_a_window_and_one_that_prints_nothing_in_time(together: Together) -> None:
    found = together("exec sleep 600", metric=RATE, window=0.2, limit=0.4)
    assert found.hung
    assert found.copies[0].failure == "printed no rate or time that --metric matches in 0.4 s"


def test_a_window_and_one_that_stops_printing(together: Together) -> None:
    script = "echo rate=1; exec sleep 600"
    found = together(script, ENDLESS, metric=RATE, window=500.0, over=lambda told: told.printed(1) > 2)
    assert found.copies[0].failure == "printed no rate or time that --metric matches in the measured 500 s"
    assert found.copies[1].value == 10.0


def test_latencies_of_the_window_only(together: Together) -> None:
    script = "import time\nn = 0\nwhile True:\n    n += 1\n    print('rate=1 latency_ms=%d' % (99 if n == 1 else 5), flush=True)\n    time.sleep(0.02)"
    found = together(script, metric=RATE, window=500.0, python=True, over=lambda told: told.printed(0) > 2)
    assert (found.copies[0].latency_p50, found.copies[0].latency_p99) == (5.0, 5.0)


def test_in_turn_one_runs_at_a_time(together: Together, tmp_path: Path) -> None:
    script = f"mkdir {tmp_path}/lock || exit 9; sleep 0.1; rmdir {tmp_path}/lock"
    found = together(script, script, script, in_turn=True)
    assert found.failures == []
    assert [copy.copy for copy in found.copies] == [0, 1, 2]
    assert found.seconds >= 0.3


def test_in_turn_none_starts_after_one_that_hung(together: Together) -> None:
    found = together("exec sleep 600", "exit 0", in_turn=True, limit=0.3)
    assert [copy.copy for copy in found.copies] == [0]
    assert found.hung


def test_a_program_that_is_not_there_ends_those_that_run(host: Host, tmp_path: Path) -> None:
    # A copy announces itself in its own process.
    announced = tmp_path / "announced"

    class Noting(Told):
        def announce(self, pid: int, _started: int | None) -> None:
            with announced.open("a") as file:
                file.write(f"{pid}\n")

    launches = [
        Launch(argv=["sleep", "600"], environment=dict(os.environ)),
        Launch(argv=["gs-no-such-program"], environment=dict(os.environ)),
    ]
    with pytest.raises(NotFound):
        Copies(experiment_with(host, Noting(bool), grace_seconds=1.0), Metric(), Told(bool)).run_together(
            launches, meter_of(host)
        )  # type: ignore[arg-type]
    started = [int(pid) for pid in announced.read_text().split()]
    assert len(started) == 2
    assert not any(map(alive, started))


def test_much_output_is_neither_kept_nor_waited_for(together: Together, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpushare.run.several._MOST_OUTPUT_BYTES", 100_000)
    script = "import sys\nfor _ in range(30):\n    sys.stdout.write('x' * 70_000 + '\\n')\nprint('rate=4')"
    found = together(script, metric=RATE, python=True)
    assert found.copies[0].value == 4.0


def test_interrupted_copies_are_ended_and_said_so(host: Host) -> None:
    class Impatient(Told):
        def end_requested(self, seconds: float) -> bool:
            super().end_requested(seconds)
            return True

    launches = [Launch(argv=words("exec sleep 600"), environment=dict(os.environ))] * 2
    copies = Copies(experiment_with(host, None, grace_seconds=1.0), Metric(), Impatient(bool))  # type: ignore[arg-type]
    found = copies.run_together(launches, meter_of(host))
    assert found.interrupted
    assert [copy.failure for copy in found.copies] == ["interrupted", "interrupted"]
    assert not any(alive(copy.pid) for copy in found.copies)


def test_the_guard_hears_of_every_start_and_end(host: Host, tmp_path: Path) -> None:
    announced = tmp_path / "announced"
    ended: list[int] = []

    class Listening(Told):
        def announce(self, pid: int, started: int | None) -> None:
            assert started is not None
            with announced.open("a") as file:
                file.write(f"{pid}\n")

        def remove_process(self, pid: int) -> None:
            ended.append(pid)

    launches = [
        Launch(argv=words("exit 0"), environment=dict(os.environ)),
        Launch(argv=words("exec sleep 600"), environment=dict(os.environ)),
    ]
    copies = Copies(experiment_with(host, Listening(bool), grace_seconds=1.0), Metric(), Told(bool), limit=0.3)  # type: ignore[arg-type]
    found = copies.run_together(launches, meter_of(host))
    pids = [copy.pid for copy in found.copies]
    assert sorted(ended) == sorted(int(pid) for pid in announced.read_text().split()) == sorted(pids)
