"""How many wrong programs the tests find: ``python -m benchmarks.mutants --seed N --count 100 [gpushare/run ...]``.

Each mutant is gpushare with one thing changed at random: a comparison, a boundary, and/or, a condition, a number, a returned
value, a statement left out. The tests that call the changed function run on it, in a copy of the checkout. All tests run once
before, to see which functions they call; ``--calls FILE`` keeps that for the next time. A mutant is ``found`` if a test fails,
``survived`` if none does, and ``undecided`` if they take longer than ``--seconds``. The survivors are printed with what was
changed. Some of them are equal to the program.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from benchmarks import calls

PROJECT: Final = Path(__file__).parents[1]
COMPARISONS: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
}
NAMES: Final = {"min": "max", "max": "min", "any": "all", "all": "any"}
# A function that fewer tests call may have been called before, and its result kept: the tests of its file say more.
FEW: Final = 10
# How many tests run at first: most mutants are found at once.
FIRST: Final = 20
# A test that takes this long, in seconds, does not end: the longest takes a minute on a busy machine.
LONGEST: Final = 100


@dataclass(frozen=True)
class Mutant:
    """A change of one place of a file; ``start`` and ``end`` are offsets into its UTF-8."""

    path: str
    line: int
    # The name of its function; empty: it is in none.
    function: str
    start: int
    end: int
    old: str
    new: str

    def apply(self, text: bytes) -> bytes:
        """Return the file with the change."""
        return text[: self.start] + self.new.encode() + text[self.end :]

    def __str__(self) -> str:
        return f"{self.path}:{self.line}\n    - {' '.join(self.old.split())}\n    + {' '.join(self.new.split())}"


def mutants(path: Path) -> Iterator[Mutant]:
    """Return every mutant of a file of the package."""
    text = path.read_bytes()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node, function, new in _changes(ast.parse(text)):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        yield Mutant(str(path.relative_to(PROJECT)), node.lineno, function, start, end, text[start:end].decode(), new)


def _changes(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, str, str]]:
    """Return each node that can be changed, with the name of its function, and its new text."""
    stack: list[tuple[ast.AST, str]] = [(tree, "")]
    while stack:
        node, function = stack.pop()
        # Texts, types and declarations (of options, of frozen classes) are not what a mutant is about.
        if isinstance(node, (ast.JoinedStr, ast.AnnAssign, ast.Raise)):
            if isinstance(node, ast.AnnAssign) and node.value:
                stack.append((node.value, function))
            continue
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            stack += [(part, node.name) for part in node.body]
            continue
        if isinstance(node, ast.ClassDef):
            stack += [(part, function) for part in node.body]
            continue
        stack += [(part, function) for part in ast.iter_child_nodes(node)]
        for changed, new in _of_statement(node) if isinstance(node, ast.stmt) else _of_expression(node):
            yield changed, function, new


def _of_statement(node: ast.stmt) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    if isinstance(node, (ast.If, ast.While)):
        yield node.test, f"(not ({ast.unparse(node.test)}))"
    elif isinstance(node, ast.Return) and node.value and not _is_untrue(node.value):
        yield node, "return None"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield node, "pass"
    elif isinstance(node, ast.AugAssign) and type(node.op) in OPERATORS:
        changed = ast.AugAssign(node.target, OPERATORS[type(node.op)](), node.value)
        yield node, ast.unparse(changed)


def _of_expression(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    if not isinstance(node, ast.expr):
        return
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        changed: ast.expr = ast.Compare(node.left, [COMPARISONS[type(node.ops[0])]()], node.comparators)
    elif isinstance(node, ast.BoolOp):
        changed = ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        changed = node.operand
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS and not _is_text(node):
        changed = ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        changed = ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        changed = ast.Constant(node.value + 1)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in NAMES:
        changed = ast.Call(ast.Name(NAMES[node.func.id]), node.args, node.keywords)
    else:
        return
    yield node, f"({ast.unparse(changed)})"


def _is_untrue(node: ast.expr) -> bool:
    """Return whether a value is None, or False, which is the same to whoever asks yes or no."""
    return isinstance(node, ast.Constant) and (node.value is None or node.value is False)


def _is_text(node: ast.BinOp) -> bool:
    parts = (node.left, node.right)
    return any(isinstance(part, (ast.JoinedStr, ast.List, ast.Tuple)) or _is_string(part) for part in parts)


def _is_string(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


@dataclass(frozen=True)
class Calls:
    """Which tests call a function of the package, and the tests of the daily run."""

    # By "path:name" of the function. A test is "file::name", without its parameters.
    tests: dict[str, list[str]]
    daily: list[str]

    def tests_of(self, mutant: Mutant, checkout: Path) -> tuple[list[str], list[str], list[str]]:
        """Return the tests that may find a mutant: the most special ones, the others of the daily run, and the slow ones."""
        tests = set(self.tests.get(f"{mutant.path}:{mutant.function}", ()))
        if len(tests) < FEW:
            tests.update(*(self.tests[name] for name in self.tests if name.startswith(f"{mutant.path}:")))
        texts = {
            file: (checkout / file).read_text()
            for file in {test.split("::")[0] for test in tests}
            if (checkout / file).exists()
        }
        # Since they were recorded, some may have gone; the last part is the name of the function.
        tests = {test for test in tests if f"def {test.rpartition('::')[2]}(" in texts.get(test.split("::")[0], "")}
        # The test that calls the fewest functions checks them most closely.
        every = sorted(tests, key=lambda test: (self._sizes[test], test))
        daily = [test for test in every if test in self._daily]
        return daily[:FIRST], daily[FIRST:], [test for test in every if test not in self._daily]

    @cached_property
    def _daily(self) -> set[str]:
        return set(self.daily)

    @cached_property
    def _sizes(self) -> Counter[str]:
        """Return how many functions each test calls."""
        return Counter(test for tests in self.tests.values() for test in tests)


def record(checkout: Path, jobs: int) -> Calls:
    """Run all tests in a checkout, and return which functions they call."""
    with tempfile.TemporaryDirectory(prefix="calls") as directory:
        shutil.copy(calls.__file__, Path(directory, "sitecustomize.py"))
        files = Path(directory, "files")
        files.mkdir()
        path = os.pathsep.join((directory, str(checkout)))
        # Some tests fail because each call takes longer; which functions they call is known all the same.
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-n", str(jobs), "--dist", "worksteal", "-p", "benchmarks.calls"],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": path, calls.CHECKOUT: str(checkout), calls.DIRECTORY: str(files)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            check=False,
        )
        functions: dict[str, set[str]] = defaultdict(set)
        daily = set()
        for file in files.iterdir():
            head, *lines = file.read_text(errors="replace").splitlines()
            kind, test = head.split(" ", 1)
            for line in lines:
                functions[line].add(test)
            if kind == "daily":
                daily.add(test)
    return Calls({name: sorted(tests) for name, tests in functions.items()}, sorted(daily))


def copy_checkout(directory: Path) -> None:
    """Copy what git knows of the checkout."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=PROJECT, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if PROJECT.joinpath(name).is_file():
            directory.joinpath(name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(PROJECT / name, directory / name)


def verdict(mutant: Mutant, checkout: Path, called: Calls, seconds: float) -> str:
    """Return what the tests say of a mutant: found, survived or undecided."""
    end = time.monotonic() + seconds
    for tests in called.tests_of(mutant, checkout):
        failed: str | None = None
        while tests:
            code, failed = _tested_on(mutant, checkout, tests, end - time.monotonic())
            if code is None:
                return "undecided"
            if not code:
                break
            without_change, _ = _tested(checkout, [failed] if failed else tests, seconds)
            if without_change is None:
                return "undecided"
            if not without_change:
                return "found"
            # A test, or a file of tests, that fails without the change too finds nothing.
            others = [test for test in tests if failed and not failed.startswith(test) and not test.startswith(failed)]
            if others == tests:
                return "undecided"
            tests = others
    return "survived"


def _tested_on(mutant: Mutant, checkout: Path, tests: Sequence[str], seconds: float) -> tuple[int | None, str | None]:
    """Return what `_tested` does, with the change."""
    path = checkout / mutant.path
    original = path.read_bytes()
    _write(path, mutant.apply(original))
    try:
        return _tested(checkout, tests, seconds)
    finally:
        _write(path, original)


def _tested(checkout: Path, tests: Sequence[str], seconds: float) -> tuple[int | None, str | None]:
    """Return the exit code of pytest in a copy of the checkout, None if it takes too long, and the test that failed."""
    with tempfile.TemporaryFile("w+") as out, tempfile.NamedTemporaryFile("w") as names:
        names.write("\n".join(tests))
        names.flush()
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-x",
                "-rfE",
                "-p",
                "no:cacheprovider",
                f"--timeout={LONGEST}",
                f"@{names.name}",
            ],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout)},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            code = process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return None, None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        lines = [line.split(" ", 1)[1] for line in out if line.startswith(("FAILED tests/", "ERROR tests/"))]
    return code, lines[-1].split(" - ")[0].strip() if lines else None


