"""How well gpushare shares one GPU: ``python -m benchmarks.sharing [--parts pairs,ways,farm,pause] [-g GPU]``.

All settings are found by ``gpushare tune`` and ``gpushare bench``, none is set by hand. Parts:

- ``pairs``: for each pair of a production and an opportunistic job, what ``gpushare tune`` finds, and then that setting
  measured anew: five times together and alone in turn beside one production process.
- ``ways``: the pairs that published systems are compared by, under time-slicing, MPS, and MPS with low priority.
- ``farm``: copies of one job under each way, by ``gpushare bench``.
- ``pause``: a production job that works 2 s in 10 without MPS, and an opportunistic one that stands still meanwhile.

The figures go to benchmarks/results-GPU-DATE.json; a part that is run again replaces itself in ``--into FILE``.
``--pretend`` rehearses all of it on a simulated H200 with jobs whose need is known.
"""

from __future__ import annotations

import argparse
import datetime as dt
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.pairs import FARMS, PAIRS, Pair
from benchmarks.sharing_table import table
from gpushare import __version__
from gpushare.actions.mps_limits import MpsLimits
from gpushare.actions.plain_share import PlainShare
from gpushare.actions.several import Several
from gpushare.actions.share import Share, open_mps_share
from gpushare.host.connect import connect
from gpushare.host.host import Host
from gpushare.measure.controller import Goal, Search, Setting
from gpushare.measure.metric import Metric
from gpushare.measure.pair import TuneOptions
from gpushare.measure.progress import Progress
from gpushare.measure.statistics import summarize
from gpushare.measure.tune import TrialReport, TuneReporter, compare
from gpushare.selection import Device, select_one

RATE: Final = r"rate=([0-9.]+)"
REPEATS: Final = 5
PARTS: Final = ("pairs", "ways", "farm", "pause")


PAUSE_RATE, PAUSE_SHARE = 0.97, 0.70
# In place of a production job that works from time to time: its CPU does.
_DUTY: Final = """import sys, time
on, off = map(float, sys.argv[1:])
while True:
    end = time.monotonic() + on
    while time.monotonic() < end:
        last, count = time.monotonic(), 0
        while time.monotonic() - last < 0.05:
            count += 1
        print(f"rate={count}", flush=True)
    time.sleep(off)
"""
# Jobs of a simulated GPU: what each needs of it, in percent.
PRETENDED: Final = {"mid": 18, "infer": 25, "big": 96, "membw": 70, "tiny": 5}


@dataclass(frozen=True)
class Bench:
    """Where and how it runs."""

    host: Host
    device: Device
    pretend: bool
    window: float
    pairs: tuple[Pair, ...] = PAIRS

    def job(self, name: str, *words: str) -> list[str]:
        """Return the command of a job."""
        if not self.pretend:
            return [sys.executable, "-m", "benchmarks.jobs", name, *words]
        latency = ["--latency", "0.4"] if name == "infer" else []
        return [sys.executable, "-m", "gpushare.sim.job", "--need", str(PRETENDED[name]), "--every", "0.02", *latency]

    def metric(self, name: str) -> str | None:
        """Return what a job's rate is read from; None: its lines per second."""
        return None if name == "infer" and not self.pretend else RATE

    def gpushare(self, *words: str) -> dict[str, Any]:
        """Run a command of gpushare and return its data; its stderr is shown."""
        argv = [sys.executable, "-m", "gpushare", "--host", self.host.spec, "-o", "json", *words]
        done = subprocess.run(argv, stdout=subprocess.PIPE, check=False)
        document = json.loads(done.stdout or "{}")
        if document.get("data") is None:
            errors = "; ".join(error["message"] for error in document.get("errors", ()))
            raise SystemExit(f"{' '.join(argv)}: {errors or f'exit code {done.returncode}'}")
        return dict(document["data"])


class Lines(TuneReporter):
    """Says on stderr what goes on."""

    def doing(self, what: str) -> None:
        """Say it."""
        sys.stderr.write(f"  {what}\n")


def options_of(bench: Bench, pair: Pair, rounds: int) -> TuneOptions:
    """Return how a pair is measured at given settings."""
    return TuneOptions(
        production=bench.job(pair.production),
        opportunistic=bench.job(pair.opportunistic),
        search=Search(goal=Goal(keep=pair.keep / 100)),
        metric=Metric(pattern=bench.metric(pair.production)),
        opportunistic_metric=Metric(pattern=bench.metric(pair.opportunistic)),
        window_seconds=bench.window,
        rounds=rounds,
        most_rounds=rounds,
    )


