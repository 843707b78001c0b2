"""Where a job harms least: by what is known of the commands; unknown is never taken for 0."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from gpushare.memory.harm import Command, Residents, in_words, loss_if_joined, order
from gpushare.memory.peaks import Profile


def command(name: str = "job", *, sm: float | None = None, dram: float | None = None, **kept: float) -> Command:
    profile = Profile(sm_percent=sm, dram_percent=dram)
    for other, share in kept.items():
        profile = profile.next_to(other, share)
    return Command(name, profile)


def test_an_empty_gpu_has_no_harm_whoever_comes() -> None:
    for job in (None, command(), command(sm=100)):
        assert loss_if_joined(job, Residents()).percent == 0
        assert order(job, Residents(busy_percent=None)) == 0
        assert in_words(job, Residents()) == "nothing runs there"


@pytest.mark.parametrize(
    ("mine", "others", "percent"),
    [(40, (30,), 0), (40, (60,), 0), (40, (80,), 20), (100, (100,), 100), (50, (40, 40), 30), (10, (90, 90), 10)],
)
def test_what_is_above_100_percent_has_to_wait(mine: float, others: tuple[float, ...], percent: float) -> None:
    there = Residents(known=tuple(command(str(number), sm=one) for number, one in enumerate(others)))
    assert loss_if_joined(command(sm=mine), there).percent == pytest.approx(percent)


def test_memory_bandwidth_counts_where_it_is_known() -> None:
    there = Residents(known=(command("a", sm=20, dram=80),))
    assert loss_if_joined(command(sm=20, dram=70), there).percent == pytest.approx(50)
    assert loss_if_joined(command(sm=20), there).percent == 0


def test_utilization_counts_where_a_program_is_not_known() -> None:
    job = command(sm=50)
    assert loss_if_joined(job, Residents(others=1, busy_percent=80)).percent == pytest.approx(30)
    # What is known to run there is not less busy than the GPU looks.
    there = Residents(known=(command("a", sm=90),), others=1, busy_percent=40)
    assert loss_if_joined(job, there).percent == pytest.approx(40)
    said = in_words(job, Residents(others=1, busy_percent=80))
    assert said == "by profile: it uses 50 %, what runs there 80 % (not measured: utilization), and 30 % has to wait"


def test_a_measured_pair_counts_more_than_the_sum() -> None:
    job, other = command("job", sm=90, other=0.9), command("other", sm=80, job=0.75)
    found = loss_if_joined(job, Residents(known=(other,)))
    assert found.pair
    assert found.percent == pytest.approx(0.1 * 90 + 0.25 * 80)
    assert "measured together, and lose 29 %" in in_words(job, Residents(known=(other,)))
    # With a third one, the measurement says nothing.
    assert not loss_if_joined(job, Residents(known=(other,), others=1, busy_percent=100)).pair
    assert not loss_if_joined(command("job", sm=90, other=0.9), Residents(known=(command("other", sm=80),))).pair


@pytest.mark.parametrize(
    ("job", "there", "words"),
    [
        (None, Residents(others=1, busy_percent=40), "not measured: 40 % busy"),
        (command(), Residents(others=1, busy_percent=40), "not measured: 40 % busy"),
        (command(sm=10), Residents(others=1), "not measured: how busy it is is not known"),
        (command(sm=10), Residents(known=(command("a"),)), "not measured: how busy it is is not known"),
        (command(sm=10), Residents(coming=1, busy_percent=0), "not measured: a job that has just begun"),
    ],
)
def test_unknown_is_unknown(job: Command | None, there: Residents, words: str) -> None:
    assert loss_if_joined(job, there).percent is None
    assert in_words(job, there) == words
    # And never better than a GPU on which nothing runs, or than the job next to what is known to rest.
    assert order(job, there) >= order(job, Residents(others=1, busy_percent=0))


def test_without_a_profile_the_least_busy_gpu_is_first_as_before() -> None:
    busy = [Residents(others=1, busy_percent=percent) for percent in (0, 35, 70, 100)]
    assert sorted(busy, key=lambda one: order(None, one)) == busy
    # An instance of which nothing is known comes last.
    assert order(None, Residents(others=1)) >= order(None, busy[-1])


def test_a_job_that_has_not_begun_counts_as_one_that_fills_the_gpu() -> None:
    assert order(command(sm=50), Residents(coming=1, busy_percent=0)) > order(
        command(sm=50), Residents(others=1, busy_percent=40)
    )


percent = some.floats(0, 100)
maybe = some.none() | percent
profiles = some.builds(Profile, sm_percent=maybe, dram_percent=maybe, busy_percent=maybe)
commands = some.builds(Command, some.sampled_from("abcdef"), profiles)
there_all = some.builds(
    Residents,
    known=some.lists(commands, max_size=4).map(tuple),
    others=some.integers(0, 3),
    coming=some.integers(0, 2),
    busy_percent=maybe,
)


@given(some.none() | commands, some.lists(there_all, min_size=2, max_size=6))
def test_more_harm_never_ranks_first(job: Command | None, devices: list[Residents]) -> None:
    first, *rest = sorted(devices, key=lambda one: order(job, one))
    mine = loss_if_joined(job, first).percent
    for other in rest:
        percent = loss_if_joined(job, other).percent
        if mine is not None and percent is not None:
            assert mine < percent + 10
    assert in_words(job, first)


@given(some.none() | commands, there_all)
def test_unknown_is_never_better_than_any_answer_could_be(job: Command | None, there: Residents) -> None:
    """The order of what is not known is that of the worst that it may be."""
    if loss_if_joined(job, there).percent is not None:
        return
    full = Command("x", Profile(sm_percent=100)) if job is None or job.profile.use_percent is None else job
    uses = there.use_percent
    assert order(job, there) == order(full, Residents(known=(command("y", sm=100 if uses is None else uses),)))


@given(commands, there_all, percent)
def test_one_more_job_is_never_less_harm(job: Command, there: Residents, use: float) -> None:
    more = Residents(
        known=(*there.known, command("z", sm=use)),
        others=there.others,
        coming=there.coming,
        busy_percent=there.busy_percent,
    )
    before, after = loss_if_joined(job, there), loss_if_joined(job, more)
    if before.percent is not None and after.percent is not None and not before.pair:
        assert after.percent >= before.percent - 1e-9
