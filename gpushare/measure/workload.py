"""The built-in workload as a program: ``python -m gpushare.measure.workload --backend torch --size 256``.

Multiplies square matrices until it is ended, and prints ``rate=NUMBER`` (multiplications per second since the line
before) again and again. With ``--cpu`` each multiplication on the GPU is followed by one of the same size on the CPU.
``--probe`` only prints which back end works here.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import signal
import struct
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Final, Protocol

from gpushare.errors import BadUsage
from gpushare.units import parse_memory_limit

BLOCK: Final = 16
NAME: Final = "gpushare_matmul"
PTX: Final = """\
.version 7.8
.target sm_60
.address_size 64
.visible .entry gpushare_matmul(
 .param .u64 matrix_0,
 .param .u64 matrix_1,
 .param .u64 matrix_2,
 .param .u32 matrix_3
)
{
 .reg .pred %p<13>;
 .reg .f32 %f<29>;
 .reg .b32 %r<20>;
 .reg .b64 %rd<41>;
 .shared .align 4 .b8 tile_a[1024];
 .shared .align 4 .b8 tile_b[1024];
 ld.param.u64 %rd14, [matrix_0];
 ld.param.u64 %rd15, [matrix_1];
 ld.param.u64 %rd16, [matrix_2];
 ld.param.u32 %r11, [matrix_3];
 mov.u32 %r12, %ctaid.y;
 shl.b32 %r13, %r12, 4;
 mov.u32 %r1, %tid.y;
 add.s32 %r2, %r13, %r1;
 mov.u32 %r14, %ctaid.x;
 shl.b32 %r15, %r14, 4;
 mov.u32 %r3, %tid.x;
 add.s32 %r4, %r15, %r3;
 setp.lt.s32 %p1, %r11, 1;
 mov.f32 %f27, 0f00000000;
 @%p1 bra $L__BB0_9;
 mul.wide.s32 %rd1, %r11, %r2;
 mul.wide.u32 %rd17, %r1, 64;
 mov.u64 %rd18, tile_a;
 add.s64 %rd19, %rd18, %rd17;
 mul.wide.u32 %rd20, %r3, 4;
 add.s64 %rd2, %rd19, %rd20;
 cvt.s64.s32 %rd3, %r4;
 mov.u64 %rd21, tile_b;
 add.s64 %rd22, %rd21, %rd17;
 add.s64 %rd4, %rd22, %rd20;
 add.s64 %rd5, %rd19, 8;
 add.s64 %rd23, %rd21, %rd20;
 add.s64 %rd6, %rd23, 128;
 cvta.to.global.u64 %rd7, %rd14;
 mov.u32 %r18, 0;
 cvta.to.global.u64 %rd30, %rd15;
$L__BB0_2:
 add.s32 %r6, %r18, %r1;
 add.s32 %r7, %r18, %r3;
 setp.ge.s32 %p2, %r7, %r11;
 setp.ge.s32 %p3, %r2, %r11;
 mov.f32 %f26, 0f00000000;
 or.pred %p4, %p3, %p2;
 mov.f32 %f25, %f26;
 @%p4 bra $L__BB0_4;
 cvt.s64.s32 %rd24, %r7;
 add.s64 %rd25, %rd1, %rd24;
 shl.b64 %rd26, %rd25, 2;
 add.s64 %rd27, %rd7, %rd26;
 ld.global.f32 %f25, [%rd27];
$L__BB0_4:
 st.shared.f32 [%rd2], %f25;
 setp.ge.s32 %p5, %r6, %r11;
 setp.ge.s32 %p6, %r4, %r11;
 or.pred %p7, %p6, %p5;
 @%p7 bra $L__BB0_6;
 mul.wide.s32 %rd28, %r6, %r11;
 add.s64 %rd29, %rd28, %rd3;
 shl.b64 %rd31, %rd29, 2;
 add.s64 %rd32, %rd30, %rd31;
 ld.global.f32 %f26, [%rd32];
$L__BB0_6:
 st.shared.f32 [%rd4], %f26;
 bar.sync 0;
 mov.u32 %r19, 0;
 mov.u64 %rd39, %rd6;
 mov.u64 %rd40, %rd5;
$L__BB0_7:
 .pragma "nounroll";
 ld.shared.f32 %f13, [%rd39+-128];
 ld.shared.f32 %f14, [%rd40+-8];
 fma.rn.f32 %f15, %f14, %f13, %f27;
 ld.shared.f32 %f16, [%rd39+-64];
 ld.shared.f32 %f17, [%rd40+-4];
 fma.rn.f32 %f18, %f17, %f16, %f15;
 ld.shared.f32 %f19, [%rd39];
 ld.shared.f32 %f20, [%rd40];
 fma.rn.f32 %f21, %f20, %f19, %f18;
 ld.shared.f32 %f22, [%rd39+64];
 ld.shared.f32 %f23, [%rd40+4];
 fma.rn.f32 %f27, %f23, %f22, %f21;
 add.s64 %rd40, %rd40, 16;
 add.s64 %rd39, %rd39, 256;
 add.s32 %r19, %r19, 4;
 setp.ne.s32 %p8, %r19, 16;
 @%p8 bra $L__BB0_7;
 bar.sync 0;
 add.s32 %r18, %r18, 16;
 setp.lt.s32 %p9, %r18, %r11;
 @%p9 bra $L__BB0_2;
$L__BB0_9:
 setp.ge.s32 %p10, %r4, %r11;
 setp.ge.s32 %p11, %r2, %r11;
 or.pred %p12, %p11, %p10;
 @%p12 bra $L__BB0_11;
 mul.wide.s32 %rd33, %r11, %r2;
 cvt.s64.s32 %rd34, %r4;
 add.s64 %rd35, %rd33, %rd34;
 cvta.to.global.u64 %rd36, %rd16;
 shl.b64 %rd37, %rd35, 2;
 add.s64 %rd38, %rd36, %rd37;
 st.global.f32 [%rd38], %f27;
$L__BB0_11:
 ret;
}
"""


_FLOAT_BYTES: Final = 4
_ONE: Final = struct.unpack("<I", struct.pack("<f", 1.0))[0]
# CU_STREAM_NON_BLOCKING: streams of one process that do not wait for each other.
_NON_BLOCKING: Final = 1


class Unusable(Exception):
    """This back end is not installed, or cannot compute here."""


class Multiplier(Protocol):
    """Multiplies matrices on one GPU, in one or several streams."""

    def launch(self, stream: int) -> None:
        """Queue one multiplication in a stream."""

    def synchronize(self) -> None:
        """Wait until all streams are done."""

    def element(self) -> float:
        """Return one element of the last product: the size of the matrices, if all is well."""


class DriverMultiplier:
    """Through the CUDA driver API (``cuda.bindings.driver``): our own kernel, single precision."""

    def __init__(self, size: int, streams: int, footprint: int) -> None:
        try:
            self._cuda = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            raise Unusable(f"cuda-bindings is not installed ({error})") from None
        try:
            self._set_up(size, streams, footprint)
        except RuntimeError as error:
            # Also: the driver library itself is not there.
            raise Unusable(str(error)) from None

    def _set_up(self, size: int, streams: int, footprint: int) -> None:
        cuda, count = self._cuda, size * size
        self._ask(cuda.cuInit(0))
        device = self._ask(cuda.cuDeviceGet(0))
        self._ask(cuda.cuCtxSetCurrent(self._ask(cuda.cuDevicePrimaryCtxRetain(device))))
        module = self._ask(cuda.cuModuleLoadData(PTX.encode() + b"\0"))
        self._function = self._ask(cuda.cuModuleGetFunction(module, NAME.encode()))
        self._blocks = (size + BLOCK - 1) // BLOCK
        self._streams, self._arguments = [], []
        for _ in range(streams):
            matrices = [int(self._ask(cuda.cuMemAlloc(count * _FLOAT_BYTES))) for _ in range(3)]
            for matrix in matrices[:2]:
                self._ask(cuda.cuMemsetD32(matrix, _ONE, count))
            self._streams.append(self._ask(cuda.cuStreamCreate(_NON_BLOCKING)))
            self._arguments.append(_Arguments(matrices, size))
        rest = footprint * streams - 3 * streams * count * _FLOAT_BYTES
        if rest > 0:
            self._ask(cuda.cuMemAlloc(rest))
        self._ask(cuda.cuCtxSynchronize())

    def launch(self, stream: int) -> None:
        """Queue one multiplication in a stream (cuLaunchKernel)."""
        blocks = self._blocks
        address = self._arguments[stream].address
        status = self._cuda.cuLaunchKernel(
            self._function, blocks, blocks, 1, BLOCK, BLOCK, 1, 0, self._streams[stream], address, 0
        )
        self._ask(status)

    def synchronize(self) -> None:
        """Wait until all streams are done (cuCtxSynchronize)."""
        self._ask(self._cuda.cuCtxSynchronize())

    def element(self) -> float:
        """Return the last element of the first stream's product (cuMemcpyDtoH)."""
        arguments = self._arguments[0]
        held = bytearray(_FLOAT_BYTES)
        last = arguments.matrices[2] + (arguments.size**2 - 1) * _FLOAT_BYTES
        self._ask(self._cuda.cuMemcpyDtoH(held, last, _FLOAT_BYTES))
        return float(struct.unpack("<f", held)[0])

    def _ask(self, answer: tuple[Any, ...]) -> Any:
        status, *values = answer
        if int(status) != 0:
            named = self._cuda.cuGetErrorName(status)
            name = named[1].decode() if len(named) > 1 and named[1] else str(status)
            raise RuntimeError(f"CUDA: {name}")
        return values[0] if values else None


