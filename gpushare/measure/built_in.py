"""The built-in workload of `gpushare bench`: matrix multiplications, as the command that runs them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import gpushare
from gpushare.base.errors import BadUsage, GpushareError, NotSupported
from gpushare.base.selection import Device
from gpushare.base.units import parse_memory_limit
from gpushare.host.host import Host
from gpushare.measure.metric import Metric, parse_metric

DEFAULT_SIZE: Final = 1024
_MOST_SIZE: Final = 32768
_PROGRAM: Final = (sys.executable, "-m", "gpushare.measure.workload")
# PyTorch takes long to load from a cold disk.
_PROBE_SECONDS: Final = 120.0
_RATE: Final = r"^rate=([0-9.]+(?:e[-+]?[0-9]+)?)$"
# Simulated: a matrix of this size fills the GPU; smaller ones take a share by area.
_FILLING_SIZE: Final = 2048
# Simulated: the most multiplications per second, bounded by launches.
_FASTEST: Final = 100_000.0
_COPIES: Final = {"to": "a copy to the GPU", "from": "a copy from the GPU", "both": "copies to and from the GPU"}


@dataclass(frozen=True, kw_only=True)
class BuiltIn:
    """The command of the built-in workload, its metric, its variables, and facts about it."""

    argv: Sequence[str]
    metric: Metric
    environment: Mapping[str, str]
    facts: Mapping[str, Any]


def built_in_workload(
    host: Host, device: Device, *, size: int | None, cpu: bool, footprint: str | None, copy: str | None = None
) -> BuiltIn:
    """Return the built-in workload; on a simulated host, a simulated job with about the same needs."""
    size = DEFAULT_SIZE if size is None else size
    if copy is not None and copy not in _COPIES:
        raise BadUsage(f"--copy {copy} is not to, from or both", "give --copy both", code="bad_copy")
    if not 16 <= size <= _MOST_SIZE:
        raise BadUsage(f"--size {size} is outside 16 to {_MOST_SIZE}", "give --size 256", code="bad_size")
    if footprint is not None:
        parse_memory_limit(footprint, "--footprint")
    title = f"{size} x {size} matrix multiplications" + (", with as many on the CPU" if cpu else "")
    title += "" if copy is None else f", with {_COPIES[copy]} next to each"
    root = str(Path(gpushare.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    # One thread per copy: more would compete for the cores, and the GPU is what is measured.
    environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    backend = "simulated" if host.is_simulated else _backend(host, device, environment)
    facts = {
        "title": f"{title} ({backend})",
        "unit": "multiplications per second",
        "size": size,
        "cpu": cpu,
        "copy": copy,
        "footprint": footprint,
        "backend": backend,
    }
    held = [] if footprint is None else ["--footprint", footprint]
    argv = _simulated(size, cpu=cpu) if host.is_simulated else _real(size, backend, cpu=cpu)
    beside = [] if copy is None or host.is_simulated else ["--copy", copy]
    return BuiltIn(argv=[*argv, *beside, *held], metric=parse_metric(_RATE), environment=environment, facts=facts)


def _backend(host: Host, device: Device, environment: Mapping[str, str]) -> str:
    """Return the library that multiplies correctly on this device, tried in a process of its own."""
    shown = device.uuid
    if device.mig is None and device.gpu.mig_instances:
        shown = device.gpu.mig_instances[0].uuid
    try:
        done = host.programs.run(
            [*_PROGRAM, "--probe"], env={**environment, "CUDA_VISIBLE_DEVICES": shown}, timeout=_PROBE_SECONDS
        )
    except GpushareError as error:
        raise _no_backend(error.message) from None
    match = re.search(r"^backend=(\S+)$", done.stdout, re.MULTILINE)
    if done.exit_code != 0 or match is None:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise _no_backend(lines[-1].removeprefix("error: ") if lines else f"exit code {done.exit_code}")
    return match[1]


def _no_backend(why: str) -> NotSupported:
    return NotSupported(
        f"the built-in workload needs PyTorch or CuPy: {why}",
        "install CuPy: pip install 'cupy-cuda12x[ctk]'; or measure a program of your own: gpushare bench -- CMD",
        code="no_backend",
    )


def _real(size: int, backend: str, *, cpu: bool) -> list[str]:
    return [*_PROGRAM, "--backend", backend, "--size", str(size), *(["--cpu"] if cpu else [])]


def _simulated(size: int, *, cpu: bool) -> list[str]:
    """Return a job of the simulated host: it needs more of the GPU by the area of the matrices, and its rate falls with work.

    If the CPU works too, it takes half of the time, and the job needs half of the GPU.
    """
    need = min(100.0, max(2.0, 100.0 * (size / _FILLING_SIZE) ** 2))
    rate = min(_FASTEST, _FASTEST * (_FILLING_SIZE / 8 / size) ** 3)
    share = 0.5 if cpu else 1.0
    words = {"need": max(1.0, need * share), "rate": max(0.001, rate * share)}
    return [
        sys.executable,
        "-m",
        "gpushare.sim.job",
        *(word for key, value in words.items() for word in (f"--{key}", f"{value:g}")),
    ]
