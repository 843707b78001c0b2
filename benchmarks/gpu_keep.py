"""Rules for time-slices on a real GPU: ``python3 -m benchmarks.gpu_keep --json OUT``.

Run it as root on a machine with CuPy and one NVIDIA GPU that nobody else uses. It starts its own programs, lets
``gpushare timeslice keep`` follow rules for them, as root and as uid 65534, and reads from the driver what they got. It
changes no setting of the GPU: only the channel groups of its own processes. It prints JSON and exits with 1 if anything was
unexpected. ``--rehearse`` tries the script on a simulated host.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpushare.base.errors import GpushareError
from gpushare.connect import connect

NOBODY = 65534
ROOT = Path(__file__).parents[1]
# Marks what the worker is; a second context is made on SIGUSR1; steps are counted in a file.
WORKER = """
import signal, sys, time
import cupy
from cupy.cuda import driver, runtime
wanted = []
signal.signal(signal.SIGUSR1, lambda *_: wanted.append(1))
matrix = cupy.ones((4096, 4096), dtype=cupy.float32)
steps = 0
with open(sys.argv[2], "w") as file:
    while True:
        for _ in range(4):
            cupy.matmul(matrix, matrix)
        runtime.deviceSynchronize()
        steps += 1
        if steps % 20 == 0:
            file.seek(0)
            file.write(f"{steps:12d}")
            file.flush()
        if wanted:
            wanted.clear()
            import ctypes
            cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
            current = ctypes.c_void_p()
            cuda.cuCtxGetCurrent(ctypes.byref(current))
            print("second context:", cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0), file=sys.stderr, flush=True)
            cuda.cuCtxSetCurrent(current)
"""
RULES = """\
version: 1
slices:
- match: {user: root, command: "*serve*"}
  role: production
- match: {command: "*boost*"}
  slice: 30ms
- match: {command: "*train*"}
  slice: 500us
"""
WEIGHTS = """\
version: 1
slices:
- match: {user: root, command: "*serve*"}
  weight: 3
- match: {user: root, command: "*train*"}
  weight: 1
