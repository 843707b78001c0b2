"""What the scripts that measure on a GPU share: jobs that log their steps, gpushare as a user calls it, and the parts in turn."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpushare.measure.statistics import percentile

NOBODY = 65534
# On a host with several GPUs, the one to use.
GPU = os.environ.get("BENCHMARK_GPU", "0")
# Of a job's state, each 8 bytes: its steps; it is ready; it shall rest; it shall not begin yet; its result was wrong; it
# shall end. Others are the script's own.
STEPS, READY, HOLD, LATER, WRONG, STOP, OWN = range(7)
RATE_EVERY = 0.25

Step = Callable[[], None]


class OutOfTime(BaseException):
    """The whole script has taken too long, or the GPU has failed; no part goes on after it."""


class State:
    """A file that a job shares with this script, with counters and flags; the times of its steps are in a log next to it."""

    def __init__(self, path: str) -> None:
        self.path = path
        if not os.path.exists(path):
            Path(path).write_bytes(bytes(4096))
        self._file = open(path, "r+b")  # noqa: SIM115 - as long as the process
        self._map = mmap.mmap(self._file.fileno(), 4096)

    def __getitem__(self, at: int) -> int:
        return struct.unpack_from("<Q", self._map, 8 * at)[0]

    def __setitem__(self, at: int, value: int) -> None:
        struct.pack_into("<Q", self._map, 8 * at, value)

    def log(self):
        return open(self.path + ".log", "ab", buffering=0)

    def logged(self, start: float, end: float) -> list[tuple[float, float]]:
        """Return (end of step, its milliseconds) of those that ended in between (CLOCK_MONOTONIC)."""
        raw = Path(self.path + ".log").read_bytes() if os.path.exists(self.path + ".log") else b""
        pairs = struct.iter_unpack("<dd", raw[: len(raw) // 16 * 16])
        return [pair for pair in pairs if start < pair[0] <= end]


# -- jobs, in a process of their own -----------------------------------------------------------------------------------


@dataclass
class Work:
    """What a job does: its step, whether its results are right, and the seconds from a request to the next (0: no gaps)."""

    step: Step
    check: Callable[[], bool] = lambda: True
    every: float = 0.0
    # Whether there is no gap for now.
    full: Callable[[], bool] = lambda: False
    # At its end, in place of ``check``: for what takes too long in between.
    last_check: Callable[[], bool] | None = None


def pretended(_state: State) -> Work:
    """Return the work of a job that touches no GPU."""
    return Work(lambda: time.sleep(0.003))


def next_due(due: float, now: float, every: float, *, full: bool) -> float:
    """Return when the next request comes. What is late is not made up for, and work without gaps owes no rest after it."""
    return now if full else max(due + every, now)


def run_job(options: argparse.Namespace, kinds: Mapping[str, Callable[[State], Work]]) -> int:
    """Do one kind of step until SIGTERM; log the time of each, and print the rate four times a second."""
    state = State(options.state)
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: ended.append(number))
    # PR_SET_PTRACER_ANY: where Yama is in force, only ancestors may trace it otherwise.
    ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)
    if not options.rehearse:
        import torch

        torch.set_num_threads(1)
    while state[LATER] and not ended:
        time.sleep(0.005)
    work = (kinds.get("pretended", pretended) if options.rehearse else kinds[options.job])(state)
    for _ in range(5):
        work.step()
    state[READY] = 1
    due = printed = time.monotonic()
    count = 0
    with state.log() as log:
        while not ended and not state[STOP]:
            if state[HOLD]:
                time.sleep(0.005)
                due = printed = time.monotonic()
                count = 0
                continue
            full = not work.every or work.full()
            while not full and time.monotonic() < due:
                pass
            began = time.monotonic()
            work.step()
            now = time.monotonic()
            count += 1
            state[STEPS] += 1
            log.write(struct.pack("<dd", now, 1000 * (now - began)))
            due = next_due(due, now, work.every, full=full)
            if state[STEPS] % 100 == 0:
                state[WRONG] += not work.check()
            if now - printed >= RATE_EVERY:
                print(f"rate={count / (now - printed):.4f}", flush=True)
                printed, count = now, 0
    # The end of a step waits for the GPU, as a training's does.
    work.step()
    state[WRONG] += not (work.last_check or work.check)()
    return 0


def transformer_training(_state: State) -> Work:
    """A training of a transformer encoder that fills the GPU."""
    import torch

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

    return Work(step)


# -- the script's side -------------------------------------------------------------------------------------------------


@dataclass
class Answer:
    """What gpushare answered: the seconds from its start to its end, its exit code, and its document."""

    seconds: float
    code: int
    data: dict[str, Any]
    errors: list[dict[str, Any]]


class Part:
    """One part: where its files are, how gpushare is called, its programs, and what was unexpected."""

    def __init__(self, directory: str, options: argparse.Namespace, host: str = "sim:h200") -> None:
        self.directory, self.options, self.rehearse = directory, options, options.rehearse
        self.host = host if self.rehearse else "local"
        self.surprises: list[str] = []
        self.jobs: list[Job] = []

    def surprise(self, text: str) -> None:
        print("SURPRISE", text, file=sys.stderr, flush=True)
        self.surprises.append(text)

    def expect(self, condition: object, text: str) -> None:
        if not condition:
            self.surprise(text)

    def gpushare(self, *words: str) -> list[str]:
        """Return the command line of gpushare on this host."""
        return [sys.executable, "-m", "gpushare", "--host", self.host, *words]

    def asked(self, *words: str, program: Sequence[str] = ()) -> Answer:
        """Run gpushare, or a program with its words, and return the answer."""
        argv = self.gpushare("-o", "json", *words)
        began = time.monotonic()
        done = subprocess.run(
            [*program, *argv[3:]] if program else argv, capture_output=True, text=True, timeout=300, check=False
        )
        seconds = round(time.monotonic() - began, 3)
        try:
            document = json.loads(done.stdout)
        except ValueError:
            document = {"data": None, "errors": [{"code": "no json", "message": done.stderr[-500:]}]}
        return Answer(seconds, done.returncode, document["data"] or {}, document["errors"])

    def did(self, *words: str) -> Answer:
        """Run gpushare, which must succeed."""
        answer = self.asked(*words)
        self.expect(answer.code == 0, f"{' '.join(words)}: exit code {answer.code}: {answer.errors}")
        return answer

    def run(self, kind: str, *words: str) -> Job:
        """Start a job by `gpushare run`."""
        return Job(self, kind, self.gpushare("run", "-g", GPU, *words, "--"))

    def window(
        self, serve: Job | None, others: Sequence[Job], seconds: float, *, settle: float = 1.0
    ) -> dict[str, Any]:
        """Let these jobs work together, all others wait; after a time to settle, return what they did."""
        together = [*others, *([] if serve is None else [serve])]
        for job in self.jobs:
            job.state[HOLD] = job not in together
        time.sleep(settle)
        start = time.monotonic()
        time.sleep(seconds)
        end = time.monotonic()
        for job in together:
            job.state[HOLD] = 1
        time.sleep(0.3)
        latencies = [] if serve is None else [ms for _, ms in serve.state.logged(start, end)]
        return {
            "others": [len(job.state.logged(start, end)) / seconds for job in others],
            "rate": len(latencies) / seconds,
            "p50_ms": percentile(latencies, 50) if latencies else None,
            "p99_ms": percentile(latencies, 99) if latencies else None,
        }

    def end(self) -> list[dict[str, Any]]:
        """End the jobs, the last one first; return how each of them ended."""
        ends = []
        while self.jobs:
            job = self.jobs.pop()
            ends.append({"job": job.kind, "exit_code": job.end(), "said": job.said().splitlines()})
        return ends


class Job:
    """A job that was started: alone, or by the words before it."""

    def __init__(self, part: Part, kind: str, before: Sequence[str] = (), *, later: bool = False, **env: str) -> None:
        path = f"{part.directory}/{os.getuid()}-{time.monotonic_ns()}-{kind}"
        self.part, self.kind, self.state = part, kind, State(path)
        self.state[LATER] = later
        # The script that runs has the kinds of its jobs.
        script = Path(sys.argv[0]).stem
        words = [sys.executable, "-m", f"benchmarks.{script}", "--job", kind, "--state", path]
        words += ["--rehearse"] if part.rehearse else []
        self._files = [open(f"{path}.{name}", "w+") for name in ("out", "err")]  # noqa: SIM115 - as long as the job
        out, err = self._files
        self.process = subprocess.Popen(
            [*before, *words], env={**os.environ, **env}, stdin=subprocess.DEVNULL, stdout=out, stderr=err
        )
        self.pid = self.process.pid
        part.jobs.append(self)

    def wait(self, seconds: float = 90.0) -> None:
        """Wait until it is ready.

        Raises:
            RuntimeError: it has ended, or takes too long.
        """
        deadline = time.monotonic() + seconds
        while not self.state[READY]:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.kind} is not ready: {self.said()[-1500:]}")
            time.sleep(0.02)

    def said(self) -> str:
        return Path(self._files[1].name).read_text(errors="replace")

    def printed(self) -> str:
        return Path(self._files[0].name).read_text(errors="replace")

    def progress(self, seconds: float) -> int:
        """Return how many steps it does in some seconds."""
        before = self.state[STEPS]
        time.sleep(seconds)
        return self.state[STEPS] - before

    def end(self) -> int | None:
        """End it, and check that its results were right and that it ended well. None: even SIGKILL does not end it."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.part.surprise(f"{self.kind} {self.pid} did not end on SIGTERM")
                self.process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(10)
        self.part.expect(not self.state[WRONG], f"{self.kind} {self.pid}: {self.state[WRONG]} wrong results")
        code = self.process.returncode
        self.part.expect(code == 0, f"{self.kind} ended with {code}: {self.said()[-600:]}")
        return code


