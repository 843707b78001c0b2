"""How well gpushare shares one GPU: ``python -m benchmarks.sharing [--parts jobs,pairs,ways,pause,farm] [-g GPU]``.

All settings are found by ``gpushare tune`` and ``gpushare bench``, none is set by hand. Parts:

- ``jobs``: what each job does alone, and what it draws of the GPU.
- ``pairs``: for each pair of a production and an opportunistic job, what ``gpushare tune`` finds, and then that setting
  measured again: 24 times and more together and alone in turn beside one production process.
- ``ways``: the pairs that published systems are compared by, under time-slicing, MPS, and MPS with low priority.
- ``farm``: copies of one job under each way, by ``gpushare bench``.
- ``pause``: a production job that works 2 s in 10 without MPS, and an opportunistic one that stands still meanwhile.

The figures go to benchmarks/results/sharing-GPU-DATE.json; what is run again replaces itself in ``--into FILE``, or, with
``--again``, is kept beside it: one search says little where the machine is unsteady. Several GPUs of one host (``-g 0,1``)
share the work: each takes the next pair, farm or pause.
``--pretend`` rehearses all of it on a simulated H200 with jobs whose need is known.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from benchmarks.pairs import FARMS, PAIRS, Pair
from benchmarks.sharing_bench import RATE, Bench, Keep, alone_rate, now
from benchmarks.sharing_gpus import on_all, pieces
from benchmarks.sharing_jobs import jobs
from benchmarks.sharing_pause import pause
from benchmarks.sharing_table import table
from gpushare import __version__
from gpushare.base.selection import select_one
from gpushare.connect import connect
from gpushare.measure.metric import Metric
from gpushare.measure.pair import TuneOptions
from gpushare.measure.search import Goal, Search, Setting, judge
from gpushare.measure.statistics import ratio, summarize
from gpushare.measure.tune import TrialReport, TuneReporter, compare
from gpushare.mps.limits import Limits
from gpushare.run.plain import PlainShare
from gpushare.run.share import Share, open_mps_share

PARTS: Final = ("jobs", "pairs", "ways", "pause", "farm")
PRETENDED_HOST: Final = "sim:2xh200"


class Lines(TuneReporter):
    """Says on stderr what goes on."""

    def doing(self, what: str) -> None:
        """Say it."""
        sys.stderr.write(f"  {what}\n")

    def measured(self, report: TrialReport) -> None:
        """Say what was measured: a run that is cut off keeps no more than that."""
        rate = report.trial.opportunistic
        other = "-" if rate is None else f"{rate:.1f} per second"
        sys.stderr.write(
            f"  production {report.kept.value:.3f} of alone; the other {other} ({report.rounds} windows)\n"
        )


def options_of(bench: Bench, pair: Pair) -> TuneOptions:
    """Return how a pair is measured at given settings, for each start of the opportunistic job."""
    rounds = pair.windows // pair.starts
    return TuneOptions(
        production=bench.job(pair.production),
        opportunistic=bench.job(pair.opportunistic),
        search=Search(goal=Goal(keep=pair.keep / 100, p99_factor=pair.p99)),
        metric=Metric(pattern=bench.metric(pair.production)),
        opportunistic_metric=Metric(pattern=bench.metric(pair.opportunistic)),
        window_seconds=bench.window,
        rounds=rounds,
        most_rounds=rounds,
    )


def pairs(bench: Bench, found: dict[str, Any], keep: Keep) -> None:
    """Tune every pair, and measure what was found again."""
    for pair in bench.pairs:
        sys.stderr.write(f"{pair.name}: tune\n")
        words = ["--production", " ".join(bench.job(pair.production))]
        words += ["--opportunistic", " ".join(bench.job(pair.opportunistic))]
        words += ["--keep", f"{pair.keep:g}%", "--name", f"bench-{pair.production}"]
        words += [] if bench.window is None else ["--window", f"{bench.window:g}s"]
        metric, other = bench.metric(pair.production), bench.metric(pair.opportunistic)
        words += [] if metric is None else ["--metric", metric]
        words += [] if other is None else ["--opportunistic-metric", other]
        words += [] if pair.p99 is None else ["--p99", f"{pair.p99}x"]
        tuned = bench.gpushare("tune", "-g", str(bench.device.gpu.index), *words)
        chosen = tuned["best"] or tuned["nearest"]
        setting = Setting(
            threads=chosen["threads_percent"],
            low=chosen["low_priority"],
            production_slice_us=chosen["production_slice_us"],
            other_slice_us=chosen["other_slice_us"],
        )
        sys.stderr.write(f"{pair.name}: {setting.title}, measured again\n")
        share = open_mps_share(bench.host, bench.device, sys.executable, Limits())
        reports = compare(bench.host, share, options_of(bench, pair), [setting] * pair.starts, Lines())
        # Right after it: what tune saw minutes ago may have been another state of the machine's CPU.
        alone = [alone_rate(bench, pair.opportunistic) for _ in range(pair.starts)]
        found[pair.name] = {
            **figures(reports[-pair.starts :], alone),
            "opportunistic_alone_first": tuned["opportunistic_alone"],
            "measured": now(),
            "met_by_tune": tuned["best"] is not None,
            "goal": {"rate": pair.goal_rate, "p99": pair.p99, "opportunistic": pair.goal_share},
            "curve": tuned["curve"],
            "tune_seconds": tuned["seconds"],
            "warning": tuned["warning"],
        }
        keep()


def ways(bench: Bench, found: dict[str, Any], keep: Keep) -> None:
    """Measure the pairs that are compared with published systems, under the ways that need no tuning."""
    for pair in (replace(pair, windows=24, starts=3) for pair in bench.pairs if pair.compared):
        alone = [alone_rate(bench, pair.opportunistic) for _ in range(pair.starts)]
        openers: tuple[tuple[Callable[[], Share], Mapping[str, Setting]], ...] = (
            (lambda: PlainShare(bench.host, bench.device), {"time-slicing": Setting(threads=100.0, low=False)}),
            (
                lambda: open_mps_share(bench.host, bench.device, sys.executable, Limits()),
                {"MPS": Setting(threads=100.0, low=False), "MPS, low priority": Setting(threads=100.0)},
            ),
        )
        for opener, settings in openers:
            sys.stderr.write(f"{pair.name}: {', '.join(settings)}\n")
            wanted = [setting for setting in settings.values() for _ in range(pair.starts)]
            reports = compare(bench.host, opener(), options_of(bench, pair), wanted, Lines())
            for place, title in enumerate(settings):
                found[f"{pair.name}: {title}"] = {
                    **figures(reports[place * pair.starts : (place + 1) * pair.starts], alone),
                    "setting": title,
                    "measured": now(),
                }
            keep()


def figures(reports: Sequence[TrialReport], alone: Sequence[float]) -> dict[str, Any]:
    """Return a measured setting as the results keep it: several starts of the other job beside one production process.

    ``alone`` are the rates of as many processes of it alone.
    """
    (found,) = judge(Goal(), [report.trial for report in reports])
    beside = [report.trial.opportunistic for report in reports if report.trial.opportunistic is not None]
    share = ratio(beside, alone)
    mean = math.fsum(alone) / len(alone)
    # Several starts may lie further apart than the windows of each tell.
    kept = summarize([report.kept.value for report in reports])
    half = 2 * found.error if kept is None or kept.high is None else max(2 * found.error, kept.high - kept.mean)
    p99s = [report.alone_p99 for report in reports if report.alone_p99 is not None]
    return {
        "setting": found.setting.title,
        "kept": found.kept,
        "kept_interval": [max(0.0, found.kept - half), found.kept + half],
        "p99": found.p99,
        "p99_starts": [report.trial.p99 for report in reports],
        "opportunistic": math.fsum(beside) / len(beside) / mean if beside else None,
        "opportunistic_interval": None if share is None else [share.low, share.high],
        "window_seconds": reports[-1].window_seconds,
        "repeats": sum(report.rounds for report in reports),
        "starts": len(reports),
        "production_alone": math.fsum(report.alone_rate for report in reports) / len(reports),
        "production_windows_alone": [rate for report in reports for rate in report.alone_rates],
        "production_windows_together": [rate for report in reports for rate in report.together_rates],
        "production_p99_alone": math.fsum(p99s) / len(p99s) if p99s else None,
        "opportunistic_starts": beside,
        "opportunistic_alone_starts": list(alone),
        "opportunistic_alone": mean,
    }


def farm(bench: Bench, found: dict[str, Any], keep: Keep) -> None:
    """Measure copies of one job under each way that needs no root."""
    for name, copies, goal, ways_ in bench.farms:
        sys.stderr.write(f"farm: {copies} x {name}\n")
        data = bench.gpushare(
            *("bench", "--copies", str(copies), "--ways", ways_),
            *("--repeat", "3", "--for", f"{max(1.0, bench.seconds):g}s", "--metric", RATE),
            *("-g", str(bench.device.gpu.index), "--", *bench.job(name)),
        )
        means = {
            cell["way"]: cell["throughput"]["mean"]
            for cell in data["cells"]
            if cell["copies"] == copies and cell["throughput"]
        }
        pick = next((one for one in data["picks"] if one and one["copies"] == copies), None)
        sliced = means.get("timeslice")
        chosen = None if pick is None else means.get(pick["way"])
        found[f"{copies} x {name}"] = {
            "means": means,
            "spread": {cell["way"]: cell["throughput"] for cell in data["cells"] if cell["throughput"]},
            "pick": None if pick is None else pick["way"],
            "gain": None if not sliced or chosen is None else chosen / sliced,
            "of_best": None if chosen is None else chosen / max(means.values()),
            "goal": goal,
            "measured": now(),
        }
        keep()


def add_to(path: Path, results: Mapping[str, Any]) -> None:
    """Add figures to a file of results; another run, on another GPU of the host, may add to it at the same time."""
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        kept = json.loads(file.read() or "{}")
        for key, value in results.items():
            kept[key] = {**kept.get(key, {}), **value} if isinstance(value, dict) else value
        file.seek(0)
        file.truncate()
        file.write(json.dumps(kept, indent=2) + "\n")


def _chosen(parser: argparse.ArgumentParser, option: str, text: str | None, known: Sequence[str]) -> list[str]:
    """Return the words of a list, in the order of what is known; all where none is given."""
    words = list(known) if text is None else text.replace(" ", "").split(",")
    if unknown := sorted(set(words) - set(known)):
        parser.error(f"{option} knows no {', '.join(unknown)}; it knows {', '.join(known)}")
    return [one for one in known if one in words]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts, print the table, and keep the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--pairs", default=None, help="only these of the pairs: infer+big,mid+big")
    parser.add_argument("--farms", default=None, help="only these of the farms: tiny,mid")
    parser.add_argument("-g", "--gpu", default="0", help="a GPU; or several, 0,1, that share the work")
    parser.add_argument("--into", type=Path, default=None, help="results of an earlier run to add to")
    parser.add_argument("--window", type=float, default=None, help="seconds of one window of measuring")
    parser.add_argument(
        "--again", action="store_true", help="keep the pairs beside those in the file, as a second search"
    )
    parser.add_argument("--pretend", action="store_true", help="rehearse on a simulated H200")
    given = parser.parse_args(arguments)
    wanted = _chosen(parser, "--parts", given.parts, PARTS)
    names = _chosen(parser, "--pairs", given.pairs, [pair.name.replace(" ", "") for pair in PAIRS])
    farms = _chosen(parser, "--farms", given.farms, [one[0] for one in FARMS])
    if given.pretend:
        os.environ.setdefault("GPUSHARE_SIM_DIR", tempfile.mkdtemp(prefix="gs", dir="/tmp"))
    gpus = given.gpu.split(",")
    host = connect(PRETENDED_HOST if given.pretend else "local")
    device = select_one(gpus[0], host.nvml.sweep())
    bench = Bench(
        host,
        device,
        given.pretend,
        given.window or (0.3 if given.pretend else None),
        tuple(pair for pair in PAIRS if pair.name.replace(" ", "") in names),
        tuple(one for one in FARMS if one[0] in farms),
    )
    name = (device.gpu.name or "gpu").lower().replace(" ", "-")
    path = given.into or Path(__file__).parent / "results" / f"sharing-{name}-{now()[:10].replace('-', '')}.json"
    written = not given.pretend or given.into is not None
    if written and given.into is None:
        path.unlink(missing_ok=True)
    if len(gpus) > 1:
        if not written:
            parser.error("several GPUs need --into FILE")
        words = [*(["--pretend"] if given.pretend else []), "--into", str(path)]
        words += ["--again"] if given.again else []
        words += [] if given.window is None else ["--window", str(given.window)]
        failed = on_all(gpus, words, pieces(bench, wanted))
        sys.stdout.write(table(json.loads(path.read_text())))
        return min(failed, 1)
    results: dict[str, Any] = {
        "date": now(),
        "gpu": device.gpu.name,
        "driver": host.nvml.driver_version(),
        "gpushare": __version__,
        "method": "windows together and alone in turn (repeats says how many), one production process",
    }

    def keep() -> None:
        # At once: the machine may be borrowed for less time than all of it takes.
        if written:
            add_to(path, results)

    for part in wanted:
        started = time.monotonic()
        {"jobs": jobs, "pairs": pairs, "ways": ways, "farm": farm, "pause": pause}[part](
            bench, results.setdefault("again" if given.again and part == "pairs" else part, {}), keep
        )
        results.setdefault("seconds", {})[f"{part} on GPU {device.gpu.index}"] = round(time.monotonic() - started, 1)
        keep()
    sys.stdout.write(table(json.loads(path.read_text()) if written else results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
