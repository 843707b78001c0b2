"""Memory as a ledger, measured on a real GPU: ``python -m benchmarks.memory --json OUT [PART...]``.

Run it as root on a machine with PyTorch and one NVIDIA GPU that nobody else uses. Parts, in this order:

- ``limit``: allocators that fork under ``--memory``; how far and how long they are above, and what a neighbour notices.
- ``queue``: 24 mixed jobs, one after another; all at once; in a fixed number of slots; and with ``run --wait``.
- ``turns``: two jobs that may not be on the GPU together (by their reservations) take turns.
- ``swaps``: a training that goes out and in again many times, its losses compared bit by bit with an undisturbed run.
- ``kill``: gpushare is killed on the way out and on the way in; the job must run or be out, and finish right.
- ``idle``: a program that does nothing leaves the GPU by itself; how long its first call of CUDA takes afterwards.
- ``production``: an opportunistic job leaves when production waits for room, and when production grows.
- ``large``: one pair of 40 GiB each takes turns, once. Needs the host memory for both.

It changes no setting of the GPU. Its MPS daemons and records are in private directories.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
GIB: Final = 1 << 30
PARTS: Final = ("limit", "queue", "turns", "swaps", "kill", "idle", "production", "large")
# GiB, SMs, milliseconds on the GPU and on the CPU per step.
KINDS: Final = ((20, 64, 3, 3), (8, 24, 2, 4), (30, 132, 3, 3), (4, 132, 1, 5), (12, 64, 4, 2))
JOBS: Final = 24
# What a CUDA context takes, at most, besides what the job allocates.
CONTEXT_GIB: Final = 0.8


class Bench:
    """Directories, programs and the clock of one run."""

    def __init__(self, host: str, gpu: int, seconds: float) -> None:
        self.host, self.gpu, self.until = host, gpu, time.monotonic() + seconds
        self.directory = Path(tempfile.mkdtemp(prefix="gm"))
        self.environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
            "GPUSHARE_RUN_DIR": str(self.directory / "run"),
            "GPUSHARE_STATE_DIR": str(self.directory / "state"),
            "CUDA_VISIBLE_DEVICES": str(gpu),
        }
        self.started: list[subprocess.Popen[str]] = []

    @property
    def simulated(self) -> bool:
        return self.host.startswith("sim:")

    def program(self, kind: str, **options: object) -> list[str]:
        """Return the command line of a program."""
        if self.simulated:
            size = float(str(options.get("gib", 1))) + CONTEXT_GIB
            seconds = options.get("seconds", 3)
            return [
                *(sys.executable, "-m", "gpushare.sim.job", "--footprint", f"{int(size * 1024)}M"),
                *("--seconds", str(seconds), "--every", "0.5"),
            ]
        words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        return [sys.executable, "-m", "benchmarks.memory_programs", kind, *words]

    def alone(self, command: list[str]) -> list[str]:
        """Return a command as it is started without gpushare; a simulated host has no programs but those of gpushare."""
        return self.gpushare("run", "--swap", "request", "--", *command) if self.simulated else command

    def gpushare(self, *words: str) -> list[str]:
        where = ["-g", str(self.gpu)] if words[0] == "run" else []
        return [sys.executable, "-m", "gpushare", "--host", self.host, words[0], *where, *words[1:]]

    def start(self, words: Sequence[str], name: str) -> subprocess.Popen[str]:
        """Start a command; its output is in files."""
        out, err = (open(self.directory / f"{name}.{kind}", "w") for kind in ("out", "err"))  # noqa: SIM115
        with out, err:
            process = subprocess.Popen(
                words, stdout=out, stderr=err, text=True, cwd=ROOT, env=self.environment, start_new_session=True
            )
        self.started.append(process)
        return process

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.gpushare(*words),
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=self.environment,
            check=False,
            timeout=300,
        )

    def text(self, name: str, kind: str = "out") -> str:
        return (self.directory / f"{name}.{kind}").read_text()

    def used(self) -> list[tuple[int, int]]:
        """Return PID and bytes of each process on the GPU."""
        from gpushare.connect import connect

        found = connect(self.host).nvml.processes(self.gpu) or ()
        return [(one.pid, one.memory_used_bytes or 0) for one in found]

    def clear(self) -> None:
        """End what is left."""
        for process in self.started:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
        for process in self.started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        self.started.clear()
        self.run("mps", "stop", "-g", str(self.gpu), "-y")


def until(holds: Callable[[], Any], seconds: float = 60.0) -> bool:
    """Wait until something holds; return whether it did."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if holds():
            return True
        time.sleep(0.05)
    return False


