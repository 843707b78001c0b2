"""How long commands take, as ratios to ``python -c pass``: ``python -m benchmarks.startup [--rounds N] [--json]``.

Each command runs once uncounted, with compiled modules kept as in an installation. Then all run in turn, round
after round, so that a slow moment of the machine hits all of them; the median of each is told. Beside gpushare stand nvidia-smi, gpustat and nvitop where they are installed and run.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gpushare import __version__

# The goals of the project, in units of `python -c pass`.
LIGHT, JSON, TABLE, COMPLETION = 6.0, 9.0, 11.0, 6.0


@dataclass(frozen=True)
class Case:
    """One command to time."""

    name: str
    argv: tuple[str, ...]
    goal: float | None = None
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Timing:
    """What a command took: the median in milliseconds, and its ratio to ``python -c pass``."""

    name: str
    milliseconds: float
    ratio: float
    goal: float | None


def gpushare_program() -> tuple[str, ...]:
    """Return gpushare as it is installed beside this Python, or as a module."""
    beside = Path(sys.executable).with_name("gpushare")
    return (str(beside),) if beside.exists() else (sys.executable, "-m", "gpushare")


def cases() -> list[Case]:
    """Return the commands, the reference first."""
    program = gpushare_program()

    def ours(name: str, words: str, goal: float, *environment: tuple[str, str]) -> Case:
        return Case(name, (*program, *words.split()), goal, environment)

    found = [
        Case("python -c pass", (sys.executable, "-c", "pass")),
        ours("gpushare --version", "--version", LIGHT),
        ours("gpushare --help", "--help", LIGHT),
        ours("gpushare status -o json (1 GPU)", "--host sim:h200 status -o json", JSON),
        ours("gpushare status -o json (8 GPUs)", "--host sim:8xh100 status -o json", JSON),
        ours("gpushare status, table (1 GPU)", "--host sim:h200 status -o table", TABLE),
        ours("gpushare status, table (8 GPUs)", "--host sim:8xh100 status -o table", TABLE),
        ours("gpushare timeslice show -o json", "--host sim:h200 timeslice show -o json", JSON),
    ]
    completion = completion_script()
    if completion is not None:
        line = "gpushare mps start --pri"
        script = f'source "{completion}"; COMP_LINE="{line}"; COMP_POINT={len(line)}; _gpushare'
        found.append(Case("a completion (bash)", ("bash", "--norc", "-c", script), COMPLETION))
    return found + [case for case in peers() if runs(case)]


def completion_script() -> Path | None:
    """Return the bash completion: of this checkout, or installed."""
    places = (
        Path(__file__).resolve().parent.parent / "completions" / "gpushare.bash",
        Path(sys.prefix) / "share/bash-completion/completions/gpushare",
    )
    return next((path for path in places if path.exists()), None)


def peers() -> list[Case]:
    """Return what others offer on a real GPU, and gpushare on the same machine."""
    return [
        Case(
            "gpushare status -o json (this machine)",
            (*gpushare_program(), "--host", "local", "status", "-o", "json"),
            JSON,
        ),
        Case(
            "gpushare status, table (this machine)",
            (*gpushare_program(), "--host", "local", "status", "-o", "table"),
            TABLE,
        ),
        *(
            Case(" ".join(argv), argv)
            for argv in (("nvidia-smi",), ("gpustat",), ("nvitop", "-1"))
            if shutil.which(argv[0])
        ),
    ]


def runs(case: Case) -> bool:
    """Return whether a command works on this machine."""
    return subprocess.run(case.argv, capture_output=True, env=clean_environment(), check=False).returncode == 0


def clean_environment() -> dict[str, str]:
    """Return the environment without what makes Python compile, trace or warn again at every start."""
    spoiling = {
        "PYTHONDONTWRITEBYTECODE",
        "PYTHONDEVMODE",
        "PYTHONPROFILEIMPORTTIME",
        "PYTHONTRACEMALLOC",
        "PYTHONVERBOSE",
    }
    # A host that somebody chose for his shell would be timed in place of ours.
    return {name: value for name, value in os.environ.items() if name not in {*spoiling, "GPUSHARE_HOST"}}


def measure(chosen: Sequence[Case], rounds: int) -> list[Timing]:
    """Run each command once to warm up, then all in turn, and return their medians."""
    taken: dict[str, list[float]] = {case.name: [] for case in chosen}
    with tempfile.TemporaryDirectory(prefix="gsb") as directory:
        base = {**clean_environment(), "GPUSHARE_SIM_DIR": directory, "COLUMNS": "120"}
        for case in chosen:
            timed(case, base)
        for _ in range(rounds):
            for case in chosen:
                taken[case.name].append(timed(case, base))
    medians = {name: statistics.median(times) for name, times in taken.items()}
    reference = medians[chosen[0].name]
    return [Timing(case.name, medians[case.name] * 1000, medians[case.name] / reference, case.goal) for case in chosen]


def timed(case: Case, base: Mapping[str, str]) -> float:
    """Return how many seconds a command took; it must succeed."""
    environment = {**base, **dict(case.environment)}
    started = time.perf_counter()
    done = subprocess.run(case.argv, capture_output=True, env=environment, check=False)
    elapsed = time.perf_counter() - started
    if done.returncode != 0:
        message = f"{case.name} failed ({done.returncode}): {done.stderr.decode(errors='replace').strip()}"
        raise SystemExit(message)
    return elapsed


def machine() -> dict[str, str]:
    """Return what the figures belong to."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {
        "date": dt.datetime.now(tz=dt.timezone.utc).date().isoformat(),
        "machine": f"{model}, {os.cpu_count()} CPUs",
        "python": platform.python_version(),
        "gpushare": __version__,
    }


def table(facts: Mapping[str, str], timings: Sequence[Timing]) -> str:
    """Return the figures as text."""
    width = max(len(timing.name) for timing in timings)
    lines = [f"{facts['date']}, {facts['machine']}, Python {facts['python']}, gpushare {facts['gpushare']}", ""]
    lines.append(f"{'command':<{width}}  {'median':>9}  {'ratio':>6}  {'goal':>5}")
    for timing in timings:
        goal = "" if timing.goal is None else f"{timing.goal:.1f}"
        over = "  over" if timing.goal is not None and timing.ratio > timing.goal else ""
        lines.append(f"{timing.name:<{width}}  {timing.milliseconds:>6.1f} ms  {timing.ratio:>6.1f}  {goal:>5}{over}")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__)
    parser.add_argument("--rounds", type=int, default=11, help="how often each command runs (default: 11)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    facts, timings = machine(), measure(cases(), max(1, arguments.rounds))
    if arguments.json:
        print(json.dumps({**facts, "timings": [asdict(timing) for timing in timings]}, indent=2))
    else:
        print(table(facts, timings))


if __name__ == "__main__":
    main()
