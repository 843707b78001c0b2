"""When a job leaves the GPU and comes back: while idle, in turns, for production."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest

from gpushare.base.units import GIB
from gpushare.run.swapping import ForProduction, Idle, IdleInTurns, Sample, Turns

if TYPE_CHECKING:
    from gpushare.memory.ledger import Reservation


def look(
    now: float,
    *,
    since: float = 0.0,
    busy: int | None = 0,
    cpu: float = 0.0,
    main: float | None = None,
    others_cpu: float = 0.0,
    free: int = 50 * GIB,
    others: bool = False,
    production: bool = False,
    held: int = 0,
) -> Sample:
    return Sample(
        now,
        since,
        busy,
        {1: others_cpu, 2: cpu},
        free,
        production,
        held,
        production_needs=production,
        others_stay=True,
        next_in_turn=cast("Reservation", "a job") if others else None,
        main_cpu={2: cpu if main is None else main},
    )


def out(idle: Idle, at: float = 0.0, *, cpu: float = 0.0, level: float = 0.0, others_level: float = 0.0) -> float:
    """Let an idle job leave, look by look; return when it did."""
    for _ in range(10_000):
        if idle.leaves(look(at, cpu=cpu + level * at, others_cpu=others_level * at)):
            return at
        at += 0.5
    raise AssertionError("it never left")


def test_an_idle_job_leaves_after_its_time_and_comes_back_at_its_first_work() -> None:
    idle = Idle(10.0)
    assert [idle.leaves(look(float(at))) for at in range(12)] == [False] * 10 + [True, True]
    assert not idle.returns(look(20.0, cpu=5.0, main=0.0))
    assert not idle.returns(look(20.5, cpu=5.0003, main=0.0003))
    assert idle.returns(look(21.0, cpu=5.0035, main=0.0035))


def test_work_on_the_gpu_or_the_cpu_is_not_idle() -> None:
    idle = Idle(3.0)
    assert not any(idle.leaves(look(float(at), busy=5)) for at in range(20))
    assert not any(idle.leaves(look(20.0 + at, cpu=0.5 * at)) for at in range(20))
    # Unknown is not idle.
    assert not any(idle.leaves(look(40.0 + at, busy=None, cpu=10.0)) for at in range(20))


def test_a_driver_that_does_not_tell_who_works_is_named_once() -> None:
    messages: list[str] = []
    idle = Idle(3.0, messages.append)
    assert not any(idle.leaves(look(float(at), busy=None)) for at in range(20))
    assert messages == ["the driver does not say whether it works, so it stays on the GPU"]


def test_what_a_browser_asks_of_a_notebook_server_is_no_work() -> None:
    """Seen with jupyter_server: 16 ms at once for a list of files, now and then, in the server and not in the kernel."""
    idle = Idle(30.0)
    asked = 0.0
    for number in range(61):
        asked += 0.016 if number % 10 == 0 else 0.0
        leaves = idle.leaves(look(number * 0.5, others_cpu=asked))
    assert leaves
    assert not any(idle.returns(look(31.0 + number, others_cpu=asked + 0.02 * number)) for number in range(600))


def test_a_thread_that_polls_is_no_work_and_a_cell_next_to_it_is() -> None:
    idle = Idle(30.0)
    at = out(idle, level=0.01)
    assert at >= 30.0
    for number in range(1, 600):
        assert not idle.returns(look(at + number * 0.5, cpu=0.01 * (at + number * 0.5))), number
    at += 300.0
    assert idle.returns(look(at, cpu=0.01 * at + 0.004))


def test_small_cells_now_and_then_keep_a_notebook_on_the_gpu() -> None:
    """Their work on the GPU is too short for the driver's samples; a cell like that would wake it."""
    idle = Idle(60.0)
    cpu = 0.0
    for number in range(1200):
        cpu += 0.0001 + (0.004 if number % 60 == 30 else 0.0)
        assert not idle.leaves(look(number * 0.5, cpu=cpu)), number
    # What happens all the time is no work.
    assert out(Idle(60.0), level=0.008) <= 61.0


def test_many_small_requests_wake_a_server() -> None:
    """Each takes a fifth of a millisecond before its call of CUDA, which then waits."""
    idle = Idle(30.0)
    at = out(idle, level=0.0002)
    cpu = 0.0002 * at
    for number in range(200):
        cpu += 0.0004
        if idle.returns(look(at + number * 0.5, cpu=cpu)):
            break
    assert 50 < number < 150


