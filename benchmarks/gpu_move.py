"""Moves between two equal GPUs of one host, and pauses of two NCCL ranks: ``python -m benchmarks.gpu_move --json FILE``.

Run it as root on a host with two equal GPUs and PyTorch; what can be is done as a plain user. About 6 minutes on two H100.

- ``moves``: a training of 2 GiB goes there and back; its losses are compared bit by bit with those of an undisturbed run.
- ``large``: moves of 20 GiB, in turn with swaps out and in of the same job.
- ``ranks``: two ranks of one job (``run --gpus 2``) are paused for some seconds in the middle of their collectives.

It changes no setting of a GPU. ``--rehearse`` runs on a simulated host.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_script import NOBODY, measured

GPUSHARE = [sys.executable, "-m", "gpushare"]
HOST = "sim:2xh200"


def train(place: str, gib: float, steps: int | None) -> int:
    """Train and write each loss bit by bit, until there were ``steps``, or a file ``stop`` is there."""
    import torch

    torch.manual_seed(1)
    torch.use_deterministic_algorithms(mode=True)
    words = int(gib * 2**28)
    ballast = torch.arange(words, device="cuda", dtype=torch.int32)
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(1024, 1024), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    data = torch.randn(256, 1024, device="cuda")
    number, stop = 0, Path(place, "stop")
    with Path(place, "losses").open("w") as losses:
        while not stop.exists() if steps is None else number < steps:
            optimizer.zero_grad(set_to_none=True)
            loss = (model(data) - data).square().mean()
            loss.backward()
            optimizer.step()
            losses.write(f"{loss.item().hex()}\n")
            losses.flush()
            number += 1
            time.sleep(0.01)
    same = bool((ballast == torch.arange(words, device="cuda", dtype=torch.int32)).all())
    Path(place, "end").write_text("right" if same else "wrong")
    return 0


def rank(seconds: float) -> int:
    """Add numbers up with the other rank for some seconds; print the longest collective and whether all sums were right."""
    import torch
    import torch.distributed as group

    group.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    value = torch.empty(1 << 22, device="cuda")
    right, longest, number, ends = True, 0.0, 0, time.monotonic() + seconds
    going = torch.ones(1, device="cuda")
    while going.item():
        began = time.monotonic()
        value.fill_(number)
        group.all_reduce(value)
        right = right and float(value[0]) == 2.0 * number and float(value[-1]) == 2.0 * number
        longest = max(longest, time.monotonic() - began)
        number = (number + 1) % 1000
        # Both end in the same round.
        going.fill_(float(time.monotonic() < ends))
        group.all_reduce(going, op=group.ReduceOp.MIN)
    print(f"right={right} longest={longest:.2f}", flush=True)
    group.destroy_process_group()
    return 0 if right else 1


class Part:
    """One part: where its files are, and how gpushare is called."""

    def __init__(self, place: str, surprises: list[str], *, rehearse: bool) -> None:
        self.place, self.surprises, self.rehearse = place, surprises, rehearse

    def gpushare(self, *words: str) -> tuple[float, subprocess.CompletedProcess[str]]:
        """Run gpushare; return the seconds, and how it ended."""
        host = ["--host", HOST] if self.rehearse else []
        began = time.monotonic()
        done = subprocess.run([*GPUSHARE, *host, *words], capture_output=True, text=True, timeout=180, check=False)
        if done.returncode:
            self.surprises.append(f"{' '.join(words)}: exit code {done.returncode}: {done.stderr[-300:]}")
        return time.monotonic() - began, done

    def start(self, name: str, gib: float) -> str:
        """Start a training on GPU 0; return the directory of its files."""
        place = os.path.join(self.place, name)
        os.makedirs(place, exist_ok=True)
        program = [sys.executable, "-m", "benchmarks.gpu_move", "--train", place, "--gib", str(gib)]
        if self.rehearse:
            footprint = f"{int(gib * 1024) + 512}M"
            program = [sys.executable, "-S", "-m", "gpushare.sim.job", "--seconds", "90", "--footprint", footprint]
        self.gpushare("run", "-d", "--name", name, "-g", "0", "--movable", "--", *program)
        for _ in range(400):
            losses = Path(place, "losses")
            if self.rehearse or (losses.exists() and losses.stat().st_size > 1000):
                break
            time.sleep(0.1)
        return place

    def end(self, name: str, place: str) -> str:
        """End a training; return what it says of its memory."""
        Path(place, "stop").touch()
        for _ in range(300):
            if self.rehearse or Path(place, "end").exists():
                break
            time.sleep(0.1)
        if self.rehearse:
            self.gpushare("stop", name, "-y")
            return "right"
        time.sleep(1.0)
        return Path(place, "end").read_text() if Path(place, "end").exists() else "missing"


def moves(part: Part, count: int) -> dict[str, Any]:
    """Return the seconds of each move, and whether the losses are those of an undisturbed run."""
    place = part.start("mover", 2.0)
    seconds = []
    for number in range(count):
        took, _ = part.gpushare("move", "mover", "-g", str((number + 1) % 2))
        seconds.append(round(took, 2))
    memory = part.end("mover", place)
    found: dict[str, Any] = {
        "count": count,
        "median": statistics.median(seconds),
        "least": min(seconds),
        "most": max(seconds),
    }
    if not part.rehearse:
        losses = Path(place, "losses").read_text()
        alone = os.path.join(part.place, "alone")
        os.makedirs(alone, exist_ok=True)
        program = [sys.executable, "-m", "benchmarks.gpu_move", "--train", alone, "--gib", "2.0", "--steps"]
        subprocess.run([*program, str(losses.count("\n"))], timeout=200, check=True)
        found |= {"steps": losses.count("\n"), "same": losses == Path(alone, "losses").read_text()}
        if not found["same"]:
            part.surprises.append("the losses differ")
    if memory != "right":
        part.surprises.append(f"the memory is {memory}")
    return found


def large(part: Part, rounds: int) -> dict[str, Any]:
    """Return the seconds of moves of 20 GiB, and of swaps out and in of the same job."""
    place = part.start("large", 20.0)
    moved, swapped = [], []
    for number in range(rounds):
        moved.append(round(part.gpushare("move", "large", "-g", str((number + 1) % 2))[0], 2))
        swapped.append(round(part.gpushare("swap", "out", "large")[0] + part.gpushare("swap", "in", "large")[0], 2))
    memory = part.end("large", place)
    if memory != "right":
        part.surprises.append(f"the memory is {memory}")
    ratio = statistics.median(moved) / statistics.median(swapped)
    return {"move_seconds": moved, "swap_seconds": swapped, "ratio": round(ratio, 2)}


def ranks(part: Part, pauses: int) -> dict[str, Any]:
    """Return how the ranks of a job end that was paused some times."""
    program = ["torchrun", "--nproc-per-node", "2", "-m", "benchmarks.gpu_move", "--rank", "30"]
    if part.rehearse:
        program = [sys.executable, "-S", "-m", "gpushare.sim.job", "--seconds", "25"]
    part.gpushare("run", "-d", "--name", "ranks", "--gpus", "2", "--", *program)
    time.sleep(1.0 if part.rehearse else 12.0)
    seconds = []
    for _ in range(pauses):
        paused, _ = part.gpushare("pause", "ranks")
        time.sleep(2.0)
        resumed, _ = part.gpushare("resume", "ranks")
        seconds.append([round(paused, 2), round(resumed, 2)])
        time.sleep(1.0)
    for _ in range(60):
        _, done = part.gpushare("jobs")
        if not any("ranks" in line and "running" in line for line in done.stdout.splitlines()):
            break
        time.sleep(1.0)
    _, done = part.gpushare("logs", "ranks")
    # Both print at the same moment, perhaps in one line.
    said = re.findall(r"right=\w+ longest=\d+\.\d\d", done.stdout)
    if not part.rehearse and (len(said) != 2 or "right=False" in done.stdout):
        part.surprises.append(f"the ranks: {done.stdout[-400:]}")
    return {"pauses": seconds, "ranks": said}


def main() -> int:
    """Run the parts, or one of the programs that they start."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--parts", default="moves,large,ranks")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--user", action="store_true", help="as user 65534")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--train")
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rank", type=float)
    options = parser.parse_args()
    if options.train is not None:
        return train(options.train, options.gib, options.steps)
    if options.rank is not None:
        return rank(options.rank)
    if options.user:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        os.environ["HOME"] = "/tmp"  # noqa: S108 - no home of its own

    def act(name: str, place: str, surprises: list[str]) -> dict[str, Any]:
        part = Part(place, surprises, rehearse=options.rehearse)
        if name == "moves":
            return moves(part, options.count)
        return large(part, options.rounds) if name == "large" else ranks(part, 3)

    return measured(options, act, about={"uid": os.getuid()})


if __name__ == "__main__":
    sys.exit(main())
