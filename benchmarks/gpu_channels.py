"""Time-slices and pauses of other processes on a real GPU: ``python3 -m benchmarks.gpu_channels --json OUT``.

Run it as root on a machine with PyTorch, CuPy and one NVIDIA GPU that nobody else uses. It checks `gpushare.host.channels`
as root and as uid 65534, and measures a production job next to two trainings, outside MPS and in one MPS daemon. It changes
no setting of the GPU: only the channel groups of its own processes. Its MPS daemon has a private directory. It prints JSON
and exits with 1 if anything was unexpected. ``--rehearse`` tries the script without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import signal
import statistics
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_script import (
    CHILD,
    GRAPH,
    HOLD,
    READY,
    STEPS,
    UNITS,
    WORKER,
    State,
    Surprises,
    as_nobody,
    measured,
    window,
)

ROUNDS_SLICE, ROUNDS_PAUSE, PAUSE_SECONDS = 100, 200, 0.004
REQUEST_MS = 5.6
WINDOW = 7.0
LIMIT_SECONDS = 350


# -- jobs --------------------------------------------------------------------------------------------------------------


def job(options: argparse.Namespace) -> int:  # noqa: C901, PLR0912
    state = State(options.state)
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: ended.append(number))
    # PR_SET_PTRACER_ANY: where Yama is in force, only ancestors may trace it otherwise.
    ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)
    if options.pretend:
        step = lambda: time.sleep(0.003)  # noqa: E731
        state[UNITS] = 1
    else:
        step = {"train": _train, "serve": _serve, "cupy": _cupy}[options.job](state, options)
    for _ in range(5):
        step()
    if options.fork:
        worker = os.fork()
        if worker == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pause()
            os._exit(0)
        state[WORKER] = worker
    second = None
    if options.child:
        argv = [sys.executable, "-m", "benchmarks.gpu_channels", "--job", "cupy", "--state", options.state + ".child"]
        second = subprocess.Popen([*argv, *(["--pretend"] if options.pretend else [])])
        state[CHILD] = second.pid
    state[READY] = 1
    with state.log() as log:
        due = time.monotonic()
        while not ended:
            if state[HOLD]:
                time.sleep(0.005)
                due = time.monotonic()
                continue
            if options.job == "serve":
                while time.monotonic() < due:
                    pass
            began = time.monotonic()
            step()
            now = time.monotonic()
            state[STEPS] += 1
            log.write(struct.pack("<dd", now, 1000 * (now - began)))
            if options.job == "serve":
                # Half load; what is late is not made up for.
                due = max(due + 2 * REQUEST_MS / 1000, now)
    for pid in (state[WORKER], 0 if second is None else second.pid):
        if pid:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGTERM)
                os.waitpid(pid, 0)
    return 0


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


def _cupy(state, _options):
    """Matrix products in two streams, a CUDA graph if it can be captured, and a second CUDA context on request."""
    import cupy

    one, other = (cupy.random.random((2048, 2048), dtype=cupy.float32) for _ in range(2))
    outs = [cupy.empty_like(one) for _ in range(2)]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    cupy.multiply(one, other, out=outs[0])
    cupy.cuda.Device().synchronize()
    graph = None
    try:
        with streams[0]:
            streams[0].begin_capture()
            for _ in range(20):
                cupy.multiply(one, other, out=outs[0])
            graph = streams[0].end_capture()
    except Exception as error:  # noqa: BLE001 - then without
        print(f"no CUDA graph: {error}", file=sys.stderr)
    state[GRAPH] = int(graph is not None)
    if _options.contexts > 1:
        cuda, context, device = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_int()
        code = cuda.cuDeviceGet(ctypes.byref(device), 0)
        code = code or cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device)
        cuda.cuCtxPopCurrent_v2(ctypes.byref(context))
        if code:
            raise SystemExit(f"cuCtxCreate: {code}")

    def step() -> None:
        if graph is not None:
            graph.launch(streams[0])
        for stream, out in zip(streams, outs, strict=True):
            with stream:
                cupy.matmul(one, other, out=out)
        for stream in streams:
            stream.synchronize()

    return step


class OutOfTime(BaseException):
    """The whole script has taken too long; no part goes on after it."""


# -- the script --------------------------------------------------------------------------------------------------------


class Job:
    """A job that was started."""

    def __init__(self, run: Run, kind: str, *words: str, env: dict[str, str] | None = None) -> None:
        run.count += 1
        path = f"{run.directory}/{os.getuid()}-{run.count}-{kind}"
        self.state, self.kind, self.run = State(path), kind, run
        argv = [sys.executable, "-m", "benchmarks.gpu_channels", "--job", kind, "--state", path, *words]
        if run.pretend:
            argv.append("--pretend")
        self.errors = open(path + ".err", "w+b")  # noqa: SIM115
        self.process = subprocess.Popen(argv, stderr=self.errors, env={**os.environ, **(env or {})})
        self.pid = self.process.pid
        self.ended = False
        run.jobs.append(self)

    def wait(self, seconds: float = 90.0) -> None:
        deadline = time.monotonic() + seconds
        while not self.state[READY]:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.errors.seek(0)
                raise RuntimeError(f"{self.kind} is not ready: {self.errors.read()[-1500:].decode(errors='replace')}")
            time.sleep(0.02)

    def hold(self, on: bool) -> None:
        self.state[HOLD] = int(on)

    def end(self) -> int:
        """End it as its user would; return its exit status."""
        if not self.ended:
            self.ended = True
            self.hold(False)
            with contextlib.suppress(OSError):
                self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.run.surprise(f"{self.kind} {self.pid} did not end on SIGTERM")
                self.process.kill()
                self.process.wait(10)
            for at in (WORKER, CHILD):
                if self.state[at]:
                    with contextlib.suppress(OSError):
                        os.kill(self.state[at], signal.SIGKILL)
        return self.process.returncode


class Run(Surprises):
    """Everything that is measured as one user."""

    def __init__(self, directory: str, pretend: bool) -> None:
        from gpushare.host.channels import ChannelControl

        super().__init__()
        self.directory, self.pretend = directory, pretend
        self.count = 0
        self.jobs: list[Job] = []
        self.control = ChannelControl(_pretended() if pretend else None)

    def end(self) -> None:
        for one in self.jobs:
            one.end()
        self.control.close()

    # What is found of a process.
    def found(self, pid: int) -> tuple[Any, dict[str, Any]]:
        began = time.monotonic()
        channels = self.control.find(pid)
        first = time.monotonic() - began
        began = time.monotonic()
        channels = self.control.find(pid)
        again = time.monotonic() - began
        return channels, {
            "seconds_with_helper_start": round(first, 4),
            "seconds": round(again, 4),
            "seconds_in_helper": round(channels.seconds, 4),
            "under_mps": channels.under_mps,
            "groups": [
                {
                    "descriptor": group.descriptor,
                    "client": hex(group.client),
                    "handle": hex(group.handle),
                    "subdevice": hex(group.subdevice),
                    "gpu": group.gpu,
                    "engine": group.engine,
                    "slice_us": group.slice_us,
                    "channels": len(group.channels),
                    "classes": [hex(kind) for kind in group.classes],
                }
                for group in channels.groups
            ],
        }

    def slices(self, job: Job, channels: Any) -> dict[str, Any]:
        """Set, read back and restore, again and again."""
        before = self.control.read_slices(channels)
        wall, driver, reads = [], [], []
        for number in range(ROUNDS_SLICE):
            wanted = 500 + number
            began = time.monotonic()
            driver.append(self.control.set_slice(channels, wanted))
            wall.append(time.monotonic() - began)
            began = time.monotonic()
            read = self.control.read_slices(channels)
            reads.append(time.monotonic() - began)
            self.expect(set(read) == {wanted}, f"{job.kind}: {wanted} us set, {read} read")
            self.control.restore_slices(channels)
        after = self.control.read_slices(channels)
        self.expect(before == after, f"{job.kind}: slices {before} before, {after} after")
        return {
            "default_us": list(before),
            "set_ms": _times(wall),
            "set_in_driver_ms": _times(driver),
            "read_ms": _times(reads),
        }

    def pauses(self, job: Job, channels: Any) -> dict[str, Any]:
        """Pause it 200 times for 4 ms, and once for a second."""
        rate = self._rate(job, 1.0)
        off, driver, on = [], [], []
        steps, began_all = job.state[STEPS], time.monotonic()
        for _ in range(ROUNDS_PAUSE):
            began = time.monotonic()
            driver.append(self.control.disable(channels))
            off.append(time.monotonic() - began)
            time.sleep(PAUSE_SECONDS)
            began = time.monotonic()
            self.control.enable(channels)
            on.append(time.monotonic() - began)
            time.sleep(PAUSE_SECONDS)
        during = (job.state[STEPS] - steps) / (time.monotonic() - began_all)
        self.control.disable(channels)
        time.sleep(0.05)
        steps = job.state[STEPS]
        time.sleep(1.0)
        in_pause = job.state[STEPS] - steps
        self.control.enable(channels)
        after = self._rate(job, 1.5)
        self.expect(job.process.poll() is None, f"{job.kind} ended with {job.process.poll()} while it was paused")
        self.expect(in_pause <= 1, f"{job.kind} did {in_pause} steps in a pause of 1 s")
        self.expect(after > 0.5 * rate, f"{job.kind}: rate {rate:.2f} before, {after:.2f} after the pauses")
        self.expect(during > 0, f"{job.kind} did nothing between the pauses")
        return {
            "rate_before": rate,
            "rate_during_relative": during / rate if rate else None,
            "rate_after_relative": after / rate if rate else None,
            "steps_in_pause_of_1_s": in_pause,
            "disable_ms": _times(off),
            "disable_in_driver_ms": _times(driver),
            "enable_ms": _times(on),
        }

    def _rate(self, job: Job, seconds: float) -> float:
        start = time.monotonic()
        time.sleep(seconds)
        return len(job.state.logged(start, start + seconds)) / seconds

    def objects(self, pid: int) -> list[dict[str, Any]]:
        """Return what RM shows of a process, in case a scan fails: how many objects of each class, with their parents' class."""
        from gpushare.host import channels as room

        if self.pretend:
            return []
        files, found = room.KernelFiles(), []
        newest = room._newest(files)
        with files.process(pid, None) as process:
            for number in process.numbers():
                entry: dict[str, Any] = {"descriptor": number, "inherited": process.inherited(number)}
                with room._duplicated(files, process, number) as file:
                    statuses: dict[str, int] = {}
                    for step, client in enumerate(room._order(newest)):
                        status, kind = file.info(client, client)
                        statuses[hex(status)] = statuses.get(hex(status), 0) + 1
                        if status != room.INVALID_CLIENT:
                            entry[hex(client)] = {"status": status, "class": hex(kind), **_kinds(room, file, client)}
                        if step > 0x8000:
                            break
                    entry["statuses"] = statuses
                found.append(entry)
        return [{"newest": newest}, *found]

    def refusal(self, pid: int) -> str:
        """Return the code of the error that a scan gives."""
        from gpushare.base.errors import GpushareError

        try:
            self.control.find(pid)
        except GpushareError as error:
            return error.code
        return "found"


