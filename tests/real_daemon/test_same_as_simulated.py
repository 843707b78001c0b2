"""The simulated nvidia-cuda-mps-control against the real one: same words in, same words and exit code out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpushare.connect import connect
from gpushare.host.program import Completed, Programs
from gpushare.mps.control import PROGRAM, start_environment
from gpushare.sim import open_simulated
from gpushare.sim.admin import set_fault
from tests.cli.drive import until
from tests.real_daemon.conftest import PATIENCE_SECONDS

# The programs of these branches hold their driver's version, and no option tells it.
VERSION = re.compile(rb"(?<![0-9.])(5[0-9]{2}\.[0-9]{2,3}(?:\.[0-9]{2})?)(?![0-9.])")
NEWEST_THAT_STARTS_WITHOUT_A_GPU = 570


class Both:
    """The same program twice: the real one, and the simulated one of the same driver."""

    def __init__(self, directory: Path, real: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self._real, self._patch = real, monkeypatch
        # Real ones run where the variable names them, and a simulated host asks for it too.
        found = VERSION.search(Path(real).read_bytes())
        self.driver = found.group(1).decode() if found else ""
        self._programs: dict[str, Programs] = {"real": Programs(), "simulated": open_simulated("sim:h200").programs}
        self.uuid = connect("sim:h200").nvml.sweep()[0].uuid or ""

    def starts(self) -> bool:
        """Return whether the real daemon starts without a GPU."""
        return int(self.driver.split(".")[0]) <= NEWEST_THAT_STARTS_WITHOUT_A_GPU

    def run(self, side: str, argv: list[str], stdin: str = "", **changes: str) -> Completed:
        """Run one of the two in its own directories, or in those that are named below them."""
        self._patch.setenv("GPUSHARE_MPS_CONTROL", self._real if side == "real" else "")
        home = self.directory / f"{side:.4}"
        pipe, log = home / changes.get("pipe", "p"), home / changes.get("log", "l")
        if not changes:
            pipe.mkdir(parents=True, exist_ok=True)
            log.mkdir(exist_ok=True)
        environment = start_environment(self.uuid, str(pipe), str(log))
        return self._programs[side].run([PROGRAM, *argv], stdin=stdin, env=environment, timeout=PATIENCE_SECONDS)

    def same(self, stdin: str, argv: list[str] | None = None, **changes: str) -> Completed:
        """Run both and compare, each stream for itself; return what they did."""
        real, simulated = (self.run(side, argv or [], stdin, **changes) for side in ("real", "simulated"))
        there, here = (
            (done.exit_code, *(text.replace(f"/{side:.4}/", "/") for text in (done.stdout, done.stderr)))
            for side, done in (("real", real), ("simulated", simulated))
        )
        assert here == there, (argv, stdin)
        return real


@pytest.fixture
def both(sim_dir: Path, real_control: str, monkeypatch: pytest.MonkeyPatch) -> Both:
    """Return both programs, of one driver, with no daemon yet."""
    pair = Both(sim_dir, real_control, monkeypatch)
    if not pair.driver:
        pytest.skip("the real program does not tell its driver's version")
    set_fault("sim:h200", "driver", value=pair.driver)
    if not pair.starts():
        # As on this machine: no libcuda.so.1.
        set_fault("sim:h200", "no-nvml")
    return pair


@pytest.fixture
def started(both: Both) -> Both:
    """Return both programs with a daemon each."""
    if not both.starts():
        pytest.skip("the daemon of this driver does not start without a GPU")
    both.same("", ["-d"])

    def answers() -> bool:
        return both.run("real", [], "get_server_list\n").exit_code == 0

    until(answers, "both answer")
    return both


@pytest.mark.parametrize("argv", [["-d"], ["-d", "-x"], ["-d", ""]], ids=str)
def test_a_second_start(started: Both, argv: list[str]) -> None:
    started.same("", argv)
    assert started.same("", ["-d"]).exit_code == 1


@pytest.mark.parametrize("argv", [["-v"], ["bogus"], ["get_default_client_priority"]], ids=str)
def test_arguments_beside_a_daemon(started: Both, argv: list[str]) -> None:
    started.same("", argv)
    started.same("get_default_active_thread_percentage\n", argv)


@pytest.mark.parametrize("log", ["l", "no/such/l"])
def test_directories_that_cannot_be_used(both: Both, log: str) -> None:
    """A pipe directory without a parent, one with too long a path, and one that is in use."""
    for side in ("real", "simu"):
        (both.directory / side / "l").mkdir(parents=True)
    both.same("", ["-d"], pipe="no/such/p", log=log)
    both.same("", ["-d"], pipe="p" * 90, log=log)
    if both.starts():
        assert both.same("", ["-d"], pipe="q", log=log).exit_code == 0
        assert both.same("", ["-d"], pipe="q", log=log).exit_code == 1


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
        "get_server_status 999999\n",
        "get_server_status\n",
        "get_active_thread_percentage 999999\n",
        "set_active_thread_percentage 999999 20\n",
        "get_device_pinned_mem_limit 999999 0\n",
        "set_device_pinned_mem_limit 999999 0 1G\n",
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
        *("50", "50.0", "33.33", "0.1", "0", "0.04", "100", "100.1", "-5", "400", "abc", "", "50%", "1e1", "5 6"),
        *("nan", "inf"),
    ],
)
def test_thread_percentages(started: Both, value: str) -> None:
    started.same("set_default_active_thread_percentage 40\n")
    started.same(f"set_default_active_thread_percentage {value}\nget_default_active_thread_percentage\n")


@pytest.mark.parametrize(
    "value",
    [
        *("1G", "3g", "512M", "512MB", "1.5G", "1024K", "2000", "2000M", "0G", "0", "abc", "", "1T", "5 G"),
        *("99999G", "G", "1GG", "16MiB"),
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


# What gpushare asks and sets; the rest of the program's commands are unknown to the simulated one.
COMMANDS = (
    *("get_server_list", "get_server_status", "ps"),
    *("get_default_active_thread_percentage", "set_default_active_thread_percentage"),
    *("get_active_thread_percentage", "set_active_thread_percentage", "set_default_device_pinned_mem_limit"),
    *("get_default_device_pinned_mem_limit", "set_device_pinned_mem_limit", "get_device_pinned_mem_limit"),
    *("set_default_client_priority", "get_default_client_priority", "foo"),
)
WRONG = (
    *("", "0", "1", "abc", "-1", "+1", "01", "1.5", "1e400", "nan", ".5", "%s%n", "1;2", "'1'", "\\"),
    *("999999 0", "999999 0 1G", "abc 2G", "1x 7G", "GPU-0 2G", "GPU-0", "MIG-0 1G", "-1 1G", "31 1G", "32 1G"),
    *("0 1mg", "0 3 G", "0\t9G", "  0   9G", "é", "-f"),
)


@pytest.mark.parametrize("command", COMMANDS)
def test_wrong_words_after_every_command(started: Both, command: str) -> None:
    """All in one conversation, each after a limit, a share and a priority that a mistake would change."""
    before = "set_default_device_pinned_mem_limit 0 5G\nset_default_client_priority 1\nset_default_active_thread_percentage 40\n"
    after = "get_default_device_pinned_mem_limit 0\nget_default_client_priority\nget_default_active_thread_percentage\n"
    started.same("".join(f"{before}{command} {words}\n{after}" for words in WRONG))


@pytest.mark.parametrize("command", ["quit\n", "quit -t 1\n"])
def test_quit(started: Both, command: str) -> None:
    started.same(command)

    def gone() -> bool:
        return started.run("real", [], "get_server_list\n").exit_code != 0

    until(gone, "both have ended")
    started.same("get_server_list\n")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(whole=st.integers(0, 120), tenths=st.integers(0, 9))
def test_any_percentage(started: Both, whole: int, tenths: int) -> None:
    started.same(f"set_default_active_thread_percentage {whole}.{tenths}\nget_default_active_thread_percentage\n")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(number=st.integers(0, 4_000_000), unit=st.sampled_from("MG"))
def test_any_memory_limit(started: Both, number: int, unit: str) -> None:
    started.same(f"set_default_device_pinned_mem_limit 0 {number}{unit}\nget_default_device_pinned_mem_limit 0\n")
