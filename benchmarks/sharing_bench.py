"""What all parts of `benchmarks.sharing` need: where it runs, its jobs, and what one of them does alone."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.pairs import FARMS, PAIRS, Pair
from gpushare.base.selection import Device
from gpushare.host.host import Host
from gpushare.measure.metric import Metric
from gpushare.measure.pair import WINDOW_SECONDS, Timeline, Window
from gpushare.measure.statistics import summarize
from gpushare.mps.limits import Limits
from gpushare.run.plain import PlainShare
from gpushare.run.several import Several

RATE: Final = r"rate=([0-9.]+)"
# A rate alone is measured until half of its 95 % interval is at most this share of it, in at most ``MOST_ALONE`` windows.
ALONE_SURE: Final = 0.01
LEAST_ALONE: Final = 5
MOST_ALONE: Final = 20
# Jobs of a simulated GPU: what each needs of it, in percent.
PRETENDED: Final = {"mid": 18, "infer": 25, "big": 96, "membw": 70, "tiny": 5}


@dataclass(frozen=True)
class Bench:
    """Where and how it runs."""

    host: Host
    device: Device
    pretend: bool
    # Seconds; None: tune's own.
    window: float | None
    pairs: tuple[Pair, ...] = PAIRS
    farms: tuple[tuple[str, int, float, str], ...] = FARMS

    @property
    def seconds(self) -> float:
        """Return how long a window of a job alone is."""
        return WINDOW_SECONDS if self.window is None else self.window

    def job(self, name: str, *words: str) -> list[str]:
        """Return the command of a job."""
        if not self.pretend:
            return [sys.executable, "-m", "benchmarks.jobs", name, *words]
        more = {"infer": ["--latency", "0.4"], "membw": ["--bandwidth", "90"]}.get(name, [])
        return [sys.executable, "-m", "gpushare.sim.job", "--need", str(PRETENDED[name]), "--every", "0.02", *more]

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


@contextlib.contextmanager
def alone(bench: Bench, name: str) -> Iterator[Callable[[], Window]]:
    """Run a job alone; what is yielded measures a window of it."""
    seen = Timeline(Metric(pattern=bench.metric(name)))
    with Several(bench.host, PlainShare(bench.host, bench.device), grace_seconds=5.0) as several:
        several.start(name, bench.job(name), Limits(), listen=seen.listen)
        several.wait(180.0, lambda: seen.count(0.0, float("inf")) > 0)
        several.wait(1.0)

        def window() -> Window:
            several.look()
            started = time.monotonic()
            several.wait(bench.seconds)
            return seen.window(started, time.monotonic())

        yield window


def rates(name: str, windows: Sequence[Window]) -> list[float]:
    """Return the rates of windows in which something was printed; there must be one."""
    found = [window.rate for window in windows if window.rate is not None]
    if not found:
        raise SystemExit(f"{name} printed no rate alone")
    return found


def alone_rate(bench: Bench, name: str) -> float:
    """Return the mean rate alone of one process: one that is bound by the CPU moves with it, and is measured for longer."""
    windows: list[Window] = []
    with alone(bench, name) as window:
        while len(windows) < MOST_ALONE:
            windows.append(window())
            found = summarize(rates(name, windows))
            sure = found is not None and found.low is not None and found.mean - found.low <= ALONE_SURE * found.mean
            if len(windows) >= LEAST_ALONE and sure:
                break
    told = rates(name, windows)
    return sum(told) / len(told)


Keep = Callable[[], None]


def now() -> str:
    """Return the time, as the results keep it."""
    return f"{dt.datetime.now().astimezone():%Y-%m-%d %H:%M}"
