"""The house keeps its order: dependencies one way, heavy modules late, files short, names plain."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "gpushare"
FILES = sorted(PACKAGE.rglob("*.py"))

PURE = {"errors", "units", "model", "selection"}
# What each room may import, besides itself. Everybody may read the version.
ALLOWED = {
    "errors": set[str](),
    "units": {"errors"},
    "model": {"errors", "units"},
    "selection": {"errors", "units", "model"},
    # MIG profiles and layouts are vocabulary too: pure, and below the host that reads them.
    "host": {"mig", *PURE},
    "sim": {"host", "mig", "errors", "units", "model"},
    "mig": {"errors", "units", "model"},
    "layout": {"host", "mig", *PURE},
    # What fits on a MIG board is the planner's to say.
    "advice": {"mig", *PURE},
    "actions": {"host", "mig", "layout", *PURE},
    "measure": {"host", "actions", *PURE},
    "show": {"mig", "errors", "units", "model"},
    "cli": {"show", "advice", "layout", "actions", "measure", "mig", "host", "sim", *PURE},
    "__main__": {"cli"},
}
# The one door into the simulation besides `gpushare sim`, opened inside a function.
DOORS = {("host/connect.py", "sim")}
HEAVY = {"rich", "tabulate", "yaml", "psutil", "pynvml", "pydantic", "asyncio"}
# The only importers of what touches the machine; the stand-in knows the C structures of the bindings.
OWNERS = {
    "pynvml": {"host/nvml.py"},
    "psutil": {"host/process.py"},
}


@dataclass(frozen=True)
class Import:
    """One import: its file, the module, and whether it runs when the file is loaded."""

    file: str
    module: str
    line: int
    at_load: bool
    for_types: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def name_of(path: Path) -> str:
    """Return a file's name below the package."""
    return path.relative_to(PACKAGE).as_posix()


def imports_of(path: Path) -> Iterator[Import]:
    """Yield every import of a file, wherever it stands."""

    def visit(node: ast.AST, *, at_load: bool, for_types: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            inner_load = at_load and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            inner_types = for_types or (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING")
            for module in modules(child):
                yield Import(name_of(path), module, child.lineno, at_load and not for_types, for_types)  # type: ignore[attr-defined]
            yield from visit(child, at_load=inner_load, for_types=inner_types)

    yield from visit(ast.parse(path.read_text()), at_load=True, for_types=False)


def modules(node: ast.AST) -> list[str]:
    """Return the modules that an import statement names: ``from gpushare import units`` is ``gpushare.units``."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module == "gpushare":
        return [f"gpushare.{alias.name}" for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return []


IMPORTS = [found for path in FILES for found in imports_of(path)]


def room_of(file: str) -> str:
    """Return the room of a file: its folder, or for a file of the top its name."""
    return file.split("/", 1)[0].removesuffix(".py")


def test_the_test_sees_the_package() -> None:
    assert len(FILES) > 50
    assert any(found.module == "gpushare.sim" and not found.at_load for found in IMPORTS)
    assert {room_of(name_of(path)) for path in FILES} - {"__init__"} <= set(ALLOWED)


def test_dependencies_run_one_way() -> None:
    wrong = []
    for found in IMPORTS:
        if not found.module.startswith("gpushare."):
            continue
        here, there = room_of(found.file), found.module.split(".", 2)[1]
        if there in {here, "__version__"} or there in ALLOWED[here]:
            continue
        if (found.file, there) in DOORS and not found.at_load:
            continue
        wrong.append(str(found))
    assert wrong == []


def test_imports_are_absolute() -> None:
    relative = [
        name_of(path)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert relative == []


@pytest.mark.parametrize("module", sorted(HEAVY))
def test_a_heavy_module_is_never_imported_at_load(module: str) -> None:
    assert [str(found) for found in IMPORTS if found.module.split(".")[0] == module and found.at_load] == []


@pytest.mark.parametrize("module", sorted(OWNERS))
def test_one_file_touches_it(module: str) -> None:
    importers = {found.file for found in IMPORTS if found.module.split(".")[0] == module and not found.for_types}
    assert importers - OWNERS[module] == set()
    assert importers, f"nothing imports {module}"


def test_the_simulation_is_loaded_only_when_asked_for() -> None:
    """Neither a start of the program nor any look at the real machine pays for it."""
    outside = [
        found for found in IMPORTS if found.module.startswith("gpushare.sim") and not found.file.startswith("sim/")
    ]
    assert [str(found) for found in outside if found.at_load] == []


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_names_say_what_a_thing_is(path: Path) -> None:
    """No Manager, Util or Helper: such a name takes anything in."""
    named = [path.stem]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            named.append(node.name)
    endings = ("manager", "util", "utils", "helper", "helpers")
    assert [name for name in named if name.lower().endswith(endings)] == []


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_file_defers_its_annotations(path: Path) -> None:
    tree = ast.parse(path.read_text())
    if tree.body:
        futures = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
        assert futures
        assert ast.get_docstring(tree), "a file says at its top what it is"
