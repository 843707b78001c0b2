"""Two jobs whose speed is known, on a clock of their own: what `tune` measures, whatever the machine does meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpushare.base.errors import GpushareError
from gpushare.base.units import GIB
from gpushare.host.host import Host
from gpushare.mps.limits import Limits
from gpushare.run.share import MpsShare, Share
from gpushare.sim.job import Pace, _in_turn, _parser, _squeeze
from gpushare.sim.state import SimulatedProcess

JOB = "gpushare.sim.job"
# They print so often (seconds), and their rates scatter by this.
EVERY = 0.02
NOISE = 0.002


@dataclass
class ToldJob:
    """One job; ``need`` None prints nothing that can be measured."""

    title: str
    need: float | None
    cap: float
    rate: float
    listen: Callable[[str, float], None]
    runs: bool = True
    paused: bool = False
    last_line: str = ""
    failure: str | None = None
    lines: int = 0
    pid: int = 0
    # Percent of the time in which it has work, and the milliseconds of a request.
    busy: float = 100.0
    latency: float | None = None
    slice_us: int | None = None
    # None: outside MPS.
    server: int | None = None

    @property
    def wants(self) -> float:
        """Return the percent of the GPU that it takes."""
        return 0.0 if self.need is None else min(self.need, self.cap)


class ToldSeveral:
    """Stands in for `Several`: the model of gpushare.sim.job, and a clock that only waiting moves."""

    now = 100.0
    # All jobs ever, by PID.
    started: dict[int, ToldJob] = {}  # noqa: RUF012

    def __init__(self, host: Host, share: Share, *, grace_seconds: float = 0.0) -> None:
        self.share, self.programs = share, list[ToldJob]()
        self._mps = isinstance(share, MpsShare)

    def __enter__(self) -> ToldSeveral:
        return self

    def __exit__(self, *_error: object) -> None:
        self.share.close()

    def start(
        self,
        title: str,
        argv: Sequence[str],
        limits: Limits,
        *,
        variables: Mapping[str, str] | None = None,
        listen: Callable[[str, float], None] = lambda _line, _at: None,
        log: Path | None = None,
        outside: object = None,
        **_more: object,
    ) -> ToldJob:
        words = list(argv)
        given = _parser().parse_args(words[words.index(JOB) + 1 :]) if JOB in words else None
        cap = 100.0 if limits.threads_percent is None or not self._mps else limits.threads_percent
        job = ToldJob(title, None, cap, 0.0, listen, server=1 if self._mps and outside is None else None)
        if given is not None:
            job.need, job.rate, job.busy, job.latency = given.need, given.rate, given.busy, given.latency
        self.programs.append(job)
        # Above every real one, so that nobody else has it.
        job.pid = (1 << 30) + len(ToldSeveral.started)
        ToldSeveral.started[job.pid] = job
        return job

    def look(self) -> None:
        """Everything has been told already."""

    def wait(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        ends = ToldSeveral.now + seconds
        while not until():
            if ToldSeveral.now >= ends:
                return False
            ToldSeveral.now = min(ends, ToldSeveral.now + EVERY)
            self._print()
        return True

    def _print(self) -> None:
        busy = [one for one in self.programs if one.runs and not one.paused]
        for one in busy:
            if one.need is None:
                continue
            pace = self._pace(one, busy)
            one.lines += 1
            scatter = 1 + NOISE * (one.lines % 3 - 1)
            latency = "" if one.latency is None else f" latency_ms={one.latency * pace.latency / scatter:.4f}"
            one.listen(f"rate={one.rate * pace.rate * scatter * self.pace():.3f}{latency}", ToldSeveral.now)

    def _pace(self, one: ToldJob, busy: Sequence[ToldJob]) -> Pace:
        """Return how fast a job is next to others, as gpushare.sim.job says."""
        known = {id(job): _process(number, job) for number, job in enumerate(busy, 100) if job.need}
        process, neighbours = known[id(one)], list(known.values())
        state: Any = SimpleNamespace(servers=[])
        own = one.wants / (one.need or 1.0) * (1.0 if one.server is None else _squeeze(state, process, neighbours, 0.0))
        contexts: dict[int, list[SimulatedProcess]] = {}
        for other in neighbours:
            contexts.setdefault(other.mps_server or other.pid, []).append(other)
        mine = process.mps_server or process.pid
        return _in_turn(state, process, own, [some for key, some in contexts.items() if key != mine])

    def pace(self) -> float:
        """Return how fast the machine's CPU is now."""
        return 1.0

    def attached(self, program: ToldJob) -> bool | None:
        return None if program.server is None else True

    def pause(self, *programs: ToldJob, bound_seconds: float = 0.0) -> None:
        for program in programs:
            program.paused = True

    def resume(self, program: ToldJob) -> None:
        program.paused = False

    def end(self, programs: Sequence[ToldJob], **_more: Any) -> None:
        for program in programs:
            program.runs = False

    def kill(self, program: ToldJob, **_more: Any) -> None:
        assert program.runs
        program.runs = False


