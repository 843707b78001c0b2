"""The MPS path on a real GPU, where there is one; and its rehearsal on a simulated host, everywhere."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def why_not() -> str | None:
    """Return why the real path cannot run here, or None."""
    if shutil.which("nvidia-cuda-mps-control") is None:
        return "no nvidia-cuda-mps-control on PATH"
    if importlib.util.find_spec("torch") is None:
        return "no torch: the CUDA clients are written with it"
    probe = "import torch, sys; sys.exit(0 if torch.cuda.is_available() else 1)"
    if subprocess.run([sys.executable, "-c", probe], check=False, timeout=120).returncode != 0:
        return "CUDA sees no GPU"
    return None


def walk(tmp_path: Path, *words: str, seconds: float) -> dict[str, Any]:
    """Run the script and return its figures; a failure shows what it printed."""
    figures = tmp_path / "figures.json"
    argv = [sys.executable, "-m", "benchmarks.gpu_mps_path", "--json", str(figures), *words]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(figures.read_text(encoding="utf-8"))
    return found


@pytest.mark.gpu
def test_the_whole_path_on_the_gpu_of_this_machine(tmp_path: Path) -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    figures = walk(tmp_path, "--tries", "20", seconds=600)
    assert figures["kill"] == {**figures["kill"], "broke": 0, "tries": 20}
    allocated = [probe["allocated_mib"] for probe in figures["limits"]["probes"]]
    assert allocated[0] < 4096 < allocated[1] < 8192


def test_the_path_is_rehearsed_on_a_simulated_host(tmp_path: Path) -> None:
    figures = walk(tmp_path, "--rehearse", "--parts", "limits,outside", seconds=60)
    assert figures["surprises"] == []
    assert [row["threads_percent"] for row in figures["limits"]["status"]] == [25.0, 50.0]
    assert [row["memory_limit_bytes"] for row in figures["limits"]["status"]] == [7 << 29, 15 << 29]
    assert figures["outside"]["exit_code"] == 1
