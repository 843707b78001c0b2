"""Jobs that print what `gpushare bench` and `tune` read: ``python -m benchmarks.jobs NAME``. `benchmarks.colocation` runs them.

Production that waits prints ``latency_ms=`` of each request, the others print ``rate=`` steps per second ten times a second;
steps end on the GPU before the next begins. The first five and ``small`` need PyTorch; the others CuPy, servers and language
models PyTorch too, as one CUDA graph, as engines run them, so that a busy host does not decide. Where there is no GPU,
those run with NumPy, in small. Where nothing else is said, matrices of PyTorch are fp32 and their products TF32.

- ``mid``: a small training loop, bound by kernel launches, that reads its loss at each step: 14 layers of 1024, batch 256,
  stochastic gradient descent.
- ``infer``: a request every 10 ms: 16 layers of 2048, bf16, batch 64.
- ``big``: 4 products of 8192 x 8192 bf16 matrices with a ReLU, per step; fills the GPU.
- ``membw``: additions over gigabytes; draws all of the memory's bandwidth. ``--on 2 --off 8``: 2 s in 10.
- ``tiny``: products of 256 x 256 matrices, 200 per step; a few SMs.
- ``small``: a training of 6 layers of 512, batch 64.
- ``random``: a server of 8 ms requests that arrive at random, at a load of .45; a latency counts from the arrival.
- ``half``: a server of 20 ms requests that come by the clock, at half load. The times are those of an H200.
- ``decode``: one step of a language model after the other, batch 4; each reads 2.2 GB of weights.
- ``diffusion``: denoising steps: attention and large products over 4096 positions.
- ``embedding``: rows of a large table, a product, and a norm.
- ``fed``: a training whose batches are made by the CPU, in a thread beside it.
- ``ranking``: a server of 2.5 ms requests that arrive at random, at a load of .3.
- ``vision``: a server of 12 ms requests that come by the clock, at half load.
- ``chat``: as ``decode``, batch 16; each step reads 4.5 GB of weights.
- ``image``: filters of images in the space of their frequencies, and norms between.
- ``retrieval``: the nearest of two million rows for 512 queries.
- ``speech``: a training on spectra that the CPU makes of waves, in a thread beside it.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import math
import queue
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

Step = Callable[[], None]
GPU: Final = importlib.util.find_spec("cupy") is not None
_LINE_SECONDS: Final = 0.1


def _array(xp: Any, *shape: int) -> Any:
    sized = shape if GPU else tuple(max(4, size // 32) for size in shape)
    return (xp.random.rand(*sized) / 64).astype(xp.float16 if GPU else xp.float32)


def _synchronize(xp: Any) -> None:
    if GPU:
        xp.cuda.get_current_stream().synchronize()


def _graph(count: int, hidden: tuple[int, int], weights: int, wide: int) -> Step:
    """Return a chain of matrix products as one CUDA graph; square layers work on what the one before left."""
    torch = importlib.import_module("torch")
    half = {"dtype": torch.float16, "device": "cuda"}
    state = torch.rand(hidden, **half) / 64
    layers = [torch.rand((hidden[1], wide), **half) / 64 for _ in range(weights)]

    def chain() -> None:
        found = state
        for number in range(count):
            product = found @ layers[number % weights]
            found = torch.tanh(product) if wide == hidden[1] else found

    side = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(side):
        for _ in range(3):
            chain()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            chain()

    def step() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return step


def _server(xp: Any, layers: int) -> Step:
    """Return a request of so many layers; on an H200, 1,000 take about 40 ms."""
    if GPU:
        return _graph(layers, (2048, 2048), 4, 2048)
    hidden, weights = _array(xp, 2048, 2048), [_array(xp, 2048, 2048) for _ in range(4)]

    def step() -> None:
        state = hidden
        for number in range(layers):
            state = xp.tanh(state @ weights[number % 4])
        _synchronize(xp)

    return step


def _decode(xp: Any) -> Step:
    if GPU:
        return _graph(24, (4, 4096), 24, 11008)
    weights = [_array(xp, 4096, 11008) for _ in range(24)]
    hidden = _array(xp, 4, 4096)

    def step() -> None:
        for weight in weights:
            xp.maximum(hidden @ weight, 0)
        _synchronize(xp)

    return step


def _chat(xp: Any) -> Step:
    return _graph(32, (16, 5120), 32, 13824) if GPU else _decode(xp)


def _image(xp: Any) -> Step:
    images = _array(xp, 32, 512, 512).astype(xp.float32)
    filters = [_array(xp, 1, 512, 512).astype(xp.float32)[..., : images.shape[2] // 2 + 1] for _ in range(4)]

    def step() -> None:
        filtered = images
        for each in filters:
            filtered = xp.fft.irfft2(xp.fft.rfft2(filtered) * each, s=images.shape[1:])
            filtered = xp.tanh((filtered - filtered.mean(axis=(1, 2), keepdims=True)) / (filtered.std() + 1e-3))
        _synchronize(xp)

    return step


def _retrieval(xp: Any) -> Step:
    table, queries = _array(xp, 2_000_000, 256), _array(xp, 512, 256)
    block = max(1, table.shape[0] // 16)

    def step() -> None:
        for start in range(0, table.shape[0], block):
            (queries @ table[start : start + block].T).max(axis=1)
        _synchronize(xp)

    return step


def _diffusion(xp: Any) -> Step:
    hidden, wide, narrow = _array(xp, 4096, 1280), _array(xp, 1280, 5120), _array(xp, 5120, 1280)

    def step() -> None:
        scores = hidden @ hidden.T
        scores = xp.exp(scores - scores.max(axis=1, keepdims=True))
        mixed = (scores / scores.sum(axis=1, keepdims=True)) @ hidden
        for _ in range(4):
            mixed = mixed + xp.tanh(mixed @ wide) @ narrow
        _synchronize(xp)

    return step


def _embedding(xp: Any) -> Step:
    table, weight = _array(xp, 500_000, 768), _array(xp, 768, 768)
    ids = xp.random.randint(0, table.shape[0], 16384 if GPU else 64)

    def step() -> None:
        for _ in range(4):
            rows = table[ids] @ weight
            rows = rows / xp.sqrt((rows * rows).sum(axis=1, keepdims=True) + 1)
        _synchronize(xp)

    return step


def _fed(xp: Any) -> Step:
    numpy = importlib.import_module("numpy")
    source = numpy.random.default_rng(7)
    rows = 2048 if GPU else 64
    raw = source.random((rows, 3072), dtype=numpy.float32)
    first, second = (
        xp.asarray(source.random(shape, dtype=numpy.float32) / 64) for shape in ((3072, 4096), (4096, 1000))
    )

    def load() -> Any:
        picked = raw[source.permutation(rows)]
        mean, spread = picked.mean(axis=1, keepdims=True), picked.std(axis=1, keepdims=True)
        return (picked - mean) / spread

    batches = _loaded(load)

    def step() -> None:
        batch = xp.asarray(batches.get())
        for _ in range(3):
            hidden = xp.maximum(batch @ first, 0)
            error = hidden @ second
            first[...] -= 1e-9 * (batch.T @ ((error @ second.T) * (hidden > 0)))
        _synchronize(xp)

    return step


def _loaded(load: Callable[[], Any]) -> queue.Queue[Any]:
    """Return a queue of two batches, which a thread fills."""
    batches: queue.Queue[Any] = queue.Queue(2)

    def fill() -> None:
        while True:
            batches.put(load())

    threading.Thread(target=fill, daemon=True).start()
    return batches


def _speech(xp: Any) -> Step:
    numpy = importlib.import_module("numpy")
    source = numpy.random.default_rng(11)
    rows = 512 if GPU else 16
    waves = source.random((rows, 4096), dtype=numpy.float32)
    layers = [xp.asarray(source.random(shape, dtype=numpy.float32) / 64) for shape in ((2049, 2048), (2048, 2048))]

    def load() -> Any:
        spectra = numpy.abs(numpy.fft.rfft(waves * source.random(4096, dtype=numpy.float32)))
        return numpy.log1p(spectra).astype(numpy.float32)

    batches = _loaded(load)

    def step() -> None:
        batch = xp.asarray(batches.get())
        for _ in range(8):
            hidden = xp.tanh(batch @ layers[0])
            error = hidden @ layers[1]
            layers[1][...] -= 1e-9 * (hidden.T @ error)
            layers[0][...] -= 1e-9 * (batch.T @ ((error @ layers[1].T) * (1 - hidden * hidden)))
        _synchronize(xp)

    return step


def _training(torch: Any, layers: int, width: int, batch: int) -> Step:
    """Return a step of a small multilayer perceptron: forward, backward and update; it ends on the GPU."""
    # Backward in this thread: waking another for it would cost more CPU time than its kernels take on the GPU.
    torch.autograd.set_multithreading_enabled(False)
    parts = [part for _ in range(layers) for part in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    model = torch.nn.Sequential(*parts).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    data, target = (torch.randn(batch, width, device="cuda") for _ in range(2))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = torch.nn.functional.mse_loss(model(data), target)
        loss.backward()
        optimizer.step()
        loss.item()

    return step


def mid(torch: Any) -> Step:
    """Return a step of a training whose kernels are shorter than their launch."""
    return _training(torch, 14, 1024, 256)


def small(torch: Any) -> Step:
    """Return a step of a smaller training."""
    return _training(torch, 6, 512, 64)


def _infer(torch: Any) -> Step:
    layers = [part for _ in range(16) for part in (torch.nn.Linear(2048, 2048), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers).cuda().to(torch.bfloat16).eval()
    data = torch.randn(64, 2048, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        with torch.inference_mode():
            model(data)
        torch.cuda.synchronize()

    return step


def _big(torch: Any) -> Step:
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) / 8192 for _ in range(2))
    out = torch.empty_like(left)

    def step() -> None:
        for _ in range(4):
            torch.mm(left, right, out=out)
            out.relu_()
        torch.cuda.synchronize()

    return step


def _membw(torch: Any) -> Step:
    """Return a step that reads and writes 12 GB."""
    left, right = (torch.zeros(1 << 30, device="cuda") for _ in range(2))

    def step() -> None:
        torch.add(left, right, out=left)
        torch.cuda.synchronize()

    return step


def _tiny(torch: Any) -> Step:
    left, right = (torch.randn(256, 256, device="cuda") for _ in range(2))
    out = torch.empty_like(left)

    def step() -> None:
        for _ in range(200):
            torch.mm(left, right, out=out)
        torch.cuda.synchronize()

    return step


# Of each: the layers of a request, and how many come in a second. Both are fixed, so that each process has the same work.
SERVERS: Final = {"random": (220, 56.0), "half": (550, 25.0), "ranking": (70, 120.0), "vision": (330, 42.0)}
RANDOM: Final = frozenset({"random", "ranking"})
CLOSED: Final[dict[str, Callable[[Any], Step]]] = {
    "decode": _decode,
    "diffusion": _diffusion,
    "embedding": _embedding,
    "fed": _fed,
    "chat": _chat,
    "image": _image,
    "retrieval": _retrieval,
    "speech": _speech,
}
WITH_TORCH: Final[dict[str, Callable[[Any], Step]]] = {
    "mid": mid,
    "infer": _infer,
    "big": _big,
    "membw": _membw,
    "tiny": _tiny,
    "small": small,
}


def main() -> int:
    """Run a job until it is ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=sorted({*SERVERS, *CLOSED, *WITH_TORCH}))
    parser.add_argument("--on", type=float, default=math.inf, help="work for this number of seconds")
    parser.add_argument("--off", type=float, default=0.0, help="then do nothing for this number of seconds")
    options = parser.parse_args()
    name = options.job
    ended: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _frame: ended.append(number))
    if name in WITH_TORCH:
        torch: Any = importlib.import_module("torch")
        torch.set_num_threads(1)
        torch.backends.cuda.matmul.allow_tf32 = True
        step = WITH_TORCH[name](torch)
    else:
        xp = importlib.import_module("cupy" if GPU else "numpy")
        step = _server(xp, SERVERS[name][0]) if name in SERVERS else CLOSED[name](xp)
    for _ in range(30 if name in SERVERS else 10):
        step()
    # A collection of garbage would be a latency of its own.
    gc.collect()
    gc.freeze()
    while not ended:
        until = time.perf_counter() + options.on
        if name == "infer" or name in SERVERS:
            per_second = SERVERS[name][1] if name in SERVERS else 100.0
            _serve(step, per_second, until, ended, at_random=name in RANDOM)
        else:
            _work(step, until, ended)
        _rest(options.off, ended)
    return 0