def _process(number: int, job: ToldJob) -> SimulatedProcess:
    return SimulatedProcess(
        pid=number,
        real=False,
        gpu_uuid="GPU",
        name=job.title,
        user="u",
        uid=0,
        started=0,
        sm_percent=round(job.wants),
        busy_percent=job.busy,
        request_ms=job.latency,
        mps_server=job.server,
        slices={} if job.slice_us is None else {"compute": job.slice_us},
    )


class ToldSlicer:
    """Stands in for `Slicer`. ``refusal``: why slices cannot be set."""

    refusal: GpushareError | None = None

    def __init__(self, *_: object) -> None:
        self.programs = list[ToldJob]()

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        for program in self.programs:
            program.slice_us = None

    def probe(self, pid: int) -> int:
        if ToldSlicer.refusal is not None:
            raise ToldSlicer.refusal
        return ToldSeveral.started[pid].slice_us or 2048

    def set(self, pid: int, microseconds: int) -> None:
        program = ToldSeveral.started[pid]
        assert program.runs
        self.programs.append(program)
        program.slice_us = microseconds

    def set_group(self, _share: object, pids: Sequence[int], microseconds: int) -> None:
        for pid in pids:
            assert ToldSeveral.started[pid].server == 1
            self.probe(pid)
            self.set(pid, microseconds)


def tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `tune` and `compare` measure told jobs instead of processes."""
    clock = SimpleNamespace(monotonic=lambda: ToldSeveral.now)
    monkeypatch.setattr("gpushare.measure.tune.time", clock)
    monkeypatch.setattr("gpushare.measure.pair.time", clock)
    monkeypatch.setattr("gpushare.measure.tune.Several", ToldSeveral)
    monkeypatch.setattr("gpushare.measure.tune.Slicer", ToldSlicer)
    monkeypatch.setattr("gpushare.measure.pair.utilization", lambda *_: 100.0)
    monkeypatch.setattr("gpushare.measure.pair.peak_memory", lambda *_: 2 * GIB)


class SlowAtTimes(ToldSeveral):
    """The machine's CPU is slow for a second and a half now and then, whatever the jobs do."""

    def pace(self) -> float:
        return 0.6 if ToldSeveral.now % 8.5 > 7.0 else 1.0


class SeldomPrints(ToldSeveral):
    """The other job prints after each second of work what it did per second since the last time, pauses included."""

    def start(self, *words: Any, **more: Any) -> ToldJob:
        job = super().start(*words, **more)
        if job.title != "production":
            told, done, since = job.listen, list[float](), [ToldSeveral.now]

            def gather(line: str, at: float) -> None:
                done.append(EVERY * float(line.removeprefix("rate=")))
                if len(done) * EVERY >= 1.0:
                    told(f"rate={sum(done) / (at - since.pop()):.3f}", at)
                    done.clear()
                    since.append(at)

            job.listen = gather
        return job


class Bursts(ToldSeveral):
    """What production prints is held back by a buffer."""

    seconds = 1.0

    def start(self, *words: Any, **more: Any) -> ToldJob:
        job = super().start(*words, **more)
        if job.title == "production":
            told, held, since = job.listen, list[str](), [ToldSeveral.now]

            def gather(line: str, at: float) -> None:
                held.append(line)
                if at - since[-1] >= self.seconds:
                    since[:] = [at]
                    for one in held:
                        told(one, at)
                    held.clear()

            job.listen = gather
        return job


class SavesItsState(ToldSeveral):
    """Production prints nothing for a while, again and again."""

    every, gap = 20.0, 2.0

    def start(self, *words: Any, **more: Any) -> ToldJob:
        job = super().start(*words, **more)
        if job.title == "production":
            told = job.listen
            job.listen = lambda line, at: None if at % self.every < self.gap else told(line, at)
        return job


class EndsEarly(ToldSeveral):
    """The other job prints once, and ends after five seconds."""

    def start(self, *words: Any, **more: Any) -> ToldJob:
        job = super().start(*words, **more)
        if job.title != "production":
            told, began = job.listen, ToldSeveral.now

            def seldom(line: str, at: float) -> None:
                if at - began < 0.1:
                    told(line, at)
                job.runs = at - began < 5.0

            job.listen = seldom
        return job


class Hangs(ToldSeveral):
    """Production prints for six seconds, and then nothing any more."""

    def start(self, *words: Any, **more: Any) -> ToldJob:
        job = super().start(*words, **more)
        if job.title == "production":
            told, began = job.listen, ToldSeveral.now
            job.listen = lambda line, at: None if at - began > 6.0 else told(line, at)
        return job


class PrintsP99(ToldSeveral):
    """Production prints a p99 every nine seconds."""

    def start(self, *words: Any, **more: Any) -> ToldJob:
        job = super().start(*words, **more)
        if job.title == "production":
            told = job.listen
            job.listen = lambda line, at: told(line + " p99=1.0" if at % 9.0 < EVERY else line, at)
        return job
