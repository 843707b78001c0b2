"""Slices by the command line, and weights, on a real GPU: ``python3 -m benchmarks.gpu_slices --json OUT``.

Run it as root on a machine with PyTorch and one NVIDIA GPU that nobody else uses. As root and as uid 65534 it runs a
PyTorch program with ``gpushare run``, and shows, sets and resets its slice. Then it measures two programs that always have
work with slices for weights 3:1 and 2:1: in proportion, and corrected by several costs of a switch. It changes no setting
of the GPU. It prints JSON and exits with 1 if anything was unexpected. ``--rehearse`` tries the script on a
simulated host, and measures nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_script import Surprises, as_nobody, measured

WINDOW = 3.5
# On a host with several GPUs, the one to use.
GPU = os.environ.get("BENCHMARK_GPU", "0")
COSTS_US = (0, 300, 600, 900, 1200)
DEFAULT_US = 2048
PAIRS = (("train", "train"), ("matmul", "matmul"), ("train", "matmul"), ("matmul", "train"))


# -- programs ----------------------------------------------------------------------------------------------------------


def job(kind: str, pretend: bool) -> int:
    """Work until SIGTERM; print the time of each step (CLOCK_MONOTONIC)."""
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: ended.append(number))
    step = (lambda: time.sleep(0.003)) if pretend else {"train": _train, "matmul": _matmul}[kind]()
    for _ in range(10):
        step()
    print("ready", flush=True)
    while not ended:
        step()
        print(time.monotonic(), flush=True)
    return 0


def _train():
    """A training of a transformer encoder that fills the GPU; it waits for the loss of the step before."""
    import torch

    torch.set_num_threads(1)
    layer = torch.nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True, norm_first=True)
    model = torch.nn.TransformerEncoder(layer, 12, enable_nested_tensor=False).cuda().to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    data = torch.randn(32, 512, 1024, device="cuda", dtype=torch.bfloat16)
    before: list[Any] = []

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = model(data).float().square().mean()
        loss.backward()
        optimizer.step()
        before.append(loss)
        if len(before) > 1:
            before.pop(0).item()

    return step


def _matmul():
    """Products of matrices, about 1 ms each step, with the next steps always queued."""
    import torch

    torch.set_num_threads(1)
    left, right = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) / 64 for _ in range(2))
    out = torch.empty_like(left)
    queued: list[Any] = []

    def step() -> None:
        for _ in range(5):
            torch.mm(left, right, out=out)
        event = torch.cuda.Event()
        event.record()
        queued.append(event)
        if len(queued) > 4:
            queued.pop(0).synchronize()

    return step


class Program:
    """A program that was started; the times of its steps are read from its output."""

    def __init__(self, kind: str, directory: str, pretend: bool, prefix: tuple[str, ...] = ()) -> None:
        self.kind, self.path = kind, tempfile.mktemp(dir=directory, prefix=f"{kind}-")  # noqa: S306 - our own directory
        argv = [sys.executable, "-m", "benchmarks.gpu_slices", "--job", kind, *(["--rehearse"] if pretend else [])]
        self._out, self._err = open(self.path, "w+"), open(self.path + ".err", "w+")  # noqa: SIM115
        self.process = subprocess.Popen([*prefix, *argv], stdout=self._out, stderr=self._err)
        self.pid = self.process.pid

    def said(self) -> str:
        return Path(self.path + ".err").read_text()

    def wait(self, seconds: float = 120.0) -> None:
        deadline = time.monotonic() + seconds
        while "ready" not in Path(self.path).read_text():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.kind} is not ready: {self.said()[-1500:]}")
            time.sleep(0.05)

    def rate(self, start: float, end: float) -> float:
        lines = Path(self.path).read_text().split("\n")[:-1]
        times = [float(line) for line in lines if line != "ready"]
        return sum(start < one <= end for one in times) / (end - start)

    def end(self) -> int | None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
        return self.process.returncode


# -- the command line --------------------------------------------------------------------------------------------------


class Checks(Surprises):
    """What was unexpected, and how gpushare is called."""

    def __init__(self, directory: str, rehearse: bool) -> None:
        super().__init__()
        self.directory, self.rehearse = directory, rehearse

    def gpushare(self, *words: str) -> list[str]:
        host = ["--host", "sim:h200"] if self.rehearse else []
        return [sys.executable, "-m", "gpushare", *host, *words]

    def called(self, *words: str) -> Any:
        began = time.monotonic()
        done = subprocess.run(
            self.gpushare("-o", "json", *words), capture_output=True, text=True, timeout=60, check=False
        )
        try:
            document = json.loads(done.stdout)
        except ValueError:
            document = {"data": None, "errors": [{"code": "no json", "message": done.stderr[-500:]}]}
        document["seconds"] = round(time.monotonic() - began, 3)
        return document


def command_line(checks: Checks) -> dict[str, Any]:
    """Run a program with a slice and a name; show, set and reset its slice."""
    result: dict[str, Any] = {"uid": os.getuid()}

    def row() -> dict[str, Any]:
        shown = checks.called("timeslice", "show")
        result["show_seconds"] = shown["seconds"]
        data = shown["data"] or {}
        result["default_slice_us"] = [gpu["default_slice_us"] for gpu in data.get("gpus", [])]
        return next((one for one in data.get("processes", []) if one["job"] == "web"), {})

    program = Program(
        "train",
        checks.directory,
        checks.rehearse,
        tuple(checks.gpushare("run", "-g", GPU, "--slice", "700us", "--name", "web", "--")),
    )
    try:
        program.wait()
        time.sleep(3)
        result["run"] = row()
        checks.expect(result["run"].get("slice_us") == 700, f"run --slice: {result['run']}")
        for words, wanted in ((("set", "500us"), 500), (("set", "16ms"), 16000)):
            done = checks.called("timeslice", *words, "web")
            checks.expect(not done["errors"], f"{words}: {done['errors']}")
            result[" ".join(words)] = {
                "seconds": done["seconds"],
                **{key: row().get(key) for key in ("slice_us", "set_us")},
            }
            checks.expect(row().get("slice_us") == wanted, f"{words}: {row()}")
        status = checks.called("status")
        result["status"] = [
            {key: one.get(key) for key in ("pid", "job", "slice_us")}
            for gpu in (status["data"] or {}).get("gpus", [])
            for one in gpu["processes"] or ()
        ]
        done = checks.called("timeslice", "reset", "web")
        checks.expect(not done["errors"], f"reset: {done['errors']}")
        result["reset"] = {"seconds": done["seconds"], "slice_us": row().get("slice_us")}
        checks.expect(row().get("set_us") is None, f"reset: {row()}")
        refused = checks.called("timeslice", "set", "10us", "web")
        checks.expect([one["code"] for one in refused["errors"]] == ["bad_slice"], f"10us: {refused['errors']}")
    finally:
        result["exit_code"] = program.end()
        result["said"] = program.said()[-2000:]
    checks.expect(result["exit_code"] == 0, f"run ended with {result['exit_code']}")
    done = checks.called("timeslice", "set", "500us", "web")
    checks.expect([one["code"] for one in done["errors"]] == ["no_job"], f"after its end: {done['errors']}")
    return result


# -- weights -----------------------------------------------------------------------------------------------------------


def slice_for(weight: float, cost: float) -> int:
    return round(weight * (DEFAULT_US - cost) + cost)


def weights(checks: Checks) -> dict[str, Any]:
    """Measure how two programs that always have work share the GPU, for slices of weights with several costs."""
    from gpushare.host.channels import ChannelControl

    result: dict[str, Any] = {"window_seconds": WINDOW}
    alone: dict[str, float] = {}
    for kind in ("train", "matmul"):
        program = Program(kind, checks.directory, checks.rehearse)
        try:
            program.wait()
            alone[kind] = _rates([program], 1.0 if checks.rehearse else WINDOW)[0]
        finally:
            program.end()
    result["alone_per_second"] = alone
    with contextlib.nullcontext(None) if checks.rehearse else ChannelControl() as control:
        for first, second in PAIRS:
            both: list[Program] = []
            try:
                both = [Program(kind, checks.directory, checks.rehearse) for kind in (first, second)]
                for one in both:
                    one.wait()
                rows = []
                for weight, costs in ((1, (0,)), (3, COSTS_US), (2, (0, 600, 900))):
                    # The longer slice for the first, the default for the second.
                    for cost in costs:
                        slices = (slice_for(weight, cost), DEFAULT_US)
                        if control is not None:
                            for one, us in zip(both, slices, strict=True):
                                control.set_slice(control.find(one.pid), us)
                        rows.append(_row(checks, both, alone, weight, cost, slices))
                result[f"{first}+{second}"] = rows
            except Exception as error:  # noqa: BLE001 - the other pairs are worth the machine's time
                checks.expect(False, f"{first}+{second}: {type(error).__name__}: {error}")
            finally:
                for one in both:
                    one.end()
    return result


def _row(
    checks: Checks, both: list[Program], alone: dict[str, float], weight: float, cost: int, slices: tuple[int, int]
) -> dict[str, Any]:
    rates = _rates(both, 0.5 if checks.rehearse else WINDOW)
    shares = [rate / alone[one.kind] if alone[one.kind] else 0.0 for rate, one in zip(rates, both, strict=True)]
    total = sum(shares)
    found = {
        "weights": [weight, 1],
        "cost_us": cost,
        "slices_us": list(slices),
        "shares": [round(one, 4) for one in shares],
        "sum": round(total, 4),
        "split_percent": [round(100 * one / total, 1) for one in shares] if total else None,
        "wanted_percent": round(100 * weight / (weight + 1), 1),
    }
    # Which cost would explain the ratio: (a - c) / (b - c) = r.
    if shares[1] and shares[0] > shares[1]:
        ratio = shares[0] / shares[1]
        found["explained_by_us"] = round((ratio * slices[1] - slices[0]) / (ratio - 1))
    print(both[0].kind, both[1].kind, json.dumps(found), file=sys.stderr, flush=True)
    return found


def _rates(programs: list[Program], seconds: float) -> list[float]:
    time.sleep(0.5)
    start = time.monotonic()
    time.sleep(seconds)
    end = time.monotonic()
    time.sleep(0.2)
    return [one.rate(start, end) for one in programs]


def by_weight(checks: Checks) -> dict[str, Any]:
    """Measure two programs that ``gpushare run --weight`` starts."""
    both: list[Program] = []
    result: dict[str, Any] = {}
    try:
        both = [
            Program(
                "train",
                checks.directory,
                checks.rehearse,
                tuple(checks.gpushare("run", "-g", GPU, "--weight", text, "--")),
            )
            for text in ("3", "1")
        ]
        for one in both:
            one.wait()
        time.sleep(3)
        rates = _rates(both, 1.0 if checks.rehearse else 6.0)
        total = sum(rates)
        result = {"rates": rates, "split_percent": [round(100 * one / total, 1) for one in rates] if total else None}
        checks.expect(checks.rehearse or 72 <= result["split_percent"][0] <= 78, f"weights 3:1: {result}")
    finally:
        result["exit_codes"] = [one.end() for one in both]
        result["said"] = [one.said()[-600:] for one in both]
    return result


# -- the script --------------------------------------------------------------------------------------------------------


def main() -> int:
    """Run a program, or the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the figures there, too")
    parser.add_argument("--parts", default="cli,weight,nobody,weights", help="some of: cli, weight, nobody, weights")
    parser.add_argument("--rehearse", action="store_true", help="on a simulated host: tries the script itself")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        return job(options.job, options.rehearse)

    def act(part: str, directory: str, surprises: list[str]) -> dict[str, Any]:
        if part == "nobody":
            words = ["--parts", "cli,weight"]
            return as_nobody("benchmarks.gpu_slices", words, directory, rehearse=options.rehearse, seconds=240)
        checks = Checks(directory, options.rehearse)
        try:
            return {"cli": command_line, "weight": by_weight, "weights": weights}[part](checks)
        finally:
            surprises += checks.surprises

    return measured(options, act, directory=options.directory)


if __name__ == "__main__":
    sys.exit(main())