def limit(bench: Bench) -> dict[str, Any]:
    """Hold allocators that fork to 8 GiB."""
    neighbour = bench.start(
        bench.gpushare("run", "--", *bench.program("work", gib=2, seconds=12, busy_ms=2, cpu_ms=2)), "neighbour"
    )
    until(lambda: "rate=" in bench.text("neighbour"))
    rows = []
    for way, words in (("MPS", []), ("time-slicing", ["--swap", "request"])):
        name = f"grow-{len(rows)}"
        job = bench.start(
            bench.gpushare(
                *("run", "--memory", "8G", "--grace", "1s", *words, "--"),
                *bench.program("grow", gib=6, processes=3, step_mib=512, every=0.25, seconds=10),
            ),
            name,
        )
        most, over, last = 0, 0.0, time.monotonic()
        while job.poll() is None:
            held = sum(size for pid, size in bench.used() if _is_below(pid, job.pid))
            now = time.monotonic()
            most = max(most, held)
            over += now - last if held > 8 * GIB else 0.0
            last = now
            time.sleep(0.02)
        err = bench.text(name, "err")
        rows.append(
            {
                "way": way,
                "exit_code": job.returncode,
                "most_gib": round(most / GIB, 2),
                "seconds_over": round(over, 2),
                "said": [line for line in err.splitlines() if line.startswith("error")][:1],
            }
        )
    code = neighbour.wait(60)
    bench.clear()
    return {"rows": rows, "neighbour_exit_code": code}


def _is_below(pid: int, ancestor: int) -> bool:
    for _ in range(32):
        if pid == ancestor:
            return True
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            return False
        if pid <= 1:
            return False
    return False


def queue(bench: Bench, seconds: float) -> dict[str, Any]:
    """Run 24 mixed jobs in four ways."""

    def words(number: int) -> tuple[list[str], str]:
        gib, blocks, busy, cpu = KINDS[number % len(KINDS)]
        command = bench.program("work", gib=gib, blocks=blocks, busy_ms=busy, cpu_ms=cpu, seconds=seconds)
        return command, f"{gib + CONTEXT_GIB:g}G"

    def makespan(at_once: int, line: Callable[[int], list[str]], label: str) -> dict[str, Any]:
        began, running, failed, out = time.monotonic(), [], 0, 0
        pending = list(range(JOBS))
        names = {}
        while pending or running:
            while pending and len(running) < at_once:
                number = pending.pop(0)
                process = bench.start(line(number), f"{label}-{number}")
                names[process] = f"{label}-{number}"
                running.append(process)
            for process in [one for one in running if one.poll() is not None]:
                running.remove(process)
                failed += process.returncode != 0
                text = bench.text(names[process], "err") + bench.text(names[process])
                out += "OUT_OF_MEMORY" in text
            time.sleep(0.02)
        return {"seconds": round(time.monotonic() - began, 2), "failed": failed, "out_of_memory": out}

    found = {
        "wait": makespan(
            JOBS,
            lambda number: bench.gpushare("run", "--wait", "--memory", words(number)[1], "--", *words(number)[0]),
            "wait",
        ),
        "all at once, time-slicing": makespan(JOBS, lambda number: bench.alone(words(number)[0]), "once"),
        "2 slots, time-slicing": makespan(2, lambda number: bench.alone(words(number)[0]), "slots"),
        "one after another": makespan(1, lambda number: bench.alone(words(number)[0]), "serial"),
    }
    alone = found["one after another"]["seconds"]
    for one in found.values():
        one["of_serial"] = round(one["seconds"] / alone, 3)
    bench.clear()
    return found


