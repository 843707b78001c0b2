"""The benchmarks, as far as they need no GPU: what the documents take from their results, and the table of co-location."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from benchmarks import backfill, colocation, gpu_farm, gpu_roles
from benchmarks.gpu_script import next_due

PROJECT = Path(__file__).parents[1]
KEPT = PROJECT / "benchmarks" / "results"


def document_lines(start: str) -> list[str]:
    """Return the rows of the document's tables that begin with a text."""
    document = KEPT.joinpath("README.md").read_text()
    return [line for line in document.splitlines() if line.startswith(f"| {start}")]


def test_the_document_has_the_figures_of_roles_and_pauses() -> None:
    roles = json.loads(KEPT.joinpath("h100-roles.json").read_text())
    for start, key in (("`run --production web", "next_to_1"), ("the same, next to two", "next_to_2")):
        (line,) = document_lines(start)
        for user in ("root", "user"):
            found = roles[user][key]
            assert f"{found['p99_relative']:.2f}x" in line
            assert f"{found['others_sum']:.2f}" in line
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


def kept(name: str) -> Any:
    """Return the data of a run."""
    return json.loads(KEPT.joinpath(f"{name}.json").read_text())


def words_of(*page: str) -> str:
    return " ".join(PROJECT.joinpath(*page).read_text().split())


def pairs_measured() -> dict[str, tuple[float, float | None, float]]:
    """Return rate of production, its p99 and rate of the other job, relative to alone, by pair."""
    first, roles, new = kept("pairs-h200"), kept("roles-h200"), kept("colocation-h200")
    # Of the pair that was searched for twice, the first time.
    judged = {row["pair"]: row["judged"] for row in reversed([*first["rows"], *new["rows"]])}
    rows = {name: (row["kept"], row["p99"], row["share"]) for name, row in judged.items()}
    for name, key in (("server at half load", "next_to_1"), ("the same + 2", "next_to_2")):
        row = roles["root"][key]
        rows[name] = (row["rate_relative"], row["p99_relative"], row["others_sum"])
    return rows


def check_what_is_said_of_tune(words: str) -> None:
    """Check what the page says of the searches beside unknown jobs."""
    rows = json.loads(KEPT.joinpath("colocation-h200.json").read_text())["rows"]
    seconds = {
        ways: sorted(round(row["tune"]["seconds"]) for row in rows if row["ways"] == ways)
        for ways in ("slices", "slices,caps")
    }
    assert f"after {seconds['slices'][0]} to {seconds['slices'][-1]} s for slices" in words
    assert f"after {seconds['slices,caps'][0]} to {seconds['slices,caps'][-1]} s for both ways" in words
    assert {row["tune"]["ended"] for row in rows} == {"answer"}
    assert min(row["tune"]["measuring_seconds"] / row["tune"]["seconds"] for row in rows) >= 0.6
    off = {
        row["pair"]: [
            abs(row["tune"]["best"][name] - row["judged"][name]) for name in ("kept", "p99") if row["judged"][name]
        ]
        for row in rows
    }
    assert sorted(pair for pair, figures in off.items() if max(figures) > 0.03) == [
        "random + retrieval",
        "ranking + retrieval",
        "speech + retrieval",
    ]
    assert [f"{max(off[pair]):.2f}" for pair in ("random + retrieval", "ranking + retrieval")] == ["0.08", "0.23"]
    assert f"feeds (off by {max(off['speech + retrieval']):.2f})" in words
    of_others = max(abs(row["tune"]["best"]["opportunistic_share"] - row["judged"]["share"]) for row in rows)
    assert f"was off by up to {of_others:.2f}" in words
    for row in rows:
        best = row["tune"]["best"]
        if row["pair"].startswith("ran"):
            assert best["p99_low"] <= row["judged"]["p99"] <= best["p99_high"]
        if row["grid"]:
            assert colocation.best_of_grid(row) - row["judged"]["share"] <= 0.01
    assert sum(bool(row["grid"]) for row in rows) == 7


