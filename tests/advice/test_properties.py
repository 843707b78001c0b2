"""What holds for every case: requirements only refuse, the table decides, the order of words does not matter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import gpushare
from gpushare.advice.advise import advise
from gpushare.advice.case import workload_of
from gpushare.advice.place import place
from gpushare.advice.questions import QUESTIONS, answer_of, next_question, with_answer
from gpushare.advice.rules import Outcome, verdicts, winner
from gpushare.advice.table import load_table, parse_table
from gpushare.advice.ways import ADVISED, CONCURRENT, LEAVING
from gpushare.base.model import Way
from tests.advice.conftest import situation_of

HOSTS = ("a100-80gb", "t4", "h200", "a30")
# What can be demanded, in words that only ever take ways away.
HARD: dict[str, Any] = {
    "isolation": "full",
    "bandwidth_qos": True,
    "trusted": False,
    "users": "different",
    "weights": True,
    "vms": True,
    "nccl": True,
    "p2p": True,
    "ipc": True,
    "graphics": True,
    "profiler": True,
    "dynamic_parallelism": True,
    "running": True,
    "containment": True,
    "code": False,
}
base = st.fixed_dictionaries(
    {},
    optional={
        "processes": st.integers(1, 70),
        "memory": st.sampled_from(["1G", "6G", "20G", "60G", "200G"]),
        "saturating": st.booleans(),
        "users": st.just("same"),
        "pattern": st.sampled_from(["interactive", "bursty", "steady"]),
        "latency": st.sampled_from(["20ms", "none"]),
        "groups": st.integers(1, 9),
        "cuda_graphs": st.booleans(),
        "io_bound": st.booleans(),
    },
).filter(lambda words: "processes" not in words or words.get("groups", 0) <= words["processes"])


def refused(words: dict[str, Any], host: str) -> set[Way]:
    found = verdicts(situation_of(words, host=host))
    return {one.way for one in found if one.outcome is Outcome.REFUSED}


@example(words={"processes": 12, "memory": "1G"}, has={"ipc"}, more="nccl", host="t4")
@settings(max_examples=150)
@given(base, st.sets(st.sampled_from(sorted(HARD))), st.sampled_from(sorted(HARD)), st.sampled_from(HOSTS))
def test_a_hard_requirement_never_makes_a_way_fit(words: dict[str, Any], has: set[str], more: str, host: str) -> None:
    before = {**words, **{key: HARD[key] for key in has}}
    assert refused(before, host) <= refused({**before, more: HARD[more]}, host)


@settings(max_examples=60)
@given(base, st.sampled_from(HOSTS), st.randoms())
def test_the_order_of_words_does_not_matter(words: dict[str, Any], host: str, chance: Any) -> None:
    items = list(words.items())
    chance.shuffle(items)
    assert workload_of(words) == workload_of(dict(items))
    assert verdicts(situation_of(words, host=host)) == verdicts(situation_of(dict(items), host=host))


@settings(max_examples=80)
@given(base, st.sampled_from(HOSTS))
def test_the_winner_is_never_refused_and_always_has_lines(words: dict[str, Any], host: str) -> None:
    advice = advise(situation_of(words, host=host))
    assert {verdict.way for verdict in advice.verdicts} == set(ADVISED)
    if advice.best is None:
        assert all(verdict.refused for verdict in advice.verdicts if verdict.way not in {Way.MEASURE, Way.FIX})
        return
    assert not advice.best.refused
    assert advice.recipe.lines
    assert all(change.then is not advice.best.way for change in advice.changes)


@settings(max_examples=150)
@given(base, st.booleans() | st.none(), st.sampled_from(HOSTS))
def test_leaving_is_never_preferred_to_what_fits(words: dict[str, Any], progress: bool | None, host: str) -> None:
    made = situation_of({**words, **({} if progress is None else {"progress": progress})}, host=host)
    found = {verdict.way: verdict for verdict in verdicts(made)}
    best = winner(found.values())
    if best is None or best.way not in LEAVING:
        return
    assert made.plain.may_fit is made.under_mps.may_fit is False
    # Only in waves, the others waiting.
    assert all(found[way].refused or made.at_a_time(way) for way in CONCURRENT if way is not Way.VGPU)


@settings(max_examples=25)
@example(
    words={
        "memory": "1G",
        "saturating": True,
        "pattern": "bursty",
        "io_bound": False,
        "latency": "20ms",
        "cuda_graphs": False,
    },
    host="a100-80gb",
)
@given(base, st.sampled_from(HOSTS))
def test_a_question_is_asked_only_while_it_decides(words: dict[str, Any], host: str) -> None:
    situation = situation_of(words, host=host)
    question = next_question(situation)
    if question is not None:
        assert answer_of(situation, question.field) is None
        return
    # Nothing is asked: whatever is answered to any question that could be, the winner is the same.
    best = winner(verdicts(situation))
    for one in (question for question in QUESTIONS if question.text is not None):
        if answer_of(situation, one.field) is None and (one.field != "same_user" or situation.case.processes != 1):
            answered = [with_answer(situation, one.field, answer.value) for answer in one.answers]
            assert len({place(other, separate=False)[0].way for other in answered}) == 1, (one.field, best)


@settings(max_examples=60)
@given(base, st.sampled_from(HOSTS))
def test_more_memory_never_makes_a_way_fit(words: dict[str, Any], host: str) -> None:
    less = {**words, "memory": "4G"}
    # Jobs leave the GPU only because not all of them fit.
    assert refused(less, host) <= refused({**words, "memory": "40G"}, host) | {Way.MEASURE, *LEAVING}


@settings(max_examples=60)
@given(base, st.sampled_from(HOSTS))
def test_without_root_nothing_more_fits(words: dict[str, Any], host: str) -> None:
    both = [
        {
            verdict.way
            for verdict in verdicts(situation_of(words, host=host, facts={"root": False}, root=root))
            if verdict.refused
        }
        for root in (True, False)
    ]
    assert both[0] <= both[1] | {Way.MEASURE}


# -- the table -------------------------------------------------------------------------------------


@pytest.fixture
def edited() -> Any:
    """Return a function that edits one text of a copy of the table and loads it."""
    text = (Path(gpushare.__file__).parent / "data" / "ways.yaml").read_text()

    def edit(way: str, row: str, old: str, new: str) -> Any:
        start = text.index(f"      {row}:\n", text.index(f"\n  {way}:\n"))
        changed = text[:start] + text[start:].replace(old, new, 1)
        assert changed != text
        return parse_table(changed)

    return edit


@pytest.mark.parametrize(
    ("cell", "words", "way", "was"),
    [
        (("mps", "error_isolation", "level: none", "level: full"), {"isolation": "fault"}, "mps", "fault-isolation"),
        (
            ("timeslice", "memory_protection", "level: separate", "level: quota"),
            {"isolation": "quota"},
            "timeslice",
            "memory-quota",
        ),
        (("timeslice", "sm_isolation", "level: time", "level: percentage"), {"weights": True}, "timeslice", "weights"),
        (
            ("mps", "memory_bandwidth_qos", "level: none", "level: partition"),
            {"bandwidth_qos": True},
            "mps",
            "bandwidth-qos",
        ),
        (("mps", "reconfigure", "level: launch", "level: live"), {"running": True}, "mps", "running"),
        (("mig", "interop", "level: limited", "level: ipc"), {"ipc": True}, "mig", "ipc"),
        (("mps", "target_use", "level: cooperative", "level: qos"), {"trusted": False}, "mps", "untrusted"),
        (("streams", "partition_type", "level: process", "level: temporal"), {}, "streams", "several-processes"),
        (
            ("mps", "max_partitions", "limit: 48", "limit: 200"),
            {"processes": 100, "cooperating": True},
            "mps",
            "mps-clients",
        ),
        (("mig", "max_partitions", "limit: 7", "limit: 3"), {}, "mig", None),
    ],
)
def test_editing_a_cell_changes_the_advice(
    edited: Any, cell: tuple[str, str, str, str], words: dict[str, Any], way: str, was: str | None
) -> None:
    case = {"processes": 4, "users": "same", "code": True, **words}
    table = edited(*cell)
    before = next(verdict for verdict in verdicts(situation_of(case)) if verdict.way is Way(way))
    after = next(verdict for verdict in verdicts(situation_of(case, ways=table)) if verdict.way is Way(way))
    rules = [{reason.rule for reason in one.reasons if not reason.open} for one in (before, after)]
    if was is None:
        # The other way round: the cell took something away.
        assert (before.refused, after.refused) == (False, True)
        return
    assert before.refused
    assert was in rules[0]
    assert was not in rules[1]
    assert not after.refused


def test_editing_a_cell_changes_the_winner(edited: Any) -> None:
    words = {"processes": 2, "users": "same", "saturating": False, "isolation": "fault"}
    table = edited("mps", "error_isolation", "level: none", "level: full")
    best = [winner(verdicts(situation_of(words, host="t4", ways=one))) for one in (load_table(), table)]
    assert [one.way for one in best if one is not None] == [Way.TIMESLICE, Way.MPS]