class _Arguments:
    """The kernel's arguments where the driver reads them: packed once, because a launch must be cheap."""

    def __init__(self, matrices: list[int], size: int) -> None:
        self.matrices, self.size = matrices, size
        self._values = [*(ctypes.c_uint64(matrix) for matrix in matrices), ctypes.c_int32(size)]
        self._table = (ctypes.c_void_p * 4)(*(ctypes.addressof(value) for value in self._values))
        self.address = ctypes.addressof(self._table)


class TorchMultiplier:
    """Through PyTorch (cuBLAS), single precision."""

    def __init__(self, size: int, streams: int, footprint: int) -> None:
        try:
            self._torch: Any = importlib.import_module("torch")
        except ImportError as error:
            raise Unusable(f"torch is not installed ({error})") from None
        if not self._torch.cuda.is_available():
            raise Unusable("torch sees no GPU")
        torch = self._torch
        self._streams = [torch.cuda.Stream() for _ in range(streams)]
        self._sets = [[torch.ones(size, size, device="cuda") for _ in range(3)] for _ in range(streams)]
        rest = footprint * streams - 3 * streams * size * size * _FLOAT_BYTES
        self._held = torch.empty(max(0, rest), dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()

    def launch(self, stream: int) -> None:
        """Queue one multiplication in a stream (torch.matmul)."""
        torch = self._torch
        left, right, product = self._sets[stream]
        with torch.cuda.stream(self._streams[stream]):
            torch.matmul(left, right, out=product)

    def synchronize(self) -> None:
        """Wait until all streams are done."""
        self._torch.cuda.synchronize()

    def element(self) -> float:
        """Return the last element of the first stream's product."""
        return float(self._sets[0][2][-1, -1])


class CupyMultiplier:
    """Through CuPy (cuBLAS), single precision."""

    def __init__(self, size: int, streams: int, footprint: int) -> None:
        try:
            self._cupy: Any = importlib.import_module("cupy")
        except ImportError as error:
            raise Unusable(f"cupy is not installed ({error})") from None
        cupy = self._cupy
        try:
            self._streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(streams)]
            self._sets = [[cupy.ones((size, size), dtype="float32") for _ in range(3)] for _ in range(streams)]
            rest = footprint * streams - 3 * streams * size * size * _FLOAT_BYTES
            self._held = cupy.empty(max(0, rest), dtype="uint8")
            cupy.cuda.Device().synchronize()
        except (RuntimeError, MemoryError) as error:
            raise Unusable(f"cupy: {error}") from None

    def launch(self, stream: int) -> None:
        """Queue one multiplication in a stream (cupy.matmul)."""
        left, right, product = self._sets[stream]
        with self._streams[stream]:
            self._cupy.matmul(left, right, out=product)

    def synchronize(self) -> None:
        """Wait until all streams are done."""
        self._cupy.cuda.Device().synchronize()

    def element(self) -> float:
        """Return the last element of the first stream's product."""
        return float(self._sets[0][2][-1, -1])


