"""The roles of `gpushare run` with time-slices on a real GPU: ``python3 -m benchmarks.gpu_roles --json OUT``.

Run it as root on a machine with PyTorch and one NVIDIA GPU that nobody else uses. Production (a request of 5.6 ms at half
load) runs outside MPS with a slice of 16 ms, next to one and then two trainings in one MPS daemon, all started by
`gpushare run`, as root (part ``root``) and as uid 65534 (part ``user``). Part ``adapt``: production changes between requests
at half load and work without gaps every 12 s, next to a training with ``--keep 97%``. It prints JSON and exits with 1
if anything was unexpected. ``--rehearse`` tries the script on a simulated host, without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_script import HOLD, READY, STEPS, UNITS, State, Surprises, as_nobody, measured, window

# On a host with several GPUs, the one to use.
GPU = os.environ.get("BENCHMARK_GPU", "0")
REQUEST_MS = 5.6
WINDOW, PHASE_SECONDS, ADAPT_SECONDS = 6.0, 12.0, 60.0
# Of a job's state, after those of gpu_script: when the first phase began, in microseconds.
BEGAN = 8
RATE_EVERY = 0.25
METRIC = "rate=([0-9.]+)"


# -- jobs --------------------------------------------------------------------------------------------------------------


def _train(_state, _options):
    """A training of a transformer encoder that fills the GPU."""
    import torch

    torch.set_num_threads(1)
    layer = torch.nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True, norm_first=True)
    model = torch.nn.TransformerEncoder(layer, 12, enable_nested_tensor=False).cuda().to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    data = torch.randn(32, 512, 1024, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = model(data).float().square().mean()
        loss.backward()
        optimizer.step()
        loss.item()

    return step


def _serve(state, options):
    """A request of about 5.6 ms: products of bf16 matrices; how many is measured once, or given."""
    import torch

    torch.set_num_threads(1)
    left, right = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) / 64 for _ in range(2))
    out = torch.empty_like(left)

    def work(units: int) -> None:
        with torch.inference_mode():
            for _ in range(units):
                torch.mm(left, right, out=out)
                out.relu_()
        torch.cuda.synchronize()

    work(200)
    took = []
    for _ in range(20):
        began = time.monotonic()
        work(20)
        took.append((time.monotonic() - began) / 20)
    units = options.units or max(1, round(REQUEST_MS / 1000 / statistics.median(took)))
    state[UNITS] = units
    return lambda: work(units)


def job(options: argparse.Namespace) -> int:
    """Do one kind of step until SIGTERM; log the time of each, and print the rate four times a second."""
    state = State(options.state)
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: ended.append(number))
    if options.pretend:
        step = lambda: time.sleep(0.003)  # noqa: E731
    else:
        options.units = 0
        step = (_train if options.job == "train" else _serve)(state, options)
    for _ in range(5):
        step()
    state[BEGAN] = int(time.monotonic() * 1e6)
    state[READY] = 1
    gaps = options.job != "train"
    due = printed = last = time.monotonic()
    count = 0
    with state.log() as log:
        while not ended:
            if state[HOLD]:
                time.sleep(0.005)
                due = printed = last = time.monotonic()
                count = 0
                continue
            full = options.job == "phases" and phase_of(state[BEGAN] / 1e6, time.monotonic()) == 1
            if gaps and not full:
                while time.monotonic() < due:
                    pass
            began = time.monotonic()
            step()
            now = time.monotonic()
            count += 1
            state[STEPS] += 1
            log.write(struct.pack("<dd", now, 1000 * (now - began)))
            due = next_due(due, now, full=full)
            if now - printed >= RATE_EVERY:
                print(f"rate={count / (now - last):.4f}", flush=True)
                printed = last = now
                count = 0
    return 0


def next_due(due: float, now: float, *, full: bool) -> float:
    """Return when the next request comes. What is late is not made up for, and work without gaps owes no rest after it."""
    return now if full else max(due + 2 * REQUEST_MS / 1000, now)


def phase_of(began: float, at: float) -> int:
    """Return 0 while requests come at half load, 1 while there is no gap."""
    return int((at - began) / PHASE_SECONDS) % 2


class Started:
    """A program that `gpushare run` runs."""

    def __init__(self, part: Part, kind: str, *words: str) -> None:
        part.count += 1
        path = f"{part.directory}/{part.count}-{kind}"
        self.kind, self.part, self.state = kind, part, State(path)
        program = [sys.executable, "-m", "benchmarks.gpu_roles", "--job", kind, "--state", path]
        program += ["--pretend"] if part.pretend else []
        self.errors = open(path + ".err", "w+b")  # noqa: SIM115
        self.process = subprocess.Popen(
            [*part.gpushare, "run", *("-g", GPU), *words, "--", *program], stdout=subprocess.DEVNULL, stderr=self.errors
        )
        part.jobs.append(self)

    def wait(self, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not self.state[READY]:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.kind} is not ready: {self.said()[-1500:]}")
            time.sleep(0.02)

    def said(self) -> str:
        self.errors.flush()
        return Path(self.errors.name).read_text(errors="replace")

    def hold(self, on: bool) -> None:
        self.state[HOLD] = int(on)

    def end(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.part.surprise(f"{self.kind} did not end on SIGTERM")
                self.process.kill()
                self.process.wait(10)
        return self.process.returncode


class Part(Surprises):
    """Everything that is measured as one user."""

    def __init__(self, directory: str, pretend: bool) -> None:
        super().__init__()
        self.directory, self.pretend = directory, pretend
        self.gpushare = [sys.executable, "-m", "gpushare", *(["--host", "sim:h200"] if pretend else [])]
        self.count = 0
        self.jobs: list[Started] = []

    def show(self) -> list[dict[str, Any]]:
        """Return the slices of all processes as the driver reads them."""
        words = [*self.gpushare, "-o", "json", "timeslice", "show"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
        try:
            return json.loads(done.stdout)["data"]["processes"]
        except (ValueError, KeyError):
            self.surprise(f"timeslice show: {done.stdout[-300:]} {done.stderr[-300:]}")
            return []

    def end(self) -> list[dict[str, Any]]:
        found = []
        for one in reversed(self.jobs):
            code = one.end()
            self.expect(code == 0, f"{one.kind} ended with {code}: {one.said()[-600:]}")
            found.append({"job": one.kind, "exit_code": code, "said": one.said().splitlines()})
        daemons = [*self.gpushare, "-o", "json", "mps", "status"]
        done = subprocess.run(daemons, capture_output=True, text=True, timeout=30, check=False)
        with contextlib.suppress(ValueError):
            left = json.loads(done.stdout)["data"].get("daemons", [])
            self.expect(not left, f"daemons left: {left}")
        return found


def together(part: Part) -> dict[str, Any]:
    """Measure production next to one and two trainings with the slices that `gpushare run` sets."""
    result: dict[str, Any] = {"uid": os.getuid()}
    try:
        serve = Started(part, "serve", "--production", "web", "--slice", "16ms")
        serve.wait()
        serve.hold(True)
        trains = [Started(part, "train", "--opportunistic", "--for", "web", "--yield", "slices") for _ in range(2)]
        for one in trains:
            one.hold(True)
        for one in trains:
            one.wait()
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and not all("read back" in one.said() for one in part.jobs):
            time.sleep(0.2)
        result["slices"] = part.show()
        alone = result["serve_alone"] = window(serve, [], WINDOW, part.jobs)
        train_alone = result["train_alone"] = window(None, trains[:1], WINDOW, part.jobs)["others"][0]
        for count in (1, 2):
            found = window(serve, trains[:count], WINDOW, part.jobs)
            shares = [rate / train_alone if train_alone else None for rate in found["others"]]
            result[f"next_to_{count}"] = {
                **found,
                "p99_relative": found["p99_ms"] / alone["p99_ms"] if alone["p99_ms"] and found["p99_ms"] else None,
                "rate_relative": found["rate"] / alone["rate"] if alone["rate"] else None,
                "others_relative": shares,
                "others_sum": sum(share or 0 for share in shares),
            }
            print(json.dumps(result[f"next_to_{count}"]), file=sys.stderr, flush=True)
        after = result["slices_after"] = part.show()
        servers = [one for one in after if "mps-server" in str(one.get("name") or one.get("program") or one)]
        part.expect(servers, "no MPS server is shown")
        for one in part.jobs:
            part.expect("read back" in one.said(), f"{one.kind}: no slice was proved: {one.said()[-600:]}")
    finally:
        result["jobs"] = part.end()
    return result


def adapted(part: Part) -> dict[str, Any]:
    """Measure a production job that changes phase, next to a training whose slice follows it."""
    result: dict[str, Any] = {"phase_seconds": PHASE_SECONDS, "keep": 0.97}
    try:
        words = ("--production", "web", "--slice", "16ms", "--metric", METRIC)
        web = Started(part, "phases", *words)
        web.wait()
        train = Started(part, "train", "--opportunistic", "--for", "web", "--keep", "97%", "--name", "other")
        began = web.state[BEGAN] / 1e6
        # It imports and builds its model meanwhile, and then waits.
        train.hold(True)
        seconds = 4.0 if part.pretend else 2 * PHASE_SECONDS
        time.sleep(max(0.0, began + (1.0 if part.pretend else 0.0) + seconds - time.monotonic()))
        train.wait()
        # The training may have been built during the second phase: the median second of each phase is the reference.
        alone = [_phase_rate(web, began, began + seconds, phase) for phase in (0, 1)]
        result["alone"] = alone
        train.hold(False)
        start = time.monotonic()
        last = start + (6.0 if part.pretend else ADAPT_SECONDS)
        slices = []
        while time.monotonic() < last:
            shown = part.show()
            slices.append([round(time.monotonic() - start, 1), [(one["pid"], one["slices_us"]) for one in shown]])
            time.sleep(max(0.0, min(2.0, last - time.monotonic())))
        end = time.monotonic()
        done = web.state.logged(start, end)
        expected, at = 0.0, start
        while at < end:
            step = min(0.05, end - at)
            expected += step * (alone[phase_of(began, at)] or 0.0)
            at += step
        result["kept"] = len(done) / expected if expected else None
        result["by_phase"] = [
            {"from": round(at - start, 1), "phase": phase_of(began, at + 0.1), "rate": count / length}
            for at, length, count in _spans(web, began, start, end)
        ]
        result["train_steps_per_second"] = len(train.state.logged(start, end)) / (end - start)
        result["slices"] = slices
        part.expect(part.pretend or (result["kept"] or 0) >= 0.97, f"kept {result['kept']}")
        # The training cannot end its step in time next to work without gaps.
        web.hold(True)
    finally:
        result["jobs"] = part.end()
    return result


def _phase_rate(web: Started, began: float, until: float, phase: int) -> float | None:
    """Return the median of the steps in each second that lies in one phase."""
    seconds = [second for second in range(int(until - began)) if phase_of(began, began + second + 0.5) == phase]
    counts = sorted(len(web.state.logged(began + one, began + one + 1)) for one in seconds)
    return float(counts[len(counts) // 2]) if counts else None


def _spans(web: Started, began: float, start: float, end: float) -> list[tuple[float, float, int]]:
    """Return start, length and steps of each phase in a window."""
    found, at = [], start
    while at < end - 0.01:
        until = min(end, began + (int((at - began) / PHASE_SECONDS) + 1) * PHASE_SECONDS)
        found.append((at, until - at, len(web.state.logged(at, until))))
        at = until
    return found


def main() -> int:
    """Run a job, or the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the figures there, too")
    parser.add_argument("--parts", default="root,user", help="of root, user and adapt; each takes 40 to 110 s")
    parser.add_argument("--rehearse", action="store_true", help="on a simulated host: tries the script itself")
    for name in ("--job", "--state", "--directory"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--pretend", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    return job(options) if options.job else _everything(options)


def _everything(options: argparse.Namespace) -> int:
    def act(name: str, directory: str, surprises: list[str]) -> dict[str, Any]:
        if name == "user":
            words = ["--parts", "root"]
            found = as_nobody("benchmarks.gpu_roles", words, directory, rehearse=options.rehearse)
            return {**found.get("root", {}), "surprises": found["surprises"]}
        place = f"{directory}/{name}"
        os.makedirs(place)
        part = Part(place, options.rehearse)
        try:
            return (adapted if name == "adapt" else together)(part)
        finally:
            surprises += [f"{name}: {one}" for one in part.surprises]

    return measured(options, act, directory=options.directory)


if __name__ == "__main__":
    sys.exit(main())
