"""Fixtures for every test. No test touches the GPUs or the simulated hosts of the machine it runs on."""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from gpushare.base.selection import Device
    from gpushare.host.host import Host

# Thousands of processes import gpushare, and each of them would compile it; workers would compile every test.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Nothing that is imported or collected is garbage; see pytest_collection_finish().
gc.disable()

# No test depends on the clock: a busy machine must not fail one. The daily run tries fewer examples.
settings.register_profile("whole", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("daily", settings.get_profile("whole"), max_examples=25)
DAILY = "not slow"


def short_directory() -> str:
    """Return the directory for simulated hosts: a short path, in memory if there is a tmpfs without noexec."""
    memory = "/dev/shm"
    usable = os.access(memory, os.W_OK) and not os.statvfs(memory).f_flag & os.ST_NOEXEC
    return memory if usable else "/tmp"


ROOM = short_directory()
# In the namespace of a user, root can be nobody else.
IS_ROOT = os.geteuid() == 0 and "4294967295" in Path("/proc/self/uid_map").read_text()


def pytest_configure(config: pytest.Config) -> None:
    """Give the collection of tests a directory of simulated hosts of its own, and Ctrl-C even in the background."""
    settings.load_profile("daily" if config.option.markexpr == DAILY else "whole")
    # Records that a group may write are refused, also those that a test makes. The task pages are tried with 0002.
    os.umask(0o022)
    # A shell lets what it starts in the background ignore these signals, and tests send them to what they start.
    # Under nohup SIGHUP is ignored. A handler that does nothing ignores it here, and not in what they start.
    handlers = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGQUIT: signal.SIG_DFL,
        signal.SIGHUP: lambda _number, _frame: None,
    }
    for number, handler in handlers.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    directory = tempfile.mkdtemp(prefix="gc", dir=ROOM)
    os.environ["GPUSHARE_SIM_DIR"] = directory
    config.add_cleanup(lambda: shutil.rmtree(directory, ignore_errors=True))


_PASSED = itertools.count(1)


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Show a dot for every hundredth test that passed, and nothing for one that was skipped: there are thousands."""
    if hasattr(report, "wasxfail"):
        return None
    if report.skipped:
        return "skipped", "", "SKIPPED"
    if report.passed and report.when == "call":
        return "passed", "" if next(_PASSED) % 100 else ".", "PASSED"
    return None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was skipped, in a line per reason."""
    skipped = terminalreporter.getreports("skipped")
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"skipped {count}: {reason}")


@pytest.fixture(autouse=True)
def sim_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give each test a directory of simulated hosts; its path is short, because MPS pipe paths are limited."""
    directory = Path(tempfile.mkdtemp(prefix="gs", dir=ROOM))
    monkeypatch.setenv("GPUSHARE_SIM_DIR", str(directory))
    # A time-out on a simulated program that hangs passes ten times as fast.
    monkeypatch.setenv("GPUSHARE_SIM_PATIENCE", "0.1")
    for name in (
        "GPUSHARE_HOST",
        "GPUSHARE_MPS_CONTROL",
        "GPUSHARE_NVIDIA_SMI",
        "GPUSHARE_RUN_DIR",
        "GPUSHARE_STATE_DIR",
    ):
        monkeypatch.delenv(name, raising=False)
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    yield directory
    for thread in threading.enumerate():
        # It may still read the host of this test, and its library of NVML would be that of the next one.
        if thread.name == "gpushare-top":
            thread.join(30)
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Put back the handlers of the signals that end a program: benchmarks and workloads set their own."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def host() -> Host:
    """Return a simulated H200."""
    from gpushare.connect import connect

    return connect("sim:h200")


@pytest.fixture
def device(host: Host) -> Device:
    """Return the first GPU of the host."""
    from gpushare.base.selection import Device

    return Device(gpu=host.nvml.sweep()[0])


@pytest.fixture
def near_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for clients and objects of the driver near the first ones only, where a simulated GPU has all of them.

    How far gpushare looks on a real one is tested in tests/host/test_channels.py.
    """
    monkeypatch.setattr("gpushare.host.channels._WINDOW", 0x100)
    monkeypatch.setattr("gpushare.host.channels._BLOCK", 0x80)