def test_a_job_that_began_to_work_while_it_left_comes_back_at_once() -> None:
    """Its call of CUDA waits, and so it would never use the CPU again."""
    idle = Idle(10.0)
    at = out(idle)
    # The driver's threads have copied for 20 s.
    assert idle.returns(look(at + 20.0, cpu=20.0, main=0.004))
    idle = Idle(10.0)
    at = out(idle)
    assert not idle.returns(look(at + 20.0, cpu=20.0, main=0.0))
    # They go on for a moment.
    assert not idle.returns(look(at + 20.5, cpu=20.1, main=0.0))
    assert idle.returns(look(at + 21.0, cpu=20.1, main=0.003))


def test_a_process_that_ends_while_the_job_is_out_hides_no_work() -> None:
    idle = Idle(10.0)
    at = out(idle, cpu=100.0)
    moment = look(at + 1.0, cpu=100.0)
    assert not idle.returns(moment._replace(cpu={1: 500.0, 2: 100.0}))
    assert not idle.returns(moment._replace(now=at + 4.5, cpu={2: 100.0}))
    assert idle.returns(moment._replace(now=at + 5.0, cpu={2: 100.1}))


def test_the_time_in_which_a_job_was_stopped_is_no_idle_time() -> None:
    """Ctrl-Z stops gpushare too: at the first look after `fg` the job has not worked, and is about to."""
    idle = Idle(60.0)
    assert not any(idle.leaves(look(number * 0.5, busy=90, cpu=float(number))) for number in range(20))
    assert not any(idle.leaves(look(3600.0 + number * 0.5, cpu=20.0)) for number in range(119))
    # What could not leave at once does not begin again.
    idle = Idle(60.0)
    at = out(idle)
    assert idle.leaves(look(at + 30.0))


def stay(idle: Idle, at: float, *, busy: int = 0) -> float:
    """Let an idle job leave, come back at a sign of work, and leave again; return how long it stayed."""
    began = at = out(idle, at) + 20.0
    assert not idle.returns(look(at - 1.0))
    assert idle.returns(look(at, cpu=0.004))
    while not idle.leaves(look(at, cpu=0.004, busy=busy if at == began + 0.5 else 0)):
        at += 0.5
    return at - began


def test_a_job_that_comes_back_and_does_nothing_on_the_gpu_stays_longer_each_time() -> None:
    idle = Idle(10.0)
    stays = [stay(idle, 1000.0 * number) for number in range(1, 7)]
    assert stays == [20.0, 40.0, 80.0, 160.0, 160.0, 160.0]
    assert stay(idle, 7000.0, busy=5) == 10.5
    assert stay(idle, 8000.0) == 20.0