def plain_ways(pair: str) -> dict[str, Any]:
    """Return what a pair did without any setting, by way."""
    return {row["pair"]: row["ways"] for row in kept("pairs-h200")["plain"]}[pair]


def check_what_is_said_of_mid(words: str) -> None:
    """Check what the page says of the pairs of the first days, and of the job that scatters most."""
    data = kept("pairs-h200")
    rows = data["rows"]
    met = {
        row["pair"]
        for row in reversed(rows)
        if row["judged"]["kept"] >= row["goal"][0] and (row["goal"][1] or 9) >= (row["judged"]["p99"] or 0)
    }
    assert met == {"infer + big", "infer + membw", "membw + big", "mid + tiny"}
    alone = [row["judged"]["alone"] for row in rows if row["pair"].startswith("mid")]
    alone += [way["alone"] for way in plain_ways("mid + big").values()]
    assert f"at {min(alone):.0f} to {max(alone):.0f} steps per second" in words
    assert f"a second search for mid + big gave it a rate of {rows[-1]['judged']['kept']:.2f}" in words
    assert data["new_xids"] == []


def test_the_short_page_and_the_readme_have_the_figures_of_all_pairs() -> None:
    pairs = pairs_measured()
    page = PROJECT.joinpath("docs", "measurements.md").read_text()
    for name, (rate, p99, share) in pairs.items():
        (line,) = (line for line in page.splitlines() if re.match(rf"\| \w+: {re.escape(name)}", line))
        assert line.endswith(f"| {rate:.2f} | {'-' if p99 is None else f'{p99:.2f}x'} | {share:.2f} |")
    words = " ".join(page.split())
    check_what_is_said_of_tune(words)
    ways = plain_ways("infer + big")
    for way, row in (("time-slicing", "plain time-slicing"), ("MPS", "plain MPS"), ("MPS, low priority", "MPS, low")):
        (line,) = (line for line in page.splitlines() if line.startswith(f"| {row}"))
        assert f"| {ways[way]['kept']:.2f} | {ways[way]['p99']:.1f}x | {ways[way]['share']:.2f} |" in line
    check_what_is_said_of_mid(words)
    rate, _, share = pairs["membw + big"]
    drawn = f"kept {rate:.2f} of its rate beside one that was cut to {share:.2f}"
    assert drawn in words_of("docs", "mps.md")
    assert f"a table of {len(pairs)} pairs of jobs" in words_of("README.md")
    readme = " ".join(PROJECT.joinpath("README.md").read_text().split())
    h100 = json.loads(KEPT.joinpath("colocation-h100.json").read_text())["rows"]
    lowest_h100, lowest_h200 = (
        min((row["judged"]["kept"], row["goal"][0]) for row in rows) for rows in (h100, kept("pairs-h200")["rows"])
    )
    # Of that first try only the page has the figures.
    first_try = re.search(
        r"retrieval \+ chat [\d.]+ / [\d.]+ \(([\d.]+) /[^;]*; ([\d.]+) was asked for\)",
        words_of("benchmarks", "results", "README.md"),
    )
    assert first_try is not None
    assert (
        "the lowest rates of a production job were {:.2f} on an H100 ({:.2f} was asked for), and on an H200 "
        "{} ({} was asked for) and {:.2f} ({:.2f} was asked for)"
    ).format(*lowest_h100, *first_try.groups(), *lowest_h200) in readme
    p99s = [p99 for _, p99, _ in pairs.values() if p99 is not None]
    rates, shares = ([figures[at] for figures in pairs.values()] for at in (0, 2))
    for numbers in (rates, p99s, shares):
        assert f"{min(numbers):.2f} to {max(numbers):.2f}" in readme
    assert f"{ways['time-slicing']['p99']:.1f} times" in readme
    assert f"{pairs['infer + big'][1]:.1f} times" in readme


