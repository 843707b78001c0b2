"""`gpushare pause` and `resume` on a real GPU: ``python3 -m benchmarks.gpu_pause --json OUT``.

Run it as root on a machine with PyTorch and one NVIDIA GPU that nobody else uses (two for the part of NCCL). It pauses its
own jobs only, and changes no setting of the GPU. A job computes a chain on the GPU whose result is known for each number of
steps, so that lost or doubled work shows. It prints JSON and exits with 1 if anything was unexpected. ``--rehearse`` tries
the script without a GPU, on a simulated host. Takes about two minutes; ``--long 120`` for a pause of two minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu_script import READY, STEPS, UNITS, Gpu, OutOfTime, State, Surprises, as_nobody, measured, xids

SIMULATED = "sim:h200"
LIMIT_SECONDS = 290
# The chain: x becomes x * FACTOR + ADD, modulo 2^64, from START on.
FACTOR, ADD, START = 6364136223846793005, 1442695040888963407, 12345
CHAIN_STEPS = 20
# Of a job's state, behind those of `gpu_script`: its result was wrong; how often SIGTERM was handled; it shall end, as its
# ranks have agreed; the request for that.
WRONG, ASKED, STOP, REQUEST = 8, 9, 10, 11


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


def job(options: argparse.Namespace) -> int:
    state = State(options.state)

    def end(_number: int, _frame: object) -> None:
        state[ASKED] += 1

    signal.signal(signal.SIGTERM, end)
    # PR_SET_PTRACER_ANY: where Yama is in force, only ancestors may trace it otherwise.
    ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)
    kinds = {"chain": _chain, "two": _two_contexts, "serve": _serve, "nccl": _nccl}
    step, check = (_pretended if options.rehearse else kinds[options.job])(state)
    for _ in range(3):
        step()
    state[READY] = 1
    with state.log() as log:
        due = time.monotonic()
        while not state[ASKED] and not state[STOP]:
            if options.job == "serve":
                while time.monotonic() < due:
                    pass
            began = time.monotonic()
            step()
            now = time.monotonic()
            state[STEPS] += 1
            log.write(_pair(now, 1000 * (now - began)))
            due = max(due + 0.025, now)
            if state[STEPS] % 100 == 0 and not check():
                state[WRONG] += 1
    # The end of a step waits for the GPU, as a training's does.
    step()
    if not check():
        state[WRONG] += 1
    return 0


def _pair(at: float, ms: float) -> bytes:
    import struct

    return struct.pack("<dd", at, ms)


def _chain(state: State) -> tuple[Callable[[], None], Callable[[], bool]]:
    """Links of the chain in a million elements, and a large product between them."""
    import torch

    torch.set_num_threads(1)
    device = "cuda"
    x = torch.full((1 << 20,), START, dtype=torch.int64, device=device)
    factor, add = (torch.tensor(one, dtype=torch.int64, device=device) for one in (FACTOR, ADD))
    left, right = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) / 90 for _ in range(2))
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

    state[UNITS] = 1
    return step, check


def _two_contexts(state: State) -> tuple[Callable[[], None], Callable[[], bool]]:
    """The chain, with a second CUDA context in the same process."""
    cuda, context, device = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_int()
    code = cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0)
    code = code or cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device)
    cuda.cuCtxPopCurrent_v2(ctypes.byref(context))
    if code:
        raise SystemExit(f"cuCtxCreate: {code}")
    return _chain(state)


def _serve(_state: State) -> tuple[Callable[[], None], Callable[[], bool]]:
    """A request of about 1 ms, every 25 ms."""
    import torch

    torch.set_num_threads(1)
    left, right = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) / 64 for _ in range(2))
    out = torch.empty_like(left)

    def step() -> None:
        with torch.inference_mode():
            for _ in range(5):
                torch.mm(left, right, out=out)
        torch.cuda.synchronize()

    return step, lambda: True


def _nccl(state: State) -> tuple[Callable[[], None], Callable[[], bool]]:
    """One of two ranks that sum up what both have."""
    import datetime as dt

    import torch
    from torch import distributed

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl", timeout=dt.timedelta(seconds=300))
    x = torch.ones(1 << 24, dtype=torch.float32, device=f"cuda:{rank}")
    wrong = [0]

    def step() -> None:
        x.fill_(rank + 1.0)
        for _ in range(4):
            distributed.all_reduce(x)
            x.div_(2)
        torch.cuda.synchronize()
        wrong[0] += int(float(x[0]) != 1.5)
        # Both ranks end in the same step.
        ended = torch.tensor([float(state[REQUEST])], device=x.device)
        distributed.all_reduce(ended)
        if ended.item():
            state[STOP] = 1

    return step, lambda: not wrong[0]


def _pretended(_state: State) -> tuple[Callable[[], None], Callable[[], bool]]:
    """Wait while the channels of this process are off on the simulated host."""
    from gpushare.sim.state import StateFile

    file = StateFile(SIMULATED)

    def step() -> None:
        while True:
            found = file.read()
            mine = [one for one in found.processes if one.pid == os.getpid()] if found else []
            if not mine or not mine[0].channels_off:
                break
            time.sleep(0.002)
        time.sleep(0.002)

    return step, lambda: True


# -- the script --------------------------------------------------------------------------------------------------------


class Job:
    """A job that was started."""

    def __init__(self, run: Run, kind: str, argv: list[str] | None = None, env: dict[str, str] | None = None) -> None:
        run.count += 1
        self.run, self.kind = run, kind
        path = f"{run.directory}/{os.getuid()}-{run.count}-{kind}"
        self.state = State(path)
        words = [sys.executable, "-m", "benchmarks.gpu_pause", "--job", kind, "--state", path]
        if run.rehearse:
            words.append("--rehearse")
        self.errors = open(path + ".err", "w+b")  # noqa: SIM115 - as long as the job
        self.process = subprocess.Popen([*(argv or []), *words], stderr=self.errors, env={**os.environ, **(env or {})})
        self.pid = self.process.pid
        run.jobs.append(self)
        if run.rehearse and argv is None:
            _on_simulated_gpu(self.pid)

    def wait(self, seconds: float = 90.0) -> None:
        deadline = time.monotonic() + seconds
        while not self.state[READY]:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.kind} is not ready: {self.said()}")
            time.sleep(0.02)

    def said(self) -> str:
        self.errors.seek(0)
        return self.errors.read()[-1500:].decode(errors="replace")

    def progress(self, seconds: float) -> int:
        """Return how many steps it does in some seconds."""
        before = self.state[STEPS]
        time.sleep(seconds)
        return self.state[STEPS] - before

    def end(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            with contextlib.suppress(OSError):
                self.process.send_signal(number)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.run.surprise(f"{self.kind} {self.pid} did not end on signal {number}")
                self.process.kill()
                self.process.wait(10)
        self.run.expect(not self.state[WRONG], f"{self.kind} {self.pid}: {self.state[WRONG]} wrong results")
        return self.process.returncode


def _on_simulated_gpu(pid: int) -> None:
    """Let a real process be on the simulated GPU, as one that `gpushare run` has started."""
    from gpushare.host.identity import identity_of
    from gpushare.sim.current import changing
    from gpushare.sim.state import SimulatedProcess, StateFile

    identity = identity_of(pid)
    assert identity is not None
    with changing(StateFile(SIMULATED)) as (state, _):
        state.processes.append(
            SimulatedProcess(
                pid=pid, real=True, gpu_uuid=state.gpus[0].uuid, name="python3", user="me", uid=os.getuid(),
                started=identity.started, memory_bytes=1 << 30, sm_percent=50,
            )
        )  # fmt: skip


class Run(Surprises):
    """Everything that is measured as one user."""

    def __init__(self, options: argparse.Namespace, directory: str) -> None:
        from gpushare.connect import connect

        super().__init__()
        self.options, self.directory, self.rehearse = options, directory, options.rehearse
        self.count = 0
        self.jobs: list[Job] = []
        self.spec = SIMULATED if self.rehearse else "local"
        self.control = connect(self.spec).open_channels()
        self.seen = xids()

    def check_log(self) -> None:
        """Stop at the first Xid."""
        now = xids()
        if now is not None and self.seen is not None and len(now) > len(self.seen):
            raise OutOfTime(f"Xid: {now[len(self.seen) :][:3]}")

    def verb(self, *words: str, before: str = "") -> tuple[float, dict[str, Any], int]:
        """Run gpushare; return its seconds from start to end, its data, and its exit code."""
        began = time.monotonic()
        argv = [sys.executable, "-m", "gpushare"] if not before else [sys.executable, "-c", before]
        argv += ["--host", self.spec, "-o", "json", *words]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
        took = time.monotonic() - began
        try:
            document = json.loads(done.stdout)
        except ValueError:
            document = {"data": None, "errors": [{"code": "none", "message": done.stderr[-500:]}]}
        if document["errors"]:
            return took, {"errors": document["errors"]}, done.returncode
        return took, document["data"], done.returncode

    def jobs_paused(self) -> list[int]:
        return [one["pid"] for one in self.verb("pause", "list")[1]["jobs"]]

    def end(self) -> None:
        for one in self.jobs:
            if one.process.poll() is None:
                self.verb("resume", str(one.pid))
            one.end()
        self.control.close()


def times(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(1000 * one for one in seconds)
    at = {"median": 0.5, "p99": 0.99, "p99_9": 0.999, "max": 1.0}
    return {name: round(ordered[min(len(ordered) - 1, int(part * len(ordered)))], 3) for name, part in at.items()}


def many_pauses(run: Run, one: Job, count: int) -> dict[str, Any]:
    """Pause a running job very often, for no time at all; its results tell whether anything is lost."""
    channels = run.control.find(one.pid)
    rate = one.progress(1.0)
    off, on, off_driver, on_driver = [], [], [], []
    steps, began = one.state[STEPS], time.monotonic()
    for number in range(count):
        start = time.monotonic()
        off_driver.append(run.control.disable(channels))
        middle = time.monotonic()
        on_driver.append(run.control.enable(channels))
        end = time.monotonic()
        off.append(middle - start)
        on.append(end - middle)
        # Each pause hits another place of the step.
        time.sleep(0.0002 * (number % 7))
        if number % 2000 == 1999:
            run.check_log()
    seconds = time.monotonic() - began
    during = one.state[STEPS] - steps
    after = one.progress(1.0)
    run.expect(during > 0, "nothing was done during the pauses")
    run.expect(after > 0.8 * rate, f"{rate} steps/s before, {after} after {count} pauses")
    run.expect(not one.state[WRONG], f"{one.state[WRONG]} wrong results after {count} pauses")
    return {
        "pauses": count,
        "contexts": len(channels.compute),
        "seconds": round(seconds, 2),
        "off_ms": times(off),
        "off_in_driver_ms": times(off_driver),
        "on_ms": times(on),
        "on_in_driver_ms": times(on_driver),
        "steps_per_second_before": rate,
        "steps_per_second_during": round(during / seconds, 1),
        "steps_per_second_after": after,
        "wrong_results": one.state[WRONG],
    }


def verbs(run: Run, one: Job, rounds: int = 8) -> dict[str, Any]:
    """Measure the verbs from the start of their process to its end, and what a job does meanwhile."""
    pause, resume, driver, still, moved = [], [], [], [], []
    for _ in range(rounds):
        took, data, code = run.verb("pause", str(one.pid))
        run.expect(code == 0, f"pause: {data}")
        pause.append(took)
        driver.append(data.get("driver_seconds", 0.0))
        # What was queued on the CPU's side may still end its step.
        time.sleep(0.02)
        still.append(one.progress(0.1))
        took, data, code = run.verb("resume", str(one.pid))
        run.expect(code == 0, f"resume: {data}")
        resume.append(took)
        moved.append(one.progress(0.15))
    again = run.verb("pause", str(one.pid))[2], run.verb("pause", str(one.pid))[1].get("already_paused")
    run.expect(again == (0, True), f"a second pause: {again}")
    run.verb("resume", "--all")
    run.expect(not any(still), f"steps while it was paused: {still}")
    run.expect(all(moved), f"steps after each resume: {moved}")
    run.expect(run.rehearse or sorted(pause)[rounds // 2] <= 0.5, f"the pause takes {sorted(pause)[rounds // 2]:.2f} s")
    return {
        "pause_seconds": [round(took, 3) for took in sorted(pause)],
        "resume_seconds": [round(took, 3) for took in sorted(resume)],
        "driver_ms": times(driver),
    }


# Dies right after the channels are off, alone or with its guard.
DIES = "import os, sys, gpushare.pause.change as room\nfrom gpushare.cli import main\n"
ALONE = DIES + "room.JobPause._pause_rest = lambda work: os.kill(os.getpid(), 9)\nmain(sys.argv[1:])"
BOTH = (
    DIES
    + "room.JobPause._pause_rest = lambda work: (os.kill(work._guard.pid, 9), os.kill(os.getpid(), 9))\nmain(sys.argv[1:])"
)
# Dies right after the channels are on again.
RESUMING = (
    DIES + "real = room.put_back\nroom.put_back = lambda *a: (real(*a), os.kill(os.getpid(), 9))\nmain(sys.argv[1:])"
)


def deaths(run: Run, one: Job) -> dict[str, Any]:
    """Kill gpushare between off and on: the job runs, or it is on record and `resume` frees it."""
    found: dict[str, Any] = {}
    code = run.verb("pause", str(one.pid), before=ALONE)[2]
    run.expect(code == -9, f"the pause that dies ended with {code}")
    began = time.monotonic()
    while not one.progress(0.05) and time.monotonic() - began < 10:
        pass
    found["freed_by_the_guard_after_seconds"] = round(time.monotonic() - began, 2)
    run.expect(one.progress(0.3), "the guard did not free the job of a pause that died")
    time.sleep(0.5)
    run.expect(run.jobs_paused() == [], "a record stays")
    code = run.verb("pause", str(one.pid), before=BOTH)[2]
    run.expect(code == -9, f"the pause that dies with its guard ended with {code}")
    time.sleep(0.05)
    run.expect(not one.progress(1.0), "it runs although its channels are off")
    run.expect(run.jobs_paused() == [one.pid], "it is not on record")
    _, data, code = run.verb("resume", str(one.pid))
    run.expect(code == 0, f"resume of a job without guard: {data}")
    run.expect(one.progress(0.3), "resume did not free it")
    # The guard of a whole pause is killed.
    _, data, _ = run.verb("pause", str(one.pid))
    os.kill(data["job"]["guard"], signal.SIGKILL)
    time.sleep(0.1)
    found["paused_without_guard_steps"] = one.progress(0.5)
    run.verb("resume", str(one.pid))
    run.expect(one.progress(0.3), "resume did not free a job whose guard was killed")
    # A resume that dies is completed by the guard.
    run.verb("pause", str(one.pid))
    code = run.verb("resume", str(one.pid), before=RESUMING)[2]
    run.expect(code == -9, f"the resume that dies ended with {code}")
    time.sleep(2.5)
    run.expect(one.progress(0.3), "it does not run after a resume that died")
    run.expect(run.jobs_paused() == [], "the guard did not complete the resume")
    return found


def signals(run: Run, one: Job, other: Job) -> dict[str, Any]:
    """SIGTERM to a paused job, whose handler ends its step first; SIGKILL to another."""
    for job_ in (one, other):
        _, data, code = run.verb("pause", str(job_.pid))
        run.expect(code == 0, f"pause: {data}")
    one.process.send_signal(signal.SIGTERM)
    time.sleep(1.5)
    found: dict[str, Any] = {"ends_while_paused": one.process.poll()}
    run.expect(one.process.poll() is None, "SIGTERM ended a paused job")
    run.verb("resume", str(one.pid))
    began = time.monotonic()
    with contextlib.suppress(subprocess.TimeoutExpired):
        one.process.wait(20)
    found["ends_after_resume"] = [one.process.poll(), round(time.monotonic() - began, 2)]
    run.expect(one.process.poll() == 0, f"after resume and SIGTERM: {one.process.poll()}")
    began = time.monotonic()
    other.process.kill()
    other.process.wait(20)
    found["killed_while_paused_seconds"] = round(time.monotonic() - began, 3)
    time.sleep(1.5)
    run.expect(other.pid not in run.jobs_paused(), "the record of a job that was killed stays")
    return found


def opportunistic(run: Run) -> dict[str, Any]:
    """`run --opportunistic --yield pause` next to a job of short requests: how it is paused, and what it costs them."""
    serve = Job(run, "serve")
    serve.wait()
    time.sleep(0.5)
    alone = latencies(serve, 4.0)
    argv = [
        sys.executable,
        "-m",
        "gpushare",
        "--host",
        run.spec,
        "run",
        "-g",
        "0",
        "--opportunistic",
        "--yield",
        "pause",
        "--for",
    ]
    batch = Job(run, "chain", [*argv, str(serve.pid), "--grace", "5s", "--"])
    batch.wait()
    time.sleep(1.0)
    beside = latencies(serve, 4.0)
    steps = batch.progress(0.5)
    began = time.monotonic()
    code = batch.end(signal.SIGTERM)
    ended = round(time.monotonic() - began, 2)
    said = [line for line in batch.said().splitlines() if "paused" in line]
    run.expect(any("GPU channels" in line for line in said), f"another way was used: {said}")
    run.expect(not any("from now on" in line for line in said), f"it fell back: {said}")
    run.expect(run.jobs_paused() == [], "a record stays")
    serve.end()
    relative = beside["p99_ms"] / alone["p99_ms"] if alone["p99_ms"] and beside["p99_ms"] else None
    return {
        "alone": alone,
        "beside": beside,
        "p99_relative": relative,
        "opportunistic_steps_in_half_a_second": steps,
        "exit_code": code,
        "ended_after_seconds": ended,
        "said": said,
    }


def latencies(one: Job, seconds: float) -> dict[str, Any]:
    start = time.monotonic()
    time.sleep(seconds)
    found = sorted(ms for _, ms in one.state.logged(start, time.monotonic()))
    if not found:
        return {"requests": 0, "p50_ms": None, "p99_ms": None}
    return {"requests": len(found), "p50_ms": found[len(found) // 2], "p99_ms": found[int(0.99 * (len(found) - 1))]}


def nccl(run: Run) -> dict[str, Any]:
    """Two ranks on two GPUs, in one job: paused in the middle of their collectives."""
    try:
        import torch

        count = torch.cuda.device_count()
    except ImportError:
        count = 0
    if count < 2:
        return {"skipped": f"{count} GPUs are visible, two are needed"}
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29411", "WORLD_SIZE": "2"}
    first = Job(run, "nccl", env={**env, "RANK": "0"})
    second = Job(run, "nccl", env={**env, "RANK": "1"})
    for one in (first, second):
        one.wait()
    rate = first.progress(1.0)
    found = [run.control.find(one.pid) for one in (first, second)]
    for _ in range(100):
        # One after the other: what the other rank waits for meanwhile must not hurt.
        for channels in found:
            run.control.disable(channels)
        time.sleep(0.01)
        for channels in found:
            run.control.enable(channels)
        time.sleep(0.01)
    run.expect(first.progress(0.5), "nothing is done after 100 pauses of both ranks")
    for one in (first, second):
        run.verb("pause", str(one.pid))
    time.sleep(0.1)
    still = first.progress(8.0)
    for one in (first, second):
        run.verb("resume", str(one.pid))
    after = first.progress(1.0)
    run.expect(still <= 1, f"{still} steps while both ranks were paused")
    run.expect(after > 0.5 * rate, f"{rate} steps/s before, {after} after")
    codes = []
    first.state[REQUEST] = 1
    for one in (first, second):
        with contextlib.suppress(subprocess.TimeoutExpired):
            one.process.wait(20)
        codes.append(one.end())
    run.expect(codes == [0, 0], f"exit codes {codes}")
    return {"steps_per_second_before": rate, "after": after, "steps_while_paused": still, "exit_codes": codes}


def part_of(run: Run, options: argparse.Namespace, count: int, gpu: Gpu) -> dict[str, Any]:
    """Return what one user measures."""
    found: dict[str, Any] = {"uid": os.getuid()}
    one, two, long = Job(run, "chain"), Job(run, "two"), Job(run, "chain")
    for job_ in (one, two, long):
        job_.wait()
    # Paused for long, while the others are measured.
    memory = gpu.used_mib()
    _, data, code = run.verb("pause", str(long.pid), "--timeout", f"{options.long}s")
    run.expect(code == 0, f"the long pause: {data}")
    until = time.monotonic() + options.long
    time.sleep(0.1)
    steps = long.state[STEPS]
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "verbs": lambda: verbs(run, one, 8 if count > 1000 else 4),
        "many": lambda: many_pauses(run, one, count),
        "two_contexts": lambda: many_pauses(run, two, count // 10),
        "deaths": lambda: deaths(run, one),
        "signals": lambda: signals(run, one, two),
    }
    for name, part in parts.items():
        try:
            found[name] = part()
        except Exception as error:  # noqa: BLE001 - the other parts are worth the machine's time
            run.surprise(f"uid {os.getuid()}: {name}: {type(error).__name__}: {error}")
        run.check_log()
    run.expect(run.rehearse or found.get("two_contexts", {}).get("contexts") == 2, "not two contexts")
    if time.monotonic() < until:
        run.expect(long.state[STEPS] == steps, f"{long.state[STEPS] - steps} steps in the long pause")
        time.sleep(until - time.monotonic())
    time.sleep(2.0)
    moved = long.progress(0.5)
    run.expect(moved, "the guard did not resume it at the timeout")
    found["long_pause"] = {"seconds": options.long, "steps_after": moved, "memory_mib": [memory, gpu.used_mib()]}
    found["exit_codes"] = [job_.end() for job_ in (one, long)]
    run.expect(found["exit_codes"] == [0, 0], f"exit codes {found['exit_codes']}")
    return found


def main() -> int:
    """Run a job, a part, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the figures there, too")
    parser.add_argument("--parts", default="root,run,user,nccl")
    parser.add_argument("--count", type=int, default=10_000, help="how often the running job is paused")
    parser.add_argument("--long", type=float, default=20.0, help="seconds of the long pause")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, on a simulated host")
    for name in ("--job", "--state", "--directory"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--as-user", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        return job(options)
    if options.as_user:
        return _user_part(options)
    return _everything(options)


def _user_part(options: argparse.Namespace) -> int:
    run = Run(options, options.directory)
    result: dict[str, Any] = {}
    try:
        result = part_of(run, options, options.count, Gpu(options.rehearse))
    except (Exception, OutOfTime) as error:  # noqa: BLE001
        run.surprise(f"uid {os.getuid()}: {type(error).__name__}: {error}")
    finally:
        run.end()
    Path(options.json).write_text(json.dumps({**result, "surprises": run.surprises}))
    return 0


def _everything(options: argparse.Namespace) -> int:
    def act(part: str, directory: str, surprises: list[str]) -> dict[str, Any]:
        run = Run(options, directory)
        try:
            if part == "run":
                return opportunistic(run)
            if part == "nccl":
                return nccl(run)
            if part == "root":
                return part_of(run, options, options.count, Gpu(options.rehearse))
            words = ["--as-user", "--long", "10", "--count", str(options.count // 10)]
            return as_nobody("benchmarks.gpu_pause", words, directory, rehearse=options.rehearse)
        finally:
            run.end()
            surprises += run.surprises

    return measured(options, act, seconds=LIMIT_SECONDS + max(0.0, options.long - 20))


if __name__ == "__main__":
    sys.exit(main())