def turns(bench: Bench, *, gib: float, seconds: float, turn: float | None, reserve: str = "80G") -> dict[str, Any]:
    """Two jobs take turns, each with a reservation of most of the GPU."""
    program = bench.program("work", gib=gib, seconds=seconds, busy_ms=4, cpu_ms=0.5, blocks=132)
    began = time.monotonic()
    alone = bench.start(bench.alone(program), "alone")
    alone.wait(300)
    alone_seconds = time.monotonic() - began
    began = time.monotonic()
    jobs = [
        bench.start(
            bench.gpushare(
                "run", "--swap", "turns" if turn is None else f"{turn:g}", "--memory", reserve, "--", *program
            ),
            f"turn-{number}",
        )
        for number in range(2)
    ]
    codes = [job.wait(max(60, bench.until + 60 - time.monotonic())) for job in jobs]
    took = time.monotonic() - began
    said = "".join(bench.text(f"turn-{number}", "err") for number in range(2))
    moves = [(kind, float(one)) for kind, one in re.findall(r"(out of|back on) the GPU: .* in ([0-9.]+) s", said)]
    out = [one for kind, one in moves if kind == "out of"]
    back = [one for kind, one in moves if kind == "back on"]
    switch = (statistics.median(out) if out else 0.0) + (statistics.median(back) if back else 0.0)
    used = turn if turn is not None else 9 * switch
    bench.clear()
    return {
        "gib": gib,
        "turn_seconds": round(used, 1),
        "exit_codes": codes,
        "alone_seconds": round(alone_seconds, 2),
        "seconds": round(took, 2),
        "reached": round(2 * alone_seconds / took, 3),
        "expected": round(1 - switch / (used + switch), 3) if used else None,
        # What the switches themselves took: few of them happen where the jobs are short.
        "without_the_switches": round(2 * alone_seconds / (2 * alone_seconds + sum(out) + sum(back)), 3),
        "out_seconds": out,
        "back_seconds": back,
        "said": said.splitlines()[:12],
    }


def swaps(bench: Bench, count: int, gib: float) -> dict[str, Any]:
    """Swap a training out and in many times; its losses must be those of an undisturbed run."""
    # Long enough for all swaps: it goes on between them.
    steps = 200 + count * 50
    plain = bench.start(bench.alone(bench.program("train", gib=gib, steps=steps, cpu_ms=20, seconds=5)), "plain")
    words = (
        "run",
        "--swap",
        "request",
        "--name",
        "train",
        "--",
        *bench.program("train", gib=gib, steps=steps, cpu_ms=20, seconds=60),
    )
    job = bench.start(bench.gpushare(*words), "swapped")
    until(lambda: len(bench.text("swapped").splitlines()) > 10)
    done, failed, began = 0, [], time.monotonic()
    for _ in range(count):
        if job.poll() is not None or time.monotonic() > bench.until:
            break
        for verb in ("out", "in"):
            answer = bench.run("swap", verb, "train", "-y")
            if answer.returncode:
                failed.append(answer.stderr.strip().splitlines()[:2])
        done += 1
    seconds = time.monotonic() - began
    code = job.wait(300)
    plain.wait(300)
    losses = [
        [line.split()[1] for line in bench.text(name).splitlines() if " " in line] for name in ("plain", "swapped")
    ]
    bench.clear()
    return {
        "swaps": done,
        "gib": gib,
        "seconds_each": round(seconds / max(1, done), 3),
        "failed": failed[:5],
        "exit_code": code,
        "steps": [len(one) for one in losses],
        "identical": losses[0] == losses[1],
    }