class Gpu:
    """What NVML tells of the GPU; nothing when rehearsing."""

    def __init__(self, pretend: bool) -> None:
        self._nvml: Any = None
        if not pretend:
            import pynvml

            pynvml.nvmlInit()
            self._nvml, self._gpu = pynvml, pynvml.nvmlDeviceGetHandleByIndex(int(GPU))

    def about(self) -> dict[str, Any]:
        if self._nvml is None:
            return {}
        return {
            "gpu": self._nvml.nvmlDeviceGetName(self._gpu),
            "driver": self._nvml.nvmlSystemGetDriverVersion(),
            "uuid": self._nvml.nvmlDeviceGetUUID(self._gpu),
        }

    def used_mib(self) -> int:
        if self._nvml is None:
            return 0
        return self._nvml.nvmlDeviceGetMemoryInfo(self._gpu, version=self._nvml.nvmlMemory_v2).used >> 20

    def processes(self) -> list[int]:
        if self._nvml is None:
            return []
        return [process.pid for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._gpu)]


def xids() -> list[str] | None:
    """Return the Xid lines of the kernel log; None if it may not be read."""
    try:
        done = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return [line for line in done.stdout.splitlines() if "Xid" in line] if done.returncode == 0 else None


def as_nobody(part: Part, parts: str, *words: str, seconds: float = 240) -> dict[str, Any]:
    """Run parts of this script as uid 65534, from a copy that it may read; return the JSON that it writes, or a surprise."""
    place = f"{part.directory}/n"
    home = f"{place}/w"
    os.makedirs(home)
    for name in ("gpushare", "benchmarks"):
        shutil.copytree(name, f"{place}/{name}", ignore=shutil.ignore_patterns("__pycache__"))
    for at, folders, files in os.walk(place):
        for name in (*folders, *files):
            os.chmod(f"{at}/{name}", 0o755)  # noqa: S103
    for path in (os.path.dirname(part.directory), part.directory, place):
        os.chmod(path, 0o755)  # noqa: S103
    os.chown(home, NOBODY, NOBODY)
    argv = [sys.executable, "-m", f"benchmarks.{Path(sys.argv[0]).stem}", "--parts", parts, *words]
    argv += ["--directory", home, "--json", f"{home}/result.json", *(["--rehearse"] if part.rehearse else [])]
    own = {"HOME": home, "PYTHONDONTWRITEBYTECODE": "1", "CUPY_CACHE_DIR": home, "TORCHINDUCTOR_CACHE_DIR": home}
    root = os.getuid() == 0 and not part.rehearse
    user: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if root else {}
    drop = {"XDG_RUNTIME_DIR", "XDG_STATE_HOME"}
    env = {**{name: value for name, value in os.environ.items() if name not in drop}, **own}
    with open(f"{part.directory}/nobody.out", "wb") as out:
        done = subprocess.run(argv, cwd=place, env=env, timeout=seconds, check=False, stdout=out, **user)
    try:
        found = dict(json.loads(Path(f"{home}/result.json").read_text()))
    except (OSError, ValueError) as error:
        part.surprise(f"the part of uid {NOBODY} ended with {done.returncode}: {error}")
        return {}
    part.surprises += found.pop("surprises")
    return found


