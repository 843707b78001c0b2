"""The built-in workload as a program: ``python -m gpushare.measure.workload --backend torch --size 256``.

Multiplies square matrices until it is ended, and prints ``rate=NUMBER`` (multiplications per second since the line
before) several times a second. It runs on PyTorch or CuPy, whichever is installed. With ``--cpu``, each multiplication on
the GPU is followed by one of the same size on the CPU; with ``--copy``, one matrix is copied next to it: ``to`` the GPU,
``from`` it, or one each way at the same time (``both``).
``--streams N`` multiplies in N streams, ``--threads N`` in N threads, which share the default stream. Of several streams,
the first also tells how long one multiplication takes that comes while the others are busy (``p50=``, ``p99=``, in ms);
``--priority`` gives it a high priority. ``--probe`` only prints which library works here.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final, NamedTuple

from gpushare.base.errors import BadUsage
from gpushare.base.units import parse_memory_limit
from gpushare.measure.statistics import percentile

_FLOAT_BYTES: Final = 4


class Unusable(Exception):
    """This back end is not installed, or cannot compute here."""


@dataclass(frozen=True, kw_only=True)
class Streams:
    """Which streams there are, and what is copied next to each (a key of `COPIES`; None: nothing).

    ``default``: all work is in the default stream; ``first_high``: the first has priority.
    """

    default: bool = False
    first_high: bool = False
    copies: str | None = None


# The ways of ``--copy``, and whether each of their copies goes to the GPU.
COPIES: Final = {"to": (True,), "from": (False,), "both": (True, False)}
_PLAIN: Final = Streams()
# The higher of the two priorities that every GPU has.
_HIGH: Final = -1


class _Copy(NamedTuple):
    """A matrix that is copied, ``up`` to the GPU or down from it, in a stream of its own."""

    up: bool
    stream: Any
    on_gpu: Any
    on_host: Any


class Multiplier:
    """Multiplies matrices on one GPU, single precision by cuBLAS, in one or several streams; by a library of Python."""

    _streams: Sequence[Any]
    # Of each stream: two factors and their product, and what is copied next to them.
    _matrices: Sequence[Sequence[Any]]
    _copies: Sequence[Sequence[_Copy]]

    def launch(self, stream: int) -> None:
        """Queue one multiplication in a stream."""
        raise NotImplementedError

    def wait(self, stream: int) -> None:
        """Wait until one stream is done."""
        self._streams[stream].synchronize()

    def copy(self, stream: int) -> None:
        """Queue the copies of one matrix next to the work of a stream, to and from pinned memory."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Wait until all streams are done."""
        raise NotImplementedError

    def element(self) -> float:
        """Return the last element of the first stream's product: the size of the matrices, if it is correct."""
        return float(self._matrices[0][2][-1, -1])


def _new_streams(kind: Streams, count: int, default: Callable[[], Any], new: Callable[..., Any]) -> list[Any]:
    """Return so many streams of this kind; ``new`` makes one, ``default`` returns the default stream."""
    if kind.default:
        return [default() for _ in range(count)]
    return [new(priority=_HIGH) if kind.first_high and number == 0 else new() for number in range(count)]


def _new_copies(
    kind: Streams,
    count: int,
    new_stream: Callable[[], Any],
    *,
    on_gpu: Callable[[], Any],
    on_host: Callable[[], Any],
) -> list[list[_Copy]]:
    """Return the copies next to each of ``count`` streams; ``on_gpu`` and ``on_host`` make a matrix there."""
    ups = COPIES[kind.copies] if kind.copies else ()
    return [[_Copy(up, new_stream(), on_gpu(), on_host()) for up in ups] for _ in range(count)]


class TorchMultiplier(Multiplier):
    """Through PyTorch: torch.matmul, Tensor.copy_."""

    def __init__(self, size: int, streams: int, footprint: int, kind: Streams = _PLAIN) -> None:
        self._torch = torch = _library("torch")
        if not torch.cuda.is_available():
            raise Unusable("torch sees no GPU")
        self._streams = _new_streams(kind, streams, torch.cuda.default_stream, torch.cuda.Stream)
        self._copies = _new_copies(
            kind,
            streams,
            torch.cuda.Stream,
            on_gpu=lambda: torch.ones(size, size, device="cuda"),
            on_host=lambda: torch.ones(size, size, pin_memory=True),
        )
        self._matrices = [[torch.ones(size, size, device="cuda") for _ in range(3)] for _ in range(streams)]
        self._held = torch.empty(_held_bytes(size, streams, footprint), dtype=torch.uint8, device="cuda")
        self.synchronize()

    def launch(self, stream: int) -> None:
        left, right, product = self._matrices[stream]
        with self._torch.cuda.stream(self._streams[stream]):
            self._torch.matmul(left, right, out=product)

    def copy(self, stream: int) -> None:
        for copy in self._copies[stream]:
            target, source = (copy.on_gpu, copy.on_host) if copy.up else (copy.on_host, copy.on_gpu)
            with self._torch.cuda.stream(copy.stream):
                target.copy_(source, non_blocking=True)

    def synchronize(self) -> None:
        self._torch.cuda.synchronize()


