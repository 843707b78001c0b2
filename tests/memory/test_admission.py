"""Who may start next: first come first served, and nobody is delayed by one who passes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpushare.memory.admission import Room, Running, Waiting, admitted, could_ever_fit, fits

GPU = {"a": Room(memory_bytes=80)}


def job(name: str, size: int | None, keys: tuple[str, ...] = ("a",), *, client: bool = False) -> Waiting:
    return Waiting(name=name, memory_bytes=size, keys=keys, client=client)


def first(keys_of: dict[str, tuple[str, ...]]) -> dict[str, str]:
    """Return the device of each job of one device."""
    return {name: keys[0] for name, keys in keys_of.items()}


def of(*sizes: int) -> list[Running]:
    return [Running(memory_bytes=size) for size in sizes]


@pytest.mark.parametrize(
    ("running", "waiting", "start"),
    [
        # In the order in which they came.
        ((), (40, 30, 20), "12"),
        # A small one passes: the large one needs both to end; then there is room for 20 more.
        ((30, 40), (60, 10), "2"),
        # As soon as one of the two ends, the large one fits exactly.
        ((35, 35), (45, 10), ""),
        # One of unknown size gets a GPU without others.
        ((), (None, 1), "1"),
        ((1,), (None, 1), ""),
        # A job between two that wait delays neither: the second one starts next to the first one.
        ((70,), (60, 20, 10), ""),
        ((60,), (60, 10, 10), "23"),
    ],
)
def test_who_starts(running: tuple[int, ...], waiting: tuple[int | None, ...], start: str) -> None:
    jobs = [job(str(number), size) for number, size in enumerate(waiting, 1)]
    assert first(admitted(GPU, {"a": of(*running)}, jobs)) == dict.fromkeys(start, "a")


def test_a_job_that_never_fits_holds_up_nobody() -> None:
    assert first(admitted(GPU, {}, [job("huge", 81), job("small", 80)])) == {"small": "a"}
    assert not could_ever_fit(GPU, job("huge", 81))


def test_a_job_takes_its_best_gpu_and_else_the_next() -> None:
    rooms = {"a": Room(memory_bytes=80), "b": Room(memory_bytes=40)}
    assert first(admitted(rooms, {"b": of(20)}, [job("1", 30, ("b", "a")), job("2", 20, ("b", "a"))])) == {
        "1": "a",
        "2": "b",
    }


def test_a_job_of_several_gpus_gets_all_or_none() -> None:
    rooms = {key: Room(memory_bytes=80) for key in "abc"}
    pair = Waiting(name="pair", memory_bytes=60, keys=("a", "b", "c"), count=2)
    assert admitted(rooms, {"a": of(40)}, [pair]) == {"pair": ("b", "c")}
    assert admitted(rooms, {"a": of(40), "b": of(40)}, [pair]) == {}
    # The next one has what is left of them.
    assert admitted(rooms, {}, [pair, job("later", 70, ("a", "b", "c"))])["later"] == ("c",)
    assert not could_ever_fit({"a": rooms["a"]}, pair)
    assert could_ever_fit(rooms, pair)


def test_small_jobs_do_not_starve_a_job_of_several_gpus() -> None:
    rooms = {key: Room(memory_bytes=80) for key in "abc"}
    pair = Waiting(name="pair", memory_bytes=60, keys=("a", "b"), count=2)
    running = {"a": of(40), "b": of(40)}
    # Next to it there is room for 20 on its GPUs, and for more on the third one.
    assert first(admitted(rooms, running, [pair, job("small", 20, ("a",))])) == {"small": "a"}
    assert first(admitted(rooms, running, [pair, job("small", 30, ("a",))])) == {}
    assert first(admitted(rooms, running, [pair, job("small", 30, ("a", "b", "c"))])) == {"small": "c"}


def test_clients_of_mps_are_counted() -> None:
    rooms = {"a": Room(memory_bytes=80, clients=2)}
    running = {"a": [Running(memory_bytes=1, client=True)]}
    three = [job("1", 1, client=True), job("2", 1, client=True), job("3", 1)]
    assert first(admitted(rooms, running, three)) == {"1": "a", "3": "a"}
    assert not fits(rooms["a"], [Running(memory_bytes=1, client=True)] * 2, job("x", 1, client=True))


SIZES = st.integers(1, 12)


@given(st.lists(SIZES, max_size=5).filter(lambda sizes: sum(sizes) <= 20), st.lists(SIZES, min_size=1, max_size=4))
@settings(deadline=None)
def test_nobody_is_delayed_whichever_jobs_end_first(held: list[int], sizes: list[int]) -> None:
    rooms = {"a": Room(memory_bytes=20)}
    waiting = [job(str(at), size) for at, size in enumerate(sizes)]
    places = admitted(rooms, {"a": of(*held)}, waiting)
    started = [size for at, size in enumerate(sizes) if str(at) in places]
    assert sum(held) + sum(started) <= 20
    for at, size in enumerate(sizes):
        if str(at) in places:
            continue
        later = sum(each for other, each in enumerate(sizes) if other > at and str(other) in places)
        # Those that run now or came before it, and still run when it starts.
        there = [*held, *sizes[:at]]
        for count in range(len(there) + 1):
            for staying in itertools.combinations(there, count):
                if sum(staying) + size <= 20:
                    assert sum(staying) + later + size <= 20


def timed(name: str, size: int, seconds: float | None, keys: tuple[str, ...] = ("a",), count: int = 1) -> Waiting:
    return Waiting(name=name, memory_bytes=size, keys=keys, count=count, run_seconds=seconds)


def test_a_job_with_a_time_passes_those_that_cannot_start_before_its_end() -> None:
    running = {"a": [Running(memory_bytes=50, ends_seconds=100)]}
    large = timed("large", 60, None)
    assert first(admitted(GPU, running, [large, timed("short", 30, 100)])) == {"short": "a"}
    assert admitted(GPU, running, [large, timed("long", 30, 101)]) == {}
    # It could start earlier: nothing says how long the other one runs.
    assert admitted(GPU, {"a": of(50)}, [large, timed("short", 30, 1)]) == {}
    # Those that pass together leave their room in time, too.
    both = [large, timed("1", 15, 60), timed("2", 15, 100)]
    assert first(admitted(GPU, running, both)) == {"1": "a", "2": "a"}


def test_a_short_job_runs_on_the_gpu_that_a_job_of_several_waits_with() -> None:
    rooms = {key: Room(memory_bytes=80) for key in "ab"}
    running = {"a": [Running(memory_bytes=80, ends_seconds=60)]}
    pair = timed("pair", 70, None, ("a", "b"), 2)
    assert first(admitted(rooms, running, [pair, timed("short", 40, 60, ("b",))])) == {"short": "b"}
    assert admitted(rooms, running, [pair, timed("long", 40, 61, ("b",))]) == {}


def test_a_job_that_its_own_users_jobs_keep_out_holds_up_nobody_else() -> None:
    """By a small job that never ends and a large one that waits, one user could keep a GPU empty."""
    running = {"a": [Running(memory_bytes=1, uid=7)]}

    def waiting(size: int, uid: int) -> Waiting:
        return Waiting(name=f"{uid}:{size}", memory_bytes=size, keys=("a",), uid=uid)

    assert first(admitted(GPU, running, [waiting(80, 7), waiting(40, 8)])) == {"8:40": "a"}
    # Their own later jobs wait, so that the large one comes to its turn.
    assert admitted(GPU, running, [waiting(80, 7), waiting(40, 7)]) == {}
    # Without jobs of its own in the way it is first, as all are.
    assert admitted(GPU, {"a": [Running(memory_bytes=1, uid=9)]}, [waiting(80, 7), waiting(40, 8)]) == {}
