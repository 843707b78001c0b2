"""The benchmark of sharing, as far as it needs no GPU: its pieces, its file of results, its table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.pairs import FARMS, PAIRS
from benchmarks.sharing import PARTS, add_to, figures, main
from benchmarks.sharing_bench import Bench
from benchmarks.sharing_gpus import pieces
from benchmarks.sharing_table import table

from benchmarks import gpu_roles, sharing
from gpushare.base.selection import select_one
from gpushare.connect import connect
from gpushare.measure.search import Setting, Trial
from gpushare.measure.statistics import Ratio
from gpushare.measure.tune import TrialReport

PROJECT = Path(__file__).parents[1]
KEPT = PROJECT / "benchmarks" / "results"
RESULTS = sorted(KEPT.glob("sharing-*.json"))


@pytest.fixture
def bench() -> Bench:
    """Return all of it, on a simulated GPU."""
    host = connect("sim:h200")
    return Bench(host, select_one("0", host.nvml.sweep()), pretend=True, window=0.1)


def test_the_pieces_are_all_of_the_work(bench: Bench) -> None:
    found = pieces(bench, PARTS)
    assert len(found) == 1 + len(PAIRS) + sum(pair.compared for pair in PAIRS) + 1 + len(FARMS)
    assert len({tuple(one) for one in found}) == len(found)
    # What counts latencies comes first, and what loads the CPU last.
    assert found[:2] == [["--parts", "jobs"], ["--parts", "pairs", "--pairs", "infer+big"]]
    assert [one[1] for one in found[-len(FARMS) :]] == ["farm"] * len(FARMS)


def test_two_runs_add_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    add_to(path, {"gpu": "H200", "pairs": {"a": 1}})
    add_to(path, {"gpu": "H200", "pairs": {"b": 2}, "farm": {}})
    add_to(path, {"pairs": {"a": 3}})
    assert json.loads(path.read_text()) == {"gpu": "H200", "pairs": {"a": 3, "b": 2}, "farm": {}}


@pytest.mark.parametrize(
    "words", [("--parts", "pears"), ("--pairs", "mid+bug"), ("--farms", "huge"), ("--pretend", "-g", "0,1")]
)
def test_what_it_does_not_know_is_an_error(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_a_second_search_stands_beside_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.json"
    row = {"setting": "s", "kept": 0.98, "kept_interval": [0.9, 1.0], "p99": None, "opportunistic": 0.8}
    for kept, words in ((0.98, []), (0.91, ["--again"])):
        monkeypatch.setattr(
            sharing, "pairs", lambda bench, found, keep, kept=kept: found.update(a={**row, "kept": kept})
        )
        assert main(["--pretend", "--into", str(path), "--parts", "pairs", *words]) == 0
    results = json.loads(path.read_text())
    assert (results["pairs"]["a"]["kept"], results["again"]["a"]["kept"]) == (0.98, 0.91)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_document_shows_what_is_kept(path: Path) -> None:
    """Each pair and farm of the results is in docs/measurements.md with its numbers."""
    results: dict[str, Any] = json.loads(path.read_text())
    document = Path(__file__).parents[1].joinpath("docs", "measurements.md").read_text()
    rows = [line for line in document.splitlines() if "|" in line]

    def row(name: str, *numbers: str) -> bool:
        plain = [line.replace("`", "") for line in rows]
        return any(line.startswith(f"| {name} ") and all(number in line for number in numbers) for line in plain)

    # A way is kept as "infer + big: MPS".
    measured = [(name.partition(":")[0], one) for part in ("pairs", "ways") for name, one in results[part].items()]
    for name, one in [*measured, *((f"{name}, again", one) for name, one in results["again"].items())]:
        low, high = one["kept_interval"]
        other = f"{one['opportunistic']:.2f}"
        if between := one.get("opportunistic_interval"):
            other += f" ({between[0]:.2f}-{between[1]:.2f})"
        assert row(name, f"{one['kept']:.2f} ({low:.2f}-{high:.2f})", f"| {other} |", f"| {one['setting']} |")
        assert one["p99"] is None or row(name, f"{one['p99']:.2f}x")
    for name, one in results["farm"].items():
        assert row(name, f"{one['gain']:.2f}x", *(f"{one['means'][way]:.0f}" for way in one["means"]))
    one = results["pause"]
    assert row(one["pair"], f"{one['kept']:.2f}", f"{one['opportunistic']:.2f}")
    # Beneath the tables: earlier runs, what tune saw, a duty cycle, and how far a job alone moved.
    text = " ".join(document.replace("`", "").split())
    for one in results.get("earlier", {}).values():
        assert f"had {one['gain']:.3f} times time-slicing" in text
    for one in (one for found in results["earlier_pairs"].values() for one in found):
        low, high = one["kept_interval"]
        assert f"{one['kept']:.3f} ({low:.2f}-{high:.2f}) with {one['opportunistic']:.2f}" in text
    for part in table(results).partition("| job alone |")[2].splitlines()[2:]:
        assert part in [line.replace("`", "") for line in rows]
    searches = (results["pairs"], results["again"])
    for which, one in zip(("", ", again"), (search["membw + big"] for search in searches), strict=True):
        assert row(f"membw + big{which}", f"no ({one['opportunistic']:.3f})")
        (best,) = (trial for trial in one["curve"] if trial["chosen"])
        assert f"{best['kept']:.3f} with {best['opportunistic_share']:.3f}" in text
    trials = [one for search in searches for one in search["membw + big"]["curve"]]
    spared = [
        one
        for one in trials
        if (one["low_priority"] and one["threads_percent"] <= 82.5) or one["production_threads_percent"]
    ]
    costs = [
        [(1 - one["kept"]) / one["opportunistic_share"] / 100 for one in some]
        for some in (spared, [one for one in trials if one not in spared])
    ]
    assert f"costs membw {min(costs[0]):.4f} to {max(costs[0]):.4f} in the best settings" in text
    assert f"and {min(costs[1]):.4f} and more in others" in text
    (part,) = (one for one in trials if one["duty_percent"] == 85)
    assert f"{part['kept']:.3f} with {part['opportunistic_share']:.3f}, once" in text
    (best,) = (one for one in results["pairs"]["infer + membw"]["curve"] if one["setting"] == "no cap")
    assert f"its p99 was {best['p99']:.1f}x" in text
    took = [one["tune_seconds"] / 60 for search in searches for one in search.values()]
    assert f"A search took {min(took):.0f} to {max(took):.0f} minutes" in text
    whole, part = results["duty"]["curve"]
    assert f"the loss fell to {100 * (1 - part['kept']) / (1 - whole['kept']):.0f} %" in text
    assert f"rate to {100 * part['opportunistic_share'] / whole['opportunistic_share']:.0f} %" in text
    assert f"kept {whole['kept']:.2f} with {whole['opportunistic_share']:.2f}" in text
    assert f"for {part['duty_percent']:g} % of the time, as tune found, {part['kept']:.2f} with" in text
    for one in (results["pairs"]["mid + big"], results["ways"]["mid + big: time-slicing"]):
        alone = one["production_windows_alone"]
        assert f"from {min(alone):.0f} to {max(alone):.0f}" in text
    starts = [rate for search in searches for rate in search["mid + tiny"]["opportunistic_alone_starts"]]
    assert f"from {min(starts):.0f} to {max(starts):.0f} a second" in text


def report(kept: float, other: float | None, p99: float | None = None) -> TrialReport:
    """Return a start of the other job."""
    return TrialReport(
        trial=Trial(setting=Setting(threads=60.0), kept=kept, error=0.01, p99=p99, opportunistic=other),
        kept=Ratio(value=kept, low=kept - 0.02, high=kept + 0.02, error=0.01),
        rounds=8,
        alone_rate=100.0,
        together_rate=100.0 * kept,
        alone_p99=None if p99 is None else 0.5,
        together_p99=None,
        alone_rates=(100.0, None),
        together_rates=(100.0 * kept,),
        window_seconds=0.6,
    )


def test_several_starts_are_one_figure() -> None:
    found = figures([report(0.96, 80.0, 1.2), report(1.0, 70.0, 1.0)], [100.0, 90.0])
    assert (found["setting"], found["starts"], found["repeats"]) == ("cap 60 %, low priority", 2, 16)
    # They lie further apart than their own errors say.
    assert found["kept_interval"] == pytest.approx([0.98 - 12.706 * 0.02, 0.98 + 12.706 * 0.02])
    assert (found["kept"], found["p99"]) == (pytest.approx(0.98), pytest.approx(1.1))
    assert found["p99_starts"] == [1.2, 1.0]
    assert found["opportunistic"] == pytest.approx(75 / 95)
    low, high = found["opportunistic_interval"]
    assert low < 75 / 95 < high
    assert (found["production_alone"], found["production_p99_alone"], found["window_seconds"]) == (100.0, 0.5, 0.6)
    assert found["production_windows_alone"] == [100.0, None, 100.0, None]
    # What printed nothing beside production has no share; one start has no interval.
    assert figures([report(0.96, None)], [100.0])["opportunistic"] is None
    one = figures([report(0.96, 80.0)], [100.0])
    assert (one["opportunistic"], one["opportunistic_interval"]) == (0.8, [None, None])
    assert one["kept_interval"] == pytest.approx([0.94, 0.98])


def test_the_table_judges_by_the_goals() -> None:
    pair = {"setting": "s", "kept": 0.98, "kept_interval": [0.9, 1.0], "p99": 1.2, "opportunistic": 0.8}
    goal = {"rate": 0.97, "p99": 1.1, "opportunistic": 0.75}
    results = {
        **dict.fromkeys(("gpu", "driver", "gpushare", "date"), "x"),
        "pairs": {
            "slow": {**pair, "goal": goal},
            "good": {**pair, "goal": {**goal, "p99": 1.3}},
            "lost": {**pair, "goal": {**goal, "p99": None, "rate": 0.99}},
        },
        "farm": {
            "8 x a": {"pick": "mps", "gain": 4.6, "of_best": 0.98, "goal": 4.5},
            "8 x b": {"pick": "mps", "gain": 4.6, "of_best": 0.96, "goal": 4.5},
            "8 x c": {"pick": None, "gain": None, "of_best": None, "goal": 4.5},
        },
    }
    alone = {"rate": 100.0, "spread": 0.01, "p50": 0.375, "p99": 0.5, "sm_percent": 17.5, "occupancy_percent": 3.0}
    results["again"] = {"slow": {**pair, "opportunistic_interval": [0.7, 0.9], "goal": goal}}
    results["jobs"] = {"mid": {**alone, "tensor_percent": None, "dram_percent": 5.0, "watts": 195.4}}
    assert table(results).endswith("| mid | 100.0 (1.0 %) | 0.38, 0.50 ms | 17.5 | 3 | - | 5 | 195 |\n")
    del results["jobs"]
    verdicts = {
        line.split(" | ")[0].lstrip("| "): line.rstrip(" |").rsplit("| ", 1)[1]
        for line in table(results).splitlines()[4:]
    }
    assert "| slow, again | s | 0.980 (0.90-1.00) | 1.20x | 0.80 (0.70-0.90) |" in table(results)
    assert verdicts == {
        "slow": "no",
        "slow, again": "no",
        "good": "yes",
        "lost": "no",
        "8 x a": "yes",
        "8 x b": "no",
        "8 x c": "no",
    }


def document_lines(start: str) -> list[str]:
    """Return the rows of the document's tables that begin with a text."""
    document = PROJECT.joinpath("docs", "measurements.md").read_text()
    return [line for line in document.splitlines() if line.startswith(f"| {start}")]


