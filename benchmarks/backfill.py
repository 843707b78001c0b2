"""Simulates lines of jobs: first come first served, EASY backfill, and the rules of `gpushare run --wait`.

``python -m benchmarks.backfill [--mixes 1000]`` prints for the same random mixes makespan and mean wait, and how many jobs
start later than if nobody passed them. ``--packing`` prints 16 jobs of 10 to 90 GiB against the bound: memory times time.
``--least`` prints on small mixes of such jobs the least that is possible while no job starts later than first come first
served, and whether each refusal of gpushare has a run time for which it was needed.

The rules are the code of gpushare (`gpushare.memory.admission`), asked whenever a job comes or ends.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from gpushare.memory.admission import Room, Running, Waiting, admitted

GPU_GIB: Final = 140
# Of GPUs at random, from which the best is taken.
_CHOICES: Final = 50


@dataclass(frozen=True)
class Job:
    """A job: when it comes, how many GPUs it needs, what it holds on each, how long it runs, and for how long it was given."""

    number: int
    comes: float
    gib: int
    gpus: int
    seconds: float
    # At least as long as it runs: users give more than they need.
    given_seconds: float


# For the jobs that wait and those that run until a time (numbers), the jobs that start now, with their GPUs.
Policy = Callable[
    [Sequence[Job], dict[str, dict[int, Job]], dict[int, float], float], list[tuple[Job, tuple[str, ...]]]
]


def simulate(jobs: Sequence[Job], gpus: int, policy: Policy) -> dict[int, float]:
    """Return when each job starts."""
    running: dict[str, dict[int, Job]] = {str(gpu): {} for gpu in range(gpus)}
    started: dict[int, float] = {}
    ends: dict[int, float] = {}
    coming = sorted(jobs, key=lambda job: (job.comes, job.number))
    waiting: list[Job] = []
    now = 0.0
    while coming or waiting or ends:
        now = min([*(job.comes for job in coming[:1]), *ends.values()])
        for number in [number for number, end in ends.items() if end <= now]:
            del ends[number]
            for here in running.values():
                here.pop(number, None)
        while coming and coming[0].comes <= now:
            waiting.append(coming.pop(0))
        for job, keys in policy(waiting, running, started, now):
            waiting.remove(job)
            started[job.number] = now
            ends[job.number] = now + job.seconds
            for key in keys:
                running[key][job.number] = job
    return started


ROOM: Final = Room(memory_bytes=GPU_GIB)


def _free(running: dict[str, dict[int, Job]], key: str) -> int:
    return GPU_GIB - sum(job.gib for job in running[key].values())


def _most_room(running: dict[str, dict[int, Job]]) -> list[str]:
    return sorted(running, key=lambda key: (-_free(running, key), key))


Order = Callable[[dict[str, dict[int, Job]]], list[str]]


def first_come(order: Order = _most_room) -> Policy:
    """Return first come, first served: nobody passes."""

    def policy(
        waiting: Sequence[Job], running: dict[str, dict[int, Job]], _started: dict[int, float], _now: float
    ) -> list[tuple[Job, tuple[str, ...]]]:
        found: list[tuple[Job, tuple[str, ...]]] = []
        then = {key: dict(here) for key, here in running.items()}
        for job in waiting:
            keys = [key for key in order(then) if _free(then, key) >= job.gib][: job.gpus]
            if len(keys) < job.gpus:
                break
            found.append((job, tuple(keys)))
            for key in keys:
                then[key][job.number] = job
        return found

    return policy


def easy(order: Order = _most_room) -> Policy:
    """Return EASY backfill: a job passes if it ends before the first of the line can start, or leaves it its room."""

    def policy(
        waiting: Sequence[Job], running: dict[str, dict[int, Job]], started: dict[int, float], now: float
    ) -> list[tuple[Job, tuple[str, ...]]]:
        found = first_come(order)(waiting, running, started, now)
        then = {key: dict(here) for key, here in running.items()}
        begun = dict(started)
        for job, keys in found:
            begun[job.number] = now
            for key in keys:
                then[key][job.number] = job
        rest = [job for job in waiting if job not in [one for one, _ in found]]
        if not rest:
            return found
        head, *others = rest
        at, reserved = _reservation(head, then, begun, now, order)
        for job in others:
            keys = []
            for key in order(then):
                room = _free(then, key)
                # What is free there when the first one has started.
                stay = sum(
                    one.gib for one in then[key].values() if max(now, begun[one.number] + one.given_seconds) > at
                )
                spare = GPU_GIB - stay - (head.gib if key in reserved else 0)
                if job.gib <= room and (now + job.given_seconds <= at or job.gib <= spare):
                    keys.append(key)
            if len(keys) >= job.gpus:
                begun[job.number] = now
                for key in keys[: job.gpus]:
                    then[key][job.number] = job
                found.append((job, tuple(keys[: job.gpus])))
        return found

    return policy


def _reservation(
    job: Job, running: dict[str, dict[int, Job]], started: dict[int, float], now: float, order: Order
) -> tuple[float, tuple[str, ...]]:
    """Return when a job can start by the times that were given, and where."""
    # A job that runs longer than it was given may end at any time.
    ends = sorted(
        {
            now,
            *(max(now, started[one.number] + one.given_seconds) for here in running.values() for one in here.values()),
        }
    )
    for at in ends:
        left = {
            key: {number: one for number, one in here.items() if max(now, started[number] + one.given_seconds) > at}
            for key, here in running.items()
        }
        keys = [key for key in order(left) if _free(left, key) >= job.gib]
        if len(keys) >= job.gpus:
            return at, tuple(keys[: job.gpus])
    raise AssertionError("it fits on empty GPUs")


def gpushare(order: Order = _most_room, *, timed: bool, first: Sequence[int] = ()) -> Policy:
    """Return the rules of gpushare, with ``--time`` or without; a job of several GPUs fixes them once it is the first.

    ``first``: by the number of a job, the GPU that it takes if it may.
    """
    fixed: dict[int, tuple[str, ...]] = {}

    def policy(
        waiting: Sequence[Job], running: dict[str, dict[int, Job]], started: dict[int, float], now: float
    ) -> list[tuple[Job, tuple[str, ...]]]:
        rooms = dict.fromkeys(running, ROOM)
        here = {
            key: [
                Running(
                    memory_bytes=job.gib,
                    ends_seconds=max(0.0, started[job.number] + job.given_seconds - now) if timed else None,
                )
                for job in jobs.values()
            ]
            for key, jobs in running.items()
        }
        keys = tuple(order(running))
        line = [
            Waiting(
                name=str(job.number),
                memory_bytes=job.gib,
                keys=fixed.get(job.number, keys if not first else _moved_up(keys, str(first[job.number]))),
                count=job.gpus,
                run_seconds=job.given_seconds if timed else None,
            )
            for job in waiting
        ]
        taken = admitted(rooms, here, line)
        if waiting and waiting[0].gpus > 1 and str(waiting[0].number) not in taken and waiting[0].number not in fixed:
            fixed[waiting[0].number] = tuple(_most_room(running)[: waiting[0].gpus])
            return policy(waiting, running, started, now)
        return [(job, taken[str(job.number)][: job.gpus]) for job in waiting if str(job.number) in taken]

    return policy


def _moved_up(keys: Sequence[str], first: str) -> tuple[str, ...]:
    return (first, *(key for key in keys if key != first))


def mix(random_source: random.Random, gpus: int, count: int = 24) -> list[Job]:
    """Return a random mix: most jobs are small and short, some large, some of several GPUs."""
    jobs, comes = [], 0.0
    for number in range(count):
        comes += random_source.expovariate(1 / 3.0)
        several = gpus > 1 and random_source.random() < 0.2
        seconds = min(300.0, random_source.lognormvariate(2.5, 1.0))
        jobs.append(
            Job(
                number=number,
                comes=comes,
                gib=random_source.choice((4, 8, 12, 20, 30, 40, 60, 80, 120)),
                gpus=random_source.randint(2, gpus) if several else 1,
                seconds=seconds,
                given_seconds=seconds * random_source.choice((1.0, 1.2, 2.0, 3.0)),
            )
        )
    return jobs


def bound(jobs: Sequence[Job], gpus: int) -> float:
    """Return the least makespan that memory times time allows."""
    work = sum(job.gib * job.gpus * job.seconds for job in jobs) / (GPU_GIB * gpus)
    return max(work, *(job.comes + job.seconds for job in jobs))


def makespan(jobs: Sequence[Job], started: dict[int, float]) -> float:
    """Return when the last job has ended."""
    return max(started[job.number] + job.seconds for job in jobs)


def compare(mixes: int) -> None:
    """Print the table of all policies."""
    for gpus in (1, 2, 4):
        rows: dict[str, list[tuple[float, float, int, float]]] = {}
        for seed in range(mixes):
            jobs = mix(random.Random(seed), gpus)  # noqa: S311 - a simulation
            alone = simulate(jobs, gpus, first_come())
            for name, policy in (
                ("first come, first served", first_come()),
                ("EASY, times given", easy()),
                ("gpushare", gpushare(timed=False)),
                ("gpushare --time", gpushare(timed=True)),
            ):
                started = simulate(jobs, gpus, policy)
                later = [started[job.number] - alone[job.number] for job in jobs]
                rows.setdefault(name, []).append(
                    (
                        makespan(jobs, started) / bound(jobs, gpus),
                        statistics.mean(started[job.number] - job.comes for job in jobs),
                        sum(late > 1e-6 for late in later),
                        max(later),
                    )
                )
        print(f"{gpus} GPU{'s' if gpus > 1 else ''}, {mixes} mixes of 24 jobs")
        print(f"  {'':<26} {'makespan/bound':>14} {'mean wait':>10} {'later than FCFS':>16} {'at most':>8}")
        for name, values in rows.items():
            spans, waits, late, most = zip(*values, strict=True)
            print(
                f"  {name:<26} {statistics.mean(spans):>14.3f} {statistics.mean(waits):>8.1f} s"
                f" {sum(late) / (24 * mixes):>15.2%} {max(0.0, *most):>6.0f} s"
            )


def packing(seeds: int = 200) -> None:
    """Print 16 jobs of 10 to 90 GiB that come together, against the bound."""
    for gpus in (1, 2):
        found: dict[str, list[float]] = {}
        for seed in range(seeds):
            jobs = small_mix(seed, 16)
            rows: tuple[tuple[str, Policy | None], ...] = (
                ("first come, first served", first_come()),
                ("EASY, exact times", easy()),
                ("gpushare", gpushare(timed=False)),
                ("gpushare --time, exact", gpushare(timed=True)),
                ("anything that fits, largest first", None),
            )
            if gpus > 1:
                best = min(makespan(jobs, simulate(jobs, gpus, _by_chance(seed, at))) for at in range(_CHOICES))
                name = f"gpushare, the best of {_CHOICES} choices of GPU"
                found.setdefault(name, []).append(best / bound(jobs, gpus))
            for name, policy in rows:
                if policy is None:
                    largest = [
                        replace(job, number=at)
                        for at, job in enumerate(sorted(jobs, key=lambda job: -job.gib * job.seconds))
                    ]
                    started = simulate(largest, gpus, _greedy)
                    span = makespan(largest, started)
                else:
                    span = makespan(jobs, simulate(jobs, gpus, policy))
                found.setdefault(name, []).append(span / bound(jobs, gpus))
        print(f"{gpus} GPU{'s' if gpus > 1 else ''}, 16 jobs of 10 to 90 GiB, {seeds} mixes: makespan / bound")
        for name, values in found.items():
            print(f"  {name:<42} {statistics.mean(values):.3f}  (median {statistics.median(values):.3f})")


# -- the least that is possible ----------------------------------------------------------------------------------------


def small_mix(seed: int, count: int) -> list[Job]:
    """Return jobs of 10 to 90 GiB that come together."""
    source = random.Random(seed)  # noqa: S311 - a simulation
    return [
        Job(number, 0.0, source.randint(10, 90), 1, seconds := source.uniform(2.0, 8.0), seconds)
        for number in range(count)
    ]


def least_by_choice(jobs: Sequence[Job], gpus: int) -> float:
    """Return the least makespan of the rules of gpushare over all choices of the GPU of each job."""
    # The first one sees only empty GPUs.
    chosen = itertools.product(*[range(gpus if job.number else 1) for job in jobs])
    return min(makespan(jobs, simulate(jobs, gpus, gpushare(timed=False, first=first))) for first in chosen)


def least_in_hindsight(jobs: Sequence[Job], gpus: int) -> float:
    """Return the least makespan of all schedules, by rules that know the run times, in which no job is later than by FCFS.

    All jobs come at time 0. There is a shortest schedule in which each job, in some order, starts as early as it can next
    to those before it in this order: all orders and all GPUs are tried.
    """
    latest = simulate(jobs, gpus, first_come())
    shortest, floor = makespan(jobs, latest), bound(jobs, gpus)

    def place(rest: Sequence[Job], placed: list[list[tuple[float, float, int]]], end: float) -> None:
        nonlocal shortest
        if not rest:
            shortest = min(shortest, end)
            return
        for job in rest:
            tried: list[list[tuple[float, float, int]]] = []
            for here in placed:
                if here in tried:
                    continue
                tried.append(here)
                start = _earliest(here, job)
                if start > latest[job.number] + 1e-9 or start + job.seconds >= shortest or shortest <= floor + 1e-9:
                    continue
                here.append((start, start + job.seconds, job.gib))
                place([other for other in rest if other is not job], placed, max(end, start + job.seconds))
                here.pop()

    place(jobs, [[] for _ in range(gpus)], 0.0)
    return shortest


def _earliest(here: Sequence[tuple[float, float, int]], job: Job) -> float:
    for start in sorted({0.0, *(end for _, end, _ in here)}):
        overlaps = [(begin, end, gib) for begin, end, gib in here if begin < start + job.seconds and end > start]
        times = [start, *(begin for begin, _, _ in overlaps if begin > start)]
        if all(sum(gib for begin, end, gib in overlaps if begin <= at < end) + job.gib <= GPU_GIB for at in times):
            return start
    raise AssertionError("it fits on an empty GPU")


def refusals(jobs: Sequence[Job]) -> tuple[int, int]:
    """Return on one GPU how often gpushare lets a job wait that has room, and how often a run time is shown for which it must.

    Shown is a set of jobs that run, or come before it, which may be all that is still there when an earlier job starts: with
    them the earlier one has room, and with the refused one too it has not.
    """
    refused = needed = 0
    rules = gpushare(timed=False)

    def policy(
        waiting: Sequence[Job], running: dict[str, dict[int, Job]], started: dict[int, float], now: float
    ) -> list[tuple[Job, tuple[str, ...]]]:
        nonlocal refused, needed
        found = rules(waiting, running, started, now)
        taken = [job for job, _ in found]
        there = [*running["0"].values(), *taken]
        line = [job for job in waiting if job not in taken]
        for at, job in enumerate(line):
            if sum(one.gib for one in there) + job.gib > GPU_GIB:
                continue
            refused += 1
            needed += any(_is_witness([*there, *line[:ahead]], line[ahead], job) for ahead in range(at))
        return found

    simulate(jobs, 1, policy)
    return refused, needed


def _is_witness(there: Sequence[Job], earlier: Job, job: Job) -> bool:
    sums = {0}
    for one in there:
        sums |= {total + one.gib for total in sums}
    return any(total + earlier.gib <= GPU_GIB < total + earlier.gib + job.gib for total in sums)


def least(mixes: int) -> None:
    """Print how far gpushare is from the least that is possible."""
    counts = [refusals(small_mix(seed, 16)) for seed in range(mixes)]
    refused, needed = (sum(column) for column in zip(*counts, strict=True))
    print(f"1 GPU, {mixes} mixes of 16 jobs: {refused} refusals of a job that had room, {needed} of them needed")
    for gpus, count in ((1, 8), (2, 7)):
        rows: dict[str, list[float]] = {}
        for seed in range(mixes):
            jobs = small_mix(seed, count)
            floor = bound(jobs, gpus)
            values = {
                "first come, first served": makespan(jobs, simulate(jobs, gpus, first_come())),
                "gpushare": makespan(jobs, simulate(jobs, gpus, gpushare(timed=False))),
                "gpushare, the best choice of GPUs": least_by_choice(jobs, gpus),
                "the least in hindsight, no job later": least_in_hindsight(jobs, gpus),
            }
            for name, value in values.items():
                rows.setdefault(name, []).append(value / floor)
        print(f"{gpus} GPU{'s' if gpus > 1 else ''}, {mixes} mixes of {count} jobs of 10 to 90 GiB: makespan / bound")
        for name, ratios in rows.items():
            print(f"  {name:<42} {statistics.mean(ratios):.3f}")


def _by_chance(seed: int, at: int) -> Policy:
    chance = random.Random(f"{seed} {at}")  # noqa: S311 - a simulation
    return gpushare(lambda running: chance.sample([*running], len(running)), timed=False)


def _greedy(
    waiting: Sequence[Job], running: dict[str, dict[int, Job]], _started: dict[int, float], _now: float
) -> list[tuple[Job, tuple[str, ...]]]:
    """Start whatever fits: earlier jobs are delayed."""
    found: list[tuple[Job, tuple[str, ...]]] = []
    then = {key: dict(here) for key, here in running.items()}
    for job in waiting:
        keys = tuple(key for key in _most_room(then) if _free(then, key) >= job.gib)[: job.gpus]
        if len(keys) == job.gpus:
            found.append((job, keys))
            for key in keys:
                then[key][job.number] = job
    return found


def run() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mixes", type=int, default=1000)
    parser.add_argument("--packing", action="store_true")
    parser.add_argument("--least", action="store_true")
    options = parser.parse_args()
    if options.packing:
        packing()
    elif options.least:
        least(min(options.mixes, 100))
    else:
        compare(options.mixes)


if __name__ == "__main__":
    run()
