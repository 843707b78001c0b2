"""The plan of a benchmark, its throughput and its verdict, from runs whose figures are known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.base.benchmark import BenchAnswer, CopiesResult, CopyResult, Metric, Ratio, RunResult, Usage
from gpushare.base.errors import BadUsage, GpushareError, NotFound
from gpushare.base.model import Gpu, Way
from gpushare.base.selection import Device
from gpushare.cli.bench import bench_notes
from gpushare.measure.bench import Measurement, Settings, measuring_cell, schedule, throughput
from gpushare.measure.bench_data import (
    bench_answer,
    best_pick,
    check_comparable,
    check_new_file,
    compare_cells,
    measured_cells,
    picks,
    read_bench,
    write_bench,
)
from gpushare.measure.ways import ALONE, BenchWay, parse_ways
from gpushare.show.result import jsonable
from tests.errors import fails

OUTSIDE = BenchWay(name=ALONE, kind=Way.WHOLE)
RATE = Metric(pattern="rate=(.+)")
LOWER = Metric(pattern="ms=(.+)", higher_is_better=False)


def settings(ways: str, copies: tuple[int, ...], metric: Metric = RATE, window: float | None = 1.0) -> Settings:
    cells = [(way, number) for way in parse_ways(ways) for number in copies]
    return Settings(argv=["job"], metric=metric, cells=cells, alone=OUTSIDE, window=window)


def copy(number: int, value: float | None, seconds: float = 1.0, failure: str | None = None) -> CopyResult:
    return CopyResult(
        copy=number,
        pid=100 + number,
        seconds=seconds,
        exit_code=0,
        value=value,
        latencies=(),
        latency_p50=None,
        latency_p99=None,
        failure=failure,
    )


def run(
    way: str, values: list[float], number: int = 1, *, metric: Metric = RATE, others: tuple[int, ...] = ()
) -> RunResult:
    """Return a run in which the copies printed these numbers."""
    result = CopiesResult(copies=tuple(copy(place, value) for place, value in enumerate(values)), seconds=1.0)
    parsed = OUTSIDE if way == ALONE else parse_ways(way)[0]
    usage = Usage(seconds=1.0, energy_joules=100.0, memory_peak_bytes=2**30, others=others)
    return RunResult(
        round=number,
        way=way,
        copies=len(values),
        result=result,
        throughput=throughput(parsed, result, metric),
        usage=usage,
    )


def measured(
    ways: str, copies: tuple[int, ...], figures: dict[tuple[str, int], list[float]], metric: Metric = RATE
) -> Measurement:
    """Return a measurement in which each copy of a cell printed these numbers, round by round."""
    runs = [
        run(way, [value] * number, place, metric=metric)
        for (way, number), values in figures.items()
        for place, value in enumerate(values, 1)
    ]
    return Measurement(settings=settings(ways, copies, metric), runs=runs, rounds_done=3)


def answer(measurement: Measurement) -> BenchAnswer:
    device = Device(gpu=Gpu(index=0, uuid="GPU-1", name="NVIDIA H200"))
    return bench_answer(measurement, device, host="sim:h200", driver="580", started_at=0.0)


def test_each_round_runs_alone_first_and_nothing_twice() -> None:
    plan = schedule(settings("queue,timeslice,mps,mps:100/n,mps:200/n", (1, 2)))
    assert [(way.name, copies) for way, copies in plan] == [
        ("alone", 1),
        ("timeslice", 2),
        ("mps", 1),
        ("mps", 2),
        ("mps:100/n", 2),
    ]


def test_the_queue_is_run_where_runs_are_counted() -> None:
    plan = schedule(settings("queue", (1, 4), Metric(), window=None))
    assert [(way.name, copies) for way, copies in plan] == [("alone", 1), ("queue", 4)]


@given(
    st.sampled_from(["queue", "timeslice", "mps", "mps:100/n", "mps:200/n", "mps:100", "streams"]), st.integers(1, 64)
)
def test_what_measures_a_cell_measures_itself(name: str, copies: int) -> None:
    one = settings(name, (copies,))
    cell = measuring_cell((parse_ways(name)[0], copies), one)
    assert measuring_cell(cell, one) == cell
    assert cell in schedule(one)


def test_where_only_mps_can_run_alone_is_one_client() -> None:
    one = Settings(argv=["job"], metric=RATE, cells=[(parse_ways("mps")[0], 1)], alone=parse_ways("mps")[0], window=1.0)
    assert [(way.name, copies) for way, copies in schedule(one)] == [("mps", 1)]


def test_throughput_adds_up_at_the_same_time_and_not_in_turn() -> None:
    both = CopiesResult(copies=(copy(0, 10.0, 1.0), copy(1, 20.0, 3.0)), seconds=4.0)
    assert throughput(parse_ways("mps")[0], both, RATE) == 30.0
    assert throughput(parse_ways("queue")[0], both, RATE) == pytest.approx(17.5)
    assert throughput(parse_ways("queue")[0], both, Metric()) == 0.5
    assert throughput(parse_ways("mps")[0], both, LOWER) == pytest.approx(1 / (1 / 10 + 1 / 20))
    assert throughput(parse_ways("queue")[0], both, LOWER) == pytest.approx(1 / ((0.1 * 1 + 0.05 * 3) / 4))


def test_a_run_with_a_failure_has_no_throughput() -> None:
    one = CopiesResult(copies=(copy(0, 10.0), copy(1, None, failure="exit code 3")), seconds=1.0)
    assert throughput(parse_ways("mps")[0], one, RATE) is None


def test_mps_wins_for_a_job_that_needs_less_than_half() -> None:
    figures = {
        ("alone", 1): [100, 101, 99.0],
        ("timeslice", 2): [50, 51, 49.5],
        ("mps", 2): [99.0, 100, 101],
        ("mps:100/n", 2): [99.5, 100, 100.5],
    }
    found = measured("queue,timeslice,mps,mps:100/n", (2,), figures)
    (pick,) = picks(found, measured_cells(found))
    assert pick.way == "mps", "the simpler of two that do not differ"
    assert pick.fastest in {"mps", "mps:100/n"}
    assert pick.gain.value == pytest.approx(2, rel=0.02)
    assert pick.over == "timeslice"
    assert best_pick(RATE, measured_cells(found), [pick]) == pick


def test_a_simpler_way_that_is_more_than_three_percent_slower_is_not_chosen() -> None:
    figures = {("alone", 1): [100.0] * 3, ("timeslice", 2): [40.0, 60.0, 44.0], ("mps", 2): [55.0, 70.0, 60.0]}
    found = measured("timeslice,mps", (2,), figures)
    (pick,) = picks(found, measured_cells(found))
    assert pick.no_difference == ("timeslice",)
    assert pick.way == "mps"


@given(st.lists(st.lists(st.floats(1, 1000), min_size=3, max_size=3), min_size=3, max_size=3))
def test_the_choice_is_never_three_percent_below_the_best(rounds: list[list[float]]) -> None:
    figures = dict(zip([("alone", 1), ("timeslice", 2), ("mps", 2)], rounds, strict=True))
    found = measured("queue,timeslice,mps", (2,), figures)
    verdicts = measured_cells(found)
    (pick,) = picks(found, verdicts)
    means = {cell.way: cell.throughput.mean for cell in verdicts if cell.throughput is not None}
    assert means[pick.way] >= 0.97 * max(means.values()) * (1 - 1e-9)
    assert means[pick.fastest] == max(means.values())


def test_lower_is_better_turns_it_round() -> None:
    figures = {("alone", 1): [10.0, 10.1, 9.9], ("timeslice", 2): [20.0, 20.2, 19.8], ("mps", 2): [10.0, 10.1, 9.9]}
    found = measured("timeslice,mps", (2,), figures, LOWER)
    by_name = {one.way: one for one in measured_cells(found)}
    (pick,) = picks(found, list(by_name.values()))
    assert pick.way == "mps"
    assert by_name["mps"].slowdown == pytest.approx(1, rel=0.01)
    assert by_name["timeslice"].slowdown == pytest.approx(2, rel=0.01)
    assert by_name["mps"].throughput is not None
    assert by_name["mps"].throughput.mean == pytest.approx(5, rel=0.01)


def test_streams_share_what_their_process_prints() -> None:
    runs = [run("alone", [100.0], place) for place in (1, 2)]
    for place in (1, 2):
        one = run("streams", [150.0], place)
        runs.append(RunResult(**{**vars(one), "copies": 2}))
    found = Measurement(settings=settings("streams", (2,)), runs=runs)
    (verdict,) = measured_cells(found)
    assert verdict.gain.value == pytest.approx(1.5)
    assert verdict.slowdown == pytest.approx(100 / 75)


def test_single_runs_are_not_called_certain() -> None:
    found = measured("timeslice,mps", (2,), {("alone", 1): [100.0], ("timeslice", 2): [50.0], ("mps", 2): [99.0]})
    (pick,) = picks(found, measured_cells(found))
    assert (pick.way, pick.certain) == ("mps", False)


def test_a_cell_that_failed_is_not_chosen_and_its_copies_are_kept() -> None:
    found = measured("timeslice,mps", (2,), {("alone", 1): [100.0, 99.0], ("timeslice", 2): [50.0, 51.0]})
    failed = CopiesResult(copies=(copy(0, 98.0), copy(1, None, failure="exit code 3")), seconds=1.0)
    usage = Usage(seconds=1.0, energy_joules=None, memory_peak_bytes=None, others=(77,), other_names={77: "python3"})
    found.runs.append(RunResult(round=1, way="mps", copies=2, result=failed, throughput=None, usage=usage))
    data = answer(found)
    cell = next(cell for cell in data.cells if cell.way == "mps")
    assert cell.throughput is None
    assert cell.failures == ("round 1: copy 1 (process 101): exit code 3",)
    assert cell.others == (77,)
    assert (data.others, data.other_names) == ((77,), {77: "python3"})
    assert any("(77 python3)" in note for note in bench_notes(data))
    assert any("(77)" in note for note in bench_notes(replace(data, other_names={})))
    assert data.picks == ()
    assert [copy.value for copy in data.runs[-1].result.copies] == [98.0, None]


def test_the_document_is_pinned(tmp_path: Path) -> None:
    figures = {("alone", 1): [100.0, 101.0], ("timeslice", 2): [50.0, 51.0], ("mps", 2): [99.0, 98.0]}
    benchmark = answer(measured("timeslice,mps", (2,), figures))
    data = jsonable(benchmark)
    assert list(data) == [
        *("kind", "driver", "gpu", "command", "workload", "started_at", "metric", "window_seconds", "cells", "picks"),
        *("host", "seconds", "reason", "repeat", "rounds", "alone", "best", "left_out", "others", "other_names"),
        *("notes", "runs", "comparison"),
    ]
    assert list(data["cells"][0]) == [
        *("way", "copies", "threads_percent", "same_as", "runs", "throughput", "gain", "slowdown"),
        *("memory_peak_bytes", "power_watts", "joules", "latency_p50", "latency_p99", "chosen"),
        *("failures", "others", "slice_us", "time_slice"),
    ]
    assert list(data["cells"][0]["throughput"]) == ["mean", "low", "high", "spread", "runs"]
    assert list(data["best"]) == [
        *("copies", "way", "threads_percent", "fastest", "no_difference", "certain"),
        *("ways", "open_ways", "gain", "over", "winner"),
    ]
    assert data["cells"][1]["joules"] == pytest.approx(100 / 197, rel=1e-3), "100 W over the mean rate"
    path = tmp_path / "a.json"
    assert list(data["runs"][0]) == [*("round", "way", "copies", "result", "throughput", "usage", "invalid")]
    assert list(data["runs"][0]["result"]["copies"][0]) == [
        *("copy", "pid", "seconds", "exit_code", "value", "latency_p50", "latency_p99", "failure")
    ]
    write_bench(path, benchmark)
    assert json.loads(path.read_text()) == json.loads(json.dumps(data))
    earlier = read_bench(str(path))
    assert jsonable(earlier) == {key: data[key] for key in jsonable(earlier)}
    # It may be of a later gpushare, which says more.
    later = {**data, "colour": "red", "cells": [{**cell, "colour": "red"} for cell in data["cells"]]}
    path.write_text(json.dumps({"schema": 1, "data": later}))
    assert read_bench(str(path)) == earlier


def test_figures_have_six_digits() -> None:
    (cell,) = answer(measured("mps", (2,), {("alone", 1): [100.0], ("mps", 2): [100 / 3, 200 / 3]})).cells
    assert cell.throughput.spread == 0.666667
    assert (cell.gain, cell.slowdown) == (Ratio(value=1.0, low=None, high=None), 2.25)


def test_compared_with_an_earlier_one() -> None:
    before = {("alone", 1): [100.0, 101.0], ("timeslice", 2): [50.0, 50.1], ("mps", 2): [50.0, 50.1]}
    after = {("alone", 1): [100.0, 101.0], ("timeslice", 2): [50.0, 50.2], ("mps", 2): [99.0, 99.1]}
    old, new = (answer(measured("timeslice,mps", (2,), figures)) for figures in (before, after))
    rows = {row.way: row for row in compare_cells(new, old)}
    assert rows["mps"].verdict == "faster"
    assert rows["mps"].ratio == pytest.approx(1.98, rel=0.01)
    assert rows["timeslice"].verdict == "no difference"
    assert {row.verdict for row in compare_cells(old, new)} == {"slower", "no difference"}


def test_compared_with_one_that_counts_something_else() -> None:
    figures = {("alone", 1): [100.0, 101.0], ("mps", 2): [50.0, 50.1]}
    one = measured("mps", (2,), figures)
    check_comparable(one.settings.metric, answer(one))
    other = answer(measured("mps", (2,), figures, LOWER))
    with fails(BadUsage, "other_metric"):
        check_comparable(one.settings.metric, other)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"kind": "gpushare bench"}', '{"kind": "gpushare bench", "cells": [1]}', "\x00", "[" * 9999],
)
def test_a_file_that_is_no_benchmark(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with fails(BadUsage, "not_a_bench"):
        read_bench(str(path))


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "gpushare bench sizes"},
        {"started_at": 1e300},
        {"started_at": "today"},
        {"driver": 7},
        {"gpu": {}},
        {"gpu": None},
        {"workload": {}},
        {"metric": None},
        {"picks": [None]},
        *({"cells": [{"way": "mps", "copies": copies}]} for copies in (0, 1.5, True, "2", 10**400)),
    ],
    ids=str,
)
def test_a_benchmark_with_a_field_that_cannot_be(change: dict[str, Any], tmp_path: Path) -> None:
    data = jsonable(answer(measured("mps", (2,), {("mps", 2): [1.0, 2.0]})))
    path = tmp_path / "x.json"
    path.write_text(json.dumps({**data, **change}))
    with fails(BadUsage, "not_a_bench"):
        read_bench(str(path))


@pytest.mark.parametrize("mean", [1e300, -1e300, 5e-324, 10**400, "1", None])
def test_a_figure_over_which_there_is_no_ratio(mean: Any, tmp_path: Path) -> None:
    data = jsonable(answer(measured("mps", (2,), {("mps", 2): [1.0, 2.0]})))
    path = tmp_path / "x.json"
    for usual in (0, 1.5):
        data["cells"][0]["throughput"]["mean"] = usual
        path.write_text(json.dumps(data))
        assert read_bench(str(path)).cells[0].throughput is not None
    data["cells"][0]["throughput"]["mean"] = mean
    path.write_text(json.dumps(data))
    with pytest.raises(BadUsage):
        read_bench(str(path))


def test_files_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        read_bench(str(tmp_path / "none"))
    with pytest.raises(GpushareError):
        read_bench(str(tmp_path))
    with fails(BadUsage, "file_exists"):
        check_new_file("--to", str(tmp_path))
    with pytest.raises(NotFound):
        check_new_file("--to", str(tmp_path / "none" / "x.json"))
    assert check_new_file("--to", str(tmp_path / "x.json")) == tmp_path / "x.json"
