"""Who may start next: first come first served, and nobody is delayed by one who passes."""

from __future__ import annotations

import itertools

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


def test_jobs_start_in_the_order_in_which_they_came() -> None:
    assert first(admitted(GPU, {}, [job("1", 40), job("2", 30), job("3", 20)])) == {"1": "a", "2": "a"}


def test_a_small_job_passes_a_large_one_that_it_cannot_delay() -> None:
    # The large one needs both to end; then there is room for 20 more.
    assert first(admitted(GPU, {"a": of(30, 40)}, [job("large", 60), job("small", 10)])) == {"small": "a"}


def test_a_small_job_waits_when_it_would_delay_the_large_one() -> None:
    # As soon as one of the two ends, the large one fits exactly.
    assert admitted(GPU, {"a": of(35, 35)}, [job("large", 45), job("small", 10)]) == {}


def test_a_job_that_never_fits_holds_up_nobody() -> None:
    assert first(admitted(GPU, {}, [job("huge", 81), job("small", 80)])) == {"small": "a"}
    assert not could_ever_fit(GPU, job("huge", 81))


def test_a_job_of_unknown_size_gets_a_gpu_without_others() -> None:
    assert first(admitted(GPU, {}, [job("1", None), job("2", 1)])) == {"1": "a"}
    assert admitted(GPU, {"a": of(1)}, [job("1", None), job("2", 1)]) == {}


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


def test_a_job_between_two_that_wait_delays_neither() -> None:
    """The second one starts next to the first one, and has no room for a third."""
    waiting = [job("1", 60), job("2", 20), job("3", 10)]
    assert admitted(GPU, {"a": of(70)}, waiting) == {}
    assert first(admitted(GPU, {"a": of(60)}, [job("1", 60), job("2", 10), job("3", 10)])) == {"2": "a", "3": "a"}


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
