"""What the scripts that measure on a GPU share: the machine, the state of a job, the parts in turn, and a run as a plain user."""

from __future__ import annotations

import argparse
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
from pathlib import Path
from typing import Any

NOBODY = 65534
# Of a job's state: steps, ready, hold, PID of a worker; each 8 bytes.
STEPS, READY, HOLD, WORKER, UNITS = range(5)


class OutOfTime(BaseException):
    """The whole script has taken too long; no part goes on after it."""


class Surprises:
    """What was unexpected."""

    def __init__(self) -> None:
        self.surprises: list[str] = []

    def surprise(self, text: str) -> None:
        print("SURPRISE", text, file=sys.stderr, flush=True)
        self.surprises.append(text)

    def expect(self, condition: object, text: str) -> None:
        if not condition:
            self.surprise(text)


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


class Gpu:
    """What NVML tells of GPU 0; nothing when rehearsing."""

    def __init__(self, pretend: bool) -> None:
        self._nvml: Any = None
        if not pretend:
            import pynvml

            pynvml.nvmlInit()
            self._nvml, self._gpu = pynvml, pynvml.nvmlDeviceGetHandleByIndex(int(os.environ.get("BENCHMARK_GPU", "0")))

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
        return [one.pid for one in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._gpu)]


def xids() -> list[str] | None:
    """Return the Xid lines of the kernel log; None if it may not be read."""
    try:
        done = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return [line for line in done.stdout.splitlines() if "Xid" in line] if done.returncode == 0 else None


def window(serve: Any, others: Sequence[Any], seconds: float, jobs: Sequence[Any] = ()) -> dict[str, Any]:
    """Let these jobs work together, all others of ``jobs`` wait; after a second to settle, return what they did."""
    together = [*others, *([] if serve is None else [serve])]
    for one in [*together, *jobs]:
        one.hold(one not in together)
    time.sleep(1.0)
    start = time.monotonic()
    time.sleep(seconds)
    end = time.monotonic()
    for one in together:
        one.hold(True)
    time.sleep(0.3)
    rates = [len(one.state.logged(start, end)) / seconds for one in others]
    latencies = sorted(ms for _, ms in serve.state.logged(start, end)) if serve is not None else []
    return {
        "others": rates,
        "rate": len(latencies) / seconds,
        "p50_ms": latencies[len(latencies) // 2] if latencies else None,
        "p99_ms": latencies[int(0.99 * (len(latencies) - 1))] if latencies else None,
    }


def as_nobody(
    module: str, words: Sequence[str], directory: str, *, rehearse: bool, seconds: float = 150
) -> dict[str, Any]:
    """Run a script as uid 65534, from a copy that it may read; return the JSON that it writes, or a surprise."""
    place = f"{directory}/nobody"
    home = f"{place}/w"
    os.makedirs(home)
    for name in ("gpushare", "benchmarks"):
        shutil.copytree(name, f"{place}/{name}", ignore=shutil.ignore_patterns("__pycache__"))
    for at, folders, files in os.walk(place):
        for name in (*folders, *files):
            os.chmod(f"{at}/{name}", 0o755)  # noqa: S103
    for path in (directory, place):
        os.chmod(path, 0o755)  # noqa: S103
    os.chown(home, NOBODY, NOBODY)
    argv = [sys.executable, "-m", module, "--directory", home, "--json", f"{home}/result.json", *words]
    own = {
        "HOME": home,
        "PYTHONDONTWRITEBYTECODE": "1",
        "CUPY_CACHE_DIR": home,
        "TORCHINDUCTOR_CACHE_DIR": home,
        **directories(home),
    }
    root = os.getuid() == 0 and not rehearse
    who: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if root else {}
    drop = {"XDG_RUNTIME_DIR", "XDG_STATE_HOME"}
    env = {**{name: value for name, value in os.environ.items() if name not in drop}, **own}
    argv += ["--rehearse"] if rehearse else []
    with open(f"{directory}/nobody.out", "wb") as out:
        done = subprocess.run(argv, cwd=place, env=env, timeout=seconds, check=False, stdout=out, **who)
    try:
        return dict(json.loads(Path(f"{home}/result.json").read_text()))
    except (OSError, ValueError) as error:
        return {"surprises": [f"the part of uid {NOBODY} ended with {done.returncode}: {error}"]}


def directories(place: str) -> dict[str, str]:
    """Return the variables that keep what gpushare writes in one place. Short names: sockets are in there."""
    return {"GPUSHARE_RUN_DIR": f"{place}/r", "GPUSHARE_STATE_DIR": f"{place}/s", "GPUSHARE_SIM_DIR": f"{place}/sim"}


def measured(
    options: argparse.Namespace,
    act: Callable[[str, str, list[str]], dict[str, Any]],
    *,
    directory: str | None = None,
    seconds: float | None = None,
    about: Mapping[str, Any] | None = None,
) -> int:
    """Run the parts one after the other, each with a place for its files and the list of surprises; print the figures.

    Return 1 if anything was unexpected. ``seconds``: no part goes on after this time.
    """
    began = time.monotonic()

    def late(_number: int, _frame: object) -> None:
        raise OutOfTime(f"not done after {seconds:g} s")

    if seconds is not None:
        signal.signal(signal.SIGALRM, late)
        signal.alarm(int(seconds))
    place = directory or tempfile.mkdtemp(prefix="gb", dir="/tmp")
    os.environ.update(directories(place))
    gpu = Gpu(options.rehearse)
    base, before = gpu.used_mib(), xids()
    figures: dict[str, Any] = {
        **gpu.about(),
        "taken": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
        "kernel": os.uname().release,
        **(about or {}),
        "memory_before_mib": base,
        "processes_before": gpu.processes(),
    }
    surprises: list[str] = []
    try:
        for part in options.parts.split(","):
            started = time.monotonic()
            try:
                figures[part] = act(part, place, surprises)
                surprises += figures[part].pop("surprises", [])
            except Exception as error:  # noqa: BLE001 - the other parts are worth the machine's time
                surprises.append(f"{part}: {type(error).__name__}: {error}")
            time.sleep(1.0)
            left = gpu.used_mib() - base
            figures.setdefault(part, {}).update(
                {"memory_left_mib": left, "part_seconds": round(time.monotonic() - started, 1)}
            )
            # Less than before: an earlier program had not been cleaned up yet.
            if left > 16 or gpu.processes():
                surprises.append(f"{part}: {left} MiB left, processes {gpu.processes()}")
            _put(options, figures, surprises)
    except OutOfTime as error:
        surprises.append(str(error))
    finally:
        signal.alarm(0)
        if directory is None:
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
