"""A recording: summed up as it is written, read back the same, and readable however it was cut."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.base.errors import BadUsage, GpushareError, NoPermission, NotFound, NotSupported, OperationFailed
from gpushare.base.units import GIB
from gpushare.measure import recording as tallies
from gpushare.measure.recording import (
    GpuSample,
    Header,
    PartSample,
    ProcessUse,
    RecordedGpu,
    RecordedProcess,
    Recording,
    RecordingFile,
    Sample,
    Samples,
    Tally,
    find_underuse,
    read_recording,
    sample_line,
    sample_of,
    workloads_of,
)
from gpushare.measure.statistics import Histogram
from gpushare.mps.control import SERVER_PROGRAM
from tests.errors import fails
from tests.tables import each

PERCENT = st.floats(min_value=0, max_value=100)
HEADER = Header(
    host="sim:2xh200",
    driver="580.65.06",
    started_at=1_790_000_000.0,
    interval_seconds=1.0,
    gpus=(
        RecordedGpu(index=0, uuid="GPU-0", name="NVIDIA H200", memory_total_bytes=140 * GIB),
        RecordedGpu(index=1, uuid="GPU-1", name="NVIDIA H200", memory_total_bytes=140 * GIB),
    ),
    warnings=("one",),
)


def process(number: int = 0, gpu: int = 0, **named: Any) -> RecordedProcess:
    return RecordedProcess(id=number, gpu=gpu, pid=100 + number, **{"name": "python3", "user": "ada", **named})


def written(path: Path, loads: list[float], *, end: str | None = "finished") -> Recording:
    """Write a recording of one process on GPU 0 with these loads; return it as summed up meanwhile."""
    file, tally = RecordingFile(path, HEADER), Tally(HEADER)
    file.write_record(process())
    tally.add_process(process())
    for second, load in enumerate(loads, 1):
        sample = Sample(
            at=float(second),
            gpus=(
                GpuSample(index=0, utilization_percent=100, sm_percent=load, memory_used_bytes=second * GIB),
                GpuSample(index=1, error="the GPU is lost"),
            ),
            processes=(PartSample(id=0, utilization_percent=50.0, sm_percent=load, memory_used_bytes=GIB),),
        )
        file.write_sample(sample)
        tally.add(sample)
    if end:
        file.write_end(float(len(loads)), end, 2)
    file.close()
    return tally.recording(missed=2 if end else 0, reason=end)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    kept = written(tmp_path / "r.jsonl", [10.0, 20.0, 90.0])
    found = read_recording(tmp_path / "r.jsonl")
    assert found == kept
    assert (found.samples, found.seconds, found.missed, found.reason) == (3, 3.0, 2, "finished")
    first, second = found.gpus
    assert (first.sm.mean, first.sm.p95, first.sm.max, first.source) == (40.0, 90.0, 90.0, "gpm")
    assert first.memory_peak_bytes == 3 * GIB
    assert (second.samples, second.unanswered, second.error, second.activity) == (0, 3, "the GPU is lost", None)
    (use,) = found.processes
    assert (use.seen_from_seconds, use.seen_to_seconds, use.samples, use.memory_peak_bytes) == (1.0, 3.0, 3, GIB)


@pytest.mark.parametrize("cut", [1, 5, 40, 90])
def test_a_file_that_is_cut_off_is_read_as_far_as_it_goes(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "r.jsonl"
    written(path, [10.0, 20.0, 30.0], end=None)
    path.write_bytes(path.read_bytes()[:-cut])
    found = read_recording(path)
    assert found.reason is None
    # Without its line end the last line is still whole.
    assert (found.samples, found.damaged_lines) == ((3, 0) if cut == 1 else (2, 1))


def test_every_cut_is_read_or_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    written(path, [10.0, 20.0])
    whole = path.read_bytes()
    seen: set[int | str] = set()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        try:
            seen.add(read_recording(path).samples)
        except GpushareError as error:
            seen.add(error.code)
    assert seen == {"empty_recording", "not_a_recording", 1, 2}


def test_a_block_that_was_lost_costs_its_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    written(path, [10.0, 20.0, 30.0])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], b"\x00" * 512 + b"\xff\n", b"[1]\n", b'{"t":1}\n', b"7\n", *lines[4:]]))
    found = read_recording(path)
    assert (found.samples, found.damaged_lines, found.reason) == (2, 3, "finished")


def test_a_damaged_end_counts_for_nothing(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    written(path, [10.0, 20.0])
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:-1], '{"end": {"at": 2.0, "missed": 3}}\n']))
    found = read_recording(path)
    assert (found.missed, found.reason, found.damaged_lines) == (0, None, 1)


EMPTY = '{"gpushare_recording": 1, "host": "h", "started_at": %s, "interval_seconds": %s, "gpus": [%s]}\n'


@pytest.mark.parametrize(
    ("text", "code"),
    each(
        (["", EMPTY % ("1", "1", "")], "empty_recording"),
        (["no json\n", "[]\n", '{"schema": 1}\n', '{"gpushare_recording": 0}\n', "[" * 100_000], "not_a_recording"),
        (['{"gpushare_recording": 1}\n', '{"gpushare_recording": "1", "host": "x"}\n'], "not_a_recording"),
        # Of no calendar, and more than a number of C holds.
        ([EMPTY % ("1e300", "1", "")], "not_a_recording"),
        ([EMPTY % ("1", seconds, "") for seconds in ("0", "-1", "NaN")], "not_a_recording"),
        ([EMPTY % ("1", "1", '{"index": 0, "memory_total_bytes": 1%s}' % ("0" * 400))], "not_a_recording"),
        (['{"gpushare_recording": 2, "new": true}\n'], "newer_recording"),
    ),
)
def test_what_is_no_recording_is_said(tmp_path: Path, text: str, code: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(text)
    with fails(GpushareError, code) as caught:
        read_recording(path)
    assert str(path) in caught.value.message
    assert isinstance(caught.value, NotSupported if code == "newer_recording" else OperationFailed)


def test_a_file_that_is_not_there_and_one_that_cannot_be_read(tmp_path: Path) -> None:
    with fails(NotFound, "no_recording"):
        read_recording(tmp_path / "none.jsonl")
    with fails(OperationFailed, "not_readable"):
        read_recording(tmp_path)


def test_a_later_gpushare_may_say_more_in_the_same_schema(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    written(path, [10.0])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0]["gpus"][0]["color"] = lines[1]["process"]["color"] = lines[0]["color"] = "green"
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"weather": "fine"}]))
    assert read_recording(path).samples == 1


def test_values_of_another_type_are_damage(tmp_path: Path) -> None:
    """Whoever shows them would fail later: a thread percentage that is a word."""
    path = tmp_path / "r.jsonl"
    written(path, [10.0])
    whole = path.read_text().splitlines()
    for changed in ({"threads_percent": "half"}, {"name": 5}, {"pid": None}, {"mps": "yes"}):
        lines = [json.loads(line) for line in whole]
        lines[1]["process"] |= changed
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert read_recording(path).damaged_lines == 1, changed
        assert lines[1]["process"]["id"] not in Samples(path).processes, changed


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("mine")
    with pytest.raises(BadUsage) as caught:
        RecordingFile(path, HEADER)
    assert (caught.value.code, path.read_text()) == ("file_exists", "mine")


def test_a_file_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    with fails(OperationFailed, "not_written"):
        RecordingFile(tmp_path / "none" / "r.jsonl", HEADER)


class Full:
    """A file on a disk that is full, or of another user."""

    def __init__(self, number: int) -> None:
        self.number = number

    def write(self, _data: bytes) -> int:
        raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, OperationFailed), (errno.EACCES, NoPermission)])
def test_a_full_disk_is_said_and_what_is_there_stays(tmp_path: Path, number: int, kind: type[GpushareError]) -> None:
    path = tmp_path / "r.jsonl"
    file = RecordingFile(path, HEADER)
    file.write_sample(Sample(at=1.0, gpus=()))
    file.close()
    file._file = Full(number)  # type: ignore[assignment]
    with fails(kind, "not_written") as caught:
        file.write_sample(Sample(at=2.0, gpus=()))
    assert ("can be read" in caught.value.hint) is (number == errno.ENOSPC)
    assert read_recording(path).samples == 1


def test_short_writes_are_finished(tmp_path: Path) -> None:
    class Slow:
        def __init__(self) -> None:
            self.data = b""

        def write(self, data: bytes) -> int:
            self.data += data[:7]
            return len(data[:7])

    file = RecordingFile(tmp_path / "r.jsonl", HEADER)
    file.close()
    file._file = slow = Slow()  # type: ignore[assignment]
    sample = Sample(at=1.0, gpus=(GpuSample(index=0, sm_percent=3.0),))
    file.write_sample(sample)
    assert slow.data.decode() == sample_line(sample)


@given(
    gpus=st.lists(
        st.builds(
            GpuSample,
            index=st.integers(0, 15),
            utilization_percent=st.none() | PERCENT,
            sm_percent=st.none() | PERCENT,
            memory_used_bytes=st.none() | st.integers(0, 2**48),
        )
        | st.builds(GpuSample, index=st.integers(0, 15), error=st.text()),
        max_size=4,
    ),
    processes=st.lists(
        st.builds(
            PartSample,
            id=st.integers(0, 2**31),
            utilization_percent=st.none() | PERCENT,
            sm_percent=st.none() | PERCENT,
            memory_used_bytes=st.none() | st.integers(0, 2**48),
        ),
        max_size=4,
    ),
    at=st.floats(0, 1e8),
)
def test_every_sample_survives_the_file(gpus: list[GpuSample], processes: list[PartSample], at: float) -> None:
    sample = Sample(at=at, gpus=tuple(gpus), processes=tuple(processes))
    line = sample_line(sample)
    assert line.count("\n") == 1
    assert sample_of(json.loads(line)) == sample


@given(st.lists(PERCENT, min_size=1, max_size=200))
def test_a_histogram_is_right_within_its_step(values: list[float]) -> None:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    histogram.add(None)
    found = histogram.distribution()
    exact = sorted(values)[math.ceil(0.95 * len(values)) - 1]
    assert found.samples == len(values)
    assert abs(found.p95 - exact) <= 0.06
    assert abs(found.mean - sum(values) / len(values)) <= 0.01
    assert abs(found.max - max(values)) <= 0.01
    assert found.p95 <= found.max


def test_nothing_counted_is_unknown_and_not_zero() -> None:
    assert Histogram().distribution() is None


def summed(
    loads: Sequence[float | None], *, memory: int | None = GIB, gpu_loads: list[float] | None = None, **named: Any
) -> Recording:
    """Return a recording of one process; without it (memory None) of a GPU alone."""
    tally = Tally(Header(host="h", started_at=0.0, interval_seconds=1.0, gpus=HEADER.gpus[:1]))
    if memory is not None:
        tally.add_process(process(**named))
    for second, load in enumerate(loads):
        whole = load if gpu_loads is None else gpu_loads[second]
        rows = () if memory is None else (PartSample(id=0, sm_percent=load, memory_used_bytes=memory),)
        gpu = GpuSample(index=0, utilization_percent=whole, sm_percent=whole, memory_used_bytes=memory)
        tally.add(Sample(at=float(second), gpus=(gpu,), processes=rows))
    return tally.recording()


@pytest.mark.parametrize(
    ("loads", "pattern"),
    [
        ([0.0] * 100, "interactive"),
        ([0.0] * 81 + [90.0] * 19, "interactive"),
        ([0.0] * 80 + [90.0] * 20, "bursty"),
        ([0.0] * 21 + [90.0] * 79, "bursty"),
        ([0.0] * 20 + [90.0] * 80, "steady"),
        ([5.0] * 90 + [95.0] * 10, "bursty"),
        ([0.4] * 100, "steady"),
        ([None] * 100, None),
    ],
)
def test_the_pattern_is_when_it_works(loads: list[float | None], pattern: str | None) -> None:
    recording = summed(loads)
    assert recording.processes[0].pattern == pattern
    (workload,) = workloads_of(recording)
    assert (workload.pattern, workload.memory_peak_bytes, workload.process.name, workload.process.user) == (
        pattern,
        GIB,
        "python3",
        "ada",
    )
    if pattern is None:
        assert (workload.activity and workload.activity.mean, workload.source) == (None, None)


@pytest.mark.parametrize("named", [{"name": SERVER_PROGRAM}, {"graphics": True}])
def test_servers_and_desktops_are_no_workloads(named: dict[str, Any]) -> None:
    assert workloads_of(summed([50.0], **named)) == ()


@pytest.mark.parametrize(
    ("recording", "kind"),
    [
        (summed([0.0] * 20, memory=None), "empty"),
        (summed([0.0] * 20, memory=1024), "empty"),
        (summed([0.0] * 20), "held_idle"),
        (summed([20.0] * 20), "low"),
        (summed([0.0] * 18 + [90.0] * 2), "low"),
        (summed([29.9] * 20), "low"),
        (summed([30.0] * 20), None),
        (summed([0.0] * 20, gpu_loads=[80.0] * 20), "idle_process"),
        (summed([None] * 20), None),
    ],
)
def test_what_is_underused_is_named_with_why(recording: Recording, kind: str | None) -> None:
    found = find_underuse(recording)
    assert [one.kind for one in found] == ([kind] if kind else [])
    for one in found:
        assert one.gpu == 0
        assert one.pids == (() if recording.processes == () else (100,))


def test_memory_held_with_no_work_says_how_much() -> None:
    assert "1.0 GiB" in find_underuse(summed([0.0] * 20))[0].why


def test_memory_of_the_tally_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tallies, "MOST_PROCESSES", 20)
    tally = Tally(HEADER)
    tally.add_process(process(0))
    for number in range(1, 200):
        tally.add_process(process(number))
        rows = (PartSample(id=0, sm_percent=10.0), PartSample(id=number, sm_percent=1.0))
        tally.add(Sample(at=float(number), gpus=(), processes=rows))
        assert len(tally._processes) <= 22
    recording = tally.recording()
    assert recording.dropped_processes == 200 - len(recording.processes)
    # Who is still there is never dropped.
    assert recording.processes[0].samples == 199


def beside(own: Sequence[float], others: Sequence[float]) -> ProcessUse:
    """Return how a process was used that shared its GPU by time with another one."""
    tally = Tally(HEADER)
    for number in range(2):
        tally.add_process(process(number))
    for second, loads in enumerate(zip(own, others, strict=True)):
        rows = tuple(PartSample(id=number, utilization_percent=load) for number, load in enumerate(loads))
        tally.add(Sample(at=float(second), gpus=(), processes=rows))
    return tally.recording().processes[0]


def test_turns_that_the_driver_books_are_no_bursts() -> None:
    """As two busy processes look on an H200 with driver 580: each period is booked on one of them."""
    use = beside([20, 0, 99, 20, 50, 99], [80, 99, 0, 80, 50, 0])
    assert (use.busy_share, use.contended_share, use.pattern) == (1.0, 0.6667, "steady")


def test_beside_a_neighbour_that_takes_all_little_work_is_unknown() -> None:
    use = beside([0, 0, 0, 0, 0, 99], [99, 99, 99, 99, 99, 0])
    assert (use.busy_share, use.pattern) == (None, None)


@pytest.mark.parametrize(("looks", "share"), [(29, None), (30, 0.0)])
def test_no_work_for_long_beside_a_neighbour_that_takes_all_is_none(looks: int, share: float | None) -> None:
    assert beside([0] * looks, [99] * looks).busy_share == share


def test_beside_a_neighbour_that_leaves_room_no_work_is_none() -> None:
    use = beside([0] * 9 + [50], [79] * 10)
    assert (use.busy_share, use.pattern) == (0.1, "interactive")