def _kinds(room: Any, file: Any, client: int) -> dict[str, Any]:
    objects = room._objects(file, client)
    kinds: dict[str, int] = {}
    for handle, kind in objects.items():
        parent = objects.get(file.parent_of(client, handle) or 0, 0)
        name = f"{kind:x} of {parent:x}"
        kinds[name] = kinds.get(name, 0) + 1
    return {"handles": [hex(one) for one in (min(objects, default=0), max(objects, default=0))], "objects": kinds}


def checks(run: Run, root_pid: int | None) -> dict[str, Any]:  # noqa: PLR0915
    """Check two jobs: one with a second process and a forked worker, one with two CUDA contexts."""
    result: dict[str, Any] = {"uid": os.getuid()}
    began = time.monotonic()
    train, other = Job(run, "train", "--fork", "--child"), Job(run, "cupy", "--contexts", "2")
    for one in (train, other):
        one.wait()
    child = train.state[CHILD]
    child_state = State(train.state.path + ".child")
    deadline = time.monotonic() + 60
    while not child_state[READY] and time.monotonic() < deadline:
        time.sleep(0.05)
    result["started_seconds"] = round(time.monotonic() - began, 1)
    result["graph"] = bool(other.state[GRAPH])
    for one in (train, other):
        try:
            channels, found = run.found(one.pid)
            result[one.kind] = found
            run.expect(
                run.pretend or len(channels.compute) == (2 if one is other else 1),
                f"{one.kind}: {len(channels.compute)} compute groups",
            )
            run.expect(not channels.under_mps, f"{one.kind}: under MPS")
            found["slices"] = run.slices(one, channels)
            found["pauses"] = run.pauses(one, channels)
        except Exception as error:  # noqa: BLE001 - the other parts are worth the machine's time
            run.surprise(f"uid {os.getuid()}: {one.kind}: {type(error).__name__}: {error}")
        with contextlib.suppress(Exception):
            result[f"{one.kind}_objects"] = run.objects(one.pid)
    if child:
        try:
            result["child"] = run.found(child)[1]
        except Exception as error:  # noqa: BLE001
            run.surprise(f"uid {os.getuid()}: child: {type(error).__name__}: {error}")
    result["forked_worker"] = run.refusal(train.state[WORKER])
    run.expect(run.pretend or result["forked_worker"] == "inherited_context", f"worker: {result['forked_worker']}")
    sleeper = subprocess.Popen(["sleep", "60"])
    result["no_cuda"] = run.refusal(sleeper.pid)
    sleeper.kill()
    sleeper.wait()
    run.expect(run.pretend or result["no_cuda"] == "no_context", f"without CUDA: {result['no_cuda']}")
    if root_pid is not None:
        result["roots_process"] = run.refusal(root_pid)
        run.expect(run.pretend or result["roots_process"] == "other_user", f"root's: {result['roots_process']}")
    try:
        # SIGKILL ends a paused job.
        channels = run.control.find(other.pid)
        run.control.disable(channels)
        other.process.kill()
        began = time.monotonic()
        other.ended = True
        other.process.wait(15)
        result["killed_while_paused_seconds"] = round(time.monotonic() - began, 3)
        result["after_its_end"] = run.refusal(other.pid)
        run.expect(result["after_its_end"] == "process_gone" or run.pretend, f"ended: {result['after_its_end']}")
    except Exception as error:  # noqa: BLE001
        run.surprise(f"uid {os.getuid()}: killed while paused: {type(error).__name__}: {error}")
    result["exit_codes"] = [one.end() for one in run.jobs if one is not other]
    run.expect(set(result["exit_codes"]) <= {0}, f"exit codes {result['exit_codes']}")
    return result