def test_the_document_has_the_figures_of_roles_and_pauses() -> None:
    roles = json.loads(KEPT.joinpath("h100-roles.json").read_text())
    for start, key in (("`run --production web", "next_to_1"), ("the same, next to two", "next_to_2")):
        (line,) = document_lines(start)
        for who in ("root", "user"):
            found = roles[who][key]
            assert f"{found['p99_relative']:.2f}x" in line
            assert f"{found['others_sum']:.2f}".lstrip("0") in line
            assert found["rate_relative"] == 1
    paused = json.loads(KEPT.joinpath("h100-pause.json").read_text())["root"]
    for start, key in (("the call that pauses, 10,000", "off_in_driver_ms"), ("the same, from the caller", "off_ms")):
        (line,) = document_lines(start)
        times = paused["many"][key]
        assert f"median {times['median']:.2f} ms, 99.9 % {times['p99_9']:.2f}, at most {times['max']:.1f}" in line
    assert (paused["many"]["pauses"], paused["many"]["wrong_results"]) == (10_000, 0)
    (line,) = document_lines("the verb `pause` end to end, 8 times")
    verbs = paused["verbs"]
    assert f"{min(verbs['pause_seconds']):.2f} to {max(verbs['pause_seconds']):.2f} s" in line
    assert f"{min(verbs['resume_seconds']):.2f} to {max(verbs['resume_seconds']):.2f} s" in line