def _write(path: Path, text: bytes) -> None:
    path.write_bytes(text)
    # Python believes what it compiled of a file of the same size and second.
    for compiled in path.parent.joinpath("__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink(missing_ok=True)


def sample(paths: Sequence[str], seed: int, count: int) -> list[Mutant]:
    """Return mutants of the files below some paths, drawn at random."""
    files = [
        file
        for path in paths
        for file in ([PROJECT / path] if path.endswith(".py") else sorted((PROJECT / path).rglob("*.py")))
    ]
    every = [mutant for file in files for mutant in mutants(file)]
    return random.Random(seed).sample(every, min(count, len(every)))  # noqa: S311 - no secret


def main(words: Sequence[str] | None = None) -> int:
    """Draw mutants, run the tests on each, and print what survived."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", default=["gpushare"], help="files or directories of the package")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=120.0, help="the most that the tests of one mutant may take")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at the same time")
    parser.add_argument(
        "--calls", type=Path, metavar="FILE", help="which tests call which functions; written if there is none"
    )
    options = parser.parse_args(words)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="mutants") as directory:
        checkouts: SimpleQueue[Path] = SimpleQueue()
        for number in range(options.jobs):
            copy_checkout(Path(directory, str(number)))
            checkouts.put(Path(directory, str(number)))
        if options.calls and options.calls.exists():
            called = Calls(**json.loads(options.calls.read_text()))
        else:
            called = record(Path(directory, "0"), options.jobs)
            if options.calls:
                options.calls.write_text(json.dumps(asdict(called)))

        def judge(mutant: Mutant) -> tuple[str, Mutant]:
            checkout = checkouts.get()
            try:
                return verdict(mutant, checkout, called, options.seconds), mutant
            finally:
                checkouts.put(checkout)

        with ThreadPoolExecutor(options.jobs) as pool:
            for word, mutant in pool.map(judge, sample(options.paths, options.seed, options.count)):
                counts[word] += 1
                if word != "found":
                    print(f"{word} {mutant}", flush=True)
    decided = counts["found"] + counts["survived"]
    share = f"{counts['found'] / decided:.0%} of the decided" if decided else "none decided"
    print(f"{counts['found']} found, {counts['survived']} survived, {counts['undecided']} undecided: {share}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
