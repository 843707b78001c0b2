"""`gpushare pause` and `resume` on a real GPU: ``python3 -m benchmarks.gpu_pause --json OUT``.

Run it as root on a machine with PyTorch and one NVIDIA GPU that nobody else uses (two for the part ``nccl``). It pauses its
own jobs only, and changes no setting of the GPU. A job computes a chain on the GPU whose result is known for each number of
steps, so that lost or doubled work shows. It prints JSON and exits with 1 if anything was unexpected. ``--rehearse`` tries
the script without a GPU, on a simulated host. Takes about two minutes.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from typing import Any

from benchmarks.gpu_script import (
    OWN,
    STEPS,
    STOP,
    WRONG,
    Job,
    OutOfTime,
    Part,
    State,
    Work,
    as_nobody,
    measured,
    parser_of,
    run_job,
    xids,
)
from gpushare.connect import connect
from gpushare.measure.statistics import percentile

SIMULATED = "sim:h200"
LIMIT_SECONDS = 290
# The chain: x becomes x * FACTOR + ADD, modulo 2^64, from START on.
FACTOR, ADD, START = 6364136223846793005, 1442695040888963407, 12345
CHAIN_STEPS = 20
# Of a rank's state: it is asked to end, which the ranks then agree on.
REQUEST = OWN


# -- jobs --------------------------------------------------------------------------------------------------------------


def chain(steps: int) -> int:
    """Return the result of the chain after some steps, as a signed 64-bit number."""
    power, total = pow(FACTOR, steps, 1 << 64), 0
    # The sum of a geometric series modulo 2^64, where FACTOR - 1 has no inverse: by doubling.
    factor, add, left = FACTOR, ADD, steps
    result_factor, result_add = 1, 0
    while left:
        if left & 1:
            result_factor, result_add = result_factor * factor, result_add * factor + add
        factor, add, left = factor * factor % (1 << 64), (add * factor + add) % (1 << 64), left >> 1
    total = (START * power + result_add) % (1 << 64)
    assert result_factor % (1 << 64) == power
    return total - (1 << 64) if total >= 1 << 63 else total


def _chain(_state: State) -> Work:
    """Links of the chain in a million elements, and a large product between them."""
    import torch

    x = torch.full((1 << 20,), START, dtype=torch.int64, device="cuda")
    factor, add = (torch.tensor(number, dtype=torch.int64, device="cuda") for number in (FACTOR, ADD))
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) / 90 for _ in range(2))
    out = torch.empty_like(left)
    torch.mm(left, right, out=out)
    first = out.clone()
    done = [0]

    def step() -> None:
        for _ in range(CHAIN_STEPS):
            x.mul_(factor).add_(add)
        torch.mm(left, right, out=out)
        torch.cuda.synchronize()
        done[0] += CHAIN_STEPS

    def check() -> bool:
        return bool((x == chain(done[0])).all()) and bool(torch.equal(out, first))

    return Work(step, check)


def _two_contexts(state: State) -> Work:
    """The chain, with a second CUDA context in the same process."""
    cuda, context, device = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_int()
    code = cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0)
    code = code or cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device)
    cuda.cuCtxPopCurrent_v2(ctypes.byref(context))
    if code:
        raise SystemExit(f"cuCtxCreate: {code}")
    return _chain(state)


def _rank(state: State) -> Work:
    """One of two ranks that sum up what both have."""
    import torch
    from torch import distributed

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl")
    x = torch.ones(1 << 24, dtype=torch.float32, device=f"cuda:{rank}")
    wrong = [0]

    def step() -> None:
        x.fill_(rank + 1.0)
        for _ in range(4):
            distributed.all_reduce(x)
            x.div_(2)
        wrong[0] += int(float(x[0]) != 1.5)
        # Both ranks end in the same step.
        ended = torch.tensor([float(state[REQUEST])], device=x.device)
        distributed.all_reduce(ended)
        if ended.item():
            state[STOP] = 1

    return Work(step, lambda: not wrong[0])


def _pretended(_state: State) -> Work:
    """Wait while the channels of this process are off on the simulated host."""
    from gpushare.sim.state import StateFile

    file = StateFile(SIMULATED)

    def step() -> None:
        while (state := file.read()) and (own := state.process(os.getpid())) and own.channels_off:
            time.sleep(0.002)
        time.sleep(0.002)

    return Work(step)


# -- parts -------------------------------------------------------------------------------------------------------------


def started(part: Part, kind: str, **env: str) -> Job:
    """Start a job of this script without gpushare; one that rehearses is on the simulated GPU, too."""
    job = Job(part, kind, **env)
    if part.rehearse:
        _put_on_simulated_gpu(job.pid)
    return job


def _put_on_simulated_gpu(pid: int) -> None:
    from gpushare.host.identity import identity_of
    from gpushare.sim.current import changing
    from gpushare.sim.state import SimulatedProcess, StateFile

    identity = identity_of(pid)
    assert identity is not None
    connect(SIMULATED)
    with changing(StateFile(SIMULATED)) as (state, _):
        state.processes.append(
            SimulatedProcess(
                pid=pid, real=True, gpu_uuid=state.gpus[0].uuid, name="python3", uid=os.getuid(),
                started=identity.started, memory_bytes=1 << 30, sm_percent=50,
            )
        )  # fmt: skip


def times(seconds: list[float]) -> dict[str, float]:
    """Return milliseconds."""
    at = {"median": 50.0, "p99": 99.0, "p99_9": 99.9, "max": 100.0}
    return {name: round(percentile([1000 * value for value in seconds], percent), 3) for name, percent in at.items()}


def many_pauses(part: Part, job: Job, count: int) -> dict[str, Any]:
    """Pause a running job very often, for no time at all; its results tell whether anything is lost."""
    control, log = connect(part.host).open_channels(), xids()
    channels = control.find(job.pid)
    rate = job.progress(1.0)
    off, on, off_driver, on_driver = [], [], [], []
    steps, began = job.state[STEPS], time.monotonic()
    for number in range(count):
        start = time.monotonic()
        off_driver.append(control.disable(channels))
        middle = time.monotonic()
        on_driver.append(control.enable(channels))
        end = time.monotonic()
        off.append(middle - start)
        on.append(end - middle)
        # Each pause hits another place of the step.
        time.sleep(0.0002 * (number % 7))
        if number % 2000 == 1999 and log is not None and (new := (xids() or [])[len(log) :]):
            raise OutOfTime(f"Xid: {new[:3]}")
    seconds = time.monotonic() - began
    control.close()
    during = job.state[STEPS] - steps
    after = job.progress(1.0)
    part.expect(during > 0, "nothing was done during the pauses")
    part.expect(after > 0.8 * rate, f"{rate} steps/s before, {after} after {count} pauses")
    return {
        "pauses": count,
        "contexts": len(channels.groups),
        "seconds": round(seconds, 2),
        "off_ms": times(off),
        "off_in_driver_ms": times(off_driver),
        "on_ms": times(on),
        "on_in_driver_ms": times(on_driver),
        "steps_per_second_before": rate,
        "steps_per_second_during": round(during / seconds, 1),
        "steps_per_second_after": after,
        "wrong_results": job.state[WRONG],
    }


def verbs(part: Part, job: Job, rounds: int) -> dict[str, Any]:
    """Measure the verbs from the start of their process to its end, and what a job does meanwhile."""
    pause, resume, driver, still, moved = [], [], [], [], []
    for _ in range(rounds):
        done = part.did("pause", str(job.pid))
        pause.append(done.seconds)
        driver.append(done.data.get("driver_seconds", 0.0))
        # What was queued on the CPU's side may still end its step.
        time.sleep(0.02)
        still.append(job.progress(0.1))
        resume.append(part.did("resume", str(job.pid)).seconds)
        moved.append(job.progress(0.15))
    part.expect(not any(still), f"steps while it was paused: {still}")
    part.expect(all(moved), f"steps after each resume: {moved}")
    return {"pause_seconds": sorted(pause), "resume_seconds": sorted(resume), "driver_ms": times(driver)}


# Dies right after the channels are off.
DIES = """import os, sys, gpushare.pause.change as room
from gpushare.cli import main
room.JobPause._pause_rest = lambda work: os.kill(os.getpid(), 9)
main(sys.argv[1:])"""


def death(part: Part, job: Job) -> dict[str, Any]:
    """Kill gpushare between off and on: its guard frees the job."""
    code = part.asked("pause", str(job.pid), program=[sys.executable, "-c", DIES]).code
    part.expect(code == -9, f"the pause that dies ended with {code}")
    began = time.monotonic()
    while not job.progress(0.05) and time.monotonic() - began < 10:
        pass
    seconds = round(time.monotonic() - began, 2)
    part.expect(job.progress(0.3), "the guard did not free the job of a pause that died")
    return {"freed_by_the_guard_after_seconds": seconds}


def pauses(part: Part) -> dict[str, Any]:
    """Return what one user measures."""
    count = part.options.count
    one, two = started(part, "chain"), started(part, "two")
    for job in (one, two):
        job.wait()
    figures: dict[str, Any] = {
        "uid": os.getuid(),
        "verbs": verbs(part, one, 8 if count > 1000 else 4),
        "many": many_pauses(part, one, count),
        "two_contexts": many_pauses(part, two, count // 10),
        "deaths": death(part, one),
    }
    part.expect(part.rehearse or figures["two_contexts"]["contexts"] == 2, "not two contexts")
    figures["exit_codes"] = [job["exit_code"] for job in part.end()]
    return figures


def ranks(part: Part) -> dict[str, Any]:
    """Two ranks on two GPUs, paused three times for 2 s in the middle of their collectives."""
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29411", "WORLD_SIZE": "2"}
    both = [started(part, "rank", **env, RANK=str(number)) for number in range(2)]
    for job in both:
        job.wait()
    rate = both[0].progress(1.0)
    still = 0
    for _ in range(3):
        for job in both:
            part.did("pause", str(job.pid))
        time.sleep(0.1)
        still += both[0].progress(2.0)
        for job in both:
            part.did("resume", str(job.pid))
        time.sleep(1.0)
    after = both[0].progress(1.0)
    part.expect(still <= 3, f"{still} steps while both ranks were paused")
    part.expect(after > 0.5 * rate, f"{rate} steps/s before, {after} after")
    both[0].state[REQUEST] = 1
    for job in [] if part.rehearse else both:
        job.process.wait(20)
    codes = [job["exit_code"] for job in part.end()]
    return {"steps_per_second_before": rate, "after": after, "steps_while_paused": still, "exit_codes": codes}


def main() -> int:
    """Run a job, or the parts."""
    parser = parser_of(__doc__, "root,user")
    parser.add_argument("--count", type=int, default=10_000, help="how often the running job is paused")
    options = parser.parse_args()
    if options.job:
        return run_job(options, {"chain": _chain, "two": _two_contexts, "rank": _rank, "pretended": _pretended})

    def user(part: Part) -> dict[str, Any]:
        return as_nobody(part, "root", "--count", str(options.count // 10)).get("root", {})

    return measured(options, {"root": pauses, "user": user, "nccl": ranks}, seconds=LIMIT_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
