"""What a start of the program loads, and what it leaves where it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gpushare

PROJECT = Path(__file__).resolve().parent.parent
HEAVY = (
    *("prometheus_client", "rich", "textual", "psutil", "tabulate", "yaml", "pynvml", "pydantic"),
    *("importlib.metadata", "asyncio"),
)
REPORT = "import sys; print('LOADED', *sorted(sys.modules), file=sys.stderr)"


def loaded_by(code: str, sim_dir: Path) -> set[str]:
    """Return the modules that a fresh interpreter has loaded after running some code."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{REPORT}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        # The machine's own site configuration may import anything; what counts is what we add.
        env={**os.environ, "PYTHONPATH": str(PROJECT), "GPUSHARE_SIM_DIR": str(sim_dir)},
    )
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("LOADED ")]
    return set(line.split()[1:])


def heavy(modules: set[str], but: tuple[str, ...] = ()) -> list[str]:
    """Return the heavy ones among modules, those of a bare interpreter not counted."""
    return [name for name in HEAVY if name in modules and name not in but]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Return what an interpreter loads that does nothing (an editable install may add a finder)."""
    return loaded_by("pass", tmp_path_factory.mktemp("bare"))


def command(*words: str) -> str:
    """Return code that runs a gpushare command line."""
    return f"from gpushare.cli import main\nassert main({list(words)!r}) == 0"


def test_the_package_loads_nothing_and_knows_what_it_offers(sim_dir: Path, bare: set[str]) -> None:
    loaded = loaded_by("import gpushare; dir(gpushare)", sim_dir) - bare
    assert {name for name in loaded if name.startswith("gpushare")} == {"gpushare"}
    assert [name for name in gpushare.__all__ if getattr(gpushare, name, None) is None] == []


@pytest.mark.parametrize(
    ("words", "but"),
    [
        (["--version"], ()),
        (["--help"], ()),
        (["mps", "--help"], ()),
        (["mps", "start", "--help"], ()),
        # No drawing and no YAML; the real bindings stand above the simulated library.
        (["--host", "sim:h200", "status", "-o", "json"], ("pynvml",)),
        (["--host", "sim:h200", "status", "-o", "plain"], ("pynvml", "tabulate", "importlib.metadata")),
    ],
    ids=str,
)
def test_what_a_command_line_loads(words: list[str], but: tuple[str, ...], sim_dir: Path, bare: set[str]) -> None:
    modules = loaded_by(command(*words), sim_dir) - bare
    assert heavy(modules, but=but) == []
    assert ("pynvml" in modules) == ("pynvml" in but)


def test_the_command_line_loads_no_room_below_before_a_command_needs_it(sim_dir: Path) -> None:
    """Commands import what they call inside their function: twenty dataclasses more are 10 ms more at each start."""
    rooms = (
        *("gpushare.advice", "gpushare.host", "gpushare.mig", "gpushare.mps", "gpushare.run", "gpushare.hostfile"),
        *("gpushare.export", "gpushare.doctor", "gpushare.measure", "gpushare.sim"),
    )
    loaded = loaded_by("import gpushare.cli", sim_dir)
    assert sorted(name for name in loaded if name.startswith(rooms)) == []


def test_status_loads_nothing_of_changes(sim_dir: Path) -> None:
    """Each of these costs a start a hundredth of its time."""
    modules = loaded_by(command("--host", "sim:h200", "status", "-o", "json"), sim_dir)
    changes = ("gpushare.plan", "gpushare.show.plan", "gpushare.mps", "gpushare.mig.driver", "gpushare.host.open_files")
    assert [name for name in changes if name in modules] == []


def test_no_class_of_a_start_compiles_its_methods(sim_dir: Path) -> None:
    """`dataclasses` compiles up to seven methods for a class; `gpushare.base.values` none."""
    code = (
        "import dataclasses, sys\nreal = dataclasses._process_class\n"
        "def noted(cls, init, *rest):\n"
        "    if init and cls.__module__.startswith('gpushare'): print('COMPILED', cls.__name__, file=sys.stderr)\n"
        "    return real(cls, init, *rest)\n"
        "dataclasses._process_class = noted\n" + command("--host", "sim:h200", "status", "-o", "json")
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "PYTHONPATH": str(PROJECT), "GPUSHARE_SIM_DIR": str(sim_dir)},
    )
    assert [line for line in done.stderr.splitlines() if line.startswith("COMPILED ")] == []


def test_the_simulation_is_not_loaded_for_the_real_machine(sim_dir: Path) -> None:
    modules = loaded_by("from gpushare.cli import main\nmain(['--host', 'local', 'status', '-o', 'json'])", sim_dir)
    assert "gpushare.host.nvml" in modules
    assert [name for name in modules if name.startswith("gpushare.sim")] == []
