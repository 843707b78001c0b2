"""When a job leaves the GPU and comes back: while idle, in turns, for production."""

from __future__ import annotations

from gpushare.run.swapping import ForProduction, Idle, Look, Turns
from gpushare.units import GIB


def look(
    now: float,
    *,
    since: float = 0.0,
    busy: int | None = 0,
    cpu: float = 0.0,
    free: int = 50 * GIB,
    others: bool = False,
    production: bool = False,
    held: int = 0,
) -> Look:
    return Look(now, since, busy, cpu, free, others, production, held, production_needs=production, others_stay=True)


def test_an_idle_job_leaves_after_its_time_and_comes_back_at_its_first_work() -> None:
    idle = Idle(10.0)
    assert [idle.leaves(look(float(at))) for at in range(12)] == [False] * 10 + [True, True]
    assert not idle.returns(look(20.0, cpu=5.0))
    assert not idle.returns(look(21.0, cpu=5.02))
    assert idle.returns(look(22.0, cpu=5.2))


def test_work_on_the_gpu_or_the_cpu_is_not_idle() -> None:
    idle = Idle(3.0)
    assert not any(idle.leaves(look(float(at), busy=5)) for at in range(20))
    assert not any(idle.leaves(look(20.0 + at, cpu=0.5 * at)) for at in range(20))
    # Unknown is not idle.
    assert not any(idle.leaves(look(40.0 + at, busy=None, cpu=10.0)) for at in range(20))


def test_a_turn_ends_only_when_others_wait() -> None:
    turns = Turns(30.0)
    assert not turns.leaves(look(100.0, since=0.0))
    assert not turns.leaves(look(29.0, others=True))
    assert turns.leaves(look(30.0, others=True))
    assert turns.returns(look(31.0))


def test_a_turn_is_nine_times_the_measured_switch() -> None:
    turns = Turns(None)
    assert turns.turn_seconds == 30.0
    turns.switched(2.0)
    turns.switched(1.0)
    assert turns.turn_seconds == 27.0


def test_the_first_turn_is_as_long_as_the_size_of_the_job_asks_for() -> None:
    turns = Turns(None)
    assert not turns.leaves(look(100.0, others=True, held=40 * GIB))
    assert 200 < turns.turn_seconds < 360
    assert turns.leaves(look(360.0, others=True, held=40 * GIB))
    turns = Turns(None)
    assert turns.leaves(look(30.0, others=True, held=GIB))


def test_turns_that_are_too_short_warn_once_with_the_loss() -> None:
    said: list[str] = []
    turns = Turns(3.0, said.append)
    for _ in range(4):
        turns.switched(0.5)
    assert said == ["turns of 3 s lose about 25 % of the time to switches of 1.0 s; give --turns 9s or more"]


def test_the_turn_of_the_warning_is_long_enough() -> None:
    said: list[str] = []
    turns = Turns(3.0, said.append)
    for _ in range(2):
        turns.switched(0.18)
    assert said[0].endswith("give --turns 4s or more")


def test_production_that_waits_or_grows_gets_the_memory() -> None:
    policy = ForProduction()
    assert not policy.leaves(look(0.0))
    assert policy.leaves(look(0.0, production=True))
    assert policy.leaves(look(0.0, free=GIB - 1))
    assert not policy.returns(look(1.0, production=True))
    assert not policy.returns(look(2.0))
    assert not policy.returns(look(11.0))
    assert policy.returns(look(12.0))


def test_a_large_job_leaves_in_time_for_a_production_that_grows() -> None:
    # 30 GiB take about 21 s to leave; production takes 0.25 GiB more each second.
    policy = ForProduction()
    free = [20 * GIB - at * GIB // 4 for at in range(80)]
    left = next(at for at in range(80) if policy.leaves(look(float(at), free=free[at], held=30 * GIB)))
    # It looks once a second here.
    assert 0.75 * GIB <= free[left + 21] <= 2 * GIB


def test_one_allocation_of_production_is_no_growth() -> None:
    policy = ForProduction()
    free = [30 * GIB] * 5 + [8 * GIB] * 5
    assert not any(policy.leaves(look(float(at), free=size, held=30 * GIB)) for at, size in enumerate(free))


def test_a_program_that_starts_in_several_steps_is_no_growth() -> None:
    policy = ForProduction()
    sizes = [30, 30, 29.5, 29.4, 8, 8, 7.9, 7.9, 7.9]
    assert not any(policy.leaves(look(at * 0.5, free=int(size * GIB), held=8 * GIB)) for at, size in enumerate(sizes))


def test_a_job_does_not_come_back_where_it_would_have_to_leave_at_once() -> None:
    policy = ForProduction()
    tight, wide = 31 * GIB, 33 * GIB
    assert not any(policy.returns(look(float(at), free=tight, held=30 * GIB)) for at in range(30))
    assert [policy.returns(look(30.0 + at, free=wide, held=30 * GIB)) for at in range(12)] == [False] * 10 + [True] * 2
