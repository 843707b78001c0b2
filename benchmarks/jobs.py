"""The jobs of the sharing benchmark, with PyTorch: ``python -m benchmarks.jobs mid``.

Each prints one number per line again and again: ``rate=`` steps per second since the line before, or ``latency_ms=`` of
each request. Steps end on the GPU before the next begins. Where nothing else is said, matrices are fp32 and their products
TF32.

- ``mid``: a small training loop, bound by kernel launches, that reads its loss at each step: 14 layers of 1024, batch 256,
  stochastic gradient descent.
- ``infer``: a request every 10 ms: 16 layers of 2048, bf16, batch 64.
- ``big``: 4 products of 8192 x 8192 bf16 matrices with a ReLU, per step; fills the GPU.
- ``membw``: additions over gigabytes; draws all of the memory's bandwidth.
- ``tiny``: products of 256 x 256 matrices, 200 per step; a few SMs.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, Final

_LINE_SECONDS: Final = 0.1
_REQUEST_SECONDS: Final = 0.010


def mid(torch: Any) -> Callable[[], None]:
    """Return a step: forward, backward and update of a small multilayer perceptron; its kernels are shorter than their launch."""
    # Backward in this thread: waking another for it would cost more CPU time than its kernels take on the GPU.
    torch.autograd.set_multithreading_enabled(False)
    layers = [part for _ in range(14) for part in (torch.nn.Linear(1024, 1024), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    data, target = torch.randn(256, 1024, device="cuda"), torch.randn(256, 1024, device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = torch.nn.functional.mse_loss(model(data), target)
        loss.backward()
        optimizer.step()
        # Its value is needed: the step ends on the GPU.
        loss.item()

    return step


def infer(torch: Any) -> Callable[[], None]:
    """Return a request: 16 layers of 2048 in bf16 on a batch of 64."""
    layers = [part for _ in range(16) for part in (torch.nn.Linear(2048, 2048), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers).cuda().to(torch.bfloat16).eval()
    data = torch.randn(64, 2048, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        with torch.inference_mode():
            model(data)
        torch.cuda.synchronize()

    return step


def big(torch: Any) -> Callable[[], None]:
    """Return a step of four products that fill the GPU."""
    size = 8192
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) / size for _ in range(2))
    out = torch.empty_like(left)

    def step() -> None:
        for _ in range(4):
            torch.mm(left, right, out=out)
            out.relu_()
        torch.cuda.synchronize()

    return step


def membw(torch: Any) -> Callable[[], None]:
    """Return a step that reads and writes 12 GB."""
    one, other = (torch.zeros(1 << 30, device="cuda") for _ in range(2))

    def step() -> None:
        torch.add(one, other, out=one)
        torch.cuda.synchronize()

    return step


def tiny(torch: Any) -> Callable[[], None]:
    """Return a step of 200 small products."""
    left, right = (torch.randn(256, 256, device="cuda") for _ in range(2))
    out = torch.empty_like(left)

    def step() -> None:
        for _ in range(200):
            torch.mm(left, right, out=out)
        torch.cuda.synchronize()

    return step


JOBS: Final[dict[str, Callable[[Any], Callable[[], None]]]] = {
    "mid": mid,
    "infer": infer,
    "big": big,
    "membw": membw,
    "tiny": tiny,
}


def main() -> int:
    """Run a job until it is ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=sorted(JOBS))
    parser.add_argument("--on", type=float, default=None, help="work for this number of seconds")
    parser.add_argument("--off", type=float, default=0.0, help="then do nothing for this number of seconds")
    options = parser.parse_args()
    ended: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _frame: ended.append(number))

    torch: Any = importlib.import_module("torch")

    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = True
    step = JOBS[options.job](torch)
    for _ in range(10):
        step()
    work = _requests if options.job == "infer" else _steps
    while not ended:
        until = None if options.on is None else time.perf_counter() + options.on
        work(step, until, ended)
        _rest(options.off, ended)
    return 0


def _steps(step: Callable[[], None], until: float | None, ended: list[int]) -> None:
    last, count = time.perf_counter(), 0
    while not ended and (until is None or last < until):
        step()
        count += 1
        now = time.perf_counter()
        if now - last >= _LINE_SECONDS:
            _say(f"rate={count / (now - last):.3f}")
            last, count = now, 0


def _requests(step: Callable[[], None], until: float | None, ended: list[int]) -> None:
    # A collection of garbage would be a latency of its own.
    gc.collect()
    gc.freeze()
    due = time.perf_counter()
    while not ended and (until is None or due < until):
        # It polls, as servers for short requests do: a CPU that has slept is slow at first, which no neighbour has done.
        while time.perf_counter() < due:
            pass
        began = time.perf_counter()
        step()
        _say(f"latency_ms={1000 * (time.perf_counter() - began):.4f}")
        # Requests that are late are not made up for.
        due = max(due + _REQUEST_SECONDS, time.perf_counter())


def _rest(seconds: float, ended: list[int]) -> None:
    until = time.perf_counter() + seconds
    while not ended and time.perf_counter() < until:
        time.sleep(0.05)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