def test_a_heartbeat_does_not_send_a_job_out_and_in_for_ever() -> None:
    """4 ms of a CPU every 30 s, and no work on the GPU."""
    idle, is_out, times = Idle(10.0), False, 0
    for number in range(7200):
        moment = look(number * 0.5, cpu=0.004 * (number // 60))
        if is_out:
            is_out = not idle.returns(moment)
        elif idle.leaves(moment):
            is_out, times = True, times + 1
    assert (is_out, times) == (False, 2)


def test_a_turn_ends_only_when_others_wait() -> None:
    turns = Turns(30.0)
    assert not turns.leaves(look(100.0, since=0.0))
    assert not turns.leaves(look(29.0, others=True))
    assert turns.leaves(look(30.0, others=True))
    assert turns.returns(look(31.0))


def test_a_turn_is_nine_times_the_measured_switch() -> None:
    turns = Turns(None)
    assert turns.turn_seconds == 30.0
    turns.note_switch(2.0)
    turns.note_switch(1.0)
    assert turns.turn_seconds == 27.0


@pytest.mark.parametrize(
    ("count", "seconds", "warning"),
    [
        (4, 0.5, "turns of 3 s lose about 25 % of the time to switches of 1.0 s; give --swap turns=9s or more"),
        # The turn of the warning is long enough.
        (2, 0.18, "turns of 3 s lose about 11 % of the time to switches of 0.4 s; give --swap turns=4s or more"),
    ],
)
def test_turns_that_are_too_short_warn_once_with_the_loss(count: int, seconds: float, warning: str) -> None:
    messages: list[str] = []
    turns = Turns(3.0, messages.append)
    for _ in range(count):
        turns.note_switch(seconds)
    assert messages == [warning]


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
    leaves = next(at for at in range(80) if policy.leaves(look(float(at), free=free[at], held=30 * GIB)))
    # It looks once a second here.
    assert 0.75 * GIB <= free[leaves + 21] <= 2 * GIB


def test_one_allocation_of_production_is_no_growth() -> None:
    policy = ForProduction()
    free = [30 * GIB] * 5 + [8 * GIB] * 5
    assert not any(policy.leaves(look(float(at), free=size, held=30 * GIB)) for at, size in enumerate(free))


def test_a_program_that_starts_in_several_steps_is_no_growth() -> None:
    policy = ForProduction()
    sizes = [30, 30, 29.5, 29.4, 8, 8, 7.9, 7.9, 7.9]
    assert not any(policy.leaves(look(at * 0.5, free=int(size * GIB), held=8 * GIB)) for at, size in enumerate(sizes))


def test_the_growth_of_the_job_itself_is_no_growth_of_production() -> None:
    policy = ForProduction()
    own = [0, 2, 4, 6, 8, 8, 8, 8]
    others = [0, 0, 0, 0, 0, 12, 12, 12]
    looks = [
        look(at * 0.5, free=(24 - held - other) * GIB, held=held * GIB)
        for at, (held, other) in enumerate(zip(own, others, strict=True))
    ]
    assert not any(policy.leaves(each) for each in looks)


def test_a_job_does_not_come_back_where_it_would_have_to_leave_at_once() -> None:
    policy = ForProduction()
    tight, wide = 31 * GIB, 33 * GIB
    assert not any(policy.returns(look(float(at), free=tight, held=30 * GIB)) for at in range(30))
    assert [policy.returns(look(30.0 + at, free=wide, held=30 * GIB)) for at in range(12)] == [False] * 10 + [True] * 2


def test_a_job_does_not_come_back_while_production_grows() -> None:
    # As on an H200: it left early, was back after 10 s, and production failed before it could leave again.
    policy = ForProduction()
    free = [int((20 - 0.3 * at) * GIB) for at in range(12)]
    assert not any(policy.returns(look(float(at), free=size, held=14 * GIB)) for at, size in enumerate(free))
    # From then on it grows no more.
    later = [policy.returns(look(12.0 + at, free=free[-1], held=14 * GIB)) for at in range(30)]
    assert later[:10] == [False] * 10
    assert later[-1]


def test_what_a_job_gave_back_is_no_growth() -> None:
    policy = ForProduction()
    assert not policy.leaves(look(0.0, free=8 * GIB, held=14 * GIB))
    assert not policy.leaves(look(0.5, free=8 * GIB, held=14 * GIB))
    assert [policy.returns(look(1.0 + at, free=22 * GIB, held=14 * GIB)) for at in (0, 1, 9, 10)] == [False] * 3 + [
        True
    ]
    assert not any(policy.leaves(look(12.0 + at, free=8 * GIB, held=14 * GIB)) for at in range(9))


def test_the_return_of_a_job_is_no_step_of_production_that_starts_after_it() -> None:
    policy = ForProduction()
    assert [policy.returns(look(float(at), free=30 * GIB, held=14 * GIB)) for at in (0, 10)] == [False, True]
    sizes = [16, 12, 8, 8, 8]
    assert not any(policy.leaves(look(11.0 + at, free=size * GIB, held=14 * GIB)) for at, size in enumerate(sizes))


def test_a_job_that_needs_nearly_all_of_the_gpu_comes_back_when_nobody_stays() -> None:
    policy = ForProduction()
    alone = [look(float(at), free=31 * GIB, held=30 * GIB)._replace(others_stay=False) for at in range(12)]
    assert [policy.returns(each) for each in alone] == [False] * 10 + [True] * 2


def test_of_two_reasons_to_leave_the_one_that_holds_decides_when_it_is_back() -> None:
    policy = IdleInTurns(Idle(5.0), Turns(2.0))
    assert not policy.leaves(look(0.0, busy=50, others=True))
    assert policy.leaves(look(3.0, busy=50, others=True))
    # Its turn was over: it is in the line again at once.
    assert policy.returns(look(3.1))
    still = IdleInTurns(Idle(1.0), Turns(600.0))
    assert not still.leaves(look(0.0, busy=0))
    assert not still.leaves(look(0.6, busy=0))
    assert still.leaves(look(1.2, busy=0))
    # It was idle: it stays out until it works.
    assert not still.returns(look(2.0, busy=0))