def test_the_short_page_has_the_times_of_swaps_and_pauses() -> None:
    page = PROJECT.joinpath("docs", "measurements.md").read_text()
    runs = [json.loads(path.read_text()) for path in sorted(KEPT.glob("memory-h200-*.json"))]
    for part, size in (("turns", "2 GiB"), ("large", "40 GiB")):
        times = [
            [second for run in runs for second in run.get(part, {}).get(key, ())]
            for key in ("out_seconds", "back_seconds")
        ]
        ranges = " s, and ".join(f"{min(seconds):.1f} to {max(seconds):.1f}" for seconds in times)
        assert f"`swap out` and `in`, {size} of data" in page
        assert f"| {ranges} s |" in page
    turns, large = (
        [
            (min(times), max(times))
            for key in ("out_seconds", "back_seconds")
            if (times := [second for run in runs for second in run.get(part, {}).get(key, ())])
        ]
        for part in ("turns", "large")
    )
    swapped = f"2 GiB of data took {turns[0][0]:.1f} to {turns[0][1]:.1f} s out and {turns[1][0]:.1f} to {turns[1][1]:.1f} s back"
    swapped += f", 40 GiB about {large[0][0]:.0f} s and {large[1][0]:.0f} to {large[1][1]:.0f} s"
    assert swapped in words_of("docs", "swap.md")
    paused = json.loads(KEPT.joinpath("h100-pause.json").read_text())["root"]
    times = paused["many"]["off_ms"]
    assert f"{times['median']:.1f} ms (median of 10,000; 99.9 %: {times['p99_9']:.1f} ms)" in page
    verbs = json.loads(KEPT.joinpath("colocation-h200.json").read_text())["verbs"]
    pause, resume = (
        statistics.median(row["seconds"] for row in verbs if row["verb"] == verb) for verb in ("pause", "resume")
    )
    assert f"The command takes {pause:.2f} s and `resume` {resume:.2f} s" in page
    status, smi = (
        statistics.median(row["seconds"] for row in verbs if row["verb"] == verb) for verb in ("status", "nvidia-smi")
    )
    assert f"takes {status:.2f} s and `nvidia-smi` {smi:.2f} s" in " ".join(page.split())
    moved = json.loads(KEPT.joinpath("h100-move.json").read_text())
    large = moved["large"]["move_seconds"]
    assert f"| {moved['moves']['median']:.1f} s; {min(large):.1f} to {max(large):.1f} s" in page
    assert (moved["moves"]["count"], moved["moves"]["same"]) == (50, True)
    assert all(rank.startswith("right=True") for rank in moved["ranks"]["ranks"])


def test_the_document_has_the_figures_of_memory() -> None:
    second, last = (json.loads((KEPT / f"memory-h200-{number}.json").read_text()) for number in (2, 7))
    (line,) = document_lines("`--memory 8G`")
    assert f"at most {max(row['most_gib'] for row in last['limit']['rows']):.2f} GiB" in line
    mps, sliced = (row["seconds_over"] for row in last["limit"]["rows"])
    assert f"for {mps:.2f} s under MPS, {sliced:.2f} s under time-slicing" in line
    (line,) = document_lines("24 mixed jobs")
    ways = last["queue"]
    one_by_one = ways["one after another"]["seconds"]
    assert f"{ways['wait']['seconds']:.1f} s of {one_by_one:.1f} s: {ways['wait']['of_serial']:.3f}" in line
    assert f"2 slots {ways['2 slots, time-slicing']['of_serial']:.3f}" in line
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
    assert f"{turns['reached']:.3f}; expected {turns['expected']:.3f}" in line
    assert f"{len(turns['back_seconds'])} switches" in line
    (line,) = document_lines("a pair of 40 GiB")
    pair = last["large"]
    assert pair["exit_codes"] == [0, 0]
    out, back = pair["out_seconds"], pair["back_seconds"]
    assert f"{out[0]} and {out[1]} s out, {back[0]} and {back[1]} s back" in line
    assert f"both {pair['seconds']:.1f} s: {pair['reached']:.3f}" in line
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
    (line,) = document_lines("`run --slice`, `--weight`")
    split = json.loads(KEPT.joinpath("h200-slices.json").read_text())["nobody"]["weight"]["split_percent"]
    assert f"gave {split[0]:.0f}:{split[1]:.0f}" in line