def _rest(seconds: float, ended: list[int]) -> None:
    """Wait, in short pieces: Python goes on with a sleep after a signal."""
    until = time.perf_counter() + seconds
    while not ended and time.perf_counter() < until:
        time.sleep(min(0.05, seconds))


def _work(step: Step, until: float, ended: list[int]) -> None:
    last, count = time.perf_counter(), 0
    while not ended and last < until:
        step()
        count += 1
        now = time.perf_counter()
        if now - last >= _LINE_SECONDS:
            print(f"rate={count / (now - last):.4f}", flush=True)
            last, count = now, 0


def _serve(step: Step, per_second: float, until: float, ended: list[int], *, at_random: bool) -> None:
    source = random.Random()  # noqa: S311 - not a secret
    due = time.perf_counter()
    while not ended and due < until:
        # It sleeps until a request comes, and polls at the end: what has slept is slow at first.
        while (left := due - time.perf_counter()) > 0 and not ended:
            time.sleep(left - 0.0005 if left > 0.001 else 0.0)
        began = time.perf_counter()
        step()
        now = time.perf_counter()
        print(f"latency_ms={1000 * (now - (due if at_random else began)):.4f}", flush=True)
        # Requests of the clock that are late are not made up for.
        due = due + source.expovariate(per_second) if at_random else max(due + 1 / per_second, now)


if __name__ == "__main__":
    sys.exit(main())