class CupyMultiplier(Multiplier):
    """Through CuPy: cupy.matmul, and set and get of an array."""

    def __init__(self, size: int, streams: int, footprint: int, kind: Streams = _PLAIN) -> None:
        self._cupy = cupy = _library("cupy")
        new_stream = functools.partial(cupy.cuda.Stream, non_blocking=True)
        try:
            self._streams = _new_streams(kind, streams, lambda: cupy.cuda.Stream.null, new_stream)
            self._copies = _new_copies(
                kind,
                streams,
                new_stream,
                on_gpu=lambda: cupy.zeros((size, size), dtype="float32"),
                on_host=lambda: _library("cupyx").zeros_pinned((size, size), dtype="float32"),
            )
            self._matrices = [[cupy.ones((size, size), dtype="float32") for _ in range(3)] for _ in range(streams)]
            self._held = cupy.empty(_held_bytes(size, streams, footprint), dtype="uint8")
            self.synchronize()
        except (RuntimeError, MemoryError) as error:
            # CuPy notices only now that there is no GPU, or too little memory.
            raise Unusable(str(error)) from None

    def launch(self, stream: int) -> None:
        left, right, product = self._matrices[stream]
        with self._streams[stream]:
            self._cupy.matmul(left, right, out=product)

    def copy(self, stream: int) -> None:
        for copy in self._copies[stream]:
            if copy.up:
                copy.on_gpu.set(copy.on_host, stream=copy.stream)
            else:
                copy.on_gpu.get(stream=copy.stream, out=copy.on_host, blocking=False)

    def synchronize(self) -> None:
        self._cupy.cuda.Device().synchronize()


def _library(name: str) -> Any:
    """Return a module; Unusable: it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Unusable(f"{name} is not installed ({error})") from None


def _held_bytes(size: int, streams: int, footprint: int) -> int:
    """Return the bytes to hold in addition to three matrices per stream, for a footprint per stream."""
    return max(0, (footprint - 3 * size * size * _FLOAT_BYTES) * streams)


# In the order in which they are tried.
BACKENDS: Final[dict[str, Callable[..., Multiplier]]] = {
    "torch": TorchMultiplier,
    "cupy": CupyMultiplier,
}


def first_usable(names: list[str]) -> str:
    """Return the first back end that multiplies two small matrices correctly here.

    Raises:
        Unusable: none does, with the reason for each.
    """
    reasons = []
    for name in names:
        try:
            # The product of two 32 x 32 matrices of ones is 32 everywhere.
            multiplier = BACKENDS[name](32, 1, 0)
            multiplier.launch(0)
            multiplier.synchronize()
            element = multiplier.element()
        except (Unusable, RuntimeError, MemoryError, ImportError, AttributeError, TypeError) as error:
            reasons.append(f"{name}: {error}")
            continue
        if element == 32.0:
            return name
        reasons.append(f"{name}: computes {element:g} instead of 32")
    raise Unusable("; ".join(reasons))


# Work queued between two waits for the GPU: enough to keep it busy, little enough to end soon.
_BATCH_SECONDS: Final = 0.005
_MOST_BATCH: Final = 1000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the workload until a signal comes; return 0 then, or 1 if it cannot run, with the reason on stderr."""
    options = _parser().parse_args(arguments)
    signals: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        signals.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        # Before the libraries are loaded, which takes seconds.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, note)
    try:
        if options.probe:
            sys.stdout.write(f"backend={first_usable([options.backend] if options.backend else list(BACKENDS))}\n")
            return 0
        footprint = 0 if options.footprint is None else parse_memory_limit(options.footprint)
        name = options.backend or first_usable(list(BACKENDS))
        kind = Streams(default=options.threads > 0, first_high=options.priority, copies=options.copy)
        multiplier = BACKENDS[name](options.size, options.threads or options.streams, footprint, kind)
        run(multiplier, options, signals)
    except (Unusable, RuntimeError, MemoryError, ImportError, BadUsage) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gpushare.measure.workload")
    parser.add_argument("--backend", choices=list(BACKENDS), default=None)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--priority", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--copy", choices=list(COPIES), default=None)
    parser.add_argument("--footprint", default=None)
    parser.add_argument("--every", type=float, default=0.25, help="seconds between two lines")
    parser.add_argument("--seconds", type=float, default=None, help="end after this many seconds")
    parser.add_argument("--probe", action="store_true")
    return parser