def test_the_document_has_what_adapt_kept() -> None:
    (line,) = document_lines("`run --opportunistic --keep 97%`")
    for number in (1, 2):
        found = json.loads(KEPT.joinpath(f"h200-adapt-{number}.json").read_text())["adapt"]
        assert f"{found['kept']:.3f}" in line
        assert f"{found['train_steps_per_second']:.1f}" in line


def means_of_copies(job: str) -> dict[str, float]:
    """Return the steps per second of all copies of a job together, by way."""
    return {cell["way"]: cell["throughput"]["mean"] for cell in kept("bench-h200")[job]["cells"]}


def test_the_pages_have_the_figures_of_copies_and_farms() -> None:
    page, readme = PROJECT.joinpath("docs", "measurements.md").read_text(), words_of("README.md")
    gains = {}
    for name, start in (("tiny", "8 x `tiny`"), ("mid", "16 x `mid`"), ("small", "8 x a small PyTorch training")):
        means = means_of_copies(name)
        (line,) = (line for line in page.splitlines() if line.startswith(f"| {start}"))
        for way in ("timeslice", "mps", "mps:200/n"):
            assert f"| {means[way]:.0f} " in line
        (chosen,) = (cell["way"] for cell in kept("bench-h200")[name]["cells"] if cell["chosen"])
        gains[name] = means[chosen] / means["timeslice"]
        assert line.endswith(f"| {gains[name]:.1f} times |")
    assert f"did {gains['mid']:.1f} times as much work as under time-slicing" in readme
    assert f"program {gains['tiny']:.1f} times as much." in readme
    alone = {cap: row["products_per_second"] for cap, row in kept("mps-h200")["alone"].items() if cap.isdigit()}
    shares = [alone[cap] / alone["100"] for cap in ("25", "50")]
    assert f"reached {shares[0]:.2f} of its rate on the whole GPU with a cap of 25 %" in " ".join(page.split())
    assert f"and {shares[1]:.2f} with a cap of 50 %" in " ".join(page.split())
    assert (kept("mps-h200")["kill"]["broke"], kept("mps-h200")["kill"]["tries"]) == (0, 20)
    farm, document = json.loads(KEPT.joinpath("h100-farm.json").read_text()), words_of("docs", "farms.md")
    first, second = farm["small"]["farm"]["seconds"]
    assert f"took {second:.0f} s" in document
    assert f"without limits took {farm['small_before']['xargs:16'][0]:.0f} s" in document
    assert f"{first:.0f} and {farm['small_before']['farm'][0]:.0f} s in two runs" in document
    assert f"{farm['large']['xargs -P 24']['failed']} of them ran out of memory" in document
    assert farm["large"]["farm --memory 7G"]["exit_code"] == 0


def test_the_pages_have_the_figures_of_the_line_and_of_slices() -> None:
    page = words_of("docs", "measurements.md")
    ways = json.loads(KEPT.joinpath("memory-h200-7.json").read_text())["queue"]
    assert f"took {ways['wait']['of_serial']:.2f} of the time" in page
    slots, at_once = ways["2 slots, time-slicing"], ways["all at once, time-slicing"]
    assert f"Two at a time took {slots['of_serial']:.2f}" in page
    assert f"all at once, {at_once['out_of_memory']} of 24" in page
    split = json.loads(KEPT.joinpath("h200-slices.json").read_text())["nobody"]["weight"]["split_percent"]
    assert f"gave two trainings {split[0]:.0f} and {split[1]:.0f} %" in words_of("docs", "slices.md")
    kept = [json.loads(KEPT.joinpath(f"h200-adapt-{number}.json").read_text())["adapt"]["kept"] for number in (1, 2)]
    assert f"kept {100 * kept[0]:.1f} and {100 * kept[1]:.1f} % in two runs" in words_of("docs", "tune.md")


