"""Moves between two equal GPUs of one host: ``python -m benchmarks.gpu_move --json FILE``.

Run it on a host with two equal GPUs and PyTorch. About 5 minutes on two H100.

- ``moves``: a training of 2 GiB goes there and back; its losses are compared bit by bit with those of an undisturbed run.
- ``large``: moves of 20 GiB, in turn with swaps out and in of the same job.

It changes no setting of a GPU. ``--rehearse`` runs on a simulated host. Pauses of two ranks of NCCL: `benchmarks.gpu_pause`.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from functools import partial
from typing import Any

from benchmarks.gpu_script import OWN, STOP, Job, Part, State, Work, measured, parser_of, run_job

# Of a job's state: the number of steps after which it ends; 0: none.
LIMIT = OWN


def _train(state: State, gib: int) -> Work:
    """A training that prints each loss bit by bit, with memory whose content is checked."""
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.manual_seed(1)
    torch.use_deterministic_algorithms(mode=True)
    words = gib * 2**28
    ballast = torch.arange(words, device="cuda", dtype=torch.int32)
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(1024, 1024), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    data = torch.randn(256, 1024, device="cuda")
    count = [0]

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = (model(data) - data).square().mean()
        loss.backward()
        optimizer.step()
        print(f"loss={loss.item().hex()}", flush=True)
        count[0] += 1
        if count[0] == state[LIMIT]:
            state[STOP] = 1
        time.sleep(0.01)

    def is_whole() -> bool:
        return bool((ballast == torch.arange(words, device="cuda", dtype=torch.int32)).all())

    # Only at its end: it takes longer than a step.
    return Work(step, last_check=is_whole)


def _losses(job: Job) -> list[str]:
    return [line for line in job.printed().splitlines() if line.startswith("loss=")]


def moves(part: Part) -> dict[str, Any]:
    """Return the seconds of each move, and whether the losses are those of an undisturbed run."""
    mover = part.run("train", "--name", "mover", "--movable")
    mover.wait()
    seconds = []
    for number in range(part.options.count):
        seconds.append(part.did("move", "mover", "-g", str((number + 1) % 2), "-y").seconds)
    part.end()
    figures = {"count": len(seconds), "median": statistics.median(seconds), "least": min(seconds), "most": max(seconds)}
    if part.rehearse:
        return figures
    losses = _losses(mover)
    alone = Job(part, "train")
    alone.state[LIMIT] = len(losses)
    alone.wait()
    alone.process.wait(300)
    same = _losses(alone)[: len(losses)] == losses
    part.expect(same, "the losses differ")
    return {**figures, "steps": len(losses), "same": same}


def large(part: Part) -> dict[str, Any]:
    """Return the seconds of moves of 20 GiB, and of swaps out and in of the same job."""
    part.run("large", "--name", "large", "--movable").wait()
    moved, swapped = [], []
    for number in range(part.options.rounds):
        moved.append(part.did("move", "large", "-g", str((number + 1) % 2), "-y").seconds)
        swapped.append(sum(part.did("swap", verb, "large", "-y").seconds for verb in ("out", "in")))
    ratio = statistics.median(moved) / statistics.median(swapped)
    return {"move_seconds": moved, "swap_seconds": swapped, "ratio": round(ratio, 2)}


def main() -> int:
    """Run a job, or the parts."""
    parser = parser_of(__doc__, "moves,large")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.job:
        return run_job(options, {"train": partial(_train, gib=2), "large": partial(_train, gib=20)})
    return measured(options, {"moves": moves, "large": large}, host="sim:2xh200")


if __name__ == "__main__":
    sys.exit(main())
