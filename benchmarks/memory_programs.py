"""The programs of `benchmarks.memory`: ``python -m benchmarks.memory_programs work --gib 8 --seconds 3``.

Written on libcuda alone, so that they start at once, as the jobs of a queue should when the queue is measured:

- ``work``: holds memory, and computes on some SMs (``--blocks``) for ``--busy-ms``, then on the CPU for ``--cpu-ms``, again
  and again until it has worked for ``--seconds`` alone. Prints ``rate=`` steps per second.
- ``grow``: starts processes (``--processes``) that each allocate ``--step-mib`` every ``--every`` seconds up to ``--gib``,
  after ``--first-gib`` at once.
- ``notebook``: holds memory; ``--cells`` times a little work on the CPU, then on the GPU, and nothing for ``--every`` seconds.
- ``train``: a training with PyTorch of a small model, and its loss at each step as a hexadecimal number: bits, not digits.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import os
import struct
import sys
import time
from typing import Any, Final

GIB: Final = 1 << 30
_PTX: Final = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry work(.param .u32 rounds, .param .u64 out)
{
  .reg .pred %p;
  .reg .u32 %i, %n;
  .reg .f32 %a, %b;
  .reg .u64 %o;
  ld.param.u32 %n, [rounds];
  ld.param.u64 %o, [out];
  cvta.to.global.u64 %o, %o;
  mov.u32 %i, 0;
  mov.f32 %a, 0f3F800000;
  mov.f32 %b, 0f3F7FBE77;
again:
  fma.rn.f32 %a, %a, %b, %b;
  fma.rn.f32 %a, %a, %b, %b;
  fma.rn.f32 %a, %a, %b, %b;
  fma.rn.f32 %a, %a, %b, %b;
  fma.rn.f32 %a, %a, %b, %b;
  fma.rn.f32 %a, %a, %b, %b;
  fma.rn.f32 %a, %a, %b, %b;
  fma.rn.f32 %a, %a, %b, %b;
  add.u32 %i, %i, 1;
  setp.lt.u32 %p, %i, %n;
  @%p bra again;
  st.global.f32 [%o], %a;
  ret;
}
"""


class Cuda:
    """A context on the first GPU, memory, and the kernel."""

    def __init__(self) -> None:
        self._lib = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", 0)
        device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuCtxCreate_v2", ctypes.byref(self._context), 0, device)
        module, self._kernel = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), _PTX)
        self._call("cuModuleGetFunction", ctypes.byref(self._kernel), module, b"work")
        self._out = self.allocate(4096)

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._lib, name)(*arguments)
        if code == 2:
            sys.stderr.write(f"{name}: CUDA_ERROR_OUT_OF_MEMORY\n")
            sys.stderr.flush()
            os._exit(2)
        if code:
            raise SystemExit(f"{name}: CUDA error {code}")

    def allocate(self, size: int) -> ctypes.c_uint64:
        """Allocate bytes and write to all of them."""
        pointer = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        self._call("cuMemsetD8_v2", pointer, ctypes.c_ubyte(1), ctypes.c_size_t(size))
        return pointer

    def run(self, blocks: int, rounds: int) -> float:
        """Run the kernel and return its seconds."""
        began = time.perf_counter()
        number = ctypes.c_uint32(rounds)
        arguments = (ctypes.c_void_p * 2)(
            ctypes.cast(ctypes.byref(number), ctypes.c_void_p), ctypes.cast(ctypes.byref(self._out), ctypes.c_void_p)
        )
        self._call("cuLaunchKernel", self._kernel, blocks, 1, 1, 1024, 1, 1, 0, None, arguments, None)
        self._call("cuCtxSynchronize")
        return time.perf_counter() - began


def work(options: argparse.Namespace) -> None:
    """Do a fixed number of steps."""
    cuda = Cuda()
    held = [cuda.allocate(GIB // 4) for _ in range(int(options.gib * 4))]
    cuda.run(options.blocks, 1000)
    # 32 cycles per round at about 1.7 GHz: a fixed amount of work, whoever else is there.
    rounds = max(1, int(options.busy_ms * 1e-3 * 1.7e9 / 32 / 8))
    steps = int(options.seconds * 1000 / (options.busy_ms + options.cpu_ms))
    last, before = time.perf_counter(), 0
    for step in range(steps):
        cuda.run(options.blocks, rounds)
        until = time.perf_counter() + options.cpu_ms / 1000
        time.sleep(max(0.0, until - time.perf_counter()))
        now = time.perf_counter()
        if now - last >= 0.5:
            sys.stdout.write(f"rate={(step - before) / (now - last):.2f} at={time.time():.3f} steps={step}\n")
            sys.stdout.flush()
            last, before = now, step
    sys.stdout.write(f"done={steps} held={len(held)}\n")


def grow(options: argparse.Namespace) -> None:
    """Allocate step by step, in several processes."""
    for _ in range(options.processes - 1):
        if os.fork() == 0:
            break
    cuda = Cuda()
    step = options.step_mib << 20
    held = [cuda.allocate(int(options.first_gib * GIB))] if options.first_gib else []
    size = int(options.first_gib * GIB)
    while size < options.gib * GIB:
        held.append(cuda.allocate(step))
        size += step
        sys.stdout.write(f"held={size / GIB:.2f} at={time.time():.2f}\n")
        sys.stdout.flush()
        time.sleep(options.every)
    time.sleep(10)


def notebook(options: argparse.Namespace) -> None:
    """Work a little, again and again, with nothing to do in between."""
    cuda = Cuda()
    cuda.allocate(int(options.gib * GIB))
    for cell in range(options.cells):
        # What comes before the first call of CUDA in a cell.
        until = time.perf_counter() + 0.2
        while time.perf_counter() < until:
            pass
        sys.stdout.write(f"first_call={cuda.run(132, 1000):.3f}\ncell={cell}\n")
        sys.stdout.flush()
        time.sleep(options.every)


def train(options: argparse.Namespace) -> None:
    """Train and print each loss."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch: Any = importlib.import_module("torch")
    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True)
    parts = [part for _ in range(8) for part in (torch.nn.Linear(1024, 1024), torch.nn.ReLU())]
    model = torch.nn.Sequential(*parts).cuda()
    ballast = torch.ones(int(options.gib * GIB / 4), device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    data = torch.randn(512, 1024, device="cuda")
    for step in range(options.steps):
        optimizer.zero_grad(set_to_none=True)
        loss = torch.nn.functional.mse_loss(model(data), data * ballast[step])
        loss.backward()
        optimizer.step()
        # The ballast is part of the state: an image that lost a bit of it would show.
        if step % 50 == 0:
            loss = loss + ballast.sum() * 0
        bits = struct.pack(">f", float(loss)).hex()
        sys.stdout.write(f"{step} {bits} {time.time():.3f}\n")
        sys.stdout.flush()
        time.sleep(options.cpu_ms / 1000)


def main() -> int:
    """Run a program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("work", "grow", "notebook", "train"))
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--busy-ms", type=float, default=2.0)
    parser.add_argument("--cpu-ms", type=float, default=2.0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--first-gib", type=float, default=0.0)
    parser.add_argument("--cells", type=int, default=3)
    parser.add_argument("--step-mib", type=int, default=512)
    parser.add_argument("--every", type=float, default=0.2)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    {"work": work, "grow": grow, "notebook": notebook, "train": train}[options.kind](options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
