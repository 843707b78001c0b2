"""The roles and slices of `gpushare run` on a real GPU: ``python3 -m benchmarks.gpu_roles --json OUT``.

Run it as root on a machine with PyTorch and one NVIDIA GPU that nobody else uses. Parts:

- ``root``, and ``user`` as uid 65534: production (a request of 5.6 ms at half load) outside MPS with a slice of 16 ms, next to
  one and then two trainings in one MPS daemon, all started by `gpushare run`.
- ``adapt``: production that changes between requests at half load and work without gaps every 12 s, next to a training with
  ``--keep 97%``.
- ``cli``: a program with a slice and a name; its slice is shown, set and reset.
- ``weight``: two trainings with weights 3:1.
- ``nobody``: ``cli`` and ``weight`` as uid 65534.

It changes no setting of the GPU. It prints JSON and exits with 1 if anything was unexpected. ``--rehearse`` tries the
script on a simulated host, and measures nothing.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from functools import partial
from typing import Any

from benchmarks.gpu_script import (
    HOLD,
    OWN,
    Job,
    Part,
    State,
    Work,
    as_nobody,
    measured,
    parser_of,
    run_job,
    transformer_training,
)

REQUEST_MS = 5.6
WINDOW, PHASE_SECONDS, ADAPT_SECONDS = 6.0, 12.0, 60.0
# Of a job's state: when the first phase began, in microseconds.
BEGAN = OWN
METRIC = "rate=([0-9.]+)"


# -- jobs --------------------------------------------------------------------------------------------------------------


def _serve(_state: State) -> Work:
    """A request of about 5.6 ms at half load: products of bf16 matrices; how many is measured once."""
    import torch

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
    units = max(1, round(REQUEST_MS / 1000 / statistics.median(took)))
    return Work(lambda: work(units), every=2 * REQUEST_MS / 1000)


def _phases(state: State) -> Work:
    """The same, and work without gaps in every second phase."""
    work = _serve(state)
    state[BEGAN] = int(time.monotonic() * 1e6)
    work.full = lambda: phase_of(state[BEGAN] / 1e6, time.monotonic()) == 1
    return work


def phase_of(began: float, at: float) -> int:
    """Return 0 while requests come at half load, 1 while there is no gap."""
    return int((at - began) / PHASE_SECONDS) % 2


# -- parts -------------------------------------------------------------------------------------------------------------


def together(part: Part) -> dict[str, Any]:
    """Measure production next to one and two trainings with the slices that `gpushare run` sets."""
    result: dict[str, Any] = {"uid": os.getuid()}
    serve = part.run("serve", "--production", "web", "--slice", "16ms")
    serve.wait()
    serve.state[HOLD] = 1
    trains = [part.run("train", "--opportunistic", "--for", "web", "--yield", "slices") for _ in range(2)]
    for job in trains:
        job.state[HOLD] = 1
    for job in trains:
        job.wait()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and not all("read back" in job.said() for job in part.jobs):
        time.sleep(0.2)
    result["slices"] = _shown(part)
    alone = result["serve_alone"] = part.window(serve, [], WINDOW)
    train_alone = result["train_alone"] = part.window(None, trains[:1], WINDOW)["others"][0]
    for count in (1, 2):
        figures = part.window(serve, trains[:count], WINDOW)
        shares = [rate / train_alone if train_alone else None for rate in figures["others"]]
        result[f"next_to_{count}"] = {
            **figures,
            "p99_relative": figures["p99_ms"] / alone["p99_ms"] if alone["p99_ms"] and figures["p99_ms"] else None,
            "rate_relative": figures["rate"] / alone["rate"] if alone["rate"] else None,
            "others_relative": shares,
            "others_sum": sum(share or 0 for share in shares),
        }
    after = result["slices_after"] = _shown(part)
    part.expect(any("mps-server" in str(process["name"]) for process in after), "no MPS server is shown")
    for job in part.jobs:
        part.expect("read back" in job.said(), f"{job.kind}: no slice was proved: {job.said()[-600:]}")
    result["jobs"] = part.end()
    daemons = part.asked("mps", "status").data["mps_daemons"]
    part.expect(not daemons, f"daemons left: {daemons}")
    return result


def _shown(part: Part) -> list[dict[str, Any]]:
    """Return the slices of all processes as the driver reads them."""
    return part.did("timeslice", "show").data.get("processes", [])


def adapted(part: Part) -> dict[str, Any]:
    """Measure a production job that changes phase, next to a training whose slice follows it."""
    result: dict[str, Any] = {"phase_seconds": PHASE_SECONDS, "keep": 0.97}
    web = part.run("phases", "--production", "web", "--slice", "16ms", "--metric", METRIC)
    web.wait()
    train = part.run("train", "--opportunistic", "--for", "web", "--keep", "97%", "--name", "other")
    began = time.monotonic() if part.rehearse else web.state[BEGAN] / 1e6
    # It imports and builds its model meanwhile, and then waits.
    train.state[HOLD] = 1
    seconds = 4.0 if part.rehearse else 2 * PHASE_SECONDS
    time.sleep(max(0.0, began + seconds - time.monotonic()))
    train.wait()
    # The training may have been built during the second phase: the median second of each phase is the reference.
    alone = result["alone"] = [_phase_rate(web, began, began + seconds, phase) for phase in (0, 1)]
    train.state[HOLD] = 0
    start = time.monotonic()
    last = start + (6.0 if part.rehearse else ADAPT_SECONDS)
    slices = result["slices"] = []
    while time.monotonic() < last:
        shown = _shown(part)
        slices.append([round(time.monotonic() - start, 1), [(row["pid"], row["slices_us"]) for row in shown]])
        time.sleep(max(0.0, min(2.0, last - time.monotonic())))
    end = time.monotonic()
    expected, at = 0.0, start
    rows = result["by_phase"] = []
    while at < end - 0.01:
        phase = phase_of(began, at + 0.1)
        until = min(end, began + (int((at - began) / PHASE_SECONDS) + 1) * PHASE_SECONDS)
        expected += (until - at) * (alone[phase] or 0.0)
        rate = len(web.state.logged(at, until)) / (until - at)
        rows.append({"from": round(at - start, 1), "phase": phase, "rate": rate})
        at = until
    result["kept"] = len(web.state.logged(start, end)) / expected if expected else None
    result["train_steps_per_second"] = len(train.state.logged(start, end)) / (end - start)
    part.expect(part.rehearse or (result["kept"] or 0) >= 0.97, f"kept {result['kept']}")
    # The training cannot end its step in time next to work without gaps.
    web.state[HOLD] = 1
    result["jobs"] = part.end()
    return result


def _phase_rate(web: Job, began: float, until: float, phase: int) -> float | None:
    """Return the median of the steps in each second that lies in one phase."""
    seconds = [second for second in range(int(until - began)) if phase_of(began, began + second + 0.5) == phase]
    counts = [len(web.state.logged(began + second, began + second + 1)) for second in seconds]
    return float(statistics.median_high(counts)) if counts else None


def command_line(part: Part) -> dict[str, Any]:
    """Run a program with a slice and a name; show, set and reset its slice."""
    result: dict[str, Any] = {"uid": os.getuid()}

    def row() -> dict[str, Any]:
        shown = part.did("timeslice", "show")
        result["show_seconds"] = shown.seconds
        return next((process for process in shown.data.get("processes", []) if process["job"] == "web"), {})

    program = part.run("train", "--slice", "700us", "--name", "web")
    program.wait()
    time.sleep(3)
    result["run"] = row()
    part.expect(result["run"].get("slice_us") == 700, f"run --slice: {result['run']}")
    for text, wanted in (("500us", 500), ("16ms", 16000)):
        done, shown = part.did("timeslice", "set", text, "web"), row()
        result[f"set {text}"] = {"seconds": done.seconds, **{key: shown.get(key) for key in ("slice_us", "set_us")}}
        part.expect(shown.get("slice_us") == wanted, f"set {text}: {shown}")
    gpus = part.did("status").data.get("gpus", [])
    result["status"] = [
        {key: process.get(key) for key in ("pid", "job", "slice_us")}
        for gpu in gpus
        for process in gpu["processes"] or ()
    ]
    done, shown = part.did("timeslice", "reset", "web"), row()
    result["reset"] = {"seconds": done.seconds, "slice_us": shown.get("slice_us")}
    part.expect(shown.get("set_us") is None, f"reset: {shown}")
    result["jobs"] = part.end()
    return result


def by_weight(part: Part) -> dict[str, Any]:
    """Measure two trainings that `gpushare run --weight` starts."""
    both = [part.run("train", "--weight", weight) for weight in ("3", "1")]
    for job in both:
        job.wait()
    rates = part.window(None, both, 1.0 if part.rehearse else WINDOW, settle=3.5)["others"]
    total = sum(rates)
    split = [round(100 * rate / total, 1) for rate in rates] if total else None
    part.expect(part.rehearse or (split is not None and 72 <= split[0] <= 78), f"weights 3:1: {split}")
    return {"rates": rates, "split_percent": split, "jobs": part.end()}


def main() -> int:
    """Run a job, or the parts."""
    options = parser_of(__doc__, "root,user").parse_args()
    if options.job:
        return run_job(options, {"train": transformer_training, "serve": _serve, "phases": _phases})
    parts = {
        "root": together,
        "user": lambda part: as_nobody(part, "root").get("root", {}),
        "adapt": adapted,
        "cli": command_line,
        "weight": by_weight,
        "nobody": partial(as_nobody, parts="cli,weight"),
    }
    return measured(options, parts)


if __name__ == "__main__":
    sys.exit(main())
