"""How far a farm is, and its table: of many copies, those that ended alike are one row."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from gpushare.show.run import Copy, FarmAnswer, farm_result, progress_text


def copies(**states: int) -> list[Copy]:
    names = [state.replace("_", " ") for state, count in states.items() for _ in range(count)]
    return [Copy(copy=number, state=state) for number, state in enumerate(names)]


def test_progress_is_a_bar_a_rate_and_the_time_left() -> None:
    assert progress_text(copies(waiting=3, running=1), 7.6) == "0/4 [--------------------] 1 running, 8 s"
    half = copies(done=4, failed=1, running=2, waiting=3, done_earlier=90)
    for copy in half:
        copy.seconds, copy.started_after = 20.0 if copy.state == "done" else 0.0, 50.0
    # Two run for 10 more seconds, and three for 20 after that, two at a time.
    assert progress_text(half, 60.0) == "5/10 [##########----------] 2 running, 1 failed, 5/min, about 40 s left"
    # A fast one is a whole number; nothing is left of what is done.
    assert progress_text(copies(done=100), 4.0) == "100/100 [####################] 0 running, 1500/min"
    assert all(len(progress_text(half, seconds)) < 80 for seconds in (1.0, 1e5))


def test_the_time_left_counts_what_runs_now_and_is_not_given_when_it_cannot_be_known() -> None:
    many = copies(done=2, running=16, waiting=14)
    for copy in many:
        copy.seconds, copy.started_after = (600.0 if copy.state == "done" else 0.0), (601.0 if copy.copy < 4 else 0.0)
    assert progress_text(many, 601.0).endswith("about 10 min left")
    last = [*copies(done=2), Copy(copy=2, state="running", started_after=10.0)]
    for copy in last[:2]:
        copy.seconds = 10.0
    left = [progress_text(last, seconds).partition("/min")[2] for seconds in (12.0, 19.0, 20.0, 300.0)]
    assert left == [", about 8 s left", ", about 1 s left", "", ""]
    # A copy that waits takes its whole time, however little those that run still need.
    waiting = [*last, Copy(copy=3)]
    assert progress_text(waiting, 19.0).endswith("about 11 s left")
    # One that has ended says little of the others, and one that failed says nothing.
    last[0].state = "failed"
    assert progress_text(last, 12.0).endswith("/min")


def row(number: int, **more: Any) -> Copy:
    plain: dict[str, Any] = {"state": "done", "exit_code": 0, "seconds": 2.0, "tries": 1, "gpu_indexes": (number % 2,)}
    return Copy(**{"copy": number, "log": f"logs/copy-{number}.log", **plain, **more})


def shown(rows: list[Copy]) -> list[Any]:
    unknown = dict.fromkeys(field.name for field in fields(FarmAnswer))
    result = farm_result(FarmAnswer(**{**unknown, "copies": tuple(rows)}))
    # All of them are in the document and in CSV.
    assert [len(result.data.copies), len(result.csv.rows)] == [len(rows)] * 2
    names = ("copy", "state", "gpu_indexes", "tries", "log")
    return [tuple(line[name] for name in names) for line in result.tables[0].rows]


def test_few_copies_have_a_row_each() -> None:
    assert len(shown([row(number) for number in range(24)])) == 24


def test_of_many_copies_those_that_ended_alike_are_one_row() -> None:
    rows = [row(number) for number in range(100)]
    rows[17] = row(17, state="failed", exit_code=3)
    assert shown(rows) == [("0-16, 18-99", "done", (0, 1), 99, "logs/"), (17, "failed", (1,), 1, "logs/copy-17.log")]
    mixed = [row(number, exit_code=number % 2) for number in range(100)]
    assert [line[0] for line in shown(mixed)] == ["50 copies, from 0 on", "50 copies, from 1 on"]