def run(multiplier: Multiplier, options: argparse.Namespace, signals: Sequence[int]) -> None:
    """Multiply, and print the rate, and of several streams the latencies of the first, until there is one of ``signals``."""
    multiply_on_cpu = cpu_multiplication(options.size) if options.cpu else lambda: None
    parts = options.threads or options.streams
    batch = 1 if options.cpu else _batch_size(multiplier, parts)
    started = since = time.perf_counter()
    done = 0
    latencies_ms: list[float] = []
    with ThreadPoolExecutor(max_workers=parts) as threads:
        work = _Round(multiplier, batch, copies=options.copy is not None, threads=threads if options.threads else None)
        while not signals:
            latencies_ms += work.queue(parts)
            multiplier.synchronize()
            for _ in range(parts):
                multiply_on_cpu()
            done += batch * parts
            now = time.perf_counter()
            if now - since >= options.every:
                _print_rate(done / (now - since), latencies_ms)
                done = 0
                since = now
                latencies_ms = []
            if options.seconds is not None and now - started >= options.seconds:
                break


def _print_rate(rate: float, latencies_ms: Sequence[float]) -> None:
    """Print the rate, and the percentiles of the latencies if there are any."""
    sys.stdout.write(f"rate={rate:.6g}\n")
    if latencies_ms:
        sys.stdout.write(f"p50={percentile(latencies_ms, 50):.6g} p99={percentile(latencies_ms, 99):.6g}\n")
    sys.stdout.flush()


@dataclass(frozen=True)
class _Round:
    """The work between two waits for the GPU: a batch in each stream, queued by one thread or by one for each."""

    multiplier: Multiplier
    batch: int
    copies: bool
    threads: ThreadPoolExecutor | None

    def queue(self, parts: int) -> list[float]:
        """Queue a batch in each stream; return the latency in ms that was measured, if there are several streams."""
        if self.threads is not None:
            list(self.threads.map(self._queue, range(parts), [self.batch] * parts))
            return []
        # The first stream comes last, when the others are busy.
        for stream in range(1, parts):
            self._queue(stream, self.batch)
        latencies_ms = [self._first_latency_ms()] if parts > 1 else []
        # The one whose latency was measured is part of the batch.
        self._queue(0, self.batch - len(latencies_ms))
        return latencies_ms

    def _first_latency_ms(self) -> float:
        """Return how long one multiplication in the first stream takes."""
        start = time.perf_counter()
        self._queue(0, 1)
        self.multiplier.wait(0)
        return 1e3 * (time.perf_counter() - start)

    def _queue(self, stream: int, count: int) -> None:
        for _ in range(count):
            self.multiplier.launch(stream)
            if self.copies:
                self.multiplier.copy(stream)


def _batch_size(multiplier: Multiplier, streams: int) -> int:
    """Return how many multiplications are queued in a stream between two waits: enough to take `_BATCH_SECONDS`."""
    batch = 1
    while batch < _MOST_BATCH:
        start = time.perf_counter()
        for _ in range(batch):
            for stream in range(streams):
                multiplier.launch(stream)
        multiplier.synchronize()
        if time.perf_counter() - start >= _BATCH_SECONDS:
            break
        batch *= 2
    return min(batch, _MOST_BATCH)


def cpu_multiplication(size: int) -> Callable[[], Any]:
    """Return a function that multiplies two matrices on the CPU: by NumPy, which CuPy brings, or by PyTorch."""
    try:
        module: Any = importlib.import_module("numpy")
    except ImportError:
        module = importlib.import_module("torch")
    left = module.ones((size, size))
    right = module.ones((size, size))
    return lambda: left @ right


if __name__ == "__main__":
    sys.exit(main())
