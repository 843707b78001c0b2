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

from benchmarks.gpu_script import measured

GPUSHARE = [sys.executable, "-m", "gpushare"]


def train(options: argparse.Namespace) -> int:
    """Train a small network for a number of steps with this much memory; print the seconds of the steps."""
    import torch

    ballast = torch.empty(int(options.gib * 2**30), dtype=torch.uint8, device="cuda").zero_()
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(512, 512), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.randn(64, 512, device="cuda")
    began = time.perf_counter()
    for _ in range(options.steps):
        optimizer.zero_grad(set_to_none=True)
        model(data).square().mean().backward()
        optimizer.step()
    torch.cuda.synchronize()
    print(f"seconds={time.perf_counter() - began:.2f} ballast={ballast.numel()}", flush=True)
    return 0


class Part:
    """One part: its programs, and where its files are."""

    def __init__(self, place: str, surprises: list[str], *, rehearse: bool) -> None:
        self.place, self.surprises, self.rehearse = place, surprises, rehearse
        # One thread each: 16 cores, and the steps are launches.
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}

    def program(self, *, steps: int, gib: float) -> list[str]:
        if self.rehearse:
            footprint = f"{int(1024 * gib) + 256}M"
            return [sys.executable, "-S", "-m", "gpushare.sim.job", "--seconds", "0.2", "--footprint", footprint]
        return [sys.executable, "-m", "benchmarks.gpu_farm", "--train", "--steps", str(steps), "--gib", str(gib)]

    def farm(self, copies: int, program: list[str], *words: str) -> dict[str, Any]:
        host = ["--host", "sim:h200"] if self.rehearse else []
        argv = [*GPUSHARE, *host, "-q", "farm", "--copies", str(copies), "-g", "0", *words, "--", *program]
        return self._timed(argv, self.environment)

    def _timed(self, argv: list[str], environment: dict[str, str]) -> dict[str, Any]:
        began = time.monotonic()
        with open(f"{self.place}/output", "w+") as output:
            done = subprocess.run(
                argv, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=400, check=False
            )
            seconds = time.monotonic() - began
            output.seek(0)
            text = output.read()
        return {
            "seconds": round(seconds, 2),
            "exit_code": done.returncode,
            "end": text[-400:] if done.returncode else "",
        }

    @contextmanager
    def daemon(self) -> Iterator[dict[str, str]]:
        """Yield the variables of clients of an MPS daemon without limits."""
        pipe, log = f"{self.place}/p", f"{self.place}/l"
        for directory in (pipe, log):
            os.makedirs(directory, exist_ok=True)
        variables = {**self.environment, "CUDA_MPS_PIPE_DIRECTORY": pipe, "CUDA_MPS_LOG_DIRECTORY": log}
        variables["CUDA_VISIBLE_DEVICES"] = "0"
        if self.rehearse:
            yield self.environment
            return
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env=variables, check=True, timeout=30)
        try:
            yield variables
        finally:
            subprocess.run(
                ["nvidia-cuda-mps-control"], input="quit -t 5\n", text=True, env=variables, check=False, timeout=60
            )

    def xargs(self, copies: int, program: list[str], parallel: int) -> dict[str, Any]:
        line = f"seq {copies} | xargs -P {parallel} -I@ sh -c '{' '.join(program)} || echo FAILED >&2'"
        with self.daemon() as variables:
            if self.rehearse:
                line = f"seq {copies} | xargs -P {parallel} -I@ sleep 0.02"
            began = time.monotonic()
            done = subprocess.run(
                ["sh", "-c", line], env=variables, capture_output=True, text=True, timeout=400, check=False
            )
            seconds = time.monotonic() - began
        return {"seconds": round(seconds, 2), "failed": done.stderr.count("FAILED"), "end": done.stderr[-300:]}


def small(part: Part, options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of each way, by round; which way begins changes."""
    program = part.program(steps=options.steps, gib=0)
    runs: dict[str, list[dict[str, Any]]] = {}
    ways = options.ways.split(",")
    for number in range(options.rounds):
        for way in ways if number % 2 == 0 else reversed(ways):
            kind, _, parallel = way.partition(":")
            if kind == "xargs":
                run = part.xargs(options.copies, program, int(parallel))
            else:
                # The first one measures what a copy needs, later ones know it.
                run = part.farm(options.copies, program, *(("--parallel", parallel) if parallel else ()))
            runs.setdefault(way, []).append(run)
            print(f"round {number}: {way}: {run}", flush=True)
            if run.get("failed") or run.get("exit_code"):
                part.surprises.append(f"{way}: {run}")
    return {
        way: {
            "seconds": [run["seconds"] for run in found],
            "median": statistics.median(run["seconds"] for run in found),
        }
        for way, found in runs.items()
    }


def large(part: Part, steps: int, copies: int) -> dict[str, Any]:
    """Return how many of trainings fail that do not all fit together."""
    program = part.program(steps=steps, gib=6)
    farm = part.farm(copies, program)
    if farm["exit_code"]:
        part.surprises.append(f"farm: {farm}")
    return {
        "farm": farm,
        "farm --memory 7G": part.farm(copies, program, "--memory", "7G"),
        f"xargs -P {copies}": part.xargs(copies, program, copies),
    }


def main() -> int:
    """Train, or measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the figures there, too")
    parser.add_argument("--parts", default="small,large")
    parser.add_argument("--ways", default="farm,xargs:16,farm,xargs:32,farm:16", help="each with how many at a time")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--copies", type=int, default=100)
    parser.add_argument("--rehearse", action="store_true", help="on a simulated host: tries the script itself")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=2000, help="steps of a training")
    parser.add_argument("--gib", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        return train(options)

    def act(name: str, directory: str, surprises: list[str]) -> dict[str, Any]:
        place = f"{directory}/{name}"
        os.makedirs(place)
        part = Part(place, surprises, rehearse=options.rehearse)
        if name == "large":
            return large(part, options.steps, 24)
        return small(part, options)

    return measured(options, act, seconds=540)


if __name__ == "__main__":
    sys.exit(main())
