"""The built-in workload on a real GPU, with PyTorch or CuPy; by hand: ``pytest tests/gpu``."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gpushare.measure.workload import BACKENDS

PROGRAM = (sys.executable, "-m", "gpushare.measure.workload")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("more", [(), ("--streams", "4"), ("--cpu",), ("--footprint", "1G")])
def test_it_multiplies_and_prints_rates(backend: str, more: tuple[str, ...]) -> None:
    probed = subprocess.run([*PROGRAM, "--probe", "--backend", backend], capture_output=True, text=True, check=False)
    if probed.returncode != 0:
        pytest.skip(probed.stderr.strip())
    assert probed.stdout == f"backend={backend}\n"
    words = ("--backend", backend, "--size", "256", "--seconds", "2", *more)
    done = subprocess.run([*PROGRAM, *words], capture_output=True, text=True, check=True)
    rates = [float(line.removeprefix("rate=")) for line in done.stdout.splitlines()]
    assert len(rates) >= 4
    assert min(rates) > 0