def test_the_document_has_the_figures_of_memory() -> None:
    second, last = (json.loads((KEPT / f"memory-h200-{number}.json").read_text()) for number in (2, 7))
    (line,) = document_lines("`--memory 8G`")
    assert f"at most {max(row['most_gib'] for row in last['limit']['rows']):.2f} GiB" in line
    mps, sliced = (row["seconds_over"] for row in last["limit"]["rows"])
    assert f"for {mps:.2f} s under MPS, {sliced:.2f} s under time-slicing" in line
    (line,) = document_lines("24 mixed jobs")
    ways = last["queue"]
    one_by_one = ways["one after another"]["seconds"]
    assert f"{ways['wait']['seconds']:.1f} s of {one_by_one:.1f} s: {ways['wait']['of_serial']:.3f}".replace(
        "0.", "."
    ) in (line.replace("0.", "."))
    assert f"2 slots {ways['2 slots, time-slicing']['of_serial']:.3f}".replace("0.", ".") in line
    assert f"{ways['all at once, time-slicing']['out_of_memory']} of 24 were out of memory" in line
    (line,) = document_lines("24 jobs of 20 GiB")
    assert f"{last['any']['seconds']:.1f} s, {last['any']['on_each'][0]} on each" in line
    (line,) = document_lines("100 swaps")
    for swaps, count in ((second["swaps"], 100), (last["swaps"], 70), (last["as_a_plain_user"]["swaps"], 15)):
        assert f"{swaps['seconds_each']:.2f} s each" in line
        assert (swaps["swaps"], swaps["failed"], swaps["identical"]) == (count, [], True)
    (line,) = document_lines("gpushare killed on the way")
    assert f"at {len(last['kill']['rows'])} moments" in line
    assert last["kill"]["identical"]
    (line,) = document_lines("two jobs of 2 GiB")
    turns = last["turns"]
    assert abs(turns["reached"] - turns["expected"]) <= 0.03
    assert f"{turns['reached']:.3f}; expected {turns['expected']:.3f}".replace("0.", ".") in line
    assert f"{len(turns['back_seconds'])} switches" in line
    (line,) = document_lines("a pair of 40 GiB")
    pair = last["large"]
    assert pair["exit_codes"] == [0, 0]
    out, back = pair["out_seconds"], pair["back_seconds"]
    assert f"{out[0]} and {out[1]} s out, {back[0]} and {back[1]} s back" in line
    assert f"both {pair['seconds']:.1f} s: {pair['reached']:.3f}".replace("0.", ".") in line
    (line,) = document_lines("`run --swap idle=5s`")
    assert f"took {last['idle']['first_call_seconds'][1]:.1f} and {last['idle']['first_call_seconds'][2]:.1f} s" in line
    assert last["idle"]["least_gib_held"] == 0
    (line,) = document_lines("`run --opportunistic --yield swap`")
    served = last["production"]
    assert f"started after {served['production_started_after_seconds']:.1f} s" in line
    assert f"back {served['batch_back_after_seconds']:.1f} s after" in line
    assert (served["production_exit_code"], served["growing_exit_code"]) == (0, 0)


