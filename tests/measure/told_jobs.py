"""Two jobs whose speed is known, on a clock of their own: what `tune` measures, whatever the machine does meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from gpushare.base.benchmark import Metric
from gpushare.base.errors import GpushareError
from gpushare.base.units import GIB
from gpushare.host.host import Host
from gpushare.measure.experiment import Grounds, Running
from gpushare.measure.metric import Printed
from gpushare.sim.job import Pace, _mps_factor, _pace_in_turns, _parser
from gpushare.sim.state import SimulatedProcess

if TYPE_CHECKING:
    from gpushare.run.several import Program

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


class ToldExperiment:
    """Stands in for `Experiment`: the model of gpushare.sim.job, and a clock that only waiting moves.

    ``scatter`` is by how much rates scatter, as a function of the line's number.
    """

    clock = 100.0
    # All jobs ever, by title.
    started: list[ToldJob] = []  # noqa: RUF012
    # Why slices cannot be set.
    refusal: GpushareError | None = None

    def __init__(self, host: Host, grounds: Grounds, *, grace_seconds: float = 0.0) -> None:
        self.grounds, self.programs = grounds, list[ToldJob]()

    def __enter__(self) -> ToldExperiment:
        return self

    def __exit__(self, *_error: object) -> None:
        self.grounds.close()

    def now(self) -> float:
        return ToldExperiment.clock

    def run(
        self, title: str, argv: Sequence[str], environment: Mapping[str, str], metric: Metric, *, outside: bool = False
    ) -> Running:
        words, printed = list(argv), Printed(metric)
        given = _parser().parse_args(words[words.index(JOB) + 1 :]) if JOB in words else None
        cap = float(environment.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100"))
        job = ToldJob(title, None, cap, 0.0, printed.listen, server=None if outside else 1)
        if given is not None:
            job.need, job.rate, job.busy, job.latency = given.need, given.rate, given.busy, given.latency
        self.programs.append(job)
        # Above every real one, so that nobody else has it.
        job.pid = (1 << 30) + len(ToldExperiment.started)
        ToldExperiment.started.append(job)
        return Running(cast("Program", job), printed, outside)

    def read_outputs(self) -> None:
        """Everything has been told already."""

    def forget_ended(self) -> None:
        self.programs = [job for job in self.programs if job.runs]

    def wait(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        ends = ToldExperiment.clock + seconds
        while not until():
            if ToldExperiment.clock >= ends:
                return False
            ToldExperiment.clock = min(ends, ToldExperiment.clock + EVERY)
            self._print()
        return True

    def _print(self) -> None:
        busy = [job for job in self.programs if job.runs and not job.paused]
        for job in busy:
            if job.need is None:
                continue
            pace = self._pace(job, busy)
            job.lines += 1
            scatter = self.scatter(job)
            latency = "" if job.latency is None else f" latency_ms={job.latency * pace.latency / scatter:.4f}"
            job.listen(f"rate={job.rate * pace.rate * scatter:.3f}{latency}", ToldExperiment.clock)

    def scatter(self, job: ToldJob) -> float:
        return 1 + NOISE * (job.lines % 3 - 1)

    def _pace(self, job: ToldJob, busy: Sequence[ToldJob]) -> Pace:
        """Return how fast a job is next to others, as gpushare.sim.job says."""
        known = {id(each): _process(number, each) for number, each in enumerate(busy, 100) if each.need}
        process, neighbours = known[id(job)], list(known.values())
        state: Any = SimpleNamespace(servers=[])
        own = (
            job.wants
            / (job.need or 1.0)
            * (1.0 if job.server is None else _mps_factor(state, process, neighbours, 0.0))
        )
        contexts: dict[int, list[SimulatedProcess]] = {}
        for other in neighbours:
            contexts.setdefault(other.mps_server or other.pid, []).append(other)
        mine = process.mps_server or process.pid
        return _pace_in_turns(state, process, own, [some for key, some in contexts.items() if key != mine])

    def is_client(self, running: Running) -> bool | None:
        return None if running.outside else True

    def stop(self, program: ToldJob) -> None:
        program.paused = True

    def resume(self, program: ToldJob) -> None:
        program.paused = False

    def end(self, programs: Sequence[ToldJob], **_more: Any) -> None:
        for program in programs:
            program.runs = False

    def kill(self, program: ToldJob, **_more: Any) -> None:
        assert program.runs
        program.runs = False

    def slice_of(self, program: ToldJob) -> int:
        if self.refusal is not None:
            raise self.refusal
        return program.slice_us or 2048

    def set_slice(self, program: ToldJob, microseconds: int) -> None:
        assert program.runs
        program.slice_us = microseconds

    def set_server_slice(self, programs: Sequence[ToldJob], microseconds: int) -> None:
        for program in programs:
            assert program.server == 1
            self.set_slice(program, microseconds)


def _process(number: int, job: ToldJob) -> SimulatedProcess:
    return SimulatedProcess(
        pid=number,
        real=False,
        gpu_uuid="GPU",
        name=job.title,
        uid=0,
        started=0,
        sm_percent=round(job.wants),
        busy_percent=job.busy,
        request_ms=job.latency,
        mps_server=job.server,
        slices={} if job.slice_us is None else {"compute": job.slice_us},
    )


def tell(monkeypatch: pytest.MonkeyPatch, kind: type[ToldExperiment] = ToldExperiment) -> None:
    """Let `tune` measure told jobs instead of processes."""
    monkeypatch.setattr("gpushare.measure.tune.Experiment", kind)
    monkeypatch.setattr("gpushare.measure.tune.utilization", lambda *_: 100.0)
    monkeypatch.setattr("gpushare.measure.tune.memory_now", lambda *_: 2 * GIB)
