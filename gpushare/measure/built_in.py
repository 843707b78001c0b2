"""The built-in workload of `gpushare bench`: matrix multiplications, as the command that runs them.

With several sizes: how long N copies take that each multiply once, and where they begin to take turns.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Final, Literal

import gpushare
from gpushare.base.benchmark import (
    BenchAnswer,
    BenchCell,
    BenchSizesAnswer,
    BuiltInWorkload,
    Concurrency,
    Metric,
    SizeCell,
)
from gpushare.base.errors import BadUsage, GpushareError, NotSupported
from gpushare.base.selection import Device
from gpushare.base.units import parse_memory_limit, quoted
from gpushare.host.host import Host
from gpushare.measure.bench import Settings
from gpushare.measure.statistics import rounded
from gpushare.measure.ways import IN_ONE_OPTIONS

DEFAULT_SIZE: Final = 1024
_MOST_SIZE: Final = 32768
_WINDOW_SECONDS: Final = 2.0
_PROGRAM: Final = (sys.executable, "-m", "gpushare.measure.workload")
# PyTorch takes long to load from a cold disk.
_PROBE_SECONDS: Final = 120.0
_RATE: Final = r"^rate=([0-9.]+(?:e[-+]?[0-9]+)?)$"
# Simulated: a matrix of this size fills the GPU; smaller ones take a share by area.
_FILLING_SIZE: Final = 2048
# Simulated: the most multiplications per second, bounded by launches, up to this size.
_FASTEST: Final = 100_000.0
_SMALL_SIZE: Final = 256
_COPIES: Final = {"to": "a copy to the GPU", "from": "a copy from the GPU", "both": "copies to and from the GPU"}


def built_in_workload(
    host: Host, device: Device, *, size: int | None, cpu: bool, footprint: str | None, copy: str | None = None
) -> Settings:
    """Return the built-in workload; on a simulated host, a simulated job with about the same needs."""
    size = DEFAULT_SIZE if size is None else size
    if copy is not None and copy not in _COPIES:
        raise BadUsage(f"--copy {copy} is not to, from or both", "give --copy both", code="bad_copy")
    if not 16 <= size <= _MOST_SIZE:
        raise BadUsage(f"--size {size} is outside 16 to {_MOST_SIZE}", "give --size 256", code="bad_size")
    if footprint is not None:
        parse_memory_limit(footprint, "--footprint")
    title = f"{size} x {size} matrix multiplications"
    if cpu:
        title += ", with as many on the CPU"
    if copy is not None:
        title += f", with {_COPIES[copy]} next to each"
    root = str(Path(gpushare.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    # One thread per copy: more would compete for the cores, and the GPU is what is measured.
    environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    backend = "simulated" if host.is_simulated else _working_backend(host, device, environment)
    workload = BuiltInWorkload(
        title=f"{title} ({backend})",
        unit="multiplications per second",
        size=size,
        cpu=cpu,
        copy=copy,
        footprint=footprint,
        backend=backend,
    )
    if host.is_simulated:
        argv = _simulated_argv(size, cpu=cpu)
    else:
        on_cpu = ["--cpu"] if cpu else []
        copied = [] if copy is None else ["--copy", copy]
        argv = [*_PROGRAM, "--backend", backend, "--size", str(size), *on_cpu, *copied]
    if footprint is not None:
        argv += ["--footprint", footprint]
    return Settings(
        argv=argv,
        metric=Metric(pattern=_RATE),
        window=_WINDOW_SECONDS,
        in_one=IN_ONE_OPTIONS,
        environment=environment,
        workload=workload,
    )


def _working_backend(host: Host, device: Device, environment: Mapping[str, str]) -> str:
    """Return the library, torch or cupy, that multiplies correctly on this device, as a trial process found."""
    shown = device.uuid
    if device.mig is None and device.gpu.mig_instances:
        shown = device.gpu.mig_instances[0].uuid
    try:
        done = host.programs.run(
            [*_PROGRAM, "--probe"], env={**environment, "CUDA_VISIBLE_DEVICES": shown}, timeout=_PROBE_SECONDS
        )
    except GpushareError as error:
        raise _no_backend_error(error.message) from None
    match = re.search(r"^backend=(\S+)$", done.stdout, re.MULTILINE)
    if done.exit_code != 0 or match is None:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise _no_backend_error(lines[-1].removeprefix("error: ") if lines else f"exit code {done.exit_code}")
    return match[1]


def _no_backend_error(why: str) -> NotSupported:
    return NotSupported(
        f"the built-in workload needs PyTorch or CuPy: {why}",
        "install CuPy: pip install 'cupy-cuda12x[ctk]'; or measure a program of your own: gpushare bench -- CMD",
        code="no_backend",
    )


def _simulated_argv(size: int, *, cpu: bool) -> list[str]:
    """Return the command of a job on the simulated host that needs about as much of the GPU, and is about as fast.

    If the CPU works too, it takes half of the time, and the job needs half of the GPU.
    """
    # A product fills the GPU by its area, and takes work by the third power of its side.
    need = min(100.0, max(2.0, 100.0 * (size / _FILLING_SIZE) ** 2))
    rate = min(_FASTEST, _FASTEST * (_SMALL_SIZE / size) ** 3)
    share = 0.5 if cpu else 1.0
    numbers = ["--need", f"{max(1.0, need * share):g}", "--rate", f"{max(0.001, rate * share):g}"]
    return [sys.executable, "-m", "gpushare.sim.job", *numbers]


# Copies that together do less than this more than one copy take turns.
_CONCURRENT: Final = 1.1
_MOST_SIZES: Final = 32


def parse_sizes(text: str) -> tuple[int, ...]:
    """Return the sizes in a list, smallest first, each once; `built_in_workload` refuses those out of range."""
    sizes = set()
    for word in (word.strip() for word in text.split(",")):
        if not (word.isascii() and word.isdigit() and len(word) < 7):
            raise BadUsage(
                f"--size {quoted(word)} is not a size", "give --size 1024, or --size 256,1024", code="bad_size"
            )
        sizes.add(int(word))
    if len(sizes) > _MOST_SIZES:
        raise BadUsage(f"{len(sizes)} sizes are too many", f"give at most {_MOST_SIZES}", code="bad_size")
    return tuple(sorted(sizes))


def sizes_answer(benchmarks: Sequence[BenchAnswer]) -> BenchSizesAnswer:
    """Return the times of all sizes, from the benchmark of each one, which has the built-in workload."""
    first = benchmarks[0]
    workloads = [each.workload for each in benchmarks if each.workload is not None]
    sizes = tuple(workload.size for workload in workloads if workload.size is not None)
    cells = tuple(cell for size, each in zip(sizes, benchmarks, strict=True) for cell in _size_cells(size, each))
    return BenchSizesAnswer(
        host=first.host,
        driver=first.driver,
        gpu=first.gpu,
        started_at=first.started_at,
        window_seconds=first.window_seconds,
        repeat=first.repeat,
        workload=replace(workloads[0], size=None, title=workloads[0].title.removeprefix(f"{sizes[0]} x {sizes[0]} ")),
        seconds=round(sum(each.seconds for each in benchmarks), 3),
        reason=benchmarks[-1].reason,
        sizes=sizes,
        cells=cells,
        concurrency=tuple(_concurrency(cells)),
        left_out=first.left_out,
        benchmarks=tuple(benchmarks),
    )


def _size_cells(size: int, benchmark: BenchAnswer) -> list[SizeCell]:
    """Return the time of one multiplication in each cell of the benchmark of one size."""
    return [
        SizeCell(
            size=size,
            way=cell.way,
            copies=cell.copies,
            seconds=_seconds_each(cell, "mean"),
            # The interval is that of the rate, turned round.
            low=_seconds_each(cell, "high"),
            high=_seconds_each(cell, "low"),
            alone_seconds=_seconds_each(benchmark.alone, "mean"),
            gain=None if cell.gain is None else cell.gain.value,
            failures=cell.failures,
        )
        for cell in benchmark.cells
    ]


def _seconds_each(cell: BenchCell, bound: Literal["mean", "low", "high"]) -> float | None:
    """Return how long all copies take for one multiplication each, at their mean rate, or a bound of it; None: unknown."""
    rate = getattr(cell.throughput, bound, None)
    return rounded(cell.copies / rate) if rate else None


def _concurrency(cells: Sequence[SizeCell]) -> list[Concurrency]:
    """Return up to which size the most copies that were measured run at the same time, under each way."""
    answers = []
    for way in dict.fromkeys(cell.way for cell in cells):
        several = [cell for cell in cells if cell.way == way and cell.gain is not None and cell.copies > 1]
        most = max((cell.copies for cell in several), default=0)
        gains = sorted((cell.size, cell.gain or 0.0) for cell in several if cell.copies == most)
        if not gains:
            continue
        # A larger matrix fills the GPU more, so that the first size without a gain is the end.
        together = list(takewhile(lambda size_and_gain: size_and_gain[1] >= _CONCURRENT, gains))
        until, gain_until = together[-1] if together else (None, None)
        ends_at, gain_at_end = gains[len(together)] if len(together) < len(gains) else (None, None)
        answers.append(
            Concurrency(
                way=way,
                copies=most,
                concurrent_until=until,
                ends_at=ends_at,
                gain_until=gain_until,
                gain_at_end=gain_at_end,
            )
        )
    return answers