def alone_rate(bench: Bench, name: str) -> float:
    """Return a job's mean rate alone, over five windows."""
    seen = Progress(Metric(pattern=bench.metric(name)))
    with Several(bench.host, PlainShare(bench.host, bench.device), grace_seconds=5.0) as several:
        several.start(name, bench.job(name), MpsLimits(), listen=seen.listen)
        several.wait(180.0, lambda: seen.count(0.0, float("inf")) > 0)
        several.wait(1.0)
        rates = []
        for _ in range(REPEATS):
            several.look()
            started = time.monotonic()
            several.wait(bench.window)
            rate = seen.window(started, time.monotonic()).rate
            rates += [] if rate is None else [rate]
    if not rates:
        raise SystemExit(f"{name} printed no rate alone")
    return sum(rates) / len(rates)


Keep = Callable[[], None]


def pairs(bench: Bench, found: dict[str, Any], keep: Keep) -> None:
    """Tune every pair, and measure what was found anew."""
    for pair in bench.pairs:
        sys.stderr.write(f"{pair.name}: tune\n")
        words = ["--production", " ".join(bench.job(pair.production))]
        words += ["--opportunistic", " ".join(bench.job(pair.opportunistic))]
        words += ["--keep", f"{pair.keep:g}%", "--window", f"{bench.window}s", "--name", f"bench-{pair.production}"]
        metric, other = bench.metric(pair.production), bench.metric(pair.opportunistic)
        words += [] if metric is None else ["--metric", metric]
        words += [] if other is None else ["--opportunistic-metric", other]
        words += [] if pair.p99 is None else ["--p99", f"{pair.p99}x"]
        words += [] if pair.caps is None else ["--production-caps", pair.caps]
        tuned = bench.gpushare("tune", "-g", str(bench.device.gpu.index), *words)
        chosen = tuned["best"] or tuned["nearest"]
        setting = Setting(
            threads=chosen["threads_percent"],
            low=chosen["low_priority"],
            production_threads=chosen["production_threads_percent"],
        )
        sys.stderr.write(f"{pair.name}: {setting.title}, measured anew\n")
        uncapped = [] if setting.production_threads is None else [Setting(threads=10.0)]
        share = open_mps_share(bench.host, bench.device, sys.executable, MpsLimits())
        reports = compare(bench.host, share, options_of(bench, pair, REPEATS), [*uncapped, setting], Lines())
        found[pair.name] = {
            **figures(reports[-1], tuned["opportunistic_alone"]),
            "met_by_tune": tuned["best"] is not None,
            "goal": {"rate": pair.goal_rate, "p99": pair.p99, "opportunistic": pair.goal_share},
            "curve": tuned["curve"],
            "tune_seconds": tuned["seconds"],
            "warning": tuned["warning"],
        }
        keep()


def ways(bench: Bench, found: dict[str, Any], keep: Keep) -> None:
    """Measure the pairs that are compared with published systems, under the ways that need no tuning."""
    for pair in (pair for pair in bench.pairs if pair.compared):
        alone = alone_rate(bench, pair.opportunistic)
        openers: tuple[tuple[Callable[[], Share], Mapping[str, Setting]], ...] = (
            (lambda: PlainShare(bench.host, bench.device), {"time-slicing": Setting(threads=100.0, low=False)}),
            (
                lambda: open_mps_share(bench.host, bench.device, sys.executable, MpsLimits()),
                {"MPS": Setting(threads=100.0, low=False), "MPS, low priority": Setting(threads=100.0)},
            ),
        )
        for opener, settings in openers:
            sys.stderr.write(f"{pair.name}: {', '.join(settings)}\n")
            reports = compare(bench.host, opener(), options_of(bench, pair, REPEATS), list(settings.values()), Lines())
            for title, report in zip(settings, reports, strict=True):
                found[f"{pair.name}: {title}"] = {**figures(report, alone), "setting": title}
            keep()


def figures(report: TrialReport, alone: float | None) -> dict[str, Any]:
    """Return a measured setting as the results keep it."""
    rate = report.trial.opportunistic
    return {
        "setting": report.trial.setting.title,
        "kept": report.kept.value,
        "kept_interval": [report.kept.low, report.kept.high],
        "p99": report.trial.p99,
        "opportunistic": None if rate is None or not alone else rate / alone,
        "repeats": report.rounds,
        "production_alone": report.alone_rate,
        "production_p99_alone": report.alone_p99,
        "opportunistic_alone": alone,
    }


def farm(bench: Bench, found: dict[str, Any], keep: Keep) -> None:
    """Measure copies of one job under each way that needs no root."""
    for name, copies, goal in FARMS:
        sys.stderr.write(f"farm: {copies} x {name}\n")
        data = bench.gpushare(
            *("bench", "--copies", str(copies), "--ways", "timeslice,mps,mps:100/n,mps:200/n"),
            *("--repeat", "3", "--for", f"{max(1.0, bench.window):g}s", "--metric", RATE),
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
        }
        keep()


