"""A production job and an opportunistic one beside it, as they are measured: started, awaited, watched in windows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from gpushare.actions.listened import Program
from gpushare.actions.mps_limits import MpsLimits
from gpushare.actions.pacing import DUTY_SECONDS
from gpushare.actions.several import Several, peak_memory
from gpushare.errors import OperationFailed, TimedOut
from gpushare.host.activity import BandwidthRecorder
from gpushare.measure.bounded import bounded
from gpushare.measure.controller import Search
from gpushare.measure.metric import Metric, hopeless
from gpushare.measure.progress import Progress, Window
from gpushare.measure.usage import UsageMeter
from gpushare.measure.window_length import LONGEST_SECONDS, WindowLength
from gpushare.units import quoted

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.selection import Device

# Fewer moments at which a job prints say little in a window; of the other fewer are enough, as its rate decides less.
_LEAST_MOMENTS: Final = 5
_LEAST_MOMENTS_OF_OTHER: Final = 3
_LONGEST_FOR_OTHER_SECONDS: Final = 5.0
_LONGEST_ALONE_SECONDS: Final = 15.0
# The loss falls with the time only over several cycles.
_LEAST_CYCLES: Final = 3


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """What to run and how long to watch (seconds). ``rounds`` pairs of windows a trial, up to ``most_rounds``.

    None: as the jobs print (`WindowLength`), and more windows where the figures scatter.
    """

    production: Sequence[str]
    opportunistic: Sequence[str]
    search: Search
    metric: Metric = field(default_factory=Metric)
    opportunistic_metric: Metric = field(default_factory=Metric)
    window_seconds: float | None = None
    rounds: int | None = None
    most_rounds: int | None = None
    settle_seconds: float = 0.4
    warm_seconds: float = 1.0
    start_seconds: float = 600.0
    # A pause waits so long for the drain of a queue; h200.md's deepest one took 0.1 s.
    drain_seconds: float = 1.5


class Pair:
    """The two jobs in one share. Windows of both are taken here; what they mean is judged elsewhere."""

    def __init__(self, host: Host, device: Device, options: TuneOptions, several: Several) -> None:
        self._host, self._device, self._options, self.several = host, device, options, several
        self._bandwidth = BandwidthRecorder(host.nvml, device.gpu.index)
        self._window = WindowLength(options.window_seconds, tails=options.search.goal.p99_factor is not None)
        self._production: Program | None = None
        self._seen = Progress(options.metric)
        self.production_cap: float | None = None
        self.dram: list[float] = []
        self.memory: int | None = None
        self._usage = UsageMeter(host, device)
        # When the other was let go on after a pause; None: it was not paused yet.
        self._resumed: float | None = None

    def opportunistic_alone(self) -> tuple[float | None, float | None, int | None]:
        """Return the opportunistic job's rate, percent of the DRAM's bandwidth, and memory (bytes), all without production."""
        program, seen = self.start_opportunistic(MpsLimits())
        self._bandwidth.since_last()
        started = self._now()
        self.several.wait(2 * self._window.seconds)
        # One that seldom prints is watched until it did so several times.
        more = _LONGEST_ALONE_SECONDS - 2 * self._window.seconds

        def told() -> bool:
            return not program.runs or len(seen.moments(started, time.monotonic())) >= _LEAST_MOMENTS_OF_OTHER

        self.several.wait(more, told)
        self._demand_alive(program)
        ended = time.monotonic()
        window, moments = seen.window(started, ended), seen.moments(started, ended)
        dram = self._bandwidth.since_last()
        self._window.hold(_LEAST_MOMENTS_OF_OTHER, moments, started, ended, _LONGEST_FOR_OTHER_SECONDS)
        memory = peak_memory(self._host, self._device, program)
        self.several.kill(program)
        if window.rate == 0:
            raise OperationFailed(
                "the opportunistic job alone printed only rates of 0: it does nothing that can be measured",
                "let it print what it gets done: rate=12.5; or mark another number: --opportunistic-metric REGEX",
                code="no_numbers",
            )
        return window.rate, dram, memory

    def start_opportunistic(self, limits: MpsLimits) -> tuple[Program, Progress]:
        """Start the opportunistic job under these limits and wait until it prints; errors as `tune`."""
        seen = Progress(self._options.opportunistic_metric)
        program = self.several.start(
            "opportunistic", self._options.opportunistic, limits, listen=_bounded(seen), redrawn=True
        )
        self._until_warm(program, seen)
        return program, seen

    def resume(self, program: Program) -> None:
        """Let the other go on after a pause, and wait until it works as before."""
        self._resumed = time.monotonic()
        self.several.resume(program)
        self.several.wait(self._options.settle_seconds)

    def start_production(self, cap: float | None) -> None:
        """Start the production job; one with another cap is ended first."""
        if self._production is not None:
            self.several.end([self._production])
        # Also where it does not start: then it has to be started anew.
        self.production_cap = cap
        self._seen = Progress(self._options.metric)
        self._production = self.several.start(
            "production",
            self._options.production,
            MpsLimits(threads_percent=cap),
            listen=_bounded(self._seen),
            redrawn=True,
        )
        self._until_warm(self._production, self._seen)
        self._fit()

    def _until_warm(self, program: Program, seen: Progress) -> None:
        """Wait until a job prints what is measured, and a while longer."""
        options, started = self._options, time.monotonic()

        def ready() -> bool:
            self._demand_alive(program)
            found = seen.count(0.0, float("inf")) > 0
            if not found and hopeless(seen.refusals, time.monotonic() - started):
                raise OperationFailed(
                    f"the {program.title} job printed {quoted(seen.refused or '')} where --metric matches, which is no rate or time",
                    "mark the number with the brackets: --metric 'rate=([0-9.]+)'",
                    code="no_numbers",
                )
            return found

        if not self.several.wait(options.start_seconds, ready):
            what = "a line" if not seen.metric.printed else "a number that --metric matches"
            raise TimedOut(
                f"the {program.title} job did not print {what} in {options.start_seconds:g} s"
                f"{f'; its last line: {program.last_line}' if program.last_line else ''}",
                "let it print its rate again and again, and give --metric 'rate=([0-9.]+)'; or more time: --timeout 20m",
                code="no_numbers",
            )
        self.several.wait(options.warm_seconds)
        self._demand_alive(program)
        if self.several.attached(program) is False:
            raise OperationFailed(
                f"the {program.title} job is no client of MPS: caps have no effect on it",
                "see that it uses the GPU, and leaves CUDA_MPS_PIPE_DIRECTORY and CUDA_VISIBLE_DEVICES as they are",
                code="not_attached",
            )

    def _demand_alive(self, *programs: Program | None) -> None:
        for program in (*programs, self._production):
            if program is not None and not program.runs:
                raise OperationFailed(
                    f"the {program.title} job ended before it was measured: {program.failure or 'exit code 0'}",
                    "give a command that works on until it is ended, at least for some minutes",
                    code="job_ended",
                )

    def _fit(self) -> None:
        """Make the windows so long that the production job prints often enough in each, and no longer than that needs."""
        started = time.monotonic()
        while True:
            self.several.wait(self._window.seconds)
            self._demand_alive()
            ended = time.monotonic()
            moments = self._seen.moments(started, ended)
            if len(moments) >= _LEAST_MOMENTS:
                self._window.hold(_LEAST_MOMENTS, moments, started, ended)
                self._window.shorten()
                return
            if ended - started > 3 * LONGEST_SECONDS:
                raise TimedOut(
                    f"the production job printed only {len(moments)} numbers in {ended - started:.0f} s",
                    "let it print its rate at least once a second",
                    code="no_numbers",
                )

    def begin_trial(self) -> None:
        """Let the windows be longer than the silences of production until now."""
        self._window.outlast()

    @property
    def window_seconds(self) -> float:
        """Return how long a window is."""
        return self._window.seconds

    @property
    def rounds(self) -> int:
        """Return how many windows together a trial has at least."""
        return self._window.rounds(self._options.rounds)

    @property
    def most_rounds(self) -> int:
        """Return how many it has at most."""
        return self._window.most_rounds(self._options.most_rounds, self.rounds)

    @property
    def silent_seconds(self) -> float:
        """Return for how long production has printed nothing that is measured."""
        last = self._seen.last
        return math.inf if last is None else time.monotonic() - last

    def alone_window(self) -> Window:
        """Watch the production job while the other does not run or is paused."""
        self._bandwidth.since_last()
        started = self._now()
        self.several.wait(self._window.seconds)
        self._demand_alive()
        ended = time.monotonic()
        window = self._seen.window(started, ended)
        self._window.silent(self._seen.longest_gap(started, ended))
        dram = self._bandwidth.since_last()
        if dram is not None and self.production_cap is None:
            self.dram.append(dram)
        if self._production is not None and self.production_cap is None:
            memory = peak_memory(self._host, self._device, self._production)
            self.memory = memory if self.memory is None else max(self.memory, memory or 0)
        return window

    def together_window(
        self, program: Program, seen: Progress, duty_percent: float | None = None, full: float | None = None
    ) -> tuple[Window, float | None, float | None]:
        """Watch both; return the production job's window, and the other's rate, which is ``full`` for all of the time.

        The second rate is with the first number after a pause, which may count the pause; the first one is without, and None
        where there is no other. The other runs on at the end of a duty cycle.
        """
        started = self._now()
        phases = []
        if duty_percent is None:
            self.several.wait(self._window.seconds)
        else:
            phases = self._cycle(program, duty_percent / 100)
        self._demand_alive(program)
        ended = time.monotonic()
        production = self._seen.window(started, ended)
        if phases:
            rate = seen.part_time(phases, started, ended, full)
            return production, rate, rate
        spans = self._resumed is not None and not seen.moments(self._resumed, started)
        return production, seen.window(started, ended, skip=int(spans)).rate, seen.window(started, ended).rate

    def _cycle(self, program: Program, duty: float) -> list[tuple[float, float]]:
        """Let a window of whole duty cycles pass, and return when the program ran. In each it first stands still."""
        phases = []
        for _ in range(max(_LEAST_CYCLES, round(self._window.seconds / DUTY_SECONDS))):
            self.several.stop(program)
            self.several.wait((1 - duty) * DUTY_SECONDS)
            self.several.resume(program)
            began = time.monotonic()
            self.several.wait(duty * DUTY_SECONDS)
            phases.append((began, time.monotonic()))
        return phases

    @property
    def others(self) -> Mapping[int, str]:
        """Return who else was on the GPU, by PID."""
        return self._usage.usage().other_names

    def _now(self) -> float:
        """Return the time, after everything that was printed so far has been read: that belongs to what was before."""
        self.several.look()
        self._usage.look([program.pid for program in self.several.programs])
        return time.monotonic()


def _bounded(seen: Progress) -> Callable[[str, float], None]:
    def listen(line: str, at: float) -> None:
        with bounded(seen.metric.pattern):
            seen.listen(line, at)

    return listen