def test_the_advice_has_the_figures_of_the_records() -> None:
    pairs, roles = kept("pairs-h200"), kept("roles-h200")
    rules = {
        rule["id"]: f"{rule['text']} {rule.get('source', '')}"
        for rule in yaml.safe_load(PROJECT.joinpath("gpushare", "data", "rules.yaml").read_text())
    }
    next_to = [roles["root"][f"next_to_{number}"] for number in (1, 2)]
    slowed = f"{next_to[0]['p99_relative']:.2f} and {next_to[1]['p99_relative']:.2f} times its p99 alone"
    assert slowed in rules["slices-latency"]
    assert slowed in rules["production-gaps"]
    shares = " and ".join(f"{row['others_sum']:.2f}" for row in next_to)
    assert f"reached {shares} of the rate" in rules["production-gaps"]
    infer, mid = plain_ways("infer + big"), plain_ways("mid + big")
    assert f"kept {mid['MPS']['kept']:.2f} of its rate" in rules["production-plain-mps"]
    assert f"was {infer['MPS']['p99']:.1f} times that alone" in rules["production-plain-mps"]
    assert f"kept {mid['time-slicing']['kept']:.2f} of its rate" in rules["production-time"]
    assert f"was {infer['time-slicing']['p99']:.1f} times that alone" in rules["latency-jitter"]
    beside = {row["pair"]: row for row in reversed(pairs["rows"])}
    assert beside["infer + big"]["tune"]["best"]["setting"] == "cap 85 %, low priority"
    assert f"had {beside['infer + big']['judged']['p99']:.2f} times its p99 alone" in rules["production-pair"]
    drawn = beside["membw + big"]
    assert drawn["tune"]["best"]["setting"] == "cap 50 %"
    assert f"{100 * (1 - drawn['judged']['kept']):.0f} % of its rate" in rules["production-bandwidth-cap"]
    ways = words_of("gpushare", "data", "ways.yaml")
    assert f"had {beside['infer + big']['judged']['p99']:.2f} times its p99 alone if" in ways
    assert f"and {infer['MPS, low priority']['p99']:.1f} times without a cap" in ways
    assert (
        f"kept {mid['time-slicing']['kept']:.2f} of its rate, and small inference had {infer['time-slicing']['p99']:.1f}"
        in ways
    )
    big, membw = (pairs["activity"][job] for job in ("big", "membw"))
    busy = f"kept {big['sm_percent']:.0f} % of the SMs busy at {big['occupancy_percent']:.0f} % occupancy"
    words = words_of("gpushare", "data", "explanations.yaml")
    assert f"{busy}; memory-bound additions ran at {membw['occupancy_percent']:.0f} % occupancy" in words
    paused = pairs["paused"]
    assert f"kept {paused['kept']:.2f} of its rate" in rules["production-first"]
    assert f"other job {paused['share']:.2f};" in rules["production-first"]
    means = [means_of_copies(job) for job in ("tiny", "mid", "small")]
    gains = [row["mps"] / row["timeslice"] for row in means]
    assert f"({min(gains):.1f} to {max(gains):.1f} times time-slicing" in rules["small-same-user"]
    split = json.loads(KEPT.joinpath("h200-slices.json").read_text())["nobody"]["weight"]["split_percent"]
    assert f"gave {split[0]:.0f} and {split[1]:.0f} %" in rules["weights-slices"]


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
        due = next_due(due, at, 2 * gpu_roles.REQUEST_MS / 1000, full=full)
    assert max(waits) <= 2 * gpu_roles.REQUEST_MS / 1000