def pause(bench: Bench, found: dict[str, Any], keep: Keep) -> None:
    """Measure a production job that works 2 s in 10, alone and beside a job that stands still meanwhile."""
    on, off, cycles = (2.0, 8.0, 3) if not bench.pretend else (0.6, 1.4, 2)
    alone = alone_rate(bench, "big")
    production = Progress(Metric(pattern=RATE))
    with Several(bench.host, PlainShare(bench.host, bench.device), grace_seconds=5.0) as several:
        words = bench.job("mid", "--on", str(on), "--off", str(off))
        if bench.pretend:
            words = [sys.executable, "-c", _DUTY, str(on), str(off)]
        program = several.start("production", words, MpsLimits(), listen=production.listen)
        several.wait(180.0, lambda: bool(production.values))
        before_from = time.monotonic()
        several.wait(cycles * (on + off))
        before = [value for at, value in production.values if at > before_from]
        other, seconds = _beside(bench, several, program.pid, cycles * (on + off))
        together = [value for at, value in production.values if at > other[0][0]] if other else []
    base, beside = summarize(before), summarize(together)
    if base is None or beside is None:
        raise SystemExit("the production job printed no rate")
    done = sum(rate * (at - earlier) for (earlier, _), (at, rate) in itertools.pairwise(other))
    found.update(
        kept=beside.mean / base.mean,
        opportunistic=done / seconds / alone,
        production_alone=base.mean,
        opportunistic_alone=alone,
        cycles=cycles,
        goal={"rate": PAUSE_RATE, "opportunistic": PAUSE_SHARE},
    )
    keep()


def _beside(bench: Bench, several: Several, pid: int, seconds: float) -> tuple[list[tuple[float, float]], float]:
    """Run the opportunistic job through ``gpushare run --pause`` for a while; return its rates and their length."""
    seen = Progress(Metric(pattern=RATE))
    argv = [sys.executable, "-m", "gpushare", "--host", bench.host.spec, "run", "-g", str(bench.device.gpu.index)]
    argv += ["--opportunistic", "--pause", "--for", str(pid), "--", *bench.job("big")]
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(argv, stdout=output, env={**os.environ, "PYTHONUNBUFFERED": "1"})
        try:
            rest, place, ends, started = b"", 0, None, time.monotonic()
            while ends is None or time.monotonic() < ends:
                several.look()
                chunk = os.pread(output.fileno(), 1 << 16, place)
                place += len(chunk)
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    seen.listen(line.decode(errors="replace"), time.monotonic())
                if ends is None and seen.values:
                    ends = time.monotonic() + seconds
                if child.poll() is not None or (ends is None and time.monotonic() - started > 180):
                    raise SystemExit(f"gpushare run --pause printed no rate; exit code {child.poll()}")
                time.sleep(0.01)
        finally:
            child.send_signal(signal.SIGTERM)
            child.wait()
    return seen.values, seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts, print the table, and keep the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--pairs", default=None, help="only these of the pairs: infer+big,mid+big")
    parser.add_argument("-g", "--gpu", default="0")
    parser.add_argument("--into", type=Path, default=None, help="results of an earlier run to add to")
    parser.add_argument("--window", type=float, default=None, help="seconds of one window of measuring")
    parser.add_argument("--pretend", action="store_true", help="rehearse on a simulated H200")
    given = parser.parse_args(arguments)
    wanted = given.parts.split(",")
    if unknown := set(wanted) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    if given.pretend:
        os.environ.setdefault("GPUSHARE_SIM_DIR", tempfile.mkdtemp(prefix="gs", dir="/tmp"))
    host = connect("sim:h200" if given.pretend else "local")
    device = select_one(given.gpu, host.nvml.sweep())
    names = None if given.pairs is None else given.pairs.replace(" ", "").split(",")
    chosen = tuple(pair for pair in PAIRS if names is None or pair.name.replace(" ", "") in names)
    bench = Bench(host, device, given.pretend, given.window or (0.3 if given.pretend else 1.5), chosen)
    date = dt.datetime.now().astimezone()
    name = (device.gpu.name or "gpu").lower().replace(" ", "-")
    path = given.into or Path(__file__).with_name(f"results-{name}-{date:%Y%m%d}.json")
    results = json.loads(path.read_text()) if given.into is not None and path.exists() else {}
    results.update(
        date=f"{date:%Y-%m-%d %H:%M}", gpu=device.gpu.name, driver=host.nvml.driver_version(), gpushare=__version__
    )
    results["method"] = f"windows of {bench.window:g} s, {REPEATS} together and alone in turn, one production process"

    def keep() -> None:
        # At once: the machine may be borrowed for less time than all of it takes.
        if not given.pretend or given.into is not None:
            path.write_text(json.dumps(results, indent=2) + "\n")

    for part in wanted:
        started = time.monotonic()
        {"pairs": pairs, "ways": ways, "farm": farm, "pause": pause}[part](bench, results.setdefault(part, {}), keep)
        results.setdefault("seconds", {})[part] = round(time.monotonic() - started, 1)
        keep()
    sys.stdout.write(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
