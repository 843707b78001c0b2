"""Production's log: read as it grows, renamed, truncated, and never anything else in its place."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.base.errors import GpushareError, TimedOut
from gpushare.run.numbers import Progress
from tests.errors import fails

RATE = r"rate=([0-9.eE+-]+)"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "web.log"
    path.write_text("rate=1\n")
    return path


def reader(path: Path, **more: object) -> Progress:
    return Progress(path, RATE, {os.geteuid()}, **more)  # type: ignore[arg-type]


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_only_what_is_printed_from_now_on_counts(log: Path) -> None:
    progress = reader(log)
    assert progress.read_speeds() == []
    append(log, "step 1 rate=10.5\nrate=11 rate=12\nra")
    assert progress.read_speeds() == [10.5, 11, 12]
    append(log, "te=13\rrate=14\n")
    assert progress.read_speeds() == [13, 14]
    assert progress.read_speeds() == []


def test_a_time_per_unit_is_a_speed(log: Path) -> None:
    progress = reader(log, higher_is_better=False)
    progress.read_speeds()
    append(log, "rate=0.5\nrate=0\nrate=1e-323\nrate=many\nrate=4\n")
    assert progress.read_speeds() == [2, 0.25]


def test_a_renamed_log_is_read_on(log: Path) -> None:
    progress = reader(log)
    progress.read_speeds()
    append(log, "rate=2\n")
    log.rename(log.with_suffix(".1"))
    assert progress.read_speeds() == [2]
    append(log.with_suffix(".1"), "rate=3\n")
    assert progress.read_speeds() == [3]


def test_a_truncated_log_is_read_from_its_start(log: Path) -> None:
    progress = reader(log)
    append(log, "rate=2\n" * 100)
    progress.read_speeds()
    log.write_text("rate=5\n")
    assert progress.read_speeds() == [5]


def test_a_flood_is_skipped(log: Path) -> None:
    progress = reader(log)
    progress.read_speeds()
    append(log, "rate=7\n" * 200_000 + "rate=8\n")
    began = time.process_time()
    numbers = progress.read_speeds()
    assert time.process_time() - began < 2
    assert numbers[-1] == 8
    assert 1000 < len(numbers) < 100_000


def test_a_line_without_an_end_is_not_kept_whole(log: Path) -> None:
    progress = reader(log)
    progress.read_speeds()
    for _ in range(5):
        append(log, "x" * 100_000)
        assert progress.read_speeds() == []
    assert len(progress._rest) <= 64 << 10


def test_it_appears_later(tmp_path: Path) -> None:
    progress = reader(tmp_path / "web.log")
    with fails(GpushareError, "log_unreadable", message="does not exist"):
        progress.read_speeds()
    (tmp_path / "web.log").write_text("rate=3\n")
    progress.read_speeds()
    append(tmp_path / "web.log", "rate=4\n")
    assert progress.read_speeds() == [4]


@pytest.mark.parametrize("kind", ["fifo", "link", "directory"])
def test_nothing_else_in_its_place_is_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "web.log"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("/proc/self/stat")
    else:
        path.mkdir()
    with fails(GpushareError, "log_unreadable") as raised:
        reader(path).read_speeds()
    assert raised.value.hint


def test_the_file_of_a_stranger_is_not_read(log: Path) -> None:
    with pytest.raises(GpushareError, match="belongs to user"):
        Progress(log, RATE, {os.geteuid() + 1}).read_speeds()


def test_a_pattern_that_takes_too_long_is_given_up(log: Path) -> None:
    progress = Progress(log, r"((?:a+)+)b", {os.geteuid()})
    progress.read_speeds()
    append(log, "a" * 60 + "\n")
    with pytest.raises(TimedOut):
        progress.read_speeds()


@given(chunks=st.lists(st.binary(max_size=200), max_size=20))
def test_any_bytes_are_taken(tmp_path_factory: pytest.TempPathFactory, chunks: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("log") / "web.log"
    path.touch()
    progress = reader(path)
    progress.read_speeds()
    for chunk in chunks:
        with path.open("ab") as file:
            file.write(chunk)
        assert all(value >= 0 for value in progress.read_speeds())
    progress.close()
