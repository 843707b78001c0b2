"""Matrix multiplications on a GPU through what is installed: NVIDIA's cuda-bindings, else PyTorch, else CuPy.

Each back end has two matrices of ones per stream, so that every element of the product is the size: what it computes can
be checked.
"""

from __future__ import annotations

import ctypes
import importlib
import struct
from collections.abc import Callable
from typing import Any, Final, Protocol

from gpushare.measure.workload_kernel import BLOCK, NAME, PTX

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