def kill(bench: Bench, gib: float) -> dict[str, Any]:
    """Kill gpushare on the way out and on the way in, at several moments."""
    # As long as all the moments together.
    steps = 7000
    plain = bench.start(bench.alone(bench.program("train", gib=gib, steps=steps, cpu_ms=20, seconds=5)), "plain")
    job = bench.start(
        bench.gpushare(
            "run",
            "--swap",
            "request",
            "--name",
            "train",
            "--",
            *bench.program("train", gib=gib, steps=steps, cpu_ms=20, seconds=60),
        ),
        "killed",
    )
    until(lambda: len(bench.text("killed").splitlines()) > 10)
    rows = []
    moments = [("out", 0.4 + 0.2 * number) for number in range(9)] + [("in", 0.4 + 0.2 * number) for number in range(6)]
    for verb, after in moments:
        if job.poll() is not None:
            break
        if verb == "in":
            bench.run("swap", "out", "train", "-y")
        one = bench.start(bench.gpushare("swap", verb, "train", "-y"), f"kill-{len(rows)}")
        time.sleep(after)
        with contextlib.suppress(ProcessLookupError):
            os.kill(one.pid, signal.SIGKILL)
        one.wait(30)
        time.sleep(3)
        listed = bench.run("swap", "list", "-o", "json")
        state = [row["state"] for row in json.loads(listed.stdout)["data"]["jobs"]] if listed.returncode == 0 else ["?"]
        back = bench.run("swap", "in", "train", "-y") if state else None
        rows.append(
            {"verb": verb, "after": round(after, 1), "state": state, "back": None if back is None else back.returncode}
        )
    code = job.wait(300)
    plain.wait(300)
    losses = [
        [line.split()[1] for line in bench.text(name).splitlines() if " " in line] for name in ("plain", "killed")
    ]
    bench.clear()
    return {"rows": rows, "exit_code": code, "identical": losses[0] == losses[1]}


def idle(bench: Bench, gib: float) -> dict[str, Any]:
    """Let a program do nothing for long enough, three times, and measure its first call of CUDA after each."""
    program = bench.program("notebook", gib=gib, cells=3, seconds=15, every=15)
    job = bench.start(bench.gpushare("run", "--swap", "idle=5s", "--", *program), "idle")
    least = None
    while job.poll() is None:
        held = sum(size for pid, size in bench.used() if _is_below(pid, job.pid))
        if "cell=0" in bench.text("idle"):
            least = held if least is None else min(least, held)
        time.sleep(0.1)
    said = bench.text("idle", "err")
    waits = [float(one) for one in re.findall(r"first_call=([0-9.]+)", bench.text("idle"))]
    bench.clear()
    return {
        "gib": gib,
        "exit_code": job.returncode,
        "least_gib_held": round((least or 0) / GIB, 2),
        "first_call_seconds": waits,
        "said": said.splitlines()[:8],
    }