def row(share: float, *grid: float, p99: float = 1.1) -> dict[str, Any]:
    """Return a row of `benchmarks.colocation`: what was chosen, and a grid whose last point misses the goal."""
    chosen = {"setting": "slice 100us, production slice 16ms", "kept": 1.0, "p99": 1.12, "opportunistic_share": share}
    points = [{"kept": 1.0, "p99": p99, "share": each} for each in grid]
    return {
        "pair": "half + fed",
        "goal": [0.95, 1.3],
        "tune": {"best": chosen, "nearest": None, "seconds": 31.4, "ended": "answer"},
        "judged": {"kept": 0.99, "p99": 1.14, "share": share},
        "grid": [*points, {"kept": 1.0, "p99": 1.5, "share": 0.9}] if grid else [],
    }


def test_a_choice_stands_beside_the_best_of_the_grid() -> None:
    assert colocation.best_of_grid(row(0.5, 0.4, 0.52)) == 0.52
    assert colocation.best_of_grid(row(0.5)) is None
    lines = colocation.render({"rows": [row(0.5, 0.52)]}).splitlines()
    assert lines[2] == (
        "| half + fed: 0.95, p99 1.3x | 31, answer | slice 100us, production slice 16ms | 1.00, 1.12x / 0.50"
        " | 0.99, 1.14x / 0.50 | 0.52 |"
    )


def test_a_job_waits_only_where_it_could_delay_an_earlier_one() -> None:
    counts = [backfill.refusals(backfill.small_mix(seed, 12)) for seed in range(3)]
    assert all(0 < refused == needed for refused, needed in counts)


def test_no_schedule_is_shorter_than_the_least() -> None:
    jobs = backfill.small_mix(3, 6)
    for gpus in (1, 2):
        rules = backfill.makespan(jobs, backfill.simulate(jobs, gpus, backfill.gpushare(timed=False)))
        first = backfill.makespan(jobs, backfill.simulate(jobs, gpus, backfill.first_come()))
        assert backfill.bound(jobs, gpus) <= backfill.least_in_hindsight(jobs, gpus) <= first
        assert backfill.bound(jobs, gpus) <= backfill.least_by_choice(jobs, gpus) <= rules


def test_what_a_job_of_a_gpu_benchmark_checks_at_its_end_counts(tmp_path: Path) -> None:
    code = (
        "import argparse\n"
        "from benchmarks.gpu_script import STOP, WRONG, State, Work, run_job\n"
        f"state = State({str(tmp_path / 'state')!r}); state[STOP] = 1\n"
        "options = argparse.Namespace(state=state.path, rehearse=True, job='train')\n"
        "run_job(options, {'pretended': lambda _: Work(lambda: None, last_check=lambda: False)})\n"
        "print('wrong', state[WRONG])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, timeout=60, check=False
    )
    assert "wrong 1" in done.stdout, done.stderr


def test_the_daemon_of_a_farm_and_its_clients_name_the_gpu_by_its_uuid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that has only GPU 1 calls it 0: a client that asks for 1 finds none."""
    environments: list[dict[str, str]] = []
    monkeypatch.setattr(gpu_farm, "GPU", "1")
    monkeypatch.setattr(gpu_farm, "Gpu", lambda **_: SimpleNamespace(about=lambda: {"uuid": "GPU-1"}))
    monkeypatch.setattr(subprocess, "run", lambda *_, env, **_more: environments.append(env))
    part: Any = SimpleNamespace(rehearse=False, directory=str(tmp_path))
    with gpu_farm.daemon(part) as variables:
        environments.append(variables)
    assert {environment["CUDA_VISIBLE_DEVICES"] for environment in environments} == {"GPU-1"}
    assert len(environments) == 3
