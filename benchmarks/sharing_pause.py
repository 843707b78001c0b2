"""A production job that works 2 s in 10 without MPS, and an opportunistic one that stands still meanwhile.

The production job and, through ``gpushare run --opportunistic --yield pause``, the other one run all the time. From cycle to
cycle gpushare and its program are stopped as a whole and go on in turn, while production rests: its cycles alone and
those next to the other alternate within one process, because processes and minutes differ more than what is measured.
For the same reason it is ``membw``, whose rate the GPU alone decides: that of a job that is bound by launches moved by a fifth
from burst to burst with the CPU of a virtual machine.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any, Final

from benchmarks.sharing_bench import RATE, Bench, Keep, alone_rate, now
from gpushare.base.errors import NotFound
from gpushare.host.process import Processes
from gpushare.measure.metric import Metric
from gpushare.measure.pair import Timeline
from gpushare.measure.statistics import paired_ratio
from gpushare.mps.limits import Limits
from gpushare.run.plain import PlainShare
from gpushare.run.several import Several

PAUSE_RATE, PAUSE_SHARE = 0.97, 0.70
PAIRS_OF_CYCLES: Final = 4
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


@dataclass
class Beside:
    """The opportunistic job under gpushare, and what it has printed."""

    child: subprocess.Popen[bytes]
    output: IO[bytes]
    processes: Processes
    seen: Timeline = field(default_factory=lambda: Timeline(Metric(pattern=RATE)))
    place: int = 0
    rest: bytes = b""

    def look(self) -> None:
        """Read what it has printed."""
        chunk = os.pread(self.output.fileno(), 1 << 20, self.place)
        self.place += len(chunk)
        *lines, self.rest = (self.rest + chunk).split(b"\n")
        for line in lines:
            self.seen.listen(line.decode(errors="replace"), time.monotonic())
        if self.child.poll() is not None:
            raise SystemExit(f"gpushare run --yield pause ended with exit code {self.child.returncode}")

    def stand_still(self) -> None:
        """Stop gpushare, and then its program: nobody pauses or resumes anybody meanwhile."""
        for pid in (self.child.pid, *self._program()):
            self.processes.send(pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Let the program go on, and then gpushare."""
        for pid in (*self._program(), self.child.pid):
            self.processes.send(pid, signal.SIGCONT)

    def done(self, start: float, end: float) -> float:
        """Return how many steps it has done in a while: each line tells of the time since the one before."""
        steps = 0.0
        for (earlier, _), (at, rate) in itertools.pairwise(self.seen.values):
            inside = min(at, end) - max(earlier, start)
            steps += rate * max(0.0, inside)
        return steps

    def _program(self) -> list[int]:
        return [pid for pid in self.processes.descendants(self.child.pid) if pid != self.child.pid]


def pause(bench: Bench, found: dict[str, Any], keep: Keep) -> None:
    """Measure production's bursts and the other's whole cycles, alone and beside each other in turn."""
    on, off = (2.0, 8.0) if not bench.pretend else (1.2, 2.4)
    pairs = PAIRS_OF_CYCLES if not bench.pretend else 2
    other_alone = alone_rate(bench, "big")
    production = Timeline(Metric(pattern=RATE))
    with Several(bench.host, PlainShare(bench.host, bench.device), grace_seconds=5.0) as several:
        words = bench.job("membw", "--on", str(on), "--off", str(off))
        if bench.pretend:
            words = [sys.executable, "-c", _DUTY, str(on), str(off)]
        program = several.start("production", words, Limits(), listen=production.listen)
        several.wait(180.0, lambda: bool(production.values))
        with _beside(bench, program.pid) as beside:
            _wait(several, beside, lambda: bool(beside.seen.values), 180.0)
            cycles = _cycles(several, beside, production, off / 3, 2 * pairs)
    bursts: dict[bool, list[float]] = {True: [], False: []}
    lines: dict[bool, list[list[float]]] = {True: [], False: []}
    for together, start, end in cycles:
        rates = [value for at, value in production.values if start < at <= end]
        bursts[together] += [sum(rates) / len(rates)] if rates else []
        lines[together].append(rates)
    kept = paired_ratio(bursts[True], bursts[False])
    if kept is None:
        raise SystemExit("the production job printed no rate")
    shares = [beside.done(start, end) / (end - start) / other_alone for together, start, end in cycles if together]
    found.update(
        pair="membw 2 s in 10 + big",
        kept=kept.value,
        kept_interval=[kept.low, kept.high],
        opportunistic=sum(shares) / len(shares),
        production_alone=bursts[False],
        production_together=bursts[True],
        production_lines_alone=lines[False],
        production_lines_together=lines[True],
        opportunistic_alone=other_alone,
        opportunistic_cycles=shares,
        measured=now(),
        goal={"rate": PAUSE_RATE, "opportunistic": PAUSE_SHARE},
    )
    keep()


def _cycles(
    several: Several, beside: Beside, production: Timeline, rest: float, count: int
) -> list[tuple[bool, float, float]]:
    """Return cycles, each from one rest of production to the next: whether the other ran, start, and end."""
    found: list[tuple[bool, float, float]] = []
    together = True
    _until_rest(several, beside, production, rest)
    while len(found) < count:
        start = time.monotonic()
        _until_rest(several, beside, production, rest)
        found.append((together, start, time.monotonic()))
        together = not together
        (beside.go_on if together else beside.stand_still)()
    if not together:
        beside.go_on()
    return found


def _until_rest(several: Several, beside: Beside, production: Timeline, rest: float) -> None:
    """Wait until production has worked once more and rests for ``rest`` seconds: then no sign of its work is left."""
    before = len(production.values)
    _wait(several, beside, lambda: len(production.values) > before, 60.0)
    _wait(several, beside, lambda: time.monotonic() - production.values[-1][0] > rest, 60.0)


def _wait(several: Several, beside: Beside, condition: Any, seconds: float) -> None:
    def ready() -> bool:
        beside.look()
        return bool(condition())

    if not several.wait(seconds, ready):
        raise SystemExit("a job printed no rate")


@contextlib.contextmanager
def _beside(bench: Bench, pid: int) -> Iterator[Beside]:
    """Run the opportunistic job through ``gpushare run --yield pause``."""
    argv = [sys.executable, "-m", "gpushare", "--host", bench.host.spec, "run", "-g", str(bench.device.gpu.index)]
    argv += ["--opportunistic", "--yield", "pause", "--for", str(pid), "--", *bench.job("big")]
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(argv, stdout=output, env={**os.environ, "PYTHONUNBUFFERED": "1"})
        beside = Beside(child, output, bench.host.processes)
        try:
            yield beside
        finally:
            with contextlib.suppress(NotFound):
                beside.go_on()
            child.send_signal(signal.SIGTERM)
            child.wait()
