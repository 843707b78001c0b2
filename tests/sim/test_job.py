"""The simulated job: its speed is what its documented model says, and it runs as a program."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from gpushare.connect import connect
from gpushare.sim import activity, admin
from gpushare.sim.job import pace_of, target_of
from gpushare.sim.state import SimulatedHostState, SimulatedProcess
from tests.sim.nvml_host import state_of

SPEC = "sim:h200"


@pytest.fixture
def state() -> SimulatedHostState:
    connect(SPEC)
    return state_of(SPEC)


def job(
    state: SimulatedHostState, need: float, *, server: int | None = None, threads: float = 100.0
) -> SimulatedProcess:
    process = SimulatedProcess(
        pid=state.new_pid(),
        real=False,
        gpu_uuid=state.gpus[0].uuid,
        name="job",
        uid=0,
        started=0,
        sm_percent=round(min(need, threads)),
        mps_daemon=server,
        mps_server=server,
        threads=threads if server else None,
    )
    state.processes.append(process)
    return process


def test_alone_it_runs_at_its_full_rate(state: SimulatedHostState) -> None:
    assert pace_of(state, job(state, 40), 40).rate == 1.0


@pytest.mark.parametrize("copies", [2, 4, 8])
def test_time_sliced_each_gets_its_part_however_little_it_needs(state: SimulatedHostState, copies: int) -> None:
    jobs = [job(state, 5) for _ in range(copies)]
    assert [pace_of(state, job, 5).rate for job in jobs] == [1 / copies] * copies


@pytest.mark.parametrize(("copies", "speed"), [(2, 1.0), (4, 100 / 160), (8, 100 / 320)])
def test_under_mps_they_run_at_the_same_time(state: SimulatedHostState, copies: int, speed: float) -> None:
    jobs = [job(state, 40, server=9) for _ in range(copies)]
    assert pace_of(state, jobs[0], 40).rate == pytest.approx(speed)


def test_a_cap_holds_it_down_and_leaves_room(state: SimulatedHostState) -> None:
    jobs = [job(state, 40, server=9, threads=25.0) for _ in range(4)]
    assert pace_of(state, jobs[0], 40).rate == pytest.approx(25 / 40)


def test_contention_costs_only_where_they_want_too_much(state: SimulatedHostState) -> None:
    jobs = [job(state, 40, server=9) for _ in range(2)]
    assert pace_of(state, jobs[0], 40, contention=10).rate == 1.0
    job(state, 40, server=9)
    assert pace_of(state, jobs[0], 40, contention=10).rate == pytest.approx(100 / 120 * 0.9)


def test_one_outside_takes_turns_with_all_clients_together(state: SimulatedHostState) -> None:
    clients = [job(state, 40, server=9) for _ in range(2)]
    outside = job(state, 40)
    assert pace_of(state, outside, 40).rate == 0.5
    assert pace_of(state, clients[0], 40).rate == 0.5


def test_who_draws_the_memory_is_slowed_by_the_others_that_do(state: SimulatedHostState) -> None:
    one, other, third = (job(state, 20, server=9) for _ in range(3))
    one.bandwidth_percent, other.bandwidth_percent = 90, 60
    assert [pace_of(state, each, 20).rate for each in (one, other)] == [pytest.approx(100 / 150)] * 2
    # It draws nothing of note.
    assert pace_of(state, third, 20).rate == 1.0
    other.stopped_at = 1.0
    assert pace_of(state, one, 20).rate == 1.0
    assert activity.gpm_sample(state, target_of(state, one)).bandwidth == pytest.approx(90 + 20 * 20 / 96)
    one.stopped_at = 1.0
    assert activity.gpm_sample(state, target_of(state, one)).bandwidth == pytest.approx(20 * 20 / 96)


def test_streams_need_as_much_again(state: SimulatedHostState) -> None:
    one = job(state, 40)
    assert pace_of(state, one, 40, streams=2).rate == 1.0
    assert pace_of(state, one, 40, streams=5).rate == 0.5


def test_a_stopped_one_stands_still(state: SimulatedHostState) -> None:
    one = job(state, 40)
    one.stopped_at = 1.0
    assert pace_of(state, one, 40).rate == 0.0


def test_an_instance_has_its_share_and_no_neighbours() -> None:
    connect(SPEC)
    admin.set_mig(SPEC, "0", ["1g.18gb", "1g.18gb"])
    state = state_of(SPEC)
    jobs = [job(state, 40) for _ in range(2)]
    for one, mig in zip(jobs, state.gpus[0].mig, strict=True):
        one.gpu_instance_id, one.compute_instance_id = mig.gpu_instance_id, mig.compute_instance_id
    # 16 of 132 SMs.
    assert pace_of(state, jobs[0], 40).rate == pytest.approx(100 * 16 / 132 / 40)
    assert pace_of(state, jobs[0], 5).rate == 1.0


def test_it_says_where_it_must_run() -> None:
    done = subprocess.run([sys.executable, "-m", "gpushare.sim.job"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "gpushare --host sim:h200 run" in done.stderr


def test_it_runs_on_its_host_and_ends_after_its_work(capfd: pytest.CaptureFixture[str]) -> None:
    from gpushare.cli import main

    command = f"{sys.executable} -m gpushare.sim.job --need 40 --rate 100 --work 10 --latency 4"
    assert main(["--host", SPEC, "run", "--", "sh", "-c", command]) == 0
    out = capfd.readouterr().out
    rates = [float(text) for text in re.findall(r"^rate=(.+)$", out, re.MULTILINE)]
    assert rates
    assert all(98 < rate < 102 for rate in rates)
    assert "latency_ms=4.0" in out or "latency_ms=3.9" in out


def test_what_does_not_fit_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    from gpushare.cli import main

    words = [sys.executable, "-m", "gpushare.sim.job", "--work", "-1"]
    assert main(["--host", SPEC, "run", "--", *words]) == 0
    assert main(["--host", SPEC, "run", "--", *words, "--footprint", "200G"]) == 1
    assert "CUDA_ERROR_OUT_OF_MEMORY" in capfd.readouterr().err
    assert main(["--host", SPEC, "run", "--memory", "1G", "--", *words, "--footprint", "2G"]) == 1
    assert "CUDA_ERROR_OUT_OF_MEMORY" in capfd.readouterr().err


def slices(production: SimulatedProcess, other: SimulatedProcess, mine: int, its: int) -> None:
    """Set the slices of both, in microseconds."""
    production.slices, other.slices = {"compute": mine}, {"compute": its}


@pytest.mark.parametrize(
    ("mine", "its", "p99"),
    # Measured on an H200: 2.2x, 1.7x, 1.45x, 1.31x, 1.28x.
    [(2048, 1000, 2.25), (2048, 500, 1.75), (2048, 200, 1.45), (2048, 100, 1.35), (2048, 50, 1.3), (16000, 50, 1.3)],
)
def test_a_request_waits_for_one_slice_of_the_other_and_a_switch(
    state: SimulatedHostState, mine: int, its: int, p99: float
) -> None:
    production, other = job(state, 95), job(state, 95)
    production.busy_percent, production.request_ms = 4.0, 1.0
    slices(production, other, mine, its)
    assert pace_of(state, production, 95) == (1.0, pytest.approx(p99))
    # The other works while production has nothing to do.
    assert pace_of(state, other, 95).rate == pytest.approx(1 - 0.04 * 1.25)


def test_a_request_longer_than_its_slice_waits_again_and_again(state: SimulatedHostState) -> None:
    production, other = job(state, 95), job(state, 95)
    production.busy_percent, production.request_ms = 50.0, 5.6
    slices(production, other, 2048, 500)
    often = pace_of(state, production, 95)
    slices(production, other, 16000, 500)
    once = pace_of(state, production, 95)
    assert (often.latency, once.latency) == (pytest.approx(1 + 3 * 0.75 / 5.6), pytest.approx(1 + 0.75 / 5.6))
    assert once.rate == 1.0
    # What it cannot do in time it does not do: 5.6 ms of each 11.2 ms would take 13.9.
    slices(production, other, 2048, 2500)
    assert pace_of(state, production, 95).rate == pytest.approx(11.2 / (5.6 + 3 * 2.75))


@pytest.mark.parametrize(("mine", "its"), [(2048, 500), (2048, 50), (16000, 500)])
def test_of_two_that_always_work_each_gets_its_slice_less_the_switches(
    state: SimulatedHostState, mine: int, its: int
) -> None:
    one, other = job(state, 95), job(state, 95)
    slices(one, other, mine, its)
    turn = mine + its + 2 * 250
    assert [pace_of(state, each, 95).rate for each in (one, other)] == [
        pytest.approx(mine / turn),
        pytest.approx(its / turn),
    ]


def test_under_mps_a_job_with_gaps_suffers_in_its_requests_and_costs_others_little(state: SimulatedHostState) -> None:
    production, other = job(state, 95, server=9), job(state, 60, server=9)
    production.busy_percent, production.request_ms = 4.0, 1.0
    assert pace_of(state, production, 95) == (1.0, pytest.approx(1.55))
    part = 0.04 * 1.55
    assert pace_of(state, other, 60).rate == pytest.approx(1 - part + part / 1.55)
    assert activity.utilization(state, target_of(state, production)) == pytest.approx(95 * 0.04 + 60)
