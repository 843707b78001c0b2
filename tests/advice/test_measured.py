"""What a measurement does to the rules' answer: every effect, worked out by hand, and what holds of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpushare.advice.advise import Advice, Confidence, advise
from gpushare.advice.measured import ANSWERED, BENCH_WAYS, MeasuredAdvice, bench_ways, measured_advice
from gpushare.advice.rules import Kind, rules
from gpushare.base.benchmark import BenchAnswer, BenchCell, LeftOut, Metric
from gpushare.base.model import Way
from gpushare.measure.bench import Measurement, Settings
from gpushare.measure.statistics import summarize
from tests.advice.conftest import situation_of
from tests.measure.test_bench import answer

FARM = {"processes": 4, "memory": "2G", "users": "same", "saturating": False}
# Nothing that decides is left open.
SURE = {**FARM, "isolation": "none", "latency": "none", "pattern": "steady"}
Rate = float | tuple[float, float, float] | str


def advice_of(host: str = "h200", **words: Any) -> Advice:
    return advise(situation_of(words, host=host))


def bench(
    rates: Mapping[str, Rate], copies: int = 4, *, higher: bool = True, reason: str = "finished", **left: str
) -> BenchAnswer:
    """Return a benchmark.

    A rate is mean, low and high, or a mean (give or take 0.5 %), or the failure of a copy; ``left`` says why a way was
    left out.
    """
    cells = []
    for way, rate in rates.items():
        cap = {"mps:200/n": 200 / copies, "mps:100/n": 100 / copies}.get(way, 100.0)
        cell = BenchCell(way=way, copies=copies, threads_percent=None if cap >= 100 else round(cap, 1))
        if isinstance(rate, str):
            cell = replace(cell, failures=(rate,))
        else:
            mean, low, high = rate if isinstance(rate, tuple) else (rate, 0.995 * rate, 1.005 * rate)
            figures = summarize([mean])
            cell = replace(cell, throughput=replace(figures, low=low, high=high))
        cells.append(cell)
    metric = Metric(pattern="(.+)", higher_is_better=higher)
    return replace(
        answer(Measurement(settings=Settings(argv=["job"], metric=metric, cells=()))),
        cells=tuple(cells),
        left_out=tuple(LeftOut(way=way, copies=None, reason=why) for way, why in left.items()),
        reason=reason,
    )


def once(mean: float) -> Rate:
    """Return a rate that was measured once: it has no interval."""
    return (mean, None, None)  # type: ignore[return-value]


def after(words: Mapping[str, Any], rates: Mapping[str, Rate], **more: Any) -> MeasuredAdvice:
    return measured_advice(advice_of(**words), bench(rates, **more), more.get("copies", 4))


def commands(found: MeasuredAdvice) -> list[str | None]:
    return [line.command for line in found.final.recipe.lines]


def way_of(advice: Advice) -> Way | None:
    return None if advice.best is None else advice.best.way


# -- each effect -----------------------------------------------------------------------------------


def test_what_the_rules_said_is_confirmed_and_the_advice_is_surer() -> None:
    found = after(SURE, {"queue": 100, "timeslice": 100, "mps": 250, "mps:200/n": 250, "mps:100/n": 240})
    assert (found.measured.effect, way_of(found.final)) == ("confirmed", Way.MPS)
    assert found.final.confidence is Confidence.HIGH
    assert found.measured.sentence == "MPS with 50 % each is 2.50 x a queue, the next best: the rules' answer stands"
    assert "gpushare mps start -g 0 --threads 50 --memory 2816M" in commands(found)
    assert found.final.recipe.measure == (), "it was measured"


def test_an_open_question_keeps_it_from_being_sure() -> None:
    found = after(FARM, {"timeslice": 100, "mps": 250, "mps:200/n": 250})
    assert found.measured.effect == "confirmed"
    assert found.final.confidence is Confidence.MEDIUM
    assert "isolation" in found.final.confidence_why


def test_the_measured_winner_is_the_answer() -> None:
    found = after(SURE, {"queue": 50, "timeslice": 130, "mps": 99, "mps:200/n": 100, "mps:100/n": 90})
    assert (found.measured.effect, way_of(found.rules), way_of(found.final)) == ("changed", Way.MPS, Way.TIMESLICE)
    assert (
        found.measured.sentence
        == "the rules said MPS with 50 % each; measured: time-slicing is 1.30 x MPS with 50 % each"
    )
    assert found.measured.ratio == pytest.approx(1.3)
    assert (found.rules.confidence, found.final.confidence) == (Confidence.MEDIUM, Confidence.HIGH)
    assert not any("mps" in (command or "") for command in commands(found))


@pytest.mark.parametrize(
    ("best", "threads"), [("mps:100/n", "--threads 25 "), ("mps", "--memory"), ("mps:200/n", "--threads 50 ")]
)
def test_the_measured_cap_stands_in_the_lines(best: str, threads: str) -> None:
    rates: dict[str, Rate] = {"timeslice": 100, "mps": 150, "mps:200/n": 150, "mps:100/n": 150}
    found = after(SURE, {**rates, best: 200})
    assert way_of(found.final) is Way.MPS
    assert found.measured.effect is ("confirmed" if best == "mps:200/n" else "changed")
    (start,) = [line for line in commands(found) if line and line.startswith("gpushare mps start")]
    assert threads in start
    assert ("--threads" in start) == (best != "mps")


def test_the_cap_is_that_of_the_processes_not_of_the_copies() -> None:
    found = after(SURE, {"timeslice": 100, "mps": 150, "mps:200/n": 150, "mps:100/n": 200}, copies=8)
    assert found.measured.sentence.endswith("measured: MPS with 12.5 % each is 1.33 x MPS with 25 % each")
    assert "gpushare mps start -g 0 --threads 25 --memory 2816M" in commands(found)


def test_no_difference_leaves_the_rules_answer() -> None:
    found = after(SURE, {"queue": 101, "timeslice": 100, "mps": 100, "mps:200/n": 100})
    assert (found.measured.effect, way_of(found.final)) == ("confirmed", Way.MPS)
    assert (
        found.measured.sentence
        == "MPS with 50 % each is 0.99 x a queue, the next best, no difference: the rules' answer stands"
    )
    assert found.final.confidence is found.rules.confidence


def test_intervals_that_overlap_are_no_difference() -> None:
    found = after(SURE, {"timeslice": (130, 90, 170), "mps:200/n": (100, 70, 130)})
    assert (found.measured.effect, way_of(found.final)) == ("confirmed", Way.MPS)


def test_what_was_left_to_a_measurement_is_settled() -> None:
    words = {**SURE, "saturating": None, "cuda_graphs": True}
    found = after(words, {"queue": 100, "timeslice": 101, "mps": 90, "mps:200/n": 190})
    assert (found.measured.effect, way_of(found.rules), way_of(found.final)) == ("changed", Way.MEASURE, Way.MPS)
    assert found.rules.confidence is Confidence.LOW
    assert found.final.confidence is Confidence.HIGH
    assert "1.88 x time-slicing, the next best: MPS with 50 % each" in found.measured.sentence


def test_where_nothing_differs_the_rules_choose_among_the_measured() -> None:
    words = {**SURE, "saturating": None, "cuda_graphs": True}
    found = after(words, {"queue": 100, "timeslice": 100, "mps": 100, "mps:200/n": 100})
    order = [verdict.way for verdict in found.rules.verdicts if verdict.way in BENCH_WAYS and not verdict.refused]
    assert way_of(found.final) is next(way for way in order if way is not Way.MIG)
    assert "no difference" in found.measured.sentence


def test_throughput_does_not_overrule_what_it_does_not_tell() -> None:
    """People at notebooks: copies that work all the time say nothing of bursts."""
    found = after({**SURE, "pattern": "interactive"}, {"queue": 100, "timeslice": 100, "mps:200/n": 200})
    assert (found.measured.effect, way_of(found.final)) == ("kept", Way.TIMESLICE)
    assert "bursty work" in found.measured.sentence
    assert found.final.confidence is Confidence.MEDIUM
    alone = after(
        {**SURE, "pattern": "interactive"}, {"queue": once(100), "timeslice": once(100), "mps:200/n": once(200)}
    )
    assert alone.measured.effect == "kept"
    assert "from single runs" in alone.final.confidence_why


def test_a_latency_target_is_not_overruled_by_a_rate() -> None:
    found = after({**SURE, "latency": "20ms"}, {"mig": 100, "timeslice": 150})
    assert (found.measured.effect, way_of(found.final)) == ("kept", Way.MIG)


def test_copies_that_failed_under_the_rules_way_refute_it() -> None:
    found = after(SURE, {"timeslice": 100, "mps": "copy 1: exit code 1", "mps:200/n": "copy 1: exit code 1"})
    assert (found.measured.effect, way_of(found.final)) == ("changed", Way.TIMESLICE)
    assert "its copies failed (copy 1: exit code 1)" in found.measured.sentence
    # Nothing was compared with it.
    assert found.final.confidence is Confidence.MEDIUM


def test_what_could_not_be_measured_stands() -> None:
    words = {"processes": 3, "memory": "2G", "users": "different", "pattern": "steady", "saturating": False}
    found = after(words, {"queue": 100, "timeslice": 120}, copies=3, mig="MIG is off")
    assert (found.measured.effect, way_of(found.final)) == ("open", Way.MIG)
    assert (
        "MIG was not measured (MIG is off); time-slicing was the fastest of the others; the rules' answer stands"
        in found.measured.sentence
    )
    assert found.final == found.rules


def test_a_refused_way_is_never_the_answer_even_if_it_was_measured() -> None:
    words = {"processes": 3, "memory": "2G", "users": "different", "pattern": "steady", "saturating": True}
    found = after(words, {"queue": 100, "timeslice": 101, "mps": 900}, copies=3)
    assert way_of(found.final) is not Way.MPS


def test_nothing_was_measured() -> None:
    found = after(SURE, {}, reason="interrupted")
    assert (found.measured.effect, found.final) == ("open", found.rules)
    assert found.measured.sentence == "nothing was measured (it ended too early); the rules' answer stands"


def test_single_runs_change_the_answer_only_by_much_and_without_confidence() -> None:
    close = after(SURE, {"timeslice": once(102), "mps:200/n": once(100)})
    assert (close.measured.effect, way_of(close.final)) == ("confirmed", Way.MPS)
    far = after(SURE, {"timeslice": once(140), "mps:200/n": once(100)})
    assert (far.measured.effect, way_of(far.final)) == ("changed", Way.TIMESLICE)
    assert far.final.confidence is Confidence.LOW
    assert "single runs" in far.final.confidence_why


def test_of_a_time_per_unit_the_smaller_is_the_faster() -> None:
    found = after(SURE, {"timeslice": 0.5, "mps:200/n": 1.0, "queue": 1.0}, higher=False)
    assert (found.measured.effect, way_of(found.final)) == ("changed", Way.TIMESLICE)
    assert found.measured.ratio == pytest.approx(2)


def test_what_would_still_change_it_are_vetoes_and_wishes() -> None:
    found = after(SURE, {"queue": 50, "timeslice": 130, "mps:200/n": 100})
    texts = {change.text: change.then for change in found.final.changes}
    assert texts["they are virtual machines"] is Way.VGPU
    assert "one process fills the GPU" not in texts, "that was measured"


# -- what is measured ------------------------------------------------------------------------------


def test_only_ways_that_no_veto_refuses_are_measured() -> None:
    assert bench_ways(advice_of(**FARM)) == ("queue", "timeslice", "mps", "mps:200/n", "mps:100/n", "mig")
    others = advice_of(processes=3, memory="2G", users="different")
    assert bench_ways(others) == ("queue", "timeslice", "mig")
    assert "mig" not in bench_ways(advice_of("t4", **FARM))


def test_every_rule_that_a_measurement_answers_is_one() -> None:
    known = {rule.id for rule in [rule for rule in rules() if rule.kind in {Kind.FOR, Kind.AGAINST}]} | {
        "nothing-decides"
    }
    assert known >= ANSWERED


@settings(max_examples=80, deadline=None)
@given(
    rates=st.dictionaries(
        st.sampled_from([name for names in BENCH_WAYS.values() for name in names]),
        st.one_of(
            st.floats(1, 1000), st.tuples(st.floats(50, 100), st.floats(1, 50), st.floats(100, 200)), st.just("x")
        ),
    ),
    same=st.sampled_from(["same", "different", None]),
    saturating=st.sampled_from([True, False, None]),
    pattern=st.sampled_from(["steady", "interactive", None]),
    higher=st.booleans(),
)
def test_the_answer_always_fits_and_is_as_fast_or_wished(
    rates: dict[str, Rate], same: str | None, saturating: bool | None, pattern: str | None, higher: bool
) -> None:
    words = {"processes": 4, "memory": "2G", "users": same, "saturating": saturating, "pattern": pattern}
    found = after(words, rates, higher=higher)
    assert not found.final.best.refused
    assert found.measured.sentence
    if found.measured.effect == "changed":
        assert found.measured.way in BENCH_WAYS[found.final.best.way]
        assert found.measured.ratio is None or found.measured.ratio > 0.97
    else:
        assert found.final.best == found.rules.best
    if (
        found.measured.effect == "changed"
        and found.rules.best.way is not Way.MEASURE
        and found.measured.ratio is not None
    ):
        assert found.measured.ratio > 1
