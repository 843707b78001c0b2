"""The benchmark of co-location, as far as it needs no GPU: the harness with small CPU programs, the choice, the document."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import colocation
from benchmarks.colocation import main, read_rows
from benchmarks.colocation_rows import (
    AS_IT_IS,
    GOALS,
    LOW,
    MPS,
    OTHERS,
    PRODUCTION,
    Setting,
    Target,
    batches,
    choose,
    known_settings,
    targets,
)
from benchmarks.colocation_table import HEADING, Pair, corrected, render, section, verdicts

SLICES = Setting("slices", production_us=16000, other_us=100)
CAP = Setting("caps", threads=50.0, low=True)


def cell(setting: Setting, kept: float, p99: float | None, other: float) -> dict[str, Any]:
    between = {f"{name}_{end}": None for name in ("kept", "p99", "other") for end in ("low", "high")}
    found = {"setting": asdict(setting), "kept": kept, "p99": p99, "other": other, "p50_ms": 0.5, "p99_ms": 1.0}
    return {**found, **between, "mhz": 1500, "watts": 690, "tune": setting != AS_IT_IS}


def row(kind: str, production: str, other: str, *cells: dict[str, Any], start: int = 1) -> dict[str, Any]:
    alone = {"rate": 100.0, "p50_ms": 0.4, "p99_ms": 0.8, "mhz": 1980, "watts": 200}
    wanted = targets(production, other, 2 if kind == "two" else 1)
    picks = [choose(cells, target) for target in wanted] if start == 1 else []
    again = [next(one for one in cells if one["setting"] == asdict(pick[0])) for pick in picks if pick]
    return {
        "kind": kind,
        "production": production,
        "other": other,
        "start": start,
        "taken": "2026-11-22 18:00:00",
        "gpu": "GPU-1",
        "gpu_name": "NVIDIA H200",
        "driver": "580.159.04",
        "window": 3.0,
        "cells": list(cells),
        "choices": [{"target": asdict(t), "meets": True, "cell": one} for t, one in zip(wanted, again, strict=False)],
        "alone": {"outside": alone, "inside": alone},
        "other_alone": {"outside": [10.0, 10.2], "inside": [10.1]},
    }


def infer_and_big(p99: float, other: float, **words: Any) -> dict[str, Any]:
    cells = (cell(AS_IT_IS, 1.0, 3.1, 0.97), cell(MPS, 1.0, 6.1, 0.99), cell(LOW, 1.0, 3.9, 0.99))
    return row("pair", "infer", "big", *cells, cell(SLICES, 1.0, p99, other), cell(CAP, 1.0, 1.05, 0.6), **words)


def test_all_pairs_are_measured_those_with_goals_first() -> None:
    work = batches(3)
    keys = [item.key for batch in work for item in batch.items]
    assert len(set(keys)) == len(keys)
    pairs = {(item.production, item.other) for batch in work for item in batch.items if item.kind == "pair"}
    assert pairs >= {(one, other) for one in PRODUCTION for other in OTHERS} - {("membw", "membw")}
    first = [item for batch in work[:3] for item in batch.items]
    assert {(item.production, item.other, item.others) for item in first if item.production} == set(GOALS)


def test_the_choice_is_the_most_for_the_other_that_keeps_the_target() -> None:
    cells = [cell(AS_IT_IS, 1.0, 3.1, 0.97), cell(SLICES, 1.0, 1.1, 0.96), cell(CAP, 1.0, 1.0, 0.6)]
    assert choose(cells, Target(0.97, 1.15)) == (SLICES, True)
    assert choose(cells, Target(0.97, 1.05)) == (CAP, True)
    # None keeps it: the nearest.
    assert choose(cells, Target(0.97, 0.9)) == (CAP, False)
    assert choose([], Target()) is None


def test_a_later_start_repeats_the_best_of_each_way() -> None:
    cells = infer_and_big(1.1, 0.96)["cells"] + [cell(Setting("caps", threads=80.0, low=True), 1.0, 2.0, 0.9)]
    assert known_settings(cells, [Target(0.97, 1.15)]) == [AS_IT_IS, MPS, LOW, SLICES, CAP]


@pytest.mark.parametrize(("p99", "other", "met"), [(1.10, 0.96, True), (1.30, 0.96, False), (1.10, 0.90, False)])
def test_a_goal_is_met_or_has_a_reason(p99: float, other: float, met: bool) -> None:
    found = next(one for one in verdicts([infer_and_big(p99, other)]) if one.goal.startswith("infer + big"))
    assert found.met is met
    assert bool(found.reason) is not met
    if not met:
        assert "from 1980 MHz alone to 1500 at 690 W" in found.reason


def test_random_arrivals_are_compared_with_the_window_of_the_same_length() -> None:
    one = row("pair", "bert-eager", "big", {**cell(AS_IT_IS, 0.9, 1.2, 0.9), "rate": 100.0})
    one["alone"]["outside"] = {
        **one["alone"]["outside"],
        "rates": [90.0, 110.0, 120.0, 80.0, 150.0, 130.0, 110.0, 120.0],
    }
    found = Pair((corrected(one),)).measured(AS_IT_IS)
    assert found is not None
    assert found.kept.value == pytest.approx(1.0)


def test_another_job_that_did_nothing_has_a_rate_of_zero() -> None:
    starved = {**cell(SLICES, 1.0, 1.1, 0.0), "other": None}
    found = Pair((corrected(row("pair", "mid", "big", starved)),)).measured(SLICES)
    assert found is not None
    assert found.plain == "1.10x 1.00 0.00"


def test_what_was_not_measured_is_said() -> None:
    assert {one.met for one in verdicts([])} == {None}
    assert section([]).splitlines() == [HEADING, "", "Not measured yet."]


def test_the_choice_is_judged_by_later_measurements() -> None:
    rows = [infer_and_big(1.1, 0.96), infer_and_big(1.2, 0.86, start=2)]
    choice = Pair(tuple(rows)).choice(Target(0.97, 1.15))
    assert choice is not None
    assert (choice.setting, round(choice.other.value, 2), choice.other.half) == (SLICES, 0.91, pytest.approx(0.05))
    # No other setting is better, but it is not enough for the goal of the pair.
    assert [one.met for one in verdicts(rows)[:2]] == [True, False]


def test_weights_and_pauses_are_judged() -> None:
    weights = {
        **row("weights", "", "bert-train"),
        "cells": [
            {"slices": [4364, 2048], "by": "gpushare", "shares": [0.67, 0.31], "sum": 0.98},
            {"slices": [6144, 2048], "by": "slices", "shares": [0.75, 0.23], "sum": 0.98},
        ],
    }
    times = {"median": 1.0, "p99": 1.2, "p99.9": 1.9, "max": 2.5}
    verbs = [{"verb": "pause", "seconds": 0.3, "rc": 0}]
    pause = {**row("pause", "", "resnet-train"), "count": 10_000, "off": times, "on": times, "off_in_driver": times}
    pause |= {"rate_after": 1.0, "verbs": verbs}
    found = [one for one in verdicts([weights, pause]) if one.met is not None]
    assert [one.met for one in found] == [True, True, True]
    assert "slices 6144:2048 us give 77:23" in found[0].measured


def test_the_section_is_written_over_an_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "measurements.md"
    path.write_text("# Measurements\n\n## Start-up time\n\ntext\n")
    for p99 in (1.3, 1.1):
        render([infer_and_big(p99, 0.96)], path)
    text = path.read_text()
    assert text.count(HEADING) == 1
    assert "1.10x 1.00 0.96" in text
    assert "1.30x 1.00 0.96" not in text
    assert "Tally" in text
    assert text.endswith("## Start-up time\n\ntext\n")


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text('{"kind": "pair"}\n{"kind": "pa')
    assert read_rows([path, tmp_path / "none"]) == [{"kind": "pair"}]


@pytest.mark.slow
def test_programs_of_the_cpu_are_measured_and_not_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    words = ["--fake", "--window", "0.05", "--starts", "1", "--only", "resnet-train", "--gpus", "1", "--out", str(out)]
    assert main([*words, "--seconds", "60"]) == 0
    rows = read_rows([out])
    assert {row["kind"] for row in rows} == {"pair", "pause"}
    assert len(rows) == 2 + len(PRODUCTION)
    first = rows[0]
    assert {one["setting"]["way"] for one in first["cells"]} == {"timeslice", "slices", "mps", "caps"}
    assert first["choices"]
    assert len(json.dumps(first)) < 20_000
    capfd.readouterr()
    assert main([*words, "--seconds", "60"]) == 0
    assert read_rows([out]) == rows
    assert section(rows).count(" + resnet-train |") >= len(PRODUCTION)


def test_no_row_begins_that_would_end_too_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.jsonl"
    assert main(["--fake", "--seconds", "3", "--gpus", "1", "--out", str(out)]) == 0
    assert not out.exists()
    monkeypatch.setattr(colocation, "xids", lambda: ["Xid 31"])
    worker = object.__new__(colocation.Worker)
    worker.options, worker.xids = type("Options", (), {"out": out}), []
    with pytest.raises(colocation.Stop):
        worker.check_xids()
    assert read_rows([out])[0]["kind"] == "xid"


@pytest.mark.parametrize(
    "path", sorted(Path("benchmarks/results").glob("colocation-*.jsonl")), ids=lambda path: path.stem
)
def test_the_document_has_the_section_of_the_results(path: Path) -> None:
    rows = read_rows(sorted(path.parent.glob("colocation-*.jsonl")))
    assert section(rows) in Path("docs/measurements.md").read_text()
