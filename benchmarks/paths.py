"""How much code a verb uses: files, calls from room to room, classes that only carry values.

Run from a checkout: ``python -m benchmarks.paths``. Each verb runs in this process on a simulated host, under a profile
hook. The simulation itself (`gpushare/sim`) is not counted; the output (`gpushare/show`), the command line and the
vocabulary (`gpushare/base`) are rooms like all others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final

import gpushare
from gpushare.base.values import dataclass
from gpushare.cli import main

PACKAGE: Final = Path(gpushare.__file__).resolve().parent


@dataclass
class _Sample:
    """A class of `gpushare.base.values`, whose __init__ all of them share."""


_INITS: Final = {_Sample.__init__.__code__}
# The most pairs of rooms of which one imports from the other.
MOST_ARROWS: Final = 149
# The most files that a verb may use (CONTRIBUTING.md, "How much code a verb uses").
GOALS: Final = {
    "status": None,
    "mps start": 25,
    "run": 33,
    "farm": 45,
    "mig apply": 40,
    "advise": 35,
    "tune": 40,
}
_JOB: Final = f"{sys.executable} -S -m gpushare.sim.job --rate 100 --every 0.02"


@dataclasses.dataclass
class Trace:
    """What a verb ran through."""

    files: set[str] = dataclasses.field(default_factory=set)
    crossings: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)
    values: set[type] = dataclasses.field(default_factory=set)

    @property
    def shapes(self) -> list[str]:
        """Return the classes that describe a MIG instance: a profile and where it is."""
        places = {"start", "placement", "placements"}
        return sorted(
            f"{one.__module__.removeprefix('gpushare.')}.{one.__name__}"
            for one in self.values
            if {"profile"} <= (names := {field.name for field in dataclasses.fields(one)}) and names & places
        )


def room_of(file: str) -> str:
    """Return the room of a file of the package: its folder."""
    return file.split("/", 1)[0].removesuffix(".py")


def _counted(path: str) -> str | None:
    """Return the file below the package; None: not ours, of the simulation, or the machinery of dataclasses."""
    if not path.startswith(str(PACKAGE)):
        return None
    name = path[len(str(PACKAGE)) + 1 :]
    return None if name.startswith("sim/") or name in {"gpu_models.py", "base/values.py"} else name


@contextlib.contextmanager
def tracing() -> Iterator[Trace]:
    """Trace all threads of this process."""
    found = Trace()
    depth = threading.local()

    def hook(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        # What the simulation calls, and what an import executes, is not the way of the verb.
        aside = code.co_name == "<module>" or f"{PACKAGE}/sim/" in code.co_filename
        if aside and event in {"call", "return"}:
            depth.aside = getattr(depth, "aside", 0) + (1 if event == "call" else -1)
        if event != "call" or getattr(depth, "aside", 0) > 0:
            return
        here = _counted(code.co_filename)
        if here is None:
            # The __init__ of a dataclass is in no file, or in `gpushare.base.values` for all classes of that kind.
            if code in _INITS or (code.co_name == "__init__" and code.co_filename == "<string>"):
                one = type(frame.f_locals.get("self"))
                if one.__module__.startswith("gpushare.") and ".sim." not in one.__module__:
                    found.values.add(one)
            return
        found.files.add(here)
        caller = frame.f_back
        there = None if caller is None else _counted(caller.f_code.co_filename)
        if there is not None and room_of(there) != room_of(here):
            found.crossings[room_of(there), room_of(here)] += 1

    threading.setprofile(hook)
    sys.setprofile(hook)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def gpushare_says(*words: str) -> None:
    """Run a command line and show nothing of it.

    Raises:
        RuntimeError: it failed; the figure would be that of an error.
    """
    said = io.StringIO()
    # What a program of ours prints goes past Python's streams.
    own, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 1)
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = main(list(words))
    finally:
        os.dup2(own, 1)
        os.close(own)
        os.close(null)
    if code:
        raise RuntimeError(f"gpushare {' '.join(words)} exits {code}:\n{said.getvalue()}")


def verbs() -> Iterator[tuple[str, Callable[[], None], tuple[str, ...]]]:
    """Yield each verb, what prepares its host, and its command line."""

    def nothing() -> None:
        """The host is fresh."""

    def cut() -> None:
        gpushare_says("--host", "sim:a100", "mig", "enable", "-g", "0", "-y")
        gpushare_says("--host", "sim:a100", "mig", "create", "3g", "-g", "0", "-y")

    h200 = ("--host", "sim:h200")
    yield "status", nothing, (*h200, "status")
    yield "mps start", nothing, (*h200, "mps", "start", "-g", "0", "--threads", "30", "--memory", "8G")
    yield "run", nothing, (*h200, "run", "--threads", "30", "--", *_JOB.split(), "--seconds", "0.5")
    yield "farm", nothing, (*h200, "farm", "--copies", "2", "-q", "--", *_JOB.split(), "--seconds", "0.5")
    yield "mig apply", cut, ("--host", "sim:a100", "mig", "apply", "-g", "0", "3g", "2g", "1g", "-y")
    yield "advise", nothing, (*h200, "advise", "--processes", "4", "--memory", "8G", "--no-saturating")
    jobs = ("--production", _JOB, "--opportunistic", _JOB)
    yield (
        "tune",
        nothing,
        (*h200, "tune", *jobs, "--caps", "60", "--window", "0.3s", "--keep", "10%"),
    )


def measured() -> list[dict[str, Any]]:
    """Return a row per verb."""
    rows = []
    for name, prepare, words in verbs():
        with tempfile.TemporaryDirectory(prefix="gs", dir="/tmp") as directory:
            os.environ["GPUSHARE_SIM_DIR"] = directory
            prepare()
            with tracing() as found:
                gpushare_says(*words)
            gpushare_says("--host", words[1], "sim", "reset", words[1], "-y")
        rows.append(
            {
                "verb": name,
                "files": len(found.files),
                "files_goal": GOALS[name],
                "crossings": sum(found.crossings.values()),
                "value_classes": len(found.values),
                "shapes_of_an_instance": found.shapes,
                "files_by_name": sorted(found.files),
            }
        )
    return rows


def arrows() -> set[tuple[str, str]]:
    """Return which room imports from which, in functions and for types too."""
    import grimp

    graph = grimp.build_graph("gpushare")
    pairs = ((module, other) for module in graph.modules for other in graph.find_modules_directly_imported_by(module))
    rooms = ((module.split(".")[1], other.split(".")[1]) for module, other in pairs if "." in module and "." in other)
    return {(room, other) for room, other in rooms if room != other}


def size() -> dict[str, int]:
    """Return how large the package is."""
    files = sorted(PACKAGE.rglob("*.py"))
    lines = sorted(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    return {
        "files": len(files),
        "lines": sum(lines),
        "median_lines": lines[len(lines) // 2],
        "arrows": len(arrows()),
    }


def run() -> None:
    """Print the figures; with ``--json`` as one document, with ``-v`` the files too."""
    rows = measured()
    if "--json" in sys.argv:
        print(json.dumps({"size": size(), "verbs": rows}, indent=2))
        return
    whole = size()
    print(f"gpushare/: {whole['lines']} lines in {whole['files']} files, median {whole['median_lines']}")
    print(f"rooms that import from another room: {whole['arrows']} pairs (goal: at most {MOST_ARROWS})")
    print(f"{'verb':<10} {'files':>6} {'goal':>5} {'crossings':>10} {'value classes':>14}  shapes of a MIG instance")
    for row in rows:
        goal = row["files_goal"] or "-"
        shapes = ", ".join(row["shapes_of_an_instance"]) or "-"
        print(
            f"{row['verb']:<10} {row['files']:>6} {goal:>5} {row['crossings']:>10} {row['value_classes']:>14}  {shapes}"
        )
        if "-v" in sys.argv:
            print("".join(f"    {name}\n" for name in row["files_by_name"]), end="")


if __name__ == "__main__":
    run()
