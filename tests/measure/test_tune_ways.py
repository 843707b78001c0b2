"""Tuning by time-slices and by caps: which is searched first, which is chosen, and what happens where one is not there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from gpushare.base.errors import InUse, NotSupported, OperationFailed
from gpushare.base.selection import Device, select_one
from gpushare.connect import connect
from gpushare.host.host import Host
from gpushare.measure.metric import Metric
from gpushare.measure.pair import TuneOptions
from gpushare.measure.search import Goal, Search, Setting, sliced
from gpushare.measure.tune import TrialReport, TuneReporter, TuneResult, Tuning, compare, tune
from gpushare.mps.limits import Limits
from gpushare.run.share import open_mps_share
from gpushare.sim.current import changing
from gpushare.sim.state import DEFAULT_SLICE_US, StateFile
from tests.measure.told_jobs import ToldSeveral, ToldSlicer, tell

RATE = Metric(pattern=r"rate=([0-9.]+)")
# A request of 1 ms every 25 ms; and requests of 5.6 ms at half load.
SHORT, LONG = ("95", "--busy", "4", "--latency", "1"), ("95", "--busy", "50", "--latency", "5.6")
REFUSAL = NotSupported("process 7: a sandbox forbids pidfd_getfd", "run it on the host", code="seccomp")


def job(*need: str) -> list[str]:
    """Return a job that needs so much of the GPU."""
    return [sys.executable, "-m", "gpushare.sim.job", "--every", "0.02", "--need", *need]


def options(
    production: list[str], *, p99: float | None = None, ways: tuple[str, ...] = ("slices", "caps"), copies: int = 1
) -> TuneOptions:
    """Return options that are quick."""
    return TuneOptions(
        production=production,
        opportunistic=job("95"),
        search=Search(goal=Goal(keep=0.97, p99_factor=p99), grid=(80.0, 60.0, 40.0, 20.0), confirmed=1),
        metric=RATE,
        opportunistic_metric=RATE,
        ways=ways,
        copies=copies,
        window_seconds=0.6,
        rounds=2,
        most_rounds=2,
        settle_seconds=0.1,
        warm_seconds=0.1,
    )


@pytest.fixture
def host() -> Host:
    """Return a simulated H200."""
    return connect("sim:h200")


def device_of(host: Host) -> Device:
    """Return its GPU."""
    return select_one(None, host.nvml.sweep())


Tuned = Callable[..., TuneResult]


@pytest.fixture
def tuned(host: Host, monkeypatch: pytest.MonkeyPatch) -> Tuned:
    """Return what tunes told jobs; ``busy`` is the utilization of production alone."""
    tell(monkeypatch)
    monkeypatch.setattr(ToldSlicer, "refusal", None)

    def run(production: tuple[str, ...], busy: float | None = 4.0, **more: object) -> TuneResult:
        monkeypatch.setattr("gpushare.measure.pair.utilization", lambda *_: busy)
        return tune(host, device_of(host), options(job(*production), **more), TuneReporter())  # type: ignore[arg-type]

    return run


def order(result: TuneResult) -> list[str]:
    """Return the ways in the order of their trials."""
    return list(dict.fromkeys(one.trial.setting.way for one in result.trials))


def test_a_production_job_with_gaps_gets_slices(tuned: Tuned) -> None:
    result = tuned(SHORT, p99=1.4)
    best = result.outcome.best
    assert best is not None
    assert best.setting == sliced(2048, 100)
    assert (best.p99, best.kept) == (pytest.approx(1.35, abs=0.02), pytest.approx(1.0, abs=0.005))
    assert best.opportunistic == pytest.approx(95.0, rel=0.01)
    assert order(result) == ["slices", "caps"]
    # No cap with such a p99 leaves the other as much.
    (caps,) = (one.outcome for one in result.ways if one.way == "caps")
    assert caps is not None
    assert caps.best is not None
    assert caps.best.opportunistic is not None
    assert caps.best.opportunistic < 50.0
    assert result.production_busy == 4.0
    assert result.outcome.stable


def test_a_long_request_gets_a_long_slice(tuned: Tuned) -> None:
    result = tuned(LONG, busy=50.0, p99=1.2)
    assert result.outcome.best is not None
    assert result.outcome.best.setting.production_slice_us == 16000


def test_a_production_job_without_gaps_gets_a_cap(tuned: Tuned) -> None:
    result = tuned(("30",), busy=100.0)
    best = result.outcome.best
    assert best is not None
    assert (best.setting.way, best.setting.threads) == ("caps", 60.0)
    assert order(result) == ["caps", "slices"]


@pytest.mark.parametrize(
    ("busy", "p99", "first"),
    [(4.0, 1.4, "slices"), (100.0, 1.4, "caps"), (None, 1.4, "slices"), (4.0, None, "caps"), (100.0, None, "caps")],
)
def test_the_first_way_is_by_what_production_is(
    tuned: Tuned, monkeypatch: pytest.MonkeyPatch, busy: float | None, p99: float | None, first: str
) -> None:
    starts: list[str] = []
    start = ToldSeveral.start

    def counted(self: ToldSeveral, title: str, *words: object, **more: object) -> object:
        starts.extend([title] if title == "production" else [])
        return start(self, title, *words, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(ToldSeveral, "start", counted)
    result = tuned(SHORT, busy=busy, p99=p99)
    assert order(result)[0] == first
    # Outside MPS, under MPS, and once more where it was not what it seemed.
    assert len(starts) <= (3 if (busy, p99) == (100.0, 1.4) else 2)


def test_what_leaves_the_other_all_makes_the_other_way_needless(tuned: Tuned) -> None:
    result = tuned(("95", "--busy", "1", "--latency", "1"), p99=1.5)
    assert order(result) == ["slices"]
    (caps,) = (one for one in result.ways if one.way == "caps")
    assert (caps.outcome, caps.left_out) == (None, "slices leave the other 0.99 of its rate alone")


@pytest.mark.parametrize("p99", [1.4, None])
def test_where_slices_cannot_be_set_caps_are_searched(
    tuned: Tuned, monkeypatch: pytest.MonkeyPatch, p99: float | None
) -> None:
    monkeypatch.setattr(ToldSlicer, "refusal", REFUSAL)
    result = tuned(SHORT, p99=p99)
    assert order(result) == ["caps"]
    (slices,) = (one for one in result.ways if one.way == "slices" and one.left_out)
    assert slices.left_out == "process 7: a sandbox forbids pidfd_getfd; run it on the host"
    assert result.outcome.best is not None
    with pytest.raises(NotSupported, match="pidfd_getfd"):
        tuned(SHORT, p99=p99, ways=("slices",))


@pytest.mark.parametrize("ways", [("slices", "caps"), ("slices",), ("caps",)])
def test_where_mps_cannot_be_had_nothing_is_searched(
    tuned: Tuned, monkeypatch: pytest.MonkeyPatch, ways: tuple[str, ...]
) -> None:
    """Both ways put the opportunistic job under MPS, as `run` does."""

    def refused(*_: object) -> None:
        raise NotSupported("no MPS in this container", "run it on the host", code="no_mps")

    monkeypatch.setattr("gpushare.measure.tune.open_mps_share", refused)
    with pytest.raises(NotSupported, match="no MPS"):
        tuned(SHORT, p99=1.4, ways=ways)


def test_jobs_that_share_the_slice_already_leave_slices_out(
    tuned: Tuned, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpushare.measure.tune.members", lambda *_: ("one",))
    result = tuned(SHORT, p99=1.4)
    assert order(result) == ["caps"]
    with pytest.raises(InUse, match="other opportunistic jobs"):
        tuned(SHORT, ways=("slices",))


def test_several_copies_share_a_slice_and_their_rates_add_up(tuned: Tuned) -> None:
    """Each slice of its own would take another turn from production."""
    one, three = (tuned(LONG, busy=50.0, p99=1.2, ways=("slices",), copies=copies) for copies in (1, 3))
    assert three.outcome.best is not None
    assert one.outcome.best is not None
    assert three.outcome.best.setting == one.outcome.best.setting
    assert three.outcome.best.p99 == pytest.approx(one.outcome.best.p99, abs=0.01)
    # All together have what a single one has.
    assert three.opportunistic_alone == pytest.approx(one.opportunistic_alone, rel=0.06)
    assert three.outcome.best.opportunistic == pytest.approx(one.outcome.best.opportunistic, rel=0.06)


def test_a_gpu_for_one_process_at_a_time_has_no_slices(tuned: Tuned, host: Host) -> None:
    with changing(StateFile(host.spec)) as (state, _):
        state.gpus[0].compute_mode = 3
    result = tuned(SHORT, p99=1.4)
    assert order(result) == ["caps"]
    with pytest.raises(InUse, match="compute mode"):
        tuned(SHORT, ways=("slices",))


def test_what_is_interrupted_in_the_second_way_keeps_the_trials_of_the_first(
    tuned: Tuned, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = Tuning.trial

    def interrupted(self: Tuning, setting: object) -> object:
        if setting.way == "caps":  # type: ignore[attr-defined]
            raise KeyboardInterrupt
        return trial(self, setting)  # type: ignore[arg-type]

    monkeypatch.setattr(Tuning, "trial", interrupted)
    result = tuned(SHORT, p99=1.4)
    assert isinstance(result.stopped, KeyboardInterrupt)
    assert order(result) == ["slices"]
    assert not result.outcome.stable


def test_a_job_that_ends_before_it_is_measured_ends_the_search(tuned: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **_more: object) -> None:
        raise OperationFailed("the production job ended", "let it run", code="job_ended")

    monkeypatch.setattr(Tuning, "begin", refused)
    with pytest.raises(OperationFailed, match="ended"):
        tuned(SHORT, p99=1.4)


def test_given_slices_are_measured(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    tell(monkeypatch)
    share = open_mps_share(host, device_of(host), sys.executable, Limits())
    settings = [sliced(2048, one) for one in (1000, 100)]
    reports = compare(host, share, options(job(*SHORT)), settings, TuneReporter())
    assert [one.trial.p99 for one in reports] == [pytest.approx(2.25, abs=0.05), pytest.approx(1.35, abs=0.05)]


# -- real processes on a simulated GPU ---------------------------------------------------------------------------------


def test_slices_of_real_processes_are_set_while_they_run_and_gone_afterwards(host: Host) -> None:
    given = replace(options(job(*SHORT), p99=100.0, ways=("slices",)), window_seconds=0.15)
    result = tune(host, device_of(host), given, TuneReporter())
    best = result.outcome.best
    assert best is not None
    assert best.setting.way == "slices"
    assert result.opportunistic_memory_bytes is not None
    assert not host.nvml.processes(0)


def test_the_slice_of_real_processes_is_that_of_their_server(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `run` does it: production outside MPS, the other in the daemon, whose server has the slice."""
    seen: list[tuple[int | None, ...]] = []
    trial = Tuning.trial

    def looked(self: Tuning, setting: Setting) -> TrialReport:
        report = trial(self, setting)
        state = StateFile(host.spec).read()
        assert state is not None
        (server,) = (server for daemon in state.daemons for server in daemon.servers)
        (production,) = (one for one in state.processes if one.real and one.mps_server is None and one.request_ms)
        others = [one for one in state.processes if one.real and one.mps_server is not None]
        assert len(others) == 2
        assert not any("compute" in one.slices for one in others)
        wanted = (setting.production_slice_us, setting.other_slice_us)
        # The driver's own slice needs no entry.
        slices = [one.slices.get("compute", DEFAULT_SLICE_US) for one in (production, server)]
        seen.append((*wanted, *slices))
        return report

    monkeypatch.setattr(Tuning, "trial", looked)
    given = replace(options(job(*SHORT), p99=100.0, ways=("slices",), copies=2), window_seconds=0.15)
    result = tune(host, device_of(host), given, TuneReporter())
    assert result.outcome.best is not None
    assert seen
    assert all(one[:2] == one[2:] for one in seen)
    assert not host.nvml.processes(0)
    assert not host.processes.named("nvidia-cuda-mps-control")


def test_real_processes_whose_slices_cannot_be_read_are_refused_and_ended(host: Host) -> None:
    with changing(StateFile(host.spec)) as (state, _):
        state.channel_fault = "seccomp"
    given = replace(options(job(*SHORT), p99=100.0, ways=("slices",)), window_seconds=0.15)
    with pytest.raises(NotSupported) as caught:
        tune(host, device_of(host), given, TuneReporter())
    assert caught.value.code == "seccomp"
    assert not host.nvml.processes(0)
