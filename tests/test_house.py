"""The order of the house that import-linter and ruff do not state: no circles, late imports, one file per verb, names."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.paths import MOST_ARROWS
from gpushare.cli import VERBS

PACKAGE = Path(__file__).resolve().parent.parent / "gpushare"
FILES = {
    ".".join(("gpushare", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
HEAVY = {"rich", "tabulate", "textual", "yaml", "psutil", "pynvml", "pydantic", "asyncio"}
# Rooms whose name is not that of the verb that they serve.
DOMAIN_OF = {
    "reserve": "memory",
    "apply": "hostfile",
    "diff": "hostfile",
    "capture": "hostfile",
    "explain": "advice",
    "savings": "advice",
    "compare": "advice",
    "advise": "advice",
    "bench": "measure",
    "tune": "measure",
    "observe": "measure",
    "metrics": "show",
    "schema": "show",
    "status": "snapshot",
    "jobs": "run",
    "stop": "run",
    "logs": "run",
    "resume": "pause",
    "swap": "memory",
    "move": "memory",
    "farm": "run",
}


@cache
def trees() -> dict[str, ast.Module]:
    return {module: ast.parse(path.read_text()) for module, path in FILES.items()}


@dataclass(frozen=True)
class Import:
    """One import: who, of whom, and whether it runs when the file is loaded."""

    importer: str
    module: str
    line: int
    at_load: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.module}"


def imports_of(importer: str) -> Iterator[Import]:
    """Yield every import of a file, in functions and for types too."""

    def visit(node: ast.AST, *, at_load: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                continue
            typed = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
            inner = at_load and not typed and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            if isinstance(child, ast.Import | ast.ImportFrom):
                for module in named(child):
                    yield Import(importer, module, child.lineno, at_load)
            yield from visit(child, at_load=inner)

    yield from visit(trees()[importer], at_load=True)


def named(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """Yield the modules that an import statement names: ``from gpushare.mps import control`` is the file of that name."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    for alias in node.names:
        inner = f"{node.module}.{alias.name}"
        yield inner if inner in FILES else node.module or ""


@cache
def imports() -> list[Import]:
    return [found for module in FILES for found in imports_of(module)]


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Return the sets of files that import each other, directly or round about (Tarjan's components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(one: str) -> None:
        index[one] = low[one] = len(index)
        stack.append(one)
        for other in sorted(edges.get(one, ())):
            if other not in index:
                visit(other)
                low[one] = min(low[one], low[other])
            elif other in stack:
                low[one] = min(low[one], index[other])
        if low[one] == index[one]:
            at = stack.index(one)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for one in sorted(edges):
        if one not in index:
            visit(one)
    return found


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


def test_no_two_files_import_each_other() -> None:
    """Not for types and not in a function either: what needs each other is one file, or a third one."""
    edges: dict[str, set[str]] = {}
    for found in imports():
        if found.module in FILES and found.module != found.importer:
            edges.setdefault(found.importer, set()).add(found.module)
    assert len(edges) > 50
    assert circles(edges) == []


def test_few_rooms_know_each_other() -> None:
    """A room is a folder, or a file at the top. Each new arrow has to be paid for by one that goes."""
    pairs = {
        tuple(name.split(".")[1] for name in (each.importer, each.module) if "." in name)
        for each in imports()
        if each.module in FILES
    }
    arrows = {pair for pair in pairs if len(set(pair)) == 2}
    assert len(arrows) > 50
    assert len(arrows) <= MOST_ARROWS, sorted(arrows)


def test_every_verb_has_its_file_and_names_its_domain() -> None:
    """The newcomer's rule: `gpushare VERB` is cli/VERB.py, whose first line names the room that does it."""
    for verb in VERBS:
        first = (ast.get_docstring(trees()[f"gpushare.cli.{verb}"]) or "").splitlines()[0]
        domain = DOMAIN_OF.get(verb, verb)
        assert f"`gpushare/{domain}" in first, (verb, first)
        assert f"gpushare.{domain}" in FILES


def test_the_simulation_is_loaded_only_when_asked_for() -> None:
    """Neither a start of the program nor any look at the real machine pays for it."""
    outside = [found for found in imports() if found.module.startswith("gpushare.sim")]
    assert any(found.importer == "gpushare.connect" for found in outside)
    assert [
        str(found)
        for found in outside
        if found.at_load and not found.importer.startswith(("gpushare.sim", "gpushare.cli.sim"))
    ] == []


def test_a_heavy_module_is_never_imported_at_load() -> None:
    """The screen of `gpushare top` alone begins with Textual; only that verb loads it."""
    heavy = [found for found in imports() if found.at_load and found.module.split(".")[0] in HEAVY]
    assert [str(found) for found in heavy if not found.importer.startswith("gpushare.top.")] == []
    outside = [
        found
        for found in imports()
        if found.module.startswith("gpushare.top") and not found.importer.startswith("gpushare.top")
    ]
    assert {(found.importer, found.at_load) for found in outside} == {("gpushare.cli.top", False)}


def test_what_is_imported_is_installed_with_gpushare() -> None:
    """At load or late: only what users have, and not what another package of the tests brings along."""
    declared = {"typer", "rich", "pynvml", "psutil", "yaml", "tabulate", "prometheus_client", "textual", "matplotlib"}
    roots = {one.module.partition(".")[0] for one in imports()} - set(sys.stdlib_module_names)
    assert roots - {"gpushare"} <= declared


def test_names_say_what_a_thing_is() -> None:
    """No Manager, Util or Helper: such a name takes anything in."""
    endings = ("manager", "util", "utils", "helper", "helpers")
    named_so = [
        f"{module}: {name}"
        for module, tree in trees().items()
        for name in (
            module,
            *(
                node.name
                for node in ast.walk(tree)
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            ),
        )
        if name.lower().endswith(endings)
    ]
    assert named_so == []


def test_every_file_says_at_its_top_what_it_is() -> None:
    assert [module for module, tree in trees().items() if tree.body and not ast.get_docstring(tree)] == []


# Who reads JSON, and what it is. Records are read by their store alone.
JSON_READERS = {
    "gpushare.gpu_models": "the catalogue that gpushare brings along",
    "gpushare.host.channels": "what its own helper answers",
    "gpushare.host.store": "records",
    "gpushare.measure.bench_data": "a result that the user names",
    "gpushare.measure.dcgm": "what dcgmi prints",
    "gpushare.measure.recording": "a recording that the user names",
    "gpushare.run.detach": "the error of a job that did not start, which another gpushare has printed",
    "gpushare.run.farm": "the results of a farm, in a directory that the user names",
    "gpushare.show.schema": "the schemas that gpushare brings along",
    "gpushare.top.verbs": "what the verbs answer that it runs",
}


def test_only_the_store_reads_records() -> None:
    readers = {
        module
        for module, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in {"load", "loads", "JSONDecoder"}
        and isinstance(node.value, ast.Name)
        and node.value.id == "json"
    }
    assert {module for module in readers if not module.startswith("gpushare.sim.")} == set(JSON_READERS)


def test_json_is_imported_whole() -> None:
    """`from json import loads` would hide a reader from the test above."""
    hidden = [
        f"{module}:{node.lineno}"
        for module, tree in trees().items()
        for node in ast.walk(tree)
        if (isinstance(node, ast.ImportFrom) and node.module == "json")
        or (isinstance(node, ast.Import) and any(name.name == "json" and name.asname for name in node.names))
    ]
    assert hidden == []