GOLDENS = Path(__file__).parent / "goldens"
# Tests that start real processes, wait for them, or try everything: not in the daily run (pytest -m "not slow").
SLOW = (
    "advice/test_held_out.py",
    "advice/test_measured.py",
    "advice/test_place.py",
    "advice/test_promises.py",
    "advice/test_properties.py",
    "cli/advise/test_beside.py",
    "cli/advise/test_leaving.py",
    "cli/advise/test_measure.py",
    "cli/bench/",
    "cli/metrics/test_server.py",
    "cli/mig/test_left.py",
    "cli/mps/test_crash.py",
    "cli/observe/",
    "cli/pause/",
    "cli/run/",
    "cli/swap/test_faults.py",
    "cli/swap/test_users.py",
    "cli/test_disk_faults.py",
    "cli/test_ignored_signals.py",
    "cli/test_python.py",
    "cli/timeslice/test_keep.py",
    "cli/tune/",
    "crash/",
    "export/test_dra.py",
    "export/test_slurm_",
    "gpu/",
    "measure/test_copies.py",
    "measure/test_progress.py",
    "measure/test_tune.py",
    "mig/test_interrupt.py",
    "mig/test_planner_exact.py",
    "mig/test_shape.py",
    "mig/test_steps.py",
    "mig/test_transaction.py",
    "mps/test_strangers.py",
    "real_daemon/",
    "run/test_adapt.py",
    "run/test_announced.py",
    "security/",
    "sim/test_mig_changes_walk.py",
    "test_hostile_input.py",
    "test_pages.py",
    "top/test_cockpit.py",
    "top/test_end.py",
    "test_tasks.py",
)


# Tests that take five seconds or more, most of it waiting. They begin first: the last tests of a run are short ones.
LONG = (
    "tests/cli/bench/test_edges.py::test_several_sizes",
    "tests/cli/run/test_container.py::test_if_gpushare_dies",
    "tests/cli/run/test_faults.py::test_the_death_of_the_daemon",
    "tests/cli/run/test_roles.py::test_a_requeued_program",
    "tests/cli/run/test_slice.py::test_the_slice_follows",
    "tests/crash/test_crashes.py::test_one_more_command",
    "tests/measure/test_tune.py::test_jobs_that_compete",
    "tests/measure/test_tune.py::test_real_processes",
    "tests/measure/test_tune.py::test_the_slice_of_real_processes",
    "tests/mig/test_planner_exact.py::test_cost_is_the_least_from_any_layout",
)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import slow files in the daily run: half of the time of a start."""
    if config.option.markexpr == DAILY and _below_tests(collection_path).startswith(SLOW):
        return True
    return None


def _below_tests(path: Path) -> str:
    return str(path).removeprefix(f"{Path(__file__).parent}/")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Mark slow tests by their path, skip what needs root, and give each worker some of the long ones to begin with."""
    for item in items:
        path = _below_tests(item.path)
        if path.startswith("security/"):
            item.add_marker("needs_root")
        if not IS_ROOT and item.get_closest_marker("needs_root"):
            item.add_marker(pytest.mark.skip(reason="needs root, to be another user as well"))
        if path.startswith(SLOW):
            item.add_marker("slow")
    yield
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    long = [item for item in items if item.nodeid.startswith(LONG)]
    short = [item for item in items if not item.nodeid.startswith(LONG)]
    number = len(items)
    items.clear()
    for left in range(workers, 0, -1):
        # As `--dist worksteal` deals them out.
        first = long[left - 1 :: workers]
        rest = max(0, (number - len(items)) // left - len(first))
        taken, short = short[:rest], short[rest:]
        items += first + taken


def pytest_collection_finish() -> None:
    """Keep the garbage collector away from the thousands of tests that were collected."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--update-goldens``: rewrite tests/goldens/*.txt with the present output."""
    parser.addoption("--update-goldens", action="store_true", help="rewrite the golden texts")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Return a check of a text against tests/goldens/NAME.txt, byte for byte."""

    def check(name: str, text: str) -> None:
        path = GOLDENS / f"{name}.txt"
        if request.config.getoption("--update-goldens"):
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(text.encode())
        assert path.exists(), f"no golden {path.name}: run pytest --update-goldens, then read it"
        assert text == path.read_bytes().decode()

    return check
