"""The verdict of a benchmark, figure by figure: what a wrong number would hide."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpushare.base.benchmark import BenchCell, CopiesResult, CopyResult, Metric, RunResult, Usage
from gpushare.measure.bench import Measurement
from gpushare.measure.bench_data import alone_cell, best_pick, measured_cells, picks, speeds
from tests.measure.test_bench import LOWER, RATE, copy, measured, run, settings

RUNS = Metric()


def verdict_of(*runs: RunResult, metric: Metric = RATE, window: float | None = 1.0) -> BenchCell:
    """Return what is known of two copies under MPS, from these runs."""
    found = Measurement(settings=settings("mps", (2,), metric, window), runs=list(runs))
    (verdict,) = measured_cells(found)
    return verdict


def test_a_way_in_which_nothing_was_done_is_compared_too() -> None:
    figures = {("alone", 1): [100.0, 101.0], ("timeslice", 2): [0.0, 0.0], ("mps", 2): [50.0, 51.0]}
    found = measured("timeslice,mps", (2,), figures)
    verdicts = measured_cells(found)
    (pick,) = picks(found, verdicts)
    assert (pick.way, pick.no_difference) == ("mps", ())
    # Over nothing there is no factor.
    assert (pick.gain, pick.over) == (None, "timeslice")
    by_name = {cell.way: cell for cell in verdicts}
    assert by_name["timeslice"].gain is None
    assert by_name["timeslice"].slowdown is None
    nothing = measured("timeslice,mps", (2,), {**figures, ("mps", 2): [0.0, 0.0]})
    (pick,) = picks(nothing, measured_cells(nothing))
    assert pick.way == "timeslice"


def test_a_run_in_which_nothing_was_done_is_not_left_out_of_the_speeds() -> None:
    assert speeds([run("mps", [0.0, 0.0]), run("mps", [10.0, 10.0])], RATE) == [0.0, 20.0]
    failed = replace(run("mps", [10.0, 10.0]), throughput=None)
    assert speeds([failed], RATE) == []
    assert speeds([run("mps", [10.0, 10.0], metric=LOWER)], LOWER) == [pytest.approx(0.2)]


@pytest.mark.parametrize(("mps", "same"), [(100.9, True), (101.1, False)])
def test_less_than_a_hundredth_is_no_difference_however_narrow_the_intervals(mps: float, same: bool) -> None:
    figures = {("alone", 1): [100.0] * 3, ("timeslice", 2): [100.0] * 3, ("mps", 2): [mps] * 3}
    found = measured("timeslice,mps", (2,), figures)
    (pick,) = picks(found, measured_cells(found))
    assert list(pick.no_difference) == (["timeslice"] if same else [])
    assert pick.way == ("timeslice" if same else "mps")
    assert pick.certain


def test_a_slowdown_is_of_each_copy_against_the_mean_time_alone() -> None:
    # 12 ms each alone, in the mean.
    runs = [run("alone", [100.0], 1), run("alone", [1000 / 14], 2), run("mps", [1000 / 18, 1000 / 24])]
    verdict = verdict_of(*runs)
    assert verdict.slowdown == pytest.approx(1.75)
    # A run alone that failed is no base.
    failed = replace(run("alone", [1.0], 3), throughput=None)
    assert verdict_of(*runs, failed).slowdown == pytest.approx(1.75)


@pytest.mark.parametrize("rates", [[100.0, 100.0], [10.0, 500.0, 90.0]])
def test_one_copy_alone_is_no_slower_than_one_copy_alone(rates: list[float]) -> None:
    found = measured("mps", (1,), {("alone", 1): rates, ("mps", 1): rates})
    assert alone_cell(found).slowdown == pytest.approx(1.0)


def test_of_a_printed_time_no_joules_are_known() -> None:
    """Its unit is not: power over 1 / 10 ms is not 10 J."""
    found = measured("mps", (2,), {("alone", 1): [5.0], ("mps", 2): [10.0]}, metric=LOWER)
    assert [one.joules for one in measured_cells(found)] == [None]
    assert verdict_of(run("mps", [50.0, 100.0])).slowdown is None


def test_where_runs_are_counted_a_slowdown_is_of_the_time_and_only_of_whole_runs() -> None:
    alone = replace(run("alone", [1.0]), result=CopiesResult(copies=(copy(0, None, 2.0),), seconds=2.0))
    both = CopiesResult(copies=(copy(0, None, 3.0), copy(1, None, 4.0)), seconds=4.0)
    together = replace(run("mps", [1.0, 1.0]), result=both)
    assert verdict_of(alone, together, metric=RUNS, window=None).slowdown == pytest.approx(1.75)
    # In a window every copy takes as long as the window.
    assert verdict_of(alone, together, metric=RUNS, window=5.0).slowdown is None


def used(one: RunResult, **usage: float | None) -> RunResult:
    """Return a run with another use of the GPU."""
    known = {"seconds": 1.0, "energy_joules": None, "memory_peak_bytes": None, "others": (), **usage}
    return replace(one, usage=Usage(**known))  # type: ignore[arg-type]


def test_memory_is_the_peak_of_all_runs_and_unknown_is_not_nothing() -> None:
    one, other = run("mps", [1.0, 1.0], 1), run("mps", [1.0, 1.0], 2)
    assert verdict_of(used(one, memory_peak_bytes=7), used(other, memory_peak_bytes=9)).memory_peak_bytes == 9
    assert verdict_of(used(one), used(other, memory_peak_bytes=9)).memory_peak_bytes == 9
    assert verdict_of(used(one), used(other)).memory_peak_bytes is None


def test_power_is_energy_over_time_and_joules_are_of_one_run_or_of_one_unit() -> None:
    one, other = run("mps", [30.0, 20.0], 1), run("mps", [30.0, 20.0], 2)
    verdict = verdict_of(used(one, energy_joules=100.0, seconds=2.0), used(other, energy_joules=300.0, seconds=2.0))
    assert verdict.power_watts == pytest.approx(100.0)
    # 50 W over 50 a second, and 150 W.
    assert verdict.joules == pytest.approx(2.0)
    result = CopiesResult(copies=(copy(0, None), copy(1, None)), seconds=1.0)
    counted = replace(used(one, energy_joules=100.0), result=result)
    assert verdict_of(counted, metric=RUNS, window=None).joules == pytest.approx(50.0)
    unknown = verdict_of(used(one))
    assert (unknown.power_watts, unknown.joules) == (None, None)


def with_latencies(number: int, *copies: tuple[tuple[float, ...], float | None, float | None]) -> RunResult:
    """Return a run in which the copies told these latencies, and these 50th and 99th percentiles."""
    results: list[CopyResult] = [
        replace(copy(place, 1.0), latencies=latencies, latency_p50=p50, latency_p99=p99)
        for place, (latencies, p50, p99) in enumerate(copies)
    ]
    base = run("mps", [1.0] * len(copies), number)
    return replace(base, result=CopiesResult(copies=tuple(results), seconds=1.0))


def test_percentiles_are_of_all_latencies_together() -> None:
    low, high = tuple(float(one) for one in range(1, 51)), tuple(float(one) for one in range(51, 102))
    verdict = verdict_of(with_latencies(1, (low, 9.0, 9.0), (high, 9.0, 9.0)))
    assert (verdict.latency_p50, verdict.latency_p99) == (51.0, 100.0)


def test_of_percentiles_that_were_summed_up_the_middle_and_the_worst_tail_count() -> None:
    verdict = verdict_of(
        with_latencies(1, ((), 1.0, 5.0), ((), 2.0, 30.0)), with_latencies(2, ((), 6.0, 7.0), ((), None, None))
    )
    assert (verdict.latency_p50, verdict.latency_p99) == (2.0, 30.0)
    none = verdict_of(with_latencies(1, ((), None, None)))
    assert (none.latency_p50, none.latency_p99) == (None, None)


def test_one_copy_alone_has_a_verdict_of_its_own() -> None:
    found = measured("mps", (2,), {("alone", 1): [100.0, 102.0], ("mps", 2): [50.0, 51.0]})
    alone = alone_cell(found)
    assert (alone.way, alone.copies, alone.runs) == ("alone", 1, 2)
    assert alone.gain.value == 1.0
    assert alone.throughput.mean == 101.0


def test_the_overall_answer_is_the_fastest_number_of_copies() -> None:
    figures = {
        ("alone", 1): [100.0] * 2,
        **{("timeslice", number): [100.0 / number] * 2 for number in (2, 3, 4)},
        ("mps", 2): [90.0] * 2,
        ("mps", 3): [80.0] * 2,
        ("mps", 4): [50.0] * 2,
    }
    found = measured("timeslice,mps", (2, 3, 4), figures)
    cells = measured_cells(found)
    answers = picks(found, cells)
    assert [pick.copies for pick in answers] == [2, 3, 4]
    best = best_pick(RATE, cells, answers)
    assert (best.copies, best.way) == (3, "mps")
    assert best_pick(RATE, cells, []) is None


def test_a_way_that_was_not_measured_or_failed_gives_no_answer() -> None:
    found = measured("timeslice,mps", (2,), {("alone", 1): [100.0], ("mps", 2): [50.0]})
    assert picks(found, measured_cells(found)) == []


def test_a_copy_that_told_nothing_or_took_no_time_is_no_factor() -> None:
    base = run("alone", [100.0])
    # No factor says how much slower it is that stood still.
    assert verdict_of(base, run("mps", [100.0, 0.0])).slowdown is None
    silent = CopiesResult(copies=(copy(0, 50.0), copy(1, None)), seconds=1.0)
    verdict = verdict_of(base, replace(run("mps", [50.0, 50.0]), result=silent))
    assert verdict.slowdown == pytest.approx(2.0)
    # A time of 0 that was printed, or taken, does not count as a time.
    zero = run("mps", [0.0, 20.0], metric=LOWER)
    verdict = verdict_of(run("alone", [10.0], metric=LOWER), replace(zero, throughput=1.0), metric=LOWER)
    assert verdict.slowdown == pytest.approx(2.0)
    alone = replace(run("alone", [1.0]), result=CopiesResult(copies=(copy(0, None, 2.0),), seconds=2.0))
    both = CopiesResult(copies=(copy(0, None, 0.0), copy(1, None, 4.0)), seconds=4.0)
    verdict = verdict_of(alone, replace(run("mps", [1.0, 1.0]), result=both), metric=RUNS, window=None)
    assert verdict.slowdown == pytest.approx(2.0)


def test_a_way_whose_every_run_failed_is_not_picked_and_hinders_no_pick() -> None:
    figures = {
        ("alone", 1): [100.0, 101.0],
        ("queue", 2): [40.0, 40.0],
        ("timeslice", 2): [60.0, 60.0],
        ("mps", 2): [70.0, 70.0],
    }
    found = measured("queue,timeslice,mps", (2,), figures)
    for failed, chosen, over in (("mps", "timeslice", "timeslice"), ("timeslice", "mps", "queue")):
        runs = [replace(one, throughput=None) if one.way == failed else one for one in found.runs]
        other = replace(found, runs=runs)
        (pick,) = picks(other, measured_cells(other))
        assert (pick.way, pick.over, pick.ways) == (chosen, over, 2)
        assert failed not in pick.no_difference


def test_an_answer_is_not_certain_while_a_way_was_not_measured() -> None:
    figures = {("alone", 1): [100.0, 101.0], ("queue", 2): [50.0, 51.0], ("timeslice", 2): [70.0, 71.0]}
    (pick,) = picks(found := measured("queue,timeslice,mps", (2,), figures), measured_cells(found))
    assert (pick.way, pick.certain, pick.ways, pick.open_ways) == ("timeslice", False, 2, 1)
    (pick,) = picks(found := measured("queue,timeslice", (2,), figures), measured_cells(found))
    assert (pick.certain, pick.open_ways) == (True, 0)
