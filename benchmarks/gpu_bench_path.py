"""`gpushare bench` on a real GPU, in one call: ``python -m benchmarks.gpu_bench_path [--host sim:h200] [--out DIR]``.

The built-in workload (256 x 256 matrices) at 1, 4 and 8 copies under every way that can run, a small PyTorch training
loop, counted finished runs, Ctrl-C in the middle, and that nothing stays behind. Prints one line per finding and all
figures with their spread; writes each benchmark as JSON. Changes no setting of the GPU. Under five minutes: what is left
of the time decides what is skipped. On a simulated host the training loop is the simulation's job, which rehearses the
script.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

GPUSHARE = [sys.executable, "-m", "gpushare"]
TRAINING = [sys.executable, str(Path(__file__).with_name("gpu_training.py"))]
STEPS = "^steps_per_second=([0-9.]+)$"
BUDGET_SECONDS = 290.0


class BenchPath:
    """The path, step by step."""

    def __init__(self, host: str, out: Path, budget: float) -> None:
        self.host, self.out = host, out
        self.simulated = host.startswith("sim:")
        self.deadline = time.monotonic() + budget
        self.failures: list[str] = []

    def expect(self, condition: object, what: str, seen: object = None) -> bool:
        """Print whether something holds."""
        shown = "" if seen in (None, [], "") else f": {seen}"
        print(f"{'ok  ' if condition else 'FAIL'} {what}{shown}", flush=True)
        if not condition:
            self.failures.append(what)
        return bool(condition)

    def bench(self, name: str, seconds: float, *words: str, command: Sequence[str] = ()) -> dict[str, Any] | None:
        """Run a benchmark that takes about ``seconds`` seconds, print its table and return its data."""
        left = self.deadline - time.monotonic()
        if left < seconds:
            print(f"skip {name}: {left:.0f} s are left, it needs about {seconds:.0f}", flush=True)
            return None
        print(f"\n== {name}", flush=True)
        began, file = time.monotonic(), self.out / f"{name}.json"
        file.unlink(missing_ok=True)
        argv = [*GPUSHARE, "--host", self.host, "-o", "table", "bench", *words, "--to", str(file)]
        done = subprocess.run(
            [*argv, *(["--", *command] if command else [])],
            capture_output=True,
            text=True,
            check=False,
            timeout=left + 60,
            env={**os.environ, "COLUMNS": "120"},
        )
        print(done.stdout + done.stderr, flush=True)
        print(f"   {time.monotonic() - began:.1f} s", flush=True)
        self.expect(done.returncode == 0, f"{name} exits 0", done.returncode)
        return json.loads(file.read_text()) if file.exists() else None

    def clean(self, when: str) -> None:
        """Check that neither a daemon nor a process of ours is left."""
        done = subprocess.run(
            [*GPUSHARE, "--host", self.host, "-o", "json", "status"], capture_output=True, text=True, check=False
        )
        data = json.loads(done.stdout)["data"]
        self.expect(data["mps_daemons"] == [], f"no MPS daemon is left {when}", data["mps_daemons"])
        on_gpu = [process["pid"] for gpu in data["gpus"] for process in gpu["processes"] or ()]
        self.expect(on_gpu == [], f"no process is left on the GPU {when}", on_gpu)

    def judge(self, data: dict[str, Any] | None, name: str, *, copies: int, least: float) -> None:
        """Check the answer: the chosen way is within 3 % of the best, never below time-slicing, and gains enough."""
        if data is None:
            return
        cells = {
            cell["way"]: cell["throughput"]["mean"]
            for cell in data["cells"]
            if cell["copies"] == copies and cell["throughput"]
        }
        pick = next((pick for pick in data["picks"] if pick["copies"] == copies), None)
        if not self.expect(pick is not None, f"{name}: there is an answer for {copies} copies", sorted(cells)):
            return
        chosen = cells[pick["way"]]
        self.expect(chosen >= 0.97 * max(cells.values()), f"{name}: the choice is within 3 % of the best", pick["way"])
        self.expect(chosen >= cells["timeslice"], f"{name}: the choice is not slower than time-slicing")
        gain = chosen / cells["timeslice"]
        self.expect(gain >= least, f"{name}: {copies} copies gain {least} x over time-slicing", f"{gain:.2f}")
        failed = [text for cell in data["cells"] for text in cell["failures"]]
        self.expect(not failed, f"{name}: no copy failed", failed[:3])
        alone = data["alone"]
        self.expect(alone["memory_peak_bytes"], f"{name}: memory is measured", alone["memory_peak_bytes"])
        self.expect(alone["joules"], f"{name}: energy is measured", f"{alone['power_watts']} W alone")

    def built_in(self) -> None:
        """Run the built-in workload."""
        words = ("--size", "256", "--copies", "1,4,8", "--repeat", "3", "--for", "1s")
        data = self.bench("built_in", 60 if self.simulated else 120, *words)
        if data is not None:
            print(f"     back end: {data['workload']['backend']}", flush=True)
            ways = {cell["way"] for cell in data["cells"] if cell["throughput"]}
            wanted = {"queue", "timeslice", "mps", "mps:100/n", "mps:200/n", "streams"}
            self.expect(wanted <= ways, "every way without MIG was measured", sorted(wanted - ways))
        self.judge(data, "built_in", copies=8, least=1.5)
        self.clean("after the built-in workload")

    def training(self) -> None:
        """Run a training loop that prints its rate."""
        command = TRAINING
        if self.simulated:
            command = [sys.executable, "-m", "gpushare.sim.job", "--need", "20", "--rate", "670", "--every", "0.1"]
        metric = "^rate=(.+)$" if self.simulated else STEPS
        words = ("--copies", "8", "--ways", "timeslice,mps,mps:200/n", "--repeat", "2", "--for", "1500ms")
        data = self.bench("training", 90, *words, "--metric", metric, command=command)
        self.judge(data, "training", copies=8, least=1.5)
        self.clean("after the training loop")

    def finished_runs(self) -> None:
        """Count finished runs, with GPU and CPU work."""
        if self.simulated:
            command = [sys.executable, "-m", "gpushare.sim.job", "--need", "20", "--work", "50"]
        else:
            program = [sys.executable, "-m", "gpushare.measure.workload", "--cpu"]
            command = [*program, "--size", "512", "--seconds", "1"]
        words = ("--copies", "2", "--ways", "queue,timeslice,mps", "--repeat", "1")
        data = self.bench("finished_runs", 35, *words, command=command)
        if data is not None:
            cells = {cell["way"]: cell["throughput"]["mean"] for cell in data["cells"] if cell["throughput"]}
            self.expect(cells.get("mps", 0) > cells.get("queue", 0), "two at once finish sooner than in turn", cells)

    def interrupted(self) -> None:
        """Press Ctrl-C in the middle of a run under MPS."""
        if self.deadline - time.monotonic() < 30:
            print("skip interrupted: no time is left", flush=True)
            return
        print("\n== interrupted", flush=True)
        words = ["--size", "256", "--copies", "4", "--ways", "mps", "--repeat", "50", "--for", "1s"]
        process = subprocess.Popen(
            [*GPUSHARE, "--host", self.host, "-o", "json", "bench", *words], stdout=subprocess.PIPE, text=True
        )
        time.sleep(6 if self.simulated else 15)
        process.send_signal(signal.SIGINT)
        asked = time.monotonic()
        out, _ = process.communicate(timeout=60)
        self.expect(process.returncode == 130, "Ctrl-C ends it with 130", process.returncode)
        self.expect(time.monotonic() - asked < 15, "within 15 s", f"{time.monotonic() - asked:.1f} s")
        document = json.loads(out)
        kept = document["data"]["runs"] if document["data"] else []
        self.expect(kept, "what was measured is kept", f"{len(kept)} runs")
        self.clean("after Ctrl-C")

    def go(self) -> int:
        """Walk the path, and return the exit code."""
        self.out.mkdir(parents=True, exist_ok=True)
        self.clean("before")
        for part in (self.built_in, self.training, self.finished_runs, self.interrupted):
            try:
                part()
            except Exception as error:  # noqa: BLE001 - the other parts are still worth the machine's time
                self.expect(False, part.__name__, f"{type(error).__name__}: {error}")
        print(f"\n{len(self.failures)} failures" + "".join(f"\n  {what}" for what in self.failures), flush=True)
        return 1 if self.failures else 0


def main() -> int:
    """Walk the path."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="local")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--budget", type=float, default=BUDGET_SECONDS, help="seconds")
    options = parser.parse_args()
    return BenchPath(options.host, options.out, options.budget).go()


if __name__ == "__main__":
    sys.exit(main())