"""


class Desk:
    """The programs of one run, and what is read of them."""

    def __init__(self, place: Path, *, rehearse: bool) -> None:
        self.place, self.rehearse = place, rehearse
        self.spec = "sim:h100" if rehearse else "local"
        self.programs: list[subprocess.Popen[bytes]] = []
        self.found: dict[str, Any] = {}
        self.wrong: list[str] = []

    def check(self, name: str, good: bool, value: Any = None) -> None:
        """Note one result."""
        self.found[name] = value if value is not None else good
        if not good:
            self.wrong.append(name)
        print(f"{'ok   ' if good else 'WRONG'} {name}: {value}", file=sys.stderr, flush=True)

    def start(self, name: str, uid: int = 0) -> int:
        """Start a program that computes, and return its PID."""
        if self.rehearse:
            from gpushare.sim import admin

            user = "root" if uid == 0 else "nobody"
            return admin.add_process(self.spec, command_line=["python", name], user=user)
        counter, home = self.place / name, self.home(uid)
        counter.write_text("0")
        os.chown(counter, uid, uid)
        with (home / f"{name}.err").open("wb") as errors:
            done = subprocess.Popen(
                [sys.executable, "-c", WORKER, name, str(counter)],
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env={**os.environ, "HOME": str(home), "CUPY_CACHE_DIR": str(home)},
                cwd=home,
                user=uid,
                group=uid,
                extra_groups=[],
            )
        self.programs.append(done)
        return done.pid

    def home(self, uid: int) -> Path:
        """Return a directory that a user may write."""
        path = self.place / f"home{uid}"
        path.mkdir(exist_ok=True)
        os.chown(path, uid, uid)
        return path

    def steps(self, name: str) -> int:
        """Return how many steps a program has made."""
        with contextlib.suppress(OSError, ValueError):
            return int((self.place / name).read_text())
        return 0

    def slices(self, pid: int) -> list[int]:
        """Return the slices of the contexts of a process, read from the driver; none while it has none."""
        with connect(self.spec).open_channels() as control, contextlib.suppress(GpushareError):
            return [one.slice_us or 0 for one in control.find(pid, probe=False).compute]
        return []

    def until(self, condition: Callable[[], bool], seconds: float) -> float | None:
        """Wait for something; return how long it took, or None."""
        began = time.monotonic()
        while time.monotonic() < began + seconds:
            if condition():
                return round(time.monotonic() - began, 2)
            time.sleep(0.05)
        return None

    @contextlib.contextmanager
    def keep(self, rules: Path, uid: int = 0) -> Iterator[subprocess.Popen[str]]:
        """Run `timeslice keep`."""
        home = self.home(uid)
        # The user may not be allowed to read this checkout.
        code = self.place / "code"
        if not code.exists():
            shutil.copytree(ROOT / "gpushare", code / "gpushare", ignore=shutil.ignore_patterns("__pycache__"))
            for path in (code, *code.rglob("*")):
                path.chmod(0o755)
        env = {**os.environ, "PYTHONPATH": str(code), "GPUSHARE_RUN_DIR": str(home / "run"), "HOME": str(home)}
        if self.rehearse:
            del env["GPUSHARE_RUN_DIR"]
        argv = [
            sys.executable,
            "-m",
            "gpushare",
            "--host",
            self.spec,
            "timeslice",
            "keep",
            "-f",
            str(rules),
            "-o",
            "json",
        ]
        who: dict[str, Any] = {"user": uid, "group": uid, "extra_groups": []} if uid else {}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(argv, env=env, cwd=home, **pipes, **who) as one:
            try:
                yield one
            finally:
                if one.poll() is None:
                    one.terminate()
                self.events = []
                out, err = one.communicate(timeout=90)
                for line in out.splitlines():
                    self.events += (json.loads(line)["data"] or {}).get("events", [])
                print(err, file=sys.stderr)

    def errors(self) -> list[str]:
        """Return the ends of what the programs said."""
        return [f"{path.name}: {path.read_text(errors='replace')[-500:]}" for path in self.place.glob("home*/*.err")]

    def end(self) -> None:
        """End the programs."""
        for one in self.programs:
            one.kill()
            one.wait()
        self.programs.clear()


def rules_file(desk: Desk, name: str, text: str, uid: int = 0) -> Path:
    """Write rules that only one user may change."""
    path = desk.place / name
    path.write_text(text)
    path.chmod(0o644)
    os.chown(path, uid, uid)
    return path


def as_root(desk: Desk) -> None:
    """Set, see later processes and contexts, leave what others change, put back, survive kill -9."""
    rules = rules_file(desk, "rules.yaml", RULES)
    serve, train, boost = desk.start("serve.py"), desk.start("train.py", NOBODY), desk.start("boost.py", NOBODY)
    computes = desk.until(lambda: all(map(desk.slices, (serve, train, boost))), 60)
    desk.check("they compute", computes is not None, computes or desk.errors())
    default = desk.slices(serve)
    desk.check("default", len(set(default)) == 1, default)
    with desk.keep(rules) as keep:
        took = desk.until(lambda: desk.slices(serve) == [16_000] and desk.slices(train) == [500], 20)
        desk.check("set after", took is not None, took)
        desk.check("a command line raises nothing", desk.slices(boost) == default, desk.slices(boost))
        late = desk.start("late-train.py")
        desk.until(lambda: bool(desk.slices(late)), 60)
        took = desk.until(lambda: desk.slices(late) == [500], 20)
        desk.check("a later process, after its context", took is not None, took)
        if not desk.rehearse:
            os.kill(train, signal.SIGUSR1)
            took = desk.until(lambda: desk.slices(train) == [500, 500], 30)
            desk.check("a second context, after", took is not None, took)
        with connect(desk.spec).open_channels() as control:
            control.set_slice(control.find(late), 700)
        time.sleep(17)
        desk.check("left what somebody else has set", desk.slices(late) == [700], desk.slices(late))
        keep.send_signal(signal.SIGKILL)
        keep.wait()
        desk.check("kept after kill -9", desk.slices(serve) == [16_000], desk.slices(serve))
    with desk.keep(rules):
        # It puts back what the killed one left, and sets it again.
        time.sleep(6)
    after = [desk.slices(pid) for pid in (serve, train, boost)]
    desk.check("all put back", all(set(one) == set(default) for one in after), after)
    desk.check("said", [one["kind"] for one in desk.events].count("restored") >= 2, desk.events)
    desk.end()


def as_user(desk: Desk) -> None:
    """A plain user's keep is for own processes only."""
    rules = rules_file(desk, "user.yaml", "version: 1\nslices: [{match: all, slice: 1ms}]\n", NOBODY)
    own, other = desk.start("own.py", NOBODY), desk.start("other.py")
    desk.until(lambda: all(map(desk.slices, (own, other))), 60)
    default = desk.slices(other)
    with desk.keep(rules, NOBODY):
        took = desk.until(lambda: desk.slices(own) == [1000], 20)
        desk.check("as a user: set after", took is not None, took)
        desk.check("as a user: others are left", desk.slices(other) == default, desk.slices(other))
    skipped = [one for one in desk.events if one["kind"] == "skipped"]
    desk.check("as a user: others are named once", [one["pid"] for one in skipped] == [other], skipped)
    desk.check("as a user: put back", desk.slices(own) == default, desk.slices(own))
    desk.end()


def weights(desk: Desk) -> None:
    """Two programs that always compute, 3:1."""
    rules = rules_file(desk, "weights.yaml", WEIGHTS)
    shares: dict[str, float] = {}
    for names in (("serve.py",), ("train.py",), ("serve.py", "train.py")):
        pids = [desk.start(name) for name in names]
        desk.until(lambda pids=pids: all(map(desk.slices, pids)), 60)  # type: ignore[misc]
        with desk.keep(rules):
            desk.until(lambda pids=pids: all(desk.slices(pid) != [2048] or len(pids) == 1 for pid in pids[:1]), 20)  # type: ignore[misc]
            time.sleep(3)
            before, began = {name: desk.steps(name) for name in names}, time.monotonic()
            time.sleep(10)
            seconds = time.monotonic() - began
            for name in names:
                shares[f"{name}{len(names)}"] = (desk.steps(name) - before[name]) / seconds
        desk.end()
    serve, train = shares["serve.py2"] / shares["serve.py1"], shares["train.py2"] / shares["train.py1"]
    desk.check("weights 3:1: what each has of its rate alone", 0.7 <= serve / (serve + train) <= 0.85, [serve, train])


def main() -> int:
    """Run all, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="gk", dir="/tmp"))
    place.chmod(0o755)
    if options.rehearse:
        os.environ["GPUSHARE_SIM_DIR"] = str(place / "sim")
    desk = Desk(place, rehearse=options.rehearse)
    try:
        as_root(desk)
        if not options.rehearse:
            as_user(desk)
            weights(desk)
    finally:
        desk.found["said"] = desk.errors()
        desk.end()
        shutil.rmtree(place, ignore_errors=True)
    text = json.dumps({"found": desk.found, "wrong": desk.wrong}, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(text)
    return 1 if desk.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
