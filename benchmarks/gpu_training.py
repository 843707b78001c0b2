"""A small training loop in PyTorch that prints its rate until it is ended: what `benchmarks.gpu_bench_path` measures."""

from __future__ import annotations

import time

import torch

LAYERS, WIDTH, BATCH = 6, 512, 64


def main() -> None:
    """Train until interrupted; four times a second print the steps per second since the line before."""
    layers = [layer for _ in range(LAYERS) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.randn(BATCH, WIDTH, device="cuda")
    since, steps = time.perf_counter(), 0
    while True:
        before = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        model(data).square().mean().backward()
        optimizer.step()
        torch.cuda.synchronize()
        now, steps = time.perf_counter(), steps + 1
        if steps % 16 == 0:
            print(f"latency_ms={1e3 * (now - before):.3f}")
        if now - since >= 0.25:
            print(f"steps_per_second={steps / (now - since):.2f}", flush=True)
            since, steps = now, 0


if __name__ == "__main__":
    main()