def test_the_document_has_the_pauses_and_slices_of_a_plain_user() -> None:
    (line,) = document_lines("`pause` and `resume` as uid 65534")
    for name in ("h200-pause-2", "h200-pause"):
        found = json.loads(KEPT.joinpath(f"{name}.json").read_text())["user"]
        pauses, resumes = found["verbs"]["pause_seconds"], found["verbs"]["resume_seconds"]
        assert f"{min(pauses):.2f} to {max(pauses):.2f}" in line
        assert f"{min(resumes):.2f} to {max(resumes):.2f}" in line
        assert found["many"]["wrong_results"] == 0
    (line,) = document_lines("`gpushare timeslice keep`")
    kept = json.loads(KEPT.joinpath("h200-keep.json").read_text())
    assert kept["wrong"] == []
    assert f"after {kept['found']['set after']:.2f} and {kept['found']['as a user: set after']:.2f} s" in line
    assert f"process after {kept['found']['a second context, after']:.2f} s" in line
    (line,) = document_lines("`run --slice`, `--weight`")
    split = json.loads(KEPT.joinpath("h200-slices.json").read_text())["nobody"]["weight"]["split_percent"]
    assert f"gave {split[0]:.0f}:{split[1]:.0f}" in line


def test_the_document_has_what_adapt_kept() -> None:
    (line,) = document_lines("`run --opportunistic --keep 97%`")
    for number in (1, 2):
        found = json.loads(KEPT.joinpath(f"h200-adapt-{number}.json").read_text())["adapt"]
        assert f"{found['kept']:.3f}".lstrip("0") in line
        assert f"{found['train_steps_per_second']:.1f}" in line


def test_the_document_has_what_tune_found_on_the_same_day() -> None:
    found = json.loads(KEPT.joinpath("h200-tune.json").read_text())
    for pair, one in ((key, value) for key, value in found.items() if isinstance(value, dict)):
        (line,) = document_lines(f"`gpushare tune` itself, slices first, {pair} ")
        best = one["best"]
        setting = f"{best['production_slice_us']}:{best['other_slice_us']}"
        figures = f"p99 {best['p99']:.2f}x, rate {best['kept']:.2f}, the other {best['opportunistic_share']:.2f}"
        assert f"{setting}: {figures}, in {one['seconds']:.0f} s" in line


@pytest.mark.parametrize("seconds", [0.0059, 0.02])
def test_production_with_phases_rests_no_longer_after_work_without_gaps(seconds: float) -> None:
    """A request that is due comes within one interval, in whichever phase it is, and however long a step takes."""
    at = due = 0.0
    waits = []
    while at < 4 * gpu_roles.PHASE_SECONDS:
        full = gpu_roles.phase_of(0.0, at) == 1
        if not full:
            waits.append(max(0.0, due - at))
            at = max(at, due)
        at += seconds
        due = gpu_roles.next_due(due, at, full=full)
    assert max(waits) <= 2 * gpu_roles.REQUEST_MS / 1000
