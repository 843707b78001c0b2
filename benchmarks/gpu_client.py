"""A CUDA program for the tests on a GPU. One JSON object per line on stdout; commands on stdin.

Kinds: ``probe`` measures what it may use and waits; ``steady`` is a small training loop that reports its
rate and its longest step; ``deep`` keeps about 110 ms of matrix products queued. With ``--pretend`` no GPU
is touched, so that the tests can be rehearsed on a simulated host.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time


def say(**facts: object) -> None:
    """Print one line."""
    print(json.dumps(facts), flush=True)


def until_told(stop: threading.Event) -> None:
    """Read stdin; its end or the word ``end`` ends the loop."""
    for line in sys.stdin:
        if line.strip() == "end":
            break
    stop.set()


def largest_allocation(torch) -> int:  # type: ignore[no-untyped-def]
    """Return how many MiB can be allocated in blocks of 64 MiB before CUDA refuses (up to 12 GiB)."""
    held = []
    try:
        while len(held) < 192:
            held.append(torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda"))
    except torch.cuda.OutOfMemoryError:
        pass
    count = len(held)
    del held
    torch.cuda.empty_cache()
    return 64 * count


def products_per_second(torch, seconds: float) -> float:  # type: ignore[no-untyped-def]
    """Return the rate of 4096 x 4096 half-precision products."""
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
    for _ in range(5):
        a @ a
    torch.cuda.synchronize()
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()
        count += 20
    return count / (time.perf_counter() - start)


def probe(torch, stop: threading.Event) -> None:  # type: ignore[no-untyped-def]
    """Say what this client may use, then wait."""
    say(
        event="probe",
        multiprocessors=torch.cuda.get_device_properties(0).multi_processor_count,
        allocated_mib=largest_allocation(torch),
        products_per_second=round(products_per_second(torch, 1.0), 1),
    )
    stop.wait()


def steady(torch, stop: threading.Event) -> None:  # type: ignore[no-untyped-def]
    """Run a small training loop; every 0.25 s say the rate and the longest step of that time."""
    model = torch.nn.Sequential(
        *[layer for _ in range(6) for layer in (torch.nn.Linear(512, 512), torch.nn.ReLU())]
    ).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.randn(64, 512, device="cuda")
    while not stop.is_set():
        start, steps, longest = time.perf_counter(), 0, 0.0
        while time.perf_counter() - start < 0.25:
            before = time.perf_counter()
            optimizer.zero_grad(set_to_none=True)
            model(data).square().mean().backward()
            optimizer.step()
            torch.cuda.synchronize()
            longest, steps = max(longest, time.perf_counter() - before), steps + 1
        say(
            event="rate",
            steps_per_second=round(steps / (time.perf_counter() - start), 1),
            longest_ms=round(1e3 * longest, 2),
        )


def deep(torch, stop: threading.Event) -> None:  # type: ignore[no-untyped-def]
    """Keep a deep queue: 256 products of 8192 x 8192 in flight, always one batch ahead."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    events = []
    say(event="running")
    while not stop.is_set():
        for _ in range(64):
            torch.matmul(a, a, out=out)
            torch.relu_(out)
        event = torch.cuda.Event()
        event.record()
        events.append(event)
        if len(events) > 1:
            events.pop(0).synchronize()


def pretend(kind: str, stop: threading.Event) -> None:
    """Say the same lines without a GPU."""
    if kind == "probe":
        say(event="probe", multiprocessors=None, allocated_mib=None, products_per_second=None)
    if kind == "deep":
        say(event="running")
    while not stop.wait(0.25):
        if kind == "steady":
            say(event="rate", steps_per_second=100.0, longest_ms=1.0)


def main() -> None:
    """Wait for the word to go, then run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("probe", "steady", "deep"))
    parser.add_argument("--pretend", action="store_true")
    parser.add_argument("--wait", action="store_true", help="make no CUDA context before a line comes on stdin")
    options = parser.parse_args()
    torch = None
    if not options.pretend:
        import torch as real_torch

        torch = real_torch
    say(event="ready")
    if options.wait:
        sys.stdin.readline()
    stop = threading.Event()
    threading.Thread(target=until_told, args=(stop,), daemon=True).start()
    try:
        if options.pretend:
            pretend(options.kind, stop)
        else:
            {"probe": probe, "steady": steady, "deep": deep}[options.kind](torch, stop)
    except RuntimeError as error:
        # What a neighbour sees when somebody else's end broke it.
        say(event="error", message=str(error).splitlines()[0])
        sys.exit(3)


if __name__ == "__main__":
    main()
