"""The simulated nvidia-cuda-mps-control against the real one: same words in, same words and exit code out."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpushare.host.connect import connect
from gpushare.host.mps_control import PROGRAM
from gpushare.host.mps_program import start_environment
from gpushare.host.program import Completed, LocalPrograms, Programs
from gpushare.sim import open_simulated
from gpushare.sim.admin import set_fault
from tests.real_daemon.conftest import PATIENCE_SECONDS, wait_until

# The year of the copyright line tells the branch: these programs have no option for their version.
BRANCHES = {"2003 - 2023": "535.261.03", "2003 - 2024": "550.163.01"}


class Both:
    """The same program twice: the real one, and the simulated one of the same driver."""

    def __init__(self, directory: Path, real: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self._real, self._patch = real, monkeypatch
        # Real ones run where the variable names them, and a simulated host asks for it too.
        self.usage = LocalPrograms().run([PROGRAM, "-h"]).text
        self.driver = next((driver for years, driver in BRANCHES.items() if years in self.usage), "")
        self._programs: dict[str, Programs] = {
            "real": LocalPrograms(),
            "simulated": open_simulated("sim:h200").programs,
        }
        self.uuid = connect("sim:h200").nvml.sweep()[0].uuid or ""

    def run(self, side: str, argv: list[str], stdin: str = "") -> Completed:
        """Run one of the two in its own directories."""
        self._patch.setenv("GPUSHARE_MPS_CONTROL", self._real if side == "real" else "")
        pipe, log = self.directory / side / "pipe", self.directory / side / "log"
        pipe.mkdir(parents=True, exist_ok=True)
        log.mkdir(exist_ok=True)
        environment = start_environment(self.uuid, str(pipe), str(log))
        return self._programs[side].run([PROGRAM, *argv], stdin=stdin, env=environment, timeout=PATIENCE_SECONDS)

    def same(self, stdin: str, argv: list[str] | None = None) -> Completed:
        """Run both and compare; return what they did."""
        real, simulated = (self.run(side, argv or [], stdin) for side in ("real", "simulated"))
        assert (simulated.exit_code, simulated.stdout, simulated.stderr) == (
            real.exit_code,
            real.stdout,
            real.stderr,
        ), stdin
        return real


@pytest.fixture
def both(sim_dir: Path, real_control: str, monkeypatch: pytest.MonkeyPatch) -> Both:
    """Return both programs, of one driver, with no daemon yet."""
    pair = Both(sim_dir, real_control, monkeypatch)
    if not pair.driver:
        pytest.skip("the real program is of a driver whose daemon does not start without a GPU")
    set_fault("sim:h200", "driver", value=pair.driver)
    return pair


@pytest.fixture
def started(both: Both) -> Both:
    """Return both programs with a daemon each."""
    both.same("", ["-d"])

    def answers() -> bool:
        return both.run("real", [], "get_server_list\n").exit_code == 0

    wait_until(answers)
    return both


@pytest.mark.parametrize(
    "argv", [[], ["-h"], ["--help"], ["get_server_list"], ["-v"], ["--nonsense"], ["-d", "-f"]], ids=str
)
def test_without_a_daemon(both: Both, argv: list[str]) -> None:
    both.same("get_server_list\n", argv)


def test_a_second_start(started: Both) -> None:
    assert started.same("", ["-d"]).exit_code == 1


@pytest.mark.parametrize(
    "stdin",
    [
        "get_server_list\n",
        "get_server_list",
        "  get_server_list  \n",
        "",
        "\n",
        "\n\n",
        "nonsense\n",
        "GET_SERVER_LIST\n",
        "help\n",
        "ps\n",
        "ps -p 4\n",
        "get_device_client_list\n",
        "get_client_list 999999\n",
        "get_client_list\n",
        "get_server_status 999999\n",
        "get_server_status\n",
        "get_active_thread_percentage 999999\n",
        "set_active_thread_percentage 999999 20\n",
        "get_device_pinned_mem_limit 999999 0\n",
        "set_device_pinned_mem_limit 999999 0 1G\n",
        "terminate_client 999999 999998\n",
        "shutdown_server 999999\n",
        "device_query\n",
        "lspart\n",
        "sm_partition add GPU-0 2\n",
        "get_default_active_thread_percentage\nget_default_client_priority\nget_default_device_pinned_mem_limit 0\nps\n",
        "get_default_active_thread_percentage\nnonsense\nget_default_client_priority\n",
    ],
    ids=repr,
)
def test_questions(started: Both, stdin: str) -> None:
    started.same(stdin)


@pytest.mark.parametrize(
    "value",
    [
        "50",
        "50.0",
        "33.33",
        "0.1",
        "0",
        "0.04",
        "100",
        "100.1",
        "-5",
        "400",
        "abc",
        "",
        "50%",
        "1e1",
        "5 6",
        "nan",
        "inf",
    ],
)
def test_thread_percentages(started: Both, value: str) -> None:
    started.same("set_default_active_thread_percentage 40\n")
    started.same(f"set_default_active_thread_percentage {value}\nget_default_active_thread_percentage\n")


@pytest.mark.parametrize(
    "value",
    [
        "1G",
        "3g",
        "512M",
        "512MB",
        "1.5G",
        "1024K",
        "2000",
        "2000M",
        "0G",
        "0",
        "abc",
        "",
        "-1G",
        "1T",
        "5 G",
        "99999G",
        "G",
        "1GG",
        "16MiB",
    ],
)
def test_memory_limits(started: Both, value: str) -> None:
    started.same("set_default_device_pinned_mem_limit 0 6G\n")
    started.same(f"set_default_device_pinned_mem_limit 0 {value}\nget_default_device_pinned_mem_limit 0\n")


@pytest.mark.parametrize("device", ["0", "1", "7", "abc", ""])
def test_devices_of_memory_limits(started: Both, device: str) -> None:
    started.same(f"set_default_device_pinned_mem_limit {device} 2G\nget_default_device_pinned_mem_limit {device}\n")


@pytest.mark.parametrize("value", ["0", "1", "2", "-1", "abc", "", "1 0", "01"])
def test_priorities(started: Both, value: str) -> None:
    started.same(f"set_default_client_priority {value}\nget_default_client_priority\n")


@pytest.mark.parametrize("command", ["quit\n", "quit -t 1\n"])
def test_quit(started: Both, command: str) -> None:
    started.same(command)

    def gone() -> bool:
        return started.run("real", [], "get_server_list\n").exit_code != 0

    wait_until(gone)
    started.same("get_server_list\n")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(whole=st.integers(0, 120), tenths=st.integers(0, 9))
def test_any_percentage(started: Both, whole: int, tenths: int) -> None:
    started.same(f"set_default_active_thread_percentage {whole}.{tenths}\nget_default_active_thread_percentage\n")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(number=st.integers(0, 4_000_000), unit=st.sampled_from("MG"))
def test_any_memory_limit(started: Both, number: int, unit: str) -> None:
    started.same(f"set_default_device_pinned_mem_limit 0 {number}{unit}\nget_default_device_pinned_mem_limit 0\n")