def _times(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(1000 * one for one in seconds)
    return {
        "median": round(statistics.median(ordered), 3),
        "p99": round(ordered[int(0.99 * (len(ordered) - 1))], 3),
        "max": round(ordered[-1], 3),
    }


# -- production and two others -----------------------------------------------------------------------------------------


class Mps:
    """An MPS daemon in a private directory."""

    def __init__(self, directory: str) -> None:
        self.directory = f"{directory}/mps"
        os.makedirs(self.directory, 0o700, exist_ok=True)
        self.env = {"CUDA_MPS_PIPE_DIRECTORY": f"{self.directory}/p", "CUDA_MPS_LOG_DIRECTORY": f"{self.directory}/l"}
        for path in self.env.values():
            os.makedirs(path, exist_ok=True)
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env={**os.environ, **self.env}, check=True, timeout=20)

    def say(self, text: str) -> str:
        done = subprocess.run(
            ["nvidia-cuda-mps-control"],
            input=text + "\n",
            env={**os.environ, **self.env},
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
        return done.stdout

    def servers(self) -> list[int]:
        return [int(word) for word in re.findall(r"\d+", self.say("get_server_list"))]

    def end(self) -> None:
        with contextlib.suppress(subprocess.SubprocessError, OSError):
            self.say("quit")


def question(run: Run) -> dict[str, Any]:  # noqa: C901, PLR0912, PLR0915
    """Measure production next to two trainings: each with a slice of its own, and both in one MPS daemon with one slice."""
    result: dict[str, Any] = {"window_seconds": WINDOW}
    outside = [Job(run, "train") for _ in range(2)]
    for one in outside:
        one.hold(True)
    for one in outside:
        one.wait()
    # It finds out how long its request is: while nobody else works.
    serve = Job(run, "serve")
    serve.hold(True)
    serve.wait()
    result["request_units"] = serve.state[UNITS]
    alone = window(serve, [], 6.0)
    result["serve_alone"] = alone
    train_alone = window(None, outside[:1], 6.0)["others"][0]
    result["train_alone_steps_per_second"] = train_alone

    def measured(name: str, others: list[Job], seconds: float = WINDOW) -> None:
        found = window(serve, others, seconds)
        shares = [rate / train_alone if train_alone else None for rate in found["others"]]
        result[name] = {
            "p50_ms": found["p50_ms"],
            "p99_ms": found["p99_ms"],
            "p99_relative": found["p99_ms"] / alone["p99_ms"] if alone["p99_ms"] and found["p99_ms"] else None,
            "rate_relative": found["rate"] / alone["rate"] if alone["rate"] else None,
            "others_relative": shares,
            "others_sum": sum(share or 0 for share in shares),
        }
        print(name, json.dumps(result[name]), file=sys.stderr, flush=True)

    measured("one_training_as_it_is", outside[:1])
    measured("two_as_they_are", outside)
    production = run.control.find(serve.pid)
    run.control.set_slice(production, 16000)
    each = [run.control.find(one.pid) for one in outside]
    for us in (500, 1000):
        for channels in each:
            run.control.set_slice(channels, us)
        measured(f"outside_16000_{us}_each", outside)
    for channels in each[:1]:
        run.control.set_slice(channels, 500)
    measured("one_outside_16000_500", outside[:1])
    for one in outside:
        one.end()
    mps = None if run.pretend else Mps(run.directory)
    try:
        env = {} if mps is None else mps.env
        inside = [Job(run, "train", env=env) for _ in range(2)]
        for one in inside:
            one.hold(True)
        for one in inside:
            one.wait()
        servers = [inside[0].pid] if mps is None else mps.servers()
        result["mps_servers"] = len(servers)
        run.expect(len(servers) == 1, f"MPS servers: {servers}")
        measured("mps_as_it_is_production_16000", inside)
        with contextlib.suppress(Exception):
            result["mps_client_objects"] = run.objects(inside[0].pid)
            result["mps_server_objects"] = run.objects(servers[0])
        client_code = run.refusal(inside[0].pid)
        result["mps_client_scan"] = client_code
        if client_code == "found":
            result["mps_client"] = run.found(inside[0].pid)[1]
        channels, result["mps_server"] = run.found(servers[0])
        for us in (500, 200, 1000):
            run.control.set_slice(channels, us)
            run.expect(set(run.control.read_slices(channels)) == {us}, f"the server's slice is not {us}")
            measured(f"mps_16000_{us}", inside)
        run.control.restore_slices(channels)
        run.control.restore_slices(production)
        measured("mps_defaults", inside, 5.0)
        for one in inside:
            run.expect(one.process.poll() is None, "a training in MPS ended")
    finally:
        for one in run.jobs:
            one.end()
        if mps is not None:
            mps.end()
    return result


# -- the machine -------------------------------------------------------------------------------------------------------


def _pretended():
    """Return answers without a driver: a pause is a SIGSTOP."""
    slices: dict[int, int] = {}

    def ask(request: Any, _seconds: float) -> dict[str, Any]:
        pid = request["pid"]
        group = {
            "descriptor": 5,
            "client": 0xC1D00001,
            "handle": 0x5C000010,
            "subdevice": 0x5C000002,
            "gpu": None,
            "engine": "compute",
            "classes": [0xCBC0],
            "channels": [0x5C000011],
            "slice_us": slices.setdefault(pid, 2048),
            "under_mps": False,
        }
        if request["do"] == "find":
            return {"started": 1, "groups": [group], "seconds": 0.1}
        if request["do"] == "read":
            return {"slices": [slices[pid]]}
        if request["do"] == "set":
            slices[pid] = request["microseconds"]
        else:
            os.kill(pid, signal.SIGSTOP if request["do"] == "off" else signal.SIGCONT)
        return {"seconds": 0.001}

    return ask


def main() -> int:
    """Run a job, a part, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the figures there, too")
    parser.add_argument("--parts", default="root,user,mps")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU: tries the script itself")
    for name in ("--job", "--state", "--as-user", "--directory"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--units", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--contexts", type=int, default=1, help=argparse.SUPPRESS)
    for name in ("--fork", "--child", "--pretend"):
        parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        return job(options)
    if options.as_user:
        return _user_part(options)
    return _everything(options)


def _user_part(options: argparse.Namespace) -> int:
    run = Run(options.directory, options.rehearse)
    result: dict[str, Any] = {}
    try:
        result = checks(run, int(options.as_user))
    except Exception as error:  # noqa: BLE001
        run.surprise(f"uid {os.getuid()}: {type(error).__name__}: {error}")
    finally:
        run.end()
    Path(options.json).write_text(json.dumps({**result, "surprises": run.surprises}))
    return 0


def _everything(options: argparse.Namespace) -> int:
    def act(part: str, directory: str, surprises: list[str]) -> dict[str, Any]:
        run = Run(directory, options.rehearse)
        try:
            if part == "root":
                return checks(run, None)
            if part != "user":
                return question(run)
            holder = Job(run, "cupy")
            holder.wait()
            words = ["--as-user", str(holder.pid)]
            return as_nobody("benchmarks.gpu_channels", words, directory, rehearse=options.rehearse)
        finally:
            run.end()
            surprises += run.surprises

    return measured(options, act, seconds=LIMIT_SECONDS, about={"ptrace_scope": _scope()})


def _scope() -> str | None:
    try:
        return Path("/proc/sys/kernel/yama/ptrace_scope").read_text().strip()
    except OSError:
        return None


if __name__ == "__main__":
    sys.exit(main())
