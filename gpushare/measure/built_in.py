"""The built-in workload of `gpushare bench`: matrix multiplications, as the command that runs them.

With several sizes: how long N copies take that each multiply once, and where they begin to take turns.
"""

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
from gpushare.base.units import parse_memory_limit, quoted
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


KIND: Final = "gpushare bench sizes"
# Copies that together do less than this more than one copy take turns.
_CONCURRENT: Final = 1.1
_MOST_SIZES: Final = 32


def parse_sizes(text: str) -> tuple[int, ...]:
    """Return the sizes in a list, smallest first, each once; whether they can be run is judged elsewhere."""
    found = set()
    for word in (word.strip() for word in text.split(",")):
        if not (word.isascii() and word.isdigit() and len(word) < 7):
            raise BadUsage(
                f"--size {quoted(word)} is not a size", "give --size 1024, or --size 256,1024", code="bad_size"
            )
        found.add(int(word))
    if len(found) > _MOST_SIZES:
        raise BadUsage(f"{len(found)} sizes are too many", f"give at most {_MOST_SIZES}", code="bad_size")
    return tuple(sorted(found))


def sizes_data(benchmarks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the times of all sizes, from the document of each one's benchmark, as JSON types."""
    first, last = benchmarks[0], benchmarks[-1]
    cells = [cell for one in benchmarks for cell in _cells(one)]
    return {
        "kind": KIND,
        **{key: first[key] for key in ("host", "driver", "gpu", "started_at", "window_seconds", "repeat")},
        "workload": {key: value for key, value in first["workload"].items() if key != "size"},
        "seconds": round(sum(one["seconds"] for one in benchmarks), 3),
        "reason": last["reason"],
        "sizes": [one["workload"]["size"] for one in benchmarks],
        "cells": cells,
        "concurrency": _ends(cells),
        "left_out": [dict(one) for one in first["left_out"]],
        "benchmarks": [dict(one) for one in benchmarks],
    }


def _cells(benchmark: Mapping[str, Any]) -> list[dict[str, Any]]:
    size, alone = benchmark["workload"]["size"], benchmark["alone"]["throughput"]
    found = []
    for cell in benchmark["cells"]:
        rate, gain = cell["throughput"], cell["gain"]
        known = rate is not None and rate["mean"]
        copies = cell["copies"]
        found.append(
            {
                "size": size,
                "way": cell["way"],
                "copies": copies,
                # Until each copy has multiplied once; the interval is that of the rate, turned round.
                "seconds": _time(copies, rate["mean"]) if known else None,
                "low": _time(copies, rate["high"]) if known else None,
                "high": _time(copies, rate["low"]) if known else None,
                "alone_seconds": _time(1, alone["mean"]) if alone is not None else None,
                "gain": None if gain is None else gain["value"],
                "failures": list(cell["failures"]),
            }
        )
    return found


def _time(copies: int, rate: float | None) -> float | None:
    return float(f"{copies / rate:.6g}") if rate else None


def _ends(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return up to which size copies run at the same time under each way, by the most copies that were measured."""
    found = []
    for way in dict.fromkeys(cell["way"] for cell in cells):
        mine = [cell for cell in cells if cell["way"] == way and cell["gain"] is not None and cell["copies"] > 1]
        if not mine:
            continue
        copies = max(cell["copies"] for cell in mine)
        gains = {cell["size"]: cell["gain"] for cell in mine if cell["copies"] == copies}
        # A larger matrix fills the GPU more, so that the first size without a gain is the end.
        until = None
        for size in sorted(gains):
            if gains[size] < _CONCURRENT:
                break
            until = size
        ends = next((size for size in sorted(gains) if size > (until or 0)), None)
        found.append(
            {
                "way": way,
                "copies": copies,
                "concurrent_until": until,
                "ends_at": ends,
                "gain_until": None if until is None else gains[until],
                "gain_at_end": None if ends is None else gains[ends],
            }
        )
    return found
