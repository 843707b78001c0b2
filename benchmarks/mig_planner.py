"""How long a MIG plan takes, in CPU time, and how it grows: ``python -m benchmarks.mig_planner [--rounds N] [--json]``.

Hosts of 1 to 64 H100 with instances of eight different mixes, about half of them busy. Each plan is made cold: the
planner knows nothing about the board yet, as in a command that has just started. Goal: a change of a full host of
8 GPUs stays under 50 ms.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from gpushare.base.model import GpuProcess
from gpushare.gpu_models import find_model
from gpushare.mig import board
from gpushare.mig.plan import MigPlan, NoPlan
from gpushare.mig.planner import Target, plan_add, plan_exact
from gpushare.mig.profile import ComputeInstance, GpuInstance, Layout, Placement, Profile
from gpushare.mig.wish import parse_wish

GOAL_MS = 50.0
SIZES = (1, 2, 4, 8, 16, 32, 64)
# Full GPUs; "!" is busy.
MIXES = (
    "3g.40gb:0! 3g.40gb:4",
    "3g.40gb:4! 2g.20gb:2 1g.10gb:0! 1g.10gb:1",
    "4g.40gb:0! 1g.10gb:4 1g.10gb:5! 1g.10gb:6",
    "1g.10gb:0! 1g.10gb:1 1g.10gb:2! 1g.10gb:3 1g.10gb:4! 1g.10gb:5 1g.10gb:6!",
    "7g.80gb:0",
    "2g.20gb:0! 2g.20gb:2 2g.20gb:4 1g.10gb+me:6",
    "4g.40gb:0 3g.40gb:4!",
    "3g.40gb:0 1g.20gb:4 1g.20gb:6!",
)


@dataclass(frozen=True)
class Timing:
    """One question on a host of some size: CPU milliseconds, the median and the worst of the rounds."""

    question: str
    gpus: int
    median_ms: float
    worst_ms: float
    planned: bool


def gpu_instance(text: str, number: int, offered: Sequence[Profile]) -> GpuInstance:
    """Return the GPU instance that ``3g.40gb:4!`` describes."""
    name, _, start = text.rstrip("!").partition(":")
    profile = next(one for one in offered if one.name == name)
    who = (GpuProcess(pid=4711, compute=True),) if text.endswith("!") else ()
    return GpuInstance(
        id=number,
        profile=profile,
        placement=Placement(int(start), profile.size or 0),
        compute=(ComputeInstance(id=0, profile=profile.whole, holders=who),),
    )


def host(size: int, mixes: Sequence[str] = MIXES) -> list[Layout]:
    """Return a host with ``size`` GPUs; an empty mix is an empty GPU."""
    offered = find_model("h100").profiles
    return [
        Layout(
            gpu=gpu,
            profiles=offered,
            instances=tuple(
                gpu_instance(text, number, offered) for number, text in enumerate(mixes[gpu % len(mixes)].split())
            ),
        )
        for gpu in range(size)
    ]


def questions(size: int) -> dict[str, Callable[[], MigPlan | NoPlan]]:
    """Return what is asked of a host of this size."""
    full, empty = host(size), host(size, [""])
    everybody = [Target(gpu.gpu, one.id) for gpu in full for one in gpu.instances]
    exact = {gpu.gpu: parse_wish("3g 2g 1g*2") for gpu in full}
    found: dict[str, Callable[[], MigPlan | NoPlan]] = {
        "full host, one 3g more": lambda: plan_add(full, parse_wish("3g"), may_destroy=True),
        "full host, 3g 2g 1g*2 more": lambda: plan_add(full, parse_wish("3g 2g 1g*2"), may_destroy=True),
        "full host, a 2g and a 1g more per GPU": lambda: plan_add(
            full, parse_wish(f"2g*{size} 1g*{size}"), may_destroy=True
        ),
        "full host, every GPU to 3g 2g 1g*2": lambda: plan_exact(full, exact, evict=everybody),
        "full host, 12 of 5 kinds more": lambda: plan_add(
            full, parse_wish("3g*2 2g*2 1g*4 1g.20gb*2 1g+me*2"), may_destroy=True
        ),
    }
    if size <= 32:  # About five seconds on 64: the states of the search grow with the product of the counts.
        found["empty host, a 3g, a 2g and a 1g per GPU"] = lambda: plan_add(
            empty, parse_wish(f"3g*{size} 2g*{size} 1g*{size}")
        )
    return found


def measure(name: str, size: int, ask: Callable[[], MigPlan | NoPlan], rounds: int) -> Timing:
    """Return how long one question takes; the planner forgets all boards before each round."""
    taken = []
    answer: MigPlan | NoPlan | None = None
    for _ in range(rounds):
        board.forget()
        started = time.process_time()
        answer = ask()
        taken.append((time.process_time() - started) * 1e3)
    return Timing(name, size, statistics.median(taken), max(taken), isinstance(answer, MigPlan))


def main() -> None:
    """Measure, print a table or JSON, and end with 1 when the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    timings = [measure(name, size, ask, arguments.rounds) for size in SIZES for name, ask in questions(size).items()]
    if arguments.json:
        print(json.dumps({"python": platform.python_version(), "timings": [asdict(one) for one in timings]}, indent=2))
    else:
        print_table(timings)
    missed = [one for one in timings if one.gpus == 8 and one.median_ms > GOAL_MS]
    raise SystemExit(1 if missed else 0)


def print_table(timings: Sequence[Timing]) -> None:
    """Print one row per question, one column per host size: median CPU milliseconds."""
    names = list(dict.fromkeys(one.question for one in timings))
    print(f"median CPU milliseconds; goal {GOAL_MS:g} on 8 GPUs; * is refused (something busy is in the way)")
    print(f"{'GPUs':42}" + "".join(f"{size:>9}" for size in SIZES))
    for name in names:
        cells = {
            one.gpus: f"{one.median_ms:.1f}" + ("" if one.planned else "*") for one in timings if one.question == name
        }
        print(f"{name:42}" + "".join(f"{cells.get(size, '-'):>9}" for size in SIZES))


if __name__ == "__main__":
    main()