def production(bench: Bench, total_gib: float) -> dict[str, Any]:
    """Start production where an opportunistic job has the memory; then let production grow next to one."""
    gib = total_gib * 0.3
    batch = ("run", "--opportunistic", "--yield", "swap", "--memory", f"{gib + 2:.1f}G", "--")
    # Waits for room: more than the batch job leaves.
    other = bench.start(bench.gpushare(*batch, *bench.program("work", gib=gib, seconds=120, blocks=64)), "batch")
    until(lambda: "rate=" in bench.text("batch"))
    began = time.monotonic()
    size = f"{total_gib * 0.75:.1f}G"
    words = ("run", "--production", "web", "--wait", "--timeout", "120s", "--memory", size, "--")
    first = bench.start(bench.gpushare(*words, *bench.program("work", gib=4, seconds=10)), "waits")
    until(lambda: "rate=" in bench.text("waits"), 120)
    waited = time.monotonic() - began
    code = first.wait(120)
    ended = time.monotonic()
    back = until(lambda: "back on" in bench.text("batch", "err"), 60)
    back_after = time.monotonic() - ended
    said = bench.text("batch", "err").splitlines()
    other.send_signal(signal.SIGINT)
    other.wait(60)
    # Grows: more than is free next to the batch job.
    small = total_gib * 0.1
    batch = ("run", "--opportunistic", "--yield", "swap", "--memory", f"{small + 2:.1f}G", "--")
    other = bench.start(bench.gpushare(*batch, *bench.program("work", gib=small, seconds=200, blocks=64)), "batch-2")
    until(lambda: "rate=" in bench.text("batch-2"))
    most = total_gib - small / 2 - 2
    grows = bench.start(
        bench.gpushare(
            *("run", "--production", "db", "--"),
            *bench.program(
                "grow", gib=most, first_gib=total_gib - small - 9, processes=1, step_mib=64, every=0.2, seconds=30
            ),
        ),
        "grows",
    )
    grown = grows.wait(120)
    said_2 = bench.text("batch-2", "err").splitlines()
    bench.clear()
    return {
        "batch_gib": round(gib, 1),
        "production_started_after_seconds": round(waited, 2),
        "production_exit_code": code,
        "batch_back": back,
        "batch_back_after_seconds": round(back_after, 2),
        "batch_said": said[:6],
        "growing_exit_code": grown,
        "growing_lines": [*bench.text("grows").splitlines()[:1], *bench.text("grows").splitlines()[-1:]],
        "growing_said": said_2[:6],
    }


def main() -> int:
    """Run the parts and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--json", default="-", metavar="FILE", help="where the figures go")
    parser.add_argument("--host", default="local")
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=500.0, help="begin no part after this time")
    parser.add_argument("--swaps", type=int, default=100)
    parser.add_argument("--job-seconds", type=float, default=2.5)
    parser.add_argument("--turns-seconds", type=float, default=160.0)
    parser.add_argument("--large-seconds", type=float, default=160.0)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from gpushare.connect import connect

    bench = Bench(options.host, options.gpu, options.seconds)
    # A time limit from outside must not leave jobs on the GPU.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    host = connect(options.host)
    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "driver": host.nvml.driver_version(),
        "gpu": host.nvml.sweep()[options.gpu].name,
        "uid": os.geteuid(),
    }
    total = (host.nvml.sweep()[options.gpu].memory_total_bytes or 0) / GIB
    # More than half, so that two of them never fit.
    reserve = f"{int(total * 0.58)}G"
    todo = {
        "limit": lambda: limit(bench),
        "queue": lambda: queue(bench, options.job_seconds),
        "turns": lambda: turns(bench, gib=2.0, seconds=options.turns_seconds, turn=10, reserve=reserve),
        "swaps": lambda: swaps(bench, options.swaps, 0.25),
        "kill": lambda: kill(bench, 2.0),
        "idle": lambda: idle(bench, 4.0),
        "production": lambda: production(bench, total),
        "large": lambda: turns(bench, gib=40.0, seconds=options.large_seconds, turn=30.0, reserve=reserve),
    }
    try:
        for name in options.parts or PARTS[:-1]:
            if time.monotonic() > bench.until:
                found[name] = "not run: no time left"
                continue
            began = time.monotonic()
            try:
                found[name] = todo[name]()
            except Exception as error:  # noqa: BLE001 - the other parts are of use
                found[name] = f"{type(error).__name__}: {error}"
                bench.clear()
            sys.stderr.write(f"{name}: {time.monotonic() - began:.1f} s: {json.dumps(found[name])}\n")
            text = json.dumps(found, indent=1)
            if options.json != "-":
                Path(options.json).write_text(text)
        found["left_on_gpu"] = bench.used()
        text = json.dumps(found, indent=1)
        if options.json == "-":
            sys.stdout.write(text + "\n")
        else:
            Path(options.json).write_text(text)
    finally:
        bench.clear()
        if bench.simulated:
            shutil.rmtree(bench.directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
