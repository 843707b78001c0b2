"""A farm of 100 small trainings on one GPU, beside ``xargs -P`` under an MPS daemon without limits.

``python -m benchmarks.gpu_farm [--json FILE] [--parts small,large] [--rehearse]``, as root, about 7 minutes on an H100 with
16 cores. ``small``: the seconds that 100 trainings of 1.5 s of steps take, in turn with each other in each round. ``large``: 24
trainings of 6 GiB, of which not all fit: how many fail. Changes no setting of the GPU; its MPS daemons listen in private
directories.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.gpu_script import GPU, Gpu, Part, measured, parser_of
from benchmarks.jobs import small as small_training

# One thread each: 16 cores, and the steps are launches.
OWN = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def train(steps: int, gib: float) -> int:
    """Train a small network for a number of steps with this much memory."""
    import torch

    ballast = torch.empty(int(gib * 2**30), dtype=torch.uint8, device="cuda").zero_()
    step = small_training(torch)
    for _ in range(steps):
        step()
    print(f"ballast={ballast.numel()}", flush=True)
    return 0


def program(part: Part, gib: float) -> list[str]:
    """Return the command of a training."""
    if part.rehearse:
        footprint = f"{int(1024 * gib) + 256}M"
        return [sys.executable, "-S", "-m", "gpushare.sim.job", "--seconds", "0.2", "--footprint", footprint]
    steps = str(part.options.steps)
    return [sys.executable, "-m", "benchmarks.gpu_farm", "--train", "--steps", steps, "--gib", str(gib)]


def farm(part: Part, copies: int, command: list[str], *words: str) -> dict[str, Any]:
    """Run a farm; return its seconds, and how it ended."""
    argv = part.gpushare("-q", "farm", "--copies", str(copies), "-g", GPU, *words, "--", *command)
    return _timed(argv, {})


def _timed(argv: list[str], variables: dict[str, str]) -> dict[str, Any]:
    began = time.monotonic()
    done = subprocess.run(
        argv,
        env={**os.environ, **OWN, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        check=False,
    )
    return {
        "seconds": round(time.monotonic() - began, 2),
        "exit_code": done.returncode,
        "failed": done.stdout.count("FAILED"),
        "end": done.stdout[-400:] if done.returncode or "FAILED" in done.stdout else "",
    }


@contextmanager
def daemon(part: Part) -> Iterator[dict[str, str]]:
    """Yield the variables of clients of an MPS daemon without limits."""
    if part.rehearse:
        yield {}
        return
    pipe, log = f"{part.directory}/p", f"{part.directory}/l"
    for directory in (pipe, log):
        os.makedirs(directory, exist_ok=True)
    # By its UUID: the only GPU of a daemon is number 0 to its clients, whatever its number on the host.
    uuid = Gpu(pretend=False).about()["uuid"]
    variables = {"CUDA_MPS_PIPE_DIRECTORY": pipe, "CUDA_MPS_LOG_DIRECTORY": log, "CUDA_VISIBLE_DEVICES": uuid}
    environment = {**os.environ, **OWN, **variables}
    control = "nvidia-cuda-mps-control"
    subprocess.run([control, "-d"], env=environment, check=True, timeout=30)
    try:
        yield variables
    finally:
        subprocess.run([control], input="quit -t 5\n", text=True, env=environment, check=False, timeout=60)


def xargs(part: Part, copies: int, command: list[str], parallel: int) -> dict[str, Any]:
    """Run the copies under ``xargs -P``."""
    words = "sleep 0.02" if part.rehearse else f"sh -c '{' '.join(command)} || echo FAILED >&2'"
    with daemon(part) as variables:
        return _timed(["sh", "-c", f"seq {copies} | xargs -P {parallel} -I@ {words}"], variables)


def small(part: Part) -> dict[str, Any]:
    """Return the seconds of each way, by round; which way begins changes."""
    command, options = program(part, 0), part.options
    runs: dict[str, list[dict[str, Any]]] = {}
    ways = options.ways.split(",")
    for number in range(options.rounds):
        for way in ways if number % 2 == 0 else reversed(ways):
            kind, _, parallel = way.partition(":")
            if kind == "xargs":
                run = xargs(part, options.copies, command, int(parallel))
            else:
                # The first one measures what a copy needs, later ones know it.
                run = farm(part, options.copies, command, *(("--parallel", parallel) if parallel else ()))
            runs.setdefault(way, []).append(run)
            part.expect(not run["failed"] and not run["exit_code"], f"{way}: {run}")
    seconds = {way: [run["seconds"] for run in each] for way, each in runs.items()}
    return {way: {"seconds": each, "median": statistics.median(each)} for way, each in seconds.items()}


def large(part: Part) -> dict[str, Any]:
    """Return how many of trainings fail that do not all fit together."""
    command, copies = program(part, 6), 24
    plain = farm(part, copies, command)
    part.expect(not plain["exit_code"], f"farm: {plain}")
    return {
        "farm": plain,
        "farm --memory 7G": farm(part, copies, command, "--memory", "7G"),
        f"xargs -P {copies}": xargs(part, copies, command, copies),
    }


def main() -> int:
    """Train, or measure."""
    parser = parser_of(__doc__, "small,large")
    parser.add_argument("--ways", default="farm,xargs:16,farm,xargs:32,farm:16", help="each with how many at a time")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--copies", type=int, default=100)
    parser.add_argument("--steps", type=int, default=2000, help="steps of a training")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--gib", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        return train(options.steps, options.gib)
    return measured(options, {"small": small, "large": large}, seconds=540)


if __name__ == "__main__":
    sys.exit(main())