# By name, in the order in which they are tried.
BACKENDS: Final[dict[str, Callable[[int, int, int], Multiplier]]] = {
    "cuda-bindings": DriverMultiplier,
    "torch": TorchMultiplier,
    "cupy": CupyMultiplier,
}


def first_usable(names: list[str]) -> str:
    """Return the first back end that multiplies two small matrices rightly here.

    Raises:
        Unusable: none does; says why each.
    """
    reasons = []
    for name in names:
        try:
            multiplier = BACKENDS[name](32, 1, 0)
            multiplier.launch(0)
            multiplier.synchronize()
            found = multiplier.element()
        except (Unusable, RuntimeError, AttributeError, TypeError) as error:
            reasons.append(f"{name}: {error}")
            continue
        if found == 32.0:
            return name
        reasons.append(f"{name}: computes {found:g} instead of 32")
    raise Unusable("; ".join(reasons))


# Between two waits for the GPU so much work is queued: long enough to keep it fed, short enough to end soon.
_BATCH_SECONDS: Final = 0.005
_MOST_BATCH: Final = 1000
# Without NumPy and PyTorch the CPU multiplies smaller matrices, in Python itself.
_PLAIN_SIZE: Final = 48


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the workload; return 0 when it was ended, 1 when it cannot run, with the reason on stderr."""
    options = _parser().parse_args(arguments)
    ended: list[int] = []

    def end(number: int, _frame: FrameType | None) -> None:
        ended.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        # From before the libraries are loaded, which takes seconds.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)
    try:
        if options.probe:
            sys.stdout.write(f"backend={first_usable([options.backend] if options.backend else list(BACKENDS))}\n")
            return 0
        footprint = 0 if options.footprint is None else parse_memory_limit(options.footprint)
        name = options.backend or first_usable(list(BACKENDS))
        multiplier = BACKENDS[name](options.size, options.streams, footprint)
        run(multiplier, options, ended)
    except (Unusable, RuntimeError, BadUsage) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gpushare.measure.workload")
    parser.add_argument("--backend", choices=list(BACKENDS), default=None)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--footprint", default=None)
    parser.add_argument("--every", type=float, default=0.25, help="seconds between two lines")
    parser.add_argument("--seconds", type=float, default=None, help="end after so long")
    parser.add_argument("--probe", action="store_true")
    return parser


def run(multiplier: Multiplier, options: argparse.Namespace, ended: Sequence[int]) -> None:
    """Multiply until it is ended, and print the rate."""
    on_cpu = cpu_multiplication(options.size) if options.cpu else None
    batch = 1 if options.cpu else _batch(multiplier, options.streams)
    started = since = time.perf_counter()
    done = 0
    while not ended:
        for _ in range(batch):
            for stream in range(options.streams):
                multiplier.launch(stream)
        multiplier.synchronize()
        if on_cpu is not None:
            for _ in range(options.streams):
                on_cpu()
        done += batch * options.streams
        now = time.perf_counter()
        if now - since >= options.every:
            sys.stdout.write(f"rate={done / (now - since):.6g}\n")
            sys.stdout.flush()
            done, since = 0, now
        if options.seconds is not None and now - started >= options.seconds:
            break


def _batch(multiplier: Multiplier, streams: int) -> int:
    """Return how many multiplications a stream gets between two waits."""
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
    """Return what multiplies two matrices on the CPU once: NumPy, else PyTorch, else plain Python on smaller ones."""
    for name in ("numpy", "torch"):
        try:
            module: Any = importlib.import_module(name)
        except ImportError:
            continue
        left, right = module.ones((size, size)), module.ones((size, size))
        return lambda: left @ right
    small = min(size, _PLAIN_SIZE)
    matrix = [[1.0] * small for _ in range(small)]

    def plain() -> list[list[float]]:
        columns = list(zip(*matrix, strict=True))
        return [[sum(a * b for a, b in zip(row, column, strict=True)) for column in columns] for row in matrix]

    return plain


if __name__ == "__main__":
    sys.exit(main())
