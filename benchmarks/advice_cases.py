"""How good the advice is on cases that its rules were not written from: ``python -m benchmarks.advice_cases [--json]``.

Each case of tests/advice/held_out.yaml, or of --file, runs on its simulated host through the real command line. An
answer is acceptable if the way is one of the case's and the answer has the case's words; it is harmful if the way, or a
printed command, would hurt this user. The head of that file says what each key means.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from gpushare.base.model import ComputeMode
from gpushare.cli import main as gpushare
from gpushare.connect import connect
from gpushare.sim.state import StateFile, parse_spec

CASES = Path(__file__).parents[1] / "tests" / "advice" / "held_out.yaml"
# Per cent of the cases.
GOALS = {"acceptable": (95.0, 100.0), "harmful": (0.0, 0.0), "preferred": (88.0, 100.0)}
NEEDS_ROOT = r"mig (create|destroy|apply|enable|disable|grant|revoke)|timeslice set (default|short|medium|long)|--exclusive|sudo|nvidia-smi.* -c"
CHANGES_MIG = r"gpushare mig (apply|create|destroy|disable|enable)\b.*"


@dataclass(frozen=True)
class Answer:
    """The data of an answer, what was said on stderr, and whether its commands destroy instances."""

    data: dict[str, Any]
    err: str
    destroys: bool

    @property
    def way(self) -> str:
        return self.data["winner"] or "none"

    @property
    def said(self) -> str:
        """What the answer says itself: not the other ways, nor what it would be if something were different."""
        own = [value for key, value in self.data.items() if key not in {"verdicts", "changes", "case"}]
        return " | ".join([*_texts(own), self.err])


@dataclass(frozen=True)
class Judged:
    """One case: what was answered, and what is wrong with it."""

    name: str
    way: str
    acceptable: bool
    preferred: bool
    harms: tuple[str, ...]
    missing: tuple[str, ...]
    expected: tuple[str, ...]
    why: str
    commands: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return self.acceptable and self.preferred and not self.harms


def load(path: Path = CASES) -> list[dict[str, Any]]:
    """Return the cases."""
    import yaml

    cases: list[dict[str, Any]] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return cases


@contextlib.contextmanager
def _own_hosts() -> Iterator[Path]:
    """Give one case simulated hosts of its own, and an environment without a trace of the user's."""
    memory = "/dev/shm"  # noqa: S108 - short, because paths of MPS pipes lie in it
    directory = Path(tempfile.mkdtemp(prefix="gh", dir=memory if os.access(memory, os.W_OK) else None))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GPUSHARE_", "CUDA_"))}
    try:
        with mock.patch.dict(os.environ, {**kept, "GPUSHARE_SIM_DIR": str(directory)}, clear=True):
            yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _run(words: Sequence[str]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = gpushare(words)
    return code, out.getvalue(), err.getvalue()


def _instances(host: str) -> list[str]:
    state = StateFile(parse_spec(host).text).read()
    return [one.uuid for gpu in state.gpus for one in gpu.mig] if state else []


def _fill_in(text: str, host: str) -> list[str]:
    return shlex.split(re.sub(r"\{mig(?::(\d+))?\}", lambda found: _instances(host)[int(found[1] or 0)], text))


def _prepare(host: str, lines: Sequence[str]) -> None:
    """Arrange the host.

    Raises:
        RuntimeError: a line of the case does not work.
    """
    connected = connect(host)
    for line in lines:
        words = _fill_in(line, host)
        code, said = 0, ""
        if words == ["exclusive"]:
            connected.nvml.set_compute_mode(0, ComputeMode.EXCLUSIVE_PROCESS)
        elif words[0] == "nvidia-cuda-mps-control":
            done = connected.programs.run(words)
            code, said = done.exit_code, done.stdout + done.stderr
        else:
            code, *both = _run(["--host", host, *words])
            said = "".join(both)
        if code:
            raise RuntimeError(f"{line}: {said}")


def _commands(data: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(one["command"] for one in data["commands"] if one["command"])


def _destroys(host: str, command: str) -> bool:
    """Say whether a printed command would destroy an instance, or is refused because somebody uses what it wants."""
    found = re.search(CHANGES_MIG, command)
    if not found:
        return False
    words = shlex.split(found[0])[1:]
    _, out, _ = _run(["--host", host, "-o", "json", *words, "--dry-run"])
    document = json.loads(out)
    if document["data"] is None:
        return True
    return any("-dgi" in (step["command"] or "") for step in document["data"]["steps"])


def answer(case: Mapping[str, Any]) -> Answer:
    """Ask for advice on a case, on a host of its own."""
    host = case["host"]
    with _own_hosts() as directory:
        _prepare(host, case.get("prepare", ()))
        words = _fill_in(case.get("advise", ""), host)
        if "file" in case:
            file = directory / "workloads.yaml"
            file.write_text(case["file"], encoding="utf-8")
            words += ["-f", str(file)]
        _, out, err = _run(["--host", host, "-o", "json", "advise", "-y", *words])
        document = json.loads(out)
        if document["data"] is None:
            said = " ".join(f"{one['message']} {one['hint']}" for one in document["errors"])
            return Answer({"winner": "error", "why": [said], "commands": []}, err, destroys=False)
        data = document["data"]
        return Answer(data, err, destroys=any(_destroys(host, command) for command in _commands(data)))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _texts(one)
    elif isinstance(value, Sequence):
        for one in value:
            yield from _texts(one)


def _harms(rule: str, given: Answer) -> bool:
    if rule == "destroys":
        return given.destroys
    kind, _, rest = rule.partition(" ")
    if kind == "way":
        return given.way == rest
    pattern = NEEDS_ROOT if rule == "needs root" else rest
    return any(re.search(pattern, command) for command in _commands(given.data))


def judge(case: Mapping[str, Any]) -> Judged:
    """Ask for advice on a case and judge the answer."""
    given = answer(case)
    missing = tuple(word for word in case.get("words", ()) if not re.search(word, given.said, re.IGNORECASE))
    return Judged(
        name=case["name"],
        way=given.way,
        acceptable=given.way in case["acceptable"] and not missing,
        preferred=given.way in case["preferred"] and not missing,
        harms=tuple(rule for rule in case.get("harmful", ()) if _harms(rule, given)),
        missing=missing,
        expected=tuple(case["preferred"]),
        why=given.data["why"][0] if given.data["why"] else "",
        commands=_commands(given.data),
    )


def figures(judged: Sequence[Judged]) -> dict[str, float]:
    """Return the three percentages."""
    return {
        "acceptable": 100 * sum(one.acceptable for one in judged) / len(judged),
        "harmful": 100 * sum(bool(one.harms) for one in judged) / len(judged),
        "preferred": 100 * sum(one.preferred for one in judged) / len(judged),
    }


def met(name: str, value: float) -> bool:
    """Say whether a percentage meets its goal."""
    low, high = GOALS[name]
    return low <= value <= high


def table(judged: Sequence[Judged]) -> str:
    """Return the failures and the percentages as text."""
    lines = []
    for one in judged:
        if one.passed:
            continue
        level = "harmful" if one.harms else "not the preferred way" if one.acceptable else "not acceptable"
        lines.append(f"{one.name}: {level}: {one.way}, not {' or '.join(one.expected)}")
        lines.append(f"    why: {one.why}")
        lines += [f"    do: {command}" for command in one.commands]
        lines += [f"    harm: {harm}" for harm in one.harms]
        lines += [f"    missing: {word}" for word in one.missing]
    lines.append(f"{len(judged)} cases")
    for name, value in figures(judged).items():
        low, high = GOALS[name]
        goal = f"at least {low:g} %" if high > low else f"{low:g} %"
        lines.append(f"{name}: {value:.1f} % (goal: {goal}, {'met' if met(name, value) else 'missed'})")
    return "\n".join(lines)


def main() -> int:
    """Judge every case, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--file", type=Path, default=CASES, help="the cases, like tests/advice/held_out_2.yaml")
    options = parser.parse_args()
    judged = [judge(case) for case in load(options.file) if not options.names or case["name"] in options.names]
    if not judged:
        parser.error("no case has such a name")
    if options.json:
        print(json.dumps({"figures": figures(judged), "cases": [asdict(one) for one in judged]}, indent=2))
    else:
        print(table(judged))
    return 0 if all(met(name, value) for name, value in figures(judged).items()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