def directories(place: str) -> dict[str, str]:
    """Return the variables that keep what gpushare writes in one place. Short names: sockets are in there."""
    return {"GPUSHARE_RUN_DIR": f"{place}/r", "GPUSHARE_STATE_DIR": f"{place}/s", "GPUSHARE_SIM_DIR": f"{place}/sim"}


def parser_of(text: str | None, parts: str) -> argparse.ArgumentParser:
    """Return the options that all scripts have; ``parts`` are those that run unless others are asked for."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the figures there, too")
    parser.add_argument("--parts", default=parts, help=f"with commas between (default: {parts})")
    parser.add_argument("--rehearse", action="store_true", help="on a simulated host: tries the script itself")
    for name in ("--job", "--state", "--directory"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    return parser


def measured(
    options: argparse.Namespace,
    parts: Mapping[str, Callable[[Part], dict[str, Any]]],
    *,
    host: str = "sim:h200",
    seconds: float | None = None,
) -> int:
    """Run the parts that were asked for one after the other, each with a directory of its own; print the figures.

    Return 1 if anything was unexpected. ``seconds``: no part goes on after this time.
    """
    began = time.monotonic()

    def late(_number: int, _frame: object) -> None:
        raise OutOfTime(f"not done after {seconds:g} s")

    if seconds is not None:
        signal.signal(signal.SIGALRM, late)
        signal.alarm(int(seconds))
    place = options.directory or tempfile.mkdtemp(prefix="gb", dir="/tmp")
    os.environ.update(directories(place))
    gpu = Gpu(options.rehearse)
    base, before = gpu.used_mib(), xids()
    figures: dict[str, Any] = {
        **gpu.about(),
        "taken": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
        "kernel": os.uname().release,
        "uid": os.getuid(),
        "memory_before_mib": base,
        "processes_before": gpu.processes(),
    }
    surprises: list[str] = []
    try:
        for name in options.parts.split(","):
            started = time.monotonic()
            os.makedirs(f"{place}/{name}")
            part = Part(f"{place}/{name}", options, host)
            figures[name] = {}
            try:
                figures[name] = parts[name](part)
            except Exception as error:  # noqa: BLE001 - the other parts are worth the machine's time
                part.surprise(f"{type(error).__name__}: {error}")
            finally:
                part.end()
                surprises += [f"{name}: {text}" for text in part.surprises]
            time.sleep(1.0)
            left = gpu.used_mib() - base
            figures[name] |= {"memory_left_mib": left, "part_seconds": round(time.monotonic() - started, 1)}
            # Less than before: an earlier program had not been cleaned up yet.
            if left > 16 or gpu.processes():
                surprises.append(f"{name}: {left} MiB left, processes {gpu.processes()}")
            _put(options, figures, surprises)
    except OutOfTime as error:
        surprises.append(str(error))
    finally:
        signal.alarm(0)
        if options.directory is None:
            shutil.rmtree(place, ignore_errors=True)
    after = xids()
    figures["xids"] = None if before is None or after is None else after[len(before) :]
    if figures["xids"]:
        surprises.append(f"Xid: {figures['xids'][:3]}")
    figures["seconds"] = round(time.monotonic() - began, 1)
    print(_put(options, figures, surprises))
    return 1 if surprises else 0


def _put(options: argparse.Namespace, figures: dict[str, Any], surprises: list[str]) -> str:
    text = json.dumps({**figures, "surprises": surprises}, indent=1)
    if options.json:
        Path(options.json).write_text(text + "\n")
    return text
