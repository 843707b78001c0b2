"""`gpushare tune` by time-slices on a real GPU: ``python3 -m benchmarks.gpu_tune --json OUT``.

Run it on a machine with PyTorch and one NVIDIA GPU that nobody else uses. It tunes two pairs: ``infer`` next to ``big``
(`benchmarks.jobs`), and a request of 1 ms every 25 ms next to a training (`benchmarks.colocation_programs`). It changes no
setting of the GPU: only the time-slices of its own programs. ``--ways slices,caps`` searches caps too, and takes several
minutes; ``--copies 2`` runs two of the other job. It prints JSON and exits with 1 if a search failed. ``--rehearse`` tries
it on a simulated host.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_SERVICE_SECONDS = 0.001
_PERIOD_SECONDS = 0.025
_LINE_SECONDS = 0.1
RATE = "rate=([0-9.]+)"
# Production, the other job, how far the p99 may rise; and production on a simulated GPU.
PAIRS = (
    ("infer", "big", "1.25x", "--need 95 --busy 10 --latency 0.9"),
    ("enc1", "resnet-train", "1.6x", "--need 95 --busy 4 --latency 1"),
)


def main() -> int:
    """Run a job, or the searches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", choices=("enc1", "resnet-train"))
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--ways", default="slices")
    parser.add_argument("--copies", default="1")
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    if options.job:
        return job(options.job)
    began, found = time.monotonic(), {}
    with tempfile.TemporaryDirectory() as directory:
        for production, other, p99, pretended in PAIRS:
            found[f"{production} + {other}"] = searched(options, directory, production, other, p99, pretended)
    found["seconds"] = round(time.monotonic() - began, 1)
    found["xids"] = xids()
    text = json.dumps(found, indent=1)
    if options.json:
        Path(options.json).write_text(text + "\n")
    print(text)
    failed = [name for name, one in found.items() if isinstance(one, dict) and one.get("exit_code") not in {0, 7}]
    return 1 if failed or found["xids"] else 0


def searched(
    options: argparse.Namespace, directory: str, production: str, other: str, p99: str, pretended: str
) -> dict[str, Any]:
    """Tune a pair, and return what was found."""
    if options.rehearse:
        words = [f"{sys.executable} -m gpushare.sim.job --every 0.02 {one}" for one in (pretended, "--need 95")]
    else:
        words = [_command(production), _command(other)]
    argv = [sys.executable, "-m", "gpushare", *(("--host", "sim:h200") if options.rehearse else ()), "-o", "json"]
    argv += [
        "tune",
        "-g",
        os.environ.get("BENCHMARK_GPU", "0"),
        "--production",
        words[0],
        "--opportunistic",
        words[1],
        "--p99",
        p99,
        "--keep",
        "90%",
    ]
    argv += ["--ways", options.ways, "--window", "0.7s", "--rounds", "3", "--name", production]
    argv += ["--opportunistic-metric", RATE, "--copies", options.copies]
    kept = {"GPUSHARE_STATE_DIR": directory, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(argv, stdout=subprocess.PIPE, env={**os.environ, **kept}, check=False)
    document = json.loads(done.stdout or "{}")
    data = document.get("data") or {}
    names = ("best", "nearest", "ways", "seconds", "production_alone", "production_p99", "production_busy_percent")
    more = {name: data.get(name) for name in (*names, "opportunistic_alone", "stable", "trials")}
    return {"exit_code": done.returncode, "errors": document.get("errors"), **more}


def _command(name: str) -> str:
    module = "benchmarks.jobs" if name in {"infer", "big"} else "benchmarks.gpu_tune --job"
    return f"{sys.executable} -m {module} {name}"


def xids() -> list[str]:
    """Return the lines about GPU errors in the kernel's log, as far as it can be read."""
    try:
        done = subprocess.run(["dmesg"], capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line for line in done.stdout.splitlines() if "NVRM: Xid" in line]


def job(name: str) -> int:
    """Run a program of the co-location benchmark until it is ended, and print what tune reads."""
    ended: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _frame: ended.append(number))
    from benchmarks.colocation_programs import PROGRAMS

    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    torch.backends.cuda.enable_cudnn_sdp(False)
    program = PROGRAMS[name](torch)
    step = program.step
    for _ in range(10):
        step()
    if program.build is not None:
        step = program.build(max(2, round(program.layers * _SERVICE_SECONDS / _median(step))))
        step()
    due = last = time.perf_counter()
    count = 0
    while not ended:
        if name == "enc1":
            # It polls: a CPU that has slept is slow at first.
            while time.perf_counter() < due:
                pass
            began = time.perf_counter()
            step()
            print(f"latency_ms={1000 * (time.perf_counter() - began):.4f}", flush=True)
            due = max(due + _PERIOD_SECONDS, time.perf_counter())
            continue
        step()
        count += 1
        now = time.perf_counter()
        if now - last >= _LINE_SECONDS:
            print(f"rate={count / (now - last):.3f}", flush=True)
            last, count = now, 0
    program.finish()
    return 0


def _median(step: Any) -> float:
    took = []
    for _ in range(60):
        began = time.perf_counter()
        step()
        took.append(time.perf_counter() - began)
    return sorted(took[20:])[20]


if __name__ == "__main__":
    sys.exit(main())
