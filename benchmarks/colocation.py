"""How well `gpushare tune` finds a setting, beside jobs that it was not made with: ``python -m benchmarks.colocation --out FILE``.

Run it as root on a machine with CuPy, PyTorch and one NVIDIA GPU that nobody else uses. For each pair of `benchmarks.jobs`:

- ``gpushare tune`` searches, with its default budget; how long it took, and whether it ended by itself.
- Its setting is measured again with new processes: production alone, all together for 10 s without a pause (24 s where requests
  come at random), and the others alone. The windows, percentiles and means are this script's own.
- A grid of at most 12 settings of 5 s each, in the same processes, says what the best choice was.

``--plain`` also measures pairs without any setting: under time-slicing, under MPS, and under MPS with low priority for the other.
``--paused`` measures a production job that works 2 s in 10, beside one that is paused meanwhile (``run --yield pause``).
``--activity`` reads how busy two jobs keep the SMs (GPM). ``--until SECONDS`` leaves out what does not fit; ``--grid`` names the
pairs that have a grid; ``--verbs`` times the verbs on a running job. ``--render FILE`` prints the table.
``--rehearse`` tries the script on a simulated host. No setting of the GPU is changed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu_script import xids
from benchmarks.jobs import RANDOM
from gpushare.base.benchmark import Metric
from gpushare.base.model import Priority
from gpushare.base.selection import select_one
from gpushare.connect import connect
from gpushare.host.activity import ActivityMeter
from gpushare.measure.experiment import Experiment, Grounds, Running
from gpushare.mps.limits import Limits

RATE: Final = "rate=([0-9.]+)"
OTHER_US: Final = (50, 100, 200, 500, 1000, 2048)
CAPS: Final = (20.0, 40.0, 60.0, 80.0)
# Whether under MPS; threads in percent, and whether the other has low priority.
PLAIN: Final = {
    "time-slicing": (False, (100.0, False)),
    "MPS": (True, (100.0, False)),
    "MPS, low priority": (True, (100.0, True)),
}
BURSTS: Final = ("--on", "2", "--off", "8")
SETTLE: Final = 0.5


@dataclass(frozen=True)
class Pair:
    """Two jobs, and what production is to keep."""

    production: str
    other: str
    keep: float
    p99: float | None = None
    ways: str = "slices,caps"
    # On a simulated GPU.
    needs: tuple[str, str] = ("--need 95", "--need 95")

    @property
    def name(self) -> str:
        """Return its name."""
        return f"{self.production} + {self.other}"


WAITS: Final = ("--need 95 --busy 45 --latency 4", "--need 95")
PAIRS: Final = (
    Pair("half", "fed", 95, 1.4, "slices", WAITS),
    Pair("random", "embedding", 95, 1.5, "slices", WAITS),
    Pair("half", "diffusion", 95, 1.4, "slices", WAITS),
    Pair("random", "fed", 95, 1.5, "slices", WAITS),
    Pair("decode", "diffusion", 85),
    Pair("decode", "fed", 90, needs=("--need 95", "--need 50")),
    Pair("ranking", "retrieval", 95, 1.5, "slices", WAITS),
    Pair("vision", "diffusion", 95, 1.4, "slices", WAITS),
    Pair("half", "speech", 95, 1.4, "slices", WAITS),
    Pair("chat", "embedding", 85),
    Pair("speech", "retrieval", 85, needs=("--need 50", "--need 95")),
    Pair("embedding", "image", 80),
    # With the six before, one choice between two ways was mended.
    Pair("random", "retrieval", 95, 1.5, "slices", WAITS),
    Pair("half", "image", 95, 1.4, "slices", WAITS),
    Pair("vision", "fed", 95, 1.4, "slices", WAITS),
    Pair("decode", "image", 85),
    Pair("retrieval", "speech", 85, needs=("--need 95", "--need 50")),
    Pair("diffusion", "embedding", 80),
    # gpushare was developed with these.
    Pair("infer", "big", 95, 1.25, "caps"),
    Pair("mid", "big", 95, ways="caps"),
    Pair("membw", "big", 90, ways="caps"),
    Pair("infer", "membw", 95, 1.25, "caps"),
    Pair("mid", "tiny", 95, ways="caps"),
)


class Script:
    """All of it, on one GPU."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.host = connect("sim:h200" if options.rehearse else "local")
        self.device = select_one(None, self.host.nvml.sweep())
        self.began = time.monotonic()
        self.state = tempfile.mkdtemp()
        self.seconds = 0.1 if options.rehearse else 1.0
        self.grids = set(
            range(len(PAIRS)) if options.grid is None else (int(each) for each in options.grid.split(",") if each)
        )

    def left(self) -> float:
        """Return the seconds that are left."""
        return float(self.options.until) - (time.monotonic() - self.began)

    def command(self, pair: Pair, place: int) -> list[str]:
        """Return production's command, or the other's."""
        if self.options.rehearse:
            return [sys.executable, "-m", "gpushare.sim.job", "--every", "0.02", *pair.needs[place].split()]
        return [sys.executable, "-m", "benchmarks.jobs", (pair.production, pair.other)[place]]

    def gpushare_words(self, *words: str) -> list[str]:
        """Return a command line of gpushare."""
        host = ("--host", "sim:h200") if self.options.rehearse else ()
        return [self.options.python, "-m", "gpushare", *host, *words]

    def gpushare(self, *words: str) -> tuple[float, subprocess.CompletedProcess[str]]:
        """Run gpushare; return how long it took, and what it said."""
        began = time.monotonic()
        done = subprocess.run(
            self.gpushare_words(*words),
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "GPUSHARE_STATE_DIR": self.state, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        return time.monotonic() - began, done

    # -- a pair --------------------------------------------------------------------------------------------------------

    def pair(self, pair: Pair) -> dict[str, Any]:
        """Measure a pair."""
        words = [
            "--production",
            shlex.join(self.command(pair, 0)),
            "--opportunistic",
            shlex.join(self.command(pair, 1)),
        ]
        words += ["--keep", f"{pair.keep:g}%", "--ways", pair.ways, "--opportunistic-metric", RATE, "--name", "pair"]
        words += ["--metric", RATE] if pair.p99 is None else ["--p99", f"{pair.p99}x"]
        words += ["--budget", f"{150 * self.seconds:g}s"] if self.options.rehearse else []
        took, done = self.gpushare("-o", "json", "tune", *words)
        document = json.loads(done.stdout or "{}")
        data = document.get("data") or {}
        row = {"pair": pair.name, "goal": [pair.keep / 100, pair.p99], "ways": pair.ways, "exit_code": done.returncode}
        row |= {"took": round(took, 1), "errors": document.get("errors"), "tune": data}
        chosen = data.get("best") or data.get("nearest")
        if chosen is None:
            return {**row, "said": done.stderr[-1000:]}
        return {**row, **self.judged(pair, chosen)}

    def judged(self, pair: Pair, chosen: dict[str, Any]) -> dict[str, Any]:
        """Measure the chosen setting, and the grid as far as time allows."""
        sliced = chosen["way"] == "slices"
        points = [(chosen["production_slice_us"], us) for us in OTHER_US] if sliced else [(cap, True) for cap in CAPS]
        picked = (
            (chosen["production_slice_us"], chosen["other_slice_us"])
            if sliced
            else (chosen["threads_percent"], chosen["low_priority"])
        )
        grid = [point for point in points if point != picked]
        if PAIRS.index(pair) not in self.grids or self.left() < 30 + 6 * len(grid):
            grid = []
        grounds = Grounds(self.host, self.device, sys.executable).open(mps=True)
        with Experiment(self.host, grounds, grace_seconds=3.0) as experiment:
            bench = Bench(self, experiment, pair, outside=sliced)
            found = bench.sliced([picked, *grid]) if sliced else bench.capped([picked, *grid])
        return {"judged": found[0], "grid": found[1:]}

    def plain(self, pair: Pair) -> dict[str, Any]:
        """Measure a pair without any setting."""
        rows = {}
        for way, (mps, point) in PLAIN.items():
            grounds = Grounds(self.host, self.device, sys.executable).open(mps=mps)
            with Experiment(self.host, grounds, grace_seconds=3.0) as experiment:
                (rows[way],) = Bench(self, experiment, pair, outside=not mps).capped([point])
        return {"pair": pair.name, "ways": rows}


class Bench:
    """The processes of one pair, and what they print in windows of this script."""

    def __init__(self, script: Script, experiment: Experiment, pair: Pair, *, outside: bool) -> None:
        self.script, self.experiment, self.pair = script, experiment, pair
        self.metric = Metric(pattern=None if pair.p99 is not None else RATE)
        # Of requests that arrive at random, a p99 is of few.
        self.longest = 24 if pair.production in RANDOM else 10
        environment = experiment.grounds.environment(None if outside else Limits())
        self.production = experiment.run(
            "production", script.command(pair, 0), environment, self.metric, outside=outside
        )

    def other(self, limits: Limits) -> Running:
        """Start the other job."""
        environment = self.experiment.grounds.environment(limits)
        return self.experiment.run("other", self.script.command(self.pair, 1), environment, Metric(pattern=RATE))

    def ready(self, *jobs: Running) -> None:
        """Wait until jobs print, and a second longer."""
        if not self.experiment.wait(60, lambda: all(job.printed.values or job.printed.lines for job in jobs)):
            raise RuntimeError(f"nothing printed: {[job.program.last_line for job in jobs]}")
        self.experiment.wait(1.0 * self.script.seconds)

    def watch(self, seconds: float) -> tuple[float, float]:
        """Let time pass, and return its start and end."""
        self.experiment.wait(SETTLE * self.script.seconds)
        start = self.experiment.now()
        self.experiment.wait(seconds * self.script.seconds)
        return start, self.experiment.now()

    def rate(self, job: Running, spans: Sequence[tuple[float, float]]) -> float:
        """Return lines per second, or the mean of the rates that were printed."""
        seconds = math.fsum(end - start for start, end in spans)
        if not job.printed.metric.printed:
            return sum(start < at <= end for at in job.printed.lines for start, end in spans) / seconds
        values = [value for at, value in job.printed.values for start, end in spans if start < at <= end]
        return math.fsum(values) / len(values) if values else 0.0

    def p99(self, spans: Sequence[tuple[float, float]]) -> float | None:
        """Return production's 99th percentile."""
        values = sorted(v for at, v in self.production.printed.latencies for start, end in spans if start < at <= end)
        return values[math.ceil(0.99 * len(values)) - 1] if len(values) >= 50 else None

    def hold(self, *jobs: Running) -> None:
        """Stop jobs until their queues have drained."""
        for job in jobs:
            self.experiment.stop(job.program)
        self.experiment.wait(0.5 * self.script.seconds)

    def sliced(self, points: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
        """Measure slices, the first for the longest time; production alone before, between and after."""
        other = self.other(Limits())
        self.ready(self.production, other)
        self.hold(other)
        alone, together = [self.watch(self.longest / 2)], []
        for number, (own, us) in enumerate(points):
            self.experiment.set_slice(self.production.program, own)
            self.experiment.set_server_slice([other.program], us)
            self.experiment.resume(other.program)
            together.append(self.watch(self.longest if not number else 5))
            if number in {0, len(points) - 1}:
                self.experiment.set_server_slice([other.program], 2048)
                self.hold(other)
                alone.append(self.watch(self.longest / 2))
                self.experiment.resume(other.program)
        self.hold(self.production)
        base = self.rate(other, [self.watch(3)])
        self.experiment.resume(self.production.program)
        return [self.row(list(point), alone, [span], other, base) for point, span in zip(points, together, strict=True)]

    def capped(self, points: Sequence[tuple[float, bool]]) -> list[dict[str, Any]]:
        """Measure caps, each in a process of its own, of which one at a time runs; the first for 10 s."""
        free = self.other(Limits())
        others = [self.other(_limits(*point)) for point in points]
        self.ready(self.production, free, *others)
        self.hold(free, *others)
        alone, together = [self.watch(5)], []
        for number, other in enumerate(others):
            self.experiment.resume(other.program)
            together.append(self.watch(10 if not number else 5))
            self.hold(other)
            if number in {0, len(points) - 1}:
                alone.append(self.watch(4))
        self.hold(self.production)
        self.experiment.resume(free.program)
        base = self.rate(free, [self.watch(3)])
        self.experiment.resume(self.production.program)
        rows = zip(points, others, together, strict=True)
        return [self.row(list(point), alone, [span], other, base) for point, other, span in rows]

    def row(
        self,
        point: list[Any],
        alone: Sequence[tuple[float, float]],
        together: Sequence[tuple[float, float]],
        other: Running,
        base: float,
    ) -> dict[str, Any]:
        """Return a setting relative to alone."""
        before, now = self.p99(alone), self.p99(together)
        return {
            "point": point,
            "kept": self.rate(self.production, together) / (self.rate(self.production, alone) or math.inf),
            "p99": None if before is None or now is None else now / before,
            "share": self.rate(other, together) / base if base else None,
            "alone": self.rate(self.production, alone),
            "other_alone": base,
        }


def _limits(threads: float, low: bool) -> Limits:  # noqa: FBT001 - a point of the grid
    return Limits(
        threads_percent=None if threads >= 100 else threads, priority=Priority.LOW if low else Priority.NORMAL
    )


def verbs(script: Script) -> list[dict[str, Any]]:
    """Time the verbs on a running job."""
    job = subprocess.Popen(
        script.command(PAIRS[0], 1), stdout=subprocess.DEVNULL, env={**os.environ, "GPUSHARE_SIM_HOST": "sim:h200"}
    )
    time.sleep(5)
    rows = []
    words = (["pause"], ["resume"], ["timeslice", "set", "500us"], ["timeslice", "reset"])
    try:
        for verb in [*words * 4, ["status"], ["status"], ["--version"], ["--version"]]:
            named = [str(job.pid)] if verb in words else []
            took, done = script.gpushare(*verb, *named)
            rows.append(
                {"verb": " ".join(verb), "seconds": round(took, 3), "code": done.returncode, "said": done.stderr[-300:]}
            )
        for name, plain in (("nvidia-smi", ["nvidia-smi"]), ("python", [script.options.python, "-c", "pass"])):
            for _ in range(0 if script.options.rehearse else 3):
                began = time.monotonic()
                subprocess.run(plain, stdout=subprocess.DEVNULL, check=False)
                rows.append({"verb": name, "seconds": round(time.monotonic() - began, 3)})
    finally:
        job.terminate()
        job.wait()
    return rows


def paused(script: Script) -> dict[str, Any]:
    """Measure a production job that draws all memory bandwidth 2 s in 10, and one that is paused while it works."""
    grounds = Grounds(script.host, script.device, sys.executable).open(mps=False)
    environment = {
        **grounds.environment(None),
        "GPUSHARE_STATE_DIR": script.state,
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    pair = Pair("membw", "big", 97)
    with Experiment(script.host, grounds, grace_seconds=10.0) as experiment:

        def started(title: str, place: int, *words: str) -> Running:
            """Start a job by ``gpushare run``, and wait until it prints."""
            bursts = BURSTS if not place and not script.options.rehearse else ()
            argv = [*script.gpushare_words("run"), *words, "--", *script.command(pair, place), *bursts]
            job = experiment.run(title, argv, environment, Metric(pattern=RATE), outside=True)
            if not experiment.wait(60, lambda: bool(job.printed.values)):
                raise RuntimeError(f"{title} printed nothing: {job.program.last_line}")
            return job

        def watched(seconds: float) -> tuple[float, float]:
            start = experiment.now()
            experiment.wait(seconds * script.seconds)
            return start, experiment.now()

        production = started("production", 0, "--production", "bursts")
        alone = watched(30)
        other = started("other", 1, "--opportunistic", "--yield", "pause", "--for", "bursts")
        watched(2)
        together = watched(60)
        experiment.end([production.program])
        watched(3)
        free = watched(6)
    before, now = (_mean(production, span) for span in (alone, together))
    other_alone = _steps(other, free)
    return {
        "pair": f"membw {' '.join(BURSTS)} + big",
        "kept": now / before,
        "share": _steps(other, together) / other_alone if other_alone else None,
        "alone": before,
        "other_alone": other_alone,
    }


def _mean(job: Running, span: tuple[float, float]) -> float:
    """Return the mean of the rates that a job printed in a span of time."""
    values = [value for at, value in job.printed.values if span[0] < at <= span[1]]
    return math.fsum(values) / len(values)


def _steps(job: Running, span: tuple[float, float]) -> float:
    """Return the steps per second in a span of time; a rate holds from the line before, however long ago that was."""
    lines = job.printed.values
    steps = [value * (at - before) for (before, _), (at, value) in itertools.pairwise(lines) if span[0] < at <= span[1]]
    return math.fsum(steps) / (span[1] - span[0])


class Occupancy(ActivityMeter):
    """Reads how many threads are on the SMs, of those that they can hold."""

    _metric = "NVML_GPM_METRIC_SM_OCCUPANCY"


def activity(script: Script) -> dict[str, Any]:
    """Return the percentages of busy SMs and of occupancy that two jobs have alone, means of 2 s."""
    rows = {}
    for name in ("big", "membw"):
        grounds = Grounds(script.host, script.device, sys.executable).open(mps=False)
        with Experiment(script.host, grounds, grace_seconds=3.0) as experiment:
            job = experiment.run(
                name, script.command(Pair(name, name, 95), 0), grounds.environment(None), Metric(pattern=RATE)
            )
            experiment.wait(60, lambda job=job: bool(job.printed.values))
            experiment.wait(2.0 * script.seconds)
            meters = {"sm_percent": ActivityMeter, "occupancy_percent": Occupancy}
            index = script.device.gpu.index
            rows[name] = {
                key: math.fsum(reading.percent for _ in range(20) if (reading := meter.read())) / 20
                for key, meter in ((key, kind(script.host.nvml, index)) for key, kind in meters.items())
            }
    return rows


# -- the table ---------------------------------------------------------------------------------------------------------


def best_of_grid(row: dict[str, Any]) -> float | None:
    """Return the most that the other could have under a setting that meets the goal; None: no grid, or none meets it."""
    keep, p99 = row["goal"]
    points = [row["judged"], *row["grid"]] if row.get("grid") else []
    meeting = [
        point["share"]
        for point in points
        if (point["kept"] >= keep if p99 is None else (point["p99"] or math.inf) <= p99) and point["share"] is not None
    ]
    return max(meeting, default=None)


def render(document: dict[str, Any]) -> str:
    """Return the table of benchmarks/results/README.md."""
    lines = [
        "| pair, goal | tune: seconds, ended by | its choice | its estimate: rate, p99 / other | measured again | best of the grid |",
        "|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        data, keep, p99 = row["tune"], *row["goal"]
        chosen = data.get("best") or data.get("nearest")
        goal = f"{row['pair']}: {keep:.2f}{'' if p99 is None else f', p99 {p99}x'}"
        if chosen is None or "judged" not in row:
            lines.append(f"| {goal} | - | - | - | - | - |")
            continue
        estimate = (chosen["kept"], chosen["p99"], chosen["opportunistic_share"])
        again = (row["judged"]["kept"], row["judged"]["p99"], row["judged"]["share"])
        best = best_of_grid(row)
        found = "" if data.get("best") else "none; nearest "
        lines.append(
            f"| {goal} | {data['seconds']:.0f}, {data['ended']} | {found}{chosen['setting']} | {_figures(*estimate)} | {_figures(*again)}"
            f" | {'-' if best is None else f'{best:.2f}'} |"
        )
    return "\n".join(lines)


def _figures(kept: float, p99: float | None, share: float | None) -> str:
    tail = "" if p99 is None else f", {p99:.2f}x"
    return f"{kept:.2f}{tail} / {'-' if share is None else f'{share:.2f}'}"


# What is measured besides the search, by the option that asks for it.
PARTS: Final[dict[str, Callable[[Script], Any]]] = {
    "verbs": verbs,
    "activity": activity,
    "paused": paused,
    "plain": lambda script: [script.plain(PAIRS[int(number)]) for number in script.options.plain.split(",")],
}


def main() -> int:
    """Measure all pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", metavar="FILE")
    parser.add_argument("--render", metavar="FILE")
    parser.add_argument("--until", type=float, default=3600.0)
    parser.add_argument("--pairs", metavar="LIST", help="numbers from 0")
    parser.add_argument("--grid", metavar="LIST", help="numbers from 0; all unless given")
    parser.add_argument("--plain", metavar="LIST", help="numbers from 0")
    parser.add_argument("--paused", action="store_true")
    parser.add_argument("--activity", action="store_true")
    parser.add_argument("--verbs", action="store_true")
    parser.add_argument("--python", metavar="FILE", default=sys.executable, help="of the installation of gpushare")
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    if options.render:
        print(render(json.loads(Path(options.render).read_text())))
        return 0
    before, script = xids(), Script(options)
    gpu = script.device.gpu
    document: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "gpu": gpu.name,
        "driver": script.host.nvml.driver_version(),
        "rows": [],
    }
    numbers = range(len(PAIRS)) if options.pairs is None else [int(each) for each in options.pairs.split(",") if each]
    for part, measure in PARTS.items():
        if getattr(options, part):
            document[part] = measure(script)
            print(part, json.dumps(document[part]), flush=True)
    for number in numbers:
        if script.left() < (230 if "caps" in PAIRS[number].ways else 110) * script.seconds:
            print(f"left out: {PAIRS[number].name}", flush=True)
            continue
        try:
            document["rows"].append(script.pair(PAIRS[number]))
        except Exception as error:  # noqa: BLE001 - the other pairs are worth the machine's time
            print(f"FAILED {PAIRS[number].name}: {type(error).__name__}: {error}", flush=True)
            continue
        if options.out:
            Path(options.out).write_text(json.dumps(document, indent=1) + "\n")
        print(f"{script.left():.0f} s left", render({"rows": document["rows"][-1:]}).splitlines()[-1], flush=True)
    document["new_xids"] = None if before is None else (xids() or [])[len(before) :]
    if options.out:
        Path(options.out).write_text(json.dumps(document, indent=1) + "\n")
    print(render(document))
    return 1 if document["new_xids"] else 0


if __name__ == "__main__":
    sys.exit(main())
